"""This package."""

import numpy as np
import tensorflow as tf

from benchmarks.peer_keras import adamw, compiled, fit
from benchmarks.problems import CLIP_NORM
from keras_tinyattn import CausalSelfAttention, causal_lm_from_gpt2, make_train_step


def layer(problem, jit_compile, blockwise):
    """`CausalSelfAttention`, dense or by blocks."""
    attention = CausalSelfAttention(
        problem.D // problem.H, num_heads=problem.H, output_dim=problem.D, blockwise=blockwise
    )
    attention.build(problem.inputs.shape)
    for name, kernel in zip(("query", "key", "value", "output"), problem.kernels, strict=True):
        getattr(attention, f"{name}_kernel").assign(kernel)
    return compiled(attention, attention.trainable_variables, problem, jit_compile)


def generate(problem, jit_compile, share=1, unequal=False):
    """`CausalLM.generate`, greedy: ids `(B, share * new_tokens)`.

    With `unequal`, every second prompt is half as long.
    """
    model = causal_lm_from_gpt2(problem.state_dict, problem.H)
    new_tokens = int(share * problem.new_tokens)
    prompts = list(problem.prompts)
    if unequal:
        prompts[1::2] = [prompt[: problem.prompt_length // 2] for prompt in prompts[1::2]]

    def compute():
        token_ids = model.generate(prompts, new_tokens, jit_compile=jit_compile).token_ids
        rows = zip(token_ids, prompts, strict=True)
        return np.stack([row[len(prompt) : len(prompt) + new_tokens] for row, prompt in rows])

    return compute


def train(problem, use_fit=False):
    """The train step, or Keras' fit with our model: the mean loss of the problem's steps."""
    model = causal_lm_from_gpt2(problem.state_dict, problem.H)
    if use_fit:
        return fit(model, problem, jit_compile=True)
    step = make_train_step(model, adamw(), clip_norm=CLIP_NORM)
    batches = [
        (tf.constant(inputs), tf.constant(targets))
        for inputs, targets in zip(problem.inputs, problem.targets, strict=True)
    ]
    return lambda: np.mean([step(*batch).numpy() for batch in batches])

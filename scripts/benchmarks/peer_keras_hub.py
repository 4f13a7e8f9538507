"""KerasHub: the attention of its causal decoders, and its GPT-2's generate."""

import keras_hub
import numpy as np
from keras import ops

from benchmarks.peer_keras import compiled, head_kernels, set_block
from benchmarks.problems import by_block


def layer(problem, jit_compile):
    """`CachedMultiHeadAttention`, which is handed its mask."""
    attention = keras_hub.layers.CachedMultiHeadAttention(
        problem.H, problem.D // problem.H, use_bias=False
    )
    attention.build(problem.inputs.shape, problem.inputs.shape)
    attention.set_weights(head_kernels(problem.kernels, problem.H))

    def call(x):
        positions = ops.arange(problem.T)
        return attention(x, x, attention_mask=(positions[:, None] >= positions)[None])

    return compiled(call, attention.trainable_variables, problem, jit_compile)


def generate(problem, jit_compile):
    """`GPT2CausalLM.generate`, greedy: ids `(B, new_tokens)`."""
    weights = problem.state_dict
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=problem.V,
        num_layers=problem.num_layers,
        num_heads=problem.H,
        hidden_dim=problem.D,
        intermediate_dim=4 * problem.D,
        dropout=0.0,
        max_sequence_length=problem.T,
    )
    backbone.token_embedding.embeddings.assign(weights["wte.weight"])
    backbone.position_embedding.position_embeddings.assign(weights["wpe.weight"])
    for part, block in zip(backbone.transformer_layers, by_block(weights), strict=True):
        parts = [
            part._self_attention_layer_norm,
            part._self_attention_layer,
            part._feedforward_layer_norm,
            part._feedforward_intermediate_dense,
            part._feedforward_output_dense,
        ]
        set_block(parts, block, problem.H)
    backbone.layer_norm.set_weights([weights["ln_f.weight"], weights["ln_f.bias"]])
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(sampler="greedy", jit_compile=jit_compile)
    length = problem.prompt_length
    padded = np.pad(problem.prompts, ((0, 0), (0, problem.new_tokens)))
    mask = np.broadcast_to(np.arange(padded.shape[1]) < length, padded.shape).copy()
    request = {"token_ids": padded, "padding_mask": mask}
    return lambda: np.asarray(model.generate(request, stop_token_ids=None)["token_ids"])[:, length:]

"""JAX, jitted: `dot_product_attention`, and a GPT-2 that generates in a `while_loop`."""

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.problems import by_block


def layer(problem):
    """`jax.nn.dot_product_attention` behind one matrix for queries, keys and values."""
    B, T, D, H = problem.B, problem.T, problem.D, problem.H
    inputs, upstream = jnp.asarray(problem.inputs), jnp.asarray(problem.upstream)
    joined = jnp.asarray(np.concatenate(problem.kernels[:3], axis=1))
    output = jnp.asarray(problem.kernels[3])

    def call(inputs, joined, output):
        queries, keys, values = jnp.split((inputs @ joined).reshape(B, T, 3 * H, D // H), 3, axis=2)
        attended = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        return attended.reshape(B, T, D) @ output

    def loss(*arguments):
        return (call(*arguments) * upstream).sum()

    if problem.direction == "forward":
        forward = jax.jit(call)
        return lambda: np.asarray(forward(inputs, joined, output))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return lambda: np.asarray(jax.block_until_ready(gradients(inputs, joined, output))[0])


def generate(problem):
    """A greedy loop with a key-value cache in one jitted function: ids `(B, new_tokens)`."""
    weights = {name: jnp.asarray(array) for name, array in problem.state_dict.items()}
    B, H, head_dim, prompt_length = problem.B, problem.H, problem.D // problem.H, problem.prompt_length
    total = prompt_length + problem.new_tokens

    def norm(x, weight, bias):
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * weight + bias

    def linear(x, kernel, bias):
        return x @ kernel + bias

    def forward(weights, tokens, start, cache):
        length = tokens.shape[1]
        positions = start + jnp.arange(length)
        mask = positions[:, None] >= jnp.arange(total)[None, :]
        x, kept = weights["wte.weight"][tokens] + weights["wpe.weight"][positions], []
        for block, (keys, values) in zip(by_block(weights), cache, strict=True):
            q, k, v = (
                part.reshape(B, length, H, head_dim).transpose(0, 2, 1, 3)
                for part in jnp.split(
                    linear(norm(x, *block["ln_1"]), *block["attn.c_attn"]), 3, axis=-1
                )
            )
            keys = lax.dynamic_update_slice(keys, k, (0, 0, start, 0))
            values = lax.dynamic_update_slice(values, v, (0, 0, start, 0))
            kept.append((keys, values))
            scores = q @ keys.swapaxes(-1, -2) * head_dim**-0.5
            attended = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ values
            x = x + linear(attended.transpose(0, 2, 1, 3).reshape(x.shape), *block["attn.c_proj"])
            expanded = jax.nn.gelu(
                linear(norm(x, *block["ln_2"]), *block["mlp.c_fc"]), approximate=True
            )
            x = x + linear(expanded, *block["mlp.c_proj"])
        logits = norm(x[:, -1], weights["ln_f.weight"], weights["ln_f.bias"]) @ weights["wte.weight"].T
        return logits.argmax(-1).astype("int32")[:, None], kept

    @jax.jit
    def run(weights, prompts):
        empty = jnp.zeros((B, H, total, head_dim))
        token, cache = forward(weights, prompts, 0, [(empty, empty)] * problem.num_layers)
        new = jnp.zeros((B, problem.new_tokens), "int32")

        def step(state):
            index, token, new, cache = state
            new = lax.dynamic_update_slice(new, token, (0, index))
            token, cache = forward(weights, token, prompt_length + index, cache)
            return index + 1, token, new, cache

        # The last token is written, not fed.
        index, token, new, _ = lax.while_loop(
            lambda state: state[0] < problem.new_tokens - 1, step, (0, token, new, cache)
        )
        return lax.dynamic_update_slice(new, token, (0, index))

    prompts = jnp.asarray(problem.prompts)
    return lambda: np.asarray(run(weights, prompts))

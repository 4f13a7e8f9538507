"""The same attention layer as several libraries build it, to be compared by a benchmark.

A peer is one function: it takes a `Problem` and returns a function of no arguments for each of
DIRECTIONS, which computes and gives back a NumPy array: the output `(B, T, D)`, or the gradient with
respect to the inputs, `(B, T, D)`. The libraries are imported by the peers that need them.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

DIRECTIONS = ("forward", "forward+backward")


class Shape(NamedTuple):
    """The sizes of a layer and of its input; the head is D / H wide."""

    B: int
    T: int
    D: int
    H: int


class Problem(NamedTuple):
    """One layer's numbers: causal self-attention with an output projection and no bias, float32."""

    shape: Shape
    inputs: Any  # (B, T, D)
    kernels: Any  # four of (D, D): query, key, value, output
    upstream: Any  # (B, T, D), the gradient of the loss with respect to the output


def make_problem(shape, seed=0):
    """Random numbers for a layer, of such a size that the weights are neither even nor one-hot."""
    random = np.random.default_rng(seed)

    def normal(*sizes):
        return random.standard_normal(sizes, dtype=np.float32)

    inputs, upstream = normal(shape.B, shape.T, shape.D), normal(shape.B, shape.T, shape.D)
    kernels = [normal(shape.D, shape.D) * np.float32(shape.D**-0.5) for _ in range(4)]
    return Problem(shape, inputs, kernels, upstream)


def tinyattn(problem, blockwise, jit_compile):
    """This package's layer, dense or by blocks."""
    from keras_tinyattn import CausalSelfAttention

    _, _, D, H = problem.shape
    layer = CausalSelfAttention(D // H, num_heads=H, output_dim=D, blockwise=blockwise)
    layer.build(problem.inputs.shape)
    layer.set_weights(problem.kernels)
    return _tensorflow(layer, layer.trainable_variables, problem, jit_compile)


def keras_layer(problem, jit_compile):
    """`keras.layers.MultiHeadAttention`, its causal mask asked for by its own argument."""
    import keras

    _, _, D, H = problem.shape
    layer = keras.layers.MultiHeadAttention(H, D // H, use_bias=False)
    layer.build(problem.inputs.shape, problem.inputs.shape)
    _set_head_kernels(layer, problem)
    return _tensorflow(
        lambda x: layer(x, x, use_causal_mask=True), layer.trainable_variables, problem, jit_compile
    )


def keras_hub_layer(problem, jit_compile):
    """The attention of KerasHub's causal decoders, which are handed their mask."""
    import keras_hub
    from keras import ops

    _, T, D, H = problem.shape
    layer = keras_hub.layers.CachedMultiHeadAttention(H, D // H, use_bias=False)
    layer.build(problem.inputs.shape, problem.inputs.shape)
    _set_head_kernels(layer, problem)

    def call(x):
        positions = ops.arange(T)
        return layer(x, x, attention_mask=(positions[:, None] >= positions)[None])

    return _tensorflow(call, layer.trainable_variables, problem, jit_compile)


def torch_module(problem):
    """`torch.nn.functional.scaled_dot_product_attention` behind one matrix for Q, K and V."""
    import torch

    B, T, D, H = problem.shape
    inputs, upstream = torch.from_numpy(problem.inputs), torch.from_numpy(problem.upstream)
    inputs.requires_grad_(True)
    joined = torch.nn.Linear(D, 3 * D, bias=False)
    output = torch.nn.Linear(D, D, bias=False)
    with torch.no_grad():
        joined.weight.copy_(torch.from_numpy(np.concatenate(problem.kernels[:3], axis=1).T))
        output.weight.copy_(torch.from_numpy(problem.kernels[3].T))

    def call():
        heads = joined(inputs).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return output(attended.transpose(1, 2).reshape(B, T, D))

    def forward():
        with torch.inference_mode():
            return call().numpy()

    def backward():
        loss = (call() * upstream).sum()
        gradients = torch.autograd.grad(loss, [inputs, joined.weight, output.weight])
        return gradients[0].numpy()

    return dict(zip(DIRECTIONS, (forward, backward), strict=True))


def jax_function(problem):
    """`jax.nn.dot_product_attention` behind one matrix for Q, K and V, jitted."""
    import jax
    from jax import numpy as jnp

    B, T, D, H = problem.shape
    inputs, upstream = jnp.asarray(problem.inputs), jnp.asarray(problem.upstream)
    kernels = (
        jnp.asarray(np.concatenate(problem.kernels[:3], axis=1)),
        jnp.asarray(problem.kernels[3]),
    )

    def call(inputs, kernels):
        queries, keys, values = jnp.split((inputs @ kernels[0]).reshape(B, T, 3 * H, D // H), 3, axis=2)
        attended = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        return attended.reshape(B, T, D) @ kernels[1]

    compiled = jax.jit(call)
    gradients = jax.jit(
        jax.value_and_grad(lambda *arguments: (call(*arguments) * upstream).sum(), argnums=(0, 1))
    )
    return {
        "forward": lambda: np.asarray(compiled(inputs, kernels)),
        "forward+backward": lambda: np.asarray(gradients(inputs, kernels)[1][0]),
    }


def _set_head_kernels(layer, problem):
    """Give Keras' layer the kernels, which it keeps a head at a time."""
    shapes = [variable.shape for variable in layer.trainable_variables]
    layer.set_weights([k.reshape(s) for k, s in zip(problem.kernels, shapes, strict=True)])


def _tensorflow(call, variables, problem, jit_compile):
    import tensorflow as tf

    inputs, upstream = tf.constant(problem.inputs), tf.constant(problem.upstream)

    def loss_and_gradients(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(call(inputs) * upstream)
        gradients = tape.gradient(loss, [inputs, *variables])
        if any(gradient is None for gradient in gradients):
            # A variable that was traced as a constant: less would be timed than a training step.
            raise ValueError("A benchmark's backward pass reaches not every weight.")
        return loss, gradients

    compiled = tf.function(call, autograph=False, jit_compile=jit_compile)
    backward = tf.function(loss_and_gradients, autograph=False, jit_compile=jit_compile)
    return {
        "forward": lambda: compiled(inputs).numpy(),
        "forward+backward": lambda: backward(inputs)[1][0].numpy(),
    }


def _in_graph_and_xla(name, peer, **settings):
    return {
        f"{name}, graph": functools.partial(peer, jit_compile=False, **settings),
        f"{name}, XLA": functools.partial(peer, jit_compile=True, **settings),
    }


# The columns against which all are held: the better of the two is 1.
BASELINES = ("Keras, graph", "Keras, XLA")
OURS = "tinyattn"
COLUMNS = {
    **_in_graph_and_xla(f"{OURS} dense", tinyattn, blockwise=False),
    **_in_graph_and_xla(f"{OURS} blockwise", tinyattn, blockwise=True),
    **_in_graph_and_xla("Keras", keras_layer),
    **_in_graph_and_xla("KerasHub", keras_hub_layer),
    "torch": torch_module,
    "JAX": jax_function,
}
# What must be installed beyond this package's own needs: module and distribution.
NEEDS = {
    "KerasHub, graph": ("keras_hub", "keras-hub"),
    "KerasHub, XLA": ("keras_hub", "keras-hub"),
    "torch": ("torch", "torch"),
    "JAX": ("jax", "jax"),
}

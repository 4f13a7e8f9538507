"""Keras: its own attention layer, and a GPT-2 of its own layers in its own fit.

It also has what all peers on TensorFlow share: how a function is compiled and a model is fit.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from benchmarks.problems import CLIP_NORM, EPSILON, LEARNING_RATE, WEIGHT_DECAY, by_block


def layer(problem, jit_compile):
    """`keras.layers.MultiHeadAttention`, its causal mask asked for by its own argument."""
    attention = layers.MultiHeadAttention(problem.H, problem.D // problem.H, use_bias=False)
    attention.build(problem.inputs.shape, problem.inputs.shape)
    attention.set_weights(head_kernels(problem.kernels, problem.H))
    return compiled(
        lambda x: attention(x, x, use_causal_mask=True),
        attention.trainable_variables,
        problem,
        jit_compile,
    )


def train(problem, jit_compile):
    """A model of Keras' own layers, `MultiHeadAttention` among them, in Keras' own fit."""
    weights, blocks = problem.state_dict, by_block(problem.state_dict)
    T, D, H = problem.T, problem.D, problem.H
    token_ids = keras.Input((T,), dtype="int32")
    # Its table is also the projection to logits.
    tokens = layers.ReversibleEmbedding(problem.V, D)
    positions = AddPositions(T)
    x = positions(tokens(token_ids))
    tokens.set_weights([weights["wte.weight"]])
    positions.set_weights([weights["wpe.weight"]])
    for block in blocks:
        attention = layers.MultiHeadAttention(H, D // H)
        norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        expand, contract = layers.Dense(4 * D, activation=tanh_gelu), layers.Dense(D)
        y = norms[0](x)
        x = x + attention(y, y, use_causal_mask=True)
        x = x + contract(expand(norms[1](x)))
        set_block([norms[0], attention, norms[1], expand, contract], block, H)
    final_norm = layers.LayerNormalization(epsilon=1e-5)
    x = final_norm(x)
    final_norm.set_weights([weights["ln_f.weight"], weights["ln_f.bias"]])
    return fit(keras.Model(token_ids, tokens(x, reverse=True)), problem, jit_compile)


def head_kernels(kernels, H):
    """Kernels of queries, keys, values and outputs with an axis of heads, as Keras keeps them."""
    D = len(kernels[0])
    *parts, output = kernels
    return [*(kernel.reshape(D, H, D // H) for kernel in parts), output.reshape(H, D // H, D)]


def set_block(parts, block, H):
    """Give a block's weights to its layers: norm, `MultiHeadAttention`, norm, two of the MLP."""
    first_norm, attention, *others = parts
    first_norm.set_weights(block["ln_1"])
    kernel, bias = (np.split(array, 3, axis=-1) for array in block["attn.c_attn"])
    output_kernel, output_bias = block["attn.c_proj"]
    kernels = head_kernels([*kernel, output_kernel], H)
    biases = [*(part.reshape(H, -1) for part in bias), output_bias]
    attention.set_weights([array for pair in zip(kernels, biases, strict=True) for array in pair])
    for part, name in zip(others, ("ln_2", "mlp.c_fc", "mlp.c_proj"), strict=True):
        part.set_weights(block[name])


def compiled(call, variables, problem, jit_compile):
    """A function that computes a layer's output, or its gradients and returns that of the inputs."""
    inputs, upstream = tf.constant(problem.inputs), tf.constant(problem.upstream)

    def gradients(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(call(inputs) * upstream)
        gradients = tape.gradient(loss, [inputs, *variables])
        if any(gradient is None for gradient in gradients):
            # A variable that was traced as a constant: less would be timed than a training step.
            raise ValueError("the backward pass does not reach every weight")
        return gradients

    if problem.direction == "forward":
        function = tf.function(call, autograph=False, jit_compile=jit_compile)
        return lambda: function(inputs).numpy()
    function = tf.function(gradients, autograph=False, jit_compile=jit_compile)
    return lambda: function(inputs)[0].numpy()


def adamw(**settings):
    """The optimizer of all peers on TensorFlow."""
    return keras.optimizers.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY, epsilon=EPSILON, **settings)


def fit(model, problem, jit_compile):
    """A function that takes all steps of a problem in Keras' fit and returns the mean loss."""
    model.compile(
        adamw(global_clipnorm=CLIP_NORM),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    inputs, targets = (array.reshape(-1, problem.T) for array in (problem.inputs, problem.targets))
    settings = {"batch_size": problem.B, "shuffle": False, "verbose": 0}
    return lambda: model.fit(inputs, targets, **settings).history["loss"][0]


def tanh_gelu(x):
    return keras.activations.gelu(x, approximate=True)


class AddPositions(layers.Layer):
    """Keras has no layer for it: a table of positions, added."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def build(self, input_shape):
        self.table = self.add_weight(shape=(self.length, input_shape[-1]))

    def call(self, inputs):
        return inputs + self.table

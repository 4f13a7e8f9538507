"""Self-attention: a weighted mean of the values, by how well queries match keys."""

import functools
from typing import Any, NamedTuple

import keras
from keras import constraints, initializers, ops, regularizers

from keras_tinyattn import functional
from keras_tinyattn.layers._arguments import check_rate, check_size, own_draw, sizes
from keras_tinyattn.layers._masks import hide_masked, implicit_mask
from keras_tinyattn.layers._window import attend_window, check_blockwise, choose_form

__all__ = ["AttentionTrace", "ScaledSelfAttention"]


class AttentionTrace(NamedTuple):
    """What an attention layer computes on the way from its input to its output."""

    queries: Any  # (B, H, T, K)
    keys: Any  # (B, H, T, K)
    values: Any  # (B, H, T, K)
    raw_scores: Any  # (B, H, T, T), Q K^T
    scaled_scores: Any  # (B, H, T, T), Q K^T / sqrt(K), before any mask
    weights: Any  # (B, H, T, T)
    output: Any  # (B, T, H * K), or (B, T, output_dim) with an output projection


@keras.saving.register_keras_serializable(package="keras_tinyattn")
class ScaledSelfAttention(keras.layers.Layer):
    """Self-attention: each position takes a weighted mean of the values of all positions.

    Each position asks a question (its query), offers an answer to some question (its key) and
    carries something to say (its value). The weights are the softmax of how well queries match keys,
    `softmax(Q K^T / sqrt(head_dim))`, per head.

    Args:
        head_dim: K, the width of a head's queries, keys and values.
        num_heads: H, the number of heads; their outputs stand side by side.
        output_dim: width of an output projection; none unless given.
        use_bias: whether each projection adds a bias.
        dropout: share of the weights dropped in training, in [0, 1).
        kernel_initializer, bias_initializer: initializers; each kernel is sampled anew, also where the
            initializer has a fixed seed.
        kernel_regularizer, bias_regularizer: regularizers of the kernels and the biases.
        kernel_constraint, bias_constraint: constraints of the kernels and the biases.
        blockwise: whether attention goes by blocks, in memory linear in T. By itself (`None`) it
            does when T is at least 1024 and neither weights, an `attention_mask` nor dropout in
            training is asked for. `True` insists, `False` forbids. Without blocks, a causal window
            of 128 tokens or more goes by strips of queries, if T is known while tracing and neither
            weights nor a mask are asked for.
        seed: seed of the dropout.

    Call arguments:
        inputs: `(B, T, D)`.
        mask: `(B, T)` boolean or 0/1 integers, true where a position is real; the mask that Keras
            attached to the inputs unless given. Padding is not attended to; its own rows come out
            as zeros before any output projection.
        attention_mask: boolean or 0/1 integers of shape `(T, S)`, `(B, T, S)` or `(B, H, T, S)`, where
            an axis of size 1 broadcasts; true where a query may look at a key. Any other integer,
            such as the -1e9 of an additive mask, gives NaN: a compiled function cannot raise.
        return_attention_scores: whether to return the weights as well.
        training: whether dropout is on.

    Returns:
        `output`, `(B, T, H * K)` or `(B, T, output_dim)`; with `return_attention_scores` a pair of
        it and the weights, `(B, H, T, S)`. A query that may look nowhere gets zero weights and, before
        any output projection, zeros.

    Raises:
        ValueError: if an argument is out of range, a mask is of a wrong type or shape, or blockwise
            attention is insisted on together with what it cannot do.

    Example:

    >>> layer = ScaledSelfAttention(head_dim=4)
    >>> output, weights = layer(ops.ones((1, 3, 8)), return_attention_scores=True)
    >>> output.shape, weights.shape
    (TensorShape([1, 3, 4]), TensorShape([1, 1, 3, 3]))

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.
    """

    _causal = False

    def __init__(
        self,
        head_dim,
        num_heads=1,
        output_dim=None,
        use_bias=False,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        blockwise=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.head_dim = check_size("head_dim", head_dim)
        self.num_heads = check_size("num_heads", num_heads)
        self.output_dim = None if output_dim is None else check_size("output_dim", output_dim)
        self.use_bias = bool(use_bias)
        self.dropout = check_rate(dropout)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self.blockwise = check_blockwise(blockwise, dropout)
        self.seed = seed
        self._dropout = None
        if self.dropout:
            self._dropout = keras.layers.Dropout(self.dropout, seed=seed, dtype=self.dtype_policy)

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                "Self-attention needs a batch of sequences of vectors of known width. "
                f"Expected inputs of shape (B, T, D). Received: shape {tuple(input_shape)}. "
                "Put a batch axis of size 1 before a single sequence."
            )
        inner_dim = self.num_heads * self.head_dim
        self.query_kernel, self.query_bias = self._projection("query", input_shape[-1], inner_dim, 0)
        self.key_kernel, self.key_bias = self._projection("key", input_shape[-1], inner_dim, 1)
        self.value_kernel, self.value_bias = self._projection("value", input_shape[-1], inner_dim, 2)
        if self.output_dim is not None:
            self.output_kernel, self.output_bias = self._projection(
                "output", inner_dim, self.output_dim, 3
            )

    def call(
        self, inputs, mask=None, attention_mask=None, return_attention_scores=False, training=None
    ):
        output, weights, _, _ = self._attend_window(
            inputs, mask, attention_mask, return_attention_scores, training
        )
        return (output, weights) if return_attention_scores else output

    def compute_mask(self, inputs, previous_mask):
        # As a tensor: of a list, Keras would pass on the first entry.
        return None if previous_mask is None else ops.convert_to_tensor(previous_mask)

    def get_config(self):
        return {
            **super().get_config(),
            "head_dim": self.head_dim,
            "num_heads": self.num_heads,
            "output_dim": self.output_dim,
            "use_bias": self.use_bias,
            "dropout": self.dropout,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "kernel_regularizer": regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": regularizers.serialize(self.bias_regularizer),
            "kernel_constraint": constraints.serialize(self.kernel_constraint),
            "bias_constraint": constraints.serialize(self.bias_constraint),
            "blockwise": self.blockwise,
            "seed": self.seed,
        }

    def trace(self, inputs, mask=None, attention_mask=None):
        """Everything the layer computes for these inputs, by the operations that `call` runs.

        Args:
            inputs: `(B, T, D)`.
            mask: as in `call`.
            attention_mask: as in `call`.

        Returns:
            An `AttentionTrace`.

        Raises:
            ValueError: if the layer is not built.
        """
        if not self.built:
            raise ValueError(
                f"{type(self).__name__} has no weights to trace. "
                "Expected a built layer. Received: a layer that was never called. "
                "Call it on an input first, or call build(input_shape)."
            )
        mask = implicit_mask(inputs) if mask is None else mask
        inputs = ops.cast(ops.convert_to_tensor(inputs), self.compute_dtype)
        masks = (mask, attention_mask, self.num_heads, self._causal)
        inputs, padding, attention_mask = hide_masked(inputs, *masks)
        queries, keys, values = self._project(inputs)
        attended, weights = attend_window(
            "dense", queries, keys, values, padding, attention_mask, self._causal, dropout=None
        )
        raw = functional.attention_scores(queries, keys)
        scaled = functional.attention_scores(queries * self.head_dim**-0.5, keys)
        output = self._output(attended)
        return AttentionTrace(queries, keys, values, raw, scaled, weights, output)

    def precompute(self):
        """What the layer computes from its weights alone, which a loop over many calls does once.

        Returns:
            One kernel for queries, keys and values, `(D, 3 H K)`, and with `use_bias` one bias,
            `(3, H, 1, K)`: a tuple of tensors in the compute dtype.
        """

        def cast(*variables):
            return [ops.cast(variable, self.compute_dtype) for variable in variables]

        kernels = cast(self.query_kernel, self.key_kernel, self.value_kernel)
        kernel = ops.concatenate(kernels, axis=-1)
        if not self.use_bias:
            return (kernel,)
        biases = cast(self.query_bias, self.key_bias, self.value_bias)
        return kernel, ops.reshape(ops.stack(biases), (3, self.num_heads, 1, self.head_dim))

    def graph_key(self):
        """What a graph of the layer depends on, apart from its variables; hashable."""
        dims = (self.head_dim, self.num_heads, self.output_dim)
        return (*dims, self.use_bias, self.dropout, self.blockwise)

    # One forward pass, one method per stage.

    def _attend_window(
        self, inputs, mask, attention_mask, return_attention_scores, training, precomputed=None
    ):
        """The output, the weights if asked for, and the keys and values `(B, H, T, K)`."""
        mask = implicit_mask(inputs) if mask is None else mask
        form = choose_form(
            inputs.shape[1],
            self._causal,
            self.blockwise,
            padded=mask is not None,
            masked=attention_mask is not None,
            returns_weights=return_attention_scores,
            drops=self.dropout and training,
        )
        masks = (mask, attention_mask, self.num_heads, self._causal)
        inputs, padding, attention_mask = hide_masked(inputs, *masks)
        queries, keys, values = self._project(inputs, precomputed)
        attended, weights = attend_window(
            *(form, queries, keys, values, padding, attention_mask),
            causal=self._causal,
            dropout=self._dropout_in(training),
        )
        return self._output(attended), weights, keys, values

    def _project(self, inputs, precomputed=None):
        """(B, T, D) -> three of (B, H, T, K)."""
        kernel, *bias = self.precompute() if precomputed is None else precomputed
        batch, length, width = sizes(inputs)
        # As one matrix: a product of three axes costs a plain graph a dozen operations on shapes.
        projected = ops.matmul(ops.reshape(inputs, (-1, width)), kernel)
        if inputs.shape[1] == 1:
            # One token per row: an axis of size 1 need not move. A bias that follows the product
            # directly would be fused into it by TensorFlow, and that kernel is slower.
            projected = ops.reshape(projected, (batch, 3, self.num_heads, 1, self.head_dim))
            return ops.unstack(projected + bias[0] if bias else projected, axis=1)
        if bias:
            projected = projected + ops.reshape(bias[0], (-1,))
        projected = ops.reshape(projected, (batch, length, 3, self.num_heads, self.head_dim))
        return ops.unstack(ops.transpose(projected, (2, 0, 3, 1, 4)), axis=0)

    def _dropout_in(self, training):
        return self._dropout and functools.partial(self._dropout, training=training)

    def _output(self, attended):
        """(B, H, T, K) -> (B, T, H * K), projected if there is a projection."""
        batch, _, length, _ = sizes(attended)
        width = self.num_heads * self.head_dim
        output = attended if attended.shape[2] == 1 else ops.transpose(attended, (0, 2, 1, 3))
        if self.output_dim is None:
            return ops.reshape(output, (batch, length, width))
        # Cast here, so that a trace, which runs outside `__call__`, computes in the same type.
        kernel = ops.cast(self.output_kernel, self.compute_dtype)
        output = ops.matmul(ops.reshape(output, (-1, width)), kernel)
        output = ops.reshape(output, (batch, length, self.output_dim))
        if self.output_bias is None:
            return output
        return ops.add(output, ops.cast(self.output_bias, self.compute_dtype))

    def _projection(self, name, input_dim, output_dim, index):
        kernel = self.add_weight(
            name=f"{name}_kernel",
            shape=(input_dim, output_dim),
            initializer=own_draw(self.kernel_initializer, index),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        if not self.use_bias:
            return kernel, None
        bias = self.add_weight(
            name=f"{name}_bias",
            shape=(output_dim,),
            initializer=own_draw(self.bias_initializer, index),
            regularizer=self.bias_regularizer,
            constraint=self.bias_constraint,
        )
        return kernel, bias

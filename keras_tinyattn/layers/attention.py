"""Self-attention: a weighted mean of the values, by how well queries match keys."""

from typing import Any, NamedTuple

import keras
from keras import constraints, initializers, ops, regularizers

from keras_tinyattn import functional
from keras_tinyattn.layers._arguments import check_rate, check_size, own_draw, sizes
from keras_tinyattn.layers._masks import hide_padding, implicit_mask, join_masks

__all__ = ["AttentionTrace", "ScaledSelfAttention"]

# From this many tokens on, attention goes by blocks: below, matrices of scores are faster.
BLOCKWISE_FROM = 1024
# Queries of a causal strip, and strips of a window: more would save scores and cost operations.
LEAST_STRIP, MOST_STRIPS = 64, 8


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
    """Self-attention: every position takes a weighted mean of what all positions have to say.

    Each position asks a question (its query), offers an answer to some question (its key) and
    carries something to say (its value). The weights are the softmax of how well queries match keys,
    `softmax(Q K^T / sqrt(head_dim))`, a head at a time.

    Args:
        head_dim: K, the width of a head's queries, keys and values.
        num_heads: H, the number of heads; their outputs stand side by side.
        output_dim: width of an output projection; none unless given.
        use_bias: whether each projection adds a bias.
        dropout: share of the weights dropped in training, in [0, 1).
        kernel_initializer: initializer of the kernels; each kernel gets its own draw, also where
            the initializer has a fixed seed.
        bias_initializer: initializer of the biases.
        kernel_regularizer: regularizer of the kernels.
        bias_regularizer: regularizer of the biases.
        kernel_constraint: constraint of the kernels.
        bias_constraint: constraint of the biases.
        blockwise: whether attention goes by blocks, in memory linear in T. By itself (`None`) it
            does when T is known while tracing and at least 1024, and neither weights, an
            `attention_mask` nor dropout in training is asked for. `True` insists, `False` forbids.
            Without blocks, a causal window of 128 known tokens or more goes by strips of queries,
            unless weights or a mask are asked for.
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
        if blockwise not in (None, True, False):
            raise ValueError(
                "blockwise is a choice. Expected True, False, or None to choose by the length. "
                f"Received: blockwise={blockwise!r}."
            )
        if blockwise and self.dropout:
            raise ValueError(
                "Blockwise attention never holds the weights, so it cannot drop any out. "
                f"Expected dropout=0.0 with blockwise=True. Received: dropout={dropout}. "
                "Set dropout to 0, or leave blockwise unset."
            )
        self.blockwise = blockwise
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
        return self._attend_window(inputs, mask, attention_mask, return_attention_scores, training)

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
        rows_may_be_empty = mask is not None or attention_mask is not None
        inputs = ops.cast(ops.convert_to_tensor(inputs), self.compute_dtype)
        inputs, mask = join_masks(inputs, mask, attention_mask, self.num_heads, self._causal)
        queries, keys, values = self._project(inputs)
        weights, attended = self._attend(queries, keys, values, mask, rows_may_be_empty, training=False)
        return AttentionTrace(
            queries,
            keys,
            values,
            functional.attention_scores(queries, keys),
            functional.attention_scores(self._scale(queries), keys),
            weights,
            self._output(attended),
        )

    # One forward pass, a method a stage.

    def _attend_window(self, inputs, mask, attention_mask, return_attention_scores, training):
        mask = implicit_mask(inputs) if mask is None else mask
        if self._goes_by_blocks(inputs, attention_mask, return_attention_scores, training):
            inputs, padding = hide_padding(inputs, mask)
            queries, keys, values = self._project(inputs)
            attended = functional.blockwise_attention(
                self._scale(queries), keys, values, padding, causal=self._causal
            )
            if padding is not None:
                attended = ops.where(padding[:, None, :, None], attended, 0.0)
            return self._output(attended)
        rows_may_be_empty = mask is not None or attention_mask is not None
        inputs, mask = join_masks(inputs, mask, attention_mask, self.num_heads, self._causal)
        queries, keys, values = self._project(inputs)
        length = queries.shape[2]
        if (
            self._causal
            and not (rows_may_be_empty or return_attention_scores)
            and length is not None
            and length >= 2 * LEAST_STRIP
        ):
            return self._output(self._attend_by_strips(queries, keys, values, training))
        weights, attended = self._attend(queries, keys, values, mask, rows_may_be_empty, training)
        output = self._output(attended)
        return (output, weights) if return_attention_scores else output

    def _goes_by_blocks(self, inputs, attention_mask, return_attention_scores, training):
        if self.blockwise is False:
            return False
        if self.blockwise:
            for name, given in (
                ("return_attention_scores=True", return_attention_scores),
                ("attention_mask", attention_mask is not None),
            ):
                if given:
                    raise ValueError(
                        "Blockwise attention never holds a (T, S) matrix. "
                        f"Expected neither weights nor an attention_mask. Received: {name} with "
                        "blockwise=True. Leave it out, or build the layer with blockwise=None."
                    )
            return True
        length = inputs.shape[1]
        dense_wanted = return_attention_scores or attention_mask is not None
        dense_wanted = dense_wanted or (self.dropout and training)
        return not dense_wanted and length is not None and length >= BLOCKWISE_FROM

    def _project(self, inputs):
        """(B, T, D) -> three of (B, H, T, K)."""
        batch, length, width = sizes(inputs)
        # As one matrix: a product of three axes costs a plain graph a dozen operations on shapes.
        tokens = ops.reshape(inputs, (-1, width))

        def heads(kernel, bias):
            projected = self._linear(tokens, kernel, bias)
            if inputs.shape[1] == 1:  # A step: moving an axis of size 1 moves nothing.
                return ops.reshape(projected, (batch, self.num_heads, 1, self.head_dim))
            projected = ops.reshape(projected, (batch, length, self.num_heads, self.head_dim))
            return ops.transpose(projected, (0, 2, 1, 3))

        return (
            heads(self.query_kernel, self.query_bias),
            heads(self.key_kernel, self.key_bias),
            heads(self.value_kernel, self.value_bias),
        )

    def _scale(self, queries):
        return queries * self.head_dim**-0.5

    def _attend(self, queries, keys, values, mask, rows_may_be_empty, training=None, keys_first=False):
        """Weights (B, H, T, S) and what they fetch, (B, H, T, K).

        `keys_first` computes the same scores as keys times queries.
        """
        queries = self._scale(queries)
        if keys_first:
            scores = ops.swapaxes(functional.attention_scores(keys, queries), -1, -2)
        else:
            scores = functional.attention_scores(queries, keys)
        weights = functional.attention_weights(scores, mask, rows_may_be_empty)
        weights = ops.cast(weights, self.compute_dtype)
        kept = weights if self._dropout is None else self._dropout(weights, training=training)
        return weights, ops.matmul(kept, values)

    def _attend_by_strips(self, queries, keys, values, training):
        """What a causal mask alone lets them fetch, without most of the scores above the diagonal."""
        length = queries.shape[2]
        strip = max(LEAST_STRIP, -(-length // MOST_STRIPS))
        starts = range(0, length, strip)
        # Split and joined, not sliced: the gradient of a slice fills up what it left with zeros.
        parts = [ops.split(x, starts[1:], axis=2) for x in (queries, keys, values)]
        attended = []
        for index, start in enumerate(starts):
            seen = [ops.concatenate(part[: index + 1], axis=2) for part in parts[1:]]
            end = min(start + strip, length)
            mask = functional.causal_mask(ops.arange(start, end), ops.arange(end))
            _, fetched = self._attend(parts[0][index], *seen, mask, False, training)
            attended.append(fetched)
        return ops.concatenate(attended, axis=2)

    def _output(self, attended):
        """(B, H, T, K) -> (B, T, H * K), projected if there is a projection."""
        batch, _, length, _ = sizes(attended)
        width = self.num_heads * self.head_dim
        output = attended if attended.shape[2] == 1 else ops.transpose(attended, (0, 2, 1, 3))
        if self.output_dim is not None:
            output = ops.reshape(output, (-1, width))
            output = self._linear(output, self.output_kernel, self.output_bias)
            width = self.output_dim
        return ops.reshape(output, (batch, length, width))

    def _linear(self, x, kernel, bias):
        # Cast here, so that a trace, which runs outside `__call__`, computes in the same type.
        x = ops.matmul(x, ops.cast(kernel, self.compute_dtype))
        return x if bias is None else ops.add(x, ops.cast(bias, self.compute_dtype))

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

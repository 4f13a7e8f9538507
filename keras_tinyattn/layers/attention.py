"""Self-attention: a weighted mean of the values, by how well queries match keys."""

from typing import Any, NamedTuple

import keras
from keras import backend, constraints, initializers, ops, regularizers

from keras_tinyattn import functional
from keras_tinyattn.layers._arguments import check_rate, check_size, own_draw

__all__ = ["AttentionTrace", "CausalSelfAttention", "ScaledSelfAttention"]

# From this many tokens on, attention goes by blocks: below, whole matrices are faster.
BLOCKWISE_FROM = 1024


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
        seed: seed of the dropout.

    Call arguments:
        inputs: `(B, T, D)`.
        mask: `(B, T)` boolean or 0/1 integers, true where a position is real; the mask that Keras
            attached to the inputs unless given. Padding is not attended to; its own rows come out
            as zeros before any output projection.
        attention_mask: boolean or 0/1 integers of shape `(T, S)`, `(B, T, S)` or `(B, H, T, S)`, where
            an axis of size 1 broadcasts; true where a query may look at a key.
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
        if blockwise and self.dropout:
            raise ValueError(
                "Blockwise attention never holds the weights, so it cannot drop any out. "
                f"Expected dropout=0.0 with blockwise=True. Received: dropout={dropout}. "
                "Set dropout to 0, or leave blockwise unset."
            )
        self.blockwise = blockwise
        self.seed = seed
        self.supports_masking = True
        self._dropout = keras.layers.Dropout(self.dropout, seed=seed) if self.dropout else None

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
        inputs = ops.cast(ops.convert_to_tensor(inputs), self.compute_dtype)
        inputs, mask, rows_may_be_empty = self._prepare(inputs, mask, attention_mask)
        queries, keys, values = self._project(inputs)
        weights, attended = self._attend(queries, keys, values, mask, rows_may_be_empty)
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
        if mask is None:
            # Keras fills `mask` by itself only where `inputs` is the one tensor argument.
            mask = getattr(inputs, "_keras_mask", None)
        if self._goes_by_blocks(inputs, attention_mask, return_attention_scores, training):
            mask = _padding_mask(mask, inputs.shape)
            queries, keys, values = self._project(_zero_unless(mask, inputs))
            attended = functional.blockwise_attention(
                self._scale(queries), keys, values, mask, causal=self._causal
            )
            if mask is not None:
                attended = ops.where(mask[:, None, :, None], attended, 0.0)
            return self._output(attended)
        inputs, mask, rows_may_be_empty = self._prepare(inputs, mask, attention_mask)
        queries, keys, values = self._project(inputs)
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

    def _prepare(self, inputs, mask, attention_mask):
        """Join the masks into one, and keep what nobody may look at from reaching anybody.

        A weight of zero does not silence a NaN, since 0 * NaN is NaN, neither in the output nor in
        the gradient of a kernel: such inputs become zeros before they are projected.

        Returns the inputs, a boolean mask that broadcasts to (B, H, T, S) or None, and whether the
        mask may leave a query with no key.
        """
        length = ops.shape(inputs)[1]
        padding = _padding_mask(mask, inputs.shape)
        allowed = _attention_mask(attention_mask, inputs.shape, self.num_heads)
        joined = None
        if self._causal:
            joined = functional.causal_mask(ops.arange(length), ops.arange(length))[None, None]
        if allowed is not None:
            joined = allowed if joined is None else joined & allowed
            # True where some query of some head may look, whichever axes of the mask broadcast.
            seen = ops.any(ops.broadcast_to(joined, (*ops.shape(joined)[:2], length, length)), (1, 2))
            unseen_nan = ~seen & ~ops.all(ops.isfinite(inputs), axis=-1)
            inputs = _zero_unless(~unseen_nan, inputs)
        if padding is not None:
            inputs = _zero_unless(padding, inputs)
            padding = padding[:, None, :, None] & padding[:, None, None, :]
            joined = padding if joined is None else joined & padding
        return inputs, joined, mask is not None or attention_mask is not None

    def _project(self, inputs):
        """(B, T, D) -> three of (B, H, T, K)."""
        batch, length = ops.shape(inputs)[:2]

        def heads(kernel, bias):
            projected = self._linear(inputs, kernel, bias)
            projected = ops.reshape(projected, (batch, length, self.num_heads, self.head_dim))
            return ops.transpose(projected, (0, 2, 1, 3))

        return (
            heads(self.query_kernel, self.query_bias),
            heads(self.key_kernel, self.key_bias),
            heads(self.value_kernel, self.value_bias),
        )

    def _scale(self, queries):
        return queries * self.head_dim**-0.5

    def _attend(self, queries, keys, values, mask, rows_may_be_empty, training=None):
        """Weights (B, H, T, S) and what they fetch, (B, H, T, K)."""
        scores = functional.attention_scores(self._scale(queries), keys)
        weights = functional.attention_weights(scores, mask, rows_may_be_empty)
        weights = ops.cast(weights, self.compute_dtype)
        kept = weights if self._dropout is None else self._dropout(weights, training=training)
        return weights, ops.matmul(kept, values)

    def _output(self, attended):
        """(B, H, T, K) -> (B, T, H * K), projected if there is a projection."""
        batch, _, length, _ = ops.shape(attended)
        joined = ops.transpose(attended, (0, 2, 1, 3))
        joined = ops.reshape(joined, (batch, length, self.num_heads * self.head_dim))
        if self.output_dim is None:
            return joined
        return self._linear(joined, self.output_kernel, self.output_bias)

    def _linear(self, x, kernel, bias):
        # Cast here, so that a trace, which runs outside `__call__`, computes in the same type.
        x = ops.matmul(x, ops.cast(kernel, self.compute_dtype))
        return x if bias is None else x + ops.cast(bias, self.compute_dtype)

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


@keras.saving.register_keras_serializable(package="keras_tinyattn")
class CausalSelfAttention(ScaledSelfAttention):
    """Self-attention in which a position sees itself and the past only.

    It takes the arguments of `ScaledSelfAttention`, and a cache besides: the keys and values of
    the tokens before, so that a step computes its own tokens only.

    Call arguments:
        inputs: `(B, T, D)`; a full window, or with a cache the tokens of this step.
        mask: as in `ScaledSelfAttention`; not with a cache.
        attention_mask: as in `ScaledSelfAttention`; not with a cache.
        cache: a pair of `(B, H, S, K)`, keys and values, as `make_cache` makes it.
        positions: `(T,)` or `(B, T)` integers, the absolute position of each token of the step and
            the slot of the cache into which it goes; required with a cache. A row may be at
            another position than its neighbour, so prompts of unequal length share a batch: padded
            on the right, a slot of padding is unseen until the token that belongs there is written.
        return_attention_scores: whether to return the weights as well.
        training: whether dropout is on.

    Returns:
        `output`, then the weights if `return_attention_scores`, then the new cache if one was
        given. At a position outside the cache output and new keys and values are NaN: nothing is
        clamped or wrapped, and a compiled function cannot raise.

    Raises:
        ValueError: as in `ScaledSelfAttention`; if only one of cache and positions is given, or a
            mask together with a cache.

    Example:

    >>> layer = CausalSelfAttention(head_dim=4)
    >>> x = ops.ones((1, 3, 8))
    >>> window = layer(x)
    >>> cache = layer.make_cache(batch_size=1, length=3)
    >>> step, cache = layer(x[:, :1], cache=cache, positions=ops.array([0]))
    >>> bool(ops.all(ops.isclose(step, window[:, :1])))
    True
    """

    _causal = True

    def call(
        self,
        inputs,
        mask=None,
        attention_mask=None,
        cache=None,
        positions=None,
        return_attention_scores=False,
        training=None,
    ):
        _check_cache(cache, positions)
        if cache is None:
            return self._attend_window(inputs, mask, attention_mask, return_attention_scores, training)
        implicit_mask = getattr(inputs, "_keras_mask", None)
        if any(given is not None for given in (mask, attention_mask, implicit_mask)):
            raise ValueError(
                "A cached step makes its mask from the positions. "
                "Expected neither mask nor attention_mask with a cache. Received: "
                f"mask={'None' if mask is None and implicit_mask is None else 'given'}, "
                f"attention_mask={'None' if attention_mask is None else 'given'}. "
                "Pad on the right and give each row its own positions."
            )
        keys, values = cache
        positions = ops.convert_to_tensor(positions)
        slots = ops.clip(positions, 0, ops.shape(keys)[2] - 1)
        poison = ops.where(ops.equal(slots, positions), 0.0, float("nan"))[..., None]
        slots = ops.cast(slots, "int32")
        queries, new_keys, new_values = self._project(inputs + ops.cast(poison, inputs.dtype))
        keys = _write(keys, slots, new_keys)
        values = _write(values, slots, new_values)
        causal = functional.causal_mask(slots, ops.arange(ops.shape(keys)[2]))
        causal = causal[:, None] if len(causal.shape) == 3 else causal
        weights, attended = self._attend(
            queries, keys, values, causal, rows_may_be_empty=False, training=training
        )
        output = self._output(attended)
        cache = (keys, values)
        return (output, weights, cache) if return_attention_scores else (output, cache)

    def make_cache(self, batch_size, length):
        """An empty cache: a pair of zeros of shape `(batch_size, H, length, K)`, keys and values."""
        shape = (batch_size, self.num_heads, length, self.head_dim)
        return (ops.zeros(shape, self.compute_dtype), ops.zeros(shape, self.compute_dtype))


def _write(cache, slots, update):
    """Put `update` (B, H, T, K) into `cache` (B, H, S, K), each row at its own slots (T,) or (B, T)."""
    batch, num_heads, length, head_dim = ops.shape(cache)
    tokens = ops.shape(update)[2]
    lines = ops.reshape(ops.arange(batch * num_heads) * length, (batch, num_heads, 1))
    lines = lines + (slots if len(slots.shape) == 1 else slots[:, None])
    written = ops.scatter_update(
        ops.reshape(cache, (batch * num_heads * length, head_dim)),
        ops.reshape(lines, (batch * num_heads * tokens, 1)),
        ops.reshape(ops.cast(update, cache.dtype), (batch * num_heads * tokens, head_dim)),
    )
    return ops.reshape(written, (batch, num_heads, length, head_dim))


def _check_cache(cache, positions):
    if (cache is None) != (positions is None):
        raise ValueError(
            "A cached step needs to know where its tokens stand, and a full window starts at 0. "
            "Expected cache and positions together, or neither. Received: "
            f"cache={'given' if cache is not None else None}, "
            f"positions={'given' if positions is not None else None}. Give both, or leave both out."
        )


def _padding_mask(mask, inputs_shape):
    """`mask` as (B, S) booleans, or None."""
    if mask is None:
        return None
    return _as_booleans("mask", mask, {2: inputs_shape[:2]}, "(B, S)", broadcasts=False)


def _attention_mask(mask, inputs_shape, num_heads):
    """`attention_mask` as booleans that broadcast to (B, H, T, S), or None."""
    if mask is None:
        return None
    B, T, _ = inputs_shape
    sizes = {2: (T, T), 3: (B, T, T), 4: (B, num_heads, T, T)}
    letters = "(T, S), (B, T, S) or (B, H, T, S)"
    mask = _as_booleans("attention_mask", mask, sizes, letters, broadcasts=True)
    if len(mask.shape) == 2:
        return mask[None, None]
    return mask[:, None] if len(mask.shape) == 3 else mask


def _as_booleans(name, mask, sizes, letters, broadcasts):
    """Check that a mask is boolean or integer, of a rank in `sizes` and of the sizes given there."""
    mask = ops.convert_to_tensor(mask)
    dtype = backend.standardize_dtype(mask.dtype)
    if dtype != "bool" and "int" not in dtype:
        raise ValueError(
            f"{name} says what may be seen. Expected booleans, or integers 0 and 1. "
            f"Received: {dtype}. Turn a mask of 0 and -inf into `mask == 0`."
        )
    shape = tuple(mask.shape)
    expected = tuple(sizes.get(len(shape), ()))
    if len(shape) not in sizes or not all(
        size is None or wanted is None or size == wanted or (broadcasts and size == 1)
        for size, wanted in zip(shape, expected, strict=True)
    ):
        raise ValueError(
            f"{name} does not fit the inputs. Expected shape {letters}, "
            f"here {' or '.join(str(tuple(size)) for size in sizes.values())}"
            f"{', where an axis of size 1 broadcasts' if broadcasts else ''}. "
            f"Received: shape {shape}. "
            "Padding goes into `mask`, who may look at whom into `attention_mask`."
        )
    return ops.cast(mask, "bool")


def _zero_unless(mask, inputs):
    """Inputs (B, T, D) where the mask (B, T) is true, zeros elsewhere."""
    return inputs if mask is None else ops.where(mask[..., None], inputs, 0.0)

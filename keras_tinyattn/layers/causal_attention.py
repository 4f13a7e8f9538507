"""Causal self-attention: a full window, or a step that continues a cache."""

import keras
from keras import ops

from keras_tinyattn import functional
from keras_tinyattn.layers._arguments import check_positions, fits
from keras_tinyattn.layers._masks import implicit_mask
from keras_tinyattn.layers.attention import ScaledSelfAttention

__all__ = ["CausalSelfAttention"]


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
        ValueError: as in `ScaledSelfAttention`; if only one of cache and positions is given, one of
            them is of another shape, or a mask comes together with a cache.

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
        mask = implicit_mask(inputs) if mask is None else mask
        if mask is not None or attention_mask is not None:
            raise ValueError(
                "A cached step makes its mask from the positions. "
                "Expected neither mask nor attention_mask with a cache. Received: "
                f"mask={'None' if mask is None else 'given'}, "
                f"attention_mask={'None' if attention_mask is None else 'given'}. "
                "Pad on the right and give each row its own positions."
            )
        positions = ops.convert_to_tensor(positions)
        self._check_shapes(inputs, cache, positions)
        keys, values = cache
        if len(positions.shape) == 1:
            positions = ops.broadcast_to(positions, ops.shape(inputs)[:2])
        slots = ops.clip(positions, 0, ops.shape(keys)[2] - 1)
        poison = ops.where(ops.equal(slots, positions), 0.0, float("nan"))[..., None]
        slots = ops.cast(slots, "int32")
        queries, new_keys, new_values = self._project(inputs + ops.cast(poison, inputs.dtype))
        keys, values = _write((keys, values), slots, (new_keys, new_values))
        causal = functional.causal_mask(slots, ops.arange(ops.shape(keys)[2]))
        weights, attended = self._attend(
            queries, keys, values, causal[:, None], rows_may_be_empty=False, training=training
        )
        output = self._output(attended)
        cache = (keys, values)
        return (output, weights, cache) if return_attention_scores else (output, cache)

    def make_cache(self, batch_size, length):
        """An empty cache: a pair of zeros of shape `(batch_size, H, length, K)`, keys and values."""
        shape = (batch_size, self.num_heads, length, self.head_dim)
        return (ops.zeros(shape, self.compute_dtype), ops.zeros(shape, self.compute_dtype))

    def _check_shapes(self, inputs, cache, positions):
        B, T, _ = inputs.shape
        shapes = [tuple(part.shape) for part in cache]
        expected = (B, self.num_heads, shapes[0][2] if len(shapes[0]) == 4 else None, self.head_dim)
        if len(shapes) != 2 or not all(fits(shape, expected) for shape in shapes):
            raise ValueError(
                "The cache does not fit the layer and its inputs. Expected a pair of shape "
                f"(B, H, S, K), here {expected}. Received: {len(shapes)} of shape {shapes}. "
                "Make it with make_cache(batch_size, length)."
            )
        check_positions(positions.shape, B, T)


def _write(caches, slots, updates):
    """Put updates (B, H, T, K) into caches (B, H, S, K), each row at its own slots (B, T)."""
    num_heads, head_dim = updates[0].shape[1], updates[0].shape[3]
    # From the slots, which all layers share: a graph then has these operations once, not once a layer.
    batch, tokens = ops.shape(slots)
    rows = ops.broadcast_to(ops.arange(batch)[:, None, None], (batch, num_heads, tokens))
    heads = ops.broadcast_to(ops.arange(num_heads)[None, :, None], (batch, num_heads, tokens))
    places = ops.broadcast_to(slots[:, None], (batch, num_heads, tokens))
    places = ops.reshape(ops.stack([rows, heads, places], axis=-1), (-1, 3))
    return tuple(
        ops.scatter_update(cache, places, ops.reshape(ops.cast(update, cache.dtype), (-1, head_dim)))
        for cache, update in zip(caches, updates, strict=True)
    )


def _check_cache(cache, positions):
    if (cache is None) != (positions is None):
        raise ValueError(
            "A cached step needs to know where its tokens stand, and a full window starts at 0. "
            "Expected cache and positions together, or neither. Received: "
            f"cache={'given' if cache is not None else None}, "
            f"positions={'given' if positions is not None else None}. Give both, or leave both out."
        )

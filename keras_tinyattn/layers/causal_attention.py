"""Causal self-attention: a full window, or a step that continues a cache."""

import keras
from keras import ops

from keras_tinyattn import functional
from keras_tinyattn.layers._arguments import check_positions, fits
from keras_tinyattn.layers._masks import implicit_mask
from keras_tinyattn.layers.attention import ScaledSelfAttention
from keras_tinyattn.layers.cache import KeyValueCache, Step, make_step

__all__ = ["CausalSelfAttention"]


@keras.saving.register_keras_serializable(package="keras_tinyattn")
class CausalSelfAttention(ScaledSelfAttention):
    """Self-attention in which a position sees itself and the past only.

    It takes the arguments of `ScaledSelfAttention`. In a call it also takes a cache, the keys and
    values of the tokens before, so that a step computes its own tokens only.

    Call arguments:
        inputs: `(B, T, D)`: a window, or the tokens of a step.
        mask: as in `ScaledSelfAttention`; not with a cache.
        attention_mask: as in `ScaledSelfAttention`; not with a cache.
        cache: a pair of `(B, H, S, K)`, keys and values, as `make_cache` makes it.
        positions: which tokens a cache gets. `None` reads a window that begins at position 0 and keeps
            its keys and values in the first T slots. `(T,)` or `(B, T)` integers make a step: each
            token is written into the slot of its position and sees the slots up to it. Each row has
            its own position, so prompts of unequal length share a batch: padded on the right, a slot
            of padding is not seen until the token that belongs there is written. Or the `Step` that a
            `CausalLM` made from positions for all of its blocks.
        precomputed: what `precompute` returned; computed in the call unless given.
        return_attention_scores: whether to return the weights as well.
        training: whether dropout is on.

    Returns:
        `output`, then the weights if `return_attention_scores`, then the new cache if one was
        given. At a position outside the cache output and new keys and values are NaN: nothing is
        clamped or wrapped, and a compiled function cannot raise.

    Raises:
        ValueError: as in `ScaledSelfAttention`; if positions come without a cache, one of them is of
            another shape, more tokens come than there are slots, or a mask comes with a cache.

    Example:

    >>> layer = CausalSelfAttention(head_dim=4)
    >>> x = ops.ones((1, 3, 8))
    >>> window = layer(x)
    >>> _, cache = layer(x[:, :2], cache=layer.make_cache(batch_size=1, length=3))
    >>> step, cache = layer(x[:, 2:], cache=cache, positions=ops.array([2]))
    >>> bool(ops.all(ops.isclose(step, window[:, 2:])))
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
        precomputed=None,
        return_attention_scores=False,
        training=None,
    ):
        _check_cache(cache, positions)
        if cache is None:
            output, weights, _, _ = self._attend_window(
                inputs, mask, attention_mask, return_attention_scores, training, precomputed
            )
            return (output, weights) if return_attention_scores else output
        mask = implicit_mask(inputs) if mask is None else mask
        if mask is not None or attention_mask is not None:
            raise ValueError(
                "A cached step makes its mask from the positions. "
                "Expected neither mask nor attention_mask with a cache. Received: "
                f"mask={'None' if mask is None else 'given'}, "
                f"attention_mask={'None' if attention_mask is None else 'given'}. "
                "Pad on the right and give each row its own positions."
            )
        self._check_cache_shape(inputs, cache)
        if not isinstance(cache, KeyValueCache):
            cache = KeyValueCache(*cache)
        if positions is None:
            output, weights, keys, values = self._attend_window(
                inputs, None, None, return_attention_scores, training, precomputed
            )
            cache = cache.write(keys, values)
        else:
            step = positions
            if not isinstance(step, Step):
                positions = ops.convert_to_tensor(positions)
                check_positions(positions.shape, *inputs.shape[:2])
                step = make_step(positions, cache)
            inputs = inputs + ops.cast(step.poison, inputs.dtype)
            queries, keys, values = self._project(inputs, precomputed)
            cache = cache.write(keys, values, step)
            attended, weights = functional.attend(
                queries,
                *cache,
                step.mask,
                rows_may_be_empty=False,
                keys_first=cache.keys_first and inputs.shape[1] == 1,
                dropout=self._dropout_in(training),
            )
            output = self._output(attended)
        return (output, weights, cache) if return_attention_scores else (output, cache)

    def make_cache(self, batch_size, length):
        """An empty `KeyValueCache`: zeros of shape `(batch_size, H, length, K)`, keys and values."""
        shape = (batch_size, self.num_heads, length, self.head_dim)
        zeros = ops.zeros(shape, self.compute_dtype)
        return KeyValueCache(zeros, ops.zeros(shape, self.compute_dtype))

    def graph_key(self):
        """The same, said again: `declares_graph_key` does not trust an inherited one."""
        return super().graph_key()

    def _check_cache_shape(self, inputs, cache):
        B, T, _ = inputs.shape
        shapes = [tuple(part.shape) for part in cache]
        length = shapes[0][2] if shapes and len(shapes[0]) == 4 else None
        expected = (B, self.num_heads, length, self.head_dim)
        if len(shapes) != 2 or not all(fits(shape, expected) for shape in shapes):
            raise ValueError(
                "The cache does not fit the layer and its inputs. Expected a pair of shape "
                f"(B, H, S, K), here {expected}. Received: {len(shapes)} of shape {shapes}. "
                "Make it with make_cache(batch_size, length)."
            )
        if None not in (T, length) and length < T:
            raise ValueError(
                "The inputs do not fit the cache. Expected at most as many tokens as it has slots, "
                f"here {length}. Received: {T} tokens. Make a longer one with make_cache."
            )


def _check_cache(cache, positions):
    if cache is None and positions is not None:
        raise ValueError(
            "Positions say where tokens go in a cache; a window without one begins at 0. "
            "Expected a cache with positions. Received: positions without a cache. "
            "Give both, or leave positions out."
        )

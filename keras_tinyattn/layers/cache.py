"""Keys and values of the tokens so far, and what follows from where the next tokens stand."""

from typing import Any, NamedTuple

from keras import ops

from keras_tinyattn import functional
from keras_tinyattn.layers._masks import nan_unless


class Step(NamedTuple):
    """What follows from the positions of a cached step; layers with caches of one shape share it."""

    positions: Any  # (B, T) or (T,), the absolute position of each token
    poison: Any  # (B, T, 1): 0, or NaN where a position is outside the cache
    mask: Any  # (B, 1, T, S): which keys a query may see
    slots: Any  # (B * H * T,): the rows of a cache of shape (B * H * S, K) to write
    cache_shape: Any  # (4,): B, H, S, K as a tensor; () where the cache itself knows all four


class KeyValueCache(NamedTuple):
    """The keys and values of one layer; `write` returns the cache with the next ones."""

    keys: Any  # (B, H, S, K)
    values: Any  # (B, H, S, K)

    # How the scores of a single query are computed: XLA, which compiles most loops over such a cache,
    # is 8 to 15% faster with the keys first, and TensorFlow's own kernels 10% slower.
    keys_first = True

    def write(self, keys, values, step=None):
        """Put keys and values of `(B, H, T, K)` into their slots.

        Args:
            keys: the keys of T tokens.
            values: their values.
            step: where they go; without one, into the first T slots.

        Returns:
            A cache of the same class and shape.
        """
        return type(self)(*map(self._put, self, (keys, values), (step, step)))

    def _put(self, part, update, step):
        update = ops.cast(update, part.dtype)
        if step is None:
            return ops.concatenate([update, part[:, :, ops.shape(update)[2] :]], axis=2)
        rows = (-1, part.shape[3])
        written = self._scatter(ops.reshape(part, rows), step.slots, ops.reshape(update, rows))
        static = isinstance(step.cache_shape, tuple)
        written = ops.reshape(written, part.shape if static else step.cache_shape)
        if hasattr(written, "set_shape"):  # TensorFlow lost what was known of it.
            written.set_shape(part.shape)
        return written

    def _scatter(self, rows, slots, update):
        return ops.scatter_update(rows, ops.expand_dims(slots, 1), update)


class InPlaceCache(KeyValueCache):
    """A cache that writes into the memory that it has, where `KeyValueCache` copies it.

    Only for a TensorFlow loop that no compiler sees, and that holds no other reference to the cache; a
    compiler saves the copy by itself.
    """

    keys_first = False

    def _scatter(self, rows, slots, update):
        import tensorflow as tf

        # Its documentation speaks of a copy, but what it returns is the memory of `x`.
        return tf.raw_ops.InplaceUpdate(x=rows, i=slots, v=update)


def make_step(positions, cache):
    """The `Step` of tokens at these positions, `(T,)` or `(B, T)`, with this `KeyValueCache`."""
    rows, num_heads, length, head_dim = ops.shape(cache.keys)
    if len(positions.shape) == 1:
        at = ops.broadcast_to(positions, (rows, ops.shape(positions)[0]))
    else:
        at = positions
    inside = ops.clip(at, 0, length - 1)
    poison = ops.expand_dims(nan_unless(ops.equal(inside, at), "float32"), -1)
    inside = ops.cast(inside, "int32")
    first = ops.reshape(ops.arange(rows * num_heads) * length, (rows, num_heads, 1))
    shape = (rows, num_heads, length, head_dim)
    return Step(
        positions=positions,
        poison=poison,
        mask=ops.expand_dims(functional.causal_mask(inside, ops.arange(length)), 1),
        slots=ops.reshape(first + ops.expand_dims(inside, 1), (-1,)),
        cache_shape=() if all(isinstance(size, int) for size in shape) else ops.stack(shape),
    )


def make_steps(positions, cache):
    """One `Step` per entry of a model's cache; entries of one shape share it.

    Entries of another class than `KeyValueCache` get the positions as they are.
    """
    positions, steps = ops.convert_to_tensor(positions), {}
    for entry in cache:
        if not isinstance(entry, KeyValueCache):
            yield positions
            continue
        shape = tuple(entry.keys.shape)
        if shape not in steps:
            steps[shape] = make_step(positions, entry)
        yield steps[shape]


def as_in_place(cache):
    """A model's cache whose entries write in place, those that can."""
    return tuple(InPlaceCache(*x) if isinstance(x, KeyValueCache) else x for x in cache)

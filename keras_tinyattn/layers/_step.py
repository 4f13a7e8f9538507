"""What the layers of a cached step share: masks and slots by position, and how a cache is written."""

import contextlib
import contextvars
from typing import Any, NamedTuple

from keras import ops

from keras_tinyattn import functional


class Step(NamedTuple):
    """What all layers of a cached step have in common."""

    positions: Any  # (B, T) or (T,), as they came in
    poison: Any  # (B, T, 1): 0, or NaN where a position is outside the cache
    mask: Any  # (B, 1, T, S): who may look at whom
    places: Any  # (B * H * T,): where new keys and values go in a cache of (B * H * S, K)
    cache_shape: Any  # B, H, S, K: a tuple of integers, or one tensor


class _Given(NamedTuple):
    step: Any
    joint_projection: Any  # what `CausalSelfAttention` made of its own, in a plain loop; None elsewhere


_given = contextvars.ContextVar("given", default=None)


@contextlib.contextmanager
def given(step, joint_projection=None):
    """Within it, an attention layer takes what it is given and does not make its own.

    With a joint projection, a graph is made for a loop that no compiler sees, of one token a step.
    There the number of kernels counts, one product takes less time than three, and a functional
    scatter copies the whole cache each time. So the cache is written in place: the loop must keep no
    other reference to it.

    Args:
        step: what `make_step` returned for a layer of as many heads, as wide, with a cache as long.
        joint_projection: the kernel and bias of the layer's queries, keys and values.
    """
    token = _given.set(_Given(step, joint_projection))
    try:
        yield
    finally:
        _given.reset(token)


def joint_projection():
    """The one that is given, or None outside of plain loops."""
    return None if _given.get() is None else _given.get().joint_projection


def make_step(positions, inputs, keys):
    """What follows from the positions (T,) or (B, T) of inputs (B, T, D) and keys (B, H, S, K)."""
    if _given.get() is not None and positions is _given.get().step.positions:
        return _given.get().step
    rows, tokens = ops.shape(inputs)[:2]
    _, num_heads, slots, head_dim = ops.shape(keys)
    at = ops.broadcast_to(positions, (rows, tokens)) if len(positions.shape) == 1 else positions
    inside = ops.clip(at, 0, slots - 1)
    poison = ops.expand_dims(ops.where(ops.equal(inside, at), 0.0, float("nan")), -1)
    inside = ops.cast(inside, "int32")
    first = ops.reshape(ops.arange(rows * num_heads) * slots, (rows, num_heads, 1))
    return Step(
        positions=positions,
        poison=poison,
        mask=ops.expand_dims(functional.causal_mask(inside, ops.arange(slots)), 1),
        places=ops.reshape(first + ops.expand_dims(inside, 1), (-1,)),
        cache_shape=_as_one((rows, num_heads, slots, head_dim)),
    )


def _as_one(shape):
    """A shape as one tensor, where some of its sizes are tensors."""
    return shape if all(isinstance(size, int) for size in shape) else ops.stack(shape)


def write(cache, step, update):
    """Put an update (B, H, T, K) into a cache (B, H, S, K), each row at its own slots."""
    head_dim = cache.shape[3]
    flat = ops.reshape(cache, (-1, head_dim))
    update = ops.reshape(ops.cast(update, cache.dtype), (-1, head_dim))
    if joint_projection() is not None:
        import tensorflow as tf

        # What it gives is the memory of `x`, whatever its page says of a copy.
        flat = tf.raw_ops.InplaceUpdate(x=flat, i=step.places, v=update)
    else:
        flat = ops.scatter_update(flat, ops.expand_dims(step.places, 1), update)
    written = ops.reshape(flat, step.cache_shape)
    if hasattr(written, "set_shape"):  # What is known of the shape got lost on the way.
        written.set_shape(cache.shape)
    return written

"""Causal self-attention: a full window, or a step that continues a cache."""

import contextlib
import contextvars
from typing import Any, NamedTuple

import keras
from keras import backend, ops

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
        step = make_step(positions, inputs, keys)
        queries, new_keys, new_values = self._project(inputs + ops.cast(step.poison, inputs.dtype))
        keys, values = _write(keys, step, new_keys), _write(values, step, new_values)
        weights, attended = self._attend(
            queries,
            keys,
            values,
            step.mask,
            rows_may_be_empty=False,
            training=training,
            # A compiler would copy a whole cache, transposed, for a single query.
            keys_first=inputs.shape[1] == 1 and _loop.get() is None,
        )
        output = self._output(attended)
        cache = (keys, values)
        return (output, weights, cache) if return_attention_scores else (output, cache)

    def make_cache(self, batch_size, length):
        """An empty cache: a pair of zeros of shape `(batch_size, H, length, K)`, keys and values."""
        shape = (batch_size, self.num_heads, length, self.head_dim)
        return (ops.zeros(shape, self.compute_dtype), ops.zeros(shape, self.compute_dtype))

    def joint_projection(self):
        """One kernel for queries, keys and values, (D, 3 H K), and their biases, (3, H, 1, K)."""

        def values(*variables):
            return [ops.cast(variable, self.compute_dtype) for variable in variables]

        kernels = values(self.query_kernel, self.key_kernel, self.value_kernel)
        kernel = ops.concatenate(kernels, axis=-1)
        if not self.use_bias:
            return (kernel,)
        biases = values(self.query_bias, self.key_bias, self.value_bias)
        return kernel, ops.reshape(ops.stack(biases), (3, self.num_heads, 1, self.head_dim))

    def _project(self, inputs):
        joint = (_loop.get() or {}).get(id(self))
        if joint is None:
            return super()._project(inputs)
        kernel, *bias = joint
        projected = ops.matmul(ops.reshape(inputs, (-1, kernel.shape[0])), kernel)
        # In this order: a bias that follows a product at once is fused with it, into a slower kernel.
        projected = ops.reshape(projected, (-1, 3, self.num_heads, 1, self.head_dim))
        return ops.unstack(projected + bias[0] if bias else projected, axis=1)

    def _output(self, attended):
        if _loop.get() is None or self.output_dim is None:
            return super()._output(attended)
        width = self.num_heads * self.head_dim
        output = self._linear(ops.reshape(attended, (-1, width)), self.output_kernel, None)
        output = ops.reshape(output, (-1, 1, self.output_dim))
        return output if self.output_bias is None else output + self.output_bias

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


class _Step(NamedTuple):
    """What all layers of a cached step have in common."""

    positions: Any  # (B, T) or (T,), as they came in
    poison: Any  # (B, T, 1): 0, or NaN where a position is outside the cache
    mask: Any  # (B, 1, T, S): who may look at whom
    places: Any  # (B * H * T,): where new keys and values go in a cache of (B * H * S, K)
    cache_shape: Any  # B, H, S, K


_shared = contextvars.ContextVar("the steps made so far, by what they depend on", default=None)
_loop = contextvars.ContextVar("the joint projections of the layers of a loop, by layer", default=None)


@contextlib.contextmanager
def _set(variable, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def shared_step(step=None, keys=None):
    """Within it, layers that are given the same positions share what follows from them.

    Args:
        step: what follows from `step.positions`, if that is known already.
        keys: the keys of a cache, for their shape; with `step`.
    """
    if backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    return _set(_shared, {} if step is None else {_key(step.positions, keys): step})


def plain_loop(joint_projections):
    """Within it, a graph is made for a loop that no compiler sees, of one token a step.

    There the number of kernels counts, one product takes less time than three, and a functional scatter
    copies the whole cache each time. So the cache is written in place: the loop must keep no other
    reference to it.

    Args:
        joint_projections: maps the `id` of a layer to what its `joint_projection` returned.
    """
    return _set(_loop, joint_projections)


def make_step(positions, inputs, keys):
    """What follows from the positions (T,) or (B, T) of inputs (B, T, D) and keys (B, H, S, K)."""
    made = _shared.get()
    key = None if made is None else _key(positions, keys)
    if made is not None and key in made:
        return made[key]
    rows, tokens = ops.shape(inputs)[:2]
    _, num_heads, slots, head_dim = ops.shape(keys)
    at = ops.broadcast_to(positions, (rows, tokens)) if len(positions.shape) == 1 else positions
    inside = ops.clip(at, 0, slots - 1)
    poison = ops.where(ops.equal(inside, at), 0.0, float("nan"))[..., None]
    inside = ops.cast(inside, "int32")
    first = ops.reshape(ops.arange(rows * num_heads) * slots, (rows, num_heads, 1))
    step = _Step(
        positions=positions,
        poison=poison,
        mask=functional.causal_mask(inside, ops.arange(slots))[:, None],
        places=ops.reshape(first + inside[:, None], (-1,)),
        cache_shape=_as_one((rows, num_heads, slots, head_dim)),
    )
    if made is not None:
        made[key] = step
    return step


def _key(positions, keys):
    import tensorflow as tf

    # Not across graphs: a tensor of an inner one is nothing to the outer.
    return id(tf.compat.v1.get_default_graph()), id(positions), tuple(keys.shape[1:3])


def _as_one(shape):
    """A shape as one tensor, where some of its sizes are tensors."""
    return shape if all(isinstance(size, int) for size in shape) else ops.stack(shape)


def _write(cache, step, update):
    """Put an update (B, H, T, K) into a cache (B, H, S, K), each row at its own slots."""
    head_dim = cache.shape[3]
    flat = ops.reshape(cache, (-1, head_dim))
    update = ops.reshape(ops.cast(update, cache.dtype), (-1, head_dim))
    if _loop.get() is not None:
        import tensorflow as tf

        flat = tf.raw_ops.InplaceUpdate(x=flat, i=step.places, v=update)
    else:
        flat = ops.scatter_update(flat, step.places[:, None], update)
    written = ops.reshape(flat, step.cache_shape)
    if hasattr(written, "set_shape"):  # What is known of the shape got lost on the way.
        written.set_shape(cache.shape)
    return written


def _check_cache(cache, positions):
    if (cache is None) != (positions is None):
        raise ValueError(
            "A cached step needs to know where its tokens stand, and a full window starts at 0. "
            "Expected cache and positions together, or neither. Received: "
            f"cache={'given' if cache is not None else None}, "
            f"positions={'given' if positions is not None else None}. Give both, or leave both out."
        )

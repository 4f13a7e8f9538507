"""Causal self-attention: a full window, or a step that continues a cache."""

import keras
from keras import ops

from keras_tinyattn.layers import _step
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
        step = _step.make_step(positions, inputs, keys)
        queries, new_keys, new_values = self._project(inputs + ops.cast(step.poison, inputs.dtype))
        keys, values = _step.write(keys, step, new_keys), _step.write(values, step, new_values)
        weights, attended = self._attend(
            queries,
            keys,
            values,
            step.mask,
            rows_may_be_empty=False,
            training=training,
            # With a single query first, a compiler would copy the whole cache, transposed.
            keys_first=inputs.shape[1] == 1 and _step.joint_projection() is None,
        )
        output = self._output(attended)
        cache = (keys, values)
        return (output, weights, cache) if return_attention_scores else (output, cache)

    def make_cache(self, batch_size, length):
        """An empty cache: a pair of zeros of shape `(batch_size, H, length, K)`, keys and values."""
        shape = (batch_size, self.num_heads, length, self.head_dim)
        return (ops.zeros(shape, self.compute_dtype), ops.zeros(shape, self.compute_dtype))

    def _joint_projection(self):
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
        if _step.joint_projection() is None:
            return super()._project(inputs)
        kernel, *bias = _step.joint_projection()
        projected = ops.matmul(ops.reshape(inputs, (-1, kernel.shape[0])), kernel)
        # In this order: a bias that follows a product at once is fused with it, into a slower kernel.
        projected = ops.reshape(projected, (-1, 3, self.num_heads, 1, self.head_dim))
        return ops.unstack(projected + bias[0] if bias else projected, axis=1)

    def _output(self, attended):
        if _step.joint_projection() is None or self.output_dim is None:
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


def _check_cache(cache, positions):
    if (cache is None) != (positions is None):
        raise ValueError(
            "A cached step needs to know where its tokens stand, and a full window starts at 0. "
            "Expected cache and positions together, or neither. Received: "
            f"cache={'given' if cache is not None else None}, "
            f"positions={'given' if positions is not None else None}. Give both, or leave both out."
        )

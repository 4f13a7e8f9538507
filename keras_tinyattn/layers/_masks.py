"""Masks: which are accepted, how they combine, and how what they hide stays hidden.

A weight of zero does not silence a NaN, since 0 * NaN is NaN, neither in an output nor in the gradient
of a kernel. Inputs that are hidden from every query therefore become zeros before they are projected.
"""

from keras import backend, ops

from keras_tinyattn import functional


def implicit_mask(inputs):
    """The mask that Keras attached to a tensor, or None.

    Keras fills a layer's `mask` from it only where the inputs are the one tensor argument.
    """
    return getattr(inputs, "_keras_mask", None)


def hide_padding(inputs, mask):
    """Zeros for the padded inputs, and the padding mask as booleans.

    Args:
        inputs: `(B, T, D)`.
        mask: `(B, T)` booleans or 0/1 integers, true where a position is real, or None.

    Returns:
        The inputs, NaN throughout if an integer of the mask is neither 0 nor 1, and the mask as
        booleans, or None.
    """
    if mask is None:
        return inputs, None
    mask = ops.convert_to_tensor(mask)
    padding = _as_booleans("mask", mask, {2: inputs.shape[:2]}, "(B, S)", broadcasts=False)
    return _poison_unless_binary(mask, ops.where(padding[..., None], inputs, 0.0)), padding


def hide_masked(inputs, mask, attention_mask, num_heads, causal):
    """Inputs from which nothing hidden can leak, and the masks as booleans.

    Args:
        inputs: `(B, T, D)`.
        mask: `(B, T)` booleans or 0/1 integers, true where a position is real, or None.
        attention_mask: booleans or 0/1 integers of shape `(T, S)`, `(B, T, S)` or `(B, H, T, S)`, where
            an axis of size 1 broadcasts, or None.
        num_heads: H.
        causal: whether a query is kept from the keys after it.

    Returns:
        The inputs, with zeros where padded, and in place of what is not finite where no query of
        any head may look; NaN throughout if an integer of a mask is neither 0 nor 1. The padding mask,
        `(B, T)`, or None. The attention mask with four axes, or None.
    """
    B, T, _ = inputs.shape
    inputs, padding = hide_padding(inputs, mask)
    if attention_mask is None:
        return inputs, padding, None
    attention_mask = ops.convert_to_tensor(attention_mask)
    sizes = {2: (T, T), 3: (B, T, T), 4: (B, num_heads, T, T)}
    letters = "(T, S), (B, T, S) or (B, H, T, S)"
    allowed = _as_booleans("attention_mask", attention_mask, sizes, letters, broadcasts=True)
    if len(allowed.shape) < 4:
        allowed = allowed[:, None] if len(allowed.shape) == 3 else allowed[None, None]
    joined = window_mask(ops.shape(inputs)[1], padding, allowed, causal)
    harmless = ops.any(joined, axis=(1, 2)) | ops.all(ops.isfinite(inputs), axis=-1)
    inputs = ops.where(harmless[..., None], inputs, 0.0)
    return _poison_unless_binary(attention_mask, inputs), padding, allowed


def window_mask(length, padding, attention_mask, causal):
    """All masks of a window of `length` tokens in one, or None: `(B, H, T, T)` or broadcast to it."""
    joined = None
    if causal:
        positions = ops.arange(length)
        joined = functional.causal_mask(positions, positions)[None, None]
    if padding is not None:
        pairs = padding[:, None, :, None] & padding[:, None, None, :]
        joined = pairs if joined is None else joined & pairs
    if attention_mask is not None:
        joined = attention_mask if joined is None else joined & attention_mask
    return joined


def _as_booleans(name, mask, sizes, letters, broadcasts):
    """Check that a mask is boolean or integer, of a rank in `sizes` and of the sizes given there."""
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


def _poison_unless_binary(mask, inputs):
    """NaN throughout if the mask holds an integer that is neither 0 nor 1, such as -1e9.

    A compiled function cannot raise, and an additive mask read as booleans is read inverted.
    """
    if backend.standardize_dtype(mask.dtype) == "bool":
        return inputs
    return inputs + nan_unless(ops.all((mask == 0) | (mask == 1)), inputs.dtype)


def nan_unless(right, dtype):
    """Zeros where the booleans are true, NaN where not: what a layer answers that cannot raise.

    By a division, since `tf.debugging.enable_check_numerics` would stop at a NaN that is written out.
    """
    return 0.0 / ops.cast(right, dtype)

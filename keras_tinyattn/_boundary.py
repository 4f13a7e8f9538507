"""Errors that read the same in Python and in a graph."""

import tensorflow as tf


def require(condition, *message):
    """Raise `ValueError` eagerly, or INVALID_ARGUMENT when the graph runs, unless the condition holds.

    Args:
        condition: scalar boolean tensor.
        *message: strings and scalar tensors, joined into one sentence.

    Returns:
        A list with the assertion to wait for, for `tf.control_dependencies`; empty in eager mode.
    """
    condition = tf.convert_to_tensor(condition)
    if tf.executing_eagerly():
        if not condition:
            raise ValueError(as_string(*message).numpy().decode(errors="replace"))
        return []
    return [tf.debugging.Assert(condition, [as_string(*message)], summarize=1)]


def as_string(*parts):
    """Strings, numbers and tensors of them as one string tensor."""
    return tf.strings.join(
        [
            part
            if isinstance(part, str) or getattr(part, "dtype", None) == tf.string
            else tf.strings.as_string(part)
            for part in parts
        ]
    )

"""Errors that read the same in Python and in a graph."""

import contextlib
import errno
import os
import re

import numpy as np
import tensorflow as tf

_BEGIN, _END = "assertion failed: [", "]"


def require(condition, *message):
    """Raise `ValueError` eagerly, or INVALID_ARGUMENT when the graph runs, unless the condition holds.

    Args:
        condition: scalar boolean tensor.
        *message: strings and tensors of strings or numbers, joined into one sentence; the entries of a
            tensor are separated by commas.

    Returns:
        A list with the assertion to wait for, for `tf.control_dependencies`; empty in eager mode.
    """
    condition = tf.convert_to_tensor(condition)
    if tf.executing_eagerly():
        if not condition:
            raise ValueError(_sentence(message).numpy().decode(errors="replace"))
        return []
    return [tf.debugging.Assert(condition, [_sentence(message)], summarize=1)]


def chosen(values, mask):
    """`tf.boolean_mask` in a tenth of its operations, which are in every graph and seldom needed."""
    return tf.gather_nd(values, tf.where(mask))


def require_one_batch(**inputs):
    """The assertion that all inputs have one number of rows."""
    ranks = [value.shape.rank for value in inputs.values()]
    shapes = tf.concat([tf.shape(value) for value in inputs.values()], axis=0)
    rows = tf.gather(shapes, np.cumsum([0, *ranks[:-1]]))
    return require(
        tf.reduce_all(rows == rows[0]),
        f"Each row needs its own value. Expected one number of rows in {', '.join(inputs)}. Received: ",
        rows,
        ".",
    )


@contextlib.contextmanager
def value_errors():
    """Turn a failed assertion of a graph into a `ValueError` with its sentence."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        _, found, sentence = error.message.partition(_BEGIN)
        if not found:
            raise
        # The assertion writes quotes, line ends and bytes above 127 as escapes.
        escaped = sentence[: sentence.rindex(_END + "\n")].encode()
        sentence = escaped.decode("unicode_escape").encode("latin-1").decode(errors="replace")
        raise ValueError(sentence) from None


# What a disk says when it does not take a file.
_DISK_ERRORS = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "ENAMETOOLONG")


@contextlib.contextmanager
def os_errors():
    """Turn TensorFlow's errors of a disk into the `OSError` that Python raises, its number included."""
    try:
        yield
    except tf.errors.OpError as error:
        numbers = [getattr(errno, name) for name in _DISK_ERRORS if hasattr(errno, name)]
        found = [number for number in numbers if os.strerror(number) in error.message]
        if not found:
            raise
        name = re.search(r"(\S*[/\\]\S*); ", error.message)
        raise OSError(found[0], os.strerror(found[0]), *([name[1]] if name else [])) from error


def _sentence(message):
    return tf.strings.join([part if isinstance(part, str) else _listed(part) for part in message])


def _listed(values):
    values = tf.convert_to_tensor(values)
    if values.shape.rank != 0:
        values = tf.reshape(values, (-1,))[:20]
    if values.dtype != tf.string:
        texts = tf.strings.as_string(values, shortest=values.dtype.is_floating)
        return tf.strings.reduce_join(texts, separator=", ")
    # A message must be valid UTF-8, or whoever reads it fails in its turn.
    listed = tf.strings.reduce_join(values, separator=", ")
    return tf.strings.unicode_transcode(listed, "UTF-8", "UTF-8", errors="replace")

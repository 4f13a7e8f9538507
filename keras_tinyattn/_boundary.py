"""Values that come from outside: Python's to arrays, and errors that read the same in a graph."""

import collections.abc
import contextlib
import errno
import numbers
import os
import re
import reprlib

import numpy as np
import tensorflow as tf

_BEGIN, _END = "assertion failed: [", "]"
_INT32, _FLOAT32 = np.iinfo(np.int32), np.finfo(np.float32)
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = 20
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 200


def plain(value):
    """Tensors and other arrays as NumPy arrays, iterators as lists, and lists of them likewise."""
    if isinstance(value, str | bytes):
        return value  # NumPy's too, which would become arrays.
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, list | tuple | range | collections.abc.Iterator):
        return [plain(part) for part in value]
    if hasattr(value, "numpy"):
        return value.numpy()
    return np.asarray(value) if hasattr(value, "__array__") and not tf.is_tensor(value) else value


def shown(value):
    """A value as a message shows it: as Python writes it, cut where it is long."""
    value = plain(value)
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits.
        return "an integer of thousands of digits"


def as_numbers(value, kind=numbers.Integral):
    """A NumPy array of integers, or of real numbers; None for anything else, such as booleans."""
    value = plain(value)
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        if kind is numbers.Real and value.dtype.kind == "V" and tf.as_dtype(value.dtype).is_floating:
            return value.astype(np.float32)  # bfloat16
        return value if value.dtype.kind in ("iu" if kind is numbers.Integral else "iuf") else None
    try:
        # As objects: NumPy would turn integers beyond 64 bits into floats, and booleans into integers.
        array = np.asarray(value, object)
    except (TypeError, ValueError, NotImplementedError):
        return None
    real = all(isinstance(part, kind) and not isinstance(part, bool) for part in array.flat)
    return array if real else None


def as_logits(logits):
    """Logits as a float32 tensor `(B, V)`.

    Raises:
        ValueError: if they are no numbers, or of another rank.
    """
    values = logits
    if not isinstance(logits, tf.Tensor):
        array = as_numbers(logits, numbers.Real)
        try:
            with np.errstate(over="ignore"):  # Infinite logits have an error of their own.
                values = None if array is None else tf.constant(array.astype(np.float32))
        except OverflowError:
            values = None
    is_number = values is not None and (values.dtype.is_floating or values.dtype.is_integer)
    rank = values.shape.rank if is_number else 0
    if rank is not None and (rank != 2 or values.shape[1] == 0):
        raise ValueError(
            "Logits are a row of numbers for each text. Expected (B, V) numbers. "
            f"Received: {shown(logits)}. For a single row, put it in a list."
        )
    return tf.cast(values, tf.float32)


def per_row(setting, value, rows=None):
    """A setting as a NumPy array of its dtype: `()` for all rows, or `(B,)`.

    Args:
        setting: a `sampling.Setting`.
        value: a number, or one per row, of any type that holds numbers.
        rows: B, or None where it is not known.

    Raises:
        ValueError: if there is another number of them, one is no number (for an int32, no integer),
            does not fit 32 bits, or is out of range.
    """
    integer = setting.dtype == "int32"
    array = as_numbers(value, numbers.Integral if integer else numbers.Real)
    if array is None or array.ndim > 1 or (array.ndim and rows is not None and len(array) != rows):
        kind = "an integer" if integer else "a number"
        raise ValueError(
            f"{setting.name} is one for all rows or one per row. Expected {kind} or "
            f"{'one per row' if rows is None else f'{rows} of them'}. Received: {shown(value)}."
        )
    try:
        with np.errstate(all="ignore"):
            exact = array if integer else array.astype(np.float64)
            rounded = exact if integer else exact.astype(np.float32)
            fits = (
                (exact >= _INT32.min) & (exact <= _INT32.max)
                if integer
                else (np.isfinite(rounded) | ~np.isfinite(exact))
            )
    except OverflowError:
        fits = False
    if not np.all(fits):
        expected = (
            f"integers from {_INT32.min} to {_INT32.max}"
            if integer
            else f"numbers from {_FLOAT32.min:.8g} to {_FLOAT32.max:.8g}"
        )
        raise ValueError(
            f"{setting.name} does not fit 32 bits. Expected {expected}. Received: {shown(value)}."
        )
    # What is not 0 does not become 0, which means something else.
    if not integer:
        tiny = np.copysign(_FLOAT32.tiny, exact).astype(np.float32)
        rounded = np.where((exact != 0) & (np.abs(exact) < _FLOAT32.tiny), tiny, rounded)
    result = rounded.astype(setting.dtype)
    valid = setting.valid(result)
    if not np.all(valid):
        wrong = np.broadcast_to(exact, np.shape(valid))[~valid][:20]
        listed = ", ".join(str(part) if integer else f"{part:.9g}" for part in wrong.tolist())
        raise ValueError(f"{out_of_range(setting)}{listed}.")
    return result


def out_of_range(setting):
    """How the error for a setting that is out of range begins."""
    return f"{setting.name} is out of range. Expected {setting.expected}. Received: "


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


def require_inputs(**inputs):
    """The inputs of a signature, once each has the rank it was traced for, and all have as many rows.

    A server checks no rank, and in a graph that was traced for one `tf.rank` is a constant. So the
    shapes are compared as numbers, which nothing folds.
    """
    shapes = [value.shape.as_list() for value in inputs.values()]
    # All shapes in one row, the end of each marked.
    free, end, behind = -1, -2, -3
    expected = np.array([free if size is None else size for shape in shapes for size in (*shape, end)])
    owners = np.repeat(np.arange(len(shapes)), [len(shape) + 1 for shape in shapes])
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    seen = tf.concat([part for value in inputs.values() for part in (tf.shape(value), [end])], axis=0)
    aligned = tf.concat([seen, np.full(len(expected), behind)], axis=0)[: len(expected)]
    right = (aligned == expected) | ((expected == free) & (aligned >= 0))
    # Up to the first that is wrong all are aligned.
    wrong = tf.gather(owners, tf.argmin(tf.cast(right, tf.int32)))
    received = seen[tf.gather(starts, wrong) :]
    received = received[: tf.argmax(tf.cast(received == end, tf.int32))]
    axes = [["B", *("T" if size is None else str(size) for size in shape[1:])] for shape in shapes]
    checks = require(
        tf.reduce_all(right),
        tf.gather(
            [
                f"{name} has another shape. Expected ({', '.join(part)})"
                for name, part in zip(inputs, axes, strict=True)
            ],
            wrong,
        ),
        ", a row for each text. Received: (",
        received,
        ").",
    )
    with tf.control_dependencies(checks):
        rows = tf.gather(aligned, starts)
    checks = require(
        tf.reduce_all(rows == rows[0]),
        f"Each row needs its own value. Expected one number of rows in {', '.join(inputs)}. Received: ",
        rows,
        ".",
    )
    with tf.control_dependencies(checks):
        return {name: tf.identity(value) for name, value in inputs.items()}


def check_names(given, known):
    """Refuse settings by names that are not among the known ones.

    Raises:
        TypeError: if there is no setting of a name.
    """
    names = [setting.name for setting in known]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise TypeError(
            f"There is no setting {unknown[0]!r}. Expected settings among {', '.join(names)}."
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
        known = [getattr(errno, name) for name in _DISK_ERRORS if hasattr(errno, name)]
        found = [number for number in known if os.strerror(number) in error.message]
        if not found:
            raise
        name = re.search(r"(\S*[/\\]\S*); ", error.message)
        raise OSError(found[0], os.strerror(found[0]), *([name[1]] if name else [])) from error


def _sentence(message):
    if all(isinstance(part, str) for part in message):
        # A constant: XLA drops an assertion, but not the operations on strings before it.
        return tf.constant("".join(message))
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

"""A request: Python values to tensors, and the checks that refuse what cannot be continued."""

import collections
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_tinyattn._boundary import chosen, require
from keras_tinyattn.sampling import SETTINGS, SamplingSettings, Setting

MAX_STOP_TOKENS = 8

# All settings of a row but its stop: how many tokens, and how they are sampled.
ROW_SETTINGS = (
    Setting(
        "max_new_tokens",
        "int32",
        None,
        lambda x: x >= 0,
        "an integer of at least 0",
        "adds at most this many tokens",
    ),
    *SETTINGS,
)

# The settings of each row, `(B,)`; but `stop` is `(B, M)` ids, -1 in front of shorter ones.
Settings = collections.namedtuple("Settings", [*(setting.name for setting in ROW_SETTINGS), "stop"])


class Generation(NamedTuple):
    """What `generate` returns; without the batch axis for a single prompt."""

    token_ids: Any  # (B, L) int32: prompt and continuation, then pad ids
    lengths: Any  # (B,) int32: how many of them count, a stop included
    new_logprobs: Any  # (B, N) float32: the model's own log-probability of each new token, then 0
    finish_reasons: Any  # (B,) strings: "stop" or "length"


def sampling_settings(settings):
    """The fields of `Settings` that `sample` takes, by name."""
    return {name: getattr(settings, name) for name in SamplingSettings._fields}


def request_spec():
    """The signature of a request: prompts (B, T), their lengths (B,), `Settings`, pad id."""
    row = tf.TensorSpec((None,), tf.int32)
    settings = Settings(
        *(tf.TensorSpec((None,), setting.dtype) for setting in ROW_SETTINGS),
        stop=tf.TensorSpec((None, MAX_STOP_TOKENS), tf.int32),
    )
    return tf.TensorSpec((None, None), tf.int32), row, settings, tf.TensorSpec((), tf.int32)


# The checks are functions, so that a graph holds each once. They give back what they have checked.


def _check(*signature):
    return tf.function(
        input_signature=[tf.TensorSpec(*spec) for spec in signature],
        autograph=False,
    )


@_check(((None, None), tf.int32), ((None,), tf.int32), ((), tf.int32))
def check_ids(token_ids, lengths, vocabulary_size):
    """Refuse token ids (B, T) outside the vocabulary; behind its length (B,) a row may hold any."""
    real = tf.sequence_mask(lengths, tf.shape(token_ids)[1])
    outside = chosen(token_ids, real & ((token_ids < 0) | (token_ids >= vocabulary_size)))
    checks = require(
        tf.size(outside) == 0,
        "A token id is outside the vocabulary. Expected ids from 0 to ",
        vocabulary_size - 1,
        ". Received: ",
        outside,
        ". Encode the text with the tokenizer of the model.",
    )
    with tf.control_dependencies(checks):
        return tf.identity(token_ids)


@_check(((None,), tf.int32), ((), tf.int32), ((), tf.int32))
def check_lengths(lengths, width, sequence_length):
    """Refuse prompts that are empty, or longer than the model's positions or their own array."""
    longest = tf.reduce_max(tf.concat([lengths, [0]], 0))
    checks = require(
        tf.reduce_all(lengths >= 1),
        "There is nothing to continue. Expected at least one token in each prompt. "
        "Received: an empty prompt. Begin the text with at least one word or character.",
    )
    checks += require(
        longest <= tf.minimum(sequence_length, width),
        "The prompt does not fit the positions of the model. Expected at most sequence_length=",
        sequence_length,
        " tokens. Received: ",
        longest,
        " tokens. Shorten the prompt, or build a model with a larger sequence_length.",
    )
    with tf.control_dependencies(checks):
        return tf.identity(lengths)


def check_settings(settings):
    """Refuse settings, `(B,)` each by name, that are out of range; gives them back by name."""
    table = {setting.name: setting for setting in ROW_SETTINGS}
    checks = []
    for name, value in settings.items():
        valid = table[name].valid(value)
        checks += require(
            tf.reduce_all(valid),
            f"{name} is out of range. Expected {table[name].expected}. Received: ",
            chosen(value, ~valid),
            ".",
        )
    with tf.control_dependencies(checks):
        return {name: tf.identity(value) for name, value in settings.items()}


@tf.function(
    input_signature=[SamplingSettings(*(tf.TensorSpec((None,), x.dtype) for x in SETTINGS))],
    autograph=False,
)
def check_sampling(settings):
    """`check_settings` as one function in a graph, for `SamplingSettings`."""
    return SamplingSettings(**check_settings(settings._asdict()))


@tf.function(
    input_signature=[*request_spec()[:3], tf.TensorSpec((), tf.int32), tf.TensorSpec((), tf.int32)],
    autograph=False,
)
def check_request(prompt_ids, prompt_lengths, settings, vocabulary_size, sequence_length):
    """Refuse a request that cannot be continued; gives the prompt ids back."""
    lengths = check_lengths(prompt_lengths, tf.shape(prompt_ids)[1], sequence_length)
    checked = check_sampling(SamplingSettings(**sampling_settings(settings)))
    added = check_settings({"max_new_tokens": settings.max_new_tokens})
    with tf.control_dependencies([*checked, *added.values()]):
        return check_ids(prompt_ids, lengths, vocabulary_size)


def make_prompts(token_ids, pad_id):
    """Prompts as (B, T) ids and (B,) lengths, and whether there was a single one.

    Raises:
        ValueError: if a prompt is no list of integers.
    """
    if hasattr(token_ids, "numpy"):
        token_ids = token_ids.numpy()
    rows = list(token_ids)
    single = not rows or np.ndim(rows[0]) == 0
    rows = [np.asarray(row) for row in ([rows] if single else rows)]
    for row in rows:
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                "A prompt is a list of token ids. Expected integers, one list or a list of lists. "
                f"Received: {row.dtype} of shape {row.shape}. Encode the text with a tokenizer."
            )
    lengths = np.array([row.size for row in rows], np.int32)
    prompts = np.full((len(rows), max(lengths, default=0)), pad_id, np.int64)
    for place, row in zip(prompts, rows, strict=True):
        place[: row.size] = row
    # An id beyond int32 stays outside the vocabulary.
    prompts = np.clip(prompts, np.iinfo(np.int32).min, np.iinfo(np.int32).max).astype(np.int32)
    return tf.constant(prompts), tf.constant(lengths), single


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


def make_settings(rows, max_new_tokens, stop, settings):
    """`Settings` of `rows` rows from Python values, each one for all rows or one per row.

    Raises:
        TypeError: if there is no setting of a name.
        ValueError: if a value is of another type or number, or does not fit its dtype.
    """
    check_names(settings, SETTINGS)
    settings = {"max_new_tokens": max_new_tokens, **SamplingSettings(**settings)._asdict()}
    dtypes = {setting.name: setting.dtype for setting in ROW_SETTINGS}
    values = [_per_row(name, value, dtypes[name], rows) for name, value in settings.items()]
    return Settings(*values, stop=_stop_rows(stop, rows))


def _per_row(name, value, dtype, rows):
    value = np.asarray(value)
    integers = dtype == "int32"
    if value.shape not in ((), (rows,)) or (integers and not np.issubdtype(value.dtype, np.integer)):
        kind = "an integer" if integers else "a number"
        raise ValueError(
            f"{name} is one for all prompts or one per prompt. Expected {kind} or {rows} of them. "
            f"Received: {value.tolist()}."
        )
    if integers and not np.all((value >= -(2**31)) & (value < 2**31)):
        raise ValueError(
            f"{name} does not fit 32 bits. Expected integers from {-(2**31)} to {2**31 - 1}. "
            f"Received: {value.tolist()}."
        )
    return tf.constant(np.broadcast_to(value, (rows,)).astype(dtype))


def _stop_rows(stop, rows):
    """Stops as (B, M) ids, -1 in front."""
    per_row = isinstance(stop, (list, tuple)) and any(
        part is None or np.ndim(part) > 0 for part in stop
    )
    stops = list(stop) if per_row else [stop] * rows
    if len(stops) != rows:
        raise ValueError(
            f"stop is one for all prompts or one per prompt. Expected {rows} of them. "
            f"Received: {len(stops)}."
        )
    table = np.full((rows, MAX_STOP_TOKENS), -1, np.int32)
    for place, part in zip(table, stops, strict=True):
        ids = [] if part is None else np.atleast_1d(np.asarray(part)).tolist()
        if len(ids) > MAX_STOP_TOKENS or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(
                f"A stop is what ends a text. Expected one token id, or up to {MAX_STOP_TOKENS}. "
                f"Received: {part!r}."
            )
        if ids:
            place[-len(ids) :] = ids
    return tf.constant(table)

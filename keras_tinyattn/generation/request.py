"""A request: Python values to tensors, and the checks that refuse what cannot be continued."""

import collections
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_tinyattn._boundary import (
    as_numbers,
    check_names,
    chosen,
    out_of_range,
    per_row,
    plain,
    require,
    shown,
)
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
    checks = require(tf.size(outside) == 0, *_foreign_id(vocabulary_size - 1, outside))
    with tf.control_dependencies(checks):
        return tf.identity(token_ids)


def _foreign_id(last, ids):
    """The sentence about token ids outside the vocabulary, in the parts that `require` takes."""
    return (
        "A token id is outside the vocabulary. Expected ids from 0 to ",
        last,
        ". Received: ",
        ids,
        ". Encode the text with the tokenizer of the model.",
    )


def _foreign_stop(last, ids):
    return (
        "A stop is outside the vocabulary. Expected ids from 0 to ",
        last,
        ", or -1 for none. Received: ",
        ids,
        ". The text would never end there.",
    )


@_check(((None,), tf.int32), ((), tf.int32), ((), tf.int32))
def check_lengths(lengths, width, sequence_length):
    """Refuse prompts that are empty, or longer than the model's positions or their own array."""
    longest = tf.reduce_max(tf.concat([lengths, [0]], 0))
    checks = require(
        longest <= width,
        "A prompt_length is beyond the width of prompt_ids. Expected at most ",
        width,
        ". Received: ",
        longest,
        ". Give as many ids as the prompt is long.",
    )
    with tf.control_dependencies(checks):
        longest = tf.identity(longest)
    checks = require(
        tf.reduce_all(lengths >= 1),
        "There is nothing to continue. Expected at least one token in each prompt. "
        "Received: an empty prompt. Begin the text with at least one word or character.",
    )
    checks += require(
        longest <= sequence_length,
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
            out_of_range(table[name]),
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
    foreign = chosen(settings.stop, (settings.stop < -1) | (settings.stop >= vocabulary_size))
    checks = require(tf.size(foreign) == 0, *_foreign_stop(vocabulary_size - 1, foreign))
    with tf.control_dependencies([*checked, *added.values(), *checks]):
        return check_ids(prompt_ids, lengths, vocabulary_size)


def make_prompts(token_ids, vocabulary_size):
    """Prompts as (B, T) ids and (B,) lengths, and whether there was a single one.

    Raises:
        ValueError: if a prompt is no list of integers, or there is none.
    """
    prompts = plain(token_ids)
    is_list = isinstance(prompts, list) or np.ndim(prompts) > 0
    single = is_list and getattr(prompts, "ndim", 1) == 1 and not any(map(_is_list, prompts))
    rows = [as_numbers(row) for row in ([prompts] if single or not is_list else prompts)]
    if not all(row is not None and row.ndim == 1 for row in rows):
        raise ValueError(
            "A prompt is a list of token ids. Expected integers, one list or a list of lists, in "
            f"token_ids. Received: {shown(token_ids)}. Encode the text with a tokenizer."
        )
    if not rows:
        raise ValueError(
            "There is nothing to continue. Expected at least one prompt in token_ids. "
            "Received: an empty batch. Give a list of token ids."
        )
    _require_small(_foreign_id, vocabulary_size, np.concatenate(rows))
    lengths = np.array([row.size for row in rows], np.int32)
    prompts = np.zeros((len(rows), max(lengths)), np.int32)
    for place, row in zip(prompts, rows, strict=True):
        place[: row.size] = row
    return tf.constant(prompts), tf.constant(lengths), single


def _is_list(value):
    return isinstance(value, list) or getattr(value, "ndim", 0) > 0


def _require_small(sentence, vocabulary_size, ids):
    """Refuse ids beyond 32 bits here; the graph that takes the others refuses them alike."""
    wrong = [int(token) for token in ids.tolist() if not -(2**31) <= token < 2**31][:20]
    require(not wrong, *sentence(str(vocabulary_size - 1), shown(wrong)[1:-1]))


def make_pad_id(value):
    """The id that pads, a scalar tensor."""
    number = as_numbers(value)
    if number is None or number.ndim or not -(2**31) <= number < 2**31:
        raise ValueError(
            "pad_id is the id that fills a row after its end. Expected an integer of 32 bits. "
            f"Received: {shown(value)}."
        )
    return tf.constant(int(number))


def make_settings(rows, vocabulary_size, max_new_tokens, stop, settings):
    """`Settings` of `rows` rows from Python values, each one for all rows or one per row.

    Raises:
        TypeError: if there is no setting of a name.
        ValueError: if a value is of another type or number, does not fit its dtype, or is out of range.
    """
    check_names(settings, SETTINGS)
    settings = {**settings, "max_new_tokens": max_new_tokens}
    values = [
        per_row(setting, settings.get(setting.name, setting.default), rows) for setting in ROW_SETTINGS
    ]
    values = [tf.constant(np.broadcast_to(value, (rows,))) for value in values]
    return Settings(*values, stop=_stop_rows(stop, rows, vocabulary_size))


def require_stops(stops, rows):
    """Refuse another number of stops than there are rows."""
    require(
        len(stops) == rows,
        f"stop is one for all rows or one per row. Expected {rows} of them. Received: {len(stops)}.",
    )


def _stop_rows(stop, rows, vocabulary_size):
    """Stops as (B, M) ids, -1 in front."""
    stop = plain(stop)
    one = not _is_list(stop) or not any(part is None or _is_list(part) for part in stop)
    stops = [stop] * rows if one else list(stop)
    require_stops(stops, rows)
    table = np.full((rows, MAX_STOP_TOKENS), -1, np.int32)
    for place, part in zip(table, stops, strict=True):
        ids = as_numbers([] if part is None else part)
        if ids is None or ids.ndim > 1 or ids.size > MAX_STOP_TOKENS or np.any(ids < 0):
            raise ValueError(
                f"A stop is what ends a text. Expected one token id, or up to {MAX_STOP_TOKENS}. "
                f"Received: {shown(part)}."
            )
        if ids.size:
            _require_small(_foreign_stop, vocabulary_size, np.ravel(ids))
            place[-ids.size :] = ids
    return tf.constant(table)

"""The logits of one step to the next token ids; stateless, per row.

    temperature 0:  argmax(logits)
    above 0:        argmax(logits / temperature + noise), noise of Gumbel's distribution,

which samples a token with the probability softmax(logits / temperature). The noise comes from integers
that depend on seed, position and token id alone, so a row gets the same token whatever the other rows
are, eagerly, in a graph, compiled by XLA, and in another process.

Reference: Gumbel-max, in Maddison et al., "A* Sampling", 2014; nucleus (top-p) sampling, Holtzman et
al., "The Curious Case of Neural Text Degeneration", 2020.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

__all__ = ["SETTINGS", "Setting", "filter_logits", "sample"]


class Setting(NamedTuple):
    """A setting of generation, of which each row has its own."""

    name: str
    dtype: str
    default: Any
    valid: Callable  # of a tensor: where it is in range
    expected: str  # the range, in words
    help: str  # what the setting does, in words


# The settings of `sample`: every call, check, signature and option of them is made from this table.
SETTINGS = (
    Setting(
        "temperature",
        "float32",
        0.0,
        lambda x: (x >= 0.0) & (x <= np.finfo(np.float32).max),
        "a finite number of at least 0",
        "divides the logits; 0 is greedy",
    ),
    Setting(
        "top_k",
        "int32",
        0,
        lambda x: x >= 0,
        "an integer of at least 0, where 0 means all",
        "samples among this many of the likeliest tokens; 0 for all",
    ),
    Setting(
        "top_p",
        "float32",
        1.0,
        lambda x: (x > 0.0) & (x <= 1.0),
        "a number above 0 and up to 1, where 1 means all",
        "samples among the fewest tokens that hold this share of the probability; 1 for all",
    ),
    Setting(
        "min_p",
        "float32",
        0.0,
        lambda x: (x >= 0.0) & (x <= 1.0),
        "a number from 0 to 1, where 0 means all",
        "samples among tokens with at least this share of the likeliest one's probability; 0 for all",
    ),
    Setting(
        "seed",
        "int32",
        0,
        lambda x: x == x,
        "any int32",
        "the same seed samples the same tokens",
    ),
)

SamplingSettings = collections.namedtuple(
    "SamplingSettings",
    [setting.name for setting in SETTINGS],
    defaults=[setting.default for setting in SETTINGS],
)

_POSITION = Setting("position", "int32", 0, lambda x: x == x, "any int32", "where the token will stand")


def sample(logits, *, position=0, **settings):
    """Sample the next token id of each row.

    Args:
        logits: `(B, V)`, of any float type.
        position: `(B,)` or an integer, where in its text the sampled token will stand: each position
            has random numbers of its own, so that a text that is continued later goes on as if it had
            never paused.
        **settings: of `SETTINGS`, each `(B,)` or a number: `temperature`, 0 (the default) takes the
            likeliest token, of equal ones the lowest id; `top_k`, `top_p` and `min_p` as in
            `filter_logits`; `seed`, any int32.

    Returns:
        `(B,)` int32 token ids; -1 where the logits are not finite inside somebody else's compiled
        function, which cannot raise.

    Raises:
        TypeError: if there is no setting of a name.
        ValueError: if a setting is of another type or number, or out of range, where of a tensor in a
            graph the type alone is checked; if a logit is NaN or infinite, INVALID_ARGUMENT in a graph.

    Example:

    >>> sample(tf.constant([[0.1, 2.0, 0.3]])).numpy()
    array([1], dtype=int32)
    """
    token_ids = sample_unchecked(_boundary().as_logits(logits), position=position, **settings)
    with tf.control_dependencies(require_finite(token_ids >= 0)):
        return tf.identity(token_ids)


def sample_unchecked(logits, *, position=0, **settings):
    """`sample` for a loop that may be compiled, where no error can be raised: -1 in place of one."""
    _boundary().check_names(settings, SETTINGS)
    logits = tf.cast(logits, tf.float32)
    settings = SamplingSettings(
        *(
            _per_row(setting, settings.get(setting.name, setting.default), logits)
            for setting in SETTINGS
        )
    )
    position = _per_row(_POSITION, position, logits)

    def sampled():
        kept = tf.cond(_any_filter(settings), lambda: _filter(logits, settings), lambda: logits)
        return _sample(kept, settings, position)

    token_ids = tf.cond(tf.reduce_any(settings.temperature > 0.0), sampled, lambda: _argmax(logits))
    return tf.where(is_finite(logits), token_ids, -1)


def is_finite(logits):
    """Whether all logits of a position are finite: `(..., V)` to `(...)` booleans."""
    return tf.reduce_all(tf.math.is_finite(logits), axis=-1)


def require_finite(finite):
    """The assertion that logits are finite, given where they are: booleans of any shape."""
    return _boundary().require(
        tf.reduce_all(finite),
        "The logits are not finite. Expected numbers. Received: NaN or infinity. "
        "Look for NaN in the weights of the model, and for an overflow of half precision.",
    )


def filter_logits(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Keep the logits that top-k, top-p and min-p leave, and set the others to -inf.

    All count on the same distribution: a token stays if fewer than `top_k` tokens are likelier,
    together they hold less than `top_p` of the probability, and its own probability is at least `min_p`
    times that of the likeliest. The likeliest always stays; of equal ones the lower id counts as
    likelier.

    Args:
        logits: `(B, V)` float32, already divided by the temperature.
        top_k: `(B,)` int32 or an integer; 0 for all.
        top_p: `(B,)` float32 or a number in (0, 1]; 1 for all.
        min_p: `(B,)` float32 or a number in [0, 1]; 0 for all.

    Returns:
        `(B, V)` float32.

    Example:

    >>> filter_logits(tf.constant([[1.0, 3.0, 2.0]]), top_k=2).numpy()
    array([[-inf,   3.,   2.]], dtype=float32)
    """
    logits = _boundary().as_logits(logits)
    return tf.where(_kept(logits, top_k, top_p, min_p), logits, -np.inf)


def _kept(logits, top_k, top_p, min_p):
    """Where `filter_logits` keeps a logit."""
    size = tf.shape(logits)[1]
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    top_k, top_p, min_p = (
        _per_row(setting, given[setting.name], logits)[:, None]
        for setting in SETTINGS
        if setting.name in given
    )
    order = tf.argsort(logits, direction="DESCENDING", stable=True)
    probabilities = tf.nn.softmax(tf.gather(logits, order, batch_dims=1))
    before = tf.cumsum(probabilities, axis=-1, exclusive=True)
    rank = tf.range(size)[None, :]
    kept = ((rank < top_k) | (top_k == 0)) & ((before < top_p) | (top_p >= 1.0))
    kept = kept & (probabilities >= min_p * probabilities[:, :1])
    kept = kept | (rank == 0)
    # Back from ranks to token ids: the inverse of a permutation is its argsort.
    return tf.gather(kept, tf.argsort(order), batch_dims=1)


_FILTERS = ("top_k", "top_p", "min_p")


def _any_filter(settings):
    defaults = SamplingSettings()
    on = [getattr(settings, name) != getattr(defaults, name) for name in _FILTERS]
    return tf.reduce_any(functools.reduce(tf.logical_or, on))


def _call(*signature):
    """One call in a graph: an executor visits every operation of a branch that it does not take.

    It must hold no condition or loop: a session turns those into operations that XLA does not know.
    """
    return tf.function(
        input_signature=[
            tf.TensorSpec((None, None), tf.float32),
            SamplingSettings(*(tf.TensorSpec((None,), setting.dtype) for setting in SETTINGS)),
            *signature,
        ],
        autograph=False,
        experimental_attributes={"_noinline": True},
    )


@_call()
def _filter(logits, settings):
    filters = {name: getattr(settings, name) for name in _FILTERS}
    kept = _kept(_scale(logits, settings.temperature), **filters)
    # As unlikely as -inf, but finite: `tf.debugging.enable_check_numerics` stops at every infinity.
    return tf.where(kept, logits, tf.float32.min)


@_call(tf.TensorSpec((None,), tf.int32))
def _sample(logits, settings, position):
    noise = _gumbel_noise(settings.seed, position, tf.shape(logits)[1])
    sampled = _argmax(_scale(logits, settings.temperature) + noise)
    return tf.where(settings.temperature > 0.0, sampled, _argmax(logits))


def _per_row(setting, value, logits):
    """A setting as a `(B,)` tensor."""
    if tf.executing_eagerly() or not tf.is_tensor(value):
        value = tf.constant(_boundary().per_row(setting, value, rows=logits.shape[0]))
    kinds = tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32
    if value.dtype not in kinds and not (setting.dtype == "float32" and value.dtype.is_floating):
        raise ValueError(
            f"{setting.name} does not fit {setting.dtype}. Expected a tensor of {setting.dtype}. "
            f"Received: {value.dtype.name}. Cast it."
        )
    value = tf.cast(value, setting.dtype)
    return value if value.shape.rank == 1 else tf.broadcast_to(value, tf.shape(logits)[:1])


def _boundary():
    """Imported when it is used: the table above is also read where the package is not installed."""
    from keras_tinyattn import _boundary

    return _boundary


def _scale(logits, temperature):
    """(logits - max) / temperature: the same distribution, and no temperature can overflow it."""
    temperature = tf.maximum(temperature, np.finfo(np.float32).tiny)[:, None]
    shifted = logits - tf.reduce_max(logits, axis=-1, keepdims=True)
    # From -200 down there is no probability left, and no noise that could make up for it.
    return tf.maximum(shifted, -200.0 * tf.minimum(temperature, 1e36)) / temperature


def _argmax(logits):
    return tf.argmax(logits, axis=-1, output_type=tf.int32)


def _gumbel_noise(seed, position, size):
    """(B, V) float32 from integer arithmetic, which every compiler does alike.

    TensorFlow's own stateless generators give other floats under XLA than outside it.
    """
    row = tf.bitcast(seed, tf.uint32) + np.uint32(0x9E3779B9)
    row = _mix(_mix(row) + tf.bitcast(position, tf.uint32) * np.uint32(0x85EBCA6B))
    token = tf.cast(tf.range(size), tf.uint32)
    bits = _mix(row[:, None] ^ _mix(token)[None, :])
    # The 23 upper bits, moved to the middle of their interval: exact in float32, never 0, never 1.
    uniform = (tf.cast(_right_shift(bits, 9), tf.float32) + 0.5) * 2.0**-23
    return -tf.math.log(-tf.math.log(uniform))


def _mix(bits):
    """Scramble 32 bits: "lowbias32", public domain, by Chris Wellons."""
    bits = (bits ^ _right_shift(bits, 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ _right_shift(bits, 15)) * np.uint32(0x846CA68B)
    return bits ^ _right_shift(bits, 16)


def _right_shift(bits, places):
    return tf.bitwise.right_shift(bits, np.uint32(places))

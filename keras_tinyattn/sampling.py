"""The logits of one step to the next token ids; no state, a row at a time.

    temperature 0:  argmax(logits)
    above 0:        argmax(logits / temperature + noise), noise of Gumbel's distribution,

which draws a token with the probability softmax(logits / temperature). The noise comes from integers
that depend on seed, position and token id alone, so a row draws the same whatever stands beside it,
eagerly, in a graph, compiled by XLA, and in another process.

Reference: Gumbel-max, in Maddison et al., "A* Sampling", 2014; nucleus (top-p) sampling, Holtzman et
al., "The Curious Case of Neural Text Degeneration", 2020.
"""

import functools

import numpy as np
import tensorflow as tf

__all__ = ["filter_logits", "sample"]


def sample(logits, temperature=0.0, top_k=0, top_p=1.0, seed=0, position=0):
    """Draw the next token id of each row.

    Args:
        logits: `(B, V)`, of any float type.
        temperature: `(B,)` or a number, at least 0; 0 takes the likeliest token, of equal ones the
            lowest id.
        top_k: `(B,)` or an integer: only the `top_k` likeliest tokens are drawn; 0 for all.
        top_p: `(B,)` or a number in (0, 1]: only the fewest likeliest tokens that reach this share of
            the probability are drawn; 1 for all.
        seed: `(B,)` or any int32.
        position: `(B,)` or an integer, where in its text the drawn token will stand: each position has
            a draw of its own, so that a text that is continued later draws as if it never paused.

    Returns:
        `(B,)` int32 token ids.

    Example:

    >>> sample(tf.constant([[0.1, 2.0, 0.3]])).numpy()
    array([1], dtype=int32)
    """
    logits = tf.cast(logits, tf.float32)
    rows = tf.shape(logits)[:1]
    temperature = _one_a_row(temperature, tf.float32, rows)
    top_k = _one_a_row(top_k, tf.int32, rows)
    top_p = _one_a_row(top_p, tf.float32, rows)
    seed = _one_a_row(seed, tf.int32, rows)
    position = _one_a_row(position, tf.int32, rows)

    return tf.cond(
        tf.reduce_any(temperature > 0.0),
        lambda: _draw(logits, temperature, top_k, top_p, seed, position),
        lambda: _argmax(logits),
    )


# A function that stays one: an executor visits every operation of a branch that it does not take.
@functools.partial(
    tf.function,
    input_signature=[
        tf.TensorSpec((None, None), tf.float32),
        *(tf.TensorSpec((None,), dtype) for dtype in ("float32", "int32", "float32", "int32", "int32")),
    ],
    autograph=False,
    experimental_attributes={"_noinline": True},
)
def _draw(logits, temperature, top_k, top_p, seed, position):
    scaled = _scale(logits, temperature)
    noise = _gumbel_noise(seed, position, tf.shape(logits)[1])
    drawn = tf.cond(
        tf.reduce_any(top_k > 0) | tf.reduce_any(top_p < 1.0),
        lambda: _argmax(filter_logits(scaled, top_k, top_p) + noise),
        lambda: _argmax(scaled + noise),
    )
    return tf.where(temperature > 0.0, drawn, _argmax(logits))


def filter_logits(logits, top_k=0, top_p=1.0):
    """Keep the logits that top-k and top-p leave, and set the others to -inf.

    Both count on the same distribution: a token stays if fewer than `top_k` tokens are likelier and
    together they hold less than `top_p` of the probability. The likeliest always stays; of equal ones
    the lower id counts as likelier.

    Args:
        logits: `(B, V)` float32, already divided by the temperature.
        top_k: `(B,)` int32 or an integer; 0 for all.
        top_p: `(B,)` float32 or a number in (0, 1]; 1 for all.

    Returns:
        `(B, V)` float32.

    Example:

    >>> filter_logits(tf.constant([[1.0, 3.0, 2.0]]), top_k=2).numpy()
    array([[-inf,   3.,   2.]], dtype=float32)
    """
    rows, size = tf.shape(logits)[0], tf.shape(logits)[1]
    top_k = _one_a_row(top_k, tf.int32, (rows,))[:, None]
    top_p = _one_a_row(top_p, tf.float32, (rows,))[:, None]
    order = tf.argsort(logits, direction="DESCENDING", stable=True)
    probabilities = tf.nn.softmax(tf.gather(logits, order, batch_dims=1))
    before = tf.cumsum(probabilities, axis=-1, exclusive=True)
    rank = tf.range(size)[None, :]
    kept = ((rank < top_k) | (top_k == 0)) & ((before < top_p) | (top_p >= 1.0))
    kept = kept | (rank == 0)
    # Back from ranks to token ids: the inverse of a permutation is its argsort.
    kept = tf.gather(kept, tf.argsort(order), batch_dims=1)
    return tf.where(kept, logits, -np.inf)


def _one_a_row(value, dtype, rows):
    value = tf.cast(value, dtype)
    return value if value.shape.rank == 1 else tf.broadcast_to(value, rows)


def _scale(logits, temperature):
    """(logits - max) / temperature: the same distribution, and no temperature can overflow it."""
    shifted = logits - tf.reduce_max(logits, axis=-1, keepdims=True)
    return shifted / tf.maximum(temperature, np.finfo(np.float32).tiny)[:, None]


def _argmax(logits):
    return tf.argmax(logits, axis=-1, output_type=tf.int32)


def _gumbel_noise(seed, position, size):
    """(B, V) float32 from integer arithmetic, which every compiler does alike.

    TensorFlow's own stateless generators draw other floats under XLA than outside it.
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

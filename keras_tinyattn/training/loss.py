"""The next-token loss."""

import tensorflow as tf


def next_token_loss(logits, targets, mask=None):
    """Mean negative log-likelihood of the targets, in nats a token.

        loss = -mean(log softmax(logits)[target])

    Args:
        logits: `(..., V)`.
        targets: `(...)` integers, the id that each row of logits should have foretold.
        mask: `(...)` booleans, true where the target is real; all are unless given.

    Returns:
        A scalar in at least float32; 0, with a gradient of 0, when no target is real.

    Example:

    >>> print(next_token_loss(tf.zeros((1, 3, 20)), [[2, 3, 4]]).numpy().round(3))
    2.996
    """
    total, count = sum_of_losses(logits, targets, mask)
    return tf.math.divide_no_nan(total, count)


def sum_of_losses(logits, targets, mask=None):
    """The numerator and denominator of `next_token_loss`, which add up over batches and devices."""
    logits = tf.convert_to_tensor(logits)
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    if mask is None:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
        return tf.reduce_sum(losses), tf.cast(tf.size(losses), losses.dtype)
    mask = tf.cast(mask, tf.bool)
    # Before the loss, not after it: neither the value nor the gradient of a target that does not count
    # need be finite, and 0 * NaN is NaN.
    logits = tf.where(mask[..., None], logits, tf.zeros_like(logits))
    targets = tf.where(mask, targets, tf.zeros_like(targets))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    real = tf.cast(mask, losses.dtype)
    return tf.reduce_sum(losses * real), tf.reduce_sum(real)

"""Text to a fitted model: the next-token loss and the GradientTape step that lowers it."""

import tensorflow as tf

__all__ = ["make_train_step", "next_token_loss"]


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
    logits = tf.convert_to_tensor(logits)
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    if mask is None:
        return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(tf.size(losses), losses.dtype))
    mask = tf.cast(mask, tf.bool)
    # A select, not a product: a target that does not count may have no finite loss.
    losses = tf.where(mask, losses, tf.zeros_like(losses))
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(tf.cast(mask, losses.dtype)))


def make_train_step(model, optimizer):
    """A function that takes one GradientTape step on a batch.

    Forward and backward pass are compiled with XLA; the optimizer updates outside of them, which also
    works under a distribution strategy.

    Args:
        model: a built `CausalLM`.
        optimizer: a Keras optimizer.

    Returns:
        `step(token_ids, targets, mask=None)`, of `(B, T)` each; it updates the model and returns the
        loss before the update, a scalar.
    """

    @tf.function(jit_compile=True)
    def loss_and_gradients(token_ids, targets, mask):
        with tf.GradientTape() as tape:
            loss = next_token_loss(model(token_ids, training=True), targets, mask)
        return loss, tape.gradient(loss, model.trainable_variables)

    optimizer.build(model.trainable_variables)

    @tf.function
    def step(token_ids, targets, mask=None):
        loss, gradients = loss_and_gradients(token_ids, targets, mask)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step

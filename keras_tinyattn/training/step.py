"""One step down the gradient, on one device or many."""

import tensorflow as tf

from keras_tinyattn.training.loss import sum_of_losses


def make_train_step(model, optimizer, clip_norm=None):
    """A function that takes one GradientTape step on a batch.

    Forward and backward pass are compiled with XLA; the optimizer updates outside of them. Called
    where a distribution strategy is in scope, the step runs on each of its devices, and the loss is the
    mean over the global batch: the sum on a device, divided by the count on all of them.

    Args:
        model: a built `CausalLM`.
        optimizer: a Keras optimizer.
        clip_norm: the longest that the gradient of the global batch may be, over all variables;
            a longer one is scaled down to it.

    Returns:
        `step(token_ids, targets, mask=None)`, of `(B, T)` each, or of the per-device batches of a
        strategy; it updates the model and returns the loss before the update, a scalar.

    Raises:
        ValueError: if the optimizer clips by itself on more than one device.
    """
    strategy = tf.distribute.get_strategy()
    devices = strategy.num_replicas_in_sync
    if devices > 1 and (optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue):
        raise ValueError(
            "A Keras optimizer clips what each device adds to the gradient, before it is summed. "
            f"Expected an optimizer that does not clip, on {devices} devices. Received: "
            f"clipnorm={optimizer.clipnorm}, global_clipnorm={optimizer.global_clipnorm}, "
            f"clipvalue={optimizer.clipvalue}. Pass clip_norm to make_train_step instead."
        )

    @tf.function(jit_compile=True)
    def loss_and_gradients(token_ids, targets, mask, count):
        with tf.GradientTape() as tape:
            total, own_count = sum_of_losses(model(token_ids, training=True), targets, mask)
            loss = tf.math.divide_no_nan(total, own_count if count is None else count)
        # The gradient of a table comes as the rows that were looked up; as a whole it can be summed.
        gradients = [
            tf.convert_to_tensor(gradient)
            for gradient in tape.gradient(loss, model.trainable_variables)
        ]
        return loss, gradients if devices > 1 else clip(gradients)

    def clip(gradients):
        if clip_norm is None:
            return gradients
        return tf.clip_by_global_norm(gradients, clip_norm)[0]

    def update(token_ids, targets, mask):
        if devices == 1:
            loss, gradients = loss_and_gradients(token_ids, targets, mask, None)
        else:
            replica = tf.distribute.get_replica_context()
            own_count = tf.size(targets) if mask is None else tf.math.count_nonzero(mask)
            count = replica.all_reduce("sum", tf.cast(own_count, tf.float32))
            loss, gradients = loss_and_gradients(token_ids, targets, mask, count)
            loss = replica.all_reduce("sum", loss)
            if clip_norm is not None:
                # Keras sums over the devices when it applies: equal parts bring back what is clipped.
                gradients = clip(replica.all_reduce("sum", gradients))
                gradients = [gradient / devices for gradient in gradients]
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    optimizer.build(model.trainable_variables)

    @tf.function
    def step(token_ids, targets, mask=None):
        if devices == 1 and not tf.distribute.has_strategy():
            return update(token_ids, targets, mask)
        losses = strategy.run(update, (token_ids, targets, mask))
        return strategy.experimental_local_results(losses)[0]

    return step

"""The loss, a step down its gradient on one device or many, and the loop over the steps."""

import keras
import tensorflow as tf

from keras_tinyattn.training.optimizer import steps_taken
from keras_tinyattn.training.windows import training_batches


def next_token_loss(logits, targets, mask=None):
    """Mean negative log-likelihood of the targets, in nats per token.

        loss = -mean(log softmax(logits)[target])

    Args:
        logits: `(..., V)`.
        targets: `(...)` integers, the id that each row of logits should predict.
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
    # Masked before the loss, not after it: where a target does not count, neither the loss nor its
    # gradient need be finite, and 0 * NaN is NaN.
    logits = tf.where(mask[..., None], logits, tf.zeros_like(logits))
    targets = tf.where(mask, targets, tf.zeros_like(targets))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    real = tf.cast(mask, losses.dtype)
    return tf.reduce_sum(losses * real), tf.reduce_sum(real)


def make_train_step(model, optimizer, clip_norm=None):
    """A function that takes one GradientTape step on a batch.

    The step is that of `fit`: what regularizers and `add_loss` contribute is part of the loss, a
    variable without a gradient is named in a warning and left as it is, and the optimizer's own options
    hold (loss scaling, accumulation, clipping, moving averages). Two things differ. `compile` wraps the
    optimizer of a "mixed_float16" model in a `keras.optimizers.LossScaleOptimizer`; here the caller
    does, or small gradients become 0. And the gradient of an embedding is dense: what a token that
    occurs twice contributes is summed before it is clipped, scaled or squared.

    Forward and backward pass are compiled with XLA; the optimizer updates outside of them. When called
    in the scope of a distribution strategy, the step runs on each of its devices, and the loss is the
    mean over the global batch: the sum on a device, divided by the count on all of them.

    A model may change between two steps: after a layer is frozen or replaced, or its dtype policy is
    changed, the next call trains the model as it is then.

    Args:
        model: a `CausalLM`; built here unless it is.
        optimizer: a Keras optimizer.
        clip_norm: the largest norm that the gradient of the global batch may have, over all variables;
            a longer gradient is scaled down to it.

    Returns:
        `step(token_ids, targets, mask=None)`, of `(B, T)` each, or of the per-device batches of a
        strategy; it updates the model and returns the loss before the update, a scalar: as in `fit`,
        `next_token_loss` plus `model.losses`.

    Raises:
        TypeError: if the optimizer is not one of Keras.
        ValueError: if the optimizer clips, accumulates or overwrites by itself on more than one device.
            Here and at a step: if it was built for other variables than the model trains, or all of
            them are frozen.
    """
    strategy = tf.distribute.get_strategy()
    devices = strategy.num_replicas_in_sync
    _check_optimizer(optimizer, devices)
    if not model.built:
        model.build((None, model.sequence_length))
    if not optimizer.built:  # A LossScaleOptimizer that is built again forgets its scale.
        optimizer.build(model.trainable_variables)
    _check_variables(model, optimizer)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    def clip(gradients):
        if clip_norm is None:
            return gradients
        # They are gradients of the scaled loss, and as much longer.
        return tf.clip_by_global_norm(gradients, optimizer.scale_loss(clip_norm))[0]

    def make_step():
        _check_variables(model, optimizer)

        @tf.function(jit_compile=True)
        def loss_and_gradients(token_ids, targets, mask, count):
            with tf.GradientTape() as tape:
                total, own_count = sum_of_losses(model(token_ids, training=True), targets, mask)
                loss = tf.math.divide_no_nan(total, own_count if count is None else count)
                # The sum over the devices is their mean.
                for contribution in model.losses:
                    loss += tf.reduce_sum(tf.cast(contribution, loss.dtype)) / devices
                scaled = optimizer.scale_loss(loss)
            # The gradient of an embedding is sparse, `IndexedSlices`; a dense one can be summed.
            gradients = [
                None if gradient is None else tf.convert_to_tensor(gradient)
                for gradient in tape.gradient(scaled, model.trainable_variables)
            ]
            return loss, gradients if devices > 1 else clip(gradients)

        def update(token_ids, targets, mask):
            if devices == 1:
                loss, gradients = loss_and_gradients(token_ids, targets, mask, None)
            else:
                replica = tf.distribute.get_replica_context()
                own_count = tf.size(targets) if mask is None else tf.math.count_nonzero(mask)
                count = replica.all_reduce("sum", tf.cast(own_count, tf.float32))
                loss, gradients = loss_and_gradients(token_ids, targets, mask, count)
                loss = replica.all_reduce("sum", loss)
                # Whether a gradient is too long, or finite, shows in its sum over the devices. `apply`
                # sums again, so each of them gives an equal part of it.
                if clip_norm is not None or scales:
                    present = [gradient for gradient in gradients if gradient is not None]
                    summed = iter(clip(replica.all_reduce("sum", present)))
                    gradients = [None if g is None else next(summed) / devices for g in gradients]
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        @tf.function
        def step(token_ids, targets, mask=None):
            if devices == 1 and not tf.distribute.has_strategy():
                return update(token_ids, targets, mask)
            losses = strategy.run(update, (token_ids, targets, mask))
            return strategy.experimental_local_results(losses)[0]

        return step

    return never_stale(model, make_step)


def train(model, optimizer, token_ids, steps, batch_size, sequence_length=None, seed=0, clip_norm=None):
    """Take one step after another, from the number of steps that the optimizer has taken.

    It is a generator, so between two steps its caller can evaluate, save, or stop. In the scope of a
    distribution strategy, all of its devices take part.

    Args:
        model: a `CausalLM`; built here unless it is.
        optimizer: a Keras optimizer; it counts the steps that it has taken. A step is a batch, also
            where several of them make one update (`gradient_accumulation_steps`). Not counted are those
            that a `LossScaleOptimizer` skipped: a run that is resumed sees as many batches again.
        token_ids: `(N,)` integers, the text to train on.
        steps: the number of steps after which to end. An optimizer with `use_ema` then puts its
            averages into the model, as at the end of `fit`.
        batch_size: B, windows per step, on all devices together.
        sequence_length: T, the length of a window; the model's longest unless given.
        seed: an int32; with the step it decides which windows a batch holds.
        clip_norm: as in `make_train_step`.

    Yields:
        Pairs of the number of steps taken and the loss of the last one, a scalar tensor.

    Raises:
        ValueError: as `training_batches` and `make_train_step`.

    Example:

    >>> import keras, keras_tinyattn
    >>> model = keras_tinyattn.gpt(11, sequence_length=5, hidden_dim=6, num_heads=2, num_layers=1)
    >>> model.build((None, 5))
    >>> text = list(range(11)) * 3
    >>> losses = [loss for _, loss in train(model, keras.optimizers.Adam(0.1), text, 9, batch_size=4)]
    >>> bool(losses[-1] < losses[0])
    True
    """
    length = model.sequence_length if sequence_length is None else sequence_length
    step = make_train_step(model, optimizer, clip_norm)
    taken = steps_taken(optimizer)

    def batches(input_context=None):
        return training_batches(token_ids, length, batch_size, seed, taken, input_context)

    if tf.distribute.has_strategy():
        dataset = tf.distribute.get_strategy().distribute_datasets_from_function(batches)
    else:
        dataset = batches()
    iterator = iter(dataset)
    while taken < steps:
        loss = step(*next(iterator))
        taken += 1
        if taken == steps:
            optimizer.finalize_variable_values(model.trainable_variables)
        yield taken, loss


def never_stale(model, make):
    """A function that calls what `make()` returns, made again whenever the model's graph has changed.

    Args:
        model: the model.
        make: makes a `tf.function` that calls the model.
    """
    key = function = None

    def call(*args, **kwargs):
        nonlocal key, function
        if key != (current := model.graph_key()):
            key, function = current, make()
        return function(*args, **kwargs)

    return call


def _check_optimizer(optimizer, devices):
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "A step updates the model by an optimizer. Expected a keras.optimizers.Optimizer. "
            f"Received: {optimizer!r}. Make one, such as keras.optimizers.AdamW(1e-3)."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    names += ("gradient_accumulation_steps", "ema_overwrite_frequency")
    own = [f"{name}={getattr(inner, name)}" for name in names if getattr(inner, name)]
    if devices > 1 and own:
        raise ValueError(
            "A Keras optimizer clips what each device adds to the gradient, before it is summed, and "
            "fails where it accumulates gradients or overwrites variables with averages. "
            f"Expected an optimizer that does none of these, on {devices} devices. "
            f"Received: {', '.join(own)}. Pass clip_norm to make_train_step, or use a larger batch."
        )


def _check_variables(model, optimizer):
    if not model.trainable_variables:
        raise ValueError(
            "Training changes the variables that are trainable. Expected at least one. "
            f"Received: a model with {len(model.variables)} variables, all frozen. "
            "Set `trainable = True` on a layer."
        )
    # Keras has no public way to ask.
    known = {id(variable) for variable in optimizer._trainable_variables}
    unknown = [variable for variable in model.trainable_variables if id(variable) not in known]
    if unknown:
        raise ValueError(
            "The optimizer was built for other variables. Expected one built for every "
            f"variable that the model trains. Received: one that was not built for {unknown[0].path}. "
            "Make a new optimizer, and a new step with it."
        )

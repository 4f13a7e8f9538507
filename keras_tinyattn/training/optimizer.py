"""The usual optimizer of language models."""

import keras
import tensorflow as tf


def make_optimizer(
    model, learning_rate, steps, warmup_steps=0, final_share=0.1, weight_decay=0.1, beta_2=0.99
):
    """AdamW with warm-up and cosine decay of the learning rate, and weight decay of matrices only.

    Args:
        model: a built model; its vectors (biases, normalizations) do not decay.
        learning_rate: its peak, reached after the warm-up.
        steps: the step at which the decay ends; the learning rate stays there.
        warmup_steps: the number of steps in which it rises from 0 to its peak.
        final_share: where the decay ends, as a share of the peak in [0, 1]; 1 keeps it constant.
        weight_decay: each step subtracts this share of a matrix, times the learning rate.
        beta_2: decay rate of the moving average of squared gradients.

    Returns:
        A `keras.optimizers.AdamW`.

    Raises:
        ValueError: if the model is not built, or the warm-up leaves no step to decay over.

    Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    if not model.built:
        raise ValueError(
            "The shapes of variables decide which of them decay. Expected a built model. "
            "Received: a model without variables. Build it, or call it on a batch first."
        )
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            "The learning rate rises in the warm-up and decays after it. "
            f"Expected warmup_steps from 0 to {steps - 1}. Received: warmup_steps={warmup_steps}, "
            f"steps={steps}. Warm up for fewer steps, or train for more."
        )
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0 if warmup_steps else learning_rate,
        decay_steps=steps - warmup_steps,
        alpha=final_share,
        warmup_target=learning_rate if warmup_steps else None,
        warmup_steps=warmup_steps,
    )
    optimizer = keras.optimizers.AdamW(
        schedule, weight_decay=weight_decay, beta_1=0.9, beta_2=beta_2, epsilon=1e-8
    )
    optimizer.exclude_from_weight_decay(
        var_list=[variable for variable in model.trainable_variables if len(variable.shape) < 2]
    )
    return optimizer


def steps_taken(optimizer):
    """How many batches the optimizer has used, as an integer, also under a distribution strategy."""
    # The public `iterations` counts updates, and several batches may make one.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return int(tf.convert_to_tensor(inner._iterations.value))

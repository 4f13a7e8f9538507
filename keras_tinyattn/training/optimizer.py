"""The usual optimizer of language models."""

import keras
import tensorflow as tf


def make_optimizer(
    model, learning_rate, steps, warmup_steps=0, final_share=0.1, weight_decay=0.1, beta_2=0.99
):
    """AdamW with warm-up and cosine decay of the learning rate, and weight decay on matrices only.

    Args:
        model: a built model; its vectors (biases, normalisations) do not decay.
        learning_rate: its peak, reached after the warm-up.
        steps: the step at which the learning rate has come down; it stays there.
        warmup_steps: over how many of them it rises from 0 to its peak.
        final_share: the share of the peak at which it ends, in [0, 1]; 1 keeps it constant.
        weight_decay: share of a matrix that is taken off at each step, times the learning rate.
        beta_2: how slowly the mean of the squared gradients forgets.

    Returns:
        A `keras.optimizers.AdamW`.

    Raises:
        ValueError: if the model is not built, or the warm-up leaves no step to decay over.

    Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    if not model.built:
        raise ValueError(
            "Which variables decay follows from their shapes. Expected a built model. "
            "Received: a model without variables. Call it on a batch first."
        )
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            "The learning rate rises first and comes down after. "
            f"Expected warmup_steps from 0 to {steps - 1}. Received: warmup_steps={warmup_steps}, "
            f"steps={steps}. Warm up for less, or train for longer."
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
    """How many steps the optimizer has taken, as an integer, also where a strategy mirrors them."""
    return int(tf.convert_to_tensor(optimizer.iterations.value))

"""The loop over the steps."""

import tensorflow as tf

from keras_tinyattn.training.optimizer import steps_taken
from keras_tinyattn.training.step import make_train_step
from keras_tinyattn.training.windows import training_batches


def train(model, optimizer, token_ids, steps, batch_size, sequence_length=None, seed=0, clip_norm=None):
    """Take one step after the other, from where the optimizer stands.

    Who iterates decides what happens between two steps: measure, sample, save, show, or stop.
    Where a distribution strategy is in scope, all of its devices take part.

    Args:
        model: a built `CausalLM`.
        optimizer: a Keras optimizer; its `iterations` say how many steps it has taken.
        token_ids: `(N,)` integers, the text to learn from.
        steps: the number of steps after which to end.
        batch_size: B, windows a step, on all devices together.
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
    >>> _ = model(tf.zeros((1, 5), "int32"))
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
        yield taken, loss

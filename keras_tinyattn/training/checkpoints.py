"""What a run needs to go on after it was stopped, on disk."""

import tensorflow as tf

from keras_tinyattn.training.optimizer import steps_taken


class Checkpoints:
    """TensorFlow checkpoints of a model, its optimizer and its random states.

    A checkpoint is written beside the others and named as the newest when it is whole: a kill or a
    full disk leaves the one before it.

    Args:
        directory: where they stand.
        model: a built model.
        optimizer: its optimizer, built by `make_train_step` or `optimizer.build`.
        keep: how many of the newest are kept.
    """

    def __init__(self, directory, model, optimizer, keep=2):
        self.directory = str(directory)
        self.optimizer = optimizer
        # Every variable by its place: Keras' own objects leave the states of dropout out.
        checkpoint = tf.train.Checkpoint(
            model=[variable.value for variable in model.variables],
            optimizer=[variable.value for variable in optimizer.variables],
        )
        self._manager = tf.train.CheckpointManager(checkpoint, self.directory, max_to_keep=keep)

    def save(self):
        """Write a checkpoint, named after the number of steps taken.

        Returns:
            Its path prefix.
        """
        return self._manager.save(checkpoint_number=steps_taken(self.optimizer))

    def restore(self):
        """Set every variable as the newest checkpoint has it.

        Returns:
            The number of steps that it had taken, or 0 if there is none.
        """
        newest = self._manager.latest_checkpoint
        if newest is None:
            return 0
        self._manager.checkpoint.restore(newest).assert_consumed()
        return steps_taken(self.optimizer)

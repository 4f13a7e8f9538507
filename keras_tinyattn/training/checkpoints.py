"""What a run needs to go on after it was stopped, on disk."""

import pathlib
import re
import shutil

import tensorflow as tf

from keras_tinyattn.training.optimizer import steps_taken


class Checkpoints:
    """TensorFlow checkpoints of a model, its optimizer and its random states.

    A checkpoint is written under another name and renamed when it is whole: a kill or a full disk
    leaves the one before it as the newest.

    Args:
        directory: where they stand.
        model: a built model.
        optimizer: its optimizer, built by `make_train_step` or `optimizer.build`.
        keep: how many of the newest are kept.
    """

    def __init__(self, directory, model, optimizer, keep=2):
        self.directory = pathlib.Path(directory)
        self.optimizer = optimizer
        # Every variable by its place: Keras' own objects leave the states of dropout out.
        self._checkpoint = tf.train.Checkpoint(
            model=[variable.value for variable in model.variables],
            optimizer=[variable.value for variable in optimizer.variables],
        )
        # Made at the first save unless asked for: among several workers only one saves, and a variable
        # must be made by all of them.
        _ = self._checkpoint.save_counter
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(directory), max_to_keep=keep)

    def save(self):
        """Write a checkpoint, named after the number of steps taken.

        Returns:
            Its path prefix.
        """
        for leftover in self.directory.glob("ckpt-*_temp"):  # Of a write that was cut short.
            shutil.rmtree(leftover, ignore_errors=True)
        return self._manager.save(checkpoint_number=steps_taken(self.optimizer))

    def restore(self):
        """Set every variable as the newest whole checkpoint has it.

        Returns:
            The number of steps that it had taken, or 0 if there is no checkpoint.

        Raises:
            ValueError: if it is of a model or optimizer of other sizes, or none that is there can be
                read.
        """
        prefixes = sorted(
            (path.with_suffix("") for path in self.directory.glob("ckpt-*.index")),
            key=lambda prefix: int(re.search(r"\d+$", prefix.name).group()),
            reverse=True,
        )
        for prefix in prefixes:
            try:
                self._check_sizes(prefix)
                self._checkpoint.restore(str(prefix)).assert_consumed()
            except (tf.errors.OpError, IndexError):
                continue  # Damaged after it was written: the one before it is whole.
            return steps_taken(self.optimizer)
        if prefixes:
            raise ValueError(
                f"No checkpoint in {self.directory} can be read. Expected a whole one. "
                f"Received: {len(prefixes)} damaged. Start again in another directory."
            )
        return 0

    def _check_sizes(self, prefix):
        found = {
            name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): tuple(shape)
            for name, shape in tf.train.list_variables(str(prefix))
            if name.startswith(("model/", "optimizer/"))
        }
        expected = {
            f"{part}/{index}": tuple(variable.shape)
            for part in ("model", "optimizer")
            for index, variable in enumerate(getattr(self._checkpoint, part))
        }
        if found != expected:
            different = sorted(set(found.items()) ^ set(expected.items()))[0][0]
            raise ValueError(
                f"{prefix} was made by a model or optimizer of other sizes. Expected for its variable "
                f"{different}: {expected.get(different, 'nothing')}. "
                f"Received: {found.get(different, 'nothing')}. Build both with the sizes of that run."
            )

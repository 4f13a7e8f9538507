"""What a run needs to continue after it was stopped, on disk."""

import re
import shutil

import tensorflow as tf

from keras_tinyattn._paths import local_path
from keras_tinyattn.training.optimizer import steps_taken


class Checkpoints:
    """TensorFlow checkpoints of a model, its optimizer and its random states.

    A checkpoint is written under another name and renamed when it is complete: after a kill or a full
    disk the one before it is still the newest.

    Args:
        directory: where they are kept.
        model: a built model.
        optimizer: its optimizer, built by `make_train_step` or `optimizer.build`.
        keep: how many to keep, the newest.
    """

    def __init__(self, directory, model, optimizer, keep=2):
        self.directory = local_path(directory)
        self.optimizer = optimizer
        # Variables by their index: what TensorFlow tracks in Keras' own objects lacks dropout's seeds.
        self._checkpoint = tf.train.Checkpoint(
            model=[variable.value for variable in model.variables],
            optimizer=[variable.value for variable in optimizer.variables],
        )
        # TensorFlow would create this counter at the first save. Of several workers only one saves, but
        # all of them must create a variable: so it is created here.
        _ = self._checkpoint.save_counter
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(self.directory), max_to_keep=keep
        )

    def save(self):
        """Write a checkpoint, named after the number of steps taken.

        Returns:
            Its path prefix.
        """
        for leftover in self.directory.glob("ckpt-*_temp"):  # A write was interrupted.
            shutil.rmtree(leftover, ignore_errors=True)
        return self._manager.save(checkpoint_number=steps_taken(self.optimizer))

    def restore(self):
        """Set every variable to its value in the newest complete checkpoint.

        Returns:
            The number of steps taken by then, or 0 if there is no checkpoint.

        Raises:
            ValueError: if it belongs to a model or optimizer of other sizes, or every checkpoint
                is damaged.
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
                continue  # Damaged later; the one before it may be complete.
            return steps_taken(self.optimizer)
        if prefixes:
            raise ValueError(
                f"No checkpoint in {self.directory} can be read. Expected a complete one. "
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
                f"{prefix} belongs to a model or optimizer of other sizes. Expected for its variable "
                f"{different}: {expected.get(different, 'nothing')}. "
                f"Received: {found.get(different, 'nothing')}. Build both with the sizes of that run."
            )

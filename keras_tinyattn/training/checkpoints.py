"""What a run needs to continue after it was stopped, on disk."""

import pathlib
import re
import shutil

import tensorflow as tf

from keras_tinyattn._paths import local_path
from keras_tinyattn.training.optimizer import steps_taken


class Checkpoints:
    """TensorFlow checkpoints of a model, its optimizer and its random states.

    A checkpoint is written under another name and renamed when it is complete: after a kill or a full
    disk the one before it is still the newest. One process at a time may write to the directory.

    Args:
        directory: where they are kept.
        model: a built model.
        optimizer: its optimizer, built by `make_train_step` or `optimizer.build`.
        keep: how many to keep, the newest.

    Raises:
        ValueError: if model or optimizer are not built.
    """

    def __init__(self, directory, model, optimizer, keep=2):
        for name, built in (("model", model.built), ("optimizer", optimizer.built)):
            if not built:
                raise ValueError(
                    "A checkpoint holds variables. Expected a model and an optimizer that are built. "
                    f"Received: {'an' if name == 'optimizer' else 'a'} {name} without variables. "
                    "Build both, or make them a step with make_train_step first."
                )
        self.directory = local_path(directory)
        self.optimizer = optimizer
        self._variables = [*model.variables, *optimizer.variables]
        # Variables by their index: what TensorFlow tracks in Keras' own objects lacks dropout's seeds.
        self._checkpoint = tf.train.Checkpoint(
            model=[variable.value for variable in model.variables],
            optimizer=[variable.value for variable in optimizer.variables],
        )
        # TensorFlow would create this counter at the first save. Of several workers only one saves, but
        # all of them must create a variable: so it is created here.
        _ = self._checkpoint.save_counter
        try:
            self._manager = tf.train.CheckpointManager(self._checkpoint, str(self.directory), keep)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.directory / 'checkpoint'} is damaged. Expected TensorFlow's list of "
                "checkpoints, a text. Received: other bytes. Remove it; they are found without it."
            ) from error

    def check_finite(self):
        """Refuse a state that training cannot return from.

        Raises:
            ValueError: if a variable of the model or the optimizer holds NaN or infinity.
        """
        for variable in self._variables:
            value = tf.convert_to_tensor(variable.value)
            if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
                raise ValueError(
                    f"Training diverged by step {steps_taken(self.optimizer)}. "
                    f"Expected finite variables. Received: NaN or infinity in {variable.path}. "
                    "It is not saved. Use a smaller learning rate or a longer warm-up."
                )

    def save(self):
        """Write a checkpoint, named after the number of steps taken, and remove what kills left over.

        Returns:
            Its path prefix.

        Raises:
            ValueError: as `check_finite`.
        """
        self.check_finite()
        # A kill leaves an interrupted write, or a checkpoint that is missing in TensorFlow's list.
        for leftover in self.directory.glob("ckpt-*_temp"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.directory.glob("checkpoint.tmp*"):
            leftover.unlink()
        path = self._manager.save(checkpoint_number=steps_taken(self.optimizer))
        kept = {pathlib.Path(prefix).name for prefix in self._manager.checkpoints}
        for file in self._files():
            if file.name.partition(".")[0] not in kept:
                file.unlink()
        return path

    def restore(self):
        """Set every variable to its value in the newest complete checkpoint.

        Returns:
            The number of steps taken by then, or 0 if there is no checkpoint.

        Raises:
            ValueError: if it belongs to a model or optimizer of other sizes, or every checkpoint
                is damaged.
        """
        prefixes = sorted(
            (file.with_suffix("") for file in self._files() if file.suffix == ".index"),
            key=lambda prefix: int(prefix.name.removeprefix("ckpt-")),
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

    def _files(self):
        files = self.directory.glob("ckpt-*.*")
        return [
            file for file in files if re.fullmatch(r"ckpt-\d+\.(index|data-[\d-]+of-\d+)", file.name)
        ]

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

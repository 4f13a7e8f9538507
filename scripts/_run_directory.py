"""The directory of a training run: its settings, what it has measured, and its model.

run.json          the settings that decide the run's numbers
tokenizer.json    text <-> ids
history.jsonl     the loss of each step and each evaluation, one per line
checkpoints/      what `--resume` continues from
logs/             the same measurements for TensorBoard
model.keras       the model with the best validation loss
"""

import hashlib
import json
import math

from _start import local_path, whole_file


class RunDirectory:
    """Files of one run under one path.

    Args:
        path: the directory; it need not exist.
    """

    def __init__(self, path):
        self.path = local_path(path)
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.model = self.path / "model.keras"

    def create(self, settings, text, tokenizer):
        """Make the directory and keep what decides the run.

        Raises:
            ValueError: if it holds a run, or the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out needs a directory, but {str(self.path)!r} is a file.")
        if self.checkpoints.exists() or self.model.exists():
            raise ValueError(
                f"{str(self.path)!r} already holds a run. "
                "Continue it with --resume, or give another directory with --out."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "history.jsonl").unlink(missing_ok=True)
        with whole_file(self.path / "tokenizer.json") as part:
            tokenizer.save(part)
        kept = {**settings, "text_sha256": fingerprint(text)}
        with whole_file(self.path / "run.json") as part:
            part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def settings(self):
        """The settings of the run in the directory.

        Raises:
            ValueError: if there is none.
        """
        try:
            return json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ValueError(
                f"--resume continues a run, but {str(self.path)!r} holds none. "
                "Name its directory with --out, or start a run without --resume."
            ) from None

    def check_text(self, settings, text):
        """Refuse to continue with another text than the run began with.

        Raises:
            ValueError: if it differs.
        """
        if fingerprint(text) != settings["text_sha256"]:
            raise ValueError(
                f"{settings['text']!r} is not the text that the run in {str(self.path)!r} began with. "
                "Put that text back, or start another run with --out."
            )

    def save_model(self, model):
        with whole_file(self.model) as part:
            model.save(part)

    def history(self, taken):
        """The measurements of the first `taken` steps; those of later steps, which were lost, go."""
        history = History(self.path / "history.jsonl")
        history.read(taken)
        return history


class History:
    """The loss of each step, and of each evaluation, in memory and in a file."""

    def __init__(self, path):
        self.path = path
        self.losses = []  # of step 1, 2, ...
        self.evaluations = []  # pairs of step and loss
        self._unwritten = []

    def add_loss(self, step, loss):
        self.losses.append(loss)
        self._unwritten.append({"step": step, "loss": loss})

    def add_evaluation(self, step, loss):
        self.evaluations.append((step, loss))
        self._unwritten.append({"step": step, "validation_loss": loss})

    def recent_loss(self, count=50):
        """Mean loss of the last steps."""
        recent = self.losses[-count:]
        return math.fsum(recent) / len(recent)

    def last_is_best(self):
        """Whether no evaluation was better than the last one; true if there is none."""
        return not self.evaluations or self.evaluations[-1] == self.best()

    def best(self):
        """The step and loss of the best evaluation; there must be one."""
        return min(self.evaluations, key=lambda evaluation: evaluation[1])

    def write(self):
        """Append to the file what it does not hold yet."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(entry) + "\n" for entry in self._unwritten))
        self._unwritten = []

    def read(self, taken):
        """Read the file up to step `taken`, and cut off the rest."""
        held = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        entries = []
        for line in held.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # The process was killed while it wrote this line.
                break
            if entry["step"] <= taken:
                entries.append(entry)
        for entry in entries:
            if "loss" in entry:
                self.add_loss(entry["step"], entry["loss"])
            else:
                self.add_evaluation(entry["step"], entry["validation_loss"])
        self._unwritten = []
        kept = "".join(json.dumps(entry) + "\n" for entry in entries)
        if kept != held:
            with whole_file(self.path) as part:
                part.write_text(kept, encoding="utf-8")


def fingerprint(text):
    return hashlib.sha256(text.encode()).hexdigest()

"""The directory of a training run: what it was told, what it has measured, and its model.

run.json          what decides the run's numbers
tokenizer.json    text <-> ids
history.jsonl     the loss of each step and each evaluation, a line each
checkpoints/      what `--resume` goes on from
logs/             the same measurements for TensorBoard
model.keras       the model that did best by the evaluations
"""

import hashlib
import json
import math
from pathlib import Path

from _start import whole_file


class RunDirectory:
    """Files of one run under one path.

    Args:
        path: the directory; it need not exist.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"

    def create(self, settings, text, tokenizer):
        """Make the directory and keep what decides the run.

        Raises:
            ValueError: if a run stands there, or the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out needs a directory, but {str(self.path)!r} is a file.")
        if self.checkpoints.exists() or (self.path / "model.keras").exists():
            raise ValueError(
                f"{str(self.path)!r} already holds a run. "
                "Go on with it by --resume, or give another directory by --out."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "history.jsonl").unlink(missing_ok=True)
        with whole_file(self.path / "tokenizer.json") as part:
            tokenizer.save(part)
        kept = {**settings, "text_sha256": fingerprint(text)}
        with whole_file(self.path / "run.json") as part:
            part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def settings(self):
        """What decided the run that stands there.

        Raises:
            ValueError: if none does.
        """
        try:
            kept = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ValueError(
                f"--resume goes on with a run, but {str(self.path)!r} holds none. "
                "Name its directory by --out, or leave --resume out to start one."
            ) from None
        return kept

    def check_text(self, settings, text):
        """Refuse to go on with another text than the run began with.

        Raises:
            ValueError: if it differs.
        """
        if fingerprint(text) != settings["text_sha256"]:
            raise ValueError(
                f"{settings['text']!r} is not the text that the run in {str(self.path)!r} began with. "
                "Put that text back, or start another run by --out."
            )

    def save_model(self, model):
        with whole_file(self.path / "model.keras") as part:
            model.save(part)

    def history(self, taken):
        """The measurements of the first `taken` steps; later ones, of steps that were lost, go."""
        history = History(self.path / "history.jsonl")
        history.read(taken)
        return history


class History:
    """The loss of each step, and of the validation text, in memory and in a file."""

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
        """The step and loss of the best evaluation; None before the first."""
        return min(self.evaluations, key=lambda evaluation: evaluation[1], default=None)

    def write(self):
        """Append to the file what it does not hold yet."""
        lines = "".join(json.dumps(entry) + "\n" for entry in self._unwritten)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(lines)
        self._unwritten = []

    def read(self, taken):
        entries = []
        held = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for line in held.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # The line that was being written when the process was killed.
                break
            if entry["step"] <= taken:
                entries.append(entry)
        self.losses = [entry["loss"] for entry in entries if "loss" in entry]
        self.evaluations = [
            (entry["step"], entry["validation_loss"]) for entry in entries if "validation_loss" in entry
        ]
        kept = "".join(json.dumps(entry) + "\n" for entry in entries)
        if kept != held:
            with whole_file(self.path) as part:
                part.write_text(kept, encoding="utf-8")


def fingerprint(text):
    return hashlib.sha256(text.encode()).hexdigest()

"""The directory of a training run: its settings, what it has measured, and its model.

run.json          the settings that decide the run's numbers, and when it evaluates, saves and samples
tokenizer.json    text <-> ids
history.jsonl     the loss of each step and each evaluation, one per line
checkpoints/      what `--resume` continues from
logs/             the same measurements for TensorBoard
model.keras       the model with the best validation loss
.lock             the process that trains there; the system frees the lock when that process ends
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os

from _start import local_path, whole_file

DAMAGED = "{} is not as train.py wrote it: {}. Put the file back, or start another run with --out."


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

    @contextlib.contextmanager
    def lock(self):
        """Keep other processes out of the directory, which is made if need be, in this block.

        Raises:
            ValueError: if another process trains there, or the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out needs a directory, but {str(self.path)!r} is a file.")
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "a+", encoding="utf-8") as file:
            file.seek(0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"Process {file.read()} trains in {str(self.path)!r}. "
                    "Wait until it ends, or give another directory with --out."
                ) from None
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            for part in self.path.glob(".*.part*"):  # A process was killed while it wrote this file.
                part.unlink()
            yield

    def saved(self):
        """Whether there is a checkpoint to continue from."""
        return any(self.checkpoints.glob("ckpt-*.index"))

    def create(self, settings, text, tokenizer):
        """Keep what decides the run.

        Raises:
            ValueError: if the directory holds a run.
        """
        if self.saved() or self.model.exists():
            raise ValueError(
                f"{str(self.path)!r} already holds a run. "
                "Continue it with --resume, or give another directory with --out."
            )
        (self.path / "history.jsonl").unlink(missing_ok=True)
        with whole_file(self.path / "tokenizer.json") as part:
            tokenizer.save(part)
        kept = {**settings, "text_sha256": fingerprint(text)}
        with whole_file(self.path / "run.json") as part:
            part.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def arguments(self, parser):
        """The settings of the run in the directory, as they could have been typed.

        Args:
            parser: has an option for each of them, and raises `ArgumentError`.

        Raises:
            ValueError: if there is no run, or its settings are not those of a run.
        """
        path = self.path / "run.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8-sig"))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"--resume continues a run, but {str(self.path)!r} holds none. "
                "Name its directory with --out, or start a run without --resume."
            ) from None
        except (ValueError, RecursionError):
            raise ValueError(DAMAGED.format(path, "no JSON")) from None
        if not isinstance(settings, dict):
            raise ValueError(DAMAGED.format(path, "JSON, but no settings by their names"))
        names = vars(parser.parse_args([])).keys()
        if different := {*names, "text_sha256"} ^ settings.keys():
            raise ValueError(DAMAGED.format(path, f"lacking, or not known: {min(different)!r:.99}"))
        self._text_sha256 = settings["text_sha256"]
        typed = {name: value for name, value in settings.items() if value is not None and name in names}
        arguments = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in typed.items()
            if value is not False
        ]
        try:
            read = vars(parser.parse_args(arguments))
        except argparse.ArgumentError as error:
            raise ValueError(DAMAGED.format(path, f"{error!s:.200}")) from None
        for name in names:
            if read[name] != settings[name]:  # Such as the string "6", or false.
                raise ValueError(DAMAGED.format(path, f"{name} is {settings[name]!r:.200}"))
        return arguments

    def check_text(self, path, text):
        """Refuse to continue with another text than the run began with.

        Raises:
            ValueError: if it differs.
        """
        if fingerprint(text) != self._text_sha256:
            raise ValueError(
                f"{path!r} is not the text that the run in {str(self.path)!r} began with. "
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
        # JSON knows no NaN.
        self._unwritten.append({"step": step, "validation_loss": loss if math.isfinite(loss) else None})

    def recent_loss(self, count=50):
        """Mean loss of the last steps."""
        recent = self.losses[-count:]
        return math.fsum(recent) / len(recent)

    def last_is_best(self):
        """Whether no evaluation was better than the last one; true if there is none."""
        return not self.evaluations or self.evaluations[-1] == self.best()

    def best(self):
        """The step and loss of the best evaluation, or None if there is none with a finite loss."""
        finite = [evaluation for evaluation in self.evaluations if math.isfinite(evaluation[1])]
        return min(finite, key=lambda evaluation: evaluation[1], default=None)

    def write(self):
        """Append to the file what it does not hold yet."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(entry, allow_nan=False) + "\n" for entry in self._unwritten))
        self._unwritten = []

    def read(self, taken):
        """Read the file up to step `taken`, and cut off the rest.

        Raises:
            ValueError: if it holds anything but measurements, or not every step; it stays as it is.
        """
        held = self.path.read_bytes() if self.path.exists() else b""
        entries = []
        *lines, last = held.split(b"\n")
        for number, line in enumerate(lines, 1):
            entries.append(measurement(line))
            if entries[-1] is None:
                raise ValueError(DAMAGED.format(self.path, f"line {number} is not a measurement"))
        # The process may have been killed while it wrote the last line.
        entries = [entry for entry in (*entries, measurement(last)) if entry and entry["step"] <= taken]
        if [entry["step"] for entry in entries if "loss" in entry] != list(range(1, taken + 1)):
            steps = "one loss per step, from the first to the last that a checkpoint holds"
            raise ValueError(DAMAGED.format(self.path, f"it does not hold {steps}, {taken}"))
        for entry in entries:
            if "loss" in entry:
                self.add_loss(entry["step"], entry["loss"])
            else:
                loss = entry["validation_loss"]
                self.add_evaluation(entry["step"], math.nan if loss is None else loss)
        self._unwritten = []
        kept = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        if kept != held:
            with whole_file(self.path) as part:
                part.write_bytes(kept)


def measurement(line):
    """The dictionary that a line of the history holds, or None."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match entry:
        case {"step": int(), "loss": float(loss)} | {"step": int(), "validation_loss": float(loss)}:
            fits = math.isfinite(loss)
        case {"step": int(), "validation_loss": None}:
            fits = True
        case _:
            fits = False
    return entry if fits and len(entry) == 2 else None


def fingerprint(text):
    return hashlib.sha256(text.encode()).hexdigest()

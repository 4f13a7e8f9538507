"""Check an export the way a server would meet it: in another process, by its own recorded answers."""

import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

from keras_tinyattn._paths import version_folder
from keras_tinyattn.export.card import CARD

__all__ = ["Check", "verify_saved_model"]


class Check(NamedTuple):
    """One line of the report."""

    name: str  # what was checked
    seen: str  # what was seen
    passed: bool | None  # None where it could not be checked


def verify_saved_model(path):
    """Load an export in fresh processes, with and without XLA, and compare it with its model card.

    Checked are the hashes of its files; the answers of every recorded signature; `generate_xla` against
    the plain `generate`; `prefill`, `step` and `sample`, called by turns, against `generate_ids`; the
    plain signatures with XLA disabled, as on a stock TensorFlow Serving; and that no plain signature
    reaches an operation outside core TensorFlow or a compiled function.

    Args:
        path: the base folder (its newest version is checked) or the folder of a version.

    Returns:
        A list of `Check`.

    Raises:
        ValueError: if the folder holds no export of this package, its card is damaged, or no process
            could be run to check it.
    """
    folder = version_folder(path)
    if not (folder / CARD).is_file():
        raise ValueError(
            "The export cannot be checked without its card. "
            f"Expected {CARD} next to its saved_model.pb. Received: {folder}. Export the model again."
        )
    _check_shape(folder)
    script = pathlib.Path(__file__).with_name("_check_alone.py")
    # Isolated, and yet with the modules that this process finds, in whatever way it was told of them.
    paths = [os.path.abspath(path) for path in sys.path]
    children = [
        subprocess.Popen(
            [sys.executable, "-I", str(script), str(folder.resolve()), mode, *paths],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mode in ("xla", "no-xla")
    ]
    ended = [child.communicate() for child in children]
    checks = []
    for child, (output, errors) in zip(children, ended, strict=True):
        try:
            rows = json.loads(output.strip().splitlines()[-1])
        except (IndexError, ValueError):
            lines = errors.strip().splitlines() or [f"it ended with {child.returncode}"]
            raise ValueError(
                "The export could not be checked, which says nothing about it. Expected a process that "
                f"loads TensorFlow and {folder}. Received: {lines[-1]}. Check the memory and the "
                "installation, and try again."
            ) from None
        checks += [Check(*row) for row in rows]
    return checks


def _check_shape(folder):
    """Refuse a card whose parts are not what a card holds; whether they are right is checked later."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        parts = [card["sha256"], card.get("precision", {})]
        strings = [*card["sha256"].values(), *card.get("precision", {}).get("compute_dtypes", [])]
        for answer in card["answers"]:
            strings.append(answer["signature"])
            parts += [answer["inputs"], answer["outputs"]]
            parts += [*answer["inputs"].values(), *answer["outputs"].values()]
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("another type where a dictionary stands")
        if not all(isinstance(part, str) for part in strings):
            raise TypeError("another type where a string stands")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"The card of the export is damaged. Expected {CARD} as export_saved_model wrote it. "
            f"Received: {folder / CARD} ({type(error).__name__}: {error}). "
            "Copy it again, or export the model again."
        ) from None

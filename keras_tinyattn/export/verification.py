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
    passed: bool


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
        ValueError: if the folder holds no export of this package, or it cannot be loaded.
    """
    folder = version_folder(path)
    if not (folder / CARD).is_file():
        raise ValueError(
            "The export cannot be checked without its card. "
            f"Expected {CARD} next to its saved_model.pb. Received: {folder}. Export the model again."
        )
    checks = []
    for mode in ("xla", "no-xla"):
        script = pathlib.Path(__file__).with_name("_check_alone.py")
        result = subprocess.run(
            [sys.executable, "-I", str(script), str(folder.resolve()), mode],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            reason = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise ValueError(
                "The export could not be checked. Expected a SavedModel that answers its own examples. "
                f"Received: {folder}, and {reason[0]}. Export the model again."
            )
        checks += [Check(*row) for row in json.loads(result.stdout.strip().splitlines()[-1])]
    return checks

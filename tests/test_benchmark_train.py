"""The training benchmark: the same model in every column, and words that come from the numbers."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "train", "--quick"]
    command += ["--json", str(folder / "train.json"), "--plot", str(folder / "train.png")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert (folder / "train.png").read_bytes().startswith(b"\x89PNG")
    return ended.stdout, json.loads((folder / "train.json").read_text())


def test_every_installed_peer_learns_the_same(quick):
    _, numbers = quick
    columns = [row["column"] for row in numbers["results"]]
    with_torch = importlib.util.find_spec("torch") is not None
    assert len(columns) == 4 + with_torch
    assert any("nanoGPT" in column for column in columns) == with_torch
    # Float32 in another order: a lost decay, clip or weight differs by a hundred times more.
    assert all(row["largest_difference"] < 1e-5 for row in numbers["results"])


def test_speeds_and_ratios_come_from_the_medians_and_are_told(quick):
    text, numbers = quick
    told = " ".join(text.split())
    rows = {row["column"]: row for row in numbers["results"]}
    keras = min(row["cpu_ms"]["median"] for name, row in rows.items() if name.startswith("Keras"))
    for row in rows.values():
        median = row["cpu_ms"]["median"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * 2 * 2 * 8 / median)
        assert row["ratio"] == pytest.approx(rows[row["baseline"]]["cpu_ms"]["median"] / median)
        assert row["ratio_to_keras_fit"] == pytest.approx(keras / median)
        assert f"{row['tokens_per_second']:.0f}" in told
    ours = numbers["results"][0]
    assert f"{ours['ratio_to_keras_fit']:.2f} times as many as Keras' fit" in told

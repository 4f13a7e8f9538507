"""`check_gpu.py` compares a device with the CPU: the CPU agrees with itself, a difference fails."""

import pathlib
import subprocess
import sys

import check_gpu as script
import pytest
import tensorflow as tf

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"


def check_gpu(*options):
    command = [sys.executable, str(SCRIPTS / "check_gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_device_that_is_not_there_is_named_in_one_sentence(refuses):
    refuses(script, ["--device", "GPU:77"], "does not see GPU:77 on this machine, but CPU:0")


def test_a_difference_fails_its_check(monkeypatch):
    monkeypatch.setattr(script, "timed", lambda function, *arguments: (function(*arguments), 1.0))
    monkeypatch.setattr(script, "LARGEST_DIFFERENCE", 0.0)
    name, seen, passed = next(script.attention("CPU:0"))
    assert (name, passed) == ("100 tokens, dense, graph", False)
    assert "largest difference" in seen


@pytest.mark.slow
def test_the_cpu_agrees_with_itself():
    ended = check_gpu("--device", "CPU:0")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "CPU:0 and CPU agree." in ended.stdout
    assert "FAILED" not in ended.stdout
    assert ended.stdout.count("passed") > 30
    assert tf.config.list_physical_devices("GPU") or "Memory" not in ended.stdout

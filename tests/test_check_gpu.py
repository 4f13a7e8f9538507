"""`check_gpu.py` compares a device with the CPU: the CPU agrees with itself, a difference fails."""

import subprocess
import sys

import check_gpu as script
import pytest
import tensorflow as tf


def test_a_difference_fails_its_check(monkeypatch):
    monkeypatch.setattr(script, "timed", lambda function, *arguments: (function(*arguments), 1.0))
    monkeypatch.setattr(script, "LARGEST_DIFFERENCE", 0.0)
    name, seen, passed = next(script.attention("CPU:0"))
    assert (name, passed) == ("100 tokens, dense, graph", False)
    assert "largest difference" in seen


@pytest.mark.slow
def test_the_cpu_agrees_with_itself():
    command = [sys.executable, script.__file__, "--device", "CPU:0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "CPU:0 and CPU agree." in ended.stdout
    assert "FAILED" not in ended.stdout
    assert ended.stdout.count("passed") > 30
    assert tf.config.list_physical_devices("GPU") or "Memory" not in ended.stdout

"""What several test files share."""

import os
import pathlib

import keras
import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def _same_numbers_in_every_run():
    keras.utils.set_random_seed(1)


@pytest.fixture(scope="session")
def on_every_path():
    """A function that runs another eagerly, as a graph and under XLA: pairs of path and result."""

    def run(function, *tensors):
        graph = tf.function(function, autograph=False)
        xla = tf.function(function, autograph=False, jit_compile=True)
        return [("eager", function(*tensors)), ("graph", graph(*tensors)), ("xla", xla(*tensors))]

    return run


@pytest.fixture(scope="session")
def shared_folder():
    """A function that finds a folder of files too large or too foreign for the repository, or skips."""

    def find(name):
        beside = pathlib.Path(__file__).parents[2] / "shared"
        folder = pathlib.Path(os.environ.get("KERAS_TINYATTN_SHARED", beside)) / name
        if not folder.is_dir():
            pytest.skip(f"{folder} is not there; KERAS_TINYATTN_SHARED may name another place")
        return folder

    return find

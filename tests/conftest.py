"""What several test files share."""

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import pathlib
import random
import types

import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def _same_numbers_in_every_run():
    # What Keras draws its seeds from. Not `keras.utils.set_random_seed`: TensorFlow then forgets every
    # compiled function, so that each test would compile anew what its module shares.
    random.seed(1)
    np.random.seed(1)


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


@pytest.fixture(scope="session")
def run_lesson(tmp_path_factory):
    """A function that runs a lesson in this process, once for each set of options.

    `run_lesson(name, *options)` returns an object with `numbers`, read from its JSON; `text`, what it
    printed, without line breaks and indents; and `folder`, in which an option such as `{}/a.png` puts
    its file.
    """

    @functools.cache
    def run(name, *options):
        folder = tmp_path_factory.mktemp(name)
        options = [str(option).replace("{}", str(folder)) for option in options]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            importlib.import_module(name).main([*options, "--json", str(folder / "numbers.json")])
        return types.SimpleNamespace(
            numbers=json.loads((folder / "numbers.json").read_text(encoding="utf-8")),
            text=" ".join(printed.getvalue().split()),
            folder=folder,
        )

    return run


@pytest.fixture
def refuses(tmp_path, capsys):
    """A function: a script refuses options, in which {} is an empty folder, and does nothing else."""

    def check(script, options, *said):
        with pytest.raises(SystemExit) as end:
            importlib.import_module("_start").run(
                script.main, [option.format(tmp_path) for option in options]
            )
        printed = capsys.readouterr()
        assert end.value.code == 2
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert all(part.format(tmp_path) in printed.err for part in said), printed.err
        assert list(tmp_path.iterdir()) == []

    return check


@pytest.fixture
def explains_every_option(monkeypatch, capsys):
    """A function: a script's --help says something of each of at least so many options."""

    def check(script, at_least):
        options = []
        add_argument = argparse.ArgumentParser.add_argument

        def recording(parser, *names, **settings):
            options.append((names, settings.get("help")))
            return add_argument(parser, *names, **settings)

        monkeypatch.setattr(argparse.ArgumentParser, "add_argument", recording)
        with pytest.raises(SystemExit, match="0"):
            script.main(["--help"])
        assert len(options) >= at_least
        assert all(text for _, text in options)
        shown = capsys.readouterr().out
        assert all(names[-1] in shown for names, _ in options)

    return check

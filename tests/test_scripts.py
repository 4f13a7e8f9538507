"""What all scripts share: a quiet start, checked options, whole files, exit codes, and tables."""

import importlib
import json
import pathlib
import subprocess
import sys
import types

import _page
import _start
import numpy as np
import pytest
import tensorflow as tf

SCRIPTS = pathlib.Path(_start.__file__).parent
# Each script by its name, or its number if it is a lesson, and how many options it has at least.
OPTIONS = {"06": 4, "07": 5, "15": 6, "16": 5, "17": 6, "18": 10, "19": 11}
OPTIONS |= {"benchmark": 9, "check_gpu": 2, "generate": 11}
# Scripts, what they say, and the options that they refuse.
REFUSED = [
    (
        "06 07 15 16 17 18 19 train",
        "--json needs a file that can be written",
        "--json={}/absent/a.json",
    ),
    ("06 15 16 17 18 train", "'{}/a.txt' does not end in .png or .svg or .pdf.", "--plot={}/a.txt"),
    ("07", "'{}' is a directory.", "--plot={}"),
    ("07", "'{}/a.h5' does not end in .keras.", "--save={}/a.h5"),
    ("16", "the directory '{}/absent' does not exist.", "--attention={}/absent/a.png"),
    ("19 generate", f"--out needs a folder, but '{__file__}' is a file.", f"--out={__file__}"),
    ("15 18 19", "Received also: zebra", "--prompt=The zebra"),
    ("15", "Received also: Cat", "--prompt=the Cat"),
    ("15 18 19", "must be from 1 to 10, but 0 was received.", "--prompt="),
    ("15", "must be from 1 to 10, but 0 was received.", "--prompt= \t "),
    ("15 18 19", "must be from 1 to 10, but 11 was received.", "--prompt=" + 11 * "cat "),
    ("17", "must be from 1 to 255, but 0 was received.", "--prompt="),
    ("17", "must be from 1 to 255, but 258 was received.", "--prompt=" + 86 * "\N{SNOWMAN}"),
    ("06 15 18 19 generate", "--steps must be 0 or more, but -1 was received.", "--steps=-1"),
    ("16 train", "--steps must be 1 or more, but 0 was received.", "--steps=0"),
    ("17", "--steps must be from 1 to 245, but 0 was received.", "--steps=0"),
    ("17", "--steps must be from 1 to 245, but 246 was received.", "--steps=246"),
    ("18 19", "--training-steps must be 0 or more, but -2 was received.", "--training-steps=-2"),
    ("18", "--draws must be from 100 to 1000000, but 99 was received.", "--draws=99"),
    ("07", "--epochs must be 0 or more, but -3 was received.", "--epochs=-3"),
    ("07", "--seed must be from 0 to 4294967295, but -2 was received.", "--seed=-2"),
    ("07", "--seed must be from 0 to 4294967295, but 4294967296 was received.", "--seed=4294967296"),
    ("16 17 19", "--seed must be from 0 to 2147483647, but -1 was received.", "--seed=-1"),
    ("19", "--seed must be from 0 to 2147483647, but 2147483648 was received.", "--seed=2147483648"),
    ("18", "--seed must be from 0 to 2147481647, but 2147483647 was received.", "--seed=2147483647"),
    ("generate train", "--seed must be from -2147483648 to 2147483647, but", "--seed=2147483648"),
    ("17 18 19", "--temperature must be finite and 0 or more, but -0.5 was", "--temperature=-0.5"),
    ("17 18 19", "--temperature must be finite and 0 or more, but inf was", "--temperature=inf"),
    ("17 18 19", "--temperature must be finite and 0 or more, but nan was", "--temperature=nan"),
    ("18 19", "--top-k must be from 0 to 2147483647, but -3 was received.", "--top-k=-3"),
    ("18 19", "--top-p must be above 0 and up to 1, but 0.0 was received.", "--top-p=0"),
    ("18 19", "--top-p must be above 0 and up to 1, but 1.5 was received.", "--top-p=1.5"),
    ("train", "--learning-rate must be a finite number of at least 0, but nan", "--learning-rate=nan"),
    ("train", "TF_CONFIG, which is not set", "--strategy=multiworker"),
    ("check_gpu", "does not see GPU:77 on this machine, but CPU:0", "--device=GPU:77"),
    ("generate", "--model names an existing one", "--model=a", "--out=b"),
    ("benchmark", "--threads must be 1 or more, but 0 was received.", "layer", "--threads=0"),
    ("benchmark", "--seconds must be 0 or more, but -1.0 was received.", "train", "--seconds=-1"),
    ("benchmark", "--seconds must be 0 or more, but nan was received.", "generate", "--seconds=nan"),
    ("benchmark", "--repeats must be 1 or more, but 0 was received.", "memory", "--repeats=0"),
    ("benchmark", "the directory '{}/absent' does not exist.", "memory", "--json={}/absent/a.json"),
    ("benchmark", "'{}/a.txt' does not end in .png or .svg or .pdf.", "memory", "--plot={}/a.txt"),
    ("benchmark", "--against needs a checkout, but '{}' has no folder", "train", "--against={}"),
]


def load(name):
    return importlib.import_module(next(SCRIPTS.glob(f"lesson_{name}*.py"), SCRIPTS / name).stem)


def in_a_process(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda row: " ".join(row[2:]))
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(refused, refuses, monkeypatch):
    names, said, *options = refused
    for script in map(load, names.split()):
        for work in ("console", "make_model", "train"):
            monkeypatch.setattr(script, work, lambda *_: pytest.fail("work was begun"), raising=False)
        refuses(script, options, said)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_help_text(name, explains_every_option):
    explains_every_option(load(name), OPTIONS[name])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("06", "--plot"),
        *(pytest.param(name, "--plot", marks=pytest.mark.slow) for name in ("15", "16", "17", "18")),
        pytest.param("19", "--json", marks=pytest.mark.slow),
    ],
)
def test_a_lesson_runs_quietly_and_fits_80_columns(name, file, tmp_path):
    path = tmp_path / "a.png"
    finished = in_a_process(f"{load(name).__name__}.py", "--steps=5", file, path)
    assert (finished.returncode, finished.stderr) == (0, "")
    *page, last = finished.stdout.splitlines()
    assert last.endswith(f": {path}")
    assert path.read_bytes().startswith(b"\x89PNG" if file == "--plot" else b"{")
    # Only JSON, which is to be copied, may go beyond 80.
    assert max(len(line) for line in page if '":' not in line) <= 80
    assert "\u2026" not in finished.stdout


def test_imports_are_quiet_unless_they_fail_and_standard_error_works_after_them():
    code = (
        "import os\n"
        "from _start import quiet_imports\n"
        "with quiet_imports():\n    os.write(2, b'noise ')\n"
        "os.write(2, b'after ')\n"
        "with quiet_imports():\n    os.write(2, b'the reason ')\n    raise ImportError('no library')\n"
    )
    finished = in_a_process("-c", code)
    assert finished.returncode == 1
    assert finished.stderr.startswith("after the reason Traceback")
    assert "no library" in finished.stderr


def test_an_error_of_the_system_names_the_file_and_a_bug_keeps_its_traceback():
    start = "from _start import run\n"
    finished = in_a_process("-c", start + "run(lambda argv: open('/absent/file'))")
    assert finished.returncode == 2
    assert finished.stderr == "-c: error: No such file or directory: /absent/file\n"
    finished = in_a_process("-c", start + "run(lambda argv: {}['key'])")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr


def test_a_reader_that_goes_away_is_no_error():
    code = (
        "import os\nfrom _start import run, console\n"
        "reader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)\n"
        "run(lambda argv: print('x' * 100000))\n"
    )
    assert in_a_process("-c", code).stderr == ""


def test_a_file_without_permission_is_refused(refuses, monkeypatch):
    monkeypatch.setattr(_start.os, "access", lambda path, mode: False)
    refuses(load("06"), ["--json={}/a.json"], "there is no permission to write '{}/a.json'.")


def test_a_picture_without_matplotlib_is_refused(refuses, monkeypatch):
    monkeypatch.setattr(_start.importlib.util, "find_spec", lambda name: None)
    refuses(load("06"), ["--plot={}/a.png"], 'pip install "keras-tinyattn[plot]"')


def test_a_lesson_without_a_picture_has_no_plot_option(capsys):
    parser = _start.lesson_parser("A lesson.")
    assert _start.parse_lesson(parser, []).json is None
    with pytest.raises(SystemExit, match="2"):
        _start.parse_lesson(parser, ["--plot", "a.png"])
    assert "unrecognized arguments: --plot" in capsys.readouterr().err


def test_a_count_is_accepted_at_the_ends_of_its_range():
    assert _start.check_count("--steps", 0) is None
    assert _start.check_count("--steps", 1, at_least=1, at_most=1) is None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "numbers.json"
    path.write_text("old")
    with pytest.raises(OSError, match="disk"), _start.whole_file(path) as part:  # noqa: PT012
        part.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with _start.whole_file(path) as part:
        part.write_text("whole")
        assert path.read_text() == "old"
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_are_written_as_plain_json(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    numbers = {
        "array": np.array([[1.5, np.nan], [-np.inf, 2.0]], "float32"),
        "number": np.float32(0.5),
        "flag": np.True_,
        "nested": {"pair": (1, float("inf")), "text": "cat", "nothing": None},
    }
    _start.write_numbers(_start.console(), path, numbers)
    assert json.loads(path.read_text()) == {
        "array": [[1.5, None], [None, 2.0]],
        "number": 0.5,
        "flag": True,
        "nested": {"pair": [1, None], "text": "cat", "nothing": None},
    }
    assert capsys.readouterr().out == f"Numbers: {path}\n"
    _start.write_numbers(_start.console(), None, numbers)
    assert capsys.readouterr().out == ""


def test_the_device_of_a_tensor_is_named():
    with tf.device("CPU"):
        device = _start.ran_on(tf.constant(1.0))
    assert device.startswith("CPU (TensorFlow sees ")


def shown(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_losses_are_shown_in_nine_rows_from_the_first_to_the_last(capsys):
    losses = [3.0 - 0.02 * step for step in range(101)]
    _page.print_losses(_start.console(), losses)
    _page.print_losses(_start.console(), losses, early=True, number="{:.1f}")
    rows = [row for row in shown(capsys) if row[0].isdecimal()]
    evenly, early = rows[:9], rows[9:]
    assert [int(row[0]) for row in evenly] == [0, 12, 25, 38, 50, 62, 75, 88, 100]
    assert [int(row[0]) for row in early] == [0, 2, 6, 14, 25, 39, 56, 77, 100]
    assert [row[1] for row in evenly[::4]] == ["3.0000", "2.0000", "1.0000"]
    assert [row[1] for row in early[::4]] == ["3.0", "2.5", "1.0"]
    # The bar of the first loss is 30 long, and the others are in proportion.
    assert [len(row[2]) for row in evenly[::4]] == [30, 20, 10]


def test_a_few_losses_are_all_shown_and_a_loss_that_grows_stays_on_the_page(capsys):
    _page.print_losses(_start.console(), [0.5, 9.0, 0.25])
    rows = [row for row in shown(capsys) if row[0].isdecimal()]
    assert [(row[0], row[1], len(row[2])) for row in rows] == [
        ("0", "0.5000", 30), ("1", "9.0000", 40), ("2", "0.2500", 15)
    ]  # fmt: skip


def test_a_matrix_has_names_on_its_rows_and_columns_and_the_largest_of_a_row_in_bold(capsys):
    printed = []
    output = types.SimpleNamespace(print=printed.append)
    _page.print_matrix(
        output, [[0.25, 0.75], [0.5, 0.125]], ("q", "r"), ("k", "l"), "{:.2f}", "query",
        extra=("sum", ["1", "2"]), bold=True,
    )  # fmt: skip
    columns = [[column.header, *column.cells] for column in printed[0].renderable.columns]
    assert columns == [
        ["query", "[bold cyan]q[/]", "[bold cyan]r[/]"],
        ["k", "0.25", "[bold]0.50[/]"],
        ["l", "[bold]0.75[/]", "0.12"],
        ["sum", "1", "2"],
    ]

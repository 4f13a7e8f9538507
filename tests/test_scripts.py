"""What all scripts share: a quiet start, checked options, whole files, exit codes, and tables."""

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


def in_a_process(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, timeout=60
    )


def test_imports_are_quiet_unless_they_fail_and_standard_error_works_after_them():
    code = (
        "import os\n"
        "from _start import quiet_imports\n"
        "with quiet_imports():\n    os.write(2, b'noise ')\n"
        "os.write(2, b'after ')\n"
        "with quiet_imports():\n    os.write(2, b'the reason ')\n    raise ImportError('no library')\n"
    )
    finished = in_a_process(code)
    assert finished.returncode == 1
    assert finished.stderr.startswith("after the reason Traceback")
    assert "no library" in finished.stderr


def test_an_error_of_the_system_names_the_file_and_a_bug_keeps_its_traceback():
    start = "from _start import run\n"
    finished = in_a_process(start + "run(lambda argv: open('/absent/file'))")
    assert finished.returncode == 2
    assert finished.stderr == "-c: error: No such file or directory: /absent/file\n"
    finished = in_a_process(start + "run(lambda argv: {}['key'])")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr


def test_a_reader_that_goes_away_is_no_error():
    code = (
        "import os\nfrom _start import run, console\n"
        "reader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)\n"
        "run(lambda argv: print('x' * 100000))\n"
    )
    assert in_a_process(code).stderr == ""


@pytest.fixture
def script():
    """The smallest lesson: it parses its options and prints."""

    def main(argv):
        _start.parse_lesson(_start.lesson_parser("A lesson.", plot="draw it"), argv)
        print("work")

    return types.SimpleNamespace(main=main)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--json", "{}/absent/a.json"], "the directory '{}/absent' does not exist."),
        (["--json", "{}"], "'{}' is a directory."),
        (["--plot", "{}/absent/a.png"], "the directory '{}/absent' does not exist."),
        (["--plot", "{}/a.txt"], "'{}/a.txt' does not end in .png or .svg or .pdf."),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(options, problem, script, refuses):
    refuses(script, options, f"{options[0]} needs a file that can be written, but {problem}")


def test_a_file_without_permission_is_refused(script, refuses, monkeypatch):
    monkeypatch.setattr(_start.os, "access", lambda path, mode: False)
    refuses(script, ["--json", "{}/a.json"], "there is no permission to write '{}/a.json'.")


def test_a_picture_without_matplotlib_is_refused(script, refuses, monkeypatch):
    monkeypatch.setattr(_start.importlib.util, "find_spec", lambda name: None)
    refuses(script, ["--plot", "{}/a.png"], 'pip install "keras-tinyattn[plot]"')


def test_a_lesson_without_a_picture_has_no_plot_option(capsys):
    parser = _start.lesson_parser("A lesson.")
    assert _start.parse_lesson(parser, []).json is None
    with pytest.raises(SystemExit, match="2"):
        _start.parse_lesson(parser, ["--plot", "a.png"])
    assert "unrecognized arguments: --plot" in capsys.readouterr().err


def test_a_count_is_refused_outside_its_range_and_accepted_at_its_ends():
    _start.check_count("--steps", 0)
    _start.check_count("--steps", 1, at_least=1, at_most=1)
    with pytest.raises(ValueError, match=r"^--steps must be 0 or more, but -1 was received\.$"):
        _start.check_count("--steps", -1)
    with pytest.raises(ValueError, match=r"^--seed must be from 1 to 9, but 10 was received\.$"):
        _start.check_count("--seed", 10, at_least=1, at_most=9)


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

"""`python scripts/generate.py` prints a text, quietly, or one sentence about what is wrong."""

import pathlib
import subprocess
import sys

import generate
import pytest

ROOT = pathlib.Path(__file__).parents[1]
COMMITTED = ROOT / "saved_models" / "lesson_15"


def run(*arguments):
    """The script in a process of its own: exit code, standard output, standard error."""
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


def in_this_process(capsys, *arguments):
    generate.main(["--model", str(COMMITTED), *arguments])
    return capsys.readouterr().out


def test_a_fresh_export_continues_the_text_and_is_kept_beside_the_versions_that_stand(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mine").write_text("untouched")
    code, out, err = run("--prompt", "The cat sat", "--steps", "3", "--out", str(tmp_path))
    assert (code, out, err) == (0, "The cat sat bites bites bites\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["mine"]
    assert (tmp_path / "2" / "saved_model.pb").is_file()


def test_an_export_that_stands_runs_without_our_package(capsys):
    program = (
        "import sys; sys.path.insert(0, 'scripts'); import generate; "
        f"generate.main(['--model', {str(COMMITTED)!r}]); "
        "assert not any(name.startswith('keras_tinyattn') for name in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "The cat sat bites bites bites\n"


def test_the_text_grows_by_stretches_to_what_one_call_gives(capsys):
    drawn = in_this_process(
        capsys, "--prompt", "The", "--steps", "9", "--temperature", "2", "--seed", "4"
    )
    assert len(drawn.split()) <= 10
    assert drawn.startswith("The ")
    again = in_this_process(
        capsys, "--prompt", "The", "--steps", "9", "--temperature", "2", "--seed", "4"
    )
    assert drawn == again
    assert in_this_process(capsys, "--prompt", "The", "--steps", "0") == "The\n"


def test_the_end_of_the_positions_is_told(capsys):
    out = in_this_process(capsys, "--steps", "30")
    assert out.splitlines() == [
        "The cat sat" + " bites" * 7,
        "(The model has 10 positions, so the text ends here.)",
    ]
    assert "positions" not in in_this_process(capsys, "--steps", "7")


def test_a_stop_ends_the_text_and_is_not_printed(capsys):
    assert in_this_process(capsys, "--stop", "bites", "--steps", "5") == "The cat sat\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "-1"], "--steps must be 0 or more, but -1 was received"),
        (["--prompt", "The cow"], "Received also: cow"),
        (["--prompt", ""], "nothing to continue"),
        (["--prompt", "man " * 11], "sequence_length=10 tokens. Received: 11"),
        (["--top-p", "2"], "top_p is out of range"),
        (["--temperature", "-1"], "temperature is out of range"),
        (["--seed", "2147483648"], "--seed must be from"),
        (["--out", "somewhere"], "--model names one that stands"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - matched below, metacharacters and all
        generate.main(["--model", str(COMMITTED), *arguments])
    assert message in str(error.value)


@pytest.mark.parametrize("folder", ["missing", "empty", "broken"])
def test_a_folder_that_is_no_export_is_one_sentence(tmp_path, folder):
    path = tmp_path / folder
    if folder != "missing":
        (path / "1").mkdir(parents=True)
    if folder == "broken":
        (path / "1" / "saved_model.pb").write_bytes(b"not a graph")
    with pytest.raises(ValueError, match="needs an export of this project"):
        generate.main(["--model", str(path)])


def test_the_sentence_and_exit_code_reach_the_shell(tmp_path):
    out = tmp_path / "kept"
    code, printed, err = run("--prompt", "The cow", "--model", str(COMMITTED))
    assert (code, printed) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("generate.py: error: The vocabulary")
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    code, printed, err = run("--out", str(blocked))
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert blocked.read_text() == "in the way"
    assert not out.exists()

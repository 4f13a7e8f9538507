"""`python scripts/generate.py` prints a text, quietly, or one sentence about what is wrong."""

import argparse
import functools
import pathlib
import subprocess
import sys

import generate
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[1]
COMMITTED = ROOT / "saved_models" / "lesson_15"


@pytest.fixture(scope="module", autouse=True)
def _an_export_is_loaded_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.saved_model, "load", functools.cache(tf.saved_model.load))
        yield


def run(*arguments):
    """A process of its own: exit code, standard output, standard error."""
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "scripts")
    return result.returncode, result.stdout, result.stderr


def in_this_process(capsys, *arguments):
    generate.main(["--model", str(COMMITTED), *arguments])
    return capsys.readouterr().out


def test_a_fresh_export_continues_the_text_and_is_kept_beside_existing_versions(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mine").write_text("untouched")
    options = ("--prompt", "The cat sat", "--steps", "3", "--out", str(tmp_path))
    assert run("generate.py", *options) == (0, "The cat sat bites bites bites\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["mine"]
    assert (tmp_path / "2" / "saved_model.pb").is_file()


def test_an_existing_export_runs_without_our_package():
    program = (
        f"import sys, generate; generate.main(['--model', {str(COMMITTED)!r}]); "
        "assert not any(name.startswith('keras_tinyattn') for name in sys.modules)"
    )
    assert run("-c", program) == (0, "The cat sat bites bites bites\n", "")


@pytest.fixture(scope="module")
def committed():
    return tf.saved_model.load(str(COMMITTED / "1"))


@pytest.mark.parametrize("seed", range(6))
def test_streamed_ids_and_text_are_those_of_the_signature_generate(seed, committed, capsys):
    settings = {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.01, "seed": seed}
    stop = "dog bites" if seed % 2 else ""
    row = {name: tf.constant([value]) for name, value in settings.items()}
    given = {"prompt": "The cat", "max_new_tokens": 8, "stop": stop}
    given = {name: tf.constant([value]) for name, value in given.items()}
    expected = committed.signatures["generate"](**given, **row)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    options += ["--prompt", "The cat", "--steps", "8", "--stop", stop]
    text = expected["text"][0].numpy().decode() + "\n"
    assert in_this_process(capsys, *options) == text
    ids = expected["token_ids"][0].numpy().tolist()
    streamed = generate.continuation(committed.signatures, ids[:2], len(ids), row)
    assert list(streamed) == ids[2:]
    if seed == 0:
        assert in_this_process(capsys, "--xla", *options) == text


def fake_signatures(text, calls):
    """Signatures of a model of bytes that writes this text, whatever it is given."""
    text = text.encode()

    def tokenize(text):
        read = tf.strings.unicode_decode(text, "UTF-8")
        ids, length = read.to_tensor(), tf.cast(read.row_lengths(), tf.int32)
        return {"token_ids": ids, "length": length, "end_id": tf.constant([-1, -1])}

    def detokenize(token_ids, length):
        written = bytes(token_ids[0].numpy().tolist()).decode(errors="replace")
        return {"text": tf.constant([written])}

    def prefill(prompt_ids, prompt_length):
        calls.append("prefill")
        return {"logits": "logits", "new_keys_0": prompt_ids, "new_values_0": prompt_ids}

    def sample(logits, position):
        calls.append("sample")
        return {"token_id": tf.constant([text[int(position[0])]])}

    def step(token_id, position, keys_0, values_0):
        calls.append("step")
        keys = tf.concat([keys_0, token_id[:, None]], axis=1)
        assert int(position[0]) + 1 == keys.shape[1]
        return {"logits": "logits", "new_keys_0": keys, "new_values_0": values_0}

    return {part.__name__: part for part in (tokenize, detokenize, prefill, sample, step)}


@pytest.mark.parametrize(
    ("text", "positions", "stop", "chunks"),
    [
        ("née☃", 7, "", ["n", "é", "e", "", "", "☃", "\n"]),
        # Half a character before the last position.
        ("née☃", 6, "", ["n", "é", "e", "", "", "\N{REPLACEMENT CHARACTER}\n"]),
        # What begins like the stop, and the stop.
        ("a:.:-b:--c", 10, ":--", ["a", ":.", "", "", ":-b", "", "", "\n"]),
    ],
)
def test_whole_characters_are_printed_at_once_and_no_part_of_the_stop(
    text, positions, stop, chunks, monkeypatch
):
    printed, calls = [], []

    def keep(text, end="\n", flush=False):
        printed.append(text + end)

    monkeypatch.setattr(generate, "print", keep, raising=False)
    options = argparse.Namespace(prompt=text[0], steps=99, stop=stop)
    added, stopped = generate.stream(options, fake_signatures(text, calls), {}, positions)
    assert printed == chunks
    assert (added, stopped) == (8 if stop else positions - 1, bool(stop))
    # The prompt is read once, and each token computed once.
    assert calls == ["prefill", *(["sample", "step"] * added)[:-1]]


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--prompt", "The  cat", "--steps", "0"], "The cat\n"),
        (["--steps", "7"], "The cat sat" + " bites" * 7 + "\n"),
        (
            ["--steps", "8"],
            "The cat sat" + " bites" * 7 + "\n(The model has 10 positions, so the text ends here.)\n",
        ),
        (["--stop", "bites", "--steps", "8"], "The cat sat\n"),
    ],
)
def test_a_text_ends_after_its_steps_at_the_last_position_or_before_a_stop(options, printed, capsys):
    assert in_this_process(capsys, *options) == printed


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--prompt=The cow", "Received also: cow"),
        ("--prompt=", "nothing to continue"),
        ("--prompt=" + "man " * 11, "sequence_length=10 tokens. Received: 11"),
        ("--top-p=2", "top_p is out of range"),
        ("--temperature=-1", "temperature is out of range"),
    ],
)
def test_what_the_export_refuses_is_one_sentence(option, message, refuses):
    refuses(generate, ["--model", str(COMMITTED), option], message)


@pytest.mark.parametrize("folder", ["missing", "empty", "broken"])
def test_a_folder_without_an_export_is_one_sentence(tmp_path, folder):
    path = tmp_path / folder
    if folder != "missing":
        (path / "1").mkdir(parents=True)
    if folder == "broken":
        (path / "1" / "saved_model.pb").write_bytes(b"not a graph")
    with pytest.raises(ValueError, match="needs an export of this project"):
        generate.main(["--model", str(path)])

"""Lesson 19 shows of an export what is in it, and calls it as a server does."""

import base64
import importlib
import json
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from keras_tinyattn import Check, load_saved_model, signature_operations

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "lesson_19_export.py"
SETTINGS = {"temperature": 1.3, "top_k": 7, "top_p": 0.85}


@pytest.fixture
def lesson():
    return importlib.import_module("lesson_19_export")


@pytest.fixture(scope="module")
def run(run_lesson):
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    others = ["--steps=5", "--seed=3", "--training-steps=60", "--out={}/out"]
    return run_lesson("lesson_19_export", *settings, *others)


@pytest.fixture(scope="module")
def export(run):
    return run.numbers["export"]


@pytest.fixture(scope="module")
def version(run):
    return run.folder / "out" / "1"


# What is in it


def test_files_and_their_sizes_are_those_on_disk(run, export, version):
    files = export["files"]
    assert {"saved_model.pb", "model_card.json", "variables/variables.index"} < set(files)
    assert export["folder"] == str(version)
    assert str(version) in run.text
    for name, size in files.items():
        assert (version / name).stat().st_size == size
        assert f"{name} {size:,}" in run.text
    assert sorted(files) == sorted(
        path.relative_to(version).as_posix() for path in version.rglob("*") if path.is_file()
    )
    total = sum(files.values())
    assert f"all {total:,}" in run.text
    assert f"in the folder, {total / 1024:.0f} KiB of it" in run.text
    # 20 x 8 twice, 10 x 8, three times 8 x 8.
    assert export["bytes_of_weights"] == 4 * (160 + 80 + 192 + 160)
    assert f"The weights take {export['bytes_of_weights']:,} bytes of it" in run.text
    assert files["saved_model.pb"] > (total - export["bytes_of_weights"]) / 2
    assert "most of the rest is the graph" in run.text
    about = json.loads((version / "model_card.json").read_text())["about"]
    assert about["training_steps"] == run.numbers["training_steps"] == 60
    assert about["data"][0] == "The cat sat on the mat <eos>"
    assert "after 60 training steps" in run.text


def test_the_signatures_are_those_of_the_export(run, export):
    found = export["signatures"]
    assert set(found) == {
        *("serving_default", "generate", "generate_xla", "generate_ids", "score", "attention"),
        *("tokenize", "detokenize", "prefill", "step", "sample"),
    }
    assert found["generate"]["inputs"] == {
        "max_new_tokens": ["int32", ["B"]],
        "prompt": ["string", ["B"]],
        "seed": ["int32", ["B"]],
        "stop": ["string", ["B"]],
        "temperature": ["float32", ["B"]],
        "min_p": ["float32", ["B"]],
        "top_k": ["int32", ["B"]],
        "top_p": ["float32", ["B"]],
    }
    assert found["step"]["outputs"]["new_keys_0"] == ["float32", ["B", "1", "10", "8"]]
    assert "score text length, logprobs, loss, token_ids" in run.text
    assert "output new_logprobs float32 (B, ?)" in run.text
    assert "\u2026" not in run.text


def test_operations_are_those_that_the_package_finds(run, export, version):
    found = export["operations"]
    reached = signature_operations(version)
    assert set(found) == set(reached) == set(export["signatures"])
    for name, part in found.items():
        kinds, compiled = reached[name]
        assert part["kinds"] == len(set(kinds))
        assert part["nodes"] == sum(kinds.values()) > part["kinds"]
        assert part["xla_kinds"] == []
        assert part["compiled_functions"] == len(compiled) == (name == "generate_xla")
        shown = f"{name} {part['nodes']} {part['kinds']} none {part['compiled_functions']}"
        assert shown in run.text
    assert "Only generate_xla has a part that XLA compiles. The other 10 reach neither" in run.text


def test_checks_are_made_on_request_and_shown(run, lesson, monkeypatch, capsys):
    assert run.numbers["export"]["checks"] == []
    assert "checks passed" not in run.text
    checks = [Check("files", "5 of 5 as recorded", True)]
    checks.append(Check("generate_xla, in a session, XLA disabled", "no kernel " * 9, False))
    monkeypatch.setattr(lesson, "verify_saved_model", lambda path: checks)
    output = importlib.import_module("_start").console()
    assert lesson.checks(output, "exports/1") == checks
    text = " ".join(capsys.readouterr().out.split())
    assert "files 5 of 5 as recorded passed" in text
    assert "generate_xla, in a session, XLA disabled no kernel no kernel no FAILED" in text
    assert text.count("kernel") == 9
    assert "1 of 2 checks passed." in text


# The request


def printed_json(text, key):
    """The JSON in a printed page that begins with a key."""
    return json.JSONDecoder().raw_decode(text[text.index(f'{{ "{key}"') :])[0]


def test_a_request_in_row_format_is_answered_row_by_row(run, export):
    request, answer = export["request"], export["answer"]
    assert request["signature_name"] == "generate"
    assert request["instances"][0] == {
        "prompt": "The cat",
        "max_new_tokens": 5,
        **SETTINGS,
        "min_p": 0.0,
        "seed": 3,
        "stop": "",
    }
    assert request["instances"][1]["temperature"] == 0.0
    assert "POST http://localhost:8501/v1/models/lesson_15:predict" in run.text
    assert printed_json(run.text, "signature_name") == request
    first, second = answer["predictions"]
    assert first["text"] == f"The cat {first['completion']}"
    assert second["text"].startswith("The ")
    assert first["finish_reason"] in ("stop", "length")
    assert first["length"] == 2 + len(first["completion"].split()) + (first["finish_reason"] == "stop")
    printed = printed_json(run.text, "predictions")
    for shown, row in zip(printed["predictions"], answer["predictions"], strict=True):
        assert shown["new_logprobs"] == [round(value, 4) for value in row["new_logprobs"]]
        assert {**shown, "new_logprobs": row["new_logprobs"]} == row
    assert "2 texts with different settings make one batch." in run.text


def test_the_answer_is_that_of_the_export_on_disk(export, version):
    loaded = load_saved_model(version)
    for row, answer in zip(
        export["request"]["instances"], export["answer"]["predictions"], strict=True
    ):
        given = {name: row[name] for name in row if name not in ("prompt", "max_new_tokens")}
        outputs = loaded.generate(row["prompt"], row["max_new_tokens"], **given)
        assert outputs["text"][0].decode() == answer["text"]
        assert outputs["length"][0] == answer["length"]


def test_what_is_said_of_the_answer_is_true(run, export):
    assert export["same_ids_as_in_python"] is True
    assert "Its token ids are those of model.generate in Python." in run.text
    assert export["same_completion_in_bytes"] is True
    predictions = export["answer"]["predictions"]
    for row in predictions:
        assert base64.b64decode(row["completion_bytes"]["b64"]).decode() == row["completion"]
    completions = " | ".join(row["completion"] for row in predictions)
    assert f"Decoded, they are the completions: {completions}" in run.text
    assert export["refusal"].endswith("Expected a finite number of at least 0. Received: -1.")
    assert f"A temperature of -1 is refused: {export['refusal']}" in run.text
    assert "A prompt and 7 settings go in" in run.text


def test_rows_of_an_answer_keep_their_inputs_apart(lesson):
    class Signature:
        structured_input_signature = ((), {"text": tf.TensorSpec((None,), tf.string)})

        def __call__(self, text):
            return {"length": tf.strings.length(text), "raw_bytes": text, "text": text}

    request = {"signature_name": "score", "instances": [{"text": "a"}, {"text": "bcd"}]}
    assert lesson.answer_like_a_server({"score": Signature()}, request) == {
        "predictions": [
            {"length": 1, "raw_bytes": {"b64": "YQ=="}, "text": "a"},
            {"length": 3, "raw_bytes": {"b64": "YmNk"}, "text": "bcd"},
        ]
    }


# The command


def test_every_option_has_a_help_text(lesson, explains_every_option):
    explains_every_option(lesson, at_least=10)


@pytest.mark.parametrize(
    ("options", "received", "allowed"),
    [
        (["--prompt", "The zebra"], "zebra", "The, cat, sat"),
        (["--prompt", ""], "0", "from 1 to 10"),
        (["--prompt", " ".join(11 * ["cat"])], "11", "from 1 to 10"),
        (["--steps", "-1"], "-1", "0 or more"),
        (["--training-steps", "-2"], "-2", "0 or more"),
        (["--seed", "2147483648"], "2147483648", "from 0 to 2147483647"),
        (["--temperature", "inf"], "inf", "finite"),
        (["--top-k", "-3"], "-3", "from 0"),
        (["--top-p", "0"], "0", "above 0 and up to 1"),
        (["--top-p", "1.5"], "1.5", "above 0 and up to 1"),
        (["--out", __file__], "test_lesson_19", "is a file"),
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(
    lesson, options, received, allowed, monkeypatch, refuses
):
    monkeypatch.setattr(lesson, "train", lambda *_: pytest.fail("the work was begun"))
    refuses(lesson, options, received, allowed)


@pytest.mark.slow
def test_the_script_runs_quietly_and_fits_eighty_columns():
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
    # Only JSON, which is to be copied, may go beyond 80.
    assert max(len(line) for line in run.stdout.splitlines() if '":' not in line) <= 80

"""Lesson 19 shows of an export what is in it, and calls it as a server does."""

import base64
import json

import lesson_19_export as lesson
import pytest
import tensorflow as tf

from keras_tinyattn import Check, load_saved_model, signature_operations

SETTINGS = {"temperature": 1.3, "top_k": 7, "top_p": 0.85}
KEYS = "folder files bytes_of_weights signatures operations checks request answer refusal "
KEYS += "same_completion_in_bytes same_ids_as_in_python"


@pytest.fixture
def run(run_lesson):
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    others = ["--steps=5", "--seed=3", "--training-steps=60", "--out={}/out"]
    return run_lesson("lesson_19_export", *settings, *others)


@pytest.fixture
def export(run):
    return run.numbers["export"]


@pytest.fixture
def version(run):
    return run.folder / "out" / "1"


def test_files_and_their_sizes_are_those_on_disk(run, export, version):
    assert run.numbers.keys() == {"prompt", "steps", "seed", "training_steps", "settings", "export"}
    assert export.keys() == set(KEYS.split())
    assert export["folder"] == str(version)
    files = {
        path.relative_to(version).as_posix(): path.stat().st_size
        for path in version.rglob("*")
        if path.is_file()
    }
    assert export["files"] == files
    assert {"saved_model.pb", "model_card.json", "variables/variables.index"} < files.keys()
    # 20 x 8 twice, 10 x 8, three times 8 x 8.
    assert export["bytes_of_weights"] == 4 * (160 + 80 + 192 + 160)
    total = sum(files.values())
    assert files["saved_model.pb"] > (total - export["bytes_of_weights"]) / 2
    about = json.loads((version / "model_card.json").read_text())["about"]
    assert about["training_steps"] == run.numbers["training_steps"] == 60
    assert about["data"][0] == "The cat sat on the mat <eos>"
    for sentence in (
        *(f"{name} {size:,}" for name, size in files.items()),
        f"all {total:,}",
        f"The weights take {export['bytes_of_weights']:,} bytes of it; most of the rest is the graph",
        f"in the folder, {total / 1024:.0f} KiB of it",
        f"Export: {version}",
        "after 60 training steps",
    ):
        assert sentence in run.text


def test_the_signatures_are_those_of_the_export(run, export):
    found = export["signatures"]
    names = "serving_default generate generate_xla generate_ids score attention tokenize detokenize "
    assert found.keys() == set((names + "prefill step sample").split())
    kinds = {"max_new_tokens": "int32", "prompt": "string", "seed": "int32", "stop": "string"}
    kinds |= {"temperature": "float32", "min_p": "float32", "top_k": "int32", "top_p": "float32"}
    assert found["generate"]["inputs"] == {name: [kind, ["B"]] for name, kind in kinds.items()}
    assert found["step"]["outputs"]["new_keys_0"] == ["float32", ["B", "1", "10", "8"]]
    assert "score text length, logprobs, loss, token_ids" in run.text
    assert "output new_logprobs float32 (B, ?)" in run.text
    assert "\u2026" not in run.text


def test_operations_are_those_that_the_package_finds(run, export, version):
    found, reached = export["operations"], signature_operations(version)
    assert found.keys() == reached.keys() == export["signatures"].keys()
    for name, part in found.items():
        kinds, compiled = reached[name]
        nodes = sum(kinds.values())
        assert nodes > len(kinds)
        assert len(compiled) == (name == "generate_xla")
        assert part == {
            **{"nodes": nodes, "kinds": len(kinds), "xla_kinds": []},
            "compiled_functions": len(compiled),
        }
        assert f"{name} {nodes} {len(kinds)} none {len(compiled)}" in run.text
    assert "Only generate_xla has a part that XLA compiles. The other 10 reach neither" in run.text


def test_checks_are_made_on_request_and_shown(run, export, monkeypatch, capsys):
    assert export["checks"] == []
    assert "checks passed" not in run.text
    checks = [Check("files", "5 of 5 as recorded", True)]
    checks.append(Check("generate_xla, in a session, XLA disabled", "no kernel " * 9, False))
    monkeypatch.setattr(lesson, "verify_saved_model", lambda path: checks)
    assert lesson.checks(lesson.console(), "exports/1") == checks
    text = " ".join(capsys.readouterr().out.split())
    assert "files 5 of 5 as recorded passed" in text
    assert "generate_xla, in a session, XLA disabled no kernel no kernel no FAILED" in text
    assert text.count("kernel") == 9
    assert "1 of 2 checks passed." in text


def printed_json(text, key):
    """The JSON in a printed page that begins with a key."""
    return json.JSONDecoder().raw_decode(text[text.index(f'{{ "{key}"') :])[0]


def test_a_request_in_row_format_is_answered_row_by_row_as_the_export_on_disk_does(
    run, export, version
):
    request, rows = export["request"], export["answer"]["predictions"]
    common = {"max_new_tokens": 5, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    common |= {"seed": 3, "stop": ""}
    assert request == {
        "signature_name": "generate",
        "instances": [{"prompt": "The cat", **common, **SETTINGS}, {"prompt": "The", **common}],
    }
    loaded = load_saved_model(version)
    for given, row in zip(request["instances"], rows, strict=True):
        prompt, count, *_ = given.values()
        settings = {name: given[name] for name in given if name not in ("prompt", "max_new_tokens")}
        outputs = loaded.generate(prompt, count, **settings)
        assert outputs["text"][0].decode() == row["text"] == f"{prompt} {row['completion']}"
        assert outputs["length"][0] == row["length"]
        ended, words = row["finish_reason"] == "stop", len(row["text"].split())
        assert row["length"] == words + ended
        assert base64.b64decode(row["completion_bytes"]["b64"]).decode() == row["completion"]

    assert printed_json(run.text, "signature_name") == request
    rounded = [[round(value, 4) for value in row["new_logprobs"]] for row in rows]
    printed = [{**row, "new_logprobs": part} for row, part in zip(rows, rounded, strict=True)]
    assert printed_json(run.text, "predictions") == {"predictions": printed}
    assert export["same_ids_as_in_python"] is export["same_completion_in_bytes"] is True
    assert export["refusal"].endswith("Expected a finite number of at least 0. Received: -1.")
    for sentence in (
        "POST http://localhost:8501/v1/models/lesson_15:predict",
        "2 texts with different settings make one batch.",
        f"Decoded, they are the completions: {' | '.join(row['completion'] for row in rows)}",
        f"A temperature of -1 is refused: {export['refusal']}",
        "A prompt and 7 settings go in",
        "Its token ids are those of model.generate in Python.",
    ):
        assert sentence in run.text


def test_rows_of_an_answer_keep_their_inputs_apart():
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

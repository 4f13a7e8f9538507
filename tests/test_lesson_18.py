"""Lesson 18 draws as often as it says, and shows of an export what is in it."""

import base64
import copy
import importlib
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn.export import _check_alone

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
SETTINGS = {"temperature": 1.3, "top_k": 7, "top_p": 0.9}
DRAWS = 700


@pytest.fixture(scope="module", autouse=True)
def _scripts_can_be_imported():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


def lesson():
    return importlib.import_module("lesson_18_sampling_and_export")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The lesson as a user runs it, and the folder of its files."""
    folder = tmp_path_factory.mktemp("lesson_18")
    options = {**SETTINGS, "steps": 5, "draws": DRAWS, "training_steps": 60}
    options |= {name: folder / name for name in ("json", "out")} | {"plot": folder / "plot.png"}
    command = [sys.executable, SCRIPTS / "lesson_18_sampling_and_export.py"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300), folder


@pytest.fixture(scope="module")
def folder(finished):
    return finished[1] / "out"


@pytest.fixture(scope="module")
def numbers(finished):
    return json.loads((finished[1] / "json").read_text())


@pytest.fixture
def told(capsys):
    """What the lesson prints about these numbers, its line breaks and indents taken out."""

    def tell(numbers):
        capsys.readouterr()
        lesson().tell(numbers, importlib.import_module("_start").console())
        return " ".join(capsys.readouterr().out.split())

    return tell


def other(numbers, *path, value):
    """The numbers with another value at the end of a path of keys."""
    numbers = copy.deepcopy(numbers)
    place = numbers
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return numbers


def by_setting(numbers, **setting):
    (found,) = (entry for entry in numbers["distributions"] if entry["setting"] == setting)
    return found


# One distribution


def test_temperature_top_k_and_top_p_are_those_of_an_independent_computation(numbers):
    model = np.array(numbers["probabilities"], "float64")
    for entry in numbers["distributions"]:
        ((name, value),) = entry["setting"].items()
        expected = np.zeros_like(model)
        order = numbers["order"]
        if name == "temperature":
            expected = model ** (1 / value)
        elif name == "top_k":
            expected[order[:value]] = model[order[:value]]
        else:
            count = next(n for n in range(1, 21) if model[order[:n]].sum() >= value)
            expected[order[:count]] = model[order[:count]]
        share = model[expected > 0].sum()
        expected /= expected.sum()
        # float32 probabilities to the power of 2.
        np.testing.assert_allclose(entry["probabilities"], expected, rtol=1e-4, atol=1e-9)
        assert entry["kept"] == np.sum(expected > 0)
        assert entry["share_before"] == pytest.approx(share, abs=1e-6)
        entropy = -sum(p * math.log(p) for p in expected if p > 0)
        assert entry["as_uncertain_as"] == pytest.approx(math.exp(entropy), rel=1e-4)


def test_what_is_left_to_draw_from_is_told(numbers, told):
    text = told(numbers)
    kept = [by_setting(numbers, top_k=k)["kept"] for k in (1, 3, 6)]
    assert kept == [1, 3, 6]
    assert "top-k 3 leaves 3, however sure the model is." in text
    counts = numbers["kept_by_prompt"]["top_p 0.8"]
    assert len(counts) == 20
    assert min(counts) < max(counts)
    word = numbers["vocabulary"][int(np.argmin(counts))]
    assert f"top-p 0.8 leaves {min(counts)} after '{word}'" in text
    assert "The ranking is the same at all 3." in text
    assert f"{DRAWS} draws gave 1 word." in text
    mixed = numbers["order"][::-1]
    text = told(numbers | {"order": mixed, "greedy_tokens": 2})
    assert "The ranking is not the same at all 3." in text
    assert f"{DRAWS} draws gave 2 words." in text


# Draws


def test_chi_square_worked_out_by_hand():
    # Expected 50, 30, 20 of 100: 25/50 + 25/30 + 0.
    found = lesson().goodness_of_fit([45, 35, 20], [0.5, 0.3, 0.2])
    assert found == (pytest.approx(0.5 + 25 / 30), 2)
    # The last three expect 2, 2 and 1 of 100, and are one cell of 5, which saw 7: 4/5 + 4/95.
    found = lesson().goodness_of_fit([93, 1, 2, 4], [0.95, 0.02, 0.02, 0.01])
    assert found == (pytest.approx(4 / 95 + 4 / 5), 1)
    assert lesson().goodness_of_fit([100, 0], [1.0, 0.0]) == (0.0, 0)


@pytest.mark.parametrize(("degrees", "limit"), [(1, 10.828), (2, 13.816), (5, 20.515), (19, 43.820)])
def test_the_limit_of_chi_square_is_that_of_the_tables(degrees, limit):
    # Wilson and Hilferty's approximation, good to some percent.
    assert lesson().chi_square_limit(degrees) == pytest.approx(limit, rel=0.035)


def test_each_token_is_drawn_as_often_as_it_is_likely(numbers, told):
    for entry in numbers["distributions"]:
        assert sum(entry["counts"]) == DRAWS
        assert entry["drawn_outside"] == 0
        assert entry["chi_square"] <= entry["limit"]
    changed = [entry for entry in numbers["distributions"] if entry["setting"] != {"temperature": 1.0}]
    assert sum(entry["chi_square_before"] > entry["limit"] for entry in changed) >= 6
    text = told(numbers)
    assert "9 of 9 are within the limit." in text
    assert f"were drawn 0 times in {9 * DRAWS}." in text
    unfair = copy.deepcopy(numbers)
    unfair["distributions"][4] |= {"chi_square": 1e4, "drawn_outside": 3, "chi_square_before": 0.0}
    text = told(unfair)
    assert "8 of 9 are within the limit." in text
    assert f"were drawn 3 times in {9 * DRAWS}." in text


def test_draws_that_ignore_a_setting_would_show(monkeypatch):
    sample = lesson().sample
    monkeypatch.setattr(
        lesson(), "sample", lambda logits, **settings: sample(logits, 1.0, seed=settings["seed"])
    )
    logits = tf.constant([[2.0, 1.0, 0.5, 0.0, -0.5]])
    for setting in ({"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.7}):
        found = lesson().draw_often(logits, setting, seed=5, draws=2000)
        assert found["chi_square"] > found["limit"] or found["drawn_outside"] > 100


def test_the_same_seed_writes_the_same_text_in_any_company(numbers, told):
    texts = numbers["texts"]
    assert all(texts[name] for name in texts if name.startswith("same"))
    assert all(text.startswith("The cat ") for text in texts["texts"])
    assert len(set(texts["texts"])) > 1
    text = told(numbers)
    assert text.count("the same texts.") == 5
    assert "not company, order or pauses." in text
    text = told(other(numbers, "texts", "same_in_company", value=False))
    assert "Beside rows of other length and seed: other texts." in text
    assert "So a draw depends on more than the seed" in text


def test_a_draw_that_depends_on_its_row_would_show(monkeypatch):
    model, tokenizer = lesson().reference_model()

    class RowsDiffer:
        sequence_length = model.sequence_length

        def generate(self, prompts, *args, seed, **settings):
            return model.generate(
                prompts, *args, seed=[s + row for row, s in enumerate(seed)], **settings
            )

    settings = {"temperature": 5.0, "top_k": 0, "top_p": 1.0}
    found = lesson().write_texts(RowsDiffer(), tokenizer, [1, 2], 4, settings, seed=3)
    assert found["same_again"]
    assert not found["same_reversed"]
    assert not found["same_alone"]
    assert not found["same_in_company"]


# The export


def test_the_signatures_are_those_of_the_export(numbers, told):
    found = numbers["export"]["signatures"]
    assert set(found) == {
        *("serving_default", "generate", "generate_xla", "generate_ids", "score", "attention"),
        *("prefill", "step", "sample"),
    }
    assert found["generate"]["inputs"] == {
        "max_new_tokens": ["int32", ["B"]],
        "prompt": ["string", ["B"]],
        "seed": ["int32", ["B"]],
        "stop": ["string", ["B"]],
        "temperature": ["float32", ["B"]],
        "top_k": ["int32", ["B"]],
        "top_p": ["float32", ["B"]],
    }
    assert found["step"]["outputs"]["new_keys_0"] == ["float32", ["B", "1", "10", "8"]]
    text = told(numbers)
    assert "score text length, logprobs, loss, token_ids" in text
    assert "new_logprobs float32 (B, ?)" in text
    assert "\u2026" not in text


def test_files_and_their_sizes_are_those_on_disk(numbers, folder, told):
    files = numbers["export"]["files"]
    assert {"saved_model.pb", "model_card.json", "variables/variables.index"} < set(files)
    assert numbers["export"]["folder"] == str(folder / "1")
    for name, size in files.items():
        assert (folder / "1" / name).stat().st_size == size
    # 20 x 8 twice, 10 x 8, three times 8 x 8.
    assert numbers["export"]["bytes_of_weights"] == 4 * (160 + 80 + 192 + 160)
    assert f"all {sum(files.values()):,}" in told(numbers)
    about = json.loads((folder / "1" / "model_card.json").read_text())["about"]
    assert about["training_steps"] == 60


def test_operations_are_as_many_kinds_as_the_packages_own_check_finds(numbers, folder, told):
    found = numbers["export"]["operations"]
    checked = {
        row[0].removeprefix("operations of "): row[1]
        for row in _check_alone.check_operations(folder / "1")
    }
    assert {name: f"{found[name]['kinds']} kinds" for name in checked} == checked
    assert set(found) - set(checked) == {"generate_xla"}
    for name, part in found.items():
        assert part["xla_kinds"] == []
        assert part["compiled_functions"] == (name == "generate_xla")
        assert part["nodes"] > part["kinds"]
    text = told(numbers)
    assert "XLA compiles a part of generate_xla. The other 8 reach neither" in text
    assert "8 of 9 signatures use no XLA" in text
    text = told(other(numbers, "export", "operations", "score", "xla_kinds", value=["XlaSort"]))
    assert "XLA compiles a part of generate_xla and score. The other 7 reach" in text
    assert "7 of 9 signatures use no XLA" in text


def test_checks_of_verify_are_told(numbers, told):
    checks = [["files", "5 of 5 as recorded", True], ["score", "largest difference 0.3", False]]
    text = told(other(numbers, "export", "checks", value=checks))
    assert "score largest difference 0.3 FAILED" in text
    assert "1 of 2 checks passed." in text
    assert "checks passed" not in told(numbers)


# The request


def test_a_request_in_row_format_is_answered_row_by_row(numbers, told):
    request, answer = numbers["export"]["request"], numbers["export"]["answer"]
    assert request["signature_name"] == "generate"
    assert request["instances"][0] == {
        "prompt": "The cat",
        "max_new_tokens": 5,
        **SETTINGS,
        "seed": 18,
        "stop": "",
    }
    assert json.loads(json.dumps(answer)) == answer
    first, second = answer["predictions"]
    assert first["text"] == f"The cat {first['completion']}"
    assert second["text"].startswith("The ")
    assert first["finish_reason"] in ("stop", "length")
    assert base64.b64decode(first["completion_bytes"]["b64"]).decode() == first["completion"]
    assert numbers["export"]["same_ids_as_in_python"]
    assert numbers["export"]["same_completion_in_bytes"]
    text = told(numbers)
    assert "POST http://localhost:8501/v1/models/lesson_15:predict" in text
    assert '"signature_name": "generate", "instances": [ { "prompt": "The cat",' in text
    assert f'"text": "{first["text"]}"' in text
    assert "those that model.generate gives in Python" in text
    assert "Expected a finite number of at least 0. Received: -1." in text
    text = told(other(numbers, "export", "same_ids_as_in_python", value=False))
    assert "not those that model.generate gives" in text
    assert "its ids are not those of model.generate" in text
    assert "is not refused" in told(other(numbers, "export", "refusal", value=None))


def test_the_printed_request_is_json(numbers, capsys):
    capsys.readouterr()
    request = numbers["export"]["request"]
    lesson().print_json(importlib.import_module("_start").console(), request)
    # The temperature 1.3 and the like come back as they went in.
    assert json.loads(capsys.readouterr().out) == request


def test_rows_of_an_answer_keep_their_inputs_apart():
    class Signature:
        structured_input_signature = ((), {"text": tf.TensorSpec((None,), tf.string)})

        def __call__(self, text):
            return {"length": tf.strings.length(text), "raw_bytes": text}

    body = {"signature_name": "score", "instances": [{"text": "a"}, {"text": "bcd"}]}
    answer = lesson().answer_like_a_server({"score": Signature()}, body)
    assert answer == {
        "predictions": [
            {"length": 1, "raw_bytes": {"b64": "YQ=="}},
            {"length": 3, "raw_bytes": {"b64": "YmNk"}},
        ]
    }


# The picture and the command


def test_the_picture_shows_every_setting_on_the_same_words(numbers):
    figure = lesson().draw(numbers)
    assert len(figure.axes) == 9
    words = [numbers["vocabulary"][index] for index in numbers["order"][:10]]
    for axes, entry in zip(figure.axes, numbers["distributions"], strict=True):
        assert [label.get_text() for label in axes.get_yticklabels()] == words
        drawn_with, before = axes.containers
        for bars, values in (
            (drawn_with, entry["probabilities"]),
            (before, numbers["probabilities"]),
        ):
            widths = [bar.get_width() for bar in bars]
            np.testing.assert_allclose(widths, np.array(values)[numbers["order"][:10]])
        (dots,) = axes.lines
        shares = np.array(entry["counts"])[numbers["order"][:10]] / DRAWS
        np.testing.assert_allclose(dots.get_xdata().filled(0.0), shares)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ["temperature 0.5", "temperature 1", "temperature 2"]
    assert titles[3:] == ["top-k 1", "top-k 3", "top-k 6", "top-p 0.5", "top-p 0.8", "top-p 0.95"]


def test_every_option_has_a_help_text(explains_every_option):
    explains_every_option(lesson(), at_least=12)


@pytest.mark.parametrize(
    ("options", "received", "allowed"),
    [
        (["--prompt", "The zebra"], "zebra", "The, cat, sat"),
        (["--prompt", ""], "0", "from 1 to 10"),
        (["--prompt", " ".join(11 * ["cat"])], "11", "from 1 to 10"),
        (["--steps", "-1"], "-1", "0 or more"),
        (["--draws", "99"], "99", "from 100 to 1000000"),
        (["--training-steps", "-2"], "-2", "0 or more"),
        (["--seed", "2147483647"], "2147483647", "from 0 to 2147481647"),
        (["--temperature", "inf"], "inf", "finite"),
        (["--top-k", "-3"], "-3", "from 0"),
        (["--top-p", "0"], "0", "above 0 and up to 1"),
        (["--top-p", "1.5"], "1.5", "above 0 and up to 1"),
        (["--out", __file__], "test_lesson_18", "is a file"),
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
        (["--plot", "{}/a.txt"], "a.txt", ".png or .svg or .pdf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(options, received, allowed, refuses):
    refuses(lesson(), options, received, allowed)


def test_the_script_runs_quietly_and_writes_numbers_picture_and_export(finished):
    run, folder = finished
    assert run.stderr == ""
    assert run.returncode == 0
    text, _ = run.stdout.split("Export: ")
    # Only JSON, which is to be copied, goes beyond 80.
    assert max(len(line) for line in text.splitlines() if '":' not in line) <= 80
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "out" / "1" / "saved_model.pb").is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["json", "out", "plot.png"]

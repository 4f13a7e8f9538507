"""Lesson 16 runs, its hand computations meet what the package computes, and its words its numbers."""

import importlib
import json
import math
import pathlib

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"
STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def _scripts_can_be_imported():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


@pytest.fixture(scope="module")
def lesson():
    return importlib.import_module("lesson_16_training")


@pytest.fixture(scope="module")
def ran(lesson, tmp_path_factory):
    """The folder into which a short run of the lesson wrote its files."""
    folder = tmp_path_factory.mktemp("lesson_16")
    files = {option: folder / name for option, name in FILES.items()}
    lesson.main(["--steps", str(STEPS), *(str(part) for pair in files.items() for part in pair)])
    return folder


FILES = {"--json": "numbers.json", "--plot": "losses.png", "--attention": "attention.png"}


@pytest.fixture(scope="module")
def numbers(ran):
    return json.loads((ran / "numbers.json").read_text(encoding="utf-8"))


def test_the_lesson_draws_its_pictures(ran):
    for option in ("--plot", "--attention"):
        assert (ran / FILES[option]).read_bytes().startswith(b"\x89PNG")


def test_the_targets_are_the_window_one_character_on(numbers):
    assert numbers["targets"][:-1] == numbers["window"][1:]


def test_what_is_computed_by_hand_is_what_the_package_computes(numbers):
    assert numbers["loss"] == pytest.approx(numbers["mean_of_losses"], rel=1e-5)
    np.testing.assert_allclose(numbers["target_losses"], -np.log(numbers["target_shares"]), rtol=1e-6)
    assert numbers["even_loss"] == math.log(numbers["vocabulary_size"])
    # Float32 against float32 in another order, and a central difference of a float32 loss.
    assert numbers["logit_gradient_difference"] < 1e-6 * numbers["logit_gradient_largest"]
    assert numbers["slope"] == pytest.approx(numbers["gradient"], rel=1e-2)
    assert numbers["weight_by_hand"] == pytest.approx(numbers["weight_after"], abs=1e-6)
    assert numbers["weight_after"] != numbers["weight"]


def test_training_lowers_the_loss_on_text_that_the_model_has_not_seen(numbers):
    assert len(numbers["losses"]) == STEPS
    assert numbers["losses"][0] == numbers["step_loss"] == pytest.approx(numbers["loss"], rel=1e-5)
    assert numbers["loss_after"] < numbers["step_loss"]
    assert numbers["validation_after"] < numbers["validation_before"] - 0.5


def told(lesson, numbers, capsys):
    capsys.readouterr()
    lesson.tell(numbers, importlib.import_module("_start").console())
    return " ".join(capsys.readouterr().out.split())


def test_the_sentences_follow_the_numbers(lesson, numbers, capsys):
    text = told(lesson, numbers, capsys)
    assert "loss = -mean(log softmax(logits)[target])" in text
    assert f"{numbers['validation_before']:.2f} to {numbers['validation_after']:.2f}" in text
    assert "the step helped" in text
    other = {
        **numbers,
        "loss_after": numbers["step_loss"] + 1,
        "validation_after": numbers["frequency_loss"] - 0.25,
        "previous_share_after": [0.1, 0.2, 0.75, 0.3],
        "loss": numbers["even_loss"] + 0.5,
        "sample_after": "[bold]\n",
    }
    text = told(lesson, other, capsys)
    assert "the step was too long" in text
    assert "is 0.250 nats better" in text
    assert "head 1 of layer 2 looks at the character before with 75%" in text
    assert "0.500 away from that: it already prefers" in text
    assert "'[bold]\\n'" in text
    other["validation_after"] = numbers["frequency_loss"]
    assert "has not reached that yet" in told(lesson, other, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be 1 or more, but 0 was received"),
        (["--plot", "losses.txt"], "--plot needs a file that can be written"),
        (["--attention", "missing/a.png"], "the directory '.*missing' does not exist"),
    ],
)
def test_a_bad_option_is_refused_before_the_work(options, message, lesson, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        lesson.main(options)
    assert not list(tmp_path.iterdir())

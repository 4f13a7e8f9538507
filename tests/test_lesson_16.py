"""Lesson 16 runs, its hand computations agree with the package, and its sentences are true."""

import math

import lesson_16_training as lesson
import numpy as np
import pytest

STEPS = 30
PICTURES = {"--plot": "losses.png", "--attention": "attention.png"}


@pytest.fixture
def ran(run_lesson):
    files = [part for option, name in PICTURES.items() for part in (option, f"{{}}/{name}")]
    return run_lesson("lesson_16_training", "--steps", STEPS, *files)


@pytest.fixture
def numbers(ran):
    return ran.numbers


def test_the_targets_are_the_window_one_character_on(numbers):
    assert len(numbers["targets"]) == 64
    assert numbers["targets"][:-1] == numbers["window"][1:]


def test_the_loss_by_hand_is_the_loss_of_the_package(ran, numbers):
    np.testing.assert_allclose(numbers["target_losses"], -np.log(numbers["target_shares"]), rtol=1e-6)
    assert numbers["mean_of_losses"] == pytest.approx(numbers["loss"], rel=1e-5)
    assert numbers["even_loss"] == math.log(numbers["vocabulary_size"])
    away = abs(numbers["loss"] - numbers["even_loss"])
    assert away < 0.1
    assert f"is {numbers['mean_of_losses']:.4f} nats by hand, {numbers['loss']:.4f} by" in ran.text
    assert f"An untrained model knows nothing yet, and is close to that: {away:.3f} away." in ran.text
    # The first row of the table.
    row = (numbers["window"][0], numbers["targets"][0])
    share, loss = numbers["target_shares"][0], numbers["target_losses"][0]
    assert f"{row[0]!r} {row[1]!r} {share:.2%} {loss:.3f}" in ran.text


def test_gradient_and_step_by_hand_are_those_of_tape_and_optimizer(ran, numbers):
    # Float32 against float32 in another order, and a central difference of a float32 loss.
    difference = numbers["logit_gradient_difference"] / numbers["logit_gradient_largest"]
    assert difference < 1e-6
    assert numbers["slope"] == pytest.approx(numbers["gradient"], rel=1e-2)
    assert numbers["weight_by_hand"] == pytest.approx(numbers["weight_after"], abs=1e-6)
    assert numbers["weight_after"] != numbers["weight"]
    assert f"it differs from the tape's by at most {difference:.0e} of the largest." in ran.text
    slope, gradient = numbers["slope"], numbers["gradient"]
    assert f"a slope of {slope:.5f}. The tape says {gradient:.5f}." in ran.text
    sign = "1" if gradient > 0 else "-1"
    assert f"g / sqrt(g * g) + 0.1 x weight = {sign} + {0.1 * numbers['weight']:.5f}." in ran.text
    by_hand, after = numbers["weight_by_hand"], numbers["weight_after"]
    assert f"goes to {by_hand:.5f} by hand and to {after:.5f} by the optimizer." in ran.text
    # By about the learning rate, against the gradient.
    moved = after - numbers["weight"]
    assert moved * gradient < 0
    assert abs(moved) == pytest.approx(numbers["learning_rate"], rel=0.01)


def test_training_lowers_the_loss_of_a_batch_and_of_text_that_the_model_has_not_seen(ran, numbers):
    assert len(numbers["losses"]) == STEPS
    assert numbers["losses"][0] == numbers["step_loss"] == pytest.approx(numbers["loss"], rel=1e-5)
    assert numbers["loss_after"] < numbers["step_loss"]
    assert f"fell from {numbers['step_loss']:.4f} to {numbers['loss_after']:.4f}." in ran.text
    before, after = numbers["validation_before"], numbers["validation_after"]
    assert after < before - 0.5
    assert f"{before:.3f} nats per character before, {after:.3f} after." in ran.text
    assert f"among {math.exp(before):.1f} equally likely characters, and now" in ran.text
    assert f"the loss on text it never saw fell from {before:.2f} to {after:.2f}." in ran.text
    assert f"It was told {STEPS} times how wrong" in ran.text


def test_the_frequencies_are_those_of_the_training_text(ran, numbers):
    text = lesson.SONNETS.read_text(encoding="utf-8")
    training, validation = text[: numbers["learn_from"]], text[numbers["learn_from"] :]
    assert len(validation) == numbers["judge_by"]
    total = len(training) + numbers["vocabulary_size"]
    losses = [-math.log((training.count(one) + 1) / total) for one in validation[1:]]
    assert numbers["frequency_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert f"occurs costs {numbers['frequency_loss']:.3f} nats." in ran.text
    assert f"is at {numbers['validation_after'] - numbers['frequency_loss']:+.3f}." in ran.text


def test_the_heads_look_as_the_table_and_the_point_say(ran, numbers):
    before, after = (np.array(numbers[f"previous_share_{when}"]) for when in ("before", "after"))
    for name, one, two in zip(lesson.HEADS, before, after, strict=True):
        assert f"{name} {one:.1%} {two:.1%}" in ran.text
    # Before training the weights are nearly even: 1/2, 1/3, ... 1/20 on each of the characters so far.
    np.testing.assert_allclose(before, np.mean(1 / np.arange(2, 21)), rtol=0.05)
    head = np.argmax(after)
    assert (
        f"previous character, {lesson.HEADS[head]}, gives it {after[head]:.0%} of its weight, where it "
        f"was {before[head]:.0%}." in ran.text
    )


def test_what_the_model_writes_is_printed_as_it_is(ran, numbers):
    for when in ("before", "after"):
        sample = " ".join(repr(numbers[f"sample_{when}"]).split())
        assert f"The line continued {when} training: {sample}" in ran.text
    assert numbers["sample_before"] != numbers["sample_after"]


def test_the_lesson_draws_its_pictures(ran):
    for name in PICTURES.values():
        assert (ran.folder / name).read_bytes().startswith(b"\x89PNG")


def test_every_option_has_a_help_text(explains_every_option):
    explains_every_option(lesson, at_least=5)


@pytest.mark.parametrize(
    ("options", "received", "allowed"),
    [
        (["--steps", "0"], "0", "--steps must be 1 or more"),
        (["--seed", "-1"], "-1", "from 0 to 2147483647"),
        (["--plot", "{}/losses.txt"], "losses.txt", ".png or .svg or .pdf"),
        (["--attention", "{}/absent/a.png"], "absent", "does not exist"),
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(
    options, received, allowed, refuses, monkeypatch
):
    monkeypatch.setattr(lesson.CharTokenizer, "from_text", lambda _: pytest.fail("the work was begun"))
    refuses(lesson, options, received, allowed)

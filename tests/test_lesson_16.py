"""Lesson 16 runs, its hand computations agree with the package, and its sentences are true."""

import math

import lesson_16_training as lesson
import numpy as np
import pytest

STEPS = 30
KEYS = (
    "loss step_loss loss_after validation_before validation_after frequency_loss gradient slope weight "
    "weight_by_hand weight_after mean_of_losses even_loss vocabulary_size learn_from judge_by "
    "num_parameters sizes batch_size line device window targets target_shares target_losses losses "
    "logit_gradient_difference logit_gradient_largest place nudged_losses learning_rate weight_decay "
    "previous_share_before previous_share_after sample_before sample_after"
)


def test_what_it_computes_and_says_is_true(run_lesson):
    files = ("--plot", "{}/losses.png", "--attention", "{}/attention.png")
    ran = run_lesson("lesson_16_training", "--steps", STEPS, *files)
    numbers, text = ran.numbers, ran.text
    assert numbers.keys() == set(KEYS.split())
    for name in ("losses.png", "attention.png"):
        assert (ran.folder / name).read_bytes().startswith(b"\x89PNG")

    # The targets are the window one character on; a loss is -log of the target's share.
    window, targets, shares = (numbers[name] for name in ("window", "targets", "target_shares"))
    assert len(targets) == 64
    assert targets[:-1] == window[1:]
    np.testing.assert_allclose(numbers["target_losses"], -np.log(shares), rtol=1e-6)
    loss, even_loss, by_hand = (numbers[name] for name in ("loss", "even_loss", "mean_of_losses"))
    assert by_hand == pytest.approx(loss, rel=1e-5)
    assert even_loss == math.log(numbers["vocabulary_size"])
    assert abs(loss - even_loss) < 0.1

    # Float32 against float32 in another order, and a central difference of a float32 loss.
    difference = numbers["logit_gradient_difference"] / numbers["logit_gradient_largest"]
    assert difference < 1e-6
    slope, gradient, weight, weight_by_hand, weight_after = (
        numbers[name] for name in ("slope", "gradient", "weight", "weight_by_hand", "weight_after")
    )
    assert slope == pytest.approx(gradient, rel=1e-2)
    assert weight_by_hand == pytest.approx(weight_after, abs=1e-6)
    # By about the learning rate, against the gradient.
    moved = -math.copysign(numbers["learning_rate"], gradient)
    assert weight_after - weight == pytest.approx(moved, rel=0.01)

    # Training lowers the loss of a batch, and of text that the model has not seen.
    step_loss, loss_after, before, after, frequency_loss = (
        numbers[name] for name in ("step_loss", "loss_after", *KEYS.split()[3:6])
    )
    assert len(numbers["losses"]) == STEPS
    assert numbers["losses"][0] == step_loss == pytest.approx(loss, rel=1e-5)
    assert loss_after < step_loss
    assert after < before - 0.5
    text_read = lesson.SONNETS.read_text(encoding="utf-8")
    training, validation = text_read[: numbers["learn_from"]], text_read[numbers["learn_from"] :]
    assert len(validation) == numbers["judge_by"]
    total = len(training) + numbers["vocabulary_size"]
    nats = {one: -math.log((training.count(one) + 1) / total) for one in set(validation)}
    assert frequency_loss == pytest.approx(np.mean([nats[one] for one in validation[1:]]), rel=1e-6)
    assert after < frequency_loss

    # Before training the weights are nearly even: 1/2, 1/3, ... 1/20 on each of the characters so far.
    shares_before, shares_after = numbers["previous_share_before"], numbers["previous_share_after"]
    np.testing.assert_allclose(shares_before, np.mean(1 / np.arange(2, 21)), rtol=0.05)
    head = np.argmax(shares_after)
    assert numbers["sample_before"] != numbers["sample_after"]

    for sentence in (
        f"{window[0]!r} {targets[0]!r} {shares[0]:.2%} {numbers['target_losses'][0]:.3f}",
        f"is {by_hand:.4f} nats by hand, {loss:.4f} by next_token_loss.",
        "An untrained model knows nothing yet, and is close to that: "
        f"{abs(loss - even_loss):.3f} away.",
        f"it differs from the tape's by at most {difference:.0e} of the largest.",
        f"a slope of {slope:.5f}. The tape says {gradient:.5f}.",
        f"= g / sqrt(g * g) + 0.1 x weight = {np.sign(gradient):.0f} + {0.1 * weight:.5f}.",
        f"goes to {weight_by_hand:.5f} by hand and to {weight_after:.5f} by the optimizer.",
        f"On the same batch the loss fell from {step_loss:.4f} to {loss_after:.4f}.",
        f"{before:.3f} nats per character before, {after:.3f} after.",
        f"among {math.exp(before):.1f} equally likely characters, and now among {math.exp(after):.1f}.",
        f"occurs costs {frequency_loss:.3f} nats.",
        f"This one ends {frequency_loss - after:.3f} below that.",
        *(
            f"{name} {one:.1%} {two:.1%}"
            for name, one, two in zip(lesson.HEADS, shares_before, shares_after, strict=True)
        ),
        *(
            f"continued {when} training: {' '.join(repr(numbers[f'sample_{when}']).split())}"
            for when in ("before", "after")
        ),
        f"It was told {STEPS} times how wrong",
        f"the loss on text it never saw fell from {before:.2f} to {after:.2f}.",
        f"previous character, {lesson.HEADS[head]}, gives it {shares_after[head]:.0%} of its weight, "
        f"where it was {shares_before[head]:.0%}.",
    ):
        assert sentence in text

"""Lesson 06 gives the reference's numbers, and what it says of them is true."""

import json
import pathlib

import lesson_06_self_attention as lesson
import numpy as np
import pytest

ORACLE = json.loads((pathlib.Path(__file__).parent / "oracle" / "lesson_06.json").read_text())
TWELVE_STEPS = ("--steps", 12, "--mode", "graph")
THE, CAT, SAT = range(3)


@pytest.fixture
def run(run_lesson):
    def run(*options):
        ran = run_lesson("lesson_06_self_attention", *options)
        return ran.numbers, ran.text

    return run


@pytest.mark.parametrize(
    ("options", "mode"), [((), "xla"), (TWELVE_STEPS, "graph"), (("--mode", "eager"), "eager")]
)
def test_every_mode_gives_the_reference_values(options, mode, run):
    numbers, text = run(*options)
    reference = ORACLE.keys() - {"note", "tolerance_abs"}
    for name in reference:
        # The reference computed in float32 in another order.
        np.testing.assert_allclose(
            numbers[name], ORACLE[name], rtol=0, atol=ORACLE["tolerance_abs"], err_msg=name
        )
    others = "tokens head_dim mode device queries keys values unscaled_weights shifted_scores losses "
    others += "shifted_exponentials naive_softmax stable_softmax weights_after"
    assert numbers.keys() - reference == set(others.split()) - reference
    assert (numbers["tokens"], numbers["mode"]) == (["The", "cat", "sat"], mode)
    assert f"{lesson.MODES[mode][0]}, on {numbers['device']}." in text


def test_twelve_steps_are_those_of_an_independent_gradient_descent(run):
    """Central differences in float64, in NumPy alone."""
    x, target, *kernels = (np.array(ORACLE[name]) for name in ("x", "target", "w_q", "w_k", "w_v"))

    def loss(kernels):
        queries, keys, values = x @ kernels
        scores = np.exp(queries @ keys.T / 2.0)
        return np.mean((scores / scores.sum(axis=1, keepdims=True) @ values - target) ** 2)

    kernels = np.stack(kernels)
    losses = [loss(kernels)]
    for _ in range(12):
        gradient = np.zeros_like(kernels)
        for index in np.ndindex(kernels.shape):
            nudge = np.zeros_like(kernels)
            nudge[index] = 1e-5
            gradient[index] = (loss(kernels + nudge) - loss(kernels - nudge)) / 2e-5
        kernels = kernels - 0.1 * gradient
        losses.append(loss(kernels))
    # float32 against float64.
    np.testing.assert_allclose(run(*TWELVE_STEPS)[0]["losses"], losses, rtol=0, atol=1e-6)


def test_without_steps_nothing_moves(run):
    numbers, text = run("--steps", 0, "--mode", "eager")
    assert numbers["losses"] == [numbers["loss_before"]]
    assert numbers["loss_after_1_step"] is numbers["new_w_q"] is None
    assert numbers["weights_after"] == numbers["weights"]
    assert "No step was taken" in text
    assert "has moved" not in text


def test_what_it_says_of_scores_weights_and_output_is_true(run):
    numbers, text = run()
    queries, keys, raw, scaled, weights, unscaled = (
        np.array(numbers[name])
        for name in ("queries", "keys", "raw", "scaled", "weights", "unscaled_weights")
    )
    the, cat, sat = weights[CAT]
    # head_dim is 4, so the scores are halved.
    np.testing.assert_allclose(scaled, raw / 2, rtol=1e-6)
    exponentials = np.exp(raw)
    shares = exponentials / exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(unscaled, shares, rtol=1e-5)
    spread = [np.std(raw), np.std(scaled), np.var(raw), np.var(scaled)]
    np.testing.assert_allclose(spread, [1.552, 0.776, 2.409, 0.602], atol=5e-4)
    assert queries[CAT, 0] == pytest.approx(0.18, abs=5e-3)
    assert queries[CAT] @ keys[CAT] == pytest.approx(5.019, abs=5e-4)
    assert numbers["output"][CAT][0] == pytest.approx(0.393, abs=5e-4)
    assert (np.argmax(raw[CAT]), np.argmin(raw[CAT])) == (CAT, THE)
    assert np.argmax(weights, axis=1).tolist() == [CAT, CAT, SAT]
    assert unscaled[CAT, CAT] > cat > sat > the
    for sentence in (
        "query: 0.1 x 1.0 + 2.0 x 0.0 + 0.8 x 0.1 + 0.2 x 0.0 = 0.18.",
        "'cat' with 'cat': 0.18 x 0.28 + 2.04 x 1.97 + 0.81 x 0.98 + 0.60 x 0.26 = 5.019.",
        f"'cat' matches itself best ({raw[CAT, CAT]:.3f}) and 'The' least ({raw[CAT, THE]:.3f}).",
        "standard deviation went from 1.552 to 0.776, and the variance from 2.409 to 0.602: 4.00 times",
        "brings the variance to 1. Here it is 0.60: the rule assumes independent numbers of mean 0 and "
        f"variance 1, and these queries and keys have means {np.mean(queries):.2f} and "
        f"{np.mean(keys):.2f}, variances {np.var(queries):.2f} and {np.var(keys):.2f}.",
        f"'cat' attends most to itself ({cat:.1%}), then to 'sat' ({sat:.1%}) and 'The' ({the:.1%}).",
        f"cat {the:.1%} {cat:.1%} {sat:.1%} 100.00%",
        f"'The' attends most to 'cat' ({weights[THE, CAT]:.1%}).",
        f"'sat' attends most to itself ({weights[SAT, SAT]:.1%}).",
        f"would give itself {unscaled[CAT, CAT]:.1%}, closer to all or nothing.",
        "First number of 'cat': 0.119 x 0.55 + 0.651 x 0.15 + 0.230 x 1.00 = 0.393.",
        f"'cat' is now {cat:.0%} 'cat', {sat:.0%} 'sat', {the:.0%} 'The'.",
    ):
        assert sentence in text


def test_the_naive_softmax_overflows_and_ours_keeps_the_weights(run):
    numbers, text = run()
    scores = np.array(numbers["shifted_scores"], "float32")
    np.testing.assert_allclose(scores, np.array(numbers["scaled"][CAT]) + 100, rtol=1e-6)
    assert np.all(np.exp(scores.astype("float64")) > np.finfo("float32").max)
    assert numbers["shifted_exponentials"] == numbers["naive_softmax"] == [None] * 3
    assert "has lost 3 of 3 weights" in text
    assert "cat 102.509 inf nan 65.1%" in text
    difference = np.max(np.abs(np.subtract(numbers["stable_softmax"], numbers["weights"][CAT])))
    spacing = np.spacing(np.max(scores))
    # Rounding moves a score by half a step at most, and a weight by a quarter of that.
    assert difference < spacing
    assert f"at most {difference:.0e}; float32 holds such scores in steps of {spacing:.0e}." in text


@pytest.mark.parametrize(("options", "steps"), [((), 1), (TWELVE_STEPS, 12)])
def test_what_it_says_of_learning_is_true(options, steps, run):
    numbers, text = run(*options)
    q, k, v = (numbers[f"grad_w_{letter}_l2"] for letter in "qkv")
    losses, before, after = (numbers[name] for name in ("losses", "weights", "weights_after"))
    before, after, change = before[CAT], after[CAT], losses[-1] / losses[0] - 1
    assert 0 < min(q, k) <= max(q, k) < v
    assert len(losses) == steps + 1
    assert np.all(np.diff(losses) < 0)
    assert before != after
    for sentence in (
        f"that of W_V is {v / q:.1f} times as long as that of W_Q.",
        f"The loss fell from {losses[0]:.6f} to {losses[-1]:.6f} ({change:+.1%}); "
        f"it fell in {steps} of {steps} steps.",
        f"{steps} {losses[-1]:.6f} ",
        f"'cat' gave 'The' {before[THE]:.2%} and 'sat' {before[SAT]:.2%}, and now gives them "
        f"{after[THE]:.2%} and {after[SAT]:.2%}.",
    ):
        assert sentence in text

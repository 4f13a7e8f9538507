"""Lesson 06 gives the reference's numbers, and what it says of them is true."""

import json
import pathlib
import subprocess
import sys

import lesson_06_self_attention as lesson
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent
NAME = "lesson_06_self_attention"
THE, CAT, SAT = range(3)


def oracle():
    return json.loads((TESTS / "oracle" / "lesson_06.json").read_text())


def arrays(numbers):
    """The numbers as the lesson had them: lists as float32 arrays, null as NaN."""
    return {
        name: np.array(value, "float32") if isinstance(value, list) and name != "tokens" else value
        for name, value in numbers.items()
    }


@pytest.fixture(scope="module")
def default(run_lesson):
    return run_lesson(NAME)


@pytest.fixture(scope="module")
def twelve_steps(run_lesson):
    return run_lesson(NAME, "--steps", 12, "--mode", "graph")


def test_every_option_has_a_help_text(explains_every_option):
    explains_every_option(lesson, at_least=4)


@pytest.mark.parametrize(
    ("options", "received", "allowed"),
    [
        (["--steps", "-1"], "-1", "0 or more"),
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
        (["--plot", "{}/a.txt"], "a.txt", ".png or .svg or .pdf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(options, received, allowed, refuses):
    refuses(lesson, options, received, allowed)


@pytest.mark.parametrize(
    "options",
    [(), ("--steps", 12, "--mode", "graph"), ("--mode", "eager")],
    ids=["xla", "graph", "eager"],
)
def test_every_mode_gives_the_reference_values(options, run_lesson):
    numbers, expected = run_lesson(NAME, *options).numbers, oracle()
    tolerance = expected.pop("tolerance_abs")
    del expected["note"]
    for name, values in expected.items():
        # The reference computed in float32 in another order.
        np.testing.assert_allclose(numbers[name], values, rtol=0, atol=tolerance, err_msg=name)
    assert numbers["tokens"] == ["The", "cat", "sat"]
    assert numbers["mode"] == (options[-1] if options else "xla")
    assert (
        f"{lesson.MODES[numbers['mode']][0]}, on {numbers['device']}."
        in run_lesson(NAME, *options).text
    )
    assert numbers["device"].split()[0].rstrip(":0123456789") in ("CPU", "GPU")


def test_twelve_steps_are_those_of_an_independent_gradient_descent(twelve_steps):
    """Central differences in float64, in NumPy alone."""
    given = {name: np.array(values) for name, values in oracle().items() if name != "note"}

    def loss(kernels):
        queries, keys, values = given["x"] @ kernels
        scores = np.exp(queries @ keys.T / 2.0)
        output = scores / scores.sum(axis=1, keepdims=True) @ values
        return np.mean((output - given["target"]) ** 2)

    kernels = np.stack([given["w_q"], given["w_k"], given["w_v"]])
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
    np.testing.assert_allclose(twelve_steps.numbers["losses"], losses, rtol=0, atol=1e-6)


def test_without_steps_nothing_moves(run_lesson):
    run = run_lesson(NAME, "--steps", 0, "--mode", "eager")
    assert run.numbers["losses"] == [run.numbers["loss_before"]]
    assert run.numbers["loss_after_1_step"] is None
    assert run.numbers["new_w_q"] is None
    assert run.numbers["weights_after"] == run.numbers["weights"]
    assert "No step was taken" in run.text
    assert "has moved" not in run.text


def test_what_it_says_of_the_scores_is_true(default):
    numbers = arrays(default.numbers)
    x, queries, keys, raw, scaled = (
        numbers[name] for name in ("x", "queries", "keys", "raw", "scaled")
    )
    np.testing.assert_allclose(x @ numbers["w_q"], queries, atol=1e-6)
    assert "query: 0.1 x 1.0 + 2.0 x 0.0 + 0.8 x 0.1 + 0.2 x 0.0 = 0.18." in default.text
    np.testing.assert_allclose(queries @ keys.T, raw, atol=1e-6)
    assert (
        "'cat' with 'cat': 0.18 x 0.28 + 2.04 x 1.97 + 0.81 x 0.98 + 0.60 x 0.26 = 5.019."
        in default.text
    )
    assert np.argmax(raw[CAT]) == CAT
    assert np.argmin(raw[CAT]) == THE
    assert (
        f"'cat' matches itself best ({raw[CAT, CAT]:.3f}) and 'The' least ({raw[CAT, THE]:.3f})."
        in default.text
    )
    # head_dim is 4, so the scores are halved.
    np.testing.assert_allclose(scaled, raw / 2, rtol=1e-6)
    assert "standard deviation went from 1.552 to 0.776" in default.text
    assert np.std(raw) == pytest.approx(1.552, abs=5e-4)
    assert np.std(scaled) == pytest.approx(0.776, abs=5e-4)
    assert "variance from 2.409 to 0.602: 4.00 times less." in default.text
    assert np.var(raw) == pytest.approx(2.409, abs=5e-4)
    assert np.var(scaled) == pytest.approx(0.602, abs=5e-4)
    assert (
        "brings the variance to 1. Here it is 0.60: the rule assumes independent numbers of mean 0 and "
        f"variance 1, and these queries and keys have means {np.mean(queries):.2f} and "
        f"{np.mean(keys):.2f}, variances {np.var(queries):.2f} and {np.var(keys):.2f}." in default.text
    )


def test_what_it_says_of_the_weights_and_the_output_is_true(default):
    numbers = arrays(default.numbers)
    weights, unscaled, values = (numbers[name] for name in ("weights", "unscaled_weights", "values"))
    the, cat, sat = weights[CAT]
    assert cat > sat > the
    assert (
        f"'cat' attends most to itself ({cat:.1%}), then to 'sat' ({sat:.1%}) and 'The' ({the:.1%})."
        in default.text
    )
    assert f"cat {the:.1%} {cat:.1%} {sat:.1%} 100.00%" in default.text
    assert np.argmax(weights[THE]) == CAT
    assert f"'The' attends most to 'cat' ({weights[THE, CAT]:.1%})." in default.text
    assert np.argmax(weights[SAT]) == SAT
    assert f"'sat' attends most to itself ({weights[SAT, SAT]:.1%})." in default.text
    exponentials = np.exp(numbers["raw"])
    np.testing.assert_allclose(
        unscaled, exponentials / exponentials.sum(axis=1, keepdims=True), rtol=1e-5
    )
    assert unscaled[CAT, CAT] > cat
    assert f"would give itself {unscaled[CAT, CAT]:.1%}, closer to all or nothing." in default.text
    np.testing.assert_allclose(weights @ values, numbers["output"], atol=1e-6)
    assert "First number of 'cat': 0.119 x 0.55 + 0.651 x 0.15 + 0.230 x 1.00 = 0.393." in default.text
    assert f"'cat' is now {cat:.0%} 'cat', {sat:.0%} 'sat', {the:.0%} 'The'." in default.text


def test_the_naive_softmax_overflows_and_ours_keeps_the_weights(default):
    numbers = default.numbers
    scores = np.array(numbers["shifted_scores"], "float32")
    np.testing.assert_allclose(scores, np.array(numbers["scaled"][CAT]) + 100, rtol=1e-6)
    assert np.all(np.exp(scores.astype("float64")) > np.finfo("float32").max)
    assert numbers["shifted_exponentials"] == [None] * 3
    assert numbers["naive_softmax"] == [None] * 3
    assert "has lost 3 of 3 weights" in default.text
    assert "cat 102.509 inf nan 65.1%" in default.text
    difference = np.max(np.abs(np.subtract(numbers["stable_softmax"], numbers["weights"][CAT])))
    spacing = np.spacing(np.max(scores))
    # Rounding moves a score by half a step at most, and a weight by a quarter of that.
    assert difference < spacing
    assert (
        f"at most {difference:.0e}; float32 holds such scores in steps of {spacing:.0e}."
        in default.text
    )


def test_what_it_says_of_learning_is_true(default, twelve_steps):
    norms = {letter: default.numbers[f"grad_w_{letter}_l2"] for letter in "qkv"}
    assert all(norm > 0 for norm in norms.values())
    assert max(norms, key=norms.get) == "v"
    assert f"that of W_V is {norms['v'] / norms['q']:.1f} times as long as that of W_Q." in default.text
    for run, steps in ((default, 1), (twelve_steps, 12)):
        losses, before, after = (run.numbers[name] for name in ("losses", "weights", "weights_after"))
        assert len(losses) == steps + 1
        assert np.all(np.diff(losses) < 0)
        change = losses[-1] / losses[0] - 1
        assert (
            f"The loss fell from {losses[0]:.6f} to {losses[-1]:.6f} ({change:+.1%}); "
            f"it fell in {steps} of {steps} steps." in run.text
        )
        assert f"{steps} {losses[-1]:.6f} " in run.text
        assert before[CAT] != after[CAT]
        assert (
            f"'cat' gave 'The' {before[CAT][THE]:.2%} and 'sat' {before[CAT][SAT]:.2%}, and now gives "
            f"them {after[CAT][THE]:.2%} and {after[CAT][SAT]:.2%}." in run.text
        )
    assert "The loss fell from 0.111388 to 0.100710 (-9.6%); it fell in 1 of 1 steps." in default.text


def test_a_user_sees_the_page_a_picture_and_nothing_on_standard_error(tmp_path):
    command = [
        sys.executable,
        str(TESTS.parent / "scripts" / f"{NAME}.py"),
        "--plot",
        tmp_path / "a.png",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0
    assert finished.stderr == ""
    text, path = finished.stdout.split("Picture: ")
    assert path == f"{tmp_path / 'a.png'}\n"
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text
    assert "compiled with XLA (jit_compile=True), on " in " ".join(text.split())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

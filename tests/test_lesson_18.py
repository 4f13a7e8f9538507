"""Lesson 18 reshapes distributions as its settings say, and samples as often as it predicts."""

import importlib
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "lesson_18_sampling.py"
# Standard deviations above the mean that one of a thousand normal numbers passes.
ONE_IN_A_THOUSAND = 3.0902
OTHER = {"--prompt": "The dog", "--steps": 5, "--temperature": 1.3, "--top-k": 7, "--top-p": 0.85}
OTHER |= {"--seed": 3, "--draws": 700, "--training-steps": 60}


@pytest.fixture
def lesson():
    return importlib.import_module("lesson_18_sampling")


@pytest.fixture(scope="module")
def default(run_lesson):
    return run_lesson("lesson_18_sampling", "--plot", "{}/plot.png")


@pytest.fixture(scope="module")
def other(run_lesson):
    return run_lesson("lesson_18_sampling", *(part for option in OTHER.items() for part in option))


@pytest.fixture(params=["default", "other"])
def each(request):
    return request.getfixturevalue(request.param)


def by_setting(numbers, **setting):
    (found,) = (entry for entry in numbers["distributions"] if entry["setting"] == setting)
    return found


# One distribution


def test_temperature_top_k_and_top_p_are_those_of_an_independent_computation(each):
    numbers = each.numbers
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


def test_what_is_said_of_temperature_is_true(each):
    numbers, text = each.numbers, each.text
    likeliest = numbers["order"][0]
    low, one, high = (by_setting(numbers, temperature=value) for value in (0.5, 1.0, 2.0))
    for entry in (low, one, high):
        ranking = np.argsort(-np.array(entry["probabilities"]), kind="stable")
        assert ranking.tolist() == numbers["order"]
    assert "The ranking of the words is the same at all 3 temperatures." in text
    tops = [entry["probabilities"][likeliest] for entry in (low, one, high)]
    assert tops[0] > tops[1] > tops[2]
    assert "a low temperature moves their probabilities apart, a high one moves them together" in text
    assert numbers["greedy_tokens"] == 1
    assert f"At temperature 0, {numbers['draws']} samples gave 1 word, the most likely one." in text
    perplexities = [entry["as_uncertain_as"] for entry in (one, low, one, high)]
    assert f"perplexity {' '.join(f'{value:.1f}' for value in perplexities)}" in text


def test_the_tables_show_what_each_setting_keeps(each):
    numbers, text = each.numbers, each.text
    word = numbers["vocabulary"][numbers["order"][0]]
    top = f"{max(numbers['probabilities']):.1%}"
    for name in ("temperature", "top_k", "top_p"):
        found = [entry for entry in numbers["distributions"] if name in entry["setting"]]
        shown = " ".join(f"{max(entry['probabilities']):.1%}" for entry in found)
        assert f"{word} {top} {shown}" in text
        assert f"words kept 20 {' '.join(str(entry['kept']) for entry in found)} their share" in text
        shares = " ".join(f"{entry['share_before']:.1%}" for entry in found)
        assert f"their share 100.0% {shares} perplexity" in text
    # Nothing was too wide for its table.
    assert "\u2026" not in text


def test_what_is_said_of_top_k_and_top_p_is_true(each):
    numbers, text = each.numbers, each.text
    assert [by_setting(numbers, top_k=k)["kept"] for k in (1, 3, 6)] == [1, 3, 6]
    assert set(numbers["kept_by_prompt"]["top_k 3"]) == {3}
    assert "With each of the 20 words as a prompt, top-k 3 keeps 3." in text
    counts, likeliest = numbers["kept_by_prompt"]["top_p 0.8"], numbers["likeliest_by_prompt"]
    fewest, most = int(np.argmin(counts)), int(np.argmax(counts))
    assert len(counts) == 20
    assert counts[fewest] < counts[most]
    assert likeliest[fewest] > likeliest[most]
    few, many = numbers["vocabulary"][fewest], numbers["vocabulary"][most]
    kept = (
        f"keeps {counts[fewest]} after '{few}', where the most likely word has {likeliest[fewest]:.0%}"
    )
    assert f"Top-p 0.8 {kept}, and" in text
    assert f"and {counts[most]} after '{many}', where it has {likeliest[most]:.0%}." in text


# Samples


def goodness_of_fit(counts, probabilities):
    """Pearson's chi-square of samples, and its degrees of freedom.

    Cells of fewer than five expected samples are put together until they expect five, since the
    statistic is no chi-square otherwise. Cells that expect none are left out.
    """
    counts, expected = np.asarray(counts), np.sum(counts) * np.asarray(probabilities, "float64")
    cells, together = [], np.zeros(2)
    for index in np.argsort(expected, kind="stable"):
        if expected[index] > 0:
            together += counts[index], expected[index]
            if together[1] >= 5:
                cells.append(together)
                together = np.zeros(2)
    return float(sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)), len(cells) - 1


def chi_square_limit(degrees):
    """What fair samples exceed once in a thousand times, after Wilson and Hilferty."""
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + ONE_IN_A_THOUSAND * math.sqrt(spread)) ** 3


def is_fair(entry):
    chi_square, degrees = goodness_of_fit(entry["counts"], entry["probabilities"])
    return chi_square <= chi_square_limit(degrees) and entry["drawn_outside"] == 0


def test_chi_square_worked_out_by_hand():
    # Expected 50, 30, 20 of 100: 25/50 + 25/30 + 0.
    assert goodness_of_fit([45, 35, 20], [0.5, 0.3, 0.2]) == (pytest.approx(0.5 + 25 / 30), 2)
    # The last three expect 2, 2 and 1 of 100, and are one cell of 5, which saw 7: 4/5 + 4/95.
    found = goodness_of_fit([93, 1, 2, 4], [0.95, 0.02, 0.02, 0.01])
    assert found == (pytest.approx(4 / 95 + 4 / 5), 1)
    assert goodness_of_fit([100, 0], [1.0, 0.0]) == (0.0, 0)


@pytest.mark.parametrize(("degrees", "limit"), [(1, 10.828), (2, 13.816), (5, 20.515), (19, 43.820)])
def test_the_limit_of_chi_square_is_that_of_the_tables(degrees, limit):
    # Wilson and Hilferty's approximation, good to some percent.
    assert chi_square_limit(degrees) == pytest.approx(limit, rel=0.035)


def test_each_word_is_sampled_as_often_as_it_is_likely(each):
    numbers, draws = each.numbers, each.numbers["draws"]
    told_apart = 0
    for entry in numbers["distributions"]:
        assert sum(entry["counts"]) == draws
        assert is_fair(entry), entry["setting"]
        # The test can tell: it sees that these are not samples of the model's own distribution.
        told_apart += not is_fair({**entry, "probabilities": numbers["probabilities"]})
    assert told_apart >= 7
    assert is_fair({**by_setting(numbers, temperature=1.0), "probabilities": numbers["probabilities"]})
    assert f"Words that a setting leaves out: 0 of {9 * draws} samples." in each.text


def test_the_share_of_the_likeliest_word_is_off_by_so_many_standard_deviations(each):
    numbers, draws = each.numbers, each.numbers["draws"]
    for entry in numbers["distributions"]:
        best = int(np.argmax(entry["probabilities"]))
        p, share = entry["probabilities"][best], entry["counts"][best] / draws
        # The spread of a share of independent samples.
        spread = math.sqrt(p * (1 - p) / draws)
        off = abs(share - p) / spread if spread else 0.0
        assert entry["deviations_off"] == pytest.approx(off)
        name = " ".join(f"{name} {value:g}" for name, value in entry["setting"].items())
        row = f"{name.replace('_', '-')} {p:.1%} {share:.1%} {spread:.1%} {off:.1f}"
        assert row in each.text
    worst = max(entry["deviations_off"] for entry in numbers["distributions"])
    assert worst < 3
    assert f"At most {worst:.1f} standard deviations off; chance exceeds 3 once in 370" in each.text
    assert 1 / math.erfc(3 / math.sqrt(2)) == pytest.approx(370, abs=1)


def test_samples_that_ignore_a_setting_would_show(lesson, monkeypatch):
    sample = lesson.sample
    monkeypatch.setattr(
        lesson,
        "sample",
        lambda logits, **settings: sample(logits, temperature=1.0, seed=settings["seed"]),
    )
    options = types.SimpleNamespace(seed=5, draws=2000)
    logits = tf.constant([[2.0, 1.0, 0.5, 0.0, -0.5, *([-5.0] * 15)]])
    output = importlib.import_module("_start").console()
    found = [
        entry
        for name, values in (("temperature", (0.5, 2.0)), ("top_k", (3,)), ("top_p", (0.7,)))
        for entry in lesson.distributions(output, logits, name, values)
    ]
    lesson.samples(output, logits, found, options)
    assert not any(map(is_fair, found))


# Texts


def test_the_same_seed_writes_the_same_text_in_any_company(each):
    texts, prompt = each.numbers["texts"], each.numbers["prompt"]
    same = [name for name in texts if name.startswith("same_")]
    assert len(same) == 5
    assert all(texts[name] is True for name in same)
    assert each.text.count("5 of 5") == 5
    assert "the rest of the batch, the order of its rows and a pause do not." in each.text
    assert texts["seeds"] == [each.numbers["seed"] + index for index in range(5)]
    for seed, text in zip(texts["seeds"], texts["texts"], strict=True):
        assert text.startswith(f"{prompt} ")
        assert f"{seed} {text}" in each.text
    different = len(set(texts["texts"]))
    assert different > 1
    assert f"Different texts with 5 seeds: {different}; and the same seed" in each.text


def test_a_sample_that_depends_on_its_row_would_show(lesson, capsys):
    model, tokenizer = lesson.reference_model()

    class RowsDiffer:
        sequence_length = model.sequence_length

        def generate(self, prompts, *args, seed, **settings):
            seed = [s + row for row, s in enumerate(seed)]
            return model.generate(prompts, *args, seed=seed, **settings)

    options = types.SimpleNamespace(temperature=5.0, top_k=0, top_p=1.0, steps=4, seed=3)
    output = importlib.import_module("_start").console()
    found = lesson.texts(output, RowsDiffer(), tokenizer, [1, 2], options)
    assert found["same_again"]
    assert not found["same_reversed"]
    assert not found["same_alone"]
    assert not found["same_in_company"]
    assert "with the rows in reverse order 5 of 5" not in " ".join(capsys.readouterr().out.split())


def test_a_text_that_ends_before_a_pause_is_not_continued_after_it(lesson):
    model, tokenizer = lesson.reference_model()
    options = types.SimpleNamespace(temperature=0.0, top_k=0, top_p=1.0, steps=4, seed=3)
    output = importlib.import_module("_start").console()
    # Untrained, the model answers <eos> with <eos>.
    found = lesson.texts(output, model, tokenizer, [19, 19], options)
    assert found["texts"] == ["<eos> <eos> <eos>"] * 5
    assert found["same_after_a_pause"]


# The command


def test_options_decide_the_numbers(default, other):
    numbers = other.numbers
    assert numbers["settings"] == {"temperature": 1.3, "top_k": 7, "top_p": 0.85}
    for name in ("prompt", "steps", "seed", "draws", "training_steps"):
        assert numbers[name] == OTHER[f"--{name.replace('_', '-')}"]
    assert "temperature 1.3, top-k 7, top-p 0.85, at most 5 more words:" in other.text
    for run, steps in ((default, 100), (other, 60)):
        loss = run.numbers["loss_before_last_step"]
        assert f"after {steps} training steps (loss {loss:.2f} at the last)" in run.text
    assert other.numbers["loss_before_last_step"] > default.numbers["loss_before_last_step"]


def test_the_picture_shows_every_setting_on_the_same_words(lesson, default):
    assert (default.folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    numbers = {**default.numbers, "probabilities": np.array(default.numbers["probabilities"])}
    figure = lesson.draw(numbers)
    assert len(figure.axes) == 9
    shown = numbers["order"][:10]
    for axes, entry in zip(figure.axes, numbers["distributions"], strict=True):
        words = [label.get_text() for label in axes.get_yticklabels()]
        assert words == [numbers["vocabulary"][index] for index in shown]
        values = (entry["probabilities"], numbers["probabilities"])
        for bars, heights in zip(axes.containers, values, strict=True):
            np.testing.assert_allclose([bar.get_width() for bar in bars], np.array(heights)[shown])
        (dots,) = axes.lines
        shares = np.array(entry["counts"])[shown] / numbers["draws"]
        np.testing.assert_allclose(dots.get_xdata().filled(0.0), shares)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ["temperature 0.5", "temperature 1", "temperature 2"]
    assert titles[3:] == ["top-k 1", "top-k 3", "top-k 6", "top-p 0.5", "top-p 0.8", "top-p 0.95"]


def test_every_option_has_a_help_text(lesson, explains_every_option):
    explains_every_option(lesson, at_least=10)


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
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
        (["--plot", "{}/a.txt"], "a.txt", ".png or .svg or .pdf"),
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
    assert max(map(len, run.stdout.splitlines())) <= 80

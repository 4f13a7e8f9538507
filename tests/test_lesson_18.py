"""Lesson 18 reshapes distributions as its settings say, and samples as often as it predicts."""

import math
import types

import lesson_18_sampling as lesson
import numpy as np
import pytest
import tensorflow as tf

# Standard deviations above the mean that one of a thousand normal numbers passes.
ONE_IN_A_THOUSAND = 3.0902
OTHER = {"--prompt": "The dog", "--steps": 5, "--temperature": 1.3, "--top-k": 7, "--top-p": 0.85}
OTHER |= {"--seed": 3, "--draws": 700, "--training-steps": 60}
OPTIONS = {"default": ("--plot", "{}/plot.png"), "other": sum(OTHER.items(), ())}
KEYS = "prompt steps seed draws training_steps settings device vocabulary sequence_length order texts "
KEYS += (
    "loss_before_last_step probabilities distributions greedy_tokens likeliest_by_prompt kept_by_prompt"
)


@pytest.fixture
def run(run_lesson):
    return lambda name: run_lesson("lesson_18_sampling", *OPTIONS[name])


@pytest.fixture(params=OPTIONS)
def each(request, run):
    return run(request.param)


def by_setting(numbers, **setting):
    (found,) = (entry for entry in numbers["distributions"] if entry["setting"] == setting)
    return found


# One distribution


def test_temperature_top_k_and_top_p_are_those_of_an_independent_computation(each):
    numbers = each.numbers
    model, order = np.array(numbers["probabilities"], "float64"), numbers["order"]
    for entry in numbers["distributions"]:
        ((name, value),) = entry["setting"].items()
        expected = model ** (1 / value) if name == "temperature" else model.copy()
        if name == "top_k":
            expected[order[value:]] = 0
        elif name == "top_p":
            count = next(n for n in range(1, 21) if model[order[:n]].sum() >= value)
            expected[order[count:]] = 0
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
    assert numbers.keys() == set(KEYS.split())
    low, one, high = (by_setting(numbers, temperature=value) for value in (0.5, 1.0, 2.0))
    for entry in (low, one, high):
        ranking = np.argsort(-np.array(entry["probabilities"]), kind="stable")
        assert ranking.tolist() == numbers["order"]
    tops = [entry["probabilities"][numbers["order"][0]] for entry in (low, one, high)]
    assert tops[0] > tops[1] > tops[2]
    assert numbers["greedy_tokens"] == 1
    for sentence in (
        "The ranking of the words is the same at all 3 temperatures.",
        "a low temperature moves their probabilities apart, a high one moves them together",
        f"At temperature 0, {numbers['draws']} samples gave 1 word, the most likely one.",
    ):
        assert sentence in text


def test_the_tables_show_what_each_setting_keeps(each):
    numbers, text = each.numbers, each.text
    word, top = numbers["vocabulary"][numbers["order"][0]], max(numbers["probabilities"])
    model = by_setting(numbers, temperature=1.0)["as_uncertain_as"]
    for name in ("temperature", "top_k", "top_p"):
        found = [entry for entry in numbers["distributions"] if name in entry["setting"]]
        for row in (
            [f"{word} {top:.1%}", *(f"{max(entry['probabilities']):.1%}" for entry in found)],
            ["words kept 20", *(str(entry["kept"]) for entry in found), "their share 100.0%"],
            ["their share 100.0%", *(f"{entry['share_before']:.1%}" for entry in found), "perplexity"],
            [f"perplexity {model:.1f}", *(f"{entry['as_uncertain_as']:.1f}" for entry in found)],
        ):
            assert " ".join(row) in text
    # Nothing was too wide for its table.
    assert "\u2026" not in text


def test_what_is_said_of_top_k_and_top_p_is_true(each):
    numbers, text, vocabulary = each.numbers, each.text, each.numbers["vocabulary"]
    assert set(numbers["kept_by_prompt"]["top_k 3"]) == {3}
    assert "With each of the 20 words as a prompt, top-k 3 keeps 3." in text
    counts, likeliest = numbers["kept_by_prompt"]["top_p 0.8"], numbers["likeliest_by_prompt"]
    fewest, most = int(np.argmin(counts)), int(np.argmax(counts))
    assert len(counts) == 20
    assert counts[fewest] < counts[most]
    assert likeliest[fewest] > likeliest[most]
    assert (
        f"Top-p 0.8 keeps {counts[fewest]} after '{vocabulary[fewest]}', where the most likely word "
        f"has {likeliest[fewest]:.0%}, and {counts[most]} after '{vocabulary[most]}', where it has "
        f"{likeliest[most]:.0%}."
    ) in text


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


def is_fair(entry):
    """Whether samples are within what fair ones exceed once in 1000 times (Wilson and Hilferty)."""
    chi_square, degrees = goodness_of_fit(entry["counts"], entry["probabilities"])
    spread = 2 / (9 * max(degrees, 1))
    limit = degrees * (1 - spread + ONE_IN_A_THOUSAND * math.sqrt(spread)) ** 3
    return chi_square <= limit and entry["drawn_outside"] == 0


def test_chi_square_worked_out_by_hand():
    # Expected 50, 30, 20 of 100: 25/50 + 25/30 + 0.
    assert goodness_of_fit([45, 35, 20], [0.5, 0.3, 0.2]) == (pytest.approx(0.5 + 25 / 30), 2)
    # The last three expect 2, 2 and 1 of 100, and are one cell of 5, which saw 7: 4/5 + 4/95.
    found = goodness_of_fit([93, 1, 2, 4], [0.95, 0.02, 0.02, 0.01])
    assert found == (pytest.approx(4 / 95 + 4 / 5), 1)
    assert goodness_of_fit([100, 0], [1.0, 0.0]) == (0.0, 0)
    # The table's limit for one degree of freedom is 10.828: 4 (count - 50)^2 / 100 of 100 coins.
    for heads, fair in ((66, True), (67, False)):
        entry = {"counts": [heads, 100 - heads], "probabilities": [0.5, 0.5], "drawn_outside": 0}
        assert is_fair(entry) is fair


def test_each_word_is_sampled_as_often_as_it_is_likely(each):
    numbers, draws, text = each.numbers, each.numbers["draws"], each.text
    told_apart = 0
    for entry in numbers["distributions"]:
        assert sum(entry["counts"]) == draws
        assert is_fair(entry), entry["setting"]
        # The test can tell: it sees that these are not samples of the model's own distribution.
        told_apart += not is_fair({**entry, "probabilities": numbers["probabilities"]})
        best = int(np.argmax(entry["probabilities"]))
        p, share = entry["probabilities"][best], entry["counts"][best] / draws
        # The spread of a share of independent samples.
        spread = math.sqrt(p * (1 - p) / draws)
        off = abs(share - p) / spread if spread else 0.0
        assert entry["deviations_off"] == pytest.approx(off)
        assert f"{lesson.title(entry)} {p:.1%} {share:.1%} {spread:.1%} {off:.1f}" in text
    assert told_apart in (7, 8)  # of 9: not at temperature 1
    worst = max(entry["deviations_off"] for entry in numbers["distributions"])
    assert worst < 3
    assert 1 / math.erfc(3 / math.sqrt(2)) == pytest.approx(370, abs=1)
    assert f"At most {worst:.1f} standard deviations off; chance exceeds 3 once in 370" in text
    assert f"Words that a setting leaves out: 0 of {9 * draws} samples." in text


def test_samples_that_ignore_a_setting_would_show(monkeypatch):
    sample = lesson.sample
    monkeypatch.setattr(
        lesson, "sample", lambda logits, seed, **ignored: sample(logits, seed=seed, temperature=1.0)
    )
    options = types.SimpleNamespace(seed=5, draws=2000)
    logits = tf.constant([[2.0, 1.0, 0.5, 0.0, -0.5, *([-5.0] * 15)]])
    output, found = lesson.console(), []
    for name, values in (("temperature", (0.5, 2.0)), ("top_k", (3,)), ("top_p", (0.7,))):
        found += lesson.distributions(output, logits, name, values)
    lesson.samples(output, logits, found, options)
    assert not any(map(is_fair, found))


# Texts


def test_the_same_seed_writes_the_same_text_in_any_company(each):
    numbers, texts, text = each.numbers, each.numbers["texts"], each.text
    ways = "again reversed alone in_company after_a_pause"
    assert texts.keys() == {"seeds", "texts", *(f"same_{way}" for way in ways.split())}
    assert all(texts[f"same_{way}"] is True for way in ways.split())
    assert text.count("5 of 5") == 5
    assert texts["seeds"] == [numbers["seed"] + index for index in range(5)]
    for seed, written in zip(texts["seeds"], texts["texts"], strict=True):
        assert written.startswith(f"{numbers['prompt']} ")
        assert f"{seed} {written}" in text
    different = len(set(texts["texts"]))
    assert different > 1
    assert f"Different texts with 5 seeds: {different}; and the same seed" in text
    assert "the rest of the batch, the order of its rows and a pause do not." in text


def test_a_sample_that_depends_on_its_row_would_show(capsys):
    model, tokenizer = lesson.reference_model()

    class RowsDiffer:
        sequence_length = model.sequence_length

        def generate(self, prompts, *args, seed, **settings):
            seed = [s + row for row, s in enumerate(seed)]
            return model.generate(prompts, *args, seed=seed, **settings)

    options = types.SimpleNamespace(temperature=5.0, top_k=0, top_p=1.0, steps=4, seed=3)
    found = lesson.texts(lesson.console(), RowsDiffer(), tokenizer, [1, 2], options)
    same = [found[f"same_{way}"] for way in ("again", "reversed", "alone", "in_company")]
    assert same == [True, False, False, False]
    assert "with the rows in reverse order 5 of 5" not in " ".join(capsys.readouterr().out.split())


def test_a_text_that_ends_before_a_pause_is_not_continued_after_it():
    options = types.SimpleNamespace(temperature=0.0, top_k=0, top_p=1.0, steps=4, seed=3)
    # Untrained, the model answers <eos> with <eos>.
    found = lesson.texts(lesson.console(), *lesson.reference_model(), [19, 19], options)
    assert found["texts"] == ["<eos> <eos> <eos>"] * 5
    assert found["same_after_a_pause"]


# The command


def test_options_decide_the_numbers(run):
    default, other = run("default"), run("other")
    assert other.numbers["settings"] == {"temperature": 1.3, "top_k": 7, "top_p": 0.85}
    for name in ("prompt", "steps", "seed", "draws", "training_steps"):
        assert other.numbers[name] == OTHER[f"--{name.replace('_', '-')}"]
    assert "temperature 1.3, top-k 7, top-p 0.85, at most 5 more words:" in other.text
    losses = [ran.numbers["loss_before_last_step"] for ran in (default, other)]
    assert losses[0] < losses[1]
    assert f"after 100 training steps (loss {losses[0]:.2f} at the last)" in default.text
    assert f"after 60 training steps (loss {losses[1]:.2f} at the last)" in other.text


def test_the_picture_shows_every_setting_on_the_same_words(run, monkeypatch):
    default = run("default")
    assert (default.folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    numbers = {**default.numbers, "probabilities": np.array(default.numbers["probabilities"])}
    monkeypatch.setattr(lesson, "plot_distributions", lambda *given, **named: (*given, named))
    probabilities, words, titles, named = lesson.draw(numbers)
    shown, found = numbers["order"][:10], numbers["distributions"]
    assert words == [numbers["vocabulary"][index] for index in shown]
    assert titles[:3] == ["temperature 0.5", "temperature 1", "temperature 2"]
    assert titles[3:] == ["top-k 1", "top-k 3", "top-k 6", "top-p 0.5", "top-p 0.8", "top-p 0.95"]
    np.testing.assert_array_equal(named["before"], numbers["probabilities"][shown])
    for index, entry in enumerate(found):
        np.testing.assert_array_equal(probabilities[index], np.array(entry["probabilities"])[shown])
        np.testing.assert_allclose(named["drawn"][index] * 2000, np.array(entry["counts"])[shown])

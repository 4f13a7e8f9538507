"""Lesson 15 is right on every path, and what it says is true of its numbers."""

import collections
import json
import math
import pathlib
import types

import _lesson_15_model as lesson_model
import _lesson_15_training as lesson_training
import lesson_15_autoregressive_lm as lesson
import numpy as np
import pytest
import tensorflow as tf

NAME = "lesson_15_autoregressive_lm"
ORACLE = json.loads((pathlib.Path(__file__).parent / "oracle" / "lesson_15.json").read_text())
TOLERANCE = ORACLE["tolerance_abs_logits"]
TABLES = ("embedding_table", "position_embeddings", "w_q", "w_k", "w_v", "w_vocab")
STEPS = ("step_1", "step_2", "step_3")
MODES = ("xla", "graph", "eager")
KEYS = "mode device first_pass prompt vocab end_id hidden_dim sequence_length temperatures steps "
KEYS += "change_of_earlier_logits steps_taken end_of_writing final_sequence final_text generated train "
KEYS += "guessing pairs least_loss training training_from_random picture"


@pytest.fixture
def default(run_lesson):
    return run_lesson(NAME, "--plot", "{}/attention.png")


@pytest.fixture(scope="module")
def reference():
    model, tokenizer = lesson_model.reference_model()
    return model, tokenizer, lesson.make_forward(model, "graph")


@pytest.fixture
def shown(capsys):
    """A function that runs a section: what it returns, and what it prints without line breaks."""

    def show(section, *arguments):
        capsys.readouterr()
        found = section(*arguments, lesson.console())
        return found, " ".join(capsys.readouterr().out.split())

    return show


def independent_logits(token_ids):
    """The model in float64, in NumPy alone, from the tables of the oracle: (T, V)."""
    tables = {name: np.array(ORACLE[name]) for name in ("w_q", "w_k", "w_v", "w_vocab")}
    x = np.array(ORACLE["embedding_table"])[token_ids]
    x = x + np.array(ORACLE["position_embeddings"])[: len(token_ids)]
    scores = (x @ tables["w_q"]) @ (x @ tables["w_k"]).T / math.sqrt(8)
    scores[np.triu_indices(len(token_ids), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ (x @ tables["w_v"]) @ tables["w_vocab"]


# The reference's values


def assert_near(found, expected, names):
    for name in names:
        # The reference computed in float32 in another order.
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=TOLERANCE, err_msg=name)


def assert_is_step(found, expected):
    assert [found["ids"], found["next_id"]] == [expected["ids"], expected["next_id"]]
    assert found["next_id_type"] == "int32"
    assert_near(found, expected, ("token_embeds", "x", "weights", "logits", "last_logits", "probs"))


@pytest.mark.parametrize("mode", MODES)
def test_every_path_gives_the_reference_values(mode):
    forward = lesson.make_forward(lesson_model.reference_model()[0], mode)
    for step in STEPS:
        assert_is_step(lesson.look(forward, ORACLE[step]["ids"]), ORACLE[step])


def test_its_numbers_are_those_of_the_reference(default):
    numbers = default.numbers
    assert numbers.keys() == {*KEYS.split(), *TABLES, *STEPS}
    # The note is about the oracle, and the tolerance its own.
    assert ORACLE.keys() - numbers.keys() == {"note", "tolerance_abs_logits"}
    for name in (*TABLES, "vocab", "final_sequence", "final_text"):
        np.testing.assert_array_equal(numbers[name], ORACLE[name], err_msg=name)
    for step in STEPS:
        assert_is_step(numbers[step], ORACLE[step])
    assert_near(numbers["train"], ORACLE["train"], ORACLE["train"])
    assert numbers["generated"] == numbers["final_sequence"] == [1, 2, 3, 7, 7, 7]


def test_one_prompt_worked_out_by_hand(reference):
    # '<eos>' is eight times -1, position 0 adds up to 0.7, and W_V is 0.8 throughout: 0.8 (-8 + 0.7).
    stages = reference[2]([[19]])
    np.testing.assert_allclose(stages["attended"], np.full((1, 1, 8), -5.84), rtol=1e-6)
    # The column sums of 'bites' and '<eos>' are 3.9 and -4.4.
    np.testing.assert_allclose(stages["logits"][0, 0, 7], -5.84 * 3.9, rtol=1e-6)
    np.testing.assert_allclose(stages["logits"][0, 0, 19], -5.84 * -4.4, rtol=1e-6)


# The sections on one prompt


def test_what_it_says_of_its_prompt_is_true(default):
    numbers, text = default.numbers, default.text
    first, change = numbers["first_pass"], numbers["change_of_earlier_logits"]
    weights, probs = np.array(first["weights"]), np.array(first["probs"])
    words, positions = np.array(numbers["embedding_table"]), np.array(numbers["position_embeddings"])
    np.testing.assert_allclose(words[[1, 2, 3]] + positions[:3], first["x"], rtol=1e-6)
    assert np.all(weights[np.triu_indices(3, 1)] == 0.0)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)
    assert change < TOLERANCE
    assert first["next_id"] == np.argmax(probs) == numbers["vocab"].index("bites")
    assert probs.sum() == pytest.approx(1.0, abs=5e-5)
    assert numbers["guessing"] == pytest.approx(math.log(20))
    assert numbers["train"]["loss"] > numbers["guessing"]
    for sentence in (
        "The model knows 20 words",
        "'The cat sat' is split at white space: its ids are [1, 2, 3].",
        "'The' (1) and 'the' (16) are two words.",
        "a row of the embedding table, (20, 8).",
        "from the position table, (10, 8).",
        "First number of 'The': 0.90 + 0.00 = 0.90.",
        "the largest weight above the diagonal is 0, exactly.",
        f"the logits of the words before it change by at most {change:g}.",
        "All 20 probabilities add up to 100.00%.",
        "The next word is 'bites' (id 7), with 61.1%; guessing would give 5.0%.",
        "bites 7 10.4641 61.12% furry 12 8.3176 7.15% dog 6 8.0493 5.46% friendly 13",
        "The cat sat bites -> bites (60.9%)",
        "2 (4,) (4, 8) (4, 8) (4, 4) (4, 20) (20,) bites",
        "The ids are [1, 2, 3, 7, 7, 7]. model.generate, the same loop in one graph, which keeps the "
        "keys and values of what it has read, gives [1, 2, 3, 7, 7, 7].",
        "The cat 1.15% 4.4612 cat sat 3.06% 3.4853 sat on 2.44% 3.7120",
        "Loss 3.8862. That is worse than guessing: with all words equally likely it is ln 20 = 2.9957.",
    ):
        assert sentence in text


@pytest.mark.parametrize("mode", MODES)
def test_changing_a_token_never_changes_a_logit_before_it(mode):
    # Random projections: the constant ones see of a token no more than one number.
    forward = lesson.make_forward(lesson_training.random_model(), mode)
    before = np.tile(np.array([1, 2, 3, 4, 16, 5, 15, 9, 6, 19], "int32"), (20, 1))
    logits = forward(tf.constant(before))["logits"].numpy()
    for position in range(10):
        after = before.copy()
        after[:, position] = np.arange(20)
        changed = forward(tf.constant(after))["logits"].numpy() != logits
        assert not changed[:, :position].any(), position
        # All but the row whose token was put in its own place.
        assert np.all(
            changed[:, position:].any(axis=(1, 2)) == (after[:, position] != before[:, position])
        )


@pytest.mark.parametrize("prompt", ["a", " ".join(10 * ["sleeping"])])
def test_the_shortest_and_the_longest_prompt_fit_the_page(prompt, reference, shown):
    model, tokenizer, forward = reference
    first = lesson.look(forward, tokenizer.encode(prompt))
    tables = dict(zip(TABLES, model.get_weights(), strict=True))
    change, text = shown(lesson.attention, forward, first)
    assert (change is None) == ("looks ahead" not in text) == (prompt == "a")
    text += shown(lesson.vectors, tables, first)[1]
    text += shown(lesson.next_word, tables["w_vocab"], first)[1]
    assert "\u2026" not in text


def test_the_order_of_equal_logits_does_not_depend_on_rounding(default, shown):
    numbers = default.numbers
    kernel = np.array(numbers["w_vocab"])
    first = {name: np.array(value) for name, value in numbers["first_pass"].items()}
    random = np.random.default_rng(0)
    for _ in range(20):
        noise = random.uniform(-2e-6, 2e-6, 20)
        noisy = first | {"last_logits": first["last_logits"] + noise, "next_id": 7}
        _, text = shown(lesson.next_word, kernel, noisy)
        # By the column sums, in tenths: 39, 31, 30 twice, then 28 three times.
        words = ("bites 7", "furry 12", "dog 6", "friendly 13", "sat 3", "mat 5", "happy 11")
        places = [text.index(f" {word} ") for word in words]
        assert places == sorted(places)


def test_no_temperature_changes_the_likeliest_word_but_all_change_its_probability(default):
    numbers, text = default.numbers, default.text
    logits = np.array(ORACLE["step_1"]["last_logits"])
    found = numbers["temperatures"]
    assert [at["temperature"] for at in found] == [0.1, 0.5, 1.0, 2.0, 10.0]
    assert [at["next_id"] for at in found] == 5 * [7]
    for at in found:
        exponentials = np.exp((logits - logits.max()) / at["temperature"])
        share = exponentials[7] / exponentials.sum()
        assert at["prob"] == pytest.approx(share, abs=1e-6)
        # Four standard errors of 1000 samples.
        assert abs(at["drawn_share"] - share) <= 4 * math.sqrt(share * (1 - share) / 1000)
    assert "The likeliest is 'bites' at all 5 temperatures" in text
    assert "its probability goes from 100.0% at 0.1 to 7.8% at 10." in text


# The loop


@pytest.mark.parametrize(
    ("prompt", "steps", "final_text", "end", "said"),
    [
        ("The cat sat", 8, "The cat sat" + 7 * " bites", "room", "Steps taken: 7 of 8."),
        (" ".join(10 * ["a"]), 2, " ".join(10 * ["a"]), "room", "Steps taken: 0 of 2."),
        ("a <eos>", 4, "a <eos> <eos>", "end", "Steps taken: 1 of 4."),
        ("The dog", 0, "The dog", "steps", "Steps taken: 0 of 0."),
        ("The dog", 10**12, "The dog" + 8 * " bites", "room", "Steps taken: 8 of 1000000000000."),
    ],
)
def test_the_loop_ends_at_an_end_or_at_the_last_position(
    prompt, steps, final_text, end, said, reference, shown
):
    model, tokenizer, forward = reference
    options = types.SimpleNamespace(steps=steps, mode="graph")
    prompt_ids = tokenizer.encode(prompt)
    found, text = shown(lesson.steps, model, tokenizer, forward, prompt_ids, options)
    assert (found["final_text"], found["end_of_writing"]) == (final_text, end)
    assert found["generated"].tolist() == found["final_sequence"]
    for sentence in (
        said,
        final_text,
        "when it has written '<eos>' or filled the model's 10 positions.",
    ):
        assert sentence in text
    assert "\u2026" not in text


# What the given weights cannot do


def test_the_answers_to_all_two_word_prompts_are_those_of_an_independent_computation(default):
    numbers = default.numbers
    pairs = numbers["pairs"]
    logits = np.array([independent_logits([i, j]) for i in range(20) for j in range(20)])
    np.testing.assert_array_equal(pairs["next_ids"], logits[:, -1].argmax(axis=-1))
    sums = np.array(ORACLE["w_vocab"]).sum(axis=0)
    factors = logits @ sums / (sums @ sums)
    # float32 against float64; the numbers reach 6.
    np.testing.assert_allclose(pairs["factors"], factors, rtol=0, atol=2e-6)
    negative = {n % 20 for n in range(400) if factors[n, -1] < 0}
    assert pairs["last_ids_if_negative"] == sorted(negative) == [19]


def test_what_constant_weights_cannot_say_is_said_with_its_numbers(default):
    numbers, text = default.numbers, default.text
    pairs, kernel = numbers["pairs"], np.array(numbers["w_vocab"])
    spread, residual, difference = (
        pairs[name] for name in ("spread_of_attended", "residual", "difference_of_equal_logits")
    )
    # The rounding of sums of eight products of numbers up to 6 by numbers below 1, in any order.
    assert max(spread, residual, difference) < 1e-5
    assert pairs["sign_decides"] is True
    assert pairs["count"] == 400
    assert pairs["answers"] == {"bites": 380, "<eos>": 20}
    assert pairs["equal_columns"] == [[1, 16]]
    np.testing.assert_array_equal(kernel[:, 1], kernel[:, 16])
    shared = collections.Counter(np.round(pairs["column_sums"], 4).tolist())
    assert sum(count for count in shared.values() if count > 1) == 13
    for sentence in (
        "hold one number each (0.5, 0.3, 0.8), so all 8 entries",
        f"entries differ by at most {spread:.1g}, and the logits",
        f"times column sum by at most {residual:.1g}.",
        "that of 'bites' (3.9), the smallest that of '<eos>' (-4.4): where the number",
        "The answer is 'bites' 380 times and '<eos>' 20 times",
        "the number is negative only if the last word is '<eos>'.",
        "13 of the 20 words share their column sum with another word",
        "'The' and 'the' have equal columns outright",
        f"their logits differ by at most {difference:.1g}.",
    ):
        assert sentence in text


# Training


def test_the_training_rows_are_shifted_by_one_and_know_their_padding():
    _, tokenizer = lesson_model.reference_model()
    inputs, targets, mask = lesson_model.training_rows(tokenizer)
    # "The man is happy <eos>", after which the longest sentence leaves five of nine positions.
    assert inputs[2].numpy().tolist() == [1, 8, 10, 11, 19, 0, 0, 0, 0]
    assert targets[2].numpy().tolist() == [8, 10, 11, 19, 0, 0, 0, 0, 0]
    assert mask[2].numpy().tolist() == [True] * 4 + [False] * 5
    ends = tf.boolean_mask(targets, mask) == tokenizer.end_id
    assert int(tf.reduce_sum(tf.cast(ends, "int32"))) == len(lesson_model.SENTENCES)


def test_the_loss_before_training_counts_real_words_only(default):
    numbers = default.numbers
    vocabulary, losses = ORACLE["vocab"], []
    for sentence in lesson_model.SENTENCES:
        token_ids = [vocabulary.index(word) for word in sentence.split()]
        logits = independent_logits(token_ids[:-1])
        logsums = np.log(np.exp(logits).sum(axis=1))
        losses += (logsums - logits[np.arange(len(logits)), token_ids[1:]]).tolist()
    assert numbers["training"]["losses"][0] == pytest.approx(np.mean(losses), abs=TOLERANCE)


def test_training_brings_the_loss_below_guessing_and_writes_a_whole_sentence(default):
    numbers, text = default.numbers, default.text
    trained, least, sentences = numbers["training"], numbers["least_loss"], lesson_model.SENTENCES
    losses = trained["losses"]
    assert len(losses) == lesson_model.STEPS + 1
    assert losses[0] > numbers["guessing"] > 1.0 > losses[-1] > least > 0.0
    below = int(np.argmax(np.array(losses) < numbers["guessing"]))
    assert (trained["text"], trained["finish_reason"]) == ("The cat sat on the mat <eos>", "stop")
    assert all(map(str.startswith, sentences, trained["beginnings"]))
    assert all(map(str.startswith, trained["texts"], trained["beginnings"]))
    missed = [written for written in trained["texts"] if written not in sentences]
    # How many depends on how the processor rounds.
    assert len(missed) <= 2
    for sentence in (
        f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f}; after {below} steps it was",
        f"No model can go below {least:.3f}",
        "'The cat sat' becomes 'The cat sat on the mat <eos>'.",
        f"Given the first two words, it completes {6 - len(missed)} of the 6 sentences.",
        *(f"it writes '{written}'." for written in missed),
        # "The point" says what the sections found.
        "The loop asked the given weights and wrote 'The cat sat bites bites bites'.",
        f"from a loss of {losses[0]:.2f} to {losses[-1]:.2f} (no model can go below {least:.2f}), "
        "wrote 'The cat sat on the mat <eos>'.",
    ):
        assert sentence in text


def test_training_repeats_to_the_last_bit_and_the_last_loss_is_that_after_it(default, monkeypatch):
    numbers = default.numbers
    model, tokenizer = lesson_model.reference_model()
    monkeypatch.setattr(lesson_training, "train", lambda *args: lesson_model.train(*args, steps=3))
    losses = lesson_training.fit(model, tokenizer, [1, 2, 3])["losses"]
    assert losses[:3] == numbers["training"]["losses"][:3]
    # The last one is computed eagerly, and was by XLA as the first loss of a fourth step.
    assert losses[3] == pytest.approx(numbers["training"]["losses"][3], abs=TOLERANCE)
    assert len(losses) == 4


def test_the_rank_is_that_of_queries_and_keys(monkeypatch):
    model, tokenizer = lesson_training.random_model(), lesson_model.reference_model()[1]
    model.blocks[0].key_kernel.assign(np.full((8, 8), 0.3))
    monkeypatch.setattr(lesson_training, "train", lambda *_: [])
    found = lesson_training.fit(model, tokenizer, [1, 2, 3])
    assert found["rank_of_scores"] == 1
    differences = found["column_differences"]
    assert differences["k"] == 0.0 < min(differences["q"], differences["v"])


def test_the_least_loss_worked_out_by_hand():
    # After a comes b or c; all the rest is certain: 2 of 6 targets cost ln 2.
    assert lesson_training.least_loss(["a b .", "a c d .", "f ."]) == pytest.approx(math.log(2) / 3)


def test_a_constant_start_costs_rank_and_steps(default):
    numbers, text = default.numbers, default.text
    trained, other = numbers["training"], numbers["training_from_random"]
    apart, of_other = trained["column_differences"], other["column_differences"]
    losses, of_random, rank = trained["losses"], other["losses"], trained["rank_of_scores"]
    # Zero, where the processor rounds all columns alike.
    assert max(apart["q"], apart["k"]) < min(of_other.values()) / 10
    assert apart["v"] > 0.1
    assert rank <= 4 < other["rank_of_scores"] == 8
    assert losses[100] > 2 * of_random[100]
    for sentence in (
        f"W_Q differ by at most {apart['q']:.3g}, those of W_K by at most {apart['k']:.3g}:",
        f"of W_V differ by at most {apart['v']:.3g} {of_other['v']:.3g} rank of",
        f"rank of W_Q W_K^T {rank} 8 steps to fall below guessing",
        f"has rank {rank}, not 8: a head of 8 that works like a head of {rank}.",
        f"After 100 steps the loss is {losses[100] / of_random[100]:.1f} times",
        f"after 400, {losses[-1]:.3f} against {of_random[-1]:.3f}.",
    ):
        assert sentence in text


def test_the_picture_shows_both_models_looking_at_what_the_trained_one_wrote(default):
    picture = default.numbers["picture"]
    assert picture["ids"] == default.numbers["training"]["ids"][:-1] == [1, 2, 3, 4, 16, 5]
    for weights in (picture["before"], picture["after"]):
        assert np.all(np.triu(weights, 1) == 0.0)
        np.testing.assert_allclose(np.sum(weights, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(
        np.array(picture["before"])[:3, :3], ORACLE["step_1"]["weights"], rtol=0, atol=TOLERANCE
    )
    assert not np.allclose(picture["before"], picture["after"], atol=0.1)
    assert (default.folder / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_another_prompt_gets_its_own_tables_and_sentences(run_lesson):
    other = run_lesson(NAME, "--prompt", "the brown dog", "--steps", 2, "--mode", "eager")
    numbers, text = other.numbers, other.text
    assert numbers["prompt"] == "the brown dog"
    assert numbers["first_pass"]["ids"] == [16, 14, 6]
    assert numbers["generated"] == numbers["final_sequence"]
    for sentence in (
        f"one operation at a time (eager), on {numbers['device']}.",
        f"wrote '{numbers['final_text']}'.",
        f"'the brown dog' becomes '{numbers['training']['text']}'.",
    ):
        assert sentence in text
    assert "'The cat sat'" not in text
    assert [path.name for path in other.folder.iterdir()] == ["numbers.json"]

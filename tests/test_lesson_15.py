"""Lesson 15 is right on every path, and says what its numbers say."""

import importlib
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

TESTS = pathlib.Path(__file__).parent
SCRIPTS = TESTS.parent / "scripts"
ORACLE = json.loads((TESTS / "oracle" / "lesson_15.json").read_text())
TOLERANCE = ORACLE["tolerance_abs_logits"]
STAGES = ("token_embeds", "x", "weights", "logits", "last_logits", "probs")


@pytest.fixture(scope="module", autouse=True)
def _scripts_can_be_imported():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


def lesson():
    return importlib.import_module("lesson_15_autoregressive_lm")


def lesson_model():
    return importlib.import_module("_lesson_15_model")


@pytest.fixture(scope="module")
def numbers():
    return lesson().compute("The cat sat", steps=3, mode="graph")


@pytest.fixture(scope="module")
def reference():
    model, tokenizer = lesson_model().reference_model()
    return lesson().make_forward(model, "graph"), tokenizer


@pytest.fixture
def told(capsys):
    """What the lesson prints about these numbers, its line breaks and indents taken out."""

    def tell(numbers):
        capsys.readouterr()
        lesson().tell(numbers, importlib.import_module("_start").console())
        return " ".join(capsys.readouterr().out.split())

    return tell


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


# The reference's model


def test_the_model_has_the_reference_tables_to_the_last_bit(numbers):
    for name in ("embedding_table", "position_embeddings", "w_q", "w_k", "w_v", "w_vocab", "vocab"):
        np.testing.assert_array_equal(numbers[name], ORACLE[name], err_msg=name)


@pytest.mark.parametrize("mode", ["xla", "graph", "eager"])
def test_three_greedy_steps_give_the_reference_values_on_every_path(mode):
    model, tokenizer = lesson_model().reference_model()
    forward = lesson().make_forward(model, mode)
    found = lesson().write(forward, tokenizer.encode("The cat sat"), 3, 10, tokenizer)
    for name in ("step_1", "step_2", "step_3"):
        step, expected = found[name], ORACLE[name]
        assert step["ids"] == expected["ids"]
        assert step["next_id"] == expected["next_id"]
        for stage in STAGES:
            # The reference computed in float32 in another order.
            np.testing.assert_allclose(
                step[stage], expected[stage], rtol=0, atol=TOLERANCE, err_msg=f"{name} {stage}"
            )
    assert found["final_sequence"] == ORACLE["final_sequence"]
    assert found["final_text"] == ORACLE["final_text"]


def test_the_loss_of_the_cat_sat_on_is_the_references(numbers):
    for name in ("ids", "targets", "x", "weights", "logits", "probs", "loss"):
        np.testing.assert_allclose(
            numbers["train"][name], ORACLE["train"][name], rtol=0, atol=TOLERANCE, err_msg=name
        )
    assert numbers["guessing"] == pytest.approx(2.9957, abs=1e-4)


def test_one_prompt_worked_out_by_hand(reference):
    forward, _ = reference
    # '<eos>' is eight times -1, place 0 adds up to 0.7, and W_V is 0.8 throughout: 0.8 (-8 + 0.7).
    stages = forward([[19]])
    np.testing.assert_allclose(stages["attended"], np.full((1, 1, 8), -5.84), rtol=1e-6)
    # The column sums of 'bites' and '<eos>' are 3.9 and -4.4.
    np.testing.assert_allclose(stages["logits"][0, 0, 7], -5.84 * 3.9, rtol=1e-6)
    np.testing.assert_allclose(stages["logits"][0, 0, 19], -5.84 * -4.4, rtol=1e-6)


@pytest.mark.parametrize("mode", ["xla", "graph", "eager"])
def test_changing_a_token_never_changes_a_logit_before_it(mode):
    # Random projections: the constant ones see of a token no more than one number.
    forward = lesson().make_forward(lesson().random_model(), mode)
    before = np.tile(np.array([1, 2, 3, 4, 16, 5, 15, 9, 6, 19], "int32"), (20, 1))
    logits = forward(tf.constant(before))["logits"].numpy()
    for place in range(10):
        after = before.copy()
        after[:, place] = np.arange(20)
        changed = forward(tf.constant(after))["logits"].numpy() != logits
        assert not changed[:, :place].any(), place
        # All but the row whose token was put in its own place.
        assert np.all(changed[:, place:].any(axis=(1, 2)) == (after[:, place] != before[:, place]))


def test_the_upper_triangle_is_exactly_zero(numbers, told):
    assert np.all(numbers["step_1"]["weights"][np.triu_indices(3, 1)] == 0.0)
    assert numbers["change_of_earlier_logits"] == 0.0
    text = told(numbers)
    assert "Above the diagonal stand 3 weights; the largest is 0, exactly." in text
    leaky = numbers["first_pass"]["weights"].copy()
    leaky[0, 2] = 1e-3
    text = told(
        numbers
        | {"change_of_earlier_logits": 0.5, "first_pass": numbers["first_pass"] | {"weights": leaky}}
    )
    assert "the largest is 0.001: the future leaks in." in text
    assert "change by at most 0.5. So the model sees what it has to foretell." in text


# Ranking and temperature


def test_logits_that_only_rounding_tells_apart_share_a_rank():
    ranking = lesson().ranking
    assert ranking(np.array([1.0, 3.0, 2.0])) == [[1], [2], [0]]
    assert ranking(np.array([1.0, 3.0 + 4e-6, 1.0 - 4e-6, 3.0])) == [[1, 3], [0, 2]]
    assert ranking(np.array([1.0, 1.0 + 1e-3])) == [[1], [0]]


def test_no_printed_ranking_depends_on_rounding(numbers, told):
    logits = numbers["first_pass"]["last_logits"]
    expected = lesson().ranking(logits)
    # By the column sums, in tenths: 39, then 31, then 30 twice, then 28 three times, then 27.
    assert expected[:5] == [[7], [12], [6, 13], [3, 5, 11], [1, 4, 16]]
    random = np.random.default_rng(0)
    for _ in range(20):
        noise = random.uniform(-2e-6, 2e-6, logits.shape).astype("float32")
        assert lesson().ranking(logits + noise) == expected
    text = told(numbers)
    assert "1 bites 7 10.4641 61.12% 2 furry 12 8.3176 7.15% 3= dog 6 8.0493" in text
    assert "3= friendly 13" in text


def test_no_temperature_changes_the_likeliest_word_but_all_change_its_probability(numbers, told):
    logits = np.array(ORACLE["step_1"]["last_logits"])
    found = numbers["temperatures"]
    assert [entry["next_id"] for entry in found] == [7] * len(lesson().TEMPERATURES)
    for entry in found:
        exponentials = np.exp((logits - logits.max()) / entry["temperature"])
        share = exponentials[7] / exponentials.sum()
        assert entry["prob"] == pytest.approx(share, abs=1e-6)
        # Four standard errors of 1000 draws.
        assert abs(entry["drawn_share"] - share) <= 4 * math.sqrt(share * (1 - share) / 1000)
    assert "The likeliest is 'bites' at all 5 temperatures" in told(numbers)
    changed = [*found[:-1], found[-1] | {"next_id": 2}]
    assert "The likeliest changes: 2 words" in told(numbers | {"temperatures": changed})


# Writing


def test_the_spelled_out_loop_and_generate_agree(numbers, told):
    assert list(numbers["generated"]) == numbers["final_sequence"] == [1, 2, 3, 7, 7, 7]
    text = told(numbers)
    assert "The cat sat bites bites bites" in text
    assert "gives the same ids" in text
    assert "gives other ids" in told(numbers | {"generated": [1, 2, 3, 7, 7, 2]})


@pytest.mark.parametrize(
    ("prompt", "steps", "final_text", "said"),
    [
        (
            "The cat sat",
            8,
            "The cat sat" + 7 * " bites",
            "fills all 10 positions of the model, so writing stops here: 7 of 8 steps were taken",
        ),
        (
            "The cat sat",
            7,
            "The cat sat" + 7 * " bites",
            "fills all 10 positions of the model, so writing stops here: 7 of 7 steps were taken",
        ),
        (" ".join(10 * ["a"]), 2, " ".join(10 * ["a"]), "0 of 2 steps were taken"),
        ("a <eos>", 4, "a <eos> <eos>", "'<eos>' ends a text, so writing stops here, 3 steps early."),
        ("The dog", 0, "The dog", "No step was asked for (--steps 0)."),
    ],
)
def test_writing_ends_and_the_script_says_why(
    prompt, steps, final_text, said, numbers, reference, capsys
):
    forward, tokenizer = reference
    numbers = numbers | {"steps": steps}
    numbers |= lesson().write(forward, tokenizer.encode(prompt), steps, 10, tokenizer)
    assert numbers["final_text"] == final_text
    capsys.readouterr()
    lesson().tell_steps(numbers, importlib.import_module("_start").console())
    text = " ".join(capsys.readouterr().out.split())
    assert said in text
    assert final_text in text


@pytest.mark.parametrize("prompt", ["a", " ".join(10 * ["sleeping"])])
def test_the_shortest_and_the_longest_prompt_are_told_without_a_cut(prompt, numbers, reference, told):
    forward, tokenizer = reference
    token_ids = tokenizer.encode(prompt)
    first = lesson().look(forward, token_ids)
    change = lesson().change_of_earlier_logits(forward, token_ids, 20)
    text = told(numbers | {"prompt": prompt, "first_pass": first, "change_of_earlier_logits": change})
    assert "\u2026" not in text
    assert ("'a' has nobody to look at but itself" in text) == (prompt == "a")


# What the weights cannot do


def test_the_answers_to_all_two_word_prompts_are_those_of_an_independent_computation(numbers):
    logits = np.array([independent_logits([i, j]) for i in range(20) for j in range(20)])
    np.testing.assert_array_equal(numbers["pairs"]["next_ids"], logits[:, -1].argmax(axis=-1))
    assert numbers["pairs"]["count"] == 400
    assert numbers["pairs"]["answers"] == {"bites": 380, "<eos>": 20}
    sums = np.array(ORACLE["w_vocab"]).sum(axis=0)
    factors = logits @ sums / (sums @ sums)
    # float32 against float64; the numbers reach 6.
    np.testing.assert_allclose(numbers["pairs"]["factors"], factors, rtol=0, atol=2e-6)


def test_what_constant_weights_cannot_say_is_shown_and_not_claimed(numbers, told):
    pairs = numbers["pairs"]
    assert pairs["sign_decides"]
    assert pairs["spread_of_attended"] == 0.0
    # The rounding of eight products of numbers up to 6 by numbers below 1.
    assert 0.0 < pairs["residual"] < 1e-5
    assert pairs["equal_columns"] == [(1, 16)]
    # A product may add up its last columns in another order than those before.
    assert pairs["difference_of_equal_logits"] < 1e-5
    text = told(numbers)
    assert "answered 380 times 'bites', 20 times '<eos>'." in text
    assert "The number is negative only where the last word is '<eos>'." in text
    assert "Columns 1 ('The') and 16 ('the') of the projection are equal" in text
    assert "Loss 3.8862. Guessing, all 20 words alike, has ln 20 = 2.9957: the model is worse" in text

    # Where it is not so, the lesson does not say so.
    random = lesson().random_model()
    pairs = lesson().compute_pairs(lesson().make_forward(random, "graph"), numbers["w_vocab"])
    assert pairs["residual"] > 0.1
    assert not pairs["sign_decides"]
    better = numbers | {"pairs": pairs, "train": numbers["train"] | {"loss": 2.5}}
    text = told(better)
    assert "but the sign of the number does not decide the answer" in text
    assert "no other word can ever come" not in text
    assert "the model is no worse than guessing" in text


# Training


def test_the_rows_to_learn_from_are_shifted_by_one_and_know_their_padding():
    _, tokenizer = lesson_model().reference_model()
    inputs, targets, mask = lesson_model().training_rows(tokenizer)
    # "The man is happy <eos>", behind which the longest sentence leaves five of nine places.
    assert inputs[2].numpy().tolist() == [1, 8, 10, 11, 19, 0, 0, 0, 0]
    assert targets[2].numpy().tolist() == [8, 10, 11, 19, 0, 0, 0, 0, 0]
    assert mask[2].numpy().tolist() == [True] * 4 + [False] * 5
    ends = tf.boolean_mask(targets, mask) == tokenizer.end_id
    assert int(tf.reduce_sum(tf.cast(ends, "int32"))) == len(lesson_model().SENTENCES)


def test_the_loss_before_training_counts_real_words_only(numbers):
    vocabulary, losses = ORACLE["vocab"], []
    for sentence in lesson_model().SENTENCES:
        token_ids = [vocabulary.index(word) for word in sentence.split()]
        logits = independent_logits(token_ids[:-1])
        logsums = np.log(np.exp(logits).sum(axis=1))
        losses += (logsums - logits[np.arange(len(logits)), token_ids[1:]]).tolist()
    assert numbers["training"]["losses"][0] == pytest.approx(np.mean(losses), abs=TOLERANCE)


def test_training_brings_the_loss_below_guessing_and_writes_a_whole_sentence(numbers, told):
    trained = numbers["training"]
    assert trained["losses"][0] > numbers["guessing"] > 1.0 > trained["losses"][-1]
    assert len(trained["losses"]) == lesson_model().STEPS + 1
    assert trained["losses"][-1] > numbers["least_loss"] > 0.0
    assert trained["text"] == "The cat sat on the mat <eos>"
    assert trained["finish_reason"] == "stop"
    assert lesson().completed(trained) >= 4
    text = told(numbers)
    assert "The cat sat on the mat <eos>" in text
    assert "ends with '<eos>'" in text
    whole = trained | {"texts": list(lesson_model().SENTENCES)}
    assert "completes 6 of the 6 sentences. 10." in told(numbers | {"training": whole})
    missed = trained | {"texts": [*lesson_model().SENTENCES[:5], "the cat and <eos>"]}
    text = told(numbers | {"training": missed})
    assert "completes 5 of the 6 sentences. After 'the cat' it writes 'the cat and <eos>'." in text
    flat = trained | {"losses": [3.5] * 401, "text": "The cat sat a", "ids": [1, 2, 3, 9]}
    text = told(numbers | {"training": flat | {"finish_reason": "length"}})
    assert "so it is still no better than that" in text
    assert "without an '<eos>'" in text


def test_training_repeats_to_the_last_bit_and_the_last_loss_is_that_after_it(numbers, monkeypatch):
    model, tokenizer = lesson_model().reference_model()
    monkeypatch.setattr(lesson(), "train", lambda *args: lesson_model().train(*args, steps=3))
    rows = lesson_model().training_rows(tokenizer)
    losses = lesson().learn(model, tokenizer, [1, 2, 3], rows)["losses"]
    assert losses[:3] == numbers["training"]["losses"][:3]
    # The last one is computed eagerly, and was by XLA as the first loss of a fourth step.
    assert losses[3] == pytest.approx(numbers["training"]["losses"][3], abs=TOLERANCE)
    assert len(losses) == 4


def test_the_least_loss_worked_out_by_hand():
    inputs = np.array([[1, 2, 0], [1, 3, 4], [5, 0, 0]])
    targets = np.array([[2, 9, 0], [3, 4, 9], [9, 0, 0]])
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
    # After 1 comes 2 or 3; all the rest is certain: 2 of 6 targets cost ln 2.
    assert lesson().least_loss(inputs, targets, mask) == pytest.approx(math.log(2) / 3)


def test_columns_that_start_equal_stay_equal_and_the_lesson_says_which(numbers, told):
    trained, other = numbers["training"], numbers["training_from_random"]
    differences, of_other = trained["column_differences"], other["column_differences"]
    # Zero, where the processor rounds all columns alike.
    assert max(differences["q"], differences["k"]) < min(of_other.values()) / 10
    assert differences["v"] > 0.1
    assert min(of_other.values()) > 0.1
    assert trained["rank_of_scores"] < other["rank_of_scores"] == 8
    equal = trained | {"column_differences": differences | {"q": 0.0, "k": 0.0}, "rank_of_scores": 1}
    text = told(numbers | {"training": equal})
    assert "The columns of W_Q and W_K are still equal after 400 steps" in text
    assert "Those of W_V came apart" in text
    assert "a score has 1 way to match two words, and not 8" in text
    assert "rounding, and training" not in text
    drifted = equal | {"column_differences": differences | {"q": 0.0, "k": of_other["k"] / 40}}
    text = told(numbers | {"training": drifted})
    assert "The columns of W_Q are still equal after 400 steps" in text
    assert "The columns of W_K got equal gradients too, but for rounding, and training" in text
    assert "1/40 of what they do from random numbers" in text
    apart = trained | {"column_differences": {"q": 0.5, "k": 0.5, "v": 0.5}, "rank_of_scores": 8}
    text = told(numbers | {"training": apart})
    assert "are still equal" not in text
    assert "way to match" not in text


# The command


def test_every_option_has_a_help_text(explains_every_option):
    explains_every_option(lesson(), at_least=6)


@pytest.mark.parametrize(
    ("options", "received", "allowed"),
    [
        (["--prompt", "The zebra sat"], "zebra", "The, cat, sat"),
        (["--prompt", "the Cat"], "Cat", "The, cat, sat"),
        (["--prompt", ""], "0", "from 1 to 10"),
        (["--prompt", " \t "], "0", "from 1 to 10"),
        (["--prompt", " ".join(11 * ["cat"])], "11", "from 1 to 10"),
        (["--steps", "-1"], "-1", "0 or more"),
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
        (["--json", "{}"], "{}", "is a directory"),
        (["--plot", "{}/a.txt"], "a.txt", ".png or .svg or .pdf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(options, received, allowed, refuses):
    refuses(lesson(), options, received, allowed)


def test_the_script_runs_quietly_and_writes_numbers_and_picture(tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "attention.png"
    command = [sys.executable, str(SCRIPTS / "lesson_15_autoregressive_lm.py"), "--steps", "3"]
    command += ["--json", str(numbers), "--plot", str(picture)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.stderr == ""
    assert finished.returncode == 0
    found = json.loads(numbers.read_text())
    # The note is about the oracle, and the tolerance its own.
    assert set(ORACLE) - set(found) == {"note", "tolerance_abs_logits"}
    assert set(ORACLE["step_1"]) <= set(found["step_3"])
    assert set(ORACLE["train"]) <= set(found["train"])
    assert found["final_text"] == "The cat sat bites bites bites"
    assert found["generated"] == found["final_sequence"]
    assert found["final_text"] in finished.stdout
    assert "compiled with XLA" in finished.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attention.png", "numbers.json"]

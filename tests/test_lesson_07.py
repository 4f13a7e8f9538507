"""Lesson 07 learns to look where the question points, and what it says of it is true."""

import json
import pathlib
import subprocess
import sys

import keras
import lesson_07_layers_in_keras as lesson
import numpy as np
import pytest

from keras_tinyattn import ScaledSelfAttention

NAME = "lesson_07_layers_in_keras"
SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / f"{NAME}.py"


@pytest.fixture(scope="module")
def trained(run_lesson):
    return run_lesson(NAME, "--epochs", 4, "--plot", "{}/a.png", "--save", "{}/a.keras")


@pytest.fixture(scope="module")
def untrained(run_lesson):
    return run_lesson(NAME, "--epochs", 0, "--seed", 5)


def test_every_option_has_a_help_text(explains_every_option):
    explains_every_option(lesson, at_least=5)


@pytest.mark.parametrize(
    ("options", "received", "allowed"),
    [
        (["--epochs", "-3"], "-3", "0 or more"),
        (["--seed", "-2"], "-2", "from 0 to 4294967295"),
        (["--seed", "4294967296"], "4294967296", "from 0 to 4294967295"),
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
        (["--plot", "{}"], "{}", "is a directory"),
        (["--save", "{}/a.h5"], "a.h5", ".keras"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(options, received, allowed, refuses):
    refuses(lesson, options, received, allowed)


def test_a_question_is_answered_by_the_letter_at_its_place():
    # "2? c a" and "1? j b", padded: ids of a to j are 1 to 10, of "1?" 11.
    token_ids = np.array([[12, 3, 1, 0], [11, 10, 2, 0]])
    np.testing.assert_array_equal(lesson.answers_to(token_ids), [0, 9])
    np.testing.assert_array_equal(lesson.lengths_of(token_ids), [2, 2])
    # Half of the attention of the first question and a tenth of the second's are on the answer.
    weights = np.array([[0.2, 0.3, 0.5, 0.0], [0.9, 0.1, 0.0, 0.0]])
    assert lesson.share_on_answer(weights, token_ids) == pytest.approx(0.3)


def test_the_most_frequent_letter_is_right_as_often_as_it_appears():
    # "1? a a b" is answered by a for two of three places, "1? c d" by c for one of two.
    token_ids = np.array([[11, 1, 1, 2], [11, 3, 4, 0]])
    assert lesson.best_without_question(token_ids) == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_questions_ask_for_a_place_that_is_there():
    token_ids = lesson.make_questions(500, np.random.default_rng(3))
    assert token_ids.shape == (500, 9)
    lengths, places = lesson.lengths_of(token_ids), lesson.places_in(token_ids)
    assert set(lengths) == set(range(3, 9))
    assert set(places) == set(range(1, 9))
    assert np.all(places <= lengths)
    # Padding is on the right only, and no answer is padding.
    np.testing.assert_array_equal(token_ids[:, 1:] != 0, np.arange(8) < lengths[:, None])
    assert set(lesson.answers_to(token_ids)) == set(range(10))


def test_it_learns_to_look_where_the_question_points_and_says_so(trained):
    numbers, text = trained.numbers, trained.text
    best, accuracy, control = (
        numbers[name] for name in ("best_without_question", "accuracy", "control_accuracy")
    )
    luck = 3 * np.sqrt(0.36 * 0.64 / 1024)
    assert numbers["chance"] == 0.1
    assert 0.3 < best < 0.42
    assert f"Guessing gets 10.0% right; naming the most frequent letter, {best:.1%}" in text.replace(
        "without reading the question, ", ""
    )
    assert control < best + luck
    assert accuracy > 0.99
    assert f"With attention {accuracy:.1%} are right, with the mean {control:.1%}" in text
    assert len(numbers["losses"]) == 4
    assert np.all(np.diff(numbers["losses"]) < 0)
    rates = numbers["accuracies"][3], numbers["control_accuracies"][3]
    assert f"4 {numbers['losses'][3]:.4f} {rates[0]:.1%} {rates[1]:.1%}" in text
    assert numbers["accuracies"][3] == pytest.approx(accuracy)

    before, after = numbers["share_on_answer_before"], numbers["share_on_answer"]
    assert before < 0.25
    assert after > 0.9
    assert f"Before training {before:.1%} of the attention is on the letter asked for." in text
    assert f"Over all validation questions {after:.1%} of the attention" in text
    assert f"{accuracy:.0%} of the answers are right, and {control:.0%} without." in text
    assert f"{after:.0%} of the attention is on the letter asked for. Model:" in text


def test_it_finds_each_place_in_a_word_it_was_not_trained_on(trained):
    numbers, text = trained.numbers, trained.text
    assert numbers["word_seen_in_training"] is False
    assert "letters of 'headache', which was not among the training questions" in text
    np.testing.assert_array_equal(np.argmax(numbers["weights"], axis=1), np.arange(1, 9))
    assert numbers["word_answers"] == list("headache")
    assert "8 of 8 questions look most at the place they name, and 8 answers are right." in text
    assert {letter for letter in "headache" if "headache".count(letter) == 2} == {"a", "e", "h"}
    assert "It finds the place, not the letter: a, e and h each appear twice." in text


def test_padding_is_not_seen(trained):
    numbers, text = trained.numbers, trained.text
    assert numbers["padded_share"] > 0.5
    assert f"{numbers['padded_share']:.0%} of the validation questions are shorter" in text
    assert numbers["weight_on_padding"] == 0.0
    # Logits of about 20, summed over more terms: float32 rounding.
    assert numbers["difference_without_padding"] < 1e-4
    assert (
        "Largest weight on a padded position: 0. Largest difference between the logits with and "
        f"without padding: {numbers['difference_without_padding']:.2g}." in text
    )


def test_padding_that_is_seen_would_show(tmp_path, monkeypatch):
    def unmasked(x, mask):
        layer = ScaledSelfAttention(head_dim=lesson.HIDDEN_DIM, name="attention")
        return layer(x, return_attention_scores=True)[0][:, 0]

    monkeypatch.setattr(lesson, "attention", unmasked)
    lesson.main(["--epochs", "0", "--json", str(tmp_path / "a.json")])
    numbers = json.loads((tmp_path / "a.json").read_text())
    assert numbers["weight_on_padding"] > 0.01
    assert numbers["difference_without_padding"] > 1e-4


def test_the_model_gives_the_same_answers_after_save_and_load(trained):
    # The same operations on the same numbers.
    assert trained.numbers["difference_after_reload"] == 0.0
    assert "After model.save and keras.models.load_model the logits differ by 0." in trained.text
    assert sorted(path.name for path in trained.folder.iterdir()) == [
        "a.keras",
        "a.png",
        "numbers.json",
    ]
    assert (trained.folder / "a.png").read_bytes().startswith(b"\x89PNG")
    model = keras.models.load_model(trained.folder / "a.keras")
    assert model.jit_compile is True
    assert model.count_params() == trained.numbers["weight_count"]
    # The lesson's own questions, made again: the share is that of all of them.
    random = np.random.default_rng(7)
    _, validation = lesson.make_questions(2048, random), lesson.make_questions(1024, random)
    weights = keras.Model(model.input, model.get_layer("attention").output[1])(validation).numpy()
    share = np.mean([weights[row, 0, 0, ids[0] - 10] for row, ids in enumerate(validation)])
    assert trained.numbers["share_on_answer"] == pytest.approx(share, abs=1e-6)
    # "3? c a f e", and no padding.
    logits = keras.ops.convert_to_numpy(model(np.array([[13, 3, 1, 6, 5]])))
    assert "abcdefghij"[int(np.argmax(logits))] == "f"


def test_without_training_it_does_not_claim_to_find_the_place(untrained):
    weights = np.array(untrained.numbers["weights"])
    found = np.sum(np.argmax(weights, axis=1) == np.arange(1, 9))
    right = sum(map(str.__eq__, untrained.numbers["word_answers"], "headache"))
    assert found < 8
    assert (
        f"{found} of 8 questions look most at the place they name, and {right} answers are right."
        in untrained.text
    )
    assert "It finds the place" not in untrained.text


def test_another_process_with_the_same_seed_shows_the_same_page_and_another_seed_another(
    untrained, run_lesson, tmp_path
):
    command = [sys.executable, SCRIPT, "--epochs", "0", "--seed", "5", "--json", tmp_path / "a.json"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0
    assert finished.stderr == ""
    page, _ = finished.stdout.split("Numbers: ")
    assert " ".join(page.split()) == untrained.text.split(" Numbers: ")[0]
    assert max(map(len, page.splitlines())) <= 80
    assert "\u2026" not in page
    weights = json.loads((tmp_path / "a.json").read_text())["weights"]
    np.testing.assert_allclose(weights, untrained.numbers["weights"], atol=1e-6)
    other = run_lesson(NAME, "--epochs", 0, "--seed", 6)
    assert np.max(np.abs(np.subtract(weights, other.numbers["weights"]))) > 1e-4


def test_a_long_training_is_shown_in_ten_rows_at_most(monkeypatch, capsys):
    history = {"loss": [0.5] * 23, "val_accuracy": [0.25] * 23}

    class Fitted:
        def fit(self, *_, **settings):
            assert settings["epochs"] == 23
            return type("History", (), {"history": history})

        def __call__(self, token_ids):
            return np.zeros((len(token_ids), 10))

    questions = lesson.make_questions(20, np.random.default_rng(1))
    output = lesson.console()
    lesson.show_learning(output, Fitted(), Fitted(), questions, questions, 23)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " 0.5000 " in line]
    assert [int(row[0]) for row in rows] == [2, 5, 8, 11, 14, 17, 20, 23]

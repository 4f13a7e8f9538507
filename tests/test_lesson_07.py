"""Lesson 07 learns to look where the question points, and what it says of it is true."""

import subprocess
import sys

import keras
import lesson_07_layers_in_keras as lesson
import numpy as np
import pytest

from keras_tinyattn import ScaledSelfAttention

NAME = "lesson_07_layers_in_keras"
KEYS = (
    "best_without_question accuracy control_accuracy share_on_answer_before share_on_answer "
    "padded_share difference_without_padding difference_after_reload weight_on_padding word_answers "
    "weights chance seed epochs losses accuracies control_accuracies weight_count device "
    "word_seen_in_training"
)
FILES = ["a.keras", "a.png", "numbers.json"]


@pytest.fixture
def trained(run_lesson):
    return run_lesson(NAME, "--epochs", 4, "--plot", "{}/a.png", "--save", "{}/a.keras")


@pytest.fixture
def untrained(run_lesson):
    return run_lesson(NAME, "--epochs", 0, "--seed", 5)


def test_a_question_is_answered_by_the_letter_at_its_place():
    # "2? c a" and "1? j b", padded: ids of a to j are 1 to 10, of "1?" 11.
    token_ids = np.array([[12, 3, 1, 0], [11, 10, 2, 0]])
    np.testing.assert_array_equal(lesson.answers_to(token_ids), [0, 9])
    np.testing.assert_array_equal(lesson.lengths_of(token_ids), [2, 2])
    # Half of the attention of the first question and a tenth of the second's are on the answer.
    weights = np.array([[0.2, 0.3, 0.5, 0.0], [0.9, 0.1, 0.0, 0.0]])
    assert lesson.share_on_answer(weights, token_ids) == pytest.approx(0.3)
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
    assert numbers.keys() == set(KEYS.split())
    best, accuracy, control = (numbers[key] for key in KEYS.split()[:3])
    before, after, padded, difference = (numbers[key] for key in KEYS.split()[3:7])
    losses = numbers["losses"]
    assert numbers["chance"] == 0.1
    assert 0.3 < best < 0.42
    # Three standard deviations of 1024 guesses.
    assert control < best + 3 * np.sqrt(0.36 * 0.64 / 1024)
    assert numbers["accuracies"][3] == pytest.approx(accuracy)
    assert accuracy > 0.99
    assert len(losses) == 4
    assert np.all(np.diff(losses) < 0)
    assert before < 0.25
    assert after > 0.9
    # A word it was not trained on.
    assert numbers["word_seen_in_training"] is False
    np.testing.assert_array_equal(np.argmax(numbers["weights"], axis=1), np.arange(1, 9))
    assert numbers["word_answers"] == list("headache")
    assert {letter for letter in "headache" if "headache".count(letter) == 2} == {"a", "e", "h"}
    assert padded > 0.5
    assert numbers["weight_on_padding"] == 0.0
    # Logits of about 20, summed over more terms: float32 rounding.
    assert difference < 1e-4
    for sentence in (
        f"Guessing gets 10.0% right; naming the most frequent letter, without reading the question, "
        f"{best:.1%}",
        f"With attention {accuracy:.1%} are right, with the mean {control:.1%}",
        f"4 {losses[3]:.4f} {accuracy:.1%} {numbers['control_accuracies'][3]:.1%}",
        f"Before training {before:.1%} of the attention is on the letter asked for.",
        f"Over all validation questions {after:.1%} of the attention",
        f"{accuracy:.0%} of the answers are right, and {control:.0%} without.",
        f"{after:.0%} of the attention is on the letter asked for. Model:",
        "letters of 'headache', which was not among the training questions",
        "8 of 8 questions look most at the place they name, and 8 answers are right.",
        "It finds the place, not the letter: a, e and h each appear twice.",
        f"{padded:.0%} of the validation questions are shorter",
        "Largest weight on a padded position: 0. Largest difference between the logits with and "
        f"without padding: {difference:.2g}.",
    ):
        assert sentence in text


def test_padding_that_is_seen_would_show(monkeypatch):
    def unmasked(x, mask):
        layer = ScaledSelfAttention(head_dim=lesson.HIDDEN_DIM, name="attention")
        return layer(x, return_attention_scores=True)[0][:, 0]

    model = lesson.make_model(unmasked)
    weights_of = keras.Model(model.input, model.get_layer("attention").output[1][:, 0, 0])
    questions = lesson.make_questions(100, np.random.default_rng(3))
    numbers = lesson.show_padding(lesson.console(), model, weights_of, questions)
    assert numbers["weight_on_padding"] > 0.01
    assert numbers["difference_without_padding"] > 1e-4


def test_the_model_gives_the_same_answers_after_save_and_load(trained):
    # The same operations on the same numbers.
    assert trained.numbers["difference_after_reload"] == 0.0
    assert "After model.save and keras.models.load_model the logits differ by 0." in trained.text
    assert sorted(path.name for path in trained.folder.iterdir()) == FILES
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
    said = f"{found} of 8 questions look most at the place they name, and {right} answers are right."
    assert said in untrained.text
    assert "It finds the place" not in untrained.text


@pytest.mark.slow
def test_another_process_shows_the_same_page_and_another_seed_another(untrained, run_lesson):
    command = [sys.executable, lesson.__file__, "--epochs", "0", "--seed", "5"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert " ".join(finished.stdout.split()) == untrained.text.split(" Numbers: ")[0]
    assert max(map(len, finished.stdout.splitlines())) <= 80
    assert "\u2026" not in finished.stdout
    other = run_lesson(NAME, "--epochs", 0, "--seed", 6)
    assert np.max(np.abs(np.subtract(untrained.numbers["weights"], other.numbers["weights"]))) > 1e-4


def test_a_long_training_is_shown_in_ten_rows_at_most(monkeypatch, capsys):
    class Fitted:
        def fit(self, *_, **settings):
            history = {"loss": [0.5] * settings["epochs"], "val_accuracy": [0.25] * settings["epochs"]}
            return type("History", (), {"history": history})

        def __call__(self, token_ids):
            return np.zeros((len(token_ids), 10))

    questions = lesson.make_questions(20, np.random.default_rng(1))
    lesson.show_learning(lesson.console(), Fitted(), Fitted(), questions, questions, 23)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " 0.5000 " in line]
    assert [int(row[0]) for row in rows] == [2, 5, 8, 11, 14, 17, 20, 23]

"""Lesson 07: the layers inside an ordinary Keras model, which learns where to look.

python scripts/lesson_07_layers_in_keras.py
python scripts/lesson_07_layers_in_keras.py --plot attention.png --save model.keras
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from _page import point, print_columns, print_matrix, section
from _start import (
    check_count,
    check_file,
    check_picture,
    console,
    quiet_imports,
    ran_on,
    run,
    whole_file,
    write_numbers,
    write_picture,
)

with quiet_imports():
    import keras
    from keras import ops

    from keras_tinyattn import ScaledSelfAttention, TokenAndPositionEmbedding
    from keras_tinyattn.plotting import plot_attention

# A question and a row of letters, "4? h e a d a c h e": the answer is the fourth letter.
LETTERS = "abcdefghij"
SHORTEST, LONGEST = 3, 8
# Ids: 0 is padding, then come the letters, then the questions "1?" to "8?".
PADDING = 0
FIRST_LETTER = 1
FIRST_QUESTION = FIRST_LETTER + len(LETTERS)
VOCABULARY_SIZE = FIRST_QUESTION + LONGEST
SEQUENCE_LENGTH = 1 + LONGEST

HIDDEN_DIM = 32
TRAINING, UNSEEN = 2048, 1024
# Made of the letters above; a, e and h stand twice, so a letter does not give its place away.
WORD = "headache"


def main(argv=None):
    arguments = parse_arguments(argv)
    check_count("--epochs", arguments.epochs)
    check_count("--seed", arguments.seed, at_most=2**32 - 1)
    check_picture("--plot", arguments.plot)
    check_file("--json", arguments.json)
    check_file("--save", arguments.save, suffixes=(".keras",))
    output = console()
    with tempfile.TemporaryDirectory() as folder:
        numbers = compute(
            arguments.epochs, arguments.seed, arguments.save or Path(folder, "model.keras")
        )
    tell(numbers, output)
    if arguments.save is not None:
        output.print(f"Model: {arguments.save}", markup=False, soft_wrap=True)
    if arguments.plot is not None:
        figure = plot_attention(
            numbers["weights"],
            [f"{place + 1}?" for place in range(len(WORD))],
            ["?", *WORD],
            title=f"Which letter of \u201c{WORD}\u201d does each question look at?",
        )
        write_picture(output, arguments.plot, figure.savefig)
    write_numbers(output, arguments.json, {**numbers, "weights": numbers["weights"].tolist()})


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Attention layers in a Functional Keras model that learns in seconds where to look."
    )
    parser.add_argument(
        "--epochs", type=int, default=8, metavar="N", help="passes over the examples (default 8)"
    )
    parser.add_argument(
        "--seed", type=int, default=7, metavar="N", help="seed of examples and weights (default 7)"
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw what each question looks at, as a heat map"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    parser.add_argument("--save", metavar="FILE.keras", help="keep the trained model there")
    return parser.parse_args(argv)


def make_questions(count, random):
    """Ids `(count, SEQUENCE_LENGTH)`, padded on the right; places asked for and lengths, `(count,)`."""
    lengths = random.integers(SHORTEST, LONGEST + 1, count)
    places = random.integers(0, lengths)
    letters = random.integers(FIRST_LETTER, FIRST_QUESTION, (count, LONGEST))
    letters = np.where(np.arange(LONGEST) < lengths[:, None], letters, PADDING)
    token_ids = np.concatenate([(FIRST_QUESTION + places)[:, None], letters], axis=1)
    return token_ids.astype("int32"), places, lengths


def answers_to(token_ids, places):
    """The index in LETTERS of the letter that stands at each place."""
    return token_ids[np.arange(len(token_ids)), 1 + places] - FIRST_LETTER


def attention(x, mask):
    """What the question, at position 0, has gathered from the letters."""
    layer = ScaledSelfAttention(head_dim=HIDDEN_DIM, name="attention")
    attended, _ = layer(x, mask=mask, return_attention_scores=True)
    return attended[:, 0]


def mean(x, mask):
    """The same for a model that cannot look: the mean of all positions."""
    return keras.layers.GlobalAveragePooling1D(name="mean")(x, mask=mask)


def make_model(gather):
    """A Functional model from ids `(B, T)` to a logit for each letter.

    Args:
        gather: `attention` or `mean`, which makes one vector of T.
    """
    token_ids = keras.Input((None,), dtype="int32", name="token_ids")
    mask = ops.not_equal(token_ids, PADDING)
    x = TokenAndPositionEmbedding(VOCABULARY_SIZE, SEQUENCE_LENGTH, HIDDEN_DIM, name="embedding")(
        token_ids
    )
    logits = keras.layers.Dense(len(LETTERS), name="answer")(gather(x, mask))
    model = keras.Model(token_ids, logits)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=True,
    )
    # Otherwise a model that is saved before it learned anything loads with a warning.
    model.optimizer.build(model.trainable_variables)
    return model


def compute(epochs, seed, path):
    """The lesson's numbers by name; the trained model is saved at `path`, nothing is printed."""
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    token_ids, places, _ = make_questions(TRAINING, random)
    unseen_ids, unseen_places, unseen_lengths = make_questions(UNSEEN, random)
    unseen = (unseen_ids, answers_to(unseen_ids, unseen_places))

    model, control = make_model(attention), make_model(mean)
    # A layer of a Functional model gives what it returned: here the pair of output and weights.
    probe = keras.Model(model.input, model.get_layer("attention").output[1])

    def shares():
        """How much the question looks at each position, (UNSEEN, SEQUENCE_LENGTH)."""
        return ops.convert_to_numpy(probe(unseen_ids))[:, 0, 0]

    def share_on_answer():
        return float(np.mean(shares()[np.arange(UNSEEN), 1 + unseen_places]))

    def right(logits):
        return float(np.mean(ops.convert_to_numpy(ops.argmax(logits, -1)) == unseen[1]))

    share_before = share_on_answer()
    histories = [
        trained.fit(
            token_ids,
            answers_to(token_ids, places),
            batch_size=64,
            epochs=epochs,
            validation_data=unseen,
            verbose=0,
        ).history
        for trained in (model, control)
    ]
    logits = model(unseen_ids)
    alone = np.empty_like(logits)
    for length in range(SHORTEST, LONGEST + 1):
        rows = unseen_lengths == length
        alone[rows] = model(unseen_ids[rows, : 1 + length])

    with whole_file(path) as part:
        model.save(part)
    reloaded = keras.models.load_model(path)

    word = np.array([FIRST_LETTER + LETTERS.index(letter) for letter in WORD], "int32")
    asked = np.array([[FIRST_QUESTION + place, *word] for place in range(len(WORD))], "int32")
    shown = [np.bincount(row[row != PADDING]).max() for row in unseen_ids[:, 1:]]
    return {
        "seed": seed,
        "epochs": epochs,
        "device": ran_on(logits),
        "weight_count": model.count_params(),
        "chance": 1 / len(LETTERS),
        "best_without_question": float(np.mean(shown / unseen_lengths)),
        "losses": histories[0].get("loss", []),
        "accuracies": histories[0].get("val_accuracy", []),
        "control_accuracies": histories[1].get("val_accuracy", []),
        "accuracy": right(logits),
        "control_accuracy": right(control(unseen_ids)),
        "share_on_answer_before": share_before,
        "share_on_answer": share_on_answer(),
        "word_seen_in_training": bool(np.any(np.all(token_ids[:, 1:] == word, axis=1))),
        "word_answers": [
            LETTERS[index] for index in ops.convert_to_numpy(ops.argmax(model(asked), -1))
        ],
        "weights": ops.convert_to_numpy(probe(asked))[:, 0, 0],
        "padded_share": float(np.mean(unseen_lengths < LONGEST)),
        "weight_on_padding": float(np.max(shares()[unseen_ids == PADDING])),
        "difference_without_padding": float(np.max(np.abs(logits - alone))),
        "difference_after_reload": float(np.max(np.abs(logits - reloaded(unseen_ids)))),
    }


def tell(numbers, output):
    """Print the lesson; each sentence about a number is made from that number."""
    output.print("[bold cyan]Lesson 07: attention layers in a Keras model[/]")
    output.print(
        "The layers are Keras layers: they stand between others in a Functional model, and compile, "
        "fit, save and load work as ever. This model learns to look where a question points."
    )

    section(output, "1. The task: which letter stands at this place?")
    example = f"{WORD.index('d') + 1}? {' '.join(WORD)}"
    output.print(f"    {example}    answer: d\n", style="bold", highlight=False)
    output.print(
        f"{TRAINING} random questions with {SHORTEST} to {LONGEST} letters of {len(LETTERS)} to learn "
        f"from, {UNSEEN} others to test. Guessing is right in {numbers['chance']:.1%}; whoever "
        "knows the letters but not the question, and names the one that stands most often, is right in "
        f"{numbers['best_without_question']:.1%}."
    )

    section(output, "2. The model")
    print_columns(
        output,
        ("layer", "gives", "what for"),
        [
            ("TokenAndPositionEmbedding", f"(B, T, {HIDDEN_DIM})", "which letter, and where"),
            ("ScaledSelfAttention", f"(B, T, {HIDDEN_DIM})", "the question looks at the letters"),
            ("[:, 0]", f"(B, {HIDDEN_DIM})", "what the question gathered"),
            ("keras.layers.Dense", f"(B, {len(LETTERS)})", "a logit for each letter"),
        ],
        "lll",
    )
    output.print(
        f"{numbers['weight_count']} weights, compile(jit_compile=True), on {numbers['device']}. Beside "
        "it learns a model that has a mean of all positions in place of attention."
    )
    tell_learning(numbers, output)
    tell_looking(numbers, output)
    tell_padding_and_saving(numbers, output)


def tell_learning(numbers, output):
    epochs = numbers["epochs"]
    section(output, "3. Learning", "How many of the unseen questions are answered right?")
    # At most eleven rows, the last among them.
    shown = sorted({round(index * epochs / 10) for index in range(1, 11)}) if epochs > 10 else None
    if epochs:
        print_columns(
            output,
            ("epoch", "loss", "attention", "mean instead"),
            [
                (
                    str(epoch),
                    f"{numbers['losses'][epoch - 1]:.4f}",
                    f"{numbers['accuracies'][epoch - 1]:.1%}",
                    f"{numbers['control_accuracies'][epoch - 1]:.1%}",
                )
                for epoch in shown or range(1, epochs + 1)
            ],
            "rrrr",
        )
    accuracy, without = numbers["accuracy"], numbers["best_without_question"]
    point(
        output,
        f"With attention {accuracy:.1%} are right, with the mean {numbers['control_accuracy']:.1%}; "
        f"to expect are {without:.1%} without the question, {numbers['chance']:.1%} by guessing.",
    )
    point(output, verdict(accuracy, without))


def verdict(accuracy, without):
    """Whether more is right than a model that does not read the question could get by luck."""
    # Three standard errors of a share of UNSEEN questions.
    luck = 3 * (without * (1 - without) / UNSEEN) ** 0.5
    if accuracy > without + luck:
        return "So it reads the question, and finds the letter it points at."
    return "So it has not learned to use the question; give it more --epochs."


def tell_looking(numbers, output):
    weights = numbers["weights"]
    seen = "was among" if numbers["word_seen_in_training"] else "was not among"
    section(
        output,
        "4. What it looks at",
        f"The weights of the question (row) on itself and on the letters of '{WORD}', which {seen} "
        "what it learned from:",
    )
    print_matrix(
        output,
        weights,
        [f"{place + 1}?" for place in range(len(WORD))],
        ["?", *WORD],
        "{:.0%}",
        extra=("answer", numbers["word_answers"]),
        bold=True,
    )
    on_diagonal = int(np.sum(np.argmax(weights, axis=1) == 1 + np.arange(len(WORD))))
    right = sum(given == letter for given, letter in zip(numbers["word_answers"], WORD, strict=True))
    point(
        output,
        f"{on_diagonal} of {len(WORD)} questions look most at the place they name, and {right} answers "
        "are right."
        + (
            f" {len(WORD) - len(set(WORD))} letters stand twice: it finds the place, not the letter."
            if on_diagonal == len(WORD)
            else ""
        ),
    )
    point(
        output,
        f"Over all {UNSEEN} unseen questions {numbers['share_on_answer']:.1%} of the attention is on "
        f"the letter asked for; before training it was {numbers['share_on_answer_before']:.1%}.",
    )


def tell_padding_and_saving(numbers, output):
    section(output, "5. Padding is not seen")
    output.print(
        f"{numbers['padded_share']:.0%} of the unseen questions are shorter than the batch and padded; "
        "`mask=` tells the layer where."
    )
    point(
        output,
        f"Largest weight on a padded position: {numbers['weight_on_padding']:g}. Largest difference "
        f"between the logits in the padded batch and without padding: "
        f"{numbers['difference_without_padding']:.2g}.",
    )

    section(output, "6. Save and load")
    difference = numbers["difference_after_reload"]
    point(
        output,
        "model.save and keras.models.load_model: largest difference between the logits "
        f"{difference:.2g}" + (", the same model." if difference == 0 else "."),
    )

    section(
        output,
        "The point",
        f"With an attention layer among Keras' own, {numbers['accuracy']:.0%} of the answers are "
        f"right, and {numbers['control_accuracy']:.0%} without. Its weights show where it looks: "
        f"{numbers['share_on_answer']:.0%} of the attention is on the letter asked for.",
    )


if __name__ == "__main__":
    run(main)

"""Lesson 07: attention layers in an ordinary Keras model, which learns where to look.

python scripts/lesson_07_layers_in_keras.py
python scripts/lesson_07_layers_in_keras.py --plot attention.png --save model.keras
"""

import math
import tempfile
from pathlib import Path

import numpy as np
from _page import point, print_columns, print_matrix, section
from _start import (
    check_count,
    check_file,
    console,
    lesson_parser,
    parse_lesson,
    quiet_imports,
    ran_on,
    run,
    write_file,
    write_numbers,
    write_picture,
)

with quiet_imports():
    import keras
    from keras import ops

    from keras_tinyattn import ScaledSelfAttention, TokenAndPositionEmbedding, plot_attention

# A question and a row of letters, "4? h e a d a c h e": the answer is the fourth letter.
LETTERS = "abcdefghij"
SHORTEST, LONGEST = 3, 8
# Token ids: 0 is padding, 1 to 10 are the letters, 11 to 18 the questions "1?" to "8?".
PADDING = 0
VOCABULARY_SIZE = 1 + len(LETTERS) + LONGEST
SEQUENCE_LENGTH = 1 + LONGEST
HIDDEN_DIM = 32
TRAINING, VALIDATION = 2048, 1024
# Made of the letters above; a, e and h appear twice, so a letter does not give its place away.
WORD = "headache"
QUESTIONS = [f"{place}?" for place in range(1, 1 + len(WORD))]


def main(argv=None):
    options = parse(argv)
    keras.utils.set_random_seed(options.seed)
    random = np.random.default_rng(options.seed)
    output = console()
    output.print("[bold cyan]Lesson 07: attention layers in a Keras model[/]")
    output.print(
        "The layers are Keras layers: put them among others in a Functional model, and compile, fit, "
        "save and load work as usual. This model learns to look where a question points."
    )
    training, validation = make_questions(TRAINING, random), make_questions(VALIDATION, random)
    model, control = make_model(attention), make_model(mean)
    # It shares the layers of `model` and returns the weights of the question on all positions, (B, T).
    weights_of = keras.Model(model.input, model.get_layer("attention").output[1][:, 0, 0])

    numbers = {"seed": options.seed, "epochs": options.epochs}
    numbers |= show_task(output, validation)
    numbers |= show_model(output, model, weights_of, validation)
    numbers |= show_learning(output, model, control, training, validation, options.epochs)
    numbers |= show_looking(output, model, weights_of, training, validation)
    numbers |= show_padding(output, model, weights_of, validation)
    numbers |= show_loading(output, model, validation)
    section(
        output,
        "The point",
        f"With an attention layer among Keras' own, {numbers['accuracy']:.0%} of the answers are "
        f"right, and {numbers['control_accuracy']:.0%} without. Its weights show where it looks: "
        f"{numbers['share_on_answer']:.0%} of the attention is on the letter asked for.",
    )
    write_file(output, "Model", options.save, model.save)
    if options.plot is not None:
        title = f"Which letter of \u201c{WORD}\u201d does each question look at?"
        figure = plot_attention(numbers["weights"], QUESTIONS, ["?", *WORD], title=title)
        write_picture(output, options.plot, figure.savefig)
    write_numbers(output, options.json, numbers)


def parse(argv):
    parser = lesson_parser(
        "Attention layers in a Functional Keras model that learns in seconds where to look.",
        plot="draw what each question looks at, as a heat map",
    )
    parser.add_argument(
        "--epochs", type=int, default=8, metavar="N", help="passes over the examples (default 8)"
    )
    parser.add_argument(
        "--seed", type=int, default=7, metavar="N", help="seed of examples and weights (default 7)"
    )
    parser.add_argument("--save", metavar="FILE.keras", help="keep the trained model there")
    options = parse_lesson(parser, argv)
    check_count("--epochs", options.epochs)
    check_count("--seed", options.seed, at_most=2**32 - 1)
    check_file("--save", options.save, suffixes=(".keras",))
    return options


def make_questions(count, random):
    """Token ids `(count, SEQUENCE_LENGTH)`: a question, its letters, and padding on the right."""
    lengths = random.integers(SHORTEST, LONGEST + 1, count)
    places = 1 + random.integers(0, lengths)
    letters = random.integers(1, len(LETTERS) + 1, (count, LONGEST))
    letters = np.where(np.arange(LONGEST) < lengths[:, None], letters, PADDING)
    return np.concatenate([(len(LETTERS) + places)[:, None], letters], axis=1).astype("int32")


def places_in(token_ids):
    """The position of the letter that each question asks for; the question itself is at 0."""
    return token_ids[:, 0] - len(LETTERS)


def answers_to(token_ids):
    """The index in LETTERS of the letter at that position."""
    return token_ids[np.arange(len(token_ids)), places_in(token_ids)] - 1


def lengths_of(token_ids):
    """The number of letters after each question."""
    return np.sum(token_ids[:, 1:] != PADDING, axis=1)


def best_without_question(token_ids):
    """The accuracy, on average, of naming the most frequent letter of each question."""
    most_frequent = [np.bincount(row[row != PADDING]).max() for row in token_ids[:, 1:]]
    return np.mean(most_frequent / lengths_of(token_ids))


def show_task(output, validation):
    chance, best = 1 / len(LETTERS), best_without_question(validation)
    section(output, "1. The task: which letter is at this place?")
    output.print("    4? h e a d a c h e    answer: d\n", style="bold", highlight=False)
    output.print(
        f"{TRAINING} random questions to train on and {VALIDATION} for validation, each with "
        f"{SHORTEST} to {LONGEST} letters out of {len(LETTERS)}. Guessing gets {chance:.1%} right; "
        f"naming the most frequent letter, without reading the question, {best:.1%}."
    )
    return {"chance": chance, "best_without_question": best}


def attention(x, mask):
    """What the question, at position 0, gathers from the letters, `(B, HIDDEN_DIM)`."""
    layer = ScaledSelfAttention(head_dim=HIDDEN_DIM, name="attention")
    attended, _ = layer(x, mask=mask, return_attention_scores=True)
    return attended[:, 0]


def mean(x, mask):
    """The same without attention: the mean of all positions."""
    return keras.layers.GlobalAveragePooling1D()(x, mask=mask)


def make_model(gather):
    """A model from token ids `(B, T)` to a logit for each letter; `gather` is one of these two."""
    token_ids = keras.Input((None,), dtype="int32", name="token_ids")
    mask = ops.not_equal(token_ids, PADDING)
    x = TokenAndPositionEmbedding(VOCABULARY_SIZE, SEQUENCE_LENGTH, HIDDEN_DIM)(token_ids)
    logits = keras.layers.Dense(len(LETTERS))(gather(x, mask))
    model = keras.Model(token_ids, logits)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=True,
    )
    # Otherwise a model saved before any training (--epochs 0) loads with a warning.
    model.optimizer.build(model.trainable_variables)
    return model


def show_model(output, model, weights_of, validation):
    section(output, "2. The model")
    rows = [
        ("TokenAndPositionEmbedding", f"(B, T, {HIDDEN_DIM})", "which letter, and where"),
        ("ScaledSelfAttention", f"(B, T, {HIDDEN_DIM})", "the question looks at the letters"),
        ("[:, 0]", f"(B, {HIDDEN_DIM})", "what the question gathered"),
        ("keras.layers.Dense", f"(B, {len(LETTERS)})", "a logit for each letter"),
    ]
    print_columns(output, ("layer", "gives", "what for"), rows, "lll")
    count, weights = model.count_params(), weights_of(validation)
    share, device = share_on_answer(weights.numpy(), validation), ran_on(weights)
    output.print(
        f"{count} weights, compile(jit_compile=True), on {device}. Before training {share:.1%} of the "
        "attention is on the letter asked for. For comparison, a second model takes the mean of all "
        "positions in place of attention."
    )
    return {"weight_count": count, "device": device, "share_on_answer_before": share}


def share_on_answer(weights, token_ids):
    """How much of the attention is on the letter asked for, on average over the questions."""
    return np.mean(weights[np.arange(len(token_ids)), places_in(token_ids)])


def show_learning(output, model, control, training, validation, epochs):
    section(output, "3. Learning", "How many of the validation questions are answered right?")
    answers = answers_to(validation)
    settings = dict(batch_size=64, epochs=epochs, validation_data=(validation, answers), verbose=0)
    history = model.fit(training, answers_to(training), **settings).history
    control_history = control.fit(training, answers_to(training), **settings).history
    numbers = {
        "losses": history.get("loss", []),
        "accuracies": history.get("val_accuracy", []),
        "control_accuracies": control_history.get("val_accuracy", []),
    }
    table = list(zip(range(1, epochs + 1), *numbers.values(), strict=True))
    # At most ten epochs, the last among them.
    table = table[:: -max(1, math.ceil(epochs / 10))][::-1]
    rows = [(f"{epoch}", f"{loss:.4f}", *map("{:.1%}".format, rates)) for epoch, loss, *rates in table]
    print_columns(output, ("epoch", "loss", "attention", "mean instead"), rows, "rrrr")
    accuracy = np.mean(np.argmax(model(validation), axis=-1) == answers)
    control_accuracy = np.mean(np.argmax(control(validation), axis=-1) == answers)
    best = best_without_question(validation)
    point(
        output,
        f"With attention {accuracy:.1%} are right, with the mean {control_accuracy:.1%}; naming the "
        f"most frequent letter would get {best:.1%} right.",
    )
    return numbers | {"accuracy": accuracy, "control_accuracy": control_accuracy}


def show_looking(output, model, weights_of, training, validation):
    word = [1 + LETTERS.index(letter) for letter in WORD]
    asked = np.array([[len(LETTERS) + place, *word] for place in range(1, 1 + len(WORD))], "int32")
    weights = weights_of(asked).numpy()
    answers = [LETTERS[index] for index in np.argmax(model(asked), axis=-1)]
    section(
        output,
        "4. What it looks at",
        f"The weights of the question (row) on itself and on the letters of '{WORD}', which was not "
        "among the training questions:",
    )
    print_matrix(output, weights, QUESTIONS, ["?", *WORD], "{:.0%}", "", ("answer", answers), bold=True)
    found = np.sum(np.argmax(weights, axis=1) == places_in(asked))
    right = sum(given == letter for given, letter in zip(answers, WORD, strict=True))
    point(
        output,
        f"{found} of 8 questions look most at the place they name, and {right} answers are right.",
    )
    if found == len(WORD):
        point(output, "It finds the place, not the letter: a, e and h each appear twice.")
    share = share_on_answer(weights_of(validation).numpy(), validation)
    point(
        output,
        f"Over all validation questions {share:.1%} of the attention is on the letter asked for.",
    )
    return {
        "word_seen_in_training": np.any(np.all(training[:, 1:] == word, axis=1)),
        "word_answers": answers,
        "weights": weights,
        "share_on_answer": share,
    }


def show_padding(output, model, weights_of, validation):
    lengths, logits = lengths_of(validation), model(validation).numpy()
    alone = np.empty_like(logits)
    for length in range(SHORTEST, LONGEST + 1):
        rows = lengths == length
        alone[rows] = model(validation[rows, : 1 + length])
    padded = np.mean(lengths < LONGEST)
    weight = np.max(weights_of(validation).numpy()[validation == PADDING])
    difference = np.max(np.abs(logits - alone))
    section(
        output,
        "5. Padding is not seen",
        f"{padded:.0%} of the validation questions are shorter than the batch and padded; `mask=` "
        "tells the layer where.",
    )
    point(
        output,
        f"Largest weight on a padded position: {weight:g}. Largest difference between the logits "
        f"with and without padding: {difference:.2g}.",
    )
    return {
        "padded_share": padded,
        "weight_on_padding": weight,
        "difference_without_padding": difference,
    }


def show_loading(output, model, validation):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    difference = np.max(np.abs(model(validation) - loaded(validation)))
    section(output, "6. Save and load")
    point(
        output, f"After model.save and keras.models.load_model the logits differ by {difference:.2g}."
    )
    return {"difference_after_reload": difference}


if __name__ == "__main__":
    run(main)

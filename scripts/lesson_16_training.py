"""Lesson 16: training, the loop that turns a text into a model of it.

python scripts/lesson_16_training.py
python scripts/lesson_16_training.py --steps 1000 --plot losses.png --attention attention.png
"""

import argparse
import math
from pathlib import Path

import numpy as np
from _page import point, print_columns, section
from _start import (
    check_count,
    check_file,
    check_picture,
    console,
    quiet_imports,
    ran_on,
    run,
    write_numbers,
    write_picture,
)

with quiet_imports():
    import keras
    import tensorflow as tf

    from keras_tinyattn import (
        CharTokenizer,
        functional,
        gpt,
        make_evaluation,
        make_optimizer,
        make_train_step,
        next_token_loss,
        split_token_ids,
        train,
        training_batches,
    )
    from keras_tinyattn.plotting import plot_attention, plot_losses

SONNETS = Path(__file__).resolve().with_name("sonnets.txt")
SIZES = {"sequence_length": 64, "hidden_dim": 64, "num_heads": 2, "num_layers": 2}
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
# The line whose attention is drawn, and after which the model writes on.
LINE = "Shall I compare thee"
SHOWN = 8  # characters of a window in the table
NUDGE = 1e-2  # of one weight, to see by how much the loss changes


def main(argv=None):
    arguments = parse_arguments(argv)
    check_count("--steps", arguments.steps, at_least=1)
    check_picture("--plot", arguments.plot)
    check_picture("--attention", arguments.attention)
    check_file("--json", arguments.json)
    keras.utils.set_random_seed(arguments.seed)

    numbers, weights = compute(arguments.steps, arguments.seed)
    output = console()
    tell(numbers, output)
    if arguments.plot is not None:
        figure = plot_losses(
            numbers["losses"],
            [(0, numbers["validation_before"]), (arguments.steps, numbers["validation_after"])],
            title="Learning Shakespeare's sonnets",
        )
        write_picture(output, arguments.plot, figure.savefig)
    write_picture(
        output, arguments.attention, lambda part: draw_attention(numbers, weights).savefig(part)
    )
    write_numbers(output, arguments.json, numbers)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="What a training step does, a line of mathematics at a time, and what many do."
    )
    parser.add_argument(
        "--steps", type=int, default=400, metavar="N", help="training steps to take (default 400)"
    )
    parser.add_argument(
        "--seed", type=int, default=16, help="decides weights, batches and samples (default 16)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw how the loss fell")
    parser.add_argument(
        "--attention", metavar="FILE.png", help="draw who looks at whom, before and after"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    return parser.parse_args(argv)


def compute(steps, seed):
    """The lesson's numbers by name, and the attention weights before and after; nothing is printed."""
    text = SONNETS.read_text(encoding="utf-8")
    tokenizer = CharTokenizer.from_text(text)
    learn_from, judge_by = split_token_ids(tokenizer.encode(text))
    model = gpt(tokenizer.vocabulary_size, **SIZES)
    windows, targets = next(
        iter(training_batches(learn_from, SIZES["sequence_length"], BATCH_SIZE, seed=seed))
    )
    logits = model(windows)
    optimizer = make_optimizer(model, LEARNING_RATE, steps, final_share=0.1)
    evaluate = make_evaluation(model, judge_by)
    line = np.array([tokenizer.encode(LINE)])

    def attention():
        """(layers * H, T, T): every head's weights over the line."""
        _, weights = model(line, return_attention_scores=True)
        return np.concatenate([layer[0] for layer in weights])

    def sample():
        written = model.generate(line[0].tolist(), 60, temperature=0.8, seed=seed)
        return tokenizer.decode(written.token_ids[line.size : written.lengths])

    numbers = {
        "sizes": SIZES,
        "batch_size": BATCH_SIZE,
        "vocabulary_size": tokenizer.vocabulary_size,
        "num_parameters": model.count_params(),
        "learn_from": len(learn_from),
        "judge_by": len(judge_by),
        "line": LINE,
        "window": tokenizer.decode(windows[0]),
        "targets": tokenizer.decode(targets[0]),
        **one_loss(logits, targets),
        **one_gradient(model, windows, targets),
        "even_loss": math.log(tokenizer.vocabulary_size),
        "frequency_loss": frequency_loss(learn_from, judge_by, tokenizer.vocabulary_size),
        "validation_before": evaluate().loss,
        "sample_before": sample(),
        "device": ran_on(logits),
    }
    before = attention()
    numbers |= one_step(model, optimizer, windows, targets, numbers)
    # The step that was just taken is the first: the loop goes on from the optimizer's count.
    loop = train(model, optimizer, learn_from, steps, BATCH_SIZE, seed=seed, clip_norm=1.0)
    numbers["losses"] = [numbers["step_loss"], *(float(loss) for _, loss in loop)]
    numbers["validation_after"] = evaluate().loss
    numbers["sample_after"] = sample()
    after = attention()
    for name, weights in (("before", before), ("after", after)):
        # The mean weight that each head puts on the character before, from the second on.
        share = np.diagonal(weights, offset=-1, axis1=1, axis2=2).mean(axis=1)
        numbers[f"previous_share_{name}"] = share.tolist()
    return numbers, (before, after)


def one_loss(logits, targets):
    """The loss of each of the first positions, by the shares that the targets get."""
    shares = functional.softmax(logits)
    of_targets = tf.gather(shares, targets, batch_dims=2).numpy()
    return {
        "target_shares": of_targets[0, :SHOWN].tolist(),
        "target_losses": (-np.log(of_targets[0, :SHOWN])).tolist(),
        "mean_of_losses": float(np.mean(-np.log(of_targets))),
        "loss": float(next_token_loss(logits, targets)),
    }


def one_gradient(model, windows, targets):
    """The gradient at the logits by hand and by tape, and of one weight by tape and by nudging it."""
    with tf.GradientTape() as tape:
        logits = model(windows)
        loss = next_token_loss(logits, targets)
    table = model.embedding.token_embeddings
    by_tape, of_table = tape.gradient(loss, [logits, table.value])
    by_hand = functional.softmax(logits) - tf.one_hot(targets, logits.shape[-1])
    by_hand /= float(tf.size(targets))

    of_table = tf.convert_to_tensor(of_table).numpy()
    place = np.unravel_index(np.argmax(np.abs(of_table)), of_table.shape)
    start, losses = table.numpy(), []
    for sign in (1, -1):
        nudged = start.copy()
        nudged[place] += sign * NUDGE
        table.assign(nudged)
        losses.append(float(next_token_loss(model(windows), targets)))
    table.assign(start)
    return {
        "logit_gradient_difference": float(tf.reduce_max(tf.abs(by_hand - by_tape))),
        "logit_gradient_largest": float(tf.reduce_max(tf.abs(by_tape))),
        "place": [int(index) for index in place],
        "weight": float(start[place]),
        "gradient": float(of_table[place]),
        "nudged_losses": losses,
        "slope": (losses[0] - losses[1]) / (2 * NUDGE),
    }


def one_step(model, optimizer, windows, targets, numbers):
    """AdamW's first step, by hand for the one weight and by the optimizer for all."""
    learning_rate = float(optimizer.learning_rate)
    weight, gradient = numbers["weight"], numbers["gradient"]
    # The first means of the gradient and of its square, corrected, are g and g * g.
    direction = gradient / (math.sqrt(gradient**2) + optimizer.epsilon)
    by_hand = weight - learning_rate * (direction + optimizer.weight_decay * weight)
    # Without clipping, which would scale all gradients alike and so change nothing in this first step.
    loss = make_train_step(model, optimizer)(windows, targets)
    return {
        "learning_rate": learning_rate,
        "weight_decay": optimizer.weight_decay,
        "weight_by_hand": by_hand,
        "weight_after": float(model.embedding.token_embeddings.numpy()[tuple(numbers["place"])]),
        "step_loss": float(loss),
        "loss_after": float(next_token_loss(model(windows), targets)),
    }


def frequency_loss(learn_from, judge_by, vocabulary_size):
    """What guessing by how often each character occurs loses, in nats a character."""
    # One is added to each count, so that a character that was never seen is not impossible.
    counts = np.bincount(learn_from, minlength=vocabulary_size) + 1.0
    return float(-np.log(counts / counts.sum())[judge_by[1:]].mean())


def draw_attention(numbers, weights):
    heads = SIZES["num_heads"]
    titles = [
        f"{when}: layer {index // heads + 1}, head {index % heads + 1}"
        for when in ("before", "after")
        for index in range(len(weights[0]))
    ]
    characters = ["\u2423" if character == " " else character for character in numbers["line"]]
    return plot_attention(
        np.concatenate(weights), characters, title="Attention before and after", head_titles=titles
    )


def tell(numbers, output):
    """Print the lesson; each sentence about a number is made from that number."""
    output.print("[bold cyan]Lesson 16: training[/]")
    output.print(
        "A language model is a guess at the next token. Training makes the guess better: measure how "
        "bad it is, find out which way each weight should move, move them all a little, repeat."
    )
    output.print(
        "\n    loss = -mean(log softmax(logits)[target])"
        "\n    weight = weight - learning_rate * direction\n",
        style="bold",
        markup=False,
    )
    output.print(
        f"The text is Shakespeare's sonnets, a token a character: {numbers['learn_from']:,} to learn "
        f"from and the last {numbers['judge_by']:,} to judge by, {numbers['vocabulary_size']} "
        f"different ones. The model has {numbers['num_parameters']:,} parameters and runs on "
        f"{numbers['device']}."
    )
    tell_loss(numbers, output)
    tell_gradient(numbers, output)
    tell_step(numbers, output)
    tell_loop(numbers, output)
    tell_attention(numbers, output)


def tell_loss(numbers, output):
    section(
        output,
        "1. The loss: how surprised the model is",
        "The targets are the window moved by one. The loss of a character is -log of the share that "
        "the model gave to it.",
    )
    rows = [
        [_plain(seen), _plain(target), f"{share:.2%}", f"{loss:.3f}"]
        for seen, target, share, loss in zip(
            numbers["window"],
            numbers["targets"],
            numbers["target_shares"],
            numbers["target_losses"],
            strict=False,
        )
    ]
    print_columns(output, ["character", "next one", "its share", "-log share"], rows, "llrr")
    count = numbers["batch_size"] * numbers["sizes"]["sequence_length"]
    point(
        output,
        f"The mean over all {count:,} characters of the batch is {numbers['mean_of_losses']:.4f} nats "
        f"by hand, {numbers['loss']:.4f} by next_token_loss.",
    )
    gap = abs(numbers["loss"] - numbers["even_loss"])
    point(
        output,
        f"A guess that gives every character the same share loses log {numbers['vocabulary_size']} = "
        f"{numbers['even_loss']:.4f}. The untrained model is {gap:.3f} away from that: it "
        + ("knows nothing yet." if gap < 0.1 else "already prefers some characters, at random."),
    )


def tell_gradient(numbers, output):
    section(
        output,
        "2. The gradient: which way each weight should move",
        "GradientTape follows the loss back to every weight. At the logits the result is short: "
        "(softmax - one-hot of the target) / count.",
    )
    share = numbers["logit_gradient_difference"] / numbers["logit_gradient_largest"]
    point(
        output,
        f"By hand and by tape, the gradients at the logits differ by at most {share:.0e} of the "
        "largest.",
    )
    row, column = numbers["place"]
    higher, lower = numbers["nudged_losses"]
    point(
        output,
        f"One weight, row {row} and column {column} of the token table, is {numbers['weight']:.5f}. "
        f"Nudged by {NUDGE} up and down, it makes the loss {higher:.6f} and {lower:.6f}: a slope of "
        f"{numbers['slope']:.5f}. The tape says {numbers['gradient']:.5f}.",
    )


def tell_step(numbers, output):
    section(
        output,
        "3. The step: AdamW",
        "AdamW divides the mean of a weight's gradients by the root of the mean of their squares, so "
        "that each weight moves by about the learning rate; matrices also shrink a little.",
    )
    sign = "" if numbers["gradient"] > 0 else "-"
    direction = (
        f"direction = g / sqrt(g * g) + {numbers['weight_decay']} x weight = "
        f"{sign}1 + {numbers['weight_decay'] * numbers['weight']:.5f}"
    )
    point(
        output,
        f"For that weight, in the first step: {direction}. From {numbers['weight']:.5f} at learning "
        f"rate {numbers['learning_rate']:.4g} it goes to {numbers['weight_by_hand']:.5f} by hand, to "
        f"{numbers['weight_after']:.5f} by the optimizer.",
    )
    change = numbers["loss_after"] - numbers["step_loss"]
    point(
        output,
        f"All {numbers['num_parameters']:,} weights moved at once. On the same batch the loss went "
        f"from {numbers['step_loss']:.4f} to {numbers['loss_after']:.4f}: the step "
        + ("helped." if change < 0 else "was too long."),
    )


def tell_loop(numbers, output):
    losses = numbers["losses"]
    section(
        output,
        f"4. The loop: {len(losses):,} steps",
        "Each step takes another batch. The text kept back tells whether the model has learned the "
        "language or only its lessons.",
    )
    marks = sorted({0, *np.linspace(0, len(losses) - 1, 7).astype(int).tolist()})
    rows = [
        [f"{mark + 1:,}", f"{losses[mark]:.3f}", "\u2588" * round(losses[mark] / losses[0] * 40)]
        for mark in marks
    ]
    print_columns(output, ["step", "loss", ""], rows, "rrl")
    before, after = numbers["validation_before"], numbers["validation_after"]
    point(
        output,
        f"On the text kept back: {before:.3f} nats a character before, {after:.3f} after. The model "
        f"hesitated among {math.exp(before):.1f} characters, and now among {math.exp(after):.1f}.",
    )
    frequency = numbers["frequency_loss"]
    point(
        output,
        f"Guessing by how often each character occurs loses {frequency:.3f}. The model "
        + (
            f"is {frequency - after:.3f} nats better: it uses what stands before."
            if after < frequency
            else "has not reached that yet: give it more steps."
        ),
    )
    for when in ("before", "after"):
        point(output, f"{when.capitalize()}, the line goes on: {_plain(numbers[f'sample_{when}'])}")


def tell_attention(numbers, output):
    before, after = (np.array(numbers[f"previous_share_{when}"]) for when in ("before", "after"))
    heads = numbers["sizes"]["num_heads"]
    head = int(np.argmax(after))
    section(
        output,
        "5. What the heads have learned",
        f"How much each head looks at the character just before, over '{numbers['line']}':",
    )
    rows = [
        [f"layer {index // heads + 1}, head {index % heads + 1}", f"{one:.1%}", f"{two:.1%}"]
        for index, (one, two) in enumerate(zip(before, after, strict=True))
    ]
    print_columns(output, ["", "before", "after"], rows, "lrr")
    losses = numbers["losses"]
    section(
        output,
        "The point",
        f"Nobody told the model what a word is. {len(losses):,} times it was told how wrong its "
        f"guesses were, and the loss on text it never saw went from {numbers['validation_before']:.2f} "
        f"to {numbers['validation_after']:.2f}; head {head % heads + 1} of layer {head // heads + 1} "
        f"looks at the character before with {after[head]:.0%} of its weight, where it was "
        f"{before[head]:.0%}.",
    )


def _plain(text):
    """A text on one line, its square brackets kept from the console's markup."""
    return repr(text).replace("[", "\\[")


if __name__ == "__main__":
    run(main)

"""Lesson 16: training, the loop that turns a text into a model of it.

python scripts/lesson_16_training.py
python scripts/lesson_16_training.py --steps 1000 --plot losses.png --attention attention.png
"""

import math
from pathlib import Path

import numpy as np
from _page import point, print_columns, print_losses, section
from _start import (
    check_count,
    check_picture,
    console,
    lesson_parser,
    parse_lesson,
    quiet_imports,
    ran_on,
    run,
    write_numbers,
    write_picture,
)
from rich.markup import escape

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
        plot_attention,
        plot_losses,
        split_token_ids,
        train,
        training_batches,
    )

SONNETS = Path(__file__).resolve().with_name("sonnets.txt")
SIZES = {"sequence_length": 64, "hidden_dim": 64, "num_heads": 2, "num_layers": 2}
BATCH_SIZE, LEARNING_RATE = 16, 3e-3
LINE = "Shall I compare thee"  # Its attention is drawn, and the model continues it.
NUDGE = 1e-2
SHOWN = 8  # characters of a window in the table
HEADS = [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2)]


def main(argv=None):
    options = parse_options(argv)
    output = console()
    seed = options.seed
    keras.utils.set_random_seed(seed)
    text = SONNETS.read_text(encoding="utf-8")
    tokenizer = CharTokenizer.from_text(text)
    training_ids, validation_ids = split_token_ids(tokenizer.encode(text))
    model = gpt(tokenizer.vocabulary_size, **SIZES)
    batches = training_batches(training_ids, SIZES["sequence_length"], BATCH_SIZE, seed=seed)
    windows, targets = next(iter(batches))  # (B, T) each
    logits = model(windows)  # (B, T, V)
    numbers = {"sizes": SIZES, "batch_size": BATCH_SIZE, "line": LINE, "device": ran_on(logits)}
    numbers |= {"vocabulary_size": tokenizer.vocabulary_size, "num_parameters": model.count_params()}
    numbers |= {"learn_from": len(training_ids), "judge_by": len(validation_ids)}
    output.print(
        "[bold cyan]Lesson 16: training[/]\nA language model predicts the next token. Training makes "
        "it better: measure how wrong it is, find out which way each weight should move, move them all "
        "a little, repeat.\n\n    [bold]loss = -mean(log softmax(logits)\\[target])\n"
        "    weight = weight - learning_rate * direction[/]\n\nThe text is Shakespeare's sonnets, one "
        f"token per character: {len(training_ids):,} to train on and the last {len(validation_ids):,} "
        f"for validation, {tokenizer.vocabulary_size} different ones. The model has "
        f"{model.count_params():,} parameters and runs on {numbers['device']}."
    )
    evaluate = make_evaluation(model, validation_ids)
    optimizer = make_optimizer(model, LEARNING_RATE, options.steps, final_share=0.1)
    before = measure(model, tokenizer, evaluate, seed)
    numbers |= the_loss(output, tokenizer, windows, targets, logits)
    numbers |= the_gradient(output, model, windows, targets)
    numbers |= the_step(output, model, optimizer, windows, targets, numbers)
    # The loop goes on from the optimizer's count, after the step that was just taken.
    loop = train(model, optimizer, training_ids, options.steps, BATCH_SIZE, seed=seed, clip_norm=1.0)
    numbers["losses"] = [numbers["step_loss"], *(float(loss) for _, loss in loop)]
    after = measure(model, tokenizer, evaluate, seed)
    for name in before.keys() - {"weights"}:
        numbers |= {f"{name}_before": before[name], f"{name}_after": after[name]}
    numbers |= the_loop(output, training_ids, validation_ids, numbers)
    the_heads(output, before, after)

    head = int(np.argmax(after["previous_share"]))
    section(
        output,
        "The point",
        f"Nobody told the model what a word is. It was told {options.steps:,} times how wrong its "
        f"predictions were, and the loss on text it never saw fell from {before['validation']:.2f} to "
        f"{after['validation']:.2f}. The head that now looks most at the previous character, "
        f"{HEADS[head]}, gives it {after['previous_share'][head]:.0%} of its weight, where it was "
        f"{before['previous_share'][head]:.0%}.",
    )
    write_picture(output, options.plot, lambda path: draw_losses(numbers).savefig(path))
    write_picture(output, options.attention, lambda path: draw_heads(before, after).savefig(path))
    write_numbers(output, options.json, numbers)


def parse_options(argv):
    parser = lesson_parser(
        "What one training step does, one line of mathematics at a time, and what many steps do.",
        plot="draw how the loss fell",
    )
    parser.add_argument(
        "--steps", type=int, default=400, metavar="N", help="training steps to take (default 400)"
    )
    parser.add_argument(
        "--seed", type=int, default=16, help="decides weights, batches and samples (default 16)"
    )
    parser.add_argument(
        "--attention", metavar="FILE.png", help="draw who looks at whom, before and after"
    )
    options = parse_lesson(parser, argv)
    check_count("--steps", options.steps, at_least=1)
    check_count("--seed", options.seed, at_most=2**31 - 1)
    check_picture("--attention", options.attention)
    return options


def measure(model, tokenizer, evaluate, seed):
    """What training changes; of the line, each head's weights, (layers * H, T, T)."""
    line = tokenizer.encode(LINE)
    sample = model.generate(line, 60, temperature=0.8, seed=seed)
    _, weights = model(np.array([line]), return_attention_scores=True)
    weights = np.concatenate([of_layer[0] for of_layer in weights])
    return {
        "validation": evaluate().loss,
        "sample": tokenizer.decode(sample.token_ids[len(line) : sample.lengths]),
        "weights": weights,
        # Each head's mean weight on the previous character, from the second character on.
        "previous_share": np.diagonal(weights, -1, axis1=1, axis2=2).mean(axis=1),
    }


def the_loss(output, tokenizer, windows, targets, logits):
    probabilities = tf.gather(functional.softmax(logits), targets, batch_dims=2).numpy()  # (B, T)
    losses = -np.log(probabilities)
    window, shifted = tokenizer.decode(windows[0]), tokenizer.decode(targets[0])
    loss, even_loss = float(next_token_loss(logits, targets)), math.log(tokenizer.vocabulary_size)
    section(
        output,
        "1. The loss: how surprised the model is",
        "The targets are the window shifted by one. The loss at a position is -log of the probability "
        "that the model gave to the target.",
    )
    rows = [
        [repr(window[t]), repr(shifted[t]), f"{probabilities[0, t]:.2%}", f"{losses[0, t]:.3f}"]
        for t in range(SHOWN)
    ]
    print_columns(output, ["character", "next one", "its probability", "-log"], rows, "llrr")
    point(
        output,
        f"The mean over all {losses.size:,} characters of the batch is {losses.mean():.4f} nats by "
        f"hand, {loss:.4f} by next_token_loss.",
    )
    point(
        output,
        f"Giving every character the same probability costs log {tokenizer.vocabulary_size} = "
        f"{even_loss:.4f}. An untrained model knows nothing yet, and is close to that: "
        f"{abs(loss - even_loss):.3f} away.",
    )
    numbers = {"window": window, "targets": shifted, "mean_of_losses": losses.mean(), "loss": loss}
    numbers |= {"target_shares": probabilities[0, :SHOWN], "target_losses": losses[0, :SHOWN]}
    return numbers | {"even_loss": even_loss}


def the_gradient(output, model, windows, targets):
    table = model.embedding.token_embeddings
    with tf.GradientTape() as tape:
        logits = model(windows)
        loss = next_token_loss(logits, targets)
    of_logits, of_table = tape.gradient(loss, [logits, table.value])
    by_hand = functional.softmax(logits) - tf.one_hot(targets, logits.shape[-1])
    by_hand /= float(tf.size(targets))
    difference, largest = np.max(np.abs(by_hand - of_logits)), np.max(np.abs(of_logits))

    # One weight, the one with the largest gradient, a little higher and a little lower.
    of_table, start = tf.convert_to_tensor(of_table).numpy(), table.numpy()
    place = np.unravel_index(np.argmax(np.abs(of_table)), of_table.shape)
    nudge, losses = np.zeros_like(start), []
    nudge[place] = NUDGE
    for nudged in (start + nudge, start - nudge):
        table.assign(nudged)
        losses.append(float(next_token_loss(model(windows), targets)))
    table.assign(start)
    slope = (losses[0] - losses[1]) / (2 * NUDGE)

    section(
        output,
        "2. The gradient: which way each weight should move",
        "GradientTape follows the loss back to every weight. At the logits the result is short: "
        "(softmax - one-hot of the target) / count.",
    )
    share = difference / largest
    point(output, f"Computed so, it differs from the tape's by at most {share:.0e} of the largest.")
    point(
        output,
        f"One weight, row {place[0]} and column {place[1]} of the token table, is {start[place]:.5f}. "
        f"Moved by {NUDGE} up and down, it makes the loss {losses[0]:.6f} and {losses[1]:.6f}: a slope "
        f"of {slope:.5f}. The tape says {of_table[place]:.5f}.",
    )
    numbers = {"logit_gradient_difference": difference, "logit_gradient_largest": largest}
    numbers |= {"place": place, "weight": float(start[place]), "gradient": float(of_table[place])}
    return numbers | {"nudged_losses": losses, "slope": slope}


def the_step(output, model, optimizer, windows, targets, numbers):
    weight, gradient = numbers["weight"], numbers["gradient"]
    learning_rate, decay = float(optimizer.learning_rate), optimizer.weight_decay
    # In the first step the bias-corrected means of the gradient and of its square are g and g * g.
    direction = gradient / (math.sqrt(gradient**2) + optimizer.epsilon) + decay * weight
    by_hand = weight - learning_rate * direction
    # Without clipping, which scales all gradients alike: here the direction would be the same.
    step_loss = float(make_train_step(model, optimizer)(windows, targets))
    by_optimizer = float(model.embedding.token_embeddings.numpy()[numbers["place"]])
    loss_after = float(next_token_loss(model(windows), targets))

    section(
        output,
        "3. The step: AdamW",
        "AdamW divides the running mean of a weight's gradients by the root of the running mean of "
        "their squares, so each weight moves by about the learning rate; matrices also shrink a bit.",
    )
    point(
        output,
        f"For that weight, in the first step: direction = g / sqrt(g * g) + {decay} x weight = "
        f"{math.copysign(1, gradient):.0f} + {decay * weight:.5f}. From {weight:.5f} at learning rate "
        f"{learning_rate:.4g} it goes to {by_hand:.5f} by hand and to {by_optimizer:.5f} by the "
        f"optimizer. All {model.count_params():,} weights moved at once.",
    )
    point(output, f"On the same batch the loss fell from {step_loss:.4f} to {loss_after:.4f}.")
    losses = {"step_loss": step_loss, "loss_after": loss_after}
    weights = {"weight_by_hand": by_hand, "weight_after": by_optimizer}
    return losses | weights | {"learning_rate": learning_rate, "weight_decay": decay}


def the_loop(output, training_ids, validation_ids, numbers):
    # How often each character occurs; one is added, so that none is impossible.
    counts = np.bincount(training_ids, minlength=numbers["vocabulary_size"]) + 1.0
    frequency_loss = float(-np.log(counts / counts.sum())[validation_ids[1:]].mean())
    before, after = numbers["validation_before"], numbers["validation_after"]
    section(
        output,
        f"4. The loop: {len(numbers['losses']):,} steps",
        "Each step takes another batch. The validation text shows whether the model has learned the "
        "language or only memorized its training text. The loss of a batch after so many steps:",
    )
    print_losses(output, numbers["losses"])
    point(
        output,
        f"On the validation text: {before:.3f} nats per character before, {after:.3f} after. That is "
        f"the uncertainty of a choice among {math.exp(before):.1f} equally likely characters, and now "
        f"among {math.exp(after):.1f}.",
    )
    point(
        output,
        f"Knowing only how often each character occurs costs {frequency_loss:.3f} nats. To lose less, "
        "a model has to use the characters before the one it predicts. This one ends "
        f"{frequency_loss - after:.3f} below that.",
    )
    for when in ("before", "after"):
        point(output, f"The line continued {when} training: {escape(repr(numbers[f'sample_{when}']))}")
    return {"frequency_loss": frequency_loss}


def the_heads(output, before, after):
    section(
        output,
        "5. What the heads have learned",
        f"How much each head looks at the previous character, over {LINE!r}:",
    )
    shares = zip(HEADS, before["previous_share"], after["previous_share"], strict=True)
    rows = [[name, f"{one:.1%}", f"{two:.1%}"] for name, one, two in shares]
    print_columns(output, ["", "before", "after"], rows, "lrr")


def draw_losses(numbers):
    losses = numbers["losses"]
    evaluations = [(0, numbers["validation_before"]), (len(losses), numbers["validation_after"])]
    return plot_losses(losses, evaluations, title="Learning Shakespeare's sonnets")


def draw_heads(before, after):
    weights = np.concatenate([before["weights"], after["weights"]])
    titles = [f"{when}: {name}" for when in ("before", "after") for name in HEADS]
    return plot_attention(weights, LINE, title="Attention before and after", head_titles=titles)


if __name__ == "__main__":
    run(main)

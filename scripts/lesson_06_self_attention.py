"""Lesson 06: self-attention, by which a token gathers what the other tokens know.

python scripts/lesson_06_self_attention.py
python scripts/lesson_06_self_attention.py --steps 100 --plot attention.png
"""

import argparse
import itertools

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
    write_numbers,
    write_picture,
)

with quiet_imports():
    import keras
    import tensorflow as tf

    from keras_tinyattn import ScaledSelfAttention, functional
    from keras_tinyattn.plotting import plot_trace

TOKENS = ("The", "cat", "sat")
X = [
    [1.0, 0.5, 0.2, 0.1],  # The
    [0.1, 2.0, 0.8, 0.2],  # cat
    [0.2, 0.1, 1.5, 1.8],  # sat
]
HEAD_DIM = 4
W_Q = [[1.0, 0.0, 0.1, 0.0], [0.0, 1.0, 0.0, 0.2], [0.1, 0.0, 1.0, 0.0], [0.0, 0.2, 0.0, 1.0]]
W_K = [[0.8, 0.1, 0.0, 0.0], [0.1, 0.9, 0.2, 0.0], [0.0, 0.2, 0.7, 0.1], [0.0, 0.0, 0.1, 0.9]]
W_V = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5], [0.5, 0.0, 0.0, 0.5]]
# What the output is to become, in the part about learning.
TARGET = [[0.8, 0.2, 0.4, 0.6], [0.2, 1.2, 0.5, 0.8], [0.5, 0.3, 0.9, 1.0]]
LEARNING_RATE = 0.1
# Added to one row of scores, it leaves the softmax as it was and takes exp() past float32.
SHIFT = 100.0
# The token whose row the sentences follow.
CAT = TOKENS.index("cat")

MODES = {
    "xla": ("compiled with XLA (jit_compile=True)", lambda f: tf.function(f, jit_compile=True)),
    "graph": ("as a TensorFlow graph", tf.function),
    "eager": ("one operation after the other (eager)", lambda f: f),
}


def main(argv=None):
    arguments = parse_arguments(argv)
    check_count("--steps", arguments.steps)
    check_picture("--plot", arguments.plot)
    check_file("--json", arguments.json)
    keras.utils.set_random_seed(6)
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    numbers, trace = compute(arguments.steps, arguments.mode)
    output = console()
    tell(numbers, output)
    if arguments.plot is not None:
        figure = plot_trace(trace, TOKENS, title=f"Self-attention on \u201c{' '.join(TOKENS)}\u201d")
        write_picture(output, arguments.plot, figure.savefig)
    write_numbers(output, arguments.json, as_json(numbers))


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Self-attention on three tokens, stage by stage, and a gradient step through it."
    )
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="gradient steps to take (default 1)"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="xla",
        help="how TensorFlow runs it; the numbers are the same (default xla)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw scores and weights as heat maps, side by side"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    return parser.parse_args(argv)


def compute(steps, mode):
    """The lesson's numbers by name, and the trace to draw; nothing is printed."""
    compiled = MODES[mode][1]
    layer = ScaledSelfAttention(head_dim=HEAD_DIM)
    layer.build((None, None, len(X[0])))
    kernels = {"q": layer.query_kernel, "k": layer.key_kernel, "v": layer.value_kernel}
    for kernel, given in zip(kernels.values(), (W_Q, W_K, W_V), strict=True):
        kernel.assign(given)

    # The layer works on batches: here B = 1, and H = 1 head.
    x, target = tf.constant([X]), tf.constant([TARGET])
    trace_of = compiled(layer.trace)
    trace = trace_of(x)
    stages = {name: value.numpy()[0] for name, value in trace._asdict().items()}
    stages = {name: value[0] if value.ndim == 3 else value for name, value in stages.items()}
    numbers = {
        "head_dim": HEAD_DIM,
        "learning_rate": LEARNING_RATE,
        "x": x.numpy()[0],
        "w_q": kernels["q"].numpy(),
        "w_k": kernels["k"].numpy(),
        "w_v": kernels["v"].numpy(),
        "target": target.numpy()[0],
        "queries": stages["queries"],
        "keys": stages["keys"],
        "values": stages["values"],
        "raw": stages["raw_scores"],
        "scaled": stages["scaled_scores"],
        "weights": stages["weights"],
        "row_sums": stages["weights"].sum(axis=-1),
        "output": stages["output"],
        "unscaled_weights": functional.softmax(trace.raw_scores)[0, 0].numpy(),
        **compute_overflow(trace.scaled_scores[0, 0, CAT]),
        "mode": mode,
        "device": ran_on(trace.output),
    }

    @compiled
    def step(learning_rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x) - target))
        gradients = tape.gradient(loss, list(kernels.values()))
        for kernel, gradient in zip(kernels.values(), gradients, strict=True):
            kernel.assign_sub(learning_rate * gradient)
        return loss, gradients

    losses = []
    for taken in range(steps + 1):
        # A last step of length zero measures where the others led.
        loss, gradients = step(tf.constant(LEARNING_RATE if taken < steps else 0.0))
        losses.append(float(loss))
        if taken == 0:
            for letter, gradient in zip(kernels, gradients, strict=True):
                numbers[f"grad_w_{letter}"] = gradient.numpy()
                numbers[f"grad_w_{letter}_l2"] = float(tf.norm(gradient))
                numbers[f"new_w_{letter}"] = kernels[letter].numpy() if steps else None
    numbers |= {
        "loss_before": losses[0],
        "loss_after_1_step": losses[1] if steps else None,
        "losses": losses,
        "weights_after": trace_of(x).weights.numpy()[0, 0],
    }
    return numbers, trace


def compute_overflow(scores):
    """The softmax of scores raised by SHIFT, without and with their maximum subtracted."""
    shifted = scores + SHIFT
    exponentials = tf.exp(shifted)
    return {
        "shifted_scores": shifted.numpy(),
        "shifted_exponentials": exponentials.numpy(),
        "naive_softmax": (exponentials / tf.reduce_sum(exponentials)).numpy(),
        "stable_softmax": functional.softmax(shifted).numpy(),
    }


def tell(numbers, output):
    """Print the lesson; each sentence about a number is made from that number."""
    output.print("[bold cyan]Lesson 06: self-attention[/]")
    output.print(
        "A token's vector is the same in every sentence. Self-attention makes it depend on the "
        "others: each token asks a question (its query), offers an answer to some question (its "
        "key), and has something to say (its value)."
    )
    output.print("\n    attention(Q, K, V) = softmax(Q K^T / sqrt(head_dim)) V\n", style="bold")
    output.print(
        f"Computed by ScaledSelfAttention(head_dim={numbers['head_dim']}), "
        f"{MODES[numbers['mode']][0]}, on {numbers['device']}."
    )
    tell_input(numbers, output)
    tell_scores(numbers, output)
    tell_weights(numbers, output)
    tell_overflow(numbers, output)
    tell_learning(numbers, output)

    weights = numbers["weights"][CAT]
    mixture = ", ".join(f"{weights[index]:.0%} '{TOKENS[index]}'" for index in by_size(weights))
    learned = all(numbers[f"grad_w_{letter}_l2"] > 0 for letter in "qkv")
    section(
        output,
        "The point",
        f"A token leaves attention as a mixture: '{TOKENS[CAT]}' is now {mixture}. Who looks at whom "
        "comes from three matrices, and the gradient "
        + ("reaches all of them: attention is learned." if learned else "does not reach all of them."),
    )


def tell_input(numbers, output):
    section(output, f"1. Input: '{' '.join(TOKENS)}', a vector for each token")
    x, head_dim = numbers["x"], numbers["head_dim"]
    print_matrix(output, x, TOKENS, [f"x{index}" for index in range(x.shape[1])], "{:.1f}", "token")
    output.print(
        f"Three matrices W_Q, W_K, W_V turn each of the {len(TOKENS)} vectors into a query, a key "
        f"and a value of {head_dim} numbers. For '{TOKENS[CAT]}' they are:"
    )
    names = ("query", "key", "value")
    projected = [numbers[name][CAT] for name in ("queries", "keys", "values")]
    print_matrix(output, projected, names, range(head_dim), "{:.2f}", f"'{TOKENS[CAT]}'")
    products = sum_of_products(x[CAT], numbers["w_q"][:, 0], "{:.1f} x {:.1f}")
    point(output, f"First number of its query: {products} = {numbers['queries'][CAT, 0]:.2f}.")


def tell_scores(numbers, output):
    cat, raw = TOKENS[CAT], numbers["raw"]
    section(output, "2. Raw scores: Q K^T", "How well does each query (row) match each key (column)?")
    print_matrix(output, raw, TOKENS, TOKENS, corner="query \\ key", bold=True)
    products = sum_of_products(numbers["queries"][CAT], numbers["keys"][CAT], "{:.2f} x {:.2f}")
    point(output, f"'{cat}' with '{cat}': {products} = {raw[CAT, CAT]:.3f}.")
    best, *_, least = by_size(raw[CAT])
    point(
        output,
        f"'{cat}' matches {whom(best)} best ({raw[CAT, best]:.3f}) and {whom(least)} least "
        f"({raw[CAT, least]:.3f}).",
    )

    scaled = numbers["scaled"]
    section(
        output,
        f"3. Scaled scores: Q K^T / sqrt({numbers['head_dim']})",
        "A sum of more products spreads wider; dividing by sqrt(head_dim) makes up for that.",
    )
    print_matrix(output, scaled, TOKENS, TOKENS, corner="query \\ key", bold=True)
    point(
        output,
        f"Over the {raw.size} scores the standard deviation went from {np.std(raw):.3f} to "
        f"{np.std(scaled):.3f}, and the variance from {np.var(raw):.3f} to {np.var(scaled):.3f}: "
        f"{np.var(raw) / np.var(scaled):.2f} times less.",
    )
    promise = "It is often said that this brings the variance to 1. "
    if abs(np.var(scaled) - 1.0) < 0.05:
        point(output, f"{promise}Here it does: {np.var(scaled):.2f}.")
    else:
        means, variances = zip(
            *((np.mean(numbers[name]), np.var(numbers[name])) for name in ("queries", "keys")),
            strict=True,
        )
        point(
            output,
            f"{promise}Here it is {np.var(scaled):.2f}: the rule supposes independent numbers of mean "
            f"0 and variance 1, and these queries and keys have means {means[0]:.2f} and "
            f"{means[1]:.2f}, variances {variances[0]:.2f} and {variances[1]:.2f}.",
        )


def tell_weights(numbers, output):
    cat, weights = TOKENS[CAT], numbers["weights"]
    section(
        output, "4. Weights: the softmax of each row", "Scores become shares: each row shares out 100%."
    )
    row_sums = ("row sum", [f"{total:.2%}" for total in numbers["row_sums"]])
    print_matrix(output, weights, TOKENS, TOKENS, "{:.1%}", "query \\ key", row_sums, bold=True)
    first, *others = by_size(weights[CAT])
    point(
        output,
        f"'{cat}' attends most to {whom(first)} ({weights[CAT, first]:.1%}), then to "
        + " and ".join(f"{whom(index)} ({weights[CAT, index]:.1%})" for index in others)
        + ".",
    )
    for query, token in enumerate(TOKENS):
        if query != CAT:
            key = by_size(weights[query])[0]
            point(output, f"'{token}' attends most to {whom(key, query)} ({weights[query, key]:.1%}).")
    unscaled = numbers["unscaled_weights"][CAT, first]
    point(
        output,
        f"Without the scaling '{cat}' would give {whom(first)} {unscaled:.1%}: the softmax would be "
        + ("closer to all or nothing." if unscaled > weights[CAT, first] else "no sharper."),
    )

    section(
        output, "5. Output: the weights times the values", "What each token takes from all of them."
    )
    print_matrix(output, numbers["output"], TOKENS, range(numbers["head_dim"]), corner="token")
    products = sum_of_products(weights[CAT], numbers["values"][:, 0], "{:.3f} x {:.2f}")
    point(output, f"First number of '{cat}': {products} = {numbers['output'][CAT, 0]:.3f}.")


def tell_overflow(numbers, output):
    section(
        output,
        "6. Why the softmax subtracts the row's maximum",
        f"Adding {SHIFT:g} to each score of '{TOKENS[CAT]}' multiplies each e^score alike, so the "
        f"weights must stay. But float32 ends at {np.finfo('float32').max:.1e}.",
    )
    scores, exponentials = numbers["shifted_scores"], numbers["shifted_exponentials"]
    naive, stable = numbers["naive_softmax"], numbers["stable_softmax"]
    print_columns(
        output,
        ("key", "score", "e^score", "naive softmax", "ours"),
        [
            (
                f"[bold cyan]{token}[/]",
                f"{scores[key]:.3f}",
                f"{exponentials[key]:.3g}",
                f"{naive[key]:.1%}" if np.isfinite(naive[key]) else "not a number",
                f"{stable[key]:.1%}",
            )
            for key, token in enumerate(TOKENS)
        ],
        "lrrrr",
    )
    broken = int(np.sum(~np.isfinite(naive)))
    point(
        output,
        f"The naive softmax, e^score / sum of e^score, has lost {broken} of {len(TOKENS)} weights."
        if broken
        else "The naive softmax has held here.",
    )
    difference = float(np.max(np.abs(stable - numbers["weights"][CAT])))
    point(
        output,
        "Ours subtracts the maximum first, so that no exponent is above 0. It differs from the weights "
        f"in 4 by at most {difference:.0e}; float32 keeps such scores in steps of "
        f"{np.spacing(scores.max()):.0e}.",
    )


def tell_learning(numbers, output):
    losses = numbers["losses"]
    steps = len(losses) - 1
    section(
        output,
        "7. Learning: the gradient passes through the softmax",
        "The loss is the mean squared distance from a target. A step moves each matrix by "
        f"-{numbers['learning_rate']:g} times its gradient, which a GradientTape finds.",
    )
    norms = {f"W_{letter.upper()}": numbers[f"grad_w_{letter}_l2"] for letter in "qkv"}
    print_columns(
        output,
        ("matrix", "norm of its gradient"),
        [(f"[bold cyan]{name}[/]", f"{norm:.6f}") for name, norm in norms.items()],
        "lr",
    )
    largest, smallest = max(norms, key=norms.get), min(norms, key=norms.get)
    if norms[smallest] > 0:
        ratio = norms[largest] / norms[smallest]
        point(
            output,
            f"All three get a gradient; that of {largest} is {ratio:.1f} times as long as that of "
            f"{smallest}.",
        )
    else:
        point(output, f"{smallest} gets no gradient.")

    # At most nine rows, the first and the last among them.
    shown = sorted({round(index * steps / 8) for index in range(9)}) if steps > 8 else range(steps + 1)
    block = "\u2588" if output.encoding.lower().startswith("utf") else "#"
    bars = {step: block * min(40, round(30 * losses[step] / losses[0])) for step in shown}
    print_columns(
        output,
        ("steps", "loss", ""),
        [(str(step), f"{losses[step]:.6f}", bars[step]) for step in shown],
        "rrl",
    )
    if steps == 0:
        point(output, "No step was taken (--steps 0).")
        return
    verdict = "fell" if losses[-1] < losses[0] else "did not fall"
    after_steps = f"after {steps} step{'s' * (steps > 1)}"
    falls = sum(after < before for before, after in itertools.pairwise(losses))
    point(
        output,
        f"The loss {verdict}: {losses[0]:.6f} before, {losses[-1]:.6f} {after_steps} "
        f"({losses[-1] / losses[0] - 1:+.1%})"
        + (f"; {falls} of {steps} steps lowered it." if steps > 1 else "."),
    )
    before, after = numbers["weights"][CAT], numbers["weights_after"][CAT]
    key = by_size(np.abs(after - before))[0]
    point(
        output,
        f"Who looks at whom has moved: '{TOKENS[CAT]}' gave {whom(key)} {before[key]:.2%} and gives "
        f"{after[key]:.2%} {after_steps}.",
    )


def by_size(entries):
    """Indices from the largest entry to the smallest, equal ones in their order."""
    return [int(index) for index in np.argsort(-entries, kind="stable")]


def sum_of_products(left, right, product):
    return " + ".join(product.format(*pair) for pair in zip(left, right, strict=True))


def whom(key, query=CAT):
    return "itself" if key == query else f"'{TOKENS[key]}'"


def as_json(numbers):
    """Arrays as lists, and null for a number that JSON does not have."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return [plain(entry) for entry in value.tolist()]
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    return {"tokens": list(TOKENS), **{name: plain(value) for name, value in numbers.items()}}


if __name__ == "__main__":
    run(main)

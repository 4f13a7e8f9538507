"""Lesson 06: self-attention, through which a token gathers what the other tokens know.

python scripts/lesson_06_self_attention.py
python scripts/lesson_06_self_attention.py --steps 100 --plot attention.png
"""

import numpy as np
from _page import point, print_columns, print_losses, print_matrix, section
from _start import (
    check_count,
    console,
    lesson_parser,
    parse_lesson,
    quiet_imports,
    ran_on,
    run,
    write_numbers,
    write_picture,
)

with quiet_imports():
    import tensorflow as tf

    from keras_tinyattn import ScaledSelfAttention, functional, plot_trace

TOKENS = ("The", "cat", "sat")
THE, CAT, SAT = range(3)
# A vector for each token.
X = np.array([[1.0, 0.5, 0.2, 0.1], [0.1, 2.0, 0.8, 0.2], [0.2, 0.1, 1.5, 1.8]], "float32")
HEAD_DIM = 4
W_Q, W_K, W_V = np.array(
    [
        [[1.0, 0.0, 0.1, 0.0], [0.0, 1.0, 0.0, 0.2], [0.1, 0.0, 1.0, 0.0], [0.0, 0.2, 0.0, 1.0]],
        [[0.8, 0.1, 0.0, 0.0], [0.1, 0.9, 0.2, 0.0], [0.0, 0.2, 0.7, 0.1], [0.0, 0.0, 0.1, 0.9]],
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5], [0.5, 0.0, 0.0, 0.5]],
    ],
    "float32",
)
# Added to a row of scores, it leaves the softmax unchanged but takes e^score out of float32's range.
SHIFT = 100.0
# What the output should become in section 7.
TARGET = np.array([[0.8, 0.2, 0.4, 0.6], [0.2, 1.2, 0.5, 0.8], [0.5, 0.3, 0.9, 1.0]], "float32")
LEARNING_RATE = 0.1

MODES = {
    "xla": ("compiled with XLA (jit_compile=True)", lambda f: tf.function(f, jit_compile=True)),
    "graph": ("as a TensorFlow graph", tf.function),
    "eager": ("one operation after the other (eager)", lambda f: f),
}


def main(argv=None):
    options = parse(argv)
    # On a GPU, TensorFlow may otherwise round the factors of float32 products to 10 bits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    output = console()
    description, compiled = MODES[options.mode]

    layer = ScaledSelfAttention(head_dim=HEAD_DIM)
    layer.build((None, None, len(X[0])))
    layer.query_kernel.assign(W_Q)
    layer.key_kernel.assign(W_K)
    layer.value_kernel.assign(W_V)
    # The layer takes a batch of sequences, here of one: (1, 3, 4).
    trace = compiled(layer.trace)(X[None])
    # Each stage as a matrix, without the axes of the batch and the heads, which have size 1.
    stages = trace._make(np.squeeze(stage) for stage in trace)

    output.print("[bold cyan]Lesson 06: self-attention[/]")
    output.print(
        "A token's vector is the same in every sentence. Self-attention makes it depend on the "
        "others: each token asks a question (its query), offers an answer to some question (its "
        "key), and has something to say (its value)."
    )
    output.print("\n    attention(Q, K, V) = softmax(Q K^T / sqrt(head_dim)) V\n", style="bold")
    device = ran_on(trace.output)
    output.print(f"Computed by ScaledSelfAttention(head_dim={HEAD_DIM}), {description}, on {device}.")
    numbers = {"tokens": TOKENS, "head_dim": HEAD_DIM, "mode": options.mode, "device": device}
    numbers |= {"x": X, "w_q": W_Q, "w_k": W_K, "w_v": W_V}
    numbers |= show_input(output, stages)
    numbers |= show_scores(output, stages)
    numbers |= show_weights(output, stages)
    numbers |= show_output(output, stages)
    numbers |= show_overflow(output, stages)
    numbers |= learn(output, layer, stages, options.steps, compiled)

    the, cat, sat = stages.weights[CAT]
    section(
        output,
        "The point",
        f"A token leaves attention as a mixture: 'cat' is now {cat:.0%} 'cat', {sat:.0%} 'sat', "
        f"{the:.0%} 'The'. Three matrices decide who looks at whom and what is passed on, and the "
        "gradient reaches all of them: attention is learned.",
    )
    title = "Self-attention on \u201cThe cat sat\u201d"
    write_picture(
        output, options.plot, lambda path: plot_trace(trace, TOKENS, title=title).savefig(path)
    )
    write_numbers(output, options.json, numbers)


def parse(argv):
    parser = lesson_parser(
        "Self-attention on three tokens, stage by stage, and a gradient step through it.",
        plot="draw scores and weights as heat maps, side by side",
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
    options = parse_lesson(parser, argv)
    check_count("--steps", options.steps)
    return options


def show_input(output, stages):
    queries, keys, values = stages.queries, stages.keys, stages.values  # each (3, 4)
    section(output, "1. Input: 'The cat sat', a vector for each token")
    print_matrix(output, X, TOKENS, ("x0", "x1", "x2", "x3"), "{:.1f}", "token")
    output.print(
        "Three matrices W_Q, W_K, W_V turn each of the 3 vectors into a query, a key and a value "
        f"of {HEAD_DIM} numbers. For 'cat' they are:"
    )
    cat = (queries[CAT], keys[CAT], values[CAT])
    print_matrix(output, cat, ("query", "key", "value"), range(HEAD_DIM), "{:.2f}", "'cat'")
    products = sum_of_products("{:.1f} x {:.1f}", X[CAT], W_Q[:, 0])
    point(output, f"First number of its query: {products} = {queries[CAT, 0]:.2f}.")
    return {"queries": queries, "keys": keys, "values": values}


def show_scores(output, stages):
    queries, keys, raw = stages.queries, stages.keys, stages.raw_scores  # (3, 4), (3, 4), (3, 3)
    section(output, "2. Raw scores: Q K^T", "How well does each query (row) match each key (column)?")
    print_matrix(output, raw, TOKENS, TOKENS, corner="query \\ key", bold=True)
    products = sum_of_products("{:.2f} x {:.2f}", queries[CAT], keys[CAT])
    point(output, f"'cat' with 'cat': {products} = {raw[CAT, CAT]:.3f}.")
    point(
        output,
        f"'cat' matches itself best ({raw[CAT, CAT]:.3f}) and 'The' least ({raw[CAT, THE]:.3f}).",
    )

    scaled = stages.scaled_scores
    section(
        output,
        f"3. Scaled scores: Q K^T / sqrt({HEAD_DIM})",
        "A sum of more products spreads wider; dividing by sqrt(head_dim) makes up for that.",
    )
    print_matrix(output, scaled, TOKENS, TOKENS, corner="query \\ key", bold=True)
    point(
        output,
        f"Over the {raw.size} scores the standard deviation went from {np.std(raw):.3f} to "
        f"{np.std(scaled):.3f}, and the variance from {np.var(raw):.3f} to {np.var(scaled):.3f}: "
        f"{np.var(raw) / np.var(scaled):.2f} times less.",
    )
    point(
        output,
        f"It is often said that this brings the variance to 1. Here it is {np.var(scaled):.2f}: the "
        "rule assumes independent numbers of mean 0 and variance 1, and these queries and keys have "
        f"means {np.mean(queries):.2f} and {np.mean(keys):.2f}, variances {np.var(queries):.2f} and "
        f"{np.var(keys):.2f}.",
    )
    return {"raw": raw, "scaled": scaled}


def show_weights(output, stages):
    weights, row_sums = stages.weights, stages.weights.sum(axis=-1)
    section(output, "4. Weights: the softmax of each row", "The scores in a row become shares of 100%.")
    sums = ("row sum", [f"{total:.2%}" for total in row_sums])
    print_matrix(output, weights, TOKENS, TOKENS, "{:.1%}", "query \\ key", sums, bold=True)
    the, cat, sat = weights[CAT]
    point(
        output,
        f"'cat' attends most to itself ({cat:.1%}), then to 'sat' ({sat:.1%}) and 'The' ({the:.1%}).",
    )
    point(output, f"'The' attends most to 'cat' ({weights[THE, CAT]:.1%}).")
    point(output, f"'sat' attends most to itself ({weights[SAT, SAT]:.1%}).")
    unscaled = functional.softmax(stages.raw_scores).numpy()
    point(
        output,
        f"Without scaling, 'cat' would give itself {unscaled[CAT, CAT]:.1%}, closer to all or nothing.",
    )
    return {"weights": weights, "row_sums": row_sums, "unscaled_weights": unscaled}


def show_output(output, stages):
    section(output, "5. Output: the weights times the values", "What each token takes from all three.")
    print_matrix(output, stages.output, TOKENS, range(HEAD_DIM), corner="token")
    products = sum_of_products("{:.3f} x {:.2f}", stages.weights[CAT], stages.values[:, 0])
    point(output, f"First number of 'cat': {products} = {stages.output[CAT, 0]:.3f}.")
    return {"output": stages.output}


def show_overflow(output, stages):
    section(
        output,
        "6. Why the softmax subtracts the row's maximum",
        f"Adding {SHIFT:g} to each score of 'cat' multiplies every e^score by the same number, so the "
        f"weights must not change. But float32 ends at {np.finfo('float32').max:.1e}.",
    )
    scores = tf.constant(stages.scaled_scores[CAT] + SHIFT)
    exponentials = tf.exp(scores)
    naive = (exponentials / tf.reduce_sum(exponentials)).numpy()
    stable = functional.softmax(scores).numpy()
    numbers = {
        "shifted_scores": scores.numpy(),
        "shifted_exponentials": exponentials.numpy(),
        "naive_softmax": naive,
        "stable_softmax": stable,
    }
    rows = [
        (f"[bold cyan]{token}[/]", f"{score:.3f}", f"{exponential:.3g}", f"{lost:.3g}", f"{kept:.1%}")
        for token, score, exponential, lost, kept in zip(TOKENS, *numbers.values(), strict=True)
    ]
    print_columns(output, ("key", "score", "e^score", "naive softmax", "ours"), rows, "lrrrr")
    point(
        output,
        f"The naive softmax, e^score / sum of e^score, has lost {np.sum(np.isnan(naive))} of "
        f"{len(TOKENS)} weights: infinity / infinity is not a number (nan).",
    )
    difference = np.max(np.abs(stable - stages.weights[CAT]))
    point(
        output,
        "Ours subtracts the maximum first, so that no exponent is above 0. It differs from the weights "
        f"in 4 by at most {difference:.0e}; float32 holds such scores in steps of "
        f"{np.spacing(np.max(scores)):.0e}.",
    )
    return numbers


def learn(output, layer, stages, steps, compiled):
    section(
        output,
        "7. Learning: the gradient passes through the softmax",
        "The loss is the mean squared distance from a target. A step changes each matrix by "
        f"-{LEARNING_RATE:g} times its gradient, which a GradientTape finds.",
    )
    kernels = {"w_q": layer.query_kernel, "w_k": layer.key_kernel, "w_v": layer.value_kernel}

    @compiled
    def loss_and_gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(X[None]) - TARGET))
        return loss, tape.gradient(loss, kernels)

    loss, gradients = loss_and_gradients()
    norms = {name: float(tf.norm(gradient)) for name, gradient in gradients.items()}
    numbers = {"target": TARGET, "learning_rate": LEARNING_RATE, "loss_before": float(loss)}
    for name, gradient in gradients.items():
        numbers |= {
            f"grad_{name}": gradient.numpy(),
            f"grad_{name}_l2": norms[name],
            f"new_{name}": None,
        }
    rows = [(f"[bold cyan]{name.upper()}[/]", f"{norm:.6f}") for name, norm in norms.items()]
    print_columns(output, ("matrix", "norm of its gradient"), rows, "lr")
    ratio = norms["w_v"] / norms["w_q"]
    point(output, f"All three get a gradient; that of W_V is {ratio:.1f} times as long as that of W_Q.")

    losses = [float(loss)]
    for step in range(steps):
        for name, kernel in kernels.items():
            kernel.assign_sub(LEARNING_RATE * gradients[name])
            if step == 0:
                numbers[f"new_{name}"] = kernel.numpy()
        loss, gradients = loss_and_gradients()
        losses.append(float(loss))
    print_losses(output, losses, number="{:.6f}")
    after = compiled(layer.trace)(X[None]).weights[0, 0].numpy()
    if steps == 0:
        point(output, "No step was taken (--steps 0).")
    else:
        falls = np.sum(np.diff(losses) < 0)
        point(
            output,
            f"The loss fell from {losses[0]:.6f} to {losses[-1]:.6f} "
            f"({losses[-1] / losses[0] - 1:+.1%}); it fell in {falls} of {steps} steps.",
        )
        before, now = stages.weights[CAT], after[CAT]
        point(
            output,
            f"Who looks at whom has moved: 'cat' gave 'The' {before[THE]:.2%} and 'sat' "
            f"{before[SAT]:.2%}, and now gives them {now[THE]:.2%} and {now[SAT]:.2%}.",
        )
    after_1_step = losses[1] if steps else None
    return numbers | {"losses": losses, "loss_after_1_step": after_1_step, "weights_after": after}


def sum_of_products(product, left, right):
    return " + ".join(product.format(*pair) for pair in zip(left, right, strict=True))


if __name__ == "__main__":
    run(main)

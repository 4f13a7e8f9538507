"""Lesson 17: a cache of keys and values, so that nothing is computed twice.

python scripts/lesson_17_kv_cache.py
python scripts/lesson_17_kv_cache.py --steps 200 --plot cache.png
"""

import argparse
import math
import statistics
import time

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

    from keras_tinyattn import ByteTokenizer, gpt, sample, stream
    from keras_tinyattn.plotting import plot_cached_steps

SEQUENCE_LENGTH = 256
HIDDEN_DIM, NUM_HEADS, NUM_LAYERS = 256, 4, 2
# Each loop runs so often, and the fastest time of a step counts: other work on the machine only adds.
REPEATS = 3
WITHOUT, WITH = "without a cache", "with a cache"
# Prompts that share a batch.
LENGTHS = (2, 5, 9)
BATCH_STEPS = 4
# Standard deviation of the numbers that take the place of keys and values.
GARBAGE = 1e6


def main(argv=None):
    arguments = parse_arguments(argv)
    prompt = ByteTokenizer().encode(arguments.prompt)
    check_count("The number of bytes in --prompt", len(prompt), 1, SEQUENCE_LENGTH - 1)
    check_count("--steps", arguments.steps, 1, SEQUENCE_LENGTH - len(prompt))
    check_count("--seed", arguments.seed, at_most=2**31 - 1)
    if not (math.isfinite(arguments.temperature) and arguments.temperature >= 0):
        raise ValueError(
            f"--temperature must be finite and 0 or more, but {arguments.temperature} was received."
        )
    check_picture("--plot", arguments.plot)
    check_file("--json", arguments.json)
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    numbers = compute(prompt, arguments.steps, arguments.temperature, arguments.seed)
    output = console()
    tell(numbers, output)
    write_picture(output, arguments.plot, lambda part: draw(numbers).savefig(part))
    write_numbers(output, arguments.json, numbers)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Generation with and without a cache of keys and values: the same tokens, and the "
        "work counted, timed and drawn."
    )
    parser.add_argument(
        "--prompt",
        default="The cat sat",
        metavar="TEXT",
        help=f'what to continue, 1 to {SEQUENCE_LENGTH - 1} bytes (default "The cat sat")',
    )
    parser.add_argument("--steps", type=int, default=96, metavar="N", help="tokens to add (default 96)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="how tokens are drawn; 0 takes the likeliest (default 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=17, metavar="N", help="seed of weights and draws (default 17)"
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw the keys that each step computes, and what they cost"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    return parser.parse_args(argv)


def compute(prompt, steps, temperature, seed):
    """The lesson's numbers by name; nothing is printed."""
    model = make_model(seed)
    window, step = make_functions(model)
    draw_token = make_draw(temperature, seed)
    # The first call of a graph is slow, since it is made then.
    write_with_cache(model, step, prompt, 1, draw_token)
    write_without_cache(window, prompt, 1, draw_token)
    without, with_cache = [], []
    for _ in range(REPEATS):
        without.append(write_without_cache(window, prompt, steps, draw_token))
        with_cache.append(write_with_cache(model, step, prompt, steps, draw_token))
    runs = {WITHOUT: without, WITH: with_cache}
    token_ids, logits = without[0]["ids"], without[0]["logits"]
    cached_ids, cache = with_cache[0]["ids"], with_cache[0]["cache"]
    settings = {"temperature": temperature, "seed": seed}
    other_start = np.array([[(token_ids[0] + 1) % model.vocabulary_size, *token_ids[1:-1]]])
    return {
        "seed": seed,
        "temperature": temperature,
        "device": ran_on(window(tf.constant([prompt]))),
        "sizes": {
            "vocabulary_size": model.vocabulary_size,
            "sequence_length": model.sequence_length,
            "hidden_dim": HIDDEN_DIM,
            "num_heads": NUM_HEADS,
            "num_layers": NUM_LAYERS,
            "parameters": model.count_params(),
        },
        "prompt_ids": list(prompt),
        "steps": steps,
        "ids": {WITHOUT: token_ids, WITH: cached_ids},
        "ids_repeat": all(run["ids"] == ways[0]["ids"] for ways in runs.values() for run in ways),
        "generated": model.generate(prompt, steps, jit_compile=False, **settings).token_ids.tolist(),
        "streamed": [*prompt, *stream(model, prompt, steps, **settings)],
        "largest_logit": float(np.max(np.abs(logits))),
        "difference_of_logits": float(np.max(np.abs(logits - with_cache[0]["logits"]))),
        "change_by_first_token": float(
            np.max(np.abs(window(tf.constant(other_start, tf.int32)).numpy()[0] - logits[-1]))
        ),
        "work": count_work(
            model,
            {name: ways[0]["computed"] for name, ways in runs.items()},
            slots=cache[0][0].shape[2],
        ),
        "milliseconds": {
            name: np.min([run["milliseconds"] for run in ways], axis=0).tolist()
            for name, ways in runs.items()
        },
        "cache": look_into(model, cache, token_ids),
        "batch": share_a_batch(model, window, step, temperature, seed),
    }


def make_model(seed):
    """A model of random weights, large enough to tell tokens and places apart."""
    keras.utils.set_random_seed(seed)
    model = gpt(ByteTokenizer().vocabulary_size, SEQUENCE_LENGTH, HIDDEN_DIM, NUM_HEADS, NUM_LAYERS)
    model.build((None, None))
    for variable in model.trainable_variables:
        # As they start, near zero, hardly anything that a model reads would change what it says.
        if len(variable.shape) == 2:
            variable.assign(5.0 * variable)
    return model


def make_functions(model):
    """Two graphs, for texts of every length: (B, T) ids to the last logits (B, V).

    The second takes the positions of its ids and a cache, and gives the new cache as well.
    """
    ids, positions = tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, None), tf.int32)
    cache = tf.nest.map_structure(
        lambda part: tf.TensorSpec((None, part.shape[1], None, part.shape[3]), part.dtype),
        model.make_cache(1, 1),
    )

    def window(token_ids):
        return model(token_ids)[:, -1]

    def step(token_ids, positions, cache):
        logits, cache = model(token_ids, positions=positions, cache=cache)
        return logits[:, -1], cache

    return (
        tf.function(window, input_signature=[ids], autograph=False),
        tf.function(step, input_signature=[ids, positions, cache], autograph=False),
    )


def make_draw(temperature, seed):
    """A function from the logits (B, V) and the position of the next token to its id, (B,)."""

    def draw_token(logits, position):
        return sample(logits, temperature, seed=seed, position=position).numpy()

    return draw_token


def write_without_cache(window, prompt, steps, draw_token):
    """The loop that reads all of the text in each step.

    Returns:
        A dictionary: `ids`; and for each step `logits` `(steps, V)`, `milliseconds`, and how many
        positions it `computed`.
    """
    token_ids, logits, times, computed = list(prompt), [], [], []
    for _ in range(steps):
        inputs = tf.constant([token_ids])
        start = time.perf_counter()
        logits.append(window(inputs).numpy()[0])
        times.append(1000 * (time.perf_counter() - start))
        computed.append(inputs.shape[1])
        token_ids.append(int(draw_token(logits[-1:], len(token_ids))[0]))
    found = {"ids": token_ids, "logits": np.array(logits)}
    return found | {"milliseconds": times, "computed": computed}


def write_with_cache(model, step, prompt, steps, draw_token):
    """The loop that reads what is new: what `write_without_cache` returns, and the `cache`."""
    token_ids, logits, times, computed = list(prompt), [], [], []
    cache = model.make_cache(batch_size=1, length=len(prompt) + steps)
    start_of_new = 0
    for _ in range(steps):
        inputs = tf.constant([token_ids[start_of_new:]])
        positions = tf.range(start_of_new, len(token_ids))[None]
        start = time.perf_counter()
        last, cache = step(inputs, positions, cache)
        logits.append(last.numpy()[0])
        times.append(1000 * (time.perf_counter() - start))
        computed.append(inputs.shape[1])
        start_of_new = len(token_ids)
        token_ids.append(int(draw_token(logits[-1:], len(token_ids))[0]))
    found = {"ids": token_ids, "logits": np.array(logits)}
    return found | {"milliseconds": times, "computed": computed, "cache": cache}


def count_work(model, computed, slots):
    """Keys and multiply-adds of each step, and some of the steps counted in their graphs.

    Args:
        model: the model.
        computed: for each way to write, how many positions each step computed.
        slots: of the cache.
    """
    steps = len(computed[WITH])
    # A step reads all slots of the cache, and the mask hides those behind its own.
    keys = {WITHOUT: computed[WITHOUT], WITH: [slots] * steps}
    counted = []
    for index in sorted({0, steps // 2, steps - 1}):
        for name in (WITHOUT, WITH):
            positions, read = computed[name][index], keys[name][index]
            counted.append(
                {
                    "step": index + 1,
                    "way": name,
                    "formula": multiply_adds(model, positions, read),
                    "graph": multiply_adds_in_graph(model, positions, read if name == WITH else None),
                }
            )
    return {
        "slots": slots,
        "computed": computed,
        "keys": keys,
        "multiply_adds": {
            name: [multiply_adds(model, *pair) for pair in zip(computed[name], keys[name], strict=True)]
            for name in (WITHOUT, WITH)
        },
        "counted": counted,
    }


def multiply_adds(model, positions, keys):
    """How many products of two numbers a forward pass adds up, by formula.

    Args:
        model: a `gpt`.
        positions: how many positions it computes.
        keys: how many keys each of them meets, masked ones included.
    """
    hidden_dim = model.embedding.hidden_dim
    each = hidden_dim * model.vocabulary_size
    for block in model.blocks:
        each += 4 * hidden_dim**2  # queries, keys, values, output
        each += 2 * keys * hidden_dim  # scores, and weights times values
        each += 2 * hidden_dim * block.intermediate_dim
    return positions * each


def multiply_adds_in_graph(model, positions, slots):
    """The same from the shapes of the matrix products in the graph of one step; slots of the cache."""
    # With the weights, a window is one matrix, as the formula has it, and not strips of one.
    arguments = {"return_attention_scores": True}
    if slots is not None:
        arguments |= {"positions": tf.range(positions), "cache": model.make_cache(1, slots)}
    graph = (
        tf.function(lambda ids: model(ids, **arguments), autograph=False)
        .get_concrete_function(tf.TensorSpec((1, positions), tf.int32))
        .graph
    )
    total = 0
    for operation in graph.get_operations():
        if operation.type == "MatMul":
            across = operation.get_attr("transpose_a")
        elif operation.type.startswith("BatchMatMul"):
            across = operation.get_attr("adj_x")
        else:
            continue
        total += (
            operation.outputs[0].shape.num_elements() * operation.inputs[0].shape[-2 if across else -1]
        )
    return total


def look_into(model, cache, token_ids):
    """What the cache of a finished text holds."""
    parts = tf.nest.flatten(cache)
    block, (keys, _) = model.blocks[0], cache[0]
    written = len(token_ids) - 1
    x = block.attention_norm(model.embedding(tf.constant([token_ids[:-1]])))
    trace = block.attention.trace(x)
    size = sum(part.numpy().nbytes for part in parts)
    return {
        "tensors": len(parts),
        "shape": list(keys.shape),
        "written": written,
        "largest_behind": float(max(np.max(np.abs(part.numpy()[:, :, written:])) for part in parts)),
        "difference_of_keys": float(np.max(np.abs(trace.keys.numpy() - keys.numpy()[:, :, :written]))),
        "bytes": size,
        "bytes_by_formula": 2 * NUM_LAYERS * keys.shape[2] * HIDDEN_DIM * keys.dtype.size,
        "bytes_of_weights": sum(weight.numpy().nbytes for weight in model.weights),
    }


def share_a_batch(model, window, step, temperature, seed):
    """Prompts of unequal length in one batch, and what the slots behind a prompt are good for."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, model.vocabulary_size, length).tolist() for length in LENGTHS]
    draw_token = make_draw(temperature, seed)
    alone = [write_without_cache(window, prompt, BATCH_STEPS, draw_token) for prompt in prompts]
    shape = model.make_cache(len(prompts), max(LENGTHS) + BATCH_STEPS)[0][0].shape
    behind = ~tf.sequence_mask(LENGTHS, shape[2])[:, None, :, None]
    first = tf.range(shape[2])[None, None, :, None] == 0

    def garbage_where(places):
        def spoil(cache):
            return tf.nest.map_structure(
                lambda part: tf.where(
                    places, tf.constant(random.normal(0.0, GARBAGE, part.shape), part.dtype), part
                ),
                cache,
            )

        return spoil

    ids, logits, weights = write_batch(model, step, prompts, draw_token)
    spoiled = write_batch(model, step, prompts, draw_token, garbage_where(behind))
    control = write_batch(model, step, prompts, draw_token, garbage_where(first))
    # Behind the slot that the first cached step writes, up to the widest prompt: keys of padding.
    stale = [max(0, max(LENGTHS) - length - 1) for length in LENGTHS]
    unseen = np.arange(shape[2])[None, :] > np.array(LENGTHS)[:, None]
    return {
        "lengths": list(LENGTHS),
        "slots": shape[2],
        "stale": stale,
        "ids": ids.tolist(),
        "ids_alone": [run["ids"][len(prompt) :] for run, prompt in zip(alone, prompts, strict=True)],
        "difference_of_logits": float(
            np.max(np.abs(logits - np.stack([run["logits"] for run in alone], axis=1)))
        ),
        "generated": [
            row[length : length + BATCH_STEPS].tolist()
            for row, length in zip(
                model.generate(
                    prompts, BATCH_STEPS, temperature=temperature, seed=seed, jit_compile=False
                ).token_ids,
                LENGTHS,
                strict=True,
            )
        ],
        "weight_on_unseen": float(max(np.max(part[unseen]) for part in weights)),
        "least_weight_on_seen": float(min(np.min(part[~unseen]) for part in weights)),
        "change_by_garbage": float(np.max(np.abs(spoiled[1] - logits))),
        "ids_with_garbage": spoiled[0].tolist(),
        "change_by_garbage_in_sight": float(np.max(np.abs(control[1][1:] - logits[1:]))),
    }


def write_batch(model, step, prompts, draw_token, spoil=None):
    """Continue prompts in one batch, padded on the right, each at its own position.

    Args:
        model: the model.
        step: the cached step of `make_functions`.
        prompts: B lists of ids.
        draw_token: what `make_draw` gives.
        spoil: a function from the cache, when the prompts are in it, to another.

    Returns:
        Arrays: new ids `(B, steps)`, their logits `(steps, B, V)`, and of each block the weights of the
        first cached step, `(B, S, H)`.
    """
    lengths = np.array([len(prompt) for prompt in prompts], "int32")
    width = max(lengths)
    padded = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts], "int32")
    cache = model.make_cache(len(prompts), width + BATCH_STEPS)
    window, cache = model(tf.constant(padded), positions=tf.range(width), cache=cache)
    cache = cache if spoil is None else spoil(cache)
    logits = [window.numpy()[np.arange(len(prompts)), lengths - 1]]
    ids, positions = [draw_token(logits[0], lengths)], lengths
    _, weights, _ = model(
        tf.constant(ids[0][:, None]),
        positions=tf.constant(positions[:, None]),
        cache=cache,
        return_attention_scores=True,
    )
    for _ in range(BATCH_STEPS - 1):
        last, cache = step(tf.constant(ids[-1][:, None]), tf.constant(positions[:, None]), cache)
        positions = positions + 1
        logits.append(last.numpy())
        ids.append(draw_token(logits[-1], positions))
    return (
        np.stack(ids, axis=1),
        np.stack(logits),
        [np.moveaxis(part.numpy()[:, :, 0], 1, 2) for part in weights],
    )


def draw(numbers):
    work = numbers["work"]
    last = np.array(work["computed"][WITHOUT])[:, None]  # (N, 1): the length of the text in step n.
    place = np.arange(work["slots"] - 1)[None]
    computed = {
        name: (place < last) & (place >= last - np.array(work["computed"][name])[:, None])
        for name in (WITHOUT, WITH)
    }
    held = {
        WITHOUT: np.zeros_like(computed[WITHOUT]),
        WITH: (place < last) & ~computed[WITH],
    }
    totals = {name: int(np.sum(cells)) for name, cells in computed.items()}
    return plot_cached_steps(
        computed,
        held,
        {
            "Multiply-adds a step, in millions": {
                name: np.array(work["multiply_adds"][name]) / 1e6 for name in computed
            },
            f"Milliseconds a step, the fastest of {REPEATS}": numbers["milliseconds"],
        },
        title=f"Keys computed in {numbers['steps']} steps: {totals[WITHOUT]} and {totals[WITH]}",
    )


def tell(numbers, output):
    """Print the lesson; each sentence about a number is made from that number."""
    sizes, steps = numbers["sizes"], numbers["steps"]
    output.print("[bold cyan]Lesson 17: a cache of keys and values[/]")
    output.print(
        "A position never sees what comes after it, so its key and its value stay what they are when "
        "the text grows. Whoever keeps them need not compute them again."
    )
    output.print(
        f"\nThe model: {sizes['num_layers']} blocks of width {sizes['hidden_dim']} with "
        f"{sizes['num_heads']} heads, {sizes['parameters']:,} weights, on {numbers['device']}. They "
        "are random: what it writes is noise, what it costs is not."
    )
    tell_work(numbers, output)
    tell_sameness(numbers, output)
    tell_time(numbers, output)
    tell_cache(numbers, output)
    tell_batch(numbers, output)
    tell_stale(numbers, output)

    work, ids = numbers["work"], numbers["ids"]
    totals = {name: sum(work["multiply_adds"][name]) for name in ids}
    section(
        output,
        "The point",
        f"For {steps} new token{'s' * (steps > 1)} the loop without a cache made "
        f"{totals[WITHOUT] / totals[WITH]:.1f} times as many multiply-adds as the one with it, and "
        "wrote "
        + ("the same ids" if ids[WITHOUT] == ids[WITH] else "other ids")
        + f"; the logits differ by {numbers['difference_of_logits']:.1g}. The price is memory: "
        f"{numbers['cache']['bytes'] / 1024:.0f} KiB.",
    )


def tell_work(numbers, output):
    work, steps = numbers["work"], numbers["steps"]
    length = len(numbers["prompt_ids"])
    section(
        output,
        "1. The work, counted",
        f"A prompt of {length} token{'s' * (length > 1)}, {steps} more to write. Without a cache each "
        "step runs the whole text through the model; with one it runs what is new, and reads the keys "
        "and values of the rest.",
    )
    shown = sorted({round(1 + (steps - 1) * index / 7) for index in range(8)})
    rows = [
        (
            str(step),
            *(f"{work['computed'][name][step - 1]}" for name in (WITHOUT, WITH)),
            *(f"{work['multiply_adds'][name][step - 1] / 1e6:.2f}" for name in (WITHOUT, WITH)),
        )
        for step in shown
    ]
    totals = {name: sum(work["computed"][name]) for name in (WITHOUT, WITH)}
    sums = {name: sum(work["multiply_adds"][name]) for name in (WITHOUT, WITH)}
    rows.append(
        ("[bold]all[/]", *map(str, totals.values()), *(f"{total / 1e6:.2f}" for total in sums.values()))
    )
    print_columns(
        output,
        ("step", "positions", "with cache", "million multiply-adds", "with cache"),
        rows,
        "rrrrr",
    )
    last = length + steps - 1
    closed = steps * (length + last) // 2
    point(
        output,
        f"Positions computed: {totals[WITHOUT]}, {steps} x ({length} + {last}) / 2 = {closed}, since "
        f"each step reads one more; and {totals[WITH]}, the prompt's {length} and one a step, "
        f"{length} + {steps - 1} = {last}"
        + ("." if totals == {WITHOUT: closed, WITH: last} else ": not what was computed."),
    )
    counted = work["counted"]
    right = sum(entry["formula"] == entry["graph"] for entry in counted)
    point(
        output,
        "A block of width D costs a position 4 D D + 2 D 4D, and 2 D for each key; the projection D V. "
        "Counted from the shapes of all matrix products in TensorFlow's graph instead, "
        f"{right} of {len(counted)} numbers (steps "
        + ", ".join(str(step) for step in sorted({entry["step"] for entry in counted}))
        + ", both ways) are the same.",
    )
    if steps > 1:
        later = work["multiply_adds"][WITH][1:]
        point(
            output,
            f"The first step with a cache reads the prompt. Each later one costs "
            f"{min(later) / 1e6:.2f} million"
            + (
                f": it meets all {work['slots']} slots of the cache, and the mask hides the empty ones."
                if min(later) == max(later)
                else f" to {max(later) / 1e6:.2f} million."
            ),
        )


def tell_sameness(numbers, output):
    ids, prompt_length = numbers["ids"], len(numbers["prompt_ids"])
    new = ids[WITHOUT][prompt_length:]
    how = f"at temperature {numbers['temperature']:g}" if numbers["temperature"] else "the likeliest"
    section(
        output,
        "2. The same tokens",
        f"Each is drawn {how}, seed {numbers['seed']}: {shorten(new)}.",
    )
    same = sum(a == b for a, b in zip(new, ids[WITH][prompt_length:], strict=True))
    point(
        output,
        f"{same} of {len(new)} ids are the same with and without a cache. The largest difference of "
        f"their logits is {numbers['difference_of_logits']:.1g}, where logits reach "
        f"{numbers['largest_logit']:.1f}"
        + (": rounding." if numbers["difference_of_logits"] < 1e-4 * numbers["largest_logit"] else "."),
    )
    point(
        output,
        f"Put another token in the first place, and the last logits change by up to "
        f"{numbers['change_by_first_token']:.2g}"
        + (
            ": the past matters, and with a cache only its keys and values bring it along."
            if numbers["change_by_first_token"] > 10 * numbers["difference_of_logits"]
            else "."
        ),
    )
    found = {name: numbers[name] == ids[WITH] for name in ("generated", "streamed")}
    point(
        output,
        "model.generate, the cached loop as one graph, gives "
        f"{'the same' if found['generated'] else 'other'} ids; stream, which hands out each token at "
        f"once, {'the same' if found['streamed'] else 'others'}.",
    )


def tell_time(numbers, output):
    times, steps = numbers["milliseconds"], numbers["steps"]
    section(
        output,
        "3. The work, timed",
        f"Wall-clock time of each step on this machine, now, with whatever else it is doing; of "
        f"{REPEATS} runs the fastest.",
    )
    # Without the first step, which reads the prompt both ways.
    later = {name: values[1:] or values for name, values in times.items()}
    quarter = max(1, len(later[WITH]) // 4)
    ends = {
        name: (statistics.median(values[:quarter]), statistics.median(values[-quarter:]))
        for name, values in later.items()
    }
    print_columns(
        output,
        ("median of a step, ms", "first quarter", "last quarter", "last : first", "all steps"),
        [
            (
                f"[bold cyan]{name}[/]",
                *(f"{value:.2f}" for value in ends[name]),
                f"{ends[name][1] / ends[name][0]:.2f}",
                f"{sum(times[name]):.0f}",
            )
            for name in (WITHOUT, WITH)
        ],
        "lrrrr",
    )
    totals = {name: sum(values) for name, values in times.items()}
    work = {name: sum(numbers["work"]["multiply_adds"][name]) for name in totals}
    point(
        output,
        f"All {steps} steps took {totals[WITHOUT]:.0f} ms without and {totals[WITH]:.0f} ms with a "
        f"cache, {totals[WITHOUT] / totals[WITH]:.1f} to 1; multiply-adds were "
        f"{work[WITHOUT] / work[WITH]:.1f} to 1. A step also has costs that do not depend on its size, "
        "such as starting each operation.",
    )


def tell_cache(numbers, output):
    cache, sizes = numbers["cache"], numbers["sizes"]
    batch, heads, slots, head_dim = cache["shape"]
    section(
        output,
        "4. What the cache holds",
        f"For each of {sizes['num_layers']} blocks the keys and the values, {cache['tensors']} tensors "
        f"of shape (B, H, S, K) = ({batch}, {heads}, {slots}, {head_dim}): no queries, since only the "
        "newest position asks.",
    )
    size = cache["bytes_by_formula"] // (2 * sizes["num_layers"] * slots * sizes["hidden_dim"])
    same = "" if cache["bytes"] == cache["bytes_by_formula"] else " (not what the tensors take)"
    each = cache["bytes"] / slots
    point(
        output,
        f"{cache['bytes']:,} bytes: 2 x {sizes['num_layers']} blocks x {slots} slots x width "
        f"{sizes['hidden_dim']} x {size} bytes ="
        f" {cache['bytes_by_formula']:,}{same}.",
    )
    point(
        output,
        f"That is {each:,.0f} bytes a position. The weights take {cache['bytes_of_weights']:,}, as "
        f"much as the cache of {cache['bytes_of_weights'] / each:,.0f} positions, of one text or of "
        "many.",
    )
    point(
        output,
        f"Compute the keys of the first block for the whole text anew: they differ from those in the "
        f"cache by at most {cache['difference_of_keys']:.1g}.",
    )
    empty = slots - cache["written"]
    point(
        output,
        f"{cache['written']} of {slots} slots are written; nobody has read the last token yet. The "
        f"largest number in the other{'s' * (empty > 1)} is {cache['largest_behind']:g}.",
    )


def tell_batch(numbers, output):
    batch = numbers["batch"]
    section(
        output,
        "5. A batch of unequal prompts",
        "Padded on the right, they go into the cache together, and the padding with them. Then each "
        "row goes on at its own position: the slot it writes is the slot of that position. The first "
        "such step, slot by slot:",
    )
    rows = [
        (f"[bold cyan]{length}[/]", str(length), map_of_slots(length, stale, batch["slots"]))
        for length, stale in zip(batch["lengths"], batch["stale"], strict=True)
    ]
    print_columns(output, ("prompt", "writes slot", "slots"), rows, "rrl")
    output.print("    # seen   + written, then seen   x stale   . empty")
    rows_same = sum(a == b for a, b in zip(batch["ids"], batch["ids_alone"], strict=True))
    generated_same = sum(a == b for a, b in zip(batch["generated"], batch["ids_alone"], strict=True))
    point(
        output,
        f"{rows_same} of {len(batch['ids'])} rows write the same {len(batch['ids'][0])} ids as alone "
        f"and without a cache; the logits differ by at most {batch['difference_of_logits']:.1g}. "
        f"model.generate with the whole batch: {generated_same} of {len(batch['ids'])}.",
    )


def map_of_slots(length, stale, slots):
    """One row's cache in the first step after a prompt: a sign for each slot."""
    return ("#" * length + "+" + "x" * stale).ljust(slots, ".")


def tell_stale(numbers, output):
    batch = numbers["batch"]
    stale = sum(batch["stale"])
    section(
        output,
        "6. A stale slot",
        f"{stale} slots still hold keys and values of padding. No one clears them: a position sees "
        "slots up to its own, and by then the token that belongs there has been written.",
    )
    point(
        output,
        f"The largest weight on a slot behind a row's position is {batch['weight_on_unseen']:g}"
        + (", exactly" if batch["weight_on_unseen"] == 0 else "")
        + f"; the smallest on a slot in sight is {batch['least_weight_on_seen']:.1g}.",
    )
    change = batch["change_by_garbage"]
    same = batch["ids_with_garbage"] == batch["ids"]
    point(
        output,
        f"Fill every slot behind the prompts with random numbers of size {GARBAGE:,.0f}: the logits of "
        f"the next {len(batch['ids'][0])} tokens change by at most {change:g}, and the ids are "
        f"{'the same' if same else 'others'}. "
        + ("The mask hides them." if change == 0 else "So something looks at them."),
    )
    point(
        output,
        "Fill the first slot, which is in sight, and they change by up to "
        f"{batch['change_by_garbage_in_sight']:.2g}.",
    )


def shorten(ids):
    """Some ids, and how many more there are."""
    shown = ", ".join(map(str, ids[:12]))
    return shown + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")


if __name__ == "__main__":
    run(main)

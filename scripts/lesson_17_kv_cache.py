"""Lesson 17: a cache of keys and values, so that nothing is computed twice.

python scripts/lesson_17_kv_cache.py
python scripts/lesson_17_kv_cache.py --steps 200 --plot cache.png
"""

import math
import time

import numpy as np
from _page import point, print_columns, section
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
    import keras
    import tensorflow as tf

    from keras_tinyattn import ByteTokenizer, gpt, plot_cached_steps, sample, stream

SIZES = {"sequence_length": 256, "hidden_dim": 256, "num_heads": 4, "num_layers": 2}
WITHOUT, WITH = "without a cache", "with a cache"
REPEATS = 3  # The fastest time of a step counts: other work on the machine only adds to it.
LENGTHS, GARBAGE = np.array([2, 5, 9]), 1e6


def main(argv=None):
    options, prompt = parse_options(argv)
    settings = {"temperature": options.temperature, "seed": options.seed}
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    model = make_model(options.seed)

    @tf.function(reduce_retracing=True)
    def window(token_ids):  # (B, T) to (B, V): the logits of the next token
        return model(token_ids)[:, -1]

    @tf.function(reduce_retracing=True)
    def step(token_ids, positions, cache):  # the same, and the new cache
        logits, cache = model(token_ids, cache=cache, positions=positions)
        return logits[:, -1], cache

    def choose(logits, position):  # (B, V) to (B,): the next token id
        return sample(logits, **settings, position=position).numpy()

    output, device = console(), ran_on(window(tf.constant([prompt])))
    sizes = SIZES | {"vocabulary_size": model.vocabulary_size, "parameters": model.count_params()}
    output.print(
        "[bold cyan]Lesson 17: a cache of keys and values[/]\nA position never sees what comes after "
        "it, so its key and its value do not change when the text grows. Keep them, and they need not "
        f"be computed again.\n\nThe model: {sizes['num_layers']} blocks of width {sizes['hidden_dim']} "
        f"with {sizes['num_heads']} heads, {sizes['parameters']:,} weights, on {device}. They are "
        "random: what it writes is noise, what it costs is not."
    )
    runs = []
    for _ in range(REPEATS):
        cache = model.make_cache(batch_size=1, length=len(prompt) + options.steps)
        without_cache = write_without_cache(window, prompt, options.steps, choose)
        with_cache = write_with_cache(step, cache, prompt, options.steps, choose)
        runs.append({WITHOUT: without_cache, WITH: with_cache})
    ids, logits, computed = ({way: runs[0][way][part] for way in runs[0]} for part in range(3))
    times = {way: np.min([both[way][3] for both in runs], axis=0) for way in runs[0]}
    numbers = settings | {"device": device, "sizes": sizes, "prompt_ids": prompt, "milliseconds": times}
    numbers |= {"steps": options.steps, "work": the_work(output, model, computed, times)}
    numbers |= the_tokens(output, model, prompt, settings, ids, logits)
    numbers["cache"] = the_cache(output, model, with_cache[4], ids[WITH])
    numbers["batch"] = the_batch(output, model, options.seed, choose)

    without, cached = (sum(made) for made in numbers["work"]["multiply_adds"].values())
    size = numbers["cache"]["bytes"]
    section(
        output,
        "The point",
        f"The loop without a cache made {without / cached:.1f} times as many multiply-adds as the one "
        f"with it, and wrote the same tokens. The price is memory: {size / 1024:.0f} KiB.",
    )
    write_picture(output, options.plot, lambda path: draw(numbers["work"], times).savefig(path))
    write_numbers(output, options.json, numbers)


def parse_options(argv):
    """The options, and the ids of the prompt."""
    parser = lesson_parser(
        "Generation with and without a cache of keys and values: the same tokens, and what they cost.",
        plot="draw the keys that each step computes, and what they cost",
    )
    add = parser.add_argument
    add("--prompt", default="The cat sat", help='1 to 255 bytes to continue (default "The cat sat")')
    add("--steps", type=int, default=96, metavar="N", help="tokens to add (default 96)")
    add("--temperature", type=float, default=1.0, help="of sampling; 0 takes the likeliest (default 1)")
    add("--seed", type=int, default=17, metavar="N", help="seed of weights and samples (default 17)")
    options = parse_lesson(parser, argv)
    prompt = ByteTokenizer().encode(options.prompt)
    check_count("The number of bytes in --prompt", len(prompt), 1, SIZES["sequence_length"] - 1)
    check_count("--steps", options.steps, 1, SIZES["sequence_length"] - len(prompt))
    check_count("--seed", options.seed, at_most=2**31 - 1)
    if not 0 <= options.temperature < math.inf:
        received = options.temperature
        raise ValueError(f"--temperature must be finite and 0 or more, but {received} was received.")
    return options, list(prompt)


def make_model(seed):
    keras.utils.set_random_seed(seed)
    model = gpt(ByteTokenizer().vocabulary_size, **SIZES)
    model.build((None, None))
    # As they start, near zero, hardly anything that a model reads would change its logits.
    for matrix in [variable for variable in model.trainable_variables if len(variable.shape) == 2]:
        matrix.assign(5.0 * matrix)
    return model


def write_without_cache(window, prompt, steps, choose):
    """Read the whole text at each step: ids; logits, positions computed, milliseconds per step."""
    token_ids, log = list(prompt), []
    for _ in range(steps):
        start = time.perf_counter()
        logits = window(tf.constant([token_ids])).numpy()
        log.append((logits[0], len(token_ids), 1000 * (time.perf_counter() - start)))
        token_ids.append(int(choose(logits, len(token_ids))[0]))
    return token_ids, *map(np.array, zip(*log, strict=True))


def write_with_cache(step, cache, prompt, steps, choose):
    """Read what is new, the prompt and then one token per step: the same, and the cache."""
    token_ids, new_ids, log = list(prompt), list(prompt), []
    for _ in range(steps):
        start = time.perf_counter()
        positions = tf.range(len(token_ids) - len(new_ids), len(token_ids))[None]
        logits, cache = step(tf.constant([new_ids]), positions, cache)
        log.append((logits.numpy()[0], len(new_ids), 1000 * (time.perf_counter() - start)))
        token_ids.append(int(choose(logits, len(token_ids))[0]))
        new_ids = token_ids[-1:]
    return token_ids, *map(np.array, zip(*log, strict=True)), cache


def multiply_adds(model, positions, keys):
    """How many products a forward pass adds up if each position meets so many keys."""
    D, V = model.embedding.hidden_dim, model.vocabulary_size
    block = 4 * D * D + 2 * D * 4 * D + 2 * D * keys  # projections, MLP, scores and weighted values
    return positions * (len(model.blocks) * block + D * V)


def the_work(output, model, computed, times):
    length, steps, last = computed[WITH][0], len(computed[WITH]), computed[WITHOUT][-1]
    keys = {WITHOUT: computed[WITHOUT], WITH: np.full(steps, last + 1)}
    made = {way: multiply_adds(model, computed[way], keys[way]) for way in keys}
    section(
        output,
        "1. The work, counted and timed",
        "Without a cache a step runs the whole text through the model; cached, only what is new. The "
        f"times are wall-clock times on this machine, the fastest of {REPEATS} runs.",
    )
    costs = np.array([*computed.values(), *made.values(), *times.values()])  # (6, steps)
    costs[2:4] /= 1e6
    shown, totals = sorted({round((steps - 1) * index / 7) for index in range(8)}), costs.sum(axis=1)
    lines = [*((f"{n + 1}", costs[:, n]) for n in shown), ("[bold]all[/]", totals)]
    rows = [
        [step, *(f"{n:.0f}" for n in row[:2]), *(f"{n:.2f}" for n in row[2:])] for step, row in lines
    ]
    names = ["step", "positions", "cached", "million multiply-adds", "cached", "ms", "cached"]
    print_columns(output, names, rows, "r" * len(names))
    point(
        output,
        f"Positions: {steps} x ({length} + {last}) / 2 = {totals[0]:.0f}, since each step reads one "
        f"more; cached {length} + {steps - 1} = {totals[1]:.0f}, the prompt and then one per step.",
    )
    point(
        output,
        "A block of width D costs 4 D D + 2 D 4D per position and 2 D per key that it meets; the "
        f"projection costs D V. A cached step meets all {last + 1} slots; the mask hides empty ones.",
    )
    point(
        output,
        f"Multiply-adds are {totals[2] / totals[3]:.1f} to 1, times {totals[4] / totals[5]:.1f} to 1: "
        "a step also has costs that do not depend on its size, such as starting each operation.",
    )
    return {"slots": last + 1, "computed": computed, "keys": keys, "multiply_adds": made}


def the_tokens(output, model, prompt, settings, both_ids, both_logits):
    (ids, cached_ids), (logits, cached_logits) = both_ids.values(), both_logits.values()
    largest, difference = np.max(np.abs(logits)), np.max(np.abs(logits - cached_logits))
    other_start = tf.constant([[(ids[0] + 1) % model.vocabulary_size, *ids[1:-1]]])
    change = np.max(np.abs(model(other_start)[0, -1] - logits[-1]))
    generated = model.generate(prompt, len(logits), jit_compile=False, **settings).token_ids.tolist()
    streamed = [*prompt, *stream(model, prompt, len(logits), **settings)]
    same = [np.equal(ids, other).sum() - len(prompt) for other in (cached_ids, generated, streamed)]
    section(
        output,
        "2. The same tokens",
        f"The first, at temperature {settings['temperature']:g} with seed {settings['seed']}: "
        f"{', '.join(map(str, ids[len(prompt) :][:12]))}.",
    )
    point(
        output,
        f"With a cache {same[0]} of {len(logits)} are the same, and {same[1]} by model.generate, the "
        f"cached loop as one graph, and {same[2]} by stream, which yields each as soon as it is known.",
    )
    point(
        output,
        f"The logits of both loops differ by at most {difference:.1g}, where they reach {largest:.1f}: "
        "rounding. Put another token in the first place, and the last logits change by up to "
        f"{change:.2g}: the past matters, and with a cache only its keys and values carry it.",
    )
    numbers = {"ids": both_ids, "generated": generated, "streamed": streamed, "largest_logit": largest}
    return numbers | {"difference_of_logits": difference, "change_by_first_token": change}


def the_cache(output, model, cache, ids):
    tensors, written = [part.numpy() for entry in cache for part in entry], len(ids) - 1
    layers, width, slots = len(model.blocks), SIZES["hidden_dim"], tensors[0].shape[2]
    by_formula = 2 * layers * slots * width * tensors[0].itemsize
    size, of_weights = (sum(part.nbytes for part in parts) for parts in (tensors, model.get_weights()))
    first = model.blocks[0]
    trace = first.attention.trace(first.attention_norm(model.embedding(tf.constant([ids[:-1]]))))
    difference = np.max(np.abs(trace.keys - tensors[0][:, :, :written]))
    section(
        output,
        "3. What the cache holds",
        f"For each of {layers} blocks the keys and the values, {len(tensors)} tensors of shape "
        f"(B, H, S, K) = {tensors[0].shape}: no queries, since only the newest position asks.",
    )
    point(
        output,
        f"{size:,} bytes: 2 x {layers} blocks x {slots} slots x width {width} x {tensors[0].itemsize} "
        f"bytes. The weights take {of_weights:,}, as much as {of_weights / size * slots:,.0f} slots.",
    )
    point(
        output,
        "Computed again for the whole text, the keys of the first block differ from those in the cache "
        f"by at most {difference:.1g}. The last slot is empty: no step has read the last token.",
    )
    behind = max(np.max(np.abs(part[:, :, written:])) for part in tensors)
    numbers = {"tensors": len(tensors), "shape": tensors[0].shape, "written": written, "bytes": size}
    numbers |= {"bytes_by_formula": by_formula, "bytes_of_weights": of_weights}
    return numbers | {"difference_of_keys": difference, "largest_behind": behind}


def the_batch(output, model, seed, choose):
    random, slots, width = np.random.default_rng(seed), max(LENGTHS) + 4, max(LENGTHS)
    prompts = [random.integers(0, model.vocabulary_size, length).tolist() for length in LENGTHS]
    padded = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    cache = model.make_cache(len(prompts), slots)
    logits, cache = model(padded, cache=cache, positions=np.arange(width))
    ids = choose(tf.gather(logits, LENGTHS - 1, batch_dims=1), LENGTHS)  # (B,), after each prompt
    logits, _ = model(ids[:, None], cache=cache, positions=LENGTHS[:, None])

    # The same step with garbage in each row's slots behind its prompt, and each row by itself.
    behind = np.arange(slots)[:, None] >= LENGTHS[:, None, None, None]  # (B, 1, S, 1)
    spoiled = [tuple(tf.where(behind, GARBAGE, part) for part in entry) for entry in cache]
    garbled, _ = model(ids[:, None], cache=spoiled, positions=LENGTHS[:, None])
    alone = [model(np.array([[*prompt, new]]))[0, -1] for prompt, new in zip(prompts, ids, strict=True)]
    change, difference = np.max(np.abs(logits - garbled)), np.max(np.abs(logits[:, 0] - alone))
    stale = width - np.minimum(LENGTHS + 1, width)
    section(
        output,
        "4. A batch of unequal prompts",
        "Padded on the right, they go into the cache together, padding and all. Then each row goes on "
        "at its own position, which is also the slot that it writes. The first such step:",
    )
    rows = [[f"{n}", ("#" * n + "+" + "x" * (width - n - 1)).ljust(slots, ".")] for n in LENGTHS]
    print_columns(output, ["prompt", "slots"], rows, "rl")
    output.print("    # seen   + written, then seen   x stale, of padding   . empty")
    point(
        output,
        f"The logits differ by at most {difference:.1g} from those of each prompt alone and uncached.",
    )
    point(
        output,
        "A stale slot needs no clearing: a position sees slots up to its own, and by then its token is "
        f"written. With {GARBAGE:,.0f} in all slots behind the prompts, logits change by {change:g}.",
    )
    numbers = {"lengths": LENGTHS, "slots": slots, "stale": stale, "difference_of_logits": difference}
    return numbers | {"change_by_garbage": change}


def draw(work, times):
    place, steps = np.arange(work["slots"] - 1), len(work["computed"][WITH])
    length = work["computed"][WITHOUT][:, None]  # (N, 1): of the text in each step
    known = place < length
    computed = {WITHOUT: known, WITH: known & (place >= length - work["computed"][WITH][:, None])}
    held = {WITHOUT: known & False, WITH: known & ~computed[WITH]}
    millions = {way: made / 1e6 for way, made in work["multiply_adds"].items()}
    costs = {"Multiply-adds per step, in millions": millions, "Milliseconds per step": times}
    keys = " and ".join(str(cells.sum()) for cells in computed.values())
    return plot_cached_steps(computed, held, costs, f"Keys computed in {steps} steps: {keys}")


if __name__ == "__main__":
    run(main)

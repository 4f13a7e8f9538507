"""Lesson 18: sampling the next word.

python scripts/lesson_18_sampling.py
python scripts/lesson_18_sampling.py --temperature 0.8 --plot sampling.png
"""

import math
import operator

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
    import tensorflow as tf
    from _lesson_15_model import STEPS, VOCABULARY, reference_model, train

    from keras_tinyattn import filter_logits, functional, sample
    from keras_tinyattn.plotting import plot_distributions

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
# How many words a table and the picture show.
SHOWN = 10
TEXTS = 5


def main(argv=None):
    options = read_options(argv)
    model, tokenizer = reference_model()
    prompt = tokenizer.encode(options.prompt)
    check_count("The number of words in --prompt", len(prompt), 1, model.sequence_length)
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    losses = train(model, tokenizer, options.training_steps)
    logits = model(tf.constant([prompt]))[:, -1]  # (1, V)
    # After each word of the vocabulary as a prompt of its own.
    by_prompt = model(tf.range(len(VOCABULARY))[:, None])[:, -1]  # (V, V)
    output = console()
    output.print("[bold cyan]Lesson 18: sampling the next word[/]")
    output.print(
        "A model predicts how likely each word is to come next; one of them has to be chosen. Here the "
        f"model of lesson 15 after {options.training_steps} training steps"
        + (f" (loss {losses[-1]:.2f} at the last)" if losses else "")
        + f", on {ran_on(logits)}."
    )
    section(
        output,
        "1. Temperature: the logits are divided by it",
        f"The most likely words after '{options.prompt}': a low temperature moves their probabilities "
        "apart, a high one moves them together. Below them, how many words can be sampled, how likely "
        "the model finds these together, and the perplexity: how many equally likely words would be as "
        "uncertain.",
    )
    found = distributions(output, logits, "temperature", (0.5, 1.0, 2.0))
    point(output, f"The ranking of the words is the same at all {len(found)} temperatures.")
    greedy = len(set(sample_often(logits, {"temperature": 0.0}, options).tolist()))
    point(output, f"At temperature 0, {options.draws} samples gave {greedy} word, the most likely one.")
    section(output, "2. Top-k: only the k most likely words; they share what the others had")
    found += distributions(output, logits, "top_k", (1, 3, 6))
    section(output, "3. Top-p: from the most likely word down, the fewest that together reach p")
    found += distributions(output, logits, "top_p", (0.5, 0.8, 0.95))
    kept = kept_by_prompt(output, by_prompt, found)
    samples(output, logits, found, options)
    written = texts(output, model, tokenizer, prompt, options)
    section(
        output,
        "The point",
        "The model gives a distribution, temperature, top-k and top-p reshape it, and the seed chooses "
        f"from it. Different texts with {TEXTS} seeds: {len(set(written['texts']))}; and the same seed "
        "gives the same text.",
    )

    probabilities = functional.softmax(logits)[0].numpy()
    chosen = ("prompt", "steps", "seed", "draws", "training_steps")
    numbers = {
        **{name: getattr(options, name) for name in chosen},
        "settings": {name: getattr(options, name) for name in OFF},
        "device": ran_on(logits),
        "vocabulary": VOCABULARY,
        "sequence_length": model.sequence_length,
        "loss_before_last_step": losses[-1] if losses else None,
        "order": np.argsort(-probabilities, kind="stable"),
        "probabilities": probabilities,
        "distributions": found,
        "greedy_tokens": greedy,
        "likeliest_by_prompt": np.max(functional.softmax(by_prompt), axis=-1),
        "kept_by_prompt": kept,
        "texts": written,
    }
    write_picture(output, options.plot, lambda part: draw(numbers).savefig(part))
    write_numbers(output, options.json, numbers)


def read_options(argv):
    parser = lesson_parser(
        "Temperature, top-k and top-p on one distribution, and what is sampled from it.",
        plot="draw temperature, top-k and top-p on one distribution",
    )

    def option(name, default, metavar, text):
        text = f"{text} (default {default})"
        parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=text)

    option("--prompt", "The cat", "TEXT", "what to continue, 1 to 10 words of the vocabulary")
    option("--steps", 6, "N", "words to add at most")
    option("--temperature", 1.0, "X", "temperature of the texts; 0 takes the most likely word")
    option("--top-k", 0, "K", "sample the texts from so many most likely words; 0 is all")
    option("--top-p", 0.9, "P", "sample the texts from the most likely words of this share; 1 is all")
    option("--seed", 18, "N", "seed of the first sample")
    option("--draws", 2000, "N", "how often each distribution is sampled from")
    training = f"training of lesson 15's model; {STEPS} leave little to sample"
    option("--training-steps", STEPS // 4, "N", training)
    options = parse_lesson(parser, argv)
    check_count("--steps", options.steps)
    check_count("--draws", options.draws, 100, 10**6)
    check_count("--training-steps", options.training_steps)
    check_count("--seed", options.seed, at_most=2**31 - 1 - options.draws)
    check_count("--top-k", options.top_k, at_most=2**31 - 1)
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        raise ValueError(
            f"--temperature must be finite and 0 or more, but {options.temperature} was received."
        )
    if not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and up to 1, but {options.top_p} was received.")
    return options


def reshape(logits, setting):
    """The logits that are sampled from, `(B, V)`; -inf for words that the setting leaves out."""
    setting = {**OFF, **setting}
    return filter_logits(logits / setting["temperature"], setting["top_k"], setting["top_p"])


def sample_often(logits, setting, options):
    """One token id for each of `--draws` seeds, from the same logits `(1, V)`."""
    seeds = options.seed + tf.range(options.draws)
    logits = tf.tile(logits, (options.draws, 1))
    return sample(logits, **{**OFF, **setting}, seed=seeds).numpy()


def title(entry):
    ((name, value),) = entry["setting"].items()
    return f"{name.replace('_', '-')} {value:g}"


def distributions(output, logits, name, values):
    """Print the words' probabilities under each value of one setting."""
    model = functional.softmax(logits)[0].numpy().astype("float64")
    columns = []
    for setting in ({}, *({name: value} for value in values)):
        probabilities = functional.softmax(reshape(logits, setting))[0].numpy().astype("float64")
        probabilities /= probabilities.sum()
        kept = probabilities > 0
        entropy = -np.sum(probabilities[kept] * np.log(probabilities[kept]))
        columns.append(
            {
                "setting": setting,
                "probabilities": probabilities,
                "kept": np.sum(kept),
                "share_before": np.sum(model[kept]),
                "as_uncertain_as": np.exp(entropy),
            }
        )

    order = np.argsort(-model, kind="stable")
    words = [(VOCABULARY[index], [index]) for index in order[:SHOWN]]
    words.append((f"{len(order) - SHOWN} others", order[SHOWN:]))
    rows = [
        (word, *(np.sum(column["probabilities"][ids]) for column in columns)) for word, ids in words
    ]
    # A probability that is exactly zero is a dash.
    rows = [(f"[bold cyan]{word}[/]", *(f"{p:.1%}" if p else "-" for p in row)) for word, *row in rows]
    rows += [
        ("", *("" for _ in columns)),
        ("words kept", *(str(column["kept"]) for column in columns)),
        ("their share", *(f"{column['share_before']:.1%}" for column in columns)),
        ("perplexity", *(f"{column['as_uncertain_as']:.1f}" for column in columns)),
    ]
    names = ("word", "model", *(title(column) for column in columns[1:]))
    print_columns(output, names, rows, "l" + "r" * len(columns))
    return columns[1:]


def kept_by_prompt(output, by_prompt, found):
    """How many words top-k and top-p keep after each word of the vocabulary."""
    counts = {
        f"{name} {value:g}": np.sum(np.isfinite(reshape(by_prompt, {name: value})), axis=-1)
        for entry in found
        for name, value in entry["setting"].items()
        if name != "temperature"
    }
    likeliest = np.max(functional.softmax(by_prompt), axis=-1)
    top_p = counts["top_p 0.8"]
    fewest, most = np.argmin(top_p), np.argmax(top_p)
    point(
        output,
        f"With each of the {len(top_p)} words as a prompt, top-k 3 keeps {counts['top_k 3'][0]}. Top-p "
        f"0.8 keeps {top_p[fewest]} after '{VOCABULARY[fewest]}', where the most likely word has "
        f"{likeliest[fewest]:.0%}, and {top_p[most]} after '{VOCABULARY[most]}', where it has "
        f"{likeliest[most]:.0%}.",
    )
    return counts


def samples(output, logits, found, options):
    """Sample from every distribution, and compare the share of its most likely word."""
    section(
        output,
        "4. Sampled as often as predicted?",
        f"{options.draws} samples each, with seeds from {options.seed} on: the share of the most "
        "likely word, its standard deviation, and how many of these it is off:",
    )
    rows = []
    for entry in found:
        tokens = sample_often(logits, entry["setting"], options)
        entry["counts"] = np.bincount(tokens, minlength=len(VOCABULARY))
        entry["drawn_outside"] = np.sum(entry["counts"][entry["probabilities"] == 0])
        best = np.argmax(entry["probabilities"])
        share, expected = entry["counts"][best] / options.draws, entry["probabilities"][best]
        deviation = np.sqrt(expected * (1 - expected) / options.draws)
        entry["deviations_off"] = abs(share - expected) / deviation if deviation else 0.0
        shown = (f"{part:.1%}" for part in (expected, share, deviation))
        rows.append((f"[bold cyan]{title(entry)}[/]", *shown, f"{entry['deviations_off']:.1f}"))
    names = ("setting", "predicted", "sampled", "standard deviation", "off")
    print_columns(output, names, rows, "lrrrr")
    worst = max(entry["deviations_off"] for entry in found)
    point(output, f"At most {worst:.1f} standard deviations off; chance exceeds 3 once in 370 times.")
    outside = sum(entry["drawn_outside"] for entry in found)
    total = options.draws * len(found)
    point(output, f"Words that a setting leaves out: {outside} of {total} samples.")


def texts(output, model, tokenizer, prompt, options):
    """Write texts by seed, and the same texts in other ways."""
    settings = {name: getattr(options, name) for name in OFF} | {"stop": tokenizer.end_id}

    def write(prompts, seeds, new=options.steps):
        found = model.generate(prompts, new, **settings, seed=seeds, jit_compile=False)
        rows = zip(found.token_ids, found.lengths, strict=True)
        return [row[:length].tolist() for row, length in rows], found.finish_reasons

    prompts, seeds = [prompt] * TEXTS, [options.seed + index for index in range(TEXTS)]
    rows, _ = write(prompts, seeds)
    half, reasons = write(prompts, seeds, options.steps // 2)
    left = np.where(reasons == "stop", 0, options.steps - options.steps // 2)
    mixed = [prompt[:1], *prompts, (prompt * 2)[: model.sequence_length]]
    ways = (
        ("same_again", "once more", write(prompts, seeds)[0]),
        ("same_reversed", "with the rows in reverse order", write(prompts, seeds[::-1])[0][::-1]),
        ("same_alone", "one at a time", [write([prompt], [seed])[0][0] for seed in seeds]),
        ("same_in_company", "among shorter and longer rows", write(mixed, [0, *seeds, 0])[0][1:-1]),
        ("same_after_a_pause", "stopped half way, then continued", write(half, seeds, left)[0]),
    )
    decoded = [tokenizer.decode(row) for row in rows]
    section(
        output,
        "5. The same seed, the same text",
        f"temperature {options.temperature:g}, top-k {options.top_k}, top-p {options.top_p:g}, at most "
        f"{options.steps} more words:",
    )
    print_columns(output, ("seed", "text"), list(zip(map(str, seeds), decoded, strict=True)), "rl")
    output.print("The same texts, sampled in other ways:")
    counts = [sum(map(operator.eq, other, rows)) for _, _, other in ways]
    shown = [(how, f"{count} of {TEXTS}") for (_, how, _), count in zip(ways, counts, strict=True)]
    print_columns(output, ("sampled", "the same"), shown, "lr")
    output.print(
        "So the seed of a row and the position decide what is sampled; the rest of the batch, the "
        "order of its rows and a pause do not."
    )
    return {"seeds": seeds, "texts": decoded, **{name: other == rows for name, _, other in ways}}


def draw(numbers):
    order, found = numbers["order"][:SHOWN], numbers["distributions"]
    return plot_distributions(
        np.array([entry["probabilities"] for entry in found])[:, order],
        [VOCABULARY[index] for index in order],
        [title(entry) for entry in found],
        before=numbers["probabilities"][order],
        drawn=np.array([entry["counts"] for entry in found])[:, order] / numbers["draws"],
        title=f"What comes after \u201c{numbers['prompt']}\u201d? One distribution, sampled from in "
        f"{len(found)} ways",
    )


if __name__ == "__main__":
    run(main)

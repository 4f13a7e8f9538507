"""Lesson 18: drawing the next word, and a model that any TensorFlow server runs.

python scripts/lesson_18_sampling_and_export.py
python scripts/lesson_18_sampling_and_export.py --temperature 0.8 --plot sampling.png --out exports
"""

import argparse
import base64
import itertools
import json
import math
import tempfile
import textwrap
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
from rich.markup import escape

with quiet_imports():
    import tensorflow as tf
    from _lesson_15_model import SENTENCES, STEPS, VOCABULARY, reference_model, train
    from tensorflow.core.protobuf import saved_model_pb2

    from keras_tinyattn import (
        export_saved_model,
        filter_logits,
        functional,
        load_saved_model,
        sample,
        verify_saved_model,
    )
    from keras_tinyattn.plotting import plot_distributions

# One setting at a time, the others off.
SETTINGS = (
    *({"temperature": value} for value in (0.5, 1.0, 2.0)),
    *({"top_k": value} for value in (1, 3, 6)),
    *({"top_p": value} for value in (0.5, 0.8, 0.95)),
)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
# How many words a table and a picture show.
SHOWN = 10
TEXTS = 5
# Standard deviations above the mean that one of a thousand normal numbers passes.
ONE_IN_A_THOUSAND = 3.0902
MODEL_NAME = "lesson_15"


def main(argv=None):
    arguments = parse_arguments(argv)
    check_count("--steps", arguments.steps)
    check_count("--draws", arguments.draws, 100, 10**6)
    check_count("--training-steps", arguments.training_steps)
    check_count("--seed", arguments.seed, at_most=2**31 - 1 - max(arguments.draws, TEXTS))
    check_count("--top-k", arguments.top_k, at_most=2**31 - 1)
    if not (math.isfinite(arguments.temperature) and arguments.temperature >= 0):
        raise ValueError(
            f"--temperature must be finite and 0 or more, but {arguments.temperature} was received."
        )
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and up to 1, but {arguments.top_p} was received.")
    check_picture("--plot", arguments.plot)
    check_file("--json", arguments.json)
    if arguments.out is not None and Path(arguments.out).exists() and not Path(arguments.out).is_dir():
        raise ValueError(f"--out needs a folder, but {arguments.out!r} is a file.")
    model, tokenizer = reference_model()
    words = len(tokenizer.encode(arguments.prompt))
    check_count("The number of words in --prompt", words, 1, model.sequence_length)
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    with tempfile.TemporaryDirectory() as temporary:
        numbers = compute(
            arguments.prompt,
            arguments.steps,
            {name: getattr(arguments, name) for name in OFF},
            arguments.seed,
            arguments.draws,
            arguments.training_steps,
            arguments.out or temporary,
            arguments.verify,
        )
    output = console()
    tell(numbers, output)
    if arguments.out is not None:
        output.print(f"Export: {numbers['export']['folder']}", markup=False, soft_wrap=True)
    write_picture(output, arguments.plot, lambda part: draw(numbers).savefig(part))
    write_numbers(output, arguments.json, numbers)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Temperature, top-k and top-p on one distribution, what an exported model consists "
        "of, and how a server calls it."
    )
    parser.add_argument(
        "--prompt",
        default="The cat",
        metavar="TEXT",
        help='what to continue, 1 to 10 words of the vocabulary (default "The cat")',
    )
    parser.add_argument(
        "--steps", type=int, default=6, metavar="N", help="words to add at most (default 6)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="temperature of the texts; 0 takes the likeliest word (default 1)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw the texts' words among so many likeliest; 0 is all (default 0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.9,
        metavar="P",
        help="draw the texts' words among the likeliest of this share; 1 is all (default 0.9)",
    )
    parser.add_argument(
        "--seed", type=int, default=18, metavar="N", help="seed of the first draw (default 18)"
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=2000,
        metavar="N",
        help="how often each distribution is drawn from (default 2000)",
    )
    parser.add_argument(
        "--training-steps",
        type=int,
        default=STEPS // 4,
        metavar="N",
        help=f"training of lesson 15's model; {STEPS} leave little to draw (default {STEPS // 4})",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="keep the export in this folder, as its next version"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also check the export in processes of their own, with and without XLA (takes longer)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw temperature, top-k and top-p on one distribution"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    return parser.parse_args(argv)


def compute(prompt, steps, settings, seed, draws, training_steps, folder, verify):
    """The lesson's numbers by name; the export is written into the folder, nothing is printed."""
    model, tokenizer = reference_model()
    losses = train(model, tokenizer, training_steps)
    window = tf.constant([tokenizer.encode(prompt)])
    logits = model(window)[:, -1]
    probabilities = functional.softmax(logits)[0].numpy()
    beginnings = model(tf.range(len(VOCABULARY))[:, None])[:, -1]
    return {
        "device": ran_on(logits),
        "vocabulary": list(VOCABULARY),
        "sequence_length": model.sequence_length,
        "prompt": prompt,
        "steps": steps,
        "settings": settings,
        "seed": seed,
        "draws": draws,
        "training_steps": training_steps,
        "loss_before_last_step": losses[-1] if losses else None,
        "order": np.argsort(-probabilities, kind="stable").tolist(),
        "probabilities": probabilities.tolist(),
        "distributions": [draw_often(logits, setting, seed, draws) for setting in SETTINGS],
        "greedy_tokens": len(set(draw_tokens(logits, {**OFF, "temperature": 0.0}, seed, draws))),
        "likeliest_by_prompt": np.max(functional.softmax(beginnings), axis=-1).tolist(),
        "kept_by_prompt": {
            f"{name} {value:g}": kept(beginnings, {name: value}).tolist()
            for setting in SETTINGS
            for name, value in setting.items()
            if name != "temperature"
        },
        "texts": write_texts(model, tokenizer, window[0].numpy().tolist(), steps, settings, seed),
        "export": export(
            model,
            tokenizer,
            prompt,
            steps,
            settings,
            seed,
            folder,
            verify,
            about={"data": SENTENCES, "training_steps": training_steps},
        ),
    }


def shape_logits(logits, setting):
    """The logits (B, V) that are drawn from: divided by the temperature, then filtered."""
    setting = {**OFF, **setting}
    return filter_logits(logits / setting["temperature"], setting["top_k"], setting["top_p"])


def kept(logits, setting):
    """How many words a setting leaves to draw from, (B,)."""
    return np.sum(np.isfinite(shape_logits(logits, setting)), axis=-1)


def draw_tokens(logits, setting, seed, draws):
    """One token for each of so many seeds, from one row of logits (1, V)."""
    seeds = seed + tf.range(draws)
    return sample(tf.tile(logits, (draws, 1)), **setting, seed=seeds).numpy().tolist()


def draw_often(logits, setting, seed, draws):
    """What a setting makes of a distribution, and how often each token is drawn from it."""
    probabilities = functional.softmax(shape_logits(logits, setting))[0].numpy().astype("float64")
    probabilities /= probabilities.sum()
    counts = np.bincount(
        draw_tokens(logits, {**OFF, **setting}, seed, draws), minlength=len(probabilities)
    )
    chi_square, degrees = goodness_of_fit(counts, probabilities)
    before = functional.softmax(logits)[0].numpy().astype("float64")
    possible = probabilities[probabilities > 0]
    return {
        "setting": setting,
        "probabilities": probabilities.tolist(),
        "kept": int(np.sum(probabilities > 0)),
        "share_before": float(np.sum(before[probabilities > 0])),
        # e to the entropy: so many equally likely words would be as uncertain.
        "as_uncertain_as": float(np.exp(-np.sum(possible * np.log(possible)))),
        "counts": counts.tolist(),
        "drawn_outside": int(np.sum(counts[probabilities == 0])),
        "chi_square": chi_square,
        "degrees": degrees,
        "limit": chi_square_limit(degrees),
        # The same draws held against the distribution that the setting started from.
        "chi_square_before": goodness_of_fit(counts, before / before.sum())[0],
    }


def goodness_of_fit(counts, probabilities):
    """Pearson's chi-square of draws, and its degrees of freedom.

    Cells of fewer than five expected draws are put together until they expect five, since the statistic
    is no chi-square otherwise. Cells that expect none are left out.
    """
    counts, expected = np.asarray(counts), np.sum(counts) * np.asarray(probabilities, "float64")
    cells, together = [], np.zeros(2)
    for index in np.argsort(expected, kind="stable"):
        if expected[index] > 0:
            together += counts[index], expected[index]
            if together[1] >= 5:
                cells.append(together)
                together = np.zeros(2)
    return float(sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)), len(cells) - 1


def chi_square_limit(degrees):
    """What fair draws exceed once in a thousand times, by the approximation of Wilson and Hilferty."""
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + ONE_IN_A_THOUSAND * math.sqrt(spread)) ** 3


def write_texts(model, tokenizer, prompt, steps, settings, seed):
    """Texts by seed, and the same rows in other company."""
    seeds = [seed + index for index in range(TEXTS)]

    def write(prompts, seeds, new=steps):
        found = model.generate(
            prompts, new, **settings, seed=seeds, stop=tokenizer.end_id, jit_compile=False
        )
        return [
            row[:length].tolist() for row, length in zip(found.token_ids, found.lengths, strict=True)
        ]

    rows = write([prompt] * TEXTS, seeds)
    # Beside every other row stands a longer or a shorter one, with a seed of its own.
    room = min(model.sequence_length, len(prompt) + 2)
    company = [other for row in range(TEXTS) for other in (prompt, (prompt * room)[: 1 + row % room])]
    crowd = write(company, [other for s in seeds for other in (s, s + 1000)])[::2]
    half = write([prompt] * TEXTS, seeds, steps // 2)
    going_on = [
        row
        if len(row) == model.sequence_length or row[len(prompt) :][-1:] == [tokenizer.end_id]
        else write([row], [s], steps - (len(row) - len(prompt)))[0]
        for row, s in zip(half, seeds, strict=True)
    ]
    return {
        "seeds": seeds,
        "texts": [tokenizer.decode(row) for row in rows],
        "same_again": write([prompt] * TEXTS, seeds) == rows,
        "same_reversed": write([prompt] * TEXTS, seeds[::-1]) == rows[::-1],
        "same_alone": [write([prompt], [s])[0] for s in seeds] == rows,
        "same_in_company": crowd == rows,
        "same_after_a_pause": going_on == rows,
    }


def export(model, tokenizer, prompt, steps, settings, seed, folder, verify, about):
    """Write the export, load it, look into it and call it as a server would."""
    version = export_saved_model(model, tokenizer, folder, about)
    loaded = load_saved_model(version)
    body = {
        "signature_name": "generate",
        "instances": [
            {
                "prompt": text,
                "max_new_tokens": steps,
                **row,
                "seed": seed,
                "stop": "",
            }
            for text, row in ((prompt, settings), (VOCABULARY[1], {**OFF, "temperature": 0.0}))
        ],
    }
    answer = answer_like_a_server(loaded.signatures, body)
    refused = {**body, "instances": [{**body["instances"][0], "temperature": -1.0}]}
    try:
        answer_like_a_server(loaded.signatures, refused)
        refusal = None
    except tf.errors.InvalidArgumentError as error:
        refusal = sentence(error)
    ids = model.generate(
        tokenizer.encode(prompt),
        steps,
        **settings,
        seed=seed,
        stop=tokenizer.end_id,
        jit_compile=False,
    )
    files = sorted(path for path in version.rglob("*") if path.is_file())
    return {
        "folder": str(version),
        "signatures": {
            name: {
                side: {key: [spec.dtype.name, axes(spec.shape)] for key, spec in sorted(specs.items())}
                for side, specs in (
                    ("inputs", signature.structured_input_signature[1]),
                    ("outputs", signature.structured_outputs),
                )
            }
            for name, signature in sorted(loaded.signatures.items())
        },
        "files": {path.relative_to(version).as_posix(): path.stat().st_size for path in files},
        "bytes_of_weights": sum(weight.numpy().nbytes for weight in model.weights),
        "operations": operations_of(version / "saved_model.pb"),
        "request": body,
        "answer": answer,
        "same_ids_as_in_python": answer["predictions"][0]["token_ids"][: len(ids.token_ids)]
        == ids.token_ids.tolist(),
        "same_completion_in_bytes": all(
            base64.b64decode(row["completion_bytes"]["b64"]).decode() == row["completion"]
            for row in answer["predictions"]
        ),
        "refusal": refusal,
        "checks": [list(check) for check in verify_saved_model(version)] if verify else [],
    }


def operations_of(path):
    """What each signature of a SavedModel is made of: nodes, kinds of operations, and XLA's part."""
    graph = saved_model_pb2.SavedModel.FromString(path.read_bytes()).meta_graphs[0]
    functions = {function.signature.name: function for function in graph.graph_def.library.function}
    main = {node.name: node for node in graph.graph_def.node}
    found = {}
    for name, signature in sorted(graph.signature_def.items()):
        if name.startswith("__"):
            continue
        # An output is a result of a call in the main graph, and a function may call others.
        waiting = [[main[output.name.split(":")[0]] for output in signature.outputs.values()][:1]]
        seen, operations = set(), []
        while waiting:
            for node in waiting.pop():
                operations.append(node.op)
                called = {node.op} | {attribute.func.name for attribute in node.attr.values()}
                called |= {
                    part.name for attribute in node.attr.values() for part in attribute.list.func
                }
                called = (called & set(functions)) - seen
                seen |= called
                waiting += [functions[function].node_def for function in called]
        kinds = set(operations) - set(functions)
        found[name] = {
            "nodes": len(operations),
            "kinds": len(kinds),
            "xla_kinds": sorted(kind for kind in kinds if kind.startswith("Xla")),
            "compiled_functions": sum(functions[name].attr["_XlaMustCompile"].b for name in seen),
        }
    return found


def answer_like_a_server(signatures, body):
    """What TensorFlow Serving does with the JSON of a predict request in row format.

    Args:
        signatures: the signatures of a loaded SavedModel.
        body: `signature_name`, and `instances`: for each row its inputs by name.

    Returns:
        A dictionary for JSON: `predictions`, for each row its outputs by name.
    """
    signature = signatures[body["signature_name"]]
    inputs = {
        name: tf.constant([row[name] for row in body["instances"]], spec.dtype)
        for name, spec in signature.structured_input_signature[1].items()
    }
    outputs = {name: value.numpy().tolist() for name, value in sorted(signature(**inputs).items())}

    def plain(name, value):
        if not isinstance(value, bytes):
            return value
        # A server knows by this ending that bytes need not be text.
        if name.endswith("_bytes"):
            return {"b64": base64.b64encode(value).decode()}
        return value.decode()

    return {
        "predictions": [
            {name: plain(name, values[row]) for name, values in outputs.items()}
            for row in range(len(body["instances"]))
        ]
    }


def axes(shape):
    """A shape for readers: unknown sizes as a question mark, the batch first."""
    return ["B", *("?" if size is None else str(size) for size in shape[1:])]


def sentence(error):
    """The sentence of an assertion in the graph, without TensorFlow's frame around it."""
    message = error.message.partition("assertion failed: [")[2] or error.message
    return message.partition("]\n")[0]


def draw(numbers):
    order, found = numbers["order"][:SHOWN], numbers["distributions"]

    def shown(rows):
        return np.array(rows)[..., order]

    return plot_distributions(
        shown([entry["probabilities"] for entry in found]),
        [numbers["vocabulary"][index] for index in order],
        [title_of(entry["setting"]) for entry in found],
        before=shown(numbers["probabilities"]),
        drawn=shown([entry["counts"] for entry in found]) / numbers["draws"],
        title=f"What comes after \u201c{numbers['prompt']}\u201d? One distribution, drawn from in "
        f"{len(found)} ways",
    )


def title_of(setting):
    ((name, value),) = setting.items()
    return f"{name.replace('_', '-')} {value:g}"


def tell(numbers, output):
    """Print the lesson; each sentence about a number is made from that number."""
    output.print("[bold cyan]Lesson 18: drawing the next word, and an export that a server runs[/]")
    loss = numbers["loss_before_last_step"]
    output.print(
        "A model says how likely each word is to come next; somebody has to choose. Here the model of "
        f"lesson 15 after {numbers['training_steps']} steps of training"
        + ("" if loss is None else f" (loss {loss:.2f} at the last)")
        + f", on {numbers['device']}."
    )
    tell_family(
        numbers,
        output,
        "temperature",
        "1. Temperature: logits are divided by it",
        f"After '{numbers['prompt']}', the likeliest words: their probabilities move apart or "
        "together.",
    )
    tell_temperature(numbers, output)
    tell_family(
        numbers,
        output,
        "top_k",
        "2. Top-k: only the k likeliest",
        "All others get nothing, and those that stay share it in proportion.",
    )
    tell_kept(numbers, output, "top_k")
    tell_family(
        numbers,
        output,
        "top_p",
        "3. Top-p: the fewest that hold a share p",
        "From the likeliest down, until together they reach p.",
    )
    tell_kept(numbers, output, "top_p")
    tell_draws(numbers, output)
    tell_texts(numbers, output)
    tell_signatures(numbers, output)
    tell_operations(numbers, output)
    tell_request(numbers, output)

    found, inside = numbers["export"], numbers["export"]["operations"]
    plain = [name for name in inside if not uses_xla(inside[name])]
    section(
        output,
        "The point",
        f"A prompt and {len(found['request']['instances'][0]) - 1} settings go in and text comes out: "
        "tokenizer, loop, cache and sampling are in the file, "
        f"{sum(found['files'].values()) / 1024:.0f} KiB of it. {len(plain)} of {len(inside)} "
        "signatures use no XLA"
        + (
            ", and its ids are those of model.generate."
            if found["same_ids_as_in_python"]
            else "; its ids are not those of model.generate."
        ),
    )


def tell_family(numbers, output, name, title, text):
    """The words' probabilities under each value of one setting."""
    section(output, title, text)
    found = [entry for entry in numbers["distributions"] if name in entry["setting"]]
    order, vocabulary = numbers["order"], numbers["vocabulary"]
    rows = [
        (f"[bold cyan]{vocabulary[index]}[/]", f"{numbers['probabilities'][index]:.1%}")
        + tuple(percent(entry["probabilities"][index]) for entry in found)
        for index in order[:SHOWN]
    ]
    rest = order[SHOWN:]
    rows.append(
        (f"{len(rest)} others", f"{sum(numbers['probabilities'][index] for index in rest):.1%}")
        + tuple(percent(sum(entry["probabilities"][index] for index in rest)) for entry in found)
    )
    print_columns(
        output,
        ("word", "model", *(title_of(entry["setting"]) for entry in found)),
        rows,
        "lr" + "r" * len(found),
    )


def percent(probability):
    """A probability; one that is exactly zero as a dash."""
    return f"{probability:.1%}" if probability else "-"


def tell_temperature(numbers, output):
    found = [entry for entry in numbers["distributions"] if "temperature" in entry["setting"]]
    ranks = [np.argsort(-np.array(entry["probabilities"]), kind="stable").tolist() for entry in found]
    same = all(order == numbers["order"] for order in ranks)
    point(
        output,
        "As uncertain as among equally likely words: "
        + ", ".join(
            f"{entry['as_uncertain_as']:.1f} at {entry['setting']['temperature']:g}" for entry in found
        )
        + f". The ranking is {'the same' if same else 'not the same'} at all {len(found)}.",
    )
    point(
        output,
        f"At temperature 0 the likeliest is taken: {numbers['draws']} draws gave "
        f"{numbers['greedy_tokens']} word{'s' * (numbers['greedy_tokens'] > 1)}.",
    )


def tell_kept(numbers, output, name):
    found = [entry for entry in numbers["distributions"] if name in entry["setting"]]
    point(
        output,
        "Left to draw from: "
        + "; ".join(
            f"{entry['kept']} word{'s' * (entry['kept'] > 1)} with {entry['share_before']:.1%} of the "
            f"probability at {title_of(entry['setting'])}"
            for entry in found
        )
        + ".",
    )
    middle = found[len(found) // 2]["setting"][name]
    counts = numbers["kept_by_prompt"][f"{name} {middle:g}"]
    fewest, most = int(np.argmin(counts)), int(np.argmax(counts))
    point(
        output,
        f"After each of the {len(counts)} words as a prompt {title_of({name: middle})} leaves "
        + (
            f"{counts[fewest]}, however sure the model is."
            if counts[fewest] == counts[most]
            else " and ".join(
                f"{counts[prompt]} after '{numbers['vocabulary'][prompt]}', where the likeliest has "
                f"{numbers['likeliest_by_prompt'][prompt]:.0%}"
                for prompt in (fewest, most)
            )
            + "; the others lie between."
        ),
    )


def tell_draws(numbers, output):
    found, draws = numbers["distributions"], numbers["draws"]
    section(
        output,
        "4. Drawn as often as likely?",
        f"{draws} draws each, with seeds from {numbers['seed']} on. Chi-square sums (drawn - "
        "expected)^2 / expected; fair draws exceed the limit once in a thousand times. Beside it the "
        "same draws held against the model's own distribution.",
    )
    rows = []
    for entry in found:
        best = int(np.argmax(entry["probabilities"]))
        rows.append(
            (f"[bold cyan]{title_of(entry['setting'])}[/]", f"{entry['probabilities'][best]:.1%}")
            + (f"{entry['counts'][best] / draws:.1%}", str(entry["degrees"]))
            + (f"{entry['chi_square']:.1f}", f"{entry['limit']:.1f}")
            + (f"{entry['chi_square_before']:.0f}",)
        )
    names = ("setting", "top word", "drawn", "degrees", "chi-square", "limit", "vs model")
    print_columns(output, names, rows, "lrrrrrr")
    fair = sum(entry["chi_square"] <= entry["limit"] for entry in found)
    outside = sum(entry["drawn_outside"] for entry in found)
    point(
        output,
        f"{fair} of {len(found)} are within the limit. Words that a setting leaves out were drawn "
        f"{outside} times in {len(found) * draws}.",
    )
    others = [entry for entry in found if entry["setting"] != {"temperature": 1.0}]
    told_apart = sum(entry["chi_square_before"] > entry["limit"] for entry in others)
    point(
        output,
        f"The test can tell: against the model's own distribution {told_apart} of the {len(others)} "
        "settings that change it are beyond the limit.",
    )


def tell_texts(numbers, output):
    texts, settings = numbers["texts"], numbers["settings"]
    section(
        output,
        "5. The same seed, the same text",
        f"temperature {settings['temperature']:g}, top-k {settings['top_k']}, top-p "
        f"{settings['top_p']:g}, at most {numbers['steps']} words more:",
    )
    print_columns(
        output,
        ("seed", "text"),
        [(str(seed), text) for seed, text in zip(texts["seeds"], texts["texts"], strict=True)],
        "rl",
    )
    different = len(set(texts["texts"]))
    point(output, f"{len(texts['seeds'])} seeds, {different} different text{'s' * (different > 1)}.")
    for name, how in (
        ("same_again", "Once more"),
        ("same_reversed", "With the rows in reverse order"),
        ("same_alone", "Each row alone"),
        ("same_in_company", "Beside rows of other length and seed"),
        ("same_after_a_pause", "Stopped half way and gone on with later"),
    ):
        point(output, f"{how}: {'the same' if texts[name] else 'other'} texts.")
    output.print(
        "So the seed of a row and the position decide what is drawn, not company, order or pauses."
        if all(value for name, value in texts.items() if name.startswith("same"))
        else "So a draw depends on more than the seed of its row and the position."
    )


def tell_signatures(numbers, output):
    found = numbers["export"]
    section(
        output,
        "6. What is in the export",
        "export_saved_model writes a folder named by a number, the version:",
    )
    total = sum(found["files"].values())
    print_columns(
        output,
        ("file", "bytes"),
        [*((name, f"{size:,}") for name, size in found["files"].items()), ("all", f"{total:,}")],
        "lr",
    )
    point(
        output,
        f"The weights take {found['bytes_of_weights']:,} bytes of it; most of the rest is the graph of "
        f"{len(found['signatures'])} signatures."
        if found["files"]["saved_model.pb"] > total / 2
        else f"The weights take {found['bytes_of_weights']:,} bytes of it.",
    )
    rows = []
    for name, sides in found["signatures"].items():
        columns = [textwrap.wrap(", ".join(sides[side]), 28) for side in ("inputs", "outputs")]
        for index, parts in enumerate(itertools.zip_longest(*columns, fillvalue="")):
            rows.append(("" if index else f"[bold cyan]{name}[/]", *parts))
    print_columns(output, ("signature", "inputs", "outputs"), rows, "lll")
    generate = found["signatures"]["generate"]
    output.print("Each with a type and a shape, the batch first. Of generate:")
    print_columns(
        output,
        ("", "name", "type", "shape"),
        [
            ("" if index else side, f"[bold cyan]{name}[/]", kind, f"({', '.join(shape)})")
            for side, tensors in generate.items()
            for index, (name, (kind, shape)) in enumerate(tensors.items())
        ],
        "llll",
    )


def uses_xla(operations):
    return bool(operations["xla_kinds"] or operations["compiled_functions"])


def tell_operations(numbers, output):
    found = numbers["export"]
    section(
        output,
        "7. What a server must know to run it",
        "Operations that each signature reaches in saved_model.pb, functions that it calls included:",
    )
    print_columns(
        output,
        ("signature", "operations", "kinds", "XLA operations", "functions for XLA"),
        [
            (f"[bold cyan]{name}[/]", str(part["nodes"]), str(part["kinds"]))
            + (", ".join(part["xla_kinds"]) or "none", str(part["compiled_functions"]))
            for name, part in found["operations"].items()
        ],
        "lrrrr",
    )
    compiled = [name for name, part in found["operations"].items() if uses_xla(part)]
    point(
        output,
        f"XLA compiles a part of {' and '.join(compiled) or 'none of them'}. The other "
        f"{len(found['operations']) - len(compiled)} reach neither its operations nor a function to be "
        "compiled, so a server built without XLA has what they need.",
    )
    if found["checks"]:
        print_columns(
            output,
            ("checked in a process of its own", "seen", ""),
            [(name, seen, "passed" if passed else "FAILED") for name, seen, passed in found["checks"]],
            "lll",
        )
        passed = sum(check[2] for check in found["checks"])
        point(output, f"verify_saved_model: {passed} of {len(found['checks'])} checks passed.")


def tell_request(numbers, output):
    found = numbers["export"]
    address = f"http://localhost:8501/v1/models/{MODEL_NAME}:predict"
    section(
        output,
        "8. How a server calls it",
        "TensorFlow Serving answers POST requests to this address; the body is JSON, a row of inputs "
        "for each text, and rows may have settings of their own:",
    )
    output.print(f"\n    POST {address}", markup=False, soft_wrap=True)
    print_json(output, found["request"])
    output.print(
        "No server runs here. The same rows as tensors, given to the loaded signature, are answered:"
    )
    print_json(output, found["answer"])
    predictions = found["answer"]["predictions"]
    point(
        output,
        f"{len(predictions)} rows with unlike settings, one batch. The ids of the first are "
        f"{'those' if found['same_ids_as_in_python'] else 'not those'} that model.generate gives in "
        "Python.",
    )
    point(
        output,
        "Outputs whose name ends in _bytes travel as base64; decoded, they are "
        f"{'the completion' if found['same_completion_in_bytes'] else 'not the completion'}.",
    )
    if found["refusal"]:
        point(output, f"A temperature of -1 is refused: {escape(found['refusal'])}")
    else:
        point(output, "A temperature of -1 is not refused.")
    output.print(
        "\nTo serve it, keep it with --out DIR, then\n\n"
        f"    docker run -p 8501:8501 -v $PWD/DIR:/models/{MODEL_NAME} \\\n"
        f"      -e MODEL_NAME={MODEL_NAME} tensorflow/serving\n",
        markup=False,
    )


def print_json(output, content):
    """JSON with a line for each value of each row."""
    (rows_name, rows), *others = sorted(content.items(), key=lambda pair: isinstance(pair[1], str))
    lines = ["{"]
    lines += [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in others]
    lines.append(f"  {json.dumps(rows_name)}: [")
    for index, row in enumerate(rows):
        lines.append("    {")
        entries = [f"      {json.dumps(name)}: {json.dumps(rounded(row[name]))}" for name in row]
        lines += [line + "," for line in entries[:-1]] + entries[-1:]
        lines.append("    }" + "," * (index + 1 < len(rows)))
    lines += ["  ]", "}"]
    output.print("\n".join(["", *(f"    {line}" for line in lines), ""]), markup=False, soft_wrap=True)


def rounded(value):
    """Numbers of float32 as short as they are read."""
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    run(main)

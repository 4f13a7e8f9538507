"""Tokens a second of one GPT-2: generation and training."""

import functools

import _generation_peers as generation
import _training_peers as training
import numpy as np
from _attention_peers import OURS
from _benchmark_page import bold_if_ours, say_machine
from _generation_peers import Size
from _page import point, print_columns, section
from _start import quiet_imports
from _timing import compare, installed, interleaved, quartiles, use_threads

# 200 new tokens behind prompts of 16, at batch size 1 and 32.
GENERATE_SIZES = [
    Size(*model, 256, batch_size, 16, 200)
    for model in (("small", 4, 4, 128, 256), ("medium", 6, 6, 384, 5000))
    for batch_size in (1, 32)
]
QUICK_GENERATE_SIZES = [Size("tiny", 1, 2, 16, 40, 32, 2, 6, 8)]
# Steps in a row, and the sizes of the model and its batches; a token is a character.
TRAIN_SIZES = [
    ("small", 4, training.TrainingShape(32, 128, 128, 4, 4, 65)),
    ("medium", 1, training.TrainingShape(32, 128, 384, 6, 6, 65)),
]
QUICK_TRAIN_SIZES = [("tiny", 2, training.TrainingShape(2, 8, 12, 3, 1, 11))]


def measure_generate(arguments, say):
    use_threads(arguments.threads)
    results, lengths, left_out = [], [], []
    for size in QUICK_GENERATE_SIZES if arguments.quick else GENERATE_SIZES:
        say(f"{size.name}, batch size {size.batch_size}")
        columns, left_out = installed(generation.columns_for(size), generation.NEEDS)
        functions, ids = generation.make_problem(size, columns)
        reference = ids[columns[-1]]
        for name in columns:
            # Where prompts are unequal, every second one is the same as elsewhere.
            rows = slice(None, None, 2 if name == generation.UNEQUAL else 1)
            if not np.array_equal(ids[name][rows], reference[rows]):
                raise ValueError(f"{name!r} writes other ids than {columns[-1]!r}: nothing to time.")
        seconds, rounds = (0, 3) if arguments.quick else (arguments.seconds, 3)
        times = interleaved(functions, seconds, rounds)
        tokens = size.batch_size * size.new_tokens
        cpu = {name: quartiles(times[name][0]) for name in columns}
        wall = {name: quartiles(times[name][1]) for name in columns}
        baseline = next(name for name in (*generation.BASELINES, f"{OURS}, graph") if name in columns)
        results += [
            {
                "size": size._asdict(),
                "column": name,
                "rounds": len(times[name][0]),
                "cpu_ms": cpu[name],
                "wall_ms": wall[name],
                "tokens_per_second": 1e3 * tokens / cpu[name]["median"],
                "baseline": baseline,
                "ratio": cpu[baseline]["median"] / cpu[name]["median"],
            }
            for name in columns
        ]
        say(f"{size.name}, batch size {size.batch_size}, by the number of new tokens")
        lengths += time_by_length(size, functions, seconds / 4, rounds)
    return {"results": results, "lengths": lengths, "left_out": left_out}


def time_by_length(size, functions, seconds, rounds):
    """How long a quarter, a half and all of the new tokens take, and how far from a line that is."""
    counts = [size.new_tokens // 4, size.new_tokens // 2, size.new_tokens]
    names = [f"{OURS}, XLA", f"{OURS}, graph"]
    timed = {
        (name, count): functools.partial(functions[name], count) for name in names for count in counts
    }
    times = interleaved(timed, seconds, rounds)
    rows = []
    for name in names:
        few, half, all_of_them = (quartiles(times[name, count][0])["median"] for count in counts)
        share = (counts[1] - counts[0]) / (counts[2] - counts[0])
        on_the_line = few + share * (all_of_them - few)
        rows.append(
            {
                "size": size._asdict(),
                "column": name,
                "new_tokens": counts,
                "cpu_ms": [few, half, all_of_them],
                "half_to_line": half / on_the_line,
            }
        )
    return rows


def tell_generate(numbers, output):
    say_machine(numbers, output)
    for title, rows in generate_tables(numbers):
        section(
            output,
            title,
            f"{rows[0]['rounds']} rounds, medians of CPU time; the same ids in all columns; ratio of "
            f"speed to {rows[0]['baseline']}",
        )
        print_columns(
            output,
            ["", "CPU ms", "tokens/s", "ratio"],
            [
                [
                    bold_if_ours(row["column"]),
                    f"{row['cpu_ms']['median']:.1f}",
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['ratio']:.2f}",
                ]
                for row in rows
            ],
            "lrrr",
        )
    section(output, "Time by the number of new tokens")
    for row in numbers["lengths"]:
        counts, times = row["new_tokens"], [f"{time:.1f}" for time in row["cpu_ms"]]
        point(
            output,
            f"{row['size']['name']}, batch size {row['size']['batch_size']}, {row['column']}: "
            f"{times[0]}, {times[1]} and {times[2]} ms for {counts[0]}, {counts[1]} and {counts[2]}; "
            f"the middle one is {row['half_to_line']:.2f} of what a line through the others gives.",
        )


def generate_bars(numbers):
    return [
        (title, f"speed / {rows[0]['baseline']}", [(row["column"], row["ratio"]) for row in rows])
        for title, rows in generate_tables(numbers)
    ]


def generate_tables(numbers):
    titles = {}
    for row in numbers["results"]:
        size = row["size"]
        title = f"{size['name']}, batch size {size['batch_size']}, {size['new_tokens']} new tokens"
        titles.setdefault(title, []).append(row)
    return titles.items()


def measure_train(arguments, say):
    columns, left_out = installed(training.TRAINING_COLUMNS, training.TRAINING_NEEDS)
    use_threads(arguments.threads)
    results = []
    for name, steps, shape in QUICK_TRAIN_SIZES if arguments.quick else TRAIN_SIZES:
        problem = training.make_training_problem(shape, steps)
        functions, losses = {}, {}
        for column in columns:
            say(f"{name}: {column} is compiled")
            with quiet_imports():
                functions[column] = training.TRAINING_COLUMNS[column](problem)
            # Twice: the loss of the second time tells whether the updates of the first were the same.
            losses[column] = np.array([functions[column](), functions[column]()])
        differences = compare(losses, columns[0])
        say(f"{name}: training steps")
        seconds, rounds = (0, 3) if arguments.quick else (arguments.seconds, 3)
        times = interleaved(functions, seconds, rounds)
        cpu = {column: quartiles(times[column][0]) for column in columns}
        keras = min(training.TRAINING_BASELINES, key=lambda column: cpu[column]["median"])
        baseline = training.TORCH if training.TORCH in columns else keras
        results += [
            {
                "size": {"name": name, **shape._asdict()},
                "column": column,
                "rounds": len(times[column][0]),
                "steps": steps,
                "cpu_ms": cpu[column],
                "wall_ms": quartiles(times[column][1]),
                "tokens_per_second": 1e3 * steps * shape.B * shape.T / cpu[column]["median"],
                "baseline": baseline,
                "ratio": cpu[baseline]["median"] / cpu[column]["median"],
                "ratio_to_keras_fit": cpu[keras]["median"] / cpu[column]["median"],
                "largest_difference": differences[column],
            }
            for column in columns
        ]
    return {"results": results, "left_out": left_out}


def tell_train(numbers, output):
    say_machine(numbers, output)
    for title, rows in train_tables(numbers):
        section(
            output,
            title,
            f"{rows[0]['rounds']} rounds of {rows[0]['steps']} steps, medians of CPU time; ratios of "
            f"speed to {rows[0]['baseline']}, and to the better of Keras' two fits",
        )
        print_columns(
            output,
            ["", "CPU ms", "tokens/s", "ratio", "to Keras"],
            [
                [
                    bold_if_ours(row["column"]),
                    f"{row['cpu_ms']['median']:.1f}",
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['ratio']:.2f}",
                    f"{row['ratio_to_keras_fit']:.2f}",
                ]
                for row in rows
            ],
            "lrrrr",
        )
    largest = max(numbers["results"], key=lambda row: row["largest_difference"])
    section(output, "What the numbers say")
    point(
        output,
        "All columns learned the same: after the first updates their losses differ by at most "
        f"{largest['largest_difference']:.0e} ({largest['column']}).",
    )
    for title, (ours, *_) in train_tables(numbers):
        point(
            output,
            f"{title}: {ours['column']} takes in {ours['tokens_per_second']:.0f} tokens a second of "
            f"CPU time, {ours['ratio']:.2f} times as many as {ours['baseline']} and "
            f"{ours['ratio_to_keras_fit']:.2f} times as many as Keras' fit.",
        )


def train_bars(numbers):
    return [
        (title, f"speed / {rows[0]['baseline']}", [(row["column"], row["ratio"]) for row in rows])
        for title, rows in train_tables(numbers)
    ]


def train_tables(numbers):
    titles = {}
    for row in numbers["results"]:
        size = row["size"]
        title = f"{size['name']}, {size['B']} x {size['T']} tokens a step"
        titles.setdefault(title, []).append(row)
    return titles.items()

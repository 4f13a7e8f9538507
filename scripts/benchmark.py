"""Speed and memory of the attention layers beside those of other libraries, on this machine's CPU.

python scripts/benchmark.py layer --threads 1
python scripts/benchmark.py memory --json memory.json --plot memory.png

Only ratios within one run mean something: machines differ, and so do two hours on one machine.
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path

import _generation_peers as generation
import _training_peers as training
import numpy as np
from _attention_peers import BASELINES, COLUMNS, DIRECTIONS, NEEDS, OURS, Shape, make_problem
from _generation_peers import Size
from _page import point, print_columns, section
from _start import check_count, check_file, check_picture, console, quiet_imports, run, whole_file
from _timing import compare, installed, interleaved, machine, quartiles, use_threads

LAYER_SHAPES = [
    Shape(32, 64, 128, 4),
    Shape(8, 256, 384, 6),
    Shape(4, 1024, 512, 8),
    Shape(1, 4096, 512, 8),
]
QUICK_LAYER_SHAPES = [Shape(2, 96, 24, 3)]
# Keras' layer takes more than 4 GB at the first length, four times that at the second.
MEMORY_SHAPES = [Shape(1, 8192, 256, 4), Shape(1, 16384, 256, 4)]
QUICK_MEMORY_SHAPES = [Shape(1, 512, 32, 2), Shape(1, 1024, 32, 2)]
MEMORY_COLUMNS = [f"{OURS} blockwise, graph", f"{OURS} blockwise, XLA"]
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
DISTRIBUTIONS = ("keras-tinyattn", "tensorflow", "keras", "keras-hub", "torch", "jax", "numpy")
MEGABYTE = 1_000_000
# A label stays legible where the line at 1 passes behind it.
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def main(argv=None):
    arguments = parse_arguments(argv)
    if getattr(arguments, "child", None):
        print(json.dumps(measure_growth(**json.loads(arguments.child))))
        return
    check_count("--threads", arguments.threads, at_least=1)
    check_picture("--plot", arguments.plot)
    check_file("--json", arguments.json)
    measure, tell, bars = BENCHMARKS[arguments.benchmark]
    output = console()
    # A line that stands on a terminal while there is nothing to read yet, and nowhere else.
    with output.status("measuring; this takes minutes") as status:
        numbers = {
            "benchmark": arguments.benchmark,
            "machine": machine(arguments.threads, DISTRIBUTIONS),
            **measure(arguments, lambda what: status.update(f"measuring {what}")),
        }
    tell(numbers, output)
    if arguments.plot is not None:
        with whole_file(arguments.plot) as part:
            draw(bars(numbers), part)
        output.print(f"Picture: {arguments.plot}", markup=False, soft_wrap=True)
    if arguments.json is not None:
        with whole_file(arguments.json) as part:
            part.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        output.print(f"Numbers: {arguments.json}", markup=False, soft_wrap=True)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Measure the attention layers beside those of other libraries, on the CPU. A "
        "library that is not installed is left out.",
        epilog='All peers: pip install "keras-tinyattn[bench]".',
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads for every library (default: 1)"
    )
    shared.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    shared.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw bars to this .png, .svg or .pdf file"
    )
    shared.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, to see that everything runs; figures mean little",
    )

    layer = benchmarks.add_parser(
        "layer",
        parents=[shared],
        help="time of one causal attention layer",
        description="Process CPU time and wall time of one causal self-attention layer with its "
        "projections, forward and forward+backward. All columns get the same weights and inputs; "
        "their outputs and input gradients are compared before anything is timed. Then they run in "
        "turn, in a new order each round. Medians and quartiles; ratios to the better of the two "
        "columns of keras.layers.MultiHeadAttention.",
    )
    layer.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="time for each table, of which there are two a shape; at least 5 rounds (default: 20)",
    )
    memory = benchmarks.add_parser(
        "memory",
        parents=[shared],
        help="memory of one causal attention layer on long inputs",
        description="By how much the peak of resident memory grows when one causal self-attention "
        "layer (256 wide, 4 heads) meets 8192 and 16384 tokens, each in a process of its own. "
        "Keras' layer is measured at the shorter length only, where it already needs gigabytes.",
    )
    memory.add_argument("--child", help=argparse.SUPPRESS)
    generate = benchmarks.add_parser(
        "generate",
        parents=[shared],
        help="tokens a second of greedy generation",
        description="Greedy generation by one GPT-2 with the same weights in each library, small (4 "
        "layers, 128 wide) and medium (6 layers, 384 wide), 200 new tokens. The ids are compared "
        "before anything is timed. Then the columns run in turn. Ratios of speed to KerasHub's "
        "compiled generate, or to our own plain loop where KerasHub is not installed.",
    )
    generate.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        metavar="S",
        help="time for each of the four tables; at least 3 rounds (default: 40)",
    )
    train = benchmarks.add_parser(
        "train",
        parents=[shared],
        help="tokens a second of training",
        description="Training steps of one GPT-2 with the same weights, batches and optimizer in each "
        "library, small (4 layers, 128 wide) and medium (6 layers, 384 wide), 32 x 128 tokens a step. "
        "The losses after the first steps are compared before anything is timed. Then the columns run "
        "in turn. Ratios of speed to torch, or to the better of Keras' fits where it is not installed.",
    )
    train.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="time for each of the two tables; at least 3 rounds (default: 60)",
    )
    return parser.parse_args(argv)


# layer


def measure_layer(arguments, say):
    if not 0 <= arguments.seconds < math.inf:
        raise ValueError(f"--seconds must be 0 or more, but {arguments.seconds} was received.")
    columns, left_out = installed(COLUMNS, NEEDS)
    use_threads(arguments.threads)
    results = []
    for shape in QUICK_LAYER_SHAPES if arguments.quick else LAYER_SHAPES:
        problem = make_problem(shape)
        with quiet_imports():
            peers = {name: COLUMNS[name](problem) for name in columns}
        for direction in DIRECTIONS:
            say(title_of(shape._asdict(), direction))
            functions = {name: peers[name][direction] for name in columns}
            differences = compare({name: functions[name]() for name in columns}, BASELINES[0])
            seconds, rounds = (0, 3) if arguments.quick else (arguments.seconds, 5)
            times = interleaved(functions, seconds, rounds)
            cpu = {name: quartiles(times[name][0]) for name in columns}
            best = min(cpu[name]["median"] for name in BASELINES)
            results += [
                {
                    "shape": shape._asdict(),
                    "direction": direction,
                    "column": name,
                    "rounds": len(times[name][0]),
                    "cpu_ms": cpu[name],
                    "wall_ms": quartiles(times[name][1]),
                    "ratio": cpu[name]["median"] / best,
                    "largest_difference": differences[name],
                }
                for name in columns
            ]
    return {"results": results, "left_out": left_out}


def tell_layer(numbers, output):
    say_machine(numbers, output)
    for title, rows in tables(numbers):
        section(output, title, f"{rows[0]['rounds']} rounds; median, in parentheses the middle half")
        print_columns(
            output,
            ["", "CPU ms", "", "wall ms", "ratio"],
            [
                [
                    bold_if_ours(row["column"]),
                    f"{row['cpu_ms']['median']:.2f}",
                    f"({row['cpu_ms']['first']:.2f}-{row['cpu_ms']['third']:.2f})",
                    f"{row['wall_ms']['median']:.2f}",
                    f"{row['ratio']:.2f}",
                ]
                for row in rows
            ],
            "lrlrr",
        )
    largest = max(numbers["results"], key=lambda row: row["largest_difference"])
    section(output, "What the numbers say")
    point(
        output,
        f"All columns computed the same: the largest difference is {largest['largest_difference']:.0e} "
        f"of the largest entry ({largest['column']}, {largest['direction']}).",
    )
    for title, rows in tables(numbers):
        ours = min(
            (row for row in rows if row["column"].startswith(OURS)), key=lambda row: row["ratio"]
        )
        fastest = min(rows, key=lambda row: row["ratio"])
        point(
            output,
            f"{title}: {ours['column']} takes {ours['ratio']:.2f} times as long as Keras' layer; "
            f"the fastest of all is {fastest['column']} ({fastest['ratio']:.2f}).",
        )


def layer_bars(numbers):
    return [
        (title, "CPU time / the better of Keras' two", [(row["column"], row["ratio"]) for row in rows])
        for title, rows in tables(numbers)
    ]


# memory


def measure_memory(arguments, say):
    shapes = QUICK_MEMORY_SHAPES if arguments.quick else MEMORY_SHAPES
    directions = DIRECTIONS[1:] if arguments.quick else DIRECTIONS
    ours, baselines = (
        (MEMORY_COLUMNS[:1], BASELINES[:1]) if arguments.quick else (MEMORY_COLUMNS, BASELINES)
    )
    results = []
    for direction in directions:
        for shape in shapes:
            say(title_of(shape._asdict(), direction))
            columns = [*ours, *baselines] if shape == shapes[0] else ours
            # One at a time: Keras' layer needs the machine's memory for itself.
            rows = [grow_in_a_process(name, shape, direction, arguments.threads) for name in columns]
            samples = {row["column"]: np.array(row.pop("sample")) for row in rows}
            for name, difference in compare(samples, columns[-1]).items():
                next(row for row in rows if row["column"] == name)["largest_difference"] = difference
            results += rows
    return {"results": results, "left_out": []}


def grow_in_a_process(column, shape, direction, threads):
    wanted = {"column": column, "shape": shape, "direction": direction, "threads": threads}
    command = [sys.executable, __file__, "memory", "--child", json.dumps(wanted)]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode != 0:
        said = child.stderr.strip().splitlines()
        raise ValueError(
            f"The process that measured {column!r} at T={shape.T} ended with {child.returncode}; "
            f"{'it said: ' + said[-1] if said else 'perhaps the memory did not suffice'}."
        )
    grown = json.loads(child.stdout.splitlines()[-1])
    return {"shape": shape._asdict(), "direction": direction, "column": column, **grown}


def measure_growth(column, shape, direction, threads):
    """What a child process prints: the growth of its peak memory, and some of the numbers computed."""
    use_threads(threads)
    shape = Shape(*shape)
    with quiet_imports():
        warm_up = COLUMNS[column](make_problem(shape._replace(T=32)))
        computes = COLUMNS[column](make_problem(shape))[direction]
    warm_up[direction]()
    before = forget_peak_memory()
    computed = computes()
    grown = peak_memory() - before
    return {"growth_mb": grown / MEGABYTE, "sample": computed[0, :: shape.T // 16, :8].tolist()}


def peak_memory():
    """The largest resident memory of this process so far, in bytes."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak_memory():
    """Where the system allows it, start anew from the resident memory of now; returns the peak."""
    # Where it does not, growth below what the imports took at their height stays unseen.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def tell_memory(numbers, output):
    say_machine(numbers, output)
    for title, rows in tables(numbers):
        print_columns(
            output,
            [title, "grows by MB"],
            [[bold_if_ours(row["column"]), f"{row['growth_mb']:.0f}"] for row in rows],
            "lr",
        )
    section(output, "What the numbers say")
    largest = max(numbers["results"], key=lambda row: row["largest_difference"])
    point(
        output,
        "All columns computed the same: the largest difference in a sample is "
        f"{largest['largest_difference']:.0e} of its largest entry ({largest['column']}, T = "
        f"{largest['shape']['T']}).",
    )
    for title, rows in tables(numbers):
        growth = {row["column"]: row["growth_mb"] for row in rows}
        theirs = [growth[name] for name in BASELINES if name in growth]
        most = max((name for name in growth if name.startswith(OURS)), key=growth.get)
        if theirs:
            point(
                output,
                f"{title}: {most} takes {growth[most]:.0f} MB, Keras' layer at least "
                f"{min(theirs):.0f}.",
            )
    for (column, direction), (short, long) in grown_with_length(numbers).items():
        point(
            output,
            f"{column}, {direction}: {long['shape']['T'] / short['shape']['T']:.0f} times the tokens "
            f"take {long['growth_mb'] / short['growth_mb']:.2f} times the memory.",
        )


def grown_with_length(numbers):
    """Maps a column and a direction to its results at both lengths, where it has both."""
    rows = {}
    for row in numbers["results"]:
        rows.setdefault((row["column"], row["direction"]), []).append(row)
    return {key: pair for key, pair in rows.items() if len(pair) == 2}


def memory_bars(numbers):
    return [
        (title, "growth of the peak memory, MB", [(row["column"], row["growth_mb"]) for row in rows])
        for title, rows in tables(numbers)
    ]


# shared


def tables(numbers):
    """The results by shape and direction: pairs of a title and its rows."""
    grouped = {}
    for row in numbers["results"]:
        grouped.setdefault(title_of(row["shape"], row["direction"]), []).append(row)
    return list(grouped.items())


def title_of(shape, direction):
    return f"{', '.join(f'{letter} {size}' for letter, size in shape.items())}, {direction}"


def measure_generate(arguments, say):
    if not 0 <= arguments.seconds < math.inf:
        raise ValueError(f"--seconds must be 0 or more, but {arguments.seconds} was received.")
    use_threads(arguments.threads)
    results, left_out = [], []
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
    return {"results": results, "left_out": left_out}


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
    if not 0 <= arguments.seconds < math.inf:
        raise ValueError(f"--seconds must be 0 or more, but {arguments.seconds} was received.")
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


def say_machine(numbers, output):
    facts = numbers["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    section(
        output,
        TITLES[numbers["benchmark"]],
        f"{facts['processor']}, {facts['cores']} cores, "
        f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}; {versions}.",
    )
    for sentence in numbers["left_out"]:
        output.print(sentence, markup=False, soft_wrap=True)


def bold_if_ours(column):
    return f"[bold]{column}[/]" if column.startswith(OURS) else column


def draw(groups, path):
    """Horizontal bars, a panel for each title; a line at 1 where the bars are ratios."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(groups) / 2)
    height = 0.9 + 0.27 * max(len(bars) for _, _, bars in groups)
    figure = Figure(figsize=(12, rows * height), layout="constrained")
    for panel, (title, axis_label, bars) in zip(
        figure.subplots(rows, 2, squeeze=False).flat, groups, strict=False
    ):
        names, values = zip(*bars, strict=True)
        colours = ["#d95f02" if name.startswith(OURS) else "#9aa5b1" for name in names]
        drawn = panel.barh(names, values, color=colours)
        panel.bar_label(
            drawn, fmt="%.2f" if "/" in axis_label else "%.0f", padding=3, fontsize=8, bbox=LABEL_BOX
        )
        if "/" in axis_label:
            panel.axvline(1, color="black", linewidth=0.8)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xlabel(axis_label, fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(figure.axes)[len(groups) :]:
        panel.set_axis_off()
    figure.savefig(path, dpi=150)


TITLES = {
    "layer": "One causal self-attention layer: time",
    "memory": "One causal self-attention layer: memory",
    "generate": "Greedy generation by one GPT-2",
    "train": "Training steps of one GPT-2",
}
BENCHMARKS = {
    "layer": (measure_layer, tell_layer, layer_bars),
    "memory": (measure_memory, tell_memory, memory_bars),
    "generate": (measure_generate, tell_generate, generate_bars),
    "train": (measure_train, tell_train, train_bars),
}

if __name__ == "__main__":
    run(main)

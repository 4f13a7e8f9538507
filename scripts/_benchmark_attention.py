"""Time and memory of one causal self-attention layer."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from _attention_peers import BASELINES, COLUMNS, DIRECTIONS, NEEDS, OURS, Shape, make_problem
from _benchmark_page import bold_if_ours, say_machine
from _page import point, print_columns, section
from _start import quiet_imports
from _timing import compare, installed, interleaved, quartiles, use_threads

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
MEGABYTE = 1_000_000


def measure_layer(arguments, say):
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
    command = [
        sys.executable,
        str(Path(__file__).with_name("benchmark.py")),
        "memory",
        "--child",
        json.dumps(wanted),
    ]
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


def tables(numbers):
    """The results by shape and direction: pairs of a title and its rows."""
    grouped = {}
    for row in numbers["results"]:
        grouped.setdefault(title_of(row["shape"], row["direction"]), []).append(row)
    return list(grouped.items())


def title_of(shape, direction):
    return f"{', '.join(f'{letter} {size}' for letter, size in shape.items())}, {direction}"

"""Speed and memory of the attention layers beside those of other libraries, on this machine's CPU.

python scripts/benchmark.py layer --threads 1
python scripts/benchmark.py memory --json memory.json --plot memory.png

Only ratios within one run mean something: machines differ, and so do two hours on one machine.
"""

import argparse
import json
import math
from pathlib import Path

import _benchmark_attention as attention
import _benchmark_models as models
from _benchmark_page import draw
from _start import check_count, check_file, check_picture, console, run, write_numbers, write_picture
from _timing import machine

DISTRIBUTIONS = ("keras-tinyattn", "tensorflow", "keras", "keras-hub", "torch", "jax", "numpy")


def main(argv=None):
    arguments = parse_arguments(argv)
    if getattr(arguments, "child", None):
        print(json.dumps(attention.measure_growth(**json.loads(arguments.child))))
        return
    check_count("--threads", arguments.threads, at_least=1)
    if not 0 <= getattr(arguments, "seconds", 0) < math.inf:
        raise ValueError(f"--seconds must be 0 or more, but {arguments.seconds} was received.")
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
    write_picture(output, arguments.plot, lambda part: draw(bars(numbers), part))
    write_numbers(output, arguments.json, numbers)


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


BENCHMARKS = {
    "layer": (attention.measure_layer, attention.tell_layer, attention.layer_bars),
    "memory": (attention.measure_memory, attention.tell_memory, attention.memory_bars),
    "generate": (models.measure_generate, models.tell_generate, models.generate_bars),
    "train": (models.measure_train, models.tell_train, models.train_bars),
}

if __name__ == "__main__":
    run(main)

"""Speed and memory on the CPU, beside other libraries or beside another commit of this package.

python scripts/benchmark.py layer --threads 1
python scripts/benchmark.py memory --json memory.json --plot memory.png
git worktree add ../before HEAD~1
python scripts/benchmark.py train --peers none --against ../before

Only ratios within one run mean something: machines differ, and so do two hours on one machine.
"""

import argparse
import importlib.util
import math
from pathlib import Path

from _start import check_count, check_file, check_picture, console, run, write_numbers, write_picture
from benchmarks.measure import measure_memory, measure_times
from benchmarks.page import draw, machine, show
from benchmarks.tables import AGAINST, BENCHMARKS, OURS, PEERS

CHECKOUT = Path(__file__).resolve().parents[1]
EPILOG = """
layer     time of one causal self-attention layer with its projections, forward and backward
memory    how much the peak of memory grows when one such layer gets 8192 and 16384 tokens
generate  200 new tokens, greedy, of one GPT-2, small (4 layers, 128 wide) or medium (6, 384)
train     steps of one GPT-2 on 32 x 128 tokens, small and medium

Each library computes in a process of its own, with the same weights and inputs. What they compute is
compared before anything is timed. Then they are called in turn, in a new order each round.
All of them: pip install "keras-tinyattn[bench]"
"""


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Measure this package beside other libraries, on the CPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark", choices=BENCHMARKS, metavar="benchmark", help="what is measured, see below"
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads for every library (default: 1)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="time for each table: as many rounds as fit, at least 3, of memory 1 (default: 20, or 0 "
        "with --quick)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="share the time among N sets of new processes, since one may be slower for as long as it "
        "lives (default: 1, or 3 with --against)",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=["all"],
        choices=["all", "none", *list(PEERS)[2:]],
        metavar="NAME",
        help=f"libraries to compare with, of {', '.join(list(PEERS)[2:])}; all, which leaves out those "
        "that are not installed (default); or none",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="another checkout of this repository, whose package is measured as well",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw bars to this .png, .svg or .pdf file"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, to see that everything runs; figures mean little",
    )
    return parser.parse_args(argv)


def main(argv=None):
    options = parse_arguments(argv)
    check_count("--threads", options.threads, at_least=1)
    if options.repeats is None:
        options.repeats = 3 if options.against else 1
    check_count("--repeats", options.repeats, at_least=1)
    if options.seconds is None:
        options.seconds = 0.0 if options.quick else 20.0
    if not 0 <= options.seconds < math.inf:
        raise ValueError(f"--seconds must be 0 or more, but {options.seconds} was received.")
    check_picture("--plot", options.plot)
    check_file("--json", options.json)
    options.packages = packages(options.against)
    options.peers, left_out = choose_peers(options)
    output = console()
    # A line that is on a terminal while there is nothing to read yet, and nowhere else.
    with output.status("measuring; this takes minutes") as status:
        measure = measure_memory if options.benchmark == "memory" else measure_times
        numbers = {
            "benchmark": options.benchmark,
            "machine": machine(options.threads),
            "against": options.against and str(options.against),
            "left_out": left_out,
            "results": measure(options, lambda what: status.update(f"measuring {what}")),
        }
    show(numbers, output)
    write_picture(output, options.plot, lambda part: draw(numbers, part))
    write_numbers(output, options.json, numbers)


def packages(against):
    """The checkouts whose package is measured, by peer."""
    if against is None:
        return {OURS: CHECKOUT}
    if not (against / "keras_tinyattn" / "__init__.py").is_file():
        raise ValueError(
            f"--against needs a checkout, but {str(against)!r} has no folder keras_tinyattn."
        )
    return {OURS: CHECKOUT, AGAINST: against.resolve()}


def choose_peers(options):
    """The peers of a run, ours first, and a sentence about each that is not installed.

    Raises:
        ValueError: if one is not installed that was asked for by its name.
    """
    takes_part = {peer for peer, _ in BENCHMARKS[options.benchmark].columns.values()}
    chosen, left_out = list(options.packages), []
    for peer, (_, module, distribution) in PEERS.items():
        if peer in chosen or peer not in takes_part or not {peer, "all"} & set(options.peers):
            continue
        if importlib.util.find_spec(module) is not None:
            chosen.append(peer)
            continue
        sentence = (
            f"{peer} is not installed; `pip install {distribution}` adds it, "
            '`pip install "keras-tinyattn[bench]"` adds all peers.'
        )
        if peer in options.peers:
            raise ValueError(f"--peers: {sentence}")
        left_out.append(sentence)
    return chosen, left_out


if __name__ == "__main__":
    run(main)

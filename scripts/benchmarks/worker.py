"""The process of one peer: `python -m benchmarks.worker MODULE`.

It reads requests from standard input and writes answers to standard output, each a line of JSON. A
request names one of COMMANDS and its arguments: `{"do": "timed", "column": "torch"}`; an answer is
`{"answer": ...}` or `{"error": "a sentence"}`. The module has a function for each benchmark that it
takes part in, `layer(problem, **settings)`, which returns a function that computes a NumPy array.
"""

import contextlib
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import problems

MEGABYTE = 1_000_000
FUNCTIONS = {}


def main(module):
    # Libraries may print; standard output is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": COMMANDS[request.pop("do")](peer, **request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def hello(peer):
    """Say that the imports are done, and from where this project's package came."""
    return getattr(sys.modules.get("keras_tinyattn"), "__file__", None)


def make(peer, benchmark, size, columns):
    """Make the functions of some columns, in place of those made before."""
    FUNCTIONS.clear()
    problem = getattr(problems, benchmark)(size)
    for column, settings in columns.items():
        FUNCTIONS[column] = getattr(peer, benchmark)(problem, **settings)


def output(peer, column, path):
    """Write what a function computes at its first two calls: a training step changes the second."""
    np.save(path, [FUNCTIONS[column](), FUNCTIONS[column]()])


def timed(peer, column):
    """Process CPU seconds and wall seconds of one call."""
    function = FUNCTIONS[column]
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


def grow(peer, size, settings, path):
    """By how many MB this process' peak memory grows at the first call of a layer."""
    warm_up = peer.layer(problems.layer(size | {"T": 32}), **settings)
    computes = peer.layer(problems.layer(size), **settings)
    warm_up()
    before = forget_peak_memory()
    computed = computes()
    grown = peak_memory() - before
    np.save(path, computed)
    return grown / MEGABYTE


def peak_memory():
    """The largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Linux counts the memory of the parent, before exec, in getrusage's.
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak_memory():
    """Where the system allows it, start from the resident memory of now; return the peak."""
    # Where it does not, growth below what the imports took at their height is not seen.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


COMMANDS = {command.__name__: command for command in (hello, make, output, timed, grow)}

if __name__ == "__main__":
    main(sys.argv[1])

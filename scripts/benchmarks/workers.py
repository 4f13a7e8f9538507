"""The processes of the peers: started together, asked one at a time, compared, timed in turn."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).parents[1]
# Float32 rounds to 6e-8; sums of thousands of terms in another order stay a hundred times below this.
LARGEST_DIFFERENCE = 1e-4


class Worker:
    """A process that computes for one peer.

    Args:
        name: what messages call it.
        module: what it imports, and nothing else of a library's.
        threads: how many threads the library may use.
        package: the folder from which it imports keras_tinyattn, or None.
    """

    def __init__(self, name, module, threads, package):
        self.name = name
        self._package = package
        path = filter(None, [SCRIPTS, package, os.environ.get("PYTHONPATH")])
        threads = str(threads)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "CUDA_VISIBLE_DEVICES": "-1",
            "JAX_PLATFORMS": "cpu",
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # JAX, torch, TensorFlow. (XLA may still use one thread more; CPU time counts it.)
            "NPROC": threads,
            "OMP_NUM_THREADS": threads,
            "TF_NUM_INTRAOP_THREADS": threads,
            "TF_NUM_INTEROP_THREADS": threads,
        }
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        # -P: only from PYTHONPATH, not from the folder in which the benchmark was called.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.worker", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )

    def ask(self, do, **arguments):
        """Give a command with its arguments to the process, and return its answer."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name}: the process {self._end()}. --peers can leave it out.")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def ready(self):
        """Wait until the process has imported what it needs, and check from where our package came."""
        file = self.ask("hello")
        if self._package and not Path(file or "").is_relative_to(self._package):
            raise ValueError(f"{self.name}: keras_tinyattn came from {file}, not from {self._package}.")

    def _end(self):
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        return f"{how}{'; it said: ' + lines[-1] if lines else ''}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()
        self._said.close()


def output(worker, do, **arguments):
    """What a command of a worker returns, and the array that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "output.npy")
        return worker.ask(do, path=str(path), **arguments), np.load(path)


def difference(column, array, reference, expected):
    """Refuse to go on unless two columns computed the same.

    Args:
        column: the name of a column.
        array: what it computed.
        reference: the name of the column with which it is compared.
        expected: what that one computed.

    Returns:
        The largest difference, as a share of the largest expected entry.

    Raises:
        ValueError: if the shapes differ; if the difference is above LARGEST_DIFFERENCE, or 0 between
            integers, or not a number.
    """
    if array.shape != expected.shape:
        raise ValueError(
            f"{column!r} computes the shape {array.shape}, {reference!r} {expected.shape}."
        )
    limit = 0 if np.issubdtype(expected.dtype, np.integer) else LARGEST_DIFFERENCE
    largest = float(np.max(np.abs(array - expected)) / np.max(np.abs(expected)))
    if not largest <= limit:
        raise ValueError(
            f"{column!r} computes something else than {reference!r}: they differ by {largest:.1e} of "
            f"the largest entry, and {limit:.0e} is allowed."
        )
    return largest


def interleaved(calls, seconds, at_least, seed=0):
    """Time calls in turn, in a new order each round, so that a slow spell meets all alike.

    Args:
        calls: maps a column to a function that makes one call and returns its CPU and wall seconds;
            what it calls is compiled already.
        seconds: how long to go on, about.
        at_least: the fewest rounds.
        seed: seed of the orders.

    Returns:
        Maps a column to an array `(rounds, 2)`.
    """
    order = np.random.default_rng(seed)
    names = list(calls)
    times = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while len(times[names[0]]) < at_least or time.perf_counter() < end:
        for index in order.permutation(len(names)):
            times[names[index]].append(calls[names[index]]())
    return {name: np.array(rounds) for name, rounds in times.items()}


def quartiles(values):
    """The first quartile, the median and the third quartile."""
    return dict(zip(("first", "median", "third"), np.percentile(values, [25, 50, 75]), strict=True))

"""Time several ways to compute the same thing, fairly: interleaved, in one process, compared first."""

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
from _start import quiet_imports

# Float32 rounds to 6e-8; sums of thousands of terms in another order stay a hundred times below this.
LARGEST_DIFFERENCE = 1e-4


def use_threads(threads):
    """Let TensorFlow, torch and JAX compute with so many threads, on the CPU.

    To be called before any of them has computed anything.
    """
    # JAX reads both while it is imported, TensorFlow is asked below.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = str(threads)
    with quiet_imports():
        import tensorflow as tf

        if importlib.util.find_spec("torch"):
            import torch

            torch.set_num_threads(threads)
    # Each column is a tf.function of its own, which TensorFlow warns of as one function traced again.
    tf.get_logger().setLevel("ERROR")
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def installed(columns, needs):
    """Split columns into those whose library is there and sentences about the others.

    Args:
        columns: names.
        needs: maps a name to the pair of module and distribution that it needs.

    Returns:
        A list of names, and a list of sentences, one a missing distribution, which say how to
        install it.
    """
    missing = {
        name: needs[name][1]
        for name in columns
        if name in needs and importlib.util.find_spec(needs[name][0]) is None
    }
    sentences = [
        f"{distribution} is not installed and is left out; `pip install {distribution}` adds it, "
        '`pip install "keras-tinyattn[bench]"` adds all peers.'
        for distribution in dict.fromkeys(missing.values())
    ]
    return [name for name in columns if name not in missing], sentences


def compare(arrays, reference):
    """Refuse to go on unless all columns computed the same.

    Args:
        arrays: maps a column to its array.
        reference: the column with which the others are compared.

    Returns:
        Maps a column to its largest difference, as a share of the reference's largest entry.

    Raises:
        ValueError: if one differs by more than LARGEST_DIFFERENCE, or is not a number.
    """
    expected = arrays[reference]
    scale = np.max(np.abs(expected))
    differences = {}
    for name, array in arrays.items():
        if array.shape != expected.shape:
            raise ValueError(
                f"{name!r} computes the shape {array.shape}, {reference!r} {expected.shape}."
            )
        differences[name] = float(np.max(np.abs(array - expected)) / scale)
        if not differences[name] <= LARGEST_DIFFERENCE:
            raise ValueError(
                f"{name!r} computes something else than {reference!r}: they differ by "
                f"{differences[name]:.1e} of the largest entry; rounding stays below "
                f"{LARGEST_DIFFERENCE:.0e}."
            )
    return differences


def interleaved(functions, seconds, at_least, seed=0):
    """Time functions in turn, in a new order each round, so that a slow spell meets all alike.

    Args:
        functions: maps a column to a function of no arguments that ends when its result is there. They
            have run before, so that nothing is compiled while the clock runs.
        seconds: how long to go on, about.
        at_least: the least number of rounds.
        seed: seed of the orders.

    Returns:
        Maps a column to its process CPU times and wall times, two lists of seconds.
    """
    order = np.random.default_rng(seed)
    names = list(functions)
    times = {name: ([], []) for name in names}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < at_least or time.perf_counter() < end:
        for index in order.permutation(len(names)):
            wall, cpu = time.perf_counter(), time.process_time()
            functions[names[index]]()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            times[names[index]][0].append(cpu)
            times[names[index]][1].append(wall)
        rounds += 1
    return times


def quartiles(seconds):
    """Milliseconds: the first quartile, the median and the third quartile."""
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"first": 1e3 * first, "median": 1e3 * median, "third": 1e3 * third}


def machine(threads, distributions):
    """What a reader must know to judge a figure: the processor, threads and versions."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = models[0].partition(":")[2].strip() if models else processor
    versions = {}
    for distribution in distributions:
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[distribution] = None
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }

"""Two ways to measure: the time of calls in processes that stay, the memory of one call in a new process."""

import functools
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.tables import AGAINST, BENCHMARKS, OURS, PEERS, columns_of, tokens
from benchmarks.workers import Worker, difference, interleaved, output, quartiles


def start(peer, options):
    """The process of a peer."""
    return Worker(peer, PEERS[peer][0], options.threads, options.packages.get(peer))


def measure_times(options, say):
    """A row for each column of each table: times of calls, of which it was seen that they compute the same."""
    benchmark = BENCHMARKS[options.benchmark]
    rows = []
    with ExitStack() as stack:
        say("the imports")
        workers = {peer: stack.enter_context(start(peer, options)) for peer in options.peers}
        for worker in workers.values():
            worker.ready()
        for title, size in (benchmark.quick if options.quick else benchmark.tables).items():
            columns = columns_of(options.benchmark, size, workers)
            say(f"{title}: what the columns compute")
            differences = compute_once(options.benchmark, size, columns, workers)
            say(title)
            calls = {
                column: functools.partial(workers[peer].ask, "timed", column=column)
                for column, (peer, _) in columns.items()
            }
            times = interleaved(calls, 0 if options.quick else options.seconds)
            rows += [
                {
                    "table": title,
                    "size": size,
                    "column": column,
                    "peer": peer,
                    "part": is_part(settings),
                    "rounds": len(times[column]),
                    "cpu_ms": quartiles(1e3 * times[column][:, 0]),
                    "wall_ms": quartiles(1e3 * times[column][:, 1]),
                    "tokens_per_second": tokens(size, **settings) / np.median(times[column][:, 0]),
                    "largest_difference": differences[column],
                }
                for column, (peer, settings) in columns.items()
            ]
            add_ratios(rows[-len(columns) :], times, benchmark.baselines)
    return rows


def compute_once(benchmark, size, columns, workers):
    """Make the functions of a table and compare what they compute: a largest difference for each column."""
    arrays = {}
    for peer, worker in workers.items():
        own = {column: settings for column, (of, settings) in columns.items() if of == peer}
        worker.ask("make", benchmark=benchmark, size=size, columns=own)
        arrays |= {column: output(worker, "output", column=column)[1] for column in own}
    reference = next(name for name, (_, settings) in columns.items() if not is_part(settings))
    differences = {}
    for column, (_, settings) in columns.items():
        array, expected = arrays[column], arrays[reference]
        if settings.get("unequal"):
            # Every second prompt is as long as elsewhere.
            array, expected = array[:, ::2], expected[:, ::2]
        expected = expected[..., : int(settings.get("share", 1) * expected.shape[-1])]
        differences[column] = difference(column, array, reference, expected)
    return differences


def is_part(settings):
    """Whether a column computes other than the whole problem that all peers compute."""
    return bool(settings.keys() & {"unequal", "share"})


def add_ratios(rows, times, baselines):
    """Add how many times as fast each row is as the best of each baseline, and our times as a share of AGAINST's."""
    for row in rows:
        best = {
            peer: max(
                (other["tokens_per_second"] for other in rows if other["peer"] == peer), default=None
            )
            for peer in baselines
        }
        row["ratios"] = {
            peer: row["tokens_per_second"] / speed for peer, speed in best.items() if speed
        }
        against = times.get(row["column"].replace(OURS, AGAINST))
        # Both calls of a round met the same machine: a share for each round.
        row["time_to_against"] = (
            quartiles(times[row["column"]][:, 0] / against[:, 0])
            if row["peer"] == OURS and against is not None
            else None
        )


def measure_memory(options, say):
    """A row for each column of each table: the growth of a new process' peak memory, medians of the rounds."""
    benchmark = BENCHMARKS["memory"]
    rows = []
    tables = benchmark.quick if options.quick else benchmark.tables
    shortest = min(size["T"] for size in tables.values())
    for title, size in tables.items():
        columns = {
            column: (peer, settings)
            for column, (peer, settings) in columns_of("memory", size, options.peers).items()
            if peer in (OURS, AGAINST) or size["T"] == shortest
        }
        growth, arrays = {column: [] for column in columns}, {}
        end = time.perf_counter() + (0 if options.quick else options.seconds)
        while not arrays or time.perf_counter() < end:
            for column, (peer, settings) in columns.items():
                say(f"{title}: {column}")
                # One at a time: Keras' layer needs the machine's memory for itself.
                with start(peer, options) as worker:
                    worker.ready()
                    grown, arrays[column] = output(worker, "grow", size=size, settings=settings)
                growth[column].append(grown)
        reference = next(iter(columns))
        rows += [
            {
                "table": title,
                "size": size,
                "column": column,
                "peer": peer,
                "rounds": len(growth[column]),
                "growth_mb": float(np.median(growth[column])),
                "largest_difference": difference(column, arrays[column], reference, arrays[reference]),
            }
            for column, (peer, _) in columns.items()
        ]
    return rows

"""The time of calls in processes that stay, and the memory of one call in a new process."""

import functools
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.tables import AGAINST, BENCHMARKS, OURS, PEERS, columns_of, is_part, tokens
from benchmarks.workers import Worker, difference, interleaved, output, quartiles


def start(peer, options):
    """The process of a peer."""
    return Worker(peer, PEERS[peer][0], options.threads, options.packages.get(peer))


def measure_times(options, say):
    """A row of times for each column of each table, whose columns were seen to compute the same."""
    benchmark = BENCHMARKS[options.benchmark]
    tables = benchmark.quick if options.quick else benchmark.tables
    times = {title: {} for title in tables}
    differences, at_least = {}, max(1, 3 // options.repeats)
    for repeat in range(options.repeats):
        with ExitStack() as stack:
            say("the imports")
            workers = {peer: stack.enter_context(start(peer, options)) for peer in options.peers}
            for worker in workers.values():
                worker.ready()
            for title, size in tables.items():
                say(f"{title}: what the columns compute")
                columns = columns_of(options.benchmark, size, workers)
                differences[title] = compute_once(options.benchmark, size, columns, workers)
                say(title)
                calls = {
                    column: functools.partial(workers[peer].ask, "timed", column=column)
                    for column, (peer, _) in columns.items()
                }
                new = interleaved(calls, options.seconds / options.repeats, at_least, seed=repeat)
                for column in columns:
                    times[title].setdefault(column, []).extend(new[column])
    rows = []
    for title, size in tables.items():
        columns = columns_of(options.benchmark, size, options.peers)
        cpu, wall = (
            {name: 1e3 * np.array(times[title][name])[:, i] for name in columns} for i in (0, 1)
        )
        table = [
            {
                "table": title,
                "size": size,
                "column": column,
                "peer": peer,
                "settings": settings,
                "rounds": len(cpu[column]),
                "cpu_ms": quartiles(cpu[column]),
                "wall_ms": quartiles(wall[column]),
                "tokens_per_second": 1e3 * tokens(size, **settings) / np.median(cpu[column]),
                "largest_difference": differences[title][column],
            }
            for column, (peer, settings) in columns.items()
        ]
        add_ratios(table, cpu, benchmark.baselines)
        rows += table
    return rows


def compute_once(benchmark, size, columns, workers):
    """Make a table's functions and compare what they compute: the largest difference by column."""
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


def add_ratios(rows, cpu, baselines):
    """Add the ratio of each row's speed to the best of each baseline, and our time / AGAINST's."""
    best = {
        peer: max(row["tokens_per_second"] for row in rows if row["peer"] == peer)
        for peer in baselines
        if any(row["peer"] == peer for row in rows)
    }
    for row in rows:
        row["ratios"] = {peer: row["tokens_per_second"] / speed for peer, speed in best.items()}
        against = row["column"].replace(OURS, AGAINST)
        row["time_to_against"] = None
        if row["peer"] == OURS and against in cpu:
            # Both calls of a round met the same machine: a ratio for each round.
            row["time_to_against"] = quartiles(cpu[row["column"]] / cpu[against])


def measure_memory(options, say):
    """For each column of each table, by how much the peak memory of a new process grows."""
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
        reference = next(iter(columns))
        growth, arrays = {column: [] for column in columns}, {}
        end = time.perf_counter() + options.seconds
        while len(growth[reference]) < options.repeats or time.perf_counter() < end:
            for column, (peer, settings) in columns.items():
                say(f"{title}: {column}")
                # One at a time: Keras' layer needs the machine's memory for itself.
                with start(peer, options) as worker:
                    worker.ready()
                    grown, arrays[column] = output(worker, "grow", size=size, settings=settings)
                growth[column].append(grown)
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

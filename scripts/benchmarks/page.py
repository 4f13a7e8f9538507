"""How the numbers are shown: the machine, tables, sentences, bars."""

import importlib.metadata
import math
import os
import platform
from pathlib import Path

from _page import point, print_columns, section
from benchmarks.tables import BENCHMARKS, OURS

DISTRIBUTIONS = ("keras-tinyattn", "tensorflow", "keras", "keras-hub", "torch", "jax", "numpy")
# A label stays legible where the line at 1 passes behind it.
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def machine(threads):
    """What a reader must know to judge a figure: the processor, threads and versions."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = models[0].partition(":")[2].strip() if models else processor
    versions = {}
    for distribution in DISTRIBUTIONS:
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


def show(numbers, output):
    """Print what was measured, and what the numbers say."""
    facts, name = numbers["machine"], numbers["benchmark"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    section(
        output,
        BENCHMARKS[name].title,
        f"{facts['processor']}, {facts['cores']} cores, "
        f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}; {versions}.",
    )
    for sentence in numbers["left_out"]:
        output.print(sentence, markup=False, soft_wrap=True)
    for title, rows in tables(numbers):
        (show_growth if name == "memory" else show_times)(title, rows, output)
    section(output, "What the numbers say")
    point(output, about_outputs(numbers))
    for sentence in about_growth(numbers) if name == "memory" else about_speed(numbers):
        point(output, sentence)
    if numbers["against"] and name != "memory":
        show_against(numbers, output)


def tables(numbers):
    """Pairs of a title and its rows."""
    grouped = {}
    for row in numbers["results"]:
        grouped.setdefault(row["table"], []).append(row)
    return list(grouped.items())


def show_times(title, rows, output):
    baselines = list(rows[0]["ratios"])
    ratios = f"; ratios of speed to the best of {' and of '.join(baselines)}" if baselines else ""
    section(output, title, f"{rows[0]['rounds']} rounds, medians, +- half of the middle half{ratios}")
    print_columns(
        output,
        ["", "CPU ms", "+-", "wall ms", "tokens/s", *(f"/{peer}" for peer in baselines)],
        [
            [
                bold_if_ours(row["column"]),
                f"{row['cpu_ms']['median']:.2f}",
                f"{spread(row['cpu_ms']):.0%}",
                f"{row['wall_ms']['median']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                *(f"{row['ratios'][peer]:.2f}" for peer in baselines),
            ]
            for row in rows
        ],
        "lrrrr" + "r" * len(baselines),
    )


def spread(quartiles):
    """Half the distance of the quartiles, as a share of the median."""
    return (quartiles["third"] - quartiles["first"]) / 2 / quartiles["median"]


def show_growth(title, rows, output):
    print_columns(
        output,
        [title, "grows by MB"],
        [[bold_if_ours(row["column"]), f"{row['growth_mb']:.0f}"] for row in rows],
        "lr",
    )


def show_against(numbers, output):
    section(
        output,
        f"Time, as a share of that of {numbers['against']}",
        "more is slower; each round by itself: median and middle half",
    )
    for title, rows in tables(numbers):
        print_columns(
            output,
            [title, "", ""],
            [
                [
                    row["column"],
                    "{median:.3f}".format(**share),
                    "({first:.3f}-{third:.3f})".format(**share),
                ]
                for row in rows
                if (share := row["time_to_against"])
            ],
            "lrl",
        )


def about_outputs(numbers):
    if numbers["benchmark"] == "generate":
        return "All columns wrote the same ids."
    largest = max(numbers["results"], key=lambda row: row["largest_difference"])
    return (
        f"All columns computed the same: the largest difference is {largest['largest_difference']:.0e} "
        f"of the largest entry ({largest['column']}; {largest['table']})."
    )


def about_speed(numbers):
    for title, rows in tables(numbers):
        whole = [row for row in rows if not row["part"]]
        fastest = max(whole, key=lambda row: row["tokens_per_second"])
        ours = max(
            (row for row in whole if row["peer"] == OURS), key=lambda row: row["tokens_per_second"]
        )
        ratios = " and ".join(
            f"{ratio:.2f} times as fast as the best of {peer}" for peer, ratio in ours["ratios"].items()
        )
        yield (
            f"{title}: {ours['column']} is {ratios + '; the' if ratios else 'the best of ours; the'} "
            f"fastest of all is {fastest['column']}."
        )
        for column in (f"{OURS}, XLA", f"{OURS}, graph"):
            times = [
                row["cpu_ms"]["median"]
                for share in (", 1/4 new", ", 1/2 new", "")
                for row in rows
                if row["column"] == column.replace(",", share + ",", 1)
            ]
            if len(times) == 3:
                few, half, whole_time = times
                # Half lies at a third of the way from a quarter to the whole.
                line = few + (whole_time - few) / 3
                yield (
                    f"{column}: {few:.1f}, {half:.1f} and {whole_time:.1f} ms for 1/4, 1/2 and all of the "
                    f"new tokens; the middle one is {half / line:.2f} of what a line through the others gives."
                )


def about_growth(numbers):
    longer = {}
    for title, rows in tables(numbers):
        growth = {row["column"]: row["growth_mb"] for row in rows}
        ours = max((row["column"] for row in rows if row["peer"] == OURS), key=growth.get)
        for peer in ("Keras", "torch"):
            theirs = [row["growth_mb"] for row in rows if row["peer"] == peer]
            if theirs:
                yield f"{title}: {ours} takes {growth[ours]:.0f} MB, {peer} at least {min(theirs):.0f}."
        for row in rows:
            longer.setdefault((row["column"], row["size"]["direction"]), []).append(row)
    for (column, direction), rows in longer.items():
        if len(rows) == 2:
            (short, long) = rows
            yield (
                f"{column}, {direction}: {long['size']['T'] / short['size']['T']:.0f} times the tokens take "
                f"{long['growth_mb'] / short['growth_mb']:.2f} times the memory."
            )


def bold_if_ours(column):
    return f"[bold]{column}[/]" if column.startswith(OURS) else column


def draw(numbers, path):
    """Horizontal bars, a panel for each table; a line at 1 where the bars are ratios."""
    from matplotlib.figure import Figure

    groups = tables(numbers)
    unit = "growth of the peak memory, MB" if numbers["benchmark"] == "memory" else "CPU ms"
    baseline = next(iter(groups[0][1][0].get("ratios", {})), None)
    height = 0.9 + 0.27 * max(len(rows) for _, rows in groups)
    lines = math.ceil(len(groups) / 2)
    figure = Figure(figsize=(12, lines * height), layout="constrained")
    panels = list(figure.subplots(lines, 2, squeeze=False).flat)
    for panel, (title, rows) in zip(panels, groups, strict=False):
        if baseline:
            values = [row["ratios"][baseline] for row in rows]
            panel.axvline(1, color="black", linewidth=0.8)
        else:
            values = [row.get("growth_mb") or row["cpu_ms"]["median"] for row in rows]
        colours = ["#d95f02" if row["peer"] == OURS else "#9aa5b1" for row in rows]
        bars = panel.barh([row["column"] for row in rows], values, color=colours)
        number = "%.2f" if baseline else "%.0f"
        panel.bar_label(bars, fmt=number, padding=3, fontsize=8, bbox=LABEL_BOX)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xlabel(f"speed / the best of {baseline}" if baseline else unit, fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    figure.savefig(path, dpi=150)

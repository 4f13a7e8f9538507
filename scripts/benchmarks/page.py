"""How the numbers are shown: the machine, tables, sentences, bars."""

import importlib.metadata
import math
import os
import platform
from pathlib import Path

from _page import point, print_columns, section

from benchmarks.tables import AGAINST, BENCHMARKS, OURS, is_part

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
    found = {found.name: found.version for found in importlib.metadata.distributions()}
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found.get(name) for name in DISTRIBUTIONS},
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
                three_digits(row["cpu_ms"]["median"]),
                f"{spread(**row['cpu_ms']):.0%}",
                three_digits(row["wall_ms"]["median"]),
                f"{row['tokens_per_second']:.0f}",
                *(f"{row['ratios'][peer]:.2f}" for peer in baselines),
            ]
            for row in rows
        ],
        "lrrrr" + "r" * len(baselines),
    )


def spread(first, median, third):
    return (third - first) / 2 / median


def three_digits(number):
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


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
        f"Our time / that of the package in {numbers['against']}",
        "Below 1 is faster. A ratio for each round: the median, and in parentheses the middle half.",
    )
    lines, medians = [], []
    for title, rows in tables(numbers):
        lines.append([f"[bold]{title}[/]", "", ""])
        for row in rows:
            if row["time_to_against"]:
                first, median, third = row["time_to_against"].values()
                lines.append([f"  {row['column']}", f"{median:.3f}", f"({first:.3f}-{third:.3f})"])
                medians.append(median)
    print_columns(output, ["", "time", ""], lines, "lrl")
    mean = math.exp(sum(map(math.log, medians)) / len(medians))
    point(output, f"The geometric mean is {mean:.3f}, the largest is {max(medians):.3f}.")


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
        whole = [row for row in rows if not is_part(row["settings"]) and row["peer"] != AGAINST]
        fastest = max(whole, key=lambda row: row["tokens_per_second"])
        ours = max(
            (row for row in whole if row["peer"] == OURS), key=lambda row: row["tokens_per_second"]
        )
        if ours["ratios"]:
            ratios = [f"{ratio:.2f} times as fast as {peer}" for peer, ratio in ours["ratios"].items()]
            yield (
                f"{title}: {ours['column']} is {' and '.join(ratios)}, each at its best; the fastest "
                f"is {fastest['column']}."
            )
        yield from about_lengths(title, rows)


def about_lengths(title, rows):
    for row in rows:
        parts = [
            other["cpu_ms"]["median"]
            for other in sorted(rows, key=lambda other: other["settings"].get("share", 1))
            if other["peer"] == OURS
            and other["settings"].get("share", 1) < 1
            and other["settings"]["jit_compile"] == row["settings"].get("jit_compile")
        ]
        if row["peer"] == OURS and not is_part(row["settings"]) and parts:
            quarter, half, whole = *parts, row["cpu_ms"]["median"]
            # From a quarter to the whole, a half is a third of the way.
            line = quarter + (whole - quarter) / 3
            yield (
                f"{title}, {row['column']}: {three_digits(quarter)}, {three_digits(half)} and "
                f"{three_digits(whole)} ms for 1/4, 1/2 and all of the new tokens; the middle one is "
                f"{half / line:.2f} of what a line through the others gives."
            )


def about_growth(numbers):
    by_column = {}
    for title, rows in tables(numbers):
        most = max((row for row in rows if row["peer"] == OURS), key=lambda row: row["growth_mb"])
        others = [f"{row['column']} {row['growth_mb']:.0f}" for row in rows if row["peer"] != OURS]
        if others:
            yield f"{title}: {most['column']} takes {most['growth_mb']:.0f} MB, {', '.join(others)}."
        for row in rows:
            by_column.setdefault((row["column"], row["size"]["direction"]), []).append(row)
    for (column, direction), (short, *longer) in by_column.items():
        for long in longer:
            yield (
                f"{column}, {direction}: {long['size']['T'] / short['size']['T']:.0f} times the tokens "
                f"take {long['growth_mb'] / short['growth_mb']:.2f} times the memory."
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
    panels = list(figure.subplots(lines, min(2, len(groups)), squeeze=False).flat)
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

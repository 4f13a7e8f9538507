"""How a benchmark shows its numbers: the machine, our columns, bars."""

import math

from _attention_peers import OURS
from _page import section

TITLES = {
    "layer": "One causal self-attention layer: time",
    "memory": "One causal self-attention layer: memory",
    "generate": "Greedy generation by one GPT-2",
    "train": "Training steps of one GPT-2",
}
# A label stays legible where the line at 1 passes behind it.
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def say_machine(numbers, output):
    facts = numbers["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    section(
        output,
        TITLES[numbers["benchmark"]],
        f"{facts['processor']}, {facts['cores']} cores, "
        f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}; {versions}.",
    )
    for sentence in numbers["left_out"]:
        output.print(sentence, markup=False, soft_wrap=True)


def bold_if_ours(column):
    return f"[bold]{column}[/]" if column.startswith(OURS) else column


def draw(groups, path):
    """Horizontal bars, a panel for each title; a line at 1 where the bars are ratios."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(groups) / 2)
    height = 0.9 + 0.27 * max(len(bars) for _, _, bars in groups)
    figure = Figure(figsize=(12, rows * height), layout="constrained")
    for panel, (title, axis_label, bars) in zip(
        figure.subplots(rows, 2, squeeze=False).flat, groups, strict=False
    ):
        names, values = zip(*bars, strict=True)
        colours = ["#d95f02" if name.startswith(OURS) else "#9aa5b1" for name in names]
        drawn = panel.barh(names, values, color=colours)
        panel.bar_label(
            drawn, fmt="%.2f" if "/" in axis_label else "%.0f", padding=3, fontsize=8, bbox=LABEL_BOX
        )
        if "/" in axis_label:
            panel.axvline(1, color="black", linewidth=0.8)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xlabel(axis_label, fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(figure.axes)[len(groups) :]:
        panel.set_axis_off()
    figure.savefig(path, dpi=150)

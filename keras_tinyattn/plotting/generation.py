"""Distributions to sample from, and what each step of a generation computes."""

import math

import numpy as np

from keras_tinyattn.plotting._figure import (
    BLUE,
    FAINT,
    INK,
    NEVER,
    ORANGE,
    PALE_BLUE,
    as_numbers,
    check_labels,
    make_panels,
    one_colour,
    set_labels,
)

__all__ = ["plot_cached_steps", "plot_distributions"]


def plot_distributions(probabilities, tokens, titles=None, before=None, drawn=None, title=None):
    """Draw distributions over the same tokens: one panel each, with a bar for each token.

    Args:
        probabilities: `(N, V)`, each in [0, 1].
        tokens: V labels, from the top down.
        titles: N titles; none unless given.
        before: `(V,)` probabilities to compare with, an outline in every panel; none unless given.
        drawn: `(N, V)`, how often each token was sampled, as shares, shown as dots; none unless given.
        title: a line above the picture; none unless given.

    Returns:
        A `matplotlib.figure.Figure`, at most three panels side by side.

    Raises:
        ValueError: if the labels do not fit the probabilities.
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> figure = plot_distributions([[0.9, 0.1], [0.6, 0.4]], ["cat", "dog"], ["cold", "hot"])
    >>> [axes.get_title() for axes in figure.axes]
    ['cold', 'hot']
    """
    probabilities = as_numbers(probabilities)
    before = None if before is None else as_numbers(before)
    drawn = None if drawn is None else as_numbers(drawn)
    count, size = probabilities.shape
    titles = [""] * count if titles is None else titles
    check_labels("tokens", tokens, "column", size)
    check_labels("titles", titles, "row", count)
    columns = min(count, 3)
    figure, panels = make_panels((max(2, size / 3), 4), math.ceil(count / columns), columns, title)
    highest = max(np.max(part) for part in (probabilities, before, drawn) if part is not None)
    for index, axes in enumerate(panels):
        if index >= count:
            axes.set_axis_off()
            continue
        axes.barh(range(size), probabilities[index], color="#6f9fc8", label="sampled from")
        if before is not None:
            axes.barh(range(size), before, fill=False, edgecolor=FAINT, linewidth=0.9, label="before")
        if drawn is not None:
            # A token that cannot be sampled, and was not, has no dot.
            share = np.ma.masked_where((probabilities[index] == 0) & (drawn[index] == 0), drawn[index])
            axes.plot(share, range(size), ".", color=ORANGE, markersize=7, label="share sampled")
        for row, probability in enumerate(probabilities[index]):
            reach = max(part[row] for part in (probabilities[index], before) if part is not None)
            if drawn is not None:
                reach = max(reach, drawn[index][row])
            if probability > 0.0:
                axes.text(
                    reach + 0.03 * highest,
                    row,
                    f"{100 * probability:.1f}%",
                    va="center",
                    color=INK,
                    fontsize=9,
                )
        set_labels(axes.yaxis, axes.set_yticks, tokens)
        axes.set_xlim(0.0, 1.25 * highest)
        axes.set_ylim(size - 0.4, -0.6)
        axes.set_xticks([])
        axes.tick_params(length=0, labelcolor=INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_title(titles[index], color=INK, fontsize=12, fontweight="bold", parse_math=False)
    if before is not None or drawn is not None:
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            labelcolor=INK,
        )
    return figure


def plot_cached_steps(computed, held, curves, title=None):
    """Draw which keys each step of a generation computes, which it finds in a cache, and the cost.

    Args:
        computed: a dictionary from the name of a method to `(N, S)` booleans: whether step n computes
            the key of position s.
        held: as `computed`: whether step n finds it in a cache.
        curves: a dictionary from the name of a cost to a dictionary from the same names to `(N,)`
            numbers of at least 0.
        title: a line above the picture; none unless given.

    Returns:
        A `matplotlib.figure.Figure`, a map for each method and a panel for each cost.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> figure = plot_cached_steps(
    ...     {"whole window": [[True, False], [True, True]], "cache": [[True, False], [False, True]]},
    ...     {"whole window": [[False] * 2] * 2, "cache": [[False, False], [True, False]]},
    ...     {"keys computed": {"whole window": [1, 2], "cache": [1, 1]}},
    ... )
    >>> [axes.get_title() for axes in figure.axes if axes.axison]
    ['whole window', 'cache', 'keys computed']
    """
    colours = dict(zip(computed, (ORANGE, BLUE), strict=False))
    figure, panels = make_panels((4, 6), math.ceil((len(computed) + len(curves)) / 2), 2, title)
    for axes in panels[len(computed) + len(curves) :]:
        axes.set_axis_off()
    for axes, name in zip(panels, computed, strict=False):
        found, made = np.asarray(held[name], bool), np.asarray(computed[name], bool)
        axes.set_facecolor(NEVER)
        for cells, colour, label in (
            (found, PALE_BLUE, "in the cache"),
            (made, colours[name], "computed"),
        ):
            axes.imshow(
                np.ma.masked_where(~cells, np.zeros(cells.shape)),
                cmap=one_colour(colour),
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, cells.shape[1] - 0.5, len(cells) + 0.5, 0.5),
            )
            # A map makes no entry in a legend by itself.
            if np.any(cells):
                axes.plot([], [], "s", color=colour, label=label)
        axes.set_title(name, color=INK, fontsize=12, fontweight="bold", parse_math=False)
        axes.set_xlabel("position of the key", color=FAINT)
        axes.set_ylabel("step", color=FAINT)
        axes.tick_params(labelcolor=INK, color=FAINT)
        axes.spines[:].set_visible(False)
        axes.legend(loc="upper right", labelcolor=INK, edgecolor="white", framealpha=0.9)
    for axes, (name, lines) in zip(panels[len(computed) :], curves.items(), strict=False):
        for label, values in lines.items():
            axes.plot(np.arange(1, len(values) + 1), values, color=colours[label], label=label)
        axes.set_title(name, color=INK, fontsize=12, fontweight="bold", parse_math=False)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("step", color=FAINT)
        axes.tick_params(labelcolor=INK, color=FAINT)
        axes.grid(color=NEVER)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, labelcolor=INK)
    return figure

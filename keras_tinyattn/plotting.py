"""Attention as a picture: who looks at whom, and how much.

Drawing needs matplotlib (`pip install "keras-tinyattn[plot]"`); importing this module does not.
The functions return a matplotlib `Figure` that belongs to nobody else: nothing to close, no display
needed, `figure.savefig("attention.png")` writes it.
"""

import math

import numpy as np
from keras import ops

__all__ = [
    "plot_attention",
    "plot_cached_steps",
    "plot_distributions",
    "plot_losses",
    "plot_trace",
]

# Up to this many rows and columns each cell shows its number.
NUMBERS_UP_TO = 12
# Beside that many labels, only each second, third, ... one fits.
LABELS_UP_TO = 48

INK = "#22303c"
FAINT = "#6b7785"
NEVER = "#eceff1"


def plot_attention(weights, query_tokens, key_tokens=None, title=None, head_titles=None):
    """Draw attention weights as heat maps: a row for each query, a column for each key.

    A weight that is exactly zero, such as one under a mask, is a grey cell without a number: there the
    query may not look at all.

    Args:
        weights: `(T, S)`, or `(H, T, S)` for one map a head; each in [0, 1].
        query_tokens: T labels of the rows.
        key_tokens: S labels of the columns; `query_tokens` unless given.
        title: a line above the picture; none unless given.
        head_titles: H titles; "head 1", "head 2" and so on unless given, and none above a lone map.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: if the labels do not fit the weights, or the weights are of another rank.
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> weights = [[1.0, 0.0], [0.3, 0.7]]
    >>> plot_attention(weights, ["The", "cat"]).savefig("attention.png")  # doctest: +SKIP
    """
    weights = _numbers(weights)
    if weights.ndim not in (2, 3):
        raise ValueError(
            "A picture shows the weights of one sequence. Expected shape (T, S) or (H, T, S). "
            f"Received: shape {weights.shape}. Pick one sequence of the batch: weights[0]."
        )
    lone = weights.ndim == 2
    maps = weights[None] if lone else weights
    key_tokens = query_tokens if key_tokens is None else key_tokens
    if head_titles is None:
        head_titles = [""] if lone else [f"head {head}" for head in range(1, len(maps) + 1)]
    _check_labels("head_titles", head_titles, "head", len(maps))
    columns = min(len(maps), 4)
    figure, panels = _panels(maps.shape[1:], math.ceil(len(maps) / columns), columns, title)
    for index, axes in enumerate(panels):
        if index >= len(maps):
            axes.set_axis_off()
            continue
        _heat_map(axes, maps[index], query_tokens, key_tokens, head_titles[index])
        if index % columns == 0:
            axes.set_ylabel("query: who looks", color=FAINT)
    return figure


def plot_trace(trace, tokens, head=0, batch=0, title=None):
    """Draw raw scores, scaled scores and weights of one head side by side.

    Both kinds of scores share one scale of colour, so that the scaling is seen as paler colours.

    Args:
        trace: an `AttentionTrace`, what `layer.trace(x)` returns.
        tokens: T labels, of rows and columns.
        head: which head, from 0.
        batch: which sequence of the batch, from 0.
        title: a line above the picture; none unless given.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: if the labels do not fit the trace.
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> plot_trace(layer.trace(x), ["The", "cat", "sat"]).savefig("trace.png")  # doctest: +SKIP
    """
    raw = _numbers(trace.raw_scores[batch, head])
    scaled = _numbers(trace.scaled_scores[batch, head])
    weights = _numbers(trace.weights[batch, head])
    limit = float(np.max(np.abs(raw), initial=0.0, where=np.isfinite(raw))) or 1.0
    head_dim = trace.queries.shape[-1]
    scaling = rf"$Q\,K^T/\sqrt{{{head_dim}}}$"
    figure, panels = _panels(raw.shape, 1, 3, title)
    _heat_map(panels[0], raw, tokens, tokens, "Raw scores", r"$Q\,K^T$", limit)
    _heat_map(panels[1], scaled, tokens, tokens, "Scaled scores", scaling, limit)
    _heat_map(panels[2], weights, tokens, tokens, "Weights", "softmax: each row shares out 100%")
    panels[0].set_ylabel("query: who looks", color=FAINT)
    return figure


def plot_losses(losses, evaluations=(), title=None):
    """Draw how the loss of a training run fell.

    Args:
        losses: the loss of each step, in nats; the first belongs to step 1.
        evaluations: pairs of a step and the loss of the validation text then.
        title: a line above the picture; none unless given.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> plot_losses([3.0, 2.5, 2.2], [(3, 2.4)]).savefig("losses.png")  # doctest: +SKIP
    """
    figure, (axes,) = _panels((5, 10), 1, 1, title)
    losses = np.asarray(losses, "float64")
    steps = np.arange(1, len(losses) + 1)
    # The mean of so many steps to either side shows the course under the noise of the batches.
    reach = len(losses) // 50
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    first, last = np.maximum(steps - 1 - reach, 0), np.minimum(steps + reach, len(losses))
    axes.plot(steps, losses, color="#a9c4dd", linewidth=0.8)
    axes.plot(steps, (sums[last] - sums[first]) / (last - first), color="#1f5f99", label="training")
    if len(evaluations):
        axes.plot(*zip(*evaluations, strict=True), "o-", color="#c2571a", label="validation")
    axes.set_xlabel("step", color=FAINT)
    axes.set_ylabel("loss, nats a token", color=FAINT)
    axes.grid(color=NEVER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def plot_distributions(probabilities, tokens, titles=None, before=None, drawn=None, title=None):
    """Draw distributions over the same tokens: a panel each, a bar for each token.

    Args:
        probabilities: `(N, V)`, each in [0, 1].
        tokens: V labels, from the top down.
        titles: N titles; none unless given.
        before: `(V,)` probabilities to compare with, an outline in every panel; none unless given.
        drawn: `(N, V)` shares of draws, a dot each; none unless given.
        title: a line above the picture; none unless given.

    Returns:
        A `matplotlib.figure.Figure`, at most three panels side by side.

    Raises:
        ValueError: if the labels do not fit the probabilities.
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> plot_distributions([[0.9, 0.1], [0.6, 0.4]], ["cat", "dog"], ["cold", "hot"])  # doctest: +SKIP
    """
    probabilities = _numbers(probabilities)
    count, size = probabilities.shape
    titles = [""] * count if titles is None else titles
    _check_labels("tokens", tokens, "column", size)
    _check_labels("titles", titles, "row", count)
    columns = min(count, 3)
    figure, panels = _panels((max(2, size / 3), 4), math.ceil(count / columns), columns, title)
    highest = max(np.max(part) for part in (probabilities, before, drawn) if part is not None)
    for index, axes in enumerate(panels):
        if index >= count:
            axes.set_axis_off()
            continue
        axes.barh(range(size), probabilities[index], color="#6f9fc8", label="drawn with")
        if before is not None:
            axes.barh(range(size), before, fill=False, edgecolor=FAINT, linewidth=0.9, label="before")
        if drawn is not None:
            axes.plot(
                drawn[index], range(size), ".", color="#c2571a", markersize=7, label="share drawn"
            )
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
        _ticks(axes.yaxis, axes.set_yticks, tokens)
        axes.set_xlim(0.0, 1.25 * highest)
        axes.set_ylim(size - 0.4, -0.6)
        axes.set_xticks([])
        axes.tick_params(length=0, labelcolor=INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_title(titles[index], color=INK, fontsize=12, fontweight="bold", parse_math=False)
    if before is not None or drawn is not None:
        panels[0].legend(frameon=False, loc="lower right", fontsize=9, labelcolor=INK)
    return figure


def plot_cached_steps(computed, held, curves, title=None):
    """Draw which keys each step of a generation computes and finds in a cache, and what it costs.

    Args:
        computed: a dictionary from the name of a way to generate to `(N, S)` booleans: whether step n
            computes the key of position s.
        held: as `computed`: whether step n finds it in a cache.
        curves: a dictionary from the name of a cost to a dictionary from the same names to `(N,)`
            numbers of at least 0.
        title: a line above the picture; none unless given.

    Returns:
        A `matplotlib.figure.Figure`, a map for each way and a panel for each cost.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> plot_cached_steps(
    ...     {"whole window": [[True, False], [True, True]], "cache": [[True, False], [False, True]]},
    ...     {"whole window": [[False] * 2] * 2, "cache": [[False, False], [True, False]]},
    ...     {"keys computed": {"whole window": [1, 2], "cache": [1, 1]}},
    ... ).savefig("cache.png")  # doctest: +SKIP
    """
    colours = dict(zip(computed, ("#c2571a", "#1f5f99"), strict=False))
    figure, panels = _panels((4, 6), math.ceil((len(computed) + len(curves)) / 2), 2, title)
    for axes in panels[len(computed) + len(curves) :]:
        axes.set_axis_off()
    for axes, name in zip(panels, computed, strict=False):
        found, made = np.asarray(held[name], bool), np.asarray(computed[name], bool)
        axes.set_facecolor(NEVER)
        for cells, colour, label in (
            (found, "#a9c4dd", "in the cache"),
            (made, colours[name], "computed"),
        ):
            axes.imshow(
                np.ma.masked_where(~cells, np.zeros(cells.shape)),
                cmap=_one_colour(colour),
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, cells.shape[1] - 0.5, len(cells) + 0.5, 0.5),
            )
            # A map has no entry of its own in a legend.
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


def _panels(shape, rows, columns, title):
    """A figure with `rows` x `columns` axes, each large enough for a map of this shape (T, S)."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "A picture is drawn by matplotlib, which is not installed. "
            'Install it with `pip install "keras-tinyattn[plot]"`.'
        ) from error

    panel_height, panel_width = (min(max(1.6 + 0.62 * size, 2.6), 9.0) for size in shape)
    width, height = columns * panel_width + 0.6, rows * panel_height + 0.5 + 0.5 * bool(title)
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")
    x, y = 0.1 / width, 0.1 / height  # A tenth of an inch is kept free all around.
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, rect=(x, y, 1 - 2 * x, 1 - 2 * y))
    if title:
        figure.suptitle(title, color=INK, fontsize=14, fontweight="bold", parse_math=False)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _heat_map(axes, matrix, query_tokens, key_tokens, name="", formula="", score_limit=None):
    """One map with its labels: of scores from -score_limit to score_limit, or else of weights."""
    _check_labels("query_tokens", query_tokens, "row", matrix.shape[0])
    _check_labels("key_tokens", key_tokens, "column", matrix.shape[1])
    is_weight = score_limit is None
    if is_weight:
        image = axes.imshow(matrix, cmap="Blues", vmin=0.0, vmax=1.0)
        # Exact zeros only: a small weight is still a look.
        never = np.ma.masked_where(matrix != 0.0, np.zeros_like(matrix))
        axes.imshow(never, cmap=_one_colour(NEVER))
    else:
        # White at 0, so that the colour of a score says its sign.
        image = axes.imshow(matrix, cmap="PuOr_r", vmin=-score_limit, vmax=score_limit)
    axes.set_xlabel("key: who is looked at", color=FAINT)
    _ticks(axes.xaxis, axes.set_xticks, key_tokens)
    _ticks(axes.yaxis, axes.set_yticks, query_tokens)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    if name:
        axes.set_title(name, color=INK, fontsize=12, fontweight="bold", pad=26 if formula else 8)
    if formula:
        axes.annotate(
            formula,
            (0.5, 1.0),
            (0, 8),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=FAINT,
            fontsize=9.5,
        )
    if max(matrix.shape) > NUMBERS_UP_TO:
        colours = axes.figure.colorbar(image, ax=axes, shrink=0.8)
        colours.outline.set_visible(False)
        colours.ax.tick_params(length=0, labelcolor=FAINT)
        return
    for edge in range(1, matrix.shape[0]):
        axes.axhline(edge - 0.5, color="white", linewidth=2)
    for edge in range(1, matrix.shape[1]):
        axes.axvline(edge - 0.5, color="white", linewidth=2)
    for (row, column), number in np.ndenumerate(matrix):
        if is_weight and number == 0.0:
            continue
        red, green, blue, _ = image.cmap(image.norm(number))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
        axes.text(
            column,
            row,
            f"{100 * number:.1f}%" if is_weight else f"{number:.2f}",
            ha="center",
            va="center",
            fontsize=11 if max(matrix.shape) <= 6 else 8,
            color="white" if dark else INK,
        )


def _one_colour(colour):
    from matplotlib.colors import ListedColormap

    return ListedColormap([colour])


def _ticks(axis, set_ticks, tokens):
    step = math.ceil(len(tokens) / LABELS_UP_TO)
    labels = [_visible(token) for token in tokens][::step]
    lying = axis.axis_name == "x" and len(labels) > 1 and max(map(len, labels)) > 6
    set_ticks(
        range(0, len(tokens), step),
        labels,
        rotation=45 if lying else 0,
        ha="right" if lying or axis.axis_name == "y" else "center",
        rotation_mode="anchor" if lying else "default",
        fontsize=10.5 if len(labels) <= NUMBERS_UP_TO else 7,
        parse_math=False,
    )


def _visible(token):
    """A label that shows white space and control characters."""
    text = token.decode("utf-8", "replace") if isinstance(token, bytes) else str(token)
    text = text.replace(" ", "\u2423")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _numbers(x):
    return np.asarray(ops.convert_to_numpy(x), "float64")


def _check_labels(name, labels, axis, count):
    if len(labels) != count:
        raise ValueError(
            f"Each {axis} needs its label. Expected {count} {name}, one a {axis}. "
            f"Received: {len(labels)} labels. Give as many as the picture has {axis}s."
        )

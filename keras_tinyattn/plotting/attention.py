"""Who attends to whom, and how much."""

import math

import numpy as np

from keras_tinyattn.plotting._figure import (
    FAINT,
    INK,
    NEVER,
    NUMBERS_UP_TO,
    as_numbers,
    check_labels,
    make_panels,
    one_colour,
    set_labels,
)

__all__ = ["plot_attention", "plot_trace"]


def plot_attention(weights, query_tokens, key_tokens=None, title=None, head_titles=None):
    """Draw attention weights as heat maps: a row for each query, a column for each key.

    A weight that is exactly zero, such as a masked one, is a grey cell without a number.

    Args:
        weights: `(T, S)`, or `(H, T, S)` for one map per head; each in [0, 1].
        query_tokens: T labels of the rows.
        key_tokens: S labels of the columns; `query_tokens` unless given.
        title: a line above the picture; none unless given.
        head_titles: H titles; "head 1", "head 2" and so on unless given, and none above a single map.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: if the labels do not fit the weights, or the weights are of another rank.
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> figure = plot_attention([[1.0, 0.0], [0.3, 0.7]], ["The", "cat"])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['100.0%', '30.0%', '70.0%']
    """
    weights = as_numbers(weights)
    if weights.ndim not in (2, 3):
        raise ValueError(
            "A picture shows the weights of one sequence. Expected shape (T, S) or (H, T, S). "
            f"Received: shape {weights.shape}. Pick one sequence of the batch: weights[0]."
        )
    single = weights.ndim == 2
    maps = weights[None] if single else weights
    key_tokens = query_tokens if key_tokens is None else key_tokens
    if head_titles is None:
        head_titles = [""] if single else [f"head {head}" for head in range(1, len(maps) + 1)]
    check_labels("head_titles", head_titles, "head", len(maps))
    columns = min(len(maps), 4)
    figure, panels = make_panels(maps.shape[1:], math.ceil(len(maps) / columns), columns, title)
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

    Raw and scaled scores share one colour scale, so that the scaling shows as paler colours.

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

    >>> import keras, keras_tinyattn
    >>> layer = keras_tinyattn.ScaledSelfAttention(head_dim=4)
    >>> layer.build((None, None, 8))
    >>> figure = plot_trace(layer.trace(keras.random.normal((1, 3, 8))), ["The", "cat", "sat"])
    >>> [axes.get_title() for axes in figure.axes]
    ['Raw scores', 'Scaled scores', 'Weights']
    """
    raw = as_numbers(trace.raw_scores[batch, head])
    scaled = as_numbers(trace.scaled_scores[batch, head])
    weights = as_numbers(trace.weights[batch, head])
    limit = float(np.max(np.abs(raw), initial=0.0, where=np.isfinite(raw))) or 1.0
    head_dim = trace.queries.shape[-1]
    scaling = rf"$Q\,K^T/\sqrt{{{head_dim}}}$"
    figure, panels = make_panels(raw.shape, 1, 3, title)
    _heat_map(panels[0], raw, tokens, tokens, "Raw scores", r"$Q\,K^T$", limit)
    _heat_map(panels[1], scaled, tokens, tokens, "Scaled scores", scaling, limit)
    _heat_map(panels[2], weights, tokens, tokens, "Weights", "softmax: each row sums to 100%")
    panels[0].set_ylabel("query: who looks", color=FAINT)
    return figure


def _heat_map(axes, matrix, query_tokens, key_tokens, name="", formula="", score_limit=None):
    """One map with its labels: of scores from -score_limit to score_limit, or else of weights."""
    check_labels("query_tokens", query_tokens, "row", matrix.shape[0])
    check_labels("key_tokens", key_tokens, "column", matrix.shape[1])
    is_weight = score_limit is None
    if is_weight:
        image = axes.imshow(matrix, cmap="Blues", vmin=0.0, vmax=1.0)
        # Exact zeros only: a small weight is still attention.
        never = np.ma.masked_where(matrix != 0.0, np.zeros_like(matrix))
        axes.imshow(never, cmap=one_colour(NEVER))
    else:
        # White at 0, so that the colour shows the sign.
        image = axes.imshow(matrix, cmap="PuOr_r", vmin=-score_limit, vmax=score_limit)
    axes.set_xlabel("key: who is looked at", color=FAINT)
    set_labels(axes.xaxis, axes.set_xticks, key_tokens)
    set_labels(axes.yaxis, axes.set_yticks, query_tokens)
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

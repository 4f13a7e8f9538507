"""Colours, panels and labels of all pictures."""

import math

import numpy as np
from keras import ops

# Up to this many rows and columns each cell shows its number.
NUMBERS_UP_TO = 12
# Of more labels than these, only every second, third, ... is shown.
LABELS_UP_TO = 48

INK = "#22303c"
FAINT = "#6b7785"
NEVER = "#eceff1"
# Two that differ in greyscale, too.
BLUE = "#1f5f99"
ORANGE = "#c2571a"
PALE_BLUE = "#a9c4dd"


def make_panels(shape, rows, columns, title):
    """A figure with `rows` x `columns` axes, each large enough for a map of this shape (T, S)."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Pictures are drawn by matplotlib, which is not installed. "
            'Install it with `pip install "keras-tinyattn[plot]"`.'
        ) from error

    panel_height, panel_width = (min(max(1.6 + 0.62 * size, 2.6), 9.0) for size in shape)
    width, height = columns * panel_width + 0.6, rows * panel_height + 0.5 + 0.5 * bool(title)
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")
    x, y = 0.1 / width, 0.1 / height  # A margin of a tenth of an inch.
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, rect=(x, y, 1 - 2 * x, 1 - 2 * y))
    if title:
        figure.suptitle(title, color=INK, fontsize=14, fontweight="bold", parse_math=False)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def one_colour(colour):
    from matplotlib.colors import ListedColormap

    return ListedColormap([colour])


def set_labels(axis, set_ticks, tokens):
    step = math.ceil(len(tokens) / LABELS_UP_TO)
    labels = [_visible(token) for token in tokens][::step]
    slanted = axis.axis_name == "x" and len(labels) > 1 and max(map(len, labels)) > 6
    set_ticks(
        range(0, len(tokens), step),
        labels,
        rotation=45 if slanted else 0,
        ha="right" if slanted or axis.axis_name == "y" else "center",
        rotation_mode="anchor" if slanted else "default",
        fontsize=10.5 if len(labels) <= NUMBERS_UP_TO else 7,
        parse_math=False,
    )


def _visible(token):
    """A label that shows white space and control characters."""
    text = token.decode("utf-8", "replace") if isinstance(token, bytes) else str(token)
    text = text.replace(" ", "\u2423")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def as_numbers(x):
    return np.asarray(ops.convert_to_numpy(x), "float64")


def check_labels(name, labels, axis, count):
    if len(labels) != count:
        raise ValueError(
            f"Each {axis} needs its label. Expected {count} {name}, one per {axis}. "
            f"Received: {len(labels)} labels. Give as many as the picture has {axis}s."
        )

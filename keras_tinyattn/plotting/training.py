"""The loss of a training run."""

import numpy as np

from keras_tinyattn.plotting._figure import BLUE, FAINT, NEVER, ORANGE, PALE_BLUE, make_panels

__all__ = ["plot_losses"]


def plot_losses(losses, evaluations=(), title=None):
    """Draw the loss of a training run over its steps.

    Args:
        losses: the loss of each step, in nats; the first is that of step 1.
        evaluations: pairs of a step and the validation loss then.
        title: a line above the picture; none unless given.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.

    Example:

    >>> figure = plot_losses([3.0, 2.5, 2.2], [(3, 2.4)])
    >>> [line.get_label() for line in figure.axes[0].lines[1:]]
    ['training', 'validation']
    """
    figure, (axes,) = make_panels((5, 10), 1, 1, title)
    losses = np.asarray(losses, "float64")
    steps = np.arange(1, len(losses) + 1)
    # A mean over this many steps to either side smooths the noise of the batches.
    reach = len(losses) // 50
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    first, last = np.maximum(steps - 1 - reach, 0), np.minimum(steps + reach, len(losses))
    axes.plot(steps, losses, color=PALE_BLUE, linewidth=0.8)
    axes.plot(steps, (sums[last] - sums[first]) / (last - first), color=BLUE, label="training")
    if len(evaluations):
        axes.plot(*zip(*evaluations, strict=True), "o-", color=ORANGE, label="validation")
    axes.set_xlabel("step", color=FAINT)
    axes.set_ylabel("loss, nats per token", color=FAINT)
    axes.grid(color=NEVER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure

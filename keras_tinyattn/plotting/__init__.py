"""Pictures of attention weights, losses, distributions to sample from, and what a cache saves.

Drawing needs matplotlib (`pip install "keras-tinyattn[plot]"`); importing this module does not.
The functions return a matplotlib `Figure` that pyplot does not know: there is nothing to close, no
display is needed, and `figure.savefig("attention.png")` writes it.
"""

from keras_tinyattn.plotting.attention import plot_attention, plot_trace
from keras_tinyattn.plotting.generation import plot_cached_steps, plot_distributions
from keras_tinyattn.plotting.training import plot_losses

__all__ = [
    "plot_attention",
    "plot_cached_steps",
    "plot_distributions",
    "plot_losses",
    "plot_trace",
]

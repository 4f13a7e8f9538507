"""Keras attention layers that show their work, and a small causal language model.

The modules, in the order in which a prompt meets them.
"""

from keras_tinyattn import functional
from keras_tinyattn.layers import *  # noqa: F403
from keras_tinyattn.layers import __all__ as _layers
from keras_tinyattn.model import *  # noqa: F403
from keras_tinyattn.model import __all__ as _model
from keras_tinyattn.version import __version__

__all__ = ["__version__", "functional", *_layers, *_model]

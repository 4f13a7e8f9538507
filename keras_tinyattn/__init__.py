"""Keras attention layers that show their work, and a small causal language model.

The modules, in the order in which a prompt meets them.
"""

import importlib

from keras_tinyattn import functional
from keras_tinyattn.gpt2 import *  # noqa: F403
from keras_tinyattn.gpt2 import __all__ as _gpt2
from keras_tinyattn.layers import *  # noqa: F403
from keras_tinyattn.layers import __all__ as _layers
from keras_tinyattn.model import *  # noqa: F403
from keras_tinyattn.model import __all__ as _model
from keras_tinyattn.version import __version__

# These come when they are first asked for: most need TensorFlow, and all above runs on Keras' other
# backends without it.
_ON_DEMAND = {
    "tokenizer": ("ByteTokenizer", "CharTokenizer", "WordTokenizer", "load_tokenizer"),
    "training": (
        "Checkpoints",
        "Evaluation",
        "make_evaluation",
        "make_optimizer",
        "make_train_step",
        "next_token_loss",
        "split_token_ids",
        "train",
        "training_batches",
    ),
    "sampling": ("filter_logits", "sample"),
    "generation": ("Generation", "generate", "stream"),
    "export": (
        "Check",
        "LoadedModel",
        "export_saved_model",
        "load_saved_model",
        "signature_operations",
        "verify_saved_model",
    ),
    "plotting": (
        "plot_attention",
        "plot_cached_steps",
        "plot_distributions",
        "plot_losses",
        "plot_trace",
    ),
}

__all__ = ["__version__", "functional", *_layers, *_model, *_gpt2]
__all__ += [name for names in _ON_DEMAND.values() for name in names]


def __getattr__(name):
    for module, names in _ON_DEMAND.items():
        if name == module or name in names:
            found = importlib.import_module(f"{__name__}.{module}")
            return found if name == module else getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__, *_ON_DEMAND})

"""Keras attention layers that show their work, and a small causal language model.

The modules, from the bottom up.
"""

import importlib
import sys

from keras_tinyattn.version import __version__

# A name is imported when it is first asked for: most modules need TensorFlow, and the first four run on
# Keras' other backends without it.
_MODULES = {
    "functional": (),
    "blockwise": ("blockwise_attention",),
    "layers": (
        "AttentionTrace",
        "CausalSelfAttention",
        "DecoderBlock",
        "ScaledSelfAttention",
        "TokenAndPositionEmbedding",
        "VocabProjection",
    ),
    "model": ("CausalLM", "gpt"),
    "pretrained": ("causal_lm_from_gpt2",),
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
    "sampling": ("SETTINGS", "Setting", "filter_logits", "sample"),
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

__all__ = ["__version__", "functional"]  # noqa: F405
__all__ += [name for names in _MODULES.values() for name in names]

# Layers and models come at once, so that `keras.saving.load_model` finds their classes registered. The
# exception is `python -m keras_tinyattn`, which runs this file before its own and loads what a command
# needs: until then, Python says "-m" for the program's name.
if not (sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv):
    from keras_tinyattn.layers import *  # noqa: F403
    from keras_tinyattn.model import *  # noqa: F403


def __getattr__(name):
    for module, names in _MODULES.items():
        if name == module or name in names:
            found = importlib.import_module(f"{__name__}.{module}")
            return found if name == module else getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__, *_MODULES})

"""A model and its tokenizer to a SavedModel that generates text on any TensorFlow server, and back.

    path/VERSION/          what TensorFlow Serving loads: a folder named by an integer
        saved_model.pb     the signatures, tokenizer and loop included
        variables/         the weights, once
        model_card.json    sizes, versions, file hashes, and answers to check the export by
        assets.extra/      warm-up requests of TensorFlow Serving

No signature but `generate_xla` holds an XLA operation, and none a custom one.
"""

from keras_tinyattn.export.operations import signature_operations
from keras_tinyattn.export.saving import LoadedModel, export_saved_model, load_saved_model
from keras_tinyattn.export.verification import Check, verify_saved_model

__all__ = [
    "Check",
    "LoadedModel",
    "export_saved_model",
    "load_saved_model",
    "signature_operations",
    "verify_saved_model",
]

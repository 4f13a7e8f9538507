"""Text to token ids and back, by the same TensorFlow operations in Python and in a graph.

    base.py         what all tokenizers share
    words.py        whole words
    characters.py   Unicode characters
    bytes.py        the bytes of UTF-8

Every tokenizer has `encode(text)` and `decode(token_ids)` for one Python string, and `tokenize(texts)`
and `detokenize(token_ids, lengths)` for a batch of string tensors, which an exported graph runs;
`encode` and `decode` call them, so that there is one definition. None of them knows a model.
"""

import json

from keras_tinyattn._paths import local_path
from keras_tinyattn.tokenizer.bytes import ByteTokenizer
from keras_tinyattn.tokenizer.characters import CharTokenizer
from keras_tinyattn.tokenizer.words import WordTokenizer

__all__ = ["ByteTokenizer", "CharTokenizer", "WordTokenizer", "load_tokenizer"]

# What the `class` in a tokenizer's file may be.
_CLASSES = {cls.__name__: cls for cls in (ByteTokenizer, CharTokenizer, WordTokenizer)}


def load_tokenizer(path):
    """The tokenizer that `save` wrote to a JSON file.

    Raises:
        ValueError: if the file holds no tokenizer.
    """
    data = local_path(path).read_bytes()
    no_tokenizer = ValueError(
        "The file holds no tokenizer. Expected JSON with a `class` among "
        f"{', '.join(_CLASSES)}. Received: {path}. Give a file that a tokenizer's save wrote."
    )
    try:
        config = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise no_tokenizer from error
    try:
        return _CLASSES[config.pop("class")](**config)
    except (AttributeError, KeyError, TypeError) as error:
        raise no_tokenizer from error

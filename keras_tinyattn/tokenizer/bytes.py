"""Bytes of UTF-8 as tokens."""

import tensorflow as tf

from keras_tinyattn.tokenizer.base import Tokenizer


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8: knows every text and needs no vocabulary.

    Example:

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169])
    'né'
    """

    def __init__(self, name=None):
        super().__init__([bytes([value]) for value in range(256)], name=name)

    def get_config(self):
        return {}

    def _tokenize(self, texts):
        lengths = tf.strings.length(texts)
        width = tf.reduce_max(tf.concat([lengths, [0]], 0))
        # `decode_raw` needs a positive width, and pads with zeros, which is `pad_id`.
        token_ids = tf.io.decode_raw(texts, tf.uint8, fixed_length=tf.maximum(width, 1))
        return tf.cast(token_ids, tf.int32)[:, :width], lengths

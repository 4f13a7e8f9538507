"""What all tokenizers share."""

import json

import numpy as np
import tensorflow as tf

from keras_tinyattn._boundary import chosen, plain, require, shown
from keras_tinyattn._paths import local_path


class Tokenizer(tf.Module):
    """A table of pieces of text; a `tf.Module`, so that an export tracks what it looks up.

    A subclass defines `tokenize` and `get_config`.

    Args:
        pieces: list of strings or bytes; the index of each is its id.

    Attributes:
        vocabulary_size: V.
        pad_id: the id that pads a row to the length of the longest.
        end_id: the id that ends a text, or None.
    """

    end_id = None
    pad_id = 0
    # Between two pieces of a text.
    _separator = ""

    def __init__(self, pieces, name=None):
        super().__init__(name=name)
        self.vocabulary_size = len(pieces)
        self._pieces = tf.constant(pieces)

    def encode(self, text):
        """Token ids of one text, a list of integers.

        Raises:
            ValueError: if the text is not a string, or holds something outside the vocabulary; the
                message names it.
        """
        if not isinstance(text, str):
            raise ValueError(
                "encode reads one text. Expected a string. "
                f"Received: {text!r}, of type {type(text).__name__}. "
                "Decode bytes first; for a batch, call tokenize."
            )
        token_ids, lengths = self.tokenize(tf.constant([text]))
        return token_ids[0, : lengths[0]].numpy().tolist()

    def decode(self, token_ids):
        """The text of a list of token ids, as a string; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: if they are not a list of integers, or one is not in [0, V).
        """
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                "decode writes one text. Expected a list of integers. "
                f"Received: {'a list' if ids.ndim == 1 else f'rank {ids.ndim}'} of type {ids.dtype}. "
                "Pass one row of ids; for a batch, call detokenize."
            )
        # In 64 bits, so that an id beyond 32 is named in the error instead of wrapping around.
        texts = self.detokenize(tf.constant(ids[None], tf.int64), tf.constant([len(ids)], tf.int64))
        return texts[0].numpy().decode(errors="replace")

    def tokenize(self, texts):
        """Token ids of a batch of texts.

        Args:
            texts: `(B,)` strings.

        Returns:
            `(B, T)` int32 ids, padded with `pad_id`, and `(B,)` int32 lengths.
        """
        raise NotImplementedError

    def detokenize(self, token_ids, lengths):
        """The texts of a batch of token ids.

        Args:
            token_ids: `(B, T)` integers.
            lengths: `(B,)` integers, how many ids of each row count.

        Returns:
            `(B,)` strings: the bytes of the pieces, which need not be valid UTF-8.
        """
        real = tf.sequence_mask(lengths, tf.shape(token_ids)[1])
        invalid = real & ((token_ids < 0) | (token_ids >= self.vocabulary_size))
        message = (
            f"A token id is outside the vocabulary. Expected ids from 0 to {self.vocabulary_size - 1}. "
            "Received: ",
            chosen(token_ids, invalid),
            ".",
        )
        with tf.control_dependencies(require(~tf.reduce_any(invalid), *message)):
            pieces = tf.gather(self._pieces, tf.where(real, token_ids, 0))
        if self._separator:
            pieces = tf.concat([pieces[:, :1], self._separator + pieces[:, 1:]], axis=1)
        return tf.strings.reduce_join(tf.where(real, pieces, ""), axis=-1)

    def get_config(self):
        """The arguments that make this tokenizer again, a dictionary for JSON."""
        raise NotImplementedError

    def save(self, path):
        """Write the tokenizer as JSON; `load_tokenizer` reads it back."""
        config = {"class": type(self).__name__, **self.get_config()}
        local_path(path).write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


class VocabularyTokenizer(Tokenizer):
    """Splits a text and looks each piece up in a vocabulary.

    A subclass defines `_split(texts)`, `(B,)` strings to a ragged `(B, None)`, and `_kind`, what its
    pieces are called in messages.

    Args:
        vocabulary: list of distinct strings.

    Raises:
        ValueError: if they are not distinct, or there are none.
    """

    unknown_id = None

    def __init__(self, vocabulary, name=None):
        seen = set()
        repeated = [entry for entry in vocabulary if entry in seen or seen.add(entry)]
        if repeated or not vocabulary:
            raise ValueError(
                "An id names one entry of the vocabulary. Expected at least one, all distinct "
                f"{self._kind}. Received: "
                f"{f'{repeated[0]!r} more than once' if repeated else 'none'}. Remove the repetition."
            )
        super().__init__(vocabulary, name=name)
        self.vocabulary = tuple(vocabulary)
        self._ids = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(self._pieces, tf.range(len(vocabulary))),
            default_value=-1,
        )

    def tokenize(self, texts):
        pieces = self._split(texts)
        ids = self._ids.lookup(pieces.flat_values)
        with tf.control_dependencies(self._require_known(pieces.flat_values, ids)):
            ids = tf.where(ids < 0, -1 if self.unknown_id is None else self.unknown_id, ids)
        lengths = tf.cast(pieces.row_lengths(), tf.int32)
        return pieces.with_flat_values(ids).to_tensor(self.pad_id), lengths

    def _require_known(self, pieces, ids):
        if self.unknown_id is not None:
            return []
        unknown, _ = tf.unique(chosen(pieces, ids < 0))
        shown = ", ".join(self.vocabulary[:40]) + (", ..." if len(self.vocabulary) > 40 else "")
        return require(
            tf.size(unknown) == 0,
            f"The vocabulary does not hold everything in the text. Expected {self._kind} among its "
            f"{self.vocabulary_size}: {shown}. Received also: ",
            unknown,
            ". Leave them out, or use a tokenizer that knows them.",
        )


def as_text(value):
    """A string or bytes as bytes; None for anything else.

    Raises:
        ValueError: if a string holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        return bytes(value) if isinstance(value, bytes) else None
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "A text must be valid Unicode. Expected no half of a surrogate pair. "
            f"Received: {value[error.start]!r} at index {error.start}. Replace it."
        ) from None


def as_texts(name, value):
    """Texts, one or a list or array of them, as `(B,)` strings, a NumPy array of bytes.

    Args:
        name: what the message calls them.
        value: strings or bytes, of any type that holds them.

    Raises:
        ValueError: if something is no text, or not valid Unicode, or there is none.
    """
    value = plain(value)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    values = value if isinstance(value, list) else [value]
    # A string of NumPy is an array by now.
    values = [part.tolist() if isinstance(part, np.ndarray) else part for part in values]
    texts = np.array([as_text(part) for part in values], object)
    if None in texts.tolist():
        raise ValueError(
            f"{name} must be text. Expected a string, or bytes of UTF-8, or a list of them. "
            f"Received: {shown(value)}. Decode token ids first."
        )
    if not values:
        raise ValueError(
            f"There is nothing to read. Expected at least one text in {name}. "
            "Received: an empty batch. Give a list of texts."
        )
    return texts

"""What all tokenizers share."""

import functools
import json

import numpy as np
import tensorflow as tf

from keras_tinyattn._boundary import as_numbers, chosen, plain, require, shown
from keras_tinyattn._paths import local_path


class Tokenizer(tf.Module):
    """A table of pieces of text; a `tf.Module`, so that an export tracks what it looks up.

    A subclass defines `_tokenize` and `get_config`.

    Args:
        pieces: list of strings or bytes; the index of each is its id.

    Attributes:
        vocabulary_size: V.
        pad_id: the id that pads a row to the length of the longest.
        end_id: the id that ends a text, or None.
        unknown_id: the id of all that the vocabulary does not hold, or None where that is an error.
    """

    end_id = None
    unknown_id = None
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
            ValueError: if the text is not a string, is not valid Unicode, or holds something that the
                vocabulary does not; the message names it.
        """
        if not isinstance(text, str):
            raise ValueError(
                "encode reads one text. Expected a string. "
                f"Received: {shown(text)}, of type {type(text).__name__}. "
                "Decode bytes first; for a batch, call tokenize."
            )
        token_ids, _ = self.tokenize(text)
        return token_ids.numpy().tolist()

    def decode(self, token_ids):
        """The text of a list of token ids, as a string; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: if they are not a list of integers, or one is not in [0, V).
        """
        ids = as_numbers(token_ids)
        if np.shape(ids) == (0,):
            return ""
        if np.ndim(ids) != 1:
            raise ValueError(
                "decode writes one text. Expected a list of integers. "
                f"Received: {shown(token_ids)}. Pass one row of ids; for a batch, call detokenize."
            )
        return self.detokenize(ids, len(ids)).numpy().decode(errors="replace")

    def tokenize(self, texts):
        """Token ids of texts.

        Args:
            texts: strings of any shape `(...)`, such as `(B,)` for a batch or `()` for a single one; a
                tensor, or what Python and NumPy have for it.

        Returns:
            `(..., T)` int32 ids, padded with `pad_id` to the longest, and `(...)` int32 lengths.

        Raises:
            ValueError: if something is no text, or holds something outside the vocabulary.
        """
        texts = as_texts("texts", texts)
        if texts.shape.rank == 1:
            return self._tokenize(texts)
        token_ids, lengths = self._tokenize(tf.reshape(texts, (-1,)))
        shape = tf.shape(texts)
        width = tf.shape(token_ids)[1:]
        # The static shape is lost by an unknown rank alone.
        token_ids = tf.reshape(token_ids, tf.concat([shape, width], axis=0))
        return tf.ensure_shape(token_ids, texts.shape.concatenate([None])), tf.reshape(lengths, shape)

    def _tokenize(self, texts):
        """`tokenize` for `(B,)` strings."""
        raise NotImplementedError

    def detokenize(self, token_ids, lengths):
        """The texts of token ids.

        Args:
            token_ids: `(..., T)` integers.
            lengths: `(...)` integers, how many ids of each row count.

        Returns:
            `(...)` strings: the bytes of the pieces, which need not be valid UTF-8.

        Raises:
            ValueError: if they are not integers of these shapes, an id is outside the vocabulary, or a
                length is outside its row.
        """
        token_ids, lengths = self._as_ids(token_ids), self._as_ids(lengths, "lengths")
        if not lengths.shape.concatenate([None]).is_compatible_with(token_ids.shape):
            raise ValueError(
                "Each row of token ids has a length. Expected token_ids (..., T) and lengths (...). "
                f"Received: {token_ids.shape} and {lengths.shape}. Give one length for each row."
            )
        if token_ids.shape.rank == 2:
            return self._detokenize(token_ids, lengths)
        flat = tf.reshape(token_ids, (tf.size(lengths), tf.shape(token_ids)[-1]))
        texts = self._detokenize(flat, tf.reshape(lengths, (-1,)))
        return tf.reshape(texts, tf.shape(lengths))

    def _detokenize(self, token_ids, lengths):
        """`detokenize` for `(B, T)` ids."""
        width = tf.cast(tf.shape(token_ids)[1], lengths.dtype)
        checks = require(
            tf.reduce_all((lengths >= 0) & (lengths <= width)),
            "A length is outside its row of token ids. Expected 0 to ",
            width,
            ". Received: ",
            lengths,
            ". Give as many ids as the text is long.",
        )
        with tf.control_dependencies(checks):
            real = tf.sequence_mask(lengths, width)
        invalid = real & ((token_ids < 0) | (token_ids >= self.vocabulary_size))
        foreign = chosen(token_ids, invalid)
        with tf.control_dependencies(require(tf.size(foreign) == 0, *self._foreign_id(foreign))):
            pieces = tf.gather(self._pieces, tf.where(real, token_ids, 0))
        if self._separator:
            pieces = tf.concat([pieces[:, :1], self._separator + pieces[:, 1:]], axis=1)
        return tf.strings.reduce_join(tf.where(real, pieces, ""), axis=-1)

    def _as_ids(self, values, name="token_ids"):
        """Integers as a tensor; those beyond 64 bits are outside every vocabulary."""
        if isinstance(values, tf.Tensor) and values.dtype.is_integer:
            return values
        array = as_numbers(values)
        if array is None:
            raise ValueError(
                f"{name} are integers. Expected an array of them, (..., T) ids and (...) lengths. "
                f"Received: {shown(values)}. Pad rows to one length."
            )
        large = [number for number in array.ravel().tolist() if not -(2**63) <= number < 2**63]
        require(not large, *self._foreign_id(shown(large)[1:-1]))
        return tf.constant(array.astype(np.int64))

    def _foreign_id(self, ids):
        """The sentence about ids outside the vocabulary, in the parts that `require` takes."""
        last = self.vocabulary_size - 1
        return (
            f"A token id is outside the vocabulary. Expected ids from 0 to {last}. Received: ",
            ids,
            ".",
        )

    def get_config(self):
        """The arguments that make this tokenizer again, a dictionary for JSON."""
        raise NotImplementedError

    def __reduce__(self):
        # Made again from its arguments where it is copied, or sent to another process.
        return functools.partial(type(self), **self.get_config()), ()

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

    def _tokenize(self, texts):
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
        return require(
            tf.size(unknown) == 0,
            f"The vocabulary does not hold everything in the text. Expected {self._kind} among its "
            f"{self.vocabulary_size}: {shown(list(self.vocabulary))[1:-1]}. Received also: ",
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
    """Texts of any shape as a string tensor.

    Args:
        name: what the message calls them.
        value: strings or bytes, of any type that holds them.

    Raises:
        ValueError: if something is no text, or not valid Unicode.
    """
    if isinstance(value, tf.Tensor) and value.dtype == tf.string:
        return value
    # As objects, since NumPy's own strings lose null characters at their end. Another tensor is no
    # text, and in a graph it has no values.
    array = np.asarray(None if isinstance(value, tf.Tensor) else plain(value), object)
    texts = [as_text(part) for part in array.flat]
    if None in texts:
        raise ValueError(
            f"{name} must be text. Expected a string, or bytes of UTF-8, or an array of them. "
            f"Received: {shown(value)}. Decode token ids first."
        )
    return tf.reshape(tf.constant(texts, tf.string), array.shape)

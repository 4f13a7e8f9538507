"""Text to token ids and back, by the same TensorFlow operations in Python and in a graph.

Every tokenizer has `encode(text)` and `decode(token_ids)` for one Python string, and `tokenize(texts)`
and `detokenize(token_ids, lengths)` for a batch of string tensors, which an exported graph runs;
`encode` and `decode` call them, so that there is one definition. None of them knows a model.
"""

import json
import pathlib

import numpy as np
import tensorflow as tf

from keras_tinyattn._boundary import chosen, require

__all__ = ["ByteTokenizer", "CharTokenizer", "WordTokenizer", "load_tokenizer"]


class _Tokenizer(tf.Module):
    """What the tokenizers share; a `tf.Module`, so that an export tracks its tables.

    Attributes:
        vocabulary_size: V.
        pad_id: the id that fills up a row behind its end.
        end_id: the id that ends a text, or None.
    """

    end_id = None
    pad_id = 0

    def encode(self, text):
        """Token ids of one text, a list of integers.

        Raises:
            ValueError: if the text is no string, or holds something outside the vocabulary; the message
                names it.
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
        """The text of a list of token ids, as a string; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: if they are no list of integers, or one is not in [0, V).
        """
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                "decode writes one text. Expected a list of integers. "
                f"Received: {'a list' if ids.ndim == 1 else f'rank {ids.ndim}'} of type {ids.dtype}. "
                "Pass one row of ids; for a batch, call detokenize."
            )
        # Of 64 bits, so that an id beyond 32 is named, not wrapped around into the vocabulary.
        texts = self.detokenize(tf.constant(ids[None], tf.int64), tf.constant([len(ids)], tf.int64))
        return texts[0].numpy().decode(errors="replace")

    def tokenize(self, texts):
        """Token ids of a batch of texts.

        Args:
            texts: `(B,)` strings.

        Returns:
            `(B, T)` int32 ids, filled up with `pad_id`, and `(B,)` int32 lengths.
        """
        pieces = self._split(texts)
        ids = self._ids.lookup(pieces.flat_values)
        with tf.control_dependencies(self._require_known(pieces.flat_values, ids)):
            ids = tf.where(ids < 0, -1 if self.unknown_id is None else self.unknown_id, ids)
        lengths = tf.cast(pieces.row_lengths(), tf.int32)
        return pieces.with_flat_values(ids).to_tensor(self.pad_id), lengths

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

    def save(self, path):
        """Write the tokenizer as JSON; `load_tokenizer` reads it back."""
        config = {"class": type(self).__name__, **self.get_config()}
        pathlib.Path(path).write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")

    def _build(self, pieces):
        """Make the two tables: piece to id, and id to piece."""
        self.vocabulary_size = len(pieces)
        self._pieces = tf.constant(pieces)
        self._ids = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(self._pieces, tf.range(len(pieces), dtype=tf.int32)),
            default_value=-1,
        )

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


class WordTokenizer(_Tokenizer):
    r"""Whole words, case-sensitive, split on ASCII white space and joined by one space.

    Args:
        vocabulary: list of distinct words without white space; a word's id is its index.
        pad_token: the word that fills up a row behind its end.
        end_token: the word that ends a text, or None.
        unknown_token: the word that stands for every word outside the vocabulary;
            an error unless given.

    Raises:
        ValueError: if the words are not distinct, one is empty or holds white space, or a special token
            is not among them.

    Example:

    >>> tokenizer = WordTokenizer(["<pad>", "The", "cat", "sat", "<eos>"])
    >>> tokenizer.encode("The  cat\nsat")
    [1, 2, 3]
    >>> tokenizer.decode([1, 2, 3])
    'The cat sat'
    """

    _separator = " "
    _kind = "words"

    def __init__(self, vocabulary, pad_token="<pad>", end_token="<eos>", unknown_token=None, name=None):
        super().__init__(name=name)
        vocabulary = list(vocabulary)
        for index, word in enumerate(vocabulary):
            if not word or any(character in " \t\n\v\f\r" for character in word):
                raise ValueError(
                    "A word is what stands between white space. Expected words without white space. "
                    f"Received: {word!r} at index {index}. Split or rename it."
                )
        _require_distinct(vocabulary, "words")
        for role, token in (("pad", pad_token), ("end", end_token), ("unknown", unknown_token)):
            if token is not None and token not in vocabulary:
                raise ValueError(
                    f"The {role} token is a word like the others. Expected it in the vocabulary. "
                    f"Received: {role}_token={token!r}. Add it to the vocabulary, or pass None."
                )
        self.vocabulary = tuple(vocabulary)
        self.pad_token, self.end_token, self.unknown_token = pad_token, end_token, unknown_token
        self._build(vocabulary)
        self.pad_id = 0 if pad_token is None else vocabulary.index(pad_token)
        self.end_id = None if end_token is None else vocabulary.index(end_token)
        self.unknown_id = None if unknown_token is None else vocabulary.index(unknown_token)

    @classmethod
    def from_text(cls, text):
        """A tokenizer for the words of a text, in sorted order behind `<pad>`, `<eos>` and `<unk>`."""
        words = tf.strings.split(tf.constant(text)).numpy()
        special = ["<pad>", "<eos>", "<unk>"]
        words = sorted({word.decode() for word in words} - set(special))
        return cls([*special, *words], unknown_token="<unk>")

    def get_config(self):
        return {
            "vocabulary": list(self.vocabulary),
            "pad_token": self.pad_token,
            "end_token": self.end_token,
            "unknown_token": self.unknown_token,
        }

    def _split(self, texts):
        return tf.strings.split(texts)


class CharTokenizer(_Tokenizer):
    """Unicode characters (code points).

    Args:
        vocabulary: list of distinct characters; a character's id is its index.

    Raises:
        ValueError: if the characters are not distinct, or an entry is not one character.

    Example:

    >>> tokenizer = CharTokenizer.from_text("to be")
    >>> tokenizer.vocabulary
    (' ', 'b', 'e', 'o', 't')
    >>> tokenizer.encode("tobe")
    [4, 3, 1, 2]
    """

    _separator = ""
    _kind = "characters"
    unknown_id = None

    def __init__(self, vocabulary, name=None):
        super().__init__(name=name)
        self.vocabulary = tuple(vocabulary)
        for index, character in enumerate(self.vocabulary):
            if len(character) != 1:
                raise ValueError(
                    "A character tokenizer knows single characters. Expected one code point an entry. "
                    f"Received: {character!r} at index {index}. Give a list of characters."
                )
        _require_distinct(self.vocabulary, "characters")
        self._build(self.vocabulary)

    @classmethod
    def from_text(cls, text):
        """A tokenizer for the characters of a text, in sorted order."""
        return cls(sorted(set(text)))

    def get_config(self):
        return {"vocabulary": list(self.vocabulary)}

    def _split(self, texts):
        return tf.strings.unicode_split(texts, "UTF-8")


class ByteTokenizer(_Tokenizer):
    """The 256 bytes of UTF-8: knows every text, without a vocabulary of its own.

    Example:

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169])
    'né'
    """

    _separator = ""
    unknown_id = None

    def __init__(self, name=None):
        super().__init__(name=name)
        self._build([bytes([value]) for value in range(256)])

    def get_config(self):
        return {}

    def tokenize(self, texts):
        lengths = tf.strings.length(texts)
        width = tf.reduce_max(tf.concat([lengths, [0]], 0))
        # `decode_raw` wants a positive width, and fills up with zeros, which is `pad_id`.
        token_ids = tf.io.decode_raw(texts, tf.uint8, fixed_length=tf.maximum(width, 1))
        return tf.cast(token_ids, tf.int32)[:, :width], lengths


def load_tokenizer(path):
    """The tokenizer that `save` wrote to a JSON file.

    Raises:
        ValueError: if the file holds no tokenizer.
    """
    text = pathlib.Path(path).read_text(encoding="utf-8")
    classes = {cls.__name__: cls for cls in (ByteTokenizer, CharTokenizer, WordTokenizer)}
    try:
        config = json.loads(text)
        return classes[config.pop("class")](**config)
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            "The file holds no tokenizer. Expected JSON with a `class` among "
            f"{', '.join(classes)}. Received: {path}. Give a file that a tokenizer's save wrote."
        ) from error


def _require_distinct(vocabulary, kind):
    seen = set()
    repeated = [entry for entry in vocabulary if entry in seen or seen.add(entry)]
    if repeated or not vocabulary:
        raise ValueError(
            f"An id names one entry of the vocabulary. Expected at least one, all distinct {kind}. "
            f"Received: {f'{repeated[0]!r} more than once' if repeated else 'none'}. "
            "Remove the repetition."
        )

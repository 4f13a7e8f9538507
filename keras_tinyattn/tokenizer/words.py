"""Whole words as tokens."""

import tensorflow as tf

from keras_tinyattn.tokenizer.base import VocabularyTokenizer


class WordTokenizer(VocabularyTokenizer):
    r"""Whole words, case-sensitive, split on ASCII white space and joined by one space.

    Args:
        vocabulary: list of distinct words without white space; a word's id is its index.
        pad_token: the word that pads a row.
        end_token: the word that ends a text, or None.
        unknown_token: the word that replaces every word outside the vocabulary;
            such a word is an error unless given.

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
        vocabulary = list(vocabulary)
        for index, word in enumerate(vocabulary):
            if not word or any(character in " \t\n\v\f\r" for character in word):
                raise ValueError(
                    "Words are separated by white space. Expected words without white space. "
                    f"Received: {word!r} at index {index}. Split or rename it."
                )
        super().__init__(vocabulary, name=name)
        for role, token in (("pad", pad_token), ("end", end_token), ("unknown", unknown_token)):
            if token is not None and token not in vocabulary:
                raise ValueError(
                    f"The {role} token is a word like the others. Expected it in the vocabulary. "
                    f"Received: {role}_token={token!r}. Add it to the vocabulary, or pass None."
                )
        self.pad_token, self.end_token, self.unknown_token = pad_token, end_token, unknown_token
        self.pad_id = 0 if pad_token is None else vocabulary.index(pad_token)
        self.end_id = None if end_token is None else vocabulary.index(end_token)
        self.unknown_id = None if unknown_token is None else vocabulary.index(unknown_token)

    @classmethod
    def from_text(cls, text):
        """A tokenizer for the words of a text, in sorted order after `<pad>`, `<eos>` and `<unk>`."""
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

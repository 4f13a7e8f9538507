"""Unicode characters as tokens."""

import tensorflow as tf

from keras_tinyattn.tokenizer.base import VocabularyTokenizer


class CharTokenizer(VocabularyTokenizer):
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

    _kind = "characters"

    def __init__(self, vocabulary, name=None):
        vocabulary = tuple(vocabulary)
        for index, character in enumerate(vocabulary):
            if len(character) != 1:
                raise ValueError(
                    "A character tokenizer knows single characters. Expected one code point an entry. "
                    f"Received: {character!r} at index {index}. Give a list of characters."
                )
        super().__init__(vocabulary, name=name)

    @classmethod
    def from_text(cls, text):
        """A tokenizer for the characters of a text, in sorted order."""
        return cls(sorted(set(text)))

    def get_config(self):
        return {"vocabulary": list(self.vocabulary)}

    def _split(self, texts):
        return tf.strings.unicode_split(texts, "UTF-8")

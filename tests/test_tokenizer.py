"""Tokenizers: ids worked out by hand, round trips, Python against graph, files."""

import json
import unicodedata

import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn import ByteTokenizer, CharTokenizer, WordTokenizer, load_tokenizer

HARD_TEXTS = [
    "",
    "\n",
    "plain words, no newline at the end",
    "\t tabs \r\n and \v line \f ends \r",
    "a\0b\0",
    "\ufeffa byte order mark\ufeff",
    "🙂 👩‍👩‍👧 🏳️‍🌈 e\u0301 " + "\u0301" * 3,
    unicodedata.normalize("NFC", "née Å ﬁ"),
    unicodedata.normalize("NFD", "née Å ﬁ"),
    "no\u00a0break\u2003em\x1cfile\x85next\u3000wide",
    "\U0010ffff\uffff\ufffd",
    "ab" * 5000,
]
WORDS = ["<pad>", "The", "cat", "sat", "<eos>"]


@pytest.fixture(scope="module")
def char_tokenizer():
    return CharTokenizer.from_text("".join(HARD_TEXTS))


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_characters_and_bytes_come_back_as_they_went_in(text, char_tokenizer):
    characters = char_tokenizer.encode(text)
    # Python's own view of a text is the independent one: its code points, and its UTF-8.
    assert [char_tokenizer.vocabulary[index] for index in characters] == list(text)
    assert char_tokenizer.decode(characters) == text
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_words_are_separated_by_ascii_white_space(text):
    tokenizer = WordTokenizer.from_text(text)
    # Python splits bytes, unlike strings, at ASCII white space alone.
    words = [word.decode() for word in text.encode().split()]
    assert [tokenizer.vocabulary[index] for index in tokenizer.encode(text)] == words
    assert tokenizer.decode(tokenizer.encode(text)) == " ".join(words)


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_a_graph_gives_the_ids_and_texts_of_python_for_a_whole_batch(kind, char_tokenizer):
    tokenizer = {
        "byte": ByteTokenizer(),
        "char": char_tokenizer,
        "word": WordTokenizer.from_text(" ".join(HARD_TEXTS)),
    }[kind]
    tokenize = tf.function(tokenizer.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
    token_ids, lengths = tokenize(tf.constant(HARD_TEXTS))
    assert token_ids.dtype == lengths.dtype == tf.int32
    for text, row, length in zip(HARD_TEXTS, token_ids.numpy(), lengths.numpy(), strict=True):
        expected = tokenizer.encode(text)
        assert row[:length].tolist() == expected
        assert set(row[length:]) <= {tokenizer.pad_id}
    texts = tf.function(tokenizer.detokenize)(token_ids, lengths).numpy()
    assert [text.decode() for text in texts] == [
        tokenizer.decode(tokenizer.encode(text)) for text in HARD_TEXTS
    ]


def test_an_empty_batch_is_an_empty_batch(char_tokenizer):
    for tokenizer in (ByteTokenizer(), char_tokenizer, WordTokenizer(WORDS)):
        token_ids, lengths = tokenizer.tokenize(tf.constant([], tf.string))
        assert token_ids.shape == (0, 0)
        assert lengths.shape == (0,)


def test_every_id_can_be_decoded(char_tokenizer):
    for tokenizer in (ByteTokenizer(), char_tokenizer, WordTokenizer(WORDS)):
        for index in range(tokenizer.vocabulary_size):
            tokenizer.decode([index])
    assert WordTokenizer(WORDS).decode(range(5)) == "<pad> The cat sat <eos>"
    # The first byte of a character alone is no text.
    assert ByteTokenizer().decode([97, 0xC3]) == "a\ufffd"


@pytest.mark.parametrize("index", [-1, 256, 2**32 + 97])
def test_an_id_outside_the_vocabulary_is_named_and_never_wrapped(index):
    with pytest.raises(ValueError, match=rf"Expected ids from 0 to 255\. Received: {index}\."):
        ByteTokenizer().decode([97] * 20 + [index])


def test_only_a_list_of_integers_is_decoded():
    with pytest.raises(ValueError, match=r"Expected a list of integers.*a list of type float64"):
        ByteTokenizer().decode([97.5])
    with pytest.raises(ValueError, match=r"Received: rank 2 of type int64.*call detokenize"):
        ByteTokenizer().decode([[97], [98]])


@pytest.mark.parametrize("text", [b"bytes", ["The"], None])
def test_only_a_string_is_encoded(text):
    with pytest.raises(ValueError, match=r"encode reads one text\. Expected a string\. Received: "):
        WordTokenizer(WORDS).encode(text)


def test_an_unknown_character_is_an_error_that_names_it_in_python_and_in_a_graph():
    tokenizer = CharTokenizer("abc")
    message = r"Expected characters among its 3: a, b, c\. Received also: x, é\. "
    with pytest.raises(ValueError, match=message):
        tokenizer.encode("axéxb")
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received also: x"):
        tf.function(tokenizer.tokenize)(tf.constant(["ab", "axb"]))


def test_an_unknown_word_is_an_error_or_the_unknown_token():
    with pytest.raises(ValueError, match=r"Received also: dog, the\. "):
        WordTokenizer(WORDS).encode("The dog sat the dog")
    tokenizer = WordTokenizer([*WORDS, "<unk>"], unknown_token="<unk>")
    assert tokenizer.encode("The dog sat") == [1, 5, 3]
    assert tokenizer.decode([1, 5, 3]) == "The <unk> sat"


def test_a_tokenizer_from_text_knows_the_text_in_sorted_order():
    assert CharTokenizer.from_text("to be").vocabulary == (" ", "b", "e", "o", "t")
    tokenizer = WordTokenizer.from_text("sat the cat\tsat <unk>")
    assert tokenizer.vocabulary == ("<pad>", "<eos>", "<unk>", "cat", "sat", "the")
    assert (tokenizer.pad_id, tokenizer.end_id, tokenizer.unknown_id) == (0, 1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CharTokenizer(["a", "a"]), r"all distinct characters\. Received: 'a' more than once"),
        (lambda: CharTokenizer([]), r"Expected at least one.*Received: none"),
        (lambda: CharTokenizer(["ab"]), r"one code point an entry\. Received: 'ab' at index 0"),
        (
            lambda: WordTokenizer(["two words"]),
            r"without white space\. Received: 'two words' at index 0",
        ),
        (lambda: WordTokenizer([*WORDS, ""]), r"Received: '' at index 5"),
        (lambda: WordTokenizer([*WORDS, "cat"]), r"Received: 'cat' more than once"),
        (lambda: WordTokenizer(["cat"]), r"The pad token is a word.*pad_token='<pad>'"),
        (lambda: WordTokenizer(["<pad>"]), r"The end token is a word.*end_token='<eos>'"),
        (
            lambda: WordTokenizer(WORDS, unknown_token="<unk>"),
            r"The unknown token is a word.*unknown_token='<unk>'",
        ),
    ],
)
def test_a_vocabulary_that_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_saved_tokenizer_comes_back_the_same(tmp_path, char_tokenizer):
    path = tmp_path / "tokenizer.json"
    for tokenizer in (
        ByteTokenizer(),
        char_tokenizer,
        WordTokenizer(["cat", "é", "end"], pad_token=None, end_token="end", unknown_token="cat"),
    ):
        tokenizer.save(path)
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert loaded.get_config() == tokenizer.get_config()
        assert (loaded.pad_id, loaded.end_id) == (tokenizer.pad_id, tokenizer.end_id)
    assert json.loads(path.read_text(encoding="utf-8"))["vocabulary"] == ["cat", "é", "end"]


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", "{}", '{"class": "Other"}', '{"class": "CharTokenizer"}']
)
def test_a_file_without_a_tokenizer_is_refused(text, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"The file holds no tokenizer.*tokenizer\.json"):
        load_tokenizer(path)


def test_the_tables_go_into_an_export(tmp_path):
    tokenizer = CharTokenizer("abc")
    module = tf.Module()
    module.tokenizer = tokenizer
    module.tokenize = tf.function(
        tokenizer.tokenize, input_signature=[tf.TensorSpec([None], tf.string)]
    )
    tf.saved_model.save(module, str(tmp_path / "export"))
    # A table whose file does not move along is found missing only at another place.
    (tmp_path / "export").rename(tmp_path / "moved")
    token_ids, lengths = tf.saved_model.load(str(tmp_path / "moved")).tokenize(
        tf.constant(["cab", "b"])
    )
    np.testing.assert_array_equal(token_ids, [[2, 0, 1], [1, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 1])

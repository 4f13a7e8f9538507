"""Tokenizers: ids worked out by hand, round trips, Python against graph, files."""

import copy
import json
import pickle
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


@pytest.mark.parametrize("index", [-1, 256, 2**32 + 97, 2**63, -(2**64)])
def test_an_id_outside_the_vocabulary_is_named_and_never_wrapped(index):
    with pytest.raises(ValueError, match=rf"Expected ids from 0 to 255\. Received: {index}\."):
        ByteTokenizer().decode([97] * 20 + [index])


def test_only_a_list_of_integers_is_decoded():
    with pytest.raises(ValueError, match=r"Expected a list of integers\. Received: \[97\.5\]"):
        ByteTokenizer().decode([97.5])
    with pytest.raises(ValueError, match=r"Received: \[\[97\], \[98\]\]\. .*call detokenize"):
        ByteTokenizer().decode([[97], [98]])
    for wrong in ([[97], [98, 99]], None, "a", 97, [True], ["a"], {97}):
        with pytest.raises(ValueError, match="Expected a list of integers"):
            ByteTokenizer().decode(wrong)


@pytest.mark.parametrize("text", [b"bytes", ["The"], None])
def test_only_a_string_is_encoded(text):
    with pytest.raises(ValueError, match=r"encode reads one text\. Expected a string\. Received: "):
        WordTokenizer(WORDS).encode(text)


def test_an_unknown_character_is_an_error_that_names_it_in_python_and_in_a_graph():
    tokenizer = CharTokenizer("abc")
    message = r"Expected characters among its 3: 'a', 'b', 'c'\. Received also: x, é\. "
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


def all_kinds():
    words = WordTokenizer.from_text("the cat sat on the mat")
    return [ByteTokenizer(), CharTokenizer.from_text("the cat sat on the mat"), words]


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda tokenizer: type(tokenizer).__name__)
def test_a_copy_a_pickle_and_another_process_have_the_same_tokenizer(tokenizer):
    ids = tokenizer.encode("cat on the mat")
    for again in (
        copy.copy(tokenizer),
        copy.deepcopy(tokenizer),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert again.get_config() == tokenizer.get_config()
        assert again.encode("cat on the mat") == ids
        assert again.decode(ids) == "cat on the mat"
    # What a spawned process is sent is the pickle; it must not hold the state of this one.
    assert b"tensorflow" not in pickle.dumps(tokenizer)


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda tokenizer: type(tokenizer).__name__)
def test_texts_of_any_shape_get_ids_of_that_shape_and_come_back(tokenizer):
    texts = np.array([["the cat", "sat"], ["on", "the mat"], ["cat", "the"]], object)
    flat, flat_lengths = tokenizer.tokenize(texts.ravel())
    for shape in ((6,), (3, 2), (6, 1), (1, 6, 1), (3, 0)):
        given = texts.reshape(shape) if 0 not in shape else np.zeros(shape, object)
        for read in (tokenizer.tokenize, tf.function(tokenizer.tokenize)):
            token_ids, lengths = read(tf.constant(given, tf.string))
            assert lengths.shape == shape
            assert token_ids.shape[:-1] == shape
            if 0 not in shape:
                np.testing.assert_array_equal(tf.reshape(token_ids, flat.shape), flat)
                np.testing.assert_array_equal(tf.reshape(lengths, (-1,)), flat_lengths)
            back = tokenizer.detokenize(token_ids, lengths).numpy()
            assert [text.decode() for text in back.ravel()] == given.ravel().tolist()
    token_ids, length = tokenizer.tokenize("the cat")
    assert length.shape == ()
    assert token_ids.numpy().tolist() == tokenizer.encode("the cat")
    assert tokenizer.detokenize(token_ids, length).numpy() == b"the cat"


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda tokenizer: type(tokenizer).__name__)
def test_a_dataset_maps_a_tokenizer_over_single_texts(tokenizer):
    texts = ["the cat", "sat", "on the mat"]
    dataset = tf.data.Dataset.from_tensor_slices(texts).map(tokenizer.tokenize)
    assert [ids.numpy().tolist() for ids, _ in dataset] == [tokenizer.encode(text) for text in texts]
    batches = dataset.map(lambda ids, length: ids).padded_batch(3, padding_values=tokenizer.pad_id)
    assert next(iter(batches)).shape[0] == 3


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda tokenizer: type(tokenizer).__name__)
def test_half_a_surrogate_pair_is_refused_with_its_place(tokenizer):
    for call in (tokenizer.encode, tokenizer.tokenize):
        with pytest.raises(ValueError, match=r"surrogate pair\. Received: '\\ud83d' at index 3"):
            call("cat\ud83d")


@pytest.mark.parametrize("wrong", [None, 1, ["a", 1], [["a"], "b"], tf.constant([1]), {"a": "b"}])
def test_only_texts_are_tokenized(wrong):
    with pytest.raises(ValueError, match=r"texts must be text\. Expected a string, or bytes"):
        ByteTokenizer().tokenize(wrong)
    with pytest.raises(ValueError, match="texts must be text"):
        tf.data.Dataset.range(2).map(ByteTokenizer().tokenize)


def test_what_is_no_ids_or_lengths_of_them_is_not_detokenized():
    tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match=r"token_ids are integers\. .*Received: \[\[1\.5\]\]"):
        tokenizer.detokenize([[1.5]], [1])
    with pytest.raises(ValueError, match=r"lengths are integers\. .*Received: None"):
        tokenizer.detokenize([[1]], None)
    with pytest.raises(ValueError, match=r"Expected 0 to 2\. Received: 2, 3, -1\."):
        tokenizer.detokenize([[97, 98]] * 3, [2, 3, -1])
    for ids, lengths in (([[97]], [1, 1]), ([97], [1]), (97, 1), ([[97]], 1)):
        with pytest.raises(ValueError, match=r"Each row of token ids has a length\. Expected"):
            tokenizer.detokenize(ids, lengths)
    with pytest.raises(ValueError, match=r"ids from 0 to 255\. Received: 9223372036854775808\."):
        tokenizer.detokenize([[2**63]], [1])


def test_a_long_vocabulary_is_cut_in_a_message():
    tokenizer = CharTokenizer([chr(index) for index in range(300, 900)])
    with pytest.raises(ValueError, match="among its 600: ") as raised:
        tokenizer.encode("a")
    assert len(str(raised.value)) < 400


def test_a_file_with_a_byte_order_mark_is_read_and_one_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    CharTokenizer("abc").save(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_tokenizer(path).encode("cab") == [2, 0, 1]
    for bad in (
        path.read_bytes().replace(b"a", b"\xff"),
        b"[" * 100_000,
        b'{"class": %s}' % (b"9" * 5000),
    ):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="The file holds no tokenizer"):
            load_tokenizer(path)

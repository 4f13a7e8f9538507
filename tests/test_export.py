"""An export answers like the model, on any TensorFlow server, and errs with a sentence."""

import errno
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import _lesson_15_model
import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn import (
    ByteTokenizer,
    CausalLM,
    CharTokenizer,
    Check,
    DecoderBlock,
    TokenAndPositionEmbedding,
    VocabProjection,
    WordTokenizer,
    causal_lm_from_gpt2,
    export_saved_model,
    generate,
    gpt,
    load_saved_model,
    next_token_loss,
    sampling,
    signature_operations,
    stream,
    verify_saved_model,
)
from keras_tinyattn.__main__ import main as command
from keras_tinyattn.export import _check_alone, saving
from keras_tinyattn.export.signatures import Signatures
from keras_tinyattn.generation import graphs
from keras_tinyattn.layers import _window

COMMITTED = pathlib.Path(__file__).parents[1] / "saved_models" / "lesson_15"
SETTINGS = {
    "max_new_tokens": tf.int32,
    "temperature": tf.float32,
    "top_k": tf.int32,
    "top_p": tf.float32,
    "min_p": tf.float32,
    "seed": tf.int32,
}
GENERATED = {
    "text": tf.string,
    "completion": tf.string,
    "completion_bytes": tf.string,
    "token_ids": tf.int32,
    "length": tf.int32,
    "new_logprobs": tf.float32,
    "finish_reason": tf.string,
}
CACHES = [f"{part}_{layer}" for layer in range(2) for part in ("keys", "values")]
STEP = {"logits": tf.float32, **{f"new_{name}": tf.float32 for name in CACHES}}
TABLE = {
    "serving_default": ({"prompt": tf.string}, {"text": tf.string}),
    "generate": ({"prompt": tf.string, **SETTINGS, "stop": tf.string}, GENERATED),
    "generate_xla": ({"prompt": tf.string, **SETTINGS, "stop": tf.string}, GENERATED),
    "generate_ids": (
        {"prompt_ids": tf.int32, "prompt_length": tf.int32, **SETTINGS, "stop_id": tf.int32},
        {name: GENERATED[name] for name in ("token_ids", "length", "new_logprobs", "finish_reason")},
    ),
    "score": (
        {"text": tf.string},
        {"token_ids": tf.int32, "length": tf.int32, "logprobs": tf.float32, "loss": tf.float32},
    ),
    "attention": (
        {"text": tf.string},
        {
            "tokens_bytes": tf.string,
            "length": tf.int32,
            "weights": tf.float32,
            "next_logits": tf.float32,
        },
    ),
    "tokenize": (
        {"text": tf.string},
        {"token_ids": tf.int32, "length": tf.int32, "end_id": tf.int32},
    ),
    "detokenize": (
        {"token_ids": tf.int32, "length": tf.int32},
        {"text": tf.string, "text_bytes": tf.string},
    ),
    "prefill": ({"prompt_ids": tf.int32, "prompt_length": tf.int32}, STEP),
    "step": (
        {"token_id": tf.int32, "position": tf.int32, **{name: tf.float32 for name in CACHES}},
        STEP,
    ),
    "sample": (
        {
            "logits": tf.float32,
            "position": tf.int32,
            **{name: SETTINGS[name] for name in list(SETTINGS)[1:]},
        },
        {"token_id": tf.int32, "logprob": tf.float32},
    ),
}


@pytest.fixture(scope="module")
def lesson():
    """The lesson's model and tokenizer."""
    return _lesson_15_model.reference_model()


@pytest.fixture(scope="module")
def lesson_path(lesson, tmp_path_factory):
    return export_saved_model(*lesson, tmp_path_factory.mktemp("lesson"), about={"data": "by hand"})


@pytest.fixture(scope="module")
def loaded(lesson_path):
    return load_saved_model(lesson_path)


@pytest.fixture(scope="module")
def byte_model():
    """Two blocks over bytes, far from uniform."""
    keras.utils.set_random_seed(2)
    model = gpt(256, sequence_length=24, hidden_dim=8, num_heads=2, num_layers=2)
    model(np.array([[1, 2]]))
    for variable in model.weights:
        variable.assign(variable * 30)
    return model


@pytest.fixture(scope="module")
def byte_path(byte_model, tmp_path_factory):
    return export_saved_model(byte_model, ByteTokenizer(), tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def byte_loaded(byte_path):
    return load_saved_model(byte_path)


def settings(rows, **given):
    values = {
        "max_new_tokens": 3,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
    }
    values |= given
    return {
        name: tf.constant(np.broadcast_to(values[name], (rows,)), dtype)
        for name, dtype in SETTINGS.items()
    }


def test_every_signature_has_the_inputs_and_outputs_of_the_table_batch_first(byte_loaded):
    assert set(byte_loaded.signatures) == set(TABLE)
    for name, (inputs, outputs) in TABLE.items():
        signature = byte_loaded.signatures[name]
        specs = signature.structured_input_signature[1]
        assert {key: spec.dtype for key, spec in specs.items()} == inputs, name
        assert {key: x.dtype for key, x in signature.structured_outputs.items()} == outputs, name
        assert not set(inputs) & set(outputs), name
        for key, part in [*specs.items(), *signature.structured_outputs.items()]:
            assert part.shape.rank >= 1, (name, key)
            assert part.shape[0] is None, (name, key)


def test_the_lesson_text_is_generated(loaded):
    outputs = loaded.generate("The cat sat", 3)
    assert outputs["text"].tolist() == [b"The cat sat bites bites bites"]
    assert outputs["completion"].tolist() == [b"bites bites bites"]
    assert outputs["token_ids"].tolist() == [[1, 2, 3, 7, 7, 7]]
    assert outputs["length"].tolist() == [6]
    assert outputs["finish_reason"].tolist() == [b"length"]
    text = loaded.signatures["serving_default"](prompt=tf.constant(["The cat sat"]))["text"]
    assert text.numpy().tolist() == [b"The cat sat" + b" bites" * 7]


def test_what_is_exported_generates_what_the_model_generates(byte_model, byte_loaded):
    prompts = ["To be", "x", "what a piece of work is"]
    given = {
        "temperature": [0.0, 1.0, 0.8],
        "top_k": [0, 9, 0],
        "top_p": [1, 1, 0.9],
        "seed": [0, 5, 6],
    }
    expected = generate(
        byte_model, [list(text.encode()) for text in prompts], [4, 9, 3], **given, jit_compile=False
    )
    for jit_compile in (False, True):
        outputs = byte_loaded.generate(prompts, [4, 9, 3], **given, jit_compile=jit_compile)
        assert np.array_equal(outputs["token_ids"], expected.token_ids)
        assert outputs["length"].tolist() == expected.lengths.tolist() == [9, 10, 24]
        assert outputs["new_logprobs"] == pytest.approx(expected.new_logprobs, abs=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_row_of_a_batch_gets_what_it_gets_alone(byte_loaded, rows):
    prompts = [text[: 1 + 3 * row] for row, text in enumerate(["the quick brown fox jumps"] * rows)]
    given = {"temperature": [0.7 * (row % 3) for row in range(rows)], "seed": list(range(rows))}
    together = byte_loaded.generate(prompts, 4, **given)
    for row, prompt in enumerate(prompts):
        alone = byte_loaded.generate(prompt, 4, **{key: value[row] for key, value in given.items()})
        length = together["length"][row]
        assert together["completion_bytes"][row] == alone["completion_bytes"][0]
        assert together["token_ids"][row, :length].tolist() == alone["token_ids"][0].tolist()


def test_texts_are_valid_utf8_and_the_raw_bytes_are_there_too(byte_loaded):
    outputs = byte_loaded.generate("caf\N{LATIN SMALL LETTER E WITH ACUTE}", 9, temperature=3.0, seed=1)
    raw = outputs["completion_bytes"][0]
    with pytest.raises(UnicodeDecodeError):
        raw.decode()
    assert outputs["completion"][0].decode() == outputs["completion"][0].decode(errors="strict")
    assert "\N{REPLACEMENT CHARACTER}" in outputs["completion"][0].decode()
    assert list(raw) == outputs["token_ids"][0, 5:14].tolist()
    # A prompt that is no UTF-8 is bytes like any other.
    outputs = byte_loaded.signatures["generate"](
        prompt=tf.constant([b"\xf0\x9f"]), stop=tf.constant([""]), **settings(1)
    )
    outputs["text"][0].numpy().decode()


def test_a_stop_text_ends_the_row_and_is_left_out(byte_loaded):
    free = byte_loaded.generate(["one", "two"], 12)
    raw = free["completion_bytes"][0]
    stop = raw[3:5]
    at = raw.index(stop)
    outputs = byte_loaded.signatures["generate"](
        prompt=tf.constant(["one", "two"]),
        stop=tf.constant([stop, b""]),
        **settings(2, max_new_tokens=12),
    )
    assert outputs["completion_bytes"][0].numpy() == raw[:at]
    assert outputs["length"].numpy().tolist() == [3 + at + 2, 15]
    assert outputs["finish_reason"].numpy().tolist() == [b"stop", b"length"]
    assert outputs["completion_bytes"][1].numpy() == free["completion_bytes"][1]
    with pytest.raises(ValueError, match=r"at most 8 tokens\. Received: 9"):
        byte_loaded.generate("one", 1, stop="123456789")


def test_a_tokenizer_s_own_end_stops_unless_another_is_given(loaded):
    # The lesson's model answers <eos> to some prompts.
    outputs = loaded.generate("<eos> <eos>", 4)
    assert outputs["finish_reason"].tolist() == [b"stop"]
    assert outputs["text"].tolist() == [b"<eos> <eos>"]
    assert outputs["completion"].tolist() == [b""]
    assert outputs["token_ids"].tolist() == [[19, 19, 19]]
    assert loaded.generate("<eos> <eos>", 2, stop="bites")["length"].tolist() == [4]
    assert loaded.generate("The cat", 5, stop="bites")["length"].tolist() == [3]


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ("", {}, "nothing to continue"),
        (" \t\n", {}, "nothing to continue"),
        (["The", ""], {}, "nothing to continue"),
        ("The cow's", {}, r"Received also: cow's\."),
        ("The \N{CAT FACE}", {}, "Received also: \N{CAT FACE}"),
        (b"The \xff", {}, "Received also"),
        ("man " * 11, {}, "at most sequence_length=10 tokens. Received: 11 tokens"),
        ("The", {"max_new_tokens": -1}, "max_new_tokens is out of range"),
        ("The", {"temperature": -1.0}, "temperature is out of range"),
        ("The", {"temperature": float("nan")}, "temperature is out of range"),
        ("The", {"top_k": -1}, "top_k is out of range"),
        ("The", {"top_p": 1.5}, "top_p is out of range"),
        ("The", {"top_p": 0.0}, "top_p is out of range"),
        ("The", {"min_p": 1.5}, "min_p is out of range"),
        ("The", {"min_p": -0.1}, "min_p is out of range"),
        ("The", {"stop": "cow"}, "Received also: cow"),
        ("The", {"stop": " "}, r"A stop holds no token\. .*Received: ' '"),
    ],
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_bad_input_is_an_invalid_argument_with_the_sentence(
    loaded, prompt, given, message, jit_compile
):
    prompts = prompt if isinstance(prompt, list) else [prompt]
    with pytest.raises(ValueError, match=message):
        loaded.generate(prompts, **{"max_new_tokens": 2, **given}, jit_compile=jit_compile)
    # Nothing is left behind that changes the next answer.
    assert loaded.generate("The cat sat", 3)["token_ids"].tolist() == [[1, 2, 3, 7, 7, 7]]


def test_a_stop_outside_the_vocabulary_is_refused_where_an_unknown_word_has_an_id():
    tokenizer = WordTokenizer.from_text("a b c")
    model = gpt(tokenizer.vocabulary_size, sequence_length=6, hidden_dim=4, num_heads=1, num_layers=1)
    model.build((None, 6))
    signatures = Signatures(model, tokenizer)
    ids, length = signatures._stop_ids(tf.constant(["b c", ""]))
    assert ids[0, -2:].numpy().tolist() == tokenizer.encode("b c")
    assert length.numpy().tolist() == [2, 1]
    for stop in ("dog", "a dog", "<unk>"):
        message = rf"A stop holds a word outside the vocabulary\. .*Received: {stop}\. "
        with pytest.raises(ValueError, match=message):
            signatures._stop_ids(tf.constant(["", stop]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompts", None, "prompts must be text"),
        ("prompts", 5, "prompts must be text"),
        ("prompts", [["a"]], "prompts must be one text, or a list"),
        ("prompts", [], r"at least one.*Received: \[\]"),
        ("prompts", ["a", 1], "prompts must be text"),
        ("prompts", "\ud800", "surrogate pair"),
        ("max_new_tokens", 2**32 + 1, "max_new_tokens does not fit 32 bits.*Received: 4294967297"),
        ("max_new_tokens", 2.0, "Expected an integer"),
        ("max_new_tokens", True, "Expected an integer"),
        ("max_new_tokens", [1, 2, 3], r"or 2 of them\. Received: \[1, 2, 3\]"),
        ("seed", 2**31, "seed does not fit 32 bits"),
        ("seed", np.int64(2**40), "seed does not fit 32 bits"),
        ("top_k", 1.5, "Expected an integer"),
        ("top_k", -1, "top_k is out of range"),
        ("temperature", 1e39, "temperature does not fit 32 bits"),
        ("temperature", "1", "Expected a number"),
        ("temperature", None, "Expected a number"),
        ("stop", 5, "stop must be text"),
        ("stop", ["x"], r"Expected 2 of them\. Received: 1"),
        ("stop", [["x"], ["y"]], "stop must be one text, or a list"),
    ],
)
def test_an_export_in_python_refuses_what_generate_refuses_by_its_sentences(
    byte_model, byte_loaded, name, value, message
):
    given = {"prompts": ["a", "b"], "max_new_tokens": 1, name: value}
    with pytest.raises(ValueError, match=message) as raised:
        byte_loaded.generate(**given)
    if name not in ("prompts", "stop"):
        del given["prompts"]
        with pytest.raises(ValueError, match=re.escape(str(raised.value))):
            byte_model.generate([[97], [98]], **given, jit_compile=False)


def test_an_export_in_python_takes_texts_and_settings_of_every_type(byte_loaded):
    right = byte_loaded.generate(["ab", "c"], [2, 3], temperature=1.0, seed=[1, 2])
    texts = (
        [b"ab", np.str_("c")],
        ("ab", b"c"),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["ab", "c"], object),
        tf.constant(["ab", "c"]),
        iter(["ab", "c"]),
    )
    counts = (np.array([2, 3]), tf.constant([2, 3], tf.int64), (2, 3), range(2, 4))
    for index, prompts in enumerate(texts):
        count = counts[index % len(counts)]
        seed = np.array([1, 2], "uint8")
        given = {"temperature": np.float16(1), "seed": seed, "stop": (None, "", [None, b""])[index % 3]}
        outputs = byte_loaded.generate(prompts, count, **given)
        assert outputs["text"].tolist() == right["text"].tolist()
    assert byte_loaded.score(b"abc")["loss"] == byte_loaded.score(["abc"])["loss"]
    for call in (byte_loaded.score, byte_loaded.attention):
        for wrong in ([], None, 5, [["a"]], ["a", None]):
            with pytest.raises(ValueError, match=r"texts must be"):
                call(wrong)


def test_the_signatures_of_single_steps_judge_widths_and_positions(byte_loaded):
    draw = {name: x for name, x in settings(1).items() if name != "max_new_tokens"}
    sample = byte_loaded.signatures["sample"]
    for width in (0, 5, 257):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"256 tokens. Received: {width}\."):
            sample(logits=tf.zeros((1, width)), position=tf.constant([1]), **draw)
    for position in (-1, 24):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"0 to 23\. Received: {position}\."):
            sample(logits=tf.zeros((1, 256)), position=tf.constant([position]), **draw)
    for length in (-1, 3):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"0 to 2\. Received: {length}\."):
            byte_loaded.signatures["detokenize"](
                token_ids=tf.constant([[97, 98]]), length=tf.constant([length])
            )
    outputs = byte_loaded.signatures["score"](text=tf.constant([], tf.string))
    assert outputs["token_ids"].shape == outputs["logprobs"].shape == (0, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 1e-6}, None),
        ({"temperature": 1e6}, None),
        ({"top_k": 256}, None),
        ({"top_k": 261}, None),
        ({"top_k": 1, "temperature": 3.0}, None),
        ({"top_p": 1e-9, "temperature": 3.0}, None),
        ({"seed": -(2**31), "temperature": 1.0}, None),
        ({"max_new_tokens": 1000}, None),
        ({"max_new_tokens": 0}, None),
    ],
)
def test_settings_at_their_edges_are_answered(byte_loaded, given, message):
    outputs = byte_loaded.generate("edge", **{"max_new_tokens": 2, **given})
    assert outputs["length"][0] == min(4 + given.get("max_new_tokens", 2), 24)
    assert np.isfinite(outputs["new_logprobs"]).all()


def test_unlike_numbers_of_rows_are_refused(byte_loaded):
    inputs = {"prompt": tf.constant(["a", "b"]), "stop": tf.constant(["", ""]), **settings(2)}
    inputs["seed"] = tf.constant([1])
    message = r"one number of rows in max_new_tokens, .*, prompt, seed.*Received: 2, 2, 2, 1, 2"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        byte_loaded.signatures["generate"](**inputs)


@pytest.mark.parametrize("bad", [256, -1, 10**6])
def test_ids_outside_the_vocabulary_are_refused_by_every_signature(byte_loaded, bad):
    ids = {"prompt_ids": tf.constant([[1, bad]]), "prompt_length": tf.constant([2])}
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Received: {bad}"):
        byte_loaded.signatures["generate_ids"](**ids, stop_id=tf.constant([-1]), **settings(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Received: {bad}"):
        byte_loaded.signatures["prefill"](**ids)
    first = byte_loaded.signatures["prefill"](
        prompt_ids=tf.constant([[1]]), prompt_length=tf.constant([1])
    )
    cache = {name: first[f"new_{name}"] for name in CACHES}
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Received: {bad}"):
        byte_loaded.signatures["step"](token_id=tf.constant([bad]), position=tf.constant([1]), **cache)
    with pytest.raises(tf.errors.InvalidArgumentError, match="position is outside the model"):
        byte_loaded.signatures["step"](
            token_id=tf.constant([1]), position=tf.constant([24 if bad > 0 else bad]), **cache
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("min_p", float("nan")),
    ],
)
def test_a_setting_out_of_range_is_refused_by_every_signature_that_takes_it(byte_loaded, name, value):
    given = settings(1, **{name: value})
    draw = {name: given[name] for name in list(SETTINGS)[1:]}
    for signature, inputs in (
        ("generate", {"prompt": tf.constant(["a"]), "stop": tf.constant([""]), **given}),
        (
            "generate_ids",
            {
                "prompt_ids": tf.constant([[1]]),
                "prompt_length": tf.constant([1]),
                "stop_id": tf.constant([-1]),
                **given,
            },
        ),
        ("sample", {"logits": tf.zeros((1, 256)), "position": tf.constant([0]), **draw}),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{name} is out of range. Expected a"):
            byte_loaded.signatures[signature](**inputs)


def test_an_export_takes_the_settings_that_it_was_made_with(loaded, monkeypatch):
    later = sampling.SETTINGS[0]._replace(name="top_a")
    monkeypatch.setattr(saving, "SETTINGS", (*sampling.SETTINGS, later))
    assert loaded.generate("The cat sat", 3)["text"] == [b"The cat sat bites bites bites"]
    with pytest.raises(TypeError, match=r"no setting 'top_a'\. Expected settings among temperature, "):
        loaded.generate("The cat sat", 3, top_a=0.5)


def test_prefill_step_and_sample_walk_like_generate_ids(byte_loaded):
    prompt = {"prompt_ids": tf.constant([[7, 8, 9], [5, 0, 0]]), "prompt_length": tf.constant([3, 1])}
    given = settings(2, max_new_tokens=5, temperature=[0.0, 100.0], seed=[1, 2])
    expected = byte_loaded.signatures["generate_ids"](**prompt, stop_id=tf.constant([-1, -1]), **given)
    outputs = byte_loaded.signatures["prefill"](**prompt)
    position, walked = prompt["prompt_length"], []
    draw = {name: given[name] for name in list(SETTINGS)[1:]}
    for _ in range(5):
        drawn = byte_loaded.signatures["sample"](logits=outputs["logits"], position=position, **draw)
        walked.append(drawn["token_id"].numpy())
        cache = {name: outputs[f"new_{name}"] for name in CACHES}
        before = {name: part.numpy().copy() for name, part in cache.items()}
        outputs = byte_loaded.signatures["step"](token_id=drawn["token_id"], position=position, **cache)
        # A cache that came in stays as it was.
        assert all(np.array_equal(part, before[name]) for name, part in cache.items())
        position += 1
    ids = expected["token_ids"].numpy()
    assert np.array_equal(np.array(walked).T, [ids[0, 3:8], ids[1, 1:6]])


def test_the_score_of_a_text_is_the_loss_of_the_model(lesson, loaded):
    model, tokenizer = lesson
    texts = ["The cat sat on the mat", "man", "a dog"]
    outputs = loaded.score(texts)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)
        logits = model(np.array([ids]))
        loss = next_token_loss(logits[:, :-1], np.array([ids[1:]], int)).numpy()
        assert outputs["loss"][row] == pytest.approx(loss, abs=1e-5)
        assert outputs["length"][row] == len(ids)
        assert not outputs["logprobs"][row, 0]
        assert not outputs["logprobs"][row, len(ids) :].any()
        assert -outputs["logprobs"][row].sum() == pytest.approx(loss * (len(ids) - 1), abs=1e-4)


def test_the_attention_of_a_text_is_that_of_the_model(byte_model, byte_loaded):
    outputs = byte_loaded.attention(["To be, or", "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve"])
    ids = list(b"To be, or")
    logits, weights = byte_model(np.array([ids]), return_attention_scores=True)
    assert outputs["weights"].shape == (2, 2, 2, 9, 9)
    for layer in range(2):
        assert outputs["weights"][0, layer] == pytest.approx(weights[layer][0].numpy(), abs=1e-5)
    assert outputs["next_logits"][0] == pytest.approx(logits[0, -1].numpy(), abs=1e-3)
    shorter = byte_model(np.array([list("na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve".encode())]))
    assert outputs["next_logits"][1] == pytest.approx(shorter[0, -1].numpy(), abs=1e-3)
    assert outputs["tokens_bytes"][1].tolist() == [
        b"n",
        b"a",
        b"\xc3",
        b"\xaf",
        b"v",
        b"e",
        b"",
        b"",
        b"",
    ]
    assert not outputs["weights"][1, :, :, 6:].any()
    with pytest.raises(ValueError, match=r"at most 24 tokens\. Received: 25"):
        byte_loaded.attention("x" * 25)


def test_the_future_changes_no_logit_of_the_past_in_the_export(byte_loaded):
    text = bytearray(b"all the world")
    before = byte_loaded.signatures["score"](text=tf.constant([bytes(text)]))["logprobs"].numpy()
    for place in range(1, len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        after = byte_loaded.signatures["score"](text=tf.constant([bytes(changed)]))["logprobs"].numpy()
        assert np.array_equal(after[0, :place], before[0, :place])
        assert after[0, place] != before[0, place]


def test_the_weights_are_stored_once_tied_ones_too(byte_model, byte_path):
    stored = sum(path.stat().st_size for path in (byte_path / "variables").iterdir())
    weights = 4 * byte_model.count_params()
    assert weights < stored < weights + 10_000


def test_a_version_is_never_written_twice_and_an_interrupted_one_leaves_nothing(
    lesson, tmp_path, monkeypatch
):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "saved_model.pb").write_text("of somebody else")

    def interrupted(module, path, **kwargs):
        pathlib.Path(path, "half").write_text("written")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tf.saved_model, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export_saved_model(*lesson, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    assert (tmp_path / "7" / "saved_model.pb").read_text() == "of somebody else"

    def quick(module, path, **kwargs):
        pathlib.Path(path, "saved_model.pb").write_text("ours")

    monkeypatch.setattr(tf.saved_model, "save", quick)
    assert export_saved_model(*lesson, tmp_path) == tmp_path / "8"


def test_a_model_with_another_vocabulary_than_its_tokenizer_is_refused(byte_model, lesson, tmp_path):
    with pytest.raises(ValueError, match="20 in the tokenizer, 256 in the model"):
        export_saved_model(byte_model, lesson[1], tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("content", ["nothing", "version without a model", "other model", "broken"])
def test_a_folder_that_is_no_export_is_refused(tmp_path, content):
    if content == "version without a model":
        (tmp_path / "1").mkdir()
    if content == "broken":
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "saved_model.pb").write_bytes(b"not a graph")
    if content == "other model":
        tf.saved_model.save(tf.Module(), str(tmp_path / "1"))
    with pytest.raises(ValueError, match="no export to load"):
        load_saved_model(tmp_path)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "variables"), "in which variables are missing"),
        (lambda folder: (folder / "variables" / "variables.index").unlink(), "variables are missing"),
        (lambda folder: next(folder.glob("variables/*.data-*")).unlink(), "variables are missing"),
        (lambda folder: cut(next(folder.glob("variables/*.data-*"))), "whose variables cannot be read"),
        (
            lambda folder: cut(folder / "variables" / "variables.index"),
            "whose variables cannot be read",
        ),
        (lambda folder: cut(folder / "saved_model.pb"), "whose saved_model.pb cannot be read"),
        (lambda folder: (folder / "saved_model.pb").write_bytes(b""), "whose saved_model.pb cannot"),
        (lambda folder: (folder / "saved_model.pb").unlink(), "in which saved_model.pb is missing"),
    ],
)
def test_a_damaged_export_says_what_is_damaged(lesson_path, tmp_path, break_it, said):
    shutil.copytree(lesson_path, tmp_path / "1")
    break_it(tmp_path / "1")
    with pytest.raises(ValueError, match=r"^The export is damaged\. Expected all that") as raised:
        load_saved_model(tmp_path)
    assert said in str(raised.value)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_an_empty_newest_version_is_named_beside_the_one_that_is_whole(lesson_path, tmp_path):
    shutil.copytree(lesson_path, tmp_path / "01")
    for name in ("99", "100.tmp", ".unfinished-x"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"version 99 holds no saved_model\.pb; 01 does\. Remove"):
        load_saved_model(tmp_path)
    (tmp_path / "99").rmdir()
    assert load_saved_model(tmp_path).path == tmp_path / "01"


def test_an_export_is_written_and_read_at_a_file_url_under_home_and_under_bytes(
    lesson, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    # Where it is written is what counts here.
    monkeypatch.setattr(tf.saved_model, "save", lambda module, path, **kwargs: None)
    monkeypatch.setattr(saving.Signatures, "trace", lambda self: {})
    monkeypatch.setattr(saving.card, "write", lambda *args: None)
    for number, base in enumerate(["~/a b", (tmp_path / "a b").as_uri(), bytes(tmp_path / "a b")], 1):
        assert export_saved_model(*lesson, base) == tmp_path / "a b" / str(number)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="A path must name a place on this machine"):
        export_saved_model(*lesson, "gs://bucket/models")
    assert [path.name for path in tmp_path.iterdir()] == ["a b"]


def test_a_full_disk_is_an_os_error_and_leaves_nothing(lesson, tmp_path, monkeypatch):
    def full(module, path, **kwargs):
        pathlib.Path(path, "half").write_text("written")
        raise tf.errors.ResourceExhaustedError(None, None, f"{path}/half; No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        export_saved_model(*lesson, tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename.endswith("half")
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_tensorflow_stays_what_it_is(lesson, tmp_path, monkeypatch):
    def fails(module, path, **kwargs):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr(tf.saved_model, "save", fails)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM"):
        export_saved_model(*lesson, tmp_path)


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_an_os_error_at_every_size(tmp_path):
    program = """
        import errno, os, resource, signal, sys
        sys.path.insert(0, sys.argv[1])
        import _lesson_15_model
        from keras_tinyattn import export_saved_model
        pair = _lesson_15_model.reference_model()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for size in (10, 1000, 3000, 20000, 250000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                export_saved_model(*pair, sys.argv[2])
            except OSError as error:
                assert error.errno == errno.EFBIG, error
            else:
                raise SystemExit(f"{size} bytes were enough")
            assert os.listdir(sys.argv[2]) == []
    """
    scripts = pathlib.Path(_lesson_15_model.__file__).parent
    command = [sys.executable, "-c", textwrap.dedent(program), str(scripts), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_card_says_what_the_export_is(lesson_path):
    card = json.loads((lesson_path / "model_card.json").read_text(encoding="utf-8"))
    assert card["about"] == {"data": "by hand"}
    assert card["model"]["vocabulary_size"] == 20
    assert card["model"]["sequence_length"] == 10
    assert card["model"]["parameters"] == 20 * 8 + 10 * 8 + 3 * 64 + 8 * 20
    assert card["versions"]["tensorflow"] == tf.__version__
    for name, digest in card["sha256"].items():
        assert hashlib.sha256((lesson_path / name).read_bytes()).hexdigest() == digest
    assert {answer["signature"] for answer in card["answers"]} >= {
        "serving_default",
        "generate",
        "score",
    }


def test_every_check_passes_an_export_and_each_signature_is_checked_in_a_session_too(lesson_path):
    rows = {label: (seen, passed) for label, seen, passed in _check_alone.main(lesson_path, "xla")}
    assert [label for label, (_, passed) in rows.items() if not passed] == []
    for name in TABLE:
        assert {name, f"{name}, in a session"} <= set(rows)
    for where in ("", ", in a session"):
        assert f"prefill, step and sample{where}" in rows


@pytest.mark.slow
def test_verify_passes_an_export_and_says_so(lesson_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert command(["verify", str(lesson_path.parent)]) == 0
    printed = capsys.readouterr().out
    assert "checks passed" in printed
    for row in ("generate_xla", "generate_xla, in a session", "generate, in a session, XLA disabled"):
        assert f"{row} " in printed
    assert "generate, XLA disabled" in printed
    for where in ("", ", XLA disabled", ", in a session", ", in a session, XLA disabled"):
        assert f"prefill, step and sample{where} " in printed


def test_verify_fails_a_changed_answer_a_changed_file_and_a_compiled_operation(lesson_path):
    card = json.loads((lesson_path / "model_card.json").read_text(encoding="utf-8"))
    assert _check_alone.check_files(lesson_path, card)[2]
    card["sha256"]["saved_model.pb"] = "0" * 64
    assert not _check_alone.check_files(lesson_path, card)[2]
    answer = next(answer for answer in card["answers"] if answer["signature"] == "score")
    outputs = {name: _check_alone.from_json(part) for name, part in answer["outputs"].items()}
    assert _check_alone.compare("score", outputs, answer["outputs"])[2]
    for name, change in (("loss", 0.01), ("token_ids", 1)):
        changed = {**outputs, name: outputs[name] + tf.cast(change, outputs[name].dtype)}
        assert not _check_alone.compare("score", changed, answer["outputs"])[2]
    assert all(row[2] for row in _check_alone.check_operations(lesson_path))


def test_verify_runs_a_signature_in_a_session_and_an_error_there_is_a_failed_row(lesson_path):
    session = tf.compat.v1.Session(graph=tf.Graph())
    loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(lesson_path))
    card = json.loads((lesson_path / "model_card.json").read_text(encoding="utf-8"))
    answer = next(answer for answer in card["answers"] if answer["signature"] == "score")

    def row(text, expected):
        signature = loaded.signature_def["score"]
        inputs = (session, signature, {"text": text})
        return _check_alone.check("score", expected, _check_alone.run_in_session, *inputs)

    text = _check_alone.from_json(answer["inputs"]["text"])
    assert row(text, answer["outputs"])[2]
    changed = json.loads(json.dumps(answer["outputs"]))
    changed["loss"]["value"][0] += 0.01
    assert row(text, changed) == ["score", "largest difference 1.0e-02; other loss", False]
    label, seen, passed = row(tf.constant([""]), answer["outputs"])
    assert (label, passed) == ("score", False)
    assert seen.startswith("InvalidArgumentError: ")
    assert "There is nothing to read." in seen
    assert "\n" not in seen
    session.close()


@pytest.mark.parametrize("wrong", [None, "position", "cache", "new_logprobs"])
def test_verify_walks_by_prefill_step_and_sample(byte_path, byte_loaded, wrong):
    card = json.loads((byte_path / "model_card.json").read_text(encoding="utf-8"))
    answer = next(answer for answer in card["answers"] if answer["signature"] == "generate_ids")
    expected = _check_alone.first_new_tokens(answer)
    assert len(expected["token_id"]["value"]) == 3
    inputs = {name: _check_alone.from_json(part) for name, part in answer["inputs"].items()}

    def call(name, inputs):
        if wrong == "position" and name == "step":
            inputs = {**inputs, "position": inputs["position"] + 1}
        if wrong == "cache" and name == "step":
            inputs = {**inputs, "values_0": inputs["keys_0"]}
        return byte_loaded.signatures[name](**inputs)

    if wrong == "new_logprobs":
        expected["logprob"]["value"][2] += 0.01
    assert _check_alone.check("walk", expected, _check_alone.walk, call, inputs, 3)[2] == (
        wrong is None
    )


@pytest.mark.slow
def test_what_goes_by_blocks_is_exported_alike_compiled_and_in_a_session(tmp_path, monkeypatch):
    # Windows of 16 tokens or more; a length that a graph does not know decides when it runs.
    for module in (_window, graphs):
        monkeypatch.setattr(module, "BLOCKWISE_FROM", 16)
    model = CausalLM(
        TokenAndPositionEmbedding(256, 24, 8),
        [DecoderBlock(8, 2), DecoderBlock(8, 2, blockwise=True)],
        VocabProjection(256, tied=True),
    )
    model.build((None, 24))
    for variable in model.weights:
        variable.assign(variable * 2)
    # A graph that was made before the export.
    assert len(list(stream(model, [1, 2], 2))) == 2
    path = export_saved_model(model, ByteTokenizer(), tmp_path)
    session = tf.compat.v1.Session(graph=tf.Graph())
    definitions = tf.compat.v1.saved_model.load(session, ["serve"], str(path)).signature_def
    loaded = load_saved_model(path)
    texts = [b"seventeen letters", b"four"]
    inputs = {"prompt": tf.constant(texts), "stop": tf.constant(["", ""])}
    inputs.update(settings(2, max_new_tokens=4, temperature=[0.0, 1.0]))
    expected = generate(model, [list(text) for text in texts], 4, temperature=[0, 1], jit_compile=False)
    for row, text in enumerate(texts):
        ids = expected.token_ids[row, : expected.lengths[row]]
        logits, _ = model(ids[None], cache=model.make_cache(1))
        logprobs = tf.nn.log_softmax(logits[0, len(text) - 1 : -1])
        logprobs = logprobs.numpy()[np.arange(4), ids[len(text) :]]
        assert expected.new_logprobs[row] == pytest.approx(logprobs, abs=1e-4)
    assert expected.new_logprobs.max() < -0.01  # Where all were certain, nothing would differ.
    for name in ("generate", "generate_xla"):
        outputs = _check_alone.run_in_session(session, definitions[name], inputs)
        assert np.array_equal(outputs["token_ids"], expected.token_ids), name
        assert outputs["new_logprobs"] == pytest.approx(expected.new_logprobs, abs=1e-4), name
    session.close()
    model.blocks[1].attention.blockwise = False
    _, weights = model(np.array([list(b"four")]), return_attention_scores=True)
    assert loaded.attention("four")["weights"][0] == pytest.approx(np.concatenate(weights), abs=1e-5)


def test_the_operations_of_a_signature_are_counted_through_the_functions_it_calls(tmp_path):
    number = tf.TensorSpec((), tf.float32, name="x")
    module = tf.Module()
    inner = tf.function(
        lambda x: tf.exp(x) * tf.exp(-x),
        input_signature=[number],
        experimental_attributes={"_noinline": True},
    )

    @tf.function(input_signature=[number], jit_compile=True)
    def steep(x):
        return tf.tan(x)

    # Two calls of one function, and both branches of a condition.
    plain = tf.function(
        lambda x: tf.cond(x > 0, lambda: tf.sin(x), lambda: tf.cos(x)) + inner(x) - inner(2.0 * x),
        input_signature=[number],
    )
    xla = tf.function(lambda x: inner(steep(x)), input_signature=[number])
    module.functions = [plain, xla]
    tf.saved_model.save(module, str(tmp_path), signatures={"plain": plain, "xla": xla})
    found = signature_operations(tmp_path)
    assert list(found) == ["plain", "xla"]
    kinds, functions = found["plain"]
    counts = {"Exp": 2, "Sin": 1, "Cos": 1, "Greater": 1, "AddV2": 1, "Sub": 1, "Mul": 2, "Tan": 0}
    assert {kind: kinds[kind] for kind in counts} == counts
    assert functions == []
    kinds, [function] = found["xla"]
    assert {kind: kinds[kind] for kind in ("Exp", "Tan", "Sin")} == {"Exp": 2, "Tan": 1, "Sin": 0}
    assert "steep" in function


@pytest.mark.parametrize(
    "bad", [-np.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.nan, np.inf))]
)
def test_logits_that_are_not_finite_are_an_invalid_argument_of_every_signature(byte_path, bad):
    loaded = load_saved_model(byte_path)
    texts, ints = tf.constant(["ab", "c"]), tf.constant([1, 1])
    inputs = {
        **{name: {"prompt": texts} for name in ("serving_default", "generate", "generate_xla")},
        **{name: {"text": texts} for name in ("score", "attention")},
        "generate_ids": {"prompt_ids": ints[:, None], "stop_id": -ints},
        "prefill": {"prompt_ids": ints[:, None]},
        "step": {"token_id": ints},
        "sample": {"logits": tf.constant([[0.0] * 256, [bad] + [0.0] * 255])},
    }
    others = {"stop": tf.constant(["", ""]), "prompt_length": ints, "position": ints, **settings(2)}
    [table] = [x for x in loaded._loaded.variables_of_model if tuple(x.shape) == (256, 8)]
    rows = table.numpy()
    rows[200] = bad  # The projection is tied to it.
    table.assign(rows)
    for name, given in inputs.items():
        specs = loaded.signatures[name].structured_input_signature[1]
        filled = {
            key: given[key]
            if key in given
            else others[key]
            if key in others
            else tf.zeros((2, *spec.shape[1:]), spec.dtype)
            for key, spec in specs.items()
        }
        with pytest.raises(tf.errors.InvalidArgumentError, match="The logits are not finite"):
            loaded.signatures[name](**filled)
    with pytest.raises(ValueError, match="The logits are not finite"):
        loaded.score("ab")


def _circular():
    about = {}
    about["itself"] = [about]
    return about


@pytest.mark.parametrize(
    ("about", "received"),
    [
        ({"loss": float("nan")}, "Out of range float values|nan"),
        ({"loss": -float("inf")}, "Out of range float values|inf"),
        ({"loss": np.float32(1)}, "float32 is not JSON"),
        ({"tags": {"a"}}, "set is not JSON"),
        ({"loss": tf.constant(1.0)}, "not JSON"),
        ({"raw": b"a"}, "bytes is not JSON"),
        ({1: "a"}, "the key 1"),
        ({"nested": [{None: 2}]}, "the key None"),
        (["a"], "list, no dictionary"),
        ("", "str, no dictionary"),
        ({"text": "\ud800"}, "surrogates"),
        (_circular(), "one in itself"),
        ({"deep": json.loads("[" * 900 + "]" * 900)}, "more than 50 levels"),
    ],
)
def test_about_that_is_no_json_is_refused_before_anything_is_written(
    byte_model, tmp_path, about, received
):
    with pytest.raises(ValueError, match=f"about becomes a part of the model card.*({received})"):
        export_saved_model(byte_model, ByteTokenizer(), tmp_path / "new", about=about)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_not_exported_and_logits_neither(tmp_path):
    model = gpt(256, sequence_length=8, hidden_dim=4, num_heads=1, num_layers=1)
    model.build((None, 8))
    kernel = model.blocks[0].mlp_expand.kernel
    kernel.assign(tf.fill(kernel.shape, np.nan))
    with pytest.raises(
        ValueError, match=r"not finite.* Received: NaN or infinity in .*mlp_expand/kernel"
    ):
        export_saved_model(model, ByteTokenizer(), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    kernel.assign(tf.zeros(kernel.shape))
    model.final_norm.gamma.assign(tf.fill(model.final_norm.gamma.shape, 3e38))
    model.embedding.token_embeddings.assign(tf.random.stateless_normal((256, 4), (1, 2)) * 1e3)
    with pytest.raises(ValueError, match="The logits are not finite"):
        export_saved_model(model, ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_card_with_nan_fails_and_the_types_of_the_layers_say_how_close_is_close(lesson_path):
    card = json.loads((lesson_path / "model_card.json").read_text(encoding="utf-8"))
    assert card["precision"]["compute_dtypes"] == ["float32"]
    for value, seen, dtypes, passed in (
        (1.0, 1.01, ["float32"], False),
        (1.0, 1.01, ["float64"], False),
        (1.0, 1.01, ["float16", "float32"], True),
        (1.0, 1.1, ["float16"], False),
        (1.0, 1.1, ["bfloat16", "float32"], True),
        (1.0, 2.0, ["bfloat16"], False),
        (float("nan"), float("nan"), ["bfloat16"], False),
    ):
        expected = {"loss": {"dtype": "float32", "value": [value]}}
        outputs = {"loss": tf.constant([seen])}
        assert _check_alone.compare("loss", outputs, expected, dtypes)[2] == passed


def test_verify_follows_a_compiled_text_in_half_precision_past_near_ties(tmp_path):
    # Set on the layers alone: the policy of the model says float32.
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        parts = gpt(256, sequence_length=16, hidden_dim=8, num_heads=2, num_layers=1)
    finally:
        keras.config.set_dtype_policy(before)
    model = CausalLM(parts.embedding, parts.blocks, parts.projection, parts.final_norm)
    model.build((None, 16))
    folder = export_saved_model(model, ByteTokenizer(), tmp_path)
    card = json.loads((folder / "model_card.json").read_text(encoding="utf-8"))
    assert card["model"]["dtype_policy"] == "float32"
    dtypes = card["precision"]["compute_dtypes"]
    assert "bfloat16" in dtypes
    assert "may differ" in card["precision"]["same_text"]
    loaded = load_saved_model(folder)
    request = {
        "prompt": tf.constant([b"abc", b"d"]),
        **settings(2, max_new_tokens=[8, 5], temperature=[0.0, 1.0], top_k=[0, 50]),
        "stop": tf.constant(["", ""]),
    }

    def call(wrong, name, inputs):
        # Plain in place of compiled, as fast and as good here; all logits are close, so many are ties.
        if name != "generate_xla":
            return loaded.signatures[name](**inputs)
        if wrong == "seed":
            inputs = {**inputs, "seed": inputs["seed"] + 1}
        outputs = dict(loaded.signatures["generate"](**inputs))
        if wrong == "token":
            outputs["new_logprobs"] += 3.0
        return outputs

    for wrong in (None, "token", "seed"):
        [_, _, passed] = _check_alone.check_rounding(
            "xla", functools.partial(call, wrong), request, dtypes
        )
        assert passed == (wrong is None), wrong


@pytest.mark.parametrize("content", [None, b"", b"not a graph"])
def test_a_folder_without_a_graph_has_no_operations(tmp_path, content):
    if content is not None:
        (tmp_path / "saved_model.pb").write_bytes(content)
    with pytest.raises(ValueError, match="There is no graph to read"):
        signature_operations(tmp_path)


def test_verify_sees_a_compiled_function_in_a_plain_signature(tmp_path):
    module = tf.Module()
    compiled = tf.function(lambda x: x + 1.0, jit_compile=True)
    module.f = tf.function(compiled, input_signature=[tf.TensorSpec((None,), tf.float32, name="x")])
    tf.saved_model.save(module, str(tmp_path / "1"), signatures={"generate": module.f})
    [row] = _check_alone.check_operations(tmp_path / "1")
    assert not row[2]
    assert "compiled function" in row[1]


def test_verify_without_a_card_or_an_export_is_bad_input(lesson_path, tmp_path, capsys):
    assert command(["verify", str(tmp_path)]) == 2
    assert "no export to load" in capsys.readouterr().err
    shutil.copytree(lesson_path, tmp_path / "1")
    (tmp_path / "1" / "model_card.json").unlink()
    with pytest.raises(ValueError, match=r"Expected model_card\.json"):
        verify_saved_model(tmp_path)


def changed_card(folder, tmp_path, **changes):
    """A copy of an export with another card."""
    copy = shutil.copytree(folder, tmp_path / "1")
    card = json.loads((copy / "model_card.json").read_text(encoding="utf-8")) | changes
    (copy / "model_card.json").write_text(json.dumps(card), encoding="utf-8")
    return copy


def test_a_card_that_was_emptied_fails(lesson_path, tmp_path):
    folder = changed_card(lesson_path, tmp_path, answers=[], sha256={})
    (tmp_path / "1" / "assets" / "more.txt").write_text("more")
    rows = {label: (seen, passed) for label, seen, passed in _check_alone.main(folder, "xla")}
    seen, passed = rows["files"]
    assert not passed
    assert seen.startswith("0 of ")
    assert "saved_model.pb" in seen
    assert "assets/more.txt" in seen
    seen, passed = rows["answers"]
    assert not passed
    assert set(seen.removeprefix("none of ").split(", ")) == set(TABLE) - {"generate_xla"}
    outputs = {"loss": tf.constant([1.0]), "cache": tf.zeros(2000)}
    assert not _check_alone.compare("score", outputs, {})[2]
    assert _check_alone.compare("score", outputs, {"loss": {"dtype": "float32", "value": [1]}})[2]


@pytest.mark.parametrize("name", ["../outside.txt", "assets/../../outside.txt", "{absolute}"])
def test_a_name_in_a_card_that_leaves_the_folder_is_not_followed(lesson_path, tmp_path, name):
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    name = name.format(absolute=outside)
    digest = hashlib.sha256(b"secret").hexdigest()
    card = json.loads((lesson_path / "model_card.json").read_text(encoding="utf-8"))
    folder = changed_card(lesson_path, tmp_path, sha256=card["sha256"] | {name: digest})
    card = json.loads((folder / "model_card.json").read_text(encoding="utf-8"))
    _, seen, passed = _check_alone.check_files(folder, card)
    assert not passed
    assert seen.endswith(f"; not {name}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        '{"sha256": [], "answers": []}',
        '{"sha256": {"a": 1}, "answers": []}',
        '{"sha256": {}, "answers": {}, "precision": 1}',
        '{"sha256": {}, "answers": [1]}',
        '{"sha256": {}, "answers": [{"signature": 1, "inputs": {}, "outputs": {}}]}',
        '{"sha256": {}, "answers": [{"signature": "score", "inputs": [], "outputs": {}}]}',
        '{"sha256": {}, "answers": [{"signature": "score", "inputs": {"text": 1}, "outputs": {}}]}',
        '{"sha256": {}, "answers": [], "precision": {"compute_dtypes": [1]}}',
        b"\xff",
    ],
    ids=range(14),
)
def test_a_damaged_card_is_a_sentence(lesson_path, tmp_path, text):
    folder = shutil.copytree(lesson_path, tmp_path / "1")
    (folder / "model_card.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"The card of the export is damaged\. Expected"):
        verify_saved_model(tmp_path)


def test_an_answer_that_cannot_be_read_is_a_failed_row(lesson_path, tmp_path):
    answers = [
        {"signature": name, "inputs": {"text": {"dtype": dtype, "value": value}}, "outputs": {}}
        for name, dtype, value in (
            ("score", "string", [1]),
            ("attention", "no type", [1]),
            ("tokenize", "int32", [10**400]),
            ("generate_ids", "string", ["a"]),
            ("no signature", "string", ["a"]),
        )
    ]
    folder = changed_card(lesson_path, tmp_path, answers=answers)
    rows = {label: passed for label, _, passed in _check_alone.main(folder, "xla")}
    assert not any(rows[answer["signature"]] for answer in answers)


def test_where_xla_cannot_be_switched_off_that_check_is_left_open(
    lesson_path, tmp_path, monkeypatch, capsys
):
    class NoSwitch:
        def __init__(self, path):
            pass

    monkeypatch.setattr(_check_alone.ctypes, "CDLL", NoSwitch)
    [row] = _check_alone.main(lesson_path, "no-xla")
    assert row[0] == "XLA disabled"
    assert row[2] is None
    rows = [Check("files", "all", True), Check(*row)]
    monkeypatch.setattr("keras_tinyattn.export.verify_saved_model", lambda path: rows)
    assert command(["verify", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not checked" in printed
    assert printed.endswith("1 of 2 could not be checked: XLA disabled.")


@pytest.mark.parametrize("body", ["exit 3", "kill -9 $$", "echo no TensorFlow >&2; exit 1", "echo [["])
def test_a_check_that_dies_says_nothing_about_the_export(lesson_path, tmp_path, monkeypatch, body):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(
        ValueError, match=r"could not be checked, which says nothing about it"
    ) as raised:
        verify_saved_model(lesson_path)
    if "TensorFlow" in body:
        assert "Received: no TensorFlow." in str(raised.value)


@pytest.mark.slow
def test_verify_finds_a_tensorflow_that_python_is_told_of(lesson_path, tmp_path):
    # The system's own Python, which has no TensorFlow.
    places = [str(pathlib.Path(tf.__file__).parents[1]), str(pathlib.Path(__file__).parents[1])]
    environment = {"PYTHONPATH": os.pathsep.join(places), "PATH": os.environ["PATH"]}
    command = [sys._base_executable, "-m", "keras_tinyattn", "verify", str(lesson_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "checks passed" in ended.stdout


@pytest.mark.slow
def test_a_moved_export_runs_in_a_process_that_knows_tensorflow_alone_without_xla(
    byte_path, byte_loaded, tmp_path
):
    moved = tmp_path / "elsewhere" / "3"
    shutil.copytree(byte_path, moved)
    program = """
        import sys
        import tensorflow as tf
        sys.path.insert(0, sys.argv[2])
        import _check_alone
        _check_alone.disable_xla()
        loaded = tf.saved_model.load(sys.argv[1])
        row = lambda value: tf.constant([value])
        inputs = dict(prompt=row("To be"), max_new_tokens=row(6), temperature=row(1.0), top_k=row(0),
                      top_p=row(1.0), min_p=row(0.0), seed=row(3), stop=row(""))
        print(loaded.signatures["generate"](**inputs)["completion_bytes"][0].numpy().hex())
        try:
            loaded.signatures["generate_xla"](**inputs)
        except tf.errors.OpError as error:
            print("refused", "XLA" in error.message)
        assert not any(name.split(".")[0] == "keras_tinyattn" for name in sys.modules)
    """
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(program),
            str(moved),
            str(pathlib.Path(_check_alone.__file__).parent),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    completion, refused = result.stdout.split("\n", 1)
    expected = byte_loaded.generate("To be", 6, temperature=1.0, seed=3)["completion_bytes"][0]
    assert bytes.fromhex(completion) == expected
    assert refused.strip() == "refused True"


def test_the_warm_up_names_plain_signatures_only(lesson_path):
    records = list(
        tf.data.TFRecordDataset(str(lesson_path / "assets.extra" / "tf_serving_warmup_requests"))
    )
    names = [
        name
        for name in TABLE
        if any(b"\x1a" + bytes([len(name)]) + name.encode() in r.numpy() for r in records)
    ]
    assert set(names) == set(TABLE) - {"generate_xla"}
    assert len(records) == len(names)
    card = json.loads((lesson_path / "model_card.json").read_text())
    assert [answer["signature"] for answer in card["answers"]].count("step") == 1


@pytest.mark.slow
def test_a_cache_is_left_out_of_the_card_and_of_the_warm_up(tmp_path):
    model = gpt(256, sequence_length=256, hidden_dim=64, num_heads=1, num_layers=1)
    model.build((None, 256))
    folder = export_saved_model(model, ByteTokenizer(), tmp_path)
    # The cache of one request alone is 262,144 bytes.
    assert (folder / "model_card.json").stat().st_size < 60_000
    assert (folder / "assets.extra" / "tf_serving_warmup_requests").stat().st_size < 20_000


def random_requests(count, seed):
    """Requests of every kind, valid and not."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(draw.integers(1, 5))
        yield {
            "prompt": tf.constant([draw.bytes(draw.integers(0, 27)) for _ in range(rows)]),
            "max_new_tokens": tf.constant(draw.integers(-1, 30, rows), tf.int32),
            "temperature": tf.constant(
                draw.choice([0, 0, 0.7, 1, 1e6, 1e-6, -1, np.nan], rows), tf.float32
            ),
            "top_k": tf.constant(draw.choice([0, 0, 1, 5, 256, 300, -1], rows), tf.int32),
            "top_p": tf.constant(draw.choice([1, 1, 0.9, 0.1, 1e-9, 0, 1.5], rows), tf.float32),
            "min_p": tf.constant(draw.choice([0, 0, 0.1, 1, -0.1], rows), tf.float32),
            "seed": tf.constant(draw.integers(-(2**31), 2**31, rows), tf.int32),
            "stop": tf.constant([draw.bytes(draw.choice([0, 0, 1, 2, 9])) for _ in range(rows)]),
        }


def is_valid(request):
    lengths = [len(text) for text in request["prompt"].numpy()]
    return (
        all(1 <= length <= 24 for length in lengths)
        and (request["max_new_tokens"].numpy() >= 0).all()
        and (request["temperature"].numpy() >= 0).all()
        and (request["top_k"].numpy() >= 0).all()
        and ((request["top_p"].numpy() > 0) & (request["top_p"].numpy() <= 1)).all()
        and (request["min_p"].numpy() >= 0).all()
        and all(len(stop) <= 8 for stop in request["stop"].numpy())
    )


def check_random_requests(loaded, count, seed):
    """Answer or refuse every request as documented; the numbers of both."""
    probe = loaded.generate("To be", 5, temperature=1.0, seed=1)["token_ids"].tolist()
    answered = refused = 0
    for request in random_requests(count, seed):
        if not is_valid(request):
            with pytest.raises(tf.errors.InvalidArgumentError, match="Expected"):
                loaded.signatures["generate"](**request)
            refused += 1
            continue
        outputs = {name: x.numpy() for name, x in loaded.signatures["generate"](**request).items()}
        lengths = np.array([len(text) for text in request["prompt"].numpy()])
        budget = np.minimum(request["max_new_tokens"].numpy(), 24 - lengths)
        added = outputs["length"] - lengths
        stopped = outputs["finish_reason"] == b"stop"
        assert (added <= budget).all()
        assert (added[~stopped] == budget[~stopped]).all()
        assert np.isfinite(outputs["new_logprobs"]).all()
        assert outputs["token_ids"].shape[1] == outputs["length"].max()
        for row, (text, raw) in enumerate(
            zip(outputs["text"], outputs["completion_bytes"], strict=True)
        ):
            text.decode()
            stop = request["stop"].numpy()[row]
            assert len(raw) == added[row] - (len(stop) if stopped[row] else 0)
            assert not stop or stop not in raw
        answered += 1
    assert loaded.generate("To be", 5, temperature=1.0, seed=1)["token_ids"].tolist() == probe
    return answered, refused


def test_some_random_requests_are_answered_or_refused_as_documented(byte_loaded):
    answered, refused = check_random_requests(byte_loaded, 150, seed=1)
    assert answered > 15
    assert refused > 50


@pytest.mark.slow
def test_ten_thousand_random_requests_are_answered_or_refused_as_documented(byte_loaded):
    answered, refused = check_random_requests(byte_loaded, 10_000, seed=2)
    assert answered > 500
    assert refused > 1000


@pytest.mark.slow
def test_a_gpt2_that_others_trained_sorts_digits_as_an_export(shared_folder, tmp_path):
    folder = shared_folder("models/gpt_nano_sort")
    with np.load(folder / "golden.npz") as golden:
        prompts = ["".join(map(str, row[:6])) for row in golden["idx"]]
    model = causal_lm_from_gpt2(folder / "weights.npz", num_heads=3)
    loaded = load_saved_model(export_saved_model(model, CharTokenizer("012"), tmp_path))
    # Eleven positions: six digits and five of the answer; the sixth is drawn, but never stands there.
    outputs = loaded.generate(prompts, 5)
    last = loaded.signatures["prefill"](
        prompt_ids=outputs["token_ids"], prompt_length=outputs["length"]
    )["logits"]
    for prompt, five, logits in zip(prompts, outputs["completion"], last, strict=True):
        assert five.decode() + str(np.argmax(logits)) == "".join(sorted(prompt))


def test_the_committed_export_gives_the_ids_of_a_fresh_one(loaded):
    committed = load_saved_model(COMMITTED)
    for prompt in ("The cat sat", "The dog", "man bites", "<eos> <eos>"):
        for given in ({}, {"temperature": 1.0, "seed": 5}):
            ours, fresh = (x.generate(prompt, 5, **given) for x in (committed, loaded))
            assert ours["token_ids"].tolist() == fresh["token_ids"].tolist()
            assert ours["text"].tolist() == fresh["text"].tolist()


def test_unfinished_exports_of_dead_processes_are_removed_and_those_of_living_ones_are_not(tmp_path):
    for name in (".unfinished-dead", "1", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "saved_model.pb").touch()
    (tmp_path / "notes.unfinished-").touch()
    with saving._unfinished_folder(tmp_path) as living:
        with saving._unfinished_folder(tmp_path) as other:
            names = {path.name for path in tmp_path.iterdir()}
        assert names == {"1", ".hidden", "notes.unfinished-", living.name, other.name}
        assert not other.exists()
        living.rename(tmp_path / "2")
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", ".hidden", "notes.unfinished-"}


KILLED_EXPORT = """
import sys
from keras_tinyattn import ByteTokenizer, export_saved_model, gpt
model = gpt(256, 8, 4, 1, 1)
model.build((None, 8))
export_saved_model(model, ByteTokenizer(), sys.argv[1])
"""


@pytest.mark.slow
def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path):
    command = [sys.executable, "-c", KILLED_EXPORT, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob(".unfinished-*")):
            assert process.poll() is None
        with saving._unfinished_folder(tmp_path):  # The first export lives.
            assert len(list(tmp_path.glob(".unfinished-*"))) == 2
        process.kill()
    assert len(list(tmp_path.glob(".unfinished-*"))) == 1
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]

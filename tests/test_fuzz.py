"""Whatever they are given, signatures and Python entries answer, or refuse with our own sentence."""

import pathlib
import re
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session

import keras_tinyattn
from keras_tinyattn import (
    ByteTokenizer,
    CharTokenizer,
    WordTokenizer,
    export_saved_model,
    generate,
    gpt,
    load_saved_model,
    sampling,
    stream,
)

V, S = 256, 12
PACKAGE = pathlib.Path(keras_tinyattn.__file__).parent
SENTENCE = re.compile(r"Expected .*Received( also)?: .*\.", re.DOTALL)
SETTINGS = [setting.name for setting in sampling.SETTINGS]

# What a caller may pass for anything: of a wrong type, rank, number of rows or size.
ODD = (
    None,
    True,
    -1,
    3,
    2**31,
    2**63,
    10**30,
    2.0,
    2.5,
    1e39,
    float("nan"),
    float("inf"),
    "",
    "a b",
    "\ud800",
    b"bytes",
    b"\xff",
    [],
    [[]],
    [[[1]]],
    [1, 2],
    [1, "a"],
    [[1, 2], [3]],
    [None, 1],
    {"a": 1},
    {1, 2},
    object(),
    np.float32(1),
    np.int64(2**40),
    np.array([1, 2]),
    np.array([[1.5]]),
    np.array(["a", "b"]),
    np.zeros((0, 3), "int32"),
    np.zeros((2, 0), "int32"),
    tf.constant([1, 2]),
    tf.constant([[1, 2], [3, 4]], tf.int64),
    tf.constant(["a", "b"]),
    tf.constant([True, False]),
    tf.ragged.constant([[1, 2], [3]]),
)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(3)
    model = gpt(V, sequence_length=S, hidden_dim=4, num_heads=2, num_layers=1)
    model.build((None, S))
    return model


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    return export_saved_model(model, ByteTokenizer(), tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def loaded(path):
    return load_saved_model(path)


class Server:
    """The signatures of an export as a server calls them: no shape is judged before the graph runs."""

    def __init__(self, path):
        self._session = tf.compat.v1.Session(graph=tf.Graph())
        meta_graph = tf.compat.v1.saved_model.load(self._session, ["serve"], str(path))
        self._session._extend_graph()
        self.signatures = dict(meta_graph.signature_def)
        del self.signatures["__saved_model_init_op"]

    def _handle(self, info):
        return self._session.graph.get_tensor_by_name(info.name)._as_tf_output()

    def specs(self, name):
        """The inputs of a signature: dtype and shape by name."""
        return {
            key: tf.TensorSpec(tf.TensorShape(info.tensor_shape), info.dtype)
            for key, info in sorted(self.signatures[name].inputs.items())
        }

    def call(self, name, inputs):
        signature = self.signatures[name]
        feeds = {self._handle(signature.inputs[key]): value for key, value in inputs.items()}
        fetches = [self._handle(info) for info in signature.outputs.values()]
        outputs = pywrap_tf_session.TF_SessionRun_wrapper(
            self._session._session, None, feeds, fetches, [], None
        )
        return dict(zip(signature.outputs, outputs, strict=True))


@pytest.fixture(scope="module")
def server(path):
    return Server(path)


def python_entries(model, loaded):
    """Functions that take their arguments by name, and arguments that they answer."""
    settings = {setting.name: setting.default for setting in sampling.SETTINGS}
    ids, texts = [[1, 2], [3]], ["to", "be"]
    asked = {"max_new_tokens": 2, "stop": None}
    words = WordTokenizer(["to", "be"], pad_token=None, end_token=None)
    characters = CharTokenizer("tobe ")
    return {
        "generate": (
            lambda **given: generate(model, jit_compile=False, **given),
            {"token_ids": ids, "pad_id": 0, **asked, **settings},
        ),
        "stream": (
            lambda **given: list(stream(model, **given)),
            {"token_ids": [1, 2], **asked, **settings},
        ),
        "sample": (
            sampling.sample,
            {"logits": np.eye(2, 5, dtype="float32"), "position": 0, **settings},
        ),
        "an export's generate": (loaded.generate, {"prompts": texts, **asked, **settings}),
        "an export's score": (loaded.score, {"texts": texts}),
        "an export's attention": (loaded.attention, {"texts": texts}),
        "words' encode": (words.encode, {"text": "to be"}),
        "characters' encode": (characters.encode, {"text": "to be"}),
        "bytes' encode": (ByteTokenizer().encode, {"text": "to be"}),
        "words' decode": (words.decode, {"token_ids": [0, 1]}),
        "characters' decode": (characters.decode, {"token_ids": [0, 1]}),
    }


def is_our_refusal(error):
    """Whether an error comes from our code, of a type and with a sentence that a caller may rely on."""
    origin = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return (
        isinstance(error, (ValueError, TypeError))
        and origin.is_relative_to(PACKAGE)
        and SENTENCE.search(str(error))
        and len(str(error)) < 2000
    )


def check_python(model, loaded, count, seed):
    """Call the entries with one or two odd arguments each; how many were answered and refused."""
    draw = np.random.default_rng(seed)
    entries = python_entries(model, loaded)
    answered = refused = 0
    for index in range(count):
        name = list(entries)[index % len(entries)]
        function, right = entries[name]
        odd = draw.choice(list(right), min(len(right), int(draw.integers(1, 3))), replace=False)
        given = right | {key: ODD[draw.integers(len(ODD))] for key in odd}
        said = f"{name} with { ({key: given[key] for key in odd})!r}"
        try:
            function(**given)
            answered += 1
        except Exception as error:
            if not is_our_refusal(error):
                pytest.fail(f"{said}: {type(error).__name__}: {error}")
            refused += 1
    return answered, refused


def draw_inputs(draw, specs):
    """Inputs of about one number of rows, sometimes of another, of odd values or another rank."""
    rows, width = int(draw.integers(0, 4)), int(draw.integers(0, S + 2))
    inputs = {}
    for name, spec in specs.items():
        own = rows if draw.random() < 0.97 else int(draw.integers(0, 4))
        shape = [own, *(width if size is None else size for size in spec.shape[1:])]
        if name == "logits" and draw.random() < 0.9:
            shape[1] = V
        if draw.random() < 0.02:
            shape = shape[1:] if draw.random() < 0.5 else [*shape, int(draw.integers(0, 3))]
        odd = draw.random() < 0.1
        if spec.dtype == tf.string:
            longest = S + 2 if odd or name != "stop" else 1
            value = np.empty(shape, object)
            for place in np.ndindex(*shape):
                value[place] = draw.bytes(draw.integers(0, longest))
        elif spec.dtype.is_floating:
            value = draw.random(shape)
            if odd:
                value = draw.choice([0, -1, 2, 1e30, np.nan, np.inf, -np.inf], shape)
        else:
            value = draw.integers(*((-5, V + 5) if odd else (0, 5)), shape)
            if name in ("prompt_length", "length") and not odd:
                value = np.minimum(value, width)
            if odd and draw.random() < 0.3:
                value = draw.choice([-(2**31), 2**31 - 1], shape)
        inputs[name] = np.asarray(value, spec.dtype.as_numpy_dtype)
    return inputs


def sentence_of(error):
    return str(error).partition("assertion failed: [")[2]


def check_signatures(server, names, count, seed):
    """Call signatures with inputs of unlike shapes and values; how many were answered and refused."""
    draw = np.random.default_rng(seed)
    answered = refused = 0
    for index in range(count):
        name = names[index % len(names)]
        specs = server.specs(name)
        inputs = draw_inputs(draw, specs)
        said = f"{name}, request {index} of seed {seed}"
        try:
            outputs = server.call(name, inputs)
        except tf.errors.InvalidArgumentError as error:
            if not SENTENCE.search(sentence_of(error)):
                pytest.fail(f"{said}: {error}")
            refused += 1
            continue
        answered += 1
        for key, value in inputs.items():
            assert value.ndim == specs[key].shape.rank, f"{said}: {key}"
        rows = next(iter(inputs.values())).shape[0]
        for key, value in outputs.items():
            assert value.shape[0] == rows, f"{said}: {key}"
            # A cache carries what it was given, also behind the position, where nothing is read.
            if value.dtype.kind == "f" and not key.startswith(("new_keys", "new_values")):
                assert np.isfinite(value).all(), f"{said}: {key}"
    return answered, refused


PLAIN = (
    "attention",
    "detokenize",
    "generate",
    "generate_ids",
    "prefill",
    "sample",
    "score",
    "serving_default",
    "step",
    "tokenize",
)


@pytest.mark.parametrize("name", PLAIN)
def test_a_tensor_of_another_rank_is_refused_and_named(server, name):
    specs = server.specs(name)
    right = {
        key: np.full([1 if size is None else size for size in spec.shape], 1, spec.dtype.as_numpy_dtype)
        for key, spec in specs.items()
    }
    right = {
        key: np.full(value.shape, b"a", object) if specs[key].dtype == tf.string else value
        for key, value in right.items()
    }
    if name == "sample":
        right["logits"] = np.zeros((1, V), "float32")
    if "stop_id" in right:
        right["stop_id"] = np.array([-1], "int32")
    assert server.call(name, right)
    for key, value in right.items():
        for wrong in (np.asarray(value[0], value.dtype), value[..., None]):
            shape = re.escape(", ".join(map(str, wrong.shape)))
            with pytest.raises(tf.errors.InvalidArgumentError) as raised:
                server.call(name, right | {key: wrong})
            found = sentence_of(raised.value)
            assert re.match(rf"{key} has another shape\. Expected \(B.*Received: \({shape}\)\.", found)


def test_some_odd_arguments_are_answered_or_refused_with_a_sentence(model, loaded):
    answered, refused = check_python(model, loaded, 330, seed=1)
    assert answered > 15
    assert refused > 100


def test_some_odd_inputs_of_signatures_are_answered_or_refused_with_a_sentence(server):
    answered, refused = check_signatures(server, PLAIN, 300, seed=1)
    assert answered > 30
    assert refused > 100


@pytest.mark.slow
def test_ten_thousand_odd_arguments_are_answered_or_refused_with_a_sentence(model, loaded):
    answered, refused = check_python(model, loaded, 10_000, seed=2)
    assert answered > 300
    assert refused > 1000


@pytest.mark.slow
def test_ten_thousand_odd_inputs_of_signatures_are_answered_or_refused_with_a_sentence(server):
    answered, refused = check_signatures(server, (*PLAIN, "generate_xla"), 10_000, seed=2)
    assert answered > 1000
    assert refused > 1000

"""The model card of an export, with answers to check it by, and its warm-up requests.

VERSION/model_card.json                            sizes, versions, file hashes, recorded answers
VERSION/assets.extra/tf_serving_warmup_requests    what TensorFlow Serving runs before it serves
"""

import hashlib
import json
import platform
import time

import keras
import numpy as np
import tensorflow as tf

from keras_tinyattn._boundary import value_errors
from keras_tinyattn.export._check_alone import LARGEST_ARRAY
from keras_tinyattn.sampling import SETTINGS
from keras_tinyattn.version import __version__

CARD = "model_card.json"
WARMUP = "assets.extra/tf_serving_warmup_requests"
# How deep lists and dictionaries in `about` may stand in each other.
DEEPEST = 50


def check(model, about):
    """Refuse, before the work begins, what no card can hold: weights or `about` that are no JSON."""
    for variable in model.variables:
        value = tf.convert_to_tensor(variable.value)
        if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
            raise ValueError(
                "A variable is not finite. Expected numbers. "
                f"Received: NaN or infinity in {variable.path}. "
                "Export a checkpoint from before the training diverged."
            )
    try:
        if not isinstance(about, dict):
            raise TypeError(f"{type(about).__name__}, no dictionary")
        _check_keys(about, DEEPEST)
        json.dumps(about, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            "about becomes a part of the model card, which is JSON. Expected a dictionary of strings, "
            "finite numbers, booleans, None, lists and dictionaries whose keys are strings. "
            f"Received: {error}. Leave it out, or make it a string."
        ) from None


def _check_keys(value, depth):
    """`json` would write other keys as strings in silence."""
    if not depth:
        raise ValueError(f"more than {DEEPEST} levels, or one in itself")
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"the key {wrong[0]!r}")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for part in value:
        _check_keys(part, depth - 1)


def write(folder, model, tokenizer, signatures, about):
    """Write the card and the warm-up requests into the folder of a version.

    Args:
        folder: where the SavedModel was written.
        model: the `CausalLM`.
        tokenizer: its tokenizer.
        signatures: the concrete functions of the export, by name.
        about: what only the caller knows, a dictionary for JSON: the data, the loss, a licence.
    """
    requests = _example_requests(model, tokenizer)
    requests += _stepwise_requests(signatures, model.sequence_length, *requests[-1])
    answers = [
        {
            "signature": name,
            "inputs": _to_json(inputs),
            "outputs": _to_json(_answer(signatures[name], inputs)),
        }
        for name, inputs in requests
    ]
    _write_warmup(folder, requests)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {
        "about": about,
        "model": {
            "name": model.name,
            "layers": [type(block).__name__ for block in model.blocks],
            "parameters": model.count_params(),
            "vocabulary_size": model.vocabulary_size,
            "sequence_length": model.sequence_length,
            "hidden_dim": model.embedding.hidden_dim,
            "dtype_policy": model.dtype_policy.name,
        },
        "precision": _precision(model),
        "tokenizer": {"class": type(tokenizer).__name__, **tokenizer.get_config()},
        "versions": {
            "keras_tinyattn": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "python": platform.python_version(),
        },
        "exported_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sha256": {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        },
        "answers": answers,
    }
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    (folder / CARD).write_text(text + "\n", encoding="utf-8")


def _precision(model):
    """The types that the layers compute in, and what they promise."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers(include_self=False)}
    half = sorted(dtypes & {"bfloat16", "float16"})
    if half:
        promise = (
            f"{' and '.join(half)}: generate_xla rounds at other places than generate, so its text may "
            "differ from where two tokens are about equally likely"
        )
    else:
        promise = "the same text from generate and generate_xla"
    return {"compute_dtypes": sorted(dtypes), "same_text": promise}


def _answer(signature, inputs):
    with value_errors():  # Finite weights, too, may give logits that are not.
        return signature(**{key: tf.constant(value) for key, value in inputs.items()})


def _example_requests(model, tokenizer):
    """A few requests that every such export can answer: (signature, inputs) pairs."""
    special = (tokenizer.pad_id, tokenizer.end_id)
    plain = [
        token
        for token in range(min(tokenizer.vocabulary_size, 200))
        if token not in special and _is_text(tokenizer, token)
    ][:3]
    if not plain:
        raise ValueError(
            "An export is checked by a text. Expected a tokenizer with a token that is text "
            f"by itself. Received: {type(tokenizer).__name__} without one. Use another vocabulary."
        )
    length = max(1, min(3, model.sequence_length - 1))
    texts = [tokenizer.decode(plain[-1:]), tokenizer.decode((plain * 3)[:length])]
    settings = {setting.name: np.full(2, setting.default, setting.dtype) for setting in SETTINGS}
    settings["max_new_tokens"] = np.array([3, 5], np.int32)
    # One row is greedy, the other sampled.
    sampled = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 1}
    for name, value in sampled.items():
        settings[name][1] = value
    prompts = np.array([text.encode() for text in texts], object)
    ids, lengths = (part.numpy() for part in tokenizer.tokenize(tf.constant(prompts)))
    return [
        ("serving_default", {"prompt": prompts[:1]}),
        ("generate", {"prompt": prompts, **settings, "stop": np.array([b"", b""], object)}),
        (
            "generate_ids",
            {
                "prompt_ids": ids,
                "prompt_length": lengths,
                **settings,
                "stop_id": np.array([-1, -1], np.int32),
            },
        ),
        ("score", {"text": prompts}),
        ("attention", {"text": prompts}),
        ("tokenize", {"text": prompts}),
        ("detokenize", {"token_ids": ids, "length": lengths}),
        ("prefill", {"prompt_ids": ids, "prompt_length": lengths}),
    ]


def _stepwise_requests(signatures, sequence_length, name, inputs):
    """The requests that follow a `prefill`."""
    # A model of one position has none for a further token: the first is read again.
    position = np.minimum(inputs["prompt_length"], sequence_length - 1)
    state = {key: value.numpy() for key, value in _answer(signatures[name], inputs).items()}
    settings = {setting.name: np.full(2, setting.default, setting.dtype) for setting in SETTINGS}
    cache = {key.removeprefix("new_"): value for key, value in state.items() if key != "logits"}
    return [
        ("sample", {"logits": state["logits"], "position": position, **settings}),
        ("step", {"token_id": inputs["prompt_ids"][:, 0], "position": position, **cache}),
    ]


def _is_text(tokenizer, token):
    """Whether one token decodes to text that encodes to it again, and is not white space."""
    text = tokenizer.decode([token])
    return bool(text.strip()) and "\N{REPLACEMENT CHARACTER}" not in text


def _to_json(tensors):
    def plain(value):
        if value.dtype == object:
            return np.vectorize(lambda part: part.decode("latin-1"), otypes=[object])(value).tolist()
        if value.dtype.kind == "f":
            # Seven digits, as float32 has; the double that it widens to would have seventeen.
            return np.vectorize(lambda part: float(f"{part:.7g}"), otypes=[float])(value).tolist()
        return value.tolist()

    tensors = {name: np.asarray(value) for name, value in tensors.items()}
    # Strings as latin-1, one character a byte, since they need not be UTF-8.
    return {
        name: {"dtype": tf.as_dtype(value.dtype).name, "value": plain(value)}
        for name, value in tensors.items()
        if value.size <= LARGEST_ARRAY
    }


def _write_warmup(folder, requests):
    """One record per plain signature; one that names a compiled signature would stop a stock server.

    A record is a `PredictionLog` of TensorFlow Serving, whose few fields are written here by hand: its
    package of message classes would be a dependency for these lines alone.
    """
    path = folder / WARMUP
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for signature, inputs in requests:
            model_spec = _field(1, b"default") + _field(3, signature.encode())
            request = _field(1, model_spec)
            for name, value in inputs.items():
                # A message of one number for each of a cache's would be as large as the cache.
                large = value.size > LARGEST_ARRAY
                tensor = tf.make_tensor_proto(0 if large else value, value.dtype, value.shape)
                tensor = tensor.SerializeToString()
                request += _field(2, _field(1, name.encode()) + _field(2, tensor))
            # PredictionLog.predict_log (6) . PredictLog.request (1) . PredictRequest
            writer.write(_field(6, _field(1, request)))


def _field(number, content):
    """A length-delimited field in the wire format of protocol buffers."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number):
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

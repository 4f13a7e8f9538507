"""The signatures for a client that makes each step of the loop itself, to stream the tokens."""

import tensorflow as tf

from keras_tinyattn import sampling
from keras_tinyattn._boundary import require
from keras_tinyattn.generation.graphs import grow_cache, read_parameters, step_graph, window_graph
from keras_tinyattn.generation.request import check_ids, check_lengths, check_sampling
from keras_tinyattn.layers.cache import KeyValueCache


def prefill(model, prompt_ids, prompt_length):
    """The logits that follow each prompt, and a cache that holds it."""
    prompt_length = check_lengths(prompt_length, tf.shape(prompt_ids)[1], model.sequence_length)
    prompt_ids = check_ids(prompt_ids, prompt_length, model.vocabulary_size)
    width = tf.maximum(tf.reduce_max(prompt_length), 1)
    logits, _, cache = window_graph(model)(read_parameters(model), prompt_ids[:, :width])
    logits = _finite(tf.gather(logits, prompt_length - 1, batch_dims=1))
    cache = grow_cache(model, cache, model.sequence_length)
    return {"logits": logits, **_cache_outputs(model, cache)}


def step(model, token_id, position, **cache):
    """The logits that follow one more token of each row, and the cache with it."""
    with tf.control_dependencies(_require_positions(model, position)):
        token_id = tf.identity(token_id)
    logits, cache = step_graph(model)(
        read_parameters(model),
        check_ids(token_id[:, None], tf.ones_like(token_id), model.vocabulary_size),
        tf.expand_dims(position, 1),
        tuple(
            KeyValueCache(
                tf.cast(cache[f"keys_{index}"], keys.dtype),
                tf.cast(cache[f"values_{index}"], values.dtype),
            )
            for index, (keys, values) in enumerate(model.make_cache(1, 1))
        ),
    )
    return {"logits": _finite(tf.squeeze(logits, 1)), **_cache_outputs(model, cache)}


def sample(model, logits, position, **settings):
    """The next token of each row, for a client that calls `prefill` and `step` itself."""
    width = tf.shape(logits)[1]
    checks = _require_positions(model, position) + require(
        width == model.vocabulary_size,
        "The logits have another width. Expected one for each of the vocabulary's "
        f"{model.vocabulary_size} tokens. Received: ",
        width,
        ". Take them from prefill or step.",
    )
    with tf.control_dependencies(checks):
        settings = check_sampling(sampling.SamplingSettings(**settings))
    token_id = sampling.sample(logits, position=position, **settings._asdict())
    logprob = tf.gather(tf.nn.log_softmax(logits), token_id, batch_dims=1)
    return {"token_id": token_id, "logprob": logprob}


def _require_positions(model, position):
    return require(
        tf.reduce_all((position >= 0) & (position < model.sequence_length)),
        f"A position is outside the model. Expected 0 to {model.sequence_length - 1}. Received: ",
        position,
        ". Stop before the last position.",
    )


def _finite(logits):
    # float32 for `sample`, also under a float64 policy.
    logits = tf.cast(logits, tf.float32)
    with tf.control_dependencies(sampling.require_finite(sampling.is_finite(logits))):
        return tf.identity(logits)


def cache_inputs(model):
    """The specs of a cache as inputs of `step`, by name."""
    return {
        name: tf.TensorSpec((None, *part.shape[1:]), _wire_dtype(part))
        for name, part in _named(model.make_cache(1)).items()
    }


def _named(cache):
    """The arrays of a model's cache by the names of the wire."""
    return {
        f"{name}_{index}": part
        for index, entry in enumerate(cache)
        for name, part in zip(("keys", "values"), entry, strict=True)
    }


def _cache_outputs(model, cache):
    with tf.init_scope():
        empty = _named(model.make_cache(1))
    return {
        f"new_{name}": tf.cast(tf.ensure_shape(part, (None, *empty[name].shape[1:])), _wire_dtype(part))
        for name, part in _named(cache).items()
    }


def _wire_dtype(x):
    """The type in which a cache travels: JSON knows no half precision."""
    return tf.float32 if x.dtype in (tf.bfloat16, tf.float16) else x.dtype

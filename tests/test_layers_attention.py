"""`ScaledSelfAttention`, and what `CausalSelfAttention` shares with it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_tinyattn import CausalSelfAttention, ScaledSelfAttention
from keras_tinyattn.layers import _window

B, T, D, H, K = 2, 5, 6, 3, 4
LAYERS = [ScaledSelfAttention, CausalSelfAttention]
PADDING = np.array([[True] * 3 + [False] * 2, [True] * 5])
# Float32 sums of up to 12 terms of size 1, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _draw(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _layer(cls=ScaledSelfAttention, **arguments):
    layer = cls(**{"head_dim": K, "num_heads": H, **arguments})
    layer.build((B, T, D))
    return layer


def _twin(layer, **changes):
    """The same layer with the same weights but for some arguments."""
    twin = type(layer).from_config({**layer.get_config(), **changes})
    twin.build((B, T, D))
    twin.set_weights(layer.get_weights())
    return twin


def _expected(layer, x, allowed):
    """Attention in NumPy, a query at a time, in float64: output before any projection, and weights."""

    def project(kernel):
        projected = np.asarray(x, "float64") @ np.asarray(kernel, "float64")
        return projected.reshape(*projected.shape[:2], layer.num_heads, layer.head_dim)

    queries, keys, values = map(project, (layer.query_kernel, layer.key_kernel, layer.value_kernel))
    batch, length = x.shape[:2]
    allowed = np.broadcast_to(allowed, (batch, layer.num_heads, length, length))
    weights = np.zeros(allowed.shape)
    output = np.zeros(queries.shape)
    for row, head, query in np.ndindex(*allowed.shape[:3]):
        seen = np.flatnonzero(allowed[row, head, query])
        if len(seen):
            scores = keys[row, seen, head] @ queries[row, query, head] / np.sqrt(layer.head_dim)
            shares = np.exp(scores - scores.max())
            weights[row, head, query, seen] = shares / shares.sum()
            output[row, query, head] = weights[row, head, query, seen] @ values[row, seen, head]
    return output.reshape(batch, length, -1), weights


def _causal(cls):
    return np.tril(np.ones((T, T), bool)) if cls is CausalSelfAttention else np.ones((T, T), bool)


def _gradients(layer, loss):
    """Gradients of `loss(layer)` by variable name."""
    with tf.GradientTape() as tape:
        value = loss(layer)
    gradients = tape.gradient(value, [v.value for v in layer.trainable_variables])
    return dict(zip([v.path for v in layer.trainable_variables], gradients, strict=True))


# Against independent oracles.


@pytest.mark.parametrize("cls", LAYERS)
def test_forward_equals_keras_dot_product_attention(cls):
    layer, x = _layer(cls, dtype="float64"), _draw(B, T, D, dtype="float64")
    heads = [
        ops.reshape(ops.matmul(x, kernel), (B, T, H, K))
        for kernel in (layer.query_kernel, layer.key_kernel, layer.value_kernel)
    ]
    expected = keras.ops.dot_product_attention(*heads, is_causal=cls is CausalSelfAttention)
    np.testing.assert_allclose(layer(x), ops.reshape(expected, (B, T, H * K)), rtol=1e-12)


@pytest.mark.parametrize("cls", LAYERS)
def test_gradients_agree_with_finite_differences(cls):
    layer = _layer(cls, output_dim=7, use_bias=True, bias_initializer="normal", dtype="float64")
    x, upstream = _draw(B, T, D, dtype="float64"), _draw(B, T, 7, seed=1, dtype="float64")

    def loss(layer):
        return ops.sum(layer(x, mask=PADDING) * upstream)

    step = 1e-6
    for variable, gradient in zip(
        layer.trainable_variables, _gradients(layer, loss).values(), strict=True
    ):
        direction = _draw(*variable.shape, seed=2, dtype="float64")
        at = variable.numpy()
        variable.assign(at + step * direction)
        higher = loss(layer)
        variable.assign(at - step * direction)
        slope = (higher - loss(layer)) / (2 * step)
        variable.assign(at)
        # The quotient is good to about step^2 and to 1e-16 / step of the loss, whose size is 10.
        np.testing.assert_allclose(ops.sum(gradient * direction), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("cls", LAYERS)
def test_every_path_gives_the_numbers_of_the_oracle(cls, on_every_path):
    layer, x = _layer(cls), _draw(B, T, D)
    pairs = PADDING[:, None, :, None] & PADDING[:, None, None, :]
    expected = _expected(layer, x, _causal(cls) & pairs)
    run = lambda x: layer(x, mask=PADDING, return_attention_scores=True)  # noqa: E731
    for path, results in on_every_path(run, tf.constant(x)):
        for ours, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, err_msg=path, **CLOSE)


def test_output_projection_and_biases_are_added_to_the_heads_side_by_side():
    layer = _layer(output_dim=7, use_bias=True, bias_initializer="normal")
    x = _draw(B, T, D)
    kernels = (layer.query_kernel, layer.key_kernel, layer.value_kernel)
    # A bias is the kernel of one more input, which is always 1.
    x_and_one = np.concatenate([x, np.ones((B, T, 1), "float32")], -1)
    bare = ScaledSelfAttention(K, H)
    bare.build((B, T, D + 1))
    biases = (layer.query_bias, layer.key_bias, layer.value_bias)
    bare.set_weights(
        [np.concatenate([k.numpy(), b.numpy()[None]]) for k, b in zip(kernels, biases, strict=True)]
    )
    attended = _expected(bare, x_and_one, True)[0]
    expected = attended @ layer.output_kernel.numpy() + layer.output_bias.numpy()
    np.testing.assert_allclose(layer(x), expected, **CLOSE)


# Masks: the right result, or a ValueError.

ATTENTION_MASK_SHAPES = [
    (T, T),
    (1, T),
    (T, 1),
    (1, 1),
    (B, T, T),
    (1, T, T),
    (B, 1, T),
    (B, T, 1),
    (B, H, T, T),
    (B, 1, T, T),
    (1, H, 1, T),
    (1, 1, T, 1),
]


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("padded", [False, True])
def test_every_shape_of_attention_mask_means_what_it_says(cls, padded):
    layer, x = _layer(cls), _draw(B, T, D)
    for index, shape in enumerate(ATTENTION_MASK_SHAPES):
        mask = np.random.default_rng(index).random(shape) < 0.6
        allowed = mask[:, None] if mask.ndim == 3 else mask
        allowed = allowed & _causal(cls)
        if padded:
            allowed = allowed & PADDING[:, None, :, None] & PADDING[:, None, None, :]
        given = mask.astype(("bool", "int32", "uint8", "int64")[index % 4])
        output, weights = layer(
            x, mask=PADDING if padded else None, attention_mask=given, return_attention_scores=True
        )
        expected_output, expected_weights = _expected(layer, x, allowed)
        np.testing.assert_allclose(weights, expected_weights, err_msg=str(shape), **CLOSE)
        np.testing.assert_allclose(output, expected_output, err_msg=str(shape), **CLOSE)
        assert not np.any(np.asarray(weights)[expected_weights == 0.0]), shape


def test_a_square_attention_mask_is_queries_by_keys_also_where_the_batch_is_as_large():
    layer = ScaledSelfAttention(K, H)
    x = _draw(T, T, D)
    layer.build(x.shape)
    mask = np.random.default_rng(0).random((T, T)) < 0.6
    np.testing.assert_allclose(layer(x, attention_mask=mask), _expected(layer, x, mask)[0], **CLOSE)
    with pytest.raises(ValueError, match="mask does not fit the inputs"):
        layer(x, mask=mask[:, :, None])


@pytest.mark.parametrize("shape", [(T,), (B, T), (T + 1, T), (H, T, T), (B, T, T - 1), (1, B, H, T, T)])
@pytest.mark.parametrize("cls", LAYERS)
def test_an_attention_mask_of_another_shape_is_refused(cls, shape):
    with pytest.raises(ValueError, match=r"attention_mask does not fit.*Received: shape"):
        _layer(cls)(_draw(B, T, D), attention_mask=np.ones(shape, bool))


@pytest.mark.parametrize("shape", [(T,), (1, T), (B, 1), (T, T), (B, T + 1), (B, T, 1)])
@pytest.mark.parametrize("blockwise", [False, True])
def test_a_padding_mask_of_another_shape_is_refused(blockwise, shape):
    with pytest.raises(
        ValueError, match=r"mask does not fit.*Expected shape \(B, S\).*Received: shape"
    ):
        _layer(blockwise=blockwise)(_draw(B, T, D), mask=np.ones(shape, bool))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_float_mask_is_refused(dtype):
    layer, x = _layer(), _draw(B, T, D)
    with pytest.raises(ValueError, match="Expected booleans, or integers 0 and 1"):
        layer(x, attention_mask=np.zeros((T, T), dtype))
    with pytest.raises(ValueError, match="mask says what may be seen"):
        layer(x, mask=np.ones((B, T), dtype))
    with pytest.raises(ValueError, match="mask says what may be seen"):
        _twin(layer, blockwise=True)(x, mask=np.ones((B, T), dtype))


def test_an_additive_integer_mask_gives_nan_instead_of_being_read_inverted(on_every_path):
    layer, x = _layer(), _draw(B, T, D)
    additive = np.where(_causal(CausalSelfAttention), 0, -(10**9)).astype("int32")
    padding = np.where(PADDING, 0, -(10**9)).astype("int32")
    blockwise = _twin(layer, blockwise=True)

    def run(x, attention_mask, mask):
        return layer(x, attention_mask=attention_mask), layer(x, mask=mask), blockwise(x, mask=mask)

    for path, results in on_every_path(run, *map(tf.constant, (x, additive, padding))):
        assert np.all(np.isnan(results[0])), path
        for result in results[1:]:
            # Row 1 has no padding by its own reading, and zeros come out for padding.
            assert np.all(np.isnan(result) | (np.asarray(result) == 0)), path
            assert np.any(np.isnan(result)), path


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float32", "float64"])
@pytest.mark.parametrize("cls", LAYERS)
def test_a_fully_masked_row_is_zero_with_and_without_scores(cls, dtype):
    layer, x = _layer(cls, dtype=dtype), _draw(B, T, D)
    mask = np.ones((B, T, T), bool)
    mask[0, 2] = False
    output, weights = layer(x, attention_mask=mask, return_attention_scores=True)
    for result in (output, layer(x, attention_mask=mask)):
        assert not np.any(ops.cast(result, "float32")[0, 2])
        assert np.all(np.any(ops.cast(result, "float32")[:, 3:], axis=-1))
    assert not np.any(ops.cast(weights, "float32")[0, :, 2])


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("cls", LAYERS)
def test_a_fully_masked_row_harms_no_gradient(cls, dropped, on_every_path):
    layer, x = _layer(cls), _draw(B, T, D)
    mask = np.ones((B, T, T), bool)
    mask[0, 2] = False
    counted = np.ones((B, T, 1), "float32")
    counted[0, 2] = 0.0 if dropped else 1.0

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = ops.sum(ops.square(layer(x, attention_mask=mask)) * counted)
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    expected = gradients(tf.constant(x))
    for path, results in on_every_path(gradients, tf.constant(x)):
        for result, eager in zip(results, expected, strict=True):
            assert np.all(np.isfinite(result)), path
            assert np.any(result), path
            np.testing.assert_allclose(result, eager, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize(
    "cls", [CausalSelfAttention, pytest.param(ScaledSelfAttention, marks=pytest.mark.slow)]
)
def test_a_nan_under_padding_reaches_no_output_and_no_gradient(cls, blockwise, on_every_path):
    layer = _layer(cls, output_dim=7, use_bias=True, blockwise=blockwise)
    clean = np.where(PADDING[..., None], _draw(B, T, D), 0.0).astype("float32")
    poisoned = np.where(PADDING[..., None], clean, np.nan).astype("float32")

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, mask=PADDING)
            loss = ops.sum(ops.square(output))
        return output, *tape.gradient(loss, [x, *[v.value for v in layer.trainable_variables]])

    expected = run(tf.constant(clean))
    for path, results in on_every_path(run, tf.constant(poisoned)):
        for result, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, theirs, rtol=1e-4, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cls", LAYERS)
def test_a_nan_at_a_key_masked_for_every_query_reaches_no_other_position(cls, padded, on_every_path):
    layer, x = _layer(cls, use_bias=True), _draw(B, T, D)
    poisoned = x.copy()
    poisoned[:, 1] = np.nan
    mask = np.ones((T, T), bool)
    mask[:, 1] = False
    if padded:
        # Only a padded query may look there, which nobody sees.
        mask[4, 1] = True
    padding = np.array([[True] * 4 + [False]] * B) if padded else None
    others = [0, 2, 3] if padded else [0, 2, 3, 4]

    def run(x):
        with tf.GradientTape() as tape:
            output = tf.gather(layer(x, mask=padding, attention_mask=mask), others, axis=1)
            loss = ops.sum(ops.square(output))
        return output, *tape.gradient(loss, [v.value for v in layer.trainable_variables])

    expected = run(tf.constant(x))
    for path, results in on_every_path(run, tf.constant(poisoned)):
        for result, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, theirs, rtol=1e-4, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("cls", LAYERS)
def test_a_batch_row_of_padding_only_gives_zeros_and_finite_gradients(cls, blockwise):
    layer, x = _layer(cls, blockwise=blockwise), _draw(B, T, D)
    mask = np.array([[False] * T, [True] * T])
    output = layer(x, mask=mask)
    assert not np.any(output[0])
    np.testing.assert_allclose(output[1], layer(x)[1], **CLOSE)
    for gradient in _gradients(layer, lambda layer: ops.sum(ops.square(layer(x, mask=mask)))).values():
        assert np.all(np.isfinite(gradient))


def test_a_nan_that_somebody_may_look_at_is_not_hidden():
    x = _draw(B, T, D)
    x[0, 3] = np.nan
    output = _layer()(x, attention_mask=np.ones((T, T), bool))
    np.testing.assert_array_equal(np.isnan(output)[..., 0], [[True] * T, [False] * T])


# Keras' implicit mask.


@pytest.mark.parametrize("with_attention_mask", [False, True])
@pytest.mark.parametrize("cls", LAYERS)
def test_the_implicit_mask_is_used_and_passed_on(cls, with_attention_mask):
    embedding = keras.layers.Embedding(11, D, mask_zero=True)
    x = embedding(np.array([[3, 1, 4, 0, 0], [2, 7, 1, 8, 2]]))
    layer = _layer(cls)
    allowed = np.random.default_rng(0).random((T, T)) < 0.8
    arguments = {"attention_mask": allowed} if with_attention_mask else {}
    output = layer(x, **arguments)
    explicit = layer(ops.copy(x), mask=PADDING, **arguments)
    np.testing.assert_array_equal(output, explicit)
    np.testing.assert_array_equal(output._keras_mask, PADDING)
    np.testing.assert_array_equal(explicit._keras_mask, PADDING)
    assert not np.any(output[0, 3:])
    pooled = keras.layers.GlobalAveragePooling1D()(output)
    np.testing.assert_allclose(pooled[0], np.mean(output[0, :3], axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", LAYERS)
def test_an_explicit_mask_wins_over_the_implicit_one(cls):
    x = keras.layers.Embedding(11, D, mask_zero=True)(np.array([[3, 1, 4, 0, 0], [2, 7, 1, 8, 2]]))
    layer = _layer(cls)
    everything = np.ones((B, T), bool)
    output = layer(x, mask=everything)
    np.testing.assert_array_equal(output, layer(ops.copy(x)))
    np.testing.assert_array_equal(output._keras_mask, everything)


def test_a_mask_may_be_a_list_and_is_passed_on_whole():
    layer, x = _layer(), _draw(B, T, D)
    output = layer(x, mask=PADDING.tolist())
    np.testing.assert_array_equal(output, layer(x, mask=PADDING))
    np.testing.assert_array_equal(output._keras_mask, PADDING)


def test_masking_before_and_recurrence_after_work_in_a_functional_model():
    inputs = keras.Input((None, D))
    x = keras.layers.Masking()(inputs)
    x, weights = ScaledSelfAttention(K)(x, return_attention_scores=True)
    x = CausalSelfAttention(K)(x)
    x = keras.layers.LSTM(3)(x)
    model = keras.Model(inputs, [x, weights])
    data = np.where(PADDING[..., None], _draw(B, T, D), 0.0)
    state, weights = model(data)
    alone, _ = model(data[:1, :3])
    np.testing.assert_allclose(state[:1], alone, **CLOSE)
    assert not np.any(weights[0, 0, :, 3:])


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_the_implicit_mask_reaches_a_layer_with_several_inputs_in_a_functional_model(dtype):
    ids, allowed = keras.Input((T,), dtype="int32"), keras.Input((T, T), dtype="bool")
    x = keras.layers.Embedding(11, D, mask_zero=True, dtype=dtype)(ids)
    layer = CausalSelfAttention(K, dtype=dtype)
    output, weights = layer(x, attention_mask=allowed, return_attention_scores=True)
    model = keras.Model([ids, allowed], [keras.layers.GlobalAveragePooling1D()(output), weights])
    data = [np.array([[3, 1, 4, 0, 0], [2, 7, 1, 8, 2]]), np.ones((B, T, T), bool)]
    for pooled, weights in (model(data), model.predict(data, verbose=0)):
        weights = ops.cast(weights, "float32")
        assert not np.any(weights[0, 0, 3:])
        assert not np.any(weights[0, 0, :, 3:])
        alone = model([np.array([[3, 1, 4, 0, 0]]), data[1][:1]])[0]
        # A product of other sizes may add up in another order.
        np.testing.assert_allclose(
            ops.cast(pooled, "float32")[0],
            ops.cast(alone, "float32")[0],
            rtol=0,
            atol=1e-7 if dtype == "float32" else 2**-9,
        )


# Precision.


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("cls", LAYERS)
def test_half_precision_survives_large_activations(cls, dtype):
    exact, x = _layer(cls), 30 * _draw(B, T, D)
    layer = _twin(exact, dtype=dtype)
    mask = np.random.default_rng(3).random((T, T)) < 0.8
    mask |= np.eye(T, dtype=bool)
    output, weights = layer(x, attention_mask=mask, return_attention_scores=True)
    assert output.dtype == layer.compute_dtype
    output, weights = ops.cast(output, "float32"), np.asarray(ops.cast(weights, "float32"))
    assert np.all(np.isfinite(output))
    assert not np.any(weights[..., ~(mask & _causal(cls))])
    # The oracle takes the kernels and inputs as half precision holds them.
    rounded = _twin(exact)
    rounded.set_weights(
        [np.asarray(ops.cast(ops.cast(w, layer.compute_dtype), "float32")) for w in exact.get_weights()]
    )
    x = np.asarray(ops.cast(ops.cast(x, layer.compute_dtype), "float32"))
    expected, _ = _expected(rounded, x, mask & _causal(cls))
    # Queries and keys are rounded once more, which moves a score of size s by s / 2^11 or s / 2^8;
    # at these scores that is a share of the weight, so the bound is on the mean.
    error = np.mean(np.abs(output - expected)) / np.mean(np.abs(expected))
    assert error < {"float16": 0.01, "bfloat16": 0.1}[layer.compute_dtype]


# Dropout.


def test_dropout_acts_on_the_weights_in_training_only():
    layer = _layer(dropout=0.4, seed=3)
    # All keys alike: each weight is 1 / T. All values 1: what is left of the weights' sum comes out.
    layer.value_kernel.assign(np.full((D, H * K), 1 / D))
    x = np.ones((64, T, D), "float32")
    output, weights = layer(x, training=True, return_attention_scores=True)
    np.testing.assert_allclose(weights, np.full((64, H, T, T), 1 / T), rtol=1e-6)
    kept = np.asarray(output) * T * 0.6
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    heads = kept.reshape(64, T, H, K)
    np.testing.assert_allclose(heads, np.repeat(heads[..., :1], K, axis=-1), atol=1e-4)
    # 64 * T * T * H = 4800 draws: five standard deviations of their mean are 0.035.
    assert abs(np.mean(heads) / T - 0.6) < 0.035
    np.testing.assert_allclose(layer(x, training=False), np.ones((64, T, H * K)), rtol=1e-6)
    np.testing.assert_allclose(layer(x), np.ones((64, T, H * K)), rtol=1e-6)


def test_dropout_repeats_with_its_seed_and_not_from_call_to_call():
    first, x = _layer(dropout=0.5, seed=3), _draw(B, T, D)
    second, other = _twin(first), _twin(first, seed=4)
    outputs = [first(x, training=True), first(x, training=True)]
    np.testing.assert_array_equal(second(x, training=True), outputs[0])
    np.testing.assert_array_equal(second(x, training=True), outputs[1])
    assert np.any(outputs[0] != outputs[1])
    assert np.any(other(x, training=True) != outputs[0])


# Trace.


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_trace_is_what_call_computes(cls, dtype):
    layer, x = _layer(cls, output_dim=7, use_bias=True, dropout=0.3, dtype=dtype), _draw(B, T, D)
    mask = np.random.default_rng(0).random((T, T)) < 0.7
    output, weights = layer(x, mask=PADDING, attention_mask=mask, return_attention_scores=True)
    trace = layer.trace(x, mask=PADDING, attention_mask=mask)
    np.testing.assert_array_equal(trace.output, output)
    np.testing.assert_array_equal(trace.weights, weights)
    assert trace.output.dtype == output.dtype


def test_trace_shows_every_stage():
    layer, x = _layer(CausalSelfAttention), _draw(B, T, D)
    trace = layer.trace(x)
    for name in ("query", "key", "value"):
        kernel = getattr(layer, f"{name}_kernel").numpy()
        heads = np.transpose((x @ kernel).reshape(B, T, H, K), (0, 2, 1, 3))
        stage = {"query": trace.queries, "key": trace.keys, "value": trace.values}[name]
        np.testing.assert_allclose(stage, heads, **CLOSE)
    raw = np.einsum("bhtk,bhsk->bhts", trace.queries, trace.keys)
    np.testing.assert_allclose(trace.raw_scores, raw, **CLOSE)
    np.testing.assert_allclose(trace.scaled_scores, raw / np.sqrt(K), **CLOSE)
    output, weights = _expected(layer, x, _causal(CausalSelfAttention))
    np.testing.assert_allclose(trace.weights, weights, **CLOSE)
    np.testing.assert_allclose(trace.output, output, **CLOSE)


def test_trace_sees_the_implicit_mask_and_leaves_dropout_out():
    x = keras.layers.Embedding(11, D, mask_zero=True)(np.array([[3, 1, 4, 0, 0], [2, 7, 1, 8, 2]]))
    layer = _layer(dropout=0.5)
    np.testing.assert_array_equal(layer.trace(x).weights, layer(x, return_attention_scores=True)[1])

    class Tracer(keras.layers.Layer):
        def call(self, inputs, training=None):
            return layer.trace(inputs).output

    np.testing.assert_array_equal(Tracer()(ops.copy(x), training=True), layer(ops.copy(x)))


def test_trace_of_an_unbuilt_layer_is_refused():
    with pytest.raises(ValueError, match="has no weights to trace"):
        ScaledSelfAttention(K).trace(_draw(B, T, D))


# Blockwise, or dense.


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cls", LAYERS)
def test_blockwise_layer_equals_the_dense_one(cls, masked, dtype, monkeypatch):
    blocks = _window.blockwise_attention
    monkeypatch.setattr(
        _window, "blockwise_attention", lambda *args, **kwargs: blocks(*args, **kwargs, block_size=2)
    )
    dense = _layer(
        cls, output_dim=7, use_bias=True, bias_initializer="normal", dtype=dtype, blockwise=False
    )
    blockwise = _twin(dense, blockwise=True)
    x, mask = _draw(B, T, D), PADDING if masked else None
    # Half precision rounds outputs and gradients of size 1 to 11 bits.
    close = CLOSE if dtype == "float32" else {"rtol": 2**-7, "atol": 2**-7}

    def loss(layer):
        return ops.mean(ops.square(ops.cast(layer(x, mask=mask), "float32")))

    np.testing.assert_allclose(blockwise(x, mask=mask), dense(x, mask=mask), **close)
    expected = _gradients(dense, loss).values()
    for ours, theirs in zip(_gradients(blockwise, loss).values(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **close)


def test_blockwise_takes_lengths_that_are_known_only_at_run_time():
    inputs = keras.Input((None, D))
    layer = CausalSelfAttention(K, H, blockwise=True)
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, None, H * K)
    x = _draw(3, 300, D)
    dense = _twin(layer, blockwise=False)
    for length in (1, 256, 300):
        expected = dense(x[:, :length])
        np.testing.assert_allclose(model.predict(x[:, :length], verbose=0), expected, **CLOSE)


@pytest.mark.parametrize(
    ("arguments", "call_arguments", "length", "expected"),
    [
        ({}, {}, 1024, True),
        ({}, {}, 1023, False),
        ({"blockwise": False}, {}, 1024, False),
        ({"blockwise": True}, {}, 3, True),
        ({"dropout": 0.1}, {"training": True}, 1024, False),
        ({"dropout": 0.1}, {"training": False}, 1024, True),
        ({}, {"return_attention_scores": True}, 1024, False),
        ({}, {"attention_mask": np.ones((1, 1), bool)}, 1024, False),
        ({}, {"mask": np.ones((1, 1024), bool)}, 1024, True),
    ],
)
def test_long_windows_go_by_blocks_unless_something_needs_the_weights(
    arguments, call_arguments, length, expected, monkeypatch
):
    calls = []

    def spy(queries, keys, values, *args, **kwargs):
        calls.append(queries.shape)
        return values

    monkeypatch.setattr(_window, "blockwise_attention", spy)
    CausalSelfAttention(head_dim=1, **arguments)(np.ones((1, length, 2), "float32"), **call_arguments)
    assert bool(calls) == expected


@pytest.mark.parametrize(
    ("call_arguments", "name"),
    [
        ({"return_attention_scores": True}, "return_attention_scores"),
        ({"attention_mask": np.ones((T, T), bool)}, "attention_mask"),
    ],
)
def test_blockwise_refuses_what_needs_the_weights(call_arguments, name):
    with pytest.raises(ValueError, match=f"Blockwise attention.*Received: {name}"):
        _layer(blockwise=True)(_draw(B, T, D), **call_arguments)


def test_blockwise_refuses_dropout_and_a_choice_that_is_none():
    with pytest.raises(ValueError, match=r"cannot drop any out.*Received: dropout=0.1"):
        ScaledSelfAttention(K, blockwise=True, dropout=0.1)
    with pytest.raises(ValueError, match="Received: blockwise='auto'"):
        ScaledSelfAttention(K, blockwise="auto")


# Weights.


def test_kernels_of_a_seeded_initializer_differ():
    layer = _layer(output_dim=H * K, kernel_initializer=keras.initializers.GlorotUniform(seed=7))
    kernels = [layer.query_kernel, layer.key_kernel, layer.value_kernel]
    for first, second in zip(kernels, kernels[1:] + kernels[:1], strict=True):
        assert np.all(first.numpy() != second.numpy())
    again = _layer(output_dim=H * K, kernel_initializer=keras.initializers.GlorotUniform(seed=7))
    for ours, theirs in zip(layer.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.RandomNormal(),
        keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(5)),
        keras.initializers.VarianceScaling(),
    ],
)
def test_kernels_of_an_unseeded_initializer_or_a_seed_generator_differ(initializer):
    layer = _layer(kernel_initializer=initializer)
    assert np.all(layer.query_kernel.numpy() != layer.key_kernel.numpy())
    assert np.all(layer.value_kernel.numpy() != layer.key_kernel.numpy())


def test_projections_are_assignable_one_by_one():
    layer, x = _layer(), _draw(B, T, D)
    layer.query_kernel.assign(np.zeros((D, H * K)))
    _, weights = layer(x, return_attention_scores=True)
    np.testing.assert_allclose(weights, np.full((B, H, T, T), 1 / T), rtol=1e-6)


@pytest.mark.parametrize("dropout", [-0.1, 1, 1.0, 2, float("nan")])
def test_dropout_outside_its_range_is_refused(dropout):
    with pytest.raises(
        ValueError, match=rf"Expected a number in \[0, 1\). Received: dropout={dropout}"
    ):
        ScaledSelfAttention(K, dropout=dropout)


@pytest.mark.parametrize("name", ["head_dim", "num_heads", "output_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_a_size_below_one_or_not_whole_is_refused(name, value):
    with pytest.raises(ValueError, match=f"Received: {name}={value!r}"):
        ScaledSelfAttention(**{"head_dim": K, name: value})


@pytest.mark.parametrize("shape", [(T, D), (B, T, D, 1), (B, T, None)])
def test_inputs_of_another_rank_or_unknown_width_are_refused(shape):
    with pytest.raises(ValueError, match=r"Expected inputs of shape \(B, T, D\)"):
        ScaledSelfAttention(K).build(shape)

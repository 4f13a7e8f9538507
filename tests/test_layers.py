"""The contract that every layer keeps: configuration, paths, shapes, gradients, precision, saving."""

import inspect
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_tinyattn
from keras_tinyattn import (
    CausalSelfAttention,
    DecoderBlock,
    ScaledSelfAttention,
    TokenAndPositionEmbedding,
    VocabProjection,
)

B, T, D, H, K, V = 2, 5, 6, 3, 4, 11

# Every argument of every layer, none at its default.
ATTENTION = {
    "head_dim": K,
    "num_heads": H,
    "output_dim": 7,
    "use_bias": True,
    "dropout": 0.25,
    "kernel_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=2),
    "bias_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=3),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "bias_regularizer": keras.regularizers.L1(0.02),
    "kernel_constraint": keras.constraints.MaxNorm(0.5),
    "bias_constraint": keras.constraints.MaxNorm(0.25),
    "blockwise": False,
    "seed": 13,
}
LAYERS = {
    TokenAndPositionEmbedding: {
        "vocabulary_size": V,
        "sequence_length": 7,
        "hidden_dim": D,
        "embeddings_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=2),
        "embeddings_regularizer": keras.regularizers.L2(0.01),
        "embeddings_constraint": keras.constraints.MaxNorm(0.5),
    },
    ScaledSelfAttention: ATTENTION,
    CausalSelfAttention: ATTENTION,
    DecoderBlock: {
        "hidden_dim": D,
        "num_heads": H,
        "intermediate_dim": 8,
        "dropout": 0.25,
        "kernel_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=2),
        "activation": keras.activations.silu,
        "blockwise": False,
        "seed": 13,
    },
    VocabProjection: {
        "vocabulary_size": V,
        "use_bias": True,
        "tied": False,
        "kernel_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=2),
        "bias_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=3),
        "kernel_regularizer": keras.regularizers.L2(0.01),
        "bias_regularizer": keras.regularizers.L1(0.02),
        "kernel_constraint": keras.constraints.MaxNorm(0.5),
        "bias_constraint": keras.constraints.MaxNorm(0.25),
    },
}
WIDTHS = {
    TokenAndPositionEmbedding: D,
    ScaledSelfAttention: 7,
    CausalSelfAttention: 7,
    DecoderBlock: D,
    VocabProjection: V,
}
every_layer = pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)


def _make(cls, **changes):
    return cls(**{**LAYERS[cls], **changes})


def _inputs(cls, *shape, seed=0):
    random = np.random.default_rng(seed)
    shape = shape or (B, T)
    if cls is TokenAndPositionEmbedding:
        return tf.constant(random.integers(0, V, shape), tf.int32)
    return tf.constant(random.normal(size=(*shape, D)), tf.float32)


def _symbolic(cls, batch_size=None, length=None):
    if cls is TokenAndPositionEmbedding:
        return keras.Input((length,), batch_size, dtype="int32")
    return keras.Input((length, D), batch_size)


def _whole_model():
    """Every layer in one model, with dropout and regularizers."""
    inputs = _symbolic(TokenAndPositionEmbedding)
    x = _make(TokenAndPositionEmbedding)(inputs)
    x = _make(ScaledSelfAttention)(x)
    x = _make(CausalSelfAttention, output_dim=D)(x)
    x = _make(DecoderBlock)(x)
    return keras.Model(inputs, _make(VocabProjection)(x))


def test_the_contract_covers_every_public_layer():
    public = {getattr(keras_tinyattn, name) for name in keras_tinyattn.layers.__all__}
    assert {cls for cls in public if issubclass(cls, keras.layers.Layer)} == set(LAYERS)


# Configuration.


@every_layer
def test_config_holds_exactly_the_constructors_arguments(cls):
    arguments = set(inspect.signature(cls).parameters) - {"kwargs"}
    assert arguments == set(LAYERS[cls])
    assert set(_make(cls).get_config()) == arguments | {"name", "trainable", "dtype"}


@every_layer
def test_every_argument_survives_the_config_as_json(cls):
    layer = _make(cls, name="my_layer", dtype="mixed_bfloat16", trainable=False)
    config = json.loads(json.dumps(layer.get_config()))
    again = cls.from_config(config)
    assert again.get_config() == layer.get_config()
    for name, given in LAYERS[cls].items():
        held = getattr(again, name)
        if not hasattr(given, "get_config"):
            assert held == given, name
        else:
            assert type(held) is type(given), name
            assert held.get_config() == given.get_config(), name
    assert (again.name, again.dtype_policy.name, again.trainable) == (
        "my_layer",
        "mixed_bfloat16",
        False,
    )


@every_layer
def test_no_argument_of_the_contract_is_left_at_its_default(cls):
    for name, parameter in inspect.signature(cls).parameters.items():
        if name not in ("kwargs", "tied"):  # a tied projection has no kernel: test_layers_projection.py
            assert LAYERS[cls][name] != parameter.default, name


@every_layer
def test_a_layer_from_its_config_is_the_same_in_use_and_in_training(cls):
    layer, x = _make(cls), _inputs(cls)
    # The initializers are seeded, and so is the dropout.
    again = cls.from_config(layer.get_config())
    np.testing.assert_array_equal(again(x), layer(x))
    if "dropout" in LAYERS[cls]:
        trained = layer(x, training=True)
        np.testing.assert_array_equal(again(x, training=True), trained)
        assert np.any(trained != layer(x))


# Paths and shapes.


@every_layer
def test_eager_graph_and_xla_agree(cls, on_every_path):
    layer, x = _make(cls), _inputs(cls)
    expected = layer(x)
    assert expected.shape == (B, T, WIDTHS[cls])
    for path, result in on_every_path(layer, x):
        # Float32 sums of up to 12 terms of size 1, in another order.
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5, err_msg=path)


@every_layer
@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_symbolic_and_real_shapes_agree_at_every_length(cls, length):
    layer = _make(cls)
    assert layer(_symbolic(cls, B, length)).shape == (B, length, WIDTHS[cls])
    output = layer(_inputs(cls, B, length))
    assert output.shape == (B, length, WIDTHS[cls])
    assert np.all(np.isfinite(output))


@pytest.mark.parametrize("length", [0, 1, 3, 7])
@pytest.mark.parametrize("cls", [ScaledSelfAttention, CausalSelfAttention, DecoderBlock])
def test_a_symbolic_call_returns_the_weights_too_with_true_shapes(cls, length):
    layer = _make(cls)
    shapes = [(B, length, WIDTHS[cls]), (B, H, length, length)]
    for inputs in (_symbolic(cls, B, length), _inputs(cls, B, length)):
        results = layer(inputs, return_attention_scores=True)
        assert [tuple(result.shape) for result in results] == shapes


@every_layer
def test_a_functional_model_takes_any_batch_and_length(cls):
    inputs = _symbolic(cls)
    outputs = _make(cls)(inputs)
    assert outputs.shape == (None, None, WIDTHS[cls])
    model = keras.Model(inputs, outputs)
    layer = _make(cls)
    for batch, length in ((1, 1), (B, T), (3, 7)):
        x = _inputs(cls, batch, length)
        np.testing.assert_allclose(model(x), layer(x), rtol=1e-5, atol=1e-5)
        # `predict` traces with sizes unknown.
        np.testing.assert_allclose(model.predict(x, verbose=0), layer(x), rtol=1e-5, atol=1e-5)


@every_layer
def test_sizes_unknown_in_a_graph_are_kept_as_far_as_they_are_known(cls):
    x = _inputs(cls)
    layer = _make(cls)
    layer(x)
    for shape in ((None, T), (B, None), (None, None)):
        spec = tf.TensorSpec((*shape, *x.shape[2:]), x.dtype)
        traced = tf.function(layer, autograph=False).get_concrete_function(spec)
        known = traced.structured_outputs.shape
        assert known.is_compatible_with((B, T, WIDTHS[cls]))
        assert known[-1] == WIDTHS[cls]
        np.testing.assert_allclose(traced(x), layer(x), rtol=1e-5, atol=1e-5)


@every_layer
def test_sequential_and_a_fixed_batch_size(cls):
    x = _inputs(cls)
    model = keras.Sequential([_symbolic(cls, B, T), _make(cls)])
    assert model.output_shape == (B, T, WIDTHS[cls])
    np.testing.assert_allclose(model(x), _make(cls)(x), rtol=1e-6)


@every_layer
def test_time_distributed(cls):
    x = _inputs(cls, B, 3, T)
    layer = _make(cls)
    model = keras.Sequential(
        [keras.Input(x.shape[1:], dtype=x.dtype), keras.layers.TimeDistributed(layer)]
    )
    output = model(x)
    assert output.shape == (B, 3, T, WIDTHS[cls])
    for index in range(3):
        np.testing.assert_allclose(output[:, index], layer(x[:, index]), rtol=1e-5, atol=1e-6)


# Training.


@every_layer
def test_one_training_step_gives_every_variable_a_gradient(cls, on_every_path):
    layer, x = _make(cls), _inputs(cls)
    layer(x)
    assert layer.trainable_variables

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = ops.mean(
                ops.square(layer(x, training=True) if "dropout" in LAYERS[cls] else layer(x))
            )
        values = [v.value for v in layer.trainable_variables]
        return [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, values)]

    for path, results in on_every_path(gradients, x):
        for variable, gradient in zip(layer.trainable_variables, results, strict=True):
            assert np.all(np.isfinite(gradient)), (path, variable.path)
            # A key's bias moves all scores of a query alike, which the softmax does not see.
            if not variable.path.endswith("key_bias"):
                assert np.any(gradient), (path, variable.path)


def test_a_model_of_every_layer_fits_when_compiled():
    model, x = _whole_model(), _inputs(TokenAndPositionEmbedding, 8, T)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, jit_compile=True)
    losses = model.fit(x, x, epochs=20, batch_size=4, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]


@every_layer
def test_regularizers_show_in_the_losses_and_constraints_hold_after_a_step(cls):
    layer, x = _make(cls), _inputs(cls)
    layer(x)
    if cls is DecoderBlock:
        assert layer.losses == []
        return
    expected = []
    for variable in layer.trainable_variables:
        if variable.path.endswith("bias"):
            expected.append(0.02 * np.sum(np.abs(variable.numpy())))
        else:
            expected.append(0.01 * np.sum(np.square(variable.numpy())))
    np.testing.assert_allclose(layer.losses, expected, rtol=1e-5)
    optimizer = keras.optimizers.SGD(0.0)
    assert any(np.max(np.linalg.norm(v.numpy(), axis=0)) > 0.5 for v in layer.trainable_variables)
    optimizer.apply([ops.zeros_like(v) for v in layer.trainable_variables], layer.trainable_variables)
    for variable in layer.trainable_variables:
        limit = 0.25 if variable.path.endswith("bias") else 0.5
        assert np.max(np.linalg.norm(variable.numpy(), axis=0)) <= limit + 1e-6, variable.path


# Precision.


@every_layer
@pytest.mark.parametrize(
    ("policy", "computed", "stored", "tolerance"),
    [
        # The inputs and each stage are rounded to 11 (float16) or 8 (bfloat16) bits.
        ("mixed_float16", "float16", "float32", 2**-7),
        ("mixed_bfloat16", "bfloat16", "float32", 2**-4),
        ("float64", "float64", "float64", 1e-5),
    ],
)
def test_precision_policies(cls, policy, computed, stored, tolerance):
    layer, x = _make(cls, dtype=policy), _inputs(cls)
    output = layer(x)
    if cls is VocabProjection:
        computed = "float64" if policy == "float64" else "float32"
    assert output.dtype == computed
    assert {variable.dtype for variable in layer.trainable_variables} == {stored}
    exact = _make(cls)
    exact.build(x.shape)
    for ours, theirs in zip(exact.trainable_variables, layer.trainable_variables, strict=True):
        ours.assign(ops.cast(theirs, "float32"))
    np.testing.assert_allclose(ops.cast(output, "float32"), exact(x), rtol=tolerance, atol=tolerance)
    if "dropout" in LAYERS[cls]:
        assert layer(x, training=True).dtype == computed


# Saving.


def _randomise(model):
    random = np.random.default_rng(5)
    for variable in model.trainable_variables:
        variable.assign(random.normal(size=variable.shape))
    return model


def test_a_model_of_every_layer_survives_files_clone_and_config(tmp_path):
    model, x = _randomise(_whole_model()), _inputs(TokenAndPositionEmbedding)
    expected = model(x)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(x), expected)
    fresh = {
        "weights": _whole_model(),
        "clone": keras.models.clone_model(model),
        "config": keras.Model.from_config(model.get_config()),
    }
    for name, copy in fresh.items():
        assert np.any(copy(x) != expected), name
        copy.load_weights(tmp_path / "model.weights.h5")
        np.testing.assert_array_equal(copy(x), expected, name)
        assert [v.name for v in copy.variables] == [v.name for v in model.variables]

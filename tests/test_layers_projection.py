"""`VocabProjection`: logits in float32, and one table where it is tied."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_tinyattn import CausalLM, DecoderBlock, TokenAndPositionEmbedding, VocabProjection, gpt

B, T, D, V = 2, 5, 6, 11
IDS = np.array([[3, 1, 4, 1, 5], [2, 7, 10, 8, 0]])


def _tied():
    model = gpt(V, T, D, num_heads=3, num_layers=1)
    model(IDS)
    return model


def _tables(variables):
    return [v for v in variables if tuple(v.shape) in ((V, D), (D, V))]


def _assert_tied(model):
    """One variable, one pair of Adam's slots, and logits that follow the table."""
    assert len(_tables(model.variables)) == len(_tables(model.trainable_variables)) == 1
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    assert len(_tables(optimizer.variables)) == 2
    before = np.asarray(model(IDS))
    table = _tables(model.variables)[0]
    at = table.numpy()
    # No id 9 goes in, so only its logit can change: the hidden state comes out of a norm unscaled.
    table.assign(np.where(np.arange(V)[:, None] == 9, 2 * at, at))
    after = np.asarray(model(IDS))
    table.assign(at)
    np.testing.assert_allclose(after[..., 9], 2 * before[..., 9], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.delete(after, 9, -1), np.delete(before, 9, -1), rtol=1e-5, atol=1e-7)
    assert np.all(before[..., 9])


def test_logits_are_inputs_times_kernel_plus_bias():
    layer = VocabProjection(V, use_bias=True, bias_initializer="normal")
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype("float32")
    logits = layer(x)
    np.testing.assert_allclose(
        logits, x @ layer.kernel.numpy() + layer.bias.numpy(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("mixed_float16", "float32"),
        ("mixed_bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_logits_are_float32_or_float64(policy, expected, tied):
    layer = VocabProjection(V, use_bias=True, tied=tied, dtype=policy)
    if tied:
        embedding = TokenAndPositionEmbedding(V, T, D, dtype=policy)
        embedding.build((None, T))
        layer.tie(embedding)
    assert layer(np.ones((B, T, D))).dtype == expected


def test_the_bias_is_not_rounded_to_half_precision():
    layer = VocabProjection(V, use_bias=True, bias_initializer="normal", dtype="mixed_float16")
    np.testing.assert_array_equal(layer(np.zeros((1, 1, D)))[0, 0], layer.bias)


def test_the_mask_is_passed_on():
    x = keras.layers.Embedding(V, D, mask_zero=True)(IDS)
    np.testing.assert_array_equal(VocabProjection(V)(x)._keras_mask, IDS != 0)


def test_a_tied_model_has_one_table():
    _assert_tied(_tied())


def test_both_uses_of_a_tied_table_reach_its_gradient():
    model = _tied()
    table = model.embedding.token_embeddings

    def gradient(cut_output):
        with tf.GradientTape() as tape:
            logits = model(IDS)
            loss = ops.sum(ops.square(logits[..., 9] if cut_output else logits))
        return tf.convert_to_tensor(tape.gradient(loss, table.value)).numpy()

    # Row 9 is never looked up: its gradient comes through the projection. Where only logit 9 counts,
    # row 3 is reached through the embedding, and row 6 not at all.
    assert np.any(gradient(cut_output=False)[9])
    assert np.any(gradient(cut_output=True)[3])
    assert not np.any(gradient(cut_output=True)[6])


def test_a_tied_model_stays_tied_after_saving_and_loading(tmp_path):
    model = _tied()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(IDS), model(IDS))
    _assert_tied(loaded)
    model.save_weights(tmp_path / "model.weights.h5")
    other = _tied()
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(other(IDS), model(IDS))
    _assert_tied(other)


def test_a_tied_model_stays_tied_after_from_config_and_clone():
    for copy in (CausalLM.from_config(_tied().get_config()), keras.models.clone_model(_tied())):
        copy(IDS)
        _assert_tied(copy)


def test_a_tied_model_stays_tied_nested_in_a_functional_model(tmp_path):
    inputs = keras.Input((T,), dtype="int32")
    model = keras.Model(inputs, _tied()(inputs))
    _assert_tied(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(IDS), model(IDS))
    _assert_tied(loaded)
    _assert_tied(keras.models.clone_model(model))


def test_a_tied_model_stays_tied_through_a_training_step_and_the_optimizer_is_saved(tmp_path):
    model = _tied()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(IDS, IDS, verbose=0)
    assert len(_tables(model.optimizer.variables)) == 2
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    _assert_tied(loaded)


def test_an_exported_tied_model_has_one_table(tmp_path):
    model = _tied()
    model.export(tmp_path / "export", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "export")
    assert len(_tables(loaded.variables)) == 1
    np.testing.assert_allclose(
        loaded.serve(tf.constant(IDS, tf.float32)), model(IDS), rtol=1e-5, atol=1e-6
    )


def test_a_tied_projection_that_nobody_tied_is_refused():
    with pytest.raises(ValueError, match=r"Expected tie\(embedding\) before the first call"):
        VocabProjection(V, tied=True)(np.ones((B, T, D)))


def test_tied_layers_outside_a_causal_lm_are_not_silently_untied_on_loading(tmp_path):
    embedding, projection = TokenAndPositionEmbedding(V, T, D), VocabProjection(V, tied=True)
    projection.tie(embedding)
    inputs = keras.Input((T,), dtype="int32")
    model = keras.Model(inputs, projection(DecoderBlock(D, 3)(embedding(inputs))))
    assert len(_tables(model.variables)) == 1
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="put both layers into a CausalLM"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_tying_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"Expected tied=True. Received: tied=False"):
        VocabProjection(V).tie(TokenAndPositionEmbedding(V, T, D))
    with pytest.raises(ValueError, match=r"vocabulary_size=11. Received: vocabulary_size=12"):
        VocabProjection(V, tied=True).tie(TokenAndPositionEmbedding(V + 1, T, D))
    projection = VocabProjection(V, tied=True)
    projection.tie(TokenAndPositionEmbedding(V, T, D))
    with pytest.raises(ValueError, match=r"hidden_dim=6. Received: inputs of width 7"):
        projection(np.ones((B, T, D + 1)))


def test_a_vocabulary_below_one_is_refused():
    with pytest.raises(ValueError, match="Received: vocabulary_size=0"):
        VocabProjection(0)

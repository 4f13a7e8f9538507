"""`TokenAndPositionEmbedding`: two tables, and what is in neither."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_tinyattn import TokenAndPositionEmbedding

V, T, D = 11, 5, 6


def _layer(**arguments):
    layer = TokenAndPositionEmbedding(V, T, D, **arguments)
    layer.build((None, T))
    return layer


def test_a_vector_is_its_token_row_plus_its_position_row(on_every_path):
    layer = _layer()
    ids = np.array([[3, 3, 10], [0, 1, 2]])
    tokens, positions = layer.token_embeddings.numpy(), layer.position_embeddings.numpy()
    for path, vectors in on_every_path(layer, tf.constant(ids)):
        np.testing.assert_allclose(vectors, tokens[ids] + positions[:3], rtol=1e-6, err_msg=path)


def test_positions_may_be_given_by_row(on_every_path):
    layer = _layer()
    ids, at = np.array([[3, 7], [0, 1]]), np.array([[4, 0], [2, 2]])
    tokens, positions = layer.token_embeddings.numpy(), layer.position_embeddings.numpy()
    for path, vectors in on_every_path(
        lambda ids, at: layer(ids, positions=at), tf.constant(ids), tf.constant(at)
    ):
        np.testing.assert_allclose(vectors, tokens[ids] + positions[at], rtol=1e-6, err_msg=path)


def test_an_id_out_of_range_gives_nan_and_its_neighbours_keep_their_vectors(on_every_path):
    layer = TokenAndPositionEmbedding(V, 7, D)
    layer.build((None, 7))
    ids = np.array([[3, V, -1, -V, 10**6, 2**40, 10]])
    tokens, positions = layer.token_embeddings.numpy(), layer.position_embeddings.numpy()
    for path, vectors in on_every_path(layer, tf.constant(ids)):
        assert np.all(np.isnan(vectors[0, 1:-1])), path
        for at in (0, -1):
            np.testing.assert_allclose(vectors[0, at], tokens[ids[0, at]] + positions[at], rtol=1e-6)


def test_a_position_out_of_range_gives_nan(on_every_path):
    layer = _layer()
    at = tf.constant([[T, -1, 10**6, T - 1]])
    run = lambda ids, at: layer(ids, positions=at)  # noqa: E731
    for path, vectors in on_every_path(run, tf.constant([[3, 4, 5, 6]]), at):
        expected = [[True] * D] * 3 + [[False] * D]
        np.testing.assert_array_equal(np.isnan(vectors)[0], expected, path)


def test_an_id_out_of_range_changes_no_row_of_the_tables(on_every_path):
    layer = _layer()

    def gradients(ids):
        with tf.GradientTape() as tape:
            vectors = layer(ids)
            loss = ops.sum(ops.where(ops.isnan(vectors), 0.0, vectors))
        return [
            tf.convert_to_tensor(g) for g in tape.gradient(loss, [v.value for v in layer.variables])
        ]

    for path, (tokens, positions) in on_every_path(gradients, tf.constant([[3, -1, V]])):
        np.testing.assert_array_equal(np.flatnonzero(np.any(tokens, axis=1)), [3], path)
        np.testing.assert_array_equal(np.flatnonzero(np.any(positions, axis=1)), [0], path)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "uint32", "uint64", "float32", "float64"])
def test_ids_may_be_of_any_number_type(dtype):
    layer = _layer()
    ids = np.array([[3, 10]])
    np.testing.assert_array_equal(layer(ids.astype(dtype)), layer(ids))


def test_what_is_no_whole_id_gives_nan():
    layer = _layer()
    assert np.all(np.isnan(layer(np.array([[1.5, np.nan, np.inf, -0.5]]))))
    # 2^32 + 3 would be 3 if it were cut to 32 bits.
    assert np.all(np.isnan(layer(np.array([[2**32 + 3]], "uint64"))))


def test_float_ids_are_not_rounded_to_half_precision():
    layer = TokenAndPositionEmbedding(5000, T, D, dtype="mixed_float16")
    vectors = layer(np.array([[2049.0]]))
    np.testing.assert_array_equal(vectors, layer(np.array([[2049]])))
    assert vectors.dtype == "float16"
    assert layer.token_embeddings.dtype == "float32"


def test_a_window_longer_than_the_table_is_an_error_that_names_both_numbers():
    layer = _layer()
    message = r"Expected at most sequence_length=5 tokens. Received: 6 tokens"
    ids = np.zeros((1, T + 1), int)
    with pytest.raises(ValueError, match=message):
        layer(ids)
    with pytest.raises(ValueError, match=message):
        tf.function(layer)(tf.constant(ids))
    with pytest.raises(ValueError, match=message):
        layer(keras.Input((T + 1,), dtype="int32"))


def test_a_window_whose_length_is_known_at_run_time_only_gives_nan_behind_the_table():
    layer = _layer()
    run = tf.function(layer, input_signature=[tf.TensorSpec((None, None), tf.int32)])
    vectors = run(tf.zeros((1, T + 2), tf.int32))
    np.testing.assert_array_equal(np.isnan(vectors)[0, :, 0], [False] * T + [True] * 2)


@pytest.mark.parametrize("shape", [(), (2,), (1, 3), (3, 3), (2, 1), (2, 3, 1)])
def test_positions_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"Expected shape \(T,\) or \(B, T\), here \(3,\) or \(2, 3\)"):
        _layer()(np.zeros((2, 3), int), positions=np.zeros(shape, int))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()])
def test_ids_of_another_rank_are_refused(shape):
    with pytest.raises(ValueError, match=r"Expected shape \(B, T\). Received: shape"):
        _layer()(np.zeros(shape, int))


@pytest.mark.parametrize("name", ["vocabulary_size", "sequence_length", "hidden_dim"])
@pytest.mark.parametrize("value", [0, -3, 1.5])
def test_a_size_below_one_or_not_whole_is_refused(name, value):
    sizes = {"vocabulary_size": V, "sequence_length": T, "hidden_dim": D, name: value}
    with pytest.raises(ValueError, match=f"Received: {name}={value}"):
        TokenAndPositionEmbedding(**sizes)


def test_tables_of_one_shape_and_a_seeded_initializer_differ():
    layer = TokenAndPositionEmbedding(
        5, 5, D, embeddings_initializer=keras.initializers.RandomNormal(seed=1)
    )
    layer.build((None, 5))
    assert np.all(layer.token_embeddings.numpy() != layer.position_embeddings.numpy())

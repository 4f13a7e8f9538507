"""Attention as pure functions: numbers by hand and properties."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_tinyattn import functional


def test_causal_mask_is_the_drawing_of_its_docstring():
    drawn = functional.causal_mask(ops.arange(3), ops.arange(4))
    np.testing.assert_array_equal(
        drawn, [[True, False, False, False], [True, True, False, False], [True, True, True, False]]
    )


def test_causal_mask_goes_by_absolute_position_and_by_row():
    mask = functional.causal_mask(ops.array([[2], [0]]), ops.arange(4))
    np.testing.assert_array_equal(mask, [[[True, True, True, False]], [[True, False, False, False]]])


def test_scores_are_dot_products_with_queries_on_rows():
    scores = functional.attention_scores(
        ops.array([[1.0, 2.0], [3.0, 4.0]]), ops.array([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
    )
    np.testing.assert_array_equal(scores, [[17.0, 23.0, 29.0], [39.0, 53.0, 67.0]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_of_half_precision_do_not_overflow_and_keep_their_digits(dtype):
    # 256 * 256 * 4 = 262144 is above the largest float16, 262145 is no bfloat16.
    scores = functional.attention_scores(
        ops.array([[256.0] * 4 + [1.0]], dtype), ops.array([[256.0] * 4 + [1.0]], dtype)
    )
    assert scores.dtype == "float32"
    assert float(scores[0, 0]) == 262145.0


def test_softmax_gives_the_numbers_worked_out_by_hand():
    np.testing.assert_allclose(
        functional.softmax(ops.log(ops.array([1.0, 2.0, 5.0]))), [1 / 8, 2 / 8, 5 / 8]
    )


def test_softmax_of_large_scores_does_not_overflow():
    # e^1 / (1 + e^1)
    np.testing.assert_allclose(
        functional.softmax(ops.array([1000.0, 1001.0])), [0.26894143, 0.7310586], rtol=1e-6
    )


def test_softmax_of_one_entry_is_one_without_a_warning_and_keeps_nan():
    np.testing.assert_array_equal(functional.softmax(ops.array([[7.0], [np.nan]])), [[1.0], [np.nan]])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_softmax_is_taken_in_at_least_float32(dtype, expected):
    weights = functional.attention_weights(ops.zeros((2, 3), dtype), ops.ones((2, 3), "bool"))
    assert functional.softmax(ops.zeros((2, 3), dtype)).dtype == expected
    assert weights.dtype == expected


def test_masked_weights_are_exactly_zero_and_the_others_share_one():
    weights = functional.attention_weights(
        ops.log(ops.array([[1.0, 3.0, 1e30]])), ops.array([[True, True, False]])
    )
    np.testing.assert_allclose(weights, [[0.25, 0.75, 0.0]], rtol=1e-6)
    assert float(weights[0, 2]) == 0.0


@pytest.mark.parametrize(("dtype", "large"), [("float32", 1e30), ("float64", 1e300)])
def test_masked_weights_are_zero_however_far_the_scores_lie_apart(dtype, large):
    scores = tf.constant(np.array([[-large, large], [large, -large]]), dtype)
    weights = functional.attention_weights(scores, ops.array([[True, False], [True, False]]))
    np.testing.assert_array_equal(weights, [[1.0, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_row_without_a_key_has_zero_weights_and_zero_gradient(dtype):
    scores = ops.array([[1.0, 2.0], [3.0, 4.0]], dtype)
    mask = ops.array([[False, False], [True, True]])
    with tf.GradientTape() as tape:
        tape.watch(scores)
        weights = functional.attention_weights(scores, mask)
        loss = ops.sum(weights * ops.array([1.0, 2.0], weights.dtype))
    np.testing.assert_array_equal(weights[0], [0.0, 0.0])
    gradient = ops.cast(tape.gradient(loss, scores), "float32")
    np.testing.assert_array_equal(gradient[0], [0.0, 0.0])
    assert float(gradient[1, 0]) < 0 < float(gradient[1, 1])


@pytest.mark.parametrize("keys_first", [False, True])
def test_attend_divides_by_the_root_of_the_width_of_a_head(keys_first):
    # Q K^T = 2 and 0, divided by sqrt(4): e^1 / (e^1 + e^0).
    queries = ops.array([[2.0, 0.0, 0.0, 0.0]])
    keys = ops.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    attended, weights = functional.attend(queries, keys, 3 * keys, keys_first=keys_first)
    np.testing.assert_allclose(weights, [[0.7310586, 0.26894143]], rtol=1e-6)
    np.testing.assert_allclose(attended, [[3 * 0.7310586, 3 * 0.26894143, 0, 0]], rtol=1e-6)

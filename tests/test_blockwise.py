"""Attention in linear memory: against the dense form, in values and gradients, on every path."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_tinyattn import functional
from keras_tinyattn.blockwise import blockwise_attention

B, H, T, K = 2, 3, 11, 4


def _draw(*shape, dtype="float64", seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), dtype)


def _dense(queries, keys, values, mask=None):
    return functional.attend(queries, keys, values, mask)[0]


def _loss_and_gradients(attend):
    def run(queries, keys, values, upstream):
        with tf.GradientTape() as tape:
            tape.watch((queries, keys, values))
            output = attend(queries, keys, values)
            loss = ops.sum(output * upstream)
        return output, *tape.gradient(loss, (queries, keys, values))

    return run


@pytest.mark.parametrize("block_size", [4, 11])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_blockwise_equals_dense_in_values_and_gradients(causal, masked, block_size):
    S = T if causal else 13
    queries, keys, values = _draw(B, H, T, K), _draw(B, H, S, K, seed=1), _draw(B, H, S, K, seed=2)
    upstream = _draw(B, H, T, K, seed=3)
    # The first row cannot see its first keys, so causally its first queries see nothing.
    key_mask = ops.arange(S)[None] >= ops.array([[5], [0]]) if masked else None
    mask = ops.ones((1, 1, T, S), "bool")
    if causal:
        mask = mask & functional.causal_mask(ops.arange(T), ops.arange(S))
    if masked:
        mask = mask & key_mask[:, None, None, :]
    dense = _loss_and_gradients(lambda q, k, v: _dense(q, k, v, mask))
    blockwise = _loss_and_gradients(
        lambda q, k, v: blockwise_attention(q, k, v, key_mask, causal, block_size)
    )
    expected = dense(queries, keys, values, upstream)
    for ours, theirs in zip(
        tf.function(blockwise)(queries, keys, values, upstream), expected, strict=True
    ):
        # Float64: what is left is the rounding of sums in another order.
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_blockwise_is_the_same_on_every_path(on_every_path):
    queries, keys, values = (_draw(B, H, T, K, dtype="float32", seed=seed) for seed in range(3))
    upstream = _draw(B, H, T, K, dtype="float32", seed=3)
    key_mask = ops.arange(T)[None] < ops.array([[7], [T]])
    mask = key_mask[:, None, None, :] & functional.causal_mask(ops.arange(T), ops.arange(T))
    expected = _loss_and_gradients(lambda q, k, v: _dense(q, k, v, mask))(
        queries, keys, values, upstream
    )
    run = _loss_and_gradients(lambda q, k, v: blockwise_attention(q, k, v, key_mask, True, 4))
    for path, results in on_every_path(run, queries, keys, values, upstream):
        for ours, theirs in zip(results, expected, strict=True):
            # Float32 sums of up to 11 terms of size 1 in another order.
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("causal", [True, False])
def test_blockwise_takes_lengths_that_are_known_only_at_run_time(causal):
    spec = tf.TensorSpec((None, H, None, K), tf.float64)

    @tf.function(input_signature=[spec] * 4)
    def run(queries, keys, values, upstream):
        attend = lambda q, k, v: blockwise_attention(q, k, v, causal=causal, block_size=4)  # noqa: E731
        return _loss_and_gradients(attend)(queries, keys, values, upstream)

    for length in (0, 1, 4, 9):
        arguments = [_draw(B, H, length, K, seed=seed) for seed in range(4)]
        mask = functional.causal_mask(ops.arange(length), ops.arange(length)) if causal else None
        expected = _loss_and_gradients(lambda q, k, v, mask=mask: _dense(q, k, v, mask))(*arguments)
        for ours, theirs in zip(run(*arguments), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_blockwise_of_half_precision_stays_close_to_float64(dtype):
    arguments = [_draw(B, H, T, K, dtype=dtype, seed=seed) for seed in range(4)]
    exact = [tf.cast(argument, "float64") for argument in arguments]
    run = _loss_and_gradients(lambda q, k, v: blockwise_attention(q, k, v, block_size=4))
    results = run(*arguments)
    # Weights, values and outputs are rounded to 11 (float16) or 8 (bfloat16) bits on the way; on a
    # processor without bfloat16 instructions the sums within a product too.
    tolerance = {"float16": 2**-8, "bfloat16": 2**-4}[dtype]
    for ours, theirs in zip(results, _loss_and_gradients(_dense)(*exact), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(tf.cast(ours, "float64"), theirs, rtol=tolerance, atol=tolerance)


def test_blockwise_query_without_a_key_gets_zeros_and_harms_no_gradient():
    arguments = [_draw(B, H, T, K, seed=seed) for seed in range(4)]
    key_mask = ops.array([[False] * T, [True] * T])
    output, *gradients = _loss_and_gradients(
        lambda q, k, v: blockwise_attention(q, k, v, key_mask, block_size=4)
    )(*arguments)
    assert not np.any(output[0])
    assert np.all(output[1])
    for gradient in gradients:
        assert not np.any(gradient[0])
        assert np.all(np.isfinite(gradient))


def test_blockwise_never_visits_a_block_above_the_diagonal():
    queries, keys, values = (_draw(1, H, 12, K, seed=seed).numpy() for seed in range(3))
    keys[:, :, 8:] = np.nan
    values[:, :, 8:] = np.nan
    output = blockwise_attention(
        *map(ops.convert_to_tensor, (queries, keys, values)), causal=True, block_size=4
    )
    np.testing.assert_array_equal(np.isnan(output[0, 0, :, 0]), [False] * 8 + [True] * 4)


def test_blockwise_gradient_agrees_with_finite_differences():
    point = [_draw(B, H, T, K, seed=seed) for seed in range(3)]
    upstream = _draw(B, H, T, K, seed=3)

    def attend(q, k, v):
        return blockwise_attention(q, k, v, causal=True, block_size=4)

    _, *gradients = _loss_and_gradients(attend)(*point, upstream)
    step = 1e-6
    for index in range(3):
        direction = _draw(B, H, T, K, seed=10 + index)
        forward, backward = list(point), list(point)
        forward[index] = point[index] + step * direction
        backward[index] = point[index] - step * direction
        slope = ops.sum((attend(*forward) - attend(*backward)) * upstream) / (2 * step)
        # The difference quotient itself is good to about step^2 and 1e-16 / step.
        np.testing.assert_allclose(ops.sum(gradients[index] * direction), slope, rtol=1e-7)


def test_causal_blockwise_attention_of_unequal_lengths_is_refused():
    x = ops.ones((1, 1, 3, 4))
    with pytest.raises(ValueError, match="Received: 3 queries and 2 keys"):
        blockwise_attention(x, x[:, :, :2], x[:, :, :2], causal=True)


@pytest.mark.parametrize("block_size", [3, 4])
def test_blockwise_finds_low_scores_behind_a_masked_block(block_size):
    # The first block is masked; a running maximum that started at 0 there would let exp(-5000) vanish.
    queries, keys = np.full((1, 1, 7, 1), -5000.0), np.ones((1, 1, 7, 1))
    values = np.arange(7.0).reshape(1, 1, 7, 1)
    mask = np.array([[False] * 4 + [True] * 3])
    attended = blockwise_attention(
        *map(ops.convert_to_tensor, (queries, keys, values)),
        ops.convert_to_tensor(mask),
        block_size=block_size,
    )
    np.testing.assert_allclose(attended, np.full((1, 1, 7, 1), 5.0), rtol=1e-6)

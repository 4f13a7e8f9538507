"""`DecoderBlock`: GPT-2's arithmetic on a residual stream, and nothing that leaks from under a mask."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_tinyattn import DecoderBlock

B, T, D, H, I = 2, 5, 6, 3, 7  # noqa: E741
PADDING = np.array([[True] * 3 + [False] * 2, [True] * 5])


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _block(**arguments):
    block = DecoderBlock(D, H, intermediate_dim=I, **arguments)
    block.build((B, T, D))
    for seed, variable in enumerate(block.trainable_variables):
        variable.assign(variable + 0.3 * _draw(*variable.shape, seed=seed))
    return block


def _norm(x, layer):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * layer.gamma.numpy() + layer.beta.numpy()


def test_the_block_is_gpt2s_arithmetic(on_every_path):
    block, x = _block(), _draw(B, T, D)
    a = block.attention
    h = _norm(x.astype("float64"), block.attention_norm)
    queries, keys, values = (
        (h @ kernel.numpy() + bias.numpy()).reshape(B, T, H, D // H)
        for kernel, bias in (
            (a.query_kernel, a.query_bias),
            (a.key_kernel, a.key_bias),
            (a.value_kernel, a.value_bias),
        )
    )
    scores = np.einsum("bthk,bshk->bhts", queries, keys) / math.sqrt(D // H)
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("bhts,bshk->bthk", weights, values).reshape(B, T, D)
    y = x + attended @ a.output_kernel.numpy() + a.output_bias.numpy()
    h = _norm(y, block.mlp_norm) @ block.mlp_expand.kernel.numpy() + block.mlp_expand.bias.numpy()
    h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    expected = y + h @ block.mlp_contract.kernel.numpy() + block.mlp_contract.bias.numpy()
    run = lambda x: block(x, return_attention_scores=True)  # noqa: E731
    for path, (output, ours) in on_every_path(run, tf.constant(x)):
        # Float32 sums of up to 7 terms of size 1.
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5, err_msg=path)
        np.testing.assert_allclose(ours, weights, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("blockwise", [False, True])
def test_a_nan_under_padding_reaches_no_real_position_and_no_gradient(blockwise, on_every_path):
    block = _block(blockwise=blockwise)
    clean = _draw(B, T, D)
    poisoned = np.where(PADDING[..., None], clean, np.nan)

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = ops.where(PADDING[..., None], block(x, mask=PADDING), 0.0)
            loss = ops.sum(ops.square(output))
        return output, *tape.gradient(loss, [x, *[v.value for v in block.trainable_variables]])

    expected = run(tf.constant(clean))
    for path, results in on_every_path(run, tf.constant(poisoned)):
        for result, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, theirs, rtol=1e-3, atol=1e-3, err_msg=path)


def test_a_nan_that_no_query_may_look_at_reaches_no_gradient(on_every_path):
    block, x = _block(), _draw(B, T, D)
    poisoned = x.copy()
    poisoned[:, 1] = np.nan
    allowed = np.ones((T, T), bool)
    allowed[:, 1] = False

    def gradients(x):
        with tf.GradientTape() as tape:
            output = tf.gather(block(x, attention_mask=allowed), [0, 2, 3, 4], axis=1)
            loss = ops.sum(ops.square(output))
        return output, *tape.gradient(loss, [v.value for v in block.trainable_variables])

    expected = gradients(tf.constant(x))
    for path, results in on_every_path(gradients, tf.constant(poisoned)):
        for result, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, theirs, rtol=1e-3, atol=1e-3, err_msg=path)


def test_the_implicit_mask_is_used_and_passed_on_through_blocks():
    embedding = keras.layers.Embedding(11, D, mask_zero=True)
    x = embedding(np.array([[3, 1, 4, 0, 0], [2, 7, 1, 8, 2]]))
    first, second = _block(), _block()
    output = second(first(x))
    np.testing.assert_array_equal(output._keras_mask, PADDING)
    alone = second(first(ops.copy(x)[:1, :3]))
    np.testing.assert_allclose(output[0, :3], alone[0], rtol=1e-5, atol=1e-5)
    explicit = first(x, mask=np.ones((B, T), bool))
    np.testing.assert_array_equal(explicit, first(ops.copy(x)))


def test_dropout_acts_in_training_only_and_repeats_with_its_seed():
    block, x = _block(dropout=0.5, seed=3), _draw(B, T, D)
    twin = DecoderBlock.from_config(block.get_config())
    twin.build((B, T, D))
    twin.set_weights(block.get_weights())
    without = DecoderBlock.from_config({**block.get_config(), "dropout": 0.0})
    without.build((B, T, D))
    for ours, theirs in zip(without.trainable_variables, block.trainable_variables, strict=True):
        ours.assign(theirs)
    np.testing.assert_array_equal(block(x), without(x))
    trained = block(x, training=True)
    np.testing.assert_array_equal(trained, twin(x, training=True))
    assert np.all(np.any(trained != block(x, training=True), axis=(1, 2)))


def test_dropout_of_one_half_of_the_block_is_not_the_other_halfs():
    block = DecoderBlock(D, H, dropout=0.5, seed=3)
    block.build((B, T, D))
    # Nor is either that of the weights: the two generators start unlike.
    weights, residual = [v.numpy().tolist() for v in block.non_trainable_variables]
    assert weights != residual
    zeros = [np.zeros_like(w) if w.dtype.kind == "f" else w for w in block.get_weights()]
    block.set_weights(zeros)
    # With all kernels zero, each half adds its bias, dropped by its own draw.
    block.attention.output_bias.assign(np.ones(D))
    block.mlp_contract.bias.assign(np.full(D, 10.0))
    added = np.asarray(block(np.zeros((B, T, D), "float32"), training=True))
    assert set(np.unique(added)) == {0.0, 2.0, 20.0, 22.0}


def test_kernels_of_a_seeded_initializer_differ():
    block = DecoderBlock(
        D, H, intermediate_dim=D, kernel_initializer=keras.initializers.RandomNormal(seed=1)
    )
    block.build((B, T, D))
    kernels = [v.numpy() for v in block.trainable_variables if v.path.endswith("kernel")]
    assert len(kernels) == 6
    for index, kernel in enumerate(kernels):
        for other in kernels[:index]:
            assert np.all(kernel != other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 4}, "Received: hidden_dim=6, num_heads=4"),
        ({"num_heads": 0}, "Received: num_heads=0"),
        ({"hidden_dim": 0}, "Received: hidden_dim=0"),
        ({"intermediate_dim": 0}, "Received: intermediate_dim=0"),
        ({"dropout": 1.0}, "Received: dropout=1.0"),
        ({"blockwise": True, "dropout": 0.1}, "cannot drop any out"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DecoderBlock(**{"hidden_dim": D, "num_heads": H, **arguments})


@pytest.mark.parametrize("width", [1, D + 1])
def test_inputs_of_another_width_are_refused(width):
    with pytest.raises(
        ValueError, match=rf"Expected inputs of shape \(B, T, 6\). Received: .*{width}\)"
    ):
        DecoderBlock(D, H)(_draw(B, T, width))

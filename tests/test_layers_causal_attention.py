"""`CausalSelfAttention`: no look ahead on any path, and cached steps equal to the full window."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_tinyattn import CausalSelfAttention, DecoderBlock
from keras_tinyattn.layers import _window

B, T, D, H, K = 2, 5, 6, 3, 4
# Float32 sums of up to 12 terms of size 1, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _attention(**arguments):
    # Biases of zero would not be missed.
    more = {"use_bias": True, "bias_initializer": "random_normal", **arguments}
    layer = CausalSelfAttention(K, H, output_dim=D, **more)
    layer.build((B, T, D))
    return layer


def _block(**arguments):
    block = DecoderBlock(hidden_dim=D, num_heads=H, **arguments)
    block.build((B, T, D))
    return block


LAYERS = [_attention, _block]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"dropout": 0.3, "seed": 5}, {"blockwise": True}],
    ids=["dense", "dropout", "blockwise"],
)
@pytest.mark.parametrize("make", LAYERS)
def test_the_future_does_not_change_the_past(make, arguments):
    layer = make(**arguments)
    x = _draw(B, T, D)

    def run(x):
        # A fresh twin, so that the dropout's draws repeat.
        results = []
        for training in (False, True):
            for scores in (False, True) if "blockwise" not in arguments else (False,):
                twin = type(layer).from_config(layer.get_config())
                twin.build((B, T, D))
                for ours, theirs in zip(
                    twin.trainable_variables, layer.trainable_variables, strict=True
                ):
                    ours.assign(theirs.value)
                more = {"return_attention_scores": True} if scores else {}
                outputs = twin(x, training=training, **more)
                results.extend(outputs if scores else [outputs])
        return results

    before = run(tf.constant(x))
    for cut in range(1, T):
        changed = np.concatenate([x[:, :cut], 100 * _draw(B, T - cut, D, seed=cut)], axis=1)
        for earlier, later in zip(before, run(tf.constant(changed)), strict=True):
            if earlier.shape[-1] == T:  # weights (B, H, T, T)
                earlier, later = earlier[:, :, :cut], later[:, :, :cut]
                assert not np.any(later[..., cut:])
            else:
                earlier, later = earlier[:, :cut], later[:, :cut]
            # Exact in the maths; the sums may be split otherwise.
            np.testing.assert_allclose(later, earlier, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("make", LAYERS)
def test_the_future_does_not_change_the_past_when_compiled(make, blockwise, on_every_path):
    layer, x = make(blockwise=blockwise), _draw(B, T, D)
    changed = np.concatenate([x[:, :3], 100 * _draw(B, T - 3, D, seed=1)], axis=1)
    for path, output in on_every_path(layer, tf.constant(np.concatenate([x, changed]))):
        before, after = output[:B], output[B:]
        np.testing.assert_allclose(after[:, :3], before[:, :3], rtol=1e-5, atol=1e-6, err_msg=path)
        assert np.all(np.any(after[:, 3:] != before[:, 3:], axis=-1)), path


@pytest.mark.parametrize("path", ["eager", "graph", "xla"])
@pytest.mark.parametrize("make", LAYERS)
def test_a_cached_step_equals_the_full_window_at_every_position(make, path):
    layer, x = make(), _draw(B, T, D)
    expected, weights = layer(x, return_attention_scores=True)

    def step(x, cache, positions):
        return layer(x, cache=cache, positions=positions, return_attention_scores=True)

    if path != "eager":
        step = tf.function(step, autograph=False, jit_compile=path == "xla")
    # The cache is longer than the window: empty slots are not attended to.
    cache = layer.make_cache(B, T + 2)
    for t in range(T):
        output, shares, cache = step(tf.constant(x[:, t : t + 1]), cache, tf.constant([t]))
        np.testing.assert_allclose(output[:, 0], expected[:, t], **CLOSE)
        np.testing.assert_allclose(shares[:, :, 0, :T], weights[:, :, t], **CLOSE)
        assert not np.any(shares[..., T:])


@pytest.mark.parametrize("make", LAYERS)
def test_a_window_may_be_fed_to_the_cache_in_pieces(make):
    layer, x = make(), _draw(B, T, D)
    cache = layer.make_cache(B, T)
    pieces = []
    for start, end in ((0, 3), (3, 3), (3, 5)):
        piece, cache = layer(x[:, start:end], cache=cache, positions=ops.arange(start, end))
        pieces.append(piece)
    np.testing.assert_allclose(ops.concatenate(pieces, axis=1), layer(x), **CLOSE)


@pytest.mark.parametrize("make", LAYERS)
def test_prompts_of_unequal_length_share_a_batch(make, on_every_path):
    layer, x = make(), _draw(2, T, D)
    lengths = (2, 4)

    def run(x):
        # Right-padded: row 0 holds foreign numbers behind its second token.
        prompt = ops.concatenate([x[:, :2], ops.concatenate([x[:1, :2] * 50, x[1:, 2:4]], 0)], 1)
        cache = layer.make_cache(2, T)
        window, cache = layer(prompt, cache=cache, positions=ops.arange(4))
        token = ops.stack([x[0, 2:3], x[1, 4:5]])
        step, cache = layer(token, cache=cache, positions=ops.array([[2], [4]]))
        again, _ = layer(x[:, 3:4], cache=cache, positions=ops.array([[3], [3]]))
        return window, step, again

    alone = [layer(x[:1]), layer(x[1:])]
    for path, (window, step, again) in on_every_path(run, tf.constant(x)):
        for row, length in enumerate(lengths):
            expected = alone[row][0]
            np.testing.assert_allclose(window[row, :length], expected[:length], err_msg=path, **CLOSE)
            np.testing.assert_allclose(step[row, 0], expected[length], err_msg=path, **CLOSE)
        np.testing.assert_allclose(again[0, 0], alone[0][0, 3], err_msg=path, **CLOSE)


@pytest.mark.parametrize("make", LAYERS)
def test_a_slot_outside_the_cache_gives_nan_in_its_row_only(make, on_every_path):
    outside = [T, T + 100, -1, -T, 10**6]
    rows = len(outside) + 1
    layer, x = make(), _draw(rows, T, D)
    _, cache = layer(x, cache=layer.make_cache(rows, T), positions=ops.arange(T))
    expected = layer(x)

    def run(x, positions):
        return layer(x, cache=cache, positions=positions)[0]

    positions = tf.constant([[position] for position in (*outside, 2)])
    for path, step in on_every_path(run, tf.constant(x[:, 2:3]), positions):
        assert np.all(np.isnan(step[:-1])), path
        # Slots behind the step are masked again, by the position alone.
        np.testing.assert_allclose(step[-1, 0], expected[-1, 2], err_msg=path, **CLOSE)


def test_the_cache_is_of_the_compute_type_and_is_not_changed_in_place():
    layer = _attention(dtype="mixed_float16")
    cache = layer.make_cache(B, T)
    assert [tuple(part.shape) for part in cache] == [(B, H, T, K)] * 2
    output, after = layer(_draw(B, 1, D), cache=cache, positions=ops.array([0]))
    assert {part.dtype for part in (output, *cache, *after)} == {tf.float16}
    assert not np.any(cache[0])
    assert np.all(after[0][:, :, 0])


@pytest.mark.parametrize("make", LAYERS)
def test_positions_without_a_cache_are_refused(make):
    with pytest.raises(
        ValueError, match=r"Expected a cache with positions\. Received: positions without"
    ):
        make()(_draw(B, 1, D), positions=ops.arange(1))


@pytest.mark.parametrize("make", LAYERS)
def test_a_window_that_is_kept_is_the_window_and_steps_go_on_from_it(make, on_every_path):
    layer, x = make(), _draw(B, T, D)
    expected = layer(x)

    def keep_and_continue(x):
        window, cache = layer(x[:, :4], cache=layer.make_cache(B, T))
        step, _ = layer(x[:, 4:], cache=cache, positions=ops.arange(4, T))
        return ops.concatenate([window, step], axis=1), cache

    for path, (output, cache) in on_every_path(keep_and_continue, x):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5, err_msg=path)
        assert np.all(cache.keys[:, :, :4])
        assert not np.any(cache.keys[:, :, 4:])


@pytest.mark.parametrize("make", LAYERS)
def test_more_tokens_than_a_cache_has_slots_are_refused(make):
    layer = make()
    with pytest.raises(ValueError, match=r"here 3\. Received: 4 tokens"):
        layer(_draw(B, 4, D), cache=layer.make_cache(B, 3))


@pytest.mark.parametrize(
    "mask", [{"mask": np.ones((B, 1), bool)}, {"attention_mask": np.ones((1, 1), bool)}]
)
@pytest.mark.parametrize("make", LAYERS)
def test_a_mask_together_with_a_cache_is_refused(make, mask):
    layer = make()
    with pytest.raises(ValueError, match=f"A cached step makes its mask.*{next(iter(mask))}=given"):
        layer(_draw(B, 1, D), cache=layer.make_cache(B, T), positions=ops.arange(1), **mask)


@pytest.mark.parametrize(
    "shapes", [[(B, H, T, K)], [(B, H + 1, T, K)] * 2, [(B + 1, H, T, K)] * 2, [(B, T, H, K)] * 2]
)
def test_a_cache_of_another_shape_is_refused(shapes):
    with pytest.raises(ValueError, match=r"The cache does not fit.*Received"):
        _attention()(_draw(B, 1, D), cache=tuple(map(ops.zeros, shapes)), positions=ops.arange(1))


@pytest.mark.parametrize(
    "positions",
    [
        np.zeros((B, 2), int),
        np.zeros((2,), int),
        np.zeros((B, 1, 1), int),
        np.zeros((B + 1, 1), int),
        np.array(0),
    ],
)
def test_positions_of_another_shape_are_refused(positions):
    layer = _attention()
    with pytest.raises(
        ValueError, match=r"positions do not fit the inputs.*Expected shape \(T,\) or \(B, T\)"
    ):
        layer(_draw(B, 1, D), cache=layer.make_cache(B, T), positions=positions)


@pytest.mark.parametrize(
    ("length", "seen"),
    [
        (127, [127]),
        (128, [64, 128]),
        (200, [64, 128, 192, 200]),
        (700, [88, 176, 264, 352, 440, 528, 616, 700]),
    ],
)
def test_each_strip_of_a_long_window_sees_up_to_its_end_and_no_further(length, seen):
    spec = tf.TensorSpec((None, length, D))
    graph = tf.function(_attention()).get_concrete_function(spec).graph
    softmaxes = [node for node in graph.get_operations() if node.type == "Softmax"]
    assert [node.outputs[0].shape[-1] for node in softmaxes] == seen


@pytest.mark.parametrize("length", [200, pytest.param(700, marks=pytest.mark.slow)])
def test_a_long_window_goes_by_strips_and_gives_the_same(length, on_every_path):
    layer, x = _attention(), _draw(B, length, D)

    def run(x):
        results = []
        for scores in (False, True):
            with tf.GradientTape() as tape:
                tape.watch(x)
                output = layer(x, return_attention_scores=scores)
                output = output[0] if scores else output
                loss = tf.reduce_sum(output**2)
            results.append([output, *tape.gradient(loss, [x, *layer.trainable_variables])])
        return results

    for _, (by_strips, whole) in on_every_path(run, tf.constant(x)):
        # The gradients add up all positions; that of a key's bias is zero but for rounding.
        largest = max(np.abs(expected).max() for expected in whole)
        for ours, expected in zip(by_strips, whole, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5 * largest)
    changed = x.copy()
    changed[:, 100:] += 1
    later = on_every_path(layer, tf.constant(changed))
    for (_, before), (_, after) in zip(on_every_path(layer, tf.constant(x)), later, strict=True):
        assert np.array_equal(before[:, :100], after[:, :100])
        assert np.all(np.abs(before[:, 100:] - after[:, 100:]).max(-1) > 0.1)


def test_dropout_drops_its_share_of_the_weights_in_every_strip():
    layer = CausalSelfAttention(1, dropout=0.5, seed=1)
    layer.build((1, 200, 1))
    for variable in layer.trainable_variables:
        variable.assign(variable * 0 + (variable is layer.value_kernel))
    # All scores are zero and all values one: an output is the share that was kept, doubled.
    output = layer(np.ones((400, 200, 1), "float32"), training=True).numpy()[..., 0]
    # A mean of 400 (i + 1) coins, each 0 or 2.
    deviation = np.abs(output.mean(0) - 1) * np.sqrt(400 * np.arange(1, 201))
    assert deviation.max() < 4.5
    # Absolute values of standard normal draws have this mean; nothing dropped would be near 0.
    assert deviation.mean() == pytest.approx(np.sqrt(2 / np.pi), abs=0.2)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_strips_in_half_precision_are_as_near_as_whole_windows(dtype, on_every_path):
    layer, x = _attention(dtype=dtype), tf.constant(_draw(B, 130, D))
    for _, strips in on_every_path(layer, x):
        whole, _ = layer(x, return_attention_scores=True)
        difference = np.abs(tf.cast(strips, tf.float32) - tf.cast(whole, tf.float32)).max()
        # A few units in the last place, of which one has 10 bits (7) of the largest value.
        largest = np.abs(tf.cast(whole, tf.float32)).max()
        assert difference < 4 * largest * (2**-10 if dtype == "mixed_float16" else 2**-7)


def test_a_window_of_unknown_length_goes_by_blocks_from_the_threshold_on(monkeypatch):
    monkeypatch.setattr(_window, "BLOCKWISE_FROM", 4)
    monkeypatch.setattr(_window, "blockwise_attention", lambda queries, *_, **__: queries * np.nan)
    layer = _attention()
    run = tf.function(layer, input_signature=[tf.TensorSpec((None, None, D))], autograph=False)
    by_blocks = [np.isnan(run(_draw(B, length, D))).all() for length in (1, 3, 4, 5)]
    assert by_blocks == [False, False, True, True]

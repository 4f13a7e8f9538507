"""Lesson 17 counts right, its sentences are true, and its two loops write the same tokens."""

import lesson_17_kv_cache as lesson
import numpy as np
import pytest
import tensorflow as tf

import keras_tinyattn
from keras_tinyattn import sample

PROMPT, STEPS = [84, 104, 101], 5
WAYS = ["without a cache", "with a cache"]
KEYS = "temperature seed device sizes prompt_ids milliseconds steps work ids generated streamed "
KEYS += "cache batch largest_logit difference_of_logits change_by_first_token"


@pytest.fixture
def ran(run_lesson):
    options = ("--prompt", "The", "--steps", STEPS, "--plot", "{}/cache.png")
    return run_lesson("lesson_17_kv_cache", *options)


@pytest.fixture(scope="module")
def model():
    """A small one, whose logits depend on all that it reads."""
    model = keras_tinyattn.gpt(11, sequence_length=130, hidden_dim=6, num_heads=2, num_layers=2)
    model.build((None, None))
    for variable in model.trainable_variables:
        if len(variable.shape) == 2:
            variable.assign(tf.random.stateless_normal(variable.shape, (1, 2)))
    return model


def test_the_loops_generate_and_stream_write_the_same_tokens(ran):
    numbers = ran.numbers
    assert numbers.keys() == set(KEYS.split())
    whole, cached = numbers["ids"].values()
    assert whole == cached == numbers["generated"] == numbers["streamed"]
    assert whole[:3] == PROMPT
    assert len(whole) == len(PROMPT) + STEPS
    # Sampled: that a single token repeated agrees would show little.
    assert len(set(whole[3:])) > 1
    difference, change, largest = (numbers[name] for name in (*KEYS.split()[-2:], "largest_logit"))
    # Sums of float32 in another order.
    assert difference < 1e-5 * largest
    assert change > 1000 * difference
    for sentence in (
        f"The first, at temperature 1 with seed 17: {', '.join(map(str, whole[3:]))}.",
        "With a cache 5 of 5 are the same, and 5 by model.generate",
        "and 5 by stream, which",
        f"differ by at most {difference:.1g}, where they reach {largest:.1f}: rounding.",
        f"the last logits change by up to {change:.2g}: the past matters",
    ):
        assert sentence in ran.text


def test_a_cache_whose_positions_do_not_move_would_show(model):
    def window(token_ids):
        return model(token_ids)[:, -1]

    def stuck(token_ids, positions, cache):
        logits, cache = model(token_ids, cache=cache, positions=tf.minimum(positions, 2))
        return logits[:, -1], cache

    def choose(logits, position):
        return sample(logits, temperature=1.0, seed=17, position=position).numpy()

    _, right, *_ = lesson.write_without_cache(window, [1, 2, 3], 4, choose)
    _, wrong, *_ = lesson.write_with_cache(stuck, model.make_cache(1, 7), [1, 2, 3], 4, choose)
    np.testing.assert_allclose(wrong[0], right[0], rtol=0, atol=1e-5)
    assert np.max(np.abs(wrong[1:] - right[1:])) > 1e-3


def test_work_counted_by_hand(ran):
    work, times = ran.numbers["work"], ran.numbers["milliseconds"]
    assert work["computed"] == dict(zip(WAYS, ([3, 4, 5, 6, 7], [3, 1, 1, 1, 1]), strict=True))
    assert work["keys"] == dict(zip(WAYS, ([3, 4, 5, 6, 7], [8, 8, 8, 8, 8]), strict=True))
    # Of width 256: 4 * 65536 for the projections, 2 * 256 * 1024 for the MLP, 512 a key, in each of
    # two blocks; 256 * 256 at the end.
    each = 2 * (262144 + 524288) + 65536
    without = [length * (each + 2 * 512 * length) for length in (3, 4, 5, 6, 7)]
    cached = [positions * (each + 2 * 512 * 8) for positions in (3, 1, 1, 1, 1)]
    assert work["multiply_adds"] == dict(zip(WAYS, (without, cached), strict=True))
    assert all(len(of_steps) == STEPS and min(of_steps) > 0 for of_steps in times.values())
    slow, fast = (sum(times[way]) for way in WAYS)
    share = sum(without) / sum(cached)
    for sentence in (
        "5 x (3 + 7) / 2 = 25, since each step reads one more; cached 3 + 4 = 7",
        "A cached step meets all 8 slots",
        f"{share:.1f} to 1, times {slow / fast:.1f} to 1",
        f"all 25 7 {sum(without) / 1e6:.2f} {sum(cached) / 1e6:.2f} {slow:.2f} {fast:.2f}",
        f"made {share:.1f} times as many multiply-adds as the one with it",
    ):
        assert sentence in ran.text


@pytest.mark.parametrize(("positions", "slots"), [(127, None), (130, None), (1, 130), (3, 130)])
def test_the_formula_agrees_with_the_matrix_products_in_a_graph(model, positions, slots):
    # With the weights, a window is one matrix, as the formula has it, and not strips of one.
    arguments = {"return_attention_scores": True}
    if slots is not None:
        arguments |= {"positions": tf.range(positions), "cache": model.make_cache(1, slots)}
    function = tf.function(lambda ids: model(ids, **arguments), autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec((1, positions), tf.int32)).graph
    total = 0
    for operation in graph.get_operations():
        if operation.type == "MatMul" or operation.type.startswith("BatchMatMul"):
            transposed = "transpose_a" if operation.type == "MatMul" else "adj_x"
            axis = -2 if operation.get_attr(transposed) else -1
            total += operation.outputs[0].shape.num_elements() * operation.inputs[0].shape[axis]
    assert total == lesson.multiply_adds(model, positions, slots or positions)


def test_what_the_cache_holds(ran):
    cache = ran.numbers["cache"]
    # Keys and values of two blocks, 8 slots, width 256, 4 bytes.
    size, of_weights = 2 * 2 * 8 * 256 * 4, 4 * ran.numbers["sizes"]["parameters"]
    difference = cache["difference_of_keys"]
    assert difference < 1e-5
    assert cache == {
        **{"tensors": 4, "shape": [1, 4, 8, 64], "written": 7, "largest_behind": 0.0},
        **{"bytes": size, "bytes_by_formula": size, "bytes_of_weights": of_weights},
        "difference_of_keys": difference,
    }
    for sentence in (
        "4 tensors of shape (B, H, S, K) = (1, 4, 8, 64)",
        "32,768 bytes: 2 x 2 blocks x 8 slots x width 256 x 4 bytes.",
        f"as much as {of_weights / 4096:,.0f} slots.",
        f"those in the cache by at most {difference:.1g}.",
        "The price is memory: 32 KiB.",
    ):
        assert sentence in ran.text


def test_unequal_prompts_share_a_batch_and_garbage_behind_them_changes_nothing(ran):
    batch = ran.numbers["batch"]
    difference = batch["difference_of_logits"]
    assert difference < 1e-4
    assert batch == {
        **{"lengths": [2, 5, 9], "stale": [6, 3, 0], "slots": 13},
        **{"change_by_garbage": 0.0, "difference_of_logits": difference},
    }
    for sentence in (
        "2 ##+xxxxxx.... 5 #####+xxx.... 9 #########+...",
        f"differ by at most {difference:.1g} from those of each",
        "With 1,000,000 in all slots behind the prompts, logits change by 0.",
    ):
        assert sentence in ran.text


def test_a_step_gives_weight_to_the_slots_up_to_its_own_and_exactly_none_to_the_others(model):
    lengths, ones = np.array([2, 5, 9])[:, None], np.ones((3, 9), "int32")
    _, cache = model(ones, cache=model.make_cache(3, 13), positions=np.arange(9))
    given = {"cache": cache, "positions": lengths, "return_attention_scores": True}
    _, weights, _ = model(ones[:, :1], **given)
    weights = weights[0].numpy()[:, :, 0]  # (B, H, S)
    seen = np.broadcast_to(np.arange(13) <= lengths[:, None], weights.shape)
    assert np.all(weights[~seen] == 0.0)
    assert np.all(weights[seen] > 0.0)


def test_the_picture_shows_a_triangle_and_a_diagonal(ran, monkeypatch):
    assert (ran.folder / "cache.png").read_bytes().startswith(b"\x89PNG")
    work, times = ran.numbers["work"], ran.numbers["milliseconds"]
    steps = {
        name: {way: np.array(of_steps) for way, of_steps in work[name].items()}
        for name in ("computed", "multiply_adds")
    }
    monkeypatch.setattr(lesson, "plot_cached_steps", lambda *given: given)
    computed, held, costs, title = lesson.draw(work | steps, times)
    assert title == "Keys computed in 5 steps: 25 and 7"
    triangle = np.tri(5, 7, 2, dtype=bool)
    first = np.arange(5)[:, None] == 0
    np.testing.assert_array_equal(computed[WAYS[0]], triangle)
    np.testing.assert_array_equal(held[WAYS[0]], triangle & False)
    np.testing.assert_array_equal(computed[WAYS[1]], (triangle & first) | np.eye(5, 7, 2, dtype=bool))
    np.testing.assert_array_equal(held[WAYS[1]], np.tri(5, 7, 1, dtype=bool) & ~first)
    millions, milliseconds = costs.values()
    assert milliseconds == times
    for way, made in work["multiply_adds"].items():
        np.testing.assert_allclose(millions[way], np.array(made) / 1e6)

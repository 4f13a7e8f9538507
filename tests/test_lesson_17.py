"""Lesson 17 counts right, its sentences are true, and a batch writes what each row writes alone."""

import lesson_17_kv_cache as lesson
import numpy as np
import pytest
import tensorflow as tf

import keras_tinyattn
from keras_tinyattn import sample

PROMPT, STEPS = [84, 104, 101], 5
WAYS = ["without a cache", "with a cache"]
PROMPTS = [[5, 9], [1, 2, 3, 4, 5], [10, 9, 8, 7, 6, 5, 4, 3, 2]]
LENGTHS = np.array([2, 5, 9])


@pytest.fixture
def ran(run_lesson):
    options = ("--prompt", "The", "--steps", STEPS, "--plot", "{}/cache.png")
    return run_lesson("lesson_17_kv_cache", *options)


@pytest.fixture
def numbers(ran):
    return ran.numbers


@pytest.fixture(scope="module")
def model():
    """A small one, whose logits depend on all that it reads."""
    model = keras_tinyattn.gpt(11, sequence_length=130, hidden_dim=6, num_heads=2, num_layers=2)
    model.build((None, None))
    for variable in model.trainable_variables:
        if len(variable.shape) == 2:
            variable.assign(tf.random.stateless_normal(variable.shape, (1, 2)))
    return model


def choose(logits, position):
    return sample(logits, 1.0, seed=17, position=position).numpy()


# The same tokens


def test_the_loops_generate_and_stream_write_the_same_tokens(ran, numbers):
    whole, cached = numbers["ids"].values()
    assert whole == cached == numbers["generated"] == numbers["streamed"]
    assert whole[:3] == PROMPT
    assert len(whole) == len(PROMPT) + STEPS
    # Sampled: that a single token repeated agrees would show little.
    assert len(set(whole[3:])) > 1
    # Sums of float32 in another order; logits reach about 6.
    difference, change = numbers["difference_of_logits"], numbers["change_by_first_token"]
    assert difference < 1e-5 * numbers["largest_logit"]
    assert change > 1000 * difference
    assert f"The first, at temperature 1 with seed 17: {', '.join(map(str, whole[3:]))}." in ran.text
    assert "With a cache 5 of 5 are the same, and 5 by model.generate" in ran.text
    assert "and 5 by stream, which" in ran.text
    largest = numbers["largest_logit"]
    assert f"differ by at most {difference:.1g}, where they reach {largest:.1f}: rounding." in ran.text
    assert f"the last logits change by up to {change:.2g}: the past matters" in ran.text


def test_a_cache_whose_positions_do_not_move_would_show(model):
    def window(token_ids):
        return model(token_ids)[:, -1]

    def stuck(token_ids, positions, cache):
        logits, cache = model(token_ids, cache=cache, positions=tf.minimum(positions, 2))
        return logits[:, -1], cache

    _, right, *_ = lesson.write_without_cache(window, [1, 2, 3], 4, choose)
    _, wrong, *_ = lesson.write_with_cache(stuck, model.make_cache(1, 7), [1, 2, 3], 4, choose)
    np.testing.assert_allclose(wrong[0], right[0], rtol=0, atol=1e-5)
    assert np.max(np.abs(wrong[1:] - right[1:])) > 1e-3


# The work


def test_work_counted_by_hand(ran, numbers):
    work = numbers["work"]
    assert work["computed"] == dict(zip(WAYS, ([3, 4, 5, 6, 7], [3, 1, 1, 1, 1]), strict=True))
    assert work["keys"] == dict(zip(WAYS, ([3, 4, 5, 6, 7], [8, 8, 8, 8, 8]), strict=True))
    # Of width 256: 4 * 65536 for the projections, 2 * 256 * 1024 for the MLP, 512 a key, in each of
    # two blocks; 256 * 256 at the end.
    each = 2 * (262144 + 524288) + 65536
    without = [length * (each + 2 * 512 * length) for length in (3, 4, 5, 6, 7)]
    cached = [positions * (each + 2 * 512 * 8) for positions in (3, 1, 1, 1, 1)]
    assert work["multiply_adds"] == dict(zip(WAYS, (without, cached), strict=True))
    assert "5 x (3 + 7) / 2 = 25, since each step reads one more; cached 3 + 4 = 7" in ran.text
    assert "A cached step meets all 8 slots" in ran.text
    share = sum(without) / sum(cached)
    assert f"made {share:.1f} times as many multiply-adds as the one with it" in ran.text
    times = numbers["milliseconds"]
    assert all(len(of_steps) == STEPS and min(of_steps) > 0 for of_steps in times.values())
    totals = [sum(of_steps) for of_steps in times.values()]
    assert f"{share:.1f} to 1, times {totals[0] / totals[1]:.1f} to 1" in ran.text
    sums = f"{sum(without) / 1e6:.2f} {sum(cached) / 1e6:.2f} {totals[0]:.2f} {totals[1]:.2f}"
    assert f"all 25 7 {sums}" in ran.text


@pytest.mark.parametrize(("positions", "slots"), [(127, None), (130, None), (1, 130), (3, 130)])
def test_the_formula_agrees_with_the_matrix_products_in_a_graph(model, positions, slots):
    counted = lesson.multiply_adds(model, positions, slots or positions)
    assert multiply_adds_in_graph(model, positions, slots) == counted


def multiply_adds_in_graph(model, positions, slots):
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
    return total


# The cache


def test_what_the_cache_holds(ran, numbers):
    cache = numbers["cache"]
    assert cache["shape"] == [1, 4, 8, 64]
    # Keys and values of two blocks, 8 slots, width 256, 4 bytes.
    assert cache["bytes"] == cache["bytes_by_formula"] == 2 * 2 * 8 * 256 * 4
    assert cache["bytes_of_weights"] == 4 * numbers["sizes"]["parameters"]
    assert cache["tensors"] == 4
    assert cache["written"] == 7
    assert cache["largest_behind"] == 0.0
    assert cache["difference_of_keys"] < 1e-5
    assert "4 tensors of shape (B, H, S, K) = (1, 4, 8, 64)" in ran.text
    assert "32,768 bytes: 2 x 2 blocks x 8 slots x width 256 x 4 bytes." in ran.text
    assert f"as much as {cache['bytes_of_weights'] / 4096:,.0f} slots." in ran.text
    assert f"those in the cache by at most {cache['difference_of_keys']:.1g}." in ran.text
    assert "The price is memory: 32 KiB." in ran.text


def test_unequal_prompts_share_a_batch_and_garbage_behind_them_changes_nothing(ran, numbers):
    batch = numbers["batch"]
    assert batch["difference_of_logits"] < 1e-4
    assert batch["change_by_garbage"] == 0.0
    assert (batch["lengths"], batch["stale"], batch["slots"]) == ([2, 5, 9], [6, 3, 0], 13)
    assert "2 ##+xxxxxx.... 5 #####+xxx.... 9 #########+..." in ran.text
    assert f"differ by at most {batch['difference_of_logits']:.1g} from those of each" in ran.text
    assert "With 1,000,000 in all slots behind the prompts, logits change by 0." in ran.text


def write_batch(model, spoil=None, steps=4):
    """Continue `PROMPTS` in one batch, as the lesson does: ids (B, steps), logits (steps, B, V)."""
    width = max(LENGTHS)
    padded = np.array([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS])
    cache = model.make_cache(len(PROMPTS), width + steps)
    logits, cache = model(padded, cache=cache, positions=np.arange(width))
    if spoil is not None:
        places = spoil(np.arange(width + steps)[:, None], LENGTHS[:, None, None, None])
        cache = [tuple(tf.where(places, 1e6, part) for part in entry) for entry in cache]
    logits = [tf.gather(logits, LENGTHS - 1, batch_dims=1)]
    ids = [choose(logits[0], LENGTHS)]
    for positions in (LENGTHS + step for step in range(steps - 1)):
        last, cache = model(ids[-1][:, None], cache=cache, positions=positions[:, None])
        logits.append(last[:, 0])
        ids.append(choose(logits[-1], positions + 1))
    return np.stack(ids, axis=1), np.array(logits)


def test_rows_of_a_batch_write_what_they_write_alone(model):
    ids, logits = write_batch(model)
    generated = model.generate(PROMPTS, 4, temperature=1.0, seed=17, jit_compile=False).token_ids
    for row, prompt in enumerate(PROMPTS):
        alone, alone_logits, *_ = lesson.write_without_cache(
            lambda token_ids: model(token_ids)[:, -1], prompt, 4, choose
        )
        assert [*prompt, *ids[row]] == alone == generated[row][: len(alone)].tolist()
        # Sums of float32 in another order.
        np.testing.assert_allclose(logits[:, row], alone_logits, rtol=0, atol=1e-4)
    assert len({tuple(row) for row in ids.tolist()}) == 3


def test_garbage_changes_logits_where_it_is_in_sight_and_nowhere_else(model):
    ids, logits = write_batch(model)
    spoiled_ids, spoiled = write_batch(model, lambda slot, length: slot >= length)
    np.testing.assert_array_equal(spoiled, logits)
    np.testing.assert_array_equal(spoiled_ids, ids)
    _, in_sight = write_batch(model, lambda slot, length: slot == 0)
    # The first logits come from the prompt, before the cache was spoiled.
    assert np.min(np.max(np.abs(in_sight - logits)[1:], axis=-1)) > 1e-4


def test_a_step_gives_weight_to_the_slots_up_to_its_own_and_exactly_none_to_the_others(model):
    cache = model.make_cache(len(PROMPTS), 13)
    ones = np.ones((3, 9), "int32")
    _, cache = model(ones, cache=cache, positions=np.arange(9))
    _, weights, _ = model(
        ones[:, :1], cache=cache, positions=LENGTHS[:, None], return_attention_scores=True
    )
    weights = weights[0].numpy()[:, :, 0]  # (B, H, S)
    seen = np.broadcast_to(np.arange(13) <= LENGTHS[:, None, None], weights.shape)
    assert np.all(weights[~seen] == 0.0)
    assert np.all(weights[seen] > 0.0)


# The picture and the command


def test_the_picture_shows_a_triangle_and_a_diagonal(ran, numbers):
    assert (ran.folder / "cache.png").read_bytes().startswith(b"\x89PNG")
    work = {
        name: {way: np.array(of_steps) for way, of_steps in numbers["work"][name].items()}
        for name in ("computed", "multiply_adds")
    }
    figure = lesson.draw(work | {"slots": numbers["work"]["slots"]}, numbers["milliseconds"])
    assert figure.get_suptitle() == "Keys computed in 5 steps: 25 and 7"
    whole, cached, costs, times = figure.axes

    def cells(axes):
        return [~np.ma.getmaskarray(image.get_array()) for image in axes.images]

    def labels(axes):
        return [line.get_label() for line in axes.lines]

    held, computed = cells(whole)
    assert labels(whole) == ["computed"]
    np.testing.assert_array_equal(computed, np.tri(5, 7, 2, dtype=bool))
    assert not held.any()
    held, computed = cells(cached)
    assert labels(cached) == ["in the cache", "computed"]
    assert not held[0].any()
    np.testing.assert_array_equal(held[1:], np.tri(4, 7, 2, dtype=bool))
    assert computed[0].tolist() == [True] * 3 + [False] * 4
    np.testing.assert_array_equal(computed[1:], np.eye(4, 7, 3, dtype=bool))
    for axes, drawn in (
        (costs, {way: made / 1e6 for way, made in work["multiply_adds"].items()}),
        (times, numbers["milliseconds"]),
    ):
        assert labels(axes) == WAYS
        for line in axes.lines:
            np.testing.assert_allclose(line.get_ydata(), drawn[line.get_label()])


def test_every_option_has_a_help_text(explains_every_option):
    explains_every_option(lesson, at_least=6)


@pytest.mark.parametrize(
    ("options", "received", "allowed"),
    [
        (["--prompt", ""], "0", "from 1 to 255"),
        (["--prompt", "\N{SNOWMAN}" * 86], "258", "from 1 to 255"),
        (["--steps", "0"], "0", "from 1 to 245"),
        (["--steps", "246"], "246", "from 1 to 245"),
        (["--seed", "-1"], "-1", "from 0 to 2147483647"),
        (["--temperature", "-0.5"], "-0.5", "0 or more"),
        (["--temperature", "nan"], "nan", "finite"),
        (["--temperature", "inf"], "inf", "finite"),
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
        (["--plot", "{}/a.txt"], "a.txt", ".png or .svg or .pdf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(
    options, received, allowed, refuses, monkeypatch
):
    monkeypatch.setattr(lesson, "make_model", lambda _: pytest.fail("the work was begun"))
    refuses(lesson, options, received, allowed)

"""Logits become the next id with the right probability, and alike on every path."""

import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn import filter_logits, sample
from keras_tinyattn.sampling import _gumbel_noise, _scale

LOGITS = np.log([[0.4, 0.3, 0.15, 0.1, 0.05]]).astype("float32")


def many(logits, rows=20_000, **settings):
    """How often each id is drawn by many seeds, one a row."""
    logits = tf.tile(tf.constant(logits), (rows, 1))
    drawn = sample(logits, seed=np.arange(rows) - rows // 2, **settings)
    return np.bincount(drawn.numpy(), minlength=logits.shape[1])


def chi_square(counts, probabilities):
    expected = counts.sum() * np.asarray(probabilities)
    assert not counts[expected == 0].any()
    likely = expected > 0
    return np.sum((counts[likely] - expected[likely]) ** 2 / expected[likely])


def test_greedy_takes_the_likeliest_and_of_equal_ones_the_lowest_id():
    logits = tf.constant([[0.0, 3.0, 1.0, 3.0], [2.0, -1.0, 2.0, 2.0]])
    assert sample(logits, seed=7).numpy().tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_a_token_is_drawn_with_its_softmax_probability(temperature):
    probabilities = np.exp(LOGITS[0] / temperature)
    probabilities /= probabilities.sum()
    # Four degrees of freedom: beyond 28 once in 100,000 runs of a true generator.
    assert chi_square(many(LOGITS, temperature=temperature), probabilities) < 28


def test_the_positions_of_one_seed_are_independent_draws():
    rows = 20_000
    logits = tf.tile(tf.constant(LOGITS), (rows, 1))
    drawn = sample(logits, temperature=1.0, seed=5, position=np.arange(rows)).numpy()
    assert chi_square(np.bincount(drawn, minlength=5), np.exp(LOGITS[0])) < 28
    pairs = np.bincount(drawn[:-1] * 5 + drawn[1:], minlength=25)
    # 24 degrees of freedom: beyond 62 about once in 30,000 runs.
    assert chi_square(pairs, np.outer(np.exp(LOGITS[0]), np.exp(LOGITS[0])).ravel()) < 62


def test_top_k_and_top_p_keep_what_the_definition_says():
    kept = np.isfinite(filter_logits(tf.constant(LOGITS), top_k=3))[0].tolist()
    assert kept == [True, True, True, False, False]
    # 0.4 is less than 0.69, 0.4 + 0.3 is not.
    kept = np.isfinite(filter_logits(tf.constant(LOGITS), top_p=0.69))[0].tolist()
    assert kept == [True, True, False, False, False]
    both = np.isfinite(filter_logits(tf.constant(LOGITS), top_k=1, top_p=0.99))[0]
    assert both.tolist() == [True, False, False, False, False]


def test_of_equal_logits_the_filter_keeps_the_lower_ids():
    equal = tf.constant([[1.0, 2.0, 2.0, 2.0]])
    assert np.isfinite(filter_logits(equal, top_k=2))[0].tolist() == [False, True, True, False]


def test_filtered_draws_follow_the_renormalised_distribution():
    counts = many(LOGITS, temperature=1.0, top_k=4, top_p=0.75)
    assert chi_square(counts, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]) < 28


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_k": 10}, {"top_p": 1.0}])
def test_a_filter_that_keeps_all_changes_no_draw(settings):
    logits = tf.tile(tf.constant(LOGITS), (500, 1))
    seeds = np.arange(500)
    plain = sample(logits, temperature=1.0, seed=seeds).numpy()
    assert np.array_equal(sample(logits, temperature=1.0, seed=seeds, **settings), plain)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}])
def test_a_filter_that_keeps_one_is_greedy(settings):
    assert many(LOGITS, rows=500, temperature=5.0, **settings).tolist() == [500, 0, 0, 0, 0]


def test_extreme_temperatures_are_greedy_and_uniform():
    assert many(LOGITS, rows=500, temperature=1e-6).tolist() == [500, 0, 0, 0, 0]
    assert many(LOGITS, rows=500, temperature=1e-40).tolist() == [500, 0, 0, 0, 0]
    assert chi_square(many(LOGITS, temperature=1e6), [0.2] * 5) < 28


def test_large_logits_of_half_precision_are_drawn_without_overflow():
    logits = tf.constant([[60000.0, 59000.0, -60000.0]])
    for dtype in (tf.float16, tf.bfloat16):
        drawn = sample(tf.cast(logits, dtype), temperature=0.5, seed=3)
        assert drawn.numpy().tolist() == [0]


def test_a_row_draws_the_same_whatever_stands_beside_it():
    logits = tf.constant(np.random.default_rng(0).normal(size=(6, 11)).astype("float32"))
    settings = {
        "temperature": np.array([0.0, 0.5, 1.0, 2.0, 1.0, 1.0], "float32"),
        "top_k": np.array([0, 3, 0, 5, 0, 11]),
        "top_p": np.array([1.0, 1.0, 0.5, 0.9, 1.0, 1.0], "float32"),
        "seed": np.array([-1, 2, 3, 4, 5, 5]),
    }
    together = sample(logits, **settings, position=9).numpy()
    for row in range(6):
        alone = {key: value[row : row + 1] for key, value in settings.items()}
        assert sample(logits[row : row + 1], **alone, position=9).numpy()[0] == together[row]


def test_two_seeds_and_two_positions_differ():
    logits = tf.zeros((2, 1000))
    one, other = sample(logits, temperature=1.0, seed=[1, 2]).numpy()
    assert one != other
    one, other = sample(logits, temperature=1.0, seed=1, position=[1, 2]).numpy()
    assert one != other


def test_eager_graph_and_xla_draw_the_same_ids(on_every_path):
    rows = 2000
    logits = tf.constant(np.random.default_rng(1).normal(size=(rows, 11)).astype("float32"))
    temperature = tf.constant(np.linspace(0, 2, rows).astype("float32"))
    seeds = tf.range(rows) - 1000

    def draw(logits, temperature, seeds):
        return sample(logits, temperature=temperature, top_k=7, top_p=0.9, seed=seeds, position=seeds)

    (_, eager), *others = on_every_path(draw, logits, temperature, seeds)
    for path, drawn in others:
        # Noise of another rounding decides only where two candidates are closer than 1e-6.
        assert np.mean(drawn.numpy() != eager.numpy()) < 1e-3, path


def test_the_noise_is_finite_for_every_seed():
    seeds = tf.constant([-(2**31), -1, 0, 1, 2**31 - 1])
    noise = _gumbel_noise(seeds, tf.zeros(5, tf.int32), 200_000).numpy()
    assert np.isfinite(noise).all()
    assert len(np.unique(noise[0] == noise[1])) <= 2
    assert np.mean(noise[0] == noise[1]) < 1e-3
    # Gumbel's distribution: mean 0.5772, variance pi^2 / 6; a million draws give three digits.
    assert abs(noise.mean() - 0.5772) < 5e-3
    assert abs(noise.var() - np.pi**2 / 6) < 1e-2


def test_a_seed_and_a_position_draw_what_they_always_drew():
    # Recorded: a text that was drawn from a seed is drawn from it by later versions too.
    drawn = sample(tf.zeros((4, 1000)), temperature=1.0, seed=[3, 5, 3, -1], position=[5, 3, 6, 0])
    assert drawn.numpy().tolist() == [92, 982, 904, 279]


def kept_by_the_definitions(logits, top_k, top_p, min_p):
    """Which tokens of a row the three filters leave, one token after the other."""
    probabilities = np.exp(logits - logits.max())
    probabilities = (probabilities / probabilities.sum()).astype("float32")
    # The likeliest first, of equal ones the lower id.
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = np.zeros(len(logits), bool)
    for rank, token in enumerate(order):
        kept[token] = rank == 0 or (
            (top_k == 0 or rank < top_k)
            and (top_p == 1 or probabilities[order[:rank]].sum() < top_p)
            and probabilities[token] >= min_p * probabilities[order[0]]
        )
    return kept


def test_min_p_alone_and_with_the_other_filters_keeps_what_the_definition_says(on_every_path):
    draw = np.random.default_rng(3)
    grid = [(k, p, m) for k in (0, 1, 4) for p in (0.3, 0.8, 1.0) for m in (0.0, 0.1, 0.5, 1.0)]
    logits = draw.normal(size=(len(grid), 11)).astype("float32") * 2
    logits[::3, 4] = logits[::3].max(1)  # In some rows two are the likeliest.
    top_k, top_p, min_p = (np.array(column) for column in zip(*grid, strict=True))
    expected = [kept_by_the_definitions(row, *given) for row, given in zip(logits, grid, strict=True)]
    inputs = (logits, top_k.astype("int32"), top_p.astype("float32"), min_p.astype("float32"))
    for path, filtered in on_every_path(filter_logits, *map(tf.constant, inputs)):
        assert np.array_equal(np.isfinite(filtered), expected), path
        assert np.array_equal(filtered.numpy()[expected], logits[expected]), path
    # A row each at the edges: all, and the likeliest alone, of which there may be two.
    assert np.all(expected[grid.index((0, 1.0, 0.0))])
    assert sum(expected[grid.index((0, 1.0, 1.0))]) == 1 + (grid.index((0, 1.0, 1.0)) % 3 == 0)


def test_a_token_at_the_very_share_of_min_p_stays():
    # exp(0), exp(-0) and a quarter of it, exact in float32.
    logits = tf.constant([[0.0, 0.0, float(np.log(0.25)), -1.0, -2.0]])
    quarter = float(tf.nn.softmax(logits)[0, 2] / tf.nn.softmax(logits)[0, 0])
    assert np.isfinite(filter_logits(logits, min_p=1.0))[0].tolist() == [True, True] + [False] * 3
    assert np.isfinite(filter_logits(logits, min_p=quarter))[0].tolist()[2]
    assert not np.isfinite(filter_logits(logits, min_p=quarter + 1e-4))[0, 2]


def test_min_p_counts_on_the_distribution_at_the_temperature():
    # 0.4 : 0.1 is a quarter, at temperature 0.5 a sixteenth.
    assert many(LOGITS, rows=2000, temperature=1.0, min_p=0.2)[3] > 0
    assert many(LOGITS, rows=2000, temperature=0.5, min_p=0.2)[3] == 0
    assert many(LOGITS, rows=2000, temperature=5.0, min_p=1.0).tolist() == [2000, 0, 0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_logits_that_are_not_finite_are_refused_and_minus_one_where_nothing_can_raise(bad, settings):
    logits = tf.constant([[0.0, 2.0, 1.0], [0.0, bad, 1.0]])
    with pytest.raises(ValueError, match="The logits are not finite"):
        sample(logits, **settings)
    graph = tf.function(lambda x: sample(x, **settings))
    with pytest.raises(tf.errors.InvalidArgumentError, match="The logits are not finite"):
        graph(logits)
    compiled = tf.function(lambda x: sample(x, **settings), jit_compile=True)
    first, second = compiled(logits).numpy()
    assert (first, second) == (sample(logits[:1], **settings).numpy()[0], -1)


def test_no_temperature_makes_an_infinity():
    logits = tf.constant([[5.0, -5.0, 0.0]] * 3)
    assert np.isfinite(_scale(logits, tf.constant([0.0, 1e-38, 3e38]))).all()
    moderate = _scale(logits, tf.constant([0.1, 1.0, 30.0]))
    # Bit for bit what a plain division gives.
    assert np.array_equal(moderate, (logits - 5.0) / tf.constant([[0.1], [1.0], [30.0]]))

"""Pictures show the numbers that they were given, legibly."""

import io
import sys

import keras
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from keras_tinyattn import CausalSelfAttention, ScaledSelfAttention
from keras_tinyattn.plotting import (
    plot_attention,
    plot_cached_steps,
    plot_distributions,
    plot_trace,
)

T, S, D, H, K = 3, 5, 6, 2, 4
CAT = ["The", "cat", "sat"]


def maps(figure):
    return [axes for axes in figure.axes if axes.images]


def numbers(axes):
    """The text of each cell by (row, column)."""
    return {
        (int(text.get_position()[1]), int(text.get_position()[0])): text.get_text()
        for text in axes.texts
        if text.get_transform() == axes.transData
    }


def labels(axes):
    return (
        [label.get_text() for label in axes.get_yticklabels()],
        [label.get_text() for label in axes.get_xticklabels()],
    )


def trace(tokens=3, scale=1.0):
    layer = ScaledSelfAttention(head_dim=K, num_heads=H)
    layer.build((None, None, D))
    x = scale * np.random.default_rng(2).normal(size=(2, tokens, D)).astype("float32")
    return layer.trace(x)


def test_without_matplotlib_a_picture_says_what_to_install(monkeypatch):
    # test_import says that importing the module does not need it.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "keras-tinyattn\[plot\]"'):
        plot_attention([[1.0]], ["a"])


def test_each_cell_shows_its_weight_and_an_exact_zero_shows_none():
    figure = plot_attention([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.125, 0.8746, 0.0004]], CAT)
    (axes,) = maps(figure)
    assert numbers(axes) == {
        (0, 0): "100.0%", (1, 0): "25.0%", (1, 1): "75.0%",
        (2, 0): "12.5%", (2, 1): "87.5%", (2, 2): "0.0%",
    }  # fmt: skip
    grey = axes.images[1].get_array()
    np.testing.assert_array_equal(grey.mask, np.tril(np.ones((3, 3), bool)))


def test_queries_label_the_rows_and_keys_the_columns():
    keys = ["a", "b", "c", "d", "e"]
    (axes,) = maps(plot_attention(np.full((T, S), 1 / S), CAT, keys))
    assert labels(axes) == (CAT, keys)
    assert axes.get_ylabel().startswith("query")
    assert axes.get_xlabel().startswith("key")
    assert axes.images[0].get_array().shape == (T, S)


def test_each_head_has_a_map_in_order():
    weights = np.zeros((H, T, T))
    weights[0] = np.eye(T)
    weights[1] = np.eye(T)[::-1]
    figure = plot_attention(weights, CAT, title="Two heads")
    first, second = maps(figure)
    assert (first.get_title(), second.get_title()) == ("head 1", "head 2")
    assert set(numbers(first)) == {(0, 0), (1, 1), (2, 2)}
    assert set(numbers(second)) == {(0, 2), (1, 1), (2, 0)}
    assert figure.get_suptitle() == "Two heads"


def test_more_than_four_heads_take_several_rows_and_leave_no_empty_frame():
    figure = plot_attention(np.full((6, T, T), 1 / T), CAT)
    assert len(maps(figure)) == 6
    assert len(figure.axes) == 8
    assert not any(axes.axison for axes in figure.axes[6:])


def test_weights_keep_one_scale_from_0_to_1_so_that_pictures_can_be_compared():
    (axes,) = maps(plot_attention(np.full((T, T), 0.1), CAT))
    assert axes.images[0].get_clim() == (0.0, 1.0)


def test_a_trace_is_drawn_as_raw_scores_scaled_scores_and_weights_of_the_chosen_head():
    traced = trace()
    raw, scaled, weights = maps(plot_trace(traced, CAT, head=1, batch=1))
    for axes, tensor in (
        (raw, traced.raw_scores), (scaled, traced.scaled_scores), (weights, traced.weights),
    ):  # fmt: skip
        np.testing.assert_allclose(axes.images[0].get_array(), tensor[1, 1])
        assert labels(axes) == (CAT, CAT)
    assert numbers(raw)[1, 2] == f"{traced.raw_scores[1, 1, 1, 2]:.2f}"
    assert numbers(weights)[1, 2] == f"{traced.weights[1, 1, 1, 2]:.1%}"
    assert [axes.get_title() for axes in (raw, scaled, weights)] == [
        "Raw scores", "Scaled scores", "Weights",
    ]  # fmt: skip


def test_raw_and_scaled_scores_share_a_scale_that_is_white_at_zero():
    traced = trace()
    raw, scaled, _ = maps(plot_trace(traced, CAT))
    limit = float(np.max(np.abs(traced.raw_scores[0, 0])))
    assert raw.images[0].get_clim() == scaled.images[0].get_clim() == (-limit, limit)


def test_scores_that_are_all_zero_or_infinite_can_be_drawn():
    plot_trace(trace(scale=0.0), CAT).savefig(io.BytesIO(), format="png")
    traced = trace()
    broken = traced._replace(raw_scores=keras.ops.full((2, H, T, T), float("inf")))
    assert maps(plot_trace(broken, CAT))[0].images[0].get_clim() == (-1.0, 1.0)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 12])
def test_no_text_leaves_the_picture_or_its_cell(tokens):
    names = ["The", "elephant", "<eos>", "\n", " ", "é", "sat", "$x$", "a b", b"\xc3", "m", "W"][
        :tokens
    ]
    figure = plot_trace(trace(tokens), names, title="A title above the picture")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    # A margin of a twentieth of an inch at least.
    inside = figure.bbox.padded(-figure.dpi / 20)
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            box = text.get_window_extent(renderer)
            assert inside.x0 <= box.x0
            assert box.x1 <= inside.x1
            assert inside.y0 <= box.y0
            assert box.y1 <= inside.y1
    for axes in maps(figure):
        cell = axes.get_window_extent(renderer).width / tokens
        texts = [text for text in axes.texts if text.get_transform() == axes.transData]
        assert len(texts) == tokens**2
        assert max(text.get_window_extent(renderer).width for text in texts) < cell


def test_long_windows_show_colours_with_a_bar_and_no_numbers():
    weights = CausalSelfAttention(head_dim=K)(
        np.random.default_rng(3).normal(size=(1, 60, D)).astype("float32"), return_attention_scores=True
    )[1]
    figure = plot_attention(weights[0, 0], [str(index) for index in range(60)])
    (axes, _), count = figure.axes, len(labels(figure.axes[0])[0])
    assert numbers(axes) == {}
    assert count == 30
    assert labels(axes)[0][:3] == ["0", "2", "4"]


def test_white_space_and_control_characters_in_labels_are_visible():
    (axes,) = maps(plot_attention(np.eye(4), [" the", "\n", "\x00", b"caf\xc3\xa9"]))
    assert labels(axes)[0] == ["\u2423the", "\\n", "\\x00", "café"]


def test_a_dollar_sign_in_a_label_does_not_begin_a_formula():
    figure = plot_attention(np.eye(2), ["$x_$", "$"], title="$\\frac$")
    figure.savefig(io.BytesIO(), format="png")
    assert labels(figure.axes[0])[0] == ["$x_$", "$"]


def test_half_precision_weights_can_be_drawn():
    weights = keras.ops.cast([[0.5, 0.5], [0.25, 0.75]], "bfloat16")
    (axes,) = maps(plot_attention(weights, ["a", "b"]))
    assert numbers(axes)[1, 1] == "75.0%"


def test_labels_that_do_not_fit_and_weights_of_a_whole_batch_are_refused():
    with pytest.raises(ValueError, match=r"Expected 3 query_tokens, one per row\. Received: 2 labels"):
        plot_attention(np.full((T, S), 1 / S), CAT[:2], list("abcde"))
    with pytest.raises(ValueError, match=r"Expected 5 key_tokens, one per column\. Received: 3 labels"):
        plot_attention(np.full((T, S), 1 / S), CAT)
    with pytest.raises(ValueError, match=r"Expected 2 head_titles, one per head\. Received: 1 labels"):
        plot_attention(np.full((H, T, T), 1 / T), CAT, head_titles=["one"])
    with pytest.raises(ValueError, match=r"Received: shape \(1, 2, 3, 3\)\. Pick one"):
        plot_attention(np.full((1, H, T, T), 1 / T), CAT)


def test_each_distribution_has_a_panel_with_a_bar_for_each_token():
    before = [0.5, 0.3, 0.2]
    figure = plot_distributions(
        [[0.7, 0.3, 0.0], before], CAT, ["cold", "as it is"], before, drawn=[[0.8, 0.2, 0.0], before]
    )
    cold, same = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["cold", "as it is"]
    assert labels(cold)[0] == CAT
    assert cold.get_ylim()[0] > cold.get_ylim()[1]  # The first token is on top.
    bars, outlines = cold.containers
    assert [bar.get_width() for bar in bars] == [0.7, 0.3, 0.0]
    assert [bar.get_width() for bar in outlines] == before
    assert [text.get_text() for text in cold.texts] == ["70.0%", "30.0%"]
    # One scale, so that panels can be compared.
    assert cold.get_xlim() == same.get_xlim()
    assert cold.get_xlim()[1] > 0.8
    (dots,) = cold.lines
    assert dots.get_xdata().tolist() == [0.8, 0.2, None]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "share sampled",
        "sampled from",
        "before",
    ]


def test_a_sample_that_could_not_be_is_a_dot():
    figure = plot_distributions([[1.0, 0.0]], CAT[:2], drawn=[[0.75, 0.25]])
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0.75, 0.25]


def test_four_distributions_take_two_rows_and_leave_no_empty_frame():
    figure = plot_distributions([[0.4, 0.6]] * 4, CAT[:2])
    assert [axes.axison for axes in figure.axes] == [True] * 4 + [False] * 2
    assert figure.legends == []


def test_distributions_need_a_label_for_each_token_and_a_title_for_each_panel():
    with pytest.raises(ValueError, match=r"Expected 2 tokens, one per column\. Received: 3 labels"):
        plot_distributions([[0.4, 0.6]], CAT)
    with pytest.raises(ValueError, match=r"Expected 1 titles, one per row\. Received: 2 labels"):
        plot_distributions([[0.4, 0.6]], CAT[:2], ["a", "b"])


def test_cached_steps_have_a_map_for_each_method_and_a_curve_for_each_cost():
    computed = {"whole": [[True, False], [True, True]], "cache": [[True, False], [False, True]]}
    held = {"whole": [[False, False]] * 2, "cache": [[False, False], [True, False]]}
    figure = plot_cached_steps(
        computed, held, {"keys": {"whole": [1, 2], "cache": [1, 1]}}, title="Keys"
    )
    whole, cache, curves, empty = figure.axes
    assert [axes.get_title() for axes in (whole, cache, curves)] == ["whole", "cache", "keys"]
    assert not empty.axison
    for axes, name in ((whole, "whole"), (cache, "cache")):
        found, made = (~np.ma.getmaskarray(image.get_array()) for image in axes.images)
        assert found.tolist() == held[name]
        assert made.tolist() == computed[name]
        # The first step on top, the first position on the left, cells around whole numbers.
        assert axes.images[0].get_extent() == [-0.5, 1.5, 2.5, 0.5]
    by_name = {line.get_label(): line for line in curves.lines}
    assert by_name["whole"].get_ydata().tolist() == [1, 2]
    assert by_name["cache"].get_xdata().tolist() == [1, 2]
    # A method has one colour in maps and curves.
    for axes, name in ((whole, "whole"), (cache, "cache")):
        assert axes.lines[-1].get_color() == by_name[name].get_color()
    assert by_name["whole"].get_color() != by_name["cache"].get_color()

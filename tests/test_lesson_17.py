"""Lesson 17 counts right, and says what its numbers say."""

import copy
import importlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_tinyattn

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
PROMPT, STEPS = [84, 104, 101], 5


@pytest.fixture(scope="module", autouse=True)
def _scripts_can_be_imported():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


def lesson():
    return importlib.import_module("lesson_17_kv_cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The lesson as a user runs it, and the folder of its files."""
    folder = tmp_path_factory.mktemp("lesson_17")
    command = [sys.executable, SCRIPTS / "lesson_17_kv_cache.py", "--prompt", "The", "--steps", "5"]
    command += ["--json", folder / "numbers.json", "--plot", folder / "cache.png"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300), folder


@pytest.fixture(scope="module")
def numbers(finished):
    return json.loads((finished[1] / "numbers.json").read_text())


@pytest.fixture
def told(capsys):
    """What the lesson prints about these numbers, its line breaks and indents taken out."""

    def tell(numbers):
        capsys.readouterr()
        lesson().tell(numbers, importlib.import_module("_start").console())
        return " ".join(capsys.readouterr().out.split())

    return tell


def other(numbers, *path, value):
    """The numbers with another value at the end of a path of keys."""
    numbers = copy.deepcopy(numbers)
    place = numbers
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return numbers


# The same tokens


def test_the_loops_generate_and_stream_give_the_same_ids(numbers, told):
    whole, cached = numbers["ids"].values()
    assert whole == cached == numbers["generated"] == numbers["streamed"]
    assert whole[:3] == PROMPT
    assert len(whole) == len(PROMPT) + STEPS
    # Drawn, so that ids that agree by standing still would be no sign.
    assert len(set(whole[3:])) > 1
    assert numbers["ids_repeat"]
    # Sums of float32 in another order; logits reach about 6.
    assert numbers["difference_of_logits"] < 1e-4 < numbers["change_by_first_token"]
    text = told(numbers)
    assert "5 of 5 ids are the same with and without a cache." in text
    assert ": rounding." in text
    assert "gives the same ids; stream, which hands out each token at once, the same." in text


def test_where_ids_differ_the_lesson_says_so(numbers, told):
    ids = [*numbers["ids"]["with a cache"][:-1], 999]
    text = told(
        other(numbers, "ids", "with a cache", value=ids)
        | {"difference_of_logits": 0.5, "change_by_first_token": 0.7}
    )
    assert "4 of 5 ids are the same with and without a cache." in text
    assert "rounding" not in text
    assert "the past matters" not in text
    assert "gives other ids; stream, which hands out each token at once, others." in text
    assert "and wrote other ids; the logits differ by 0.5." in text


def test_a_cache_whose_positions_stand_still_would_show(monkeypatch):
    monkeypatch.setattr(lesson(), "HIDDEN_DIM", 8)
    model = lesson().make_model(3)
    window, step = lesson().make_functions(model)
    draw_token = lesson().make_draw(0.0, 0)
    right = lesson().write_without_cache(window, PROMPT, 4, draw_token)

    def stuck(token_ids, positions, cache):
        return step(token_ids, tf.minimum(positions, 2), cache)

    wrong = lesson().write_with_cache(model, stuck, PROMPT, 4, draw_token)
    np.testing.assert_allclose(wrong["logits"][0], right["logits"][0], rtol=0, atol=1e-5)
    assert np.max(np.abs(wrong["logits"][1:] - right["logits"][1:])) > 1e-3


# The work


def test_the_count_of_a_window_is_that_of_its_graph_however_long_it_is():
    model = keras_tinyattn.gpt(11, sequence_length=130, hidden_dim=6, num_heads=2, num_layers=1)
    model.build((None, 130))
    for positions, slots in ((127, None), (130, None), (1, 130)):
        counted = lesson().multiply_adds(model, positions, slots or positions)
        assert lesson().multiply_adds_in_graph(model, positions, slots) == counted


def test_work_counted_by_hand(numbers, told):
    work = numbers["work"]
    assert work["computed"] == {
        "without a cache": [3, 4, 5, 6, 7],
        "with a cache": [3, 1, 1, 1, 1],
    }
    # Of width 256: 4 * 65536 for the projections, 2 * 256 * 1024 for the perceptron, 512 a key, in each
    # of two blocks; 256 * 256 at the end.
    each = 2 * (262144 + 524288) + 65536
    assert work["multiply_adds"]["without a cache"] == [
        length * (each + 2 * 512 * length) for length in (3, 4, 5, 6, 7)
    ]
    assert work["multiply_adds"]["with a cache"] == [
        positions * (each + 2 * 512 * 8) for positions in (3, 1, 1, 1, 1)
    ]
    text = told(numbers)
    assert "Positions computed: 25, 5 x (3 + 7) / 2 = 25, since each step reads one more; and 7" in text
    assert "one a step, 3 + 4 = 7. *" in text
    twice = other(numbers, "work", "computed", "with a cache", value=[3, 2, 2, 2, 2])
    assert "3 + 4 = 7: not what was computed." in told(twice)
    assert "it meets all 8 slots of the cache" in text


def test_the_formula_agrees_with_the_matrix_products_in_the_graphs(numbers, told):
    counted = numbers["work"]["counted"]
    assert [(entry["step"], entry["way"]) for entry in counted] == [
        (step, way) for step in (1, 3, 5) for way in ("without a cache", "with a cache")
    ]
    assert all(entry["formula"] == entry["graph"] for entry in counted)
    assert "6 of 6 numbers (steps 1, 3, 5, both ways) are the same." in told(numbers)
    wrong = [counted[0] | {"graph": 7}, *counted[1:]]
    assert "5 of 6 numbers" in told(other(numbers, "work", "counted", value=wrong))


def test_time_is_told_as_it_was_measured(numbers, told):
    for times in numbers["milliseconds"].values():
        assert len(times) == STEPS
        assert min(times) > 0
    times = {"without a cache": [9.0, 2.0, 4.0, 6.0, 8.0], "with a cache": [3.0, 2.0, 2.0, 2.0, 1.0]}
    text = told(numbers | {"milliseconds": times})
    # The first step is left out of the medians: quarters of four steps are one step each.
    assert "without a cache 2.00 8.00 4.00 29" in text
    assert "with a cache 2.00 1.00 0.50 10" in text
    assert "took 29 ms without and 10 ms with a cache, 2.9 to 1" in text


# The cache


def test_what_the_cache_holds(numbers, told):
    cache = numbers["cache"]
    assert cache["shape"] == [1, 4, 8, 64]
    # Keys and values of two blocks, 8 slots, width 256, 4 bytes.
    assert cache["bytes"] == cache["bytes_by_formula"] == 2 * 2 * 8 * 256 * 4
    assert cache["tensors"] == 4
    assert cache["written"] == 7
    assert cache["largest_behind"] == 0.0
    assert cache["difference_of_keys"] < 1e-5
    text = told(numbers)
    assert "32,768 bytes: 2 x 2 blocks x 8 slots x width 256 x 4 bytes = 32,768." in text
    assert "7 of 8 slots are written" in text
    assert "(not what the tensors take)" in told(other(numbers, "cache", "bytes", value=99))


def test_rows_of_a_batch_write_what_they_write_alone(numbers, told):
    batch = numbers["batch"]
    assert batch["ids"] == batch["ids_alone"] == batch["generated"]
    assert len({tuple(row) for row in batch["ids"]}) == 3
    assert batch["difference_of_logits"] < 1e-4
    assert batch["stale"] == [6, 3, 0]
    text = told(numbers)
    assert "2 2 ##+xxxxxx.... 5 5 #####+xxx.... 9 9 #########+..." in text
    assert "3 of 3 rows write the same 4 ids as alone" in text
    ids = [[0, 0, 0, 0], *batch["ids"][1:]]
    assert "2 of 3 rows write the same 4 ids" in told(other(numbers, "batch", "ids", value=ids))


def test_garbage_where_no_one_may_look_changes_nothing(numbers, told):
    batch = numbers["batch"]
    assert batch["weight_on_unseen"] == 0.0 < batch["least_weight_on_seen"]
    assert batch["change_by_garbage"] == 0.0 < batch["change_by_garbage_in_sight"]
    assert batch["ids_with_garbage"] == batch["ids"]
    text = told(numbers)
    assert "9 slots still hold keys and values of padding." in text
    assert "change by at most 0, and the ids are the same. The mask hides them." in text
    leaky = other(numbers, "batch", "change_by_garbage", value=0.25)
    leaky = other(leaky, "batch", "weight_on_unseen", value=1e-3)
    text = told(leaky)
    assert "change by at most 0.25" in text
    assert "So something looks at them." in text
    assert "is 0.001; the smallest" in text


# The picture and the command


def test_the_picture_shows_a_triangle_and_a_diagonal(numbers):
    figure = lesson().draw(numbers)
    assert figure.get_suptitle() == "Keys computed in 5 steps: 25 and 7"
    whole, cached, work, times = figure.axes

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
        (work, {name: np.array(n) / 1e6 for name, n in numbers["work"]["multiply_adds"].items()}),
        (times, numbers["milliseconds"]),
    ):
        assert labels(axes) == ["without a cache", "with a cache"]
        for line in axes.lines:
            np.testing.assert_allclose(line.get_ydata(), drawn[line.get_label()])


def test_one_step_is_told_and_drawn(numbers, told):
    one = copy.deepcopy(numbers) | {"steps": 1}
    for part in (
        one["milliseconds"],
        *(one["work"][key] for key in ("computed", "keys", "multiply_adds")),
    ):
        for name in part:
            part[name] = part[name][:1]
    one["ids"] = {name: ids[:4] for name, ids in one["ids"].items()}
    assert "For 1 new token the loop" in told(one)
    lesson().draw(one)


def test_every_option_has_a_help_text(explains_every_option):
    explains_every_option(lesson(), at_least=6)


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
        (["--json", "{}/absent/a.json"], "absent", "does not exist"),
        (["--plot", "{}/a.txt"], "a.txt", ".png or .svg or .pdf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_any_work(options, received, allowed, refuses):
    refuses(lesson(), options, received, allowed)


def test_the_script_runs_quietly_and_writes_numbers_and_picture(finished):
    run, folder = finished
    assert run.stderr == ""
    assert run.returncode == 0
    text, _ = run.stdout.split("Picture: ")
    assert max(map(len, text.splitlines())) <= 80
    assert (folder / "cache.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["cache.png", "numbers.json"]

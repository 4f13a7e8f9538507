"""The benchmark compares before it times, times fairly, and says what its numbers say."""

import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def _scripts_can_be_imported():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


@pytest.fixture(scope="module")
def timing():
    return importlib.import_module("_timing")


@pytest.fixture(scope="module")
def peers():
    return importlib.import_module("_attention_peers")


def benchmark(*options):
    """Run the script as a user does: the threads must be set before TensorFlow computes anything."""
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def quick_layer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer")
    files = ("--json", folder / "layer.json", "--plot", folder / "layer.png")
    ended = benchmark("layer", "--quick", "--threads", 2, *files)
    assert ended.returncode == 0, ended.stderr
    return ended, json.loads((folder / "layer.json").read_text()), folder / "layer.png"


@pytest.fixture(scope="module")
def quick_memory(tmp_path_factory):
    file = tmp_path_factory.mktemp("memory") / "memory.json"
    ended = benchmark("memory", "--quick", "--json", file)
    assert ended.returncode == 0, ended.stderr
    return ended, json.loads(file.read_text())


def test_a_quick_layer_run_measures_every_installed_peer_in_both_directions(quick_layer, peers):
    ended, numbers, picture = quick_layer
    there = [
        name
        for name in peers.COLUMNS
        if name not in peers.NEEDS or importlib.util.find_spec(peers.NEEDS[name][0])
    ]
    for direction in peers.DIRECTIONS:
        rows = [row for row in numbers["results"] if row["direction"] == direction]
        assert [row["column"] for row in rows] == there
    assert ended.stderr == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert numbers["machine"]["threads"] == 2


def test_ratios_are_medians_over_the_better_of_the_two_keras_columns(quick_layer, peers):
    _, numbers, _ = quick_layer
    for direction in peers.DIRECTIONS:
        rows = {row["column"]: row for row in numbers["results"] if row["direction"] == direction}
        best = min(rows[name]["cpu_ms"]["median"] for name in peers.BASELINES)
        for row in rows.values():
            assert row["ratio"] == pytest.approx(row["cpu_ms"]["median"] / best)
            for unit in ("cpu_ms", "wall_ms"):
                assert 0 < row[unit]["first"] <= row[unit]["median"] <= row[unit]["third"]


def test_what_is_printed_fits_80_columns_and_comes_from_the_numbers(quick_layer, peers):
    ended, numbers, _ = quick_layer
    told = " ".join(ended.stdout.split())
    table = ended.stdout[: ended.stdout.index("What the numbers say")]
    # Sentences about what to install may be longer, so that a command can be copied.
    assert max(len(line) for line in table.splitlines() if "pip install" not in line) <= 80
    assert "\u2026" not in table
    for row in numbers["results"]:
        assert f"{row['cpu_ms']['median']:.2f}" in table
    for direction in peers.DIRECTIONS:
        rows = [row for row in numbers["results"] if row["direction"] == direction]
        ours = min(row["ratio"] for row in rows if row["column"].startswith(peers.OURS))
        fastest = min(rows, key=lambda row: row["ratio"])
        assert f"takes {ours:.2f} times as long as Keras' layer" in told
        assert f"the fastest of all is {fastest['column']} ({fastest['ratio']:.2f})" in told


@pytest.mark.slow
def test_a_quick_memory_run_reports_growth_and_how_it_grows_with_the_length(quick_memory):
    ended, numbers = quick_memory
    assert ended.stderr == ""
    ours = [row for row in numbers["results"] if row["column"].startswith("tinyattn")]
    assert [row["shape"]["T"] for row in ours] == [512, 1024]
    assert all(row["growth_mb"] > 0 for row in numbers["results"])
    growth = ours[1]["growth_mb"] / ours[0]["growth_mb"]
    assert f"2 times the tokens take {growth:.2f} times the memory" in " ".join(ended.stdout.split())


def test_memory_growth_is_the_memory_that_was_touched(peers, monkeypatch):
    script = importlib.import_module("_benchmark_attention")
    before = script.forget_peak_memory()
    touched = np.ones(200_000_000, dtype=np.uint8)
    held = script.peak_memory() - before
    del touched
    # The peak stays after the memory is given back; allocators and Python itself add a little.
    assert 190e6 < held < 260e6
    assert script.peak_memory() - before >= 190e6


def test_a_peer_that_is_not_installed_is_left_out_with_a_line_that_says_how_to_install_it(timing):
    columns = ["ours", "A, graph", "A, XLA", "B"]
    needs = {
        "A, graph": ("no_such_module_a", "peer-a"),
        "A, XLA": ("no_such_module_a", "peer-a"),
        "B": ("json", "peer-b"),
    }
    names, sentences = timing.installed(columns, needs)
    assert names == ["ours", "B"]
    assert len(sentences) == 1
    assert "pip install peer-a" in sentences[0]
    assert "keras-tinyattn[bench]" in sentences[0]


def test_columns_that_compute_something_else_are_never_timed(timing):
    expected = np.array([[1.0, -4.0]], dtype="float32")
    # 4e-5 over 4 is a difference of 1e-5: rounding. 4e-3 over 4 is not.
    differences = timing.compare({"a": expected, "b": expected + 4e-5}, "a")
    assert differences == {"a": 0.0, "b": pytest.approx(1e-5, rel=0.1)}
    with pytest.raises(ValueError, match="'b' computes something else than 'a'"):
        timing.compare({"a": expected, "b": expected + 4e-3}, "a")
    with pytest.raises(ValueError, match="'b' computes something else"):
        timing.compare({"a": expected, "b": expected * np.nan}, "a")
    with pytest.raises(ValueError, match="computes the shape"):
        timing.compare({"a": expected, "b": expected[0]}, "a")


def test_quartiles_are_milliseconds():
    quartiles = importlib.import_module("_timing").quartiles([0.001, 0.002, 0.003, 0.004, 0.005])
    assert quartiles == pytest.approx({"first": 2.0, "median": 3.0, "third": 4.0})


def test_functions_are_timed_in_turn_and_the_order_changes(timing):
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = timing.interleaved(functions, seconds=0, at_least=20)
    rounds = [calls[i : i + 3] for i in range(0, 60, 3)]
    assert len(calls) == 60
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert all(len(cpu) == len(wall) == 20 for cpu, wall in times.values())


def test_cpu_time_counts_work_and_wall_time_counts_waiting(timing):
    import time

    times = timing.interleaved({"waits": lambda: time.sleep(0.05)}, seconds=0, at_least=3)
    cpu, wall = times["waits"]
    assert min(wall) >= 0.05
    assert max(cpu) < 0.05


def test_a_variable_traced_as_a_constant_is_refused(peers):
    import tensorflow as tf

    problem = peers.make_problem(peers.Shape(2, 5, 6, 3))
    kernel = tf.Variable(problem.kernels[0])
    constant = tf.constant(kernel.numpy())
    directions = peers._tensorflow(lambda x: x @ constant, [kernel], problem, jit_compile=False)
    with pytest.raises(ValueError, match="reaches not every weight"):
        directions["forward+backward"]()


@pytest.mark.parametrize("column", ["torch", "JAX", "KerasHub, graph", "tinyattn dense, graph"])
def test_every_peer_has_causal_attention_and_its_gradient_right(peers, column):
    if column in peers.NEEDS:
        pytest.importorskip(peers.NEEDS[column][0])
    B, T, D, H = shape = peers.Shape(2, 5, 6, 3)
    problem = peers.make_problem(shape)
    directions = peers.COLUMNS[column](problem)
    x = problem.inputs.astype("float64")

    def output(x):
        q, k, v = ((x @ kernel).reshape(B, T, H, D // H) for kernel in problem.kernels[:3])
        scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(D // H)
        weights = np.exp(scores) * np.tril(np.ones((T, T)))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D) @ problem.kernels[3]

    # Float32 against float64.
    np.testing.assert_allclose(directions["forward"](), output(x), atol=1e-5)
    step = np.zeros_like(x)
    step[1, 2, 3] = 1e-5
    slope = np.sum((output(x + step) - output(x - step)) * problem.upstream) / 2e-5
    assert directions["forward+backward"]()[1, 2, 3] == pytest.approx(slope, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("layer", "--threads", 0), "--threads must be 1 or more, but 0 was received."),
        (("layer", "--seconds", -1), "--seconds must be 0 or more, but -1.0 was received."),
        (("layer", "--seconds", "nan"), "--seconds must be 0 or more, but nan was received."),
        (("memory", "--json", "no/such/place.json"), "--json needs a file that can be written"),
        (("memory", "--plot", "picture.txt"), "does not end in .png or .svg or .pdf"),
    ],
)
def test_a_bad_option_ends_in_one_sentence_before_anything_is_measured(options, said, capsys):
    script, start = importlib.import_module("benchmark"), importlib.import_module("_start")
    with pytest.raises(SystemExit) as ended:
        start.run(script.main, list(map(str, options)))
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_measuring_process_that_fails_is_told_in_one_sentence(peers):
    script = importlib.import_module("_benchmark_attention")
    with pytest.raises(ValueError, match=r"The process that measured 'Keras, graph' at T=5 ended with"):
        # 4 heads do not share 6 evenly.
        script.grow_in_a_process("Keras, graph", peers.Shape(1, 5, 6, 4), "forward", 1)


@pytest.mark.slow
def test_a_quick_generate_run_compares_ids_and_tells_speeds(tmp_path):
    ended = benchmark("generate", "--quick", "--json", tmp_path / "generate.json")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    numbers = json.loads((tmp_path / "generate.json").read_text())
    results = numbers["results"]
    for row in numbers["lengths"]:
        assert row["new_tokens"] == [2, 4, 8]
        few, half, all_of_them = row["cpu_ms"]
        assert row["half_to_line"] == pytest.approx(half / (few + (all_of_them - few) / 3))
        assert f"{half:.1f} and {all_of_them:.1f} ms" in " ".join(ended.stdout.split())
    columns = [row["column"] for row in results]
    assert {"tinyattn, XLA", "tinyattn, graph"} < set(columns)
    for row in results:
        assert row["column"] in ended.stdout
        baseline = next(other for other in results if other["column"] == row["baseline"])
        assert row["ratio"] == pytest.approx(baseline["cpu_ms"]["median"] / row["cpu_ms"]["median"])
        tokens = row["size"]["batch_size"] * row["size"]["new_tokens"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["cpu_ms"]["median"])

"""The benchmark: a process for each peer, outputs compared before they are timed, true numbers."""

import ast
import importlib
import importlib.util
import json
import pathlib
import time

import benchmark
import numpy as np
import pytest
from _start import run
from benchmarks import tables, workers
from benchmarks.tables import AGAINST, BENCHMARKS, OURS, PEERS, columns_of
from benchmarks.workers import Worker, difference, interleaved, output

SCRIPTS = pathlib.Path(benchmark.__file__).parent
# A peer that computes in no time what follows from its inputs, and prints while it does.
FAKE = """
import os, signal, sys, time
import numpy as np

SECONDS, FACTOR = 0.002, 1

def compute(array, share=1):
    print("a library that prints")
    end = time.process_time() + SECONDS * share
    while time.process_time() < end:
        pass
    return array * FACTOR

def layer(problem, **settings):
    return lambda: compute(problem.inputs)

def generate(problem, share=1, **settings):
    new_tokens = int(share * problem.new_tokens)
    ids = np.arange(problem.B * problem.new_tokens).reshape(problem.B, -1)
    return lambda: compute(ids[:, :new_tokens], share)

def train(problem, **settings):
    return lambda: compute(np.float32(problem.inputs.mean()))
"""
AS_FAKE = "from fake_peer import *\nimport fake_peer\n"
OUR_FAKE = AS_FAKE + "import keras_tinyattn\nfake_peer.SECONDS = keras_tinyattn.SECONDS\n"


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A function that writes a fake of a peer; all peers are fakes, and our packages fake checkouts."""

    def fake(peer, code):
        module = f"fake_{peer.lower()}"
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.setitem(PEERS, peer, (module, "json", "json"))

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "fake_peer.py").write_text(FAKE)
    for peer in PEERS:
        fake(peer, OUR_FAKE if peer in (OURS, AGAINST) else AS_FAKE)
    for checkout, seconds in (("now", 0.006), ("before", 0.002)):
        (tmp_path / checkout / "keras_tinyattn").mkdir(parents=True)
        (tmp_path / checkout / "keras_tinyattn" / "__init__.py").write_text(f"SECONDS = {seconds}")
    monkeypatch.setattr(benchmark, "CHECKOUT", tmp_path / "now")
    return fake


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A function that starts the process of a peer whose module has some code."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(code, package=None):
        (tmp_path / "fake_alone.py").write_text(code)
        return Worker("somebody", "fake_alone", 1, package)

    return start


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_run_measures_every_column_and_prints_its_numbers(name, fakes, tmp_path, capsys):
    files = ("--json", str(tmp_path / "n.json"), "--plot", str(tmp_path / "n.png"))
    # Parts of a request are not measured against another checkout.
    against = [] if name == "generate" else ["--against", str(tmp_path / "before")]
    benchmark.main([name, "--quick", "--repeats", "1", *against, *files])
    printed = capsys.readouterr().out
    text = " ".join(printed.split())
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert (tmp_path / "n.png").read_bytes().startswith(b"\x89PNG")
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= max(80, len(f"Numbers: {tmp_path}/n.json"))
    assert (numbers["machine"]["threads"], numbers["left_out"]) == (1, [])
    for title, size in BENCHMARKS[name].quick.items():
        rows = {row["column"]: row for row in numbers["results"] if row["table"] == title}
        columns = columns_of(name, size, set(PEERS) - ({AGAINST} if name == "generate" else set()))
        if name != "memory" or size["T"] == 512:
            assert list(rows) == list(columns)
        assert all(f"{column} " in printed for column in rows)
        if name != "memory":
            check_times(name, size, rows, text)


def check_times(name, size, rows, text):
    """Ratios and speeds follow from the medians, the printed sentences from them."""
    tokens = size["B"] * (size.get("new_tokens") or size["T"] * size.get("steps", 1))
    for row in rows.values():
        assert row["rounds"] == 3
        for unit in ("cpu_ms", "wall_ms"):
            assert 0 < row[unit]["first"] <= row[unit]["median"] <= row[unit]["third"]
        share, speed = row["settings"].get("share", 1), row["tokens_per_second"]
        assert speed == pytest.approx(1e3 * tokens * share / row["cpu_ms"]["median"])
        assert f"{speed:.0f}" in text
        assert list(row["ratios"]) == list(BENCHMARKS[name].baselines)
        for peer, ratio in row["ratios"].items():
            theirs = [other["tokens_per_second"] for other in rows.values() if other["peer"] == peer]
            assert ratio == pytest.approx(speed / max(theirs))
        # Ours burns three times as much time as ours of before.
        time_to, compared = row["time_to_against"], row["peer"] == OURS and name != "generate"
        assert compared == (time_to is not None)
        if compared:
            assert 1.5 < time_to["median"] < 6
            assert f"{time_to['median']:.3f}" in text
    by_speed = sorted(rows.values(), key=lambda row: row["tokens_per_second"])
    whole = [row for row in by_speed if not tables.is_part(row["settings"])]
    *_, ours = (row for row in whole if row["peer"] == OURS)
    *_, fastest = (row for row in whole if row["peer"] != AGAINST)
    (first, ratio), (second, other) = ours["ratios"].items()
    assert (
        f"{ours['column']} is {ratio:.2f} times as fast as {first} and {other:.2f} times as fast as "
        f"{second}, each at its best; the fastest is {fastest['column']}."
    ) in text
    if name == "generate":
        quarter, half, all_of_them = (
            rows[f"{OURS}{share} XLA"]["cpu_ms"]["median"] for share in (" 1/4", " 1/2", "")
        )
        line = half / (quarter + (all_of_them - quarter) / 3)
        assert f"the middle one is {line:.2f} of what a line through the others gives" in text


def test_a_peer_that_computes_something_else_is_never_timed(fakes, capsys):
    fakes("torch", AS_FAKE + "fake_peer.FACTOR = 1.001")
    said = refused(["layer", "--quick"], capsys)
    assert "'torch' computes something else than 'tinyattn dense graph'" in said
    fakes("torch", AS_FAKE + "fake_peer.FACTOR = 2")
    assert "'torch KV loop' computes something else" in refused(["generate", "--quick"], capsys)


def test_a_peer_that_dies_is_named_with_what_it_said(fakes, capsys):
    fakes("JAX", "import os, signal, sys\nprint('two LLVMs', file=sys.stderr, flush=True)\nos.abort()")
    said = refused(["layer", "--quick"], capsys)
    assert "JAX: the process was ended by SIGABRT; it said: two LLVMs. --peers" in said


def refused(options, capsys):
    """What a run says that ends with 2, in one sentence and without a page."""
    with pytest.raises(SystemExit) as ended:
        run(benchmark.main, list(map(str, options)))
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_peer_that_is_not_installed_is_left_out_unless_it_was_asked_for(monkeypatch, capsys):
    monkeypatch.setitem(PEERS, "JAX", ("benchmarks.peer_jax", "no_such_module", "jax"))
    options = benchmark.parse_arguments(["layer", "--peers", "all"])
    options.packages = benchmark.packages(None)
    chosen, left_out = benchmark.choose_peers(options)
    assert chosen[:2] == [OURS, "Keras"]
    assert "JAX" not in chosen
    assert left_out[-1].startswith("JAX is not installed; `pip install jax` adds it")
    assert "--peers: JAX is not installed" in refused(["layer", "--peers", "JAX"], capsys)
    options.peers = ["none"]
    assert benchmark.choose_peers(options) == ([OURS], [])
    options.benchmark, options.peers = "train", ["all"]
    assert "KerasHub" not in benchmark.choose_peers(options)[0]


def test_a_process_answers_line_by_line_and_says_what_went_wrong(worker):
    code = (
        FAKE.replace("print(", "time.sleep(10 * SECONDS); print(")
        + "def train(problem):\n    raise ValueError('no training today')\n"
    )
    with worker(code) as somebody:
        somebody.ready()
        size = {"B": 1, "T": 5, "D": 6, "H": 3}
        somebody.ask(
            "make", benchmark="layer", size=size, columns={"a": {}, "b": {"jit_compile": True}}
        )
        _, first = output(somebody, "output", column="a")
        # Two calls, of which the second is compared as well.
        assert first.shape == (2, 1, 5, 6)
        np.testing.assert_array_equal(first[0], first[1])
        # It waits for ten times as long as it works.
        cpu, wall = somebody.ask("timed", column="b")
        assert 0.002 <= cpu < 0.02 <= wall
        size = dict(BENCHMARKS["train"].quick["tiny, 2 x 8 tokens a step"])
        with pytest.raises(ValueError, match="somebody: ValueError: no training today"):
            somebody.ask("make", benchmark="train", size=size, columns={"a": {}})
        assert somebody.ask("hello") is None
    assert somebody._process.poll() is not None


def test_a_package_from_elsewhere_is_refused(worker, tmp_path):
    (tmp_path / "keras_tinyattn.py").write_text("")
    empty = tmp_path / "empty"
    empty.mkdir()
    with (
        worker("import keras_tinyattn", empty) as somebody,
        pytest.raises(ValueError, match=f"came from {tmp_path}/keras_tinyattn.py, not from {empty}"),
    ):
        somebody.ready()


def test_memory_growth_is_the_memory_that_was_touched(worker):
    code = (
        "import numpy as np\n"
        "def layer(problem):\n"
        "    return lambda: np.ones((1, problem.T, 1000, 1000), 'uint8')[:, ::50, :2, :2]\n"
    )
    with worker(code) as somebody:
        size = {"B": 1, "T": 200, "D": 2, "H": 1}
        grown, sample = output(somebody, "grow", size=size, settings={})
    # NumPy and Python itself add a little. The warm-up had 32 MB.
    assert 190 < grown < 260
    assert sample.shape == (1, 4, 2, 2)


def test_columns_that_differ_by_more_than_rounding_are_refused():
    expected, ids = np.array([[1.0, -4.0]], dtype="float32"), np.array([50_000, 50_001])
    # 4e-5 over 4 is a difference of 1e-5: rounding. 4e-3 over 4 is not.
    assert difference("b", expected + 4e-5, "a", expected) == pytest.approx(1e-5, rel=0.1)
    assert difference("b", ids, "a", ids) == 0
    for other, wanted, said in (
        (expected + 4e-3, expected, "'b' computes something else than 'a'"),
        (expected * np.nan, expected, "'b' computes something else"),
        (expected[0], expected, "computes the shape"),
        (ids + [0, 1], ids, "0e\\+00 is allowed"),
    ):
        with pytest.raises(ValueError, match=said):
            difference("b", other, "a", wanted)


def test_calls_are_timed_in_turn_and_the_order_changes():
    calls = []
    functions = {name: lambda name=name: calls.append(name) or (1.0, 2.0) for name in "abc"}
    times = interleaved(functions, seconds=0, at_least=20)
    rounds = [calls[i : i + 3] for i in range(0, 60, 3)]
    assert len(calls) == 60
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert all(array.shape == (20, 2) for array in times.values())
    begin = time.perf_counter()
    interleaved({"a": lambda: (time.sleep(0.01), 0)}, seconds=0.1, at_least=1)
    assert 0.1 <= time.perf_counter() - begin < 1


def test_quartiles_are_the_middle_half():
    assert workers.quartiles([1, 2, 3, 4, 5]) == {"first": 2.0, "median": 3.0, "third": 4.0}


def test_only_a_peer_s_own_file_imports_its_library():
    libraries = {"keras", "tensorflow", "keras_hub", "keras_tinyattn", "torch", "jax", "matplotlib"}
    imported = {}
    for path in (SCRIPTS / "benchmarks").glob("*.py"):
        tree = ast.parse(path.read_text())
        nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in nodes for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        if found := {name.partition(".")[0] for name in names} & libraries:
            imported[path.stem] = found
    assert imported == {
        "peer_tinyattn": {"tensorflow", "keras_tinyattn"},
        "peer_keras": {"tensorflow", "keras"},
        "peer_keras_hub": {"keras", "keras_hub"},
        "peer_torch": {"torch"},
        "peer_jax": {"jax"},
    }


def test_a_variable_traced_as_a_constant_is_refused():
    import tensorflow as tf
    from benchmarks import peer_keras, problems

    problem = problems.layer({"B": 2, "T": 5, "D": 6, "H": 3, "direction": "forward+backward"})
    kernel = tf.Variable(problem.kernels[0])
    constant = tf.constant(kernel.numpy())
    function = peer_keras.compiled(lambda x: x @ constant, [kernel], problem, jit_compile=False)
    with pytest.raises(ValueError, match="does not reach every weight"):
        function()


@pytest.mark.parametrize("peer", [OURS, "Keras", "KerasHub", "torch", "JAX"])
def test_every_peer_has_causal_attention_and_its_gradient_right(peer):
    module, needed, _ = PEERS[peer]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    B, T, D, H = 2, 5, 6, 3
    settings = next(setting for of, setting in BENCHMARKS["layer"].columns.values() if of == peer)
    computed = {}
    with Worker(peer, module, 1, SCRIPTS.parent if peer == OURS else None) as process:
        process.ready()
        for direction in ("forward", "forward+backward"):
            size = {"B": B, "T": T, "D": D, "H": H, "direction": direction}
            process.ask("make", benchmark="layer", size=size, columns={"a": settings})
            computed[direction] = output(process, "output", column="a")[1][1]
    problem = importlib.import_module("benchmarks.problems").layer(size)
    x = problem.inputs.astype("float64")

    def expected(x):
        q, k, v = ((x @ kernel).reshape(B, T, H, D // H) for kernel in problem.kernels[:3])
        scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(D // H)
        weights = np.exp(scores) * np.tril(np.ones((T, T)))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D) @ problem.kernels[3]

    # Float32 against float64.
    np.testing.assert_allclose(computed["forward"], expected(x), atol=1e-5)
    step = np.zeros_like(x)
    step[1, 2, 3] = 1e-5
    slope = np.sum((expected(x + step) - expected(x - step)) * problem.upstream) / 2e-5
    assert computed["forward+backward"][1, 2, 3] == pytest.approx(slope, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_all_installed_peers_compute_the_same(name, tmp_path, capsys):
    """The run itself compares: GPT-2's weights, causality, the optimizer."""
    benchmark.main([name, "--quick", "--json", str(tmp_path / "n.json")])
    numbers = json.loads((tmp_path / "n.json").read_text())
    peers = {peer for peer, _ in BENCHMARKS[name].columns.values()}
    there = {peer for peer in peers if importlib.util.find_spec(PEERS[peer][1])}
    assert {row["peer"] for row in numbers["results"]} == there
    assert len(numbers["left_out"]) == len(peers - there)
    # Float32 in another order: a lost decay, clip or weight differs by a hundred times more.
    assert all(row["largest_difference"] < 1e-5 for row in numbers["results"])
    if name == "memory":
        ours = [row for row in numbers["results"] if row["column"] == f"{OURS} blockwise graph"]
        assert [row["size"]["T"] for row in ours] == [512, 1024]
        growth = ours[1]["growth_mb"] / ours[0]["growth_mb"]
        printed = " ".join(capsys.readouterr().out.split())
        assert f"2 times the tokens take {growth:.2f} times the memory" in printed

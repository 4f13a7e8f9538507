"""scripts/train.py: what a run leaves behind, how it is resumed, and what it refuses."""

import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import _run_directory
import _start
import _workers
import keras
import numpy as np
import pytest
import tensorflow as tf
import train as script

from keras_tinyattn import load_tokenizer

TEXT = "the cat sat on the mat; the dog sat on the log. " * 12  # no newline at the end
SMALL = (
    *("--steps", "6", "--checkpoint-every", "2", "--evaluate-every", "3", "--batch-size", "4"),
    *("--sequence-length", "8", "--hidden-dim", "6", "--num-heads", "3", "--num-layers", "1"),
    *("--dropout", "0.25", "--seed", "7"),
)


@pytest.fixture(scope="module", autouse=True)
def _the_dtype_policy_is_put_back():
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)


def train(*options):
    script.main([*map(str, options)])


def history(directory):
    """Losses by step, and evaluations by step."""
    entries = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return (
        {entry["step"]: entry["loss"] for entry in entries if "loss" in entry},
        {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry},
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "cat.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """The directory of a run from its first step to its last."""
    folder = tmp_path_factory.mktemp("unbroken")
    extra = ("--json", folder / "numbers.json", "--plot", folder / "losses.png", "--sample-every", 6)
    train("--text", text, "--out", folder / "run", *SMALL, *extra)
    return folder / "run"


def test_a_run_leaves_what_it_has_measured_its_tokenizer_and_its_model(unbroken):
    losses, evaluations = history(unbroken)
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert list(evaluations) == [3, 6]
    numbers = json.loads((unbroken.parent / "numbers.json").read_text())
    assert numbers["losses"] == list(losses.values())
    assert (unbroken.parent / "losses.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = load_tokenizer(unbroken / "tokenizer.json")
    assert tokenizer.vocabulary == tuple(sorted(set(TEXT)))
    assert list((unbroken / "logs").iterdir())

    # The model kept is the one with the best validation loss, on 58 of 576 characters.
    model = keras.saving.load_model(unbroken / "model.keras")
    ids, nats = np.array(tokenizer.encode(TEXT)[-58:]), []
    for start in range(0, 57, 8):
        targets = ids[start + 1 : start + 9]
        logits = model(ids[None, start : start + len(targets)]).numpy()[0].astype("float64")
        shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        nats += (-np.log(shares[np.arange(len(targets)), targets])).tolist()
    assert np.mean(nats) == pytest.approx(min(evaluations.values()), rel=1e-5)


def test_a_run_that_was_killed_continues_bit_for_bit_as_if_it_had_not_been(unbroken, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    # As `kill -9` leaves it in the middle of writing the checkpoint of step 6.
    for path in (run / "checkpoints").glob("ckpt-6*"):
        path.unlink()
    (run / "checkpoints" / "ckpt-6_temp").mkdir()
    with open(run / "history.jsonl", "r+") as file:
        file.truncate(len(file.read()) - 5)
    train("--out", run, "--resume")
    # To the last digit and line: no step is missing, and none is there twice.
    assert (run / "history.jsonl").read_text() == (unbroken / "history.jsonl").read_text()
    kept = sorted(path.stem for path in (run / "checkpoints").glob("*.index"))
    assert kept == ["ckpt-4", "ckpt-6"]
    one, two = (keras.saving.load_model(path / "model.keras").get_weights() for path in (run, unbroken))
    for left, right in zip(one, two, strict=True):
        np.testing.assert_array_equal(left, right)


def start(*options, **kwargs):
    command = [sys.executable, script.__file__, *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **kwargs)


def ended(process, code=0):
    """What a process has printed by its end, which has this exit code."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


def wait_for_a_checkpoint(run, process, seconds=240):
    path = run / "checkpoints" / "checkpoint"
    for _ in range(seconds * 10):
        if path.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    assert path.exists(), process.communicate()


@pytest.mark.slow
def test_term_saves_a_checkpoint_and_says_how_to_continue(text, tmp_path):
    run = tmp_path / "run"
    options = (*SMALL, "--steps", 100000, "--evaluate-every", 100000)
    process = start("--text", text, "--out", run, *options)
    wait_for_a_checkpoint(run, process)
    process.send_signal(signal.SIGTERM)
    out, err = ended(process, 128 + signal.SIGTERM)
    assert err == ""
    newest = max(int(path.stem.split("-")[1]) for path in (run / "checkpoints").glob("*.index"))
    assert list(history(run)[0]) == list(range(1, newest + 1))
    assert f"Stopped at step {newest:,} of 100,000" in out
    assert f"--out {run} --resume" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--text missing.txt", "No such file or directory: .*missing.txt"),
        ("--text .", "Is a directory: "),
        ("--text empty.txt", "needs a text to train on, but '.*empty.txt' is empty"),
        ("--text latin.txt", "needs UTF-8, but byte 3 of '.*latin.txt' is not part of it"),
        (
            "--text short.txt --sequence-length 8 --validation-share 0",
            "need 9 tokens, and there are 8 for training",
        ),
        ("--hidden-dim 6 --num-heads 4", "Expected num_heads to divide hidden_dim"),
        ("--dropout 1", r"Expected a number in \[0, 1\). Received: dropout=1.0"),
        ("--validation-share 1", r"Expected a number in \[0, 1\)"),
        ("--steps 5 --warmup-steps 5", "Expected warmup_steps from 0 to 4"),
        ("--out short.txt", "--out needs a directory, but 'short.txt' is a file"),
        ("--out run --resume", "--resume continues a run, but 'run' holds none"),
        ("--prompt q", "Received also: q"),
    ],
)
def test_what_cannot_work_is_one_sentence_exit_code_2_and_leaves_nothing(
    options, message, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("empty.txt").touch()
    pathlib.Path("latin.txt").write_bytes(b"caf\xe9 noir" * 50)
    pathlib.Path("short.txt").write_text("eight ch")
    before = sorted(os.listdir())
    default = [] if "--resume" in options else ["--out", "run", "--text", str(text)]
    with pytest.raises(SystemExit, match="2"):
        _start.run(script.main, [*default, *options.split()])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert sorted(os.listdir()) == before


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings(unbroken, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    with pytest.raises(ValueError, match=r"already holds a run\. Continue it with --resume"):
        train("--text", text, "--out", run, *SMALL)
    # Not even with the run's own value.
    with pytest.raises(ValueError, match=r"settings of the run, and so no --untied and no --steps\. "):
        train("--out", run, "--resume", "--steps", 6, "--untied")
    settings = json.loads((run / "run.json").read_text())
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "!")
    (run / "run.json").write_text(json.dumps({**settings, "text": str(other)}))
    with pytest.raises(ValueError, match=r"is not the text that the run .* began with"):
        train("--out", run, "--resume")


@pytest.mark.slow
def test_one_character_repeated_has_a_loss_of_zero(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a" * 40)
    train("--text", path, "--out", tmp_path / "a", *SMALL, "--steps", 1)
    losses, evaluations = history(tmp_path / "a")
    assert losses == {1: 0.0}  # Only one token is possible.
    assert evaluations == {1: 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "word"])
def test_other_tokenizers_train_too(kind, text, tmp_path):
    train("--text", text, "--tokenizer", kind, "--out", tmp_path / kind, *SMALL)
    losses, _ = history(tmp_path / kind)
    assert losses[6] < losses[1]
    keras.saving.load_model(tmp_path / kind / "model.keras")


def forget_step_6(run):
    for path in (run / "checkpoints").glob("ckpt-6*"):
        path.unlink()


@pytest.mark.slow
def test_mixed_precision_trains_and_is_resumed(text, tmp_path):
    train("--text", text, "--out", tmp_path, *SMALL, "--mixed-precision")
    losses, _ = history(tmp_path)
    forget_step_6(tmp_path)
    train("--out", tmp_path, "--resume", "--evaluate-every", 3)
    assert history(tmp_path)[0] == losses


def assert_same_losses(one, two):
    for found, expected in zip(history(one), history(two), strict=True):
        # Sums in another order, in float32, over six steps.
        assert found == pytest.approx(expected, rel=1e-5)


def start_workers(*options):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    workers = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    tasks = [{"type": "worker", "index": index} for index in range(2)]
    configs = [json.dumps({"cluster": {"worker": workers}, "task": task}) for task in tasks]
    options += ("--strategy", "multiworker")
    return [start(*options, env={**os.environ, "TF_CONFIG": config}) for config in configs]


@pytest.mark.slow
def test_two_devices_and_two_workers_have_the_losses_of_one(text, tmp_path):
    # Without dropout, whose random numbers differ between devices.
    options = ("--text", text, *SMALL, "--dropout", 0)
    train("--out", tmp_path / "one", *options)
    ended(start("--out", tmp_path / "two", *options, "--strategy", "mirrored", "--devices", 2))
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    for process in start_workers("--out", tmp_path / "workers", *options):
        ended(process)
    # Written once, and resumed.
    assert_same_losses(tmp_path / "workers", tmp_path / "one")
    forget_step_6(tmp_path / "workers")
    for process in start_workers("--out", tmp_path / "workers", "--resume", "--evaluate-every", 3):
        ended(process)
    assert_same_losses(tmp_path / "workers", tmp_path / "one")


@pytest.mark.slow
def test_a_signal_to_one_worker_stops_both_at_the_same_step(text, tmp_path):
    processes = start_workers("--text", text, "--out", tmp_path, *SMALL, "--steps", 100000)
    wait_for_a_checkpoint(tmp_path, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        ended(process, 128 + signal.SIGTERM)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfa\r\n")
    # One mark alone: a second one is a character.
    assert script.read_text(path) == "\ufeffa\r\n"


# One process a directory, and what others left there.


HOLD = """
import sys, time
from _run_directory import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_directory_is_refused_until_the_first_process_dies(
    resume, unbroken, text, tmp_path
):
    run = tmp_path / "run"
    options = ("--out", run, "--resume") if resume else ("--text", text, "--out", run, *SMALL)
    if resume:
        shutil.copytree(unbroken, run)
    folder = pathlib.Path(script.__file__).parent
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        before = sorted(run.rglob("*"))
        with pytest.raises(ValueError, match=rf"Process {holder.pid} trains in '.*run'\. Wait until"):
            train(*options)
        assert sorted(run.rglob("*")) == before
        holder.kill()
    (run / f".{holder.pid}.part.keras").touch()
    if resume:  # Nothing is left to do, and what was half written goes.
        train(*options)
        assert not list(run.glob(".*.part*"))
    else:
        with _run_directory.RunDirectory(run).lock():
            assert (run / ".lock").read_text() == str(os.getpid())


def spoiled_settings():
    """Damages to run.json: texts in its place, or values of single settings."""
    whole = ["", "{", "[]", "null", "7", '"steps"', "[" * 100_000, "{}", '{"steps": 6}', "\x00"]
    values = [None, True, "6", [6], {}, -1, 0.5, float("nan"), 10**400, "x" * 1_000_000]
    return whole, [("steps", value) for value in values] + [
        *(("learning_rate", value) for value in (None, "1e-3", float("inf"), float("nan"), -1.0, [])),
        *(("untied", value) for value in (None, 1, "true", [False])),
        *(("tokenizer", value) for value in (None, "bpe", 3)),
        *(("text", value) for value in (None, 3, ["cat.txt"], "missing.txt", "\0", "")),
        *(("evaluate_every", value) for value in (0, -3, "often", True)),
        *(("sample_every", value) for value in (0, 1.5)),
        *(("prompt", value) for value in (3, "\N{SNOWMAN}")),
        *(("text_sha256", value) for value in (None, 3, "0")),
        ("another", 1),
    ]


def test_a_damaged_run_json_is_one_sentence_and_changes_nothing(
    unbroken, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    path = run / "run.json"
    settings = json.loads(path.read_text())
    texts, values = spoiled_settings()
    texts = [*texts, "1e999", json.dumps(settings).replace('"steps": 6', '"steps": 1e999')]
    texts += [json.dumps({**settings, name: value}) for name, value in values]
    texts += [json.dumps({k: v for k, v in settings.items() if k != name}) for name in settings]
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file != path}
    for spoiled in (b"\xff\xfe", *(text.encode() for text in texts)):
        path.write_bytes(spoiled)
        with pytest.raises(SystemExit, match="2"):
            _start.run(script.main, ["--out", str(run), "--resume"])
        error = capsys.readouterr().err
        assert error.startswith("train.py: error: "), (spoiled[:99], error)
        assert error.count("\n") == 1
        assert len(error) < 1000
        assert path.read_bytes() == spoiled
    assert {file: file.read_bytes() for file in before} == before


def test_junk_in_the_history_is_told_and_kept(tmp_path):
    path = tmp_path / "history.jsonl"
    good = [f'{{"step": {step}, "loss": 0.5}}' for step in (1, 2, 3)]
    last = '{"step": 3, "validation_loss": null}'
    numbers = ("NaN", "1e999", "Infinity", "null", '"0.5"', "1" * 400, "[0.5]", '0.5, "more": 1')
    junk = [f'{{"step": 2, "loss": {number}}}' for number in numbers]
    junk += ["", "junk", '{"step": 2', "[]", "3", '{"step": "2", "loss": 0.5}', '{"step": 2}']
    junk += ['{"loss": 0.5}', "[" * 100_000, "\0"]
    for line in (b"\xff\xfe", *(line.encode() for line in junk)):
        held = "\n".join([*good, ""]).encode() + line + b"\n" + last.encode() + b"\n"
        path.write_bytes(held)
        with pytest.raises(ValueError, match=r"history\.jsonl is not as .* wrote it: line 4 is not"):
            _run_directory.RunDirectory(tmp_path).history(3)
        assert path.read_bytes() == held
    for lines in ([], good[:2], good[1:], [good[0], *good], [good[1], good[0], good[2]]):
        path.write_text("".join(line + "\n" for line in lines))
        with pytest.raises(ValueError, match=r"does not hold one loss per step, .*, 3\. Put the"):
            _run_directory.RunDirectory(tmp_path).history(3)
    # What a kill leaves: half a line at the end, and steps after the newest checkpoint.
    path.write_text("\n".join([*good, last, '{"step": 4, "loss": 0.25}', '{"step": 5, "lo']))
    history = _run_directory.RunDirectory(tmp_path).history(3)
    assert history.losses == [0.5, 0.5, 0.5]
    assert history.best() is None
    assert path.read_text() == "\n".join([*good, last, ""])


def test_a_loss_that_is_not_finite_is_null_in_the_file_and_never_the_best(tmp_path):
    history = _run_directory.History(tmp_path / "history.jsonl")
    history.add_evaluation(1, math.nan)
    assert not history.last_is_best()
    history.add_evaluation(2, 3.0)
    assert history.last_is_best()
    for step, loss in ((3, math.nan), (4, -math.inf), (5, math.inf)):
        history.add_evaluation(step, loss)
        assert not history.last_is_best()
        assert history.best() == (2, 3.0)
    history.write()
    written = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["validation_loss"] for line in written] == [
        *(None, 3.0, None, None, None)
    ]


# The first step has no warm-up, and its update is beyond float32.
DIVERGES = ("--learning-rate", 3e38, "--warmup-steps", 0, "--weight-decay", 1e30, "--final-share", 1)


@pytest.mark.parametrize("share", [0.1, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_run_that_diverges_says_so_and_saves_nothing_of_it(share, text, tmp_path):
    options = ("--text", text, "--out", tmp_path, *SMALL, "--validation-share", share, *DIVERGES)
    with pytest.raises(ValueError, match=r"Training diverged by step 1\. .*NaN or infinity in "):
        train(*options, "--evaluate-every", 1, "--checkpoint-every", 1)
    assert not (tmp_path / "model.keras").exists()
    assert not list(tmp_path.glob("checkpoints/ckpt-*"))


@pytest.mark.slow
def test_resume_evaluates_saves_and_samples_when_the_run_would_have(text, tmp_path, capsys):
    run = tmp_path / "run"
    when = ("--evaluate-every", 2, "--checkpoint-every", 3, "--sample-every", 4, "--sample-tokens", 3)
    train("--text", text, "--out", run, *SMALL, *when, "--prompt", "the dog")
    whole, settings = capsys.readouterr().out, json.loads((run / "run.json").read_text())
    assert [settings[name] for name in ("evaluate_every", "checkpoint_every")] == [2, 3]
    written = (run / "history.jsonl").read_bytes()
    forget_step_6(run)
    train("--out", run, "--resume")
    assert (run / "history.jsonl").read_bytes() == written
    resumed = capsys.readouterr().out

    def of_steps_4_to_6(printed):
        return [line for line in printed.splitlines() if re.match(r"Step [456] writes|Best", line)]

    assert of_steps_4_to_6(resumed) == of_steps_4_to_6(whole)
    assert len(of_steps_4_to_6(resumed)) == 3


# Failures of TensorFlow.

TRACE = """Graph execution error:

Detected at node x defined at (most recent call last):
  File "a.py"

"""
CLOSED = """Collective ops is aborted by: Socket closed
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /Recv:
:UNKNOWN:Error received from peer"""


@pytest.mark.parametrize(
    ("kind", "message", "sentence"),
    [
        (
            tf.errors.ResourceExhaustedError,
            TRACE + "Out of memory while trying to allocate 176.13GiB.\n\t [[{{node x}}]]",
            "Memory ran out (allocate 176.13GiB). A smaller batch, model or window needs less.",
        ),
        (
            tf.errors.UnavailableError,
            TRACE + CLOSED,
            "Worker 1 does not answer: it was killed, or it failed and says why itself.",
        ),
        (
            tf.errors.ResourceExhaustedError,
            "run/ckpt-4_temp/part; No space left on device",
            "TensorFlow failed: run/ckpt-4_temp/part; No space left on device.",
        ),
        (
            tf.errors.InvalidArgumentError,
            TRACE + "{{function_node f}} bad shape. [Op:Add]",
            "TensorFlow failed: bad shape.",
        ),
        (tf.errors.InternalError, "Graph execution error:", "TensorFlow failed: InternalError."),
    ],
)
def test_a_failure_is_told_in_a_sentence_without_a_traceback(kind, message, sentence):
    assert _workers.why_it_failed(kind(None, None, message)) == sentence


@pytest.mark.parametrize("kind", [MemoryError, tf.errors.ResourceExhaustedError])
def test_resume_is_advised_only_where_something_was_saved(kind, text, tmp_path, monkeypatch):
    def fail(*args):
        raise kind() if kind is MemoryError else kind(None, None, "OOM when allocating")

    monkeypatch.setattr(script, "make_model", fail)
    options = ("--text", text, "--out", tmp_path, *SMALL)
    with pytest.raises(OSError, match=r"^Memory ran out\..* No checkpoint was saved\.$"):
        train(*options)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ckpt-1.index").touch()
    with pytest.raises(OSError, match=r"^Memory ran out\..* continue with --resume\.$"):
        train(*options)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_is_killed_is_named_by_the_other(killed, text, tmp_path):
    processes = start_workers("--text", text, "--out", tmp_path, *SMALL, "--steps", 100000)
    wait_for_a_checkpoint(tmp_path, processes[0])
    processes[killed].kill()
    processes[killed].communicate()
    _, err = ended(processes[1 - killed], 2)
    assert err.count("\n") == 1
    assert re.match(r"train\.py: error: (Worker \d|Another worker) does not answer: ", err), err
    assert err.endswith("continue with --resume.\n")


@pytest.mark.slow
def test_killed_again_and_again_at_random_steps_it_ends_as_the_uninterrupted_run(text, tmp_path):
    often = ("--evaluate-every", 100, "--checkpoint-every", 5)
    options = ("--text", text, *SMALL, "--steps", 400, *often)
    train("--out", tmp_path / "unbroken", *options)
    run, draw = tmp_path / "run", random.Random(1)
    for attempt in range(6):
        process = start("--out", run, *(("--resume", *often) if attempt else options))
        steps = sorted((run / "checkpoints").glob("*.index"))
        wait_for_a_checkpoint(run, process)
        while process.poll() is None and sorted((run / "checkpoints").glob("*.index")) == steps:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.communicate()
    train("--out", run, "--resume", *often)
    assert history(run) == history(tmp_path / "unbroken")


@pytest.mark.slow
@pytest.mark.parametrize("size", [4_000, 6_000])
def test_a_full_disk_leaves_the_last_checkpoint_whole(size, text, tmp_path):
    # A limit of `size` bytes per file in place of a full disk: the same write fails in the same way.
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    run = tmp_path / "run"
    train("--text", text, "--out", run, *SMALL)
    forget_step_6(run)
    _, err = ended(start("--out", run, "--resume", "--checkpoint-every", 1, preexec_fn=limit), 2)
    assert err.startswith("train.py: error: ")
    assert err.count("\n") == 1
    assert (run / "checkpoints" / "ckpt-4.index").exists()
    train("--out", run, "--resume")
    assert list(history(run)[0]) == [1, 2, 3, 4, 5, 6]

"""Train a causal language model on a text file.

python scripts/train.py
python scripts/train.py --text book.txt --out saved_models/book
python scripts/train.py --out saved_models/book --resume
"""

import argparse
import contextlib
import functools
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

from _run_directory import History, RunDirectory
from _start import (
    check_count,
    check_file,
    check_picture,
    console,
    quiet_imports,
    run,
    write_numbers,
    write_picture,
)
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

with quiet_imports():
    import keras
    import tensorflow as tf

    import keras_tinyattn
    from keras_tinyattn import tokenizer as tokenizers
    from keras_tinyattn import training

SONNETS = Path(__file__).resolve().with_name("sonnets.txt")
LOG_EVERY = 10  # steps
# What decides a run's numbers, and the defaults. A resumed run takes them from its directory.
DECIDING = {
    "text": str(SONNETS),
    "tokenizer": "char",
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 128,
    "sequence_length": 128,
    "dropout": 0.0,
    "untied": False,
    "steps": 1000,
    "batch_size": 32,
    "learning_rate": 3e-3,
    "warmup_steps": None,
    "final_share": 0.02,
    "weight_decay": 0.1,
    "beta_2": 0.99,
    "clip_norm": 1.0,
    "validation_share": 0.1,
    "seed": 0,
    "mixed_precision": False,
}


def main(argv=None):
    arguments = parse_arguments(argv)
    check_options(arguments)
    # Devices are laid out before anything else touches TensorFlow.
    strategy = make_strategy(arguments.strategy, arguments.devices)
    try:
        follow(arguments, strategy)
    except tf.errors.OpError as error:
        # Between the place in the graph and the operation stands what happened.
        reason = re.sub(r"\{\{.*?\}\}|\[Op:.*?\]", "", error.message or type(error).__name__)
        raise OSError(
            f"TensorFlow could not go on: {reason.strip().splitlines()[0]}. What was saved before is "
            "whole; go on from it by --resume."
        ) from error


def follow(arguments, strategy):
    """One run from its options to its end, or to the signal that stops it."""
    # Of several workers one writes and speaks; all of them compute.
    chief = strategy is None or getattr(strategy.cluster_resolver, "task_id", None) in (None, 0)
    output = console()
    output.quiet = not chief
    directory = RunDirectory(
        arguments.out or Path("saved_models") / Path(arguments.text or SONNETS).stem
    )
    settings = settings_of(arguments, directory)
    text = read_text(settings["text"])
    if arguments.resume:
        directory.check_text(settings, text)
    tokenizer = make_tokenizer(settings["tokenizer"], text)
    token_ids = tokenizer.encode(text)
    learn_from, judge_by = training.split_token_ids(token_ids, settings["validation_share"])
    check_length(learn_from, settings)
    prompt = tokenizer.encode(arguments.prompt) if arguments.prompt else token_ids[:1]
    if not 0 < len(prompt) <= settings["sequence_length"]:
        raise ValueError(
            f"--prompt has {len(prompt)} tokens. The model reads 1 to {settings['sequence_length']}."
        )
    model, optimizer = make_model(settings, tokenizer.vocabulary_size, strategy)
    if chief and not arguments.resume:
        directory.create(settings, text, tokenizer)
    checkpoints = training.Checkpoints(directory.checkpoints, model, optimizer)
    first = checkpoints.restore()
    history = directory.history(first) if chief else History(os.devnull)
    judge = make_judge(model, tokenizer, judge_by, history)
    board = (
        tf.summary.create_file_writer(str(directory.logs)) if chief else tf.summary.create_noop_writer()
    )
    output.print(
        f"{model.count_params():,} parameters, {tokenizer.vocabulary_size:,} different tokens; "
        f"{len(learn_from):,} tokens to learn from, {len(judge_by):,} to judge by.",
        markup=False,
    )

    stopped = 0
    every = {
        "evaluate": arguments.evaluate_every or max(1, settings["steps"] // 10),
        "checkpoint": arguments.checkpoint_every or max(1, settings["steps"] // 20),
        "sample": arguments.sample_every,
        "log": LOG_EVERY,
    }
    wall, cpu = time.perf_counter(), time.process_time()
    with (
        strategy.scope() if strategy else contextlib.nullcontext(),
        progress(output, settings, first) as show,
        board.as_default(),
        watched_signals() as signals,
    ):
        for taken, loss in training.train(
            model,
            optimizer,
            learn_from,
            settings["steps"],
            settings["batch_size"],
            seed=settings["seed"],
            clip_norm=settings["clip_norm"] or None,
        ):
            loss = float(loss)
            if not math.isfinite(loss):
                raise ValueError(
                    f"The loss of step {taken} is {loss}. Start another run with a smaller "
                    "--learning-rate or more --warmup-steps."
                )
            history.add_loss(taken, loss)
            stopped = agreed(signals, strategy) if taken < settings["steps"] else 0
            due = {
                name: count and (taken % count == 0 or taken == settings["steps"])
                for name, count in every.items()
            }
            if chief:
                show(taken, history.recent_loss())
                if due["log"]:
                    log_scalar("loss", loss, taken)
                    log_scalar("learning_rate", float(optimizer.learning_rate), taken)
                if due["evaluate"]:
                    output.print(judge(taken), markup=False)
                    if history.last_is_best():
                        directory.save_model(model)
                if due["sample"]:
                    written = sample(model, tokenizer, prompt, arguments.sample_tokens, taken)
                    output.print(f"Step {taken:,} writes {written!r}", markup=False, soft_wrap=True)
                    log_text("sample", written, taken)
                if due["checkpoint"] or stopped:
                    history.write()
                    checkpoints.save()
            if stopped:
                break
    if chief:
        finish(arguments, settings, directory, history, output, stopped, first, wall, cpu)
    if stopped:
        sys.exit(128 + stopped)


def finish(arguments, settings, directory, history, output, stopped, first, wall, cpu):
    """Say how the run went, and write what was asked for."""
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    taken = len(history.losses)
    tokens = (taken - first) * settings["batch_size"] * settings["sequence_length"]
    if tokens:
        output.print(
            f"{taken - first:,} steps, {tokens:,} tokens in {wall:,.0f} s "
            f"({tokens / wall:,.0f} tokens/s) and {cpu:,.0f} s of processor time.",
            markup=False,
        )
    if arguments.plot:
        from keras_tinyattn.plotting import plot_losses

        figure = plot_losses(history.losses, history.evaluations, title=str(settings["text"]))
        write_picture(output, arguments.plot, figure.savefig)
    if arguments.json:
        numbers = {
            "settings": settings,
            "losses": history.losses,
            "evaluations": [{"step": step, "loss": loss} for step, loss in history.evaluations],
            "wall_seconds": wall,
            "cpu_seconds": cpu,
            "tokens": tokens,
        }
        write_numbers(output, arguments.json, numbers)
    if stopped:
        output.print(
            f"Stopped at step {taken:,} of {settings['steps']:,}; a checkpoint is saved. "
            f"Go on with: python {sys.argv[0]} --out {directory.path} --resume",
            markup=False,
            soft_wrap=True,
        )
    elif history.evaluations:
        step, loss = history.best()
        output.print(
            f"Best on the text kept back: {loss:.4f} nats a token at step {step:,}. "
            f"That model is {directory.path / 'model.keras'}.",
            markup=False,
            soft_wrap=True,
        )


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Train a causal language model on a text file, and keep it in a directory.",
        epilog="Ctrl-C saves a checkpoint first; --resume goes on from the newest one.",
        # An option of a resumed run is one that was typed, so defaults are filled in later.
        argument_default=argparse.SUPPRESS,
    )

    def option(group, name, help, **kwargs):
        default = DECIDING.get(name.removeprefix("--").replace("-", "_"))
        if default is not None and default is not False and name != "--text":
            help = f"{help} (default: {default})"
        group.add_argument(name, help=help, **kwargs)

    group = parser.add_argument_group("text")
    option(group, "--text", "a UTF-8 text file (default: Shakespeare's sonnets)", metavar="FILE")
    option(group, "--tokenizer", "what a token is", choices=("byte", "char", "word"))
    option(group, "--validation-share", "share of the text, at its end, to judge by", type=float)
    group = parser.add_argument_group("model")
    option(group, "--num-layers", "number of decoder blocks", type=int)
    option(group, "--num-heads", "attention heads a block; must divide --hidden-dim", type=int)
    option(group, "--hidden-dim", "width of the model", type=int)
    option(group, "--sequence-length", "tokens that the model sees at once", type=int)
    option(group, "--dropout", "share dropped while training", type=float)
    option(group, "--untied", "give the projection a kernel of its own", action="store_true")
    option(group, "--mixed-precision", "compute in bfloat16, keep float32", action="store_true")
    group = parser.add_argument_group("training")
    option(group, "--steps", "optimizer steps", type=int)
    option(group, "--batch-size", "windows a step, on all devices together", type=int)
    option(group, "--learning-rate", "its peak", type=float)
    option(group, "--warmup-steps", "steps until its peak (default: a twentieth of --steps)", type=int)
    option(group, "--final-share", "share of the peak that is left at the end", type=float)
    option(group, "--weight-decay", "of matrices, times the learning rate", type=float)
    option(group, "--beta-2", "memory of AdamW for squared gradients", type=float)
    option(group, "--clip-norm", "longest gradient; 0 for any", type=float)
    option(group, "--seed", "decides weights, batches and dropout", type=int)
    group = parser.add_argument_group("devices")
    option(
        group,
        "--strategy",
        "one device, several of this machine, or several machines that TF_CONFIG names (default: none)",
        choices=("none", "mirrored", "multiworker"),
    )
    option(group, "--devices", "how many of this machine, with --strategy mirrored", type=int)
    group = parser.add_argument_group("output")
    option(group, "--out", "directory of the run (default: saved_models/ and the text's name)")
    option(group, "--resume", "go on with the run in --out", action="store_true")
    option(group, "--checkpoint-every", "steps between checkpoints (default: 20 in all)", type=int)
    option(group, "--evaluate-every", "steps between evaluations (default: 10 in all)", type=int)
    option(group, "--sample-every", "steps between samples of the model's writing", type=int)
    option(group, "--sample-tokens", "length of a sample, in tokens (default: 100)", type=int)
    option(group, "--prompt", "what a sample begins with (default: the text's first token)")
    option(group, "--json", "write losses and settings to this file", metavar="FILE")
    option(group, "--plot", "draw the losses to this file", metavar="FILE")
    arguments = parser.parse_args(argv)
    defaults = {
        "text": None,
        "strategy": "none",
        "devices": None,
        "out": None,
        "sample_tokens": 100,
        "resume": False,
        "checkpoint_every": None,
        "evaluate_every": None,
        "sample_every": None,
        "prompt": None,
        "json": None,
        "plot": None,
    }
    for name, value in defaults.items():
        setattr(arguments, name, getattr(arguments, name, value))
    return arguments


def check_options(arguments):
    for option in ("checkpoint_every", "evaluate_every", "sample_every", "devices", "sample_tokens"):
        if getattr(arguments, option) is not None:
            check_count(f"--{option.replace('_', '-')}", getattr(arguments, option), at_least=1)
    check_picture("--plot", arguments.plot)
    check_file("--json", arguments.json)


def settings_of(arguments, directory):
    """What decides the run's numbers: from its directory if it goes on, else from the options.

    Raises:
        ValueError: if an option contradicts the run, or is out of range.
    """
    typed = {
        name: getattr(arguments, name)
        for name in DECIDING
        if getattr(arguments, name, None) is not None
    }
    if "text" in typed:
        typed["text"] = str(Path(typed["text"]).absolute())
    if arguments.resume:
        settings = directory.settings()
        for name, value in typed.items():
            if settings[name] != value:
                raise ValueError(
                    f"The run in {str(directory.path)!r} has {name}={settings[name]!r}, so it cannot "
                    f"go on with {value!r}. Leave the option out, or start another run by --out."
                )
        return settings
    settings = {**DECIDING, **typed}
    for name in ("steps", "batch_size", "num_layers", "num_heads", "hidden_dim", "sequence_length"):
        check_count(f"--{name.replace('_', '-')}", settings[name], at_least=1)
    if settings["warmup_steps"] is None:
        settings["warmup_steps"] = settings["steps"] // 20
    for name in ("learning_rate", "final_share", "weight_decay", "beta_2", "clip_norm"):
        if not 0 <= settings[name] < math.inf:
            raise ValueError(
                f"--{name.replace('_', '-')} must be a finite number of at least 0, "
                f"but {settings[name]} was received."
            )
    if not -(2**31) <= settings["seed"] < 2**31:
        raise ValueError(f"--seed must fit 32 bits, but {settings['seed']} was received.")
    return settings


def read_text(path):
    """The whole file as a string, line ends as they stand.

    Raises:
        ValueError: if it is empty or no UTF-8.
        OSError: if it cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text needs UTF-8, but byte {error.start:,} of {str(path)!r} is no part of it. "
            "Convert the file first, for example with iconv."
        ) from None
    if not text:
        raise ValueError(f"--text needs something to learn from, but {str(path)!r} is empty.")
    return text


def make_tokenizer(kind, text):
    if kind == "byte":
        return tokenizers.ByteTokenizer()
    cls = tokenizers.CharTokenizer if kind == "char" else tokenizers.WordTokenizer
    return cls.from_text(text)


def check_length(learn_from, settings):
    """Refuse a text that does not fill a window before anything is written.

    Raises:
        ValueError: if it is too short.
    """
    if len(learn_from) <= settings["sequence_length"]:
        raise ValueError(
            "The text is shorter than one window. "
            f"A window and the token after it need {settings['sequence_length'] + 1:,} tokens, "
            f"and there are {len(learn_from):,} to learn from. "
            "Give a longer text, or a smaller --sequence-length or --validation-share."
        )


def make_strategy(name, devices):
    """The `tf.distribute` strategy, or None for one device."""
    if name == "multiworker":
        if "TF_CONFIG" not in os.environ:
            raise ValueError(
                "--strategy multiworker finds the other machines in the environment variable "
                "TF_CONFIG, which is not set; the README shows one."
            )
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "none":
        return None
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        devices = devices or len(gpus)
        if devices > len(gpus):
            raise ValueError(
                f"--devices {devices} was asked for, but TensorFlow sees {len(gpus)} GPUs."
            )
        return tf.distribute.MirroredStrategy([f"GPU:{index}" for index in range(devices)])
    devices = devices or os.cpu_count()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * devices
    )
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(devices)])


def make_model(settings, vocabulary_size, strategy):
    """The model and its optimizer, built, on the devices of the strategy."""
    keras.utils.set_random_seed(settings["seed"])
    keras.mixed_precision.set_global_policy(
        "mixed_bfloat16" if settings["mixed_precision"] else "float32"
    )
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras_tinyattn.gpt(
            vocabulary_size,
            settings["sequence_length"],
            settings["hidden_dim"],
            settings["num_heads"],
            settings["num_layers"],
            dropout=settings["dropout"],
            tie_embeddings=not settings["untied"],
        )
        model.build((None, settings["sequence_length"]))
        optimizer = training.make_optimizer(
            model,
            settings["learning_rate"],
            settings["steps"],
            settings["warmup_steps"],
            settings["final_share"],
            settings["weight_decay"],
            settings["beta_2"],
        )
        optimizer.build(model.trainable_variables)
    return model, optimizer


def make_judge(model, tokenizer, judge_by, history):
    """A function of the step that measures the model, keeps the figures and puts them into words."""
    evaluate = training.make_evaluation(model, judge_by) if len(judge_by) > 1 else None
    characters = len(tokenizer.decode(judge_by[1:])) if evaluate else 0

    def judge(taken):
        line = f"Step {taken:,}: loss {history.recent_loss():.4f}"
        if not evaluate:
            return f"{line}."
        judged = evaluate()
        history.add_evaluation(taken, judged.loss)
        log_scalar("validation_loss", judged.loss, taken)
        return (
            f"{line}, validation {judged.loss:.4f} nats a token, perplexity {judged.perplexity:.2f}, "
            f"{judged.bits(characters):.3f} bits a character."
        )

    return judge


def sample(model, tokenizer, prompt, length, seed):
    """What the model writes after the prompt."""
    written = model.generate(prompt, length, temperature=0.8, seed=seed)
    return tokenizer.decode(written.token_ids[: written.lengths])


def log_scalar(name, value, step):
    """For TensorBoard, which need not be installed to write for it."""
    _log("scalars", name, tf.constant(value, "float32"), step)


def log_text(name, text, step):
    _log("text", name, tf.constant([text]), step)


def _log(plugin, name, tensor, step):
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(name, tensor, step, metadata)


@contextlib.contextmanager
def watched_signals():
    """A list that the first Ctrl-C or TERM puts its number into; a second one ends the process."""
    received = []

    def remember(number, frame):
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agreed(signals, strategy):
    """The number of the signal that stops the run, after this step, on every worker alike; or 0."""
    number = signals[0] if signals else 0
    if strategy is None or strategy.cluster_resolver is None:
        return number
    # A worker that stopped alone would leave the others waiting for its gradients.
    return int(_largest(strategy)(tf.constant(number)))


@functools.cache
def _largest(strategy):
    @tf.function
    def largest(number):
        def on_device(number):
            every = tf.distribute.get_replica_context().all_gather(number[None], axis=0)
            return tf.reduce_max(every)

        return strategy.experimental_local_results(strategy.run(on_device, (number,)))[0]

    return largest


@contextlib.contextmanager
def progress(output, settings, first):
    """A bar with loss, speed and time left, on a terminal; yields `show(taken, loss)`."""
    tokens_per_step = settings["batch_size"] * settings["sequence_length"]
    columns = (
        TextColumn("step {task.completed:,.0f} of {task.total:,.0f}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output, transient=True, disable=not output.is_terminal) as bar:
        task = bar.add_task("", total=settings["steps"], completed=first, loss=math.nan, rate=0.0)

        def show(taken, loss):
            rate = (bar.tasks[0].speed or 0.0) * tokens_per_step
            bar.update(task, completed=taken, loss=loss, rate=rate)

        yield show


if __name__ == "__main__":
    run(main)

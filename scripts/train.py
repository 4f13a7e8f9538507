"""Train a causal language model on a text file.

python scripts/train.py
python scripts/train.py --text book.txt --out saved_models/book
python scripts/train.py --out saved_models/book --resume
"""

import argparse
import contextlib
import math
import os
import sys
import time
from pathlib import Path

from _run_directory import History, RunDirectory
from _start import (
    check_count,
    check_file,
    check_picture,
    console,
    local_path,
    quiet_imports,
    run,
    write_numbers,
    write_picture,
)
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

with quiet_imports():
    import keras
    import tensorflow as tf
    from _workers import make_largest, make_strategy, watched_signals, why_it_failed

    import keras_tinyattn
    from keras_tinyattn import ByteTokenizer, CharTokenizer, WordTokenizer, training

SONNETS = Path(__file__).resolve().with_name("sonnets.txt")
TOKENIZERS = {
    "byte": lambda text: ByteTokenizer(),
    "char": CharTokenizer.from_text,
    "word": WordTokenizer.from_text,
}
LOG_EVERY = 10  # steps


def main(argv=None):
    options, settings, directory = parse_arguments(argv)
    # Devices are configured before anything else touches TensorFlow.
    strategy = make_strategy(options.strategy, options.devices)
    try:
        with contextlib.ExitStack() as until_it_ends:
            train(options, settings, directory, strategy, until_it_ends)
    except (tf.errors.OpError, MemoryError) as error:
        saved = "The checkpoints saved before are complete; continue with --resume."
        saved = saved if directory.saved() else "No checkpoint was saved."
        raise OSError(f"{why_it_failed(error)} {saved}") from error


def train(options, settings, directory, strategy, until_it_ends):
    """One run, from its options to its end or to the signal that stops it."""
    # Of several workers one writes and prints; all of them compute.
    chief = strategy is None or getattr(strategy.cluster_resolver, "task_id", None) in (None, 0)
    output = console()
    output.quiet = not chief
    text = read_text(settings["text"])
    if options.resume:
        directory.check_text(settings["text"], text)
    tokenizer = TOKENIZERS[settings["tokenizer"]](text)
    token_ids = tokenizer.encode(text)
    train_ids, validation_ids = training.split_token_ids(token_ids, settings["validation_share"])
    prompt = tokenizer.encode(settings["prompt"]) if settings["prompt"] else token_ids[:1]
    check_lengths(train_ids, prompt, settings["sequence_length"])
    model, optimizer = make_model(settings, tokenizer.vocabulary_size, strategy)
    if chief:
        until_it_ends.enter_context(directory.lock())
        if not options.resume:
            directory.create(settings, text, tokenizer)
    checkpoints = training.Checkpoints(directory.checkpoints, model, optimizer)
    first = checkpoints.restore()
    history = directory.history(first) if chief else History(os.devnull)
    evaluate = make_evaluate(model, tokenizer, validation_ids, history)
    board = tf.summary.create_file_writer(str(directory.logs)) if chief else None
    output.print(
        f"{model.count_params():,} parameters, {tokenizer.vocabulary_size:,} different tokens; "
        f"{len(train_ids):,} tokens for training, {len(validation_ids):,} for validation.",
        markup=False,
    )
    every = {
        "log": LOG_EVERY,
        "evaluate": settings["evaluate_every"],
        "sample": settings["sample_every"],
        "checkpoint": settings["checkpoint_every"],
    }
    stopped = 0
    wall, cpu = time.perf_counter(), time.process_time()
    with (
        strategy.scope() if strategy else contextlib.nullcontext(),
        progress(output, settings, first) as show,
        board.as_default() if board else contextlib.nullcontext(),
        watched_signals() as signals,
    ):
        largest = make_largest(strategy)
        for taken, loss in training.train(
            model,
            optimizer,
            train_ids,
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
            last = taken == settings["steps"]
            # A worker that stopped alone would leave the others waiting for its gradients.
            stopped = 0 if last else largest(signals[0] if signals else 0)
            due = [name for name, count in every.items() if count and (last or taken % count == 0)]
            if stopped or {*due} - {"log"}:
                checkpoints.check_finite()  # By all workers, so that all of them end.
            if chief:
                show(taken, history.recent_loss())
                if "log" in due:
                    log("scalars", "loss", tf.constant(loss), taken)
                    log("scalars", "learning_rate", optimizer.learning_rate, taken)
                if "evaluate" in due:
                    output.print(evaluate(taken), markup=False)
                    if history.last_is_best():
                        directory.save_model(model)
                if "sample" in due:
                    length = settings["sample_tokens"]
                    sampled = model.generate(prompt, length, temperature=0.8, seed=taken)
                    sampled = tokenizer.decode(sampled.token_ids[: sampled.lengths])
                    output.print(f"Step {taken:,} writes {sampled!r}", markup=False, soft_wrap=True)
                    log("text", "sample", tf.constant([sampled]), taken)
                if "checkpoint" in due or stopped:
                    history.write()
                    checkpoints.save()
            if stopped:
                break
    if chief:
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        finish(options, settings, directory, history, output, stopped, first, *seconds)
    if stopped:
        sys.exit(128 + stopped)


def finish(options, settings, directory, history, output, stopped, first, wall, cpu):
    """Print how the run went, and write the files that were asked for."""
    taken = len(history.losses)
    tokens = (taken - first) * settings["batch_size"] * settings["sequence_length"]
    if tokens:
        output.print(
            f"{taken - first:,} steps, {tokens:,} tokens in {wall:,.0f} s "
            f"({tokens / wall:,.0f} tokens/s) and {cpu:,.0f} s of processor time.",
            markup=False,
        )
    if options.plot:
        from keras_tinyattn.plotting import plot_losses

        figure = plot_losses(history.losses, history.evaluations, title=str(settings["text"]))
        write_picture(output, options.plot, figure.savefig)
    if options.json:
        numbers = {
            "settings": settings,
            "losses": history.losses,
            "evaluations": [{"step": step, "loss": loss} for step, loss in history.evaluations],
            "wall_seconds": wall,
            "cpu_seconds": cpu,
            "tokens": tokens,
        }
        write_numbers(output, options.json, numbers)
    if stopped:
        last = (
            f"Stopped at step {taken:,} of {settings['steps']:,}; a checkpoint is saved. "
            f"Continue with: python {sys.argv[0]} --out {directory.path} --resume"
        )
    elif history.evaluations and not history.best():
        last = "No evaluation had a finite loss, so no model is kept."
    elif history.evaluations:
        step, loss = history.best()
        last = (
            f"Best validation loss: {loss:.4f} nats per token at step {step:,}. "
            f"That model is {directory.model}."
        )
    else:
        last = f"The model is {directory.model}."
    output.print(last, markup=False, soft_wrap=True)


def parse_arguments(argv):
    """The options, those that a run keeps as a dictionary of its settings, and its directory."""
    deciding = argparse.ArgumentParser(add_help=False)  # They decide the run's numbers.
    deciding.set_defaults(text=str(SONNETS))
    group = deciding.add_argument_group("text")
    option(group, "--text", "a UTF-8 text file (default: Shakespeare's sonnets)", metavar="FILE")
    option(group, "--tokenizer", "what a token is", default="char", choices=TOKENIZERS)
    option(group, "--validation-share", "share of the text, at its end, for validation", default=0.1)
    group = deciding.add_argument_group("model")
    option(group, "--num-layers", "number of decoder blocks", default=4)
    option(group, "--num-heads", "attention heads per block; must divide --hidden-dim", default=4)
    option(group, "--hidden-dim", "width of the model", default=128)
    option(group, "--sequence-length", "tokens that the model sees at once", default=128)
    option(group, "--dropout", "share dropped in training", default=0.0)
    option(group, "--untied", "give the projection its own kernel", action="store_true")
    option(group, "--mixed-precision", "compute in bfloat16, keep float32", action="store_true")
    group = deciding.add_argument_group("training")
    option(group, "--steps", "optimizer steps", default=1000)
    option(group, "--batch-size", "windows per step, on all devices together", default=32)
    option(group, "--learning-rate", "its peak", default=3e-3)
    option(group, "--warmup-steps", "steps until its peak (default: a twentieth of --steps)", type=int)
    option(group, "--final-share", "share of the peak that is left at the end", default=0.02)
    option(group, "--weight-decay", "of matrices, times the learning rate", default=0.1)
    option(group, "--beta-2", "AdamW's decay rate of squared gradients", default=0.99)
    option(group, "--clip-norm", "largest norm of a gradient; 0 for any", default=1.0)
    option(group, "--seed", "decides weights, batches and dropout", default=0)
    kept = argparse.ArgumentParser(add_help=False, exit_on_error=False, parents=[deciding])
    group = kept.add_argument_group("when, also after --resume")
    option(group, "--checkpoint-every", "steps between checkpoints (default: 20 in all)", type=int)
    option(group, "--evaluate-every", "steps between evaluations (default: 10 in all)", type=int)
    option(group, "--sample-every", "steps between samples of what the model writes", type=int)
    option(group, "--sample-tokens", "length of a sample, in tokens", default=100)
    option(group, "--prompt", "what a sample begins with (default: the text's first token)")
    parser = argparse.ArgumentParser(
        description="Train a causal language model on a text file, and keep it in a directory.",
        epilog="Ctrl-C saves a checkpoint first; --resume continues from the newest one.",
        parents=[kept],
    )
    group = parser.add_argument_group("devices")
    option(
        group,
        "--strategy",
        "one device, several of this machine, or several machines that TF_CONFIG names",
        default="none",
        choices=("none", "mirrored", "multiworker"),
    )
    option(group, "--devices", "how many of this machine, with --strategy mirrored", type=int)
    group = parser.add_argument_group("output")
    option(group, "--out", "directory of the run (default: saved_models/ and the text's name)")
    option(group, "--resume", "continue the run in --out, with its settings", action="store_true")
    option(group, "--json", "write losses and settings to this file", metavar="FILE")
    option(group, "--plot", "draw the losses to this file", metavar="FILE")
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(argv)
    directory = RunDirectory(options.out or Path("saved_models") / Path(options.text).stem)
    if options.resume:
        names = vars(deciding.parse_args([])).keys()
        # argparse fills in the default of an option only where the namespace has no value yet.
        typed = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names))))
        typed = [f"--{name.replace('_', '-')}" for name in names if typed[name] is not None]
        if typed:
            raise ValueError(
                f"--resume takes the settings of the run, and so no {' and no '.join(typed)}. "
                "Leave that out, or start another run."
            )
        options = parser.parse_args([*directory.arguments(kept), *argv])
    settings = {name: getattr(options, name) for name in vars(kept.parse_args([]))}
    check_options(options, settings)
    return options, settings, directory


def option(group, name, help, default=None, **kwargs):
    if default is not None:
        help += " (default: %(default)s)"
        kwargs |= {"default": default, "type": type(default)}
    group.add_argument(name, help=help, **kwargs)


def check_options(options, settings):
    """Refuse what is out of range, and fill in what follows from other settings."""
    check_picture("--plot", options.plot)
    check_file("--json", options.json)
    for name, value in {**settings, "devices": options.devices}.items():
        # The seed has a range of its own, and no warm-up is fine.
        if type(value) is int and name not in ("seed", "warmup_steps"):
            check_count(f"--{name.replace('_', '-')}", value, at_least=1)
            check_count(f"--{name.replace('_', '-')}", value, at_most=2**31 - 1)
    for name in ("learning_rate", "final_share", "weight_decay", "beta_2", "clip_norm"):
        if not 0 <= settings[name] < math.inf:
            raise ValueError(
                f"--{name.replace('_', '-')} must be a finite number of at least 0, "
                f"but {settings[name]} was received."
            )
    check_count("--seed", settings["seed"], at_least=-(2**31), at_most=2**31 - 1)
    settings["text"] = str(local_path(settings["text"]).absolute())
    if settings["warmup_steps"] is None:
        settings["warmup_steps"] = settings["steps"] // 20
    settings["evaluate_every"] = settings["evaluate_every"] or max(1, settings["steps"] // 10)
    settings["checkpoint_every"] = settings["checkpoint_every"] or max(1, settings["steps"] // 20)


def read_text(path):
    """The whole file as a string, its line ends unchanged."""
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")  # A byte order mark is no text.
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text needs UTF-8, but byte {error.start:,} of {str(path)!r} is not part of it. "
            "Convert the file first, for example with iconv."
        ) from None
    if not text:
        raise ValueError(f"--text needs a text to train on, but {str(path)!r} is empty.")
    return text


def check_lengths(train_ids, prompt, sequence_length):
    """Refuse, before anything is written, a text that is too short or a prompt that is too long."""
    if len(train_ids) <= sequence_length:
        raise ValueError(
            "The text is shorter than one window. "
            f"A window and the token after it need {sequence_length + 1:,} tokens, "
            f"and there are {len(train_ids):,} for training. "
            "Give a longer text, or a smaller --sequence-length or --validation-share."
        )
    if not 0 < len(prompt) <= sequence_length:
        raise ValueError(f"--prompt has {len(prompt)} tokens. The model reads 1 to {sequence_length}.")


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
        names = ("learning_rate", "steps", "warmup_steps", "final_share", "weight_decay", "beta_2")
        optimizer = training.make_optimizer(model, **{name: settings[name] for name in names})
        optimizer.build(model.trainable_variables)
    return model, optimizer


def make_evaluate(model, tokenizer, validation_ids, history):
    """A function of the step that evaluates the model, records the loss and returns a line about it."""
    measure = training.make_evaluation(model, validation_ids) if len(validation_ids) > 1 else None
    characters = len(tokenizer.decode(validation_ids[1:])) if measure else 0

    def evaluate(taken):
        line = f"Step {taken:,}: loss {history.recent_loss():.4f}"
        if not measure:
            return f"{line}."
        evaluation = measure()
        history.add_evaluation(taken, evaluation.loss)
        log("scalars", "validation_loss", tf.constant(evaluation.loss), taken)
        return (
            f"{line}, validation {evaluation.loss:.4f} nats per token, perplexity "
            f"{evaluation.perplexity:.2f}, {evaluation.bits(characters):.3f} bits per character."
        )

    return evaluate


def log(plugin, name, tensor, step):
    """Write a value for TensorBoard, which need not be installed."""
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(name, tensor, step, metadata)


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

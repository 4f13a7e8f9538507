"""What a script does around its own work: start quietly, check its options, end like a command."""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


@contextlib.contextmanager
def quiet_imports():
    """Import TensorFlow inside this block, and it says nothing on standard error.

    No environment variable hides all the lines that its libraries write while they load, so the file
    descriptor itself is turned away, for the imports only; if they fail, what they wrote is shown.
    `TF_CPP_MIN_LOG_LEVEL=0` in the environment shows everything.
    """
    # The scripts use TensorFlow's own tape and functions, whatever backend Keras was set to.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        standard_error = os.dup(2)
    except OSError:  # The process was started without one.
        yield
        return
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except BaseException:
            held_back.seek(0)
            with open(standard_error, "wb", closefd=False) as shown:
                shutil.copyfileobj(held_back, shown)
            raise
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)


def run(main, argv=None):
    """Call `main(argv)` and end the process: 0, or one sentence on standard error and 2.

    Args:
        main: takes a list of arguments, or None for those of the process; raises ValueError or
            OSError for what its user can put right.
        argv: the arguments.

    Raises:
        SystemExit: always.
    """
    try:
        main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader, `head` say, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        print(f"{Path(sys.argv[0]).name}: error: {' '.join(reason.split())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def console():
    """A console for tables and sentences: at most 88 columns, since longer lines read badly."""
    if hasattr(sys.stdout, "reconfigure"):
        # Under an encoding without them, a `?` stands for signs such as the square root.
        sys.stdout.reconfigure(errors="replace")
    output = Console(highlight=False)
    output.width = min(output.width, 88)
    return output


def lesson_parser(description, plot=None):
    """A parser with the options of every lesson: `--json`, and `--plot` if there is something to draw.

    Args:
        description: what the lesson shows.
        plot: help text of `--plot`; without one there is no such option.
    """
    parser = argparse.ArgumentParser(description=description)
    if plot is not None:
        parser.add_argument("--plot", metavar="FILE.png", help=plot)
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    return parser


def parse_lesson(parser, argv):
    """The options; before any work is done, a file that could not be written after it is refused.

    Raises:
        ValueError: if a file cannot be written, or matplotlib is missing for `--plot`.
    """
    options = parser.parse_args(argv)
    check_picture("--plot", getattr(options, "plot", None))
    check_file("--json", options.json)
    return options


def check_count(option, value, at_least=0, at_most=None):
    """Refuse a number of steps, epochs or tokens that is out of range.

    Raises:
        ValueError: if it is.
    """
    if value < at_least or (at_most is not None and value > at_most):
        allowed = f"{at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{option} must be {allowed}, but {value} was received.")


def check_file(option, path, suffixes=()):
    """Refuse, before any work is done, a file that could not be written after it.

    Args:
        option: the option's name, for the message.
        path: where to write; None checks nothing.
        suffixes: the endings that the name may have; any unless given.

    Raises:
        ValueError: if the name has another ending, or the file cannot be written there.
    """
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        problem = "it is a directory"
    elif not folder.is_dir():
        problem = f"the directory {str(folder)!r} does not exist"
    elif suffixes and Path(path).suffix.lower() not in suffixes:
        problem = f"its name does not end in {' or '.join(suffixes)}"
    elif not os.access(path if Path(path).exists() else folder, os.W_OK):
        problem = "the permission is missing"
    else:
        return
    raise ValueError(f"{option} needs a file that can be written, but for {str(path)!r} {problem}.")


def check_picture(option, path):
    """As `check_file`, for a picture that matplotlib draws.

    Raises:
        ValueError: as `check_file`; if matplotlib is not installed.
    """
    check_file(option, path, PICTURE_SUFFIXES)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} draws with matplotlib, which is not installed; "
            'install it with `pip install "keras-tinyattn[plot]"`.'
        )


@contextlib.contextmanager
def whole_file(path):
    """A name beside `path` to write to, renamed to it at the end of a block that succeeds.

    So nobody meets half a file, and a failure leaves what stood there before.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # Such as /dev/stdout.
        yield path
        return
    path = path.resolve()
    part = path.with_name(f".{os.getpid()}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_picture(output, path, save):
    """Write a picture with `save(path)` and say so; None writes nothing."""
    if path is not None:
        with whole_file(path) as part:
            save(part)
        output.print(f"Picture: {path}", markup=False, soft_wrap=True)


def write_numbers(output, path, numbers):
    """Write numbers as JSON and say so; None writes nothing.

    Args:
        output: a rich console.
        path: the file, or None.
        numbers: what JSON knows, and NumPy arrays and numbers besides; NaN and infinity become null.
    """
    if path is not None:
        with whole_file(path) as part:
            text = json.dumps(_plain(numbers), indent=1, allow_nan=False)
            part.write_text(text + "\n", encoding="utf-8")
        output.print(f"Numbers: {path}", markup=False, soft_wrap=True)


def _plain(value):
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ran_on(tensor):
    """The device that computed an eager tensor, in words: "CPU (...)" or "GPU:0 (its name)"."""
    import tensorflow as tf

    device = tf.DeviceSpec.from_string(tensor.device)
    gpus = tf.config.list_physical_devices("GPU")
    if device.device_type != "GPU":
        return f"{device.device_type} (TensorFlow sees {len(gpus) or 'no'} GPU{'s' * (len(gpus) > 1)})"
    details = tf.config.experimental.get_device_details(gpus[min(device.device_index, len(gpus) - 1)])
    return f"GPU:{device.device_index} ({details.get('device_name', 'of unknown name')})"

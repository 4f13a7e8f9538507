"""What every script needs: a quiet start, checked options, files written whole, an exit code."""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

# From its file, so that no script imports the package before it is quiet.
_PATHS = runpy.run_path(str(Path(__file__).parents[1] / "keras_tinyattn" / "_paths.py"))
local_path, version_folder = _PATHS["local_path"], _PATHS["version_folder"]

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


@contextlib.contextmanager
def quiet_imports():
    """Import TensorFlow inside this block without its start-up messages on standard error.

    No environment variable hides all that its libraries write while they load, so the file descriptor
    itself is redirected during the imports. If they fail, what they wrote is shown. Set
    `TF_CPP_MIN_LOG_LEVEL=0` to see everything.
    """
    # The scripts use TensorFlow's own tape and functions, so no other backend will do.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        standard_error = os.dup(2)
    except OSError:  # The process has no standard error.
        yield
        return
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            hidden.seek(0)
            with open(standard_error, "wb", closefd=False) as shown:
                shutil.copyfileobj(hidden, shown)
            raise
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)


def run(main, argv=None):
    """Call `main(argv)` and exit: with 0, or with 2 and one sentence on standard error.

    Args:
        main: takes a list of arguments, or None for those of the command line; raises ValueError or
            OSError for what the user can fix.
        argv: the arguments.

    Raises:
        SystemExit: always.
    """
    try:
        main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader, such as `head`, is gone.
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
    """A rich console at most 88 columns wide, since longer lines are hard to read."""
    if hasattr(sys.stdout, "reconfigure"):
        # Characters that the encoding lacks become `?`.
        sys.stdout.reconfigure(errors="replace")
    output = Console(highlight=False)
    output.width = min(output.width, 88)
    return output


def lesson_parser(description, plot=None):
    """A parser with the options of every lesson: `--json`, and `--plot` if there is a picture.

    Args:
        description: what the lesson shows.
        plot: the help text of `--plot`; None leaves the option out.
    """
    parser = argparse.ArgumentParser(description=description)
    if plot is not None:
        parser.add_argument("--plot", metavar="FILE.png", help=plot)
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    return parser


def parse_lesson(parser, argv):
    """Parse the options and check the files of `--plot` and `--json`.

    Raises:
        ValueError: if a file cannot be written, or matplotlib is missing for `--plot`.
    """
    options = parser.parse_args(argv)
    check_picture("--plot", getattr(options, "plot", None))
    check_file("--json", options.json)
    return options


def check_count(option, value, at_least=0, at_most=None):
    """Raise ValueError if a number of steps, epochs or tokens, or a seed, is out of range."""
    if value < at_least or (at_most is not None and value > at_most):
        allowed = f"{at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{option} must be {allowed}, but {value} was received.")


def check_file(option, path, suffixes=()):
    """Fail before any work is done if a file could not be written after it.

    Args:
        option: the option's name, for the message.
        path: where to write; None checks nothing.
        suffixes: the suffixes allowed; any if empty.

    Raises:
        ValueError: if the suffix is not allowed, or the file cannot be written.
    """
    if path is None:
        return
    path = local_path(path)
    folder = path.absolute().parent
    if path.is_dir():
        problem = f"{str(path)!r} is a directory"
    elif not folder.is_dir():
        problem = f"the directory {str(folder)!r} does not exist"
    elif suffixes and path.suffix.lower() not in suffixes:
        problem = f"{str(path)!r} does not end in {' or '.join(suffixes)}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = f"there is no permission to write {str(path)!r}"
    else:
        return
    raise ValueError(f"{option} needs a file that can be written, but {problem}.")


def check_picture(option, path):
    """Like `check_file`, for a picture; matplotlib must be installed.

    Raises:
        ValueError: as `check_file`, or if matplotlib is not installed.
    """
    check_file(option, path, PICTURE_SUFFIXES)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} draws with matplotlib, which is not installed. "
            'Install it with `pip install "keras-tinyattn[plot]"`.'
        )


@contextlib.contextmanager
def whole_file(path):
    """Yield a temporary name next to `path`; the file replaces `path` when the block succeeds.

    A reader never sees half a file, and a failure keeps the old one.
    """
    path = local_path(path)
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


def write_file(output, kind, path, write):
    """Write a file with `write(path)` and print its kind and path; None writes nothing."""
    if path is not None:
        with whole_file(path) as part:
            write(part)
        output.print(f"{kind}: {path}", markup=False, soft_wrap=True)


def write_picture(output, path, save):
    """Write a picture with `save(path)` and print its path; None writes nothing."""
    write_file(output, "Picture", path, save)


def write_numbers(output, path, numbers):
    """Write numbers as JSON and print the path; None writes nothing.

    Args:
        output: a rich console.
        path: the file, or None.
        numbers: what `json` can write, NumPy arrays and NumPy numbers; NaN and infinity become null.
    """

    def write(part):
        text = json.dumps(_plain(numbers), indent=1, allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8")

    write_file(output, "Numbers", path, write)


def _plain(value):
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ran_on(tensor):
    """The device that computed an eager tensor: "CPU (TensorFlow sees no GPU)" or "GPU:0 (NAME)"."""
    import tensorflow as tf

    device = tf.DeviceSpec.from_string(tensor.device)
    gpus = tf.config.list_physical_devices("GPU")
    if device.device_type != "GPU":
        return f"{device.device_type} (TensorFlow sees {len(gpus) or 'no'} GPU{'s' * (len(gpus) > 1)})"
    details = tf.config.experimental.get_device_details(gpus[min(device.device_index, len(gpus) - 1)])
    return f"GPU:{device.device_index} ({details.get('device_name', 'unknown name')})"

"""Commands of the package: `python -m keras_tinyattn verify PATH`."""

import argparse
import contextlib
import os
import sys


def main(argv=None):
    """Run a command; the exit code: 0 if all is well, 1 if a check failed, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m keras_tinyattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="check an export against its own model card")
    command.add_argument(
        "path", help="a base folder (its newest version is checked) or a version folder"
    )
    command.set_defaults(run=verify)
    options = parser.parse_args(argv)
    return options.run(options)


def verify(options):
    """Check an export, and print a table of the checks."""
    with quiet_imports():
        from rich.console import Console
        from rich.table import Table

        from keras_tinyattn.export import verify_saved_model

    try:
        checks = verify_saved_model(options.path)
    except (OSError, ValueError) as error:
        print(f"keras_tinyattn verify: error: {error}", file=sys.stderr)
        return 2
    table = Table("check", "seen", "", title=f"Export {options.path}")
    for check in checks:
        verdict = {True: "ok", False: "FAILED", None: "not checked"}[check.passed]
        table.add_row(check.name, check.seen, verdict)
    console = Console(highlight=False)
    console.print(table)
    failed = [check.name for check in checks if check.passed is False]
    left = [check.name for check in checks if check.passed is None]
    if failed:
        console.print(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}.")
    elif not left:
        console.print(f"All {len(checks)} checks passed.")
    if left:
        console.print(f"{len(left)} of {len(checks)} could not be checked: {', '.join(left)}.")
    return 1 if failed else 0


@contextlib.contextmanager
def quiet_imports():
    """Import TensorFlow in this block without the lines that its libraries write while they load.

    They write them to the file descriptor of standard error, and no environment variable hides them
    all. `TF_CPP_MIN_LOG_LEVEL=0` in the environment shows everything.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "0":
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        standard_error = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)


if __name__ == "__main__":
    sys.exit(main())

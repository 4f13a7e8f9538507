"""Commands of the package: `python -m keras_tinyattn verify PATH`."""

import argparse
import os
import sys


def main(argv=None):
    """Run a command; the exit code: 0 if all is well, 1 if a check failed, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m keras_tinyattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="check an export against its own model card")
    verify.add_argument(
        "path", help="a base folder (its newest version is checked) or a version folder"
    )
    options = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return _verify(options.path)


def _verify(path):
    from rich.console import Console
    from rich.table import Table

    from keras_tinyattn.export import verify_saved_model

    try:
        checks = verify_saved_model(path)
    except (OSError, ValueError) as error:
        print(f"keras_tinyattn verify: error: {error}", file=sys.stderr)
        return 2
    table = Table("check", "seen", "", title=f"Export {path}")
    for check in checks:
        table.add_row(check.name, check.seen, "ok" if check.passed else "FAILED")
    console = Console(highlight=False)
    console.print(table)
    failed = [check.name for check in checks if not check.passed]
    console.print(
        f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}."
        if failed
        else f"All {len(checks)} checks passed."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

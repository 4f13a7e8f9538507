"""What a lesson prints: headings, points, and tables of numbers."""

import math

from rich import box
from rich.padding import Padding
from rich.table import Table


def section(output, title, text=""):
    """Print a heading and the text under it."""
    output.print(f"\n[bold]{title}[/]")
    if text:
        output.print(text)


def point(output, text):
    """Print a bullet point; lines after the first are indented."""
    bullet = Table.grid(padding=(0, 1, 0, 0))
    bullet.add_row("[green]*[/]", text)
    output.print(bullet)


def print_matrix(output, matrix, rows, columns, number="{:.3f}", corner="", extra=None, bold=False):
    """Print a matrix with names on its rows and columns.

    Args:
        output: a rich console.
        matrix: `(len(rows), len(columns))` numbers.
        rows: names of the rows.
        columns: names of the columns.
        number: format of an entry.
        corner: the heading above the row names.
        extra: for one more column on the right, its heading and one text per row.
        bold: whether the largest entry of each row is bold.
    """
    cells = [
        [
            f"[bold]{number.format(entry)}[/]"
            if bold and entry == max(entries)
            else number.format(entry)
            for entry in entries
        ]
        for entries in matrix
    ]
    if extra:
        columns = [*columns, extra[0]]
        cells = [[*entries, text] for entries, text in zip(cells, extra[1], strict=True)]
    print_columns(
        output,
        [corner, *columns],
        [[f"[bold cyan]{name}[/]", *entries] for name, entries in zip(rows, cells, strict=True)],
        "l" + "r" * len(columns),
    )


def print_columns(output, names, rows, sides):
    """Print a table of texts.

    Args:
        output: a rich console.
        names: the headings of the columns.
        rows: for each row, one text per column.
        sides: for each column, "l" (left-aligned) or "r" (right-aligned).
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False, show_edge=False)
    for name, side in zip(names, sides, strict=True):
        table.add_column(str(name), justify="left" if side == "l" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    output.print(Padding(table, (1, 0, 1, 2), expand=False))


def print_losses(output, losses, early=False, number="{:.4f}"):
    """Print at most nine rows of step, loss and a bar, the first and the last step among them.

    Args:
        output: a rich console.
        losses: the loss after 0, 1, ... steps.
        early: whether to show more of the first steps, where a loss falls fast.
        number: format of a loss.
    """
    last = len(losses) - 1
    power = 2 if early else 1
    shown = sorted({round(last * (index / 8) ** power) for index in range(9)})
    block = "\u2588" if output.encoding.lower().startswith("utf") else "#"
    rows = [
        (
            str(step),
            number.format(losses[step]),
            block * min(40, math.ceil(30 * losses[step] / losses[0])),
        )
        for step in shown
    ]
    print_columns(output, ("steps", "loss", ""), rows, "rrl")

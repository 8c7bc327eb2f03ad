"""Tables: drawn by rich on a terminal, one plain line for each row elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["show"]


def show(rows: Sequence[Mapping[str, str]], columns: Sequence[Sequence[str]]) -> None:
    """Print ``rows``.

    Args:
        rows: text under the names used in ``columns``.
        columns: the layout on a terminal, where the names within one column are stacked so that
            the table fits; in plain text each name is a column, and no line is cut or wrapped.
    """
    drawn = _drawn(rows, columns) if sys.stdout.isatty() else None
    if drawn is None:
        print(plain(rows, [name for column in columns for name in column]))
    else:
        from rich.console import Console

        Console().print(drawn)


def plain(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """Aligned columns, two spaces apart.

    >>> print(plain([{"op": "rms_norm", "on": "cpu"}], ["op", "on"]))
    op        on
    rms_norm  cpu
    """
    cells = [list(names), *([row[name] or "-" for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(line)).rstrip() for line in cells
    )


def _drawn(rows: Sequence[Mapping[str, str]], columns: Sequence[Sequence[str]]) -> Table | None:
    """The table for a terminal; ``None`` without rich, which the doctor must do without."""
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return None
    table = Table(box=box.SIMPLE_HEAD, show_lines=any(len(column) > 1 for column in columns))
    for column in columns:
        table.add_column("\n".join(column), overflow="fold")
    for row in rows:
        table.add_row(
            *(Text("\n".join(row[name] for name in column if row[name])) for column in columns)
        )
    return table

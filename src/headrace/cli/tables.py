"""Tables and lines of a frame: as wide as the terminal, and no wider."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from headrace.cli.quantities import printable
from headrace.versions import Versions, python_mismatch, release_mismatch

__all__ = ["cut", "fitted", "other_versions", "table"]

_MOST_NAMED = 3


class _Worker(Protocol):
    """Whoever has an address and versions."""

    @property
    def address(self) -> str:
        """Where it listens."""

    @property
    def versions(self) -> Versions:
        """Of its process."""


def other_versions(mine: Versions, workers: Sequence[_Worker]) -> Iterator[str]:
    """Yield a line that names workers with other versions than the server they belong to."""
    others = [
        each
        for each in workers
        if python_mismatch(mine.python, each.versions.python)
        or release_mismatch(mine, each.versions)
    ]
    if others:
        named = ", ".join(f"{each.address} has {each.versions}" for each in others[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        yield f"versions differ: this server has {mine}; {named}{more}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Yield lines for rows of cells, the first of which is the head.

    Args:
        rows: All of one length.
        left: So many of the first columns begin at their left.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(wide) if column < left else cell.rjust(wide)
            for column, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def fitted(lines: Iterable[str], width: int) -> str:
    """Return lines as a text, none longer than `width`, without what would move the cursor."""
    return "\n".join(cut(printable(line), width) for line in lines) + "\n"


def cut(line: str, width: int) -> str:
    """Return a line, or as much of it as fits, with dots."""
    return line if len(line) <= width else f"{line[: max(0, width - 3)]}..."

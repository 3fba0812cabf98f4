"""Writes the tables of docs/support.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Results", "update"]


@dataclass
class Results:
    """Results of the checks.

    Attributes:
        extras: Whether an extra works, by Python version and name; "" is the core. None: not run.
        pairs: Error of a client, or "", by versions of client and servers, and whether it reads a
            dataset that a process of the servers' version has registered.
    """

    extras: dict[str, dict[str, bool | None]] = field(default_factory=dict)
    pairs: dict[tuple[str, str, bool], str] = field(default_factory=dict)


_MARK = "<!-- {name}: written by make release-check -->\n"


def update(text: str, results: Results) -> str:
    """Return the text of docs/support.md with new tables.

    Raises:
        ValueError: If the text lacks the mark of a table.
    """
    for name, table in (("extras", _extras(results.extras)), ("pairs", _pairs(results.pairs))):
        mark = _MARK.format(name=name)
        before, found, after = text.partition(mark)
        if not found:
            raise ValueError(f"docs/support.md has no line {mark.strip()!r}")
        _, _, rest = after.partition("\n\n")  # the old table
        text = f"{before}{mark}{table}\n{rest}"
    return text


def _extras(found: Mapping[str, Mapping[str, bool | None]]) -> str:
    versions = list(found)
    names = sorted({name for extras in found.values() for name in extras})
    marks = {True: "yes", False: "no", None: "–"}
    rows = [
        [f"`{name}`" if name else "core", *(marks[found[each].get(name)] for each in versions)]
        for name in names
    ]
    return _table(["extra", *(f"Python {version}" for version in versions)], rows)


def _pairs(found: Mapping[tuple[str, str, bool], str]) -> str:
    rows = []
    for client, servers in sorted({(client, servers) for client, servers, _ in found}):
        texts = ["refused" if found[client, servers, each] else "yes" for each in (False, True)]
        rows.append([client, servers, *texts])
    return _table(["client", "servers", "own dataset", "registered dataset"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

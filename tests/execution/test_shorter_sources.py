"""A state beyond the end of data that became shorter is rejected."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.execution.build import build_iterator
from headrace.execution.iterator import ElementIterator
from headrace.plan.elements import FromSource
from headrace.plan.source import Position, Source
from headrace.sources.text_files import TextLineSource
from headrace.sources.tfrecord import TFRecordSource, masked_crc

Dataset = hr.Dataset


def state_after(dataset: Dataset, count: int) -> dict[str, Any]:
    with iter(dataset) as iterator:
        assert len(list(islice(iterator, count))) == count
        return iterator.get_state()


def rest_of(dataset: Dataset, state: dict[str, Any]) -> list[Any]:
    with iter(dataset) as iterator:
        iterator.set_state(state)
        return list(iterator)


def lines(count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(count))


def records(count: int) -> bytes:
    found = []
    for number in range(count):
        record = b"record %d" % number
        length = struct.pack("<Q", len(record))
        sums = [struct.pack("<I", masked_crc(part)) for part in (length, record)]
        found += [length, sums[0], record, sums[1]]
    return b"".join(found)


FILES: dict[str, tuple[Callable[[str], Dataset], Callable[[int], bytes]]] = {
    "text": (hr.TextLineDataset, lines),
    "records": (hr.TFRecordDataset, records),
    "text, compressed": (
        lambda name: hr.TextLineDataset(name, compression_type="GZIP"),
        lambda count: gzip.compress(lines(count)),
    ),
    # Blocks so small that the place is a byte offset beyond the new end.
    "text in small blocks": (
        lambda name: Dataset.from_source(TextLineSource((name,), None, 16)),
        lines,
    ),
    "records in small blocks": (
        lambda name: Dataset.from_source(TFRecordSource((name,), None, 32)),
        records,
    ),
    "compressed text in small blocks": (
        lambda name: Dataset.from_source(TextLineSource((name,), "GZIP", 16)),
        lambda count: gzip.compress(lines(count)),
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_with_fewer_records_than_were_read_is_named(kind: str, tmp_path: Path) -> None:
    make, content = FILES[kind]
    path = tmp_path / "data"
    path.write_bytes(content(100))
    state = state_after(make(str(path)), 20)

    path.write_bytes(content(10))

    with pytest.raises(hr.errors.DataLossError, match=r"data' .*(10|\d\d+).* same data") as caught:
        rest_of(make(str(path)), state)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_ends_at_the_state_yields_nothing_more(kind: str, tmp_path: Path) -> None:
    make, content = FILES[kind]
    path = tmp_path / "data"
    path.write_bytes(content(100))
    state = state_after(make(str(path)), 20)

    path.write_bytes(content(20))

    assert rest_of(make(str(path)), state) == []


def test_after_the_error_the_next_file_is_read(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "a").write_bytes(lines(100))
    (tmp_path / "b").write_bytes(b"x\ny\n")
    state = state_after(hr.TextLineDataset(names), 20)
    (tmp_path / "a").write_bytes(lines(10))

    with iter(hr.TextLineDataset(names)) as iterator:
        iterator.set_state(state)
        with pytest.raises(hr.errors.DataLossError, match=r"10 records .* at least \d+"):
            next(iterator)
        assert list(iterator) == [b"x", b"y"]


def numbers_below(stop: list[int]) -> Dataset:
    def numbers() -> Iterator[int]:
        return iter(range(stop[0]))

    return Dataset.from_generator(numbers)


def test_a_generator_that_yields_fewer_than_were_read_is_named() -> None:
    stop = [100]
    state = state_after(numbers_below(stop), 20)

    stop[0] = 10

    with pytest.raises(
        hr.errors.DataLossError, match=r"GeneratorSource \(test_.*\) has 10 elements.* same data"
    ):
        rest_of(numbers_below(stop), state)


def test_a_shorter_generator_raises_once() -> None:
    stop = [100]
    state = state_after(numbers_below(stop), 20)
    stop[0] = 10

    with iter(numbers_below(stop)) as iterator:
        iterator.set_state(state)
        with pytest.raises(hr.errors.DataLossError):
            next(iterator)
        assert list(iterator) == []


def test_a_generator_that_ends_at_the_state_yields_nothing_more() -> None:
    stop = [100]
    state = state_after(numbers_below(stop), 20)
    stop[0] = 20
    assert rest_of(numbers_below(stop), state) == []


@dataclass(frozen=True)
class Numbers(Source):
    """Numbers below `stop[0]`; the reader has no position except its start."""

    stop: list[int]

    @property
    def size(self) -> int:
        return 1

    @property
    def element_spec(self) -> hr.ArraySpec:
        return hr.ArraySpec((), np.int64)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> NumbersReader:
        return NumbersReader(self.stop[0])


class NumbersReader:
    def __init__(self, stop: int) -> None:
        self._left = list(range(stop))

    def read(self, limit: int) -> Chunk | None:
        taken, self._left = self._left[:limit], self._left[limit:]
        return Chunk.of_rows([np.int64(number) for number in taken]) if taken else None

    def get_position(self) -> Position:
        return None

    def close(self) -> None:
        self._left = []


def test_any_source_that_ends_before_the_state_is_named_with_its_size() -> None:
    restored = build_iterator(FromSource(source=Numbers([10])), seed=1)
    restored.set_state({"index": 0, "ordinal": 20})

    with pytest.raises(hr.errors.DataLossError, match=r"Numbers .* 10 .* 20 .* same data"):
        restored.next_chunk(1)
    assert restored.next_chunk(1) is None


class RemoteNumbers(Numbers):
    """Numbers of a remote source that is unreachable for a while after two of them."""

    @property
    def ordered_partition_mode(self) -> str:
        return "ordered"

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> UnreachableReader:
        return UnreachableReader(self.stop[0], position or 0)


class UnreachableReader(NumbersReader):
    def __init__(self, stop: int, at: int) -> None:
        super().__init__(stop)
        self._left = self._left[at:]
        self._stop = stop
        self._has_failed = False

    def read(self, limit: int) -> Chunk | None:
        if self.get_position() == 2 and not self._has_failed:
            self._has_failed = True
            raise TimeoutError
        return super().read(1)

    def get_position(self) -> Position:
        return self._stop - len(self._left)


def test_a_position_of_another_index_is_kept_after_an_error() -> None:
    reading = build_iterator(FromSource(source=RemoteNumbers([5])), seed=1)
    assert [reading.next_chunk(1) is not None for _ in range(2)] == [True, True]
    with pytest.raises(TimeoutError):
        reading.next_chunk(1)
    state = reading.get_state()
    assert state["hint"] == [2, 0]
    assert rows_left(reading) == [2, 3, 4]


def rows_left(reading: ElementIterator) -> list[int]:
    found: list[int] = []
    while (chunk := reading.next_chunk(1)) is not None:
        found += [int(row) for row in chunk.rows()]
    return found

"""Errors of elements: each is raised in its turn, whatever its class, and the rest follows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.plan.source import Position, Reader, Source
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

MODES = (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
SIZE, BAD = 20, 7
CLASSES = [kind for name in hr.errors.__all__ if isinstance(kind := getattr(hr.errors, name), type)]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One worker in this process."""
    with LocalCluster(num_workers=1, processes=False) as cluster:
        yield cluster


class TornReader(Reader):
    """Numbers, and an error in the place of one of them."""

    def __init__(self, start: int, stop: int, kind: type[Exception]) -> None:
        self._at, self._stop, self._kind = start, min(stop, SIZE), kind

    def read(self, limit: int) -> Chunk | None:
        at = self._at
        if at >= self._stop:
            return None
        self._at += 1
        if at == BAD:
            raise self._kind(f"no use for {at}")
        return Chunk.of_columns(np.array([at]), 1)

    def get_position(self) -> Position:
        return self._at

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Torn(Source):
    """Reads with `TornReader`."""

    kind: type[Exception]
    size: int = SIZE

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        return TornReader(start if position is None else int(position), stop, self.kind)


def read(dataset: Iterable[object]) -> tuple[list[object], list[Exception]]:
    """Return all elements, sorted, and the errors between them."""
    rows: list[object] = []
    errors: list[Exception] = []
    reader = iter(dataset)
    while len(errors) < 5:
        try:
            rows.append(next(reader))
        except StopIteration:
            break
        except Exception as error:
            errors.append(error)
    return sorted(rows), errors  # type: ignore[type-var]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
def test_an_elements_error_of_any_class_arrives_as_it_is_and_the_rest_follows(
    cluster: LocalCluster, kind: type[Exception], mode: ShardingPolicy
) -> None:
    dataset = hr.Dataset.from_source(Torn(kind))
    rows, errors = read(dataset.apply(distribute(mode, cluster.target, wait_timeout=20)))
    assert rows == [number for number in range(SIZE) if number != BAD]
    (error,) = errors
    # To a `for` loop this class is the end.
    ends_loops = kind is hr.errors.OutOfRangeError
    assert type(error) is (hr.errors.UserFunctionError if ends_loops else kind)
    assert f"no use for {BAD}" in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_cannot_be_opened_costs_what_it_costs_in_one_process(
    cluster: LocalCluster, tmp_path: Path, mode: ShardingPolicy
) -> None:
    paths = [tmp_path / f"{number:02d}.txt" for number in range(20)]
    for number, path in enumerate(paths):
        if number == BAD:
            path.symlink_to(path)
        else:
            path.write_text("".join(f"{number * 10 + line}\n" for line in range(10)))
    dataset = hr.TextLineDataset([str(path) for path in paths])
    there, errors_there = read(dataset.apply(distribute(mode, cluster.target, wait_timeout=20)))
    here, errors_here = read(dataset)
    assert there == here
    assert len(here) == 190
    (there_,), (here_,) = errors_there, errors_here
    where, text = str(there_).split(": ", 1)
    assert text == str(here_)
    assert re.fullmatch(r"on the worker at 127\.0\.0\.1:\d+", where)


def test_a_pass_waits_for_the_dispatcher_as_long_as_for_anything_else() -> None:
    with hr.service.DispatchServer() as dispatcher:
        dataset = hr.Dataset.range(5).apply(
            distribute(ShardingPolicy.OFF, dispatcher.target, wait_timeout=0.5)
        )
    with pytest.raises(hr.errors.UnavailableError, match=r"did not answer for 0\.5 s"):
        next(iter(dataset))

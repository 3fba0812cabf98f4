"""Errors of elements, and elements that no worker can compute."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.errors import DataLossError
from headrace.plan.source import Position, Reader, Source
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

MODES = (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
SIZE, BAD = 20, 7
CLASSES = [kind for name in hr.errors.__all__ if isinstance(kind := getattr(hr.errors, name), type)]


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
def test_an_element_error_of_any_class_arrives_unchanged(
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
def test_an_unreadable_file_fails_as_in_a_single_process(
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


def test_an_epoch_waits_for_the_dispatcher_until_wait_timeout() -> None:
    with hr.service.DispatchServer() as dispatcher:
        dataset = hr.Dataset.range(5).apply(
            distribute(ShardingPolicy.OFF, dispatcher.target, wait_timeout=0.5)
        )
    with pytest.raises(hr.errors.UnavailableError, match=r"did not reply within 0\.5 s"):
        next(iter(dataset))


# --- elements that no worker can compute: the error follows the last of the other elements --------


def end_the_process(x: Any) -> Any:
    if int(x) == 17:
        os._exit(3)
    return x


def read_all(dataset: Iterable[Any]) -> tuple[list[int], list[str]]:
    """Return the elements of batches, and the errors about missing elements."""
    got: list[int] = []
    errors: list[str] = []
    iterator = iter(dataset)
    while True:
        try:
            got += [int(value) for value in np.asarray(next(iterator)).ravel()]
        except DataLossError as error:
            errors.append(str(error))
        except StopIteration:
            return got, errors


def test_an_element_that_kills_processes_raises_after_all_others() -> None:
    with LocalCluster(num_workers=3) as cluster:
        served = hr.Dataset.range(45).map(end_the_process)
        dataset = served.apply(distribute("distributed_epoch", cluster.target, ordered=True))
        # A batch is half full when the reader is at its end.
        got, errors = read_all(dataset.batch(8))
    assert got == [value for value in range(45) if value != 17]
    (error,) = errors
    assert "1 abandoned after 3 worker processes died" in error
    assert "(split 17)" in error


def test_each_unordered_epoch_raises_once() -> None:
    with LocalCluster(num_workers=3) as cluster:
        served = hr.Dataset.range(20).map(end_the_process)
        dataset = served.apply(distribute("distributed_epoch", cluster.target))
        got, errors = read_all(dataset.repeat(2).batch(8))
    assert sorted(got) == sorted([value for value in range(20) if value != 17] * 2)
    assert len(errors) == 2


def test_torch_loader_and_jax_iterator_pass_the_error_on() -> None:
    ends: dict[str, tuple[list[int], list[str]]] = {}
    with LocalCluster(num_workers=3) as cluster:
        served = hr.Dataset.range(60).map(end_the_process).batch(1)
        job = distribute("distributed_epoch", cluster.target, job_name="shared")
        readers: dict[str, Any] = {
            "torch": lambda: hr.torch.loader(served.apply(job)),
            "jax": lambda: hr.jax.device_iterator(served.apply(job)),
        }

        def run(name: str) -> None:
            ends[name] = read_all(readers[name]())

        threads = [threading.Thread(target=run, args=(name,)) for name in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert sorted(value for got, _ in ends.values() for value in got) == [
        value for value in range(60) if value != 17
    ]
    assert {name: len(errors) for name, (_, errors) in ends.items()} == {"torch": 1, "jax": 1}

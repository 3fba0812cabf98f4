"""`max_outstanding_requests=n`: no more than n elements are made that were not used."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.service import LocalCluster, distribute
from headrace.service.client.reader import RemoteReader
from tests.service.reading import wait_until

pytestmark = pytest.mark.system

MADE: list[int] = []
"""What `_noted` was called with; workers of this process share it."""
_LOCK = threading.Lock()


def _noted(number: int) -> int:
    with _LOCK:
        MADE.append(int(number))
    return number


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    MADE.clear()
    with LocalCluster(num_workers=request.param, processes=False) as cluster:
        yield cluster


@pytest.mark.parametrize("most", [2, 3, 16, 100])
@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_no_more_elements_are_made_than_used_and_n_more(
    cluster: LocalCluster, mode: str, most: int
) -> None:
    dataset = hr.Dataset.range(100_000).map(_noted)
    share = distribute(mode, cluster.target, max_outstanding_requests=most)
    with iter(dataset.apply(share)) as iterator:
        for used in range(0, 400):
            next(iterator)
            # The one that was yielded now is in use until the next is asked for.
            assert len(MADE) <= used + most, used
            if used % 100 == 50:
                time.sleep(0.05)
                assert len(MADE) <= used + most, used
        wait_until(lambda: len(MADE) > 400)


@pytest.mark.catalogue("OP13")
def test_one_element_at_a_time() -> None:
    MADE.clear()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = hr.Dataset.range(50).map(_noted)
        share = distribute("parallel_epochs", cluster.target, max_outstanding_requests=1)
        for number, value in enumerate(dataset.apply(share)):
            assert value == number
            assert len(MADE) <= number + 1


def test_what_came_in_one_answer_is_taken_from_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    read = RemoteReader.read

    def noted(reader: RemoteReader, limit: int) -> Chunk | None:
        chunk = read(reader, limit)
        taken.append(0 if chunk is None else chunk.size)
        return chunk

    monkeypatch.setattr(RemoteReader, "read", noted)
    monkeypatch.setattr("headrace.execution.intake._LONG", math.inf)  # however busy the machine is
    rows = np.arange(512 << 13).reshape(512, 1 << 13)  # of 64 KiB
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = hr.Dataset.from_tensor_slices(rows).apply(
            distribute("distributed_epoch", cluster.target)
        )
        assert all((got == row).all() for got, row in zip(dataset, rows, strict=True))
    assert sum(taken) == 512
    assert max(taken) >= 64, "each is taken on its own"

"""`max_outstanding_requests=n`: no more than n elements are made that were not used."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import headrace as hr
from headrace.service import LocalCluster, distribute
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


def test_one_element_at_a_time() -> None:
    MADE.clear()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = hr.Dataset.range(50).map(_noted)
        share = distribute("parallel_epochs", cluster.target, max_outstanding_requests=1)
        for number, value in enumerate(dataset.apply(share)):
            assert value == number
            assert len(MADE) <= number + 1

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.coordinator import ClusterCoordinator
from tests.coordinator.in_process import coordinating, noted


@pytest.fixture(autouse=True)
def _nothing_is_noted() -> Iterator[None]:
    yield
    noted.clear()


@pytest.fixture
def coordinator() -> Iterator[ClusterCoordinator]:
    with coordinating() as made:
        yield made

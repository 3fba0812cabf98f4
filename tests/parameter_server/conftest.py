from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.parameter_server.partitioners import FixedShardsPartitioner
from tests.parameter_server.small_cluster import cluster


@pytest.fixture
def strategy() -> Iterator[Any]:
    """A strategy over two servers; variables have two shards."""
    with cluster(2, FixedShardsPartitioner(2)) as made:
        yield made

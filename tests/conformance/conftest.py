"""A service for the tests of a module, and threads that libraries keep until the process ends."""

from __future__ import annotations

import io
from collections.abc import Iterator

import lance
import pyarrow as pa
import pyarrow.csv
import pytest
import tqdm

from headrace.service import LocalCluster


@pytest.fixture(scope="session", autouse=True)
def _threads_of_libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    tqdm.tqdm.monitor_interval = 0
    pyarrow.csv.read_csv(io.BytesIO(b"n\n0\n"))
    name = str(tmp_path_factory.mktemp("lance") / "x.lance")
    lance.write_dataset(pa.table({"x": [0]}), name)


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        yield cluster.target

"""A program that ends with an iterator open over the service is quiet, and says goodbye."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.service import DispatchServer, WorkerConfig, WorkerServer

_BEFORE = {
    "nothing": "",
    # Whoever uses `weakref.finalize` before the network's library is loaded.
    "an iterator in this process": "held = iter(hr.Dataset.range(3)); next(held)",
    "torch": "import torch",
}


@pytest.mark.parametrize("first", list(_BEFORE))
def test_a_program_that_ends_with_an_open_iterator_closes_it(first: str) -> None:
    with (
        DispatchServer() as dispatcher,
        WorkerServer(WorkerConfig(dispatcher.target.removeprefix("tcp://"))),
    ):
        program = (
            f"import headrace as hr\n{_BEFORE[first]}\n"
            "share = hr.service.distribute('distributed_epoch', "
            f"{dispatcher.target!r}, job_name='a')\n"
            "it = iter(hr.Dataset.range(10**6).batch(8).apply(share).prefetch(2))\n"
            "next(it)\n"
        )
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (result.returncode, result.stderr) == (0, "")
        # The client closed its iteration before it ended, so no timeout is pending.
        stats = dispatcher.stats()
        assert ([job.name for job in stats.jobs], stats.clients) == (["a"], 0)


def test_an_iterator_that_is_open_at_the_end_is_closed_before_its_cluster() -> None:
    program = (
        "import headrace as hr\n"
        "held = iter(hr.Dataset.range(3)); next(held)\n"
        "cluster = hr.service.LocalCluster(num_workers=1, processes=False)\n"
        "share = hr.service.distribute('distributed_epoch', cluster.target)\n"
        "it = iter(hr.Dataset.range(10**6).batch(8).apply(share)); next(it)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")

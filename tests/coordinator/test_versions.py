"""Training workers of another Python version, as real processes."""

from __future__ import annotations

import logging

import pytest

from headrace.coordinator import ClosureWorker, ClusterCoordinator
from headrace.coordinator.cluster import Workers
from headrace.errors import FailedPreconditionError
from tests.coordinator.in_process import SECONDS, divide, wait_until
from tests.other_version import MINE, other_version


def test_a_coordinator_with_only_incompatible_workers_raises_at_once():
    with other_version("closure-worker", python="3.99") as worker:
        words = rf"runs Python 3\.99 .*coordinator in process .* runs Python {MINE}"
        refused = pytest.raises(FailedPreconditionError, match=words)
        with ClusterCoordinator(Workers([worker])) as coordinator, refused:
            coordinator.schedule(divide, (1, 1)).fetch(SECONDS)


def test_the_coordinator_continues_with_compatible_workers(caplog):
    with other_version("closure-worker", python="3.99") as other, ClosureWorker(0) as worker:
        coordinator = ClusterCoordinator(Workers([other, worker.address]))
        assert coordinator.schedule(divide, (6, 2)).fetch(SECONDS) == 3.0
        wait_until(lambda: "refused this coordinator" in caplog.text)
        assert coordinator.schedule(divide, (6, 3)).fetch(SECONDS) == 2.0
        coordinator.close()
    assert len([each for each in caplog.messages if "refused this coordinator" in each]) == 1


def test_a_registering_worker_of_another_version_is_refused(caplog):
    with ClosureWorker(0) as worker:
        coordinator = ClusterCoordinator(Workers([worker.address]))
        address = coordinator.listen()
        with (
            caplog.at_level(logging.WARNING),
            other_version("closure-worker", address, python="3.99") as other,
        ):
            wait_until(lambda: f"the training worker at {other} runs Python 3.99" in caplog.text)
        assert coordinator.schedule(divide, (6, 2)).fetch(SECONDS) == 3.0
        coordinator.close()

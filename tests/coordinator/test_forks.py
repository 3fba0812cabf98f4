"""A forked child of a coordinator's process is rejected, and leaves all resources to its parent."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator import ClusterCoordinator
from headrace.errors import FailedPreconditionError
from tests.coordinator.in_process import SECONDS, with_servers

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12: threads

CPU_SECONDS = 2.0
COORDINATOR_ERROR = "this coordinator was created before a fork"
STRATEGY_ERROR = "was forked from the one that created the strategy"
PENDING_WORK_ERROR = "was forked while a task for the parameter servers was running"


def _run_in_child(check: Callable[[], None]) -> str:
    """Run `check` in a forked child and return its outcome; kill a child that hangs."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"code {os.waitstatus_to_exitcode(status)}"
        spins = _cpu_seconds(child) > CPU_SECONDS
        if spins or time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "spins" if spins else "waits"
        time.sleep(0.01)


def _cpu_seconds(process: int) -> float:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except FailedPreconditionError as error:
        return str(error)
    return "none"


def _one() -> int:
    return 1


@contextmanager
def _other_thread_using(use: Callable[[], object]) -> Iterator[None]:
    """Keep a thread alive that has called `use`; a child drops the thread's own state."""
    used, ended = threading.Event(), threading.Event()

    def run() -> None:
        use()
        used.set()
        ended.wait(2 * SECONDS)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert used.wait(SECONDS)
        yield
    finally:
        ended.set()
        thread.join()


def test_a_forked_child_cannot_use_a_cluster_and_closes_it_at_once():
    with with_servers(1, 1) as (strategy, coordinator):
        with strategy.scope():
            variable = hr.Variable(np.zeros(4), name="v")
            table = hr.EmbeddingTable(4, name="t")
        optimizer = hr.optimizers.SGD(1.0)
        background = hr.optimizers.InBackground(optimizer)
        background.apply_gradients([(np.ones(4), variable)])
        value = coordinator.schedule(_one)
        assert value.fetch(SECONDS) == 1

        def make_a_variable() -> None:
            with strategy.scope():
                hr.Variable(np.zeros(4), name="of a child")

        uses: dict[str, list[Callable[[], object]]] = {
            COORDINATOR_ERROR: [
                lambda: coordinator.schedule(_one),
                coordinator.join,
                coordinator.done,
                coordinator.status,
                coordinator.listen,
                lambda: coordinator.workers,
                lambda: coordinator.add_worker("127.0.0.1:1"),
                lambda: coordinator.remove_worker(0),
                lambda: coordinator.create_per_worker_values(_one),
                lambda: ClusterCoordinator(strategy).join(),
                value.cancel,
            ],
            STRATEGY_ERROR: [
                make_a_variable,
                variable.read,
                lambda: variable.assign(np.ones(4)),
                lambda: variable.assign_add(np.ones(4)),
                lambda: table.lookup(np.arange(2)),
                lambda: optimizer.apply_gradients([(np.ones(4), variable)]),
                lambda: hr.optimizers.InBackground(optimizer, 0).apply_gradients(
                    [(np.ones(4), variable)]
                ),
                lambda: strategy.cluster.servers.status(0),
            ],
            PENDING_WORK_ERROR: [background.flush],
        }

        def check() -> None:
            for words, those in uses.items():
                for use in those:
                    assert words in _error_of(use), (words, _error_of(use))
            assert value.fetch() == 1, "the parent is not affected"
            coordinator.close()
            strategy.close()

        with _other_thread_using(variable.read):
            assert _run_in_child(check) == "code 0"
            background.flush()
            assert variable.read().tolist() == [-1.0] * 4
        assert coordinator.schedule(_one).fetch(SECONDS) == 1


def test_a_forked_child_does_not_wait_for_the_parents_work():
    with (
        with_servers(1, 1) as (strategy, _),
        _other_thread_using(strategy.cluster.servers.wait_until_reachable),
    ):
        goes_on = threading.Event()
        work = strategy.cluster.background.submit(lambda: goes_on.wait(SECONDS))

        def check() -> None:
            assert PENDING_WORK_ERROR in _error_of(work.result)
            assert PENDING_WORK_ERROR in _error_of(work.done)
            strategy.close()

        assert _run_in_child(check) == "code 0"
        goes_on.set()
        assert work.result() is True

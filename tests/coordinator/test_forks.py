"""A process that is forked from a coordinator's is refused, and leaves all to its parent."""

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
OF_THE_COORDINATOR = "this coordinator was made before a fork"
OF_THE_STRATEGY = "was forked from the one that created the strategy"
OF_WORK_BEGUN = "was forked while a task for the parameter servers was running"


def _in_a_child(check: Callable[[], None]) -> str:
    """Return how `check` ended in a forked child; one that does not end is killed."""
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


def _refusal_of(use: Callable[[], object]) -> str:
    try:
        use()
    except FailedPreconditionError as error:
        return str(error)
    return "none"


def _one() -> int:
    return 1


@contextmanager
def _another_thread_that_has(use: Callable[[], object]) -> Iterator[None]:
    """Keep a thread that has used something: what it keeps for itself is dropped in a child."""
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


def test_a_forked_child_is_refused_all_of_a_cluster_and_closes_it_at_once():
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
            OF_THE_COORDINATOR: [
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
            OF_THE_STRATEGY: [
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
            OF_WORK_BEGUN: [background.flush],
        }

        def check() -> None:
            for words, those in uses.items():
                for use in those:
                    assert words in _refusal_of(use), (words, _refusal_of(use))
            assert value.fetch() == 1, "what was here stays"
            coordinator.close()
            strategy.close()

        with _another_thread_that_has(variable.read):
            assert _in_a_child(check) == "code 0"
            background.flush()
            assert variable.read().tolist() == [-1.0] * 4
        assert coordinator.schedule(_one).fetch(SECONDS) == 1


def test_work_that_was_under_way_is_not_waited_for_in_a_child():
    with (
        with_servers(1, 1) as (strategy, _),
        _another_thread_that_has(strategy.cluster.servers.wait_until_reachable),
    ):
        goes_on = threading.Event()
        work = strategy.cluster.background.submit(lambda: goes_on.wait(SECONDS))

        def check() -> None:
            assert OF_WORK_BEGUN in _refusal_of(work.result)
            assert OF_WORK_BEGUN in _refusal_of(work.done)
            strategy.close()

        assert _in_a_child(check) == "code 0"
        goes_on.set()
        assert work.result() is True

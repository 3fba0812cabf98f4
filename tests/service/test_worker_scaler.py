"""WorkerScaler with a real dispatcher, whose wanted number of workers is set by the test."""

from __future__ import annotations

import logging
import threading

import pytest

from headrace.service import DispatcherConfig, DispatchServer
from headrace.service.dispatcher.worker_scaling import ScalingPolicy
from headrace.service.worker_scaler import WorkerScaler
from tests.service.reading import wait_until


class Launcher:
    """Launcher that only counts."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.calls: list[int] = []
        self.failures = 0
        self.lock = threading.Lock()

    def num_workers(self) -> int:
        return self.count

    def start_workers(self, count: int) -> None:
        self._change(count)

    def stop_workers(self, count: int) -> None:
        self._change(-count)

    def _change(self, count: int) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("no room")
        self.calls.append(count)
        self.count += count


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list whose only item is what the policy answers."""
    answer = [0]
    monkeypatch.setattr(ScalingPolicy, "decide", lambda self, load, state: (answer[0], state))
    return answer


def test_workers_follow_the_wanted_number_within_the_limits(wanted, caplog):
    caplog.set_level(logging.INFO, "headrace.service.worker_scaler")
    launcher = Launcher()
    with DispatchServer() as dispatcher, WorkerScaler(dispatcher.target, launcher, 1, 4):
        wait_until(lambda: launcher.count == 1)
        wanted[0] = 9
        wait_until(lambda: launcher.count == 4)
        wanted[0] = 2
        wait_until(lambda: launcher.count == 2)
        wanted[0] = 0
        wait_until(lambda: launcher.count == 1)
    assert launcher.calls == [1, 3, -2, -1]
    decisions = [each.getMessage() for each in caplog.records]
    assert (
        "scaling from 1 to 4 workers: the dispatcher wants 9 (limits: 1 to 4); no clients"
        in decisions
    )
    assert len(decisions) == 4


def test_a_failing_launcher_is_called_again(wanted, caplog):
    launcher = Launcher()
    launcher.failures = 1
    with DispatchServer() as dispatcher, WorkerScaler(dispatcher.target, launcher, 2, 2):
        wait_until(lambda: launcher.count == 2)
    assert "starting workers failed, next try in 1 s: OSError: no room" in caplog.text


def test_workers_that_ended_by_themselves_are_replaced_after_a_pause(wanted, caplog):
    launcher = Launcher()
    with DispatchServer() as dispatcher, WorkerScaler(dispatcher.target, launcher, 2, 2):
        wait_until(lambda: launcher.count == 2)
        launcher.count = 0
        wait_until(lambda: launcher.count == 2)
    assert launcher.calls == [2, 2]
    assert "2 of 2 workers ended by themselves; others start in 1 s" in caplog.text


def test_workers_stay_while_the_dispatcher_is_away_and_follow_the_next_one(wanted, tmp_path):
    wanted[0] = 3
    launcher = Launcher()
    with DispatchServer(DispatcherConfig(work_dir=tmp_path)) as dispatcher:
        port = int(dispatcher.target.rpartition(":")[2])
        scaler = WorkerScaler(dispatcher.target, launcher, 1, 4)
        scaler.start()
        wait_until(lambda: launcher.count == 3)
    try:
        calls, launcher.calls = launcher.calls, []
        assert sum(calls) == 3
        wanted[0] = 2
        with DispatchServer(DispatcherConfig(port=port, work_dir=tmp_path)):
            wait_until(lambda: launcher.count == 2)
            assert launcher.calls == [-1]
    finally:
        scaler.stop()


def test_a_maximum_below_the_minimum_is_refused():
    with pytest.raises(ValueError, match="max_workers=1 must not be less than min_workers=2"):
        WorkerScaler("127.0.0.1:1", Launcher(), 2, 1)

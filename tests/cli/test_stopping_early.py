"""A server that is to stop before it has begun to start just stops."""

from __future__ import annotations

import os
import signal

from headrace.cli import running
from headrace.serving.life_cycle import LifeCycle


class Late(LifeCycle):
    """A server whose `start` is reached only after `stop`, as where its thread has to wait."""

    address = "nowhere"

    def start(self) -> None:
        assert self._stopping.wait(30.0)
        super().start()

    def _open(self) -> None:
        raise AssertionError("it was stopped before")


class SignalThatCameAtOnce(running.Signals):
    def __enter__(self):
        super().__enter__()
        os.kill(os.getpid(), signal.SIGTERM)
        return self


def test_a_signal_that_comes_before_the_server_starts_is_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(running, "Signals", SignalThatCameAtOnce)
    server = Late()
    running.run_server("worker", server, lambda: server.address)
    assert capsys.readouterr().out == "worker stopped\n"
    assert server.is_stopped

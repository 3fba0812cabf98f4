from __future__ import annotations

import os
import signal

import pytest

from headrace.cli import run_server
from headrace.cli.run_server import run_children

pytestmark = pytest.mark.heavy


def test_when_all_children_end_by_themselves_so_does_the_command(capfd):
    assert run_children([["--version"], ["--version"]]) == 0
    out, err = capfd.readouterr()
    assert out.count("headrace ") == 2
    assert "ended with code 0; 0 of 2 are left" in err


def test_a_child_that_fails_by_itself_is_reported_and_the_command_fails(capfd):
    assert run_children([["--version"], ["no-such-command"]]) == 1
    assert "ended with code 2" in capfd.readouterr().err


@pytest.mark.timeout(120)
def test_a_stop_signal_stops_the_children(monkeypatch, capfd):
    class SignalThatCameAtOnce(run_server.Signals):
        def __enter__(self):
            super().__enter__()
            os.kill(os.getpid(), signal.SIGTERM)
            return self

    monkeypatch.setattr(run_server, "Signals", SignalThatCameAtOnce)
    worker = ["worker", "--with-parent", "--dispatcher", "127.0.0.1:1"]
    # They have to start before they can stop: where the machine is busy that takes a while.
    assert run_children([worker, worker], drain_timeout=60.0) == 0
    assert capfd.readouterr().out.count("worker stopped") == 2

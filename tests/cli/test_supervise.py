from __future__ import annotations

import os
import signal

import pytest

from headrace.cli import run_server
from headrace.cli.run_server import run_children

pytestmark = pytest.mark.heavy


def test_command_ends_when_all_children_have_ended(capfd):
    assert run_children([["--version"], ["--version"]]) == 0
    out, err = capfd.readouterr()
    assert out.count("headrace ") == 2
    assert "ended with code 0; 0 of 2 running" in err


def test_failed_child_is_reported_and_fails_the_command(capfd):
    assert run_children([["--version"], ["no-such-command"]]) == 1
    assert "ended with code 2" in capfd.readouterr().err


@pytest.mark.timeout(120)
def test_a_stop_signal_stops_the_children(monkeypatch, capfd):
    class ImmediateSignal(run_server.Signals):
        def __enter__(self):
            super().__enter__()
            os.kill(os.getpid(), signal.SIGTERM)
            return self

    monkeypatch.setattr(run_server, "Signals", ImmediateSignal)
    worker = ["worker", "--with-parent", "--dispatcher", "127.0.0.1:1"]
    # The children must start before they can stop, which takes a while on a busy machine.
    assert run_children([worker, worker], drain_timeout=60.0) == 0
    assert capfd.readouterr().out.count("worker stopped") == 2

"""Signals while a command runs, starts, or is still being imported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from headrace.cli import run_server
from headrace.cli.run_server import Signals
from headrace.serving.life_cycle import LifeCycle


def test_signal_before_the_wait_is_not_lost():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wait(timeout=10.0) == {signal.SIGTERM}


def test_wait_without_a_signal_ends_at_its_timeout():
    with Signals() as signals:
        assert signals.wait(timeout=0.0) == frozenset()


def test_two_signals_are_returned_together():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(timeout=10.0) == {signal.SIGTERM, signal.SIGINT}


def test_closed_stream_counts_as_sigterm():
    reader, writer = os.pipe()
    with Signals() as signals, os.fdopen(reader) as stream:
        assert signals.wait(timeout=0.0, closing=[stream]) == frozenset()
        os.close(writer)
        assert signals.wait(timeout=10.0, closing=[stream]) == {signal.SIGTERM}


def test_previous_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals(children=True):
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


FORKING = """
import os, signal, time
from headrace.cli.run_server import Signals

with Signals() as signals:
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(signals.wait(timeout=0.0)))
"""


def test_signal_to_a_forked_child_stops_only_the_child():
    result = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=50, check=False
    )
    assert (result.stdout.split(), result.stderr) == (["-15", "0"], "")


AT_ONCE = """
import os, signal, time

def send():
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)

parent = os.getpid()
os.register_at_fork(after_in_child=send)  # before the handlers of other modules

from headrace.cli.run_server import Signals

with Signals() as signals:
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(signals.wait(timeout=0.0)))
    os.kill(parent, signal.SIGTERM)
    print(len(signals.wait(timeout=10.0)))
"""


def test_signal_at_the_instant_of_a_fork_stops_only_the_child():
    result = subprocess.run(
        [sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=90, check=False
    )
    # The parent receives only its own signal.
    assert (result.stdout.split(), result.stderr) == (["-15", "0", "1"], "")


# --- Ctrl-C or SIGTERM during the imports of a command ends it without output --------------------


# The signal arrives just before a module is imported.
SCRIPT = """
import os, sys
import headrace

module, number, *arguments = sys.argv[1:]

class Interrupt:
    def find_spec(self, name, *rest):
        if name == module:
            sys.meta_path.remove(self)
            print("interrupted", flush=True)
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Interrupt())
sys.argv = ["headrace", *arguments]
from headrace.__main__ import main
main()
"""


def run(module, number, *arguments):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, module, str(int(number)), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "module", ["headrace.cli", "typer", "rich.console", "numpy", "zmq", "headrace.cli.serve"]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_signal_during_imports_ends_a_command_without_output(module, number, code):
    done = run(module, number, "status", "127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr) == (code, "interrupted\n", "")


def test_signal_during_imports_ends_the_demo_without_output():
    done = run("sklearn.datasets", signal.SIGINT, "demo")
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("milliseconds", [0, 50, 100, 200, 400])
def test_command_can_be_interrupted_at_any_instant_of_its_start(milliseconds):
    script = "from headrace.__main__ import main; print('up', flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "status", "127.0.0.1:1", "--timeout", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(milliseconds / 1000)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    # 1: the command failed before the signal, as no server replies. -SIGINT: Python was already
    # shutting down, when no code of the command runs.
    assert process.returncode in (1, 130, -signal.SIGINT), stderr


def test_ignored_ctrl_c_stays_ignored():
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "import headrace.__main__; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headrace ")


# --- A server that is stopped before it starts just stops ----------------------------------------


class ServerStoppedBeforeStart(LifeCycle):
    """Server whose `start` begins only after `stop`, as on a slow thread."""

    address = "nowhere"

    def start(self) -> None:
        assert self._stopping.wait(30.0)
        super().start()

    def _open(self) -> None:
        raise AssertionError("it was opened after `stop`")


class ImmediateSignal(run_server.Signals):
    def __enter__(self):
        super().__enter__()
        os.kill(os.getpid(), signal.SIGTERM)
        return self


def test_signal_before_the_server_starts_is_not_an_error(monkeypatch, capsys):
    monkeypatch.setattr(run_server, "Signals", ImmediateSignal)
    server = ServerStoppedBeforeStart()
    run_server.run_server("worker", server, lambda: server.address)
    assert capsys.readouterr().out == "worker stopped\n"
    assert server.is_stopped

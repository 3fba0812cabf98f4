"""`headrace status`, `top` and `journal` with a running service; the keys of `top`."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import top
from headrace.cli.main import app
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from headrace.transport.security import Security, new_keys

_SECONDS = 60.0


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def service(tmp_path):
    """Address and directory of a dispatcher whose job "training" is being read."""
    config = DispatcherConfig(work_dir=tmp_path, fault_tolerant_mode=True)
    with DispatchServer(config) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)):
            share = distribute(ShardingPolicy.DYNAMIC, dispatcher.target, job_name="training")
            with iter(hr.Dataset.range(100_000).batch(10).apply(share)) as batches:
                next(batches)
                yield address, tmp_path


def test_json_status_contains_all_fields(service):
    address, _ = service
    result = invoke("status", address, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    (worker,), (job,) = found["workers"], found["jobs"]
    assert worker["address"].startswith("127.0.0.1:")
    assert (job["name"], job["processing_mode"]) == ("training", "DYNAMIC")
    (reading,) = job["iterations"]
    assert reading["num_splits"] == 10_000
    assert {
        "progress",
        "remaining_seconds",
        "splits_in_progress",
        "splits_unassigned",
        "steps",
    } <= reading.keys()
    assert {"wait_ratio", "wait_seconds", "elements"} <= reading["clients"][0].keys()
    assert "type" not in result.stdout


def test_top_without_a_terminal_prints_one_frame(service):
    address, _ = service
    result = invoke("top", address)
    assert result.exit_code == 0
    assert "1 worker  1 client  1 job" in result.stdout
    assert "job training  DYNAMIC" in result.stdout
    assert "\x1b" not in result.stdout


def test_journal_of_a_running_dispatcher_can_be_read(service):
    _, directory = service
    assert "job 'training'" in invoke("journal", directory).stdout
    history = invoke("journal", directory, "--task", 4000).stdout
    assert "Task 4000 created on worker 127.0.0.1:" in history
    assert "Assigned split" in history
    assert "Job 'training' created" in invoke("journal", directory, "--job", "training").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--task", "4711"], 1, "has no task 4711"),
        (["--job", "evaluation"], 1, "has no job 'evaluation'"),
        (["--task", "1", "--job", "a"], 2, "cannot be used together"),
    ],
)
def test_unknown_task_or_job_is_an_error_that_names_it(service, arguments, code, message):
    _, directory = service
    result = invoke("journal", directory, *arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())


def test_directory_without_a_journal_is_an_error_that_names_it(tmp_path):
    result = invoke("journal", tmp_path)
    assert result.exit_code == 1
    assert f"no journal in {tmp_path}" in result.stderr


@pytest.mark.parametrize("command", ["status", "top"])
def test_unreachable_address_is_an_error_that_names_it(command):
    result = invoke(command, "127.0.0.1:9", "--timeout", "0.5")
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.stderr


def test_top_requires_a_positive_interval():
    assert invoke("top", "a:1", "--interval", "0").exit_code == 2


class Terminal:
    """A command that runs on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.controller, terminal = pty.openpty()
        self.output = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(terminal)

    def find(self, expected):
        deadline = time.monotonic() + _SECONDS
        while expected not in self.output:
            assert time.monotonic() < deadline, self.output
            if select.select([self.controller], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.controller, 65536)
                except OSError:  # the command has closed the terminal
                    assert expected in self.output, self.output
                    return

    def end(self):
        self.find(b"\x1b[?1049l")
        code = self.process.wait(_SECONDS)
        os.close(self.controller)
        return code


def take_terminal():
    import fcntl  # noqa: PLC0415 - in the child
    import termios  # noqa: PLC0415

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.system
@pytest.mark.parametrize("how", ["q", "ctrl-c", "sigterm"])
def test_top_restores_the_terminal(service, how):
    address, _ = service
    terminal = Terminal("top", address, "--interval", "0.1")
    terminal.find(b"job training")
    os.write(terminal.controller, b"x")  # not a key of `top`
    terminal.find(b"\x1b[H")
    assert b"\x1b[?1049h" in terminal.output
    if how == "sigterm":
        terminal.process.send_signal(signal.SIGTERM)
    else:
        os.write(terminal.controller, b"q" if how == "q" else b"\x03")
    assert terminal.end() == 0
    assert b"Traceback" not in terminal.output


@pytest.mark.system
def test_top_shows_how_long_the_server_has_not_replied():
    dispatcher = DispatchServer()
    terminal = Terminal("top", dispatcher.target, "--interval", "0.1")
    try:
        terminal.find(b"no worker is registered")
    finally:
        dispatcher.stop()
    terminal.find(b"no reply for")
    os.write(terminal.controller, b"q")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ordered": True}, (True, None, "drop")),
        ({"num_consumers": 1, "consumer_index": 0, "remainder": "pad"}, (False, 1, "pad")),
    ],
)
def test_status_shows_ordered_mode_and_consumers_of_a_job(service, options, expected):
    address, _ = service
    share = distribute(ShardingPolicy.DYNAMIC, address, "another", **options)
    with iter(hr.Dataset.range(400).batch(10).apply(share)) as batches:
        next(batches)
        found = json.loads(invoke("status", address, "--json").stdout)["jobs"]
        list(batches)
    (job,) = [each for each in found if each["name"] == "another"]
    assert (job["ordered"], job["num_consumers"], job["remainder"]) == expected


def test_status_without_keys_names_the_option(tmp_path):
    new_keys(tmp_path)
    config = DispatcherConfig(security=Security.load(tmp_path, "server"))
    with DispatchServer(config) as dispatcher:
        result = invoke("status", dispatcher.target.removeprefix("tcp://"))
    assert result.exit_code == 1
    assert "on the command line --keys" in result.stderr


def test_status_works_with_the_keys_of_a_worker_machine(tmp_path):
    new_keys(tmp_path)
    config = DispatcherConfig(security=Security.load(tmp_path, "server"))
    with DispatchServer(config) as dispatcher:
        (tmp_path / "client.key").unlink()
        address = dispatcher.target.removeprefix("tcp://")
        result = invoke("status", address, "--keys", str(tmp_path))
        checked = invoke("doctor", address, "--keys", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "0 workers" in result.stdout
    assert "reachable" in checked.stdout


# --- Keys of `headrace top` on a pseudo-terminal -------------------------------------------------


class FakeSignals:
    """Signals that arrive in given calls of `wait`."""

    def __init__(self, *by_call: set[signal.Signals]) -> None:
        self._by_call = list(by_call)

    def wait(self, timeout: float, readable: object = ()) -> frozenset[signal.Signals]:
        return frozenset(self._by_call.pop(0)) if self._by_call else frozenset()


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The controlling end of a pseudo-terminal that replaces stdin."""
    controller, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        yield controller
        os.close(controller)


def wait_for_quit(controller: int, signals: FakeSignals, seconds: float = 20.0) -> bool:
    results: list[bool] = []
    with top._open_screen():
        thread = threading.Thread(
            target=lambda: results.append(top._wait_for_quit(signals, seconds))  # type: ignore[arg-type]
        )
        thread.start()
        thread.join(10.0)
        stuck = thread.is_alive()
        os.write(controller, b"q")  # ends the thread in any case
        thread.join(10.0)
    assert not stuck, "it still waits for a key"
    return results[0]


def test_key_discarded_by_ctrl_c_does_not_block(
    controller: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top.select, "select", lambda *args: ([sys.stdin], [], []))
    assert wait_for_quit(controller, FakeSignals(set(), {signal.SIGINT}))


def test_top_quits_when_the_terminal_is_closed(
    controller: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top.select, "select", lambda *args: ([sys.stdin], [], []))
    assert wait_for_quit(controller, FakeSignals())


@pytest.mark.parametrize(("key", "quits"), [(b"q", True), (b"\x04", True), (b"x", False)])
def test_only_quit_keys_quit(controller: int, key: bytes, quits: bool) -> None:
    with top._open_screen():
        os.write(controller, key)
        assert top._wait_for_quit(FakeSignals(), 0.3) is quits  # type: ignore[arg-type]

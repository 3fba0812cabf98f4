"""`headrace status`, `top` and `journal`, against a service that runs; the keys of `top`."""

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
    """The address and the directory of a dispatcher, of which job "training" is read."""
    config = DispatcherConfig(work_dir=tmp_path, fault_tolerant_mode=True)
    with DispatchServer(config) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)):
            share = distribute(ShardingPolicy.DYNAMIC, dispatcher.target, job_name="training")
            with iter(hr.Dataset.range(100_000).batch(10).apply(share)) as batches:
                next(batches)
                yield address, tmp_path


def test_status_as_json_is_everything_that_is_known(service):
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


def test_a_journal_that_is_being_written_tells_its_stories(service):
    _, directory = service
    assert "job 'training'" in invoke("journal", directory).stdout
    told = invoke("journal", directory, "--task", 4000).stdout
    assert "Task 4000 created on worker 127.0.0.1:" in told
    assert "Assigned split" in told
    assert "Job 'training' created" in invoke("journal", directory, "--job", "training").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--task", "4711"], 1, "tells of no task 4711"),
        (["--job", "evaluation"], 1, "tells of no job 'evaluation'"),
        (["--task", "1", "--job", "a"], 2, "one story at a time"),
    ],
)
def test_a_story_that_is_not_there_is_an_error_that_says_so(service, arguments, code, words):
    _, directory = service
    result = invoke("journal", directory, *arguments)
    assert result.exit_code == code
    assert words in " ".join(result.stderr.split())


def test_a_directory_without_a_journal_is_named(tmp_path):
    result = invoke("journal", tmp_path)
    assert result.exit_code == 1
    assert f"there is no journal in {tmp_path}" in result.stderr


@pytest.mark.parametrize("command", ["status", "top"])
def test_nobody_who_answers_is_an_error(command):
    result = invoke(command, "127.0.0.1:9", "--timeout", "0.5")
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.stderr


def test_top_wants_an_interval_that_passes():
    assert invoke("top", "a:1", "--interval", "0").exit_code == 2


class Terminal:
    """A command that believes that somebody looks at it."""

    def __init__(self, *arguments):
        self.ours, theirs = pty.openpty()
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(theirs)

    def find(self, words):
        until = time.monotonic() + _SECONDS
        while words not in self.seen:
            assert time.monotonic() < until, self.seen
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.ours, 65536)
                except OSError:  # nobody is left at the other end
                    assert words in self.seen, self.seen
                    return

    def end(self):
        self.find(b"\x1b[?1049l")
        code = self.process.wait(_SECONDS)
        os.close(self.ours)
        return code


def take_terminal():
    import fcntl  # noqa: PLC0415 - in the child
    import termios  # noqa: PLC0415

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.system
@pytest.mark.parametrize("how", ["q", "ctrl-c", "sigterm"])
def test_top_leaves_the_terminal_as_it_was(service, how):
    address, _ = service
    terminal = Terminal("top", address, "--interval", "0.1")
    terminal.find(b"job training")
    os.write(terminal.ours, b"x")  # not a key of ours
    terminal.find(b"\x1b[H")
    assert b"\x1b[?1049h" in terminal.seen
    if how == "sigterm":
        terminal.process.send_signal(signal.SIGTERM)
    else:
        os.write(terminal.ours, b"q" if how == "q" else b"\x03")
    assert terminal.end() == 0
    assert b"Traceback" not in terminal.seen


@pytest.mark.system
def test_top_says_when_nobody_answers_any_more():
    dispatcher = DispatchServer()
    terminal = Terminal("top", dispatcher.target, "--interval", "0.1")
    try:
        terminal.find(b"no worker is registered")
    finally:
        dispatcher.stop()
    terminal.find(b"no answer for")
    os.write(terminal.ours, b"q")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("terms", "shown"),
    [
        ({"ordered": True}, (True, None, "drop")),
        ({"num_consumers": 1, "consumer_index": 0, "remainder": "pad"}, (False, 1, "pad")),
    ],
)
def test_a_status_says_whether_a_job_has_an_order_or_rounds(service, terms, shown):
    address, _ = service
    share = distribute(ShardingPolicy.DYNAMIC, address, "another", **terms)
    with iter(hr.Dataset.range(400).batch(10).apply(share)) as batches:
        next(batches)
        found = json.loads(invoke("status", address, "--json").stdout)["jobs"]
        list(batches)
    (job,) = [each for each in found if each["name"] == "another"]
    assert (job["ordered"], job["num_consumers"], job["remainder"]) == shown


def test_a_status_without_keys_names_the_option(tmp_path):
    new_keys(tmp_path)
    config = DispatcherConfig(security=Security.load(tmp_path, "server"))
    with DispatchServer(config) as dispatcher:
        result = invoke("status", dispatcher.target.removeprefix("tcp://"))
    assert result.exit_code == 1
    assert "on the command line --keys" in result.stderr


# --- the keys of `headrace top`, on a terminal that a test holds the other end of -----------------


class Heard:
    """Signals that come at the looks that a test names."""

    def __init__(self, *looks: set[signal.Signals]) -> None:
        self._looks = list(looks)

    def wait(self, timeout: float, readable: object = ()) -> frozenset[signal.Signals]:
        return frozenset(self._looks.pop(0)) if self._looks else frozenset()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Our end of the terminal that stands for stdin."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        yield ours
        os.close(ours)


def is_over(ours: int, heard: Heard, seconds: float = 20.0) -> bool:
    found: list[bool] = []
    with top._open_screen():
        looking = threading.Thread(
            target=lambda: found.append(top._wait_for_quit(heard, seconds))  # type: ignore[arg-type]
        )
        looking.start()
        looking.join(10.0)
        stuck = looking.is_alive()
        os.write(ours, b"q")  # so that it ends in any case
        looking.join(10.0)
    assert not stuck, "it waits for a key"
    return found[0]


def test_a_key_that_ctrl_c_threw_away_is_not_waited_for(
    ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top.select, "select", lambda *args: ([sys.stdin], [], []))
    assert is_over(ours, Heard(set(), {signal.SIGINT}))


def test_the_end_of_the_terminal_is_the_end(ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top.select, "select", lambda *args: ([sys.stdin], [], []))
    assert is_over(ours, Heard())


@pytest.mark.parametrize(("key", "leaves"), [(b"q", True), (b"\x04", True), (b"x", False)])
def test_some_keys_leave_and_others_do_nothing(ours: int, key: bytes, leaves: bool) -> None:
    with top._open_screen():
        os.write(ours, key)
        assert top._wait_for_quit(Heard(), 0.3) is leaves  # type: ignore[arg-type]

"""Server commands as real processes: their output and exit codes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

import headrace as hr
from headrace.transport.security import new_keys
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.heavy, pytest.mark.system]

_SECONDS = 45.0


class Command:
    """A running `headrace` command and the lines that it has printed."""

    def __init__(self, *arguments, env=None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines = {"stdout": [], "stderr": []}
        self._more = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in self.lines
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name):
        for line in getattr(self.process, name):
            with self._more:
                self.lines[name].append(line.rstrip("\n"))
                self._more.notify_all()

    def find(self, pattern, count=1, stream="stdout"):
        """Wait until `count` lines match; return the matches."""

        def found():
            return [match for line in self.lines[stream] if (match := re.search(pattern, line))]

        with self._more:
            assert self._more.wait_for(lambda: len(found()) >= count, _SECONDS), (
                f"no {count} lines like {pattern!r} in {self.lines}"
            )
            return found()

    def end(self, number=None):
        """Send a signal, if given, wait for the process to exit, and return its exit code."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(_SECONDS)
        for reader in self._readers:
            reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture
def run():
    commands = []

    def start(*arguments, env=None):
        commands.append(Command(*arguments, env=env))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            command.process.terminate()
    for command in commands:
        if not command.process.stdout.closed:
            command.end()


@pytest.fixture
def dispatcher(run):
    command = run("dispatcher", "--port", "0")
    [ready] = command.find(r"dispatcher ready at tcp://(127\.0\.0\.1:\d+)")
    command.address = ready[1]
    return command


def status(address, *options):
    return subprocess.run(
        [sys.executable, "-m", "headrace", "status", address, *options],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )


def test_dispatcher_reports_whether_it_resumes_from_a_journal(run, tmp_path):
    options = ("--port", "0", "--fault-tolerant", "--work-dir", str(tmp_path / "new"))
    for message in (
        f"no journal in {tmp_path / 'new'}: starting a new one",
        f"resuming from the journal in {tmp_path / 'new'}",
    ):
        command = run("dispatcher", *options)
        command.find("dispatcher ready")
        assert command.lines["stdout"][0] == message
        assert command.end(signal.SIGTERM) == 0


def test_journal_that_cannot_be_created_is_not_announced(run):
    command = run("dispatcher", "--port", "0", "--fault-tolerant", "--work-dir", "/proc")
    command.find("cannot create the directory|check its permissions", stream="stderr")
    assert command.end() == 1
    assert command.lines["stdout"] == ["dispatcher stopped"] or command.lines["stdout"] == []


def test_metrics_port_in_use_is_an_error_that_names_it(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = run("dispatcher", "--port", "0", "--metrics-port", str(port))
        command.find(f"cannot serve metrics at port {port} .*another port", stream="stderr")
        assert command.end() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dispatcher_runs_until_a_stop_signal(dispatcher, number):
    assert dispatcher.end(number) == 0
    assert dispatcher.lines["stdout"][-1] == "dispatcher stopped"
    assert dispatcher.lines["stderr"] == []


def test_dataset_is_read_through_a_dispatcher_and_two_worker_processes(run, dispatcher):
    workers = run("worker", "--dispatcher", dispatcher.address, "--processes", "2")
    addresses = {match[1] for match in workers.find(r"worker ready at (127\.0\.0\.1:\d+)", 2)}
    assert len(addresses) == 2
    data = hr.Dataset.range(100).apply(
        hr.service.distribute(
            processing_mode=hr.service.ShardingPolicy.OFF, service=dispatcher.address
        )
    )
    with iter(data) as elements:
        first = next(elements)
        shown = status(dispatcher.address)
        assert sorted([first, *elements]) == sorted([*range(100)] * 2)
    assert shown.returncode == 0, shown.stderr
    assert "2 workers, 1 dataset, 1 job" in shown.stdout
    assert all(address in shown.stdout for address in addresses)
    assert workers.end(signal.SIGINT) == 0
    assert workers.lines["stdout"][-1] == "2 workers stopped"
    assert workers.lines["stderr"] == []


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, "ended by SIGKILL; restarting it in 0.5 s; 1 of 2 running"),
        (signal.SIGTERM, "stopped as requested by a signal; 1 of 2 running"),
    ],
)
def test_ended_worker_process_is_restarted_unless_a_signal_stopped_it(
    run, dispatcher, sent, message
):
    workers = run("worker", "--dispatcher", dispatcher.address, "--processes", "2")
    workers.find("worker ready", 2)
    pid = workers.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(children[0]), sent)
    workers.find(f"process {children[0]} {message}", stream="stderr")
    if sent == signal.SIGKILL:
        workers.find("worker ready", 3)
    assert workers.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("code", [0, 128 + signal.SIGTERM])
def test_worker_process_ended_by_a_function_is_restarted(run, dispatcher, tmp_path, code):
    workers = run("worker", "--dispatcher", dispatcher.address, "--processes", "2")
    workers.find("worker ready", 2)
    ended = tmp_path / "ended"

    def ends_once(x):
        if x == 50 and not ended.exists():
            ended.touch()
            os._exit(code)
        return x

    data = hr.Dataset.range(100).map(ends_once)
    assert len(list(data.apply(hr.service.distribute("distributed_epoch", dispatcher.address)))) > 0
    workers.find(f"ended with code {code}; restarting it in 0.5 s", stream="stderr")
    workers.find("worker ready", 3)
    assert workers.end(signal.SIGTERM) == 0


def test_worker_processes_that_cannot_start_are_not_restarted(run):
    workers = run(
        "worker", "--dispatcher", "127.0.0.1:1", "--dispatcher-timeout", "1", "--processes", "2"
    )
    assert workers.end() == 1
    assert not any("restarting" in line for line in workers.lines["stderr"])


def read_infinite_copy(address):
    data = hr.Dataset.range(1 << 40)
    return iter(
        data.apply(
            hr.service.distribute(processing_mode=hr.service.ShardingPolicy.OFF, service=address)
        )
    )


def test_stopping_worker_delivers_its_buffered_elements_first(run, dispatcher):
    worker = run("worker", "--dispatcher", dispatcher.address)
    worker.find("worker ready")
    with read_infinite_copy(dispatcher.address) as elements:
        first = next(elements)
        worker.process.send_signal(signal.SIGTERM)
        worker.find("draining: delivering buffered elements")
        assert worker.process.poll() is None
        # An infinite copy ends after its buffered elements, in order; then the worker can stop.
        rest = [int(element) for element in elements]
    assert rest == list(range(first + 1, first + 1 + len(rest)))
    assert worker.end() == 0
    assert worker.lines["stdout"][-1] == "worker stopped"
    assert worker.lines["stderr"] == []


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_second_signal_stops_a_worker_at_once(run, dispatcher, options):
    worker = run("worker", "--dispatcher", dispatcher.address, "--drain-timeout", "600", *options)
    worker.find("worker ready")
    with read_infinite_copy(dispatcher.address) as elements:
        next(elements)
        worker.process.send_signal(signal.SIGINT)
        worker.find("draining: delivering buffered elements")
        with Stopwatch() as watch:
            assert worker.end(signal.SIGTERM) == 0
        assert watch.seconds < 10.0


def test_worker_drains_no_longer_than_its_drain_timeout(run, dispatcher):
    worker = run("worker", "--dispatcher", dispatcher.address, "--drain-timeout", "0.2")
    worker.find("worker ready")
    with read_infinite_copy(dispatcher.address) as elements:
        next(elements)
        assert worker.end(signal.SIGTERM) == 0


def test_worker_processes_end_if_their_command_is_killed(run, dispatcher):
    workers = run("worker", "--dispatcher", dispatcher.address, "--processes", "2")
    workers.find("worker ready", 2)
    workers.process.kill()
    # The children inherit the write ends of these pipes, so the output ends when they exit.
    assert workers.end() == -signal.SIGKILL
    assert workers.lines["stdout"].count("worker stopped") == 2


def test_worker_waiting_for_its_dispatcher_can_be_stopped(run):
    worker = run("worker", "--dispatcher", "127.0.0.1:1")
    deadline = time.monotonic() + _SECONDS
    while not catches_sigterm(worker.process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worker.end(signal.SIGTERM) == 0
    assert worker.lines["stdout"] == ["worker stopped"]


def catches_sigterm(pid):
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_worker_without_a_dispatcher_fails_after_its_timeout_with_one_line(run):
    worker = run("worker", "--dispatcher", "127.0.0.1:1", "--dispatcher-timeout", "300")
    assert worker.end() == 1
    [line] = worker.lines["stderr"]
    assert "127.0.0.1:1" in line


def test_port_in_use_is_one_line_and_exit_code_1(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = run("dispatcher", "--port", str(port))
        assert command.end() == 1
    [line] = command.lines["stderr"]
    assert str(port) in line


def test_unused_work_dir_is_reported(run, tmp_path):
    command = run("dispatcher", "--port", "0", "--work-dir", str(tmp_path))
    command.find("dispatcher ready")
    assert command.end(signal.SIGTERM) == 0
    assert command.lines["stderr"] == [
        "headrace: --work-dir is unused without --fault-tolerant; no journal is written"
    ]


def test_debug_option_shows_the_traceback_of_an_error(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = run("--debug", "dispatcher", "--port", str(taken.getsockname()[1]))
        assert command.end() == 1
    assert any("Traceback" in line for line in command.lines["stderr"])


def test_metrics_are_served_at_the_metrics_port(run):
    command = run("dispatcher", "--port", "0", "--metrics-port", "0")
    [at] = command.find(r"metrics at (http://\S+)")
    with urlopen(at[1]) as answer:
        assert b"headrace_splits_assigned_total" in answer.read()
    assert command.end(signal.SIGTERM) == 0


def test_dispatcher_address_can_come_from_the_environment(run, dispatcher):
    worker = run("worker", env={"HEADRACE_DISPATCHER": dispatcher.address})
    worker.find("worker ready")
    assert worker.end(signal.SIGTERM) == 0


def test_dispatcher_with_keys_replies_only_to_clients_with_keys(run, tmp_path):
    new_keys(tmp_path)
    command = run("dispatcher", "--port", "0", "--keys", str(tmp_path))
    [ready] = command.find(r"ready at tcp://(\S+)")
    assert status(ready[1], "--keys", str(tmp_path)).returncode == 0
    without_keys = status(ready[1])
    assert without_keys.returncode == 1
    assert "keys" in without_keys.stderr


def test_address_reachable_from_other_machines_requires_keys(run):
    command = run("dispatcher", "--port", "0", "--host", "0.0.0.0")
    assert command.end() == 2
    assert "headrace keys new" in " ".join(command.lines["stderr"])
    assert not any("Traceback" in line for line in command.lines["stderr"])

"""Tests of real child processes, alone and under a supervisor: their messages and exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import UnavailableError
from headrace.process.child import ChildCommand, ChildProcess, build_command, clean_environment
from headrace.process.supervisor import (
    ProcessEvent,
    ProcessExited,
    ProcessReady,
    Supervisor,
    stop_children,
)
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.heavy

ENVIRONMENT = clean_environment(os.environ, paths=tuple(sys.path))

READY = """
import sys
from headrace.process.parent_link import report_stopping, report_ready, wait_for_stop
report_ready("at last")
wait_for_stop()
"""
DEAF = """
import signal, time
from headrace.process.parent_link import report_ready
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report_ready()
time.sleep(600)
"""
HURRIED = """
import time
from headrace.process.parent_link import report_ready
report_ready()
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Callable[..., ChildProcess]]:
    started: list[ChildProcess] = []

    def start(program: str, *, dies_with_parent: bool = False) -> ChildProcess:
        command = ChildCommand(
            arguments=("-c", program), environment=ENVIRONMENT, dies_with_parent=dies_with_parent
        )
        started.append(ChildProcess(command))
        return started[-1]

    yield start
    for child in started:
        child.kill()


def is_ready(child: ChildProcess) -> bool:
    child.read_messages()
    return child.ready_message is not None


Start = Callable[..., ChildProcess]


def test_child_reports_ready_and_stops_when_released(start: Start) -> None:
    child = start(READY)
    wait_until(lambda: is_ready(child))
    assert child.ready_message == "at last"
    assert (child.is_running, child.stop_requested, child.exit_description) == (
        True,
        False,
        "is running",
    )
    assert stop_children([child], 30.0) == []
    assert (child.stop_requested, child.exit_description) == (True, "ended with code 0")


def test_exit_code_does_not_count_as_a_requested_stop(start: Start) -> None:
    child = start(f"raise SystemExit({128 + signal.SIGTERM})")
    wait_until(lambda: not child.is_running)
    child.reap()
    assert (child.stop_requested, child.exit_description) == (False, "ended with code 143")


def test_child_stopped_by_a_signal_reports_it(start: Start) -> None:
    child = start("from headrace.process.parent_link import report_stopping; report_stopping()")
    wait_until(lambda: not child.is_running)
    child.reap()
    assert child.stop_requested


def test_signal_that_ended_a_child_is_named(start: Start) -> None:
    child = start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    wait_until(lambda: not child.is_running)
    assert child.exit_description == "ended by SIGSEGV"


def test_startup_output_of_a_child_is_kept(start: Start) -> None:
    child = start("import sys; print('out'); sys.exit('no such dispatcher')", dies_with_parent=True)
    wait_until(lambda: not child.is_running)
    child.reap()
    assert sorted(child.read_startup_output().splitlines()) == ["no such dispatcher", "out"]


def test_ready_child_writes_to_the_parents_output(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start(
        "import sys\n"
        "from headrace.process.parent_link import report_ready\n"
        "print('early', flush=True)\n"
        "report_ready('', int(sys.argv[-2]))\n"
        "print('late', flush=True)\n",
        dies_with_parent=True,
    )
    wait_until(lambda: not child.is_running)
    assert "late" in capfd.readouterr().err


def test_children_that_do_not_stop_are_killed_at_the_deadline(start: Start) -> None:
    children = [start(DEAF), start(DEAF), start(READY)]
    wait_until(lambda: all(is_ready(child) for child in children))
    # The third child stops by itself, which takes a while on a busy machine.
    with Stopwatch() as watch:
        assert stop_children(children, 5.0) == children[:2]
    assert watch.seconds < 9.0
    assert [child.exit_description for child in children[:2]] == ["ended by SIGKILL"] * 2


def test_hurried_children_receive_a_signal(start: Start) -> None:
    child = start(HURRIED)
    wait_until(lambda: is_ready(child))

    def hurries_at_once(seconds: float) -> bool:
        time.sleep(0.01)
        return True

    assert stop_children([child], 600.0, hurry_seconds=30.0, should_hurry=hurries_at_once) == []
    assert child.exit_description == "ended by SIGTERM"


def test_child_environment_omits_interpreter_specific_variables() -> None:
    own = {"PYTHONINSPECT": "1", "PYTHONPATH": "/old", "A": "1", "B": "1"}
    assert clean_environment(own, {"B": "2"}, {"B": "3"}, paths=("/x", "")) == {
        "PYTHONPATH": f"/x:{os.getcwd()}",
        "A": "1",
        "B": "3",
    }


PARENT = f"""
import os, sys, time
from headrace.process.child import ChildCommand, ChildProcess
child = ChildProcess(ChildCommand(arguments=("-c", {READY!r}), environment=dict(os.environ)))
while child.ready_message is None:
    child.read_messages()
    time.sleep(0.01)
if "fork" in sys.argv and os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_child_ends_with_its_parent_despite_forks_of_the_parent(how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PARENT, how],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        process_group=0,
    )
    try:
        out, _ = parent.communicate(timeout=30)
        wait_until(lambda: not Path(f"/proc/{int(out)}").exists())
    finally:
        if how == "fork":
            os.killpg(parent.pid, signal.SIGKILL)


HOLDS_THE_LOCK = """
import re, sys
from headrace.process.parent_link import die_with_parent, report_ready
die_with_parent(int(sys.argv[-1]))
report_ready()
re.match("(a+)+$", "a" * 64 + "b")  # runs forever, and no other thread of the interpreter runs
"""


def test_child_that_holds_the_gil_dies_with_its_parent() -> None:
    program = PARENT.replace(repr(READY), repr(HOLDS_THE_LOCK)).replace(
        "environment=", "dies_with_parent=True, environment="
    )
    parent = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        timeout=30,
        check=False,
    )
    wait_until(lambda: not Path(f"/proc/{int(parent.stdout)}").exists())


def test_forked_processes_die_with_their_parent():
    program = """
import os, sys, time
from headrace.process.parent_link import bind_forked_children
with bind_forked_children():
    if os.fork() == 0:
        os.fork()
        if os.fork() == 0:
            os._exit(0)  # closes its descriptors, and ends no other process
        os.write(1, b"forked\\n")  # at once: two processes write
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    with process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["forked\n"] * 2
        began = time.monotonic()
        process.kill()
        assert process.stdout.read() == ""  # all writers have closed the pipe
        assert time.monotonic() - began < 20


# --- supervised children: real, small processes ---------------------------------------------------


_PROGRAM = """
import sys, threading
from headrace.process.parent_link import die_with_parent, set_when_stopped, report_ready
words, log_to, lifeline = sys.argv[1:]
if words == "cannot":
    sys.exit("there is no such port")
die_with_parent(int(lifeline))
ended = threading.Event()
set_when_stopped(ended, 5.0)
report_ready(words, int(log_to))
ended.wait()
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ChildCommand]:
    (tmp_path / "small_child.py").write_text(_PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda words: build_command("small_child", words, environment={"WHO": words})


@pytest.fixture
def events() -> list[ProcessEvent]:
    return []


@pytest.fixture
def supervisor(events: list[ProcessEvent]) -> Iterator[Supervisor]:
    supervisor = Supervisor("child", events.append)
    yield supervisor
    supervisor.close()


def test_started_children_are_ready_and_replaced_after_a_crash(
    supervisor: Supervisor, command: Callable[[str], ChildCommand], events: list[ProcessEvent]
) -> None:
    (first, child), (second, other) = supervisor.start([command("one"), command("two")])
    assert (child.ready_message, other.ready_message) == ("one", "two")
    seen = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
    assert {b"WHO=one", b"CUDA_VISIBLE_DEVICES=", b"JAX_PLATFORMS=cpu"} <= set(seen)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: len(events) == 2)
    match events:
        case [ProcessExited(post, gone, again_in), ProcessReady(again, _)]:
            assert (post, gone, again) == (first, child, first)
            assert again_in == 0.5
        case _:
            pytest.fail(f"{events}")
    assert second.child is other
    supervisor.close()
    assert not other.is_running


def test_child_killed_by_the_supervisor_is_not_restarted(
    supervisor: Supervisor, command: Callable[[str], ChildCommand], events: list[ProcessEvent]
) -> None:
    (post, child), (_, other) = supervisor.start([command("one"), command("two")])
    supervisor.kill(post)
    assert not child.is_running
    os.kill(other.pid, signal.SIGKILL)
    wait_until(lambda: len(events) == 2)
    assert post not in {event.supervised for event in events}


def test_failed_start_stops_all_children_and_reports_the_output(
    supervisor: Supervisor, command: Callable[[str], ChildCommand], events: list[ProcessEvent]
) -> None:
    with pytest.raises(UnavailableError, match=r"(?s)child \d+ ended with code 1.*no such port"):
        supervisor.start([command("one"), command("cannot")])
    assert events == []
    assert supervisor.start([]) == []

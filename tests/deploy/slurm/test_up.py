"""`headrace up`: steps of real processes, started by a replacement of srun and by Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

import headrace as hr
from headrace.deploy.step_directory import StepPublisher
from headrace.service.config import parse_service
from headrace.service.messages import GetStatus
from headrace.service.stub import DispatcherStub
from tests.deploy.slurm.launchers import HAS_SLURM, HEADRACE, FakeSlurm, Slurm, wait_until
from tests.deploy.slurm.program import COUNT

pytestmark = [pytest.mark.heavy, pytest.mark.system]

PROGRAM = [sys.executable, str(Path(__file__).with_name("program.py"))]
SAMPLES = Path(__file__).parents[3] / "deploy" / "slurm"
SQUARES = sorted(x * x for x in range(COUNT))
real_slurm = pytest.param(
    Slurm,
    id="slurm",
    marks=[
        pytest.mark.slurm,
        pytest.mark.slow,
        pytest.mark.skipif(not HAS_SLURM, reason="needs Debian's slurm-wlm: slurmctld not found"),
    ],
)


@pytest.fixture(params=[pytest.param(FakeSlurm, id="fake"), real_slurm])
def launcher(request, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_STEP", uuid.uuid4().hex)
    launcher = request.param(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_STEP", uuid.uuid4().hex)
    launcher = FakeSlurm(tmp_path)
    yield launcher
    launcher.close()


def test_program_reads_exactly_while_ranks_are_killed(launcher, tmp_path):
    step = launcher.run(5, *HEADRACE, "up", "--ps", "1", "--", *PROGRAM, "read")
    assert step.find(r"tasks (.*)")[0][1] == "{'chief': 1, 'ps': 1, 'worker': 3}"
    step.find("0: reading")
    # One data worker, which its rank restarts, and one whole rank.
    rank, *children = step.processes(2)
    data_worker = next(each for each in children if "worker" in each.cmdline()[4:5])
    data_worker.send_signal(signal.SIGKILL)
    step.processes(4)[0].send_signal(signal.SIGKILL)
    step.find(rf"2: headrace: process {data_worker.pid} ended by SIGKILL; restarting")
    step.find("0: exact .1.0, 2.0. files 0o600$")
    # srun reports the signal of a killed rank, which is a higher status than the program's.
    assert step.end() in (7, 128 + signal.SIGKILL)
    assert rank.is_running() is False
    step.find("0: rank 0 stopped")
    assert list((tmp_path / ".headrace").iterdir()) == []


def test_program_reads_exactly_after_the_loss_of_a_node(launcher, tmp_path):
    no_kill = {"SLURM_NO_KILL": "set", "SLURM_KILL_BAD_EXIT": "0"}
    step = launcher.run(5, *HEADRACE, "up", "--ps", "1", "--", *PROGRAM, "read", env=no_kill)
    step.find("0: reading")
    launcher.lose_node(step, 4)
    step.find("0: exact .1.0, 2.0. files 0o600$")
    step.find("0: rank 0 stopped")
    assert step.end() != 0
    assert list((tmp_path / ".headrace").iterdir()) == []


def test_program_that_ignores_sigterm_is_killed_after_the_grace_period(launcher):
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program += "; print('ignores it', flush=True); time.sleep(100)"
    step = launcher.run(3, *HEADRACE, "up", "--grace", "2", "--", sys.executable, "-c", program)
    step.find("0: ignores it")
    step.cancel()
    step.find("0: headrace: the program still runs 2 s after SIGTERM: killing it; .* --grace")
    for rank in range(3):
        step.find(f"{rank}: rank {rank} stopped")
    assert step.end() == 128 + signal.SIGKILL


@pytest.mark.slow
def test_ranks_add_workers_while_the_program_waits_for_elements(fake):
    step = fake.run(3, *HEADRACE, "up", "--max-workers-per-rank", "2", "--", *PROGRAM, "scale")
    step.find("0: scaled out")
    assert step.end() == 0
    for rank in (1, 2):
        assert len(step.find(rf"^{rank}: worker ready at", 2)) == 2


def running_workers(pid):
    """Return the data workers that are children of a process."""
    children = psutil.Process(pid).children()
    return [
        each
        for each in children
        if each.status() != psutil.STATUS_ZOMBIE and "worker" in each.cmdline()[4:5]
    ]


def test_rank_runs_the_published_number_of_workers_and_replaces_killed_ones(tmp_path):
    publisher = StepPublisher(tmp_path / "1.0")
    server_keys = hr.service.Security.load(publisher.keys, "server")
    client_keys = hr.service.Security.load(publisher.keys, "client")
    config = hr.service.DispatcherConfig(security=server_keys)
    variables = {
        **os.environ,
        **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"},
        **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"},
    }
    with hr.service.DispatchServer(config) as dispatcher, ExitStack() as stack:
        address = parse_service(dispatcher.target)
        stub = stack.enter_context(DispatcherStub(address, security=client_keys))
        options = ["--run-dir", str(tmp_path), "--max-workers-per-rank", "3"]
        rank = subprocess.Popen([*HEADRACE, "up", *options], env=variables)
        stack.callback(rank.wait)
        stack.callback(rank.terminate)

        def has_workers(count, **change):
            publisher.publish(dispatcher=address, **change)
            return len(stub.call(GetStatus(), timeout=5.0).workers) == count

        wait_until(lambda: has_workers(1), "one worker")
        wait_until(lambda: has_workers(3, num_workers=3), "three workers")
        started = running_workers(rank.pid)
        started[-1].kill()
        wait_until(lambda: len(running_workers(rank.pid)) == 2, "the end of a worker")
        # Publishes, so that the rank does not take this process for dead.
        wait_until(lambda: has_workers(4) or len(running_workers(rank.pid)) == 3, "a new worker")
        wait_until(lambda: has_workers(1, num_workers=1), "one worker again")
        wait_until(lambda: len(running_workers(rank.pid)) == 1, "the end of the drained workers")
        assert running_workers(rank.pid) == started[:1]
        publisher.publish(stage="stopping")
        assert rank.wait(60.0) == 0


def test_sigterm_leaves_servers_running_until_the_program_ends(launcher, tmp_path):
    step = launcher.run(4, *HEADRACE, "up", "--ps", "1", "--", *PROGRAM, "save")
    step.find("0: ready")
    step.cancel()
    step.find("0: saved .1.0, 2.0. True")
    step.end()
    for rank in range(4):
        step.find(f"{rank}: rank {rank} stopped")
    assert list((tmp_path / ".headrace").iterdir()) == []


def test_requeued_step_continues_exactly_from_its_journal(fake, tmp_path):
    output = tmp_path / "elements.txt"
    command = [*HEADRACE, "up", "--work-dir", str(tmp_path / "journal"), "--"]
    command += [*PROGRAM, "slow", str(output)]
    step = fake.run(3, *command)
    step.find("0: read 50")
    step.cancel()
    step.find("0: left")
    assert step.end() == 0
    before = output.read_text().split()
    assert 50 <= len(before) < COUNT
    again = fake.run(3, *command, job_id=step.job_id)
    again.find(f"resuming from the journal in {tmp_path}/journal")
    again.find("0: finished")
    assert again.end() == 0
    assert sorted(map(int, output.read_text().split())) == SQUARES


def test_files_of_a_killed_attempt_are_not_used_after_a_requeue(fake, tmp_path):
    step = fake.run(3, *HEADRACE, "up", "--", *PROGRAM, "slow", str(tmp_path / "first.txt"))
    step.find("0: read 50")
    for rank in range(3):
        for process in step.processes(rank):
            process.kill()
    step.end()
    [stale] = (tmp_path / ".headrace").iterdir()
    [attempt] = [path.name for path in stale.iterdir() if path.is_dir()]
    output = tmp_path / "second.txt"
    again = fake.run(3, *HEADRACE, "up", "--", *PROGRAM, "slow", str(output), job_id=step.job_id)
    [ready] = again.find(r"step (\S+) ready: .*/([0-9a-f]+)/keys")
    assert ready[1] == stale.name
    assert ready[2] != attempt
    assert again.end() == 0
    assert sorted(map(int, output.read_text().split())) == SQUARES
    assert not stale.exists()


@pytest.mark.parametrize("launcher", [real_slurm], indirect=True)
def test_sample_job_resumes_after_scontrol_requeue(launcher, tmp_path):
    output = tmp_path / "elements.txt"
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    job = launcher.ask(
        *("sbatch", "--parsable", f"--export=ALL,{path}", str(SAMPLES / "headrace.sbatch")),
        *(*PROGRAM, "slow", str(output)),
    ).strip()
    log = tmp_path / f"slurm-{job}.out"
    wait_until(lambda: log.exists() and "0: read 50" in log.read_text(), "50 elements")
    launcher.ask("scontrol", "requeue", job)
    wait_until(lambda: "0: left" in log.read_text(), "the end of the first attempt")
    assert len(output.read_text().split()) < COUNT
    # A requeued job starts after a delay; this one may start now.
    wait_until(lambda: "PENDING" in launcher.ask("squeue", "-h", "-o", "%T"), "the second attempt")
    launcher.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: "0: finished" in log.read_text(), "the second attempt")
    wait_until(lambda: not launcher.ask("squeue", "-h").strip(), "the end of the job")
    assert f"resuming from the journal in {tmp_path}/journal-{job}" in log.read_text()
    assert sorted(map(int, output.read_text().split())) == SQUARES


def test_worker_rank_that_cannot_see_the_run_dir_names_the_reason(fake, tmp_path):
    command = f"exec {' '.join(HEADRACE)} up --timeout 5 --run-dir {tmp_path}/$SLURM_PROCID"
    step = fake.run(2, "sh", "-c", command)
    step.find("1: headrace: no sign of rank 0 for .* does not exist on this node.* all nodes share")
    step.find("0: headrace: 1 of 2 ranks are not ready after .* all nodes share .--run-dir")
    assert step.end() == 1


def test_sigint_ends_the_step_after_the_program(fake):
    program = "import time; print('runs', flush=True)\ntry: time.sleep(100)\n"
    program += "except KeyboardInterrupt: time.sleep(1.0); print('interrupted', flush=True)"
    step = fake.run(2, *HEADRACE, "up", "--", sys.executable, "-c", program)
    step.find("0: runs")
    step.process.send_signal(signal.SIGINT)
    step.find("0: interrupted")
    step.find("1: rank 1 stopped")
    assert step.end() == 0


def test_program_that_does_not_exist_is_named_and_ends_the_step(fake):
    step = fake.run(2, *HEADRACE, "up", "--", "no-such-program", "train.py")
    step.find("0: headrace: cannot start the program 'no-such-program': No such file .* PATH")
    step.find("1: rank 1 stopped")
    assert step.end() == 1


def test_step_without_a_program_serves_until_sigterm(launcher, tmp_path):
    step = launcher.run(3, *HEADRACE, "up")
    [ready] = step.find(r"0: step \S+ ready: data service at (\S+), keys in (\S+)$")
    security = hr.service.Security.load(ready[2], "client")
    distribute = hr.service.distribute(
        hr.service.ShardingPolicy.DYNAMIC, ready[1], security=security
    )
    elements = [int(x) for x in hr.Dataset.range(100).apply(distribute)]
    assert sorted(elements) == list(range(100))
    step.cancel()
    step.end()
    for rank in range(3):
        step.find(f"{rank}: rank {rank} stopped")
    assert not Path(ready[2]).exists()

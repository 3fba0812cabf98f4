"""`headrace up`: steps of real processes, started by a stand-in for srun and by Slurm."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

import headrace as hr
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
    # Of a killed rank srun reports the signal, which is a higher status than the program's.
    assert step.end() in (7, 128 + signal.SIGKILL)
    assert rank.is_running() is False
    step.find("0: rank 0 stopped")
    assert list((tmp_path / ".headrace").iterdir()) == []


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

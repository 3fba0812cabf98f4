"""`headrace doctor --job`: rates from statuses, the report, and real jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli.job_measurement import EpochObservation, StatusAt, measure_epoch
from headrace.cli.job_report import render_report, report_to_json, watch_job
from headrace.cli.main import app
from headrace.cli.status_client import StatusClient, StatusSnapshot
from headrace.coordinator.status import CoordinatorStatus
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.execution.pipeline_model import Resource, StepCost
from headrace.execution.what_if import Change
from headrace.service import DispatchServer, LocalCluster, distribute
from headrace.service.messages import (
    ClientStatus,
    DispatcherStatus,
    IterationStatus,
    JobStatus,
    StepStatus,
    TaskStatus,
    WorkerStatus,
)
from headrace.testing import ManualClock

_SECONDS = 90.0


def iteration_at(seconds, *, age=0.0, iteration_id=1, finished=False, epoch=(0,)):
    """An epoch after some seconds: 100 elements per second on one busy worker."""
    reported = seconds - age
    elements = int(100 * reported)
    return IterationStatus(
        iteration_id=iteration_id,
        epoch=epoch,
        finished=finished,
        elapsed_seconds=seconds,
        splits_unassigned=10,
        elements=elements,
        bytes=50 * elements,
        clients=(
            ClientStatus(
                client_id="c",
                seconds_since_heartbeat=0.0,
                elements=elements,
                elements_per_second=1.0,
                wait_seconds=0.75 * reported,
                wait_ratio=0.5,
                seconds_since_report=age,
            ),
        ),
        tasks=(
            TaskStatus(
                task_id=4000,
                worker_address="10.0.0.1:5000",
                elements=elements,
                elements_per_second=90.0,
                client_wait_ratio=0.1,
                seconds_since_report=age,
            ),
        ),
        steps=(
            StepStatus(step="map at train.py:2", seconds=0.8 * reported, position=1),
            StepStatus(step="read at train.py:1", seconds=0.2 * reported, position=0),
        ),
    )


def status_at(seconds, *, jobs=None, age=0.0):
    worker = WorkerStatus(
        worker_id="w",
        address="10.0.0.1:5000",
        seconds_since_heartbeat=age,
        tasks=1,
        cores=4.0,
        cpu_seconds=0.5 * (seconds - age),
        busy_cores=0.5,
        machine_cpu_seconds=1.5 * (seconds - age),
    )
    if jobs is None:
        jobs = (job_of(iteration_at(seconds, age=age)),)
    return DispatcherStatus(workers=(worker,), jobs=jobs, datasets=1)


def job_of(*iterations, name="training", job_id=7, path=""):
    return JobStatus(
        job_id=job_id,
        name=name,
        dataset_id="1",
        processing_mode=1,
        num_epochs=1,
        running_tasks=1,
        clients=1,
        iterations=iterations,
        path=path,
    )


def observation(before, after):
    (job,) = after.status.jobs
    found = EpochObservation(job, job.iterations[0], before)
    found.after = after
    return found


# --- rates ----------------------------------------------------------------------------------------


def test_counters_are_divided_by_the_time_between_reports():
    # The second report is 0.9 s old, the first one 0.1 s.
    before = StatusAt(status_at(10.0, age=0.1), 110.0)
    after = StatusAt(status_at(20.0, age=0.9), 120.0)
    measured = measure_epoch(observation(before, after))
    assert measured.elements_per_second == pytest.approx(100.0)
    assert measured.client_wait == pytest.approx(0.75)
    assert measured.client_capacity == pytest.approx(400.0)
    assert measured.cpu_seconds == pytest.approx(0.005)
    assert measured.task_client_wait == 0.0
    assert (measured.cores, measured.bytes_per_element) == (4.0, 50.0)
    assert measured.idle_cores == pytest.approx(2.5)
    assert measured.steps == (
        StepCost(name="map at train.py:2", seconds=pytest.approx(0.008), position=1),
        StepCost(name="read at train.py:1", seconds=pytest.approx(0.002), position=0),
    )


def test_a_single_status_gives_the_averages_of_the_dispatcher():
    only = StatusAt(status_at(10.0), 110.0)
    measured = measure_epoch(observation(only, only))
    assert measured.elements_per_second == 90.0
    assert (measured.client_wait, measured.task_client_wait) == (0.5, 0.1)
    assert measured.cpu_seconds == pytest.approx(0.5 / 90)
    assert measured.steps[0].seconds == pytest.approx(0.008)


_NEW_FIELDS = {
    "cores",
    "cpu_seconds",
    "busy_cores",
    "machine_cpu_seconds",
    "seconds_since_report",
    "client_wait_seconds",
    "split_wait_seconds",
    "position",
    "threads",
}


def drop_new_fields(value):
    if isinstance(value, dict):
        return {key: drop_new_fields(each) for key, each in value.items() if key not in _NEW_FIELDS}
    if isinstance(value, list | tuple):
        return [drop_new_fields(each) for each in value]
    return value


def test_status_of_an_older_dispatcher_gives_a_bottleneck_and_fewer_predictions():
    def old(seconds):
        plain = drop_new_fields(msgspec.to_builtins(status_at(seconds)))
        return StatusAt(msgspec.convert(plain, DispatcherStatus), 100.0 + seconds)

    (report,) = watch(old(10.0), old(20.0))
    assert report.measured.elements_per_second == 90.0
    assert (report.measured.cores, report.measured.cpu_seconds) == (0.0, None)
    assert report.diagnosis.bottleneck.location == "map at train.py:2"
    kinds = {each.kind for each in report.diagnosis.what_ifs}
    assert Change.SAVE_OUTPUT not in kinds  # the order of the steps is unknown
    assert Change.ADD_LOCAL_WORKER in kinds


def test_processor_time_of_a_worker_with_other_tasks_is_unknown():
    shared = [
        msgspec.structs.replace(
            each, workers=tuple(msgspec.structs.replace(w, tasks=2) for w in each.workers)
        )
        for each in (status_at(10.0), status_at(20.0))
    ]
    measured = measure_epoch(observation(*map(StatusAt, shared, (110.0, 120.0))))
    assert measured.cpu_seconds is None


# --- watching -------------------------------------------------------------------------------------


def watch(*statuses, name="training"):
    """Watch a job that has each of these statuses for a second, and the last one from then on."""
    clock, remaining = ManualClock(), list(statuses)

    def fetch():
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    return watch_job(fetch, name, 10.0, clock=clock, sleep=clock.advance)


def test_every_active_epoch_is_reported():
    both = [
        status_at(
            at, jobs=(job_of(*(iteration_at(at, iteration_id=i, epoch=(i,)) for i in (1, 2))),)
        )
        for at in (10.0, 20.0)
    ]
    reports = watch(*map(StatusAt, both, (110.0, 120.0)))
    assert [each.epoch for each in reports] == [(1,), (2,)]


def test_an_epoch_that_ended_is_reported_as_long_as_it_was_active():
    ended = status_at(15.0, jobs=(job_of(iteration_at(15.0, finished=True)),))
    (report,) = watch(
        StatusAt(status_at(10.0), 110.0), StatusAt(status_at(14.0), 114.0), StatusAt(ended, 115.0)
    )
    assert report.seconds == 4.0
    assert report.measured.elements_per_second == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("jobs", "name", "error", "message"),
    [
        ((), "training", NotFoundError, "the dispatcher has no jobs"),
        ((job_of(), job_of(name="")), "train", NotFoundError, "the jobs are: training, 7"),
        ((job_of(),), "training", FailedPreconditionError, "has no active epoch"),
        (
            (job_of(iteration_at(9.0, finished=True)),),
            "training",
            FailedPreconditionError,
            "has no active epoch",
        ),
        ((job_of(iteration_at(1.0)),), "training", FailedPreconditionError, "less than 3 s"),
        ((job_of(path="/data", name=""),), "7", FailedPreconditionError, "is a save"),
    ],
)
def test_jobs_that_cannot_be_examined(jobs, name, error, message):
    with pytest.raises(error, match=message):
        watch(StatusAt(status_at(10.0, jobs=jobs), 110.0), name=name)


def test_a_job_without_a_name_is_found_by_its_number():
    statuses = [
        StatusAt(status_at(at, jobs=(job_of(iteration_at(at), name=""),)), at)
        for at in (10.0, 20.0)
    ]
    (report,) = watch(*statuses, name="7")
    assert report.job == "7"


# --- output ---------------------------------------------------------------------------------------


def test_report_names_the_bottleneck_first_and_then_the_changes_by_gain():
    (report,) = watch(StatusAt(status_at(10.0), 110.0), StatusAt(status_at(20.0), 120.0))
    text = render_report(report)
    assert text.splitlines()[:2] == [
        "job training, epoch 0: bound by map at train.py:2",
        "80% of the workers' time, 8 ms per element",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("map at train.py:2") > 3
    assert text.index("3 more workers") < text.index("1 more worker,")
    assert "processor time of the workers: 5 ms per element" in text


def test_report_without_a_useful_change_says_so():
    (report,) = watch(StatusAt(status_at(10.0), 110.0), StatusAt(status_at(20.0), 120.0))
    useless = [
        dataclasses.replace(each, elements_per_second=100.0, gain=1.0, at_most=None)
        for each in report.diagnosis.what_ifs
    ]
    diagnosis = dataclasses.replace(report.diagnosis, what_ifs=tuple(useless))
    text = render_report(dataclasses.replace(report, diagnosis=diagnosis))
    assert text.endswith("\nno change of the workers would make the job faster\n")


def test_similar_names_come_first_if_a_dispatcher_has_many_jobs():
    jobs = tuple(job_of(name=f"job-{number}", job_id=number) for number in range(100))
    jobs += (job_of(name="training"),)
    with pytest.raises(NotFoundError, match=r"the jobs are: training, job-0, .* and 91 more"):
        watch(StatusAt(status_at(10.0, jobs=jobs), 110.0), name="trainign")


def test_coordinator_has_no_jobs(monkeypatch):
    status = CoordinatorStatus(num_waiting=0, num_unfinished=0, num_finished=0, staleness_gap=0)
    monkeypatch.setattr(StatusClient, "fetch", lambda _: StatusSnapshot(status, 0.0))
    result = CliRunner().invoke(app, ["doctor", "localhost:5050", "--job", "training"])
    assert result.exit_code == 1
    assert "give the address of the dispatcher" in result.stderr


def test_control_characters_of_names_are_not_printed():
    jobs = [(job_of(iteration_at(at), name="\x1b[2J"),) for at in (10.0, 20.0)]
    statuses = [
        StatusAt(status_at(10.0, jobs=each), at) for each, at in zip(jobs, (0, 9), strict=True)
    ]
    (report,) = watch(*statuses, name="\x1b[2J")
    assert "\x1b" not in render_report(report)


def test_json_contains_the_fields_of_the_records():
    (report,) = watch(StatusAt(status_at(10.0), 110.0), StatusAt(status_at(20.0), 120.0))
    found = json.loads(json.dumps(report_to_json(report)))
    assert (found["job"], found["epoch"], found["resource"]) == ("training", [0], "user functions")
    assert found["bottleneck"]["location"] == "map at train.py:2"
    assert found["measured"]["steps"][0]["seconds"] == pytest.approx(0.008)
    assert {"kind", "change", "elements_per_second", "gain"} <= set(found["what_ifs"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "training"], "--job needs HOST:PORT"),
        (["--json"], "--json needs --job"),
        (["localhost:1", "--job", "training", "--interval", "0"], "must be greater than 0"),
    ],
)
def test_wrong_usage(arguments, message):
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"HEADRACE_DISPATCHER": ""})
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_unknown_job_of_a_dispatcher_is_an_error():
    with DispatchServer() as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        environment = {"HEADRACE_DISPATCHER": address}
        result = CliRunner().invoke(app, ["doctor", "--job", "training"], env=environment)
    assert result.exit_code == 1
    assert "no job 'training'; the dispatcher has no jobs" in result.stderr


# --- real jobs ------------------------------------------------------------------------------------


def wait_5_ms(x):
    time.sleep(0.005)
    return x


def slow_numbers():
    for number in range(1_000_000):
        time.sleep(0.005)
        yield np.int64(number)


def slow_source():
    return hr.Dataset.from_generator(slow_numbers, output_signature=hr.ArraySpec((), "int64"))


@contextlib.contextmanager
def reading(dataset, seconds):
    """Read elements on a thread, and wait some seconds after each."""
    is_over = threading.Event()

    def read():
        with iter(dataset) as elements:
            for _ in elements:
                if is_over.wait(seconds):
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("make_dataset", "seconds", "resource"),
    [
        (slow_source, 0.0, Resource.SOURCE),
        (lambda: hr.Dataset.range(10**9).map(wait_5_ms), 0.0, Resource.FUNCTIONS),
        (lambda: hr.Dataset.range(10**9), 0.05, Resource.CLIENTS),
    ],
    ids=["source", "map", "clients"],
)
def test_bottleneck_of_a_real_job(make_dataset, seconds, resource):
    with LocalCluster(1, heartbeat_interval_ms=200) as cluster:
        address = cluster.target.removeprefix("tcp://")
        share = distribute("parallel_epochs", cluster.target, job_name="training")
        with reading(make_dataset().apply(share), seconds):
            deadline = time.monotonic() + _SECONDS
            found = None
            while found != resource.value and time.monotonic() < deadline:
                arguments = ["doctor", address, "--job", "training", "--json", "--interval", "4"]
                result = CliRunner().invoke(app, arguments)
                if result.exit_code == 0:
                    (report,) = json.loads(result.stdout)
                    found = report["resource"]
            assert found == resource.value, result.output
    assert report["measured"]["cores"] > 0
    assert report["measured"]["cpu_seconds"] > 0
    if resource is Resource.CLIENTS:
        assert report["what_ifs"] == []
    else:
        # Other programs may use the cores of this machine.
        rates = [each["at_most"] or each["elements_per_second"] for each in report["what_ifs"]]
        assert max(rates) > 1.2 * report["elements_per_second"]

"""What a service that runs tells of itself: stats, metrics, and whether it is ready."""

from __future__ import annotations

import re
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import headrace as hr
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
)


def slowly(x):
    time.sleep(0.01)
    return x


def poll(found, seconds=20.0):
    """Return what `found` returns as soon as that is something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        result = found()
        if result:
            return result
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_slow_workers_appear_in_client_waits_and_step_times():
    with DispatchServer() as dispatcher, worker_of(dispatcher):
        dataset = hr.Dataset.range(100_000).map(slowly).batch(2)
        share = distribute(ShardingPolicy.DYNAMIC, dispatcher.target, job_name="training")
        with iter(dataset.apply(share)) as batches:

            def found():
                for _ in range(20):
                    next(batches)
                (job,) = dispatcher.stats().jobs
                (iteration,) = job.iterations
                is_known = iteration.clients[0].wait_ratio > 0.5 and len(iteration.steps) > 0
                return is_known and iteration

            iteration = poll(found)
    assert iteration.steps[0].step.startswith("map at test_stats.py:")
    assert iteration.elements_per_second > 0
    assert iteration.num_splits == 50_000
    assert 0 < iteration.progress < 1
    assert iteration.remaining_seconds > 1
    (client,) = iteration.clients
    assert client.wait_seconds > 0
    assert client.elements > 0


def test_a_slow_client_appears_as_a_task_waiting_for_clients():
    with DispatchServer() as dispatcher, worker_of(dispatcher):
        share = distribute("parallel_epochs", dispatcher.target)
        with iter(hr.Dataset.range(10_000_000).batch(100).apply(share)) as batches:
            next(batches)

            def found():
                (job,) = dispatcher.stats().jobs
                (task,) = job.iterations[0].tasks
                return task.waiting_for == "clients" and task.buffered_batches and task

            task = poll(found)
    assert task.elements > 0
    assert task.buffered_bytes > 0


def test_lost_workers_are_in_the_stats(tmp_path):
    with LocalCluster(num_workers=1, processes=True) as cluster:
        target = cluster.target
        share = distribute(ShardingPolicy.DYNAMIC, target)
        with iter(hr.Dataset.range(1_000_000).map(slowly).apply(share)) as elements:
            next(elements)
            cluster.kill_worker(0)
            stats = poll(lambda: (s := cluster.dispatcher.stats()).workers_lost and s)
    assert stats.recently_lost_workers[0].reason


def test_a_server_that_was_not_started_has_none():
    with pytest.raises(RuntimeError, match="before the server is started"):
        DispatchServer(DispatcherConfig(), start=False).stats()


def worker_of(dispatcher):
    address = dispatcher.target.removeprefix("tcp://")
    return hr.service.WorkerServer(hr.service.WorkerConfig(address))


# --- what dispatcher and worker say to Prometheus, and whether they are ready ---------------------


#: Not in the name of a metric: units are those of Prometheus.
_WRONG_UNITS = re.compile(r"_(ms|milliseconds|minutes|kb|mb|percent)(_|$)")


@pytest.fixture
def service():
    """A dispatcher and a worker, with endpoints, after a job was read."""
    with DispatchServer(DispatcherConfig(metrics_port=0)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        config = WorkerConfig(address, heartbeat_interval_ms=20, metrics_port=0)
        with WorkerServer(config) as worker:
            share = distribute(ShardingPolicy.DYNAMIC, dispatcher.target, job_name="training")
            dataset = hr.Dataset.range(100_000).map(lambda x: [int(x)]).batch(10).apply(share)
            with iter(dataset) as batches:
                for _ in range(20):
                    next(batches)
                wait_for(lambda: dispatcher.stats().elements)
                yield dispatcher, worker


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def scraped(address):
    with urlopen(f"http://{address}/metrics", timeout=20) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def values(address):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in scraped(address)
        for sample in family.samples
    }


def test_every_metric_has_a_well_formed_name_and_help(service):
    for server in service:
        families = scraped(server.metrics_address)
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        assert len(names) > 10
        for family in families:
            assert re.fullmatch(r"headrace_[a-z][a-z_]*[a-z]", family.name), family.name
            assert family.documentation.endswith("."), family.name
            assert not _WRONG_UNITS.search(family.name), family.name
            assert family.type in ("counter", "gauge"), family.name
            for sample in family.samples:
                assert sample.name.endswith("_total") == (family.type == "counter"), sample.name


def test_a_dispatcher_exports_metrics_of_its_service(service):
    dispatcher, _ = service
    found = values(dispatcher.metrics_address)
    assert found["headrace_workers",] == 1
    assert found["headrace_clients",] == 1
    assert found["headrace_produced_elements_total",] > 0
    assert found["headrace_job_elements_total", "training"] > 0
    assert found["headrace_job_splits_unassigned", "training"] > 0
    assert 0 <= found["headrace_job_progress_ratio", "training"] < 1
    assert found["headrace_workers_lost_total",] == 0


def test_a_worker_exports_metrics_of_its_tasks(service):
    _, worker = service
    found = values(worker.metrics_address)
    assert found["headrace_worker_registered",] == 1
    assert found["headrace_worker_tasks_running",] == 1
    assert found["headrace_worker_elements_total",] > 0
    assert found["headrace_worker_bytes_total",] > found["headrace_worker_elements_total",]
    assert ("headrace_worker_wait_seconds_total", "clients") in found


def test_both_are_ready_while_they_serve(service):
    for server in service:
        for page in ("healthz", "readyz"):
            with urlopen(f"http://{server.metrics_address}/{page}", timeout=20) as answer:
                assert answer.status == 200


def test_a_worker_without_its_dispatcher_is_healthy_and_not_ready(service):
    dispatcher, worker = service
    # Without a journal, a restarted dispatcher does not know this worker.
    port = int(dispatcher.target.rpartition(":")[2])
    dispatcher.stop()
    assert urlopen(f"http://{worker.metrics_address}/healthz", timeout=20).status == 200
    with DispatchServer(DispatcherConfig(port=port, worker_addresses=["elsewhere"])):

        def refused():
            try:
                urlopen(f"http://{worker.metrics_address}/readyz", timeout=20).close()
            except HTTPError as error:
                return error.code == 503 and b"is not registered" in error.read()
            return False

        wait_for(refused)


def test_a_metrics_port_that_is_taken_starts_nothing():
    with DispatchServer(DispatcherConfig(metrics_port=0)) as first:
        port = int(first.metrics_address.rpartition(":")[2])
        with pytest.raises(OSError, match=f"cannot serve metrics at port {port}"):
            DispatchServer(DispatcherConfig(metrics_port=port))


def test_without_a_port_nothing_is_served():
    with DispatchServer() as dispatcher:
        assert dispatcher.metrics_address == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metrics_port": 65536}, "metrics_port"),
        ({"metrics_port": "9090"}, "metrics_port"),
        ({"metrics_host": ""}, "metrics_host"),
    ],
)
def test_wrong_values_are_refused_by_name(fields, words):
    with pytest.raises((TypeError, ValueError), match=words):
        DispatcherConfig(**fields)
    with pytest.raises((TypeError, ValueError), match=words):
        WorkerConfig("a:1", **fields)

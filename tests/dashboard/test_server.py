"""A dashboard of a real dispatcher, coordinator and parameter server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import msgspec
import numpy as np
import pytest

import headrace as hr
from headrace.cli.status_client import StatusSnapshot
from headrace.coordinator import ClusterCoordinator
from headrace.dashboard.sampler import StatusSampler
from headrace.dashboard.server import Dashboard
from headrace.dashboard.view import describe_snapshot, measure_snapshot
from headrace.service.messages import DispatcherStatus, JobStatus
from headrace.transport.security import Security, new_keys
from tests.dashboard.pages import SECONDS, events, get, wait_for_status

JOB = "</script><script>alert(1)</script>"
pytestmark = pytest.mark.heavy


@contextlib.contextmanager
def reading(target: str, job: str) -> Iterator[None]:
    """Read elements of a job slowly until the end of the block."""
    distribute = hr.service.distribute(
        hr.service.ShardingPolicy.DYNAMIC, service=target, job_name=job
    )
    dataset = hr.Dataset.range(1_000_000).map(abs).batch(10).apply(distribute)
    has_begun, is_over = threading.Event(), threading.Event()

    def read() -> None:
        with iter(dataset) as batches:
            next(batches)
            has_begun.set()
            while not is_over.wait(0.01):
                next(batches)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert has_begun.wait(SECONDS)
        yield
    finally:
        is_over.set()
        thread.join()


def address_of(target: str) -> str:
    return target.removeprefix("tcp://").removeprefix("ipc://")


def test_dispatcher_with_a_job_and_a_lost_worker():
    with (
        hr.service.LocalCluster(num_workers=2) as cluster,
        reading(cluster.target, JOB),
        Dashboard(address_of(cluster.target)) as dashboard,
    ):
        status = wait_for_status(
            dashboard.url,
            lambda status: (
                bool(status["view"]["jobs"])
                and bool(status["view"]["jobs"][0]["epochs"])
                and status["view"]["jobs"][0]["epochs"][0]["elements"] > 0
            ),
        )
        (job,) = status["view"]["jobs"]
        assert (job["name"], job["mode"]) == (JOB, "DYNAMIC")
        assert 0 <= job["epochs"][0]["progress"] < 1
        assert len(status["view"]["workers"]) == 2
        assert status["values"]["workers"] == 2
        plans = next(data for name, data in events(dashboard.url) if name == "plans")
        names = [name.split(" ")[0] for name, _ in plans[job["dataset"]]]
        assert names[-2:] == ["map", "batch"]

        cluster.kill_worker(0)
        status = wait_for_status(dashboard.url, lambda status: bool(status["view"]["lost"]))
        assert status["view"]["num_lost"] == 1
        assert status["view"]["lost"][0]["reason"]


def test_history_comes_before_the_first_status():
    with (
        hr.service.LocalCluster(num_workers=1, processes=False) as cluster,
        Dashboard(address_of(cluster.target)) as dashboard,
    ):
        wait_for_status(dashboard.url, lambda status: status["view"] is not None)
        stream = events(dashboard.url)
        name, points = next(stream)
        stream.close()
        assert name == "history"
        assert points[-1][1]["workers"] in (0, 1)


def test_unreachable_server_is_reported_with_the_last_data_until_it_is_back():
    cluster = hr.service.LocalCluster(num_workers=1, processes=False)
    port = int(address_of(cluster.target).rpartition(":")[2])
    try:
        dashboard = Dashboard(address_of(cluster.target))
        with dashboard:
            wait_for_status(dashboard.url, lambda status: status["view"] is not None)
            cluster.stop()
            status = wait_for_status(dashboard.url, lambda status: bool(status["problem"]))
            assert status["view"]["kind"] == "dispatcher"
            assert status["unreachable_since"] <= status["time"]
            assert status["values"] == {}
            with hr.service.DispatchServer(hr.service.DispatcherConfig(port=port)):
                wait_for_status(dashboard.url, lambda status: not status["problem"])
    finally:
        cluster.stop()


def test_server_that_never_replied_is_reported_without_data():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Dashboard(address) as dashboard:
            status = wait_for_status(dashboard.url, lambda status: True)
    assert status["view"] is None
    assert status["problem"]
    assert status["address"] == address


def test_coordinator_with_parameter_servers_and_a_lost_worker():
    with hr.distribute.LocalCluster(num_workers=2, num_ps=1, processes=False) as local:
        strategy = hr.distribute.ParameterServerStrategy(local.cluster_resolver, staleness=5)
        with strategy.scope():
            weights = hr.Variable(np.zeros(8, np.float32), name="weights")
        with ClusterCoordinator(strategy) as coordinator:
            address = coordinator.listen()
            for _ in range(3):
                coordinator.schedule(lambda: weights.assign_add(np.ones(8)))
            coordinator.join(SECONDS)
            server_address = strategy.cluster.servers.addresses[0]
            with Dashboard(address) as dashboard:
                view = wait_for_status(
                    dashboard.url, lambda status: status["view"]["finished"] == 3
                )["view"]
                assert (view["kind"], view["staleness"], view["gap"]) == ("coordinator", 5, 0)
                assert [each["state"] for each in view["workers"]] == ["connected", "connected"]
                assert [each["stored"] for each in view["servers"]] == [32]
                local.kill("worker", 1)
                wait_for_status(
                    dashboard.url,
                    lambda status: status["view"]["workers"][1]["state"] == "missing",
                )
            with Dashboard(server_address) as dashboard:
                view = wait_for_status(dashboard.url, lambda status: True)["view"]
                assert view["kind"] == "server"
                assert {"name": "Assign", "count": 3} in view["operations"]
        strategy.close()


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with (
        hr.service.LocalCluster(num_workers=1, processes=False) as cluster,
        Dashboard(address_of(cluster.target)) as dashboard,
    ):
        # The first status opens a connection, which would look like a leak of a test.
        wait_for_status(dashboard.url, lambda status: status["view"] is not None)
        yield dashboard


def test_pages_allow_no_inline_code_and_no_other_site(dashboard: Dashboard):
    for path in ("/", "/static/dashboard.js", "/static/dashboard.css", "/missing"):
        status, headers, _ = get(dashboard.url, path)
        assert status == (404 if path == "/missing" else 200)
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/index.html", "/static/"]
)
def test_only_the_files_of_the_page_are_served(dashboard: Dashboard, path: str):
    assert get(dashboard.url, path)[0] == 404


def test_requests_for_other_host_names_are_refused(dashboard: Dashboard):
    for path in ("/", "/events", "/report"):
        status, _, text = get(dashboard.url, path, {"Host": "attacker.example"})
        assert status == 421
        assert "localhost" in text
    port = dashboard.url.rpartition(":")[2].strip("/")
    assert get(dashboard.url, "/", {"Host": f"localhost:{port}"})[0] == 200


def test_report_can_be_saved_from_the_page(dashboard: Dashboard):
    wait_for_status(dashboard.url, lambda status: status["view"] is not None)
    status, headers, text = get(dashboard.url, "/report")
    assert status == 200
    assert headers["content-disposition"] == 'attachment; filename="headrace-report.html"'
    assert 'id="report"' in text


def test_port_in_use_is_an_error_that_names_it(dashboard: Dashboard):
    port = int(dashboard.url.rpartition(":")[2].strip("/"))
    second = Dashboard("127.0.0.1:1", port=port)
    with pytest.raises(OSError, match=f"port {port} of 127.0.0.1"):
        second.start()
    second.stop()


def check_token(dashboard: Dashboard) -> None:
    base, _, token = dashboard.url.partition("?token=")
    assert len(token) >= 24
    for path in ("/", "/events", "/report", "/static/dashboard.js", "/?token=wrong"):
        status, headers, text = get(base, path)
        assert status == 401
        assert "set-cookie" not in headers
        assert token not in text
    status, headers, _ = get(base, f"/?token={token}")
    assert (status, headers["location"]) == (303, "./")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert get(base, "/", {"Cookie": cookie.partition(";")[0]})[0] == 200
    assert get(base, "/", {"Cookie": cookie.partition("=")[0] + "=wrong"})[0] == 401


def test_other_machines_need_the_token():
    with Dashboard("127.0.0.1:1", host="0.0.0.0") as dashboard:
        url = f"http://127.0.0.1:{dashboard.url.rpartition(':')[2]}"
        assert "?token=" in url
        base, _, token = url.partition("/?token=")
        assert get(base, "/", {"Host": "trainer-7"})[0] == 401
        status, headers, _ = get(base, f"/?token={token}", {"Host": "trainer-7"})
        assert status == 303
        assert headers["location"] == "./"


def test_users_of_this_machine_without_keys_need_the_token(tmp_path: Path):
    keys = new_keys(tmp_path / "keys")
    security = Security.load(keys, "server")
    config = hr.service.DispatcherConfig(port=0, security=security)
    with (
        hr.service.DispatchServer(config) as dispatcher,
        Dashboard(address_of(dispatcher.target), keys=keys) as dashboard,
    ):
        check_token(dashboard)


def test_redirect_stays_on_this_site():
    with Dashboard("127.0.0.1:1", host="0.0.0.0") as dashboard:
        port, _, token = dashboard.url.rpartition(":")[2].partition("/?token=")
        base = f"http://127.0.0.1:{port}"
        status, headers, _ = get(base, f"//attacker.example?token={token}")
    assert status == 303
    assert urljoin(f"{base}//attacker.example", headers["location"]).startswith(base)


def test_server_that_is_started_again_leaves_no_thread_or_socket():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for _ in range(3):
        with Dashboard("127.0.0.1:1") as dashboard:
            next(events(dashboard.url))
        counts.append((threading.active_count(), open_files()))
    assert counts[1] == counts[2]


def test_status_that_cannot_be_shown_is_reported(monkeypatch: pytest.MonkeyPatch):
    job = JobStatus(job_id=1, name="", dataset_id="1", processing_mode=99, num_epochs=1,
                    running_tasks=0, clients=0)  # fmt: skip
    status = DispatcherStatus(workers=(), jobs=(job,), datasets=0)
    sampler = StatusSampler("127.0.0.1:1")
    monkeypatch.setattr(sampler._client, "fetch", lambda: StatusSnapshot(status, 0.0))
    sample = msgspec.json.decode(sampler.sample_once().status)
    sampler.stop()
    assert "cannot be shown" in sample["problem"]
    assert "99" in sample["problem"]
    assert sample["unreachable_since"] is not None


def test_status_of_an_earlier_release_is_shown():
    fields = {"workers": [{"worker_id": "w", "address": "h:1", "seconds_since_heartbeat": 0.1,
                           "tasks": 0}],
              "jobs": [], "datasets": 0}  # fmt: skip
    status = msgspec.convert(fields, DispatcherStatus)
    view = describe_snapshot(StatusSnapshot(status, 0.0), None)
    assert view["wanted_workers"] == 0
    assert measure_snapshot(view)["workers"] == 1


def test_open_streams_do_not_delay_the_end():
    dashboard = Dashboard("127.0.0.1:1")
    dashboard.start()
    stream = events(dashboard.url)
    next(stream)
    dashboard.stop()
    dashboard.stop()
    stream.close()
    with pytest.raises(OSError, match="refused"):
        get(dashboard.url)

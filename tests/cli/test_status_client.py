"""`headrace status` and `headrace top` with a running coordinator and parameter servers."""

from __future__ import annotations

import json
import re
import threading
import urllib.request

import numpy as np
import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli.main import app
from headrace.coordinator import ClosureWorker, ClusterCoordinator

_SECONDS = 30.0
_shared: dict[str, threading.Event] = {}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def wait_for_release():
    _shared["running"].set()
    assert _shared["release"].wait(_SECONDS)


@pytest.fixture(scope="module")
def cluster():
    """Coordinator with one busy and one killed worker, its address, and its strategy."""
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2, processes=False) as local:
        strategy = hr.distribute.ParameterServerStrategy(local.cluster_resolver, staleness=5)
        with strategy.scope():
            weights = hr.Variable(np.zeros(8, np.float32), name="weights")
        with ClusterCoordinator(strategy) as coordinator:
            at = coordinator.listen(metrics_port=0)
            for _ in range(3):
                coordinator.schedule(lambda: weights.assign_add(np.ones(8)))
            coordinator.join(_SECONDS)
            local.kill("worker", 1)
            local.kill("ps", 1)
            _shared.update(running=threading.Event(), release=threading.Event())
            value = coordinator.schedule(wait_for_release)
            assert _shared["running"].wait(_SECONDS)
            yield coordinator, at, strategy
            _shared["release"].set()
            value.fetch(_SECONDS)
        strategy.close()


@pytest.mark.catalogue("3.4.1", "3.4.2")
def test_json_status_contains_all_fields(cluster):
    _, at, strategy = cluster
    result = invoke("status", at, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["num_in_flight"], found["num_finished"], found["staleness"]) == (1, 3, 5)
    assert found["longest_running"]["name"].startswith("wait_for_release:")
    assert [each["is_connected"] for each in found["workers"]] == [True, False]
    first, second = found["servers"]
    assert first["address"] == strategy.cluster.servers.addresses[0]
    # The variable only: the optimizer's counters take no bytes.
    assert (first["status"]["shards"], first["status"]["bytes_stored"]) == (1, 32)
    assert (second["status"], bool(second["problem"])) == (None, True)
    assert "type" not in result.stdout


@pytest.mark.catalogue("3.4.3", "3.4.4")
def test_top_shows_functions_workers_and_servers(cluster):
    _, at, _ = cluster
    shown = invoke("top", at).stdout
    assert "1 worker  1 missing  2 parameter servers" in shown
    assert "functions  0 queued, 1 in flight, 3 done" in shown
    assert re.search(r"longest  wait_for_release:\d+ on worker 0 for", shown)
    assert "(limit 5)" in shown
    assert "no reply from parameter server" in shown
    assert invoke("status", at).stdout.splitlines()[0].startswith("1 worker  1 missing")


def test_status_of_a_single_parameter_server(cluster):
    _, _, strategy = cluster
    server = strategy.cluster.servers.addresses[0]
    assert invoke("top", server).stdout.startswith("parameter server 0  up ")
    found = json.loads(invoke("status", server, "--json").stdout)
    assert found["operations"]["Assign"] == 3


def test_server_without_a_status_is_an_error_that_names_it():
    with ClosureWorker(0) as worker:
        result = invoke("status", worker.address)
    assert result.exit_code == 1
    assert f"the server at {worker.address} is not a dispatcher, coordinator" in result.stderr


@pytest.mark.catalogue("2.8.28", "3.6.1")
def test_coordinator_serves_metrics_of_itself_and_its_workers(cluster):
    coordinator, _, _ = cluster
    with urllib.request.urlopen(f"http://{coordinator.metrics_address}/metrics") as page:
        text = page.read().decode()
    assert "headrace_coordinator_functions_total 3.0" in text
    assert "headrace_coordinator_functions_in_flight 1.0" in text
    assert "headrace_coordinator_workers_missing 1.0" in text
    assert "# HELP headrace_coordinator_staleness Distance between the newest function" in text

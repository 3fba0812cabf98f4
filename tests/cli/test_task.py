"""`headrace server`: tasks of the cluster in TF_CONFIG, as real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from headrace.cli import task
from headrace.cli.main import app
from headrace.coordinator import ClusterCoordinator, get_current_worker_index
from headrace.coordinator.cluster import Workers
from headrace.transport import address as addresses
from tests.cli.test_serve import run  # noqa: F401 - a fixture

CLUSTER = {"worker": ["127.0.0.1:0"], "ps": ["127.0.0.1:0", "10.9.9.9:2222"], "chief": ["a:1"]}


def config(cluster=CLUSTER, **task):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ([], {"TF_CONFIG": ""}, "TF_CONFIG defines no tasks; set it, as in TF_CONFIG="),
        ([], {"TF_CONFIG": "{"}, "TF_CONFIG is no JSON"),
        ([], config(), "Must specify an explicit --type"),
        (["--type", "ps"], config(), "Must specify an explicit --index"),
        (["--type", "ps"], config(type="worker", index=1), "Must specify an explicit --index"),
        (["--type", "ps", "--index", "2"], config(), "the cluster has no 'ps' task 2"),
        (["--type", "ps", "--index", "-1"], config(), "--index"),
        (["--type", "chief"], config(), "--type"),
        ([], config(type="chief", index=0), "Unexpected task_type to start a server: chief"),
        (["--type", "ps", "--index", "1"], config(), "--host '10.9.9.9' requires --keys"),
        (["--type", "worker", "--keys", "/no/such"], config(), "/no/such"),
        (["--type", "worker", "--preload", "no_such_module"], config(), "no_such_module"),
        (["--type", "ps", "--index", "0", "--coordinator", "a:1"], {}, "--type"),
        (["--coordinator", "nowhere"], {}, "'nowhere'"),
        (["--coordinator", "a:1", "--port", "70000"], {}, "--port"),
        (["--type", "ps", "--index", "0", "--port", "7"], config(), "--port requires --coord"),
        (["--type", "worker", "--metrics-port", "-1"], config(), "--metrics-port"),
    ],
)
def test_invalid_task_is_a_usage_error_that_names_the_option(arguments, env, message):
    result = CliRunner().invoke(app, ["server", *arguments], env=env)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.heavy
@pytest.mark.system
def test_servers_print_their_address_and_stop_on_signals(run):  # noqa: F811
    port = addresses.find_stable_port()
    env = config({"ps": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:0"]}, type="ps", index=0)
    # One task from TF_CONFIG and one from options; a crash, SIGTERM and Ctrl-C.
    ps = run("server", "--restart", env=env)
    worker = run("server", "--type", "worker", env=env)
    ps.find(f"ps 0 ready at tcp://127.0.0.1:{port}")
    worker.find(r"worker 0 ready at tcp://127\.0\.0\.1:\d+")
    taken = CliRunner().invoke(app, ["server"], env=env)
    assert taken.exit_code == 1
    assert taken.stderr == (
        f"headrace: port {port} on 127.0.0.1 is in use by another server; choose another port, or "
        "0 for a free one\n"
    )
    children = Path(f"/proc/{ps.process.pid}/task/{ps.process.pid}/children")
    [child] = map(int, children.read_text().split())
    os.kill(child, signal.SIGKILL)
    ps.find(f"ps 0 ready at tcp://127.0.0.1:{port}", count=2)
    ps.find(rf"process {child} ended by SIGKILL; restarting it in 0.5 s", stream="stderr")
    assert worker.end(signal.SIGTERM) == 0
    assert ps.end(signal.SIGINT) == 0
    assert worker.lines["stdout"][-1] == "worker 0 stopped"
    assert ps.lines["stdout"][-1] == "ps 0 stopped"
    assert worker.lines["stderr"] == []


def wait_until(is_met, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.catalogue("3.5.1", "3.5.2")
@pytest.mark.heavy
@pytest.mark.system
def test_worker_with_coordinator_option_registers_and_serves_metrics(run):  # noqa: F811
    with ClusterCoordinator(Workers([])) as coordinator:
        at = coordinator.listen()
        command = run("server", "--coordinator", at, "--index", "3", "--metrics-port", "0")
        [ready] = command.find(r"worker 3 ready at tcp://(127\.0\.0\.1:\d+)")
        value = coordinator.schedule(get_current_worker_index)
        assert value.fetch(60.0) == 0
        assert coordinator.workers == {0: ready[1]}
        [metrics] = command.find(r"metrics at (http://\S+)/metrics")
        with urlopen(f"{metrics[1]}/metrics") as page:
            text = page.read().decode()
        assert "headrace_closure_worker_connected 1.0" in text
        assert "headrace_closure_worker_functions_total 1.0" in text
        with urlopen(f"{metrics[1]}/readyz") as page:
            assert page.read() == b"ready\n"
        assert command.end(signal.SIGTERM) == 0
        wait_until(lambda: not coordinator.status().workers[0].is_connected)


def test_restarted_worker_keeps_its_address():
    address, port = task._listen_address(None, 0, restart=True)
    assert address == f"127.0.0.1:{port}"
    assert port
    assert task._listen_address("::1", 0, restart=False) == ("[::1]:0", 0)
    assert task._listen_address("10.0.0.1", 7000, restart=True) == ("10.0.0.1:7000", 7000)

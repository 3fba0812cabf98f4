"""The servers of the chart as real processes, and the metrics that dashboard and alerts name."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import headrace as hr
from headrace.coordinator import ClusterCoordinator
from headrace.distribute import ClusterSpec, ParameterServerStrategy, SimpleClusterResolver
from headrace.transport.security import Security, new_keys
from tests.cli.test_serve import run  # noqa: F401
from tests.deploy.charts import ROOT, render

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "headrace.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())[
        "groups"
    ]
    for rule in group["rules"]
]
EXPRESSIONS = [
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
    *(rule["expr"] for rule in ALERTS),
]
#: Metrics that are not exported yet.
MISSING = set()
#: Labels that Prometheus adds.
TARGET_LABELS = {"instance"}
_SECONDS = 60.0


# --- processes with the arguments of the chart ----------------------------------------------------


class Servers:
    """Starts the containers of the chart on loopback, with keys in a directory."""

    def __init__(self, run, tmp_path):  # noqa: F811
        self._run = run
        self._tmp_path = tmp_path
        self.keys = new_keys(tmp_path / "keys")
        self.metrics: list[str] = []

    def start(self, kind, component, values, **addresses):
        """Start a container; return the command and its address."""
        texts = render.render_chart(values).values()
        (owner,) = [
            each
            for text in texts
            for each in yaml.safe_load_all(text)
            if each["kind"] == kind
            and each["metadata"]["labels"]["app.kubernetes.io/component"] == component
        ]
        (container,) = owner["spec"]["template"]["spec"]["containers"]
        arguments = []
        for argument in container["args"]:
            for found, here in {
                "/etc/headrace/keys": str(self.keys),
                "/var/lib/headrace": str(self._tmp_path / "journal"),
                "0.0.0.0": "127.0.0.1",
                "-port=9090": "-port=0",
                "--port=5050": "--port=0",
                "--port=5051": "--port=0",
                "--worker-address=$(POD_IP):5051": "--worker-address=127.0.0.1:%port%",
                "$(POD_INDEX)": "0",
                **addresses,
            }.items():
                argument = argument.replace(found, here)
            arguments.append(argument)
        # The port is free, the host this one; the name in the chart is that of a pod.
        config = json.dumps({"cluster": {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]}})
        command = self._run(*arguments, env={"TF_CONFIG": config})
        [metrics] = command.find(r"metrics at (http://127\.0\.0\.1:\d+/metrics)")
        [ready] = command.find(r" ready at (?:tcp://)?(127\.0\.0\.1:\d+)")
        self.metrics.append(metrics[1])
        return command, ready[1]


@pytest.fixture
def servers(run, tmp_path):  # noqa: F811
    return Servers(run, tmp_path)


def slow(number: int) -> int:
    """Take some milliseconds, so that the worker's profiler sees it."""
    return sum(range(number, number + 100_000))


@contextmanager
def reading(address: str, keys) -> Iterator[Iterator[int]]:
    """Read a dataset without a foreseeable end, as a named job."""
    distribute = hr.service.distribute(
        hr.service.ShardingPolicy.DYNAMIC,
        service=address,
        job_name="training",
        modules=[__name__],
        security=Security.load(keys, "client"),
    )
    with iter(hr.Dataset.range(1 << 40).map(slow).apply(distribute)) as elements:
        yield elements


@pytest.mark.heavy
@pytest.mark.system
def test_worker_of_the_chart_drains_and_stops_by_itself(servers):
    values = {"worker": {"drainTimeoutSeconds": 1}}
    _, dispatcher = servers.start("StatefulSet", "dispatcher", values)
    worker, _ = servers.start(
        "Deployment", "worker", values, **{"headrace-dispatcher:5050": dispatcher}
    )
    with reading(dispatcher, servers.keys) as elements:
        next(elements)
        # As Kubernetes does. This reader takes no more elements, so that the time is used up.
        assert worker.end(signal.SIGTERM) == 0
    assert worker.lines["stdout"][-1] == "worker stopped"


# --- metrics --------------------------------------------------------------------------------------


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of an expression, each with the labels of its selector."""
    found: list[tuple[str, set[str]]] = []

    def visit(node: object) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.append((node.name, {each.name for each in node.matchers.matchers}))
        return True

    promql.walk(parsed(expression), visit)
    yield from found


def parsed(expression: str) -> promql.Expr:
    """Parse an expression; `$__rate_interval` is a duration that Grafana inserts."""
    return promql.parse(expression.replace("$__rate_interval", "5m"))


def exported(urls: list[str]) -> dict[str, set[str]]:
    """Return the labels of each exported metric."""
    labels: dict[str, set[str]] = {}
    for url in urls:
        with urlopen(url, timeout=_SECONDS) as page:
            text = page.read().decode()
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found = labels.setdefault(name, set())
            for sample in family.samples:
                found.update(sample.labels)
    return labels


@pytest.mark.heavy
@pytest.mark.system
def test_metrics_of_dashboard_and_alerts_are_exported(servers):
    values = {
        "worker": {"drainTimeoutSeconds": 1},
        "parameterServer": {"enabled": True},
        "coordinatorWorker": {"enabled": True},
    }
    _, dispatcher = servers.start("StatefulSet", "dispatcher", values)
    servers.start("Deployment", "worker", values, **{"headrace-dispatcher:5050": dispatcher})
    tasks = {
        "ps": [servers.start("StatefulSet", "ps", values)[1]],
        "worker": [servers.start("StatefulSet", "coordinator-worker", values)[1]],
    }
    client = Security.load(servers.keys, "client")
    strategy = ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(tasks)), security=client)
    with ClusterCoordinator(strategy) as coordinator:
        keys = Security.load(servers.keys, "server")
        coordinator.listen(security=keys, metrics_port=0)
        with strategy.scope():
            hr.Variable([1.0], name="weights").assign_add([1.0])
        assert coordinator.schedule(int, args=("7",)).fetch(_SECONDS) == 7
        urls = [*servers.metrics, f"http://{coordinator.metrics_address}/metrics"]
        with reading(dispatcher, servers.keys) as elements:
            deadline = time.monotonic() + _SECONDS
            while missing_labels(found := exported(urls)) and time.monotonic() < deadline:
                for _ in range(100):  # figures arrive with heartbeats
                    next(elements)
    strategy.close()
    used = {name for each in EXPRESSIONS for name, _ in selectors(each)}
    assert len(used) > 35
    assert used - found.keys() == MISSING, "remove metrics that are exported from MISSING"
    assert not missing_labels(found)


def missing_labels(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the labels in each expression that its metrics do not have."""
    missing = {}
    for expression in EXPRESSIONS:
        wanted = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))
        available = set(TARGET_LABELS)
        for name, labels in selectors(expression):
            wanted |= labels
            available |= found.get(name, set())
        if not wanted <= available:
            missing[expression] = wanted - available
    return missing


# --- the files ------------------------------------------------------------------------------------


def test_panels_have_unique_ids_and_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) > 30
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_refer_to_existing_variables():
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    built_in = {"__rate_interval", "__all"}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?(\w+)", text)) - built_in == variables - {"filter"}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for target in panel["targets"]:
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert labels <= set(re.findall(r"\w+", " ".join(kept))), panel["title"]


def test_alerts_have_unique_names_and_a_summary():
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names) > 3
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")


@pytest.mark.parametrize("wrong", ["sum(rate(headrace_workers[5m])", "sum by headrace_workers"])
def test_wrong_expression_is_found(wrong):
    with pytest.raises(ValueError, match=r".+"):
        parsed(wrong)

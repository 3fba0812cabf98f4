"""Tests of the resolver for named Ray actors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import ClassVar

import pytest

import headrace.cluster.ray
from headrace.distribute import RayClusterResolver
from headrace.errors import InvalidArgumentError, UnavailableError
from tests.cluster.alone import on_loopback_alone

JOBS = {"worker": 2, "ps": 1}


class Place:
    """Address registry in memory, as the process of one actor uses it."""

    known: ClassVar[dict] = {}
    actor = ""
    host = "10.0.0.1"

    def __init__(self, name):
        self.name = name

    def own_name(self):
        return self.actor

    def own_host(self):
        return self.host

    def put(self, task, address):
        self.known[task] = address

    def all(self):
        return dict(self.known)


@pytest.fixture
def be(monkeypatch):
    """Make this process the actor of the given name and host; "" is the driver."""
    monkeypatch.setattr(headrace.cluster.ray, "AddressRegistry", Place)
    monkeypatch.setattr(Place, "known", {})

    def become(actor, host="10.0.0.1"):
        monkeypatch.setattr(Place, "actor", actor)
        monkeypatch.setattr(Place, "host", host)

    return become


def resolver_of(be, actor, host="10.0.0.1", **arguments):
    be(actor, host)
    return RayClusterResolver(JOBS, **{"timeout": 0.05, **arguments})


@pytest.mark.parametrize(
    ("actor", "task"),
    [
        ("worker-1", ("worker", 1)),
        ("my-training.worker_0", ("worker", 0)),
        ("ps0", ("ps", 0)),
        ("worker-2", (None, None)),  # there are two
        ("coworker-1", (None, None)),
        ("trainer", (None, None)),
        ("", (None, None)),
    ],
)
def test_task_follows_from_the_name_of_the_actor(be, actor, task):
    resolver = resolver_of(be, actor)
    assert (resolver.task_type, resolver.task_id) == task


def test_each_task_registers_its_address_and_finds_the_others(be):
    driver = resolver_of(be, "")
    tasks = [resolver_of(be, name, port=2222) for name in ("worker-0", "worker-1")]
    for task in tasks:
        with pytest.raises(UnavailableError, match="ps 0: has not registered its address"):
            task.cluster_spec()
    be("ps-0", "10.0.0.2")
    expected = {"worker": ["10.0.0.1:2222"] * 2, "ps": ["10.0.0.2:4444"]}
    assert RayClusterResolver(JOBS, port=4444).cluster_spec().as_dict() == expected
    assert [each.cluster_spec().as_dict() for each in (driver, *tasks)] == [expected] * 3
    assert driver.master() == ""
    assert driver.master("ps", 0) == "10.0.0.2:4444"


def test_restarted_actor_keeps_its_address_on_the_same_host(be):
    be("ps-0")
    jobs = {"ps": 1}
    before = RayClusterResolver(jobs).cluster_spec()
    assert RayClusterResolver(jobs).cluster_spec() == before
    be("ps-0", "10.0.0.9")
    assert RayClusterResolver(jobs).cluster_spec().job_tasks("ps")[0].startswith("10.0.0.9:")


def test_resolver_sent_to_an_actor_has_its_task(be):
    text = pickle.dumps(resolver_of(be, ""))
    be("worker-1")
    found = pickle.loads(text)
    assert (found.task_type, found.task_id) == ("worker", 1)
    be("ps-0")
    text = pickle.dumps(RayClusterResolver(JOBS, task_type="worker", task_id=0))
    assert (pickle.loads(text).task_type, pickle.loads(text).task_id) == ("worker", 0)


def test_missing_task_is_named(be):
    resolver = resolver_of(be, "", task_type="worker", task_id=2)
    with pytest.raises(InvalidArgumentError, match=r"no 'worker' task 2: jobs are \{'worker': 2"):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"jobs": {}}, TypeError, "`jobs` must be a dict"),
        ({"jobs": ["worker"]}, TypeError, "`jobs` must be a dict"),
        ({"jobs": {"worker": -1}}, ValueError, r"`jobs\['worker'\]` must be at least 0"),
        ({"name": ""}, ValueError, "`name` must not be empty"),
        ({"port": -1}, ValueError, "`port` must be at least 0"),
        ({"timeout": "x"}, TypeError, "`timeout` must be a number of seconds"),
    ],
)
def test_invalid_arguments_are_named(be, arguments, kind, words):
    with pytest.raises(kind, match=words):
        RayClusterResolver(**{"jobs": JOBS, **arguments})


_SCRIPT = """
import json, sys
import headrace as hr
words = {}
try:
    hr.distribute.RayClusterResolver({"worker": 2})
except hr.errors.FailedPreconditionError as error:
    words["before"] = str(error)

import ray
ray.init(
    address="local", _node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=2,
    object_store_memory=80 << 20, log_to_driver=False,
)

@ray.remote(num_cpus=0, max_restarts=1)
class Trainer:
    def __init__(self):
        self.resolver = hr.distribute.RayClusterResolver({"worker": 2}, timeout=60)

    def look(self):
        found = self.resolver
        return found.task_type, found.task_id, found.master(), found.cluster_spec().as_dict()

    def crash(self):
        import os
        os._exit(1)

driver = hr.distribute.RayClusterResolver({"worker": 2}, timeout=60)
actors = [Trainer.options(name=f"worker-{i}").remote() for i in range(2)]
words["found"] = ray.get([actor.look.remote() for actor in actors])
words["driver"] = [driver.task_type, driver.cluster_spec().as_dict()]
try:
    ray.get(actors[0].crash.remote())
except ray.exceptions.RayActorError:
    pass
for _ in range(100):
    try:
        words["again"] = ray.get(actors[0].look.remote())
        break
    except ray.exceptions.RayActorError:
        pass
ray.shutdown()
with open(sys.argv[1], "w") as file:
    json.dump(words, file)
"""


@pytest.mark.slow
@pytest.mark.heavy
def test_real_actors_find_each_other_also_after_a_restart(tmp_path: Path):
    (tmp_path / "train.py").write_text(_SCRIPT)
    words = on_loopback_alone([str(tmp_path / "train.py"), str(tmp_path / "found.json")])
    assert (tmp_path / "found.json").exists(), words
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["before"] == "Ray is not initialized: call ray.init() first"
    spec = found["driver"][1]
    assert found["driver"] == [None, spec]
    assert len(set(spec["worker"])) == 2
    assert found["found"] == [["worker", i, spec["worker"][i], spec] for i in range(2)]
    assert found["again"] == found["found"][0]

"""Cases of `hr.ray.DataCluster` without faults."""

from __future__ import annotations

import importlib
import pickle
import time

import pytest

import headrace as hr
from headrace.ray import data_cluster
from headrace.ray.actor_launcher import list_actors
from headrace.ray.service_addresses import CONTROLLER_PREFIX
from tests.ray.local_ray import run_driver, wait_until

COUNT = 2_000


def slow_square(x):
    """Return the square, after a pause that makes reading last some seconds."""
    time.sleep(0.002)
    return x * x


SQUARES = [x * x for x in range(COUNT)]


@pytest.fixture(scope="module")
def cluster(ray):
    with hr.ray.DataCluster(min_workers=2) as cluster:
        yield cluster


def test_each_element_is_delivered_once(cluster):
    assert cluster.num_workers == 2
    squares = hr.Dataset.range(COUNT).map(lambda x: x * x)
    unordered = cluster.distribute(squares, visitation="exactly_once")
    assert sorted(map(int, unordered)) == SQUARES
    assert list(map(int, cluster.distribute(squares, ordered=True))) == SQUARES
    mode = hr.service.ShardingPolicy.OFF
    assert sorted(map(int, cluster.distribute(squares, mode))) == sorted(SQUARES * 2)


def test_task_reads_a_dataset_and_a_cluster_that_were_sent_to_it(ray, cluster):
    dataset = cluster.distribute(hr.Dataset.range(100))
    assert cluster.security.secret_key.encode() not in pickle.dumps((dataset, cluster))

    @ray.remote(num_cpus=0)
    def read(dataset, cluster):
        other = cluster.distribute(hr.Dataset.range(10), ordered=True)
        return sorted(map(int, dataset)), list(map(int, other))

    # As part of the function's arguments, Ray pickles both.
    assert ray.get(read.remote(dataset, cluster)) == (list(range(100)), list(range(10)))
    assert cluster.num_workers == 2


def test_client_without_keys_is_rejected(cluster):
    with pytest.raises(hr.errors.HeadraceError, match="key"):
        hr.service.register_dataset(cluster.target, hr.Dataset.range(3))


def test_service_and_security_cannot_be_set(cluster):
    with pytest.raises(TypeError, match="`service` is set by"):
        cluster.distribute(hr.Dataset.range(3), service="127.0.0.1:1")


def test_workers_join_and_drain_while_an_epoch_is_read(cluster):
    numbers = []
    for step, x in enumerate(
        cluster.distribute(hr.Dataset.range(COUNT).map(slow_square), ordered=True)
    ):
        numbers.append(int(x))
        if step == 100:
            cluster.scale(4)
            wait_until(lambda: cluster.num_workers == 4, "four workers")
        if step == 500:
            cluster.scale(1)
        if step == COUNT - 500:
            wait_until(lambda: cluster.num_workers == 1, "one worker")
    assert numbers == SQUARES
    cluster.scale(2)
    wait_until(lambda: cluster.num_workers == 2, "two workers")


def test_module_of_the_driver_is_sent_by_value(cluster, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def triple(x):\n    return 3 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    only_here = importlib.import_module("only_here")

    dataset = cluster.distribute(
        hr.Dataset.range(5).map(only_here.triple), ordered=True, modules=[only_here]
    )
    assert list(map(int, dataset)) == [0, 3, 6, 9, 12]


def test_workers_have_the_runtime_env_of_the_driver_and_their_own(ray, tmp_path):
    (tmp_path / "provided").mkdir()
    (tmp_path / "provided" / "__init__.py").write_text("def triple(x):\n    return 3 * x\n")
    printed = run_driver(
        "import ray, sys, headrace as hr\n"
        f"folder = {str(tmp_path)!r}\n"
        "ray.init(runtime_env={'py_modules': [f'{folder}/provided']})\n"
        "def triple(x):\n"
        "    import os, provided\n"
        "    return provided.triple(x) + int(os.environ['OFFSET'])\n"
        "with hr.ray.DataCluster(runtime_env={'env_vars': {'OFFSET': '7'}}) as cluster:\n"
        "    dataset = cluster.distribute(hr.Dataset.range(3).map(triple), ordered=True)\n"
        "    print(list(map(int, dataset)))\n"
    )
    assert "[7, 10, 13]" in printed


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ({"tpu": 1}, "no node of the cluster has 1 tpu"),
        # Two workers of the other cluster use two of eight.
        ({"CPU": 5}, "each needs 5 CPU, and 1 CPU are unused"),
    ],
)
def test_missing_resources_are_named(cluster, resources, text):
    with hr.ray.DataCluster(min_workers=0, resources_per_worker=resources) as other:
        other.scale(2)
        wait_until(lambda: text in other._call("shortage"), text)


def test_start_without_workers_fails_and_leaves_no_actors(ray, monkeypatch):
    before = list_actors(CONTROLLER_PREFIX)
    monkeypatch.setattr(data_cluster, "_START_SECONDS", 0.5)
    with pytest.raises(
        hr.errors.UnavailableError, match=r"no 1 workers after 0\.5 s: 0 are registered"
    ):
        hr.ray.DataCluster(resources_per_worker={"tpu": 1})
    wait_until(lambda: list_actors(CONTROLLER_PREFIX) == before, "the actors end")


def test_number_of_workers_follows_the_load(ray):
    with hr.ray.DataCluster(min_workers=1, max_workers=3) as cluster:
        with pytest.raises(
            hr.errors.FailedPreconditionError, match="follows the load, from 1 to 3"
        ):
            cluster.scale(2)
        # The consumer takes elements as fast as they come, so it waits for a single worker.
        iterator = iter(cluster.distribute(hr.Dataset.range(10**6).map(slow_square)))
        deadline = time.monotonic() + 60
        while cluster.num_workers < 2:
            assert len([next(iterator) for _ in range(200)]) == 200
            assert time.monotonic() < deadline
        iterator.close()


def test_named_service_outlives_its_driver(ray):
    run_driver(
        "import headrace as hr\n"
        "with hr.ray.DataCluster(name='input') as cluster: print(cluster.name)\n"
    )
    with pytest.raises(hr.errors.AlreadyExistsError, match=r"hr\.ray\.connect\('input'\)"):
        hr.ray.DataCluster(name="input")
    with hr.ray.connect("input") as cluster:
        assert cluster.name == "input"
        assert sorted(map(int, cluster.distribute(hr.Dataset.range(50)))) == list(range(50))
        # A detached service starts workers also after the program that created it.
        cluster.scale(2)
        wait_until(lambda: cluster.num_workers == 2, "two workers")
    printed = run_driver(
        "import headrace as hr\n"
        "cluster = hr.ray.connect('input')\n"
        "print(sum(map(int, cluster.distribute(hr.Dataset.range(5)))), 'summed')\n"
    )
    assert "10 summed" in printed
    hr.ray.connect("input").shutdown()
    with pytest.raises(hr.errors.NotFoundError, match=r"no data service named 'input' .* Start it"):
        hr.ray.connect("input")
    workers = [each["name"] for each in ray.util.list_named_actors(True)]
    assert not [name for name in workers if name.startswith("headrace-data/input")]


def test_closed_cluster_says_so(ray):
    cluster = hr.ray.DataCluster(min_workers=0)
    cluster.close()
    cluster.close()
    with pytest.raises(hr.errors.FailedPreconditionError, match="the cluster was closed"):
        _ = cluster.target


def test_cluster_does_not_start_ray_again_after_its_shutdown(ray):
    printed = run_driver(
        "import ray, headrace as hr\n"
        "cluster = hr.ray.DataCluster(min_workers=0)\n"
        "ray.shutdown()\n"
        "try:\n"
        "    cluster.scale(2)\n"
        "except hr.errors.UnavailableError as error:\n"
        "    print(error)\n"
        "cluster.close()\n"
        "print(ray.is_initialized())\n"
    )
    assert "Ray was shut down in this process" in printed
    assert printed.strip().endswith("False")


def test_work_dir_in_use_is_reported(ray, tmp_path):
    with (
        hr.ray.DataCluster(min_workers=0, work_dir=tmp_path),
        pytest.raises(hr.errors.FailedPreconditionError, match="another"),
    ):
        hr.ray.DataCluster(min_workers=0, work_dir=tmp_path)

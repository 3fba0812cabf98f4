"""Cases of `hr.ray.DataCluster` whose processes are killed."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

import headrace as hr
from headrace.ray.actor_launcher import list_actors
from headrace.ray.service_addresses import CONTROLLER_PREFIX
from headrace.transport import address as addresses
from tests.ray.local_ray import run_driver, wait_until

COUNT = 3_000


def slow_square(x):
    """Return the square, after a pause that makes reading last some seconds."""
    time.sleep(0.002)
    return x * x


SQUARES = [x * x for x in range(COUNT)]


def processes(cluster):
    """Return the process IDs of the controller and of the workers."""
    return cluster._call("process_ids")


def workers(ray, cluster):
    """Return the handles of the workers."""
    names = [each["name"] for each in ray.util.list_named_actors(True)]
    prefix = f"{cluster._actor}/"
    return [ray.get_actor(each, "headrace") for each in names if each.startswith(prefix)]


def read(dataset, faults):
    """Read a dataset of squares; call `faults[n]` after n elements."""
    numbers = []
    for count, x in enumerate(dataset):
        numbers.append(int(x))
        if count in faults:
            faults[count]()
    return numbers


def test_killed_workers_lose_and_repeat_nothing(ray):
    with hr.ray.DataCluster(min_workers=3) as cluster:

        def kill_process():
            os.kill(processes(cluster)[1][0], signal.SIGKILL)

        def kill_actor():
            ray.kill(workers(ray, cluster)[0])

        squares = hr.Dataset.range(COUNT).map(slow_square)
        dataset = cluster.distribute(squares, ordered=True)
        assert read(dataset, {300: kill_process, 1500: kill_actor}) == SQUARES
        wait_until(lambda: len(workers(ray, cluster)) == 3, "a replacement of the killed actor")
        dataset = cluster.distribute(squares, visitation="exactly_once")
        assert sorted(read(dataset, {100: kill_actor, 800: kill_process})) == SQUARES


def test_dispatcher_with_a_work_dir_continues_exactly(ray, tmp_path):
    with hr.ray.DataCluster(min_workers=2, work_dir=tmp_path) as cluster:
        target = cluster.target

        def kill_process():
            os.kill(processes(cluster)[0], signal.SIGKILL)

        def kill_actor():
            ray.kill(cluster._controller, no_restart=False)

        dataset = cluster.distribute(hr.Dataset.range(COUNT).map(slow_square), ordered=True)
        assert read(dataset, {300: kill_process, 1500: kill_actor}) == SQUARES
        assert cluster.target == target
        assert cluster.num_workers == 2


def test_dispatcher_without_a_work_dir_fails_running_iterations(ray):
    with hr.ray.DataCluster(min_workers=1) as cluster:
        cluster.scale(2)
        wait_until(lambda: cluster.num_workers == 2, "two workers")
        dataset = cluster.distribute(hr.Dataset.range(COUNT).map(slow_square), ordered=True)
        kill = {300: lambda: os.kill(processes(cluster)[0], signal.SIGKILL)}
        with pytest.raises(hr.errors.HeadraceError, match="give the dispatcher a `work_dir`"):
            read(dataset, kill)
        again = cluster.distribute(hr.Dataset.range(COUNT).map(lambda x: x * x), ordered=True)
        assert read(again, {}) == SQUARES
        wait_until(lambda: cluster.num_workers == 2, "both workers")


def test_clients_and_workers_follow_a_dispatcher_to_another_address(ray, tmp_path):
    with hr.ray.DataCluster(min_workers=2, work_dir=tmp_path) as cluster:
        host, port = addresses.split(cluster.target.removeprefix("tcp://"))
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def take_port():
            os.kill(processes(cluster)[0], signal.SIGKILL)
            deadline = time.monotonic() + 1.0
            while True:
                try:
                    taken.bind((host, port))
                    taken.listen()
                    break
                except OSError:
                    assert time.monotonic() < deadline

        dataset = cluster.distribute(hr.Dataset.range(COUNT).map(slow_square), ordered=True)
        with taken:
            assert read(dataset, {300: take_port}) == SQUARES
        assert cluster.target != f"tcp://{host}:{port}"
        wait_until(lambda: cluster.num_workers == 2, "both workers")


def test_number_of_workers_survives_lost_workers_and_a_lost_controller(ray):
    with hr.ray.DataCluster(min_workers=1) as cluster:
        cluster.scale(3)
        wait_until(lambda: cluster.num_workers == 3, "three workers")
        for each in workers(ray, cluster)[:2]:
            ray.kill(each)
        os.kill(processes(cluster)[0], signal.SIGKILL)
        wait_until(lambda: len(workers(ray, cluster)) == 3, "replacements")
        wait_until(lambda: cluster.num_workers == 3, "their registration")


@pytest.mark.parametrize("drains", [False, True])
def test_killed_driver_leaves_no_actors(ray, drains):
    before = list_actors(CONTROLLER_PREFIX)
    # The consumer pauses, so a worker that drains does not end by itself.
    scale_in = (
        "dataset = cluster.distribute(hr.Dataset.range(10**6), hr.service.ShardingPolicy.OFF)\n"
        "iterator = iter(dataset)\n"
        "first = [next(iterator) for _ in range(100)]\n"
        "cluster.scale(1)\n"
        "time.sleep(2)\n"
    )
    run_driver(
        "import time, headrace as hr\n"
        "cluster = hr.ray.DataCluster(min_workers=2)\n"
        + (scale_in if drains else "")
        + "print('ready', flush=True)\n"
        "time.sleep(600)\n",
        kills=True,
    )
    wait_until(lambda: list_actors(CONTROLLER_PREFIX) == before, "the actors end")

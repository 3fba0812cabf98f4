"""Programs that train on Ray actors, run by test_training_cluster.py.

    python training_programs.py PROGRAM FILE

PROGRAM is the name of a function. Its result is written to FILE as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time

# By default, other programs of this machine have precedence over Ray's actors.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name in Ray

import numpy as np
import ray
from ray.cluster_utils import Cluster

import headrace as hr
import headrace.ray
from headrace.errors import HeadraceError

SECONDS = 90.0
RAY_OPTIONS = {"include_dashboard": False, "object_store_memory": 80 << 20}
STEPS = 60


def wait_until(holds, what):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def addresses_of(cluster):
    return cluster.cluster_resolver.cluster_spec().as_dict()


def train_step(weights, optimizer, features, targets):
    """Take a step of least squares; sleep, so that kills come during steps."""
    error = features @ weights.read() - targets
    optimizer.apply_gradients([(features.T @ error / len(targets), weights)])
    time.sleep(0.01)


def train(strategy, name, events=()):
    """Return the weights after some steps, and the number of applied gradients.

    Args:
        strategy: Strategy in mode "sync".
        name: Name of the variable.
        events: For some step numbers, a function to call before the step is scheduled.
    """
    rng = np.random.default_rng(7)
    with strategy.scope():
        weights = hr.Variable(np.zeros((3, 2)), name=name)
        optimizer = hr.optimizers.Adam(0.1, name=f"{name}/Adam")
    coordinator = hr.coordinator.ClusterCoordinator(strategy)
    for number in range(STEPS):
        for step, event in events:
            if step == number:
                event(coordinator)
        features, targets = rng.normal(size=(8, 3)), rng.normal(size=(8, 2))
        coordinator.schedule(train_step, (weights, optimizer, features, targets))
    coordinator.join(timeout=SECONDS)
    return weights.numpy().tolist(), optimizer.iterations


def error_of(call):
    try:
        call()
    except HeadraceError as error:
        return [type(error).__name__, str(error)]
    return None


def one_node():
    """Kill tasks on one node, and compare with training without kills."""
    ray.init(address="local", num_cpus=4, log_to_driver=False, **RAY_OPTIONS)
    found = {}
    half = {"CPU": 0.5}
    with hr.ray.TrainingCluster(2, 2, half, half, name="train") as cluster:
        first = addresses_of(cluster)
        pids = {task: cluster.pid(*task) for task in (("worker", 0), ("ps", 1))}
        found["num_tasks"] = {kind: len(set(tasks)) for kind, tasks in first.items()}
        found["duplicate"] = error_of(lambda: hr.ray.TrainingCluster(1, 0, half, name="train"))
        found["too_large"] = error_of(lambda: hr.ray.TrainingCluster(9, 0, timeout=1.0))
        found["without_keys"] = error_of(
            lambda: hr.distribute.ParameterServerStrategy(
                cluster.cluster_resolver, server_timeout=5.0
            )
        )
        strategy = cluster.strategy(mode="sync", replication=2)
        found["expected"] = train(strategy, "undisturbed")
        strategy.close()

        def kill_worker(coordinator):
            coordinator.join(timeout=SECONDS)
            os.kill(pids["worker", 0], signal.SIGKILL)

        def kill_server(coordinator):
            coordinator.join(timeout=SECONDS)
            cluster.kill("ps", 1)

        strategy = cluster.strategy(mode="sync", replication=2)
        found["disturbed"] = train(
            strategy, "disturbed", [(STEPS // 3, kill_worker), (STEPS // 2, kill_server)]
        )
        for task, pid in pids.items():
            wait_until(
                lambda task=task, pid=pid: cluster.pid(*task) not in (pid, None),
                f"{task} was not restarted",
            )
        found["same_addresses"] = addresses_of(cluster) == first
        found["are_running"] = all(
            cluster.is_running(kind, index) for kind in ("worker", "ps") for index in (0, 1)
        )
    found["running_after_close"] = cluster.is_running("worker", 0)
    found["kill_after_close"] = error_of(lambda: cluster.kill("worker", 0))
    cluster.close()
    wait_until(
        lambda: ray.available_resources().get("CPU") == 4.0, "the resources were not released"
    )
    cluster = hr.ray.TrainingCluster(1, 0, half)
    ray.shutdown()
    found["kill_after_shutdown"] = error_of(lambda: cluster.kill("worker", 0))
    found["running_after_shutdown"] = cluster.is_running("worker", 0)
    cluster.close()
    found["is_ray_started"] = ray.is_initialized()
    return found


def lost_nodes():
    """Remove the nodes of a worker and of a parameter server, and add another one."""
    node = {"object_store_memory": 80 << 20}
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **node}
    )
    # The nodes have different addresses, all of this machine.
    lost = [
        nodes.add_node(num_cpus=0, resources={"slot": 1}, node_ip_address="127.0.0.2", **node),
        nodes.add_node(num_cpus=1, node_ip_address="127.0.0.3", **node),
    ]
    ray.init(address=nodes.address, log_to_driver=False)
    found = {}
    with hr.ray.TrainingCluster(1, 2, resources_per_worker={"slot": 1}) as cluster:
        first = addresses_of(cluster)
        strategy = cluster.strategy(mode="sync", replication=2, round_size=2)
        found["undisturbed"] = train(strategy, "undisturbed")
        coordinator = hr.coordinator.ClusterCoordinator(strategy)
        index = next(i for i, each in enumerate(first["ps"]) if each.startswith("127.0.0.3:"))

        def lose_nodes(coordinator):
            coordinator.join(timeout=SECONDS)
            for each in lost:
                nodes.remove_node(each, allow_graceful=False)
            for task in (("worker", 0), ("ps", index)):
                wait_until(lambda task=task: not cluster.is_running(*task), f"{task} is not lost")
            nodes.add_node(num_cpus=1, resources={"slot": 1}, node_ip_address="127.0.0.4", **node)

        found["disturbed"] = train(strategy, "disturbed", [(STEPS // 2, lose_nodes)])
        found["workers"] = list(coordinator.workers)
        wait_until(lambda: cluster.is_running("ps", index), "the server was not restarted")
        last = addresses_of(cluster)
        found["moved"] = [
            kind
            for kind, tasks in first.items()
            for before, now in zip(tasks, last[kind], strict=True)
            if before != now and now.startswith("127.0.0.4:")
        ]
        strategy.close()
        # A strategy with the new addresses copies the contents to the server that moved.
        strategy = cluster.strategy(replication=2)
        with strategy.scope():
            # In the same order as before.
            hr.Variable(np.zeros((3, 2)), name="undisturbed")
            weights = hr.Variable(np.zeros((3, 2)), name="disturbed")
        found["read_again"] = weights.numpy().tolist()
        weights.assign_add(np.ones((3, 2)))
        cluster.kill("ps", 1 - index)
        found["after_kill"] = (weights.numpy() - 1.0).tolist()
    ray.shutdown()
    nodes.shutdown()
    return found


def keras_fit():
    """Train a Keras model twice, the second time with killed tasks."""
    os.environ["KERAS_BACKEND"] = "torch"
    ray.init(
        address="local",
        num_cpus=4,
        log_to_driver=False,
        runtime_env={"env_vars": {"KERAS_BACKEND": "torch"}},
        **RAY_OPTIONS,
    )
    import keras  # noqa: PLC0415 - its back end is set above

    rng = np.random.default_rng(5)
    features = rng.normal(size=(96, 4)).astype(np.float32)
    data = hr.Dataset.from_tensor_slices((features, features.sum(axis=1, keepdims=True))).batch(8)

    def fit(cluster, callbacks):
        keras.utils.set_random_seed(0)
        strategy = cluster.strategy(mode="sync", replication=2)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
            )
            model.compile(keras.optimizers.Adam(0.01), "mse")
        history = model.fit(data, epochs=3, callbacks=callbacks, verbose=0)
        weights = [np.asarray(each).tolist() for each in model.get_weights()]
        strategy.close()
        return weights, history.history["loss"]

    with hr.ray.TrainingCluster(2, 2) as cluster:
        pids = [cluster.pid("worker", 0), cluster.pid("ps", 1)]

        def kill(epoch, logs):
            if epoch == 1:
                cluster.kill("worker", 0)
                cluster.kill("ps", 1)

        undisturbed = fit(cluster, [])
        disturbed = fit(cluster, [keras.callbacks.LambdaCallback(on_epoch_begin=kill)])
        wait_until(lambda: cluster.is_running("worker", 0), "worker 0 was not restarted")
        wait_until(lambda: cluster.is_running("ps", 1), "ps 1 was not restarted")
        found = {"killed": [cluster.pid("worker", 0), cluster.pid("ps", 1)], "pids": pids}
    ray.shutdown()
    return {**found, "undisturbed": undisturbed, "disturbed": disturbed}


PROGRAMS = {"keras_fit": keras_fit, "one_node": one_node, "lost_nodes": lost_nodes}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    result = PROGRAMS[sys.argv[1]]()
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)

"""Numbered checkpoints and increments during training, and recovery of lost servers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import DataLossError, NotFoundError
from headrace.parameter_server.operations import IncrementCounter
from headrace.parameter_server.optimizer_steps import ClosureServers
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from headrace.parameter_server.server_requests import ParameterServerClient
from headrace.parameter_server.specs import WriteKey
from headrace.parameter_server.write_context import ClosureRun, write_as
from tests.parameter_server.small_cluster import cluster, restartable, strategy_at, until

F32 = np.float32


def base_names(paths):
    return [path.rpartition("/")[2] for path in paths]


@contextmanager
def managed_variable(directory, count=1, value=0.0, **options):
    """Yield a variable `w` on `count` servers, its checkpoint manager, and a restart function."""
    partitioner = FixedShardsPartitioner(count)
    with restartable(count, partitioner, **options) as (strategy, restart):
        with strategy.scope():
            w = hr.Variable(np.full(4, value, F32), name="w")
        with hr.CheckpointManager(hr.Checkpoint(w=w), directory) as manager:
            yield SimpleNamespace(strategy=strategy, w=w, manager=manager, restart=restart)


def rows_of(table):
    return {
        int(i): row.tolist()
        for ids, rows in table.export()
        for i, row in zip(ids, rows, strict=True)
    }


def test_checkpoints_are_numbered_and_the_oldest_are_deleted(tmp_path):
    checkpoint = hr.Checkpoint(step=0, array=np.zeros(3))
    manager = hr.CheckpointManager(checkpoint, tmp_path / "run", max_to_keep=2)
    assert manager.restore_or_initialize() is None
    assert (manager.latest_checkpoint, manager.checkpoints) == (None, [])
    for step in range(1, 4):
        checkpoint.step = step
        path = manager.save()
        assert path == manager.latest_checkpoint == str(tmp_path / "run" / f"ckpt-{step}")
    assert base_names(manager.checkpoints) == ["ckpt-2", "ckpt-3"]
    assert len(list((tmp_path / "run").iterdir())) == 4
    assert base_names([manager.save(10)]) == ["ckpt-10"]
    assert base_names(manager.checkpoints) == ["ckpt-3", "ckpt-10"]
    other = hr.Checkpoint(step=0, array=np.zeros(3))
    again = hr.CheckpointManager(other, tmp_path / "run", max_to_keep=1)
    assert base_names([again.restore_or_initialize()]) == ["ckpt-10"]
    assert other.step == 3
    assert base_names([again.save()]) == ["ckpt-11"]
    assert base_names(again.checkpoints) == ["ckpt-11"]


def test_files_of_interrupted_saves_are_deleted_by_the_next_save(tmp_path):
    manager = hr.CheckpointManager(hr.Checkpoint(a=np.zeros(3)), tmp_path)
    manager.save()
    for file in ("ckpt-1.00000000.0-0.safetensors", "ckpt-9.00000000.0-0.safetensors.partial"):
        (tmp_path / file).write_bytes(b"partial")
    kept = {"mine.txt", "ckpt-best-5.00000000.0-0.safetensors"}  # of a manager "ckpt-best"
    for file in kept:
        (tmp_path / file).write_text("kept")
    assert base_names(manager.checkpoints) == ["ckpt-1"]
    manager.save()
    left = {file.name for file in tmp_path.iterdir()}
    assert kept <= left
    assert not [name for name in left - kept if "00000000" in name]


def test_increments_and_their_checkpoint_restore_the_current_state(tmp_path):
    rng = np.random.default_rng(5)
    with cluster(2, FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            w = hr.Variable(np.zeros((5000, 8), F32), name="w")
            table = hr.EmbeddingTable(4, name="t", capacity=300)
        adam = hr.optimizers.Adam(0.1, name="a")
        checkpoint = hr.Checkpoint(w=w, table=table, adam=adam, step=0)
        with hr.CheckpointManager(checkpoint, tmp_path, max_to_keep=1) as manager:
            for number in range(4):
                assert base_names([manager.save_increment()]) == [
                    f"ckpt-1+{number}" if number else "ckpt-1"
                ]
                ids = np.unique(rng.integers(0, 400, 50))
                table.lookup(ids)
                slices = hr.IndexedSlices(np.ones((len(ids), 4), F32), ids)
                rows = hr.IndexedSlices(np.ones((3, 8), F32), rng.integers(0, 5000, 3))
                adam.apply_gradients([(slices, table), (rows, w)])
                checkpoint.step = number + 1
            path = manager.save_increment()
            assert path == manager.latest_increment
            assert base_names(manager.checkpoints) == ["ckpt-1"]
            expected = w.read(), rows_of(table)
            full = sum(file.stat().st_size for file in tmp_path.glob("ckpt-1.*.safetensors"))
            increments = sum(file.stat().st_size for file in tmp_path.glob("ckpt-1+*.safetensors"))
            assert increments < full / 2
    with cluster(1) as strategy:
        with strategy.scope():
            w = hr.Variable(np.ones((5000, 8), F32), name="w")
            table = hr.EmbeddingTable(4, name="t", capacity=300)
        adam = hr.optimizers.Adam(0.1)
        checkpoint = hr.Checkpoint(w=w, table=table, adam=adam, step=0)
        with hr.CheckpointManager(checkpoint, tmp_path, max_to_keep=1) as manager:
            assert manager.restore_or_initialize() == path
            assert (checkpoint.step, adam.iterations) == (4, 4)
            assert np.array_equal(w.read(), expected[0])
            assert rows_of(table) == expected[1]
            assert base_names([manager.save()]) == ["ckpt-2"]
            assert {file.name.partition(".")[0] for file in tmp_path.iterdir()} == {"ckpt-2"}


def test_increments_are_saved_automatically(tmp_path):
    with cluster(1) as strategy:
        with strategy.scope():
            w = hr.Variable(np.zeros(4, F32), name="w")
        checkpoint = hr.Checkpoint(w=w)
        with hr.CheckpointManager(checkpoint, tmp_path, incremental_seconds=0.05) as manager:
            until(lambda: manager.latest_increment)


@pytest.mark.catalogue("2.8.22")
def test_a_lost_server_is_restored_and_training_continues(tmp_path, caplog):
    with managed_variable(tmp_path, 2) as run:
        w, manager = run.w, run.manager
        manager.checkpoint.sgd = sgd = hr.optimizers.SGD(1.0)
        ClosureServers(run.strategy.cluster.servers, 1)  # earlier coordinators are fenced

        def push(closure):
            with write_as(ClosureRun(1, closure, 0)):
                sgd.apply_gradients([(np.ones(4, F32), w)])

        push(0)
        push(1)
        manager.save()
        push(2)
        push(3)
        manager.save_increment()
        push(4)
        push(5)
        run.restart()
        with caplog.at_level(logging.WARNING):
            push(6)
            push(3)  # retried: the increment contains it, so it is not executed twice
        assert w.read().tolist() == [-5] * 2 + [-7] * 2
        assert sgd.iterations == 5
        assert manager.lost_updates == 2
        logged = " ".join(record.message for record in caplog.records)
        assert "ckpt-1+1; at least 2 later updates are lost" in logged
        assert base_names([manager.save_increment()]) == ["ckpt-1+2"]
        w.assign(np.zeros(4))
        hr.Checkpoint(w=w).restore(manager.latest_increment)
        assert w.read().tolist() == [-5] * 2 + [-7] * 2


def test_steps_counted_before_a_restore_are_neither_lost_nor_duplicated(tmp_path):
    def increment(closure, seen=0):
        key = WriteKey(coordinator_term=1, closure=closure, worker_session=0, number=0)
        return IncrementCounter("SGD/iterations", 1, key, seen)

    with managed_variable(tmp_path) as run, ExitStack() as stack:
        with run.strategy.scope():
            sgd = hr.optimizers.SGD(1.0)
        # Only the first of two other programs knows the server's last count.
        addresses = run.strategy.cluster.servers.addresses
        first, second = (
            stack.enter_context(closing(ParameterServerClient(addresses))) for _ in range(2)
        )
        for closure in range(3):
            first.execute(0, increment(closure))
        run.manager.save()
        run.strategy.cluster.servers.states.set_recovery(None)  # not yet
        run.restart()
        second.execute(0, increment(4))
        second.execute(0, increment(2))  # retried; the checkpoint contains it
        with ThreadPoolExecutor(1) as threads:
            waits = threads.submit(first.execute, 0, increment(5, seen=3))
            until(lambda: first.states.has_restarted(0))
            assert not waits.done()
            run.strategy.cluster.servers.states.set_recovery(run.manager._recover_server)
            assert sgd.iterations >= 4
            counted, _ = waits.result(20)
        assert (counted.before, counted.after) == (4, 5)
        assert sgd.iterations == 5


def test_a_failed_save_does_not_count_saved_updates_as_lost(tmp_path):
    with managed_variable(tmp_path) as run:
        for _ in range(3):
            run.w.assign_add(np.ones(4))
        run.manager.save()
        run.w.assign_add(np.ones(4))
        run.manager.checkpoint.broken = UnsavableState()
        with pytest.raises(RuntimeError, match="not now"):
            run.manager.save()
        run.manager.checkpoint.broken = 1
        run.restart()
        assert run.w.read().tolist() == [3] * 4
        assert run.manager.lost_updates == 1


def test_updates_lost_in_two_restarts_are_counted_once(tmp_path):
    with managed_variable(tmp_path) as run:
        for _ in range(4):
            run.w.assign_add(np.ones(4))
        run.manager.save()
        for further, lost in ((3, 3), (2, 5)):
            for _ in range(further):
                run.w.assign_add(np.ones(4))
            run.restart()
            assert run.w.read().tolist() == [4] * 4
            assert run.manager.lost_updates == lost


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path):
    # In a separate process, which limits the size of its files.
    program = """
import resource, signal, sys
import numpy as np, headrace as hr
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = sys.argv[1]
checkpoint = hr.Checkpoint(array=np.zeros(1000), step=0)
manager = hr.CheckpointManager(checkpoint, directory, max_to_keep=1)
manager.save()
for limit in (5000, 300, 10):  # exceeded by the array, or by the manifest if the array fits
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    checkpoint.array = np.zeros(1000 if limit == 5000 else 1)
    try:
        manager.save()
    except hr.errors.HeadraceError as error:
        print(limit, type(error).__name__, directory in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
checkpoint.array = np.zeros(1000)
checkpoint.restore(manager.latest_checkpoint).assert_consumed()
print(len(manager.checkpoints))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "5000 FailedPreconditionError True",
        "300 UnavailableError True",
        "10 FailedPreconditionError True",
        "1",
    ], done.stderr


class UnsavableState:
    def get_state(self):
        raise RuntimeError("not now")

    def set_state(self, state):
        pass


def test_a_counter_missing_in_the_checkpoint_restarts_from_zero(tmp_path):
    with managed_variable(tmp_path, server_timeout=20) as run:
        with run.strategy.scope():
            sgd = hr.optimizers.SGD(1.0)
        run.manager.save()
        sgd.apply_gradients([(np.ones(4, F32), run.w)])
        run.restart()
        assert sgd.iterations == 0
        assert sgd.apply_gradients([(np.ones(4, F32), run.w)]) == 1


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(tmp_path, caplog):
    def damage(name):
        (file,) = tmp_path.glob(f"{name}.*.0-*")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    with managed_variable(tmp_path, server_timeout=20) as run:
        w, manager = run.w, run.manager
        for _ in range(2):
            w.assign_add(np.ones(4))
            manager.save()
        w.assign_add(np.ones(4))
        manager.save_increment()
        damage("ckpt-2+1")
        damage("ckpt-2")
        run.restart()
        assert w.read().tolist() == [1] * 4
        assert f"{tmp_path}/ckpt-2, trying the previous one" in caplog.text
        assert manager.lost_updates == 2
        assert manager.save_increment().endswith("/ckpt-3"), (
            "increments do not continue a damaged checkpoint"
        )
    damage("ckpt-3")
    with managed_variable(tmp_path) as run:
        assert run.manager.restore_or_initialize().endswith("/ckpt-1")
        assert run.w.read().tolist() == [1] * 4
        damage("ckpt-1")
        with pytest.raises(DataLossError, match=r"ckpt-3.*checksum"):
            run.manager.restore_or_initialize()


def test_the_error_of_a_single_damaged_checkpoint_names_the_remedy(tmp_path, caplog):
    with hr.CheckpointManager(hr.Checkpoint(array=np.zeros(3)), tmp_path) as manager:
        path = manager.save()
        (file,) = tmp_path.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])

        with pytest.raises(DataLossError) as caught:
            manager.restore_or_initialize()
    assert f"{path}, and there is no earlier one in {tmp_path}: " in caplog.text
    assert "trying" not in caplog.text
    assert file.name in str(caught.value)
    assert f"no other checkpoint in {tmp_path} can be restored: copy the file" in str(caught.value)
    assert "remove the checkpoints to start from initial values" in str(caught.value)


def test_a_missing_manifest_is_logged_with_the_files(tmp_path, caplog):
    with hr.CheckpointManager(hr.Checkpoint(array=np.zeros(3)), tmp_path) as manager:
        assert manager.restore_or_initialize() is None
        assert not caplog.messages
        manager.save()
        (tmp_path / "ckpt-1.json").unlink()
        (file,) = tmp_path.iterdir()

        assert manager.restore_or_initialize() is None
    (message,) = caplog.messages
    assert f"{tmp_path} has files of checkpoints ({file.name})" in message
    assert "ckpt-1.json" in message


def test_a_restarted_server_is_detected_without_requests(tmp_path):
    with managed_variable(tmp_path, value=1) as run:
        run.manager.save()
        run.restart()
        until(lambda: run.strategy.cluster.servers.states.has_restarted(0))
        assert (run.w.read() == 1).all()


def test_contents_that_were_never_saved_are_reported_as_lost(tmp_path, caplog):
    with managed_variable(tmp_path, server_timeout=0.5) as run:
        run.restart()
        with pytest.raises(DataLossError, match="its contents were not restored"):
            run.w.read()
        assert "has no checkpoint yet" in caplog.text


def test_variables_recreated_by_another_program_are_not_overwritten(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("headrace.parameter_server.checkpoints._CHECK_SECONDS", 0.02)
    with managed_variable(tmp_path, value=1, server_timeout=5) as run:
        checks = []
        servers = run.strategy.cluster.servers
        check = servers.wait_until_reachable
        monkeypatch.setattr(servers, "wait_until_reachable", lambda: (checks.append(1), check()))
        again = run.restart()
        until(lambda: len(checks) > 20)
        assert caplog.text.count("retrying: ") == 1, "once a minute"
        with strategy_at([again]) as other, other.scope():
            hr.Variable(np.ones(4, F32), name="w")
        run.manager.save()
        run.w.assign_add(np.ones(4, F32))
        seen = len(checks)
        until(lambda: len(checks) > seen + 2)
        assert (run.w.read() == 2).all()


def test_checkpoints_iterator_yields_new_checkpoints(tmp_path, caplog):
    found = []
    checkpoint = hr.Checkpoint(step=1)
    manager = hr.CheckpointManager(checkpoint, tmp_path / "later", max_to_keep=1)

    def evaluate():
        for path in hr.checkpoints_iterator(tmp_path / "later", timeout=2):
            found.append(path)

    thread = threading.Thread(target=evaluate)
    thread.start()
    manager.save()
    until(lambda: base_names(found) == ["ckpt-1"])
    manager.save()
    until(lambda: base_names(found) == ["ckpt-1", "ckpt-2"])
    with pytest.raises(NotFoundError):
        hr.Checkpoint(step=0).restore(found[0])
    thread.join(10)
    assert not thread.is_alive()


def test_checkpoints_iterator_warns_after_10_seconds(tmp_path, caplog):
    now = iter([0.0, 3.0, 11.0, 12.0, 30.0])
    assert not list(hr.checkpoints_iterator(tmp_path, 20, clock=lambda: next(now)))
    assert caplog.text.count("no new checkpoint in") == 1


#: A coordinator with a worker that adds 1 to all elements in a loop.
_PROGRAM = """
import sys
import numpy as np
import headrace as hr
with hr.distribute.LocalCluster(num_workers=1, num_ps=2, processes=False) as cluster:
    strategy = hr.distribute.ParameterServerStrategy(
        cluster.cluster_resolver, hr.distribute.partitioners.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        steps = hr.Variable(np.zeros(6), name="steps")
    manager = hr.CheckpointManager(
        hr.Checkpoint(steps=steps, epoch=7), sys.argv[1], save_on_sigterm=True
    )
    coordinator = hr.coordinator.ClusterCoordinator(strategy)
    step = lambda: steps.assign_add(np.ones(6))
    for _ in range(3):
        coordinator.schedule(step)
    coordinator.join()
    print("ready", flush=True)
    while True:
        coordinator.schedule(step)
        coordinator.join()
"""


@pytest.mark.catalogue("4.3.19")
@pytest.mark.system
def test_sigterm_saves_once_while_functions_run(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
        assert f"received SIGTERM: saved {tmp_path}/ckpt-1" in process.stderr.read()
    checkpoint = hr.Checkpoint(steps=hr.Variable(np.zeros(6)), epoch=0)
    manager = hr.CheckpointManager(checkpoint, tmp_path)
    assert base_names([manager.restore_or_initialize()]) == ["ckpt-1"]
    assert checkpoint.epoch == 7
    found = checkpoint.steps.numpy()
    assert (found >= 3).all()
    # Each shard is consistent; different shards may be saved at different moments.
    assert len(set(found[:3])) == len(set(found[3:])) == 1


def test_repeated_failures_of_increments_are_logged_once_a_minute(
    tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "file").touch()

    def failures() -> list[int]:
        return [each.levelno for each in caplog.records if "retrying: " in each.message]

    with cluster(1) as strategy, caplog.at_level(logging.DEBUG, "headrace"):
        with strategy.scope():
            v = hr.Variable(np.zeros(2), name="v")
        # More than one check per interval, so that some checks make no attempt.
        with hr.CheckpointManager(
            hr.Checkpoint(v=v), tmp_path / "file" / "folder", incremental_seconds=1.2
        ):
            until(lambda: len(failures()) >= 2)
    assert failures().count(logging.WARNING) == 1

"""The dispatcher's server, over the network."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import FailedPreconditionError, NotFoundError, UnavailableError
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.server import DispatchServer
from headrace.service.stub import DispatcherStub
from tests.service.dispatcher.scenario import DYNAMIC, PLAN, opening, registration


def connect(server: DispatchServer) -> DispatcherStub:
    return DispatcherStub(server.target.removeprefix("tcp://"))


def worker(worker_id: str) -> messages.RegisterWorker:
    return messages.RegisterWorker(worker_id=worker_id, address=f"{worker_id}:1")


def put(stub: DispatcherStub, plan: bytes = PLAN) -> bytes:
    """Send a plan as a client does; return its digest."""
    digest, received = hashlib.sha256(plan).digest(), 0
    while received < len(plan):
        part = plan[received : received + messages.PLAN_CHUNK_BYTES]
        request = messages.PutPlan(
            digest=digest, offset=received, total_bytes=len(plan), chunk=part
        )
        received = stub.call(request).received_bytes
    return digest


def split_request(task: messages.TaskAddress, number: int, **fields: Any) -> messages.GetSplit:
    return messages.GetSplit(
        **{
            "worker_id": task.worker_id,
            "task_id": task.task_id,
            "task_token": task.task_token,
            "assignment_number": number,
            "max_splits": 1000,
            "num_done": 0,
            **fields,
        }
    )


def durable_config(path: Path, **fields: Any) -> DispatcherConfig:
    return DispatcherConfig(work_dir=path, fault_tolerant_mode=True, **fields)


@pytest.mark.catalogue("SL1", "SL6", "SL10", "SL12")
def test_start_and_stop_of_a_server_are_idempotent() -> None:
    server = DispatchServer(start=False)
    server.start()
    target = server.target
    server.start()
    assert server.target == target
    assert target.startswith("tcp://127.0.0.1:")
    server.join(timeout=0.01)
    server.stop()
    server.stop()
    server.join()
    with pytest.raises(RuntimeError, match="Server cannot be started after it has been stopped"):
        server.start()


@pytest.mark.catalogue("SL2")
def test_server_listens_at_the_configured_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with DispatchServer(DispatcherConfig(port)) as server:
        assert server.target == f"tcp://127.0.0.1:{port}"
        with pytest.raises(OSError, match=str(port)):
            DispatchServer(DispatcherConfig(port))


@pytest.mark.catalogue("SL14", "SL15")
def test_join_returns_when_another_thread_stops_the_server() -> None:
    server = DispatchServer()
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    server.join()
    assert server.is_stopped
    stopper.join()


def test_server_stops_when_it_is_garbage_collected() -> None:
    server = DispatchServer()
    dropped = weakref.ref(server)
    address = server.target.removeprefix("tcp://")
    del server
    gc.collect()
    assert dropped() is None
    with DispatcherStub(address) as stub, pytest.raises(UnavailableError):
        stub.call(messages.GetStatus(), timeout=20.0)


def test_server_that_never_started_can_be_stopped() -> None:
    server = DispatchServer(start=False)
    with pytest.raises(RuntimeError, match="before the server is started"):
        print(server.target)
    assert server.num_workers() == 0
    server.stop()


@pytest.mark.parametrize("fault_tolerant", [True, False])
def test_every_request_gets_its_reply_over_the_network(
    tmp_path: Path, fault_tolerant: bool
) -> None:
    config = DispatcherConfig(work_dir=tmp_path, fault_tolerant_mode=fault_tolerant)
    with DispatchServer(config) as server, connect(server) as stub:
        plan = random.Random(5).randbytes(9_000_000)
        digest = hashlib.sha256(plan).digest()
        assert stub.call(registration(digest=digest)).plan_needed
        assert put(stub, plan) == digest
        dataset_id = stub.call(registration(digest=digest)).dataset_id
        fetched = b""
        while len(fetched) < len(plan):
            fetched += stub.call(messages.GetPlan(digest=digest, offset=len(fetched))).chunk
        assert fetched == plan
        assert stub.call(messages.GetDataset(dataset_id=dataset_id)).num_splits == 100
        assert server.num_workers() == 0
        assert stub.call(worker("w")).heartbeat_interval == 0.5
        assert server.num_workers() == 1
        opened = stub.call(opening("c", dataset_id, processing_mode=DYNAMIC))
        (task,) = opened.tasks
        lookup = messages.GetTask(worker_id="w", task_id=task.task_id)
        definition = stub.call(lookup)
        assert (definition.dataset_id, definition.task_token) == (dataset_id, task.task_token)
        reply = stub.call(split_request(task, 0))
        assert (reply.start, reply.stop) == (0, 50)
        task_fields = {"worker_id": "w", "task_id": task.task_id, "task_token": task.task_token}
        stub.call(messages.ReturnSplits(splits=((40, 50),), **task_fields))
        reply = stub.call(split_request(task, 1))
        assert (reply.start, reply.stop) == (40, 50)
        report_delivery = messages.ReportDelivery(
            client_id="c", task_id=task.task_id, delivered=((0, 5),)
        )
        stub.call(report_delivery)
        beat = messages.WorkerHeartbeat(worker_id="w", tasks=(1, task.task_id))
        assert stub.call(beat).tasks_to_delete == (1,)
        report = messages.ReportUnreachable(
            client_id="c", task_id=task.task_id, connection_refused=False
        )
        stub.call(report)
        stub.call(messages.FinishTask(**task_fields))
        stub.call(messages.FailTask(reason="late", **task_fields))
        assert stub.call(messages.ClientHeartbeat(client_id="c")).finished
        stub.call(messages.CloseIteration(client_id="c"))
        status = stub.call(messages.GetStatus())
        assert (len(status.workers), len(status.jobs), status.datasets) == (1, 0, 1)
        stub.call(messages.DrainWorker(worker_id="w"))
        assert stub.call(messages.GetStatus()).workers[0].draining
        stub.call(messages.UnregisterWorker(worker_id="w"))
        assert server.num_workers() == 0


def test_error_of_one_request_fails_only_that_one() -> None:
    with DispatchServer() as server:
        stubs = [connect(server) for _ in range(8)]
        outcomes: list[str] = []

        def ask(number: int) -> None:
            try:
                if number % 2:
                    stubs[number].call(messages.GetDataset(dataset_id="nope"))
                else:
                    stubs[number].call(worker(f"w{number}"))
                outcomes.append("done")
            except NotFoundError:
                outcomes.append("not found")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stub in stubs:
            stub.close()
        assert sorted(outcomes) == ["done"] * 4 + ["not found"] * 4
        assert server.num_workers() == 4


@pytest.mark.catalogue("SL3", "SL4")
def test_restarted_dispatcher_continues_from_its_journal(tmp_path: Path) -> None:
    port = 0
    name = uuid.uuid4().hex
    assigned: list[range] = []
    for run in range(3):
        with DispatchServer(durable_config(tmp_path, port=port)) as server, connect(server) as stub:
            port = int(server.target.rpartition(":")[2])
            put(stub)
            dataset_id = stub.call(registration(token=name)).dataset_id
            assert dataset_id == "1000"
            if run == 0:
                stub.call(worker("w"))
            assert server.num_workers() == 1
            request = opening("c", dataset_id, processing_mode=DYNAMIC, job_name=name)
            (task,) = stub.call(request).tasks
            for number in range(2):
                request = split_request(task, 2 * run + number)
                reply = stub.call(request)
                assert stub.call(request) == reply
                assigned.append(range(reply.start, reply.stop))
    assert [index for part in assigned for index in part] == list(range(assigned[-1].stop))
    assert assigned[-1].stop > 90


def test_connection_survives_a_dispatcher_restart(tmp_path: Path) -> None:
    first = DispatchServer(durable_config(tmp_path))
    port = int(first.target.rpartition(":")[2])
    with connect(first) as stub:
        stub.call(worker("w"))
        first.stop()
        with pytest.raises(UnavailableError):
            stub.call(messages.GetStatus(), timeout=20.0)
        with DispatchServer(durable_config(tmp_path, port=port)):
            beat = messages.WorkerHeartbeat(worker_id="w", tasks=())
            until = time.monotonic() + 20
            while True:
                try:
                    assert stub.call(beat).tasks_to_delete == ()
                    break
                except UnavailableError:
                    assert time.monotonic() < until


def test_two_dispatchers_cannot_share_a_work_dir(tmp_path: Path) -> None:
    with (
        DispatchServer(durable_config(tmp_path)),
        pytest.raises(FailedPreconditionError, match="another dispatcher"),
    ):
        DispatchServer(durable_config(tmp_path))


def test_silent_worker_is_lost_without_other_requests() -> None:
    config = DispatcherConfig(worker_timeout_ms=100)
    with DispatchServer(config) as server:
        with connect(server) as stub:
            stub.call(worker("w"))
        until = time.monotonic() + 20
        while server.num_workers():
            assert time.monotonic() < until
            time.sleep(0.01)
        beat = messages.WorkerHeartbeat(worker_id="w", tasks=())
        with connect(server) as stub, pytest.raises(NotFoundError, match="register again"):
            stub.call(beat)


def test_events_that_cannot_be_journaled_are_not_applied(tmp_path: Path) -> None:
    with DispatchServer(durable_config(tmp_path)) as server, connect(server) as stub:
        stub.call(worker("v"))
        journal: Any = server._core._journal  # type: ignore[union-attr]
        journal._database.execute("PRAGMA query_only = ON")
        with pytest.raises(UnavailableError, match="cannot write journal"):
            stub.call(worker("w"))
        journal._database.execute("PRAGMA query_only = OFF")
        status = stub.call(messages.GetStatus())
        assert [each.worker_id for each in status.workers] == ["v"]
        stub.call(worker("w"))
        assert server.num_workers() == 2


def test_restart_forgets_an_incomplete_plan(tmp_path: Path) -> None:
    part = messages.PutPlan(
        digest=hashlib.sha256(b"plan").digest(), offset=0, total_bytes=4, chunk=b"pl"
    )
    with DispatchServer(durable_config(tmp_path)) as server, connect(server) as stub:
        assert stub.call(part).received_bytes == 2
    with DispatchServer(durable_config(tmp_path)) as server, connect(server) as stub:
        last = messages.PutPlan(digest=part.digest, offset=2, total_bytes=4, chunk=b"an")
        assert stub.call(last).received_bytes == 0
        assert put(stub, b"plan") == part.digest


DISPATCHER = """
import sys, time
from headrace.service import DispatcherConfig, DispatchServer
with DispatchServer(DispatcherConfig(worker_timeout_ms=3000)) as server:
    print(server.target.removeprefix("tcp://"), flush=True)
    sys.stdin.read()
"""


class HeartbeatThread(threading.Thread):
    """A worker that only sends heartbeats."""

    def __init__(self, address: str, worker_id: str) -> None:
        super().__init__(daemon=True)
        self.address, self.worker_id = address, worker_id
        self.lost: Exception | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        with DispatcherStub(self.address) as stub:
            beat = messages.WorkerHeartbeat(worker_id=self.worker_id, tasks=())
            while not self.stopped.wait(0.1):
                try:
                    stub.call(beat, timeout=30.0)
                except UnavailableError:
                    continue
                except Exception as error:
                    self.lost = error
                    return


@pytest.mark.system
@pytest.mark.heavy
def test_stopped_dispatcher_process_declares_no_worker_lost() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DISPATCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    workers: list[HeartbeatThread] = []
    try:
        address = process.stdout.readline().strip()
        with DispatcherStub(address) as stub:
            for number in range(5):
                stub.call(worker(f"w{number}"))
                workers.append(HeartbeatThread(address, f"w{number}"))
                workers[-1].start()
            for _ in range(2):
                time.sleep(0.3)
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(4.0)  # longer than the worker timeout
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(1.5)
            status = stub.call(messages.GetStatus(), timeout=30.0)
            assert [worker_thread.lost for worker_thread in workers] == [None] * 5
            assert len(status.workers) == 5
            workers[0].stopped.set()
            until = time.monotonic() + 20
            while len(stub.call(messages.GetStatus()).workers) != 4:
                assert time.monotonic() < until, "the silent worker was not declared lost"
                time.sleep(0.05)
    finally:
        for worker_thread in workers:
            worker_thread.stopped.set()
            worker_thread.join()
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()

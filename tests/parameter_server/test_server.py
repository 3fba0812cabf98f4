from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.errors import FailedPreconditionError, UnauthenticatedError
from headrace.parameter_server import operations as ops
from headrace.parameter_server import specs
from headrace.parameter_server.messages import BufferSpec, ExecuteOperations, StateLost
from headrace.parameter_server.operation_executor import OperationExecutor
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.server_requests import ParameterServerClient
from headrace.parameter_server.store import ShardStore
from headrace.serving.rpc import Done
from headrace.transport.channel import Request
from headrace.transport.security import Security, new_keys
from tests.parameter_server.small_cluster import until

SPEC = specs.ShardSpec(name="w", variable="w", shape=(3,), dtype="float32", variable_shape=(3,))


class FakeRequest(Request):
    """A request that records its reply."""

    peer = "client"
    role = None

    def __init__(self, message, buffers=()):
        self.message = message
        self.buffers = buffers
        self.answer = self.error = None
        self.answered = threading.Event()

    def reply(self, message, buffers=(), *, borrowed=False):
        self.answer = message
        self.is_borrowed = borrowed
        self.sent = list(buffers)
        self.answered.set()

    def fail(self, error):
        self.error = error
        self.answered.set()


class FakeStore(ShardStore):
    """A store that replies with given arrays, or raises a given error."""

    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def execute(self, operation, arrays):
        if isinstance(operation, ops.Evict):
            raise self.arrays[0]
        return Done(), self.arrays


@pytest.fixture
def start_executor():
    made = []

    def make(store):
        found = OperationExecutor(store, 0)
        found.start()
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()


def execute(executor, request):
    executor.handle([request])
    assert request.answered.wait(10)
    return request


def test_requests_for_an_earlier_state_are_not_executed(start_executor):
    executor = start_executor(FakeStore())
    request = execute(
        executor,
        FakeRequest(ExecuteOperations((ops.IncrementCounter("n"),), ((),), "an earlier state")),
    )
    assert request.answer == StateLost(executor.state_id)
    assert executor.status().requests == 0
    assert execute(
        executor,
        FakeRequest(ExecuteOperations((ops.IncrementCounter("n"),), ((),), executor.state_id)),
    ).answer.state_id


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"port": "x"}, TypeError), ({"port": -1}, ValueError), ({"host": 3}, TypeError)],
)
def test_invalid_server_arguments_are_rejected(wrong, kind):
    with pytest.raises(kind, match=f"`{next(iter(wrong))}`"):
        ParameterServer(0, start=False, **wrong)


def test_only_read_replies_borrow_memory(start_executor):
    kept = np.zeros(3)
    executor = start_executor(FakeStore(kept))
    read = execute(executor, FakeRequest(ExecuteOperations((ops.ReadShard("w"),), ((),))))
    assert read.is_borrowed
    assert np.shares_memory(np.frombuffer(read.sent[0]), kept)
    assert not execute(
        executor, FakeRequest(ExecuteOperations((ops.GatherRows("w"),), ((),)))
    ).is_borrowed
    both = execute(
        executor, FakeRequest(ExecuteOperations((ops.ReadShard("w"), ops.Assign("w")), ((), ())))
    )
    assert not both.is_borrowed
    assert not np.shares_memory(np.frombuffer(both.sent[0]), kept)


def test_mismatched_arrays_fail_the_request_but_not_the_thread(start_executor):
    executor = start_executor(FakeStore())
    buffer_specs = ((BufferSpec("float32", (2,)),),)
    assert isinstance(
        execute(
            executor, FakeRequest(ExecuteOperations((ops.ReadShard("w"),), buffer_specs))
        ).error,
        FailedPreconditionError,
    )
    assert isinstance(
        execute(executor, FakeRequest(ExecuteOperations((ops.ReadShard("w"),), ()))).error,
        FailedPreconditionError,
    )
    assert execute(executor, FakeRequest(ExecuteOperations((), ()))).answer is not None
    assert executor.status().failed == 2


class Recording(ShardStore):
    """A store that records the thread of each operation, and blocks in an Evict."""

    def __init__(self):
        super().__init__()
        self.done = []
        self.is_blocked, self.resume = threading.Event(), threading.Event()

    def execute(self, operation, arrays):
        if isinstance(operation, ops.Evict):
            self.is_blocked.set()
            assert self.resume.wait(10)
        self.done.append((type(operation).__name__, threading.current_thread().name))
        return Done(), []


def test_small_requests_run_inline_unless_others_are_queued(start_executor):
    store = Recording()
    executor = start_executor(store)
    own_thread, executor_thread = threading.current_thread().name, "headrace-parameter-server-0"
    small = [FakeRequest(ExecuteOperations((ops.IncrementCounter("n"),), ((),))) for _ in range(7)]
    queued = FakeRequest(ExecuteOperations((ops.Evict("t"),), ((),)))
    executor.handle([small[0]])
    assert store.done == [("IncrementCounter", own_thread)]
    executor.handle([queued])
    assert store.is_blocked.wait(10)
    executor.handle([small[1]])
    assert store.done == [("IncrementCounter", own_thread)], "it is queued"
    store.resume.set()
    assert small[1].answered.wait(10)
    executor.handle(small[2:5])
    assert small[4].answered.wait(10)
    assert store.done[1:] == [("Evict", executor_thread)] + 4 * [
        ("IncrementCounter", executor_thread)
    ]
    executor.handle(small[5:])
    assert store.done[6:] == 2 * [("IncrementCounter", own_thread)], "two together run inline"
    large = ExecuteOperations((ops.Assign("w"),), ((BufferSpec("uint8", (3 << 20,)),),))
    assert execute(executor, FakeRequest(large, [bytes(3 << 20)])).answer is not None
    assert store.done[-1] == ("Assign", executor_thread)


def test_requests_after_call_in_order_are_executed_after_it():
    store = Recording()
    store.resume.set()
    executor = OperationExecutor(store, 0)
    executor.call_in_order(lambda: store.done.append("function"))
    count = FakeRequest(ExecuteOperations((ops.IncrementCounter("n"),), ((),)))
    executor.handle([count])
    executor.start()
    assert count.answered.wait(10)
    executor.close()
    assert store.done == ["function", ("IncrementCounter", executor._thread.name)]


def test_status_never_waits_for_an_operation():
    store = Recording()
    store.shards["first"] = shard = SimpleNamespace(nbytes=0)
    executor = OperationExecutor(store, 0)
    executor.start()
    assert executor.status().shards == 1
    evict = FakeRequest(ExecuteOperations((ops.Evict("t"),), ((),)))
    executor.handle([evict])
    assert store.is_blocked.wait(10)
    store.shards["second"] = shard
    assert executor.status().shards == 1, "unchanged during the operation"
    store.resume.set()
    assert evict.answered.wait(10)
    until(lambda: executor.status().shards == 2)
    executor.close()


class OneAtATime(ShardStore):
    """A store that detects overlapping accesses."""

    def __init__(self):
        super().__init__()
        self.num_active = self.num_overlaps = self.count = 0

    def access(self):
        self.num_active += 1
        time.sleep(0)  # lets another thread run
        self.num_overlaps += self.num_active > 1
        before = self.count
        time.sleep(0)
        self.count = before + 1
        self.num_active -= 1

    def execute(self, operation, arrays):
        self.access()
        return ops.Counted(0, 0), []


def test_inline_queued_and_checkpoint_work_never_overlap(start_executor):
    store = OneAtATime()
    executor = start_executor(store)
    small = [
        FakeRequest(ExecuteOperations((ops.IncrementCounter("n"),), ((),))) for _ in range(400)
    ]
    queued = [FakeRequest(ExecuteOperations((ops.CreateTable(None),), ((),))) for _ in range(100)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(
                lambda: [executor.call_between_operations(store.access) for _ in range(100)]
            )
        for number, request in enumerate(small):  # as the transport's thread does
            executor.handle([request])
            if number % 4 == 0:
                executor.handle([queued[number // 4]])
    assert all(request.answered.wait(20) for request in (*small, *queued))
    assert (store.num_overlaps, store.count) == (0, 400 + 100 + 200)


def test_internal_errors_of_the_store_are_logged_and_returned(start_executor, caplog):
    executor = start_executor(FakeStore(ZeroDivisionError("why")))
    request = execute(executor, FakeRequest(ExecuteOperations((ops.Evict("t"),), ((),))))
    assert isinstance(request.error, ZeroDivisionError)
    assert "operation failed: ZeroDivisionError: why" in caplog.text


def test_status_and_metrics_count_requests_and_bytes():
    with ParameterServer(3, metrics_port=0) as server:
        servers = ParameterServerClient([server.address])
        servers.execute(0, ops.Create(SPEC), np.zeros(3, np.float32))
        servers.execute(0, ops.ReadShard("w"))
        # A status does not wait for the request that the server has just answered.
        until(lambda: servers.status(0).shards == 1)
        status = servers.status(0)
        assert status == server.status() or status.index == 3
        assert (status.requests, status.bytes_in, status.bytes_out) == (2, 12, 12)
        assert status.operations == {"Create": 1, "ReadShard": 1}
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as page:
            text = page.read().decode()
        assert 'headrace_parameter_server_operations_total{operation="ReadShard"} 1.0' in text
        assert "headrace_parameter_server_sent_bytes_total 12.0" in text
        assert (status.shards, status.tables, status.bytes_stored) == (1, 0, 12)
        assert "headrace_parameter_server_stored_bytes 12.0" in text
        with urllib.request.urlopen(f"http://{server.metrics_address}/readyz") as page:
            assert page.read() == b"ready\n"
        described, _ = servers.execute(0, ops.DescribeStore())
        assert [shard.spec for shard in described.shards] == [SPEC]
        servers.close()


def test_a_busy_server_stops_within_a_second():
    server = ParameterServer(0)
    servers = ParameterServerClient([server.address], timeout=0.1)
    stop = threading.Event()

    def send_requests():
        with contextlib.suppress(ConnectionError):
            while not stop.is_set():
                servers.execute(0, ops.IncrementCounter("n", 0))

    with contextlib.closing(servers), ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            threads.submit(send_requests)
        started_at = time.monotonic()
        server.stop()
        assert time.monotonic() - started_at < 1.0
        stop.set()
    with pytest.raises(RuntimeError):
        server.start()


def test_a_server_listens_after_start():
    server = ParameterServer(1, start=False)
    assert (server.address, server.index) == ("", 1)
    with pytest.raises(RuntimeError, match="start"):
        server.status()
    server.start()
    assert server.address
    server.stop()


def test_clients_without_a_key_are_rejected(tmp_path):
    keys = new_keys(tmp_path / "keys")
    with ParameterServer(0, security=Security.load(keys, "server")) as server:
        servers = ParameterServerClient([server.address], security=Security.load(keys, "client"))
        assert servers.execute(0, ops.IncrementCounter("n"))[0].after == 1
        servers.close()
        unauthorized = ParameterServerClient([server.address], timeout=5)
        with pytest.raises(UnauthenticatedError):
            unauthorized.execute(0, ops.IncrementCounter("n", 0))
        unauthorized.close()


def test_non_loopback_hosts_require_security():
    with pytest.raises(ValueError, match="security"):
        ParameterServer(0, "0.0.0.0")
    with pytest.raises(TypeError, match="security"):
        ParameterServer(0, security="keys")
    with pytest.raises(ValueError, match="index"):
        ParameterServer(-1)

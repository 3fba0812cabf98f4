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
from headrace.parameter_server.messages import ArrayForm, ExecuteOperations, StateLost
from headrace.parameter_server.operation_executor import OperationExecutor
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.server_requests import ParameterServerClient
from headrace.parameter_server.store import ShardStore
from headrace.serving.rpc import Done
from headrace.transport.channel import Request
from headrace.transport.security import Security, new_keys
from tests.parameter_server.small_cluster import until

SPEC = specs.ShardSpec(name="w", variable="w", shape=(3,), dtype="float32", variable_shape=(3,))


class Asked(Request):
    """A request, and what it was answered with."""

    peer = "somebody"
    role = None

    def __init__(self, message, buffers=()):
        self.message = message
        self.buffers = buffers
        self.answer = self.error = None
        self.answered = threading.Event()

    def reply(self, message, buffers=(), *, borrowed=False):
        self.answer = message
        self.lent = borrowed
        self.sent = list(buffers)
        self.answered.set()

    def fail(self, error):
        self.error = error
        self.answered.set()


class Core(ShardStore):
    """Answers with what it is given."""

    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def execute(self, operation, arrays):
        if isinstance(operation, ops.Evict):
            raise self.arrays[0]
        return Done(), self.arrays


@pytest.fixture
def applying():
    made = []

    def make(core):
        found = OperationExecutor(core, 0)
        found.start()
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()


def answered(applying, request):
    applying.handle([request])
    assert request.answered.wait(10)
    return request


def test_what_was_meant_for_an_earlier_life_is_not_carried_out(applying):
    desk = applying(Core())
    request = answered(
        desk, Asked(ExecuteOperations((ops.IncrementCounter("n"),), ((),), "an earlier life"))
    )
    assert request.answer == StateLost(desk.state_id)
    assert desk.status().requests == 0
    assert answered(
        desk, Asked(ExecuteOperations((ops.IncrementCounter("n"),), ((),), desk.state_id))
    ).answer.state_id


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"port": "x"}, TypeError), ({"port": -1}, ValueError), ({"host": 3}, TypeError)],
)
def test_wrong_arguments_are_named(wrong, kind):
    with pytest.raises(kind, match=f"`{next(iter(wrong))}`"):
        ParameterServer(0, start=False, **wrong)


def test_only_what_is_read_is_lent(applying):
    kept = np.zeros(3)
    desk = applying(Core(kept))
    read = answered(desk, Asked(ExecuteOperations((ops.ReadShard("w"),), ((),))))
    assert read.lent
    assert np.shares_memory(np.frombuffer(read.sent[0]), kept)
    assert not answered(desk, Asked(ExecuteOperations((ops.GatherRows("w"),), ((),)))).lent
    both = answered(desk, Asked(ExecuteOperations((ops.ReadShard("w"), ops.Assign("w")), ((), ()))))
    assert not both.lent
    assert not np.shares_memory(np.frombuffer(both.sent[0]), kept)


def test_arrays_that_are_not_as_announced_are_an_error_and_the_thread_goes_on(applying):
    desk = applying(Core())
    forms = ((ArrayForm("float32", (2,)),),)
    assert isinstance(
        answered(desk, Asked(ExecuteOperations((ops.ReadShard("w"),), forms))).error,
        FailedPreconditionError,
    )
    assert isinstance(
        answered(desk, Asked(ExecuteOperations((ops.ReadShard("w"),), ()))).error,
        FailedPreconditionError,
    )
    assert answered(desk, Asked(ExecuteOperations((), ()))).answer is not None
    assert desk.status().failed == 2


class Recording(ShardStore):
    """Notes on which thread each operation is carried out, and stands still at an Evict."""

    def __init__(self):
        super().__init__()
        self.done = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def execute(self, operation, arrays):
        if isinstance(operation, ops.Evict):
            self.begun.set()
            assert self.go_on.wait(10)
        self.done.append((type(operation).__name__, threading.current_thread().name))
        return Done(), []


def test_what_is_short_and_comes_alone_is_done_at_once_and_never_before_what_came_earlier(applying):
    core = Recording()
    desk = applying(core)
    here, there = threading.current_thread().name, "headrace-parameter-server-0"
    short = [Asked(ExecuteOperations((ops.IncrementCounter("n"),), ((),))) for _ in range(7)]
    long = Asked(ExecuteOperations((ops.Evict("t"),), ((),)))
    desk.handle([short[0]])
    assert core.done == [("IncrementCounter", here)]
    desk.handle([long])
    assert core.begun.wait(10)
    desk.handle([short[1]])
    assert core.done == [("IncrementCounter", here)], "it waits for its turn"
    core.go_on.set()
    assert short[1].answered.wait(10)
    desk.handle(short[2:5])
    assert short[4].answered.wait(10)
    assert core.done[1:] == [("Evict", there)] + 4 * [("IncrementCounter", there)]
    desk.handle(short[5:])
    assert core.done[6:] == 2 * [("IncrementCounter", here)], "two at once"
    large = ExecuteOperations((ops.Assign("w"),), ((ArrayForm("uint8", (3 << 20,)),),))
    assert answered(desk, Asked(large, [bytes(3 << 20)])).answer is not None
    assert core.done[-1] == ("Assign", there)


def test_what_comes_after_a_turn_is_not_carried_out_before_it():
    core = Recording()
    core.go_on.set()
    desk = OperationExecutor(core, 0)
    desk.call_in_order(lambda: core.done.append("turn"))
    count = Asked(ExecuteOperations((ops.IncrementCounter("n"),), ((),)))
    desk.handle([count])
    desk.start()
    assert count.answered.wait(10)
    desk.close()
    assert core.done == ["turn", ("IncrementCounter", desk._thread.name)]


def test_a_status_waits_for_no_operation_and_sees_what_is_kept_after_it():
    core = Recording()
    core.shards["first"] = shard = SimpleNamespace(nbytes=0)
    desk = OperationExecutor(core, 0)
    desk.start()
    assert desk.status().shards == 1
    evict = Asked(ExecuteOperations((ops.Evict("t"),), ((),)))
    desk.handle([evict])
    assert core.begun.wait(10)
    core.shards["second"] = shard
    assert desk.status().shards == 1, "as it was"
    core.go_on.set()
    assert evict.answered.wait(10)
    until(lambda: desk.status().shards == 2)
    desk.close()


class OneAtATime(ShardStore):
    """Finds out whether two ever look at what is kept at the same time."""

    def __init__(self):
        super().__init__()
        self.inside = self.together = self.count = 0

    def look(self):
        self.inside += 1
        time.sleep(0)  # another thread may go on
        self.together += self.inside > 1
        before = self.count
        time.sleep(0)
        self.count = before + 1
        self.inside -= 1

    def execute(self, operation, arrays):
        self.look()
        return ops.Counted(0, 0), []


def test_what_is_short_what_is_long_and_what_saves_never_overlap(applying):
    core = OneAtATime()
    desk = applying(core)
    short = [Asked(ExecuteOperations((ops.IncrementCounter("n"),), ((),))) for _ in range(400)]
    long = [Asked(ExecuteOperations((ops.CreateTable(None),), ((),))) for _ in range(100)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(lambda: [desk.call_between_operations(core.look) for _ in range(100)])
        for number, request in enumerate(short):  # this is the transport's thread
            desk.handle([request])
            if number % 4 == 0:
                desk.handle([long[number // 4]])
    assert all(request.answered.wait(20) for request in (*short, *long))
    assert (core.together, core.count) == (0, 400 + 100 + 200)


def test_an_error_of_the_stores_own_is_logged_and_answered(applying, caplog):
    desk = applying(Core(ZeroDivisionError("why")))
    request = answered(desk, Asked(ExecuteOperations((ops.Evict("t"),), ((),))))
    assert isinstance(request.error, ZeroDivisionError)
    assert "an operation failed: ZeroDivisionError: why" in caplog.text


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


def test_it_stops_within_a_second_whatever_it_is_asked():
    server = ParameterServer(0)
    servers = ParameterServerClient([server.address], timeout=0.1)
    stop = threading.Event()

    def ask():
        with contextlib.suppress(ConnectionError):
            while not stop.is_set():
                servers.execute(0, ops.IncrementCounter("n", 0))

    with contextlib.closing(servers), ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            threads.submit(ask)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 1.0
        stop.set()
    with pytest.raises(RuntimeError):
        server.start()


def test_life_begins_at_start():
    server = ParameterServer(1, start=False)
    assert (server.address, server.index) == ("", 1)
    with pytest.raises(RuntimeError, match="start"):
        server.status()
    server.start()
    assert server.address
    server.stop()


def test_who_has_no_key_is_kept_out(tmp_path):
    keys = new_keys(tmp_path / "keys")
    with ParameterServer(0, security=Security.load(keys, "server")) as server:
        servers = ParameterServerClient([server.address], security=Security.load(keys, "client"))
        assert servers.execute(0, ops.IncrementCounter("n"))[0].after == 1
        servers.close()
        stranger = ParameterServerClient([server.address], timeout=5)
        with pytest.raises(UnauthenticatedError):
            stranger.execute(0, ops.IncrementCounter("n", 0))
        stranger.close()


def test_off_this_machine_keys_are_needed():
    with pytest.raises(ValueError, match="security"):
        ParameterServer(0, "0.0.0.0")
    with pytest.raises(TypeError, match="security"):
        ParameterServer(0, security="keys")
    with pytest.raises(ValueError, match="index"):
        ParameterServer(-1)

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from headrace.errors import (
    AbortedError,
    CancelledError,
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from headrace.parameter_server import operations as ops
from headrace.parameter_server import specs
from headrace.parameter_server.checkpoint_requests import request_files
from headrace.parameter_server.messages import NotLeader, SaveShards, ServerRequest
from headrace.parameter_server.operation_executor import OperationExecutor
from headrace.parameter_server.optimizer_steps import ClosureServers
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.server_requests import (
    OperationRequest,
    ParameterServerClient,
    is_retryable,
)
from headrace.parameter_server.store import ShardStore
from headrace.parameter_server.write_context import ClosureRun, write_as
from headrace.transport import zeromq
from tests.parameter_server.small_cluster import in_threads, restarted, until
from tests.parameter_server.small_cluster import servers as started

KEY = specs.WriteKey(coordinator_term=1, closure=1, worker_session=0, number=0)
STEP = specs.StepParameters(iteration=0, learning_rate=0.1)


def spec(name="w", shape=(4,), dtype="float32"):
    return specs.ShardSpec(name=name, variable=name, shape=shape, dtype=dtype, variable_shape=shape)


@pytest.fixture
def two():
    with started(2) as both:
        servers = ParameterServerClient([each.address for each in both], timeout=20)
        yield both, servers
        servers.close()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (ops.ReadShard("w"), True),
        (ops.Create(spec()), True),
        (ops.Assign("w"), True),
        (ops.Assign("w", "add"), False),
        (ops.Assign("w", "add", KEY), True),
        (ops.Scatter("w", "update"), True),
        (ops.Scatter("w", "mul"), False),
        (ops.Scatter("w", "mul", KEY), True),
        (ops.Apply("w", "SGD", specs.SgdRule(), STEP), False),
        (ops.Apply("w", "SGD", specs.SgdRule(), STEP, KEY), True),
        (ops.IncrementCounter("n"), False),
        (ops.IncrementCounter("n", 0), True),
        (ops.IncrementCounter("n", 1, KEY), True),
        (ops.LookupIds("t"), True),
        (ops.ApplyIds("t", "SGD", specs.SgdRule(), STEP), False),
        (ops.DescribeStore(), True),
        (ops.ForgetWriteKeys(1), True),
    ],
)
def test_only_repeatable_operations_are_retryable(operation, expected):
    assert is_retryable(operation) is expected


def test_replies_are_in_request_order(two):
    _, servers = two
    value = np.arange(4, dtype=np.float32)
    servers.execute_all(
        [
            OperationRequest(1, ops.Create(spec("b")), [value * 2]),
            OperationRequest(0, ops.Create(spec("a")), [value]),
            OperationRequest(1, ops.Create(spec("c")), [value * 3]),
        ]
    )
    answers = servers.execute_all(
        [
            OperationRequest(1, ops.ReadShard("c")),
            OperationRequest(0, ops.ReadShard("a")),
            OperationRequest(1, ops.GatherRows("b"), [np.array([3])]),
        ]
    )
    found = [arrays[0].tolist() for _, arrays in answers]
    assert found == [[0, 3, 6, 9], [0, 1, 2, 3], [6]]
    assert servers.execute_all([]) == []


def test_each_server_executes_operations_in_request_order(two):
    _, servers = two
    value = np.ones(4, np.float32)
    requests = [OperationRequest(0, ops.Create(spec()), [value])]
    for _ in range(3):
        requests += [
            OperationRequest(0, ops.ReadShard("w")),
            OperationRequest(0, ops.Assign("w", "add"), [value]),
        ]
    answers = servers.execute_all(requests)
    assert [arrays[0][0] for _, arrays in answers if arrays] == [1, 2, 3]


def test_the_caller_owns_reply_arrays(two):
    _, servers = two
    large = np.zeros(100_000, np.float32)
    servers.execute(0, ops.Create(spec(shape=large.shape)), large)
    reads = [servers.execute(0, ops.ReadShard("w"))[1][0] for _ in range(4)]
    for number, found in enumerate(reads):
        found += number
    servers.execute(0, ops.Assign("w", "add"), large + 10)
    assert [float(found[-1]) for found in reads] == [0, 1, 2, 3]
    assert servers.execute(0, ops.ReadShard("w"))[1][0][0] == 10


def test_the_error_of_one_server_leaves_the_others_usable(two):
    _, servers = two
    with pytest.raises(NotFoundError, match="missing"):
        servers.execute_all(
            [
                OperationRequest(0, ops.ReadShard("missing")),
                OperationRequest(1, ops.IncrementCounter("n")),
            ]
        )
    assert servers.execute(1, ops.IncrementCounter("n"))[0].after == 2
    with pytest.raises(InvalidArgumentError):
        servers.execute(0, ops.Create(spec()))
    assert servers.execute(0, ops.IncrementCounter("n"))[0].after == 1


def test_many_threads_can_send_requests(two):
    _, servers = two

    def count(number):
        for _ in range(50):
            servers.execute_all(
                [
                    OperationRequest(0, ops.IncrementCounter("n")),
                    OperationRequest(1, ops.IncrementCounter("n")),
                ]
            )

    in_threads(6, count)
    assert servers.execute(0, ops.IncrementCounter("n", 0))[0].after == 300
    assert servers.execute(1, ops.IncrementCounter("n", 0))[0].after == 300


def test_requests_wait_for_a_server_that_has_not_started():
    address = unused_address()
    servers = ParameterServerClient([address], timeout=30)
    with ThreadPoolExecutor(1) as threads, contextlib.closing(servers):
        # Not repeatable, but retried because it was never sent.
        answer = threads.submit(servers.execute, 0, ops.IncrementCounter("n"))
        time.sleep(0.3)
        with ParameterServer(0, port=int(address.rpartition(":")[2])):
            assert answer.result(20)[0].after == 1


def unused_address() -> str:
    """Return an address without a server."""
    server = ParameterServer(0)
    server.stop()
    return server.address


@pytest.mark.catalogue("2.8.23", "4.3.17")
def test_the_timeout_error_names_the_unreachable_server():
    address = unused_address()
    servers = ParameterServerClient([address], timeout=0.3)
    with pytest.raises(UnavailableError, match=f"parameter server 0 at {address} did not reply"):
        servers.wait_until_reachable()
    servers.close()


def test_a_restart_is_reported_once_and_calls_the_callbacks(two, caplog):
    both, servers = two
    value = np.arange(4, dtype=np.float32)
    servers.execute(0, ops.Create(spec()), value)
    restarted_servers = []

    def restore(server):
        restarted_servers.append(server)
        servers.execute(server, ops.Create(spec()), value * 10)

    servers.states.on_restart(restore)
    again = both[0] = restarted(both[0])
    with caplog.at_level(logging.WARNING):
        assert servers.execute(0, ops.ReadShard("w"))[1][0].tolist() == [0, 10, 20, 30]
        servers.execute(0, ops.ReadShard("w"))
    assert restarted_servers == [0]
    lost = [record for record in caplog.records if "was restarted" in record.message]
    assert len(lost) == 1
    assert again.address in lost[0].message


def test_requests_for_lost_shards_wait_until_they_are_restored(two):
    both, servers = two
    value = np.arange(4, dtype=np.float32)
    servers.execute(0, ops.Create(spec()), value)
    both[0] = restarted(both[0])
    other = ParameterServerClient([both[0].address], timeout=20)
    with ThreadPoolExecutor(1) as threads, contextlib.closing(other):
        answer = threads.submit(servers.execute, 0, ops.ReadShard("w"))
        time.sleep(0.3)
        other.execute(0, ops.Create(spec()), value + 1)
        assert answer.result(20)[1][0].tolist() == [1, 2, 3, 4]


def test_unrestored_shards_fail_after_the_timeout_and_unknown_ones_at_once(two):
    both, servers = two
    servers.timeout = 0.4
    servers.execute(0, ops.Create(spec()), np.zeros(4, np.float32))
    both[0] = restarted(both[0])
    with pytest.raises(DataLossError, match="its contents were not restored"):
        servers.execute(0, ops.ReadShard("w"))
    with pytest.raises(NotFoundError):
        servers.execute(1, ops.ReadShard("w"))


class DisconnectingServer:
    """A server that executes some requests and disconnects before it replies."""

    def __init__(self):
        self.store = ShardStore()
        self.executor = OperationExecutor(self.store, 0)
        self.received = []
        self.num_unanswered = 0
        self.server = zeromq.serve(self.handle, request_type=ServerRequest)
        self.executor.start()

    def handle(self, requests):
        for request in requests:
            self.received.append(request.message)
            if self.num_unanswered:
                self.num_unanswered -= 1
                operations = request.message.operations
                for operation in operations:
                    self.store.execute(operation, [])
                for peer in self.server._peers:
                    peer.disconnect()
            else:
                self.executor.handle([request])

    def close(self):
        self.executor.close()
        self.server.close()


@pytest.fixture
def interrupted():
    found = DisconnectingServer()
    servers = ParameterServerClient([found.server.address], timeout=20)
    servers.wait_until_reachable()
    yield found, servers
    servers.close()
    found.close()


def test_an_unkeyed_write_with_unknown_outcome_is_not_retried(interrupted):
    server, servers = interrupted
    server.num_unanswered = 1
    with pytest.raises(UnavailableError, match="may have been executed or not"):
        servers.execute(0, ops.IncrementCounter("n"))
    assert servers.execute(0, ops.IncrementCounter("n", 0))[0].after == 1


def test_a_keyed_write_is_retried_and_applied_once(interrupted):
    server, servers = interrupted
    server.num_unanswered = 2
    answer, _ = servers.execute(0, ops.IncrementCounter("n", 1, KEY))
    assert answer.after == 1
    counts = [
        isinstance(message.operations[0], ops.IncrementCounter) for message in server.received
    ]
    assert sum(counts) == 3
    assert servers.execute(0, ops.IncrementCounter("n", 0))[0].after == 1


@pytest.fixture
def answering():
    """Return a function that starts a server with the given replies; None sends no reply."""
    with contextlib.ExitStack() as stack:

        def start(answer, timeout):
            def handle(requests):
                for request in requests:
                    if (reply := answer(request.message)) is not None:
                        request.reply(reply)

            server = stack.enter_context(
                contextlib.closing(zeromq.serve(handle, request_type=ServerRequest))
            )
            return stack.enter_context(
                contextlib.closing(ParameterServerClient([server.address], timeout=timeout))
            )

        yield start


def test_a_write_refused_by_all_servers_was_not_executed(answering):
    servers = answering(lambda message: NotLeader(is_empty=False), 0.2)
    with pytest.raises(UnavailableError, match=r"Last error: it does not lead the store") as raised:
        servers.execute(0, ops.IncrementCounter("n"))
    assert "may have been executed" not in str(raised.value)


def test_a_slow_save_is_logged(answering, monkeypatch, caplog):
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.02)
    monkeypatch.setattr("headrace.parameter_server.checkpoint_requests._POLL_SECONDS", 0.02)

    servers = answering(lambda message: None, 20)
    save = SaveShards("", "", (), ())
    with ThreadPoolExecutor(1) as threads:
        saved = threads.submit(request_files, servers, [0], lambda server, state_id: save)
        until(lambda: ": no reply for" in caplog.text)
        servers.close()
        assert isinstance(saved.exception(10), CancelledError)
    assert "pending request: save or restore shards" in caplog.text


def test_close_releases_waiting_callers(monkeypatch):
    servers = ParameterServerClient([unused_address()], timeout=60)
    pause, waits = servers.sleep, threading.Event()
    monkeypatch.setattr(servers, "sleep", lambda seconds: (waits.set(), pause(seconds)))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(servers.wait_until_reachable)
        assert waits.wait(10)
        servers.close()
        assert isinstance(waiting.exception(10), CancelledError)
    with pytest.raises(CancelledError, match="closed"):
        servers.wait_until_reachable()


def test_a_slow_request_is_logged_with_server_and_operation(interrupted, caplog, monkeypatch):
    server, servers = interrupted
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.05)
    monkeypatch.setattr("headrace.parameter_server.server_requests._POLL_SECONDS", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def block(operation, arrays):
        begun.set()
        go_on.wait(10)
        return ops.Counted(0, 1), []

    server.store.execute = block
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(servers.execute, 0, ops.IncrementCounter("n"))
        assert begun.wait(10)
        until(lambda: ": no reply for" in caplog.text)
        go_on.set()
        assert answer.result(10)[0].after == 1
    assert f"parameter server 0 at {servers.addresses[0]}: no reply for" in caplog.text
    assert "IncrementCounter" in caplog.text


@pytest.mark.parametrize(
    ("addresses", "timeout", "kind"),
    [
        ([], 1, ValueError),
        ("a:1", 1, TypeError),
        (["a:1"], 0, ValueError),
        (["a:1"], "x", TypeError),
    ],
)
def test_invalid_arguments_are_rejected(addresses, timeout, kind):
    with pytest.raises(kind):
        ParameterServerClient(addresses, timeout=timeout)


def test_a_restarted_server_is_fenced_again(two):
    both, servers = two
    closure_servers = ClosureServers(servers, 7)
    late = specs.WriteKey(coordinator_term=6, closure=1, worker_session=0, number=0)
    with pytest.raises(AbortedError):
        servers.execute(0, ops.IncrementCounter("n", 1, late))
    both[0] = restarted(both[0])
    servers.execute(0, ops.IncrementCounter("n", 0))
    with pytest.raises(AbortedError):
        servers.execute(0, ops.IncrementCounter("n", 1, late))
    closure_servers.fence(3)
    with pytest.raises(AbortedError):
        servers.execute(
            0,
            ops.IncrementCounter(
                "n", 1, msgspec.structs.replace(late, coordinator_term=7, worker_session=3)
            ),
        )
    servers.execute(
        0, ops.IncrementCounter("n", 1, msgspec.structs.replace(late, coordinator_term=7))
    )
    closure_servers.forget_write_keys([], 2)
    assert servers.execute(0, ops.DescribeStore())[0].keys == 0


def test_a_closure_waits_for_lost_shards_on_its_first_contact(two, monkeypatch):
    both, servers = two
    restorer = ParameterServerClient([each.address for each in both], timeout=20)

    def restore(seconds):
        restorer.execute(0, ops.Create(spec()), np.arange(4, dtype=np.float32))

    monkeypatch.setattr(servers, "sleep", restore)
    with write_as(ClosureRun(coordinator_term=1, closure=1, worker_session=0)):
        _, (value,) = servers.execute(0, ops.ReadShard("w"))
    assert value.tolist() == [0, 1, 2, 3]
    with pytest.raises(NotFoundError):
        servers.execute(0, ops.ReadShard("another"))
    restorer.close()

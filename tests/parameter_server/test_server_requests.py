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
    ("operation", "may"),
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
def test_what_may_be_asked_again(operation, may):
    assert is_retryable(operation) is may


def test_answers_come_in_the_order_of_the_asks_from_whichever_server(two):
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


def test_what_one_server_is_asked_is_done_in_its_order_and_reads_do_not_change_later(two):
    _, servers = two
    value = np.ones(4, np.float32)
    asks = [OperationRequest(0, ops.Create(spec()), [value])]
    for _ in range(3):
        asks += [
            OperationRequest(0, ops.ReadShard("w")),
            OperationRequest(0, ops.Assign("w", "add"), [value]),
        ]
    answers = servers.execute_all(asks)
    assert [arrays[0][0] for _, arrays in answers if arrays] == [1, 2, 3]


def test_what_was_read_belongs_to_the_reader(two):
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
    with pytest.raises(NotFoundError, match="nothing"):
        servers.execute_all(
            [
                OperationRequest(0, ops.ReadShard("nothing")),
                OperationRequest(1, ops.IncrementCounter("n")),
            ]
        )
    assert servers.execute(1, ops.IncrementCounter("n"))[0].after == 2
    with pytest.raises(InvalidArgumentError):
        servers.execute(0, ops.Create(spec()))
    assert servers.execute(0, ops.IncrementCounter("n"))[0].after == 1


def test_many_threads_ask_at_the_same_time(two):
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


def test_a_server_that_is_not_there_yet_is_waited_for():
    address = reserved()
    servers = ParameterServerClient([address], timeout=30)
    with ThreadPoolExecutor(1) as threads, contextlib.closing(servers):
        # May be done only once, and is not sent to nobody: so it is asked again.
        answer = threads.submit(servers.execute, 0, ops.IncrementCounter("n"))
        time.sleep(0.3)
        with ParameterServer(0, port=int(address.rpartition(":")[2])):
            assert answer.result(20)[0].after == 1


def reserved() -> str:
    """An address where nobody listens."""
    server = ParameterServer(0)
    server.stop()
    return server.address


@pytest.mark.catalogue("2.8.23", "4.3.17")
def test_a_server_that_stays_away_is_named_with_its_address():
    address = reserved()
    servers = ParameterServerClient([address], timeout=0.3)
    with pytest.raises(UnavailableError, match=f"parameter server 0 at {address} did not answer"):
        servers.wait_until_reachable()
    servers.close()


def test_a_server_that_came_back_is_reported_once_and_restored_by_who_asked_for_it(two, caplog):
    both, servers = two
    value = np.arange(4, dtype=np.float32)
    servers.execute(0, ops.Create(spec()), value)
    told = []

    def restore(server):
        told.append(server)
        servers.execute(server, ops.Create(spec()), value * 10)

    servers.states.on_restart(restore)
    again = both[0] = restarted(both[0])
    with caplog.at_level(logging.WARNING):
        assert servers.execute(0, ops.ReadShard("w"))[1][0].tolist() == [0, 10, 20, 30]
        servers.execute(0, ops.ReadShard("w"))
    assert told == [0]
    lost = [record for record in caplog.records if "was started again" in record.message]
    assert len(lost) == 1
    assert again.address in lost[0].message


def test_what_a_server_lost_is_waited_for_until_somebody_restores_it(two):
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


def test_what_nobody_restores_is_missed_in_the_end_and_what_never_was_at_once(two):
    both, servers = two
    servers.timeout = 0.4
    servers.execute(0, ops.Create(spec()), np.zeros(4, np.float32))
    both[0] = restarted(both[0])
    with pytest.raises(DataLossError, match="nobody restored"):
        servers.execute(0, ops.ReadShard("w"))
    with pytest.raises(NotFoundError):
        servers.execute(1, ops.ReadShard("w"))


class Interrupted:
    """A server whose store stops at a signal, with the connection cut before it answers."""

    def __init__(self):
        self.store = ShardStore()
        self.applying = OperationExecutor(self.store, 0)
        self.asked = []
        self.swallow = 0
        self.server = zeromq.serve(self.handle, request_type=ServerRequest)
        self.applying.start()

    def handle(self, requests):
        for request in requests:
            self.asked.append(request.message)
            if self.swallow:
                self.swallow -= 1
                operations = request.message.operations
                for operation in operations:
                    self.store.execute(operation, [])
                for peer in self.server._peers:
                    peer.disconnect()
            else:
                self.applying.handle([request])

    def close(self):
        self.applying.close()
        self.server.close()


@pytest.fixture
def interrupted():
    found = Interrupted()
    servers = ParameterServerClient([found.server.address], timeout=20)
    servers.wait_until_reachable()
    yield found, servers
    servers.close()
    found.close()


def test_a_write_without_a_key_that_may_be_done_is_not_asked_again(interrupted):
    server, servers = interrupted
    server.swallow = 1
    with pytest.raises(UnavailableError, match="may be done or not"):
        servers.execute(0, ops.IncrementCounter("n"))
    assert servers.execute(0, ops.IncrementCounter("n", 0))[0].after == 1


def test_a_write_with_a_key_is_asked_again_and_done_once(interrupted):
    server, servers = interrupted
    server.swallow = 2
    answer, _ = servers.execute(0, ops.IncrementCounter("n", 1, KEY))
    assert answer.after == 1
    counts = [isinstance(message.operations[0], ops.IncrementCounter) for message in server.asked]
    assert sum(counts) == 3
    assert servers.execute(0, ops.IncrementCounter("n", 0))[0].after == 1


@pytest.fixture
def answering():
    """Starts a server that answers as a test says; None: not at all."""
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


def test_a_write_that_nobody_took_is_not_said_to_be_done_perhaps(answering):
    servers = answering(lambda message: NotLeader(is_empty=False), 0.2)
    with pytest.raises(UnavailableError, match=r"The last try: it has nothing of what") as raised:
        servers.execute(0, ops.IncrementCounter("n"))
    assert "may be done" not in str(raised.value)


def test_long_silence_of_a_server_that_saves_is_said_as_well(answering, monkeypatch, caplog):
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.02)
    monkeypatch.setattr("headrace.parameter_server.checkpoint_requests._POLL_SECONDS", 0.02)

    servers = answering(lambda message: None, 20)
    save = SaveShards("", "", (), ())
    with ThreadPoolExecutor(1) as threads:
        saved = threads.submit(request_files, servers, [0], lambda server, life: save)
        until(lambda: "has not answered" in caplog.text)
        servers.close()
        assert isinstance(saved.exception(10), CancelledError)
    assert "it was asked to save or restore shards" in caplog.text


def test_who_waits_is_released_when_the_connection_is_closed(monkeypatch):
    servers = ParameterServerClient([reserved()], timeout=60)
    pause, waits = servers.sleep, threading.Event()
    monkeypatch.setattr(servers, "sleep", lambda seconds: (waits.set(), pause(seconds)))
    with ThreadPoolExecutor(1) as threads:
        greeted = threads.submit(servers.wait_until_reachable)
        assert waits.wait(10)
        servers.close()
        assert isinstance(greeted.exception(10), CancelledError)
    with pytest.raises(CancelledError, match="closed"):
        servers.wait_until_reachable()


def test_long_silence_is_said_with_who_and_what(interrupted, caplog, monkeypatch):
    server, servers = interrupted
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.05)
    monkeypatch.setattr("headrace.parameter_server.server_requests._POLL_SECONDS", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def stand_still(operation, arrays):
        begun.set()
        go_on.wait(10)
        return ops.Counted(0, 1), []

    server.store.execute = stand_still
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(servers.execute, 0, ops.IncrementCounter("n"))
        assert begun.wait(10)
        until(lambda: "has not answered" in caplog.text)
        go_on.set()
        assert answer.result(10)[0].after == 1
    assert f"parameter server 0 at {servers.addresses[0]} has not answered" in caplog.text
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
def test_arguments_that_make_no_sense_are_refused(addresses, timeout, kind):
    with pytest.raises(kind):
        ParameterServerClient(addresses, timeout=timeout)


def test_a_server_that_came_back_is_told_which_coordinators_are_over(two):
    both, servers = two
    desk = ClosureServers(servers, 7)
    late = specs.WriteKey(coordinator_term=6, closure=1, worker_session=0, number=0)
    with pytest.raises(AbortedError):
        servers.execute(0, ops.IncrementCounter("n", 1, late))
    both[0] = restarted(both[0])
    servers.execute(0, ops.IncrementCounter("n", 0))
    with pytest.raises(AbortedError):
        servers.execute(0, ops.IncrementCounter("n", 1, late))
    desk.fence(3)
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
    desk.forget_write_keys([], 2)
    assert servers.execute(0, ops.DescribeStore())[0].keys == 0


def test_a_closure_waits_for_what_was_lost_also_on_a_server_that_it_meets_first(two, monkeypatch):
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

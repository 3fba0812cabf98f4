"""Steps that a scheduled function begins without waiting for them."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.parameter_server import server_requests as requests_module
from headrace.parameter_server.messages import ExecuteOperations, ServerRequest
from headrace.parameter_server.operation_executor import OperationExecutor
from headrace.parameter_server.operations import Apply
from headrace.parameter_server.server_requests import ServerConnection
from headrace.parameter_server.store import ShardStore
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.parameter_server.write_context import (
    ClosureRun,
    WriteContext,
    wait_for_steps,
    write_as,
)
from headrace.transport import zeromq
from tests.parameter_server.small_cluster import cluster, resolver_of

F32 = np.float32
ONES = np.ones(2, F32)
CLOSURE_RUN = ClosureRun(coordinator_term=1, closure=1, worker_session=0)


class FaultyServer:
    """A server that can delay requests and break connections."""

    def __init__(self) -> None:
        self.store = ShardStore()
        self.is_running = threading.Event()
        self.is_running.set()
        #: Outcomes of the next requests: "reply", "lose the request" or "lose the reply".
        self.outcomes: Iterator[str] = iter(())
        self._queued: list[Any] = []
        self._executor = OperationExecutor(self.store, 0)
        self._executor.start()
        self.server = zeromq.serve(self._handle, request_type=ServerRequest)

    def _handle(self, requests: Any) -> None:
        for request in requests:
            if not isinstance(request.message, ExecuteOperations):
                self._executor.handle([request])
                continue
            if request._source.is_disconnected:
                continue  # received before its connection broke, after a lost request
            outcome = next(self.outcomes, "reply")
            if outcome == "reply":
                self._queued.append(request)
            else:
                if outcome == "lose the reply":
                    request.reply = lambda *args, **terms: None
                    self._executor.handle([*self._take_queued(), request])
                self._queued.clear()
                for peer in self.server._peers:  # type: ignore[attr-defined]
                    peer.disconnect()
                break  # later requests of the same connection are lost as well
        if self.is_running.is_set():
            self._executor.handle(self._take_queued())

    def _take_queued(self) -> list[Any]:
        queued, self._queued = self._queued, []
        return queued

    def resume(self) -> None:
        """Execute the delayed requests."""
        self.is_running.set()
        self._executor.handle(self._take_queued())

    def close(self) -> None:
        self._executor.close()
        self.server.close()


@pytest.fixture
def faulty_server() -> Iterator[FaultyServer]:
    with contextlib.closing(FaultyServer()) as made:
        yield made


@pytest.fixture
def strategy(faulty_server: FaultyServer) -> Iterator[Any]:
    with contextlib.closing(
        ParameterServerStrategy(resolver_of(faulty_server.server.address))
    ) as made:
        yield made


@pytest.fixture
def variable(strategy: Any) -> Any:
    with strategy.scope():
        return hr.Variable(np.zeros(2, F32), name="v")


@pytest.fixture
def context() -> Iterator[WriteContext]:
    with write_as(CLOSURE_RUN) as made:
        yield made


def in_background(in_flight: int = 2, rate: float = 1.0) -> Any:
    return hr.optimizers.InBackground(hr.optimizers.SGD(rate), in_flight)


def fail_steps(faulty_server: FaultyServer) -> Any:
    """Make steps fail until the returned function is restored."""
    execute = faulty_server.store.execute

    def fail(operation: Any, arrays: Any) -> Any:
        if isinstance(operation, Apply):
            raise InvalidArgumentError("no such step")
        return execute(operation, arrays)

    faulty_server.store.execute = fail  # type: ignore[method-assign]
    return execute


def test_a_function_continues_before_the_reply_to_its_step(faulty_server, variable, context):
    background = in_background()
    faulty_server.is_running.clear()
    background.apply_gradients([(ONES, variable)])
    background.apply_gradients([(ONES, variable)])
    assert [each.is_done for each in context.pending_steps] == [False, False]
    faulty_server.resume()
    context.finish()
    assert context.pending_steps == []
    assert variable.read().tolist() == [-2, -2]
    assert background.iterations == 2


def test_a_step_waits_when_in_flight_steps_are_pending(faulty_server, variable, context):
    background = in_background(in_flight=1)
    faulty_server.is_running.clear()
    background.apply_gradients([(ONES, variable)])
    threading.Timer(0.05, faulty_server.resume).start()
    background.apply_gradients([(ONES, variable)])
    first, *rest = faulty_server.store.counters.values()
    assert first >= 1
    assert not rest
    background.flush()
    assert variable.read().tolist() == [-2, -2]


def test_reads_of_the_function_see_its_pending_steps(variable, context):
    background = in_background(in_flight=4)
    for number in range(1, 20):
        background.apply_gradients([(ONES, variable)])
        assert variable.read().tolist() == [-number, -number]
        variable.assign_add(ONES)
        background.apply_gradients([(ONES, variable)])
        assert variable.gather([1]).tolist() == [-number]
    context.finish()


def test_the_error_of_a_step_is_raised_once_on_waiting(faulty_server, variable, context):
    execute = fail_steps(faulty_server)
    background = in_background()
    background.apply_gradients([(ONES, variable)])
    assert variable.read().tolist() == [0, 0]
    with pytest.raises(InvalidArgumentError, match="no such step"):
        background.flush()
    background.flush()
    faulty_server.store.execute = execute
    background.apply_gradients([(ONES, variable)])
    context.finish()
    assert variable.read().tolist() == [-1, -1]


def test_a_thread_started_by_the_function_waits_for_its_steps(faulty_server, variable, context):
    import contextvars  # noqa: PLC0415

    background = in_background()
    copied = contextvars.copy_context()
    thread = threading.Thread(
        target=copied.run, args=(background.apply_gradients, [(ONES, variable)])
    )
    thread.start()
    thread.join()
    assert context.pending_steps == []
    assert variable.read().tolist() == [-1, -1]


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_kept_when_connections_are_lost(faulty_server, strategy, seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    with strategy.scope():
        variables = [hr.Variable(np.zeros(2, F32), name=f"v{number}") for number in range(2)]
    outcomes = (*["reply"] * 6, "lose the request", "lose the reply")

    def random_outcomes() -> Iterator[str]:
        for _ in range(200):
            yield str(rng.choice(outcomes))

    expected = [np.zeros(2, F32), np.zeros(2, F32)]
    background = in_background(in_flight=int(rng.integers(1, 5)))
    for closure in range(4):
        with write_as(CLOSURE_RUN._replace(closure=closure)) as context:
            faulty_server.outcomes = random_outcomes()
            for _ in range(12):
                index = int(rng.integers(2))
                variable, value = variables[index], expected[index]
                match int(rng.integers(5)):
                    case 0:
                        assert variable.read().tolist() == value.tolist()
                    case 1:
                        variable.assign_add(ONES)
                        value += 1
                    case 2:
                        variable.assign(value * 2)
                        value *= 2
                    case _:
                        background.apply_gradients([(ONES, variable)])
                        value -= 1
            context.finish()
            faulty_server.outcomes = iter(())
    for variable, value in zip(variables, expected, strict=True):
        assert variable.read().tolist() == value.tolist()


def test_the_timeout_of_a_step_starts_when_it_is_awaited(
    faulty_server, variable, context, monkeypatch
):
    background = in_background()
    faulty_server.outcomes = iter(["lose the reply"])
    with monkeypatch.context() as earlier:
        clock = time.monotonic
        earlier.setattr(
            requests_module, "time", SimpleNamespace(monotonic=lambda: clock() - 1000.0)
        )
        background.apply_gradients([(ONES, variable)])
    background.flush()
    assert variable.read().tolist() == [-1, -1]


def test_a_late_reply_of_an_earlier_state_is_not_recorded(faulty_server, strategy, variable):
    restarted: list[int] = []
    strategy.cluster.servers.states.on_restart(restarted.append)
    with write_as(CLOSURE_RUN) as context:
        in_background().apply_gradients([(ONES, variable)])
        while not faulty_server.store.counters:
            threading.Event().wait(0.001)
        faulty_server._executor.state_id = "next state"
        assert variable.read().tolist() == [-1, -1]
        context.finish()
        assert variable.read().tolist() == [-1, -1]
    assert restarted == [0]


@pytest.mark.parametrize(
    "error", [UnavailableError("unreachable"), UnauthenticatedError("unknown client")]
)
def test_all_calls_on_a_lost_connection_get_its_error(error):
    def receive(timeout: float) -> None:
        raise error

    connection = ServerConnection(SimpleNamespace(receive=receive))  # type: ignore[arg-type]
    waiting = [SimpleNamespace(reply=None), SimpleNamespace(reply=None)]
    connection.pending_calls = dict(enumerate(waiting))  # type: ignore[arg-type]
    assert connection.receive()
    assert [call.reply for call in waiting] == [error, error]
    assert connection.pending_calls == {}


def test_requests_after_a_retried_step_are_executed_after_it(faulty_server, variable, context):
    execute = faulty_server.store.execute
    restored: list[bool] = []

    def fail_once(operation: Any, arrays: Any) -> Any:
        if isinstance(operation, Apply) and not restored:
            restored.append(True)
            raise NotFoundError("not restored yet")
        return execute(operation, arrays)

    faulty_server.store.execute = fail_once
    background = in_background()
    background.apply_gradients([(ONES, variable)])
    assert variable.read().tolist() == [-1, -1]
    restored.clear()
    background.apply_gradients([(ONES, variable)])
    variable.assign(ONES)
    context.finish()
    assert variable.read().tolist() == [1, 1]


def test_checkpoints_of_the_function_contain_its_pending_steps(tmp_path):
    with cluster(1) as strategy:
        with strategy.scope():
            saved = hr.Variable(np.zeros(2, F32), name="saved")
        with write_as(CLOSURE_RUN) as context:
            in_background().apply_gradients([(ONES, saved)])
            hr.Checkpoint(saved=saved).write(str(tmp_path / "one"))
            assert [each.is_done for each in context.pending_steps] == [True]
            context.finish()


def test_replicas_see_steps_begun_before_them(faulty_server, variable, context):
    faulty_server.is_running.clear()
    in_background().apply_gradients([(ONES, variable)])
    timer = threading.Timer(0.05, faulty_server.resume)
    timer.start()
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

    def are_steps_done() -> list[bool]:
        return [each.is_done for each in context.pending_steps]

    values = strategy.local_results(strategy.run(are_steps_done))
    timer.join()
    context.finish()
    assert values == ([True], [True])


@pytest.mark.parametrize("outcome", ["reply", "lose the reply", "fail"])
@pytest.mark.parametrize("is_flushed", [True, False])
def test_gradients_are_freed_with_their_function(faulty_server, variable, outcome, is_flushed):
    if outcome == "fail":
        fail_steps(faulty_server)
    else:
        faulty_server.outcomes = iter([outcome])

    def function() -> weakref.ref[Any]:
        gradient = np.ones(2, F32)
        with write_as(CLOSURE_RUN) as context:
            background = in_background()
            background.apply_gradients([(gradient, variable)])
            if is_flushed:
                with contextlib.suppress(InvalidArgumentError):
                    background.flush()
            wait_for_steps(context.pending_steps)
        return weakref.ref(gradient)

    gc.collect()
    gc.disable()
    try:
        gradient = function()
        variable.read()
        assert gradient() is None
    finally:
        gc.enable()

"""Steps that a scheduled function begins and does not wait for."""

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
from headrace.parameter_server import server_requests as asking
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
ORIGIN = ClosureRun(coordinator_term=1, closure=1, worker_session=0)


class Unsteady:
    """A server that holds requests back while it is told to, and breaks connections."""

    def __init__(self) -> None:
        self.store = ShardStore()
        self.goes_on = threading.Event()
        self.goes_on.set()
        #: What happens to the next requests: "answer", "lose" the request, or lose the "answer".
        self.fates: Iterator[str] = iter(())
        self._held: list[Any] = []
        self._applying = OperationExecutor(self.store, 0)
        self._applying.start()
        self.server = zeromq.serve(self._handle, request_type=ServerRequest)

    def _handle(self, requests: Any) -> None:
        for request in requests:
            if not isinstance(request.message, ExecuteOperations):
                self._applying.handle([request])
                continue
            if request._source.is_disconnected:
                continue  # it was read already when its connection broke, behind what was lost
            fate = next(self.fates, "answer")
            if fate == "answer":
                self._held.append(request)
            else:
                if fate == "lose the answer":
                    request.reply = lambda *args, **terms: None
                    self._applying.handle([*self._taken(), request])
                self._held.clear()
                for peer in self.server._peers:  # type: ignore[attr-defined]
                    peer.disconnect()
                break  # what came behind it on the same connection is lost as well
        if self.goes_on.is_set():
            self._applying.handle(self._taken())

    def _taken(self) -> list[Any]:
        held, self._held = self._held, []
        return held

    def go_on(self) -> None:
        """Answer what is held back."""
        self.goes_on.set()
        self._applying.handle(self._taken())

    def close(self) -> None:
        self._applying.close()
        self.server.close()


@pytest.fixture
def unsteady() -> Iterator[Unsteady]:
    with contextlib.closing(Unsteady()) as made:
        yield made


@pytest.fixture
def strategy(unsteady: Unsteady) -> Iterator[Any]:
    with contextlib.closing(ParameterServerStrategy(resolver_of(unsteady.server.address))) as made:
        yield made


@pytest.fixture
def variable(strategy: Any) -> Any:
    with strategy.scope():
        return hr.Variable(np.zeros(2, F32), name="v")


@pytest.fixture
def attempt() -> Iterator[WriteContext]:
    with write_as(ORIGIN) as made:
        yield made


def in_background(in_flight: int = 2, rate: float = 1.0) -> Any:
    return hr.optimizers.InBackground(hr.optimizers.SGD(rate), in_flight)


def fail_steps(unsteady: Unsteady) -> Any:
    """Have steps fail, until what is returned is put back."""
    carry_out = unsteady.store.execute

    def fail(operation: Any, arrays: Any) -> Any:
        if isinstance(operation, Apply):
            raise InvalidArgumentError("no such step")
        return carry_out(operation, arrays)

    unsteady.store.execute = fail  # type: ignore[method-assign]
    return carry_out


def test_a_function_goes_on_before_its_step_is_answered(unsteady, variable, attempt):
    later = in_background()
    unsteady.goes_on.clear()
    later.apply_gradients([(ONES, variable)])
    later.apply_gradients([(ONES, variable)])
    assert [each.is_done for each in attempt.pending_steps] == [False, False]
    unsteady.go_on()
    attempt.finish()
    assert attempt.pending_steps == []
    assert variable.read().tolist() == [-2, -2]
    assert later.iterations == 2


def test_the_next_step_waits_where_enough_are_under_way(unsteady, variable, attempt):
    later = in_background(in_flight=1)
    unsteady.goes_on.clear()
    later.apply_gradients([(ONES, variable)])
    threading.Timer(0.05, unsteady.go_on).start()
    later.apply_gradients([(ONES, variable)])
    first, *rest = unsteady.store.counters.values()
    assert first >= 1
    assert not rest
    later.flush()
    assert variable.read().tolist() == [-2, -2]


def test_what_the_function_reads_has_the_step_in_it(variable, attempt):
    later = in_background(in_flight=4)
    for number in range(1, 20):
        later.apply_gradients([(ONES, variable)])
        assert variable.read().tolist() == [-number, -number]
        variable.assign_add(ONES)
        later.apply_gradients([(ONES, variable)])
        assert variable.gather([1]).tolist() == [-number]
    attempt.finish()


def test_a_step_that_fails_is_raised_once_when_it_is_waited_for(unsteady, variable, attempt):
    carry_out = fail_steps(unsteady)
    later = in_background()
    later.apply_gradients([(ONES, variable)])
    assert variable.read().tolist() == [0, 0]
    with pytest.raises(InvalidArgumentError, match="no such step"):
        later.flush()
    later.flush()
    unsteady.store.execute = carry_out
    later.apply_gradients([(ONES, variable)])
    attempt.finish()
    assert variable.read().tolist() == [-1, -1]


def test_a_thread_that_the_function_starts_waits_for_its_own_steps(unsteady, variable, attempt):
    import contextvars  # noqa: PLC0415

    later = in_background()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(later.apply_gradients, [(ONES, variable)]))
    thread.start()
    thread.join()
    assert attempt.pending_steps == []
    assert variable.read().tolist() == [-1, -1]


@pytest.mark.parametrize("seed", range(8))
def test_the_order_holds_whatever_the_connection_does(unsteady, strategy, seed):
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    with strategy.scope():
        variables = [hr.Variable(np.zeros(2, F32), name=f"v{number}") for number in range(2)]
    fates = (*["answer"] * 6, "lose the request", "lose the answer")

    def chosen() -> Iterator[str]:
        for _ in range(200):
            yield str(chance.choice(fates))

    expected = [np.zeros(2, F32), np.zeros(2, F32)]
    later = in_background(in_flight=int(chance.integers(1, 5)))
    for closure in range(4):
        with write_as(ORIGIN._replace(closure=closure)) as attempt:
            unsteady.fates = chosen()
            for _ in range(12):
                which = int(chance.integers(2))
                variable, value = variables[which], expected[which]
                match int(chance.integers(5)):
                    case 0:
                        assert variable.read().tolist() == value.tolist()
                    case 1:
                        variable.assign_add(ONES)
                        value += 1
                    case 2:
                        variable.assign(value * 2)
                        value *= 2
                    case _:
                        later.apply_gradients([(ONES, variable)])
                        value -= 1
            attempt.finish()
            unsteady.fates = iter(())
    for variable, value in zip(variables, expected, strict=True):
        assert variable.read().tolist() == value.tolist()


def test_a_step_that_was_begun_long_ago_waits_for_its_server_as_others_do(
    unsteady, variable, attempt, monkeypatch
):
    later = in_background()
    unsteady.fates = iter(["lose the answer"])
    with monkeypatch.context() as earlier:
        clock = time.monotonic
        earlier.setattr(asking, "time", SimpleNamespace(monotonic=lambda: clock() - 1000.0))
        later.apply_gradients([(ONES, variable)])
    later.flush()
    assert variable.read().tolist() == [-1, -1]


def test_an_answer_of_a_life_that_is_over_brings_it_back_for_nobody(unsteady, strategy, variable):
    returned: list[int] = []
    strategy.cluster.servers.states.on_restart(returned.append)
    with write_as(ORIGIN) as attempt:
        in_background().apply_gradients([(ONES, variable)])
        while not unsteady.store.counters:
            threading.Event().wait(0.001)
        unsteady._applying.state_id = "the next"
        assert variable.read().tolist() == [-1, -1]
        attempt.finish()
        assert variable.read().tolist() == [-1, -1]
    assert returned == [0]


@pytest.mark.parametrize("error", [UnavailableError("gone"), UnauthenticatedError("a stranger")])
def test_all_who_wait_on_a_line_hear_that_it_is_lost(error):
    def receive(timeout: float) -> None:
        raise error

    line = ServerConnection(SimpleNamespace(receive=receive))  # type: ignore[arg-type]
    waiting = [SimpleNamespace(reply=None), SimpleNamespace(reply=None)]
    line.pending_calls = dict(enumerate(waiting))  # type: ignore[arg-type]
    assert line.receive()
    assert [call.reply for call in waiting] == [error, error]
    assert line.pending_calls == {}


def test_what_follows_a_step_that_found_nothing_yet_has_it_all_the_same(
    unsteady, variable, attempt
):
    carry_out = unsteady.store.execute
    restored: list[bool] = []

    def empty_at_first(operation: Any, arrays: Any) -> Any:
        if isinstance(operation, Apply) and not restored:
            restored.append(True)
            raise NotFoundError("it comes in a moment")
        return carry_out(operation, arrays)

    unsteady.store.execute = empty_at_first
    later = in_background()
    later.apply_gradients([(ONES, variable)])
    assert variable.read().tolist() == [-1, -1]
    restored.clear()
    later.apply_gradients([(ONES, variable)])
    variable.assign(ONES)
    attempt.finish()
    assert variable.read().tolist() == [1, 1]


def test_what_the_function_saves_has_the_step_in_it(tmp_path):
    with cluster(1) as strategy:
        with strategy.scope():
            saved = hr.Variable(np.zeros(2, F32), name="saved")
        with write_as(ORIGIN) as attempt:
            in_background().apply_gradients([(ONES, saved)])
            hr.Checkpoint(saved=saved).write(str(tmp_path / "one"))
            assert [each.is_done for each in attempt.pending_steps] == [True]
            attempt.finish()


def test_replicas_read_what_was_begun_before_them(unsteady, variable, attempt):
    unsteady.goes_on.clear()
    in_background().apply_gradients([(ONES, variable)])
    going_on = threading.Timer(0.05, unsteady.go_on)
    going_on.start()
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

    def begun() -> list[bool]:
        return [each.is_done for each in attempt.pending_steps]

    values = strategy.local_results(strategy.run(begun))
    going_on.join()
    attempt.finish()
    assert values == ([True], [True])


@pytest.mark.parametrize("fate", ["answer", "lose the answer", "fail"])
@pytest.mark.parametrize("is_flushed", [True, False])
def test_gradients_are_let_go_with_their_function(unsteady, variable, fate, is_flushed):
    if fate == "fail":
        fail_steps(unsteady)
    else:
        unsteady.fates = iter([fate])

    def function() -> weakref.ref[Any]:
        gradient = np.ones(2, F32)
        with write_as(ORIGIN) as attempt:
            later = in_background()
            later.apply_gradients([(gradient, variable)])
            if is_flushed:
                with contextlib.suppress(InvalidArgumentError):
                    later.flush()
            wait_for_steps(attempt.pending_steps)
        return weakref.ref(gradient)

    gc.collect()
    gc.disable()
    try:
        gone = function()
        variable.read()
        assert gone() is None
    finally:
        gc.enable()

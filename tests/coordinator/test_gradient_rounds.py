"""Gradient rounds: gradients of several functions are applied as one step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator import ClusterCoordinator
from headrace.coordinator.closure import Closure
from headrace.coordinator.closure_queue import GradientRounds
from headrace.errors import CancelledError, InvalidArgumentError, UserFunctionError
from headrace.parameter_server.operations import DescribeStore
from tests.coordinator.in_process import SECONDS, shared_here, wait_until, with_servers

STEPS = 20


def _end(rounds: GradientRounds, *numbers: int) -> None:
    for number in numbers:
        rounds.closure_ended(Closure("step", number=number))


def _numbers(rounds: GradientRounds) -> list[int]:
    complete = rounds.take_complete()
    assert complete is not None
    closures = rounds.round_pushed()
    assert closures[-1].number == complete.last_number
    return [each.number for each in closures]


def test_a_round_completes_when_all_its_closures_have_ended():
    rounds = GradientRounds(3)
    _end(rounds, 3, 1)
    assert rounds.take_complete() is None
    assert [rounds.may_start(number) for number in (2, 3, 4)] == [True, True, False]
    _end(rounds, 2)
    assert _numbers(rounds) == [1, 2, 3]
    assert [rounds.may_start(number) for number in (4, 6, 7)] == [True, True, False]


def test_no_closure_starts_while_a_round_is_pushed():
    rounds = GradientRounds(1)
    _end(rounds, 1)
    assert rounds.take_complete() is not None
    assert rounds.take_complete() is None
    assert not rounds.may_start(2)
    rounds.round_pushed()
    assert rounds.may_start(2)


def test_a_round_can_end_early_and_the_next_starts_after_it():
    rounds = GradientRounds(3)
    rounds.end_at(0)
    rounds.end_at(5)
    rounds.end_at(7)
    _end(rounds, *range(1, 9))
    assert [_numbers(rounds) for _ in range(3)] == [[1, 2, 3], [4, 5], [6, 7]]
    assert rounds.take_complete() is None
    rounds.end_at(8)
    assert _numbers(rounds) == [8]
    assert rounds.may_start(11)
    assert not rounds.may_start(12)


# --- with workers and servers --------------------------------------------------------------------


@pytest.fixture
def run() -> Iterator[Callable[..., tuple[Any, ClusterCoordinator]]]:
    """Create a strategy with gradient rounds, and its coordinator."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(with_servers(mode="sync", **options))


def _made(strategy: Any, value: Any = 0.0) -> tuple[Any, Any]:
    """Return a variable, and an optimizer that subtracts the gradient."""
    with strategy.scope():
        return hr.Variable(value), hr.optimizers.SGD(1.0)


class Reference:
    """A single process that takes each step with the whole batch."""

    def __init__(self, kind: str, value: np.ndarray) -> None:
        self.kind = kind
        self.value = value.copy()
        self.m, self.v = np.zeros_like(value), np.zeros_like(value)
        self.steps = 0

    def step(self, rows: Any, gradient: np.ndarray) -> None:
        self.steps += 1
        if self.kind == "SGD":
            self.value[rows] -= 0.1 * gradient
            return
        self.m[rows] += 0.1 * (gradient - self.m[rows])
        self.v[rows] += 0.001 * (gradient**2 - self.v[rows])
        rate = 0.1 * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        self.value[rows] -= rate * self.m[rows] / (np.sqrt(self.v[rows]) + 1e-7)


# Adam's betas have the dtype of the variable, so in float32 each step is 6e-6 from this one.
@pytest.mark.parametrize(
    ("kind", "dtype"), [("SGD", "float32"), ("SGD", "float64"), ("Adam", "float64")]
)
def test_rounds_equal_steps_of_one_large_batch(run: Any, kind: str, dtype: str) -> None:
    chance = np.random.default_rng(5)
    partitioner = hr.distribute.partitioners.FixedShardsPartitioner(2)
    strategy, coordinator = run(round_size=3, partitioner=partitioner)
    first = chance.normal(size=(6, 4))
    with strategy.scope():
        optimizer = getattr(hr.optimizers, kind)(0.1)
        dense = hr.Variable(first.astype(dtype))
        sparse = hr.Variable(first.astype(dtype))
        table = hr.EmbeddingTable(4, name="table", initializer="zeros", dtype=dtype)

    def function(inputs: Any, rows: Any) -> None:
        # The loss is half the square of inputs @ w, so the gradient depends on the current value.
        of_dense = inputs.T @ (inputs @ dense.read()) / len(inputs)
        of_rows = sparse.gather(rows) + table.lookup(rows) - 1.0
        optimizer.apply_gradients(
            [
                (of_dense, dense),
                (hr.IndexedSlices(of_rows, rows), sparse),
                (hr.IndexedSlices(of_rows, rows), table),
            ]
        )

    wanted = [Reference(kind, value) for value in (first, first, np.zeros((6, 4)))]
    for _ in range(STEPS):
        parts = [(chance.normal(size=(5, 6)), chance.integers(0, 6, size=4)) for _ in range(3)]
        for inputs, rows in parts:
            coordinator.schedule(function, (inputs.astype(dtype), rows))
        inputs = np.concatenate([each for each, _ in parts])
        rows = np.concatenate([each for _, each in parts])
        of_rows = np.zeros((6, 4))
        np.add.at(of_rows, rows, (wanted[1].value + wanted[2].value)[rows] - 1.0)
        touched = np.unique(rows)
        wanted[0].step(slice(None), inputs.T @ (inputs @ wanted[0].value) / len(inputs))
        for each in wanted[1:]:
            each.step(touched, of_rows[touched] / 3)
    coordinator.join(SECONDS)
    assert optimizer.iterations == STEPS
    close = {"rtol": 1e-6, "atol": 1e-6 if dtype == "float32" else 1e-12}
    np.testing.assert_allclose(dense.read(), wanted[0].value, **close)
    np.testing.assert_allclose(sparse.read(), wanted[1].value, **close)
    np.testing.assert_allclose(table.gather(np.arange(6)), wanted[2].value, **close)


def test_a_round_reads_earlier_values_and_join_ends_a_short_round(run: Any) -> None:
    strategy, coordinator = run()
    v, optimizer = _made(strategy)

    def function(gradient: float) -> tuple[float, int]:
        before = float(v.read())
        return before, optimizer.apply_gradients([(np.float64(gradient), v)])

    values = [coordinator.schedule(function, (number,)) for number in (1.0, 3.0, 10.0, 20.0, 7.0)]
    coordinator.join(SECONDS)
    assert [value.fetch() for value in values] == [
        (0.0, 1), (0.0, 1), (-2.0, 2), (-2.0, 2), (-17.0, 3),
    ]  # fmt: skip
    assert (float(v.read()), optimizer.iterations) == (-24.0, 3)
    # The next round starts after the short one.
    coordinator.schedule(function, (2.0,))
    coordinator.schedule(function, (4.0,))
    coordinator.join(SECONDS)
    assert (float(v.read()), optimizer.iterations) == (-27.0, 4)


def test_done_ends_a_short_round(run: Any) -> None:
    strategy, coordinator = run()
    v, optimizer = _made(strategy)
    coordinator.schedule(lambda: optimizer.apply_gradients([(np.float64(2.0), v)]))
    wait_until(coordinator.done)
    assert float(v.read()) == -2.0


def test_a_function_without_a_push_is_excluded_from_the_mean(run: Any) -> None:
    strategy, coordinator = run(round_size=3)
    with strategy.scope():
        v, w = (hr.Variable(np.zeros(2)) for _ in range(2))
        optimizer = hr.optimizers.SGD(1.0)

    def both() -> None:
        optimizer.apply_gradients([(np.full(2, 4.0), v), (np.full(2, 4.0), w)])

    coordinator.schedule(both)
    coordinator.schedule(lambda: optimizer.apply_gradients([(np.full(2, 2.0), v)]))
    value = coordinator.schedule(lambda: v.read())
    coordinator.join(SECONDS)
    assert value.fetch().tolist() == [0.0, 0.0]
    # One of the two that took the step has no gradient for w: zero, as in one batch.
    assert (v.read().tolist(), w.read().tolist()) == ([-3.0, -3.0], [-2.0, -2.0])
    for _ in range(3):
        coordinator.schedule(lambda: None)
    coordinator.join(SECONDS)
    assert optimizer.iterations == 1


def test_second_pushes_of_functions_form_a_second_step(run: Any) -> None:
    strategy, coordinator = run()
    v, optimizer = _made(strategy)

    def function(first: float, second: float | None) -> list[int]:
        gradient = np.array(first)
        taken = [optimizer.apply_gradients([(gradient, v)])]
        gradient[...] = 99.0  # arguments are not modified
        if second is not None:
            taken.append(optimizer.apply_gradients([(np.array(second), v)]))
        assert float(v.read()) == 0.0
        return taken

    values = [coordinator.schedule(function, each) for each in ((1.0, 10.0), (3.0, None))]
    coordinator.join(SECONDS)
    assert [value.fetch() for value in values] == [[1, 2], [1]]
    assert (float(v.read()), optimizer.iterations) == (-2.0 - 10.0, 2)


def test_a_function_that_fails_or_is_cancelled_contributes_nothing(run: Any) -> None:
    strategy, coordinator = run(round_size=2)
    v, optimizer = _made(strategy)

    def function(gradient: float, fails: bool = False) -> None:
        optimizer.apply_gradients([(np.array(gradient), v)])
        if fails:
            raise UserFunctionError("no")

    ended = coordinator.schedule(function, (5.0,))
    ended.fetch(SECONDS)
    coordinator.schedule(function, (100.0, True))
    with pytest.raises(UserFunctionError):
        coordinator.join(SECONDS)
    assert float(v.read()) == -5.0, "gradients of the others are applied"

    shared_here.update(began=threading.Event(), go_on=threading.Event())
    cancelled = coordinator.schedule(_wait_and_push, (optimizer, v))
    assert shared_here["began"].wait(SECONDS)
    coordinator.schedule(function, (1.0,))
    assert cancelled.cancel()
    coordinator.join(SECONDS)
    shared_here["go_on"].set()
    with pytest.raises(CancelledError):
        cancelled.fetch()
    assert float(v.read()) == -6.0


def _wait_and_push(optimizer: Any, variable: Any) -> None:
    shared_here["began"].set()
    shared_here["go_on"].wait(SECONDS)
    optimizer.apply_gradients([(np.array(50.0), variable)])


def test_a_slow_function_delays_its_round_and_all_later_ones(run: Any) -> None:
    strategy, coordinator = run()
    v, optimizer = _made(strategy)
    shared_here.update(began=threading.Event(), go_on=threading.Event())
    coordinator.schedule(_wait_and_push, (optimizer, v))
    quick = coordinator.schedule(lambda: optimizer.apply_gradients([(np.array(2.0), v)]))
    later = coordinator.schedule(lambda: float(v.read()))
    assert quick.fetch(SECONDS) == 1
    assert shared_here["began"].wait(SECONDS)
    assert (later.status.name, float(v.read())) == ("NOT_READY", 0.0)
    shared_here["go_on"].set()
    assert later.fetch(SECONDS) == -26.0


def test_other_writes_are_applied_at_once_and_their_keys_forgotten(run: Any) -> None:
    strategy, coordinator = run(round_size=2)
    v, optimizer = _made(strategy, np.zeros(2))

    def function() -> float:
        v.assign_add(np.ones(2))
        optimizer.apply_gradients([(np.full(2, 0.5), v)])
        return float(v.read()[0])

    assert coordinator.schedule(function).fetch(SECONDS) == 1.0
    for _ in range(3):
        coordinator.schedule(function)
    coordinator.join(SECONDS)
    assert v.read().tolist() == [3.0, 3.0]
    for server in range(2):
        described, _ = strategy.cluster.servers.execute(server, DescribeStore())
        assert described.keys == 0


def test_clipping_and_finite_checks_apply_to_the_mean(run: Any) -> None:
    strategy, coordinator = run()
    with strategy.scope():
        v = hr.Variable(np.zeros(2))
        clipped = hr.optimizers.SGD(1.0, clipnorm=1.0)
        skips = hr.optimizers.SGD(1.0, non_finite="skip")
        raises = hr.optimizers.SGD(1.0)

    def function(optimizer: Any, gradient: Any) -> None:
        optimizer.apply_gradients([(np.array(gradient), v)])

    for gradient in ([8.0, 0.0], [0.0, 6.0]):  # the mean has norm 5
        coordinator.schedule(function, (clipped, gradient))
    coordinator.join(SECONDS)
    np.testing.assert_allclose(v.read(), [-0.8, -0.6])
    for gradient in ([np.nan, 0.0], [1.0, 1.0]):
        coordinator.schedule(function, (skips, gradient))
    coordinator.join(SECONDS)
    np.testing.assert_allclose(v.read(), [-0.8, -0.6])
    assert skips.iterations == 0
    coordinator.schedule(function, (raises, [np.inf, 0.0]))
    with pytest.raises(InvalidArgumentError, match="not finite"):
        coordinator.join(SECONDS)


def test_a_failed_round_push_raises_and_the_next_succeeds(run: Any) -> None:
    strategy, coordinator = run()
    v, optimizer = _made(strategy, np.zeros((3, 2)))

    def sparse() -> None:
        optimizer.apply_gradients([(hr.IndexedSlices(np.ones((1, 2)), [1]), v)])

    coordinator.schedule(sparse)
    coordinator.schedule(lambda: optimizer.apply_gradients([(np.ones((3, 2)), v)]))
    with pytest.raises(hr.errors.FailedPreconditionError, match="functions of a gradient round"):
        coordinator.join(SECONDS)
    coordinator.schedule(sparse)
    coordinator.join(SECONDS)
    assert v.read().tolist() == [[0, 0], [-1, -1], [0, 0]]


def test_an_epoch_of_a_shared_dataset_ends_with_a_short_round(run: Any) -> None:
    strategy, coordinator = run(round_size=4)
    v, optimizer = _made(strategy)
    dataset = coordinator.create_shared_dataset(hr.Dataset.range(10))

    def function(elements: Any) -> None:
        optimizer.apply_gradients([(np.float64(next(elements)), v)])

    assert coordinator.run_epoch(function, (dataset,)) == 10
    assert optimizer.iterations == 3
    assert float(v.read()) == -(6 / 4 + 22 / 4 + 17 / 2)

"""An iteration is opened; where its cost function is wanted, that is put first."""

from __future__ import annotations

import hashlib
from typing import Any

from headrace.service.client.job_use import JobUse
from headrace.service.client.opening import open_iteration
from headrace.service.client.shell import Line
from headrace.service.client.targets import Target
from headrace.service.messages import (
    IterationOpened,
    OpenIteration,
    PlanReceived,
    PutPlan,
    Terms,
)

COST = b"what a row costs"
DIGEST = hashlib.sha256(COST).digest()
OPENING = OpenIteration(
    client_id="a",
    dataset_id="1000",
    job_name="job",
    pass_number=(0,),
    seed=7,
    terms=Terms(processing_mode=0, cost="fingerprint", cost_plan=DIGEST),
)


class Dispatcher:
    """A stub of one that forgets plans a few times."""

    def __init__(self, forgets: int) -> None:
        self.forgets = forgets
        self.asked: list[Any] = []
        self.kept: list[Any] = []
        self._is_here = False

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def release(self) -> Any:
        return self

    def call(self, question: Any, *, timeout: float) -> Any:
        self.asked.append(question)
        if isinstance(question, PutPlan):
            self._is_here = self.forgets == 0
            self.forgets -= not self._is_here
            return PlanReceived(received=question.offset + len(question.part))
        is_here = self._is_here
        return IterationOpened(
            iteration_id=2000 * is_here, tasks=(), seed=7, finished=False, wanted=not is_here
        )


def opened(dispatcher: Dispatcher) -> IterationOpened:
    return open_iteration(
        OPENING,
        lambda: dispatcher,  # type: ignore[arg-type, return-value]
        dispatcher="d:1",
        wait_timeout=30.0,
        target=Target(),
        keep=dispatcher.kept.append,
        use=JobUse(),
        cost_fn=COST,
    )


def test_a_cost_function_that_is_wanted_is_put_and_the_iteration_opened() -> None:
    dispatcher = Dispatcher(forgets=0)
    assert opened(dispatcher).iteration_id == 2000
    put = PutPlan(digest=DIGEST, offset=0, total=len(COST), part=COST)
    assert dispatcher.asked == [OPENING, put, OPENING]


def test_a_cost_function_that_was_forgotten_meanwhile_is_put_again() -> None:
    dispatcher = Dispatcher(forgets=1)
    assert opened(dispatcher).iteration_id == 2000
    assert [type(each) for each in dispatcher.asked].count(PutPlan) == 2


def test_the_channel_on_which_an_iteration_was_opened_is_kept() -> None:
    dispatcher = Dispatcher(forgets=0)
    opened(dispatcher)
    assert dispatcher.kept == [dispatcher]


class Closing:
    """A channel that counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_line_hands_on_the_last_channel_that_was_kept_and_then_connects() -> None:
    first, second, third = channels = Closing(), Closing(), Closing()
    line = Line(lambda: third)  # type: ignore[arg-type, return-value]
    line.keep(first)  # type: ignore[arg-type]
    line.keep(second)  # type: ignore[arg-type]
    assert line.take() is second
    assert [channel.closed for channel in channels] == [1, 0, 0]


def test_a_line_that_was_taken_keeps_nothing() -> None:
    late, other = Closing(), Closing()
    line = Line(lambda: other)  # type: ignore[arg-type, return-value]
    assert line.take() is other
    line.keep(late)  # type: ignore[arg-type]
    assert late.closed == 1

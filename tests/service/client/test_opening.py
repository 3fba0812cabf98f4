"""An iteration is opened; where its cost function is wanted, that is put first."""

from __future__ import annotations

import hashlib
from typing import Any

from headrace.service.client.opening import open_iteration
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
        self._is_here = False

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *error: object) -> None:
        pass

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

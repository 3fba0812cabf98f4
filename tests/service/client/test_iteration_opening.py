"""Opening of an iteration, and the common position of its clients."""

from __future__ import annotations

import hashlib
import logging
import types
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.errors import DeadlineExceededError, UnavailableError
from headrace.execution.delivered_elements import END_ORDINAL, DeliveredElements
from headrace.service.client import iteration_opening as gathering
from headrace.service.client.exhausted_jobs import ExhaustedJobCheck
from headrace.service.client.iteration_opening import gather_positions, open_iteration
from headrace.service.client.reader import RemoteReader
from headrace.service.client.reader_runner import ChannelHandover
from headrace.service.client.replay import ReplayRegistry
from headrace.service.client.task_selector import TaskSelector
from headrace.service.messages import (
    ContributeCheckpoint,
    ContributeCheckpointReply,
    JobOptions,
    OpenIteration,
    OpenIterationReply,
    PutPlan,
    PutPlanReply,
)

COST = b"what a row costs"
DIGEST = hashlib.sha256(COST).digest()
OPENING = OpenIteration(
    client_id="a",
    dataset_id="1000",
    job_name="job",
    epoch=(0,),
    seed=7,
    options=JobOptions(processing_mode=0, cost_fn_id="fingerprint", cost_fn_digest=DIGEST),
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
            return PutPlanReply(received_bytes=question.offset + len(question.chunk))
        is_here = self._is_here
        return OpenIterationReply(
            iteration_id=2000 * is_here,
            tasks=(),
            seed=7,
            finished=False,
            cost_fn_needed=not is_here,
        )


def opened(dispatcher: Dispatcher) -> OpenIterationReply:
    return open_iteration(
        OPENING,
        lambda: dispatcher,  # type: ignore[arg-type, return-value]
        dispatcher="d:1",
        wait_timeout=30.0,
        task_selector=TaskSelector(),
        keep_channel=dispatcher.kept.append,
        job_check=ExhaustedJobCheck(),
        cost_fn=COST,
    )


def test_a_missing_cost_function_is_uploaded_before_opening() -> None:
    dispatcher = Dispatcher(forgets=0)
    assert opened(dispatcher).iteration_id == 2000
    put = PutPlan(digest=DIGEST, offset=0, total_bytes=len(COST), chunk=COST)
    assert dispatcher.asked == [OPENING, put, OPENING]


def test_a_lost_cost_function_is_uploaded_again() -> None:
    dispatcher = Dispatcher(forgets=1)
    assert opened(dispatcher).iteration_id == 2000
    assert [type(each) for each in dispatcher.asked].count(PutPlan) == 2


def test_the_channel_that_opened_the_iteration_is_kept() -> None:
    dispatcher = Dispatcher(forgets=0)
    opened(dispatcher)
    assert dispatcher.kept == [dispatcher]


class Closing:
    """A channel that counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_handover_returns_the_last_channel_then_connects() -> None:
    first, second, third = channels = Closing(), Closing(), Closing()
    line = ChannelHandover(lambda: third)  # type: ignore[arg-type, return-value]
    line.put(first)  # type: ignore[arg-type]
    line.put(second)  # type: ignore[arg-type]
    assert line.take() is second
    assert [channel.closed for channel in channels] == [1, 0, 0]


def test_a_handover_closes_channels_stored_after_take() -> None:
    late, other = Closing(), Closing()
    line = ChannelHandover(lambda: other)  # type: ignore[arg-type, return-value]
    assert line.take() is other
    line.put(late)  # type: ignore[arg-type]
    assert late.closed == 1


# --- common position of all clients of a job: each contributes its own and receives the total -----


OF_ALL = ContributeCheckpointReply(
    delivered=((0, 4),), partial_splits=((6, ((0, 2), (4, END_ORDINAL))),)
)
PLACE = {"watermark": 4, "partial_splits": [[6, 1, [[0, 2], [4, None]]]]}


class Gatherer:
    """Answers that a client is missing, until some time."""

    def __init__(self, clock: list[float], until: float) -> None:
        self._clock, self._until = clock, until

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, question: Any, timeout: float) -> ContributeCheckpointReply:
        missing = ("b",) if self._clock[0] < self._until else ()
        return ContributeCheckpointReply(
            missing_clients=missing, delivered=((0, 3),), partial_splits=((4, ((1, 2),)),)
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    fake = types.SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(gathering, "time", fake)
    return now


def gather(clock: list[float], until: float) -> DeliveredElements:
    return gathering.gather_positions(
        DeliveredElements(),
        "a",
        lambda: Gatherer(clock, until),  # type: ignore[arg-type, return-value]
        dispatcher="here:1",
        timeout=60.0,
    )


def test_a_short_wait_is_not_logged(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    place = gather(clock, until=5.0)
    assert (place.complete_splits, place.partial_splits) == (((0, 3),), ((4, ((1, 2),)),))
    assert caplog.records == []


def test_missing_clients_are_named_after_ten_seconds_and_in_the_error(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DeadlineExceededError, match="positions of b"),
    ):
        gather(clock, until=1e9)
    (message,) = caplog.messages
    assert message.startswith("get_state has waited 10 s for the positions of b")


class Answering:
    """Returns replies in turn, and the last one repeatedly."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = [*answers], list[Any]()

    @contextmanager
    def dial(self) -> Any:
        yield self

    def release(self) -> Any:
        return self

    def call(self, question: Any, *, timeout: float) -> Any:
        self.asked.append(question)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def place_of_all(dispatcher: Answering, timeout: float = 60.0) -> DeliveredElements:
    own = DeliveredElements()
    own.add([(0, 2, 0, END_ORDINAL), (6, 1, 0, 2)])
    return gather_positions(own, "c", dispatcher.dial, dispatcher="d:1", timeout=timeout)


def test_the_request_is_repeated_until_all_clients_contributed() -> None:
    dispatcher = Answering(ContributeCheckpointReply(missing_clients=("d",)), OF_ALL)
    assert place_of_all(dispatcher).to_json() == PLACE
    first, second = dispatcher.asked
    assert isinstance(first, ContributeCheckpoint)
    assert first == second
    assert (first.client_id, first.delivered, first.partial_splits) == (
        "c",
        ((0, 2),),
        ((6, ((0, 2),)),),
    )


def test_each_state_uses_its_own_token() -> None:
    dispatcher = Answering(OF_ALL)
    place_of_all(dispatcher)
    place_of_all(dispatcher)
    first, second = dispatcher.asked
    assert first.token != second.token


def test_clients_that_did_not_contribute_are_named() -> None:
    with pytest.raises(DeadlineExceededError, match="positions of d, e: "):
        place_of_all(Answering(ContributeCheckpointReply(missing_clients=("d", "e"))), timeout=0.01)


def test_a_client_without_elements_gets_the_position_of_the_others() -> None:
    opened = OpenIterationReply(iteration_id=2000, tasks=(), seed=7, finished=True, job_name="job")
    dispatcher = Answering(opened, OF_ALL)

    def connect(*address: str) -> Any:
        raise UnavailableError("nobody is there")

    opening = OpenIteration(
        client_id="c",
        dataset_id="1000",
        job_name="job",
        epoch=(0,),
        seed=7,
        options=JobOptions(processing_mode=2, visitation="exactly_once"),
    )
    registry = ReplayRegistry()
    watcher = Answering()
    registry.register_iterator(watcher)
    reader = RemoteReader(
        opening,
        dispatcher="d:1",
        open_stub=dispatcher.dial,
        connect_dispatcher=connect,
        connect_worker=connect,
        max_outstanding_requests=None,
        replay_registry=registry,
        base=DeliveredElements(),
    )
    assert reader.portable_position(0) is None, "it has not joined, and is at the beginning"
    reader._open_iteration()
    assert reader.portable_position(0) == {"positions": PLACE, "seed": 7}

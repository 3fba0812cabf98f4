"""Round delivery: the part of each consumer, and completion of rounds."""

from __future__ import annotations

import random

import pytest

from headrace.errors import AbortedError, CancelledError, FailedPreconditionError
from headrace.service.messages import PROGRESS_REQUEST, GetElements, GetElementsReply
from headrace.service.modes.coordinated_reads.round_delivery import RoundDelivery
from headrace.service.worker.delivery_policy import BufferLimits
from headrace.service.worker.result_batch import BatchReply, ResultBatch


def make_request(
    consumer: int, number: int, received: int, *, known: int = -1, client_id: str = ""
) -> GetElements:
    return GetElements(
        task_id=1,
        task_token="token",
        client_id=client_id or f"client{consumer}",
        request_number=number,
        acknowledged=received,
        consumer_index=consumer,
        known_rounds=known,
    )


def element(number: int, *, size: int = 1) -> ResultBatch:
    """Return a batch of one element, which is a split of its own."""
    return ResultBatch(
        first_element=number,
        num_elements=1,
        size=size,
        done_from=number,
        done_to=number + 1,
        delivered_end=number + 1,
    )


def failure(number: int) -> ResultBatch:
    return ResultBatch(
        first_element=number,
        error=ValueError("bad"),
        done_from=number,
        done_to=number + 1,
        delivered_end=number,
    )


def describe_replies(answers: list[tuple[str, BatchReply]]) -> dict[str, object]:
    """Return per request: the element, number of complete rounds, end, or error class."""
    found: dict[str, object] = {}
    for request, answer in answers:
        if isinstance(answer, ResultBatch):
            # Element p is the only one of split p.
            found[request] = answer.size if answer.error is None else "error"
        elif isinstance(answer, GetElementsReply):
            found[request] = (
                "end" if answer.end_of_task else ("complete", answer.mode_data.num_complete)
            )
        else:
            found[request] = type(answer)
    return found


def test_consumer_i_gets_element_i_of_each_round_requested_early_or_late() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    assert rounds.request_received("a0", make_request(0, 0, 0), now=0.0) == []
    assert rounds.request_received("c0", make_request(2, 0, 0), now=0.0) == []
    assert rounds.add_batch(element(0, size=10)) == []
    assert rounds.add_batch(element(1, size=11)) == []
    assert describe_replies(rounds.add_batch(element(2, size=12))) == {"a0": 10, "c0": 12}
    assert describe_replies(rounds.request_received("b0", make_request(1, 0, 0), now=0.0)) == {
        "b0": 11
    }


def test_splits_complete_with_the_whole_round_for_every_consumer() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0))
    rounds.add_batch(element(1))
    for consumer in (0, 1):
        ((_, answer),) = rounds.request_received("x", make_request(consumer, 0, 0), now=0.0)
        assert isinstance(answer, ResultBatch)
        assert (answer.first_element, answer.done_from, answer.done_to, answer.delivered_end) == (
            0,
            0,
            2,
            2,
        )


def test_progress_requests_are_answered_when_a_round_arrived_everywhere() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0))
    rounds.add_batch(element(1))
    rounds.request_received("a0", make_request(0, 0, 0), now=0.0)
    rounds.request_received("b0", make_request(1, 0, 0), now=0.0)
    assert (
        rounds.request_received(
            "a progress", make_request(0, PROGRESS_REQUEST, 1, known=0), now=0.0
        )
        == []
    )
    assert describe_replies(
        rounds.request_received(
            "b progress", make_request(1, PROGRESS_REQUEST, 1, known=0), now=0.0
        )
    ) == {
        "a progress": ("complete", 1),
        "b progress": ("complete", 1),
    }


def test_a_round_is_redelivered_until_it_is_acknowledged() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0, size=10))
    rounds.add_batch(element(1, size=11))
    assert describe_replies(rounds.request_received("a", make_request(0, 0, 0), now=0.0)) == {
        "a": 10
    }
    assert describe_replies(rounds.request_received("b", make_request(1, 0, 0), now=0.0)) == {
        "b": 11
    }
    assert describe_replies(rounds.request_received("a again", make_request(0, 0, 0), now=0.0)) == {
        "a again": 10
    }
    rounds.request_received("a1", make_request(0, 1, 1), now=0.0)
    assert describe_replies(rounds.request_received("late", make_request(0, 0, 1), now=0.0)) == {
        "late": AbortedError
    }


def test_a_repeated_request_replaces_the_earlier_one() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(1)
    assert rounds.request_received("first", make_request(0, 0, 0), now=0.0) == []
    assert describe_replies(rounds.request_received("second", make_request(0, 0, 0), now=0.0)) == {
        "first": AbortedError
    }
    assert describe_replies(rounds.add_batch(element(0, size=7))) == {"second": 7}


def test_an_urgent_progress_request_is_answered_with_the_lagging_consumers() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    ((_, nothing),) = rounds.request_received("x", make_request(0, PROGRESS_REQUEST, 0), now=0.0)
    assert isinstance(nothing, GetElementsReply)
    assert nothing.mode_data.lagging_consumers == (), (
        "the round is not produced, so no consumer delays it"
    )
    for number in range(3):
        rounds.add_batch(element(number))
    rounds.request_received("a0", make_request(0, 0, 0), now=0.0)
    ((_, lags),) = rounds.request_received(
        "a progress", make_request(0, PROGRESS_REQUEST, 1), now=0.0
    )
    assert isinstance(lags, GetElementsReply)
    assert lags.mode_data.lagging_consumers == (1, 2)


def test_a_lagging_consumer_stops_the_worker_after_some_rounds() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2, BufferLimits(ready_batches=2))
    produced = 0
    while rounds.has_room and produced < 100:
        rounds.add_batch(element(produced))
        produced += 1
    assert produced == 4, "two rounds of two elements"
    rounds.request_received("a", make_request(0, PROGRESS_REQUEST, 2), now=0.0)
    assert not rounds.has_room
    rounds.request_received("b", make_request(1, PROGRESS_REQUEST, 1), now=0.0)
    assert rounds.has_room


def test_a_round_larger_than_the_memory_limit_is_completed() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2, BufferLimits(ready_bytes=10))
    assert rounds.has_room
    rounds.add_batch(element(0, size=100))
    assert rounds.has_room
    rounds.add_batch(element(1, size=100))
    assert not rounds.has_room


def test_an_error_replaces_its_element_in_the_round() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    rounds.add_batch(element(0, size=10))
    rounds.add_batch(failure(1))
    rounds.add_batch(element(2, size=12))
    answers = [
        describe_replies(rounds.request_received("x", make_request(each, 0, 0), now=0.0))["x"]
        for each in range(3)
    ]
    assert answers == [10, "error", 12]


def test_elements_too_few_for_a_round_are_dropped_and_counted() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    for number in range(5):
        rounds.add_batch(element(number))
    rounds.note_exhausted(5)
    assert rounds.dropped_elements == 2
    for each in range(3):
        rounds.request_received("x", make_request(each, 0, 0), now=0.0)
        rounds.request_received("y", make_request(each, 1, 1), now=0.0)
    assert rounds.can_finish
    assert describe_replies(rounds.note_finished()) == {"y": "end"}
    assert rounds.is_fully_acknowledged


def test_an_error_at_the_end_reaches_every_consumer() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    rounds.add_batch(failure(0))
    rounds.note_exhausted()
    answers = [
        describe_replies(rounds.request_received("x", make_request(each, 0, 0), now=0.0))["x"]
        for each in range(3)
    ]
    assert answers == ["error"] * 3


def test_the_task_can_finish_when_all_rounds_are_complete() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0))
    rounds.add_batch(element(1))
    rounds.note_exhausted(2)
    assert not rounds.can_finish
    rounds.request_received("a", make_request(0, 1, 1), now=0.0)
    assert not rounds.can_finish
    rounds.request_received("b", make_request(1, 1, 1), now=0.0)
    assert rounds.can_finish
    assert describe_replies(rounds.note_finished()) == {"a": "end", "b": "end"}
    assert describe_replies(
        rounds.request_received("late", make_request(0, PROGRESS_REQUEST, 1, known=1), now=0.0)
    ) == {"late": "end"}


def test_an_index_out_of_range_is_rejected_with_both_numbers() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    ((_, refusal),) = rounds.request_received("x", make_request(5, 0, 0), now=0.0)
    assert isinstance(refusal, FailedPreconditionError)
    assert "consumer index 5" in str(refusal)
    assert "only 2 consumers" in str(refusal)


def test_another_client_with_the_same_index_is_rejected() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(1)
    rounds.request_received("x", make_request(0, 0, 0), now=0.0)
    ((_, refusal),) = rounds.request_received(
        "y", make_request(0, 0, 0, client_id="another"), now=0.0
    )
    assert isinstance(refusal, FailedPreconditionError)
    assert "the current round has already reached 0" in str(refusal)
    assert "client0" in str(refusal)


def test_after_cancellation_only_partly_delivered_rounds_are_sent() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    for number in range(4):
        rounds.add_batch(element(number, size=10 + number))
    rounds.request_received("a0", make_request(0, 0, 0), now=0.0)
    rounds.request_received("a2", make_request(0, 2, 0), now=0.0)
    replies, output = rounds.cancel(CancelledError("the worker stops"))
    assert describe_replies(replies) == {"a2": CancelledError}
    assert output.elements == 2
    assert describe_replies(rounds.request_received("b0", make_request(1, 0, 0), now=0.0)) == {
        "b0": 11
    }
    assert describe_replies(rounds.request_received("b1", make_request(1, 1, 1), now=0.0)) == {
        "b1": CancelledError
    }


def test_rounds_that_a_departed_client_did_not_receive_never_complete() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    for number in range(4):
        rounds.add_batch(element(number))
    rounds.request_received("a0", make_request(0, 0, 0), now=0.0)
    rounds.request_received("a wait", make_request(0, PROGRESS_REQUEST, 1, known=0), now=0.0)
    answers, departure = rounds.remove_client("client0")
    assert describe_replies(answers) == {"a wait": FailedPreconditionError}
    assert departure.unacknowledged == ()
    rounds.request_received("b0", make_request(1, PROGRESS_REQUEST, 2), now=0.0)
    assert describe_replies(
        rounds.request_received("b", make_request(1, PROGRESS_REQUEST, 2), now=0.0)
    ) == {"b": ("complete", 1)}


@pytest.mark.parametrize(
    ("elements", "consumers"), [(1000, 5), (1003, 5), (1000, 20), (4, 20), (0, 20)]
)
@pytest.mark.parametrize("seed", range(3))
def test_every_consumer_gets_its_elements_in_order_for_any_request_order(
    elements: int, consumers: int, seed: int
) -> None:
    chance = random.Random(seed)
    rounds: RoundDelivery[int] = RoundDelivery(consumers)
    produced = 0
    received: list[list[int]] = [[] for _ in range(consumers)]
    ended_consumers: set[int] = set()

    def take(answers: list[tuple[int, BatchReply]]) -> None:
        for consumer, answer in answers:
            if isinstance(answer, ResultBatch):
                assert answer.first_element == len(received[consumer])
                received[consumer].append(answer.size)
            elif isinstance(answer, GetElementsReply):
                assert answer.end_of_task
                ended_consumers.add(consumer)
            else:
                assert isinstance(answer, AbortedError)

    for _ in range(1_000_000):
        if len(ended_consumers) == consumers:
            break
        if chance.random() < 0.5 and rounds.has_room and produced < elements:
            take(rounds.add_batch(element(produced, size=produced)))
            produced += 1
            if produced == elements:
                take(rounds.note_exhausted(produced))
        elif not elements and not produced:
            produced = 1
            take(rounds.note_exhausted(0))
        else:
            consumer = chance.randrange(consumers)
            number = len(received[consumer])
            take(rounds.request_received(consumer, make_request(consumer, number, number), now=0.0))
        if rounds.can_finish:
            take(rounds.note_finished())
    assert len(ended_consumers) == consumers, f"seed {seed}"
    complete = elements // consumers
    for index, found in enumerate(received):
        assert found == [number * consumers + index for number in range(complete)]

"""Who gets which part of a round, and when a round is whole: requests in, answers out."""

from __future__ import annotations

import random

import pytest

from headrace.errors import AbortedError, CancelledError, FailedPreconditionError
from headrace.service.messages import PROGRESS_REQUEST, GetElements, GetElementsReply
from headrace.service.modes.coordinated_reads.round_delivery import RoundDelivery
from headrace.service.worker.delivery_policy import BufferLimits
from headrace.service.worker.result_batch import BatchReply, ResultBatch


def ask(
    consumer: int, number: int, received: int, *, known: int = -1, who: str = ""
) -> GetElements:
    return GetElements(
        task_id=1,
        task_token="token",
        client_id=who or f"client{consumer}",
        request_number=number,
        acknowledged=received,
        consumer_index=consumer,
        known_rounds=known,
    )


def element(number: int, *, size: int = 1) -> ResultBatch:
    """Return a portion of one element, which is one unit."""
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


def told(answers: list[tuple[str, BatchReply]]) -> dict[str, object]:
    """Return what each request was told: the element, or how many rounds are whole, or the end."""
    found: dict[str, object] = {}
    for request, answer in answers:
        if isinstance(answer, ResultBatch):
            # Element p is the only one of unit p.
            found[request] = answer.size if answer.error is None else "error"
        elif isinstance(answer, GetElementsReply):
            found[request] = (
                "end" if answer.end_of_task else ("whole", answer.mode_data.num_complete)
            )
        else:
            found[request] = type(answer)
    return found


def test_consumer_i_gets_the_ith_element_of_each_round_asked_before_or_after_it_is_made() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    assert rounds.request_received("a0", ask(0, 0, 0), now=0.0) == []
    assert rounds.request_received("c0", ask(2, 0, 0), now=0.0) == []
    assert rounds.add_batch(element(0, size=10)) == []
    assert rounds.add_batch(element(1, size=11)) == []
    assert told(rounds.add_batch(element(2, size=12))) == {"a0": 10, "c0": 12}
    assert told(rounds.request_received("b0", ask(1, 0, 0), now=0.0)) == {"b0": 11}


def test_units_count_with_the_round_as_a_whole_for_each_consumer_alike() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0))
    rounds.add_batch(element(1))
    for consumer in (0, 1):
        ((_, answer),) = rounds.request_received("x", ask(consumer, 0, 0), now=0.0)
        assert isinstance(answer, ResultBatch)
        assert (answer.first_element, answer.done_from, answer.done_to, answer.delivered_end) == (
            0,
            0,
            2,
            2,
        )


def test_a_round_is_whole_when_it_arrived_everywhere_and_then_those_who_wait_for_it_hear() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0))
    rounds.add_batch(element(1))
    rounds.request_received("a0", ask(0, 0, 0), now=0.0)
    rounds.request_received("b0", ask(1, 0, 0), now=0.0)
    assert rounds.request_received("a word", ask(0, PROGRESS_REQUEST, 1, known=0), now=0.0) == []
    assert told(
        rounds.request_received("b word", ask(1, PROGRESS_REQUEST, 1, known=0), now=0.0)
    ) == {
        "a word": ("whole", 1),
        "b word": ("whole", 1),
    }


def test_a_round_is_given_again_until_its_consumer_says_that_it_arrived() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0, size=10))
    rounds.add_batch(element(1, size=11))
    assert told(rounds.request_received("a", ask(0, 0, 0), now=0.0)) == {"a": 10}
    assert told(rounds.request_received("b", ask(1, 0, 0), now=0.0)) == {"b": 11}
    assert told(rounds.request_received("a again", ask(0, 0, 0), now=0.0)) == {"a again": 10}
    rounds.request_received("a1", ask(0, 1, 1), now=0.0)
    assert told(rounds.request_received("late", ask(0, 0, 1), now=0.0)) == {"late": AbortedError}


def test_a_request_that_is_repeated_takes_the_place_of_the_one_before() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(1)
    assert rounds.request_received("first", ask(0, 0, 0), now=0.0) == []
    assert told(rounds.request_received("second", ask(0, 0, 0), now=0.0)) == {"first": AbortedError}
    assert told(rounds.add_batch(element(0, size=7))) == {"second": 7}


def test_a_word_that_knows_nothing_is_answered_at_once_and_says_who_lags() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    ((_, nothing),) = rounds.request_received("x", ask(0, PROGRESS_REQUEST, 0), now=0.0)
    assert isinstance(nothing, GetElementsReply)
    assert nothing.mode_data.lagging_consumers == (), "the round is not made: nobody keeps it"
    for number in range(3):
        rounds.add_batch(element(number))
    rounds.request_received("a0", ask(0, 0, 0), now=0.0)
    ((_, lags),) = rounds.request_received("a word", ask(0, PROGRESS_REQUEST, 1), now=0.0)
    assert isinstance(lags, GetElementsReply)
    assert lags.mode_data.lagging_consumers == (1, 2)


def test_a_consumer_that_lags_stops_the_worker_after_some_rounds() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2, BufferLimits(ready_batches=2))
    made = 0
    while rounds.has_room and made < 100:
        rounds.add_batch(element(made))
        made += 1
    assert made == 4, "two rounds of two"
    rounds.request_received("a", ask(0, PROGRESS_REQUEST, 2), now=0.0)
    assert not rounds.has_room
    rounds.request_received("b", ask(1, PROGRESS_REQUEST, 1), now=0.0)
    assert rounds.has_room


def test_a_round_larger_than_all_room_is_made_whole() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2, BufferLimits(ready_bytes=10))
    assert rounds.has_room
    rounds.add_batch(element(0, size=100))
    assert rounds.has_room
    rounds.add_batch(element(1, size=100))
    assert not rounds.has_room


def test_an_error_keeps_its_place_in_the_round() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    rounds.add_batch(element(0, size=10))
    rounds.add_batch(failure(1))
    rounds.add_batch(element(2, size=12))
    answers = [
        told(rounds.request_received("x", ask(each, 0, 0), now=0.0))["x"] for each in range(3)
    ]
    assert answers == [10, "error", 12]


def test_elements_too_few_for_a_round_go_to_nobody_and_are_counted() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    for number in range(5):
        rounds.add_batch(element(number))
    rounds.note_exhausted(5)
    assert rounds.dropped_elements == 2
    for each in range(3):
        rounds.request_received("x", ask(each, 0, 0), now=0.0)
        rounds.request_received("y", ask(each, 1, 1), now=0.0)
    assert rounds.can_finish
    assert told(rounds.note_finished()) == {"y": "end"}
    assert rounds.is_fully_acknowledged


def test_an_error_at_the_end_reaches_every_consumer() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(3)
    rounds.add_batch(failure(0))
    rounds.note_exhausted()
    answers = [
        told(rounds.request_received("x", ask(each, 0, 0), now=0.0))["x"] for each in range(3)
    ]
    assert answers == ["error"] * 3


def test_the_task_may_finish_when_all_rounds_are_whole() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    rounds.add_batch(element(0))
    rounds.add_batch(element(1))
    rounds.note_exhausted(2)
    assert not rounds.can_finish
    rounds.request_received("a", ask(0, 1, 1), now=0.0)
    assert not rounds.can_finish
    rounds.request_received("b", ask(1, 1, 1), now=0.0)
    assert rounds.can_finish
    assert told(rounds.note_finished()) == {"a": "end", "b": "end"}
    assert told(rounds.request_received("late", ask(0, PROGRESS_REQUEST, 1, known=1), now=0.0)) == {
        "late": "end"
    }


def test_an_index_out_of_range_is_refused_and_both_numbers_are_named() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    ((_, refusal),) = rounds.request_received("x", ask(5, 0, 0), now=0.0)
    assert isinstance(refusal, FailedPreconditionError)
    assert "consumer index 5" in str(refusal)
    assert "only 2 consumers" in str(refusal)


def test_another_client_with_the_same_index_is_refused() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(1)
    rounds.request_received("x", ask(0, 0, 0), now=0.0)
    ((_, refusal),) = rounds.request_received("y", ask(0, 0, 0, who="another"), now=0.0)
    assert isinstance(refusal, FailedPreconditionError)
    assert "the current round has already reached 0" in str(refusal)
    assert "client0" in str(refusal)


def test_what_is_called_off_is_refused_but_for_rounds_of_which_something_was_given() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    for number in range(4):
        rounds.add_batch(element(number, size=10 + number))
    rounds.request_received("a0", ask(0, 0, 0), now=0.0)
    rounds.request_received("a2", ask(0, 2, 0), now=0.0)
    refused, left = rounds.cancel(CancelledError("the worker stops"))
    assert told(refused) == {"a2": CancelledError}
    assert left.elements == 2
    assert told(rounds.request_received("b0", ask(1, 0, 0), now=0.0)) == {"b0": 11}
    assert told(rounds.request_received("b1", ask(1, 1, 1), now=0.0)) == {"b1": CancelledError}


def test_no_round_that_a_client_which_is_gone_did_not_receive_becomes_whole() -> None:
    rounds: RoundDelivery[str] = RoundDelivery(2)
    for number in range(4):
        rounds.add_batch(element(number))
    rounds.request_received("a0", ask(0, 0, 0), now=0.0)
    rounds.request_received("a wait", ask(0, PROGRESS_REQUEST, 1, known=0), now=0.0)
    answers, departure = rounds.remove_client("client0")
    assert told(answers) == {"a wait": FailedPreconditionError}
    assert departure.unacknowledged == ()
    rounds.request_received("b0", ask(1, PROGRESS_REQUEST, 2), now=0.0)
    assert told(rounds.request_received("b", ask(1, PROGRESS_REQUEST, 2), now=0.0)) == {
        "b": ("whole", 1)
    }


@pytest.mark.parametrize(
    ("elements", "consumers"), [(1000, 5), (1003, 5), (1000, 20), (4, 20), (0, 20)]
)
@pytest.mark.parametrize("seed", range(3))
def test_whoever_asks_when_each_consumer_gets_its_elements_in_order(
    elements: int, consumers: int, seed: int
) -> None:
    chance = random.Random(seed)
    rounds: RoundDelivery[int] = RoundDelivery(consumers)
    made = 0
    received: list[list[int]] = [[] for _ in range(consumers)]
    over: set[int] = set()

    def take(answers: list[tuple[int, BatchReply]]) -> None:
        for consumer, answer in answers:
            if isinstance(answer, ResultBatch):
                assert answer.first_element == len(received[consumer])
                received[consumer].append(answer.size)
            elif isinstance(answer, GetElementsReply):
                assert answer.end_of_task
                over.add(consumer)
            else:
                assert isinstance(answer, AbortedError)

    for _ in range(1_000_000):
        if len(over) == consumers:
            break
        if chance.random() < 0.5 and rounds.has_room and made < elements:
            take(rounds.add_batch(element(made, size=made)))
            made += 1
            if made == elements:
                take(rounds.note_exhausted(made))
        elif not elements and not made:
            made = 1
            take(rounds.note_exhausted(0))
        else:
            consumer = chance.randrange(consumers)
            number = len(received[consumer])
            take(rounds.request_received(consumer, ask(consumer, number, number), now=0.0))
        if rounds.can_finish:
            take(rounds.note_finished())
    assert len(over) == consumers, f"seed {seed}"
    whole = elements // consumers
    for index, found in enumerate(received):
        assert found == [number * consumers + index for number in range(whole)]

"""Who gets which part of a round, and when a round is whole: requests in, answers out."""

from __future__ import annotations

import random

import pytest

from headrace.errors import AbortedError, CancelledError, FailedPreconditionError
from headrace.service.messages import PROGRESS_REQUEST, GetElements, GetElementsReply
from headrace.service.modes.coordinated_reads.delivery import Rounds
from headrace.service.worker.hand_out import Bounds
from headrace.service.worker.portion import Answer, Portion


def ask(
    consumer: int, number: int, received: int, *, known: int = -1, who: str = ""
) -> GetElements:
    return GetElements(
        task_id=1,
        ticket="ticket",
        client_id=who or f"client{consumer}",
        request_number=number,
        acknowledged=received,
        consumer_index=consumer,
        known_rounds=known,
    )


def element(number: int, *, size: int = 1) -> Portion:
    """Return a portion of one element, which is one unit."""
    return Portion(
        first=number, count=1, size=size, done_from=number, done_to=number + 1, touched=number + 1
    )


def failure(number: int) -> Portion:
    return Portion(
        first=number, error=ValueError("bad"), done_from=number, done_to=number + 1, touched=number
    )


def told(answers: list[tuple[str, Answer]]) -> dict[str, object]:
    """Return what each request was told: the element, or how many rounds are whole, or the end."""
    found: dict[str, object] = {}
    for request, answer in answers:
        if isinstance(answer, Portion):
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
    rounds: Rounds[str] = Rounds(3)
    assert rounds.ask("a0", ask(0, 0, 0), now=0.0) == []
    assert rounds.ask("c0", ask(2, 0, 0), now=0.0) == []
    assert rounds.add(element(0, size=10)) == []
    assert rounds.add(element(1, size=11)) == []
    assert told(rounds.add(element(2, size=12))) == {"a0": 10, "c0": 12}
    assert told(rounds.ask("b0", ask(1, 0, 0), now=0.0)) == {"b0": 11}


def test_units_count_with_the_round_as_a_whole_for_each_consumer_alike() -> None:
    rounds: Rounds[str] = Rounds(2)
    rounds.add(element(0))
    rounds.add(element(1))
    for consumer in (0, 1):
        ((_, answer),) = rounds.ask("x", ask(consumer, 0, 0), now=0.0)
        assert isinstance(answer, Portion)
        assert (answer.first, answer.done_from, answer.done_to, answer.touched) == (0, 0, 2, 2)


def test_a_round_is_whole_when_it_arrived_everywhere_and_then_those_who_wait_for_it_hear() -> None:
    rounds: Rounds[str] = Rounds(2)
    rounds.add(element(0))
    rounds.add(element(1))
    rounds.ask("a0", ask(0, 0, 0), now=0.0)
    rounds.ask("b0", ask(1, 0, 0), now=0.0)
    assert rounds.ask("a word", ask(0, PROGRESS_REQUEST, 1, known=0), now=0.0) == []
    assert told(rounds.ask("b word", ask(1, PROGRESS_REQUEST, 1, known=0), now=0.0)) == {
        "a word": ("whole", 1),
        "b word": ("whole", 1),
    }


def test_a_round_is_given_again_until_its_consumer_says_that_it_arrived() -> None:
    rounds: Rounds[str] = Rounds(2)
    rounds.add(element(0, size=10))
    rounds.add(element(1, size=11))
    assert told(rounds.ask("a", ask(0, 0, 0), now=0.0)) == {"a": 10}
    assert told(rounds.ask("b", ask(1, 0, 0), now=0.0)) == {"b": 11}
    assert told(rounds.ask("a again", ask(0, 0, 0), now=0.0)) == {"a again": 10}
    rounds.ask("a1", ask(0, 1, 1), now=0.0)
    assert told(rounds.ask("late", ask(0, 0, 1), now=0.0)) == {"late": AbortedError}


def test_a_request_that_is_repeated_takes_the_place_of_the_one_before() -> None:
    rounds: Rounds[str] = Rounds(1)
    assert rounds.ask("first", ask(0, 0, 0), now=0.0) == []
    assert told(rounds.ask("second", ask(0, 0, 0), now=0.0)) == {"first": AbortedError}
    assert told(rounds.add(element(0, size=7))) == {"second": 7}


def test_a_word_that_knows_nothing_is_answered_at_once_and_says_who_lags() -> None:
    rounds: Rounds[str] = Rounds(3)
    ((_, nothing),) = rounds.ask("x", ask(0, PROGRESS_REQUEST, 0), now=0.0)
    assert isinstance(nothing, GetElementsReply)
    assert nothing.mode_data.lagging_consumers == (), "the round is not made: nobody keeps it"
    for number in range(3):
        rounds.add(element(number))
    rounds.ask("a0", ask(0, 0, 0), now=0.0)
    ((_, lags),) = rounds.ask("a word", ask(0, PROGRESS_REQUEST, 1), now=0.0)
    assert isinstance(lags, GetElementsReply)
    assert lags.mode_data.lagging_consumers == (1, 2)


def test_a_consumer_that_lags_stops_the_worker_after_some_rounds() -> None:
    rounds: Rounds[str] = Rounds(2, Bounds(ready_portions=2))
    made = 0
    while rounds.has_room and made < 100:
        rounds.add(element(made))
        made += 1
    assert made == 4, "two rounds of two"
    rounds.ask("a", ask(0, PROGRESS_REQUEST, 2), now=0.0)
    assert not rounds.has_room
    rounds.ask("b", ask(1, PROGRESS_REQUEST, 1), now=0.0)
    assert rounds.has_room


def test_a_round_larger_than_all_room_is_made_whole() -> None:
    rounds: Rounds[str] = Rounds(2, Bounds(ready_bytes=10))
    assert rounds.has_room
    rounds.add(element(0, size=100))
    assert rounds.has_room
    rounds.add(element(1, size=100))
    assert not rounds.has_room


def test_an_error_keeps_its_place_in_the_round() -> None:
    rounds: Rounds[str] = Rounds(3)
    rounds.add(element(0, size=10))
    rounds.add(failure(1))
    rounds.add(element(2, size=12))
    answers = [told(rounds.ask("x", ask(each, 0, 0), now=0.0))["x"] for each in range(3)]
    assert answers == [10, "error", 12]


def test_elements_too_few_for_a_round_go_to_nobody_and_are_counted() -> None:
    rounds: Rounds[str] = Rounds(3)
    for number in range(5):
        rounds.add(element(number))
    rounds.exhaust(5)
    assert rounds.dropped == 2
    for each in range(3):
        rounds.ask("x", ask(each, 0, 0), now=0.0)
        rounds.ask("y", ask(each, 1, 1), now=0.0)
    assert rounds.may_finish
    assert told(rounds.finish()) == {"y": "end"}
    assert rounds.is_settled


def test_an_error_at_the_end_reaches_every_consumer() -> None:
    rounds: Rounds[str] = Rounds(3)
    rounds.add(failure(0))
    rounds.exhaust()
    answers = [told(rounds.ask("x", ask(each, 0, 0), now=0.0))["x"] for each in range(3)]
    assert answers == ["error"] * 3


def test_the_task_may_finish_when_all_rounds_are_whole() -> None:
    rounds: Rounds[str] = Rounds(2)
    rounds.add(element(0))
    rounds.add(element(1))
    rounds.exhaust(2)
    assert not rounds.may_finish
    rounds.ask("a", ask(0, 1, 1), now=0.0)
    assert not rounds.may_finish
    rounds.ask("b", ask(1, 1, 1), now=0.0)
    assert rounds.may_finish
    assert told(rounds.finish()) == {"a": "end", "b": "end"}
    assert told(rounds.ask("late", ask(0, PROGRESS_REQUEST, 1, known=1), now=0.0)) == {
        "late": "end"
    }


def test_an_index_out_of_range_is_refused_and_both_numbers_are_named() -> None:
    rounds: Rounds[str] = Rounds(2)
    ((_, refusal),) = rounds.ask("x", ask(5, 0, 0), now=0.0)
    assert isinstance(refusal, FailedPreconditionError)
    assert "consumer index 5" in str(refusal)
    assert "only 2 consumers" in str(refusal)


def test_another_client_with_the_same_index_is_refused() -> None:
    rounds: Rounds[str] = Rounds(1)
    rounds.ask("x", ask(0, 0, 0), now=0.0)
    ((_, refusal),) = rounds.ask("y", ask(0, 0, 0, who="another"), now=0.0)
    assert isinstance(refusal, FailedPreconditionError)
    assert "the current round has already reached 0" in str(refusal)
    assert "client0" in str(refusal)


def test_what_is_called_off_is_refused_but_for_rounds_of_which_something_was_given() -> None:
    rounds: Rounds[str] = Rounds(2)
    for number in range(4):
        rounds.add(element(number, size=10 + number))
    rounds.ask("a0", ask(0, 0, 0), now=0.0)
    rounds.ask("a2", ask(0, 2, 0), now=0.0)
    refused, left = rounds.call_off(CancelledError("the worker stops"))
    assert told(refused) == {"a2": CancelledError}
    assert left.elements == 2
    assert told(rounds.ask("b0", ask(1, 0, 0), now=0.0)) == {"b0": 11}
    assert told(rounds.ask("b1", ask(1, 1, 1), now=0.0)) == {"b1": CancelledError}


def test_no_round_that_a_client_which_is_gone_did_not_receive_becomes_whole() -> None:
    rounds: Rounds[str] = Rounds(2)
    for number in range(4):
        rounds.add(element(number))
    rounds.ask("a0", ask(0, 0, 0), now=0.0)
    rounds.ask("a wait", ask(0, PROGRESS_REQUEST, 1, known=0), now=0.0)
    answers, departure = rounds.depart("client0")
    assert told(answers) == {"a wait": FailedPreconditionError}
    assert departure.units == ()
    rounds.ask("b0", ask(1, PROGRESS_REQUEST, 2), now=0.0)
    assert told(rounds.ask("b", ask(1, PROGRESS_REQUEST, 2), now=0.0)) == {"b": ("whole", 1)}


@pytest.mark.parametrize(
    ("elements", "consumers"), [(1000, 5), (1003, 5), (1000, 20), (4, 20), (0, 20)]
)
@pytest.mark.parametrize("seed", range(3))
def test_whoever_asks_when_each_consumer_gets_its_elements_in_order(
    elements: int, consumers: int, seed: int
) -> None:
    chance = random.Random(seed)
    rounds: Rounds[int] = Rounds(consumers)
    made = 0
    received: list[list[int]] = [[] for _ in range(consumers)]
    over: set[int] = set()

    def take(answers: list[tuple[int, Answer]]) -> None:
        for consumer, answer in answers:
            if isinstance(answer, Portion):
                assert answer.first == len(received[consumer])
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
            take(rounds.add(element(made, size=made)))
            made += 1
            if made == elements:
                take(rounds.exhaust(made))
        elif not elements and not made:
            made = 1
            take(rounds.exhaust(0))
        else:
            consumer = chance.randrange(consumers)
            number = len(received[consumer])
            take(rounds.ask(consumer, ask(consumer, number, number), now=0.0))
        if rounds.may_finish:
            take(rounds.finish())
    assert len(over) == consumers, f"seed {seed}"
    whole = elements // consumers
    for index, found in enumerate(received):
        assert found == [number * consumers + index for number in range(whole)]

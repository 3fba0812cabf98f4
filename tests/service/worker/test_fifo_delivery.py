"""Who gets which portion, and when a task is over: requests and times in, answers out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import AbortedError, CancelledError, DeadlineExceededError
from headrace.service.messages import GetElements, GetElementsReply
from headrace.service.worker.delivery_policy import BufferLimits
from headrace.service.worker.fifo_delivery import FifoDelivery
from headrace.service.worker.result_batch import BatchReply, ResultBatch


def message(client_id: str, number: int, acknowledged: int) -> GetElements:
    return GetElements(
        task_id=1,
        task_token="token",
        client_id=client_id,
        request_number=number,
        acknowledged=acknowledged,
    )


def portion(number: int, *, size: int = 1, ahead: int = 0) -> ResultBatch:
    """Return a portion of one element, which is one unit."""
    return ResultBatch(
        first_element=number,
        num_elements=1,
        size=size,
        done_from=number,
        done_to=number + 1,
        delivered_end=number + 1 + ahead,
    )


def ends(answers: list[tuple[str, BatchReply]]) -> dict[str, bool]:
    """Return who was told that nothing is left, and whether for good."""
    found = {}
    for request, content in answers:
        assert isinstance(content, GetElementsReply)
        assert content.num_elements == 0
        found[request] = content.end_of_task
    return found


def test_portions_go_to_who_has_waited_longest() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    assert policy.request_received("a0", message("a", 0, 0), now=0.0) == []
    assert policy.request_received("b0", message("b", 0, 0), now=1.0) == []

    assert policy.add_batch(portion(0)) == [("a0", portion(0))]
    assert policy.add_batch(portion(1)) == [("b0", portion(1))]


def test_a_portion_that_nobody_asked_for_waits_for_the_next_request() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    assert policy.add_batch(portion(0)) == []

    assert policy.request_received("a0", message("a", 0, 0), now=0.0) == [("a0", portion(0))]


def test_a_request_asked_again_takes_the_place_of_the_first() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("first", message("a", 0, 0), now=0.0)

    ((request, content),) = policy.request_received("again", message("a", 0, 0), now=1.0)

    assert request == "first"
    assert isinstance(content, AbortedError)
    assert policy.add_batch(portion(0)) == [("again", portion(0))]
    assert policy.request_received("third", message("a", 0, 0), now=2.0) == [("third", portion(0))]


def test_portions_that_nobody_asks_for_are_bounded_in_number_and_bytes() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(ready_batches=3, ready_bytes=100))
    policy.add_batch(portion(0, size=60))
    assert policy.has_room
    policy.add_batch(portion(1, size=60))
    assert not policy.has_room

    policy.request_received("a0", message("a", 0, 0), now=0.0)
    assert policy.has_room


def test_a_client_that_acknowledges_nothing_is_given_no_more_than_its_bytes() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_bytes=100))
    for number in range(3):
        policy.request_received(f"a{number}", message("a", number, 0), now=0.0)

    assert policy.add_batch(portion(0, size=90)) == [("a0", portion(0, size=90))]
    assert policy.add_batch(portion(1, size=90)) == [("a1", portion(1, size=90))]
    assert policy.add_batch(portion(2, size=90)) == []
    # Another client is served meanwhile, and the first again once it has acknowledged something.
    assert policy.request_received("b0", message("b", 0, 0), now=0.0) == [
        ("b0", portion(2, size=90))
    ]
    policy.add_batch(portion(3, size=90))
    assert policy.request_received("a3", message("a", 3, 1), now=1.0) == [
        ("a2", portion(3, size=90))
    ]


def test_a_client_may_always_hold_two_portions_however_large() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_bytes=1))
    for number in range(2):
        policy.request_received(f"a{number}", message("a", number, 0), now=0.0)

    assert policy.add_batch(portion(0, size=1000)) == [("a0", portion(0, size=1000))]
    assert policy.add_batch(portion(1, size=1000)) == [("a1", portion(1, size=1000))]


def test_when_all_clients_together_hold_too_much_each_may_hold_one() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(total_bytes=150))
    for client in "abc":
        policy.request_received(f"{client}0", message(client, 0, 0), now=0.0)
        policy.request_received(f"{client}1", message(client, 1, 0), now=0.0)

    got = [answer for n in range(6) for answer, _ in policy.add_batch(portion(n, size=100))]

    assert got == ["a0", "a1", "b0", "c0"]


def test_what_a_silent_client_holds_is_dropped_and_it_hears_of_it() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_timeout=10.0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(portion(0))

    assert policy.drop_expired(now=10.0) == ([], 0)
    assert policy.drop_expired(now=10.1) == ([], 1)

    ((_, content),) = policy.request_received("a0 again", message("a", 0, 0), now=11.0)
    assert isinstance(content, DeadlineExceededError)
    assert "sent no request for 10 s" in str(content)
    policy.add_batch(portion(1))
    assert policy.request_received("a1", message("a", 1, 1), now=12.0) == [("a1", portion(1))]


def test_the_end_waits_until_the_only_client_has_acknowledged_everything() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.add_batch(portion(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    assert policy.note_exhausted(1) == []
    assert ends(policy.request_received("a1", message("a", 1, 0), now=0.0)) == {"a1": False}
    assert not policy.can_finish

    assert policy.request_received("a2", message("a", 2, 2), now=0.0) == []
    assert policy.can_finish
    assert policy.is_fully_acknowledged
    assert ends(policy.note_finished()) == {"a2": True}


def test_each_of_several_clients_gets_the_end_once_it_has_acknowledged_its_own() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.add_batch(portion(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.note_exhausted(1)
    policy.request_received("b0", message("b", 0, 0), now=0.0)
    assert policy.can_finish

    assert ends(policy.note_finished()) == {"b0": True}
    assert not policy.is_fully_acknowledged
    assert ends(policy.request_received("a1", message("a", 1, 0), now=0.0)) == {"a1": False}
    assert ends(policy.request_received("a2", message("a", 2, 2), now=0.0)) == {"a2": True}
    assert policy.is_fully_acknowledged


def test_units_count_as_done_only_when_all_before_them_are() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    for number, client in enumerate("ab"):
        policy.add_batch(portion(number))
        policy.request_received(f"{client}0", message(client, 0, 0), now=0.0)

    policy.request_received("b1", message("b", 1, 1), now=0.0)
    assert policy.completed_splits == ()
    policy.request_received("a1", message("a", 1, 1), now=0.0)
    assert policy.completed_splits == ((0, 2),)


def test_a_unit_is_not_done_while_a_portion_with_a_part_of_it_is_unacknowledged() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    part = ResultBatch(first_element=0, num_elements=1, delivered_end=1)
    rest = ResultBatch(first_element=1, num_elements=1, done_from=0, done_to=1)
    for number, (client, content) in enumerate(zip("ab", (part, rest), strict=True)):
        policy.add_batch(content)
        policy.request_received(f"{client}{number}", message(client, 0, 0), now=0.0)

    policy.request_received("b1", message("b", 1, 1), now=0.0)
    assert policy.completed_splits == ()
    policy.request_received("a1", message("a", 1, 1), now=0.0)
    assert policy.completed_splits == ((0, 1),)


def test_of_a_client_that_is_gone_units_that_went_to_it_alone_are_told_from_others() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    for number, client in enumerate("ababb"):
        policy.request_received(f"{client}{number}", message(client, number, 0), now=0.0)
    policy.add_batch(portion(0))
    policy.add_batch(portion(1))
    # Unit 2 has two elements: one for a, one for b. Unit 3 begins and ends with b.
    policy.add_batch(
        ResultBatch(first_element=2, num_elements=1, done_from=2, done_to=2, delivered_end=3)
    )
    policy.add_batch(
        ResultBatch(first_element=3, num_elements=2, done_from=2, done_to=3, delivered_end=4)
    )
    policy.add_batch(
        ResultBatch(first_element=5, num_elements=1, done_from=3, done_to=4, delivered_end=4)
    )

    _, departure = policy.remove_client("b")

    assert departure.unacknowledged == ((1, 2), (3, 4))
    assert departure.possibly_lost == ((2, 3),)
    assert policy.remove_client("b")[1] == departure
    _, departure = policy.remove_client("a")
    assert (departure.unacknowledged, departure.possibly_lost) == (((0, 1),), ((2, 3),))


def test_what_was_acknowledged_is_known_unit_by_unit_whoever_has_the_others() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    for number, client in enumerate("abab"):
        policy.request_received(f"{client}{number}", message(client, number, 0), now=0.0)
    assert policy.acknowledged_splits == ((), ())
    policy.add_batch(portion(0))
    # Unit 1 has two elements, one for b and one for a, and so has unit 2.
    policy.add_batch(
        ResultBatch(first_element=1, num_elements=1, done_from=1, done_to=1, delivered_end=2)
    )
    policy.add_batch(
        ResultBatch(first_element=2, num_elements=2, done_from=1, done_to=2, delivered_end=3)
    )
    policy.add_batch(
        ResultBatch(first_element=4, num_elements=1, done_from=2, done_to=3, delivered_end=3)
    )
    assert policy.acknowledged_splits == ((), ())
    policy.request_received("b4", message("b", 4, 4), now=0.0)
    assert policy.acknowledged_splits == ((), ((1, 3),)), "b has one element of each"
    policy.request_received("a5", message("a", 5, 3), now=0.0)
    assert policy.acknowledged_splits == (((0, 3),), ((0, 3),))


def test_a_client_that_is_gone_gets_nothing_more() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.request_received("b0", message("b", 0, 0), now=0.0)

    ((request, content),), departure = policy.remove_client("a")

    assert request == "a0"
    assert isinstance(content, CancelledError)
    assert (departure.unacknowledged, departure.possibly_lost) == ((), ())
    assert policy.add_batch(portion(0)) == [("b0", portion(0))]
    ((_, content),) = policy.request_received("a1", message("a", 1, 1), now=0.0)
    assert "client a closed its iteration" in str(content)


def test_what_a_client_that_is_gone_held_is_not_done_before_the_dispatcher_has_heard_it() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(portion(0))
    policy.note_exhausted(1)
    policy.remove_client("a")
    assert (policy.completed_splits, policy.can_finish) == ((), False)

    policy.forget_client("a")

    assert (policy.completed_splits, policy.can_finish) == (((0, 1),), True)


def test_what_a_silent_client_held_holds_up_no_units() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_timeout=10.0))
    policy.add_batch(portion(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    assert policy.completed_splits == ()
    policy.drop_expired(now=20.0)
    assert policy.completed_splits == ((0, 1),)


def test_units_without_elements_are_done_with_the_end() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.add_batch(portion(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.note_exhausted(5)
    assert policy.completed_splits == ()

    policy.request_received("a1", message("a", 1, 1), now=0.0)
    assert policy.completed_splits == ((0, 5),)
    ((_, content),) = policy.note_finished()
    assert isinstance(content, GetElementsReply)
    assert (content.done_from, content.done_to, content.delivered_end) == (1, 5, 5)


@pytest.mark.parametrize(("ahead", "touched"), [(0, 1), (1, 2), (5, 6)])
def test_nothing_that_was_given_in_part_is_left_when_a_task_is_called_off(
    ahead: int, touched: int
) -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(portion(0, ahead=ahead))
    policy.add_batch(portion(1))
    policy.add_batch(portion(2))

    answers, left = policy.cancel(CancelledError("the worker stops"))

    assert answers == []
    assert (left.elements, left.unacknowledged, left.delivered_splits) == (2, 1, ((0, touched),))


def test_a_task_that_is_called_off_refuses_all_but_what_was_given_before() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(portion(0))
    policy.request_received("a1", message("a", 1, 0), now=0.0)
    refusal = CancelledError("the worker stops")

    answers, _ = policy.cancel(refusal)

    assert answers == [("a1", refusal)]
    assert policy.request_received("a0 again", message("a", 0, 0), now=1.0) == [
        ("a0 again", portion(0))
    ]
    assert policy.request_received("a2", message("a", 2, 0), now=1.0) == [("a2", refusal)]
    assert policy.add_batch(portion(1)) == []


_EVENTS = st.lists(
    st.one_of(
        st.just("portion"),
        st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 6)),
    ),
    max_size=40,
)


@given(_EVENTS, st.integers(1, 400), st.integers(1, 400))
def test_each_portion_has_one_taker_and_bytes_stay_within_bounds(
    events: list[str | tuple[str, int, int]], client_bytes: int, total_bytes: int
) -> None:
    size = 100
    policy: FifoDelivery[tuple[str, int]] = FifoDelivery(
        BufferLimits(client_bytes=client_bytes, total_bytes=total_bytes)
    )
    takers: dict[int, tuple[str, int]] = {}
    order: list[int] = []
    held: dict[str, dict[int, int]] = {client: {} for client in "abc"}
    made = 0
    for event in events:
        if event == "portion":
            if not policy.has_room:
                continue
            answers = policy.add_batch(portion(made, size=size))
            made += 1
        else:
            assert not isinstance(event, str)
            client, number, acknowledged = event
            held[client] = {n: s for n, s in held[client].items() if n >= acknowledged}
            answers = policy.request_received(
                (client, number), message(client, number, acknowledged), now=0.0
            )
        for request, content in answers:
            if not isinstance(content, ResultBatch):
                continue
            assert takers.setdefault(content.first_element, request) == request
            if content.first_element not in order:
                order.append(content.first_element)
            held[request[0]][request[1]] = size
    assert order == sorted(order)
    for sizes in held.values():
        assert sum(sizes.values()) < client_bytes + size or len(sizes) <= 2
    assert sum(sum(s.values()) for s in held.values()) < total_bytes + 3 * size


def counted(client_id: str, number: int, acknowledged: int, most: int) -> GetElements:
    return msgspec.structs.replace(message(client_id, number, acknowledged), max_elements=most)


def test_where_a_client_counts_elements_portions_are_made_for_requests_that_wait() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", counted("a", 0, 0, most=4), now=0.0)
    assert policy.has_room
    assert policy.max_batch_elements == 4
    policy.add_batch(portion(0))
    assert not policy.has_room
    policy.request_received("a1", counted("a", 1, 0, most=4), now=0.0)
    policy.request_received("b0", counted("b", 0, 0, most=2), now=0.0)
    assert policy.has_room
    assert policy.max_batch_elements == 2
    policy.add_batch(portion(1))
    policy.add_batch(portion(2))
    assert not policy.has_room
    assert policy.max_batch_elements is None

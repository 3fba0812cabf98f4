"""FIFO delivery: which request receives which batch, and when a task is finished."""

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


def batch(number: int, *, size: int = 1, ahead: int = 0) -> ResultBatch:
    """Return a batch of one split with one element."""
    return ResultBatch(
        first_element=number,
        num_elements=1,
        size=size,
        done_from=number,
        done_to=number + 1,
        delivered_end=number + 1 + ahead,
    )


def ends(answers: list[tuple[str, BatchReply]]) -> dict[str, bool]:
    """Return `end_of_task` of each empty reply, by request."""
    found = {}
    for request, content in answers:
        assert isinstance(content, GetElementsReply)
        assert content.num_elements == 0
        found[request] = content.end_of_task
    return found


def test_batches_go_to_the_longest_waiting_request() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    assert policy.request_received("a0", message("a", 0, 0), now=0.0) == []
    assert policy.request_received("b0", message("b", 0, 0), now=1.0) == []

    assert policy.add_batch(batch(0)) == [("a0", batch(0))]
    assert policy.add_batch(batch(1)) == [("b0", batch(1))]


def test_a_batch_without_a_request_waits_for_the_next_one() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    assert policy.add_batch(batch(0)) == []

    assert policy.request_received("a0", message("a", 0, 0), now=0.0) == [("a0", batch(0))]


def test_a_repeated_request_replaces_the_first() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("first", message("a", 0, 0), now=0.0)

    ((request, content),) = policy.request_received("again", message("a", 0, 0), now=1.0)

    assert request == "first"
    assert isinstance(content, AbortedError)
    assert policy.add_batch(batch(0)) == [("again", batch(0))]
    assert policy.request_received("third", message("a", 0, 0), now=2.0) == [("third", batch(0))]


def test_batches_without_a_request_are_bounded_in_number_and_bytes() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(ready_batches=3, ready_bytes=100))
    policy.add_batch(batch(0, size=60))
    assert policy.has_room
    policy.add_batch(batch(1, size=60))
    assert not policy.has_room

    policy.request_received("a0", message("a", 0, 0), now=0.0)
    assert policy.has_room


def test_unacknowledged_bytes_per_client_are_bounded() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_bytes=100))
    for number in range(3):
        policy.request_received(f"a{number}", message("a", number, 0), now=0.0)

    assert policy.add_batch(batch(0, size=90)) == [("a0", batch(0, size=90))]
    assert policy.add_batch(batch(1, size=90)) == [("a1", batch(1, size=90))]
    assert policy.add_batch(batch(2, size=90)) == []
    # Another client is served, and the first one again after an acknowledgement.
    assert policy.request_received("b0", message("b", 0, 0), now=0.0) == [("b0", batch(2, size=90))]
    policy.add_batch(batch(3, size=90))
    assert policy.request_received("a3", message("a", 3, 1), now=1.0) == [("a2", batch(3, size=90))]


def test_a_client_may_always_hold_two_batches() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_bytes=1))
    for number in range(2):
        policy.request_received(f"a{number}", message("a", number, 0), now=0.0)

    assert policy.add_batch(batch(0, size=1000)) == [("a0", batch(0, size=1000))]
    assert policy.add_batch(batch(1, size=1000)) == [("a1", batch(1, size=1000))]


def test_each_client_may_hold_one_batch_above_the_total_limit() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(total_bytes=150))
    for client in "abc":
        policy.request_received(f"{client}0", message(client, 0, 0), now=0.0)
        policy.request_received(f"{client}1", message(client, 1, 0), now=0.0)

    got = [answer for n in range(6) for answer, _ in policy.add_batch(batch(n, size=100))]

    assert got == ["a0", "a1", "b0", "c0"]


def test_dropped_batches_of_a_silent_client_fail_its_repeated_request() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_timeout=10.0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(batch(0))

    assert policy.drop_expired(now=10.0) == ([], 0)
    assert policy.drop_expired(now=10.1) == ([], 1)

    ((_, content),) = policy.request_received("a0 again", message("a", 0, 0), now=11.0)
    assert isinstance(content, DeadlineExceededError)
    assert "sent no request for 10 s" in str(content)
    policy.add_batch(batch(1))
    assert policy.request_received("a1", message("a", 1, 1), now=12.0) == [("a1", batch(1))]


def test_the_end_waits_until_the_only_client_has_acknowledged_everything() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.add_batch(batch(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    assert policy.note_exhausted(1) == []
    assert ends(policy.request_received("a1", message("a", 1, 0), now=0.0)) == {"a1": False}
    assert not policy.can_finish

    assert policy.request_received("a2", message("a", 2, 2), now=0.0) == []
    assert policy.can_finish
    assert policy.is_fully_acknowledged
    assert ends(policy.note_finished()) == {"a2": True}


def test_each_client_receives_the_end_after_its_own_acknowledgement() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.add_batch(batch(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.note_exhausted(1)
    policy.request_received("b0", message("b", 0, 0), now=0.0)
    assert policy.can_finish

    assert ends(policy.note_finished()) == {"b0": True}
    assert not policy.is_fully_acknowledged
    assert ends(policy.request_received("a1", message("a", 1, 0), now=0.0)) == {"a1": False}
    assert ends(policy.request_received("a2", message("a", 2, 2), now=0.0)) == {"a2": True}
    assert policy.is_fully_acknowledged


def test_splits_are_complete_only_after_all_earlier_ones() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    for number, client in enumerate("ab"):
        policy.add_batch(batch(number))
        policy.request_received(f"{client}0", message(client, 0, 0), now=0.0)

    policy.request_received("b1", message("b", 1, 1), now=0.0)
    assert policy.completed_splits == ()
    policy.request_received("a1", message("a", 1, 1), now=0.0)
    assert policy.completed_splits == ((0, 2),)


def test_a_split_is_incomplete_while_any_batch_of_it_is_unacknowledged() -> None:
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


def test_splits_sent_only_to_a_departed_client_are_reported_separately() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    for number, client in enumerate("ababb"):
        policy.request_received(f"{client}{number}", message(client, number, 0), now=0.0)
    policy.add_batch(batch(0))
    policy.add_batch(batch(1))
    # Split 2 has two elements, one sent to a and one to b. Split 3 is sent to b only.
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


def test_acknowledged_splits_are_tracked_individually() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    for number, client in enumerate("abab"):
        policy.request_received(f"{client}{number}", message(client, number, 0), now=0.0)
    assert policy.acknowledged_splits == ((), ())
    policy.add_batch(batch(0))
    # Splits 1 and 2 have two elements each, one sent to b and one to a.
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
    assert policy.acknowledged_splits == ((), ((1, 3),)), "b received one element of each"
    policy.request_received("a5", message("a", 5, 3), now=0.0)
    assert policy.acknowledged_splits == (((0, 3),), ((0, 3),))


def test_a_departed_client_receives_nothing_more() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.request_received("b0", message("b", 0, 0), now=0.0)

    ((request, content),), departure = policy.remove_client("a")

    assert request == "a0"
    assert isinstance(content, CancelledError)
    assert (departure.unacknowledged, departure.possibly_lost) == ((), ())
    assert policy.add_batch(batch(0)) == [("b0", batch(0))]
    ((_, content),) = policy.request_received("a1", message("a", 1, 1), now=0.0)
    assert "client a closed its iteration" in str(content)


def test_splits_of_a_departed_client_are_incomplete_until_it_is_reported() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(batch(0))
    policy.note_exhausted(1)
    policy.remove_client("a")
    assert (policy.completed_splits, policy.can_finish) == ((), False)

    policy.forget_client("a")

    assert (policy.completed_splits, policy.can_finish) == (((0, 1),), True)


def test_dropped_batches_of_a_silent_client_count_as_complete() -> None:
    policy: FifoDelivery[str] = FifoDelivery(BufferLimits(client_timeout=10.0))
    policy.add_batch(batch(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    assert policy.completed_splits == ()
    policy.drop_expired(now=20.0)
    assert policy.completed_splits == ((0, 1),)


def test_splits_without_elements_are_complete_with_the_end() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.add_batch(batch(0))
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.note_exhausted(5)
    assert policy.completed_splits == ()

    policy.request_received("a1", message("a", 1, 1), now=0.0)
    assert policy.completed_splits == ((0, 5),)
    ((_, content),) = policy.note_finished()
    assert isinstance(content, GetElementsReply)
    assert (content.done_from, content.done_to, content.delivered_end) == (1, 5, 5)


@pytest.mark.parametrize(("ahead", "delivered_end"), [(0, 1), (1, 2), (5, 6)])
def test_partly_delivered_splits_are_not_returned_on_cancellation(
    ahead: int, delivered_end: int
) -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(batch(0, ahead=ahead))
    policy.add_batch(batch(1))
    policy.add_batch(batch(2))

    answers, undelivered = policy.cancel(CancelledError("shutting down"))

    assert answers == []
    assert (undelivered.elements, undelivered.unacknowledged, undelivered.delivered_splits) == (
        2,
        1,
        ((0, delivered_end),),
    )


def test_a_cancelled_task_only_repeats_batches_sent_before() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", message("a", 0, 0), now=0.0)
    policy.add_batch(batch(0))
    policy.request_received("a1", message("a", 1, 0), now=0.0)
    refusal = CancelledError("shutting down")

    answers, _ = policy.cancel(refusal)

    assert answers == [("a1", refusal)]
    assert policy.request_received("a0 again", message("a", 0, 0), now=1.0) == [
        ("a0 again", batch(0))
    ]
    assert policy.request_received("a2", message("a", 2, 0), now=1.0) == [("a2", refusal)]
    assert policy.add_batch(batch(1)) == []


_EVENTS = st.lists(
    st.one_of(
        st.just("batch"),
        st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 6)),
    ),
    max_size=40,
)


@given(_EVENTS, st.integers(1, 400), st.integers(1, 400))
def test_each_batch_goes_to_one_request_and_bytes_stay_bounded(
    events: list[str | tuple[str, int, int]], client_bytes: int, total_bytes: int
) -> None:
    size = 100
    policy: FifoDelivery[tuple[str, int]] = FifoDelivery(
        BufferLimits(client_bytes=client_bytes, total_bytes=total_bytes)
    )
    receivers: dict[int, tuple[str, int]] = {}
    order: list[int] = []
    held: dict[str, dict[int, int]] = {client: {} for client in "abc"}
    made = 0
    for event in events:
        if event == "batch":
            if not policy.has_room:
                continue
            answers = policy.add_batch(batch(made, size=size))
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
            assert receivers.setdefault(content.first_element, request) == request
            if content.first_element not in order:
                order.append(content.first_element)
            held[request[0]][request[1]] = size
    assert order == sorted(order)
    for sizes in held.values():
        assert sum(sizes.values()) < client_bytes + size or len(sizes) <= 2
    assert sum(sum(s.values()) for s in held.values()) < total_bytes + 3 * size


def counted(client_id: str, number: int, acknowledged: int, max_elements: int) -> GetElements:
    return msgspec.structs.replace(
        message(client_id, number, acknowledged), max_elements=max_elements
    )


def test_with_element_limits_batches_are_made_only_for_waiting_requests() -> None:
    policy: FifoDelivery[str] = FifoDelivery()
    policy.request_received("a0", counted("a", 0, 0, max_elements=4), now=0.0)
    assert policy.has_room
    assert policy.max_batch_elements == 4
    policy.add_batch(batch(0))
    assert not policy.has_room
    policy.request_received("a1", counted("a", 1, 0, max_elements=4), now=0.0)
    policy.request_received("b0", counted("b", 0, 0, max_elements=2), now=0.0)
    assert policy.has_room
    assert policy.max_batch_elements == 2
    policy.add_batch(batch(1))
    policy.add_batch(batch(2))
    assert not policy.has_room
    assert policy.max_batch_elements is None

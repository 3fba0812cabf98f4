"""Splits that a client received completely."""

from __future__ import annotations

import random

import msgspec
import pytest

from headrace.service.client.delivery_record import DeliveryRecord
from headrace.service.messages import ElementIds, GetElementsReply


def answer(
    first: int, count: int, done: tuple[int, int], touched: int, begun: int = 0
) -> GetElementsReply:
    return GetElementsReply(
        first_element=first,
        num_elements=count,
        end_of_task=False,
        done_from=done[0],
        done_to=done[1],
        delivered_end=touched,
        earlier_delivered_end=begun,
    )


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], ()),
        ([(0, 0)], ()),
        ([(0, 2), (2, 5)], ((0, 5),)),
        ([(0, 2), (3, 5), (5, 5), (5, 6)], ((0, 2), (3, 6))),
    ],
)
def test_adjacent_runs_are_joined(
    pairs: list[tuple[int, int]], runs: tuple[tuple[int, int], ...]
) -> None:
    record = DeliveryRecord()
    for start, stop in pairs:
        record.add_reply(answer(start, stop - start, (start, stop), stop, begun=start))
    assert record.delivered == runs


def test_a_split_partly_sent_to_another_client_is_incomplete() -> None:
    """Splits of three elements; elements 4 to 6 went to another client."""
    record = DeliveryRecord()
    record.add_reply(answer(0, 4, (0, 1), 2))
    record.add_reply(answer(7, 2, (2, 3), 3, begun=3))
    assert record.delivered == ((0, 1),)
    assert record.partially_delivered == ((0, 3),)
    record.add_reply(answer(9, 3, (3, 4), 4, begun=3))
    assert record.delivered == ((0, 1), (3, 4))


def test_a_split_received_in_parts_is_complete() -> None:
    record = DeliveryRecord()
    record.add_reply(answer(6, 2, (2, 2), 3, begun=2))
    record.add_reply(answer(8, 2, (2, 3), 4, begun=3))
    assert record.delivered == ((2, 3),)
    assert record.partially_delivered == ((2, 4),)


@pytest.mark.parametrize(
    ("origins", "is_mixed", "used", "parts"),
    [
        (((0, 1, 0, 4),), False, 3, ((0, ((0, 3),)),)),
        # It is unknown which were consumed: they count as unconsumed and are redelivered.
        (((0, 1, 0, 4),), True, 3, ()),
        (((0, 1, 0, 6),), False, 3, ()),
        # All of them were.
        (((0, 1, 0, 4),), True, 4, ((0, ((0, 4),)),)),
    ],
)
def test_a_partial_reply_counts_the_elements_with_known_ids(
    origins: tuple[tuple[int, int, int, int], ...], is_mixed: bool, used: int, parts: object
) -> None:
    record = DeliveryRecord()
    begun = msgspec.structs.replace(
        answer(0, 4, (0, 0), 1), mode_data=ElementIds(runs=origins, is_permuted=is_mixed)
    )
    record.add_partial_reply(begun, used)
    assert record.partial_splits == parts
    assert record.partially_delivered == ((0, 1),)


def test_the_record_does_not_depend_on_how_often_it_is_read() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    often, seldom = DeliveryRecord(), DeliveryRecord()
    first = done = 0
    for _ in range(100):
        count, more = chance.randrange(3), chance.randrange(3)
        first += chance.choice([0, 0, 0, 4])  # elements of another client
        came = msgspec.structs.replace(
            answer(first, count, (done, done + more), done + more + 1, begun=done),
            mode_data=ElementIds(runs=((done, 1 + more, 0, 2),)),
            num_done=max(0, done - 20),
        )
        first, done = first + count, done + more
        often.add_reply(came)
        seldom.add_reply(came)
        assert often
    assert (often.delivered, often.partially_delivered, often.partial_splits) == (
        seldom.delivered,
        seldom.partially_delivered,
        seldom.partial_splits,
    )

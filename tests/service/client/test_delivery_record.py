"""Which units came whole to a client: on answers as workers give them."""

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
def test_runs_are_joined_where_they_meet(
    pairs: list[tuple[int, int]], runs: tuple[tuple[int, int], ...]
) -> None:
    receipt = DeliveryRecord()
    for start, stop in pairs:
        receipt.add_reply(answer(start, stop - start, (start, stop), stop, begun=start))
    assert receipt.delivered == runs


def test_a_unit_whose_first_part_went_to_another_client_did_not_come_whole() -> None:
    """Units of three elements; elements 4 to 6 went to somebody else."""
    receipt = DeliveryRecord()
    receipt.add_reply(answer(0, 4, (0, 1), 2))
    receipt.add_reply(answer(7, 2, (2, 3), 3, begun=3))
    assert receipt.delivered == ((0, 1),)
    assert receipt.partially_delivered == ((0, 3),)
    receipt.add_reply(answer(9, 3, (3, 4), 4, begun=3))
    assert receipt.delivered == ((0, 1), (3, 4))


def test_a_unit_whose_parts_all_came_here_came_whole() -> None:
    receipt = DeliveryRecord()
    receipt.add_reply(answer(6, 2, (2, 2), 3, begun=2))
    receipt.add_reply(answer(8, 2, (2, 3), 4, begun=3))
    assert receipt.delivered == ((2, 3),)
    assert receipt.partially_delivered == ((2, 4),)


@pytest.mark.parametrize(
    ("origins", "is_mixed", "used", "parts"),
    [
        (((0, 1, 0, 4),), False, 3, ((0, ((0, 3),)),)),
        # Nobody knows which of them were used: they count as not used, and come to somebody again.
        (((0, 1, 0, 4),), True, 3, ()),
        (((0, 1, 0, 6),), False, 3, ()),
        # All of them were.
        (((0, 1, 0, 4),), True, 4, ((0, ((0, 4),)),)),
    ],
)
def test_of_an_answer_that_was_begun_those_count_whose_origins_are_known(
    origins: tuple[tuple[int, int, int, int], ...], is_mixed: bool, used: int, parts: object
) -> None:
    receipt = DeliveryRecord()
    begun = msgspec.structs.replace(
        answer(0, 4, (0, 0), 1), mode_data=ElementIds(runs=origins, is_permuted=is_mixed)
    )
    receipt.add_partial_reply(begun, used)
    assert receipt.partial_splits == parts
    assert receipt.partially_delivered == ((0, 1),)


def test_what_came_is_the_same_however_seldom_somebody_asks() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    often, seldom = DeliveryRecord(), DeliveryRecord()
    first = done = 0
    for _ in range(100):
        count, more = chance.randrange(3), chance.randrange(3)
        first += chance.choice([0, 0, 0, 4])  # what came to somebody else
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

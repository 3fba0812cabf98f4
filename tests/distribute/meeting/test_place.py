"""The place where workers meet, reached from its own process."""

from __future__ import annotations

import threading

import pytest

from headrace.distribute.meeting import place
from headrace.distribute.meeting.hall import ANY
from headrace.distribute.meeting.member import Member
from headrace.distribute.meeting.place import OwnEnd, _Meetings
from headrace.errors import UnavailableError

NAMES = ["worker 0", "worker 1"]


def test_a_strategy_that_is_collected_while_its_process_answers_leaves_without_waiting(monkeypatch):
    placed = _Meetings(["worker 0"])
    old, new = (
        Member(OwnEnd("here", placed.handle), rank=0, names=["worker 0"], timeout=60.0)
        for _ in range(2)
    )
    old.meet("the beginning", ANY)
    decode = place.decode

    def decoded(*args):
        collect()
        return decode(*args)

    collect = old.end.close  # as a finalizer does, in the middle of anything
    monkeypatch.setattr(place, "decode", decoded)
    done = threading.Thread(target=new.meet, args=("the beginning", ANY), daemon=True)
    done.start()
    done.join(20.0)
    assert not done.is_alive()
    assert len(placed._sessions) == 1  # the old one's is over


def test_a_second_process_of_a_task_hears_that_the_first_is_training():
    meetings = _Meetings(NAMES)

    def member(rank: int, timeout: float = 60.0) -> Member:
        return Member(OwnEnd("here", meetings.handle), rank=rank, names=NAMES, timeout=timeout)

    first, second, again = member(0), member(1), member(1, timeout=0.01)
    begun = first.come("the beginning", ANY)
    second.meet("the beginning", ANY)
    with pytest.raises(UnavailableError, match=r"worker 1 takes part in a session that goes on"):
        again.meet("the beginning", ANY)
    assert not first.result(begun).flag
    second.come("a sum", ANY)
    assert not first.meet("a sum", ANY).flag


def test_what_comes_through_a_connection_that_was_given_up_takes_no_place():
    meetings, late = _Meetings(NAMES), []

    def handle(requests):
        if not late:
            late.extend(requests)
            raise KeyboardInterrupt
        meetings.handle(requests)

    first, second = (
        Member(OwnEnd("here", handler), rank=rank, names=NAMES, timeout=60.0)
        for rank, handler in enumerate([meetings.handle, handle])
    )
    with pytest.raises(KeyboardInterrupt):
        second.come("the beginning", ANY, again=True)
    number = second.come("the beginning", ANY, again=True)
    meetings.handle(late)
    first.come("the beginning", ANY)
    assert not second.result(number).flag

"""The place where workers meet, reached from its own process."""

from __future__ import annotations

import pytest

from headrace.distribute.meeting.combining import ANY
from headrace.distribute.meeting.member import Member
from headrace.distribute.meeting.own_end import OwnEnd
from headrace.distribute.meeting.place import _Meetings
from headrace.errors import UnavailableError

NAMES = ["worker 0", "worker 1"]


def test_a_second_process_of_a_task_hears_that_the_first_is_training():
    place = _Meetings(NAMES)

    def member(rank: int, timeout: float = 60.0) -> Member:
        return Member(OwnEnd("here", place.handle), rank=rank, names=NAMES, timeout=timeout)

    first, second, again = member(0), member(1), member(1, timeout=0.01)
    begun = first.come("the beginning", ANY)
    second.meet("the beginning", ANY)
    with pytest.raises(UnavailableError, match=r"worker 1 takes part in a session that goes on"):
        again.meet("the beginning", ANY)
    assert not first.result(begun).flag
    second.come("a sum", ANY)
    assert not first.meet("a sum", ANY).flag

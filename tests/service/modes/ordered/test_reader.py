"""Reading in order where units are missing."""

from __future__ import annotations

from typing import Any, cast

from headrace.service.client.session import Session
from headrace.service.modes.ordered.reader import ArrivingUnits


class EndedShell:
    """The shell of an iteration that is over."""

    failure = None
    is_closing = False

    def __init__(self) -> None:
        self.waits = 0

    def survey(self) -> tuple[set[int], tuple[()], frozenset[int]]:
        return set(), (), frozenset()

    def delivered(self) -> list[Any]:
        return []

    def allow(self, task_ids: set[int] | None, wanted: int | None) -> None: ...

    def await_delivery(self) -> bool:
        self.waits += 1
        assert self.waits == 1, "waits again for what does not come"
        return False

    def wait_no_more(self) -> None: ...


def test_a_unit_that_is_missing_at_the_end_has_no_elements() -> None:
    session = cast(Session, None)
    units = ArrivingUnits(session, lambda _: cast(Any, EndedShell()), cast(Any, None), 2)
    assert units.open(0, 0).next_chunk(10) is None

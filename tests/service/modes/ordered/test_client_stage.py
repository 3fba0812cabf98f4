"""Client stage of ordered reading with missing splits."""

from __future__ import annotations

from typing import Any, cast

from headrace.service.client.read_session import ReadSession
from headrace.service.modes.ordered.client_stage import ArrivingSplits


class FinishedRunner:
    """Reader runner of an iteration that has ended."""

    failure = None
    is_closing = False

    def __init__(self) -> None:
        self.waits = 0

    def read_status(self) -> tuple[set[int], tuple[()], frozenset[int]]:
        return set(), (), frozenset()

    def take_all(self) -> list[Any]:
        return []

    def restrict_requests(self, task_ids: set[int] | None, awaited_split: int | None) -> None: ...

    def wait_for_change(self) -> bool:
        self.waits += 1
        assert self.waits == 1, "the reader waits again although the iteration has ended"
        return False

    def end_wait(self) -> None: ...


def test_a_split_missing_at_the_end_has_no_elements() -> None:
    session = cast(ReadSession, None)
    splits = ArrivingSplits(session, lambda _: cast(Any, FinishedRunner()), cast(Any, None), 2)
    assert splits.open(0, 0).next_chunk(10) is None

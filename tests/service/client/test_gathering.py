"""The place of all clients of a job: who is missing is named, first in a warning."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest

from headrace.errors import DeadlineExceededError
from headrace.execution.delivered import Delivered
from headrace.service.client import gathering
from headrace.service.messages import PlaceGathered


class Dispatcher:
    """Answers that a client is missing, until some time."""

    def __init__(self, clock: list[float], until: float) -> None:
        self._clock, self._until = clock, until

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, question: Any, timeout: float) -> PlaceGathered:
        missing = ("b",) if self._clock[0] < self._until else ()
        return PlaceGathered(missing=missing, delivered=((0, 3),), parts=((4, ((1, 2),)),))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    fake = types.SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(gathering, "time", fake)
    return now


def gather(clock: list[float], until: float) -> Delivered:
    return gathering.gathered(
        Delivered(),
        "a",
        lambda: Dispatcher(clock, until),  # type: ignore[arg-type, return-value]
        dispatcher="here:1",
        timeout=60.0,
    )


def test_a_short_wait_is_not_worth_a_word(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    place = gather(clock, until=5.0)
    assert (place.whole, place.parts) == (((0, 3),), ((4, ((1, 2),)),))
    assert caplog.records == []


def test_who_is_missing_is_named_after_ten_seconds_and_in_the_error(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(DeadlineExceededError, match="place of b"):
        gather(clock, until=1e9)
    (said,) = caplog.messages
    assert said.startswith("get_state has waited 10 s for the place of b")

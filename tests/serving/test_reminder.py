"""A wait is worth a word after ten seconds, then once a minute."""

from __future__ import annotations

from headrace.serving.reminder import Reminder


def words(reminder: Reminder, until: int) -> list[int]:
    """Return after which seconds of a wait there is a word."""
    return [waited for waited in range(until) if reminder.is_due(waited)]


def test_the_first_word_is_due_after_ten_seconds_and_the_others_a_minute_apart() -> None:
    assert words(Reminder(), 200) == [10, 70, 130, 190]


def test_a_wait_that_is_looked_at_late_has_its_next_word_a_minute_after_that() -> None:
    reminder = Reminder()
    assert reminder.is_due(45.0)
    assert reminder.due_after == 105.0


def test_another_wait_begins_from_the_start() -> None:
    reminder = Reminder()
    assert words(reminder, 30) == [10]
    reminder.begin()
    assert words(reminder, 30) == [10]

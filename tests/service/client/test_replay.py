"""Registry of the readers of a source, with interrupts at any instant."""

from __future__ import annotations

import gc

import pytest

from headrace.errors import FailedPreconditionError
from headrace.service.client.replay import ReplayRegistry


class Listed:
    """A reader that goes back wherever it is asked to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = (0,)
        self.is_full = False
        self.place: int | None = None
        self.ended = 0

    def forget(self, before: int) -> None:
        pass

    def rewind(self, place: int) -> bool:
        self.place = place
        return True

    def close_for_good(self) -> None:
        self.ended += 1


class Iterating:
    """Stands for an iterator."""


def test_a_reopened_reader_lost_in_an_interrupt_is_found_again() -> None:
    registry, iterator, reader = ReplayRegistry(), Iterating(), Listed("one")
    registry.add(reader)
    registry.hold_readers(iterator)
    assert registry.retain(reader)
    assert registry.reopen(None, (0,)) is reader
    registry.hold_readers(iterator)  # interrupted before anybody had it
    assert registry.reopen(None, (0,)) is reader
    assert reader.place == 0


def test_a_reopened_reader_is_not_opened_by_another_step() -> None:
    registry, iterator, one, two = ReplayRegistry(), Iterating(), Listed("one"), Listed("two")
    registry.hold_readers(iterator)
    for reader in (one, two):
        registry.add(reader)
        registry.retain(reader)
    assert registry.reopen(None, (0,)) is one
    assert registry.reopen(None, (0,)) is two
    assert registry.reopen(None, (0,)) is None


def test_reopened_readers_stay_open_and_others_close() -> None:
    registry, iterator, one, two = ReplayRegistry(), Iterating(), Listed("one"), Listed("two")
    registry.hold_readers(iterator)
    for reader in (one, two):
        registry.add(reader)
        registry.retain(reader)
    registry.reopen({"reader": "two", "received": 7}, (0,))
    registry.release_readers(iterator)
    assert (one.ended, two.ended, two.place) == (1, 0, 7)
    registry.hold_readers(iterator)
    assert registry.reopen(None, (0,)) is None


def test_the_registry_is_full_if_any_live_reader_is() -> None:
    registry, one, two = ReplayRegistry(), Listed("one"), Listed("two")
    assert not registry.is_full
    for reader in (one, two):
        registry.add(reader)
    assert not registry.is_full
    two.is_full = True
    assert registry.is_full
    del reader, two
    gc.collect()
    assert not registry.is_full


class Placed(Listed):
    """A reader whose places mean something to others."""

    def portable_position(self, place: int) -> dict[str, int]:
        return {"positions": place}


def test_positions_are_exported_in_portable_form() -> None:
    registry, reader = ReplayRegistry(), Placed("one")
    registry.add(reader)
    state = {"failed": 0, "input": {"reader": "one", "received": 7, "epoch": [0]}}
    assert registry.export_state({"a": [state, 3]}) == {
        "a": [{"failed": 0, "input": {"positions": 7}}, 3]
    }


def test_a_position_after_a_failed_batch_element_is_rejected() -> None:
    # A resumed reader would skip another element, because redelivery uses another order.
    registry, reader = ReplayRegistry(), Placed("one")
    registry.add(reader)
    with pytest.raises(FailedPreconditionError, match="save the state after that batch"):
        registry.export_state({"failed": 1, "input": {"reader": "one", "received": 7}})
    elsewhere = {"failed": 1, "input": 7}
    assert registry.export_state(elsewhere) == elsewhere, "it is not over the service"


def test_a_position_of_a_closed_reader_is_rejected() -> None:
    with pytest.raises(FailedPreconditionError, match="another process"):
        ReplayRegistry().export_state({"input": {"reader": "one", "received": 7}})

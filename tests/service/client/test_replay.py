"""Who knows the readers of a source, where an interruption may come at any instant."""

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


def test_a_reader_that_was_opened_again_and_lost_by_an_interruption_is_found_again() -> None:
    keeper, iterator, reader = ReplayRegistry(), Iterating(), Listed("one")
    keeper.add(reader)
    keeper.hold_readers(iterator)
    assert keeper.retain(reader)
    assert keeper.reopen(None, (0,)) is reader
    keeper.hold_readers(iterator)  # interrupted before anybody had it
    assert keeper.reopen(None, (0,)) is reader
    assert reader.place == 0


def test_a_reader_that_was_opened_again_is_not_opened_by_another_step() -> None:
    keeper, iterator, one, two = ReplayRegistry(), Iterating(), Listed("one"), Listed("two")
    keeper.hold_readers(iterator)
    for reader in (one, two):
        keeper.add(reader)
        keeper.retain(reader)
    assert keeper.reopen(None, (0,)) is one
    assert keeper.reopen(None, (0,)) is two
    assert keeper.reopen(None, (0,)) is None


def test_what_was_opened_again_stays_open_and_the_rest_ends() -> None:
    keeper, iterator, one, two = ReplayRegistry(), Iterating(), Listed("one"), Listed("two")
    keeper.hold_readers(iterator)
    for reader in (one, two):
        keeper.add(reader)
        keeper.retain(reader)
    keeper.reopen({"reader": "two", "received": 7}, (0,))
    keeper.release_readers(iterator)
    assert (one.ended, two.ended, two.place) == (1, 0, 7)
    keeper.hold_readers(iterator)
    assert keeper.reopen(None, (0,)) is None


def test_much_is_kept_if_any_reader_keeps_much_and_is_still_there() -> None:
    keeper, one, two = ReplayRegistry(), Listed("one"), Listed("two")
    assert not keeper.is_full
    for reader in (one, two):
        keeper.add(reader)
    assert not keeper.is_full
    two.is_full = True
    assert keeper.is_full
    del reader, two
    gc.collect()
    assert not keeper.is_full


class Placed(Listed):
    """A reader whose places mean something to others."""

    def portable_position(self, place: int) -> dict[str, int]:
        return {"positions": place}


def test_a_place_is_said_so_that_others_can_go_on_from_there() -> None:
    keeper, reader = ReplayRegistry(), Placed("one")
    keeper.add(reader)
    state = {"failed": 0, "input": {"reader": "one", "received": 7, "epoch": [0]}}
    assert keeper.export_state({"a": [state, 3]}) == {
        "a": [{"failed": 0, "input": {"positions": 7}}, 3]
    }


def test_a_place_after_an_element_that_failed_in_a_batch_cannot_be_said() -> None:
    # Whoever went on would count another element, for what comes again is in another order.
    keeper, reader = ReplayRegistry(), Placed("one")
    keeper.add(reader)
    with pytest.raises(FailedPreconditionError, match="take the state after that batch"):
        keeper.export_state({"failed": 1, "input": {"reader": "one", "received": 7}})
    elsewhere = {"failed": 1, "input": 7}
    assert keeper.export_state(elsewhere) == elsewhere, "it is not over the service"


def test_a_place_of_a_reader_that_is_gone_cannot_be_said() -> None:
    with pytest.raises(FailedPreconditionError, match="another process"):
        ReplayRegistry().export_state({"input": {"reader": "one", "received": 7}})

"""Who knows the readers of a source, where an interruption may come at any instant."""

from __future__ import annotations

import gc

from headrace.service.client.keeping import Keeper


class Listed:
    """A reader that goes back wherever it is asked to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pass_number = (0,)
        self.is_full = False
        self.place: int | None = None
        self.ended = 0

    def forget(self, before: int) -> None:
        pass

    def go_back(self, place: int) -> bool:
        self.place = place
        return True

    def end(self) -> None:
        self.ended += 1


class Iterating:
    """Stands for an iterator."""


def test_a_reader_that_was_opened_again_and_lost_by_an_interruption_is_found_again() -> None:
    keeper, iterator, reader = Keeper(), Iterating(), Listed("one")
    keeper.add(reader)
    keeper.hold(iterator)
    assert keeper.leave(reader)
    assert keeper.take(None, (0,)) is reader
    keeper.hold(iterator)  # interrupted before anybody had it
    assert keeper.take(None, (0,)) is reader
    assert reader.place == 0


def test_a_reader_that_was_opened_again_is_not_opened_by_another_step() -> None:
    keeper, iterator, one, two = Keeper(), Iterating(), Listed("one"), Listed("two")
    keeper.hold(iterator)
    for reader in (one, two):
        keeper.add(reader)
        keeper.leave(reader)
    assert keeper.take(None, (0,)) is one
    assert keeper.take(None, (0,)) is two
    assert keeper.take(None, (0,)) is None


def test_what_was_opened_again_stays_open_and_the_rest_ends() -> None:
    keeper, iterator, one, two = Keeper(), Iterating(), Listed("one"), Listed("two")
    keeper.hold(iterator)
    for reader in (one, two):
        keeper.add(reader)
        keeper.leave(reader)
    keeper.take({"reader": "two", "received": 7}, (0,))
    keeper.release(iterator)
    assert (one.ended, two.ended, two.place) == (1, 0, 7)
    keeper.hold(iterator)
    assert keeper.take(None, (0,)) is None


def test_much_is_kept_if_any_reader_keeps_much_and_is_still_there() -> None:
    keeper, one, two = Keeper(), Listed("one"), Listed("two")
    assert not keeper.is_full
    for reader in (one, two):
        keeper.add(reader)
    assert not keeper.is_full
    two.is_full = True
    assert keeper.is_full
    del reader, two
    gc.collect()
    assert not keeper.is_full

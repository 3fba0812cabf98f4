"""The place where workers meet, reached from its own process."""

from __future__ import annotations

import threading

import pytest

from headrace.distribute.collective_server import server
from headrace.distribute.collective_server.client import CollectiveClient
from headrace.distribute.collective_server.server import LocalServerChannel, _SessionTable
from headrace.distribute.collective_server.state import ANY
from headrace.errors import UnavailableError

NAMES = ["worker 0", "worker 1"]


def test_a_strategy_that_is_collected_while_its_process_answers_leaves_without_waiting(monkeypatch):
    placed = _SessionTable(["worker 0"])
    old, new = (
        CollectiveClient(
            LocalServerChannel("here", placed.handle), rank=0, names=["worker 0"], timeout=60.0
        )
        for _ in range(2)
    )
    old.run("the beginning", ANY)
    decode = server.decode_arrays

    def decoded(*args):
        collect()
        return decode(*args)

    collect = old.closer.close  # as a finalizer does, in the middle of anything
    monkeypatch.setattr(server, "decode_arrays", decoded)
    done = threading.Thread(target=new.run, args=("the beginning", ANY), daemon=True)
    done.start()
    done.join(20.0)
    assert not done.is_alive()
    assert len(placed._sessions) == 1  # the old one's is over


def test_a_second_process_of_a_task_hears_that_the_first_is_training():
    meetings = _SessionTable(NAMES)

    def member(rank: int, timeout: float = 60.0) -> CollectiveClient:
        return CollectiveClient(
            LocalServerChannel("here", meetings.handle), rank=rank, names=NAMES, timeout=timeout
        )

    first, second, again = member(0), member(1), member(1, timeout=0.01)
    begun = first.start("the beginning", ANY)
    second.run("the beginning", ANY)
    with pytest.raises(UnavailableError, match=r"worker 1 takes part in a session that goes on"):
        again.run("the beginning", ANY)
    assert not first.wait(begun).flag
    second.start("a sum", ANY)
    assert not first.run("a sum", ANY).flag


def test_what_comes_through_a_connection_that_was_given_up_takes_no_place():
    meetings, late = _SessionTable(NAMES), []

    def handle(requests):
        if not late:
            late.extend(requests)
            raise KeyboardInterrupt
        meetings.handle(requests)

    first, second = (
        CollectiveClient(LocalServerChannel("here", handler), rank=rank, names=NAMES, timeout=60.0)
        for rank, handler in enumerate([meetings.handle, handle])
    )
    with pytest.raises(KeyboardInterrupt):
        second.start("the beginning", ANY, is_retry=True)
    number = second.start("the beginning", ANY, is_retry=True)
    meetings.handle(late)
    first.start("the beginning", ANY)
    assert not second.wait(number).flag

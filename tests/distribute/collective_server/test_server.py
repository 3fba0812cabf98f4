"""Collective server, used from its own process."""

from __future__ import annotations

import threading

import pytest

from headrace.distribute.collective_server import server
from headrace.distribute.collective_server.client import CollectiveClient
from headrace.distribute.collective_server.server import LocalServerChannel, _SessionTable
from headrace.distribute.collective_server.state import ANY
from headrace.errors import UnavailableError

NAMES = ["worker 0", "worker 1"]


def test_a_strategy_collected_while_the_server_answers_leaves_at_once(monkeypatch):
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

    collect = old.closer.close  # as a finalizer may, at any point
    monkeypatch.setattr(server, "decode_arrays", decoded)
    done = threading.Thread(target=new.run, args=("the beginning", ANY), daemon=True)
    done.start()
    done.join(20.0)
    assert not done.is_alive()
    assert len(placed._sessions) == 1  # the session of the first one has ended


def test_a_second_process_of_a_task_is_told_that_the_first_is_running():
    meetings = _SessionTable(NAMES)

    def member(rank: int, timeout: float = 60.0) -> CollectiveClient:
        return CollectiveClient(
            LocalServerChannel("here", meetings.handle), rank=rank, names=NAMES, timeout=timeout
        )

    first, second, again = member(0), member(1), member(1, timeout=0.01)
    begun = first.start("the beginning", ANY)
    second.run("the beginning", ANY)
    with pytest.raises(UnavailableError, match=r"worker 1 already takes part in a running session"):
        again.run("the beginning", ANY)
    assert not first.wait(begun).flag
    second.start("a sum", ANY)
    assert not first.run("a sum", ANY).flag


def test_a_stale_attempt_does_not_replace_a_newer_one():
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

"""Iterators interrupted wherever Python handles signals: no element is lost or duplicated."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

import headrace as hr
from headrace.distribute import (
    AutoShardPolicy,
    DistributedDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from headrace.distribute.agreement import StepAgreement
from headrace.distribute.collective_server.client import CollectiveClient
from headrace.distribute.collective_server.server import LocalServerChannel, _SessionTable
from headrace.errors import FailedPreconditionError
from tests.distribute.replicas import mirrored, rows

_ROOM = os.path.dirname(hr.distribute.__file__)
OFF = AutoShardPolicy.OFF
_OWN = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


class Interruption(BaseException):
    pass


def distributed(how, replicas=3):
    strategy, plan = mirrored(replicas), hr.Dataset.range(10).batch(4)
    if how == "in turn":
        return strategy.distribute_datasets_from_function(lambda context: plan)
    if how == "own":

        def shard(context: InputContext) -> hr.Dataset:
            return plan.shard(context.num_input_pipelines, context.input_pipeline_id)

        return strategy.distribute_datasets_from_function(shard, _OWN)
    options = InputOptions(split=how, experimental_per_replica_buffer_size=0)
    return strategy.distribute_dataset(plan, options)


def taken(step):
    parts = rows(step)
    return [x for part in parts for x in (part if isinstance(part, list) else [part])]


class Interrupter:
    """Interrupts at the n-th call or built-in return of the package's code."""

    def __init__(self, number):
        self.left = number

    def next(self, iterator):
        """Return the rows of a step; None at the end."""
        sys.setprofile(self._look)
        try:
            for step in iterator:
                found = step
                break
            else:
                return None
        finally:
            sys.setprofile(None)
        return taken(found)

    def _look(self, frame, event, argument):
        if frame.f_code.co_name == "<genexpr>":  # the iterator may be dropped at that moment
            return
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_ROOM):
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise Interruption


def rest_of(state, how, replicas):
    iterator = iter(distributed(how, replicas))
    iterator.set_state(state)
    return [x for step in iterator for x in taken(step)]


@pytest.mark.parametrize(
    ("how", "replicas"),
    [("ceil", 3), ("balanced", 3), ("in turn", 3), ("own", 3), ("ceil", 1)],
)
def test_an_interruption_at_any_call_loses_or_duplicates_no_row(how, replicas):
    whole = sorted(x for step in distributed(how, replicas) for x in taken(step))
    assert whole == list(range(10))
    number, were_interrupted = 0, True
    while were_interrupted:
        number += 1
        interrupter, found = Interrupter(number), []
        iterator = iter(distributed(how, replicas))
        while True:
            try:
                step = interrupter.next(iterator)
            except Interruption:
                try:
                    state = iterator.get_state()
                except FailedPreconditionError:
                    continue
                assert sorted(found + rest_of(state, how, replicas)) == whole, number
                continue
            if step is None:
                break
            found += step
        assert sorted(found) == whole, number
        were_interrupted = interrupter.left <= 0
    assert number > 10


class FastChannel:
    """A channel to a server in this process whose waits are a hundred times shorter."""

    def __init__(self, place):
        self._end = LocalServerChannel("here", place.handle)
        self.send, self.close = self._end.send, self._end.close

    def receive(self, timeout):
        return self._end.receive(timeout / 100)


def of_two_workers(rank, member, found, next_step):
    """Read a dataset as one of two workers, and record the rows."""
    agreement = StepAgreement(member, "the pass")
    iterator = iter(
        DistributedDataset(
            hr.Dataset.range(10 - rank).batch(1).with_options(hr.Options(auto_shard_policy=OFF)),
            InputContext(2, rank, 2),
            InputOptions(experimental_per_replica_buffer_size=0),
            agreement=lambda: agreement,
        )
    )
    while True:
        try:
            step = next_step(iterator)
        except Interruption:
            continue
        if step is None:
            return
        found[rank] += step


def test_a_worker_interrupted_at_any_call_stays_in_step_with_the_other():
    number, was_interrupted = 0, True
    while was_interrupted:
        number += 11
        interrupter, found = Interrupter(number), {0: [], 1: []}
        place = _SessionTable(["worker 0", "worker 1"])
        members = [
            CollectiveClient(
                FastChannel(place),
                rank=rank,
                names=["worker 0", "worker 1"],
                timeout=600.0,
                clock=lambda: 100 * time.monotonic(),
            )
            for rank in range(2)
        ]
        other = threading.Thread(
            target=of_two_workers,
            args=(1, members[1], found, lambda iterator: next(map(taken, iterator), None)),
        )
        other.start()
        of_two_workers(0, members[0], found, interrupter.next)
        other.join(20.0)
        assert not other.is_alive(), number
        assert found == {0: list(range(10)), 1: list(range(9))}, number
        was_interrupted = interrupter.left <= 0
    assert number > 100

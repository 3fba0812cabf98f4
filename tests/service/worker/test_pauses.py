"""A task that is to give what it holds: its producer pauses once, and says that all is whole."""

from __future__ import annotations

from functools import partial

import numpy as np

import headrace as hr
from headrace.element import wire
from headrace.plan.serialize import dump_plan
from headrace.service.messages import GetSplit, TaskDefinition
from headrace.service.rows import END
from headrace.service.worker.agenda import Grant
from headrace.service.worker.feed import Feed
from headrace.service.worker.opening import open_plan
from headrace.service.worker.portion import Portion
from headrace.service.worker.producer import Producer
from tests.service.reading import wait_until
from tests.service.worker.driving import Driven
from tests.service.worker.listed import SECONDS


def test_it_pauses_once_for_what_it_was_granted_and_then_asks_less_and_less_often() -> None:
    worker = Driven(heartbeat_interval=1000.0).registered()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.grants(0, 2)
    worker.need(producer)

    paused = worker.grants(0, 0, wait=True, flush=True)
    assert paused.grants == [Grant(producer=producer, is_pause=True)]
    assert worker.of(GetSplit)[-1].number == 1, "nobody is asked before more is needed"
    asked = len(worker.of(GetSplit))

    worker.need(producer)
    assert len(worker.of(GetSplit)) == asked + 1
    again = worker.grants(0, 0, wait=True, flush=True)
    assert (again.grants, again.waits) == ([], [producer])
    worker.pass_time(0.05)
    assert worker.grants(5, 7).grants == [Grant(producer=producer, units=(5, 7))]
    worker.need(producer)
    more = worker.grants(0, 0, wait=True, flush=True)
    assert more.grants == [Grant(producer=producer, is_pause=True)]
    worker.need(producer)
    assert worker.grants(0, 0).grants == [Grant(producer=producer)], "the end is the end"


def test_all_that_a_shuffle_holds_is_put_and_its_units_are_whole() -> None:
    dataset = hr.Dataset.range(100).filter(lambda x: x < 5).shuffle(1000, seed=3)
    task = TaskDefinition(
        task_id=1,
        iteration_id=1,
        dataset_id="data",
        digest=b"",
        pass_number=(0,),
        seed=7,
        ticket="",
        deals=True,
        origins=True,
    )
    put: list[Portion] = []
    needed: list[int] = []
    grants = iter([Grant(producer=1, units=(0, 8)), Grant(producer=1, is_pause=True)])

    class Owner:
        def produced(self, producer: int, portion: Portion) -> None:
            put.append(portion)
            feed.resume()

        def needs_units(self, producer: int) -> None:
            needed.append(len(put))
            grant = next(grants, None)
            if grant is not None:
                feed.grant(grant)

        def ended(self, producer: int, failure: str | None) -> None:
            assert failure is None
            needed.append(-1)

    feed = Feed(1, Owner())
    producer = Producer(
        "task-1",
        lambda hand_over: open_plan(
            dump_plan(dataset.plan), task, partial(feed.next_units, hand_over), worker="w:1"
        ),
        feed,
        counts_units=True,
        says_origins=True,
    )
    producer.start()
    try:
        wait_until(lambda: put and put[-1].done_to == 8)
        assert [put[0].done_from, needed[:2]] == [0, [0, 0]], "before the pause nothing was put"
        feed.grant(Grant(producer=1, units=(2, 3)))
        feed.resume()
        wait_until(lambda: len(needed) == 4)
        feed.grant(Grant(producer=1))
        wait_until(lambda: needed[-1] == -1)
    finally:
        feed.close()
        producer.join(SECONDS)
    rows = [row for portion in put if portion.count for row in wire.decode(portion.buffers).rows()]
    assert sorted(int(np.max(row)) for row in rows) == [0, 1, 2, 2, 3, 4]
    ends = [run for portion in put for run in portion.origins.runs if run[2] + run[3] == END]
    ended = {unit for first, units, _, _ in ends for unit in range(first, first + units)}
    assert ended >= set(range(8)), "all units ended, those without elements as well"

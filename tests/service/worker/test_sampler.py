"""The sampler finds at which step a thread is, and keeps nothing of it alive."""

from __future__ import annotations

import sys
import threading
import time
import weakref

import numpy as np

import headrace as hr
from headrace.execution.build import start
from headrace.service.worker.meters import Meter, Meters
from headrace.service.worker.sampler import Sampler, find_stage


def slowly(x):
    time.sleep(0.02)
    return x


def read_on(iterator):
    while iterator.next_chunk(8) is not None:
        pass


def test_time_in_a_function_counts_for_the_step_that_calls_it():
    meters = Meters()
    meter = meters.begin(1, 4000)
    plan = hr.Dataset.range(60).map(slowly).batch(4).plan
    iterator = start(plan, watch=meter.watch)
    sampler = Sampler(meters)
    sampler.start()
    reader = threading.Thread(target=read_on, args=(iterator,))
    reader.start()
    reader.join()
    sampler.stop()
    sampler.join(5.0)
    iterator.close()
    spent = {each.stage.split(" ")[0]: each.seconds for each in meter.read().stages}
    assert max(spent, key=spent.__getitem__) == "map"
    assert spent["map"] > 0.2


def test_a_thread_that_is_at_no_step_is_at_none():
    assert find_stage(sys._getframe(), [Meter(1)]) is None


class Holding:
    """A step that asks about itself while it holds something."""

    def __init__(self, meter):
        self.meter = meter

    def look(self):
        array = np.zeros(1000)
        held = weakref.ref(array)
        found = find_stage(sys._getframe(), [self.meter])
        del array
        return found, held()


# The sampler looks at code of the package alone.
Holding.look.__globals__.setdefault("__name__", __name__)


def test_looking_at_a_frame_keeps_nothing_of_it_alive(monkeypatch):
    meter = Meter(1)
    holding = Holding(meter)
    meter._names[holding] = "map"
    monkeypatch.setitem(Holding.look.__globals__, "__name__", "headrace.execution.stand_in")
    found, alive = holding.look()
    assert found == (meter, "map")
    assert alive is None


def test_it_ends_when_it_is_stopped_before_it_was_started():
    sampler = Sampler(Meters())
    sampler.stop()
    sampler.join(1.0)

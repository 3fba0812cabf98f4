"""Ctrl-C at any instruction of `next` loses nothing and repeats nothing."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import headrace as hr
from headrace.errors import UserFunctionError
from headrace.execution.build import build_iterator

Dataset = hr.Dataset


class Interrupting:
    """A function that is interrupted in its n-th call."""

    def __init__(self, at, error=KeyboardInterrupt):
        self.at = at
        self.error = error
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return x


def read_on(dataset):
    """Read to the end, going on after each interruption, and restoring its state into another."""
    got, states = [], []
    with iter(dataset) as iterator:
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                return got, states
            except (KeyboardInterrupt, SystemExit):
                states.append((len(got), iterator.get_state()))


PIPELINES = {
    "map": lambda fn: Dataset.range(12).map(fn),
    "filter": lambda fn: Dataset.range(12).filter(lambda x: fn(x) % 3 != 1),
    "batched map": lambda fn: Dataset.range(12).map(fn).batch(5),
    "map of maps": lambda fn: Dataset.range(12).map(fn).map(fn),
    "generator": lambda fn: Dataset.from_generator(lambda: map(fn, range(12))),
    "zip": lambda fn: Dataset.zip(Dataset.range(12).map(fn), Dataset.range(12).shuffle(4)),
    "shuffled filter": lambda fn: Dataset.range(12).filter(lambda x: fn(x) >= 0).shuffle(4),
    "flat_map": lambda fn: Dataset.range(12).flat_map(lambda x: Dataset.range(int(fn(x)) % 3)),
    "interleave": lambda fn: Dataset.range(12).interleave(
        lambda x: Dataset.range(int(x) % 3).map(fn), cycle_length=2
    ),
    "unbatch": lambda fn: Dataset.range(12).batch(5).map(fn).unbatch(),
    "repeat": lambda fn: Dataset.range(4).filter(lambda x: fn(x) >= 0).repeat(3),
    "concatenate": lambda fn: Dataset.range(4).map(fn).concatenate(Dataset.range(8).map(fn)),
    "cache": lambda fn: Dataset.range(12).map(fn).cache(),
    "scan": lambda fn: Dataset.range(12).scan(
        np.zeros(1, np.int64), lambda s, x: (np.add(s, fn(x), out=s), s)
    ),
    "take_while": lambda fn: Dataset.range(12).take_while(lambda x: fn(x) < 10),
    "padded_batch": lambda fn: (
        Dataset.range(12).map(lambda x: [fn(x)] * (int(x) % 3 + 1)).padded_batch(5)
    ),
    "key of a window": lambda fn: Dataset.range(12).group_by_window(
        lambda x: fn(x) % 3, lambda key, window: window.shuffle(3), window_size=3
    ),
    "window": lambda fn: (
        Dataset.range(12)
        .map(fn)
        .group_by_window(lambda x: x % 3, lambda key, window: window.map(fn), window_size=3)
    ),
    "buckets": lambda fn: Dataset.range(12).bucket_by_sequence_length(
        fn, [3, 6], [2, 2, 2], no_padding=True
    ),
    "packed": lambda fn: (
        Dataset.range(12).map(lambda x: [fn(x)] * (int(x) % 3 + 1)).pack_sequences(5, num_bins=2)
    ),
    "concat_then_split": lambda fn: (
        Dataset.range(12)
        .map(lambda x: [fn(x)] * (int(x) % 3 + 1))
        .pack_sequences(5, "concat_then_split")
    ),
    "batch_by_cost": lambda fn: Dataset.range(12).batch_by_cost(20, fn),
    "sample": lambda fn: Dataset.sample_from_datasets(
        [Dataset.range(6).map(fn), Dataset.range(6).map(fn)]
    ),
    "choose": lambda fn: Dataset.choose_from_datasets(
        [Dataset.range(6).map(fn), Dataset.range(6)], Dataset.range(12).map(lambda x: fn(x) % 2)
    ),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", PIPELINES)
def test_an_interrupted_function_is_called_again_for_the_same_element(name, error):
    options = hr.Options(seed=5)
    want = list(PIPELINES[name](Interrupting(0)).with_options(options))
    for at in (1, 2, 5, 9, 12, 14, 20):
        dataset = PIPELINES[name](Interrupting(at, error)).with_options(options)
        got, states = read_on(dataset)
        assert repr(got) == repr(want)
        for position, state in states:
            with iter(PIPELINES[name](Interrupting(0)).with_options(options)) as other:
                other.set_state(state)
                assert repr(list(other)) == repr(want[position:])


class Alarm(BaseException):
    """Not an error: something that comes from outside."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(20_000),  # its elements are there at once: few signals fall on one
        lambda: Dataset.range(20_000).map(abs),
        lambda: Dataset.range(2000).shuffle(64).filter(lambda x: bool(x % 2)).batch(3),
        lambda: Dataset.range(60).flat_map(lambda x: Dataset.range(int(x) % 7).shuffle(3)),
        lambda: Dataset.from_generator(lambda: iter(range(4000))).map(np.square),
        lambda: Dataset.range(2000).batch(16).unbatch().map(lambda x: x * 3),
    ],
    ids=["range", "map", "filter", "flat_map", "generator", "unbatch"],
)
def test_a_signal_at_any_instant_loses_and_repeats_nothing(make):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    dataset = make().with_options(hr.Options(seed=1))
    want = [x.tolist() for x in dataset]
    inside = False

    def on_alarm(number, frame):
        # Between two calls of `next` an interruption is the caller's concern.
        if not inside:
            return
        while frame is not None and frame.f_code.co_filename != weakref.__file__:
            # What is raised in a finalizer Python reports and forgets: it would interrupt nothing.
            if frame.f_code is hr.DatasetIterator.__next__.__code__:
                raise Alarm
            frame = frame.f_back

    got, alarms, in_a_row = [], 0, 0
    # The second iteration over the dataset: its order is that of pass 1.
    iterator = iter(dataset)
    iterator.set_state(iter(make().with_options(hr.Options(seed=1))).get_state())
    gc.disable()  # what is raised while it calls back goes nowhere, as in a finalizer
    before = signal.signal(signal.SIGALRM, on_alarm)
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            # After an alarm all is built again. Where the machine is too busy to do that before the
            # next one, that one comes later: else no element would ever come.
            most = 2e-4 * 1.5**in_a_row
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, most))
            inside = True
            try:
                element = next(iterator)
            except Alarm:
                inside = False
                alarms += 1
                in_a_row = min(in_a_row + 1, 20)
                continue
            except StopIteration:
                break
            inside = False
            in_a_row = 0
            got.append(element.tolist())
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
        iterator.close()
    assert got == want[: len(got)]
    assert len(got) == len(want)
    assert alarms > 0


def test_exit_on_a_worker_thread_is_an_error_of_the_function():
    plan = Dataset.range(5).map(lambda x: sys.exit(3) if x == 2 else x).plan
    iterator = build_iterator(plan, contain_exits=True)
    assert [int(x) for x in iterator.next_chunk(5).rows()] == [0, 1]
    with pytest.raises(UserFunctionError, match="raised SystemExit for element 2: 3"):
        iterator.next_chunk(5)
    assert [int(x) for x in iterator.next_chunk(5).rows()] == [3, 4]


def test_interrupted_wait_for_a_thread_raises_the_interruption():
    class Rows(hr.IndexedSource):
        size = 5
        element_spec = hr.ArraySpec((), np.int64)
        alone = 0

        def gather(self, indices):
            self.alone += 2 in indices and len(indices) == 1
            if 2 in indices and self.alone < 2:
                lock = threading.Condition()
                with lock:
                    # As where Ctrl-C arrives before a wait has its lock again.
                    lock.release()
                    raise KeyboardInterrupt
            return np.asarray(indices)

    got, states = read_on(Dataset.from_source(Rows()))
    assert [int(x) for x in got] == [0, 1, 2, 3, 4]
    assert [position for position, _ in states] == [2]

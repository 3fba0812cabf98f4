"""Prefetch: reading ahead on a thread, and stopping it without long waits."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.execution import buffering
from headrace.execution.buffering import PrefetchIterator
from headrace.execution.build import build_iterator
from headrace.execution.context import Context
from headrace.execution.input_buffer import InputBuffer
from headrace.execution.threads import ReadAheadThread
from headrace.plan.buffering import Prefetch
from tests.stopwatch import Stopwatch

from .contract import ListIterator, assert_keeps_contract, with_input
from .pipelines import odd_or_half

Dataset = hr.Dataset
CONTEXT = Context(seed=11, build=lambda plan, context: None)


def prefetch_of(input_, size: int, only_if_slow: bool = False) -> PrefetchIterator:
    node = Prefetch(input=Dataset.range(1).plan, buffer_size=size, only_if_slow=only_if_slow)
    return PrefetchIterator(node, with_input(node, input_, CONTEXT))


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def take_all(iterator, seen: list) -> None:
    while (chunk := iterator.next_chunk(1)) is not None:
        seen += chunk.rows()


class Gate:
    """A function that blocks until it is released."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_inside = threading.Event()

    def __call__(self, x):
        self.is_inside.set()
        assert self.is_open.wait(30.0)
        return x


@settings(max_examples=50)
@given(
    count=st.integers(0, 40),
    size=st.sampled_from([1, 2, 5, 100, hr.AUTOTUNE]),
    failing=st.sets(st.integers(0, 39)),
    free=st.booleans(),
    slow_from=st.sampled_from([None, 0, 3, 100]),
    seed=st.integers(0, 2**32),
)
def test_the_states_are_those_of_the_input(count, size, failing, free, slow_from, seed):
    entries = [ValueError() if n in failing else np.int64(n) for n in range(count)]

    def make():
        input_ = ListIterator(entries, reads_ahead_freely=free)
        iterator = prefetch_of(input_, size, only_if_slow=slow_from is not None)
        if slow_from is not None:
            iterator._inline_seconds = 1e-2 - slow_from * 1e-6  # soon, or never
        return iterator

    outcomes = assert_keeps_contract(make, seed, restores=5)
    assert len(outcomes) == count
    iterator = make()
    chunk = iterator.next_chunk(3) if count and 0 not in failing else None
    if chunk is not None:
        assert [chunk.state_at(index) for index in range(chunk.size + 1)] == [
            *range(chunk.size + 1)
        ]
    iterator.close()


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_buffer_size_is_the_maximum_number_of_held_elements(size):
    input_ = ListIterator([np.int64(n) for n in range(1000)], reads_ahead_freely=False)
    iterator = prefetch_of(input_, size)
    taken = 0
    for _ in range(20):
        chunk = iterator.next_chunk(2)
        assert chunk is not None
        taken += chunk.size
        until(lambda least=taken + size - size // 8: input_.at >= least)
        assert input_.at <= taken + size
    iterator.close()


@pytest.mark.parametrize(("at_hand", "size", "asked"), [(1, 100, 1), (8, 100, 8), (100, 100, 16)])
def test_slow_elements_computed_ahead_are_read_in_small_groups(at_hand, size, asked):
    class MadeAhead(ListIterator):
        limits: list[int] = []  # noqa: RUF012 - of this one test

        def next_chunk(self, limit):
            self.limits.append(limit)
            time.sleep(0.001)  # slow: single elements would be requested
            return super().next_chunk(limit)

    MadeAhead.preferred_limit = at_hand
    input_ = MadeAhead([np.int64(n) for n in range(100)], reads_ahead_freely=False)
    iterator = prefetch_of(input_, size)
    seen: list = []
    take_all(iterator, seen)
    assert seen == list(range(100))
    assert set(input_.limits[1:4]) == {asked}
    iterator.close()


def test_only_if_slow_reads_ahead_only_for_slow_elements():
    class Slow(ListIterator):
        seconds = 0.0

        def next_chunk(self, limit):
            time.sleep(self.seconds)
            return super().next_chunk(limit)

    input_ = Slow([np.int64(n) for n in range(20)])
    before = threading.active_count()
    iterator = prefetch_of(input_, 2, only_if_slow=True)
    for taken in range(1, 4):
        iterator.next_chunk(1)
        assert (input_.at, threading.active_count()) == (taken, before)
    input_.seconds = 0.01
    iterator.next_chunk(1)
    chunk = iterator.next_chunk(1)
    assert chunk is not None
    assert chunk.rows() == [4]
    until(lambda: input_.at == 7)
    assert iterator.get_state() == 5
    iterator.set_state(7)
    take_all(iterator, seen := [])
    assert seen == list(range(7, 20))
    iterator.close()


def test_only_if_slow_ignores_a_few_pauses_of_the_machine(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    class Paused(ListIterator):
        def next_chunk(self, limit):
            clock.now += 0.001 if self.at % 20 in (10, 11) else 1e-6
            return super().next_chunk(limit)

    clock = Clock()
    monkeypatch.setattr(buffering, "time", clock)
    iterator = prefetch_of(Paused([np.int64(n) for n in range(60)]), 2, only_if_slow=True)
    before = threading.active_count()
    for taken in range(1, 61):
        iterator.next_chunk(1)
        assert threading.active_count() == before, f"a thread was started at {taken}"
    iterator.close()


def test_is_ready_is_true_if_an_element_error_or_end_is_available():
    gate = Gate()
    iterator = prefetch_of(ListIterator([np.int64(0), ValueError("odd"), np.int64(2)]), 2)
    waiting = build_iterator(Dataset.range(3).map(gate).prefetch(2).plan)
    assert not iterator.is_ready, "nothing was requested"
    iterator.next_chunk(1)
    until(lambda: iterator.is_ready)
    with pytest.raises(ValueError, match="odd"):
        iterator.next_chunk(1)
    iterator.next_chunk(1)
    until(lambda: iterator.is_ready)
    assert iterator.next_chunk(1) is None
    iterator.close()
    reader = threading.Thread(target=waiting.next_chunk, args=(1,))
    reader.start()
    assert gate.is_inside.wait(30.0)
    assert not waiting.is_ready
    gate.is_open.set()
    reader.join(30.0)
    until(lambda: waiting.is_ready)
    waiting.close()


def test_autotune_holds_a_bounded_number_of_bytes():
    class Endless(ListIterator):
        def next_chunk(self, limit):
            self.at += 1
            return hr_chunk(np.zeros(1 << 20, np.uint8), self.at - 1)

    def hr_chunk(row, at):
        return ListIterator([row]).next_chunk(1).with_states(lambda index: at + index)

    input_ = Endless([])
    iterator = prefetch_of(input_, hr.AUTOTUNE)
    iterator.next_chunk(1)
    until(lambda: input_.at >= 64)
    time.sleep(0.05)
    assert input_.at <= 68
    iterator.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_base_exception_reaches_the_consumer_in_its_turn(error):
    iterator = prefetch_of(ListIterator([np.int64(0), np.int64(1), error, np.int64(2)]), 2)
    seen: list[np.int64] = []
    with pytest.raises(type(error)):
        take_all(iterator, seen)
    assert seen == [0, 1]
    assert iterator.next_chunk(1) is None  # it does not hang
    iterator.close()


def test_an_exit_in_a_function_reaches_the_loop_over_the_dataset():
    def leave_at_three(x):
        return sys.exit(1) if x == 3 else x

    seen: list[np.int64] = []
    with (
        iter(Dataset.range(9).map(leave_at_three).prefetch(2)) as iterator,
        pytest.raises(SystemExit),
    ):
        seen.extend(iterator)
    assert seen == [0, 1, 2]


#: Steps that call a function ahead of the consumer.
AHEAD = {
    "prefetch": lambda dataset, function: dataset.map(function).prefetch(2),
    "threads": lambda dataset, function: dataset.map(function, num_parallel_calls=2),
}


@pytest.mark.parametrize("step", AHEAD)
def test_close_does_not_wait_for_a_blocked_function(step, caplog):
    gate = Gate()
    iterator = iter(AHEAD[step](Dataset.range(9), gate))
    reader = threading.Thread(target=lambda: next(iterator, None))
    reader.start()
    assert gate.is_inside.wait(10.0)
    with Stopwatch() as watch:
        iterator.close()
    assert watch.seconds < 5.0
    assert step == "threads" or "is still busy" in caplog.text
    if step == "prefetch":
        gate.is_open.set()  # and all threads end: the fixture sees to it
    reader.join(10.0)  # whoever waits for an element learns that there is none
    assert not reader.is_alive()
    gate.is_open.set()


def test_a_blocked_generator_is_closed_when_it_continues():
    gate, closed = Gate(), threading.Event()

    def numbers():
        try:
            yield 0
            gate(None)
            yield 1
        finally:
            closed.set()

    iterator = iter(Dataset.from_generator(numbers).prefetch(2))
    assert next(iterator) == 0
    assert gate.is_inside.wait(10.0)
    iterator.close()
    assert not closed.is_set()
    gate.is_open.set()
    assert closed.wait(10.0)


def test_a_state_is_restored_while_a_function_is_blocked():
    gate = Gate()
    stuck = threading.Event()

    def wait_at_five(x):
        return gate(x) if x == 5 and not stuck.is_set() else x

    iterator = build_iterator(Dataset.range(9).map(wait_at_five).prefetch(8).plan, seed=1)
    state = iterator.get_state()
    assert iterator.next_chunk(1).rows() == [0]
    assert gate.is_inside.wait(10.0)
    stuck.set()
    iterator.set_state(state)
    seen = []
    while (chunk := iterator.next_chunk(4)) is not None:
        seen += [int(row) for row in chunk.rows()]
    assert seen == list(range(9))
    iterator.close()
    gate.is_open.set()


def test_interpreter_shutdown_is_not_delayed():
    code = """
        import threading, headrace as hr
        inside = threading.Event()
        def stick(x):
            inside.set()
            threading.Event().wait()
        for calls in (None, 2):
            inside.clear()
            iterator = iter(hr.Dataset.range(9).map(stick, num_parallel_calls=calls).prefetch(2))
            threading.Thread(target=lambda: next(iterator, None), daemon=True).start()
            assert inside.wait(20)
        print("leaving", flush=True)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert run.stdout == "leaving\n", run.stderr


@pytest.mark.parametrize("step", AHEAD)
def test_skipping_elements_calls_no_function(step):
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    iterator = build_iterator(AHEAD[step](Dataset.range(500), note).plan, seed=1)
    assert iterator.skip(100) == 100
    assert calls == []
    assert iterator.next_chunk(1).rows() == [100]
    assert iterator.skip(300) == 300
    assert iterator.next_chunk(1).rows() == [401]
    iterator.close()
    assert not {*range(100), 399} & {*calls}


class Alarm(BaseException):
    """A BaseException that is not an error."""


STEPS_WITH_THREADS = {
    "prefetch": lambda: Dataset.range(1000).prefetch(4),
    "parallel map": lambda: Dataset.range(1000).map(odd_or_half, num_parallel_calls=2),
    "parallel interleave": lambda: Dataset.range(4).interleave(
        lambda n: Dataset.range(100), cycle_length=2, num_parallel_calls=2
    ),
}


def threads_of_steps() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("headrace-")]


@pytest.mark.parametrize("kind", STEPS_WITH_THREADS)
@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_an_interruption_between_a_condition_and_its_lock_leaves_no_thread(kind, nth):
    until(lambda: not threads_of_steps())
    entered = threading.Condition.__enter__.__code__
    met = 0

    def interrupt(frame, event, argument):
        nonlocal met
        if event == "return" and frame.f_code is entered and "headrace" in str(frame.f_back.f_code):
            met += 1
            if met == nth:
                raise Alarm

    iterator = iter(STEPS_WITH_THREADS[kind]())
    sys.setprofile(interrupt)
    try:
        for _ in range(200):
            next(iterator)
    except Alarm:
        pass
    finally:
        sys.setprofile(None)
    iterator.close()

    until(lambda: not threads_of_steps())


@pytest.mark.parametrize("kind", ["prefetch", "parallel map"])
def test_an_interrupted_close_is_completed_by_the_next_close(kind, monkeypatch):
    until(lambda: not threads_of_steps())
    iterator = build_iterator(STEPS_WITH_THREADS[kind]().plan, seed=1)
    iterator.next_chunk(1)
    with monkeypatch.context() as patched:

        def interrupted(feeder):
            raise Alarm

        patched.setattr(ReadAheadThread, "stop", interrupted)
        with pytest.raises(Alarm):
            iterator.close()

    iterator.close()

    until(lambda: not threads_of_steps())


# Whether reading ahead is free is looked at before each read: steps learn it as they go on.


STEPS = {
    "batch": lambda ds: ds.batch(2),
    "batch and unbatch": lambda ds: ds.batch(2).unbatch(),
    "shuffle": lambda ds: ds.shuffle(3),
    "repeat": lambda ds: ds.repeat(2),
    "take": lambda ds: ds.take(50),
    "skip": lambda ds: ds.skip(1),
    "shard": lambda ds: ds.shard(2, 0),
    "enumerate": lambda ds: ds.enumerate(),
    "zip": lambda ds: Dataset.zip(ds, Dataset.range(90)),
    "concatenate": lambda ds: ds.concatenate(Dataset.range(3)),
    "prefetch": lambda ds: ds.prefetch(2),
    "cache": lambda ds: ds.cache(),
    "flat_map": lambda ds: ds.flat_map(lambda x: Dataset.range(4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_can_read_ahead_of_an_interleave_follows_its_open_datasets(name):
    opened = []

    def free(x):
        opened.append(int(x))
        return Dataset.range(50)

    def costly(x):
        return Dataset.range(50).map(lambda y: y if y >= 0 else -y)

    for function, is_free in ((free, True), (costly, False)):
        iterator = build_iterator(
            STEPS[name](Dataset.range(8).interleave(function, 4)).plan, seed=1
        )
        assert not iterator.can_read_ahead
        iterator.next_chunk(1)
        if name == "flat_map":
            is_free = True  # in the datasets that it opens itself
        assert iterator.can_read_ahead is is_free
        iterator.close()


def test_an_input_buffer_requests_only_what_it_needs_once_calls_are_needed():
    input_ = ListIterator([np.int64(n) for n in range(5000)])
    input_buffer = InputBuffer(input_)
    for _ in range(900):
        input_buffer.peek_ahead(1)
        input_buffer.consume(1)
    assert input_.most_asked > 50
    while input_buffer.num_buffered:
        input_buffer.consume(1)
    input_.most_asked, input_.can_read_ahead = 0, False
    assert input_buffer.peek_ahead(2).size == 2
    assert input_.most_asked == 2


def test_a_new_epoch_is_read_ahead_only_once_known_to_need_no_calls():
    calls = []

    def counted(x):
        calls.append(int(x))
        return x

    epochs = []

    def opened(x):
        epochs.append(int(x))
        inner = Dataset.range(200)
        return inner if len(epochs) == 1 else inner.map(counted)

    iterator = iter(Dataset.range(1).flat_map(opened).repeat(2))
    for _ in range(200):
        next(iterator)
    assert calls == []
    next(iterator)
    assert calls == [0]
    iterator.close()

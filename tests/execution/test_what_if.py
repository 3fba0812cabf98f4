"""The model that finds a pipeline's bottleneck and predicts the effects of changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.execution.what_if import (
    Change,
    PipelineMeasurement,
    Resource,
    StepCost,
    analyze,
)

READ = StepCost(name="read at train.py:1", seconds=0.002, position=0)
DECODE = StepCost(name="map at train.py:2", seconds=0.006, position=1)
BATCH = StepCost(name="batch at train.py:3", seconds=0.002, position=2)
STARVED = PipelineMeasurement(
    elements_per_second=100.0,
    steps=(READ, DECODE, BATCH),
    client_wait=0.9,
    client_capacity=1000.0,
)
"""Workers are busy all the time: 10 ms per element."""


def rates(measured, kind):
    return [each.elements_per_second for each in analyze(measured).what_ifs if each.kind is kind]


def only(measured, kind, step=""):
    (found,) = [
        each for each in analyze(measured).what_ifs if each.kind is kind and step in each.step
    ]
    return found


# --- bottleneck -----------------------------------------------------------------------------------


def test_busy_workers_are_limited_by_their_slowest_step():
    found = analyze(STARVED)
    assert found.resource is Resource.FUNCTIONS
    assert found.bottleneck.location == "map at train.py:2"
    assert found.cost == "60% of the workers' time, 6 ms per element"


def test_a_slow_source_is_named():
    slow = replace(STARVED, steps=(replace(READ, seconds=0.009), replace(DECODE, seconds=0.001)))
    assert analyze(slow).resource is Resource.SOURCE


@pytest.mark.parametrize(
    ("fields", "resource", "location"),
    [
        ({"num_tasks": 0}, Resource.WORKERS, "missing workers"),
        ({"num_clients": 0}, Resource.CLIENTS, "missing clients"),
        ({"client_wait": 0.0, "task_client_wait": 0.9}, Resource.CLIENTS, "the clients"),
        ({"client_wait": 0.7, "task_client_wait": 0.6}, Resource.NETWORK, "the connection"),
        ({"client_wait": 0.1, "task_client_wait": 0.1}, Resource.NOTHING, "nothing"),
        ({"task_split_wait": 0.7}, Resource.SPLITS, "split assignment"),
        ({"task_split_wait": 0.7, "is_ending": True}, Resource.SPLITS, "the last splits"),
        ({"steps": ()}, Resource.WORKERS, "the workers"),
        ({"steps": (replace(DECODE, seconds=0.001),)}, Resource.WORKERS, "the workers"),
        ({"elements_per_second": 0.0}, Resource.WORKERS, "map at train.py:2"),
    ],
)
def test_bottleneck_of_other_resources(fields, resource, location):
    found = analyze(replace(STARVED, **fields))
    assert (found.resource, found.bottleneck.location) == (resource, location)


def test_capacities_are_sorted_and_the_unknown_ones_last():
    known = replace(STARVED, cores=2.0, cpu_seconds=0.005)
    assert [(each.resource, each.elements_per_second) for each in analyze(known).capacities] == [
        (Resource.WORKERS, 100.0),
        (Resource.PROCESSORS, 400.0),
        (Resource.CLIENTS, 1000.0),
        (Resource.NETWORK, None),
    ]


def test_workers_that_wait_for_clients_have_a_higher_capacity():
    slow_client = replace(STARVED, client_wait=0.0, task_client_wait=0.75, client_capacity=100.0)
    assert analyze(slow_client).capacities[1].elements_per_second == 400.0


# --- changes --------------------------------------------------------------------------------------


def test_another_worker_adds_its_share():
    two = replace(STARVED, num_tasks=2, elements_per_second=200.0)
    assert rates(two, Change.ADD_WORKERS) == pytest.approx([1000.0, 300.0])
    assert only(two, Change.ADD_LOCAL_WORKER).gain == pytest.approx(1.5)


def test_workers_are_added_up_to_the_demand_of_the_clients():
    (most, one) = [each for each in analyze(STARVED).what_ifs if each.kind is Change.ADD_WORKERS]
    assert most.change == "9 more workers, on other machines"
    assert (most.elements_per_second, one.elements_per_second) == pytest.approx((1000.0, 200.0))


def test_a_worker_on_the_same_machine_needs_free_cores():
    busy = replace(STARVED, cores=1.5, cpu_seconds=0.01)
    found = only(busy, Change.ADD_LOCAL_WORKER)
    assert found.elements_per_second == pytest.approx(150.0)
    assert found.limited_by == "the 1.5 cores of the workers' machines"


def test_a_step_twice_as_fast_saves_half_of_its_time():
    found = only(STARVED, Change.SPEED_UP_STEP, "map")
    assert found.elements_per_second == pytest.approx(1 / 0.007)
    assert found.limited_by == "map at train.py:2"


def test_kept_output_saves_the_step_and_its_inputs():
    found = only(STARVED, Change.KEEP_OUTPUT, "map")
    assert found.elements_per_second == pytest.approx(500.0)
    assert found.limited_by == "batch at train.py:3"


def test_time_outside_of_the_steps_remains():
    slower = replace(STARVED, elements_per_second=80.0)  # 12.5 ms, of which 10 are explained
    found = only(slower, Change.KEEP_OUTPUT, "map")
    assert found.elements_per_second == pytest.approx(1 / 0.0045)
    assert found.limited_by == "sending and waits of the workers"


def test_threads_divide_the_time_of_a_function_that_waits():
    waiting = replace(STARVED, cores=8.0, cpu_seconds=0.001)
    found = only(waiting, Change.PARALLEL_CALLS)
    # The other steps now take longer than a quarter of the map.
    assert found.elements_per_second == pytest.approx(250.0)
    assert (found.at_most, found.limited_by) == (None, "read at train.py:1")


def test_threads_may_gain_nothing_if_the_function_computes():
    computing = replace(STARVED, cores=8.0, cpu_seconds=0.01)
    found = only(computing, Change.PARALLEL_CALLS)
    assert found.gain == pytest.approx(1.0)
    assert found.at_most == pytest.approx(250.0)
    assert found.limited_by == "the interpreter lock"


def test_threads_overlap_with_the_time_outside_of_the_steps():
    slow = replace(STARVED, steps=(DECODE,), cores=8.0, cpu_seconds=0.001)  # 4 of 10 ms outside
    assert only(slow, Change.PARALLEL_CALLS).elements_per_second == pytest.approx(250.0)


def test_threads_that_are_not_always_busy_agree_with_the_measured_rate():
    threads = replace(DECODE, seconds=0.02, threads=4)  # 5 ms of 10 ms
    partly_busy = replace(STARVED, steps=(threads,), cores=8.0, cpu_seconds=0.001)
    assert only(partly_busy, Change.PARALLEL_CALLS).gain == pytest.approx(1.0)
    faster = only(partly_busy, Change.SPEED_UP_STEP)
    assert (faster.gain, faster.limited_by) == (1.0, "sending and waits of the workers")


def test_without_processor_time_the_gain_of_threads_is_unknown():
    found = only(STARVED, Change.PARALLEL_CALLS)
    assert (found.elements_per_second, found.gain) == (None, None)
    assert found.at_most == pytest.approx(250.0)


def test_more_threads_for_a_step_that_has_some():
    threads = replace(DECODE, seconds=0.02, threads=2)
    busy = replace(STARVED, steps=(READ, threads, BATCH), cores=8.0, cpu_seconds=0.001)
    found = only(busy, Change.PARALLEL_CALLS)
    assert found.change.startswith("num_parallel_calls=4 ")
    assert found.elements_per_second == pytest.approx(200.0)


def test_prefetch_lets_two_halves_overlap():
    waiting = replace(STARVED, cores=8.0, cpu_seconds=0.001)
    found = only(waiting, Change.PREFETCH)
    assert found.step == "map at train.py:2"
    assert found.elements_per_second == pytest.approx(125.0)


def test_larger_splits_save_the_waits_for_splits():
    starved = replace(STARVED, task_split_wait=0.6)
    assert rates(starved, Change.LARGER_SPLITS) == pytest.approx([250.0])


def test_slow_clients_gain_nothing_from_any_change():
    slow = replace(STARVED, client_wait=0.0, task_client_wait=0.75, client_capacity=100.0)
    changes = analyze(slow).what_ifs
    assert changes
    assert {each.gain for each in changes if each.gain is not None} == {1.0}
    assert {each.at_most for each in changes if each.gain is None} == {100.0}


def test_a_bound_connection_predicts_nothing_and_says_why():
    bound = replace(STARVED, task_client_wait=0.9, bytes_per_element=1000.0)
    (found,) = analyze(bound).what_ifs
    assert (found.kind, found.gain) == (Change.FEWER_BYTES, None)
    assert "1,000 bytes per element" in found.note


def test_nothing_is_predicted_without_another_limit():
    alone = replace(STARVED, steps=(DECODE,), elements_per_second=1 / 0.006, client_capacity=None)
    found = only(alone, Change.KEEP_OUTPUT)
    assert found.elements_per_second is None
    assert "nothing else" in found.note


# --- properties -----------------------------------------------------------------------------------

seconds = st.floats(1e-6, 1.0)
ratios = st.floats(0.0, 1.0)
steps = st.builds(
    StepCost,
    name=st.sampled_from(["map at a.py:1", "read at a.py:2", "batch at a.py:3", "interleave"]),
    seconds=seconds,
    position=st.integers(-1, 5),
    threads=st.integers(0, 4),
)
measurements = st.builds(
    PipelineMeasurement,
    elements_per_second=st.floats(0.0, 1e6),
    num_tasks=st.integers(0, 20),
    steps=st.lists(steps, max_size=6).map(tuple),
    num_clients=st.integers(0, 3),
    client_wait=ratios,
    task_client_wait=ratios,
    task_split_wait=ratios,
    client_capacity=st.none() | st.floats(1.0, 1e6),
    bytes_per_element=st.floats(0.0, 1e6),
    cores=st.sampled_from([0.0, 1.0, 8.0]),
    cpu_seconds=st.none() | seconds,
    is_ending=st.booleans(),
)


@given(measurements)
def test_no_change_lowers_the_rate_or_exceeds_the_demand_of_the_clients(measured):
    rate = measured.elements_per_second
    limit = max(rate, measured.client_capacity or float("inf"))
    for each in analyze(measured).what_ifs:
        if each.elements_per_second is not None:
            assert rate <= each.elements_per_second <= limit
            assert each.gain == pytest.approx(each.elements_per_second / rate)
        assert each.elements_per_second is not None or each.note
        assert each.at_most is None or each.at_most <= limit


@given(measurements)
def test_changes_are_sorted_by_gain(measured):
    gains = [each.gain or 0.0 for each in analyze(measured).what_ifs]
    assert gains == sorted(gains, reverse=True)


@given(measurements, st.floats(1.0, 10.0))
def test_clients_that_want_more_never_lower_a_prediction(measured, factor):
    if measured.client_capacity is None:
        return
    more = replace(measured, client_capacity=measured.client_capacity * factor)
    before = {each.change: each.elements_per_second for each in analyze(measured).what_ifs}
    for each in analyze(more).what_ifs:
        known = before.get(each.change)
        if known is not None and each.elements_per_second is not None:
            assert each.elements_per_second >= known

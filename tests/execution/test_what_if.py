"""The model that finds a pipeline's bottleneck and predicts the effects of changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.execution.diagnosis import analyze
from headrace.execution.pipeline_model import PipelineMeasurement, Resource, StepCost
from headrace.execution.what_if import Change

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


def test_known_capacities_are_sorted():
    known = replace(STARVED, cores=2.0, cpu_seconds=0.005)
    assert [(each.resource, each.elements_per_second) for each in analyze(known).capacities] == [
        (Resource.WORKERS, 100.0),
        (Resource.PROCESSORS, 400.0),
        (Resource.CLIENTS, 1000.0),
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
    assert found.limited_by == "1.5 available cores of the workers' machines"


def test_a_step_twice_as_fast_saves_half_of_its_time():
    found = only(STARVED, Change.SPEED_UP_STEP, "map")
    assert found.elements_per_second == pytest.approx(1 / 0.007)
    assert found.limited_by == "map at train.py:2"


def test_saved_output_saves_the_step_and_its_inputs():
    found = only(STARVED, Change.SAVE_OUTPUT, "map")
    assert found.elements_per_second == pytest.approx(500.0)
    assert found.limited_by == "batch at train.py:3"


def test_time_outside_of_the_steps_remains():
    slower = replace(STARVED, elements_per_second=80.0)  # 12.5 ms, of which 10 are explained
    found = only(slower, Change.SAVE_OUTPUT, "map")
    assert found.elements_per_second == pytest.approx(1 / 0.0045)
    assert found.limited_by == "sending and waits of the workers"


def test_processor_time_remains_if_the_saved_step_mostly_waits():
    waiting = replace(STARVED, cores=8.0, cpu_seconds=0.0025)  # of 10 ms, 6 of them in the map
    found = only(waiting, Change.SAVE_OUTPUT, "map")
    assert (found.elements_per_second, found.at_most) == pytest.approx((400.0, 500.0))
    assert found.limited_by == "processor time of the other steps"
    assert "more, if the step uses the processor itself" in found.note


def test_saving_a_step_that_computes_saves_its_processor_time():
    computing = replace(STARVED, cores=8.0, cpu_seconds=0.01)
    found = only(computing, Change.SAVE_OUTPUT, "map")
    assert (found.elements_per_second, found.at_most) == (pytest.approx(500.0), None)


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


def test_more_threads_for_a_step_that_has_some():
    threads = replace(DECODE, seconds=0.02, threads=2)
    busy = replace(STARVED, steps=(READ, threads, BATCH), cores=8.0, cpu_seconds=0.001)
    found = only(busy, Change.PARALLEL_CALLS)
    assert found.change.startswith("num_parallel_calls=4 ")
    assert found.elements_per_second == pytest.approx(200.0)


def test_without_processor_time_threads_may_gain_nothing():
    found = only(STARVED, Change.PARALLEL_CALLS)
    assert (found.gain, found.at_most) == pytest.approx((1.0, 250.0))


def test_slow_clients_gain_nothing_from_any_change():
    slow = replace(STARVED, client_wait=0.0, task_client_wait=0.75, client_capacity=100.0)
    assert analyze(slow).what_ifs == ()


def test_clients_that_do_not_read_gain_nothing_from_more_workers():
    idle = replace(STARVED, elements_per_second=4e-4, client_wait=0.0, task_client_wait=1.0)
    assert analyze(replace(idle, client_capacity=None)).what_ifs == ()


def test_a_bound_connection_predicts_nothing():
    assert analyze(replace(STARVED, task_client_wait=0.9)).what_ifs == ()


def test_no_gain_is_promised_without_another_limit():
    alone = replace(STARVED, steps=(DECODE,), elements_per_second=1 / 0.006, client_capacity=None)
    assert only(alone, Change.SAVE_OUTPUT).gain == 1.0


def test_another_worker_gets_nothing_once_all_splits_are_assigned():
    ending = replace(STARVED, is_ending=True)  # such as a generator, which is a single split
    kinds = {each.kind for each in analyze(ending).what_ifs}
    assert not kinds & {Change.ADD_WORKERS, Change.ADD_LOCAL_WORKER}


def test_more_workers_are_not_suggested_for_a_demand_that_cannot_be_extrapolated():
    eager = replace(STARVED, client_capacity=5000.0)
    assert rates(eager, Change.ADD_WORKERS) == pytest.approx([200.0])


@pytest.mark.parametrize(("has_splits", "note"), [(True, "keeps nothing"), (False, "repeat()")])
def test_a_cache_is_suggested_only_where_workers_keep_it(has_splits, note):
    assert note in only(replace(STARVED, has_splits=has_splits), Change.SAVE_OUTPUT, "map").note


def test_output_of_a_source_is_not_saved():
    slow = replace(STARVED, steps=(replace(READ, seconds=0.009), replace(DECODE, seconds=0.001)))
    assert {each.step for each in analyze(slow).what_ifs if each.kind is Change.SAVE_OUTPUT} == {
        DECODE.name
    }


# --- cores used by other programs -----------------------------------------------------------------

CROWDED = replace(STARVED, cores=2.0, cpu_seconds=0.01, idle_cores=0.4)
"""Of two cores, the worker uses one, and other programs 0.6."""


def test_a_worker_on_the_same_machine_gets_the_idle_cores_and_possibly_more():
    found = only(CROWDED, Change.ADD_LOCAL_WORKER)
    assert (found.elements_per_second, found.at_most) == pytest.approx((140.0, 200.0))
    assert found.limited_by == "1.4 available cores of the workers' machines"
    assert "other programs, which use 0.6" in found.note


def test_idle_cores_of_an_idle_machine_do_not_make_a_range():
    found = only(replace(CROWDED, idle_cores=1.0), Change.ADD_LOCAL_WORKER)
    assert (found.elements_per_second, found.at_most) == pytest.approx((200.0, None))


def test_workers_on_other_machines_need_no_idle_cores():
    assert rates(CROWDED, Change.ADD_WORKERS)[-1] == pytest.approx(200.0)


def test_computation_after_a_saved_step_needs_idle_cores():
    # The map waits; the other steps use the processor for 4 ms per element, all that is used.
    waiting = replace(CROWDED, cpu_seconds=0.004, idle_cores=0.1)
    found = only(waiting, Change.SAVE_OUTPUT, "map")  # 2 ms remain
    assert (found.elements_per_second, found.at_most) == pytest.approx((250.0, 500.0))


def test_other_programs_on_the_cores_are_mentioned():
    assert analyze(CROWDED).bottleneck.advice.startswith("other programs use 0.6 of the 2 cores")
    assert analyze(replace(CROWDED, idle_cores=0.9)).bottleneck.advice == ""


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
    idle_cores=st.none() | st.floats(0.0, 8.0),
    has_splits=st.booleans(),
    cpu_seconds=st.none() | seconds,
    is_ending=st.booleans(),
)


@given(measurements)
def test_no_change_lowers_the_rate_or_exceeds_the_demand_of_the_clients(measured):
    rate = measured.elements_per_second
    limit = max(rate, measured.client_capacity or float("inf"))
    for each in analyze(measured).what_ifs:
        assert rate <= each.elements_per_second <= (each.at_most or limit) <= limit
        assert each.gain == pytest.approx(each.elements_per_second / rate)


@given(measurements)
def test_changes_are_sorted_by_gain(measured):
    gains = [each.gain for each in analyze(measured).what_ifs]
    assert gains == sorted(gains, reverse=True)


@given(measurements, st.floats(1.0, 10.0))
def test_clients_that_want_more_never_lower_a_prediction(measured, factor):
    if measured.client_capacity is None:
        return
    more = replace(measured, client_capacity=measured.client_capacity * factor)
    before = {each.change: each.elements_per_second for each in analyze(measured).what_ifs}
    for each in analyze(more).what_ifs:
        assert each.elements_per_second >= before.get(each.change, 0.0)

"""The iterator that users see: its ends, its states, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, OutOfRangeError, UserFunctionError

Dataset = hr.Dataset


def test_get_next_ends_with_an_error_that_is_a_stop_iteration():
    iterator = iter(Dataset.range(1))
    assert iterator.get_next() == 0
    with pytest.raises(OutOfRangeError, match="no more elements"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


def test_closed_iterator_yields_no_element():
    with iter(Dataset.range(5)) as iterator:
        assert next(iterator) == 0
        state = iterator.get_state()
    assert list(iterator) == []
    assert iterator.get_state() == state
    iterator.close()
    iterator.set_state(state)
    assert [int(x) for x in iterator] == [1, 2, 3, 4]


def test_state_has_the_documented_keys():
    dataset = Dataset.range(9).filter(lambda x: bool(x % 2)).shuffle(2, seed=3).prefetch(2)
    options = hr.Options(seed=11)
    iterator = iter(dataset.with_options(options))
    next(iterator)
    state = iterator.get_state()
    assert state == json.loads(json.dumps(state))
    assert {key: state[key] for key in ("version", "seed", "epoch")} == {
        "version": 3,
        "seed": 11,
        "epoch": 0,
    }
    assert [step[0] for step in state["plan"]] == ["RangeSource", "filter", "shuffle"]
    assert list(state["position"]) == ["stream"]


@pytest.mark.parametrize(
    ("saved", "restored", "message"),
    [
        (lambda: Dataset.range(5).shuffle(2), lambda: Dataset.range(5), "step 2, shuffle"),
        (lambda: Dataset.range(5).shuffle(2), lambda: Dataset.range(5).shuffle(3), "was 2, is 3"),
        (lambda: Dataset.range(5).shuffle(2, seed=1), lambda: Dataset.range(5).shuffle(2), "seed"),
        (lambda: Dataset.range(5).batch(2), lambda: Dataset.range(5).batch(3), "was 2, is 3"),
        (lambda: Dataset.range(9).shard(3, 0), lambda: Dataset.range(9).shard(3, 1), "index"),
        (lambda: Dataset.range(9), lambda: Dataset.range(8), "RangeSource"),
        (lambda: Dataset.range(9).map(abs), lambda: Dataset.range(9).map(int), "abs"),
        (
            lambda: Dataset.range(9).interleave(Dataset.from_tensors, cycle_length=2),
            lambda: Dataset.range(9).interleave(Dataset.from_tensors, cycle_length=4),
            "cycle_length was 2, is 4",
        ),
    ],
)
def test_state_of_another_pipeline_error_names_the_different_step(saved, restored, message):
    state = iter(saved()).get_state()
    iterator = iter(restored())
    with pytest.raises(FailedPreconditionError, match=message):
        iterator.set_state(state)
    assert len(list(iterator)) > 0


def test_invalid_states_and_other_versions_are_rejected():
    iterator = iter(Dataset.range(5))
    state = iterator.get_state()
    with pytest.raises(TypeError, match="`state`"):
        iterator.set_state("here")
    with pytest.raises(FailedPreconditionError, match="version 99"):
        iterator.set_state({**state, "version": 99})
    old = {"version": 1, "plan": "3a", "seed": 1, "epoch": 0, "skip": 0, "at": None}
    with pytest.raises(
        FailedPreconditionError, match="version 1, but this version of Headrace reads"
    ):
        iterator.set_state(old)
    with pytest.raises(FailedPreconditionError, match="directions"):
        iterator.set_state({**state, "position": {"directions": {}}})
    with pytest.raises(
        FailedPreconditionError, match="does not contain a set of delivered elements"
    ):
        iterator.set_state({**state, "position": {"positions": {}}})


def test_changed_function_code_gives_a_warning():
    def saved():
        def fn(x):
            return x + 1

        return Dataset.range(5).map(fn)

    def restored():
        def fn(x):
            return x + 2

        return Dataset.range(5).map(fn)

    first, second = iter(saved()), iter(restored())
    next(first)
    state = json.loads(json.dumps(first.get_state()).replace("saved", "restored"))
    # The names of functions count: theirs are made alike.
    state["plan"] = [
        [*new[:2], *old[2:]]
        for old, new in zip(state["plan"], second.get_state()["plan"], strict=True)
    ]
    with pytest.warns(UserWarning, match="code of its function has changed"):
        second.set_state(state)
    assert next(second) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.set_state(first.get_state())


def test_the_state_of_an_index_plan_is_small_however_large_the_buffer():
    iterator = iter(Dataset.range(10**7).shuffle(50_000).repeat().batch(256))
    for _ in range(100):
        next(iterator)
    assert iterator.get_state()["position"] == {"stream": 100}
    assert len(json.dumps(iterator.get_state())) < 500


def test_restoring_an_earlier_state_repeats_the_elements():
    iterator = iter(Dataset.range(10).shuffle(10))
    start = iterator.state_dict()
    first = [int(x) for x in iterator]
    iterator.load_state_dict(start)
    assert [int(x) for x in iterator] == first


def test_a_state_can_be_taken_before_between_and_after_all_elements():
    dataset = Dataset.range(3).filter(lambda x: bool(x >= 0))
    iterator = iter(dataset)
    states = [iterator.get_state()]
    for _ in iterator:
        states.append(iterator.get_state())
    states.append(iterator.get_state())
    for state, count in zip(states, [3, 2, 1, 0, 0], strict=True):
        iterator.set_state(state)
        assert iterator.get_state() == state
        assert len(list(iterator)) == count


def test_restore_does_not_raise_errors_of_skipped_elements():
    def fail(x):
        return 1 // 0 if x == 2 else x

    dataset = Dataset.range(20).map(fail).filter(lambda x: bool(x >= 0)).shuffle(8, seed=1)
    iterator = iter(dataset)
    with pytest.raises(UserFunctionError):
        next(iterator)
    next(iterator)
    state = iterator.get_state()
    rest = [int(x) for x in iterator]
    other = iter(dataset)
    other.set_state(state)
    assert [int(x) for x in other] == rest


def test_epochs_differ_unless_options_fix_the_seed():
    dataset = Dataset.range(50).shuffle(50)
    fixed = dataset.with_options(hr.Options(seed=4))
    again = dataset.with_options(hr.Options(seed=4))
    first, second = [int(x) for x in fixed], [int(x) for x in fixed]
    assert first != second
    assert [int(x) for x in again] == first
    later = dataset.with_options(hr.Options(seed=5)).with_options(hr.Options(seed=4))
    assert [int(x) for x in later] == first


def test_performance_steps_do_not_change_the_order():
    plain = Dataset.range(50).shuffle(7).filter(lambda x: bool(x >= 0)).shuffle(5)
    with_more = (
        Dataset.range(50)
        .map(lambda x: x)
        .prefetch(3)
        .shuffle(7)
        .map(abs, num_parallel_calls=2)
        .filter(lambda x: bool(x >= 0))
        .prefetch(2)
        .shuffle(5)
    )
    options = hr.Options(seed=4)
    assert list(plain.with_options(options)) == list(with_more.with_options(options))


def test_element_spec_of_an_iterator():
    assert iter(Dataset.range(3).batch(2)).element_spec == hr.ArraySpec((None,), "int64")


def test_unfinished_iterator_at_exit_prints_nothing():
    program = (
        "import headrace as hr, threading\n"
        "ds = hr.Dataset.range(10**6).map(lambda x: x if x else x, num_parallel_calls=2)\n"
        "its = [iter(ds.prefetch(4)), iter(ds), iter(hr.Dataset.range(9).map(str).prefetch(2))]\n"
        "its += [iter(hr.Dataset.range(99).interleave(hr.Dataset.range, num_parallel_calls=2))]\n"
        "for it in its:\n"
        "    next(it)\n"
        "loop = [its]\n"
        "loop.append(loop)\n"
        "class Holder:\n"
        "    held = its\n"
        "threading.Thread(target=lambda: threading.main_thread().join(), daemon=False).start()\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("state", [{"version": 3}, {"version": 3, "plan": [], "seed": 1}])
def test_incomplete_state_is_rejected(state):
    with pytest.raises(hr.errors.FailedPreconditionError, match="'position'"):
        iter(hr.Dataset.range(3)).set_state(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": "x"}, "the seed of the state must be a 64-bit integer, got 'x'; restore"),
        ({"seed": 1 << 80}, "the seed of the state must be a 64-bit integer, got 1208"),
        ({"fixed_seeds": ["x"]}, r"`fixed_seeds` of the state must be a list of int, got \['x'\]"),
        (
            {"fixed_seeds": [1 << 80]},
            "the fixed seed of the state must be a 64-bit integer, got 1208",
        ),
        ({"plan": 5}, "`plan` of the state must be a list of list, got 5"),
        ({"plan": [5]}, r"`plan` of the state must be a list of list, got \[5\]"),
        ({"position": {"stream": 3, "service_steps": "x"}}, "`service_steps` .* got 'x'"),
        (
            {"position": {"stream": 3, "service_steps": [99]}},
            r"`distribute` after step 99 \(missing\)",
        ),
        ({"epoch": -1}, "`epoch` of the state must .* got -1"),
        ({"position": {}}, r"`position` of the state must be .* got \{\}; restore"),
        ({"position": 5}, "`position` of the state must be .* got 5"),
        ({"position": {"splits": 3}}, "`partition_mode` .* must be one of .* got None"),
        ({"position": {"splits": 3, "partition_mode": "left"}}, "`partition_mode` .* got 'left'"),
        (
            {"position": {"positions": {"watermark": -3}}},
            "does not contain a set of delivered elements",
        ),
        (
            {"position": {"positions": {"watermark": 0, "delivered": [[4, 2]]}}},
            "does not contain a set of delivered elements",
        ),
        (
            {"position": {"positions": {"watermark": 0, "partial_splits": [[-1, 1, [[0, 1]]]]}}},
            "does not contain a set of delivered elements",
        ),
    ],
)
def test_modified_state_error_names_the_invalid_value(changed, message):
    iterator = iter(Dataset.range(9))
    state = iterator.get_state()
    with pytest.raises(FailedPreconditionError, match=message):
        iterator.set_state({**state, **changed})
    assert len(list(iterator)) == 9


def test_state_of_another_kind_is_not_reported_as_another_version():
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    state = iter(strategy.distribute_dataset(hr.Dataset.range(4).batch(2))).get_state()
    with pytest.raises(TypeError, match="a state of another kind; restore it into"):
        iter(hr.Dataset.range(4).batch(2)).set_state(state)

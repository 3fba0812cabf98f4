"""Mixtures whose weights follow a schedule, a function of the step or a dataset."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import UserFunctionError
from headrace.execution import input_selector
from headrace.service import ShardingPolicy, distribute

Dataset = hr.Dataset


@pytest.fixture(autouse=True)
def _few_skipped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function without weight for the remaining datasets end sooner."""
    monkeypatch.setattr(input_selector, "_MAX_SKIPPED_ROWS", 300)


def sources(*sizes: int | None) -> list[Any]:
    """Return datasets of these sizes; source k has the numbers from 100 * k on."""
    return [
        Dataset.counter(10_000 * number) if size is None else Dataset.range(first, first + size)
        for number, size in enumerate(sizes)
        for first in [100 * number]
    ]


def mix(sizes: Any, weights: Any, **arguments: Any) -> Dataset[Any]:
    return Dataset.sample_from_datasets(sources(*sizes), weights, seed=5, **arguments)


def values(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


STAGES = [(0, [0.8, 0.2, 0]), (20, [0.2, 0.4, 0.4]), (50, [0, 0, 1])]


def by_function(step: Any) -> list[float]:
    return next(weights for first, weights in reversed(STAGES) if step >= first)


def by_dataset() -> Dataset[Any]:
    return Dataset.range(1000).map(by_function)


SPELLINGS = {
    "pairs": lambda: STAGES,
    "function": lambda: by_function,
    "dataset": by_dataset,
}
SIZES = [
    (None, None, None),
    (60, 60, 60),
    (3, 60, 60),  # ends in the first stage
    (60, 2, 30),
    (3, 2, 30),  # the first stage has no input left
    (0, 0, 5),
    (9, 9, 0),
]


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_spellings_of_a_schedule_choose_the_same(sizes: Any, stops: bool) -> None:
    pairs, function, dataset = (
        values(mix(sizes, make(), stop_on_empty_dataset=stops).take(120))
        for make in SPELLINGS.values()
    )
    assert pairs == function == dataset
    for number in range(3):
        first = 100 * number if sizes[number] is not None else 10_000 * number
        own = [x for x in pairs if first <= x < first + 100]
        assert own == list(range(first, first + len(own)))


def test_weights_apply_from_their_steps_on() -> None:
    endless = (None, None, None)
    found = values(mix(endless, [(0, [1, 0, 0]), (500, [0, 1, 0]), (700, [1, 0, 3])]).take(1500))
    assert found[:700] == [*range(500), *range(10_000, 10_200)]
    # Choices depend on seed and step only, so they are those of constant weights.
    constant = values(mix(endless, [1, 0, 3]).take(1500))
    assert [x // 10_000 for x in found[700:]] == [x // 10_000 for x in constant[700:]]


def test_a_schedule_of_one_stage_equals_constant_weights() -> None:
    constant = mix((50, 50, 9), [5, 3, 2])
    for weights in ([(0, [5, 3, 2])], lambda step: [5, 3, 2], ((0, (5, 3, 2)), (30, (5, 3, 2)))):
        assert values(mix((50, 50, 9), weights)) == values(constant)


def test_a_stage_without_remaining_input_leads_to_the_next() -> None:
    assert values(mix((4, 9, 9), [(0, [1, 0, 0]), (100, [0, 1, 0]), (105, [0, 0, 1])])) == [
        *range(4), *range(100, 105), *range(200, 209),
    ]  # fmt: skip
    stopped = mix((4, 9, 9), [(0, [1, 0, 0]), (100, [0, 1, 0])], stop_on_empty_dataset=True)
    assert values(stopped) == list(range(4))


def test_rows_without_weight_for_a_remaining_input_are_skipped() -> None:
    rows = Dataset.from_tensor_slices(np.array([[1, 0]] * 5 + [[0, 1]] * 3))
    # As in tf.data: each choice of an ended dataset uses one row.
    assert values(Dataset.sample_from_datasets(sources(3, 9), rows)) == [0, 1, 2, 100, 101, 102]


def test_a_function_without_weight_for_the_rest_ends_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert values(mix((3, 9), lambda step: [1, 0])) == [0, 1, 2]
    assert "ends at step 303" in caplog.text
    assert "datasets [0] have ended" in caplog.text


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("sizes", [(3, 60, 60), (3, 2, 30), (25, 8, 30)], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_mixture_resumes_at_every_element(spelling: str, sizes: Any, stops: bool) -> None:
    dataset = mix(sizes, SPELLINGS[spelling](), stop_on_empty_dataset=stops)
    expected = values(dataset)
    used = iter(dataset)
    with iter(dataset) as iterator:
        for count in range(len(expected) + 1):
            state = json.loads(json.dumps(iterator.get_state()))
            for restored in (used, iter(dataset)):
                restored.set_state(state)
                assert values(restored) == expected[count:], f"{count=}"
                restored.close()
            next(iterator, None)


def test_each_epoch_begins_with_the_first_stage() -> None:
    dataset = mix((30, 30), [(0, [1, 0]), (10, [0, 1])]).take(15).repeat(2)
    assert values(dataset) == [*range(10), *range(100, 105)] * 2


@pytest.mark.system
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("spelling", ["pairs", "function"])
def test_data_workers_mix_like_one_process(spelling: str, ordered: bool, stops: bool) -> None:
    dataset = mix((12, 40, 30), SPELLINGS[spelling](), stop_on_empty_dataset=stops)
    expected = values(dataset)
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        remote = dataset.apply(
            distribute(ShardingPolicy.DYNAMIC, service=cluster.target, ordered=ordered)
        )
        assert values(remote) == expected
        for count in (0, 5, len(expected) - 1):
            with iter(remote) as iterator:
                rows = [int(next(iterator)) for _ in range(count)]
                state = json.loads(json.dumps(iterator.get_state()))
            with iter(remote) as restored:
                restored.set_state(state)
                assert rows + values(restored) == expected, f"{count=}"


def test_an_error_of_the_function_is_raised_at_its_step() -> None:
    def fail_at_2(step: Any) -> list[int]:
        if step == 2:
            raise KeyError(step)
        return [1]

    iterator = iter(Dataset.sample_from_datasets(sources(5), fail_at_2))
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(UserFunctionError, match=r"KeyError for element 2"):
        next(iterator)
    assert values(iterator) == [2, 3, 4]


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([(1, [1, 1])], ValueError, "must begin with 0 and ascend"),
        ([(0, [1, 1]), (0, [1, 0])], ValueError, "must begin with 0 and ascend"),
        ([(0, [1, 1]), (5, [1])], ValueError, "2 values, one for each dataset, but got 1"),
        ([(0, [1, 1]), (5, [0, 0])], ValueError, "not all 0"),
        ([(0, [1, 1]), (5.5, [1, 0])], TypeError, "a step of `weights`` must be an integer"),
        ([(0, 1, 1), (5, 1, 0)], TypeError, "pairs of a step and a list of weights"),
        ([(0, 1), (5, 1)], TypeError, "`weights` must be a list of numbers"),
        ([[0, [1, 1]], 5], TypeError, "`weights` must be numbers"),
    ],
)
def test_wrong_schedules_are_rejected_where_they_are_written(
    weights: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mix((5, 5), weights)


def test_the_length_of_a_scheduled_mixture_is_returned_where_it_is_known() -> None:
    infinite, unknown = hr.INFINITE_CARDINALITY, hr.UNKNOWN_CARDINALITY
    assert mix((3, 4), [(0, [1, 1]), (9, [1, 2])]).cardinality() == 7
    assert mix((3, 4), [(0, [1, 1]), (9, [0, 1])]).cardinality() == unknown
    assert mix((3, 4), [(0, [0, 1]), (9, [1, 1])]).cardinality() == 7
    assert mix((3, None), [(0, [1, 0]), (9, [1, 1])]).cardinality() == infinite
    assert mix((3, None), [(0, [1, 1]), (9, [1, 0])]).cardinality() == unknown
    stopped = mix((None, None), [(0, [1, 0]), (9, [0, 1])], stop_on_empty_dataset=True)
    assert stopped.cardinality() == infinite


def test_a_state_of_another_schedule_is_rejected() -> None:
    state = iter(mix((9, 9), [(0, [1, 1])])).get_state()
    with pytest.raises(hr.errors.FailedPreconditionError, match="weights was"):
        iter(mix((9, 9), [(0, [1, 1]), (4, [1, 3])])).set_state(state)

"""Samples and choices: each element is taken from one of several datasets."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.build import build_iterator

Dataset = hr.Dataset


def three(size=10):
    return [Dataset.range(first, first + size) for first in (0, 1000, 2000)]


def outcomes(dataset, most=10**6):
    """Return the elements as Python values, and errors by their kinds."""
    got = []
    with iter(dataset) as iterator:
        while len(got) < most:
            try:
                got.append(np.asarray(next(iterator)).tolist())
            except StopIteration:
                break
            except UserFunctionError as error:
                got.append(error.original_type)
            except InvalidElementError as error:
                got.append(str(error))
    return got


def chosen(choices, members, stops):
    """Return the elements that plain Python selects from several lists."""
    rests, got = [iter(member) for member in members], []
    ended = set()
    for choice in choices:
        for element in itertools.islice(rests[choice], 1):
            got.append(element)
            break
        else:
            ended.add(choice)
            if stops or len(ended) == len(members):
                break
    return got


def branching(x):
    return x if x >= 0 else -x


# --- choices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("is_costly", [False, True])
def test_choices_select_the_elements_that_plain_python_selects(seed, stops, is_costly):
    numbers = [int(x) for x in Dataset.random(seed=seed).map(lambda x: x % 3).take(60)]
    members = [range(9), range(100, 125), range(200, 203)]
    datasets = [Dataset.range(m.start, m.stop) for m in members]
    choices = Dataset.from_tensor_slices(np.array(numbers))
    if is_costly:
        datasets[1], choices = datasets[1].map(branching), choices.map(branching)
        datasets[2] = datasets[2].map(branching)
    dataset = Dataset.choose_from_datasets(datasets, choices, stop_on_empty_dataset=stops)
    assert outcomes(dataset) == chosen(numbers, members, stops), f"{seed=}"


def test_an_input_is_read_only_as_far_as_it_is_chosen():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    datasets = [member.map(note) for member in three(5000)]
    choices = Dataset.random(seed=1).map(lambda x: x % 3)
    with iter(Dataset.choose_from_datasets(datasets, choices)) as iterator:
        for count in range(1, 301):
            next(iterator)
            assert len(calls) == count
    calls.clear()
    free = Dataset.range(9000, 9009)
    batches = Dataset.sample_from_datasets([*datasets, free], seed=1).batch(10)
    with iter(batches) as iterator:
        batch = next(iterator).tolist()
    assert sorted(calls) == sorted(x for x in batch if x < 9000)
    assert len(calls) < 10 == len(batch)


def test_an_error_is_raised_in_its_turn():
    def odd(x):
        return 1 // 0 if x % 2 else x

    datasets = [Dataset.range(6).map(odd), Dataset.range(10, 13)]
    choices = Dataset.from_tensor_slices(np.array([1, 0, 0, 1, 0, 0, 1, 0]))
    error = "ZeroDivisionError"
    assert outcomes(Dataset.choose_from_datasets(datasets, choices)) == [
        10, 0, error, 11, 2, error, 12, 4,
    ]  # fmt: skip


@pytest.mark.parametrize("choice", [3, -1, 0.5, [0, 1], b"0"])
def test_an_invalid_choice_drops_one_step(choice):
    choices = Dataset.from_generator(lambda: iter([1, choice, 2]))
    got = outcomes(Dataset.choose_from_datasets(three(), choices))
    assert [got[0], got[2]] == [1000, 2000]
    assert "choose_from_datasets (test_input_selection.py:" in got[1]
    assert "must be integers from 0 to 2" in got[1]


def test_elements_of_different_shapes_are_not_changed():
    datasets = [Dataset.range(3).map(lambda n: [n] * int(n)), Dataset.from_tensors(b"x").repeat()]
    choices = Dataset.range(2).repeat()
    with iter(Dataset.choose_from_datasets(datasets, choices)) as iterator:
        got = [next(iterator) for _ in range(6)]
    assert [x.tolist() for x in got[::2]] == [[], [1], [2, 2]]
    assert got[1::2] == [b"x"] * 3


# --- samples --------------------------------------------------------------------------------------


def test_weights_determine_how_often_an_input_is_drawn():
    endless = [Dataset.from_tensors(n).repeat() for n in range(4)]
    sample = Dataset.sample_from_datasets(endless, [6, 3, 0, 1], seed=5)
    found = Counter(outcomes(sample, 10_000))
    assert found.keys() == {0, 1, 3}
    # Give or take five standard deviations.
    for number, share in ((0, 0.6), (1, 0.3), (3, 0.1)):
        assert abs(found[number] - 10_000 * share) < 5 * (10_000 * share * (1 - share)) ** 0.5


def test_all_inputs_are_read_to_their_ends_in_their_order():
    got = outcomes(Dataset.sample_from_datasets(three(), [0.1, 0.3, 0.6]))
    assert sorted(got) == [n for first in (0, 1000, 2000) for n in range(first, first + 10)]
    for first in (0, 1000, 2000):
        own = [n for n in got if first <= n < first + 10]
        assert own == sorted(own)


def test_remaining_inputs_are_drawn_by_their_own_weights():
    seen = Counter()
    for seed in range(400):
        ends = [
            Dataset.range(0),
            Dataset.from_tensors(1).repeat(),
            Dataset.from_tensors(2).repeat(),
        ]
        (first,) = outcomes(Dataset.sample_from_datasets(ends, [8, 1, 1], seed=seed), 1)
        seen[first] += 1
    assert abs(seen[1] - 200) < 50  # five standard deviations


def test_stop_on_empty_ends_at_the_first_draw_of_an_ended_input():
    datasets = [Dataset.range(3), Dataset.from_tensors(7).repeat()]
    sample = Dataset.sample_from_datasets(datasets, seed=2, stop_on_empty_dataset=True)
    got = outcomes(sample)
    assert [x for x in got if x != 7] == [0, 1, 2]
    endless = Dataset.sample_from_datasets(datasets, seed=2)
    assert outcomes(endless, len(got)) == got
    assert outcomes(endless, len(got) + 50)[len(got) :] == [7] * 50


def test_choices_do_not_depend_on_the_request_size():
    def make():
        return Dataset.sample_from_datasets(three(), [0.5, 0.3, 0.2], seed=9).plan

    whole = build_iterator(make(), seed=1)
    chunks = iter(lambda: whole.next_chunk(1000), None)
    together = [int(x) for chunk in chunks for x in chunk.rows()]
    single = build_iterator(make(), seed=1)
    assert [int(c.rows()[0]) for c in iter(lambda: single.next_chunk(1), None)] == together
    assert len(together) == 30


def test_weights_may_change_from_step_to_step():
    endless = [Dataset.from_tensors(n).repeat() for n in range(3)]
    weights = Dataset.range(9).map(lambda n: [n % 3 == k for k in range(3)])
    assert outcomes(Dataset.sample_from_datasets(endless, weights)) == [0, 1, 2] * 3
    wrong = Dataset.from_generator(lambda: iter([[1, 0, 0], [1, 1], [-1, 0, 0], [0, 0, 1]]))
    got = outcomes(Dataset.sample_from_datasets(endless, wrong))
    assert [got[0], got[3]] == [0, 2]
    assert "sample_from_datasets (test_input_selection.py:" in got[1]
    assert "3 values, one for each dataset, but got 2" in got[1]
    assert "must be finite, at least 0" in got[2]


@pytest.mark.parametrize(
    ("seed", "rerandomize", "same_pass", "same_iteration"),
    [
        (None, None, False, False),
        (None, True, False, False),
        (None, False, True, True),
        (3, None, True, True),
        (3, False, True, True),
        (3, True, False, False),
    ],
)
def test_rerandomize_each_iteration_controls_repeated_draws(
    seed, rerandomize, same_pass, same_iteration
):
    sample = Dataset.sample_from_datasets(
        three(30), seed=seed, rerandomize_each_iteration=rerandomize
    )
    twice = outcomes(sample.repeat(2))
    assert (twice[:90] == twice[90:]) == same_pass
    assert (outcomes(sample) == outcomes(sample)) == same_iteration


def test_the_seed_of_the_options_is_used_if_none_was_given():
    def make():
        return Dataset.sample_from_datasets(three()).with_options(hr.Options(seed=4))

    assert outcomes(make()) == outcomes(make())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"datasets": []}, ValueError, "needs at least one dataset"),
        ({"datasets": [1]}, TypeError, "`datasets` must contain Datasets, but has a int"),
        ({"datasets": 5}, TypeError, "`datasets` must be a list of Datasets"),
        ({"weights": [1, 2]}, ValueError, "3 values, one for each dataset, but got 2"),
        ({"weights": [1, 2, -1]}, ValueError, "at least 0"),
        ({"weights": [0, 0, 0]}, ValueError, "not all 0"),
        ({"weights": [1, 2, float("nan")]}, ValueError, "finite"),
        ({"weights": "abc"}, TypeError, "`weights` must be a list of numbers, pairs"),
        ({"weights": ["a", 1, 1]}, TypeError, "`weights` must be numbers"),
        ({"seed": "a"}, TypeError, "`seed` must be an integer"),
        ({"stop_on_empty_dataset": None}, TypeError, "`stop_on_empty_dataset` must be a bool"),
    ],
)
def test_wrong_arguments_are_rejected_immediately(arguments, error, message):
    with pytest.raises(error, match=message):
        Dataset.sample_from_datasets(**{"datasets": three(), **arguments})


def test_cardinality_is_returned_where_it_is_known():
    endless, some = Dataset.range(3).repeat(), Dataset.range(4)
    infinite, unknown = hr.INFINITE_CARDINALITY, hr.UNKNOWN_CARDINALITY
    sample, choose = Dataset.sample_from_datasets, Dataset.choose_from_datasets
    assert sample([some, some]).cardinality() == 8
    assert sample([some, endless]).cardinality() == infinite
    assert sample([some, endless], [1, 0]).cardinality() == 4
    assert sample([some, some.filter(lambda x: x > 1)]).cardinality() == unknown
    assert sample([some, endless], stop_on_empty_dataset=True).cardinality() == unknown
    assert sample([endless, endless], stop_on_empty_dataset=True).cardinality() == infinite
    assert choose([endless, endless], some).cardinality() == 4
    assert choose([endless, some], some).cardinality() == unknown
    assert choose([some], Dataset.range(0)).cardinality() == 0


def test_specs_cover_all_inputs():
    short, long = Dataset.from_tensors(np.zeros(2)), Dataset.from_tensors(np.zeros(3))
    assert Dataset.sample_from_datasets([short, long]).element_spec == hr.ArraySpec((None,), float)
    with pytest.raises(InvalidElementError, match="no spec matches both"):
        _ = Dataset.sample_from_datasets([short, Dataset.range(3)]).element_spec

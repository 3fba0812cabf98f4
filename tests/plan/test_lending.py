"""What is kept is lent where no function of the user's stands between it and who only reads."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.plan.elements import Gather
from headrace.plan.lending import lending_steps
from headrace.plan.node import distinct
from headrace.rewrites.normal import normalize

Dataset = hr.Dataset


def rows():
    return Dataset.from_tensor_slices(np.arange(8.0).reshape(4, 2))


def lent(dataset) -> list[bool]:
    """Return for each place where elements are fetched whether they may be lent there."""
    plan = normalize(dataset.plan).plan
    lending = lending_steps(plan)
    return [id(node) in lending for node in distinct([plan]) if isinstance(node, Gather)]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds,
        lambda ds: ds.shuffle(2).repeat(2).batch(2),
        lambda ds: ds.prefetch(2),
        lambda ds: ds.cache(),
        lambda ds: ds.cache().shuffle(2).repeat().batch(2).unbatch().take(3).skip(1).shard(2, 0),
        lambda ds: ds.cache().enumerate(),
        lambda ds: ds.padded_batch(2).prefetch(2),
        lambda ds: Dataset.sample_from_datasets([ds.cache()]),
    ],
)
def test_what_is_only_passed_on_is_lent(step):
    assert lent(step(rows())) == [True]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.map(lambda x: x),
        lambda ds: ds.batch(2).map(lambda x: x).prefetch(2),
        lambda ds: ds.filter(lambda x: True),
        lambda ds: ds.take_while(lambda x: True),
        lambda ds: ds.scan(0, lambda value, x: (value, x)),
        lambda ds: ds.bucket_by_sequence_length(len, [], [2]),
        lambda ds: ds.group_by_window(lambda x: 0, lambda key, w: w.batch(2), window_size=2),
        lambda ds: ds.flat_map(Dataset.from_tensors),
        lambda ds: ds.interleave(Dataset.from_tensors).batch(2),
    ],
)
def test_what_a_function_gets_is_not_lent(step):
    assert lent(step(rows())) == [False]


def test_of_two_inputs_each_is_lent_by_itself():
    mapped = rows().map(lambda x: x)
    assert lent(Dataset.zip(rows().cache(), mapped)) == [True, False]
    assert lent(rows().cache().concatenate(mapped)) == [True, False]
    assert lent(Dataset.sample_from_datasets([rows(), mapped])) == [True, False]


def test_a_step_that_stands_in_two_places_is_lent_only_if_it_may_be_in_both():
    shared = normalize(rows().plan).plan
    plain, mapped = hr.Dataset(shared), hr.Dataset(shared).map(lambda x: x)
    both = Dataset.zip(plain.cache(), mapped).plan
    assert id(shared) not in lending_steps(both)
    assert id(shared) in lending_steps(Dataset.zip(plain.cache(), plain).plan)

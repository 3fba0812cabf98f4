"""The iterator that users see: its ends, its states, what it refuses."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, OutOfRangeError

Dataset = hr.Dataset


def test_get_next_ends_with_an_error_that_is_a_stop_iteration():
    iterator = iter(Dataset.range(1))
    assert iterator.get_next() == 0
    with pytest.raises(OutOfRangeError, match="no more elements"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_closed_iterator_is_at_its_end():
    with iter(Dataset.range(5)) as iterator:
        assert next(iterator) == 0
    assert list(iterator) == []
    iterator.close()


def test_a_state_of_another_pipeline_is_refused():
    state = iter(Dataset.range(5).shuffle(2)).get_state()
    with pytest.raises(FailedPreconditionError, match="other steps"):
        iter(Dataset.range(5)).set_state(state)
    with pytest.raises(TypeError, match="`state`"):
        iter(Dataset.range(5)).set_state("here")
    with pytest.raises(FailedPreconditionError, match="version 99"):
        iter(Dataset.range(5)).set_state({**iter(Dataset.range(5)).get_state(), "version": 99})


def test_the_state_of_an_index_plan_is_small_however_large_the_buffer():
    iterator = iter(Dataset.range(10**7).shuffle(50_000).repeat().batch(256))
    for _ in range(100):
        next(iterator)
    assert len(repr(iterator.get_state())) < 500


def test_an_iterator_can_go_back():
    iterator = iter(Dataset.range(10).shuffle(10))
    start = iterator.state_dict()
    first = [int(x) for x in iterator]
    iterator.load_state_dict(start)
    assert [int(x) for x in iterator] == first


def test_element_spec_of_an_iterator():
    assert iter(Dataset.range(3).batch(2)).element_spec == hr.ArraySpec((None,), "int64")

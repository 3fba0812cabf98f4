"""Copies and pickles of strategies and variables, which belong to their process."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest

import headrace as hr
from headrace.distribute import get_strategy
from headrace.errors import FailedPreconditionError
from tests.distribute.replicas import mirrored


@pytest.mark.catalogue("1.1.15")
def test_copies_of_a_strategy_are_the_same_object():
    for strategy in (mirrored(2), hr.distribute.OneDeviceStrategy(), get_strategy()):
        assert copy.copy(strategy) is strategy
        assert copy.deepcopy({"of": [strategy]})["of"][0] is strategy


def test_pickling_a_strategy_raises_with_a_fix():
    with pytest.raises(
        FailedPreconditionError, match=r"MirroredStrategy of cpu:0, cpu:1.*in the other process"
    ):
        pickle.dumps(mirrored(2))
    with pytest.raises(FailedPreconditionError, match="belongs to the process that created it"):
        pickle.dumps(get_strategy())


@pytest.mark.parametrize("replicas", [0, 2])
def test_pickling_a_variable_raises_with_its_name_and_a_fix(replicas):
    with mirrored(replicas or 1).scope() if replicas else get_strategy().scope():
        variable = hr.Variable([1.0, 2.0], name="rate")
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with pytest.raises(FailedPreconditionError, match=r"Variable 'rate'.*variable\.read\(\)"):
            dumps([variable])
        with pytest.raises(FailedPreconditionError, match=r"Variable 'rate'.*variable\.read\(\)"):
            dumps(variable.assign)
    with pytest.raises(FailedPreconditionError, match="'rate'"):
        cloudpickle.dumps(lambda x: x * variable)
    assert pickle.loads(pickle.dumps(variable.read())).tolist() == [1.0, 2.0]


def test_a_dataset_function_that_captures_a_variable_is_not_sent_to_a_service():
    rate = hr.Variable(2.0, name="rate")
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        share = hr.service.distribute("distributed_epoch", cluster.target)
        with pytest.raises(Exception, match=r"Variable 'rate'.*variable\.read\(\)"):
            list(hr.Dataset.range(4).map(lambda x: x * rate).apply(share))

"""What the keys of writes do beyond what `test_store_against_a_model` checks."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import AbortedError, InvalidArgumentError
from headrace.parameter_server.operations import (
    Assign,
    Create,
    FenceWrites,
    ForgetWriteKeys,
    ReadShard,
)
from headrace.parameter_server.specs import ShardSpec, WriteKey
from headrace.parameter_server.store import ShardStore
from headrace.parameter_server.write_keys import WriteKeys

ONE = np.float32([1])


def key(closure=0, number=0, worker=0, incarnation=1):
    return WriteKey(
        coordinator_term=incarnation, closure=closure, worker_session=worker, number=number
    )


@pytest.fixture
def store():
    store = ShardStore()
    spec = ShardSpec(name="v", variable="v", shape=(1,), dtype="float32", variable_shape=(1,))
    store.execute(Create(shard=spec), [np.float32([0])])
    return store


def add(store, which=None):
    return store.execute(Assign(shard="v", mode="add", key=which), [ONE])[0]


def value(store):
    return store.execute(ReadShard(shard="v"))[1][0].item()


def test_who_writes_late_is_told_why(store):
    store.execute(FenceWrites(coordinator_term=1, worker=3))
    store.execute(ForgetWriteKeys(coordinator_term=1, closures=(2,)))
    for late, words in (
        (key(worker=3), "shard v is refused: worker 3 was given up, and its"),
        (key(closure=2), "closure 2 has settled or was cancelled; this write co"),
        (key(incarnation=0), "of incarnation 0 of the coordinator, and there is inc"),
    ):
        with pytest.raises(AbortedError, match=words):
            add(store, late)
    assert value(store) == 0


def test_a_write_that_failed_is_not_remembered(store):
    with pytest.raises(InvalidArgumentError):
        store.execute(Assign(shard="v", mode="add", key=key()), [np.float32([1, 2])])
    add(store, key())
    assert value(store) == 1


def test_what_is_remembered_of_settled_closures_stays_small():
    keys = WriteKeys()
    for closure in range(0, 10_000, 2):
        keys.forget_closures(1, (closure,), below=max(0, closure - 20))
    assert len(keys.state().forgotten_closures) <= 11
    for closure in range(1, 10_000, 2):
        keys.forget_closures(1, (closure,), below=0)
    assert keys.state().forgotten_closures == ()
    assert keys.state().forgotten_below == 10_000

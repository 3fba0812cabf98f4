"""Write keys, in addition to `test_store_against_a_model`."""

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


def key(closure=0, number=0, worker=0, term=1):
    return WriteKey(coordinator_term=term, closure=closure, worker_session=worker, number=number)


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


def test_late_writes_are_rejected_with_a_reason(store):
    store.execute(FenceWrites(coordinator_term=1, worker=3))
    store.execute(ForgetWriteKeys(coordinator_term=1, closures=(2,)))
    for late, message in (
        (key(worker=3), "shard v is rejected: worker session 3 is fenced, and"),
        (key(closure=2), "closure 2 has already finished or was cancelled"),
        (key(term=0), "its coordinator term is 0, but the current term is 1"),
    ):
        with pytest.raises(AbortedError, match=message):
            add(store, late)
    assert value(store) == 0


def test_a_failed_write_is_not_recorded(store):
    with pytest.raises(InvalidArgumentError):
        store.execute(Assign(shard="v", mode="add", key=key()), [np.float32([1, 2])])
    add(store, key())
    assert value(store) == 1


def test_the_memory_for_finished_closures_is_bounded():
    keys = WriteKeys()
    for closure in range(0, 10_000, 2):
        keys.forget_closures(1, (closure,), below=max(0, closure - 20))
    assert len(keys.state().forgotten_closures) <= 11
    for closure in range(1, 10_000, 2):
        keys.forget_closures(1, (closure,), below=0)
    assert keys.state().forgotten_closures == ()
    assert keys.state().forgotten_below == 10_000

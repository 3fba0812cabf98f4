"""A write is carried out once, whoever sends it again, and late ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import AbortedError, InvalidArgumentError
from headrace.parameter_server.operations import (
    Assign,
    Count,
    Counted,
    Create,
    Describe,
    Fence,
    Read,
    Settle,
)
from headrace.parameter_server.specs import ShardSpec, WriteKey
from headrace.parameter_server.store import Store
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.call import Done

ONE = np.float32([1])


def key(closure=0, number=0, worker=0, incarnation=1):
    return WriteKey(incarnation=incarnation, closure=closure, worker=worker, number=number)


@pytest.fixture
def store():
    store = Store()
    spec = ShardSpec(name="v", variable="v", shape=(1,), dtype="float32", variable_shape=(1,))
    store.carry_out(Create(shard=spec), [np.float32([0])])
    return store


def add(store, which=None):
    return store.carry_out(Assign(shard="v", how="add", key=which), [ONE])[0]


def value(store):
    return store.carry_out(Read(shard="v"))[1][0].item()


def keys_of(store):
    return store.carry_out(Describe())[0].keys


def test_a_write_that_is_repeated_is_carried_out_once_and_answered_alike(store):
    first = store.carry_out(Count(counter="steps", key=key()))[0]
    store.carry_out(Count(counter="steps", key=key(number=1)))
    assert first == store.carry_out(Count(counter="steps", key=key(worker=4)))[0]
    assert first == Counted(before=0, after=1)
    assert add(store, key()) == add(store, key(worker=4)) == Done()
    assert value(store) == 1
    assert keys_of(store) == 3


def test_writes_of_one_number_to_several_targets_are_several(store):
    store.carry_out(Count(counter="v", key=key()))
    add(store, key())
    assert store.counters == {"v": 1}
    assert value(store) == 1


def test_a_write_without_a_key_is_carried_out_each_time(store):
    add(store)
    add(store)
    assert value(store) == 2
    assert keys_of(store) == 0


def test_a_write_that_failed_is_not_remembered(store):
    with pytest.raises(InvalidArgumentError):
        store.carry_out(Assign(shard="v", how="add", key=key()), [np.float32([1, 2])])
    add(store, key())
    assert value(store) == 1


def test_a_fenced_worker_writes_no_more_and_others_take_its_closures_over(store):
    add(store, key(worker=3))
    store.carry_out(Fence(incarnation=1, worker=3))
    for which in (key(worker=3), key(closure=5, worker=3)):
        with pytest.raises(
            AbortedError, match="shard v is refused: worker 3 was given up, and its"
        ):
            add(store, which)
    add(store, key(worker=4))
    add(store, key(worker=4, number=1))
    assert value(store) == 2


def test_writes_of_an_older_incarnation_are_refused(store):
    add(store, key(worker=3))
    store.carry_out(Fence(incarnation=2))
    with pytest.raises(AbortedError, match="of incarnation 1 of the coordinator, and there is inc"):
        add(store, key(closure=1))
    assert keys_of(store) == 0
    add(store, key(incarnation=2, worker=3))
    assert value(store) == 2


def test_a_newer_incarnation_is_adopted_and_numbers_begin_again(store):
    add(store, key(closure=7))
    store.carry_out(Settle(incarnation=1, below=8))
    store.carry_out(Fence(incarnation=1, worker=0))
    add(store, key(closure=7, incarnation=2))
    assert value(store) == 2
    store.carry_out(Fence(incarnation=1, worker=0))
    store.carry_out(Settle(incarnation=1, below=9))
    add(store, key(closure=8, incarnation=2))
    assert value(store) == 3


def test_a_closure_that_settled_is_forgotten_and_writes_no_more(store):
    add(store, key(closure=0))
    add(store, key(closure=2))
    store.carry_out(Settle(incarnation=1, closures=(2,)))
    assert keys_of(store) == 1
    with pytest.raises(AbortedError, match="closure 2 has settled or was cancelled; this write co"):
        add(store, key(closure=2))
    add(store, key(closure=1))
    store.carry_out(Settle(incarnation=1, closures=(0, 1)))
    assert keys_of(store) == 0
    for closure in (0, 1, 2):
        with pytest.raises(AbortedError):
            add(store, key(closure=closure))
    add(store, key(closure=3))
    assert value(store) == 4


def test_what_is_remembered_of_settled_closures_stays_small():
    keys = WriteKeys()
    for closure in range(0, 10_000, 2):
        keys.settle(1, (closure,), below=max(0, closure - 20))
    assert len(keys.state().settled) <= 11
    for closure in range(1, 10_000, 2):
        keys.settle(1, (closure,), below=0)
    assert keys.state().settled == ()
    assert keys.state().below == 10_000


def test_all_that_is_known_of_keys_can_be_saved():
    keys = WriteKeys()
    keys.known(key(incarnation=3), "shard v")
    keys.remember(key(closure=4, incarnation=3), "shard v", Done())
    keys.remember(key(closure=4, number=1, incarnation=3), "c", Counted(before=0, after=2))
    keys.settle(3, (1, 9), below=1)
    keys.fence(3, 6)
    again = WriteKeys(keys.state())
    assert again.state() == keys.state()
    assert again.known(key(closure=4, number=1, incarnation=3), "c") == Counted(before=0, after=2)
    for late in (key(closure=9, incarnation=3), key(worker=6, closure=5, incarnation=3)):
        with pytest.raises(AbortedError):
            again.known(late, "shard v")


def test_what_a_worker_does_for_itself_alone_is_in_no_order(store):
    store.carry_out(Settle(incarnation=1, closures=(-2,), below=50))
    add(store, key(closure=-1))
    add(store, key(closure=-1))
    with pytest.raises(AbortedError, match="closure -2 has settled"):
        add(store, key(closure=-2))
    assert value(store) == 1
    assert WriteKeys(store.keys.state()).state().settled == (-2,)

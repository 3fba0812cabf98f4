"""`hr.jax.device_iterator` over meshes of 8 devices; `test_jax.py` runs it in its own process."""

from __future__ import annotations

import doctest
import gc
import json
import logging
import threading
from collections import namedtuple
from dataclasses import dataclass
from itertools import chain

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import headrace as hr
from headrace.adapters import jax_iterator, jax_placement, jax_process_input
from headrace.adapters.jax_input_steps import DatasetInputSteps
from headrace.element.spec import check_element
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UserFunctionError

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: object


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")[: len(shape)])


BATCH_OVER_DATA = P("data")


def over(*shape: int, spec: P = BATCH_OVER_DATA) -> NamedSharding:
    return NamedSharding(mesh(*shape), spec)


def images(count: int, batch: int, **arguments: bool) -> hr.Dataset:
    rows = np.arange(count, dtype=np.float32)
    columns = {"x": np.stack([rows, -rows], axis=1), "y": np.arange(count, dtype=np.int32)}
    return hr.Dataset.from_tensor_slices(columns).batch(batch, **arguments)


def lists(iterator) -> list:
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), each) for each in iterator]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "sharding",
    [
        None,
        SingleDeviceSharding(jax.devices()[5]),
        over(8),
        over(4, 2),
        over(4, 2, spec=P("data", "model")),
        over(4, 2, spec=P(("data", "model"))),
        over(2, 4, spec=P(None, None)),
    ],
)
def test_arrays_have_the_dataset_values_on_every_mesh(sharding, prefetch):
    dataset = images(40, 8)
    iterator = hr.jax.device_iterator(dataset, sharding, prefetch)
    for batch, expected in zip(iterator, dataset, strict=True):
        assert isinstance(batch["x"], jax.Array)
        np.testing.assert_array_equal(batch["x"], expected["x"])
        np.testing.assert_array_equal(batch["y"], expected["y"])
        if sharding is not None:
            assert batch["x"].sharding.is_equivalent_to(sharding, 2)
        check_element(iterator.element_spec, map_leaves(np.asarray, batch))
    assert next(iterator, None) is None


def test_sharding_accepts_a_device_and_defaults_to_the_default_device():
    device = jax.devices()[3]
    (batch,) = hr.jax.device_iterator(hr.Dataset.range(4).batch(4), device)
    assert batch.devices() == {device}
    with jax.default_device(device):
        (batch,) = hr.jax.to_jax(hr.Dataset.range(4).batch(4))
    assert batch.devices() == {device}


@pytest.mark.parametrize(
    "element",
    [
        np.arange(8),
        (np.arange(8), np.ones((8, 2))),
        Pair(np.arange(8), np.arange(8)),
        {"a": {"x": np.arange(8)}, "b": np.zeros(8, bool)},
    ],
)
def test_elements_keep_their_structure(element):
    (batch,) = hr.jax.device_iterator(hr.Dataset.from_tensors(element), over(8))
    leaves, structure = flatten(batch)
    expected, same = flatten(element)
    assert structure == same
    for leaf, want in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(leaf, want)
    record = hr.Dataset.from_tensors(Record(np.arange(8)))
    (made,) = hr.jax.device_iterator(record, over(8))
    assert type(made) is Record
    assert made.x.shape == (8,)


def test_one_device_accepts_elements_that_are_no_batches():
    dataset = hr.Dataset.range(3).map(lambda x: {"n": x, "odd": x % 2 == 1})
    assert lists(hr.jax.device_iterator(dataset))[2] == {"n": 2, "odd": False}
    everywhere = over(8, spec=P())
    assert [len(x.devices()) for x in hr.jax.device_iterator(hr.Dataset.range(2), everywhere)] == [
        8,
        8,
    ]


# --- batches that cannot be split evenly --------------------------------------------------------


def test_unequal_shards_raise_at_their_step_by_default():
    iterator = hr.jax.device_iterator(images(22, 8), over(4, 2))
    assert next(iterator)["y"].tolist() == list(range(8))
    assert next(iterator)["y"].tolist() == list(range(8, 16))
    with pytest.raises(InvalidArgumentError, match=r"2, 2, 2 and 0 rows.*drop_remainder=True"):
        next(iterator)
    assert next(iterator, None) is None


@pytest.mark.parametrize("count", [16, 17, 19, 22, 23])
@pytest.mark.parametrize("sharding", [None, over(4, 2), over(8), over(4, 2, spec=P())])
def test_padding_gives_all_batches_one_shape_and_a_mask_of_real_rows(count, sharding):
    seen = []
    iterator = hr.jax.device_iterator(images(count, 8), sharding, remainder="pad")
    for batch in iterator:
        assert batch["x"].shape == (8, 2)
        assert batch["mask"].dtype == bool
        mask = np.asarray(batch["mask"])
        seen += np.asarray(batch["y"])[mask].tolist()
        assert not np.asarray(batch["x"])[~mask].any()
        check_element(iterator.element_spec, map_leaves(np.asarray, batch))
    assert seen == list(range(count))


def test_padding_rounds_up_to_the_shard_count_if_the_batch_size_is_unknown():
    ragged = hr.Dataset.range(1, 7).map(lambda n: np.arange(n))
    shapes = [x.shape for x, mask in hr.jax.device_iterator(ragged, over(4, 2), remainder="pad")]
    assert shapes == [(4,), (4,), (4,), (4,), (8,), (8,)]


def test_remainder_drop_skips_batches_that_cannot_be_split_evenly():
    dropped = hr.jax.device_iterator(images(22, 8), over(4, 2), remainder="drop")
    assert [batch["y"].tolist() for batch in dropped] == [list(range(8)), list(range(8, 16))]
    even = hr.jax.device_iterator(images(20, 8), over(4, 2), remainder="drop")
    assert [len(batch["y"]) for batch in even] == [8, 8, 4]
    ragged = hr.Dataset.range(1, 9).map(lambda n: np.arange(n))
    kept = hr.jax.device_iterator(ragged, over(4, 2), remainder="drop")
    assert [len(x) for x in kept] == [4, 8]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (hr.Dataset.range(3), r"the element is a scalar.*`batch`"),
        (images(4, 4).map(lambda row: {**row, "n": 1}), r"\['n'\] is a scalar.*`batch`"),
        (
            hr.Dataset.from_tensors({"x": np.zeros((8, 1)), "y": np.zeros(4)}),
            r"\['x'\] has 8 rows, but component \['y'\] has 4",
        ),
        (hr.Dataset.from_tensors({"x": np.zeros((8, 3))}), r"\['x'\] of shape \(8, 3\) cannot be"),
        (hr.Dataset.from_tensors({"s": np.array(["a"] * 8)}), r"\['s'\] holds bytes or str|str"),
        (hr.Dataset.from_tensors({"s": b"a"}), r"\['s'\]"),
        (hr.Dataset.range(8).map(lambda n: b"a").batch(8), "holds bytes"),
    ],
)
def test_a_leaf_that_cannot_be_sharded_is_named_in_the_error(dataset, words):
    with pytest.raises(InvalidArgumentError, match=words):
        list(hr.jax.device_iterator(dataset, over(4, 2, spec=P("data", "model"))))


def test_padding_an_element_with_a_mask_raises():
    dataset = hr.Dataset.from_tensors({"x": np.zeros(8), "mask": np.zeros(8)})
    with pytest.raises(InvalidArgumentError, match="rename yours with"):
        list(hr.jax.device_iterator(dataset, over(8), remainder="pad"))


# --- states -------------------------------------------------------------------------------------

PIPELINES = {
    "array": lambda: images(48, 8),
    "shuffled": lambda: images(48, 1).unbatch().shuffle(20, seed=3).batch(8).repeat(2),
    "unseeded": lambda: hr.Dataset.range(48).shuffle(48).map(lambda x: x * 2).batch(8),
    "filtered": lambda: hr.Dataset.range(96).filter(lambda x: x % 2 == 0).batch(8),
    "parallel": lambda: hr.Dataset.range(48).map(abs, num_parallel_calls=2).batch(8).prefetch(2),
    "generated": lambda: hr.Dataset.from_generator(lambda: iter(range(48))).batch(8),
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("prefetch", [0, 2, 4])
def test_states_count_yielded_batches_and_not_prefetched_ones(name, prefetch):
    dataset = PIPELINES[name]()
    iterator = hr.jax.device_iterator(dataset, over(4, 2), prefetch)
    states, batches = [iterator.get_state()], []
    for batch in iterator:
        batches.append(lists([batch])[0])
        states.append(json.loads(json.dumps(iterator.get_state())))
    states.append(iterator.state_dict())
    for count, state in enumerate(states):
        fresh = hr.jax.device_iterator(dataset, over(8), 3 - min(prefetch, 3))
        fresh.load_state_dict(state)
        assert lists(fresh) == batches[count:], count
    # The iterator can also restore its own earlier and later states.
    iterator.set_state(states[2])
    assert lists([next(iterator)]) == batches[2:3]
    iterator.set_state(states[0])
    assert lists(iterator) == batches


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_closed_iterator_still_has_the_state_of_yielded_batches(prefetch):
    for count in range(4):
        with hr.jax.device_iterator(images(24, 8), over(8), prefetch) as iterator:
            for _ in range(count):
                next(iterator)
        rest = hr.jax.device_iterator(images(24, 8), over(8))
        rest.set_state(iterator.get_state())
        assert [x for batch in rest for x in batch["y"].tolist()] == list(range(8 * count, 24))


def test_states_are_exchangeable_with_those_of_a_strategy():
    strategy = hr.distribute.MirroredStrategy([f"cpu:{n}" for n in range(4)])
    distributed = strategy.distribute_dataset(images(40, 8))
    with iter(distributed) as there:
        next(there)
        next(there)
        state = there.get_state()
    here = hr.jax.device_iterator(images(40, 8), over(4, 2))
    here.set_state(state)
    assert next(here)["y"].tolist() == list(range(16, 24))
    with iter(distributed) as again:
        again.set_state(here.get_state())
        assert next(again)["y"].values[0].tolist() == [24, 25]


def test_a_state_within_a_batch_resumes_with_the_remaining_rows():
    dataset = images(32, 16)
    iterator = hr.jax.device_iterator(dataset, over(8))
    state = iterator.get_state()
    state["distributed"]["streams"][0]["rows"] = 8
    iterator.set_state(state)
    assert [batch["y"].tolist() for batch in iterator] == [list(range(8, 16)), list(range(16, 32))]
    whole = hr.jax.device_iterator(dataset)
    whole.set_state(state)
    assert [batch["y"].tolist() for batch in whole] == [list(range(8, 16)), list(range(16, 32))]


def test_a_failed_partly_consumed_batch_skips_no_rows_of_the_next():
    fails = [False]

    def picky(x):
        if fails[0] and x[0] == 0:
            raise ValueError("no")
        return x

    iterator = hr.jax.device_iterator(hr.Dataset.range(12).batch(4).map(picky), prefetch=0)
    state = iterator.get_state()
    state["distributed"]["streams"][0]["rows"] = 2
    iterator.set_state(state)
    fails[0] = True
    with pytest.raises(UserFunctionError, match="no"):
        next(iterator)
    assert lists(iterator) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_state_of_another_kind_or_dataset_is_rejected():
    iterator = hr.jax.device_iterator(images(16, 8))
    for wrong in (None, {}, {"version": 1}, 3):
        with pytest.raises(TypeError, match=r"result of DeviceIterator\.get_state"):
            iterator.set_state(wrong)
    state = iterator.get_state()
    with pytest.raises(FailedPreconditionError, match="version 7"):
        iterator.set_state({**state, "version": 7})
    other = hr.jax.device_iterator(hr.Dataset.range(16).batch(8))
    with pytest.raises(FailedPreconditionError):
        other.set_state(state)
    two = {"inputs": [None, None], "rows": 0}
    twice = {"version": 1, "distributed": {"streams": [two]}}
    with pytest.raises(FailedPreconditionError, match="positions of 2 datasets"):
        iterator.set_state(twice)


def test_each_iterator_reads_one_epoch_and_shuffles_again():
    dataset = hr.Dataset.range(64).shuffle(64, seed=5).batch(8)
    first, second = (lists(hr.jax.device_iterator(dataset, over(8))) for _ in range(2))
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(64))


# --- errors, interruptions, ends ----------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_is_raised_at_its_step_and_the_next_step_follows(prefetch):
    def refuse_16(x):
        if x[0] == 16:
            raise ValueError("sixteen")
        return x

    dataset = hr.Dataset.range(40).batch(8).map(refuse_16)
    iterator = hr.jax.device_iterator(dataset, over(8), prefetch)
    found = []
    for _ in range(10):
        try:
            found.append(next(iterator)[0].item())
        except UserFunctionError as error:
            found.append(error.original_type)
            state = iterator.get_state()
        except StopIteration:
            break
    assert found == [0, 8, "ValueError", 24, 32]
    iterator.set_state(state)
    assert next(iterator)[0] == 24


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_an_interruption_loses_no_batch(prefetch):
    raised = []

    def interrupt_once(x):
        if x[0] == 16 and not raised:
            raised.append(x)
            raise KeyboardInterrupt
        return x

    dataset = hr.Dataset.range(40).batch(8).map(interrupt_once)
    iterator = hr.jax.device_iterator(dataset, over(8), prefetch)
    found = []
    for _ in range(10):
        try:
            found.append(next(iterator)[0].item())
        except KeyboardInterrupt:
            found.append("interrupted")
        except StopIteration:
            break
    assert [each for each in found if each != "interrupted"] == [0, 8, 16, 24, 32]
    assert "interrupted" in found


def test_an_interruption_during_placement_loses_no_batch(monkeypatch):
    calls = []

    def put(*arguments, **named):
        calls.append(None)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return made(*arguments, **named)

    made = jax_placement.whole_array
    monkeypatch.setattr(jax_placement, "whole_array", put)
    iterator = hr.jax.device_iterator(hr.Dataset.range(40).batch(8), over(8), 2)
    found = []
    for _ in range(10):
        try:
            found.append(next(iterator)[0].item())
        except KeyboardInterrupt:
            pass
        except StopIteration:
            break
    assert found == [0, 8, 16, 24, 32]


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("headrace")]


def test_a_closed_or_deleted_iterator_leaves_no_thread():
    dataset = hr.Dataset.range(400).batch(8)
    with hr.jax.device_iterator(dataset, over(8), 3) as iterator:
        next(iterator)
        assert readers()
    assert readers() == []
    assert next(iterator, None) is None
    iterator.close()
    dropped = hr.jax.device_iterator(dataset, over(8), 3)
    next(dropped)
    del dropped
    gc.collect()
    assert readers() == []


def test_next_after_the_end_raises_stop_iteration_again():
    iterator = hr.jax.device_iterator(hr.Dataset.range(0).batch(8), over(8))
    assert [next(iterator, "end") for _ in range(3)] == ["end"] * 3


def test_at_most_prefetch_batches_are_read_ahead():
    read = []
    dataset = hr.Dataset.range(400).batch(8).map(lambda x: (read.append(x), x)[1])
    for prefetch in (0, 1, 2, 4):
        read.clear()
        iterator = hr.jax.device_iterator(dataset, over(8), prefetch)
        for used in range(1, 6):
            next(iterator)
            assert len(read) <= used + prefetch + 1
        iterator.close()


class FixedReadiness(DatasetInputSteps):
    """Reports a given readiness of the next batch, independently of the reader."""

    is_ready = False
    reads = 0

    def next(self):
        self.reads += 1
        return super().next()


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_ready_batch_does_not_wait_for_the_next_one(is_ready, monkeypatch):
    monkeypatch.setattr(jax_process_input, "DatasetInputSteps", FixedReadiness)
    with hr.jax.device_iterator(images(64, 8), over(8), 2) as iterator:
        iterator._steps.is_ready = is_ready
        counts = []
        for _ in range(4):
            next(iterator)
            counts.append(iterator._steps.reads)
    assert counts == ([1, 3, 4, 5] if is_ready else [1, 2, 3, 4])


# --- other inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_distributed_dataset_puts_one_shard_on_each_device(replicas, prefetch):
    strategy = hr.distribute.MirroredStrategy([f"cpu:{n}" for n in range(replicas)])
    distributed = strategy.distribute_dataset(images(32, 8, drop_remainder=True))
    iterator = hr.jax.device_iterator(distributed, prefetch=prefetch)
    assert iterator.element_spec["x"].shape == (8, 2)
    batches = []
    for batch in iterator:
        assert len(batch["x"].devices()) == replicas
        batches.append(batch["y"].tolist())
        if len(batches) == 2:
            state = iterator.get_state()
    assert batches == [list(range(n, n + 8)) for n in range(0, 32, 8)]
    again = hr.jax.device_iterator(distributed)
    again.set_state(state)
    assert next(again)["y"].tolist() == batches[2]


def test_replicas_that_do_not_match_the_devices_raise():
    strategy = hr.distribute.MirroredStrategy([f"cpu:{n}" for n in range(16)])
    distributed = strategy.distribute_dataset(images(32, 16))
    with pytest.raises(ValueError, match=r"16 replicas .* 8 local devices"):
        hr.jax.device_iterator(distributed)
    with pytest.raises(InvalidArgumentError, match=r"16 replicas .* 4 shards"):
        next(hr.jax.device_iterator(distributed, over(4, 2)))


def test_partial_batches_of_a_distributed_dataset_are_padded():
    strategy = hr.distribute.MirroredStrategy([f"cpu:{n}" for n in range(4)])
    distributed = strategy.distribute_dataset(hr.Dataset.range(5).batch(8))
    ((values, mask),) = hr.jax.device_iterator(distributed, over(4, 2), remainder="pad")
    assert np.asarray(values)[np.asarray(mask)].tolist() == list(range(5))


@pytest.mark.heavy
def test_a_service_dataset_is_read_once_and_resumes_from_a_state():
    with hr.service.LocalCluster(num_workers=1) as cluster:
        moved = hr.service.distribute("distributed_epoch", cluster.target, ordered=True)
        dataset = images(64, 8).apply(moved)
        iterator = hr.jax.device_iterator(dataset, over(4, 2))
        first = [next(iterator)["y"].tolist() for _ in range(3)]
        state = iterator.get_state()
        iterator.close()
        again = hr.jax.device_iterator(dataset, over(8))
        again.set_state(state)
        rest = [batch["y"].tolist() for batch in again]
        assert first + rest == [list(range(n, n + 8)) for n in range(0, 64, 8)]
        share = hr.service.distribute("distributed_epoch", cluster.target, job_name="used up")
        assert len(list(images(64, 8).apply(share))) == 8
        with pytest.raises(FailedPreconditionError, match="epoch 0: no elements left"):
            next(hr.jax.device_iterator(images(64, 8).apply(share)))
        anyhow = images(64, 8).apply(hr.service.distribute("distributed_epoch", cluster.target))
        seen = sorted(chain(*(b["y"].tolist() for b in hr.jax.to_jax(anyhow, over(8)))))
        assert seen == list(range(64))


def test_leaves_can_have_different_shardings():
    shardings = {"y": over(4, 2), "x": over(4, 2, spec=P("data", "model"))}
    iterator = hr.jax.device_iterator(images(16, 8), shardings, remainder="pad")
    batch = next(iterator)
    assert batch["x"].sharding.spec == P("data", "model")
    assert batch["y"].sharding.spec == batch["mask"].sharding.spec == P("data")
    with pytest.raises(ValueError, match="in the same way"):
        hr.jax.device_iterator(images(16, 8), {"x": over(8), "y": over(4, 2)})
    with pytest.raises(hr.errors.InvalidElementError):
        next(hr.jax.device_iterator(images(16, 8), {"x": over(8)}))


# --- arguments and messages ---------------------------------------------------------------------


def test_wrong_arguments_are_rejected_immediately():
    dataset = images(16, 8)
    for wrong in ([1, 2], np.arange(4), None, iter(dataset)):
        with pytest.raises(TypeError, match="must be a Dataset"):
            hr.jax.device_iterator(wrong)
    for wrong in (P("data"), mesh(8), "cpu", ()):
        with pytest.raises((TypeError, ValueError), match="`sharding` must"):
            hr.jax.device_iterator(dataset, wrong)
    with pytest.raises(ValueError, match="`prefetch`"):
        hr.jax.device_iterator(dataset, prefetch=-1)
    with pytest.raises(TypeError, match="`prefetch`"):
        hr.jax.device_iterator(dataset, prefetch=True)
    with pytest.raises(ValueError, match="`remainder`"):
        hr.jax.device_iterator(dataset, remainder="keep")


def test_narrowing_to_32_bits_warns_once(caplog, monkeypatch):
    monkeypatch.setattr(jax_placement, "_has_warned_about_narrowing", False)
    with caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(2):
            for batch in hr.jax.device_iterator(hr.Dataset.range(16).batch(8)):
                assert batch.dtype == np.int32
    (said,) = [record.getMessage() for record in caplog.records]
    assert "int64" in said
    assert "jax_enable_x64" in said


def test_dtypes_stay_64_bit_if_x64_is_enabled():
    with jax.enable_x64(True):
        iterator = hr.jax.device_iterator(hr.Dataset.range(2**40, 2**40 + 8).batch(8), over(8))
        assert iterator.element_spec.dtype == np.int64
        assert next(iterator)[0] == 2**40


def test_docstring_examples_pass():
    result = doctest.testmod(jax_iterator, extraglobs={"hr": hr, "np": np})
    assert result.attempted > 0
    assert result.failed == 0

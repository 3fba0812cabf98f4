"""Loaders for PyTorch training loops: tensors, epochs, states, devices."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import headrace as hr
from headrace.adapters import torch_iterator
from headrace.adapters.torch_device_transfer import StreamTransfer
from headrace.adapters.torch_tensors import to_tensors
from headrace.distribute import PerReplica
from headrace.errors import FailedPreconditionError, InvalidElementError


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    name: Any


def numbers(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# --- tensors ------------------------------------------------------------------------------------

PLAIN = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 4)])
def test_a_tensor_shares_the_dtype_and_memory_of_its_array(dtype: str, shape: tuple[int, ...]):
    array = np.ones(shape, dtype)
    tensor = to_tensors(array)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.numpy().dtype == array.dtype
    assert not array.size or np.shares_memory(tensor.numpy(), array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_ml_dtypes_become_the_torch_dtype_of_that_name(dtype: str):
    array = np.array([[1.5, -2.0], [np.nan, 0.0]]).astype(getattr(ml_dtypes, dtype))
    tensor = to_tensors(array)
    assert tensor.dtype == getattr(torch, dtype)
    assert str(tensor.float().tolist()) == "[[1.5, -2.0], [nan, 0.0]]"
    tensor.view(torch.int8)[0, 0] = 0  # in the array's memory
    assert not array.view(np.int8).reshape(-1)[0]


def test_a_scalar_becomes_a_tensor_without_axes():
    for scalar in (np.float32(1.5), np.int64(-1), np.bool_(True), ml_dtypes.bfloat16(1.5)):
        tensor = to_tensors(scalar)
        assert tensor.shape == ()
        assert tensor.item() == scalar


def test_memory_that_torch_cannot_use_is_copied():
    read_only = np.arange(4)
    read_only.flags.writeable = False
    record = np.zeros(3, [("a", "i1"), ("b", "i4")])["b"]
    for array in (read_only, np.arange(4)[::-1], np.arange(4, dtype=">i4"), record):
        tensor = to_tensors(array)
        assert tensor.tolist() == array.tolist()
        tensor[0] = 9
        assert array[0] != 9


@pytest.mark.parametrize(
    "array", [np.zeros(2, "M8[s]"), np.zeros(2, [("a", "i4")]), np.zeros(2, np.longdouble)]
)
def test_unsupported_dtypes_raise_and_name_the_component(array: Any):
    with pytest.raises(InvalidElementError, match=r"component \['when'\]: torch has no dtype for"):
        to_tensors({"x": np.ones(2), "when": array})


def test_elements_keep_their_structure_and_strings():
    element = {
        "pair": Pair(np.ones(2), (np.int64(3), None)),
        "sample": Sample(np.zeros((2, 2), np.uint8), "a name"),
        "raw": b"\x00",
        "words": np.array(["a", "b"], object),
        7: PerReplica([np.ones(1), np.ones(2)]),
    }
    made = to_tensors(element)
    assert isinstance(made["pair"], Pair)
    assert made["pair"].x.tolist() == [1, 1]
    assert (made["pair"].y[0].item(), made["pair"].y[1]) == (3, None)
    assert isinstance(made["sample"].image, torch.Tensor)
    assert (made["sample"].name, made["raw"]) == ("a name", b"\x00")
    assert made["words"].tolist() == ["a", "b"]
    assert [value.shape for value in made[7].values] == [(1,), (2,)]


# --- epochs -------------------------------------------------------------------------------------


def test_tensors_are_writable_and_not_overwritten():
    held = list(hr.torch.loader(hr.Dataset.from_tensor_slices(np.arange(6)).batch(2)))
    for tensor in held:
        tensor += 10
    assert [tensor.tolist() for tensor in held] == [[10, 11], [12, 13], [14, 15]]


def test_each_iteration_reads_one_epoch_and_shuffles_again():
    dataset = hr.Dataset.range(50).shuffle(50, seed=3)
    loader = hr.torch.loader(dataset)
    assert len(loader) == 50
    passes = [numbers(loader) for _ in range(2)]
    assert passes == [[int(x) for x in dataset] for _ in range(2)]
    assert passes[0] != passes[1]
    loader.set_epoch(0)
    assert numbers(loader) == passes[0]


def test_len_of_an_unknown_cardinality_raises_type_error():
    loader = hr.torch.loader(hr.Dataset.range(9).filter(lambda x: x > 2))
    with pytest.raises(TypeError, match="is unknown until it is read"):
        len(loader)
    assert loader


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2],), "must be a Dataset"),
        ((hr.Dataset.range(3), None, -1), "`prefetch` must be at least 0"),
        ((hr.Dataset.range(3), "no such"), "device"),
    ],
)
def test_wrong_arguments_are_rejected_immediately(arguments: Any, words: str):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        hr.torch.loader(*arguments)
    with pytest.raises(TypeError, match=r"'batch_size'; use a step.*dataset\.batch\(n\)"):
        hr.torch.loader(hr.Dataset.range(3), batch_size=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"hr\.torch\.loader\(dataset\)"):
        list(DataLoader(hr.Dataset.range(3)))  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=r"shard|index"):
        hr.torch.loader(hr.Dataset.range(3), shard=(2, 2))


def test_an_error_is_raised_at_its_element_and_the_next_one_follows():
    def picky(x: Any) -> Any:
        if x == 2:
            raise OSError("no such image")
        return x

    iterator = iter(hr.torch.loader(hr.Dataset.range(4).map(picky)))
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(hr.errors.UserFunctionError, match="no such image"):
        next(iterator)
    assert iterator.state_dict()["num_taken"] == 3
    assert numbers(iterator) == [3]


def test_a_state_after_an_error_resumes_only_on_the_same_number_of_ranks():
    def picky(x: Any) -> Any:
        if x == 2:
            raise OSError("no such image")
        return x

    dataset = hr.Dataset.range(12).map(picky).batch(2)
    iterator = iter(hr.torch.loader(dataset))
    assert next(iterator).tolist() == [0, 1]
    before = iterator.state_dict()
    with pytest.raises(hr.errors.UserFunctionError, match="no such image"):
        next(iterator)
    assert next(iterator).tolist() == [3, 4]
    state = iterator.state_dict()
    for _ in range(2):  # also after the state was restored
        iterator = iter(hr.torch.loader(dataset))
        iterator.load_state_dict(state)
        assert iterator.state_dict() == state
        other = hr.torch.loader(dataset, shard=(2, 1))
        other.load_state_dict(state)
        with pytest.raises(FailedPreconditionError, match="1 elements failed on rank 0 of 1"):
            iter(other)
    assert [batch.tolist() for batch in iterator] == [[5, 6], [7, 8], [9, 10], [11]]
    assert iterator.state_dict()["num_failed"] == 1
    assert "num_failed" not in before
    other = hr.torch.loader(dataset, shard=(2, 1))
    other.load_state_dict(before)
    assert next(iter(other)).tolist() == [4, 5]


def test_a_closed_or_deleted_loader_stops_its_threads():
    dataset = hr.Dataset.range(100).map(lambda x: x if x >= 0 else 0)
    with hr.torch.loader(dataset) as loader:
        iterator = iter(loader)
        next(iterator)
    assert list(iterator) == []
    state = loader.state_dict()  # the state of the closed iterator
    assert numbers(loader)[0] == 0
    loader.load_state_dict(state)
    assert numbers(loader)[0] == 1
    next(iter(hr.torch.loader(dataset)))
    gc.collect()


# --- states -------------------------------------------------------------------------------------


def opaque(x: Any) -> Any:
    return x if x >= 0 else -x


DATASETS = {
    "positions": hr.Dataset.range(23).shuffle(23).batch(2),
    "a function": hr.Dataset.range(23).shuffle(5, seed=1).map(opaque).batch(4),
    "values": hr.Dataset.range(23).filter(lambda x: x % 3).shuffle(4).repeat(2),
    "a fixed order": hr.Dataset.range(23).shuffle(23, reshuffle_each_iteration=False).batch(3),
}


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("name", DATASETS)
def test_states_count_yielded_elements_and_not_prefetched_ones(name: str, device: Any):
    dataset = DATASETS[name]
    loader = hr.torch.loader(dataset, device, prefetch=3)
    iterator = iter(loader)
    states, shapes = [through_json(loader.state_dict())], []
    for batch in iterator:
        shapes.append(batch.shape)
        states.append(through_json(iterator.state_dict()))
    read = hr.torch.loader(dataset)
    read.load_state_dict(states[0])
    whole = numbers(read)
    assert len(whole) == len(shapes) == len(states) - 1
    for at in {0, 1, len(whole) // 2, len(whole) - 1, len(whole)}:
        rest = hr.torch.loader(dataset)
        rest.load_state_dict(states[at])
        assert rest.state_dict() == states[at]
        assert numbers(rest) == whole[at:]


def test_the_state_after_an_epoch_starts_the_next_epoch():
    dataset = hr.Dataset.range(20).shuffle(20, seed=1)
    loader = hr.torch.loader(dataset)
    list(loader)
    restored = hr.torch.loader(dataset)
    restored.load_state_dict(through_json(loader.state_dict()))
    assert numbers(restored) == numbers(loader) != numbers(hr.torch.loader(dataset))


def test_the_state_of_a_new_loader_is_the_start_of_its_first_epoch():
    loader = hr.torch.loader(hr.Dataset.range(20).shuffle(20))
    state = loader.state_dict()
    first = numbers(loader)
    again = hr.torch.loader(hr.Dataset.range(20).shuffle(20))
    again.load_state_dict(state)
    assert numbers(again) == first


def test_a_restored_loader_yields_the_remaining_elements_then_whole_epochs():
    loader = hr.torch.loader(hr.Dataset.range(6))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert numbers(iterator) == [1, 2, 3, 4, 5]
    iterator.load_state_dict(state)
    assert numbers(iterator) == [1, 2, 3, 4, 5]
    loader.load_state_dict(state)
    assert numbers(loader) == [1, 2, 3, 4, 5]
    assert numbers(loader) == [0, 1, 2, 3, 4, 5]


def test_a_wrong_state_is_rejected():
    loader = hr.torch.loader(hr.Dataset.range(6))
    with pytest.raises(TypeError, match="must be a result of a loader's"):
        loader.load_state_dict({"step": 3})
    with pytest.raises(FailedPreconditionError, match="version 9"):
        loader.load_state_dict({**loader.state_dict(), "version": 9})
    other = hr.torch.loader(hr.Dataset.range(7).batch(2))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(FailedPreconditionError, match="a dataset with other steps"):
        next(iter(other))


class Interruption(BaseException):
    pass


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interruption_at_any_call_loses_no_element_and_no_state(
    prefetch: int,
):
    dataset = hr.Dataset.range(10).batch(4)
    folder, number, remaining_calls = os.path.dirname(torch_iterator.__file__), 0, 0
    while remaining_calls <= 0:
        number += 1
        remaining_calls, found, iterator = (
            number,
            [],
            iter(hr.torch.loader(dataset, None, prefetch)),
        )

        def interrupt(frame: Any, event: str, argument: Any) -> None:
            nonlocal remaining_calls
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(folder):
                remaining_calls -= 1
                if not remaining_calls:
                    sys.setprofile(None)
                    raise Interruption

        while True:
            sys.setprofile(interrupt)
            try:
                for element in iterator:
                    batch = element
                    break
                else:
                    break
            except Interruption:
                sys.setprofile(None)
                rest = hr.torch.loader(dataset)
                rest.load_state_dict(through_json(iterator.state_dict()))
                assert list(chain(*found, *numbers(rest))) == list(range(10)), number
                continue
            finally:
                sys.setprofile(None)
            found.append(batch.tolist())
        assert list(chain(*found)) == list(range(10)), number
    assert number > 20


# --- distributed datasets -----------------------------------------------------------------------


def test_a_used_loader_over_a_strategy_resumes_like_a_new_one():
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

    def passes(loader):
        return [[row for step in loader for part in step.values for row in part.tolist()]]

    def make():
        dataset = hr.Dataset.range(12).shuffle(12, seed=3).batch(4)
        return hr.torch.loader(strategy.distribute_dataset(dataset))

    used, new = make(), make()
    next(iter(used))
    state = json.loads(json.dumps(used.state_dict()))
    for _ in range(3):
        passes(used)
    for loader in (used, new):
        loader.load_state_dict(state)
    assert [passes(used) for _ in range(3)] == [passes(new) for _ in range(3)]


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_distributed_dataset_yields_tensors_for_its_replicas(replicas: int):
    strategy = hr.distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    def loader() -> Any:
        dataset = hr.Dataset.range(10).shuffle(10, seed=2).batch(5)
        return hr.torch.loader(strategy.distribute_dataset(dataset))

    def rows(steps: Any) -> list[Any]:
        values = [strategy.local_results(step) for step in steps]
        assert all(isinstance(v, torch.Tensor) for step in values for v in step)
        return [[v.tolist() for v in step] for step in values]

    first = loader()
    assert len(first) == 2
    iterator = iter(first)
    (step,) = rows([next(iterator)])
    state = through_json(first.state_dict())
    rest = rows(iterator)
    assert sorted(row for rows in step + rest[0] for row in rows) == list(range(10))
    second = loader()
    second.load_state_dict(state)
    assert rows(second) == rest
    assert rows(second) == rows(first)  # the second epoch
    third = loader()
    third.load_state_dict(through_json(first.state_dict()))
    assert rows(third) == rows(first)


# --- devices ------------------------------------------------------------------------------------


class RecordedStreams:
    """A stream runtime that uses the memory of this process, and records its calls."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.now = "main"

    def new_stream(self, device: Any) -> Any:
        return "side"

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        self.now, before = stream, self.now
        yield
        self.now = before

    def pin_memory(self, tensor: Any) -> Any:
        assert self.now == "side"
        self.log.append(("pin", tensor.tolist()))
        return tensor.clone()

    def record_event(self, stream: Any) -> Any:
        self.log.append(("mark", stream))
        return len(self.log)

    def wait_event(self, device: Any, mark: Any) -> Any:
        self.log.append(("wait", mark))
        return "main"

    def record_stream(self, tensor: Any, stream: Any) -> None:
        self.log.append(("keep", tensor.tolist(), stream))


def test_copies_start_ahead_and_the_computing_stream_waits_for_them(monkeypatch: Any):
    streams = RecordedStreams()
    transfer = StreamTransfer(torch.device("cpu"), streams)
    monkeypatch.setattr("headrace.adapters.torch_loader.make_transfer", lambda device: transfer)
    dataset = hr.Dataset.range(4).map(lambda x: {"x": x[None], "name": "n"})
    loader = hr.torch.loader(dataset, "cuda", prefetch=2)
    assert streams.log == []
    iterator = iter(loader)
    first = next(iterator)
    assert (first["x"].tolist(), first["name"]) == ([0], "n")
    assert streams.log[:2] == [("pin", [0]), ("mark", "side")]
    assert ("wait", 2) in streams.log
    assert ("keep", [0], "main") in streams.log
    state = loader.state_dict()
    assert [element["x"].item() for element in iterator] == [1, 2, 3]
    assert [entry[1] for entry in streams.log if entry[0] == "pin"] == [[0], [1], [2], [3]]
    loader.load_state_dict(state)
    assert [element["x"].item() for element in loader] == [1, 2, 3]


def test_per_replica_values_are_moved_to_the_device(monkeypatch: Any):
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    steps = strategy.distribute_dataset(hr.Dataset.range(4).batch(4))
    (step,) = hr.torch.loader(steps, "meta")
    assert [value.device.type for value in step.values] == ["meta", "meta"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_a_computing_cuda_device_are_correct():
    rows = np.random.default_rng(0).standard_normal((64, 1 << 18)).astype(np.float32)
    dataset = hr.Dataset.from_tensor_slices(rows).batch(8)
    for prefetch in (0, 1, 3):
        sums = []
        for batch in hr.torch.loader(dataset, "cuda", prefetch):
            assert batch.is_cuda
            weights = torch.ones(1 << 18, device="cuda")
            for _ in range(20):  # keeps the computing stream behind the copies
                weights = weights * 1.0
            sums.append((batch * weights).clone())
        assert np.array_equal(torch.cat(sums).cpu().numpy(), rows)

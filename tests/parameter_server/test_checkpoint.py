"""Checkpoints: saved by servers, restored into any number of shards and servers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from tests.parameter_server import write_checkpoint
from tests.parameter_server.small_cluster import cluster

F32 = np.float32
GOLDEN = Path(__file__).parent / "checkpoint_format_1"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint of a trained model, its contents, and those after two more steps."""
    path = str(tmp_path_factory.mktemp("saved") / "ckpt-1")
    with cluster(2, FixedShardsPartitioner(2)) as strategy:
        model, optimizer = create_model(strategy)
        train(model, optimizer, 3)
        hr.Checkpoint(model=model, optimizer=optimizer, step=3, rate=0.5).save(path)
        expected = contents(model)
        train(model, optimizer, 2)
        after = contents(model)
    return path, expected, after


def create_model(strategy, rows=7, dtype=F32):
    with strategy.scope():
        model = {
            "w": hr.Variable(np.arange(rows * 2, dtype=dtype).reshape(rows, 2), name="w"),
            "b": [hr.Variable(F32(1), name="b")],
            "users": hr.EmbeddingTable(3, name="users"),
        }
        return model, hr.optimizers.Adam(0.1, name="adam")


def train(model, optimizer, steps):
    for _ in range(steps):
        ids = np.array([3, 2**40, -5])
        model["users"].lookup(ids)
        optimizer.apply_gradients(
            [
                (np.ones(model["w"].shape, F32), model["w"]),
                (F32(1), model["b"][0]),
                (hr.IndexedSlices(np.ones((3, 3), F32), ids), model["users"]),
            ]
        )


def contents(model):
    ids = np.array([3, 2**40, -5, 11])
    return (
        model["w"].read().tolist(),
        float(model["b"][0].read()),
        model["users"].gather(ids).tolist(),
    )


@pytest.mark.catalogue("2.7.13", "3.7.21", "3.9.17-21", "3.9.27", "3.22.3")
@pytest.mark.parametrize(("servers", "shards"), [(1, 1), (2, 2), (2, 4), (3, 3), (1, 3)])
def test_a_checkpoint_restores_into_any_number_of_shards(saved, servers, shards):
    path, expected, after = saved
    with cluster(servers, FixedShardsPartitioner(shards)) as strategy:
        model, optimizer = create_model(strategy)
        checkpoint = hr.Checkpoint(model=model, optimizer=optimizer, step=0, rate=0.0)
        checkpoint.restore(path).assert_consumed()
        assert contents(model) == expected
        assert (checkpoint.step, checkpoint.rate, optimizer.iterations) == (3, 0.5, 3)
        train(model, optimizer, 2)
        assert contents(model) == after, "slots and step counts are restored"


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Adadelta", {}),
        ("Adamax", {}),
        ("Nadam", {}),
        ("Lion", {}),
        ("SGD", {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4}),
    ],
)
def test_slots_of_each_optimizer_are_restored_into_other_shards(kind, arguments, tmp_path):
    def make(strategy):
        with strategy.scope():
            v = hr.Variable(np.arange(10, dtype=F32).reshape(5, 2), name="v")
        return v, getattr(hr.optimizers, kind)(0.1, name="o", **arguments)

    def step(v, optimizer):
        # Slots of all optimizers depend on earlier gradients.
        factor = 1 + optimizer.iterations % 3
        optimizer.apply_gradients([(factor * np.linspace(-1, 1, 10, dtype=F32).reshape(5, 2), v)])
        return v.read().tolist()

    with cluster(2, FixedShardsPartitioner(2)) as strategy:
        v, optimizer = make(strategy)
        for _ in range(3):
            step(v, optimizer)
        path = hr.Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "kept")
        expected = [step(v, optimizer) for _ in range(3)]
    with cluster(3, FixedShardsPartitioner(3)) as strategy:
        v, optimizer = make(strategy)
        hr.Checkpoint(v=v, optimizer=optimizer).restore(path).assert_consumed()
        assert [step(v, optimizer) for _ in range(3)] == expected


@pytest.mark.catalogue("2.6.9", "3.7.21", "3.9.17-21")
def test_variables_created_after_the_restore_are_restored(saved):
    path, expected, after = saved
    with cluster(1) as strategy:
        checkpoint = hr.Checkpoint()
        status = checkpoint.restore(path)
        model, optimizer = create_model(strategy)
        with pytest.raises(AssertionError, match="model/b/0"):
            status.assert_consumed()
        checkpoint.model = model
        assert contents(model) == expected
        checkpoint.optimizer = optimizer
        status.assert_existing_objects_matched()
        train(model, optimizer, 2)
        assert contents(model) == after
        checkpoint.extra = 1
        with pytest.raises(AssertionError, match="no value for extra"):
            status.assert_existing_objects_matched()
        assert status.expect_partial() is status


def test_a_renamed_optimizer_restores_its_slots(saved):
    path, _, after = saved
    with cluster(2) as strategy:
        model, _ = create_model(strategy)
        optimizer = hr.optimizers.Adam(0.1, name="other")
        hr.Checkpoint(model=model, optimizer=optimizer).restore(path)
        train(model, optimizer, 2)
        assert contents(model) == after
        assert optimizer.iterations == 5


def test_the_step_count_of_an_unlisted_optimizer_is_restored_with_its_slots(tmp_path):
    def make(strategy):
        with strategy.scope():
            pair = [hr.Variable(np.zeros(3), name=name) for name in ("a", "b")]
            return pair, [hr.optimizers.Adam(0.1) for _ in pair]

    def step(pair, optimizers, count):
        for _ in range(count):
            for variable, optimizer in zip(pair, optimizers, strict=True):
                optimizer.apply_gradients([(np.ones(3), variable)])

    with cluster(2) as strategy:
        pair, optimizers = make(strategy)
        step(pair, optimizers, 50)
        path = hr.Checkpoint(pair=pair).save(tmp_path / "without")
        both = hr.Checkpoint(pair=pair, second=optimizers[1]).save(tmp_path / "second")
    with cluster(2) as strategy:
        pair, optimizers = make(strategy)
        status = hr.Checkpoint(pair=pair).restore(path).assert_consumed()
        step(pair, optimizers, 5)
        np.testing.assert_allclose([each.read() for each in pair], -5.5, rtol=1e-5)
        status.assert_consumed()
        assert [each.iterations for each in optimizers] == [55, 55], "restored once"
        hr.Checkpoint(pair=pair, second=optimizers[1]).restore(both).assert_consumed()
        assert [each.iterations for each in optimizers] == [50, 50]
    with cluster(1) as strategy:
        pair, (adam, _) = make(strategy)
        with pytest.raises(InvalidArgumentError, match=r"slots of an optimizer 'Adam' that is not"):
            hr.Checkpoint(pair=pair, second=adam).restore(both)
        checkpoint = hr.Checkpoint(pair=pair)
        checkpoint.restore(both)
        with pytest.raises(InvalidArgumentError, match="set it in the Checkpoint before the vari"):
            checkpoint.second = hr.optimizers.Adam(0.1, name="other")


@pytest.mark.catalogue("2.7.14", "3.9.27")
def test_a_program_without_servers_reads_variables_as_arrays(saved):
    path, (w, b, _), _ = saved
    model = {"w": np.zeros((7, 2), F32), "b": [hr.Variable(F32(0))]}
    status = hr.Checkpoint(model=model).restore(path)
    status.assert_existing_objects_matched()
    assert (model["w"].tolist(), model["b"][0].read()) == (w, b)


def test_a_checkpoint_of_another_model_is_rejected_without_changes(saved):
    path, _, _ = saved
    cases = [
        ({"rows": 8}, r"model/w.*has shape \(8, 2\), but \(7, 2\)"),
        ({"dtype": np.float64}, "model/w.*has dtype float64, but float32"),
    ]
    with cluster(1) as strategy:
        for number, (options, message) in enumerate(cases):
            with strategy.scope():
                shape = (options.get("rows", 7), 2)
                v = hr.Variable(np.zeros(shape, options.get("dtype", F32)), name=f"v{number}")
                b = hr.Variable(F32(5), name=f"b{number}")
            with pytest.raises(InvalidArgumentError, match=message):
                hr.Checkpoint(model={"b": [b], "w": v}).restore(path)
            assert b.read() == 5
        with strategy.scope():
            table = hr.EmbeddingTable(4, name="wide")
        with pytest.raises(InvalidArgumentError, match="rows of 4 float32, but of 3"):
            hr.Checkpoint(model={"users": table}).restore(path)
        with pytest.raises(InvalidArgumentError, match="is a table, but was saved as a var"):
            hr.Checkpoint(model={"w": table}).restore(path)
        with pytest.raises(InvalidArgumentError, match="this model: it has model/b/0"):
            hr.Checkpoint(net=table).restore(path)
        with pytest.raises(InvalidArgumentError, match="is SGD, but Adam"):
            hr.Checkpoint(optimizer=hr.optimizers.SGD(0.1)).restore(path)


def test_objects_of_this_process_are_saved_and_restored(tmp_path):
    def values(number):
        dataset = hr.Dataset.range(10)
        iterator = iter(dataset)
        for _ in range(number):
            next(iterator)
        return {
            "int": number,
            "float": number / 3,
            "nan": float("nan") if number else 0.0,
            "text": f"n{number}",
            "flag": bool(number),
            "none": None,
            "scalar": np.float16(number),
            "array": np.full((2, 2), number),
            "variable": hr.Variable([float(number)] * 2),
            "nested": [1, {"a/b%": number}],
            "iterator": iterator,
        }

    before = values(4)
    path = hr.Checkpoint(**before).save(tmp_path / "mine")
    after = values(0)
    array = after["array"]
    checkpoint = hr.Checkpoint(**after)
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.int == 4
    assert checkpoint.float == 4 / 3
    assert np.isnan(checkpoint.nan)
    assert (checkpoint.text, checkpoint.flag, checkpoint.none) == ("n4", True, None)
    assert checkpoint.scalar == 4
    assert checkpoint.scalar.dtype == np.float16
    assert (array == 4).all()
    assert after["variable"].read().tolist() == [4, 4]
    assert after["nested"] == [1, {"a/b%": 4}]
    assert next(after["iterator"]) == 4


@pytest.mark.parametrize("damaged", ["a server's file", "the file of this process"])
def test_nothing_is_restored_from_a_partly_damaged_checkpoint(tmp_path, damaged):
    with cluster(2, FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            v = hr.Variable(np.ones((6, 2)), name="v")
        array, local = np.ones(4), hr.Variable(1.0)
        checkpoint = hr.Checkpoint(array=array, local=local, step=1, v=v)
        path = checkpoint.save(tmp_path / "ckpt-1")
        name = "ckpt-1.*.1-*" if damaged == "a server's file" else "ckpt-1.*.local*"
        (file,) = tmp_path.glob(name)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        for each in (v, local):
            each.assign(np.full(each.shape, 7.0))
        array[:] = checkpoint.step = 7
        with pytest.raises(DataLossError, match="checksum"):
            checkpoint.restore(path)
        assert (v.read() == 7).all()
        assert (array.tolist(), local.read(), checkpoint.step) == ([7] * 4, 7, 7)


@pytest.mark.parametrize("kind", ["local.safetensors", "json"])
def test_a_changed_byte_is_detected(tmp_path, kind):
    objects = {"array": np.arange(7.0), "iterator": iter(hr.Dataset.range(9)), "step": 3}
    path = hr.Checkpoint(**objects).save(tmp_path / "mine")
    (file,) = tmp_path.glob(f"*.{kind}")
    data = file.read_bytes()
    found = 0
    for index in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[index] ^= 1
        file.write_bytes(damaged)
        back = hr.Checkpoint(array=np.zeros(7), iterator=iter(hr.Dataset.range(9)), step=0)
        try:
            back.restore(path)
        except DataLossError as error:
            found += str(tmp_path) in str(error)
        else:  # whitespace of a header, or the name of the checksum
            assert (back.array.tolist(), back.step) == ([0, 1, 2, 3, 4, 5, 6], 3)
    assert found > 0.8 * len(range(0, len(data), 3))


def test_values_set_after_a_restore_are_kept(tmp_path):
    path = hr.Checkpoint(step=1, w=hr.Variable(5.0)).save(tmp_path / "mine")
    checkpoint = hr.Checkpoint(step=0, w=hr.Variable(0.0))
    status = checkpoint.restore(path)
    checkpoint.step += 1
    checkpoint.w.assign(7.0)
    status.assert_consumed()
    assert (checkpoint.step, checkpoint.w.read()) == (2, 7)
    checkpoint.w = hr.Variable(0.0)
    assert checkpoint.w.read() == 5, "another variable gets the saved value"


def test_errors_name_objects_without_a_saved_value(tmp_path):
    with pytest.raises(TypeError, match="'a/b' is a object"):
        hr.Checkpoint(a={"b": object()})
    with pytest.raises(NotFoundError, match="no checkpoint"):
        hr.Checkpoint(a=1).restore(tmp_path / "none")
    with pytest.raises(
        TypeError, match=r"'a/1' is a int in a tuple and .* a list or a dict in place"
    ):
        hr.Checkpoint(a=(np.zeros(2), 2))


def test_a_checkpoint_exists_once_its_manifest_does_and_old_files_are_deleted(
    tmp_path, monkeypatch
):
    checkpoint = hr.Checkpoint(a=np.arange(3))
    path = tmp_path / "ckpt-1"
    checkpoint.save(path)
    before = sorted(file.name for file in tmp_path.iterdir())
    folder = "headrace.storage.files.LocalFolder.write"
    with monkeypatch.context() as broken:
        broken.setattr(folder, lambda *args: (_ for _ in ()).throw(OSError("full")))
        checkpoint.checkpoint_objects["a"] = np.arange(5)
        with pytest.raises(OSError, match="full"):
            checkpoint.save(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    again = hr.Checkpoint(a=np.zeros(3, np.int64))
    again.restore(path).assert_consumed()
    assert again.a.tolist() == [0, 1, 2]
    checkpoint.save(path)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "ckpt-1.json").write_text("{")
    with pytest.raises(DataLossError, match="manifest"):
        again.restore(path)
    (tmp_path / "ckpt-1.json").write_text(json.dumps({"format": 2, "new": 1}))
    with pytest.raises(FailedPreconditionError, match="format 2"):
        again.restore(path)


def test_a_checkpoint_deleted_during_a_read_raises_not_found(tmp_path):
    path = hr.Checkpoint(a=np.arange(3)).save(tmp_path / "ckpt-1")
    checkpoint = hr.Checkpoint()
    checkpoint.restore(path)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(NotFoundError, match="deleted while"):
        checkpoint.a = np.arange(3)


def test_a_checkpoint_can_be_saved_to_a_url():
    path = hr.Checkpoint(a=np.arange(3)).save("memory://ckpts/run/ckpt-1")
    assert path == "memory://ckpts/run/ckpt-1"
    with cluster(1) as strategy:
        with strategy.scope():
            v = hr.Variable(np.arange(4), name="v")
        hr.Checkpoint(v=v).save("memory://ckpts/run/ckpt-2")
        v.assign(np.zeros(4, int))
        hr.Checkpoint(v=v).restore("memory://ckpts/run/ckpt-2")
        assert v.read().tolist() == [0, 1, 2, 3]
        assert [*hr.checkpoints_iterator("memory://ckpts/run", 0.1)] == [
            "memory://ckpts/run/ckpt-2"
        ]


def test_a_checkpoint_of_format_1_is_restored():
    # Written by `write_checkpoint`: two steps and an increment after the second; `expected` is its
    # output after a third.
    expected = json.loads((GOLDEN / "expected.json").read_text())
    with cluster(3, FixedShardsPartitioner(3)) as strategy:
        with strategy.scope():
            objects = write_checkpoint.model()
        checkpoint = hr.Checkpoint(**objects)
        checkpoint.restore(GOLDEN / "ckpt-1+1").assert_consumed()
        assert (checkpoint.step, checkpoint.name) == (2, "step 2")
        assert objects["array"].tolist() == [1, np.inf]
        write_checkpoint.train(objects, 2)
        assert write_checkpoint.contents(objects) == expected
        hr.Checkpoint(**objects).restore(GOLDEN / "ckpt-1").assert_consumed()
        assert objects["count"].read() == 1


def test_two_keys_with_the_same_path_are_rejected():
    with pytest.raises(ValueError, match=r"keys 1 and '1' of a dict have the same path 'v/1'"):
        hr.Checkpoint(v={1: "a", "1": "b"})
    with pytest.raises(ValueError, match="have the same path 'v/1'"):
        hr.Checkpoint(v={1: {"x": 1}, "1": {"y": 2}})

"""Distributed save: workers save each element once, even if processes fail."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from headrace.service import DispatchServer, LocalCluster, ShardingPolicy, distribute
from headrace.service.saving import distributed_save
from tests.service.reading import numbers, wait_until

Dataset = hr.Dataset
SECONDS = 40.0


def slow(x: int) -> int:
    time.sleep(0.002)
    return x


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Return a cluster whose dispatcher a test may restart."""
    with LocalCluster(2, processes=False, work_dir=tmp_path / "journal") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("journal")
    with LocalCluster(3, processes=False, work_dir=folder) as cluster:
        yield cluster


def save_and_load(dataset: Any, path: Path, cluster: LocalCluster, **options: Any) -> Any:
    """Save a dataset, wait for the save, and return the loaded dataset."""
    distributed_save(dataset, path, cluster.target, **options).wait(SECONDS)
    return Dataset.load(path)


# --- saved elements -----------------------------------------------------------------------------


@pytest.mark.catalogue("SV1")
@pytest.mark.parametrize("size", [0, 1, 10, 1000])
def test_each_element_is_saved_once(tmp_path: Path, cluster: LocalCluster, size: int) -> None:
    found = save_and_load(Dataset.range(size).map(lambda x: x + 1), tmp_path / "d", cluster)
    assert sorted(numbers(found)) == list(range(1, size + 1))
    assert found.cardinality() == size


@pytest.mark.catalogue("SV3")
def test_every_repetition_of_a_repeated_dataset_is_saved(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    found = save_and_load(Dataset.range(100).repeat(5), tmp_path / "d", cluster)
    assert sorted(numbers(found)) == sorted([*range(100)] * 5)


@pytest.mark.catalogue("SV9")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: (
                Dataset.zip(Dataset.range(200), Dataset.range(1000)).repeat(3).map(lambda a, b: a)
            ),
            600,
        ),
        (lambda: Dataset.range(300).shuffle(50).map(lambda x: x).shuffle(20), 300),
        (lambda: Dataset.range(40).flat_map(lambda x: Dataset.range(x)), 780),
        (lambda: Dataset.range(40).interleave(lambda x: Dataset.range(x), cycle_length=4), 780),
        (lambda: Dataset.range(100).filter(lambda x: x % 3 == 0), 34),
        (lambda: Dataset.from_generator(lambda: iter(range(50))), 50),
    ],
    ids=["zip", "shuffle", "flat_map", "interleave", "filter", "generator"],
)
def test_any_plan_is_saved_once(
    tmp_path: Path, cluster: LocalCluster, make: Callable[[], Any], expected: int
) -> None:
    dataset = make()
    found = save_and_load(dataset, tmp_path / "d", cluster, chunk_bytes=200)
    assert sorted(numbers(found)) == sorted(numbers(dataset))
    assert len(numbers(found)) == expected


def test_batches_equal_those_of_a_single_process(tmp_path: Path, cluster: LocalCluster) -> None:
    found = save_and_load(Dataset.range(103).batch(10), tmp_path / "d", cluster)
    rows = sorted((batch.tolist() for batch in found), key=lambda each: each[0])
    assert rows == [list(range(start, min(start + 10, 103))) for start in range(0, 103, 10)]


def test_structures_keep_their_spec(tmp_path: Path, cluster: LocalCluster) -> None:
    source = {"x": np.arange(20.0).reshape(10, 2), "y": np.array([f"s{n}" for n in range(10)])}
    dataset = Dataset.from_tensor_slices(source)
    found = save_and_load(dataset, tmp_path / "d", cluster)
    assert found.element_spec == dataset.element_spec
    assert sorted(str(row["y"]) for row in found) == [f"s{n}" for n in range(10)]


@pytest.mark.catalogue("SV4", "SV5")
def test_choices_among_datasets_are_saved(tmp_path: Path, cluster: LocalCluster) -> None:
    choice = Dataset.range(3).repeat()
    letters = [Dataset.from_tensors(each).repeat(5) for each in ("a", "b", "c")]
    chosen = Dataset.choose_from_datasets(letters, choice, stop_on_empty_dataset=False)
    distributed_save(chosen, tmp_path / "d", cluster.target)
    found = [str(each) for each in Dataset.load(tmp_path / "d", wait=True)]
    assert sorted(found) == sorted("abc" * 5)


@pytest.mark.catalogue("LD8")
def test_enumerate_numbers_elements_as_in_a_single_process(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    letters = Dataset.from_tensor_slices(np.array(["a", "b", "c"])).repeat(3).enumerate()
    found = save_and_load(letters, tmp_path / "d", cluster)
    assert sorted((int(n), str(x)) for n, x in found) == [(n, "abc"[n % 3]) for n in range(9)]


@pytest.mark.catalogue("LD6", "LD7")
def test_saved_samples_and_samples_of_saved_datasets(tmp_path: Path, cluster: LocalCluster) -> None:
    for number in range(3):
        distributed_save(Dataset.range(10), tmp_path / str(number), cluster.target)
    loaded = [Dataset.load(tmp_path / str(number), wait=True) for number in range(3)]
    sampled = Dataset.sample_from_datasets(loaded, stop_on_empty_dataset=False, seed=3)
    assert sorted(numbers(sampled)) == sorted([*range(10)] * 3)
    resumed = save_and_load(sampled, tmp_path / "d", cluster)
    assert sorted(numbers(resumed)) == sorted([*range(10)] * 3)


def test_a_dataset_is_saved_to_a_url(tmp_path: Path, cluster: LocalCluster) -> None:
    url = f"memory://{tmp_path.name}/d"
    save = distributed_save(Dataset.range(50).map(slow), url, cluster.target, chunk_bytes=80)
    assert sorted(numbers(Dataset.load(url, wait=True))) == list(range(50))
    save.wait(SECONDS)
    assert save.path == url
    assert sorted(numbers(Dataset.load(url))) == list(range(50))
    with pytest.raises(AlreadyExistsError):
        distributed_save(Dataset.range(3), url, cluster.target)


@pytest.mark.catalogue("SV6")
def test_several_saves_run_concurrently(tmp_path: Path, cluster: LocalCluster) -> None:
    datasets = {n: Dataset.range(n, n + 200) for n in range(0, 5000, 1000)}
    saves = {
        n: distributed_save(each, tmp_path / str(n), cluster.target) for n, each in datasets.items()
    }
    for n, save in saves.items():
        save.wait(SECONDS)
        assert sorted(numbers(Dataset.load(tmp_path / str(n)))) == list(range(n, n + 200))


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.catalogue("LD1")
def test_a_save_can_be_loaded_while_it_runs(tmp_path: Path, cluster: LocalCluster) -> None:
    dataset = Dataset.range(2000).map(slow)
    save = distributed_save(dataset, tmp_path / "d", cluster.target, chunk_bytes=400)
    reader = iter(Dataset.load(tmp_path / "d", wait=True))
    first = int(next(reader))
    assert not save.progress().is_done
    assert sorted([first, *numbers(reader)]) == list(range(2000))
    save.wait(SECONDS)
    assert numbers(Dataset.load(tmp_path / "d", wait=True)) == numbers(Dataset.load(tmp_path / "d"))


@pytest.mark.catalogue("LD2")
def test_loading_may_start_before_the_save(tmp_path: Path, cluster: LocalCluster) -> None:
    found: list[int] = []
    reader = threading.Thread(
        target=lambda: found.extend(numbers(Dataset.load(tmp_path / "d", wait=True)))
    )
    reader.start()
    distributed_save(Dataset.range(10), tmp_path / "d", cluster.target)
    reader.join(SECONDS)
    assert sorted(found) == list(range(10))


@pytest.mark.catalogue("LD3")
def test_repeated_loads_have_the_same_order(tmp_path: Path, cluster: LocalCluster) -> None:
    distributed_save(Dataset.range(10).shuffle(10), tmp_path / "d", cluster.target, chunk_bytes=1)
    found = numbers(Dataset.load(tmp_path / "d", wait=True).repeat(4))
    repetitions = [found[start : start + 10] for start in range(0, 40, 10)]
    assert repetitions == [repetitions[0]] * 4
    assert sorted(repetitions[0]) == list(range(10))


@pytest.mark.catalogue("SV8", "LD5")
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(("mode", "copies"), [(ShardingPolicy.OFF, 3), (ShardingPolicy.DYNAMIC, 1)])
def test_a_saved_dataset_can_be_distributed(
    tmp_path: Path, cluster: LocalCluster, mode: ShardingPolicy, copies: int, wait: bool
) -> None:
    save = distributed_save(Dataset.range(10), tmp_path / "d", cluster.target)
    if not wait:
        save.wait(SECONDS)
    found = Dataset.load(tmp_path / "d", wait=wait).repeat(2)
    assert sorted(numbers(found.apply(distribute(mode, cluster.target)))) == sorted(
        [*range(10)] * copies * 2
    )


@pytest.mark.catalogue("SV7", "LD4")
@pytest.mark.parametrize("wait", [False, True])
def test_reader_func_gets_the_streams_that_were_written(
    tmp_path: Path, cluster: LocalCluster, wait: bool
) -> None:
    save_and_load(Dataset.range(50).map(slow), tmp_path / "d", cluster, chunk_bytes=1)
    counted: list[int] = []

    def read(streams: Any) -> Any:
        each = list(streams)
        counted.append(len(each))
        assert all(numbers(stream) for stream in each)
        return streams.interleave(lambda stream: stream, cycle_length=3)

    found = Dataset.load(tmp_path / "d", wait=wait, reader_func=read)
    assert sorted(numbers(found)) == list(range(50))
    assert 1 <= counted[0] <= 3


@pytest.mark.catalogue("SV18", "LD16")
def test_a_position_in_a_saved_dataset_is_restored(tmp_path: Path, cluster: LocalCluster) -> None:
    save_and_load(Dataset.range(30), tmp_path / "d", cluster, chunk_bytes=1)
    for wait in (False, True):
        everything = numbers(Dataset.load(tmp_path / "d", wait=wait))
        for position in range(0, 31, 7):
            reader = iter(Dataset.load(tmp_path / "d", wait=wait))
            assert [int(next(reader)) for _ in range(position)] == everything[:position]
            resumed = iter(Dataset.load(tmp_path / "d", wait=wait))
            resumed.set_state(reader.get_state())
            assert numbers(resumed) == everything[position:]
        later = Dataset.load(tmp_path / "d", wait=wait).repeat(3).skip(30)
        with iter(later) as reader, iter(later) as resumed:
            assert [int(next(reader)) for _ in range(40)] == (everything * 2)[:40]
            resumed.set_state(reader.get_state())
            assert numbers(resumed) == everything[10:]


# --- rejected arguments and failures ----------------------------------------------------------


@pytest.mark.catalogue("SV13", "SV14")
def test_invalid_arguments_are_rejected(tmp_path: Path, cluster: LocalCluster) -> None:
    for service, text in ((1, "must be a string"), ("", "must not be empty")):
        with pytest.raises(ValueError, match=text):
            distributed_save(Dataset.range(3), tmp_path, service)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Dataset"):
        distributed_save([1, 2], tmp_path, cluster.target)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compression"):
        distributed_save(Dataset.range(3), tmp_path, cluster.target, "LZW")
    with pytest.raises(InvalidArgumentError, match="Saving an infinite dataset is not allowed"):
        distributed_save(Dataset.range(3).repeat(), tmp_path, cluster.target)


@pytest.mark.catalogue("SV17")
def test_a_dispatcher_without_a_journal_rejects_saves(tmp_path: Path) -> None:
    with (
        DispatchServer() as dispatcher,
        pytest.raises(InvalidArgumentError, match="in the fault tolerant mode"),
    ):
        distributed_save(Dataset.range(3), tmp_path, dispatcher.target)


@pytest.mark.catalogue("SV11", "SF2")
def test_a_path_with_a_saved_dataset_is_rejected(tmp_path: Path, own_cluster: LocalCluster) -> None:
    cluster = own_cluster
    save_and_load(Dataset.range(3), tmp_path / "d", cluster)
    with pytest.raises(AlreadyExistsError, match="already started or completed"):
        distributed_save(Dataset.range(3), tmp_path / "d", cluster.target)
    cluster.restart_dispatcher()
    with pytest.raises(AlreadyExistsError, match="already started or completed"):
        distributed_save(Dataset.range(3), tmp_path / "d", cluster.target)
    Dataset.range(3).save(tmp_path / "e")
    with pytest.raises(AlreadyExistsError, match="already contains a saved dataset of 3 elements"):
        distributed_save(Dataset.range(3), tmp_path / "e", cluster.target)
    assert numbers(Dataset.load(tmp_path / "e")) == [0, 1, 2]


def test_a_path_that_cannot_be_written_is_in_the_error(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FailedPreconditionError, match="a parent of it is a file"):
        distributed_save(Dataset.range(3), tmp_path / "file" / "d", cluster.target)


def has_no_open_file(directory: Path) -> bool:
    """Return whether all element files in a directory are complete Arrow files."""
    try:
        files = [each for each in directory.iterdir() if ".arrow" in each.name]
        return all(each.read_bytes().endswith(b"ARROW1") for each in files)
    except FileNotFoundError:  # deleted in the meantime
        return False


@pytest.mark.catalogue("SV12", "LD9")
def test_a_failing_function_fails_the_save(tmp_path: Path, cluster: LocalCluster) -> None:
    def seven(x: int) -> int:
        if x == 77:
            raise ValueError("it is seventy-seven")
        return x

    save = distributed_save(Dataset.range(100).map(seven), tmp_path / "d", cluster.target)
    with pytest.raises(FailedPreconditionError, match="it is seventy-seven"):
        save.wait(SECONDS)
    for wait in (False, True):
        with pytest.raises(FailedPreconditionError, match="it is seventy-seven"):
            numbers(Dataset.load(tmp_path / "d", wait=wait))
    assert "seventy-seven" in save.progress().error
    # Another worker deletes its unfinished file when it learns of the error; a file that it
    # finished just before stays until the next save.
    wait_until(lambda: has_no_open_file(tmp_path / "d"))
    assert {"dataset.json", "ERROR"} <= {each.name for each in (tmp_path / "d").iterdir()}
    assert sorted(numbers(save_and_load(Dataset.range(3), tmp_path / "d", cluster))) == [0, 1, 2]


def test_waiting_for_a_save_times_out(tmp_path: Path, cluster: LocalCluster) -> None:
    save = distributed_save(Dataset.range(5000).map(slow), tmp_path / "d", cluster.target)
    with pytest.raises(DeadlineExceededError, match="did not finish within"):
        save.wait(0.05)
    save.wait(SECONDS)


@pytest.mark.catalogue("SF3-10")
def test_stray_files_in_the_directory_are_ignored(
    tmp_path: Path, own_cluster: LocalCluster
) -> None:
    cluster = own_cluster
    (tmp_path / "d").mkdir()
    for name in ("stream_x", "00000000-00000-000000-ffffffffffffffff.arrow", "ERROR"):
        (tmp_path / "d" / name).write_bytes(b"" if name != "ERROR" else b"{}")
    save = distributed_save(Dataset.range(100).map(slow), tmp_path / "d", cluster.target)
    (tmp_path / "d" / "split_x").mkdir()
    cluster.restart_dispatcher()
    save.wait(SECONDS)
    assert sorted(numbers(Dataset.load(tmp_path / "d"))) == list(range(100))


def test_an_unknown_save_is_in_the_error(tmp_path: Path, cluster: LocalCluster) -> None:
    save = distributed_save(Dataset.range(3), tmp_path / "d", cluster.target)
    save.wait(SECONDS)
    other = type(save)(cluster.target.partition("://")[2], "f" * 16, "nowhere", None)
    with pytest.raises(NotFoundError, match="not found"):
        other.progress()
    assert str(tmp_path / "d") in repr(save)


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.catalogue("SF1", "SF13")
def test_a_save_survives_restarts_of_workers_and_dispatcher(tmp_path: Path) -> None:
    with LocalCluster(2, processes=False, work_dir=tmp_path / "j") as cluster:
        save = distributed_save(
            Dataset.range(1000).map(slow), tmp_path / "d", cluster.target, chunk_bytes=300
        )
        found: list[int] = []
        loading = Dataset.load(tmp_path / "d", wait=True)
        reader = threading.Thread(target=lambda: found.extend(numbers(loading)))
        reader.start()
        for index in range(2):
            wait_until(lambda: save.progress().files > 2 * index)  # noqa: B023
            cluster.stop_worker(index)
            cluster.restart_dispatcher()
            cluster.add_worker()
        save.wait(SECONDS)
        reader.join(SECONDS)
    assert sorted(found) == list(range(1000))
    assert found == numbers(Dataset.load(tmp_path / "d"))
    assert not [each for each in (tmp_path / "d").iterdir() if each.name.endswith(".partial")]


@pytest.mark.catalogue("LF1")
@pytest.mark.parametrize(("mode", "copies"), [(ShardingPolicy.OFF, 2), (ShardingPolicy.DYNAMIC, 1)])
def test_a_running_save_is_read_across_a_dispatcher_restart(
    tmp_path: Path, own_cluster: LocalCluster, mode: ShardingPolicy, copies: int
) -> None:
    dataset = Dataset.range(200).repeat(2).map(slow)
    distributed_save(dataset, tmp_path / "d", own_cluster.target, chunk_bytes=200)
    loaded = Dataset.load(tmp_path / "d", wait=True).repeat(2)
    reader = iter(loaded.apply(distribute(mode, own_cluster.target, max_outstanding_requests=1)))
    first = int(next(reader))
    own_cluster.restart_dispatcher()
    assert sorted([first, *numbers(reader)]) == sorted([*range(200)] * 4 * copies)


@pytest.mark.catalogue("LF2-4")
@pytest.mark.parametrize(("mode", "copies"), [(ShardingPolicy.OFF, 2), (ShardingPolicy.DYNAMIC, 1)])
def test_a_saved_dataset_is_read_while_workers_leave_and_join(
    tmp_path: Path, own_cluster: LocalCluster, mode: ShardingPolicy, copies: int
) -> None:
    save_and_load(Dataset.range(400), tmp_path / "d", own_cluster)
    loaded = Dataset.load(tmp_path / "d").map(slow).repeat(2)
    reader = iter(loaded.apply(distribute(mode, own_cluster.target)))
    found = [int(next(reader)) for _ in range(100)]
    own_cluster.add_worker()
    own_cluster.restart_dispatcher()
    if mode is ShardingPolicy.DYNAMIC:  # a copy would end with its worker
        own_cluster.stop_worker(0)
    found += numbers(reader)
    assert sorted(found) == sorted([*range(400)] * 2 * (copies + (copies > 1)))

    own_cluster.restart_dispatcher()
    new = Dataset.load(tmp_path / "d").map(slow)
    assert sorted(numbers(new.apply(distribute(ShardingPolicy.DYNAMIC, own_cluster.target)))) == [
        *range(400)
    ]


@pytest.mark.catalogue("SF14", "SF15", "SF17", "SF18")
@pytest.mark.parametrize("steps", ["map", "interleave", "shuffle"])
def test_a_save_survives_killed_workers(tmp_path: Path, steps: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    dataset = Dataset.range(1500).map(slow)
    if steps == "shuffle":
        dataset = dataset.filter(lambda x: x >= 0).shuffle(100)
    elif steps == "interleave":
        dataset = Dataset.range(50).interleave(
            lambda x: Dataset.range(30).map(lambda y: slow(x * 30 + y)), cycle_length=3
        )
    with LocalCluster(2, work_dir=tmp_path / "j", worker_timeout_ms=1000) as cluster:
        save = distributed_save(dataset, tmp_path / "d", cluster.target, chunk_bytes=500)
        for number in range(2):
            time.sleep(chance.random())
            cluster.kill_worker(number)
            if chance.random() < 0.5:
                cluster.restart_dispatcher()
            cluster.add_worker()
        save.wait(SECONDS)
    assert sorted(numbers(Dataset.load(tmp_path / "d"))) == list(range(1500))


def test_an_element_that_kills_workers_fails_the_save(tmp_path: Path) -> None:
    def kills_worker(x: int) -> int:
        if x == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    with LocalCluster(2, work_dir=tmp_path / "j", worker_timeout_ms=1000) as cluster:
        save = distributed_save(Dataset.range(20).map(kills_worker), tmp_path / "d", cluster.target)
        with pytest.raises(FailedPreconditionError, match="every worker that processed"):
            save.wait(2 * SECONDS)


def test_a_save_continues_after_its_client_process_ended(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    script = f"""
import headrace as hr
hr.service.distributed_save(hr.Dataset.range(500), {str(tmp_path / "d")!r}, {cluster.target!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SECONDS)
    assert sorted(numbers(Dataset.load(tmp_path / "d", wait=True))) == list(range(500))

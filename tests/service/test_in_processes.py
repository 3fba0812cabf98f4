"""Tests of `Dataset.in_processes` with real worker processes."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import DataLossError, FailedPreconditionError, UserFunctionError
from headrace.service import process_pool
from tests.service.reading import numbers, slowly, wait_until

pytestmark = pytest.mark.system

_SECONDS = 60.0


@pytest.fixture(scope="module", autouse=True)
def _warm_pools() -> Iterator[None]:
    """Keep pools of 2 and 3 processes during the tests of this module; others use 1 process."""
    datasets = [hr.Dataset.range(2).map(slowly).in_processes(number) for number in (2, 3)]
    assert [numbers(dataset) for dataset in datasets] == [[0, 1]] * 2
    yield
    datasets.clear()
    wait_until(lambda: not process_pool._pools)


def pool_pids(num_processes: int) -> set[int]:
    cluster = process_pool._pools[num_processes]._cluster
    assert cluster is not None
    return {worker.pid for worker in cluster.workers if worker.is_running}


def pid_of(_: Any) -> int:
    return os.getpid()


def fail_at_three(x: Any) -> int:
    return 1 // (int(x) - 3) * 0 + int(x)


def small_rows(x: Any) -> hr.Dataset:
    return hr.Dataset.range(int(x) % 3)


def pooled_rows(x: Any) -> hr.Dataset:
    return hr.Dataset.range(2).map(pid_of).in_processes(2)


DATASETS: dict[str, Callable[[], hr.Dataset]] = {
    "map": lambda: hr.Dataset.range(7).map(slowly),
    "shuffled batches": lambda: hr.Dataset.range(9).shuffle(9, seed=3).map(slowly).batch(2),
    "filter and shuffle": lambda: (
        hr.Dataset.range(9).map(slowly).filter(lambda x: x % 3).shuffle(3, seed=1)
    ),
    "interleave": lambda: hr.Dataset.range(6).interleave(small_rows, cycle_length=2),
    "scan": lambda: hr.Dataset.range(6).map(slowly).scan(0, lambda s, x: (s + x, s + x)),
    "repeat": lambda: hr.Dataset.range(3).shuffle(3, seed=2).map(slowly).repeat(2),
    "zip": lambda: hr.Dataset.zip(hr.Dataset.range(4), hr.Dataset.range(5).map(slowly)),
}


def test_a_shard_hint_before_it_is_rejected() -> None:
    dataset = hr.Dataset.range(4).shard(hr.service.SHARD_HINT, hr.service.SHARD_HINT)
    with pytest.raises(FailedPreconditionError, match="must come after `in_processes`"):
        dataset.map(slowly).in_processes(2)


def as_lists(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


@pytest.mark.parametrize("name", DATASETS)
def test_elements_and_states_are_independent_of_the_number_of_processes(name: str) -> None:
    dataset = DATASETS[name]()
    expected = as_lists(dataset)
    first, second = dataset.in_processes(2), dataset.in_processes(3)
    iterator = iter(first)
    with iterator:
        states = [iterator.get_state()]
        found = []
        for element in iterator:
            found += as_lists([element])
            states.append(iterator.get_state())
    assert found == expected
    for position, state in enumerate(states):
        for reader in (first, second, dataset):
            with iter(reader) as resumed:
                resumed.set_state(state)
                assert as_lists(resumed) == expected[position:], (position, reader)


@pytest.mark.parametrize("name", ["map", "shuffled batches", "repeat"])
def test_states_of_one_process_between_splits_resume(name: str) -> None:
    dataset = DATASETS[name]()
    expected = as_lists(dataset)
    pooled = dataset.in_processes(2)
    with iter(DATASETS[name]()) as iterator:  # its first epoch
        for position in range(len(expected)):
            with iter(pooled) as resumed:
                resumed.set_state(iterator.get_state())
                assert as_lists(resumed) == expected[position:]
            next(iterator)


def test_epochs_share_processes_and_shuffle_anew() -> None:
    workers = pool_pids(2)
    pids = hr.Dataset.range(40).map(slowly).map(pid_of).in_processes(2)
    assert set(numbers(pids)) | set(numbers(pids)) <= workers == pool_pids(2)
    assert len(workers) == 2
    assert os.getpid() not in workers
    shuffled = hr.Dataset.range(50).shuffle(50).map(slowly).in_processes(2)
    orders = [numbers(shuffled) for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))


def test_an_error_is_raised_in_its_turn_and_reading_continues() -> None:
    with iter(hr.Dataset.range(6).map(fail_at_three).in_processes(2)) as iterator:
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(UserFunctionError, match="ZeroDivisionError for element 3"):
            next(iterator)
        state = iterator.get_state()
        assert numbers(iterator) == [4, 5]
    with iter(hr.Dataset.range(6).map(fail_at_three).in_processes(3)) as resumed:
        resumed.set_state(state)
        assert numbers(resumed) == [4, 5]


def test_an_element_that_ends_each_process_raises_in_its_turn() -> None:
    def die(x: Any) -> Any:
        if x == 3:
            os._exit(7)
        return x

    dataset = hr.Dataset.range(6).map(die).in_processes(1)
    with iter(dataset) as iterator:
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        message = r"position 3 of gather \(.*code 7.*that ran there: map \(test_in_processes.py:"
        with pytest.raises(DataLossError, match=message):
            next(iterator)
        state = iterator.get_state()
        assert numbers(iterator) == [4, 5]
    assert state["position"]["splits"] == {"split": 3, "ordinal": 0, "failed": 1}


@pytest.mark.parametrize("end", [lambda: os._exit(1), lambda: os.kill(os.getpid(), 11)])
def test_an_element_that_ends_one_process_is_computed_again(
    end: Callable[[], object], tmp_path: Path
) -> None:
    marker = tmp_path / "died"

    def die_once(x: Any) -> Any:
        if x == 3 and not marker.exists():
            marker.touch()
            end()
        return x

    assert numbers(hr.Dataset.range(8).map(die_once).in_processes(1)) == list(range(8))
    assert marker.exists()


def test_processes_that_got_sigterm_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    dataset = hr.Dataset.range(60).map(slowly).in_processes(1)
    with caplog.at_level(logging.WARNING), iter(dataset) as iterator:
        found = [int(next(iterator))]
        for pid in pool_pids(1):
            os.kill(pid, signal.SIGTERM)
        found += numbers(iterator)
        assert found == list(range(60))
        assert numbers(dataset) == list(range(60))
    assert "; replacement starts in 0.5 s" in caplog.text


def test_an_interrupted_wait_loses_no_element() -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.4)
        return x

    found, interruptions = [], 0
    with iter(hr.Dataset.range(6).map(slow).in_processes(2)) as iterator:
        timer = threading.Timer(0.6, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        while True:
            try:
                found.append(int(next(iterator)))
            except KeyboardInterrupt:
                interruptions += 1
            except StopIteration:
                break
        timer.join()
    assert (found, interruptions) == (list(range(6)), 1)


def test_leaving_a_loop_and_closing_release_everything() -> None:
    dataset = hr.Dataset.range(10**6).map(slowly).in_processes(2)
    for element in dataset:
        if element == 3:
            break
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    assert list(iterator) == []
    held = iter(dataset)
    next(held)
    del held, dataset, iterator  # the leak check of each test does the rest


def test_processes_end_when_the_last_dataset_is_collected() -> None:
    dataset = hr.Dataset.range(6).map(pid_of).in_processes(1)
    other = hr.Dataset.range(3).map(pid_of).in_processes(1)
    pids = set(numbers(dataset)) | set(numbers(other))
    derived = dataset.batch(2)
    del dataset, other
    assert set(np.concatenate(list(derived)).tolist()) <= pids  # the pool is still there
    assert 1 in process_pool._pools
    del derived
    wait_until(lambda: 1 not in process_pool._pools)
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_child_continues_with_its_own_processes() -> None:
    dataset = hr.Dataset.range(8).map(slowly).in_processes(1)
    iterator = iter(dataset)
    assert int(next(iterator)) == 0
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            rest = numbers(iterator)
            pids = set(numbers(hr.Dataset.range(2).map(pid_of).in_processes(1)))
            os.write(writer, repr((rest, pids)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    assert numbers(iterator) == list(range(1, 8))
    with open(reader, "rb") as pipe:
        rest, pids = eval(pipe.read())
    assert os.waitpid(pid, 0)[1] == 0
    assert rest == list(range(1, 8))
    wait_until(lambda: not any(is_running(each) for each in pids))
    assert numbers(dataset) == list(range(8))  # the parent's processes still run


def run_script(folder: Path, text: str, **options: Any) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_script_needs_no_main_guard_and_ends_quietly(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        """
        import os
        import headrace as hr

        FACTOR = 10

        class Scale:
            def __call__(self, x): return x * FACTOR, os.environ["CUDA_VISIBLE_DEVICES"]

        dataset = hr.Dataset.range(10**6).map(Scale()).in_processes(2)
        for value, devices in dataset:
            if value == 30:
                print(value, devices, flush=True)
                break
        iterator = iter(dataset)  # open at the end
        next(iterator)
        """,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "5"},
    )
    output, errors = script.communicate(timeout=_SECONDS)
    assert (script.returncode, output, errors) == (0, "30 5\n", "")


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        """
        import os
        import pathlib
        import time
        import headrace as hr

        def pid_of(x):
            time.sleep(0.01)
            return os.getpid()

        def run_forever(x):
            pathlib.Path(f"busy-{x}").touch()
            while True: pass

        dataset = hr.Dataset.range(100).map(pid_of).in_processes(2)
        print(*set(map(int, dataset)), flush=True)
        list(hr.Dataset.range(2).map(run_forever).in_processes(2))
        """,
        cwd=tmp_path,
    )
    with script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 2
        wait_until(lambda: list(tmp_path.glob("busy-*")) != [], _SECONDS)
        assert all(is_running(pid) for pid in pids)
        script.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_a_warning_names_the_step_that_keeps_functions_in_this_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scanned = hr.Dataset.range(4).scan(0, lambda s, x: (s + x, s)).map(slowly).in_processes(2)
    with caplog.at_level(logging.WARNING):
        assert numbers(scanned) == numbers(scanned) == [0, 0, 1, 3]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "in_processes(2): no function runs in the worker processes: scan (test_in_processes.py:"
    )
    assert "no function runs in the worker processes" in scanned.explain()


def test_a_warning_says_that_a_generator_is_read_by_one_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = hr.Dataset.from_generator(lambda: iter(range(4))).map(slowly).in_processes(2)
    with caplog.at_level(logging.WARNING):
        assert numbers(dataset) == [0, 1, 2, 3]
    (record,) = caplog.records
    assert "at most 1 of 2 processes can work" in record.getMessage()


def test_functions_in_worker_processes_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    dataset = hr.Dataset.range(4).map(slowly).in_processes(2)
    with caplog.at_level(logging.WARNING):
        assert numbers(dataset) == [0, 1, 2, 3]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("mode", "ordered", "copies"),
    [("DYNAMIC", True, 1), ("DYNAMIC", False, 1), ("OFF", False, 2), ("DATA", False, 1)],
)
def test_a_data_service_ignores_it(mode: str, ordered: bool, copies: int) -> None:
    dataset = hr.Dataset.range(6).map(pid_of).in_processes(1).enumerate()
    names = ["localhost"] * 2
    with hr.service.LocalCluster(processes=False, worker_addresses=names) as cluster:
        share = hr.service.distribute(
            hr.service.ShardingPolicy[mode], cluster.target, ordered=ordered
        )
        found = [(int(number), int(pid)) for number, pid in dataset.apply(share)]
    assert {pid for _, pid in found} == {os.getpid()}
    assert len(found) == 6 * copies
    if ordered:
        assert [number for number, _ in found] == list(range(6))
    assert 1 not in process_pool._pools


def test_nested_uses_start_no_further_processes() -> None:
    twice = hr.Dataset.range(4).map(pid_of).in_processes(3).map(slowly).in_processes(2)
    inner = hr.Dataset.range(4).interleave(pooled_rows).map(slowly).in_processes(2)
    assert set(numbers(twice)) | set(numbers(inner)) <= pool_pids(2)
    assert numbers(hr.Dataset.range(2).interleave(small_rows).in_processes(2)) == [0]


def test_steps_after_it_run_in_this_process() -> None:
    dataset = hr.Dataset.range(5).map(slowly).in_processes(2).map(lambda x: (x, os.getpid()))
    assert [(int(x), int(pid)) for x, pid in dataset] == [(x, os.getpid()) for x in range(5)]
    with iter(dataset) as iterator:
        next(iterator)
        state = iterator.get_state()
        rest = as_lists(iterator)
    with iter(dataset) as resumed:
        resumed.set_state(state)
        assert as_lists(resumed) == rest


def test_an_unpickled_dataset_reads_through_the_pool() -> None:
    dataset = hr.Dataset.range(5).shuffle(5, seed=1).map(slowly).in_processes(2)
    copy = pickle.loads(pickle.dumps(dataset))
    assert numbers(copy) == numbers(dataset)


def test_the_context_of_a_dataset_that_cannot_be_sent_is_an_error() -> None:
    lock = threading.Lock()
    with pytest.raises(FailedPreconditionError, match="pickle"):
        hr.Dataset.range(3).map(lambda x: lock and x).in_processes(2)


@pytest.mark.parametrize("number", [0, -1])
def test_a_wrong_number_of_processes_is_an_error(number: int) -> None:
    with pytest.raises(ValueError, match="num_processes"):
        hr.Dataset.range(3).in_processes(number)
    with pytest.raises(ValueError, match=r"got AUTOTUNE; os\.cpu_count\(\)"):
        hr.Dataset.range(3).in_processes(hr.AUTOTUNE)
    with pytest.raises(TypeError, match="num_processes"):
        hr.Dataset.range(3).in_processes(2.5)  # type: ignore[arg-type]


def test_two_iterators_of_one_pool_are_independent() -> None:
    dataset = hr.Dataset.range(30).map(slowly).in_processes(2)
    with iter(dataset) as first, iter(dataset) as second:
        pairs = [(int(x), int(y)) for x, y in itertools.zip_longest(first, second)]
    assert pairs == [(x, x) for x in range(30)]


def test_proved_spec_is_known_without_processes() -> None:
    dataset = hr.Dataset.range(6).map(lambda x: x * 0.5).batch(2)
    pooled = dataset.in_processes(1)
    assert pooled.element_spec == dataset.element_spec == hr.ArraySpec((None,), np.float64)
    assert 1 not in process_pool._pools

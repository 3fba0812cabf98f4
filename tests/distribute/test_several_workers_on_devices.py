"""Several workers whose replicas have arrays of JAX or PyTorch."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distribute import scenarios
from tests.distribute.several_workers import Scenarios, Workers
from tests.on_devices import once

pytestmark = pytest.mark.system


def check_values_in_a_framework(found, modules):
    for steps, weight, mean, kinds in found:
        assert steps == [[6.0, 4, [0.0, 1.0, 2.0, 3.0]], [9.0, 2, [4.0, 5.0]]]
        assert weight == 1.0 + 6.0 + 9.0
        assert mean == 4.5
        assert kinds == modules


# --- PyTorch -------------------------------------------------------------------------------------


@pytest.mark.catalogue("3.14.9-14")
def test_pytorch_values_include_all_workers(tmp_path):
    pytest.importorskip("torch")
    workers = Workers(2)
    try:
        found = workers.run(scenarios.in_a_framework, "torch")
        check_values_in_a_framework(json.loads(json.dumps(found)), ["torch"])
        end_while_large_tensors_are_added_up(workers, tmp_path)
    finally:
        workers.close()


def end_while_large_tensors_are_added_up(workers, path):
    """The direct all-reduce names the lost worker, too."""
    workers.start(scenarios.large_until_an_error, str(path / "added"))
    until = time.monotonic() + 60.0
    while len(list(path.glob("added-*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    workers.workers[1].signal(signal.SIGKILL)
    text, gone = workers.answers()
    assert f"worker 1 ({workers.addresses[1]}) is lost" in text
    assert gone is None


# --- JAX: two processes with two devices each, and one with four ---------------------------------

JAX = Scenarios("tests.distribute.jax_scenarios")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of each process, by scenario."""
    pytest.importorskip("jax")
    found: dict[str, Any] = once(tmp_path_factory, "several_processes_of_jax", found_in)
    return found


def found_in(folder: Path) -> dict[str, Any]:
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    np.savez(folder / "digits.npz", data=digits.data, target=digits.target)
    (folder / "a.txt").write_text("".join(f"{number}\n" for number in range(12)))
    (folder / "b.txt").write_text("".join(f"{number}\n" for number in range(12, 32)))
    files = [str(folder / "a.txt"), str(folder / "b.txt")]
    data = str(folder / "digits.npz")
    two = Workers(2, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2")
    one = Workers(1, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4")
    try:
        one.start(JAX.losses_of_digits, data)
        made = {
            "framework": two.run(scenarios.in_a_framework, "jax"),
            "sums": two.run(JAX.large_sums),
            "losses": two.run(JAX.losses_of_digits, data),
            "losses of one": one.answers(),
            "calls": two.run(JAX.calls, files),
            "arrays": two.run(JAX.global_arrays, files),
            "iterators": two.run(JAX.device_iterators, files),
            "saved by two": two.run(JAX.saved_after, 1, files),
            "saved by one": one.run(JAX.saved_after, 2, files),
        }
        made["rest for one"] = one.run(JAX.rest_from, made["saved by two"][0][1], files)
        made["rest for two"] = two.run(JAX.rest_from, made["saved by one"][0][1], files)
        begun = time.monotonic()
        made["end"] = two.errors(JAX.end_within_a_program, 0, int(signal.SIGKILL), 60.0)
        made["seconds to the end"] = time.monotonic() - begun
        made["address"] = two.addresses[0]
    finally:
        one.close()
        two.close()
    return made


def has_gpus(count: int) -> bool:
    plugin = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    return plugin and len(list(Path("/dev").glob("nvidia[0-9]*"))) >= count


@pytest.mark.skipif(not has_gpus(2), reason="no two GPUs here")
def test_workers_with_a_gpu_each_are_one_program():
    workers = Workers(2, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    for number, worker in enumerate(workers.workers):
        environment = {**workers.environment(number, 2), "CUDA_VISIBLE_DEVICES": str(number)}
        worker.ask(environment, JAX.on_a_gpu)
    try:
        for number, found in enumerate(workers.answers()):
            assert found == (("gpu:0",), [3.0], number, 6.0, "gpu", [0, 1, 2, 3])
    finally:
        workers.close()


@pytest.mark.catalogue("3.14.9-14")
def test_jax_values_include_all_workers(found):
    check_values_in_a_framework(found["framework"], ["jaxlib"])


def test_large_sums_use_jax_collectives_for_every_dtype(found):
    for each in found["sums"]:
        assert each.pop("direct") is True
        assert each.pop("mean") == [1.5, 1.5]
        assert each.pop("loose") == 8.0
        assert each == {dtype: [dtype, 6.0, 6.0] for dtype in each}
        assert len(each) == 3


def test_two_processes_train_with_the_losses_of_one(found):
    (losses, weights), again = found["losses"]
    ((expected, size),) = found["losses of one"]
    assert [losses, weights] == again
    assert len(losses) == 21
    assert losses[-1] < 0.6 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(weights, size, rtol=1e-4)


def test_a_compiled_step_is_one_program_over_all_workers(found):
    first, second = found["calls"]
    assert (first.pop("ids"), second.pop("ids")) == ([0, 1], [2, 3])
    assert first == second
    assert first["sum"] == [6.0, 6.0]
    assert first["gathered"] == [[0, 1, 2, 3]] * 2
    assert first["kept"] == 4 * 3
    assert first["bfloat16"] == "bfloat16"
    assert first["constant"] == "train"
    assert sum(first["padded"]) == sum(range(32))
    assert first["dropped"][:2] == first["padded"][:2]


def test_mismatched_arguments_raise_on_all_workers_which_continue(found):
    for each in found["calls"]:
        assert each["uneven"].startswith("InvalidArgumentError: the shards of a batch have 0, 0, 1")
        assert "call it with strategy.run" in each["uneven"]
        assert "has 0: float64[2], and worker 1" in each["shapes"]
        assert "has 0: 'mode 0', and worker 1" in each["constants"]
        assert each["raised"] == "InvalidArgumentError: mine"
        assert each["after"] == [4.0, 4.0]


def test_a_dataset_yields_arrays_over_all_workers_devices(found):
    first, second = found["arrays"]
    assert first == second
    assert first["data"] == [list(range(8)), list(range(8, 16))]
    assert "1, 0, 0 and 0 rows" in first["uneven"]
    assert first["real"] == list(range(32))
    assert first["dropped"] == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 16, 17, 18, 19]]
    assert first["compiled"] == [28, 28]


def test_device_iterators_work_on_a_strategys_joined_processes(found):
    batches = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 16, 17, 18, 19]]
    assert found["iterators"] == [[batches, 2]] * 2


def test_states_move_between_one_and_two_processes(found):
    ((seen, state), again) = found["saved by two"]
    assert [seen, state] == again
    (rest,) = found["rest for one"]
    assert set(seen + rest) <= set(range(32))
    assert len(seen + rest) == len(set(seen + rest)) == 32
    ((seen, _),) = found["saved by one"]
    first, second = found["rest for two"]
    assert first == second
    assert sorted(seen + first) == list(range(32))


def test_a_worker_that_dies_in_a_program_is_named_to_the_others(found):
    gone, text = found["end"]
    assert gone is None
    assert text.startswith(
        f"worker 0 ({found['address']}), which runs the collective server, is lost"
    )
    assert found["seconds to the end"] < 30

"""Elements that nobody can compute: whoever reads is told after the last of the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import DataLossError
from headrace.service import LocalCluster, distribute

pytestmark = pytest.mark.system


def end_the_process(x: Any) -> Any:
    if int(x) == 17:
        os._exit(3)
    return x


def read(dataset: Iterable[Any]) -> tuple[list[int], list[str]]:
    """Return the elements of batches, and the errors about missing elements."""
    got: list[int] = []
    errors: list[str] = []
    iterator = iter(dataset)
    while True:
        try:
            got += [int(value) for value in np.asarray(next(iterator)).ravel()]
        except DataLossError as error:
            errors.append(str(error))
        except StopIteration:
            return got, errors


def test_element_that_ends_processes_raises_after_all_others_in_order() -> None:
    with LocalCluster(num_workers=3) as cluster:
        served = hr.Dataset.range(45).map(end_the_process)
        dataset = served.apply(distribute("distributed_epoch", cluster.target, ordered=True))
        # A batch is half full when the reader is at its end.
        got, errors = read(dataset.batch(8))
    assert got == [value for value in range(45) if value != 17]
    (error,) = errors
    assert "1 given up after 3 worker processes ended" in error
    assert "(positions 17)" in error


def test_each_pass_in_any_order_raises_once() -> None:
    with LocalCluster(num_workers=3) as cluster:
        served = hr.Dataset.range(20).map(end_the_process)
        dataset = served.apply(distribute("distributed_epoch", cluster.target))
        got, errors = read(dataset.repeat(2).batch(8))
    assert sorted(got) == sorted([value for value in range(20) if value != 17] * 2)
    assert len(errors) == 2


def test_torch_loader_and_jax_iterator_pass_the_error_on() -> None:
    ends: dict[str, tuple[list[int], list[str]]] = {}
    with LocalCluster(num_workers=3) as cluster:
        served = hr.Dataset.range(60).map(end_the_process).batch(1)
        job = distribute("distributed_epoch", cluster.target, job_name="shared")
        readers: dict[str, Any] = {
            "torch": lambda: hr.torch.loader(served.apply(job)),
            "jax": lambda: hr.jax.device_iterator(served.apply(job)),
        }

        def run(name: str) -> None:
            ends[name] = read(readers[name]())

        threads = [threading.Thread(target=run, args=(name,)) for name in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert sorted(value for got, _ in ends.values() for value in got) == [
        value for value in range(60) if value != 17
    ]
    assert {name: len(errors) for name, (_, errors) in ends.items()} == {"torch": 1, "jax": 1}

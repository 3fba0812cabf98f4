"""The cache of loaded functions on a worker, which is limited in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.coordinator import packing as functions
from headrace.coordinator.packing import LoadedFunctions
from tests.coordinator.in_process import SECONDS, coordinating

SIZE = 1 << 20


def capturing(number):
    data = np.full(SIZE // 8, float(number))
    return lambda: float(data[0])


def kept(loads, count):
    return [number for number in range(count) if loads.find(b"%d" % number) is not None]


def test_least_recently_used_functions_are_evicted_beyond_the_byte_limit():
    loads = LoadedFunctions(max_bytes=100)
    for number in range(4):
        loads.put(b"%d" % number, "f", [b"x" * 10, b"y" * 15])
    assert kept(loads, 4) == [0, 1, 2, 3]
    loads.find(b"0")
    loads.put(b"4", "f", [b"x" * 25])
    assert kept(loads, 5) == [0, 2, 3, 4]
    loads.put(b"4", "f", [b"x" * 25])  # sent twice, counted once
    assert kept(loads, 5) == [0, 2, 3, 4]


def test_one_function_is_kept_however_large_it_is():
    loads = LoadedFunctions(max_bytes=100)
    loads.put(b"0", "f", [b"x" * 1000])
    assert kept(loads, 1) == [0]
    loads.put(b"1", "f", [b"x" * 1000])
    assert kept(loads, 2) == [1]


@pytest.mark.parametrize("threads", [1, 3])
def test_evicted_functions_are_sent_again(monkeypatch, threads):
    monkeypatch.setattr(functions, "_MAX_LOADED_BYTES", SIZE)  # the cache holds one of these
    with coordinating(1, closures_in_flight=4, threads_per_worker=threads) as coordinator:
        made = [capturing(number) for number in range(5)]
        values = [(n, coordinator.schedule(made[n])) for _ in range(6) for n in range(5)]
        assert [value.fetch(SECONDS) for _, value in values] == [float(n) for n, _ in values]

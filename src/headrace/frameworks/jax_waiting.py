"""Waiting for the results of a JAX program over several processes.

Rule 1. An error on one device is raised at once. Other devices of this process may wait for the
        failed one within the program, for as long as a collective may take.
Rule 2. The wait polls its peers: another process may know of a failure that this one cannot see.
Rule 3. No thread waits inside JAX: if it did so when the process ends, it would abort the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax

from headrace.frameworks.framework import Array

__all__ = ["wait_until_ready"]

_CHECK_SECONDS = 0.2
_SHORTEST, _LONGEST = 50e-6, 5e-3
_FRACTION = 16
"""The polling interval is the time waited so far, divided by this."""


def wait_until_ready(arrays: Sequence[Array], check_peers: Callable[[], object]) -> None:
    """Wait until the results of a program are ready.

    Args:
        arrays: Results of one program. All results on a device become ready together, so only the
            first is polled.
        check_peers: Called periodically; an error that it raises ends the wait.

    Raises:
        JaxRuntimeError: If the program failed in this process.
    """
    parts = [shard.data for array in arrays[:1] for shard in array.addressable_shards]
    start = last_check = time.monotonic()
    while not all(part.is_ready() for part in parts):
        for part in parts:
            if part.is_ready():
                part.block_until_ready()
        now = time.monotonic()
        if now - last_check > _CHECK_SECONDS:
            check_peers()
            last_check = now
        time.sleep(min(max((now - start) / _FRACTION, _SHORTEST), _LONGEST))
    jax.block_until_ready(arrays)

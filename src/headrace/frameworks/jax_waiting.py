"""Waiting for what several processes of JAX compute together.

Rule 1. An error on one device is an error at once. The others of this process may be waiting for
        that one, within the program, and would do so for as long as a collective may take.
Rule 2. Who waits looks around now and then: another process may know what this one does not.
Rule 3. No thread waits within JAX: one that did so at the end of the process would abort it.
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
"""Of the time that it took so far, how much later than it is there a result may be seen."""


def wait_until_ready(arrays: Sequence[Array], check_peers: Callable[[], object]) -> None:
    """Wait until results of a program are there.

    Args:
        arrays: The results of one program: each device has all of its own at the same time, so the
            first is looked at.
        check_peers: Called now and then; what it raises ends the wait.

    Raises:
        JaxRuntimeError: The program failed here.
    """
    parts = [shard.data for array in arrays[:1] for shard in array.addressable_shards]
    began = looked = time.monotonic()
    while not all(part.is_ready() for part in parts):
        for part in parts:
            if part.is_ready():
                part.block_until_ready()
        now = time.monotonic()
        if now - looked > _CHECK_SECONDS:
            check_peers()
            looked = now
        time.sleep(min(max((now - began) / _FRACTION, _SHORTEST), _LONGEST))
    jax.block_until_ready(arrays)

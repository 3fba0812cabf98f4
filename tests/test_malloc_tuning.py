"""Tests that the memory of large received messages is reused by the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from headrace.malloc_tuning import MAX_BLOCK_BYTES, keep_freed_memory

_PROGRAM = """
import resource
from headrace.malloc_tuning import MAX_BLOCK_BYTES, keep_freed_memory
keep_freed_memory(MAX_BLOCK_BYTES)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def messages():
    for _ in range(4):
        held = [bytearray(10_000_000) for _ in range(4)]
        del held
messages()
before = faults()
messages()
print(faults() - before)
"""


def test_memory_of_received_messages_is_reused() -> None:
    program = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True
    )
    # Without reuse: 4 x 4 messages of 2,442 pages each.
    assert int(program.stdout) < 1_000


def test_process_with_limited_memory_still_receives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*size: object) -> None:
        raise MemoryError

    keep_freed_memory.cache_clear()
    monkeypatch.setattr(np, "empty", refuse)
    keep_freed_memory(MAX_BLOCK_BYTES)
    assert keep_freed_memory.cache_info().currsize == 1, "it is tried once"
    keep_freed_memory.cache_clear()

"""Large blocks of memory come and go; what is freed stays in the process, for those that follow.

The GNU C library passes what is free at the end of its heap on to the system if that is more than
twice the largest block of which it knows that the process uses such ones again and again, which is
one that was freed, and 128 KiB as long as it knows none (mallopt(3), "dynamic mmap threshold"). The
next block gets its memory from the system again, page by page, which costs more than the arithmetic
on it, or half of what it takes to receive it. So a larger block is freed once; it need not be
written. The library learns of blocks up to 32 MB. Whoever has set MALLOC_TRIM_THRESHOLD_ or
MALLOC_MMAP_THRESHOLD_ has told it to learn nothing.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np

__all__ = ["LARGEST", "WORTH_KEEPING", "keep_freed_memory"]

WORTH_KEEPING = 128 << 10
"""Bytes of the smallest block that the C library gives back at once, as long as it knows none."""
LARGEST = (32 << 20) - (64 << 10)
"""Bytes of the largest block that it learns of."""


@functools.cache
def keep_freed_memory(block: int) -> None:
    """Have the C library keep up to twice `block` bytes of free memory, from now on."""
    # Where a process may not take so much, all goes on as it did.
    with contextlib.suppress(MemoryError):
        np.empty(block, np.uint8)

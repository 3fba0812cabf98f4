"""Tuning of malloc, so that freed large blocks stay in the process for later ones.

The GNU C library returns free memory at the end of its heap to the system if it is more than twice
its dynamic threshold: the size of the largest block freed so far, initially 128 KiB (mallopt(3),
"dynamic mmap threshold"). The next block then gets its memory from the system again, page by page,
which costs more than arithmetic on the block, or half as much as receiving it. So this module frees
a larger block once, which need not be written. The threshold covers blocks up to 32 MB. It is fixed
if MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ is set.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np

__all__ = ["MAX_BLOCK_BYTES", "MIN_BLOCK_BYTES", "keep_freed_memory"]

MIN_BLOCK_BYTES = 128 << 10
"""Initial threshold: size of the smallest block that the C library returns to the system."""
MAX_BLOCK_BYTES = (32 << 20) - (64 << 10)
"""Size of the largest block that raises the threshold."""


@functools.cache
def keep_freed_memory(block: int) -> None:
    """Make the C library keep up to twice `block` bytes of free memory from now on."""
    # If the process cannot allocate that much, the threshold stays unchanged.
    with contextlib.suppress(MemoryError):
        np.empty(block, np.uint8)

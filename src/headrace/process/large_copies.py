"""From which size on a child's copies write past the caches.

A store to memory that is not cached first reads what it overwrites. The GNU C library avoids that
in copies that are large beside the outer cache, from a quarter of it on since version 2.38. But it
asks the processor for the size of the cache, and some virtual machines claim ten times what there
is. So a child that copies much for others is told what the kernel knows. Only the start of a
process can tell it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

__all__ = ["OUTER_CACHE", "large_copies"]

OUTER_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
"""Where the kernel says how large the outer cache is: "32768K"."""
_VARIABLE = "GLIBC_TUNABLES"


def large_copies(variables: Mapping[str, str], cache: Path = OUTER_CACHE) -> dict[str, str]:
    """Return what to add to a child's environment; nothing where the user has tuned the library.

    Args:
        variables: The environment so far.
        cache: Where the size of the outer cache is.
    """
    if _VARIABLE in variables or platform.machine() != "x86_64":
        return {}
    try:
        kibibytes = int(cache.read_text().strip().removesuffix("K"))
    except (OSError, ValueError):
        return {}
    return {_VARIABLE: f"glibc.cpu.x86_non_temporal_threshold={kibibytes * 1024 // 4:#x}"}

"""First values that servers make by themselves: nothing is sent, whatever the size.

They depend on the seed and the place in the variable (or the id in a table) alone, so they are the
same for any number of shards and servers.
"""

from __future__ import annotations

from headrace.parameter_server.specs import Constant, Normal, Uniform, Zeros

__all__ = ["Constant", "Normal", "Uniform", "Zeros"]


def __dir__() -> list[str]:
    return list(__all__)

"""Initial values computed by the servers: nothing is sent, whatever the size.

They depend only on the seed and the position in the variable (or the id in a table), so they are
the same for any number of shards and servers.
"""

from __future__ import annotations

from headrace.parameter_server.specs import Constant, Normal, Uniform, Zeros

__all__ = ["Constant", "Normal", "Uniform", "Zeros"]


def __dir__() -> list[str]:
    return list(__all__)

"""Large tensors of several workers added up by Gloo, straight between them.

The workers find each other through a store whose keys are exchanged by whoever starts this: Gloo's
own store would listen on every interface. Connections are neither encrypted nor checked, so this is
for workers that need no keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.frameworks.framework import Exchange

__all__ = ["GlooAllReduce"]

_KINDS = (torch.float32, torch.float64, torch.int32, torch.int64)


class GlooAllReduce:
    """Adds up tensors of all workers.

    Args:
        rank: Of this worker.
        size: How many there are.
        host: The number of this machine's interface at which it listens.
        timeout: Seconds that an operation may take.
        exchange: Given what this worker has to say, returns what all have to say, by rank. All
            workers call it equally often.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        timeout: float,
        exchange: Exchange,
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout)
        self._store = _Store(exchange)
        self._group = dist.ProcessGroupGloo(self._store, rank, size, options)

    @staticmethod
    def supports(tensor: Any) -> bool:
        """Say whether it can add up such tensors."""
        return tensor.dtype in _KINDS and tensor.device.type == "cpu"

    def all_reduce(self, tensors: Sequence[Any], check_peers: Callable[[], object]) -> list[Any]:
        """Return the sums over all workers, the same on all, in fresh memory.

        Args:
            tensors: Of this worker.
            check_peers: Is not called: nobody can leave a wait of Gloo's.

        Raises:
            RuntimeError: A worker is gone, or does not take part in time.
        """
        totals = [each.detach().clone(memory_format=torch.contiguous_format) for each in tensors]
        for total in totals:
            self._group.allreduce([total]).wait()
        return totals


class _Store(dist.Store):  # type: ignore[misc]
    """Keys that each worker sets for itself; those of others come when one is asked for."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._own_entries: dict[str, str] = {}
        self._entries: dict[str, str] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        data = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        self._own_entries[key] = self._entries[key] = data.hex()

    def get(self, key: str) -> bytes:
        """Return what a worker has set a key to; it waits for all workers."""
        while key not in self._entries:
            for each in self._exchange(self._own_entries):
                self._entries.update(each)
        return bytes.fromhex(self._entries[key])

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            self.get(key)

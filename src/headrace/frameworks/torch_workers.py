"""Sums of large tensors over several workers with Gloo, directly between the workers.

The workers find each other through a key-value store whose contents the caller exchanges: Gloo's
own store would listen on every interface. Connections are neither encrypted nor authenticated, so
this is only for clusters without keys.
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
    """Sums tensors over all workers.

    Args:
        rank: Rank of this worker.
        size: Number of workers.
        host: IP address of the interface to listen on.
        timeout: Maximum seconds of an operation.
        exchange: Sends this worker's key-value pairs and returns those of all workers, by rank. All
            workers call it the same number of times.
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
        """Return whether `all_reduce` supports the tensor."""
        return tensor.dtype in _KINDS and tensor.device.type == "cpu"

    def all_reduce(self, tensors: Sequence[Any], check_peers: Callable[[], object]) -> list[Any]:
        """Return the sums over all workers, equal on all, in new memory.

        Args:
            tensors: Tensors of this worker.
            check_peers: Not called, because a wait in Gloo cannot be interrupted.

        Raises:
            RuntimeError: If a worker was lost, or did not take part in time.
        """
        totals = [each.detach().clone(memory_format=torch.contiguous_format) for each in tensors]
        for total in totals:
            self._group.allreduce([total]).wait()
        return totals


class _Store(dist.Store):  # type: ignore[misc]
    """A key-value store: each worker sets its own keys, and gets those of others by exchange."""

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
        """Return the value of a key that any worker sets, waiting for all workers."""
        while key not in self._entries:
            for each in self._exchange(self._own_entries):
                self._entries.update(each)
        return bytes.fromhex(self._entries[key])

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            self.get(key)

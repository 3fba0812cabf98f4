"""Adds and removes the workers of a data service as its dispatcher asks for."""

from __future__ import annotations

from typing import Protocol

__all__ = ["WorkerLauncher"]


class WorkerLauncher(Protocol):
    """Starts and stops workers on some cluster: local processes, Ray actors, Slurm tasks."""

    def num_workers(self) -> int:
        """Return the number of workers that run or start, without those that drain."""

    def start_workers(self, count: int) -> None:
        """Start workers; does not wait until they have registered."""

    def stop_workers(self, count: int) -> None:
        """Drain workers, which stop when all that they computed is delivered; does not wait."""

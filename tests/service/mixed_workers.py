"""Workers of one service; some count as workers of other processes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import headrace as hr
from headrace.service import DispatchServer, ShardingPolicy, WorkerConfig, distribute
from headrace.service import WorkerServer as Worker
from headrace.transport import inprocess
from tests.service.reading import numbers

__all__ = ["Site"]


class Site:
    """Workers; some count as workers of other processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
        self.dispatcher = stack.enter_context(DispatchServer())
        self._stack, self._remote = stack, set[str]()
        #: Those that count as this process's.
        self.local: list[Worker] = []
        is_here = inprocess.is_in_process
        monkeypatch.setattr(
            inprocess,
            "is_in_process",
            lambda address: is_here(address) and address not in self._remote,
        )

    def add(self, count: int, *tags: str, remote: bool = False) -> None:
        for _ in range(count):
            config = WorkerConfig(self.dispatcher.target.partition("://")[2], worker_tags=tags)
            worker = self._stack.enter_context(Worker(config))
            if remote:
                self._remote.add(worker.address)
            else:
                self.local.append(worker)

    def over(self, dataset: hr.Dataset, target: str = "AUTO", **options: Any) -> hr.Dataset:
        """Return a dataset that is read through this service."""
        mode = options.pop("mode", ShardingPolicy.OFF)
        return dataset.apply(
            distribute(mode, self.dispatcher.target, target_workers=target, **options)
        )

    def read(
        self, mode: ShardingPolicy = ShardingPolicy.OFF, size: int = 100, target: str = "AUTO"
    ) -> list[int]:
        return numbers(self.over(hr.Dataset.range(size), target, mode=mode))

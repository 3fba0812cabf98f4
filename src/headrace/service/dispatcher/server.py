"""The dispatcher's shell: a port and a thread that looks after the time."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.core import JournaledCore
from headrace.service.dispatcher.journal import Journal, MemoryJournal, SqliteJournal
from headrace.service.dispatcher.limits import Limits
from headrace.transport import zeromq
from headrace.transport.channel import Server

__all__ = ["DispatchServer"]


class DispatchServer:
    """Coordinates the workers and clients of a data service.

    Args:
        config: Where to listen, what to keep; None for a free port of 127.0.0.1 and nothing kept.
        start: Start now; else `start()` does.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True) -> None:
        self._config = config or DispatcherConfig()
        self._core: JournaledCore | None = None
        self._server: Server | None = None
        self._maintenance: threading.Thread | None = None
        self._stopping = False
        self._stopped = threading.Event()
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Where it listens, as "tcp://host:port".

        Raises:
            RuntimeError: The server was not started.
        """
        if self._server is None:
            raise RuntimeError("the server has no target before it is started")
        return f"tcp://{self._server.address}"

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        return 0 if self._core is None else self._core.num_workers()

    def start(self) -> None:
        """Read the journal and listen. Does nothing when it was started before.

        Raises:
            RuntimeError: The server was stopped.
            OSError: The port is in use.
            FailedPreconditionError: Another dispatcher uses the work directory.
            DataLossError: The journal is damaged.
        """
        if self._stopping:
            raise RuntimeError("Server cannot be started after it has been stopped")
        if self._server is not None:
            return
        config = self._config
        journal: Journal
        if config.fault_tolerant_mode and config.work_dir is not None:
            journal = SqliteJournal(Path(config.work_dir))
        else:
            journal = MemoryJournal()
        # The threads hold the core and not the server, so that a server that is dropped without
        # `stop` is collected, and stops.
        try:
            core = JournaledCore(journal, Limits.of(config))
            self._server = zeromq.serve(
                core.handle,
                request_type=messages.DispatcherRequest,
                host=config.host,
                port=config.port,
                security=config.security,
            )
        except BaseException:
            journal.close()
            raise
        self._core = core
        self._maintenance = threading.Thread(
            target=core.maintain, name="headrace-dispatcher-maintenance", daemon=True
        )
        self._maintenance.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the server is stopped, or `timeout` seconds have passed."""
        self._stopped.wait(timeout)

    def stop(self) -> None:
        """Stop listening; what was answered is kept. May be called twice."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        if self._core is not None:
            self._core.close()
        if self._maintenance is not None:
            self._maintenance.join()
        self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __del__(self) -> None:
        # The constructor may have failed before anything was there to stop.
        if getattr(self, "_server", None) is not None and not self._stopped.is_set():
            self.stop()

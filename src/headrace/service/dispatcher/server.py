"""The dispatcher's shell: a port and a thread that looks after the time."""

from __future__ import annotations

import threading

from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.core import DispatcherCore
from headrace.service.dispatcher.journal import open_journal
from headrace.service.dispatcher.limits import Limits
from headrace.service.dispatcher.publisher import Publisher, ask_core
from headrace.service.dispatcher.roles import let_in
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import zeromq

__all__ = ["DispatchServer"]


class DispatchServer(LifeCycle):
    """Coordinates the workers and clients of a data service.

    Args:
        config: Where to listen, what to keep; None for a free port of 127.0.0.1 and nothing kept.
        start: Start now; else `start()` does.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True) -> None:
        super().__init__()
        self._config = config or DispatcherConfig()
        self._core: DispatcherCore | None = None
        self._address: str | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Where it listens, as "tcp://host:port".

        Raises:
            RuntimeError: The server was not started.
        """
        if self._address is None:
            raise RuntimeError("the server has no target before it is started")
        return f"tcp://{self._address}"

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        return 0 if self._core is None else self._core.num_workers()

    def start(self) -> None:
        """Read the journal and listen. Does nothing when it was started before.

        Raises:
            RuntimeError: The server was stopped, or could not be started before.
            OSError: The port is in use.
            FailedPreconditionError: Another dispatcher uses the work directory.
            DataLossError: The journal is damaged.
        """
        super().start()

    def _open(self) -> None:
        config = self._config
        limits = Limits.of(config)
        journal = open_journal(config)
        self._keep(journal.close)
        publisher = Publisher(lambda question: ask_core(core.handle, question))
        core = DispatcherCore(
            journal,
            limits,
            worker_addresses=config.worker_addresses or (),
            heard=publisher.heard,
        )
        maintenance = threading.Thread(
            target=core.maintain,
            args=(limits.tick_interval,),
            name="headrace-dispatcher-maintenance",
            daemon=True,
        )
        maintenance.start()

        def end() -> None:
            core.close()
            if threading.current_thread() is not maintenance:
                maintenance.join()

        self._keep(end)
        if config.fault_tolerant_mode:
            publisher.start()
            self._keep(publisher.close)
        server = zeromq.serve(
            lambda requests: core.handle(let_in(requests)),
            request_type=messages.DispatcherRequest,
            host=config.host,
            port=config.port,
            security=config.security,
        )
        self._keep(server.close)
        self._core, self._address = core, server.address

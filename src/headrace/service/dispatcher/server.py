"""The dispatcher's server: a port and a maintenance thread around the core."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.authorization import filter_authorized
from headrace.service.dispatcher.core import DispatcherCore, open_journal
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.metrics import collect_metrics
from headrace.service.dispatcher.worker_connections import WorkerConnections
from headrace.service.modes.distributed_save.publisher import SavePublisher, call_core
from headrace.serving.endpoint import Endpoint
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import zeromq
from headrace.transport.channel import Request, TransportServer

__all__ = ["DispatchServer"]


class DispatchServer(LifeCycle):
    """Coordinates the workers and clients of a data service.

    >>> with hr.service.DispatchServer() as dispatcher:
    ...     dispatcher.num_workers()
    0

    Args:
        config: Address, journal and timeouts; None for a free port of 127.0.0.1 without a journal.
        start: Whether to start the server now; otherwise call `start()`.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True) -> None:
        super().__init__()
        self._config = config or DispatcherConfig()
        self._core: DispatcherCore | None = None
        self._address: str | None = None
        self._metrics_address = ""
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Address at which it listens, as "tcp://host:port".

        Raises:
            RuntimeError: If the server was not started.
        """
        if self._address is None:
            raise RuntimeError(
                "`target` is not available before the server is started: call `start()`"
            )
        return f"tcp://{self._address}"

    @property
    def metrics_address(self) -> str:
        """Address of `/metrics`, as "host:port"; empty if `metrics_port` is None."""
        return self._metrics_address

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        return 0 if self._core is None else self._core.num_workers()

    def stats(self) -> messages.DispatcherStatus:
        """Return the status of the service as plain records, which can be encoded as JSON.

        `headrace status --json` prints the same, and `headrace top` displays it.

        Raises:
            RuntimeError: If the server was not started.
            UnavailableError: If the journal cannot be used.
        """
        if self._core is None:
            raise RuntimeError(
                "`stats` is not available before the server is started: call `start()`"
            )
        return self._core.describe()

    def __repr__(self) -> str:
        if self._address is None:
            return "<DispatchServer, not started>"
        status = ", stopped" if self.is_stopped else f", {self.num_workers()} workers"
        return f"<DispatchServer at {self.target}{status}>"

    def start(self) -> None:
        """Read the journal and listen. Does nothing if the server is already running.

        Raises:
            RuntimeError: If the server was stopped, or failed to start before.
            OSError: If the port is in use.
            FailedPreconditionError: If another dispatcher uses the work directory.
            DataLossError: If the journal is damaged.
        """
        super().start()

    def _open(self) -> None:
        config = self._config
        # Before the journal's files are created.
        zeromq.check_server(config.host, config.port, config.security)
        limits = DispatcherLimits.from_config(config)
        # Contains the core once it has read its journal and listens.
        ready: list[DispatcherCore] = []
        if config.metrics_port is not None:
            endpoint = Endpoint(
                config.metrics_host,
                config.metrics_port,
                metrics=lambda: _metrics(ready),
                not_ready_reason=lambda: "" if ready else "reading the journal",
            )
            self._on_stop(endpoint.close)
            self._metrics_address = endpoint.address
        journal = open_journal(config)
        self._on_stop(journal.close)
        publisher = SavePublisher(lambda request: call_core(core.handle, request))
        servers: list[TransportServer] = []
        connections = WorkerConnections()
        core = DispatcherCore(
            journal,
            limits,
            worker_addresses=config.worker_addresses or (),
            on_durable=publisher.observe,
            count_refused_connections=lambda: sum(each.num_refused for each in servers),
            connections=connections,
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

        self._on_stop(end)
        if config.fault_tolerant_mode:
            publisher.start()
            self._on_stop(publisher.close)

        def handle(requests: Sequence[Request]) -> None:
            allowed = filter_authorized(requests)
            connections.record_requests(allowed)
            core.handle(allowed)

        server = zeromq.serve(
            handle,
            request_type=messages.DispatcherRequest,
            host=config.host,
            port=config.port,
            security=config.security,
            limits=limits.server_limits,
        )
        connections.attach(server)
        self._on_stop(server.close)
        servers.append(server)
        ready.append(core)
        self._core, self._address = core, server.address


def _metrics(cores: Sequence[DispatcherCore]) -> Iterator[Metric]:
    for each in cores:
        yield from collect_metrics(each.describe())

"""Server and lifecycle of a data worker. Its behaviour is in `runner` and `core`.

start       listens, registers and sends heartbeats
drain       announces the shutdown, delivers buffered output, then stops
stop        returns undelivered splits, unregisters, and closes everything
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace.errors import UnavailableError
from headrace.service.config import WorkerConfig, default_cache_bytes
from headrace.service.messages import DispatcherReply, WorkerRequest
from headrace.service.worker.core import DataWorkerCore
from headrace.service.worker.delivery_policy import BufferLimits
from headrace.service.worker.local_workers import new_worker_id
from headrace.service.worker.preloading import preload
from headrace.service.worker.processor_use import measure_processor_use
from headrace.service.worker.prometheus_metrics import collect_metrics
from headrace.service.worker.runner import DataWorkerRunner
from headrace.serving.endpoint import Endpoint
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import address as addresses
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Channel, Request
from headrace.waiting import random_chance

__all__ = ["DRAIN_SECONDS", "WorkerServer"]

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 25.0
"""Default number of seconds that a draining worker has to deliver its output."""

_DISPATCHER_SECONDS = 3600.0
_NOT_REGISTERED = "the worker is not registered with the dispatcher"


class WorkerServer(LifeCycle):
    """Runs tasks for the clients of a data service.

    `stop` returns undelivered splits to the dispatcher. It takes at most a second: a user function
    that does not return is abandoned.

    >>> with hr.service.DispatchServer() as dispatcher:
    ...     address = dispatcher.target.removeprefix("tcp://")
    ...     with hr.service.WorkerServer(hr.service.WorkerConfig(address)):
    ...         distribute = hr.service.distribute("parallel_epochs", dispatcher.target)
    ...         [int(x) for x in hr.Dataset.range(3).apply(distribute)]
    [0, 1, 2]

    Args:
        config: Address of the dispatcher, address to listen at, and other settings.
        start: Whether to start now; otherwise call `start()`.

    Raises:
        ValueError: If `config` has no dispatcher address.
        ImportError: If a module of `config.preload` does not exist.
        UnavailableError: If the dispatcher did not reply within `config.dispatcher_timeout_ms`.
    """

    def __init__(self, config: WorkerConfig, start: bool = True) -> None:
        super().__init__()
        if config is None or not config.dispatcher_address:
            raise ValueError(
                "Must specify a `dispatcher_address` in the `config` passed to `WorkerServer`"
            )
        self._config = config
        self._address = ""
        self._metrics_address = ""
        self._runner = DataWorkerRunner(_dispatcher_connector(config), config.hang_timeout)
        if start:
            self.start()

    @property
    def address(self) -> str:
        """Address at which clients reach the worker, as "host:port"; empty before `start`."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """Address of `/metrics`, as "host:port"; empty if `metrics_port` is None."""
        return self._metrics_address

    def num_tasks(self) -> int:
        """Return the number of tasks that are not finished."""
        return self._runner.num_tasks

    def __repr__(self) -> str:
        if not self._address:
            return "<WorkerServer, not started>"
        status = "stopped" if self.is_stopped else f"dispatcher {self._config.dispatcher_address}"
        return f"<WorkerServer at {self._address}, {status}>"

    def drain(self, timeout: float | None = None) -> None:
        """Deliver buffered output, then stop.

        The worker accepts no new tasks and no new splits. Tasks with assigned splits finish those;
        tasks that read a whole dataset end where they are. Undelivered splits are returned to the
        dispatcher if possible, and a warning reports how much was not delivered. A call of `stop`
        by another thread ends the wait.

        Args:
            timeout: Seconds for the delivery; None for `DRAIN_SECONDS`.
        """
        self._runner.drain(DRAIN_SECONDS if timeout is None else timeout)
        self.stop()

    def _open(self) -> None:
        config, runner = self._config, self._runner
        for module in config.preload:
            preload(module)
        if config.metrics_port is not None:
            endpoint = Endpoint(
                config.metrics_host,
                config.metrics_port,
                metrics=lambda: collect_metrics(
                    runner.totals(), tasks=runner.num_tasks, is_registered=runner.is_registered
                ),
                not_ready_reason=lambda: "" if runner.is_registered else _NOT_REGISTERED,
            )
            self._on_stop(endpoint.close)
            self._metrics_address = endpoint.address
        server = zeromq.serve(
            runner.handle,
            request_type=WorkerRequest,
            host=config.host,
            port=config.port,
            security=config.security,
        )
        self._on_stop(server.close)
        _, port = addresses.split(server.address)
        self._address = _advertised_address(config, server.address).replace("%port%", str(port))
        # Clients in this process ask for the address that the dispatcher knows.
        name, number = addresses.split(self._address)
        local_server = inprocess.serve(
            runner.handle, request_type=WorkerRequest, host=name, port=number
        )
        self._on_stop(local_server.close)
        # Closed before the servers, because later replies would not arrive.
        self._on_stop(runner.close)
        runner.open(_create_core(self._address, config, runner))
        runner.register()


def _advertised_address(config: WorkerConfig, address: str) -> str:
    """Return the address at which clients reach the worker.

    Raises:
        UnavailableError: If the worker listens at all addresses of this machine, and the one that
            other machines reach cannot be determined now.
    """
    if config.worker_address is not None or not addresses.is_wildcard(config.host):
        return config.worker_address or address
    dispatcher = config.dispatcher_address
    advice = 'set `worker_address` (--worker-address), for example "myhost:%port%"'
    try:
        host = addresses.local_address_for(dispatcher)
    except UnavailableError as error:
        raise UnavailableError(
            f"host={config.host!r} listens on all interfaces, and the address at which clients "
            f"reach the worker could not be determined: {error}. Try again, or {advice}"
        ) from error
    if addresses.is_loopback(host):
        _log.warning(
            "advertising worker address %s, because dispatcher %s is on this machine; clients on "
            "other machines cannot reach it: for them, %s",
            host,
            dispatcher,
            advice,
        )
    else:
        _log.warning(
            "advertising worker address %s, the local address of connections to dispatcher %s; if "
            "clients need another address, %s",
            host,
            dispatcher,
            advice,
        )
    return addresses.join(host, addresses.split(address)[1])


def _create_core(
    address: str, config: WorkerConfig, runner: DataWorkerRunner
) -> DataWorkerCore[Request]:
    interval_ms, timeout_ms = config.heartbeat_interval_ms, config.dispatcher_timeout_ms
    return DataWorkerCore(
        address,
        config.dispatcher_address or "",
        time.monotonic(),
        new_id=new_worker_id,
        random=random_chance,
        tags=tuple(config.worker_tags or ()),
        heartbeat_interval=None if interval_ms is None else max(1, interval_ms) / 1000,
        dispatcher_timeout=_DISPATCHER_SECONDS if timeout_ms is None else max(1, timeout_ms) / 1000,
        limits=BufferLimits(
            window_bytes=config.cross_trainer_cache_size_bytes or default_cache_bytes()
        ),
        take_activity=runner.take_changes,
        measure_processor_use=measure_processor_use,
    )


def _dispatcher_connector(config: WorkerConfig) -> Callable[[], Channel]:
    keys = config.security
    return lambda: zeromq.connect(
        config.dispatcher_address or "",
        reply_type=DispatcherReply,
        security=None if keys is None else keys.as_client(),
        shared_memory=False,
    )

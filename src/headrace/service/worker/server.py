"""The worker: where it listens, and its life. What it does, `shell.py` and `session.py` say.

start       listen, register; from then on a heartbeat
drain       say that the worker is leaving, deliver what there is, then stop
stop        hand back what was not delivered, say that the worker left, close everything
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace.errors import UnavailableError
from headrace.service.config import WorkerConfig, default_cache_bytes
from headrace.service.messages import DispatcherReply, WorkerRequest
from headrace.service.worker.gauges import metrics_of
from headrace.service.worker.hand_out import Bounds
from headrace.service.worker.here import new_worker_id
from headrace.service.worker.preloading import preload
from headrace.service.worker.session import Session
from headrace.service.worker.shell import Shell
from headrace.serving.endpoint import Endpoint
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import address as addresses
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Channel, Request
from headrace.waiting import random_chance

__all__ = ["DRAIN_SECONDS", "WorkerServer"]

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 25.0
"""How long a worker that leaves delivers what it has, unless it is given another time."""

_DISPATCHER_SECONDS = 3600.0
_NOT_REGISTERED = "the dispatcher does not know this worker, or not yet"


class WorkerServer(LifeCycle):
    """Runs tasks for the clients of a data service.

    `stop` hands back what was not delivered. It takes a second at most: a function of the user's
    that does not return is left to itself.

    >>> with hr.service.DispatchServer() as dispatcher:
    ...     address = dispatcher.target.removeprefix("tcp://")
    ...     with hr.service.WorkerServer(hr.service.WorkerConfig(address)):
    ...         distribute = hr.service.distribute("parallel_epochs", dispatcher.target)
    ...         [int(x) for x in hr.Dataset.range(3).apply(distribute)]
    [0, 1, 2]

    Args:
        config: Whose dispatcher, and where to listen.
        start: Start now; else `start()` does.

    Raises:
        ValueError: `config` names no dispatcher.
        ImportError: A module of `config.preload` is not there.
        UnavailableError: The dispatcher did not answer in `config.dispatcher_timeout_ms`.
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
        self._shell = Shell(_dialler(config), config.hang_timeout)
        if start:
            self.start()

    @property
    def address(self) -> str:
        """Where clients reach it, as "host:port"; empty before `start`."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """Where `/metrics` is, as "host:port"; empty where `metrics_port` is None."""
        return self._metrics_address

    def num_tasks(self) -> int:
        """Return the number of tasks that are not finished."""
        return self._shell.num_tasks

    def drain(self, timeout: float | None = None) -> None:
        """Deliver what there is, then stop.

        The worker takes no new tasks and no new units. Tasks with dealt units run out; copies of a
        whole dataset end where they are. What was not delivered in time is handed back to the
        dispatcher where that is possible, and a warning says how much was not. `stop`, from another
        thread, ends the wait.

        Args:
            timeout: Seconds to deliver in; None: `DRAIN_SECONDS`.
        """
        self._shell.drain(DRAIN_SECONDS if timeout is None else timeout)
        self.stop()

    def _open(self) -> None:
        config, shell = self._config, self._shell
        for module in config.preload:
            preload(module)
        if config.metrics_port is not None:
            endpoint = Endpoint(
                config.metrics_host,
                config.metrics_port,
                metrics=lambda: metrics_of(
                    shell.totals(), tasks=shell.num_tasks, is_registered=shell.is_registered
                ),
                why_not_ready=lambda: "" if shell.is_registered else _NOT_REGISTERED,
            )
            self._keep(endpoint.close)
            self._metrics_address = endpoint.address
        server = zeromq.serve(
            shell.handle,
            request_type=WorkerRequest,
            host=config.host,
            port=config.port,
            security=config.security,
        )
        self._keep(server.close)
        _, port = addresses.split(server.address)
        self._address = _advertised(config, server.address).replace("%port%", str(port))
        # Clients of this process ask for the address that the dispatcher names.
        name, number = addresses.split(self._address)
        local = inprocess.serve(shell.handle, request_type=WorkerRequest, host=name, port=number)
        self._keep(local.close)
        # Closed before the servers are: what is handed out after that does not arrive.
        self._keep(shell.close)
        shell.open(_session(self._address, config, shell))
        shell.register()


def _advertised(config: WorkerConfig, address: str) -> str:
    """Return where clients are told to look for the worker.

    Raises:
        UnavailableError: It listens at every address of this machine, and which of these others
            reach cannot be found out now.
    """
    if config.worker_address is not None or not addresses.is_wildcard(config.host):
        return config.worker_address or address
    dispatcher = config.dispatcher_address
    advice = 'set `worker_address` (--worker-address), as in "myhost:%port%"'
    try:
        host = addresses.local_address_for(dispatcher)
    except UnavailableError as error:
        raise UnavailableError(
            f"the worker listens at {config.host}, which is no address that clients could call, "
            f"and which of this machine's they can is not known: {error}. Try again, or {advice}"
        ) from error
    if addresses.is_loopback(host):
        _log.warning(
            "clients are told to look for this worker at %s, since its dispatcher at %s is on this "
            "machine: those on other machines do not find it there; for them, %s",
            host,
            dispatcher,
            advice,
        )
    else:
        _log.warning(
            "clients are told to look for this worker at %s, the address of this machine by which "
            "it reaches the dispatcher at %s; if they need another, %s",
            host,
            dispatcher,
            advice,
        )
    return addresses.join(host, addresses.split(address)[1])


def _session(address: str, config: WorkerConfig, shell: Shell) -> Session[Request]:
    wished, patience = config.heartbeat_interval_ms, config.dispatcher_timeout_ms
    return Session(
        address,
        config.dispatcher_address or "",
        time.monotonic(),
        new_id=new_worker_id,
        chance=random_chance,
        tags=tuple(config.worker_tags or ()),
        heartbeat_interval=None if wished is None else max(1, wished) / 1000,
        patience=_DISPATCHER_SECONDS if patience is None else max(1, patience) / 1000,
        bounds=Bounds(window_bytes=config.cross_trainer_cache_size_bytes or default_cache_bytes()),
        activity=shell.changes,
    )


def _dialler(config: WorkerConfig) -> Callable[[], Channel]:
    keys = config.security
    return lambda: zeromq.connect(
        config.dispatcher_address or "",
        reply_type=DispatcherReply,
        security=None if keys is None else keys.as_client(),
        shared_memory=False,
    )

"""Configuration of the service: frozen records, sharding policies and addresses.

All values are validated on construction, so that an invalid value is reported where it is written
and not by a server that starts later.
"""

from __future__ import annotations

import difflib
import enum
import logging
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from headrace.argument_names import explain_unknown_arguments
from headrace.arguments import (
    check_flag,
    check_int,
    check_metrics,
    check_path,
    check_string,
    check_strings,
)
from headrace.errors import InvalidArgumentError
from headrace.transport import address as addresses
from headrace.transport.security import Security, check_security

__all__ = [
    "CrossTrainerCache",
    "DispatcherConfig",
    "ShardingPolicy",
    "WorkerConfig",
    "check_reachable",
    "default_cache_bytes",
    "parse_processing_mode",
    "parse_service",
]

_log = logging.getLogger(__name__)

PROTOCOL = "tcp"
"""Protocol of calls to the dispatcher, written before "://" in a service string."""
_ALIAS = "grpc"
"""Protocol name used by programs for tf.data service."""
_HANG_MS = 600_000
_CACHE_BYTES = 10 << 30

TransferProtocol: TypeAlias = Literal["shm", "tcp", "local"]
TRANSFER_PROTOCOLS: tuple[str, ...] = get_args(TransferProtocol)
Remainder: TypeAlias = Literal["drop", "pad", "end_together"]
REMAINDERS: tuple[str, ...] = get_args(Remainder)
"""Values of `remainder`."""
TargetWorkers: TypeAlias = Literal["AUTO", "ANY", "LOCAL"]
TARGET_WORKERS: tuple[str, ...] = get_args(TargetWorkers)
Visitation: TypeAlias = Literal["exactly_once", "at_most_once", "at_least_once"]
"""Delivery guarantees when workers or clients are lost."""
DataLossAction: TypeAlias = Literal["error", "warn"]
DeploymentMode: TypeAlias = Literal["COLOCATED", "REMOTE"]
"""Locations of the workers relative to the clients that read them."""
DEPLOYMENT_MODES: tuple[str | None, ...] = (None, *get_args(DeploymentMode))


class _ListsMembers(enum.EnumMeta):
    """Metaclass of enumerations that list their members in the error for an unknown name."""

    if not TYPE_CHECKING:  # otherwise type checkers would accept every name

        def __getattr__(cls, name: str) -> Any:
            members = cls.__dict__.get("_member_map_", {})
            if name in members:
                return members[name]
            message = f"{cls.__name__} has no member {name!r}"
            if not name.startswith("_"):
                similar = difflib.get_close_matches(name.upper(), members, n=1)
                message += f"; its members are {', '.join(members)}"
                message += f". Did you mean {similar[0]!r}?" if similar else ""
            raise AttributeError(message, name=name, obj=cls)


class ShardingPolicy(enum.IntEnum, metaclass=_ListsMembers):
    """How the workers share a dataset.

    >>> with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
    ...     distribute = hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target)
    ...     numbers = sorted(int(x) for x in hr.Dataset.range(5).apply(distribute))
    >>> numbers  # with OFF, each of the two workers gives all five
    [0, 1, 2, 3, 4]
    """

    OFF = 0
    """Each worker produces the whole dataset."""
    DYNAMIC = 1
    """Splits are assigned to workers on request: each element is produced once."""
    FILE = 2
    """Each worker produces its shard of the files."""
    DATA = 3
    """Each worker produces its shard of the elements."""
    FILE_OR_DATA = 4
    """FILE if the dataset reads files, otherwise DATA."""
    HINT = 5
    """`shard(SHARD_HINT, ...)` in the dataset becomes the worker's own shard."""


STATIC_POLICIES = (
    ShardingPolicy.FILE,
    ShardingPolicy.DATA,
    ShardingPolicy.FILE_OR_DATA,
    ShardingPolicy.HINT,
)
"""Policies that divide a dataset among the workers of `DispatcherConfig.worker_addresses`."""

ProcessingMode: TypeAlias = ShardingPolicy | Literal["parallel_epochs", "distributed_epoch"]
_MODE_NAMES = {
    "parallel_epochs": ShardingPolicy.OFF,
    "distributed_epoch": ShardingPolicy.DYNAMIC,
}


def parse_processing_mode(value: object) -> ShardingPolicy:
    """Return the sharding policy of a processing mode.

    Args:
        value: A member of `ShardingPolicy`, "parallel_epochs" (OFF) or "distributed_epoch"
            (DYNAMIC). Plain numbers are rejected, because they are hard to read.

    Raises:
        ValueError: If it is anything else.
    """
    if isinstance(value, ShardingPolicy):
        return value
    if isinstance(value, str) and value in _MODE_NAMES:
        return _MODE_NAMES[value]
    hint = ""
    if isinstance(value, str) and value.upper() in ShardingPolicy.__members__:
        hint = f" Did you mean ShardingPolicy.{value.upper()}?"
    raise ValueError(
        "processing_mode should be a `headrace.service.ShardingPolicy`, "
        f'"parallel_epochs", or "distributed_epoch". Got {value!r}.{hint}'
    )


def parse_service(service: object) -> str:
    """Return the dispatcher's address, "host:port".

    Args:
        service: "tcp://host:port", "host:port", or the tuple ("tcp", "host:port"); "grpc" means
            "tcp".

    Raises:
        ValueError: If it has a different form.
    """
    if isinstance(service, tuple):
        if len(service) != 2 or not all(isinstance(part, str) for part in service):
            raise ValueError(
                "`service` as a tuple must be (protocol, address), two strings as in "
                f'("tcp", "127.0.0.1:5050"); got {service!r}'
            )
        protocol, address = str(service[0]), str(service[1])
    elif isinstance(service, str):
        if service.count("://") > 1:
            raise ValueError(f"Malformed `service` string has multiple '://': {service}")
        protocol, separator, address = service.partition("://")
        if not separator:
            protocol, address = PROTOCOL, service
    else:
        raise ValueError(
            f"`service` must be a string, but `service` was of type {type(service)}. "
            f"service={service!r}"
        )
    if not service or not address:
        raise ValueError("`service` must not be empty")
    if protocol == _ALIAS:
        _warn_of_alias()
    elif protocol != PROTOCOL:
        raise ValueError(
            f"`service` must have the protocol {PROTOCOL!r}, as in "
            f'"{PROTOCOL}://127.0.0.1:5050", got {protocol!r} in service={service!r}'
        )
    try:
        addresses.split(address)
    except ValueError as error:
        raise ValueError(
            f'`service` must be "host:port" or "tcp://host:port", got {service!r}: {error}'
        ) from None
    return address


@lru_cache(maxsize=1)
def _warn_of_alias() -> None:
    """Log, once per process, that gRPC is not supported."""
    _log.warning(
        '`service` has the protocol "grpc", which is treated as "tcp": Headrace does not support '
        'gRPC. Use "tcp://host:port" or "host:port"'
    )


def check_reachable(address: str) -> None:
    """Reject an address at which no client could reach a worker.

    Raises:
        ValueError: If it is not "host:port", or the host stands for all addresses of its machine.
    """
    host, _ = addresses.split(address)
    if not host.isprintable() or any(character.isspace() for character in host):
        raise ValueError(f"address={address!r}: {host!r} is not a valid host name")
    if addresses.is_wildcard(host):
        raise ValueError(
            f"address={address!r}: {host} is the wildcard address, at which each client would look "
            "for the worker on its own machine. Set `worker_address` (--worker-address) to the "
            'host name that clients connect to, as in "myhost:%port%"; "%port%" is replaced by the '
            "worker's port"
        )


@dataclass(frozen=True)
class CrossTrainerCache:
    """Identifies the trainer of a client, if several trainers share the workers' elements.

    Each worker produces an element once and keeps it in a window of
    `WorkerConfig.cross_trainer_cache_size_bytes`; each trainer reads all elements, at its own pace.
    Clients with the same trainer ID share its elements.

    >>> def read(target, trainer):
    ...     cache = hr.service.CrossTrainerCache(trainer)
    ...     distribute = hr.service.distribute(
    ...         "parallel_epochs", target, job_name="shared", cross_trainer_cache=cache
    ...     )
    ...     return [int(x) for x in hr.Dataset.counter().apply(distribute).take(3)]
    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     read(cluster.target, "trainer 1"), read(cluster.target, "trainer 2")
    ([0, 1, 2], [0, 1, 2])

    Attributes:
        trainer_id: ID of the trainer, different for each.

    Raises:
        InvalidArgumentError: If it is empty.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not self.trainer_id:
            raise InvalidArgumentError(
                "The cross-trainer cache requires a non-empty trainer ID. Got "
                f"trainer_id={self.trainer_id!r}"
            )
        check_string("trainer_id", self.trainer_id, empty=False)


@explain_unknown_arguments
@dataclass(frozen=True)
class DispatcherConfig:
    """Configuration of a dispatcher.

    >>> config = hr.service.DispatcherConfig(work_dir="journal", fault_tolerant_mode=True)
    >>> with hr.service.DispatchServer(config) as dispatcher:
    ...     dispatcher.target.startswith("tcp://127.0.0.1:")
    True

    Attributes:
        port: Port to listen at; 0 for any free port.
        host: Address to listen at; the default accepts connections from this machine only.
        work_dir: Directory of the journal.
        fault_tolerant_mode: Whether all events are journaled in `work_dir`, so that a dispatcher
            restarted there continues from that state.
        worker_addresses: The fixed workers of the static sharding policies, in shard order:
            "host:port", or "host" or "host:%port%" for any port of a host. Other workers are
            rejected. None accepts any worker and disables the static policies.
        job_gc_check_interval_ms: Milliseconds between garbage collections; None for 1 s.
        job_gc_timeout_ms: Milliseconds to keep an iteration without clients; None for 5 minutes, -1
            for no limit.
        worker_timeout_ms: Milliseconds without a heartbeat after which a worker is lost; None for
            10 s.
        worker_max_concurrent_snapshots: Maximum number of `distributed_save`s that one worker
            writes at a time; 0 for 3.
        security: Keys of this server and of its clients; None for an open server on loopback.
        client_timeout_ms: Milliseconds without a heartbeat after which a client expires; None for 5
            minutes.
        gc_dynamic_sharding_jobs: Whether `job_gc_timeout_ms` applies to named DYNAMIC jobs as well;
            splits of a collected iteration are assigned again, so elements may be delivered twice.
        max_plan_bytes: Maximum total size of the plans of all datasets, including arrays in them;
            None for 4 GiB. If another plan would exceed it, the least recently used plans are
            removed; if all are in use, the new one is rejected.
        deployment_mode: Location of the workers of static policies that a client with
            `target_workers="AUTO"` reads. None: those in its process if there are any, otherwise
            all; "COLOCATED": those in its process, which must have one; "REMOTE": all.
        metrics_port: HTTP port of /metrics, /healthz and /readyz; 0 for any free port, None to
            disable them.
        metrics_host: Address at which these are served; the default is this machine only. They
            require no keys, show names of jobs and dataset steps, and change nothing.
    """

    port: int = 0
    host: str = "127.0.0.1"
    work_dir: str | os.PathLike[str] | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: Sequence[str] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    worker_max_concurrent_snapshots: int = 0
    security: Security | None = None
    _: KW_ONLY
    client_timeout_ms: int | None = None
    gc_dynamic_sharding_jobs: bool = False
    max_plan_bytes: int | None = None
    deployment_mode: DeploymentMode | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        _check_address(self.port, self.host)
        if self.work_dir is not None:
            check_path("work_dir", self.work_dir)
        check_metrics(self.metrics_port, self.metrics_host)
        check_flag("fault_tolerant_mode", self.fault_tolerant_mode, or_none=False)
        check_flag("gc_dynamic_sharding_jobs", self.gc_dynamic_sharding_jobs, or_none=False)
        if self.work_dir is not None and "://" in os.fspath(self.work_dir):
            raise ValueError(
                f"work_dir={os.fspath(self.work_dir)!r} is a URL, but the journal requires a "
                "directory on a local disk or block volume with working file locks"
            )
        if self.fault_tolerant_mode and self.work_dir is None:
            raise ValueError(
                "Cannot enable fault tolerant mode without configuring a work dir. Make sure to "
                "set `work_dir` in the `config` object passed to `DispatchServer`."
            )
        if self.worker_addresses is not None:
            check_strings("worker_addresses", self.worker_addresses)
            object.__setattr__(self, "worker_addresses", tuple(self.worker_addresses))
        _check_number("job_gc_check_interval_ms", self.job_gc_check_interval_ms, least=0)
        _check_number("job_gc_timeout_ms", self.job_gc_timeout_ms, least=-1)
        _check_number("worker_timeout_ms", self.worker_timeout_ms, least=0)
        _check_number("client_timeout_ms", self.client_timeout_ms, least=0)
        _check_number("max_plan_bytes", self.max_plan_bytes, least=1)
        check_int(
            "worker_max_concurrent_snapshots", self.worker_max_concurrent_snapshots, minimum=0
        )
        if self.deployment_mode not in DEPLOYMENT_MODES:
            raise ValueError(
                f"deployment_mode={self.deployment_mode!r} must be None or one of "
                f"{', '.join(mode for mode in DEPLOYMENT_MODES if mode)}"
            )
        check_security(self.security)


@explain_unknown_arguments
@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of a worker.

    >>> with hr.service.DispatchServer() as dispatcher:
    ...     address = dispatcher.target.removeprefix("tcp://")
    ...     config = hr.service.WorkerConfig(address, worker_tags=["gpu-host"])
    ...     with hr.service.WorkerServer(config):
    ...         dispatcher.num_workers()
    1

    Attributes:
        dispatcher_address: "host:port" of the dispatcher.
        worker_address: Address at which clients reach this worker; "%port%" in it is replaced by
            the port. None for `host` and the port; if `host` is 0.0.0.0 or ::, the address of this
            machine on the route to the dispatcher, which is logged.
        port: Port to listen at; 0 for any free port.
        host: Address to listen at; the default accepts connections from this machine only.
        heartbeat_interval_ms: Milliseconds between heartbeats; None for the dispatcher's choice
            (500, or a quarter of its `worker_timeout_ms`; with more than 100 workers up to 2500).
        dispatcher_timeout_ms: Milliseconds to wait for an unavailable dispatcher; None for 1 hour.
        data_transfer_protocol: Transport of the elements. Not supported by this version: clients
            choose it, or use the best one.
        worker_tags: Tags of the worker, such as "COLOCATED".
        cross_trainer_cache_size_bytes: Memory for the elements of each job with a cross-trainer
            cache (`CrossTrainerCache`); None for 10 GiB, or a quarter of the machine's memory if
            that is less, divided among the workers of one command or LocalCluster.
        preload: Modules to import at the start: names, or paths of Python files.
        security: Keys of this server and of its clients; None for an open server on loopback.
        metrics_port: HTTP port of /metrics, /healthz and /readyz; 0 for any free port, None to
            disable them.
        metrics_host: Address at which these are served; the default is this machine only. They
            require no keys, show names of dataset steps, and change nothing.
        hang_timeout_ms: Maximum milliseconds of one function call, or of one wait of a source for
            data. After that, an error with the hung task and its stack is logged, and a worker
            process of `LocalCluster` or of `headrace worker --processes` ends and is replaced. None
            for 10 minutes, 0 for no limit.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    host: str = "127.0.0.1"
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: TransferProtocol | None = None
    worker_tags: Sequence[str] | None = None
    cross_trainer_cache_size_bytes: int | None = None
    preload: Sequence[str] = ()
    security: Security | None = None
    _: KW_ONLY
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    hang_timeout_ms: int | None = None

    @property
    def hang_timeout(self) -> float:
        """Seconds after which a hung worker process ends; 0.0 for never."""
        milliseconds = _HANG_MS if self.hang_timeout_ms is None else self.hang_timeout_ms
        return milliseconds / 1000

    def __post_init__(self) -> None:
        if self.dispatcher_address is None or self.dispatcher_address == "":
            raise ValueError(
                "Must specify a `dispatcher_address` in the `config` passed to `WorkerServer`; "
                f"got dispatcher_address={self.dispatcher_address!r}"
            )
        check_string("dispatcher_address", self.dispatcher_address, empty=False)
        try:
            address = parse_service(self.dispatcher_address)
        except ValueError:
            raise ValueError(
                '`dispatcher_address` must be "host:port", as in "127.0.0.1:5050", but got '
                f"{self.dispatcher_address!r}"
            ) from None
        object.__setattr__(self, "dispatcher_address", address)
        _check_address(self.port, self.host)
        check_metrics(self.metrics_port, self.metrics_host)
        if self.worker_address is not None:
            check_string("worker_address", self.worker_address, empty=False)
            try:
                check_reachable(self.worker_address.replace("%port%", "1"))
            except ValueError as error:
                raise ValueError(f"clients cannot connect to `worker_address`: {error}") from None
        _check_number("hang_timeout_ms", self.hang_timeout_ms, least=0)
        _check_number("heartbeat_interval_ms", self.heartbeat_interval_ms, least=0)
        _check_number("dispatcher_timeout_ms", self.dispatcher_timeout_ms, least=0)
        if self.data_transfer_protocol is not None:
            check_string("data_transfer_protocol", self.data_transfer_protocol, empty=False)
            if self.data_transfer_protocol not in TRANSFER_PROTOCOLS:
                raise ValueError(
                    f"data_transfer_protocol={self.data_transfer_protocol!r} must be None or one "
                    f"of {', '.join(TRANSFER_PROTOCOLS)}"
                )
            _reject(
                "data_transfer_protocol",
                self.data_transfer_protocol,
                "None, and set `data_transfer_protocol` of `distribute`",
            )
        for name in ("worker_tags", "preload"):
            value = getattr(self, name)
            if value is not None:
                check_strings(name, value)
                object.__setattr__(self, name, tuple(value))
        _check_number(
            "cross_trainer_cache_size_bytes", self.cross_trainer_cache_size_bytes, least=1
        )
        check_security(self.security)


def default_cache_bytes(workers: int = 1) -> int:
    """Return the default size of a cross-trainer cache, which may fill up completely.

    Args:
        workers: Number of workers on this machine.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_CACHE_BYTES, memory // 4 // max(1, workers))


def _reject(name: str, value: object, alternative: str) -> None:
    raise ValueError(f"{name}={value!r} is not supported by this version; use {alternative}")


def _check_address(port: object, host: object) -> None:
    check_int("port", port, minimum=0, maximum=65535)
    check_string("host", host, empty=False)


def _check_number(name: str, value: object, *, least: int) -> None:
    if value is not None:
        check_int(name, value, minimum=least)

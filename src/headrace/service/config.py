"""How the service is configured: frozen records, sharding policies and addresses.

Everything here is checked when it is written, so that a wrong value is reported where it stands
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
from typing import TYPE_CHECKING, Any

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
"""What carries calls to the dispatcher; written before "://" in a service string."""
_ALIAS = "grpc"
"""What programs for tf.data service write in its place."""
_HANG_MS = 600_000
_CACHE_BYTES = 10 << 30
TRANSFER_PROTOCOLS = ("shm", "tcp", "local")
REMAINDERS = ("drop", "pad", "end_together")
"""What may carry elements from workers to clients."""


DEPLOYMENT_MODES = (None, "COLOCATED", "REMOTE")
"""Where the workers are that clients read, as far as the dispatcher is told."""


class _NamesOthers(enum.EnumMeta):
    """The type of an enumeration that says what it has, where asked for what it has not."""

    if not TYPE_CHECKING:  # or every name would pass for a member

        def __getattr__(cls, name: str) -> Any:
            members = cls.__dict__.get("_member_map_", {})
            if name in members:
                return members[name]
            words = f"{cls.__name__} has no {name!r}"
            if not name.startswith("_"):
                near = difflib.get_close_matches(name.upper(), members, n=1)
                words += f"; it has {', '.join(members)}"
                words += f". Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(words, name=name, obj=cls)


class ShardingPolicy(enum.IntEnum, metaclass=_NamesOthers):
    """How the workers share a dataset among them.

    >>> with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
    ...     distribute = hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target)
    ...     numbers = sorted(int(x) for x in hr.Dataset.range(5).apply(distribute))
    >>> numbers  # with OFF, each of the two workers gives all five
    [0, 1, 2, 3, 4]
    """

    OFF = 0
    """Every worker produces the whole dataset."""
    DYNAMIC = 1
    """Parts are dealt to whoever asks: each element once."""
    FILE = 2
    """Each worker its share of the files."""
    DATA = 3
    """Each worker its share of the elements."""
    FILE_OR_DATA = 4
    """FILE where the dataset reads files, else DATA."""
    HINT = 5
    """`shard(SHARD_HINT, ...)` in the dataset becomes the worker's own shard."""


STATIC_POLICIES = (
    ShardingPolicy.FILE,
    ShardingPolicy.DATA,
    ShardingPolicy.FILE_OR_DATA,
    ShardingPolicy.HINT,
)
"""Those that share a dataset among the workers of `DispatcherConfig.worker_addresses`."""

_MODE_NAMES = {
    "parallel_epochs": ShardingPolicy.OFF,
    "distributed_epoch": ShardingPolicy.DYNAMIC,
}


def parse_processing_mode(value: object) -> ShardingPolicy:
    """Return the policy that `value` names.

    Args:
        value: A member of `ShardingPolicy`, "parallel_epochs" (OFF) or "distributed_epoch"
            (DYNAMIC); plain numbers are refused, for nobody could read them.

    Raises:
        ValueError: It is anything else.
    """
    if isinstance(value, ShardingPolicy):
        return value
    if isinstance(value, str) and value in _MODE_NAMES:
        return _MODE_NAMES[value]
    advice = ""
    if isinstance(value, str) and value.upper() in ShardingPolicy.__members__:
        advice = f" Did you mean ShardingPolicy.{value.upper()}?"
    raise ValueError(
        "processing_mode should be a `headrace.service.ShardingPolicy`, "
        f'"parallel_epochs", or "distributed_epoch". Got {value!r}.{advice}'
    )


def parse_service(service: object) -> str:
    """Return the dispatcher's address, "host:port".

    Args:
        service: "tcp://host:port", "host:port", or the tuple ("tcp", "host:port"); "grpc" means
            "tcp".

    Raises:
        ValueError: It is not written so.
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
            f"`service` names the protocol {protocol!r}; the service speaks {PROTOCOL!r}, as in "
            f'"{PROTOCOL}://127.0.0.1:5050"; got service={service!r}'
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
    """Say once in a process that there is no gRPC."""
    _log.warning(
        '`service` names the protocol "grpc", which is read as "tcp": Headrace does not speak '
        'gRPC. Write "tcp://host:port" or "host:port"'
    )


def check_reachable(address: str) -> None:
    """Refuse an address at which no client could find a worker.

    Raises:
        ValueError: It is not "host:port", or the host stands for every address of its machine.
    """
    host, _ = addresses.split(address)
    if not host.isprintable() or any(letter.isspace() for letter in host):
        raise ValueError(f"address={address!r}: {host!r} is not the name of a host")
    if addresses.is_wildcard(host):
        raise ValueError(
            f"address={address!r}: {host} stands for every address of its machine, and each client "
            "would look for the worker on its own. Set `worker_address` (--worker-address) to the "
            "name by which clients reach the worker, as in "
            '"myhost:%port%", where "%port%" stands for its port'
        )


@dataclass(frozen=True)
class CrossTrainerCache:
    """For which trainer a client reads, where several share what workers make.

    Each worker makes an element once and keeps it for a while in a window of
    `WorkerConfig.cross_trainer_cache_size_bytes`; each trainer reads all elements, at its own pace.
    Clients that name the same trainer read its elements together.

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
        trainer_id: Another name for each trainer.

    Raises:
        ValueError: It is empty.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not self.trainer_id:
            raise InvalidArgumentError(
                "The cross-trainer cache requires a non-empty trainer ID. Got "
                f"trainer_id={self.trainer_id!r}"
            )
        check_string("trainer_id", self.trainer_id, empty=False)


@dataclass(frozen=True)
class DispatcherConfig:
    """How a dispatcher runs.

    >>> config = hr.service.DispatcherConfig(work_dir="journal", fault_tolerant_mode=True)
    >>> with hr.service.DispatchServer(config) as dispatcher:
    ...     dispatcher.target.startswith("tcp://127.0.0.1:")
    True

    Attributes:
        port: Where it listens; 0 takes any free port.
        host: Whom it listens for; the default lets only this machine in.
        work_dir: Directory of the journal.
        fault_tolerant_mode: Whether every fact is kept in `work_dir`, so that a dispatcher started
            there again goes on where this one ended.
        worker_addresses: The fixed workers of the static sharding policies, in shard order:
            "host:port", or "host" or "host:%port%" for any port of a host. Others are let in by
            none. None: any worker may come, and the static policies are not offered.
        job_gc_check_interval_ms: Milliseconds between looks for what is not needed; None: 1 s.
        job_gc_timeout_ms: How long an iteration without a client is kept; None: 5 minutes; -1: for
            ever.
        worker_timeout_ms: Silence after which a worker counts as lost; None: 10 s.
        worker_max_concurrent_snapshots: For how many `distributed_save`s one worker writes at a
            time; 0: 3.
        security: Keys of this server and of who may enter; None: open, on loopback.
        client_timeout_ms: Silence after which a client counts as gone; None: 5 minutes.
        gc_dynamic_sharding_jobs: Whether `job_gc_timeout_ms` holds for named DYNAMIC jobs as well;
            what was dealt of a collected iteration is dealt again, so each element may come twice.
        max_plan_bytes: What the plans of all datasets may take together, with the arrays in them;
            None: 4 GiB. Where another would be too much, those that nobody has used for longest
            are forgotten; if all are in use, it is refused.
        deployment_mode: Where the workers of the static policies are that a client with
            `target_workers="AUTO"` reads. None: those in its own process if there are any, else
            all; "COLOCATED": those in its own process, of which there must be one; "REMOTE": all.
        metrics_port: Where /metrics, /healthz and /readyz are served over HTTP; 0 takes any free
            port; None: nowhere.
        metrics_host: Whom these are served for; the default is this machine alone. They need no
            keys, name jobs and steps of datasets, and change nothing.
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
    deployment_mode: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        _check_place(self.port, self.host)
        if self.work_dir is not None:
            check_path("work_dir", self.work_dir)
        check_metrics(self.metrics_port, self.metrics_host)
        check_flag("fault_tolerant_mode", self.fault_tolerant_mode, or_none=False)
        check_flag("gc_dynamic_sharding_jobs", self.gc_dynamic_sharding_jobs, or_none=False)
        if self.work_dir is not None and "://" in os.fspath(self.work_dir):
            raise ValueError(
                f"work_dir={os.fspath(self.work_dir)!r} is a URL: the journal needs a directory of "
                "a local disk or a block volume, with locks that hold"
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


@dataclass(frozen=True)
class WorkerConfig:
    """How a worker runs.

    >>> with hr.service.DispatchServer() as dispatcher:
    ...     address = dispatcher.target.removeprefix("tcp://")
    ...     config = hr.service.WorkerConfig(address, worker_tags=["gpu-host"])
    ...     with hr.service.WorkerServer(config):
    ...         dispatcher.num_workers()
    1

    Attributes:
        dispatcher_address: "host:port" of the dispatcher.
        worker_address: Where clients find this worker; "%port%" in it stands for the port it got.
            None: `host` and that port; where `host` is 0.0.0.0 or ::, the address of this machine
            by which the dispatcher is reached, which is said in the log.
        port: Where it listens; 0 takes any free port.
        host: Whom it listens for; the default lets only this machine in.
        heartbeat_interval_ms: Milliseconds between heartbeats; None: as the dispatcher asks (500,
            or a quarter of its `worker_timeout_ms`; with more than 100 workers up to 2500).
        dispatcher_timeout_ms: How long a dispatcher that is away is waited for; None: 1 hour.
        data_transfer_protocol: What carries the elements; not supported by this version: clients
            choose, or take the best.
        worker_tags: Words that describe the worker, such as "COLOCATED".
        cross_trainer_cache_size_bytes: Memory for elements of each job that trainers share
            (`CrossTrainerCache`); None: 10 GiB, or a quarter of the machine's memory where that is
            less, which the workers of one command or LocalCluster divide.
        preload: Modules that are imported at the start: names, or paths of Python files.
        security: Keys of this server and of who may enter; None: open, on loopback.
        metrics_port: Where /metrics, /healthz and /readyz are served over HTTP; 0 takes any free
            port; None: nowhere.
        metrics_host: Whom these are served for; the default is this machine alone. They need no
            keys, name steps of datasets, and change nothing.
        hang_timeout_ms: How long one call of a function, or one wait of a source for data, may
            take, in milliseconds. Then an error is logged that says which task hangs and where, and
            a worker process of `LocalCluster` or of `headrace worker --processes` ends and is
            started anew. None: 10 minutes; 0: for ever.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    host: str = "127.0.0.1"
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: str | None = None
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
        """Seconds after which a hung worker process ends; 0.0: never."""
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
        _check_place(self.port, self.host)
        check_metrics(self.metrics_port, self.metrics_host)
        if self.worker_address is not None:
            check_string("worker_address", self.worker_address, empty=False)
            try:
                check_reachable(self.worker_address.replace("%port%", "1"))
            except ValueError as error:
                raise ValueError(
                    f"`worker_address` cannot be reached by clients: {error}"
                ) from None
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
            _refuse(
                "data_transfer_protocol",
                self.data_transfer_protocol,
                "None here, and `data_transfer_protocol` of `distribute`",
            )
        for name in ("worker_tags", "preload"):
            words = getattr(self, name)
            if words is not None:
                check_strings(name, words)
                object.__setattr__(self, name, tuple(words))
        _check_number(
            "cross_trainer_cache_size_bytes", self.cross_trainer_cache_size_bytes, least=1
        )
        check_security(self.security)


def default_cache_bytes(workers: int = 1) -> int:
    """Return the size of a cross-trainer cache where nobody says: it will be full one day.

    Args:
        workers: How many there are on this machine.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_CACHE_BYTES, memory // 4 // max(1, workers))


def _refuse(name: str, value: object, instead: str) -> None:
    raise ValueError(f"{name}={value!r} is not supported by this version; use {instead}")


def _check_place(port: object, host: object) -> None:
    check_int("port", port, minimum=0, maximum=65535)
    check_string("host", host, empty=False)


def _check_number(name: str, value: object, *, least: int) -> None:
    if value is not None:
        check_int(name, value, minimum=least)

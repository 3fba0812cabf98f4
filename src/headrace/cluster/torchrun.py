"""Cluster of the processes that torchrun starts."""

from __future__ import annotations

import json
import os
import socket
import uuid
from datetime import timedelta
from typing import Any, Protocol

from headrace.arguments import check_int, check_seconds, check_string
from headrace.cluster.environment import read_number, read_variable
from headrace.cluster.resolver import ClusterResolver, import_package, wait_for
from headrace.cluster.spec import ClusterSpec
from headrace.errors import InvalidArgumentError, UnavailableError
from headrace.transport import address as addresses

__all__ = ["KeyValueStore", "TorchrunClusterResolver", "exchange_addresses"]

_LAUNCHER = "torchrun"
_CONNECT_SECONDS = 10.0
"""Seconds of one attempt to reach the store; the timeout allows several."""
_PREFIX = "headrace/cluster"


class KeyValueStore(Protocol):
    """Interface that is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""


class TorchrunClusterResolver(ClusterResolver):
    """Makes each process that torchrun started a worker, numbered by its RANK.

    >>> import os
    >>> os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")  # torchrun sets these
    >>> resolver = hr.distribute.TorchrunClusterResolver(port=8888)
    >>> resolver.cluster_spec().as_dict(), resolver.task_id
    ({'worker': ['127.0.0.1:8888']}, 0)

    torchrun provides the address of one process only. So the first call of `cluster_spec` puts this
    process's address into the store at MASTER_ADDR:MASTER_PORT, and waits until all processes have
    done so: call it in all processes. After a restart by torchrun all have new addresses.

    Args:
        port: Port of this process; 0 chooses a free one.
        host: Host at which other processes reach this one; None: the address of this machine by
            which it reaches MASTER_ADDR; loopback if all processes are on one machine.
        timeout: Seconds to wait for the other processes.
        rpc_layer: Prefix of addresses.

    Raises:
        FailedPreconditionError: If torchrun did not start this process.
        InvalidArgumentError: If its environment has no valid rank and world size.
    """

    def __init__(
        self,
        port: int = 0,
        host: str | None = None,
        timeout: float = 300.0,
        rpc_layer: str | None = None,
    ) -> None:
        self._port = check_int("port", port, minimum=0, maximum=65535)
        if host is not None:
            check_string("host", host, empty=False)
        self._host = host
        check_seconds("timeout", timeout)
        self._timeout = timeout
        self._rank = read_number("RANK", launcher=_LAUNCHER)
        self._world_size = read_number("WORLD_SIZE", launcher=_LAUNCHER)
        if self._rank >= self._world_size:
            raise InvalidArgumentError(
                f"RANK={self._rank} must be in [0, WORLD_SIZE), but "
                f"WORLD_SIZE={self._world_size}: is one of the variables left over from "
                "another start?"
            )
        #: None: unknown which processes share a machine.
        self._local_world_size = _read_optional_number("LOCAL_WORLD_SIZE") or (
            1 if self._world_size == 1 else None
        )
        self._spec: ClusterSpec | None = None
        #: With rank 0 this may be the server of the store, so it lives as long as this object.
        self._store: KeyValueStore | None = None
        super().__init__("worker", self._rank, rpc_layer)

    @property
    def local_rank(self) -> int:
        """Number of this process among those of its machine, as for choosing a device.

        Raises:
            FailedPreconditionError: If neither LOCAL_RANK nor LOCAL_WORLD_SIZE is set.
        """
        said = _read_optional_number("LOCAL_RANK")
        if said is None and self._local_world_size is not None:
            return self._rank % self._local_world_size
        return read_number("LOCAL_RANK", launcher=_LAUNCHER) if said is None else said

    @property
    def group_rank(self) -> int:
        """Number of this process's machine (of its agent).

        Raises:
            FailedPreconditionError: If neither GROUP_RANK nor LOCAL_WORLD_SIZE is set.
        """
        said = _read_optional_number("GROUP_RANK")
        if said is None and self._local_world_size is not None:
            return self._rank // self._local_world_size
        return read_number("GROUP_RANK", launcher=_LAUNCHER) if said is None else said

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all processes, by rank.

        Raises:
            UnavailableError: If the store is unreachable, or not all have registered.
            FailedPreconditionError: If the package `torch` is not installed.
        """
        if self._spec is None:
            found = [self._own_address()]
            if self._world_size > 1:
                if self._store is None:
                    self._store = wait_for(
                        self._connect, what="store of torchrun", seconds=self._timeout
                    )
                found = exchange_addresses(
                    self._store, self._rank, self._world_size, found[0], seconds=self._timeout
                )
            self._spec = ClusterSpec({"worker": found})
        return self._spec

    def _own_address(self) -> str:
        host = self._host
        if host is None and (self._local_world_size or 0) >= self._world_size:
            host = "127.0.0.1"
        if host is None:
            master = read_variable("MASTER_ADDR", launcher=_LAUNCHER)
            host = addresses.local_address_for(addresses.join(master, self._master_port()))
            if addresses.is_loopback(host) and not addresses.is_loopback(master):
                # This is the master's machine, whose own name resolves to loopback.
                host = master
        return addresses.join(host, self._port or addresses.find_stable_port())

    def _master_port(self) -> int:
        return read_number("MASTER_PORT", launcher=_LAUNCHER)

    def _connect(self) -> KeyValueStore:
        """Return the store of torchrun's agent; without an agent, rank 0 serves a store."""
        host, port = read_variable("MASTER_ADDR", launcher=_LAUNCHER), self._master_port()
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=min(self._timeout, _CONNECT_SECONDS))
        }
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # Shared with init_process_group, which otherwise could not listen there later; and
            # bound to that address only, where torch would listen on all interfaces.
            listener = _listener(host, port)
            options |= {
                "is_master": True,
                "wait_for_workers": False,
                "multi_tenant": True,
                "master_listen_fd": listener.detach(),
            }
        torch = import_package("torch.distributed", needed_by="TorchrunClusterResolver")
        try:
            store: KeyValueStore = torch.distributed.TCPStore(host, port, **options)
        except (OSError, RuntimeError) as error:
            raise UnavailableError(
                f"cannot reach the store at {addresses.join(host, port)} (MASTER_ADDR, "
                f"MASTER_PORT): {str(error).partition(chr(10))[0]}"
            ) from error
        return store


def exchange_addresses(
    store: KeyValueStore, rank: int, world_size: int, address: str, *, seconds: float
) -> list[str]:
    """Return the addresses of all ranks, once each has called this with its address.

    A store may outlive the processes that used it, so its values may be of earlier processes. Rank
    0 opens each exchange with a unique token; a process accepts the final value only if it contains
    the process's own token.

    Args:
        store: Store shared by all ranks.
        rank: Rank of this process.
        world_size: Number of ranks.
        address: Address of this process.
        seconds: Seconds to wait for the other ranks.

    Raises:
        UnavailableError: If ranks are missing; names them.
    """
    what = f"addresses of all {world_size} ranks of torchrun"
    # A configured port is the same after a restart; the random part is not.
    entry = f"{address} {uuid.uuid4().hex}"
    if rank == 0:
        attempt_key = f"{_PREFIX}/{uuid.uuid4().hex}"
        store.set(f"{attempt_key}/0", entry)
        store.set(_PREFIX, attempt_key)
        found = wait_for(
            lambda: _gather_addresses(store, attempt_key, world_size), what=what, seconds=seconds
        )
        store.set(f"{attempt_key}/all", json.dumps(found))
    else:
        found = wait_for(lambda: _acknowledge(store, rank, entry), what=what, seconds=seconds)
    return [entry.partition(" ")[0] for entry in found]


def _gather_addresses(store: KeyValueStore, attempt_key: str, world_size: int) -> list[str]:
    keys = [f"{attempt_key}/{rank}" for rank in range(world_size)]
    if not store.check(keys):
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise UnavailableError(
            f"rank {', '.join(missing)} has not registered its address; has it called "
            "cluster_spec()?"
        )
    return [store.get(key).decode() for key in keys]


def _acknowledge(store: KeyValueStore, rank: int, entry: str) -> list[str]:
    if not store.check([_PREFIX]):
        raise UnavailableError(
            "rank 0 has not registered its address; has it called cluster_spec()?"
        )
    attempt_key = store.get(_PREFIX).decode()
    store.set(f"{attempt_key}/{rank}", entry)
    if store.check([f"{attempt_key}/all"]):
        found: list[str] = json.loads(store.get(f"{attempt_key}/all"))
        if entry in found:
            return found
    raise UnavailableError("not all ranks have registered their addresses")


def _read_optional_number(name: str) -> int | None:
    """Return an optional variable."""
    return read_number(name, launcher=_LAUNCHER) if name in os.environ else None


def _listener(host: str, port: int) -> socket.socket:
    number, port = addresses.split(addresses.resolve(host, port))
    try:
        return socket.create_server(
            (number, port), family=socket.AF_INET6 if ":" in number else socket.AF_INET
        )
    except OSError as error:
        raise UnavailableError(
            f"rank 0 cannot listen at {addresses.join(host, port)} (MASTER_ADDR, MASTER_PORT): "
            f"{error.strerror}"
        ) from error

"""A cluster of the processes that torchrun starts."""

from __future__ import annotations

import json
import os
import socket
import uuid
from datetime import timedelta
from typing import Any, Protocol

from headrace.arguments import check_int, check_seconds, check_string
from headrace.cluster.environment import read, read_whole
from headrace.cluster.resolver import ClusterResolver, load, wait_for
from headrace.cluster.spec import ClusterSpec
from headrace.errors import InvalidArgumentError, UnavailableError
from headrace.transport import address as addresses

__all__ = ["Store", "TorchrunClusterResolver", "exchange"]

_LAUNCHER = "torchrun"
_CONNECT_SECONDS = 10.0
"""How long one attempt to reach the store takes; the time that is given allows for several."""
_PREFIX = "headrace/cluster"


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """Return a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of some keys are there."""


class TorchrunClusterResolver(ClusterResolver):
    """Makes a worker of each process that torchrun started: its number is the process's RANK.

        # train.py, run by: torchrun --nproc-per-node 4 train.py
        strategy = MultiWorkerMirroredStrategy(TorchrunClusterResolver())

    torchrun names the address of one process alone. So the first call of `cluster_spec` has each
    process put its own address into the store at MASTER_ADDR:MASTER_PORT, and waits until all have
    done so: call it in all processes. After a restart by torchrun all have new addresses.

    Args:
        port: Where this process listens; 0: a free one is chosen.
        host: Where the others find it; None: the address of this machine by which it reaches
            MASTER_ADDR; loopback if all processes are on one machine.
        timeout: Seconds for which the others are waited for.
        rpc_layer: The prefix of addresses.

    Raises:
        FailedPreconditionError: torchrun did not start this process.
        InvalidArgumentError: What it says is no rank of a world.
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
        self._rank = read_whole("RANK", launcher=_LAUNCHER)
        self._world_size = read_whole("WORLD_SIZE", launcher=_LAUNCHER)
        if self._rank >= self._world_size:
            raise InvalidArgumentError(
                f"RANK={self._rank}, but WORLD_SIZE={self._world_size}, and ranks begin with 0: is "
                "one of the variables left over from another start?"
            )
        #: None: it is not known which processes share a machine.
        self._local_world_size = _whole("LOCAL_WORLD_SIZE") or (
            1 if self._world_size == 1 else None
        )
        self._spec: ClusterSpec | None = None
        #: Rank 0 may be the one that serves it, as long as this object lives.
        self._store: Store | None = None
        super().__init__("worker", self._rank, rpc_layer)

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its machine, as for choosing a device.

        Raises:
            FailedPreconditionError: Neither LOCAL_RANK nor LOCAL_WORLD_SIZE says so.
        """
        said = _whole("LOCAL_RANK")
        if said is None and self._local_world_size is not None:
            return self._rank % self._local_world_size
        return read_whole("LOCAL_RANK", launcher=_LAUNCHER) if said is None else said

    @property
    def group_rank(self) -> int:
        """The number of this process's machine (of its agent).

        Raises:
            FailedPreconditionError: Neither GROUP_RANK nor LOCAL_WORLD_SIZE says so.
        """
        said = _whole("GROUP_RANK")
        if said is None and self._local_world_size is not None:
            return self._rank // self._local_world_size
        return read_whole("GROUP_RANK", launcher=_LAUNCHER) if said is None else said

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all processes, by rank.

        Raises:
            UnavailableError: The store cannot be reached, or not all have said where they are.
            FailedPreconditionError: The package `torch` is not installed.
        """
        if self._spec is None:
            found = [self._own_address()]
            if self._world_size > 1:
                if self._store is None:
                    self._store = wait_for(
                        self._connect, what="store of torchrun", seconds=self._timeout
                    )
                found = exchange(
                    self._store, self._rank, self._world_size, found[0], seconds=self._timeout
                )
            self._spec = ClusterSpec({"worker": found})
        return self._spec

    def _own_address(self) -> str:
        host = self._host
        if host is None and (self._local_world_size or 0) >= self._world_size:
            host = "127.0.0.1"
        if host is None:
            master = read("MASTER_ADDR", launcher=_LAUNCHER)
            host = addresses.local_address_for(addresses.join(master, self._master_port()))
            if addresses.is_loopback(host) and not addresses.is_loopback(master):
                # This is the master's machine, whose own name leads it to loopback.
                host = master
        return addresses.join(host, self._port or addresses.find_stable_port())

    def _master_port(self) -> int:
        return read_whole("MASTER_PORT", launcher=_LAUNCHER)

    def _connect(self) -> Store:
        """Return the store of torchrun's agent; without an agent rank 0 serves one."""
        host, port = read("MASTER_ADDR", launcher=_LAUNCHER), self._master_port()
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=min(self._timeout, _CONNECT_SECONDS))
        }
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # Shared with init_process_group, which else could not listen there in its turn; and
            # at that address alone, where torch by itself would listen at all.
            listener = _listener(host, port)
            options |= {
                "is_master": True,
                "wait_for_workers": False,
                "multi_tenant": True,
                "master_listen_fd": listener.detach(),
            }
        torch = load("torch.distributed", needed_by="TorchrunClusterResolver")
        try:
            store: Store = torch.distributed.TCPStore(host, port, **options)
        except (OSError, RuntimeError) as error:
            raise UnavailableError(
                f"the store at {addresses.join(host, port)} (MASTER_ADDR, MASTER_PORT) cannot be "
                f"reached: {str(error).partition(chr(10))[0]}"
            ) from error
        return store


def exchange(
    store: Store, rank: int, world_size: int, address: str, *, seconds: float
) -> list[str]:
    """Return the addresses of all ranks, when each has called this with its own.

    A store may outlive the processes that used it, so what stands in it may be of others before
    these. Rank 0 opens each exchange under a word of its own, and what it closes it with is
    believed by those whose own words are in it.

    Args:
        store: Where all meet.
        rank: Of this process.
        world_size: How many there are.
        address: Of this process.
        seconds: How long the others are waited for.

    Raises:
        UnavailableError: Not all came; it says which.
    """
    what = f"addresses of all {world_size} ranks of torchrun"
    # A port that was given is the same after a restart; this is not.
    entry = f"{address} {uuid.uuid4().hex}"
    if rank == 0:
        word = f"{_PREFIX}/{uuid.uuid4().hex}"
        store.set(f"{word}/0", entry)
        store.set(_PREFIX, word)
        found = wait_for(lambda: _gathered(store, word, world_size), what=what, seconds=seconds)
        store.set(f"{word}/all", json.dumps(found))
    else:
        found = wait_for(lambda: _answered(store, rank, entry), what=what, seconds=seconds)
    return [entry.partition(" ")[0] for entry in found]


def _gathered(store: Store, word: str, world_size: int) -> list[str]:
    keys = [f"{word}/{rank}" for rank in range(world_size)]
    if not store.check(keys):
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise UnavailableError(
            f"rank {', '.join(missing)} has not said where it listens; has it called "
            "cluster_spec()?"
        )
    return [store.get(key).decode() for key in keys]


def _answered(store: Store, rank: int, entry: str) -> list[str]:
    if not store.check([_PREFIX]):
        raise UnavailableError(
            "rank 0 has not said where it listens; has it called cluster_spec()?"
        )
    word = store.get(_PREFIX).decode()
    store.set(f"{word}/{rank}", entry)
    if store.check([f"{word}/all"]):
        found: list[str] = json.loads(store.get(f"{word}/all"))
        if entry in found:
            return found
    raise UnavailableError("not all ranks have said where they listen")


def _whole(name: str) -> int | None:
    """Return a variable that need not be there."""
    return read_whole(name, launcher=_LAUNCHER) if name in os.environ else None


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

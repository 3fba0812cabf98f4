"""Several processes of JAX that are one: how they find each other, and add up arrays.

Rule 1. Processes that their user made one (`jax.distributed.initialize`) stay what they are. Others
        are made one here, before JAX looks for its devices, and only where no keys are wanted: what
        JAX's processes say to each other has none. All listen at one interface.
Rule 2. Whether they are one is decided by all, from what each says of itself. Where they are not,
        arrays of JAX go by whatever other way there is.
Rule 3. The end of one process is not the end of the others (`jax_coordination`): who is gone, and
        what becomes of the rest, is for the caller to say.
Rule 4. A collective on CPUs takes no longer than it may, and each is waited for.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np

# Whoever starts processes of JAX uses these; they have no public names.
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.frameworks import jax_coordinator
from headrace.frameworks.framework import Array, Device, Exchange
from headrace.frameworks.jax_replica_program import device_keys, find_devices, is_peer_loss
from headrace.frameworks.jax_waiting import wait_until_ready

__all__ = ["JaxAllReduce", "join_workers"]

_log = logging.getLogger("headrace")

_AXIS = "worker"
_TIMEOUT_FLAG = "xla_cpu_collective_timeout_seconds"
_SHUTDOWN_SECONDS = 5
_MAX_TIMEOUT_SECONDS = 10**6


# --- becoming one ---------------------------------------------------------------------------------


def join_workers(
    rank: int, size: int, host: str | None, timeout: float, exchange: Exchange
) -> bool:
    """Make the workers' processes one, unless they are; return whether they are now.

    All workers call it, before they ask JAX for devices.

    Args:
        rank: Of this worker.
        size: How many there are.
        host: The number of this machine's interface at which to listen; None: keys are wanted.
        timeout: Seconds that others are waited for, now and in each collective on CPUs.
        exchange: Given what this worker has to say, returns what all have to say, by rank.
    """
    own = {**_process_state(host), "workers": str(size)}
    if own["state"] == "free" and rank == 0:
        assert host is not None
        own["address"], own["hold"] = jax_coordinator.start_coordinator(size, host)
    said = exchange(own)
    states = {each["state"] for each in said}
    if {each["workers"] for each in said} != {str(size)}:
        return False  # which those who compare the workers refuse
    if states == {"free"}:
        assert host is not None
        jax_coordinator.keep_alive(said[0]["hold"])
        _initialize(rank, size, host, said[0]["address"], timeout)
    elif not _form_one_program(said):
        if states != {"keys"}:
            _warn_not_joined(said)
        return False
    if not xla_bridge.backends_are_initialized():
        with _collective_timeout(timeout):
            jax.local_devices()
    return True


def _process_state(host: str | None) -> dict[str, str]:
    """Return what this process has to say of itself."""
    state = distributed.global_state
    if state.client is not None:
        number, count = str(state.process_id), str(state.num_processes)
        return {"state": "joined", "number": number, "count": count}
    if xla_bridge.backends_are_initialized():
        return {"state": "used"}
    return {"state": "keys" if host is None else "free"}


def _form_one_program(states: Sequence[dict[str, str]]) -> bool:
    """Whether the workers are all processes of one program, each another one of it."""
    if any(each["state"] != "joined" for each in states):
        return False
    numbers = sorted(int(each["number"]) for each in states)
    return numbers == list(range(len(states))) and all(
        int(e["count"]) == len(states) for e in states
    )


_REASONS = {
    "free": "JAX is not in use there",
    "used": "JAX was used there before the strategy was made",
    "keys": "jax.distributed.initialize() was not called there",
    "joined": "it is process {number} of {count} of jax.distributed there",
}


def _warn_not_joined(states: Sequence[dict[str, str]]) -> None:
    words = [f"worker {n}: {_REASONS[e['state']].format(**e)}" for n, e in enumerate(states)]
    _log.warning(
        "the workers' processes are not one program of JAX (%s), so what they reduce goes by way "
        "of the first worker, and there are no programs over all: make the strategy before JAX is "
        "first used, or call jax.distributed.initialize() with as many processes as workers",
        "; ".join(words),
    )


def _initialize(rank: int, size: int, host: str, address: str, timeout: float) -> None:
    """Do what `jax.distributed.initialize` does, but for the end of others (rule 3)."""
    state = distributed.global_state
    state.client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=max(1, int(min(timeout, _MAX_TIMEOUT_SECONDS))),
        shutdown_timeout=_SHUTDOWN_SECONDS,
        heartbeat_timeout=jax_coordinator.HEARTBEAT_SECONDS,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    state.client.connect()
    state.process_id, state.num_processes = rank, size
    state.coordinator_address = address
    if jax.config.jax_cpu_collectives_implementation in (None, "gloo"):
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=state.client, hostname=host)
        factory = functools.partial(xla_bridge.make_cpu_client, collectives=collectives)
        register_backend_factory("cpu", factory, priority=0, fail_quietly=False)


@contextmanager
def _collective_timeout(timeout: float) -> Iterator[None]:
    """Have collectives on CPUs end after so many seconds, if JAX's CPUs are first used here."""
    before = os.environ.get("XLA_FLAGS")
    if before is not None and _TIMEOUT_FLAG in before:
        yield
        return
    limit = max(1, int(min(timeout, _MAX_TIMEOUT_SECONDS)))
    os.environ["XLA_FLAGS"] = f"{before or ''} --{_TIMEOUT_FLAG}={limit}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


# --- sums -----------------------------------------------------------------------------------------


class JaxAllReduce:
    """Adds up arrays of all workers, each on one device.

    Args:
        device: Where this worker's arrays are.
        exchange: As of `join_workers`.
    """

    def __init__(self, device: Device, exchange: Exchange) -> None:
        said = exchange({"device": device_keys([device])[0]})
        mesh = Mesh(np.array(find_devices([each["device"] for each in said])), (_AXIS,))
        self._device = device
        self._size = len(said)
        self._sharding = NamedSharding(mesh, P(_AXIS))
        self._program = jax.jit(
            jax.shard_map(
                lambda arrays: [jax.lax.psum(array[0], _AXIS) for array in arrays],
                mesh=mesh,
                in_specs=P(_AXIS),
                out_specs=P(),
                check_vma=False,
            )
        )

    @staticmethod
    def supports(array: Array) -> bool:
        """Say whether it can add up such arrays: the same on all workers."""
        # Not where it is: what JAX was told no device for is where the last replica came from.
        return bool(array.is_fully_addressable)

    def all_reduce(self, arrays: Sequence[Array], check_peers: Callable[[], object]) -> list[Array]:
        """Return the sums over all workers, the same on all.

        Args:
            arrays: Of this worker.
            check_peers: Called now and then while others are waited for; what it raises ends the
                wait.

        Raises:
            RuntimeError: A worker is gone, or does not take part in time.
        """
        given = [
            jax.make_array_from_single_device_arrays(
                (self._size, *array.shape), self._sharding, [array[None]]
            )
            for array in jax.device_put(list(arrays), self._device)
        ]
        try:
            made = self._program(given)
            wait_until_ready(made, check_peers)
        except ValueError as error:
            if is_peer_loss(error):
                raise RuntimeError(str(error)) from error
            raise
        return [each.addressable_data(0) for each in made]

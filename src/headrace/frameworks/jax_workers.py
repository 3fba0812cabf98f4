"""Forms one JAX program from several worker processes, and sums arrays over them.

Rule 1. Processes that the user joined with `jax.distributed.initialize` stay as they are. Others
        are joined here, before JAX initializes its devices, and only if no keys are required: the
        communication of JAX processes is not authenticated. All listen on one interface.
Rule 2. All workers decide together, from the state that each reports, whether they form one
        program. Otherwise JAX arrays are reduced without JAX's collectives.
Rule 3. The end of one process does not end the others (`jax_coordinator`); the caller detects lost
        processes and decides how to continue.
Rule 4. A collective on CPUs has a timeout, and each is waited for.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np

# Needed to start JAX processes; these have no public names.
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


# --- forming one program --------------------------------------------------------------------------


def join_workers(
    rank: int, size: int, host: str | None, timeout: float, exchange: Exchange
) -> bool:
    """Form one JAX program from the workers' processes; return whether they are one.

    All workers call it before they request devices from JAX.

    Args:
        rank: Rank of this worker.
        size: Number of workers.
        host: IP address of the interface to listen on; None if keys are required.
        timeout: Seconds to wait for other workers, now and in each collective on CPUs.
        exchange: Sends this worker's key-value pairs and returns those of all workers, by rank.
    """
    own = {**_process_state(host), "workers": str(size)}
    if own["state"] == "free" and rank == 0:
        assert host is not None
        own["address"], own["keep_alive"] = jax_coordinator.start_coordinator(size, host)
    states = exchange(own)
    kinds = {each["state"] for each in states}
    if {each["workers"] for each in states} != {str(size)}:
        return False  # the comparison of the workers' configurations rejects it
    if kinds == {"free"}:
        assert host is not None
        jax_coordinator.keep_alive(states[0]["keep_alive"])
        _initialize(rank, size, host, states[0]["address"], timeout)
    elif not _form_one_program(states):
        if kinds != {"keys"}:
            _warn_not_joined(states)
        return False
    if not xla_bridge.backends_are_initialized():
        with _collective_timeout(timeout):
            jax.local_devices()
    return True


def _process_state(host: str | None) -> dict[str, str]:
    """Return the state that this process reports to the others."""
    state = distributed.global_state
    if state.client is not None:
        number, count = str(state.process_id), str(state.num_processes)
        return {"state": "joined", "number": number, "count": count}
    if xla_bridge.backends_are_initialized():
        return {"state": "used"}
    return {"state": "keys" if host is None else "free"}


def _form_one_program(states: Sequence[dict[str, str]]) -> bool:
    """Return whether the workers are the distinct processes of one JAX program."""
    if any(each["state"] != "joined" for each in states):
        return False
    numbers = sorted(int(each["number"]) for each in states)
    return numbers == list(range(len(states))) and all(
        int(e["count"]) == len(states) for e in states
    )


_REASONS = {
    "free": "JAX is not in use",
    "used": "JAX was used before the strategy was made",
    "keys": "jax.distributed.initialize() was not called",
    "joined": "it is process {number} of {count} of jax.distributed",
}


def _warn_not_joined(states: Sequence[dict[str, str]]) -> None:
    reasons = [f"worker {n}: {_REASONS[e['state']].format(**e)}" for n, e in enumerate(states)]
    _log.warning(
        "the workers' processes do not form one JAX program (%s), so reductions go through the "
        "first worker, and there are no programs over all workers: make the strategy before JAX "
        "is first used, or call jax.distributed.initialize() with as many processes as workers",
        "; ".join(reasons),
    )


def _initialize(rank: int, size: int, host: str, address: str, timeout: float) -> None:
    """Do what `jax.distributed.initialize` does, except that lost processes do not end this one."""
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
    """Set the timeout of CPU collectives, if JAX's CPU devices are first used in this context."""
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
    """Sums arrays over all workers, each on one device.

    Args:
        device: Device of this worker's arrays.
        exchange: As for `join_workers`.
    """

    def __init__(self, device: Device, exchange: Exchange) -> None:
        reports = exchange({"device": device_keys([device])[0]})
        mesh = Mesh(np.array(find_devices([each["device"] for each in reports])), (_AXIS,))
        self._device = device
        self._size = len(reports)
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
        """Return whether `all_reduce` supports the array; the same on all workers."""
        # Not by its device: an array created without a device is on that of the last replica.
        return bool(array.is_fully_addressable)

    def all_reduce(self, arrays: Sequence[Array], check_peers: Callable[[], object]) -> list[Array]:
        """Return the sums over all workers, equal on all.

        Args:
            arrays: Arrays of this worker.
            check_peers: Called periodically while waiting for others; an error that it raises ends
                the wait.

        Raises:
            RuntimeError: If a worker was lost, or did not take part in time.
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

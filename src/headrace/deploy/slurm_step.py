"""Roles, host and ports of the ranks of a Slurm step.

Rank 0 is the chief: it runs the dispatcher and the user's program. Ranks 1 to N run one parameter
server each. Every other rank runs a worker of the data service and a coordinator worker. The order
is that of `SlurmClusterResolver(jobs={"chief": 1, "ps": N, "worker": M})`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.cluster.environment import read_number
from headrace.cluster.spec import CHIEF, PS, WORKER
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.transport import address as addresses

__all__ = ["SlurmStep", "find_node_host"]

_LAUNCHER = "srun, as in `srun --ntasks=4 headrace up`"
_FIRST_PORT = 20_000
_NUM_PORTS = 12_000
_PORTS_PER_RANK = 16


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """One rank of a Slurm step, and the roles of all ranks.

    Attributes:
        job_id: Number of the job.
        step_id: Number of the step.
        rank: Number of this rank (`SLURM_PROCID`).
        num_ranks: Number of ranks of the step.
        num_ps: Number of ranks that run a parameter server.
    """

    job_id: int
    step_id: int
    rank: int
    num_ranks: int
    num_ps: int

    @classmethod
    def from_environment(cls, num_ps: int) -> SlurmStep:
        """Read the variables that `srun` sets.

        Raises:
            FailedPreconditionError: If this process was not started by `srun`.
            InvalidArgumentError: If the step has too few ranks.
        """
        # A batch script also has SLURM_PROCID, but not the variables of a step.
        if "SLURM_STEP_ID" not in os.environ or "SLURM_STEP_NUM_TASKS" not in os.environ:
            raise FailedPreconditionError(
                "`headrace up` must be started by srun, which gives each task its rank, as in "
                "`srun --ntasks=4 headrace up`; the variable SLURM_STEP_ID or SLURM_STEP_NUM_TASKS "
                "is not set"
            )
        step = cls(
            step_id=read_number("SLURM_STEP_ID", launcher=_LAUNCHER),
            num_ranks=read_number("SLURM_STEP_NUM_TASKS", launcher=_LAUNCHER),
            job_id=read_number("SLURM_JOB_ID", launcher=_LAUNCHER),
            rank=read_number("SLURM_PROCID", launcher=_LAUNCHER),
            num_ps=num_ps,
        )
        if step.rank >= step.num_ranks:
            raise InvalidArgumentError(
                f"SLURM_PROCID={step.rank} must be less than the {step.num_ranks} tasks of the "
                "step: is one of the variables left over from another step?"
            )
        if step.num_ranks < num_ps + 2:
            raise InvalidArgumentError(
                f"--ps {num_ps} requires at least {num_ps + 2} tasks (rank 0 for the dispatcher, "
                f"{num_ps} for parameter servers, 1 for a worker), but the step has "
                f"{step.num_ranks}; start it with srun --ntasks={num_ps + 2} or more"
            )
        return step

    @property
    def task(self) -> tuple[str, int]:
        """Type and number of the task of this rank: ("chief", 0), ("ps", 1), ("worker", 3)."""
        return self.task_of(self.rank)

    def task_of(self, rank: int) -> tuple[str, int]:
        """Return type and number of the task of a rank."""
        if rank == 0:
            return CHIEF, 0
        return (PS, rank - 1) if rank <= self.num_ps else (WORKER, rank - 1 - self.num_ps)

    @property
    def num_worker_ranks(self) -> int:
        """Number of ranks that run workers."""
        return self.num_ranks - 1 - self.num_ps

    def share(self, num_workers: int) -> int:
        """Return how many of the data workers of the step this worker rank runs, at least one.

        Args:
            num_workers: Number of data workers on all ranks.
        """
        _, index = self.task
        return max(1, -((index - num_workers) // self.num_worker_ranks))

    def directory(self, run_dir: Path | None, environment: Mapping[str, str] = os.environ) -> Path:
        """Return the directory in which the ranks of this step find each other.

        Args:
            run_dir: Its parent; None: `.headrace` in the directory from which the job was
                submitted, or in the home directory.
            environment: Variables of the process.
        """
        if run_dir is None:
            submitted_from = environment.get("SLURM_SUBMIT_DIR")
            run_dir = (Path(submitted_from) if submitted_from else Path.home()) / ".headrace"
        return run_dir.absolute() / f"{self.job_id}.{self.step_id}"

    def find_port(self, host: str) -> int:
        """Return a free port of this node, which stays free while a server restarts.

        Ranks look in different ranges, so that ranks that start together on one node do not choose
        the same port.

        Raises:
            UnavailableError: If there is none.
        """
        slot = self.job_id * 61 + self.step_id * 17 + self.rank
        first = slot * _PORTS_PER_RANK % (_NUM_PORTS - _PORTS_PER_RANK)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in range(_FIRST_PORT + first, _FIRST_PORT + first + _PORTS_PER_RANK):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError:
                    continue
            return port
        raise UnavailableError(
            f"no free port on {host} among {_FIRST_PORT + first} to "
            f"{_FIRST_PORT + first + _PORTS_PER_RANK - 1}, the range of this rank"
        )

    def cluster(self, chief: str, others: Mapping[int, str]) -> dict[str, Sequence[str]]:
        """Return the addresses of all tasks by type, as in `TF_CONFIG`.

        Args:
            chief: Address of rank 0.
            others: Addresses of all other ranks.
        """
        cluster: dict[str, list[str]] = {CHIEF: [chief]}
        for rank in range(1, self.num_ranks):
            cluster.setdefault(self.task_of(rank)[0], []).append(others[rank])
        return dict(cluster)


def find_node_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of this node for the other nodes of the step.

    It is the address of the Slurm node name, if that is an address of this machine; otherwise the
    local address of the route to the node on which `srun` runs.

    Raises:
        FailedPreconditionError: If neither is known.
    """
    name = environment.get("SLURMD_NODENAME", "")
    try:
        host = addresses.split(addresses.resolve(name, 1))[0] if name else ""
    except UnavailableError:
        host = ""
    if host and not addresses.is_loopback(host) and addresses.is_local_host(host):
        return host
    launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    try:
        return addresses.local_address_for(addresses.join(launcher, 1))
    except (UnavailableError, ValueError) as error:
        raise FailedPreconditionError(
            f"the address of this node is unknown: neither its name SLURMD_NODENAME={name!r} nor "
            f"SLURM_LAUNCH_NODE_IPADDR={launcher!r} leads to one ({error}); set it with --host"
        ) from error

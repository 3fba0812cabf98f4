"""A strategy that each worker's program creates, without a coordinator: `hr.distribute.v1`.

All programs create the same variables and tables, by name. One of them, the chief, initializes the
variables; the others wait for that. Afterwards all read and write independently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.arguments import check_callable
from headrace.cluster.environment import TFConfigClusterResolver
from headrace.cluster.resolver import ClusterResolver
from headrace.cluster.spec import CHIEF, WORKER, rank, workers
from headrace.data.dataset import Dataset
from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
from headrace.distribute.execution_context import check_cross_replica
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.strategy import Strategy
from headrace.errors import AlreadyExistsError, DeadlineExceededError
from headrace.parameter_server.operations import DescribeStore, StoreDescription
from headrace.parameter_server.server_requests import OperationRequest, ParameterServerClient
from headrace.parameter_server.specs import ShardSpec
from headrace.parameter_server.strategy import ParameterServerStrategy as WithCoordinator
from headrace.parameter_server.variable_shards import InitialValue, PlacedShard, create_shards
from headrace.transport.security import Security
from headrace.waiting import WaitWarningLimiter

__all__ = ["ParameterServerStrategy"]


def __dir__() -> list[str]:
    return list(__all__)


_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class ParameterServerStrategy(WithCoordinator):
    """Variables on parameter servers, for parallel programs without a coordinator.

    Every worker's program (and the chief's, if there is one) creates a strategy, creates the same
    variables and tables in its scope, and trains at its own pace: writes of different workers do
    not wait for each other. This also works for ranks of PyTorch or JAX, which synchronize their
    dense part.

    The chief, or else worker 0, initializes variables. The others wait for that, up to
    `server_timeout`, and log a warning after 10 s. All programs must use the same shape and dtype
    for a name.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=2, processes=False) as cluster:
    ...     spec = cluster.cluster_resolver.cluster_spec()
    ...     resolver = hr.distribute.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    ...     strategy = hr.distribute.v1.ParameterServerStrategy(resolver)
    ...     with strategy.scope():
    ...         step = hr.Variable(0, name="step")
    ...     _ = step.assign_add(1)
    ...     int(step.read())
    ...     strategy.close()
    1

    Args:
        cluster_resolver: Provides the addresses of parameter servers and the task of this program;
            None means `TF_CONFIG`.
        variable_partitioner: As in `hr.distribute.ParameterServerStrategy`; the same in all
            programs.
        placement: "round_robin" or "bytes"; the same in all programs.
        security: Keys of a client of the servers.
        server_timeout: Seconds to wait for servers, and for the initialization of variables.
        replicas: Number of replicas of `run` in this program. Their values for a variable with an
            aggregation become one write.

    Raises:
        ValueError: If the resolver does not name this worker's task, or the cluster is incomplete.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        placement: Any = "round_robin",
        security: Security | None = None,
        server_timeout: float = 120.0,
        replicas: int = 1,
    ) -> None:
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        if isinstance(resolver, ClusterResolver):
            _check_task(resolver)
        super().__init__(
            resolver,
            variable_partitioner,
            placement=placement,
            security=security,
            server_timeout=server_timeout,
            replicas=replicas,
        )
        assert resolver.task_type is not None
        assert resolver.task_id is not None
        self._rank = rank(self._spec, resolver.task_type, resolver.task_id)
        self._is_chief = self._rank == 0

    @property
    def is_chief(self) -> bool:
        """Whether this program initializes variables, and should save checkpoints and summaries."""
        return self._is_chief

    should_checkpoint = should_save_summary = is_chief

    def _create_shards(
        self, name: str, initial: InitialValue, shards: Sequence[PlacedShard]
    ) -> None:
        """Create shards, or wait until the chief has created them.

        Raises:
            AlreadyExistsError: If a variable of this name with another shape or dtype exists.
            DeadlineExceededError: If the chief did not create them in time.
        """
        if self._is_chief:
            create_shards(self._cluster.servers, shards, initial)
        else:
            _wait_for(self._cluster.servers, name, shards)

    def _find_earlier_steps(self) -> None:
        """Do nothing: steps taken by other programs are expected."""

    def _warn_once(self, method: str, instead: str = "merge_call()") -> None:
        """Do not warn: functions that are not scheduled are meant to run in this process."""
        check_cross_replica(self, method, instead)

    # --- input --------------------------------------------------------------------------------

    def distribute_dataset(  # type: ignore[override]
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split each batch among the replicas of this program, which reads all of the dataset.

        Call `dataset.shard(num_shards, index)` first to have each program read a part.
        """
        return Strategy.distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(  # type: ignore[override]
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDatasetsFromFunction:
        """Split among the replicas the dataset that a function creates for this program.

        The function gets an `InputContext` with the number of workers, including the chief, the
        index of this one, and its number of replicas.
        """
        check_callable("dataset_fn", dataset_fn)
        context = InputContext(len(workers(self._spec)), self._rank, self.num_replicas_in_sync)
        return Strategy.distribute_datasets_from_function(
            self, lambda _: dataset_fn(context), options
        )

    experimental_distribute_dataset = distribute_dataset  # type: ignore[assignment]
    experimental_distribute_datasets_from_function = distribute_datasets_from_function  # type: ignore[assignment]


def _check_task(resolver: ClusterResolver) -> None:
    if resolver.task_type not in (CHIEF, WORKER) or resolver.task_id is None:
        raise ValueError(
            "each worker's program creates its own strategy, so the resolver must name the task "
            f'of this program: task_type "{WORKER}" or "{CHIEF}" and a task_id, but got '
            f"{resolver.task_type!r} and {resolver.task_id!r}"
        )


def _wait_for(servers: ParameterServerClient, name: str, shards: Sequence[PlacedShard]) -> None:
    """Wait until the chief has created all shards of a variable."""
    started_at = time.monotonic()
    warnings = WaitWarningLimiter()
    missing = list(shards)
    while True:
        server_indices = sorted({shard.server for shard in missing})
        answers = servers.execute_all(
            [OperationRequest(server, DescribeStore()) for server in server_indices]
        )
        found = {
            each.spec.name: each.spec
            for answer, _ in answers
            if isinstance(answer, StoreDescription)
            for each in answer.shards
        }
        for shard in missing:
            _check_same_shard(found.get(shard.spec.name), shard)
        missing = [shard for shard in missing if shard.spec.name not in found]
        if not missing:
            return
        waited = time.monotonic() - started_at
        if waited > servers.timeout:
            raise DeadlineExceededError(
                f"Variable {name!r} was not created within {waited:.0f} s: the chief (without one, "
                "the first worker) initializes it. Is its program running, and does it create a "
                "variable of this name with the same partitioner?"
            )
        if warnings.should_warn(waited):
            _log.warning(
                "waited %.0f s for the chief (without one, the first worker) to create variable %r",
                waited,
                name,
            )
        servers.sleep(_POLL_SECONDS)


def _check_same_shard(found: ShardSpec | None, shard: PlacedShard) -> None:
    spec = shard.spec
    if found is not None and found != spec:
        raise AlreadyExistsError(
            f"there is a shard {spec.name} of dtype {found.dtype} and shape {found.shape}, but "
            f"this program creates it with dtype {spec.dtype} and shape {spec.shape}: all programs "
            "must create the same variables, with the same partitioner"
        )

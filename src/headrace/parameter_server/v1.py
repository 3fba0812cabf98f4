"""A strategy that each worker's own program makes, without a coordinator: `hr.distribute.v1`.

All programs make the same variables and tables, by name. One of them, the chief, gives variables
their first values; the others wait for that. From then on each reads and writes as it likes.
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
from headrace.distribute.context import check_cross_replica
from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.strategy import Strategy
from headrace.errors import AlreadyExistsError, DeadlineExceededError
from headrace.parameter_server.operations import DescribeStore, StoreDescription
from headrace.parameter_server.server_requests import OperationRequest, ParameterServerClient
from headrace.parameter_server.specs import ShardSpec
from headrace.parameter_server.strategy import ParameterServerStrategy as WithCoordinator
from headrace.parameter_server.variable_shards import InitialValue, PlacedShard, create_shards
from headrace.transport.security import Security
from headrace.waiting import WaitWarnings

__all__ = ["ParameterServerStrategy"]


def __dir__() -> list[str]:
    return list(__all__)


_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class ParameterServerStrategy(WithCoordinator):
    """Variables on parameter servers, for programs that run side by side without a coordinator.

    Every worker's program (and that of the chief, if there is one) makes one, makes the same
    variables and tables in its scope, and trains at its own pace: writes of different workers do
    not wait for each other. So do ranks of PyTorch or JAX, whose dense part is in step.

    The chief, else worker 0, gives variables their first values. The others wait for that, up to
    `server_timeout`, and say so after ten seconds. Under one name there is one shape and one dtype.

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
        cluster_resolver: Says where parameter servers are, and which task this is; None:
            `TF_CONFIG`.
        variable_partitioner: As in `hr.distribute.ParameterServerStrategy`; the same in all
            programs.
        placement: "round_robin" or "bytes"; the same in all programs.
        security: Keys of a client of the servers.
        server_timeout: Seconds for which servers, and first values, are waited for.
        replicas: How many replicas `run` has here. What they bring to a variable with an
            aggregation becomes one write.

    Raises:
        ValueError: The resolver does not say which worker this is, or the cluster is not complete.
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
        """Whether this program gives first values, and is to write checkpoints and summaries."""
        return self._is_chief

    should_checkpoint = should_save_summary = is_chief

    def _create_shards(
        self, name: str, initial: InitialValue, shards: Sequence[PlacedShard]
    ) -> None:
        """Make shards, or wait until the chief has made them.

        Raises:
            AlreadyExistsError: There is a variable of this name with another shape or dtype.
            DeadlineExceededError: The chief did not make it in time.
        """
        if self._is_chief:
            create_shards(self._cluster.servers, shards, initial)
        else:
            _wait_for(self._cluster.servers, name, shards)

    def _find_earlier_steps(self) -> None:
        """Do nothing: steps that other programs took are expected here."""

    def _warn_once(self, method: str, instead: str = "merge_call()") -> None:
        """Say nothing: what is not scheduled runs here, as it should."""
        check_cross_replica(self, method, instead)

    # --- input --------------------------------------------------------------------------------

    def distribute_dataset(  # type: ignore[override]
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Share each batch among the replicas of this program, which reads all of the dataset.

        `dataset.shard(num_shards, index)` before it makes each program read a part.
        """
        return Strategy.distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(  # type: ignore[override]
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDatasetsFromFunction:
        """Have the replicas take elements of the dataset that a function makes for this program.

        It is called with an `InputContext` of all workers, the chief among them, this one's number,
        and the replicas here.
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
            "each worker's program makes this strategy for itself, so the resolver must say which "
            f'task it is: task_type "{WORKER}" or "{CHIEF}" and a task_id, but got '
            f"{resolver.task_type!r} and {resolver.task_id!r}"
        )


def _wait_for(servers: ParameterServerClient, name: str, shards: Sequence[PlacedShard]) -> None:
    """Wait until the chief has made all shards of a variable."""
    began = time.monotonic()
    warnings = WaitWarnings()
    missing = list(shards)
    while True:
        asked = sorted({shard.server for shard in missing})
        answers = servers.execute_all(
            [OperationRequest(server, DescribeStore()) for server in asked]
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
        waited = time.monotonic() - began
        if waited > servers.timeout:
            raise DeadlineExceededError(
                f"Variable {name!r} was waited for for {waited:.0f} s: the chief (without one, the "
                "first worker) gives it its first value. Does its program run, and make a variable "
                "of this name, with the same partitioner?"
            )
        if warnings.is_due(waited):
            _log.warning(
                "waiting for %.0f s for the chief (without one, the first worker) to make the "
                "variable %r",
                waited,
                name,
            )
        servers.sleep(_POLL_SECONDS)


def _check_same_shard(found: ShardSpec | None, shard: PlacedShard) -> None:
    spec = shard.spec
    if found is not None and found != spec:
        raise AlreadyExistsError(
            f"there is a shard {spec.name} of dtype {found.dtype} and shape {found.shape}; "
            f"this program makes it of dtype {spec.dtype} and shape {spec.shape}: all programs "
            "must make the same variables, with the same partitioner"
        )

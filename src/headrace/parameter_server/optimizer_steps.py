"""Optimizer steps: gradients of many variables and tables, pushed to all servers.

1. Each gradient is converted to the form of its variable; duplicate rows are summed, and so are the
  gradients of a worker's replicas.
2. The optimizer checks for non-finite values, and clips.
3. Server 0 counts the step, and returns its number.
4. Every shard gets its part, all in parallel.

If neither the rule nor a schedule depends on the step number, 3 and 4 are one round trip.

Closures whose steps are averaged in gradient rounds only do 1. The coordinator does the rest for
all closures of a round (`ClosureServers.push_round`):

Rule 1. The n-th steps that closures took with one optimizer become one step.
Rule 2. Its gradients are means over the closures that took the step; a closure without a gradient
        for a variable counts as zero.
Rule 3. Sums are computed in the order of the closures, so the same closures give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.execution_context import ReplicaView, current_context
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.parameter_server.cluster_registry import ServerCluster
from headrace.parameter_server.gradients import refuse_non_finite, sum_rows, sum_shared_rows
from headrace.parameter_server.operations import FenceWrites, ForgetWriteKeys
from headrace.parameter_server.optimizer import Optimizer
from headrace.parameter_server.server_requests import (
    OperationReply,
    OperationRequest,
    ParameterServerClient,
    PendingRequests,
)
from headrace.parameter_server.specs import (
    AdamaxRule,
    AdamRule,
    NadamRule,
    OptimizerRule,
    StepParameters,
)
from headrace.parameter_server.write_context import (
    ClosureRun,
    WriteContext,
    current_collecting_context,
    write_as,
)

__all__ = [
    "ClosureServers",
    "Gradient",
    "PendingStep",
    "begin_gradients",
    "mean_steps",
    "push_gradients",
    "push_step",
]


class Gradient(NamedTuple):
    """A gradient: of every element, or of some distinct rows.

    Attributes:
        rows: Rows; None means every element.
        values: One value for each row, or values that rows share.
        value_indices: Index of the value of each row; None means one value per row, in order.
    """

    rows: NDArray[np.int64] | None
    values: NDArray[Any]
    value_indices: NDArray[np.intp] | None = None

    @classmethod
    def from_rows(
        cls, rows: NDArray[np.int64], values: NDArray[Any], value_indices: NDArray[np.intp] | None
    ) -> Gradient:
        """Return the gradient of rows that may contain duplicates; their values are summed.

        Args:
            rows: 1-D, in any order.
            values: One value for each row, or values that rows share.
            value_indices: Index of the value of each row; None means one value per row.
        """
        if value_indices is None:
            return cls(*sum_rows(rows, values))
        return cls(*sum_shared_rows(rows, values, value_indices))

    def expand(self) -> Gradient:
        """Return the gradient with a value for each row."""
        if self.value_indices is None:
            return self
        return Gradient(self.rows, self.values.take(self.value_indices, axis=0))

    def slice_arrays(self, part: slice | NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return some rows in the form in which they are sent.

        These are rows and values, and the index of each row's value if that is smaller.
        """
        assert self.rows is not None
        rows = self.rows[part]
        if self.value_indices is None:
            return [rows, self.values[part]]
        value_indices, values = self.value_indices[part], self.values
        used = np.zeros(len(values), bool)
        used[value_indices] = True
        count = np.count_nonzero(used)
        if 2 * count > len(rows):
            return [rows, values.take(value_indices, axis=0)]
        if 8 * count < 7 * len(values):  # sending a few unused values costs less than renumbering
            values, value_indices = values[used], (np.cumsum(used) - 1)[value_indices]
        return [rows, values, value_indices.astype(np.min_scalar_type(len(values)))]


class OptimizerStep(NamedTuple):
    """A step of an optimizer whose closure does not push it itself."""

    optimizer: Optimizer
    targets: Sequence[TrainableTarget]
    gradients: Sequence[Gradient]


class TrainableTarget(Protocol):
    """A variable or table on parameter servers, which an optimizer can change."""

    name: str
    #: Whether a push needs the step number, whatever the rule.
    needs_step_number: bool

    @property
    def cluster(self) -> ServerCluster:
        """Cluster of its servers."""

    def convert_gradient(self, gradient: Any) -> Gradient:
        """Convert a gradient given by the user to the form of the target."""

    def step_requests(
        self, optimizer: str, rule: OptimizerRule, step: StepParameters, gradient: Gradient
    ) -> list[OperationRequest]:
        """Return the requests of one step."""


def push_gradients(optimizer: Optimizer, pairs: Sequence[tuple[Any, Any]]) -> int:
    """Apply one step; return the number of steps that the optimizer has taken.

    Args:
        optimizer: The optimizer.
        pairs: Pairs of a gradient and a variable or table.

    Raises:
        TypeError: If a target is neither a variable nor a table.
        ValueError: If a target occurs twice, or the targets are in several clusters.
    """
    step = _build_step(optimizer, pairs)
    context = current_collecting_context()

    def take(step: OptimizerStep) -> int:
        return push_step(step) if context is None else _collect(step, context)

    replica = current_context.get()
    if not isinstance(replica, ReplicaView) or replica.strategy.num_replicas_in_sync == 1:
        return take(step)

    def merge(steps: list[OptimizerStep]) -> list[int]:
        names = sorted({each.optimizer.name for each in steps})
        if len(names) > 1:
            raise FailedPreconditionError(
                f"all replicas must take a step with the same optimizer, but got {', '.join(names)}"
            )
        return [take(sum_steps(steps, "replicas"))] * len(steps)

    taken: int = replica.merge(merge, step)  # type: ignore[attr-defined]
    return taken


def begin_gradients(optimizer: Optimizer, pairs: Sequence[tuple[Any, Any]]) -> PendingStep:
    """Begin one step in which no other replica takes part; see `push_gradients`."""
    return begin_step(_build_step(optimizer, pairs))


def _build_step(optimizer: Optimizer, pairs: Sequence[tuple[Any, Any]]) -> OptimizerStep:
    targets = [_check_target(variable) for _, variable in pairs]
    if len({id(target) for target in targets}) < len(targets):
        names = [target.name for target in targets]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"{', '.join(duplicates)} has several gradients in one step; add them first"
        )
    clusters = {id(target.cluster): target.cluster for target in targets}
    if len(clusters) > 1:
        raise ValueError(
            f"the variables of one step must be in one cluster, but are in {len(clusters)} clusters"
        )
    gradients = [
        target.convert_gradient(gradient)
        for target, (gradient, _) in zip(targets, pairs, strict=True)
    ]
    if optimizer.rule.ema_momentum is not None:
        _reject_sparse_gradients(optimizer, targets, gradients)
    optimizer.begin_step_in(
        targets[0].cluster,
        [target.name for target in targets],
        counts=_depends_on_step_number(optimizer, targets),
    )
    return OptimizerStep(optimizer, targets, gradients)


def _reject_sparse_gradients(
    optimizer: Optimizer, targets: Sequence[TrainableTarget], gradients: Sequence[Gradient]
) -> None:
    """Reject gradients of some rows: the averages of all other rows would become stale."""
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient.rows is not None:
            raise InvalidArgumentError(
                f"optimizer {optimizer.name!r} has use_ema=True, which needs dense gradients, but "
                f"the gradient of {target.name} is sparse: make it dense, or train {target.name} "
                "with an optimizer without use_ema"
            )


def _depends_on_step_number(optimizer: Optimizer, targets: Sequence[TrainableTarget]) -> bool:
    """Return whether a step depends on the number of earlier steps."""
    return (
        callable(optimizer.learning_rate)
        or isinstance(optimizer.rule, AdamRule | AdamaxRule | NadamRule)
        or optimizer.rule.ema_overwrite_frequency is not None
        or any(target.needs_step_number for target in targets)
    )


def _check_target(target: Any) -> TrainableTarget:
    if not hasattr(target, "step_requests"):
        raise TypeError(
            "an optimizer updates variables and tables on parameter servers, but got a "
            f"{type(target).__name__}; create it in the scope of a ParameterServerStrategy"
        )
    found: TrainableTarget = target
    return found


def sum_steps(steps: Sequence[OptimizerStep], members: str) -> OptimizerStep:
    """Return one step with the sums of the gradients; a missing gradient counts as zero.

    Args:
        steps: Steps of one optimizer.
        members: Description of those who took them, for errors.

    Raises:
        FailedPreconditionError: If the gradients of a variable are partly dense and partly sparse.
    """
    parts: dict[int, tuple[TrainableTarget, list[Gradient]]] = {}
    for step in steps:
        for target, gradient in zip(step.targets, step.gradients, strict=True):
            parts.setdefault(id(target), (target, []))[1].append(gradient)
    targets = [target for target, _ in parts.values()]
    sums = [_sum_gradients(gradients, members) for _, gradients in parts.values()]
    return OptimizerStep(steps[0].optimizer, targets, sums)


def _sum_gradients(gradients: Sequence[Gradient], members: str) -> Gradient:
    if any(gradient.rows is None for gradient in gradients):
        if not all(gradient.rows is None for gradient in gradients):
            raise FailedPreconditionError(
                f"some {members} have a dense gradient and some a sparse one for one variable"
            )
        return Gradient(None, np.sum([gradient.values for gradient in gradients], axis=0))
    rows = np.concatenate([gradient.rows for gradient in gradients if gradient.rows is not None])
    values = np.concatenate([gradient.expand().values for gradient in gradients])
    return Gradient(*sum_rows(rows, values))


def _collect(step: OptimizerStep, context: WriteContext) -> int:
    """Keep a step for the mean of its gradient round; return the step count including it."""
    optimizer, targets, gradients = step
    counter = optimizer.counter_in(targets[0].cluster)
    if optimizer.non_finite == "raise":  # in the mean, its origin would be unknown
        refuse_non_finite(
            [target.name for target in targets], [gradient.values for gradient in gradients]
        )
    # The user may overwrite the arrays.
    kept = [each._replace(values=np.array(each.values)) for each in gradients]
    context.collect_step(step._replace(gradients=kept))
    taken = [each for each in context.collected_steps if each.optimizer.name == optimizer.name]
    return counter() + len(taken)


class PendingStep:
    """A step sent to the servers; in a closure it belongs to the run until that ends.

    Args:
        requests: Requests of the step; None if there are none.
        taken: Returns the number of steps taken, from the replies.

    Attributes:
        owner: Object that began the step, and waits for it if several are pending.
        calls: Calls to the servers while the step is pending.
        is_awaited: Whether a caller is waiting for it now.
        is_done: Whether its replies or an error have arrived.
    """

    def __init__(
        self, requests: PendingRequests | None, taken: Callable[[Sequence[OperationReply]], int]
    ) -> None:
        self.owner: object = None
        self.calls = [] if requests is None else requests.calls
        self.is_awaited: bool = False
        self.is_done: bool = requests is None
        self._requests = requests
        self._taken = taken
        self._answers: Sequence[OperationReply] = ()
        self._error: Exception | None = None

    def precedes_new_requests(self, servers: ParameterServerClient) -> bool:
        """Return whether requests sent now on the same channels are executed after this step."""
        return self._requests is None or self._requests.precedes_new_requests(servers)

    def wait(self) -> None:
        """Wait until the step is done."""
        if self.is_done or self._requests is None:
            return
        self.is_awaited = True
        try:
            self._answers = self._requests.wait()
        except Exception as error:
            self._error = error.with_traceback(None)  # drops a reference to this frame
        finally:
            self.is_awaited = False
        self.is_done = True
        self._requests, self.calls = None, []  # the gradients are no longer needed

    def result(self) -> int:
        """Return the number of steps taken, including this one.

        Raises:
            HeadraceError: As for `ParameterServerClient.execute_all`.
        """
        self.wait()
        error, self._error = self._error, None
        if error is None:
            return self._taken(self._answers)
        try:
            raise error
        finally:
            del error  # breaks the cycle between the traceback and this frame


def push_step(step: OptimizerStep) -> int:
    """Apply a step on all servers; return the number of steps taken."""
    return begin_step(step).result()


def begin_step(step: OptimizerStep) -> PendingStep:
    """Send a step to all servers without waiting for the replies.

    If the step number is needed, wait for it first.
    """
    optimizer, targets, gradients = step
    cluster = targets[0].cluster
    counter = optimizer.counter_in(cluster)
    if optimizer.clips_by_norm:  # a shared value counts once for each of its rows
        gradients = [gradient.expand() for gradient in gradients]
    values = optimizer.prepare(
        [target.name for target in targets], [gradient.values for gradient in gradients]
    )
    if values is None:
        skipped = counter()
        return PendingStep(None, lambda _: skipped)
    gradients = [
        gradient._replace(values=value) for gradient, value in zip(gradients, values, strict=True)
    ]
    servers = cluster.servers
    count_request = counter.increment_request(cluster)
    if _depends_on_step_number(optimizer, targets):
        counted = counter.record_count(cluster, servers.execute_all([count_request])[0][0])
        parameters = StepParameters(
            iteration=counted.before, learning_rate=optimizer.rate(counted.before)
        )
        requests = _step_requests(optimizer, parameters, targets, gradients)
        return PendingStep(servers.begin_all(requests), lambda _: counted.after)
    parameters = StepParameters(iteration=0, learning_rate=optimizer.rate(0))
    requests = [count_request, *_step_requests(optimizer, parameters, targets, gradients)]
    return PendingStep(
        servers.begin_all(requests),
        lambda answers: counter.record_count(cluster, answers[0][0]).after,
    )


def _step_requests(
    optimizer: Optimizer,
    step: StepParameters,
    targets: Sequence[TrainableTarget],
    gradients: Sequence[Gradient],
) -> list[OperationRequest]:
    return [
        request
        for target, gradient in zip(targets, gradients, strict=True)
        for request in target.step_requests(
            optimizer.name, optimizer.rule_for(target.name), step, gradient
        )
    ]


# --- gradient rounds of closures ------------------------------------------------------------------

_FIRST_ROUND_WRITE = 1 << 32
"""First write number of a round: larger than those of its last closure, whose key it has."""


def mean_steps(closures: Sequence[Sequence[OptimizerStep]]) -> list[OptimizerStep]:
    """Return the mean steps of a round, in order of first occurrence.

    Args:
        closures: The steps that each closure took, in order.

    Raises:
        FailedPreconditionError: If the gradients of a variable are partly dense and partly sparse.
    """
    steps: dict[tuple[str, int], list[OptimizerStep]] = {}
    for taken in closures:
        counts: dict[str, int] = {}
        for step in taken:
            name = step.optimizer.name
            occurrence = counts[name] = counts.get(name, -1) + 1
            steps.setdefault((name, occurrence), []).append(step)
    return [_mean_step(each) for each in steps.values()]


def _mean_step(steps: Sequence[OptimizerStep]) -> OptimizerStep:
    total = sum_steps(steps, "functions of a gradient round")
    count = len(steps)
    return total._replace(
        gradients=[
            each._replace(values=each.values / each.values.dtype.type(count))
            for each in total.gradients
        ]
    )


class ClosureServers:
    """The parameter servers as the closures of one coordinator use them.

    Creating it fences all earlier coordinators; restarted servers are fenced again.

    Args:
        servers: Client of the cluster's servers.
        coordinator_term: Term of the coordinator; later terms are larger.

    Attributes:
        servers: Client of the cluster's servers.

    Raises:
        UnavailableError: If a server is unreachable.
    """

    def __init__(self, servers: ParameterServerClient, coordinator_term: int) -> None:
        self.servers = servers
        self._coordinator_term = coordinator_term
        servers.execute_on_each(FenceWrites(coordinator_term))
        servers.states.on_restart(
            lambda server: servers.execute(server, FenceWrites(coordinator_term))
        )

    def forget_write_keys(self, closures: Sequence[int], below: int) -> None:
        """Make all servers forget the write keys of finished closures.

        Args:
            closures: Numbers of the closures.
            below: All closures with smaller numbers are finished as well.
        """
        self.servers.execute_on_each(
            ForgetWriteKeys(self._coordinator_term, tuple(closures), below)
        )

    def fence(self, worker_session: int) -> None:
        """Make all servers refuse late writes of a worker session."""
        self.servers.execute_on_each(FenceWrites(self._coordinator_term, worker_session))

    def push_round(self, last: int, closures: Sequence[Sequence[OptimizerStep]]) -> None:
        """Push the mean of the steps of a round; each server applies each step once.

        Args:
            last: Number of the last closure; the keys of none have been forgotten.
            closures: The steps of each closure.
        """
        # No worker has session 0, so these writes are never fenced.
        with write_as(
            ClosureRun(
                self._coordinator_term,
                last,
                worker_session=0,
                first_write_number=_FIRST_ROUND_WRITE,
            )
        ):
            for step in mean_steps(closures):
                push_step(step)

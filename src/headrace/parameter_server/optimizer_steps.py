"""Steps of optimizers: gradients of many variables and tables, pushed to all servers.

    1. each gradient is brought into the form of its variable; rows that stand there twice are
       summed, and so are the gradients of a worker's replicas
    2. the optimizer looks for what is not finite, and clips
    3. server 0 counts the step, and says which it is
    4. every shard gets its part, all at a time

Where neither the rule nor a schedule asks which step it is, 3 and 4 are one round trip.

Closures whose steps are gathered in rounds do 1 alone. The coordinator does the rest for all
closures of a round (`ClosureServers.push_round`):

Rule 1. The n-th steps that closures took with one optimizer become one step.
Rule 2. Its gradients are means over the closures that took the step; where one of them has none for
        a variable, it counts as zero.
Rule 3. Sums are made in the order in which closures are given, so that the same closures give the
        same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.context import OnReplica, here
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
    """A gradient: of every element, or of some rows, each named once.

    Attributes:
        rows: Which rows; None: every element.
        values: One for each row, or what rows share.
        value_indices: Which of the values each row has; None: each has its own, in order.
    """

    rows: NDArray[np.int64] | None
    values: NDArray[Any]
    value_indices: NDArray[np.intp] | None = None

    @classmethod
    def from_rows(
        cls, rows: NDArray[np.int64], values: NDArray[Any], value_indices: NDArray[np.intp] | None
    ) -> Gradient:
        """Return the gradient of rows that may be named several times: those are summed.

        Args:
            rows: 1-D, in any order.
            values: A value for each; or what they share.
            value_indices: Which of the values each row has; None: each has its own.
        """
        if value_indices is None:
            return cls(*sum_rows(rows, values))
        return cls(*sum_shared_rows(rows, values, value_indices))

    def expand(self) -> Gradient:
        """Return it with a value for each row."""
        if self.value_indices is None:
            return self
        return Gradient(self.rows, self.values.take(self.value_indices, axis=0))

    def slice_arrays(self, part: slice | NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return some rows as they are sent: rows and values, and which, where that is shorter."""
        assert self.rows is not None
        rows = self.rows[part]
        if self.value_indices is None:
            return [rows, self.values[part]]
        which, values = self.value_indices[part], self.values
        used = np.zeros(len(values), bool)
        used[which] = True
        count = np.count_nonzero(used)
        if 2 * count > len(rows):
            return [rows, values.take(which, axis=0)]
        if 8 * count < 7 * len(values):  # to send a few for nobody is less than to number anew
            values, which = values[used], (np.cumsum(used) - 1)[which]
        return [rows, values, which.astype(np.min_scalar_type(len(values)))]


class OptimizerStep(NamedTuple):
    """One step of an optimizer, as it was taken in a closure that pushes nothing itself."""

    optimizer: Optimizer
    targets: Sequence[TrainableTarget]
    gradients: Sequence[Gradient]


class TrainableTarget(Protocol):
    """What an optimizer can change: a variable or table on parameter servers."""

    name: str
    #: Whether a push has to say which step it is, whatever the rule.
    needs_step_number: bool

    @property
    def cluster(self) -> ServerCluster:
        """Where it is."""

    def convert_gradient(self, gradient: Any) -> Gradient:
        """Bring what a user gave into the form that fits."""

    def step_requests(
        self, optimizer: str, rule: OptimizerRule, step: StepParameters, gradient: Gradient
    ) -> list[OperationRequest]:
        """Return what is to be asked of which server."""


def push_gradients(optimizer: Optimizer, pairs: Sequence[tuple[Any, Any]]) -> int:
    """Take one step; return how many have been taken with it.

    Args:
        optimizer: Says what a gradient does.
        pairs: Of a gradient and a variable or table.

    Raises:
        TypeError: One is neither.
        ValueError: One stands there twice, or they are of several clusters.
    """
    step = _build_step(optimizer, pairs)
    attempt = current_collecting_context()

    def take(step: OptimizerStep) -> int:
        return push_step(step) if attempt is None else _collect(step, attempt)

    place = here.get()
    if not isinstance(place, OnReplica) or place.strategy.num_replicas_in_sync == 1:
        return take(step)

    def merged(steps: list[OptimizerStep]) -> list[int]:
        names = sorted({each.optimizer.name for each in steps})
        if len(names) > 1:
            raise FailedPreconditionError(
                f"replicas take one step together, but here with several optimizers: "
                f"{', '.join(names)}; have all of them call the same one"
            )
        return [take(sum_steps(steps, "replicas"))] * len(steps)

    taken: int = place.meet(merged, step)  # type: ignore[attr-defined]
    return taken


def begin_gradients(optimizer: Optimizer, pairs: Sequence[tuple[Any, Any]]) -> PendingStep:
    """Begin one step, where nobody else takes part in it; see `push_gradients`."""
    return begin_step(_build_step(optimizer, pairs))


def _build_step(optimizer: Optimizer, pairs: Sequence[tuple[Any, Any]]) -> OptimizerStep:
    targets = [_check_target(variable) for _, variable in pairs]
    if len({id(target) for target in targets}) < len(targets):
        names = [target.name for target in targets]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} has several gradients in one step; add them first")
    clusters = {id(target.cluster): target.cluster for target in targets}
    if len(clusters) > 1:
        raise ValueError("the variables of one step must be in one cluster, and are in several")
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
    """Refuse gradients of some rows, which would leave the averages of all others behind."""
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient.rows is not None:
            raise InvalidArgumentError(
                f"optimizer {optimizer.name!r} has use_ema=True and averages whole variables, but "
                f"the gradient of {target.name} is of single rows: make it dense, or train "
                f"{target.name} by an optimizer without use_ema"
            )


def _depends_on_step_number(optimizer: Optimizer, targets: Sequence[TrainableTarget]) -> bool:
    """Return whether a step depends on how many were taken before."""
    return (
        callable(optimizer.learning_rate)
        or isinstance(optimizer.rule, AdamRule | AdamaxRule | NadamRule)
        or optimizer.rule.ema_overwrite_frequency is not None
        or any(target.needs_step_number for target in targets)
    )


def _check_target(target: Any) -> TrainableTarget:
    if not hasattr(target, "step_requests"):
        raise TypeError(
            "an optimizer changes variables and tables on parameter servers, but got a "
            f"{type(target).__name__}; make it in the scope of a ParameterServerStrategy"
        )
    found: TrainableTarget = target
    return found


def sum_steps(steps: Sequence[OptimizerStep], among: str) -> OptimizerStep:
    """Return one step for several, with the sums of gradients; one that lacks any counts as zero.

    Args:
        steps: Of one optimizer.
        among: Who took them, for errors.

    Raises:
        FailedPreconditionError: Some are dense and some are not, for one variable.
    """
    parts: dict[int, tuple[TrainableTarget, list[Gradient]]] = {}
    for step in steps:
        for target, gradient in zip(step.targets, step.gradients, strict=True):
            parts.setdefault(id(target), (target, []))[1].append(gradient)
    targets = [target for target, _ in parts.values()]
    sums = [_sum_gradients(gradients, among) for _, gradients in parts.values()]
    return OptimizerStep(steps[0].optimizer, targets, sums)


def _sum_gradients(gradients: Sequence[Gradient], among: str) -> Gradient:
    if any(gradient.rows is None for gradient in gradients):
        if not all(gradient.rows is None for gradient in gradients):
            raise FailedPreconditionError(
                f"some {among} have a dense gradient and some a sparse one for one variable"
            )
        return Gradient(None, np.sum([gradient.values for gradient in gradients], axis=0))
    rows = np.concatenate([gradient.rows for gradient in gradients if gradient.rows is not None])
    values = np.concatenate([gradient.expand().values for gradient in gradients])
    return Gradient(*sum_rows(rows, values))


def _collect(step: OptimizerStep, context: WriteContext) -> int:
    """Keep a step for the mean of its round; return how many will have been taken with it."""
    optimizer, targets, gradients = step
    count = optimizer.counter_in(targets[0].cluster)
    if optimizer.non_finite == "raise":  # of the mean nobody could say whose it was
        refuse_non_finite(
            [target.name for target in targets], [gradient.values for gradient in gradients]
        )
    # A user may go on to write into what was given.
    kept = [each._replace(values=np.array(each.values)) for each in gradients]
    context.collect_step(step._replace(gradients=kept))
    taken = [each for each in context.collected_steps if each.optimizer.name == optimizer.name]
    return count() + len(taken)


class PendingStep:
    """A step that all servers were asked for; of a closure it is the attempt's until it ends.

    Args:
        requests: What they were asked; None: nothing.
        taken: Returns how many steps have been taken with it, of the answers.

    Attributes:
        owner: Who began it, and waits for it where several are under way.
        calls: What its servers were asked, as long as it is not over.
        is_awaited: Whether somebody waits for it now.
        is_done: Whether its answers are here, or an error.
    """

    def __init__(
        self, requests: PendingRequests | None, taken: Callable[[Sequence[OperationReply]], int]
    ) -> None:
        self.owner: object = None
        self.calls = [] if requests is None else requests.calls
        self.is_awaited = False
        self.is_done = requests is None
        self._requests = requests
        self._taken = taken
        self._answers: Sequence[OperationReply] = ()
        self._error: Exception | None = None

    def precedes_new_requests(self, servers: ParameterServerClient) -> bool:
        """Whether what is sent now by the same servers' channels comes after it."""
        return self._requests is None or self._requests.precedes_new_requests(servers)

    def wait(self) -> None:
        """Wait until it is over."""
        if self.is_done or self._requests is None:
            return
        self.is_awaited = True
        try:
            self._answers = self._requests.wait()
        except Exception as error:
            self._error = error.with_traceback(None)  # which holds this frame, and so the step
        finally:
            self.is_awaited = False
        self.is_done = True
        self._requests, self.calls = None, []  # nobody needs the gradients any more

    def result(self) -> int:
        """Return how many steps have been taken with it.

        Raises:
            HeadraceError: As of `ParameterServerClient.execute_all`.
        """
        self.wait()
        error, self._error = self._error, None
        if error is None:
            return self._taken(self._answers)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, which would hold it


def push_step(step: OptimizerStep) -> int:
    """Take a step now, on all servers; return how many have been taken with it."""
    return begin_step(step).result()


def begin_step(step: OptimizerStep) -> PendingStep:
    """Ask all servers for a step, and do not wait for them.

    Where the servers must say first which step it is, that is waited for.
    """
    optimizer, targets, gradients = step
    cluster = targets[0].cluster
    count = optimizer.counter_in(cluster)
    if optimizer.clips_by_norm:  # in which a value counts as often as there are rows that share it
        gradients = [gradient.expand() for gradient in gradients]
    values = optimizer.prepare(
        [target.name for target in targets], [gradient.values for gradient in gradients]
    )
    if values is None:
        skipped = count()
        return PendingStep(None, lambda _: skipped)
    gradients = [
        gradient._replace(values=value) for gradient, value in zip(gradients, values, strict=True)
    ]
    servers = cluster.servers
    counting = count.increment_request(cluster)
    if _depends_on_step_number(optimizer, targets):
        counted = count.record_count(cluster, servers.execute_all([counting])[0][0])
        number = StepParameters(
            iteration=counted.before, learning_rate=optimizer.rate(counted.before)
        )
        asks = _step_requests(optimizer, number, targets, gradients)
        return PendingStep(servers.begin_all(asks), lambda _: counted.after)
    number = StepParameters(iteration=0, learning_rate=optimizer.rate(0))
    asks = [counting, *_step_requests(optimizer, number, targets, gradients)]
    return PendingStep(
        servers.begin_all(asks), lambda answers: count.record_count(cluster, answers[0][0]).after
    )


def _step_requests(
    optimizer: Optimizer,
    step: StepParameters,
    targets: Sequence[TrainableTarget],
    gradients: Sequence[Gradient],
) -> list[OperationRequest]:
    return [
        ask
        for target, gradient in zip(targets, gradients, strict=True)
        for ask in target.step_requests(
            optimizer.name, optimizer.rule_for(target.name), step, gradient
        )
    ]


# --- rounds of closures ---------------------------------------------------------------------------

_FIRST_ROUND_WRITE = 1 << 32
"""Keys of a round are those of its last closure, beyond all that a function writes itself."""


def mean_steps(closures: Sequence[Sequence[OptimizerStep]]) -> list[OptimizerStep]:
    """Return the steps of a round, in the order in which they first occur.

    Args:
        closures: The steps that each closure took, in their order.

    Raises:
        FailedPreconditionError: Some have a dense gradient and some a sparse one for a variable.
    """
    steps: dict[tuple[str, int], list[OptimizerStep]] = {}
    for taken in closures:
        counts: dict[str, int] = {}
        for step in taken:
            name = step.optimizer.name
            place = counts[name] = counts.get(name, -1) + 1
            steps.setdefault((name, place), []).append(step)
    return [_mean_step(each) for each in steps.values()]


def _mean_step(steps: Sequence[OptimizerStep]) -> OptimizerStep:
    total = sum_steps(steps, "functions of a round")
    count = len(steps)
    return total._replace(
        gradients=[
            each._replace(values=each.values / each.values.dtype.type(count))
            for each in total.gradients
        ]
    )


class ClosureServers:
    """The parameter servers, as far as the closures of one coordinator go.

    Making it fences all earlier coordinators; a server that comes back is told again.

    Args:
        servers: Those of the cluster.
        coordinator_term: Of the coordinator; a later one's is larger.

    Attributes:
        servers: Likewise.

    Raises:
        UnavailableError: A server cannot be reached.
    """

    def __init__(self, servers: ParameterServerClient, coordinator_term: int) -> None:
        self.servers = servers
        self._coordinator_term = coordinator_term
        servers.execute_on_each(FenceWrites(coordinator_term))
        servers.states.on_restart(
            lambda server: servers.execute(server, FenceWrites(coordinator_term))
        )

    def forget_write_keys(self, closures: Sequence[int], below: int) -> None:
        """Have all servers forget the keys of closures that have ended.

        Args:
            closures: Their numbers.
            below: All below this one have, too.
        """
        self.servers.execute_on_each(
            ForgetWriteKeys(self._coordinator_term, tuple(closures), below)
        )

    def fence(self, worker_session: int) -> None:
        """Have all servers refuse what a life of a worker still writes."""
        self.servers.execute_on_each(FenceWrites(self._coordinator_term, worker_session))

    def push_round(self, last: int, closures: Sequence[Sequence[OptimizerStep]]) -> None:
        """Push the mean of the steps of a round; a server carries out each step once.

        Args:
            last: Number of the last of them; none of them has been settled.
            closures: The steps of each.
        """
        # No worker has number 0, so nobody fences this one.
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

"""Base of all optimizers: name, rule, learning rate, clipping and step counter.

    optimizer.rule_for(name)        sent with each push and executed by `rules`
    optimizer.rate(iteration)       the client evaluates schedules
    optimizer.prepare(names, ...)   clipped gradients, or None if the step is skipped

`apply_gradients` calls `push_gradients` of the first variable: variables know their servers,
optimizers do not. `OptimizerStepCounter` reads and advances the step counter on a server.
`InBackground` pushes the steps of an optimizer while the training loop continues:

    background = InBackground(optimizer, in_flight=2)
    background.apply_gradients(pairs)    # returns at once, unless two steps are in flight
    background.flush()                   # all steps are on the servers
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.argument_names import explain_unknown_options
from headrace.arguments import check_flag, check_instance, check_int, check_string
from headrace.distribute.current_strategy import get_strategy
from headrace.distribute.execution_context import ReplicaView, current_context
from headrace.errors import FailedPreconditionError
from headrace.parameter_server.cluster_registry import (
    BackgroundTask,
    ServerCluster,
    find_cluster,
    naming_clusters,
    registered_cluster_ids,
)
from headrace.parameter_server.gradients import (
    NonFinite,
    clip_by_norm,
    clip_by_value,
    is_finite,
    refuse_non_finite,
)
from headrace.parameter_server.operations import Answer, Counted, IncrementCounter
from headrace.parameter_server.server_requests import OperationRequest
from headrace.parameter_server.specs import OptimizerRule
from headrace.parameter_server.write_context import (
    WriteContext,
    current_background_context,
    current_closure_run,
    next_key,
)

if TYPE_CHECKING:  # it imports this module
    from headrace.parameter_server.optimizer_steps import PendingStep

__all__ = [
    "COUNTING_SERVER",
    "InBackground",
    "Optimizer",
    "OptimizerOptions",
    "OptimizerOptionsWithoutDecay",
    "OptimizerStepCounter",
    "Rate",
    "can_write_in_background",
    "check_number",
    "counter_values",
    "step_counts",
]


COUNTING_SERVER = 0
"""Index of the server that counts steps."""

_SUFFIX = "/iterations"


def step_counts(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the step counts of optimizers among the counters of a server, by optimizer name."""
    return {
        name.removesuffix(_SUFFIX): count
        for name, count in counters.items()
        if name.endswith(_SUFFIX)
    }


def counter_values(steps: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of a server for the step counts of optimizers."""
    return {f"{name}{_SUFFIX}": count for name, count in steps.items()}


class OptimizerStepCounter:
    """Step counter of all optimizers of one name in one cluster; a handle.

    Args:
        cluster_id: Id of the cluster.
        optimizer: Name of the optimizer.
    """

    def __init__(self, cluster_id: str, optimizer: str) -> None:
        self._cluster_id = cluster_id
        self.name: str = f"{optimizer}{_SUFFIX}"

    def __call__(self) -> int:
        """Return the current count from the server."""
        cluster = find_cluster(self._cluster_id, f"the counter {self.name!r}")
        seen = cluster.counters.get(self.name, 0)
        answer, _ = cluster.servers.execute(
            COUNTING_SERVER, IncrementCounter(self.name, 0, last_seen=seen)
        )
        return self.record_count(cluster, answer).after

    def advance(self, cluster: ServerCluster, steps: int) -> None:
        """Add a number of steps to the counter."""
        operation = IncrementCounter(
            self.name, steps, next_key(self.name), cluster.counters.get(self.name, 0)
        )
        answer, _ = cluster.servers.execute(COUNTING_SERVER, operation)
        self.record_count(cluster, answer)

    def increment_request(self, cluster: ServerCluster) -> OperationRequest:
        """Return the request that counts one more step."""
        seen = cluster.counters.get(self.name, 0)
        return OperationRequest(
            COUNTING_SERVER, IncrementCounter(self.name, 1, next_key(self.name), seen)
        )

    def record_count(self, cluster: ServerCluster, answer: Answer) -> Counted:
        """Record the count in an answer, and return the answer."""
        assert isinstance(answer, Counted)
        cluster.counters[self.name] = answer.after
        return answer


Rate: TypeAlias = float | Callable[[int], float]


class OptimizerOptionsWithoutDecay(TypedDict, total=False):
    """Arguments of all optimizers except weight decay; see `Optimizer`."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    name: str | None
    non_finite: NonFinite
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None


class OptimizerOptions(OptimizerOptionsWithoutDecay, total=False):
    """Arguments of all optimizers; see `Optimizer`."""

    weight_decay: float | None


_IN_FUNCTIONS = "_in_functions"
"""Suffix of the name of an unnamed optimizer that a scheduled function created."""

_naming = threading.Lock()


@explain_unknown_options
class Optimizer:
    """Base class of all optimizers: a learning rate, decay, clipping.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         weights = hr.Variable([1.0, 2.0], name="weights")
    ...     step = hr.optimizers.SGD(0.5).apply_gradients([([1.0, -1.0], weights)])
    ...     weights.read().tolist()
    ...     strategy.close()
    [0.5, 2.5]

    Args:
        rule: Update rule, applied by the servers.
        learning_rate: A number, or a function of the step (`schedules`).
        weight_decay: Fraction of a value that each step subtracts, times the learning rate.
        clipnorm: Largest norm of the gradient of one variable.
        clipvalue: Largest absolute value of a gradient's elements.
        global_clipnorm: Largest norm of all gradients of a step together.
        name: Name of its slots and its step counter on the servers; handles with the same name and
            class share them, even in different processes. None gives each handle its own, named
            after its class ("Adam", then "Adam_1" ...) in order of creation, or of first use if it
            was created before the strategy. In scheduled functions, which create the handle again
            in each call, all unnamed handles of a class share one name.
        non_finite: What to do when a gradient contains a NaN or an infinity: "raise" before
            anything is applied, "skip" the step of all variables, or "apply" it.
        use_ema: Whether the servers keep an exponential moving average of each variable, in a slot
            "average" (`variable.read_slot`). Gradients must be dense.
        ema_momentum: Between 0 and 1: fraction of the average that each step keeps.
        ema_overwrite_frequency: Interval, in steps, at which variables are set to their averages.
            None disables that.
    """

    def __init__(
        self,
        rule: OptimizerRule,
        learning_rate: Rate,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        non_finite: NonFinite = "raise",
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
    ) -> None:
        if not callable(learning_rate):
            check_number("learning_rate", learning_rate)
        if weight_decay is not None:
            check_number("weight_decay", weight_decay)
            rule = msgspec.structs.replace(rule, weight_decay=weight_decay)
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        for argument, value in clips.items():
            if value is not None:
                check_number(argument, value)
        if sum(value is not None for value in clips.values()) > 1:
            raise ValueError(
                "only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set, but got "
                + ", ".join(f"{name}={value}" for name, value in clips.items())
            )
        if non_finite not in get_args(NonFinite):
            raise ValueError(
                f"`non_finite` must be one of {', '.join(get_args(NonFinite))}, "
                f"but got {non_finite!r}"
            )
        if name is not None:
            check_string("name", name, empty=False)
        check_flag("use_ema", use_ema, or_none=False)
        check_number("ema_momentum", ema_momentum, maximum=1.0)
        if ema_overwrite_frequency is not None:
            check_int("ema_overwrite_frequency", ema_overwrite_frequency, minimum=1)
        if use_ema:
            rule = msgspec.structs.replace(
                rule, ema_momentum=ema_momentum, ema_overwrite_frequency=ema_overwrite_frequency
            )
        self._given_name = name
        #: Generated names, by cluster id.
        self._names: dict[str, str] = {}
        #: Id of the cluster in which it was named or used last.
        self._home: str | None = None
        # NumPy scalars cannot be serialized.
        numbers = {name: getattr(rule, name) for name in rule.__struct_fields__}
        self.rule: OptimizerRule = msgspec.structs.replace(
            rule, **{k: v.item() for k, v in numbers.items() if isinstance(v, np.generic)}
        )
        self._rule_without_decay = msgspec.structs.replace(self.rule, weight_decay=None)
        self._excluded: frozenset[str] = frozenset()
        self._excluded_pattern: str | None = None
        self.learning_rate = learning_rate
        self.clipnorm = clipnorm
        self.clipvalue = clipvalue
        self.global_clipnorm = global_clipnorm
        self.non_finite = non_finite
        scope_cluster = getattr(get_strategy(), "cluster", None)
        clusters = naming_clusters() if scope_cluster is None else [scope_cluster]
        if len(clusters) == 1 and current_closure_run() is None:
            self.name_in(clusters[0])

    @property
    def name(self) -> str:
        """Name of its slots and step counter; the class name until a cluster has assigned one."""
        if self._given_name is not None:
            return self._given_name
        return self._names.get(self._home or "", type(self).__name__)

    def name_in(self, cluster: ServerCluster) -> str:
        """Return the name in a cluster; assign one to an unnamed handle.

        Raises:
            ValueError: If an optimizer of another class has this name there.
        """
        self._home = cluster.cluster_id
        kind = type(self).__name__
        if self._given_name is not None:
            if cluster.optimizers.assigns_numbers:
                cluster.optimizers.claim_name(self._given_name, kind)
            return self._given_name
        with _naming:
            name = self._names.get(cluster.cluster_id)
            if name is None:
                is_numbered = cluster.optimizers.assigns_numbers and current_closure_run() is None
                name = cluster.optimizers.assign_name(kind) if is_numbered else kind + _IN_FUNCTIONS
                self._names[cluster.cluster_id] = name
        return name

    def counter_in(self, cluster: ServerCluster) -> OptimizerStepCounter:
        """Return the step counter in a cluster."""
        return OptimizerStepCounter(cluster.cluster_id, self.name_in(cluster))

    def begin_step_in(self, cluster: ServerCluster, trains: Sequence[str], *, counts: bool) -> str:
        """Return the name in a cluster, for one more step there.

        Args:
            cluster: Cluster of the step.
            trains: Names of the variables and tables of the step.
            counts: Whether the step depends on the number of earlier steps.

        Raises:
            FailedPreconditionError: If it is unnamed, and cannot be distinguished from another one.
        """
        is_first = cluster.cluster_id not in self._names
        name = self.name_in(cluster)
        if counts and self._given_name is None and name.endswith(_IN_FUNCTIONS):
            cluster.optimizers.check_in_function(type(self).__name__, trains, is_first)
        if current_closure_run() is None:
            cluster.optimizers.warn_of_earlier_steps(name)
        return name

    def __getstate__(self) -> dict[str, Any]:
        # A copy is the same optimizer, on every worker of every strategy.
        if current_closure_run() is None:
            last_cluster_id = self._home
            for cluster in naming_clusters():
                cluster.optimizers.warn_of_earlier_steps(self.name_in(cluster))
            self._home = last_cluster_id or self._home
        return self.__dict__.copy()

    @property
    def iterations(self) -> int:
        """Number of steps taken with all optimizers of this name.

        Raises:
            FailedPreconditionError: If there are several clusters, and the optimizer is in none of
                them.
        """
        if self._home is None:
            clusters = registered_cluster_ids()
            if len(clusters) > 1:
                raise FailedPreconditionError(
                    f"optimizer {self.name!r} has taken no step in this process, which takes part "
                    f"in {len(clusters)} clusters, so the cluster that counts its steps is "
                    "unknown: create it in strategy.scope()"
                )
            if not clusters:
                return 0
            # Scheduled functions may have taken steps on workers.
            self._home = clusters[0]
        return self.counter_in(find_cluster(self._home, f"the optimizer {self.name!r}"))()

    def rate(self, iteration: int) -> float:
        """Return the learning rate after `iteration` steps."""
        if not callable(self.learning_rate):
            return float(self.learning_rate)
        rate = float(self.learning_rate(iteration))
        if not math.isfinite(rate):
            raise ValueError(f"the learning rate of step {iteration} must be finite, but is {rate}")
        return rate

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables and tables from weight decay; replaces earlier exclusions.

        Handles with the same name have separate exclusions; to use them in a scheduled function,
        pass the handle.

        Args:
            var_list: Variables and tables on parameter servers.
            var_names: Regular expressions; a variable is excluded if one of them matches anywhere
                in its name.
        """
        self._excluded = frozenset(each.name for each in var_list or ())
        self._excluded_pattern = "|".join(var_names or ()) or None

    def rule_for(self, name: str) -> OptimizerRule:
        """Return the rule for a variable or table, by name."""
        pattern = self._excluded_pattern
        if name in self._excluded or (pattern is not None and re.search(pattern, name)):
            return self._rule_without_decay
        return self.rule

    @property
    def clips_by_norm(self) -> bool:
        """Whether it clips by the norm of a gradient, which depends on all elements."""
        return bool(self.clipnorm or self.global_clipnorm)

    def prepare(
        self, names: Sequence[str], gradients: Sequence[NDArray[Any]]
    ) -> list[NDArray[Any]] | None:
        """Return the gradients to send, or None if the step is skipped.

        Args:
            names: Names of the variables, for errors.
            gradients: One gradient for each variable: dense, or the summed rows of a sparse one.
                Values shared by several rows occur once, unless norms are clipped.

        Raises:
            InvalidArgumentError: If a gradient is not finite, and `non_finite` is "raise".
        """
        if self.non_finite == "raise":
            refuse_non_finite(names, gradients)
        elif self.non_finite == "skip" and not all(map(is_finite, gradients)):
            return None
        if self.clipnorm:
            return [clip_by_norm([one], self.clipnorm)[0] for one in gradients]
        if self.global_clipnorm:
            return clip_by_norm(gradients, self.global_clipnorm)
        if self.clipvalue:
            return clip_by_value(gradients, self.clipvalue)
        return list(gradients)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> int:
        """Update variables with their gradients; return the number of steps taken.

        Args:
            grads_and_vars: Pairs of a gradient and a variable or table. A gradient is an array of
                any framework or an `IndexedSlices`; pairs with the gradient None are skipped.

        Raises:
            ValueError: If there is no gradient.
            InvalidArgumentError: If a gradient is not finite, or does not fit its variable.
        """
        kept = _drop_missing_gradients(grads_and_vars)
        push: Callable[..., int] = kept[0][1].push_gradients
        return push(self, kept)

    def begin_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> PendingStep:
        """Begin a step in a scheduled function; used by `InBackground`."""
        kept = _drop_missing_gradients(grads_and_vars)
        begin: Callable[..., PendingStep] = kept[0][1].begin_gradients
        return begin(self, kept)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(learning_rate={self.learning_rate!r}, name={self.name!r})"


def _drop_missing_gradients(grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the pairs that have a gradient."""
    pairs = _pairs(grads_and_vars)
    kept = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    if not kept:
        raise ValueError(
            f"none of {len(pairs)} variables has a gradient; pass pairs of (gradient, variable)"
        )
    gradient, variable = kept[0]
    if not hasattr(variable, "push_gradients"):
        raise TypeError(
            "an optimizer updates variables and tables on parameter servers, but got a "
            f"{type(variable).__name__}; "
            + (
                "pass pairs of (gradient, variable), in this order"
                if hasattr(gradient, "push_gradients")
                else "create it in the scope of a ParameterServerStrategy, or update it directly: "
                "variable.assign_sub(rate * gradient)"
            )
        )
    return kept


def check_number(
    name: str, value: object, *, minimum: float = 0.0, maximum: float = math.inf
) -> None:
    """Check that a value is a finite number within bounds.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is out of bounds or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(
            f"`{name}` must be a number, but got {value!r} of type {type(value).__name__}"
        )
    if not (minimum <= value <= maximum and math.isfinite(value)):
        bounds = f"at least {minimum:g}"
        bounds = bounds if maximum == math.inf else f"{bounds} and at most {maximum:g}"
        raise ValueError(f"`{name}` must be {bounds}, and finite, but got {value}")


def _pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    pairs = list(grads_and_vars) if isinstance(grads_and_vars, Iterable) else [grads_and_vars]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                "`grads_and_vars` must be pairs of (gradient, variable), as from zip(gradients, "
                f"variables), but one is of type {type(pair).__name__}"
            )
    return [(gradient, variable) for gradient, variable in pairs]


class InBackground:
    """An optimizer whose steps are pushed while the program continues.

    >>> import headrace as hr
    >>> hr.optimizers.InBackground(hr.optimizers.SGD(0.1), in_flight=1)
    InBackground(SGD(learning_rate=0.1, name='SGD'), in_flight=1)

    In a function that a coordinator schedules, a step is sent at once. Its end is awaited with
    later steps, at `flush`, or when the function returns; a failed step fails the function. The
    function's own reads see the step; threads that it starts may not see it until `flush`. On one
    of several replicas, and with `mode="sync"`, each step is complete when the call returns.

    Args:
        optimizer: One of `hr.optimizers`.
        in_flight: Largest number of pending steps; a further step waits. With 0, each step is
            complete when the call returns.
    """

    def __init__(self, optimizer: Optimizer, in_flight: int = 2) -> None:
        check_instance("optimizer", optimizer, Optimizer)
        self.optimizer = optimizer
        self.in_flight: int = check_int("in_flight", in_flight, minimum=0)
        self._pending_steps: deque[BackgroundTask[int]] = deque()

    @property
    def name(self) -> str:
        """Name of the optimizer."""
        return self.optimizer.name

    @property
    def iterations(self) -> int:
        """Number of steps applied on the servers."""
        return self.optimizer.iterations

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Begin a step; see `Optimizer.apply_gradients`. The gradients must not change afterwards.

        Raises:
            Exception: The error of an earlier step; it is raised once, and this step is not begun.
        """
        pairs = list(grads_and_vars)
        context = current_background_context()
        if context is not None and self.in_flight:
            self._begin_in_closure(context, pairs)
            return
        while self._pending_steps and (
            len(self._pending_steps) >= max(1, self.in_flight) or self._pending_steps[0].done()
        ):
            self._finish_first()
        cluster = next((target.cluster for _, target in pairs if hasattr(target, "cluster")), None)
        step = functools.partial(self.optimizer.apply_gradients, pairs)
        if cluster is None or not self.in_flight or not can_write_in_background():
            step()
        else:
            self._pending_steps.append(cluster.background.submit(step))

    def flush(self) -> None:
        """Wait until all steps have been applied on the servers.

        Raises:
            Exception: The error of a step; call again for the others.
        """
        context = current_background_context()
        if context is not None:
            for each in self._pending_in_closure(context):
                context.finish_step(each)
        while self._pending_steps:
            self._finish_first()

    def _begin_in_closure(self, context: WriteContext, pairs: list[tuple[Any, Any]]) -> None:
        """Begin a step in a closure, whose own thread waits for it."""
        pending = self._pending_in_closure(context)
        for each in pending[: len(pending) + 1 - self.in_flight]:
            context.finish_step(each)
        step = self.optimizer.begin_gradients(pairs)
        step.owner = self
        context.pending_steps.append(step)

    def _pending_in_closure(self, context: WriteContext) -> list[PendingStep]:
        return [each for each in context.pending_steps if each.owner is self]

    def _finish_first(self) -> None:
        # This waits for servers, and warns, up to `server_timeout`.
        self._pending_steps[0].wait()
        self._pending_steps.popleft().result()

    def __repr__(self) -> str:
        return f"InBackground({self.optimizer!r}, in_flight={self.in_flight})"


def can_write_in_background() -> bool:
    """Return whether another thread may write on behalf of the calling code.

    Writes of a closure are identified by their order, and those of several replicas are merged.
    """
    replica = current_context.get()
    return current_closure_run() is None and not (
        isinstance(replica, ReplicaView) and replica.strategy.num_replicas_in_sync > 1
    )

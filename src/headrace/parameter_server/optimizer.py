"""What all optimizers share: a name, a rule, a learning rate, clipping, a count of steps.

    optimizer.rule_for(name)        travels with each push; `rules` carries it out
    optimizer.rate(iteration)       a schedule is evaluated by the client
    optimizer.prepare(names, ...)   clipped gradients, or None for a step to pass over

`apply_gradients` is one call of `push_gradients` on the first variable: variables know their
servers, optimizers do not. `IterationCounter` reads and advances the count of steps, which is on a
server. `InBackground` pushes the steps of an optimizer while the training loop goes on:

    later = InBackground(optimizer, in_flight=2)
    later.apply_gradients(pairs)    # returns at once, unless two steps are in flight
    later.flush()                   # all steps are on the servers
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

from headrace.arguments import check_flag, check_instance, check_int, check_string
from headrace.distribute.context import OnReplica, here
from headrace.distribute.current import get_strategy
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
    "IterationCounter",
    "Optimizer",
    "OptimizerOptions",
    "OptimizerOptionsWithoutDecay",
    "Rate",
    "can_write_in_background",
    "check_number",
    "counter_values",
    "step_counts",
]


COUNTING_SERVER = 0
"""Which server counts steps."""

_SUFFIX = "/iterations"


def step_counts(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the steps of optimizers among the counters of a server, by their names."""
    return {
        name.removesuffix(_SUFFIX): count
        for name, count in counters.items()
        if name.endswith(_SUFFIX)
    }


def counter_values(steps: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of a server, by their names, for the steps of optimizers."""
    return {f"{name}{_SUFFIX}": count for name, count in steps.items()}


class IterationCounter:
    """The steps of all optimizers of one name in one cluster; a handle.

    Args:
        cluster_id: Of the cluster that counts.
        optimizer: Name of the optimizer.
    """

    def __init__(self, cluster_id: str, optimizer: str) -> None:
        self._cluster_id = cluster_id
        self.name = f"{optimizer}{_SUFFIX}"

    def __call__(self) -> int:
        """Ask the server that counts."""
        cluster = find_cluster(self._cluster_id, f"the counter {self.name!r}")
        seen = cluster.counters.get(self.name, 0)
        answer, _ = cluster.servers.execute(
            COUNTING_SERVER, IncrementCounter(self.name, 0, last_seen=seen)
        )
        return self.record_count(cluster, answer).after

    def advance(self, cluster: ServerCluster, steps: int) -> None:
        """Count so many steps more."""
        operation = IncrementCounter(
            self.name, steps, next_key(self.name), cluster.counters.get(self.name, 0)
        )
        answer, _ = cluster.servers.execute(COUNTING_SERVER, operation)
        self.record_count(cluster, answer)

    def increment_request(self, cluster: ServerCluster) -> OperationRequest:
        """Return what is to be asked for one more step."""
        seen = cluster.counters.get(self.name, 0)
        return OperationRequest(
            COUNTING_SERVER, IncrementCounter(self.name, 1, next_key(self.name), seen)
        )

    def record_count(self, cluster: ServerCluster, answer: Answer) -> Counted:
        """Take note of an answer, and return it."""
        assert isinstance(answer, Counted)
        cluster.counters[self.name] = answer.after
        return answer


Rate: TypeAlias = float | Callable[[int], float]


class OptimizerOptionsWithoutDecay(TypedDict, total=False):
    """Arguments that all optimizers take, but weight decay; see `Optimizer`."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    name: str | None
    non_finite: NonFinite
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None


class OptimizerOptions(OptimizerOptionsWithoutDecay, total=False):
    """Arguments that all optimizers take; see `Optimizer`."""

    weight_decay: float | None


_IN_FUNCTIONS = "_in_functions"
"""Stands after the class in the name of an optimizer that a function made without a name."""

_naming = threading.Lock()


class Optimizer:
    """What all optimizers take: a learning rate, decay, clipping.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         weights = hr.Variable([1.0, 2.0], name="weights")
    ...     step = hr.optimizers.SGD(0.5).apply_gradients([([1.0, -1.0], weights)])
    ...     weights.read().tolist()
    ...     strategy.close()
    [0.5, 2.5]

    Args:
        rule: What it does to a shard.
        learning_rate: A number, or a function of the step (`schedules`).
        weight_decay: Fraction of a value that each step takes off, times the learning rate.
        clipnorm: Largest norm of the gradient of one variable.
        clipvalue: Largest element of a gradient.
        global_clipnorm: Largest norm of all gradients of a step together.
        name: Of its slots and its count of steps on the servers: handles of one name and class
            share them, in whatever process they were made. None: each handle has its own, named
            after its class ("Adam", then "Adam_1" ...) in order of creation, or of first use if it
            was made before the strategy. In scheduled functions, which make it again in each call,
            None is one name for all of its class.
        non_finite: What to do when a gradient has a NaN or an infinity: "raise" before anything is
            applied, "skip" the step of all variables, or "apply" it.
        use_ema: Whether the servers keep a running average of each variable, in a slot "average"
            (`variable.read_slot`). Gradients must be dense.
        ema_momentum: Between 0 and 1: how much of the average each step keeps.
        ema_overwrite_frequency: Number of steps between those after which variables are set to
            their averages. None: never.
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
        #: By the id of a cluster: the name of a handle that was given none.
        self._names: dict[str, str] = {}
        #: Id of the cluster that it was named for, or used in, last.
        self._home: str | None = None
        # Plain numbers travel; NumPy's do not.
        numbers = {name: getattr(rule, name) for name in rule.__struct_fields__}
        self.rule = msgspec.structs.replace(
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
        made_for = getattr(get_strategy(), "cluster", None)
        clusters = naming_clusters() if made_for is None else [made_for]
        if len(clusters) == 1 and current_closure_run() is None:
            self.name_in(clusters[0])

    @property
    def name(self) -> str:
        """Whose slots and whose count it uses: its class, until a cluster has given it a name."""
        if self._given_name is not None:
            return self._given_name
        return self._names.get(self._home or "", type(self).__name__)

    def name_in(self, cluster: ServerCluster) -> str:
        """Return its name in a cluster, which a handle without one is given now.

        Raises:
            ValueError: An optimizer of another class has this name there.
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

    def counter_in(self, cluster: ServerCluster) -> IterationCounter:
        """Return what counts its steps in a cluster."""
        return IterationCounter(cluster.cluster_id, self.name_in(cluster))

    def begin_step_in(self, cluster: ServerCluster, trains: Sequence[str], *, counts: bool) -> str:
        """Return its name in a cluster for one more step there.

        Args:
            cluster: Where the step is taken.
            trains: Names of the variables and tables of the step.
            counts: Whether the step depends on how many were taken before.

        Raises:
            FailedPreconditionError: It has no name, and is not told from another one.
        """
        is_first = cluster.cluster_id not in self._names
        name = self.name_in(cluster)
        if counts and self._given_name is None and name.endswith(_IN_FUNCTIONS):
            cluster.optimizers.check_in_function(type(self).__name__, trains, is_first)
        if current_closure_run() is None:
            cluster.optimizers.warn_of_earlier_steps(name)
        return name

    def __getstate__(self) -> dict[str, Any]:
        # A copy is the same optimizer, on whichever worker of whichever strategy it is used.
        if current_closure_run() is None:
            home = self._home
            for cluster in naming_clusters():
                cluster.optimizers.warn_of_earlier_steps(self.name_in(cluster))
            self._home = home or self._home
        return self.__dict__.copy()

    @property
    def iterations(self) -> int:
        """How many steps were taken, by all who have this optimizer or one of its name.

        Raises:
            FailedPreconditionError: There are several clusters, and nothing says which is meant.
        """
        if self._home is None:
            clusters = registered_cluster_ids()
            if len(clusters) > 1:
                raise FailedPreconditionError(
                    f"optimizer {self.name!r} has taken no step in this process, which takes part "
                    f"in {len(clusters)} clusters, so it is not known which of them counts its "
                    "steps: make it in strategy.scope()"
                )
            if not clusters:
                return 0
            # Functions may have taken steps on workers.
            self._home = clusters[0]
        return self.counter_in(find_cluster(self._home, f"the optimizer {self.name!r}"))()

    def rate(self, iteration: int) -> float:
        """Return the learning rate of a step, of which so many were taken before."""
        if not callable(self.learning_rate):
            return float(self.learning_rate)
        rate = float(self.learning_rate(iteration))
        if not math.isfinite(rate):
            raise ValueError(f"the learning rate of step {iteration} must be finite, but is {rate}")
        return rate

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables and tables from weight decay, in place of those excluded before.

        Each handle of one name has its own; to have a scheduled function use it, pass the handle.

        Args:
            var_list: Variables and tables on parameter servers.
            var_names: Regular expressions; a variable is excluded if one is found in its name.
        """
        self._excluded = frozenset(each.name for each in var_list or ())
        self._excluded_pattern = "|".join(var_names or ()) or None

    def rule_for(self, name: str) -> OptimizerRule:
        """Return the rule for a variable or table, by its name."""
        pattern = self._excluded_pattern
        if name in self._excluded or (pattern is not None and re.search(pattern, name)):
            return self._rule_without_decay
        return self.rule

    @property
    def clips_by_norm(self) -> bool:
        """Whether it clips by the norm of a gradient, for which all of its elements count."""
        return bool(self.clipnorm or self.global_clipnorm)

    def prepare(
        self, names: Sequence[str], gradients: Sequence[NDArray[Any]]
    ) -> list[NDArray[Any]] | None:
        """Return gradients as they are to be sent, or None if the step is to be passed over.

        Args:
            names: Of the variables, for errors.
            gradients: One of each variable: dense, or the summed rows of a sparse one. Where rows
                share a value it is there once, but for those whose norm is clipped.

        Raises:
            InvalidArgumentError: One is not finite, and `non_finite` is "raise".
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
        """Change variables by their gradients, and return how many steps were taken with this one.

        Args:
            grads_and_vars: Pairs of a gradient and a variable or table. A gradient is an array of
                any framework or an `IndexedSlices`; a pair whose gradient is None is left out.

        Raises:
            ValueError: There is no gradient.
            InvalidArgumentError: A gradient is not finite, or does not fit its variable.
        """
        kept = _drop_missing_gradients(grads_and_vars)
        push: Callable[..., int] = kept[0][1].push_gradients
        return push(self, kept)

    def begin_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> PendingStep:
        """Begin such a step in a scheduled function; for `InBackground`."""
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
            f"no gradient was given for any of {len(pairs)} variables; pass pairs of "
            "(gradient, variable)"
        )
    gradient, variable = kept[0]
    if not hasattr(variable, "push_gradients"):
        raise TypeError(
            "an optimizer changes variables and tables on parameter servers, but got a "
            f"{type(variable).__name__}; "
            + (
                "pairs are (gradient, variable), in this order"
                if hasattr(gradient, "push_gradients")
                else "make it in the scope of a ParameterServerStrategy. Variables that are "
                "elsewhere change by what you write: variable.assign_sub(rate * gradient)"
            )
        )
    return kept


def check_number(
    name: str, value: object, *, minimum: float = 0.0, maximum: float = math.inf
) -> None:
    """Refuse what is no finite number within bounds.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of bounds, or not finite.
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
                "`grads_and_vars` must be pairs of (gradient, variable), as zip(gradients, "
                f"variables) makes them, but one is a value of type {type(pair).__name__}"
            )
    return [(gradient, variable) for gradient, variable in pairs]


class InBackground:
    """An optimizer whose steps are pushed while the program goes on.

    >>> import headrace as hr
    >>> hr.optimizers.InBackground(hr.optimizers.SGD(0.1), in_flight=1)
    InBackground(SGD(learning_rate=0.1, name='SGD'), in_flight=1)

    In a function that a coordinator schedules a step is sent at once, and its end is waited for
    with the next steps, at `flush`, or when the function returns: a step that fails fails the
    function. What the function reads meanwhile has the step in it; threads that it starts may lack
    it until `flush`. On one of several replicas, and with `mode="sync"`, each step is done when the
    call returns.

    Args:
        optimizer: One of `hr.optimizers`.
        in_flight: At most so many steps are under way; who has another one waits. 0: each step is
            done when the call returns.
    """

    def __init__(self, optimizer: Optimizer, in_flight: int = 2) -> None:
        check_instance("optimizer", optimizer, Optimizer)
        self.optimizer = optimizer
        self.in_flight = check_int("in_flight", in_flight, minimum=0)
        self._pending_steps: deque[BackgroundTask[int]] = deque()

    @property
    def name(self) -> str:
        """The name of the optimizer."""
        return self.optimizer.name

    @property
    def iterations(self) -> int:
        """How many steps are on the servers."""
        return self.optimizer.iterations

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Begin a step; see `Optimizer.apply_gradients`. The gradients must not change after it.

        Raises:
            Exception: What an earlier step failed with; it is raised once, and this step was not
                begun.
        """
        pairs = list(grads_and_vars)
        attempt = current_background_context()
        if attempt is not None and self.in_flight:
            self._begin_in_closure(attempt, pairs)
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
        """Wait until all steps are on the servers.

        Raises:
            Exception: What one failed with; call again for the others.
        """
        attempt = current_background_context()
        if attempt is not None:
            for each in self._pending_in_closure(attempt):
                attempt.finish_step(each)
        while self._pending_steps:
            self._finish_first()

    def _begin_in_closure(self, context: WriteContext, pairs: list[tuple[Any, Any]]) -> None:
        """Begin a step in a closure, whose thread finishes it."""
        mine = self._pending_in_closure(context)
        for each in mine[: len(mine) + 1 - self.in_flight]:
            context.finish_step(each)
        step = self.optimizer.begin_gradients(pairs)
        step.owner = self
        context.pending_steps.append(step)

    def _pending_in_closure(self, context: WriteContext) -> list[PendingStep]:
        return [each for each in context.pending_steps if each.owner is self]

    def _finish_first(self) -> None:
        # It waits for servers, with `server_timeout`, and says so.
        self._pending_steps[0].wait()
        self._pending_steps.popleft().result()

    def __repr__(self) -> str:
        return f"InBackground({self.optimizer!r}, in_flight={self.in_flight})"


def can_write_in_background() -> bool:
    """Whether another thread may write for the code that runs here.

    Writes of a closure are told apart by their order, and those of several replicas become one.
    """
    place = here.get()
    return current_closure_run() is None and not (
        isinstance(place, OnReplica) and place.strategy.num_replicas_in_sync > 1
    )

"""Creation of closures from calls, and of resources on workers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from headrace.arguments import check_instance, check_int, check_seconds
from headrace.coordinator.closure import Closure, Payload, copy_error
from headrace.coordinator.coordinator_runner import CoordinatorRunner
from headrace.coordinator.messages import CallSpec, PackedFunction, WorkerResource
from headrace.coordinator.packing import FunctionCache, Packing, pack, unpack
from headrace.coordinator.remote_value import RemoteValue
from headrace.coordinator.shared_dataset import SharedDataset
from headrace.coordinator.worker import MAX_CLOSURE_BYTES
from headrace.coordinator.worker_connection import WorkerConnection
from headrace.errors import CancelledError, FailedPreconditionError, describe_error

__all__ = ["ClosureFactory"]

_MESSAGE_OVERHEAD = 1 << 20


class ClosureFactory:
    """Packs functions and calls, and numbers resources.

    Args:
        runner: Runs closures.
        strategy: Strategy whose workers run them.
    """

    def __init__(self, runner: CoordinatorRunner, strategy: Any) -> None:
        self._runner = runner
        self._strategy = weakref.ref(strategy)  # which holds this object
        self._functions = FunctionCache(self._strategy)
        self._numbers = itertools.count(1)

    def build_closure(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        retries: int | None = None,
        allow_shared: bool = False,
    ) -> Closure:
        """Return a packed call.

        Args:
            fn: Function to call.
            args: A tuple or list; None for no arguments.
            kwargs: A dict; None for no arguments.
            timeout: Maximum seconds of one attempt.
            retries: Number of times it may be lost with a worker.
            allow_shared: Whether it may refer to a shared dataset.

        Raises:
            FailedPreconditionError: If an object cannot be sent.
        """
        self._runner.check_not_forked()
        if timeout is not None:
            check_seconds("timeout", timeout)
        if retries is not None:
            check_int("retries", retries, minimum=0)
        function = self.pack_function(fn)
        _check_args(args, kwargs)
        if not args and not kwargs:
            self._check_shared(function.handles, allow_shared=allow_shared)
            call_spec = CallSpec(function)
            return Closure(function.name, call_spec, timeout=timeout, retries=retries)
        packing = self.start_packing(takes_inputs=True)
        arguments = _pack_arguments(function, args, kwargs, packing)
        self._check_shared((*function.handles, *packing.handles), allow_shared=allow_shared)
        call_spec = CallSpec(function, arguments, handles=tuple(packing.handles))
        inputs = tuple(packing.inputs)
        return Closure(function.name, call_spec, inputs, timeout=timeout, retries=retries)

    def schedule(self, closure: Closure) -> RemoteValue:
        """Schedule a call; return the future of its value."""
        value = RemoteValue(closure, self._runner)
        self._runner.schedule(closure)
        return value

    def _check_shared(self, handles: Sequence[object], *, allow_shared: bool) -> None:
        num_shared = sum(isinstance(each, SharedDataset) for each in handles)
        if num_shared and not allow_shared:
            raise FailedPreconditionError(
                "a shared dataset can be read only with run_epoch(fn, args), which calls the "
                "function until the dataset ends; use a per-worker dataset with schedule()"
            )

    # --- for handles of resources (`per_worker`) -------------------------------------------------

    def start_packing(self, *, takes_inputs: bool = False) -> Packing:
        """Return a new record of the references found while packing for workers."""
        return Packing(takes_inputs=takes_inputs, strategy=self._strategy())

    def next_resource_number(self) -> int:
        """Return a unique resource number."""
        return next(self._numbers)

    def pack_function(self, fn: Callable[..., Any]) -> PackedFunction:
        """Return a packed function.

        Raises:
            FailedPreconditionError: If it cannot be sent.
        """
        function = self._functions.get(fn)
        _check_size(
            function.payload, f"the function {function.name} with the objects it references"
        )
        return function

    def define_resource(self, resource: WorkerResource) -> None:
        """Create a resource on each worker."""
        with self._runner.lock:
            self._runner.core.define_resource(resource)
        self._runner.wake()

    def release_resource(self, number: int) -> None:
        """Release a resource on all workers. May be called at any instant."""
        self._runner.release_resource(number)

    def run_on_any_worker(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return the function's result on any worker."""
        return self.schedule(self.build_closure(fn, args)).fetch()

    def run_on_each_worker(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the function's result on each connected worker.

        Raises:
            CancelledError: If a worker was lost in the meantime.
        """
        template = self.build_closure(fn, args)
        calls: list[tuple[Closure, WorkerConnection, int]] = []
        with self._runner.lock:
            for _, connection in sorted(self._runner.core.connections.items()):
                if connection.is_connected and not connection.is_draining:
                    closure = Closure(template.name, template.call_spec)
                    self._runner.core.queue.schedule_on(connection.worker, closure)
                    calls.append((closure, connection, connection.session))
        self._runner.wake()
        return [self._await_result(*each) for each in calls]

    def _await_result(self, closure: Closure, connection: WorkerConnection, session: int) -> Any:
        result = closure.result

        def has_ended() -> bool:
            return result.is_ready or not connection.is_connected or connection.session != session

        self._runner.wait(has_ended, f"{closure.name} on worker {connection.worker}")
        if not result.is_ready:
            raise CancelledError(
                f"worker {connection.worker} was lost before it returned {closure.name}; call again"
            )
        if result.error is not None:
            raise copy_error(result.error)
        assert result.payload is not None
        return unpack(result.payload)


def _check_args(args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> None:
    if args is not None and not isinstance(args, list | tuple):
        raise TypeError(
            f"`args` must be a tuple or a list, but got {args!r:.80} of type "
            f"{type(args).__name__}; for one value use args=(value,)"
        )
    if kwargs is not None:
        check_instance("kwargs", kwargs, dict)


def _pack_arguments(
    function: PackedFunction, args: Any, kwargs: dict[str, Any] | None, packing: Packing
) -> Payload:
    try:
        payload = pack((tuple(args or ()), kwargs or {}), packing)
    except Exception as error:
        argument = _find_unpicklable(args, kwargs, packing.strategy)
        raise FailedPreconditionError(
            f"the arguments of {function.name} cannot be sent to a worker: "
            f"{argument}{describe_error(error)}"
        ) from error
    _check_size(payload, f"the arguments of {function.name}")
    return payload


def _find_unpicklable(args: Any, kwargs: dict[str, Any] | None, strategy: Any) -> str:
    """Describe the argument that cannot be packed; empty if none fails separately."""
    named = [(f"args[{index}]", value) for index, value in enumerate(args or ())]
    named += [(f"kwargs[{name!r}]", value) for name, value in (kwargs or {}).items()]
    for name, value in named:
        try:
            pack(value, Packing(takes_inputs=True, strategy=strategy))
        except Exception:
            return f"{name}, of type {type(value).__name__}: "
    return ""


def _check_size(payload: Payload, name: str) -> None:
    if payload.nbytes > MAX_CLOSURE_BYTES - _MESSAGE_OVERHEAD:
        raise ValueError(
            f"size of {name}: {payload.nbytes:,} bytes, but a worker accepts at most "
            f"{MAX_CLOSURE_BYTES:,}; let workers read large data themselves"
        )

"""Making closures of calls, and having workers keep things: what handles and users need."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from headrace.arguments import check_instance, check_int, check_seconds
from headrace.coordinator.closure import Closure, Payload, fresh
from headrace.coordinator.contact import Contact
from headrace.coordinator.messages import Function, Resource, Work
from headrace.coordinator.packing import Functions, Packing, pack, unpack
from headrace.coordinator.remote_value import RemoteValue
from headrace.coordinator.shared_dataset import SharedDataset
from headrace.coordinator.shell import Shell
from headrace.coordinator.worker import LARGEST_CLOSURE
from headrace.errors import CancelledError, FailedPreconditionError, describe_error

__all__ = ["Keeping"]

_ROOM_FOR_WORDS = 1 << 20


class Keeping:
    """Functions that were packed, and numbers of what workers keep.

    Args:
        shell: Runs closures.
        strategy: Whose workers run them.
    """

    def __init__(self, shell: Shell, strategy: Any) -> None:
        self._shell = shell
        self._strategy = weakref.ref(strategy)  # which holds this object
        self._functions = Functions(self._strategy)
        self._numbers = itertools.count(1)

    def closure(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        retries: int | None = None,
        shares: bool = False,
    ) -> Closure:
        """Return a call, packed.

        Args:
            fn: What is called.
            args: A tuple or list; None: there are none.
            kwargs: A dict; None: there are none.
            timeout: Seconds that it may take.
            retries: How often it may be lost.
            shares: Whether it may name a shared dataset.

        Raises:
            FailedPreconditionError: Something cannot be sent.
        """
        self._shell.check_here()
        if timeout is not None:
            check_seconds("timeout", timeout)
        if retries is not None:
            check_int("retries", retries, minimum=0)
        function = self.function(fn)
        _check_args(args, kwargs)
        if not args and not kwargs:
            self._check_shares(function.kept, shares=shares)
            work = Work(function)
            return Closure(function.name, work, timeout=timeout, retries=retries)
        packing = self.packing(takes_inputs=True)
        arguments = _packed(function, args, kwargs, packing)
        self._check_shares((*function.kept, *packing.kept), shares=shares)
        work = Work(function, arguments, kept=tuple(packing.kept))
        inputs = tuple(packing.inputs)
        return Closure(function.name, work, inputs, timeout=timeout, retries=retries)

    def schedule(self, closure: Closure) -> RemoteValue:
        """Have a call run; return its value, which is on its way."""
        value = RemoteValue(closure, self._shell)
        self._shell.schedule(closure)
        return value

    def _check_shares(self, kept: Sequence[object], *, shares: bool) -> None:
        found = sum(isinstance(each, SharedDataset) for each in kept)
        if found and not shares:
            raise FailedPreconditionError(
                "a shared dataset is dealt out by run_epoch(fn, args), which calls the function "
                "until the dataset ends; schedule() takes per-worker datasets"
            )

    # --- for handles (`per_worker`) --------------------------------------------------------------

    def packing(self, *, takes_inputs: bool = False) -> Packing:
        """Return what is found while something is packed for workers."""
        return Packing(takes_inputs=takes_inputs, strategy=self._strategy())

    def next_resource(self) -> int:
        """Return a number that no other resource has."""
        return next(self._numbers)

    def function(self, fn: Callable[..., Any]) -> Function:
        """Return a function, packed.

        Raises:
            FailedPreconditionError: It cannot be sent.
        """
        function = self._functions.of(fn)
        _check_size(function.payload, f"the function {function.name}, with what it holds,")
        return function

    def define(self, resource: Resource) -> None:
        """Have each worker make something."""
        with self._shell.lock:
            self._shell.core.define(resource)
        self._shell.wake()

    def release(self, number: int) -> None:
        """Have workers let go of it. May be called at any instant."""
        self._shell.release(number)

    def evaluate(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns on some worker."""
        return self.schedule(self.closure(fn, args)).fetch()

    def on_each(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function returns on each worker that is there.

        Raises:
            CancelledError: A worker was lost meanwhile.
        """
        first = self.closure(fn, args)
        asked: list[tuple[Closure, Contact, int]] = []
        with self._shell.lock:
            for _, contact in sorted(self._shell.core.contacts.items()):
                if contact.is_there and not contact.is_leaving:
                    closure = Closure(first.name, first.work)
                    self._shell.core.queue.keep_at(contact.worker, closure)
                    asked.append((closure, contact, contact.session))
        self._shell.wake()
        return [self._answer(*each) for each in asked]

    def _answer(self, closure: Closure, contact: Contact, session: int) -> Any:
        result = closure.result

        def is_over() -> bool:
            return result.is_ready or not contact.is_there or contact.session != session

        self._shell.wait(is_over, f"{closure.name} on worker {contact.worker}")
        if not result.is_ready:
            raise CancelledError(
                f"worker {contact.worker} was lost before it answered {closure.name}; call again"
            )
        if result.error is not None:
            raise fresh(result.error)
        assert result.payload is not None
        return unpack(result.payload)


def _check_args(args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> None:
    if args is not None and not isinstance(args, list | tuple):
        raise TypeError(
            f"`args` must be a tuple or a list, but got {args!r:.80} of type "
            f"{type(args).__name__}; for one value write args=(value,)"
        )
    if kwargs is not None:
        check_instance("kwargs", kwargs, dict)


def _packed(
    function: Function, args: Any, kwargs: dict[str, Any] | None, packing: Packing
) -> Payload:
    try:
        payload = pack((tuple(args or ()), kwargs or {}), packing)
    except Exception as error:
        which = _culprit(args, kwargs, packing.strategy)
        raise FailedPreconditionError(
            f"the arguments of {function.name} cannot be sent to a worker: "
            f"{which}{describe_error(error)}"
        ) from error
    _check_size(payload, f"the arguments of {function.name}")
    return payload


def _culprit(args: Any, kwargs: dict[str, Any] | None, strategy: Any) -> str:
    """Return words for the argument that cannot be packed; empty: it is not one alone."""
    named = [(f"args[{place}]", value) for place, value in enumerate(args or ())]
    named += [(f"kwargs[{name!r}]", value) for name, value in (kwargs or {}).items()]
    for name, value in named:
        try:
            pack(value, Packing(takes_inputs=True, strategy=strategy))
        except Exception:
            return f"{name}, of type {type(value).__name__}: "
    return ""


def _check_size(payload: Payload, what: str) -> None:
    if payload.nbytes > LARGEST_CLOSURE - _ROOM_FOR_WORDS:
        raise ValueError(
            f"{what} is {payload.nbytes:,} bytes, more than the {LARGEST_CLOSURE:,} that a worker "
            "takes; have workers read large data themselves"
        )

"""One life of a worker: its threads, from a greeting to the next, or to the worker's end.

The server's thread brings requests and never waits; each closure runs on one of `threads` threads.
A thread whose closure is given up is replaced at once, and ends when the function returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.coordinator.agenda import Agenda, Task
from headrace.coordinator.closure import CANCELLED, Payload
from headrace.coordinator.current import Resources, Running, running
from headrace.coordinator.gauges import Totals
from headrace.coordinator.messages import (
    CalledOff,
    CallOff,
    Feed,
    Greet,
    LoadFunction,
    Ran,
    Run,
    Taken,
)
from headrace.coordinator.packing import NOTHING, Loaded, Loads, blame, pack, unpack
from headrace.coordinator.worker_iterator import LeasedElements
from headrace.distribute.context import refusing_variables
from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    OutOfRangeError,
)
from headrace.parameter_server.pickling import ReplyPickler
from headrace.parameter_server.replica_state import AcknowledgedState
from headrace.parameter_server.write_context import (
    ClosureRun,
    WriteContext,
    wait_for_steps,
    write_as,
)
from headrace.transport.channel import Buffer, Request
from headrace.transport.envelope import encode_error

__all__ = ["Life"]

_log = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 20
"""Values from so many bytes on wait until they are taken."""
_MOST_GIVEN_UP = 32
_SLICE_SECONDS = 1.0
_WRITES_NOTHING = (
    "what workers make for themselves (per-worker datasets and values) may read variables and "
    "write none: it is made once on each worker, and again when a worker was lost; write in a "
    "function that is scheduled"
)


class Life:
    """Runs closures for one coordinator.

    Args:
        greeting: What began it.
        totals: Counts what is run.
        acknowledged: Returns what is known to be acknowledged of replicated stores.
    """

    def __init__(
        self,
        greeting: Greet,
        totals: Totals,
        acknowledged: Callable[[], tuple[AcknowledgedState, ...]] = tuple,
    ) -> None:
        self.greeting = greeting
        self._acknowledged = acknowledged
        self._totals = totals
        #: Taken without the condition, in less time, where nobody is told.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._agenda: Agenda[Request] = Agenda()
        self._loads = Loads()
        self._resources = Resources()
        self._attending: list[Request] = []
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._given_up = 0
        for _ in range(greeting.threads):
            self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(
            target=self._work, name=f"headrace-closures-{self.greeting.worker}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    # --- on the server's thread -----------------------------------------------------------------

    def attend(self, request: Request) -> None:
        """Keep a request that is answered when this life is over."""
        self._attending.append(request)

    def load(self, message: LoadFunction, buffers: Sequence[Buffer]) -> None:
        """Keep a function."""
        with self._changed:
            self._loads.put(message.digest, message.name, list(buffers))

    def run(self, message: Run, request: Request) -> None:
        """Have a closure run."""
        with self._changed:
            # Looked up now: what is loaded for closures after this one may push it out.
            loaded = self._loads.find(message.digest)
            if loaded is not None:
                if message.keeps:
                    self._resources.promise(message.keeps)
                self._agenda.add(message, list(request.buffers), request, loaded)
                self._changed.notify()
        if loaded is None:
            request.reply(Ran(lacks_function=True))

    def call_off(self, message: CallOff) -> CalledOff:
        """Call a closure off."""
        with self._changed:
            answer, answers = self._agenda.call_off(message)
            gave_up = answer.is_dropped and message.how == "abandon"
            self._given_up += gave_up
            self._totals.abandoned += gave_up
        for request, ran in answers:
            request.reply(ran)
        if gave_up:
            self._replace_thread()
        return answer

    def feed(self, message: Feed, request: Request) -> None:
        """Bring elements to a closure that waits for them."""
        with self._changed:
            task = self._agenda.find(message.number)
            if task is not None and task.lease is not None:
                task.request = request
                task.lease.feed(_parts(message.elements, message.buffers, request.buffers))
                task.lease.has_ended = message.has_ended
                self._changed.notify_all()
                return
        request.reply(Ran(is_dropped=True))

    def _ask_for(self, task: Task[Request], lease: LeasedElements) -> None:
        """Ask for another element, and wait for it; called on a thread of a function's."""
        with self._changed:
            asked, task.request = task.request, None
            had = lease.num_given
            if asked is not None:
                asked.reply(Ran(wants=1))
            while lease.num_given == had and not lease.has_ended:
                if task.is_over or self._is_closed:
                    raise CancelledError(CANCELLED)
                self._changed.wait(_SLICE_SECONDS)

    def take(self, number: int) -> tuple[Taken, Sequence[Buffer]]:
        """Return a value that waits.

        Raises:
            NotFoundError: There is none.
        """
        payload = self._agenda.values.get(number)
        if payload is None:
            raise NotFoundError(f"no value of closure {number} waits here")
        return Taken(value=payload.data), payload.buffers

    def received(self, number: int) -> None:
        """Let go of a value that has arrived."""
        self._agenda.values.pop(number, None)

    def release(self, resources: tuple[int, ...]) -> None:
        """Let go of what nobody uses any more."""
        self._resources.release(resources)

    @property
    def counts(self) -> tuple[int, int]:
        """How many functions run, and how many wait for a thread."""
        with self._changed:
            return len(self._agenda.running), self._agenda.num_waiting

    def close(self) -> None:
        """Run nothing more; what runs may write no more, and is left to itself."""
        with self._changed:
            self._is_closed = True
            answers = self._agenda.close()
            attending, self._attending = self._attending, []
            self._changed.notify_all()
        gone = AbortedError("this life of the worker is over: it stopped, or was greeted again")
        for request in attending:
            request.fail(gone)
        for request, _ in answers:
            request.fail(gone)
        self._resources.close()

    def join(self, seconds: float) -> None:
        """Wait for threads that do nothing to end; functions that run are left to themselves."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _replace_thread(self) -> None:
        if self._given_up == _MOST_GIVEN_UP:
            _log.warning(
                "%d functions on worker %d were given up and may still run: each holds a thread "
                "until it returns",
                self._given_up,
                self.greeting.worker,
            )
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._add_thread()

    # --- on a thread of its own -----------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                while (task := None if self._is_closed else self._agenda.begin_next()) is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
            # What the function does not hold must not live until the next one comes.
            if not self._carry_out(task):
                return
            del task

    def _carry_out(self, task: Task[Request]) -> bool:
        """Run a closure, and answer; False: this thread was replaced."""
        begun = time.perf_counter()
        try:
            ran, value, steps = self._ran(task, begun)
        except BaseException as raised:
            # Not the function: the place of an iterator, say. It is owed an answer all the same.
            error = blame("what comes after a function", self.greeting.worker, raised)
            ran, value, steps = Ran(error=encode_error(error), wrote=True), NOTHING, NOTHING
        if task.run.number > 0:  # before the answer, so that whoever has that finds it counted
            self._totals.ran(time.perf_counter() - begun, failed=bool(ran.error))
        with self._lock:
            is_wanted = self._agenda.end(task)
            if is_wanted and ran.nbytes:
                self._agenda.values[task.run.number] = value
        if is_wanted and task.request is not None:
            if ran.nbytes:
                ran = msgspec.structs.replace(ran, value=b"")
                value = NOTHING
            if acknowledged := self._acknowledged():
                ran = msgspec.structs.replace(ran, acknowledged=acknowledged)
            task.request.reply(ran, [*value.buffers, *steps.buffers])
        return is_wanted

    def _ran(self, task: Task[Request], begun: float) -> tuple[Ran, Payload, Payload]:
        """Run a closure; return the answer, its value, and the steps that it took."""
        message, loaded = task.run, task.function
        greeting = self.greeting
        lease = _lease(message, task.buffers)
        if lease is not None:
            task.lease, lease.ask = lease, lambda: self._ask_for(task, lease)
        here = Running(
            greeting.worker, self._resources, is_alone=greeting.threads == 1, lease=lease
        )
        before = running.set(here)
        # What a worker makes for itself lives as long as it does, and so may a variable in it.
        no_variables = refusing_variables.set(None if message.keeps else _no_variable)
        try:
            origin = ClosureRun(greeting.incarnation, message.number, greeting.session)
            with write_as(origin, collects_steps=greeting.gathers) as attempt:
                if message.keeps:
                    attempt.reject_writes(FailedPreconditionError(_WRITES_NOTHING))
                with self._lock:
                    task.attempt = attempt
                    if task.is_refused:
                        task.refuse()
                payload, error = self._value(task, loaded, attempt)
        finally:
            refusing_variables.reset(no_variables)
            running.reset(before)
        met_end = lease is not None and lease.met_end and isinstance(error, OutOfRangeError)
        if met_end:
            error = None  # that is how reading ends
        # What a function pushed before it failed is not the gradient of its batch.
        steps = (
            pack(attempt.collected_steps) if attempt.collected_steps and error is None else NOTHING
        )
        nbytes = payload.nbytes
        ran = Ran(
            value=payload.data,
            error=b"" if error is None else encode_error(error),
            nbytes=nbytes if nbytes >= _LARGE_BYTES else 0,
            seconds=time.perf_counter() - begun,
            wrote=attempt.has_written,
            steps=b"" if steps is NOTHING else steps.data,
            beside=len(steps.buffers),
            unused=0 if lease is None else lease.num_left,
            met_end=met_end,
            states={number: each.state_after(here) for number, each in here.used.items()},
        )
        return ran, payload, steps

    def _value(
        self, task: Task[Request], loaded: Loaded, attempt: WriteContext
    ) -> tuple[Payload, Exception | None]:
        """Call the function; return what it returned, or what it raised."""
        resource = task.run.keeps
        try:
            args, kwargs = _arguments(task.run, task.buffers)
            try:
                value = loaded.get()(*args, **kwargs)
                del args, kwargs
                if resource:
                    self._resources.keep(resource, value)
                    return NOTHING, None
                packed = _packed(value, loaded.name)
            except OutOfRangeError:
                attempt.finish()  # that is how reading ends; a step that failed is an error
                raise
            finally:
                wait_for_steps(
                    attempt.pending_steps
                )  # also where it failed: what it wrote is there or is not
            attempt.finish()
            return packed, None
        except BaseException as raised:
            error = blame(loaded.name, self.greeting.worker, raised)
            if resource:
                self._resources.keep(resource, None, error)
            return NOTHING, error


def _no_variable(name: str) -> Exception:
    return FailedPreconditionError(
        f"Variable {name!r} is made inside a function that a coordinator scheduled: it would be "
        "made again each time, and be lost with the worker. Make it in strategy.scope(), outside; "
        "what each worker is to keep for itself, create_per_worker_values makes"
    )


def _arguments(message: Run, buffers: Sequence[Buffer]) -> tuple[Any, Any]:
    """Return args and kwargs of a closure."""
    if not message.arguments:
        return (), {}
    counts = message.buffers[: 1 + len(message.inputs)]
    own, *inputs = _parts((message.arguments, *message.inputs), counts, buffers)
    args, kwargs = unpack(own, [unpack(each) for each in inputs])
    return args, kwargs


def _lease(message: Run, buffers: Sequence[Buffer]) -> LeasedElements | None:
    """Return the elements of a shared dataset that came with a closure; None: none did."""
    if not message.elements and not message.has_ended:
        return None
    before = 1 + len(message.inputs)
    first = sum(message.buffers[:before])
    elements = _parts(message.elements, message.buffers[before:], buffers[first:])
    return LeasedElements(elements, has_ended=message.has_ended)


def _parts(
    data: Sequence[bytes], counts: Sequence[int], buffers: Sequence[Buffer]
) -> list[Payload]:
    """Return payloads that came in one message, each with its own buffers."""
    if not counts:
        return [Payload(each) for each in data]
    rest = iter(buffers)
    return [
        Payload(each, [next(rest) for _ in range(count)])
        for each, count in zip(data, counts, strict=True)
    ]


def _packed(value: Any, function: str) -> Payload:
    try:
        return pack(value, pickler=ReplyPickler)
    except Exception as error:
        raise TypeError(
            f"what {function} returned, a {type(value).__name__}, cannot be sent to the "
            f"coordinator ({error}); return arrays, numbers, or structures of them"
        ) from error

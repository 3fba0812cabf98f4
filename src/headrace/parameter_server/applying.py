"""Where a parameter server carries out operations, one after another.

Rule 1. A read and a write never overlap: one request is carried out at a time, and an answer that
        shows a shard's own memory is copied on its way (`lent`) before the next one begins.
Rule 2. Requests are carried out in the order in which they came.
Rule 3. A request that cannot be carried out is answered with an error; the thread goes on. What
        follows it on the same channel, and says so, is refused until something else comes.
Rule 4. There is a thread for it, so that the transport's goes on. A small request that comes alone,
        or with another one, while nothing waits is carried out by the transport's thread at once:
        it would do nothing else meanwhile, and handing over takes longer than what is asked.
Rule 5. Others that look at what is kept, as those who save it, do so between two operations
        (`between`); what comes with the requests and is none of them, in turn with them (`later`).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.errors import CancelledError, FailedPreconditionError, HeadraceError, describe_error
from headrace.parameter_server.messages import (
    ArrayForm,
    CarriedOut,
    CarryOut,
    Elsewhere,
    OutOfTurn,
    Reborn,
    RestoreShards,
    SaveShards,
    ServerStatus,
    Status,
    buffer_of,
    form_of,
    read_arrays,
)
from headrace.parameter_server.operations import (
    Answer,
    Apply,
    ApplyIds,
    Assign,
    AssignIds,
    Count,
    Describe,
    Export,
    Fence,
    Gather,
    GatherIds,
    Lookup,
    Operation,
    Read,
    Scatter,
    Settle,
)
from headrace.parameter_server.seats import START, Position
from headrace.parameter_server.store import Store
from headrace.serving.call import Done, Message
from headrace.transport.channel import Request

__all__ = ["AnswerRoom", "Applying", "Changed", "Shared", "metrics_of"]


_log = logging.getLogger(__name__)

_STOP_SECONDS = 0.8
_UNCHANGING = frozenset({Read, Gather, GatherIds, Describe, Export})
_MAKING = frozenset({Gather, GatherIds, Lookup})
_SMALL_BYTES = 2 << 20
_MOST_REFUSED = 10_000
#: Of so many that come together the first does not wait for long until its answer goes.
_AT_ONCE = 2
#: What takes no longer than its arrays are large.
_SHORT = _MAKING | {Read, Count, Assign, Scatter, Apply, ApplyIds, Settle, Fence}
_WRITES = frozenset({Apply, ApplyIds, Assign, AssignIds, Scatter})


class _Turn:
    """A function that is called between two operations.

    Args:
        function: What is called.
        is_in_order: Whether it came with the requests, so that none after it comes before it.
    """

    def __init__(self, function: Callable[[], Any], *, is_in_order: bool) -> None:
        self._function = function
        self.is_in_order = is_in_order
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def take(self) -> None:
        """Call it."""
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


class AnswerRoom:
    """Makes the arrays of answers, where it can in memory from which they are sent."""

    def __init__(self) -> None:
        self.request: Request | None = None
        """What is answered now; None: its answer is made elsewhere."""

    def make(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array without values."""
        size = math.prod(shape) * dtype.itemsize
        memory = self.request.room(size) if size and self.request is not None else None
        if memory is None:
            return np.empty(shape, dtype)
        return np.frombuffer(memory, dtype).reshape(shape)


Changed = tuple[Operation, Sequence[NDArray[Any]]]


class Shared(Protocol):
    """A store that another server has as well. Called while nothing else is carried out."""

    @property
    def position(self) -> Position:
        """Which operations have been carried out."""

    @property
    def is_out_of_touch(self) -> bool:
        """Whether the other server is to be asked first whether this one still leads."""

    def refuse(self, message: CarryOut | SaveShards | RestoreShards) -> Message | None:
        """Return the answer to what is not carried out here; None: it is."""

    def forward(self, changed: Sequence[Changed]) -> bool:
        """Have the other server carry out what was; False: that was not for this one to do."""


class Applying:
    """Takes requests from the server's thread, and answers them from its own.

    Args:
        store: What operations are carried out on.
        index: The server's number, for statistics.
        room: Where the store makes its answers.
        shared: What has another server do the same; None: the store is here alone.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        room: AnswerRoom | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.files: Callable[[Request], object] | None = None
        """Answers requests to save and restore."""
        self.shared = shared
        self._room = room or AnswerRoom()
        self.life = secrets.token_hex(8)
        self._store = store
        self._index = index
        self._requests: SimpleQueue[Request | _Turn | None] = SimpleQueue()
        self._closed = threading.Event()
        #: Held by whoever looks at the store, or changes it: this object's thread, or the
        #: transport's. All that follows is changed under it, but for the first of the two counts;
        #: `status`, on the transport's thread, reads figures without it.
        self._one = threading.Lock()
        #: How many were handed to the thread, and how many of those are done. The transport's
        #: thread counts the first, ours the second; where they are equal nothing waits that came.
        self._handed_over = 0
        self._answered = 0
        self._operations: Counter[str] = Counter()
        self._carried_out = 0
        #: Of operations that change a value.
        self.writes = 0
        self._failed = 0
        #: Channels of which the last request was not carried out, in the order of those.
        self._refused: dict[str, None] = {}
        self._bytes_in = 0
        self._bytes_out = 0
        self._busy = 0.0
        self._since = time.monotonic()
        #: What was kept when that was seen last, and whether it is to be seen again.
        self._kept = _Kept()
        self._is_look_due = True
        self._thread = threading.Thread(
            target=self._run, name=f"headrace-parameter-server-{index}", daemon=True
        )

    def start(self) -> None:
        """Begin to carry out what `handle` takes."""
        self._thread.start()

    def close(self) -> None:
        """Carry out nothing more; wait for the operation that runs, but not for long."""
        self._closed.set()
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def handle(self, requests: Sequence[Request]) -> None:
        """Take requests; called by the transport's thread."""
        for request in requests:
            message = request.message
            if isinstance(message, CarryOut | SaveShards | RestoreShards):
                if self.shared is None and message.life not in ("", self.life):
                    request.reply(Reborn(life=self.life))
                elif not isinstance(message, CarryOut):
                    if self.shared is None:
                        self._to_files(request)
                    else:
                        self.later(partial(self._shared_to_files, request, message))
                elif len(requests) > _AT_ONCE or not self._carried_out_at_once(request, message):
                    self._handed_over += 1
                    self._requests.put(request)
            elif isinstance(message, Status):
                request.reply(self.status())
            else:
                request.reply(Done())

    @property
    def position(self) -> Position:
        """Which operations on a replicated store have been carried out."""
        return START if self.shared is None else self.shared.position

    def _to_files(self, request: Request) -> None:
        if self.files is None:
            request.fail(FailedPreconditionError("this server saves nothing"))
        else:
            self.files(request)

    def _shared_to_files(self, request: Request, message: SaveShards | RestoreShards) -> None:
        refusal = None if self.shared is None else self.shared.refuse(message)
        if refusal is None:
            self._to_files(request)
        else:
            request.reply(refusal)

    def _carried_out_at_once(self, request: Request, message: CarryOut) -> bool:
        """Carry out a request on the transport's thread, if it is small and nothing waits."""
        if self._handed_over != self._answered:
            return False
        kinds = set(map(type, message.operations))
        if not kinds <= (_SHORT if self.shared is None else _SHORT & _UNCHANGING):
            return False  # it takes long, or the other server would be waited for
        if self.shared is not None and self.shared.is_out_of_touch:
            return False  # likewise
        size = sum([memoryview(buffer).nbytes for buffer in request.buffers])
        if size > _SMALL_BYTES or not self._one.acquire(blocking=False):
            return False
        try:
            self._begin(request)
        finally:
            self._one.release()
        return True

    def status(self) -> ServerStatus:
        """Return what was done so far.

        It waits for nothing: while operations are carried out, what is kept is as it was after the
        first one that followed the last question.
        """
        if self._one.acquire(blocking=False):
            try:
                self._kept = _kept_in(self._store)
            finally:
                self._one.release()
        else:
            self._is_look_due = True
        kept = self._kept
        return ServerStatus(
            life=self.life,
            index=self._index,
            seconds=time.monotonic() - self._since,
            requests=self._carried_out,
            operations=dict(self._operations),
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            busy_seconds=self._busy,
            failed=self._failed,
            waiting=self._requests.qsize(),
            shards=kept.shards,
            tables=kept.tables,
            rows=kept.rows,
            bytes_kept=kept.nbytes,
        )

    def later(self, function: Callable[[], Any]) -> None:
        """Call a function between two operations, after what came before, and before what comes.

        Called by the transport's thread. The function answers for its errors itself.
        """
        self._handed_over += 1
        self._requests.put(_Turn(function, is_in_order=True))

    def between(self, function: Callable[[], Any]) -> Any:
        """Call a function between two operations, and return what it returns.

        Raises:
            CancelledError: The server is stopped.
        """
        turn = _Turn(function, is_in_order=False)
        self._requests.put(turn)
        while not turn.done.wait(_STOP_SECONDS):
            if self._closed.is_set():
                raise CancelledError("the parameter server was stopped")
        if turn.error is not None:
            raise turn.error
        return turn.result

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            with self._one:
                if isinstance(request, _Turn):
                    request.take()
                    self._answered += request.is_in_order
                else:
                    self._begin(request)
                    self._answered += 1
            # Not held while the thread waits for the next: its buffers may be the asker's memory.
            del request

    def _begin(self, request: Request) -> None:
        began = time.monotonic()
        is_carried_out = False
        try:
            is_carried_out = self._carry_out(request)
        except Exception as error:
            self._fail(request, error)
        if not is_carried_out:
            self._refused[request.peer] = None
            if len(self._refused) > _MOST_REFUSED:  # they have left, most likely
                del self._refused[next(iter(self._refused))]
        elif self._refused:
            self._refused.pop(request.peer, None)
        self._room.request = None
        self._busy += time.monotonic() - began
        if self._is_look_due:
            self._is_look_due = False
            self._kept = _kept_in(self._store)

    def _carry_out(self, request: Request) -> bool:
        message = request.message
        assert isinstance(message, CarryOut)
        if message.follows and request.peer in self._refused:
            request.reply(OutOfTurn())
            return False
        shared = self.shared
        if shared is not None and (refusal := shared.refuse(message)) is not None:
            request.reply(refusal)
            return False
        operations = message.operations
        if len(message.arrays) != len(operations):
            raise FailedPreconditionError(
                f"a request has {len(operations)} operations, and arrays for {len(message.arrays)}"
            )
        kinds = [type(operation) for operation in operations]
        # What a read shows may change by the next operation of this very request.
        reads = Read in kinds
        changes = reads and not _UNCHANGING.issuperset(kinds)
        # In memory of the connection's own one array can be made, and small ones put beside it.
        is_first = _MAKING.issuperset(kinds[:1]) and _MAKING.isdisjoint(kinds[1:])
        self._room.request = request if is_first else None
        answers: list[Answer] = []
        forms: list[tuple[ArrayForm, ...]] = []
        buffers: list[memoryview] = []
        given = read_arrays(message.arrays, request.buffers)
        changed: list[Changed] = []
        is_ours = True
        try:
            for operation, kind, arrays in zip(operations, kinds, given, strict=True):
                answer, found = self._store.carry_out(operation, arrays)
                answers.append(answer)
                of_each: list[ArrayForm] = []
                for array in found:
                    of_each.append(form_of(array))
                    if (kind is Read and changes) or not array.flags.c_contiguous:
                        array = array.copy()
                    buffers.append(buffer_of(array))
                forms.append(tuple(of_each))
                if shared is not None and kind not in _UNCHANGING:
                    changed.append((operation, arrays))
                self._operations[kind.__name__] += 1
                self.writes += kind in _WRITES
                self._bytes_in += sum([array.nbytes for array in arrays])
        finally:
            if shared is not None and changed:
                is_ours = shared.forward(changed)
        if not is_ours:
            request.reply(Elsewhere(is_vacant=True))
            return False
        self._bytes_out += sum([buffer.nbytes for buffer in buffers])
        self._carried_out += 1
        request.reply(
            CarriedOut(
                life=self.life,
                answers=tuple(answers),
                arrays=tuple(forms),
                writes=self.writes,
                position=self.position,
            ),
            buffers,
            lent=reads and not changes,
        )
        return True

    def _fail(self, request: Request, error: Exception) -> None:
        self._failed += 1
        if not isinstance(error, HeadraceError | ValueError | TypeError):
            _log.error("an operation failed: %s", describe_error(error), exc_info=error)
        request.fail(error)


# --- what a parameter server keeps, and what it says of itself to Prometheus ----------------------


class _Kept(NamedTuple):
    """What a store keeps.

    Attributes:
        shards: Of variables.
        tables: Shards of tables.
        rows: Of tables.
        nbytes: Of arrays, in all.
    """

    shards: int = 0
    tables: int = 0
    rows: int = 0
    nbytes: int = 0


def _kept_in(store: Store) -> _Kept:
    """Return what a store keeps; to be called between two operations."""
    tables = store.tables.values()
    return _Kept(
        shards=len(store.shards),
        tables=len(tables),
        rows=sum(len(table.rows) for table in tables),
        nbytes=sum(shard.nbytes for shard in store.shards.values())
        + sum(table.nbytes for table in tables),
    )


def metrics_of(status: ServerStatus) -> Iterator[Metric]:
    """Return the metrics of a parameter server."""
    name = "headrace_parameter_server_"
    operations = CounterMetricFamily(
        f"{name}operations", "Operations that were carried out.", labels=["operation"]
    )
    for operation, count in status.operations.items():
        operations.add_metric([operation], count)
    yield operations
    for counter, words, value in (
        ("requests", "Requests that were carried out.", status.requests),
        ("failures", "Requests that ended with an error.", status.failed),
        ("received_bytes", "Bytes of arrays that came.", status.bytes_in),
        ("sent_bytes", "Bytes of arrays that went.", status.bytes_out),
        ("busy_seconds", "Seconds spent on operations.", status.busy_seconds),
    ):
        yield CounterMetricFamily(f"{name}{counter}", words, value=value)
    seats = GaugeMetricFamily(
        f"{name}seats",
        "Stores that are on two servers, and what this one does.",
        labels=["store", "does"],
    )
    for store, does in status.seats.items():
        seats.add_metric([str(store), does], 1)
    yield seats
    for gauge, words, value in (
        ("waiting", "Requests that wait.", status.waiting),
        ("shards", "Shards of variables that are kept.", status.shards),
        ("tables", "Shards of tables that are kept.", status.tables),
        ("rows", "Rows of tables that are kept.", status.rows),
        ("kept_bytes", "Bytes of values, slots and tables that are kept.", status.bytes_kept),
        ("uptime_seconds", "Seconds since the server started.", status.seconds),
    ):
        yield GaugeMetricFamily(f"{name}{gauge}", words, value=value)

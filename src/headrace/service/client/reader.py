"""The reader: what the consumer takes from an iteration, in pieces of the size that is asked for.

Elements are used up, and acknowledged, when the consumer asks for those after them. They are kept
here until they cannot be asked for again (`keeping`). An interruption may come at any instruction
of the consumer's: `read` may be left anywhere, and `go_back` finds its way from there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from headrace.counts import count_delivered
from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered import Delivered
from headrace.plan.source import Position
from headrace.service.client.actions import Delivery, content_of
from headrace.service.client.job_use import JobUse
from headrace.service.client.keeping import Given, Keeper, Kept
from headrace.service.client.losses import report_loss
from headrace.service.client.opening import GATHER_SECONDS, gathered, open_iteration
from headrace.service.client.progress import Progress
from headrace.service.client.schedule import MOST_REQUESTS
from headrace.service.client.session import Session
from headrace.service.client.shell import Shell
from headrace.service.client.targets import Target
from headrace.service.config import STATIC_POLICIES, ShardingPolicy
from headrace.service.messages import LostSplits, OpenIteration, TaskAddress
from headrace.service.modes.coordinated_reads.session import RoundSession
from headrace.service.stub import DispatcherStub
from headrace.transport import address as addresses
from headrace.transport.channel import Channel

__all__ = ["RemoteReader"]

_log = logging.getLogger(__name__)


class RemoteReader:
    """Reads one iteration over the data service (`plan.source.Reader`).

    Args:
        opening: What to open, when the first element is asked for.
        dispatcher: The dispatcher's address, for messages.
        dial: Opens a connection to the dispatcher, for one call at a time.
        connect_dispatcher: Opens a channel to the dispatcher.
        connect: Opens a channel to the worker that has a task.
        max_outstanding_requests: Elements that may be outstanding: asked for, under way, or not
            used up; None: as many as a few requests to each worker bring.
        wait_timeout: Seconds without anybody who could deliver, after which reading fails.
        target: Chooses what to read; None: everything.
        keeper: Knows the readers that may be opened again after an interruption.
        trainer_id: For whom to read, where trainers share what workers make.
        cost_fn: The plan of the job's cost function; empty: it has none.
        codec: What answers may be packed with where the wire is slow; empty: they are not.
        base: What was delivered before, where places mean something to others; None: they do not.
        use: Notes whether the job is used up; None: nobody asks.
        lose: Takes the error about elements that are missing at the end; None: that is logged.
        earlier_loss: What an earlier pass of the same iterator lost, to be raised first.
    """

    def __init__(
        self,
        opening: OpenIteration,
        *,
        dispatcher: str,
        dial: Callable[[], DispatcherStub],
        connect_dispatcher: Callable[[], Channel],
        connect: Callable[[TaskAddress], Channel],
        max_outstanding_requests: int | None,
        wait_timeout: float = 3600.0,
        target: Target | None = None,
        keeper: Keeper | None = None,
        trainer_id: str = "",
        cost_fn: bytes = b"",
        codec: str = "",
        base: Delivered | None = None,
        use: JobUse | None = None,
        lose: Callable[[Exception], None] | None = None,
        earlier_loss: Exception | None = None,
    ) -> None:
        self._lose, self._earlier_loss = lose, earlier_loss
        self._use = use or JobUse()
        self._opening = opening
        self._cost_fn = cost_fn
        self._dispatcher = dispatcher
        self._dial = dial
        self._wait_timeout = wait_timeout
        self._target = target or Target()
        self._pid = os.getpid()
        session = _session(
            opening, dispatcher, max_outstanding_requests, wait_timeout, trainer_id, codec
        )
        self._shell = Shell(
            session,
            dispatcher=dispatcher,
            connect_dispatcher=connect_dispatcher,
            connect=connect,
            settles=opening.job_name is not None and not trainer_id,
            target=self._target,
        )
        self.name, self.pass_number = opening.client_id, opening.epoch
        #: Whether the dispatcher may know this client, and whether it said what there is to read.
        self._is_joining = self._is_open = False
        self._is_at_end = False
        self._reported_lost = False
        self._keeper = keeper
        self._keeps = keeper is not None and keeper.is_watched
        #: What is said of places; None: they are of this reader alone.
        self._progress = None if base is None or not self._keeps else Progress(base)
        self._has_base = bool(base)
        self._seed = opening.seed
        self._kept = Kept()
        #: What is to be given again.
        self._again: list[Given] = []
        #: What is being given.
        self._current: Given | None = None
        #: Elements and errors that were given, and the most that ever were.
        self._received = self._counted = 0
        #: Where the consumer closed, which may not have used all that was given; None: not yet.
        self._stop_at: int | None = None
        self._delivered: dict[str, int] = {}
        if keeper is not None:
            keeper.add(self)

    # --- reading --------------------------------------------------------------------------------

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements; None at the end (`plan.source.Reader`).

        Raises:
            FailedPreconditionError: There is no worker in this process, and it is to read no other;
                or this client counts as gone.
            UnavailableError: The dispatcher did not answer for a minute, or nobody could deliver
                for `wait_timeout`.
        """
        self._check_process()
        earlier, self._earlier_loss = self._earlier_loss, None
        if earlier is not None:
            raise earlier
        if not self._is_open and not self._shell.is_closing:
            self._join()
        self._shell.begin(self._in_hand)
        while True:
            given = self._current
            if given is not None:
                if self._received < given.stop:
                    if not self._shell.renew_lease():
                        self._end()
                    return self._give(given, limit)
                self._shell.use_up(given.delivery)
                self._current = None
            given = self._next_given()
            if given is None:
                self._end()
                self._use.ended()
                self._is_at_end = True
                return None
            self._use.received()
            self._current = given

    @property
    def arrived(self) -> int:
        """How many of the next elements are here, in one piece (`ElementIterator.arrived`)."""
        given = self._current
        if given is not None and self._received < given.stop:
            return given.stop - self._received
        if self._again:
            return self._again[0].size
        return self._shell.arrived

    def _join(self) -> None:
        """Open the iteration: here, so that after an interruption it is the same client again."""
        self._is_joining = True
        opened = open_iteration(
            self._opening,
            self._dial,
            dispatcher=self._dispatcher,
            wait_timeout=self._wait_timeout,
            target=self._target,
            keep=self._shell.line.keep,
            use=self._use,
            cost_fn=self._cost_fn,
        )
        if (
            self._opening.start_position_id
            and opened.seed != self._opening.seed
            and not opened.finished
        ):
            raise FailedPreconditionError(
                f"job {opened.job_name!r} reads this pass already, from another seed than that of "
                "the state; choose another job_name"
            )
        self._seed = opened.seed
        self._shell.opened(opened)
        self._is_open = True

    def _next_given(self) -> Given | None:
        """Return what comes next: again, after an interruption, or for the first time."""
        if self._again:
            return self._again.pop(0)
        delivery = self._shell.first()
        if delivery is None:
            return None
        content = content_of(delivery)
        size = 1 if isinstance(content, Exception) else content.size
        given = Given(delivery, content, self._received, size, _bytes_of(delivery))
        if not self._keeps:
            self._kept.forget(self._received)
        if self._progress is not None and delivery.answer is not None:
            self._progress.add(delivery.task.task_id, delivery.answer, self._received, size)
        # Kept first, so that an interruption here loses nothing: `go_back` sees that it is there.
        self._kept.add(given)
        self._shell.take(delivery)
        return given

    def _give(self, given: Given, limit: int) -> Chunk:
        if isinstance(given.content, Exception):
            self._received = given.stop
            raise given.content.with_traceback(None)
        start = self._received - given.start
        part = given.content.slice(start, start + limit)
        self._received += part.size
        new = self._received - max(self._counted, self._received - part.size)
        if new > 0:
            self._counted = self._received
            count_delivered(new)
            address = given.delivery.task.worker_address
            self._delivered[address] = self._delivered.get(address, 0) + new
        if self._progress is None:
            return part
        before = self._received - part.size
        return part.with_states(lambda index: self._place(before + index))

    def _in_hand(self) -> tuple[Delivery, int] | None:
        """Return what the consumer has begun to use, and how many elements of it."""
        current = self._current
        if current is None:
            return None
        stop = self._received if self._stop_at is None else min(self._stop_at, self._received)
        return current.delivery, max(0, stop - current.start)

    def _end(self) -> None:
        """Say what was lost, at the end; or raise why there is no going on."""
        failure = self._shell.failure
        if failure is not None:
            # Nothing more can come. Closed here, for the consumer may keep the error, and the
            # error keeps the consumer's frames and with them the iterator.
            self.close()
            raise failure.with_traceback(None)
        if not self._reported_lost:
            self._reported_lost = True
            report_loss(self._shell.lost, self._lose)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                "an iterator over the data service belongs to the process that opened it; iterate "
                "over the dataset in the forked process (or start it with the spawn method)"
            )

    # --- going back -----------------------------------------------------------------------------

    def get_position(self) -> Position:
        """Return where this reader stands, for `go_back` in this process."""
        return self._place(self._received)

    def _place(self, received: int) -> Position:
        return {
            "pass": list(self._opening.epoch),
            "received": received,
            "reader": self.name,
        }

    def said(self, place: int) -> Position:
        """Return a place so that others can go on from there; None: it is the beginning.

        Raises:
            FailedPreconditionError: It is not known any more.
        """
        if self._progress is None:
            raise FailedPreconditionError(
                "the reader has no places that mean something to others: take states from the "
                "iterator over the dataset"
            )
        if not (place or self._has_base or (self._opening.job_name and self._is_open)):
            return None
        delivered = self._progress.until(place)
        if self._opening.job_name is not None and self._is_open:
            delivered = gathered(
                delivered,
                self.name,
                self._dial,
                dispatcher=self._dispatcher,
                timeout=min(GATHER_SECONDS, self._wait_timeout),
            )
        return {"positions": delivered.to_json(), "seed": self._seed}

    @property
    def is_full(self) -> bool:
        """Whether much is kept that may be asked for again."""
        return self._keeps and self._kept.is_full

    def forget(self, before: int) -> None:
        """Forget what was given before so many elements and errors."""
        self._kept.forget(before)
        if self._progress is not None:
            self._progress.forget(before)

    def stop_at(self, place: int) -> None:
        """Take note that of what was given, nothing after `place` is used."""
        self._stop_at = place

    def go_back(self, place: int) -> bool:
        """Give again what came after `place`; False: it is closed, or that was forgotten."""
        may = self._is_at_end or not self._shell.is_closing
        since = self._kept.since(place) if may else None
        last = self._kept.last
        if since is None or (last is None and place != self._received):
            return False
        if last is not None:
            self._shell.take(last.delivery)
        if self._current is not None:
            # It is acknowledged, and kept here.
            self._shell.use_up(self._current.delivery)
            self._current = None
        self._again, self._received = since, place
        return True

    # --- reports --------------------------------------------------------------------------------

    def elements_by_worker(self) -> dict[str, int]:
        """Return how many elements each worker, by address, has delivered so far."""
        return dict(self._delivered)

    @property
    def skipped(self) -> int:
        """Elements that were gone when this reader, of a trainer that others share with, came."""
        return self._shell.skipped

    @property
    def lost(self) -> tuple[LostSplits, ...]:
        """What was lost with workers; known at the end of the iteration."""
        return self._shell.lost

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close; while the keeper holds it, it may be opened again where it was."""
        if self._pid != os.getpid():
            return  # the parent's, before a fork
        if self._is_at_end and self._keeps and self._keeper is not None:
            # The steps above may not have got to its end.
            self._keeper.remember(self)
        elif not self._shell.is_closing and self._keeper is not None and self._keeper.leave(self):
            # It may be opened again where it was. Who waits here now, on a thread of the steps
            # above, is not who reads on.
            self._shell.send_away()
            return
        self.end()

    def end(self) -> None:
        """Close, though it might be opened again."""
        self._shell.close(self._in_hand, is_known=self._is_joining)
        self._current = None
        self._again = []


def _session(
    opening: OpenIteration,
    dispatcher: str,
    most: int | None,
    wait_timeout: float,
    trainer_id: str,
    codec: str,
) -> Session | RoundSession:
    """Return the session of somebody who reads alone, or as one of several consumers."""
    client_id, now = opening.client_id, time.monotonic()
    max_outstanding = most or MOST_REQUESTS
    if opening.options.num_consumers is None or opening.consumer_index is None:
        return Session(
            client_id,
            dispatcher,
            max_outstanding,
            now,
            counts_elements=most is not None,
            wait_timeout=wait_timeout,
            trainer_id=trainer_id,
            codec=codec,
            is_far=lambda address: not addresses.is_local_host(addresses.split(address)[0]),
            has_shares=opening.options.processing_mode in STATIC_POLICIES,
            deals=opening.options.processing_mode == ShardingPolicy.DYNAMIC,
        )
    return RoundSession(
        client_id,
        dispatcher,
        max_outstanding,
        now,
        consumer=opening.consumer_index,
        consumers=opening.options.num_consumers,
        wait_timeout=wait_timeout,
    )


def _bytes_of(delivery: Delivery) -> int:
    if isinstance(delivery.payload, Exception):
        return 0
    return sum([memoryview(buffer).nbytes for buffer in delivery.payload])

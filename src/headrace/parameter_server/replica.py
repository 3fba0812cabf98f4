"""One seat of a replicated store, in the server that has it; and all that a server has.

Rule 1. What arrives is looked at between two operations, in the order in which it came: so a seat
        takes nothing from the one before after it was made the leading one.
Rule 2. The store and the seat are read and changed there alone, so they need no lock of their own.
        Two looks are taken elsewhere, on the transport's thread, and may be late: whether the seat
        outranks who speaks to it, and what it does, in words.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from headrace.errors import (
    CancelledError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
    describe_error,
)
from headrace.parameter_server.applying import Applying, Changed
from headrace.parameter_server.messages import (
    CarryOut,
    Elsewhere,
    Fill,
    Follow,
    Lead,
    Mirror,
    Reborn,
    RestoreShards,
    SaveShards,
    ServerReply,
    ServerStatus,
    buffer_of,
    contiguous,
    form_of,
    read_arrays,
)
from headrace.parameter_server.operations import Settle
from headrace.parameter_server.saved import Saved
from headrace.parameter_server.saving import Saving
from headrace.parameter_server.seats import PATIENCE, START, Admission, Position, Role, Seat
from headrace.parameter_server.store import (
    Holding,
    Store,
    holdings,
    restore,
    snapshot_of,
    snapshot_of_server,
)
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.call import Done, Message, Ping
from headrace.transport import zeromq
from headrace.transport.channel import Buffer, Channel, Request
from headrace.transport.security import Security

__all__ = ["Mirroring", "Replica", "Replicas"]


_log = logging.getLogger(__name__)

_PERIODS = 1 << 20
"""Marks of one epoch: those of the next are larger, so that increments have all of each shard."""


class Replica:
    """One seat: a store, what carries out operations on it, and its conversation with the other.

    Args:
        number: Of the store.
        index: Of this server.
        security: Keys of a client of the other server.
    """

    def __init__(self, number: int, index: int, security: Security | None) -> None:
        self._number = number
        self._store = Store()
        self._seat = Seat()
        self.applying = Applying(self._store, index, shared=self)
        self._mirroring = Mirroring(
            number, self._store, self._seat, self.applying, self._give_up, security
        )
        self._saving = Saving(self._store, self.applying, self._mirroring.left_alone)
        #: How many writes were here when they were given up because others were missing; -1: none.
        self._outdated_at = -1
        self.applying.start()
        self._saving.start()

    @property
    def words(self) -> str:
        """What the seat does."""
        seat = self._seat
        if seat.role is Role.LEADING:
            return "leads" if self._mirroring.is_followed else "leads alone"
        if seat.role is Role.FOLLOWING:
            return "follows" if seat.is_whole else "is filled"
        return "is vacant"

    def close(self) -> None:
        """Carry out nothing more."""
        self._mirroring.close()
        self._saving.close()
        self.applying.close()
        self._mirroring.hang_up()

    def handle(self, requests: Sequence[Request]) -> None:
        """Take requests; called by the transport's thread."""
        clients: list[Request] = []
        for request in requests:
            message = request.message
            hear = _HEARS.get(type(message))
            if hear is None:
                clients.append(request)
            elif isinstance(message, Follow | Fill | Mirror) and self._seat.outranks(
                message.epoch, message.life
            ):
                # At once: where two believe that they lead, each may wait for the other here.
                request.reply(Elsewhere(is_vacant=False))
            else:
                self.applying.handle(clients)
                clients = []
                self.applying.later(partial(self._hear, hear, request))
        self.applying.handle(clients)

    # --- between two operations, or as a part of one ----------------------------------------------

    @property
    def position(self) -> Position:
        """Which operations have been carried out."""
        return self._seat.position

    @property
    def is_out_of_touch(self) -> bool:
        """Whether the other seat may have taken over without the knowledge of this one."""
        return self._mirroring.is_out_of_touch

    def refuse(self, message: CarryOut | SaveShards | RestoreShards) -> Message | None:
        """Return the answer to what is not carried out here; None: it is."""
        if self.is_out_of_touch:
            self._mirroring.check()
        admission = self._seat.admit(message.life, insists=message.insists, seen=message.seen)
        if admission is Admission.PROMOTED:
            self._take_over()
        self.applying.life = self._seat.life
        match admission:
            case Admission.ELSEWHERE:
                return Elsewhere(is_vacant=False)
            case Admission.VACANT:
                return Elsewhere(is_vacant=True, outdated_at=self._outdated_at)
            case Admission.OUTDATED:
                return self._drop_outdated(message.seen)
            case Admission.REBORN:
                return Reborn(life=self._seat.life)
        return None

    def _drop_outdated(self, seen: Position) -> Message:
        """Give up contents that lack acknowledged operations; return the answer that says so."""
        had = self.applying.writes
        _log.error(
            "store %d is given up on this server: it stood still or was cut off, and lacks "
            "operations that were acknowledged elsewhere (it is at %s, and %s was reached); it has "
            "%d updates",
            self._number,
            self._seat.position,
            seen,
            had,
        )
        self._mirroring.lose()
        self._give_up()
        self._outdated_at = had
        return Elsewhere(is_vacant=True, outdated_at=had)

    def forward(self, changed: Sequence[Changed]) -> bool:
        """Have the other seat carry out what was; False: this one does not lead any more."""
        return self._mirroring.forward(changed)

    def _take_over(self) -> None:
        store = self._store
        store.period = self._seat.epoch * _PERIODS
        # Which rows were written after an earlier mark, only the other seat knew.
        for shard in store.shards.values():
            shard.touched.begin(store.period)
            shard.touched.write_all()
        for table in store.tables.values():
            table.begin(store.period)
            table.touched.write_all()
        self._mirroring.start()

    def _give_up(self) -> None:
        self._seat.vacate()
        self._clear()

    def _clear(self) -> None:
        self._store.shards.clear()
        self._store.tables.clear()
        self._store.counters.clear()
        self._store.keys = WriteKeys()
        self._store.is_restored = False
        self.applying.writes = 0
        self._outdated_at = -1

    def _hear(self, hear: Callable[[Replica, Request], Message], request: Request) -> None:
        try:
            request.reply(hear(self, request))
        except Exception as error:
            request.fail(error)

    def _lead(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, Lead)
        if self._seat.role is Role.VACANT or not self._seat.is_whole:
            self._seat.vacate()
            self._mirroring.seats, self._mirroring.place = message.seats, 0
            self._clear()
            self._mirroring.begin()
        return Done()

    def _follow(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, Follow)
        if not self._seat.follow(message.epoch, message.life, message.position):
            return Elsewhere(is_vacant=False)
        self._mirroring.lose()
        self._mirroring.seats, self._mirroring.place = message.seats, message.seat
        self._clear()
        restore(self._store, Saved(message.server, {}))
        self._store.is_restored = message.is_restored
        self.applying.writes = message.writes
        return Done()

    def _fill(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, Fill)
        if not self._seat.is_led_by(message.epoch, message.life):
            return Elsewhere(is_vacant=False)
        (arrays,) = read_arrays([message.arrays], request.buffers)
        restore(self._store, Saved(message.saved, dict(zip(message.names, arrays, strict=True))))
        self._store.keys.restore(message.incarnation, message.answers)
        return Done()

    def _mirror(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, Mirror)
        seat = self._seat
        if not seat.is_led_by(message.epoch, message.life):
            return Elsewhere(is_vacant=False)
        seat.is_whole = seat.is_whole or message.is_whole
        given = read_arrays(message.arrays, request.buffers)
        for operation, arrays in zip(message.operations, given, strict=True):
            try:
                self._store.carry_out(operation, arrays)
            except NotFoundError:
                if seat.is_whole:
                    raise
                # It comes with its shard, which this seat does not have yet.
        seat.position, self.applying.writes = message.position, message.writes
        return Done()


_HEARS: dict[type, Callable[[Replica, Request], Message]] = {
    Fill: Replica._fill,
    Follow: Replica._follow,
    Lead: Replica._lead,
    Mirror: Replica._mirror,
}


class Replicas:
    """The seats that one server has, each from when it is first asked for.

    Args:
        index: Of the server.
        security: Keys of a client of other servers.
    """

    def __init__(self, index: int, security: Security | None) -> None:
        self._index = index
        self._security = security
        self._by_number: dict[int, Replica] = {}

    def handle(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Take requests to replicated stores; return the others."""
        others: list[Request] = []
        by_store: dict[int, list[Request]] = {}
        for request in requests:
            number = getattr(request.message, "store", -1)
            (others if number < 0 else by_store.setdefault(number, [])).append(request)
        for number, each in by_store.items():
            self._replica(number).handle(each)
        return others

    def _replica(self, number: int) -> Replica:
        found = self._by_number.get(number)
        if found is None:
            found = Replica(number, self._index, self._security)
            self._by_number[number] = found
        return found

    def added_to(self, status: ServerStatus) -> ServerStatus:
        """Return what a server has done, with what its seats have."""
        replicas = dict(self._by_number)
        each = [replica.applying.status() for replica in replicas.values()]
        seats = {number: replica.words for number, replica in replicas.items()}
        sums = {
            name: getattr(status, name) + sum(getattr(one, name) for one in each)
            for name in (
                "requests", "bytes_in", "bytes_out", "busy_seconds", "failed", "waiting",
                "shards", "tables", "rows", "bytes_kept",
            )
        }  # fmt: skip
        operations = Counter(status.operations)
        for one in each:
            operations.update(one.operations)
        return msgspec.structs.replace(status, operations=dict(operations), seats=seats, **sums)

    def close(self) -> None:
        """Carry out nothing more. May be called twice."""
        for replica in list(self._by_number.values()):
            replica.close()


# --- what the leading seat of a replicated store says to the other one ----------------------------

#     follow, fill, fill, ..., mirror(is_whole)       the other seat gets what there is
#     mirror, mirror, ...                             and does what is done here
#
# Rule 1. A write is answered when the other seat has it, too, or is gone: then this one is alone.
# Rule 2. The other seat is filled one shard or table at a time, between two operations. What is
#         done meanwhile is mirrored as well: where the shard is not there yet, it will come with
#         it.
# Rule 3. All that is said is said between two operations, or as a part of one (`Applying`), so that
#         its order is that of the operations. What this object knows changes there alone, too, and
#         has no lock; its thread only waits, and asks whether the other server answers.
# Rule 4. Before it goes on alone, and before it answers when it has heard nothing of the other for
#         a while, as after its process stood still, it asks the other, on a connection of its own
#         if need be: that one may have taken over.
# Rule 5. A seat that takes nothing may have begun again, or lead itself. It is asked to follow;
#         what leads does not, and then what is here is given up, with the write that was not taken.

_PAUSE_SECONDS = 0.1
_CHECK_SECONDS = 0.5
_SLICE_SECONDS = 0.5
_STOP_SECONDS = 1.0
_TOUCH_SECONDS = 1.0
"""For so long a leading seat answers without news of the other; less than `PATIENCE` of clients."""
_LARGEST_REQUEST = 16 << 30


class Mirroring:
    """The leading seat's end; it has something to do only while the seat leads, or wants to.

    Args:
        number: Of the store.
        store: What this seat has.
        seat: What it does.
        applying: Carries out operations on the store.
        give_up: Gives up what this seat has: another one leads.
        security: Keys of a client of the other server.
    """

    def __init__(
        self,
        number: int,
        store: Store,
        seat: Seat,
        applying: Applying,
        give_up: Callable[[], object],
        security: Security | None,
    ) -> None:
        #: When the last message was sent that the other seat has answered as one that follows.
        self._in_touch_at = 0.0
        self.seats = ("", "")
        self.place = 0
        self._number = number
        self._store = store
        self._seat = seat
        self._applying = applying
        self._give_up = give_up
        self._security = security
        self._channel: Channel | None = None
        #: Whether the other seat follows, and gets all that is done here.
        self._is_followed = False
        #: Whether this seat is to lead contents that begin empty.
        self._begins = False
        #: Why the other seat does not follow, as it was logged last.
        self._said = ""
        #: Whether the other seat is left alone, as while this one is restored.
        self._is_held = False
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_followed(self) -> bool:
        """Whether the other seat has all that this one has."""
        return self._is_followed and not self._wanted.is_set()

    @property
    def is_out_of_touch(self) -> bool:
        """Whether the other seat, which followed, has not been heard of for a while."""
        return self._is_followed and time.monotonic() - self._in_touch_at > _TOUCH_SECONDS

    # --- between two operations ---------------------------------------------------------------

    def check(self) -> None:
        """Notice that the other seat is gone, or leads, also where nobody writes."""
        if self._is_followed:
            self._say(self._mirror())

    def begin(self) -> None:
        """Lead contents that begin empty, if the other seat agrees."""
        self._begins = True
        self.start()

    def start(self) -> None:
        """Have the other seat follow, now or as soon as it is there."""
        self._wanted.set()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(
                target=self._run, name=f"headrace-mirror-{self._number}", daemon=True
            )
            self._thread.start()

    def forward(self, changed: Sequence[Changed]) -> bool:
        """Have the other seat do what was done here; False: this one does not lead any more."""
        # Who lacks a Settle remembers a few keys for longer; it has all that was written.
        self._seat.advance(self.place, sum(type(each) is not Settle for each, _ in changed))
        if not self._is_followed:
            return True
        arrays = [[contiguous(array) for array in each] for _, each in changed]
        message = self._mirror(
            operations=tuple(operation for operation, _ in changed),
            arrays=tuple(tuple(map(form_of, each)) for each in arrays),
        )
        self._say(message, [buffer_of(array) for each in arrays for array in each])
        return self._seat.role is Role.LEADING

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Leave the other seat alone, as while this one is restored; not between two operations."""
        self._applying.between(self._hold)
        try:
            yield
        finally:
            self._applying.between(self._let_go)

    def _hold(self) -> None:
        """Have the other seat know that it lacks something."""
        self._is_held = True
        self._seat.advance(self.place, 1)  # what the other seat has now is outdated soon
        if self._is_followed and self._follow():
            self._is_followed = False

    def _let_go(self) -> None:
        """Have the other seat follow again."""
        self._is_held = self._is_followed = False
        self._wanted.set()

    def lose(self) -> None:
        """Have nobody follow any more: this seat does not lead."""
        self._is_followed = self._begins = False
        self._wanted.clear()

    # --- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Say nothing more. May be called twice; `hang_up` follows when no operation runs."""
        self._closed.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def hang_up(self) -> None:
        """Close the connection to the other server."""
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            is_wanted = self._wanted.wait(_CHECK_SECONDS)
            try:
                if not is_wanted:
                    self._applying.between(self.check)
                elif self._is_there():
                    self._fill_all()
            except CancelledError:
                return
            if is_wanted:
                self._closed.wait(_PAUSE_SECONDS)

    def _is_there(self) -> bool:
        channel = self._connect()
        try:
            channel.call(Ping(), timeout=_STOP_SECONDS)
        except HeadraceError:
            return False
        finally:
            channel.close()
        return True

    def _fill_all(self) -> None:
        """Bring the other seat what there is, one thing after another."""
        if not self._applying.between(self._begin_to_fill):
            return
        for holding in self._applying.between(partial(holdings, self._store)):
            if not self._applying.between(partial(self._fill, holding)):
                return
        self._applying.between(self._end_filling)

    def _begin_to_fill(self) -> bool:
        if self._is_held or self._is_followed:
            return False
        return self._follow()

    def _follow(self) -> bool:
        seat = self._seat
        is_new = self._begins and seat.role is Role.VACANT
        if seat.role is not Role.LEADING and not is_new:
            self.lose()
            return False
        life = secrets.token_hex(8) if is_new else seat.life
        message = Follow(
            store=self._number,
            seats=self.seats,
            seat=1 - self.place,
            epoch=1 if is_new else seat.epoch,
            life=life,
            server=snapshot_of_server(self._store).record,
            is_restored=self._store.is_restored,
            writes=self._applying.writes,
            position=START if is_new else seat.position,
        )
        reply = self._answer(message)
        self._is_followed = isinstance(reply, Done)
        if isinstance(reply, Elsewhere):
            self.lose()
            if not is_new:
                _log.warning(
                    "store %d is led by the server at %s now: what is here is given up",
                    self._number,
                    self.seats[1 - self.place],
                )
                self._give_up()
        if not self._is_followed:
            return False
        if is_new:
            seat.lead(life)
            self._begins = False
        return True

    def _fill(self, holding: Holding) -> bool:
        if not self._is_followed:
            return False
        saved = snapshot_of(self._store, holding)
        arrays = [contiguous(array) for array in saved.arrays.values()]
        target = " ".join(holding)
        message = Fill(
            store=self._number,
            epoch=self._seat.epoch,
            life=self._seat.life,
            saved=saved.record,
            names=tuple(saved.arrays),
            arrays=tuple(map(form_of, arrays)),
            incarnation=self._store.keys.incarnation,
            answers={target: self._store.keys.answers_of(target)},
        )
        return self._say(message, [buffer_of(array) for array in arrays])

    def _end_filling(self) -> None:
        seat = self._seat
        if self._is_followed and self._say(self._mirror(is_whole=True)):
            self._wanted.clear()
            self._said = ""
            _log.info("store %d is on two servers (epoch %d)", self._number, seat.epoch)

    # --- saying -----------------------------------------------------------------------------------

    def _connect(self) -> Channel:
        return zeromq.connect(
            self.seats[1 - self.place],
            reply_type=ServerReply,
            security=self._security,
            patience=PATIENCE,
            request_bytes=_LARGEST_REQUEST,
        )

    def _mirror(self, **what: Any) -> Mirror:
        seat = self._seat
        return Mirror(
            store=self._number,
            epoch=seat.epoch,
            life=seat.life,
            writes=self._applying.writes,
            position=seat.position,
            **what,
        )

    def _say(self, message: Message, buffers: Sequence[Buffer] = ()) -> bool:
        """Say something to the other seat, and wait until it is done; False: it is not."""
        reply = self._answer(message, buffers)
        is_refused = isinstance(reply, Elsewhere)
        if reply is None and not self._closed.is_set():
            is_refused = self._is_there()  # the connection alone was lost
        if is_refused and self._follow():
            self._is_followed = False  # it has nothing of what was said before
            self._wanted.set()
        return isinstance(reply, Done)

    def _answer(self, message: Message, buffers: Sequence[Buffer] = ()) -> Message | None:
        """Return what the other seat answers; None: it is gone, or cannot."""
        try:
            if self._channel is None:
                self._channel = self._connect()
            began = time.monotonic()
            ticket = self._channel.send(message, buffers)
            while (reply := self._channel.receive(_SLICE_SECONDS)) is None or (
                reply.ticket != ticket
            ):
                if self._closed.is_set():
                    raise UnavailableError("this server is stopped")
            if isinstance(reply.message, Exception):
                raise reply.message
        except Exception as error:
            self._alone(error)
            return None
        assert isinstance(reply.message, Message)
        if isinstance(reply.message, Done):
            self._in_touch_at = began
        return reply.message

    def _alone(self, error: Exception) -> None:
        words = describe_error(error)
        is_news = words != self._said  # it is tried again and again
        if is_news and self._seat.role is Role.LEADING and not self._closed.is_set():
            self._said = words
            _log.warning(
                "store %d is on this server alone until the one at %s is back: %s",
                self._number,
                self.seats[1 - self.place],
                words,
            )
        self._is_followed = False
        self._wanted.set()

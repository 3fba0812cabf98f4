"""One seat of a replicated store, in the server that has it; and all that a server has.

Rule 1. What arrives is looked at between two operations, in the order in which it came: so a seat
        takes nothing from the one before after it was made the leading one.
Rule 2. The store and the seat are read and changed there alone, so they need no lock of their own.
        Two looks are taken elsewhere, on the transport's thread, and may be late: whether the seat
        outranks who speaks to it, and what it does, in words.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from headrace.errors import NotFoundError
from headrace.parameter_server.acknowledged import Position
from headrace.parameter_server.applying import Applying, Changed
from headrace.parameter_server.gauges import kept_in
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
    ServerStatus,
    read_arrays,
)
from headrace.parameter_server.mirror import Mirroring
from headrace.parameter_server.saved import Saved
from headrace.parameter_server.saving import Saving
from headrace.parameter_server.seats import Admission, Role, Seat
from headrace.parameter_server.snapshots import restore
from headrace.parameter_server.store import Store
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.call import Done, Message
from headrace.transport.channel import Request
from headrace.transport.security import Security

__all__ = ["Replica", "Replicas"]

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
        self.applying.look = lambda: kept_in(self._store)
        self._saving = Saving(self._store, self.applying)
        self.applying.files = self._saving.handle
        self._mirroring = Mirroring(
            number,
            self._store,
            self._seat,
            self.applying.between,
            self._give_up,
            security,
            writes=lambda: self.applying.writes,
        )
        #: How many writes were here when they were given up because others were missing; -1: none.
        self._outdated_at = -1
        self._saving.around = self._mirroring
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

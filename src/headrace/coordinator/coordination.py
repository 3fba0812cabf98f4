"""The coordinator's end of all conversations with workers: events in, actions out.

Pure: no thread, socket or clock. The queue says which closure goes to which worker; this says what
that takes: greetings, functions that are sent once, values that are taken, things that workers make
again when they are back.

Rule 1. A worker is greeted under a number that no life of a worker had before, and again whenever
        it is lost. What is answered under another number changes nothing.
Rule 2. One request is always open at a worker that is there (`Attend`), so its loss is heard of.
Rule 3. What it keeps for itself is made again, in the order in which it was made first, before it
        gets anything else; iterators go on where they stood after the last closure that ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.coordinator.closure import NEVER, Closure, Payload, RemoteValueStatus
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.contact import Contact, Ended, Watch
from headrace.coordinator.messages import (
    Actions,
    Attend,
    Call,
    CalledOff,
    CallOff,
    Feed,
    Forget,
    Greet,
    Greeted,
    Ran,
    Received,
    Release,
    Resource,
    Run,
    Taken,
    TakeResult,
    feed_message,
    load_message,
    run_message,
)
from headrace.errors import AbortedError, FailedPreconditionError
from headrace.transport.channel import Buffer
from headrace.versions import Versions, release_mismatch

__all__ = ["Coordination"]

_MAX_KNOWN_FUNCTIONS = 10_000


class Coordination:
    """Workers, what they keep, and the queue.

    Args:
        queue: Which closure goes where.
        greeting: What each worker is greeted with, but for its number and its session.
        read_error: Returns the error that a worker wrote.
    """

    def __init__(
        self,
        queue: ClosureQueue,
        *,
        greeting: Greet,
        read_error: Callable[[bytes], Exception],
    ) -> None:
        self.queue = queue
        self.contacts: dict[int, Contact] = {}
        self.resources: dict[int, Resource] = {}
        self.overtaken: Exception | None = None
        """Why this coordinator has no say any more; None: it has."""
        self.watch = Watch()
        self.greeting = greeting
        self._read_error = read_error
        self._sessions = itertools.count(1)
        self._next_worker = 0
        self._actions = Actions()

    # --- what users want ------------------------------------------------------------------------

    def add_worker(
        self, address: str, now: float, worker: int | None = None, announced: float | None = None
    ) -> int:
        """Take a worker in; return its number: a new one, unless it has one or is there."""
        for contact in self.contacts.values():
            if contact.address == address and not contact.is_leaving:
                if contact.announced_at is not None:
                    contact.announced_at = announced
                return contact.worker
        if worker is None:
            worker = self._next_worker
        self._next_worker = max(self._next_worker, worker + 1)
        self.contacts[worker] = Contact(worker, address, now, announced_at=announced)
        return worker

    def remove_worker(self, worker: int) -> None:
        """Send a worker nothing more, and let it go when it has nothing any more."""
        self.contacts[worker].is_leaving = True

    def define(self, resource: Resource) -> None:
        """Have each worker make something, and keep it."""
        self.resources[resource.number] = resource
        for contact in self.contacts.values():
            if contact.is_there and not contact.is_leaving:
                self.queue.keep_at(contact.worker, resource.closure_for(contact.worker))

    def release(self, number: int) -> None:
        """Have workers let go of something."""
        if self.resources.pop(number, None) is not None:
            for contact in self.contacts.values():
                if contact.is_there:
                    self._call(contact, Release(session=contact.session, resources=(number,)))

    def feed(self, closure: Closure, elements: Sequence[Payload], *, has_ended: bool) -> None:
        """Bring elements to a closure that wants them; another attempt gets them, too."""
        if closure.work is None:
            return  # it has ended meanwhile
        lease = closure.work.lease
        lease.elements += elements
        lease.has_ended = lease.has_ended or has_ended
        lease.wants = 0
        contact = self.contacts.get(closure.worker)
        if contact is None or contact.sent.get(closure.number) is not closure:
            return  # it was lost, and is sent with all of them
        message, buffers = feed_message(
            contact.session, closure.number, elements, has_ended=lease.has_ended
        )
        self._call(contact, message, buffers)

    # --- events ---------------------------------------------------------------------------------

    def answered(
        self, worker: int, asked: Any, reply: Any, buffers: Sequence[Buffer], now: float
    ) -> None:
        """Take note of an answer, or of the error in its place."""
        contact = self.contacts.get(worker)
        if contact is None or asked.session != contact.session:
            return
        if not contact.is_there and not isinstance(asked, Greet):
            return
        if isinstance(reply, AbortedError) and not isinstance(asked, Greet):
            self.lost(worker, reply, now)
            return
        hear = _HEARS.get(type(asked))
        if hear is not None:
            hear(self, contact, asked, reply, buffers, now)

    def lost(self, worker: int, error: Exception, now: float) -> None:
        """Take note that a worker cannot be reached; all that was asked of it is forgotten."""
        contact = self.contacts.get(worker)
        if contact is None:
            return
        if contact.is_there:
            held = self.watch.lost(contact.sent.values())
            self._actions.words.append(
                f"worker {worker} ({contact.address}) is lost: {error}"
                + (f"; {held} functions that it had will run again" if held else "")
            )
            self.queue.worker_lost(worker)
            for resource in self.resources.values():
                if (result := resource.results.get(worker)) is not None:
                    result.status = RemoteValueStatus.ABORTED
        contact.went(str(error), now)

    def _greeted(
        self, contact: Contact, asked: Greet, reply: Any, buffers: Sequence[Buffer], now: float
    ) -> None:
        if not isinstance(reply, Greeted):
            if isinstance(reply, AbortedError) and self.overtaken is None:
                self.overtaken = reply
                self._actions.words.append(
                    f"this coordinator has no say any more, by word of worker {contact.worker} "
                    f"({contact.address}): {reply}"
                )
            is_news = str(reply) != contact.reason
            self.lost(contact.worker, reply, now)
            if isinstance(reply, FailedPreconditionError):
                contact.refusal = reply
                if is_news:
                    self._actions.words.append(
                        f"worker {contact.worker} ({contact.address}) refuses this coordinator: "
                        f"{reply}"
                    )
            return
        self._compare_releases(contact, reply.versions)
        contact.came(reply.process, reply.versions, now)
        self.queue.worker_came(contact.worker, contact.session)
        self._call(contact, Attend(session=contact.session))
        for resource in self.resources.values():
            self.queue.keep_at(contact.worker, resource.closure_for(contact.worker))

    def _compare_releases(self, contact: Contact, theirs: Versions) -> None:
        mine = self.greeting.versions
        if contact.versions != theirs and release_mismatch(mine, theirs):
            self._actions.words.append(
                f"worker {contact.worker} ({contact.address}) runs {theirs}, and this coordinator "
                f"{mine}: the same release everywhere is tested"
            )

    @property
    def failure(self) -> Exception | None:
        """Why nothing can run: another coordinator took over, or all workers refuse this one."""
        if self.overtaken is not None:
            return self.overtaken
        refusals = [contact.refusal for contact in self.contacts.values()]
        return refusals[0] if refusals and None not in refusals else None

    def _stopped(
        self, contact: Contact, asked: Attend, reply: Any, buffers: Sequence[Buffer], now: float
    ) -> None:
        error = reply if isinstance(reply, Exception) else AbortedError("it stopped")
        self.lost(contact.worker, error, now)

    def _ran(
        self,
        contact: Contact,
        asked: Run | Feed,
        reply: Any,
        buffers: Sequence[Buffer],
        now: float,
    ) -> None:
        number = asked.number
        closure = contact.sent.get(number)
        if not isinstance(reply, Ran):
            self._failed(contact, number, reply, now)
            return
        if closure is None:
            return
        if reply.wants:
            closure.work.lease.wants = reply.wants
            return
        if reply.lacks_function and closure.work is not None:
            contact.functions.discard(closure.work.function.digest)
            self._send(contact, closure)
            return
        if reply.is_dropped:
            return  # what called it off says so
        # Large values are taken one at a time, so that memory here and on the way is bounded. What
        # ends meanwhile waits its turn: places of iterators are those of all that came before.
        # Steps come at once, and last: their round needs all of them.
        count = len(buffers) - reply.beside
        steps = Payload(reply.steps, buffers[count:]) if reply.steps else None
        payload = None if reply.nbytes else Payload(reply.value, buffers[:count])
        ended = Ended(reply, steps, payload)
        if payload is None or contact.ended:
            contact.ended[number] = ended
            self._take_next(contact, now)
        else:
            self._returned(contact, number, ended, now)

    def _take_next(self, contact: Contact, now: float) -> None:
        while contact.ended:
            number, ended = next(iter(contact.ended.items()))
            if ended.payload is None:
                if not contact.is_taking:
                    contact.is_taking = True
                    self._call(contact, TakeResult(session=contact.session, number=number))
                return
            del contact.ended[number]
            self._returned(contact, number, ended, now)

    def _returned(self, contact: Contact, number: int, ended: Ended, now: float) -> None:
        ran = ended.ran
        closure = contact.sent.pop(number, None)
        for resource, state in ran.states.items():
            if state and resource in self.resources:
                self.resources[resource].states[contact.worker] = state
        if closure is not None and closure.work is not None and closure.work.lease is not None:
            closure.work.lease.unused = ran.unused
            closure.work.lease.met_end = ran.met_end
        error = self._read_error(ran.error) if ran.error else None
        if number > 0:
            contact.finished += 1
            if closure is not None:
                self.watch.ended(closure.name, ran.seconds, failed=error is not None)
        self.queue.returned(
            contact.session,
            number,
            None if error else ended.payload,
            error,
            wrote=ran.wrote,
            seconds=ran.seconds,
            now=now,
            steps=ended.steps,
        )

    def _took(
        self,
        contact: Contact,
        asked: TakeResult,
        reply: Any,
        buffers: Sequence[Buffer],
        now: float,
    ) -> None:
        contact.is_taking = False
        ended = contact.ended.pop(asked.number)
        if isinstance(reply, Taken):
            self._call(contact, Received(session=contact.session, number=asked.number))
            ended = ended._replace(payload=Payload(reply.value, buffers))
            self._returned(contact, asked.number, ended, now)
        else:
            self._failed(contact, asked.number, reply, now)
        self._take_next(contact, now)

    def _failed(self, contact: Contact, number: int, error: Exception, now: float) -> None:
        """Take note that a closure, or its value, could not be had."""
        contact.sent.pop(number, None)
        self.queue.returned(contact.session, number, None, error, wrote=True, seconds=0.0, now=now)

    def _called_off(
        self, contact: Contact, asked: CallOff, reply: Any, buffers: Sequence[Buffer], now: float
    ) -> None:
        if isinstance(reply, CalledOff):
            if reply.is_dropped:
                contact.sent.pop(asked.number, None)
            self.queue.called_off(
                contact.session, asked.number, is_dropped=reply.is_dropped, now=now
            )

    # --- what follows ---------------------------------------------------------------------------

    def act(self, now: float) -> Actions:
        """Return what is to be done now, and when to look again."""
        wake_at = NEVER
        for contact in list(self.contacts.values()):
            if contact.is_forgotten(now):
                self._actions.words.append(f"{contact.words(now)}; it is not waited for any more")
                contact.is_leaving = True
            if contact.is_leaving:
                self._let_go(contact)
            elif not contact.is_there and not contact.is_asked and self.overtaken is None:
                if contact.retry_at <= now:
                    self._greet(contact)
                else:
                    wake_at = min(wake_at, contact.retry_at)
        decided = self.queue.decide(now)
        for send in decided.sends:
            contact = self.contacts[send.worker]
            contact.sent[send.closure.number] = send.closure
            self.watch.sent(send.closure.number, self.queue.first)
            self._send(contact, send.closure)
        for off in decided.calls_off:
            # One that was lost may have been let go after that was decided.
            if (there := self.contacts.get(off.worker)) is not None:
                message = CallOff(session=off.session, number=off.number, how=off.how.value)
                self._call(there, message)
        if now >= self.watch.next_look:
            self._actions.words += self.watch.look(self.queue, self.contacts, now)
        actions, self._actions = self._actions, Actions()
        actions.settles, actions.fences = decided.settles, decided.fences
        actions.round = decided.round
        actions.wake_in = min(decided.wake_in, max(0.0, wake_at - now))
        return actions

    def _greet(self, contact: Contact) -> None:
        contact.session = next(self._sessions)
        contact.is_asked = True
        session, worker = contact.session, contact.worker
        self._call(contact, msgspec.structs.replace(self.greeting, session=session, worker=worker))

    def _let_go(self, contact: Contact) -> None:
        if contact.is_there:
            if not self.queue.worker_leaves(contact.worker):
                return
            self._call(contact, Forget(session=contact.session))
            # Fenced, too: a function that was given up may still run there.
            self.queue.worker_lost(contact.worker)
        self._actions.closes.append(contact.worker)
        del self.contacts[contact.worker]

    def _send(self, contact: Contact, closure: Closure) -> None:
        function = closure.work.function
        if function.digest not in contact.functions:
            if len(contact.functions) >= _MAX_KNOWN_FUNCTIONS:
                contact.functions.clear()  # what the worker still has is sent once more
            contact.functions.add(function.digest)
            self._call(contact, *load_message(contact.session, function))
        self._call(contact, *run_message(contact.session, closure))

    def _call(self, contact: Contact, message: Any, buffers: Sequence[Buffer] = ()) -> None:
        self._actions.calls.append(Call(contact.worker, message, buffers))


_HEARS: dict[type, Callable[..., None]] = {
    Attend: Coordination._stopped,
    CallOff: Coordination._called_off,
    Feed: Coordination._ran,
    Greet: Coordination._greeted,
    Run: Coordination._ran,
    TakeResult: Coordination._took,
}

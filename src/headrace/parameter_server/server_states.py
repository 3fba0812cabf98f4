"""The lives of parameter servers, as one process sees them: known, over, and what follows.

With replicas a server stands here for the store of its number, wherever that is.

    met("a") -> met("b")     the server was started again: it is reported, restored if somebody
                             does that here (`set_recovery`), and those who asked are told

Rule 1. That happens once for each life, on the thread that finds out, in the context of no closure.
Rule 2. Other threads ask that server nothing until it is done.
Rule 3. What is known to be acknowledged of contents only grows; whoever learns it from another
        process (`merge`) knows it as well as from an answer.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headrace.errors import (
    DataLossError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
    describe_error,
)
from headrace.parameter_server.messages import (
    ExecuteOperations,
    LeadEmptyStore,
    RestoreShards,
    SaveShards,
)
from headrace.parameter_server.replica_state import INITIAL_POSITION, AcknowledgedState, Position
from headrace.waiting import Backoff, WaitWarnings

__all__ = ["ServerStates", "ServerWait", "StoreLeaders"]


_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


class ServerStates:
    """Which lives of how many servers are known.

    Args:
        num_servers: Of servers.
        describe_server: What a server is called.
    """

    def __init__(self, num_servers: int, describe_server: Callable[[int], str]) -> None:
        self._describe_server = describe_server
        self._lock = threading.Lock()
        #: A record is replaced whole, under the lock, and read without it.
        self._known = [AcknowledgedState()] * num_servers
        #: Why the contents that are known are not served by who has some: these, and the reason.
        self._stale_reasons: dict[int, tuple[str, str]] = {}
        #: Why the contents before them were lost, where it was not that a server was started again.
        self._loss_reasons: dict[int, str] = {}
        self._restarted: set[int] = set()
        self._callbacks: list[Callable[[int], object]] = []
        self._recovery: Callable[[int, int], object] | None = None
        #: Which thread sees to a server that came back, and what others wait for.
        self._recovering: dict[int, tuple[int, threading.Event]] = {}

    def state_id(self, server: int) -> str:
        """Return which life of a server is known; "": none yet."""
        return self._known[server].state_id

    def acknowledged_writes(self, server: int) -> int:
        """Return how many writes a server has carried out, as far as is known."""
        return self._known[server].writes

    def acknowledged_position(self, server: int, state_id: str) -> Position:
        """Return up to where operations on these contents are known to be acknowledged."""
        known = self._known[server]
        return known.position if known.state_id == state_id else INITIAL_POSITION

    def acknowledged_states(self) -> tuple[AcknowledgedState, ...]:
        """Return what is known to be acknowledged, by server."""
        return tuple(self._known)

    def merge(self, states: Sequence[AcknowledgedState]) -> None:
        """Take note of what another process knows to be acknowledged, by server.

        What it knows of other contents than this process is left out: the servers say which are
        there now.
        """
        with self._lock:
            for server, (known, other) in enumerate(zip(self._known, states, strict=False)):
                if known.state_id in ("", other.state_id):
                    self._known[server] = other.merge(known)

    def loss_reason(self, server: int, *, was_restarted: bool) -> str:
        """Return why contents are lost, where it is not that a server was started again; or "".

        Args:
            server: Its number.
            was_restarted: Whether those before the contents that are there now are meant; else
                those that this process knows, which nobody serves.
        """
        if was_restarted:
            return self._loss_reasons.get(server, "")
        return self._stale_reasons.get(server, ("", ""))[1]

    def mark_stale(self, server: int, reason: str) -> None:
        """Take note, once, that what a server had of the contents that are known is outdated."""
        with self._lock:
            life = self._known[server].state_id
            if self._stale_reasons.get(server, (None, ""))[0] == life:
                return
            self._stale_reasons[server] = life, reason
        _log.warning("%s", reason)

    def has_restarted(self, server: int) -> bool:
        """Whether a server was started again since it was first asked."""
        return server in self._restarted

    def on_restart(self, callback: Callable[[int], object]) -> None:
        """Have `callback(server)` called when a server turns out to have been started again.

        It is called on the thread that noticed, but in no closure, before anybody here asks the
        server anything else; it may restore what the server held.
        """
        self._callbacks.append(callback)

    def set_recovery(self, recovery: Callable[[int, int], object] | None) -> None:
        """Have `recover(server, writes)` called before those; the latest one that was given is.

        `acknowledged_writes` is how many writes the life before had carried out, as far as is
        known.
        """
        self._recovery = recovery

    def clear_recovery(self, recovery: Callable[[int, int], object]) -> None:
        """Have it called no more, if it is the latest."""
        if self._recovery == recovery:
            self._recovery = None

    def record_state(
        self, server: int, state_id: str, writes: int = 0, position: Position = INITIAL_POSITION
    ) -> None:
        """Take note of the life of a server that answered, and of what it has acknowledged."""
        now = AcknowledgedState(state_id, writes, position)
        if now == self._known[server] and server not in self._stale_reasons:
            return
        with self._lock:
            known = self._known[server]
            before, lost = known.state_id, known.writes
            self._known[server] = now.merge(known) if before == state_id else now
            whose, words = self._stale_reasons.pop(server, ("", ""))
            if before == state_id:
                return
            done = threading.Event()
            if before:
                self._restarted.add(server)
                self._recovering[server] = (threading.get_ident(), done)
                self._loss_reasons[server] = words if whose == before else ""
        if not before:
            return
        try:
            # What is written then is not the write of the closure that found out.
            contextvars.Context().run(self._recover_server, server, lost)
        finally:
            with self._lock:
                if self._recovering.get(server, (0, None))[1] is done:
                    del self._recovering[server]
            done.set()

    def wait_for_recovery(self, server: int, check: Callable[[], object]) -> None:
        """Wait until a server that came back was seen to.

        Args:
            server: Its number.
            check: Called now and then; raises if nobody is to wait any more.
        """
        while (busy := self._recovering.get(server)) is not None and busy[
            0
        ] != threading.get_ident():
            busy[1].wait(_POLL_SECONDS)
            check()

    def _recover_server(self, server: int, lost_writes: int) -> None:
        recover = self._recovery
        _log.warning(
            "%s; %s",
            self._loss_reasons.get(server)
            or f"{self._describe_server(server)} was started again, and has lost the variables and "
            "tables that it held",
            "they are restored now"
            if recover
            else (
                "nothing in this process restores them: a CheckpointManager of the coordinator "
                "does, where there is one; else restore a checkpoint, or make them again"
            ),
        )
        if recover is not None:
            try:
                recover(server, lost_writes)
            except Exception as error:
                _log.error(
                    "%s was not restored: %s", self._describe_server(server), describe_error(error)
                )
        for callback in list(self._callbacks):
            callback(server)


# --- which server is asked for which store, where each store is on two of them --------------------

# Rule 1. Store k is on servers k and k + 1. The first that answers for it is asked on; when it is
#         gone, or says that it does not lead, the other one is.
# Rule 2. The other one hears when the first was found gone or empty: only then may it take over.
# Rule 3. Where both are found empty, the store begins empty, or is restored.

A = TypeVar("A", ExecuteOperations, SaveShards | RestoreShards)


class _StoreRoute(NamedTuple):
    """Where a store is looked for.

    Attributes:
        replica_index: 0 for the first server that may have it, 1 for the second.
        unavailable: Whether each of the two was found gone or empty, since one has answered.
        empty: Whether each of the two was found empty.
    """

    replica_index: int = 0
    unavailable: tuple[bool, bool] = (False, False)
    empty: tuple[bool, bool] = (False, False)


class StoreLeaders:
    """Where each store is looked for; without replicas, store k is on server k alone.

    Args:
        addresses: Of the servers.
        replication: How many servers have each store.
    """

    def __init__(self, addresses: tuple[str, ...], replication: int) -> None:
        self._addresses = addresses
        self.is_replicated = replication == 2
        #: A record is replaced whole: threads that find the same out do no harm to each other.
        self._routes = [_StoreRoute()] * len(addresses)

    def find_server(self, store: int) -> int:
        """Return which server is to be asked for a store."""
        return (store + self._routes[store].replica_index) % len(self._addresses)

    def address_message(
        self, message: A, store: int, required_position: Position = INITIAL_POSITION
    ) -> A:
        """Return a message as the server that is asked for the store is to get it.

        Args:
            message: What is asked.
            store: Its number.
            required_position: Up to where operations on the contents that it is meant for are
                acknowledged.
        """
        if not self.is_replicated:
            return message
        place, gone, _ = self._routes[store]
        return msgspec.structs.replace(
            message,
            store=store,
            peer_unavailable=gone[1 - place],
            required_position=required_position,
        )

    def record_reply(self, store: int, server: int) -> None:
        """Take note that a server has answered for a store."""
        if self.is_replicated:
            self._routes[store] = _StoreRoute(replica_index=int(server != store))

    def record_unavailable(self, store: int, server: int) -> None:
        """Take note that a server could not be reached; the other one is asked next."""
        self._try_other_replica(store, server, is_unavailable=True, is_empty=False)

    def record_not_leader(self, store: int, server: int, *, is_empty: bool) -> None:
        """Take note that a server does not lead a store; the other one is asked next."""
        self._try_other_replica(store, server, is_unavailable=is_empty, is_empty=is_empty)

    def _try_other_replica(
        self, store: int, server: int, *, is_unavailable: bool, is_empty: bool
    ) -> None:
        if self.is_replicated:
            place = int(server != store)
            _, gone, vacant = self._routes[store]
            self._routes[store] = _StoreRoute(
                1 - place,
                _replace_entry(gone, place, is_unavailable),
                _replace_entry(vacant, place, is_empty),
            )

    def take_lead_request(self, store: int) -> LeadEmptyStore | None:
        """Return what has a store begin empty, for its first server, where both have nothing."""
        placed = self._routes[store]
        if placed.empty != (True, True):
            return None
        self._routes[store] = _StoreRoute()
        second = (store + 1) % len(self._addresses)
        return LeadEmptyStore(
            store=store, replica_addresses=(self._addresses[store], self._addresses[second])
        )


def _replace_entry(pair: tuple[bool, bool], index: int, value: bool) -> tuple[bool, bool]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


# --------------------------------------------------------------------------------------------------
# Waiting for one parameter server: with a word after ten seconds, then each minute, and an end


class ServerWait:
    """That of one who asked a server for something.

    Args:
        server: What the server is called.
        task: What it was asked to do, for words.
        timeout: So long it may be away, or without what it held.
        sleep: Waits for some seconds; raises if nobody is to wait any more.
        started_at: When the waiting began, by the monotonic clock; None: now.
        loss_reason: Returns why what the server held is lost, where it was not started again; else
            "". It takes whether the server has begun again with nothing.
    """

    def __init__(
        self,
        server: str,
        task: str,
        timeout: float,
        sleep: Callable[[float], object],
        started_at: float | None,
        loss_reason: Callable[[bool], str],
    ) -> None:
        self._loss_reason = loss_reason
        self._server = server
        self._task = task
        self._timeout = timeout
        self._sleep = sleep
        self._started_at = time.monotonic() if started_at is None else started_at
        self._warnings = WaitWarnings()
        self._backoff = Backoff(0.02, longest=1.0, factor=1.3, jitter=0.2)

    def warn_if_due(self, state: str) -> None:
        """Log what the server does, where that has lasted."""
        waited = time.monotonic() - self._started_at
        if self._warnings.is_due(waited):
            _log.warning(
                "%s %s for %.0f s; it was asked to %s",
                self._server,
                state,
                waited,
                self._task,
            )

    def wait_before_retry(self, error: HeadraceError) -> None:
        """Wait before the next try.

        Args:
            error: What the last try ended with.

        Raises:
            DataLossError: Nobody has restored in time what the server held.
            UnavailableError: It could not be reached in time.
        """
        pause = next(self._backoff)
        if time.monotonic() + pause > self._started_at + self._timeout:
            began_again = isinstance(error, NotFoundError)
            why_lost = self._loss_reason(began_again)
            if began_again:
                raise DataLossError(
                    f"{why_lost or f'{self._server} was started again'}, and in "
                    f"{self._timeout:g} s nobody restored what it held: {error}. Restore a "
                    "checkpoint; an `hr.CheckpointManager` that is there while training does so by "
                    "itself"
                ) from error
            if why_lost:
                raise DataLossError(
                    f"{why_lost}, and in {self._timeout:g} s the other server has not come back "
                    f"({error}). Start it again: if it still has them, nothing is lost; if it "
                    "ended, restore a checkpoint then, which an `hr.CheckpointManager` that is "
                    "there while training does by itself"
                ) from error
            raise UnavailableError(
                f"{self._server} did not answer for {self._timeout:g} s: is it running, and is "
                f"this its address? The last try: {error}"
            ) from error
        self.warn_if_due(f"cannot do what it is asked ({error})")
        self._sleep(pause)

"""States of parameter servers as one process knows them: current, lost, and their recovery.

A state id names the contents of a server, from its start or its first empty store until they are
lost. With replication, a "server" in this module means the store of the same number, whichever
server leads it.

    state "a" -> state "b"      the server was restarted: the loss is logged, the contents are
                                restored if `set_recovery` was called, then callbacks run

Rule 1. Recovery runs once for each new state, on the thread that discovers it, outside the context
        of any closure.
Rule 2. Other threads send no requests to that server until recovery has finished.
Rule 3. The known acknowledged position of a state only grows; positions learned from another
        process (`merge`) count as much as those from replies.
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
from headrace.waiting import Backoff, WaitWarningLimiter

__all__ = ["ServerStates", "ServerWait", "StoreLeaders"]


_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


class ServerStates:
    """The known states of all servers.

    Args:
        num_servers: Number of servers.
        describe_server: Returns the description of a server for messages.
    """

    def __init__(self, num_servers: int, describe_server: Callable[[int], str]) -> None:
        self._describe_server = describe_server
        self._lock = threading.Lock()
        #: A record is replaced as a whole, under the lock, and read without it.
        self._known = [AcknowledgedState()] * num_servers
        #: State id and reason, by server, where the only reachable copy of the known state is
        #: stale.
        self._stale_reasons: dict[int, tuple[str, str]] = {}
        #: Why the previous state was lost, by server, if not because of a restart.
        self._loss_reasons: dict[int, str] = {}
        self._restarted: set[int] = set()
        self._callbacks: list[Callable[[int], object]] = []
        self._recovery: Callable[[int, int], object] | None = None
        #: Thread that recovers a server, and the event that other threads wait for.
        self._recovering: dict[int, tuple[int, threading.Event]] = {}

    def state_id(self, server: int) -> str:
        """Return the known state id of a server; "" if none is known yet."""
        return self._known[server].state_id

    def acknowledged_writes(self, server: int) -> int:
        """Return the number of acknowledged writes of a server that this process knows of."""
        return self._known[server].writes

    def acknowledged_position(self, server: int, state_id: str) -> Position:
        """Return the highest acknowledged position that is known of a state."""
        known = self._known[server]
        return known.position if known.state_id == state_id else INITIAL_POSITION

    def acknowledged_states(self) -> tuple[AcknowledgedState, ...]:
        """Return the known acknowledged states, by server."""
        return tuple(self._known)

    def merge(self, states: Sequence[AcknowledgedState]) -> None:
        """Merge the acknowledged states that another process knows, by server.

        Entries with a different state id are ignored: only the servers say which state is current.
        """
        with self._lock:
            for server, (known, other) in enumerate(zip(self._known, states, strict=False)):
                if known.state_id in ("", other.state_id):
                    self._known[server] = other.merge(known)

    def loss_reason(self, server: int, *, was_restarted: bool) -> str:
        """Return why a state was lost, if not because of a restart; else "".

        Args:
            server: Index of the server.
            was_restarted: Whether the state before the current one is meant; else the known state,
                which no server serves.
        """
        if was_restarted:
            return self._loss_reasons.get(server, "")
        return self._stale_reasons.get(server, ("", ""))[1]

    def mark_stale(self, server: int, reason: str) -> None:
        """Record and log, once, that a server's copy of the known state is stale."""
        with self._lock:
            state_id = self._known[server].state_id
            if self._stale_reasons.get(server, (None, ""))[0] == state_id:
                return
            self._stale_reasons[server] = state_id, reason
        _log.warning("%s", reason)

    def has_restarted(self, server: int) -> bool:
        """Return whether a server was restarted since this process first contacted it."""
        return server in self._restarted

    def on_restart(self, callback: Callable[[int], object]) -> None:
        """Register `callback(server)`, called when a server turns out to have been restarted.

        It is called on the thread that discovered the restart, outside any closure and before any
        other request of this process to the server; it may restore the server's contents.
        """
        self._callbacks.append(callback)

    def set_recovery(self, recovery: Callable[[int, int], object] | None) -> None:
        """Set the function `recovery(server, writes)` that is called before the callbacks.

        `writes` is the number of acknowledged writes of the previous state, as far as this process
        knows. The function replaces an earlier one.
        """
        self._recovery = recovery

    def clear_recovery(self, recovery: Callable[[int, int], object]) -> None:
        """Remove the recovery function, if it is the current one."""
        if self._recovery == recovery:
            self._recovery = None

    def record_state(
        self, server: int, state_id: str, writes: int = 0, position: Position = INITIAL_POSITION
    ) -> None:
        """Record the state of a server that replied, and its acknowledged writes and position."""
        state = AcknowledgedState(state_id, writes, position)
        if state == self._known[server] and server not in self._stale_reasons:
            return
        with self._lock:
            known = self._known[server]
            previous_id, lost_writes = known.state_id, known.writes
            self._known[server] = state.merge(known) if previous_id == state_id else state
            stale_id, reason = self._stale_reasons.pop(server, ("", ""))
            if previous_id == state_id:
                return
            done = threading.Event()
            if previous_id:
                self._restarted.add(server)
                self._recovering[server] = (threading.get_ident(), done)
                self._loss_reasons[server] = reason if stale_id == previous_id else ""
        if not previous_id:
            return
        try:
            # Writes made during recovery do not belong to the closure that discovered the restart.
            contextvars.Context().run(self._recover_server, server, lost_writes)
        finally:
            with self._lock:
                if self._recovering.get(server, (0, None))[1] is done:
                    del self._recovering[server]
            done.set()

    def wait_for_recovery(self, server: int, check: Callable[[], object]) -> None:
        """Wait until a restarted server has been recovered.

        Args:
            server: Index of the server.
            check: Called once a second; raises to stop waiting.
        """
        while (recovery := self._recovering.get(server)) is not None and recovery[
            0
        ] != threading.get_ident():
            recovery[1].wait(_POLL_SECONDS)
            check()

    def _recover_server(self, server: int, lost_writes: int) -> None:
        recover = self._recovery
        _log.warning(
            "%s; %s",
            self._loss_reasons.get(server)
            or f"{self._describe_server(server)} was restarted and has lost its variables and "
            "tables",
            "restoring them now"
            if recover
            else (
                "this process does not restore them: the coordinator's CheckpointManager does, if "
                "there is one; otherwise restore a checkpoint, or create them again"
            ),
        )
        if recover is not None:
            try:
                recover(server, lost_writes)
            except Exception as error:
                _log.error(
                    "cannot restore %s: %s", self._describe_server(server), describe_error(error)
                )
        for callback in list(self._callbacks):
            callback(server)


# --- routing of requests to replicated stores -----------------------------------------------------

# Rule 1. Store k is on servers k and k + 1. The first to reply for it is asked until it is
#         unreachable or says that it does not lead; then the other one is asked.
# Rule 2. A request tells the other server if the first was unreachable or empty: only then may it
#         take over.
# Rule 3. If both are empty, the store starts empty or is restored.

A = TypeVar("A", ExecuteOperations, SaveShards | RestoreShards)


class _StoreRoute(NamedTuple):
    """Route of requests to a store.

    Attributes:
        replica_index: 0 for the first server that may hold it, 1 for the second.
        unavailable: For each of the two, whether it was unreachable or empty since the last reply.
        empty: For each of the two, whether it was empty.
    """

    replica_index: int = 0
    unavailable: tuple[bool, bool] = (False, False)
    empty: tuple[bool, bool] = (False, False)


class StoreLeaders:
    """The server to ask for each store; without replication, store k is on server k.

    Args:
        addresses: Addresses of the servers.
        replication: Number of servers that hold each store.
    """

    def __init__(self, addresses: tuple[str, ...], replication: int) -> None:
        self._addresses = addresses
        self.is_replicated: bool = replication == 2
        #: Records are replaced as a whole, so threads that discover the same change do no harm.
        self._routes = [_StoreRoute()] * len(addresses)

    def find_server(self, store: int) -> int:
        """Return the index of the server to ask for a store."""
        return (store + self._routes[store].replica_index) % len(self._addresses)

    def address_message(
        self, message: A, store: int, required_position: Position = INITIAL_POSITION
    ) -> A:
        """Return a copy of a message, addressed to a store.

        Args:
            message: The message.
            store: Number of the store.
            required_position: Acknowledged position of the state that the message is meant for.
        """
        if not self.is_replicated:
            return message
        replica_index, unavailable, _ = self._routes[store]
        return msgspec.structs.replace(
            message,
            store=store,
            peer_unavailable=unavailable[1 - replica_index],
            required_position=required_position,
        )

    def record_reply(self, store: int, server: int) -> None:
        """Record that a server replied for a store."""
        if self.is_replicated:
            self._routes[store] = _StoreRoute(replica_index=int(server != store))

    def record_unavailable(self, store: int, server: int) -> None:
        """Record that a server is unreachable; the other one is asked next."""
        self._try_other_replica(store, server, is_unavailable=True, is_empty=False)

    def record_not_leader(self, store: int, server: int, *, is_empty: bool) -> None:
        """Record that a server does not lead a store; the other one is asked next."""
        self._try_other_replica(store, server, is_unavailable=is_empty, is_empty=is_empty)

    def _try_other_replica(
        self, store: int, server: int, *, is_unavailable: bool, is_empty: bool
    ) -> None:
        if self.is_replicated:
            replica_index = int(server != store)
            _, unavailable, empty = self._routes[store]
            self._routes[store] = _StoreRoute(
                1 - replica_index,
                _replace_entry(unavailable, replica_index, is_unavailable),
                _replace_entry(empty, replica_index, is_empty),
            )

    def take_lead_request(self, store: int) -> LeadEmptyStore | None:
        """Return the request that starts a store empty, for its first server, if both are empty."""
        route = self._routes[store]
        if route.empty != (True, True):
            return None
        self._routes[store] = _StoreRoute()
        second = (store + 1) % len(self._addresses)
        return LeadEmptyStore(
            store=store, replica_addresses=(self._addresses[store], self._addresses[second])
        )


def _replace_entry(pair: tuple[bool, bool], index: int, value: bool) -> tuple[bool, bool]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


# --------------------------------------------------------------------------------------------------
# Retries of requests to one parameter server: backoff, warnings after 10 s and then once a minute,
# and a timeout


class ServerWait:
    """The retry state of one request.

    Args:
        server: Description of the server.
        task: Description of the request, for messages.
        timeout: Largest time in seconds that the server may be unreachable or lack its contents.
        sleep: Sleeps for some seconds; raises to stop waiting.
        started_at: When the waiting began, by the monotonic clock; None means now.
        loss_reason: Returns why the server's contents are lost, if not because of a restart; else
            "". Its argument is whether the server was restarted without contents.
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
        self._warnings = WaitWarningLimiter()
        self._backoff = Backoff(0.02, longest=1.0, factor=1.3, jitter=0.2)

    def warn_if_due(self, state: str) -> None:
        """Log the state of the request, if a warning is due."""
        waited = time.monotonic() - self._started_at
        if self._warnings.should_warn(waited):
            _log.warning(
                "%s: %s for %.0f s; pending request: %s",
                self._server,
                state,
                waited,
                self._task,
            )

    def wait_before_retry(self, error: HeadraceError) -> None:
        """Sleep before the next attempt.

        Args:
            error: Error of the last attempt.

        Raises:
            DataLossError: If the server's contents were not restored in time.
            UnavailableError: If the server was unreachable for too long.
        """
        pause = next(self._backoff)
        if time.monotonic() + pause > self._started_at + self._timeout:
            was_restarted = isinstance(error, NotFoundError)
            loss_reason = self._loss_reason(was_restarted)
            if was_restarted:
                loss = loss_reason or f"{self._server} was restarted"
                raise DataLossError(
                    f"{loss}, and its contents were not restored within {self._timeout:g} s: "
                    f"{error}. Restore a checkpoint; an `hr.CheckpointManager` does so "
                    "automatically while a program trains"
                ) from error
            if loss_reason:
                raise DataLossError(
                    f"{loss_reason}; the other server did not become reachable within "
                    f"{self._timeout:g} s ({error}). Resume or reconnect it: if it still has these "
                    "updates, nothing is lost. If its process has ended, start it and restore a "
                    "checkpoint, which an `hr.CheckpointManager` does automatically while a "
                    "program trains"
                ) from error
            raise UnavailableError(
                f"{self._server} did not reply for {self._timeout:g} s: is it running at this "
                f"address? Last error: {error}"
            ) from error
        self.warn_if_due(f"retrying the request ({error})")
        self._sleep(pause)

"""One replica of a replicated store on its server, and all replicas of a server.

Rule 1. Messages are handled between two operations, in arrival order, so a replica accepts nothing
        from a former leader after it became leader itself.
Rule 2. The store and the replica's state are read and changed only there, so they need no lock. Two
        values are read on the transport's thread and may be slightly out of date: whether this
        replica outranks a sender, and the description of its role.
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
from headrace.parameter_server.checkpoint_thread import CheckpointThread
from headrace.parameter_server.messages import (
    ExecuteOperations,
    FollowLeader,
    LeadEmptyStore,
    NotLeader,
    ReplicateOperations,
    RestoreShards,
    SaveShards,
    ServerReply,
    ServerStatus,
    StateLost,
    TransferShard,
    as_contiguous,
    buffer_of,
    buffer_spec,
    read_arrays,
)
from headrace.parameter_server.operation_executor import ExecutedWrite, OperationExecutor
from headrace.parameter_server.operations import ForgetWriteKeys
from headrace.parameter_server.replica_state import (
    INITIAL_POSITION,
    REPLICA_TIMEOUT_SECONDS,
    Position,
    ReplicaRole,
    ReplicaState,
    RequestDecision,
)
from headrace.parameter_server.shard_values import ShardSnapshot
from headrace.parameter_server.store import (
    ShardId,
    ShardStore,
    list_shards,
    restore_snapshot,
    snapshot_server,
    snapshot_shard,
)
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.rpc import Done, Message, Ping
from headrace.transport import zeromq
from headrace.transport.channel import Buffer, Channel, Request
from headrace.transport.security import Security

__all__ = ["ReplicationStream", "StoreReplica", "StoreReplicas"]


_log = logging.getLogger(__name__)

_PERIODS_PER_TERM = 1 << 20
"""Dirty-row periods per term: those of a later term are larger, so that the first incremental
checkpoint after a takeover contains all of each shard.
"""


class StoreReplica:
    """A replica: a store, the executor of its operations, and the link to the other replica.

    Args:
        store_number: Number of the store.
        index: Index of this server.
        security: Keys of a client, for requests to the other server.
    """

    def __init__(self, store_number: int, index: int, security: Security | None) -> None:
        self._store_number = store_number
        self._store = ShardStore()
        self._state = ReplicaState()
        self.executor: OperationExecutor = OperationExecutor(self._store, index, replication=self)
        self._stream = ReplicationStream(
            store_number, self._store, self._state, self.executor, self._discard_state, security
        )
        self._file_thread = CheckpointThread(self._store, self.executor, self._stream.pause)
        #: Number of writes in the contents discarded because others were missing; -1 if none were.
        self._discarded_writes = -1
        self.executor.start()
        self._file_thread.start()

    @property
    def role_description(self) -> str:
        """Description of the replica's current role."""
        state = self._state
        if state.role is ReplicaRole.LEADER:
            return "leader" if self._stream.has_synced_follower else "leader without follower"
        if state.role is ReplicaRole.FOLLOWER:
            return "follower" if state.is_complete else "catching up"
        return "empty"

    def close(self) -> None:
        """Stop executing operations."""
        self._stream.close()
        self._file_thread.close()
        self.executor.close()
        self._stream.disconnect()

    def handle(self, requests: Sequence[Request]) -> None:
        """Accept requests; called by the transport's thread."""
        clients: list[Request] = []
        for request in requests:
            message = request.message
            handler = _PEER_REQUEST_HANDLERS.get(type(message))
            if handler is None:
                clients.append(request)
            elif isinstance(
                message, FollowLeader | TransferShard | ReplicateOperations
            ) and self._state.outranks(message.term, message.state_id):
                # Reply at once: if two replicas believe that they lead, each could wait for the
                # other here.
                request.reply(NotLeader(is_empty=False))
            else:
                self.executor.handle(clients)
                clients = []
                self.executor.call_in_order(partial(self._handle_peer_request, handler, request))
        self.executor.handle(clients)

    # --- called between two operations, or as part of one -----------------------------------------

    @property
    def position(self) -> Position:
        """Operations executed so far."""
        return self._state.position

    @property
    def must_confirm_leadership(self) -> bool:
        """Whether the other replica may have taken over unnoticed."""
        return self._stream.must_confirm_leadership

    def rejection_for(
        self, message: ExecuteOperations | SaveShards | RestoreShards
    ) -> Message | None:
        """Return the reply to a request that this replica must not execute; None if it may."""
        if self.must_confirm_leadership:
            self._stream.confirm_leadership()
        decision = self._state.decide(
            message.state_id,
            peer_unavailable=message.peer_unavailable,
            required_position=message.required_position,
        )
        if decision is RequestDecision.TAKE_OVER:
            self._take_over()
        self.executor.state_id = self._state.state_id
        match decision:
            case RequestDecision.NOT_LEADER:
                return NotLeader(is_empty=False)
            case RequestDecision.NO_STATE:
                return NotLeader(is_empty=True, discarded_writes=self._discarded_writes)
            case RequestDecision.STALE_STATE:
                return self._discard_stale_state(message.required_position)
            case RequestDecision.STATE_LOST:
                return StateLost(state_id=self._state.state_id)
        return None

    def _discard_stale_state(self, required_position: Position) -> Message:
        """Discard contents that lack acknowledged operations; return the reply that says so."""
        writes = self.executor.writes
        _log.error(
            "store %d: discarding the contents of this server, which lack acknowledged operations "
            "(position %s, acknowledged %s, %d updates): the server was paused or disconnected",
            self._store_number,
            self._state.position,
            required_position,
            writes,
        )
        self._stream.stop_leading()
        self._discard_state()
        self._discarded_writes = writes
        return NotLeader(is_empty=True, discarded_writes=writes)

    def replicate(self, writes: Sequence[ExecutedWrite]) -> bool:
        """Have the other replica execute the writes; return False if this one no longer leads."""
        return self._stream.replicate(writes)

    def _take_over(self) -> None:
        store = self._store
        store.period = self._state.term * _PERIODS_PER_TERM
        # Only the other replica knew which rows were written since an earlier period.
        for shard in store.shards.values():
            shard.dirty_rows.begin_period(store.period)
            shard.dirty_rows.mark_all()
        for table in store.tables.values():
            table.begin_period(store.period)
            table.dirty_rows.mark_all()
        self._stream.start_sync()

    def _discard_state(self) -> None:
        self._state.discard_state()
        self._clear_store()

    def _clear_store(self) -> None:
        self._store.shards.clear()
        self._store.tables.clear()
        self._store.counters.clear()
        self._store.write_keys = WriteKeys()
        self._store.is_restored = False
        self.executor.writes = 0
        self._discarded_writes = -1

    def _handle_peer_request(
        self, handler: Callable[[StoreReplica, Request], Message], request: Request
    ) -> None:
        try:
            request.reply(handler(self, request))
        except Exception as error:
            request.fail(error)

    def _handle_lead(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, LeadEmptyStore)
        if self._state.role is ReplicaRole.EMPTY or not self._state.is_complete:
            self._state.discard_state()
            self._stream.replica_addresses, self._stream.replica_index = (
                message.replica_addresses,
                0,
            )
            self._clear_store()
            self._stream.start_empty_store()
        return Done()

    def _handle_follow(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, FollowLeader)
        if not self._state.become_follower(message.term, message.state_id, message.position):
            return NotLeader(is_empty=False)
        self._stream.stop_leading()
        self._stream.replica_addresses, self._stream.replica_index = (
            message.replica_addresses,
            message.replica_index,
        )
        self._clear_store()
        restore_snapshot(self._store, ShardSnapshot(message.server, {}))
        self._store.is_restored = message.is_restored
        self.executor.writes = message.writes
        return Done()

    def _handle_transfer(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, TransferShard)
        if not self._state.is_following(message.term, message.state_id):
            return NotLeader(is_empty=False)
        (arrays,) = read_arrays([message.buffer_specs], request.buffers)
        restore_snapshot(
            self._store,
            ShardSnapshot(message.saved, dict(zip(message.array_names, arrays, strict=True))),
        )
        self._store.write_keys.restore(message.coordinator_term, message.answers)
        return Done()

    def _handle_replicate(self, request: Request) -> Message:
        message = request.message
        assert isinstance(message, ReplicateOperations)
        state = self._state
        if not state.is_following(message.term, message.state_id):
            return NotLeader(is_empty=False)
        state.is_complete = state.is_complete or message.is_complete
        inputs = read_arrays(message.buffer_specs, request.buffers)
        for operation, arrays in zip(message.operations, inputs, strict=True):
            try:
                self._store.execute(operation, arrays)
            except NotFoundError:
                if state.is_complete:
                    raise
                # The follower lacks this shard so far; its transfer will include the write.
        state.position, self.executor.writes = message.position, message.writes
        return Done()


_PEER_REQUEST_HANDLERS: dict[type, Callable[[StoreReplica, Request], Message]] = {
    TransferShard: StoreReplica._handle_transfer,
    FollowLeader: StoreReplica._handle_follow,
    LeadEmptyStore: StoreReplica._handle_lead,
    ReplicateOperations: StoreReplica._handle_replicate,
}


class StoreReplicas:
    """The replicas on one server, each created on the first request for it.

    Args:
        index: Index of the server.
        security: Keys of a client, for requests to other servers.
    """

    def __init__(self, index: int, security: Security | None) -> None:
        self._index = index
        self._security = security
        self._replicas: dict[int, StoreReplica] = {}

    def handle(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Handle the requests to replicated stores; return the others."""
        others: list[Request] = []
        by_store: dict[int, list[Request]] = {}
        for request in requests:
            number = getattr(request.message, "store", -1)
            if number < 0:
                others.append(request)
            else:
                by_store.setdefault(number, []).append(request)
        for number, each in by_store.items():
            self._get_or_create(number).handle(each)
        return others

    def _get_or_create(self, store_number: int) -> StoreReplica:
        found = self._replicas.get(store_number)
        if found is None:
            found = StoreReplica(store_number, self._index, self._security)
            self._replicas[store_number] = found
        return found

    def add_to_status(self, status: ServerStatus) -> ServerStatus:
        """Return a server's status with the figures of its replicas added."""
        replicas = dict(self._replicas)
        statuses = [replica.executor.status() for replica in replicas.values()]
        roles = {number: replica.role_description for number, replica in replicas.items()}
        totals = {
            name: getattr(status, name) + sum(getattr(each, name) for each in statuses)
            for name in (
                "requests", "bytes_in", "bytes_out", "busy_seconds", "failed", "waiting_requests",
                "shards", "tables", "rows", "bytes_stored",
            )
        }  # fmt: skip
        operations = Counter(status.operations)
        for each in statuses:
            operations.update(each.operations)
        return msgspec.structs.replace(
            status, operations=dict(operations), replicas=roles, **totals
        )

    def close(self) -> None:
        """Stop executing operations. Idempotent."""
        for replica in list(self._replicas.values()):
            replica.close()


# --- messages from the leader of a replicated store to its follower -------------------------------

#     FollowLeader, TransferShard, ..., ReplicateOperations(is_complete)      copy the contents
#     ReplicateOperations, ...                                                copy each write
#
# Rule 1. A write is acknowledged when the follower has executed it, or when the follower is lost;
#         then the leader continues alone.
# Rule 2. Contents are transferred one shard or table at a time, between two operations. Writes made
#         during the transfer are replicated as well; if the follower lacks the shard, its transfer
#         will include the write.
# Rule 3. All messages are sent between two operations or as part of one (`OperationExecutor`), so
#         their order is that of the operations. The state of this object changes only there and has
#         no lock; its thread only waits and checks whether the other server replies.
# Rule 4. Before it continues alone, and before it replies after a time without contact (as after a
#         pause of its process), the leader asks the other replica, if necessary on a new
#         connection: that one may have taken over.
# Rule 5. A replica that rejects messages may have restarted or may lead. It is requested to
#         follow (`FollowLeader`); if it leads, it refuses, and this replica discards its contents
#         with the rejected write.

_RETRY_SECONDS = 0.1
_CHECK_SECONDS = 0.5
_POLL_SECONDS = 0.5
_STOP_SECONDS = 1.0
_LEADER_LEASE_SECONDS = 1.0
"""Seconds that a leader replies without contact to its follower; less than the clients'
`REPLICA_TIMEOUT_SECONDS`.
"""
_MAX_REQUEST_BYTES = 16 << 30


class ReplicationStream:
    """The leader's side of replication; idle unless the replica leads or is about to.

    Args:
        store_number: Number of the store.
        store: Contents of this replica.
        state: State of this replica.
        executor: Executes operations on the store.
        discard_state: Discards the contents of this replica when another one leads.
        security: Keys of a client, for requests to the other server.
    """

    def __init__(
        self,
        store_number: int,
        store: ShardStore,
        state: ReplicaState,
        executor: OperationExecutor,
        discard_state: Callable[[], object],
        security: Security | None,
    ) -> None:
        #: Send time of the last message that the other replica acknowledged as a follower.
        self._last_contact = 0.0
        self.replica_addresses = ("", "")
        self.replica_index = 0
        self._store_number = store_number
        self._store = store
        self._state = state
        self._executor = executor
        self._discard_state = discard_state
        self._security = security
        self._channel: Channel | None = None
        #: Whether the other replica follows and receives all writes.
        self._has_follower = False
        #: Whether this replica is about to lead a store that starts empty.
        self._starts_empty = False
        #: Last logged reason why the other replica does not follow.
        self._logged_reason = ""
        #: Whether replication is paused, as during a restore of this replica.
        self._is_paused = False
        self._sync_requested = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def has_synced_follower(self) -> bool:
        """Whether the other replica has all contents of this one."""
        return self._has_follower and not self._sync_requested.is_set()

    @property
    def must_confirm_leadership(self) -> bool:
        """Whether the follower has been silent for longer than the leader's lease."""
        return self._has_follower and time.monotonic() - self._last_contact > _LEADER_LEASE_SECONDS

    # --- called between two operations ------------------------------------------------------------

    def confirm_leadership(self) -> None:
        """Detect a lost or leading peer even if there are no writes."""
        if self._has_follower:
            self._send(self._build_replicate())

    def start_empty_store(self) -> None:
        """Lead a store that starts empty, if the other replica agrees."""
        self._starts_empty = True
        self.start_sync()

    def start_sync(self) -> None:
        """Make the other replica follow, now or when it is reachable."""
        self._sync_requested.set()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(
                target=self._run, name=f"headrace-replication-{self._store_number}", daemon=True
            )
            self._thread.start()

    def replicate(self, writes: Sequence[ExecutedWrite]) -> bool:
        """Send writes to the follower; return False if this replica no longer leads."""
        # `ForgetWriteKeys` does not count: a replica that misses it remembers a few keys for
        # longer, but has all writes.
        self._state.advance_position(
            self.replica_index, sum(type(each) is not ForgetWriteKeys for each, _ in writes)
        )
        if not self._has_follower:
            return True
        arrays = [[as_contiguous(array) for array in each] for _, each in writes]
        message = self._build_replicate(
            operations=tuple(operation for operation, _ in writes),
            buffer_specs=tuple(tuple(map(buffer_spec, each)) for each in arrays),
        )
        self._send(message, [buffer_of(array) for each in arrays for array in each])
        return self._state.role is ReplicaRole.LEADER

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause replication, as during a restore; must not be called between two operations."""
        self._executor.call_between_operations(self._begin_pause)
        try:
            yield
        finally:
            self._executor.call_between_operations(self._end_pause)

    def _begin_pause(self) -> None:
        """Make the follower's copy out of date, and stop replication."""
        self._is_paused = True
        self._state.advance_position(self.replica_index, 1)  # makes the follower's copy out of date
        if self._has_follower and self._ask_peer_to_follow():
            self._has_follower = False

    def _end_pause(self) -> None:
        """Make the other replica follow again."""
        self._is_paused = self._has_follower = False
        self._sync_requested.set()

    def stop_leading(self) -> None:
        """Stop replication because this replica does not lead."""
        self._has_follower = self._starts_empty = False
        self._sync_requested.clear()

    # --- start and stop ---------------------------------------------------------------------------

    def close(self) -> None:
        """Stop sending. Idempotent; call `disconnect` after the last operation."""
        self._closed.set()
        self._sync_requested.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def disconnect(self) -> None:
        """Close the connection to the other server."""
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            needs_sync = self._sync_requested.wait(_CHECK_SECONDS)
            try:
                if not needs_sync:
                    self._executor.call_between_operations(self.confirm_leadership)
                elif self._is_peer_reachable():
                    self._sync_follower()
            except CancelledError:
                return
            if needs_sync:
                self._closed.wait(_RETRY_SECONDS)

    def _is_peer_reachable(self) -> bool:
        channel = self._connect()
        try:
            channel.call(Ping(), timeout=_STOP_SECONDS)
        except HeadraceError:
            return False
        finally:
            channel.close()
        return True

    def _sync_follower(self) -> None:
        """Copy all contents to the other replica, one shard at a time."""
        if not self._executor.call_between_operations(self._begin_sync):
            return
        for shard in self._executor.call_between_operations(partial(list_shards, self._store)):
            if not self._executor.call_between_operations(partial(self._transfer_shard, shard)):
                return
        self._executor.call_between_operations(self._end_sync)

    def _begin_sync(self) -> bool:
        if self._is_paused or self._has_follower:
            return False
        return self._ask_peer_to_follow()

    def _ask_peer_to_follow(self) -> bool:
        state = self._state
        is_new = self._starts_empty and state.role is ReplicaRole.EMPTY
        if state.role is not ReplicaRole.LEADER and not is_new:
            self.stop_leading()
            return False
        state_id = secrets.token_hex(8) if is_new else state.state_id
        message = FollowLeader(
            store=self._store_number,
            replica_addresses=self.replica_addresses,
            replica_index=1 - self.replica_index,
            term=1 if is_new else state.term,
            state_id=state_id,
            server=snapshot_server(self._store).record,
            is_restored=self._store.is_restored,
            writes=self._executor.writes,
            position=INITIAL_POSITION if is_new else state.position,
        )
        reply = self._call_peer(message)
        self._has_follower = isinstance(reply, Done)
        if isinstance(reply, NotLeader):
            self.stop_leading()
            if not is_new:
                _log.warning(
                    "store %d: the server at %s leads now; discarding the contents of this server",
                    self._store_number,
                    self.replica_addresses[1 - self.replica_index],
                )
                self._discard_state()
        if not self._has_follower:
            return False
        if is_new:
            state.become_leader(state_id)
            self._starts_empty = False
        return True

    def _transfer_shard(self, shard: ShardId) -> bool:
        if not self._has_follower:
            return False
        saved = snapshot_shard(self._store, shard)
        arrays = [as_contiguous(array) for array in saved.arrays.values()]
        target = " ".join(shard)
        message = TransferShard(
            store=self._store_number,
            term=self._state.term,
            state_id=self._state.state_id,
            saved=saved.record,
            array_names=tuple(saved.arrays),
            buffer_specs=tuple(map(buffer_spec, arrays)),
            coordinator_term=self._store.write_keys.coordinator_term,
            answers={target: self._store.write_keys.answers_for(target)},
        )
        return self._send(message, [buffer_of(array) for array in arrays])

    def _end_sync(self) -> None:
        state = self._state
        if self._has_follower and self._send(self._build_replicate(is_complete=True)):
            self._sync_requested.clear()
            self._logged_reason = ""
            _log.info(
                "store %d: replicated on two servers (term %d)", self._store_number, state.term
            )

    # --- sending ----------------------------------------------------------------------------------

    def _connect(self) -> Channel:
        return zeromq.connect(
            self.replica_addresses[1 - self.replica_index],
            reply_type=ServerReply,
            security=self._security,
            keepalive_timeout=REPLICA_TIMEOUT_SECONDS,
            request_bytes=_MAX_REQUEST_BYTES,
        )

    def _build_replicate(self, **fields: Any) -> ReplicateOperations:
        state = self._state
        return ReplicateOperations(
            store=self._store_number,
            term=state.term,
            state_id=state.state_id,
            writes=self._executor.writes,
            position=state.position,
            **fields,
        )

    def _send(self, message: Message, buffers: Sequence[Buffer] = ()) -> bool:
        """Send a message to the other replica and wait; return whether it was executed."""
        reply = self._call_peer(message, buffers)
        is_refused = isinstance(reply, NotLeader)
        if reply is None and not self._closed.is_set():
            is_refused = self._is_peer_reachable()  # only the connection was lost
        if is_refused and self._ask_peer_to_follow():
            self._has_follower = False  # it lost the earlier messages
            self._sync_requested.set()
        return isinstance(reply, Done)

    def _call_peer(self, message: Message, buffers: Sequence[Buffer] = ()) -> Message | None:
        """Return the other replica's reply; None if it is unreachable or failed."""
        try:
            if self._channel is None:
                self._channel = self._connect()
            sent_at = time.monotonic()
            request_id = self._channel.send(message, buffers)
            while (reply := self._channel.receive(_POLL_SECONDS)) is None or (
                reply.request_id != request_id
            ):
                if self._closed.is_set():
                    raise UnavailableError("this server was stopped")
            if isinstance(reply.message, Exception):
                raise reply.message
        except Exception as error:
            self._record_peer_lost(error)
            return None
        assert isinstance(reply.message, Message)
        if isinstance(reply.message, Done):
            self._last_contact = sent_at
        return reply.message

    def _record_peer_lost(self, error: Exception) -> None:
        reason = describe_error(error)
        is_new = reason != self._logged_reason  # retries repeat the same error
        if is_new and self._state.role is ReplicaRole.LEADER and not self._closed.is_set():
            self._logged_reason = reason
            _log.warning(
                "store %d: not replicated until the server at %s is reachable: %s",
                self._store_number,
                self.replica_addresses[1 - self.replica_index],
                reason,
            )
        self._has_follower = False
        self._sync_requested.set()

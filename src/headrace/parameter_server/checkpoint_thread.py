"""The thread of a parameter server that saves and restores, one request after another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

from headrace.errors import HeadraceError, describe_error
from headrace.parameter_server.messages import (
    RestoreShards,
    SaveShards,
    ShardsRestored,
    ShardsSaved,
)
from headrace.parameter_server.operation_executor import OperationExecutor
from headrace.parameter_server.shard_files import (
    RestoredShards,
    put_shards,
    read_shards,
    write_shards,
)
from headrace.parameter_server.store import ShardId, ShardStore
from headrace.storage.files import open_folder
from headrace.transport.channel import Request

__all__ = ["CheckpointThread"]

_log = logging.getLogger(__name__)

_STOP_SECONDS = 0.8


class CheckpointThread:
    """Writes a store to files, and reads it back.

    Args:
        store: Store, accessed only between two operations.
        executor: Executes operations, and passes save and restore requests to this object.
        during_restore: Context that is active during a restore.
    """

    def __init__(
        self,
        store: ShardStore,
        executor: OperationExecutor,
        during_restore: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._store = store
        self._executor = executor
        self._during_restore = during_restore
        #: Token of a prepared restore, and the shards read for it.
        self._prepared: tuple[str, RestoredShards] = ("", [])
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="headrace-parameter-server-checkpoints", daemon=True
        )
        executor.on_file_request = self._requests.put

    def start(self) -> None:
        """Start handling requests."""
        self._thread.start()

    def close(self) -> None:
        """Stop; wait up to 0.8 s for the current request."""
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _restore(self, message: RestoreShards, parts: RestoredShards | None) -> None:
        """Install shards; read them first if they were not prepared."""
        with self._during_restore():
            put_shards(
                self._store,
                self._executor.call_between_operations,
                _read_shards(message) if parts is None else parts,
                message.counters,
                message.coordinator_term,
                message.answers,
                message.is_recovery,
            )

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._answer(request)
            except Exception as error:
                if not isinstance(error, HeadraceError | ValueError | TypeError):
                    _log.error(
                        "cannot save or restore shards: %s", describe_error(error), exc_info=error
                    )
                request.fail(error)
            del request

    def _answer(self, request: Request) -> None:
        message = request.message
        executor = self._executor
        if isinstance(message, SaveShards):
            written = write_shards(
                self._store,
                executor.call_between_operations,
                open_folder(message.url),
                message.file_prefix,
                [
                    *(ShardId("shard", name) for name in message.shards),
                    *(ShardId("table", name) for name in message.tables),
                ],
                message.since,
                message.forget_earlier_marks,
            )
            request.reply(
                ShardsSaved(
                    state_id=executor.state_id,
                    # Some of these writes may be newer than the saved state of their shard.
                    writes=executor.writes,
                    position=executor.position,
                    **written._asdict(),
                )
            )
        else:
            assert isinstance(message, RestoreShards)
            token, prepared = self._prepared
            self._prepared = ("", [])
            if message.phase == "prepare":
                self._prepared = (message.token, _read_shards(message))
            elif message.phase == "commit":
                is_prepared = bool(message.token) and message.token == token
                self._restore(message, prepared if is_prepared else None)
            request.reply(ShardsRestored(state_id=executor.state_id, position=executor.position))


def _read_shards(message: RestoreShards) -> RestoredShards:
    return read_shards(
        open_folder(message.url),
        message.shards,
        message.tables,
        message.pieces,
        message.optimizer_renames,
    )

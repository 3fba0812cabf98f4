"""What the dispatcher's journal holds: its facts, its state, and plans."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update
from headrace.serving.journal import Format, Journal, MemoryJournal
from headrace.serving.sqlite_journal import SqliteJournal

__all__ = ["FORMAT", "open_journal"]

FORMAT = Format(
    number=2,
    file_name="dispatcher.sqlite",
    owner="dispatcher",
    fresh_start="start with an empty work_dir and register everything again",
    decode_facts=msgspec.msgpack.Decoder(list[Update]).decode,
    decode_state=msgspec.msgpack.Decoder(DispatcherState).decode,
    first_state=DispatcherState,
    apply=apply,
)


def open_journal(config: DispatcherConfig) -> Journal[Update, DispatcherState]:
    """Open the journal that a configuration asks for.

    Raises:
        FailedPreconditionError: Another dispatcher uses the work directory.
        DataLossError: The file is damaged.
    """
    if config.fault_tolerant_mode and config.work_dir is not None:
        return SqliteJournal(Path(config.work_dir), FORMAT)
    return MemoryJournal(FORMAT)

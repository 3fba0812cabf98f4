"""Building blocks of all servers, independent of datasets.

================  ==============================================================================
`life_cycle`      start and stop of a server, once each, from any thread
`journaled_core`  a deterministic state machine with its journal, clock and lock
`journal`         interface of journals for events and blobs; `JournalFormat` describes contents
`sqlite_journal`  the crash-safe journal: one file, one owner
`blobs`           bytes too large for an event (pure)
`journal_copy`    reads a journal that another process may be writing
`high_water`      detects missing records at a journal's end
`heartbeats`      last contact with each peer, corrected for pauses of this process (pure)
`rpc`             requests that name the type of their reply, and one `call` for all (pure)
`rates`           recent amounts per second (pure)
`connections`     channels to several peers, which match replies with requests
`session_runner`  a lock and an I/O thread around a session without I/O
`endpoint`        /metrics, /healthz and /readyz, on a separate thread
`request_window`  numbered requests and replies that survive lost connections (pure)
================  ==============================================================================
"""

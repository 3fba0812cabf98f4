"""What every server shares, whatever it serves. Nothing here knows of datasets.

================  ==============================================================================
`life_cycle`      started once, stopped once, by whomever, whenever
`core`            decide, apply, keep, answer: what decides, its journal and its clock
`journal`         keeps facts and blobs, in order; a `Format` says what they are
`sqlite_journal`  the one that survives a crash: one file, one owner
`blobs`           bytes too large for a fact (pure)
`journal_copy`    reads a journal that somebody else may be writing
`high_water`      whether records are missing at a journal's end
`presence`        who was heard from when, and which silence counts (pure)
`call`            a request names the type of its reply; one `call` for all of them (pure)
`rates`           how much of something there was per second, lately (pure)
`connections`     channels to several peers: which answer belongs to which request
`session_runner`  a lock and a thread around a session that does no I/O itself
`endpoint`        /metrics, /healthz and /readyz, on a thread of its own
`conversation`    numbered requests and what answers them, whatever the connection does (pure)
================  ==============================================================================
"""

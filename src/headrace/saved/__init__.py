"""Saved datasets: a directory of Arrow files that hold each element once.

format       what a directory holds: names of files, and the records in them
directory    one directory: begun, filled by several streams, finished or failed, looked at
form         how the elements of one file become columns
arrow        columns as they are written into an Arrow file; the one file that imports pyarrow
batches      the batches of such a file, as views of its memory
chunk_file   a chunk file that is read: in order, or at any rows
writer       one stream of chunk files, as it is written, and the wait for room on a full disk

A directory is filled by *streams*, each by one writer: a process that saves alone writes one, a
service one for each worker. A stream is cut into *chunk files*. Whoever coordinates the streams
decides the order of all their files as they become whole, and publishes them in it.

Nobody who neither saves nor loads has to load `arrow`, `chunk_file` and `writer`.
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.saved import arrow, chunk_file, writer
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "arrow": "headrace.saved.arrow:",
            "chunk_file": "headrace.saved.chunk_file:",
            "writer": "headrace.saved.writer:",
        },
    )

__all__ = ["arrow", "chunk_file", "writer"]

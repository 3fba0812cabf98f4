"""Saved datasets: a directory of Arrow files that contain each element once.

format       contents of a directory: names of files, and the records in them
directory    one directory: started, filled by several streams, finished or failed, read
schema       mapping of the elements of one file to columns
arrow        encoding of columns in an Arrow file
record_batches  record batches of such a file, as views of its memory
chunk_file   reader of a chunk file, sequential or by rows
writer       writer of one stream of chunk files, which waits for space on a full disk

A directory is filled by *streams*, each with one writer: a process that saves alone writes one, a
service writes one per worker. A stream is divided into *chunk files*. The coordinator of the
streams decides the order of all chunk files as they are completed, and publishes them in this
order.

Only processes that save or load need to import `arrow`, `chunk_file` and `writer`.
"""

from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.saved import arrow, chunk_file, writer
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "arrow": "headrace.saved.arrow:",
            "chunk_file": "headrace.saved.chunk_file:",
            "writer": "headrace.saved.writer:",
        },
    )

__all__ = ["arrow", "chunk_file", "writer"]

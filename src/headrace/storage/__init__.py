"""Files by path or URL: found by pattern, opened, created, inflated and deflated.

names          names and patterns, as users write them
match          the files that match patterns
files          files opened and created
folder         folders that one program fills while others read
remote         what fsspec reaches; loaded when the first URL is met
remote_folder  folders that fsspec reaches; likewise
compression    GZIP and ZLIB, block by block
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.storage import remote, remote_folder
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "remote": "headrace.storage.remote:",
            "remote_folder": "headrace.storage.remote_folder:",
        },
    )

__all__ = ["remote", "remote_folder"]

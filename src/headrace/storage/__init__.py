"""Files by path or URL: found by pattern, opened, created, inflated and deflated.

names        names and patterns, as users write them, and the files that match
files        files opened and created; folders that one program fills while others read
remote       files and folders that fsspec reaches; loaded when the first URL is met
compression  GZIP and ZLIB, block by block
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.storage import remote
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "remote": "headrace.storage.remote:",
        },
    )

__all__ = ["remote"]

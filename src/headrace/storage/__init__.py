"""Access to files by path or URL.

names        names and patterns given by users, and the files that match them
files        opening and creation of files; folders that are written and read concurrently
remote       files and folders of fsspec; imported when the first URL is used
compression  GZIP and ZLIB, block by block
"""

from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.storage import remote
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "remote": "headrace.storage.remote:",
        },
    )

__all__ = ["remote"]

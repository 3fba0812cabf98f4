"""Access to files by path or URL.

names          names and patterns given by users, and the files that match them
options        options of file systems, and of the cache
files          opening and creation of files; folders that are written and read concurrently
remote         files and folders by URL; imported when the first URL is used, as are the next four
file_systems   file systems of obstore and fsspec, and their options
remote_stream  open remote files
retrying       repetition of reads after transient errors
block_cache    blocks of remote files on a local disk
compression    GZIP and ZLIB, block by block
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

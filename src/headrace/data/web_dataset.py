"""Datasets of the samples in tar archives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.arguments import check_callable
from headrace.data.dataset import Dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.sources.tar_index import Shard, index_shards
from headrace.sources.tar_samples import TarSamplesSource
from headrace.sources.text_files import FileNamesSource
from headrace.storage.names import FileName, as_names, expand_names
from headrace.storage.options import StorageOptions

__all__ = ["WebDataset"]


@explain_unknown_arguments
def WebDataset(  # noqa: N802 - the field's name
    urls: Any,
    *,
    decode: bool | Mapping[str, Callable[[bytes], Any]] | None = None,
    index_dir: FileName | None = None,
    num_parallel_reads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset[dict[str, Any]]:
    """Return a dataset of the samples in tar archives, in the WebDataset convention.

    A sample is a dict of the consecutive files that have the same path up to the first dot of the
    base name. That path is its `"__key__"`; the other keys are the extensions in lower case, such
    as `"jpg"` or `"seg.png"`, and the values are the contents as `bytes`.

    >>> import io, tarfile
    >>> with tarfile.open("shard-0.tar", "w") as archive:
    ...     for name, data in [("a.cls", b"7"), ("a.txt", b"seven"), ("b.cls", b"8")]:
    ...         member = tarfile.TarInfo(name)
    ...         member.size = len(data)
    ...         archive.addfile(member, io.BytesIO(data))
    >>> list(hr.WebDataset("shard-{0..0}.tar"))
    [{'__key__': 'a', 'cls': b'7', 'txt': b'seven'}, {'__key__': 'b', 'cls': b'8'}]
    >>> next(iter(hr.WebDataset("shard-0.tar", decode=True)))
    {'__key__': 'a', 'cls': np.int64(7), 'txt': 'seven'}

    Local archives are divided into parts of about 8 MiB, so that several workers of a data service
    can read one archive. This requires reading all headers of an archive once; the result is cached
    in `index_dir`. Archives ending in `.gz` or `.tgz` are not divided, nor are more than 256
    archives, nor archives by URL without `index_dir`: each is read by one worker.

    Args:
        urls: A path, fsspec URL or pattern such as `{000..099}.tar` (str, bytes or os.PathLike),
            a list of them, or a Dataset of paths or URLs.
        decode: True decodes files by extension: `json`; `txt` to str; `cls`, `cls2` and `index` to
            int64; `npy` to an array. Others remain bytes. A dict adds or replaces decoders: its
            functions receive the bytes of the files with the extension that is the key.
        index_dir: Folder that stores where the parts of archives begin; None uses
            `~/.cache/headrace/tar`. If it cannot be written, each new dataset reads the headers.
        num_parallel_reads: Number of archives to read at once, in turn; None reads them in order.
        storage_options: Options of the file systems of URLs, such as `endpoint_url` or credentials
            (see *Object stores* in the guide to file formats); None uses the environment's.

    Raises:
        NotFoundError: If no archive matches a pattern, or one to be divided does not exist.
    """
    options = StorageOptions(storage_options)
    functions = dict(decode) if isinstance(decode, Mapping) else {}
    for extension, function in functions.items():
        check_callable(f"decode[{extension!r}]", function)
    decodes, undecoded = bool(functions) or decode is True, tuple(sorted(functions))

    def read_archive(name: Any) -> Dataset[Any]:
        (path,) = as_names("urls", name)
        return Dataset.from_source(TarSamplesSource((Shard(path),), decodes, undecoded, options))

    samples: Dataset[Any]
    if isinstance(urls, Dataset) or num_parallel_reads is not None:
        names: Dataset[Any] = urls
        if not isinstance(urls, Dataset):
            patterns = as_names("urls", urls)
            names = Dataset.from_source(FileNamesSource(patterns, _expand(patterns, options)))
        samples = names.interleave(
            read_archive,
            cycle_length=num_parallel_reads or 1,
            num_parallel_calls=num_parallel_reads,
        )
    else:
        shards = index_shards(_expand(as_names("urls", urls), options), index_dir, options)
        samples = Dataset.from_source(TarSamplesSource(shards, decodes, undecoded, options))
    return samples.map(_make_decode(functions)) if functions else samples


def _expand(patterns: Iterable[str], options: StorageOptions) -> tuple[str, ...]:
    """Return the names of archives that match patterns.

    Raises:
        ValueError: If they cannot be read.
    """
    for pattern in patterns:
        if pattern.startswith("pipe:"):
            raise ValueError(
                f"urls contains the command {pattern!r}, which is not supported; use an fsspec URL "
                "such as s3://..."
            )
    names = expand_names("urls", patterns, options)
    for name in names:
        if name.lower().endswith((".bz2", ".xz", ".zst", ".lz4", ".zip")):
            raise ValueError(
                f"{name!r}: this compression is not supported; use .tar or .tar.gz archives"
            )
    return names


def _make_decode(functions: Mapping[str, Callable[[bytes], Any]]) -> Callable[[Any], Any]:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {
            name: functions[name](value) if name in functions else value
            for name, value in sample.items()
        }

    return decode

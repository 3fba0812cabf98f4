"""Datasets of the records of ArrayRecord files."""

from __future__ import annotations

from typing import Any

from headrace.data.dataset import Dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.sources.array_record import ArrayRecordSource

__all__ = ["ArrayRecordDataset"]


@explain_unknown_arguments
def ArrayRecordDataset(filenames: Any) -> Dataset[bytes]:  # noqa: N802 - the field's name
    """Return a dataset of the records of ArrayRecord files as `bytes`, read by index.

    The number of records is known, and `shuffle` draws from the indices, so its buffer may have the
    size of the dataset. Needs `pip install 'headrace[array-record]'`.

    >>> dataset = hr.ArrayRecordDataset("train-*.array_record")  # doctest: +SKIP
    >>> dataset.shuffle(len(dataset)).batch(32)  # doctest: +SKIP

    Args:
        filenames: A local path or pattern (str, bytes or os.PathLike), a list of them, or a Dataset
            of paths, whose files are opened one after the other while it is read.

    Raises:
        NotFoundError: If no file matches a name.
        DataLossError: If a file is damaged; while reading, if a record is.
    """
    if isinstance(filenames, Dataset):
        return filenames.flat_map(_open_file)
    return Dataset.from_source(ArrayRecordSource.from_files(filenames))


def _open_file(name: Any) -> Dataset[bytes]:
    return Dataset.from_source(ArrayRecordSource.from_files(name))

"""Datasets of the rows of Lance datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.data.dataset import Dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.sources.lance import LanceRows
from headrace.storage.names import FileName

__all__ = ["LanceDataset"]


@explain_unknown_arguments
def LanceDataset(  # noqa: N802 - the field's name
    uri: FileName,
    columns: Sequence[str] | None = None,
    version: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Dataset[dict[str, Any]]:
    """Return a dataset of the rows of a Lance dataset as dicts, read by index.

    The number of rows is known, and `shuffle` draws from their indices, so its buffer may have the
    size of the dataset. Workers and restored iterators read the version that is current now. Needs
    `pip install 'headrace[lance]'`.

    >>> rows = hr.LanceDataset("s3://bucket/train.lance", columns=["tokens"])  # doctest: +SKIP
    >>> rows.shuffle(len(rows), seed=1).batch(32)  # doctest: +SKIP

    Args:
        uri: Path or URL of the dataset.
        columns: Names of the columns to read, in the order of the dicts; None reads all.
        version: Version of the dataset; None is the latest one.
        storage_options: Options for object stores, as of `lance.dataset`.

    Raises:
        NotFoundError: If there is no such dataset or version.
        InvalidArgumentError: If a column does not exist or has no NumPy values; while reading, if a
            value is null and no float, date or time.
    """
    rows = LanceRows.of_dataset(uri, columns, version, storage_options)
    dataset: Dataset[dict[str, Any]] = rows.as_dataset(Dataset)
    return dataset

"""Headrace: feeds and coordinates distributed training, in Python, independent of any framework."""

import importlib
from typing import Any

from headrace import errors, io, service
from headrace.data.dataset import Dataset
from headrace.data.files import TextLineDataset, TFRecordDataset
from headrace.data.iterator import DatasetIterator
from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec
from headrace.plan.node import AUTOTUNE
from headrace.plan.options import Options
from headrace.plan.source import INFINITE as INFINITE_CARDINALITY
from headrace.plan.source import UNKNOWN as UNKNOWN_CARDINALITY
from headrace.plan.source import IndexedSource, Reader, Source

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "Chunk",
    "Dataset",
    "DatasetIterator",
    "IndexedSource",
    "Options",
    "Reader",
    "Source",
    "TFRecordDataset",
    "TextLineDataset",
    "errors",
    "io",
    "service",
    "testing",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Only tests want it, so it is loaded when it is asked for.
    if name == "testing":
        return importlib.import_module("headrace.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

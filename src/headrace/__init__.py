"""Headrace: feeds and coordinates distributed training, in Python, independent of any framework."""

from headrace import errors, io, service
from headrace.data.dataset import Dataset
from headrace.data.files import TextLineDataset, TFRecordDataset
from headrace.data.iterator import DatasetIterator
from headrace.element.spec import ArraySpec
from headrace.plan.node import AUTOTUNE
from headrace.plan.options import Options
from headrace.plan.source import INFINITE as INFINITE_CARDINALITY
from headrace.plan.source import UNKNOWN as UNKNOWN_CARDINALITY

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "Dataset",
    "DatasetIterator",
    "Options",
    "TFRecordDataset",
    "TextLineDataset",
    "errors",
    "io",
    "service",
]

__version__ = "0.1.0"

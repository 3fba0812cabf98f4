"""Headrace: feeds and coordinates distributed training, in Python, independent of any framework."""

import sys
from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes
from headrace.release import __version__ as __version__

if TYPE_CHECKING:
    from headrace import coordinator, distribute, errors, io, ray, service, testing
    from headrace.adapters import grain, jax, keras, torch
    from headrace.data.array_records import ArrayRecordDataset
    from headrace.data.dataset import Dataset
    from headrace.data.file_datasets import ParquetDataset, TextLineDataset, TFRecordDataset
    from headrace.data.iterator import DatasetIterator
    from headrace.data.iterator_stats import IteratorStats
    from headrace.data.lance_dataset import LanceDataset
    from headrace.data.line_datasets import (
        CsvDataset,
        FixedLengthRecordDataset,
        JsonLinesDataset,
    )
    from headrace.data.mds_dataset import MDSDataset
    from headrace.data.optional import Optional
    from headrace.data.web_dataset import WebDataset
    from headrace.distribute import metrics
    from headrace.distribute.variable import Variable
    from headrace.element.chunk import Chunk
    from headrace.element.dataset_leaf import DatasetSpec
    from headrace.element.lookup import Lookup
    from headrace.element.ragged import RaggedArray
    from headrace.element.spec import ArraySpec
    from headrace.parameter_server import initializers, optimizers
    from headrace.parameter_server.arrays import IndexedSlices
    from headrace.parameter_server.checkpoints import (
        Checkpoint,
        CheckpointManager,
        checkpoints_iterator,
    )
    from headrace.parameter_server.table import EmbeddingTable
    from headrace.plan.node import AUTOTUNE
    from headrace.plan.options import Options
    from headrace.plan.source import INFINITE as INFINITE_CARDINALITY
    from headrace.plan.source import UNKNOWN as UNKNOWN_CARDINALITY
    from headrace.plan.source import IndexedSource, Reader, Source
    from headrace.storage.options import StorageCache
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "AUTOTUNE": "headrace.plan.node",
            "INFINITE_CARDINALITY": "headrace.plan.source:INFINITE",
            "UNKNOWN_CARDINALITY": "headrace.plan.source:UNKNOWN",
            "ArrayRecordDataset": "headrace.data.array_records",
            "ArraySpec": "headrace.element.spec",
            "Checkpoint": "headrace.parameter_server.checkpoints",
            "CheckpointManager": "headrace.parameter_server.checkpoints",
            "Chunk": "headrace.element.chunk",
            "CsvDataset": "headrace.data.line_datasets",
            "Dataset": "headrace.data.dataset",
            "DatasetIterator": "headrace.data.iterator",
            "DatasetSpec": "headrace.element.dataset_leaf",
            "EmbeddingTable": "headrace.parameter_server.table",
            "FixedLengthRecordDataset": "headrace.data.line_datasets",
            "IndexedSlices": "headrace.parameter_server.arrays",
            "IndexedSource": "headrace.plan.source",
            "IteratorStats": "headrace.data.iterator_stats",
            "JsonLinesDataset": "headrace.data.line_datasets",
            "LanceDataset": "headrace.data.lance_dataset",
            "Lookup": "headrace.element.lookup",
            "MDSDataset": "headrace.data.mds_dataset",
            "Optional": "headrace.data.optional",
            "Options": "headrace.plan.options",
            "ParquetDataset": "headrace.data.file_datasets",
            "RaggedArray": "headrace.element.ragged",
            "Reader": "headrace.plan.source",
            "Source": "headrace.plan.source",
            "StorageCache": "headrace.storage.options",
            "TFRecordDataset": "headrace.data.file_datasets",
            "TextLineDataset": "headrace.data.file_datasets",
            "Variable": "headrace.distribute.variable",
            "WebDataset": "headrace.data.web_dataset",
            "checkpoints_iterator": "headrace.parameter_server.checkpoints",
            "coordinator": "headrace.coordinator:",
            "distribute": "headrace.distribute:",
            "errors": "headrace.errors:",
            "grain": "headrace.adapters.grain:",
            "initializers": "headrace.parameter_server.initializers:",
            "io": "headrace.io:",
            "jax": "headrace.adapters.jax:",
            "keras": "headrace.adapters.keras:",
            "metrics": "headrace.distribute.metrics:",
            "optimizers": "headrace.parameter_server.optimizers:",
            "ray": "headrace.ray:",
            "service": "headrace.service:",
            "testing": "headrace.testing:",
            "torch": "headrace.adapters.torch:",
        },
        missing="headrace.data.missing_names:missing_name_message",
    )

if sys.platform == "win32":
    raise ImportError(
        "Headrace does not support Windows: use it in the Windows Subsystem for Linux (WSL 2), or "
        "in a container"
    )

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArrayRecordDataset",
    "ArraySpec",
    "Checkpoint",
    "CheckpointManager",
    "Chunk",
    "CsvDataset",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "EmbeddingTable",
    "FixedLengthRecordDataset",
    "IndexedSlices",
    "IndexedSource",
    "IteratorStats",
    "JsonLinesDataset",
    "LanceDataset",
    "Lookup",
    "MDSDataset",
    "Optional",
    "Options",
    "ParquetDataset",
    "RaggedArray",
    "Reader",
    "Source",
    "StorageCache",
    "TFRecordDataset",
    "TextLineDataset",
    "Variable",
    "WebDataset",
    "checkpoints_iterator",
    "coordinator",
    "distribute",
    "errors",
    "grain",
    "initializers",
    "io",
    "jax",
    "keras",
    "metrics",
    "optimizers",
    "ray",
    "service",
    "testing",
    "torch",
]

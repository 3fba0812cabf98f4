"""Files and records outside a pipeline: TFRecord files and tf.Example."""

from __future__ import annotations

from headrace.sources.example import parse_example
from headrace.sources.features import FixedLenFeature, VarLenFeature, encode_example
from headrace.sources.tfrecord import TFRecordWriter

__all__ = [
    "FixedLenFeature",
    "TFRecordWriter",
    "VarLenFeature",
    "encode_example",
    "parse_example",
]

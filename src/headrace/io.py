"""Files and records outside a pipeline: TFRecord files and tf.Example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.data.missing_names import missing_name_message
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


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # or every name would pass for a function

    def __getattr__(name: str) -> Any:
        raise AttributeError(missing_name_message(__name__, name, __all__), name=name)

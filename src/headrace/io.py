"""Files, records and images outside a pipeline: TFRecord files, tf.Example, JPEG and PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.data.missing_names import missing_name_message
from headrace.sources.example import parse_example
from headrace.sources.features import FixedLenFeature, VarLenFeature, encode_example
from headrace.sources.images import (
    decode_image,
    decode_jpeg,
    decode_png,
    encode_jpeg,
    encode_png,
    resize,
)
from headrace.sources.tfrecord import TFRecordWriter

__all__ = [
    "FixedLenFeature",
    "TFRecordWriter",
    "VarLenFeature",
    "decode_image",
    "decode_jpeg",
    "decode_png",
    "encode_example",
    "encode_jpeg",
    "encode_png",
    "parse_example",
    "resize",
]


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # or every name would pass for a function

    def __getattr__(name: str) -> Any:
        raise AttributeError(missing_name_message(__name__, name, __all__), name=name)

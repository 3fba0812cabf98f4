"""Event files of TensorBoard: summaries with a step, appended without TensorFlow."""

from __future__ import annotations

import io
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.graph.metadata import PLUGIN_NAME_KERAS_MODEL
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.image.metadata import create_summary_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util.tensor_util import make_tensor_proto

from headrace.sources.tfrecord import masked_crc

__all__ = ["EventFile", "histogram", "images", "keras_model", "scalar"]

_MOST_IMAGES = 3
_file_numbers = itertools.count()


class EventFile:
    """An event file in a directory, created by the first write.

    The file is open only while it is written to. An error or a killed process loses nothing that
    was written before, and leaves nothing to close.

    Args:
        directory: Directory of the run, created if it does not exist.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = ""

    def write(self, step: int, summaries: Iterable[Any]) -> None:
        """Append summaries with this step; readers see them when this returns."""
        now = time.time()
        events = [Event(wall_time=now, step=step, summary=each) for each in summaries]
        if not events:
            return
        if not self._path:
            os.makedirs(self._directory, exist_ok=True)
            name = f"{now:010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
            self._path = os.path.join(self._directory, f"events.out.tfevents.{name}.v2")
            events.insert(0, Event(wall_time=now, file_version="brain.Event:2"))
        with open(self._path, "ab") as file:
            file.write(b"".join(_record(event.SerializeToString()) for event in events))


def _record(data: bytes) -> bytes:
    """Return a record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    checks = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
    return length + checks[0] + data + checks[1]


def scalar(tag: str, value: float) -> Any:
    """Return the summary of a number."""
    return scalar_pb(tag, float(value))


def histogram(tag: str, values: NDArray[Any]) -> Any:
    """Return the summary of how values are distributed; infinite values and NaN are left out."""
    flat = np.asarray(values, np.float64).ravel()
    return histogram_pb(tag, flat[np.isfinite(flat)])


def images(tag: str, pixels: NDArray[np.uint8]) -> Any:
    """Return the summary of the first images of an array.

    Args:
        tag: Name of the summary.
        pixels: Of shape (images, height, width, channels), with 1, 3 or 4 channels.
    """
    _, height, width, channels = pixels.shape
    texts = [str(width).encode(), str(height).encode()]
    for each in pixels[:_MOST_IMAGES]:
        file = io.BytesIO()
        Image.fromarray(each[:, :, 0] if channels == 1 else each).save(file, "PNG")
        texts.append(file.getvalue())
    return _of_texts(tag, texts, create_summary_metadata(None, None))


def keras_model(tag: str, config: str) -> Any:
    """Return the summary of a Keras model's graph.

    Args:
        tag: Name of the summary.
        config: What `model.to_json()` returns.
    """
    plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME_KERAS_MODEL, content=b"1")
    return _of_texts(tag, config.encode(), SummaryMetadata(plugin_data=plugin))


def _of_texts(tag: str, texts: Any, metadata: Any) -> Any:
    tensor = make_tensor_proto(texts)
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

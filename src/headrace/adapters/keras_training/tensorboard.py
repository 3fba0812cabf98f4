"""`hr.keras.TensorBoard`: what `keras.callbacks.TensorBoard` writes, without TensorFlow.

Summaries with a step are appended to event files.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import keras
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

from headrace.adapters.keras_training.embedding_internals import has_table
from headrace.arguments import check_flag, check_int, check_path
from headrace.sources.tfrecord import masked_crc

__all__ = [
    "EventFile",
    "TensorBoard",
    "histogram",
    "images",
    "keras_model",
    "scalar",
]

_MAX_IMAGES = 3
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
            file.write(b"".join(_encode_record(event.SerializeToString()) for event in events))


def _encode_record(data: bytes) -> bytes:
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
    for each in pixels[:_MAX_IMAGES]:
        file = io.BytesIO()
        Image.fromarray(each[:, :, 0] if channels == 1 else each).save(file, "PNG")
        texts.append(file.getvalue())
    return _text_summary(tag, texts, create_summary_metadata(None, None))


def keras_model(tag: str, config: str) -> Any:
    """Return the summary of a Keras model's graph.

    Args:
        tag: Name of the summary.
        config: What `model.to_json()` returns.
    """
    plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME_KERAS_MODEL, content=b"1")
    return _text_summary(tag, config.encode(), SummaryMetadata(plugin_data=plugin))


def _text_summary(tag: str, texts: Any, metadata: Any) -> Any:
    tensor = make_tensor_proto(texts)
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


_VALIDATION = "val_"
_INTERVALS = {"epoch": 0, "batch": 1}


class TensorBoard(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes metrics, learning rates and weights for TensorBoard.

    Tags and directories are those of `keras.callbacks.TensorBoard`, which needs TensorFlow:

    * `train/`: `epoch_loss`, `epoch_learning_rate` and other metrics by epoch; `batch_loss` ... by
      batch, if `update_freq` asks for them; histograms and images of weights.
    * `validation/`: `epoch_loss` ... by epoch, and `evaluation_loss_vs_iterations` ... by the
      optimizer's iterations, also of `model.evaluate`.

    Everything is in the files when the epoch, the evaluation or the batch that it belongs to ends,
    and no file is open between writes: also where `fit` raises an error.

    >>> import keras, pathlib
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(loss="mse")
    >>> board = hr.keras.TensorBoard("logs")
    >>> _ = model.evaluate(np.ones((4, 3)), np.ones(4), verbose=0, callbacks=[board])
    >>> [path.name for path in pathlib.Path("logs").iterdir()]
    ['validation']

    Args:
        log_dir: A local directory, not shared with another callback.
        histogram_freq: Number of epochs from one histogram of the weights to the next; 0: no
            histograms.
        write_graph: Whether to write the graph of layers of a Sequential or functional model.
        write_images: Whether to write weights as images beside their histograms, scaled from the
            smallest to the largest value.
        write_steps_per_second: Whether to write steps per second of epochs, and of batches.
        update_freq: "epoch" writes metrics of epochs only, "batch" those of each training batch,
            too, and a number n those of every n-th.
        profile_batch: Only 0.
        embeddings_freq: Only 0.
        embeddings_metadata: Only None.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is not supported, or out of range.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = False,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: int | Literal["epoch", "batch"] = "epoch",
        profile_batch: int = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: None = None,
    ) -> None:
        super().__init__()
        check_path("log_dir", log_dir)
        self.log_dir: str = os.fspath(log_dir)
        if "://" in self.log_dir:
            raise ValueError(f"`log_dir` must be a local directory, but got {self.log_dir!r}")
        self.histogram_freq: int = check_int("histogram_freq", histogram_freq, minimum=0)
        for name, flag in (
            ("write_graph", write_graph),
            ("write_images", write_images),
            ("write_steps_per_second", write_steps_per_second),
        ):
            check_flag(name, flag, or_none=False)
        if write_images and not histogram_freq:
            raise ValueError(
                "`write_images=True` needs `histogram_freq`: images are written with histograms"
            )
        self.write_graph = write_graph
        self.write_images = write_images
        self.write_steps_per_second = write_steps_per_second
        if isinstance(update_freq, str) and update_freq not in _INTERVALS:
            raise ValueError(
                f'`update_freq` must be "epoch", "batch" or an int, but got {update_freq!r}'
            )
        self.update_freq = update_freq
        #: Every how many batches one is written; 0: never.
        self._batch_interval = (
            _INTERVALS[update_freq]
            if isinstance(update_freq, str)
            else check_int("update_freq", update_freq, minimum=1)
        )
        for name, value, hint in (
            ("profile_batch", profile_batch, "use jax.profiler or torch.profiler"),
            ("embeddings_freq", embeddings_freq, "embeddings are not written"),
            ("embeddings_metadata", embeddings_metadata, "embeddings are not written"),
        ):
            if value:
                raise ValueError(f"`{name}` is not supported: got {value!r}; {hint}")
        self._train = EventFile(os.path.join(self.log_dir, "train"))
        self._validation = EventFile(os.path.join(self.log_dir, "validation"))
        self._batches = 0
        self._batch_began = self._epoch_began = 0.0
        self._iterations_before = 0

    # --- training ---------------------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Count batches from 0, and write the graph."""
        self._batches = 0
        kinds = {kind.__name__ for kind in type(self.model).__mro__}
        if self.write_graph and kinds & {"Functional", "Sequential"}:
            self._train.write(0, [keras_model("keras", self.model.to_json())])

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Measure from here."""
        if self.write_steps_per_second:
            self._iterations_before = self._iterations()
            self._epoch_began = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the batch."""
        self._batches += 1
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Write the batch's metrics, if it is due."""
        if not self._batch_interval or self._batches % self._batch_interval:
            return
        values = {f"batch_{name}": value for name, value in (logs or {}).items()}
        if self.write_steps_per_second:
            seconds = time.perf_counter() - self._batch_began
            values["batch_steps_per_second"] = 1 / max(seconds, 1e-9)
        self._train.write(self._batches, _scalars(values))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Write metrics of the epoch, and weights, if they are due."""
        if logs:
            train = {name: of for name, of in logs.items() if not name.startswith(_VALIDATION)}
            train |= self._learning_rates()
            if self.write_steps_per_second:
                seconds = time.perf_counter() - self._epoch_began
                steps = self._iterations() - self._iterations_before
                train["steps_per_second"] = steps / max(seconds, 1e-9)
            validation = {
                name.removeprefix(_VALIDATION): of
                for name, of in logs.items()
                if name.startswith(_VALIDATION)
            }
            for file, values in ((self._train, train), (self._validation, validation)):
                file.write(epoch, _scalars({f"epoch_{name}": of for name, of in values.items()}))
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._train.write(epoch, self._weights())

    # --- evaluation -------------------------------------------------------------------------------

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Write metrics of the evaluation by the optimizer's iterations."""
        if logs and self.model.optimizer is not None:
            values = {f"evaluation_{name}_vs_iterations": of for name, of in logs.items()}
            self._validation.write(self._iterations(), _scalars(values))

    # --- values -----------------------------------------------------------------------------------

    def _iterations(self) -> int:
        return int(_array(self.model.optimizer.iterations))

    def _learning_rates(self) -> dict[str, float]:
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(optimizer, "optimizers"):
            return {
                f"learning_rate_{each.name}": float(_array(each.learning_rate))
                for each in optimizer.optimizers
            }
        if not hasattr(optimizer, "learning_rate"):
            return {}
        return {"learning_rate": float(_array(optimizer.learning_rate))}

    def _weights(self) -> Iterator[Any]:
        for layer in self.model.layers:
            for weight in layer.weights:
                if has_table(weight):
                    continue  # no process holds all of its rows
                name, array = weight.path.replace(":", "_"), _array(weight)
                yield histogram(f"{name}/histogram", array)
                pixels = _pixels(array) if self.write_images else None
                if pixels is not None:
                    yield images(f"{name}/image", pixels)


def _array(value: Any) -> NDArray[Any]:
    # Keras' own conversion of variables warns of NumPy 2.
    value = value.value if isinstance(value, keras.Variable) else value
    return np.asarray(keras.ops.convert_to_numpy(value))


def _scalars(values: Mapping[str, Any]) -> list[Any]:
    return [scalar(tag, _array(value).item()) for tag, value in values.items()]


def _pixels(weight: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return a weight as grey images of shape (images, height, width, 1); None: it has no form."""
    array = np.squeeze(np.asarray(weight, np.float64))
    match array.ndim:
        case 1:
            array = array[None, :, None]
        case 2:
            array = (array.T if array.shape[0] > array.shape[1] else array)[None]
        case 3:  # a kernel of each channel
            is_last = keras.config.image_data_format() == "channels_last"
            array = array.transpose(2, 0, 1) if is_last else array
        case _:
            return None
    if not array.size:
        return None
    array = np.nan_to_num(array, posinf=0.0, neginf=0.0)
    minimum, maximum = array.min(), array.max()
    scaled = (array - minimum) / ((maximum - minimum) or 1.0)
    return np.asarray(np.round(scaled * 255), np.uint8)[..., None]

"""`hr.keras.SidecarEvaluator`: evaluates the checkpoints of a training program, in its own process.

watch       the newest checkpoint that is complete and was not evaluated
load        its weights; the optimizer's iterations, or what stands for them
evaluate    with the callbacks: TensorBoard, BestModelExporter, which keeps the best model in a file
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras

from headrace.adapters.keras_training.training_checkpoints import (
    CheckpointWatch,
    FoundCheckpoint,
    IncompleteError,
    load,
)
from headrace.arguments import check_instance, check_int, check_path, check_seconds, check_string
from headrace.waiting import WaitWarningLimiter

__all__ = [
    "BestModelExporter",
    "SidecarEvaluator",
]

_log = logging.getLogger(__name__)


class BestModelExporter(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model after each evaluation that is better than all before.

    For `model.evaluate`, the validation of `fit`, and `hr.keras.SidecarEvaluator`. A reader of the
    file finds a complete model at any time, since it is replaced by renaming. The best value is in
    the file as well, so an evaluator that is started again continues with it.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(loss="mse")
    >>> exporter = hr.keras.BestModelExporter("best/model.keras", monitor="loss")
    >>> loss = model.evaluate(np.ones((4, 2)), np.ones((4, 1)), callbacks=[exporter], verbose=0)
    >>> exporter.best == loss, keras.saving.load_model("best/model.keras").count_params()
    (True, 3)

    Args:
        filepath: The file, which ends with ".keras"; its directory is created.
        monitor: Name of the metric: "loss", or one of `compile`.
        mode: "min" if lower values are better, "max" if higher ones are.

    Raises:
        ValueError: `filepath` or `mode` is none of these.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "loss",
        mode: Literal["min", "max"] = "min",
    ) -> None:
        super().__init__()
        check_path("filepath", filepath)
        self.filepath: Path = Path(filepath)
        if self.filepath.suffix != ".keras":
            raise ValueError(f'`filepath` must end with ".keras", but got {str(filepath)!r}')
        check_string("monitor", monitor, empty=False)
        if mode not in ("min", "max"):
            raise ValueError(f'`mode` must be "min" or "max", but got {mode!r}')
        self.monitor = monitor
        self.mode = mode
        self.best = self._best_in_file()
        """The best value so far; None: there is none."""

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Save the model if this evaluation was the best.

        Raises:
            ValueError: The evaluation has no such metric.
        """
        if self.monitor not in (logs := logs or {}):
            raise ValueError(
                f"`monitor` of hr.keras.BestModelExporter is {self.monitor!r}, and the evaluation "
                f"has {', '.join(sorted(logs)) or 'no metrics'}"
            )
        value = float(logs[self.monitor])
        if math.isnan(value) or (self.best is not None and not self._is_better(value, self.best)):
            return
        self._save(value)
        self.best = value
        _log.info("%s=%g is the best so far: saved %s", self.monitor, value, self.filepath)

    def _is_better(self, value: float, best: float) -> bool:
        return value < best if self.mode == "min" else value > best

    def _save(self, value: float) -> None:
        folder = self.filepath.parent
        folder.mkdir(parents=True, exist_ok=True)
        # Within the directory, so that it can be renamed.
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as temporary:
            partial = os.path.join(temporary, self.filepath.name)
            self.model.save(partial)
            with zipfile.ZipFile(partial, "a") as archive:
                archive.comment = json.dumps({self.monitor: value}).encode()
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, self.filepath)

    def _best_in_file(self) -> float | None:
        """Return the value that a file of an earlier run was saved with."""
        try:
            with zipfile.ZipFile(self.filepath) as archive:
                value = json.loads(archive.comment or b"{}").get(self.monitor)
        except (FileNotFoundError, zipfile.BadZipFile, ValueError, AttributeError):
            return None
        return None if value is None else float(value)


_log = logging.getLogger(__name__)

_MAX_PAUSE_SECONDS = 1.0
_UNCHANGED_SECONDS = 10.0
"""A complete file that cannot be loaded is an error once it has been unchanged for so long."""


class SidecarEvaluator:
    """Evaluates the checkpoints that a training program writes to a directory.

    Run it in a separate process, with a model of the same architecture. It takes the files of
    `keras.callbacks.ModelCheckpoint` (`.weights.h5`, `.keras`) and checkpoints of `hr.Checkpoint`
    and `hr.CheckpointManager` that have the model as `model` or its weights as `weights`. The
    newest one is evaluated first, and older ones are skipped. A file that is still being written
    is never evaluated.

    Before each evaluation `model.optimizer.iterations` is set to the number of training steps: that
    in the checkpoint, else the last whole number in its name, else a count of evaluations.
    `hr.keras.TensorBoard` writes metrics by it.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> model.save_weights("epoch_1.weights.h5")  # a training program does this
    >>> rows = hr.Dataset.from_tensor_slices((np.ones((4, 2)), np.ones((4, 1)))).batch(2)
    >>> data = hr.keras.dataset(rows)
    >>> evaluator = hr.keras.SidecarEvaluator(model, data, checkpoint_dir=".", max_evaluations=1)
    >>> evaluator.start()
    2/2 - ... - loss: ...

    Args:
        model: A built and compiled Keras model.
        data: What `model.evaluate` takes, read once for each checkpoint.
        checkpoint_dir: A local directory, which need not exist yet.
        steps: Batches of an evaluation; None: all.
        max_evaluations: Stop after this number of evaluations, or after a checkpoint with this
            number or a higher one in its name. Pass the number of epochs if names have the epoch.
            None: never stop.
        callbacks: Of `model.evaluate`: `hr.keras.TensorBoard`, `hr.keras.BestModelExporter` ...
        timeout: Seconds without a new complete checkpoint after which to stop; None: wait forever.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not built or not compiled, or an argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        check_instance("model", model, keras.Model)
        if not model.compiled:
            raise ValueError("`model` is not compiled: call model.compile(loss=..., metrics=...)")
        check_path("checkpoint_dir", checkpoint_dir)
        self._directory = os.path.abspath(checkpoint_dir)
        if "://" in os.fspath(checkpoint_dir):
            raise ValueError(
                f"`checkpoint_dir` must be a local directory, but got {checkpoint_dir!r}"
            )
        if steps is not None:
            check_int("steps", steps, minimum=1)
        if max_evaluations is not None:
            check_int("max_evaluations", max_evaluations, minimum=1)
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._callbacks = list(callbacks or ())
        for each in self._callbacks:
            check_instance("callbacks", each, keras.callbacks.Callback)
            is_exporter = isinstance(each, BestModelExporter)
            if is_exporter and each.filepath.resolve().parent == Path(self._directory).resolve():
                raise ValueError(
                    f"`callbacks` export {str(each.filepath)!r} into `checkpoint_dir`, where it "
                    "would be evaluated as a checkpoint: use another directory"
                )
        self._model = model
        self._data = data
        self._steps = steps
        self._max_evaluations = max_evaluations
        self._timeout = timeout
        self._watch = CheckpointWatch(self._directory)
        self._evaluations = 0
        #: Why checkpoints were not loaded, by path.
        self._load_errors: dict[str, str] = {}

    def start(self) -> None:
        """Evaluate checkpoints until `max_evaluations` or `timeout`.

        Raises:
            ValueError: The model is not built, or a checkpoint is of another model.
        """
        if not self._model.built:
            raise ValueError(
                "`model` is not built, so nothing can be loaded: give it an Input layer, or call "
                "model.build(input_shape)"
            )
        began, warnings, last = time.monotonic(), WaitWarningLimiter(), ""
        with tempfile.TemporaryDirectory(prefix="headrace-sidecar-") as folder:
            while self._max_evaluations is None or self._evaluations < self._max_evaluations:
                loaded = self._load_newest(folder)
                if loaded is not None:
                    found, iterations = loaded
                    self._evaluate(found, iterations)
                    if (
                        self._max_evaluations is not None
                        and (found.number or 0) >= self._max_evaluations
                    ):
                        return
                    began, last = time.monotonic(), os.path.basename(found.path)
                    warnings.reset()
                    continue
                waited = time.monotonic() - began
                if self._timeout is not None and waited >= self._timeout:
                    _log.warning("stopped: %s", self._describe_missing(waited, last))
                    return
                if warnings.should_warn(waited):
                    _log.warning("waiting: %s", self._describe_missing(waited, last))
                left = _MAX_PAUSE_SECONDS if self._timeout is None else self._timeout - waited
                time.sleep(max(0.0, min(left, 0.02 + waited / 10, _MAX_PAUSE_SECONDS)))

    def _load_newest(self, folder: str) -> tuple[FoundCheckpoint, int | None] | None:
        """Load the newest checkpoint that is complete; None: there is none."""
        for found in self._watch.candidates():
            if not self._watch.is_due(found):
                continue
            try:
                iterations = load(self._model, found, folder)
            except Exception as error:
                # An incomplete file may be readable.
                may_change = found.is_keras_file and found.unchanged < _UNCHANGED_SECONDS
                if not (isinstance(error, IncompleteError) or may_change):
                    error.add_note(f"while loading the checkpoint {found.path}")
                    raise
                self._load_errors[found.path] = str(error)
                self._watch.postpone(found)
                continue
            self._watch.finish(found)
            self._load_errors.clear()
            return found, iterations
        return None

    def _evaluate(self, found: FoundCheckpoint, iterations: int | None) -> None:
        self._evaluations += 1
        step = next(n for n in (iterations, found.number, self._evaluations) if n is not None)
        self._model.optimizer.iterations.assign(step)
        metrics = self._model.evaluate(
            self._data, steps=self._steps, callbacks=self._callbacks, verbose=2, return_dict=True
        )
        summary = ", ".join(f"{name}={float(value):g}" for name, value in metrics.items())
        _log.info("evaluated the checkpoint %s, step %d: %s", found.path, step, summary)

    def _describe_missing(self, waited: float, last: str) -> str:
        """Describe what the evaluator is waiting for, and for how long."""
        partial = "; ".join(
            f"{os.path.basename(each.path)} is not complete: "
            f"{self._load_errors.get(each.path, 'it was modified a moment ago')}"
            for each in self._watch.candidates()
        )
        text = (
            f"no new checkpoint in {self._directory} for {waited:.0f} s; the last one was {last}"
            if last
            else f"no checkpoint in {self._directory} yet, after {waited:.0f} s"
        )
        return f"{text}; {partial}" if partial else text

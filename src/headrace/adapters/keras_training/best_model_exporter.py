"""`hr.keras.BestModelExporter`: keeps the model of the best evaluation in a file."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from headrace.arguments import check_path, check_string

__all__ = ["BestModelExporter"]

_log = logging.getLogger(__name__)


class BestModelExporter(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model after each evaluation that is better than all before.

    For `model.evaluate`, the validation of `fit`, and `hr.keras.SidecarEvaluator`. A reader of the
    file finds a complete model at any time, since it is replaced by renaming. The best value is in
    the file as well, so an evaluator that is started again continues with it.

    Args:
        filepath: The file, which ends with ".keras"; its directory is created.
        monitor: Name of the metric: "loss", or one of `compile`.
        mode: "min" if lower values are better, "max" if higher ones are.

    Raises:
        ValueError: `filepath` or `mode` is none of these.
    """

    def __init__(
        self, filepath: str | os.PathLike[str], monitor: str = "loss", mode: str = "min"
    ) -> None:
        super().__init__()
        check_path("filepath", filepath)
        self.filepath = Path(filepath)
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

"""`fit`, `evaluate` and `predict` of a Keras model under a `ParameterServerStrategy`.

The coordinator reads batches and schedules steps. Training workers compute gradients with their
copies of the model and push them to the parameter servers, where the optimizer runs. Keras'
callbacks are called with the results in batch order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from headrace.adapters.keras_training.backup import (
    TrainingBackup,
    restore_callbacks,
    state_of_callbacks,
    take_backup_callback,
)
from headrace.adapters.keras_training.keras_internals import (
    check_compiled,
    check_labels,
    first_epoch,
    flat_logs,
    pythonify_logs,
)
from headrace.adapters.keras_training.model_on_servers import ModelOnServers
from headrace.adapters.keras_training.step_results import MetricResults, MetricTotals, run_steps
from headrace.adapters.keras_training.training_data import TrainingData, split_for_validation
from headrace.adapters.keras_training.worker_calls import (
    StepResult,
    predict_steps,
    test_steps,
    train_steps,
)
from headrace.coordinator.remote_value import RemoteValue
from headrace.errors import CancelledError

__all__ = ["ParameterServerTrainer"]


@dataclass
class _FitRun:
    """One call of `fit`.

    Attributes:
        data: Training data.
        validation: Validation data; None disables validation.
        callbacks: Keras `CallbackList`.
        totals: Sums of the metrics of the current epoch.
        validation_freq: As in `keras.Model.fit`.
        epoch: Number of the current epoch, or of the next one between epochs.
        batch: Number of batches of the epoch whose results were delivered.
        backup: Backup of the training; None without a `BackupAndRestore` callback.
    """

    data: TrainingData
    validation: TrainingData | None
    callbacks: Any
    totals: MetricTotals
    validation_freq: Any
    epoch: int = 0
    batch: int = 0
    backup: TrainingBackup | None = None

    def get_state(self) -> dict[str, Any]:
        """Return the position of the training: JSON values and arrays."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "data": self.data.get_state(),
            "metrics": self.totals.get_state(),
            "callbacks": state_of_callbacks(self.callbacks.callbacks),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state, except that of callbacks, which is restored after `on_train_begin`."""
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.data.set_state(state["data"], self.batch)
        self.totals.set_state(state["metrics"])


class ParameterServerTrainer:
    """Trains one model on the workers and servers of a strategy.

    Args:
        model: Keras model that was created in the scope of the strategy, or passed to
            `hr.keras.distribute`.
        strategy: A `ParameterServerStrategy`.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        self._model = model
        self._model_on_servers = ModelOnServers(model, strategy)
        self._metric_results = MetricResults(model)

    # --- fit --------------------------------------------------------------------------------------

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Train the model; arguments and result are those of `keras.Model.fit`."""
        model = self._model
        check_compiled(model, "fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_for_validation(
                x, y, sample_weight, validation_split
            )
        callbacks, backup_callback = take_backup_callback(callbacks)
        data = TrainingData(
            "fit",
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            steps_argument="steps_per_epoch",
            shuffle=shuffle,
            class_weight=class_weight,
        )
        validation = None
        if validation_data is not None:
            parts = (
                validation_data if isinstance(validation_data, tuple | list) else [validation_data]
            )
            validation = TrainingData(
                "fit",
                *parts,
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
                steps_argument="validation_steps",
                restarts=True,
            )
        backup: TrainingBackup | None = None
        try:
            check_labels(model, data.peek(), "fit")
            self._model_on_servers.place_variables(data.peek())
            callbacks = keras.callbacks.CallbackList(
                callbacks,
                add_history=True,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=data.num_batches,
                model=model,
            )
            run = _FitRun(
                data,
                validation,
                callbacks,
                MetricTotals(model, self._metric_results),
                validation_freq,
            )
            run.epoch = first_epoch(model, initial_epoch)
            if backup_callback is None:
                self._model_on_servers.send_to_workers()
                self._run_epochs(run, epochs)
            else:
                run.backup = backup = TrainingBackup(
                    backup_callback, self._model_on_servers.saved_objects()
                )
                restored = self._restore(run, backup)
                self._model_on_servers.send_to_workers()
                with backup.handle_sigterm():
                    self._run_epochs(run, epochs, restored)
                backup.delete()
        finally:
            if backup is not None:
                backup.close()
            data.close()
            if validation is not None:
                validation.close()
        return model.history

    def _run_epochs(
        self, run: _FitRun, epochs: int, restored_callbacks: Sequence[Any] | None = None
    ) -> None:
        model, callbacks = self._model, run.callbacks
        model.stop_training = False
        logs: dict[str, Any] = {}
        callbacks.on_train_begin()
        if restored_callbacks is not None:
            restore_callbacks(callbacks.callbacks, restored_callbacks)
        while run.epoch < epochs and not model.stop_training:
            epoch = run.epoch
            callbacks.on_epoch_begin(epoch)
            last = self._train_epoch(run)
            run.totals.assign_to_metrics()
            logs = pythonify_logs(run.totals.logs(last))
            if run.validation is not None and _is_due(epoch, run.validation_freq):
                found = self._evaluate(run.validation, callbacks)
                logs.update({f"val_{name}": value for name, value in found.items()})
            callbacks.on_epoch_end(epoch, logs)
            run.epoch, run.batch = epoch + 1, 0
            run.totals.reset()
            if run.backup is not None and run.backup.every is None:
                self._save(run, run.backup)
        self._model_on_servers.finish_training()
        callbacks.on_train_end(logs)

    def _train_epoch(self, run: _FitRun) -> dict[str, Any]:
        """Train on the remaining batches of an epoch; return the logs of the last step."""
        model, placed, callbacks, backup = (
            self._model,
            self._model_on_servers,
            run.callbacks,
            run.backup,
        )
        placed.weights.bump_version()
        has_batch_callbacks = _has_batch_hooks(callbacks)
        groups = _group_batches(run.data.epoch(run.batch), model.steps_per_execution)
        round_size = placed.coordinator.strategy.round_size or 1
        begin = run.batch
        has_ended = False
        last: dict[str, Any] = {}

        def steps() -> Iterator[RemoteValue]:
            nonlocal begin, has_ended
            for number in itertools.count():
                # After SIGTERM, finish the gradient round, so that the backup contains all of it.
                is_round_end = number % round_size == 0
                if backup is not None and (
                    backup.is_due or (backup.is_terminating and is_round_end)
                ):
                    return
                batches = next(groups, None)
                if batches is None:
                    has_ended = True
                    return
                callbacks.on_train_batch_begin(begin)
                call = placed.next_call(len(batches))
                begin += len(batches)
                if backup is not None:
                    backup.count(len(batches))
                yield placed.schedule(train_steps, call, batches)

        def deliver(result: StepResult) -> bool:
            nonlocal last
            run.batch += result.steps
            last = result.logs
            run.totals.add(result.metrics)
            placed.loss_scale.update(result.non_finite)
            if has_batch_callbacks:
                callbacks.on_train_batch_end(run.batch - 1, run.totals.logs(last))
            return not model.stop_training

        while not has_ended and not model.stop_training:
            run_steps(self._model_on_servers.coordinator, steps(), deliver)
            if backup is not None and not has_ended and not model.stop_training:
                self._save(run, backup)
                if backup.is_terminating:
                    backup.is_final_save_done = True
                    raise CancelledError("fit received SIGTERM, and saved a backup")
        return last

    def _save(self, run: _FitRun, backup: TrainingBackup) -> None:
        backup.save({**run.get_state(), **self._model_on_servers.get_state()})

    def _restore(self, run: _FitRun, backup: TrainingBackup) -> Sequence[Any] | None:
        """Restore the newest backup; return the callbacks' states, or None without a backup."""
        found = backup.restore()
        if found is None:
            return None
        run.set_state(found)
        self._model_on_servers.set_state(found)
        states: Sequence[Any] = found["callbacks"]
        return states

    # --- evaluate and predict ---------------------------------------------------------------------

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Evaluate the model; arguments and result are those of `keras.Model.evaluate`."""
        check_compiled(self._model, "evaluate")
        data = TrainingData("evaluate", x, y, sample_weight, batch_size=batch_size, steps=steps)
        try:
            check_labels(self._model, data.peek(), "evaluate")
            self._model_on_servers.place_variables(data.peek())
            self._model_on_servers.send_to_workers()
            callbacks = self._callbacks(callbacks, verbose, data)
            logs = self._evaluate(data, callbacks)
        finally:
            data.close()
        return logs if return_dict else flat_logs(self._model, logs)

    def _evaluate(self, data: TrainingData, callbacks: Any) -> dict[str, Any]:
        model = self._model
        totals = MetricTotals(model, self._metric_results)
        model.stop_evaluating = False
        done = 0
        last: dict[str, Any] = {}
        group_size = model.steps_per_execution
        shards = getattr(model, "_headrace_evaluation_shards", None)
        if isinstance(shards, int) and shards and data.num_batches:
            group_size = -(-data.num_batches // shards)

        has_batch_callbacks = _has_batch_hooks(callbacks)

        def deliver(result: StepResult) -> bool:
            nonlocal done, last
            done += result.steps
            last = result.logs
            totals.add(result.metrics)
            if has_batch_callbacks:
                callbacks.on_test_batch_end(done - 1, totals.logs(last))
            return not model.stop_evaluating

        callbacks.on_test_begin()
        self._run_without_updates(
            data, group_size, callbacks.on_test_batch_begin, test_steps, deliver
        )
        totals.assign_to_metrics()
        logs: dict[str, Any] = pythonify_logs(totals.logs(last))
        callbacks.on_test_end(logs)
        return logs

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the outputs in batch order, as `keras.Model.predict` does."""
        model = self._model
        data = TrainingData("predict", x, batch_size=batch_size, steps=steps)
        outputs: list[Any] = []
        try:
            self._model_on_servers.place_variables(data.peek(), with_loss=False)
            self._model_on_servers.send_to_workers()
            callbacks = self._callbacks(callbacks, verbose, data)
            model.stop_predicting = False

            def deliver(result: list[Any]) -> bool:
                outputs.extend(result)
                callbacks.on_predict_batch_end(len(outputs) - 1, {"outputs": result[-1]})
                return not model.stop_predicting

            callbacks.on_predict_begin()
            size = model.steps_per_execution or 1
            self._run_without_updates(
                data, size, callbacks.on_predict_batch_begin, predict_steps, deliver
            )
            callbacks.on_predict_end()
        finally:
            data.close()
        return _concatenate_outputs(outputs)

    def _run_without_updates(
        self,
        data: TrainingData,
        size: int,
        on_begin: Callable[[int], None],
        function: Callable[..., Any],
        deliver: Callable[[Any], bool],
    ) -> None:
        """Run a function that changes no variables on all batches, and deliver its results.

        Args:
            data: Batches; one epoch is read.
            size: Number of batches of a call.
            on_begin: Called with the number of the first batch of each call.
            function: Function of `worker_calls`.
            deliver: As in `run_steps`.
        """
        version = self._model_on_servers.weights.bump_version()

        def steps() -> Iterator[RemoteValue]:
            begin = 0
            for batches in _group_batches(data.epoch(), size):
                on_begin(begin)
                begin += len(batches)
                yield self._model_on_servers.schedule(function, version, batches)

        with self._model_on_servers.weights.read_only():
            run_steps(self._model_on_servers.coordinator, steps(), deliver)

    def _callbacks(self, callbacks: Any, verbose: Any, data: TrainingData) -> Any:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        return keras.callbacks.CallbackList(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=1,
            steps=data.num_batches,
            model=self._model,
        )


def _group_batches(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _is_due(epoch: int, frequency: Any) -> bool:
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


_BATCH_HOOKS = (
    *("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    *("on_test_batch_begin", "on_test_batch_end"),
)


def _has_batch_hooks(callbacks: Any) -> bool:
    """Return whether any callback overrides a batch hook."""
    base = keras.callbacks.Callback
    return any(
        name in vars(each) or getattr(type(each), name) is not getattr(base, name)
        for each in callbacks.callbacks
        for name in _BATCH_HOOKS
        if hasattr(base, name)
    )


def _concatenate_outputs(outputs: Sequence[Any]) -> Any:
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

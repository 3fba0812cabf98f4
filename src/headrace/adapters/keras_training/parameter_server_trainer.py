"""`fit`, `evaluate` and `predict` of a Keras model under a `ParameterServerStrategy`.

The coordinator reads batches and schedules steps; training workers compute gradients of their copy
of the model and push them to the parameter servers, where the optimizer runs. Results come back in
the order of the batches, and Keras' callbacks are called with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from headrace.adapters.keras_training.backup import (
    Backup,
    restore_callbacks,
    state_of_callbacks,
    take_backup_callback,
)
from headrace.adapters.keras_training.embedding_tables import check_optimizer
from headrace.adapters.keras_training.keras_internals import (
    CurrentLearningRate,
    build_model,
    check_compiled,
    check_labels,
    first_epoch,
    flat_logs,
    pythonify_logs,
)
from headrace.adapters.keras_training.large_embeddings import use_tables
from headrace.adapters.keras_training.loss_scale import LossScale, inner_optimizer
from headrace.adapters.keras_training.metric_totals import MetricResults, MetricTotals
from headrace.adapters.keras_training.model_pickling import dump_model
from headrace.adapters.keras_training.optimizer_on_servers import (
    OptimizerOnServers,
    optimizer_on_servers,
)
from headrace.adapters.keras_training.optimizer_slots import slots_on_servers
from headrace.adapters.keras_training.server_optimizers import decays
from headrace.adapters.keras_training.server_weights import ServerWeights, weights_of
from headrace.adapters.keras_training.step_scheduler import run_steps
from headrace.adapters.keras_training.training_data import TrainingData, split_for_validation
from headrace.adapters.keras_training.worker_model import (
    StepResult,
    TrainCall,
    WorkerModel,
    predict_steps,
    test_steps,
    train_steps,
)
from headrace.coordinator.coordinator import ClusterCoordinator
from headrace.coordinator.remote_value import RemoteValue
from headrace.errors import CancelledError
from headrace.parameter_server.optimizers import SGD

__all__ = ["ParameterServerTrainer", "trainer_of"]


@dataclass
class _Run:
    """One call of `fit`.

    Attributes:
        data: Training data.
        validation: Validation data; None: no validation.
        callbacks: The `CallbackList`.
        totals: The metrics of the epoch so far.
        validation_freq: As in `keras.Model.fit`.
        epoch: The current epoch, or the next one.
        batch: The number of its batches whose results were delivered.
        backup: None without a `BackupAndRestore` callback.
    """

    data: TrainingData
    validation: TrainingData | None
    callbacks: Any
    totals: MetricTotals
    validation_freq: Any
    epoch: int = 0
    batch: int = 0
    backup: Backup | None = None


class ParameterServerTrainer:
    """Trains one model on the workers and servers of a strategy.

    Args:
        model: Made in the scope of the strategy, or given to `hr.keras.distribute`.
        strategy: A `ParameterServerStrategy`.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        self._model = model
        self._strategy = strategy
        #: It is closed when nobody holds it.
        self._held_coordinator = ClusterCoordinator(strategy)
        self._weights: ServerWeights | None = None
        #: The `WorkerModel` on each worker, and the digest of the model in it.
        self._worker_model: Any = None
        self._digest = b""
        self._optimizers: tuple[Any, Any] = None, None
        self._on_servers: OptimizerOnServers | None = None
        self._loss_scale = LossScale(None)
        self._metric_results = MetricResults(model)
        self._rate = CurrentLearningRate()
        #: The number of the next training step.
        self._next_step = 0
        # Follows keras.utils.set_random_seed, which seeds this generator.
        self._seed = int(np.random.randint(1 << 31))

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
        backup: Backup | None = None
        try:
            check_labels(model, data.peek(), "fit")
            self._place(data)
            callbacks = keras.callbacks.CallbackList(
                callbacks,
                add_history=True,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=data.num_batches,
                model=model,
            )
            run = _Run(
                data,
                validation,
                callbacks,
                MetricTotals(model, self._metric_results),
                validation_freq,
            )
            run.epoch = first_epoch(model, initial_epoch)
            if backup_callback is None:
                self._send_model()
                self._run_epochs(run, epochs)
            else:
                run.backup = backup = Backup(backup_callback, self._saved_objects())
                restored = self._restore(run, backup)
                self._send_model()
                with backup.watching_for_the_end():
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
        self, run: _Run, epochs: int, restored_callbacks: Sequence[Any] | None = None
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
            run.totals.show()
            logs = pythonify_logs(run.totals.logs(last))
            if run.validation is not None and _is_due(epoch, run.validation_freq):
                found = self._evaluate(run.validation, callbacks)
                logs.update({f"val_{name}": value for name, value in found.items()})
            callbacks.on_epoch_end(epoch, logs)
            run.epoch, run.batch = epoch + 1, 0
            run.totals.reset()
            if run.backup is not None and run.backup.every is None:
                self._save(run, run.backup)
        self._placed.use_averages(self._optimizers[0])
        self._placed.pull()
        callbacks.on_train_end(logs)

    def _train_epoch(self, run: _Run) -> dict[str, Any]:
        """Train on the rest of an epoch; return the logs of the last step."""
        model, weights, callbacks, backup = self._model, self._placed, run.callbacks, run.backup
        weights.new_version()
        has_batch_callbacks = _has_batch_hooks(callbacks)
        groups = _grouped(run.data.epoch(run.batch), model.steps_per_execution)
        begin = run.batch
        has_ended = False
        last: dict[str, Any] = {}

        def steps() -> Iterator[RemoteValue]:
            nonlocal begin, has_ended
            while backup is None or not (backup.is_due or backup.is_asked_to_end):
                batches = next(groups, None)
                if batches is None:
                    has_ended = True
                    return
                callbacks.on_train_batch_begin(begin)
                call = TrainCall(
                    self._next_step,
                    self._seed,
                    self._learning_rate,
                    self._loss_scale.value,
                    weights.version,
                )
                self._next_step += len(batches)
                begin += len(batches)
                if backup is not None:
                    backup.count(len(batches))
                yield self._coordinator.schedule(
                    train_steps, args=(self._worker_model, call, batches)
                )

        def deliver(result: StepResult) -> bool:
            nonlocal last
            run.batch += result.steps
            last = result.logs
            run.totals.add(result.metrics)
            self._loss_scale.update(result.non_finite)
            if has_batch_callbacks:
                callbacks.on_train_batch_end(run.batch - 1, run.totals.logs(last))
            return not model.stop_training

        while not has_ended and not model.stop_training:
            run_steps(self._coordinator, steps(), deliver)
            if backup is not None and not has_ended and not model.stop_training:
                self._save(run, backup)
                if backup.is_asked_to_end:
                    backup.is_saved_for_the_end = True
                    raise CancelledError("fit received SIGTERM, and saved a backup")
        return last

    # --- backups ----------------------------------------------------------------------------------

    def _saved_objects(self) -> dict[str, Any]:
        optimizer, statistics = self._place_optimizer()
        return {
            "weights": self._placed.by_name,
            "optimizer": optimizer,
            "statistics": statistics,
        }

    def _save(self, run: _Run, backup: Backup) -> None:
        seeds = {str(index): value for index, value in self._placed.seeds.items()}
        backup.save(
            {
                "epoch": run.epoch,
                "batch": run.batch,
                "step": self._next_step,
                "data": run.data.get_state(),
                "metrics": run.totals.get_state(),
                "callbacks": state_of_callbacks(run.callbacks.callbacks),
                "seed": self._seed,
                "seeds": seeds,
                "learning_rate": self._learning_rate,
                "loss_scale": self._loss_scale.get_state(),
            }
        )

    def _restore(self, run: _Run, backup: Backup) -> Sequence[Any] | None:
        """Restore the newest backup; return states of callbacks, or None if there is no backup."""
        found = backup.restore()
        if found is None:
            return None
        run.epoch, run.batch, self._next_step = found["epoch"], found["batch"], found["step"]
        self._seed = found["seed"]
        run.data.set_state(found["data"], run.batch)
        run.totals.set_state(found["metrics"])
        self._placed.set_seeds({int(index): value for index, value in found["seeds"].items()})
        if found["learning_rate"] is not None:
            self._model.optimizer.learning_rate = found["learning_rate"]
        self._loss_scale.set_state(found["loss_scale"])
        self._placed.outdate()
        if self._on_servers is not None:
            self._on_servers.counted.note()
        self._placed.new_version()
        states: Sequence[Any] = found["callbacks"]
        return states

    @property
    def _learning_rate(self) -> float | None:
        """The learning rate that callbacks set; None if the optimizer has a schedule."""
        return self._rate.of(inner_optimizer(self._model.optimizer))

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
            self._prepare(data)
            callbacks = self._callbacks(callbacks, verbose, data)
            logs = self._evaluate(data, callbacks)
        finally:
            data.close()
        return logs if return_dict else flat_logs(self._model, logs)

    def _evaluate(self, data: TrainingData, callbacks: Any) -> dict[str, Any]:
        model = self._model
        totals = MetricTotals(model, self._metric_results)
        model.stop_evaluating = False
        version = self._placed.new_version()
        done = 0
        last: dict[str, Any] = {}
        group_size = model.steps_per_execution
        shards = getattr(model, "_headrace_evaluation_shards", None)
        if isinstance(shards, int) and shards and data.num_batches:
            group_size = -(-data.num_batches // shards)

        def steps() -> Iterator[RemoteValue]:
            begin = 0
            for batches in _grouped(data.epoch(), group_size):
                callbacks.on_test_batch_begin(begin)
                begin += len(batches)
                yield self._coordinator.schedule(
                    test_steps, args=(self._worker_model, version, batches)
                )

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
        with self._placed.reading():
            run_steps(self._coordinator, steps(), deliver)
        totals.show()
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
        """Return outputs, in the order of the data, as `keras.Model.predict` does."""
        model = self._model
        data = TrainingData("predict", x, batch_size=batch_size, steps=steps)
        outputs: list[Any] = []
        try:
            self._prepare(data, with_loss=False)
            callbacks = self._callbacks(callbacks, verbose, data)
            model.stop_predicting = False
            version = self._placed.new_version()

            def scheduled() -> Iterator[RemoteValue]:
                begin = 0
                for batches in _grouped(data.epoch(), model.steps_per_execution or 1):
                    callbacks.on_predict_batch_begin(begin)
                    begin += len(batches)
                    yield self._coordinator.schedule(
                        predict_steps, args=(self._worker_model, version, batches)
                    )

            def deliver(result: list[Any]) -> bool:
                outputs.extend(result)
                callbacks.on_predict_batch_end(len(outputs) - 1, {"outputs": result[-1]})
                return not model.stop_predicting

            callbacks.on_predict_begin()
            with self._placed.reading():
                run_steps(self._coordinator, scheduled(), deliver)
            callbacks.on_predict_end()
        finally:
            data.close()
        return _joined(outputs)

    # --- the model on workers and servers ---------------------------------------------------------

    @property
    def _coordinator(self) -> ClusterCoordinator:
        """The strategy's coordinator; another one if that was closed."""
        found = ClusterCoordinator(self._strategy)
        if found is not self._held_coordinator:
            self._held_coordinator, self._digest = found, b""
        return found

    @property
    def _placed(self) -> ServerWeights:
        assert self._weights is not None
        return self._weights

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

    def _prepare(self, data: TrainingData, *, with_loss: bool = True) -> None:
        """Bring servers and workers up to date with the model: built, compiled, frozen or not."""
        self._place(data, with_loss=with_loss)
        self._send_model()

    def _place(self, data: TrainingData, *, with_loss: bool = True) -> None:
        """Build the model, and place its variables on the servers."""
        model = self._model
        use_tables(model, self._strategy)
        build_model(model, data.peek(), with_loss=with_loss)
        self._weights = weights_of(model, self._strategy)

    def _send_model(self) -> None:
        """Send the model to the workers if it has changed since it was last sent."""
        weights, optimizers = self._placed, self._place_optimizer()
        packed = dump_model(self._model)
        digest = hashlib.blake2b(packed)
        if optimizers[0] is not None:
            digest.update(optimizers[0].name.encode())
        for seed in weights.seeds.values():
            digest.update(seed.tobytes())
        coordinator = self._coordinator
        if digest.digest() == self._digest:
            return
        self._worker_model = coordinator.create_per_worker_values(
            WorkerModel,
            args=(
                keras.backend.backend(),
                packed,
                weights.trainable,
                weights.state,
                weights.kinds,
                weights.seeds,
                *optimizers,
            ),
        )
        self._digest = digest.digest()

    def _place_optimizer(self) -> tuple[Any, Any]:
        """Return the optimizers on the servers: for gradients, and for changes of statistics."""
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is None:
            self._on_servers, self._optimizers = None, (None, None)
            return self._optimizers
        check_optimizer(self._model, inner_optimizer(optimizer))
        name = f"{self._model.name}/{optimizer.name}"
        on_servers = optimizer_on_servers(optimizer, self._strategy, name)
        if on_servers is not self._on_servers:
            self._on_servers = on_servers
            applies = self._on_servers.applies
            applies.exclude_from_weight_decay(
                placed
                for variable, placed in zip(
                    self._model.trainable_variables, self._placed.trainable, strict=True
                )
                if not decays(optimizer, variable)
            )
            counts = SGD(1.0, name=f"{self._model.name}/statistics", non_finite="apply")
            self._optimizers = applies, counts
            self._loss_scale = LossScale(optimizer)
            slots_on_servers(self._model, self._on_servers, self._placed)
        return self._optimizers


def trainer_of(model: Any, strategy: Any) -> ParameterServerTrainer:
    """Return the trainer of a model under a strategy, the same object each time."""
    found = vars(model).get(_TRAINER)
    if found is None:
        found = ParameterServerTrainer(model, strategy)
        object.__setattr__(model, _TRAINER, found)
    trainer: ParameterServerTrainer = found
    return trainer


_TRAINER = "_headrace_trainer"


def _grouped(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
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
    """Whether any callback looks at single batches."""
    base = keras.callbacks.Callback
    return any(
        name in vars(each) or getattr(type(each), name) is not getattr(base, name)
        for each in callbacks.callbacks
        for name in _BATCH_HOOKS
        if hasattr(base, name)
    )


def _joined(outputs: Sequence[Any]) -> Any:
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

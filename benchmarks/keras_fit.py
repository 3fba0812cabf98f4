"""Cost of a step of `fit` on two workers and two parameter servers.

A dense model (32 inputs, 64 units, one output) is trained with Adam on batches of 64, which the
coordinator reads. The hand-written loop trains the same model: each worker has a copy, and reads
the variables and pushes the gradients once per step. Under tf.distribute, workers read their own
batches. The model with an embedding has 100,000 rows of 32 numbers; a batch has 256 rows of 16 ids.
Evaluation uses a wider model, on two workers and on one. Workers and servers are processes of this
machine in all workloads, and a worker computes with one thread. Mirrored training has one replica,
in the process that calls `fit`.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.parameter_server_steps import start_headrace, start_tensorflow
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

SERVERS = 2
INPUTS, UNITS, BATCH, ROWS = 32, 64, 64, 6400
RATE = 0.001
_STEPS, _EMBEDDING_STEPS = 500, 100
"""Steps per call of `fit`, without and with an embedding."""
IDS, DIM, EMBEDDING_BATCH = 100_000, 32, 256
_WIDE, _EVALUATED = 1024, 200
"""Units, and steps per call of `evaluate`."""

Build = Callable[[Path, ExitStack], Pipeline]

#: Read by JAX, XLA and TensorFlow at startup, also in the processes of workers.
_ONE_THREAD = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}


def rows() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return inputs and labels."""
    random = np.random.default_rng(0)
    x = random.random((ROWS, INPUTS), np.float32)
    return x, x @ random.random((INPUTS, 1), np.float32) / np.float32(INPUTS)


def rows_of_ids() -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and labels."""
    ids = np.random.default_rng(0).integers(0, IDS, (ROWS, 16), np.int32)
    return ids, (ids.mean(axis=1, keepdims=True) / IDS).astype(np.float32)


def _model_with_embedding(keras: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((16,), dtype="int32"),
            keras.layers.Embedding(IDS, DIM),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.build((None, 16))
    return model


def _data(embedding: bool) -> tuple[Any, int, int]:
    """Return rows, the batch size, and the steps per call of `fit`."""
    if embedding:
        return rows_of_ids(), EMBEDDING_BATCH, _EMBEDDING_STEPS
    return rows(), BATCH, _STEPS


def _model(keras: Any, units: int = UNITS, layers: int = 1) -> Any:
    hidden = [keras.layers.Dense(units, activation="relu") for _ in range(layers)]
    model = keras.Sequential([*hidden, keras.layers.Dense(1)])
    model.build((None, INPUTS))
    return model


# --- training ------------------------------------------------------------------------------------


def _headrace(steps: int, embedding: bool = False) -> Build:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        os.environ.update(_ONE_THREAD)
        import keras

        import headrace as hr

        strategy, _coordinator = start_headrace(stack, servers=SERVERS, shards=1)
        with strategy.scope():
            model = _model_with_embedding(keras) if embedding else _model(keras)
        model.compile(keras.optimizers.Adam(RATE), "mse", steps_per_execution=steps)
        arrays, batch, count = _data(embedding)
        data = hr.Dataset.from_tensor_slices(arrays).batch(batch).repeat()

        def losses() -> Iterator[float]:
            while True:
                history = model.fit(data, steps_per_epoch=count, verbose=0)
                yield history.history["loss"][0]

        return losses

    return build


def _by_hand(steps: int) -> Build:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        os.environ.update(_ONE_THREAD)
        import headrace as hr

        strategy, coordinator = start_headrace(stack, servers=SERVERS, shards=1)

        def make() -> tuple[Any, Any]:
            import jax
            import keras

            model = _model(keras)

            def loss(weights: Any, x: Any, y: Any) -> Any:
                outputs, _ = model.stateless_call(weights, [], x)
                return ((outputs - y) ** 2).mean()

            return model, jax.jit(jax.value_and_grad(loss))

        with strategy.scope():
            weights = [hr.Variable(np.array(each)) for each in make()[0].trainable_variables]
            adam = hr.optimizers.Adam(RATE)
        on_workers = coordinator.create_per_worker_values(make)

        def train(replica: Any, batches: Any) -> float:
            import jax

            total = 0.0
            for x, y in batches:
                with hr.distribute.cache_variable_reads(*weights):
                    values = [each.read() for each in weights]
                loss, gradients = jax.device_get(replica[1](values, x, y))
                adam.apply_gradients(zip(gradients, weights, strict=True))
                total += float(loss)
            return total

        batches = iter(hr.Dataset.from_tensor_slices(rows()).batch(BATCH).repeat())

        def losses() -> Iterator[float]:
            while True:
                results = [
                    coordinator.schedule(train, args=(on_workers, list(islice(batches, steps))))
                    for _ in range(_STEPS // steps)
                ]
                coordinator.join()
                yield sum(coordinator.fetch(results)) / _STEPS

        return losses

    return build


def _tf_keras(steps: int, embedding: bool = False) -> Build:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        os.environ.update(_ONE_THREAD)
        import tensorflow as tf
        import tf_keras

        strategy, _coordinator = start_tensorflow(stack, servers=SERVERS, shards=1)
        with strategy.scope():
            model = _model_with_embedding(tf_keras) if embedding else _model(tf_keras)
            optimizer = tf_keras.optimizers.Adam(RATE)
            model.compile(optimizer, "mse", steps_per_execution=steps)

        arrays, batch, count = _data(embedding)

        def read(_context: Any) -> Any:
            return tf.data.Dataset.from_tensor_slices(arrays).batch(batch).repeat().prefetch(2)

        data = tf_keras.utils.experimental.DatasetCreator(read)

        def losses() -> Iterator[float]:
            while True:
                history = model.fit(data, steps_per_epoch=count, verbose=0)
                yield history.history["loss"][0]

        return losses

    return build


def _check_training(elements: Elements) -> None:
    first, *_, last = (float(loss) for loss in islice(elements, 3))
    expect(last < first and last < 0.02, f"the loss changed from {first} to {last}")


def _check_embedding(elements: Elements) -> None:
    first, last = (float(loss) for loss in islice(elements, 2))
    expect(last < first, f"the loss changed from {first} to {last}")


# --- mirrored -------------------------------------------------------------------------------------


def _mirrored(replicas: int) -> Build:
    """Return the builder of training by plain Keras (0), or by a strategy with `replicas`."""

    def build(_: Path, stack: ExitStack) -> Pipeline:
        os.environ.update(_ONE_THREAD)
        import keras

        import headrace as hr

        model = _model(keras)
        if replicas:
            devices = [f"cpu:{index}" for index in range(replicas)]
            hr.keras.distribute(model, hr.distribute.MirroredStrategy(devices))
        model.compile(keras.optimizers.Adam(RATE), "mse")
        data = hr.keras.dataset(hr.Dataset.from_tensor_slices(rows()).batch(BATCH).repeat())

        def losses() -> Iterator[float]:
            while True:
                history = model.fit(data, steps_per_epoch=_STEPS, verbose=0)
                yield history.history["loss"][0]

        return losses

    return build


# --- evaluation ----------------------------------------------------------------------------------


def _evaluation(workers: int) -> Build:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        os.environ.update(_ONE_THREAD)
        import keras

        import headrace as hr

        strategy, _coordinator = start_headrace(stack, workers=workers, servers=SERVERS, shards=1)
        with strategy.scope():
            model = _model(keras, _WIDE, 3)
        model.compile(loss="mse", steps_per_execution=10)
        data = hr.Dataset.from_tensor_slices(rows()).batch(BATCH).repeat()

        def losses() -> Iterator[float]:
            while True:
                yield model.evaluate(data, steps=_EVALUATED, verbose=0)

        return losses

    return build


def _check_evaluation(elements: Elements) -> None:
    first, second = (float(loss) for loss in islice(elements, 2))
    expect(first > 0 and first == second, f"the losses are {first} and {second}")


_BY_HAND, _TF_KERAS = "hand-written loop", "tf_keras, ParameterServerStrategy"
_NEEDS = ("jax", "keras")


def _training_workload(name: str, steps: int) -> Workload:
    return Workload(
        name=name,
        unit="steps",
        contenders=(
            Contender(name="headrace", build=_headrace(steps), role="headrace", needs=_NEEDS),
            Contender(name=_TF_KERAS, build=_tf_keras(steps), needs=("tensorflow", "tf_keras")),
            Contender(name=_BY_HAND, build=_by_hand(steps), role="peer", needs=_NEEDS),
        ),
        check=_check_training,
        consume=lambda _: _STEPS,
        targets=(
            Target(of=(_TF_KERAS,), at_least=4.0),
            Target(of=(_BY_HAND,), at_least=0.8),
        ),
        reopen=False,
        long_rounds=True,
    )


WORKLOADS = (
    _training_workload("Keras fit", 1),
    _training_workload("Keras fit, ten steps per call", 10),
    Workload(
        name="Keras fit with an embedding",
        unit="steps",
        contenders=(
            Contender(name="headrace", build=_headrace(1, True), role="headrace", needs=_NEEDS),
            Contender(name=_TF_KERAS, build=_tf_keras(1, True), needs=("tensorflow", "tf_keras")),
        ),
        check=_check_embedding,
        consume=lambda _: _EMBEDDING_STEPS,
        targets=(Target(of=(_TF_KERAS,), at_least=5.0),),
        reopen=False,
        long_rounds=True,
    ),
    Workload(
        name="Keras fit, mirrored",
        unit="steps",
        contenders=(
            Contender(name="headrace", build=_mirrored(1), role="headrace", needs=_NEEDS),
            Contender(name="keras", build=_mirrored(0), role="peer", needs=_NEEDS),
        ),
        check=_check_training,
        consume=lambda _: _STEPS,
        targets=(Target(of=("keras",), at_least=0.95),),
        reopen=False,
    ),
    Workload(
        name="Keras evaluation on two workers",
        unit="steps",
        contenders=(
            Contender(name="headrace", build=_evaluation(2), role="headrace", needs=_NEEDS),
            Contender(name="one worker", build=_evaluation(1), role="peer", needs=_NEEDS),
        ),
        check=_check_evaluation,
        consume=lambda _: _EVALUATED,
        reopen=False,
    ),
)

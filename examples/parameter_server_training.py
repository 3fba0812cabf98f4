"""Parameter server training with Keras, step by step.

The program trains a small classifier of words in two ways: with `model.fit`, and with a custom
training loop that a coordinator schedules on the workers. Then it evaluates the model in four ways.
It runs on one machine, with two worker processes and two parameter server processes:

    KERAS_BACKEND=jax python examples/parameter_server_training.py

Use KERAS_BACKEND=torch for PyTorch. On a cluster, replace the resolver of `LocalCluster` by one of
your launcher; nothing else changes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import headrace as hr

WORDS = ["apple", "banana", "cherry", "carrot", "leek", "potato"]
FRUITS = WORDS[:3]
LABELS = np.array(["no", "yes"])
find_word = hr.Lookup.from_vocabulary(WORDS)
find_label = hr.Lookup.from_vocabulary(LABELS, num_oov=0)
STEPS_PER_EPOCH = 20


# --- data -----------------------------------------------------------------------------------------


def make_words(count: int, seed: int) -> hr.Dataset:
    """Return rows of three words, each with a label: "yes" if at least two of them are fruits."""
    words = np.random.default_rng(seed).choice(WORDS, (count, 3))
    return hr.Dataset.from_tensor_slices((words, LABELS[(np.isin(words, FRUITS).sum(1) > 1) * 1]))


def look_up(words: Any, label: Any) -> Any:
    """Replace words by their indices in the vocabularies."""
    return find_word(words), np.float32(find_label([label]))


def dataset_fn(context: hr.distribute.InputContext) -> hr.Dataset:
    """Return the training data of one input pipeline, with its preprocessing."""
    rows = make_words(400, seed=context.input_pipeline_id)
    return rows.shuffle(400).repeat().map(look_up).batch(context.get_per_replica_batch_size(32))


def make_evaluation_data() -> hr.Dataset:
    """Return batches that are not in the training data."""
    return make_words(200, seed=100).map(look_up).batch(32)


# --- the model ------------------------------------------------------------------------------------


def make_model() -> keras.Model:
    """Return a classifier of three words."""
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(find_word.size, 16),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def make_gradients(model: keras.Model) -> Any:
    """Return a function that computes loss, outputs and gradients of a batch."""
    loss_fn = keras.losses.BinaryCrossentropy()
    if keras.backend.backend() == "torch":

        def torch_gradients(words: Any, labels: Any) -> Any:
            model.zero_grad()
            outputs = model(words, training=True)
            loss = loss_fn(labels, outputs)
            loss.backward()
            return loss.detach(), outputs.detach(), [w.value.grad for w in model.trainable_weights]

        return torch_gradients

    import jax  # noqa: PLC0415 - only for this back end

    def loss_of(weights: Any, state: Any, words: Any, labels: Any) -> Any:
        outputs, _ = model.stateless_call(weights, state, words, training=True)
        return loss_fn(labels, outputs), outputs

    compiled = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

    def jax_gradients(words: Any, labels: Any) -> Any:
        weights = [w.value for w in model.trainable_weights]
        state = [w.value for w in model.non_trainable_weights]
        (loss, outputs), gradients = compiled(weights, state, words, labels)
        return loss, outputs, gradients

    return jax_gradients


# --- training with model.fit ----------------------------------------------------------------------


def train_with_fit(strategy: Any, folder: Path) -> float:
    """Train with callbacks; return the accuracy on the evaluation data."""
    with strategy.scope():
        model = make_model()
        model.compile(
            keras.optimizers.Adam(0.02),
            loss="binary_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=10,
        )
    callbacks = [
        hr.keras.TensorBoard(folder / "logs"),
        keras.callbacks.ModelCheckpoint(folder / "checkpoints" / "ckpt-{epoch}.keras"),
        keras.callbacks.BackupAndRestore(folder / "backup"),
    ]
    model.fit(
        hr.keras.DatasetCreator(dataset_fn),
        epochs=5,
        steps_per_epoch=STEPS_PER_EPOCH,
        callbacks=callbacks,
        verbose=2,
    )
    # Each batch is evaluated exactly once, even if workers are lost.
    results = model.evaluate(make_evaluation_data(), return_dict=True, verbose=0)
    return float(results["accuracy"])


# --- training with a custom loop ------------------------------------------------------------


def train_with_loop(strategy: Any, coordinator: Any) -> tuple[keras.Model, float]:
    """Train in scheduled functions; return the model and the accuracy of the last epoch."""
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(0.02)
        accuracy = keras.metrics.BinaryAccuracy()
    gradients_of = make_gradients(model)

    def replica_fn(batch: Any) -> Any:
        words, labels = batch
        loss, outputs, gradients = gradients_of(words, labels)
        optimizer.apply(gradients, model.trainable_weights)
        accuracy.update_state(labels, outputs)
        return float(loss)

    def step_fn(iterator: Any) -> Any:
        losses = strategy.run(replica_fn, args=(next(iterator),))
        return strategy.reduce(hr.distribute.ReduceOp.MEAN, losses, axis=None)

    # Works for a sharded embedding as well; the partitioner of the strategy decides.
    per_worker_dataset = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(dataset_fn)
    )
    per_worker_iterator = iter(per_worker_dataset)
    result = 0.0
    for epoch in range(4):
        accuracy.reset_state()
        losses = [
            coordinator.schedule(step_fn, args=(per_worker_iterator,))
            for _ in range(STEPS_PER_EPOCH)
        ]
        coordinator.join()  # raises the error of a step, if one failed
        result, loss = float(accuracy.result()), np.mean(coordinator.fetch(losses))
        print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {result:.3f}")
    assert int(np.asarray(optimizer.iterations)) == 4 * STEPS_PER_EPOCH
    return model, result


# --- evaluation -----------------------------------------------------------------------------------


def evaluate_directly(model: keras.Model) -> float:
    """Evaluate in this process, which reads the weights from the servers."""
    accuracy = keras.metrics.BinaryAccuracy()
    for words, labels in make_evaluation_data():
        accuracy.update_state(labels, model(words, training=False))
    return float(accuracy.result())


def evaluate_on_workers(strategy: Any, coordinator: Any, model: keras.Model) -> float:
    """Evaluate on the workers: each batch of a shared dataset goes to one of them."""
    with strategy.scope():
        accuracy = keras.metrics.BinaryAccuracy(name="evaluation_accuracy")
    shared = coordinator.create_shared_dataset(make_evaluation_data())

    def evaluate_fn() -> None:
        words, labels = next(shared)
        accuracy.update_state(labels, model(words, training=False))

    coordinator.run_epoch(evaluate_fn)
    assert float(accuracy.count.value) == 200
    return float(accuracy.result())


def evaluate_in_shards(coordinator: Any, model: keras.Model) -> float:
    """Evaluate in shards; each shard counts once, even if its worker is lost."""

    def shard_fn(dataset: hr.Dataset) -> Any:
        accuracy = keras.metrics.BinaryAccuracy()
        for words, labels in dataset:
            accuracy.update_state(labels, model(words, training=False))
        return [float(variable.value) for variable in accuracy.variables]

    correct, rows = coordinator.evaluate(
        shard_fn, make_evaluation_data(), num_shards="auto", merge=lambda parts: np.sum(parts, 0)
    )
    assert rows == 200
    return float(correct / rows)


def evaluate_checkpoints(folder: Path) -> None:
    """Evaluate the checkpoints of `train_with_fit`, as a separate process would during training."""
    model = make_model()
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    hr.keras.SidecarEvaluator(
        model,
        hr.keras.dataset(make_evaluation_data()),
        folder / "checkpoints",
        max_evaluations=1,
        callbacks=[hr.keras.BestModelExporter(folder / "best.keras", monitor="loss", mode="min")],
    ).start()
    assert (folder / "best.keras").exists()


def main() -> int:
    """Train and evaluate; return 0 if all evaluations agree."""
    partitioner = hr.distribute.partitioners.MinSizePartitioner(min_shard_bytes=128, max_shards=2)
    with (
        tempfile.TemporaryDirectory() as name,
        hr.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster,
    ):
        strategy = hr.distribute.ParameterServerStrategy(
            cluster.cluster_resolver, variable_partitioner=partitioner
        )
        folder = Path(name)
        print(f"model.fit: accuracy {train_with_fit(strategy, folder):.3f}")
        with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
            model, _ = train_with_loop(strategy, coordinator)
            accuracies = [
                evaluate_directly(model),
                evaluate_on_workers(strategy, coordinator, model),
                evaluate_in_shards(coordinator, model),
            ]
            print(
                "accuracy directly, on workers, in shards:", *(f"{each:.3f}" for each in accuracies)
            )
        evaluate_checkpoints(folder)
        strategy.close()
    return 0 if len({round(each, 6) for each in accuracies}) == 1 and accuracies[0] > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())

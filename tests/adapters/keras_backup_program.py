"""A training program with backups that can end itself at a given batch.

    python keras_backup_program.py DIRECTORY MODE WHERE SERVERS [END_AT SIGNAL]

WHERE is "processes" or "threads": how workers and servers run.

It prints a digest of the final weights, and the history.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

import headrace as hr

MODES = {"sync": {"mode": "sync", "round_size": 2}, "ordered": {"staleness": 0}}


class End(keras.callbacks.Callback):
    """Ends the program after a total number of batches."""

    def __init__(self, at: int, signal: int) -> None:
        super().__init__()
        # A list with an object is not state that a backup restores.
        self._of_this_program = [object(), at, signal, 0]

    def on_train_batch_end(self, batch, logs=None):
        self._of_this_program[3] += 1
        _, at, signal, seen = self._of_this_program
        if seen == at:
            os.kill(os.getpid(), signal)


class Model(keras.Model):
    """A model with embedding rows in tables and computed ids."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(6, activation="relu")
        self.drop = keras.layers.Dropout(0.3)
        self.norm = keras.layers.BatchNormalization()
        self.any_id = hr.keras.Embedding(3, name="any", combiner="sum")
        self.large = keras.layers.Embedding(10**8, 3, name="large")
        self.last = keras.layers.Dense(1)

    def call(self, x, training=False):
        ids = keras.ops.cast(x * 30, "int32")
        rows = self.any_id(ids - 20), keras.ops.sum(self.large(ids * 1_000_003), axis=1)
        hidden = self.norm(self.drop(self.first(x), training=training), training=training)
        return self.last(keras.ops.concatenate([hidden, *rows], axis=-1))


def main(
    directory: Path, mode: str, where: str, servers: int, end_at: int = -1, signal: int = 9
) -> None:
    keras.utils.set_random_seed(11)
    rows = np.random.default_rng(3).random((130, 5)).astype(np.float32)
    with hr.distribute.LocalCluster(
        num_workers=2, num_ps=servers, processes=where == "processes"
    ) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver, **MODES[mode])
        with strategy.scope():
            model = Model()
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        callbacks = [
            keras.callbacks.BackupAndRestore(directory / "backup", save_freq=5),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
            End(end_at, signal),
        ]
        history = model.fit(
            rows,
            rows.sum(axis=1, keepdims=True),
            batch_size=10,
            epochs=4,
            validation_data=(rows[:20], rows[:20, :1]),
            callbacks=callbacks,
            verbose=0,
        ).history
        tables = [each.embeddings.table for each in (model.any_id, model.large)]
        weights = [
            keras.ops.convert_to_numpy(each) for each in model.weights if not hasattr(each, "table")
        ]
        for table in tables:
            parts = list(table.export())
            ids = np.sort(np.concatenate([part for part, _ in parts]))
            weights += [ids, table.gather(ids)]
        assert all(len(each) for each in weights)
        digest = hashlib.blake2b(b"".join(each.tobytes() for each in weights))
        left = os.listdir(directory / "backup")
        print(json.dumps({"weights": digest.hexdigest(), "history": history, "left": left}))
        strategy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))

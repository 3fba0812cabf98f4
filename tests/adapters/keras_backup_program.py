"""A training program with backups, which ends itself at a batch if it is told to.

    python keras_backup_program.py DIRECTORY MODE SERVERS [END_AT SIGNAL]

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
    """Ends the program after some batches in all."""

    def __init__(self, at: int, signal: int) -> None:
        super().__init__()
        # With an object, so that it is no state that a backup restores.
        self._of_this_program = [object(), at, signal, 0]

    def on_train_batch_end(self, batch, logs=None):
        self._of_this_program[3] += 1
        _, at, signal, seen = self._of_this_program
        if seen == at:
            os.kill(os.getpid(), signal)


def main(directory: Path, mode: str, servers: int, end_at: int, signal: int) -> None:
    keras.utils.set_random_seed(11)
    rows = np.random.default_rng(3).random((130, 5)).astype(np.float32)
    with hr.distribute.LocalCluster(num_workers=2, num_ps=servers) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver, **MODES[mode])
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.layers.Dense(6, activation="relu"),
                    keras.layers.Dropout(0.3),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(1),
                ]
            )
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
        digest = hashlib.blake2b(b"".join(each.tobytes() for each in model.get_weights()))
        left = os.listdir(directory / "backup")
        print(json.dumps({"weights": digest.hexdigest(), "history": history, "left": left}))
        strategy.close()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        int((sys.argv[4:] or ["-1"])[0]),
        int((sys.argv[5:] or ["9"])[0]),
    )

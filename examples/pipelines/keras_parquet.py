"""Train a Keras model on a Parquet file: the columns are inputs and the target."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sample_data import trips

import headrace as hr


def to_example(batch):
    inputs = np.stack([batch["km"], batch["hour"]], axis=1).astype("float32")
    return inputs, batch["fare"].astype("float32")


path = trips()
rows = hr.ParquetDataset(path, columns=["km", "hour", "fare"])
print(rows.element_spec, len(rows))
data = rows.shuffle(4000, seed=1).batch(64).map(to_example).prefetch(2)
model = keras.Sequential([keras.layers.Normalization(), keras.layers.Dense(1)])
model.layers[0].adapt(np.concatenate([inputs for inputs, _ in data]))
model.compile(keras.optimizers.Adam(0.5), "mse")
history = model.fit(hr.keras.dataset(data), epochs=5, verbose=2)
assert history.history["loss"][-1] < 2

"""Predict the next value of a sensor from the 32 values before it: sliding windows."""

from sample_data import sensor_readings

import headrace as hr


def split(window):
    return window[:-1], window[-1]


readings = hr.Dataset.from_tensor_slices(sensor_readings()["value"])
windows = readings.window(33, shift=1, drop_remainder=True).flat_map(lambda w: w.batch(33))
examples = windows.shuffle(500, seed=1).map(split).batch(64)
for inputs, target in examples.take(3):
    print(inputs.shape, target.shape)
assert sum(len(target) for _, target in examples) == 2000 - 32

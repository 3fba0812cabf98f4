"""Shuffle globally, decode, augment with a random generator per element, batch: as with Grain."""

import numpy as np

import headrace as hr


def augment(image, rng):
    return image + rng.normal(0, 0.1, image.shape).astype(np.float32)


images = hr.Dataset.range(1000).shuffle(1000, seed=1).map(lambda n: np.full((8, 8), n, np.float32))
batches = images.random_map(augment, seed=2).repeat(2).batch(32, drop_remainder=True)
iterator = iter(batches)
state = iterator.get_state()
first = next(iterator)
iterator.set_state(state)
print(len(batches), "batches, the same after a restore:", (next(iterator) == first).all())

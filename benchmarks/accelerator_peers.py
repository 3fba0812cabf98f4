"""Contenders of the simulated accelerator: each opens batches of a task's samples and numbers."""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.accelerator_inputs import CROPPED, Images, Task, Volumes, load
from benchmarks.workload import Pipeline

__all__ = ["PROCESSES", "grain", "headrace", "headrace_dataset", "tf_data", "tf_dataset", "torch"]

PROCESSES = 2

#: Batches of an epoch that does not end during a run.
_BATCHES = 1_000_000

Build = Callable[[Path, ExitStack], Pipeline]


def headrace(task: Task, workers: int = 0) -> Build:
    """Return Headrace in the training process, or with a data service of worker processes."""

    def build(inputs: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        if not workers:
            dataset = (
                hr.Dataset.range(_BATCHES * task.batch)
                .map(load(task, inputs), num_parallel_calls=hr.AUTOTUNE)
                .batch(task.batch)
                .prefetch(hr.AUTOTUNE)
            )
            return lambda: iter(dataset)
        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=workers, processes=True))
        policy = hr.service.ShardingPolicy.DYNAMIC
        remote = headrace_dataset(task, inputs, _BATCHES).apply(
            hr.service.distribute(policy, cluster.target, visitation="exactly_once")
        )
        return lambda: iter(remote)

    return build


def headrace_dataset(task: Task, inputs: Path, batches: int) -> Any:
    """Return the dataset that each worker of a data service runs in one thread."""
    import headrace as hr

    return hr.Dataset.range(batches * task.batch).map(load(task, inputs)).batch(task.batch)


def tf_data(task: Images | Volumes) -> Build:
    """Return tf.data with its own operations, in the training process."""

    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import tensorflow as tf

        dataset = tf_dataset(task, inputs, _BATCHES).prefetch(tf.data.AUTOTUNE)
        return lambda: dataset.as_numpy_iterator()

    return build


def tf_dataset(task: Images | Volumes, inputs: Path, batches: int) -> Any:
    """Return the tf.data dataset of batches."""
    import tensorflow as tf

    def path(number: Any, suffix: str) -> Any:
        name = tf.strings.as_string(number % task.files)
        return tf.strings.join([str(inputs / task.name), "/", name, suffix])

    def image(number: Any) -> Any:
        decoded = tf.io.decode_jpeg(tf.io.read_file(path(number, ".jpg")), channels=3)
        size = tf.cast(CROPPED * tf.cast(tf.shape(decoded)[:2], tf.float32), tf.int32)
        seed = tf.stack([number, 0])
        crop = tf.image.stateless_random_crop(decoded, tf.concat([size, [3]], 0), seed)
        resized = tf.image.resize(crop, [task.side, task.side])
        return tf.cast(tf.image.stateless_random_flip_left_right(resized, seed), tf.uint8)

    def volume(number: Any) -> Any:
        assert isinstance(task, Volumes)
        values = tf.io.decode_raw(tf.io.read_file(path(number, ".raw")), tf.float32)
        whole = tf.reshape(values, [task.side] * 3)
        seed = tf.stack([number, 0])
        crop = tf.image.stateless_random_crop(whole, [task.crop] * 3, seed)
        if tf.random.stateless_uniform([], seed) < 0.5:
            crop = tf.reverse(crop, [0])
        crop -= tf.reduce_mean(crop)
        return crop / tf.math.reduce_std(crop)

    def sample(number: Any) -> Any:
        made = volume(number) if isinstance(task, Volumes) else image(number)
        return made, tf.cast(number, tf.int32)

    return (
        tf.data.Dataset.range(batches * task.batch)
        .map(sample, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(task.batch)
    )


def grain(task: Task) -> Build:
    """Return Grain with worker processes."""

    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import grain as library
        from absl import flags

        flags.FLAGS(["benchmark"])  # Grain's processes need parsed flags
        batches = (
            library.MapDataset.source(range(_BATCHES * task.batch))
            .map(load(task, inputs))
            .batch(task.batch)
            .to_iter_dataset()
            .mp_prefetch(library.multiprocessing.MultiprocessingOptions(num_workers=PROCESSES))
        )
        return lambda: iter(batches)

    return build


def torch(task: Task) -> Build:
    """Return the DataLoader of PyTorch with worker processes."""

    def build(inputs: Path, _: ExitStack) -> Pipeline:
        from torch.utils.data import DataLoader, Dataset

        prepared = load(task, inputs)

        class Samples(Dataset[Any]):
            def __len__(self) -> int:
                return _BATCHES  # a sampler of more takes long to start

            def __getitem__(self, number: int) -> Any:
                return prepared(number)

        loader = DataLoader(Samples(), batch_size=task.batch, num_workers=PROCESSES)
        return lambda: iter(loader)

    return build

"""Titles of workloads and names of contenders, as RESULTS.md and its charts show them."""

from __future__ import annotations

import re

__all__ = ["TITLES", "contender_title", "title"]

TITLES = {
    # Pipelines in one process
    "small rows": "Shuffle and batch 60,000 rows of 784 bytes",
    "one number, repeated": "Repeat a dataset of one number",
    "scalar map, x * x": "Map x * x over numbers, then batch",
    "scalar map, a branch": "Map a function with a branch over numbers",
    "interleave 4, blocks of 1, single elements": "Interleave 4 long datasets",
    "interleave 4, blocks of 1, batches of 256": "Interleave 4 long datasets, batch by 256",
    "interleave 4 datasets of 20, blocks of 1, batches of 256": (
        "Interleave many short datasets, batch by 256"
    ),
    "flat_map of a range with a map, 20 elements each": "Flat map to short ranges with a map",
    "flat_map of an array, 20 elements each": "Flat map to short arrays",
    "windows of 32 rows of an array, shift 1": "Sliding windows of 32 rows of an array",
    "bucket_by_sequence_length, 1 to 63 numbers": "Batch sequences of similar length",
    "pack into rows of 2048, first_fit": "Pack texts into rows of 2,048 tokens, first fit",
    "pack into rows of 2048, best_fit": "Pack texts into rows of 2,048 tokens, best fit",
    "pack into rows of 2048, concat_then_split": "Pack texts into rows of 2,048 tokens, split",
    "AUTOTUNE, waits": "AUTOTUNE of a map that waits",
    "AUTOTUNE, Python": "AUTOTUNE of a map in Python",
    "AUTOTUNE, NumPy": "AUTOTUNE of a map in NumPy",
    "AUTOTUNE, by turns": "AUTOTUNE of a map whose work varies",
    # Reading and decoding files
    "TFRecord, single records": "Read records of 100 bytes from TFRecord files",
    "TFRecord, batch(256)": "Read TFRecord files, batch by 256",
    "Parquet, batches of 65,536 rows": "Read Parquet files in batches of 65,536 rows",
    "JSON Lines, batch(256)": "Read JSON Lines files, batch by 256",
    "tar samples of 8 KB": "Read samples of 8 KB from tar files",
    "JPEG, decode + resize": "Decode and resize JPEG files, one host",
    # Data service
    "service, scalars": "Numbers, one at a time",
    "service, scalars in batches of 1024": "Numbers in batches of 1,024",
    "service, 64 KiB elements": "Arrays of 64 KiB",
    "service, 1 MiB elements": "Arrays of 1 MiB",
    "service, 9.6 MB batches": "Batches of 9.6 MB",
    "9.6 MB batches, assembled in shared memory": "Batches of 9.6 MB, assembled from rows",
    "9.6 MB batches, encrypted": "Batches of 9.6 MB over encrypted TCP",
    "service, JPEG, decode + resize": "Decode and resize JPEG files in a worker process",
    "service, a Python-bound function": "Map a pure Python function on two workers",
    "in_processes, a Python-bound function": "Map a pure Python function in two processes",
    "4 trainers, worker CPU per batch": "CPU time per batch to serve four trainers, cached",
    # Delivery guarantees, order and recovery
    "exactly once, rows": "Exactly once: single rows",
    "exactly once, interleave": "Exactly once: interleaved files",
    "exactly once, shuffle": "Exactly once: shuffled rows",
    "exactly once, 64 KiB elements": "Exactly once: arrays of 64 KiB",
    "exactly once, JPEG files": "Exactly once: decoded JPEG files",
    "ordered, whole batches": "In order from two workers: batches of rows",
    "ordered, JPEG files interleaved": "In order from two workers: JPEG files",
    "ordered, JPEG files interleaved, shuffled": "In order from two workers: shuffled JPEG files",
    "coordinated reads, log-normal lengths": "Coordinated reads of sentences, four trainers",
    "coordinated reads, rounds of small batches": "Coordinated reads of tiny batches without work",
    "worker killed, longest wait": "Longest wait after a worker is killed",
    "epochs of one element": "Whole epochs of one element",
    "dispatcher killed, wait after restart": "Wait after a killed dispatcher has restarted",
    # JAX, PyTorch and Keras
    "JAX, batches on one device": "Batches of 9.4 MB on a JAX device",
    "JAX, batches on eight devices": "Batches of 9.4 MB sharded over 8 JAX devices",
    "torch, 9.6 MB batches, from memory": "PyTorch batches of 9.6 MB, in process",
    "torch, 9.6 MB batches, over the service": "PyTorch batches of 9.6 MB, data service",
    "distributed_no_op": "An empty step on eight replicas",
    "distributed_millisecond": "Eight replicas, an input of 1 ms a batch",
    "Keras fit": "Keras fit, parameter servers",
    "Keras fit, ten steps per call": "Keras fit, parameter servers, 10 steps per call",
    "Keras fit with an embedding": "Keras fit with an embedding",
    "Keras fit, mirrored": "Keras fit, mirrored, one replica",
    "Keras evaluation on two workers": "Keras evaluate on two workers",
    # Accelerator utilisation
    "accelerator, images": "Accelerator utilisation, images",
    "accelerator, volumes": "Accelerator utilisation, volumes",
    "accelerator, tokens": "Accelerator utilisation, tokens",
    "accelerator, images, workers killed": "Accelerator utilisation, images, workers killed",
    # Parameter servers
    "embedding steps": "Training steps with an embedding",
    "empty functions": "Schedule empty functions",
    "functions of 1 ms on two workers": "Utilisation of two workers, functions of 1 ms",
    "64 MB pulled": "Read a variable of 64 MB",
    "64 MB pushed, SGD": "Push a gradient of 64 MB",
    "sparse Adam on two servers": "Sparse Adam on two servers",
    "store, gather": "Look up rows, without a network",
    "store, a table of 3 million ids": "Update a table of 3 million ids",
    # Scale of the dispatcher
    "dispatcher, durable splits": "Assign splits, each written to disk first",
    "dispatcher, 1,000 + 1,000 idle peers, CPU per second": (
        "CPU time for 1,000 idle workers and clients each"
    ),
}
"""Titles by the name of the workload, of at most 50 characters, so that they fit into charts."""

_CONTENDERS = {
    "torch DataLoader, __getitems__": "PyTorch DataLoader, batched reads",
    "tf.data, numpy_function": "tf.data, tf.numpy_function",
    "tf.data service, default": "tf.data service",
    "tf.data service, compression=None": "tf.data service, uncompressed",
    "bare Python socket, recv_into": "a bare Python socket",
    "ZeroMQ push and pull, CURVE": "ZeroMQ with CURVE",
    "grain mp_prefetch, 1 worker": "Grain, 1 worker process",
    "at most once": "Headrace, at most once",
    "one job per trainer": "Headrace, one job per trainer",
    "by hand": "jax.device_put by hand",
    "file read + crc32c": "file read and checksum only",
    "file read + slices in a Python generator, no checksum": (
        "file read and slices in Python, no checksum"
    ),
}

_PRODUCTS = {"headrace": "Headrace", "grain": "Grain", "torch": "PyTorch", "keras": "Keras"}
_CORE_ONLY = re.compile(r"core only(?:, (\d+ requests))?$")
_PRODUCT = re.compile(rf"^({'|'.join(_PRODUCTS)})(?=$|[ ,])")


def title(workload: str) -> str:
    """Return the title of a workload; its name if it has none."""
    return TITLES.get(workload, workload)


def contender_title(name: str) -> str:
    """Return the name of a contender with products spelled as their owners do."""
    if name in _CONTENDERS:
        return _CONTENDERS[name]
    name = re.sub(
        r"^(\d+) threads, prefetch\((\d+)\)$", r"Headrace, \1 threads, prefetch(\2)", name
    )
    name = _CORE_ONLY.sub(_without_sockets, name)
    return _PRODUCT.sub(lambda match: _PRODUCTS[match[0]], name)


def _without_sockets(match: re.Match[str]) -> str:
    return ", ".join(filter(None, [match[1], "without sockets"]))

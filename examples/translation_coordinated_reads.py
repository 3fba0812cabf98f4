"""Sentence pairs for two synchronous replicas, which get similar lengths in each step.

A step takes as long as its slowest replica. If one has a batch of short sentences and the other of
long ones, the first one waits. With coordinated reads (`num_consumers`) a worker gives both of them
batches of the same bucket of lengths. The program computes how long the replicas would wait.

    pip install headrace
    python examples/translation_coordinated_reads.py
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import headrace as hr

REPLICAS, ROUNDS, BATCH_SIZE = 2, 60, 16
BOUNDARIES = [10, 20, 40]
WORDS = {"un": "a", "gato": "cat", "pez": "fish", "come": "eats", "ve": "sees", "y": "and"}
find_source = hr.Lookup.from_vocabulary(list(WORDS))
find_target = hr.Lookup.from_vocabulary(list(WORDS.values()))


def make_pairs(count: int) -> list[tuple[str, str]]:
    """Return sentences of 3 to 59 words with their translations, word by word."""
    rng = np.random.default_rng(0)
    sentences = [rng.choice(list(WORDS), rng.integers(3, 60)) for _ in range(count)]
    return [(" ".join(words), " ".join(WORDS[word] for word in words)) for words in sentences]


def encode(source: str, target: str) -> dict[str, np.ndarray]:
    """Replace words by numbers above 0, which is the padding."""
    return {
        "source": (find_source(source.split()) + 1).astype(np.int32),
        "target": (find_target(target.split()) + 1).astype(np.int32),
    }


def bucket(batch: dict[str, np.ndarray]) -> Any:
    """Return the bucket that a batch is from."""
    return np.searchsorted(BOUNDARIES, batch["source"].shape[1], "right")


def make_batches(pairs: list[tuple[str, str]]) -> hr.Dataset:
    """Return padded batches, in groups of one bucket with a batch per replica."""
    sources, targets = zip(*pairs, strict=True)
    return (
        hr.Dataset.from_tensor_slices((list(sources), list(targets)))
        .repeat()
        .shuffle(1000, seed=0)
        .map(encode)
        .bucket_by_sequence_length(lambda pair: len(pair["source"]), BOUNDARIES, [BATCH_SIZE] * 4)
        .group_by_window(bucket, lambda key, window: window, window_size=REPLICAS)
    )


def read(dataset: hr.Dataset, batches: list[Any]) -> None:
    """Read the batches of one replica; in training each replica is a separate process."""
    with iter(dataset) as iterator:
        batches += [next(iterator) for _ in range(ROUNDS)]


def waiting(widths: np.ndarray) -> float:
    """Return the part of the time that replicas wait, if a step takes as long as its width."""
    return float(1 - widths.mean() / widths.max(axis=0).mean())


def main() -> None:
    """Read with two replicas; compare the batches of each round."""
    dataset = make_batches(make_pairs(2000))
    received: list[list[Any]] = [[] for _ in range(REPLICAS)]
    with hr.service.LocalCluster(num_workers=2) as cluster:
        threads = []
        for index, batches in enumerate(received):
            distribute = hr.service.distribute(
                hr.service.ShardingPolicy.OFF,  # infinite data: each worker has its own copy
                cluster.target,
                job_name="translation",
                num_consumers=REPLICAS,
                consumer_index=index,
            )
            threads.append(threading.Thread(target=read, args=(dataset.apply(distribute), batches)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    widths = np.array([[batch["source"].shape[1] for batch in batches] for batches in received])
    print("lengths in the first rounds:", widths.T[:6].tolist())
    unrelated = np.stack([widths[0], np.random.default_rng(0).permutation(widths[1])])
    print(
        f"the replicas wait {waiting(widths):.0%} of the time, "
        f"and {waiting(unrelated):.0%} if the same batches are in random order"
    )
    assert waiting(widths) < 0.1 < waiting(unrelated)
    buckets = np.searchsorted(BOUNDARIES, widths, "right")
    assert (buckets[0] == buckets[1]).all()
    assert len(np.unique(buckets)) == len(BOUNDARIES) + 1
    print(f"in each of {ROUNDS} rounds, both replicas had batches of one bucket")


if __name__ == "__main__":
    main()

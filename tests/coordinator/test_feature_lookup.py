"""Tutorial of parameter servers: two workers look up, embed and train words."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

import headrace as hr

WORDS = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
WIDTH = 16_384
SECONDS = 60.0


def examples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    chance = random.Random(seed)
    features = [chance.sample(WORDS, 3) for _ in range(200)]
    return np.array(features), np.array(["yes" if "avenger" in each else "no" for each in features])


@pytest.mark.catalogue("1.6.8")
def test_words_are_embedded_over_two_servers_and_trained_by_two_workers():
    features = hr.Lookup.from_vocabulary(WORDS, num_oov=1)
    labels = hr.Lookup.from_vocabulary(["yes", "no"], num_oov=0)
    assert len(features) == 8

    with hr.distribute.LocalCluster(2, 2, processes=False) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(
            cluster.cluster_resolver,
            hr.distribute.partitioners.MinSizePartitioner(256 << 10, max_shards=2),
        )
        coordinator = hr.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            embedding = hr.Variable(
                hr.initializers.Uniform(seed=3), name="embedding", shape=(8, WIDTH), dtype="float32"
            )
            kernel = hr.Variable(
                hr.initializers.Uniform(-0.02, 0.02, seed=4), shape=(WIDTH,), dtype="float32"
            )
            bias = hr.Variable(np.float32(0), name="bias")
            accuracy = hr.metrics.Accuracy("accuracy")
            optimizer = hr.optimizers.RMSprop(0.1)
        assert [shard.shape for shard in embedding.shards] == [(4, WIDTH), (4, WIDTH)]
        assert len({shard.server for shard in embedding.shards}) == 2

        def dataset_fn(context: object = None) -> hr.Dataset:
            rows = hr.Dataset.from_tensor_slices(examples(seed=17))
            return (
                rows.map(lambda x, y: (features(x), labels(y))).shuffle(200, 1).repeat().batch(32)
            )

        def step(iterator: object) -> float:
            ids, y = next(iterator)
            w, b = kernel.read(), bias.read()
            hidden = embedding.gather(ids).mean(axis=1)
            p = 1 / (1 + np.exp(-np.clip(hidden @ w + b, -60, 60)))
            accuracy.update_state(y, (p > 0.5).astype(np.int64))
            at = np.clip(p, 1e-7, 1 - 1e-7)
            loss = -np.where(y == 1, np.log(at), np.log(1 - at)).mean() + 1e-4 * (w @ w)
            dz = ((p - y) / len(y)).astype(np.float32)
            rows = np.broadcast_to((dz[:, None] * w / 3)[:, None], (*ids.shape, WIDTH))
            optimizer.apply_gradients(
                [
                    (hr.IndexedSlices(rows, ids), embedding),
                    (hidden.T @ dz + 2e-4 * w, kernel),
                    (dz.sum(), bias),
                ]
            )
            return float(loss)

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        accuracies = []
        for _ in range(4):
            accuracy.reset_states()
            losses = [coordinator.schedule(step, (iterator,)) for _ in range(5)]
            coordinator.join(SECONDS)
            assert accuracy.sums()[1] == 5 * 32
            accuracies.append(float(accuracy.result()))
            assert all(math.isfinite(loss.fetch(SECONDS)) for loss in losses)
        assert optimizer.iterations == 20
        assert np.isfinite(embedding.read()).all()
        assert not np.array_equal(embedding[1], embedding[0]), "only the used words were trained"
        assert max(accuracies) > 0.5
        coordinator.close()
        strategy.close()

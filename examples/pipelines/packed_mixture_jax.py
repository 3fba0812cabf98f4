"""Pack tokens of two sources to rows of 512, mix them 80 to 20, and feed JAX; resume exactly."""

import json

import numpy as np
from sample_data import text_files

import headrace as hr


def tokenize(document):
    return np.frombuffer(document["text"].encode(), np.uint8).astype(np.int32) + 1


def packed(path):
    documents = hr.JsonLinesDataset(path).shuffle(1000, seed=0).repeat()
    return documents.map(tokenize).pack_sequences(512)


mixed = hr.Dataset.sample_from_datasets(list(map(packed, text_files())), [0.8, 0.2], seed=0)
batches = hr.jax.device_iterator(mixed.batch(8))
for _ in range(3):
    batch = next(batches)
state = json.dumps(batches.get_state())
following = next(batches)

resumed = hr.jax.device_iterator(mixed.batch(8))
resumed.set_state(json.loads(state))
assert (next(resumed)["tokens"] == following["tokens"]).all()
print({name: leaf.shape for name, leaf in following.items()}, f"state of {len(state)} bytes")

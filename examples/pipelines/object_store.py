"""Write TFRecord files to an object store, and train from them by URL."""

import numpy as np

import headrace as hr

for shard in range(4):
    with hr.io.TFRecordWriter(f"memory://bucket/part-{shard}.tfrecord") as writer:
        for number in range(25):
            writer.write(hr.io.encode_example({"x": np.float32([shard, number])}))
features = {"x": hr.io.FixedLenFeature((2,), np.float32)}
names = hr.Dataset.list_files("memory://bucket/part-*.tfrecord", seed=1)
records = names.interleave(hr.TFRecordDataset, cycle_length=4).shuffle(50, seed=2).batch(20)
for batch in records.map(lambda batch: hr.io.parse_example(batch, features)):
    print(batch["x"].shape, batch["x"].mean(axis=0))

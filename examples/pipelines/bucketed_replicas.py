"""Give the replicas of a synchronous job batches of similar length in each step.

The two replicas are read by two threads of one program. On a cluster each replica is a process that
reads `read_replica(index)`, and `service` is the address of the dispatcher.
"""

import numpy as np

import headrace as hr

BOUNDARIES = [30, 60]
lengths = np.random.default_rng(0).integers(1, 90, 2000)
batches = (
    hr.Dataset.from_tensor_slices(lengths)
    .map(lambda n: np.ones(n, np.float32))
    .bucket_by_sequence_length(len, BOUNDARIES, [8, 8, 8], drop_remainder=True)
    .group_by_window(
        lambda batch: np.searchsorted(BOUNDARIES, batch.shape[1], "right"),
        lambda bucket, window: window,
        window_size=2,
    )
    .repeat()
)


def read_replica(index):
    consumer = {"job_name": "train", "num_consumers": 2, "consumer_index": int(index)}
    return batches.apply(hr.service.distribute("parallel_epochs", service, **consumer)).take(50)


with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
    service = cluster.target
    replicas = hr.Dataset.range(2).interleave(read_replica, cycle_length=2)
    widths = [batch.shape[1] for batch in replicas]
buckets = np.searchsorted(BOUNDARIES, widths, "right").reshape(50, 2)
assert (buckets[:, 0] == buckets[:, 1]).all()
print(np.reshape(widths, (50, 2))[:5].tolist())

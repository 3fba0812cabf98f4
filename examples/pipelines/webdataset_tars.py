"""Read tar shards of images, in one process and by the workers of a data service."""

from sample_data import tar_shards

import headrace as hr

decoders = {"jpg": hr.io.decode_jpeg, "cls": int}
batches = hr.WebDataset(tar_shards(), decode=decoders).shuffle(100, seed=1).batch(10)
for batch in batches:
    print(batch["jpg"].shape, batch["cls"])

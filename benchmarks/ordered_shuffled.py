"""Cost and scaling of ordered reading with a shuffle of records before they are decoded.

Like `ordered`, for
`list_files().interleave(TFRecordDataset).shuffle(10_000).map(decode).batch(32)`.
A shuffle of values can only be computed from the beginning of the dataset, so it runs in the
client. The expensive map after it still runs on workers, before the shuffle, whose buffer then
holds decoded images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.ordered import check_images, compare_orders, decoded, write_inputs

__all__ = ["WORKLOADS", "write_inputs"]


def _shuffled(inputs: Path) -> Any:
    return decoded(inputs, shuffled=True)


WORKLOADS = (
    compare_orders(
        "JPEG files interleaved, shuffled",
        _shuffled,
        check=check_images,
        in_order=check_images,
        at_least=0.9,
    ),
)

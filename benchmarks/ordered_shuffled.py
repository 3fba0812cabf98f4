"""What does order cost, and does it scale, where records are shuffled before they are decoded?

As `ordered`, for `list_files().interleave(TFRecordDataset).shuffle(10_000).map(decode).batch(32)`:
what a shuffle of values holds is known to who runs the plan from its beginning alone, and the map,
where the work is, stands after it. Workers run that below the shuffle, which then holds images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.ordered import beside_any_order, check_images, decoded, write_inputs

__all__ = ["WORKLOADS", "write_inputs"]


def _shuffled(inputs: Path) -> Any:
    return decoded(inputs, shuffled=True)


WORKLOADS = (
    beside_any_order(
        "JPEG files interleaved, shuffled",
        _shuffled,
        check=check_images,
        in_order=check_images,
        at_least=0.9,
        one_worker=True,
    ),
)

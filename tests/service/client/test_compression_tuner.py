"""Whether answers are packed: decided from what arrives, on simulated wires."""

from __future__ import annotations

import pytest

from headrace.service.client.compression_tuner import CompressionTuner


def share_packed(
    *, wire: float, worker: float, packed: float, ratio: float, consumer: float, seconds: float
) -> float:
    """Return the fraction of compressed replies in the second half of a simulated time.

    All are in bytes a second: the wire, the worker where it packs nothing and where it packs, and
    the consumer; `ratio` is how many times smaller packing makes them.
    """
    pace, now, size = CompressionTuner("lz4", 0.0), 0.0, 1e6
    packs = total = 0.0
    while now < seconds:
        rate = min(packed, wire * ratio) if pace.codec else min(worker, wire)
        coming, using = size / rate, size / consumer
        taken = max(coming, using)
        now += taken
        if now > seconds / 2:
            total += taken
            packs += taken * bool(pace.codec)
        pace.reply_received(int(size), max(0.0, coming - using), 3, now)
    return packs / total


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        # A slow wire, data that gets smaller: packing is worth it.
        ({"wire": 1e7, "worker": 1e9, "packed": 4e8, "ratio": 3.0, "consumer": 1e9}, 0.9, 1.0),
        # A fast one: it is not, and is hardly ever tried.
        ({"wire": 3e9, "worker": 1e9, "packed": 3e8, "ratio": 3.0, "consumer": 1e10}, 0.0, 0.1),
        # Noise gets no smaller.
        ({"wire": 1e7, "worker": 1e9, "packed": 4e8, "ratio": 1.0, "consumer": 1e9}, 0.0, 0.1),
        # The worker is what is waited for.
        ({"wire": 1e9, "worker": 1e7, "packed": 1e7, "ratio": 3.0, "consumer": 1e9}, 0.0, 0.1),
        # Nothing is waited for.
        ({"wire": 1e7, "worker": 1e9, "packed": 4e8, "ratio": 3.0, "consumer": 5e6}, 0.0, 0.0),
    ],
)
def test_compression_is_kept_if_it_increases_throughput(
    given: dict[str, float], least: float, most: float
) -> None:
    assert least <= share_packed(**given, seconds=600.0) <= most


def test_without_a_codec_nothing_is_compressed() -> None:
    pace = CompressionTuner("", 0.0)
    for second in range(1000):
        pace.reply_received(1000, 1.0, 0, float(second))
        assert pace.codec == ""

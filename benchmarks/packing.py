"""Packing of sequences into rows of one length.

Sequences in memory have lognormal lengths, truncated to the length of a row, as texts have. Rows of
tokens, segment ids and positions are read one by one; tokens without padding are counted. Headrace
and Grain have the same number of open rows.

    python -m benchmarks packing     the rates
    python -m benchmarks.packing     the fractions of padding

Grain finishes all open rows when a sequence fits in none of them, Headrace finishes one.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "padding_fraction"]

NUM_BINS = 32
_NUM_SEQUENCES = 6_000
_MAX_PADDING = 0.1
_STRATEGIES = ("first_fit", "best_fit", "concat_then_split")


@cache
def _sequences(length: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5.5, 1.2, _NUM_SEQUENCES).astype(int), 1, length)
    return [{"tokens": rng.integers(1, 50_000, size, np.int32)} for size in sizes]


def padding_fraction(rows: Elements, length: int) -> float:
    """Return the fraction of padding in an epoch of rows."""
    used = [int(np.count_nonzero(row["tokens_segment_ids"])) for row in rows]
    return 1 - sum(used) / (len(used) * length)


def _check(length: int) -> Any:
    def check(rows: Elements) -> None:
        found, num_rows = [], 0
        for row in rows:
            tokens, segment_ids = np.asarray(row["tokens"]), row["tokens_segment_ids"]
            expect(tokens.shape == (length,), f"a row has shape {tokens.shape}")
            expect(bool(((tokens != 0) == (segment_ids != 0)).all()), "segment ids do not match")
            starts = np.flatnonzero(np.diff(segment_ids, prepend=0) > 0)
            expect(not row["tokens_positions"][starts].any(), "positions do not start at 0")
            found.append(tokens[tokens != 0])
            num_rows += 1
        expected = np.concatenate([each["tokens"] for each in _sequences(length)])
        expect(
            np.array_equal(np.sort(np.concatenate(found)), np.sort(expected)),
            "tokens are missing or duplicated",
        )
        padding = 1 - len(expected) / (num_rows * length)
        expect(padding < _MAX_PADDING, f"{padding:.1%} of the rows is padding")

    return check


def _headrace(length: int, strategy: Any) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        num_bins = None if strategy == "concat_then_split" else NUM_BINS
        dataset = hr.Dataset.from_random_access(_sequences(length))
        dataset = dataset.pack_sequences(length, strategy, num_bins)
        return lambda: iter(dataset)

    return build


def _grain(length: int, strategy: str) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import grain

        plain = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        source = grain.MapDataset.source(_sequences(length)).to_iter_dataset(plain)
        lengths = {"tokens": length}
        if strategy == "concat_then_split":
            dataset = grain.experimental.ConcatThenSplitIterDataset(source, length_struct=lengths)
        else:
            pack = {
                "first_fit": grain.experimental.FirstFitPackIterDataset,
                "best_fit": grain.experimental.BestFitPackIterDataset,
            }[strategy]
            dataset = pack(
                source, length_struct=lengths, num_packing_bins=NUM_BINS, shuffle_bins=False
            )
        return lambda: iter(dataset)

    return build


def _workload(length: int, strategy: str) -> Workload:
    return Workload(
        name=f"pack into rows of {length}, {strategy}",
        unit="tokens",
        check=_check(length),
        consume=lambda row: int(np.count_nonzero(row["tokens_segment_ids"])),
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(length, strategy),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(name="grain", build=_grain(length, strategy), needs=("grain",)),
        ),
        targets=(Target(of=("grain",), at_least=3.0),),
    )


WORKLOADS = tuple(_workload(2048, strategy) for strategy in _STRATEGIES)


def main() -> None:
    """Print the fraction of padding of each contender."""
    with ExitStack() as stack:
        for length in (2048, 8192):
            for strategy in _STRATEGIES:
                for name, build in (("headrace", _headrace), ("grain", _grain)):
                    rows = build(length, strategy)(Path(), stack)()
                    padding = padding_fraction(rows, length)
                    print(f"rows of {length}, {strategy}, {name}: {padding:.2%} padding")


if __name__ == "__main__":
    main()

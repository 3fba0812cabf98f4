"""Small data sets for the examples in this directory, made from a fixed seed.

Each function writes files into a new temporary directory, which is removed when the program ends,
and returns what the example reads.
"""

from __future__ import annotations

import atexit
import csv
import io
import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr

WORDS = ["a", "river", "turns", "the", "wheel", "that", "lifts", "water", "to", "every", "field"]


def new_directory() -> Path:
    """Return a new directory that is removed at exit."""
    path = Path(tempfile.mkdtemp(prefix="headrace-example-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def image_folder(num_images: int = 96) -> Path:
    """Write JPEG files of two classes: bright images in `day`, dark ones in `night`."""
    rng, folder = np.random.default_rng(0), new_directory()
    for label, brightness in (("day", 170), ("night", 60)):
        (folder / label).mkdir()
        for number in range(num_images // 2):
            image = rng.normal(brightness, 30, (40, 48, 3)).clip(0, 255).astype(np.uint8)
            (folder / label / f"{number}.jpg").write_bytes(hr.io.encode_jpeg(image))
    return folder


def text_files(num_documents: int = 400) -> tuple[Path, Path]:
    """Write two files of JSON lines with the fields `id` and `text`."""
    rng, folder = np.random.default_rng(0), new_directory()
    for name in ("web", "books"):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for number in range(num_documents):
                text = " ".join(rng.choice(WORDS, rng.integers(5, 60)))
                file.write(json.dumps({"id": f"{name}-{number}", "text": text}) + "\n")
    return folder / "web.jsonl", folder / "books.jsonl"


def trips(num_rows: int = 4000) -> Path:
    """Write a Parquet file of taxi trips in several row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, path = np.random.default_rng(0), new_directory() / "trips.parquet"
    km, hour = rng.gamma(2.0, 4.0, num_rows), rng.integers(0, 24, num_rows)
    fare = 3.0 + 1.8 * km + 2.0 * (hour > 20) + rng.normal(0, 0.5, num_rows)
    pq.write_table(pa.table({"km": km, "hour": hour, "fare": fare}), path, row_group_size=500)
    return path


def ratings(num_rows: int = 3000) -> Path:
    """Write a CSV file of users, items, and whether the user liked the item."""
    rng, path = np.random.default_rng(0), new_directory() / "ratings.csv"
    taste, style = rng.normal(size=(50, 4)), rng.normal(size=(80, 4))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "liked"])
        for _ in range(num_rows):
            user, item = rng.integers(50), rng.integers(80)
            writer.writerow([f"user{user}", f"item{item}", int(taste[user] @ style[item] > 0)])
    return path


def tar_shards(num_shards: int = 4, samples_per_shard: int = 25) -> str:
    """Write tar archives of images and classes; return a pattern with braces."""
    rng, folder = np.random.default_rng(0), new_directory()
    for shard in range(num_shards):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as archive:
            for number in range(samples_per_shard):
                image = rng.integers(0, 256, (16, 16, 3), np.uint8)
                for ending, data in (("jpg", hr.io.encode_jpeg(image)), ("cls", b"%d" % number)):
                    member = tarfile.TarInfo(f"{shard:03}-{number:04}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return f"{folder}/train-{{000..{num_shards - 1:03}}}.tar"


def sensor_readings(num_readings: int = 2000) -> dict[str, np.ndarray[Any, Any]]:
    """Return a noisy sine wave and its times."""
    time = np.arange(num_readings)
    noise = np.random.default_rng(0).normal(0, 0.1, num_readings)
    return {"time": time, "value": (np.sin(time / 20) + noise).astype(np.float32)}

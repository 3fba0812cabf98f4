"""What each environment runs with the installed wheel: python smoke.py [EXTRA].

Without an extra, the core: datasets, states, a data service of worker processes, parameter servers
and the command line. With one, a small use of what the extra adds.
"""
# ruff: noqa: PLC0415  (each check imports what its own extra installs)

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import headrace as hr


def double(x: np.ndarray) -> np.ndarray:
    """Return twice x."""
    return x * 2


def check_core() -> None:
    """Check what needs no extra."""
    assert "site-packages" in hr.__file__, f"{hr.__file__} is not the installed wheel"
    dataset = hr.Dataset.range(100).map(double).shuffle(50, seed=1).batch(10)
    iterator = iter(dataset)
    first, state = next(iterator), iterator.get_state()
    remaining = [batch.tolist() for batch in iterator]
    iterator.set_state(state)
    assert [batch.tolist() for batch in iterator] == remaining
    assert sorted([*first.tolist(), *itertools.chain(*remaining)]) == list(range(0, 200, 2))

    with hr.service.LocalCluster(num_workers=2) as cluster:
        remote = dataset.apply(hr.service.distribute("distributed_epoch", cluster.target))
        assert sorted(int(x) for batch in remote for x in batch) == list(range(0, 200, 2))

    with hr.distribute.LocalCluster(num_workers=1, num_ps=1) as training:
        strategy = hr.distribute.ParameterServerStrategy(training.cluster_resolver)
        with strategy.scope():
            variable = hr.Variable(np.zeros(3, np.float32))
        variable.assign_add(np.ones(3, np.float32))
        assert np.asarray(variable).tolist() == [1.0, 1.0, 1.0]

    for arguments in (["--version"], ["doctor"], ["--help"]):
        command = [str(Path(sys.executable).with_name("headrace")), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


def check_arrow() -> None:
    """Read and write with pyarrow."""
    import pyarrow as pa
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/rows.parquet"
        parquet.write_table(pa.table({"x": [1, 2, 3]}), path)
        assert [int(row["x"]) for row in hr.ParquetDataset(path)] == [1, 2, 3]
        hr.Dataset.range(5).save(f"{directory}/saved")
        assert [int(x) for x in hr.Dataset.load(f"{directory}/saved")] == [0, 1, 2, 3, 4]


def check_images() -> None:
    """Encode and decode an image."""
    image = np.full((4, 4, 3), 7, np.uint8)
    assert hr.io.decode_image(hr.io.encode_jpeg(image)).shape == (4, 4, 3)


def check_jax() -> None:
    """Read JAX arrays."""
    batches = list(hr.jax.device_iterator(hr.Dataset.range(8).batch(4)))
    assert [int(batch.sum()) for batch in batches] == [6, 22]


def check_torch() -> None:
    """Read tensors."""
    batches = list(hr.torch.loader(hr.Dataset.range(8).batch(4)))
    assert [int(batch.sum()) for batch in batches] == [6, 22]


def check_grain() -> None:
    """Read through Grain."""
    assert [int(x) for x in hr.grain.iter_dataset(hr.Dataset.range(4))] == [0, 1, 2, 3]


def check_json() -> None:
    """Read JSON lines."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        path.write_text('{"x": 1}\n{"x": 2}\n')
        assert [int(row["x"]) for row in hr.JsonLinesDataset(str(path))] == [1, 2]


def imports(*modules: str) -> Callable[[], None]:
    """Return a check that only imports, where a use needs a cluster or files of other programs."""

    def check() -> None:
        for module in modules:
            importlib.import_module(module)

    return check


CHECKS: dict[str, Callable[[], None]] = {
    "": check_core,
    "array-record": imports("array_record", "headrace.data.array_records"),
    "arrow": check_arrow,
    "compression": imports("lz4.frame", "zstandard"),
    "dashboard": imports("starlette", "uvicorn"),
    "dtypes": imports("ml_dtypes"),
    "grain": check_grain,
    "images": check_images,
    "jax": check_jax,
    "json": check_json,
    "keras": imports("tensorboard"),
    "kubernetes": imports("kubernetes.client"),
    "lance": imports("lance", "headrace.data.lance_dataset"),
    "objectstore": imports("obstore.store"),
    "ray": imports("ray"),
    "scipy": imports("scipy.sparse"),
    "torch": check_torch,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1] if len(sys.argv) > 1 else ""]()

"""Systems other than Linux, simulated in processes without its features."""

from __future__ import annotations

import subprocess
import sys

#: Removes what macOS lacks. Libraries are imported first: they need the real system.
WITHOUT_LINUX = """
import os, select, sys, sysconfig
import cloudpickle, fsspec, google_crc32c, msgspec, numpy, prometheus_client, typer, zmq
sysconfig.get_config_vars()
sys.platform = "darwin"
missing = ["memfd_create", "eventfd", "eventfd_read", "eventfd_write", "posix_fallocate",
           "posix_fadvise", "sched_getaffinity", "sched_setaffinity", "pidfd_open"]
for name in missing:
    if hasattr(os, name):
        delattr(os, name)
for name in ("epoll", "EPOLLIN"):
    delattr(select, name)
"""

DATASETS = """
import headrace as hr
dataset = hr.Dataset.range(100).map(lambda x: x + 1, num_parallel_calls=2)
dataset = dataset.filter(lambda x: x % 2 == 0).shuffle(10, seed=1).batch(8).prefetch(2)
iterator = iter(dataset)
first, state = next(iterator), iterator.get_state()
rest = [batch.tolist() for batch in iterator]
iterator.set_state(state)
assert [batch.tolist() for batch in iterator] == rest
assert sorted([*first.tolist(), *sum(rest, [])]) == list(range(2, 101, 2))
nested = hr.Dataset.range(5).interleave(lambda x: hr.Dataset.range(x), cycle_length=2)
assert len(list(nested)) == 10
hr.Dataset.range(5).save(sys.argv[1] + "/saved")
assert len(list(hr.Dataset.load(sys.argv[1] + "/saved"))) == 5
"""


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def test_datasets_of_one_process_need_no_feature_of_linux(tmp_path):
    result = run(WITHOUT_LINUX + DATASETS, str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_the_public_packages_are_imported_without_features_of_linux():
    program = WITHOUT_LINUX + (
        "import headrace as hr; hr.service.distribute; hr.distribute.MirroredStrategy;"
        "hr.coordinator; hr.io.TFRecordWriter; hr.Checkpoint"
    )
    result = run(program)
    assert result.returncode == 0, result.stderr


def test_windows_is_refused_with_the_remedy():
    result = run("import sys; sys.platform = 'win32'; import headrace")
    assert result.returncode == 1
    assert "ImportError: Headrace does not support Windows" in result.stderr
    assert "WSL" in result.stderr

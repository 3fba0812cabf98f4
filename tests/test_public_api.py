"""The public names: what users may rely on. A name that goes, or moves, breaks this first."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import headrace as hr

TOP = {
    "AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "ArraySpec", "Chunk", "Dataset",
    "DatasetIterator", "IndexedSource", "Options", "Reader", "Source", "TFRecordDataset",
    "TextLineDataset", "errors", "io", "service", "testing",
}  # fmt: skip
SERVICE = {
    "DispatchServer", "DispatcherConfig", "LocalCluster", "Security", "ShardingPolicy",
    "WorkerConfig", "WorkerServer", "delivery_report", "distribute", "from_dataset_id",
    "register_dataset",
}  # fmt: skip
DATASET = {
    "apply", "as_numpy_iterator", "batch", "cache", "cardinality", "concatenate", "element_spec",
    "enumerate", "explain", "filter", "flat_map", "from_generator", "from_source",
    "from_tensor_slices", "from_tensors", "interleave", "list_files", "map", "options", "plan",
    "prefetch", "range", "repeat", "shard", "shuffle", "skip", "take", "unbatch", "with_options",
    "zip",
}  # fmt: skip


def test_the_names_are_these():
    assert set(hr.__all__) == TOP
    assert set(hr.service.__all__) == SERVICE
    assert {name for name in vars(hr.Dataset) if not name.startswith("_")} == DATASET
    assert set(hr.io.__all__) == {
        "FixedLenFeature", "TFRecordWriter", "VarLenFeature", "encode_example", "parse_example",
    }  # fmt: skip


def test_arguments_are_those_of_tf_data():
    def arguments(function):
        return list(inspect.signature(function).parameters)

    assert arguments(hr.Dataset.map) == [
        "self", "map_func", "num_parallel_calls", "deterministic",
    ]  # fmt: skip
    assert arguments(hr.Dataset.interleave) == [
        "self", "map_func", "cycle_length", "block_length", "num_parallel_calls", "deterministic",
    ]  # fmt: skip
    assert arguments(hr.Dataset.shuffle) == [
        "self", "buffer_size", "seed", "reshuffle_each_iteration",
    ]  # fmt: skip
    assert arguments(hr.Dataset.batch)[:3] == ["self", "batch_size", "drop_remainder"]
    assert arguments(hr.service.distribute)[:11] == [
        "processing_mode", "service", "job_name", "consumer_index", "num_consumers",
        "max_outstanding_requests", "data_transfer_protocol", "compression",
        "cross_trainer_cache", "target_workers", "visitation",
    ]  # fmt: skip


def test_the_testing_package_is_loaded_when_it_is_asked_for():
    assert set(hr.testing.__all__) == {
        "ManualClock", "Resources", "assert_no_leaks", "check_source",
    }  # fmt: skip
    code = "import sys, headrace; assert not {'pytest', 'headrace.testing'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = hr.absent


def test_every_public_thing_says_what_it_is():
    for name in TOP - {"AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY"}:
        assert inspect.getdoc(getattr(hr, name)), name
    for name in SERVICE:
        assert inspect.getdoc(getattr(hr.service, name)), name
    for name in DATASET:
        assert inspect.getdoc(inspect.getattr_static(hr.Dataset, name)), name

"""Tests of the public names. Removing or moving one fails here first."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import headrace as hr
from headrace import storage
from tests.docs.public_names import public_packages

TOP = {
    "AUTOTUNE", "ArrayRecordDataset", "ArraySpec", "Checkpoint", "CheckpointManager", "Chunk",
    "CsvDataset", "Dataset", "DatasetIterator", "DatasetSpec", "EmbeddingTable",
    "FixedLengthRecordDataset",
    "INFINITE_CARDINALITY", "IndexedSlices", "IndexedSource", "IteratorStats",
    "JsonLinesDataset", "LanceDataset", "Lookup", "MDSDataset", "Optional", "Options",
    "ParquetDataset",
    "RaggedArray", "Reader", "Source", "TFRecordDataset", "StorageCache",
    "TextLineDataset", "UNKNOWN_CARDINALITY", "Variable", "WebDataset", "checkpoints_iterator",
    "coordinator", "distribute", "errors", "grain", "initializers", "io", "jax", "keras", "metrics",
    "optimizers", "ray", "service", "testing", "torch",
}  # fmt: skip
KERAS = {
    "BestModelExporter", "DatasetCreator", "DistributedEmbedding", "Embedding", "KerasDataset",
    "SidecarEvaluator", "TensorBoard", "adapter", "dataset", "distribute",
}  # fmt: skip
SERVICE = {
    "CrossTrainerCache",
    "DispatchServer", "DispatcherConfig", "DistributedSave", "LocalCluster", "SHARD_HINT",
    "Security", "ShardingPolicy", "WorkerConfig", "WorkerServer", "delivery_report", "distribute",
    "distributed_save", "from_dataset_id", "register_dataset",
}  # fmt: skip
RAY = {"DataCluster", "TrainingCluster", "connect"}
COORDINATOR = {
    "ClosureWorker", "ClusterCoordinator", "PerWorkerValues", "RemoteValue", "RemoteValueStatus",
    "get_current_worker_index",
}  # fmt: skip
DISTRIBUTE = {
    "AutoShardPolicy", "ClusterResolver", "ClusterSpec", "DistributedDataset",
    "DistributedDatasetsFromFunction", "DistributedIterator", "InputContext", "InputOptions",
    "InputReplicationMode", "KubernetesClusterResolver", "LocalCluster", "MirroredStrategy",
    "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "ParameterServerStrategy", "PerReplica",
    "PerReplicaSpec", "RayClusterResolver", "ReduceOp", "ReplicaContext", "Server",
    "SimpleClusterResolver", "SlurmClusterResolver", "Strategy", "TFConfigClusterResolver",
    "TorchrunClusterResolver", "UnionResolver", "ValueContext", "VariableAggregation",
    "VariableSynchronization", "cache_variable_reads", "get_replica_context", "get_strategy",
    "has_strategy", "in_cross_replica_context", "partitioners", "v1",
}  # fmt: skip
OPTIMIZERS = {
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "InBackground", "Lion", "Nadam",
    "Optimizer", "RMSprop", "RowWiseAdagrad", "SGD", "schedules",
}  # fmt: skip
DATASET = {
    "apply", "as_numpy_iterator", "batch", "batch_by_cost", "bucket_by_sequence_length", "cache",
    "cardinality", "pack_sequences",
    "choose_from_datasets", "concatenate", "counter", "element_spec", "enumerate", "explain",
    "filter", "fingerprint", "flat_map", "from_generator", "from_image_folder", "from_pipeline",
    "from_random_access", "from_source", "from_tensor_slices", "from_tensors",
    "get_single_element", "group_by_window", "interleave", "list_files", "load", "map",
    "options", "padded_batch", "plan", "prefetch", "ragged_batch", "random", "range", "rebatch",
    "reduce", "repeat", "sample_from_datasets", "save", "scan", "shard", "shuffle", "skip",
    "take", "take_while", "unbatch", "unique", "with_options", "zip", "in_processes",
    "ignore_errors", "random_map", "rejection_resample", "snapshot", "window", "iterate",
}  # fmt: skip


def test_public_names_are_as_listed():
    assert set(hr.__all__) == TOP
    assert set(hr.keras.__all__) == KERAS
    assert set(hr.service.__all__) == SERVICE
    assert set(hr.ray.__all__) == RAY
    assert set(hr.coordinator.__all__) == COORDINATOR
    assert set(hr.distribute.__all__) == DISTRIBUTE
    assert set(hr.optimizers.__all__) == OPTIMIZERS
    assert {name for name in dir(hr.Dataset) if not name.startswith("_")} == DATASET
    assert set(hr.io.__all__) == {
        "FixedLenFeature", "TFRecordWriter", "VarLenFeature", "decode_image", "decode_jpeg",
        "decode_png", "encode_example", "encode_jpeg", "encode_png", "parse_example", "resize",
    }  # fmt: skip


@pytest.mark.parametrize(("path", "package"), public_packages().items())
def test_dir_of_public_package_shows_public_names_only(path: str, package: ModuleType):
    assert sorted(dir(package)) == sorted(package.__all__)
    assert [name for name in package.__all__ if name.startswith("_")] == []


def test_signatures_match_tf_data():
    def arguments(function):
        return list(inspect.signature(function).parameters)

    assert arguments(hr.Dataset.map) == [
        "self", "map_func", "num_parallel_calls", "deterministic", "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.interleave) == [
        "self", "map_func", "cycle_length", "block_length", "num_parallel_calls", "deterministic",
        "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.rejection_resample) == [
        "self", "class_func", "target_dist", "initial_dist", "seed", "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.snapshot) == [
        "self", "path", "compression", "reader_func", "shard_func", "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.shuffle) == [
        "self", "buffer_size", "seed", "reshuffle_each_iteration", "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.padded_batch) == [
        "self", "batch_size", "padded_shapes", "padding_values", "drop_remainder",
        "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.group_by_window) == [
        "self", "key_func", "reduce_func", "window_size", "window_size_func", "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.bucket_by_sequence_length) == [
        "self", "element_length_func", "bucket_boundaries", "bucket_batch_sizes", "padded_shapes",
        "padding_values", "pad_to_bucket_boundary", "no_padding", "drop_remainder", "name",
    ]  # fmt: skip
    assert arguments(hr.Dataset.sample_from_datasets) == [
        "datasets", "weights", "seed", "stop_on_empty_dataset", "rerandomize_each_iteration",
    ]  # fmt: skip
    assert arguments(hr.Dataset.choose_from_datasets) == [
        "datasets", "choice_dataset", "stop_on_empty_dataset",
    ]  # fmt: skip
    assert arguments(hr.Dataset.scan) == ["self", "initial_state", "scan_func", "name"]
    assert arguments(hr.Dataset.take_while) == ["self", "predicate", "name"]
    assert arguments(hr.Dataset.counter) == ["start", "step", "name"]
    assert arguments(hr.Dataset.random) == ["seed", "name"]
    assert arguments(hr.Dataset.batch)[:3] == ["self", "batch_size", "drop_remainder"]
    assert arguments(hr.service.distribute)[:11] == [
        "processing_mode", "service", "job_name", "consumer_index", "num_consumers",
        "max_outstanding_requests", "data_transfer_protocol", "compression",
        "cross_trainer_cache", "target_workers", "visitation",
    ]  # fmt: skip


def test_testing_package_is_imported_lazily():
    assert set(hr.testing.__all__) == {
        "ManualClock", "HeldResources", "assert_no_leaks", "check_source",
    }  # fmt: skip
    code = "import sys, headrace; assert not {'pytest', 'headrace.testing'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = hr.absent


@pytest.mark.parametrize(
    "package", [hr, hr.distribute, hr.service, storage], ids=lambda p: p.__name__
)
def test_lazy_names_match_the_type_checking_imports(package):
    """Check that the imports for type checkers match the names that are loaded lazily."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    read = {}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        module = importlib.import_module(node.module)
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            read[alias.asname or alias.name] = (
                importlib.import_module(submodule)
                if importlib.util.find_spec(node.module).submodule_search_locations
                and importlib.util.find_spec(submodule)
                else getattr(module, alias.name)
            )
    assert set(package.__all__) == set(read) <= set(dir(package))
    for name, thing in read.items():
        assert getattr(package, name) is thing, name


def test_names_can_be_imported_from_the_package_by_name_and_by_star():
    code = (
        "from headrace import *\n"
        "from headrace import Dataset as D, service\n"
        "from headrace.service import *\n"
        "assert Dataset is D and distribute is service.distribute and LocalCluster\n"
        "import headrace, pickle\n"
        "assert pickle.loads(pickle.dumps(headrace.Dataset)) is Dataset\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    with pytest.raises(ImportError, match="cannot import name 'Datset' from 'headrace'"):
        exec("from headrace import Datset")


def test_every_public_name_has_a_docstring():
    for name in TOP - {"AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY"}:
        assert inspect.getdoc(getattr(hr, name)), name
    for name in SERVICE:
        assert inspect.getdoc(getattr(hr.service, name)), name
    for name in DISTRIBUTE:
        assert inspect.getdoc(getattr(hr.distribute, name)), name
    for name in DATASET:
        assert inspect.getdoc(inspect.getattr_static(hr.Dataset, name)), name

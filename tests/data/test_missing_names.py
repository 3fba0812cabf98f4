"""Names of tf.data exist in Headrace, or their error names an alternative."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import headrace as hr
from headrace.data import missing_names

# The public names of tf.data 2.x and tf.io.
DATASET = """
    apply as_numpy_iterator batch bucket_by_sequence_length cache cardinality choose_from_datasets
    concatenate counter element_spec enumerate filter fingerprint flat_map from_generator
    from_tensor_slices from_tensors get_single_element group_by_window ignore_errors interleave
    list_files load map options padded_batch prefetch ragged_batch random range rebatch reduce
    rejection_resample repeat sample_from_datasets save scan shard shuffle skip snapshot
    sparse_batch take take_while unbatch unique window with_options zip
"""
TOP = """
    AUTOTUNE Dataset DatasetSpec FixedLengthRecordDataset INFINITE_CARDINALITY Iterator IteratorSpec
    NumpyIterator Options TFRecordDataset TextLineDataset ThreadingOptions UNKNOWN_CARDINALITY
    experimental data
"""
EXPERIMENTAL = """
    AUTOTUNE AutoShardPolicy AutotuneAlgorithm AutotuneOptions Counter CsvDataset DatasetInitializer
    DistributeOptions ExternalStatePolicy INFINITE_CARDINALITY OptimizationOptions Optional
    RandomDataset Reducer SHARD_HINT SqlDataset TFRecordWriter ThreadingOptions UNKNOWN_CARDINALITY
    assert_cardinality bucket_by_sequence_length cardinality choose_from_datasets copy_to_device
    dense_to_ragged_batch dense_to_sparse_batch enable_debug_mode enumerate_dataset from_list
    get_model_proto get_next_as_optional get_single_element get_structure group_by_reducer
    group_by_window ignore_errors index_table_from_dataset load make_batched_features_dataset
    make_csv_dataset make_saveable_from_iterator map_and_batch pad_to_cardinality
    parallel_interleave parse_example_dataset prefetch_to_device rejection_resample
    sample_from_datasets save scan service shuffle_and_repeat snapshot table_from_dataset take_while
    unbatch unique
"""
SERVICE = """
    CrossTrainerCache DispatchServer DispatcherConfig ShardingPolicy WorkerConfig WorkerServer
    distribute from_dataset_id register_dataset distributed_save
"""
IO = """
    FixedLenFeature FixedLenSequenceFeature RaggedFeature SparseFeature TFRecordOptions
    TFRecordWriter VarLenFeature decode_and_crop_jpeg decode_base64 decode_bmp decode_compressed
    decode_csv decode_gif decode_image decode_jpeg decode_json_example decode_png decode_proto
    decode_raw deserialize_many_sparse encode_base64 encode_jpeg encode_png encode_proto
    extract_jpeg_shape gfile is_jpeg match_filenames_once matching_files parse_example
    parse_sequence_example parse_single_example parse_single_sequence_example parse_tensor read_file
    serialize_many_sparse serialize_sparse serialize_tensor write_file write_graph
"""
OPTIONS = """
    autotune dataset_name deterministic experimental_deterministic experimental_distribute
    experimental_external_state_policy experimental_optimization experimental_slack
    experimental_symbolic_checkpoint experimental_threading experimental_warm_start framework_type
    merge threading auto_shard_policy service seed
"""


def answers(thing, name):
    """Return whether a name exists or its error names an alternative."""
    try:
        getattr(thing, name)
    except AttributeError as error:
        return "use instead: " in str(error) and repr(name) in str(error)
    return True


@pytest.mark.parametrize(
    ("thing", "names"),
    [
        (hr.Dataset, DATASET),
        (hr.Dataset.range(3), DATASET),
        (hr, TOP + EXPERIMENTAL),
        (hr.service, SERVICE),
        (hr.io, IO),
        (hr.Options(), OPTIONS),
    ],
    ids=["the class", "a dataset", "hr", "hr.service", "hr.io", "Options"],
)
def test_each_tf_data_name_exists_or_names_an_alternative(thing, names):
    assert [name for name in names.split() if not answers(thing, name)] == []


def test_setting_a_missing_option_gives_the_same_error_as_reading():
    options = hr.Options()
    with pytest.raises(AttributeError, match=r"use instead: num_parallel_calls"):
        options.threading = 3
    with pytest.raises(AttributeError, match=r"it has: auto_shard_policy, deterministic, seed"):
        options.unheard_of = 3
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda ds: hr.TFRecordDataset("x", name="x"),
            r"TFRecordDataset\(\) has no argument 'name'; leave it out",
        ),
        (lambda ds: ds.map(fn=abs), "it is called map_func"),
        (lambda ds: ds.batch(2, drop_last=True), "it is called drop_remainder"),
        (lambda ds: ds.filter(fn=bool), r"Dataset\.filter\(\) .* it is called predicate"),
        (lambda ds: ds.window(window_size=2), r"Dataset\.window\(\) .* it is called size"),
        (lambda ds: ds.pack_sequences(8, num_packing_bins=3), "it is called num_bins"),
        (lambda ds: ds.in_processes(num_workers=3), "it is called num_processes"),
        (lambda ds: ds.ignore_errors(handler=print), "dead_letter"),
        (lambda ds: ds.unique("key"), r"^Dataset\.unique\(\) takes 1 positional"),
        (lambda ds: hr.CsvDataset("x", sep=";"), "it is called delimiter"),
        (lambda ds: hr.CsvDataset("x", dtype=int), "it is called dtypes"),
        (lambda ds: hr.CsvDataset("x", record_defaults=[0]), "pass dtypes"),
        (lambda ds: hr.TFRecordDataset("x", compression="GZIP"), "called compression_type"),
        (lambda ds: hr.MDSDataset(remote="s3://x"), "it is called directory"),
        (lambda ds: hr.WebDataset("x", shardshuffle=True), "shuffle the names"),
        (lambda ds: hr.Dataset.from_image_folder("x", image_size=(2, 2)), "it is called size"),
        (lambda ds: ds.batch(batchsize=2), "did you mean 'batch_size'"),
        (lambda ds: ds.repeat(times=2), "it has: count, name"),
        (lambda ds: ds.unbatch(x=1), "it has: name"),
        (lambda ds: ds.save("x", compression="GZIP"), "Arrow"),
        (lambda ds: hr.Dataset.range(5, dtype="x"), r"range\(\) has no argument 'dtype'"),
        (lambda ds: hr.Dataset.zip(ds, strict=True), r"zip\(\) has no argument 'strict'"),
        (lambda ds: hr.Dataset.from_generator(list, output_types=int), "output_signature"),
        (lambda ds: hr.TFRecordDataset("x", buffer_size=8), "files are read in large pieces"),
        (lambda ds: hr.TextLineDataset("x", buffer_size=8), "files are read in large pieces"),
    ],
)
def test_unknown_argument_error_names_an_alternative(call, words):
    with pytest.raises(TypeError, match=words):
        call(hr.Dataset.range(3))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode", "hr.WebDataset"),
        ("to_tuple", "map"),
        ("map_batches", r"batch\(n\)\.map"),
        ("mp_prefetch", "in_processes"),
        ("train_test_split", "take"),
    ],
)
def test_methods_of_other_libraries_name_an_alternative(name, words):
    with pytest.raises(AttributeError, match=f"has no '{name}'; use instead: .*{words}"):
        getattr(hr.Dataset.range(3), name)


def test_methods_are_pickled_by_reference():
    for method in (hr.Dataset.unique, hr.Dataset.load, hr.Dataset.range(3).batch.__func__):
        assert pickle.loads(pickle.dumps(method)) == method


def test_similar_names_are_suggested():
    with pytest.raises(AttributeError, match=r"Dataset has no method 'shufle'; did you mean 'shuf"):
        _ = hr.Dataset.shufle
    with pytest.raises(AttributeError, match=r"did you mean 'Dataset'"):
        _ = hr.Datset
    with pytest.raises(AttributeError, match=r"did you mean 'parse_example'"):
        _ = hr.io.parse_exampel


def test_missing_private_names_give_no_suggestion():
    assert not hasattr(hr.Dataset, "__wrapped__")
    assert not hasattr(hr, "_repr_html_")
    with pytest.raises(AttributeError, match=r"has no attribute '_x'$"):
        _ = hr.Dataset._x


def test_string_dtype_error_names_the_alternative():
    with pytest.raises(ValueError, match="got 'string'; for strings use bytes, or str"):
        hr.io.FixedLenFeature([], "string")
    with pytest.raises(ValueError, match="dtype must be bytes, str"):
        hr.io.VarLenFeature("complex64")


def test_methods_keep_their_names_and_signatures():
    assert hr.Dataset.map.__qualname__ == "Dataset.map"
    assert list(inspect.signature(hr.Dataset.batch).parameters)[:2] == ["self", "batch_size"]
    assert hr.Dataset.range(3).map(lambda x: x).plan.location.startswith("test_missing_names.py:")


def test_tables_are_sorted():
    for table in (
        missing_names.ARGUMENT_ALTERNATIVES,
        missing_names.METHOD_ALTERNATIVES,
        *missing_names.MODULE_ALTERNATIVES.values(),
    ):
        assert all(words and not words.endswith(".") for words in table.values())


def test_names_of_the_data_package_refer_to_headrace():
    assert hr.Dataset
    for name in ("Dataset", "AUTOTUNE", "TFRecordDataset", "experimental"):
        assert answers(hr.data, name)
    with pytest.raises(AttributeError, match=r"use instead: hr\.Dataset$"):
        _ = hr.data.Dataset


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hr.service.distribute("OFF", services="x"), r"distribute\(\) .* mean 'service'"),
        (lambda: hr.service.register_dataset(servce="x"), "did you mean 'service'"),
        (lambda: hr.service.from_dataset_id(datasetid="x"), "did you mean 'dataset_id'"),
        (lambda: hr.service.LocalCluster(worker=2), r"LocalCluster\(\) .* mean 'num_workers'"),
        (lambda: hr.service.WorkerConfig(dispatcher="x"), "did you mean 'dispatcher_address'"),
        (lambda: hr.service.DispatcherConfig(workdir="x"), "did you mean 'work_dir'"),
        (lambda: hr.distribute.LocalCluster(num_worker=2), "did you mean 'num_workers'"),
        (lambda: hr.CheckpointManager(max_keep=2), "did you mean 'max_to_keep'"),
        (lambda: hr.CheckpointManager(name="x"), "it has: checkpoint, directory, max_to"),
        (lambda: hr.EmbeddingTable(8, names="x"), "did you mean 'name'"),
        (lambda: hr.Variable(1.0, nam="x"), r"^Variable\(\) .* mean 'name'"),
        (lambda: hr.optimizers.Adam(lr=0.1), r"^Adam\(\) .* it is called learning_rate"),
        (lambda: hr.optimizers.AdamW(eps=0.1), r"^AdamW\(\) .* it is called epsilon"),
        (lambda: hr.optimizers.SGD(momntum=0.1), "did you mean 'momentum'"),
        (lambda: hr.optimizers.SGD(clip_norm=0.1), "did you mean 'clipnorm'"),
        (lambda: hr.optimizers.SGD(x=0.1), "it has: learning_rate, momentum, .*weight_decay"),
    ],
)
def test_unknown_arguments_outside_of_datasets_are_explained(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_explained_classes_keep_their_signatures():
    for explained in (hr.service.WorkerConfig, hr.CheckpointManager, hr.optimizers.Optimizer):
        signature = inspect.signature(explained)
        assert not {"args", "kwargs"} & set(signature.parameters)
        assert all(each.annotation is not each.empty for each in signature.parameters.values())
    config = hr.service.WorkerConfig("localhost:1", port=3)
    assert pickle.loads(pickle.dumps(config)) == config


def test_alternatives_are_phrases():
    with pytest.raises(TypeError, match=r"'num_workers'; use num_parallel_calls, dataset\.in_pr"):
        hr.Dataset.range(3).map(abs, num_workers=2)
    with pytest.raises(TypeError, match=r"'label_name'; use dataset\.map"):
        hr.CsvDataset("x", label_name="y")

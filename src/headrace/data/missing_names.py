"""Error messages for names of tf.data and similar libraries that do not exist here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from headrace import argument_names

__all__ = [
    "ARGUMENT_ALTERNATIVES",
    "METHOD_ALTERNATIVES",
    "MODULE_ALTERNATIVES",
    "MissingNamesMeta",
    "explain_unknown_arguments",
    "missing_method_message",
    "missing_name_message",
    "slices_error",
]


_USE_A_GENERATOR = (
    "a generator over the dataset does it in one process: "
    "Dataset.from_generator(lambda: steps(dataset))"
)
_ALREADY_NUMPY = "elements are NumPy already, so leave it out"
_USE_NDARRAY = "np.ndarray: elements are NumPy arrays"
_USE_PADDED_BATCH = "padded_batch(), or tuples of indices and values"
_USE_METHOD = "the method of the same name of Dataset"
_NOT_NEEDED = "nothing: leave it out"

_USE_FROM_RANDOM_ACCESS = "Dataset.from_random_access(items)"
_USE_IN_PROCESSES = "in_processes(n)"
_USE_LOADER = "hr.torch.loader(dataset), or hr.jax.device_iterator(dataset)"
_USE_PACK_SEQUENCES = "pack_sequences(length)"

#: Names of tf.data.Dataset, current and deprecated, and of other libraries.
METHOD_ALTERNATIVES = {
    "as_iterator": "iterate over it: `for element in dataset`, or iter(dataset)",
    "batched": "batch()",
    "collate_fn": "batch(), or padded_batch()",
    "decode": "decode=... of hr.WebDataset, or map()",
    "distribute": "dataset.apply(hr.service.distribute(...))",
    "from_items": _USE_FROM_RANDOM_ACCESS,
    "from_list": _USE_FROM_RANDOM_ACCESS,
    "iter_batches": "iterate over dataset.batch(n)",
    "iter_torch_batches": "hr.torch.loader(dataset.batch(n), device)",
    "make_initializable_iterator": "iter(dataset)",
    "make_one_shot_iterator": "iter(dataset)",
    "map_batches": "batch(n).map(f)",
    "map_dict": "map()",
    "map_tuple": "map()",
    "map_with_legacy_function": "map()",
    "materialize": "cache(), or save(path)",
    "mix": "Dataset.sample_from_datasets(datasets, weights)",
    "mp_prefetch": _USE_IN_PROCESSES,
    "filter_with_legacy_function": "filter()",
    "numpy": "elements are NumPy already",
    "output_classes": "element_spec",
    "output_shapes": "element_spec",
    "output_types": "element_spec",
    "pack": _USE_PACK_SEQUENCES,
    "random_shuffle": "shuffle(len(dataset), seed)",
    "select": "filter(), or map() to choose components",
    "set_epoch": "nothing: each iteration is a new epoch",
    "set_format": _USE_LOADER,
    "sort": "sorted(dataset), if it fits in memory",
    "sparse_batch": "ragged_batch() of the indices and of the values, or padded_batch()",
    "split": "take(n) and skip(n)",
    "to_iter_dataset": "iter(dataset)",
    "to_tuple": 'map(lambda sample: (sample["jpg"], sample["cls"]))',
    "train_test_split": "take(n) and skip(n)",
    "with_epoch": "repeat().take(n)",
    "with_format": _USE_LOADER,
    "write_parquet": "save(path), which writes Arrow files",
}

_USE_LIST_FILES = "Dataset.list_files(...).interleave(...) over a generator that reads a file"

#: Names that users look up in a module: those of tf.data, tf.io and the like.
MODULE_ALTERNATIVES: dict[str, dict[str, str]] = {
    "headrace": {
        "AutoShardPolicy": "hr.service.ShardingPolicy",
        "Counter": "hr.Dataset.counter()",
        "DatasetSpec": "hr.ArraySpec, and Dataset.element_spec, also of a Dataset from window()",
        "DistributeOptions": _NOT_NEEDED,
        "Iterator": "hr.DatasetIterator",
        "IteratorSpec": "hr.DatasetIterator.element_spec",
        "NumpyIterator": "hr.DatasetIterator",
        "OptimizationOptions": "nothing: plans are always rewritten; explain() shows how",
        "RandomDataset": "hr.Dataset.random()",
        "SHARD_HINT": "hr.service.SHARD_HINT",
        "ShardingPolicy": "hr.service.ShardingPolicy",
        "SqlDataset": "hr.Dataset.from_generator(lambda: rows)",
        "TensorSpec": "hr.ArraySpec",
        "ThreadingOptions": "num_parallel_calls of map() and interleave()",
        "cast": "np.asarray(x, dtype), in map()",
        "constant": "np.array",
        "convert_to_tensor": "np.asarray",
        "data": "hr itself: tf.data.Dataset is hr.Dataset",
        "distribute": "hr.service.distribute(...), with apply()",
        "experimental": "hr itself, and hr.service",
        "function": "nothing: functions are ordinary Python",
        "image": "hr.io.resize, or a function of Pillow, OpenCV or NumPy in map()",
        "image_dataset_from_directory": "Dataset.from_image_folder(directory)",
        "jax": "jax.device_put(element): elements are NumPy",
        "keras": "iterate over the dataset: elements are NumPy",
        "numpy_function": "the function itself: it is called with NumPy values",
        "py_function": "the function itself: it is called with NumPy values",
        "string": "bytes, or str",
        "strings": "the methods of str and bytes, in map()",
        "tensor": _USE_NDARRAY,
        "train": "hr.io.encode_example(...), and DatasetIterator.get_state()",
    },
    "headrace.data": {
        "AUTOTUNE": "hr.AUTOTUNE",
        "Dataset": "hr.Dataset",
        "FixedLengthRecordDataset": "hr.FixedLengthRecordDataset",
        "INFINITE_CARDINALITY": "hr.INFINITE_CARDINALITY",
        "Options": "hr.Options",
        "TFRecordDataset": "hr.TFRecordDataset",
        "TextLineDataset": "hr.TextLineDataset",
        "UNKNOWN_CARDINALITY": "hr.UNKNOWN_CARDINALITY",
        "experimental": "hr itself, and hr.service",
    },
    "headrace.io": {
        "FixedLenSequenceFeature": "VarLenFeature",
        "RaggedFeature": "VarLenFeature",
        "SparseFeature": "VarLenFeature, once for the indices and once for the values",
        "TFRecordDataset": "hr.TFRecordDataset",
        "TFRecordOptions": 'TFRecordWriter(path, "GZIP")',
        "decode_and_crop_jpeg": "decode_jpeg, and a slice of its result",
        "decode_base64": "base64.urlsafe_b64decode",
        "decode_bmp": "decode_image",
        "decode_compressed": "zlib.decompress, gzip.decompress",
        "decode_csv": "csv.reader, or line.split(b',')",
        "decode_gif": "decode_image",
        "decode_json_example": "json.loads, then encode_example",
        "decode_proto": "the class generated by protoc: Message.FromString(data)",
        "decode_raw": "np.frombuffer(data, dtype)",
        "deserialize_many_sparse": _USE_PADDED_BATCH,
        "encode_base64": "base64.urlsafe_b64encode",
        "encode_proto": "message.SerializeToString()",
        "extract_jpeg_shape": "PIL.Image.open(io.BytesIO(data)).size",
        "gfile": "pathlib, or fsspec",
        "is_jpeg": r'data.startswith(b"\xff\xd8\xff")',
        "match_filenames_once": "hr.Dataset.list_files(pattern)",
        "matching_files": "glob.glob, or hr.Dataset.list_files(pattern)",
        "parse_sequence_example": "parse_example, of context and sequences as features",
        "parse_single_example": "parse_example: it takes one record or a batch of them",
        "parse_single_sequence_example": "parse_example, of context and sequences as features",
        "parse_tensor": "np.load(io.BytesIO(data))",
        "read_file": "pathlib.Path(name).read_bytes()",
        "serialize_many_sparse": _USE_PADDED_BATCH,
        "serialize_sparse": _USE_PADDED_BATCH,
        "serialize_tensor": "np.save",
        "write_file": "pathlib.Path(name).write_bytes(data)",
        "write_graph": _NOT_NEEDED,
    },
    "headrace.service": {
        "DistributeOptions": _NOT_NEEDED,
    },
}

#: Names of tf.data.experimental; most others are methods or names of `hr`.
_EXPERIMENTAL_ALTERNATIVES = {
    "AutotuneAlgorithm": _NOT_NEEDED,
    "AutotuneOptions": _NOT_NEEDED,
    "DatasetInitializer": "a dict, in map()",
    "ExternalStatePolicy": _NOT_NEEDED,
    "Reducer": "group_by_window(), or scan()",
    "TFRecordWriter": "hr.io.TFRecordWriter",
    "assert_cardinality": "take(n)",
    "copy_to_device": "the framework's own, in the loop",
    "dense_to_ragged_batch": "Dataset.ragged_batch()",
    "dense_to_sparse_batch": METHOD_ALTERNATIVES["sparse_batch"],
    "enable_debug_mode": "nothing: functions are ordinary Python, and a debugger stops in them",
    "enumerate_dataset": "Dataset.enumerate()",
    "get_model_proto": "Dataset.explain()",
    "get_next_as_optional": "DatasetIterator.get_next_as_optional()",
    "get_structure": "Dataset.element_spec",
    "group_by_reducer": "group_by_window(), or scan()",
    "index_table_from_dataset": "hr.Lookup.from_dataset(dataset)",
    "make_batched_features_dataset": "hr.TFRecordDataset(...).batch(n).map(parse)",
    "make_csv_dataset": "hr.CsvDataset(...).batch(n)",
    "make_saveable_from_iterator": "DatasetIterator.get_state()",
    "map_and_batch": "map().batch()",
    "pad_to_cardinality": "concatenate() with what pads, and take(n)",
    "parallel_interleave": "interleave(num_parallel_calls=...)",
    "parse_example_dataset": "map(lambda r: hr.io.parse_example(r, features))",
    "prefetch_to_device": "prefetch(), and the framework's own in the loop",
    "shuffle_and_repeat": "shuffle().repeat()",
    "table_from_dataset": "a dict, in map()",
}

#: Names of tf.distribute.
_USE_SERVICE_OR_CLUSTER = (
    "apply(hr.service.distribute(...)) for the input, and the framework's own for the model; "
    "parallel models are not supported"
)

MODULE_ALTERNATIVES["headrace.distribute"] = {
    **dict.fromkeys(
        ("CentralStorageStrategy", "TPUStrategy", "DistributedValues"), _USE_SERVICE_OR_CLUSTER
    ),
    **dict.fromkeys(
        ("GCEClusterResolver", "SageMakerClusterResolver", "TPUClusterResolver"),
        "SimpleClusterResolver(ClusterSpec({...})), with the addresses that you have",
    ),
    **dict.fromkeys(("RunOptions", "CrossDeviceOps", "NcclAllReduce"), _NOT_NEEDED),
    **dict.fromkeys(("HierarchicalCopyAllReduce", "ReductionToOneDevice"), _NOT_NEEDED),
    **dict.fromkeys(
        ("CommunicationOptions", "CollectiveHints", "CommunicationImplementation"),
        "timeout= of MultiWorkerMirroredStrategy; each framework has one algorithm for sums",
    ),
    "cluster_resolver": "hr.distribute itself: its resolvers have the same names",
    "experimental": "hr.distribute itself",
    "experimental_set_strategy": "`with strategy.scope():` around the code that creates variables",
}

MODULE_ALTERNATIVES["headrace"] |= {
    name: _EXPERIMENTAL_ALTERNATIVES.get(name, _USE_METHOD)
    for name in (
        *_EXPERIMENTAL_ALTERNATIVES,
        *("bucket_by_sequence_length", "cardinality", "choose_from_datasets", "from_list"),
        *("get_single_element", "group_by_window", "ignore_errors", "load", "prefetch", "range"),
        *("rejection_resample", "sample_from_datasets", "save", "scan", "shuffle", "snapshot"),
        *("take_while", "unbatch", "unique", "batch", "map", "filter", "interleave", "zip"),
    )
}

_USE_SHUFFLE = "shuffle with dataset.shuffle(buffer_size, seed=...)"

#: Arguments of other libraries that have no counterpart in the same function here.
ARGUMENT_ALTERNATIVES = {
    "batch_size": "create batches with dataset.batch(n)",
    "buffer_size": "leave it out: files are read in large pieces",
    "compression": "leave it out: `save` writes Arrow files",
    "collate_fn": "batch numbers, then map() them to a batch",
    "datasets": "pass the datasets without a name",
    "element_spec": "leave it out: the directory contains the spec",
    "handler": "errors are dropped and counted; dead_letter=FILE keeps a list of them",
    "label_name": "use dataset.map(lambda row: (row, row.pop(name)))",
    "name": "leave it out: errors name a step by the file and line where it was written",
    "nodesplitter": "leave it out: distribute() or hr.torch.loader divides the samples",
    "num_epochs": "use dataset.repeat(num_epochs)",
    "num_parallel_batches": "use num_parallel_calls, of map()",
    "num_workers": "use num_parallel_calls, dataset.in_processes(n), or a data service",
    "output_shapes": "use output_signature=hr.ArraySpec(shape, dtype), or leave it out",
    "output_types": "use output_signature=hr.ArraySpec(shape, dtype), or leave it out",
    "record_defaults": "pass dtypes={column: dtype}, or leave it out: they are inferred",
    "resampled": "use dataset.repeat()",
    "sampler": _USE_SHUFFLE,
    "shard_func": "leave it out: one process saves one stream",
    "shardshuffle": "shuffle the names: from_tensor_slices(names).shuffle(n).interleave(open)",
    "shuffle": _USE_SHUFFLE,
    "split": "name the directory or the files of the split",
    "use_unbounded_threadpool": "use num_parallel_calls=n",
    "checkpoint_args": "leave it out: an unfinished save resumes where it stopped",
}


F = TypeVar("F", bound=Callable[..., Any])


def missing_method_message(name: str, known: Sequence[str]) -> str:
    """Return an error message for an unknown method with a remedy: a similar name or method."""
    if name in METHOD_ALTERNATIVES:
        return f"Dataset has no {name!r}; use instead: {METHOD_ALTERNATIVES[name]}"
    near = difflib.get_close_matches(name, [*known, *METHOD_ALTERNATIVES], n=1)
    if near and near[0] in known:
        return f"Dataset has no method {name!r}; did you mean {near[0]!r}?"
    if near:
        advice = METHOD_ALTERNATIVES[near[0]]
        return f"Dataset has no method {name!r}, nor {near[0]!r}; use instead: {advice}"
    return f"Dataset has no method {name!r}; it has: {', '.join(known)}"


def missing_name_message(package: str, name: str, known: Sequence[str]) -> str:
    """Return an error message for an unknown name of a module, with a remedy if one is known."""
    message = f"module {package!r} has no attribute {name!r}"
    table = MODULE_ALTERNATIVES.get(package, {})
    if name in table:
        return f"{message}; use instead: {table[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    if near and not name.startswith("_"):
        return f"{message}; did you mean {near[0]!r}?"
    return message


class MissingNamesMeta(type):
    """Metaclass whose classes explain unknown methods and arguments."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]
    ) -> MissingNamesMeta:
        """Create the class; wrap its public methods to explain unknown arguments."""
        named = {
            key: value if key.startswith("_") else _explain_in_method(key, value)
            for key, value in namespace.items()
        }
        return super().__new__(cls, name, bases, named)

    if not TYPE_CHECKING:  # else type checkers accept every name as a method

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            known = [method for method in dir(cls) if not method.startswith("_")]
            raise AttributeError(missing_method_message(name, known), name=name, obj=cls)


def _explain_in_method(name: str, value: Any) -> Any:
    if isinstance(value, classmethod | staticmethod):
        return type(value)(_explain_in_method(name, value.__func__))
    if not isinstance(value, FunctionType):
        return value
    # Methods of all classes are methods of Dataset for users, in errors of Python as well.
    value.__qualname__ = f"Dataset.{name}"
    value.__module__ = "headrace.data.dataset"  # where pickle finds the name
    return explain_unknown_arguments(value)


def explain_unknown_arguments(function: F) -> F:
    """Make a function of datasets raise a TypeError with a remedy for unknown arguments."""
    return argument_names.explain_unknown_arguments(function, ARGUMENT_ALTERNATIVES)


def slices_error(data: Any) -> str | None:
    """Return why data cannot be divided into rows, and a remedy; None if it is not known why."""
    if type(data).__name__ == "ndarray":  # the usual case; this module imports no NumPy
        return None
    kind = type(data).__name__
    fix = None
    if isinstance(data, list) and data and isinstance(data[0], dict):
        kind = "a list of dicts"
        fix = (
            "turn the rows into columns, {key: [row[key] for row in rows] for key in rows[0]}, "
            "or use Dataset.from_generator(lambda: rows)"
        )
    elif isinstance(data, list | tuple) and any(hasattr(x, "as_numpy_iterator") for x in data):
        kind = f"a {type(data).__name__} of Datasets"
        fix = (
            "elements cannot be Datasets: chain them with `concatenate`, mix them with "
            "Dataset.sample_from_datasets or choose_from_datasets, or open them by index, "
            "Dataset.range(len(x)).interleave(lambda i: x[int(i)])"
        )
    elif isinstance(data, set | frozenset):
        fix = "sort it: sorted(x)"
    elif hasattr(data, "as_numpy_iterator"):
        kind, fix = "a Dataset", "use it directly"
    elif hasattr(data, "__next__"):
        fix = (
            "it can be read only once: use Dataset.from_generator with the function that creates it"
        )
    elif _is_map_style_dataset(data):
        fix = "read its items by index: Dataset.from_random_access(x)"
    if fix is None:
        return None
    return f"`x` must be arrays (or dicts and tuples of them) with rows, but got {kind}; {fix}"


def _is_map_style_dataset(data: Any) -> bool:
    """Return whether a value is a map-style dataset of some library, and not an array."""
    kinds = (str, bytes, list, tuple, dict)
    return (
        hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
        and not isinstance(data, kinds)
        and not hasattr(data, "__array__")
        and not hasattr(data, "__array_interface__")
        and not hasattr(data, "__dlpack__")
        and not hasattr(data, "keys")
    )

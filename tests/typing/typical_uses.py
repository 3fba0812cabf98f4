"""Typical programs, checked by mypy and pyright in their strict modes; they are not run.

`assert_type` states a type that both checkers infer. A line with `# type: ignore[...]` (mypy) or
`# pyright: ignore[...]` must have that error: both checkers report an ignore comment without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, assert_type

import keras
import numpy as np
import torch
from numpy.typing import NDArray

import headrace as hr

Features = dict[str, NDArray[Any]]


class Row(NamedTuple):
    """A row with named columns."""

    text: str
    label: np.int64


def make_features(number: np.int64) -> Features:
    return {"x": np.full(3, number)}


def make_row(number: np.int64) -> Row:
    return Row(str(number), number)


def add(left: np.int64, right: np.int64) -> NDArray[np.int64]:
    return np.array([left, right])


def count_tokens(row: NDArray[Any]) -> int:
    return len(row)


def count_up(limit: int) -> Iterator[int]:
    yield from range(limit)


# --- Sources ------------------------------------------------------------------------------------


def read_a_range() -> None:
    numbers = hr.Dataset.range(10)
    assert_type(numbers, hr.Dataset[np.int64])
    assert_type(hr.Dataset.range(0, 10, output_type=np.float32), hr.Dataset[np.float32])
    for number in numbers:
        assert_type(number, np.int64)
    hr.Dataset.range("10")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


def read_arrays() -> None:
    rows = hr.Dataset.from_tensor_slices({"x": np.zeros((8, 2)), "y": np.arange(8)})
    assert_type(rows, hr.Dataset[Any])
    assert_type(hr.Dataset.from_tensors(np.zeros(3)), hr.Dataset[Any])
    hr.Dataset.from_slices(np.zeros(3))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def read_a_generator() -> None:
    numbers = hr.Dataset.from_generator(
        count_up, args=[3], output_signature=hr.ArraySpec((), np.int64)
    )
    assert_type(numbers, hr.Dataset[Any])
    hr.Dataset.from_generator([1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def read_files(directory: str) -> None:
    names = hr.Dataset.list_files(f"{directory}/*.tfrecord", shuffle=True, seed=1)
    assert_type(names, hr.Dataset[str])
    records = names.interleave(lambda name: hr.TFRecordDataset(name), cycle_length=4)
    assert_type(records, hr.Dataset[bytes])
    assert_type(hr.TextLineDataset(names), hr.Dataset[bytes])
    assert_type(hr.ParquetDataset(names, columns=["x"]), hr.Dataset[dict[str, Any]])
    hr.TFRecordDataset(names, compression_type="zip")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def read_a_sequence(words: list[str]) -> None:
    assert_type(hr.Dataset.from_random_access(words), hr.Dataset[Any])
    assert_type(hr.Dataset.from_pipeline(words), hr.Dataset[Any])


class Squares(hr.IndexedSource):
    """A source that computes elements from indices."""

    @property
    def size(self) -> int:
        return 100

    @property
    def element_spec(self) -> hr.ArraySpec:
        return hr.ArraySpec((), "int64")

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices * indices


class IncompleteSource(hr.Source):
    """A source without the method `open`."""

    # A class attribute works, but for pyright it is no property.
    size = 3  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def read_a_source() -> None:
    assert_type(hr.Dataset.from_source(Squares()), hr.Dataset[Any])
    hr.testing.check_source(Squares(), [n * n for n in range(100)])
    hr.Dataset.from_source(IncompleteSource())  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
    hr.Dataset.from_source([1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# --- Functions of elements ----------------------------------------------------------------------


def map_functions_with_annotations() -> None:
    numbers = hr.Dataset.range(10)
    assert_type(numbers.map(make_features), hr.Dataset[Features])
    assert_type(numbers.map(make_row, num_parallel_calls=hr.AUTOTUNE), hr.Dataset[Row])
    for row in numbers.map(make_row):
        assert_type(row.text, str)
        print(row.txt)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
    numbers.map(3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def map_lambdas() -> None:
    numbers = hr.Dataset.range(10)
    assert_type(numbers.map(lambda x: make_features(x + 1)), hr.Dataset[Features])
    assert_type(numbers.map(lambda x: {"x": np.full(3, x)}["x"].ndim), hr.Dataset[Any])
    assert_type(numbers.map(lambda x: str(x)), hr.Dataset[str])
    assert_type(numbers.map(make_row).map(lambda row: f"{row.text}!"), hr.Dataset[str])
    assert_type(numbers.map(make_features).filter(lambda row: row["x"].any()), hr.Dataset[Features])
    numbers.map(make_row).filter(lambda row: row.txt)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownLambdaType]


def map_tuples() -> None:
    pairs = hr.Dataset.range(10).enumerate()
    assert_type(pairs, hr.Dataset[tuple[np.int64, np.int64]])
    assert_type(pairs.map(add), hr.Dataset[NDArray[np.int64]])
    assert_type(pairs.map(lambda index, number: (str(index), number)), hr.Dataset[tuple[str, Any]])
    assert_type(
        pairs.filter(lambda index, number: index > 3), hr.Dataset[tuple[np.int64, np.int64]]
    )


def filter_elements() -> None:
    numbers = hr.Dataset.range(10).filter(lambda x: x % 2 == 0).take_while(lambda x: x < 8)
    assert_type(numbers, hr.Dataset[np.int64])
    assert_type(numbers.unique().skip(1).take(2).get_single_element(), np.int64)
    numbers.filter()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def flatten_datasets() -> None:
    numbers = hr.Dataset.range(3)
    assert_type(numbers.flat_map(lambda n: hr.Dataset.range(int(n))), hr.Dataset[np.int64])
    assert_type(
        numbers.interleave(lambda n: hr.Dataset.range(int(n)).map(make_row), cycle_length=2),
        hr.Dataset[Row],
    )
    numbers.flat_map(make_features)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]


def draw_random_numbers() -> None:
    def add_noise(x: np.int64, rng: np.random.Generator) -> float:
        return float(x) + rng.normal()

    assert_type(hr.Dataset.range(3).random_map(add_noise, seed=1), hr.Dataset[Any])
    assert_type(hr.Dataset.range(3).random_map(lambda x, rng: x + rng.normal()), hr.Dataset[Any])


def accumulate() -> None:
    numbers = hr.Dataset.range(10)
    sums = numbers.scan(np.int64(0), lambda total, x: (total + x, total))
    assert_type(sums, hr.Dataset[Any])
    assert_type(numbers.reduce(np.int64(0), lambda total, x: total + x), Any)


# --- Batches, windows, order --------------------------------------------------------------------


def batch_elements() -> None:
    batches = hr.Dataset.range(10).map(make_features).batch(4, drop_remainder=True)
    assert_type(batches, hr.Dataset[Any])
    assert_type(batches.unbatch().rebatch(2).padded_batch(2, padding_values=0), hr.Dataset[Any])
    for batch in batches:
        print(batch["x"].shape)
    batches.batch("4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    batches.batch(4, drop_last=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def batch_sequences() -> None:
    words = hr.Dataset.from_random_access([np.arange(n) for n in range(5)])
    words.bucket_by_sequence_length(count_tokens, [2, 4], [8, 4, 2])
    words.batch_by_cost(64, count_tokens)
    assert_type(words.pack_sequences(16, strategy="best_fit"), hr.Dataset[Any])
    words.pack_sequences(16, strategy="worst_fit")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def zip_datasets() -> None:
    numbers, names = hr.Dataset.range(3), hr.Dataset.list_files("*.txt")
    pairs = hr.Dataset.zip(numbers, names)
    assert_type(pairs, hr.Dataset[tuple[np.int64, str]])
    assert_type(hr.Dataset.zip((numbers, names)), hr.Dataset[tuple[np.int64, str]])
    assert_type(hr.Dataset.zip({"number": numbers, "name": names}), hr.Dataset[Any])
    assert_type(numbers.concatenate(names), hr.Dataset[np.int64 | str])


def mix_datasets() -> None:
    first, second = hr.Dataset.range(3), hr.Dataset.counter(7)
    mixed = hr.Dataset.sample_from_datasets([first, second], weights=[0.3, 0.7], seed=1)
    assert_type(mixed, hr.Dataset[Any])


def make_windows() -> None:
    windows = hr.Dataset.range(10).window(3, shift=1, drop_remainder=True)
    assert_type(windows.flat_map(lambda window: window.batch(3)), hr.Dataset[Any])
    groups = hr.Dataset.range(10).group_by_window(
        make_features, lambda key, window: window.batch(2), window_size=2
    )
    assert_type(groups, hr.Dataset[Any])
    for window in windows:
        print(list(window))


def set_the_order() -> None:
    numbers = hr.Dataset.range(10).shuffle(10, seed=1).repeat(2).shard(2, 0).cache().prefetch(2)
    assert_type(numbers, hr.Dataset[np.int64])
    assert_type(numbers.cardinality(), int)
    numbers.shuffle()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def apply_transformations() -> None:
    def keep_even(dataset: hr.Dataset[np.int64]) -> hr.Dataset[np.int64]:
        return dataset.filter(lambda x: x % 2 == 0)

    assert_type(hr.Dataset.range(3).apply(keep_even), hr.Dataset[np.int64])
    hr.Dataset.range(3).map(make_row).apply(keep_even)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def set_options() -> None:
    options = hr.Options(seed=1)
    options.deterministic = False
    options.auto_shard_policy = hr.distribute.AutoShardPolicy.DATA
    assert_type(hr.Dataset.range(3).with_options(options), hr.Dataset[np.int64])
    assert_type(hr.Dataset.range(3).options().seed, int | None)
    hr.Options(sed=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# --- Reading ------------------------------------------------------------------------------------


def iterate() -> None:
    rows = hr.Dataset.range(3).map(make_row)
    with rows.iterate(progress=True, stats=True) as iterator:
        assert_type(iterator, hr.DatasetIterator[Row])
        assert_type(next(iterator).label, np.int64)
        assert_type(iterator.get_next(), Row)
        assert_type(iterator.get_next_as_optional().get_value(), Row)
        assert_type(iterator.stats(), hr.IteratorStats)
        assert_type(iterator.stats().seconds, float)
    rows[0]


def save_iterator_states() -> None:
    iterator = iter(hr.Dataset.range(3))
    state = iterator.get_state()
    assert_type(state, dict[str, Any])
    iterator.set_state(state)
    iterator.load_state_dict(iterator.state_dict())
    iterator.set_state("state")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def save_datasets(path: str) -> None:
    hr.Dataset.range(3).save(path)
    assert_type(hr.Dataset.load(path), hr.Dataset[Any])
    assert_type(hr.Dataset.range(3).snapshot(path), hr.Dataset[Any])


def use_a_vocabulary(words: hr.Dataset[str]) -> None:
    lookup = hr.Lookup.from_dataset(words, max_size=100)
    assert_type(lookup, hr.Lookup)
    assert_type(words.map(lookup), hr.Dataset[Any])
    assert_type(lookup.size, int)


def parse_records(path: str) -> None:
    with hr.io.TFRecordWriter(path) as writer:
        writer.write(hr.io.encode_example({"x": np.arange(3)}))
    features = {"x": hr.io.FixedLenFeature((3,), np.int64)}
    rows = hr.TFRecordDataset(path).map(lambda record: hr.io.parse_example(record, features))
    for row in rows:
        print(row["x"])
    hr.io.read_example(path)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


# --- Data service -------------------------------------------------------------------------------


def distribute_a_dataset() -> None:
    with hr.service.LocalCluster(num_workers=2, max_workers=8) as cluster:
        assert_type(cluster.target, str)
        numbers = hr.Dataset.range(10).apply(
            hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target)
        )
        assert_type(numbers, hr.Dataset[np.int64])
        cluster.add_worker()
        cluster.kill_worker(0)
    hr.service.distribute("distributed", "localhost:1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    hr.service.LocalCluster(workers=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def share_a_registered_dataset(service: str) -> None:
    dataset_id = hr.service.register_dataset(service, hr.Dataset.range(10))
    assert_type(dataset_id, str)
    dataset = hr.service.from_dataset_id(
        "distributed_epoch", service, dataset_id, job_name="training", visitation="at_least_once"
    )
    assert_type(dataset, hr.Dataset[Any])
    assert_type(hr.service.delivery_report(dataset), dict[str, int])


def read_ordered(service: str) -> None:
    hr.service.distribute(
        "parallel_epochs",
        service=("tcp", service),
        job_name="training",
        consumer_index=0,
        num_consumers=2,
        ordered=True,
        cost_fn=count_tokens,
        cross_trainer_cache=None,
    )
    hr.service.distribute("parallel_epochs", service, target_workers="NEAR")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def start_servers() -> None:
    config = hr.service.DispatcherConfig(port=5050, work_dir="journal", fault_tolerant_mode=True)
    with hr.service.DispatchServer(config) as dispatcher:
        address = dispatcher.target.split("://")[1]
        worker = hr.service.WorkerServer(hr.service.WorkerConfig(dispatcher_address=address))
        assert_type(dispatcher.num_workers(), int)
        worker.drain(timeout=10.0)
        worker.stop()
    hr.service.WorkerConfig()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def save_with_workers(service: str) -> None:
    save = hr.service.distributed_save(hr.Dataset.range(10), "numbers", service)
    save.wait(timeout=60.0)
    assert_type(save.progress().elements, int)


def run_in_processes() -> None:
    hr.Dataset.range(3).map(make_features).in_processes(2).ignore_errors(limit=3)


# --- Strategies, variables, coordinator ---------------------------------------------------------


def train_on_replicas() -> None:
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    assert_type(strategy.num_replicas_in_sync, int)
    dataset = strategy.distribute_dataset(hr.Dataset.range(8).batch(4))
    assert_type(dataset, hr.distribute.DistributedDataset)

    def step(batch: NDArray[Any]) -> Any:
        context = hr.distribute.get_replica_context()
        assert context is not None
        return context.all_reduce(hr.distribute.ReduceOp.SUM, batch.sum())

    for batch in dataset:
        results = strategy.run(step, args=(batch,))
        print(strategy.reduce("mean", results, axis=None), strategy.local_results(results))
    hr.distribute.MirroredStrategy(framework="tensorflow")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def make_input_per_worker(strategy: hr.distribute.MultiWorkerMirroredStrategy) -> None:
    def make_dataset(context: hr.distribute.InputContext) -> hr.Dataset[np.int64]:
        size = context.get_per_replica_batch_size(64)
        numbers = hr.Dataset.range(1000)
        return numbers.shard(context.num_input_pipelines, context.input_pipeline_id).take(size)

    strategy.distribute_datasets_from_function(make_dataset)
    strategy.distribute_datasets_from_function(count_up)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def use_variables(strategy: hr.distribute.ParameterServerStrategy) -> None:
    with strategy.scope():
        weights = hr.Variable(np.zeros((8, 2)), name="weights")
    assert_type(weights, hr.Variable)
    assert_type(weights.shape, tuple[int, ...])
    weights.assign_add(np.ones((8, 2)))
    weights.scatter_sub(np.array([1, 2]), np.ones((2, 2)))
    print(weights.read() + 1, weights.gather([3]), np.asarray(weights))
    optimizer = hr.optimizers.Adam(learning_rate=0.01, clipnorm=1.0)
    optimizer.apply_gradients([(hr.IndexedSlices(np.ones((1, 2)), [3]), weights)])
    assert_type(optimizer.iterations, int)
    hr.optimizers.SGD(lr=0.1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def schedule_steps() -> None:
    with hr.distribute.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(
            cluster.cluster_resolver,
            hr.distribute.partitioners.MinSizePartitioner(max_shards=2),
            mode="sync",
        )
        with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
            dataset = coordinator.create_per_worker_dataset(lambda: hr.Dataset.range(8).batch(2))
            value = coordinator.schedule(next, args=(iter(dataset),), retries=2)
            assert_type(value, hr.coordinator.RemoteValue)
            coordinator.join(timeout=60.0)
            print(value.fetch(), coordinator.fetch([value]), value.status)
            coordinator.schedule(value)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def use_checkpoints(weights: hr.Variable) -> None:
    checkpoint = hr.Checkpoint(weights=weights, optimizer=hr.optimizers.SGD(0.1))
    assert_type(checkpoint.save("checkpoint"), str)
    checkpoint.restore("checkpoint").assert_consumed()
    with hr.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3) as manager:
        assert_type(manager.latest_checkpoint, str | None)
        manager.save(checkpoint_number=1)
    for path in hr.checkpoints_iterator("checkpoints", timeout=1.0):
        assert_type(path, str)
    hr.Checkpoint(weights)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def use_embedding_tables() -> None:
    table = hr.EmbeddingTable(16, name="words", initializer=hr.initializers.Normal(stddev=0.1))
    assert_type(table.lookup([1, 2]), NDArray[Any])
    accuracy = hr.metrics.Accuracy()
    accuracy.update_state(np.array([1, 0]), np.array([1, 1]))
    assert_type(accuracy.result(), np.float64)
    hr.EmbeddingTable(16)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# --- Frameworks and engines ---------------------------------------------------------------------


def read_with_torch() -> None:
    loader = hr.torch.loader(hr.Dataset.range(8).batch(4), device="cpu", prefetch=1)
    assert_type(loader, hr.torch.Loader)
    for batch in loader:
        print(batch + 1)
    loader.load_state_dict(loader.state_dict())
    data = torch.utils.data.TensorDataset(torch.zeros(3))
    assert_type(hr.torch.from_torch(data), hr.Dataset[Any])


def read_with_jax() -> None:
    with hr.jax.device_iterator(hr.Dataset.range(8).batch(4), prefetch=1) as iterator:
        assert_type(iterator, hr.jax.DeviceIterator)
        iterator.set_state(iterator.get_state())
        for batch in iterator:
            print(batch + 1)
    hr.jax.device_iterator(hr.Dataset.range(8), remainder="keep")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def train_with_keras(model: keras.Model, strategy: hr.distribute.Strategy) -> None:
    rows = hr.Dataset.from_tensor_slices((np.zeros((8, 2)), np.zeros(8))).batch(4)
    distributed = hr.keras.distribute(model, strategy)
    distributed.fit(rows, epochs=2)  # pyright: ignore[reportUnknownMemberType] - Keras has no types
    assert_type(hr.keras.dataset(rows), hr.keras.KerasDataset)
    assert_type(hr.keras.adapter(rows).num_batches, int | None)


def connect_to_ray() -> None:
    with hr.ray.DataCluster(min_workers=1, max_workers=4) as cluster:
        assert_type(cluster.distribute(hr.Dataset.range(8)), hr.Dataset[Any])
        assert_type(cluster.target, str)


# --- Errors -------------------------------------------------------------------------------------


def handle_errors() -> None:
    try:
        hr.Dataset.range(3).batch(3).get_single_element()
    except hr.errors.UserFunctionError as error:
        assert_type(error.position, int)
    except (hr.errors.OutOfRangeError, hr.errors.UnavailableError) as error:
        print(error.args)
    raise hr.errors.UnknownError  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

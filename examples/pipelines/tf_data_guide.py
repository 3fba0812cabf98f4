"""The steps of a guide to tf.data, with Headrace's names: they are the same but for `hr`."""

import pathlib

import numpy as np
from sample_data import new_directory, ratings, text_files

import headrace as hr

# Sources: arrays, generators, files.
pairs = hr.Dataset.from_tensor_slices({"a": np.arange(4), "b": np.ones((4, 2), np.float32)})
print(pairs.element_spec)
total = hr.Dataset.range(10).reduce(0, lambda state, x: state + x)
assert total == 45


def series(stop):
    for length in range(stop):
        yield length, np.arange(length)


signature = (hr.ArraySpec((), np.int64), hr.ArraySpec((None,), np.int64))
ragged = hr.Dataset.from_generator(series, args=[8], output_signature=signature)
padded = ragged.padded_batch(4, padded_shapes=((), (None,)))
assert [numbers.shape for _, numbers in padded] == [(4, 3), (4, 7)]
lines = hr.TextLineDataset(list(map(str, text_files())))
interleaved = hr.Dataset.from_tensor_slices(list(map(str, text_files()))).interleave(
    hr.TextLineDataset, cycle_length=2, block_length=3
)
print(next(iter(interleaved)), sum(1 for _ in lines))
liked = hr.CsvDataset(ratings()).filter(lambda row: row["liked"] == 1)
print(next(iter(liked.batch(5)))["item"])
directory = new_directory()
for number in range(3):
    (directory / f"{number}.txt").write_bytes(b"%d" % number)
files = hr.Dataset.list_files(f"{directory}/*.txt", shuffle=False)
contents = files.map(lambda name: pathlib.Path(name).read_bytes())
assert list(contents) == [b"0", b"1", b"2"]

# Batches, epochs, shuffles.
numbers = hr.Dataset.range(100)
pair = hr.Dataset.zip((numbers, hr.Dataset.range(0, -100, -1)))
increasing, decreasing = next(iter(pair.batch(4)))
assert decreasing.tolist() == [0, -1, -2, -3]
shuffled = hr.Dataset.zip((hr.Dataset.counter(), numbers)).shuffle(buffer_size=20).batch(10)
assert max(count for count, _ in shuffled for count in count[:1]) < 100
assert len(list(numbers.shuffle(10).batch(30).repeat(2))) == 8

# Elements: preprocessing, windows, imbalanced classes.
dense = numbers.batch(15, drop_remainder=True).map(lambda batch: (batch[:-5], batch[-5:]))
assert [len(labels) for _, labels in dense] == [5] * 6
windows = numbers.window(10, shift=5, drop_remainder=True).flat_map(lambda window: window.batch(10))
assert next(iter(windows.skip(1))).tolist() == list(range(5, 15))
rare = numbers.map(lambda x: (x, int(x % 10 == 0))).repeat(20)
balanced = rare.rejection_resample(lambda x, label: label, target_dist=[0.5, 0.5], seed=1)
labels = [label for label, _ in balanced]
assert 0.4 < np.mean(labels) < 0.6
by_class = [rare.filter(lambda x, y, wanted=wanted: y == wanted) for wanted in (0, 1)]
mixed = hr.Dataset.sample_from_datasets(by_class, [0.5, 0.5], seed=1)
print(np.mean([label for _, label in mixed.take(200)]))

# States, and the end of errors.
iterator = iter(numbers)
assert int(next(iterator)) == 0
state = iterator.get_state()
assert int(next(iterator)) == 1
iterator.set_state(state)
assert int(next(iterator)) == 1
inverse = hr.Dataset.from_tensor_slices([1, 0, 2]).map(lambda x: 2 // int(x)).ignore_errors()
assert list(inverse) == [2, 1]
assert list(hr.Dataset.from_tensor_slices([3, 1, 3]).unique()) == [3, 1]

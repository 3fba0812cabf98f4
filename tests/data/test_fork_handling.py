"""A forked child continues its parent's iterator independently."""

from __future__ import annotations

import subprocess
import sys

import pytest

import headrace as hr

PROGRAM = """
import os, sys
import headrace as hr

Dataset = hr.Dataset

def opaque(x):
    return x if x >= 0 else 0

dataset = {dataset}
want = [int(x) for x in dataset]
iterator = iter(dataset)
got = [int(next(iterator)) for _ in range(7)]
{before}
child = os.fork()
rest = [int(x) for x in iterator]
if child == 0:
    os._exit(0 if got + rest == want else 3)
assert got + rest == want, (got + rest, want)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
"""

DATASETS = {
    "prefetch": "Dataset.range(200).map(opaque).prefetch(4)",
    "a map with threads": "Dataset.range(200).map(opaque, num_parallel_calls=3)",
    "an interleave with threads": (
        "Dataset.range(20).interleave(lambda x: Dataset.range(9), num_parallel_calls=2)"
    ),
    "no threads": "Dataset.range(200).shuffle(20, 1, False).map(opaque).batch(1).unbatch()",
    "lines of a file": "hr.TextLineDataset([sys.argv[1]]).map(int)",
}


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", DATASETS)
def test_parent_and_child_both_read_the_rest(name, tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{n}\n" for n in range(40_000)))
    result = run(PROGRAM.format(dataset=DATASETS[name], before=""), str(path))
    assert (result.returncode, result.stderr) == (0, "")


ON_ANOTHER_THREAD = """
import os, threading
import headrace as hr

kept, reads, ended = threading.local(), threading.Event(), threading.Event()

def read():
    kept.iterator = iter(hr.Dataset.range(200).map(lambda x: abs(x)).prefetch(4))
    next(kept.iterator)
    reads.set()
    ended.wait(60)
    assert [int(x) for x in kept.iterator] == list(range(1, 200))

thread = threading.Thread(target=read)
thread.start()
reads.wait(60)
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ended.set()
thread.join()
"""


def test_child_closes_no_resource_of_another_parent_thread():
    result = run(ON_ANOTHER_THREAD)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_iterator_that_was_closed_before_the_fork_stays_closed():
    program = PROGRAM.format(dataset="Dataset.range(9)", before="iterator.close(); want = got")
    result = run(program)
    assert (result.returncode, result.stderr) == (0, "")


FORKED_INSIDE = """
import os
import headrace as hr

parent = os.getpid()

def forking(x):
    if x == 5 and os.getpid() == parent:
        child = os.fork()
        {in_the_child}
    return int(x)

dataset = {dataset}
total = sum(int(x) for x in dataset)
os.write(1, f"{{total}} {{os.getpid() == parent}}\\n".encode())  # at once: two processes write
if os.getpid() == parent:
    print(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
"""

ON_THREADS = [
    "hr.Dataset.range(10).map(forking, num_parallel_calls=2)",
    "hr.Dataset.range(10).map(lambda x: forking(x)).prefetch(2)",
    "hr.Dataset.range(10).interleave(lambda x: hr.Dataset.from_tensors(x).map(forking), "
    "num_parallel_calls=2)",
]


@pytest.mark.parametrize("dataset", ON_THREADS)
def test_child_forked_in_a_threads_function_ends_with_an_error_on_return(dataset):
    result = run(FORKED_INSIDE.format(dataset=dataset, in_the_child="pass"))
    assert result.stdout.split() == ["45", "True", "1"]
    assert "was forked inside the function" in result.stderr
    assert "os._exit" in result.stderr


@pytest.mark.parametrize("dataset", ON_THREADS)
def test_child_that_exits_inside_the_function_exits_normally(dataset):
    ends = "child or os._exit(sum(map(int, '123')))"
    result = run(FORKED_INSIDE.format(dataset=dataset, in_the_child=ends))
    assert (result.stdout.split(), result.stderr) == (["45", "True", "6"], "")


def test_child_forked_in_a_function_on_the_consumer_thread_continues():
    dataset = "hr.Dataset.range(10).map(lambda x: forking(x))"
    result = run(FORKED_INSIDE.format(dataset=dataset, in_the_child="pass"))
    assert sorted(result.stdout.split()) == ["0", "45", "45", "False", "True"]
    assert result.stderr == ""


def test_child_forked_in_a_function_opens_its_own_files(tmp_path):
    path = tmp_path / "records"
    with hr.io.TFRecordWriter(path) as writer:
        for number in range(3000):
            writer.write(str(number).encode() * 100)
    dataset = f"hr.TFRecordDataset({str(path)!r}).map(lambda x: forking(int(x[:1])))"
    program = FORKED_INSIDE.replace("x == 5", "x == 5 and not seen.append(0) and len(seen) == 1")
    result = run("seen = []\n" + program.format(dataset=dataset, in_the_child="pass"))
    total = str(sum(int(str(number)[0]) for number in range(3000)))
    assert result.stderr == ""
    assert sorted(result.stdout.split()) == sorted(["0", total, total, "False", "True"])

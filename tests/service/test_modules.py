"""Modules travel with a dataset, or are imported by workers at their start."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, UserFunctionError
from headrace.plan.serialize import dump_plan, load_plan
from headrace.service import (
    LocalCluster,
    WorkerConfig,
    WorkerServer,
    distribute,
    distributed_save,
    from_dataset_id,
    register_dataset,
)
from headrace.service.by_value import check_modules, dump_with, pickling_by_value
from headrace.service.worker.preloading import preload
from tests.service.reading import numbers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that is on the import path of this process, but not of the workers."""
    before = set(sys.modules)
    (tmp_path / "travelling").mkdir()
    write(tmp_path / "travelling" / "__init__.py", "from travelling.deep import more")
    write(
        tmp_path / "travelling" / "deep.py",
        """
        STEP = 10

        class Adder:
            def __init__(self, by): self.by = by
            def __call__(self, x): return x + self.by

        def more(x): return Adder(STEP)(x)
        """,
    )
    write(tmp_path / "alone.py", "from travelling import deep\ndef twice(x): return 2 * x")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("travelling", "alone", "preloaded"):
            del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text), encoding="utf-8")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Return a cluster that was started before there was anything to import."""
    with LocalCluster(1, work_dir=tmp_path_factory.mktemp("journal")) as cluster:
        yield cluster


@pytest.mark.system
def test_a_package_is_sent_with_all_its_modules(folder: Path, cluster: LocalCluster) -> None:
    import travelling  # type: ignore[import-not-found]  # noqa: PLC0415

    data = hr.Dataset.range(3).map(travelling.more)
    for named in (travelling, "travelling"):
        read = data.apply(distribute("distributed_epoch", cluster.target, modules=[named]))
        assert sorted(numbers(read)) == [10, 11, 12]
    dataset_id = register_dataset(cluster.target, data, modules=[travelling])
    registered = from_dataset_id("distributed_epoch", cluster.target, dataset_id)
    assert sorted(numbers(registered)) == [10, 11, 12]
    distributed_save(data, folder / "d", cluster.target, modules=[travelling]).wait(40.0)
    assert sorted(numbers(hr.Dataset.load(folder / "d"))) == [10, 11, 12]
    assert cloudpickle.list_registry_pickle_by_value() == set()


@pytest.mark.system
def test_a_package_missing_on_the_worker_is_named(cluster: LocalCluster) -> None:
    def uses(x: int) -> int:
        import no_such_package  # type: ignore[import-not-found] # noqa: PLC0415

        return int(no_such_package.more(x))

    read = hr.Dataset.range(3).map(uses).apply(distribute("distributed_epoch", cluster.target))
    words = r"no_such_package'; it is not installed on the worker: .*--preload .*`modules="
    with pytest.raises(UserFunctionError, match=words), iter(read) as reader:
        next(reader)


@pytest.mark.system
def test_functions_of_a_script_work_in_processes_that_it_spawns(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
        import multiprocessing

        import headrace as hr
        from headrace.service import distribute

        STEP = 10

        class Adder:
            def __call__(self, x): return x + STEP

        def more(x): return Adder()(x)

        def read(address):
            data = hr.Dataset.range(3).map(more).apply(distribute("distributed_epoch", address))
            assert sorted(map(int, data)) == [10, 11, 12]

        if __name__ == "__main__":
            with hr.service.LocalCluster(processes=True) as cluster:
                context = multiprocessing.get_context("spawn")
                child = context.Process(target=read, args=(cluster.target,))
                child.start()
                child.join()
                raise SystemExit(child.exitcode)
        """,
    )
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_a_module_missing_on_workers_is_an_error_with_the_fix(
    folder: Path, cluster: LocalCluster
) -> None:
    import travelling  # noqa: PLC0415

    data = hr.Dataset.range(3).map(travelling.more)
    read = data.apply(distribute("distributed_epoch", cluster.target))
    with (
        iter(read) as reader,
        pytest.raises(FailedPreconditionError, match=r'modules=\["travelling"\]'),
    ):
        next(reader)


@pytest.mark.parametrize(
    ("modules", "kind", "text"),
    [
        ("travelling", TypeError, "must be a list of modules"),
        (sys, TypeError, "must be a list of modules"),
        (None, TypeError, "must be a list of modules or module names, got None"),
        ([3], TypeError, r"`modules\[0\]` must be a module or a module name, got 3"),
        (["json", 3], ValueError, r"`modules\[0\]` is 'json', which is installed on every worker"),
        ([hr.io], ValueError, "installed on every worker"),
        (["no_such_module"], ValueError, "No module named 'no_such_module'"),
    ],
)
def test_invalid_modules_are_rejected(modules: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        distribute("parallel_epochs", "127.0.0.1:1", modules=modules)


def test_a_module_that_cannot_be_pickled_is_named_and_not_the_dataset() -> None:
    holder = types.ModuleType("holder")
    holder.lock = threading.Lock()  # type: ignore[attr-defined]
    exec("def add(x):\n  with lock:\n    return x + 1", holder.__dict__)
    sys.modules["holder"] = holder
    try:
        plan = hr.Dataset.range(3).map(holder.add).plan
        assert load_plan(dump_plan(plan))
        with pytest.raises(FailedPreconditionError, match=r"`modules` \(holder\).*lock") as caught:
            dump_with(check_modules(["holder"]), plan)
        assert "RangeSource" not in str(caught.value)
        own = threading.Lock()
        with pytest.raises(FailedPreconditionError, match="refers to `own`, a lock"):
            dump_with(check_modules(["holder"]), hr.Dataset.range(3).map(lambda x: own).plan)
    finally:
        del sys.modules["holder"]


def test_modules_registered_before_stay_registered(folder: Path) -> None:
    import alone  # type: ignore[import-not-found]  # noqa: PLC0415

    travelling = alone.deep
    cloudpickle.register_pickle_by_value(alone)
    try:
        with pickling_by_value(check_modules([alone, travelling, travelling])):
            assert cloudpickle.list_registry_pickle_by_value() == {"alone", "travelling.deep"}
        assert cloudpickle.list_registry_pickle_by_value() == {"alone"}
        with pytest.raises(KeyError), pickling_by_value((travelling,)):
            raise KeyError
        assert cloudpickle.list_registry_pickle_by_value() == {"alone"}
    finally:
        cloudpickle.unregister_pickle_by_value(alone)


def test_an_unpicklable_module_is_named(folder: Path, cluster: LocalCluster) -> None:
    import alone  # noqa: PLC0415

    alone.lock = threading.Lock()
    alone.locked = eval("lambda x: lock and x", alone.__dict__)
    data = hr.Dataset.range(3).map(alone.locked)
    with pytest.raises(FailedPreconditionError, match="`lock`"):
        data.apply(distribute("parallel_epochs", cluster.target, modules=[alone]))


# --- preload ------------------------------------------------------------------------------------


def test_a_file_is_imported_under_its_own_name(folder: Path) -> None:
    write(folder / "preloaded.py", "VALUE = []\n")
    path = str(folder / "preloaded.py")
    preload(path)
    found = sys.modules["preloaded"]
    assert found.VALUE == []
    preload(path)
    assert sys.modules["preloaded"] is found
    preload("alone")
    assert "alone" in sys.modules


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module", "No module named"),
        ("/nowhere/thing.py", "does not exist"),
        ("/nowhere/json.py", "another module named 'json' is already imported"),
    ],
)
def test_a_failed_import_is_named(name: str, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        preload(name)
    assert "thing" not in sys.modules


def test_a_file_that_raises_is_removed_from_sys_modules(folder: Path) -> None:
    write(folder / "preloaded.py", "raise ImportError('not today')")
    with pytest.raises(ImportError, match="not today"):
        preload(str(folder / "preloaded.py"))
    assert "preloaded" not in sys.modules


@pytest.mark.system
def test_workers_import_the_preload_modules(folder: Path) -> None:
    write(folder / "preloaded.py", "def half(x): return x // 2")
    path = str(folder / "preloaded.py")
    preload(path)
    data = hr.Dataset.range(4).map(sys.modules["preloaded"].half)
    with LocalCluster(1, preload=(path,), environment={"PYTHONSAFEPATH": "1"}) as cluster:
        read = data.apply(distribute("distributed_epoch", cluster.target))
        assert sorted(numbers(read)) == [0, 0, 1, 1]


def test_a_worker_of_this_process_preloads_too(folder: Path, cluster: LocalCluster) -> None:
    write(folder / "preloaded.py", "")
    address = cluster.target.removeprefix("tcp://")
    with WorkerServer(WorkerConfig(address, preload=[str(folder / "preloaded.py")])):
        assert "preloaded" in sys.modules
    with pytest.raises(ImportError, match="no_such_module"):
        WorkerServer(WorkerConfig(address, preload=["no_such_module"]))

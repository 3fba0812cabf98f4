"""Tests of the package layers, of package docstrings, and of the cost of `import headrace`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "headrace"

OPTIONAL = {
    "array_record",
    "cv2",
    "grain",
    "jax",
    "keras",
    "kubernetes",
    "lz4",
    "ml_dtypes",
    "obstore",
    "orjson",
    "pandas",
    "pyarrow",
    "ray",
    "scipy",
    "sklearn",
    "starlette",
    "tensorboard",
    "tensorflow",
    "torch",
    "uvicorn",
    "zstandard",
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_imports_follow_the_layers():
    # In a separate process: the linter closes the log handlers. No cache: test processes
    # run side by side.
    lint = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr


#: Packages that may import compute frameworks.
FRAMEWORK_PACKAGES = {"frameworks", "adapters"}
FRAMEWORKS = {"grain", "jax", "keras", "torch"}


def test_each_optional_dependency_is_imported_by_one_file():
    importers = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        within = path.relative_to(PACKAGE)
        for name in OPTIONAL.intersection(imports(path)):
            if within.parts[0] not in FRAMEWORK_PACKAGES or name not in FRAMEWORKS:
                importers[name].add(str(within))
    assert {name: sorted(paths) for name, paths in importers.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in PACKAGE.rglob("*.py")}),
    ids=lambda folder: str(folder.relative_to(PACKAGE.parent)),
)
def test_every_package_has_a_docstring(folder):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert docstring


#: Packages whose docstring lists their files.
TABLES = [
    "adapters", "adapters/keras_training", "cli", "coordinator", "dashboard", "deploy",
    "distribute", "execution", "frameworks", "parameter_server", "process", "saved", "service",
    "service/client",
    "service/dispatcher", "service/messages", "service/modes", "service/modes/coordinated_reads",
    "service/modes/cross_trainer_cache", "service/modes/distributed_save", "service/modes/dynamic",
    "service/modes/no_sharding", "service/modes/ordered", "service/modes/static",
    "service/worker", "serving",
    "sources", "storage", "testing", "transport",
]  # fmt: skip


@pytest.mark.parametrize("package", TABLES)
def test_package_docstring_names_every_file(package: str) -> None:
    folder = PACKAGE / package
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted((files | packages) - set(re.findall(r"\w+", docstring or ""))) == []


#: Modules that are slow to import: third-party ones and packages of Headrace.
HEAVY = {
    "asyncio", "cloudpickle", "fsspec", "multiprocessing", "prometheus_client",
    "rich", "sqlite3", "ssl", "subprocess", "typer", "zmq",
    "headrace.cli", "headrace.process", "headrace.service", "headrace.testing",
    "headrace.transport",
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "loaded"),
    [
        ("import headrace", []),
        ("import headrace; headrace.Options; headrace.errors; dir(headrace)", []),
        ("import headrace; headrace.Dataset.range(4).save", []),
        ("import headrace; list(headrace.Dataset.range(4).map(abs).shuffle(4).batch(2))", []),
        ("import headrace; headrace.TextLineDataset('file:///a')", []),
        (
            "import headrace; headrace.service.ShardingPolicy.DYNAMIC",
            ["headrace.service", "headrace.transport", "zmq"],
        ),
    ],
)
def test_program_loads_only_the_modules_it_uses(program: str, loaded: list[str]) -> None:
    # numpy and msgspec are imported first, so that modules which they need do not count.
    text = (
        "import sys, numpy, msgspec\n"
        "before = set(sys.modules)\n"
        f"{program}\n"
        f"print(sorted(({HEAVY!r} & sys.modules.keys()) - before))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, timeout=60
    )
    assert (result.stderr, result.stdout) == ("", f"{loaded!r}\n")


def test_importing_headrace_loads_only_small_modules() -> None:
    text = "import sys, headrace; print(sorted(m for m in sys.modules if m.startswith('headrace')))"
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert result.stdout == "['headrace', 'headrace.lazy_imports', 'headrace.release']\n"


def test_importing_headrace_loads_nothing_heavy_and_starts_no_thread():
    program = (
        "import sys, threading, os\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "import headrace\n"
        f"print(sorted({OPTIONAL!r} & sys.modules.keys()), threading.active_count(),\n"
        "      [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')\n"
        "       if n not in before and os.path.exists(f'/proc/self/fd/{n}')])\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["[]", "1", "[]"]

"""Modules that are sent with a dataset: their functions and classes are pickled by value.

Names that a function uses from a module are looked up on the worker, by the module's name, unless
the module is sent. cloudpickle keeps a process-wide list of such modules; they are on it only while
one dataset is pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import cloudpickle

from headrace.errors import FailedPreconditionError
from headrace.plan.node import Node
from headrace.plan.serialize import dump_plan

__all__ = ["check_modules", "dump_with", "pickling_by_value"]

_lock = threading.RLock()


def check_modules(modules: Sequence[ModuleType | str]) -> tuple[ModuleType, ...]:
    """Return the modules to send; a package includes everything in it.

    Args:
        modules: Modules, or their names.

    Raises:
        TypeError: If an item is neither.
        ValueError: If no module has this name, or if it belongs to Python or Headrace.
    """
    if isinstance(modules, str | ModuleType) or not isinstance(modules, Iterable):
        raise TypeError(f"`modules` must be a list of modules or module names, got {modules!r}")
    return tuple(_check_module(index, each) for index, each in enumerate(modules))


def _check_module(index: int, module: object) -> ModuleType:
    if isinstance(module, str):
        try:
            module = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"`modules[{index}]`: cannot import {module!r}: {error}") from error
    if not isinstance(module, ModuleType):
        raise TypeError(f"`modules[{index}]` must be a module or a module name, got {module!r}")
    name = module.__name__
    top_level = name.partition(".")[0]
    if top_level in sys.stdlib_module_names or top_level == "headrace":
        raise ValueError(
            f"`modules[{index}]` is {name!r}, which is installed on every worker; remove it"
        )
    if name not in sys.modules:
        raise ValueError(
            f"`modules[{index}]` is the module {name!r}, which was not imported under this name; "
            "import it under its own name"
        )
    return module


_SCRIPT = "__mp_main__"
"""Name of the user's script in a process spawned by multiprocessing. Workers have no such module,
and cloudpickle pickles only `__main__` by value.
"""


def _spawned_script() -> list[ModuleType]:
    module = sys.modules.get(_SCRIPT)
    # In other processes it is an alias of `__main__`.
    return [module] if module is not None and module.__name__ == _SCRIPT else []


@contextlib.contextmanager
def pickling_by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Context manager that pickles these modules, and the script of a spawned process, by value."""
    with _lock:
        registered = cloudpickle.list_registry_pickle_by_value()
        unique = dict.fromkeys([*modules, *_spawned_script()])
        new = [module for module in unique if module.__name__ not in registered]
        try:
            for module in new:
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            # A module registered by the user stays registered.
            for module in new:
                with contextlib.suppress(ValueError):
                    cloudpickle.unregister_pickle_by_value(module)


def dump_with(modules: Sequence[ModuleType], plan: Node) -> bytes:
    """Return the pickled plan, including these modules.

    Raises:
        FailedPreconditionError: If something cannot be pickled; the message tells whether it
            belongs to the dataset or to one of the modules.
    """
    try:
        with pickling_by_value(modules):
            return dump_plan(plan)
    except FailedPreconditionError as error:
        if modules and _can_pickle(plan):
            names = ", ".join(module.__name__ for module in modules)
            raise FailedPreconditionError(
                f"cannot pickle the dataset together with `modules` ({names}): "
                f"{error.__cause__ or error}. List only your own modules; workers import "
                "installed modules by name"
            ) from error
        raise


def _can_pickle(plan: Node) -> bool:
    try:
        dump_plan(plan)
    except FailedPreconditionError:
        return False
    return True

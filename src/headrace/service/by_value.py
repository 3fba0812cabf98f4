"""Modules that travel with a dataset: their functions and classes are pickled by value.

What a function looks up in a module is looked up on the worker, by the module's name, unless the
module travels with it. cloudpickle keeps a list of such modules for the whole process; they are on
it only while one dataset is pickled.
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

__all__ = ["by_value", "checked_modules", "dump_with"]

_one_at_a_time = threading.RLock()


def checked_modules(modules: Sequence[ModuleType | str]) -> tuple[ModuleType, ...]:
    """Return the modules that are to travel; a package stands for all that is in it.

    Args:
        modules: Modules, or their names.

    Raises:
        TypeError: One is neither.
        ValueError: There is no module of this name, or it is one of Python's own.
    """
    if isinstance(modules, str | ModuleType) or not isinstance(modules, Iterable):
        raise TypeError(f"`modules` must be a list of modules or their names, got {modules!r}")
    return tuple(_checked(place, each) for place, each in enumerate(modules))


def _checked(place: int, module: object) -> ModuleType:
    if isinstance(module, str):
        try:
            module = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"`modules[{place}]` is {module!r}: {error}") from error
    if not isinstance(module, ModuleType):
        raise TypeError(f"`modules[{place}]` must be a module or its name, got {module!r}")
    name = module.__name__
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "headrace":
        raise ValueError(f"`modules[{place}]` is {name!r}, which every worker has")
    if name not in sys.modules:
        raise ValueError(
            f"`modules[{place}]` is the module {name!r}, which was not imported by this name"
        )
    return module


_SCRIPT = "__mp_main__"
"""The name of the user's script in a process that multiprocessing spawned from it. Workers have no
such module, and cloudpickle pickles by value only what is in `__main__`."""


def _script() -> list[ModuleType]:
    module = sys.modules.get(_SCRIPT)
    # Elsewhere it is another name of `__main__`.
    return [module] if module is not None and module.__name__ == _SCRIPT else []


@contextlib.contextmanager
def by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Pickle these modules, and the script of a spawned process, by value until the end."""
    with _one_at_a_time:
        known = cloudpickle.list_registry_pickle_by_value()
        all_ = dict.fromkeys([*modules, *_script()])
        new = [module for module in all_ if module.__name__ not in known]
        try:
            for module in new:
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            # One that its user registered stays.
            for module in new:
                with contextlib.suppress(ValueError):
                    cloudpickle.unregister_pickle_by_value(module)


def dump_with(modules: Sequence[ModuleType], plan: Node) -> bytes:
    """Return the plan as bytes, with these modules in it.

    Raises:
        FailedPreconditionError: Something cannot be pickled; the message says whether it is the
            dataset's, or in one of the modules.
    """
    try:
        with by_value(modules):
            return dump_plan(plan)
    except FailedPreconditionError as error:
        if modules and _travels(plan):
            names = ", ".join(module.__name__ for module in modules)
            raise FailedPreconditionError(
                "this dataset cannot be sent with the modules that are to travel with it "
                f"(`modules`: {names}): {error.__cause__ or error}. Name modules of your own "
                "alone; what is installed on the workers travels by name"
            ) from error
        raise


def _travels(plan: Node) -> bool:
    try:
        dump_plan(plan)
    except FailedPreconditionError:
        return False
    return True

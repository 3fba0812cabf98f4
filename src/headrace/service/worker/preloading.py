"""Import of modules, by name or file, before a worker's first task."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

__all__ = ["preload"]


def preload(module: str) -> None:
    """Import a module.

    Args:
        module: Name of the module, or path of a Python file. The file becomes a module of the
            file's name, as if its folder were in `sys.path`.

    Raises:
        ImportError: If the module, or one that it imports, does not exist.
    """
    if not (module.endswith(".py") or os.sep in module):
        importlib.import_module(module)
        return
    path = os.path.abspath(module)
    name = os.path.splitext(os.path.basename(path))[0]
    known = sys.modules.get(name)
    if known is not None:
        if os.path.abspath(getattr(known, "__file__", None) or "") == path:
            return
        raise ImportError(f"another module named {name!r} is already imported")
    spec = importlib.util.spec_from_file_location(name, path)
    if not os.path.isfile(path) or spec is None or spec.loader is None:
        raise ImportError(f"Python file {path!r} does not exist")
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    try:
        spec.loader.exec_module(found)
    except BaseException:
        del sys.modules[name]
        raise

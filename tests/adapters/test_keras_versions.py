"""The table of Keras versions with which its private parts were tested."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib

from tests.test_package_layers import PACKAGE, ROOT


def tried_versions() -> list[str]:
    source = (PACKAGE / "adapters/keras_training/keras_internals.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TRIED_VERSIONS":
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    raise AssertionError("there is no table")


def test_the_installed_version_is_in_the_table() -> None:
    assert importlib.metadata.version("keras") in tried_versions()


def test_the_oldest_allowed_version_is_first_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [each for extra in project["optional-dependencies"].values() for each in extra]
    found = {each for each in needed if re.match("keras\\W", each)}
    assert found == {f"keras>={tried_versions()[0].removesuffix('.0')}"}

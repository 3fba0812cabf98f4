"""Packages that only one resolver needs."""

from __future__ import annotations

import json
import sys

import pytest

from headrace.cluster.resolver import load
from headrace.errors import FailedPreconditionError


def test_a_package_is_returned_with_its_module_imported():
    assert load("json.tool", needed_by="this test") is json
    assert "json.tool" in sys.modules


@pytest.mark.parametrize("module", ["ray", "torch.distributed", "kubernetes"])
def test_one_that_is_missing_is_named_with_who_needs_it_and_what_to_install(monkeypatch, module):
    package = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, module, None)
    words = rf"Resolver needs the package {package}, .*'headrace\[{package}\]', or else"
    with pytest.raises(FailedPreconditionError, match=words):
        load(module, needed_by="Resolver", instead=", or else")

"""The programs of the guides, and the examples in docstrings, that need Ray, on one Ray cluster."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

import headrace as hr
from headrace.transport.security import new_keys
from tests.ray.local_ray import ROOT, run_driver

RAY_PAGE = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```py\n(.*?)```", RAY_PAGE, re.DOTALL)


def test_all_programs_were_found():
    assert len(PROGRAMS) >= 5


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_of_the_ray_page_runs(ray, number):
    run_driver(PROGRAMS[number], seconds=300)  # Ray Train imports torch in each worker


@pytest.mark.parametrize("name", hr.ray.__all__)
def test_docstring_example_passes(ray, name):
    (example,) = doctest.DocTestFinder(recurse=False).find(
        getattr(hr.ray, name), name, module=False, globs={"hr": hr, "np": np}
    )
    result = doctest.DocTestRunner().run(example)
    assert result.attempted
    assert not result.failed


def test_program_of_the_clusters_page_runs(ray, tmp_path):
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    (program,) = [block for block in blocks if "RayClusterResolver" in block]
    keys = str(new_keys(tmp_path / "keys"))
    printed = run_driver(
        program.replace("/etc/headrace/keys", keys)
        + "import numpy as np\nwith strategy.scope():\n    weights = hr.Variable([1.0, 2.0])\n"
        "print(np.asarray(weights).tolist())\n"
    )
    assert "ClusterSpec" in printed
    assert "[1.0, 2.0]" in printed

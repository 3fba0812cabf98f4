"""Compares the renderer with Helm: python -m tests.deploy.compare_with_helm.

It is no test, because Helm is not a Python package. Run it after a change of the chart or renderer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import yaml

from tests.deploy.charts import CASES, objects, render


def by_name(each):
    return each["kind"], each["metadata"]["name"]


def helm_objects(case):
    """Return the objects that Helm renders for one of the sets of values."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as values:
        json.dump(CASES[case], values)
        values.flush()
        text = subprocess.run(
            ["helm", "template", "headrace", str(render.CHART), "--values", values.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    return sorted((each for each in yaml.safe_load_all(text) if each), key=by_name)


def main():
    differing = [case for case in CASES if helm_objects(case) != sorted(objects(case), key=by_name)]
    print(f"{len(CASES)} sets of values, different: {', '.join(differing) or 'none'}")
    return len(differing)


if __name__ == "__main__":
    sys.exit(main())

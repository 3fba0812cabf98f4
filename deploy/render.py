"""Renders the Helm chart without Helm, and writes the files that are made from it.

python deploy/render.py                      write deploy/kubernetes/*.yaml and the values table
python deploy/render.py --check              fail if one of these files is not up to date
python deploy/render.py --print [VALUES...]  print the objects, with values from these files
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from go_template import TemplateError, Templates

__all__ = ["CHART", "generated_files", "render_chart", "values_table"]

CHART = Path(__file__).parent / "helm" / "headrace"
_HEADER = "# Made from deploy/helm/headrace by `python deploy/render.py`.\n"


def render_chart(
    values: Mapping[str, Any] | None = None,
    *,
    release: str = "headrace",
    namespace: str = "default",
    chart: Path = CHART,
) -> dict[str, str]:
    """Return the text of each template that is not empty, by file name.

    Args:
        values: Values that differ from the chart's.
        release: Name of the release.
        namespace: Namespace of the release.
        chart: Directory of the chart.

    Raises:
        jsonschema.ValidationError: If the values do not match the chart's schema.
        TemplateError: If a template is wrong, or outside the supported subset.
    """
    merged = _merge(yaml.safe_load((chart / "values.yaml").read_text()), values or {})
    jsonschema.validate(merged, json.loads((chart / "values.schema.json").read_text()))
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    dot = {
        "Values": merged,
        "Release": {"Name": release, "Namespace": namespace, "Service": "Helm"},
        "Chart": {key[0].upper() + key[1:]: value for key, value in about.items()},
    }
    templates = Templates()
    paths = sorted((chart / "templates").iterdir())
    for path in paths:
        templates.add(path.name, path.read_text())
    texts = {p.name: templates.render(p.name, dot) for p in paths if p.suffix == ".yaml"}
    return {name: text.strip() + "\n" for name, text in texts.items() if text.strip()}


def _merge(defaults: Any, values: Any) -> Any:
    if not isinstance(defaults, Mapping) or not isinstance(values, Mapping):
        return values
    merged = {key: _merge(defaults.get(key), value) for key, value in values.items()}
    return {**defaults, **merged}


def values_table(chart: Path = CHART) -> str:
    """Return the Markdown table of the values that a comment `# --` describes."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    values = yaml.safe_load((chart / "values.yaml").read_text())
    parents: list[str] = []
    meaning = ""
    for line in (chart / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("# -- "):
            meaning = text.removeprefix("# -- ")
        elif text and not text.startswith(("#", "- ")):
            depth = (len(line) - len(line.lstrip())) // 2
            parents = [*parents[:depth], text.partition(":")[0]]
            if meaning:
                found = values
                for key in parents:
                    found = found[key]
                rows.append(f"| `{'.'.join(parents)}` | `{json.dumps(found)}` | {meaning} |")
            meaning = ""
    return "\n".join(rows) + "\n"


def generated_files() -> dict[Path, str]:
    """Return the content of each file that is made from the chart."""
    folder = Path(__file__).parent / "kubernetes"
    files = {folder / name: _HEADER + text for name, text in render_chart().items()}
    for kind in ("hpa", "keda"):
        text = render_chart({"autoscaling": {"type": kind}})["autoscaler.yaml"]
        files[folder / kind / "autoscaler.yaml"] = _HEADER + text
        files[folder / kind / "kustomization.yaml"] = _HEADER + yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1alpha1",
                "kind": "Component",
                "resources": ["autoscaler.yaml"],
                # An autoscaler sets the number itself.
                "patches": [
                    {
                        "target": {"kind": "Deployment", "name": "headrace-worker"},
                        "patch": json.dumps([{"op": "remove", "path": "/spec/replicas"}]),
                    }
                ],
            },
            sort_keys=False,
        )
    readme = CHART / "README.md"
    before, _, rest = readme.read_text().partition("<!-- values -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    files[readme] = f"{before}<!-- values -->\n{values_table()}<!-- end -->\n{after}"
    return files


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["--print"]:
        try:
            values: Any = {}
            for name in arguments[1:]:
                values = _merge(values, yaml.safe_load(Path(name).read_text()) or {})
            print("---\n".join(render_chart(values).values()), end="")
        except jsonschema.ValidationError as error:
            where = error.json_path.removeprefix("$").removeprefix(".") or "values"
            print(f"render.py: {where}: {error.message}", file=sys.stderr)
            return 1
        except (OSError, TemplateError, yaml.YAMLError) as error:
            print(f"render.py: {error}", file=sys.stderr)
            return 1
        return 0
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    files = generated_files()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(("not up to date: " if arguments else "written: ") + str(path), file=sys.stderr)
        if not arguments:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path])
    return int(bool(stale and arguments))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))

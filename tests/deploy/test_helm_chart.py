"""The chart: its objects match the Kubernetes API, its values the schema and the documentation."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys

import jsonschema
import pytest
import yaml

from tests.deploy.charts import CASES, NOT_VALIDATED, ROOT, check_object, objects, render

SCHEMA = json.loads((render.CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((render.CHART / "values.yaml").read_text())
each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_objects_match_the_api(case):
    for each in objects(case):
        check_object(each)
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", each["metadata"]["name"])
    names = [(each["kind"], each["metadata"]["name"]) for each in objects(case)]
    assert len(set(names)) == len(names)


def test_cases_use_all_kinds():
    kinds = {(each["apiVersion"], each["kind"]) for case in CASES for each in objects(case)}
    assert kinds >= NOT_VALIDATED
    assert len(kinds) == 9


def container(each):
    return each["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    "misspell",
    [
        lambda each: each["spec"].update(replica=2),
        lambda each: container(each).update(volume_mounts=container(each).pop("volumeMounts")),
        lambda each: container(each).update(volumemounts=container(each).pop("volumeMounts")),
        lambda each: container(each)["readinessProbe"]["httpGet"].pop("port"),
        lambda each: each["spec"].update(replicas="2"),
        lambda each: container(each)["securityContext"].update(runAsNonRot=True),
        lambda each: each.update(kind="Deploiment"),
    ],
)
def test_misspelt_field_is_found(misspell):
    each = copy.deepcopy(next(each for each in objects("default") if each["kind"] == "Deployment"))
    check_object(each)
    misspell(each)
    with pytest.raises(ValueError, match=r"validation error|not written|no model"):
        check_object(each)


def test_committed_files_are_up_to_date():
    for path, text in render.generated_files().items():
        assert path.read_text() == text, f"{path}: run `python deploy/render.py`"


def test_command_finds_a_file_that_is_not_up_to_date(tmp_path):
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    command = [sys.executable, "deploy/render.py", "--check"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    worker = tmp_path / "deploy" / "kubernetes" / "worker.yaml"
    worker.write_text(worker.read_text().replace("replicas: 2", "replicas: 3"))
    found = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert "worker.yaml" in found.stderr


def described(values, prefix=""):
    """Return the values in the table, and those below or above which one is."""
    rows = set(re.findall(r"^\| `([\w.]+)` \|", render.values_table(), re.MULTILINE))
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in rows:
            assert isinstance(value, dict), f"values.yaml has no comment `# --` for {name}"
            rows |= described(value, f"{name}.")
    return rows


def test_table_has_each_value():
    assert described(VALUES)
    assert render.values_table() in (render.CHART / "README.md").read_text()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"wroker": {}}, "wroker"),
        ({"worker": {"replica": 3}}, "replica"),
        ({"worker": {"replicas": "3"}}, "not of type 'integer'"),
        ({"worker": {"resources": {"requests": {"memory": "4 GB"}}}}, "does not match"),
        ({"autoscaling": {"type": "cpu"}}, "not one of"),
        ({"keys": {"serverSecret": ""}}, "does not match"),
        ({"worker": {"extraArgs": ["--tag", "a"]}}, "does not match"),
    ],
)
def test_wrong_values_are_refused(values, problem):
    with pytest.raises(jsonschema.ValidationError, match=problem):
        render.render_chart(values)


def test_hpa_requires_a_worker():
    with pytest.raises(ValueError, match=r"minReplicas must be at least 1"):
        render.render_chart({"autoscaling": {"type": "hpa", "minReplicas": 0}})


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_more_replicas_at_least_than_at_most_are_refused(kind):
    limits = {"type": kind, "minReplicas": 3, "maxReplicas": 3}
    assert "autoscaler.yaml" in render.render_chart({"autoscaling": limits})
    with pytest.raises(ValueError, match=r"minReplicas is 4 but .*maxReplicas, which is 3; "):
        render.render_chart({"autoscaling": {**limits, "minReplicas": 4}})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{worker: {replica: 3}}", "worker: Additional properties are not allowed ('replica' was"),
        ("{wroker: {}}", "values: Additional properties are not allowed ('wroker' was"),
        ("{autoscaling: {type: hpa, minReplicas: 0}}", "minReplicas must be at least 1"),
        ("worker: [", "expected the node content"),
        (None, "No such file or directory: 'values.yaml'"),
    ],
)
def test_command_reports_wrong_values_without_a_traceback(text, problem, tmp_path):
    if text is not None:
        (tmp_path / "values.yaml").write_text(text)
    command = [sys.executable, str(ROOT / "deploy" / "render.py"), "--print", "values.yaml"]
    found = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.startswith("render.py: ")
    assert problem in found.stderr
    assert "Traceback" not in found.stderr


def test_schema_lists_exactly_the_values():
    def compare(schema, values, name):
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        if schema.get("additionalProperties") is False:
            assert schema["required"] == [*values] or name.endswith("resources"), name
            for key, value in values.items():
                compare(schema["properties"][key], value, f"{name}.{key}")

    compare(SCHEMA, VALUES, "values")


def test_what_is_not_validated_is_marked():
    marked = [
        *(ROOT / "deploy" / "kubernetes" / "samples").glob("*.yaml"),
        ROOT / "deploy" / "kubernetes" / "keda" / "autoscaler.yaml",
        render.CHART / "templates" / "service-monitor.yaml",
    ]
    assert len(marked) == 4
    for path in marked:
        assert "Not validated: a " in path.read_text(), path
    for path in marked[:2]:
        (sample,) = yaml.safe_load_all(path.read_text())
        text = json.dumps(sample)
        assert '"headrace.client": "true"' in text, "admitted by the network policy"
        assert '"secretName": "headrace-client"' in text

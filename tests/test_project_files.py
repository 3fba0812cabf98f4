"""Files of the project for contributors: hooks, workflows and templates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import headrace as hr

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def load(path):
    return yaml.safe_load(path.read_text())


def make_targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(workflow):
    return [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_existing_make_targets(path):
    for command in commands(load(path)):
        program, target = command.split()
        assert program == "make"
        assert target in make_targets()


def test_the_workflows_check_and_test():
    found = {command for path in WORKFLOWS for command in commands(load(path))}
    assert found >= {"make check", "make test", "make test-all"}


def test_the_workflows_test_each_supported_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = [
        found[1]
        for classifier in project["classifiers"]
        if (found := re.search(r"Python :: (3\.\d+)$", classifier))
    ]
    matrix = load(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == supported
    assert project["requires-python"] == f">={supported[0]}"


def test_a_workflow_may_only_read_the_repository_and_publish():
    for path in WORKFLOWS:
        workflow = load(path)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            expected = {"id-token": "write"} if name == "publish" else None
            assert job.get("permissions") == expected


def test_the_chart_and_the_changelog_have_the_version_of_the_package():
    chart = load(ROOT / "deploy/helm/headrace/Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (hr.__version__, hr.__version__)
    kustomization = load(ROOT / "deploy/kubernetes/kustomization.yaml")
    assert [image["newTag"] for image in kustomization["images"]] == [hr.__version__]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", changelog, re.M)[0] == hr.__version__


def test_the_hooks_run_the_tools_of_make_check():
    check = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert check
    tools = set(re.findall(r"\$\(BIN\)/(\S+)", check[1]))
    hooks = load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks} == tools


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_an_issue_template_has_the_fields_that_github_requires(path):
    template = load(path)
    if path.name == "config.yml":
        assert set(template) == {"blank_issues_enabled"}
        return
    assert template["name"]
    assert template["description"]
    ids = [field["id"] for field in template["body"]]
    assert len(ids) == len(set(ids))
    for field in template["body"]:
        assert field["type"] in {"textarea", "dropdown", "input", "checkboxes"}
        assert field["attributes"]["label"]

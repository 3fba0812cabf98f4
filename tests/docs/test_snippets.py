"""Tests of README and the guides: code blocks, pictures, links, make targets and options."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from headrace.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "service").glob("*.md")),
    *sorted((ROOT / "docs" / "coming-from").glob("*.md")),
]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))  # run by test_tutorials.py
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.heavy
@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs(block: str, tmp_path: Path):
    script = tmp_path / "snippet.py"
    script.write_text(block)
    done = run(script)
    # Retry: threads of gloo may outlive `destroy_process_group` after DistributedDataParallel, and
    # crash the process if they free a tensor during interpreter exit.
    for _ in range(4):
        if not ("gloo" in block and "terminate called without an active exc" in done.stderr):
            break
        done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=script.parent,
        env={
            **os.environ,
            "TMPDIR": str(script.parent),
        },  # temporary files are deleted with the test
        check=False,
    )


def test_pages_have_code_blocks():
    assert len(BLOCKS) >= 15


def test_committed_picture_is_up_to_date():
    drawn = runpy.run_path(str(ROOT / "docs" / "architecture.py"))["draw"]()
    assert (ROOT / "docs" / "architecture.svg").read_text() == drawn, "run `make docs`"


def test_links_between_pages_resolve():
    for page in [*PAGES, *TUTORIALS, *DESIGN, *ROOT.glob("[AC]*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_linked_from_the_readme_or_the_service_page():
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= _linked("README.md")
    assert {f"service/{page.name}" for page in (ROOT / "docs" / "service").glob("*.md")} <= _linked(
        "docs/service.md"
    )


def _linked(page: str) -> set[str]:
    return set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()))


def test_make_targets_on_pages_exist_and_help_lists_all_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    in_help = set(re.findall(r'@echo "make ([a-z-]+)', makefile))
    named = {
        name
        for page in [*PAGES, *TUTORIALS, ROOT / "CONTRIBUTING.md"]
        for name in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert named <= targets
    assert in_help | {"help"} == targets


def test_command_line_options_on_pages_exist():
    text = "".join(page.read_text() for page in [*PAGES, *TUTORIALS])
    # Commands of other programs, which may continue on the next line.
    text = re.sub(
        r"^ {4}(?:git|helm|kubectl|podman|\(cd) (?:.*\\\n)*.*$", "", text, flags=re.MULTILINE
    )
    known = {
        option
        for command in get_command(app).commands.values()
        for parameter in command.params
        for option in parameter.opts
    }
    slurm = {"--cpus-per-task", "--kill-on-bad-exit", "--no-kill"}
    slurm |= {"--nodes", "--ntasks", "--signal"}
    torchrun = {"--standalone", "--nproc-per-node"}
    simulation = {"--mode"}  # python -m tests.simulation
    benchmarks = {"--device", "--out"}  # python -m benchmarks.accelerator
    system = {"--now", "--shm-size"}  # systemctl, docker
    # Options with underscores belong to other programs: `--xla_force_host_platform_device_count`.
    assert (
        set(re.findall(r"(?<![\w-])--[a-z][a-z-]+\b(?!_)", text))
        <= known | slurm | torchrun | simulation | benchmarks | system
    )

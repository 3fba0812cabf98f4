"""Tests of the tutorials: a reader who follows a page gets the output that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.tutorial import Tutorial, steps_of

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_gives_the_output_that_it_shows(page: Path, tmp_path: Path):
    Tutorial(page, tmp_path).run()


def follow(folder: Path, *lines: str) -> None:
    """Follow a page with one console block."""
    page = folder / "page.md"
    page.write_text("\n".join(["```console", *lines, "```"]))
    Tutorial(page, folder).run()


def test_wrong_output_of_a_command_is_reported(tmp_path: Path):
    with pytest.raises(AssertionError, match="the output was:\ntwo"):
        follow(tmp_path, "$ echo two", "one")


def test_measured_figures_and_dots_match_other_output(tmp_path: Path):
    follow(tmp_path, "$ echo '3.2 s   12%'; echo worker at 17", "1.0 s 5%", "worker at ...")


def test_failure_of_a_program_in_a_terminal_is_reported(tmp_path: Path):
    with pytest.raises(AssertionError, match="one: ready"):
        follow(tmp_path, "(one) $ sh -c 'echo ready; exit 3'", "ready")


def test_output_of_a_terminal_continues_in_a_later_step(tmp_path: Path):
    command = "(one) $ sh -c 'echo ready; read line < pipe; echo $line'"
    later = ("$ echo go > pipe", "(one)", "go")
    follow(tmp_path, "$ mkfifo pipe", command, "ready", *later)


def test_keys_and_continued_lines_are_parsed():
    page = "```console\n(a@node1) $ sleep \\\n      60\n(a@node1) Ctrl-C\nend\n```\n"
    first, second = steps_of(page)
    assert (first.terminal, first.command) == ("a@node1", "sleep 60")
    assert (second.key, second.text) == ("C", "end\n")

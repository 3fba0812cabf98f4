"""Which tests cover the rows of the catalogues: `python -m tests.docs.catalogue` prints them.

A test names its rows in a mark, as `@pytest.mark.catalogue("AS1", "3.12.1-4")`. Marks are read from
the source, so no test module is imported. `tests/docs/CATALOGUE.md` has the other rows.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.catalogue_rows import COUNTS, NAMES

TESTS = Path(__file__).parents[1]
PAGE = TESTS / "docs" / "CATALOGUE.md"
WITHOUT_A_TEST = "Rows without a test"
DIFFERENT = "Rows where Headrace differs"


def row(section: str, number: int) -> str:
    return f"{section}{number}" if section.isalpha() else f"{section}.{number}"


def all_rows() -> dict[str, str]:
    """Map each row to the name that the catalogue has for it, or to an empty string."""
    rows = {row(section, n + 1): "" for section, count in COUNTS.items() for n in range(count)}
    section, number = "", 0
    for word in NAMES.split():
        if word[0].isdigit():
            section, number = word, 0
        else:
            number += 1
            rows[row(section, number)] = word
    return rows


def expand(rows: str) -> list[str]:
    """Expand a row ("AS1") or a range of rows ("AS1-3") into a list of rows."""
    match = re.fullmatch(r"([A-Z]+|\d+\.\d+\.)(\d+)(?:-(\d+))?", rows)
    if match is None:
        raise ValueError(f'{rows!r} is not a row, as "AS1", nor a range of rows, as "3.12.1-4"')
    section, first, last = match.groups()
    return [f"{section}{number}" for number in range(int(first), int(last or first) + 1)]


def marked_tests() -> dict[str, list[str]]:
    """Map each row to the tests that are marked with it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text()
        if "@pytest.mark.catalogue(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            for decorator in getattr(node, "decorator_list", []):
                if ast.unparse(decorator).startswith("pytest.mark.catalogue("):
                    for argument in decorator.args:
                        for each in expand(ast.literal_eval(argument)):
                            test = f"{path.relative_to(TESTS.parent)}::{node.name}"
                            found.setdefault(each, []).append(test)
    return found


def listed_rows(heading: str) -> dict[str, str]:
    """Map the rows in a table of the page to the text of their line."""
    table = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for rows, text in re.findall(r"^\| (?!rows)(.*?) \| (.*) \|$", table, re.MULTILINE):
        for each in [name for part in rows.split(", ") for name in expand(part)]:
            if each in found:
                raise ValueError(f"{each} occurs twice in the table {heading!r}")
            found[each] = text.strip(" |")
    return found


def main() -> None:
    tests, without = marked_tests(), listed_rows(WITHOUT_A_TEST)
    for each, name in all_rows().items():
        for text in tests.get(each) or [f"no test: {without.get(each, 'no reason given')}"]:
            print(f"{each:8}{name} {text}" if name else f"{each:8}{text}")


if __name__ == "__main__":
    main()

"""docs/threat-model.md names the tests that hold its lines, and all attacks that succeed."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "threat-model.md"

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="the wheel's tests run without the repository"
)


def held_by() -> list[tuple[str, str]]:
    """Of each table with a column "held by", its lines and what stands in that column."""
    found, inside = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[-1] == "held by":
            inside = True
        elif inside and "---" not in cells[-1]:
            found.append((line, cells[-1]))
    return found


def test_each_line_names_tests_that_there_are_or_is_said_to_be_open():
    lines = held_by()
    assert len(lines) > 40
    for line, cell in lines:
        named = re.findall(r"`([^`]+)`", cell)
        assert named or cell == "-", line
        assert [name for name in named if not (TESTS / name).is_file()] == [], line
    # a line without a test says in bold what is not withstood, or is about the machine itself
    loose = [line for line, cell in held_by() if cell == "-"]
    assert all("**" in line or "| any time |" in line for line in loose), loose


def test_every_file_of_attacks_is_on_the_page_and_those_that_succeed_have_a_star():
    page = PAGE.read_text()
    for path in sorted((TESTS / "attacks").glob("test_*.py")):
        assert f"attacks/{path.name}`" in page, path.name
        succeeds = "mark.succeeds" in path.read_text()
        assert (f"attacks/{path.name}`*" in page) == succeeds, path.name

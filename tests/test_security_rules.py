"""docs/security-rules.md has each rule that a comment cites, and no other."""

import re
from pathlib import Path

import pytest
from support.product_source import sources

PAGE = Path(__file__).parents[1] / "docs" / "security-rules.md"
CITED = re.compile(r"[Ss]ecurity[\s#]+rules?[\s#]+(\d+(?:(?:,| and| to)[\s#]+\d+)*)")
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the tests run without docs/ beside them")


def numbers(text):
    """The rules that a text cites, ranges included."""
    for found in CITED.findall(text):
        for first, last in re.findall(r"(\d+)(?: to[\s#]+(\d+))?", found):
            yield from range(int(first), int(last or first) + 1)


def test_the_walk_sees_every_form():
    text = "security rule 1, (security\n    # rules 2, 3 and 4).\nSecurity rules 6 to 8"
    assert list(numbers(text)) == [1, 2, 3, 4, 6, 7, 8]


def test_each_cited_rule_is_explained_and_each_explained_rule_is_cited():
    paths = [*sources(), *Path(__file__).parent.rglob("*.py")]
    texts = [path.read_text() for path in paths if path != Path(__file__)]
    explained = [int(each) for each in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)]
    assert explained == sorted(set(explained))
    assert set(explained) == {number for text in texts for number in numbers(text)}
    assert not any("SECURITY.md rule" in text for text in texts)

"""README.md: short, with links that lead somewhere, and with the picture that it describes."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="the tests run without the README")


def pages():
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_it_is_a_screen_for_each_reader():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert max(map(len, (line for line in lines if "|" not in line and "![" not in line))) <= 120


def test_links_of_all_pages_lead_to_files():
    """And a link to a section leads to a heading of that page."""
    seen, broken = 0, []
    for page in pages():
        text = re.sub(
            r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, section = target.partition("#")
            file = page.parent / path if path else page
            seen += 1
            if not file.exists() or (section and section not in sections(file)):
                broken.append(f"{page.name}: {target}")
    assert seen > 30
    assert broken == []


def sections(page):
    """Names of a page's headings as they stand in links."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_picture_was_drawn_by_the_demo_and_shows_what_the_readme_says():
    text = README.read_text(encoding="utf-8")
    (said, path) = re.search(r"!\[(.+)\]\((docs/demo\.svg)\)", text).groups()
    root = ET.fromstring((ROOT / path).read_bytes())
    found = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    records = re.search(r"on (\d+) held-out records", said)[1]
    assert f"Accuracy on {records} held-out records, all and per silo" in found
    shares = dict(re.findall(r"(\w+) (\d+\.\d %)", said))
    assert list(shares) == ["local", "fedavg", "pfedsim"]
    assert shares.keys() | set(shares.values()) <= found


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        for target in re.findall(r"[\w./-]+\.md", page.read_text(encoding="utf-8")):
            for file in (page.parent / target, ROOT / target):
                if file.exists() and file.resolve() not in reached:
                    reached.add(file.resolve())
                    waiting.append(file)
    missing = {page.resolve() for page in pages()} - reached - {README.resolve()}
    assert not missing

"""The report as people see it: on a screen, on a small one, in the dark, by keyboard, on paper."""

import pytest
from support import report_ledgers as ledgers
from support.browser import browsing, needs_chromium, overflow, printed_pages, shown, violations
from support.ledgers import keyed

from staddle.commands.report import report
from staddle.commands.report.page import RosterSources

pytestmark = needs_chromium
MADE = "2026-11-21 17:30 UTC, by staddle 0.1.0"


@pytest.fixture(scope="module")
def browser():
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each sort, as files."""
    folder, files = tmp_path_factory.mktemp("pages"), {}
    for name, make in {
        "full": ledgers.full, "keyed": keyed, "nasty": ledgers.nasty, "crowded": ledgers.crowded
    }.items():  # fmt: skip
        ledger = folder / name / "ledger"
        make(ledger)
        files[name] = folder / f"{name}.html"
        files[name].write_bytes(report.html(report.read(ledger, MADE, RosterSources())))
    return files


SORTS = ("full", "keyed", "nasty", "crowded")


# The crowded page has no colour that the others have not, and axe looks at it for long.
@pytest.mark.parametrize(
    ("name", "scheme"),
    [*((name, "light") for name in SORTS), *((name, "dark") for name in SORTS[:-1])],
)
def test_axe_finds_nothing_and_a_narrow_screen_is_wide_enough(browser, pages, name, scheme):
    with shown(browser, pages[name], 400, scheme) as page:
        assert violations(page) == []
        assert overflow(page) == 0


def test_the_dark_page_is_dark(browser, pages):
    colours = []
    for scheme in ("light", "dark"):
        with shown(browser, pages["full"], scheme=scheme) as page:
            colours.append(page.evaluate("getComputedStyle(document.documentElement).color"))
    assert colours == ["rgb(17, 17, 17)", "rgb(232, 232, 232)"]


@pytest.mark.parametrize("name", SORTS)
def test_the_lay_pages_are_two_when_printed(browser, pages, name):
    with shown(browser, pages[name]) as page:
        whole = printed_pages(page)
        page.evaluate(
            """() => {
                const lay = document.querySelector(".lay");
                while (lay.nextElementSibling) lay.nextElementSibling.remove();
            }"""
        )
        assert 1 <= printed_pages(page) <= 2
        assert whole > printed_pages(page)


def test_links_and_wide_tables_are_reached_by_keyboard(browser, pages):
    with shown(browser, pages["full"], 400) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
        links = page.locator("nav a")
        assert links.count() == 12
        links.nth(2).focus()
        page.keyboard.press("Enter")
        assert page.url.endswith("#s3")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "What left"
        page.keyboard.press("End")
        page.keyboard.press("ArrowRight")

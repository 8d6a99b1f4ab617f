"""A real browser, where the machine has one: Debian's chromium, driven by playwright."""

import contextlib
import re
import shutil

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")


@contextlib.contextmanager
def browsing():
    """A browser without any network: pages are files."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def shown(browser, path, width=1100, scheme="light"):
    """The page of a file; it raises where the page asks for anything but that file."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert asked == [path.as_uri()]
    return page


def violations(page):
    """What axe-core finds, a line each."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]


def printed_pages(page):
    """How many pages of A4 a page has in print."""
    pdf = page.pdf(prefer_css_page_size=True)
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


def overflow(page):
    """Pixels by which a page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")

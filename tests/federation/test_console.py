"""The console in a browser, next to the daemons of a real federation."""

import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from importlib.metadata import version

import pytest
from federation.conftest import TIMING, running, small_document

from staddle.commands.federation import local_federation

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium"),
    pytest.mark.timeout(600),  # the first one starts all of it
]
SILOS = ("north", "east", "south")
ROUNDS = 2000  # more than a test waits for
PATIENCE = 90_000.0  # milliseconds
# of one silo: the others wait for it, and the processor is the pages' and the browser's
SLOW = """
import asyncio
from staddle.commands.main import single
from staddle.silo.plain_rounds import PlainRounds

fetch = PlainRounds.fetch

async def slowly(self, *given):
    await asyncio.sleep(0.5)
    return await fetch(self, *given)

PlainRounds.fetch = slowly
single("silo.agent:run")
"""
PAGES = {
    "coordinator": ("/", "/jobs/long", "/log"),
    "north": ("/", "/jobs", "/privacy", "/data", "/models", "/checks", "/report", "/log"),
}


@contextmanager
def console(config, *options):
    """The address that the command prints."""
    command = [sys.executable, "-m", "staddle.commands", "console", "--config", str(config)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def world(tmp_path_factory, fork_server):
    """A federation whose job runs, and a page in a browser for each of two consoles."""
    api = pytest.importorskip("playwright.sync_api")
    with ExitStack() as stack:
        made = stack.enter_context(
            running(tmp_path_factory.mktemp("seen"), SILOS, fork_server.launch)
        )
        made.job(small_document("long", SILOS, rounds=ROUNDS, min_cohort=2, round_timeout=30))
        made.configure({**TIMING, "hold_seconds": 2})
        files = made.federation
        config = files.coordinator_config
        operator = local_federation.write_operator(files, made.address)
        made.start_daemon("coordinator")
        made.launch("east", ("-c", SLOW), files.silo_config("east"))
        for silo in ("north", "south"):
            made.start_daemon(silo)
        playwright = stack.enter_context(api.sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        stack.callback(browser.close)
        pages = {}
        for name, path, more in (
            ("coordinator", config, ("--operator", str(operator))),
            ("north", files.silo_config("north"), ()),
        ):
            page = browser.new_context(viewport={"width": 1200, "height": 900}).new_page()
            page.set_default_timeout(PATIENCE)
            page.faults = []
            page.on("pageerror", lambda error, page=page: page.faults.append(str(error)))
            page.on("console", lambda said, page=page: page.faults.append(said.text))
            page.goto(stack.enter_context(console(path, *more)))
            page.base = page.url.rstrip("/")
            pages[name] = page
        yield made, pages
        assert [page.faults for page in pages.values()] == [[], []]


def visit(page, path):
    page.goto(page.base + path)
    page.wait_for_selector("text=Live: this page follows the daemon.")
    page.evaluate("window.opened = 1")


def closed(page):
    return int(re.search(r"(\d+) of \d+ rounds closed", page.inner_text("main"))[1])


def test_rounds_appear_on_an_open_page(world):
    page = world[1]["coordinator"]
    visit(page, "/jobs/long")
    for _ in range(3):
        before = closed(page)
        page.wait_for_function(
            "before => Number(/(\\d+) of \\d+ rounds closed/.exec(document.body.innerText)[1])"
            " > before",
            arg=before,
        )
    page.wait_for_selector("figure polyline")
    page.wait_for_selector("tbody tr")
    # It was never loaded again.
    assert page.evaluate("window.opened") == 1
    page.wait_for_selector("text=in the clear: the coordinator sees what each silo uploads")


def test_a_hidden_page_listens_no_more(world):
    page = world[1]["coordinator"]
    visit(page, "/")
    with page.expect_event(
        "requestfailed", lambda request: request.url.endswith("/events"), timeout=PATIENCE
    ):
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
    with page.expect_request("**/events", timeout=PATIENCE):
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_no_fault_that_axe_finds_and_fit_a_narrow_screen(world, name):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = world[1][name]
    for path in PAGES[name]:
        visit(page, path)
        page.wait_for_function("() => !document.body.innerText.includes('Being verified')")
        for width, scheme in ((1200, "light"), (400, "light"), (400, "dark")):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme)
            wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert wider <= 0, (path, width)
            # In its own world: the page's policy lets no script in.
            found = axe.run(page)
            assert found.violations_count == 0, (path, scheme, found.generate_report())
    page.set_viewport_size({"width": 1200, "height": 900})
    page.emulate_media(color_scheme="light")


def test_the_keyboard_reaches_all_of_a_page(world):
    page = world[1]["north"]
    visit(page, "/")
    seen = []
    for _ in range(14):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.innerText.trim().split('\\n')[0]"))
    assert seen[0] == "Skip to the content"
    assert {"Jobs", "Report", "Verify again"} <= set(seen)
    # What has the focus keeps it through a refresh.
    page.focus("button")
    page.evaluate("document.querySelector('button').dataset.mine = '1'")
    with page.expect_response(lambda answer: answer.url == page.base + "/", timeout=PATIENCE):
        page.evaluate("htmx.trigger(document.body, 'refresh')")
    assert page.evaluate("document.activeElement.innerText") == "Verify again"


def test_checks_run_by_a_button_and_the_report_is_saved(world):
    page = world[1]["north"]
    visit(page, "/checks")
    page.click("text=Run the checks")
    page.wait_for_selector("[role=alert]")
    assert "All is well" in page.inner_text("[role=alert]"), page.inner_text("main")
    assert "FAIL" not in page.inner_text("table")
    visit(page, "/report")
    with page.expect_download(timeout=PATIENCE) as download:
        page.click("text=Download the report")
    assert b"<html" in download.value.path().read_bytes()


def test_a_silo_that_stops_shows_as_lost(world):
    made, pages = world
    page = pages["coordinator"]
    visit(page, "/")
    row = page.locator("tr", has=page.locator("th", has_text="south")).first
    row.locator("td", has_text=re.compile("^connected$")).wait_for()
    row.locator("td", has_text=f"staddle {version('staddle')}").wait_for()
    page.goto(page.base + "/log")
    page.wait_for_selector("text=round.opened job=long")
    visit(page, "/")
    made.daemons["south"].stop()
    row.locator("td.bad").wait_for()
    assert page.evaluate("window.opened") == 1


def test_an_operator_stops_a_job(world):
    made, pages = world
    page = pages["coordinator"]
    visit(page, "/jobs/long")
    page.click("text=Stop job long")
    page.wait_for_selector("[role=alert]")
    page.wait_for_selector("text=stage stopped")
    ((state,),) = made.rows("SELECT state FROM jobs")
    assert '"stage":"stopped"' in state


def test_a_ledger_that_was_changed_fails_on_an_open_page(world):
    made, pages = world
    page = pages["north"]
    visit(page, "/")
    page.wait_for_selector("text=Holds.")
    made.daemons["north"].stop()
    page.wait_for_selector("text=Agent does not run")
    path = made.federation.state("north") / "ledger" / "seg-00000001.jsonl"
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"part":"model"', b'"part":"modem"', 1))
    page.wait_for_selector("text=Does NOT hold.")
    assert "What left, by job" not in page.inner_text("main")
    assert page.evaluate("window.opened") == 1

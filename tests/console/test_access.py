"""Who gets in, and what every answer says: each check by its number, and what gets past none."""

import hashlib
import re
from importlib import resources
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from staddle.console import access
from staddle.console.access import HEADERS, RequestGuard, Sessions
from staddle.console.site import Application, FileDownload, FormAction, ShownPage
from staddle.errors import LocalError

ORIGIN, BASE, COOKIE = "http://127.0.0.1:8765", "/below", "staddle-test"
NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202e\x1b[2J"
# of htmx.org 4.0.1 on npm
HTMX = "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130"


class Stub:
    """A site of one page, which shows what it is given."""

    heading = NASTY

    def __init__(self):
        self.shown, self.done = {"problem": NASTY}, []
        self.pages = (
            ShownPage("/", "Start", "problem.html", lambda _: self.shown),
            ShownPage("/jobs/{job}", "", "problem.html", self.job),
            ShownPage("/broken", "Broken", "log.html", self.broken),
        )
        self.actions = (FormAction("/jobs/{job}/stop", self.stop, "/jobs/{job}"),)
        self.downloads = (FileDownload("/file", "report.html", NASTY.encode),)

    def job(self, parameters):
        return {**self.shown, "problem": {"one": parameters["job"]}[parameters["job"]]}

    def broken(self, _):
        raise LocalError(f"no {NASTY}")

    def stop(self, parameters):
        self.done.append(parameters["job"])
        return NASTY

    def refresh(self):
        pass

    def look(self):
        return ()

    def summary(self):
        return NASTY


def served(by_token=True, origin=ORIGIN, clock=None):
    site, options = Stub(), {"clock": clock} if clock else {}
    sessions = Sessions(by_token=by_token, **options)
    guard = RequestGuard(Application(site, sessions).asgi, sessions, (origin,), BASE, COOKIE)
    client = TestClient(guard, base_url=origin, follow_redirects=False)
    return SimpleNamespace(site=site, sessions=sessions, client=client)


@pytest.fixture
def world():
    return served()


@pytest.fixture
def entered(world):
    answer = world.client.get(f"{BASE}/enter", params={"token": world.sessions.token})
    assert (answer.status_code, answer.headers["location"]) == (303, f"{BASE}/")
    return world


def token_of(page):
    return re.search(r'name="token" value="([0-9a-f]+)"', page.text)[1]


def form_token(world):
    return world.sessions.form_token(world.client.cookies[COOKIE])


def stop(world, **changes):
    options = {"headers": {"origin": ORIGIN}, "data": {"token": form_token(world)}, **changes}
    return world.client.post(f"{BASE}/jobs/one/stop", **options)


def test_1_another_name_for_this_address_is_refused(entered):
    for host in ("evil.example:8765", "127.0.0.1", "localhost:8765", "127.0.0.1:8765.evil.example"):
        assert entered.client.get(f"{BASE}/", headers={"host": host}).status_code == 421
    assert entered.client.get(f"{BASE}/").status_code == 200


def test_2_a_request_that_another_site_made_is_refused(entered):
    for site in ("cross-site", "same-site"):
        answer = entered.client.get(f"{BASE}/", headers={"sec-fetch-site": site})
        assert answer.status_code == 403
    for site in ("none", "same-origin"):
        answer = entered.client.get(f"{BASE}/", headers={"sec-fetch-site": site})
        assert answer.status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", ""])
def test_3_a_form_of_another_origin_does_nothing(entered, origin):
    assert stop(entered, headers={"origin": origin}).status_code == 403
    assert stop(entered, headers={}).status_code == 403
    assert entered.site.done == []


def test_4_other_paths_are_not_there_and_files_have_fixed_names(entered):
    paths = ("/", "/enter", "/below", "/belowx/", f"{BASE}/static/../access.py")
    paths += (f"{BASE}/static/..%2faccess.py", f"{BASE}/static/%2e%2e/access.py", f"{BASE}/x")
    paths += (f"{BASE}/static/htmx.LICENSE", f"{BASE}/static//etc/passwd", f"{BASE}/jobs/two")
    paths += (f"{BASE}/jobs/..%2f..", f"{BASE}/jobs/%2e%2e")
    for path in paths:
        assert entered.client.get(path).status_code == 404, path
    assert entered.client.get(f"{BASE}/static/console.css").status_code == 200


def test_5_without_a_session_nothing_is_shown(world):
    paths = ("/", "/jobs/one", "/events", "/file", "/static/console.js", "/enter?token=", "/enter")
    for cookie in (None, "", "x", world.sessions.token):
        world.client.cookies.clear()
        if cookie is not None:
            world.client.cookies.set(COOKIE, cookie, path=f"{BASE}/")
        for path in paths:
            answer = world.client.get(BASE + path)
            assert (answer.status_code, NASTY in answer.text) == (401, False), path
    answer = world.client.post(f"{BASE}/jobs/one/stop", headers={"origin": ORIGIN})
    assert answer.status_code == 401


def test_a_token_is_good_once_and_a_wrong_one_does_not_use_it_up(world):
    token = world.sessions.token
    for wrong in ("", "x", token[:-1], token + "x", "é"):
        answer = world.client.get(f"{BASE}/enter", params={"token": wrong})
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert world.client.head(f"{BASE}/enter", params={"token": token}).status_code == 401
    first = world.client.get(f"{BASE}/enter", params={"token": token})
    second = world.client.get(f"{BASE}/enter", params={"token": token})
    assert (first.status_code, second.status_code) == (303, 401)
    said = first.headers["set-cookie"].lower()
    assert all(word in said for word in ("httponly", "samesite=strict", f"path={BASE}/"))
    assert token not in said
    assert world.client.get(f"{BASE}/").status_code == 200  # the session holds


def test_tokens_and_sessions_end():
    now = [0.0]
    world = served(clock=lambda: now[0])
    token = world.sessions.token
    now[0] = access.TOKEN_SECONDS
    assert world.client.get(f"{BASE}/enter", params={"token": token}).status_code == 401
    now[0] = 0.0
    assert world.client.get(f"{BASE}/enter", params={"token": token}).status_code == 303
    now[0] = access.SESSION_SECONDS - 1
    assert world.client.get(f"{BASE}/").status_code == 200
    now[0] += 1
    assert world.client.get(f"{BASE}/").status_code == 401
    now[0] = 0.0  # it was forgotten
    assert world.client.get(f"{BASE}/").status_code == 401


def test_under_tls_a_session_begins_by_the_certificate_alone_and_is_for_https():
    world = served(by_token=False, origin="https://a.staddle:8765")
    assert not world.sessions.token
    answer = world.client.get(f"{BASE}/")
    assert answer.status_code == 303
    assert "secure" in answer.headers["set-cookie"].lower()
    assert world.client.get(f"{BASE}/").status_code == 200
    world.client.cookies.clear()
    headers = {"origin": "https://a.staddle:8765"}
    assert world.client.post(f"{BASE}/jobs/one/stop", headers=headers).status_code == 401
    for _ in range(access.MOST_SESSIONS + 5):
        world.sessions.begin()
    assert len(world.sessions._ends) == access.MOST_SESSIONS


def test_a_form_needs_the_token_of_its_session(entered):
    other = served()
    for wrong in ("", "x", form_token(entered)[:-1], other.sessions.form_token("x"), "é"):
        assert stop(entered, data={"token": wrong}).status_code == 403
    assert stop(entered, data={}).status_code == 403
    # a form that is too long, and one with too many fields
    assert stop(entered, data={"token": form_token(entered), "x": "y" * 20_000}).status_code == 403
    assert entered.site.done == []
    assert stop(entered).status_code == 303
    assert entered.site.done == ["one"]


def test_nothing_acts_by_get(entered):
    for path in ("/jobs/one/stop", "/jobs/one/stop?token=" + form_token(entered)):
        assert entered.client.get(BASE + path).status_code == 405
    assert entered.site.done == []


def test_every_answer_has_the_policy(entered):
    requests = [("GET", f"{BASE}{path}") for path in ("/", "/x", "/file", "/static/htmx.min.js")]
    requests += [("GET", "/"), ("POST", f"{BASE}/"), ("GET", f"{BASE}/jobs/one/stop")]
    requests += [("GET", f"{BASE}/enter"), ("GET", f"{BASE}/broken"), ("OPTIONS", f"{BASE}/")]
    statuses = set()
    for method, path in requests:
        answer = entered.client.request(method, path, headers={"origin": ORIGIN})
        statuses.add(answer.status_code)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
        assert "server" not in answer.headers
    assert statuses == {200, 404, 405, 401, 503}
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert all(f"{name} 'self'" in policy for name in ("script-src", "style-src", "connect-src"))


def test_what_strangers_wrote_is_text(entered):
    stop(entered)  # whose notice is nasty, too
    for path in ("/", "/jobs/one", "/broken"):
        text = entered.client.get(BASE + path).text
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text
        assert "\u202e" not in text
        assert "\x1b" not in text


def test_a_notice_is_shown_once_and_not_lost_to_a_refresh(entered):
    stop(entered)
    for headers, shown in (({"hx-request": "true"}, True), ({}, True), ({}, False)):
        text = entered.client.get(f"{BASE}/", headers=headers).text
        assert ('role="alert"' in text) == shown


def test_a_file_is_saved_and_never_a_page_of_ours(entered):
    answer = entered.client.get(f"{BASE}/file")
    assert answer.headers["content-disposition"] == 'attachment; filename="report.html"'
    assert answer.headers["content-type"] == "application/octet-stream"


def test_no_template_has_a_script_or_a_style_in_its_text():
    found = 0
    for path in (resources.files("staddle.console") / "templates").iterdir():
        # The one page that is a file has the style sheet in its text.
        text = path.read_text().replace("<style>{{ style }}</style>", "")
        found += 1
        assert not re.search(r"\son[a-z]+=|\sstyle=|<style|javascript:|\|\s*safe|hx-on|js:", text)
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))
        assert "//" not in re.sub(r"<!doctype html>|{#.*?#}", "", text)  # no other host
    assert found > 10


def test_the_vendored_library_is_the_published_one():
    static = resources.files("staddle.console") / "static"
    assert hashlib.sha256((static / "htmx.min.js").read_bytes()).hexdigest() == HTMX
    assert "Zero-Clause BSD" in (static / "htmx.LICENSE").read_text()

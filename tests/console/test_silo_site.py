"""A person at a silo approves and declines jobs on its page."""

import re
import shutil
from dataclasses import replace

import pytest

pytest.importorskip("starlette")
from starlette.testclient import TestClient
from support.signed_federation import job_document

from staddle.algorithms.data.dataset import digits
from staddle.commands.federation import local_federation
from staddle.console.access import RequestGuard, Sessions
from staddle.console.silo_site import SiloSite
from staddle.console.site import Application
from staddle.errors import RefusedError
from staddle.security.policy import policy as policies
from staddle.silo import config as configs
from staddle.silo.admission import approvals

ORIGIN = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    made = local_federation.make(tmp_path_factory.mktemp("made") / "f", ("a", "b"))
    jobs = [
        local_federation.sign_job(made, job_document(("a", "b"), name=name))
        for name in ("first", "second")
    ]
    data = digits().take(list(range(60)))
    local_federation.write_silo(made, "a", "127.0.0.1:1", data, jobs)
    path = made.silo_config("a")
    path.write_text(path.read_text() + '\n[admission]\napprove = "ask"\n')
    return made


@pytest.fixture
def made(founded, tmp_path):
    """The federation in a folder of the test's own."""
    shutil.copytree(founded.folder, tmp_path / "f")
    return replace(founded, folder=tmp_path / "f")


@pytest.fixture
def config(made):
    return configs.load(made.silo_config("a"))


def offer(made, config, name):
    """What the agent does when it is offered a job: a person's answer, or the code of its error."""
    signed = (made.folder / "jobs" / f"{name}.json").read_bytes()
    policy = policies.load(config.policy, config.names).digest
    try:
        return approvals.asked(config, name, signed, policy, "coordinator").answer
    except RefusedError as error:
        return error.code


def client_of(made, config, decides=True):
    site, sessions = (
        SiloSite(made.silo_config("a"), config, decides=decides),
        Sessions(by_token=True),
    )
    guard = RequestGuard(Application(site, sessions).asgi, sessions, (ORIGIN,), "/b", "c")
    client = TestClient(guard, base_url=ORIGIN, headers={"origin": ORIGIN})
    client.get("/b/enter", params={"token": sessions.token})
    return client


def fields(client, name="first"):
    text = client.get(f"/b/jobs/{name}").text
    return dict(re.findall(r'name="(token|signed|policy)" value="([0-9a-f]+)"', text))


def test_a_job_that_waits_is_shown_and_approved_as_it_was_shown(made, config):
    assert offer(made, config, "first") == "WAITING"
    client = client_of(made, config)
    assert "waits for a person" in client.get("/b/jobs").text
    page = client.get("/b/jobs/first")
    assert all(
        word in page.text for word in ("fedavg", "operator", "risk: ", "part &#39;model&#39;")
    )
    answer = client.post("/b/jobs/first/approve", data=fields(client))
    assert "Approved: the agent accepts job first" in answer.text
    assert "approved by a person" in answer.text
    assert offer(made, config, "first") == "approved"


def test_a_declined_job_stays_out_and_the_reason_stays_here(made, config):
    offer(made, config, "first")
    client = client_of(made, config)
    data = {**fields(client), "reason": "<b>not now"}
    answer = client.post("/b/jobs/first/decline", data=data)
    assert "&lt;b&gt;not now" in answer.text
    assert offer(made, config, "first") == "declined"


def test_a_job_that_is_no_longer_offered_is_listed_and_asks_for_nobody(made, config):
    offer(made, config, "first")
    approvals.sort_offers(config.directory, ())
    client = client_of(made, config)
    page = client.get("/b/jobs").text
    assert ("no longer offered" in page, "waits for a person" in page) == (True, False)
    assert client.get("/b/jobs/first").status_code == 404


def test_what_was_not_seen_is_not_approved(made, config):
    offer(made, config, "first")
    offer(made, config, "second")
    client = client_of(made, config)
    seen = fields(client)
    # the file was exchanged after the page was made
    kept = {name: approvals._offer(config.directory, name) for name in ("first", "second")}
    kept["first"].write_bytes(kept["second"].read_bytes())
    for data in (seen, {**seen, "signed": ""}, {**seen, "policy": "x"}):
        answer = client.post("/b/jobs/first/approve", data=data)
        assert "another job named &#39;first&#39; is offered by now" in answer.text
    assert approvals.decisions(config.directory) == {}
    # under another policy than the one that was shown
    offer(made, config, "first")
    config.policy.write_text(config.policy.read_text() + "\n# changed\n")
    client.post("/b/jobs/first/approve", data=seen)
    assert offer(made, config, "first") == "WAITING"


def test_a_job_that_nobody_offered_is_not_there(made, config):
    client = client_of(made, config)
    assert client.get("/b/jobs/first").status_code == 404
    offer(made, config, "first")
    seen = fields(client)
    for path in (
        "/b/jobs/other/approve",
        "/b/jobs/..%2fdecisions/approve",
        "/b/jobs/decisions/approve",
    ):
        assert client.post(path, data=seen).status_code in {200, 404}
    assert approvals.decisions(config.directory) == {}
    assert client.get("/b/jobs/decisions").status_code == 404


def test_beyond_loopback_a_page_decides_nothing(made, config):
    offer(made, config, "first")
    client = client_of(made, config, decides=False)
    page = client.get("/b/jobs/first")
    assert "risk: " in page.text
    assert "Approve job" not in page.text
    for action in ("approve", "decline"):
        assert client.post(f"/b/jobs/first/{action}", data=fields(client)).status_code in {404, 405}
    assert approvals.decisions(config.directory) == {}


def test_a_form_of_another_page_decides_nothing(made, config):
    offer(made, config, "first")
    client = client_of(made, config)
    seen = fields(client)
    assert client.post("/b/jobs/first/approve", data={**seen, "token": "0" * 64}).status_code == 403
    headers = {"origin": "http://evil.example"}
    answer = client.post("/b/jobs/first/approve", data=seen, headers=headers)
    assert answer.status_code == 403
    assert approvals.decisions(config.directory) == {}

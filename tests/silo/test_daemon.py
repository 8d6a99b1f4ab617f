import asyncio
import datetime as dt
import os
import shutil
from functools import partial
from hashlib import sha256
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from support.ledgers import stored, write_privacy_head
from support.private_jobs import dataset
from support.refusals import refused
from typer.testing import CliRunner

from staddle import log
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.errors import UnwritableError
from staddle.security import preflight
from staddle.security.identity import roster as rosters
from staddle.security.identity.certificate import utc_now
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger import audit
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.log.tree_head import TreeHead
from staddle.security.policy.policy import MAX_FILE
from staddle.silo import config as configs
from staddle.silo import daemon
from staddle.silo.admission.budget import paid_by
from staddle.silo.agent import Agent
from staddle.silo.config import FurtherData
from staddle.silo.job_folder import JobFolder
from staddle.silo.session import Exit, Reload

SILO = "silo-a"


@pytest.fixture
def config(tmp_path):
    """A silo of a federation of its own."""
    files = local_federation.make(tmp_path / "local", (SILO,))
    shard = Dataset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))
    local_federation.write_silo(files, SILO, "127.0.0.1:1", shard, [])
    return configs.load(files.silo_config(SILO))


@pytest.fixture
def serve(config, monkeypatch):
    """The records on the disk when the daemon's agent, which ends at once, could begin to send."""
    seen, budgets = [], []

    class Agent:
        def __init__(self, *given):
            budgets.append(given[-1])

        def stop(self):
            pass

        async def run(self, changed, _):
            seen.append(stored(config.directory / "ledger"))
            return run.ends.pop(0)(changed) if run.ends else Exit("")

    monkeypatch.setattr(daemon, "Agent", Agent)

    def run():
        asyncio.run(daemon.serve(config))
        return seen[-1]

    run.budgets = budgets
    # what agents do before their end, in turn
    run.ends = []
    umask = os.umask(0o077)
    yield run
    os.umask(umask)  # the daemon sets its own


def test_all_that_is_wrong_is_said_before_anything_else(config, serve, monkeypatch):
    """No record is read for it. What the agent cannot run without ends it, the rest does not."""
    told = []

    def follow(event, fields):
        if event == "check.failed":
            told.append((fields["check"], fields["why"]))

    monkeypatch.setattr(Npz, "load", None)
    late = utc_now() + dt.timedelta(days=10_000)
    with log.followed(follow):
        serve()
        assert told == []
        monkeypatch.setattr(preflight, "utc_now", lambda: late)
        serve()
        assert [name for name, _ in told] == ["clock"]
        config.policy.write_text("version = 2\n")
        told.clear()
        with refused("version"):
            serve()
    assert [name for name, _ in told] == ["clock", "policy"]
    assert "after the certificate of" in told[0][1]


def test_a_policy_is_in_the_ledger_before_anything_can_leave_under_it(config, serve):
    found = serve()
    text = config.policy.read_bytes().decode()
    digest = sha256(text.encode()).hexdigest()
    assert [record["type"] for record in found] == ["start", "policy.change", "roster.change"]
    assert found[0]["policy"] == digest
    assert [found[1][name] for name in ("before", "after", "text")] == [None, digest, text]
    # the same policy: nothing to say
    assert [record["type"] for record in serve()[3:]] == ["stop", "start"]
    config.policy.write_text(f"{text}# \u00e9\n")
    changed = serve()[-1]
    assert (changed["type"], changed["before"], changed["text"]) == (
        "policy.change",
        digest,
        f"{text}# \u00e9\n",
    )
    assert audit.verify(config.directory / "ledger").ok


def test_a_policy_that_no_record_can_hold_is_refused_at_the_start(config, serve):
    text = config.policy.read_text()
    # each needs an escape: the longest line
    config.policy.write_text(text + '#"\t' * ((MAX_FILE - len(text)) // 3))
    assert [record["type"] for record in serve()[-2:]] == ["policy.change", "roster.change"]
    config.policy.write_text(text + "#" * (MAX_FILE + 1 - len(text)))
    with refused(f"{config.policy}: {MAX_FILE + 1} bytes, at most {MAX_FILE} fit into the ledger"):
        serve()
    assert [record["type"] for record in stored(config.directory / "ledger")] == [
        "start",
        "policy.change",
        "roster.change",
        "stop",
    ]


@pytest.fixture
def reload(monkeypatch):
    """An agent that looks at the files at two times which lie far enough apart, and its end."""
    monkeypatch.setattr(daemon, "time", SimpleNamespace(monotonic=partial(next, count(0, 60))))

    def look(changed):
        changed()
        return Reload(why) if (why := changed()) else Exit("")

    return look


def test_an_agent_that_ends_to_reload_is_followed_by_one_under_the_new_policy(
    config, serve, reload
):
    text = config.policy.read_text()

    def edit(changed):
        config.policy.write_text(f"{text}# two\n")
        return reload(changed)

    serve.ends += [edit, reload]
    found = serve()
    digest = sha256(config.policy.read_bytes()).hexdigest()
    types = [record["type"] for record in found]
    assert types == [
        "start", "policy.change", "roster.change", "stop", "start", "policy.change",
    ]  # fmt: skip
    assert (found[3]["reason"], found[4]["policy"]) == ("policy changed", digest)
    assert audit.verify(config.directory / "ledger").ok


@pytest.mark.parametrize("broken", ["max_bites = 3\n", "\0", None], ids=str)
def test_a_broken_policy_ends_nothing_and_is_told_once(config, serve, reload, broken):
    def edit(changed):
        if broken is None:
            config.policy.unlink()
        else:
            config.policy.write_text(broken)
        return reload(changed), reload(changed)

    told = []
    serve.ends += [lambda changed: edit(changed)[1]]
    with log.followed(lambda event, fields: told.append((event, fields.get("why", "")))):
        found = serve()
    assert [record["type"] for record in found] == ["start", "policy.change", "roster.change"]
    ((event, why),) = [each for each in told if each[0].endswith(".invalid")]
    assert event == "policy.invalid"
    assert why.startswith(f"{config.policy}: ")


def test_a_policy_with_a_budget_that_is_lost_is_no_reason_to_stop(config, serve, reload):
    text = config.policy.read_text()
    keys = load_keys(config.keys)
    with Ledger.open(config.directory / "ledger", SILO, "local", keys.log) as ledger:
        head = TreeHead("staddle.example/local/silo-a/privacy/data", 3, bytes(32))
        write_privacy_head(ledger, "data", head, epsilon="7.5", delta="0.00001", limit="8.0")

    def edit(changed):
        config.policy.write_text(text + dataset())
        return reload(changed)

    told = []
    serve.ends += [edit]
    with log.followed(lambda event, fields: told.append((event, fields.get("why", "")))):
        serve()
    ((_, why),) = [each for each in told if each[0] == "policy.invalid"]
    assert "gone, and with it what was spent on data set 'data'" in why
    assert serve.budgets == [{}]


def test_a_process_that_was_asked_to_stop_between_two_agents_stops_the_next_one():
    stops, asked = daemon.Stops(), []
    stops.ask()
    stops.watch(SimpleNamespace(stop=lambda: asked.append("late")))
    stops.ask()
    assert asked == ["late", "late"]


def test_a_budget_is_opened_where_the_policy_sets_one_and_its_limit_follows_it(config, serve):
    serve()
    assert serve.budgets == [{}]
    assert not (config.directory / "privacy").exists()
    text = config.policy.read_text()
    for epsilon in (8.0, 8.0, 6.0):
        config.policy.write_text(text + dataset(epsilon=epsilon))
        serve()
        assert serve.budgets[-1]["data"].paid(0, "ab" * 32) is False
    found = stored(config.directory / "privacy" / "data")
    assert [record["type"] for record in found] == ["budget.opened", "budget.limit", "budget.limit"]
    assert [record["epsilon"] for record in found[1:]] == ["8.0", "6.0"]
    assert found[2]["policy"] == sha256(config.policy.read_bytes()).hexdigest()


def test_each_data_set_with_a_budget_has_one_of_its_own(config, serve):
    """What reads the records of another data set has that one's."""
    further = {
        "scans": FurtherData(data=Npz(file=config.directory.parent / "scans.npz")),
        "risks": FurtherData(data=config.data, records_of="data"),
    }
    config.datasets.update(further)
    with refused("scans.npz: no such file; data.file in the configuration names"):
        serve()
    shutil.copy(config.data.file, further["scans"].data.file)
    text = config.policy.read_text() + dataset()
    config.policy.write_text(text)
    serve()
    assert serve.budgets[-1].keys() == {"data"}
    config.policy.write_text(text + dataset().replace("dataset.data", "dataset.scans"))
    serve()
    assert serve.budgets[-1].keys() == {"data", "scans"}


def test_what_was_spent_under_a_name_is_not_forgotten_by_another_for_its_records(config, serve):
    config.datasets["risks"] = FurtherData(data=config.data, records_of="data")
    config.policy.write_text(config.policy.read_text() + dataset())
    keys = load_keys(config.keys)
    with Ledger.open(config.directory / "ledger", SILO, "local", keys.log) as ledger:
        head = TreeHead("staddle.example/local/silo-a/privacy/risks", 3, bytes(32))
        write_privacy_head(ledger, "risks", head, epsilon="7.5", delta="0.00001", limit="8.0")
    with refused("data set 'risks' has a budget in the ledger, .* give it another name"):
        serve()
    assert serve.budgets == []


def test_a_silo_does_not_start_on_other_records_or_another_split(config, serve):
    folder = JobFolder(config.directory / "jobs" / "running")
    folder.accept(b'{"document":{"name":"running"}}', "heart")
    with refused("running: this job began on data set 'heart', .* it would go over to 'data'"):
        serve()
    folder.accept(b'{"document":{"name":"running"}}', "data")
    with refused("split.key: missing, and this silo has accepted jobs .* staddle silo new-split"):
        serve()
    asked = ["silo", "new-split", "--config", str(config.directory.parent / "silo.toml")]
    found = CliRunner().invoke(app, asked)
    assert (found.exit_code, "Records that were trained on may be" in found.output) == (0, True)
    assert CliRunner().invoke(app, asked).exit_code == 1  # there is a key
    assert serve()


def test_what_one_budget_paid_for_no_other_has_paid_for():
    of = lambda *held: SimpleNamespace(paid=lambda number, job: (number, job) in held)
    paid = paid_by({"data": of((3, "ab")), "scans": of((4, "cd"))})
    asked = [("data", 3, "ab"), ("scans", 4, "cd"), ("data", 4, "cd"), ("scans", 3, "ab")]
    assert [paid(*each) for each in (*asked, ("other", 3, "ab"))] == [True, True, *[False] * 3]


def test_a_silo_whose_budget_is_gone_does_not_start(config, serve):
    config.policy.write_text(config.policy.read_text() + dataset())
    serve()
    keys = load_keys(config.keys)
    with Ledger.open(config.directory / "ledger", SILO, "local", keys.log) as ledger:
        head = TreeHead("staddle.example/local/silo-a/privacy/data", 3, bytes(32))
        write_privacy_head(ledger, "data", head, epsilon="1.0", delta="0.00001", limit="8.0")
    with refused(r"data: was rolled back or altered: .*restore the newest copy"):
        serve()
    shutil.rmtree(config.directory / "privacy")
    with refused("gone, and with it what was spent on data set 'data'; restore it"):
        serve()
    assert len(serve.budgets) == 1


def test_a_data_set_under_another_name_or_none_is_said_to_have_cost_something(config, serve):
    """A new name has a budget of its own; only their owner knows if the records are the same."""
    keys, text, told = load_keys(config.keys), config.policy.read_text(), []
    with Ledger.open(config.directory / "ledger", SILO, "local", keys.log) as ledger:
        head = TreeHead("staddle.example/local/silo-a/privacy/old", 3, bytes(32))
        write_privacy_head(ledger, "old", head, epsilon="7.5", delta="0.00001", limit="8.0")
    with log.followed(lambda event, fields: told.append((event, fields.get("spent_on")))):
        for policy in (text, text + dataset()):
            config.policy.write_text(policy)
            serve()
    assert [fields for event, fields in told if event == "budget.elsewhere"] == [["old"]] * 2


def agent_of(config):
    """An agent that has a roster to follow, and what watches its files."""
    watched, made = daemon.WatchedRoster(config), Agent.__new__(Agent)
    made._roster, made._follow = watched.in_use.present, watched.follow
    return made, watched


@pytest.fixture
def following(config, tmp_path):
    """The next roster, which the founder signed, and the founder's keys."""
    founder = load_keys(tmp_path / "local" / "founder")
    other = create_keys(tmp_path / "other", "other", Role.SILO, "org")
    return rosters.sign(rosters.add(rosters.load(config.roster), other), founder), founder


def test_a_full_disk_is_no_reason_to_say_that_the_coordinator_bars_the_silo(config, following):
    """A roster that is to be taken over has no place on the disk."""
    roster, given = following[0], config.roster.read_bytes()
    made, watched = agent_of(config)
    shutil.rmtree(config.directory)
    with pytest.raises(UnwritableError, match=r"roster\.json"):
        made._other_roster(rosters.encoded(roster))
    assert not watched.changed
    config.directory.mkdir()
    # one that its founders have not signed does bar it
    unsigned = roster.model_copy(update={"signatures": {}})
    assert "does not take over: roster version" in made._other_roster(rosters.encoded(unsigned)).why
    for _ in range(2):  # asked again before another agent runs
        assert "holds roster version" in made._other_roster(rosters.encoded(roster)).why
        assert rosters.load(config.directory / "roster.json") == roster
        assert watched.changed
    assert watched.take() == roster
    # The configuration may be read-only, and counts no more where it is older.
    assert config.roster.read_bytes() == given
    assert config.roster_in_use().present == roster


def test_a_coordinator_cannot_replace_the_newer_roster_that_a_silo_was_given_by_hand(
    config, following
):
    grown, founder = following
    present = rosters.load(config.roster)
    operator = next(each.id for each in present.having(Role.OPERATOR))
    newest = rosters.sign(rosters.remove(grown, operator), founder)
    made, watched = agent_of(config)
    rosters.save(newest, config.roster)
    for now in (0, 60):
        assert watched.look(now) == ""
    for older in (grown, present):
        assert "is not newer than version" in made._other_roster(rosters.encoded(older)).why
    assert watched.take() == newest
    assert config.roster_in_use().present == newest
    # What the coordinator had first may be placed by hand later: that is no change.
    assert watched.look(120) == ""
    assert not watched.changed
    # a file that counts for nothing keeps nobody from a newer one
    latest = rosters.sign(rosters.add(newest, grown["other"], replace=True), founder)
    config.roster.write_bytes(b"{")
    assert "holds roster version" in made._other_roster(rosters.encoded(latest)).why
    assert watched.take() == latest


def test_the_same_roster_by_both_ways_is_one_change(config, following):
    made, watched = agent_of(config)
    made._other_roster(rosters.encoded(following[0]))
    assert watched.take() == following[0]
    rosters.save(following[0], config.roster)
    for now in (0, 60):
        assert watched.look(now) == ""
    assert not watched.changed


def test_a_roster_that_was_in_force_once_is_not_undone_by_an_older_file(config, serve, following):
    before = config.roster.read_bytes()
    rosters.save(following[0], config.roster)
    serve()
    config.roster.write_bytes(before)
    assert serve()[-1]["roster"] == rosters.digest(following[0])


def test_keys_that_are_gone_end_no_agent_at_a_reload(config, serve, reload, following):
    def changes(changed):
        rosters.save(following[0], config.roster)
        shutil.move(config.keys, config.keys.with_name("away"))
        return reload(changed)

    serve.ends.append(changes)
    assert [record["type"] for record in serve()][-3:] == ["stop", "start", "roster.change"]

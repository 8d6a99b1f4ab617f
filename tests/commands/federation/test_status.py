import hashlib
import json
import shutil
import sys
from contextlib import closing
from dataclasses import asdict, replace

import pytest
import torch
import typer
from support.counted import counts
from support.ledgers import (
    first,
    write_control_close,
    write_control_open,
    write_privacy_head,
    write_start,
)
from support.signed_federation import job_document
from typer.testing import CliRunner

from staddle.algorithms.course import SiloState
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.tasks.class_counting import ACCURACY
from staddle.algorithms.tasks.value_counting import UNIT
from staddle.algorithms.training.silo_round import RoundReport
from staddle.commands.federation import local_federation, status
from staddle.commands.terminal.toml import to_toml
from staddle.coordinator import live_status
from staddle.coordinator.live_status import SiloSeen
from staddle.coordinator.rounds.machine import JobState
from staddle.coordinator.storage.database import Database
from staddle.coordinator.storage.replay_log import Spooled, dumped
from staddle.errors import LocalError
from staddle.files import checked_file, tensor_file
from staddle.files.documents import canonical_json
from staddle.security.identity.keys import load_keys
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.records import Peer
from staddle.security.log.lock import locked
from staddle.security.log.tree_head import TreeHead
from staddle.silo.job_folder import JobFolder
from staddle.silo.parts.contributions import Contributions

SILOS = ("a", "b", "c")
METRICS = {"correct.delivered": 40, "correct.trained": 45, "tested": 50}
HASH = "ab" * 32

app = typer.Typer()
app.command()(status.status)


def show(config, *arguments):
    result = CliRunner().invoke(app, ["--config", str(config), *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    # the head names a folder, which may be long
    for line in [] if arguments else result.output.splitlines():
        assert len(line) <= 100 or line.startswith(("coordinator ", "silo ")), line
    return result.output


def read(config):
    return json.loads(show(config, "--json"))


def fails(config):
    result = CliRunner().invoke(app, ["--config", str(config)])
    assert isinstance(result.exception, LocalError), (result.output, result.exception)
    return str(result.exception)


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    return local_federation.make(tmp_path_factory.mktemp("made") / "f", SILOS)


@pytest.fixture
def made(founded, tmp_path):
    """The federation in a folder of the test's own."""
    shutil.copytree(founded.folder, tmp_path / "f")
    return replace(founded, folder=tmp_path / "f")


@pytest.fixture
def coordinator(tmp_path):
    config = tmp_path / "coordinator.toml"
    document = {"version": 1, "listen": "127.0.0.1:0", "directory": "state"}
    document |= {"keys": "k", "roster": "r"}
    trust = {"federation": "lung", "founders": ["SHA256:" + "A" * 43], "threshold": 1}
    config.write_text(to_toml({**document, "trust": trust}))
    return config


@pytest.fixture
def database(coordinator):
    folder = coordinator.parent / "state"
    folder.mkdir()
    with closing(Database(folder / "coordinator.sqlite")) as opened:
        yield opened


def keep(database, *states, document=None):
    signed = canonical_json({"document": document or {}})
    with database.transaction():
        for state in states:
            database.add_job(signed, state, {})


def state(name, rounds, **fields):
    return JobState(name, SILOS, rounds, 2, **fields)


ACCEPTED = dict.fromkeys(SILOS, "accepted")
GIVEN = {"given": {"a": HASH}, "failed": {"c": "TRAINING"}}
IN_ROUND = {"cohort": SILOS, "stage": "round", "round": 1, "answers": ACCEPTED}
OPEN = JobState("open", SILOS, 5, 2, 1.0, **IN_ROUND, **GIVEN)
WHY = "0 silos accepted, min_cohort is 2"
FAILED = state("bad", 5, stage="ended", outcome="failed", reason=WHY)


def test_a_coordinators_jobs_stand_in_order_with_who_uploaded_and_who_is_missing(
    coordinator, database
):
    keep(database, FAILED, OPEN, state("next", 7))
    with database.transaction():
        database.close_round("open", 0, ["a", "b"], METRICS, {}, {})
    bad, job, queued = read(coordinator)["jobs"]
    assert (bad["job"], bad["outcome"], bad["reason"]) == ("bad", "failed", FAILED.reason)
    assert (job["job"], job["stage"], job["closed"], job["rounds"]) == ("open", "round", 1, 5)
    assert (job["uploaded"], job["missing"], job["dropped"]) == (["a"], ["b"], {"c": "TRAINING"})
    last = {"round": 0, "members": ["a", "b"], "metrics": METRICS, "noisy": False}
    last["measures"] = {"delivered": {"accuracy": 0.8}, "trained": {"accuracy": 0.9}}
    assert job["last"] == {**last, "score": asdict(ACCURACY)}
    assert (queued["stage"], queued["last"]) == ("queued", None)
    lines = show(coordinator).splitlines()
    assert lines[2].split() == ["bad", "ended", "0", "of", "5", "failed", "-"]
    assert "1 of 5" in lines[3]
    assert lines[3].endswith("2 silos; as delivered accuracy 80.0%; as trained accuracy 90.0%")
    assert lines[5:] == [
        f"bad: {FAILED.reason}",
        "open: round, round 1: uploaded: a; missing: b; dropped: c (TRAINING)",
    ]


REGRESSION = {"task": {"kind": "regression", "range": ["0.0", "10.0"], "unit": "days"}}
SURVIVAL = {"task": {"kind": "survival", "cuts": ["1.0"]}, "metrics": {"risk_bins": 2}}


@pytest.mark.parametrize(
    ("document", "sums", "told"),
    [
        (REGRESSION, {"absolute.delivered": UNIT, "absolute.trained": UNIT // 2},
            "; as delivered MAE 5 days, RMSE 0; as trained MAE 2.5 days, RMSE 0"),
        (SURVIVAL, {"loss.delivered": UNIT // 16, "loss.trained": UNIT // 32},
            "; as delivered loss 1; as trained loss 0.5"),
        ({"task": {"kind": "of another project"}}, {"correct.trained": 1}, ""),
        ({"privacy": {}, "model": {"classes": 2}}, {"correct.trained": 1},
            "; as delivered accuracy 0.0%; as trained accuracy 50.0%, with noise"),
    ],
    ids=["regression", "survival", "another", "private"],
)  # fmt: skip
def test_the_last_round_of_any_task(coordinator, database, document, sums, told):
    keep(database, OPEN, document=document)
    with database.transaction():
        database.close_round("open", 0, ["a", "b"], {"tested": 2, **sums}, {}, {})
    shown = " ".join(" ".join(show(coordinator).splitlines()[2:-1]).split())
    assert shown.endswith(f" 2 silos{told}")
    (job,) = read(coordinator)["jobs"]
    assert job["last"]["metrics"] == {"tested": 2, **sums}
    assert bool(job["last"]["score"]) is bool(job["last"]["measures"]) is bool(told)


def test_the_concordance_of_the_last_round(coordinator, database):
    keep(database, OPEN, document=SURVIVAL)
    with database.transaction():
        database.close_round("open", 0, ["a", "b"], {"tested": 2}, {}, {})
    folder = coordinator.parent / "state" / "jobs" / "open"
    folder.mkdir(parents=True)
    # one with the event at once, who has the higher risk, and one without
    risks = torch.tensor([[[0, 0], [1, 0]], [[0, 1], [0, 0]]])
    tables = {"risks.delivered": risks.flip(2).contiguous(), "risks.trained": risks}
    (folder / "0.counts").write_bytes(tensor_file.to_bytes(tables))
    shown = " ".join(show(coordinator).split())
    assert "2 silos; as delivered C-index 0.000 [0.000, 0.000], loss 0; as trained C-index" in shown
    assert "; as trained C-index 1.000 [1.000, 1.000], loss 0 " in shown


def test_who_has_no_privacy_budget_left_is_named_with_that(coordinator, database):
    keep(database, replace(OPEN, failed={"c": "BUDGET"}))
    said = "uploaded: a; missing: b; dropped: c (BUDGET, its privacy budget is spent)"
    assert show(coordinator).splitlines()[-1].endswith(said)
    assert read(coordinator)["jobs"][0]["dropped"] == {"c": "BUDGET"}


def test_what_a_coordinator_passes_on_and_cannot_open_is_named(coordinator, database):
    keep(database, OPEN)
    words = {("words", part, ""): f"0.{part}.words" for part in ("model", "read", "coupling")}
    with database.transaction():
        files = {**words, ("result", "read", ""): "0.read.safetensors"}
        database.close_round("open", 0, ["a", "b"], METRICS, {}, files)
    (job,) = read(coordinator)["jobs"]
    assert job["relayed"] == ["coupling", "model"]
    said = "open: coupling, model: passed on to its silos, which alone can open it"
    assert said in show(coordinator).splitlines()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stage": "admitting", "answers": {"a": "accepted", "b": "DATA"}},
            "accepted: a; no answer: c; dropped: b (DATA)"),
        ({"stage": "finishing", "done": frozenset("a"), "failed": {"b": "lost"}},
            "confirmed: a; not yet: c; dropped: b (lost)"),
        ({"stage": "finishing", "done": frozenset("ab"), "failed": {"b": "lost"}},
            "confirmed: a, b; not yet: c; dropped: -"),
    ],
)  # fmt: skip
def test_in_each_stage_those_are_missing_for_whom_it_waits(coordinator, database, changes, said):
    keep(database, replace(OPEN, **{"cohort": (), "given": {}, "failed": {}, **changes}))
    assert show(coordinator).splitlines()[-1] == f"open: {changes['stage']}: {said}"


def test_reading_neither_waits_for_a_running_coordinator_nor_leaves_a_file(coordinator, database):
    keep(database, OPEN)
    folder = coordinator.parent / "state"
    with locked(folder), database.transaction():
        database.save_state(replace(OPEN, stage="folding"))
        before = {path.name for path in folder.iterdir()}
        found = read(coordinator)
        # what was committed
        assert (found["running"], found["jobs"][0]["stage"]) == (True, "round")
    found = read(coordinator)
    assert (found["running"], found["jobs"][0]["stage"]) == (False, "folding")
    assert {path.name for path in folder.iterdir()} == before
    database.close()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert read(coordinator)["jobs"][0]["stage"] == "folding"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_running_coordinator_tells_which_silos_are_here(coordinator, database, tmp_path):
    keep(database, OPEN)
    folder = coordinator.parent / "state"
    north = SiloSeen(connected=True, seen="2026-11-20T21:30:05Z", software="staddle 9", ahead=-60)
    live_status.write(folder, {"north": north, "south": SiloSeen(connected=False)})
    page = tmp_path / "status.html"
    with locked(folder):
        found = read(coordinator)["live"]["silos"]
        lines = show(coordinator).splitlines()
        assert show(coordinator, "--html", str(page)) == f"wrote {page}\n"
    assert (found["north"]["software"], found["south"]["ahead"]) == ("staddle 9", None)
    assert lines[1].split() == ["silo", "state", "last", "seen", "software", "clock"]
    assert lines[2].split()[2:] == [north.seen, "staddle", "9", "0:01:00", "behind"]
    assert " ".join(lines[3].split()[3:]) == "not since the coordinator started - -"
    text = page.read_text()
    assert (page.stat().st_mode & 0o777, "0:01:00 behind" in text) == (0o600, True)
    assert "open: round, round 0: uploaded: a; missing: b; dropped: c (TRAINING)" in text
    # What a killed process left is old.
    assert read(coordinator)["live"]["silos"] == {}


def ledger(made):
    return Ledger.open(made.state("a") / "ledger", "a", made.name, load_keys(made.keys("a")).log)


@pytest.fixture
def silo(made):
    job = local_federation.sign_job(made, job_document(SILOS, name="first", rounds=4))
    data = Dataset(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    local_federation.write_silo(made, "a", "127.0.0.1:1", data, [job])
    folder = JobFolder(made.state("a") / "jobs" / "first")
    folder.accept((made.folder / "jobs" / "first.json").read_bytes(), "data")
    with ledger(made) as opened:
        write_start(opened, "staddle", HASH, HASH)
        ref = write_control_open(opened, "a-1", Peer(id="coordinator", spki=HASH), 10, 1000).seq
        write_control_close(opened, ref, 3, 120)
    return folder


def test_a_silo_sees_its_rounds_its_accuracy_and_its_ledger(made, silo):
    config = made.silo_config("a")
    assert [(job["done"], job["tested"]) for job in read(config)["jobs"]] == [(0, None)]
    silo.save_round(0, 0, SiloState({}), Contributions({}))
    silo.add_round(RoundReport(0, 30, counts(10, 5), counts(10, 8), 0.5), {})
    with locked(made.state("a")):
        found = read(config)
    assert found["running"]
    (job,) = found["jobs"]
    assert (job["job"], job["method"], job["done"], job["rounds"]) == ("first", "fedavg", 1, 4)
    assert (job["tested"], job["score"], job["finished"], job["problem"]) == (10, 0.8, False, "")
    assert (job["balanced"], job["baseline"], job["form"]) == (0.8, 1.0, asdict(ACCURACY))
    assert (found["ledger"]["ok"], found["ledger"]["records"]) == (True, 3)
    (total,) = found["ledger"]["totals"]
    assert (total["part"], total["bytes"]) == ("(control)", 120)
    silo.save_values(SiloState({}))
    silo.finish(RoundReport(4, 0, counts(10, 6), counts(10, 6), None), {})
    lines = show(config).splitlines()
    assert lines[0].startswith("silo does not run: ")
    at = lines.index("ledger: holds, 3 records, 120 bytes left")
    assert " ".join(" ".join(lines[3:at]).split()) == (
        "first fedavg 4 of 4 finished accuracy 60.0% on 10; balanced 60.0%;"
        " always the most frequent class 100.0%"
    )
    assert lines[at + 1] == "messages of jobs: 0 bytes; keys, greetings and polls: 120 bytes"
    assert lines[at + 2].startswith("head 2:")
    assert not any("epsilon" in line for line in lines)


def test_a_silo_sees_which_policy_decides_and_why_it_is_not_the_file(made, silo):
    config, path = made.silo_config("a"), made.folder / "a" / "policy.toml"
    text = path.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    # a line may be long, since it names a path
    said = lambda: CliRunner().invoke(app, ["--config", str(config)]).output.splitlines()[1]
    waits = f"policy: the file's, {digest[:12]}…, is not in force yet; "
    assert said() == f"{waits}none is in force"
    with ledger(made) as opened:
        opened.put_in_force(old := hashlib.sha256(b"").hexdigest(), "")
    assert said() == f"{waits}{old[:12]}… stays in force"
    with ledger(made) as opened:
        opened.put_in_force(digest, text)
    assert said() == f"policy: {digest[:12]}… in force"
    path.write_text(f"{text}\nmax_bites = 3\n")
    policy = read(config)["policy"]
    assert (policy["in_force"], policy["file"]) == (digest, "")
    assert f"{path}: " in policy["problem"]
    assert said().startswith("policy NOT USED: ")


def test_a_report_of_an_earlier_release_has_no_score(made, silo):
    silo.save_round(0, 0, SiloState({}), Contributions({}))
    silo.add_round(RoundReport(0, 30, counts(10, 5), counts(10, 8), 0.5), {})
    path = silo.path / "report.json"
    report = json.loads(path.read_text())
    del report[checked_file.DIGEST]
    (entry,) = report["rounds"]
    for key in ("score_delivered", "score_trained", "baseline"):
        del entry[key]
    path.write_text(json.dumps(report))
    (job,) = read(made.silo_config("a"))["jobs"]
    assert (job["tested"], job["score"], job["baseline"], job["problem"]) == (10, None, None, "")
    assert show(made.silo_config("a")).splitlines()[3].split()[-2:] == ["open", "-"]


def test_code_that_the_policy_does_not_allow_is_not_run_to_show_a_job(made, silo):
    model = {"name": "normed", "classes": 3, "head": "4", "input": [1, 8, 8]}
    local_federation.sign_job(made, job_document(SILOS, name="outside", model=model))
    folder = JobFolder(silo.path.parent / "outside")
    folder.accept((made.folder / "jobs" / "outside.json").read_bytes(), "data")
    sys.modules.pop("other_models", None)

    def problems():
        return {job["job"]: job["problem"] for job in read(made.silo_config("a"))["jobs"]}

    assert problems()["first"] == ""
    assert "code of the installed package other-models, which may not run" in problems()["outside"]
    assert "other_models" not in sys.modules
    policy = made.folder / "a" / "policy.toml"
    policy.write_text(f'packages = ["other-models"]\n{policy.read_text()}')
    assert problems() == {"first": "", "outside": ""}
    # without a policy, the other jobs are shown
    policy.unlink()
    assert problems()["first"] == ""
    assert "policy.toml" in problems()["outside"]


def test_a_silo_sees_what_its_jobs_have_cost_a_data_set(made, silo):
    head = TreeHead("staddle.example/local/a/privacy/data", 3, bytes(32))
    with ledger(made) as opened:
        for spent in ("1.0000", "2.5000"):
            write_privacy_head(opened, "data", head, epsilon=spent, delta="0.00001", limit="8")
    shown = show(made.silo_config("a"))
    said = "data set 'data': epsilon 2.5000 of 8 spent or reserved, at delta 0.00001"
    assert said in " ".join(shown.split())
    (told,) = read(made.silo_config("a"))["privacy"]
    assert told == {"dataset": "data", "epsilon": "2.5000", "limit": "8", "delta": "0.00001"}


def test_a_job_that_ended_without_its_result_is_not_open_for_ever(made, silo):
    other = JobFolder(silo.path.parent / "other")
    other.accept(silo.signed(), "data")

    def state():
        lines = show(made.silo_config("a")).splitlines()
        (line,) = [line for line in lines if line.startswith("other ")]
        return line.split()[5]

    assert state() == "open"
    other.fail()
    assert state() == "failed"
    jobs = {job["job"]: job for job in read(made.silo_config("a"))["jobs"]}
    assert jobs["other"]["failed"] is True
    other.accept(other.signed(), "data")  # offered again
    assert state() == "open"
    shutil.rmtree(other.path)
    other.fail()  # nothing of it was accepted here
    assert not other.path.exists()


def test_what_a_session_that_is_open_may_send_is_said_to_be_assumed(made, silo):
    with ledger(made) as opened:
        write_control_open(opened, "a-3", Peer(id="coordinator", spki=HASH), 10, 1000)
        said = show(made.silo_config("a"))
    assert "\npolls of sessions that have not ended: at most 1,000 bytes more\n" in said
    assert "which no record counts" not in said


def test_what_is_broken_is_shown_beside_what_is_not(made, silo):
    path = first(made.state("a") / "ledger")
    path.write_bytes(path.read_bytes().replace(b'"software":"staddle"', b'"software":"other"'))
    (silo.path / "job.json").write_bytes(canonical_json({"document": {}}))
    found = read(made.silo_config("a"))
    assert not found["ledger"]["ok"]
    assert found["ledger"]["totals"] == []
    assert "job.json" in found["jobs"][0]["problem"]
    result = CliRunner().invoke(app, ["--config", str(made.silo_config("a"))])
    assert "unreadable" in result.output
    assert "ledger: DOES NOT HOLD: " in result.output
    assert "(seq 1, " in result.output


def test_where_nothing_ran_yet_the_error_says_so(coordinator, made, tmp_path):
    assert "coordinator.sqlite: no such file; the coordinator makes it" in fails(coordinator)
    other = made.folder / "b" / "silo.toml"
    data = Dataset(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    local_federation.write_silo(made, "b", "127.0.0.1:1", data, [])
    assert "ledger: no such folder; the agent makes it" in fails(other)
    (tmp_path / "policy.toml").write_text("version = 1\n")
    assert "neither a coordinator's configuration" in fails(tmp_path / "policy.toml")
    assert "cannot read it" in fails(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("version = ")
    assert "not valid TOML" in fails(tmp_path / "broken.toml")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "coordinator.sqlite").write_bytes(b"")
    assert "version 0" in fails(coordinator)


def test_a_file_that_is_no_database_is_named(coordinator, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "coordinator.sqlite").write_bytes(b"not a database" * 100)
    assert "coordinator.sqlite" in fails(coordinator)


def test_a_blind_round_shows_its_attempt(coordinator, database):
    fields = {"stage": "round", "cohort": SILOS, "failed": {"c": "lost"}}
    keep(database, state("j", 3, **fields, blind=True, attempt=1))
    assert "round, round 0, secure sum, attempt 2" in show(coordinator)
    assert read(coordinator)["jobs"][0]["attempt"] == 1
    database.close()


def test_a_blind_round_shows_whose_masked_words_are_here_and_who_is_excluded(coordinator, database):
    cohort, excluded = SILOS[:2], {SILOS[2]: "BATCH"}
    fields = {"stage": "round", "cohort": cohort, "excluded": excluded}
    keep(database, state("j", 3, **fields, blind=True, attempt=1))
    with database.transaction():
        for attempt, silo in enumerate(cohort):  # those of the attempt before do not count
            database.add_secure("j", 0, dumped(attempt, Spooled(silo, 8, bytes(32))))
    (job,) = read(coordinator)["jobs"]
    assert (job["uploaded"], job["missing"], job["dropped"]) == ([cohort[1]], [cohort[0]], excluded)
    database.close()


def test_tables_of_counts_are_shown_and_a_damaged_one_hides_nothing(coordinator, database):
    keep(database, OPEN)
    with database.transaction():
        database.close_round("open", 0, ["a", "b"], METRICS, {}, {})
    folder = coordinator.parent / "state" / "jobs" / "open"
    folder.mkdir(parents=True)
    matrix = torch.tensor([[40, 0], [10, 0]])
    tables = {f"confusion.{model}": matrix.clone() for model in ("delivered", "trained")}
    (folder / "0.counts").write_bytes(tensor_file.to_bytes(tables))
    (job,) = read(coordinator)["jobs"]
    assert job["last"]["metrics"]["confusion.trained"] == matrix.tolist()
    said = "as trained accuracy 90.0%, balanced 50.0%; the same answer for all 80.0%"
    assert said in " ".join(show(coordinator).split())
    data = bytearray((folder / "0.counts").read_bytes())
    data[-1] ^= 1
    (folder / "0.counts").write_bytes(data)
    (job,) = read(coordinator)["jobs"]
    assert job["last"]["metrics"] == METRICS

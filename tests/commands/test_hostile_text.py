"""Commands over what others wrote: ledgers, rosters, jobs, files, names of files, a coordinator's
answers.

Each of these has texts that clear the screen, set the clipboard, link, ring, overwrite the line and
turn it around.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import sys
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from support import report_ledgers
from support.ledgers import HASH, KEY, message_digest, open_ledger, write_serving, write_start

from staddle.commands import main
from staddle.commands.federation import jobs, local_federation
from staddle.commands.terminal import output
from staddle.coordinator.rounds.machine import JobState
from staddle.coordinator.storage.database import Database
from staddle.coordinator.storage.store import JobStore
from staddle.errors import PeerError
from staddle.files.documents import canonical_json
from staddle.proto import operations_pb2 as pb
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.ledger.records import DeliveredRecord
from staddle.security.preflight import PreflightReport

HOSTILE = "é你\x1b[31mr\x1b[2J\x1b]52;c;eA==\x07\x1b]8;;http://x\x1b\\l\rc\x9bHd\u202ee\u2066f\x7fg\th\ni\x00"
SHOWN = r"é你\x1b[31mr\x1b[2J\x1b]52;c;eA==\x07\x1b]8;;http://x\x1b\l\rc\x9bHd\u202ee\u2066f\x7fg\th\ni\x00"
OWNER = "s\x9bH\u202e\x7f"  # an owner's name has none below U+0020
KEYED = "k\x1b]52;c;eA==\x07"  # keys of our files are ASCII
# bytes that are no UTF-8
FILE_NAME = HOSTILE.replace("/", "").replace("\x00", "").replace("\n", "") + "\udcff\udc9b"
FILE_SHOWN = SHOWN.replace("/", "").replace(r"\x00", "").replace(r"\n", "") + r"\udcff\udc9b"


@pytest.fixture
def call(monkeypatch, capsys):
    """What the program printed on both streams, once no character of it steers a terminal."""

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["staddle", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main.main()
        said = "".join(capsys.readouterr())
        assert (end.value.code or 0) == code, ascii(said)
        assert [ascii(c) for c in said if not c.isprintable() and c != "\n"] == []
        return said

    return run


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return local_federation.make(tmp_path_factory.mktemp("made") / "f", ("a", "b", "c"))


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """A silo's ledger with such a text in every place that takes one."""
    monkeypatch.setattr(report_ledgers, "NASTY", (HOSTILE,))
    monkeypatch.setattr(report_ledgers, "SCRIPT", "silo-a")
    return report_ledgers.nasty(tmp_path / "silo" / "ledger")


def test_a_silos_ledger(call, ledger, tmp_path):
    said = call("ledger", "show", ledger)
    assert r"\x1b[2J" in said
    assert "é你" in said
    assert json.loads(call("ledger", "show", ledger, "--json"))[1]["job"] == HOSTILE
    assert r"\x1b[2J" in call("ledger", "summary", ledger)
    call("ledger", "summary", ledger, "--json")
    call("ledger", "verify", ledger)
    assert r"not of \x9b\u202e;" in call("ledger", "verify", ledger, "--silo", "\x9b\u202e", code=1)
    with open_ledger(tmp_path / "other" / "ledger", OWNER) as other:
        write_start(other, HOSTILE, HASH, HASH)
    assert r"s\x9bH\u202e\x7f" in call("ledger", "verify", tmp_path / "other", code=1)
    job = HOSTILE.replace("\x00", "") + "x"
    assert r"\x1b" in call("ledger", "show", ledger, "--job", job, code=1)
    call("ledger", "report", ledger, "--out", tmp_path / f"{FILE_NAME}.html")
    first = next(ledger.glob("seg-*"))
    first.write_bytes(first.read_bytes().replace(b'"seq":3', '"seq":"\x9b\u202e"'.encode()))
    call("ledger", "verify", ledger, code=1)


def test_a_coordinators_ledger(call, tmp_path):
    with ReceivingLedger.open(tmp_path / "ledger", OWNER, "local", KEY) as ledger:
        write_serving(ledger, OWNER, HOSTILE, HASH)
        ledger._log.append(DeliveredRecord(
            silo=HOSTILE, job=HOSTILE, job_digest=HASH, round=1, message=message_digest()
        ).model_dump(mode="json"))  # fmt: skip
    said = call("ledger", "show", tmp_path)
    assert r"\x1b[2J" in said
    assert "1, " in said
    call("ledger", "summary", tmp_path, code=1)
    call("ledger", "reconcile", "--silo", tmp_path, "--coordinator", tmp_path, code=1)


def changed(path, to, **fields):
    """A copy of a JSON file in which these fields are another's."""
    to.write_bytes(canonical_json({**json.loads(path.read_text()), **fields}) + b"\n")
    return to


def test_a_roster_and_a_members_keys(call, federation, tmp_path):
    path = federation.folder / "roster.json"
    document = json.loads(path.read_text())
    names = {"organisation": HOSTILE, "host_operator": HOSTILE}
    entries = [{**entry, **names} for entry in document["entries"]]
    for fields in (
        {"entries": entries},
        {"federation": HOSTILE},
        {"signatures": {KEYED: HOSTILE}},
        {KEYED: 1},
    ):
        roster = changed(path, tmp_path / "roster.json", **fields)
        assert r"\x1b" in call("roster", "show", roster, code=1)
    call("roster", "add", path, changed_entry(federation, tmp_path), code=1)
    keys = tmp_path / "keys"
    shutil.copytree(federation.folder / "a" / "keys", keys)
    changed(keys / "entry.json", keys / "entry.json", organisation=HOSTILE)
    assert r"\x1b" in call("keys", "show", keys, code=1)
    named = ("--role", "silo", "--organisation", HOSTILE.strip("\x00"))
    call("keys", "new", "a\x1b", *named, "--out", tmp_path / "n", code=1)


def changed_entry(federation, folder):
    entry = federation.folder / "a" / "keys" / "entry.json"
    return changed(entry, folder / "entry.json", id=HOSTILE, spki=HOSTILE)


def test_a_job(call, federation, tmp_path):
    roster, operator = federation.folder / "roster.json", federation.folder / "operator"
    path, policy = tmp_path / "job.json", tmp_path / "policy.toml"
    call("policy", "init", policy)
    for document in (
        {"name": HOSTILE},
        {KEYED: HOSTILE},
        {"version": 1, "method": {"name": HOSTILE, KEYED: KEYED}},
    ):
        signed = sign_document(document, rosters.load(roster), load_keys(operator), JOB)
        path.write_bytes(canonical_json(signed))
        show = ("job", "show", path, "--roster", roster)
        assert json.loads(call(*show, "--json")) == document
        assert r"\x1b" in call(*show, code=1)
        check = ("policy", "check", path, "--policy", policy, "--roster", roster)
        assert r"\x1b" in call(*check, code=1)
        call(*check, "--json", code=1)
        call("privacy", "plan", path, "--roster", roster, code=1)
    path.write_bytes(canonical_json({**signed, "signer": HOSTILE, KEYED: 1}))
    assert r"\x1b" in call("job", "show", path, "--roster", roster, code=1)
    draft = tmp_path / f"{FILE_NAME}.toml"
    assert FILE_SHOWN in call("job", "init", draft)
    text = draft.read_text()
    for written in (
        text.replace('"fedavg"', '"fed\\u001b[2Javg"', 1),
        f'"\\u001b\\u202e" = 1\n{text}',
        "a = \x1b[2J\u202e",
    ):
        draft.write_text(written)
        keys = ("--keys", operator, "--roster", roster)
        assert FILE_SHOWN in call("job", "sign", draft, *keys, "--out", path, code=1)
    call("privacy", "plan", draft, code=1)
    call("simulate", draft, code=1)


STATUS = dict.fromkeys(("job", "method", "stage", "outcome", "reason"), HOSTILE)
ANSWER = pb.JobReport(
    status=pb.JobStatus(
        **STATUS,
        job_digest=b"\x1b",
        answers={HOSTILE: HOSTILE},
        failed={HOSTILE: HOSTILE},
        **{name: [HOSTILE] for name in ("silos", "cohort", "given", "unheard")},
    ),
    rounds=[
        pb.ClosedRound(
            round=1,
            members=[HOSTILE],
            metrics={HOSTILE: 1, "tested": 4, "correct.trained": 3},
            tables=[
                pb.CountTable(name=f"confusion.{model}", shape=[2, 2], counts=[1, 1, 0, 2])
                for model in ("delivered", "trained")
            ],
        )
    ],
    evaluation=canonical_json({
        "task": {"kind": "classification"}, "model": {"classes": 2, "class_names": [HOSTILE, "b"]},
        "metrics": {"confusion": True}, "noised": False,
    }),
)  # fmt: skip


class Answering:
    """A coordinator that answers everything with such texts."""

    evaluation = ANSWER.evaluation

    def __getattr__(self, name):
        report = pb.JobReport(
            status=ANSWER.status, rounds=ANSWER.rounds, evaluation=self.evaluation
        )
        many = {"jobs": [report.status], "watch": [report], "show": report}
        return lambda *_: many.get(name, report.status)


def test_a_coordinators_answers(call, tmp_path, monkeypatch):
    @contextmanager
    def connected(_):
        yield Answering()

    monkeypatch.setattr(jobs, "connected", connected)
    (tmp_path / "job").write_text("{}")
    to = ("--operator", "operator.toml")
    assert call("job", "list", *to).count("\n") == 1
    assert SHOWN in call("job", "show", "x", *to)
    assert SHOWN in call("job", "watch", "x", *to, code=1)
    for name, argument in (("stop", "x"), ("resume", "x"), ("submit", tmp_path / "job")):
        assert SHOWN in call("job", name, argument, *to)
    (listed,) = json.loads(call("job", "list", *to, "--json"))
    assert listed == jobs.status_fields(ANSWER.status)
    assert listed["reason"] == HOSTILE
    call("job", "show", "x", *to, "--json")
    call("job", "watch", "x", *to, "--json", code=1)
    # a class is shown by its name
    classes = call("job", "show", "x", *to).partition("Classes in round 1")[2]
    assert r"\x1b[2J" in "".join(classes.split())
    task = {"kind": HOSTILE}
    other = json.loads(ANSWER.evaluation) | {"task": task}
    monkeypatch.setattr(Answering, "evaluation", canonical_json(other))
    assert "its task or a metric is of an installed package" in call("job", "show", "x", *to)
    task |= {"kind": "classification", KEYED: HOSTILE}
    for fault in (HOSTILE.encode(), canonical_json(other | {"task": task})):
        monkeypatch.setattr(Answering, "evaluation", fault)
        for as_json in ((), ("--json",)):
            assert "does not say what" in call("job", "show", "x", *to, *as_json, code=1)

    def refused(_):
        raise PeerError(HOSTILE, HOSTILE)

    monkeypatch.setattr(jobs, "connected", refused)
    assert r"\x1b[2J" in call("job", "list", *to, code=1)


def test_the_state_of_a_coordinator(call, federation, tmp_path):
    local_federation.write_coordinator(federation, [], {})
    folder = federation.state("coordinator")
    silos = (HOSTILE, "b", "c")
    state = JobState(
        HOSTILE,
        silos,
        5,
        2,
        1.0,
        "round",
        1,
        dict.fromkeys(silos, HOSTILE),
        cohort=silos,
        given={"b": HASH},
    )
    folder.mkdir(exist_ok=True)
    with closing(Database(folder / "coordinator.sqlite")) as database, database.transaction():
        database.add_job(b"{}", state, {})
        database.add_job(
            b"{}", replace(state, job="bad", stage="ended", outcome="failed", reason=HOSTILE), {}
        )
    assert SHOWN in call("status", "--config", federation.coordinator_config)
    call("status", "--config", federation.coordinator_config, "--json")
    with closing(sqlite3.connect(folder / "coordinator.sqlite")) as database, database:
        database.execute("ALTER TABLE jobs RENAME TO gone")
    call("status", "--config", federation.coordinator_config, code=1)
    shutil.rmtree(folder)


def test_partitions_and_memberships(call, tmp_path):
    client = {"name": HOSTILE, "train": [0, 1], "validation": [], "test": [2]}
    document = {
        "format": "staddle-partition/1", "data": HOSTILE, "records": 3, "labels_sha256": HASH,
        "seed": 1,
    }  # fmt: skip
    path = tmp_path / f"{FILE_NAME}.json"
    path.write_bytes(canonical_json({**document, "how": {"kind": HOSTILE}, "clients": [client]}))
    assert SHOWN in call("partition", "show", path)
    assert HOSTILE in json.loads(call("partition", "show", path, "--json"))["silos"]
    JobStore(tmp_path, lambda _: (), {}).keep_result({"memberships": torch.eye(2)}, (HOSTILE, "b"))
    call("membership", "show", tmp_path / "result.safetensors", code=1)
    JobStore(tmp_path, lambda _: (), {}).keep_result({KEYED: torch.eye(2)}, ("a", "b"))
    call("membership", "show", tmp_path / "result.safetensors", code=1)


def test_what_a_check_found(capsys):
    report = PreflightReport()
    report.look(HOSTILE, lambda: (None, HOSTILE))
    for as_json in (False, True):
        output.show(report, as_json)
        assert capsys.readouterr().out.replace("\n", "").isprintable()


PATHS = (
    ("silo", "init", "{}"), ("coordinator", "init", "{}"), ("policy", "init", "{}"),
    ("operator", "init", "{}"), ("job", "init", "{}"),
)  # fmt: skip
MISSING = (
    ("ledger", "verify", "{}"),
    ("ledger", "show", "{}"),
    ("ledger", "report", "{}"),
    ("ledger", "prove", "0", "{}"),
    ("ledger", "verify-proof", "{}", "--record", "{}", "--key", "{}"),
    ("ledger", "verify-export", "{}", "--key", "{}"),
    ("ledger", "reconcile", "--silo", "{}", "--coordinator", "{}"),
    ("roster", "show", "{}"),
    ("roster", "remove", "{}", "{}"),
    ("keys", "show", "{}"),
    ("job", "show", "{}", "--roster", "{}"),
    ("job", "list", "--operator", "{}"),
    ("job", "results", "{}", "--config", "{}", "--out", "{}"),
    ("policy", "check", "{}", "--config", "{}"),
    ("privacy", "show", "--config", "{}"),
    ("status", "--config", "{}"),
    ("silo", "run", "--config", "{}"),
    ("coordinator", "run", "--config", "{}"),
    ("membership", "show", "{}"),
    ("partition", "show", "{}"),
    ("partition", "show", "{}.json"),
    ("simulate", "{}"),
    ("reproduce", "{}", "--data", "{}"),
    ("demo", "--method", "{}"),
)


@pytest.mark.parametrize("arguments", PATHS, ids=" ".join)
def test_names_of_files_that_are_written(call, tmp_path, arguments):
    path = tmp_path / FILE_NAME
    said = call(*(argument.format(path) for argument in arguments))
    assert path.exists()
    assert said.startswith(f"{tmp_path}{os.sep}{FILE_SHOWN}: ")
    assert FILE_SHOWN in call(*(argument.format(path) for argument in arguments), code=1)


@pytest.mark.parametrize("arguments", MISSING, ids=" ".join)
def test_names_of_files_that_are_not_there(call, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    said = call(*(argument.format(FILE_NAME) for argument in arguments), code=1)
    assert r"\x1b" in said
    assert "Traceback" not in said


def test_a_line_break_in_a_name_is_no_further_message(call):
    said = call("roster", "show", "x\nstaddle: verified", code=1).splitlines()
    assert said[0] == "staddle: x"
    assert all(line.startswith("  ") for line in said[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        (f"--{FILE_NAME}",),
        (FILE_NAME,),
        ("keys", "new", "x", "--role", FILE_NAME),
        ("ledger", "show", "x", FILE_NAME),
    ],
)
def test_a_command_line_that_is_wrong(call, arguments):
    assert r"\x1b" in call(*arguments, code=2)


def test_an_error_that_nobody_expected(call, monkeypatch, federation):
    def broken(_):
        raise ValueError(HOSTILE)

    monkeypatch.setattr("staddle.security.identity.roster.load", broken)
    said = call("roster", "show", federation.folder / "roster.json", code=1)
    assert said.startswith("Traceback (most recent call last):\n")
    assert r"ValueError: é你\x1b[31mr" in said


def test_a_proof_that_a_program_reads_is_as_it_was_made(call, tmp_path):
    """To a pipe go the bytes of the file, which others check.

    Nothing of a proof steers a terminal.
    """
    report_ledgers.full(tmp_path / "ledger")
    said = call("ledger", "prove", "0", tmp_path)
    call("ledger", "prove", "0", tmp_path, "--out", tmp_path / "proof")
    assert (
        hashlib.sha256(said.encode()).digest()
        == hashlib.sha256((tmp_path / "proof").read_bytes()).digest()
    )

import json
import re
from hashlib import sha256

import pytest
from support.ledgers import (
    first,
    intend,
    keyed,
    open_ledger,
    private,
    summed,
    write_digest,
    write_outcome,
    write_start,
)
from typer.testing import CliRunner

from staddle.commands.main import app
from staddle.errors import LocalError
from staddle.security.ledger.records import Applied, MessageDigest, TensorDigest
from staddle.security.policy.release import Release

HASH = "ab" * 32


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def fails(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, LocalError), (result.output, result.exception)
    return str(result.exception)


def new_keys(member, role, folder):
    named = ("--role", role, "--organisation", f"Org {member}")
    return ("keys", "new", member, *named, "--out", folder)


@pytest.fixture
def folder(tmp_path):
    members = {"f1": "founder", "f2": "founder", "coordinator": "coordinator", "silo-a": "silo"}
    for member, role in members.items():
        run(*new_keys(member, role, tmp_path / member))
    return tmp_path


def fingerprint(folder, member):
    return json.loads(run("keys", "show", folder / member, "--json"))["protocol_fingerprint"]


def test_keys(folder):
    shown = run("keys", "show", folder / "silo-a")
    assert "organisation  Org silo-a" in shown
    assert fingerprint(folder, "silo-a") in shown
    assert "PRIVATE" not in shown
    assert "holds files already" in fails(*new_keys("silo-a", "silo", folder / "silo-a"))
    (folder / "silo-a" / "log.key").chmod(0o644)
    assert "chmod 600" in fails("keys", "show", folder / "silo-a")
    assert "Invalid value" in run(*new_keys("x", "boss", "x"), code=2)


def test_roster_from_founders_to_verified(folder):
    path = folder / "roster.json"
    founders = [a for f in ("f1", "f2") for a in ("--founder", folder / f / "entry.json")]
    new = ["roster", "new", "--federation", "lung", *founders, "--threshold", 2, "--out", path]
    assert "version 1, 2 members, signed by nobody (2 of 2 founders must sign)" in run(*new)
    assert "exists already" in fails(*new)
    assert "no coordinator" in fails("roster", "sign", path, "--keys", folder / "f1")
    for member in ("coordinator", "silo-a"):
        run("roster", "add", path, folder / member / "entry.json")
    assert "say --replace" in fails("roster", "add", path, folder / "silo-a" / "entry.json")
    run("roster", "add", path, folder / "silo-a" / "entry.json", "--replace")
    pins = [a for f in ("f1", "f2") for a in ("--founder", fingerprint(folder, f))]
    verify = ["roster", "verify", path, "--federation", "lung", *pins, "--threshold", 2]
    assert "signed: nobody; missing: f1, f2" in fails(*verify)
    run("roster", "sign", path, "--keys", folder / "f1")
    run("roster", "sign", path, "--keys", folder / "f2")
    assert run(*verify).endswith("verified\n")
    assert "older than minimum_version = 9 on the" in fails(*verify, "--minimum-version", 9)
    assert "founders.2 = 'x'" in fails(*verify, "--founder", "x")
    shown = run("roster", "show", path)
    assert "Org silo-a" in shown
    assert fingerprint(folder, "f1") in shown
    document = json.loads(run("roster", "show", path, "--json"))
    assert (document["version"], sorted(document["signatures"])) == (4, ["f1", "f2"])
    run("roster", "remove", path, "silo-a")
    assert "signed: nobody" in fails(*verify)


def filled(folder):
    release = Release("model", "whole_model", "w", "float32", (1000,))
    with open_ledger(folder / "silo" / "ledger") as log:
        write_start(log, "staddle", HASH, HASH)
        for number in (1, 2):
            policy = Applied(file=HASH, rule="round-update", decision="allow")
            fields = {"job": f"j{number}", "round_number": number, "policy": policy}
            ref = intend(log, **fields, releases=[release], message_bytes=4000)
            if number == 1:
                digest = TensorDigest(part="model", name="w", sha256=HASH)
                write_digest(log, ref, [digest], MessageDigest(bytes=4000, sha256=HASH))
                write_outcome(log, ref, "sent", 4000)
        return log.head


def test_ledger_verify(tmp_path):
    head = filled(tmp_path)
    silo = tmp_path / "silo"
    shown = run("ledger", "verify", silo)
    assert f"verified: 5 records, head 4:{head.leaf}" in shown
    assert "1 messages without outcome, counted as left: seq 4" in shown
    document = json.loads(run("ledger", "verify", silo, "--json"))
    assert (document["ok"], document["records"], document["open_intents"]) == (True, 5, [4])
    run("ledger", "verify", silo, "--known", f"4:{head.leaf}")
    assert "another party knows" in run("ledger", "verify", silo, "--known", f"4:{HASH}", code=1)
    assert "cut off" in run("ledger", "verify", silo, "--known", f"9:{HASH}", code=1)
    assert "is not SEQ:LEAF" in fails("ledger", "verify", silo, "--known", "9")
    path = first(silo / "ledger")
    path.write_bytes(path.read_bytes().replace(b'"job":"j1"', b'"job":"jX"'))
    assert "NOT VERIFIED" in run("ledger", "verify", silo, code=1)
    assert json.loads(run("ledger", "verify", silo, "--json", code=1))["ok"] is False


def test_ledger_show_and_summary(tmp_path):
    filled(tmp_path)
    silo = tmp_path / "silo"
    shown = run("ledger", "show", silo)
    cells = (
        "j1",
        "j2",
        "round-update",
        "coordinator",
        "4,000",
        "sent",
        "no outcome, no digest, assumed",
    )
    assert [cell for cell in cells if cell not in shown] == []
    assert "1 message, 4,000 bytes; at most 4,000 bytes more, which no record counts" in shown
    assert "0 messages, 0 bytes; at most 4,000 bytes more" in run(
        "ledger", "show", silo, "--round", 2
    )
    assert "0 messages" in run("ledger", "show", silo, "--round", 2, "--job", "j1")
    for more in ((), ("--json",), ("--round", 2)):
        said = fails("ledger", "show", silo, "--job", "j3", *more)
        assert "no record is of job 'j3'; its jobs: j1, j2" in said
    outcomes = [m["outcome"] for m in json.loads(run("ledger", "show", silo, "--json"))]
    assert outcomes == ["sent", "no outcome"]
    said = run("ledger", "summary", silo)
    assert "4,000 bytes in all; at most 4,000 bytes more, which no record counts" in said
    rows = json.loads(run("ledger", "summary", silo, "--json"))
    assert [(row["job"], row["part"], row["bytes"], row["assumed"]) for row in rows] == [
        ("j1", "model", 4000, 0),
        ("j2", "model", 0, 4000),
    ]
    assert "in force" not in run("ledger", "show", silo)  # an older ledger
    digest = sha256(b"a policy").hexdigest()
    with open_ledger(silo / "ledger") as log:
        log.put_in_force(digest, "a policy")
    for command in ("show", "summary"):
        said = run("ledger", command, silo)
        assert re.search(rf"policy {digest} in force from 20.*Z on \(record 5,", said)


def test_ledger_show_and_summary_of_secure_sums(tmp_path):
    summed(tmp_path)
    shown = run("ledger", "show", tmp_path)
    for cell in (
        "sent; masked among silo-a, silo-b, silo-c, silo-d, threshold 3",
        "shares, counts as left",
        "attempt d8d8d8d8 ended, SURVIVORS, blamed: coordinator: U3 has 2 members",
        "sum c7c7c7c7 opened over silo-a, silo-b, silo-d",
        "9 messages, 1,337 bytes",
    ):
        assert cell in shown
    lines = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert lines == ["1", "2", "3", "5", "7", "8", "9", "10", "11", "12", "13"]
    assert "3 messages, 603 bytes" in run("ledger", "show", tmp_path, "--round", 4)
    assert "8 messages, 1,113 bytes" in run("ledger", "show", tmp_path, "--part", "(protocol)")
    assert "1 message, 224 bytes" in run("ledger", "show", tmp_path, "--part", "model")
    assert "ended" not in run("ledger", "show", tmp_path, "--recipient", "coordinator")
    documents = json.loads(run("ledger", "show", tmp_path, "--json"))
    assert [(document["seq"], document["type"]) for document in documents[:3] + documents[8:9]] == [
        (1, "egress.protocol"), (2, "egress.protocol"), (3, "egress.intent"), (11, "secagg.end"),
    ]  # fmt: skip
    assert documents[2]["secagg"]["members"] == ["silo-a", "silo-b", "silo-c", "silo-d"]
    rows = json.loads(run("ledger", "summary", tmp_path, "--json"))
    assert [(row["method"], row["part"], row["messages"], row["bytes"]) for row in rows] == [
        ("fedavg", "model", 1, 176),
        ("fedavg", "metric", 1, 8),
        ("fedavg", "(message)", 1, 40),
        ("(protocol)", "(protocol)", 8, 1113),
    ]


def test_show_and_summary_tell_padded_and_rotated_parts(tmp_path):
    keyed(tmp_path / "ledger")
    shown = run("ledger", "show", tmp_path)
    for cell in (
        "contribution, counts as left",
        "sent; padded, version 0",
        "unknown, no digest; padded, version 1",
        "padded, counts as left",
        "sent; rotated, to be compared",
        "sent; masked among silo-a, silo-b, silo-c, silo-d, threshold 3",
        "12 messages, 2,572 bytes",
    ):
        assert cell in shown
    assert "3 messages, 704 bytes" in run("ledger", "show", tmp_path, "--part", "extractor")
    assert "2 messages, 120 bytes" in run("ledger", "show", tmp_path, "--part", "heads")
    documents = json.loads(run("ledger", "show", tmp_path, "--json"))
    hidden = [document for document in documents if document.get("hidden")]
    numbers = [(document["form"], document["hidden"]["number"]) for document in hidden]
    assert numbers == [("padded", 0), ("rotated", 0), ("padded", 1), ("padded", 1), ("rotated", 0)]
    rows = json.loads(run("ledger", "summary", tmp_path, "--json"))
    assert [(row["part"], row["messages"], row["bytes"], row["assumed"]) for row in rows] == [
        ("extractor", 3, 704, 0), ("heads", 2, 120, 0), ("model", 2, 352, 0),
        ("metric", 2, 16, 0), ("(message)", 2, 80, 0), ("(protocol)", 5, 1300, 0),
    ]  # fmt: skip


def test_show_tells_whose_noise_it_is(tmp_path):
    private(tmp_path / "ledger", noise="shared")
    shown = run("ledger", "show", tmp_path)
    assert "paid by 2, 4 of data set 'data', under a share of" in shown  # a cell breaks there


def test_show_and_summary_tell_what_paid_and_what_it_cost(tmp_path):
    private(tmp_path / "ledger")
    shown = run("ledger", "show", tmp_path)
    for cell in (
        "sent; noised: model; public: metric; paid by 2, 4 of data set 'data'",
        "sent; noised: model; public: metric; paid by 2, 4, 6 of data set 'data'",
        "data set 'data': epsilon 1.7500 of 8 spent or reserved, at delta 0.00001",
        "3 messages, 552 bytes",
    ):
        assert cell in shown
    assert "exact:" not in shown
    assert "data set 'scans'" not in run("ledger", "show", tmp_path, "--job", "j2")
    documents = json.loads(run("ledger", "show", tmp_path, "--json"))
    assert [document["dp"] for document in documents if "dp" in document] == [
        {"dataset": "data", "ids": [2, 4], "noise": "local"},
        {"dataset": "data", "ids": [2, 4, 6], "noise": "local"},
        None,
    ]
    heads = [document["size"] for document in documents if document["type"] == "privacy.head"]
    assert heads == [3, 5, 7, 3]
    spent = "data set 'data': epsilon 1.7500 of 8 spent or reserved, at delta 0.00001"
    assert f"{spent}, as of record 6" in run("ledger", "summary", tmp_path)
    *rows, data, scans = json.loads(run("ledger", "summary", tmp_path, "--json"))
    assert [
        (row["job"], row["part"], row["taint"], row["messages"], row["bytes"]) for row in rows
    ] == [
        ("j1", "model", "noised", 2, 352),
        ("j1", "metric", "public", 2, 16),
        ("j2", "model", "exact", 1, 176),
        ("j2", "metric", "exact", 1, 8),
    ]
    assert (data["dataset"], data["epsilon"]) == ("data", "1.7500")
    assert (scans["dataset"], scans["limit"]) == ("scans", "1.5")


def test_help_names_every_command():
    for noun, verbs in [
        ("keys", "new show"),
        ("roster", "new add remove sign show verify"),
        ("ledger", "verify show summary report rekey"),
        ("ledger", "prove verify-proof consistency verify-consistency export verify-export"),
    ]:
        shown = run(noun, "--help")
        assert all(verb in shown for verb in verbs.split())

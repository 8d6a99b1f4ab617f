import asyncio
import contextlib
import json
import shutil
import socket
import sqlite3
from types import SimpleNamespace

import pytest
from support.ledgers import write_serving, write_stop
from support.signed_federation import job_document, pfedsim
from typer.testing import CliRunner

from staddle.algorithms.job.job import Job, JobFile
from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.coordinator import config as configs
from staddle.coordinator.blind.unmask import masked_bytes
from staddle.coordinator.check import check, largest_round
from staddle.coordinator.server import running
from staddle.files.documents import canonical_json, parse_json, validate
from staddle.security.blind.plan import JobPlan
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.security.ledger.ingress_ledger import ReceivingLedger

SILOS = ["a", "b"]
NAMES = ["configuration", "keys", "roster", "member", "clock", "database", "ledger", "job", "disk"]
NAMES += ["listen"]

CHECK = ("coordinator", "check", "--config")


def job(name, **changes):
    return job_document(SILOS, name=name, **{"rounds": 2, **changes})


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    made = local_federation.make(tmp_path_factory.mktemp("check") / "federation", SILOS)
    local_federation.sign_job(made, job("one"))
    return made


@pytest.fixture
def federation(original, tmp_path):
    shutil.copytree(original.folder, tmp_path / "local")
    made = local_federation.LocalFederation(tmp_path / "local", original.silos, original.founder)
    local_federation.write_coordinator(made, ["one"], {})
    return made


@pytest.fixture
def config(federation):
    return federation.coordinator_config


def texts_of(config, *, ok):
    return {found.name: found.text for found in check(config).findings if found.ok == ok}


@pytest.fixture
def failed(config):
    return lambda: texts_of(config, ok=False)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def remove_b(federation):
    path = federation.folder / "roster.json"
    roster = rosters.remove(rosters.load(path), "b")
    rosters.save(rosters.sign(roster, load_keys(federation.folder / "founder")), path)


def serve(federation, then):
    """Run the coordinator, and beside it a function in a thread."""

    async def run():
        async with running(configs.load(federation.coordinator_config)) as address:
            return await asyncio.to_thread(then, address)

    return asyncio.run(run())


def test_all_that_is_as_it_should_be(federation, config):
    result = CliRunner().invoke(app, [*CHECK, str(config)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "all is well"
    result = CliRunner().invoke(app, [*CHECK, str(config), "--json"])
    document = json.loads(result.output)
    assert [finding["name"] for finding in document["findings"]] == NAMES
    texts = {finding["name"]: finding["text"] for finding in document["findings"]}
    assert "'one', fedavg, 2 silos upload 107.1 KiB per round" in texts["job"]
    assert "none yet" in texts["database"]
    assert not (federation.folder / "coordinator" / "state").exists()


def test_a_job_that_does_not_say_what_it_is_for(federation, failed):
    path = federation.folder / "jobs" / "one.json"
    document = parse_json(path.read_bytes(), "one")["document"]
    del document["purpose"]
    operator, roster = load_keys(federation.folder / "operator"), federation.folder / "roster.json"
    signed = sign_document(document, rosters.load(roster), operator, JOB)
    path.write_bytes(canonical_json(signed))
    assert "jobs/one.json: purpose is missing" in failed()["job"]


def test_configuration_keys_and_roster(federation, failed, config):
    (federation.folder / "coordinator" / "keys" / "tls.key").chmod(0o604)
    found = failed()
    assert "chmod 600" in found["keys"]
    assert found["member"] == "not tried: first put keys and roster right"
    edit(config, "threshold = 1", "threshold = 2")
    found = failed()
    assert "says threshold 1, but threshold = 2 in [trust]" in found["roster"]
    assert found["job"] == "not tried: first put roster and database right"
    edit(config, "listen", "lisen")
    assert "did you mean 'listen'?" in failed()["configuration"]


def test_keys_of_another_role(config, failed):
    edit(config, 'keys = "keys"', 'keys = "../a/keys"')
    assert "'a' is a silo, not a coordinator" in failed()["member"]


def test_jobs_that_are_not_signed_for_this_roster(federation, failed):
    signed = federation.folder / "jobs" / "one.json"
    whole = signed.read_text()
    edit(signed, '"rounds":2', '"rounds":3')
    assert "its signature does not fit" in failed()["job"]
    signed.write_text(whole)
    remove_b(federation)
    assert "not those of our roster" in failed()["job"]
    local_federation.sign_job(federation, job("one"))
    assert "silo 'b' is not a silo of the roster" in failed()["job"]
    signed.unlink()
    assert "cannot read it" in failed()["job"]


def test_the_database_and_the_port_of_a_coordinator_that_runs(federation, failed, config):
    def beside(address):
        edit(config, "127.0.0.1:0", address)
        texts = texts_of(config, ok=True)
        assert list(texts) == NAMES
        assert texts["listen"].startswith(f"{address} is taken by the coordinator that runs with ")
        assert "1 jobs, 1 of them not ended" in texts["database"]
        edit(config, '"state"', '"elsewhere"')
        assert f"{address}: Address already in use; free the port" in failed()["listen"]
        edit(config, '"elsewhere"', '"state"')

    serve(federation, beside)
    path = federation.folder / "roster.json"
    whole = path.read_bytes()
    remove_b(federation)
    assert failed() == {}  # the coordinator took the job under the roster of its time
    path.write_bytes(whole)
    local_federation.sign_job(federation, job("one", rounds=3))
    assert "another job 'one' was run here" in failed()["job"]


def test_a_port_of_somebody_else_and_an_address_that_is_not_ours(config, failed):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        edit(config, "127.0.0.1:0", f"127.0.0.1:{port}")
        assert "Address already in use" in failed()["listen"]
    edit(config, f"127.0.0.1:{port}", "192.0.2.1:7443")
    assert "listen on an address of this host" in failed()["listen"]
    edit(config, "192.0.2.1", "nowhere.invalid")
    assert "nowhere.invalid:7443: " in failed()["listen"]


def test_a_database_that_is_none(federation, failed):
    folder = federation.folder / "coordinator" / "state"
    folder.mkdir()
    (folder / "coordinator.sqlite").write_bytes(b"no database at all" * 99)
    found = failed()
    assert "coordinator.sqlite" in found["database"]
    assert "not tried" in found["job"]


def test_a_database_of_an_older_release_is_read_and_stays_as_it_is(federation, failed):
    serve(federation, lambda _: None)
    path = federation.folder / "coordinator" / "state" / "coordinator.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 4")
    before = path.read_bytes()
    assert "database" not in failed()
    assert path.read_bytes() == before


def test_a_folder_of_tensors_without_its_database(federation, failed):
    folder = federation.folder / "coordinator" / "state" / "jobs" / "one"
    folder.mkdir(parents=True)
    assert failed() == {}
    (folder / "1.model.safetensors").touch()
    assert (
        f"{folder}: holds 1.model.safetensors, but by coordinator.sqlite there is no such job"
        in failed()["job"]
    )


def test_a_job_that_may_take_more_disk_than_a_job_is_given(config, failed):
    texts = texts_of(config, ok=True)
    assert (
        "; at most 280.2 KiB (107.1 KiB uploads, 173.1 KiB published) on the disk" in texts["job"]
    )
    edit(config, "[timing]", '[limits]\nmax_job_bytes = "280KiB"\n\n[timing]')
    assert "job 'one' with 2 silos may need 280.2 KiB" in failed()["job"]
    assert "limits.max_job_bytes is 280.0 KiB; raise it" in failed()["job"]
    edit(config, '"280KiB"', '"281KiB"')
    assert failed() == {}


def test_a_job_with_code_of_a_package_is_for_those_who_allow_it(federation, config, failed):
    model = {"name": "normed", "classes": 3, "head": "4", "input": [1, 8, 8]}
    local_federation.sign_job(federation, job("one", model=model))
    assert (
        "the job runs code of the installed package other-models, which may not" in failed()["job"]
    )
    # whoever makes a local federation allows what its jobs name
    local_federation.write_coordinator(federation, ["one"], {})
    assert 'packages = ["other-models"]' in config.read_text()
    assert failed() == {}


def test_the_disk_holds_a_round_of_every_job(federation, failed, monkeypatch):
    monkeypatch.setattr("staddle.coordinator.check.largest_round", lambda _: 3 * 2**29)
    local_federation.sign_job(federation, job("two"))
    local_federation.write_coordinator(federation, ["one", "two"], {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**30))
    assert failed() == {}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**30 - 1))
    assert "3.0 GiB needed (a round of each job); make room" in failed()["disk"]


def test_a_ledger_that_was_changed_is_found(federation, failed):
    folder = federation.state("coordinator") / "ledger"
    keys = load_keys(federation.folder / "coordinator" / "keys")
    with ReceivingLedger.open(folder, "coordinator", federation.name, keys.log) as ledger:
        write_serving(ledger, "coordinator", "staddle", "ab" * 32)
        write_stop(ledger, "asked to stop")
    assert failed() == {}
    path = folder / "seg-00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"asked", b"ASKED"))
    assert "run: staddle ledger verify" in failed()["ledger"]


def test_the_largest_round_of_a_blind_job_has_padded_words_of_eight_bytes():
    plain, blind = (
        Job.from_file(validate(pfedsim("abcd", security=security), JobFile, "job"), "job")
        for security in ({"secure_aggregation": "off"}, {})
    )
    extractor, rows, metrics = (sum(spec.nbytes for spec in part.tensors) for part in plain.up(0))
    assert largest_round(plain) == 4 * (extractor + rows + metrics)
    assert largest_round(blind) == 4 * (
        2 * extractor + rows + masked_bytes(JobPlan(blind).round(0))
    )

"""What operators see and get from a coordinator in this process; its silos are raw calls."""

import csv
import datetime as dt
import json
import shutil
import socket
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import grpc
import pytest
import safetensors.torch
import torch
from support.coordinator_thread import coordinator
from support.raw_silo import Caller
from support.refusals import refused
from support.signed_federation import job_document
from typer.testing import CliRunner

from staddle.commands.federation import local_federation, operator_client
from staddle.commands.main import app
from staddle.commands.terminal.toml import to_toml
from staddle.coordinator import config as configs
from staddle.coordinator.rpc import operations as served
from staddle.coordinator.storage import results
from staddle.errors import AbsentError, LocalError, PeerError, RefusedError, UnreachableError
from staddle.files import tensor_file
from staddle.files.documents import canonical_json
from staddle.proto import federation_pb2 as pb
from staddle.proto import operations_pb2 as operations
from staddle.proto.channel import ERROR_METADATA
from staddle.security.identity import roster as rosters
from staddle.security.identity.certificate import utc_now
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.identity.signed_document import sign_document

CODE = pb.ERROR_CODE_DATA
SILOS = ("north", "east", "south")
COUNTS = ["correct.delivered", "correct.trained", "tested"]


def document(name="one", **changes):
    method = {"name": "pfedsim", "options": {"rho": 0.5}}
    return job_document(SILOS, name=name, **{"rounds": 2, "method": method, **changes})


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return local_federation.make(tmp_path_factory.mktemp("operated") / "federation", SILOS)


@pytest.fixture
def world(federation, tmp_path):
    """A coordinator without jobs.

    ``call`` is the command line, ``signed`` a job file, ``silos`` take part in a job.
    """
    folder = federation.folder
    timing = {"beat_seconds": 60, "hold_seconds": 1, "admission_seconds": 60}
    local_federation.write_coordinator(federation, [], timing)
    roster = rosters.load(folder / "roster.json")
    config = configs.load(federation.coordinator_config)
    config = config.model_copy(update={"directory": tmp_path / "state"})
    with coordinator(config) as here:
        operator = local_federation.write_operator(federation, here.address)
        callers = []

        def call(*arguments, code=0, operator=operator):
            words = ["job", *map(str, arguments), "--operator", str(operator)]
            result = CliRunner().invoke(app, words)
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            assert result.exit_code == code, result.output
            return result.output

        def signed(name="one", **changes):
            job = local_federation.sign_job(federation, document(name, **changes))
            return job, folder / "jobs" / f"{name}.json"

        def silos(job):
            async def accept():
                made = [
                    Caller(here.address, load_keys(folder / s / "keys"), roster, job) for s in SILOS
                ]
                callers.extend(made)
                for caller in made:
                    await caller.accept()
                return made

            return here.run(accept())

        def contribute(caller, round_, **changes):
            async def scenario():
                await caller.told("round")
                await caller.contribute(round_, **changes)

            here.run(scenario())

        def until(condition):
            async def scenario():
                while not condition():
                    await here.daemon.changed.wait()

            here.run(scenario())

        async def leave():
            for caller in callers:
                await caller.channel.close()

        yield SimpleNamespace(
            here=here, call=call, signed=signed, silos=silos, contribute=contribute, until=until,
            operator=operator,
            config=config, folder=folder, roster=roster,
        )  # fmt: skip
        here.run(leave())
        assert here.broken == []


@contextmanager
def refusing(code, why):
    with pytest.raises(RefusedError, match=why) as caught:
        yield
    assert caught.value.code == code


def shown(world, name="one"):
    return json.loads(world.call("show", name, "--json"))


def test_a_job_from_its_submission_to_its_results(world, tmp_path):
    job, path = world.signed()
    unheard = "; not seen since the coordinator started: north, east, south"
    unheard += "; awaited: north, east, south (not connected)"
    assert world.call("submit", path) == f"{'one':<24} {'admitting':<18} 0 of 2 rounds{unheard}\n"
    state = shown(world)
    expected = {"job": "one", "method": "pfedsim", "digest": job.digest, "stage": "admitting"}
    expected |= {"round": 0, "rounds": 2, "outcome": "running", "reason": "", "cohort": []}
    expected |= {"answers": dict.fromkeys(SILOS, ""), "given": [], "failed": {}}
    assert state == {**expected, "unheard": list(SILOS)} | {"rounds": []}
    north, east, south = world.silos(job)
    world.contribute(north, 0)
    state = shown(world)
    assert (state["stage"], state["cohort"], state["given"]) == ("round", list(SILOS), ["north"])
    assert state["answers"] == dict.fromkeys(SILOS, "accepted")
    awaited = "1 of 3 silos uploaded; awaited: east, south (training)"
    assert world.call("list") == f"{'one':<24} {'round':<18} 0 of 2 rounds, {awaited}\n"
    world.contribute(east, 0)
    world.here.run(south.answer("FAILED", 0, CODE))
    world.until(lambda: world.here.daemon.runs[0].state.round == 1)
    state = shown(world)
    assert [closed["members"] for closed in state["rounds"]] == [["north", "east"]]
    world.here.run(south.answer("FAILED", 1, pb.ERROR_CODE_BUDGET))
    assert shown(world)["failed"] == {"south": "BUDGET"}
    failed = "failed     south BUDGET, its privacy budget is spent"
    assert failed in world.call("show", "one").splitlines()
    for silo in (north, east):
        world.contribute(silo, 1, fill=3.0)
    world.until(lambda: world.here.daemon.runs[0].state.stage == "finishing")
    for silo in (north, east, south):
        world.here.run(silo.answer("DONE", 2))
    watched = world.call("watch", "one").splitlines()
    sums = "north, east: 6 test records; as delivered accuracy 100.0%; as trained accuracy 100.0%"
    assert watched == [
        "round 0 closed: north, east: the silos keep their test counts to themselves",
        f"round 1 closed: {sums}",
        f"{'one':<24} {'completed':<18} 2 of 2 rounds",
    ]
    (line,) = [json.loads(line) for line in world.call("watch", "one", "--json").splitlines()]
    assert [closed["round"] for closed in line["closed"]] == [0, 1]
    text = world.call("show", "one").splitlines()
    assert "answers    east accepted, north accepted, south accepted" in text
    assert "cohort     -" in text
    assert "reason     -" in text
    assert text[-1] == f"round 1: {sums}"
    assert [entry["job"] for entry in json.loads(world.call("list", "--json"))] == ["one"]
    far = world.call("results", "one", "--out", tmp_path / "far").split()
    assert [path.rpartition("/")[2] for path in far] == ["rounds.csv", "job.json"]
    near = results.write(tmp_path / "near", results.read(world.config.directory, "one"))
    files = {"rounds.csv", "job.json", "result.safetensors", "model.safetensors"}
    assert {path.name for path in near} == files
    assert all(path.is_file() for path in near)
    both = [tmp_path / folder for folder in ("far", "near")]
    tables = [list(csv.DictReader((folder / "rounds.csv").open())) for folder in both]
    assert tables[0] == tables[1]
    assert [row["members"] for row in tables[0]] == ["north east"] * 2
    counts, measures = COUNTS, ["accuracy.delivered", "accuracy.trained"]
    assert list(tables[0][0]) == ["round", "members", *counts, *measures]
    assert [row["accuracy.trained"] for row in tables[0]] == ["", "1.0"]
    sums = [{name: int(row[name]) for name in counts} for row in tables[0]]
    assert sums == [closed["metrics"] for closed in shown(world)["rounds"]]
    documents = [json.loads((folder / "job.json").read_text()) for folder in both]
    assert [[c["round"] for c in d["rounds"]] for d in documents] == [[0, 1]] * 2
    assert [d["state"]["outcome"] for d in documents] == ["completed"] * 2
    model = safetensors.torch.load_file(tmp_path / "near" / "model.safetensors")
    assert all(torch.equal(value, torch.full_like(value, 0.5)) for value in model.values())


def test_watching_tells_each_round_once_and_a_failed_job_ends_with_1(world):
    job, path = world.signed()
    world.call("submit", path)
    callers = world.silos(job)
    with operator_client.connected(world.operator) as operator:
        reports = operator.watch("one")
        told = [next(reports)]
        for caller in callers:
            world.contribute(caller, 0)
        while told[-1].status.round == 0:
            told.append(next(reports))
        assert [closed.round for report in told for closed in report.rounds] == [0]
        for caller in callers:
            world.here.run(caller.answer("FAILED", 1, CODE))
        world.until(lambda: world.here.daemon.runs[0].state.stage == "finishing")
        for caller in callers:
            world.here.run(caller.answer("DONE", 1))
        told += list(reports)
    assert told[-1].status.stage == "ended"
    assert [closed.round for report in told for closed in report.rounds] == [0]
    assert all(before != after for before, after in pairwise(told))
    line = world.call("watch", "one", code=1).splitlines()[-1]
    assert "failed" in line
    assert line.endswith(shown(world)["reason"])
    assert shown(world)["reason"]


def test_jobs_run_in_turn_stop_and_resume(world):
    for name in ("one", "two"):
        assert world.call("submit", world.signed(name)[1]).split()[0] == name
    stages = [line.split()[:2] for line in world.call("list").splitlines()]
    assert stages == [["one", "admitting"], ["two", "queued"]]
    assert world.call("stop", "one").split()[:2] == ["one", "stopped"]
    assert [line.split()[1] for line in world.call("list").splitlines()] == ["stopped", "admitting"]
    assert world.call("resume", "one").split()[:2] == ["one", "queued"]
    for command in ("show", "stop", "resume", "watch"):
        with refusing("UNKNOWN_JOB", "no job 'three' here; `staddle job list` has all"):
            world.call(command, "three")


def test_a_submission_again_changes_nothing_and_another_job_needs_another_name(world):
    _, path = world.signed()
    assert world.call("submit", path) == world.call("submit", path)
    assert len(world.here.daemon.runs) == 1
    why = "another job has the name 'one', and it has not ended yet .*; have this one signed under"
    with refusing("JOB_INVALID", why):
        world.call("submit", world.signed(rounds=3)[1])
    assert [run.job.rounds for run in world.here.daemon.runs] == [2]


def test_a_job_that_has_ended_is_not_submitted_again(world):
    _, path = world.signed()
    world.call("submit", path)
    run = world.here.daemon.runs[0]
    run.state = replace(run.state, stage="ended", outcome="failed", opened=True)
    with refused("job 'one' has ended, and its name stays taken; to run it again, have it"):
        world.call("submit", path)
    with refusing("JOB_INVALID", "another job has the name 'one', and it has begun"):
        world.call("submit", world.signed(rounds=3)[1])
    with refusing("ROUND_CLOSED", "job 'one' has begun; `staddle job stop` stops it"):
        world.call("withdraw", "one")


def test_a_job_that_was_withdrawn_gives_its_name_to_the_same_or_another(world):
    _, path = world.signed()
    world.call("submit", path)
    assert "failed" in world.call("withdraw", "one")
    for file in (path, world.signed(rounds=3)[1]):
        assert "admitting" in world.call("submit", file)
        (run,) = world.here.daemon.runs
        assert run.state.silos == run.job.silos
        world.call("withdraw", "one")
    assert run.job.rounds == 3

    async def stored():
        return world.here.daemon._database.states()

    (kept,) = world.here.run(stored())
    assert (kept.rounds, kept.outcome) == (3, "failed")


def test_a_name_stays_taken_by_a_job_to_whose_key_a_silo_contributed(world):
    _, path = world.signed()
    world.call("submit", path)
    daemon = world.here.daemon

    async def contribute():
        with daemon.writing():
            daemon._database.add_contribution("one", "north", "ab" * 32, b"given")

    world.here.run(contribute())
    world.call("withdraw", "one")
    with refused("job 'one' has ended, and its name stays taken"):
        world.call("submit", path)
    with refusing("JOB_INVALID", "silos have contributed to the key that they share in it"):
        world.call("submit", world.signed(rounds=3)[1])


def test_only_so_many_jobs_are_kept(world, monkeypatch):
    monkeypatch.setattr(served, "MOST_JOBS", 2)
    first = world.signed("one")[1]
    for path in (first, world.signed("two")[1]):
        world.call("submit", path)
    with refusing("LIMIT", "2 jobs are kept here"):
        world.call("submit", world.signed("three")[1])
    world.call("submit", first)  # known already


def test_who_signs_and_who_takes_part_stand_in_the_roster(world, tmp_path):
    job, path = world.signed()
    silo = load_keys(world.folder / "north" / "keys")
    path.write_bytes(canonical_json(sign_document(job.document(), world.roster, silo, JOB)))
    with refusing("JOB_SIGNATURE", "only a member of role operator may sign"):
        world.call("submit", path)
    for stranger in ("west", "operator"):
        with refusing("JOB_INVALID", f"silo '{stranger}' is not a silo of the roster; add it"):
            world.call("submit", world.signed("strange", silos=["north", stranger])[1])
    assert world.call("list") == "no jobs\n"


def test_a_watcher_is_told_when_the_coordinator_stops(world, monkeypatch):
    monkeypatch.setattr(operator_client, "AWAY_SECONDS", 0.0)
    world.call("submit", world.signed()[1])
    with operator_client.connected(world.operator) as operator:
        reports = operator.watch("one")
        next(reports)
        world.here.daemon.stopping = True
        world.here.run(told_to_look(world.here.daemon))
        with refusing("STOPPING", "this coordinator is stopping; try again later"):
            next(reports)


class Failed(grpc.RpcError):
    """A call that ended with a status of gRPC's, or with a code of ours."""

    def __init__(self, code=None):
        self._code = code

    def trailing_metadata(self):
        return ((ERROR_METADATA, self._code),) if self._code else ()

    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "gone"


@pytest.fixture
def watching(monkeypatch):
    """What a watch tells of these calls, each of which is a list of reports and its end."""
    clock = SimpleNamespace(now=1.0)
    pass_ = lambda seconds: setattr(clock, "now", clock.now + seconds)
    fake = SimpleNamespace(monotonic=lambda: clock.now, sleep=pass_)
    monkeypatch.setattr(operator_client, "time", fake)

    def watch(*calls):
        left = list(calls)

        def answered(_):
            reports, end = left.pop(0)
            for rounds in reports:
                closed = [operations.ClosedRound(round=number) for number in rounds]
                yield operations.JobReport(rounds=closed)
            if end is not None:
                raise end

        operator = operator_client.Operator.__new__(operator_client.Operator)
        operator._stub = SimpleNamespace(Watch=answered)
        operator._peer, operator._address = "coordinator", "host:1"
        for report in operator.watch("one"):
            yield [each.round for each in report.rounds]

    return watch


def test_a_watch_continues_under_another_roster_and_tells_each_round_once(watching):
    stopping, away = Failed("STOPPING"), Failed()
    found = watching(([[0], [1]], stopping), ([], away), ([[0, 1, 2], [3]], None))
    assert list(found) == [[0], [1], [2], [3]]
    # it may happen again, long after
    found = watching(([[0]], stopping), ([[0]], stopping), ([[0, 1]], None))
    assert list(found) == [[0], [], [1]]


def test_a_watch_ends_where_the_coordinator_stays_away_or_was_lost_at_once(watching):
    found = watching(([[0]], Failed("STOPPING")), *[([], Failed())] * 100)
    assert next(found) == [0]
    with pytest.raises(PeerError, match="no answer from host:1"):
        next(found)
    with pytest.raises(PeerError, match="no answer from host:1"):
        list(watching(([], Failed())))


async def told_to_look(daemon):
    daemon.changed.set()


# The connection.
def changed(world, tmp_path, **changes):
    """The operator's file with other lines, beside the files that it names."""
    path = tmp_path / "operator.toml"
    text = world.operator.read_text().replace('"operator"', f'"{world.folder}/operator"')
    text = text.replace('"roster.json"', f'"{world.folder}/roster.json"')
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_only_an_operator_of_the_roster_connects(world, tmp_path):
    assert world.call("list", operator=changed(world, tmp_path)) == "no jobs\n"
    keys = f'"{world.folder}/operator"'
    for other in ("founder", "north/keys"):
        path = changed(world, tmp_path, keys=(keys, f'"{world.folder}/{other}"'))
        with refused("is not an operator of roster version 6; have it added"):
            world.call("list", operator=path)
    for name in ("operator", "another"):  # an impostor of the same name, and one not yet added
        create_keys(tmp_path / name, name, Role.OPERATOR, "an organisation")
        path = changed(world, tmp_path, keys=(keys, f'"{tmp_path}/{name}"'))
        with pytest.raises(LocalError, match=f"'{name}' is not an operator of roster version 6"):
            world.call("list", operator=path)


def test_a_roster_that_is_not_the_pinned_one_is_refused(world, tmp_path):
    path = changed(world, tmp_path, trust=('federation = "local"', 'federation = "other"'))
    with pytest.raises((LocalError, PeerError), match="other"):
        world.call("list", operator=path)


def test_no_answer_says_where_it_asked_and_what_to_compare(world, tmp_path):
    path = changed(world, tmp_path, address=(world.here.address, "127.0.0.1:1"))
    silent = r"nothing listens on 127.0.0.1:1; is the coordinator running"
    with pytest.raises(AbsentError, match=silent):
        world.call("watch", "one", operator=path)
    path = changed(world, tmp_path, address=(world.here.address, "nowhere"))
    with pytest.raises(LocalError, match="not host:port"):
        world.call("list", operator=path)


def test_an_absent_coordinator_is_asked_once_and_another_roster_with_each_key(
    world, tmp_path, monkeypatch
):
    dials = []

    @contextmanager
    def dialled(address, coordinator, *pair):
        dials.append(pair[:2])
        with real(address, coordinator, *pair) as channel:
            yield channel

    real, own = operator_client.dialled, operator_client.tls_pairs
    monkeypatch.setattr(operator_client, "dialled", dialled)
    monkeypatch.setattr(operator_client, "tls_pairs", lambda keys: own(keys) * 2)
    path = changed(world, tmp_path, address=(world.here.address, "127.0.0.1:1"))
    with pytest.raises(AbsentError):
        world.call("list", operator=path)
    assert len(dials) == 1
    job_file = tmp_path / "one.toml"
    job_file.write_text(to_toml(document()))
    out = ("--out", tmp_path / "one.json")
    said = world.call("sign", job_file, *out, operator=path)
    enough = "of the roster, which is enough for this command; a newer one was not fetched:"
    assert f"{enough} coordinator: nothing listens" in said
    assert (tmp_path / "one.json").exists()

    # Its handshake refuses us, by which another of our certificates may be in its roster.
    dials.clear()
    stranger = create_keys(tmp_path / "stranger", "operator", Role.OPERATOR, "an organisation")
    pair = load_keys(tmp_path / "stranger").tls_key, stranger.certificate.encode()
    monkeypatch.setattr(operator_client, "tls_pairs", lambda _: [pair, pair])
    with pytest.raises(UnreachableError, match=r"no answer from .*roster show") as caught:
        world.call("list")
    assert not isinstance(caught.value, AbsentError)
    assert len(dials) == 2


def test_a_clock_before_the_coordinators_certificate_is_said_before_anybody_is_asked(
    world, monkeypatch
):
    earlier = utc_now() - dt.timedelta(days=30)
    monkeypatch.setattr(operator_client, "utc_now", lambda: earlier)
    with refused("clock says .*, which is .* before the certificate of 'coordinator' begins"):
        world.call("list")


def test_a_coordinator_that_does_not_answer_is_not_waited_for(world, tmp_path, monkeypatch):
    monkeypatch.setattr(operator_client, "CALL_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        path = changed(world, tmp_path, address=(world.here.address, address))
        started = time.monotonic()
        with pytest.raises(PeerError, match=f"no answer from {address}"):
            world.call("list", operator=path)
        assert time.monotonic() - started < 25  # not the 30 s of other calls


# Results and arguments.
def run(*arguments):
    return CliRunner().invoke(app, ["job", *map(str, arguments)]).exception


def test_results_are_of_one_place_and_a_show_of_one_kind(world, tmp_path):
    config = world.folder / "coordinator" / "coordinator.toml"
    for given in ((), ("--operator", world.operator, "--config", config)):
        error = run("results", "one", "--out", tmp_path / "out", *given)
        assert isinstance(error, LocalError)
        assert "give --operator (rounds only), or --config" in str(error)
    roster = world.folder / "roster.json"
    for given in ((), ("--operator", world.operator, "--roster", roster)):
        error = run("show", world.signed()[1], *given)
        assert isinstance(error, LocalError)
        assert "give --roster for a signed job file, or --operator" in str(error)


def test_results_that_cannot_be_read_say_why(world, tmp_path):
    with refused("coordinator.sqlite: no such file; a coordinator with this configuration"):
        results.read(tmp_path / "empty", "one")
    with pytest.raises(LocalError, match="has no job 'one'; it has none"):
        results.read(world.config.directory, "one")
    world.call("submit", world.signed("two")[1])
    world.call("submit", world.signed("a-third")[1])
    with pytest.raises(LocalError, match="has no job 'one'; it has two, a-third"):
        results.read(world.config.directory, "one")
    kept = results.read(world.config.directory, "two")
    assert kept.state["stage"] == "admitting"
    assert (kept.rounds, kept.published, kept.relayed) == ([], {}, ())
    assert kept.sums == COUNTS
    other = tmp_path / "other"
    other.mkdir()
    shutil.copyfile(world.operator, other / "coordinator.sqlite")
    with refused("coordinator.sqlite: cannot read it: file is not a database"):
        results.read(other, "one")


def test_reading_results_changes_nothing_in_the_database(world):
    world.call("submit", world.signed()[1])
    asked = []
    real = sqlite3.connect

    def connect(*arguments, **options):
        asked.append(arguments)
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results.sqlite3, "connect", connect)
        results.read(world.config.directory, "one")
    assert [arguments[0].endswith("?mode=ro") for arguments in asked] == [True]


def test_rounds_as_csv_leave_a_sum_empty_that_a_round_has_not(tmp_path):
    rounds = [
        {"round": 0, "members": ["b", "a"], "metrics": {}, "measures": {}},
        {
            "round": 1,
            "members": ["a"],
            "metrics": {"tested": 3, "correct.trained": 2, "confusion.trained": [[1, 0], [1, 1]]},
            "measures": {"accuracy.trained": 0.5},
        },
    ]
    assert results.to_csv(rounds, COUNTS) == (
        "round,members,correct.trained,tested,accuracy.trained\n0,b a,,,\n1,a,2,3,0.5\n"
    )
    # of a task that is not known here
    assert results.to_csv(rounds, ()).startswith("round,members,accuracy.trained,correct.trained,")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rounds.csv").write_text("old")
    why = "cannot write it: No such file or directory; a round may just have closed"
    kept = results.Kept({}, rounds, COUNTS, {"model": tmp_path / "gone.safetensors"})
    with pytest.raises(LocalError, match=why):
        results.write(tmp_path / "out", kept)
    assert (tmp_path / "out" / "rounds.csv").read_text() == results.to_csv(rounds, COUNTS)


def test_tensors_that_the_disk_changed_are_no_results(tmp_path):
    path = tmp_path / "1.model.safetensors"
    path.write_bytes(data := tensor_file.to_bytes({"w": torch.ones(2)}))
    kept = results.Kept({}, [], (), {"model": path})
    assert (tmp_path / "out" / "model.safetensors") in results.write(tmp_path / "out", kept)
    path.write_bytes(data[:-1] + b"\0")
    with refused(r"1\.model\.safetensors is refused: .*the disk changed it"):
        results.write(tmp_path / "out", kept)
    assert not (tmp_path / "out" / "model.safetensors").exists()

"""Over which silos this silo lets sums be opened: what it records, and what it says."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.ledgers import HASH, open_ledger, stored, write_job_accept, write_start
from support.refusals import refused
from support.signed_federation import job_document

from staddle.algorithms.data.dataset import digits
from staddle.commands.federation import local_federation
from staddle.errors import RefusedError
from staddle.files.documents import canonical_json
from staddle.proto.convert.secagg_sent import Attempt
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.policy import policy as policies
from staddle.security.policy.data_sets import DataSets
from staddle.security.secagg.memory import Memory
from staddle.silo.admission import signed_sets
from staddle.silo.admission.signed_sets import SignedSets, check_remembered, tells_fixed
from staddle.silo.check import check

SILOS = ("silo-a", "silo-b", "silo-c", "silo-d", "silo-e", "silo-f")
SECURITY = {"secure_aggregation": "required"}
PUBLIC = {**SECURITY, "weights": "public"}
POLICY = (
    "version = 1\n[limits]\nmax_bytes_per_round = 1\n[control]\nmax_messages = 1\nmax_bytes ="
    ' "1KiB"\n'
)
PRIVACY = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": "2"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return local_federation.make(tmp_path_factory.mktemp("sets") / "federation", SILOS)


@pytest.fixture(scope="module")
def sign(federation):
    def call(name, silos=SILOS, security=SECURITY, **changes):
        fields = {"rounds": 1, "min_cohort": 3, "security": security, **changes}
        return local_federation.sign_job(federation, job_document(silos, name=name, **fields))

    return call


@pytest.fixture
def world(federation, tmp_path):
    """A ledger, and what judges by it under a policy's lines."""
    roster = rosters.load(federation.folder / "roster.json")
    with open_ledger(tmp_path) as ledger:
        write_start(ledger, "test", HASH, HASH)

        def judging(lines="", dataset="data", roster=roster):
            text = POLICY + (f"[secure_aggregation]\n{lines}\n" if lines else "")
            return SignedSets(ledger, roster, policies.parse(text.encode(), "policy.toml", dataset))

        yield SimpleNamespace(ledger=ledger, folder=tmp_path, judging=judging, roster=roster)


def signed(sets, job, survivors=None, round_=0):
    attempt = Attempt(job.name, bytes.fromhex(job.digest), round_, 0, bytes([round_]) * 32)
    asyncio.run(sets.sign(job, attempt, survivors or job.silos))


def test_a_set_is_recorded_once_for_a_job_and_a_roster(world, sign):
    first, four = sign("first"), sign("four", SILOS[:4])
    for round_ in range(3):
        signed(world.judging(), first, round_=round_)
    signed(world.judging(), four)
    found = [each for each in stored(world.folder) if each["type"] == "secagg.signed"]
    assert [(each["job"], each["round"], each["survivors"], each["absent"]) for each in found] == [
        ("first", 0, list(SILOS), []),
        ("four", 0, list(SILOS[:4]), list(SILOS[4:])),
    ]
    assert {(each["dataset"], each["values"]) for each in found} == {("data", "fixed")}
    signed(world.judging(roster=rosters.remove(world.roster, "silo-f")), four, round_=1)
    assert len(world.ledger.signed) == 3  # who was a member then counts
    world.ledger.close()
    with open_ledger(world.folder) as again:
        assert [each.job for each in again.signed] == ["first", "four", "four"]


def test_who_joins_while_a_job_runs_counts_as_new_afterwards(world, sign):
    """It could not be in that job, whose silos sign before it joined and after."""
    running, later, fewer = sign("running", SILOS[:5]), sign("later"), sign("fewer", SILOS[:5])
    before = rosters.remove(world.roster, "silo-f")
    for roster, job in ((before, running), (world.roster, fewer)):
        write_start(world.ledger, "test", rosters.digest(roster), HASH)
        assert world.ledger.keep_roster(roster)
        write_job_accept(world.ledger, job.name, job.digest, "operator")
        signed(world.judging(roster=roster), running)
    assert [each.absent for each in world.ledger.signed] == [()]
    assert world.judging().objection_to(later) == ""

    # Accepted since, a job without it was for all others on purpose.
    signed(world.judging(), fewer)
    assert [each.absent for each in world.ledger.signed] == [(), ("silo-f",)]
    assert "silo-f alone has" in world.judging().objection_to(later)
    world.ledger.close()
    with open_ledger(world.folder) as again:
        assert again.silos_then(running.digest) == {*SILOS[:5]}
        assert again.silos_then(fewer.digest) == {*SILOS}
        assert again.silos_then("0" * 64) is None


def test_sums_on_two_data_sets_tell_nothing_together(world, sign):
    """But those on two that have the same records do."""
    names = DataSets({"data": "data", "scans": "scans", "risks": "data"})
    policy = policies.parse(POLICY.encode(), "policy.toml", names)
    sets = SignedSets(world.ledger, world.roster, policy)
    first = sign("first")
    signed(sets, first)
    for dataset, told in ((None, True), ("data", True), ("risks", True), ("scans", False)):
        five = sign(
            f"five-{dataset or 'unsaid'}", SILOS[:5], **({"dataset": dataset} if dataset else {})
        )
        assert bool(sets.objection_to(five)) == told, dataset
        assert bool(sets.objection(five, SILOS[:5])) == told, dataset
    signed(sets, five)
    found = [each for each in stored(world.folder) if each["type"] == "secagg.signed"]
    assert [each["dataset"] for each in found] == ["data", "scans"]


def test_what_was_signed_under_a_name_counts_once_its_records_are_said_to_be_others(world, sign):
    apart = DataSets({"data": "data", "risks": "risks"})
    alike = DataSets({"data": "data", "risks": "data"})
    judging = lambda names: SignedSets(
        world.ledger, world.roster, policies.parse(POLICY.encode(), "policy.toml", names)
    )
    signed(judging(apart), sign("of-risks", dataset="risks"))
    five = sign("five-of-data", SILOS[:5])
    assert judging(apart).objection_to(five) == ""
    assert "five-of-data" in judging(alike).objection_to(five)


def test_what_it_says_names_jobs_sets_and_ways_out(world, sign):
    first, five, four = sign("first"), sign("five", SILOS[:5]), sign("four", SILOS[:4])
    signed(world.judging(), first)
    assert world.judging().objection_to(first) == ""
    assert (
        world.judging().objection_to(five)
        == "sums of job 'five' over silo-a, silo-b, silo-c, silo-d, silo-e, together with those"
        " of job 'first' over silo-a, silo-b, silo-c, silo-d, silo-e, silo-f on data set 'data',"
        " would reveal how many records, and of which classes, silo-f alone has; the policy has"
        " secure_aggregation.min_difference = 3 (by default, min_honest + assumed_colluders)."
        " Have the job signed for the same silos as before, or for silos of which more differ; if"
        " silo-f left the federation, have its founders sign a roster without it; or lower"
        " min_difference if these numbers are no secret"
    )
    assert "classes, silo-e, silo-f have together" in world.judging().objection_to(four)
    assert "min_difference = 5. Have" in world.judging("min_difference = 5").objection_to(four)
    assert world.judging("min_difference = 2").objection_to(four) == ""
    assert world.judging("min_difference = 1").objection_to(five) == ""
    assert world.judging("min_honest = 1").objection_to(four) == ""
    assert world.judging(dataset="other").objection_to(five) == ""
    assert world.judging(roster=rosters.remove(world.roster, "silo-f")).objection_to(five) == ""


def test_who_joined_by_the_roster_is_welcome(world, sign):
    small = rosters.remove(world.roster, "silo-f")
    signed(world.judging(roster=small), sign("five", SILOS[:5]))
    assert world.judging().objection_to(sign("first")) == ""


def test_survivors_are_judged_as_they_are(world, sign):
    first = sign("first")
    signed(world.judging(), first)
    assert world.judging().objection(first, SILOS) == ""
    assert "classes, silo-b alone has" in world.judging().objection(
        first, [silo for silo in SILOS if silo != "silo-b"]
    )


def test_who_is_proven_to_have_misdealt_counts_as_if_it_had_left(world, sign):
    first, rest = sign("first"), [silo for silo in SILOS if silo != "silo-b"]
    sets = world.judging()
    signed(sets, first)
    assert sets.objection(first, rest, {"silo-b"}) == ""
    for others in ((), {"silo-a"}, {"silo-a", "silo-c"}):
        assert "classes, silo-b alone has" in sets.objection(first, rest, others)
    both = [silo for silo in rest if silo != "silo-d"]
    assert "classes, silo-b, silo-d have together" in sets.objection(first, both, {"silo-b"})
    signed(sets, first, rest)
    assert sets.objection(first, rest) == sets.objection(first, SILOS) == ""  # both were told


def test_batches_left_after_a_misdealing(world, sign):
    """Of several batches, those that can be summed without the dealer at fault are recorded."""
    job = sign("two", security={**SECURITY, "colluders": 0})
    assert sorted(map(len, job.batches)) == [3, 3]
    one, other = job.batches
    attempt = Attempt(job.name, bytes.fromhex(job.digest), 0, 0, bytes(32))
    asyncio.run(world.judging().sign(job, attempt, other, {one[0]}))
    assert [each.batches for each in world.ledger.signed] == [(",".join(sorted(other)),)]


def test_jobs_with_noise_or_of_changing_silos_are_not_asked(world, sign):
    """Counts of training records may stand in a job; those of test records do not."""
    counts = dict.fromkeys(SILOS[:5], 60)
    declared = sign("declared", SILOS[:5], {**PUBLIC, "counts": counts})
    public = sign("public", SILOS[:5], {**PUBLIC, "counts": counts, "dropouts": "any"})
    private = sign("private", SILOS[:5], {**SECURITY, "clip_exponent": 12}, privacy=PRIVACY)
    blocks = {"method": {"name": "fedaims"}, "model": {"name": "convnet-digits", "classes": 10}}
    by_class = sign("by-class", SILOS[:5], {**PUBLIC, "counts": counts}, **blocks)
    asked, others = (declared, by_class), (public, private, sign("plain", SILOS[:5], {}))
    assert [tells_fixed(job) for job in (*asked, *others)] == [True, True, False, False, False]
    signed(world.judging(), sign("first"))
    assert [bool(world.judging().objection_to(job)) for job in (*asked, *others)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert world.judging().objection(public, SILOS[:4]) == ""  # a silo may be lost
    signed(world.judging(), public, SILOS[:4])
    assert world.ledger.signed[-1].values == "varying"
    assert world.judging().objection_to(sign("again")) == ""


def test_silo_check_answers_as_the_agent_would(federation, sign):
    first, five = sign("first"), sign("five", SILOS[:5])
    local_federation.write_silo(
        federation, "silo-a", "127.0.0.1:9", digits().take(np.arange(120)), [first]
    )
    config, keys = federation.silo_config("silo-a"), load_keys(federation.keys("silo-a"))
    path = federation.folder / "jobs" / f"{five.name}.json"

    def found():
        return next(finding for finding in check(config, [path]).findings if finding.name == "job")

    assert found().ok, found().text
    with Ledger.open(
        federation.state("silo-a") / "ledger", "silo-a", federation.name, keys.log
    ) as ledger:
        roster = rosters.load(federation.folder / "roster.json")
        signed(SignedSets(ledger, roster, policies.parse(POLICY.encode(), "policy.toml")), first)
    assert not found().ok
    assert "this silo would decline the job, POLICY: sums of job 'five'" in found().text


def test_a_folder_with_a_signed_sum_that_the_ledger_lacks_stops_the_agent(world, sign, federation):
    first = sign("first")
    folder = world.folder / "jobs" / "first"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes((federation.folder / "jobs" / "first.json").read_bytes())
    path = folder / "secagg-sum-update-coordinator.json"
    entered = Memory(round=0, attempt=0, ctx=HASH)
    path.write_bytes(canonical_json(entered.model_dump(mode="json")))
    # entered, not signed: the ledger may say nothing of it
    check_remembered(world.folder / "jobs", world.ledger)
    path.write_bytes(
        canonical_json(json.loads(path.read_text()) | {"signed_round": 0, "signed_ctx": HASH})
    )
    with refused(r"signed a sum of job 'first', but its ledger has no record of it"):
        check_remembered(world.folder / "jobs", world.ledger)
    signed(world.judging(), first)
    check_remembered(world.folder / "jobs", world.ledger)


@pytest.mark.parametrize(("noise", "most"), [("shared", 2), ("local", 6)])
def test_more_dishonest_silos_than_a_job_of_shared_noise_counts_on_end_it(
    world, sign, monkeypatch, noise, most
):
    table = {**PRIVACY, "noise": noise, **({"dishonest": 2} if noise == "shared" else {})}
    job, sets = sign(noise, privacy=table), world.judging()
    for number in range(1, len(SILOS) + 1):
        found = frozenset(SILOS[:number])
        monkeypatch.setattr(signed_sets, "proven", lambda *_, found=found: found)
        if number <= most:
            assert sets.proven(job, ()) == found
        else:
            with pytest.raises(RefusedError, match=r"privacy\.dishonest = 2 silos do") as raised:
                sets.proven(job, ())
            assert (raised.value.code, raised.value.peer) == ("POLICY", "")


def test_a_set_that_passed_counts_for_other_jobs_before_it_is_signed(world, sign):
    """Of two jobs at a time, both of which would pass next to what was signed before, one does."""
    first, five = sign("first"), sign("five", SILOS[:5])
    for one, other in ((first, five), (five, first)):
        sets = world.judging()
        assert (sets.objection_to(one), sets.objection_to(other)) == ("", "")
        assert sets.objection(one, one.silos) == ""
        for _ in range(2):  # the other is refused for as long
            assert "silo-f alone has" in sets.objection(other, other.silos)
            assert "silo-f alone has" in sets.objection_to(other)
        assert sets.objection(one, one.silos) == ""  # its own do not count against it
        # A job that ends without a signature leaves nothing behind, and no other one goes with it.
        sets.forget("another")
        assert "silo-f alone has" in sets.objection(other, other.silos)
        sets.forget(one.name)
        assert sets.objection(other, other.silos) == sets.objection_to(other) == ""
        assert "silo-f alone has" in sets.objection(one, one.silos)
    assert world.ledger.signed == ()

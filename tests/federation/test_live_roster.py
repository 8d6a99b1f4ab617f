"""The roster changes while a job runs, with real processes: nothing is started again by hand."""

from contextlib import contextmanager
from functools import partial

import pytest
from federation.conftest import Running

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.federation.operator_client import OperatorConfig
from staddle.commands.members import membership_client
from staddle.commands.members.membership_client import FounderFile
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.identity.roster_in_use import RosterInUse

SILOS = ("east", "north", "south", "west")
BLIND = {"secure_aggregation": "required", "weight_most": 1024}
JOBS = {
    "plain": {},
    "blind": {"min_cohort": 4, "security": {**BLIND, "tags": False}},
    # all silos share a key, which lives as long as they have the same keys
    "keyed": {"min_cohort": 4, "security": BLIND},
}


@contextmanager
def founder_of(running: Running):
    """The founder, connected."""
    folder = running.federation.folder
    founder, own = load_keys(folder / "founder"), folder / "own" / "roster.json"
    pins = rosters.Pins(
        federation="local", threshold=1, founders=(founder.entry.protocol_fingerprint,)
    )
    document = {
        "version": 1, "coordinator": running.address, "keys": "founder",
        "roster": "own/roster.json", "trust": pins,
    }  # fmt: skip
    in_use = RosterInUse(own, own, pins, folder / "founder")
    config = OperatorConfig.model_validate(document, strict=False)
    with membership_client.connected(FounderFile(folder / "founder.toml", config, in_use)) as calls:
        yield calls, founder, in_use.present


def publish(running: Running, change) -> rosters.Roster:
    """The founder hands in another version of the roster."""
    with founder_of(running) as (calls, founder, present):
        roster = rosters.sign(change(present), founder)
        calls.publish(roster)
    rosters.save(roster, running.federation.folder / "own" / "roster.json")
    return roster


def apart(running: Running, name: str) -> None:
    """Everybody has a roster file of their own, as on machines of their own."""
    folder = running.federation.folder
    path = folder / name / f"{'coordinator' if name == 'coordinator' else 'silo'}.toml"
    path.write_text(path.read_text().replace("../roster.json", "roster.json"))
    given = folder / name / "roster.json"
    given.write_bytes((folder / "roster.json").read_bytes())
    # As a configuration may lie: whoever runs the daemon cannot write there.
    given.chmod(0o400)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", JOBS)
def test_a_job_continues_while_another_silo_joins_and_leaves(start, document, tmp_path, kind):
    running: Running = start(*SILOS)
    job = running.job(document("lung", SILOS, rounds=4, **JOBS[kind]))
    running.configure({"admission_seconds": 60, "beat_seconds": 1, "hold_seconds": 5})
    for name in ("coordinator", *SILOS, "own"):
        (running.federation.folder / "own").mkdir(exist_ok=True)
        if name != "own":
            apart(running, name)
    (running.federation.folder / "own" / "roster.json").write_bytes(
        (running.federation.folder / "roster.json").read_bytes()
    )
    coordinator = running.start_daemon("coordinator")
    coordinator.wait_for("listening", 60)
    for silo in SILOS[:3]:
        running.start_daemon(silo)
    newcomer = create_keys(tmp_path / "newcomer", "newcomer", Role.SILO, "org")

    # Three have accepted, and given to the key if there is one; the job waits for the fourth.
    for _ in SILOS[:3]:
        coordinator.wait_for("job.accepted", 120)
    joined = publish(running, lambda present: rosters.add(present, newcomer))
    assert coordinator.wait_for("listening", 60)["roster"] == joined.version
    for silo in SILOS[:3]:
        running.daemons[silo].wait_for("roster.reloaded", 120)
    # A founder who would remove one of its silos is told of the job.
    with founder_of(running) as (calls, *_):
        assert calls.waiting().begun == {"lung": frozenset(SILOS)}
    running.start_daemon("west")
    coordinator.wait_for("round.metrics", 120)
    # The job may end before, between or after what follows: nobody can hold it in a round.
    left = publish(running, partial(rosters.remove, member="newcomer"))
    seen = [{"event": "none"}]
    while not {"job.ended", "listening"} <= {each["event"] for each in seen}:
        seen.append(coordinator.event(120))
        assert seen[-1] is not None, coordinator.tail()
    told = {each["event"]: each for each in seen}
    assert (told["job.ended"]["outcome"], told["job.ended"]["reason"]) == ("completed", "")
    assert told["listening"]["roster"] == left.version
    running.finished("lung")

    folder = running.federation.folder
    assert rosters.load(folder / "coordinator" / "state" / "roster.json") == left
    for silo in SILOS:
        assert rosters.load(folder / silo / "state" / "roster.json").version >= joined.version
        digests = [each["sha256"] for each in running.events(silo, "roster.reloaded")]
        assert digests[0] == rosters.digest(joined)
        assert {*digests} <= {rosters.digest(joined), rosters.digest(left)}
        assert len(running.events(silo, "job.accepted")) == 1
        assert running.events(silo, "job.declined") == []
    if kind == "plain":
        running.check_models(job, simulate(job, running.shards(job.silos)))
    running.stop()
    running.check_ledgers()


@pytest.mark.timeout(300)
def test_a_silo_does_not_take_over_what_its_founders_did_not_sign(start, document, tmp_path):
    """A coordinator with a roster of its own making is refused, and the file stays."""
    running: Running = start(*SILOS)
    running.job(document("lung", SILOS))
    running.configure({"admission_seconds": 60, "beat_seconds": 1, "hold_seconds": 5})
    folder = running.federation.folder
    for name in ("coordinator", "north"):
        apart(running, name)
    before = (folder / "north" / "roster.json").read_bytes()
    # The founder of this roster is another one, whom only the coordinator pins.
    entry = create_keys(tmp_path / "founder", "founder", Role.FOUNDER, "org")
    present = rosters.load(folder / "roster.json")
    forged = rosters.sign(
        rosters.add(present, entry, replace=True), load_keys(tmp_path / "founder")
    )
    rosters.save(forged, folder / "coordinator" / "roster.json")
    config = running.federation.coordinator_config
    config.write_text(
        config.read_text().replace(running.federation.founder, entry.protocol_fingerprint)
    )
    running.start_daemon("coordinator").wait_for("listening", 60)
    north = running.start_daemon("north")
    with pytest.raises(Exception, match="ended with code 1") as caught:
        north.wait_for("connected", 60)
    assert "this silo does not take over" in str(caught.value)
    assert "a pin does not fit" in str(caught.value)
    assert (folder / "north" / "roster.json").read_bytes() == before

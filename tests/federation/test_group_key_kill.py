"""The key that a job's silos share, where either side dies at every durable step: all silos have
the same one.
"""

import pytest
from federation.keyed import SECURITY, TIMING
from support.key_watch import keys_watched

from staddle.proto import secure_pb2 as secure
from staddle.security.blind import group_key as g
from staddle.security.identity.pairwise_keys import public_key
from staddle.silo.blind.group_keys import ENDED
from staddle.silo.ingress.keyed_job import OWN

SILOS = ("north", "east", "south", "west")


def entries(contents):
    """The private halves in each content that a file of prekeys was seen to have."""
    return [[file[at : at + 32] for at in range(40, len(file), 40)] for file in contents]


STEPS = {
    "north": (
        "rename group.secret",
        "rename prekeys.json",
        "rename group.prekeys",
        "rename group.key",
        "remove group.secret",
        "rename group.ended",
        "remove group.prekeys",
        "remove group.key",
        "remove prekeys.json",
    ),
    "east": ("sync seg-00000001.jsonl egress.protocol job 0 contribution",),
    "coordinator": ("before COMMIT of job contribution", "after COMMIT of job contribution"),
}
PLANS = {
    "north": "every:group|prekeys",
    "east": "every:contribution",
    "coordinator": "every:contribution",
}


@pytest.mark.timeout(120)
def test_killed_around_every_durable_step_all_have_one_key(start, document):
    running = start(*SILOS)
    changes = {"min_cohort": 3, "rounds": 1, "round_timeout": 120, "security": SECURITY}
    job = running.job(document("job", SILOS, "pfedsim", options={"rho": 0.0}, **changes))
    watched = keys_watched(running.federation, SILOS), keys_watched(running.federation, SILOS, OWN)
    with watched[0] as seen, watched[1] as owned:
        running.start_all(TIMING, PLANS)
        assert running.daemons["coordinator"].wait_for("job.ended", 100)["outcome"] == "completed"
    running.stop()

    for name, steps in STEPS.items():
        died = [at for places in running.killed(name) for at in places]
        assert set(steps) <= set(died), died
    epoch = g.Epoch.of(running.roster, SILOS, job.digest)
    keys, prekeys = set(), {}
    for silo in SILOS:
        folder = running.federation.state(silo) / "jobs" / "job"
        # all that was secret is gone
        assert [path.name for path in folder.glob("*group*")] == [ENDED]
        assert (folder / "model" / "model.safetensors").exists()
        (file,) = seen["job", silo]
        assert (file[:32], len(file)) == (epoch.context(), 6 * 32)
        keys.add(file[32:96])
        ((first, *_), *_) = sorted(entries(owned["job", silo]), key=len)
        prekeys[silo] = public_key(first)
        others = [file[at : at + 32] for at in range(96, len(file), 32)]
        prekeys |= {
            (silo, of): other for of, other in zip(sorted({*SILOS} - {silo}), others, strict=True)
        }
        logs = "".join(path.read_text() for path in running.federation.folder.rglob("*.log"))
        secret = {file[32:64], *(seed for each in entries(owned["job", silo]) for seed in each)}
        assert len(secret) == 3  # with the prekey beside the one upload
        assert not [each for each in secret if each.hex() in logs]
    assert len(keys) == 1
    assert all(prekeys[name] == prekeys[name[1]] for name in prekeys if isinstance(name, tuple))
    assert len(set(prekeys.values())) == len(SILOS)
    kept = dict(running.rows("SELECT silo, body FROM contributions"))
    assert set(kept) == set(SILOS)
    assert all(secure.Contributed.FromString(body).session == b"" for body in kept.values())
    refused = running.events("coordinator", "refused")
    # a silo that starts anew gives the very same
    assert [line for line in refused if line["code"] == "SECURE"] == []
    for silo in SILOS:
        left = running.records(silo, "egress.protocol")
        given = [record for record in left if record["kind"] == "contribution"]
        assert {record["ctx"] for record in given} == {epoch.context().hex()}
        assert len({record["message"]["bytes"] for record in given}) == 1

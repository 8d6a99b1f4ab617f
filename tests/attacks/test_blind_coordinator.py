"""A coordinator with the right keys and bad intentions in a blind round, against the agent as it ships.

The other silos are honest, and played by the pure machine; what the real one is told, each attack changes. Afterwards
it takes part in an honest round.
"""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from hostile import GARBAGE, SILO, Hostile, attacked, delivery, offer, play, records, round_of

from staddle.algorithms.data import digits
from staddle.commands import local_federation
from staddle.files import canonical_json
from staddle.proto import secure_pb2 as secure
from staddle.proto.blind import model_digest, round_frame, round_terms
from staddle.proto.channel import ERROR_METADATA
from staddle.proto.secure_given import Attempt, Over, attempt_to_wire, given_from_wire
from staddle.proto.secure_told import SignedSpec, Told, told_to_wire
from staddle.proto.wire import delivered_items
from staddle.security import roster as rosters
from staddle.security import secagg_coordinator as coordinator
from staddle.security import secagg_coordinator_events as c
from staddle.security import secagg_silo as machine
from staddle.security import secagg_silo_events as s
from staddle.security.identity import load_keys
from staddle.security.labels import SECAGG_SPEC
from staddle.security.masked_sum import Accumulator, Given, chunks, masked_chunks
from staddle.security.round_spec import Terms, specify
from staddle.security.secagg_fault import Code
from staddle.security.secagg_memory import Memory
from staddle.security.secagg_messages import Sets, make_survival
from staddle.security.signers import Signers
from staddle.silo import agent as agents
from staddle.silo import blind
from staddle.silo import config as configs
from staddle.silo.state import JobFolder

OTHERS = ("east", "south", "west")
SILOS = (SILO, *OTHERS)
PAUSE_SECONDS = blind.PAUSE_SECONDS
SECURITY = {  # with public weights, sums over three of the four are opened; with private ones over all
    "public": {"secure_aggregation": "required", "weights": "public", "counts": dict.fromkeys(SILOS, 60)},
    "private": {"secure_aggregation": "required", "weight_most": 2000},
}


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(agents, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(blind, "PAUSE_SECONDS", 0.02)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Keys of all, a roster, two signed jobs of two rounds, and what the real silo has."""
    federation = local_federation.make(tmp_path_factory.mktemp("attacked") / "federation", SILOS)
    documents = (
        {
            "version": 1,
            "name": name,
            "seed": 11,
            "rounds": 2,
            "min_cohort": 3,
            "silos": list(SILOS),
            "round_timeout": 60,
            "method": {"name": "fedavg"},
            "model": {"name": "cnn-digits", "classes": 10},
            "training": {"epochs": 1, "batch_size": 32, "lr": 0.05},
            "security": security,
        }
        for name, security in SECURITY.items()
    )
    jobs = {job.name: job for job in (local_federation.sign_job(federation, document) for document in documents)}
    local_federation.write_silo(federation, SILO, "127.0.0.1:1", digits().take(np.arange(80)), list(jobs.values()))
    folder = federation.folder
    return SimpleNamespace(
        jobs=jobs,
        silos=SILOS,
        signed={name: (folder / "jobs" / f"{name}.json").read_bytes() for name in jobs},
        roster=rosters.load(folder / "roster.json"),
        keys=load_keys(folder / "coordinator" / "keys"),
        silo_keys=load_keys(folder / SILO / "keys"),
        others={silo: load_keys(folder / silo / "keys") for silo in OTHERS},
        config=configs.load(federation.silo_config(SILO)),
        policy=local_federation.policy_text(list(jobs.values())),
    )


class Attempted:
    """One attempt: an honest coordinator and three honest silos; ``told`` is what the real one is to be told."""

    def __init__(self, world, job, round_=0, attempt=0, alter=None):
        self.world, self.job, self.alter = world, world.jobs[job], alter or (lambda _, body: [body])
        self.signers = Signers.of(world.roster)
        self.terms = round_terms(self.job, Terms())
        self.frame = self.framed(round_)
        self.spec = specify(self.frame, SILOS, attempt)
        self.attempt = self.named(self.spec)
        self.told, self.states, self.uploads, self.queue, self.later = [], {}, {}, [], []
        self.state, effects = coordinator.begin(self.spec, self.signers, self.terms, world.keys.sign)
        self.do("coordinator", effects)

    def framed(self, round_):
        items = delivered_items(self.job.down(round_)) if round_ else ()
        end = delivery(self.world, self.job.name, round_, seed=round_)[-1].end
        model = model_digest(self.job, round_, items, list(end.tensor_sha256))
        return round_frame(self.job, round_, self.world.roster.federation, rosters.digest(self.world.roster), model)

    def named(self, spec):
        job = self.world.jobs[spec.job]
        return Attempt(job.name, bytes.fromhex(job.digest), spec.round, spec.attempt, spec.context())

    def signed(self, **changes):
        """A specification with other fields, as the coordinator signs it."""
        document = canonical_json({**self.spec.model_dump(mode="json"), **changes})
        return SignedSpec(document, self.world.keys.sign(SECAGG_SPEC, document))

    # What happens, in one thread, one thing after another.

    def happen(self, who, event):
        self.queue.append((who, event))
        if isinstance(event, c.SurvivalGiven):  # the others sign after the real one, so that its signature counts
            self.queue += self.later
            self.later = []
        while self.queue:
            to, event = self.queue.pop(0)
            if to == "coordinator":
                self.state, effects = coordinator.advance(self.state, event)
            elif isinstance(event, c.Ask):
                party = machine.Party(to, self.signers, self.terms, self.world.others[to].sign, np.random.bytes)
                self.states[to], effects = machine.begin(party, self.frame, event.document, event.signature, Memory())
            else:
                self.states[to], effects = machine.advance(self.states[to], event)
            self.do(to, effects)

    def do(self, who, effects):
        for effect in effects:
            self.act(who, effect)

    def tell(self, silos, body):
        for silo in silos:
            if silo == SILO:
                self.told += [
                    each if isinstance(each, secure.SecureTold | bytes) else told_to_wire(self.addressed(each))
                    for each in self.alter(self, body)
                ]
            else:
                self.queue.append((silo, body))

    def addressed(self, body):
        return body if isinstance(body, Told) else Told(self.attempt, body)

    def act(self, who, effect):
        match effect:
            case c.Ask():
                self.tell([SILO], SignedSpec(effect.document, effect.signature))
                for silo in OTHERS:
                    self.happen(silo, effect)
            case c.TellKeys(silos, bundles):
                self.tell(silos, s.KeysTold(bundles))
            case c.TellShares(silo, deliveries):
                self.tell([silo], s.SharesTold(deliveries))
            case c.TellSurvivors(_, headers):
                self.tell([SILO], s.SurvivorsTold(headers))
                self.later = [(silo, s.SurvivorsTold(headers)) for silo in OTHERS]
            case c.TellNotes(silos, survivals):
                self.tell(dict.fromkeys([SILO, *silos]), s.NotesTold(survivals))  # it is told them in any case
            case c.TellResult(silos, sha256, tags):
                self.tell(silos, s.ResultTold(sha256, tags))
            case c.Open(terms, survivors):
                accumulator = Accumulator(self.spec)
                for silo in survivors:
                    accumulator.add(self.pieces(self.uploads[silo]))
                accumulator.open(terms, survivors)
                self.queue.append(("coordinator", c.Opened(bytes(32))))
            case s.Upload(terms):
                made = [self.gift(group) for group in self.spec.groups]
                self.uploads[who] = b"".join(w.tobytes() for w in masked_chunks(self.spec, who, made, terms))
                self.queue.append((who, s.Streamed(len(self.uploads[who]), digest_of(self.uploads[who]))))
            case s.SendKeys() | s.SendShares() | s.SendHeader() | s.SendSurvival() | s.SendReveal():
                self.queue.append(("coordinator", self.event(who, effect)))

    def gift(self, group):
        return Given(np.full(group.elements, 0.01), np.ones(group.rows) if group.weights == "private" else None)

    def pieces(self, payload):
        at = 0
        for chunk in chunks(self.spec):
            size = chunk.words * self.spec.groups[chunk.group].ring // 8
            yield payload[at : at + size]
            at += size

    def event(self, who, body):
        match body:
            case s.SendKeys(bundle):
                return c.KeysGiven(bundle)
            case s.SendShares(dealing, portions):
                return c.SharesGiven(dealing, portions)
            case s.SendHeader(header):
                return c.Uploaded(header, len(self.uploads[who]), digest_of(self.uploads[who]))
            case s.SendSurvival(survival):
                return c.SurvivalGiven(survival)
            case s.SendReveal(reveal):
                return c.RevealGiven(reveal)
            case s.SendAbandon(note):
                return c.AbandonGiven(note)
            case Over(code):
                return c.Failed(who, code)


def digest_of(payload):
    return sha256(payload).digest()


class Blind(Hostile):
    """Tells the rounds' sums beside its tasks; once all is told, and nothing comes of it, a round is over."""

    def __init__(self, world, tasks, sums, **options):
        super().__init__(world, tasks, **options)
        self.sums = sums  # round → attempts
        self.calls |= {"secure_next": 0}
        self.given = []  # (round, ctx, kind)
        self.contexts = []  # of whole uploads
        self.first = []  # replies to SecureNext before all others
        self.hasty = False  # rounds are over before the real silo reveals anything: the others suffice
        self.flood = None  # number → a message, for ever after all others

    async def secure(self, request, context):
        given = given_from_wire(SILO, request)
        self.given.append((given.attempt.round, given.attempt.ctx, request.WhichOneof("body")))
        if request.WhichOneof("body") == "reveal" and self.hasty:
            await self.closed(context)
        for attempted in self.sums[given.attempt.round]:
            if attempted.spec.context() == given.attempt.ctx:
                attempted.happen("coordinator", attempted.event(SILO, given.body))
        return secure.SecureTaken()

    async def secure_next(self, request, context):
        self.calls["secure_next"] += 1
        if self.first:
            return self.first.pop(0)
        for _ in range(30):
            told = [message for attempted in self.sums[request.round] for message in attempted.told]
            if request.had < len(told):
                return told[request.had]
            if self.flood is not None:
                return self.flood(request.had)
            await asyncio.sleep(0.01)
        return await self.closed(context)

    async def closed(self, context):
        code, closed = grpc.StatusCode.FAILED_PRECONDITION, ((ERROR_METADATA, "ROUND_CLOSED"),)
        return await context.abort(code, "over", trailing_metadata=closed)

    async def taken(self, frames):
        manifest, payload, end = await super().taken(frames)
        self.contexts.append(manifest.context)
        for attempted in self.sums[manifest.round]:
            if attempted.spec.context() == manifest.context:
                attempted.uploads[SILO] = payload
        return manifest, payload, end


def attacks(world, tmp_path, sums, job="public", first=(), times=1):
    """Play a round of these attempts and an honest one after it; the hostile coordinator."""
    sums = {0: list(sums), 1: [Attempted(world, job, 1)]}
    hostile = Blind(world, [offer(world, job), *[round_of(world, 0, job)] * times, round_of(world, 1, job)], sums)
    hostile.first = list(first)
    hostile.script["fetch"] = [lambda: delivery(world, job, 0), lambda: delivery(world, job, 1, seed=1)]
    play(hostile, tmp_path)
    opened = [(record["round"], record["survivors"]) for record in records(tmp_path) if record["type"] == "secagg.sum"]
    assert opened[-1:] == [(1, sorted(SILOS))], "the agent did not take part in the next honest round"
    return hostile


def kinds(hostile, round_=0):
    """How often the real silo gave what, in a round."""
    return Counter(kind for given_in, _, kind in hostile.given if given_in == round_)


def ends(tmp_path, round_=0):
    found = [record for record in records(tmp_path) if record["type"] == "secagg.end" and record["round"] == round_]
    return [(record["code"], record["blame"]) for record in found]


# Attacks on one message: what the real silo is told in its place.


def when(kind, change):
    """Change the first message of a kind, in whatever way."""

    def alter(attempted, body):
        return change(attempted, body) if isinstance(body, kind) else [body]

    return alter


def respec(**changes):
    return when(SignedSpec, lambda attempted, _: [attempted.signed(**changes)])


def swapped(messages, place, **changes):
    """The same messages with fields of one changed."""
    return tuple(replace(each, **changes) if i == place else each for i, each in enumerate(messages))


def another_job(attempted, _):
    other = Attempted(attempted.world, "private")
    return [SignedSpec(other.spec.payload(), attempted.world.keys.sign(SECAGG_SPEC, other.spec.payload()))]


def split(attempted, told):
    """All others are told four survivors; the real silo three, of which it is one."""
    return [s.SurvivorsTold(tuple(header for header in told.headers if header.silo != "east"))]


def forged_notes(attempted, told):
    """Survivors' signatures over other sets, by the coordinator's key."""
    sets = Sets(attempted.state.h_u1, attempted.state.h_u2, attempted.state.h_u3)
    ctx, sign = attempted.spec.context(), attempted.world.keys.sign
    return [s.NotesTold(tuple(make_survival(ctx, each.silo, sets, sign) for each in told.survivals))]


ASKED, DEALT, GAVE = (), ("keys",), ("keys", "shares", "header")
ALTERED = {  # name: what is changed, code, what the real silo gives beside "end" before it sees it
    "lowered t": (respec(threshold=2), "POLICY", ASKED),
    "smaller cohort": (respec(cohort=sorted(SILOS)[:2], counts=[60, 60]), "POLICY", ASKED),
    "cohort of three, for a colluder of ours": (respec(cohort=sorted(SILOS)[:3], counts=[60] * 3), "POLICY", ASKED),
    "cohort without us": (respec(cohort=sorted(OTHERS), counts=[60] * 3), "SPEC", ASKED),
    "unknown id": (respec(cohort=["east", "mallory", SILO, "west"]), "SPEC", ASKED),
    "doubled id": (respec(cohort=["east", "east", SILO, "west"]), "SPEC", ASKED),
    "fewer colluders": (respec(colluders=0), "POLICY", ASKED),
    "lowered min_cohort": (respec(min_cohort=2), "SPEC", ASKED),
    "other counts": (respec(counts=[60, 60, 60, 59]), "SPEC", ASKED),
    "another round": (respec(round=1), "SPEC", ASKED),
    "another roster": (respec(roster="ab" * 32), "SPEC", ASKED),
    "another schema": (respec(schema_digest="ab" * 32), "SPEC", ASKED),
    "another model than was delivered": (respec(model_digest="ab" * 32), "SPEC", ASKED),
    "another job": (when(SignedSpec, another_job), "SPEC", ASKED),
    "unsigned": (when(SignedSpec, lambda _, body: [replace(body, signature=bytes(64))]), "SPEC", ASKED),
    "the same again": (when(SignedSpec, lambda _, body: [body, body]), "ATTEMPT", DEALT),
    "keys of its own": (
        when(s.KeysTold, lambda _, t: [s.KeysTold(swapped(t.bundles, 0, mask=bytes(range(32))))]),
        "KEYS",
        DEALT,
    ),
    "bad signature of a bundle": (
        when(s.KeysTold, lambda _, t: [s.KeysTold(swapped(t.bundles, 3, signature=bytes(64)))]),
        "KEYS",
        DEALT,
    ),
    "keys without ours": (
        when(s.KeysTold, lambda _, t: [s.KeysTold(tuple(b for b in t.bundles if b.silo != SILO))]),
        "KEYS",
        DEALT,
    ),
    "two sets of keys": (
        when(s.KeysTold, lambda _, t: [t, s.KeysTold(t.bundles[:3])]),
        "EQUIVOCATION",
        ("keys", "shares"),
    ),
    "too few shares": (
        when(s.SharesTold, lambda _, t: [s.SharesTold(t.deliveries[:2])]),
        "SHARES",
        ("keys", "shares"),
    ),
    "survivors before uploads": (
        when(s.KeysTold, lambda _, t: [t, s.SurvivorsTold(())]),
        "ORDER",
        ("keys", "shares"),
    ),
    "shrunk survivors": (
        when(s.SurvivorsTold, lambda _, t: [s.SurvivorsTold(t.headers[1:3])]),
        "SURVIVORS",
        GAVE,
    ),
    "survivors without us": (
        when(s.SurvivorsTold, lambda _, t: [s.SurvivorsTold(tuple(h for h in t.headers if h.silo != SILO))]),
        "SURVIVORS",
        GAVE,
    ),
    "split survivors": (when(s.SurvivorsTold, split), "NOTES", (*GAVE, "survival")),
    "a survivor in both roles": (
        when(s.SurvivorsTold, lambda _, t: [t, s.SurvivorsTold(t.headers[1:])]),
        "EQUIVOCATION",
        (*GAVE, "survival"),
    ),
    "forged notes": (when(s.NotesTold, forged_notes), "NOTES", (*GAVE, "survival")),
    "too few notes": (
        when(s.NotesTold, lambda _, t: [s.NotesTold(t.survivals[:2])]),
        "NOTES",
        (*GAVE, "survival"),
    ),
}


@pytest.mark.parametrize(("alter", "code", "before"), ALTERED.values(), ids=ALTERED)
def test_a_lie_ends_the_attempt_and_nothing_more_leaves(world, tmp_path, alter, code, before):
    hostile = attacks(world, tmp_path, [Attempted(world, "public", alter=alter)])
    assert kinds(hostile) == Counter((*before, "end"))
    assert ends(tmp_path) == [(code, "coordinator")]
    assert len([upload for upload in hostile.uploads if upload[1] == 0]) == ("header" in before)


def test_with_private_weights_no_sum_lacks_a_silo(world, tmp_path):
    alter = when(s.SurvivorsTold, lambda _, told: [s.SurvivorsTold(told.headers[1:])])
    hostile = attacks(world, tmp_path, [Attempted(world, "private", alter=alter)], "private")
    assert kinds(hostile) == Counter((*GAVE, "end"))
    assert ends(tmp_path) == [("SURVIVORS", "coordinator")]


# What comes twice, too late or too early, or in another attempt.


def test_a_second_request_to_unmask_gets_nothing(world, tmp_path):
    """Neither by the same notes nor by those of other survivors."""
    alter = when(s.NotesTold, lambda _, told: [told, told, s.NotesTold(told.survivals[1:])])
    hostile = attacks(world, tmp_path, [Attempted(world, "public", alter=alter)])
    assert kinds(hostile) == Counter((*GAVE, "survival", "reveal"))
    assert ends(tmp_path) == []


def test_after_a_lie_the_truth_gets_nothing(world, tmp_path):
    """All the messages of the honest attempt, after one that ended it."""
    alter = when(s.SurvivorsTold, lambda _, told: [s.SurvivorsTold(told.headers[1:3]), told])
    hostile = attacks(world, tmp_path, [Attempted(world, "public", alter=alter)])
    assert kinds(hostile) == Counter((*GAVE, "end"))
    assert ends(tmp_path) == [("SURVIVORS", "coordinator")]


def test_another_attempt_without_abandon_notes_gets_nothing(world, tmp_path):
    """Its masked words of the first are there; the second would show the same values once more."""
    cut = when(s.SurvivorsTold, lambda *_: [])
    first, second = Attempted(world, "public", alter=cut), Attempted(world, "public", attempt=1)
    hostile = attacks(world, tmp_path, [first, second])
    assert kinds(hostile)["survival"] == kinds(hostile)["reveal"] == 0
    assert ends(tmp_path) == [("ABANDON", "coordinator")]
    assert hostile.contexts[:-1] == [first.spec.context()]


# What is no message of this sum.


def malformed(world):
    """Replies to SecureNext by name."""
    honest = Attempted(world, "public")
    spec = honest.told[0]
    other = Attempted(world, "private").told[0]
    bundle = secure.KeyBundle(silo="east", seal=bytes(32), mask=bytes(32), signature=bytes(64))
    return {
        "specification of 3.9 MB": secure.SecureTold(
            attempt=spec.attempt, spec=secure.SignedSpec(document=b"x" * 3_900_000, signature=bytes(64))
        ),
        "another job": other,
        "no attempt": secure.SecureTold(spec=spec.spec),
        "keys twice": secure.SecureTold(attempt=spec.attempt, keys=secure.KeysTold(bundles=[bundle] * 2)),
        "keys of four bytes": secure.SecureTold(attempt=spec.attempt, keys=secure.KeysTold(bundles=[KEY_OF_FOUR])),
        "unknown code": secure.SecureTold(attempt=spec.attempt, end=secure.SecureEnd(code=99)),
        "nothing said": secure.SecureTold(attempt=spec.attempt),
    }


KEY_OF_FOUR = secure.KeyBundle(silo="east", seal=bytes(4), mask=bytes(32), signature=bytes(64))


MALFORMED = (
    "specification of 3.9 MB",
    "another job",
    "no attempt",
    "keys twice",
    "keys of four bytes",
    "unknown code",
    "nothing said",
)


@pytest.mark.parametrize("name", MALFORMED)
def test_a_message_that_is_none_of_this_sum_loses_the_round_and_not_the_agent(world, tmp_path, name):
    hostile = attacks(world, tmp_path, [Attempted(world, "public")], first=[malformed(world)[name]])
    assert kinds(hostile) == Counter()
    assert ("FAILED", 0, "DELIVERY") in hostile.answers


NO_MESSAGES = {
    "garbage": GARBAGE,
    "more than a message may have": secure.SecureTold(spec=secure.SignedSpec(document=bytes(5_000_000))),
    "more keys than there are members": secure.SecureTold(keys=secure.KeysTold(bundles=[secure.KeyBundle()] * 20)),
}


@pytest.mark.parametrize("reply", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_a_reply_that_is_no_message_is_asked_for_again_and_the_round_is_summed(world, tmp_path, reply):
    hostile = attacks(world, tmp_path, [Attempted(world, "public")], first=[reply] * 2, times=3)
    assert hostile.calls["hello"] == 3
    assert kinds(hostile) == Counter((*GAVE, "survival", "reveal"))
    assert ends(tmp_path) == []


def test_who_reveals_too_late_learns_what_came_of_the_round(world, tmp_path):
    hostile = Blind(world, [offer(world, "public"), round_of(world, 0, "public")], {0: [Attempted(world, "public")]})
    hostile.hasty = True
    play(hostile, tmp_path)
    assert kinds(hostile) == Counter((*GAVE, "survival", "reveal"))
    opened = [record["round"] for record in records(tmp_path) if record["type"] == "secagg.sum"]
    assert (opened, ends(tmp_path)) == ([0], [])


def test_training_that_ends_while_the_round_is_told_again_loses_nothing(world, tmp_path, monkeypatch):
    """Who looks for what it trained before it is kept, and counts its rounds after, must not think the round over."""
    found, looked = JobFolder.outbox, []

    def slowly(folder, round_):
        payload = found(folder, round_)
        looked.append(round_)
        while looked == [0, 0] and not folder.rounds_done:
            time.sleep(0.01)
        return payload

    monkeypatch.setattr(JobFolder, "outbox", slowly)
    attacks(world, tmp_path, [Attempted(world, "public")], first=[GARBAGE], times=2)
    assert ends(tmp_path) == []
    opened = [record["round"] for record in records(tmp_path) if record["type"] == "secagg.sum"]
    assert opened == [0, 1]


def test_a_malformed_message_in_an_attempt_is_recorded_as_its_end(world, tmp_path):
    bundle = secure.KeyBundle(silo="east", seal=bytes(32), mask=bytes(32), signature=bytes(64))
    twice = lambda attempted, _: [  # noqa: E731
        secure.SecureTold(attempt=attempt_to_wire(attempted.attempt), keys=secure.KeysTold(bundles=[bundle] * 2))
    ]
    hostile = attacks(world, tmp_path, [Attempted(world, "public", alter=when(s.KeysTold, twice))])
    assert kinds(hostile) == Counter(["keys"])
    assert ("FAILED", 0, "DELIVERY") in hostile.answers
    assert ends(tmp_path) == [("KEYS", "coordinator")]


def test_a_message_of_another_round_in_an_attempt_is_recorded_as_its_end(world, tmp_path):
    other = lambda attempted, told: [Told(replace(attempted.attempt, round=1), told)]  # noqa: E731
    attacks(world, tmp_path, [Attempted(world, "public", alter=when(s.KeysTold, other))])
    assert ends(tmp_path) == [("ORDER", "coordinator")]


@pytest.mark.parametrize(
    ("limit", "uploads"), [("54KiB", 0), ("55KiB", 1)], ids=["masked words are too many", "the header is too much"]
)
def test_protocol_messages_count_against_the_bytes_of_a_round(world, tmp_path, limit, uploads):
    """There is room for the masked words, and not for all that goes with them."""
    hostile = Blind(world, [offer(world, "public"), round_of(world, 0, "public")], {0: [Attempted(world, "public")]})
    policy = world.policy.replace('max_bytes_per_round = "64MiB"', f'max_bytes_per_round = "{limit}"')
    assert policy != world.policy
    play(hostile, tmp_path, policy=policy)
    said = () if uploads else ("end",)  # the attempt ends with POLICY, or where no header leaves, the round
    assert (kinds(hostile), len(hostile.contexts)) == (Counter(["keys", "shares", *said]), uploads)
    assert (("FAILED", 0, "POLICY") in hostile.answers) == bool(uploads)
    assert uploads or ends(tmp_path) == [("POLICY", "")]
    (denied,) = [record for record in records(tmp_path) if record["type"] == "policy.deny"]
    assert f"over max_bytes_per_round = {int(limit[:2]) * 1024}" in denied["reasons"][0]


def test_without_what_it_remembers_of_its_attempts_a_silo_enters_none(world, tmp_path):
    first = Blind(world, [offer(world, "public"), round_of(world, 0, "public")], {0: [Attempted(world, "public")]})
    play(first, tmp_path)
    assert kinds(first) == Counter((*GAVE, "survival", "reveal"))
    (memory,) = (tmp_path / "jobs" / "public").glob("secagg-*.json")
    kept = memory.read_bytes()
    memory.unlink()
    for remembers in (False, True):
        if remembers:
            memory.write_bytes(kept)
        again = Blind(world, [round_of(world, 1, "public")], {1: [Attempted(world, "public", 1)]})
        again.script["fetch"] = [lambda: delivery(world, "public", 1, seed=1)]
        play(again, tmp_path)
        assert bool(again.given) == remembers
        assert (("FAILED", 1, "TRAINING") in again.answers) != remembers


# Pace.


def flooding(attempted, number):
    """Replies to SecureNext by name, each a flood."""
    world = attempted.world
    told = lambda body, to=attempted.attempt: told_to_wire(Told(to, body))  # noqa: E731
    unknown = replace(attempted.attempt, ctx=bytes(32), attempt=number)
    later = attempted.spec.model_copy(update={"attempt": number})
    signed = SignedSpec(later.payload(), world.keys.sign(SECAGG_SPEC, later.payload()))
    return {
        "nothing": secure.SecureTold(nothing=secure.SecureNothing()),
        "good specifications": told(signed, replace(attempted.attempt, attempt=number, ctx=later.context())),
        "unsigned specifications": told(replace(signed, signature=bytes(64))),
        "the same specification": told(attempted.signed()),
        "abandon": told(s.AbandonAsked()),
        "end": told(Over(Code.TOO_FEW)),
        "messages of another attempt": told(s.ResultTold(bytes(32), b""), unknown),
    }


FLOODS = {  # name: how many messages are taken at full pace
    "nothing": 0,
    "good specifications": 1,
    "unsigned specifications": 0,
    "the same specification": 1,
    "abandon": 0,
    "end": blind.MOST_IDLE,
    "messages of another attempt": blind.MOST_IDLE,
}


@pytest.mark.timeout(120)
def test_a_flood_of_messages_is_paced(world, tmp_path, monkeypatch):
    """All floods at once, each against an agent of its own; its ledger does not grow faster than the pace."""
    monkeypatch.setattr(blind, "PAUSE_SECONDS", PAUSE_SECONDS)
    seconds, hostiles = 4, {}
    for name in FLOODS:
        attempted = Attempted(world, "public")
        hostiles[name] = Blind(world, [offer(world, "public"), round_of(world, 0, "public")], {0: [attempted]})
        attempted.told = [] if "specification" in name or name == "nothing" else attempted.told
        hostiles[name].flood = lambda number, name=name, attempted=attempted: flooding(attempted, number)[name]

    async def scenario():
        runs = (attacked(hostile, tmp_path / name, seconds=seconds) for name, hostile in hostiles.items())
        await asyncio.gather(*runs)

    asyncio.run(scenario())
    for name, free in FLOODS.items():
        asked, paced = hostiles[name].calls["secure_next"], seconds / PAUSE_SECONDS + 5
        assert 3 <= asked <= free + paced, (name, asked)
        written = [record for record in records(tmp_path / name) if record["type"] in ("egress.protocol", "secagg.end")]
        assert len(written) <= 3 * paced, (name, len(written))

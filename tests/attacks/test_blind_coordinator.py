"""A coordinator with the right keys and bad intentions in a blind round, against the agent as it
ships.

The other silos are honest, and played by the pure machine; what the real one is told, each attack
changes. Afterwards it takes part in an honest round.
"""

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
from support.hostile_coordinator import (
    GARBAGE,
    SILO,
    attacked,
    delivery,
    ends,
    offer,
    play,
    records,
    round_of,
)
from support.hostile_sum_coordinator import OTHERS, SILOS, Attempted, Blind, make_world

from staddle.proto import secure_pb2 as secure
from staddle.proto.convert.secagg_received import (
    SecaggDelivery,
    SignedSpec,
    secagg_delivery_to_wire,
)
from staddle.proto.convert.secagg_sent import Over, attempt_to_wire
from staddle.security.faults import Code
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.messages import Sets, make_abandon, make_survival
from staddle.silo.blind import round as blind
from staddle.silo.job_folder import JobFolder

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

PAUSE_SECONDS = blind.PAUSE_SECONDS
# with public weights, sums over three of the four are opened; with private ones over all
REQUIRED = {"secure_aggregation": "required", "tags": False}
COUNTS = {"weights": "public", "dropouts": "any", "counts": dict.fromkeys(SILOS, 60)}
SECURITY = {"public": {**REQUIRED, **COUNTS}, "private": {**REQUIRED, "weight_most": 2000}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("attacked"), SECURITY)


def abandoned(world, *attempts):
    """The word of the other silos that these attempts are never opened."""
    notes = []
    for ctx in [attempted.spec.context() for attempted in attempts]:
        notes += [make_abandon(ctx, silo, keys.sign) for silo, keys in world.others.items()]
    return sorted(notes, key=lambda note: (note.silo, note.signature))


def attacks(world, tmp_path, sums, job="public", first=(), times=1, retry=False, counted=0):
    """Play a round of these attempts, where it is repeated honestly that too, and an honest round
    after it.

    ``counted`` is 1 where a sum of the first round holds values of the real silo.
    """
    sums = list(sums)
    retried = [Attempted(world, job, 0, len(sums), notes=abandoned(world, *sums))] if retry else []
    asked = [*[round_of(world, 0, job)] * times, round_of(world, 1, job, counted=counted)]
    tasks = [offer(world, job), *asked]
    hostile = Blind(world, tasks, {0: [*sums, *retried], 1: [Attempted(world, job, 1)]})
    hostile.retried = {attempted.spec.context() for attempted in retried}
    hostile.first = list(first)
    down = [lambda: delivery(world, job, 0), lambda: delivery(world, job, 1, seed=1)]
    hostile.script["fetch"] = down
    play(hostile, tmp_path)
    opened = [(record["round"], record["survivors"]) for record in records(tmp_path, "secagg.sum")]
    expected = [(round_, sorted(SILOS)) for round_ in ((0, 1) if retry else (1,))]
    assert opened[-len(expected) :] == expected, "the agent did not take part in honest sums"
    return hostile


def kinds(hostile, round_=0):
    """How often the real silo gave what, in the attacked attempts of a round."""
    attacked_ = [each for each in hostile.given if each[1] not in hostile.retried]
    return Counter(kind for given_in, _, kind in attacked_ if given_in == round_)


def one_round(world):
    """An honest coordinator of one round."""
    tasks = [offer(world, "public"), round_of(world, 0, "public")]
    return Blind(world, tasks, {0: [Attempted(world, "public")]})


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
    one = replace(messages[place], **changes)
    return tuple(one if i == place else each for i, each in enumerate(messages))


def another_job(attempted, _):
    payload = Attempted(attempted.world, "private").spec.signed_bytes()
    return [SignedSpec(payload, attempted.world.keys.sign(SECAGG_SPEC, payload))]


def split(attempted, told):
    """All others are told four survivors; the real silo three, of which it is one."""
    return [s.SurvivorsReceived(tuple(header for header in told.headers if header.silo != "east"))]


def forged_notes(attempted, told):
    """Survivors' signatures over other sets, by the coordinator's key."""
    sets = Sets(attempted.state.h_u1, attempted.state.h_u2, attempted.state.h_u3)
    ctx, sign = attempted.spec.context(), attempted.world.keys.sign
    notes = (make_survival(ctx, each.silo, sets, sign) for each in told.survivals)
    return [s.NotesReceived(tuple(notes))]


def keys(bundles, *, truth=False):
    """Other bundles than were given, perhaps behind the right ones."""

    def change(_, told):
        other = s.KeysReceived(tuple(bundles(told.bundles)), told.keys)
        return [told, other] if truth else [other]

    return when(s.KeysReceived, change)


def survivors(headers, *, truth=False):
    def change(_, told):
        other = s.SurvivorsReceived(tuple(headers(told.headers)))
        return [told, other] if truth else [other]

    return when(s.SurvivorsReceived, change)


def without_us(messages):
    return [each for each in messages if each.silo != SILO]


def of_its_own(bundles):
    return swapped(bundles, 0, mask=bytes(range(32)))


def badly_signed(bundles):
    return swapped(bundles, 3, signature=bytes(64))


def unsigned(_, body):
    return [replace(body, signature=bytes(64))]


def two_sets_of_keys(_, told):
    return [told, s.KeysReceived(told.bundles[:3], told.keys[:2])]


def too_few_shares(_, told):
    return [s.SharesReceived(told.deliveries[:2])]


def too_few_notes(_, told):
    return [s.NotesReceived(told.survivals[:2])]


def early(_, told):
    return [told, s.SurvivorsReceived(())]


THREE = {"cohort": sorted(SILOS)[:3], "counts": [60] * 3}  # for a colluder of ours
ASKED, DEALT, SHARED, GAVE = (), ("keys",), ("keys", "shares"), ("keys", "shares", "header")
SIGNED = (*GAVE, "survival")
BOTH_ROLES = survivors(lambda headers: headers[1:], truth=True)
ALTERED = {  # name: what is changed, code, what the real silo gives beside "end" before it sees it
    "lowered t": (respec(threshold=2), "POLICY", ASKED),
    "smaller cohort": (respec(cohort=sorted(SILOS)[:2], counts=[60, 60]), "POLICY", ASKED),
    "cohort of three": (respec(**THREE), "POLICY", ASKED),
    "cohort without us": (respec(cohort=sorted(OTHERS), counts=[60] * 3), "SPEC", ASKED),
    "unknown id": (respec(cohort=["east", "mallory", SILO, "west"]), "SPEC", ASKED),
    "doubled id": (respec(cohort=["east", "east", SILO, "west"]), "SPEC", ASKED),
    "fewer colluders": (respec(colluders=0), "POLICY", ASKED),
    "lowered min_cohort": (respec(min_cohort=2), "SPEC", ASKED),
    "other counts": (respec(counts=[60, 60, 60, 59]), "SPEC", ASKED),
    "another round": (respec(round=1), "SPEC", ASKED),
    "other members": (respec(members="ab" * 32), "SPEC", ASKED),
    "another schema": (respec(schema_digest="ab" * 32), "SPEC", ASKED),
    "another model than was delivered": (respec(model_digest="ab" * 32), "SPEC", ASKED),
    "another job": (when(SignedSpec, another_job), "SPEC", ASKED),
    "unsigned": (when(SignedSpec, unsigned), "SPEC", ASKED),
    "the same again": (when(SignedSpec, lambda _, body: [body, body]), "ATTEMPT", DEALT),
    "keys of its own": (keys(of_its_own), "KEYS", DEALT),
    "bad signature of a bundle": (keys(badly_signed), "KEYS", DEALT),
    "keys without ours": (keys(without_us), "KEYS", DEALT),
    "two sets of keys": (when(s.KeysReceived, two_sets_of_keys), "EQUIVOCATION", SHARED),
    "too few shares": (when(s.SharesReceived, too_few_shares), "SHARES", SHARED),
    "survivors before uploads": (when(s.KeysReceived, early), "ORDER", SHARED),
    "shrunk survivors": (survivors(lambda headers: headers[1:3]), "SURVIVORS", GAVE),
    "survivors without us": (survivors(without_us), "SURVIVORS", GAVE),
    "split survivors": (when(s.SurvivorsReceived, split), "NOTES", SIGNED),
    "a survivor in both roles": (BOTH_ROLES, "EQUIVOCATION", SIGNED),
    "forged notes": (when(s.NotesReceived, forged_notes), "NOTES", SIGNED),
    "too few notes": (when(s.NotesReceived, too_few_notes), "NOTES", SIGNED),
}


@pytest.mark.parametrize(("alter", "code", "before"), ALTERED.values(), ids=ALTERED)
def test_a_lie_ends_the_attempt_and_nothing_more_leaves(world, tmp_path, alter, code, before):
    uploaded, signed = "header" in before, "survival" in before
    retry, counted = uploaded and not signed, int(uploaded)
    sums = [Attempted(world, "public", alter=alter)]
    hostile = attacks(world, tmp_path, sums, retry=retry, counted=counted)
    assert kinds(hostile) == Counter((*before, "end"))
    assert ends(tmp_path) == [(code, "coordinator")]
    assert hostile.contexts.count(hostile.sums[0][0].spec.context()) == uploaded


def test_with_private_weights_no_sum_lacks_a_silo(world, tmp_path):
    alter = when(s.SurvivorsReceived, lambda _, told: [s.SurvivorsReceived(told.headers[1:])])
    sums = [Attempted(world, "private", alter=alter)]
    hostile = attacks(world, tmp_path, sums, "private", retry=True, counted=1)
    assert kinds(hostile) == Counter((*GAVE, "end"))
    assert ends(tmp_path) == [("SURVIVORS", "coordinator")]


# What comes twice, too late or too early, or in another attempt.


def test_a_second_request_to_unmask_gets_nothing(world, tmp_path):
    """Neither by the same notes nor by those of other survivors."""
    alter = when(s.NotesReceived, lambda _, told: [told, told, s.NotesReceived(told.survivals[1:])])
    hostile = attacks(world, tmp_path, [Attempted(world, "public", alter=alter)], counted=1)
    assert kinds(hostile) == Counter((*GAVE, "survival", "reveal"))
    assert ends(tmp_path) == []


def test_after_a_lie_the_truth_gets_nothing(world, tmp_path):
    """All the messages of the honest attempt, after one that ended it."""
    lie = lambda _, told: [s.SurvivorsReceived(told.headers[1:3]), told]
    sums = [Attempted(world, "public", alter=when(s.SurvivorsReceived, lie))]
    hostile = attacks(world, tmp_path, sums, retry=True, counted=1)
    assert kinds(hostile) == Counter((*GAVE, "end"))
    assert ends(tmp_path) == [("SURVIVORS", "coordinator")]


def test_another_attempt_without_abandon_notes_gets_nothing(world, tmp_path):
    """Its masked words of the first are there; the second would show the same values once more."""
    cut = when(s.SurvivorsReceived, lambda *_: [])
    first, second = Attempted(world, "public", alter=cut), Attempted(world, "public", attempt=1)
    hostile = attacks(world, tmp_path, [first, second], retry=True, counted=1)
    assert kinds(hostile)["survival"] == kinds(hostile)["reveal"] == 0
    assert ends(tmp_path) == [("ABANDON", "")]  # an honest one may lack them, too
    assert hostile.contexts[:-2] == [first.spec.context()]


# What is no message of this sum.


def twice_the_keys(size=32, times=2):
    """Of one silo, with a key of that size."""
    fields = {"mask": bytes(32), "receiving": bytes(32), "signature": bytes(64)}
    bundle = secure.KeyBundle(silo="east", seal=bytes(size), **fields)
    return secure.DeliveredKeys(bundles=[bundle] * times)


LONG = secure.SignedSpec(document=b"x" * 3_900_000, signature=bytes(64))
MALFORMED = {  # name: what is said
    "specification of 3.9 MB": {"spec": LONG},
    "keys twice": {"keys": twice_the_keys()},
    "keys of four bytes": {"keys": twice_the_keys(4, times=1)},
    "unknown code": {"end": secure.SecureEnd(code=99)},
    "nothing said": {},
}


def malformed(world, name):
    """A reply to SecureNext."""
    spec = Attempted(world, "public").told[0]
    if name == "another job":
        return Attempted(world, "private").told[0]
    if name == "no attempt":
        return secure.SecureDelivery(spec=spec.spec)
    return secure.SecureDelivery(attempt=spec.attempt, **MALFORMED[name])


@pytest.mark.parametrize("name", ["another job", "no attempt", *MALFORMED])
def test_a_message_that_is_none_of_this_sum_loses_the_round_and_not_the_agent(
    world, tmp_path, name
):
    first = [malformed(world, name)]
    hostile = attacks(world, tmp_path, [Attempted(world, "public")], first=first)
    assert kinds(hostile) == Counter()
    assert ("FAILED", 0, "DELIVERY") in hostile.answers


TOO_LONG, MANY_KEYS = secure.SignedSpec(document=bytes(5_000_000)), [secure.KeyBundle()] * 40
NO_MESSAGES = {
    "garbage": GARBAGE,
    "more than a message may have": {"spec": TOO_LONG},
    "more keys than there are members": {"keys": secure.DeliveredKeys(bundles=MANY_KEYS)},
}


@pytest.mark.parametrize("reply", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_a_reply_that_is_no_message_is_asked_for_again_and_the_round_is_summed(
    world, tmp_path, reply
):
    sums = [Attempted(world, "public")]
    reply = secure.SecureDelivery(**reply) if isinstance(reply, dict) else reply
    hostile = attacks(world, tmp_path, sums, first=[reply] * 2, times=3, counted=1)
    assert hostile.calls["hello"] == 3
    assert kinds(hostile) == Counter((*GAVE, "survival", "reveal"))
    assert ends(tmp_path) == []


@pytest.mark.control
def test_who_reveals_too_late_learns_what_came_of_the_round(world, tmp_path):
    hostile = one_round(world)
    hostile.hasty = True
    play(hostile, tmp_path)
    assert kinds(hostile) == Counter((*GAVE, "survival", "reveal"))
    opened = [record["round"] for record in records(tmp_path, "secagg.sum")]
    assert (opened, ends(tmp_path)) == ([0], [])


@pytest.mark.control
def test_training_that_ends_while_the_round_is_told_again_loses_nothing(
    world, tmp_path, monkeypatch
):
    """Who looks for what it trained before it is kept, and counts its rounds after, must not think
    the round over.
    """
    found, looked = JobFolder.outbox, []

    def slowly(folder, round_):
        payload = found(folder, round_)
        looked.append(round_)
        while looked == [0, 0] and not folder.rounds_done:
            time.sleep(0.01)
        return payload

    monkeypatch.setattr(JobFolder, "outbox", slowly)
    attacks(world, tmp_path, [Attempted(world, "public")], first=[GARBAGE], times=2, counted=1)
    assert ends(tmp_path) == []
    opened = [record["round"] for record in records(tmp_path, "secagg.sum")]
    assert opened == [0, 1]


def test_a_malformed_message_in_an_attempt_is_recorded_as_its_end(world, tmp_path):
    def twice(attempted, _):
        attempt = attempt_to_wire(attempted.attempt)
        return [secure.SecureDelivery(attempt=attempt, keys=twice_the_keys())]

    sums = [Attempted(world, "public", alter=when(s.KeysReceived, twice))]
    hostile = attacks(world, tmp_path, sums)
    assert kinds(hostile) == Counter(["keys"])
    assert ("FAILED", 0, "DELIVERY") in hostile.answers
    assert ends(tmp_path) == [("KEYS", "coordinator")]


def test_a_message_of_another_round_in_an_attempt_is_recorded_as_its_end(world, tmp_path):
    other = lambda attempted, told: [SecaggDelivery(replace(attempted.attempt, round=1), told)]
    attacks(world, tmp_path, [Attempted(world, "public", alter=when(s.KeysReceived, other))])
    assert ends(tmp_path) == [("ORDER", "coordinator")]


@pytest.mark.parametrize(
    ("limit", "uploads"),
    [(55_000, 0), (56_422, 1)],
    ids=["masked words are too many", "the header is too much"],
)
def test_protocol_messages_count_against_the_bytes_of_a_round(world, tmp_path, limit, uploads):
    """There is room for the masked words, and not for all that goes with them."""
    hostile = one_round(world)
    policy = world.policy.replace(
        'max_bytes_per_round = "64MiB"', f'max_bytes_per_round = "{limit}B"'
    )
    assert policy != world.policy
    play(hostile, tmp_path, policy=policy)
    # the attempt ends with POLICY, or where no header leaves, the round
    said = () if uploads else ("end",)
    assert (kinds(hostile), len(hostile.contexts)) == (Counter(["keys", "shares", *said]), uploads)
    assert (("FAILED", 0, "POLICY") in hostile.answers) == bool(uploads)
    assert uploads or ends(tmp_path) == [("POLICY", "")]
    (denied,) = records(tmp_path, "policy.deny")
    assert f"over max_bytes_per_round = {limit}" in denied["reasons"][0]


def test_without_what_it_remembers_of_its_attempts_a_silo_enters_none(world, tmp_path):
    first = play(one_round(world), tmp_path)
    assert kinds(first) == Counter((*GAVE, "survival", "reveal"))
    (memory,) = (tmp_path / "jobs" / "public").glob("secagg-*.json")
    kept = memory.read_bytes()
    memory.unlink()
    for remembers in (False, True):
        if remembers:
            memory.write_bytes(kept)
        tasks = [round_of(world, 1, "public", counted=1)]
        again = Blind(world, tasks, {1: [Attempted(world, "public", 1)]})
        again.script["fetch"] = [lambda: delivery(world, "public", 1, seed=1)]
        play(again, tmp_path)
        assert bool(again.given) == remembers
        assert (("FAILED", 1, "TRAINING") in again.answers) != remembers


# Pace.


def flooding(attempted, number):
    """Replies to SecureNext by name, each a flood."""
    world = attempted.world
    told = lambda body, to=attempted.attempt: secagg_delivery_to_wire(SecaggDelivery(to, body))
    unknown = replace(attempted.attempt, ctx=bytes(32), attempt=number)
    later = attempted.spec.model_copy(update={"attempt": number})
    signed = SignedSpec(later.signed_bytes(), world.keys.sign(SECAGG_SPEC, later.signed_bytes()))
    return {
        "nothing": secure.SecureDelivery(nothing=secure.SecureNothing()),
        "good specifications": told(
            signed, replace(attempted.attempt, attempt=number, ctx=later.context())
        ),
        "unsigned specifications": told(replace(signed, signature=bytes(64))),
        "the same specification": told(attempted.signed()),
        "abandon": told(s.AbandonAsked()),
        "end": told(Over(Code.TOO_FEW)),
        "messages of another attempt": told(s.ResultReceived(bytes(32), b""), unknown),
    }


FLOODS = {  # name: how many messages are taken at full pace
    "nothing": 0,
    "good specifications": blind.MOST_AGAIN,
    "unsigned specifications": blind.MOST_AGAIN,
    "the same specification": blind.MOST_AGAIN,
    "abandon": blind.MOST_AGAIN,
    "end": blind.MOST_IDLE,
    "messages of another attempt": blind.MOST_IDLE,
}


@pytest.mark.timeout(120)
async def test_a_flood_of_messages_is_paced(world, tmp_path, monkeypatch):
    """All floods at once, each against an agent of its own.

    Its ledger does not grow faster than the pace.
    """
    monkeypatch.setattr(blind, "PAUSE_SECONDS", PAUSE_SECONDS)
    seconds, hostiles = 4, {}
    for name in FLOODS:
        hostiles[name] = made = one_round(world)
        (attempted,) = made.sums[0]
        attempted.told = [] if "specification" in name or name == "nothing" else attempted.told
        made.flood = lambda number, name=name, sent=attempted: flooding(sent, number)[name]
    runs = (attacked(each, tmp_path / name, seconds=seconds) for name, each in hostiles.items())
    await asyncio.gather(*runs)
    for name, free in FLOODS.items():
        asked, paced = hostiles[name].calls["secure_next"], seconds / PAUSE_SECONDS + 5
        assert 3 <= asked <= free + paced, (name, asked)
        written = records(tmp_path / name, "egress.protocol", "secagg.end")
        assert len(written) <= 3 * (paced + blind.MOST_AGAIN), (name, len(written))

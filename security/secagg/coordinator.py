"""The coordinator of a secure sum as a pure state machine: ``advance(state, event) -> (state,
effects)``.

It passes messages on, closes each stage once all have answered or time is up, and computes which
masks are left on the sum. No tensor, file or clock here; uploads are spooled and folded by the
shell.

::

    stage      leaves when                                             goes to
    keys       all of the cohort gave keys or failed, or the deadline  shares   (U1 is large
                                                                       enough), else ended
    shares     all of U1 dealt or failed, or the deadline              masked   (U2 is), else ended
    masked     all of U2 uploaded or failed, or the deadline           survivors (U3 is), else ended
    masked     a complaint about a dealer holds (evidence.py)          ended, and the dealer is
                                                                       named
    survivors  t survivors signed                                      reveal;  ended at the
                                                                       deadline
    reveal     t survivors revealed shares that join                   opening; ended at the
                                                                       deadline
    opening    the sum is open                                         done;    ended if it is no
                                                                       sum of values

A message that does not hold is refused, and its sender drops out; a late one, or a second one, is
refused and changes nothing. Once U2 is told, masked bytes may be on their way: an attempt that ends
after that asks for abandon notes, and another may follow when ``notes_missing`` is 0.

A share that is none of its dealer's polynomial fits its commitment all the same. Where the first t
shares do not join to what the dealer committed to, the other survivors' are awaited and other t of
them are tried: one wrong share ends no sum while t + 1 survivors reveal. Either way the dealer is
named, for any t shares of an honest one join. Where no t that were tried join, they are evidence
(evidence.py), with which silos repeat the sum over the same survivors without it.

Shares of inner products (gram_pieces.py) are opened with the sum. Where they lie on no polynomial,
other survivors' are awaited, too; who gave a wrong one is named where enough reveal, else the
attempt ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np

from ...errors import RefusedError
from ..arithmetic.masks import Term, pair_term
from ..faults import Code, check
from ..identity.domains import SECAGG_SPEC
from ..identity.pairwise_keys import agree, pair_key, self_key
from ..identity.signers import Sign, Signers
from .coordinator_events import (
    AbandonUploaded,
    Ask,
    AskAbandon,
    AttemptDeadline,
    ComplaintUploaded,
    DeliverKeys,
    DeliverNotes,
    DeliverResult,
    DeliverShares,
    DeliverSurvivors,
    Discard,
    Effect,
    EndAttempt,
    Event,
    KeysUploaded,
    Open,
    OpenFailed,
    Refuse,
    RevealUploaded,
    SharesUploaded,
    SiloDropped,
    StartTimer,
    SumPublished,
    SurvivalUploaded,
    WordsUploaded,
)
from .dealing import SELF, Dealing, KeyBundle, Portion, check_portions, deliver, distinct_keys
from .evidence import Complaint, Fault, Misdealing, ShownShare, Unjoined, Unopened, joins
from .gram_pieces import read_revealed
from .linear_tags import combine
from .messages import Abandon, Header, Reveal, Sets, Survival, kinds_to_reveal, set_digest
from .receiving_keys import ReceivingKey, check_keys, deliver_keys
from .shared_gram import OpenedGram
from .shared_gram import opened as opened_gram
from .spec import RoundSpec, Terms, check_cohort, check_survivors

Stage: TypeAlias = Literal[
    "keys", "shares", "masked", "survivors", "reveal", "opening", "done", "ended"
]

MOST_SUBSETS = 300  # of t shares, tried for one dealer: half a second among 100 silos
NOBODY: Mapping[str, str] = MappingProxyType({})
# a deadline closes them
WATCHED: tuple[Stage, ...] = ("keys", "shares", "masked", "survivors", "reveal")


@dataclass(frozen=True)
class CoordinatorState:
    """Where an attempt stands; each mapping is by silo."""

    spec: RoundSpec
    ctx: bytes
    signers: Signers
    terms: Terms
    stage: Stage = "keys"
    told: bool = False  # U2 was told: masked bytes may have left silos
    failed: Mapping[str, str] = field(default_factory=dict)  # why
    bundles: Mapping[str, KeyBundle] = field(default_factory=dict)
    keys: Mapping[str, tuple[ReceivingKey, ...]] = field(default_factory=dict)
    dealings: Mapping[str, Dealing] = field(default_factory=dict)
    portions: Mapping[str, tuple[Portion, ...]] = field(default_factory=dict)
    complaints: Mapping[str, Complaint] = field(default_factory=dict)
    headers: Mapping[str, Header] = field(default_factory=dict)
    survivals: Mapping[str, Survival] = field(default_factory=dict)
    reveals: Mapping[str, Reveal] = field(default_factory=dict)
    notes: Mapping[str, Abandon] = field(default_factory=dict)
    proofs: Mapping[str, Misdealing] = field(default_factory=dict)  # by dealer, of all who misdealt
    # that of them why nothing could be opened, though survivors signed
    evidence: Misdealing | None = None
    spoiled: bool = False  # what was opened is no sum of values
    u1: tuple[str, ...] = ()
    u2: tuple[str, ...] = ()
    u3: tuple[str, ...] = ()
    h_u1: bytes = b""
    h_u2: bytes = b""
    h_u3: bytes = b""
    tags: bytes = b""  # of the survivors together, without masks

    @property
    def notes_needed(self) -> int:
        """Abandon notes after which nobody finds t signatures any more.

        0 where no masked bytes may have left.
        """
        return len(self.u1) - self.spec.threshold + self.spec.colluders + 1 if self.told else 0

    @property
    def notes_missing(self) -> int:
        """Abandon notes that are missing before silos enter another attempt."""
        return max(0, self.notes_needed - len(self.notes))


Step: TypeAlias = tuple[CoordinatorState, tuple[Effect, ...]]


def begin(
    spec: RoundSpec, signers: Signers, terms: Terms, sign: Sign, out: Mapping[str, str] = NOBODY
) -> Step:
    """Ask the cohort; RefusedError for one that silos with these terms would not join.

    ``out`` are members that cannot take part in this attempt, and why: they are not asked.
    """
    check_cohort(spec, terms)
    state = CoordinatorState(spec, spec.context(), signers, terms, failed=out)
    asked = tuple(silo for silo in spec.cohort if silo not in out)
    return state, (
        Ask(asked, spec.payload(), sign(SECAGG_SPEC, spec.payload())),
        StartTimer("keys"),
    )


def advance(state: CoordinatorState, event: Event) -> Step:
    """The next state and what has to be done."""
    match event:
        case KeysUploaded(bundle, _):
            return _given(state, "keys", bundle.silo, state.spec.cohort, event)
        case SharesUploaded(dealing, _):
            return _given(state, "shares", dealing.dealer, state.u1, event)
        case ComplaintUploaded(complaint):
            return _complained(state, complaint)
        case WordsUploaded(header):
            return _given(state, "masked", header.silo, state.u2, event)
        case SurvivalUploaded(survival):
            return _given(state, "survivors", survival.silo, state.u3, event)
        case RevealUploaded(reveal):
            return _given(state, "reveal", reveal.silo, tuple(state.survivals), event)
        case AbandonUploaded(note) if note.silo in state.u1 and note.holds(
            state.ctx, state.signers
        ):
            return _abandoned(state, note)
        case SiloDropped(silo, code) if silo in state.spec.cohort and silo not in state.failed:
            return _close_if_complete(replace(state, failed={**state.failed, silo: code}))
        case AttemptDeadline(stage) if stage == state.stage and stage in WATCHED:
            return _close(state)
        case SumPublished(sha256) if state.stage == "opening":
            return replace(state, stage="done"), (DeliverResult(state.u3, sha256, state.tags),)
        case OpenFailed(why, spoiled) if state.stage == "opening":
            return _end(replace(state, spoiled=spoiled), Code.SUM, "", why)
        case _:
            return state, ()


def _given(
    state: CoordinatorState, stage: Stage, silo: str, expected: Sequence[str], event: Event
) -> Step:
    """Take a message in, or refuse it."""
    # still welcome: it may reveal in another's place
    late_survival = stage == "survivors" and state.stage == "reveal"
    if stage != state.stage and not late_survival:
        why = f"sent a message of stage {stage!r} in stage {state.stage!r}"
        return state, (Refuse(silo, Code.ORDER, why),)
    if silo not in expected or silo in state.failed or silo in _answered(state, stage):
        return state, (
            Refuse(silo, Code.ORDER, f"is not awaited in stage {stage!r}, or has answered"),
        )
    try:
        taken, effects = _take(state, event)
    except RefusedError as error:
        state, more = advance(state, SiloDropped(silo, error.code))
        return state, (Refuse(silo, Code(error.code), error.why), *more)
    taken, more = _close_if_complete(taken)
    return taken, (*effects, *more)


def _take(state: CoordinatorState, event: Event) -> Step:
    """Check a message that may come now; RefusedError blames who sent it."""
    ctx, signers = state.ctx, state.signers
    match event:
        case KeysUploaded(bundle, keys):
            bundle.check(ctx, signers)
            check_keys(bundle.silo, bundle.receiving, keys, state.spec.cohort)
            twin = distinct_keys([*state.bundles.values(), bundle])
            check(twin is None, bundle.silo, Code.KEYS, "gave a key that is in use already")
            bundles = {**state.bundles, bundle.silo: bundle}
            return replace(state, bundles=bundles, keys={**state.keys, bundle.silo: keys}), ()
        case SharesUploaded(dealing, portions):
            dealing.check(ctx, state.h_u1, signers)
            check_portions(dealing, portions, state.u1)
            _check_sealed(state, dealing.dealer, portions)
            dealings = {**state.dealings, dealing.dealer: dealing}
            return (
                replace(
                    state, dealings=dealings, portions={**state.portions, dealing.dealer: portions}
                ),
                (),
            )
        case WordsUploaded(header, length, sha256):
            header.check(ctx, state.h_u2, state.spec, signers)
            same = (length, sha256) == (header.length, header.sha256)
            check(
                same, header.silo, Code.UPLOAD, "its upload is not the one whose digest it signed"
            )
            return replace(state, headers={**state.headers, header.silo: header}), ()
        case SurvivalUploaded(survival):
            survival.check(ctx, Sets(state.h_u1, state.h_u2, state.h_u3), signers)
            state = replace(state, survivals={**state.survivals, survival.silo: survival})
            late = state.stage == "reveal"
            return state, ((DeliverNotes((survival.silo,), _enough(state)),) if late else ())
        case RevealUploaded(reveal):
            number = state.u1.index(reveal.silo)
            portions_of = {dealer: portions[number] for dealer, portions in state.portions.items()}
            reveal.check(ctx, state.h_u3, kinds_to_reveal(state.u2, state.u3), portions_of, signers)
            read_revealed(state.spec, reveal.silo, len(state.u3), reveal.products)
            return replace(state, reveals={**state.reveals, reveal.silo: reveal}), ()
        case _:
            return state, ()


def _check_sealed(state: CoordinatorState, dealer: str, portions: Sequence[Portion]) -> None:
    """RefusedError unless a dealer says that it sealed to the keys that it was told."""
    place = state.spec.cohort.index(dealer)
    for portion in portions:
        holder = portion.holder
        if holder != dealer:  # a holder gave a key for each of the cohort but itself, in its order
            given = state.keys[holder][place - (holder < dealer)]
            right = portion.key == given.public
            check(
                right,
                dealer,
                Code.SHARES,
                f"says that it sealed to {holder!r} under a key which that silo never gave",
            )


def _complained(state: CoordinatorState, complaint: Complaint) -> Step:
    """End the attempt by evidence against a dealer, or drop out who complains without any.

    Who was lost meanwhile is heard; who has uploaded had opened all that was dealt to it.
    """
    silo, dealer = complaint.silo, complaint.dealer
    if state.stage != "masked" or silo not in state.u2 or silo in state.headers:
        return state, (
            Refuse(silo, Code.ORDER, f"complains in stage {state.stage!r}, or after its upload"),
        )
    try:
        dealt = dealer in state.u2 and dealer != silo
        check(dealt, silo, Code.COMPLAINT, f"complains of {dealer[:64]!r}, who dealt nothing to it")
        (portion,) = (portion for portion in state.portions[dealer] if portion.holder == silo)
        complaint.check(state.ctx, state.h_u2, state.bundles[dealer], portion, state.signers)
    except RefusedError as error:
        state, more = _close_if_complete(replace(state, failed={**state.failed, silo: error.code}))
        return state, (Refuse(silo, Code.COMPLAINT, error.why), *more)
    complaints, failed = (
        {**state.complaints, silo: complaint},
        {**state.failed, dealer: Code.MISDEALT.value},
    )
    why = f"{dealer!r} sealed to {silo!r} what does not open or fit, as {silo!r} showed"
    proofs = {**state.proofs, dealer: _misdealing(state, dealer, Unopened(silo, complaint.key))}
    return _end(
        replace(state, complaints=complaints, failed=failed, proofs=proofs),
        Code.MISDEALT,
        dealer,
        why,
    )


def _misdealing(state: CoordinatorState, dealer: str, fault: Fault) -> Misdealing:
    """What proves to anyone that a dealer broke the rules."""
    return Misdealing(
        state.spec.payload(),
        state.bundles[dealer],
        state.dealings[dealer],
        state.portions[dealer],
        fault,
    )


def _answered(state: CoordinatorState, stage: Stage) -> Mapping[str, object]:
    """Whose message of a stage was taken."""
    by_stage: dict[Stage, Mapping[str, object]] = {
        "keys": state.bundles,
        "shares": state.dealings,
        "masked": state.headers,
        "survivors": state.survivals,
        "reveal": state.reveals,
    }
    return by_stage.get(stage, {})


def _expected(state: CoordinatorState) -> tuple[str, ...] | None:
    """All whom a stage waits for; None where t of them are enough."""
    return {"keys": state.spec.cohort, "shares": state.u1, "masked": state.u2}.get(state.stage)


def _close_if_complete(state: CoordinatorState) -> Step:
    """Close a stage once nobody is awaited; the last two once t have answered, or too few are left.

    What t revealed may not join; then the others are awaited, too.
    """
    expected, answered = _expected(state), _answered(state, state.stage)
    if expected is not None:
        open_ = [silo for silo in expected if silo not in answered and silo not in state.failed]
        return (state, ()) if open_ else _close(state)
    if state.stage in ("survivors", "reveal"):
        possible = [silo for silo in state.u3 if silo in answered or silo not in state.failed]
        if len(answered) >= state.spec.threshold and state.stage == "reveal":
            return _open(state, awaited=len(answered) < len(possible))
        done = len(answered) >= state.spec.threshold or len(possible) < state.spec.threshold
        return _close(state) if done else (state, ())
    return state, ()


def hopeless(state: CoordinatorState) -> bool:
    """Whether too few can answer in this stage, so that it need not wait for others:
    ``AttemptDeadline`` ends it.
    """
    expected = _expected(state)
    if expected is None:
        return False
    answered = _answered(state, state.stage)
    members, least = _counting(
        state, [silo for silo in expected if silo in answered or silo not in state.failed]
    )
    return len(members) < least


def _counting(state: CoordinatorState, silos: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Those of ``silos`` with whom the stage can close, whose batch is whole, and how many it takes
    at the least.
    """
    members, least = tuple(silos), state.spec.threshold
    if state.stage in ("keys", "shares"):  # who is lost after its upload stays in the sum
        members = tuple(silo for silo in members if silo not in state.failed)
        least = max(least, state.spec.min_cohort, state.terms.min_cohort)
    if state.stage in ("keys", "shares", "masked"):
        members = state.terms.whole(state.spec, members)
    return members, least


def _close(state: CoordinatorState) -> Step:
    """Close a stage with those who answered and whose batch is whole.

    End the attempt if they are too few.
    """
    answered = _answered(state, state.stage)
    members, least = _counting(state, [silo for silo in state.spec.cohort if silo in answered])
    if len(members) < least:
        whole = " in whole batches" if state.terms.batches else ""
        why = f"stage {state.stage!r} closed with {len(members)} silos{whole}, fewer than {least}"
        return _end(state, Code.TOO_FEW, "", why)
    match state.stage:
        case "keys":
            return _close_keys(state, members)
        case "shares":
            return _close_shares(state, members)
        case "masked":
            return _close_masked(state, members)
        case "survivors":
            return replace(state, stage="reveal"), (
                DeliverNotes(members, _enough(state)),
                StartTimer("reveal"),
            )
        case "reveal":
            return _open(state, awaited=False)
        case _:
            return state, ()


def _close_keys(state: CoordinatorState, members: tuple[str, ...]) -> Step:
    bundles = tuple(state.bundles[silo] for silo in members)
    h_u1 = set_digest(b"U1", state.ctx, [bundle.encoded(state.ctx) for bundle in bundles])
    given = {silo: deliver_keys(silo, state.keys[silo]) for silo in members}
    told = tuple(
        DeliverKeys(silo, bundles, tuple(given[other][silo] for other in members if other != silo))
        for silo in members
    )
    state = replace(state, stage="shares", u1=members, h_u1=h_u1)
    return _opened_stage(state, (*told, StartTimer("shares")))


def _close_shares(state: CoordinatorState, members: tuple[str, ...]) -> Step:
    encoded = [state.dealings[silo].encoded(state.ctx) for silo in members]
    h_u2 = set_digest(b"U2", state.ctx, encoded)
    portions = {silo: state.portions[silo] for silo in members}
    deliveries = [deliver(state.dealings[dealer], portions[dealer]) for dealer in members]
    told = tuple(
        DeliverShares(silo, tuple(each[state.u1.index(silo)] for each in deliveries))
        for silo in members
    )
    state = replace(state, stage="masked", told=True, u2=members, h_u2=h_u2, portions=portions)
    return _opened_stage(state, (*told, StartTimer("masked")))


def _close_masked(state: CoordinatorState, members: tuple[str, ...]) -> Step:
    try:
        check_survivors(state.spec, state.terms, members)
    except RefusedError as error:
        return _end(state, Code.TOO_FEW, "", error.why)
    headers = tuple(state.headers[silo] for silo in members)
    h_u3 = set_digest(b"U3", state.ctx, [header.encoded(state.ctx) for header in headers])
    state = replace(state, stage="survivors", u3=members, h_u3=h_u3)
    return _opened_stage(state, (DeliverSurvivors(members, headers), StartTimer("survivors")))


def _opened_stage(state: CoordinatorState, effects: tuple[Effect, ...]) -> Step:
    """A stage that is open now; who failed meanwhile may have closed it already."""
    state, more = _close_if_complete(state)
    return state, (*effects, *more)


def _enough(state: CoordinatorState) -> tuple[Survival, ...]:
    """The first t signatures, in order of the silos' ids."""
    return tuple(state.survivals[silo] for silo in sorted(state.survivals))[: state.spec.threshold]


def _open(state: CoordinatorState, awaited: bool) -> Step:
    """Join t shares of each member of U2.

    Where none of them join, wait while more reveals are ``awaited``, else end.

    Who dealt shares that do not join is named, and proven, whether the sum opens or not.

    Left on the sum are the survivors' masks to themselves, and those that they share with the lost.
    """
    spec, ctx = state.spec, state.ctx
    terms: list[Term] = []
    failed, proofs = dict(state.failed), dict(state.proofs)
    for dealer, kind in kinds_to_reveal(state.u2, state.u3).items():
        joined = _joined(state, dealer, kind)
        if joined.secret is None and awaited:
            return state, ()
        if joined.wrong:
            failed[dealer] = Code.MISDEALT.value
            proofs[dealer] = _misdealing(state, dealer, Unjoined(kind, joined.wrong))
        if joined.secret is None:
            state = replace(state, failed=failed, proofs=proofs, evidence=proofs[dealer])
            why = f"{dealer!r} dealt shares that do not join to what it committed to"
            return _end(state, Code.MISDEALT, dealer, why)
        if kind == SELF:
            terms.append(Term(self_key(joined.secret, ctx, dealer, spec.prg, state.h_u2)))
            continue
        for survivor in state.u3:
            shared = agree(joined.secret, state.bundles[survivor].mask, survivor)
            terms.append(
                pair_term(
                    survivor, dealer, pair_key(shared, ctx, survivor, dealer, spec.prg, state.h_u2)
                )
            )
    compared = _compared(state) if spec.compared else OpenedGram(np.empty(0, np.int64))
    if compared is None and awaited:
        return state, ()
    if compared is None:
        why = (
            "what survivors revealed of inner products does not fit together; too few revealed to"
            " say whose is wrong"
        )
        return _end(replace(state, failed=failed, proofs=proofs), Code.SUM, "", why)
    failed |= {spec.cohort[number - 1]: Code.REVEAL.value for number in compared.wrong}
    tags = _tags(state, terms)
    opening = Open(tuple(terms), state.u3, tags, compared.products.astype("<i8").tobytes())
    return replace(state, stage="opening", failed=failed, proofs=proofs, tags=tags), (opening,)


def _compared(state: CoordinatorState) -> OpenedGram | None:
    """Inner products of the survivors' vectors, of what was revealed.

    None where too much of it is wrong.
    """
    spec, found = state.spec, {}
    for silo, reveal in state.reveals.items():
        products = read_revealed(spec, silo, len(state.u3), reveal.products)
        if products is not None:
            found[spec.holder(silo)] = products
    return opened_gram(found, spec.colluders)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A dealer's secret, if t revealed shares join to it, and the first t that did not."""

    secret: bytes | None
    wrong: tuple[ShownShare, ...]


def _joined(state: CoordinatorState, dealer: str, kind: bytes) -> _Joined:
    """The secret that a dealer committed to, of t revealed shares that join to it."""
    shares = {
        holder: each.held
        for holder in state.reveals
        for each in state.reveals[holder].shares
        if each.dealer == dealer
    }
    wrong: tuple[ShownShare, ...] = ()
    for holders in islice(_subsets(sorted(shares), state.spec.threshold), MOST_SUBSETS):
        chosen = {holder: shares[holder] for holder in holders}
        secret = joins(state.spec, state.bundles[dealer], state.dealings[dealer], kind, chosen)
        if secret is not None:
            return _Joined(secret, wrong)
        wrong = wrong or tuple(ShownShare(holder, held) for holder, held in chosen.items())
    return _Joined(None, wrong)


def _subsets(holders: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """First those that stand side by side, around the end: of more than ``size`` holders each is
    left out of one.
    """
    around = [*holders, *holders]
    windows = dict.fromkeys(tuple(sorted(around[at : at + size])) for at in range(len(holders)))
    return chain(windows, combinations(holders, size))


def _tags(state: CoordinatorState, terms: Sequence[Term]) -> bytes:
    """The survivors' tags together, which go down with the result.

    ``terms`` are the masks that are still on.
    """
    if not state.spec.tagged:
        return b""
    tags = {silo: state.headers[silo].tags for silo in state.u3}
    return combine(tags, len(state.spec.groups), terms=terms)


def _abandoned(state: CoordinatorState, note: Abandon) -> Step:
    """Keep the note; its signer drops out of an attempt that still goes on."""
    state = replace(state, notes={**state.notes, note.silo: note})
    return (
        (state, ())
        if state.stage in ("done", "ended")
        else advance(state, SiloDropped(note.silo, Code.ABANDON))
    )


def _end(state: CoordinatorState, code: Code, blame: str, why: str) -> Step:
    signed = state.evidence is not None or state.spoiled
    asked: tuple[Effect, ...] = (AskAbandon(state.u1),) if state.told and not signed else ()
    discarded = tuple(Discard(silo) for silo in state.headers)
    return replace(state, stage="ended"), (*discarded, EndAttempt(code, blame, why), *asked)

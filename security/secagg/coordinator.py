"""The coordinator of a secure sum as a pure state machine.

``advance(state, event) -> (state, effects)`` passes messages on, closes each stage once all have
answered or time is up, and computes which masks are left on the sum. No tensor, file or clock here;
the shell spools and folds the uploads.

::

    stage      leaves when                                             goes to
    keys       all of the cohort sent keys or failed, or the deadline  shares, if U1 is large enough
    shares     all of U1 dealt or failed, or the deadline              masked, if U2 is
    masked     all of U2 uploaded or failed, or the deadline           survivors, if U3 is
    masked     a complaint about a dealer holds (evidence.py)          ended, and the dealer named
    survivors  t survivors signed                                      reveal
    reveal     t survivors revealed shares that join                   opening
    opening    the sum is open                                         done
    any        too few are left, the deadline of the last two, or
               what was opened decodes to no valid values              ended

A message that does not hold is refused, and its sender drops out; a late or second one is refused
and changes nothing. Once U2 has been sent, masked bytes may be on their way. An attempt that
ends after that asks for abandon notes, and another may follow when ``notes_missing`` is 0.

A share that is not on its dealer's polynomial still fits its commitment. Where the first t shares
do not join to what the dealer committed to, the coordinator waits for the other survivors' and
tries other sets of t: one wrong share ends no sum while t + 1 survivors reveal. Either way the
dealer is named, for any t shares of an honest one join. Where no set that was tried joins, the
first is evidence (evidence.py), with which silos repeat the sum over the same survivors without
the dealer.

Shares of inner products (gram_pieces.py) are opened with the sum. Where they lie on no polynomial,
other survivors' are awaited, too. Who revealed a wrong one is named where enough reveal; otherwise
the attempt ends.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, islice
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np

from ...errors import RefusedError
from ..arithmetic.masks import Term, pair_term
from ..faults import Code, check
from ..identity.domains import SECAGG_SPEC
from ..identity.pairwise_keys import agree_with_each, pair_key, self_key
from ..identity.selection import all_but, among, without
from ..identity.signers import Sign, Signers
from . import silo_events as s
from .coordinator_events import (
    Ask,
    AttemptDeadline,
    Discard,
    Effect,
    EndAttempt,
    Event,
    Open,
    OpenFailed,
    Refuse,
    SiloDropped,
    StartTimer,
    SumPublished,
    Tell,
    WordsUploaded,
)
from .dealing import (
    SELF,
    Dealing,
    HeldShare,
    KeyBundle,
    Portion,
    check_portions,
    deliver,
    distinct_keys,
)
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
# A stage for all closes once all its members have answered, or at its deadline; one for t of them
# once t have.
FOR_ALL: tuple[Stage, ...] = ("keys", "shares", "masked")
FOR_THRESHOLD: tuple[Stage, ...] = ("survivors", "reveal")
WATCHED = FOR_ALL + FOR_THRESHOLD  # a deadline closes them


@dataclass(frozen=True)
class CoordinatorState:
    """Where an attempt stands; each mapping is by silo."""

    spec: RoundSpec
    ctx: bytes
    signers: Signers
    terms: Terms
    stage: Stage = "keys"
    u2_sent: bool = False  # to all of U1: masked bytes may have left silos
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
    # the one of them for which nothing could be opened, though survivors signed
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
        return len(self.u1) - self.spec.threshold + self.spec.colluders + 1 if self.u2_sent else 0

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
    return state, (
        Ask(without(spec.cohort, out), spec.signed_bytes(), sign(SECAGG_SPEC, spec.signed_bytes())),
        StartTimer("keys"),
    )


def advance(state: CoordinatorState, event: Event) -> Step:
    """The next state and what has to be done.

    It never raises RefusedError: a message that does not hold gives ``Refuse``. An event that
    does not fit the stage changes nothing.
    """
    spec = state.spec
    match event:
        case s.SendKeys(bundle, keys):
            take = partial(_take_keys, state, bundle, keys)
            return _receive(state, "keys", bundle.silo, spec.cohort, take)
        case s.SendShares(dealing, portions):
            take = partial(_take_shares, state, dealing, portions)
            return _receive(state, "shares", dealing.dealer, state.u1, take)
        case s.SendComplaint(complaint):
            return _complained(state, complaint)
        case WordsUploaded(header, length, sha256):
            take = partial(_take_words, state, header, length, sha256)
            return _receive(state, "masked", header.silo, state.u2, take)
        case s.SendSurvival(survival):
            take = partial(_take_survival, state, survival)
            return _receive(state, "survivors", survival.silo, state.u3, take)
        case s.SendReveal(reveal):
            take = partial(_take_reveal, state, reveal)
            return _receive(state, "reveal", reveal.silo, tuple(state.survivals), take)
        case s.SendAbandon(note):
            return _abandoned(state, note)
        # The first reason for which a silo failed stands: a timeout must not hide its fault.
        case SiloDropped(silo, code) if silo in spec.cohort and silo not in state.failed:
            return _close_if_complete(_without(state, silo, code))
        # A timer may fire after its stage was closed; it must not close the next one.
        case AttemptDeadline(stage) if stage == state.stage and stage in WATCHED:
            return _close(state)
        case SumPublished(sha256) if state.stage == "opening":
            result = Tell(state.u3, s.ResultReceived(sha256, state.tags))
            return replace(state, stage="done"), (result,)
        case OpenFailed(why, spoiled) if state.stage == "opening":
            return _end(replace(state, spoiled=spoiled), Code.SUM, "", why)
        case _:
            return state, ()


def _receive(
    state: CoordinatorState,
    stage: Stage,
    silo: str,
    expected: Sequence[str],
    take: Callable[[], Step],
) -> Step:
    """Take a message in, or refuse it; ``take`` raises RefusedError for one that does not hold."""
    # A signature that comes late is still welcome: its silo may reveal in another's place.
    late_survival = stage == "survivors" and state.stage == "reveal"
    if stage != state.stage and not late_survival:
        why = f"sent a message of stage {stage!r} in stage {state.stage!r}"
        return state, (Refuse(silo, Code.ORDER, why),)

    # A second message could differ from the first, which others may have seen already.
    gone = {*state.failed, *_answered(state, stage)}
    if silo not in expected or silo in gone:
        why = f"is not awaited in stage {stage!r}, or has answered"
        return state, (Refuse(silo, Code.ORDER, why),)

    try:
        taken, effects = take()
    except RefusedError as error:
        state, more = advance(state, SiloDropped(silo, error.code))
        return state, (Refuse(silo, Code(error.code), error.why), *more)
    # The answer that was awaited last closes its stage.
    taken, more = _close_if_complete(taken)
    return taken, (*effects, *more)


def _take_keys(state: CoordinatorState, bundle: KeyBundle, keys: tuple[ReceivingKey, ...]) -> Step:
    bundle.check(state.ctx, state.signers)
    check_keys(bundle.silo, bundle.receiving, keys, state.spec.cohort)

    # A key that comes twice was not drawn afresh by one of the two.
    twin = distinct_keys([*state.bundles.values(), bundle])
    check(twin is None, bundle.silo, Code.KEYS, "gave a key that is in use already")
    bundles = {**state.bundles, bundle.silo: bundle}
    return replace(state, bundles=bundles, keys={**state.keys, bundle.silo: keys}), ()


def _take_shares(state: CoordinatorState, dealing: Dealing, portions: tuple[Portion, ...]) -> Step:
    dealing.check(state.ctx, state.h_u1, state.signers)
    check_portions(dealing, portions, state.u1)
    _check_sealed(state, dealing.dealer, portions)
    dealings = {**state.dealings, dealing.dealer: dealing}
    portions_by_dealer = {**state.portions, dealing.dealer: portions}
    return replace(state, dealings=dealings, portions=portions_by_dealer), ()


def _take_words(state: CoordinatorState, header: Header, length: int, sha256: bytes) -> Step:
    header.check(state.ctx, state.h_u2, state.spec, state.signers)

    # The digest is that of the bytes on our disk: the survivors sign headers, not uploads.
    same = (length, sha256) == (header.length, header.sha256)
    why = "its upload is not the one whose digest it signed"
    check(same, header.silo, Code.UPLOAD, why)
    return replace(state, headers={**state.headers, header.silo: header}), ()


def _take_survival(state: CoordinatorState, survival: Survival) -> Step:
    sets = Sets(state.h_u1, state.h_u2, state.h_u3)
    survival.check(state.ctx, sets, state.signers)
    state = replace(state, survivals={**state.survivals, survival.silo: survival})
    if state.stage != "reveal":
        return state, ()
    return state, (Tell((survival.silo,), s.NotesReceived(_enough(state))),)


def _take_reveal(state: CoordinatorState, reveal: Reveal) -> Step:
    # Which kind is due follows from the sets that survivors signed, never from what a silo sends.
    # Each dealing has one portion per member of U1, in its order.
    number = state.u1.index(reveal.silo)
    portions_of = {dealer: portions[number] for dealer, portions in state.portions.items()}
    kinds = kinds_to_reveal(state.u2, state.u3)
    reveal.check(state.ctx, state.h_u3, kinds, portions_of, state.signers)
    # Only to refuse what is no product of these survivors now, while its sender can be named.
    read_revealed(state.spec, reveal.silo, len(state.u3), reveal.products)
    return replace(state, reveals={**state.reveals, reveal.silo: reveal}), ()


def _check_sealed(state: CoordinatorState, dealer: str, portions: Sequence[Portion]) -> None:
    """RefusedError unless a dealer says that it sealed to the keys that were delivered to it."""
    # Silos check the same: found here, the dealer is named, and no silo blames the coordinator.
    place = state.spec.cohort.index(dealer)
    for portion in portions:
        holder = portion.holder
        if holder == dealer:
            continue
        # A holder sent a key for each of the cohort but itself, in the cohort's order.
        key = state.keys[holder][place - (holder < dealer)]
        why = f"says that it sealed to {holder!r} under a key which that silo never gave"
        check(portion.key == key.public, dealer, Code.SHARES, why)


def _complained(state: CoordinatorState, complaint: Complaint) -> Step:
    """End the attempt by evidence against a dealer, or drop out who complains without any.

    A silo that was lost meanwhile is heard; one that has uploaded had opened all that was dealt to
    it.
    """
    silo, dealer = complaint.silo, complaint.dealer
    if state.stage != "masked" or silo not in state.u2 or silo in state.headers:
        why = f"complains in stage {state.stage!r}, or after its upload"
        return state, (Refuse(silo, Code.ORDER, why),)

    # A complaint that nothing shows could end every attempt, so it costs its sender the sum.
    try:
        _check_complaint(state, complaint)
    except RefusedError as error:
        state, more = _close_if_complete(_without(state, silo, error.code))
        return state, (Refuse(silo, Code.COMPLAINT, error.why), *more)

    # No survivors were signed, so no sum is opened, and the next attempt can leave the dealer out.
    state = _blamed(state, dealer, Unopened(silo, complaint.key))
    state = replace(state, complaints={**state.complaints, silo: complaint})
    why = f"{dealer!r} sealed to {silo!r} what does not open or fit, as {silo!r} showed"
    return _end(state, Code.MISDEALT, dealer, why)


def _check_complaint(state: CoordinatorState, complaint: Complaint) -> None:
    silo, dealer = complaint.silo, complaint.dealer
    dealt = dealer in state.u2 and dealer != silo
    why = f"complains of {dealer[:64]!r}, who dealt nothing to it"
    check(dealt, silo, Code.COMPLAINT, why)
    (portion,) = (portion for portion in state.portions[dealer] if portion.holder == silo)
    complaint.check(state.ctx, state.h_u2, state.bundles[dealer], portion, state.signers)


def _without(state: CoordinatorState, silo: str, code: str) -> CoordinatorState:
    return replace(state, failed={**state.failed, silo: code})


def _blamed(state: CoordinatorState, dealer: str, fault: Fault) -> CoordinatorState:
    """Without a dealer that broke the rules, and with what proves it to anyone."""
    # What the dealer signed itself proves it, so silos need not take the coordinator's word.
    proof = Misdealing(
        state.spec.signed_bytes(),
        state.bundles[dealer],
        state.dealings[dealer],
        state.portions[dealer],
        fault,
    )
    state = _without(state, dealer, Code.MISDEALT.value)
    return replace(state, proofs={**state.proofs, dealer: proof})


def _answered(state: CoordinatorState, stage: Stage) -> Mapping[str, object]:
    """The messages of a stage that were taken in, by silo."""
    by_stage: dict[Stage, Mapping[str, object]] = {
        "keys": state.bundles,
        "shares": state.dealings,
        "masked": state.headers,
        "survivors": state.survivals,
        "reveal": state.reveals,
    }
    return by_stage.get(stage, {})


def _possible(state: CoordinatorState) -> tuple[str, ...]:
    """Members of this stage that answered, or that still may."""
    by_stage: dict[Stage, tuple[str, ...]] = {
        "keys": state.spec.cohort,
        "shares": state.u1,
        "masked": state.u2,
        "survivors": state.u3,
        "reveal": state.u3,
    }
    lost = state.failed.keys() - _answered(state, state.stage).keys()
    return without(by_stage[state.stage], lost)


def _close_if_complete(state: CoordinatorState) -> Step:
    """Close a stage once nobody is awaited; the last two once t have answered, or too few are left.

    What t revealed may not join; then the others are awaited, too.
    """
    if state.stage not in WATCHED:
        return state, ()
    answered, possible = len(_answered(state, state.stage)), len(_possible(state))
    if state.stage in FOR_ALL:
        # Whoever failed meanwhile is not waited for.
        complete = _answered(state, state.stage).keys() >= set(_possible(state))
        return _close(state) if complete else (state, ())

    threshold = state.spec.threshold
    if state.stage == "reveal" and answered >= threshold:
        return _open(state, awaited=answered < possible)
    if answered >= threshold or possible < threshold:
        return _close(state)
    return state, ()


def hopeless(state: CoordinatorState) -> bool:
    """True if too few can answer in this stage for it to wait: ``AttemptDeadline`` ends it.

    The shell may then end the stage at once, instead of waiting until its time is over.
    """
    if state.stage not in FOR_ALL:
        return False
    members, least = _counting(state, _possible(state))
    return len(members) < least


def _counting(state: CoordinatorState, silos: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Those of ``silos`` with whom the stage can close, and how many it takes.

    Only silos whose batch is whole count.
    """
    members, least = tuple(silos), state.spec.threshold
    if state.stage in ("keys", "shares"):  # a silo that is lost after its upload stays in the sum
        members = without(members, state.failed)
        least = max(least, state.spec.min_cohort, state.terms.min_cohort)
    if state.stage in FOR_ALL:
        members = state.terms.whole(state.spec, members)
    return members, least


def _close(state: CoordinatorState) -> Step:
    """Close a stage with those who answered and whose batch is whole.

    End the attempt if they are too few.
    """
    # In the cohort's order, so that all sets and their digests have one form.
    answered = _answered(state, state.stage)
    members, least = _counting(state, among(state.spec.cohort, answered))
    if len(members) < least:
        whole = " in whole batches" if state.terms.batches else ""
        why = f"stage {state.stage!r} closed with {len(members)} silos{whole}, fewer than {least}"
        return _end(state, Code.TOO_FEW, "", why)
    closing: dict[Stage, Callable[[CoordinatorState, tuple[str, ...]], Step]] = {
        "keys": _close_keys,
        "shares": _close_shares,
        "masked": _close_masked,
        "survivors": _close_survivors,
        "reveal": _close_reveal,
    }
    return closing[state.stage](state, members)


def _close_keys(state: CoordinatorState, members: tuple[str, ...]) -> Step:
    bundles = tuple(state.bundles[silo] for silo in members)
    h_u1 = set_digest(b"U1", state.ctx, [bundle.encoded(state.ctx) for bundle in bundles])
    by_sender = {silo: deliver_keys(silo, state.keys[silo]) for silo in members}

    def delivery(silo: str) -> Tell:
        keys = tuple(by_sender[other][silo] for other in all_but(members, silo))
        return Tell((silo,), s.KeysReceived(bundles, keys))

    state = replace(state, stage="shares", u1=members, h_u1=h_u1)
    return _opened_stage(state, (*map(delivery, members), StartTimer("shares")))


def _close_shares(state: CoordinatorState, members: tuple[str, ...]) -> Step:
    encoded = [state.dealings[silo].encoded(state.ctx) for silo in members]
    h_u2 = set_digest(b"U2", state.ctx, encoded)
    # Survivors reveal shares of the members of U2 alone, so what others dealt is never checked
    # against again.
    portions = {silo: state.portions[silo] for silo in members}
    by_dealer = [deliver(state.dealings[dealer], portions[dealer]) for dealer in members]

    def delivery(silo: str) -> Tell:
        number = state.u1.index(silo)
        return Tell((silo,), s.SharesReceived(tuple(dealt[number] for dealt in by_dealer)))

    # From here on masked bytes may be on their way, so another attempt takes abandon notes.
    state = replace(state, stage="masked", u2_sent=True, u2=members, h_u2=h_u2, portions=portions)
    return _opened_stage(state, (*map(delivery, members), StartTimer("masked")))


def _close_masked(state: CoordinatorState, members: tuple[str, ...]) -> Step:
    # Silos check the same before they sign: ending here saves their signatures, which would lock
    # the round.
    try:
        check_survivors(state.spec, state.terms, members)
    except RefusedError as error:
        return _end(state, Code.TOO_FEW, "", error.why)
    headers = tuple(state.headers[silo] for silo in members)
    h_u3 = set_digest(b"U3", state.ctx, [header.encoded(state.ctx) for header in headers])
    state = replace(state, stage="survivors", u3=members, h_u3=h_u3)
    tell = Tell(members, s.SurvivorsReceived(headers))
    return _opened_stage(state, (tell, StartTimer("survivors")))


def _close_survivors(state: CoordinatorState, members: tuple[str, ...]) -> Step:
    notes = Tell(members, s.NotesReceived(_enough(state)))
    return replace(state, stage="reveal"), (notes, StartTimer("reveal"))


def _close_reveal(state: CoordinatorState, _: tuple[str, ...]) -> Step:
    return _open(state, awaited=False)


def _opened_stage(state: CoordinatorState, effects: tuple[Effect, ...]) -> Step:
    """A stage that is open now; silos that failed meanwhile may have closed it already."""
    state, more = _close_if_complete(state)
    return state, (*effects, *more)


def _enough(state: CoordinatorState) -> tuple[Survival, ...]:
    """The first t signatures, in order of the silos' ids."""
    return tuple(state.survivals[silo] for silo in sorted(state.survivals))[: state.spec.threshold]


def _open(state: CoordinatorState, awaited: bool) -> Step:
    """Join t shares of each member of U2, and open the sum with the masks that they give.

    Where none of them join, wait while more reveals are ``awaited``, otherwise end. A dealer of
    shares that do not join is named, and proven, whether the sum opens or not.
    """
    terms: list[Term] = []
    opened = state
    shown = _shown(state)
    for dealer, kind in kinds_to_reveal(state.u2, state.u3).items():
        joined = _joined(state, dealer, kind, shown[dealer])
        if joined.wrong:
            opened = _blamed(opened, dealer, Unjoined(kind, joined.wrong))
        if joined.secret is not None:
            terms += _masks_left(state, dealer, kind, joined.secret)
        elif awaited:
            return state, ()
        else:
            # Without its masks the sum stays closed, so silos may repeat it without this dealer.
            opened = replace(opened, evidence=opened.proofs[dealer])
            why = f"{dealer!r} dealt shares that do not join to what it committed to"
            return _end(opened, Code.MISDEALT, dealer, why)

    compared = _compared(state)
    if compared is None and awaited:
        return state, ()
    if compared is None:
        why = (
            "what survivors revealed of inner products does not fit together; too few revealed to"
            " say whose is wrong"
        )
        return _end(opened, Code.SUM, "", why)

    # The sum itself is whole, so a silo with a wrong share of inner products is dropped behind it.
    wrong = {state.spec.cohort[number - 1]: Code.REVEAL.value for number in compared.wrong}
    tags = _tags(state, terms)
    opening = Open(tuple(terms), state.u3, tags, compared.products.astype("<i8").tobytes())
    failed = {**opened.failed, **wrong}
    return replace(opened, stage="opening", failed=failed, tags=tags), (opening,)


def _masks_left(state: CoordinatorState, dealer: str, kind: bytes, secret: bytes) -> list[Term]:
    """The masks that a member of U2 left on the sum.

    A survivor's is its mask to itself; a lost silo's are those that it shares with each survivor.
    """
    # Masks among survivors cancel in the sum, so only those with a lost silo are left.
    prg, ctx, h_u2 = state.spec.prg, state.ctx, state.h_u2
    if kind == SELF:
        return [Term(self_key(secret, ctx, dealer, prg, h_u2))]
    terms = []
    masks = {survivor: state.bundles[survivor].mask for survivor in state.u3}
    for survivor, shared in agree_with_each(secret, masks).items():
        key = pair_key(shared, ctx, survivor, dealer, prg, h_u2)
        terms.append(pair_term(survivor, dealer, key))
    return terms


def _compared(state: CoordinatorState) -> OpenedGram | None:
    """Inner products of the survivors' vectors, as revealed; none where none are compared.

    None where too many of the shares are wrong.
    """
    # Every reveal that came is used: more than 2d + 1 of them show which shares are wrong.
    spec, found = state.spec, {}
    if not spec.compared:
        return OpenedGram(np.empty(0, np.int64))
    for silo, reveal in state.reveals.items():
        products = read_revealed(spec, silo, len(state.u3), reveal.products)
        if products is not None:
            found[spec.holder(silo)] = products
    # Shares are numbered by the cohort, as they were dealt, not by who is left.
    return opened_gram(found, spec.colluders)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A dealer's secret, if t revealed shares join to it, and the first t that did not."""

    secret: bytes | None
    wrong: tuple[ShownShare, ...]


def _shown(state: CoordinatorState) -> dict[str, dict[str, HeldShare]]:
    """All shares that were revealed: by dealer, then by holder."""
    # Read once for all dealers: once for each would take the cube of the silos.
    shown: dict[str, dict[str, HeldShare]] = defaultdict(dict)
    for holder, reveal in state.reveals.items():
        for each in reveal.shares:
            shown[each.dealer][holder] = each.held
    return shown


def _joined(
    state: CoordinatorState, dealer: str, kind: bytes, shares: Mapping[str, HeldShare]
) -> _Joined:
    """The secret that a dealer committed to, of t of its revealed shares that join to it."""
    # Not all sets of t: among 100 silos they are more than any machine can try.
    wrong: tuple[ShownShare, ...] = ()
    for holders in islice(_subsets(sorted(shares), state.spec.threshold), MOST_SUBSETS):
        chosen = {holder: shares[holder] for holder in holders}
        secret = joins(state.spec, state.bundles[dealer], state.dealings[dealer], kind, chosen)
        if secret is not None:
            return _Joined(secret, wrong)
        wrong = wrong or tuple(ShownShare(holder, held) for holder, held in chosen.items())
    return _Joined(None, wrong)


def _subsets(holders: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Sets of ``size`` holders; those that stand side by side, around the end, come first.

    Each of more than ``size`` holders is left out of one of these.
    """
    around = [*holders, *holders]
    windows = dict.fromkeys(tuple(sorted(around[at : at + size])) for at in range(len(holders)))
    return chain(windows, combinations(holders, size))


def _tags(state: CoordinatorState, terms: Sequence[Term]) -> bytes:
    """The survivors' tags together, which go down with the result.

    ``terms`` are the masks that are still on them.
    """
    # Tags are under the masks of the sum, so they come off with the very terms that open it.
    if not state.spec.tagged:
        return b""
    tags = {silo: state.headers[silo].tags for silo in state.u3}
    return combine(tags, len(state.spec.groups), terms=terms)


def _abandoned(state: CoordinatorState, note: Abandon) -> Step:
    """Keep a note that holds; its signer drops out of an attempt that is still running."""
    # Only members of U1 can sign survivors, so nobody else's word rules that out.
    if note.silo not in state.u1 or not note.holds(state.ctx, state.signers):
        return state, ()
    state = replace(state, notes={**state.notes, note.silo: note})
    if state.stage in ("done", "ended"):
        return state, ()
    return advance(state, SiloDropped(note.silo, Code.ABANDON))


def _end(state: CoordinatorState, code: Code, blame: str, why: str) -> Step:
    # Once survivors signed, no silo abandons this attempt.
    signed = state.evidence is not None or state.spoiled
    effects: list[Effect] = [Discard(silo) for silo in state.headers]
    effects.append(EndAttempt(code, blame, why))
    if state.u2_sent and not signed:
        effects.append(Tell(state.u1, s.AbandonAsked()))
    return replace(state, stage="ended"), tuple(effects)

"""A silo in a secure sum as a pure state machine: ``advance(state, event) -> (state, effects)``.

No socket, clock, file or tensor here. The shell runs the effects in order (a memory is durable
before what follows it leaves) and reports what came of them.

::

    stage      event                       next       effects
    -          begin(...)                  keys       Remember, SendKeys
    keys       KeysReceived(U1)            shares     SendShares
    shares     SharesReceived(U2)          uploading  Remember, UploadWords(terms)
    shares     the same, not all opens     ended      SendComplaint, LeaveAttempt: the dealer is to
                                                      blame
    uploading  Streamed(length, sha256)    uploaded   SendHeader
    uploaded   Streamed, the same          uploaded   SendHeader: a lost connection was resumed
    uploaded   SurvivorsReceived(U3)       signed     Remember, SendSurvival
    signed     NotesReceived(≥ t of U3)    revealed   SendReveal
    signed, revealed  ResultReceived       done       Finish
    up to uploaded    AbandonAsked         ended      Remember, SendAbandon, LeaveAttempt
    any        a check fails, or           ended      LeaveAttempt(code, blame, why)
               AttemptStopped

Where the round compares vectors by shares (gram_pieces.py), ``UploadWords`` brings the keys to deal
them under, ``SurvivorsReceived`` what the other survivors dealt to us, and ``SendReveal`` has our
shares of their inner products.

The same message again changes nothing; a message that comes too early, or differs from the first,
ends the attempt. An ended attempt reveals nothing; while its survivors are not signed, it can still
be abandoned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ...errors import RefusedError
from ..arithmetic.masks import Term, pair_term
from ..arithmetic.shamir import Draw
from ..faults import COORDINATOR, Code, check, passed_on
from ..identity.pairwise_keys import (
    KEY_BYTES,
    agree,
    agree_with_each,
    pair_key,
    public_key,
    self_key,
)
from ..identity.selection import all_but, without
from ..identity.signers import Sign, Signers
from .dealing import (
    Dealing,
    HeldShares,
    KeyBundle,
    PortionDelivery,
    Seeds,
    check_delivery,
    deal,
    distinct_keys,
    make_bundle,
    open_portion,
)
from .evidence import Misdealing, make_complaint
from .gram_pieces import GramKeys, SealedShare, check_dealers, open_share, revealed, share_key
from .memory import Memory
from .messages import (
    Abandon,
    Header,
    Sets,
    Survival,
    SurvivorsShown,
    kinds_to_reveal,
    make_abandon,
    make_header,
    make_reveal,
    make_survival,
    set_digest,
)
from .receiving_keys import (
    KeyDelivery,
    check_key_delivery,
    key_root,
    receiving_keys,
    receiving_seed,
)
from .shared_gram import GramShare, loaded
from .silo_events import (
    AbandonAsked,
    AttemptStopped,
    Effect,
    Event,
    Finish,
    KeysReceived,
    LeaveAttempt,
    NotesReceived,
    Remember,
    ResultReceived,
    SendAbandon,
    SendComplaint,
    SendHeader,
    SendKeys,
    SendReveal,
    SendShares,
    SendSurvival,
    SharesReceived,
    Streamed,
    SurvivorsReceived,
    UploadWords,
)
from .spec import Frame, RoundSpec, Terms, check_survivors, listed, receive

Stage: TypeAlias = Literal[
    "keys", "shares", "uploading", "uploaded", "signed", "revealed", "done", "ended"
]


@dataclass(frozen=True)
class Participant:
    """A silo with its policy, its protocol key and its randomness (``os.urandom``).

    ``signers`` are the coordinator and the silos of the job. A participant is the same in all
    attempts; ``SiloAttempt`` and ``Memory`` hold what changes.
    """

    silo: str
    signers: Signers
    terms: Terms
    sign: Sign = field(repr=False)
    draw: Draw = field(repr=False)
    # all who may have signed notes on earlier rounds; None: ``signers``
    others: Signers | None = None


@dataclass(frozen=True)
class SiloAttempt:
    """Where a silo stands in one attempt; printing it shows no secret."""

    stage: Stage
    participant: Participant
    spec: RoundSpec
    ctx: bytes
    memory: Memory
    seeds: Seeds | None  # None once they are not needed any more
    bundle: KeyBundle  # our own
    only: tuple[str, ...] = ()  # where a round is repeated: the survivors that it has to have
    bundles: tuple[KeyBundle, ...] = ()  # U1
    dealing: Dealing | None = None  # our own
    keys: tuple[KeyDelivery, ...] = ()  # to which we seal, of the others of U1
    held: Mapping[str, HeldShares] = field(default_factory=dict)  # dealer -> its shares for us
    # survivor -> its share of compared vectors for us
    vectors: Mapping[str, GramShare] = field(default_factory=dict)
    dealings: tuple[Dealing, ...] = ()  # U2
    header: Header | None = None  # our own
    headers: tuple[Header, ...] = ()  # U3
    h_u1: bytes = b""
    h_u2: bytes = b""
    h_u3: bytes = b""

    @property
    def silo(self) -> str:
        """Our own id."""
        return self.participant.silo


Step: TypeAlias = tuple[SiloAttempt, tuple[Effect, ...]]


def begin(
    participant: Participant,
    frame: Frame,
    document: bytes,
    signature: bytes,
    memory: Memory,
    notes: Sequence[Abandon] = (),
    evidence: Misdealing | None = None,
    shown: Sequence[SurvivorsShown] = (),
) -> Step:
    """Enter an attempt; RefusedError says why this silo does not.

    After an error nothing is remembered or sent.
    """
    spec = receive(
        document, signature, frame, participant.terms, participant.signers, participant.silo
    )
    others = participant.others or participant.signers

    # An attempt that may still be opened without us must not be joined by another over the same
    # values: their difference could be ours.
    memory = memory.shown(shown, participant.silo, others)
    signed = memory.repeated(spec, evidence, others, participant.terms)
    only = without(signed, participant.terms.excused)
    memory = memory.entered(spec, notes, others, evidence, participant.terms)

    # Fresh secrets for each attempt: a mask that hides two uploads shows their difference.
    ctx = spec.context()
    seeds = Seeds(*(participant.draw(KEY_BYTES) for _ in range(6 if spec.compared else 5)))
    keys = receiving_keys(seeds.receiving, ctx, participant.silo, spec.cohort)
    bundle = make_bundle(
        ctx, participant.silo, seeds.seal, seeds.mask, key_root(keys), participant.sign
    )
    state = SiloAttempt("keys", participant, spec, ctx, memory, seeds, bundle, only)
    # Memory first: after a crash in between, the attempt counts as entered, so it is never entered
    # again with other secrets.
    return state, (Remember(memory), SendKeys(bundle, keys))


def advance(state: SiloAttempt, event: Event) -> Step:
    """The next state and what has to be done; whatever a check finds ends the attempt.

    It never raises RefusedError: ``LeaveAttempt`` has code and blame. The shell runs the effects in
    order, and reports a message that the coordinator refused as ``AttemptStopped``.
    """
    # Handled before the check of the stage, since an ended attempt can still be abandoned.
    if isinstance(event, AbandonAsked):
        return _abandon(state)
    if state.stage in ("done", "ended"):
        return state, ()
    try:
        return _advance(state, event)
    except RefusedError as error:
        return _end(state, Code(error.code), error.peer, error.why)


def _advance(state: SiloAttempt, event: Event) -> Step:
    match event:
        # A message that comes again is not answered afresh: new secrets for another version of it
        # would let the coordinator compare two masks of the same values.
        case KeysReceived(bundles, keys):
            if state.stage != "keys":
                return _again(state, state.bundles, bundles)
            return _deal(state, bundles, keys)
        case SharesReceived(deliveries) if state.stage == "shares":
            return _open_shares(state, deliveries)
        case SharesReceived(deliveries):
            return _again(state, state.dealings, tuple(delivery.dealing for delivery in deliveries))
        case Streamed():
            return _finish_upload(state, event)
        case SurvivorsReceived(headers, shares) if state.stage == "uploaded":
            return _sign_survivors(state, headers, shares)
        case SurvivorsReceived(headers):
            return _again(state, state.headers, headers)
        case NotesReceived(survivals) if state.stage == "signed":
            return _reveal(state, survivals)
        case NotesReceived() if state.stage == "revealed":
            return state, ()
        # t reveals open the sum, so the result may find other survivors still without notes.
        case ResultReceived(sha256, tags) if state.stage in ("signed", "revealed"):
            survivors = tuple(_silos(state.headers))
            return _without_secrets(state, "done"), (Finish(sha256, tags, survivors),)
        case AttemptStopped(why, code):
            return _end(state, code, "", why)
        case _:
            raise RefusedError(
                COORDINATOR, Code.ORDER, f"brings {type(event).__name__} in stage {state.stage!r}"
            )


def _again(state: SiloAttempt, first: tuple[object, ...], now: tuple[object, ...]) -> Step:
    # A message is delivered again after a lost connection; another one in its place is no such
    # repeat.
    check(
        bool(first),
        COORDINATOR,
        Code.ORDER,
        f"brings a message too early, in stage {state.stage!r}",
    )
    check(
        first == now,
        COORDINATOR,
        Code.EQUIVOCATION,
        "brings another message in the place of its first",
    )
    return state, ()


def _deal(
    state: SiloAttempt, bundles: tuple[KeyBundle, ...], keys: tuple[KeyDelivery, ...]
) -> Step:
    """U1 is known: split our secrets among it."""
    silo, spec, participant, seeds = state.silo, state.spec, state.participant, _seeds(state)
    members = _silos(bundles)
    # (1) U1 are members of the cohort, each once and in order.
    _check_members(members, spec.cohort, Code.KEYS)

    # (2) Each signed its keys, for this attempt: with keys of its own in their place, the
    # coordinator would open what is dealt and know the masks.
    with passed_on():
        for bundle in bundles:
            bundle.check(state.ctx, participant.signers)

    # (3) Ours are those that we sent.
    check(
        state.bundle in bundles,
        COORDINATOR,
        Code.KEYS,
        f"does not pass on the keys that {silo!r} gave",
    )

    # (4) No two keys are the same: each is drawn afresh, for one use.
    twin = distinct_keys(bundles)
    if twin is not None:
        why = f"passes on a key twice, the second time of {twin.silo!r}"
        raise RefusedError(COORDINATOR, Code.KEYS, why)

    # (5) Enough are left: a sum over few is nearly one silo's values (security rule 6).
    _check_size(state, members, "U1", Code.KEYS)

    # (6) Each other member gave us a key to seal to, and signed it.
    others = [bundle for bundle in bundles if bundle.silo != silo]
    check(
        _silos(keys) == _silos(others),
        COORDINATOR,
        Code.KEYS,
        f"brings {len(keys)} receiving keys, not one of each of {len(others)} others",
    )
    for bundle, delivery in zip(others, keys, strict=True):
        check_key_delivery(delivery, bundle.receiving, spec.cohort, silo)

    # Bundles are hashed with their signatures, so all who sign a later set saw the same keys.
    h_u1 = set_digest(b"U1", state.ctx, [bundle.encoded(state.ctx) for bundle in bundles])
    # Numbers of holders depend only on the cohort, so whoever has the specification can join
    # shares, and check evidence of shares that do not join.
    holders = {member: spec.holder(member) for member in members}
    with passed_on():  # a key of low order
        dealing, portions, kept = deal(
            state.ctx, h_u1, keys, silo, seeds, spec.threshold, holders, participant.sign
        )
    state = replace(
        state,
        stage="shares",
        bundles=bundles,
        h_u1=h_u1,
        keys=keys,
        dealing=dealing,
        held={silo: kept},
    )
    return state, (SendShares(dealing, portions),)


def _open_shares(state: SiloAttempt, deliveries: tuple[PortionDelivery, ...]) -> Step:
    """U2 is known: open what it dealt to us, and agree on masks with it."""
    silo, spec, ctx = state.silo, state.spec, state.ctx
    members = _silos(state.bundles)
    dealings = tuple(delivery.dealing for delivery in deliveries)
    dealers = _dealers(dealings)
    # (1) U2 are members of U1, each once and in order.
    _check_members(dealers, members, Code.SHARES)

    # (2) Each signed what it dealt, among the same U1.
    with passed_on():
        for dealing in dealings:
            dealing.check(ctx, state.h_u1, state.participant.signers)

    # (3) Ours is the one that we sent.
    check(
        state.dealing in dealings, COORDINATOR, Code.SHARES, f"does not pass on what {silo!r} dealt"
    )

    # (4) Enough are left.
    _check_size(state, dealers, "U2", Code.SHARES)

    # (5) All portions are those that their dealers signed for us.
    for delivery in deliveries:
        check_delivery(delivery, members, silo, _given_to(state, delivery.dealing.dealer))
    h_u2 = set_digest(b"U2", ctx, [dealing.encoded(ctx) for dealing in dealings])

    # (6) They open, and fit what their dealers committed to; else we show what was dealt to us.
    opened: dict[str, HeldShares] = {}
    others = [delivery for delivery in deliveries if delivery.dealing.dealer != silo]
    for delivery in others:
        try:
            opened[delivery.dealing.dealer] = _opened_portion(state, delivery)
        except RefusedError as error:
            return _complain(state, h_u2, delivery.dealing.dealer, error)

    # The shell makes this durable before the first masked byte leaves: after a restart we must know
    # which sums may still hold our values.
    memory = state.memory.uploading(spec, members)
    masks = _masks(state, h_u2, list(opened))
    held = {**state.held, **opened}
    state = replace(
        state, stage="uploading", dealings=dealings, h_u2=h_u2, held=held, memory=memory
    )
    return state, (Remember(memory), UploadWords(masks, _hiding(state)))


def _opened_portion(state: SiloAttempt, delivery: PortionDelivery) -> HeldShares:
    """RefusedError blames the dealer."""
    dealer = delivery.dealing.dealer
    (bundle,) = (bundle for bundle in state.bundles if bundle.silo == dealer)
    key = receiving_seed(_seeds(state).receiving, state.ctx, state.silo, dealer)
    return open_portion(delivery.portion, state.ctx, bundle, key)


def _complain(state: SiloAttempt, h_u2: bytes, dealer: str, error: RefusedError) -> Step:
    """End the attempt, and show the key that was for this dealer alone: it proves the fault."""
    # The key opens this one portion: whoever sees it learns no other dealer's share.
    key = receiving_seed(_seeds(state).receiving, state.ctx, state.silo, dealer)
    complaint = make_complaint(state.ctx, state.silo, h_u2, dealer, key, state.participant.sign)
    state, ended = _end(state, Code(error.code), error.peer, error.why)
    return state, (SendComplaint(complaint), *ended)


def _masks(state: SiloAttempt, h_u2: bytes, others: Sequence[str]) -> tuple[Term, ...]:
    """Our mask to ourselves, and those that we share with the others of U2."""
    # H(U2) is in every key: silos that were shown different sets have masks that do not cancel.
    silo, ctx, prg, seeds = state.silo, state.ctx, state.spec.prg, _seeds(state)
    terms = [Term(self_key(seeds.own, ctx, silo, prg, h_u2))]
    public = {bundle.silo: bundle.mask for bundle in state.bundles}
    agreed = agree_with_each(seeds.mask, {other: public[other] for other in others})
    for other, shared in agreed.items():
        terms.append(pair_term(silo, other, pair_key(shared, ctx, silo, other, prg, h_u2)))
    return tuple(terms)


def _given_to(state: SiloAttempt, dealer: str) -> bytes:
    """The receiving key that we gave for a dealer; empty for ourselves."""
    if dealer == state.silo:
        return b""
    return public_key(receiving_seed(_seeds(state).receiving, state.ctx, state.silo, dealer))


def _hiding(state: SiloAttempt) -> GramKeys | None:
    """The keys under which we deal our vectors to the others of U2.

    None where none are compared by shares.
    """
    if state.spec.compared is None:
        return None
    silo, seeds, ctx = state.silo, _seeds(state), state.ctx
    dealers = _dealers(state.dealings)
    others = [delivery for delivery in state.keys if delivery.silo in dealers]
    # The same X25519 result seals shares of masks, too: ``seal_key`` and ``share_key`` derive two
    # keys from it, by different labels.
    agreed = agree_with_each(seeds.seal, {each.silo: each.key.public for each in others})
    return GramKeys(
        seeds.comparing, {other: share_key(key, ctx, silo, other) for other, key in agreed.items()}
    )


def _finish_upload(state: SiloAttempt, streamed: Streamed) -> Step:
    """All chunks are made: sign what they were.

    Masks hide one upload, so a second one, of other words, ends the attempt.
    """
    early = state.stage in ("keys", "shares")
    check(not early, state.silo, Code.ORDER, f"streamed an upload in stage {state.stage!r}")
    header = make_header(
        state.ctx,
        state.silo,
        state.h_u2,
        streamed.length,
        streamed.sha256,
        streamed.tags,
        state.participant.sign,
    )
    header.check(state.ctx, state.h_u2, state.spec, state.participant.signers)

    # The difference of two uploads under one mask has no mask.
    if state.header is not None:
        check(
            header == state.header,
            state.silo,
            Code.UPLOAD,
            "streamed two different messages under one mask",
        )
        # In a later stage the header has arrived: we signed survivors only with it among them.
        return state, ((SendHeader(header),) if state.stage == "uploaded" else ())

    # We hold our own share of our vectors, as any other holder does.
    vectors = {}
    if state.spec.compared is not None:
        own = loaded(state.spec.compared, len(state.spec.cohort), streamed.kept)
        if own is None:
            raise RefusedError(
                state.silo,
                Code.UPLOAD,
                f"kept {len(streamed.kept)} bytes that are not a share of its own",
            )
        vectors[state.silo] = own
    return replace(state, stage="uploaded", header=header, vectors=vectors), (SendHeader(header),)


def _sign_survivors(
    state: SiloAttempt, headers: tuple[Header, ...], shares: tuple[SealedShare, ...]
) -> Step:
    """U3 is known: sign it, once."""
    spec, participant, ctx = state.spec, state.participant, state.ctx
    survivors = _silos(headers)
    # (1) U3 are members of U2, each once and in order.
    _check_members(survivors, _dealers(state.dealings), Code.SURVIVORS)

    # (2) Each signed its upload, masked for the same U2.
    with passed_on():
        for header in headers:
            header.check(ctx, state.h_u2, spec, participant.signers)

    # (3) Ours is the one that we sent.
    check(
        state.header in headers,
        COORDINATOR,
        Code.SURVIVORS,
        f"does not name the upload of {state.silo!r}",
    )

    # (4) The sum over them may be opened.
    check_survivors(spec, participant.terms, survivors)

    # (5) Where the round is repeated, they are those of before without the dealers at fault: sums
    # over other sets of silos would tell single ones.
    same = not state.only or survivors == list(state.only)
    check(
        same,
        COORDINATOR,
        Code.SURVIVORS,
        f"repeats a sum over {list(state.only)} with survivors {survivors}",
    )

    # (6) What they dealt to us of their vectors opens.
    vectors = {**state.vectors, **_opened_vectors(state, survivors, shares)}
    h_u3 = set_digest(b"U3", ctx, [header.encoded(ctx) for header in headers])

    # Remembered before it is sent: after a restart this silo must not sign another set.
    memory = state.memory.signed(spec, survivors)
    survival = make_survival(ctx, state.silo, Sets(state.h_u1, state.h_u2, h_u3), participant.sign)
    state = replace(
        state, stage="signed", headers=headers, h_u3=h_u3, memory=memory, vectors=vectors
    )
    return state, (Remember(memory), SendSurvival(survival))


def _opened_vectors(
    state: SiloAttempt, survivors: Sequence[str], shares: tuple[SealedShare, ...]
) -> Mapping[str, GramShare]:
    """The share that each other survivor dealt to us, where vectors are compared by shares."""
    # Shares of survivors alone: a lost silo drops out of the comparison as out of the sum.
    silo, spec, seeds = state.silo, state.spec, _seeds(state)
    check_dealers(shares, all_but(survivors, silo) if spec.compared else ())
    seals, found = {bundle.silo: bundle.seal for bundle in state.bundles}, {}
    for share in shares:
        dealer = share.dealer
        agreed = agree(
            receiving_seed(seeds.receiving, state.ctx, silo, dealer), seals[dealer], dealer
        )
        found[dealer] = open_share(
            spec, share_key(agreed, state.ctx, dealer, silo), dealer, silo, share.sealed
        )
    return found


def _reveal(state: SiloAttempt, survivals: tuple[Survival, ...]) -> Step:
    """Enough survivors signed the same sets: reveal one share of each member of U2.

    Which one follows from our own sets, so nobody gets both shares of one silo.
    """
    survivors, signed = _silos(state.headers), _silos(survivals)
    # (1) Survivors alone signed, each once.
    known = set(signed) <= set(survivors) and len(set(signed)) == len(signed)
    check(
        known,
        COORDINATOR,
        Code.NOTES,
        f"brings signatures of {signed}, which are not survivors, each once",
    )

    # (2) They are enough.
    enough = len(signed) >= state.spec.threshold
    check(
        enough,
        COORDINATOR,
        Code.NOTES,
        f"brings {len(signed)} signatures, not {state.spec.threshold}",
    )

    # (3) Each is over the sets that we signed: else the coordinator could have different survivors
    # reveal a silo's mask to itself and its masks with the others, which together bare its values.
    sets = Sets(state.h_u1, state.h_u2, state.h_u3)
    with passed_on():
        for survival in survivals:
            survival.check(state.ctx, sets, state.participant.signers)
    kinds = kinds_to_reveal(_dealers(state.dealings), survivors)
    products = revealed(state.spec, state.vectors) if state.spec.compared else b""
    reveal = make_reveal(
        state.ctx, state.silo, state.h_u3, kinds, state.held, state.participant.sign, products
    )
    return _without_secrets(state, "revealed"), (SendReveal(reveal),)


def _abandon(state: SiloAttempt) -> Step:
    """Abandon the attempt, unless survivors were signed."""
    # A signature and an abandon note together would let one attempt be opened, and the next begun
    # over the same values.
    if state.memory.is_signed(state.ctx):
        return state, ()
    memory = state.memory.given_up()
    note = make_abandon(state.ctx, state.silo, state.participant.sign)
    sent: tuple[Effect, ...] = (Remember(memory), SendAbandon(note))
    state = replace(state, memory=memory)
    if state.stage == "ended":
        return state, sent
    state, ended = _end(state, Code.STOPPED, "", "the attempt was abandoned")
    return state, (*sent, *ended)


def abandon_remembered(
    participant: Participant, memory: Memory, ctx: bytes
) -> tuple[Memory, Abandon]:
    """The abandon note of a silo that was restarted since.

    RefusedError unless it is for its newest attempt, and that is not signed.
    """
    # The memory says of its newest attempt alone whether it may still be abandoned.
    newest = memory.ctx == ctx.hex()
    check(
        newest,
        COORDINATOR,
        Code.ABANDON,
        "asks to abandon an attempt that is not the newest one of this silo",
    )
    open_ = not memory.is_signed(ctx)
    check(
        open_,
        COORDINATOR,
        Code.ABANDON,
        "asks to abandon an attempt whose survivors this silo has signed",
    )
    return memory.given_up(), make_abandon(ctx, participant.silo, participant.sign)


def _silos(named: Sequence[KeyBundle | KeyDelivery | Header | Survival]) -> list[str]:
    return [each.silo for each in named]


def _dealers(dealings: Sequence[Dealing]) -> list[str]:
    return [dealing.dealer for dealing in dealings]


def _check_members(members: Sequence[str], known: Sequence[str], code: Code) -> None:
    check(
        listed(members, known),
        COORDINATOR,
        code,
        f"names {list(members)}, which are not some of {list(known)}, each once, in order",
    )


def _check_size(state: SiloAttempt, members: Sequence[str], name: str, code: Code) -> None:
    spec, terms = state.spec, state.participant.terms
    # Sets only shrink from here, and fewer than t silos cannot open a sum.
    least = max(spec.threshold, spec.min_cohort, terms.min_cohort)
    check(
        len(members) >= least,
        COORDINATOR,
        code,
        f"{name} has {len(members)} members, fewer than {least}",
    )


def _seeds(state: SiloAttempt) -> Seeds:
    if state.seeds is None:
        raise RefusedError(state.silo, Code.ORDER, "has dropped the secrets of this attempt")
    return state.seeds


def _without_secrets(state: SiloAttempt, stage: Stage) -> SiloAttempt:
    """The state once no secret is needed any more.

    They are dropped, not overwritten: Python cannot.
    """
    return replace(state, stage=stage, seeds=None, held={}, vectors={})


def _end(state: SiloAttempt, code: Code, blame: str, why: str) -> Step:
    return _without_secrets(state, "ended"), (LeaveAttempt(code, blame, why),)

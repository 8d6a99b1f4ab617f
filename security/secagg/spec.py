"""The specification of one attempt at a secure sum: a document that the coordinator signs.

Everything else is bound to it.
Canonical JSON, here broken and cut; ``ctx = SHA-256(framed(CONTEXT, document))`` is in every key,
signature and hash::

    {"attempt":0,"chunk_bytes":1048576,"cohort":["a","b","c","d"],"colluders":1,"counts":[],"exchange":"sum",
     "federation":"lung","groups":[{"clip_exponent":3,"elements":62006,"name":"model",…}],"job":"j1","job_digest":"5c1f…",
     "key_epoch":0,"key_parts":"","members":"9f86…","min_cohort":3,"model_digest":"e3b0…","prg":2,
     "protocol":"staddle-secagg/1","purpose":"update","recipient":"coordinator","round":17,"schema_digest":"9a0b…",
     "tagged":false,"threshold":3}

A silo knows all of it but the cohort and the attempt (``Frame``), so it makes the document itself
and compares.

It cannot know the weights of some rows (``Frame.brought``), which follow from what the coordinator
alone has. It takes those from the document, once ``brought_fault`` finds nothing against them.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ...algorithms.exchange.concentration import concentration_fault, row_fault
from ...algorithms.exchange.parts import MIX_BITS, integer_weights, kept_share, own_weight
from ...algorithms.job.batches import Batches, unbroken
from ...errors import LocalError, RefusedError
from ...files.documents import Strict, canonical_json, parse_canonical
from ..arithmetic.fixedpoint import Group, scale_exponent
from ..arithmetic.masks import AES_256_GCM
from ..faults import COORDINATOR, Code, check
from ..identity.domains import SECAGG_CONTEXT, SECAGG_SPEC, framed
from ..identity.keys import Hex32, Id
from ..identity.selection import without
from ..identity.signers import Signers
from .shared_gram import Compared

MOST_SILOS = 1000
LONGEST_SHOWN = 400  # characters of a field in an error
# Fields of a frame that a document has in another form, or not at all.
NOT_IN_SPEC = ("groups", "counts", "rows", "brought")
CHUNK_STEP = 64  # bytes: any ring's words, and the four canaries of a last chunk

Count = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)]
KeyParts = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
"""Digest of all contributions to the key that silos share (``group_key.parts_of``), hex.

Empty where they share none.
"""


def listed(silos: Sequence[str], among: Collection[str]) -> bool:
    """True if these silos are some of ``among``, each once and in the order of their ids."""
    return list(silos) == sorted(set(silos)) and set(silos) <= set(among)


def context_of(document: bytes) -> bytes:
    """The ctx, 32 bytes, of an attempt at a secure sum, from its specification as it was signed."""
    return hashlib.sha256(framed(SECAGG_CONTEXT, document)).digest()


class RoundSpec(Strict):
    """One attempt; ``counts`` are those behind public weights, in the cohort's order.

    Digests are SHA-256, in hex. ``threshold`` is t: the number of survivors that must sign, and of
    shares that open a secret. A document does not parse if its cohort is not sorted or has a silo
    twice, if two groups have one name, or if the number of counts is wrong.
    """

    protocol: Literal["staddle-secagg/1"] = "staddle-secagg/1"
    federation: Id
    members: Hex32  # ``rosters.members_digest`` of the job's silos
    job: Id
    job_digest: Hex32
    round: Count
    attempt: Count
    exchange: Literal["sum"]
    purpose: Id
    recipient: Id  # "coordinator", who opens it; a group may have another reader
    key_epoch: Count
    key_parts: KeyParts
    cohort: Annotated[tuple[Id, ...], Field(min_length=2, max_length=MOST_SILOS)]
    threshold: Count
    min_cohort: Count
    colluders: Count
    counts: Annotated[tuple[Count, ...], Field(max_length=MOST_SILOS)]
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=4096)]
    model_digest: Hex32
    schema_digest: Hex32
    # Which stream masks are: security/arithmetic/masks.py. In all keys too, so that no two kinds
    # share one.
    prg: Literal[2]
    tagged: Annotated[bool, Field(strict=True)]  # uploads carry linear tags: linear_tags.py
    chunk_bytes: Annotated[
        int, Field(strict=True, ge=CHUNK_STEP, le=1 << 22, multiple_of=CHUNK_STEP)
    ]
    # What the round compares by shares; left out of the document where it compares nothing.
    compared: Compared | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        # One order and no silo twice: a silo's place is its number as a holder of shares, and two
        # shares of one holder open nothing.
        if list(self.cohort) != sorted(set(self.cohort)):
            raise ValueError(f"cohort {list(self.cohort)} is not sorted, or names a silo twice")

        # Rows are brought by name: of two groups of one name, one would go unchecked.
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"groups {names} do not have distinct names")
        self._check_counts()
        return self

    def _check_counts(self) -> None:
        public = [group for group in self.groups if group.weights == "public"]
        # Rows have counts of their own. The shared list is needed only if some group with public
        # weights has none.
        wanted = 0 if all(map(attrgetter("counts"), public)) else len(self.cohort)
        if len(self.counts) != wanted:
            raise ValueError(f"{len(self.counts)} counts for public weights, not {wanted}")
        lengths = {group.name: len(group.counts) for group in self.groups}
        wrong = [name for name, length in lengths.items() if length not in (0, len(self.cohort))]
        if wrong:
            raise ValueError(
                f"groups {', '.join(wrong)} have other numbers of counts than the cohort has silos"
            )

    def signed_bytes(self) -> bytes:
        """The bytes that the coordinator signs, behind the label.

        Canonical JSON. ``compared`` is absent if the round compares nothing by shares.
        """
        return canonical_json(self.model_dump(mode="json", exclude_none=True))

    def context(self) -> bytes:
        """``ctx``, 32 bytes."""
        return context_of(self.signed_bytes())

    def holder(self, silo: str) -> int:
        """A silo's number among the holders of shares, 1 and up."""
        return self.cohort.index(silo) + 1

    def counts_of(self, group: Group) -> tuple[int, ...]:
        """The counts behind the public weights of a group, in the cohort's order.

        A row has counts of its own; all other groups use those of the specification.
        """
        return group.counts or self.counts

    def share_of(self, silo: str, group: Group) -> float:
        """The public weight of a silo in a group, a share of 1; 0 where all counts are 0."""
        counts = self.counts_of(group)
        # A row that mixes nobody has only zeros; the divisor is then 1.
        return counts[self.cohort.index(silo)] / max(sum(counts), 1)


@dataclass(frozen=True)
class Frame:
    """A secure sum as both sides know it before its cohort and attempt.

    ``groups`` have no scale yet.
    """

    federation: str
    members: str
    job: str
    job_digest: str
    round: int
    exchange: Literal["sum"]
    purpose: str
    recipient: str
    model_digest: str  # of what this silo received for the round, computed by itself
    schema_digest: str
    groups: tuple[Group, ...]
    key_epoch: int = 0
    key_parts: str = ""  # digest of the contributions that this silo made the key of
    min_cohort: int = 3
    colluders: int = 1
    chunk_bytes: int = 1 << 20
    prg: int = AES_256_GCM
    tagged: bool = False
    counts: tuple[tuple[str, int], ...] = field(default=())  # declared, by silo
    # weights of a group for one silo, by group
    rows: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # those of ``rows`` that the coordinator weighs, for members of the cohort
    brought: frozenset[str] = frozenset()
    compared: Compared | None = None

    def instance(self) -> str:
        """Name of the sum across rounds and attempts, under which a silo keeps its memory."""
        return f"{self.job}/{self.exchange}/{self.purpose}/{self.recipient}"


@dataclass(frozen=True)
class Terms:
    """A silo's conditions on every secure sum; the defaults are those of security rule 6.

    The silos of each of ``batches`` are in a sum together or not at all; without batches, any silo
    may be missing. ``excused`` silos, which evidence shows to have broken the rules (evidence.py),
    may be missing from their batch.
    """

    min_cohort: int = 3
    min_honest: int = 2
    colluders: int = 1
    batches: Batches = ()
    excused: frozenset[str] = frozenset()

    def whole(self, spec: RoundSpec, silos: Iterable[str]) -> tuple[str, ...]:
        """Those of ``silos``, in their order, whose batch may be in a sum of this specification.

        A batch without its excused silos has at least as many as a job's batches have
        (``Job.least_batch``).
        """
        # At least two honest silos, whatever the policy says: colluders subtract their own values,
        # and would be left with those of a single one.
        least = max(spec.min_cohort, self.min_cohort, spec.colluders + max(2, self.min_honest))
        return unbroken(self.batches, silos, self.excused, least)

    def regroups(self, spec: RoundSpec) -> bool:
        """True if values of one round may be in several sums, each over whole batches.

        However many there are, these sums tell the sums of single batches and nothing beyond that
        (algorithms/job/batches.py); with one batch, all of them are the same sum. The values must
        be the same in each: a silo trains a round once, and uploads what its outbox has. A round
        with rows for one silo is summed once, for they are weighted unevenly within a batch. So is
        a round with comparisons: each is one more answer to whoever chose its own vector.
        """
        once = spec.compared is not None or any(map(attrgetter("counts"), spec.groups))
        return bool(self.batches) and not once


def threshold(silos: int) -> int:
    """The t of n, floor(2n/3) + 1.

    With fewer than n/3 colluders, no two different sets of survivors both find t signatures.
    """
    return 2 * silos // 3 + 1


def specify(frame: Frame, cohort: Sequence[str], attempt: int) -> RoundSpec:
    """The one specification of an attempt.

    LocalError if a ring is too small for the cohort or a count is missing.
    """
    # Sorted, since a silo's place in the cohort is its number as a holder of shares.
    members = tuple(sorted(cohort))
    plain = {f.name: getattr(frame, f.name) for f in fields(frame) if f.name not in NOT_IN_SPEC}
    return RoundSpec.model_validate(
        {
            **plain,
            "attempt": attempt,
            "cohort": members,
            "threshold": threshold(len(members)),
            "counts": _counts(frame, members),
            "groups": tuple(_scaled(frame, group, members) for group in frame.groups),
        }
    )


def _scaled(frame: Frame, group: Group, members: Sequence[str]) -> Group:
    """The group with what follows from its cohort: its scale, and its weights if it is a row."""
    # The scale depends on the size of the cohort (arithmetic/fixedpoint.py), so the frame does not
    # have it.
    exponent = scale_exponent(group.ring, len(members), group.clip_exponent, group.weights)
    follows = {"scale_exponent": exponent, **_row(frame, group, members)}
    return group.model_copy(update=follows)


def _counts(frame: Frame, members: Sequence[str]) -> tuple[int, ...]:
    """The declared counts of the cohort; none where no group is weighted by them."""
    # Rows have their weights from ``Frame.rows``. If every group with public weights is a row, the
    # declared counts are not used, and are left out of the document.
    public = {group.name for group in frame.groups if group.weights == "public"}
    if public <= frame.rows.keys():
        return ()
    declared = dict(frame.counts)
    missing = without(members, declared)
    if missing:
        raise LocalError(
            f"no declared count of {', '.join(missing)}; public weights need one of each silo"
        )

    # Silos that are not in the cohort count for nothing: shares sum to 1 over the cohort.
    return tuple(declared[silo] for silo in members)


def _row(frame: Frame, group: Group, members: Sequence[str]) -> dict[str, object]:
    """Integer weights of a group for one silo, 2^32 together; all 0 where it gets no row.

    It gets none where it would see too much of another silo. Next to the weights of a row that the
    coordinator brings stands what its reader keeps of its own. Only a member of the cohort gets
    such a row.
    """
    if group.name not in frame.rows:
        return {"counts": ()}
    none: dict[str, object] = {"counts": (0,) * len(members), "own_weight": 0}
    by_silo = frame.rows[group.name]
    weights = [by_silo.get(silo, 0.0) for silo in members]
    if group.reader in members:  # who adds its own part itself, so it is never sent
        weights[members.index(group.reader)] = 0.0

    brought = group.name in frame.brought
    if not any(weights) or (brought and group.reader not in members):
        return none

    # Zeros take the place of a row that would show its reader too much, so that the groups of a sum
    # follow from the job alone.
    own = own_weight(by_silo.get(group.reader, 0.0), weights) if brought else 0
    integers = integer_weights(weights)
    if own == 1 << MIX_BITS or row_fault(integers, frame.min_cohort):
        return none
    return {"counts": integers, "own_weight": own}


def kept(spec: RoundSpec, group: Group, survivors: Sequence[str]) -> float:
    """The share of its own vector that a row's reader keeps, mixed with these survivors' row.

    From 0 to 1. It is computed from integers, so it is the same on every machine. ``survivors``
    are some of the cohort.
    """
    # The weights of lost silos are missing, so the reader keeps more. Weights were signed before
    # anything was uploaded: the coordinator cannot change them once it knows who survived.
    others = sum(group.counts[spec.cohort.index(silo)] for silo in survivors)
    return kept_share(group.own_weight, others)


def receive(
    document: bytes, signature: bytes, frame: Frame, terms: Terms, signers: Signers, silo: str
) -> RoundSpec:
    """Check a specification as ``silo`` received it; the steps run in order.

    RefusedError says what is wrong.
    """
    spec = signed_spec(document, signature, signers)  # (1) to (3)

    # (4) We are one of its cohort.
    why = f"asks {silo!r} into a cohort that does not name it"
    check(silo in spec.cohort, COORDINATOR, Code.SPEC, why)

    # (5) The cohort is as large as our policy asks, for as many colluders as it asks.
    check_cohort(spec, terms)

    # (6) Its silos made their key of what we made ours of: a coordinator that passed on other
    # contributions to each silo would leave them with different keys.
    why = (
        f"specifies a sum under a key of other contributions than it brought to {silo!r}: silos"
        " have different keys"
    )
    check(spec.key_parts == frame.key_parts, COORDINATOR, Code.KEYS, why)

    # (7) Everything else is what we would have written.
    check_frame(spec, frame)
    return spec


def signed_spec(document: bytes, signature: bytes, signers: Signers) -> RoundSpec:
    """A specification that the coordinator signed, over silos of ``signers``.

    RefusedError for anything else.
    """
    # (1) It is a specification, in its one spelling.
    try:
        spec = parse_canonical(document, RoundSpec, "specification of a secure sum")
    except LocalError as error:
        raise RefusedError(COORDINATOR, Code.SPEC, str(error)) from None

    # (2) The coordinator signed it.
    signed = signers.by_coordinator(SECAGG_SPEC, spec.signed_bytes(), signature)
    why = "its signature does not fit the specification of the secure sum"
    check(signed, COORDINATOR, Code.SPEC, why)

    # (3) Its cohort are silos that we know.
    strangers = without(spec.cohort, signers.silos)
    why = f"the cohort names {', '.join(strangers)}, no silo of the roster"
    check(not strangers, COORDINATOR, Code.SPEC, why)
    return spec


def brought_fault(spec: RoundSpec, group: Group, min_cohort: int) -> str:
    """Why a row is not one that the coordinator may weigh as it likes; empty if it is.

    The steps run in order.
    """
    # (1) It has a weight for each silo of the cohort.
    if len(group.counts) != len(spec.cohort):
        return f"has {len(group.counts)} weights for a cohort of {len(spec.cohort)}"

    # (2) Nobody is mixed: there is no such row.
    if not any(group.counts):
        own = group.own_weight
        return f"mixes nobody and has {own} of its reader's own" if own else ""

    # (3) It is for a member of the cohort, (4) who mixes its own part in itself, and never sends
    # it.
    if group.reader not in spec.cohort:
        return f"is for {group.reader!r}, which is not in the cohort"
    own = group.counts[spec.cohort.index(group.reader)]
    if own:
        return f"mixes {own} of the reader's own part, which never leaves it"

    # (5) Its weights add up to one.
    total = sum(group.counts)
    if total != 1 << MIX_BITS:
        return f"has weights that add up to {total}, not 2^{MIX_BITS}"

    # (6) None outweighs the others, and they are enough (rules 4 and 5).
    leans = row_fault(group.counts, min_cohort)
    return f"shows its reader too much: {leans}" if leans else ""


def _with_brought(own: RoundSpec, spec: RoundSpec, frame: Frame) -> RoundSpec:
    """Our own specification, with the weights of rows from the coordinator's.

    RefusedError if those weights are out of bounds.
    """
    # The coordinator alone knows which silos are alike, so its weights cannot be compared with
    # ours; they are held to the bounds within which any row may lie.
    brought = {group.name: group for group in spec.groups if group.name in frame.brought}
    for group in brought.values():
        fault = brought_fault(spec, group, frame.min_cohort)
        check(not fault, COORDINATOR, Code.POLICY, f"brings a row {group.name!r} that {fault}")
    groups = []
    for group in own.groups:
        theirs = brought.get(group.name, group)
        weights = {"counts": theirs.counts, "own_weight": theirs.own_weight}
        groups.append(group.model_copy(update=weights))
    return own.model_copy(update={"groups": tuple(groups)})


def check_frame(spec: RoundSpec, frame: Frame) -> None:
    """RefusedError unless this silo would have written the same for this cohort and attempt.

    ``frame`` is made from the silo's own knowledge of the round. Only the cohort, the attempt and
    the weights of rows in ``Frame.brought`` are taken from the specification. ``check_cohort`` and
    ``brought_fault`` judge cohort and weights.
    """
    try:
        own = _with_brought(specify(frame, spec.cohort, spec.attempt), spec, frame)
    except LocalError as error:
        raise RefusedError(COORDINATOR, Code.SPEC, str(error)) from None

    # Field by field: the error names the one that differs, and a new field is compared as well.
    for name in RoundSpec.model_fields:
        theirs, ours = getattr(spec, name), getattr(own, name)
        why = f"specifies {name} {_shown(theirs)}, this silo expects {_shown(ours)}"
        check(theirs == ours, COORDINATOR, Code.SPEC, why)


def check_cohort(spec: RoundSpec, terms: Terms) -> None:
    """RefusedError unless a silo with these terms joins the announced cohort (rules 5 and 6).

    The code is POLICY, and the coordinator is to blame. The coordinator itself runs it, too, before
    it asks any silo.
    """
    n, c = len(spec.cohort), spec.colluders
    # (1) As many colluders are assumed as our policy assumes, and they are fewer than a third: only
    # then no two sets of survivors both find t signatures.
    _agree(c >= terms.colluders, f"has colluders = {c}, this silo's policy {terms.colluders}")
    why = f"a cohort of {n} does not withstand colluders = {c}: it takes more than {3 * c}"
    _agree(3 * c < n, why)

    # (2) The threshold is the one that follows from n: with a lower one two sets of survivors could
    # both be signed, and the difference of their sums shows a silo.
    why = f"threshold {spec.threshold} of {n} is not {threshold(n)}"
    _agree(spec.threshold == threshold(n), why)

    # (3) The cohort is no smaller than both minima: the job's is for all, the policy's is ours.
    minimum = max(spec.min_cohort, terms.min_cohort)
    _agree(n >= minimum, f"a cohort of {n} is smaller than min_cohort {minimum}")

    # (4) It has whole batches alone.
    fault = _broken(spec, terms, spec.cohort)
    _agree(not fault, f"the cohort {fault}")

    # (5) No silo outweighs the others: the sum would be nearly its values.
    fault = _weights_fault(spec, spec.cohort, minimum)
    _agree(not fault, f"public weights of the cohort: {fault}")


def check_survivors(spec: RoundSpec, terms: Terms, survivors: Sequence[str]) -> None:
    """RefusedError unless the sum over these members of the cohort may be opened (rules 5, 6).

    The code is SURVIVORS, and the coordinator is to blame. It runs at the coordinator before it
    asks for signatures, and at each silo before it signs.
    """
    least = max(spec.min_cohort, terms.min_cohort)
    # (1) They are enough to open the sum, and as many as both minima ask.
    m, minimum = len(survivors), max(least, spec.threshold)
    check(m >= minimum, COORDINATOR, Code.SURVIVORS, f"{m} survivors are fewer than {minimum}")

    # (2) Enough of them are honest: colluders subtract their own values from the sum.
    honest = m - spec.colluders
    why = f"of {m} survivors {honest} are sure to be honest, the policy asks for {terms.min_honest}"
    check(honest >= terms.min_honest, COORDINATOR, Code.SURVIVORS, why)

    # (3) They are whole batches alone: sums over other sets, round by round, tell single silos
    # (rule 37).
    fault = _broken(spec, terms, survivors)
    check(not fault, COORDINATOR, Code.SURVIVORS, f"the sum {fault}")

    # (4) None outweighs the others.
    fault = _weights_fault(spec, survivors, least)
    check(not fault, COORDINATOR, Code.SURVIVORS, f"public weights of the survivors: {fault}")


def _broken(spec: RoundSpec, terms: Terms, silos: Sequence[str]) -> str:
    """The batches of the job that are in a sum in part, in words; empty if none is."""
    kept = terms.whole(spec, silos)
    split = without(silos, kept)
    if not split:
        return ""
    torn = [batch for batch in terms.batches if not set(batch).isdisjoint(split)]
    missing = without(chain.from_iterable(torn), silos)
    if not missing:
        return f"has {', '.join(split)}, in no batch of the job"
    return f"lacks {', '.join(missing)}, without whom {', '.join(split)} are in no sum"


def _weights_fault(spec: RoundSpec, silos: Sequence[str], min_cohort: int) -> str:
    """Why the public weights of these silos show one too much of another; empty if they do not.

    A row is seen by its reader alone.
    """
    indices = [spec.cohort.index(silo) for silo in silos]
    # All silos see the sum, so ``concentration_fault`` judges it from the view of each. A row has
    # one reader, which is not mixed in it.
    if spec.counts:
        fault = concentration_fault([spec.counts[index] for index in indices], min_cohort)
        if fault:
            return fault
    for group in spec.groups:
        # Groups without counts of their own were judged above, and a row of zeros reveals nothing.
        if not any(group.counts):
            continue
        fault = row_fault([group.counts[index] for index in indices], min_cohort)
        if fault:
            return f"group {group.name!r}: {fault}"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"


def _agree(holds: bool, why: str) -> None:
    check(holds, COORDINATOR, Code.POLICY, why)

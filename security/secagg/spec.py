"""What one attempt at a secure sum is: a document that the coordinator signs, and to which
everything else is bound.

Canonical JSON, here broken and cut; ``ctx = SHA-256(framed(CONTEXT, document))`` is in every key,
signature and hash::

    {"attempt":0,"chunk_bytes":1048576,"cohort":["a","b","c","d"],"colluders":1,"counts":[],"exchange":"sum",
     "federation":"lung","groups":[{"clip_exponent":3,"elements":62006,"name":"model",…}],"job":"j1","job_digest":"5c1f…",
     "key_epoch":0,"key_parts":"","min_cohort":3,"model_digest":"e3b0…","prg":2,"protocol":"staddle-secagg/1",
     "purpose":"update","recipient":"coordinator","roster":"9f86…","round":17,"schema_digest":"9a0b…","tagged":false,
     "threshold":3}

A silo knows all of it but the cohort and the attempt (``Frame``), so it makes the document itself
and compares.

The weights of some rows it cannot know (``Frame.brought``): the coordinator alone has what they
follow from. Those it takes from the document, once they are such as it may be mixed by
(``brought_fault``).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from ..identity.signers import Signers
from .shared_gram import Compared

MOST_SILOS = 1000
LONGEST_SHOWN = 400  # characters of a field in an error
# fields of a frame that a document has otherwise, or not
NOT_IN_SPEC = ("groups", "counts", "rows", "brought")
CHUNK_STEP = 64  # bytes: any ring's words, and the four canaries of a last chunk

Count = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)]
KeyParts = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
"""Of all that silos gave to the key that they share (``group_key.parts_of``), hex.

Empty where they share none.
"""


def context_of(document: bytes) -> bytes:
    """The ctx, 32 bytes, of an attempt at a secure sum, from its specification as it was signed."""
    return hashlib.sha256(framed(SECAGG_CONTEXT, document)).digest()


class RoundSpec(Strict):
    """One attempt; ``counts`` are the declared counts behind public weights, in the
    cohort's order.
    """

    protocol: Literal["staddle-secagg/1"] = "staddle-secagg/1"
    federation: Id
    roster: Hex32
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
    prg: Literal[
        2
        # which stream masks are: security/arithmetic/masks.py; in all keys too, so that no two
        # kinds share one
    ]
    tagged: Annotated[bool, Field(strict=True)]  # uploads carry linear tags: linear_tags.py
    chunk_bytes: Annotated[
        int, Field(strict=True, ge=CHUNK_STEP, le=1 << 22, multiple_of=CHUNK_STEP)
    ]
    # what the round compares by shares; left out of the document where it is nothing
    compared: Compared | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if list(self.cohort) != sorted(set(self.cohort)):
            raise ValueError(f"cohort {list(self.cohort)} is not sorted, or names a silo twice")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"groups {names} do not have distinct names")
        wanted = (
            len(self.cohort)
            if any(g.weights == "public" and not g.counts for g in self.groups)
            else 0
        )
        if len(self.counts) != wanted:
            raise ValueError(f"{len(self.counts)} counts for public weights, not {wanted}")
        if wrong := [
            group.name
            for group in self.groups
            if group.counts and len(group.counts) != len(self.cohort)
        ]:
            raise ValueError(
                f"groups {', '.join(wrong)} have other numbers of counts than the cohort has silos"
            )
        return self

    def payload(self) -> bytes:
        """What the coordinator signs, behind the label."""
        return canonical_json(self.model_dump(mode="json", exclude_none=True))

    def context(self) -> bytes:
        """Ctx, 32 bytes."""
        return context_of(self.payload())

    def holder(self, silo: str) -> int:
        """A silo's number among the holders of shares, 1 and up."""
        return self.cohort.index(silo) + 1

    def counts_of(self, group: Group) -> tuple[int, ...]:
        """The counts behind the public weights of a group, in the cohort's order."""
        return group.counts or self.counts

    def share_of(self, silo: str, group: Group) -> float:
        """The public weight of a silo in a group, a part of 1; 0 where all are."""
        counts = self.counts_of(group)
        return counts[self.cohort.index(silo)] / max(sum(counts), 1)


@dataclass(frozen=True)
class Frame:
    """All that both sides know of a secure sum before its cohort and attempt.

    ``groups`` without their scale.
    """

    federation: str
    roster: str
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
    key_parts: str = ""  # of what this silo made the key
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
        """Names the sum across rounds and attempts: what a silo's memory is kept by."""
        return f"{self.job}/{self.exchange}/{self.purpose}/{self.recipient}"


@dataclass(frozen=True)
class Terms:
    """What a silo's policy asks of every secure sum; the defaults are those of SECURITY.md rule 6.

    The silos of each of ``batches`` are in a sum together or not at all; where there are none, any
    may be missing. Of a batch silos that are ``excused``, since evidence shows that they broke the
    rules (evidence.py), may be missing.
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
        least = max(spec.min_cohort, self.min_cohort, spec.colluders + max(2, self.min_honest))
        return unbroken(self.batches, silos, self.excused, least)

    def regroups(self, spec: RoundSpec) -> bool:
        """Whether values of one round may be in several sums, each over whole batches.

        These tell the sums of single batches and nothing beyond that, however many they are
        (algorithms/job/batches.py); where there is one batch, all of them are the same sum. That
        takes the same values in each: a silo trains a round once, and gives what its outbox has.
        Rows for one silo are weighted otherwise, and unevenly within a batch. Each comparison is
        one more answer to whoever chose its own vector. A round that has either is summed once.
        """
        once = spec.compared is not None or any(group.counts for group in spec.groups)
        return bool(self.batches) and not once


def threshold(silos: int) -> int:
    """The t of n, floor(2n/3) + 1: with fewer than n/3 colluders no two sets of survivors both find
    t signatures.
    """
    return 2 * silos // 3 + 1


def specify(frame: Frame, cohort: Sequence[str], attempt: int) -> RoundSpec:
    """The one specification of an attempt.

    LocalError if a ring is too small for the cohort or a count is missing.
    """
    members = tuple(sorted(cohort))
    counts: tuple[int, ...] = ()
    if any(group.weights == "public" and group.name not in frame.rows for group in frame.groups):
        declared = dict(frame.counts)
        if missing := [silo for silo in members if silo not in declared]:
            raise LocalError(
                f"no declared count of {', '.join(missing)}; public weights need one of each silo"
            )
        counts = tuple(declared[silo] for silo in members)
    groups = tuple(
        group.model_copy(
            update={
                "scale_exponent": scale_exponent(
                    group.ring, len(members), group.clip_exponent, group.weights
                ),
                **_row(frame, group, members),
            }
        )
        for group in frame.groups
    )
    plain = {f.name: getattr(frame, f.name) for f in fields(frame) if f.name not in NOT_IN_SPEC}
    return RoundSpec.model_validate(
        {
            **plain,
            "attempt": attempt,
            "cohort": members,
            "threshold": threshold(len(members)),
            "counts": counts,
            "groups": groups,
        }
    )


def _row(frame: Frame, group: Group, members: Sequence[str]) -> dict[str, object]:
    """Integer weights of a group for one silo, 2^32 together.

    All 0 where its reader would see too much of one.

    For a member of the cohort, what it keeps of its own beside them; there is no row for one that
    is not in it.
    """
    if group.name not in frame.rows:
        return {"counts": ()}
    by_silo, none = frame.rows[group.name], {"counts": (0,) * len(members), "own_weight": 0}
    weights = [0.0 if silo == group.reader else by_silo.get(silo, 0.0) for silo in members]
    brought = group.name in frame.brought
    if not any(weights) or (brought and group.reader not in members):
        return none
    integers = integer_weights(weights)
    own = own_weight(by_silo.get(group.reader, 0.0), weights) if brought else 0
    if own == 1 << MIX_BITS or row_fault(integers, frame.min_cohort):
        return none
    return {"counts": integers, "own_weight": own}


def kept(spec: RoundSpec, group: Group, survivors: Sequence[str]) -> float:
    """The part of 1 that the reader of a row keeps of its own, mixed with the row over these
    survivors.
    """
    return kept_share(
        group.own_weight, sum(group.counts[spec.cohort.index(silo)] for silo in survivors)
    )


def receive(
    document: bytes, signature: bytes, frame: Frame, terms: Terms, signers: Signers, silo: str
) -> RoundSpec:
    """Check a specification as ``silo`` received it; the steps run in order.

    RefusedError says what is wrong.
    """
    spec = signed_spec(document, signature, signers)  # (1) to (3)
    # (4) We are one of its cohort.
    check(
        silo in spec.cohort,
        COORDINATOR,
        Code.SPEC,
        f"asks {silo!r} into a cohort that does not name it",
    )
    # (5) The cohort is as large as our policy asks, for as many colluders as it asks.
    check_cohort(spec, terms)
    # (6) Its silos made their key of what we made ours of.
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
    signed = signers.by_coordinator(SECAGG_SPEC, spec.payload(), signature)
    check(
        signed,
        COORDINATOR,
        Code.SPEC,
        "its signature does not fit the specification of the secure sum",
    )
    # (3) Its cohort are silos that we know.
    strangers = [member for member in spec.cohort if member not in signers.silos]
    check(
        not strangers,
        COORDINATOR,
        Code.SPEC,
        f"the cohort names {', '.join(strangers)}, no silo of the roster",
    )
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
        return (
            f"mixes nobody and has {group.own_weight} of its reader's own"
            if group.own_weight
            else ""
        )
    # (3) It is for a member of the cohort, (4) who mixes its own part in itself, and never sends
    # it.
    if group.reader not in spec.cohort:
        return f"is for {group.reader!r}, which is not in the cohort"
    if own := group.counts[spec.cohort.index(group.reader)]:
        return f"mixes {own} of the reader's own part, which never leaves it"
    # (5) Its weights add up to one.
    if (total := sum(group.counts)) != 1 << MIX_BITS:
        return f"has weights that add up to {total}, not 2^{MIX_BITS}"
    # (6) None outweighs the others, and they are enough (rules 4 and 5).
    leans = row_fault(group.counts, min_cohort)
    return f"shows its reader too much: {leans}" if leans else ""


def _with_brought(own: RoundSpec, spec: RoundSpec, frame: Frame) -> RoundSpec:
    """What this silo would have written, with the weights that a specification brings.

    RefusedError if it may not.
    """
    brought = {group.name: group for group in spec.groups if group.name in frame.brought}
    for group in brought.values():
        fault = brought_fault(spec, group, frame.min_cohort)
        check(not fault, COORDINATOR, Code.POLICY, f"brings a row {group.name!r} that {fault}")
    groups = []
    for group in own.groups:
        theirs = brought.get(group.name, group)
        groups.append(
            group.model_copy(update={"counts": theirs.counts, "own_weight": theirs.own_weight})
        )
    return own.model_copy(update={"groups": tuple(groups)})


def check_frame(spec: RoundSpec, frame: Frame) -> None:
    """RefusedError unless a specification is what this silo would have written for the same cohort
    and attempt.
    """
    try:
        own = _with_brought(specify(frame, spec.cohort, spec.attempt), spec, frame)
    except LocalError as error:
        raise RefusedError(COORDINATOR, Code.SPEC, str(error)) from None
    for name in RoundSpec.model_fields:
        theirs, ours = getattr(spec, name), getattr(own, name)
        check(
            theirs == ours,
            COORDINATOR,
            Code.SPEC,
            f"specifies {name} {_shown(theirs)}, this silo expects {_shown(ours)}",
        )


def check_cohort(spec: RoundSpec, terms: Terms) -> None:
    """RefusedError unless the announced cohort is one that a silo with these terms joins (rules 5
    and 6).
    """
    n, c = len(spec.cohort), spec.colluders
    # (1) As many colluders are assumed as our policy assumes, and they are fewer than a third.
    _agree(c >= terms.colluders, f"has colluders = {c}, this silo's policy {terms.colluders}")
    _agree(
        3 * c < n, f"a cohort of {n} does not withstand colluders = {c}: it takes more than {3 * c}"
    )
    # (2) The threshold is the one that follows from n.
    _agree(
        spec.threshold == threshold(n), f"threshold {spec.threshold} of {n} is not {threshold(n)}"
    )
    # (3) The cohort is no smaller than both minima.
    minimum = max(spec.min_cohort, terms.min_cohort)
    _agree(n >= minimum, f"a cohort of {n} is smaller than min_cohort {minimum}")
    # (4) It has whole batches alone.
    fault = _broken(spec, terms, spec.cohort)
    _agree(not fault, f"the cohort {fault}")
    # (5) No silo outweighs the others.
    fault = _weights_fault(spec, spec.cohort, minimum)
    _agree(not fault, f"public weights of the cohort: {fault}")


def check_survivors(spec: RoundSpec, terms: Terms, survivors: Sequence[str]) -> None:
    """RefusedError unless the sum over these members of the cohort may be opened (rules 5
    and 6).
    """
    m, minimum = len(survivors), max(spec.min_cohort, terms.min_cohort, spec.threshold)
    # (1) They are enough to open the sum, and as many as both minima ask.
    check(m >= minimum, COORDINATOR, Code.SURVIVORS, f"{m} survivors are fewer than {minimum}")
    # (2) Enough of them are honest.
    honest = m - spec.colluders
    check(
        honest >= terms.min_honest,
        COORDINATOR,
        Code.SURVIVORS,
        f"of {m} survivors {honest} are sure to be honest, the policy asks for {terms.min_honest}",
    )
    # (3) They are whole batches alone.
    fault = _broken(spec, terms, survivors)
    check(not fault, COORDINATOR, Code.SURVIVORS, f"the sum {fault}")
    # (4) None outweighs the others.
    fault = _weights_fault(spec, survivors, max(spec.min_cohort, terms.min_cohort))
    check(not fault, COORDINATOR, Code.SURVIVORS, f"public weights of the survivors: {fault}")


def _broken(spec: RoundSpec, terms: Terms, silos: Sequence[str]) -> str:
    """Which of the job's batches are in a sum in part; empty if none is."""
    kept = terms.whole(spec, silos)
    split = [silo for silo in silos if silo not in kept]
    torn = [batch for batch in terms.batches if not set(batch).isdisjoint(split)]
    missing = [silo for batch in torn for silo in batch if silo not in silos]
    if not split:
        return ""
    if not missing:
        return f"has {', '.join(split)}, in no batch of the job"
    return f"lacks {', '.join(missing)}, without whom {', '.join(split)} are in no sum"


def _weights_fault(spec: RoundSpec, silos: Sequence[str], min_cohort: int) -> str:
    """Why the public weights of these silos show one too much of another.

    A row is seen by its reader alone.
    """
    places = [spec.cohort.index(silo) for silo in silos]
    if spec.counts and (
        fault := concentration_fault([spec.counts[at] for at in places], min_cohort)
    ):
        return fault
    for group in spec.groups:
        if any(group.counts) and (
            fault := row_fault([group.counts[at] for at in places], min_cohort)
        ):
            return f"group {group.name!r}: {fault}"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"


def _agree(holds: bool, why: str) -> None:
    check(holds, COORDINATOR, Code.POLICY, why)

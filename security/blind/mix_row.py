"""The checks of a recipient before it opens a row of a one-upload ``Mix``.

Nobody else can make them (security rules 4, 5, 10, 39).

The coordinator signs each row, so that one which breaks a rule names who made it. Canonical JSON,
here broken and cut::

    {"line":"5c1f…","own_weight":1431655766,"recipient":"a","shares":[{"version":{"attempt":0,"number":4,"round":17,
     "silo":"b"},"weight":1431655765},…]}

Weights are the integers of ``algorithms.exchange.integer_weights``, that of the recipient's own
part next to them.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field

from ...algorithms.exchange.concentration import SLACK_BITS, seen_fault
from ...algorithms.exchange.parts import MIX_BITS
from ...errors import LocalError, RefusedError
from ...files.documents import Strict, canonical_json, parse_canonical
from ..faults import COORDINATOR, Code, check
from ..identity.domains import MIX_ROW, framed
from ..identity.keys import Hex32, Id
from ..identity.signers import Sign, Signers
from ..secagg.spec import MOST_SILOS, Terms, listed
from .mix_context import MixContext, Number, Version
from .padded_mix import PaddedUpload

Weight = Annotated[int, Field(strict=True, ge=1, le=1 << MIX_BITS)]
Ordinal = Annotated[int, Field(strict=True, ge=-1, le=2**53 - 1)]


class Share(Strict):
    """One other silo's part of a row: which of its uploads, and the integer weight.

    The weight is in steps of 2^-32. All weights of a row add up to 2^32, the recipient's included.
    """

    version: Version
    weight: Weight


class RecipientRow(Strict):
    """A recipient's row: shares of others by id, and its own share, which is never sent."""

    line: Hex32  # its context
    recipient: Id
    own_weight: Annotated[int, Field(strict=True, ge=0, le=1 << MIX_BITS)]
    shares: Annotated[tuple[Share, ...], Field(min_length=1, max_length=MOST_SILOS)]

    def signed_bytes(self) -> bytes:
        """The bytes that the coordinator signs, behind ROW."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        """Names the row: SHA-256, hex."""
        return hashlib.sha256(framed(MIX_ROW, self.signed_bytes())).hexdigest()

    def sent(self) -> dict[str, int]:
        """The weights of what the coordinator adds up, by silo."""
        return {share.version.silo: share.weight for share in self.shares}


def make_row(
    line: MixContext, recipient: str, own_weight: int, shares: Sequence[Share], sign: Sign
) -> tuple[RecipientRow, bytes]:
    """At the coordinator: a row and its signature.

    The signature proves who made a row that breaks a rule. ``fault`` tells beforehand why a
    recipient would refuse it.
    """
    # Sorted by id, as recipients require: a row has one form, and one digest.
    ordered = tuple(sorted(shares, key=lambda share: share.version.silo))
    row = RecipientRow(
        line=line.context().hex(), recipient=recipient, own_weight=own_weight, shares=ordered
    )
    return row, sign(MIX_ROW, row.signed_bytes())


class RowMemory(Strict):
    """The uploads behind the rows that this silo opened of one tensor group.

    It is durable before a seed is used.

    Canonical JSON: ``{"last":"9f86…","newest":{"b":4,"c":4,"d":3}}``, the last row and each silo's
    newest version. Kept across key epochs and so across lines: numbers of versions continue.
    """

    last: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    newest: dict[Id, Number] = Field(default_factory=dict)

    def opened(self, row: RecipientRow, terms: Terms) -> Self:
        """Memory of opening a row, the same one again included.

        RefusedError if that would show too much (rule 4).
        """
        if row.digest() == self.last:
            return self
        why = self.fault(row.shares, terms)
        check(not why, COORDINATOR, Code.POLICY, f"brings another row: {why}")
        return type(self)(last=row.digest(), newest={**self.newest, **_numbers(row.shares)})

    def fault(self, shares: Sequence[Share], terms: Terms) -> str:
        """Why one row more, of these shares, would show too much; empty if it would not.

        What no row had before is enough, spread by itself as a whole row is, and it
        carries at least half of what the others weigh: if new uploads weighed next to nothing, old
        ones would be an equation over few silos.
        """
        # Rows go forward only: each row that went back would be one more equation over old uploads
        # (rule 4).
        numbers = _numbers(shares)
        back = sorted(silo for silo, number in numbers.items() if number < self.newest.get(silo, 0))
        if back:
            return f"it has older uploads of {', '.join(back)} than were mixed before"

        # A row of few new uploads would differ from an earlier one by these alone.
        fresh = [
            share
            for share in shares
            # -1, so that version 0 of a silo that was never mixed counts as new.
            if share.version.number > self.newest.get(share.version.silo, -1)
        ]
        if len(fresh) < terms.min_cohort:
            return (
                f"it has new uploads of {len(fresh)} silos, fewer than min_cohort"
                f" {terms.min_cohort}"
            )
        why = _spread_fault(fresh, terms)
        if why:
            return f"of its new uploads alone: {why}"
        new, total = _weight(fresh), _weight(shares)
        # With the slack of ``seen_fault``: rounded to integers, equal halves may differ by a step.
        if 2 * new + (total >> SLACK_BITS) < total:
            return f"its new uploads weigh {new} of the {total} of all, less than half"
        return ""


def fault(
    recipient: str, own_weight: int, shares: Sequence[Share], memory: RowMemory, terms: Terms
) -> str:
    """Why the recipient would refuse a new row, by steps (4) to (7) of ``admit``; empty if not.

    Whoever makes rows asks before: ``memory`` is that of the rows that this recipient has had of
    the tensor group.
    """
    named = [share.version.silo for share in shares]
    if len(set(named)) != len(named) or recipient in named:
        return f"mixes {', '.join(named)}, who are not distinct silos other than {recipient!r}"
    return (
        _sum_fault(own_weight, shares)
        or _spread_fault(shares, terms)
        or memory.fault(shares, terms)
    )


def _sum_fault(own_weight: int, shares: Sequence[Share]) -> str:
    total = own_weight + _weight(shares)
    if total == 1 << MIX_BITS:
        return ""
    return f"brings weights that add up to {total}, not 2^{MIX_BITS}"


def _weight(shares: Sequence[Share]) -> int:
    return sum(share.weight for share in shares)


def _spread_fault(shares: Sequence[Share], terms: Terms) -> str:
    # The recipient counts as one of the mixed silos.
    mixed = len(shares) + 1
    honest = mixed - terms.colluders
    if honest < terms.min_honest:
        return (
            f"of {mixed} silos in the row {honest} are sure to be honest, the policy asks for"
            f" {terms.min_honest}"
        )
    why = seen_fault([share.weight for share in shares], terms.min_cohort, rounded=True)
    return f"weights of the row: {why}" if why else ""


def _numbers(shares: Sequence[Share]) -> dict[str, int]:
    return {share.version.silo: share.version.number for share in shares}


class VersionMemory(Strict):
    """The newest upload that this silo began to a tensor group of a job.

    It is durable before the upload's first byte leaves.

    Canonical JSON: ``{"attempt":0,"number":4,"round":17,"signed_round":16}``. A stream hides one
    vector: a process that starts again begins a new version, with a new seed, and only a lost
    connection is resumed. One upload a round is signed, and so has a seed that others can open: two
    versions of one vector would be two rows over it. Kept across key epochs and so across lines, as
    ``RowMemory`` is.
    """

    round: Ordinal = -1
    attempt: Ordinal = -1
    number: Ordinal = -1
    signed_round: Ordinal = -1

    def began(self, version: Version) -> Self:
        """Memory of beginning an upload.

        RefusedError if one was signed in this round or a later one; LocalError unless it is newer
        than all before.
        """
        # One signed upload per round: two versions of one vector would be two rows over it.
        here = f"round {version.round}, attempt {version.attempt}"
        why = (
            f"asks for another upload in {here}, after that of round {self.signed_round} was signed"
        )
        check(version.round > self.signed_round, COORDINATOR, Code.ATTEMPT, why)
        if (version.round, version.attempt) < (
            self.round,
            self.attempt,
        ) or version.number <= self.number:
            raise LocalError(
                f"upload {version.number} of {here} would follow upload {self.number} of round"
                f" {self.round}, attempt {self.attempt}; a stream hides one upload only"
            )
        fields = {"round": version.round, "attempt": version.attempt, "number": version.number}
        return type(self)(**fields, signed_round=self.signed_round)

    def signed(self) -> Self:
        """Memory of signing the newest upload, before the signature and the sealed seeds leave."""
        return type(self).model_validate({**self.model_dump(), "signed_round": self.round})


def admit(
    line: MixContext,
    silo: str,
    document: bytes,
    signature: bytes,
    memory: RowMemory,
    terms: Terms,
    signers: Signers,
) -> tuple[RecipientRow, RowMemory]:
    """A row that ``silo`` may open, and the memory of it.

    The steps run in order, RefusedError says what is wrong.
    """
    # (1) It is a row, in its one spelling.
    try:
        row = parse_canonical(document, RecipientRow, "row of a Mix")
    except LocalError as error:
        raise RefusedError(COORDINATOR, Code.SPEC, str(error)) from None

    # (2) The coordinator signed it.
    signed = signers.by_coordinator(MIX_ROW, row.signed_bytes(), signature)
    check(signed, COORDINATOR, Code.SPEC, "its signature does not fit the row")

    # (3) It is ours, and of this line.
    ours = (row.recipient, row.line) == (silo, line.context().hex())
    check(
        ours,
        COORDINATOR,
        Code.SPEC,
        f"brings {silo!r} a row of {row.recipient!r}, or of another line",
    )

    # (4) It names other silos of the roster, once each and by id.
    named = [share.version.silo for share in row.shares]
    check(
        listed(named, signers.silos.keys() - {silo}),
        COORDINATOR,
        Code.SPEC,
        f"mixes {', '.join(named)}, who are not distinct other silos of the roster",
    )

    # (5) Its weights add up to one.
    why = _sum_fault(row.own_weight, row.shares)
    check(not why, COORDINATOR, Code.SPEC, why)

    # (6) Enough of those mixed are honest, and none outweighs the others (rules 5 and 6).
    why = _spread_fault(row.shares, terms)
    check(not why, COORDINATOR, Code.POLICY, why)

    # (7) With what was opened before it shows no more than sums over enough silos (rules 4 and 39).
    return row, memory.opened(row, terms)


def check_uploads(row: RecipientRow, uploads: Sequence[PaddedUpload]) -> None:
    """RefusedError, for the coordinator, unless these are the row's uploads, in its order.

    The coordinator signed the row, which names each upload by its version. So if it brings another
    upload, the fault is its own.
    """
    named = [share.version for share in row.shares]
    check(
        [u.version for u in uploads] == named,
        COORDINATOR,
        Code.SPEC,
        "brings other uploads than its row names",
    )

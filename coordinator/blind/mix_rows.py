r"""Rows of a Mix that is blind: which of them recipients get, and their words as they go down.

A row is a document over padded uploads that are stored here (security/blind/mix_row.py); its words
are added up from them while they are sent, piece by piece. Whether a recipient may have it is asked
before it is made: if not, the silo continues as if nobody were alike. What a recipient's rows were
made of is kept by part (``RowMemory``, table ``mixed``) before a row is sent or put aside; the same
row is made again whenever it is asked for.

::

    the method delivers  its row is made                of
    Row                  at each Fetch of the round     the last version of each silo
    Mail                 when it was posted, at a fold  that round's versions: in one file a
                                                        recipient and part

A file of rows that were put aside, canonical JSON with its digest, here broken and cut::

    {"file_sha256":"77ab…","rows":[{"document":"{\"line\":\"5c1f…\",…}","keep":"0.5","signature":"9a0b…"},…]}
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ... import log
from ...algorithms.exchange.parts import integer_weights
from ...files.checked_file import from_json, to_json
from ...files.documents import Strict, parse_canonical
from ...proto.convert.mix import Mixed, WireSummand
from ...security.arithmetic.masks import PIECE
from ...security.blind.mix_context import MixContext, Version
from ...security.blind.mix_row import RecipientRow, RowMemory, Share, fault, make_row
from ...security.blind.padded_mix import mixed_pieces
from ...security.blind.plan import JobPlan
from ...security.blind.prekeys import Word
from ...security.blind.sealing import letter_for
from ...security.identity.selection import among, without
from ...security.identity.signers import Sign
from ...security.secagg.linear_tags import combine
from .hidden_uploads import loaded

# of all rows that are put aside for a silo: a manifest with them has less than 4 MiB
MOST_SUMMANDS = 3000

Memories = Mapping[tuple[str, str], RowMemory]  # by part and recipient


@dataclass(frozen=True)
class PlannedRow:
    """One row that a recipient may have.

    ``keep`` as in ``method.Post``, 0 of a row that was not put aside.
    """

    part: str
    row: RecipientRow
    signature: bytes
    keep: float = 0.0

    @property
    def versions(self) -> list[Version]:
        """The uploads that the row is made of."""
        return [share.version for share in self.row.shares]


class _Aside(Strict):
    document: str
    keep: str
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class _Asides(Strict):
    rows: tuple[_Aside, ...]


class Planning:
    """Makes the rows of one job, and remembers of each recipient what they were made of.

    ``plan`` changes no memory; ``memories`` is updated once the database has the new ones.
    """

    def __init__(
        self, plan: JobPlan, lines: Mapping[str, MixContext], sign: Sign, memories: Memories
    ) -> None:
        self.lines = lines
        self.memories = dict(memories)
        self._job = plan.job
        self._sign = sign
        self._terms = plan.terms

    def plan(
        self,
        part: str,
        recipient: str,
        weights: Mapping[str, float],
        versions: Mapping[str, Version],
        keep: float = 0.0,
    ) -> tuple[PlannedRow, RowMemory] | None:
        """A row over these versions and the recipient's own part, and the memory of it.

        None where there is none. ``weights`` of silos without a version do not count
        (``method.Row``).
        """
        counted = {silo: weights[silo] for silo in among(weights, {recipient, *versions})}
        others = without(counted, (recipient,))
        # A row of the recipient's own part alone would tell it nothing.
        if not any(counted[silo] > 0 for silo in others):
            return None

        # Integers that add up to 2^32 exactly, of which the recipient's own part is never sent
        # (security rules 5, 19).
        integers = dict(zip(counted, integer_weights(list(counted.values())), strict=True))
        own = integers.pop(recipient, 0)
        shares = [
            Share(version=versions[silo], weight=weight)
            for silo, weight in integers.items()
            if weight
        ]
        # So little that no step of 2^-32 is left.
        if not shares:
            return None

        # A row that was sent is made again; a new one must not show more than a silo may see.
        memory = self.memories.get((part, recipient), RowMemory())
        row, signature = make_row(self.lines[part], recipient, own, shares, self._sign)
        planned = PlannedRow(part, row, signature, keep)
        # The same row, fetched again after a lost connection, reveals nothing new.
        if row.digest() == memory.last:
            return planned, memory
        # The recipient checks the same rules (security rules 4, 5): do not make a row that it would
        # refuse.
        if why := fault(recipient, own, shares, memory, self._terms):
            log.event("row.withheld", job=self._job.name, part=part, silo=recipient, why=why)
            return None
        return planned, memory.opened(row, self._terms)

    def news(self, part: str, recipient: str, memory: RowMemory) -> Memories:
        """The memory of a row, unless it is known: a row that is made again adds nothing."""
        place = (part, recipient)
        return {} if self.memories.get(place) == memory else {place: memory}


def put_aside(before: Sequence[PlannedRow], planned: PlannedRow) -> bytes | None:
    """A file of rows with one more, the last.

    None where they would be too many for one delivery.
    """
    rows = (*before, planned)
    if sum(len(each.row.shares) for each in rows) > MOST_SUMMANDS:
        return None
    asides = [
        {
            "document": each.row.signed_bytes().decode(),
            "keep": repr(each.keep),
            "signature": each.signature.hex(),
        }
        for each in rows
    ]
    return to_json(_Asides.model_validate({"rows": asides}))


def aside(part: str, data: bytes, origin: str) -> tuple[PlannedRow, ...]:
    """The rows of a file that ``put_aside`` made; LocalError for one that something else did."""
    read = from_json(data, _Asides, origin)
    return tuple(
        PlannedRow(
            part,
            parse_canonical(each.document.encode(), RecipientRow, origin),
            bytes.fromhex(each.signature),
            float(each.keep),
        )
        for each in read.rows
    )


def mixed(planned: PlannedRow, signed: Mapping[str, bytes]) -> Mixed:
    """A row as it goes down, without its words.

    ``signed`` are the silos' words on their uploads, as they are kept.
    """
    recipient, weights = planned.row.recipient, planned.row.sent()
    given = [loaded(silo, signed[silo]) for silo in weights]
    # Only the letter that is sealed to this recipient.
    summands = tuple(WireSummand(each.upload, letter_for(recipient, each.pieces)) for each in given)
    # Tags are linear: combined with the row's integers, they give the row's tag (security rule 8).
    tag = combine({each.upload.version.silo: each.upload.tag for each in given}, 1, weights)
    return Mixed(
        planned.part, planned.row.signed_bytes(), planned.signature, summands, tag, planned.keep
    )


def prekey_word(part: str, recipient: str, silo: str, signed: bytes) -> tuple[str, Word]:
    """A silo's prekey as it goes down, out of its word on an upload, as that is kept."""
    given = loaded(silo, signed)
    upload = given.upload
    return part, Word(
        upload.version, upload.sealing.root, given.prekey, letter_for(recipient, given.pieces)
    )


def words(
    planned: PlannedRow, line: MixContext, path: Callable[[Version], Path]
) -> Iterator[memoryview]:
    """The words of a row, piece by piece, each valid until the next; holds its uploads' files open.

    FileNotFoundError where an upload is gone: the round in which the row was planned is over.
    """
    with ExitStack() as files:
        # Open all files first: those that are removed meanwhile can still be read.
        opened = {
            version.silo: files.enter_context(path(version).open("rb", buffering=0)).fileno()
            for version in planned.versions
        }
        # One buffer for all uploads, so memory does not grow with the number of summands.
        buffer = memoryview(bytearray(PIECE))
        read = lambda silo, at, size: buffer[: os.preadv(opened[silo], [buffer[:size]], at)]  # noqa: E731
        for piece in mixed_pieces(line, planned.row.sent(), read):
            yield piece.data.cast("B")

"""Uploads of parts and rows of one blind job, of which only a keyed one has any (``Job.keyed``).

It has no database: the collector makes durable what is to be remembered, and then says so
(``take``, ``sign``, ``let_go`` of hidden_uploads.py, ``remember`` in this module).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ... import log
from ...algorithms.exchange.delivery import Delivery, Mail, Post, Row
from ...algorithms.exchange.parts import Mix, Part, elements_of, upload_items
from ...errors import RefusedError
from ...proto.convert.mix import MOST_TOLD
from ...security.blind.mix_context import WORD_BYTES, Version
from ...security.blind.mix_row import RowMemory
from ...security.blind.plan import JobPlan
from ...security.identity import roster as rosters
from ...security.identity.signers import Sign
from ..storage.database import FileKey, StoredJob
from ..storage.store import JobStore, padded_words, rotated_vectors
from .directed_rows import Directed
from .hidden_uploads import HiddenUploadStore
from .mix_rows import Memories, PlannedRow, Planning, aside, put_aside, words

Changes = Mapping[FileKey, str | None]


class Mixing:
    """The padded and rotated uploads of one job, and its rows."""

    def __init__(
        self, plan: JobPlan, roster: rosters.Roster, sign: Sign, stored: StoredJob, store: JobStore
    ) -> None:
        self.hidden = HiddenUploadStore(plan, roster, stored.hidden)
        self._job = plan.job
        self._store = store
        self._planning = Planning(plan, self.hidden.lines, sign, stored.memories)
        self.directed = Directed(plan, store)
        # by part and silo: files that rows put aside are of
        self._mixed: dict[tuple[str, str], frozenset[str]] = {}
        for _, part, silo in store.mailed():
            self._mixed[part, silo] = self._of(part, silo, store.put_aside(part, silo) or b"")

    # Rows that go down.

    def rows(
        self, deliveries: Sequence[Delivery], down: Sequence[Part], silo: str
    ) -> tuple[list[PlannedRow], Memories]:
        """Rows that a silo gets, and what is to be remembered of them before they leave.

        In the order of the parts and, within one, of their rounds.
        """
        found: dict[str, Sequence[PlannedRow]] = {}
        memories: dict[tuple[str, str], RowMemory] = {}
        for delivery in deliveries:
            match delivery:
                case Row(part, weights):
                    versions = self._versions(part, weights)
                    planned = self._planning.plan(part, silo, weights, versions)
                    if planned is not None:
                        found[part] = planned[:1]
                        memories |= self._planning.news(part, silo, planned[1])
                # Directed rows go down as files of words instead (directed_rows.py).
                case Mail(part) if not self.directed.has(part):
                    found[part] = self._aside(part, silo)
        rows = [row for part in down for row in found.get(part.name, ())]
        return rows, memories

    def prekeys(self, down: Sequence[Part], silo: str) -> list[tuple[str, Version]]:
        """The versions, by part, next to which the newest prekeys for a silo stand.

        Sorted by part and silo.
        """
        others = sorted(set(self._job.silos) - {silo})
        mixes = sorted({part.name for part in down} & self.hidden.lines.keys())
        found: list[tuple[str, Version]] = []
        for part in mixes:
            versions = self._versions(part, others)
            found += ((part, versions[other]) for other in sorted(versions))
        # A delivery has room for so many; a missing prekey costs forward secrecy alone.
        return found[:MOST_TOLD]

    def remember(self, memories: Memories) -> None:
        """Use these memories of recipients' rows, once the database has them.

        Call it before one of these rows leaves.
        """
        self._planning.memories.update(memories)

    def check_words(self, planned: Sequence[PlannedRow]) -> None:
        """LocalError where the disk changed an upload of these rows; read once per round."""
        self._check(
            {padded_words(v.round, v.silo, row.part) for row in planned for v in row.versions}
        )

    def check_rotated(self, round_: int, members: Collection[str], parts: Sequence[Part]) -> None:
        """LocalError where the disk changed vectors that are about to be compared."""
        self._check(
            {rotated_vectors(round_, silo, part.name) for part in parts for silo in members}
        )

    def _check(self, files: Collection[str]) -> None:
        digests = self.hidden.digests()
        self._store.check_files({file: digests[file].hex() for file in sorted(files)})

    def nbytes(self, planned: PlannedRow) -> int:
        """Length of a row's words in bytes; the same for every row of a part."""
        return self.hidden.lines[planned.part].nbytes

    def words(self, planned: PlannedRow) -> Iterator[memoryview]:
        """The words of a row, piece by piece.

        RefusedError ROUND_CLOSED where its uploads are gone.
        """
        try:
            line = self.hidden.lines[planned.part]
            yield from words(planned, line, lambda version: self._path(planned.part, version))
        except FileNotFoundError as error:
            why = f"job {self._job.name!r}: the round of this delivery is over"
            raise RefusedError(planned.row.recipient, "ROUND_CLOSED", why) from error

    def _path(self, part: str, version: Version) -> Path:
        return self._store.path(padded_words(version.round, version.silo, part))

    def _versions(self, part: str, silos: Iterable[str]) -> dict[str, Version]:
        found: dict[str, Version] = {}
        for silo in silos:
            file = self._store.file(part, silo)
            if file is None:
                continue
            # Under another roster its key is gone, and nobody could open a row of it.
            version = self.hidden.version(part, file)
            if self.hidden.fits(part, version):
                found[silo] = version
        return found

    def _aside(self, part: str, silo: str) -> tuple[PlannedRow, ...]:
        data = self._store.put_aside(part, silo)
        return () if data is None else self._read_aside(part, silo, data)

    def _read_aside(self, part: str, silo: str, data: bytes) -> tuple[PlannedRow, ...]:
        """Rows of a file, without those of another roster's line: their key is gone."""
        rows = aside(part, data, f"job {self._job.name!r}: rows of {part!r} for {silo!r}")
        line = self.hidden.lines[part].context().hex()
        return tuple(each for each in rows if each.row.line == line)

    # A fold.

    def posting(
        self, round_: int, memories: dict[tuple[str, str], RowMemory]
    ) -> Callable[[Post, bool], bytes | None]:
        """The function that puts a post's rows aside, over this round's versions.

        It adds to ``memories`` what is to be remembered of them. A post whose row would show too
        much puts nothing aside, as if nobody were alike.
        """
        directed = self.directed.posting(round_)

        def rows(post: Post, cleared: bool) -> bytes | None:
            if self.directed.has(post.part):
                return directed(post, cleared)

            # Of this round alone: a silo takes each row as if it had been there (``Post``).
            versions = self.hidden.given(round_, post.part)
            planned = self._planning.plan(post.part, post.silo, post.weights, versions, post.keep)
            if planned is None:
                return None
            # A member of the round has fetched its waiting rows; for a silo that was away, the new
            # row is appended.
            data = put_aside(() if cleared else self._aside(post.part, post.silo), planned[0])
            if data is None:
                log.problem(
                    "row.withheld",
                    job=self._job.name,
                    part=post.part,
                    silo=post.silo,
                    why="too many wait",
                )
            else:
                # Written with the fold: what a row shows has to be known before the row leaves.
                memories[post.part, post.silo] = planned[1]
            return data

        return rows

    def mixed(self, changes: Changes) -> dict[tuple[str, str], frozenset[str]]:
        """Files by part and silo that rows put aside need once these changes are committed."""
        kept = dict(self._mixed)
        for (room, part, silo), name in changes.items():
            if room == "mail":
                kept.pop((part, silo), None)
                if name is not None:
                    kept[part, silo] = self._of(part, silo, self._store.path(name).read_bytes())
        return kept

    def committed(
        self,
        memories: Memories,
        mixed: dict[tuple[str, str], frozenset[str]],
        gone: Collection[str],
    ) -> None:
        """Take over a fold that the database has, and forget uploads that nothing needs.

        ``gone`` are names of files, which the caller removes.
        """
        self.remember(memories)
        self._mixed = mixed
        self.hidden.let_go(gone)

    def expire(self) -> None:
        """Forget all uploads and rows put aside: the database has none any more."""
        self._mixed = {}
        self.hidden.let_go(self.hidden.files())

    def _of(self, part: str, silo: str, data: bytes) -> frozenset[str]:
        """The uploads that the rows of one file are made of."""
        if self.directed.has(part):
            return self.directed.files(part, silo, data)
        rows = self._read_aside(part, silo, data)
        versions = {version for row in rows for version in row.versions}
        return frozenset(padded_words(version.round, version.silo, part) for version in versions)

    @property
    def needed(self) -> frozenset[str]:
        """Files that rows put aside are made of."""
        return frozenset().union(*self._mixed.values())


def part_bytes(part: Part) -> int:
    """Length of the upload of a part on its own, in bytes: padded words, or vectors.

    A Mix has words of 64 bits, whatever the tensors' dtype; vectors of a Gram keep theirs.
    """
    if isinstance(part.exchange, Mix):
        return WORD_BYTES * elements_of(part.tensors)
    return sum(item.spec.nbytes for item in upload_items([part]))


def name_of(part: Part, round_: int, silo: str) -> str:
    """Name of the file of a silo's upload of a part."""
    named = padded_words if isinstance(part.exchange, Mix) else rotated_vectors
    return named(round_, silo, part.name)

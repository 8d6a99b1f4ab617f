"""Padded and rotated uploads of a blind job: what has arrived of each, and whose word is on it.

::

    form     it is                  then                            it stays
    padded   the words of a Mix     its silo signs it (rpc Padded)  while a version, or a row put
                                                                    aside, is of it, until the job
                                                                    has ended
    rotated  the vectors of a Gram  -                               until the fold

Until it is signed, a newer version of a padded upload takes its place: a silo that was restarted
begins one. The file of an upload is durable first, then its row (table ``hidden``), and only then
does this module know of it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...algorithms.exchange.parts import Gram, Mix, Part
from ...errors import LocalError, RefusedError
from ...proto import secure_pb2 as pb
from ...proto.convert.mix import PaddedWord, padded_from_wire
from ...proto.convert.secagg_sent import step_codes
from ...security.blind.mix_context import MixContext, Version
from ...security.blind.padded_mix import check_upload
from ...security.blind.plan import JobPlan
from ...security.faults import Code
from ...security.identity import roster as rosters
from ...security.identity.signers import Signers
from ..storage.database import StoredHidden
from ..storage.replay_log import NO_SESSION

UploadKey = tuple[int, str, str]  # round, part, silo

CONTEXT_BYTES = 32
# Of a part in one round, while this process lives: each is a record of our ledger.
MOST_VERSIONS = 100


@dataclass(frozen=True)
class StoredUpload:
    """One upload that arrived whole; ``version`` once a padded one is signed.

    ``context`` is the hash that binds it to its round; ``sha256`` is that of the whole file.
    """

    context: bytes
    file: str
    sha256: bytes
    version: Version | None = None


class HiddenUploadStore:
    """The hidden uploads of one job, as the database has them.

    It holds names and digests, no words.
    """

    def __init__(
        self, plan: JobPlan, roster: rosters.Roster, stored: Iterable[StoredHidden] = ()
    ) -> None:
        self.signers = Signers.of(roster, plan.job.silos)
        self._plan = plan
        digest = rosters.members_digest(roster, plan.job.silos)
        self.lines: Mapping[str, MixContext] = {
            name: plan.line(part, roster.federation, digest)
            for name, part in plan.uploads.items()
            if isinstance(part.exchange, Mix)
        }
        self._federation, self._members = roster.federation, digest
        self._here = {(each.round, each.part, each.silo): _here(each) for each in stored}
        self._taken: Counter[UploadKey] = Counter()

    # What rounds await.

    def part(self, silo: str, round_: int, name: str) -> Part:
        """A part that is an upload of its own.

        RefusedError MANIFEST where the round has none of this name.
        """
        for part in self._plan.round(round_).uploads:
            if part.name == name:
                return part
        raise RefusedError(
            silo, "MANIFEST", f"round {round_} has no upload of a part {name[:64]!r} of its own"
        )

    def check_context(self, silo: str, round_: int, part: Part, context: bytes) -> None:
        """RefusedError MANIFEST unless an upload of this part may be bound to this context."""
        if isinstance(part.exchange, Gram):
            fits = context == self._plan.use(part, round_).context(self._federation, self._members)
        else:
            # A hash over the version's number, which comes only with the silo's word (``check``).
            fits = len(context) == CONTEXT_BYTES
        if not fits:
            why = (
                f"an upload of part {part.name!r} is bound to {context.hex()[:64]!r}, which is not"
                f" of round {round_}"
            )
            raise RefusedError(silo, "MANIFEST", why)

    def awaits(self, silo: str, round_: int, name: str, context: bytes) -> bool:
        """True while an upload of this part, bound to this context, is still to come."""
        # A silo that is started again and again would fill our ledger, which only grows.
        if self._taken[round_, name, silo] >= MOST_VERSIONS:
            return False
        here = self._here.get((round_, name, silo))
        if here is None:
            return True
        # A silo that was restarted takes a new seed for what it has not signed (security rule 10).
        replaces = name in self.lines and here.version is None
        return replaces and here.context != context

    def lacks(self, silo: str, round_: int) -> list[str]:
        """Parts of which a silo has still to upload, or to sign, its contribution to a round.

        Part names in schema order. Its masked words are refused until this is empty.
        """
        return [
            part.name
            for part in self._plan.round(round_).uploads
            if not self._done(round_, part, silo)
        ]

    def _done(self, round_: int, part: Part, silo: str) -> bool:
        if isinstance(part.exchange, Gram):
            return self.has(round_, part.name, silo)
        return self.is_signed(round_, part.name, silo)

    # What comes.

    def has(self, round_: int, name: str, silo: str) -> bool:
        """True once an upload arrived whole, signed or not."""
        return (round_, name, silo) in self._here

    def is_signed(self, round_: int, name: str, silo: str) -> bool:
        """True once its silo has signed it."""
        here = self._here.get((round_, name, silo))
        return here is not None and here.version is not None

    def take(self, stored: StoredHidden) -> None:
        """Note an upload that is in the database.

        It replaces an earlier version of the same part and round.
        """
        place = (stored.round, stored.part, stored.silo)
        self._here[place] = _here(stored)
        # Counts of other rounds go: none of them takes uploads any more.
        times = {other: number for other, number in self._taken.items() if other[0] == stored.round}
        self._taken = Counter({**times, place: times.get(place, 0) + 1})

    def let_go(self, files: Iterable[str]) -> None:
        """Forget uploads that are no longer in the database."""
        gone = set(files)
        self._here = {place: here for place, here in self._here.items() if here.file not in gone}

    def check(self, silo: str, given: PaddedWord) -> None:
        """Check a silo's word on an upload of an open round, step by step; or RefusedError."""
        version, name = given.upload.version, given.part
        line = self.lines.get(name)

        # (1) It is of a part that is mixed, and the upload is here.
        here = self._here.get((version.round, name, silo))
        if line is None or here is None:
            why = f"signs an upload of part {name[:64]!r} that is not here; send it first"
            raise _refused(silo, Code.ORDER, why)

        # (2) It is that version, and newer than those that were signed in other rounds: one number
        # twice would be one pad over two uploads (security rule 10).
        if version.attempt or version.context(line) != here.context:
            why = f"signs version {version.number}, its upload is bound to another one"
            raise _refused(silo, Code.UPLOAD, why)
        # Version numbers of a part only grow, over all rounds.
        own = [signed for _, signed in self._signed(name) if signed.silo == silo]
        newest = max((signed.number for signed in own), default=-1)
        if version.number <= newest:
            why = f"signs version {version.number} after version {newest}"
            raise _refused(silo, Code.UPLOAD, why)

        # (3) It signed what is here, sealed the seed to each other silo, and signed a new prekey.
        with step_codes():
            check_upload(line, given.upload, given.pieces, here.sha256, self.signers)
            given.prekey.check(line, version, given.upload.sealing.root, self.signers)

    def _signed(self, name: str) -> list[tuple[StoredUpload, Version]]:
        """All signed uploads of a part."""
        own = [here for place, here in self._here.items() if place[1] == name]
        return [(here, here.version) for here in own if here.version is not None]

    def sign(self, given: PaddedWord) -> None:
        """Note a silo's word on its upload, which was checked and is in the database.

        From now on no other version may replace it.
        """
        version = given.upload.version
        place = (version.round, given.part, version.silo)
        here = self._here[place]
        self._here[place] = StoredUpload(here.context, here.file, here.sha256, version)

    # What stays.

    def version(self, name: str, file: str) -> Version:
        """Which version of a part a file holds; LocalError where nobody signed it."""
        for here, version in self._signed(name):
            if here.file == file:
                return version
        raise LocalError(
            f"{file} counts as a version of part {name!r}, but nobody signed it; restore a backup"
        )

    def fits(self, name: str, version: Version) -> bool:
        """True for a version of these members' line; else its key is gone: nobody can open it."""
        here = self._here[version.round, name, version.silo]
        return here.context == version.context(self.lines[name])

    def given(self, round_: int, name: str) -> dict[str, Version]:
        """The versions of a part that were signed in a round, by silo."""
        signed = (version for _, version in self._signed(name))
        return {version.silo: version for version in signed if version.round == round_}

    def digests(self) -> dict[str, bytes]:
        """SHA-256 of each upload, by the name of its file."""
        return {here.file: here.sha256 for here in self._here.values()}

    def files(self, round_: int | None = None) -> set[str]:
        """Files of a round, or of all."""
        return {here.file for place, here in self._here.items() if round_ in (None, place[0])}


def dumped(message: pb.PaddedWordUpload) -> bytes:
    """A silo's word on its upload, as it is kept: without its session."""
    kept = pb.PaddedWordUpload.FromString(message.SerializeToString())
    kept.ClearField("session")
    return kept.SerializeToString(deterministic=True)


def loaded(silo: str, body: bytes) -> PaddedWord:
    """A silo's word, from bytes that ``dumped`` made; RefusedError for any others."""
    message = pb.PaddedWordUpload.FromString(body)
    message.session = NO_SESSION
    return padded_from_wire(silo, message)


def received(silo: str, message: pb.PaddedWordUpload) -> PaddedWord:
    """A silo's word on its upload, well formed; RefusedError MANIFEST or SECURE."""
    with step_codes():
        return padded_from_wire(silo, message)


def _refused(silo: str, code: str, why: str) -> RefusedError:
    return RefusedError(silo, "SECURE", f"{code}: {why}")


def _here(stored: StoredHidden) -> StoredUpload:
    version = loaded(stored.silo, stored.signed).upload.version if stored.signed else None
    return StoredUpload(stored.context, stored.file, stored.sha256, version)

"""The parts of a blind round that leave one by one, before its secure sum.

They are padded for a Mix, rotated for a Gram.

A padded upload, in order, each step durable before the next::

    begun     VersionMemory: a version, number + 1, with a fresh seed that is in memory alone
    uploaded  the coordinator has all bytes, as its receipt says
    signed    our next prekey; the signed word on the upload, with the seed sealed to the job's
              other silos, and the prekey's public half; VersionMemory: signed
    given     the coordinator has the word

After a lost connection the same version is resumed, with the same bytes. A process that restarts
has lost the seed: it begins a new version, unless one was signed in this round, whose word it
gives again as it was. A rotated upload is the same for the same vectors, and resumes after a
restart too.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ... import log
from ...algorithms.exchange.parts import Mix, Part
from ...errors import LocalError
from ...proto import secure_pb2 as pb
from ...proto.convert.mix import PaddedWord, padded_to_wire, upload_from_wire
from ...security.blind.mix_context import Version
from ...security.blind.padded_mix import make_upload
from ...security.blind.rotation import digest_of
from ...security.blind.sealing import SECRET_BYTES
from ...security.identity.pairwise_keys import KEY_BYTES
from ..egress.messages import Padding, Rotating, Sent, sent_of
from ..ingress.keyed_job import Sharing
from ..ingress.mix_memory import Rotations
from ..parts.contributions import Contributions
from ..parts.declared import Declared
from ..parts.tensors import exactly, vectors_of


class PaddedWords(Protocol):
    """The protocol message that a padded upload needs."""

    async def padded(self, ctx: bytes, message: pb.PaddedWordUpload) -> None:
        """Upload the signed word on a padded upload."""
        ...


class HiddenUploadGate(Protocol):
    """What these uploads need of the gate."""

    @property
    def protocol(self) -> PaddedWords:
        """The messages of padded uploads."""
        ...

    async def upload_padded(
        self,
        declared: Declared,
        round_: int,
        contributions: Contributions,
        padding: Padding,
        cohort: Sequence[str],
    ) -> Sent:
        """Upload the padded words of a part."""
        ...

    async def upload_rotated(
        self,
        declared: Declared,
        round_: int,
        contributions: Contributions,
        rotating: Rotating,
        cohort: Sequence[str],
    ) -> None:
        """Upload the rotated vectors of a part."""
        ...

    def part_left(self, declared: Declared, round_: int, part: str) -> bool:
        """Whether anything of the part has left in this round, as the ledger has it."""
        ...


class HiddenUploads:
    """The hidden uploads of one round; ``upload_all`` called again after a lost connection resumes.

    Seeds of its versions are only in memory, so a new process begins new versions.
    """

    def __init__(
        self,
        gate: HiddenUploadGate,
        sharing: Sharing,
        declared: Declared,
        round_: int,
        cohort: Sequence[str],
        accepted: set[bytes],
    ) -> None:
        """``accepted`` are the contexts of uploads that the coordinator has; the set may grow."""
        self._gate = gate
        self._sharing = sharing
        self._declared = declared
        self._round = round_
        self._cohort = tuple(cohort)
        self._accepted = accepted
        self._begun: dict[str, Padding] = {}
        self._given: set[str] = set()

    async def upload_all(self, contributions: Contributions) -> None:
        """Upload until the coordinator has all of them, in the order of the job's parts.

        DeniedError if the policy holds one back.
        """
        for part in self._declared.hidden(self._round):
            # Uploaded before the connection was lost.
            if part.name in self._given:
                continue
            if isinstance(part.exchange, Mix):
                await self._upload_padded(part, contributions)
            else:
                await self._upload_rotated(part, contributions)
            self._given.add(part.name)
            log.event(
                "round.part_given", job=self._sharing.job.name, round=self._round, part=part.name
            )

    # Padded.

    async def _upload_padded(self, part: Part, contributions: Contributions) -> None:
        message = await asyncio.to_thread(self._signed, part)
        if message is None:
            # Kept in memory: if the upload is repeated, it must have the same bytes.
            if part.name not in self._begun:
                self._begun[part.name] = await asyncio.to_thread(self._begin, part)
            padding = self._begun[part.name]
            sent = await self._upload(part, contributions, padding)
            message = await asyncio.to_thread(self._sign, part, padding, sent)
        version = upload_from_wire(self._sharing.silo, message.upload).version
        await self._gate.protocol.padded(version.context(self._sharing.line(part)), message)

    def _signed(self, part: Part) -> pb.PaddedWordUpload | None:
        """The word that was signed in this round, if one was.

        LocalError where it was and its file is lost.
        """
        # The same word leaves again: a second one would seal the seed of another upload, and two
        # versions of one vector would be two rows over it.
        memory = self._sharing.memory
        message, versions = memory.signed(part.name), memory.versions(part.name)
        if message is None or message.upload.round != self._round:
            if versions.signed_round == self._round:
                raise LocalError(
                    f"{memory.word(part.name)}: gone or an old one, and with it the word that this"
                    f" silo signed in round {self._round}: restore its folder; no other upload of"
                    " this round is signed"
                )
            return None
        if versions.signed_round < self._round:  # the process died between the two
            memory.save_versions(part.name, versions.signed())
        return message

    def _begin(self, part: Part) -> Padding:
        """Begin a new version, and remember it.

        RefusedError if this round or a later one has a signed version, LocalError where the memory
        of earlier versions is lost.
        """
        # Remembered before the first byte: a stream hides one vector, so a process that starts
        # again draws a new seed under a new number.
        sharing = self._sharing
        memory = sharing.memory.versions(part.name)
        self._check_kept(part, memory.round)
        version = Version(silo=sharing.silo, round=self._round, attempt=0, number=memory.number + 1)
        sharing.memory.save_versions(part.name, memory.began(version))
        return Padding(sharing.line(part), version, sharing.draw(SECRET_BYTES), sharing.key)

    async def _upload(self, part: Part, contributions: Contributions, padding: Padding) -> Sent:
        ctx = padding.version.context(padding.line)
        if ctx in self._accepted:  # its receipt was lost with the connection
            return await asyncio.to_thread(self._sent, part, contributions, padding)
        sent = await self._gate.upload_padded(
            self._declared, self._round, contributions, padding, self._cohort
        )
        self._accepted.add(ctx)
        return sent

    def _sent(self, part: Part, contributions: Contributions, padding: Padding) -> Sent:
        items = tuple(item for item in self._declared.items(self._round) if item.part == part.name)
        return sent_of(part, exactly(items, {part.name: contributions.tensors[part.name]}), padding)

    def _sign(self, part: Part, padding: Padding, sent: Sent) -> pb.PaddedWordUpload:
        sharing, line, version = self._sharing, padding.line, padding.version
        known, ephemeral = sharing.prekeys.known(), sharing.draw(KEY_BYTES)
        sealed = padding.seed, ephemeral, known.keys(), sharing.sign, known.generations()
        upload, pieces = make_upload(line, version, sent.sha256, sent.tag, *sealed)

        # The prekey is on the disk before the word that publishes it can leave.
        prekey = sharing.prekeys.publish(
            line, version, upload.sealing.root, sharing.draw(KEY_BYTES), sharing.sign
        )
        digest = bytes.fromhex(sharing.job.digest)
        message = padded_to_wire(
            PaddedWord(b"", sharing.job.name, digest, part.name, upload, pieces, prekey)
        )

        # The word before the note that one was signed: ``_signed`` mends the order after a crash.
        sharing.memory.save_signed(part.name, message)
        sharing.memory.save_versions(part.name, sharing.memory.versions(part.name).signed())
        return message

    def _check_kept(self, part: Part, newest: int) -> None:
        """LocalError where the ledger has more of a part than its memory: the memory was lost.

        ``newest`` is the newest round of the memory.
        """
        if newest < self._round and self._gate.part_left(self._declared, self._round, part.name):
            job = self._sharing.job.name
            raise LocalError(
                f"what this silo remembers of part {part.name!r} of job {job!r} ends with round"
                f" {newest}, and the ledger has it in round {self._round}: its folder was lost or"
                " is an old one; restore the latest, or have the job signed under a new name"
            )

    # Rotated.

    async def _upload_rotated(self, part: Part, contributions: Contributions) -> None:
        ctx = self._sharing.rotation(part, self._round)
        if await asyncio.to_thread(self._remember, part, contributions, ctx):
            return
        # Settled after a lost connection: the coordinator has it already.
        if ctx not in self._accepted:
            use = self._sharing.plan.use(part, self._round)
            rotating = Rotating(use, ctx, self._sharing.key)
            await self._gate.upload_rotated(
                self._declared, self._round, contributions, rotating, self._cohort
            )
        await asyncio.to_thread(self._accept, part, ctx)

    def _remember(self, part: Part, contributions: Contributions, ctx: bytes) -> bool:
        """Remember these vectors before they leave; returns whether the coordinator has them.

        RefusedError or LocalError where others were rotated for this round.
        """
        # Under one rotation two vectors of a silo could be compared, so a round has one.
        (spec,) = part.tensors
        kept = self._sharing.memory.rotations(part.name)
        self._check_kept(part, kept.memory.round)
        memory = kept.memory.used(
            self._round, 0, digest_of(vectors_of(part, contributions.tensors[part.name][spec.name]))
        )
        if memory != kept.memory:
            self._sharing.memory.save_rotations(
                part.name, Rotations(memory=memory, given=kept.given)
            )
        # Kept in a file, so this holds after a restart, too.
        return kept.given == ctx.hex()

    def _accept(self, part: Part, ctx: bytes) -> None:
        # After the receipt, so that a restart does not upload the vectors again.
        memory = self._sharing.memory.rotations(part.name).memory
        self._sharing.memory.save_rotations(part.name, Rotations(memory=memory, given=ctx.hex()))

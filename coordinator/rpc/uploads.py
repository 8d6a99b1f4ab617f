"""Uploads of silos: a stream is spooled, checked and accepted.

When a connection is lost, the bytes that arrived are kept: one upload per silo and job, while its
round awaits it and this process lives. The silo asks with Standing and sends the rest; the kept
bytes are hashed again, so the digests are checked over the whole message. Nothing stays of an
upload that was refused or took too long.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ...algorithms.exchange.parts import Item, Part
from ...errors import RefusedError
from ...files.documents import MAX_SAFE_INTEGER
from ...proto import federation_pb2 as pb
from ...proto import tensor_pb2 as tensor
from ...proto.channel import transfer_seconds
from ...proto.frames import ChunkFrame, Frame
from ...proto.stream import Inbound
from ..daemon import Daemon, PartialUpload
from ..jobs.job_run import JobRun
from ..rounds.events import SiloFailed
from ..storage.spool import Spool

FAULTS_OF_THE_SILO = (
    "MANIFEST",
    "LENGTH",
    "DIGEST",
    "NOT_FINITE",
    "WEIGHT",
    "BOUNDS",
    "LEDGER",
)  # a refused upload with one of these is final

Admit = Callable[[str, tensor.Manifest], JobRun]


@dataclass
class Arriving:
    """One stream as it comes.

    ``run`` is set once it may count against the silo, ``spool`` with the first byte.
    """

    run: JobRun | None = None
    round: int = 0
    items: tuple[Item, ...] = ()
    context: bytes = b""  # of a blind job: what it is bound to
    part: Part | None = None  # of a blind job, where it crosses by itself
    spool: Spool = field(init=False)
    spooled: bool = False

    @property
    def name(self) -> str:
        """Name of the part; empty where it is all that a silo uploads in its round."""
        return "" if self.part is None else self.part.name

    def write(self, chunk: memoryview) -> None:
        """Take bytes that the manifest declared.

        RefusedError STORAGE if the disk fails.
        """
        self.spool.write(chunk)

    def discard(self) -> None:
        """Remove what arrived.

        It does nothing if the bytes are kept for the rest of their upload.
        """
        if self.spooled:
            self.spool.discard()


class Uploads:
    """The uploads of all silos, at most one of each at a time.

    The daemon holds the bytes of interrupted uploads, since the end of a round drops them.
    """

    def __init__(self, daemon: Daemon, admit: Admit) -> None:
        """``admit`` gives the job that a manifest is of, or refuses its session or its job."""
        self._daemon = daemon
        self._admit = admit
        self._running: dict[str, asyncio.Task[pb.Receipt]] = {}

    async def receive(self, silo: str, frames: AsyncIterator[Frame]) -> pb.Receipt:
        """One upload from its first frame to its receipt.

        RefusedError says why it was refused. ``standing`` can cancel it, since it runs in its own
        task.
        """
        if silo in self._running:
            raise RefusedError(
                silo, "LIMIT", "an upload of this silo is running already; wait for its end"
            )
        running = self._running[silo] = asyncio.create_task(self._receive(silo, frames))
        try:
            return await running
        except asyncio.CancelledError:
            this = asyncio.current_task()
            # gRPC cancels this call if the connection is lost; otherwise it was ``standing``.
            if this is not None and this.cancelling():  # the connection is lost
                raise
            raise RefusedError(
                silo, "INTERRUPTED", "the silo has since asked how much of it arrived"
            ) from None
        finally:
            del self._running[silo]

    async def standing(
        self, silo: str, run: JobRun, round_: int, part: str = ""
    ) -> pb.StandingReply:
        """The receipt of a silo's upload, or how many bytes of it have arrived.

        With 0 bytes, the silo has to start over. An upload that still runs is cancelled first.
        """
        # The silo asks after a lost connection, which may still stand from our side.
        if (running := self._running.get(silo)) is not None:
            running.cancel()
            await asyncio.wait({running})
        if (receipt := self._daemon.receipt(run, round_, silo, part)) is not None:
            return pb.StandingReply(receipt=receipt)
        held = self._daemon.held.get((silo, run.job.name))
        return pb.StandingReply(
            received=held.size if held is not None and held.fits(run, round_, part) else 0
        )

    async def _receive(self, silo: str, frames: AsyncIterator[Frame]) -> pb.Receipt:
        arriving = Arriving()
        inbound = Inbound(
            silo, lambda manifest: self._check(silo, manifest, arriving), arriving.write
        )
        # Before the manifest is here nobody knows how much comes: the largest upload of any job.
        largest = max((run.collector.largest_upload for run in self._daemon.runs), default=0)
        try:
            async with asyncio.timeout(transfer_seconds(largest)):
                async for frame in frames:
                    inbound.feed(frame)
                    # The final digest covers the whole upload, so hash the bytes that are here.
                    if not isinstance(frame, ChunkFrame) and frame.manifest.offset:
                        await asyncio.to_thread(inbound.take_up, arriving.spool.held())
                    self._daemon.saw(silo)
            end, digests = inbound.finish()
            run = arriving.run
            if run is None or len(end.ledger_leaf) != 32 or end.ledger_seq > MAX_SAFE_INTEGER:
                raise RefusedError(silo, "MANIFEST", "the end frame names no ledger record")
            # Before the upload is kept: it is refused if the ledger's head is not valid.
            head = self._daemon.receiving.heads.check(silo, end)
            file = await run.accept(
                silo,
                arriving.round,
                arriving.spool,
                arriving.items,
                arriving.context,
                arriving.part,
            )
        except asyncio.CancelledError:
            self._keep(silo, arriving)
            raise
        # A lost connection may be resumed; a silo at fault would send the same again, so its round
        # does not wait for it.
        except RefusedError as error:
            if error.code == "INTERRUPTED":
                self._keep(silo, arriving)
            elif arriving.run is not None and error.code in FAULTS_OF_THE_SILO:
                self._daemon.apply(arriving.run, SiloFailed(silo, arriving.round, error.code))
            raise
        except TimeoutError:
            raise RefusedError(
                silo, "LIMIT", "the upload took longer than its size allows; it was dropped"
            ) from None
        finally:
            arriving.discard()
        return self._daemon.conclude(run, silo, arriving, file, end, digests, head)

    def _check(self, silo: str, manifest: tensor.Manifest, arriving: Arriving) -> list[int]:
        """Sizes of what a manifest declares.

        It is open, fits job and disk, and continues where the bytes here end.
        """
        # Session and job first: a silo outside the job learns nothing about its rounds.
        run = self._admit(silo, manifest)
        run.collector.check_form(silo, manifest)
        run.check_open(silo, manifest.round, manifest.context, manifest.part)
        # Before ``run`` is set, so that it does not fail the silo's round: it may start over.
        if manifest.offset and manifest.offset != (have := self._held(silo, run, manifest)):
            why = (
                f"resumes at byte {manifest.offset}, this coordinator has {have} bytes of it;"
                " send all of it"
            )
            raise RefusedError(silo, "MANIFEST", why)
        arriving.run, arriving.round, arriving.context = run, manifest.round, manifest.context
        # Deliveries use the same message; in an upload these fields would go unchecked.
        if manifest.rows or manifest.sums or manifest.prekeys or manifest.proofs:
            brought = (
                f"{len(manifest.rows)} rows, {len(manifest.sums)} sums, {len(manifest.prekeys)}"
                f" prekeys and {len(manifest.proofs)} proofs"
            )
            raise RefusedError(silo, "MANIFEST", f"brings {brought}, which only deliveries have")
        expected = run.collector.expected(silo, manifest)
        arriving.items, arriving.part = expected.items, expected.part
        # Before the first byte: a full disk must not cost a transfer.
        run.store.check_space(silo, manifest.size - manifest.offset)
        # The one spool of silo and job is resumed or overwritten now.
        self._daemon.held.pop((silo, run.job.name), None)
        arriving.spool = self._daemon.spool(silo, run.job.name, going_on=manifest.offset > 0)
        arriving.spooled = True
        return expected.sizes

    def _held(self, silo: str, run: JobRun, manifest: tensor.Manifest) -> int:
        """How many bytes are here of the upload that a manifest continues."""
        held = self._daemon.held.get((silo, run.job.name))
        if held is None or not held.fits(run, manifest.round, manifest.part):
            return 0
        # Bytes with another context were masked with other keys and are useless.
        return held.size if held.context == manifest.context else 0

    def _keep(self, silo: str, arriving: Arriving) -> None:
        """Keep the bytes that arrived for the rest of their upload, if that is still awaited."""
        run = arriving.run
        if (
            run is not None
            and arriving.spooled
            and run.awaits(silo, arriving.round, arriving.context, arriving.name)
        ):
            # Otherwise ``discard`` would remove the file at the end of the call.
            arriving.spooled = False
            size = arriving.spool.suspend()
            held = PartialUpload(
                run, arriving.round, arriving.spool, size, arriving.context, arriving.name
            )
            self._daemon.held[silo, run.job.name] = held

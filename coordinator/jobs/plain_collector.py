"""Rounds whose uploads arrive in the clear: each counts once it is checked and stored.

The counterpart of blind_collector.py.
"""

from pathlib import Path

from ...algorithms.exchange.parts import Part, upload_items
from ...algorithms.exchange.plain import PLAIN
from ...proto import tensor_pb2 as tensor
from ...proto.wire import check_manifest
from ...security.identity.selection import among
from ..disk_need import plain_bytes
from ..rounds.events import UploadStored
from ..storage.database import StoredJob
from .collector import Collector, ExpectedUpload, FoldInputs, StoredUploadFile, Upload, misfit
from .job_run import DaemonCalls, JobRun


class PlainCollector(Collector):
    """All that it has to remember is in the job's state and in the database."""

    def __init__(self, daemon: DaemonCalls, run: JobRun, stored: StoredJob) -> None:
        super().__init__(run.job)
        self._daemon, self._run = daemon, run
        self.exchanges = PLAIN
        self.largest_upload = max(map(self.upload_bytes, run.job.phase_starts))
        state = stored.state
        # Uploads that counted before a restart still count.
        self.kept_files = [f"{state.round}.{silo}.upload" for silo in state.given]

    def upload_bytes(self, round_: int, part: str = "") -> int:
        """Bytes of all tensors that a silo uploads in a round, the same for each silo."""
        return plain_bytes(self._job.up(round_))

    def awaits(self, silo: str, round_: int, context: bytes, part: str) -> bool:
        """True for the round's one upload: in a plain job no part crosses on its own."""
        return not part

    def check_form(self, silo: str, manifest: tensor.Manifest) -> None:
        """RefusedError MANIFEST for words, and for a part on its own."""
        # Such as a silo sends that takes the job for a blind one.
        if manifest.context or manifest.part:
            raise misfit(silo, manifest, "masked words, the job is in the clear")

    def expected(self, silo: str, manifest: tensor.Manifest) -> ExpectedUpload:
        """The tensors of the round's parts.

        RefusedError MANIFEST if the manifest does not match the job's schema.
        """
        items = upload_items(self._job.up(manifest.round))
        check_manifest(silo, manifest, items)
        return ExpectedUpload.of(items)

    def keep(self, silo: str, round_: int, path: Path, part: Part | None) -> str:
        """Name a checked upload, durably."""
        return self._run.store.keep(silo, round_, path)

    def take(self, silo: str, upload: Upload, stored: StoredUploadFile) -> None:
        """The upload counts as an event of the job."""
        # The fold checks the file against this digest.
        event = UploadStored(silo, upload.round, stored.digests.total.hex())
        self._daemon.apply(self._run, event, stored.record, stored.committed)

    def inputs(self, round_: int, members: tuple[str, ...]) -> FoldInputs:
        """DamagedError where the disk changed an upload: its silo may be asked for it again."""
        store, given = self._run.store, self._run.state.given
        # Where the job was ended meanwhile there are none any more: the fold counts for nothing.
        store.check_uploads({silo: given[silo] for silo in among(members, given)}, round_)
        return FoldInputs(store.reader(members, round_), store.folding(round_))

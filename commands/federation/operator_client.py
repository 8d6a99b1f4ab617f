"""An operator's connection to a coordinator, and its file.

Templates/operator.toml is an example of it.

``staddle operator``: the file by which an operator reaches the coordinator.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, cast

import grpc
import pydantic

from ...errors import (
    AbsentError,
    LocalError,
    PeerError,
    RefusedError,
    StaddleError,
    UnreachableError,
    check_local,
    reason,
)
from ...files.documents import Strict, read_toml
from ...files.file_bounds import open_regular
from ...proto import federation_pb2, membership_pb2
from ...proto import operations_pb2 as pb
from ...proto.channel import (
    CHUNK_BYTES,
    ERROR_METADATA,
    absence,
    checked_address,
    checked_proxy,
    client_options,
    require_tls13,
    transfer_seconds,
)
from ...proto.membership_pb2_grpc import RenewalStub
from ...proto.operations_pb2_grpc import OperationsStub
from ...security.identity import roster as rosters
from ...security.identity.certificate import clock_fault, server_name, utc_now
from ...security.identity.keys import Keys, Role, RosterEntry, tls_pairs
from ...security.identity.renewal import Renewal, own_renewal
from ...security.identity.roster import Pins
from ...security.identity.roster_in_use import RosterInUse
from ..terminal import printer

# Deadline of a call that is answered at once; a watch has none, since a job may run for days.
CALL_SECONDS = 30.0
# A watch asks again for so long where the coordinator stops: it may continue under another roster.
AWAY_SECONDS, ASK_SECONDS = 30.0, 1.0
ROLE_NAMES = {Role.OPERATOR: "an operator", Role.FOUNDER: "a founder"}
CODES = {name.removeprefix("ERROR_CODE_") for name in federation_pb2.ErrorCode.keys()}  # noqa: SIM118 an enum wrapper


class OperatorConfig(Strict):
    """The keys of the file of an operator, or of a founder.

    Paths are relative to the file. ``trust`` pins federation and founders, so a swapped roster is
    detected.
    """

    version: Literal[1]
    coordinator: str
    proxy: Annotated[str, pydantic.AfterValidator(checked_proxy)] = ""
    keys: Path
    roster: Path
    trust: Pins


class Operator:
    """The calls of the Operations service.

    RefusedError or PeerError say what came of one that failed.
    """

    def __init__(self, channel: grpc.Channel, coordinator: str, address: str) -> None:
        self._stub = cast("Any", OperationsStub)(channel)
        self._peer = coordinator
        self._address = address

    def submit(self, signed: bytes) -> pb.JobStatus:
        """Queue a signed job.

        For a job that is queued already, its status is returned. RefusedError says why a job cannot
        be queued.
        """
        return cast(
            "pb.JobStatus", self._call(self._stub.Submit, pb.SubmitRequest(signed_job=signed))
        )

    def submit_weights(self, signed: bytes, weights: Path) -> pb.JobStatus:
        """Queue a signed job with the file of weights that it names, like ``submit``.

        LocalError where the file cannot be read.
        """
        try:
            size = weights.stat().st_size
            with open_regular(weights) as file, self._explaining():
                seconds = CALL_SECONDS + transfer_seconds(size)
                status = self._stub.SubmitWeights(_frames(signed, file), timeout=seconds)
                return cast("pb.JobStatus", status)
        except OSError as error:
            raise LocalError(f"{weights}: cannot read it: {reason(error)}") from error

    def jobs(self) -> list[pb.JobStatus]:
        """All jobs, in their order."""
        return list(self._call(self._stub.List, pb.ListRequest()).jobs)

    def show(self, job: str) -> pb.JobReport:
        """One job and its closed rounds.

        RefusedError UNKNOWN_JOB if the coordinator does not have it.
        """
        return cast("pb.JobReport", self._call(self._stub.Show, pb.JobRequest(job=job)))

    def stop(self, job: str) -> pb.JobStatus:
        """Stop a job until it is resumed."""
        return cast("pb.JobStatus", self._call(self._stub.Stop, pb.JobRequest(job=job)))

    def resume(self, job: str) -> pb.JobStatus:
        """Resume a stopped job."""
        return cast("pb.JobStatus", self._call(self._stub.Resume, pb.JobRequest(job=job)))

    def withdraw(self, job: str) -> pb.JobStatus:
        """End a job that has not begun its first round; RefusedError ROUND_CLOSED otherwise."""
        return cast("pb.JobStatus", self._call(self._stub.Withdraw, pb.JobRequest(job=job)))

    def watch(self, job: str) -> Iterator[pb.JobReport]:
        """A job's reports until it has ended, each with the rounds that closed since the last.

        The last one reports the job's end. PeerError if the connection is lost, or the coordinator
        has stopped for AWAY_SECONDS.
        """
        told, until = 0, 0.0
        while True:
            try:
                for report in self._stub.Watch(pb.JobRequest(job=job)):
                    # A coordinator that is asked again begins with all rounds.
                    del report.rounds[: sum(each.round < told for each in report.rounds)]
                    told, until = max([told, *(each.round + 1 for each in report.rounds)]), 0.0
                    yield report
            except grpc.RpcError as error:
                failed = explained(error, self._peer, self._address)
                now = time.monotonic()
                stops = isinstance(failed, RefusedError) and failed.code == "STOPPING"
                until = until or (now + AWAY_SECONDS) * stops
                if now >= until:
                    raise failed from None
            else:
                return
            time.sleep(ASK_SECONDS)

    def _call(self, method: Any, request: Any) -> Any:
        with self._explaining():
            return method(request, timeout=CALL_SECONDS)

    def _explaining(self) -> AbstractContextManager[None]:
        return explaining(self._peer, self._address)


@contextmanager
def explaining(coordinator: str, address: str) -> Iterator[None]:
    """What ``explained`` makes of the call in the block is raised where it fails."""
    try:
        yield
    except grpc.RpcError as error:
        raise explained(error, coordinator, address) from None


def explained(error: Any, coordinator: str, address: str) -> PeerError:
    """A failed call in our words.

    RefusedError with the coordinator's code; AbsentError or UnreachableError without one.
    """
    # Without a code of the closed list, the answer is not the coordinator's own.
    code = str(dict(error.trailing_metadata() or ()).get(ERROR_METADATA, ""))
    if code in CODES:
        return RefusedError(coordinator, code, error.details())
    details = str(error.details())
    if why := absence(details, address):
        return AbsentError(
            coordinator, f"{why}; is the coordinator running, and the address right?"
        )
    return UnreachableError(
        coordinator,
        f"no answer from {address}. Check that the coordinator is running, and that both rosters"
        " have the same members: run `staddle roster show` on both sides, and the clocks of both"
        f" machines (NTP) ({error.code().name}: {details})",
    )


def _frames(signed: bytes, file: BinaryIO) -> Iterator[pb.WeightedJob]:
    yield pb.WeightedJob(signed_job=signed)
    while piece := file.read(CHUNK_BYTES):
        yield pb.WeightedJob(weights=piece)


def access(path: Path, *, alone: bool = False) -> tuple[Keys, rosters.Roster]:
    """An operator's keys, and the roster that the federation has now, like ``connected``.

    ``alone`` as in ``current_member``.
    """
    in_use = current_member(path, read_toml(path, OperatorConfig), Role.OPERATOR, alone=alone)
    return in_use.keys, in_use.present


@contextmanager
def connected(path: Path) -> Iterator[Operator]:
    """The operator of a file, connected while the block runs.

    LocalError for keys that are not those of an operator in the roster.
    """
    config = read_toml(path, OperatorConfig)
    in_use = current_member(path, config, Role.OPERATOR)
    keys, coordinator = in_use.keys, in_use.present.coordinator
    pair = keys.tls_key, keys.entry.certificate.encode()
    with dialled(config.coordinator, coordinator, *pair, config.proxy) as channel:
        yield Operator(channel, coordinator.id, config.coordinator)


def current_member(
    path: Path, config: OperatorConfig, role: Role, *, alone: bool = False
) -> RosterInUse:
    """The newest roster of a file's member, and renewed certificates: no daemon does it here.

    The coordinator is asked for its roster. A newer one, which the founders' pins vouch for, takes
    the place of the file's. Once the member's certificate is old, it gets the new one. LocalError
    for keys that are not of this role in the roster. UnreachableError where the coordinator does
    not answer, unless what follows is done ``alone``, without it.
    """
    place = path.parent / config.roster
    in_use = RosterInUse(place, place, config.trust, path.parent / config.keys)
    # Before dialling: the roster says which certificate to expect.
    keys, roster = in_use.keys, in_use.present
    if keys.entry not in roster.having(role):
        raise LocalError(
            f"{path}: {keys.entry.id!r} is not {ROLE_NAMES[role]} of roster version"
            f" {roster.version}; have it added"
        )
    try:
        renewal = own_renewal(keys.home, keys.entry, utc_now())
        if in_use.take_over(_handed_in(config, keys, roster, renewal)):
            taken = f"version {in_use.present.version} was taken over, in place of {roster.version}"
            printer.show(f"{place}: {taken}", err=True)
    # The command itself may be more urgent; but what asks next would ask in vain again.
    except StaddleError as error:
        if isinstance(error, UnreachableError) and not alone:
            raise
        kept = f"{place}: continues with version {in_use.present.version} of the roster"
        kept += ", which is enough for this command" * alone
        printer.show(f"{kept}; a newer one was not fetched: {error}", err=True)
    return in_use


def _handed_in(
    config: OperatorConfig, keys: Keys, roster: rosters.Roster, renewal: Renewal | None
) -> rosters.Roster:
    """The coordinator's roster, unchecked, once it has the renewal."""
    failed = PeerError(roster.coordinator.id, "was not asked")
    # Where the new certificate stands in its roster already, the one of ours is refused.
    for pair in tls_pairs(keys):
        with dialled(config.coordinator, roster.coordinator, *pair, config.proxy) as channel:
            stub = cast("Any", RenewalStub)(channel)
            try:
                reply = stub.Newest(membership_pb2.NewestRequest(), timeout=CALL_SECONDS)
                newest = rosters.parse(reply.roster, "the coordinator's roster")
                if renewal is not None and keys.entry in newest.entries:
                    request = membership_pb2.RenewRequest(
                        certificate=renewal.certificate, signature=bytes.fromhex(renewal.signature)
                    )
                    stub.Renew(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                failed = explained(error, roster.coordinator.id, config.coordinator)
            else:
                return newest
        if isinstance(failed, AbsentError):
            break
    raise failed


@contextmanager
def dialled(
    address: str, coordinator: RosterEntry, key: bytes, certificate: bytes, proxy: str = ""
) -> Iterator[grpc.Channel]:
    """A channel on which this coordinator alone can answer, while the block runs.

    ``key`` and ``certificate`` are our own, PEM. LocalError for an address that is none, or where
    this machine's clock lets no handshake succeed.
    """
    require_tls13()
    # The handshake would fail by our clock, and the reason would not be told.
    clock = clock_fault(coordinator.id, coordinator.certificate, utc_now())
    check_local(not clock, clock)
    # The coordinator's own certificate is the only root: no CA could vouch for another.
    credentials = grpc.ssl_channel_credentials(coordinator.certificate.encode(), key, certificate)
    options = client_options(server_name(coordinator.certificate), proxy)
    with grpc.secure_channel(checked_address(address), credentials, options) as channel:
        yield channel

"""The findings of a daemon's ``check``, and the checks that silo and coordinator share."""

import datetime as dt
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import LocalError, StaddleError, check_local, reason
from .identity import certificate
from .identity import roster as rosters
from .identity.certificate import utc_now
from .identity.keys import Keys, Role, load_keys
from .identity.roster import Pins, Roster
from .identity.roster_in_use import RosterInUse
from .ledger.audit import LEDGER, verify
from .log.head import own_log_key
from .log.note import Note

LEAST_FREE = 1024**3  # bytes

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: whether it is right, and what was found or what to do.

    If it is not right, ``text`` names the file and what to do, so it needs no context.
    """

    name: str
    ok: bool
    text: str


@dataclass
class PreflightReport:
    """Findings in the order in which they were made.

    A fault does not end the run: the operator sees all faults at once.
    """

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing failed."""
        return all(finding.ok for finding in self.findings)

    def look(self, name: str, check: Callable[[], tuple[ValueT, str]]) -> ValueT | None:
        """Run one check: its value, or None where it fails; every error of ours is a finding."""
        try:
            value, text = check()
        # Our own errors, and OSError below, become findings. Any other error is a bug.
        except StaddleError as error:
            self.findings.append(Finding(name, ok=False, text=str(error)))
            return None
        except OSError as error:
            text = f"{error.filename or name}: {reason(error)}"
            self.findings.append(Finding(name, ok=False, text=text))
            return None
        self.findings.append(Finding(name, ok=True, text=text))
        return value

    def skip(self, name: str, needed: str) -> None:
        """Note what was not tried since something else failed: not known to be right, so not ok."""
        self.findings.append(Finding(name, ok=False, text=f"not tried: first put {needed} right"))


def identity(
    report: PreflightReport,
    folder: Path,
    renewed: Path,
    in_use: Callable[[], RosterInUse],
    pins: Pins,
    role: Role,
) -> tuple[Keys | None, Roster | None]:
    """Keys, roster, whether they belong together, and the clock: what every daemon begins with."""
    # The roster is checked even if the keys fail, so that one run shows all faults.
    ours = report.look("keys", partial(keys, folder))
    members = report.look("roster", partial(roster, in_use, pins))
    if ours is None or members is None:
        report.skip("member", "keys and roster")
    else:
        ours = load_keys(folder, members.entries, renewed)
        report.look("member", partial(member, ours, members, role, folder))
    if members is None:
        report.skip("clock", "the roster")
    else:
        report.look("clock", partial(clock, members, utc_now()))
    return ours, members


def keys(folder: Path) -> tuple[Keys, str]:
    """The keys belong together, and nobody else can read the private ones.

    LocalError from ``load_keys``: for a missing or wrong key, or a file that others can read.
    """
    found = load_keys(folder)
    return (
        found,
        (
            f"{found.entry.id}, TLS key {found.entry.tls_fingerprint}, private files for their"
            " owner alone"
        ),
    )


def roster(in_use: Callable[[], RosterInUse], pins: Pins) -> tuple[Roster, str]:
    """The roster is signed as the pins want it; LocalError if not. The text names who signed."""
    found = in_use().present
    signers = ", ".join(sorted(found.signatures))
    # The others are enough, until the founder whose pin is mistyped has to sign.
    unfit = rosters.unfit_pins(found, pins.founders, rosters.TRUST)
    said = f"version {found.version} of {found.federation!r}, signed by {signers}"
    return found, f"{said}; {unfit or 'it fits the pins'}"


def member(found: Keys, members: Roster, role: Role, folder: Path) -> tuple[bool, str]:
    """The roster has these very keys, in this role.

    The value is always True. LocalError if keys or role are others, or the member is missing.
    """
    entry = found.entry
    check_local(
        entry.role is role,
        f"{folder}: {entry.id!r} is {_one(entry.role)}, not {_one(role)}; use the keys of"
        f" {_one(role)}",
    )
    if entry.id not in members or members[entry.id] != entry:
        known = "has other keys" if entry.id in members else "is missing"
        raise LocalError(
            f"{folder}: {entry.id!r} ({entry.tls_fingerprint}) {known} in roster version"
            f" {members.version}; have its entry.json added and the roster signed"
        )
    end = certificate.validity(entry.certificate)[1].isoformat(timespec="minutes")
    return (
        True,
        f"{entry.id} is {_one(role)} of the roster with these keys; its certificate ends {end}",
    )


def clock(members: Roster, now: dt.datetime) -> tuple[bool, str]:
    """Our clock lies in the time for which every certificate is good; TLS fails otherwise.

    No one else is asked: no message of the protocol says its sender's time.
    """
    fault = clock_fault(members, now)
    check_local(not fault, fault)
    shown = now.isoformat(timespec="seconds")
    return (
        True,
        (
            f"{shown} lies in the validity of all {len(members.entries)} certificates; no other"
            " clock was asked"
        ),
    )


def clock_fault(members: Roster, now: dt.datetime) -> str:
    """What is wrong between our clock and the first certificate that it does not fit, or empty.

    gRPC reports a certificate out of its time as UNAVAILABLE, like any other failure.
    """
    faults = (certificate.clock_fault(e.id, e.certificate, now) for e in members.entries)
    return next(filter(None, faults), "")


def disk(folder: Path, needed: int, why: str) -> tuple[int, str]:
    """We may write where the state goes, and there is room for what is needed, a GiB at least.

    Returns the free bytes and a text. ``needed`` is in bytes, and ``why`` names what needs them.
    """
    # The nearest folder that exists: the first start may still have to make the folder itself.
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    check_local(
        place.is_dir(),
        f"{place}: is not a folder; the state goes to {folder}: choose another directory",
    )
    check_local(
        # X_OK as well: without it no file in the folder can be opened.
        os.access(place, os.W_OK | os.X_OK),
        f"{place}: cannot write here; give this user the folder, or choose another directory",
    )
    # At least a GiB even for a small job: a ledger that meets a full disk takes no more records
    # until a restart (log/append_log.py).
    free, wanted = shutil.disk_usage(place).free, max(needed, LEAST_FREE)
    reason = why if needed > LEAST_FREE else "at least a GiB"
    room = f"{place}: {size(free)} free, {size(wanted)} needed ({reason}); make room"
    check_local(free >= wanted, room)
    return free, f"{size(free)} free at {place}, {size(wanted)} needed ({reason})"


def size(count: int) -> str:
    """Bytes for people."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def ledger(
    directory: Path, federation: str, keys: Path, known: Note | None = None
) -> tuple[bool, str]:
    """The ledger in a daemon's folder holds, under its own log key.

    Or there is none yet, nor a head of one.
    """
    # A daemon that never ran has no ledger; where the database knows a head, one was removed.
    folder = directory / LEDGER
    if known is None and (not folder.exists() or not any(folder.iterdir())):
        return True, f"{folder}: none yet; it is begun at the first start"
    found = verify(
        folder,
        key=own_log_key(federation, keys),
        witnessed={"the database": known} if known else None,
    )
    if not found.ok:
        raise LocalError(f"{folder}: {found.problems[0]}; run: staddle ledger verify {folder}")
    signed = f"signed up to {found.checkpoint}"
    holds = "1 record holds" if found.records == 1 else f"{found.records} records hold"
    return True, f"{folder}: {holds}, {signed}, head {found.records - 1}:{found.head}"


def _one(role: Role) -> str:
    return f"{'an' if role is Role.OPERATOR else 'a'} {role}"

"""What the silo's own people decide about single jobs, where ``[admission] approve = "ask"``.

::

    <directory>/approvals/offers/<job>.json    a job that passed every check and waits for a person,
                                               as its operator signed it
    <directory>/approvals/gone/<job>.json      one that waited, and that the coordinator says it no
                                               longer offers: nobody can decide about it
    <directory>/approvals/declined/<job>.json  a job that the policy declined, or has no rule for,
                                               as its operator signed it: a person may have the
                                               policy allow it
    <directory>/approvals/decisions.json       what a person decided, by job

A decision is for the very bytes that an operator signed, under one policy: another document of the
same name needs another, and so does the same one once the policy has changed, unless the silo has
accepted it before. The silo's ledger records who decided and when. The text of a person's reason
stays in this folder: only a code leaves, and excerpts of a ledger are shown to others.

An offer is gone only once the coordinator says so, with a task or in place of one. While it cannot
be reached, or says nothing of offers, those that it made wait on. Its word hides no more than its
silence would, and brings back nothing that it did not offer before, as an operator signed it.

The agent writes the offers and reads the decisions; ``approve`` and ``decline`` are run by the
silo's user on its machine, and replace the file of decisions as a whole. The agent watches it.
"""

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from ...errors import LocalError, RefusedError, UnwritableError
from ...files import checked_file
from ...files.documents import Strict, read_bytes, remove, unwritable, validate, write_atomic
from ...files.portable import pwd
from ...security.identity.certificate import utc_now
from ...security.identity.keys import ID_PATTERN
from ...security.ledger.records import PersonsDecision
from ...security.log.lock import claimed
from ...security.policy import policy as policies
from ..config import SiloConfig

FOLDER, DECISIONS = "approvals", "decisions.json"
DECLINED = "declined"
OFFERS = "offers"  # apart from what was decided, since a job may have any name
GONE = "gone"
MOST_OFFERS = 100  # that are kept; an operator could have any number signed
MOST_REASON = 500  # characters
# One line of a person's name or office, which commands, pages and the ledger show.
Name = Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e]*$")]
UNRULED = "the policy has no rule for {what}: review it with staddle silo accept {job}"
WAITING, NOT_APPROVED = "WAITING", "NOT_APPROVED"  # of ``ErrorCode``
Answer: TypeAlias = Literal["approved", "declined"]
Digest: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class JobDecision(Strict):
    """What a person decided: about which signed file, under which policy (SHA-256), when, and who.

    ``by`` is that person's own word: whoever may write the file could write any name.
    """

    answer: Answer
    signed: Digest
    policy: Digest
    time: str
    reason: Annotated[str, Field(max_length=MOST_REASON)] = ""
    by: Name = ""  # older files do not say

    def recorded(self) -> PersonsDecision:
        """The same for the ledger, without the reason."""
        return PersonsDecision(by=self.by, signed=self.signed, time=self.time)


class JobDecisions(Strict):
    """``decisions.json``: the last decision about each job, by its name."""

    jobs: dict[Annotated[str, Field(pattern=ID_PATTERN)], JobDecision] = Field(default_factory=dict)


@dataclass(frozen=True)
class WaitingJob:
    """A job that was offered and asked about; ``decision`` is None while nobody has decided."""

    job: str
    signed: bytes
    since: float  # seconds since 1970
    decision: JobDecision | None


def begin(directory: Path) -> bytes:
    """Make the folders, and the file of decisions where there is none; its content."""
    for folder in (directory / FOLDER, directory / FOLDER / OFFERS):
        folder.mkdir(mode=0o700, exist_ok=True)
    path = directory / FOLDER / DECISIONS
    if not path.exists():
        checked_file.write_json(path, JobDecisions())
    return read_bytes(path)


def parse(data: bytes) -> JobDecisions:
    """The decisions in a file's bytes; LocalError for a damaged file."""
    return checked_file.from_json(data, JobDecisions, DECISIONS)


def decisions(directory: Path) -> Mapping[str, JobDecision]:
    """The last decision about each job."""
    path = directory / FOLDER / DECISIONS
    return checked_file.read_json(path, JobDecisions).jobs if path.exists() else {}


# The agent.


def asked(
    config: SiloConfig, job: str, signed: bytes, policy: str, coordinator: str
) -> JobDecision | None:
    """What a person decided about this very job; None where the policy alone decides.

    RefusedError WAITING while nobody has; the job is kept for ``waiting``. ``policy`` is the digest
    of the policy in force.
    """
    if config.admission.approve == "policy":
        return None
    _keep_offer(config.directory, job, signed)
    why = f"waits for a person: staddle silo approve {job}, or decline {job}"
    try:
        found = decisions(config.directory).get(job)
    # A damaged file approves nothing.
    except LocalError as error:
        raise RefusedError(coordinator, WAITING, f"{why}; {error}") from error
    if found is None or not _holds(found, signed, policy):
        raise RefusedError(coordinator, WAITING, why)
    return found


def forget_offer(directory: Path, job: str) -> None:
    """Remove what was kept of a job that waited or was declined: it has been accepted."""
    for kind in (OFFERS, GONE, DECLINED):
        remove(_offer(directory, job, kind))


def drop_offer(directory: Path, job: str, signed: bytes) -> None:
    """Let a job wait no longer that an admission check declines by now.

    ``job`` is what the coordinator calls it: only the very bytes that wait are dropped.
    """
    path = _offer(directory, job)
    if _content(path) == signed:
        remove(path)


def sort_offers(directory: Path, open_offers: Collection[bytes]) -> dict[str, str]:
    """Part the jobs that wait here from those that the coordinator no longer offers.

    ``open_offers`` are the SHA-256 of the signed files that it says it offers. Returns by job which
    of both, OFFERS or GONE, it has become.
    """
    moved = {}
    moves = ((OFFERS, GONE, False), (GONE, OFFERS, True))
    # One that is offered again waits again, since the same time as before.
    for kind, other, opened in moves:
        for path in _offers(directory, kind):
            if _is_among(path, open_offers) is opened:
                _move(path, _offer(directory, path.stem, other))
                moved[path.stem] = other
    # Its people need not have the policy allow what nobody offers. The ledger has why it was not.
    for path in _offers(directory, DECLINED):
        if not _is_among(path, open_offers):
            remove(path)
    _keep_newest(directory, GONE)
    return moved


def _move(path: Path, target: Path) -> None:
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        path.replace(target)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot move it: {unwritable(error)}") from error


def _is_among(path: Path, open_offers: Collection[bytes]) -> bool:
    return sha256(read_bytes(path)).digest() in open_offers


def keep_declined(directory: Path, job: str, signed: bytes) -> None:
    """Keep a job that an operator of our roster signed and the policy declined.

    ``job`` is what the coordinator calls it, which whoever reads the file has to compare.
    """
    (directory / FOLDER / DECLINED).mkdir(mode=0o700, parents=True, exist_ok=True)
    _keep(directory, job, signed, DECLINED)


def _holds(decision: JobDecision, signed: bytes, policy: str) -> bool:
    # A refusal holds under any policy: a person said no to the document.
    same_policy = decision.policy == policy or decision.answer == "declined"
    return same_policy and decision.signed == sha256(signed).hexdigest()


def _keep_offer(directory: Path, job: str, signed: bytes) -> None:
    begin(directory)
    # The time of the file says since when it waits.
    if (before := _offer(directory, job, GONE)).exists():
        _move(before, _offer(directory, job))
    _keep(directory, job, signed, OFFERS)


def _keep(directory: Path, job: str, signed: bytes, kind: str) -> None:
    path = _offer(directory, job, kind)
    if _content(path) != signed:
        write_atomic(path, signed)
    _keep_newest(directory, kind)


def _content(path: Path) -> bytes | None:
    """The bytes of an offer; None where the agent has moved or removed it, maybe just now."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _keep_newest(directory: Path, kind: str) -> None:
    for old in _offers(directory, kind)[:-MOST_OFFERS]:
        remove(old)


def _offer(directory: Path, job: str, kind: str = OFFERS) -> Path:
    # The name is part of a path, and may come from a command line.
    if not re.fullmatch(ID_PATTERN, job):
        raise LocalError(f"{job[:64]!r} is no name of a job; staddle silo jobs lists them")
    return directory / FOLDER / kind / f"{job}.json"


def _offers(directory: Path, kind: str = OFFERS) -> list[Path]:
    """The files of offers, the oldest first."""
    return list(_times(directory, kind))


def _times(directory: Path, kind: str) -> dict[Path, int]:
    """When the jobs of a folder came, in nanoseconds since 1970, the oldest first."""
    times: dict[Path, int] = {}
    for path in (directory / FOLDER / kind).glob("*.json"):
        with suppress(FileNotFoundError):  # accepted meanwhile
            times[path] = path.stat().st_mtime_ns
    return dict(sorted(times.items(), key=itemgetter(1)))


# The silo's people.


def waiting(config: SiloConfig) -> tuple[WaitingJob, ...]:
    """The jobs that were offered and not accepted yet, the oldest first.

    Those about which a person decided are among them, with a decision that holds under the policy
    of now.
    """
    policy = policies.load(config.policy, config.names).digest
    made = decisions(config.directory)
    found = []
    for path, since in _times(config.directory, OFFERS).items():
        if (signed := _content(path)) is None:
            continue
        decision = made.get(path.stem)
        if decision is not None and not _holds(decision, signed, policy):
            decision = None
        found.append(WaitingJob(path.stem, signed, since / 1e9, decision))
    return tuple(found)


def gone(directory: Path) -> dict[str, float]:
    """The jobs that waited and are no longer offered, and since when they did, as ``since``."""
    return {path.stem: since / 1e9 for path, since in _times(directory, GONE).items()}


def offered(config: SiloConfig, job: str) -> bytes:
    """The signed file of a job that waits; LocalError where there is none of this name."""
    signed = _content(_offer(config.directory, job))
    if signed is None and job in gone(config.directory):
        raise LocalError(f"job {job!r} is no longer offered; should it be again, it waits again")
    if signed is None:
        names = ", ".join(each.stem for each in _offers(config.directory)) or "none"
        raise LocalError(f"no job {job!r} waits for a person here; those that do: {names}")
    return signed


def declined(directory: Path) -> dict[str, float]:
    """The jobs that the policy does not allow, and that a person may have it allow.

    And since when, as ``since``. The ledger has those that it declined, and not those that came
    before it had any rule.
    """
    return {path.stem: since / 1e9 for path, since in _times(directory, DECLINED).items()}


def declined_offer(directory: Path, job: str) -> bytes:
    """The signed file of a job that the policy declined; LocalError where there is none."""
    signed = _content(_offer(directory, job, DECLINED))
    if signed is None:
        names = ", ".join(declined(directory)) or "none"
        raise LocalError(
            f"the policy here has declined no job {job!r}; those that it has: {names}. Look at"
            " staddle silo jobs: a job that the policy allows already runs without a question."
            " Otherwise the agent has to run, and an operator to have submitted the job"
        )
    return signed


@dataclass(frozen=True)
class ShownJob:
    """What a person has seen: a job's signed bytes, and the digest of the policy of then."""

    job: str
    signed: bytes
    policy: str


def approve(config: SiloConfig, shown: ShownJob, by: str = "") -> JobDecision:
    """Let the silo take part in a job, as it was shown.

    ``by`` says who decides; the operating system's name for the user if left out. LocalError where
    no such job waits, or another one of its name does by now.
    """
    return _decide(config, shown, "approved", "", by)


def decline(config: SiloConfig, shown: ShownJob, reason: str = "", by: str = "") -> JobDecision:
    """Keep the silo out of a job, like ``approve``; the reason is for the silo's own people."""
    return _decide(config, shown, "declined", reason, by)


def _user() -> str:
    # Not of the environment, which anything may have set.
    try:
        return str(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:  # of a container, whose users may have no names
        return f"user {os.getuid()}"


def _decide(
    config: SiloConfig, shown: ShownJob, answer: Answer, reason: str, by: str
) -> JobDecision:
    job, signed = shown.job, shown.signed
    if offered(config, job) != signed:
        raise LocalError(f"another job named {job!r} is offered by now; look at it first")
    written = {
        "answer": answer,
        "signed": sha256(signed).hexdigest(),
        "policy": shown.policy,
        "time": utc_now().isoformat(timespec="seconds"),
        "reason": reason,
        "by": by or _user(),
    }
    decision = validate(written, JobDecision, f"the decision about job {job!r}")
    folder = config.directory / FOLDER
    # Two people may decide at once, about two jobs.
    with claimed(folder):
        made = {**decisions(config.directory), job: decision}
        checked_file.write_json(folder / DECISIONS, JobDecisions(jobs=made))
    return decision

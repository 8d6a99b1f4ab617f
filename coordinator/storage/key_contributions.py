"""What silos contribute to the keys that they share by job; the coordinator passes it on.

It never has a key itself. Each contribution is checked before it is stored
(security/blind/group_key.py) and durable before it is accepted; a silo that sends the same again
gets the same answer, one that sends another is refused. Nothing is passed on before all of the
job's silos contributed, so that a silo which asks receives all of it at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from ...algorithms.job.job import Job
from ...errors import RefusedError
from ...proto import secure_pb2 as pb
from ...proto.convert.group_key import Contributed, contributed_from_wire, contributed_to_wire
from ...proto.convert.secagg_sent import step_codes
from ...security.blind.group_key import (
    Epoch,
    KeyContribution,
    Relayed,
    check_contribution,
    parts_of,
)
from ...security.blind.sealing import Letters
from ...security.faults import Code
from ...security.identity import roster as rosters
from ...security.identity.selection import without
from ...security.identity.signers import Signers
from .database import Database

NO_SESSION = b"-"  # in place of one: what is kept holds none


class KeyContributions:
    """Contributions to the keys of all jobs, by the silos as this coordinator's roster has them.

    Everything that it keeps is public, or sealed to single silos.
    """

    def __init__(self, roster: rosters.Roster, database: Database) -> None:
        self._roster = roster
        self._database = database

    def fault(self, job: Job) -> str:
        """Why a keyed job cannot continue under this roster, and what to do; "" if it can."""
        # A group key is of these members: others, or other keys, begin a new epoch (security rule
        # 13).
        gone = sorted(set(job.silos) - self._roster.silo_ids)
        held = {kept.members for kept in self._database.contributions(job.name).values()}
        if not gone and held <= {self._members(job)}:
            return ""
        why = "a silo or the coordinator has other keys than when its silos made the one they share"
        if gone:
            why = (
                f"the roster no longer has {', '.join(gone)}, and the key that its silos share"
                " takes all of them"
            )
        return f"{why}; submit it again under a new name"

    def check_silo(self, job: Job, silo: str) -> None:
        """RefusedError where a silo accepts a keyed job, and gave nothing to its key.

        Call it before the acceptance counts.
        """
        if self._database.contribution(job.name, silo) is None:
            # Without its part the other silos would wait for a key that cannot be made.
            why = (
                f"accepts job {job.name!r} and gave nothing to the key that its silos share; call"
                " Contribute first"
            )
            raise RefusedError(silo, "SECURE", f"{Code.ORDER}: {why}")

    def taken(self, job: Job, silo: str, message: pb.Contributed) -> bytes | None:
        """The bytes of a contribution to keep, None where they are kept; the steps run in order.

        RefusedError says why it cannot be taken.
        """
        # (1) It is well formed, and in the silo's own name.
        with step_codes():
            given = contributed_from_wire(silo, message)
        # (2) The job has a key, and the silo contributes to it once.
        if not job.keyed:
            raise RefusedError(
                silo,
                "SECURE",
                f"{Code.ORDER}: contributes to a key of job {job.name!r}, which needs none",
            )
        # Another contribution would make another key, of which some silos may have the first.
        body = _dumped(given)
        kept = self._database.contribution(job.name, silo)
        if kept is not None and kept.body == body:
            return None
        if kept is not None:
            why = f"contributes to the key of job {job.name!r} a second time, and not the same"
            raise RefusedError(silo, "SECURE", f"{Code.EQUIVOCATION}: {why}")
        # (3) It is signed for this job and its members, and has a piece for each of the others.
        epoch = Epoch.of(self._roster, job.silos, job.digest)
        with step_codes():
            check_contribution(
                epoch, given.contribution, given.pieces, Signers.of(self._roster, job.silos)
            )
        return body

    def keep(self, job: Job, silo: str, body: bytes) -> None:
        """Store the result of ``taken``, inside the caller's transaction."""
        self._database.add_contribution(job.name, silo, self._members(job), body)

    def _members(self, job: Job) -> str:
        return rosters.members_digest(self._roster, job.silos)

    def bodies(self, job: Job) -> Mapping[str, bytes]:
        """All silos' contributions to the key of a job; empty until all are here.

        Sorted by silo, as serialised messages without a session.
        """
        kept = self._database.contributions(job.name)
        return (
            # All or nothing: some of the contributions do not make the key.
            {silo: kept[silo].body for silo in sorted(kept)}
            if kept.keys() == set(job.silos)
            else {}
        )

    def parts(self, job: Job) -> bytes:
        """The parts that made the key of a job, as its silos find them; empty where it has none."""
        bodies = self.bodies(job) if job.keyed else {}
        return (
            parts_of(_loaded(silo, body).contribution for silo, body in bodies.items())
            if bodies
            else b""
        )


def relayed(bodies: Mapping[str, bytes], silo: str) -> tuple[Relayed, ...]:
    """Contributions of the other silos, by id, each with the letter for this silo.

    Letters for other silos are left out.
    """
    given = _opened(tuple(bodies.items()))
    return tuple(
        Relayed(given[other][0], given[other][1].to(silo)) for other in without(bodies, (silo,))
    )


# Read once for all silos of a job, which ask together: each contribution has a letter for each of
# them, so that to read all for each would be cubic in their number.
@lru_cache(maxsize=1)
def _opened(bodies: tuple[tuple[str, bytes], ...]) -> Mapping[str, tuple[KeyContribution, Letters]]:
    given = {silo: _loaded(silo, body) for silo, body in bodies}
    return {silo: (each.contribution, Letters(each.pieces)) for silo, each in given.items()}


def _dumped(given: Contributed) -> bytes:
    message = contributed_to_wire(replace(given, session=NO_SESSION))
    message.ClearField("session")
    return message.SerializeToString(deterministic=True)


def _loaded(silo: str, body: bytes) -> Contributed:
    message = pb.Contributed.FromString(body)
    message.session = NO_SESSION
    return contributed_from_wire(silo, message)

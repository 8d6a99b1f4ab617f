"""A federation on one machine, made by the same functions as a real one.

::
    <folder>/roster.json         signed by the one founder
    <folder>/founder/ operator/  their keys
    <folder>/operator.toml       for `staddle job submit` and its like; founder.toml
    <folder>/jobs/<name>.toml    what the operator wrote; <name>.json is what the operator signed
    <folder>/coordinator/        keys, coordinator.toml, state
    <folder>/silo-1/ …           keys, silo.toml, policy.toml, data.npz, state (personal parts,
                                 ledger, reports)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...algorithms.data.dataset import Dataset, save_npz, split
from ...algorithms.job.job import Job, JobFile
from ...algorithms.job.security import FEWEST
from ...algorithms.tasks.task import histogram
from ...errors import LocalError
from ...files.documents import canonical_json, parse_json, read_bytes, validate, write_atomic
from ...security.identity import roster as rosters
from ...security.identity.domains import JOB
from ...security.identity.keys import Role, RosterEntry, create_keys, load_keys
from ...security.identity.signed_document import sign_document
from ...silo.job_folder import split_key
from ..policy.draft import draft
from ..privacy.noise import least_clip_exponent, planned
from ..terminal.toml import to_toml

FEDERATION = "local"
TEST_FRACTION = 0.25


@dataclass(frozen=True)
class LocalFederation:
    """Paths of a federation on one machine; all follow from ``folder``."""

    folder: Path
    silos: tuple[str, ...]
    founder: str  # fingerprint of its protocol key

    @property
    def coordinator_config(self) -> Path:
        """The coordinator's TOML file."""
        return self.folder / "coordinator" / "coordinator.toml"

    def silo_config(self, silo: str) -> Path:
        """A silo's TOML file."""
        return self.folder / silo / "silo.toml"

    @property
    def name(self) -> str:
        """What its roster calls it."""
        return FEDERATION

    def keys(self, silo: str) -> Path:
        """A silo's folder of keys.

        Private keys lie there, for their owner alone.
        """
        return self.folder / silo / "keys"

    def state(self, silo: str) -> Path:
        """A silo's state folder: ledger, personal parts, reports."""
        return self.folder / silo / "state"


def make(folder: Path, silos: Sequence[str]) -> LocalFederation:
    """Keys for everybody, and a roster that the founder has signed.

    LocalError for a folder that is not empty, so that no key is overwritten. In a real federation,
    each party makes its keys on its own machine.
    """
    if folder.exists() and not folder.is_dir():
        raise LocalError(f"{folder}: not a folder; choose a new or an empty one")
    if folder.exists() and any(folder.iterdir()):
        raise LocalError(
            f"{folder}: not empty; choose another folder, so that no key is overwritten"
        )

    members = [("operator", Role.OPERATOR), ("coordinator", Role.COORDINATOR)]
    members += [(silo, Role.SILO) for silo in silos]
    founder = _entry(folder, "founder", Role.FOUNDER)
    # One founder suffices here; a real federation should have several.
    roster = rosters.new(FEDERATION, [founder], 1)
    for member, role in members:
        roster = rosters.add(roster, _entry(folder, member, role))
    rosters.save(rosters.sign(roster, load_keys(folder / "founder")), folder / "roster.json")
    return LocalFederation(folder, tuple(silos), founder.protocol_fingerprint)


def opened(folder: Path) -> LocalFederation:
    """The federation that ``make`` made there; LocalError if its roster cannot be read."""
    roster = rosters.load(folder / "roster.json")
    (founder,) = roster.having(Role.FOUNDER)
    silos = tuple(entry.id for entry in roster.silos)
    return LocalFederation(folder, silos, founder.protocol_fingerprint)


def roster_with(federation: LocalFederation, silo: str) -> rosters.Roster:
    """Make keys for one more silo; the next roster, with it and signed, which nobody has yet."""
    folder = federation.folder
    roster = rosters.load(folder / "roster.json")
    following = rosters.add(roster, _entry(folder, silo, Role.SILO))
    return rosters.sign(following, load_keys(folder / "founder"))


def _entry(folder: Path, member: str, role: Role) -> RosterEntry:
    """Make a member's keys, which lie in a folder within its own if that holds more than keys."""
    place = folder / member
    if role in (Role.COORDINATOR, Role.SILO):
        place /= "keys"
    return create_keys(place, member, role, f"organisation of {member}")


def sign_job(federation: LocalFederation, document: Mapping[str, Any]) -> Job:
    """Write a job file and have the operator sign it.

    Returns the job as silos will read it. Existing files are replaced.
    """
    return sign_file(federation, write_job(federation, document))


def write_job(federation: LocalFederation, document: Mapping[str, Any]) -> Path:
    """Write a job file into the folder ``jobs``; its path. An existing file is replaced."""
    folder = federation.folder / "jobs"
    folder.mkdir(exist_ok=True)
    source = folder / f"{document['name']}.toml"
    write_atomic(source, to_toml(document).encode(), 0o644)
    return source


def sign_file(federation: LocalFederation, source: Path) -> Job:
    """Have the operator sign a job file; the signed job lies next to it, as ``.json``."""
    job = Job.from_toml(source).for_federation()
    # As ``staddle job sign`` does: silos price a job by the noise that it names.
    if job.privacy is not None:
        job = planned(job, str(source))
    roster = rosters.load(federation.folder / "roster.json")
    signed = sign_document(job.document(), roster, load_keys(federation.folder / "operator"), JOB)
    write_atomic(source.with_suffix(".json"), canonical_json(signed) + b"\n", 0o644)
    return job


def blind_where_it_can(
    federation: LocalFederation, document: Mapping[str, Any], shards: Sequence[Dataset]
) -> dict[str, Any]:
    """A job's document, blind where it can be.

    It needs four silos or more, and still more if rounds are of some of them. With private weights,
    or with the training records of ``shards`` declared where a method compares labels.
    """

    def security(job: Job) -> dict[str, Any]:
        if job.method().compares_labels:
            return _declared(federation, job, shards)
        return _private_weights(job, [*map(len, shards)])

    return _blind(document, security)


def blind_with_private_weights(
    document: Mapping[str, Any], records: Sequence[int]
) -> dict[str, Any]:
    """The same for a method that compares no labels; ``records`` are the numbers of each silo's."""
    return _blind(document, partial(_private_weights, records=records))


def _blind(
    document: Mapping[str, Any], security: Callable[[Job], Mapping[str, Any]]
) -> dict[str, Any]:
    job = Job.from_file(validate(dict(document), JobFile, "the job"), "the job")
    # The default of one assumed colluder takes more than three silos (security rule 6).
    if len(job.silos) <= FEWEST:
        return dict(document)
    # A blind job with a smaller min_cohort is invalid.
    least = max(job.min_cohort, FEWEST)
    made = {**document, "min_cohort": least, "security": security(job)}
    try:
        Job.from_file(validate(made, JobFile, "the job"), "the job").document()
    except LocalError:  # something in it has no blind form, or it takes more silos
        return dict(document)
    return made


def _private_weights(job: Job, records: Sequence[int]) -> dict[str, Any]:
    """Its security with private weights; some of these records will be for tests."""
    security: dict[str, Any] = {"secure_aggregation": "required", "weight_most": max(records)}
    if job.privacy is not None:  # noisy counts may be more, or far less
        security["weight_most"] = 2 * max(records)
        security["clip_exponent"] = max(job.security.clip_exponent, least_clip_exponent(job))
    elif all(part["exchange"] != "sum.ratio" for part in _given(job)):  # whose weights are by class
        security["weight_least"] = max(1, min(records) // 2)
    return security


def _declared(federation: LocalFederation, job: Job, shards: Sequence[Dataset]) -> dict[str, Any]:
    """Its security with the training records of each silo declared, in all and of each class.

    In a real federation each silo tells its own; here each silo's split is drawn before its agent
    starts.
    """
    own = {}
    for silo, shard in zip(federation.silos, shards, strict=True):
        federation.state(silo).mkdir(exist_ok=True)
        # The agent will make the same split: it finds the key in its state folder.
        train, _ = split(shard, split_key(federation.state(silo)), TEST_FRACTION)
        # Jobs declare training records only.
        own[silo] = histogram(job.task, train.y, job.model.width).tolist()
    security: dict[str, Any] = {
        "secure_aggregation": "required",
        "weights": "public",
        "class_counts": own,
    }
    security["counts"] = {silo: sum(counts) for silo, counts in own.items()}
    if any(part["exchange"].startswith("mix") for part in _given(job)):
        security["mix"] = "directed"
    return security


def _given(job: Job) -> list[Mapping[str, Any]]:
    return [part for phase in job.document()["schema"] for part in phase["up"]]


def write_coordinator(
    federation: LocalFederation,
    jobs: Sequence[str],
    timing: Mapping[str, float],
    listen: str = "127.0.0.1:0",
) -> None:
    """The coordinator's configuration: these jobs in turn.

    ``jobs`` are names of signed jobs. With port 0 the system chooses a port, which the daemon logs.
    Whoever makes a local federation lets all its jobs run the code that they name.
    """
    signed = [
        parse_json(read_bytes(path), str(path))["document"]
        for path in (federation.folder / "jobs").glob("*.json")
    ]
    packages = {package["name"] for job in signed for package in job.get("packages", ())}
    document = {
        "version": 1,
        "listen": listen,
        "directory": "state",
        "keys": "keys",
        "roster": "../roster.json",
        "jobs": [f"../jobs/{name}.json" for name in jobs],
        "packages": sorted(packages),
        "log": "json",
        "trust": _trust(federation),
        "timing": dict(timing),
    }
    write_atomic(federation.coordinator_config, to_toml(document).encode())


def write_operator(
    federation: LocalFederation, address: str, member: Literal["operator", "founder"] = "operator"
) -> Path:
    """The operator's configuration, or the founder's; its path.

    ``address`` as host:port.
    """
    path = federation.folder / f"{member}.toml"
    document = {
        "version": 1,
        "coordinator": address,
        "keys": member,
        "roster": "roster.json",
        "trust": _trust(federation),
    }
    write_atomic(path, to_toml(document).encode())
    return path


def write_silo(
    federation: LocalFederation, silo: str, address: str, data: Dataset, jobs: Sequence[Job]
) -> None:
    """A silo's configuration, its records, and a policy that allows only what these jobs need.

    ``address`` as host:port. The silo's state folder exists afterwards.
    """
    save_npz(federation.folder / silo / "data.npz", data)
    configure_silo(federation, silo, address, {"file": "data.npz"}, policy_text(jobs))


def configure_silo(
    federation: LocalFederation,
    silo: str,
    address: str,
    data: Mapping[str, Any],
    policy: str,
) -> None:
    """The same for records that are there: ``data`` is the silo's table [data]."""
    write_atomic(federation.folder / silo / "policy.toml", policy.encode())
    document = {
        "version": 1,
        "coordinator": address,
        "directory": "state",
        "keys": "keys",
        "roster": "../roster.json",
        "policy": "policy.toml",
        "log": "json",
        "trust": _trust(federation),
        "data": {**data, "test_fraction": TEST_FRACTION},
    }
    write_atomic(federation.silo_config(silo), to_toml(document).encode())
    federation.state(silo).mkdir(exist_ok=True)


def policy_text(jobs: Sequence[Job]) -> str:
    """A policy with one rule per method and part, tensors named by their first segment.

    Whoever makes a local federation runs all of it, and so is the person who says that its
    coordinator is trusted.
    """
    return draft(jobs, "64MiB", trust=True)


def _trust(federation: LocalFederation) -> dict[str, Any]:
    return {"federation": FEDERATION, "founders": [federation.founder], "threshold": 1}

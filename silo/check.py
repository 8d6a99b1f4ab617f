"""``staddle silo check`` tries all that the agent needs, before it starts.

It changes nothing and trains nothing. ``staddle silo run`` begins with those of its checks that
cost little (``before_start``).
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..algorithms.data.dataset import Dataset
from ..algorithms.data.lazy import LazyRecords
from ..algorithms.data.options import DataTable, UndeclaredError
from ..algorithms.exchange.parts import contribution_items, upload_items
from ..algorithms.job.job import Job
from ..algorithms.models.inputs import shown as inputs_text
from ..algorithms.numerics.devices import check_precision, find
from ..algorithms.tasks.task import named_array
from ..algorithms.training.record_checks import range_advice
from ..errors import ExhaustedError, LocalError, RefusedError
from ..files.documents import read_bytes
from ..proto.channel import checked_address
from ..security import preflight
from ..security.dp.rdp import shown
from ..security.identity.keys import Keys, Role
from ..security.identity.roster import Roster
from ..security.identity.roster_in_use import RosterInUse
from ..security.ledger.records import Intent, ProtocolMessage, SumSigned
from ..security.policy import policy as policies
from ..security.policy.file import BudgetTable as DatasetTable
from ..security.policy.policy import SiloPolicy
from ..security.preflight import PreflightReport
from . import config as configs
from . import connectivity
from .admission import budget as budgets
from .admission.checks import admit
from .admission.private_jobs import advice
from .admission.signed_sets import objection_to
from .admission.start_weights import WeightsNeededError, start_objection
from .config import SiloConfig
from .job_folder import JobFolder, check_same_records, kept_split_key, recorded
from .training.launched import processes

# of a job: after the last round, after the one before that counted, and the model in the end
STATES = 3


def check(
    path: Path,
    jobs: Sequence[Path] = (),
    in_use: Callable[[SiloConfig], RosterInUse] = SiloConfig.roster_in_use,
) -> PreflightReport:
    """Findings in running order; a step that needs one that failed is skipped.

    ``jobs`` are files of signed jobs, judged as if they were offered now, by the roster ``in_use``.
    Failures are findings, not exceptions.
    """
    report = PreflightReport()
    config = report.look("configuration", partial(_config, path))
    if config is None:
        return report
    keys, roster, policy = _own_files(report, config, in_use, _data)
    report.look(
        "ledger", partial(preflight.ledger, config.directory, config.trust.federation, config.keys)
    )
    tables = policy.file.dataset if policy else {}
    for dataset in filter(tables.__contains__, config.names.own):
        report.look("privacy", partial(spent_of, dataset, tables[dataset], config))

    # without keys, roster and policy nothing can be said of a job
    largest = 0
    for job in jobs:
        if keys is None or roster is None or policy is None:
            report.skip("job", "keys, roster and policy")
            continue
        found = report.look("job", partial(_job, job, keys, roster, policy, config))
        if found:
            largest = max(largest, footprint(found, keys.entry.id))
    report.look(
        "disk", partial(preflight.disk, config.directory, largest, "the largest of the jobs")
    )
    _reach(report, config, keys, roster)
    return report


def before_start(config: SiloConfig) -> PreflightReport:
    """The findings of ``check`` on what the agent begins with.

    What it reads anyway is left to it: the ledger, and the records for each job.
    """
    report = PreflightReport()
    _own_files(report, config, SiloConfig.roster_in_use, _first_records)
    report.look("disk", partial(preflight.disk, config.directory, 0, ""))
    return report


def _own_files(
    report: PreflightReport,
    config: SiloConfig,
    in_use: Callable[[SiloConfig], RosterInUse],
    data: Callable[[SiloConfig, str], tuple[Any, str]],
) -> tuple[Keys | None, Roster | None, SiloPolicy | None]:
    places = config.keys, config.directory
    keys, roster = preflight.identity(
        report, *places, partial(in_use, config), config.trust, Role.SILO
    )
    policy = report.look("policy", partial(_policy, config))
    for name in config.sources:
        report.look("data", partial(config.naming(name)(data), config, name))
    report.look("split", partial(_split, config))
    for own in config.weights:
        report.look("weights", partial(_weights, own))
    return keys, roster, policy


def _reach(
    report: PreflightReport, config: SiloConfig, keys: Keys | None, roster: Roster | None
) -> None:
    if keys is None or roster is None:
        report.skip("reach", "keys and roster")
        return
    address, coordinator = config.coordinator, roster.coordinator
    if not report.look("reach", partial(connectivity.connect, address, coordinator, config.proxy)):
        report.skip("handshake", "reach")
        report.skip("health", "reach")
    elif not report.look(
        "handshake",
        partial(connectivity.handshake, address, keys.folder, coordinator, config.proxy),
    ):
        report.skip("health", "the handshake")
    else:
        report.look(
            "health", partial(connectivity.health, address, keys, coordinator, config.proxy)
        )


def _config(path: Path) -> tuple[SiloConfig, str]:
    config = configs.load(path)
    checked_address(config.coordinator)
    training = config.training
    # The agent does not start on a missing device, or with a precision that it lacks. Trainers
    # apart from it may be on another machine.
    if training.launcher != "thread":
        processes(config).check()
        shared = f" in {training.processes} processes" * (training.processes > 1)
        return config, f"{path}; trains by {training.launcher}{shared}, on {training.device}"
    device = find(training.device)
    check_precision(device, training.precision)
    return config, f"{path}; trains on {device} in {training.precision}"


def _policy(config: SiloConfig) -> tuple[SiloPolicy, str]:
    policy = policies.load(config.policy, config.names)
    budgets.check_config(config)
    check_same_records(config.directory / "jobs", config.names)
    rules = len(policy.file.allow)
    said = (
        f"{rules} rules"
        if rules
        else "no rule, so nothing may leave and every job waits for you (staddle silo accept)"
    )
    return policy, f"{config.policy}: {said}; sha256 {policy.digest[:12]}…"


def spent_of(dataset: str, asked: DatasetTable, config: SiloConfig) -> tuple[bool, str]:
    """How much of the data set's budget is spent."""
    cost, jobs = "0", 0
    for found in budgets.read(config):
        if found.dataset == dataset and found.budget:
            cost, jobs = shown(found.budget.spent), len(found.budget.jobs)
    most = f"{asked.epsilon:f} at delta = {asked.delta:f}"
    return (
        True,
        f"data set {dataset!r}: epsilon = {cost} of {most} is spent; jobs that spent: {jobs}",
    )


def _first_records(config: SiloConfig, name: str) -> tuple[bool, str]:
    source = config.sources[name]
    source.check_present()
    source.check_first()
    return True, source.where


def _data(config: SiloConfig, name: str) -> tuple[Dataset | None, str]:
    """Counts and shapes; never a value."""
    # Images have the size that a job's model asks for, so without a job they cannot be read.
    source = config.sources[name]
    source.check_present()
    where = f"data set {name!r}, {source.where}" if config.datasets else source.where
    if source.needs_model:
        said = f"{where}: {source.examine()}{_meanings(source)}"
        return None, f"{said}; --job JOB.json reads them in the size of a job's model"
    gaps = ""
    try:
        records = source.load(None)
    except UndeclaredError:
        records, gaps = source.filled().load(None), _gaps(source.gaps())
    shape = inputs_text(records.inputs) if records.inputs else list(records.x.shape[1:])
    said = f"{where}: {len(records)} records of shape {shape}, {_truths(records)}"
    said += gaps + _meanings(source)
    if isinstance(records.x, LazyRecords):
        said += "; read when they are used, so not each of them was looked at"
    return records, said


def _gaps(missing: Mapping[str, int]) -> str:
    columns = ", ".join(f"{name!r} {count:,}" for name, count in missing.items())
    return (
        f"; values are missing: {columns}. A job whose features say what a missing value counts as"
        " fills them in (--job JOB.json says whether one does), and this silo declines any other."
        " To take part in all, complete them, or say under data.missing what they count as"
    )


def _meanings(source: DataTable) -> str:
    return f"; {source.meanings}: correct data.classes if not so" if source.meanings else ""


def _truths(records: Dataset) -> str:
    """What is true of the records, as far as a data set says without a job."""
    y = records.y
    if y.dtype != torch.int64 or y.ndim > 1:
        return f"targets {named_array(y.dtype, tuple(y.shape[1:]))}"
    named = "classes named" if records.class_names else "classes not named"
    return f"{len(set(y.tolist()))} classes, {named}"


def _weights(own: configs.Weights) -> tuple[bool, str]:
    # Only ``--job`` checks the values, which have to fit the job.
    with own.file.open("rb"):
        return True, f"{own.file}: for part {own.part!r} of jobs {', '.join(own.jobs)}"


def _job(
    path: Path, keys: Keys, roster: Roster, policy: SiloPolicy, config: SiloConfig
) -> tuple[Job, str]:
    """The agent's answer, were this job offered now; LocalError where it would decline."""
    # The checks are the agent's own, so that both say the same.
    signed = read_bytes(path)
    kept = kept_split_key(config.directory)
    # the agent draws its own
    key = kept or secrets.token_bytes(32)
    try:
        admitted = admit(signed, keys.entry.id, roster, policy, config, key)
        job, said = admitted.job, ""
    except WeightsNeededError as needed:
        admitted, job, said = None, needed.job, _would_download(path, needed)
    except RefusedError as error:
        raise LocalError(
            f"{path}: this silo would decline the job, {error.code}: {error.why}"
        ) from error
    if job.privacy is not None:
        try:
            budgets.check_room(job, policy.on(job.dataset), config)
        except ExhaustedError as error:
            raise LocalError(f"{path}: this silo would decline the job, POLICY: {error}") from error
    own = policy.on(job.dataset)
    signed_sums = recorded(config.directory, SumSigned)
    why = objection_to(job, keys.entry.id, signed_sums, roster, own)
    why = why or start_objection(job, config.directory / "jobs", policy)
    if why:
        raise LocalError(f"{path}: this silo would decline the job, POLICY: {why}")
    folder = JobFolder(config.directory / "jobs" / job.name)
    # Accepted here already; after its first round, ``check_new`` would refuse it.
    if folder.signed() == signed:
        return (
            job,
            f"{path}: {job.name!r} was accepted here, {folder.rounds_done} of its rounds are over",
        )
    left = {each.job_digest for each in signed_sums}
    left.update(each.job_digest for each in recorded(config.directory, Intent))
    left.update(each.job_digest for each in recorded(config.directory, ProtocolMessage))
    folder.check_new(signed, left.__contains__)
    if admitted is None:
        return job, said
    on = f" of data set {job.dataset!r}" if job.dataset else ""
    counts = f"{len(admitted.train)} records{on} to train on, {len(admitted.test)} to test on"
    if kept is None:
        # The split above used a temporary key; the agent will draw another.
        counts = f"about {counts}: which ones is drawn at the first start"
    ranges = range_advice(job, admitted.train, admitted.test)
    filled = [own.name for own in job.features if own.missing is not None]
    fills = [f"the job fills in missing values of {', '.join(filled)}"] if filled else []
    said = "; ".join((counts, *fills, *advice(job, len(admitted.train)), *ranges))
    return job, f"{path}: {job.name!r}, {job.method_name}: this silo would accept; {said}"


def _would_download(path: Path, needed: WeightsNeededError) -> str:
    return (
        f"{path}: {needed.job.name!r}, {needed.job.method_name}: this silo would download the job's"
        f" file of weights, {preflight.size(needed.weights.expected[1])}, and then look at it and"
        f" at its records; to check them now, put the file at {needed.path}"
    )


def _split(config: SiloConfig) -> tuple[bool, str]:
    """The secret of the split is there, or no job was accepted yet."""
    known = kept_split_key(config.directory) is not None
    said = "holds" if known else "none yet; it is drawn when the first job is offered"
    return True, f"{config.directory / 'split.key'}: {said}"


def footprint(job: Job, silo: str) -> int:
    """Bytes that a job takes on this silo's disk at most: its states, and a round's uploads.

    Computed from shapes, for the largest phase.
    """
    # Shapes are enough, and a file of weights may not be here yet.
    with torch.device("meta"):
        state = sum(map(_module_bytes, job.method().modules(silo).values()))
    items = contribution_items if job.security.required else upload_items
    uploads = (items(job.up(start)) for start in job.phase_starts)
    largest = max(sum(item.spec.nbytes for item in upload) for upload in uploads)
    # the outbox is written before the one of the round before it goes
    return STATES * state + 2 * largest


def _module_bytes(module: nn.Module) -> int:
    tensors = chain(module.parameters(), module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

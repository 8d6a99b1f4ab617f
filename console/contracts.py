"""What the jobs of a silo say of a record, and where its tables differ from that."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..algorithms.data.features import Feature
from ..algorithms.data.survey import contract_faults, survey
from ..commands.silo.data import contract_of
from ..silo.config import SiloConfig
from ..silo.job_folder import JobFolder
from ..silo.status import SiloJobStatus

TABLES = ("csv", "parquet")  # kinds whose columns can be compared without a model


@dataclass(frozen=True)
class ContractLine:
    """One job that declares features; ``faults`` are known once the records were compared."""

    job: str
    dataset: str
    features: tuple[str, ...]
    faults: Sequence[str] = ()
    checked: bool = False
    declared: tuple[Feature, ...] = field(default=(), repr=False)


def contract_lines(
    config: SiloConfig, jobs: Sequence[SiloJobStatus], found: Mapping[str, Sequence[str]]
) -> Iterator[ContractLine]:
    """The jobs that declare features; ``found`` are differences by job, of the last checks."""
    for job in jobs:
        folder = JobFolder(config.directory / "jobs" / job.job)
        declared = () if job.problem else contract_of(folder.path / "job.json").features
        if declared:
            yield ContractLine(
                job=job.job,
                dataset=folder.dataset or config.dataset,
                features=tuple(map(_shown, declared)),
                faults=found.get(job.job, ()),
                checked=job.job in found,
                declared=declared,
            )


def differences(config: SiloConfig, line: ContractLine) -> list[str] | None:
    """Where the data set's table differs, read whole; None for data that are no table."""
    source = config.sources.get(line.dataset)
    file = getattr(source, "file", None)
    if source is None or file is None or source.kind not in TABLES:
        return None
    form = {
        name: getattr(source, name)
        for name in ("delimiter", "encoding", "decimal")
        if hasattr(source, name)
    }
    return contract_faults(survey(file, **form), line.declared)


def _shown(feature: Feature) -> str:
    """Name, bounds and unit, as the job declares them."""
    if feature.categories is not None:
        return f"{feature.name} (one of {len(feature.categories)})"
    if feature.least is None and feature.most is None:
        return f"{feature.name} (any number)"
    return f"{feature.name} ({feature.low:g} to {feature.high:g} {feature.unit}".rstrip() + ")"

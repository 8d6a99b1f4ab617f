"""From a published table to experiments, one per setting, at the paper's scale or a smaller one.

Fewer clients are a subset of the paper's own. The partition is made for all of them; as many as
asked for take part, spread evenly over it, each with the records that it has at full scale. The
share that is drawn for a round stays, but at least three silos are drawn. With fewer rounds, a
method's step after a share of the rounds comes after the same share.

This module also says which files a setting's records are read from, under the folder that a person
names, and which of them are missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...algorithms.data.sources.public.synthetic import PUBLISHED_SILOS
from ...errors import LocalError
from ...files.documents import Strict, validate
from ..experiment.chosen_method import ChosenMethod
from ..experiment.experiment import CheckedExperiment, ExperimentFile, checked
from ..experiment.hints import hint
from ..experiment.options import Data, Partition, PartitionFromFile, below
from .published import NEXT_TO_IT, PaperSetting, PaperTable

SEEDS = 3  # where the paper does not say how many
LEAST_DRAWN = 3  # silos of a round at a smaller scale: of two, each would learn of the other alone
LEAST_CLIENTS = LEAST_DRAWN + 1  # a silo is away then, in settings that draw some


@dataclass(frozen=True)
class Scale:
    """Clients and rounds instead of the paper's; None is the paper's.

    A setting with fewer clients than ``clients`` keeps them all.
    """

    clients: int | None = None
    rounds: int | None = None


FULL = Scale()


class RecordSource(Strict):
    """What of an experiment says where its records are."""

    data: Data
    partition: Partition | None = None


def chosen_settings(table: PaperTable, wanted: Sequence[str]) -> tuple[PaperSetting, ...]:
    """The settings of these names; all settings where no name is wanted.

    LocalError for an unknown name suggests a known one.
    """
    known = {setting.name: setting for setting in table.settings}
    if not known:
        raise LocalError(
            f"{table.path}: none of its columns can be run here; --list {table.path} says why"
        )

    # a setting that is named twice runs once
    chosen = dict.fromkeys(wanted or known)
    for name in chosen:
        _check_known(name, known, f"{table.path}: no setting")
    return tuple(map(known.__getitem__, chosen))


def chosen_labels(table: PaperTable, wanted: Sequence[str]) -> frozenset[str]:
    """The labels of the wanted methods (all where none is), and of those that always run.

    LocalError for a label that no row of the table has.
    """
    names: dict[str, str] = {}
    for row in table.all_rows:
        for method in row.methods.values():
            # Rows with the same label have the same method.
            names[method.title] = method.name

    chosen = set(wanted or names)
    for label in wanted:
        _check_known(label, names, f"{table.path}: no method that runs here")

    # every reproduction has the methods that a reader compares with
    for label, name in names.items():
        # By name, since labels differ from paper to paper.
        if name in NEXT_TO_IT:
            chosen.add(label)
    return frozenset(chosen)


def experiment_of(
    table: PaperTable,
    setting: PaperSetting,
    folder: Path,
    scale: Scale = FULL,
    labels: frozenset[str] | None = None,
    seeds: Sequence[int] = (),
) -> CheckedExperiment:
    """The experiment of one setting, its data in a folder.

    LocalError where a method cannot work in it.

    Without ``labels`` all methods run; without ``seeds``, as many as in the paper. The folder is
    not read.
    """
    methods: dict[str, ChosenMethod] = {}
    for row in table.all_rows:
        method = row.methods.get(setting.name)
        if method is None:
            continue
        if labels is not None and method.title not in labels:
            continue
        # the scale's rounds are for all methods; a method's own would otherwise override them
        if scale.rounds is not None:
            method = method.model_copy(update={"rounds": None})
        methods[method.title] = method  # two rows may be of one method, scored in two ways

    origin = Path(table.paper) / setting.name
    # Papers may say how many seeds they used, but not which.
    seeds_of_paper = range(1, (table.seeds or SEEDS) + 1)
    document = {
        "version": 1,
        "name": f"{table.paper}-{setting.name}",
        "seeds": tuple(seeds or seeds_of_paper),
        "methods": tuple(methods.values()),
        **_scaled(setting, scale),
    }
    return checked(origin, validate(document, ExperimentFile, str(origin)), folder)


def records_of(setting: PaperSetting, folder: Path) -> RecordSource:
    """Where the records of a setting are, in a folder.

    For finding what is missing; nothing is read.
    """
    # its rounds and models play no part: the data may be missing, which is why this is asked
    full = _scaled(setting, FULL)
    document = {key: full[key] for key in RecordSource.model_fields if key in full}
    records = validate(document, RecordSource, setting.name)
    data, partition = below(records.data, records.partition, folder)
    return RecordSource(data=data, partition=partition)


def reduced(settings: Sequence[PaperSetting], scale: Scale) -> tuple[str, ...]:
    """The differences from the paper, for people.

    Such as "10 instead of 100 clients"; empty at the paper's own scale.
    """
    # a small setting may stay whole where a large one is reduced: only what is less is named
    clients: list[object] = []
    rounds: list[object] = []
    for setting in settings:
        if _fewer(setting, scale):
            full = _clients(setting) or "all"
            clients.append(full)
        own = setting.document["rounds"]
        if scale.rounds not in (None, own):
            rounds.append(own)

    differences = []
    if clients:
        full = _or(clients)
        differences.append(f"{scale.clients} instead of {full} clients")
    if rounds:
        full = _or(rounds)
        differences.append(f"{scale.rounds} instead of {full} rounds")
    return tuple(differences)


def _scaled(setting: PaperSetting, scale: Scale) -> dict[str, Any]:
    document = dict(setting.document)
    # Copy it: all callers share the table.
    data = dict(document["data"])
    if data.get("kind") == "torchvision":  # whose sets lie in the folder side by side
        data = {"folder": ".", **data}

    clients = _fewer(setting, scale)
    if clients is not None:
        # the partition is made for all clients, so each keeps the records that it has at full scale
        if "partition" in document:
            document["partition"] = {**document["partition"], "keep": clients}
        else:  # synthetic records are drawn silo by silo
            data["silos"] = clients

        # a tenth of ten clients is one, and a round of one silo tells that silo's model to all
        if document.get("participation", 1.0) < 1:
            least = document.get("min_cohort", 0)
            document["min_cohort"] = max(least, LEAST_DRAWN)

    if scale.rounds is not None:
        document["rounds"] = scale.rounds
    return {**document, "data": data}


def _fewer(setting: PaperSetting, scale: Scale) -> int | None:
    """How many of a setting's clients take part; None for all."""
    fewer = scale.clients
    if fewer is None:
        return None
    # A setting with as many or fewer clients runs whole.
    published = _clients(setting)
    if published is not None and published <= fewer:
        return None

    # fewer could not be drawn from without drawing all
    if fewer < LEAST_CLIENTS:
        raise LocalError(
            f"{fewer} clients of setting {setting.name!r}; {LEAST_CLIENTS} are the least"
        )
    return fewer


def _clients(setting: PaperSetting) -> int | None:
    """The clients at full scale; None where only the data or a file says how many."""
    document = setting.document
    # Without a partition, records are synthetic and have a number of silos themselves.
    partition = document.get("partition")
    if partition is None:
        silos_drawn = document["data"].get("silos", PUBLISHED_SILOS)
        return int(silos_drawn)

    silos: int | Mapping[str, int] | None = partition.get("silos")
    if isinstance(silos, Mapping):  # so many per source of the data
        return sum(silos.values())
    return silos


def _or(values: Sequence[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _check_known(name: str, known: Mapping[str, Any], what: str) -> None:
    if name not in known:
        raise LocalError(f"{what} {name!r}; {hint(name, known)}")


def missing(data: Data, partition: Partition | None) -> tuple[str, ...]:
    """The files that are not there, each with its title and place.

    A file that is there is not opened: a damaged one shows only when it is read.

    Nothing is downloaded: the user puts the official files there.
    """
    absent = []
    lacking = data.lacking()
    if lacking is not None:
        absent.append(f"{data.long_title}: {lacking}")
    if isinstance(partition, PartitionFromFile) and not partition.file.is_file():
        absent.append(f"partition: {partition.file}")
    return tuple(absent)

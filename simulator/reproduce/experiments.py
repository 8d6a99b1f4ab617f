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
from itertools import chain
from pathlib import Path
from typing import Any

from ...algorithms.data.sources.synthetic import PUBLISHED_SILOS
from ...errors import LocalError
from ...files.documents import Strict, validate
from ..experiment.experiment import Experiment, ExperimentFile, checked
from ..experiment.hints import hint
from ..experiment.options import Data, Partition, PartitionFromFile, below
from .published import NEXT_TO_IT, PaperSetting, PaperTable

SEEDS = 3  # where the paper does not say how many
LEAST_DRAWN = 3  # silos of a round at a smaller scale: of two, each would learn of the other alone
LEAST_CLIENTS = LEAST_DRAWN + 1  # a silo is away then, in settings that draw some


@dataclass(frozen=True)
class Scale:
    """Clients and rounds instead of the paper's; None is the paper's."""

    clients: int | None = None
    rounds: int | None = None


FULL = Scale()


class RecordSource(Strict):
    """What of an experiment says where its records are."""

    data: Data
    partition: Partition | None = None


def chosen_settings(table: PaperTable, wanted: Sequence[str]) -> tuple[PaperSetting, ...]:
    """The settings of these names; all settings where no name is wanted."""
    known = {setting.name: setting for setting in table.settings}
    if not known:
        raise LocalError(
            f"{table.path}: none of its columns can be run here; --list {table.path} says why"
        )
    return tuple(
        known[_known(name, known, f"{table.path}: no setting")]
        for name in dict.fromkeys(wanted or known)
    )


def chosen_labels(table: PaperTable, wanted: Sequence[str]) -> frozenset[str]:
    """The labels of the wanted methods (all where none is), and of those that always run."""
    methods = chain.from_iterable(row.methods.values() for row in table.all_rows)
    names = {method.title: method.name for method in methods}
    what = f"{table.path}: no method that runs here"
    asked = {_known(name, names, what) for name in wanted or names}
    always = {label for label in names if names[label] in NEXT_TO_IT}
    return frozenset(asked | always)


def experiment_of(
    table: PaperTable,
    setting: PaperSetting,
    folder: Path,
    scale: Scale = FULL,
    labels: frozenset[str] | None = None,
    seeds: Sequence[int] = (),
) -> Experiment:
    """The experiment of one setting, its data in a folder.

    LocalError where a method cannot work in it.
    """
    in_setting = [row.methods.get(setting.name) for row in table.all_rows]
    methods = {method.title: method for method in in_setting if method is not None}
    if labels is not None:
        methods = {label: methods[label] for label in methods if label in labels}
    chosen = list(methods.values())
    # the scale's rounds are for all methods; a method's own would otherwise override them
    if scale.rounds is not None:
        chosen = [method.model_copy(update={"rounds": None}) for method in chosen]

    origin = Path(table.paper) / setting.name
    of_paper = range(1, (table.seeds or SEEDS) + 1)
    document = {
        "version": 1,
        "name": f"{table.paper}-{setting.name}",
        "seeds": tuple(seeds) or tuple(of_paper),
        "methods": tuple(chosen),
        **_scaled(setting, scale),
    }
    return checked(origin, validate(document, ExperimentFile, str(origin)), folder)


def records_of(setting: PaperSetting, folder: Path) -> RecordSource:
    """Where the records of a setting are, in a folder."""
    full = _scaled(setting, FULL)
    document = {key: full[key] for key in RecordSource.model_fields if key in full}
    records = validate(document, RecordSource, setting.name)
    data, partition = below(records.data, records.partition, folder)
    return RecordSource(data=data, partition=partition)


def reduced(settings: Sequence[PaperSetting], scale: Scale) -> tuple[str, ...]:
    """The differences from the paper, for people."""
    clients: list[object] = []
    rounds: list[object] = []
    for setting in settings:
        if _fewer(setting, scale):
            clients.append(_clients(setting) or "all")
        own = setting.document["rounds"]
        if scale.rounds not in (None, own):
            rounds.append(own)

    differences = []
    if clients:
        differences.append(f"{scale.clients} instead of {_or(clients)} clients")
    if rounds:
        differences.append(f"{scale.rounds} instead of {_or(rounds)} rounds")
    return tuple(differences)


def _scaled(setting: PaperSetting, scale: Scale) -> dict[str, Any]:
    document = dict(setting.document)
    data = dict(document["data"])
    if data.get("kind") == "torchvision":  # whose sets lie in the folder side by side
        data = {"folder": ".", **data}
    if clients := _fewer(setting, scale):
        if "partition" in document:
            document["partition"] = {**document["partition"], "keep": clients}
        else:  # synthetic records are drawn silo by silo
            data["silos"] = clients
        if document.get("participation", 1.0) < 1:
            document["min_cohort"] = max(document.get("min_cohort", 0), LEAST_DRAWN)
    if scale.rounds is not None:
        document["rounds"] = scale.rounds
    return {**document, "data": data}


def _fewer(setting: PaperSetting, scale: Scale) -> int | None:
    """How many of a setting's clients take part; None for all."""
    if scale.clients is None:
        return None
    published = _clients(setting)
    if published is not None and published <= scale.clients:
        return None
    if scale.clients < LEAST_CLIENTS:
        raise LocalError(
            f"{scale.clients} clients of setting {setting.name!r}; {LEAST_CLIENTS} are the least"
        )
    return scale.clients


def _clients(setting: PaperSetting) -> int | None:
    """The clients at full scale; None where only the data or a file says how many."""
    document = setting.document
    if "partition" not in document:
        return int(document["data"].get("silos", PUBLISHED_SILOS))
    silos: int | Mapping[str, int] | None = document["partition"].get("silos")
    if isinstance(silos, Mapping):  # so many per source of the data
        return sum(silos.values())
    return silos


def _or(values: Sequence[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _known(name: str, known: Mapping[str, Any], what: str) -> str:
    if name not in known:
        raise LocalError(f"{what} {name!r}; {hint(name, known)}")
    return name


def missing(data: Data, partition: Partition | None) -> tuple[str, ...]:
    """The files that are not there, each with its title and place.

    A file that is there is not opened: a damaged one shows only when it is read.
    """
    absent = []
    lacking = data.lacking()
    if lacking is not None:
        absent.append(f"{data.long_title}: {lacking}")
    if isinstance(partition, PartitionFromFile) and not partition.file.is_file():
        absent.append(f"partition: {partition.file}")
    return tuple(absent)

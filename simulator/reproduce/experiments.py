"""From a published table to experiments, one a setting, at the paper's scale or a smaller one.

Fewer clients are some of the paper's own: the partition is made for all of them, and as many as
asked for take part, spread evenly over it, each with the records that it has at full scale. The
share that is drawn for a round stays, but for at least three silos. Fewer rounds are fewer rounds,
and what a method does after a share of them comes after the same share.

Which files a setting's records are read from, under the folder that a person names, and what is not
there.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...algorithms.data.sources.synthetic import PUBLISHED_SILOS
from ...errors import LocalError
from ...files.documents import Strict, validate
from ..experiment.experiment import Experiment, ExperimentFile, checked
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
    """The settings of these names, all for none."""
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
    """The labels of these methods, all for none, and of those that run beside every one."""
    methods = {method.title: method for row in table.all_rows for method in row.methods.values()}
    asked = {
        _known(name, methods, f"{table.path}: no method that runs here")
        for name in wanted or methods
    }
    return frozenset(
        asked | {label for label, method in methods.items() if method.name in NEXT_TO_IT}
    )


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
    origin = Path(table.paper) / setting.name
    found = (row.methods[setting.name] for row in table.all_rows if setting.name in row.methods)
    methods = {method.title: method for method in found if labels is None or method.title in labels}
    if scale.rounds is not None:
        methods = {
            label: method.model_copy(update={"rounds": None}) for label, method in methods.items()
        }
    document = {
        "version": 1,
        "name": f"{table.paper}-{setting.name}",
        "seeds": tuple(seeds) or tuple(range(1, (table.seeds or SEEDS) + 1)),
        "methods": tuple(methods.values()),
        **_scaled(setting, scale),
    }
    return checked(origin, validate(document, ExperimentFile, str(origin)), folder)


def records_of(setting: PaperSetting, folder: Path) -> RecordSource:
    """Where the records of a setting are, in a folder."""
    document = {
        key: value
        for key, value in _scaled(setting, FULL).items()
        if key in RecordSource.model_fields
    }
    records = validate(document, RecordSource, setting.name)
    data, partition = below(records.data, records.partition, folder)
    return RecordSource(data=data, partition=partition)


def reduced(settings: Sequence[PaperSetting], scale: Scale) -> tuple[str, ...]:
    """What is other than in the paper, for people."""
    found = []
    if fewer := [setting for setting in settings if _fewer(setting, scale)]:
        found.append(
            f"{scale.clients} instead of {_or([_clients(setting) or 'all' for setting in fewer])}"
            " clients"
        )
    rounds = [setting.document["rounds"] for setting in settings]
    if scale.rounds is not None and (others := [own for own in rounds if own != scale.rounds]):
        found.append(f"{scale.rounds} instead of {_or(others)} rounds")
    return tuple(found)


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
    there = _clients(setting)
    if scale.clients is None or (there is not None and there <= scale.clients):
        return None
    if scale.clients < LEAST_CLIENTS:
        raise LocalError(
            f"{scale.clients} clients of setting {setting.name!r}; {LEAST_CLIENTS} are the least"
        )
    return scale.clients


def _clients(setting: PaperSetting) -> int | None:
    """How many there are at full scale; None where the data or a file says so."""
    if "partition" not in setting.document:
        return int(setting.document["data"].get("silos", PUBLISHED_SILOS))
    silos = setting.document["partition"].get("silos")
    return sum(silos.values()) if isinstance(silos, Mapping) else silos


def _or(values: Sequence[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _known(name: str, known: Mapping[str, Any], what: str) -> str:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise LocalError(f"{what} {name!r}; {hint}")
    return name


def missing(data: Data, partition: Partition | None) -> tuple[str, ...]:
    """What is not there, each with what belongs where.

    Whether what is there can be read shows when it is.
    """
    lacking = data.lacking()
    found = [] if lacking is None else [f"{data.long_title}: {lacking}"]
    if isinstance(partition, PartitionFromFile) and not partition.file.is_file():
        found.append(f"partition: {partition.file}")
    return tuple(found)

"""Extractors of different architectures, dealt to the silos in turn.

They are for methods whose extractors never cross. All end in the width of the job's own model, so
that tensors of a feature's width, such as a header's rows, can cross.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, TypeAlias

import torch
from pydantic import AfterValidator, Field
from torch import nn

from ....errors import LocalError
from ...method import Setting
from ...models.build import ModelOptions, build
from ...models.registry import NETWORKS, Norm


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := sorted(set(names) - set(NETWORKS)):
        raise ValueError(f"no such model: {', '.join(unknown)}; known: {', '.join(NETWORKS)}")
    return names


Extractors: TypeAlias = Annotated[tuple[str, ...], Field(max_length=10_000), AfterValidator(_known)]


def norm_of(name: str) -> Norm:
    """The norm of an architecture in ``extractors``: "none" if it has that form, else "group"."""
    return "none" if "none" in NETWORKS[name].norms else "group"


def sketched(name: str, setting: Setting) -> dict[str, nn.Module]:
    """A model of this architecture, without values.

    Its modules are on torch's device "meta", so nothing is drawn or allocated.
    """
    with torch.device("meta"):
        return NETWORKS[name].build(setting.input, setting.outputs, norm_of(name))


def check_not_dense(method: str, setting: Setting) -> None:
    """LocalError where the job's model has outputs for each position of a record."""
    if setting.task.dense:
        raise LocalError(
            f"{method}: a task with outputs for each position, as {setting.task.kind} is, has no"
            " second architectures; leave method.options.extractors out"
        )


def check_extractors(method: str, names: tuple[str, ...], setting: Setting, width: int) -> None:
    """LocalError unless each architecture takes the job's input and ends in this width."""
    for name in dict.fromkeys(names):
        if fault := NETWORKS[name].fault(setting.input):
            raise LocalError(
                f"{method}: extractor {name!r} {fault}; choose one for the job's model.input"
            )
        classifier = sketched(name, setting)["classifier"]
        # Any other classifier has no number of input features to compare.
        found = None
        if isinstance(classifier, nn.Linear):
            found = classifier.in_features
        if found != width:
            raise LocalError(
                f"{method}: extractor {name!r} ends in {found} units, the job's model in {width};"
                " headers and prototypes are exchangeable at one width only; choose models of one"
                " width"
            )


def check_features(method: str, models: Iterable[Mapping[str, nn.Module]]) -> None:
    """LocalError for a method that uploads mean features, where one is of an untrained extractor.

    An extractor without parameters gives the records themselves, and their means would leave.
    """
    trained = [next(parts["extractor"].parameters(), None) is not None for parts in models]
    if not all(trained):
        raise LocalError(
            f"{method} uploads means of features; an extractor without parameters would make"
            " them means of records; choose a model whose extractor is trained"
        )


def dealt(names: tuple[str, ...], setting: Setting, silo: str) -> dict[str, nn.Module]:
    """A silo's model: architectures in turn by job order, or the job's own if none is named.

    Values follow from the job's seed, so silos of one architecture start with equal ones.
    """
    if not names:
        return setting.build()
    # By job order, so that every machine knows each silo's architecture.
    name = names[setting.silos.index(silo) % len(names)]
    options = ModelOptions(
        name=name, classes=setting.outputs, norm=norm_of(name), input=setting.input
    )
    return build(options, setting.seed)

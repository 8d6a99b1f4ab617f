"""``staddle membership``: which canonical models the silos of a ppfl job mix.

Memberships lie in the coordinator's result of such a job, and in each silo's own model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import safetensors
import torch
import typer
from torch import Tensor

from ...algorithms.engines.aggregation import SILOS
from ...algorithms.methods.ppfl import heatmap
from ...errors import LocalError
from ...files import tensor_file
from ...files.documents import parse_json, write_atomic
from ..terminal import printer

OWN = "part/membership/c"  # in a silo's model [K]
NAME = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True)
class Memberships:
    """Memberships [N, K] and whose they are.

    Each row adds up to 1, or is all zeros for a silo that released none.
    """

    silos: tuple[str, ...]
    memberships: Tensor


def show(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="The coordinator's result.safetensors, or a silo's own model.safetensors.",
        ),
    ],
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the heat map into this file, too.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What to call a silo's own file; once for each of them, in their order.",
        ),
    ] = None,
) -> None:
    """Print memberships: one row per silo, one column per canonical model.

    A silo that released nothing has "-" in its row. At the coordinator only what the policies of
    the silos released exists: the job's option release_membership = "last" or "always". A silo may
    always look at its own. Nothing leaves the machine.
    """
    # First check all files, so that a bad one leaves no partial output.
    found = read_all(files, label or [])
    if png is not None:
        write_atomic(png, heatmap.picture(found.memberships, found.silos))

    # a membership has the sum 1: zeros are what a silo that released nothing left in the table
    models = range(found.memberships.shape[1])
    rows = {"silo": [f"{model:>6}" for model in models]}
    for silo, row in zip(found.silos, found.memberships.tolist(), strict=True):
        rows[silo] = [f"{'-':>6}"] * len(row)
        if any(row):
            rows[silo] = [f"{value:6.4f}" for value in row]

    width = max(map(len, rows))
    for name, cells in rows.items():
        printer.show("  ".join([f"{name:<{width}}", *cells]))
    if png is not None:
        printer.show(f"{png}: {len(found.silos)} rows, darker is nearer to 1")


def read_all(paths: Sequence[Path], labels: Sequence[str] = ()) -> Memberships:
    """The rows of all files; ``labels`` rename those of silos' own files.

    In the order of the files. LocalError if a file holds no memberships, or if the files differ in
    the number of models.
    """
    own: list[Path] = []
    widths: dict[Path, int] = {}
    found: list[Memberships] = []
    for path in paths:
        rows = _read(path)
        found.append(rows)
        widths[path] = rows.memberships.shape[1]
        if not rows.silos:
            own.append(path)

    # With too few or too many labels, silos would get the wrong names.
    _check_labels(labels, len(own))
    _check_widths(widths)

    # a silo's own file does not say whose it is
    names = iter(labels or map(_owner, own))
    silos: list[str] = []
    for rows in found:
        silos += rows.silos or [next(names)]
    memberships = torch.cat([rows.memberships for rows in found])
    return Memberships(tuple(silos), memberships)


def _check_labels(labels: Sequence[str], own: int) -> None:
    if labels and len(labels) != own:
        raise LocalError(
            f"--label is given {len(labels)} times for {own} silos' own files; give one for each"
        )


def _check_widths(widths: Mapping[Path, int]) -> None:
    if len(set(widths.values())) != 1:
        listed = ", ".join(f"{path} {width}" for path, width in widths.items())
        raise LocalError(
            f"the files differ in the number of canonical models: {listed}; show them one by one"
        )


def _read(path: Path) -> Memberships:
    """The rows of one file; no name where it is a silo's own."""
    tensors = {}
    try:
        with safetensors.safe_open(path, "pt") as file:
            # Before any tensor is used: refuse a file that the disk changed.
            tensor_file.check_ours(path)
            # only a coordinator's result names silos
            metadata = file.metadata() or {}
            silos = metadata.get(SILOS)
            name = "memberships"
            if silos is None:
                name = OWN
            # a silo's model may be large: one tensor of it is read
            if name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
    # A job that released nothing leaves no file, so the error names the option that does.
    except FileNotFoundError:
        raise LocalError(
            f"{path}: there is no such file; a coordinator writes result.safetensors at the end of"
            ' a ppfl job that released memberships (release_membership = "last" or "always"), a'
            " silo its own model.safetensors"
        ) from None
    except (safetensors.SafetensorError, OSError) as error:
        raise LocalError(f"{path}: not a safetensors file: {error}") from error

    try:
        if silos is None:
            return _own(tensors)
        return _released(tensors, parse_json(silos.encode(), "its list of silos"))
    except LocalError as error:
        raise LocalError(f"{path}: {error}") from None


def _own(tensors: dict[str, Tensor]) -> Memberships:
    if OWN not in tensors:
        raise LocalError(
            "holds no membership; give a silo's model of a ppfl job, or the coordinator's result"
        )
    # [K] becomes [1, K].
    rows = Memberships((), tensors[OWN][None])
    heatmap.check(rows.memberships)
    return rows


def _released(tensors: dict[str, Tensor], silos: object) -> Memberships:
    memberships = heatmap.released(tensors)
    names = _names(silos)
    # The error names the silo whose row is wrong.
    heatmap.check(memberships, names)
    return Memberships(tuple(names), memberships)


def _names(silos: object) -> list[str]:
    """The silos of a coordinator's result; it comes from another machine, so it is checked."""
    if isinstance(silos, list) and silos and all(map(_is_name, silos)):
        return silos
    raise LocalError("its list of silos is not one that a coordinator writes; copy the file again")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(NAME.fullmatch(value))


def _owner(path: Path) -> str:
    """The silo's folder: a model lies in <silo>/<state>/jobs/<job>/model/."""
    folders = path.resolve().parents
    if folders[0].name == "model":
        folders = folders[1:]
    in_state = len(folders) > 3 and folders[1].name == "jobs"
    return folders[3].name if in_state else path.stem

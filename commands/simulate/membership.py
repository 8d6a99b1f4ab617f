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
from ..console import printer

OWN = "part/membership/c"  # in a silo's model [K]
NAME = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True)
class Memberships:
    """Memberships [N, K] and whose they are; rows of zeros for silos that released none."""

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
    found = read_all(files, label or [])
    if png is not None:
        write_atomic(png, heatmap.picture(found.memberships, found.silos))
    rows = {"silo": [f"{model:>6}" for model in range(found.memberships.shape[1])]}
    for silo, row in zip(found.silos, found.memberships.tolist(), strict=True):
        unreleased = [f"{'-':>6}"] * len(row)
        rows[silo] = [f"{value:6.4f}" for value in row] if any(row) else unreleased
    width = max(map(len, rows))
    for name, cells in rows.items():
        printer.show("  ".join([f"{name:<{width}}", *cells]))
    if png is not None:
        printer.show(f"{png}: {len(found.silos)} rows, darker is nearer to 1")


def read_all(paths: Sequence[Path], labels: Sequence[str] = ()) -> Memberships:
    """The rows of all files; ``labels`` rename those of silos' own files."""
    found = [(path, _read(path)) for path in paths]
    own = [path for path, rows in found if not rows.silos]
    names = iter(_own_names(own, labels))
    _check_widths({path: rows.memberships.shape[1] for path, rows in found})
    silos: list[str] = []
    for _, rows in found:
        silos += rows.silos or [next(names)]
    return Memberships(tuple(silos), torch.cat([rows.memberships for _, rows in found]))


def _own_names(paths: Sequence[Path], labels: Sequence[str]) -> Sequence[str]:
    if not labels:
        return list(map(_owner, paths))
    if len(labels) != len(paths):
        raise LocalError(
            f"--label is given {len(labels)} times for {len(paths)} silos' own files; give one for"
            " each"
        )
    return labels


def _check_widths(widths: Mapping[Path, int]) -> None:
    if len(set(widths.values())) != 1:
        listed = ", ".join(f"{path} {width}" for path, width in widths.items())
        raise LocalError(
            f"the files differ in the number of canonical models: {listed}; show them one by one"
        )


def _read(path: Path) -> Memberships:
    """The rows of one file; no name where it is a silo's own."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensor_file.check_ours(path)
            silos = (file.metadata() or {}).get(SILOS)
            name = OWN if silos is None else "memberships"
            tensors = {name: file.get_tensor(name)} if name in file.keys() else {}  # noqa: SIM118
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
    rows = Memberships((), tensors[OWN][None])
    heatmap.check(rows.memberships)
    return rows


def _released(tensors: dict[str, Tensor], silos: object) -> Memberships:
    memberships = heatmap.released(tensors)
    names = _names(silos)
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
    """The silo's folder: model.safetensors lies in <silo>/<state>/jobs/<job>/."""
    folders = path.resolve().parents
    in_state = len(folders) > 3 and folders[1].name == "jobs"
    return folders[3].name if in_state else path.stem

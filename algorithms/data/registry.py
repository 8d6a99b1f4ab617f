"""Where a silo's records come from: the [data] table of its configuration, one kind a reader.

A kind is a table that says what it may hold, and a function that reads it; each stands in the file of its name. All
give one data set. A record whose kind has ids keeps its side of the split when the others change: an image's is its
path, a CSV file's and an .npz file's are what the silo declares, and a public set's its place there.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainValidator

from ...errors import LocalError
from ...files.file_bounds import check_regular
from ..models.build import ModelOptions, input_shape
from .dataset import Dataset, load_npz
from .options import DataTable
from .sources.bundled import Bundled, read_bundled
from .sources.csv_file import Csv, read_csv
from .sources.images import Images, read_images
from .sources.natural import Natural, read_natural
from .sources.tiny_imagenet import TinyImageNet, read_tinyimagenet
from .sources.torchvision_sets import Torchvision, read_torchvision
from .tagged import of_kind


class Npz(DataTable):
    """``kind = "npz"``, which may be left out."""

    kind: Literal["npz"] = "npz"
    file: Path


KINDS: dict[str, type[DataTable]] = {
    "npz": Npz,
    "images": Images,
    "csv": Csv,
    "torchvision": Torchvision,
    "tiny-imagenet": TinyImageNet,
    "natural": Natural,
    "bundled": Bundled,
}


def _of_its_kind(value: Any) -> DataTable:
    return of_kind(value, KINDS, "npz")


Source: TypeAlias = Annotated[
    Npz | Images | Csv | Torchvision | TinyImageNet | Natural | Bundled, PlainValidator(_of_its_kind)
]


def load(source: Source, model: ModelOptions | None) -> Dataset:
    """Read the records for a job's model; whether they fit the job is for ``fit.check_records`` to say.

    Without a model, to look at the records before there is a job: images cannot be read so, their size is the model's.
    """
    try:
        return _read(source, model)
    except MemoryError as error:  # what was available when it was asked for was taken by another since
        raise LocalError(f"{where(source)}: memory ran out while the records were read; give fewer records") from error


def _read(source: Source, model: ModelOptions | None) -> Dataset:
    match source:
        case Npz():
            return load_npz(source.file)
        case Images() | TinyImageNet():
            if model is None:
                raise LocalError(f"{source.folder}: images are read in the size that a job's model takes; give a job")
            shape = input_shape(model)
            return read_images(source, shape) if isinstance(source, Images) else read_tinyimagenet(source, shape)
        case Csv():
            return read_csv(source)
        case Torchvision():
            return read_torchvision(source)
        case Natural():
            return read_natural(source)
        case Bundled():
            return read_bundled(source)


def place(source: Source) -> Path | None:
    """The file or folder that holds the records; None where they come with the software."""
    match source:
        case Npz() | Csv():
            return source.file
        case Images() | Torchvision() | TinyImageNet() | Natural():
            return source.folder
        case Bundled():
            return None


def where(source: Source) -> str:
    """What errors call the records."""
    return f"bundled {source.name}" if isinstance(source, Bundled) else str(place(source))


def below(source: Source, base: Path) -> Source:
    """The same with its path relative to a folder."""
    match source:
        case Npz() | Csv():
            return source.model_copy(update={"file": base / source.file})
        case Images() | Torchvision() | TinyImageNet() | Natural():
            return source.model_copy(update={"folder": base / source.folder})
        case Bundled():
            return source


def check_present(source: Source) -> None:
    """LocalError where the file or folder is not there, or is a FIFO or the like; asked when a silo starts."""
    match source:
        case Npz() | Csv() if not source.file.is_file():
            if source.file.exists() and not source.file.is_dir():
                check_regular(source.file)
            raise LocalError(f"{source.file}: no such file; data.file in the configuration names the silo's records")
        case Images() | Torchvision() | TinyImageNet() | Natural() if not source.folder.is_dir():
            raise LocalError(f"{source.folder}: no such folder; data.folder in the configuration holds the records")
        case _:
            return

"""The kinds of data source that a silo's [data] table may name: a literal list, one class per kind.

A record whose kind has ids keeps its side of the split when other records change: an image's id is
its path, a CSV file's and an .npz file's are what the silo declares, and a public set's is its
place there.
"""

from typing import Annotated, Any, TypeAlias, get_args

from pydantic import PlainValidator

from ...files.tagged import of_kind
from .options import DataTable
from .sources.formats.csv_file import Csv
from .sources.formats.images import Images
from .sources.formats.listed import ListedImages
from .sources.formats.masks import Masks
from .sources.formats.npz import Npz
from .sources.formats.parquet import Parquet
from .sources.formats.sql import Sql
from .sources.hugging_face.source import HuggingFace
from .sources.installed import Installed
from .sources.public.bundled import Bundled
from .sources.public.natural import Natural
from .sources.public.tiny_imagenet import TinyImageNet
from .sources.public.torchvision_sets import Torchvision


def _of_its_kind(value: Any) -> DataTable:
    # A table without ``kind`` means an .npz file.
    return of_kind(value, KINDS, "npz")


Source: TypeAlias = Annotated[
    Npz
    | Images
    | Masks
    | ListedImages
    | Csv
    | Parquet
    | Sql
    | HuggingFace
    | Torchvision
    | TinyImageNet
    | Natural
    | Installed
    | Bundled,
    PlainValidator(_of_its_kind),
]

KINDS: dict[str, type[DataTable]] = {
    get_args(table.model_fields["kind"].annotation)[0]: table
    for table in get_args(get_args(Source)[0])
}

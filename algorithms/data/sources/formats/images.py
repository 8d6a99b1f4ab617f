"""Images in one folder a class.

::

    <folder>/benign/0001.png
    <folder>/benign/visit-2/0001.png    sub-folders of a class belong to it
    <folder>/malignant/0002.jpg
    <folder>/malignant/0003.nii.gz      a volume
    <folder>/malignant/0004/*.dcm       another, in slices

With domains, as in DomainNet (Peng et al., 2019, arXiv:1812.01754), one folder a domain holds one
folder a class, and an image's source is its domain::

    <folder>/sketch/zebra/0001.png
"""

import itertools
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import Field

from .....errors import LocalError
from ....models.registry import Shape
from ...dataset import Dataset
from ...options import Names
from .image_files import (
    ImageFolder,
    image_files,
    is_volume,
    listing,
    read_images,
    relative_ids,
    shown,
    size_of,
)
from .labelled import check_distinct


class Images(ImageFolder):
    """``kind = "images"``."""

    kind: Literal["images"]
    classes: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    """The sub-folders in the order of the labels, one that this silo has no images of included.

    Else by name.
    """
    class_names: Names | None = None
    """The job's names for the classes, where they differ."""
    subset: bool = False
    """Sub-folders that are not among the classes are left out; else they are an error."""
    domains: Names | None = None
    """The folders whose sub-folders are the classes' folders.

    Left out, those lie in the folder itself.
    """

    @pydantic.model_validator(mode="after")
    def _distinct(self) -> "Images":
        # A folder named twice would give each of its images twice, under two labels or domains.
        check_distinct("classes", self.classes or ())
        check_distinct("domains", self.domains or ())
        if self.subset and self.classes is None:
            raise ValueError(
                "subset leaves out what is not in classes; name the classes, or leave subset out"
            )
        return self

    def lacking(self) -> str | None:
        """The folders of the classes, or those of the declared domains."""
        if self.domains is None:
            return None if self.folder.exists() else f"{self.folder}/CLASS/*.png"
        if all(map(Path.is_dir, self._roots())):
            return None
        return f"{self.folder}/{{{','.join(self.domains)}}}/CLASS/*.png"

    def examine(self) -> str:
        """How many images and classes there are; no image is opened."""
        with listing(self.folder):
            classes, found = self._find(volumes=False)
        if not found.paths:
            raise LocalError(
                f"{self.folder}: has no images; give each class a folder with its own, as"
                f" {self._roots()[0]}/CLASS/*.png"
            )
        return f"{len(found.paths):,} files of images, {len(classes)} classes"

    def _roots(self) -> list[Path]:
        """The folders that hold the classes' folders: one per domain, or the folder itself."""
        return list(map(self.folder.joinpath, self.domains or ("",)))

    def read_at(self, shape: Shape) -> Dataset:
        """Images in the order of domains, classes and names.

        A record's id is its path in the folder.
        """
        # Checked before any file is opened, since no image can have another number of channels.
        self.check_shape(shape)
        with listing(self.folder):
            classes, found = self._find(is_volume(shape))
        ids = relative_ids(self.folder, found.paths)
        identity = partial(self.identity, self.folder, found.paths, found.sizes)
        return Dataset(
            read_images(self, found.paths, shape, identity),
            torch.tensor(found.labels, dtype=torch.int64),
            self.class_names or classes,
            ids,
            # Domains are the records' sources, by which a partition can deal them.
            None if self.domains is None else tuple(found.domains),
            self.groups_of(ids, above=1 + bool(self.domains)),
        )

    def _find(self, volumes: bool) -> "tuple[tuple[str, ...], _Found]":
        """The classes, and the images in the order of domains, classes and names."""
        roots = self._roots()
        present: set[str] = set()
        for root in roots:
            present.update(_class_folders(self, root))
        # Sorted, so that undeclared classes get the same labels on every machine.
        classes = self.classes or tuple(sorted(present))

        found = _Found([], [], [], [])
        for root, (label, name) in itertools.product(roots, enumerate(classes)):
            paths = image_files(root / name, volumes)
            found.paths.extend(paths)
            found.sizes.extend(map(size_of, paths))
            found.labels.extend([label] * len(paths))
            found.domains.extend([root.name] * len(paths))
        return classes, found


@dataclass(frozen=True)
class _Found:
    """Images that a folder holds, one entry per image in each list."""

    paths: list[Path]
    sizes: list[int]  # in bytes
    labels: list[int]
    domains: list[str]


def _class_folders(table: Images, root: Path) -> list[str]:
    paths = sorted(shown(root, root.iterdir()))
    if file := next(filterfalse(Path.is_dir, paths), None):
        raise LocalError(
            f"{file}: lies next to the classes' folders; move it into one of them, or away"
        )
    names = [path.name for path in paths]
    declared = table.classes or names
    # Otherwise a misspelt class would silently lose its images.
    if not table.subset and (unknown := next(filterfalse(declared.__contains__, names), None)):
        raise LocalError(
            f"{root / unknown}: is not in data.classes ({', '.join(declared)}); add it, or move it"
            " away"
        )
    return names

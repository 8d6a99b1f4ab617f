"""Tiny-ImageNet (Stanford CS231n) in its official layout.

It has 200 classes of 500 images to train on and 50 to validate.

::

    <folder>/wnids.txt                              the classes, in the order of the labels
    <folder>/train/n01443537/images/*.JPEG
    <folder>/val/images/*.JPEG                      with val/val_annotations.txt: name, class, a box

The official test images have no public labels. Where the validation images were sorted into one
folder a class, ``kind = "images"`` reads them.
"""

from pathlib import Path
from typing import Literal

import torch

from .....errors import LocalError, check_local
from .....files.file_bounds import check_fits, open_regular
from ....models.registry import Shape
from ...dataset import Dataset
from ...options import ImageFiles, Shared
from ..formats.image_files import relative_ids
from ..formats.pictures import check_shape, read_all

Part = Literal["train", "val"]
Found = list[tuple[Path, str]]  # an image and its class


class TinyImageNet(ImageFiles, Shared):
    """``kind = "tiny-imagenet"``."""

    kind: Literal["tiny-imagenet"]
    folder: Path
    part: Literal["train", "val", "both"] = "both"
    resize: bool = False

    @property
    def has_official_parts(self) -> bool:
        """Both parts, the training records first."""
        return self.part == "both"

    def lacking(self) -> str | None:
        """The unpacked archive."""
        if (self.folder / "wnids.txt").is_file():
            return None
        return f"{self.folder}/{{wnids.txt,train,val}}, as tiny-imagenet-200.zip has it"

    def read_at(self, shape: Shape) -> Dataset:
        """The set, or a share of it, of which alone images are decoded.

        A record's id is its path in the folder. Training images come first.
        """
        check_shape(self.folder, shape)
        classes = _lines(self, "wnids.txt")
        # wnids.txt has the order of the labels, not the names of the folders.
        number_of = {name: number for number, name in enumerate(classes)}
        found: Found = []
        if self.part != "val":
            found += _train(self, classes)
        if self.part != "train":
            found += _val(self)
        paths, labels = [], []
        for path, name in found:
            check_local(
                name in number_of,
                f"{path}: its class {name!r} is not in wnids.txt; unpack the official archive"
                " again",
            )
            paths.append(path)
            labels.append(number_of[name])

        # Only the share's images are decoded: decoding is what takes time and memory.
        share = self.indices(len(found))
        own = [paths[index] for index in share.tolist()]
        x = read_all(self.folder, own, shape, self.resize)
        return Dataset(
            self.normalised(x, str(self.folder)),
            torch.tensor(labels, dtype=torch.int64)[share],
            tuple(classes),
            relative_ids(self.folder, own),
        )


def _train(table: TinyImageNet, classes: list[str]) -> Found:
    found: Found = []
    for name in classes:
        images = table.folder / "train" / name / "images"
        # Sorted, since file systems list a folder in any order.
        found.extend((path, name) for path in sorted(images.glob("*.JPEG")))
    if not found:
        raise LocalError(
            f"{table.folder}: no train/CLASS/images/*.JPEG; unpack tiny-imagenet-200.zip there"
        )
    return found


def _val(table: TinyImageNet) -> Found:
    images = table.folder / "val" / "images"
    found: Found = []
    # Lines have tabs between the image's file name, its class and a box.
    for line in _lines(table, "val/val_annotations.txt"):
        file, *rest = line.split("\t")
        if not rest:
            raise LocalError(
                f"{table.folder}/val/val_annotations.txt: a line has no class; unpack the archive"
                " again"
            )
        found.append((images / file, rest[0]))
    return found


def _lines(table: TinyImageNet, name: str) -> list[str]:
    file = table.folder / name
    try:
        with open_regular(file) as opened:
            check_fits(file, file.stat().st_size, "its text")
            lines = opened.read().decode().splitlines()
            # Empty lines are not names.
            return list(filter(None, lines))
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(
            f"{file}: cannot read it: {error}; the folder is that of tiny-imagenet-200.zip,"
            " unpacked"
        ) from error

"""Random changes of records as they are trained on: torchvision's transforms.v2, by name; mixup.

::

    [[training.augment]]
    kind = "RandomCrop"
    padding = 4

    [[training.augment]]
    kind = "RandomHorizontalFlip"

Each record of a batch is changed by itself, in the order of the tables, and with it the mask of a
segmentation; ``MixUp``, which comes last, mixes those of a batch. Volumes are changed in their last
two sides, all slices alike. Evaluation changes nothing. Tables have torchvision's names and
arguments; sizes are those of the records.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

import torch
from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny, model_validator
from torch import Tensor
from torch.distributions import Beta

from ...errors import LocalError
from ...files.documents import Real, Strict
from ...files.tagged import of_kind
from ..models.inputs import Piece
from ..models.torchvision_import import torchvision

Chance = Annotated[Real, Field(ge=0, le=1)]
Share = Annotated[Real, Field(ge=0, le=1)]
Area = Annotated[Real, Field(ge=0.001, le=1)]
Factor = Annotated[Real, Field(ge=0.01, le=100)]


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"{list(pair)}: give the smaller number first")
    return pair


Areas = Annotated[tuple[Area, Area], AfterValidator(_ordered)]
Factors = Annotated[tuple[Factor, Factor], AfterValidator(_ordered)]
Whole = Annotated[int, Field(strict=True, ge=1, le=4096)]
IMAGE = 3  # sides of a record [channels, height, width]


class Augmentation(Strict):
    """Base of all; fields are torchvision's arguments."""

    # every kind declares its own Literal; a field here would come first in errors
    if TYPE_CHECKING:
        kind: str

    of_pixels: ClassVar[bool] = False
    """True if torchvision takes values of 0 … 1 for it, of one or three channels."""
    moves: ClassVar[bool] = False
    """True if a mask changes with its image."""
    mixes: ClassVar[bool] = False
    """True if it changes a batch, whose records move one another, and not record by record."""
    idle: ClassVar[tuple[str, ...]] = ()
    """Keys of which one has to say something."""
    fewest: ClassVar[int] = IMAGE
    """Sides that a record has at least; the rows of a table are no images of height 1."""

    @abstractmethod
    def transform(self, sides: tuple[int, int]) -> Any:
        """The transform for records of this height and width: torchvision's, where it has one."""

    def fault(self, shape: Sequence[int]) -> str:
        """Why records of this shape cannot be changed so; empty if they can."""
        if len(shape) < self.fewest or 1 in shape[1 - self.fewest : -1]:
            return f"cannot change records of shape {list(shape)}; remove it"
        if self.of_pixels and (len(shape) > IMAGE or shape[0] not in (1, 3)):
            return f"takes images of 1 or 3 channels, and records are {list(shape)}; remove it"
        return ""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        # A table whose keys are all left out, where none of them does anything by itself.
        if self.idle and not any(map(partial(getattr, self), self.idle)):
            raise ValueError(f"{self.kind} changes nothing; give one of {', '.join(self.idle)}")
        return self


class RandomCrop(Augmentation):
    """A piece of the record's size, once ``padding`` zeros are around it."""

    kind: Literal["RandomCrop"]
    moves: ClassVar[bool] = True
    padding: Whole

    def fault(self, shape: Sequence[int]) -> str:
        """Also where nothing of a record could be left."""
        if self.padding >= min(shape[-2:]):
            return f"has padding = {self.padding}, and records are {list(shape)}; lower it"
        return super().fault(shape)

    def transform(self, sides: tuple[int, int]) -> Any:
        """Torchvision's."""
        return _v2().RandomCrop(sides, padding=self.padding)


class RandomResizedCrop(Augmentation):
    """A piece of a random size and form, brought to the record's size."""

    kind: Literal["RandomResizedCrop"]
    moves: ClassVar[bool] = True
    scale: Areas = (0.5, 1.0)
    """Its area's share of the record's."""
    ratio: Factors = (0.75, 4 / 3)
    """Its width over its height."""

    def fault(self, shape: Sequence[int]) -> str:
        """Also where the largest piece of such a form has no height or width.

        torchvision would fail at it: in a private job one record, drawn or not, would show.
        """
        # A row of numbers has no height, and is refused below.
        height, width = (1, *shape)[-2:]
        if min(round(width / self.ratio[0]), round(height * self.ratio[1])) < 1:
            return f"has ratio = {list(self.ratio)}, and records are {list(shape)}; bring it near 1"
        return super().fault(shape)

    def transform(self, sides: tuple[int, int]) -> Any:
        """Torchvision's."""
        return _v2().RandomResizedCrop(sides, scale=self.scale, ratio=self.ratio, antialias=True)


class RandomHorizontalFlip(Augmentation):
    """Left and right change places with chance ``p``."""

    kind: Literal["RandomHorizontalFlip"]
    moves: ClassVar[bool] = True
    p: Chance = 0.5

    def transform(self, sides: tuple[int, int]) -> Any:
        """Torchvision's."""
        return _v2().RandomHorizontalFlip(self.p)


class RandomVerticalFlip(Augmentation):
    """Up and down change places with chance ``p``."""

    kind: Literal["RandomVerticalFlip"]
    moves: ClassVar[bool] = True
    p: Chance = 0.5

    def transform(self, sides: tuple[int, int]) -> Any:
        """Torchvision's."""
        return _v2().RandomVerticalFlip(self.p)


class RandomAffine(Augmentation):
    """A turn, a move, another size, a shear; what comes in from outside is 0."""

    kind: Literal["RandomAffine"]
    idle: ClassVar[tuple[str, ...]] = ("degrees", "translate", "scale", "shear")
    moves: ClassVar[bool] = True
    degrees: Annotated[Real, Field(ge=0, le=180)] = 0.0
    """Up to so many, either way."""
    translate: tuple[Share, Share] | None = None
    """Shares of the width and the height, either way."""
    scale: Factors | None = None
    shear: Annotated[Real, Field(ge=0, lt=90)] = 0.0
    """Degrees, either way."""

    def transform(self, sides: tuple[int, int]) -> Any:
        """torchvision's, linear between values; a mask takes the nearest."""
        v2 = _v2()
        smooth = v2.InterpolationMode.BILINEAR
        return v2.RandomAffine(
            self.degrees, self.translate, self.scale, self.shear or None, interpolation=smooth
        )


class RandomErasing(Augmentation):
    """A piece becomes 0 with chance ``p``; a mask stays."""

    kind: Literal["RandomErasing"]
    p: Chance = 0.5
    scale: Areas = (0.02, 0.33)
    ratio: Factors = (0.3, 3.3)

    def transform(self, sides: tuple[int, int]) -> Any:
        """Torchvision's."""
        return _v2().RandomErasing(self.p, self.scale, self.ratio)


class GaussianNoise(Augmentation):
    """Normal noise of deviation ``sigma`` on each value, of images and of tables."""

    kind: Literal["GaussianNoise"]
    fewest: ClassVar[int] = 2
    sigma: Factor = 0.1

    def transform(self, sides: tuple[int, int]) -> Any:
        """torchvision's, which cuts nothing."""
        return _v2().GaussianNoise(sigma=self.sigma, clip=False)


class ColorJitter(Augmentation):
    """Other brightness, contrast, saturation and hue; for values of 0 … 1."""

    kind: Literal["ColorJitter"]
    idle: ClassVar[tuple[str, ...]] = ("brightness", "contrast", "saturation", "hue")
    of_pixels: ClassVar[bool] = True
    brightness: Share = 0.0
    contrast: Share = 0.0
    saturation: Share = 0.0
    hue: Annotated[Real, Field(ge=0, le=0.5)] = 0.0

    def fault(self, shape: Sequence[int]) -> str:
        """Also where there are no colours to change."""
        if shape[0] == 1 and self.saturation + self.hue > 0:
            return "has saturation or hue, and records have one channel; leave both out"
        return super().fault(shape)

    def transform(self, sides: tuple[int, int]) -> Any:
        """Torchvision's."""
        return _v2().ColorJitter(self.brightness, self.contrast, self.saturation, self.hue)


class MixUp(Augmentation):
    """A record becomes λ of itself and 1 - λ of another one of its batch, and keeps its truth.

    Zhang et al. (ICLR 2018, Eq. 1) draw λ ~ Beta(α, α) and mix the truths, too. For cross-entropy,
    which is linear in them, that is the mean of the losses of both truths, weighted by λ and 1 - λ.
    As a pair is drawn in both orders, this mean is on average the loss of one truth with
    λ ~ Beta(α + 1, α): a density weighted by λ. Of a squared error the gradient is the same. Other
    losses take this mean in place of the loss of a mixed truth. Batch norm sees other batches.
    """

    kind: Literal["MixUp"]
    fewest: ClassVar[int] = 2
    mixes: ClassVar[bool] = True
    alpha: Annotated[Real, Field(ge=0.01, le=100)] = 0.2

    def transform(self, sides: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        """Mixes the records [B, …] of a batch."""

        def mixed(x: Tensor) -> Tensor:
            # Drawn on the CPU, wherever the records are, so that the same is drawn everywhere.
            own = Beta(self.alpha + 1, self.alpha).sample((len(x),))
            share = own.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
            return share * x + (1 - share) * x[torch.randperm(len(x)).to(x.device)]

        return mixed


KINDS: dict[str, type[Augmentation]] = {
    get_args(each.model_fields["kind"].annotation)[0]: each
    for each in (
        RandomCrop,
        RandomResizedCrop,
        RandomHorizontalFlip,
        RandomVerticalFlip,
        RandomAffine,
        RandomErasing,
        GaussianNoise,
        ColorJitter,
        MixUp,
    )
}


def _of_its_kind(value: Any) -> Augmentation:
    return of_kind(value, KINDS)


def _mixed_last(kinds: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
    if any(kind.mixes for kind in kinds[:-1]):
        raise ValueError("MixUp mixes records as they are trained on; put it last")
    return kinds


Augmentations: TypeAlias = Annotated[
    tuple[Annotated[SerializeAsAny[Augmentation], PlainValidator(_of_its_kind)], ...],
    Field(max_length=16),
    AfterValidator(_mixed_last),
]


def _v2() -> Any:
    return torchvision("transforms.v2", "augmentation")


class Augmenter:
    """Augments a batch, and with ``dense`` the masks of its records.

    It changes the ``image`` of records that have several inputs, and leaves the others. Unless
    ``forgiving``, values that a kind does not take are an error; in private training no record may
    end the work.
    """

    def __init__(
        self,
        kinds: Sequence[Augmentation],
        shape: Sequence[int],
        dense: bool,
        forgiving: bool,
        image: Piece | None = None,
    ) -> None:
        height, width = shape[-2:]
        self._check = not forgiving and any(map(attrgetter("of_pixels"), kinds))
        each = list(filterfalse(attrgetter("mixes"), kinds))
        self._steps = [(kind.transform((height, width)), kind.moves) for kind in each]
        self._mixed = [kind.transform((height, width)) for kind in kinds[len(each) :]]
        self._dense = dense
        self._image = image

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Records [B, …] and what is true of them [B, …], changed; those given stay.

        They are drawn from torch's generator, one record after another.
        """
        if not len(x):
            return x, y
        if self._image is None:
            return self._augmented(x, y)
        image, y = self._augmented(self._image.of(x), y)
        changed = x.clone()
        changed[:, self._image.place] = image.flatten(1)
        return changed, y

    def _augmented(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._one_by_one(x, y)
        for mixed in self._mixed:
            x = mixed(x)
        return x, y

    def _one_by_one(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self._check and bool((x.amin() < 0) | (x.amax() > 1)):
            raise LocalError(
                "training.augment has ColorJitter, which takes values of 0 to 1, and records have"
                ' others; leave mean, std and window = "each" out of the data, or ColorJitter'
                " out of the job"
            )
        tv_tensors: Any = torchvision("tv_tensors", "augmentation")
        if not self._dense:
            return _stacked(self._changed(image, None)[0] for image in x), y
        pairs = map(self._changed, x, map(tv_tensors.Mask, y))
        xs, ys = map(_stacked, zip(*pairs, strict=True))
        return xs, ys

    def _changed(self, image: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        for transform, moves in self._steps:
            if moves and mask is not None:
                image, mask = transform(image, mask)
            else:
                image = transform(image)
        return image, mask


def _stacked(records: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(records)).as_subclass(Tensor)

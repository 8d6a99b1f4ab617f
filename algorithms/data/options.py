"""What the [data] tables of several kinds have in common: records held out, public constants of pixels, shares."""

from typing import Annotated

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...errors import LocalError
from ...files.documents import Strict
from ..numerics.streams import permutation, stream

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class DataTable(Strict):
    """A [data] table."""

    test_fraction: float = Field(default=0.25, gt=0, lt=1)


class Pixels(DataTable):
    """Public constants, one a channel or one for all: a pixel of 0 … 1 becomes (pixel - mean) / std.

    They are declared, never computed from a silo's records: those would be one more thing that the model tells of them.
    """

    mean: tuple[Number, ...] = Field(default=(0.0,), min_length=1)
    std: tuple[Positive, ...] = Field(default=(1.0,), min_length=1)

    def from_bytes(self, x: NDArray[np.uint8], where: str) -> Tensor:
        """Records [N, channels, height, width] from pixels of 0 … 255."""
        return self.normalised(torch.from_numpy(np.ascontiguousarray(x)).to(torch.float32).div_(255), where)

    def normalised(self, x: Tensor, where: str) -> Tensor:
        """The same records, changed in place."""
        channels = x.shape[1]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise LocalError(
                    f"{where}: data.{name} has {len(values)} numbers for {channels} channels; give "
                    "one a channel, or one for all"
                )
        return x.sub_(torch.tensor(self.mean)[:, None, None]).div_(torch.tensor(self.std)[:, None, None])


class Shared(DataTable):
    """The k-th of n disjoint random shares of a public set, so that trials can deal it out among silos."""

    share: tuple[Count, Count] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**53)] | None = None
    """Which deal it is; the same at all silos."""

    @pydantic.model_validator(mode="after")
    def _one_of_n(self) -> "Shared":
        if self.share is not None and self.share[0] > self.share[1]:
            raise ValueError(f"share = {list(self.share)}: give [k, n], the k-th of n shares, k from 1 to n")
        if self.share is None and self.seed is not None:
            raise ValueError("seed deals out shares; give share = [k, n] too, or leave seed out")
        return self

    def indices(self, total: int) -> NDArray[np.int64]:
        """The records of this share, in their order in the set."""
        if self.share is None:
            return np.arange(total)
        own, shares = self.share
        return np.sort(permutation(stream(self.seed or 0, "", 0, "share"), total)[own - 1 :: shares])

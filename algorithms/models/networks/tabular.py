"""Networks for tables: a perceptron of any widths, and a residual network.

A record is one row, of any shape: it is flattened. The CSV reader writes a category as one number
per value, one of them 1 (one-hot). The first linear layer of such a record is the sum of a vector
for each of its categories, which are its embeddings; they are learned with the layer.

Norm "batch" keeps running statistics. Norm "group" has one group: it is a layer norm, so a record's
output depends on no other record, and private jobs can use it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from ....files.documents import Strict
from .residual import Few, Share, Width, Widths, dropped


class MlpOptions(Strict):
    """Further arguments of ``mlp``."""

    widths: Widths = (64,)
    dropout: Share = 0.0


class TabResnetOptions(Strict):
    """Further arguments of ``tab_resnet``."""

    width: Width = 64
    blocks: Few = 2
    hidden: Width = 128
    dropout: Share = 0.0
    residual_dropout: Share = 0.0


def mlp(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    widths: Sequence[int] = (64,),
    dropout: float = 0.0,
) -> dict[str, nn.Module]:
    """Hidden layers of these widths, each linear, norm, ReLU and dropout; then a linear classifier.

    It has ``widths[-1]`` features.
    """
    layers: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    for number, (before, width) in enumerate(
        zip((prod(shape), *widths), widths, strict=False), start=1
    ):
        layers += [
            (f"fc{number}", nn.Linear(before, width)),
            (f"norm{number}", normalisation(width, norm)),
            (f"relu{number}", nn.ReLU()),
            (f"drop{number}", dropped(dropout)),
        ]
    return {
        "extractor": nn.Sequential(OrderedDict(layers)),
        "classifier": nn.Linear(widths[-1], classes),
    }


def tab_resnet(
    shape: Sequence[int],
    classes: int,
    norm: str,
    *,
    width: int = 64,
    blocks: int = 2,
    hidden: int = 128,
    dropout: float = 0.0,
    residual_dropout: float = 0.0,
) -> dict[str, nn.Module]:
    """The ResNet for tables of Gorishniy, Rubachev, Khrulkov and Babenko.

    "Revisiting deep learning models for tabular data", NeurIPS 2021, section 3.2. It has ``width``
    features. Sizes are options, since the paper tunes them for each data set.
    """
    steps = [
        (f"block{number}", TabularBlock(width, hidden, norm, dropout, residual_dropout))
        for number in range(1, blocks + 1)
    ]
    extractor = OrderedDict(
        flatten=nn.Flatten(),
        fc=nn.Linear(prod(shape), width),
        **dict(steps),
        norm=normalisation(width, norm),
        relu=nn.ReLU(),
    )
    return {"extractor": nn.Sequential(extractor), "classifier": nn.Linear(width, classes)}


class TabularBlock(nn.Module):
    """x + dropout(linear(dropout(ReLU(linear(norm(x)))))), [B, width] → [B, width]."""

    def __init__(
        self, width: int, hidden: int, norm: str, dropout: float, residual_dropout: float
    ) -> None:
        super().__init__()
        self.norm = normalisation(width, norm)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.relu = nn.ReLU()
        self.drop1, self.drop2 = dropped(dropout), dropped(residual_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        y = self.drop1(self.relu(self.fc1(self.norm(x))))
        return x + self.drop2(self.fc2(y))  # type: ignore[no-any-return]


def normalisation(width: int, norm: str) -> nn.Module:
    """Norm layer over features [B, width], an identity for "none"."""
    if norm == "batch":
        return nn.BatchNorm1d(width)
    if norm == "group":
        return nn.GroupNorm(1, width)
    return nn.Identity()

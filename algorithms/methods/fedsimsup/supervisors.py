"""The supervisors of FedSimSup: private architectures, four for images and one for any record.

They are not from the paper but for "approximately one-sixth" of the inter-learning model's size:
of the 52,202 parameters of fedsimsup-lenet, lenet-wide of the 878,538 of fedsimsup-lenet-wide.
Their own numbers on 3x32x32 and 10 classes:

===========  ========================================================================  ==========
name         form                                                                      parameters
===========  ========================================================================  ==========
lenet        the same scaled down: 3 and 6 channels, 48 units; below 16 pixels the     8,422
             convolutions pad
lenet-wide   the same with 16 and 32 channels, 160 units                               143,818
cnn          conv 3x3 to 16 and to 48 channels, each with ReLU and 2x2 max-pool, mean  7,898
             over pixels
transformer  4x4 patches (2x2 below 16 pixels) of width 20, two blocks of four heads,  9,350
             mean over them
mlp          32 units with ReLU, for tables: a sixth would depend on their width       98,666
===========  ========================================================================  ==========
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...models.build import fill
from ...models.networks.lenet import Shape, two_and_two
from ...models.networks.tabular import mlp
from ...numerics.streams import Seed

# Chosen for about a sixth of the parameters of ``lenet``: 9,350 to 52,202.
WIDTH, HEADS, BLOCKS = 20, 4, 2  # of the transformer
MLP_WIDTH = 32


def _lenet_supervisor(shape: Shape, classes: int) -> nn.Module:
    parts = two_and_two(shape, classes, 3, 6, 48)
    return nn.Sequential(OrderedDict(parts))


def _wide_supervisor(shape: Shape, classes: int) -> nn.Module:
    parts = two_and_two(shape, classes, 16, 32, 160)
    return nn.Sequential(OrderedDict(parts))


def _mlp_supervisor(shape: Shape, classes: int) -> nn.Module:
    parts = mlp(shape, classes, "none", widths=(MLP_WIDTH,))
    return nn.Sequential(OrderedDict(parts))


def _cnn_supervisor(shape: Shape, classes: int) -> nn.Module:
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(shape[0], 16, 3, padding=1)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(16, 48, 3, padding=1)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("mean", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(48, classes)),
    ]
    return nn.Sequential(OrderedDict(layers))


class Attention(nn.Module):
    """Multi-head self-attention over tokens [B, T, width], of two linear layers that per-sample
    gradients know.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """softmax(Q Kᵀ / √d) V, head by head."""
        batch, tokens, width = x.shape
        split = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, T, d]
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5  # [B, heads, T, T]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        attended: Tensor = self.out(mixed)
        return attended


class Block(nn.Module):
    """One encoder block with the norms in front: attention, then two linear layers, each added to
    its input.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.gelu = nn.GELU()
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T, width] to tokens."""
        x = x + self.attention(self.norm1(x))
        mixed: Tensor = x + self.narrow(self.gelu(self.widen(self.norm2(x))))
        return mixed


class Transformer(nn.Module):
    """A small encoder over image patches with learned positions.

    The mean over tokens is classified.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        side = patch_side(shape)
        self.tokens = shape[1] // side * (shape[2] // side)
        self.patches = nn.Conv2d(shape[0], WIDTH, side, stride=side)
        # An embedding, since Opacus has no per-sample gradients for a bare parameter.
        self.positions = nn.Embedding(self.tokens, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, height, width] to logits [B, classes]."""
        patches = self.patches(x).flatten(2).transpose(1, 2)  # [B, T, width]
        # [B, T]: per-sample gradients need B
        places = torch.arange(self.tokens, device=x.device).expand(len(x), -1)
        logits: Tensor = self.classifier(
            self.norm(self.blocks(patches + self.positions(places))).mean(1)
        )
        return logits


def patch_side(shape: Shape) -> int:
    """Pixels along a patch."""
    return 4 if min(shape[1:]) >= 16 else 2


SUPERVISORS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "lenet": _lenet_supervisor,
    "lenet-wide": _wide_supervisor,
    "cnn": _cnn_supervisor,
    "transformer": Transformer,
    "mlp": _mlp_supervisor,
}


def supervisor_fault(name: str, shape: Shape) -> str:
    """Why a supervisor cannot take an input; empty if it can."""
    if name == "mlp":
        return ""
    if len(shape) != 3 or min(shape[1:]) < 4:
        return (
            f"needs images of at least 4 x 4 pixels, not {list(shape)}; choose mlp, which takes any"
            " record, or another model.input or method"
        )
    side = patch_side(shape)
    if name == "transformer" and (shape[1] % side or shape[2] % side):
        patches = f"patches of {side} x {side} pixels, which {list(shape)} does not divide into"
        return f"cuts images into {patches}; choose lenet or cnn"
    return ""


def build_supervisor(name: str, shape: Shape, classes: int, seed: Seed, silo: str) -> nn.Module:
    """A freshly initialised supervisor; each silo has its own stream.

    torch's own generator is not used.
    """
    # Built on "meta", so that construction draws nothing; ``fill`` gives all values.
    with torch.device("meta"):
        module = SUPERVISORS[name](shape, classes)
    fill(module, seed, f"supervisor/{silo}")
    return module

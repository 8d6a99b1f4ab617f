"""A small residual network for volumes."""

from torch import Tensor, nn

GROUPS = 4


class Residual(nn.Module):
    """Two convolutions and a way around them; it halves each side."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv3d(inner, outer, 3, stride=2, padding=1),
            nn.GroupNorm(GROUPS, outer),
            nn.ReLU(),
            nn.Conv3d(outer, outer, 3, padding=1),
            nn.GroupNorm(GROUPS, outer),
        )
        self.around = nn.Conv3d(inner, outer, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Half as many values in each direction."""
        return nn.functional.relu(self.way(x) + self.around(x))


class LungNet(nn.Module):
    """Volumes [B, channels, depth, height, width] to ``outputs`` numbers."""

    def __init__(self, channels: int, outputs: int, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv3d(channels, width, 3, padding=1),
            nn.ReLU(),
            Residual(width, 2 * width),
            Residual(2 * width, 4 * width),
            nn.AdaptiveMaxPool3d(1),
            nn.Flatten(),
        )
        self.hazards = nn.Linear(4 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """One row of ``outputs`` per volume."""
        return self.hazards(self.trunk(x))


def lung_net(shape: tuple[int, ...], outputs: int, width: int = 4) -> nn.Module:
    """What Staddle calls: ``shape`` is that of one record."""
    if len(shape) != 4:
        raise ValueError(f"takes [channels, depth, height, width], not {list(shape)}")
    return LungNet(shape[0], outputs, width)

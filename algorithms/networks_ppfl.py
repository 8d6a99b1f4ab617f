"""The generalised linear model as a network: an extractor without parameters below one Linear."""

from torch import nn


def glm(shape: tuple[int, int, int], classes: int, _: str) -> dict[str, nn.Module]:
    """Multinomial logistic regression on the flattened record."""
    channels, height, width = shape
    return {"extractor": nn.Flatten(), "classifier": nn.Linear(channels * height * width, classes)}

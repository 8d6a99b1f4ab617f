"""The network of FedSimSup's inter-learning model, as a job's [model] names it.

The paper (section 5.1) says LeNet-5 with two convolutional and two linear layers, sizes not given.
fedsimsup-lenet is conv 5x5 to 6 and to 16 channels, each with ReLU and 2x2 max-pool, then 120
units: 52,202 parameters on 3x32x32 and 10 classes. fedsimsup-lenet-wide has 32 and 64 channels and
512 units: 878,538 parameters. Neither has a norm.
"""

from collections import OrderedDict

from torch import nn

Shape = tuple[int, ...]  # channels, height, width


def lenet(shape: Shape, classes: int, _: str) -> dict[str, nn.Module]:
    """The LeNet of two convolutional and two linear layers.

    It has 120 features, and no norm.
    """
    return two_and_two(shape, classes, 6, 16, 120)


def lenet_wide(shape: Shape, classes: int, _: str) -> dict[str, nn.Module]:
    """The LeNet with many more channels and units.

    It has 512 features, and no norm.
    """
    return two_and_two(shape, classes, 32, 64, 512)


def two_and_two(
    shape: Shape, classes: int, first: int, second: int, units: int
) -> dict[str, nn.Module]:
    """Two convolutions and two linear layers.

    Below 16 pixels, which supervisors alone take, the convolutions pad.
    """
    channels, height, width = shape
    # Without padding, inputs of less than 16 pixels would shrink to nothing.
    padding = 0 if min(height, width) >= 16 else 2
    # A 5x5 convolution takes 4 pixels off a side, less the padding; pooling halves the rest.
    kept = [((side - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2 for side in (height, width)]
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(channels, first, 5, padding=padding)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(first, second, 5, padding=padding)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(second * kept[0] * kept[1], units)),
        ("relu3", nn.ReLU()),
    ]
    return {
        "extractor": nn.Sequential(OrderedDict(layers)),
        "classifier": nn.Linear(units, classes),
    }

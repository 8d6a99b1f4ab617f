"""MobileNetV2, the larger network of pFedSim and, with its features as v, of PPFL.

It is torchvision's own.

Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2: inverted residuals and linear bottlenecks",
CVPR 2018.

The extractor has the features, named as in torchvision, and their mean over height and width:
2,223,872 parameters, and with norm "batch" 34,112 numbers of running statistics. The classifier is
Linear(1280, C).

- The classifier's dropout is left out: it would draw from torch's global generator.
- No ReLU6 is in place: per-sample gradients need its input.
- Norm "group" has eight groups, which divide all its numbers of channels.
- Initial values are those of build.py, nothing is pre-trained; PPFL's paper starts from ImageNet's
  weights.
- The features of 32 x 32 pixels are 1 x 1: there batch norm sees one number a record and channel.
"""

from collections import OrderedDict
from functools import partial

from torch import nn

from ..torchvision_import import torchvision

GROUPS = 8
WIDTH = 1280


def mobilenet_v2(shape: tuple[int, int, int], classes: int, norm: str) -> dict[str, nn.Module]:
    """MobileNetV2 without dropout.

    Its first convolution takes as many channels as the records have.
    """
    # torchvision calls ``norm_layer`` with the number of channels.
    norm_layer = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, GROUPS)
    models = torchvision("models", "model 'mobilenet-v2'")
    features = models.mobilenet_v2(weights=None, norm_layer=norm_layer).features
    # torchvision's first convolution takes three channels.
    first = features[0][0]
    if shape[0] != first.in_channels:
        features[0][0] = nn.Conv2d(shape[0], first.out_channels, 3, 2, 1, bias=False)
    for module in features.modules():
        if isinstance(module, nn.ReLU6):
            module.inplace = False
    layers = OrderedDict(features=features, mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    return {"extractor": nn.Sequential(layers), "classifier": nn.Linear(WIDTH, classes)}

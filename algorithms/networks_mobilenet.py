"""MobileNetV2, the larger network of pFedSim and, with its features as v, of PPFL; it is torchvision's own.

Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018.

The extractor has the features, named as in torchvision, and their mean over height and width: 2,223,872 parameters,
and with norm "batch" 34,112 numbers of running statistics. The classifier is Linear(1280, C).

- The classifier's dropout is left out: it would draw from torch's global generator.
- No ReLU6 is in place: per-sample gradients need its input.
- Norm "group" has eight groups, which divide all its numbers of channels.
- Initial values are those of models.py, nothing is pre-trained; PPFL's paper starts from ImageNet's weights.
- The features of 32 x 32 pixels are 1 x 1: there batch norm sees one number a record and channel.
"""

import importlib
from collections import OrderedDict
from functools import partial
from threading import Lock
from types import ModuleType

import torch
from torch import nn

from ..errors import LocalError

GROUPS = 8
WIDTH = 1280

OPERATORS = ("nms", "qnms")
LOCK = Lock()  # silos may build their models in threads
DECLARED: list[torch.library.Library] = []  # what a library declares is gone once the object is


def mobilenet_v2(shape: tuple[int, int, int], classes: int, norm: str) -> dict[str, nn.Module]:
    """MobileNetV2 without dropout; its first convolution takes as many channels as the records have."""
    norm_layer = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, GROUPS)
    features = torchvision_models().mobilenet_v2(weights=None, norm_layer=norm_layer).features
    first = features[0][0]
    if shape[0] != first.in_channels:
        features[0][0] = nn.Conv2d(shape[0], first.out_channels, 3, 2, 1, bias=False)
    for module in features.modules():
        if isinstance(module, nn.ReLU6):
            module.inplace = False
    layers = OrderedDict(features=features, mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    return {"extractor": nn.Sequential(layers), "classifier": nn.Linear(WIDTH, classes)}


def torchvision_models() -> ModuleType:
    """torchvision.models, imported only here: it takes two seconds that no other network needs."""
    with LOCK, torch.device("cpu"):  # not on "meta", where models are built: modules may make tensors on import
        try:
            try:
                return importlib.import_module("torchvision.models")
            except RuntimeError as error:
                if not any(f"torchvision::{name} " in str(error) for name in OPERATORS):
                    raise
                declare_operators()
                return importlib.import_module("torchvision.models")
        except (ImportError, RuntimeError) as error:
            raise LocalError(
                f"model 'mobilenet-v2' is torchvision's, which cannot be imported beside torch {torch.__version__}: "
                f"{error}; install the torchvision of this torch release"
            ) from error


def declare_operators() -> None:
    """Declare the operators that torchvision describes while it is imported, where they do not exist.

    Where a CPU torch stands beside a torchvision that was built for another, torchvision cannot load its own operators
    and its import ends in "operator torchvision::nms does not exist". No classifier calls them: it is enough that they
    have a schema, and they have no implementation here.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    DECLARED.append(library)
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]

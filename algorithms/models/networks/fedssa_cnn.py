"""The five CNNs of FedSSA's heterogeneous silos, and three small ones for digits.

Yi et al., "FedSSA", 2024, Table 3: two 5x5 convolutions without padding, each with ReLU and 2x2
max-pool, then FC1 and FC2 with ReLU, and FC3, the header. FC2 has 500 units in all five, so that
their headers are exchangeable. The paper gives no activation and no padding; without padding the
parameter counts meet the printed sizes (3x32x32, 10 classes):

===========  =============  ====  ==========  ========  ===============================
network      conv1, conv2   FC1   parameters  MiB       Table 3
===========  =============  ====  ==========  ========  ===============================
CNN-1        16, 32         2000  2,621,558   10.00     10.00
CNN-2        16, 16         2000  1,815,142   6.92      6.92
CNN-3        16, 32         1000  1,320,558   5.04      5.04
CNN-4        16, 32         800   1,060,358   4.04      3.81, which its own layers deny
CNN-5        16, 32         500   670,058     2.56      2.55
===========  =============  ====  ==========  ========  ===============================

The small ones (not from the paper) end in 64 units, as cnn-digits does, and take 8x8 as well as
28x28 pixels.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

Builder: TypeAlias = Callable[[tuple[int, int, int], int, str], dict[str, nn.Module]]

WIDTH = 500  # units of FC2, the representation that the header reads
DIGITS_WIDTH = 64


def fedssa_cnn(filters: int, units: int) -> Builder:
    """A CNN of Table 3 by the filters of its second convolution and the units of FC1.

    It needs 16 pixels a side, since its 5x5 convolutions do not pad.
    """
    return _cnn((16, filters), 5, 0, (units, WIDTH))


def digits_cnn(filters: tuple[int, ...], units: tuple[int, ...]) -> Builder:
    """A small CNN by its 3x3 convolutions' filters and the units of the layers before the last.

    Convolutions pad, so 4 pixels a side are enough for two of them.
    """
    return _cnn(filters, 3, 1, (*units, DIGITS_WIDTH))


def _cnn(filters: tuple[int, ...], kernel: int, padding: int, units: tuple[int, ...]) -> Builder:
    """Convolutions with ReLU and 2x2 max-pool, then fully connected layers with ReLU.

    A linear classifier.
    """

    def build(shape: tuple[int, int, int], classes: int, _: str) -> dict[str, nn.Module]:
        inputs, *sides = shape
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for number, outputs in enumerate(filters, 1):
            layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, kernel, padding=padding)
            layers[f"relu{number}"] = nn.ReLU()
            layers[f"pool{number}"] = nn.MaxPool2d(2)
            # A convolution leaves side + 2·padding − kernel + 1, and pooling halves it.
            inputs, sides = outputs, [(side + 2 * padding - kernel + 1) // 2 for side in sides]
        layers["flatten"] = nn.Flatten()
        inputs *= sides[0] * sides[1]
        for number, outputs in enumerate(units, 1):
            layers[f"fc{number}"] = nn.Linear(inputs, outputs)
            layers[f"relu{len(filters) + number}"] = nn.ReLU()
            inputs = outputs
        return {"extractor": nn.Sequential(layers), "classifier": nn.Linear(inputs, classes)}

    return build

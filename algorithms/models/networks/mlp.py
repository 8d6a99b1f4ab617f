"""Networks of PPFL's smaller data sets: a generalised linear model and a two-layer perceptron.

As a network the linear model is an extractor without parameters below one Linear. The perceptron,
for MNIST, has 128 hidden units as in the authors' code: 100,480 + 1,290 parameters. PPFL itself
mixes whole perceptrons there, which are its canonical models (``canonical = "mlp"``) on "glm";
"ppfl-mlp" is what the other methods train.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

HIDDEN = 128


def glm(shape: Sequence[int], classes: int, _: str) -> dict[str, nn.Module]:
    """Multinomial logistic regression on the flattened record.

    The extractor has no parameters.
    """
    return {"extractor": nn.Flatten(), "classifier": nn.Linear(prod(shape), classes)}


def ppfl_mlp(shape: Sequence[int], classes: int, _: str) -> dict[str, nn.Module]:
    """A hidden layer with ReLU on the flattened record, and a linear classifier.

    It has 128 features.
    """
    hidden = OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(prod(shape), HIDDEN), relu=nn.ReLU())
    return {"extractor": nn.Sequential(hidden), "classifier": nn.Linear(HIDDEN, classes)}

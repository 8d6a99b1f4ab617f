"""Models of a package that is not Staddle's, as its people would write them; entry points in
``other_models-0.1.dist-info`` name them.
"""

import torch
from torch import nn


class Mixed(nn.Module):
    """Layers of many kinds for images [B, 1, 8, 8], whose rows are read as a sequence."""

    def __init__(self, outputs, width=16, dropout=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))  # no layer resets it
        self.norm = nn.InstanceNorm2d(1, affine=True)
        self.rows = nn.GRU(8, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.slide = nn.Conv1d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.norm(x).squeeze(1) * self.scale
        x, _ = self.rows(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.relu(self.slide(x.transpose(1, 2)))
        return self.fc(self.drop(x.mean(2)))


def mixed(shape, outputs, width=16, dropout=0.0):
    if shape != (1, 8, 8):
        raise ValueError(f"needs (1, 8, 8), not {shape}")
    return Mixed(outputs, width, dropout)


def normed(shape, outputs):
    """With batch norm, and a head of several layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape[1] * shape[2], 12), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Linear(12, outputs),
    )  # fmt: skip


class Softened(nn.Module):
    """Something runs after what looks like the head."""

    def __init__(self, outputs):
        super().__init__()
        self.trunk = nn.Flatten()
        self.fc = nn.Linear(64, outputs)

    def forward(self, x):
        return self.fc(self.trunk(x)).softmax(1)


class Tied(nn.Module):
    def __init__(self, outputs, across):
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
        (self.fc if across else self.two).weight = self.one.weight

    def forward(self, x):
        return self.fc(self.two(self.one(x.flatten(1))))


class Extended(nn.Module):
    """A linear model, with what a test wants before it: called in training mode too."""

    def __init__(self, outputs, before=None):
        super().__init__()
        self.fc = nn.Linear(64, outputs)
        self.before = before or (lambda x: x)

    def forward(self, x):
        return self.fc(self.before(x.flatten(1)))


class Twice(Extended):
    """One layer under two names, or twice in a list of layers."""

    def __init__(self, outputs, listed):
        super().__init__(outputs)
        layer = nn.Linear(64, 64)
        self.one = self.two = nn.Sequential(layer, layer) if listed else layer

    def forward(self, x):
        return self.fc(self.two(self.one(x.flatten(1))))


class TiedRows(Extended):
    """Two recurrent layers that share a parameter."""

    def __init__(self, outputs):
        super().__init__(outputs)
        self.one, self.two = nn.GRU(8, 64, batch_first=True), nn.GRU(8, 64, batch_first=True)
        self.two.weight_ih_l0 = self.one.weight_ih_l0

    def forward(self, x):
        return self.fc((self.one(x[:, 0])[0] + self.two(x[:, 0])[0]).mean(1))


def twice(shape, outputs, listed=False):
    return Twice(outputs, listed)


def tied_rows(shape, outputs):
    return TiedRows(outputs)


def softened(shape, outputs):
    return Softened(outputs)


def tied(shape, outputs, across=False):
    return Tied(outputs, across)


def double(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs)).double()


def text(shape, outputs):
    return "a model"


def pair(shape, outputs):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, outputs)

        def forward(self, x):
            return self.fc(x.flatten(1)), x

    return Pair()


def stored(shape, outputs):
    model = Extended(outputs)
    model.register_buffer("offset", torch.ones(64), persistent=False)
    return model


def centred(shape, outputs):
    """Each record moves the others, without a layer that is known for it."""
    return Extended(outputs, lambda x: x - x.mean(0) if len(x) else x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + len(x)
        return x


def counting(shape, outputs):
    return Extended(outputs, Counting())


def typed(shape, outputs, option=None, dropout=0.0):
    """Whole numbers, decimals and truths make different models."""
    layers = {bool: nn.Tanh(), int: nn.ReLU(), float: nn.Sigmoid()}
    layer = layers.get(type(option), nn.Identity())
    return Extended(outputs, nn.Sequential(layer, nn.Dropout(dropout)) if dropout else layer)


def huge(shape, outputs, layers=1):
    """A gigabyte, at the first layer or the last."""
    return nn.Sequential(
        nn.Flatten(), *(nn.Linear(64, 2**20) for _ in range(layers)), nn.Linear(64, outputs)
    )


def failing(shape, outputs, how="OSError"):
    raise {
        "OSError": OSError(2, "no weights"),
        "SystemExit": SystemExit("no licence"),
        "KeyError": KeyError("depth"),
        "RecursionError": RecursionError("too deep"),
    }[how]


DEVICES = []  # on which ``greedy`` made its tensor


def greedy(shape, outputs, numbers=2**29):
    """A tensor that is filled before a layer has it."""
    model = Extended(outputs)
    tensor = torch.empty(numbers)
    DEVICES.append(tensor.device.type)
    model.table = nn.Parameter(tensor.normal_())
    return model


def deep(shape, outputs, depth=10_000):
    return nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(depth)))


class Stuck(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def reset_parameters(self):
        raise KeyError("values")

    def forward(self, x):
        return x * self.weight


def stuck(shape, outputs):
    return Extended(outputs, Stuck())


class Lazy(nn.Module):
    """A buffer that comes with the first record."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x):
        self.seen = x.detach().mean(0)
        return x


def lazy(shape, outputs):
    return Extended(outputs, Lazy())


class Dotted(nn.Module):
    """Two submodules whose dotted names differ in dots and underscores alone."""

    def __init__(self, outputs):
        super().__init__()
        self.a = nn.Module()
        self.a.b, self.a_b = nn.Linear(64, 5), nn.Linear(5, outputs)

    def forward(self, x):
        return self.a_b(self.a.b(x.flatten(1)))


def dotted(shape, outputs):
    return Dotted(outputs)


NUMBER = 3


class Attending(Extended):
    """Rows of an image [B, 1, 8, 8] that attend to each other, by layers or by torch's own."""

    def __init__(self, outputs, own=True):
        super().__init__(outputs)
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.own = own

    def forward(self, x):
        x = x.squeeze(1)
        if self.own:
            weights = (self.query(x) @ x.mT).softmax(-1)
            x = self.norm(x + weights @ self.value(x))
        else:
            x = self.encoder(x)
        return self.fc(x.flatten(1))


def attending(shape, outputs, own=True):
    model = Attending(outputs, own)
    for name in ("encoder",) if own else ("query", "value", "norm"):
        delattr(model, name)
    return model


class Peeking(Extended):
    """Computes by whether its layer trains, or by its parameters."""

    def __init__(self, outputs, how):
        super().__init__(outputs)
        self.one, self.how = nn.Linear(64, 64), how

    def forward(self, x):
        x = x.flatten(1)
        if self.how == "grad":
            return self.fc(self.one(x) if self.one.weight.requires_grad else x)
        return self.fc(self.one(x) / (1 + sum(p.square().sum() for p in self.one.parameters())))


def peeking(shape, outputs, how="grad"):
    return Peeking(outputs, how)


def replaced(shape, outputs):
    """A layer whose call was replaced, so that an adapter of it would do nothing."""
    model = Extended(outputs, nn.Linear(64, 64))
    layer = model.before
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)
    return model


def own_names(shape, outputs):
    """A linear layer that has a name of an adapter."""
    layer = nn.Linear(64, 64)
    layer.lora_scale = nn.Parameter(torch.ones(()))
    return Extended(outputs, layer)


class Pixels(nn.Module):
    """Outputs for each pixel, or for those of a smaller image."""

    def __init__(self, channels, outputs, stride):
        super().__init__()
        self.body = nn.Conv2d(channels, 6, 3, stride, padding=1)
        self.head = nn.Conv2d(6, outputs, 1)

    def forward(self, x):
        return self.head(self.body(x).relu())


def pixels(shape, outputs, stride=1):
    return Pixels(shape[0], outputs, stride)


class Point(nn.Conv1d):
    """A convolution of one position, on vectors."""

    def forward(self, x):
        return super().forward(x.flatten(1)[..., None])[..., 0]


class Pointwise(nn.Module):
    def __init__(self, outputs, sides):
        super().__init__()
        self.body, self.head, self.sides = nn.Linear(64, 64), Point(64, outputs, 1), sides

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).reshape(len(x), *self.sides))


def pointwise(shape, outputs, sides=(64,)):
    return Pointwise(outputs, sides)


class OddHeads(nn.Module):
    """Its last layer is a norm, or a convolution of several positions; both have a weight."""

    def __init__(self, outputs, kernel):
        super().__init__()
        self.body = nn.Linear(64, outputs * kernel)
        self.wide = Wide(outputs, kernel) if kernel > 1 else nn.Identity()
        self.norm = nn.LayerNorm(outputs) if kernel == 1 else nn.Identity()

    def forward(self, x):
        return self.norm(self.wide(self.body(x.flatten(1))))


class Wide(nn.Conv1d):
    def __init__(self, outputs, kernel):
        super().__init__(outputs, outputs, kernel)

    def forward(self, x):
        return super().forward(x.reshape(len(x), self.in_channels, -1))[..., 0]


def odd_heads(shape, outputs, kernel=1):
    return OddHeads(outputs, kernel)


class Ward(nn.Module):
    """An image, laboratory values and a note of tokens, each by its own layers."""

    def __init__(self, shapes, tokens, outputs, width, dense):
        super().__init__()
        self.see = nn.Conv2d(shapes["image"][0], width, 3, padding=1)
        self.measure = nn.Linear(shapes["labs"][0], width)
        self.read = nn.Embedding(tokens, width)
        self.mix = nn.Linear(3 * width, width)
        self.fc = nn.Conv2d(2 * width, outputs, 1) if dense else nn.Linear(width, outputs)
        self.dense = dense

    def forward(self, image, note, labs):
        seen, measured = self.see(image), self.measure(labs)
        read = self.read(note).mean(1)
        if self.dense:
            whole = measured + read
            return self.fc(torch.cat([seen, whole[:, :, None, None].expand_as(seen)], 1).relu())
        seen = seen.relu().flatten(2).mean(2)
        return self.fc(self.mix(torch.cat([seen, measured, read], 1).relu()).relu())


def ward(shapes, outputs, tokens=20, width=8, dense=False):
    return Ward(shapes, tokens, outputs, width, dense)

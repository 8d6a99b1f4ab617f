"""Models that are made to leak records, and what is read out of the step from one model to the
next.

*Bins* (Fowl et al., "Robbing the Fed", ICLR 2022). Every row of the first layer has the same
weights, and takes records in up to another brightness; behind it all rows weigh alike. So the
gradients of two neighbouring rows differ by the records between their thresholds, times a number
that the gradients of their biases have too: where one record lies between, it is the quotient.

*Rare units* (Boenisch et al., "When the Curious Abandon Honesty", EuroS&P 2023). Rows stay what
they are, and take records in so rarely, by their biases alone, that the gradient of one is often
that of a single record. Behind convolutions the quotient is what these make of the record, out of
which a map that was fitted to other records makes the record again.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d

from staddle.algorithms.data.dataset import digits

READ_DB = 25.0  # peak signal-to-noise ratio from which on a record counts as read
CLASSES = 10
RARE = 0.98  # share of the records that the attacker knows which a rare unit does not take in
RIDGE = 0.1
MODEL = {"name": "ppfl-mlp", "input": [1, 8, 8], "classes": CLASSES}
CONVOLVED = {"name": "digits-cnn-c", "input": [1, 8, 8], "classes": CLASSES}


def others_records():
    """What an attacker has seen elsewhere: the digits that no test deals to a silo."""
    return digits().x[1000:]


@dataclass
class Layer:
    """What leaks: ``rows`` of ``width`` numbers, behind convolutions where ``filters`` are the
    parameters of these.
    """

    model: dict
    name: str
    rows: int
    width: int
    scale: float  # of what all rows of bins weigh
    filters: tuple = ()

    def __post_init__(self):
        self.known, self.fitted = others_records(), None

    def bins(self, mean):
        """The trap, tensors by name; filters begin from those of ``mean``."""
        made = self.fit(mean)
        row = torch.full((self.width,), self.scale / self.width)
        thresholds = torch.quantile(
            self.goes_in(made, self.known) @ row, torch.linspace(0.01, 0.99, self.rows)
        )
        classes = torch.linspace(-0.3, 0.3, CLASSES)[:, None].expand(-1, self.rows).clone()
        return made | {
            f"{self.name}.weight": row.expand(self.rows, -1).clone(),
            f"{self.name}.bias": -thresholds,
            "classifier.weight": classes,
            "classifier.bias": torch.zeros(CLASSES),
        }

    def rare(self, mean):
        """The model with other biases, tensors by name."""
        made = self.fit(mean)
        taken = self.goes_in(made, self.known) @ made[f"{self.name}.weight"].T
        return made | {f"{self.name}.bias": -torch.quantile(taken, RARE, dim=0)}

    def fit(self, mean):
        """The model with filters that keep what records are; fitted once."""
        if self.filters and self.fitted is None:
            self.fitted = fitted([mean[name] for name in self.filters], self.known[:300])
        return dict(mean) | dict(zip(self.filters, self.fitted or (), strict=True))

    def goes_in(self, model, records):
        """What the layer is given of records, [N, width]."""
        if not self.filters:
            return records.flatten(1)
        return convolved(records, *(model[name] for name in self.filters))

    def read(self, before, after, records, bins):
        """Which of the ``records`` [N, ...] stand in the step from one model to the other, both
        tensors by name.
        """
        names = f"{self.name}.weight", f"{self.name}.bias"
        weight, bias = ((after[name].double() - before[name].double()) for name in names)
        if bins:
            weight, bias = (
                torch.cat([each, torch.zeros_like(each[:1])]).diff(dim=0) for each in (weight, bias)
            )
        found = (weight / bias[:, None])[bias.abs() > 1e-12]
        if self.filters:
            found = with_one(found) @ mapped(
                self.goes_in(before, self.known).double(), self.known.flatten(1).double()
            )
        return near(found, records)


LAYERS = {
    "dense": Layer(MODEL, "extractor.fc", 128, 64, 3.0),
    "convolved": Layer(
        CONVOLVED, "extractor.fc1", 64, 256, 6.0, ("extractor.conv1.weight", "extractor.conv1.bias")
    ),
}


def near(found, records):
    """Which of the ``records`` [N, ...] are among what was ``found`` [M, numbers], up to
    ``READ_DB``.
    """
    true = records.reshape(len(records), -1).double()
    if not len(found):
        return set()
    errors = torch.cdist(true, found).square() / true.shape[1]
    read = -10 * torch.log10(errors.min(dim=1).values) > READ_DB
    return set(torch.nonzero(read).flatten().tolist())


def convolved(records, weight, bias):
    """As the first layers of ``CONVOLVED`` do it."""
    return max_pool2d(torch.relu(conv2d(records, weight, bias, padding=1)), 2).flatten(1)


def fitted(filters, records):
    """Filters near those given, out of whose result a linear map makes the records again:
    by Adam, with the best map at each step.
    """
    began = convolved(records, *filters).mean()
    filters = [nn.Parameter(each.clone()) for each in filters]
    optimiser = torch.optim.Adam(filters, lr=0.02)
    for _ in range(40):
        optimiser.zero_grad()
        given = convolved(records, *filters)
        inverse = mapped(given.detach(), records.flatten(1))
        (with_one(given) @ inverse - records.flatten(1)).square().mean().backward()
        optimiser.step()
    # what goes into the layer stays as large: a sum takes no number beyond the clip
    larger = (convolved(records, *filters).mean() / began).detach()
    return [each.detach() / larger for each in filters]


def mapped(given, wanted):
    """The linear map, [numbers + 1, wanted numbers], by ridge regression."""
    given = with_one(given)
    return torch.linalg.solve(
        given.T @ given + RIDGE * torch.eye(given.shape[1], dtype=given.dtype), given.T @ wanted
    )


def with_one(rows):
    """A column of ones more."""
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)

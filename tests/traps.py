"""A model that is made to leak records (Fowl et al., "Robbing the Fed", ICLR 2022), and what is read out of its step.

Every row of the first layer has the same weights, and takes records in up to another brightness; behind it all rows
weigh alike. So the gradients of two neighbouring rows differ by the records between their thresholds, times a number
that the gradients of their biases have too: where one record lies between, it is the quotient.
"""

import torch

from staddle.algorithms.data import digits

READ_DB = 25.0  # peak signal-to-noise ratio from which on a record counts as read
SCALE = 3.0
CLASSES = 10
WEIGHT, BIAS = "extractor.fc.weight", "extractor.fc.bias"
MODEL = {"name": "ppfl-mlp", "input": [1, 8, 8], "classes": CLASSES}  # 128 rows of 64


def trap(known):
    """Tensors of ``MODEL`` by name; ``known`` [N, ...] are records of others, which say how bright records are."""
    rows, width = 128, known[0].numel()
    brightness = known.reshape(len(known), -1).mean(dim=1)
    thresholds = torch.quantile(brightness, torch.linspace(0.01, 0.99, rows))
    alike = torch.linspace(-0.3, 0.3, CLASSES)[:, None].expand(CLASSES, rows)
    return {
        WEIGHT: torch.full((rows, width), SCALE / width),
        BIAS: -SCALE * thresholds,
        "classifier.weight": alike.clone(),
        "classifier.bias": torch.zeros(CLASSES),
    }


def read(before, after, records):
    """How many of the ``records`` [N, ...] stand in the step from one model to the other, both tensors by name."""
    weight, bias = ((after[name].double() - before[name].double()) for name in (WEIGHT, BIAS))
    weight, bias = (torch.cat([each, torch.zeros_like(each[:1])]).diff(dim=0) for each in (weight, bias))
    found = (weight / bias[:, None])[bias.abs() > 1e-12]
    true = records.reshape(len(records), -1).double()
    errors = torch.cdist(true, found).square() / true.shape[1]
    best = -10 * torch.log10(errors.min(dim=1).values) if len(found) else torch.full((len(true),), -torch.inf)
    return int((best > READ_DB).sum())


def others_records():
    """What an attacker has seen elsewhere: the digits that no test deals to a silo."""
    return digits().x[1000:]

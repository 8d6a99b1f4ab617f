"""Snapshots of a simulation that never ran: small, and each made of the one before it as a round
makes one.
"""

import torch

from staddle.algorithms.course import SiloState
from staddle.algorithms.engines.aggregation import Shelved
from staddle.algorithms.engines.simulation import Snapshot


def state(value, size=3):
    parts = {"extractor": {"w": torch.full((size,), float(value))}, "classifier": {}}
    return SiloState(parts, {"n": torch.tensor(value)})


def begun(silos=4):
    return Snapshot(
        1, {f"s{i}": state(i) for i in range(silos)}, frozenset(), {}, Shelved({}, {}, {})
    )


def after(before, changed, value):
    """The next snapshot, in which these silos trained; all the rest are the same objects."""
    states = {**before.held, **{silo: state(value) for silo in changed}}
    given = {("extractor", silo): {"w": torch.tensor([float(value)])} for silo in changed}
    mail = {key: held for key, held in before.shelved.mail.items() if key[1] not in changed}
    mail["extractor", min(set(before.held) - set(changed))] = {
        "@keep": torch.tensor(0.5, dtype=torch.float64)
    }
    shelved = Shelved(
        {"model": {"w": torch.tensor([value])}}, {**before.shelved.versions, **given}, mail
    )
    trained, weights = before.trained | set(changed), {"weights": torch.tensor([[value]])}
    return Snapshot(before.round + 1, states, trained, weights, shelved)


def story(length=3):
    """Snapshots that follow one another, two of four silos a round."""
    told = [begun()]
    for number in range(1, length):
        told.append(after(told[-1], [f"s{number % 4}", f"s{(number + 1) % 4}"], 10 * number))
    return told


def told(snapshot):
    """All of a snapshot, for comparison."""
    states = {}
    for silo, held in snapshot.held.items():
        one = held if isinstance(held, SiloState) else held()
        parts = {part: listed(held) for part, held in one.parts.items()}
        states[silo] = parts, listed(one.extra), one.taints
    shelved = [
        {key: listed(held) for key, held in room.items()}
        for room in (snapshot.shelved.published, snapshot.shelved.versions, snapshot.shelved.mail)
    ]
    return snapshot.round, states, snapshot.trained, listed(snapshot.coordinator), shelved


def listed(tensors):
    return [(name, tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()]

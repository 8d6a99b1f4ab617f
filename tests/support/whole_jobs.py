"""Whole jobs without a network, and how two of them are compared."""

from collections.abc import Mapping

from torch.testing import assert_close

from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation


def trained(job, shards, rounds=None, begun=None):
    """The simulation after so many rounds, or all of them, before the last delivery."""
    records = {silo: Records(*sides) for silo, sides in shards.items()}
    simulation = Simulation(job, Serial(job, records), begun=begun)
    for _ in range(simulation.round, job.length if rounds is None else rounds):
        simulation.step()
    return simulation


def check_tensors(found, expected, within=0.0):
    """Each expected tensor is found under its name; tensors may stand in parts.

    All bits are the same unless a tolerance is given.
    """
    common = {name: found[name] for name in expected}
    if all(isinstance(value, Mapping) for value in expected.values()):
        common = {part: {n: found[part][n] for n in own} for part, own in expected.items()}
    assert_close(common, dict(expected), atol=within, rtol=1e-5 if within else 0)


def check_states(found, expected, within=0.0):
    """Silos hold all that others hold in the parts of their models."""
    for silo, state in expected.items():
        check_tensors(found[silo].parts, state.parts, within)

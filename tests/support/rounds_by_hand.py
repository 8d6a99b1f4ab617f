"""Rounds without training, whose contributions a test makes by hand."""

from staddle.algorithms.engines.aggregation import MemoryArchive, close_round
from staddle.algorithms.exchange.plain import PLAIN


def collected(part, contributions):
    """What an exchange in the clear makes of the silos' contributions to one part."""
    given = [PLAIN.contribute(part, contribution) for contribution in contributions]
    return PLAIN.collect(part, range(len(given)), lambda i, name: given[i][name])


def closed(method, state, round_, contributions, archive=None):
    """The coordinator's state after a round; contributions are by silo, then by part."""
    parts = method.up(round_)
    given = {}
    for silo, own in contributions.items():
        given |= {(part.name, silo): PLAIN.contribute(part, own[part.name]) for part in parts}
    of = round_, tuple(contributions), parts
    read = lambda part, silo, name: given[part, silo][name]
    return close_round(method, PLAIN, state, *of, read, archive or MemoryArchive())[0]

"""A silo whose agent is ours but for what it deals or gives: ``hostile_dealer.py HOW --config
CONFIG``, for tests.

``rubbish:SILO``: what it seals to this silo does not open. ``inconsistent``: none of the shares
that it deals join.
``one:SILO``: the share of this silo does not join with others. ``lies:SILO``: it complains of this
honest dealer.
``beyond``: it adds to each number of a sum what no value within the clip can, and tags what it
gives.
``once:NUMBER``: the same, in sums over so many silos alone.
"""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from staddle.proto.channel import require_tls13

require_tls13()

from staddle import log  # noqa: E402
from staddle.errors import RefusedError  # noqa: E402
from staddle.security.identity.domains import SECAGG_DEALING  # noqa: E402
from staddle.security.log.merkle import Tree  # noqa: E402
from staddle.security.secagg import dealing, masked_sum  # noqa: E402
from staddle.security.secagg import silo as secagg_silo  # noqa: E402
from staddle.silo import config as configs  # noqa: E402
from staddle.silo import daemon  # noqa: E402
from staddle.silo.egress import messages  # noqa: E402

deal, split, open_portion = secagg_silo.deal, dealing.split, secagg_silo.open_portion


def rubbish(victim):
    """The portion for one holder is random bytes, under a root that the dealer signs."""

    def dealt(ctx, *given):
        honest, portions, kept = deal(ctx, *given)
        spoil = lambda portion: replace(portion, sealed=os.urandom(len(portion.sealed)))
        spoilt = tuple(spoil(each) if each.holder == victim else each for each in portions)
        root = Tree(portion.leaf() for portion in spoilt).root()
        unsigned = replace(honest, root=root, signature=b"")
        signature = given[-1](SECAGG_DEALING, unsigned.signed_bytes(ctx))
        return replace(unsigned, signature=signature), spoilt, kept

    secagg_silo.deal = dealt


def inconsistent(*victims):
    """Shares that fit their commitments: of another secret for the silos of these ids, or
    for all.
    """

    def of_another(secret, threshold, holders, draw):
        shares = split(secret, threshold, holders, draw)
        wrong = split(os.urandom(32), threshold, holders, draw)
        chosen = places(victims) if victims else range(len(holders))
        numbers = [holders[place] for place in chosen]
        return {**shares, **{number: wrong[number] for number in numbers}}

    dealing.split = of_another


def places(victims):
    """Where silos stand among all, which the job's are."""
    return [sorted(("north", "east", "south", "west")).index(victim) for victim in victims]


def lies(accused):
    """It complains of what an honest dealer sealed to it, with the true key: all opens and fits."""

    def opened(portion, ctx, dealer, receiving):
        if dealer.silo == accused:
            raise RefusedError(accused, "SHARES", "a lie")
        return open_portion(portion, ctx, dealer, receiving)

    secagg_silo.open_portion = opened


def beyond():
    """A sixteenth of the ring is added to each number after it was quantised."""
    quantise = masked_sum.quantise

    def shifted(group, values, weight, into):
        quantise(group, values, weight, into)
        into += into.dtype.type(1 << group.ring - 4)

    masked_sum.quantise = shifted


def once(number):
    """``beyond`` where so many silos are in the sum; in others it gives what it is to."""
    chunks, honest = masked_sum.masked_chunks, masked_sum.quantise
    beyond()
    shifted = masked_sum.quantise

    def made(spec, *given, **pads):
        masked_sum.quantise = shifted if len(spec.cohort) == int(number) else honest
        return chunks(spec, *given, **pads)

    messages.masked_chunks = made


def main(how, config):
    """The agent as it ships, with one of these."""
    name, _, silo = how.partition(":")
    kinds = {"rubbish": rubbish, "inconsistent": inconsistent, "one": inconsistent}
    kinds |= {"lies": lies, "beyond": beyond, "once": once}
    kinds[name](*([silo] if silo else []))
    loaded = configs.load(config)
    log.setup(loaded.log)
    asyncio.run(daemon.serve(loaded))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[3]))

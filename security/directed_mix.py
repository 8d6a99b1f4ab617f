"""``Mix`` by one secure sum a recipient, under a pad that the recipient alone takes off: SECURITY.md rule 9.

The instance is a secure sum with signed survivors as any other (masked_sum.py, secagg_silo.py), of exchange ``mix`` and
with the integer weights of the row as its public counts: each sender weights by w_j = a_j / Σ a before it rounds. Only
the masks differ. Sender j adds one term more, and what the coordinator opens is still hidden by all pads::

    pad key   HKDF(X25519(exchange_j, exchange_r), salt = ctx, info = framed(MIX_PAD, prg, j, r, round, group_1, …))
    silo j    q(w_j x_j) + masks + PRG(pad_jr)
    opened    Σ_j q(w_j x_j) + Σ_j PRG(pad_jr)           over the survivors, at the coordinator: noise, to it
    r         subtracts the pads of exactly the survivors whose signatures it has seen, then canaries and tags

The recipient is in the cohort with weight 0: it deals and holds shares and sees the survivors, and a_r x_r is added
by itself and never sent. Where silos were lost, the row is the weighted mean over the survivors. The context is of one
attempt, so no pad is used twice, though both X25519 keys are those of the roster. Coordinator and recipient together
see this one row; coordinator and another silo see nothing of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..algorithms.exchange import MIX_BITS
from ..errors import LocalError
from .fixedpoint import Floats, Reals
from .labels import MIX_PAD, framed
from .masked_sum import Accumulator
from .masks import Term
from .pairwise import agree, derive
from .round_spec import Frame, RoundSpec
from .secagg_fault import COORDINATOR, Code, check
from .tags import Tagger


def directed(frame: Frame, recipient: str, weights: Mapping[str, int]) -> Frame:
    """The frame of one recipient's instance, of the coordinator's integer weights by silo, the recipient's included.

    RefusedError, for the coordinator, unless they are whole and add up to 2^32; LocalError for groups with other
    weights than public ones.
    """
    if wrong := [group.name for group in frame.groups if group.weights != "public"]:
        raise LocalError(f"groups {', '.join(wrong)} of a directed Mix have no public weights; declare them so")
    total = sum(weights.values())
    whole = all(weight >= 0 for weight in weights.values()) and total == 1 << MIX_BITS
    check(whole, COORDINATOR, Code.SPEC, f"brings weights of {recipient!r} that add up to {total}, not 2^{MIX_BITS}")
    sent = {**weights, recipient: 0}
    return replace(frame, exchange="mix", recipient=recipient, counts=tuple(sorted(sent.items())))


def pad(spec: RoundSpec, sender: str, seed: bytes, public: bytes, peer: str) -> Term:
    """The pad of one sender: ``seed`` is our raw X25519 key of the roster, ``public`` that of ``peer``, the other side.

    The sender adds it, and the recipient computes the same.
    """
    recipient = spec.recipient
    if spec.exchange != "mix" or sender == recipient or peer not in (sender, recipient):
        raise LocalError(f"{sender!r} sends no pad to {recipient!r} in exchange {spec.exchange!r}")
    names = (group.name.encode() for group in spec.groups)
    fields = (spec.prg.to_bytes(1), sender.encode(), recipient.encode(), spec.round.to_bytes(8), *names)
    return Term(derive(agree(seed, public, peer), spec.context(), framed(MIX_PAD, *fields)))


def open_row(
    spec: RoundSpec,
    hidden: Iterable[bytes | memoryview],
    survivors: Sequence[str],
    pads: Mapping[str, Term],
    own: Sequence[Floats],
    own_weight: int,
    tagged: tuple[Tagger, bytes, bytes] | None,
) -> list[Reals]:
    """At the recipient: its row, [elements] float64 a group, of the opened sum as the coordinator hands it down.

    ``survivors`` are those whose signatures were checked, ``pads`` those of all senders, ``own`` our values with their
    weight; ``tagged`` is a fresh tagger, the group key and the combined tags, where the instance is tagged. The steps
    run in order; RefusedError (SUM) if the sum is not of these survivors.
    """
    # (1) The pads of exactly the survivors come off: canaries come out.
    accumulator = Accumulator(spec)
    accumulator.add(hidden)
    opened = accumulator.open([pads[silo] for silo in survivors if silo != spec.recipient], survivors)
    # (2) Nothing was added to it.
    if spec.tagged != (tagged is not None):
        raise LocalError("a tagged instance is opened with its tags, and another one without")
    if tagged is not None:
        tagger, group_key, combined = tagged
        for index, words in accumulator.numbers():
            tagger.add(index, words)
        tagger.check(combined, group_key, spec.context(), survivors)
    # (3) Our own part, which was never sent.
    rows = []
    for group, each, values in zip(spec.groups, opened, own, strict=True):
        total = each.total
        total += own_weight * values.clip(-group.clip, group.clip)
        rows.append(total / (float(each.weight[0]) + own_weight))
    return rows

"""Flower's SecAgg+ for secure_sum.py: its own functions, in the order of its mod and workflow.

A silo's half are the four functions of ``flwr.client.mod.secure_aggregation.secaggplus_mod``
themselves, without the records and messages around them. The coordinator's half is the arithmetic
of ``SecAggPlusWorkflow``, whose stages cannot be called without a network, line by line. Every silo
is a neighbour of every other, the threshold is ours, all else are the workflow's defaults; models
are given as its ``Parameters``, a serialised array a tensor.

The coordinator adds up one silo's masked vector n times: what it costs does not depend on the
numbers.
"""

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
from clock import Clock
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_extract,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

# a function hides the name
mod: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")

CLIP, QUANTISED, RING, MOST_WEIGHT = 8.0, 1 << 22, 1 << 32, 1000.0  # the workflow's defaults
RECORDS = 300  # of a silo: its weight

Tensors = list[npt.NDArray[Any]]


class Silo:
    """One of n silos that have exchanged keys and shares; its mask is not made yet."""

    def __init__(self, tensors: Tensors, silos: int, threshold: int, clock: Clock) -> None:
        self.parameters = ndarrays_to_parameters(tensors)
        self.states = {nid: mod.SecAggPlusState(nid=nid) for nid in range(1, silos + 1)}
        self.nid = silos // 2 + 1  # in the middle, as ours
        configs = {
            Key.SAMPLE_NUMBER: silos,
            Key.SHARE_NUMBER: silos,
            Key.THRESHOLD: threshold,
            Key.CLIPPING_RANGE: CLIP,
            Key.TARGET_RANGE: QUANTISED,
            Key.MOD_RANGE: RING,
            Key.MAX_WEIGHT: MOST_WEIGHT,
        }
        keys, dealt = {}, {}
        for nid, state in self.states.items():
            with clock.of("setup", counts=nid == self.nid):
                keys[str(nid)] = tuple(mod._setup(state, configs).values())  # noqa: SLF001
        for nid, state in self.states.items():
            with clock.of("setup", counts=nid == self.nid):
                dealt[nid] = mod._share_keys(state, keys)  # noqa: SLF001
        told: dict[int, dict[str, list[Any]]] = {
            nid: {Key.CIPHERTEXT_LIST: [], Key.SOURCE_LIST: []} for nid in self.states
        }
        for source, each in dealt.items():
            for to, ciphertext in zip(
                each[Key.DESTINATION_LIST], each[Key.CIPHERTEXT_LIST], strict=True
            ):
                told[to][Key.CIPHERTEXT_LIST].append(ciphertext)
                told[to][Key.SOURCE_LIST].append(source)
        self._told = told
        self.setup_bytes = sum(map(len, keys[str(self.nid)])) + sum(
            map(len, dealt[self.nid][Key.CIPHERTEXT_LIST])
        )

    def mask(self, nid: int | None = None) -> list[bytes]:
        """What a silo sends."""
        nid = nid or self.nid
        told = self._told[nid]
        state = self.states[nid]
        made = mod._collect_masked_vectors(state, told, RECORDS, self.parameters)  # noqa: SLF001
        sent: list[bytes] = made[Key.MASKED_PARAMETERS]
        return sent

    def unmask(self, nid: int, active: list[int], dead: list[int]) -> list[bytes]:
        """The shares that a silo gives, active ones first."""
        told = {Key.ACTIVE_NODE_ID_LIST: active, Key.DEAD_NODE_ID_LIST: dead}
        shares: list[bytes] = mod._unmask(self.states[nid], told)[Key.SHARE_LIST]  # noqa: SLF001
        return shares


def flower_round(tensors: Tensors, silos: int, threshold: int, clock: Clock) -> int:
    """One secure sum; the bytes that one silo sends."""
    party = Silo(tensors, silos, threshold, clock)
    with clock.of("mask"):
        sent = party.mask()
    # The others open their shares before they mask: an empty model does that for a thousandth of
    # the time.
    own, party.parameters = party.parameters, ndarrays_to_parameters([np.zeros(1, np.float32)])
    for nid in party.states:
        if nid != party.nid:
            party.mask(nid)
    party.parameters = own
    everyone = sorted(party.states)
    with clock.of("unmask"):
        shares = party.unmask(party.nid, everyone, [])
    for dead in ([], everyone[:1]):
        _coordinator(party, sent, dead, clock)
    return party.setup_bytes + sum(map(len, sent)) + sum(map(len, shares))


def _coordinator(party: Silo, sent: list[bytes], dead: list[int], clock: Clock) -> None:
    """Stages "collect masked vectors" and "unmask"; with ``dead`` lost after they dealt."""
    active = [nid for nid in sorted(party.states) if nid not in dead]
    shares = {nid: party.unmask(nid, active, dead) for nid in active}
    by_owner = dict(zip(active + dead, zip(*shares.values(), strict=True), strict=True))
    name = " after a dropout" if dead else ""
    with clock.of(f"fold{name}"):
        masked = [bytes_to_ndarray(each) for each in sent]
        for _ in active[1:]:
            masked = parameters_addition(masked, [bytes_to_ndarray(each) for each in sent])
        masked = parameters_mod(masked, RING)
    with clock.of(f"open{name}"):
        for nid, owned in by_owner.items():
            secret = combine_shares(list(owned))
            if nid in active:
                masked = parameters_subtraction(
                    masked, pseudo_rand_gen(secret, RING, get_parameters_shape(masked))
                )
                continue
            for other in active:
                public = party.states[other].pk1
                shared = generate_shared_key(
                    bytes_to_private_key(secret), bytes_to_public_key(public)
                )
                pair = pseudo_rand_gen(shared, RING, get_parameters_shape(masked))
                masked = (parameters_addition if nid > other else parameters_subtraction)(
                    masked, pair
                )
        total, masked = factor_extract(parameters_mod(masked, RING))
        offset, scale = -(len(active) - 1) * CLIP, QUANTISED / max(int(total), 1)
        for mean in dequantize(masked, CLIP, QUANTISED):
            np.add(mean, offset, out=mean)
            np.multiply(mean, scale, out=mean)

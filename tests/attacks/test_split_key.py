"""A coordinator in league with one silo splits the key of a job's silos, over real TLS, against the
agent as it ships.

The silo signs two contributions. The coordinator brings one to the real silo and the other to the
rest. The attack's measure is what it gets for that: what the real silo gives, and whether a sum
with its model in it is opened that it cannot check. Whom the silo's ledger names is what is known.
"""

import pytest
from support.hostile_coordinator import SILO, play, records
from support.hostile_keyed_coordinator import LIAR, Keyed
from support.hostile_sum_coordinator import OTHERS, make_world

from staddle.proto.convert import group_key as messages
from staddle.proto.convert.secagg_received import (
    SecaggDelivery,
    SignedSpec,
    secagg_delivery_to_wire,
)
from staddle.proto.convert.secagg_sent import secagg_upload_from_wire
from staddle.security.blind import group_key as g
from staddle.security.blind.sealing import letters
from staddle.security.faults import COORDINATOR
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.receiving_keys import deliver_keys

pytestmark = [pytest.mark.actor("coordinator and silos"), pytest.mark.usefixtures("hurried")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    security = {"secure_aggregation": "required", "weight_most": 2000}
    return make_world(tmp_path_factory.mktemp("attacked"), {"first": security})


class Split(Keyed):
    """``fitting``: the real silo is told a specification of its own, which fits what it was
    brought.
    """

    def __init__(self, world, fitting):
        self.fitting = fitting
        super().__init__(world)
        self.tasks.pop()  # one round

    def second(self):
        """What the real silo is brought."""
        changed = tuple(bytes([each[0] ^ 1]) + each[1:] for each in self.secrets[LIAR])
        lie = g.contribute(self.epoch, LIAR, *changed, self.world.others[LIAR].sign)
        return {**self.parts(), LIAR: lie}

    async def group_key(self, request, context):
        self.calls["group_key"] += 1
        brought = self.second().values()
        relayed = (g.Relayed(given, letters(pieces)[SILO]) for given, pieces in brought)
        return messages.secagg_delivery_to_wire(tuple(relayed))

    async def contribute(self, request, context):
        taken = await super().contribute(request, context)
        own = messages.contributed_from_wire(SILO, request).contribution
        parts = g.parts_of((own, *(given for given, _ in self.second().values())))
        assert parts != self.tagged.parts
        if self.fitting:
            spec = self.tagged.spec.model_copy(update={"key_parts": parts.hex()})
            self.own = self.tagged.named(spec)
            payload = spec.signed_bytes()
            signed = SignedSpec(payload, self.world.keys.sign(SECAGG_SPEC, payload), ())
            self.tagged.told[0] = secagg_delivery_to_wire(SecaggDelivery(self.own, signed))
        return taken

    async def secure(self, request, context):
        """The real silo's keys are told on beside those of the others, which are for another
        attempt.
        """
        given, made = secagg_upload_from_wire(SILO, request), self.tagged.state
        if self.fitting and isinstance(given.body, s.SendKeys):
            bundles = {SILO: given.body.bundle, **made.bundles}
            keys = tuple(deliver_keys(silo, made.keys[silo])[SILO] for silo in OTHERS)
            told = s.KeysReceived(tuple(bundles[silo] for silo in sorted(bundles)), keys)
            self.tagged.told.append(secagg_delivery_to_wire(SecaggDelivery(self.own, told)))
        return await super().secure(request, context)


@pytest.mark.parametrize(
    "fitting", [False, True], ids=["one specification", "a specification of its own"]
)
def test_silos_with_different_keys_give_nothing_under_them(world, tmp_path, fitting):
    """Before: the sum was opened with the real silo's model in it, whose tag no silo could check.

    Nobody was named.
    """
    hostile = play(Split(world, fitting), tmp_path)
    found = records(tmp_path)
    gained = [kind for _, _, kind in hostile.given if kind not in ("keys", "end")]
    opened = hostile.tagged.opened is not None
    assert not opened, f"a sum with the real silo's model was opened; it gave {gained}"
    assert (gained, hostile.contexts) == ([], [])
    assert [kind for _, _, kind in hostile.given].count("keys") == fitting
    ends = [each for each in found if each["type"] == "secagg.end"]
    ended = [(each["round"], each["code"], each["blame"]) for each in ends]
    assert ended == [(0, "KEYS", COORDINATOR)]

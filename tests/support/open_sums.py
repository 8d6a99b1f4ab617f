"""Tagged sums of a job's rounds, and deliveries of them, by a coordinator in the test's hand.

No masks: they cancel.
"""

import asyncio

import torch
from support.framed import framed
from support.keyed_jobs import KEY, PARTS, SILOS, sharing_of
from support.recording_gate import Made, World, records

from staddle.algorithms.exchange.parts import DTYPES, WEIGHT, delivered_items
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.commands.federation import local_federation
from staddle.proto.convert.open_sum import sum_to_wire
from staddle.proto.wire import tensor_bytes
from staddle.security.blind import sum as blind_sum
from staddle.security.blind.open_sum import Claim, tag_of
from staddle.security.blind.plan import JobPlan, summed
from staddle.security.blind.silo_pads import silo_pads
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.identity.keys import load_keys
from staddle.security.secagg import linear_tags
from staddle.security.secagg.masked_sum import Accumulator, check_group_values, masked_chunks
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.spec import specify
from staddle.silo.ingress.open_sums import IncomingSums

MODEL = "ee" * 32
ME = SILOS[0]
SUMS = {"secure_aggregation": "required", "clip_exponent": 6}
SUMS |= {"weights": "public", "dropouts": "any", "counts": dict.fromkeys(SILOS, 30)}
COUNTED, HIDDEN = {**SUMS, "tags": True}, {**SUMS, "audience": "silos"}
IN_BATCHES = {"weights": "private", "dropouts": "batches", "counts": {}}
CONVNET = {"name": "convnet-digits", "classes": 3}


def make_tagged(folder) -> Made:
    """Jobs of five silos with tags: twins of one part, one of two, one whose rounds have four
    silos, a count.

    And the first three once more, with sums that silos alone read.
    """
    files = local_federation.make(folder / "local", SILOS)
    roster, keys = files.folder / "roster.json", files.folder / "coordinator" / "keys"
    made = Made(files, rosters.load(roster), load_keys(keys))
    for name, method, changes in (
        ("simple", "fedavg", {}),
        ("twin", "fedavg", {}),
        ("two", "fedaims", {"model": CONVNET, "security": {**COUNTED, **IN_BATCHES}}),
        ("away", "fedper", {"participation": 0.8}),
        ("rare", "fedssa", {"security": {"secure_aggregation": "required"}}),
        ("hidden", "fedavg", {"security": HIDDEN}),
        ("hidden-twin", "fedavg", {"security": HIDDEN}),
        ("hidden-two", "fedaims", {"model": CONVNET, "security": {**HIDDEN, **IN_BATCHES}}),
    ):
        made.job(name, method, SILOS, {}, **{"min_cohort": 3, "security": COUNTED, **changes})
    return made


class Summed:
    """The sum of one round of a job: who survived gave ``values``, each other ones in each round.

    ``folds`` are what silos read of it, ``seen`` is what the coordinator has of each part in the
    end.
    """

    def __init__(self, made, job, round_, survivors=SILOS, cohort=SILOS, key=KEY):
        self.made, self.job, self.round, self.survivors = made, job, round_, survivors
        of = made.roster.federation, rosters.members_digest(made.roster, job.silos), MODEL, PARTS
        frame = JobPlan(job).round(round_).frame(*of)
        self.parts = summed(job.up(round_))
        self.spec = specify(frame, cohort, 0)
        ctx, accumulator, given = self.spec.context(), Accumulator(self.spec), {}
        read = {"reader": "coordinator"}
        groups = tuple(each.model_copy(update=read) for each in self.spec.groups)
        clear = self.spec.model_copy(update={"groups": groups})
        without = Accumulator(clear)
        for silo in survivors:
            contributions = [
                blind_sum.given(part, group, self.values(part, silo))
                for part, group in zip(self.parts, self.spec.groups, strict=True)
            ]
            check_group_values(self.spec, contributions)
            tagger = linear_tags.Tagger(key, ctx, len(self.parts))
            pads = silo_pads(self.spec, silo, key)
            chunks = masked_chunks(self.spec, silo, contributions, (), tagger, pads)
            accumulator.add(words.tobytes() for words in chunks)
            without.add(words.tobytes() for words in masked_chunks(clear, silo, contributions, ()))
            given[silo] = tagger.padded(key, ctx, silo)
        self.folds, self.seen = map(self.folded, (without, accumulator))
        self.tags = linear_tags.combine(given, len(self.parts))
        self.words = {part.name: b"" for part in self.parts}
        for index, words in accumulator.numbers():
            self.words[self.parts[index].name] += words.tobytes()

    def folded(self, accumulator):
        """The sum of each part, by name."""
        opened = zip(
            self.parts, self.spec.groups, accumulator.open((), self.survivors), strict=True
        )
        return {part.name: blind_sum.folded(part, group, each) for part, group, each in opened}

    def values(self, part, silo):
        """What a silo gives of a part."""
        rng = torch.Generator().manual_seed(1000 * self.round + SILOS.index(silo))
        drawn = lambda spec: torch.randn(spec.shape, generator=rng).abs()
        given = {spec.name: drawn(spec).to(DTYPES[spec.dtype]) for spec in part.tensors}
        if part == RIGHT:
            return dict.fromkeys(given, torch.tensor(3))
        weights = [spec for spec in part.wire if spec.name == WEIGHT]
        ones = {spec.name: torch.ones(spec.shape, dtype=torch.float64) for spec in weights}
        return {**given, **ones}

    def down(self, name, **changes):
        """The part as it comes down, (message, words).

        ``changes`` spoil it: ``words`` and fields of the claim.
        """
        index = [part.name for part in self.parts].index(name)
        payload, tag = self.spec.signed_bytes(), tag_of(self.tags, index, len(self.parts))
        fields = {"document": payload, "survivors": tuple(sorted(self.survivors)), "tag": tag}
        fields |= {"signature": self.made.coordinator.sign(SECAGG_SPEC, payload)}
        words = changes.pop("words", lambda same: same)(self.words[name])
        part = changes.pop("part", name)
        return sum_to_wire(part, Claim(**{**fields, **changes})), words


class Recipient:
    """One silo behind its gate, with a ledger."""

    def __init__(self, tagged, folder):
        self.tagged, self.folder = tagged, folder
        self.world = World(tagged, folder, tagged.policy(tagged.jobs["simple"]))

    def take(self, job, round_, frames, key=KEY, memory=None):
        """What is delivered; ``remembered`` is afterwards what the silo then knows of the job's
        sums.
        """

        async def scenario():
            self.world.client.delivery = frames
            if not self.world.gate.session.token:
                await self.world.gate.session.hello()
            sharing = sharing_of(self.tagged, job, ME, self.folder / "job", key)
            plan = sharing.plan.round(round_)
            memory_ = memory or Memory(start=round_)
            taking = IncomingSums(sharing, plan, memory_) if plan.sums_down else None
            found = await self.world.gate.session.fetch(plan, None, taking)
            self.remembered = taking and taking.memory
            return found

        return asyncio.run(scenario())

    def recorded(self, kind):
        return [record for record in records(self.world.path) if record["type"] == kind]


def delivery(job, round_, sums, plain=None, chunk=1 << 20, **manifest):
    """Frames with these sums behind the plain tensors of ``plain`` (values by part and name)."""
    plain = plain or {}
    items = delivered_items([part for part in job.down(round_) if part.name in plain])
    pieces = [tensor_bytes(plain[item.part][item.spec.name]) for item in items]
    pieces += [memoryview(words) for _, words in sums]
    messages = [message for message, _ in sums]
    return framed(job, round_, pieces, items, chunk, sums=messages, **manifest)

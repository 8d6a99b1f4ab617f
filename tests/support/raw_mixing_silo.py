"""A silo of raw calls that takes part in rounds which mix and compare blind, with the pure core."""

import asyncio
import hashlib
import json
import os
from dataclasses import replace

import torch
from support.raw_blind_silo import BlindSilo
from support.raw_silo import SECONDS

from staddle.algorithms.exchange.parts import DTYPES, Gram, Mix, upload_items
from staddle.proto import federation_pb2 as pb
from staddle.proto.convert.group_key import Contributed, contributed_to_wire
from staddle.proto.convert.mix import PaddedWord, padded_to_wire, rows_from_wire, words_from_wire
from staddle.proto.convert.secagg_received import SignedSpec
from staddle.proto.wire import tensor_bytes, to_wire
from staddle.security.blind import mix_row
from staddle.security.blind import padded_mix as o
from staddle.security.blind.group_key import Epoch, JobKeys, contribute
from staddle.security.blind.mix_context import Version
from staddle.security.blind.plan import JobPlan, shared, sum_groups, summed, uploaded
from staddle.security.blind.prekeys import Known, publish
from staddle.security.blind.rotation import rotate
from staddle.security.blind.sum import given
from staddle.security.identity import roster as rosters
from staddle.security.identity.signers import Signers
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.gram_pieces import deal_sealed
from staddle.security.secagg.linear_tags import Tagger
from staddle.security.secagg.masked_sum import masked_chunks
from staddle.security.secagg.shared_gram import quantise
from staddle.security.secagg.spec import Terms
from staddle.silo.ingress.directed_rows import DirectedRows
from staddle.silo.ingress.keyed_job import Sharing

KEY = b"what the coordinator lacks".ljust(32)
PARTS = bytes(32)  # in place of what made the key, for which it takes the coordinator's word


def flat(part, tensors):
    """A part's tensors one after another, [elements] float64."""
    return torch.cat([tensors[spec.name].double().reshape(-1) for spec in part.tensors]).numpy()


def cut(part, values):
    """The tensors of a row."""
    found, at = {}, 0
    for spec in part.tensors:
        piece = torch.from_numpy(values[at : at + spec.elements])
        found[spec.name] = piece.reshape(spec.shape).to(DTYPES[spec.dtype])
        at += spec.elements
    return found


class MixSilo(BlindSilo):
    """``contributions(round)`` are its tensors by part.

    ``rows`` what it opened in its last fetch, by part.
    """

    def __init__(self, address, keys, roster, job, contributions):
        super().__init__(address, keys, roster, job, contributions)
        self.keys, self.number, self.memories, self.rows, self.parts_of = keys, 0, {}, {}, {}
        self.prekeys = {}  # in its last delivery, by part and silo
        self.signers = Signers.of(roster, job.silos)
        self.epoch = Epoch.of(roster, job.silos, job.digest)
        self.own = {}  # by part: its version that counts

    @property
    def others(self):
        return self.epoch.others(self.silo)

    def line(self, part):
        roster = self.whole_roster
        members = rosters.members_digest(roster, self.job.silos)
        return JobPlan(self.job).line(part, roster.federation, members)

    async def contribute(self):
        seeds = (os.urandom(32) for _ in range(3))
        made = contribute(self.epoch, self.silo, *seeds, self.keys.sign)
        message = contributed_to_wire(Contributed(self.session, self.job.name, self.digest, *made))
        await self.stub.Contribute(message, timeout=SECONDS)

    async def heard(self, own, told):
        """It makes no key of what silos gave, and so takes the coordinator's word for what
        made it.
        """
        if isinstance(told.body, SignedSpec):
            own = replace(own, key_parts=json.loads(told.body.document)["key_parts"])
        await super().heard(own, told)

    async def accept(self):
        await self.hello()
        await self.told("offer")
        await self.contribute()
        await self.answer("ACCEPT")

    # What it gives.

    def version(self, round_):
        return Version(silo=self.silo, round=round_, attempt=0, number=self.number)

    def padded(self, part, round_):
        """The words of an upload of a Mix, and its word on it."""
        line, version = self.line(part), self.version(round_)
        self.number += 1
        seed, tagger = os.urandom(32), o.tagger_of(line, KEY)
        values = flat(part, self.contributions(round_)[part.name])
        words = b"".join(w.tobytes() for w in o.hidden_pieces(line, version, seed, values, tagger))
        tag = tagger.padded(KEY, version.context(line), self.silo)
        sha256, sealing, sign = hashlib.sha256(words).digest(), os.urandom(32), self.keys.sign
        made = o.make_upload(line, version, sha256, tag, seed, sealing, self.others, sign)
        # others of this kind go on sealing to keys of the roster
        root, generation = made[0].sealing.root, self.number
        made = (*made, publish(line, version, root, generation, os.urandom(32), self.keys.sign))
        return words, version.context(line), made

    def word(self, part, made, /, **changes):
        word = PaddedWord(self.session, self.job.name, self.digest, part.name, *made)
        message = padded_to_wire(word)
        for name, value in changes.items():
            setattr(message, name, value)
        return message

    def say_padded(self, message):
        return self.stub.Padded(message, timeout=SECONDS)

    def rotated(self, part, round_):
        """The bytes of an upload of a Gram, and what it is bound to."""
        (spec,) = part.tensors
        vectors = self.contributions(round_)[part.name][spec.name].double().numpy()
        plan, turned = JobPlan(self.job), []
        for row in range(len(vectors)):
            key = plan.use(part, round_, row).key(KEY)
            turned.append(torch.from_numpy(rotate(vectors[row : row + 1].copy(), key)[0]))
        members = rosters.members_digest(self.whole_roster, self.job.silos)
        told = self.whole_roster.federation, members
        value = torch.stack(turned).to(DTYPES[spec.dtype])
        return bytes(tensor_bytes(value)), plan.use(part, round_).context(*told)

    def part_frames(self, part, round_, payload, context, /, **changes):
        """The upload of a part, right in all that ``changes`` of the manifest leave."""
        headers = to_wire(upload_items([part])) if isinstance(part.exchange, Gram) else ()
        fields = {"size": len(payload), "part": part.name, "context": context, "tensors": headers}
        return self.frames_of_bytes(payload, self.of_round(round_, **fields) | changes)

    async def give_part(self, part, round_):
        if isinstance(part.exchange, Mix):
            words, context, made = self.padded(part, round_)
            await self.upload(self.part_frames(part, round_, words, context))
            await self.say_padded(self.word(part, made))
        else:
            await self.upload(self.part_frames(part, round_, *self.rotated(part, round_)))

    async def give_parts(self, round_):
        for part in uploaded(self.job.up(round_)):
            await self.give_part(part, round_)

    async def do(self, effects):
        for effect in effects:
            if isinstance(effect, s.UploadWords):
                self.hiding = effect.hiding
                await self.give_parts(self.state.spec.round)
            await super().do((effect,))

    def masked(self, terms):
        spec = self.state.spec
        parts = zip(summed(self.job.up(spec.round)), spec.groups, strict=True)
        values = [
            given(part, group, self.contributions(spec.round)[part.name]) for part, group in parts
        ]
        tagger = Tagger(KEY, spec.context(), len(spec.groups))
        words = masked_chunks(spec, self.silo, values, terms, tagger)
        made = b"".join(each.tobytes() for each in words)
        self.tags = tagger.padded(KEY, spec.context(), self.silo, terms=terms)
        if spec.compared is None:
            return made
        (part,) = shared(self.job.up(spec.round))
        vectors = self.contributions(spec.round)[part.name][part.tensors[0].name].double().numpy()
        integers = quantise(spec.compared, vectors)
        sealed, self.kept = deal_sealed(spec, self.silo, integers, self.hiding)
        return made + b"".join(sealed)

    async def part_standing(self, part, round_):
        request = pb.StandingRequest(**self.of_round(round_, part=part.name))
        return await self.stub.Standing(request, timeout=SECONDS)

    # What it gets.

    async def delivery(self, round_):
        """The manifest, the bytes, the end of a delivery."""
        frames = [frame async for frame in self.fetch(round_)]
        return frames[0].manifest, b"".join(frame.chunk for frame in frames), frames[-1].end

    async def opened(self, round_):
        """Rows by part, opened as a silo opens them: [(row, values, keep)]."""
        manifest, payload, end = await self.delivery(round_)
        self.prekeys = {
            (part, word.version.silo): word for part, word in words_from_wire("c", manifest.prekeys)
        }
        at = sum(header.size for header in manifest.tensors)
        mixes = {p.name: p for n in range(self.job.length) for p in uploaded(self.job.up(n))}
        found = {}
        rows = rows_from_wire("coordinator", manifest.rows, 100)
        own = {0: self.keys.exchange.private_bytes_raw()}
        for mixed, sha256 in zip(rows, end.tensor_sha256[len(manifest.tensors) :], strict=True):
            part = mixes[mixed.part]
            line, signed = self.line(part), (mixed.document, mixed.signature)
            remembered = self.memories.get(part.name, mix_row.RowMemory())
            row, memory = mix_row.admit(
                line, self.silo, *signed, remembered, self.terms, self.signers
            )
            mix_row.check_uploads(row, [each.upload for each in mixed.summands])
            known = self.silo, own, self.signers
            seeds = [o.open_seed(line, e.upload, e.letter, *known) for e in mixed.summands]
            parts = zip(mixed.summands, row.shares, seeds, strict=True)
            summands = [o.Summand(e.upload, share.weight, seed) for e, share, seed in parts]
            opening = o.Opening(line, KEY, summands, row.own_weight, self.own.get(part.name))
            words = payload[at : at + line.nbytes]
            assert hashlib.sha256(words).digest() == sha256
            opening.add(words)
            at += line.nbytes
            self.memories[part.name] = memory
            values = opening.finish(mixed.tag)
            found.setdefault(part.name, []).append((row, values, mixed.keep))
        assert at == len(payload) == manifest.size
        return found

    @property
    def terms(self):
        return Terms(min_cohort=self.job.min_cohort, colluders=self.job.security.colluders)

    def counted(self, round_):
        """Its contributions of a round counted: they are its versions."""
        for part in uploaded(self.job.up(round_)):
            if isinstance(part.exchange, Mix):
                self.own[part.name] = flat(part, self.contributions(round_)[part.name])


async def in_turn(silos, work):
    """The same of all silos at a time, within the time of a test."""
    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(*(work(silo) for silo in silos))


class DirectedSilo(MixSilo):
    """The same where the job mixes by directed sums; ``folder`` is for what it remembers."""

    def __init__(self, address, keys, roster, job, contributions, folder):
        super().__init__(address, keys, roster, job, contributions)
        folder.mkdir(parents=True, exist_ok=True)
        shared_keys = JobKeys(KEY, PARTS, self.others)
        self.sharing = Sharing.of(JobPlan(job), roster, keys, shared_keys, folder)
        self.sharing.memory.begin(job)
        self.last = self.gave = -1  # rounds whose sum it is in, and whose parts it has given
        # in place of prekeys
        self.sharing.prekeys.begin(keys.exchange.private_bytes_raw(), Known.first(self.others))

    def masked(self, terms):
        spec = self.state.spec
        readers = self.job.row_readers(spec.round)
        of, _ = sum_groups(self.job.up(spec.round), JobPlan(self.job).bounds, readers)
        contributions = self.contributions(spec.round)
        parts = zip(of, spec.groups, strict=True)
        values = [given(part, group, contributions[part.name]) for part, group in parts]
        tagger, pads = Tagger(KEY, spec.context(), len(spec.groups)), self.sharing.pads(spec)
        words = masked_chunks(spec, self.silo, values, terms, tagger, pads)
        made = b"".join(each.tobytes() for each in words)
        own = {index: pad.key for index, pad in pads.items()}
        self.tags = tagger.padded(KEY, spec.context(), self.silo, own, terms)
        self.last = spec.round
        return made

    async def give_parts(self, round_):
        """What was given stays given over attempts."""
        if self.gave != round_:
            await super().give_parts(round_)
        self.gave = round_

    async def mail(self, round_):
        """What its rows came to, and of which rounds they are."""
        manifest, payload, _ = await self.delivery(round_)
        said = [bytes.fromhex(json.loads(row.document)["key_parts"]) for row in manifest.rows]
        sharing = replace(self.sharing, parts=said[0] if said else PARTS)
        opener = DirectedRows(sharing, sharing.plan.round(round_), self.terms, self.last + 1)
        assert sum(opener.announced("coordinator", manifest.rows, manifest.prekeys)) == len(payload)
        opener.admit()
        opener.write(memoryview(payload))
        of = [json.loads(row.document)["round"] for row in manifest.rows]
        return next(iter(opener.delivered().values()), None), of

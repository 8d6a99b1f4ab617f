"""Directed rows at the silo that was away, from a coordinator as hostile as it likes."""

import asyncio
from dataclasses import replace

import pytest
import torch
from support.framed import framed
from support.keyed_jobs import (
    COUNTED,
    KEY,
    PARTS,
    SILOS,
    Coordinator,
    first_prekey,
    job_keys,
    keys_of,
    letter_for,
    make_keyed,
    sharing_of,
)
from support.ledgers import stored

from staddle.algorithms.exchange.delivery import KEEP
from staddle.algorithms.exchange.parts import integer_weights
from staddle.algorithms.methods.pfedsim import CODE_SELF_WEIGHT
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.errors import LocalError, RefusedError
from staddle.files import checked_file
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert.mix import Mixed, WireSummand, mixed_to_wire
from staddle.proto.frames import decode
from staddle.security.blind import sum as blind_sum
from staddle.security.blind.directed_mix import sender_pads
from staddle.security.blind.open_sum import tag_of
from staddle.security.blind.plan import JobPlan, directed, sum_groups
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.records import Peer
from staddle.security.secagg import linear_tags
from staddle.security.secagg.masked_sum import Accumulator, check_group_values, masked_chunks
from staddle.security.secagg.spec import Terms, kept, specify
from staddle.silo.ingress import delivery
from staddle.silo.ingress.directed_rows import DirectedRows
from staddle.silo.ingress.mix_memory import OpenedDirected
from staddle.silo.ingress.mix_rows import IncomingRows

TERMS = Terms(min_cohort=3, min_honest=2, colluders=1)
SECURITY = {**COUNTED, "mix": "directed"}
SAMPLES = {"similarity": "samples"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    made = make_keyed(tmp_path_factory.mktemp("keyed"))
    common = {"min_cohort": 3, "participation": 0.8, "rounds": 8, "security": SECURITY}
    made.job("directed", "fedsimsup", SILOS, SAMPLES, **common)
    made.job("twin", "fedsimsup", SILOS, SAMPLES, **common)
    made.job("members", "pfedsim", SILOS, {"rho": 0}, **{**common, "participation": 1.0})
    return made


class Sum:
    """A round's opened sum with the pads of its rows on; ``held`` is what each silo gave."""

    def __init__(self, keyed, job, round_, survivors=None, cohort=None, weights=None):
        self.keyed, self.job, self.round = keyed, job, round_
        self.cohort = cohort or tuple(sorted(job.cohort(round_)))
        self.survivors = survivors or self.cohort
        members = rosters.members_digest(keyed.roster, job.silos)
        frame = (
            JobPlan(job)
            .round(round_)
            .frame(keyed.roster.federation, members, "ee" * 32, PARTS, weights)
        )
        self.spec = specify(frame, self.cohort, 0)
        of, _ = sum_groups(job.up(round_), JobPlan(job).bounds, job.row_readers(round_))
        (self.part,) = directed(job.up(round_))
        rng = torch.Generator().manual_seed(round_)
        self.held = {
            silo: {spec.name: torch.randn(spec.shape, generator=rng) for spec in self.part.tensors}
            for silo in self.cohort
        }
        counted = {spec.name: torch.tensor(3) for spec in RIGHT.tensors}
        accumulator, given, ctx = Accumulator(self.spec), {}, self.spec.context()
        for silo in self.survivors:
            contributions = [
                blind_sum.given(part, group, counted if part == RIGHT else self.held[silo])
                for part, group in zip(of, self.spec.groups, strict=True)
            ]
            check_group_values(self.spec, contributions)
            keys, tagger = job_keys(job, silo), linear_tags.Tagger(KEY, ctx, len(of))
            pads = sender_pads(self.spec, silo, first_prekey(silo), keys.others)
            accumulator.add(
                words.tobytes()
                for words in masked_chunks(self.spec, silo, contributions, (), tagger, pads)
            )
            given[silo] = tagger.padded(KEY, ctx, silo, {i: pad.key for i, pad in pads.items()})
        accumulator.open((), self.survivors)
        self.tags = linear_tags.combine(given, len(of))
        self.numbers = list(accumulator.numbers())

    @property
    def reader(self):
        """Of the first row."""
        return self.job.row_readers(self.round)[0]

    def words(self, index=1):
        return b"".join(words.tobytes() for at, words in self.numbers if at == index)

    def keep(self):
        """As the method posts it."""
        method, state = self.job.method(), self.job.method().begin()
        posts = method.combine(state, self.round, self.survivors, {}).posts
        return next(post.keep for post in posts if post.silo == self.reader)

    def down(self, **changes):
        """The row as it comes down, (message, words)."""
        payload = changes.pop("document", self.spec.signed_bytes())
        fields = {
            "part": self.part.name,
            "document": payload,
            "signature": self.keyed.coordinator.sign(SECAGG_SPEC, payload),
            "summands": (),
            "tag": tag_of(self.tags, 1, len(self.spec.groups)),
            "keep": changes.pop("keep") if "keep" in changes else self.keep(),
            "survivors": self.survivors,
        }
        words = changes.pop("words", lambda same: same)(self.words())
        return mixed_to_wire(Mixed(**{**fields, **changes})), words

    def exact(self, name):
        """The row's values without ``keep``, by hand."""
        weights = self.weights()
        total = sum(weight * self.held[silo][name].double() for silo, weight in weights.items())
        return total / sum(weights.values())

    def weights(self):
        return {silo: self.job.security.counts[silo] for silo in self.survivors}


class Recipient:
    """One silo with a ledger, whose memory is on the disk."""

    def __init__(self, keyed, job, silo, folder):
        self.job, self.folder = job, folder
        self.sharing = sharing_of(keyed, job, silo, folder / "job")
        self.ledger = Ledger.open(
            folder / "ledger", silo, keyed.roster.federation, keys_of(keyed, silo).log
        )
        entry = keyed.roster.coordinator
        self.peer = Peer(id=entry.id, spki=entry.spki_sha256)

    def take(self, round_, rows, sharing=None, chunk=1 << 20, counted=0):
        async def scenario():
            async def coming():
                messages, words = [message for message, _ in rows], [words for _, words in rows]
                for frame in framed(self.job, round_, words, chunk=chunk, rows=messages):
                    yield decode(frame.SerializeToString())

            plan = JobPlan(self.job).round(round_)
            opener = DirectedRows(sharing or self.sharing, plan, TERMS, counted)
            return await delivery.take(self.ledger, self.peer, plan, coming(), opener)

        (made,) = asyncio.run(scenario()).tensors.values()
        return made

    def refused(self, round_, rows, sharing=None, counted=0):
        """Why; altered words may blame a silo, all else the coordinator; no ingress is recorded."""
        before = stored(self.folder / "ledger")
        with pytest.raises(RefusedError) as caught:
            self.take(round_, rows, sharing, counted=counted)
        altered = "was altered" in caught.value.why
        assert caught.value.peer == (COORDINATOR_OR_SILO if altered else "coordinator")
        assert stored(self.folder / "ledger") == before
        return caught.value.why

    def memory(self):
        return self.sharing.memory.directed("theta")


@pytest.fixture(scope="module")
def twice(keyed):
    """The first two rounds that one silo is away in, and the sums of these."""
    job = keyed.jobs["directed"]
    away = {}
    for round_ in range(1, 8):  # before that in which they come down
        away.setdefault(job.away(round_)[0], []).append(round_)
    silo, rounds = next((silo, rounds) for silo, rounds in away.items() if len(rounds) > 1)
    return silo, [Sum(keyed, job, round_) for round_ in rounds[:2]]


@pytest.fixture
def recipient(keyed, twice, tmp_path):
    found = Recipient(keyed, keyed.jobs["directed"], twice[0], tmp_path)
    yield found
    found.ledger.close()


@pytest.mark.parametrize("chunk", [1 << 20, 4097])
def test_rows_come_down_and_are_put_together_in_order(recipient, twice, chunk, monkeypatch):
    monkeypatch.setattr("staddle.proto.stream.CHUNK_BYTES", chunk)
    _, (first, second) = twice
    found = recipient.take(8, [first.down(), second.down()], chunk=chunk)
    one, other = first.keep(), second.keep()
    for spec in first.part.tensors:
        wanted = other * (1 - one) * first.exact(spec.name) + (1 - other) * second.exact(spec.name)
        assert torch.allclose(found[spec.name].double(), wanted, rtol=0, atol=1e-6)
        assert found[spec.name].dtype == torch.float32
    assert float(found[KEEP.name]) == pytest.approx(one * other)
    # its answer was lost, or this silo dropped out
    again = recipient.take(9, [first.down(), second.down()], chunk=chunk)
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_who_survived_alone_counts(recipient, keyed, twice):
    job, lost = keyed.jobs["directed"], twice[1][0]
    three = Sum(keyed, job, lost.round, survivors=lost.cohort[1:])
    found = recipient.take(8, [three.down()])
    name = three.part.tensors[0].name
    wanted = (1 - three.keep()) * three.exact(name)
    assert torch.allclose(found[name].double(), wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(wanted, (1 - lost.keep()) * lost.exact(name), rtol=0, atol=1e-3)


def test_a_row_that_was_altered_or_is_not_what_its_round_gave_is_refused(recipient, keyed, twice):
    _, (first, second) = twice
    other = next(
        s for s in (Sum(keyed, first.job, n) for n in range(1, 9)) if s.reader != first.reader
    )
    twin = Sum(keyed, keyed.jobs["twin"], first.round)
    payload = first.spec.signed_bytes()
    fewer = replace_counts(first.spec)
    for rows, why in (
        ([first.down(words=shifted)], "was altered"),
        ([first.down(words=lambda _: second.words())], "was altered"),
        ([first.down(words=lambda _: other.words())], "was altered"),
        ([first.down(tag=bytes(8))], "was altered"),
        ([first.down(survivors=first.cohort[1:])], "was altered"),
        ([first.down(survivors=first.cohort[2:])], "survivors are fewer than"),
        (
            [first.down(survivors=(*first.cohort[:2], "stranger"))],
            "which are not members of the cohort",
        ),
        ([other.down()], f"for which '{first.reader}' was drawn"),
        ([twin.down()], "specifies job 'twin'"),
        ([first.down(document=fewer)], "specifies groups"),
        ([first.down(document=payload.replace(b'"attempt":0', b'"attempt":1'))], "was altered"),
        ([first.down(signature=bytes(64))], "its signature does not fit"),
        ([first.down(keep=0.9)], "says keep = 0.900000"),
        (
            [first.down(), first.down()],
            f"brings a row of round {first.round} in 9, after that of {first.round}",
        ),
        ([second.down(), first.down()], f"after that of {second.round}"),
        ([first.down(part="other")], "brings rows of part 'other', which has none"),
    ):
        recipient.sharing.memory.save_directed("theta", OpenedDirected())
        assert why in recipient.refused(9, rows), why


def shifted(words):
    return bytes([words[0] ^ 1]) + words[1:]


def replace_counts(spec):
    """A document with other weights of the row, which still add up."""
    group = spec.groups[1]
    counts = (group.counts[0] + 1, group.counts[1] - 1, *group.counts[2:])
    return spec.model_copy(
        update={"groups": (spec.groups[0], group.model_copy(update={"counts": counts}))}
    ).signed_bytes()


def test_a_row_of_a_round_that_is_not_over_is_refused(recipient, twice):
    second = twice[1][1]
    why = f"brings a row of round {second.round} in {second.round}"
    assert why in recipient.refused(second.round, [second.down()])


def test_an_old_row_is_refused_once_a_newer_one_was_opened(recipient, twice):
    _, (first, second) = twice
    recipient.take(8, [second.down()])
    assert recipient.memory().newest == second.round
    why = f"brings a row of round {first.round} after those up to {second.round}"
    assert why in recipient.refused(9, [first.down()])
    recipient.take(9, [second.down()])


def test_what_is_refused_is_remembered_only_once_its_words_come(recipient, twice):
    first = twice[1][0]
    recipient.refused(8, [first.down(keep=0.9)])
    assert recipient.memory().newest == -1
    recipient.refused(8, [first.down(words=shifted)])
    assert recipient.memory().newest == first.round
    recipient.take(8, [first.down()])  # and comes again


def test_rows_for_another_silo_do_not_open(recipient, keyed, twice, tmp_path):
    """With the keys of another silo of the job, which the coordinator may be in league with."""
    first = twice[1][0]
    thief = next(silo for silo in SILOS if silo != first.reader)
    stolen = sharing_of(keyed, first.job, thief, tmp_path / "thief")
    assert "was drawn" in recipient.refused(9, [first.down()], stolen)
    blinded = replace(
        stolen, silo=first.reader, others={**stolen.others, thief: stolen.others[first.reader]}
    )
    assert "was altered" in recipient.refused(9, [first.down()], blinded)


def test_memory_that_is_gone_is_no_memory_of_nothing(recipient, keyed, twice):
    job, first = keyed.jobs["directed"], twice[1][0]
    path = recipient.folder / "job" / "mix-theta.directed.json"
    assert checked_file.read_json(path, OpenedDirected) == OpenedDirected()
    recipient.sharing.memory.check_begun(job, contributed=True)
    path.unlink()
    for attempt in (
        lambda: recipient.sharing.memory.check_begun(job, contributed=True),
        lambda: recipient.take(8, [first.down()]),
    ):
        with pytest.raises(LocalError, match="gone, and with it what this silo remembers"):
            attempt()


def test_later_prekeys_are_refused(recipient, twice):
    """There are none in such a job: the first ones stay until it ends."""
    opener = DirectedRows(recipient.sharing, recipient.sharing.plan.round(8), TERMS, 0)
    with pytest.raises(RefusedError, match="brings later prekeys") as caught:
        opener.announced("coordinator", [twice[1][0].down()[0]], [pb.DeliveredPrekey()])
    assert (caught.value.peer, caught.value.code) == ("coordinator", "KEYS")
    assert set(recipient.sharing.prekeys.own()) == {0}


def test_rows_of_the_other_kind_are_refused(recipient, keyed, twice, tmp_path):
    first = twice[1][0]
    mail = Coordinator(keyed, keyed.jobs["mail"], first.part, tmp_path / "mail")
    mail.contribute(SILOS[0], 0)
    stored_ = mail.stored[SILOS[0], 0]
    summand = WireSummand(stored_.upload, letter_for(stored_, recipient.sharing.silo))
    assert "brings rows of uploads" in recipient.refused(9, [first.down(summands=(summand,))])
    uploads = IncomingRows(
        mail.silos[first.reader], mail.silos[first.reader].plan.round(4), TERMS, lambda _: ()
    )
    with pytest.raises(RefusedError, match="brings directed rows, there are none"):
        uploads.announced("coordinator", [first.down()[0]], [])


# Rows for a member of the round, by weights of the coordinator's.
LIKENESS = {silo: 2.0 + at / 2 for at, silo in enumerate(SILOS)}  # Φ of each pair, by the other


class MemberSum(Sum):
    """Of a round whose rows are for its members."""

    def __init__(self, keyed, round_, **changes):
        weights = changes.pop("weights", lambda silo: {**LIKENESS, silo: CODE_SELF_WEIGHT})
        super().__init__(keyed, keyed.jobs["members"], round_, weights=weights, **changes)

    def keep(self):
        """By hand."""
        exact = CODE_SELF_WEIGHT / (CODE_SELF_WEIGHT + sum(self.weights().values()))
        found = kept(self.spec, self.spec.groups[1], self.survivors)
        assert found == pytest.approx(exact, abs=1e-8)
        return found

    def weights(self):
        return {silo: LIKENESS[silo] for silo in self.survivors if silo != self.reader}


@pytest.fixture
def member(keyed, tmp_path):
    found = Recipient(keyed, keyed.jobs["members"], SILOS[0], tmp_path)
    yield found
    found.ledger.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_member_opens_the_row_of_its_last_round_over_the_others_who_survived(keyed, member, lost):
    row = MemberSum(keyed, 2, survivors=SILOS[: len(SILOS) - lost])
    found = member.take(3, [row.down()], counted=3)
    for spec in row.part.tensors:
        wanted = (1 - row.keep()) * row.exact(spec.name)
        assert torch.allclose(found[spec.name].double(), wanted, rtol=0, atol=1e-6)
    assert float(found[KEEP.name]) == row.keep()
    again = member.take(5, [row.down()], counted=3)  # it was lost in the rounds since
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_a_member_keeps_as_much_of_its_own_as_its_sum_and_its_method_say(keyed, member):
    row = MemberSum(keyed, 2)
    nearly = row.keep() * (1 + 2**-40)
    assert f"brings a row with keep = {nearly!r}, by the weights" in member.refused(
        3, [row.down(keep=nearly)], counted=3
    )
    alone = MemberSum(keyed, 2, weights=lambda silo: {**LIKENESS, silo: 0.0})
    why = member.refused(3, [alone.down(keep=0.0)], counted=3)
    assert "brings mail that says keep = 0.000000 of round 2, by self_weight = 9.21034 it is" in why
    assert member.sharing.memory.directed("extractor").newest == -1


def test_a_member_opens_no_row_of_another_round_than_its_last_and_one_of_each(keyed, member):
    first, second = MemberSum(keyed, 2), MemberSum(keyed, 3)
    why = f"brings a row of round 2, the last one of '{SILOS[0]}' that counts is 3"
    assert why in member.refused(4, [first.down()], counted=4)
    assert "2 rows of a Mix, at most 1" in member.refused(
        4, [first.down(), second.down()], counted=4
    )
    without = MemberSum(keyed, 3, survivors=SILOS[1:])
    # it has no part to mix in
    assert "the last one of" in member.refused(4, [without.down()], counted=4)
    member.take(4, [second.down()], counted=4)
    other = MemberSum(
        keyed, 3, weights=lambda silo: {**dict.fromkeys(SILOS, 1.0), silo: CODE_SELF_WEIGHT}
    )
    assert "after those up to 3 were opened" in member.refused(4, [other.down(keep=0.5)], counted=4)


def test_a_member_opens_no_row_that_leans_on_one_silo_or_that_nobody_is_mixed_in(keyed, member):
    leaning = dict.fromkeys(SILOS, 1.0) | {SILOS[1]: 9.0}
    none = MemberSum(keyed, 2, weights=lambda silo: leaning if silo == SILOS[0] else LIKENESS)
    assert not any(none.spec.groups[1].counts)  # an honest coordinator makes none
    assert none.spec.groups[1].own_weight == 0
    assert "in which nobody is mixed" in member.refused(3, [none.down(keep=0.5)], counted=3)
    row = MemberSum(keyed, 2)
    group = row.spec.groups[1].model_copy(update={"counts": integer_weights([0, 6, 1, 1, 1])})
    groups = (row.spec.groups[0], group, *row.spec.groups[2:])
    document = row.spec.model_copy(update={"groups": groups}).signed_bytes()
    assert "shows its reader too much" in member.refused(
        3, [row.down(document=document)], counted=3
    )
    stale = MemberSum(keyed, 2, survivors=SILOS[:4])
    assert stale.keep() != row.keep()
    assert "with keep" in member.refused(3, [stale.down(keep=row.keep())], counted=3)

"""Rows for members of a round, by the coordinator's weights: what it gains with a silo, and what it
may not bring.
"""

import numpy as np
import pytest
import torch
from support.blind_mixes import KEY, Mixing, seed_of
from support.coordinator_thread import coordinator
from support.directed_members import begin, make_world, play
from support.directed_rows import FIVE, Directed, prekeys
from support.secure_sums import frame, group, signer, signers

from staddle.algorithms.exchange.parts import integer_weights
from staddle.errors import RefusedError
from staddle.security.arithmetic.fixedpoint import dequantise
from staddle.security.blind import directed_mix as d
from staddle.security.blind import padded_mix as o
from staddle.security.blind import sealing
from staddle.security.blind.plan import row_name
from staddle.security.identity.domains import SECAGG_SPEC
from staddle.security.secagg import linear_tags
from staddle.security.secagg import spec as round_spec
from staddle.security.secagg.masked_sum import unpad
from staddle.security.secagg.spec import RoundSpec, Terms, receive, specify

pytestmark = pytest.mark.actor("coordinator and silos")

ELEMENTS = 20_000
WHOLE = 1 << 32  # what the weights of a row add up to
FRIEND = FIVE[1]  # the coordinator is in league with it
OWN = 6.0  # Φ_ii


def likeness(reader):
    """Weights of a row by silo, the reader's own among them."""
    others = [silo for silo in FIVE if silo != reader]
    return {**dict(zip(others, (3.0, 2.0, 2.5, 2.0), strict=True)), reader: OWN}


def members_frame(weights=likeness, elements=ELEMENTS, **fields):
    """As a coordinator has it; with no ``weights``, as a silo does."""
    groups = [group(f"extractor.{silo}", elements, weights="public", reader=silo) for silo in FIVE]
    rows = {f"extractor.{silo}": weights(silo) if weights else {} for silo in FIVE}
    common = {"chunk_bytes": 1 << 16, "tagged": True, "brought": frozenset(rows)}
    return frame(groups=(group("metrics", 3, ring=64), *groups), rows=rows, **common, **fields)


class Members(Directed):
    """A sum of a row for each of five members, to its end; its silos know no weights."""

    def __init__(self, drops=None):
        self.coordinators = members_frame()
        ours = lambda _, cohort, at: specify(self.coordinators, cohort, at)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("support.directed_rows.specify", ours)
            super().__init__(members_frame(weights=None), drops)

    def row(self, index):
        """By hand: the row over the survivors but its reader."""
        reader = self.spec.groups[index].reader
        weights = {silo: value for silo, value in likeness(reader).items() if silo != reader}
        weights = {silo: weights[silo] for silo in self.survivors if silo in weights}
        return sum(weights[silo] * self.held[silo] for silo in weights) / sum(weights.values())


@pytest.fixture(scope="module")
def made():
    return Members()


def alike(one, other):
    return abs(float(np.corrcoef(one, other)[0, 1]))


# What is opened.


@pytest.mark.succeeds
def test_of_one_upload_each_the_coordinator_with_a_silo_has_every_silo_s_part():
    """The job without directed rows: whoever has one silo's keys opens what each of the others
    gave.
    """
    made, values = Mixing(5, elements=200), np.random.default_rng(1).uniform(-8, 8, (5, 200))
    errors, friend = [], made.silos[0]
    for victim, own in zip(made.silos[1:], values[1:], strict=True):
        upload = made.contribute(victim, own)
        sealed = upload.upload, sealing.letters(upload.pieces)[friend]
        seed = o.open_seed(made.line, *sealed, friend, {0: seed_of(friend)}, made.signers)
        opening = o.Opening(made.line, KEY, [o.Summand(upload.upload, WHOLE, seed)], 0, ())
        read = lambda _, at, size, hidden=upload.hidden: memoryview(hidden)[at : at + size]
        for words in o.mixed_pieces(made.line, {victim: WHOLE}, read):
            opening.add(words.tobytes())
        tag = linear_tags.combine({victim: upload.upload.tag}, 1, {victim: WHOLE})
        errors.append(np.abs(opening.finish(tag) - own).max())
    assert len(errors) == 4
    assert max(errors) < 1e-6


def test_of_directed_rows_it_has_that_of_its_friend_and_no_other_silo_s_part(made):
    """With the keys of one member: its own row, which is a mixture, and noise in place of all
    others.
    """
    spec, friend = made.spec, FIVE.index(FRIEND) + 1
    own = made.open(friend)
    assert np.abs(own.mean(np.float64) - made.row(friend)).max() < 1e-6
    given = d.sender_pads(spec, FRIEND, seed_of(FRIEND), prekeys(FRIEND))
    for index, row in enumerate(spec.groups[1:], 1):
        if index == friend:
            continue
        others = {**prekeys(FRIEND), FRIEND: prekeys(FIVE[0])[FRIEND]}
        as_reader = d.recipient_pads(spec, row, seed_of(FRIEND), others)
        for pads in ({FRIEND: given[index]}, as_reader, {**as_reader, FRIEND: given[index]}):
            words = made.hidden[index].copy()
            unpad(index, words, list(pads.values()))
            left = dequantise(words, 32, row.scale_exponent)
            assert max(alike(left, each) for each in (made.row(index), *made.held.values())) < 0.04
    # What it can make of its row and its own part: four silos' parts mixed, none of which stands
    # out.
    assert max(alike(own.mean(np.float64), made.held[silo]) for silo in FIVE) < 0.75


def test_a_silo_s_own_part_is_in_its_row_with_no_weight_and_hidden_like_the_others(made):
    spec = made.spec
    for row in spec.groups[1:]:
        assert row.counts[spec.cohort.index(row.reader)] == 0
        assert sum(row.counts) == WHOLE
        assert row.own_weight == pytest.approx(OWN / (OWN + 9.5) * WHOLE, abs=1)
        pads = d.sender_pads(spec, row.reader, seed_of(row.reader), prekeys(row.reader))
        assert set(pads) == {1, 2, 3, 4, 5}


def test_rows_are_over_who_survived_and_so_is_what_a_reader_keeps():
    made = Members(drops={FIVE[4]: "UploadWords"})
    assert made.survivors == FIVE[:4]
    for index, reader in enumerate(FIVE[:4], 1):
        assert np.abs(made.open(index).mean(np.float64) - made.row(index)).max() < 1e-6
        left = sum(likeness(reader)[silo] for silo in FIVE[:4] if silo != reader)
        kept = round_spec.kept(made.spec, made.spec.groups[index], made.survivors)
        assert kept == pytest.approx(OWN / (OWN + left), abs=1e-8)


# What may not be brought.


def brought(**changes):
    """A specification whose first row has other fields."""
    spec = specify(members_frame(elements=200), FIVE, 0)
    first = spec.groups[1].model_copy(update=changes)
    return spec.model_copy(update={"groups": (spec.groups[0], first, *spec.groups[2:])})


def doubled():
    """With a second row for the first member."""
    spec = specify(members_frame(elements=200), FIVE, 0)
    second = spec.groups[1].model_copy(update={"name": f"extractor.{FIVE[1]}x"})
    return spec.model_copy(update={"groups": (*spec.groups, second)})


LEANING = integer_weights([0, 0.51, 0.17, 0.16, 0.16])
FEW = integer_weights([0, 0.5, 0.5, 0, 0])
ITS_OWN = integer_weights([1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (brought(counts=LEANING), "one silo has 2190433321 of the 4294967296 .* more than half"),
        (brought(counts=FEW), "2 silos are mixed, fewer than min_cohort 3"),
        (brought(counts=ITS_OWN), "mixes 858993460 of the reader's own part"),
        (brought(counts=(0, 1, 1, 1, 1)), "has weights that add up to 4, not 2"),
        (brought(counts=(0,) * 5), "mixes nobody and has"),
        (brought(reader="stranger"), "is for 'stranger', which is not in the cohort"),
        (brought(reader=FIVE[2], counts=integer_weights([1, 1, 0, 1, 1])), "specifies groups"),
        (brought(own_weight=0, name="extractor.a"), "specifies groups"),
        (doubled(), "specifies groups"),
    ],
)
def test_other_rows_are_refused_before_keys_are_dealt(spec, why):
    """By every silo of the cohort, whoever the row is for: nothing has left any of them."""
    for silo in FIVE:
        with pytest.raises(RefusedError, match=why) as caught:
            received(spec, silo)
        assert caught.value.peer == "coordinator"


def received(spec, silo):
    """What a silo makes of a specification that the coordinator signed."""
    document, own = spec.signed_bytes(), members_frame(weights=None, elements=200)
    signature = signer("coordinator")(SECAGG_SPEC, document)
    return receive(document, signature, own, Terms(), signers(FIVE), silo)


def test_what_may_be_brought_is_taken():
    spec = brought(counts=integer_weights([0, 4, 3, 3, 2]), own_weight=WHOLE - 1)
    assert received(spec, FIVE[0]) == spec
    received(brought(counts=(0,) * 5, own_weight=0), FIVE[0])


def taken(counts):
    """The weights of a row for the first member that all silos take."""
    for silo in FIVE:
        spec = received(brought(counts=integer_weights(counts)), silo)
    return np.array(spec.groups[1].counts) / WHOLE


@pytest.mark.succeeds
def test_in_two_rounds_it_weighs_its_friend_s_row_so_that_one_silo_is_left():
    """What no silo can see: each row is one that there may be.

    Training hides the rest, as far as it changes models.
    """
    random = np.random.default_rng(2)
    before = random.normal(size=(5, ELEMENTS))
    after = before + 0.5 * random.normal(size=before.shape)
    with_victim, without = taken([0, 3, 1, 1, 1]), taken([0, 0, 1, 1, 1])
    found = 2 * (with_victim @ before - 0.5 * (without @ after))
    assert alike(found, before[1]) > 0.9
    assert max(alike(found, before[at]) for at in (2, 3, 4)) < 0.05
    assert max(alike(with_victim @ before, each) for each in before) < 0.9  # one round alone


# The same over TLS.


@pytest.fixture
def world(tmp_path):
    return make_world(tmp_path, weight_most=2000)


def test_over_tls_each_member_opens_its_row_and_the_coordinator_keeps_noise(world):
    seen = {}

    async def rounds(here):
        silos = await begin(world, here)
        await play(silos, 1)
        for each in silos:
            await each.told("round")
            mailed, of = await each.mail(2)
            assert of == [1]
            seen[each.silo] = mailed
        return [each.sharing for each in silos], silos[0].state.spec

    with coordinator(world.config) as here:
        sharings, spec = here.run(rounds(here), 120)
        assert here.broken == []
        for silo in FIVE:
            check_row(world, spec, silo, seen[silo])
        check_noise(world, spec, sharings[1])


def check_row(world, spec, silo, mailed):
    """The reader's own part by what it keeps, and the others' by their weights."""
    row = next(each for each in spec.groups if each.name == row_name("extractor", silo))
    keep = row.own_weight / WHOLE
    assert 0.2 < keep < 0.9
    assert float(mailed["@keep"]) == keep
    gave = {other: world.contributions(other)(1)["extractor"] for other in FIVE}
    for name in gave[silo]:
        others = sum(
            count / WHOLE * gave[other][name].double()
            for other, count in zip(spec.cohort, row.counts, strict=True)
        )
        assert torch.allclose(mailed[name].double(), (1 - keep) * others, rtol=0, atol=1e-6)


def check_noise(world, spec, friend):
    """What the coordinator has kept, with the keys of one member."""
    gave = {silo: world.contributions(silo)(1)["extractor"] for silo in FIVE}
    flat = {
        silo: torch.cat([each.double().reshape(-1) for each in own.values()]).numpy()
        for silo, own in gave.items()
    }
    for index, row in enumerate(spec.groups):
        if not d.is_row(row) or row.reader == friend.silo:
            continue
        data = (world.folder / f"1.{row.name}.words").read_bytes()
        words = np.frombuffer(data[: 4 * row.elements], "<u4").copy()
        unpad(index, words, [friend.pads(spec)[index]])
        left = dequantise(words, 32, row.scale_exponent)
        assert max(alike(left, own) for own in flat.values()) < 0.05


def test_over_tls_a_row_that_leans_on_one_silo_is_refused_and_nothing_leaves(world, monkeypatch):
    made, sent = specify, []

    def leaning(own, cohort, attempt):
        spec = made(own, cohort, attempt)
        if spec.round != 1:
            return spec
        victim = {"counts": integer_weights([0, 0.97, 0.01, 0.01, 0.01])}
        groups = [
            each.model_copy(update=victim) if each.reader == FIVE[0] else each
            for each in spec.groups
        ]
        changed = spec.model_copy(update={"groups": tuple(groups)})
        return RoundSpec.model_validate(changed.model_dump())

    async def rounds(here):
        silos = await begin(world, here)
        for each in silos:
            each.hear = lambda effect: sent.append(effect) or effect
            assert (await each.told("round")).round == 1
            why = r"one silo has 4166118277 of the 4294967296 .*more than half"
            with pytest.raises(RefusedError, match=why):
                await each.take_part(1)

    monkeypatch.setattr("staddle.coordinator.jobs.secure_sum_runner.specify", leaning)
    monkeypatch.setattr("staddle.security.secagg.coordinator.check_cohort", lambda *_: None)
    with coordinator(world.config) as here:
        here.run(rounds(here), 120)
    assert sent == []

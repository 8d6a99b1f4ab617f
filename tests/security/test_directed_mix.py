import hashlib
from itertools import combinations

import numpy as np
import pytest
from blind_mixes import seed_of
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from secure_sums import GROUP_KEY, Run, frame, group, names

from staddle.algorithms.exchange import integer_weights
from staddle.errors import LocalError, RefusedError
from staddle.security import directed_mix as d
from staddle.security import round_spec
from staddle.security import secagg_coordinator_events as c
from staddle.security import secagg_silo_events as s
from staddle.security.fixedpoint import error_bound
from staddle.security.labels import framed
from staddle.security.masked_sum import Accumulator, Given
from staddle.security.pairwise import public_key
from staddle.security.round_spec import Terms, specify
from staddle.security.tags import Tagger

SIX = names(6)
R = SIX[2]
RAW = [3, 2, 4, 2, 3, 2]


def weights(raw=RAW, silos=SIX):
    return dict(zip(silos, integer_weights(raw), strict=True))


def own_frame(raw=RAW, elements=200, recipient=R, **fields):
    groups = (group("head", elements, weights="public"), group("bias", 3, weights="public", ring=64))
    return d.directed(frame(groups=groups, chunk_bytes=256, **fields), recipient, weights(raw))


def pad_of(spec, sender):
    return d.pad(spec, sender, seed_of(sender), public_key(seed_of(spec.recipient)), spec.recipient)


class DirectedRun(Run):
    """A secure sum whose senders add the recipient's pad, and whose coordinator hands on what it opened."""

    def act(self, who, effect):
        if isinstance(effect, s.Upload) and who != self.spec.recipient:
            effect = s.Upload((*effect.terms, pad_of(self.spec, who)))
        super().act(who, effect)

    def open(self, terms, survivors):
        self.accumulator, self.survivors = Accumulator(self.spec), survivors
        for silo in survivors:
            self.accumulator.add(self.uploads[silo])
        self.accumulator.lift(terms)
        self.hidden = [words.tobytes() for words in self.accumulator.chunks()]
        self.queue.append(("coordinator", c.Opened(hashlib.sha256(b"".join(self.hidden)).digest())))


def run(raw=RAW, elements=200, *, drops=None, **fields):
    """One instance, and what each silo holds."""
    own = own_frame(raw, elements, **fields)
    spec, random = specify(own, SIX, 0), np.random.default_rng(5)
    held = {silo: [random.uniform(-8, 8, elements), random.uniform(-8, 8, 3)] for silo in SIX}
    given = {silo: [Given(v if silo != R else np.zeros_like(v)) for v in held[silo]] for silo in SIX}
    made = DirectedRun(spec, given, own=own, drops=drops).finish()
    assert made.state.stage == "done"
    return made, held


def opened(made, held, survivors=None, hidden=None, pads=None, **fields):
    spec = made.spec
    mine = {j: d.pad(spec, j, seed_of(R), public_key(seed_of(j)), j) for j in SIX if j != R}
    tagged = None
    if spec.tagged:
        tagged = (Tagger(GROUP_KEY, spec.context(), 2), GROUP_KEY, made.effects(c.TellResult)[0].tags)
    args = (survivors or made.survivors, pads or mine, held[R], weights()[R], fields.get("tagged", tagged))
    return d.open_row(spec, hidden or made.hidden, *args)


def exact(held, survivors, index):
    shares = {silo: weight for silo, weight in weights().items() if silo in survivors or silo == R}
    return sum(weight * held[silo][index] for silo, weight in shares.items()) / sum(shares.values())


@pytest.mark.parametrize("lost", [{}, {SIX[4]: "SendHeader"}])
@pytest.mark.parametrize("tagged", [False, True])
def test_the_recipients_row_is_right(lost, tagged):
    made, held = run(drops=lost, tagged=tagged)
    assert set(SIX) - set(made.survivors) == set(lost)
    for index, row in enumerate(opened(made, held)):
        bound = float(error_bound(made.spec.groups[index], len(made.survivors))) * 2  # over a half of the weight
        assert np.abs(row - exact(held, made.survivors, index)).max() <= bound


def test_the_coordinators_sum_is_noise():
    made, held = run(elements=20_000)
    with pytest.raises(RefusedError, match="do not come out"):
        made.accumulator.open((), made.survivors)
    words = np.concatenate([np.frombuffer(chunk, "<i4") for chunk in made.hidden])[:20_000]
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(510)
    for silo in SIX:
        assert abs(np.corrcoef(words, held[silo][0])[0, 1]) < 0.04


def test_every_other_set_of_survivors_gives_noise():
    made, held = run(drops={SIX[5]: "SendHeader"})
    others = {subset for m in (4, 5, 6) for subset in combinations(SIX, m)} - {tuple(sorted(made.survivors))}
    assert len(others) == 15 + 6 + 1 - 1
    for survivors in others:
        with pytest.raises(RefusedError) as caught:
            opened(made, held, survivors)
        assert (caught.value.peer, caught.value.code) == ("coordinator", "SUM")


def test_pads_of_another_recipient_or_attempt_do_not_come_off():
    made, held = run()
    other = specify(own_frame(), SIX, 1)
    for pads in (
        {j: d.pad(other, j, seed_of(R), public_key(seed_of(j)), j) for j in SIX if j != R},
        {
            j: d.pad(made.spec, j, seed_of(SIX[3] if j != SIX[3] else R), public_key(seed_of(j)), j)
            for j in SIX
            if j != R
        },
    ):
        with pytest.raises(RefusedError, match="do not come out"):
            opened(made, held, pads=pads)


def test_a_shifted_row_is_noticed_by_its_tag_alone():
    made, held = run(tagged=True)
    shifted = [bytearray(chunk) for chunk in made.hidden]
    shifted[0][0] ^= 1
    with pytest.raises(RefusedError, match="was altered"):
        opened(made, held, hidden=shifted)
    with pytest.raises(LocalError, match="is opened with its tags"):
        opened(made, held, tagged=None)
    untagged, same = run()
    shifted = [bytearray(chunk) for chunk in untagged.hidden]
    shifted[0][0] ^= 1
    assert (opened(untagged, same, hidden=shifted)[0] != opened(untagged, same)[0]).sum() == 1  # why there are tags


def test_each_pad_has_a_key_of_its_own_that_both_sides_know():
    specs = [
        specify(own_frame(), SIX, 0),
        specify(own_frame(), SIX, 1),
        specify(own_frame(round=4), SIX, 0),
        specify(own_frame(elements=201), SIX, 0),
        specify(own_frame(recipient=SIX[0]), SIX, 0),
    ]
    found = set()
    for spec in specs:
        for sender in SIX:
            if sender != spec.recipient:
                theirs = d.pad(spec, sender, seed_of(spec.recipient), public_key(seed_of(sender)), sender)
                assert theirs == pad_of(spec, sender)
                found.add(theirs.key)
    assert len(found) == 25


def test_a_pad_is_that_of_the_docstring():
    spec = specify(own_frame(), SIX, 0)
    private = X25519PrivateKey.from_private_bytes(seed_of(SIX[0]))
    agreed = private.exchange(X25519PublicKey.from_public_bytes(public_key(seed_of(R))))
    info = framed(b"staddle/mix/pad/1", b"\x02", b"silo-00", b"silo-02", bytes(7) + b"\x03", b"head", b"bias")
    assert pad_of(spec, SIX[0]).key == HKDF(SHA256(), 32, spec.context(), info).derive(agreed)


def test_the_recipients_own_values_are_clipped_as_the_others_are():
    made, held = run()
    inside = opened(made, {**held, R: [np.full(200, 8.0), np.full(3, -8.0)]})
    beyond = opened(made, {**held, R: [np.full(200, 9.0), np.full(3, -1e9)]})
    assert all((one == other).all() for one, other in zip(inside, beyond, strict=True))


def test_weights_are_whole_and_add_up():
    own = own_frame()
    assert dict(own.counts) == {**weights(), R: 0}
    assert (own.exchange, own.recipient) == ("mix", R)
    for wrong in (
        {**weights(), R: weights()[R] + 1},
        {**weights(), SIX[0]: -1, SIX[1]: weights()[SIX[1]] + 1 + weights()[SIX[0]]},
    ):
        with pytest.raises(RefusedError) as caught:
            d.directed(frame(groups=(group(weights="public"),)), R, wrong)
        assert (caught.value.peer, caught.value.code) == ("coordinator", "SPEC")
    with pytest.raises(LocalError, match="no public weights"):
        d.directed(frame(groups=(group(weights="equal"),)), R, weights())


def test_concentration_is_judged_for_the_recipient_alone():
    """What counts is the row without the recipient's own part; no other silo sees it (rule 5)."""
    four = names(4)

    def spec(*raw):
        own = d.directed(frame(groups=(group(weights="public"),)), four[0], weights(raw, four))
        return specify(own, four, 0)

    for raw in ([1, 40, 35, 25], [1000, 40, 35, 25]):
        round_spec.check_cohort(spec(*raw), Terms())
        with pytest.raises(RefusedError, match="one silo has"):  # a Sum of those is seen by the silos, too
            round_spec.check_cohort(spec(*raw).model_copy(update={"exchange": "sum", "counts": tuple(raw)}), Terms())
    round_spec.check_cohort(spec(1, 40, 35, 25).model_copy(update={"counts": (1000, 40, 35, 25)}), Terms())
    with pytest.raises(RefusedError, match="public weights of the cohort: one silo has"):
        round_spec.check_cohort(spec(1, 60, 20, 20), Terms())
    with pytest.raises(RefusedError, match="public weights of the cohort: they count as"):
        round_spec.check_cohort(spec(1, 50, 25, 25), Terms(min_cohort=4))
    round_spec.check_survivors(spec(1, 30, 35, 35), Terms(), (four[0], *four[2:]))
    with pytest.raises(RefusedError, match="public weights of the survivors: one silo has"):
        round_spec.check_survivors(spec(1, 40, 35, 25), Terms(), (four[0], *four[2:]))


def test_wrong_calls_are_told():
    spec = specify(own_frame(), SIX, 0)
    for sender, peer, on in (
        (R, SIX[0], spec),
        (R, R, spec),
        (SIX[0], SIX[1], spec),
        (SIX[0], R, spec.model_copy(update={"exchange": "sum"})),
    ):
        with pytest.raises(LocalError, match="sends no pad"):
            d.pad(on, sender, bytes(32), public_key(bytes(32)), peer)

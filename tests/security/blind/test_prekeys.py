import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blind_mixes import line
from support.refusals import blamed
from support.secure_sums import names, signer, signers

from staddle.errors import LocalError
from staddle.files.documents import canonical_json, parse_canonical
from staddle.security.blind import prekeys as p
from staddle.security.blind import sealing
from staddle.security.blind.mix_context import Version
from staddle.security.blind.sealing import seal_to_all
from staddle.security.identity.domains import MIX_SEAL
from staddle.security.identity.pairwise_keys import public_key

SILOS = names(4)
ME, OTHER, THIRD, FOURTH = SILOS
LINE, SIGNERS = line(), signers(SILOS)


def seed(silo, generation):
    return hashlib.sha256(f"{silo} {generation}".encode()).digest()


def version(silo, number=0):
    return Version(silo=silo, round=number, attempt=0, number=number)


def upload(silo, number, to, known=None):
    """What a silo seals of one upload: ``to`` the generations of the other silos' prekeys."""
    keys = {other: public_key(seed(other, to.get(other, 0))) for other in SILOS if other != silo}
    ctx = version(silo, number).context(LINE)
    return seal_to_all(
        ctx, MIX_SEAL, silo, seed(silo, f"of upload {number}"), seed(silo, f"e {number}"), keys, to
    )


def word(silo, number=0, generation=1, to=None, **changes):
    """What comes down to ``ME``; ``changes`` are made before it is signed."""
    sealed, pieces = upload(silo, number, to or {})
    by = changes.pop("by", silo)
    made = p.publish(
        LINE, version(silo, number), sealed.root, generation, seed(silo, generation), signer(by)
    )
    if changes:
        made = replace(made, **changes)
        payload = p._signed_bytes(
            LINE, version(silo, number), sealed.root, made.generation, made.key
        )
        made = replace(made, signature=signer(by)(p.MIX_PREKEY, payload))
    return p.Word(version(silo, number), sealed.root, made, sealing.letters(pieces)[ME])


def first():
    return p.Known.first({silo: public_key(seed(silo, 0)) for silo in SILOS if silo != ME})


# Words.


def test_a_word_is_its_silos_and_for_this_one():
    said = word(OTHER, 3, 4, {ME: 2})
    said.check(LINE, ME, SIGNERS)
    assert said.letter.sealed.generation == 2
    assert said.prekey.key == public_key(seed(OTHER, 4))


def other_letter(said):
    return replace(said, letter=sealing.letters(upload(OTHER, 0, {})[1])[THIRD])


def other_generation(said):
    return replace(
        said, letter=replace(said.letter, sealed=replace(said.letter.sealed, generation=7))
    )


HOSTILE = {
    "unsigned": (lambda said: replace(said, prekey=replace(said.prekey, signature=bytes(64))),
        "KEYS", "does not fit"),
    "another key": (lambda said: replace(said, prekey=replace(said.prekey, key=bytes(32))), "KEYS",
        "does not fit"),
    "skipped": (lambda said: replace(said, prekey=replace(said.prekey, generation=9)), "KEYS",
        "does not fit"),
    "of another version": (lambda said: replace(said, version=version(OTHER, 1)), "KEYS",
        "does not fit"),
    "of another silo": (lambda said: replace(said, version=version(THIRD)), "KEYS",
        "passed on from 'silo-02'"),
    "of another seed": (lambda said: replace(said, root=bytes(32)), "KEYS", "does not fit"),
    "signed by another": (lambda _: word(OTHER, by=THIRD), "KEYS", "does not fit"),
    "of generation 0": (lambda _: word(OTHER, generation=0), "KEYS",
        "another prekey of generation 0"),
    "too short": (lambda _: word(OTHER, key=bytes(31)), "KEYS", "has 31 bytes"),
    "of low order": (lambda _: word(OTHER, key=bytes(32)), "KEYS", "of low order"),
    "our own": (lambda _: replace(word(OTHER), version=version(ME)), "KEYS", "a prekey of its own"),
    "another's letter": (other_letter, "SHARES", "brings 'silo-00' a letter for 'silo-02'"),
    "another generation of ours": (other_generation, "SHARES", "is not what 'silo-01' signed"),
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_what_the_coordinator_brings_and_nobody_signed_is_its_fault(hostile):
    change, code, said = hostile
    found = blamed(lambda: change(word(OTHER)).check(LINE, ME, SIGNERS))
    assert found[:2] == ("coordinator", code)
    assert said in found[2]
    seen = blamed(lambda: word(OTHER).check(line(job="j2"), ME, SIGNERS))[:2]
    assert seen == ("coordinator", "KEYS")


# What is known.


def test_newer_prekeys_are_sealed_to_and_older_ones_never_again():
    known = first()
    assert known.generations() == dict.fromkeys(SILOS[1:], 0)
    known = known.heard("x", word(OTHER, 0, 1)).heard("x", word(OTHER, 5, 6))
    for again in (word(OTHER, 0, 1), word(OTHER, 5, 6), word(OTHER, 1, 2)):
        assert known.heard("x", again) == known
    assert known.generations() == {OTHER: 6, THIRD: 0, FOURTH: 0}
    assert known.keys()[OTHER] == public_key(seed(OTHER, 6))
    assert known.keys()[THIRD] == public_key(seed(THIRD, 0))


def test_a_silo_that_signs_two_prekeys_of_one_generation_is_named():
    known = first().heard("x", word(OTHER, 0, 1))
    two = word(OTHER, 1, 1, key=public_key(seed(OTHER, 2)))
    assert blamed(lambda: known.heard("x", two))[:2] == (OTHER, "EQUIVOCATION")


def test_a_silo_that_goes_back_to_an_earlier_prekey_of_ours_is_named():
    known = first().heard("x", word(OTHER, 4, 5, {ME: 3}))
    assert known.seen("x", version(OTHER, 3), 2) == known  # an upload before that one
    found = blamed(lambda: known.seen("x", version(OTHER, 5), 2))
    assert found == (OTHER, "SHARES", "sealed upload 5 to prekey 2, after a later one")
    assert known.seen("y", version(OTHER, 5), 2).sealed["x"] == known.sealed["x"]


def test_what_is_known_has_one_spelling():
    known = first().heard("x", word(OTHER, 4, 5, {ME: 3}))
    data = canonical_json(known.model_dump(mode="json"))
    assert parse_canonical(data, p.Known, "x") == known
    assert json.loads(data)["sealed"] == {"x": {OTHER: {"generation": 3, "number": 4}}}
    with pytest.raises(LocalError):
        parse_canonical(data.replace(b'"newest"', b'"newer"'), p.Known, "x")


# What is erased.


def test_a_generation_is_needed_until_each_other_silo_has_sealed_to_a_later_one():
    known = first()
    for silo in (OTHER, THIRD):
        known = known.seen("x", version(silo, 2), 2)
    assert known.floor({"x"}, []) == 0  # the fourth may seal to the first
    known = known.seen("x", version(FOURTH, 2), 1)
    assert known.floor({"x"}, []) == 1
    known = known.seen("x", version(FOURTH, 3), 5)
    assert known.floor({"x"}, []) == 2
    assert known.floor({"x"}, [2, 1]) == 1  # mail of earlier rounds, which may come again


def test_parts_that_do_not_come_down_any_more_hold_no_generation():
    known = first()
    for silo in SILOS[1:]:
        known = known.seen("old", version(silo, 1), 1)
    assert known.floor({"old", "new"}, []) == 1
    for silo in SILOS[1:]:
        known = known.seen("new", version(silo, 2), 4)
    assert known.floor({"old", "new"}, []) == 1
    assert known.floor({"new"}, []) == 4
    assert known.floor({"newest"}, []) == 4  # what they seal next is sealed to no earlier one


def test_who_is_at_fault_where_a_prekey_is_not_there():
    own = {3: b"c", 4: b"d"}
    assert p.check_own(own, OTHER, 3) == b"c"
    assert blamed(lambda: p.check_own(own, OTHER, 2))[:2] == ("coordinator", "SHARES")
    assert blamed(lambda: p.check_own(own, OTHER, 5))[:2] == (OTHER, "SHARES")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["contribute", "relay"]), st.sampled_from(SILOS), st.sampled_from(SILOS)
    )
)


@settings(max_examples=60)
@given(STEPS)
def test_whatever_is_handed_down_when_nothing_that_may_come_is_erased(steps):
    """Each silo seals to what it heard; the coordinator tells newest uploads to others, or not."""
    given_ = dict.fromkeys(SILOS, 0)  # newest generation of each
    # (generation of each other silo, own generation beside it)
    uploads = {silo: [] for silo in SILOS}
    heard = {silo: dict.fromkeys(SILOS, 0) for silo in SILOS}
    known = p.Known.first({silo: public_key(seed(silo, 0)) for silo in SILOS if silo != ME})
    kept, taken = {0}, dict.fromkeys(SILOS, -1)
    for what, one, other in steps:
        if what == "contribute":
            given_[one] += 1
            uploads[one].append((dict(heard[one]), given_[one]))
            if one == ME:
                kept.add(given_[ME])
        elif one != other and uploads[one]:
            number, (to, generation) = len(uploads[one]) - 1, uploads[one][-1]
            heard[other][one] = max(heard[other][one], generation)
            if other == ME:
                taken[one] = number
                said = word(
                    one, number, generation, {silo: to[silo] for silo in SILOS if silo != one}
                )
                known = known.heard("x", said)
                kept -= {each for each in kept if each < known.floor({"x"}, [to[ME]])}
        for silo in SILOS[1:]:  # rows never go back behind what was handed down
            assert {to[ME] for to, _ in uploads[silo][max(taken[silo], 0) :]} <= kept
            assert heard[silo][ME] in kept  # what it seals next

import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.secure_sums import frame, group, names, signer, signers

from staddle.algorithms.exchange.concentration import concentration_fault, seen_fault
from staddle.errors import LocalError, RefusedError
from staddle.files.documents import canonical_json, validate
from staddle.security.identity.domains import JOB, SECAGG_SPEC
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.identity.signers import Signers
from staddle.security.secagg import spec as round_spec
from staddle.security.secagg.spec import RoundSpec, Terms, context_of, specify, threshold

FOUR = names(4)


def public(*counts):
    """A frame of public weights, with the counts of the first silos."""
    counts = tuple(zip(FOUR, counts, strict=False))
    return frame(groups=(group(weights="public"),), counts=counts)


def received(
    document, own=None, terms=None, silo=FOUR[0], by="coordinator", label=SECAGG_SPEC, silos=FOUR
):
    data = document.signed_bytes() if isinstance(document, RoundSpec) else canonical_json(document)
    payload = validate(json.loads(data), RoundSpec, "x").signed_bytes() if label else data
    return round_spec.receive(
        data, signer(by)(label, payload), own or frame(), terms or Terms(), signers(silos), silo
    )


def refused(*args, **fields):
    with pytest.raises(RefusedError) as caught:
        received(*args, **fields)
    assert caught.value.peer == "coordinator"
    return caught.value


def altered(spec, **fields):
    return {**spec.model_dump(mode="json"), **fields}


def test_what_the_coordinator_specifies_the_silo_accepts():
    spec = specify(frame(), FOUR, 0)
    assert received(spec) == spec
    assert (spec.threshold, spec.groups[0].scale_exponent, spec.holder(FOUR[3])) == (3, 25, 4)
    assert specify(frame(), FOUR[::-1], 0) == spec


def test_the_context_is_known_and_binds_every_field():
    spec = specify(public(10, 10, 10, 10), FOUR, 0)
    seen = spec.context().hex()
    assert seen == "8af5de59035df60740360d30705f3867d4e2501766ace72563d8efe8f2f1cdfe"
    others = {
        "federation": "other", "members": "ee" * 32, "job": "j2", "job_digest": "ee" * 32,
        "round": 4, "attempt": 1, "purpose": "count", "recipient": "silos", "key_epoch": 1,
        "key_parts": "ee" * 32, "cohort": [*FOUR[:3], "silo-99"], "threshold": 4, "min_cohort": 4,
        "colluders": 0, "counts": [10, 10, 10, 11],
        "groups": [group("other", weights="public").model_dump()], "model_digest": "ee" * 32,
        "schema_digest": "ee" * 32, "chunk_bytes": 128, "tagged": True,
        "compared": {"name": "rows", "groups": 1, "width": 640, "clip_exponent": 3},
    }  # fmt: skip
    # those have one value
    assert set(others) | {"protocol", "exchange", "prg"} == set(RoundSpec.model_fields)
    found = {
        validate(altered(spec, **{name: value}), RoundSpec, "x").context()
        for name, value in others.items()
    }
    assert len(found | {spec.context()}) == len(others) + 1
    for name, value in (("protocol", "staddle-secagg/2"), ("exchange", "mix"), ("prg", 1)):
        with pytest.raises(LocalError, match=name):
            validate(altered(spec, **{name: value}), RoundSpec, "x")


def test_thresholds():
    found = {n: threshold(n) for n in (3, 4, 5, 6, 10, 20, 60, 100)}
    assert found == {3: 3, 4: 3, 5: 4, 6: 5, 10: 7, 20: 14, 60: 41, 100: 67}
    for n in range(
        1, 1001
    ):  # with 3c < n: no two sets of survivors can both get t signatures, and c alone learn nothing
        c = (n - 1) // 3
        assert 2 * threshold(n) > n + c
        assert c < threshold(n) <= n


# ``receive``, by the numbers of its steps.


def test_1_what_is_no_specification():
    for data in (
        b"", b"{", b"[]", b"\xff", b"{}",
        specify(frame(), FOUR, 0).signed_bytes().replace(b":", b": ", 1),
    ):  # fmt: skip
        with pytest.raises(RefusedError) as caught:
            round_spec.receive(data, bytes(64), frame(), Terms(), signers(FOUR), FOUR[0])
        assert (caught.value.peer, caught.value.code) == ("coordinator", "SPEC")


@pytest.mark.parametrize(("fields", "why"), [
    ({"cohort": list(FOUR[::-1])}, "not sorted"),
    ({"cohort": [*FOUR[:3], FOUR[2]]}, "names a silo twice"),
    ({"cohort": [*FOUR[:3], "Silo"]}, "cohort"),
    ({"counts": [1, 2, 3, 4]}, "4 counts for public weights, not 0"), ({"groups": []}, "groups"),
    ({"groups": [group().model_dump(), group().model_dump()]}, "distinct names"),
    ({"round": -1}, "round"), ({"round": "3"}, "round"), ({"round": True}, "round"),
    ({"tagged": 1}, "tagged"), ({"chunk_bytes": 63}, "chunk_bytes"),
    ({"chunk_bytes": 72}, "chunk_bytes"), ({"chunk_bytes": 1 << 23}, "chunk_bytes"),
    ({"extra": 1}, "extra"), ({"members": "zz" * 32}, "members"),
])  # fmt: skip
def test_1_structure(fields, why):
    data = canonical_json(altered(specify(frame(), FOUR, 0), **fields))
    with pytest.raises(RefusedError, match=why) as caught:
        round_spec.receive(data, bytes(64), frame(), Terms(), signers(FOUR), FOUR[0])
    assert caught.value.code == "SPEC"


def test_2_the_coordinator_signed_it():
    spec = specify(frame(), FOUR, 0)
    assert "signature does not fit" in refused(spec, by=FOUR[1]).why
    assert "signature does not fit" in refused(spec, label=JOB).why
    with pytest.raises(RefusedError, match="signature"):
        round_spec.receive(spec.signed_bytes(), b"", frame(), Terms(), signers(FOUR), FOUR[0])


def test_3_the_cohort_are_silos_of_the_roster_and_we_are_one():
    assert "names silo-03, no silo" in refused(specify(frame(), FOUR, 0), silos=FOUR[:3]).why
    wanted = "does not name it"
    assert wanted in refused(specify(frame(), FOUR, 0), silo="silo-04", silos=names(5)).why


def test_4_the_cohort_is_what_our_policy_asks():
    def asked(n, terms, **fields):
        own = frame(**fields)
        return own, specify(own, names(n), 0), terms

    accepted = [
        asked(4, Terms()),
        asked(3, Terms(colluders=0), colluders=0),
        asked(7, Terms(colluders=2), colluders=2),
    ]
    for own, spec, terms in accepted:
        assert received(spec, own, terms, silos=names(7)) == spec
    own, spec, terms = asked(4, Terms(), colluders=0)
    assert "has colluders = 0, this silo's policy 1" in refused(spec, own, terms).why
    own, spec, terms = asked(3, Terms())
    assert "a cohort of 3 does not withstand colluders = 1" in refused(spec, own, terms).why
    own, spec, terms = asked(6, Terms(), colluders=2)
    assert "does not withstand colluders = 2" in refused(spec, own, terms, silos=names(6)).why
    own, spec, terms = asked(2, Terms(colluders=0), colluders=0)
    assert "a cohort of 2 is smaller than min_cohort 3" in refused(spec, own, terms).why
    own, spec, terms = asked(2, Terms(2, 2, 0), colluders=0, min_cohort=2)  # as explicit as it gets
    assert received(spec, own, terms) == spec
    own, spec, terms = asked(4, Terms(min_cohort=5))
    assert "a cohort of 4 is smaller than min_cohort 5" in refused(spec, own, terms).why
    own, spec, terms = asked(4, Terms(), min_cohort=5)
    assert refused(spec, own, terms).code == "POLICY"


def test_4_a_lower_or_higher_threshold_is_refused():
    for t in (0, 1, 2, 4):
        fault = refused(altered(specify(frame(), FOUR, 0), threshold=t))
        assert (fault.code, f"threshold {t} of 4 is not 3" in fault.why) == ("POLICY", True)


def test_4_public_weights_that_concentrate_are_refused():
    assert received(specify(public(10, 10, 12, 9), FOUR, 0), public(10, 10, 12, 9))
    own = public(100, 10, 12, 9)
    fault = refused(specify(own, FOUR, 0), own)
    assert (fault.code, "one silo has 100 of the" in fault.why) == ("POLICY", True)


@pytest.mark.parametrize(("name", "theirs"), [
    ("federation", "other"), ("members", "ee" * 32), ("job", "j2"), ("job_digest", "ee" * 32),
    ("round", 4), ("purpose", "count"), ("recipient", FOUR[1]), ("model_digest", "ee" * 32),
    ("schema_digest", "ee" * 32), ("key_epoch", 1), ("min_cohort", 2), ("chunk_bytes", 128),
    ("tagged", True), ("groups", (group(clip_exponent=4),)), ("groups", (group(elements=21),)),
    ("groups", (group(ring=64),)),
])  # fmt: skip
def test_5_another_frame_than_ours_is_refused(name, theirs):
    fault = refused(specify(replace(frame(), **{name: theirs}), FOUR, 0))
    assert (fault.code, f"specifies {name}" in fault.why) == ("SPEC", True)


@pytest.mark.parametrize("theirs", ["", "ef" * 32])
def test_6_a_sum_of_silos_with_another_key_is_refused(theirs):
    own = replace(frame(), key_parts="ee" * 32)
    assert received(specify(own, FOUR, 0), own).key_parts == "ee" * 32
    fault = refused(specify(replace(own, key_parts=theirs), FOUR, 0), own)
    assert (fault.peer, fault.code) == ("coordinator", "KEYS")
    assert "silos have different keys" in fault.why


def test_5_what_is_said_of_a_long_field_is_short():
    many = tuple(group(f"g{i}") for i in range(500))
    assert len(refused(specify(frame(groups=many), FOUR, 0)).why) < 1000


def test_5_a_scale_or_counts_that_do_not_follow_are_refused():
    spec = specify(frame(), FOUR, 0)
    wrong = spec.groups[0].model_copy(update={"scale_exponent": 26})
    assert "specifies groups" in refused(altered(spec, groups=[wrong.model_dump()])).why
    own = public(10, 10, 10, 10)
    wanted = "specifies counts"
    assert wanted in refused(altered(specify(own, FOUR, 0), counts=[10, 10, 10, 11]), own).why
    missing = replace(own, counts=own.counts[:3])
    assert "no declared count of silo-03" in refused(specify(own, FOUR, 0), missing).why


# What survivors must be.


def survivors_fault(spec, terms, survivors):
    with pytest.raises(RefusedError) as caught:
        round_spec.check_survivors(spec, terms, survivors)
    assert (caught.value.peer, caught.value.code) == ("coordinator", "SURVIVORS")
    return caught.value.why


def test_survivors_1_enough():
    spec = specify(frame(), names(10), 0)
    round_spec.check_survivors(spec, Terms(), names(7))
    assert "6 survivors are fewer than 7" in survivors_fault(spec, Terms(), names(6))
    assert "7 survivors are fewer than 8" in survivors_fault(spec, Terms(min_cohort=8), names(7))


def test_survivors_2_honest():
    spec = specify(frame(), FOUR, 0)
    round_spec.check_survivors(spec, Terms(), FOUR[:3])
    wanted = "of 3 survivors 2 are sure to be honest, the policy asks for 3"
    assert wanted in survivors_fault(spec, Terms(min_honest=3), FOUR[:3])


def test_sums_may_lack_silos_that_are_excused_and_no_others():
    """Two batches of four that may be three: a colluder less is no honest silo less."""
    eight = names(8)
    terms = Terms(batches=(eight[:4], eight[4:]))
    excused = replace(terms, excused=frozenset(eight[:1]))
    seven = specify(frame(), eight[1:], 0)
    with pytest.raises(RefusedError, match=f"lacks {eight[0]}, without whom"):
        round_spec.check_cohort(seven, terms)
    round_spec.check_cohort(seven, excused)
    round_spec.check_survivors(seven, excused, eight[1:])
    assert f"the sum lacks {eight[0]}, {eight[1]}" in survivors_fault(seven, excused, eight[2:])
    whole = specify(frame(), eight, 0)
    # of the round in which it was found out, and of those before
    for survivors in (eight, eight[1:]):
        round_spec.check_cohort(whole, excused)
        round_spec.check_survivors(whole, excused, survivors)
    two = replace(terms, excused=frozenset(eight[:2]))
    with pytest.raises(RefusedError, match=f"lacks {eight[0]}, {eight[1]}"):
        round_spec.check_cohort(specify(frame(), eight[2:], 0), two)  # two are no batch
    larger = replace(excused, min_cohort=4)
    with pytest.raises(RefusedError, match=f"lacks {eight[0]}"):
        round_spec.check_cohort(seven, larger)
    one = Terms(batches=(eight[:5],), excused=frozenset(eight[:1]))
    round_spec.check_cohort(specify(frame(), eight[1:5], 0), one)
    with pytest.raises(RefusedError, match="a cohort of 3 does not withstand colluders = 1"):
        round_spec.check_cohort(
            specify(frame(), eight[2:5], 0), replace(one, excused=frozenset(eight[:2]))
        )


def test_survivors_3_concentration():
    spec = specify(public(10, 10, 10, 15), FOUR, 0)
    round_spec.check_cohort(spec, Terms())
    round_spec.check_survivors(spec, Terms(), FOUR)
    round_spec.check_survivors(spec, Terms(), FOUR[:3])
    assert "one silo has 15 of the 25" in survivors_fault(spec, Terms(), FOUR[1:])


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.integers(2, 6))
def test_concentration_as_rule_5_says_it(counts, min_cohort):
    def faulty(others):
        if not sum(others):
            return True
        shares = [Fraction(c, sum(others)) for c in others]
        return max(shares) > Fraction(1, 2) or 1 / sum(s * s for s in shares) < min_cohort - 1

    expected = any(faulty(counts[:own] + counts[own + 1 :]) for own in range(len(counts)))
    assert bool(concentration_fault(counts, min_cohort)) == expected


@pytest.mark.parametrize(("counts", "min_cohort", "faulty"), [
    ((15, 10, 10, 7), 2, False), ((15, 15, 15), 3, False), ((15, 15, 14), 2, True), ((5,), 2, True),
    ((), 2, False),
])  # fmt: skip
def test_concentration_of_few_and_of_equals(counts, min_cohort, faulty):
    """A third may be too much where another is as large: the heaviest sees the second."""
    assert bool(concentration_fault(counts, min_cohort)) == faulty


def test_concentration_of_large_counts_is_exact_unless_they_were_rounded():
    half = [2**31 + 1, 2**30, 2**30]
    assert seen_fault(half, 3).startswith("one silo has 2147483649 of the 4294967297")
    assert not seen_fault(half, 3, rounded=True)
    assert not seen_fault([2**31, 2**30, 2**30], 3)
    assert seen_fault([2**31, 2**31 - 1], 3, rounded=False)
    assert not seen_fault([2**31, 2**31 - 1], 3, rounded=True)
    assert seen_fault([2**31 + 2**12, 2**30, 2**30 - 2**12], 3, rounded=True)
    assert "3.00 equal ones, fewer than 3" in seen_fault([2**30, 2**30, 2**30 + 1], 4)
    assert not seen_fault([2**30, 2**30, 2**30 + 1], 4, rounded=True)
    assert seen_fault([3, 2], 3, rounded=True)


def test_a_missing_count_is_said():
    with pytest.raises(LocalError, match="no declared count of silo-03"):
        specify(public(10, 10, 10), FOUR, 0)


def test_signers_of_a_roster(tmp_path):
    roles = {"coordinator": Role.COORDINATOR, "silo-a": Role.SILO}
    entries = {m: create_keys(tmp_path / m, m, role, "org") for m, role in roles.items()}
    keys = {m: load_keys(tmp_path / m) for m in roles}
    found = Signers.of(
        SimpleNamespace(coordinator=entries["coordinator"], silos=(entries["silo-a"],))
    )
    assert found.by_coordinator(JOB, b"x", keys["coordinator"].sign(JOB, b"x"))
    assert found.by_silo("silo-a", JOB, b"x", keys["silo-a"].sign(JOB, b"x"))
    assert not found.by_silo("silo-b", JOB, b"x", keys["silo-a"].sign(JOB, b"x"))
    assert not found.by_coordinator(JOB, b"x", keys["silo-a"].sign(JOB, b"x"))
    assert not found.by_coordinator(SECAGG_SPEC, b"x", keys["coordinator"].sign(JOB, b"x"))


def test_the_context_is_of_the_document_as_it_was_signed():
    document = b'{"protocol":"staddle-secagg/1"}'
    by_hand = bytes(7) + b"\x18staddle/secagg/context/1" + bytes(7) + b"\x1f" + document
    assert context_of(document) == hashlib.sha256(by_hand).digest()

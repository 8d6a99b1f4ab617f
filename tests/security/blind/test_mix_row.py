from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blind_mixes import Mixing, line
from support.secure_sums import names, signer

from staddle.algorithms.exchange.parts import integer_weights
from staddle.errors import LocalError, RefusedError
from staddle.security.blind import mix_row as m
from staddle.security.blind.mix_context import Version
from staddle.security.secagg.spec import Terms

FOUR = names(4)
SIX = names(6)
THIRD = [0, 1, 1, 1]


def version(silo, number=0, round_=None):
    return Version(silo=silo, round=number if round_ is None else round_, attempt=0, number=number)


def row(weights, recipient=FOUR[0], numbers=None, on=None, silos=FOUR):
    """A row of raw weights, as the coordinator makes and signs it."""
    integers = dict(zip(silos, integer_weights(weights), strict=True))
    shares = [
        m.Share(version=version(silo, (numbers or {}).get(silo, 0)), weight=weight)
        for silo, weight in integers.items()
        if weight and silo != recipient
    ]
    return m.make_row(on or line(), recipient, integers[recipient], shares, signer("coordinator"))


def admit(made, silo=FOUR[0], memory=None, terms=None, on=None, silos=FOUR):
    document = made[0].signed_bytes() if isinstance(made[0], m.RecipientRow) else made[0]
    signature = made[1]
    here = Mixing(len(silos)).signers
    return m.admit(
        on or line(), silo, document, signature, memory or m.RowMemory(), terms or Terms(), here
    )


def signed(document):
    return document, signer("coordinator")(m.MIX_ROW, document)


def fault(*args, **fields):
    with pytest.raises(RefusedError) as caught:
        admit(*args, **fields)
    assert caught.value.peer == "coordinator"
    return caught.value.code, caught.value.why


def asked(made, memory=None, terms=None):
    """What the coordinator asks before it makes this row."""
    given = made[0]
    return m.fault(
        given.recipient, given.own_weight, given.shares, memory or m.RowMemory(), terms or Terms()
    )


def test_a_good_row_is_admitted_and_remembered():
    made = row([1, 2, 2, 2])
    admitted, memory = admit(made)
    assert admitted == made[0]
    assert memory.newest == {FOUR[1]: 0, FOUR[2]: 0, FOUR[3]: 0}
    assert m.RowMemory.model_validate_json(memory.model_dump_json()) == memory


def test_1_a_row_has_one_spelling():
    document = row(THIRD)[0].signed_bytes()
    for wrong in (
        document + b" ", document[:-1], b"{}", document.replace(b'"weight":', b'"weight": '),
    ):  # fmt: skip
        assert fault(signed(wrong))[0] == "SPEC"
    huge = document.replace(b'"weight":1431655766', b'"weight":9007199254740993')
    assert huge != document
    assert fault(signed(huge))[0] == "SPEC"


def test_2_the_coordinator_signed_it():
    made, _ = row(THIRD)
    for signature in (
        bytes(64),
        signer(FOUR[1])(m.MIX_ROW, made.signed_bytes()),
        row([1, 1, 1, 1])[1],
    ):
        assert "signature" in fault((made, signature))[1]


def test_3_it_is_ours_and_of_this_line():
    assert fault(row(THIRD), FOUR[1])[0] == "SPEC"
    assert "or of another line" in fault(row(THIRD, on=line(job="j2")))[1]
    assert "or of another line" in fault(row(THIRD, on=line(key_epoch=3)))[1]


def test_4_it_names_other_silos_once_each():
    made, _ = row(THIRD)
    shares = made.shares
    own = m.Share(version=version(FOUR[0]), weight=5)
    stranger = m.Share(version=version("stranger"), weight=shares[2].weight)
    for wrong in (
        (own, *shares), (shares[0], shares[0], *shares[1:]), (*shares[:2], stranger), shares[::-1],
    ):  # fmt: skip
        document = made.model_copy(update={"shares": wrong}).signed_bytes()
        assert "not distinct other silos" in fault(signed(document))[1]


@pytest.mark.parametrize("by", [-1, 1, 1 << 31])
def test_5_weights_add_up_to_2_to_the_32(by):
    made, _ = row([1, 1, 1, 1])
    document = made.model_copy(update={"own_weight": made.own_weight + by}).signed_bytes()
    assert f"add up to {2**32 + by}" in fault(signed(document))[1]


def test_6_enough_are_honest():
    wanted = "3 are sure to be honest, the policy asks for 4"
    assert wanted in fault(row(THIRD), terms=Terms(min_honest=4))[1]
    admit(row(THIRD), terms=Terms(min_honest=4, colluders=0))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 20), min_size=6, max_size=6).filter(lambda w: sum(w[1:]) > 0),
    st.integers(2, 5),
)
def test_6_no_silo_outweighs_the_others_whatever_the_recipients_own_part(weights, min_cohort):
    integers = integer_weights(weights)
    slack = Fraction(1, 2**22)  # steps of 2^-32 move a share by less
    others = [Fraction(w, sum(integers[1:])) for w in integers[1:] if w]
    bad = (
        max(others) > Fraction(1, 2) + slack
        or 1 / sum(s * s for s in others) < min_cohort - 1 - slack
    )
    few = len(others) < min_cohort  # step 7: a first row needs as many new uploads
    made = row(weights, silos=SIX)
    terms = Terms(min_cohort=min_cohort, colluders=0, min_honest=1)
    assert bool(asked(made, terms=terms)) == (bad or few)
    if bad or few:
        assert fault(made, terms=terms, silos=SIX)[0] == "POLICY"
    else:
        admit(made, terms=terms, silos=SIX)


def test_6_equal_weights_that_differ_by_a_step_are_equal():
    terms = Terms(min_cohort=4, colluders=0)
    for raw in ([1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0], [7, 3, 3, 3, 0, 0]):
        admit(row(raw, silos=SIX), terms=Terms(colluders=0), silos=SIX)
    made = row([0, 1, 1, 1, 0, 0], silos=SIX)
    assert len({share.weight for share in made[0].shares}) == 2
    # they do count as three equal ones
    assert "new uploads of 3 silos" in fault(made, terms=terms, silos=SIX)[1]
    tiny = [m.Share(version=version(s), weight=w) for s, w in zip(FOUR[1:], (3, 1, 1), strict=True)]
    leaning = m.make_row(line(), FOUR[0], 2**32 - 5, tiny, signer("coordinator"))
    assert "one silo has 3 of the 5" in fault(leaning)[1]  # few steps, and no slack


def test_6_says_which_weight():
    assert "one silo has" in fault(row([90, 1, 3, 1]))[1]
    assert "count as" in fault(row([0, 50, 25, 25]), terms=Terms(min_cohort=4))[1]
    assert admit(row([90, 2, 2, 2]))  # a recipient may weigh itself as it likes


def test_7_one_row_for_each_vector_of_versions():
    first = row(THIRD)
    _, memory = admit(first)
    assert admit(first, memory=memory)[1] == memory  # the same row, fetched again
    for weights in ([0, 3, 3, 2], [1, 1, 1, 1]):
        assert "new uploads of 0 silos" in fault(row(weights), memory=memory)[1]


def test_7_a_new_row_needs_new_uploads_of_min_cohort_silos():
    _, memory = admit(row(THIRD))
    wanted = "new uploads of 2 silos"
    assert wanted in fault(row(THIRD, numbers={FOUR[1]: 1, FOUR[2]: 1}), memory=memory)[1]
    made = row(THIRD, numbers=dict.fromkeys(FOUR[1:], 4))
    _, later = admit(made, memory=memory)
    assert later.newest == dict.fromkeys(FOUR[1:], 4)
    older = row(THIRD, numbers={FOUR[1]: 5, FOUR[2]: 5, FOUR[3]: 3})
    assert "older uploads of silo-03" in fault(older, memory=later)[1]
    # not even the same row as once before
    assert "older uploads" in fault(row(THIRD), memory=later)[1]
    admit(row(THIRD, numbers={FOUR[1]: 1, FOUR[2]: 1}), memory=memory, terms=Terms(min_cohort=2))


SEVEN = names(7)
OLD, NEW = SEVEN[1:4], SEVEN[4:]  # of six others: who is mixed again, and who gave anew


@pytest.mark.parametrize(("weights", "said"), [
    ([2, 2, 0, 1e-6, 1e-6, 1e-6], "less than half"),
    ([1.01, 1.01, 1.01, 1, 1, 1], "less than half"),
    ([0, 1, 1, 3, 0.9, 0.9], "of its new uploads alone: weights of the row: one silo has"),
    ([1, 1, 1, 1, 1, 1], ""), ([1, 1, 0, 1, 1, 1], ""), ([1, 1, 1, 2, 1, 1], ""),
])  # fmt: skip
@pytest.mark.parametrize("own", [0, 50])
def test_7_new_uploads_are_spread_by_themselves_and_carry_half(weights, said, own):
    """Old and new ones each. The recipient's own weight is no cover, nor counted against a row."""
    _, memory = admit(row([0, *[1] * 6], recipient=SEVEN[0], silos=SEVEN), silos=SEVEN)
    made = row([own * sum(weights), *weights], SEVEN[0], dict.fromkeys(NEW, 1), silos=SEVEN)
    assert said in asked(made, memory)
    assert bool(asked(made, memory)) == bool(said)
    if said:
        code, why = fault(made, memory=memory, silos=SEVEN)
        assert (code, said in why) == ("POLICY", True)
    else:
        found = admit(made, memory=memory, silos=SEVEN)[1].newest
        assert found == {**dict.fromkeys(OLD, 0), **dict.fromkeys(NEW, 1)}


def test_7_enough_of_those_who_gave_anew_are_honest():
    _, memory = admit(row([0, *[1] * 6], recipient=SEVEN[0], silos=SEVEN), silos=SEVEN)
    made = row([0, *[1] * 6], SEVEN[0], dict.fromkeys(NEW, 1), silos=SEVEN)
    admit(made, memory=memory, terms=Terms(min_honest=3), silos=SEVEN)
    wanted = "of its new uploads alone: of 4 silos in the row 3 are sure"
    assert wanted in fault(made, memory=memory, terms=Terms(min_honest=4), silos=SEVEN)[1]


def test_7_rows_never_have_two_equations_in_few_new_unknowns():
    """Each admitted row of random offers brings min_cohort uploads that no row before it has."""
    random, memory, seen, admitted = np.random.default_rng(0), m.RowMemory(), set(), 0
    newest = dict.fromkeys(SIX, 0)
    for _ in range(200):
        for silo in SIX:
            newest[silo] += int(random.random() < 0.3)
        weights = random.integers(0, 4, 6).tolist()
        if not sum(weights[1:]):
            continue
        made = row(weights, numbers=newest, silos=SIX)
        if made[0].digest() != memory.last and (why := asked(made, memory)):
            assert why in fault(made, memory=memory, silos=SIX)[1]
            continue
        _, memory = admit(made, memory=memory, silos=SIX)
        if made[0].digest() not in seen:
            used = {(share.version.silo, share.version.number) for share in made[0].shares}
            assert len(used - seen) >= 3
            seen |= used | {made[0].digest()}
            admitted += 1
    assert admitted > 20


def test_who_makes_rows_asks_first():
    made, terms = row([1, 2, 2, 2])[0], Terms()
    ask = lambda recipient=FOUR[0], own=made.own_weight, shares=made.shares, memory=None: m.fault(
        recipient, own, shares, memory or m.RowMemory(), terms
    )
    assert ask() == ""
    assert ask(shares=made.shares[::-1]) == ""  # they are put in order when the row is made
    assert "distinct silos other than" in ask(recipient=FOUR[1])
    assert "distinct silos other than" in ask(shares=(*made.shares, made.shares[0]))
    assert "add up to" in ask(own=made.own_weight + 1)
    assert "sure to be honest" in ask(shares=(), own=1 << 32)
    assert "new uploads of 0 silos" in ask(memory=m.RowMemory(newest=dict.fromkeys(FOUR, 0)))
    assert "older uploads of silo-01" in ask(memory=m.RowMemory(newest={FOUR[1]: 1}))


def test_uploads_are_those_of_the_row():
    made = Mixing(4)
    for silo in FOUR:
        made.contribute(silo, np.zeros(20))
    offered, _ = made.row(FOUR[0], dict.fromkeys(FOUR, 1 << 30))
    old = [made.stored[silo].upload for silo in FOUR[1:]]
    m.check_uploads(offered, old)
    made.contribute(FOUR[1], np.zeros(20), 1)
    for wrong in (old[1:], old[::-1], [made.stored[silo].upload for silo in FOUR[1:]]):
        with pytest.raises(RefusedError) as caught:
            m.check_uploads(offered, wrong)
        assert caught.value.peer == "coordinator"


def test_a_stream_hides_one_upload():
    memory = m.VersionMemory().began(version(FOUR[0], 0, 5))
    assert m.VersionMemory.model_validate_json(memory.model_dump_json()) == memory
    for number, round_ in ((0, 5), (0, 6), (1, 4)):
        with pytest.raises(LocalError, match="a stream hides one upload only"):
            memory.began(version(FOUR[0], number, round_))
    # restarted within the attempt: a new seed, a new version
    assert memory.began(version(FOUR[0], 1, 5)).number == 1


def test_one_upload_a_round_is_signed():
    begun = m.VersionMemory().began(version(FOUR[0], 0, 5)).began(version(FOUR[0], 1, 5))
    memory = begun.signed()
    assert memory == m.VersionMemory(round=5, attempt=0, number=1, signed_round=5)
    for number, round_ in ((2, 5), (2, 4)):
        with pytest.raises(RefusedError, match="after that of round 5 was signed") as caught:
            memory.began(version(FOUR[0], number, round_))
        assert (caught.value.peer, caught.value.code) == ("coordinator", "ATTEMPT")
    assert memory.began(version(FOUR[0], 2, 6)).signed_round == 5


@given(st.binary(max_size=200) | st.integers(0, 10**6))
def test_1_hostile_bytes_are_refused(hostile):
    """Any bytes, or a row with one byte changed, under the coordinator's own signature."""
    document = bytearray(row(THIRD)[0].signed_bytes())
    if isinstance(hostile, int):
        at, to = hostile % len(document), hostile // len(document) % 256
        document[at] = to if document[at] != to else to ^ 1
        hostile = bytes(document)
    admitted = None
    with suppress(RefusedError):
        admitted, _ = admit(signed(hostile))
    # another good row: of another round, attempt or version
    assert admitted is None or admitted.signed_bytes() == hostile

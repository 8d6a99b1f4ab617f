"""Who is asked about whose ledger, and what is passed on: under events in any order."""

from hypothesis import given
from hypothesis import strategies as st

from staddle.coordinator.storage.attestations import MOST_ASKED, WITNESSES, Attesting
from staddle.proto import federation_pb2 as pb

SILOS = ("a", "b", "c", "d", "e", "f")


def said(silo, challenge, head=b"head"):
    return pb.Attestation(
        session=b"s", silo=silo, challenge=challenge, held=head, signature=b"x" * 64
    )


def asked(witness):
    return [(one.silo, one.challenge) for one in witness.asked] if witness else []


def test_a_silo_that_polls_is_asked_once_and_its_answer_reaches_the_one_who_asked():
    attesting = Attesting()
    attesting.ask("a", b"1")
    assert attesting.waiting("a") is None
    assert asked(attesting.waiting("b")) == [("a", b"1")]
    assert attesting.waiting("b") is None
    assert attesting.answered("b", said("a", b"1"))
    (attestations,) = attesting.waiting("a").attestations
    assert (attestations.by, attestations.silo) == ("b", "a")
    assert (attestations.challenge, attestations.held) == (b"1", b"head")
    assert attestations.signature == b"x" * 64
    assert attestations.session == b""  # b's secret
    assert attesting.waiting("a") is None


def test_a_silo_at_work_is_asked_and_is_told_with_its_next_poll():
    attesting = Attesting()
    attesting.ask("a", b"1")
    attesting.ask("b", b"2")
    assert [(one.silo, one.challenge) for one in attesting.questions("b")] == [("a", b"1")]
    assert attesting.questions("b") == []
    attesting.waiting("a")
    assert attesting.answered("a", said("b", b"2"))
    assert attesting.questions("b") == []
    assert [answer.by for answer in attesting.waiting("b").attestations] == ["a"]


def test_in_place_of_silos_that_hold_nothing_others_are_asked():
    attesting = Attesting()
    attesting.ask("a", b"1")
    for silo in "bcdefg":
        assert asked(attesting.waiting(silo)) == [("a", b"1")]
    assert attesting.waiting("h") is None
    attesting.answered("b", said("a", b"1", b""))
    assert asked(attesting.waiting("h")) == [("a", b"1")]
    assert attesting.waiting("i") is None
    for silo in "cde":
        attesting.answered(silo, said("a", b"1"))
    assert attesting.waiting("i") is None  # enough hold something
    assert [answer.by for answer in attesting.waiting("a").attestations] == ["b", "c", "d", "e"]


def test_answers_that_nobody_waits_for_are_dropped():
    attesting = Attesting()
    attesting.ask("a", b"1")
    assert not attesting.answered("b", said("a", b"1"))  # was not asked
    attesting.waiting("b")
    assert not attesting.answered("b", said("a", b"2"))
    assert not attesting.answered("b", said("c", b"1"))
    assert attesting.answered("b", said("a", b"1"))
    assert not attesting.answered("b", said("a", b"1"))  # twice
    assert len(attesting.waiting("a").attestations) == 1


def test_a_new_session_asks_anew_and_forgets_the_answers_of_the_one_before():
    attesting = Attesting()
    attesting.ask("a", b"1")
    attesting.waiting("b")
    attesting.answered("b", said("a", b"1"))
    attesting.ask("a", b"2")
    assert attesting.waiting("a") is None
    assert asked(attesting.waiting("b")) == [("a", b"2")]
    assert not attesting.answered("b", said("a", b"1"))


def test_who_left_before_it_answered_is_asked_again_and_who_answered_is_not():
    attesting = Attesting()
    attesting.ask("a", b"1")
    attesting.waiting("b")
    attesting.waiting("c")
    attesting.answered("c", said("a", b"1"))
    for silo in ("b", "c"):
        attesting.ask(silo, b"0" + silo.encode())
    assert ("a", b"1") in asked(attesting.waiting("b"))
    assert ("a", b"1") not in asked(attesting.waiting("c"))


def test_silos_that_never_answer_do_not_keep_all_others_from_being_asked():
    attesting = Attesting()
    attesting.ask("a", b"1")
    silent = [f"s{n}" for n in range(WITNESSES)]
    for silo in silent:
        assert asked(attesting.waiting(silo)) == [("a", b"1")]
    others = [f"o{n}" for n in range(MOST_ASKED)]
    asked_too = [silo for silo in others if asked(attesting.waiting(silo))]
    assert asked_too == others[: MOST_ASKED - WITNESSES]
    for silo in asked_too:
        assert attesting.answered(silo, said("a", b"1"))
    assert not asked(attesting.waiting("late"))


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "poll", "answer"]), st.sampled_from(SILOS)), max_size=60
)


@given(STEPS)
def test_random_events(steps):
    """Under random events each answer belongs to its session, and at most six silos are asked."""
    attesting, session, questions, answers = Attesting(), {}, {}, {}
    for number, (step, silo) in enumerate(steps):
        if step == "ask":
            session[silo] = b"%d" % number
            attesting.ask(silo, session[silo])
            answers[silo] = set()
        elif step == "poll":
            witness = attesting.waiting(silo)
            for one in witness.attestations if witness else []:
                assert one.challenge == session[silo]
                assert (one.by, one.challenge) not in answers[silo]
                answers[silo].add((one.by, one.challenge))
                assert len(answers[silo]) <= MOST_ASKED
            for other, challenge in asked(witness):
                assert other != silo
                assert challenge == session[other]
                questions.setdefault(silo, []).append((other, challenge))
        else:
            for other, challenge in questions.pop(silo, []):
                attesting.answered(silo, said(other, challenge))

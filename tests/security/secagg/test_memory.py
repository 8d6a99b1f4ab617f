from dataclasses import replace

import pytest
from support.secure_sums import Drawn, Run, attempt, frame, group, names, ones, signer, signers

from staddle.errors import LocalError, RefusedError
from staddle.files.documents import canonical_json, parse_canonical
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.memory import Memory, Pending
from staddle.security.secagg.messages import make_abandon
from staddle.security.secagg.spec import Terms, specify

FIVE = names(5)
SIGNERS = signers(FIVE)
OTHER_MODEL = "ee" * 32


def spec(round_=3, number=0, model="cc" * 32):
    return specify(frame(round=round_, model_digest=model), FIVE, number)


def refused(memory, of, notes=()):
    with pytest.raises(RefusedError) as caught:
        memory.entered(of, notes, SIGNERS)
    assert caught.value.peer == ("" if caught.value.code == "ABANDON" else "coordinator")
    return caught.value.code


def entered(of, memory=None):
    return (memory or Memory()).entered(of, (), SIGNERS)


def notes_of(of, *silos):
    return tuple(make_abandon(of.context(), silo, signer(silo)) for silo in silos)


def test_1_attempts_only_go_forward():
    memory = entered(spec(3, 1))
    assert (memory.round, memory.attempt, memory.ctx) == (3, 1, spec(3, 1).context().hex())
    for older in (spec(3, 1), spec(3, 0), spec(2, 9, OTHER_MODEL)):
        assert refused(memory, older) == "ATTEMPT"
    assert entered(spec(3, 2), memory).attempt == 2
    assert entered(spec(4, 0), memory).round == 4


def test_1_a_restarted_silo_refuses_the_attempt_that_it_was_in():
    """Killed at each step and asked anew: what it remembered before it sent refuses the replay."""
    run = Run(attempt(5), ones(FIVE)).finish()
    for remember in run.effects(s.Remember, FIVE[0]):
        kept = parse_canonical(
            canonical_json(remember.memory.model_dump(mode="json")), Memory, "memory"
        )
        assert kept == remember.memory
        assert refused(kept, run.spec) == "ATTEMPT"


def test_2_nothing_else_of_a_round_or_a_model_that_was_signed():
    of = spec(3, 0)
    memory = entered(of).uploading(of, FIVE).signed(of, FIVE)
    assert memory.pending == ()
    everyone = notes_of(of, *FIVE)
    assert refused(memory, spec(3, 1), everyone) == "ATTEMPT"
    assert refused(memory, spec(3, 1, OTHER_MODEL), everyone) == "ATTEMPT"
    assert refused(memory, spec(4, 0), everyone) == "ATTEMPT"
    later = entered(spec(4, 0, OTHER_MODEL), memory)
    assert refused(later, spec(5, 0)) == "ATTEMPT"  # the model of round 3 again, two rounds later


def test_3_after_the_first_masked_byte_only_with_abandon_notes():
    of = spec(3, 0)
    assert entered(spec(3, 1), entered(of)).attempt == 1  # nothing had left
    memory = entered(of).uploading(of, FIVE)
    needed = 5 - 4 + 1 + 1
    assert memory.pending[0].notes_needed == needed
    # the round, or the model, is the same
    for following in (spec(3, 1), spec(4, 0), spec(3, 1, OTHER_MODEL)):
        for notes in (
            (), notes_of(of, *FIVE[: needed - 1]), notes_of(of, FIVE[0], FIVE[0], FIVE[0]),
            notes_of(of, *FIVE[: needed - 1], "silo-99"), notes_of(spec(3, 9), *FIVE),
            (*notes_of(of, *FIVE[:2]), replace(notes_of(of, FIVE[2])[0], signature=bytes(64))),
        ):  # fmt: skip
            assert refused(memory, following, notes) == "ABANDON"
        assert memory.entered(following, notes_of(of, *FIVE[:needed]), SIGNERS).pending == ()
    # nor another round from the same state of the silo
    assert refused(memory, spec(4, 0, OTHER_MODEL)) == "ABANDON"
    # from a later state and another model it is free
    fresh = entered(spec(4, 0, OTHER_MODEL), memory.starting(4))
    # the first model again is not: its upload may still be opened
    assert refused(fresh, spec(5, 0)) == "ABANDON"


def test_values_from_one_state_are_in_one_signed_sum():
    """The coordinator says that no round counted, or not the last one (security rule 34)."""
    of = spec(3, 0)
    signed = entered(of, Memory().starting(2)).uploading(of, FIVE).signed(of, FIVE)
    assert (signed.start, signed.signed_round, signed.signed_ctx) == (2, 3, of.context().hex())
    for start in range(4):
        why = f"rounds count up to round {start - 1}, .* survivors of round 3"
        with pytest.raises(RefusedError, match=why) as no:
            signed.starting(start)
        assert (no.value.peer, no.value.code) == ("coordinator", "ATTEMPT")
    assert entered(spec(4, 0, OTHER_MODEL), signed.starting(4)).start == 4


def test_an_upload_is_settled_by_the_sum_of_its_round_that_holds_it_not():
    of, ctx = spec(3, 0), spec(3, 0).context().hex()
    memory = entered(of).uploading(of, FIVE)
    # the sum of another round says nothing
    assert memory.settled(4, ctx, FIVE[1:], FIVE[0], alone=True) is memory
    assert memory.settled(3, ctx, FIVE, FIVE[0], alone=True) is memory  # its values are in that sum
    # without it; or of another attempt
    for found, survivors in ((ctx, FIVE[1:]), ("ee" * 32, FIVE)):
        after = memory.settled(3, found, survivors, FIVE[0], alone=True)
        assert after.pending == ()
        assert entered(spec(4, 0, OTHER_MODEL), after).round == 4


def test_3_notes_leave_no_set_that_could_unmask():
    for n in range(4, 40):
        for c in range((n - 1) // 3 + 1):
            t = 2 * n // 3 + 1
            for members in range(t, n + 1):
                pending = Pending(
                    round=1, start=1, model="cc" * 32, ctx="dd" * 32,
                    members=tuple(f"s{i}" for i in range(members)), threshold=t, colluders=c,
                )  # fmt: skip
                kept_word = pending.notes_needed - c  # colluders among the signers break theirs
                assert members - kept_word == t - 1


def test_only_members_of_u1_count():
    of = spec(3, 0)
    memory = entered(of).uploading(of, FIVE[:4])
    assert memory.pending[0].notes_needed == 2
    assert refused(memory, spec(3, 1), notes_of(of, FIVE[0], FIVE[4])) == "ABANDON"
    assert memory.entered(spec(3, 1), notes_of(of, *FIVE[:2]), SIGNERS).pending == ()


def test_signing_and_abandoning_exclude_each_other():
    of = spec(3, 0)
    memory = entered(of).uploading(of, FIVE)
    with pytest.raises(LocalError, match="never signed"):
        memory.given_up().signed(of, FIVE)
    with pytest.raises(LocalError, match="never abandoned"):
        memory.signed(of, FIVE).given_up()


def test_a_restarted_silo_abandons_its_newest_attempt_unless_it_signed():
    of = spec(3, 0)
    participant = machine.Participant(FIVE[0], SIGNERS, Terms(), signer(FIVE[0]), Drawn(0))
    memory = entered(of).uploading(of, FIVE)
    after, note = machine.abandon_remembered(participant, memory, of.context())
    assert after.abandoned
    assert note.holds(of.context(), SIGNERS)
    for changed, ctx in (
        (memory.signed(of, FIVE), of.context()),
        (memory, spec(3, 1).context()),
        (Memory(), of.context()),
    ):
        with pytest.raises(RefusedError) as caught:
            machine.abandon_remembered(participant, changed, ctx)
        assert caught.value.code == "ABANDON"


def test_the_file_of_the_docstring_and_others():
    of = spec(3, 0)
    memory = entered(of).uploading(of, FIVE)
    data = canonical_json(memory.model_dump(mode="json"))
    assert parse_canonical(data, Memory, "memory") == memory
    for wrong in (
        data.replace(b'"round":3', b'"round":"3"'),
        data.replace(b'"attempt"', b'"attempts"'),
    ):
        with pytest.raises(LocalError):
            parse_canonical(wrong, Memory, "memory")


def test_another_instance_has_its_own_memory():
    others = (frame(purpose="count"), frame(recipient="silos"), frame(job="j2"))
    assert frame().instance() == "j1/sum/update/coordinator"
    assert len({each.instance() for each in (frame(), *others)}) == 4


# Sums of several batches.

NINE = names(9)
BATCHES = (NINE[:3], NINE[3:6], NINE[6:])
THREES = Terms(batches=BATCHES)


def over(silos, number, **fields):
    return specify(frame(**fields), silos, number)


def test_a_round_that_was_signed_may_be_summed_over_other_whole_batches():
    """Each sum of the round is a union of batches; together they tell the batches' sums alone."""
    everybody = over(NINE, 0)
    memory = entered(everybody).uploading(everybody, NINE).signed(everybody, NINE)
    again = over(NINE[3:], 1)
    assert memory.repeated(again, None, signers(NINE), THREES) == NINE[3:]
    after = memory.entered(again, (), signers(NINE), None, THREES)
    assert (after.attempt, after.signed_attempt) == (1, 0)
    why = "asks for round 3, attempt 1 after its survivors were signed"
    with pytest.raises(RefusedError, match=why):
        memory.entered(again, (), signers(NINE), None, Terms())


def test_a_round_of_one_batch_may_be_summed_again_over_all_of_it():
    """Silos died before the sum was open. The same values over the same silos are the same sum."""
    everybody, terms = over(NINE, 0), Terms(batches=(NINE,))
    uploaded = entered(everybody).uploading(everybody, NINE)
    for memory in (uploaded, uploaded.signed(everybody, NINE)):
        assert memory.entered(over(NINE, 1), (), signers(NINE), None, terms).attempt == 1
    signed = uploaded.signed(everybody, NINE)
    # no survivors but all of them
    assert signed.repeated(over(NINE, 1), None, signers(NINE), terms) == NINE


def test_an_attempt_that_others_may_have_signed_binds_nobody_of_whole_batches():
    everybody = over(NINE, 0)
    memory = entered(everybody).uploading(everybody, NINE)
    after = memory.entered(over(NINE[3:], 1), (), signers(NINE), None, THREES)
    assert after.pending == memory.pending  # the sum over everybody may still be opened
    with pytest.raises(RefusedError, match="brings abandon notes of 0 silos, not 4"):
        after.entered(over(NINE, 0, round=4), (), signers(NINE), None, THREES)
    # its next state is behind the round
    assert after.signed(over(NINE[3:], 1), NINE[3:]).pending == ()
    with pytest.raises(RefusedError, match="brings abandon notes of 0 silos, not 4"):
        memory.entered(over(NINE[3:], 1), (), signers(NINE), None, Terms())
    # another round, of the same model: what was pending may still be opened
    other = over(NINE[3:], 0, round=4)
    with pytest.raises(RefusedError, match="brings abandon notes of 0 silos, not 4"):
        memory.entered(other, (), signers(NINE), None, THREES)


def test_a_round_with_rows_for_one_silo_is_summed_once():
    """Within a batch weights may lean on one silo, and the difference of two rows shows it."""
    row = group("theta.x", weights="public", reader="x")
    weights = {"theta.x": dict.fromkeys(NINE, 1.0)}
    fields = {"groups": (group("metrics", 3, ring=64), row), "rows": weights}
    everybody = over(NINE, 0, **fields)
    memory = entered(everybody).uploading(everybody, NINE).signed(everybody, NINE)
    with pytest.raises(RefusedError, match="after its survivors were signed"):
        memory.entered(over(NINE[3:], 1, **fields), (), signers(NINE), None, THREES)


@pytest.mark.parametrize(("number", "within", "alone", "left"), [
    (0, True, True, 1),  # its own values are in the sum, as ``start`` says
    (0, False, True, 0), (0, False, False, 0),
    (1, False, True, 0),  # no two sums of such a round are opened
    (1, False, False, 1),  # the other attempt may be open beside it
])  # fmt: skip
def test_what_a_delivered_sum_says_of_an_attempt(number, within, alone, left):
    everybody = over(NINE, 0)
    memory = entered(everybody).uploading(everybody, NINE)
    ctx = over(NINE, number).context().hex()
    survivors = NINE if within else tuple(silo for silo in NINE if silo != NINE[0])
    found = len(memory.settled(everybody.round, ctx, survivors, NINE[0], alone=alone).pending)
    assert found == left

"""A silo that was away while its round and later ones closed: what it is brought, and that it takes
part again.

Runs of the pure machines over whole batches, in which a silo dies after its masked words may have
left.
"""

from dataclasses import replace

import pytest
from support.secure_sums import Run, frame, names, ones, signers

from staddle.coordinator.blind.settled import SettledRound, brought, dumped, loaded, settled
from staddle.errors import RefusedError
from staddle.proto.convert.secagg_received import MOST_SHOWN
from staddle.security.secagg.spec import Terms, specify

LATER = frame(round=5, model_digest="ee" * 32)


def batched(silos):
    """Batches of three."""
    return Terms(batches=tuple(silos[at : at + 3] for at in range(0, len(silos), 3)))


def run(silos, terms, number=0, **rest):
    return Run(specify(frame(), silos, number), ones(silos), terms=terms, **rest).finish()


def opened_without(dead):
    """Twelve silos, of whom nine sign: the attempt goes on without the batch of the dead one."""
    silos = names(12)
    one = run(silos, batched(silos), drops={dead: "UploadWords"})
    assert one.state.u3 == silos[3:]
    return silos, (one.state,), one.memories[dead]


def opened_after(dead):
    """Of nine silos seven must sign: this attempt ends, another opens without the batch."""
    silos = names(9)
    first = run(silos, batched(silos), drops={dead: "UploadWords"})
    assert first.state.stage == "ended"
    memories = {silo: first.memories[silo] for silo in silos[3:]}
    second = run(silos[3:], batched(silos), 1, memories=memories)
    assert second.state.u3 == silos[3:]
    return silos, (first.state, second.state), first.memories[dead]


CASES = pytest.mark.parametrize("closed", [opened_without, opened_after])
DEAD = names(1)[0]


def enter(memory, silos, kept):
    """The dead silo enters a later round, from the state before the one in which it died."""
    notes, shown = brought(kept)
    spec = specify(LATER, silos, 0)
    memory = memory.shown(shown, DEAD, signers(silos))
    return memory.entered(spec, notes, signers(silos), None, batched(silos))


@CASES
def test_a_silo_that_was_away_enters_a_later_round(closed):
    silos, states, memory = closed(DEAD)
    assert [pending.round for pending in memory.pending] == [3]
    why = "may still show, and brings abandon notes of 0 silos"
    with pytest.raises(RefusedError, match=why) as caught:
        enter(memory, silos, [])
    # an honest coordinator may have none
    assert (caught.value.peer, caught.value.code) == ("", "ABANDON")
    kept = loaded(dumped(settled(states)))
    assert kept == replace(settled(states), notes=kept.notes)
    assert kept.silos == silos[:3]  # its batch's other silos do not know either
    after = enter(memory, silos, [kept])
    assert (after.round, after.pending) == (5, ())


@CASES
def test_what_is_of_another_round_brings_nobody_back(closed):
    silos, states, memory = closed(DEAD)
    kept = settled(states)
    for wrong in (replace(kept, notes=(), shown=()), SettledRound(kept.silos)):
        with pytest.raises(RefusedError):
            enter(memory, silos, [wrong])
    other = memory.model_copy(
        update={"pending": tuple(p.model_copy(update={"ctx": "00" * 32}) for p in memory.pending)}
    )
    with pytest.raises(RefusedError):
        enter(other, silos, [kept])


def test_survivors_count_only_as_t_of_them_signed_them_without_this_silo():
    """By an honest coordinator's proof, and by all that a dishonest one could make of it."""
    silos, states, memory = opened_without(DEAD)
    (shown,) = settled(states).shown
    known = signers(silos)
    assert memory.shown((shown,), DEAD, known).pending == ()
    (pending,) = memory.pending
    assert len(shown.survivals) == pending.threshold == 9
    first = shown.survivals[0]
    for wrong in (
        replace(shown, survivals=shown.survivals[1:]),
        replace(shown, survivals=(replace(first, signature=bytes(64)), *shown.survivals[1:])),
        replace(shown, survivals=(shown.survivals[1], *shown.survivals[1:])),
        replace(shown, headers=shown.headers[1:]),
        replace(shown, h_u1=bytes(32)),
        replace(shown, h_u2=bytes(32)),
        replace(shown, ctx=bytes(32)),
    ):
        assert memory.shown((wrong,), DEAD, known) is memory
    survivor = silos[5]  # whose values are in the sum
    assert memory.shown((shown,), survivor, known) is memory
    few = memory.model_copy(
        update={"pending": (pending.model_copy(update={"members": silos[4:]}),)}
    )
    assert few.shown((shown,), DEAD, known) is few  # one who signed is no member of U1


def test_nothing_is_kept_of_a_round_that_nobody_left():
    silos = names(9)
    assert settled([run(silos, batched(silos)).state]) is None


def test_it_is_kept_until_each_of_its_silos_was_in_a_later_round():
    kept = SettledRound(("a", "b"))
    assert kept.is_needed({}, 3)
    assert kept.is_needed({"a": 5, "b": 3}, 3)
    assert not kept.is_needed({"a": 5, "b": 4}, 3)


def test_the_newest_rounds_are_brought_as_far_as_a_message_holds_them():
    kept = settled(opened_without(DEAD)[1])
    (shown,) = kept.shown
    rounds = [
        replace(kept, shown=(replace(shown, ctx=bytes([number]) * 32),))
        for number in range(MOST_SHOWN + 5)
    ]
    _, found = brought(rounds)
    assert [each.ctx[0] for each in found] == list(range(5, MOST_SHOWN + 5))
    long = replace(shown, headers=shown.headers * 900)
    _, found = brought([replace(kept, shown=(each,)) for each in (shown, long, shown)])
    assert found == (shown,)

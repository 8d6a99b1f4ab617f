import copy
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.coordinator.rounds.events import (
    WAITING,
    Answered,
    Began,
    Damaged,
    Done,
    DrawCohort,
    Drawn,
    Drop,
    Fold,
    Folded,
    FoldFailed,
    Gather,
    Greeted,
    Halt,
    LogEvent,
    OperatorStopped,
    Overtaken,
    Resumed,
    RoundDeadline,
    SiloFailed,
    SiloLost,
    StartRoundTimer,
    SumFailed,
    Summed,
    Unkeyed,
    UploadStored,
    Withdrawn,
)
from staddle.coordinator.rounds.machine import (
    MOST_ATTEMPTS,
    MOST_REFUSED,
    MOST_RESTARTED,
    JobState,
    advance,
    resumed,
)
from staddle.coordinator.rounds.tasks import (
    FinishTask,
    OfferTask,
    RoundTask,
    awaited,
    concerned,
    stop_for,
    task_for,
)

SILOS = ("b", "a", "c")  # job order is not the alphabet's
ALL = (*SILOS, "stranger")
STAGES = ("queued", "admitting", "drawing", "round", "folding", "finishing", "ended", "stopped")
STEPS = {  # the table, read by hand
    ("queued", "admitting"),
    ("admitting", "drawing"),
    ("admitting", "queued"),  # enough accepted while another job runs
    ("admitting", "finishing"),
    ("admitting", "ended"),  # nobody accepted: there is nobody to tell
    ("drawing", "round"),
    ("drawing", "finishing"),
    ("round", "folding"),
    ("round", "finishing"),
    ("folding", "drawing"),
    ("folding", "finishing"),
    ("folding", "round"),  # the disk changed what a silo gave
    ("finishing", "ended"),
    *((stage, "stopped") for stage in ("queued", "admitting", "drawing", "round", "folding")),
    ("stopped", "queued"),
    ("queued", "drawing"),  # where it was stopped
    ("queued", "round"),
    ("queued", "folding"),  # all that the round waits for had been given
    ("queued", "finishing"),  # an operator withdraws it
    ("queued", "ended"),
    ("stopped", "finishing"),
    ("stopped", "ended"),
}


def run(state, *events):
    """The state after some events, and the effects of the last."""
    effects = ()
    for event in events:
        state, effects = advance(state, event)
    return state, effects


def job(silos=SILOS, rounds=2, min_cohort=2):
    return JobState("job", silos, rounds, min_cohort)


ADMITTED = (Began(), Answered("b", None), Answered("a", None), Answered("c", None))
OPEN = (*ADMITTED, Drawn(0, SILOS))
GAVE = (*OPEN, UploadStored("c", 0, "dc"), UploadStored("b", 0, "db"), UploadStored("a", 0, "da"))
SECOND = (*GAVE, Folded(0), Drawn(1, ("b", "c")))
FINISHING = (*SECOND, UploadStored("b", 1, "db"), UploadStored("c", 1, "dc"), Folded(1))
ENDED = (*FINISHING, Done("a"), Done("b"), Done("c"))
REACHED = {
    "queued": (), "admitting": (Began(), Answered("b", None)), "drawing": ADMITTED,
    "round": (*OPEN, UploadStored("b", 0, "db")), "folding": GAVE, "finishing": FINISHING,
    "ended": ENDED, "stopped": (*OPEN, UploadStored("b", 0, "db"), OperatorStopped()),
}  # fmt: skip


def without_reports(effects):
    return tuple(e for e in effects if not isinstance(e, LogEvent))


def reports(effects):
    return [(e.event, dict(e.fields)) for e in effects if isinstance(e, LogEvent)]


def uploads(number, silos):
    return tuple(UploadStored(silo, number, "x") for silo in silos)


def tasks(state, silos=SILOS):
    return [task_for(state, silo) for silo in silos]


def ending(state):
    return state.stage, state.outcome, state.reason


# The happy path.
def test_a_job_runs_through_all_its_rounds():
    state, effects = run(job(), Began())
    timer = StartRoundTimer("admitting", 0)
    assert (state.stage, without_reports(effects)) == ("admitting", (timer,))
    assert reports(effects) == [("job.offered", {"silos": SILOS, "rounds": 2})]
    assert tasks(state, ALL) == [OfferTask()] * 3 + [None]

    state, effects = run(state, Answered("c", None), Answered("a", None), Answered("b", None))
    assert (state.stage, without_reports(effects)) == ("drawing", (DrawCohort(0),))
    assert state.admitted == SILOS
    assert tasks(state, ALL) == [None] * 4

    for number in (0, 1):
        task = RoundTask(number, SILOS, number)
        state, effects = run(state, Drawn(number, SILOS))
        timer = StartRoundTimer("round", number)
        assert (state.stage, without_reports(effects)) == ("round", (timer,))
        assert reports(effects) == [("round.opened", {"round": number, "cohort": SILOS})]
        assert tasks(state, ALL) == [task] * 3 + [None]
        state, effects = run(state, UploadStored("c", number, "x"), UploadStored("b", number, "y"))
        assert (state.stage, without_reports(effects)) == ("round", ())
        assert state.open == ("a",)
        assert tasks(state) == [None, task, None]
        state, effects = run(state, UploadStored("a", number, "z"))
        assert (state.stage, without_reports(effects)) == ("folding", (Fold(number, SILOS),))
        assert state.given == {"b": "y", "a": "z", "c": "x"}
        assert tasks(state, ALL) == [None] * 4
        state, effects = run(state, Folded(number))
        assert reports(effects)[0] == ("round.closed", {"round": number, "members": SILOS})

    assert (*ending(state), state.round) == ("finishing", "completed", "", 2)
    assert without_reports(effects) == (StartRoundTimer("finishing", 2),)
    assert tasks(state, ALL) == [FinishTask(2, completed=True, counted=2)] * 3 + [None]
    state, effects = run(state, Done("a"), Done("b"))
    assert (state.stage, effects) == ("finishing", ())
    state, effects = run(state, Done("c"))
    assert (state.stage, state.done) == ("ended", frozenset(SILOS))
    assert reports(effects) == [("job.ended", {"outcome": "completed", "reason": ""})]
    assert tasks(state, ALL) == [None] * 4


def test_uploads_of_the_last_round_do_not_count_in_the_next_nor_in_the_end():
    state, _ = run(job(), *SECOND)
    assert (state.given, state.failed, state.cohort) == ({}, {}, ("b", "c"))
    task = RoundTask(1, ("b", "c"), 1)
    assert tasks(state) == [task, None, task]
    state, _ = run(job(), *FINISHING)
    assert (state.cohort, state.given, state.failed, state.open) == ((), {}, {}, ())


def test_only_rounds_that_were_folded_count_for_those_who_gave():
    state, _ = run(job(rounds=4), *OPEN, *uploads(0, "bc"), RoundDeadline("round", 0))
    assert state.counted == {}  # the fold may fail yet
    state, _ = run(state, Folded(0), Drawn(1, ("a", "b")))
    assert tasks(state, "ab") == [RoundTask(1, ("a", "b"), counted) for counted in (0, 1)]
    state, _ = run(state, *uploads(1, "ab"), Folded(1), Drawn(2, SILOS))
    assert [task.counted for task in tasks(state, "abc")] == [2, 2, 1]
    state, _ = run(state, *uploads(2, "abc"), FoldFailed(2, "disk"))
    assert [task.counted for task in tasks(state, "abc")] == [2, 2, 1]


# Admission.
@pytest.mark.parametrize("order", list(itertools.permutations(SILOS)))
def test_the_order_of_answers_changes_nothing(order):
    state, _ = run(job(), Began(), *(Answered(s, None) for s in order))
    assert state.admitted == SILOS


def test_a_refusal_is_kept_with_its_code_and_is_no_admission():
    state, effects = run(job(), Began(), Answered("a", "POLICY"))
    assert state.answers == {"a": "POLICY"}
    assert reports(effects) == [("job.declined", {"silo": "a", "code": "POLICY"})]
    state, effects = run(state, Answered("b", None), Answered("c", None))
    assert (state.stage, state.admitted) == ("drawing", ("b", "c"))


def test_too_few_acceptances_pend_until_the_deadline_which_says_who_refused():
    answers = (Answered("a", "DATA"), Answered("b", None))
    state, effects = run(job(), Began(), *answers, Answered("c", "POLICY"))
    assert ending(state) == ("admitting", "running", "")
    assert tasks(state) == [None, None, None]
    state, effects = run(state, RoundDeadline("admitting", 0))
    why = "1 silos accepted, min_cohort is 2 (a: DATA, c: POLICY)"
    assert ending(state) == ("finishing", "failed", why)
    assert without_reports(effects) == (StartRoundTimer("finishing", 0),)
    assert tasks(state) == [FinishTask(0, completed=False, counted=0, reason=why), None, None]
    assert run(state, Done("b"))[0].stage == "ended"
    assert run(state, Done("a")) == (state, ())


PENDING = (Began(), Answered("a", "POLICY"), Answered("b", None), Answered("c", "DATA"))


@pytest.mark.parametrize("order", list(itertools.permutations("ac")))
def test_a_silo_that_declined_is_asked_once_per_greeting_and_may_accept(order):
    state, _ = run(job(min_cohort=3), *PENDING)
    for silo in order:
        state, effects = run(state, Greeted(silo))
        assert effects == ()
        assert [s for s in SILOS if task_for(state, s)] == [silo]
        assert run(state, Greeted(silo)) == (state, ())
        # It says the same: nothing is asked, or logged, again.
        same, effects = run(state, Answered(silo, state.answers[silo]))
        assert (effects, task_for(same, silo), same.stage) == ((), None, "admitting")
        state, _ = run(same, Greeted(silo), Answered(silo, None))
    assert (state.stage, state.admitted, state.asked) == ("drawing", SILOS, frozenset())


def test_a_greeting_asks_nobody_who_accepted_or_has_not_answered_or_of_another_job():
    state, _ = run(job(), Began(), Answered("b", None))
    for silo in (*SILOS, "stranger"):
        assert run(state, Greeted(silo)) == (state, ())


def test_a_silo_that_declined_may_join_a_job_that_runs():
    state, _ = run(job(rounds=3), *PENDING[:3], Answered("c", None), Drawn(0, ("b", "c")))
    assert task_for(state, "a") is None
    state, _ = run(state, Greeted("a"), Answered("a", None))
    assert (state.stage, state.cohort, state.admitted) == ("round", ("b", "c"), SILOS)


def test_a_silo_that_waits_for_a_person_is_waited_for():
    state, _ = run(job(), Began(), Answered("a", WAITING), Answered("b", None), Answered("c", None))
    assert (state.stage, task_for(state, "a")) == ("admitting", None)
    begun, _ = run(state, Greeted("a"), Answered("a", None))
    assert (begun.stage, begun.admitted) == ("drawing", SILOS)
    declined, _ = run(state, Greeted("a"), Answered("a", "NOT_APPROVED"))
    assert (declined.stage, declined.admitted) == ("drawing", ("b", "c"))
    late, _ = run(state, RoundDeadline("admitting", 0))
    assert (late.stage, late.admitted) == ("drawing", ("b", "c"))


def test_a_keyed_job_pends_while_one_silo_declines():
    events = (*ADMITTED[:2], Answered("a", "POLICY"), Answered("c", None))
    state, _ = run(keyed(), *events)
    assert state.stage == "admitting"
    state, _ = run(state, Greeted("a"), Answered("a", None))
    assert (state.stage, state.admitted) == ("drawing", SILOS)


def test_what_cannot_begin_says_so_though_some_have_not_answered():
    declined = (Began(), Answered("b", "NOT_APPROVED"))
    state, _ = run(keyed(), *declined)
    assert state.blocked.startswith("cannot begin yet: 3 of 3 silos must accept; have those")
    assert run(keyed(), Began(), Answered("b", WAITING))[0].blocked == ""
    plain, _ = run(job(min_cohort=2), *declined)
    assert plain.blocked == ""
    assert "2 of 3" in run(plain, Answered("a", "POLICY"))[0].blocked
    assert run(plain, Answered("a", None), Answered("c", None))[0].blocked == ""


def test_a_job_whose_batches_are_not_whole_pends():
    """Three of four accept, which is ``min_cohort``, but the four are summed together or not."""
    four = ("a", "b", "c", "d")
    batched = replace(job(four, min_cohort=3), blind=True, batches=(four,), fewest=4, least=4)
    state, _ = run(batched, Began(), *(Answered(silo, None) for silo in "abc"))
    state, _ = run(state, Answered("d", "POLICY"))
    assert (state.stage, state.lacking) == ("admitting", True)
    state, _ = run(state, Greeted("d"), Answered("d", None))
    assert (state.stage, state.lacking) == ("drawing", False)


def test_a_job_that_pends_is_offered_again_once_it_is_resumed():
    state, _ = run(job(min_cohort=3), *PENDING, OperatorStopped())
    assert [*tasks(state)] == [None] * 3
    state, _ = run(state, Resumed(), Began())
    assert tasks(state) == [None, OfferTask(), OfferTask()]


def test_a_job_that_was_overtaken_begins_in_its_turn_once_enough_silos_accept():
    state, effects = run(job(min_cohort=3), *PENDING, Overtaken())
    assert reports(effects) == [("job.pends", {"silos": ("a", "c")})]
    assert (state.stage, state.pends(), state.runs) == ("admitting", True, False)
    assert run(state, Overtaken()) == (state, ())
    # Its silos are still asked, and what they say counts.
    state, _ = run(state, Greeted("a"), Answered("a", None), Greeted("c"))
    assert [*tasks(state)] == [None, None, OfferTask()]
    state, effects = run(state, Answered("c", None))
    assert (state.stage, without_reports(effects)) == ("queued", ())
    state, effects = run(state, Began())
    assert (state.stage, state.aside, effects) == ("drawing", False, (DrawCohort(0),))


@pytest.mark.parametrize(
    "events",
    [
        (),
        (Began(),),
        (Began(), Answered("a", "POLICY"), Answered("b", None)),  # c has not answered
        (*PENDING, Greeted("a")),  # nor has a, to the offer of now
        ADMITTED,
    ],
)
def test_only_a_job_that_pends_is_overtaken(events):
    state, _ = run(job(min_cohort=3), *events)
    assert (state.pends(), run(state, Overtaken())) == (False, (state, ()))


def test_silos_that_are_away_hold_up_no_other_job():
    offered, _ = run(job(min_cohort=2), Began(), Answered("b", None))
    assert run(offered, Overtaken(("c",))) == (offered, ())
    state, effects = run(offered, Overtaken(("a", "c")))
    assert reports(effects) == [("job.pends", {"silos": ("a", "c")})]
    assert (state.stage, state.runs) == ("admitting", False)
    # It is still offered, waits for both, and is the next then.
    assert [*tasks(state)] == [None, OfferTask(), OfferTask()]
    state, _ = run(state, Answered("a", None))
    assert state.stage == "admitting"
    assert run(state, RoundDeadline("admitting", 0))[0].stage == "queued"
    state, _ = run(state, Answered("c", None))
    assert (state.stage, run(state, Began())[0].stage) == ("queued", "drawing")


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_whenever_a_job_is_overtaken_all_of_its_silos_that_answer_are_in_it(order):
    """And it has its turn at once, or once the other job has ended."""
    events = [*(Answered(silo, None) for silo in "abc"), Overtaken(("a", "b", "c"))]
    state, _ = run(job(min_cohort=3), Began(), *(events[place] for place in order))
    # With the last answer it is admitted: then it is too late to overtake it.
    late = order[-1] == 3
    assert (state.stage, state.admitted) == ("drawing" if late else "queued", SILOS)
    assert (state if late else run(state, Began())[0]).stage == "drawing"


def test_at_its_deadline_a_job_that_was_overtaken_waits_for_its_turn_or_fails():
    waits = (*PENDING[:3], Answered("c", WAITING), Overtaken(), RoundDeadline("admitting", 0))
    state, effects = run(job(min_cohort=1), *waits)
    assert (state.stage, state.aside, effects) == ("queued", True, ())
    assert run(state, Began())[0].stage == "drawing"
    assert run(state, Withdrawn())[0].outcome == "failed"
    failed, _ = run(job(min_cohort=2), *waits)
    assert (failed.stage, failed.outcome) == ("finishing", "failed")
    # A person stopped it in between: its silos are asked once more.
    again, _ = run(state, OperatorStopped(), Resumed(), Began())
    assert (again.stage, again.aside, again.asked) == ("admitting", False, {"a", "c"})


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_is_open_to_whoever_has_not_accepted_it_until_it_stops_or_ends(stage):
    state, _ = run(job(), *REACHED[stage])
    is_open = {silo for silo in (*state.silos, "stranger") if state.is_open_to(silo)}
    goes_on = stage not in ("stopped", "finishing", "ended")
    assert is_open == (set(state.silos) - set(state.admitted) if goes_on else set())


def test_whoever_greets_while_a_job_waits_for_its_turn_is_asked_once_it_has_it():
    """A person approved it there meanwhile."""
    waits = (*PENDING[:3], Answered("c", WAITING), Overtaken(), RoundDeadline("admitting", 0))
    for between in ((), (OperatorStopped(),)):
        state, _ = run(job(min_cohort=1), *waits, *between, Greeted("c"))
        assert state.asked == {"c"}
    state, _ = run(job(min_cohort=1), *waits, Greeted("c"), Began())
    assert [*tasks(state)] == [None, None, OfferTask()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_is_withdrawn_only_before_its_first_round(stage):
    state, _ = run(job(), *REACHED[stage])
    gone, effects = run(state, Withdrawn())
    if stage in ("queued", "admitting"):
        assert (gone.outcome, gone.reason) == ("failed", "withdrawn by an operator")
        assert gone.stage == ("finishing" if state.admitted else "ended")
    else:
        assert (gone, effects) == (state, ())


def test_a_job_that_was_stopped_before_its_first_round_may_be_withdrawn():
    state, _ = run(job(), Began(), Answered("b", None), OperatorStopped(), Withdrawn())
    assert ending(state) == ("finishing", "failed", "withdrawn by an operator")
    state, _ = run(job(), Began(), OperatorStopped(), Withdrawn())
    assert state.stage == "ended"


def test_who_said_nothing_is_named_at_the_deadline_and_nobody_to_tell_ends_the_job():
    state, _ = run(job(), Began(), Answered("b", None), RoundDeadline("admitting", 0))
    assert "a: no answer, c: no answer" in state.reason
    state, effects = run(job(), Began(), RoundDeadline("admitting", 0))
    assert (state.stage, state.outcome) == ("ended", "failed")
    assert without_reports(effects) == ()
    assert [event for event, _ in reports(effects)] == ["job.finishing", "job.ended"]


def test_enough_acceptances_at_the_deadline_go_on():
    state, effects = run(job(), *ADMITTED[:3], RoundDeadline("admitting", 0))
    assert (state.stage, state.admitted, effects) == ("drawing", ("b", "a"), (DrawCohort(0),))
    assert task_for(state, "c") == OfferTask()  # it may still come


def test_a_silo_that_answers_late_is_drawn_from_then_on():
    late = RoundDeadline("admitting", 0)
    state, _ = run(job(rounds=3), *ADMITTED[:3], late, Drawn(0, ("b", "a")))
    state, effects = run(state, Answered("c", None))
    assert (state.stage, state.admitted, state.cohort) == ("round", SILOS, ("b", "a"))
    assert effects[0].event == "job.accepted"
    assert task_for(state, "c") is None
    state, _ = run(state, *uploads(0, "ab"), Folded(0), Drawn(1, SILOS))
    assert task_for(state, "c") == RoundTask(1, SILOS, 0)
    assert run(state, Answered("c", "DATA")) == (state, ())


DEADLINE = RoundDeadline("admitting", 0)


# A keyed job.
def keyed():
    return replace(job(rounds=3), keyed=True)


def test_a_keyed_job_begins_with_all_of_its_silos_and_later_ones_are_too_late():
    state, effects = run(keyed(), *ADMITTED)
    assert (state.stage, state.admitted, effects[-1]) == ("drawing", SILOS, DrawCohort(0))
    state, _ = run(keyed(), *ADMITTED[:3], RoundDeadline("admitting", 0))
    assert task_for(state, "c") is None


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (
            (*ADMITTED[:2], Answered("a", "POLICY"), Answered("c", None), DEADLINE),
            "2 of 3 silos accepted, and the key that its silos share takes all of them (a: POLICY)",
        ),
        ((*ADMITTED[:3], RoundDeadline("admitting", 0)),
            ("2 of 3 silos accepted, and the key that its silos share takes all of them (c: no"
            " answer)")),
        ((*ADMITTED[:2], RoundDeadline("admitting", 0)),
            "1 silos accepted, min_cohort is 2 (a: no answer, c: no answer)"),
    ],
    ids=["one declined", "one said nothing", "too few for any job"],
)  # fmt: skip
def test_a_keyed_job_names_who_declined_or_said_nothing(events, reason):
    state, _ = run(keyed(), *events)
    assert ending(state) == ("finishing", "failed", reason)


@pytest.mark.parametrize("stage", STAGES)
def test_a_keyed_job_fails_when_its_key_fits_no_more(stage):
    before, _ = run(job(), *REACHED[stage])
    keyed = replace(before, keyed=True)
    state, effects = run(keyed, Unkeyed("the roster has changed"))
    if stage in ("finishing", "ended"):
        assert (state, effects) == (keyed, ())
        return
    assert (state.outcome, state.reason, state.cohort) == ("failed", "the roster has changed", ())
    assert state.stage == ("finishing" if state.admitted else "ended")
    assert state.expired
    assert not before.expired
    # a job without a key has nothing to lose
    assert run(before, Unkeyed("the roster has changed")) == (before, ())


# Stopping and resuming.
def test_a_stopped_round_goes_on_with_what_was_given():
    state, effects = run(
        job(), *OPEN, UploadStored("b", 0, "x"), SiloFailed("c", 0, "lost"), OperatorStopped()
    )
    stopped = LogEvent("job.stopped", {"round": 0, "why": "stopped by an operator"})
    assert (state.stage, state.reason, effects) == ("stopped", stopped.fields["why"], (stopped,))
    assert tasks(state, ALL) == [None] * 4
    late = (UploadStored("a", 0, "z"), RoundDeadline("round", 0), SiloLost("a"), Folded(0))
    for event in (*late, Began(), OperatorStopped()):
        assert run(state, event) == (state, ())
    state, _ = run(state, Resumed())
    assert (state.stage, state.given) == ("queued", {"b": "x"})
    state, effects = run(state, Began())
    assert (state.stage, without_reports(effects)) == ("round", (StartRoundTimer("round", 0),))
    assert tasks(state) == [None, *[RoundTask(0, SILOS, 0)] * 2]  # c may try again
    state, effects = run(state, UploadStored("a", 0, "y"), UploadStored("c", 0, "z"))
    assert without_reports(effects) == (Fold(0, SILOS),)


def test_a_fold_is_finished_before_the_job_stops():
    state, effects = run(job(rounds=3), *GAVE, OperatorStopped())
    assert (state.stage, state.stopping, effects) == ("folding", True, ())
    state, effects = run(state, Folded(0))
    assert (state.stage, state.round, without_reports(effects)) == ("stopped", 1, ())
    assert [event for event, _ in reports(effects)] == ["round.closed", "job.stopped"]
    state, effects = run(state, Resumed(), Began())
    assert (state.stage, without_reports(effects)) == ("drawing", (DrawCohort(1),))
    # after the last fold there is nothing left to stop
    assert run(job(rounds=1), *GAVE, OperatorStopped(), Folded(0))[0].stage == "finishing"
    assert run(job(), *GAVE, OperatorStopped(), Resumed(), Folded(0))[0].stage == "drawing"


def test_silos_that_take_part_hear_who_stopped_the_job_until_it_is_resumed():
    stop, why = OperatorStopped("operator 'olga'"), "stopped by operator 'olga'"
    state, _ = run(job(), Began(), Answered("a", None), stop)
    assert [stop_for(state, silo) for silo in SILOS] == ["", why, ""]
    assert [stop_for(run(state, Resumed())[0], silo) for silo in SILOS] == [""] * 3
    # A stop that waits for a fold is one after it; if it is withdrawn, nothing is left of it.
    folding, _ = run(job(rounds=3), *GAVE, stop)
    assert stop_for(folding, "a") == ""
    assert [stop_for(run(folding, Folded(0))[0], silo) for silo in SILOS] == [why] * 3
    assert run(folding, Resumed(), Folded(0))[0].reason == ""
    # An end has a reason of its own, which nobody takes back.
    ended, _ = run(state, Withdrawn())
    assert stop_for(ended, "a") == ""
    assert run(ended, Resumed())[0].reason == "withdrawn by an operator"


def test_a_job_that_is_stopped_while_silos_answer_asks_the_others_when_it_is_resumed():
    state, _ = run(job(), Began(), Answered("a", None), OperatorStopped(), Resumed(), Began())
    assert (state.stage, tasks(state)) == ("admitting", [OfferTask(), None, OfferTask()])
    assert run(state, Answered("b", None), Answered("c", None))[0].stage == "drawing"


# A quorum.
@pytest.mark.parametrize(
    ("quorum", "contributions"), [(1.0, 3), (0.9, 3), (0.67, 3), (0.5, 2), (0.01, 2)]
)
def test_a_quorum_closes_the_round_and_never_below_min_cohort(quorum, contributions):
    state, _ = run(JobState("job", SILOS, 2, 2, quorum), *OPEN)
    for number, silo in enumerate("acb", 1):
        assert state.stage == "round"
        state, effects = run(state, UploadStored(silo, 0, "x"))
        if number == contributions:
            break
    given = tuple(s for s in SILOS if s in "acb"[:contributions])
    assert (state.stage, without_reports(effects)) == ("folding", (Fold(0, given),))


# Rounds.
@pytest.mark.parametrize("cohort", [(), ("b",)])
def test_too_small_a_cohort_ends_the_job(cohort):
    state, effects = run(job(), *ADMITTED, Drawn(0, cohort))
    assert (state.stage, state.outcome) == ("finishing", "failed")
    assert f"only {len(cohort)} of the drawn silos are admitted" in state.reason
    assert without_reports(effects) == (StartRoundTimer("finishing", 0),)


@pytest.mark.parametrize("order", list(itertools.permutations(SILOS)))
def test_members_are_folded_in_job_order_whoever_gave_first(order):
    _, effects = run(job(), *OPEN, *(UploadStored(s, 0, s) for s in order))
    assert without_reports(effects) == (Fold(0, SILOS),)


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))))
def test_a_failed_silo_is_left_out_of_the_fold(order):
    events = (UploadStored("b", 0, "x"), SiloFailed("a", 0, "TRAINING"), UploadStored("c", 0, "y"))
    state, effects = run(job(), *OPEN, *(events[i] for i in order))
    assert without_reports(effects) == (Fold(0, ("b", "c")),)
    assert state.failed == {"a": "TRAINING"}


def test_a_lost_silo_fails_its_round_and_no_other():
    state, effects = run(job(), *OPEN, SiloLost("a"))
    assert state.failed == {"a": "lost"}
    assert reports(effects) == [("silo.dropped", {"silo": "a", "round": 0, "code": "lost"})]
    assert run(state, SiloLost("a")) == (state, ())
    state, effects = run(state, *uploads(0, "bc"))
    assert without_reports(effects) == (Fold(0, ("b", "c")),)
    assert run(state, Folded(0), Drawn(1, SILOS))[0].open == SILOS


def test_lost_silos_miss_one_round():
    """A round opens without silos known to be lost; the next round asks them again."""
    state, effects = run(job(), *ADMITTED, Drawn(0, SILOS, ("a", "stranger")))
    assert (state.cohort, state.failed, state.open) == (SILOS, {"a": "lost"}, ("b", "c"))
    told = [
        ("round.opened", {"round": 0, "cohort": SILOS}),
        ("silo.dropped", {"silo": "a", "round": 0, "code": "lost"}),
    ]
    assert (reports(effects), without_reports(effects)) == (told, (StartRoundTimer("round", 0),))
    state, effects = run(state, *uploads(0, "bc"))
    assert without_reports(effects) == (Fold(0, ("b", "c")),)
    assert run(state, Folded(0), Drawn(1, SILOS))[0].open == SILOS


def test_a_round_for_which_too_few_are_known_to_be_there_asks_all():
    state, effects = run(job(), *ADMITTED, Drawn(0, SILOS, ("a", "b")))
    assert (state.stage, state.failed, state.open) == ("round", {}, SILOS)
    assert reports(effects) == [("round.opened", {"round": 0, "cohort": SILOS})]


def test_too_few_uploads_end_the_job_and_say_why():
    failures = (SiloFailed("a", 0, "TRAINING"), SiloFailed("c", 0, "lost"))
    state, effects = run(job(), *OPEN, UploadStored("b", 0, "x"), *failures)
    why = "round 0: 1 silos uploaded, min_cohort is 2 (a: TRAINING, c: lost)"
    assert ending(state) == ("finishing", "failed", why)
    assert not any(isinstance(e, Fold) for e in effects)
    assert tasks(state) == [FinishTask(0, completed=False, counted=0, reason=why)] * 3


def test_the_deadline_of_a_round_drops_who_is_late():
    state, effects = run(job(), *OPEN, *uploads(0, "cb"), RoundDeadline("round", 0))
    assert (state.stage, state.failed) == ("folding", {"a": "deadline"})
    assert without_reports(effects) == (Fold(0, ("b", "c")),)
    assert reports(effects) == [("silo.dropped", {"silo": "a", "round": 0, "code": "deadline"})]
    assert run(state, UploadStored("a", 0, "z")) == (state, ())


FOLDING_SECOND = (*SECOND, *uploads(1, "bc"))


@pytest.mark.parametrize(
    ("before", "stale"),
    [
        # The first answer holds.
        ((Began(), Answered("a", "POLICY")), [Answered("a", None)]),
        ((Began(), Answered("a", None)), [Answered("a", "POLICY")]),
        # A job that is over is not stopped.
        (REACHED["finishing"], [OperatorStopped(), Resumed()]),
        (REACHED["ended"], [OperatorStopped(), Resumed()]),
        # Who failed may not upload, and who uploaded can neither fail nor be lost.
        ((*OPEN, SiloFailed("a", 0, "lost")), uploads(0, "a")),
        ((*OPEN, UploadStored("a", 0, "x")),
            [SiloFailed("a", 0, "lost"), UploadStored("a", 0, "other"), SiloLost("a")]),
        ((*OPEN, UploadStored("a", 0, "x")), [SiloLost("stranger")]),
        # Only this round's deadline counts, and only its cohort may upload.
        (SECOND, [RoundDeadline("round", 0), RoundDeadline("round", 2)]),
        (SECOND, [RoundDeadline("admitting", 1), RoundDeadline("finishing", 1)]),
        (SECOND, [*uploads(1, ("a", "stranger")), *uploads(0, "b"), *uploads(2, "b")]),
        (SECOND, [Drawn(1, SILOS), Drawn(2, SILOS)]),
        # What nobody uploaded is not asked for again.
        (GAVE, [Damaged(1, ("a",), "x"), Damaged(0, ("stranger",), "x")]),
        # A fold counts once, and only for its round.
        ((*GAVE, Folded(0)), [Folded(0), Folded(1), FoldFailed(0, "x")]),
        (FOLDING_SECOND, [Folded(0), Folded(2), FoldFailed(0, "x")]),
        (FOLDING_SECOND, [Drawn(1, SILOS), RoundDeadline("round", 1)]),
        # At the end a round's late failure is no loss, and a stranger cannot be lost.
        (FINISHING, [SiloFailed("a", number, "TRAINING") for number in (0, 1, 2)]),
        (FINISHING, [SiloLost("stranger")]),
    ],
)  # fmt: skip
def test_what_comes_too_late_or_twice_or_from_a_stranger_changes_nothing(before, stale):
    state, _ = run(job(), *before)
    for event in stale:
        assert run(state, event) == (state, ())


def test_a_failed_fold_ends_the_job():
    state, effects = run(job(), *GAVE, FoldFailed(0, "disk"))
    assert (state.stage, state.outcome, state.reason) == ("finishing", "failed", "disk")
    assert without_reports(effects) == (StartRoundTimer("finishing", 0),)


def test_who_gave_what_the_disk_changed_gives_again_and_the_others_do_not():
    state, effects = run(job(), *GAVE, Damaged(0, ("a",), "changed 0.a.upload"))
    assert (state.stage, state.given) == ("round", {"b": "db", "c": "dc"})
    assert without_reports(effects) == (StartRoundTimer("round", 0),)
    assert reports(effects) == [
        ("upload.damaged", {"round": 0, "silos": ("a",), "why": "changed 0.a.upload"})
    ]
    assert tasks(state) == [None, RoundTask(0, SILOS, 0), None]
    assert resumed(state) == (StartRoundTimer("round", 0),)
    again, effects = run(state, UploadStored("a", 0, "da"))
    assert (again.stage, without_reports(effects)) == ("folding", (Fold(0, SILOS),))
    # a silo that is gone meanwhile drops out, as any
    assert run(state, SiloLost("a"))[1][-1] == Fold(0, ("b", "c"))
    assert run(again, Folded(0))[0].again == frozenset()


def test_what_the_disk_changes_twice_ends_the_job_with_the_name_of_the_file():
    once = (Damaged(0, ("a",), "x"), UploadStored("a", 0, "da"))
    state, _ = run(job(), *GAVE, *once, Damaged(0, ("b",), "y"))
    assert (state.stage, state.open) == ("round", ("b",))  # another one's is its first
    twice = Damaged(0, ("a", "b"), "changed 0.a.upload")
    state, effects = run(state, UploadStored("b", 0, "db"), twice)
    assert (state.stage, state.outcome) == ("finishing", "failed")
    assert state.reason.startswith("changed 0.a.upload a second time; have the job signed again")
    assert without_reports(effects) == (StartRoundTimer("finishing", 0),)


def test_a_job_that_is_to_stop_does_so_before_a_silo_gives_again():
    state, effects = run(job(), *GAVE, OperatorStopped(), Damaged(0, ("a",), "x"))
    assert (state.stage, state.stopping, state.open) == ("stopped", False, ("a",))
    assert without_reports(effects) == ()
    state, effects = run(state, Resumed(), Began())
    assert (state.stage, without_reports(effects)) == ("round", (StartRoundTimer("round", 0),))


# The end.
def test_a_late_confirmation_is_noted_after_the_end():
    state, _ = run(job(), *FINISHING, Done("a"), RoundDeadline("finishing", 2))
    assert (state.stage, state.done) == ("ended", {"a"})
    assert task_for(state, "b") == FinishTask(2, completed=True, counted=2)
    state, effects = run(state, Done("b"), Done("c"))
    assert (state.stage, effects, state.done) == ("ended", (), set(SILOS))
    assert task_for(state, "b") is None


def test_a_silo_that_declined_is_not_waited_for():
    answers = (Answered("a", "DATA"), Answered("b", None), Answered("c", None))
    given = (Drawn(0, ("b", "c")), *uploads(0, "bc"), Folded(0))
    state, _ = run(job(rounds=1), Began(), *answers, *given, Done("b"))
    assert task_for(state, "a") is None
    assert run(state, Done("c"))[0].stage == "ended"


def test_a_silo_lost_at_the_end_is_not_waited_for_and_still_told_when_it_comes_back():
    state, effects = run(job(), *FINISHING, SiloLost("a"), Done("b"))
    assert (state.stage, state.done, awaited(state)) == ("finishing", {"b"}, ("c",))
    state, effects = run(state, Done("c"))
    assert (state.stage, [event for event, _ in reports(effects)]) == ("ended", ["job.ended"])
    assert task_for(state, "a") == FinishTask(2, completed=True, counted=1)
    state, effects = run(state, Done("a"))
    assert (state.stage, effects, task_for(state, "a")) == ("ended", (), None)


def test_a_silo_lost_after_its_confirmation_changes_nothing_and_the_last_may_be_lost():
    state, _ = run(job(), *FINISHING, Done("a"), SiloLost("a"))
    assert (state.stage, state.done, awaited(state)) == ("finishing", {"a"}, ("b", "c"))
    state, effects = run(job(), *FINISHING, Done("a"), Done("b"), SiloLost("c"))
    assert (state.stage, [event for event, _ in reports(effects)]) == ("ended", ["job.ended"])
    assert task_for(state, "c") == FinishTask(2, completed=True, counted=2)


# Attempts at the sum of a blind round.
def blind_round():
    """A blind job whose first round is open."""
    return run(replace(job(), blind=True), *OPEN)


def attempts(state, codes):
    """Count the attempts where in each one silo drops out with one of the codes, in turn."""
    number = waited_for = 0
    while True:
        assert (state.stage, state.attempt, state.failed) == ("round", number, {})
        code = codes[number % len(codes)]
        waited_for += code != "STOPPED"
        state, effects = run(
            state, SiloFailed("a", 0, code), SumFailed(0, number, "TOO_FEW: one is missing")
        )
        number += 1
        if state.stage == "finishing":
            return number, state
        waiting = waited_for if code != "STOPPED" else 0
        assert without_reports(effects) == (Gather(0, SILOS, number, waiting),)


@pytest.mark.parametrize(
    ("codes", "most"),
    [
        (("lost", "deadline"), MOST_ATTEMPTS),
        # who began anew is there, and not waited for
        (("lost", "STOPPED", "deadline"), 3 * MOST_ATTEMPTS // 2),
        (("STOPPED",), MOST_RESTARTED),
        (("POLICY",), MOST_REFUSED),
        (("lost", "TRAINING"), 2 * MOST_REFUSED),
    ],
)
def test_silos_that_are_away_are_waited_for_longer_than_silos_that_refuse(codes, most):
    state, effects = blind_round()
    assert without_reports(effects) == (Gather(0, SILOS, 0, 0),)
    number, state = attempts(state, codes)
    assert number == most
    assert ending(state) == ("finishing", "failed", "round 0: TOO_FEW: one is missing")
    assert (state.attempt, state.fruitless, state.refused) == (0, 0, 0)


def test_a_sum_that_fails_with_nobody_away_is_not_tried_for_long():
    state, _ = blind_round()
    for number in range(MOST_REFUSED):
        assert state.stage == "round"
        state, _ = run(state, SumFailed(0, number, "SUM: canaries do not come out"))
    assert (state.stage, state.outcome) == ("finishing", "failed")


SIX = ("a", "b", "c", "d", "e", "f")
EIGHT = (*SIX, "g", "h")
BATCHES = (("a", "b"), ("c", "d"), ("e", "f"))


def in_batches(*batches, drawn=None, lost=(), **fields):
    """A blind job in its first round; a sum takes four silos unless the fields differ."""
    silos = tuple(sorted(silo for batch in batches for silo in batch))
    fields = {"rounds": 2, "min_cohort": 2, "fewest": 4, **fields}
    state = JobState("job", silos, blind=True, batches=batches, **fields)
    answers = (Answered(silo, None) for silo in silos)
    return run(state, Began(), *answers, Drawn(0, drawn or silos, lost))


def batched(*drawn, lost=()):
    """A blind job of three batches, two of which are enough, in its first round."""
    return in_batches(*BATCHES, drawn=drawn, lost=lost)


def gathered(effects):
    return [effect.cohort for effect in effects if isinstance(effect, Gather)]


def dropping(silo, attempt, code="lost"):
    """An attempt at the first round's sum that fails since this silo drops out."""
    why = "TOO_FEW" if code in ("lost", "deadline", "POLICY") else f"{code}: ..."
    return SiloFailed(silo, 0, code), SumFailed(0, attempt, why)


def test_a_round_has_whole_batches_of_those_that_are_drawn_and_admitted():
    state, effects = batched("a", "b", "c", "e", "f")
    assert (state.cohort, gathered(effects)) == (("a", "b", "e", "f"), [("a", "b", "e", "f")])
    state, _ = batched("a", "c", "d")
    why = (
        "round 0: only 3 of the drawn silos are admitted, 2 of them in whole batches, and it"
        " takes 4"
    )
    assert ending(state) == ("finishing", "failed", why)


def test_the_next_attempt_leaves_out_the_batches_of_lost_silos():
    state, effects = batched()
    assert gathered(effects) == [SIX]
    state, effects = run(state, *dropping("c", 0))
    assert gathered(effects) == [("a", "b", "e", "f")]
    assert task_for(state, "c") == RoundTask(0, SIX, 0)  # it may be asked again
    state, effects = run(state, *dropping("e", 1, "deadline"))
    assert gathered(effects) == [SIX]  # two silos are too few, so all are waited for
    state, effects = run(state, *dropping("e", 2))
    assert gathered(effects) == [("a", "b", "c", "d")]
    state, _ = run(state, Summed(0, ("a", "b", "c", "d")), Folded(0))
    _, effects = run(state, Drawn(1, SIX))
    assert gathered(effects) == [SIX]


def test_the_first_attempt_leaves_out_the_batches_of_silos_known_to_be_lost():
    state, effects = batched(lost=("c",))
    assert (state.cohort, state.failed) == (SIX, {"c": "lost"})
    assert gathered(effects) == [("a", "b", "e", "f")]
    state, effects = run(state, SumFailed(0, 0, "TOO_FEW: e"))
    assert gathered(effects) == [("a", "b", "e", "f")]
    assert task_for(state, "c") == RoundTask(0, SIX, 0)  # it may be asked again
    state, effects = batched(lost=("c", "e"))
    # two silos are too few, so all are waited for
    assert (state.failed, gathered(effects)) == ({}, [SIX])


def test_a_sum_begins_without_silos_known_to_be_lost_and_a_resumed_round_asks_all():
    state, effects = blind(*ADMITTED, Drawn(0, SILOS, ("a",)))
    # it is dropped once the attempt begins
    assert (state.failed, gathered(effects)) == ({"a": "lost"}, [SILOS])
    state, _ = run(batched()[0], *dropping("c", 0), OperatorStopped(), Resumed())
    _, effects = run(state, Began())
    assert gathered(effects) == [SIX]


# A sum that is none of values.
def spoiled(attempt, *silos, round_=0):
    return SumFailed(round_, attempt, "SUM: beyond", False, silos)


def test_a_spoiled_sum_is_repeated_without_each_batch_in_turn():
    state, effects = run(batched()[0], spoiled(0, *SIX))
    assert gathered(effects) == [("c", "d", "e", "f")]
    state, effects = run(state, spoiled(1, *"cdef"))
    assert gathered(effects) == [("a", "b", "e", "f")]
    # an attempt that shows which batch it may be is none that failed
    assert (state.attempt, state.fruitless, state.refused) == (2, 0, 0)
    state, effects = run(state, Summed(0, ("a", "b", "e", "f")))
    assert state.excluded == {}  # whoever did it may have stopped
    state, _ = run(state, Folded(0))
    assert state.counted == dict.fromkeys(SIX, 1)  # all of them signed a sum of what they trained
    state, effects = run(state, Drawn(1, SIX))
    assert gathered(effects) == [SIX]
    for attempt, (without, left) in enumerate([(SIX, "abef"), ("abef", "abcd"), ("abcd", "cdef")]):
        state, effects = run(state, spoiled(attempt, *without, round_=1))
        assert gathered(effects) == [tuple(left)]
    state, _ = run(state, spoiled(3, *"cdef", round_=1))
    why = (
        "round 1: SUM: beyond; no batch of a, b, c, d, e, f could be found without which there is"
        " a sum"
    )
    assert ending(state) == ("finishing", "failed", why)


def test_a_batch_whose_own_sum_is_spoiled_takes_no_more_part():
    state, _ = in_batches(tuple("abc"), tuple("def"), rounds=3, fewest=3)
    state, effects = run(state, spoiled(0, *SIX), spoiled(1, *"def"))
    assert LogEvent("batch.excluded", {"round": 0, "silos": ("d", "e", "f")}) in effects
    assert gathered(effects) == [("a", "b", "c")]
    state, _ = run(state, Summed(0, ("a", "b", "c")), Folded(0))
    assert state.excluded == dict.fromkeys("def", "BATCH")
    _, effects = run(state, Drawn(1, SIX))
    assert gathered(effects) == [("a", "b", "c")]


def test_where_two_batches_are_at_fault_the_job_ends_and_so_it_does_with_one_batch():
    state, _ = run(batched()[0], spoiled(0, *SIX), spoiled(1, *"cdef"), spoiled(2, *"abef"))
    assert state.stage == "round"
    state, _ = run(state, spoiled(3, *"abcd"))
    assert (state.stage, state.outcome) == ("finishing", "failed")
    state, _ = run(in_batches(SIX)[0], SumFailed(0, 0, "SUM: beyond", True, SIX))
    assert ending(state) == ("finishing", "failed", "round 0: SUM: beyond")


def test_a_round_counts_for_whoever_may_have_signed_a_sum_of_it():
    """Three signed and died; the round goes on without their batch, and they from its result."""
    state, _ = batched()
    why = "TOO_FEW: stage 'reveal' closed with 3 silos"
    state, effects = run(state, SiloFailed("e", 0, "lost"), SumFailed(0, 0, why, signed=SIX))
    assert gathered(effects) == [("a", "b", "c", "d")]
    state, _ = run(state, Summed(0, ("a", "b", "c", "d")), Folded(0))
    assert (state.counted, state.signed) == (dict.fromkeys(SIX, 1), frozenset())


def test_where_another_batch_was_lost_meanwhile_nobody_is_excluded():
    state, _ = run(in_batches(*BATCHES, ("g", "h"))[0], spoiled(0, *EIGHT))
    state, effects = run(state, *dropping("c", 1))
    assert gathered(effects) == [("e", "f", "g", "h")]
    state, _ = run(state, Summed(0, ("e", "f", "g", "h")))
    assert (state.stage, state.excluded) == ("folding", {})  # whose doing it was is not known
    state, _ = run(state, Folded(0))
    assert state.counted == dict.fromkeys(EIGHT, 1)


def test_what_is_left_out_stays_so_where_the_job_was_stopped_meanwhile():
    state, _ = run(batched()[0], OperatorStopped(), spoiled(0, *SIX))
    assert state.stage == "stopped"
    _, effects = run(state, Resumed(), Began())
    assert gathered(effects) == [("c", "d", "e", "f")]


# Every cell of the table.
MOVES = {  # (stage, event): where to; what is not here changes nothing
    ("queued", "Began"): "admitting",
    ("admitting", "Answered"): "admitting",
    ("admitting", "Deadline"): "finishing",
    ("drawing", "Drawn"): "round",
    ("round", "Given"): "round",
    ("round", "Failed"): "round",
    ("round", "Lost"): "round",
    ("round", "Deadline"): "finishing",
    ("folding", "Folded"): "drawing",
    ("folding", "FoldFailed"): "finishing",
    ("folding", "Damaged"): "round",
    ("finishing", "Done"): "finishing",
    ("finishing", "Lost"): "finishing",
    ("finishing", "Deadline"): "ended",
    **{(stage, "Stopped"): "stopped" for stage in ("queued", "admitting", "drawing", "round")},
    ("folding", "Stopped"): "folding",
    ("stopped", "Resumed"): "queued",
    ("queued", "Withdrawn"): "ended",
    ("admitting", "Withdrawn"): "finishing",
}


def fitting(state):
    """One event of each kind, as fitting to the state as it can be."""
    return {
        "Began": Began(), "Answered": Answered("a", None), "Drawn": Drawn(state.round, SILOS),
        "Given": UploadStored("a", state.round, "x"),
        "Failed": SiloFailed("a", state.round, "lost"), "Lost": SiloLost("a"),
        "Folded": Folded(state.round), "FoldFailed": FoldFailed(state.round, "disk"),
        "Damaged": Damaged(state.round, ("a",), "disk"), "Done": Done("a"),
        "Deadline": RoundDeadline(state.stage, state.round), "Stopped": OperatorStopped(),
        "Resumed": Resumed(), "Greeted": Greeted("a"), "Withdrawn": Withdrawn(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(fitting(job())))
@pytest.mark.parametrize("stage", STAGES)
def test_each_cell_of_the_table(stage, kind):
    state, _ = run(job(), *REACHED[stage])
    assert state.stage == stage
    following, effects = advance(state, fitting(state)[kind])
    if (stage, kind) in MOVES:
        assert following.stage == MOVES[stage, kind]
        assert following != state
    else:
        assert (following, effects) == (state, ())


def after_only_asks(before, after, silo):
    return after == replace(before, asked=before.asked | {silo})


# Any events in any order.
class World:
    """A coordinator's shell around one job, with every claim of the module checked each step."""

    def __init__(self, state):
        self.first = self.state = state
        self.events = []
        self.pending = []  # what the shell owes: draws and folds
        self.watches = []  # deadlines that will fire

    def send(self, event):
        before, copied = self.state, copy.deepcopy(self.state)
        after, effects = advance(before, event)
        assert before == copied, "the state was changed in place"
        self.events.append(event)
        self.state = after
        self._check_concerned(before, after)
        self._check(before, event, after, effects)
        for effect in effects:
            if isinstance(effect, StartRoundTimer):
                self.watches.append(RoundDeadline(effect.stage, effect.round))
            elif not isinstance(effect, LogEvent):
                self.pending.append(effect)

    def _check(self, before, event, after, effects):
        if after == before:
            assert effects == (), "an event that changes nothing has an effect"
            return
        assert before.stage == after.stage or (before.stage, after.stage) in STEPS
        assert before.counted.items() <= after.counted.items() or isinstance(event, Folded)
        assert before.round <= after.round <= after.rounds
        assert after.round - before.round <= 1
        assert before.answers.keys() <= after.answers.keys()
        assert set(before.admitted) <= set(after.admitted)
        assert after.asked <= after.declined
        assert before.done <= after.done <= set(after.admitted)
        if before.outcome != "running":
            assert (after.outcome, after.reason) == (before.outcome, before.reason)
        assert (after.outcome != "running") == (after.stage in ("finishing", "ended"))
        assert after.opened >= before.opened
        assert not after.stopping or after.stage in ("folding", "finishing", "ended")
        assert (after.outcome == "completed") <= (after.round == after.rounds)
        assert set(after.given) <= set(after.cohort)
        assert set(after.failed) <= set(after.cohort or after.admitted)
        assert not set(after.given) & set(after.failed)
        assert set(after.cohort) <= set(after.silos)
        self._check_late(before, event)
        self._check_effects(before, after, effects)

    def _check_concerned(self, before, after):
        """Whoever has a task now that it had not before is woken, and nobody else."""
        tasks = {silo: task_for(after, silo) for silo in after.silos}
        new = [
            silo
            for silo in after.silos
            if tasks[silo] is not None and tasks[silo] != task_for(before, silo)
        ]
        assert list(concerned(before, after)) == new

    def _check_late(self, before, event):
        """Only an event that the state awaits may change it."""
        match event:
            case SiloLost(silo):
                assert before.stage in ("round", "finishing")
                assert before.answers[silo] == "accepted"
                assert before.stage == "finishing" or silo in before.open
            case UploadStored(silo, number, _) | SiloFailed(silo, number, _):
                assert (before.stage, before.round) == ("round", number)
                assert silo in before.cohort
                assert silo not in {**before.given, **before.failed}
            case Drawn(number, _, _):
                assert (before.stage, before.round) == ("drawing", number)
            case Folded(number) | FoldFailed(number, _) | Damaged(number):
                assert (before.stage, before.round) == ("folding", number)
            case RoundDeadline(stage, number):
                assert (before.stage, before.round) == (stage, number)
            case Answered(silo, _):
                assert before.stage in ("admitting", "drawing", "round", "folding")
                assert silo not in before.answers or silo in before.asked
            case Greeted(silo):
                assert silo in before.declined - before.asked
                assert after_only_asks(before, self.state, silo)
            case Withdrawn():
                assert before.stage in ("queued", "admitting", "stopped")
                assert not before.opened
            case OperatorStopped():
                assert before.stage in ("queued", "admitting", "drawing", "round", "folding")
            case Resumed():
                assert before.stage == "stopped" or before.stopping
            case Done(silo):
                assert before.stage in ("finishing", "ended")
                assert before.answers[silo] == "accepted"
            case Began():
                assert before.stage == "queued"
            case Overtaken(silent):
                assert before.stage == "admitting"
                assert before.answers.keys() - before.asked >= set(before.silos) - set(silent)

    def _check_effects(self, before, after, effects):
        wanted = []
        if after.stage != before.stage:
            members = tuple(s for s in after.cohort if s in after.given)
            wanted = {
                "admitting": [StartRoundTimer("admitting", 0)],
                "drawing": [DrawCohort(after.round)],
                "round": [StartRoundTimer("round", after.round)],
                "folding": [Fold(after.round, members)],
                "finishing": [StartRoundTimer("finishing", after.round)],
                "ended": [],
                "stopped": [],
                "queued": [],
            }[after.stage]
            if before.stage == "queued" and after.stage == "folding":
                wanted = [StartRoundTimer("round", after.round), *wanted]
            waited = before.opened or before.aside
            if before.stage == "queued" and after.stage == "drawing" and not waited:
                wanted = [StartRoundTimer("admitting", 0), *wanted]
            if after.stage == "folding":
                assert len(members) >= after.min_cohort
                assert members == tuple(s for s in after.silos if s in after.given), (
                    "not in job order"
                )
            if after.stage == "round":
                assert len(after.cohort) >= after.min_cohort
        assert list(without_reports(effects)) == wanted

    def check_tasks(self):
        state = self.state
        assert awaited(state) == tuple(s for s in state.silos if s in self._awaited())
        for silo in (*state.silos, "stranger"):
            match task_for(state, silo):
                case OfferTask():
                    assert state.stage in ("admitting", "drawing", "round", "folding")
                    assert silo in state.silos
                    assert silo not in state.answers or silo in state.asked
                case RoundTask(number, cohort):
                    assert (state.stage, state.round, state.cohort) == ("round", number, cohort)
                    assert silo in cohort
                    assert silo not in {**state.given, **state.failed}
                case FinishTask(number, completed):
                    assert state.stage in ("finishing", "ended")
                    assert (number, completed) == (state.round, state.outcome == "completed")
                    assert state.answers[silo] == "accepted"
                    assert silo not in state.done
                case None:
                    told = {
                        "admitting": set(state.silos) - set(state.answers),
                        "round": set(state.open),
                        "finishing": set(state.admitted) - state.done,
                        "ended": set(state.admitted) - state.done,
                    }
                    assert silo not in told.get(state.stage, ())

    def _awaited(self):
        """Who keeps the stage from ending, by what the stage waits for."""
        state = self.state
        if state.stage == "round":
            return set(state.cohort) - set(state.given) - set(state.failed)
        return (
            set(state.admitted) - state.done - set(state.failed)
            if state.stage == "finishing"
            else set()
        )


def any_event(draw, state):
    """An event of any kind, near the state or stale, duplicated or of a stranger."""
    number = draw(
        st.sampled_from((state.round, state.round, max(0, state.round - 1), state.round + 1))
    )
    silo = draw(st.sampled_from((*state.silos, "stranger")))
    choices = (
        Began(), Answered(silo, None), Answered(silo, None), Answered(silo, "POLICY"),
        UploadStored(silo, number, "x"), UploadStored(silo, number, "y"),
        SiloFailed(silo, number, "TRAINING"), SiloLost(silo), Folded(number),
        FoldFailed(number, "disk"), Damaged(number, (silo,), "disk"), Done(silo),
        *(RoundDeadline(stage, number) for stage in STAGES if stage != state.stage),
        RoundDeadline(state.stage, number), OperatorStopped(), Resumed(),
        Greeted(silo), Answered(silo, WAITING), Withdrawn(), Overtaken(), Overtaken((silo,)),
    )  # fmt: skip
    return draw(st.sampled_from(choices))


def answer(draw, state, effect):
    """What the shell answers to an effect."""
    if isinstance(effect, DrawCohort):
        drawn = draw(st.sets(st.sampled_from(state.silos)))
        everybody = draw(st.integers(0, 3)) > 0
        lost = draw(st.sets(st.sampled_from(state.silos)))
        return Drawn(
            effect.round,
            tuple(s for s in state.admitted if everybody or s in drawn),
            tuple(sorted(lost)),
        )
    return Folded(effect.round) if draw(st.integers(0, 5)) else FoldFailed(effect.round, "disk")


@settings(max_examples=150)
@given(data=st.data())
def test_any_events_in_any_order(data):
    silos = data.draw(st.permutations("abcd"))[: data.draw(st.integers(2, 4))]
    fewest = data.draw(st.integers(1, len(silos)))
    world = World(job(tuple(silos), data.draw(st.integers(1, 3)), fewest))
    for _ in range(data.draw(st.integers(0, 30))):
        choice = data.draw(st.integers(0, 9))
        if choice < 2 and world.pending:
            world.send(answer(data.draw, world.state, world.pending.pop(0)))
        elif choice == 2 and world.watches:
            world.send(data.draw(st.sampled_from(world.watches)))
        elif choice == 3 and world.events:
            world.send(data.draw(st.sampled_from(world.events)))
        else:
            world.send(any_event(data.draw, world.state))
        world.check_tasks()

    # It always ends once it is resumed, what is owed is done and the deadlines fire.
    world.send(Resumed())
    world.send(Began())
    for _ in range(3 * world.state.rounds + 5):
        while world.pending:
            world.send(answer(data.draw, world.state, world.pending.pop(0)))
        for deadline in tuple(world.watches):
            world.send(deadline)
    assert world.state.stage == "ended"
    world.check_tasks()

    # Replaying the events gives the state, and so does replaying them with every event twice: but
    # who is lost from the last round, and then once more, is lost to the end as well.
    assert run(world.first, *world.events)[0] == world.state
    twice = [event for event in world.events for _ in (0, 1)]
    assert replace(run(world.first, *twice)[0], failed={}) == replace(world.state, failed={})


@settings(max_examples=60)
@given(data=st.data())
def test_a_willing_federation_completes_whatever_the_order(data):
    silos = tuple(data.draw(st.permutations("abcd")))
    rounds = data.draw(st.integers(1, 3))
    state, _ = run(
        job(silos, rounds, 2),
        Began(),
        *(Answered(s, None) for s in data.draw(st.permutations(silos))),
    )
    folds = []
    for number in range(rounds):
        state, _ = run(state, Drawn(number, silos))
        for silo in data.draw(st.permutations(silos)):
            state, effects = run(state, UploadStored(silo, number, silo))
        folds += without_reports(effects)
        state, _ = run(state, Folded(number))
    state, _ = run(state, *(Done(s) for s in data.draw(st.permutations(silos))))
    assert folds == [Fold(number, silos) for number in range(rounds)]
    assert (state.stage, state.outcome, state.round) == ("ended", "completed", rounds)


def test_an_open_round_wakes_nobody_and_a_sum_that_moves_on_all_its_silos():
    state, _ = run(job(), *OPEN)
    assert concerned(state, run(state, UploadStored("a", 0, "x"))[0]) == ()
    closed, _ = run(state, *(UploadStored(silo, 0, "x") for silo in SILOS), Folded(0))
    assert concerned(closed, run(closed, Drawn(1, ("c", "b")))[0]) == ("b", "c")
    state, _ = blind_round()
    assert concerned(state, run(state, OperatorStopped())[0]) == SILOS
    assert concerned(state, run(state, *dropping("a", 0))[0]) == SILOS
    assert concerned(state, run(state, SiloFailed("a", 0, "lost"))[0]) == ()


# A blind job: each round is one secure sum.
def blind(*events, rounds=2):
    return run(JobState("job", SILOS, rounds, 2, blind=True), *events)


SUM = ("b", "c")
SUMMED = (*OPEN, Summed(0, SUM))


def test_a_blind_round_is_gathered_and_folded_over_the_members_of_its_sum():
    state, effects = blind(*OPEN)
    assert (state.stage, without_reports(effects)) == ("round", (Gather(0, SILOS, 0, 0),))
    assert tasks(state, ALL) == [RoundTask(0, SILOS, 0)] * 3 + [None]
    assert awaited(state) == SILOS
    stale = (Summed(1, SUM), SumFailed(1, 0, "?"), SumFailed(0, 1, "?"))
    for event in (UploadStored("b", 0, "db"), RoundDeadline("round", 0), *stale):
        assert run(state, event) == (state, ())
    state, effects = run(state, Summed(0, ("c", "b")))
    assert (state.stage, without_reports(effects)) == ("folding", (Fold(0, SUM),))  # in job order
    for event in (Summed(0, SILOS), SumFailed(0, 0, "?"), SiloFailed("a", 0, "lost")):
        assert run(state, event) == (state, ())
    state, _ = run(state, Folded(0))
    assert state.counted == {"b": 1, "c": 1}
    state, effects = run(state, Drawn(1, SILOS))
    assert without_reports(effects) == (Gather(1, SILOS, 0, 0),)


@pytest.mark.parametrize(
    ("event", "code"), [(SiloFailed("a", 0, "DATA"), "DATA"), (SiloLost("a"), "lost")]
)
def test_who_fails_drops_out_of_the_attempt_and_closes_nothing(event, code):
    state, effects = blind(*OPEN, event)
    assert (state.stage, without_reports(effects)) == ("round", (Drop("a", code),))
    assert reports(effects) == [("silo.dropped", {"silo": "a", "round": 0, "code": code})]
    assert (task_for(state, "a"), state.open) == (None, ("b", "c"))
    state, _ = run(state, event)
    state, effects = run(state, SiloFailed("b", 0, "lost"), SiloFailed("c", 0, "lost"))
    assert (state.stage, state.open) == ("round", ())  # its sum ends by itself
    state, effects = run(state, SumFailed(0, 0, "too few"))
    assert (state.failed, without_reports(effects)) == ({}, (Gather(0, SILOS, 1, 1),))
    assert task_for(state, "a") == RoundTask(0, SILOS, 0)


def test_a_spent_budget_misses_one_round():
    """A silo without privacy budget is out of all attempts of the round, and asked in the next."""
    state, _ = blind(*OPEN, SiloFailed("a", 0, "BUDGET"))
    assert (task_for(state, "a"), state.stage) == (None, "round")
    for number in range(MOST_REFUSED + 1):  # another is away, and waited for
        state, effects = run(state, *dropping("c", number))
        gather = Gather(0, SILOS, number + 1, number + 1)
        assert (state.failed, without_reports(effects)) == ({"a": "BUDGET"}, (gather,))
        assert tasks(state) == [RoundTask(0, SILOS, 0), None, RoundTask(0, SILOS, 0)]
    state, _ = run(state, Summed(0, SUM), Folded(0), Drawn(1, SILOS))
    # it goes on receiving
    assert tasks(state) == [RoundTask(1, SILOS, counted) for counted in (1, 0, 1)]


def test_a_sum_that_needs_a_spent_privacy_budget_is_not_tried_for_long_and_says_so():
    state, _ = blind(*OPEN, SiloFailed("a", 0, "BUDGET"))
    for number in range(MOST_REFUSED):
        assert (state.stage, task_for(state, "a")) == ("round", None)
        state, _ = run(state, SumFailed(0, number, "TOO_FEW"))
    assert (state.stage, state.outcome) == ("finishing", "failed")
    assert isinstance(task_for(state, "a"), FinishTask)
    spent = (SiloFailed(silo, 0, "BUDGET") for silo in ("a", "b"))
    state, _ = run(job(), *OPEN, *spent, UploadStored("c", 0, "dc"))
    why = "BUDGET, its privacy budget is spent"
    assert state.reason == f"round 0: 1 silos uploaded, min_cohort is 2 (a: {why}, b: {why})"


def test_three_attempts_fail_and_then_the_job():
    state, effects = blind(*OPEN, SumFailed(0, 0, "x"), SumFailed(0, 1, "y"))
    assert reports(effects) == [("sum.failed", {"round": 0, "attempt": 1, "why": "y"})]
    assert without_reports(effects) == (Gather(0, SILOS, 2, 2),)
    assert run(state, SumFailed(0, 1, "again")) == (state, ())
    state, effects = run(state, SumFailed(0, 2, "z"))
    assert ending(state) == ("finishing", "failed", "round 0: z")
    state, _ = blind(*OPEN, SumFailed(0, 0, "x", final=True))
    assert ending(state) == ("finishing", "failed", "round 0: x")


def test_each_round_has_its_own_attempts():
    failed = (SumFailed(0, 0, "x"), SumFailed(0, 1, "y"))
    state, _ = blind(*OPEN, *failed, Summed(0, SUM), Folded(0), Drawn(1, SILOS))
    assert (state.attempt, state.fruitless) == (0, 0)
    assert run(state, SumFailed(1, 0, "x"), SumFailed(1, 1, "y"))[0].stage == "round"


def test_a_stopped_sum_goes_on_with_another_attempt_when_it_is_resumed():
    state, effects = blind(*OPEN, OperatorStopped())
    assert (state.stage, without_reports(effects)) == ("stopped", (Halt(0),))
    assert [task_for(state, s) for s in SILOS] == [None] * 3
    for _ in range(5):  # what an operator stops does not count
        state, effects = run(state, SumFailed(0, state.attempt, "stopped"))
        assert (state.stage, effects) == ("stopped", ())
        state, effects = run(state, Resumed(), Began())
        assert without_reports(effects) == (Gather(0, SILOS, state.attempt, 0),)
        state, _ = run(state, OperatorStopped())
    assert state.attempt == 5
    # it has not ended yet: the same attempt, begun already
    state, effects = run(state, Resumed(), Began())
    assert without_reports(effects) == (Gather(0, SILOS, 5, 0),)
    state, effects = run(state, SumFailed(0, 5, "stopped"))
    assert without_reports(effects) == (Gather(0, SILOS, 6, 1),)


def test_a_sum_opened_while_stopped_is_folded_later_and_gathered_after_a_restart():
    state, effects = blind(*OPEN, OperatorStopped(), Summed(0, SUM))
    assert (state.stage, effects, state.given) == ("stopped", (), {"b": "", "c": ""})
    assert run(state, SumFailed(0, 0, "?")) == (state, ())
    state, effects = run(state, Resumed(), Began())
    assert (state.stage, without_reports(effects)) == ("folding", (Fold(0, SUM),))
    state, _ = blind(*OPEN, SumFailed(0, 0, "x"))
    # at once: it may not live as long as the pause
    assert resumed(state) == (Gather(0, SILOS, 1, 0),)
    assert resumed(blind(*SUMMED)[0]) == (Fold(0, SUM),)
    assert resumed(blind(*OPEN, OperatorStopped())[0]) == ()


# Who is shown to have broken the rules.
GUILTY_CODES = ("MISDEALT", "COMPLAINT")


@pytest.mark.parametrize("code", GUILTY_CODES)
def test_who_broke_the_rules_is_out_of_the_job_and_the_attempt_is_not_counted(code):
    state, effects = blind(*OPEN, *dropping("a", 0, code))
    # at once: no pause for a fruitless one
    assert without_reports(effects) == (Gather(0, SILOS, 1, 0),)
    assert (state.fruitless, state.refused) == (0, 0)
    assert state.failed == state.excluded == {"a": code}
    state, _ = run(state, Summed(0, SUM), Folded(0), Drawn(1, SILOS))
    assert (state.stage, state.open) == ("round", ("b", "c"))
    assert tasks(state) == [RoundTask(1, SILOS, 1), None, RoundTask(1, SILOS, 1)]
    state, _ = run(state, Summed(1, SUM), Folded(1))
    assert isinstance(task_for(state, "a"), FinishTask)  # it is told the end


def shrinking(*batches):
    """A blind job in its first round, whose batches may shrink to three silos."""
    return in_batches(*batches, rounds=3, min_cohort=3, least=3)[0]


def test_a_proven_cheat_leaves_its_batch():
    """A batch continues without a silo proven at fault while enough are left for a sum."""
    state, effects = run(shrinking(SIX), *dropping("f", 0, "MISDEALT"))
    assert gathered(effects) == [("a", "b", "c", "d", "e")]
    assert state.failed == state.excluded == {"f": "MISDEALT"}
    state, effects = run(state, *dropping("c", 1))
    assert gathered(effects) == [("a", "b", "c", "d", "e")]  # who is away is waited for
    state, effects = run(state, *dropping("e", 2, "MISDEALT"))
    assert gathered(effects) == [("a", "b", "c", "d")]
    state, _ = run(state, Summed(0, ("a", "b", "c", "d")), Folded(0))
    state, effects = run(state, Drawn(1, SIX))
    assert (state.cohort, gathered(effects)) == (("a", "b", "c", "d"), [("a", "b", "c", "d")])
    summed = (Summed(1, ("a", "b", "c", "d")), Folded(1))
    state, _ = run(state, SiloFailed("d", 1, "MISDEALT"), *summed, Drawn(2, SIX))
    assert (state.stage, state.outcome) == ("finishing", "failed")
    assert state.reason.startswith(
        "round 2: only 3 of the drawn silos are admitted, 3 of them in whole batches, and it"
    )


def test_who_complains_without_a_reason_takes_its_batch_along():
    """What it signed is no evidence for others."""
    _, effects = run(shrinking(EIGHT[:4], EIGHT[4:]), *dropping("a", 0, "COMPLAINT"))
    assert gathered(effects) == [EIGHT[4:]]


def test_a_batch_continues_without_a_proven_silo_while_large_enough():
    first = run(shrinking(EIGHT[:4], EIGHT[4:]), *dropping("a", 0, "MISDEALT"))
    state, effects = first
    assert gathered(effects) == [EIGHT[1:]]
    state, effects = run(state, *dropping("h", 1, "MISDEALT"))
    assert gathered(effects) == [EIGHT[1:7]]
    state, effects = run(state, *dropping("f", 2))
    assert gathered(effects) == [EIGHT[1:7]]  # three are too few for a sum, so all are waited for
    _, effects = run(first[0], *dropping("b", 1, "MISDEALT"))
    assert gathered(effects) == [EIGHT[4:]]  # two are no batch


def test_a_batch_that_a_silo_left_is_left_out_and_excluded_like_any_other():
    state, _ = run(shrinking(EIGHT[:4], EIGHT[4:]), *dropping("h", 0, "MISDEALT"))
    state = replace(state, fewest=3)
    state, effects = run(state, spoiled(1, *"abcdefg"))
    assert gathered(effects) == [("e", "f", "g")]
    state, effects = run(state, spoiled(2, *"efg"))
    assert LogEvent("batch.excluded", {"round": 0, "silos": ("e", "f", "g")}) in effects
    assert gathered(effects) == [EIGHT[:4]]
    assert state.excluded == {"h": "MISDEALT", "e": "BATCH", "f": "BATCH", "g": "BATCH"}


def test_one_after_another_may_break_the_rules_however_many_attempts_that_takes():
    silos = tuple(f"s{i:02}" for i in range(40))
    state = replace(job(silos, min_cohort=3), blind=True)
    state, _ = run(state, Began(), *(Answered(silo, None) for silo in silos), Drawn(0, silos))
    for number, silo in enumerate(silos[:37]):
        state, effects = run(state, *dropping(silo, number, "MISDEALT"))
        assert without_reports(effects) == (Gather(0, silos, number + 1, 0),)
    assert state.open == silos[37:]


@pytest.mark.parametrize("code", GUILTY_CODES)
def test_an_attempt_without_anybody_new_at_fault_is_counted_as_ever(code):
    at_fault, _ = blind(*OPEN, *dropping("a", 0, code))
    state = at_fault
    for number in range(1, MOST_REFUSED + 1):
        assert state.stage == "round"
        state, _ = run(state, *dropping("b", number, "POLICY"))
    assert (state.stage, state.outcome) == ("finishing", "failed")
    state = at_fault
    for number in range(1, MOST_REFUSED + 2):  # who is away is waited for, beside one that is out
        state, _ = run(state, *dropping("b", number))
    assert (state.stage, state.refused) == ("round", 0)


def test_a_job_ends_at_once_where_no_other_attempt_can_follow_or_too_few_are_left():
    guilty = (*OPEN, SiloFailed("a", 0, "MISDEALT"))
    state, _ = blind(*guilty, SumFailed(0, 0, "MISDEALT: a dealt …", final=True))
    assert (state.stage, state.reason) == ("finishing", "round 0: MISDEALT: a dealt …")
    both = (SumFailed(0, 0, "x"), SiloFailed("b", 0, "COMPLAINT"), SumFailed(0, 1, "y"))
    state, _ = blind(*guilty, *both, Summed(0, ("c",)))
    assert state.stage == "finishing"
    state, _ = blind(*guilty, Summed(0, SILOS), Folded(0), Drawn(1, ("a", "c")))
    why = (
        "round 1: only 1 of the drawn silos are admitted, min_cohort is 2; "
        "a: MISDEALT, it dealt shares that do not open or do not join"
    )
    assert ending(state) == ("finishing", "failed", why)


def test_a_harmless_wrong_share_counts_once():
    """A dealer whose wrong share did no harm is in this round's sum and in no later one."""
    state, _ = blind(*OPEN, SiloFailed("a", 0, "MISDEALT"), Summed(0, SILOS))
    state, _ = run(state, Folded(0), Drawn(1, SILOS))
    assert (state.counted["a"], state.open) == (1, ("b", "c"))


def test_fault_is_noted_of_who_had_dropped_out_and_while_a_job_is_stopped():
    state, _ = blind(*OPEN, SiloFailed("a", 0, "lost"), SiloFailed("a", 0, "MISDEALT"))
    assert state.failed == {"a": "MISDEALT"}
    fault = (SiloFailed("a", 0, "MISDEALT"), SumFailed(0, 0, "stopped"))
    state, _ = blind(*OPEN, OperatorStopped(), *fault, Resumed(), Began())
    assert (state.failed, state.open) == ({"a": "MISDEALT"}, ("b", "c"))
    state, _ = run(state, SiloFailed("a", 1, "MISDEALT"), SiloFailed("stranger", 0, "MISDEALT"))
    assert "stranger" not in state.failed

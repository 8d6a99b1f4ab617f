import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.errors import LocalError
from staddle.silo.session import (
    Barred,
    Conclude,
    Connect,
    Connected,
    ConnectionLost,
    Decide,
    Exit,
    JobFinished,
    JobOffered,
    Poll,
    Reload,
    ReloadAsked,
    RoundOpened,
    SessionState,
    StopAsked,
    TakePart,
    TaskReceived,
    Worked,
    advance,
    begin,
    may_reload,
)

OFFER = JobOffered("j", "ab", b"{}")
ASKED = RoundOpened("j", "ab", 3, 2, ("a", "b"))
FINISHED = JobFinished("j", "ab", 4, completed=True, counted=4)
WORK = {OFFER: Decide(OFFER), ASKED: TakePart(ASKED), FINISHED: Conclude(FINISHED)}
OFFLINE = SessionState("offline", 2)
WAITING = SessionState("waiting", 2)
WORKING = SessionState("working", 2, ASKED)
OFFERED = SessionState("working", 2, OFFER)
STOPPED = SessionState("stopped")

TABLE = [
    (OFFLINE, Connected(), SessionState("waiting", 2), Poll()),
    (OFFLINE, ConnectionLost("x"), SessionState("offline", 3), Connect(3)),
    (WAITING, TaskReceived(None), SessionState("waiting"), Poll()),
    *(
        (WAITING, TaskReceived(task), SessionState("working", 2, task), work)
        for task, work in WORK.items()
    ),
    (WAITING, ConnectionLost("x"), SessionState("offline", 3), Connect(3)),
    (WORKING, Worked(), SessionState("waiting"), Poll()),
    (WORKING, ConnectionLost("x"), SessionState("offline", 3), Connect(3)),
    *(
        (state, Barred("why"), STOPPED, Exit("why"))
        for state in (OFFLINE, WAITING, WORKING, STOPPED)
    ),
    *((state, StopAsked(), STOPPED, Exit("")) for state in (OFFLINE, WAITING, WORKING, STOPPED)),
    *((state, ReloadAsked("x"), STOPPED, Reload("x")) for state in (OFFLINE, WAITING, OFFERED)),
]
EVENTS = (
    Connected(), TaskReceived(None), TaskReceived(ASKED), Worked(), ConnectionLost("x"),
    Barred("x"), StopAsked(), ReloadAsked("x"),
)  # fmt: skip


def test_it_begins_offline_connects_without_waiting_and_forgets_a_lost_task():
    assert begin() == (SessionState("offline", 0, None), Connect(0))
    assert advance(WORKING, ConnectionLost("x"))[0].task is None
    assert advance(WORKING, Worked())[0].task is None


@pytest.mark.parametrize(("state", "event", "following", "effect"), TABLE)
def test_each_row_of_the_table(state, event, following, effect):
    assert advance(state, event) == (following, effect)


LEGAL = {(state.stage, type(event)) for state, event, *_ in TABLE} - {("working", ReloadAsked)}
ILLEGAL = [
    (s, e)
    for s, e in itertools.product((OFFLINE, WAITING, WORKING), EVENTS)
    if (s.stage, type(e)) not in LEGAL
]


@pytest.mark.parametrize(("state", "event"), ILLEGAL, ids=str)
def test_an_event_that_cannot_come_is_our_own_fault(state, event):
    with pytest.raises(LocalError, match=f"{type(event).__name__}.*'{state.stage}'"):
        advance(state, event)


@pytest.mark.parametrize(
    "event",
    [Connected(), TaskReceived(None), TaskReceived(ASKED), Worked(), ConnectionLost("x"),
     ReloadAsked("x")],
)  # fmt: skip
def test_nothing_comes_after_a_stop(event):
    with pytest.raises(LocalError, match="stopped"):
        advance(STOPPED, event)


def test_attempts_are_counted_while_nobody_answers_until_a_poll_without_a_task():
    state, effect = begin()
    attempts = []
    for _ in range(4):
        state, effect = advance(state, ConnectionLost("no answer"))
        attempts.append(effect)
    assert attempts == [Connect(n) for n in (1, 2, 3, 4)]
    state = advance(SessionState("offline", 7), Connected())[0]
    assert state.attempt == 7
    state = advance(state, TaskReceived(None))[0]
    assert state.attempt == 0
    assert advance(state, ConnectionLost("x"))[1] == Connect(1)


def test_a_coordinator_that_greets_and_then_refuses_is_not_hammered():
    state, effect = begin()
    attempts = []
    for _ in range(4):
        state, _ = advance(state, Connected())
        state, effect = advance(state, ConnectionLost("refused"))
        attempts.append(effect.attempt)
    assert attempts == [1, 2, 3, 4]


@pytest.mark.parametrize("task", list(WORK), ids=lambda task: type(task).__name__)
def test_a_task_starts_the_count_again_once_it_is_done_and_not_before(task):
    state = advance(SessionState("waiting", 7), TaskReceived(task))[0]
    assert advance(state, ConnectionLost("x"))[1] == Connect(8)
    assert advance(advance(state, Worked())[0], ConnectionLost("x"))[1] == Connect(1)


def test_a_coordinator_that_tells_a_task_and_then_refuses_it_is_not_hammered():
    state, effect = begin()
    attempts = []
    for _ in range(4):
        for event in (Connected(), TaskReceived(ASKED), ConnectionLost("refused")):
            state, effect = advance(state, event)
        attempts.append(effect.attempt)
    assert attempts == [1, 2, 3, 4]


@settings(max_examples=200)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=15))
def test_any_events_keep_state_and_effect_together(events):
    state, effect = begin()
    for event in events:
        if isinstance(effect, Exit | Reload):
            break
        before, between = state, may_reload(effect)
        legal = (state.stage, type(event)) in LEGAL
        if isinstance(event, ReloadAsked):
            legal = between
        try:
            state, effect = advance(state, event)
        except LocalError:
            assert not legal
            assert state is before
            continue
        assert legal
        ends = Reload if isinstance(event, ReloadAsked) else Exit
        wanted = {"offline": Connect, "waiting": Poll, "stopped": ends}.get(
            state.stage, type(WORK.get(state.task))
        )
        assert type(effect) is wanted
        assert (state.task is not None) == (state.stage == "working")
        if isinstance(effect, Connect):
            assert effect.attempt == state.attempt > 0


def test_nothing_is_reloaded_while_a_round_is_worked_on_or_a_job_concluded():
    for task in (ASKED, FINISHED):
        with pytest.raises(LocalError, match="ReloadAsked"):
            advance(SessionState("working", 0, task), ReloadAsked("policy"))
        assert not may_reload(WORK[task])

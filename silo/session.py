"""A silo's conversation with its coordinator as a pure state machine.

``advance(state, event) -> (state, effect)``.

No socket, clock or file here; a lane of the agent runs one effect at a time and brings back what
came of it. An agent that takes part in several jobs at a time has a lane, and a state, for each.

::

    stage     event                        next      effect
    offline   Connected                    waiting   Poll
    offline   ConnectionLost               offline   Connect(attempt + 1)
    waiting   TaskReceived(None)           waiting   Poll
    waiting   TaskReceived(task)           working   Decide | TakePart | Conclude
    waiting   ConnectionLost               offline   Connect(attempt + 1)
    working   Worked                       waiting   Poll
    working   ConnectionLost               offline   Connect(attempt + 1): the task comes again
    any       Barred                       stopped   Exit(why)
    any       StopAsked                    stopped   Exit("")
    between   ReloadAsked                  stopped   Reload(why)

"Between" is before Connect, Poll and Decide, and during Poll: no round is being worked on, and
nothing is being uploaded. A task that was dropped for a reload comes again.

Attempts are counted from the last task that was done or the last poll that told none, so a
coordinator that greets and then refuses is not hammered.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ..errors import LocalError

Stage: TypeAlias = Literal["offline", "waiting", "working", "stopped"]


# Tasks, as the coordinator tells them.


@dataclass(frozen=True)
class JobOffered:
    """A job to decide on, as its operator signed it.

    ``digest`` is in hex. Nothing of ``signed`` has been checked yet.
    """

    job: str
    digest: str
    signed: bytes


@dataclass(frozen=True)
class RoundOpened:
    """A round to take part in.

    ``counted`` is one more than our last round that counted, 0 before the first.

    ``cohort`` are the silos of the round as the coordinator says it, not checked yet.
    """

    job: str
    digest: str
    round: int
    counted: int
    cohort: tuple[str, ...]


@dataclass(frozen=True)
class JobFinished:
    """A job that is over; ``counted`` as in RoundOpened.

    ``reason`` is the coordinator's word on why it did not complete.
    """

    job: str
    digest: str
    round: int
    completed: bool
    counted: int
    reason: str = ""


Task: TypeAlias = JobOffered | RoundOpened | JobFinished


@dataclass(frozen=True)
class SessionState:
    """The stage of the conversation.

    ``attempt`` counts failed attempts in a row. ``task`` is the current one.
    """

    stage: Stage = "offline"
    attempt: int = 0
    task: Task | None = None


# Events.


@dataclass(frozen=True)
class Connected:
    """The coordinator opened a session.

    Attempts are still counted on.
    """


@dataclass(frozen=True)
class TaskReceived:
    """A poll came back, with a task or with none."""

    task: Task | None


@dataclass(frozen=True)
class Worked:
    """The task is done with, well or not; what went wrong has been answered."""


@dataclass(frozen=True)
class ConnectionLost:
    """The coordinator cannot be reached, or knows our session no more.

    The task is dropped; the coordinator repeats it.
    """

    why: str


@dataclass(frozen=True)
class Barred:
    """The coordinator refuses us for a reason that trying again does not cure.

    The agent stops and reports ``why``.
    """

    why: str


@dataclass(frozen=True)
class StopAsked:
    """Someone asked this process to stop, in any stage."""


@dataclass(frozen=True)
class ReloadAsked:
    """A file that this agent was made from has changed; ``why`` names it."""

    why: str


Event: TypeAlias = (
    Connected | TaskReceived | Worked | ConnectionLost | Barred | StopAsked | ReloadAsked
)


# Effects.


@dataclass(frozen=True)
class Connect:
    """Say hello; before every attempt but number 0, wait with backoff."""

    attempt: int


@dataclass(frozen=True)
class Poll:
    """Wait for a task; there may be none."""


@dataclass(frozen=True)
class Decide:
    """Accept or decline a job.

    The answer is in the ledger before it leaves.
    """

    offer: JobOffered


@dataclass(frozen=True)
class TakePart:
    """Fetch, train, upload.

    A failure on our side is answered with a code.
    """

    asked: RoundOpened


@dataclass(frozen=True)
class Conclude:
    """Fetch the last results, evaluate, confirm.

    It confirms in any case, so that nobody waits for us.
    """

    finished: JobFinished


@dataclass(frozen=True)
class Exit:
    """Leave; ``why`` is empty when we were asked to."""

    why: str


@dataclass(frozen=True)
class Reload:
    """End this agent, and make another from the files as they are now.

    All that an agent must remember is on the disk, so jobs continue.
    """

    why: str


Effect: TypeAlias = Connect | Poll | Decide | TakePart | Conclude | Exit | Reload


def may_reload(effect: Effect) -> bool:
    """Whether ReloadAsked may come before this effect."""
    return isinstance(effect, Connect | Poll | Decide)


def begin() -> tuple[SessionState, Effect]:
    """The first state and effect: connect without a wait."""
    return SessionState(), Connect(0)


def advance(state: SessionState, event: Event) -> tuple[SessionState, Effect]:
    """The next state and what to do; LocalError for an event that cannot come in this stage.

    Pure.
    """
    match event:
        # These two stop the agent in any stage.
        case StopAsked():
            return SessionState("stopped"), Exit("")
        case Barred(why):
            return SessionState("stopped"), Exit(why)
        case ReloadAsked(why) if state.stage in ("offline", "waiting") or _offered(state):
            return SessionState("stopped"), Reload(why)
        # The task is dropped: the coordinator tells it again, if it still stands.
        case ConnectionLost() if state.stage != "stopped":
            attempt = state.attempt + 1
            return SessionState("offline", attempt), Connect(attempt)
        # The count of attempts stays until a poll or a task succeeds, so a coordinator that greets
        # and then refuses is not hammered.
        case Connected() if state.stage == "offline":
            return replace(state, stage="waiting"), Poll()
        # An empty answer is a success, too, and resets the attempts.
        case TaskReceived(None) if state.stage == "waiting":
            return SessionState("waiting"), Poll()
        case TaskReceived(task) if state.stage == "waiting" and task is not None:
            return replace(state, stage="working", task=task), _work(task)
        case Worked() if state.stage == "working":
            return SessionState("waiting"), Poll()
        case _:
            # Effects run one at a time, so any other event is a bug.
            raise LocalError(
                f"the agent brought {event!r} in stage {state.stage!r}; this is a bug in Staddle"
            )


def _offered(state: SessionState) -> bool:
    return state.stage == "working" and isinstance(state.task, JobOffered)


def _work(task: Task) -> Effect:
    match task:
        case JobOffered():
            return Decide(task)
        case RoundOpened():
            return TakePart(task)
        case JobFinished():
            return Conclude(task)

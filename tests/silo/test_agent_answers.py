"""What the agent answers to a job that is offered again and again."""

import asyncio
from types import SimpleNamespace

import pytest
from support.jobs import make_job

from staddle.errors import LocalError, RefusedError, UnwritableError
from staddle.proto import federation_pb2 as pb
from staddle.silo import agent as agents
from staddle.silo.admission import approvals
from staddle.silo.agent import Agent, Lane
from staddle.silo.session import (
    Barred,
    Connect,
    Connected,
    Decide,
    Exit,
    JobOffered,
    Poll,
    Reload,
    RoundOpened,
    StopAsked,
    TakePart,
    TaskReceived,
    Worked,
)

OFFER = JobOffered("job", "ab" * 32, b"signed")


@pytest.fixture
def agent(monkeypatch):
    """An agent without files, and what it records and answers."""
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0)
    made, done = Agent.__new__(Agent), []

    async def record_decision(record):
        done.append(("record", record.job, record.reasons))

    async def answer(job, digest, round_, kind, code):
        done.append((kind, code))

    async def admit(signed):
        done.append("admit")
        return SimpleNamespace(job=make_job("fedper"))

    made._declined, made._config = {}, None
    made._policy = SimpleNamespace(digest="", file=SimpleNamespace(allow=["a rule"]))
    made._roster = SimpleNamespace(coordinator=SimpleNamespace(id="coordinator"))
    made._gate = SimpleNamespace(
        session=SimpleNamespace(record_decision=record_decision, answer=answer)
    )
    monkeypatch.setattr(made, "_admit_with_weights", admit, raising=False)
    return SimpleNamespace(made=made, done=done)


@pytest.mark.parametrize("code", ["NOT_APPROVED", "WAITING"])
def test_a_job_that_nobody_approves_is_judged_and_recorded_once(agent, monkeypatch, code):
    """A coordinator offers it without end; whoever decides otherwise makes another agent."""

    def asked(*_):
        if code == "WAITING":
            raise RefusedError("coordinator", code, "waits for a person")
        return SimpleNamespace(answer="declined", recorded=lambda: None)

    monkeypatch.setattr(agents.approvals, "asked", asked)
    for _ in range(3):
        asyncio.run(agent.made._decide(OFFER))
    said = ("a person at this silo declined it",)
    recorded = [("record", "job", said)] * (code == "NOT_APPROVED")
    assert agent.done == ["admit", *recorded, *[("DECLINE", code)] * 3]


def told(*offers, **body):
    return pb.Task(open_offers=pb.OpenOffers(signed_sha256=offers), **body)


async def test_the_coordinators_list_of_offers_is_noted_once_it_differs(agent, monkeypatch):
    """An older coordinator has none: then whatever waits does so on."""
    offer, noted = pb.Offer(job="job", job_digest=bytes(32)), []
    answers = [pb.Task(), told(b"1"), told(b"1", offer=offer), told(nothing=pb.Nothing())]

    async def poll(in_hand):
        assert in_hand == []
        return answers.pop(0)

    made = agent.made
    made._config, made._open_offers = SimpleNamespace(directory="here"), None
    made._gate.session.poll, made._gate.session.jobs = poll, 1
    monkeypatch.setattr(made, "_renew", lambda: asyncio.sleep(0), raising=False)
    monkeypatch.setattr(agents.approvals, "sort_offers", lambda *said: noted.append(said) or {})
    while answers:
        made._lanes = (Lane(0),)
        await made._poll(*made._lanes)
    assert noted == [("here", {b"1"}), ("here", frozenset())]


async def test_no_two_lanes_work_on_one_job_whatever_the_coordinator_says(agent, monkeypatch):
    """It tells the others what is in hand, and they ask again where they are told the same."""
    made, asked = agent.made, []
    opened = pb.Round(job="job", job_digest=bytes(32), round=3)

    async def poll(in_hand):
        asked.append([(own.job, own.kind, own.round) for own in in_hand])
        return pb.Task(round=opened)

    made._lanes, made._freed = tuple(map(Lane, range(3))), asyncio.Event()
    made._gate.session.poll, made._gate.session.jobs = poll, 2
    monkeypatch.setattr(made, "_renew", lambda: asyncio.sleep(0), raising=False)
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(agents, "LONGEST_WAIT_SECONDS", 0)
    first, second, third = made._lanes
    task = (await made._poll(first)).task
    assert (task.job, task.round, first.task) == ("job", 3, task)
    for lane in (second, second, third):  # of three the coordinator gives two a task
        assert (await made._poll(lane), lane.task) == (TaskReceived(None), None)
    opened.round = 4  # the next of the job in hand
    assert await made._poll(second) == TaskReceived(None)
    first.task = None
    assert (await made._poll(second)).task == second.task
    in_hand = [("job", pb.TASK_KIND_ROUND, 3)]
    assert asked == [[], in_hand, in_hand, in_hand, []]


async def test_a_job_that_the_policy_forbids_by_now_waits_for_nobody(agent, monkeypatch, tmp_path):
    made, offer = agent.made, JobOffered("test", "ab" * 32, b"signed")
    made._config = SimpleNamespace(directory=tmp_path, admission=SimpleNamespace(approve="ask"))
    await made._decide(offer)
    assert len(list(tmp_path.rglob("offers/*.json"))) == 1
    made._declined = {}

    async def forbids(signed):
        raise RefusedError("coordinator", "POLICY", "no rule allows it")

    monkeypatch.setattr(made, "_admit_with_weights", forbids, raising=False)
    await made._decide(offer)
    assert list(tmp_path.rglob("offers/*.json")) == []
    assert list(approvals.declined(tmp_path)) == ["test"]


async def test_a_policy_without_a_rule_waits_for_people_and_one_with_rules_declines(
    agent, monkeypatch, tmp_path
):
    """Nothing is recorded while nobody has decided; the coordinator learns a code in both cases."""
    made, offer = agent.made, JobOffered("test", "ab" * 32, b"signed")
    made._config = SimpleNamespace(directory=tmp_path)

    async def forbids(signed):
        raise RefusedError("coordinator", "POLICY", "no rule")

    monkeypatch.setattr(made, "_admit_with_weights", forbids, raising=False)
    for rules, code in ((), "WAITING"), (("a rule",), "POLICY"):
        agent.done.clear()
        made._declined, made._policy = {}, SimpleNamespace(file=SimpleNamespace(allow=rules))
        await made._decide(offer)
        recorded = [("record", "test", ("no rule",))] * (code == "POLICY")
        assert agent.done == [*recorded, ("DECLINE", code)]
        assert list(approvals.declined(tmp_path)) == ["test"]


async def test_an_agent_stops_though_a_file_never_settles(agent, monkeypatch):
    monkeypatch.setattr(agents, "LOOK_SECONDS", 60)
    agent.made._stop = asyncio.Event()
    agent.made._stop.set()

    async def decide(offer):
        await asyncio.Event().wait()

    monkeypatch.setattr(agent.made, "_decide", decide, raising=False)
    async with asyncio.timeout(30):
        found = await agent.made._next(Lane(0), Decide(OFFER), str, lambda: True)
    assert found == StopAsked()


@pytest.fixture
def lanes(agent, monkeypatch):
    """An agent of two lanes: the first trains until ``done`` is set, the second polls."""
    made, begun, done = agent.made, asyncio.Semaphore(0), asyncio.Event()
    made._lanes, made._stop, made._freed = (Lane(0), Lane(1)), asyncio.Event(), asyncio.Event()
    made._why_reload, made._trainers = "", {}
    made._pool = SimpleNamespace(shutdown=lambda **_: None)
    made._blind = SimpleNamespace(leave_all=lambda: asyncio.sleep(0))
    made._gate.session.close = lambda: asyncio.sleep(0)
    found = SimpleNamespace(made=made, done=done, performed=[], polled=asyncio.Event().wait)

    async def perform(lane, effect):
        found.performed.append((lane.number, type(effect)))
        match effect:
            case Connect():
                return Connected()
            case Poll() if lane.number == 0 and lane.task is None and len(found.performed) < 9:
                return TaskReceived(RoundOpened("job", "ab" * 32, 0, 0, ()))
            case TakePart():
                begun.release()
                await done.wait()
                return Worked()
        begun.release()
        return await found.polled()

    async def both_at_work():
        for _ in made._lanes:
            await begun.acquire()

    found.both_at_work = both_at_work
    monkeypatch.setattr(made, "_perform", perform, raising=False)
    monkeypatch.setattr(agents, "LOOK_SECONDS", 0)
    return found


async def test_files_are_read_again_once_the_tasks_in_hand_are_done(lanes):
    """No further task begins meanwhile, also where the file is changed back."""
    changed = [""]
    async with asyncio.timeout(30):
        run = asyncio.create_task(lanes.made.run(lambda: changed[0], lambda: False))
        await lanes.both_at_work()
        changed[0] = "policy"
        while lanes.made._lanes[1].stage != "stopped":  # noqa: ASYNC110 nobody is told of it
            await asyncio.sleep(0)
        changed[0], before = "", len(lanes.performed)
        assert lanes.made._lanes[0].stage == "working"
        assert not run.done()
        lanes.done.set()
        assert await run == Reload("policy")
    assert len(lanes.performed) == before


async def test_what_fails_in_one_lane_ends_all_though_files_are_to_be_read_again(lanes):
    """A ledger that was rolled back shows in one: nothing more leaves in any."""
    made, fails = lanes.made, asyncio.Event()

    async def rolled_back():
        await fails.wait()
        raise LocalError("rolled back")

    lanes.polled = rolled_back
    async with asyncio.timeout(30):
        run = asyncio.create_task(made.run(str, lambda: False))
        await lanes.both_at_work()
        made._why_reload = "policy"  # as the next look at the files finds, in any lane
        fails.set()
        with pytest.raises(LocalError, match="rolled back"):
            await run


@pytest.mark.parametrize(("unsettled", "calls"), [(False, []), (True, ["hello", "settle"])])
async def test_a_lane_greets_again_only_for_an_upload_that_broke_since(agent, unsettled, calls):
    """Another lane has opened a session, which settled what had broken before it."""
    made, done = agent.made, []

    async def hello(jobs):
        done.append("hello")
        return 5

    async def settle():
        done.append("settle")
        return []

    made._lanes, made._greeted, made._gate.door = (Lane(0), Lane(1)), 2, asyncio.Lock()
    made._gate.session.hello, made._gate.settle = hello, settle
    made._gate.unsettled, made._config = unsettled, SimpleNamespace(coordinator="here:1")
    made._lanes[0].session = 1
    assert await made._connect(made._lanes[0], 0) == Connected()
    assert done == calls
    assert made._lanes[0].session == made._greeted


async def test_what_ends_one_lane_ends_all_and_says_why(lanes):
    async def barred():
        return Barred("an old roster")

    lanes.polled = barred
    async with asyncio.timeout(30):
        assert await lanes.made.run(str, lambda: False) == Exit("an old roster")
    lanes.made._stop, lanes.made._lanes = asyncio.Event(), (Lane(0), Lane(1))

    async def full():
        raise UnwritableError("no space left")

    lanes.polled = full
    async with asyncio.timeout(30):
        with pytest.raises(UnwritableError, match="no space left"):
            await lanes.made.run(str, lambda: False)


def test_a_job_is_judged_next_to_those_on_its_records_that_have_begun(agent):
    names = ("own", "begun", "offered", "elsewhere")
    jobs = {name: SimpleNamespace(name=name, dataset=name) for name in names}
    budgets = {**dict.fromkeys(names[:3], "budget"), "elsewhere": "another"}
    agent.made._admitted = {name: SimpleNamespace(job=job) for name, job in jobs.items()}
    agent.made._trainers = dict.fromkeys(("own", "begun", "elsewhere"))
    agent.made._policy = SimpleNamespace(on=lambda name: SimpleNamespace(dataset=name))
    agent.made._budgets = budgets
    assert agent.made._beside(jobs["own"]) == [jobs["begun"]]

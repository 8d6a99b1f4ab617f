import pytest

from staddle.coordinator.rpc.limits import (
    AT_ONCE,
    BURST,
    CALLS_PER_SECOND,
    OTHERS_AT_ONCE,
    Bucket,
    CallLimits,
)
from staddle.errors import RefusedError


def refused(limits, member, rpc, now):
    with pytest.raises(RefusedError) as caught:
        limits.enter(member, rpc, now)
    assert (caught.value.code, caught.value.peer) == ("LIMIT", member)
    return caught.value.why


def call(limits, member="a", rpc="Beat", now=0.0):
    limits.enter(member, rpc, now)
    limits.leave(member, rpc)


def test_a_bucket_gives_its_burst_and_fills_at_its_rate():
    bucket = Bucket(filled=5.0)
    assert [bucket.take(5.0) for _ in range(int(BURST))] == [True] * int(BURST)
    assert not bucket.take(5.0)
    assert not bucket.take(5.0 + 0.5 / CALLS_PER_SECOND)
    bucket = Bucket(tokens=0.0, filled=0.0)
    taken = sum(bucket.take(i / 1000) for i in range(1, 2001))
    assert taken in (99, 100)  # two seconds at 50 a second, in a thousand small steps


def test_a_refused_call_costs_no_token():
    bucket = Bucket(tokens=0.0, filled=0.0)
    assert not any(bucket.take(0.001 * i) for i in range(20))
    assert bucket.take(1 / CALLS_PER_SECOND + 1e-9)


def test_a_bucket_never_holds_more_than_its_burst():
    bucket = Bucket(filled=0.0)
    assert sum(bucket.take(1e6) for _ in range(int(BURST) + 10)) == BURST


def test_a_new_member_starts_full_however_late_it_comes():
    limits = CallLimits()
    for _ in range(int(BURST)):
        call(limits, now=1e9)
    assert "calls per second" in refused(limits, "a", "Beat", 1e9)


def test_calls_of_all_kinds_share_a_members_bucket():
    limits = CallLimits()
    for _ in range(int(BURST)):
        call(limits, "a")
    refused(limits, "a", "Beat", 0.0)
    call(limits, "b")
    limits = CallLimits()
    for number in range(int(BURST)):
        call(limits, rpc=("Beat", "Poll", "Upload", "Hello")[number % 4])
    refused(limits, "a", "Fetch", 0.0)


@pytest.mark.parametrize(
    ("rpc", "allowed"), [*AT_ONCE.items(), ("Beat", OTHERS_AT_ONCE), ("/other", OTHERS_AT_ONCE)]
)
def test_calls_of_one_kind_at_a_time(rpc, allowed):
    limits = CallLimits()
    for _ in range(allowed):
        limits.enter("a", rpc, 0.0)
    assert f"{allowed} {rpc} calls" in refused(limits, "a", rpc, 0.0)
    limits.enter("a", "Hello", 0.0)
    limits.enter("b", rpc, 0.0)
    limits.leave("a", rpc)
    limits.enter("a", rpc, 0.0)
    refused(limits, "a", rpc, 0.0)


def test_a_refused_call_is_not_counted_in_and_uses_up_the_bucket():
    limits = CallLimits()
    limits.enter("a", "Upload", 0.0)
    for _ in range(5):
        refused(limits, "a", "Upload", 0.0)
    limits.leave("a", "Upload")
    limits.enter("a", "Upload", 0.0)
    limits = CallLimits()
    limits.enter("a", "Upload", 0.0)
    for _ in range(int(BURST) - 1):
        assert "running already" in refused(limits, "a", "Upload", 0.0)
    assert "calls per second" in refused(limits, "a", "Upload", 0.0)


def test_nothing_stays_of_calls_that_are_over():
    limits = CallLimits()
    for number in range(50):
        call(limits, rpc=f"rpc-{number}")
    assert not limits.running


def test_one_of_each_call_that_carries_or_makes_much_a_member():
    assert {rpc for rpc, allowed in AT_ONCE.items() if allowed == 1} == {
        "Upload",
        "Fetch",
        "GroupKey",
        "Weights",
        "SubmitWeights",
    }

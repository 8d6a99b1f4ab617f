"""A round whose uploads leave in the clear: what is asked of the gate, and in which order."""

import asyncio
from types import SimpleNamespace

import pytest

from staddle.silo import plain_rounds
from staddle.silo.plain_rounds import PlainRounds

PLAN = SimpleNamespace(round=3)


class RecordingGate:
    def __init__(self):
        self.calls = []
        self.session = self

    async def fetch(self, plan):
        self.calls.append(("fetch", plan.round))
        return "delivered"

    async def upload_plain(self, declared, round_, contributions, cohort):
        self.calls.append(("upload", declared, round_, contributions, cohort))


@pytest.mark.parametrize("kept", [None, "kept"])
def test_what_was_trained_before_is_uploaded_without_a_second_training(monkeypatch, kept):
    monkeypatch.setattr(plain_rounds, "PAUSE_SECONDS", 0)
    gate = RecordingGate()

    async def train(delivered):
        gate.calls.append(("train", delivered))
        return "trained"

    asyncio.run(PlainRounds(gate).take_part("declared", PLAN, ("a", "b"), None, kept, train))
    before = [] if kept else [("fetch", 3), ("train", "delivered")]
    assert gate.calls == [*before, ("upload", "declared", 3, kept or "trained", ("a", "b"))]


def test_a_plain_round_is_never_half_in_memory():
    assert not PlainRounds(RecordingGate()).goes_on("digest", 3)

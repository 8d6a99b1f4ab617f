from dataclasses import replace

import pytest
from support import report_ledgers as ledgers
from support.ledgers import WORDS, first, intend_masked, open_ledger, private, stored, write_outcome

from staddle.errors import LocalError
from staddle.security.ledger import audit, messages
from staddle.security.ledger.messages import CONTROL, MESSAGE, Totals
from staddle.security.ledger.overview import Flow, flows, parts, view


def seen(path):
    return view(audit.verify(path), messages.records(path))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


@pytest.mark.parametrize("make", [ledgers.full, ledgers.nasty])
def test_flows_add_up_to_the_summary(path, make):
    make(path)
    found: dict = {}
    for flow, totals in flows(seen(path)).items():
        found.setdefault((flow.job, flow.part), Totals()).add(totals)
    for key, totals in messages.summary(path).items():
        assert found.pop(key) == totals
    assert found == {}


def test_flows_tell_outcomes_and_readers_apart(path):
    found = flows(seen(ledgers.full(path)))

    def totals(job, part, kind, readers, status):
        return found[Flow(job, part, kind, "coordinator", readers, "plain", status)]

    one = ("coordinator",)
    # Four whole messages and one that went on at byte 170 of 184, with 6 bytes of b and the metric.
    assert totals("lung-1", "model", "whole_model", one, "sent") == Totals(5, 9, 180, 4 * 176 + 6)
    assert totals("lung-1", "metrics", "metric", one, "sent") == Totals(5, 5, 5, 40)
    assert totals("lung-1", "model", "whole_model", one, "no outcome") == Totals(assumed=176)
    assert totals("lung-1", "model", "whole_model", one, "failed") == Totals(1, 2, 44, 176)
    assert totals("lung-1", MESSAGE, "", one, "unknown") == Totals(1, 0, 0, 30)
    shown = totals("lung-3", "metrics", "metric", ("coordinator", "silo-b"), "no outcome")
    assert shown == Totals(1, 1, 1, 8)
    assert totals(CONTROL, CONTROL, "", one, "sent") == Totals(8, 0, 0, 512)
    assert totals(CONTROL, CONTROL, "", one, "no outcome") == Totals(assumed=400)


def test_flows_of_a_message_have_the_readers_of_each_part(path):
    """Those of all that is in it, unless a tensor has its own."""
    releases = [
        replace(WORDS[0], part="hidden", readers=("silos",)),
        replace(WORDS[0], readers=("sum",)),
        WORDS[0],
    ]
    releases[2] = replace(WORDS[0], part="both", readers=("sum", "silos"))
    with open_ledger(path) as ledger:
        intend_masked(ledger, readers=["silos", "sum"], releases=releases, message_bytes=1000)
    (intent,) = (record for record in stored(path) if record["type"] == "egress.intent")
    assert [tensor["readers"] for tensor in intent["tensors"]] == [["silos"], ["sum"], []]
    found = {flow.part: flow.readers for flow in flows(seen(path))}
    assert found == {
        "hidden": ("silos",), releases[1].part: ("sum",), "both": ("silos", "sum"),
        MESSAGE: ("silos", "sum")
    }  # fmt: skip


def test_a_tensor_has_no_reader_that_its_message_has_not(path):
    with (
        open_ledger(path) as ledger,
        pytest.raises(LocalError, match="has readers sum, and a tensor of it also silos"),
    ):
        intend_masked(ledger, releases=[replace(WORDS[0], readers=("silos",))], message_bytes=1000)


def test_the_view_has_what_every_record_says(path):
    found = seen(ledgers.full(path))
    assert found.messages == list(messages.messages(path))
    assert (found.silo, found.jobs) == ("silo-a", ("lung-1", "lung-2", "lung-3"))
    assert [start.record.software for start in found.starts] == ["staddle 0.1.0", "staddle 0.2.0"]
    assert [event.record.type for event in found.events] == ["start", "stop", "start"]
    shown = [(at.record.job, at.record.type) for at in found.decisions]
    assert shown == [("lung-1", "job.accept"), ("lung-2", "job.decline"), ("lung-3", "job.accept")]
    assert [at.record.reasons for at in found.denials] == [("too large", "NaN")]
    got = [(session.opened.session, session.closed is None) for session in found.sessions]
    assert got == [("s1", False), ("s2", True)]
    assert found.received == {"lung-1": {0: 700, 1: 700, 2: 700, 3: 700}}
    assert found.first <= found.last
    sizes = {part: piece.bytes for part, piece in parts(found.messages[6]).items()}
    assert sizes == {"model": 176, "metrics": 8, MESSAGE: 30}
    assert found.budgets == []


def test_of_one_job_keeps_what_is_of_all(path):
    found = seen(ledgers.full(path)).of("lung-3")
    assert found.jobs == ("lung-3",)
    assert [m.intent.job for m in found.messages] == ["lung-3"]
    assert (len(found.denials), len(found.decisions)) == (1, 1)
    assert (len(found.starts), len(found.sessions), found.received) == (2, 2, {})


def test_what_is_written_after_the_check_is_not_in_the_view(path):
    ledgers.full(path)
    verified, before = audit.verify(path), messages.messages(path)
    cut = next(message for message in before if not message.digested)
    with open_ledger(path, "silo-a") as ledger:
        write_outcome(ledger, cut.seq, "unknown", 0)
        ledgers.contribute(ledger, "later")
    found = view(verified, messages.records(path))
    assert found.messages == list(before)
    assert "later" not in found.jobs


def test_another_ledger_than_the_verified_one_is_refused(path, tmp_path):
    verified = audit.verify(ledgers.full(path))
    other = ledgers.full(tmp_path / "other" / "ledger")
    with pytest.raises(LocalError, match="exchanged while it was read"):
        view(verified, messages.records(other))
    lines = first(path).read_bytes().splitlines(keepends=True)
    first(path).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(LocalError, match="exchanged"):
        view(verified, messages.records(path))


def test_records_end_with_an_error_where_the_ledger_breaks(path):
    ledgers.full(path)
    first(path).write_bytes(first(path).read_bytes().replace(b"too large", b"too small"))
    with pytest.raises(LocalError, match="does not follow the line before"):
        list(messages.records(path))


def test_an_empty_ledger_has_an_empty_view(path):
    open_ledger(path).close()
    found = seen(path)
    assert (found.silo, found.jobs, found.first, found.messages) == ("", (), "", [])
    assert flows(found) == {}


def test_heads_of_privacy_budgets_are_of_all_jobs(path):
    private(path)
    found = seen(path)
    assert [(at.seq, at.record.dataset, at.record.epsilon) for at in found.budgets] == [
        (1, "data", "0.2500"), (2, "data", "1.2500"), (6, "data", "1.7500"),
        (10, "scans", "0.5000"),
    ]  # fmt: skip
    assert found.of("j2").budgets == found.budgets

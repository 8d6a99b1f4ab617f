"""Secure sums in the ledger: masked messages, the protocol's own messages, ends and results."""

import pytest
from support import ledgers as book

from staddle.errors import LocalError
from staddle.security.faults import Code
from staddle.security.ledger import audit, export, messages
from staddle.security.ledger.messages import MESSAGE, PROTOCOL, Totals
from staddle.security.ledger.overview import Flow, flows, view
from staddle.security.ledger.records import MOST_WHY


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def test_a_secure_sum_is_recorded_as_it_is_told(path):
    book.summed(path)
    records = [book.body(record) for record in book.stored(path)]
    assert [(record["type"], record.get("kind")) for record in records] == [
        ("start", None), ("egress.protocol", "keys"), ("egress.protocol", "shares"),
        ("egress.intent", None), ("egress.digest", None), ("egress.protocol", "header"),
        ("egress.outcome", None), ("egress.protocol", "survival"), ("egress.protocol", "reveal"),
        ("secagg.sum", None), ("egress.protocol", "keys"), ("secagg.end", None),
        ("egress.protocol", "abandon"), ("egress.protocol", "end"), ("stop", None),
    ]  # fmt: skip
    of = {"job": "j1", "job_digest": book.HASH, "round": 3, "ctx": book.CTX}
    peer = {"id": "coordinator", "spki": book.HASH}
    assert records[1] == {
        "type": "egress.protocol", **of, "kind": "keys", "rpc": "/staddle.v1.Federation/Secure",
        "recipient": peer, "message": {"bytes": 100, "sha256": book.HASH},
    }  # fmt: skip
    masked = {
        "ctx": book.CTX, "attempt": 0, "members": list(book.MEMBERS), "threshold": 3,
        "colluders": 1, "clipped": 2,
    }  # fmt: skip
    intent = records[3]
    assert (intent["form"], intent["secagg"], intent["readers"]) == ("masked", masked, ["sum"])
    assert intent["message"] == {"bytes": book.MASKED_BYTES}
    assert [tensor["bytes"] for tensor in intent["tensors"]] == [160, 16, 8]
    assert records[4] == {
        "type": "egress.digest", "ref": 3, "tensors": [],
        "message": {"bytes": book.MASKED_BYTES, "sha256": book.HASH},
    }  # fmt: skip
    assert records[9] == {
        "type": "secagg.sum", **of, "survivors": ["silo-a", "silo-b", "silo-d"],
        "sha256": book.HASH,
    }  # fmt: skip
    assert records[11] == {
        "type": "secagg.end", **of, "round": 4, "ctx": "d8" * 32, "code": "SURVIVORS",
        "blame": "coordinator", "why": "U3 has 2 members",
    }  # fmt: skip
    assert audit.verify(path, key=book.public()).ok
    with book.open_ledger(path) as ledger:
        assert ledger.open_intents == ()
        told = sum(
            record["message"]["bytes"]
            for record in records
            if (record["type"], record.get("round")) == ("egress.protocol", 3)
        )
        assert told > 0
        assert ledger.sent(book.HASH, 3) == book.MASKED_BYTES + told


def test_each_record_of_the_protocol_is_durable_before_it_returns(path, monkeypatch):
    synced = []
    with book.open_ledger(path) as ledger:
        book.write_start(ledger, "staddle 0.1.0", book.HASH, book.HASH)
        monkeypatch.setattr("os.fdatasync", synced.append)
        for number, append in enumerate(
            (lambda: book.protocol(ledger, "keys"), lambda: book.end_sum(ledger)), 1
        ):
            append()
            assert len(synced) == number
        book.open_sum(ledger)
        assert len(synced) == 3


def test_a_long_reason_is_cut_and_fits(path):
    with book.open_ledger(path) as ledger:
        book.end_sum(ledger, "ø" * 10_000)
        book.end_sum(ledger, "", code=Code.STOPPED, blame="")
    assert [record["why"] for record in book.stored(path)] == ["ø" * MOST_WHY, ""]
    assert audit.verify(path).ok


BROKEN_SECAGG = {
    "form 'plain' and names an attempt": {"form": "plain"},
    "form 'masked' and names no attempt": {"secagg": None},
    **{
        f"members {', '.join(two)}, which is not sorted": {
            "secagg": book.secagg(members=two, threshold=1)
        }
        for two in (("silo-b", "silo-a"), ("silo-a", "silo-a"))
    },
    "members silo-b, silo-c, silo-d, which": {"secagg": book.secagg(members=book.MEMBERS[1:])},
    "and its cohort is silo-a, silo-b, silo-c$": {"cohort": book.MEMBERS[:3]},
    "4 members, fewer than its threshold of 5": {"secagg": book.secagg(threshold=5)},
    "tensor metric/correct has 8 bytes of 'int64'": {
        "releases": [*book.WORDS[:2], book.RELEASES[2]]
    },
    "do not fit into": {"message_bytes": book.BYTES - 1},
    "at byte 8, of which .* 0": {"message_bytes": book.MASKED_BYTES - 8, "offset": 8},
}


@pytest.mark.parametrize("said", BROKEN_SECAGG)
def test_the_writer_refuses_a_masked_intent_that_is_not_so(path, said):
    with book.open_ledger(path) as ledger:
        with pytest.raises(LocalError, match=said):
            book.intend_masked(ledger, **BROKEN_SECAGG[said])
        book.intend_masked(ledger)
    assert audit.verify(path).records == 1


def test_bytes_before_an_offset_are_of_the_same_attempt(path):
    with book.open_ledger(path) as ledger:
        book.intend(ledger)
        book.intend_masked(ledger)
        again = {"message_bytes": book.MASKED_BYTES - 8, "offset": 8}
        book.intend_masked(ledger, **again)
        with pytest.raises(LocalError, match=r"at byte 8, of which .* 0"):
            book.intend_masked(ledger, secagg=book.secagg(ctx="d8" * 32, attempt=1), **again)


def test_the_writer_refuses_digests_and_survivors_that_are_not_so(path):
    with book.open_ledger(path) as ledger:
        ref = book.intend_masked(ledger)
        why = "has tensors model/w, model/b, metric/correct, the intent none"
        with pytest.raises(LocalError, match=why):
            book.write_digest(ledger, ref, book.DIGESTS, book.message_digest(book.MASKED_BYTES))
        with pytest.raises(
            LocalError, match=f"has {book.BYTES} bytes, the intent {book.MASKED_BYTES}"
        ):
            book.write_digest(ledger, ref, (), book.message_digest(book.BYTES))
        book.write_digest(ledger, ref, (), book.message_digest(book.MASKED_BYTES))
        for survivors in (("silo-b", "silo-a"), ("silo-a", "silo-a"), ("silo-b", "silo-c"), ()):
            why = r"sum has survivors .*, which is not sorted, has a silo twice, or lacks"
            with pytest.raises(LocalError, match=why):
                book.open_sum(ledger, survivors)
        book.open_sum(ledger, ("silo-a",))


def test_the_verifier_finds_each_of_these_too(path):
    book.summed(path)
    good = [book.body(record) for record in book.stored(path)]
    intent, digest, opened, sent = good[3], good[4], good[9], good[1]
    masked, later, first = intent["secagg"], {"ref": len(good)}, intent["tensors"][0]
    backwards = {**masked, "members": list(book.MEMBERS[::-1])}
    hashed = [{"part": "model", "name": "w", "sha256": book.HASH}]
    wrong = {
        "form 'plain'": [{**intent, "form": "plain"}],
        "names no attempt": [{key: value for key, value in intent.items() if key != "secagg"}],
        "which is not sorted": [{**intent, "secagg": backwards}],
        "fewer than its threshold": [{**intent, "secagg": {**masked, "threshold": 9}}],
        "has 161 bytes of 'uint32'": [{**intent, "tensors": [{**first, "bytes": 161}]}],
        "has 160 bytes of 'float32'": [{**intent, "tensors": [{**first, "dtype": "float32"}]}],
        "has tensors model/w": [intent, {**digest, **later, "tensors": hashed}],
        "lacks this one": [{**opened, "survivors": ["silo-b"]}],
        "secagg": [{**intent, "secagg": {**masked, "ctx": "C7" * 32}}],
        "code": [{**good[11], "code": "OTHER"}],
        "kind": [{**sent, "kind": "upload"}],
        "sha256": [{**sent, "message": {"bytes": 3, "sha256": None}}],
        "why": [{**good[11], "why": "x" * (MOST_WHY + 1)}],
    }
    assert list(book.found_with(path, wrong)) == list(wrong)


def test_survivors_are_those_of_the_silo_whose_key_signed(path):
    """No record names the silo: the key does."""
    with book.open_log(path) as log:
        of = {"job": "j1", "job_digest": book.HASH, "round": 3, "ctx": book.CTX}
        log.append({"type": "secagg.sum", **of, "survivors": ["silo-b"], "sha256": book.HASH})
    assert audit.verify(path).ok
    (problem,) = audit.verify(path, key=book.public()).problems
    assert "survivors silo-b, which" in problem


def test_masked_tensors_count_by_part_and_the_protocol_by_itself(path):
    book.summed(path)
    totals = messages.summary(path, ("job", "method", "part", "recipient"))
    told = sum([*range(100, 105), *range(200, 203)])
    assert totals == {
        ("j1", "fedavg", "model", "coordinator"): Totals(1, 2, 44, 176),
        ("j1", "fedavg", "metric", "coordinator"): Totals(1, 1, 1, 8),
        ("j1", "fedavg", MESSAGE, "coordinator"): Totals(1, 0, 0, book.CANARIES),
        ("j1", PROTOCOL, PROTOCOL, "coordinator"): Totals(8, 0, 0, told),
    }


def test_behind_an_offset_tensors_count_in_full_where_canaries_may_lie(path):
    """60 of 224 bytes had come: at most 164 of those that go are of tensors, in any words."""
    with book.open_ledger(path) as ledger:
        book.intend_masked(ledger)
        book.intend_masked(ledger, message_bytes=book.MASKED_BYTES - 60, offset=60)
        book.intend_masked(ledger, message_bytes=20, offset=book.MASKED_BYTES - 20)
    _, then, last = (message.intent for message in messages.messages(path))
    found = [(tensor.name, size) for tensor, size in then.leaving(then.message.bytes)]
    assert found == [("w", 140), ("b", 16), ("correct", 8)]
    assert [(tensor.name, size) for tensor, size in last.leaving(20)] == [("b", 12), ("correct", 8)]
    # Of the first 50 bytes from the start, canaries are 40.
    whole = messages.messages(path)[0].intent
    assert [(tensor.name, size) for tensor, size in whole.leaving(50)] == [("w", 10)]
    totals = messages.summary(path)
    assert totals["j1", MESSAGE].assumed == book.CANARIES
    seen = sum(total.assumed for total in totals.values())
    assert seen == book.MASKED_BYTES + book.MASKED_BYTES - 60 + 20


def test_the_view_has_sums_and_its_flows_add_up(path):
    book.summed(path)
    with book.open_ledger(path) as ledger:
        book.give_blindly(ledger, job="j2")
        book.protocol(ledger, "keys", 7, job="j3")
    found = view(audit.verify(path), messages.records(path))
    assert found.jobs == ("j1", "j2", "j3")
    seen = [(at.seq, at.record.type, at.record.round) for at in found.sums]
    assert seen == [(9, "secagg.sum", 3), (11, "secagg.end", 4), (23, "secagg.sum", 3)]
    totals = flows(found)
    keys = ("j3", PROTOCOL, "keys", "coordinator", ("coordinator",), "plain", "no outcome")
    assert totals[Flow(*keys)] == Totals(1, bytes=7)
    model = ("j2", "model", "whole_model", "coordinator", ("sum",), "masked", "sent")
    assert totals[Flow(*model)] == Totals(1, 2, 44, 176)
    added: dict = {}
    for flow, more in totals.items():
        added.setdefault((flow.job, flow.part), Totals()).add(more)
    assert added == messages.summary(path)
    only = found.of("j3")
    assert ([at.seq for at in only.protocol], only.sums, only.messages) == ([24], [], [])


@pytest.mark.parametrize("redact", [False, True])
def test_an_export_of_the_job_has_all_of_them(path, redact):
    book.summed(path)
    data = b"".join(export.export(path, redact=redact, job="j1"))
    found = export.verify(data, book.public())
    assert found.seqs == tuple(range(1, 14))
    assert (b"survivors" in data) == (not redact)

from dataclasses import replace
from hashlib import sha256

import pytest
from support import ledgers as book
from support.ledgers import first

from staddle.errors import LocalError
from staddle.security.ledger import audit
from staddle.security.ledger import messages as ledger_view
from staddle.security.ledger.audit import ledger_folder
from staddle.security.ledger.messages import CONTROL, MESSAGE, Totals
from staddle.security.ledger.records import Applied, Paid, PolicyChange
from staddle.security.log.merkle import Tree
from staddle.security.log.segments import Reading


@pytest.fixture
def path(tmp_path):
    return tmp_path / "silo" / "ledger"


def reissued(path, size):
    """A checkpoint of the first records, by who has the log key."""
    tree = Tree(line.hash for line in Reading(path))
    (path / "checkpoint").write_bytes(bytes(book.signer().sign(size, tree.root(size))))


def test_one_of_each_record_verifies(path):
    last = book.full(path)
    found = audit.verify(path)
    assert found.ok
    assert (found.records, found.head, found.torn_bytes) == (11, last.leaf, 0)
    assert (found.open_intents, found.undigested, found.open_control) == ((), (), None)
    types = [record["type"] for record in book.stored(path)]
    assert types == [
        "start", "job.accept", "job.decline", "control.open", "ingress", "egress.intent",
        "egress.digest", "egress.outcome", "policy.deny", "control.close", "stop",
    ]  # fmt: skip


def test_intent_holds_what_the_rules_ask_for(path):
    book.full(path)
    intent = book.body(book.stored(path)[5])
    tensors = [
        {
            "part": r.part, "kind": r.kind, "name": r.name, "dtype": r.dtype,
            "shape": list(r.shape), "bytes": r.nbytes, "taint": "exact", "readers": [],
        }
        for r in book.RELEASES
    ]  # fmt: skip
    assert intent == {
        "type": "egress.intent", "silo": "silo-a", "job": "j1", "job_digest": book.HASH,
        "method": "fedavg", "round": 3, "attempt": 0, "purpose": "update",
        "rpc": "/staddle/Upload", "recipient": {"id": "coordinator", "spki": book.HASH},
        "readers": ["coordinator"], "form": "plain",
        "policy": {"file": book.HASH, "rule": "update", "decision": "allow"},
        "message": {"bytes": book.BYTES}, "offset": 0, "cohort": [], "secagg": None,
        "hidden": None, "dp": None, "packages": [], "tensors": tensors, "dataset": "",
    }  # fmt: skip


def test_intent_and_digest_are_durable_before_they_return(path, monkeypatch):
    synced = []
    with book.open_ledger(path) as ledger:
        monkeypatch.setattr("os.fdatasync", synced.append)
        ref = book.intend(ledger)
        assert len(synced) == 1
        book.write_digest(ledger, ref, book.DIGESTS, book.message_digest())
        assert len(synced) == 2
        book.write_outcome(ledger, ref, "sent", book.BYTES)
        assert len(synced) == 2


def test_writer_refuses_what_the_verifier_would(path):
    with book.open_ledger(path) as ledger:
        ref = book.intend(ledger)
        for call, said in [
            (lambda: book.write_digest(ledger, ref + 1, book.DIGESTS, book.message_digest()),
                "which is not an open intent"),
            (lambda: book.write_digest(ledger, ref, book.DIGESTS[:2], book.message_digest()),
                "has tensors model/w, model/b, the intent"),
            (lambda: book.write_digest(ledger, ref, book.DIGESTS[::-1], book.message_digest()),
                "has tensors metric/correct"),
            (lambda: book.write_digest(
                ledger, ref, book.DIGESTS, book.message_digest(book.BYTES + 1)),
                f"has {book.BYTES + 1} bytes, the intent {book.BYTES}"),
            (lambda: book.write_outcome(ledger, ref, "sent", book.BYTES),
                "'sent' without a digest"),
            (lambda: book.write_outcome(ledger, ref, "failed", book.BYTES + 1), "the intent has"),
            (lambda: book.write_outcome(ledger, ref + 9, "failed", 0), "not an open intent"),
            (lambda: book.intend(ledger, releases=book.RELEASES[:1] * 2), "names a tensor twice"),
            (lambda: book.intend(ledger, message_bytes=book.BYTES - 1), "do not fit into"),
            (lambda: book.intend(ledger, readers=[]), "no reader"),
            (lambda: book.intend(ledger, cohort=["silo-b", "silo-a"]),
                "cohort silo-b, silo-a, which is not sorted"),
            (lambda: book.intend(ledger, cohort=["silo-a", "silo-a"]), "has a silo twice"),
            (lambda: book.intend(ledger, cohort=["silo-b", "silo-c"]), "lacks this one"),
            (lambda: book.intend(ledger, message_bytes=book.BYTES - 9, offset=8),
                "of 175 bytes behind 8"),
            (lambda: book.intend(ledger, message_bytes=0, offset=book.BYTES + 1),
                f"at byte {book.BYTES + 1}, of which .* {book.BYTES}"),
            (lambda: book.intend(ledger, round_number=4, message_bytes=book.BYTES - 8, offset=8),
                "at byte 8, of which .* 0"),
            (lambda: book.write_control_close(ledger, 0, 1, 1), "not an open control session"),
        ]:  # fmt: skip
            with pytest.raises(LocalError, match=said):
                call()
        book.write_digest(ledger, ref, book.DIGESTS, book.message_digest())
        with pytest.raises(LocalError, match="second digest"):
            book.write_digest(ledger, ref, book.DIGESTS, book.message_digest())
        with pytest.raises(LocalError, match="with 5 of"):
            book.write_outcome(ledger, ref, "sent", 5)
        book.write_outcome(ledger, ref, "sent", book.BYTES)
        with pytest.raises(LocalError, match="not an open intent"):
            book.write_outcome(ledger, ref, "sent", book.BYTES)
        control = book.write_control_open(ledger, "s1", book.PEER, 10, 100).seq
        with pytest.raises(LocalError, match=r"'s1' .* is still open"):
            book.write_control_open(ledger, "s2", book.PEER, 10, 100)
        for messages, size in [(11, 0), (0, 101)]:
            with pytest.raises(LocalError, match="its cap is 10 and 100"):
                book.write_control_close(ledger, control, messages, size)
    assert audit.verify(path).ok
    assert audit.verify(path).records == 4


def test_verifier_finds_each_broken_rule(path):
    book.full(path)
    good = book.stored(path)
    intent, digest, outcome = (book.body(good[n]) for n in (5, 6, 7))
    control, close = book.body(good[3]), book.body(good[9])
    last = len(good)
    later = {"ref": last}
    wrong = {
        "not an open intent": [{**digest, "ref": 5}], "outcome refers to": [{**outcome, "ref": 0}],
        "second digest": [intent, {**digest, **later}, {**digest, **later}],
        "has tensors none": [intent, {**digest, **later, "tensors": []}],
        "bytes, the intent": [intent,
            {**digest, **later, "message": {"bytes": 1, "sha256": book.HASH}}],
        "without a digest": [intent, {**outcome, **later}], "is still open": [control, control],
        "not an open control session": [close],
        "its cap is": [control, {**close, **later, "messages": 101}],
        "several silos": [{**intent, "silo": "silo-b"}],
        "does not match any|unknown|tag": [{"type": "egress.secret"}],
        "bytes_sent": [{**outcome, "bytes_sent": -1}],
        "message": [{k: v for k, v in intent.items() if k != "message"}],
        "decision": [{**intent, "policy": {**intent["policy"], "decision": "deny"}}],
        "[Ee]xtra": [{**intent, "more": 1}],
        "valid string|shape": [{**intent, "tensors": [{**intent["tensors"][0], "shape": ["3"]}]}],
    }  # fmt: skip
    for said in book.found_with(path, wrong):
        if "several" not in said:
            with pytest.raises(LocalError):
                ledger_view.summary(path)
        with pytest.raises(LocalError):
            book.open_ledger(path)


def test_a_payload_goes_on_behind_its_offset(path):
    """170 of 184 bytes had arrived: 6 of b's 16 and the metric's 8 go; hashes are of the whole."""
    with book.open_ledger(path) as ledger:
        first = book.intend(ledger)
        book.write_outcome(ledger, first, "unknown", book.BYTES)
        assert ledger.sent(book.HASH, 3) == book.BYTES
        ref = book.intend(ledger, message_bytes=book.BYTES - 170, offset=170)
        assert ledger.sent(book.HASH, 3) == 2 * book.BYTES - 170
        with pytest.raises(LocalError, match=f"has 14 bytes, the intent {book.BYTES}"):
            book.write_digest(ledger, ref, book.DIGESTS, book.message_digest(book.BYTES - 170))
        book.write_digest(ledger, ref, book.DIGESTS, book.message_digest())
        with pytest.raises(LocalError, match="with 13 of 14"):
            book.write_outcome(ledger, ref, "sent", 13)
        book.write_outcome(ledger, ref, "sent", 14, "5c1f")
    assert audit.verify(path).ok
    first, then = (message.intent for message in ledger_view.messages(path))
    found = [(tensor.name, size) for tensor, size in first.leaving(book.BYTES)]
    assert found == [("w", 160), ("b", 16), ("correct", 8)]
    assert [(tensor.name, size) for tensor, size in first.leaving(165)] == [("w", 160), ("b", 5)]
    assert [(tensor.name, size) for tensor, size in then.leaving(14)] == [("b", 6), ("correct", 8)]
    assert [(tensor.name, size) for tensor, size in then.leaving(7)] == [("b", 6), ("correct", 1)]
    totals = ledger_view.summary(path)
    # What left before the restart is not known: its outcome names all that was declared.
    assert (totals["j1", "model"].bytes, totals["j1", "metric"].bytes) == (6, 8)
    assert (totals["j1", "model"].tensors, totals["j1", "model"].elements) == (1, 4)
    assert (totals["j1", "model"].assumed, totals["j1", "metric"].assumed) == (176, 8)


def test_heads_of_privacy_budgets_are_known_after_a_restart_too(path):
    with book.open_ledger(path) as ledger:
        assert ledger.privacy_heads == {}
    book.private(path)
    with book.open_ledger(path) as ledger:
        found = ledger.privacy_heads
        seen = {name: (head.size, head.epsilon, head.limit) for name, head in found.items()}
        assert seen == {"data": (7, "1.7500", "8"), "scans": (3, "0.5000", "1.5")}
        assert bytes.fromhex(found["data"].root) == bytes([7]) * 32
        book.spend(ledger, 9, "2")
        assert ledger.privacy_heads["data"].size == 9
        assert found["data"].size == 7
    assert audit.verify(path).ok


@pytest.mark.parametrize(
    ("size", "root", "words"),
    [(6, None, "has head 6 0606"), (7, b"x" * 32, "has head 7 7878.*rolled back or rewritten")],
)
def test_a_privacy_budget_that_shrank_or_changed_has_no_head_here(path, size, root, words):
    book.private(path)
    with book.open_ledger(path) as ledger:
        with pytest.raises(LocalError, match=words):
            book.spend(ledger, size, "0.1", root=root)
        book.spend(ledger, 7, "0.1")
        assert ledger.privacy_heads["data"].epsilon == "0.1"  # steps that were not taken came back


def test_what_is_dp_names_what_paid_and_nothing_else_does(path):
    wrong = {
        "has a tensor that is noised, and names nothing that paid for it": (0, ()),
        "has no tensor that is noised, and names what paid for it": (2, (2,)),
        "is paid by 7 of data set 'data', whose last head has 7 records": (0, (2, 7)),
    }
    book.private(path)
    with book.open_ledger(path) as ledger:
        for words, (at, ids) in wrong.items():
            with pytest.raises(LocalError, match=words):
                book.intend(ledger, releases=[replace(book.DP[at], ledger_ids=ids)], dataset="data")
        why = "is paid by 4 of data set 'scans', whose last head has 3 records"
        with pytest.raises(LocalError, match=why):
            book.intend(ledger, releases=book.DP, dataset="scans")
        with pytest.raises(LocalError, match="data set '', whose last head has 0 records"):
            book.intend(ledger, releases=book.DP)
        # records of one data set cost the budget of no other
        paid = Paid.of("data", book.DP)
        with pytest.raises(LocalError, match="of data set 'scans', paid by data set 'data'"):
            book.intend(ledger, releases=book.DP, dataset="scans", dp=paid)
        ref = book.intend(ledger, releases=book.DP, dataset="data")
    found = next(message for message in ledger_view.messages(path) if message.seq == ref)
    assert (found.intent.dp.dataset, found.intent.dp.ids) == ("data", (2, 4))


def test_what_is_unsettled_is_known_after_a_restart_too(path):
    with book.open_ledger(path) as ledger:
        book.send(ledger)
        cut, digested = book.intend(ledger), book.intend(ledger, round_number=4)
        place = book.write_digest(ledger, digested, book.DIGESTS, book.message_digest()).place
        before = ledger.unsettled
    with book.open_ledger(path) as ledger:
        assert ledger.unsettled == before
        first, second = ledger.unsettled
        assert (first.seq, first.intent.round, first.digest, first.place) == (cut, 3, None, None)
        assert (second.seq, second.intent.round, second.place) == (digested, 4, place)
        assert second.digest.message == book.message_digest()
        book.write_outcome(ledger, cut, "unknown", book.BYTES)
        assert ledger.unsettled == (second,)


def test_a_policy_is_durable_and_alone_decides_from_then_on(path, monkeypatch):
    texts = ["version = 1\n", "version = 1\r\n# \u00e9 \u2028"]
    digests = [sha256(text.encode()).hexdigest() for text in texts]
    applied = [Applied(file=digest, rule="update", decision="allow") for digest in digests]
    with book.open_ledger(path) as ledger:
        book.intend(ledger)  # a ledger that has no such record yet
        synced = []
        with monkeypatch.context() as patch:
            patch.setattr("os.fdatasync", synced.append)
            assert ledger.put_in_force(digests[0], texts[0])
        assert len(synced) == 1
        for other in ({}, {"policy": applied[1]}):
            with pytest.raises(LocalError, match=f"decided by policy .*, in force is {digests[0]}"):
                book.intend(ledger, **other)
        with pytest.raises(LocalError, match=f"decided by policy .*, in force is {digests[0]}"):
            book.write_policy_deny(
                ledger, job="j1", round_number=3, purpose="update", policy=book.HASH, reasons=["no"]
            )
        book.intend(ledger, policy=applied[0])
    with book.open_ledger(path) as ledger:
        assert ledger.put_in_force(digests[0], texts[0]) is None
        why = f"a text of digest {digests[0]}, and names {digests[1]}"
        with pytest.raises(LocalError, match=why):
            ledger.put_in_force(digests[1], texts[0])
        assert ledger.put_in_force(digests[1], texts[1])
        book.intend(ledger, policy=applied[1])
    assert audit.verify(path).ok
    changes = [record for record in book.stored(path) if record["type"] == "policy.change"]
    found = [(c["before"], c["after"], c["text"]) for c in changes]
    assert found == [(None, digests[0], texts[0]), (digests[0], digests[1], texts[1])]
    assert [change.text for _, change in ledger_view.of_type(path, PolicyChange)] == texts
    book.raw(path, book.body(changes[1]))
    problems = audit.verify(path).problems
    assert len(problems) == 1
    assert f"goes from policy {digests[0]}, in force is {digests[1]}" in problems[0]


def test_a_ledger_without_offsets_cohorts_and_secure_sums_is_read(path):
    book.full(path)
    later = ("offset", "cohort", "secagg")
    book.raw(
        path,
        {key: value for key, value in book.body(book.stored(path)[5]).items() if key not in later},
    )
    assert audit.verify(path).ok
    intent = ledger_view.messages(path)[-1].intent
    assert (intent.offset, intent.cohort, intent.secagg) == (0, (), None)


def test_broken_chain_is_a_problem_not_an_exception(path):
    book.full(path)
    data = first(path).read_bytes()
    first(path).write_bytes(data.replace(b"no rule", b"no rulf"))
    found = audit.verify(path)
    assert not found.ok
    assert "seg-00000001.jsonl: line 4 (seq 3" in found.problems[0]
    assert found.records == 3


def test_cut_off_records_and_a_changed_last_one_are_found_by_who_knows_a_leaf(path):
    last = book.full(path)
    data = first(path).read_bytes()
    known = {last.seq: last.leaf, 5: book.stored(path)[6]["prev"]}
    assert audit.verify(path, known).ok
    first(path).write_bytes(data[: data[:-1].rindex(b"\n") + 1])
    reissued(path, 10)
    # the folder alone cannot tell who has the log key: rule 29
    assert audit.verify(path, key=book.public()).ok
    found = audit.verify(path, known).problems
    assert found == ("ends before seq 10, which another party knows: records were cut off",)
    first(path).write_bytes(data.replace(b"asked to stop", b"asked to stay"))
    assert "another party knows it as" in audit.verify(path, known).problems[0]


def test_unfinished_messages_are_reported_and_counted_as_left(path):
    with book.open_ledger(path) as ledger:
        book.write_start(ledger, "staddle", book.HASH, book.HASH)
        book.send(ledger)
        cut = book.intend(ledger, round_number=4)  # no digest, no outcome
        failed = book.intend(ledger, round_number=5)
        book.write_outcome(ledger, failed, "failed", 0)
        half = book.intend(ledger, round_number=6, message_bytes=book.BYTES + 30)
        book.write_digest(ledger, half, book.DIGESTS, book.message_digest(book.BYTES + 30))
        book.write_control_open(ledger, "s1", book.PEER, 100, 1000)
        assert ledger.open_intents == (cut, half)
    found = audit.verify(path)
    assert found.ok
    assert (found.open_intents, found.undigested) == ((cut, half), (cut, failed))
    assert found.open_control == found.records - 1
    totals = ledger_view.summary(path)
    model, metric = totals["j1", "model"], totals["j1", "metric"]
    # Sent and "half" left. "Failed" handed nothing over. How far "cut" came is not known.
    assert (model.messages, model.tensors, model.elements, model.bytes) == (2, 4, 88, 352)
    assert model.assumed == 176
    assert (metric.messages, metric.bytes, metric.assumed) == (2, 16, 8)
    assert totals["j1", MESSAGE].bytes == 30
    assert totals[CONTROL, CONTROL] == Totals(assumed=1000)
    assert sum(total.bytes for total in totals.values()) == 2 * book.BYTES + 30


def test_what_is_measured_stands_apart_from_what_is_assumed(path):
    """By hand: w has 160 bytes, b 16 and correct 8, one after another."""
    cases = {
        "nothing": ("failed", 0),  # turned away before its first byte
        "in-w": ("unknown", 100),
        "in-b": ("unknown", 165),
        "restarted": ("unknown", book.BYTES),  # repeats what was declared: nobody knows
    }
    with book.open_ledger(path) as ledger:
        for number, (job, (status, sent)) in enumerate(cases.items()):
            ref = book.intend(ledger, job=job, round_number=number)
            book.write_outcome(ledger, ref, status, sent)
        book.intend(ledger, job="silent", round_number=9)
    assert audit.verify(path).ok
    assert ledger_view.summary(path) == {
        ("in-w", "model"): Totals(1, 1, 40, 100),
        ("in-b", "model"): Totals(1, 2, 44, 165),
        ("restarted", "model"): Totals(assumed=176),
        ("restarted", "metric"): Totals(assumed=8),
        ("silent", "model"): Totals(assumed=176),
        ("silent", "metric"): Totals(assumed=8),
    }
    handed = [message.handed for message in ledger_view.messages(path)]
    assert handed == [0, 100, 165, None, None]


def test_control_sessions_count_with_their_totals_and_a_start_abandons_one(path):
    book.full(path)
    with book.open_ledger(path) as ledger:
        book.write_control_open(ledger, "s2", book.PEER, 10, 100)  # and then the power fails
    with book.open_ledger(path) as ledger:
        book.write_start(ledger, "staddle", book.HASH, book.HASH)
        book.write_control_open(ledger, "s3", book.PEER, 10, 100)
    found = audit.verify(path)
    assert found.ok
    totals = ledger_view.summary(path)[CONTROL, CONTROL]
    assert (totals.messages, totals.bytes, totals.assumed) == (8, 512, 100 + 100)


def test_state_survives_a_restart(path):
    with book.open_ledger(path) as ledger:
        ref = book.intend(ledger)
    with book.open_ledger(path) as ledger:
        assert ledger.open_intents == (ref,)
        book.write_outcome(ledger, ref, "unknown", 0)
        assert ledger.open_intents == ()


def test_a_key_of_another_silo_than_the_records_name_is_a_problem(path):
    with book.open_ledger(path) as ledger:
        book.write_start(ledger, "staddle 0.1.0", book.HASH, book.HASH)
    assert audit.verify(path, key=book.public()).ok
    book.raw(path, {**book.body(book.stored(path)[0]), "silo": "silo-b"})
    problems = audit.verify(path, key=book.public()).problems
    assert any("records of silo silo-b, and the key is of" in problem for problem in problems)


def test_another_silos_ledger_is_refused(path):
    book.full(path)
    why = r"signed by none of the keys that are trusted here .*silo-b"
    with pytest.raises(LocalError, match=why):
        book.open_ledger(path, "silo-b")
    why = r"signed by none of the keys that are trusted here .*silo-a"
    with pytest.raises(LocalError, match=why):
        book.open_ledger(path, key=book.OTHER_KEY)
    book.raw(path, {**book.body(book.stored(path)[0]), "silo": "silo-b"})
    with pytest.raises(LocalError, match="record is of silo 'silo-b', this is 'silo-a'"):
        book.open_ledger(path)


def test_torn_tail_is_reported_then_recovered(path):
    book.full(path)
    with first(path).open("ab") as file:
        file.write(b'{"half')
    found = audit.verify(path)
    assert (found.ok, found.torn_bytes, found.records) == (True, 6, 11)
    book.open_ledger(path).close()
    seen = book.body(book.stored(path)[-1])
    assert seen == {"type": "recovery", "dropped_bytes": 6, "last_good_seq": 10}
    assert audit.verify(path).ok


def test_failed_disk_blocks_the_ledger(path, monkeypatch):
    ledger = book.open_ledger(path)
    with monkeypatch.context() as patch:

        def fail(*args):
            raise OSError(28, "No space left on device")

        patch.setattr("os.write", fail)
        with pytest.raises(LocalError, match="No space left"):
            book.intend(ledger)
    with pytest.raises(LocalError, match="takes no more records"):
        book.intend(ledger)
    ledger.close()
    assert audit.verify(path).records == 0


def test_ledger_is_found_by_the_silos_folder_or_its_own(path, tmp_path):
    book.full(path)
    assert ledger_folder(path.parent) == ledger_folder(path) == path
    why = r"no ledger here, in 'ledger' or in 'state/ledger'; name a silo's folder"
    with pytest.raises(LocalError, match=why):
        ledger_folder(tmp_path)
    path.parent.rename(tmp_path / "state")  # as the demo lays a silo's folder out
    for place in (tmp_path, tmp_path / "state", tmp_path / "state" / "ledger"):
        assert ledger_folder(place) == tmp_path / "state" / "ledger"
    found = audit.verify(tmp_path / "gone")
    assert not found.ok


def test_messages_tell_what_became_of_each(path):
    book.full(path)
    (message,) = ledger_view.messages(path)
    found = (message.seq, message.status, message.receipt, message.digested)
    assert found == (5, "sent", "5c1f", True)

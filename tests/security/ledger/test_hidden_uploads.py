"""Padded and rotated messages in the ledger, each of one part beside its round's masked one."""

import hashlib
import json

import pytest
from support import ledgers as book

from staddle.errors import LocalError
from staddle.files.documents import canonical_json
from staddle.security.ledger import audit, export, messages
from staddle.security.ledger.messages import MESSAGE, PROTOCOL, Totals
from staddle.security.ledger.overview import Flow, flows, view
from staddle.security.ledger.records import HiddenBinding
from staddle.security.policy.release import Release


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


GOLDEN_PADDED = (
    '{"attempt":0,"cohort":["silo-a","silo-b","silo-c","silo-d"],"dataset":"","dp":null,'
    '"form":"padded",'
    f'"hidden":{{"ctx":"{"00" * 32}","number":0}},'
    f'"job":"j1","job_digest":"{book.HASH}","message":{{"bytes":352}},'
    f'"method":"fedavg","offset":0,"packages":[],"policy":{{"decision":"allow","file":"{book.HASH}","rule":"update"}},"purpose":"update",'
    f'"readers":["mix"],"recipient":{{"id":"coordinator","spki":"{book.HASH}"}},"round":0,"rpc":"/staddle/Upload",'
    '"secagg":null,"silo":"silo-a","tensors":[{"bytes":320,"dtype":"uint64","kind":"backbone","name":"w",'
    '"part":"extractor","readers":[],"shape":[10,4],"taint":"exact"},'
    '{"bytes":32,"dtype":"uint64","kind":"backbone","name":"b",'
    '"part":"extractor","readers":[],"shape":[4],"taint":"exact"}],"type":"egress.intent"}'
)
GOLDEN_ROTATED = (
    '{"attempt":0,"cohort":["silo-a","silo-b","silo-c","silo-d"],"dataset":"","dp":null,"form":"rotated",'
    f'"hidden":{{"ctx":"{"10" * 32}","number":0}},'
    f'"job":"j1","job_digest":"{book.HASH}","message":{{"bytes":60}},'
    f'"method":"fedavg","offset":0,"packages":[],"policy":{{"decision":"allow","file":"{book.HASH}","rule":"update"}},"purpose":"update",'
    f'"readers":["gram"],"recipient":{{"id":"coordinator","spki":"{book.HASH}"}},"round":0,"rpc":"/staddle/Upload",'
    '"secagg":null,"silo":"silo-a","tensors":[{"bytes":60,"dtype":"float32","kind":"classifier_rows","name":"rows",'
    '"part":"heads","readers":[],"shape":[3,5],"taint":"exact"}],"type":"egress.intent"}'
)
GOLDEN_CONTRIBUTION = (
    f'{{"ctx":"{"e0" * 32}","job":"j1","job_digest":"{book.HASH}","kind":"contribution",'
    f'"message":{{"bytes":300,"sha256":"{book.HASH}"}},"recipient":{{"id":"coordinator","spki":"{book.HASH}"}},"round":0,'
    '"rpc":"/staddle.v1.Federation/Contribute","type":"egress.protocol"}'
)


def test_the_records_of_a_keyed_job_have_these_bytes(path):
    book.keyed(path)
    records = [book.body(record) for record in book.stored(path)]
    assert canonical_json(records[1]).decode() == GOLDEN_CONTRIBUTION
    assert canonical_json(records[2]).decode() == GOLDEN_PADDED
    assert canonical_json(records[6]).decode() == GOLDEN_ROTATED
    whole = {"bytes": book.PADDED_BYTES, "sha256": book.HASH}
    assert records[3] == {"type": "egress.digest", "ref": 2, "tensors": [], "message": whole}
    assert (records[5]["kind"], records[5]["ctx"]) == ("padded", records[2]["hidden"]["ctx"])
    assert records[7] == {**records[3], "ref": 6, "message": {**whole, "bytes": 60}}
    found = audit.verify(path, key=book.public())
    assert (found.problems, found.open_intents) == ((), ())
    assert found.undigested == (14,)  # the padded upload that broke
    with book.open_ledger(path) as ledger:
        assert [ledger.sent(book.HASH, number) for number in (0, 1)] == [
            # with what was given to the key, and the word
            book.PADDED_BYTES + book.ROTATED_BYTES + book.MASKED_BYTES + 300 + 500,
            2 * book.PADDED_BYTES - 64 + book.ROTATED_BYTES + book.MASKED_BYTES + 500,
        ]
        assert [
            ledger.attempts(book.HASH, number, part)
            for part in ("extractor", "heads", "")
            for number in (0, 1)
        ] == [1, 2, 1, 1, 1, 1]
        assert ledger.attempts(book.HASH, 0, "other") == 0
        assert ledger.contributed(book.HASH)
        assert not ledger.contributed("00" * 32)


def part(*releases, name="other"):
    return [Release(name, r.kind, r.name, r.dtype, r.shape, r.form) for r in releases]


BROKEN = {
    "form 'padded' and names no version": {"hidden": None},
    "form 'plain' and names a version": {"form": "plain"},
    "form 'padded' and names an attempt": {"secagg": book.secagg()},
    "is padded and of part none; each part": {"releases": [], "message_bytes": 0},
    "is padded and of part extractor, other; each": {
        "releases": [*book.PADDED_WORDS, *part(*book.PADDED_WORDS)],
        "message_bytes": 2 * book.PADDED_BYTES,
    },
    "is padded and of 353 bytes, and its tensors are 352": {"message_bytes": book.PADDED_BYTES + 1},
    "do not fit into": {"message_bytes": book.PADDED_BYTES - 1},
    **{
        f"extractor/w has 160 bytes of '{dtype}'": {
            "releases": [Release("extractor", "backbone", "w", dtype, (10, 4))],
            "message_bytes": 160,
        }
        for dtype in ("float32", "uint32")
    },
    "at byte 8, of which .* 0": {"message_bytes": book.PADDED_BYTES - 8, "offset": 8},
}


@pytest.mark.parametrize("said", BROKEN)
def test_the_writer_refuses_a_padded_intent_that_is_not_so(path, said):
    with book.open_ledger(path) as ledger:
        with pytest.raises(LocalError, match=said):
            book.intend_padded(ledger, **BROKEN[said])
        book.intend_padded(ledger)
    assert audit.verify(path).records == 1


def test_the_writer_refuses_a_rotated_intent_that_is_not_so(path):
    wide = [Release("heads", "classifier_rows", "rows", "uint64", (3, 5))]
    both, size = [*book.VECTORS, *part(*book.VECTORS)], 2 * book.ROTATED_BYTES
    with book.open_ledger(path) as ledger:
        for said, changes in {
            "form 'rotated' and names no version": {"hidden": None},
            "is rotated and of 61 bytes, and its tensors are 60": {"message_bytes": 61},
            "is rotated and has number 1": {"number": 1},
            "heads/rows has 120 bytes of 'uint64'": {"releases": wide, "message_bytes": size},
            "is rotated and of part heads, other": {"releases": both, "message_bytes": size},
        }.items():
            with pytest.raises(LocalError, match=said):
                book.intend_rotated(ledger, **changes)
        book.intend_rotated(ledger)


def test_a_number_is_of_one_version_of_a_part_and_they_grow(path):
    other = "f7" * 32
    with book.open_ledger(path) as ledger:
        book.intend_padded(ledger, book.VERSION, 3)
        book.intend_padded(
            ledger, book.VERSION, 3, message_bytes=book.PADDED_BYTES - 64, offset=64
        )  # resumed
        for number, ctx in ((3, other), (2, other), (2, book.VERSION), (4, book.VERSION)):
            why = f"version {number} of part 'extractor' with .*, after version 3 with"
            with pytest.raises(LocalError, match=why):
                book.intend_padded(ledger, ctx, number)
        book.intend_padded(ledger, other, 0, releases=part(*book.PADDED_WORDS))
        book.intend_padded(ledger, other, 0, job_digest="cd" * 32)
        book.intend_padded(ledger, other, 9)
    with (
        book.open_ledger(path) as ledger,
        pytest.raises(LocalError, match=r"version 3 .*, after version 9"),
    ):
        book.intend_padded(ledger, book.VERSION, 3)


def test_bytes_before_an_offset_are_of_the_same_version_or_use(path):
    with book.open_ledger(path) as ledger:
        book.intend(ledger)
        book.intend_masked(ledger)
        book.intend_padded(ledger)
        book.intend_rotated(ledger)
        book.intend_padded(ledger, message_bytes=8, offset=book.PADDED_BYTES - 8)
        book.intend_rotated(ledger, message_bytes=4, offset=book.ROTATED_BYTES - 4)
        for intent, ctx, number in (
            (book.intend_padded, "f7" * 32, 1),
            (book.intend_rotated, "f8" * 32, 0),
        ):
            size = book.PADDED_BYTES if intent is book.intend_padded else book.ROTATED_BYTES
            with pytest.raises(LocalError, match=r"at byte 4, of which .* 0"):
                intent(ledger, ctx, number, message_bytes=size - 4, offset=4)
    last = [message.intent for message in messages.messages(path)][-2:]
    found = [[(tensor.name, left) for tensor, left in intent.leaving(8)] for intent in last]
    assert found == [[("b", 8)], [("rows", 4)]]


def test_no_tensor_of_a_padded_or_rotated_message_has_a_hash(path):
    with book.open_ledger(path) as ledger:
        for ref, size, names in (
            (book.intend_padded(ledger), book.PADDED_BYTES, "model/w, model/b, metric/correct"),
            (book.intend_rotated(ledger), book.ROTATED_BYTES, "model/w"),
        ):
            with pytest.raises(LocalError, match=f"has tensors {names}, the intent none"):
                book.write_digest(
                    ledger, ref, book.DIGESTS[: names.count("/")], book.message_digest(size)
                )
            book.settle(ledger, ref, size)
    assert audit.verify(path).ok


def test_the_verifier_finds_each_of_these_too(path):
    book.keyed(path)
    good = [book.body(record) for record in book.stored(path)]
    padded, rotated = good[2], good[6]
    again = {**padded, "hidden": {"ctx": "f7" * 32, "number": 9}}
    other = {"hidden": {"ctx": "f8" * 32, "number": 9}}
    narrow = [{**padded["tensors"][0], "dtype": "uint32", "bytes": 160}]
    rows = [{"part": "heads", "name": "rows", "sha256": book.HASH}]
    wrong = {
        "names a version": [{**padded, "form": "plain"}],
        "names no version": [{key: value for key, value in rotated.items() if key != "hidden"}],
        "after version 1": [padded],
        "version 9 .* after version 9": [again, {**again, **other}],
        "has 160 bytes of 'uint32'": [{**again, "tensors": narrow, "message": {"bytes": 160}}],
        "is rotated and of 61": [{**rotated, "message": {"bytes": 61}}],
        "has tensors heads/rows, the intent none": [
            rotated, {**good[7], "ref": len(good), "tensors": rows}
        ],
        "resumes at byte 8, of which earlier .* declared 0": [
            {**again, "offset": 8, "message": {"bytes": book.PADDED_BYTES - 8}}
        ],
        "hidden": [{**again, "hidden": {"ctx": "F7" * 32, "number": 9}}],
        "kind": [{**good[1], "kind": "key"}],
    }  # fmt: skip
    assert list(book.found_with(path, wrong)) == list(wrong)


def test_parts_count_by_what_crosses(path):
    book.keyed(path)
    totals = messages.summary(path, ("part",))
    assert totals == {
        # 64 bytes of one left, and the rest of it with the next message.
        ("extractor",): Totals(3, 5, 128, 2 * book.PADDED_BYTES),
        ("heads",): Totals(2, 2, 30, 2 * book.ROTATED_BYTES), ("model",): Totals(2, 4, 88, 2 * 176),
        ("metric",): Totals(2, 2, 2, 16), (MESSAGE,): Totals(2, 0, 0, 80),
        (PROTOCOL,): Totals(5, bytes=300 + 2 * 500),
    }  # fmt: skip


def test_the_view_tells_who_reads_which_part(path):
    book.keyed(path)
    found = flows(view(audit.verify(path), messages.records(path)))
    peer = "coordinator"
    padded = ("j1", "extractor", "backbone", peer, ("mix",), "padded")
    assert found[Flow(*padded, "sent")].bytes == 2 * book.PADDED_BYTES - 64
    assert found[Flow(*padded, "unknown")] == Totals(1, 1, 40, 64)
    rotated = ("j1", "heads", "classifier_rows", peer, ("gram",), "rotated")
    assert found[Flow(*rotated, "sent")].messages == 2
    words = ("j1", PROTOCOL, "contribution", peer, (peer,), "plain")
    assert found[Flow(*words, "no outcome")].bytes == 300
    seen = sum(totals.bytes for totals in found.values())
    assert seen == sum(t.bytes for t in messages.summary(path).values())


@pytest.mark.parametrize("redact", [False, True])
def test_an_export_of_the_job_has_all_of_them(path, redact):
    book.keyed(path)
    data = b"".join(export.export(path, redact=redact, job="j1"))
    found = export.verify(data, book.public())
    assert found.seqs == tuple(range(1, len(book.stored(path)) - 1))
    exported = [json.loads(line).get("record", {}) for line in data.splitlines()[1:]]
    seen = [r["hidden"]["number"] for r in exported if r.get("hidden")]
    assert seen == ([] if redact else [0, 0, 1, 1, 0])


def test_an_export_of_a_job_has_the_policies_that_were_in_force_during_it(path):
    with book.open_ledger(path) as ledger:
        for said in ("older", "in force", "j1", "j2", "tightened", "widened", "j1", "later", "j2"):
            if said in ("j1", "j2"):
                book.write_job_accept(ledger, said, book.HASH, "operator-1")
            else:
                ledger.put_in_force(hashlib.sha256(said.encode()).hexdigest(), said)

    def names(job):
        lines = b"".join(export.export(path, redact=False, job=job)).splitlines()[1:]
        exported = [json.loads(line)["record"] for line in lines]
        return [record.get("text", record.get("job")) for record in exported]

    assert names("j1") == ["in force", "j1", "tightened", "widened", "j1"]
    assert names("j2") == ["in force", "j2", "tightened", "widened", "later", "j2"]
    assert names("j3") == []
    redacted = b"".join(export.export(path, redact=True, job="j1"))
    assert export.verify(redacted, book.public()).seqs[0] == 1


def test_an_older_ledger_has_no_such_field_and_may_go_on(path):
    with book.open_ledger(path) as ledger:
        book.intend(ledger)
    (record,) = (book.body(each) for each in book.stored(path))
    del record["hidden"]
    with book.open_log(path.parent / "older") as log:
        log.append(record)
    with book.open_ledger(path.parent / "older") as ledger:
        assert ledger.attempts(book.HASH, 3, "") == 1
        book.intend_padded(ledger, hidden=HiddenBinding(ctx=book.USE, number=0))
        assert book.intend(ledger, releases=book.RELEASES) == 2
    assert audit.verify(path.parent / "older").ok

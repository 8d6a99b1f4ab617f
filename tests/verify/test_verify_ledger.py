"""A ledger's folder through the one file and through the package: the same verdict on each, and the
right one.
"""

import json
import os
import re
import subprocess
import sys
from base64 import b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support import ledgers
from support.ledgers import (
    MASKED_BYTES,
    PADDED_BYTES,
    ROTATED_BYTES,
    intend_masked,
    keyed,
    open_ledger,
    public,
    summed,
    write_delivered,
    write_job_decline,
    write_refused,
    write_serving,
    write_start,
    write_stop,
)
from support.lone_verifier import (
    HASH,
    HIDDEN,
    MASKED,
    ORIGIN,
    PADDED,
    PEER,
    SECAGG,
    SIZE,
    TENSORS,
    WORDS,
    applied,
    chained,
    change,
    closing,
    denied,
    digest,
    head,
    intent,
    leaf,
    masked,
    of_sum,
    opening,
    outcome,
    padded,
    private,
    root,
    rotated,
    signed,
    spelt,
    start,
    store,
)

from staddle.errors import LocalError, ProofError
from staddle.security.faults import Code
from staddle.security.ledger import audit, messages
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.ledger.records import MessageDigest, Received
from staddle.security.log import note
from staddle.security.log.head import Signer
from staddle.security.log.merkle import EMPTY_ROOT
from staddle.security.log.note import SignatureKind, VerifierKey, cosign

KEY, OTHER, WITNESS = (
    Ed25519PrivateKey.from_private_bytes(bytes(range(n, n + 32))) for n in (0, 32, 64)
)
PUBLIC = VerifierKey(ORIGIN, SignatureKind.ED25519, KEY.public_key().public_bytes_raw())
STOP = {"type": "stop", "reason": "asked to stop"}
DECLINE = {"type": "job.decline", "job": "j3", "job_digest": HASH, "signer": "operator-1"}
PERSON = {"by": "anna", "signed": HASH, "time": "2026-11-20T21:29:00+00:00"}
SMALL = chained(
    [intent(tensors=TENSORS[1:2], message={"bytes": 16}), outcome(0, status="failed", bytes_sent=4)]
)
RECORDS = [
    start(),
    {"type": "job.accept", "job": "j1", "job_digest": HASH, "signer": "operator-1", "person": None},
    opening(),
    {"type": "ingress", "job": "j1", "round": 3, "purpose": "delivery", "rpc": "/x", "sender": PEER}
    | {"message": {"bytes": 5, "sha256": HASH}},
    intent(),
    digest(4),
    outcome(4, receipt="5c1f"),
    denied(HASH),
    closing(2),
    intent(round=4, message={"bytes": 200}),
    outcome(9, status="unknown", bytes_sent=7),
    intent(round=4, offset=170, message={"bytes": 14}, job="j2")
    | {"recipient": {"id": "hospital-b", "spki": HASH}},
    opening(session="s2"),
    {**DECLINE, "reasons": ["x" * 2000], "person": PERSON},
    {"type": "recovery", "dropped_bytes": 7, "last_good_seq": -1},
    {"type": "key.rotate", "old": str(PUBLIC), "new": "x"},
    {"type": "witness", "by": "hospital-b", "size": 3, "root": HASH},
    STOP,
]


LINES = chained(RECORDS)


@pytest.fixture
def same(tool, tmp_path):
    """Stores a ledger and asks both; the one verdict that they must have, True if it holds."""

    def verdict(segments, note_=None, held=(), prepare=None, key=PUBLIC):
        folder = store(tmp_path / "ledger", segments, note_)
        if prepare:
            prepare(folder)
        options = []
        for number, data in enumerate(held):
            path = tmp_path / f"held-{number}"
            path.write_bytes(data)
            options += ["--checkpoint", path]
        try:
            notes = {str(number): note.parse(data) for number, data in enumerate(held)}
            theirs = audit.verify(folder, key=key, witnessed=notes).ok
        except (LocalError, ProofError):
            theirs = False
        status, out = tool("ledger", folder, "--key", key, *options)
        verdict.out = out
        missing = note_ is None and status == 2  # a file that is not there is not read wrongly
        assert theirs == (status == 0), (theirs, out)
        assert status in (0, 1) or missing, out
        return theirs

    return verdict


def test_a_ledger_holds_however_it_is_cut_into_segments(same):
    for cut in range(1, len(LINES)):
        assert same([LINES[:cut], LINES[cut:]], signed(LINES, KEY)), same.out
    assert same(
        [[line] for line in LINES],
        signed(LINES[:7], KEY),
        [signed(LINES[:n], KEY) for n in (0, 1, 4, 17)],
    )
    assert same([LINES, []], signed(LINES, KEY))
    assert same([], signed([], KEY))


@pytest.mark.parametrize(("key", "status"), [(KEY, 0), (Ed25519PrivateKey.generate(), 1)])
def test_who_reads_no_further_gets_the_verdict_and_no_error(tool, tmp_path, key, status):
    """As in ``staddle_verify.py … | head -1``."""
    folder, (ours, theirs) = store(tmp_path / "ledger", [LINES], signed(LINES, key)), os.pipe()
    os.close(ours)
    command = [sys.executable, "-I", tool.file, "ledger", folder, "--key", str(PUBLIC)]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (status, b"")


def test_what_is_said_of_a_ledger(tool, tmp_path):
    folder = store(tmp_path / "ledger", [LINES[:9], LINES[9:]], signed(LINES[:12], KEY))
    held = tmp_path / "held"
    held.write_bytes(signed(LINES[:5], KEY))
    status, found = tool.json("ledger", folder, "--key", PUBLIC, "--checkpoint", held)
    assert (status, found["holds"]) == (0, True)
    assert [check["verdict"] for check in found["checks"]] == ["PASS"] * 6
    assert (found["records"], found["signed"], found["held"]) == (18, 12, 5)
    shown = "the first 12 of 18 records are those that the holder of the key signed"
    assert shown in found["shown"]
    assert "cut no records off and rewrote none behind the first 5;" in found["not_shown"]
    assert found["checks"][5]["found"].startswith("3 messages; 2 have no digest: bytes that")
    _, out = tool("ledger", folder, "--key", PUBLIC)
    assert out.startswith(
        "1 PASS  files: 2 segments and a checkpoint\n2 PASS  checkpoint: of 12 records"
    )
    assert (
        "left: job 'j2', part 'metric', to 'hospital-b': 0 messages, 0 tensors, 0 elements, 0"
        " bytes, 8 assumed" in out
    )
    assert "rewrote none anywhere, since no other party's checkpoint was given;" in out


def counted(tool, folder, key, *by):
    """What left, as the one file counts it: it must be what the package counts."""
    status, found = tool.json("ledger", folder, "--key", key)
    assert status == 0
    ours = {tuple(row[name] for name in by): list(row.values())[3:] for row in found["left"]}
    assert ours == {
        key: [totals.messages, totals.tensors, totals.elements, totals.bytes, totals.assumed]
        for key, totals in messages.summary(folder, by).items()
    }
    return ours


def test_what_left_is_what_the_package_counts(tool, tmp_path):
    folder = store(tmp_path / "ledger", [LINES], signed(LINES, KEY))
    ours = counted(tool, folder, PUBLIC, "job", "part", "recipient")
    assert ours["j1", "model", "coordinator"] == [2, 3, 84, 183, 0]
    assert ("j1", "(message)", "coordinator") not in ours  # it broke after 7 of 200 bytes
    assert ours["j2", "model", "hospital-b"] == [0, 0, 0, 0, 6]
    assert ours["(control)", "(control)", "coordinator"] == [8, 0, 0, 512, 1000]


def test_a_message_that_was_cut_short_counts_as_the_package_counts_it(tool, tmp_path):
    """By hand: w has 160 bytes, b 16 and correct 8, one after another."""
    cut = (("failed", 0), ("unknown", 100), ("unknown", 165), ("unknown", 184))
    with open_ledger(tmp_path / "ledger") as ledger:
        for number, (status, sent) in enumerate(cut):
            ref = ledgers.intend(ledger, job=f"j{sent}", round_number=number)
            ledgers.write_outcome(ledger, ref, status, sent)
    ours = counted(tool, tmp_path / "ledger", public(), "job", "part")
    assert ours == {
        ("j100", "model"): [1, 1, 40, 100, 0],
        ("j165", "model"): [1, 2, 44, 165, 0],
        ("j184", "model"): [0, 0, 0, 0, 176],
        ("j184", "metric"): [0, 0, 0, 0, 8],
    }


def early(record):
    """The record in the words of early releases."""
    old = {"exact": "private", "noised": "dp", "public": "public"}
    tensors = [{**tensor, "taint": old[tensor["taint"]]} for tensor in record["tensors"]]
    return {**record, "tensors": tensors}


def test_ledgers_in_the_words_of_early_releases_hold_and_read_as_now(tool, tmp_path):
    """They said ``private`` for what is exact, and ``dp`` for what is noised."""
    now = [head(), private(2), intent(round=1)]
    old = [now[0], early(now[1]), early(now[2])]
    found = []
    for name, records in (("now", now), ("old", old)):
        lines = chained(records)
        folder = store(tmp_path / name, [lines], signed(lines, KEY))
        assert audit.verify(folder, key=PUBLIC).ok
        counted(tool, folder, PUBLIC, "job", "part", "recipient")
        taints = [
            tensor.taint
            for message in messages.messages(folder)
            for tensor in message.intent.tensors
        ]
        found.append((taints, messages.summary(folder, ("part", "taint"))))
    assert found[0] == found[1]
    assert found[0][0] == ["noised", "noised", "exact", *["exact"] * 3]


@pytest.mark.parametrize("dp", [None, {"dataset": "data", "ids": [2]}])
def test_what_early_releases_called_dp_must_have_been_paid_for_as_well(tool, tmp_path, dp):
    lines = chained([head(), {**early(private(2)), "dp": dp}])
    folder = store(tmp_path / "ledger", [lines], signed(lines, KEY))
    assert audit.verify(folder, key=PUBLIC).ok == (dp is not None)
    assert tool.json("ledger", folder, "--key", PUBLIC)[0] == (0 if dp else 1)


def test_what_the_package_writes_holds(tool, tmp_path):
    with Ledger.open(tmp_path / "ledger", "hospital-a", "lung", KEY) as ledger:
        write_start(ledger, "staddle 0.1.0", HASH, HASH)
        for _ in range(150):
            write_job_decline(ledger, "j", HASH, "operator-1", ['"\\\n\x1f\x7fé\u2028\U0001f600'])
        note_ = tmp_path / "held"
        note_.write_bytes(bytes(ledger.checkpoint()))
        write_stop(ledger, "asked to stop")
    key = Signer.of("lung", "hospital-a", KEY).public
    status, found = tool.json("ledger", tmp_path / "ledger", "--key", key, "--checkpoint", note_)
    assert (status, found["records"], found["held"]) == (0, 152, 151)


def test_secure_sums_are_counted_as_the_package_counts_them(tool, tmp_path):
    summed(tmp_path / "ledger")
    with open_ledger(tmp_path / "ledger") as ledger:
        intend_masked(ledger, offset=60, message_bytes=MASKED_BYTES - 60)
    ours = counted(tool, tmp_path / "ledger", public(), "job", "part")
    assert ours["j1", "(protocol)"] == [8, 0, 0, 1113, 0]
    assert ours["j1", "model"] == [1, 2, 44, 176, 156]


def test_padded_and_rotated_parts_are_counted_as_the_package_counts_them(tool, tmp_path):
    keyed(tmp_path / "ledger")
    ours = counted(tool, tmp_path / "ledger", public(), "job", "part")
    # 64 bytes of one left before it broke, and the rest of it with the next message
    assert ours["j1", "extractor"] == [3, 5, 128, 2 * PADDED_BYTES, 0]
    assert ours["j1", "heads"] == [2, 2, 30, 2 * ROTATED_BYTES, 0]
    assert ours["j1", "(protocol)"] == [5, 0, 0, 300 + 2 * 500, 0]


@pytest.fixture
def both(lone, tmp_path):
    """Asks both in this process, for many ledgers; as ``same``."""
    folder = tmp_path / "ledger"
    arguments = lone.arguments().parse_args(["ledger", str(folder), "--key", str(PUBLIC)])

    def verdict():
        theirs = audit.verify(folder, key=PUBLIC).ok
        try:
            said = list(lone.run_ledger(arguments))
        except lone.FaultError:
            said = []
        assert theirs == (len(said) == 6)
        return theirs

    return folder, verdict


@pytest.mark.parametrize("name", ["seg-00000001.jsonl", "seg-00000002.jsonl", "checkpoint"])
def test_flipped_bits_are_found(both, name):
    folder, holds = both
    path = store(folder, [[line] for line in SMALL], signed(SMALL, KEY)) / name
    assert holds()
    content = path.read_bytes()
    for at in range(len(content)):
        # Of a segment one bit of each byte: tests/security/log/test_append_log.py flips them all.
        for bit in range(8) if name == "checkpoint" else (at % 8,):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            assert not holds(), (at, bit)


def test_cut_at_each_byte_it_holds_up_to_its_checkpoint_and_no_further(both, same):
    folder, holds = both
    data = b"".join(line + b"\n" for line in SMALL)
    for covered in (1, 2):
        store(folder, [data], signed(SMALL[:covered], KEY))
        for size in range(len(data)):
            (folder / "seg-00000001.jsonl").write_bytes(data[:size])
            assert holds() == (covered == 1 and size > len(SMALL[0]))
    assert same([data[:-1]], signed(SMALL[:1], KEY))
    assert f"{len(SMALL[1])} bytes of an unfinished last line count as nothing" in same.out
    assert not same([data[:-1], []], signed(SMALL[:1], KEY))


def test_removed_doubled_inserted_and_moved_lines_are_found(same):
    note_ = signed(LINES, KEY)
    for at in range(len(LINES)):
        assert not same([[*LINES[:at], *LINES[at + 1 :]]], note_)
        assert not same([[*LINES[:at], LINES[at], *LINES[at:]]], note_)
        assert not same([[*LINES[:at], chained([STOP], LINES[:at])[-1], *LINES[at:]]], note_)
        for other in range(at):
            moved = [*LINES]
            moved[at], moved[other] = moved[other], moved[at]
            assert not same([moved], note_)


def test_records_written_anew_are_found(same):
    for at in range(len(LINES)):
        anew = chained([start(software="other"), *RECORDS[at + 1 :]], LINES[:at])
        assert not same([anew], signed(LINES, KEY))
        assert not same([anew], signed(anew, KEY), [signed(LINES, KEY)])
    stopped = chained([STOP], LINES[:5])
    assert same([stopped], signed(stopped, KEY), [signed(LINES[:5], KEY)])


def test_a_ledger_behind_a_checkpoint_that_another_party_holds_is_found(same):
    for size in range(len(LINES)):
        assert same([LINES[:size]], signed(LINES[:size], KEY), [signed(LINES[:size], KEY)])
        assert not same([LINES[:size]], signed(LINES[:size], KEY), [signed(LINES, KEY)])
        assert "records were cut off" in same.out
    assert "5 FAIL  tree: records were cut off" in same.out


def test_segments_that_are_missing_swapped_empty_or_strange_are_found(same):
    parts, note_, segment = (
        [LINES[:5], LINES[5:9], LINES[9:]],
        signed(LINES, KEY),
        "seg-{:08}.jsonl",
    )
    assert same(parts, note_)
    for a, b, c in ((0, 2, 1), (1, 0, 2), (2, 1, 0)):
        assert not same([parts[a], parts[b], parts[c]], note_)
    assert not same([parts[0], [], parts[1], parts[2]], note_)
    for number in (1, 2, 3):
        gone = segment.format(number)
        assert not same(parts, note_, prepare=lambda f, gone=gone: (f / gone).unlink())
    for pair in ((1, 0), (1, 4), (2, 9)):
        old, new = map(segment.format, pair)
        assert not same(parts, note_, prepare=lambda f, o=old, n=new: (f / o).rename(f / n))
    strange = ["seg-4.jsonl", "seg-00000004.json", "seg-000000004.jsonl", "seg-٠٠٠٠٠٠٠٤.jsonl"]
    for name in [*strange, "egress.jsonl"]:
        assert not same(parts, note_, prepare=lambda f, name=name: (f / name).write_bytes(b""))
    for name in ("LOCK", "seg-00000002.torn", "notes.txt"):
        assert same(parts, note_, prepare=lambda f, name=name: (f / name).write_bytes(b"x"))


def test_a_checkpoint_of_another_key_or_log_or_with_more_in_it_is_found(same):
    assert not same([LINES], None)
    for note_ in (
        signed(LINES, OTHER),
        signed(LINES, KEY, ORIGIN.replace("-a", "-b")),
        signed(LINES, KEY, more="extension\n"),
        signed(LINES, KEY) + signed(LINES, KEY).splitlines(keepends=True)[-1],
        signed(LINES, KEY)[:-1],
        signed(LINES, KEY) + b"\n",
        b"",
        signed(chained([STOP]), KEY),
    ):
        assert not same([LINES], note_), note_
        # others may add to theirs
        assert not same([LINES], signed(LINES, KEY), [note_]) or note_.count(b"\n") == 6
    beyond = signed(LINES, KEY).replace(b"\n18\n", b"\n19\n")
    assert not same([LINES], beyond)
    assert not same(
        [LINES], signed(LINES, KEY), key=VerifierKey(ORIGIN, SignatureKind.ED25519, bytes(32))
    )


def test_witnesses_must_have_cosigned_what_others_hold(tool, tmp_path):
    folder, held = store(tmp_path / "ledger", [LINES], signed(LINES, KEY)), tmp_path / "held"
    name = "staddle.example/lung/coordinator"
    witness = VerifierKey(name, SignatureKind.COSIGNATURE, WITNESS.public_key().public_bytes_raw())
    plain = note.parse(signed(LINES[:4], KEY))
    cosigned = plain.signed_by(cosign(plain.text, name, WITNESS, 1795291200))
    late = plain.signed_by(cosign("other\n", name, WITNESS, 1795291200))
    options = ("--key", PUBLIC, "--checkpoint", held, "--witness", witness)
    for data, status in ((cosigned, 0), (plain, 1), (late, 1)):
        held.write_bytes(bytes(data))
        found = tool("ledger", folder, *options)
        assert found[0] == status, found


ONE, TWO = change("one"), change('two "\\ \n\té\u2028')
ANOTHER = {**TWO, "before": ONE["after"]}
DENY = denied(ONE["after"])
DIGESTS = digest(1)["tensors"]


def sealed(ref, size, tensors=()):
    """The digest of a message of so many bytes."""
    return digest(ref, tensors=list(tensors), message={"bytes": size, "sha256": HASH})


def under(record):
    """An intent under the policy of a ``policy.change``."""
    return intent(policy=applied(record))


def protocol(*kinds):
    """Messages of a sum that has no masked message."""
    return [of_sum("egress.protocol", kind=kind, ctx=CTX) for kind in kinds]


CTX, EF = "cd" * 32, "ef" * 32
SILOS = ["hospital-a", "hospital-b", "hospital-c"]
WHY, VARYING, ELSE = "x" * 500, {"absent": [], "values": "varying"}, {"dataset": "other"}
TWO_READERS = ["coordinator", "x"]
TO_SILOS = {**TENSORS[0], "readers": ["silos"]}
CODED = [{**TENSORS[0], "dtype": "bfloat16", "bytes": 80}, *TENSORS[1:]]
SCALE = {**TENSORS[0], "name": "w@scale", "shape": [10], "bytes": 40}
PLACES = [
    *({**SCALE, "name": f"w@{name}", "dtype": dtype, "shape": [4], "bytes": 16}
      for name, dtype in (("indices", "int32"), ("values", "float32"))), *TENSORS[1:],
]  # fmt: skip
STEPS = [{**TENSORS[0], "dtype": "int8", "bytes": 40}, SCALE, *TENSORS[1:]]
LATER = head(10, CTX, epsilon="0", limit="8.25")
NO_NUMBERS = {**PADDED[0], "shape": [0], "bytes": 0, "dtype": "int64"}
SHARED = {"dataset": "data", "ids": [2], "noise": "shared"}


def shared_in_sum(dp=SHARED):
    """A masked message under a share of the noise."""
    return masked(tensors=[{**tensor, "taint": "noised"} for tensor in WORDS], dp=dp)


BROKEN = [
    [change(after=HASH)],
    [change(before=HASH)],
    [ONE, TWO],
    [ONE, {**ANOTHER, "before": HASH}],
    [{**ONE, "text": "on"}],
    [ONE, intent()],
    [ONE, ANOTHER, intent(policy=applied(ONE))],
    [ONE, ANOTHER, DENY],
    [intent(cohort=["hospital-b", "hospital-a"])],
    [intent(cohort=["hospital-a", "hospital-a"])],
    [intent(cohort=["hospital-b"])],
    [intent(tensors=[TENSORS[0], TENSORS[0]], message={"bytes": 320})],
    [intent(tensors=[{**CODED[0], "bytes": 160}, *TENSORS[1:]])],  # not half of its bytes
    [intent(tensors=[{**TENSORS[0], "dtype": "uint32"}, *TENSORS[1:]])],
    [intent(message={"bytes": SIZE - 1})],
    [intent(readers=[])],
    [intent(offset=1)],
    [intent(round=2), intent(offset=1)],
    [intent(job_digest=CTX), intent(offset=1)],
    [intent(), intent(offset=SIZE + 1)],
    [digest(0)],
    [digest(1)],
    [digest(9)],
    [intent(), digest(1), digest(1)],
    [intent(), outcome(1, status="failed"), digest(1)],
    [intent(), digest(1, tensors=[])],
    [intent(), digest(1, tensors=DIGESTS[::-1])],
    [intent(), sealed(1, SIZE - 1, DIGESTS)],
    [intent(message={"bytes": 14}, round=9), intent(offset=14, round=9), digest(2)],
    [outcome(0)],
    [intent(), outcome(1)],
    [intent(), digest(1), outcome(1, bytes_sent=SIZE - 1)],
    [intent(), digest(1), outcome(1, status="unknown", bytes_sent=SIZE + 1)],
    [intent(), digest(1), outcome(1), outcome(1)],
    [opening(), opening()],
    [closing(0)],
    [opening(), closing(1), closing(1)],
    [opening(), closing(1, messages=101)],
    [opening(), closing(1, bytes=1001)],
    [opening(), start(), closing(1)],
    [start(silo="hospital-b")],
    [intent(silo="hospital-b")],
    [intent(form="masked")],
    [intent(secagg=SECAGG)],
    [masked(None)],
    [masked(form="plain")],
    [masked(tensors=TENSORS)],
    [masked(tensors=[{**WORDS[0], "bytes": 164}])],
    [masked(tensors=[{**WORDS[0], "dtype": "uint64"}])],
    [masked(message={"bytes": SIZE - 1})],
    [masked(round=2), masked({**SECAGG, "ctx": CTX}, round=2, offset=1)],
    [intent(), masked(offset=1)],
    [masked(), intent(offset=1)],
    [masked({**SECAGG, "members": ["hospital-b", "hospital-a"]})],
    [masked({**SECAGG, "members": ["hospital-a", "hospital-a"]})],
    [masked({**SECAGG, "members": ["hospital-b", "hospital-c"]})],
    [masked({**SECAGG, "threshold": 3})],
    [masked(cohort=["hospital-a", "hospital-c"])],
    [masked(), sealed(1, MASKED, DIGESTS)],
    [masked(), sealed(1, SIZE)],
    [masked(), sealed(1, MASKED), outcome(1)],
    [of_sum("secagg.sum", survivors=["hospital-b", "hospital-a"])],
    [of_sum("secagg.sum", survivors=["hospital-a", "hospital-a"])],
    [of_sum("secagg.sum", survivors=["hospital-b"])],
    [of_sum("secagg.sum", survivors=[])],
    [of_sum("secagg.signed", survivors=["hospital-b"])],
    [of_sum("secagg.signed", absent=["hospital-d", "hospital-c"])],
    [of_sum("secagg.signed", absent=["hospital-b", "hospital-c"])],
    [intent(form="padded")],
    [intent(form="rotated")],
    [intent(hidden=HIDDEN)],
    [masked(hidden=HIDDEN)],
    [padded(hidden=None)],
    [rotated(hidden=None)],
    [padded(secagg=SECAGG)],
    [padded(form="plain")],
    [padded(tensors=[])],
    [padded(tensors=[], message={"bytes": 0})],
    [padded(message={"bytes": 351})],
    [padded(message={"bytes": 360})],
    [padded(tensors=[*PADDED, {**PADDED[1], "part": "other"}], message={"bytes": 384})],
    [padded(tensors=[{**PADDED[0], "dtype": "uint32", "bytes": 160}], message={"bytes": 160})],
    [padded(tensors=[{**PADDED[0], "shape": [10, 5]}], message={"bytes": 320})],
    [padded(tensors=[NO_NUMBERS], message={"bytes": 0})],
    [rotated(tensors=PADDED, message={"bytes": 352})],
    [rotated(tensors=TENSORS, message={"bytes": SIZE})],
    [rotated(message={"bytes": 180})],
    [rotated(hidden={"ctx": HASH, "number": 1})],
    [padded(), padded(CTX)],
    [padded(HASH, 3), padded(CTX, 2)],
    [padded(HASH, 3), padded(HASH, 4)],
    [padded(HASH, 3, round=1), padded(CTX, 3, round=2)],
    [padded(HASH, 0), padded(CTX, 1), padded(HASH, 0)],
    [padded(), padded(CTX, 1, offset=8, message={"bytes": 344})],
    [padded(), rotated(CTX, offset=8, message={"bytes": 168})],
    [padded(), intent(offset=8, message={"bytes": 176})],
    [padded(), sealed(1, 352, DIGESTS[:2])],
    [rotated(), sealed(1, 176, DIGESTS[:2])],
    [padded(), sealed(1, 351)],
    [intent(tensors=[TO_SILOS, *TENSORS[1:]])],
    [private(2)],
    [private(2), head()],
    [head(dataset="other"), private(2)],
    [head(2), private(2)],
    [head(2), private(1, dataset="other")],
    [head(), private(2, dp={"dataset": "data", "ids": [2]}) | {"dataset": "other"}],
    [head(), private()],
    [head(), private(3, 2)],
    [head(), private(2, 2)],
    [head(), private(dp=None)],
    [head(), private(2, tensors=TENSORS)],
    [head(), intent(tensors=private(2)["tensors"])],
    [head(), head(8)],
    [head(), head(root=CTX)],
    [head(), head(0)],
    [intent(readers=TWO_READERS), intent(tensors=[{**TENSORS[0], "readers": TWO_READERS[::-1]}])],
]
CODE = [{"name": "lung", "version": "0.3", "sha256": HASH}]
SOUND = [
    [intent(), ONE, under(ONE), DENY],
    [ONE, ANOTHER, under(TWO), {**ONE, "before": TWO["after"]}, under(ONE), DENY],
    [ONE, under(ONE), start(policy=TWO["after"]), digest(2), under(ONE)],
    [change("\n" * 2**18)],
    [intent(), *(intent(cohort=SILOS[:size]) for size in (0, 1, 3))],
    [intent(), intent(offset=SIZE)],
    [intent(), intent(offset=SIZE, message={"bytes": 0})],
    [intent(), digest(1), outcome(1, status="unknown", bytes_sent=0)],
    [intent(), outcome(1, status="failed", bytes_sent=SIZE)],
    [intent(tensors=[], message={"bytes": 0})],
    [intent(), intent(), digest(1), digest(2), outcome(2), outcome(1)],
    [masked(), masked(offset=MASKED), masked({**SECAGG, "ctx": CTX}, message={"bytes": SIZE})],
    [masked(), sealed(1, MASKED), outcome(1, bytes_sent=MASKED)],
    [masked(cohort=SILOS), intent(secagg=None), intent(form="x")],
    [masked({**SECAGG, "members": SILOS[:1], "threshold": 0}, tensors=[], message={"bytes": 0})],
    protocol("keys", "shares", "header", "survival"),
    protocol("reveal", "abandon", "end"),
    [of_sum("secagg.end", code=code, why='","type":"stop"') for code in Code],
    [*(of_sum("secagg.sum", survivors=SILOS[:n]) for n in (2, 1)), of_sum("secagg.end", why=WHY)],
    [*(of_sum("secagg.signed", **each) for each in ({}, VARYING)), of_sum("secagg.sum")],
    protocol("contribution", "padded"),
    [padded(), padded(offset=8, message={"bytes": 344}), padded(CTX, 5), padded(EF, 9, round=4)],
    [padded(), padded(CTX, tensors=[{**tensor, "part": "other"} for tensor in PADDED])],
    [padded(), padded(CTX, job_digest=CTX)],
    [rotated(), rotated(offset=160, message={"bytes": 16}), rotated(CTX), rotated()],
    [padded(), rotated(CTX), masked({**SECAGG, "ctx": EF})],
    [padded(), sealed(1, 352), outcome(1, bytes_sent=352)],
    [rotated(), sealed(1, 176), outcome(1, bytes_sent=176)],
    [intent(hidden=None), masked(hidden=None)],
    [intent(), intent(tensors=[{**tensor, "readers": []} for tensor in TENSORS])],
    [intent(readers=["coordinator", "silos"], tensors=[TO_SILOS, *TENSORS[1:]])],
    [intent(tensors=CODED, message={"bytes": SIZE - 80})],
    [intent(tensors=STEPS, message={"bytes": 40 + 40 + 24})],
    [intent(tensors=PLACES, message={"bytes": 16 + 16 + 24})],
    [head(), private(2, 8), head(), LATER, private(9), intent(dp=None)],
    [head(), shared_in_sum(), shared_in_sum(dp={**SHARED, "noise": "local"})],
    [intent(dataset=""), intent(dataset="other"), head(), private(2) | {"dataset": "data"}],
    [head(0), head(3, **ELSE), private(0, 1, 2, **ELSE), start(), private(2, **ELSE)],
    [opening(), start(), opening(), closing(3)],
    [opening(), closing(1, messages=100, bytes=1000)],
    [intent(packages=packages) for packages in ([], CODE, [*CODE, {**CODE[0], "name": ""}])],
    [masked(packages=CODE), padded(packages=CODE)],
]


@pytest.mark.parametrize("records", BROKEN)
def test_a_broken_rule_is_found(same, records):
    lines = chained([start(), *records])
    assert not same([lines], signed(lines, KEY))
    assert "6 FAIL  rules: seq " in same.out or "records were" in same.out


@pytest.mark.parametrize("records", SOUND)
def test_a_rule_that_holds_is_no_fault(same, records):
    lines = chained([start(), *records])
    assert same([lines], signed(lines, KEY)), same.out


def test_what_was_spent_of_each_budget_is_told(same, tool, tmp_path):
    other = head(dataset="b\n", epsilon="0.5", limit="1")
    lines = chained([start(), head(3), other, head(7, CTX, epsilon="4")])
    assert same([lines], signed(lines, KEY))
    assert (
        "privacy: data set 'data': epsilon 4 at delta 0.00001, of 8; its budget had 7 records then"
        in same.out
    )
    assert (
        "privacy: data set 'b\\n': epsilon 0.5 at delta 0.00001, of 1; its budget had 9 records"
        " then" in same.out
    )
    _, found = tool.json("ledger", tmp_path / "ledger", "--key", PUBLIC)
    assert [(row["dataset"], row["epsilon"], row["root"]) for row in found["budgets"]] == [
        ("b\n", "0.5", HASH),
        ("data", "4", CTX),
    ]


@pytest.mark.parametrize("noise", ["none", "", None, True, ["local"]])
def test_noise_is_this_silos_own_or_shared(same, noise):
    lines = chained([start(), head(), shared_in_sum(dp={**SHARED, "noise": noise})])
    assert not same([lines], signed(lines, KEY))
    assert "4 FAIL" in same.out


@pytest.mark.parametrize(
    "number", ["", "1.", ".5", "-1", "1e3", "inf", "12345678901", "1." + "0" * 41, "1 "]
)
def test_what_is_no_decimal_is_no_head(same, number):
    lines = chained([start(), head(epsilon=number)])
    assert not same([lines], signed(lines, KEY))
    assert "4 FAIL" in same.out


def test_a_broken_rule_counts_for_nothing_and_all_are_counted(tool, tmp_path):
    lines = chained([start(), intent(), *([digest(7)] * 14)])
    folder = store(tmp_path / "l", [lines], signed(lines, KEY))
    status, found = tool.json("ledger", folder, "--key", PUBLIC)
    assert status == 1
    assert found["checks"][5]["found"].count("is a digest of seq 7, which is not an intent") == 10
    assert found["checks"][5]["found"].endswith("14 in all")
    assert "check 6 failed" in found["shown"]


def swapped(old, new, record=None):
    """The last line of a ledger, misspelt; what leads to it is right."""
    line = chained([start(), record or intent()])[-1]
    assert line.count(old) >= 1, (old, line)
    return line.replace(old, new, 1)


def misspelt(record, old, *news):
    """A record with each of these in place of one of its bytes."""
    return [swapped(old, new, record) for new in news]


def revalued(record, old, *news):
    """A record with each of these as a field's value; ``old`` is the field as it stands."""
    name = old[: old.index(b":") + 1]
    return misspelt(record, old, *(name + new for new in news))


SUM_END, LAST = of_sum("secagg.end"), b'"v":1}'
COHORTS = [b"null", b'"hospital-a"', b"[1]", b'["hospital-a"],"cohort":["hospital-a"]']
NUMBERS = b'0.0 0e0 -0 -1 NaN Infinity 1e999 00 false null "0" [0] 9007199254740992'.split()
AFTER_NUMBER = [b',"cohort":' + each for each in COHORTS] + [b',"attempt":0', b',"aux":0']
FORMS = rb'"\u0070lain" "\/" "\u000A" "\ud800" "\u00e9" 1'.split()
FORMS += [b'"\xed\xa0\x80"', b'"\x01"', b'"' + b"a" * 1025 + b'"', b'"' + b"a" * 2**20 + b'"']
TEXTS = [b"null", rb'"version = 1\u000a"', b'"' + b"a" * (2**18 + 1) + b'"']
READERS = [b"null", b"[null]", b'[],"readers":[]']
HOSTILE = [
    *revalued(masked(), b'"ctx":"ab', b'"AB', b'"'),
    *revalued(masked(), b'"clipped":0', b"null", b'0,"more":0'),
    *misspelt(masked(), b'"clipped":0,', b""),
    *revalued(masked(), b'"members":["hospital-a","hospital-b"]', b"null"),
    *revalued(intent(secagg=None), b'"secagg":null', b"{}", b'""', b'null,"secagg":null'),
    *misspelt(intent(), b'"shape":', *(b'"readers":' + each + b',"shape":' for each in READERS)),
    *misspelt(intent(), b'"part":', b'"readers":[],"part":'),
    *revalued(padded(), b'"ctx":"ab', b'"AB'),
    *revalued(padded(), b'"number":0', b"null", b"-1", b'0,"more":0'),
    *misspelt(padded(), b',"number":0', b""),
    *revalued(intent(hidden=None), b'"hidden":null', b"{}", b'null,"hidden":null'),
    *revalued(intent(packages=[]), b'"packages":[]', b"null", b"{}", b'[""]', b"[{}]"),
    *revalued(intent(packages=CODE), b'"sha256":"ab', b'"AB', b'"'),
    *revalued(intent(packages=CODE), b'"version":"0.3"', b"0.3", b'"0.3","more":0'),
    *misspelt(intent(packages=CODE), b',"version":"0.3"', b""),
    *revalued(of_sum("egress.protocol"), b'"kind":"keys"', b'"upload"'),
    *revalued(of_sum("egress.protocol"), b'"ctx":"ab', b'"Ab'),
    *misspelt(of_sum("egress.protocol"), b'"bytes":9,', b""),
    *revalued(SUM_END, b'"code":"SHARES"', b'"SHARE"'),
    *revalued(SUM_END, b'"why":"no"', b'"' + b"x" * 501 + b'"'),
    *misspelt(SUM_END, b',"why":"no"', b""),
    *revalued(of_sum("secagg.sum"), b'"sha256":"ab', b'"xx'),
    *revalued(change(), b'"before":null', b'""'),
    *misspelt(change(), b'"before":null,', b""),
    *revalued(change(), rb'"text":"version = 1\n"', *TEXTS),
    *[b"", b"{}", b"[]", b"null", b'"text"', b"\xff", b"[" * 100_000, b'{"a":' * 100_000],
    b"\xef\xbb\xbf" + swapped(b"{", b"{"),
    *revalued(intent(), b'"attempt":0', *NUMBERS, b"9" * 5000, b'1,"attempt":0'),
    *misspelt(intent(), b'"attempt":0', *(b'"attempt":0' + each for each in AFTER_NUMBER)),
    *misspelt(intent(), b'"attempt":0', b'"atempt":0', b'"attempt": 0'),
    *misspelt(intent(), b'{"attempt":0', b'{"cohort":["hospital-a"],"attempt":0'),
    *misspelt(intent(), b'"attempt":0,', b"", b'"attempt":0 ,'),
    *misspelt(intent(), LAST, b'"v":1,"\xc3\xa9":1}', b'"v":2}', b'"v":true}', b'"v":1'),
    *misspelt(intent(), LAST, *(LAST + more for more in (b" ", b"\r", b"{}"))),
    *misspelt(intent(), b'{"attempt"', b' {"attempt"'),
    *misspelt(intent(), b'"form":"plain"', b"'form':'plain'"),
    *revalued(intent(), b'"form":"plain"', *FORMS),
    *misspelt(intent(), b'"egress.intent"', b'"egress.intents"', b'["egress.intent"]'),
    *misspelt(intent(), b'"egress.intent"', b'"peer"', b'"start"'),
    *revalued(intent(), b'"decision":"allow"', b'"deny"'),
    *revalued(intent(), b'"taint":"exact"', b'"secret"'),
    *revalued(intent(), b'"readers":["coordinator"]', b'"coordinator"', b"{}"),
    *revalued(intent(), b'"readers":["coordinator"]', b"[" + b'"a",' * 300_000 + b'"a"]'),
    *revalued(intent(), b'"shape":[10,4]', b"[10,-4]"),
    *revalued(intent(), b'"job_digest":"ab', b'"Ab', b'"'),
    *revalued(intent(), b'"nonce":"00', b'"'),
    *revalued(intent(), b'"time":"2026', b'"\xd9\xa2026'),
    *misspelt(intent(), b"05.123456Z", b"05.123456z", rb"05.123456Z\n"),
    *revalued(intent(), b'"seq":1', b"2"),
    *revalued(intent(), b'"prev":"', b'"0'),
    *misspelt(intent(), leaf(chained([start()])[0]).hex().encode(), b"cd" * 32),
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_is_not_quite_a_record_is_refused(same, line):
    lines = [*chained([start()]), line]
    assert not same([lines], signed(lines, KEY))
    assert "4 FAIL  lines: seg-00000001.jsonl line 2 (seq 1) " in same.out
    assert not same([[*lines, *chained([STOP], lines)[2:]]], signed(lines, KEY))


def test_unusual_text_is_a_record_all_the_same_and_moves_no_cursor(same, tool, tmp_path):
    odd = '\x1b[2K1 PASS "\\\n\x7f\u2028é\U0001f600'
    lines = chained([start(software=odd), intent(job=odd, recipient={"id": odd, "spki": HASH})])
    assert same([lines], signed(lines, KEY)), same.out
    assert "\x1b" not in same.out
    assert "left: job '\\x1b[2K1 PASS" in same.out
    status, out = tool("ledger", tmp_path / odd, "--key", PUBLIC)
    assert (status, "\x1b" in out, "\\x1b[2K1 PASS" in out) == (2, False, True)
    lines = chained([start(), intent(job="a" * 1024), intent(job="é" * 1024)])
    assert same([lines], signed(lines, KEY)), same.out


def test_the_longest_line(same):
    room = 2**20 - 1 - len(chained([start(), {**DECLINE, "reasons": [""]}])[-1])
    for more, sound in ((0, True), (1, False)):
        lines = chained([start(), {**DECLINE, "reasons": ["a" * (room + more)]}])
        assert len(lines[1]) == 2**20 - 1 + more
        assert same([lines], signed(lines, KEY)) == sound


def test_whole_numbers_are_those_below_2_to_the_53(lone):
    count = re.compile(lone.VALUES["count"])
    powers = [n * 10**power for n in (1, 8, 9, 90, 900, 9007) for power in range(18)]
    near = [power + more for power in powers for more in (-1, 0, 1)]
    limit = [2**53 + n for n in (*range(-1100, 1100), *(10**power for power in range(16)))]
    for number in [*range(200), *near, *limit]:
        assert bool(count.fullmatch(str(number))) == (0 <= number < 2**53), number
    for text in ("", "00", "01", "-0", "+1", "1.0", "1e3", "٣", "0123456789012345"):
        assert not count.fullmatch(text)


def test_misuse_has_a_status_of_its_own(tool, tmp_path):
    folder = store(tmp_path / "ledger", [LINES], signed(LINES, KEY))
    other = VerifierKey("example.com/log", SignatureKind.ED25519, bytes(32))
    cosigner = VerifierKey(ORIGIN, SignatureKind.COSIGNATURE, KEY.public_key().public_bytes_raw())
    for arguments in (
        (),
        ("ledger",),
        ("ledger", folder),
        ("ledger", folder, "--key", "x"),
        ("ledger", folder, "--key", f"{PUBLIC}="),
        ("ledger", folder, "--key", other),
        ("ledger", folder, "--key", cosigner),
        ("ledger", tmp_path / "nothing", "--key", PUBLIC),
        ("ledger", folder, "--key", PUBLIC, "--checkpoint", tmp_path / "nothing"),
        ("proof", folder / "checkpoint", "--key", PUBLIC),
        ("guess", folder),
    ):
        assert tool(*arguments)[0] == 2, arguments


def test_the_oracle_itself():
    """Two literal roots of RFC 6962's vectors, and one line by hand."""
    assert root([]).hex().startswith("e3b0c442")
    three = [leaf(bytes.fromhex(text)) for text in ("", "00", "10")]
    assert root(three).hex().startswith("aeb6bcfe")
    assert json.loads(SMALL[1])["prev"] == leaf(SMALL[0]).hex()
    assert spelt({"b": 1, "a": [True]}) == b'{"a":[true],"b":1}'
    assert b64encode(root([leaf(line) for line in SMALL])) in signed(SMALL, KEY)


def test_a_coordinators_ledger_holds_too(tool, tmp_path):
    with ReceivingLedger.open(tmp_path / "ledger", "coordinator", "lung", KEY) as ledger:
        write_serving(ledger, "coordinator", "staddle", HASH)
        for silo in ("silo-a", "silo-b"):
            head = Signer.of("lung", silo, OTHER).sign(0, EMPTY_ROOT)
            message = MessageDigest(bytes=184, sha256=HASH)
            fields = {"silo": silo, "job": "j1", "job_digest": HASH, "round": 3, "message": message}
            fields |= {"ledger_seq": 4, "ledger_leaf": HASH, "receipt": "5c" * 64}
            ledger.seal(Received(**fields, checkpoint=bytes(head).decode()))
            write_delivered(ledger, silo, "j1", HASH, 3, message)
            write_refused(ledger, silo, head, "rolled back")
        write_stop(ledger, "asked to stop")
    key = Signer.of("lung", "coordinator", KEY).public
    status, out = tool("ledger", tmp_path / "ledger", "--key", key)
    assert status == 0, out
    assert "the first 8 of 8 records" in out


@pytest.mark.parametrize("person", [{}, {**PERSON, "why": "x"}, {**PERSON, "by": 7}, "anna", 0])
def test_what_no_person_can_have_decided_is_refused_by_both(same, person):
    decline = {**DECLINE, "reasons": ["no rule"]}
    before = chained([start(), decline, {**decline, "person": PERSON}])
    assert same([before], signed(before, KEY))
    lines = chained([start(), {**decline, "person": person}])
    assert not same([lines], signed(lines, KEY))

import errno
import hashlib
import hmac
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from support.ledgers import KEY, OTHER_KEY, copied, first, open_log, put_back, signer, stored

from staddle.errors import LocalError
from staddle.security.log import append_log, head
from staddle.security.log.append_log import AppendLog
from staddle.security.log.chain import FIRST_PREV, MAX_LINE, leaf_hash
from staddle.security.log.segments import Reading, segment, torn
from staddle.security.log.tree_head import TreeHead

TESTS = str(Path(__file__).resolve().parents[2])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def filled(path, count=5):
    with open_log(path) as log:
        return [log.append({"type": "note", "n": n}) for n in range(count)]


def records(path):
    return [line.record for line in Reading(path)]


def without_sync(monkeypatch):
    """Hundreds of them are slow, and the test is not about them."""
    for sync in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, sync, lambda _: None)


def test_leaf_hashes_are_those_of_rfc_6962():
    known = {b"": "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"}
    known[b"\x00"] = "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7"
    assert {data: leaf_hash(data) for data in known} == known


def test_records_are_framed_and_chained(path):
    appended = filled(path, 3)
    lines = first(path).read_bytes().splitlines()
    previous = FIRST_PREV
    for n, line in enumerate(lines):
        record = json.loads(line)
        assert line == json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        assert (record["v"], record["seq"], record["prev"], record["n"]) == (1, n, previous, n)
        previous = hashlib.sha256(b"\x00" + line).hexdigest()
        assert appended[n].leaf == previous
    assert len({json.loads(line)["nonce"] for line in lines}) == 3
    assert first(path).stat().st_mode & 0o777 == 0o600


def test_a_nonce_is_made_with_the_log_key_of_all_else_in_its_line(path):
    filled(path, 3)
    label, origin = b"staddle/ledger/record/1", signer().origin.encode()
    info = b"".join(len(field).to_bytes(8) + field for field in (label, origin))
    key = HKDF(SHA256(), 32, b"", info).derive(KEY.private_bytes_raw())
    for line in first(path).read_bytes().splitlines():
        nonce = json.loads(line)["nonce"].encode()
        unsigned = line.replace(b'"nonce":"%s"' % nonce, b'"nonce":"%s"' % (b"0" * 32))
        assert nonce == hmac.new(key, unsigned, "sha256").hexdigest()[:32].encode()


def killed(path, count=5):
    """A log whose writer was killed: the checkpoint is from before all of its records."""
    with open_log(path) as log:
        (path / "kept").write_bytes((path / "checkpoint").read_bytes())
        for n in range(count):
            log.append({"type": "note", "n": n})
    (path / "kept").replace(path / "checkpoint")


def test_what_a_killed_writer_left_behind_its_checkpoint_is_taken_up(path):
    killed(path)
    with open_log(path) as log:
        assert log.append({"type": "x"}).seq == 5


def test_records_of_another_log_key_are_refused(path):
    killed(path)
    (path / "checkpoint").unlink()
    with AppendLog.open(path.with_name("other"), signer(key=OTHER_KEY)) as log:
        (path / "checkpoint").write_bytes(bytes(log.checkpoint()))
    why = "seq 0, behind its checkpoint, was not written with this log key"
    with pytest.raises(LocalError, match=why):
        AppendLog.open(path, signer(key=OTHER_KEY))


def test_after_a_change_of_keys_records_are_of_the_new_one(path):
    with open_log(path) as log:
        log.append({"type": "note"})
        log.rekey(signer(key=OTHER_KEY))
        at = (path / "checkpoint").read_bytes()
        log.append({"type": "note"})
    (path / "checkpoint").write_bytes(at)
    with AppendLog.open(path, signer(key=OTHER_KEY)) as log:
        assert log.append({"type": "x"}).seq == 2


def test_a_host_that_has_run_for_a_century_writes_records(path, monkeypatch):
    century = 100 * 366 * 86400 * 10**9
    monkeypatch.setattr(append_log.time, "monotonic_ns", lambda: century + 1234)
    with open_log(path) as log:
        log.append({"type": "a"})
    assert stored(path)[0]["mono_us"] == century // 1000 + 1


def test_reopening_goes_on_with_the_chain(path):
    last = filled(path, 2)[-1]
    seen = []
    with open_log(path, visit=lambda line: seen.append(line.seq)) as log:
        assert log.head == last
        assert log.append({"type": "x"}).seq == 2
    assert seen == [0, 1]
    assert records(path)[2]["prev"] == last.leaf


def test_bad_records_are_refused_and_the_log_goes_on(path):
    with open_log(path) as log:
        for bad, said in [
            ({"type": "x", "seq": 7}, "must not bring seq"),
            ({"n": 1}, "needs a type"),
            ({"type": "x", "v": 1, "prev": ""}, "must not bring prev, v"),
            ({"type": "x", "n": 0.5}, "decimals as strings"),
            ({"type": "x", "s": "a" * MAX_LINE}, "split it"),
        ]:
            with pytest.raises(LocalError, match=said):
                log.append(bad)
        assert log.append({"type": "x"}).seq == 0


def test_torn_tail_at_every_byte_offset(path, monkeypatch):
    """The last record was never promised: its checkpoint is the one before it."""
    filled(path, 2)
    without_sync(monkeypatch)
    before = copied(path)
    filled(path, 1)
    whole = first(path).read_bytes()
    last = before["seg-00000001.jsonl"]  # without the third line
    aside = torn(first(path))
    for cut in range(len(last) + 1, len(whole)):
        put_back(path, {**before, "seg-00000001.jsonl": whole[:cut]})
        reading = Reading(path)
        assert [line.seq for line in reading] == [0, 1]
        assert reading.torn == whole[len(last) : cut]
        log = open_log(path)
        assert log.head.seq == 2
        # and the recovery record is signed at once
        assert TreeHead.parse(head.stored(path).text).size == 3
        log.close()
        recovery = records(path)[2]
        assert recovery["type"] == "recovery"
        assert recovery["dropped_bytes"] == cut - len(last)
        assert recovery["last_good_seq"] == 1
        assert aside.read_bytes() == whole[len(last) : cut]
        assert first(path).read_bytes().startswith(last)


def test_whole_segment_torn(path):
    filled(path, 0)
    first(path).write_bytes(b'{"mono')
    with open_log(path):
        pass
    (recovery,) = records(path)
    assert recovery["type"] == "recovery"
    assert (recovery["last_good_seq"], recovery["dropped_bytes"]) == (-1, 6)


def test_torn_bytes_are_recorded_even_after_a_crash_within_recovery(path, monkeypatch):
    filled(path, 2)
    with first(path).open("ab") as file:
        file.write(b'{"half')

    def crash(self, record, *, durable=True):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AppendLog, "append", crash)
        with pytest.raises(KeyboardInterrupt):
            open_log(path)
    assert first(path).read_bytes().endswith(b"\n")  # cut already, and nothing says so
    with open_log(path):
        pass
    with open_log(path):
        pass  # once only
    assert [r.get("dropped_bytes") for r in records(path)] == [None, None, 6]


def test_a_tail_longer_than_any_record_is_no_torn_record(path):
    filled(path, 1)
    with first(path).open("ab") as file:
        file.write(b"a" * (MAX_LINE + 1))
    with pytest.raises(LocalError, match="is longer than"):
        open_log(path)


def tampered(lines):
    """Every single edit, deletion, insertion and swap but at the end, which needs a known head."""
    for i in range(len(lines) - 1):
        changed = lines[i].replace(b'"n":', b'"m":')
        yield [*lines[:i], changed, *lines[i + 1 :]]
        yield lines[:i] + lines[i + 1 :]
        yield [*lines[: i + 1], *lines[i:]]
        yield [*lines[:i], b"", *lines[i:]]
        yield [*lines[:i], lines[i] + b" ", *lines[i + 1 :]]
        for j in range(i + 1, len(lines)):
            swapped = list(lines)
            swapped[i], swapped[j] = lines[j], lines[i]
            yield swapped


def test_any_edit_deletion_insertion_or_reordering_is_refused(path):
    filled(path)
    lines = first(path).read_bytes().splitlines()
    for changed in tampered(lines):
        first(path).write_bytes(b"".join(line + b"\n" for line in changed))
        why = r"seg-00000001.jsonl: line \d.*keep the folder as evidence"
        with pytest.raises(LocalError, match=why):
            open_log(path)
        with pytest.raises(LocalError):
            list(Reading(path))
    assert not torn(first(path)).exists()


def test_a_record_forged_with_right_links_but_wrong_frame_is_refused(path):
    filled(path, 1)
    good = json.loads(first(path).read_bytes())
    for change in [
        {"v": 2}, {"v": True}, {"seq": 1}, {"seq": "0"}, {"seq": False}, {"nonce": "00"},
        {"time": "yesterday"}, {"mono_us": -1}, {"prev": "0" * 63}, {"type": 3}, {"nonce": None},
    ]:  # fmt: skip
        line = json.dumps({**good, **change}, sort_keys=True, separators=(",", ":"))
        first(path).write_bytes(line.encode() + b"\n")
        with pytest.raises(LocalError, match="line 1"):
            list(Reading(path))


def test_another_spelling_of_the_last_record_is_refused(path):
    filled(path, 1)
    data = first(path).read_bytes()
    spaced = json.dumps(json.loads(data)).encode() + b"\n"
    for other in (data[:-1] + b" \n", spaced, data[:-1] + b"\r\n"):
        first(path).write_bytes(other)
        with pytest.raises(LocalError, match="not a canonical JSON object"):
            list(Reading(path))


OPEN_AND_SAY = """
import sys
sys.path.insert(0, sys.argv[2])
from support.ledgers import open_log
from staddle.errors import LocalError
try:
    log = open_log(sys.argv[1])
except LocalError as error:
    print(error)
else:
    print("opened")
"""


def in_another_process(path):
    command = [sys.executable, "-c", OPEN_AND_SAY, str(path), TESTS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_second_writer_is_refused_at_once_and_the_lock_goes_with_its_holder(path):
    with open_log(path):
        why = "ledger/LOCK: another process writes this ledger; stop it"
        assert why in in_another_process(path)
        with pytest.raises(LocalError, match="another process writes"):
            open_log(path)  # nor twice in one process
    assert in_another_process(path) == "opened\n"
    open_log(path).close()


APPEND_FOR_EVER = """
import sys
sys.path.insert(0, sys.argv[2])
from support.ledgers import open_log
log = open_log(sys.argv[1])
while True:
    print(log.append({"type": "note", "text": "x" * 300}).seq, flush=True)
"""


def test_kill_9_while_appending_loses_nothing_that_was_promised(path):
    for _ in range(2):
        command = [sys.executable, "-c", APPEND_FOR_EVER, str(path), TESTS]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            for _ in range(20):
                promised = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            later = [int(line) for line in child.stdout.read().split(b"\n")[:-1]]
            promised = max([promised, *later])
        with open_log(path) as log:
            assert log.head.seq >= promised
    list(Reading(path))


@pytest.mark.parametrize("broken", ["write", "short", "fdatasync"])
def test_any_failure_closes_the_log_for_good(path, monkeypatch, broken):
    filled(path, 2)
    real = os.write
    log = open_log(path)

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if broken == "short":
            patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))
        else:
            patch.setattr(os, broken, fail)
        with pytest.raises(LocalError, match="takes no more records: a write failed"):
            log.append({"type": "x"})
    for _ in range(2):  # there is room again, but nothing more is taken
        with pytest.raises(LocalError, match="takes no more records"):
            log.append({"type": "x"})
    log.close()
    with open_log(path) as log:
        log.append({"type": "after"})
    kinds = [record["type"] for record in records(path)]
    between = {"write": [], "short": ["recovery"], "fdatasync": ["x"]}[broken]
    assert kinds == ["note", "note", *between, "after"]


def test_a_file_that_may_grow_no_more_closes_the_log(path):
    log = open_log(path)
    log.append({"type": "x"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (first(path).stat().st_size + 50, before[1]))
        with pytest.raises(LocalError, match="takes no more records"):
            log.append({"type": "y"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(LocalError):
        log.append({"type": "z"})
    log.close()
    with open_log(path):
        pass
    found = [(r["type"], r.get("dropped_bytes")) for r in records(path)]
    assert found == [("x", None), ("recovery", 50)]


def test_a_writer_that_ignores_the_lock_is_noticed(path):
    log = open_log(path)
    log.append({"type": "x"})
    with first(path).open("ab") as file:
        file.write(b"y\n")
    with pytest.raises(LocalError, match="somebody else changed its length"):
        log.append({"type": "x"})
    log.close()


def test_closed_log_takes_nothing(path):
    log = open_log(path)
    log.close()
    log.close()
    with pytest.raises(LocalError, match="it is closed"):
        log.append({"type": "x"})


def test_threads_share_one_log(path, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    with open_log(path) as log:

        def work(who):
            for n in range(50):
                log.append({"type": "note", "who": who, "n": n})

        threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        counts = []
        while any(thread.is_alive() for thread in threads):  # a reader beside the writers
            counts.append(sum(1 for _ in Reading(path)))
        for thread in threads:
            thread.join()
    assert counts == sorted(counts)
    assert len(records(path)) == 200
    for who in range(4):
        assert [r["n"] for r in records(path) if r["who"] == who] == list(range(50))


def test_only_durable_records_wait_for_the_disk(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    log = open_log(path)
    log.append({"type": "x"}, durable=False)
    assert synced == []
    log.append({"type": "x"})
    assert len(synced) == 1
    log.append({"type": "x"}, durable=False)
    log.close()
    assert len(synced) == 2


def test_missing_and_unwritable_places_are_local_errors(tmp_path):
    with pytest.raises(LocalError, match="cannot read it"):
        list(Reading(tmp_path / "gone"))
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file" / "log", tmp_path / "file"):
        with pytest.raises(LocalError, match="cannot open it"):
            open_log(place)
    segment(tmp_path / "dir", 1).mkdir(parents=True)
    with pytest.raises(LocalError, match="cannot read it"):
        open_log(tmp_path / "dir")
    segment(tmp_path / "dir", 1).rmdir()
    open_log(tmp_path / "dir").close()  # and the lock of the failed attempt is free

import datetime as dt
import itertools
import threading
from pathlib import Path

import pytest
from support import ledgers as book

from staddle.errors import LocalError
from staddle.security.ledger.audit import verify
from staddle.security.log import append_log, head
from staddle.security.log.merkle import Tree
from staddle.security.log.segments import Reading, segment, segments
from staddle.security.log.tree_head import TreeHead, issue

HASH = "ab" * 32


class Clock:
    """Stands in for ``datetime`` in the writer; ``now`` is what a test sets."""

    UTC = dt.UTC

    def __init__(self, now):
        self.moment = dt.datetime.fromisoformat(now + "Z")
        self.datetime = self

    def now(self, zone):
        return self.moment

    def set(self, now):
        self.moment = dt.datetime.fromisoformat(now + "Z")


@pytest.fixture
def clock(monkeypatch):
    made = Clock("2026-11-20T10:00:00")
    monkeypatch.setattr(append_log, "dt", made)
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """For segments of three or four records."""
    monkeypatch.setattr(append_log, "SEGMENT_BYTES", 1000)
    return tmp_path / "ledger"


def filled(folder, count=11):
    """Records that the ledger knows, in as many segments as they need."""
    with book.open_ledger(folder) as ledger:
        for n in range(count):
            book.write_start(ledger, f"staddle {n}", HASH, HASH)
    return segments(folder)


def problem(folder, **options):
    found = verify(folder, key=book.public(), **options)
    assert not found.ok
    return found.problems[0]


def refused(folder, said):
    """By verifier and writer alike, in the same words."""
    assert said in problem(folder)
    with pytest.raises(LocalError) as error:
        book.open_ledger(folder)
    assert said in str(error.value)


def test_a_full_segment_is_followed_by_another_and_chain_and_tree_run_on(folder):
    paths = filled(folder)
    assert len(paths) >= 3
    assert all(path.stat().st_size >= 1000 for path in paths[:-1])
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths)
    lines = b"".join(path.read_bytes() for path in paths).splitlines()
    found = list(Reading(folder))
    assert [line.seq for line in found] == list(range(11))
    assert [line.record["prev"] for line in found[1:]] == [line.leaf for line in found[:-1]]
    stored = TreeHead.parse(head.stored(folder).text)
    assert (stored.size, stored.root) == (11, Tree(line.hash for line in found).root())
    assert len(lines) == 11
    filled(folder, 2)
    assert verify(folder, key=book.public()).records == 13
    assert segments(folder)[:-1] == paths[: len(segments(folder)) - 1]


def test_the_old_segment_is_durable_before_the_new_one_is_there(folder, monkeypatch):
    """After a power cut nothing may be missing before something that is there."""
    with book.open_log(folder) as log:
        while segment(folder, 1).stat().st_size < 1000:
            log.append({"type": "x"}, durable=False)
        seen = []

        def sync(descriptor):
            seen.append(
                (Path(f"/proc/self/fd/{descriptor}").readlink().name, segment(folder, 2).exists())
            )

        monkeypatch.setattr("os.fdatasync", sync)
        log.append({"type": "x"})
        assert seen == [("seg-00000001.jsonl", False), ("seg-00000002.jsonl", True)]


def test_a_round_that_midnight_interrupts_goes_on_in_the_next_days_segment(tmp_path, clock):
    with book.open_log(tmp_path) as log:
        log.append({"type": "x"})
        clock.set("2026-11-20T23:59:59.999999")
        log.append({"type": "x"})
        clock.set("2026-11-21T00:00:00")
        log.append({"type": "x"})
        log.append({"type": "x"})
    with book.open_log(tmp_path) as log:
        log.append({"type": "x"})  # of the same day still
        clock.set("2026-11-22T00:00:00")
        log.append({"type": "x"})
    sizes = [len(path.read_bytes().splitlines()) for path in segments(tmp_path)]
    assert sizes == [2, 3, 1]
    assert [line.seq for line in Reading(tmp_path)] == list(range(6))


def test_a_clock_that_goes_back_changes_nothing(tmp_path, clock):
    with book.open_log(tmp_path) as log:
        log.append({"type": "x"})
        clock.set("2026-11-18T10:00:00")
        log.append({"type": "x"})
    with book.open_log(tmp_path) as log:
        log.append({"type": "x"})
        clock.set("2026-11-20T11:00:00")
        log.append({"type": "x"})
    assert len(segments(tmp_path)) == 1
    times = [line.record["time"] for line in Reading(tmp_path)]
    assert times != sorted(times)


def test_an_empty_last_segment_is_what_a_crash_leaves(folder):
    paths = filled(folder)
    following = segment(folder, len(paths) + 1)
    following.touch()
    assert verify(folder, key=book.public()).ok
    filled(folder, 1)
    assert segments(folder)[-1] == following
    assert following.read_bytes().count(b"\n") == 1
    assert verify(folder, key=book.public()).records == 12


def test_a_torn_tail_is_put_aside_in_the_last_segment_and_refused_in_any_other(folder):
    paths = filled(folder)
    with paths[-1].open("ab") as file:
        file.write(b'{"half')
    assert verify(folder, key=book.public()).torn_bytes == 6
    book.open_ledger(folder).close()
    assert paths[-1].with_suffix(".torn").read_bytes() == b'{"half'
    assert list(Reading(folder))[-1].record["type"] == "recovery"
    with paths[0].open("ab") as file:
        file.write(b'{"half')
    refused(folder, "seg-00000001.jsonl: line 4 (seq 3, byte")
    refused(folder, "ends in the middle of a line, and another segment follows")
    assert not paths[0].with_suffix(".torn").exists()


def test_missing_empty_foreign_and_old_files_are_refused(folder):
    paths = filled(folder)
    before = book.copied(folder)
    for path in paths[:-1]:
        path.unlink()
        refused(folder, f"{path.name}: is missing")
        path.touch()
        refused(folder, "is empty, and another segment follows")
        book.put_back(folder, before)
    for name in ("seg-1.jsonl", "seg-00000001.jsonl.bak", "seg-00000001", "seg-000000001.jsonl"):
        (folder / name).touch()
        refused(folder, f"{name}: is not a segment")
        book.put_back(folder, before)
    segment(folder, 99).touch()
    refused(folder, f"seg-{len(paths) + 1:08d}.jsonl: is missing")
    book.put_back(folder, before)
    (folder / "egress.jsonl").touch()
    refused(folder, "egress.jsonl: a ledger in one file")


def test_any_edit_deletion_insertion_or_reordering_in_any_segment_is_found(folder):
    paths = filled(folder, 8)
    before = book.copied(folder)
    tried = 0
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True)
        for i in range(len(lines)):
            changed = lines[i].replace(b'"staddle ', b'"Staddle ')
            wrong = [
                [*lines[:i], changed, *lines[i + 1 :]],
                lines[:i] + lines[i + 1 :],
                [*lines[: i + 1], *lines[i:]],
                *(
                    [*lines[:i], lines[j], *lines[i + 1 : j], lines[i], *lines[j + 1 :]]
                    for j in range(i + 1, len(lines))
                ),
            ]
            for other in wrong:
                book.put_back(folder, before)
                path.write_bytes(b"".join(other))
                problem(folder)
                with pytest.raises(LocalError):
                    book.open_ledger(folder)
                tried += 1
    assert tried >= 3 * 8
    for a, b in itertools.pairwise(paths):  # whole segments in each other's place
        book.put_back(folder, {**before, a.name: before[b.name], b.name: before[a.name]})
        problem(folder)


def test_every_flipped_bit_is_found(folder, monkeypatch):
    monkeypatch.setattr(append_log, "SEGMENT_BYTES", 100)
    with book.open_ledger(folder) as ledger:
        book.write_stop(ledger, "a")
        book.write_stop(ledger, "")
    before = book.copied(folder)
    assert sum(name.startswith("seg-") for name in before) == 2
    for name, data in before.items():
        path, key = folder / name, book.public() if name == "checkpoint" else None
        for at in range(len(data) * 8):
            flipped = bytearray(data)
            flipped[at // 8] ^= 1 << (at % 8)
            path.write_bytes(flipped)
            assert not verify(folder, key=key).ok, (name, at)
        path.write_bytes(data)
    assert verify(folder, key=book.public()).ok


# The checkpoint.


def size_of(note):
    return TreeHead.parse(note.text).size


def test_when_tree_heads_are_signed(tmp_path):
    """Before the first record, every 64 records, on request, and at the end."""
    with book.open_log(tmp_path) as log:
        assert size_of(head.stored(tmp_path)) == 0
        for n in range(1, 130):
            log.append({"type": "x"}, durable=False)
            assert size_of(head.stored(tmp_path)) == n // 64 * 64
        note = log.checkpoint()
        assert note == log.checkpoint() == head.stored(tmp_path)  # signed once
        assert size_of(note) == 129
        log.append({"type": "x"})
    assert size_of(head.stored(tmp_path)) == 130
    found = head.stored_by(tmp_path, book.public()).root
    assert found == Tree(line.hash for line in Reading(tmp_path)).root()


def test_records_are_durable_before_their_checkpoint(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("os.fdatasync", lambda _: done.append("records"))
    real = append_log.write_atomic
    monkeypatch.setattr(
        append_log, "write_atomic", lambda path, data: [done.append("checkpoint"), real(path, data)]
    )
    with book.open_log(tmp_path) as log:
        done.clear()
        log.append({"type": "x"}, durable=False)
        log.checkpoint()
        assert done == ["records", "checkpoint"]


def test_records_without_a_checkpoint_are_refused_and_an_empty_ledger_is_not(folder):
    filled(folder, 1)
    (folder / "checkpoint").unlink()
    assert "checkpoint: is missing" in problem(folder)
    why = "it has 1 records and no checkpoint, which is signed before the first"
    with pytest.raises(LocalError, match=why):
        book.open_ledger(folder)
    segment(folder, 1).write_bytes(b'{"torn')
    with pytest.raises(LocalError, match="it has 0 records and no checkpoint"):
        book.open_ledger(folder)
    segment(folder, 1).write_bytes(b"")
    filled(folder, 1)
    assert verify(folder, key=book.public()).ok


def test_records_cut_off_behind_the_checkpoint_are_found_without_any_key(folder):
    paths = filled(folder)
    before = book.copied(folder)
    said = (
        "records were cut off: there are {}, and the folder itself holds a signed checkpoint of 11"
    )
    lines = paths[-1].read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        book.put_back(folder, before)
        paths[-1].write_bytes(b"".join(lines[:kept]))
        left = 11 - len(lines) + kept
        assert verify(folder).problems == (said.format(left),)
        with pytest.raises(LocalError, match="was rolled back or altered: " + said.format(left)):
            book.open_ledger(folder)
    book.put_back(folder, before)
    paths[-1].unlink()
    assert verify(folder).problems == (said.format(11 - len(lines)),)


def test_an_older_copy_of_the_whole_folder_is_found_by_who_holds_a_checkpoint(folder):
    filled(folder, 5)
    older = book.copied(folder)
    with book.open_ledger(folder) as ledger:
        for _ in range(4):
            book.write_start(ledger, "staddle", HASH, HASH)
        note = ledger.checkpoint()
    assert verify(folder, key=book.public(), witnessed={"the coordinator": note}).ok
    book.put_back(folder, older)
    assert verify(folder, key=book.public()).ok  # the copy is as good as it was: rule 29
    said = "records were cut off: there are 5, and the coordinator holds a signed checkpoint of 9"
    assert problem(folder, witnessed={"the coordinator": note}) == said
    filled(folder, 6)  # and it was written on
    said = (
        "records were rewritten: the coordinator holds a signed checkpoint of 9, to which the first"
        " 9 of these 11 "
    )
    assert problem(folder, witnessed={"the coordinator": note}).startswith(said)


def test_a_checkpoint_of_another_key_or_log_is_refused(folder):
    filled(folder, 3)
    root = Tree(line.hash for line in Reading(folder)).root()
    own = (folder / "checkpoint").read_bytes()
    for other in (book.signer(key=book.OTHER_KEY), book.signer("silo-b")):
        note = other.sign(3, root)
        (folder / "checkpoint").write_bytes(bytes(note))
        refused(folder, "signed by none of the keys that are trusted here")
        (folder / "checkpoint").write_bytes(own)
        wanted = "checkpoint that w holds: note is signed by none"
        assert wanted in problem(folder, witnessed={"w": note})
    (folder / "checkpoint").write_bytes(bytes(book.signer().sign(3, bytes(32))))
    refused(folder, "records were rewritten: the folder itself holds a signed checkpoint of 3")
    cosigned = book.signer().sign(3, root)
    cosigned = cosigned.signed_by(book.signer("silo-b", book.OTHER_KEY).sign(3, root).signatures[0])
    extended = issue(TreeHead(book.signer().origin, 3, root, ("more",)), book.KEY)
    for more in (cosigned, extended):
        (folder / "checkpoint").write_bytes(bytes(more))
        refused(folder, "holds more than a log writes there")
    (folder / "checkpoint").write_bytes(b"staddle.example\n")
    refused(folder, "checkpoint: note is not a text")
    with pytest.raises(LocalError, match="says nothing without the silo's log key"):
        verify(folder, witnessed={"w": note})


def test_a_reader_beside_a_writer_sees_a_ledger_that_holds(folder, monkeypatch):
    for sync in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"os.{sync}", lambda _: None)
    with book.open_ledger(folder) as ledger:

        def work():
            for n in range(300):
                book.write_start(ledger, f"staddle {n}", HASH, HASH)
                if n % 5 == 0:
                    ledger.checkpoint()

        writer = threading.Thread(target=work)
        writer.start()
        counts = []
        while writer.is_alive():
            found = verify(folder, key=book.public())
            assert found.ok, found.problems
            counts.append(found.records)
        writer.join()
    assert counts == sorted(counts)
    assert verify(folder, key=book.public()).records == 300

import functools
import json
import os
import signal
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults.disk import killed
from support.refusals import refused
from support.secure_messages import longest_evidence, names

from staddle.coordinator.rounds.events import Answered, Began, Drawn, Folded, UploadStored
from staddle.coordinator.rounds.machine import JobState, advance
from staddle.coordinator.storage.database import (
    SUBMISSIONS,
    VERSION,
    Database,
    StoredContribution,
    StoredHead,
    StoredHidden,
    Submission,
)
from staddle.coordinator.storage.replay_log import ReplayEntry
from staddle.errors import LocalError
from staddle.security.blind.mix_row import RowMemory
from staddle.security.secagg.evidence import Unopened

SILOS = ("b", "a", "c")
NEW = ("blind", "attempt", "fruitless", "keyed", "least")  # fields of a state that came later
GIVEN = Submission(1, "a", "1.a.upload", 2**40, "ab" * 32, 2**53 - 1, "cd" * 32, b"\0sig")
WORDS = StoredHidden(1, "extractor", "a", b"\1" * 32, "1.a.extractor.padded", 2**40, b"\2" * 32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "coordinator.sqlite"


@pytest.fixture
def database(path):
    made = Database(path)
    yield made
    made.close()


def job(name="j"):
    return JobState(name, SILOS, 3, 2)


def add(database, *states, signed=b"{}", method=None):
    for state in states:
        with database.transaction():
            database.add_job(signed, state, method or {})


def submit(database, *submissions, **options):
    """Uploads of job j, in one transaction."""
    with database.transaction():
        for each in submissions:
            database.add_submission("j", each, **options)


def save(database, state):
    with database.transaction():
        database.save_state(state)


def again(database, path):
    database.close()
    return Database(path)


def test_jobs_come_back_in_the_order_in_which_they_were_added(database, path):
    add(database, job("z"), job("a"), job("m"))
    save(database, replace(job("a"), stage="ended"))
    kept = [(kept.state.job, kept.state.stage) for kept in again(database, path).jobs()]
    assert kept == [("z", "queued"), ("a", "ended"), ("m", "queued")]


def test_every_state_of_a_job_comes_back_as_it_was(database, path):
    state = job()
    add(database, state)
    events = [
        Began(),
        *(Answered(s, None) for s in SILOS),
        Drawn(0, SILOS),
        *(UploadStored(s, 0, "x") for s in SILOS),
    ]
    for event in [*events, Folded(0), Drawn(1, ("a", "b")), UploadStored("a", 1, "y")]:
        state, _ = advance(state, event)
        save(database, state)
        assert database.jobs()[0].state == state
    assert again(database, path).jobs()[0].state == state


def test_the_methods_state_keeps_its_bits(database, path):
    method = {"weights": torch.randn(3, 3, dtype=torch.float64), "gave": torch.tensor([1, 0, 2])}
    add(database, job(), signed=b"\xff\0signed", method=method)
    found = again(database, path).jobs()[0]
    assert found.signed == b"\xff\0signed"
    assert all(
        torch.equal(found.method[name], value) and found.method[name].dtype == value.dtype
        for name, value in method.items()
    )


def test_a_closed_round_changes_files_method_and_metrics_together(database, path):
    add(database, job())
    with database.transaction():
        files = {
            ("result", "model", ""): "0.model.safetensors",
            ("mail", "theta", "a"): "0.theta.a.safetensors",
        }
        database.close_round("j", 0, ("a", "b"), {"tested": 5}, {"n": torch.tensor(1)}, files)
    with database.transaction():
        files = {("result", "model", ""): "1.model.safetensors", ("mail", "theta", "a"): None}
        database.close_round("j", 1, ("c",), {"tested": 7}, {"n": torch.tensor(2)}, files)
    database = again(database, path)
    (found,) = database.jobs()
    assert found.files == {("result", "model", ""): "1.model.safetensors"}
    assert found.method["n"].item() == 2
    assert database.rounds("j") == [(0, ["a", "b"], {"tested": 5}), (1, ["c"], {"tested": 7})]


def test_a_receipt_is_found_again(database, path):
    add(database, job())
    submit(database, GIVEN)
    database = again(database, path)
    assert database.submission("j", 1, "a") == GIVEN
    assert database.submission("j", 1, "b") is None
    assert database.submission("j", 0, "a") is None


def test_the_digests_of_versions_come_back_and_what_is_given_again_takes_its_place(database, path):
    add(database, job())
    with database.transaction():
        database.add_submission("j", GIVEN)
        database.add_submission("j", replace(GIVEN, silo="b", file="1.b.upload"))
        files = {("version", "theta", "a"): GIVEN.file, ("result", "m", ""): "1.m.safetensors"}
        database.close_round("j", 1, ("a", "b"), {}, {}, files)
    database = again(database, path)
    assert database.jobs()[0].given == {GIVEN.file: GIVEN.sha256}
    with database.transaction():
        database.drop_submissions("j", 1, ("a",))
    assert database.submission("j", 1, "a") is None
    assert database.submission("j", 1, "b") is not None
    submit(database, GIVEN)


def test_a_submission_counts_once(database):
    add(database, job())
    submit(database, GIVEN)
    with pytest.raises(LocalError, match="UNIQUE"):
        submit(database, replace(GIVEN, sha256="00" * 32))
    assert database.submission("j", 1, "a") == GIVEN


def test_a_transaction_that_fails_changes_nothing(database, path):
    add(database, job())

    class Stop(BaseException):
        pass

    def fails():
        database.save_state(replace(job(), stage="ended"))
        database.add_submission("j", GIVEN)
        raise Stop

    with pytest.raises(Stop), database.transaction():
        fails()
    assert database.jobs()[0].state == job()
    assert again(database, path).submission("j", 1, "a") is None


def test_what_was_committed_survives_kill_9_and_what_was_not_leaves_no_trace(path):
    def work(place, promise):
        database, state = Database(place), job()
        add(database, state)
        save(database, replace(state, stage="admitting"))
        with database.transaction():
            database.save_state(replace(state, stage="round"))
            os.kill(os.getpid(), signal.SIGKILL)

    assert killed(path, 0, "before", work) == 0
    database = Database(path)
    assert database.jobs()[0].state.stage == "admitting"
    database.close()


def test_a_full_disk_is_an_error_of_ours_and_the_rows_stay(database, path):
    add(database, job())
    (pages,) = database._connection.execute("PRAGMA page_count").fetchone()
    database._connection.execute(f"PRAGMA max_page_count = {pages}")
    with refused(r"coordinator\.sqlite: database or disk is full; make room"):
        save(database, replace(job(), reason="x" * 100_000))
    assert database.jobs()[0].state == job()


@pytest.mark.parametrize("broken", [b"not a database" * 100, None])
def test_a_file_that_is_no_database_of_ours_is_named(path, broken):
    if broken is None:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 9")
        connection.close()
    else:
        path.write_bytes(broken)
    with pytest.raises(LocalError, match=r"coordinator\.sqlite"):
        Database(path)


def test_a_state_that_cannot_be_read_is_named(database):
    add(database, job())
    database._connection.execute("UPDATE jobs SET state = '{}'")
    with pytest.raises(LocalError, match="state of job 'j' cannot be read"):
        database.jobs()


def test_what_happened_in_a_sum_comes_back_in_order_until_its_round_is_over(database, path):
    add(database, job("j"), job("k"))
    rows = [
        ReplayEntry(0, "begun", "", b"spec"),
        ReplayEntry(0, "given", "a", b"\0\xff"),
        ReplayEntry(1, "begun", "", b"spec"),
    ]
    with database.transaction():
        for row in rows:
            database.add_secure("j", 4, row)
        database.add_secure("k", 4, rows[0])
        database.add_secure("j", 5, rows[1])
    database = again(database, path)
    assert database.secure_rows("j", 4) == rows
    assert (database.secure_rows("j", 5), database.secure_rows("k", 4)) == ([rows[1]], [rows[0]])
    with database.transaction():
        database.drop_secure("j")
    assert (database.secure_rows("j", 4), database.secure_rows("j", 5)) == ([], [])
    assert database.secure_rows("k", 4) == [rows[0]]


def test_a_submission_of_another_attempt_takes_the_place_of_the_one_before(database):
    add(database, job())
    with database.transaction():
        database.add_submission("j", GIVEN)
        database.add_submission("j", replace(GIVEN, sha256="00" * 32), again=True)
    assert database.submission("j", 1, "a").sha256 == "00" * 32


def test_a_transaction_that_ended_survives_a_power_cut(database):
    """SQLite waits for the disk at each commit: 2 is FULL."""
    assert database._connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_contributions_are_kept_by_job_and_silo_each_once(database, path):
    for name in ("j", "k"):
        add(database, job(name))
    with database.transaction():
        database.add_contribution("j", "a", "11" * 32, b"one")
        database.add_contribution("j", "b", "22" * 32, b"two")
        database.add_contribution("k", "a", "11" * 32, b"three")
    with pytest.raises(LocalError, match="UNIQUE"), database.transaction():
        database.add_contribution("j", "a", "11" * 32, b"four")
    database = again(database, path)
    one, two = StoredContribution("11" * 32, b"one"), StoredContribution("22" * 32, b"two")
    assert database.contributions("j") == {"a": one, "b": two}
    assert (database.contribution("j", "b"), database.contribution("k", "b")) == (two, None)
    assert database.contributions("nothing") == {}


OPEN = replace(
    job(), stage="round", cohort=("b", "a"), answers=dict.fromkeys(SILOS, "accepted"), round=1
)


def test_an_upload_counts_as_given_by_its_row_while_its_round_is_open(database, path):
    add(database, OPEN, replace(OPEN, job="other"))
    submit(database, replace(GIVEN, round=0, silo="b"))
    for place, silo in enumerate(("a", "b"), 1):
        submit(database, replace(GIVEN, silo=silo))
        expected = replace(OPEN, given=dict.fromkeys(("a", "b")[:place], GIVEN.sha256))
        assert database.states() == [expected, replace(OPEN, job="other")]
        assert list(database.states()[0].given) == ["a", "b"][:place]
    database = again(database, path)
    assert [kept.state for kept in database.jobs()] == [expected, replace(OPEN, job="other")]
    reading = Database(path, read_only=True)
    assert reading.states()[0] == expected
    reading.close()
    folding = replace(expected, stage="folding")
    save(database, folding)
    assert database.states()[0] == folding
    failed = replace(OPEN, stage="finishing", cohort=(), outcome="failed")
    save(database, failed)
    assert database.states()[0] == failed
    database.close()


def test_nobody_gives_alone_to_a_sum_whatever_was_uploaded(database):
    add(database, replace(OPEN, blind=True))
    submit(database, GIVEN)
    assert database.states() == [replace(OPEN, blind=True)]


def test_a_database_whose_states_have_all_that_was_given_is_taken_over(database, path):
    state = replace(OPEN, given={"a": GIVEN.sha256})
    add(database, state)
    submit(database, GIVEN)
    database.close()
    with closing(sqlite3.connect(path)) as old, old:
        old.execute("DROP TABLE misdealings")
        old.execute("PRAGMA user_version = 4")
    found = Database(path)
    assert found.states() == [state]
    found.close()
    with closing(sqlite3.connect(path)) as new, new:
        assert new.execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_evidence_is_kept_by_job_and_dealer_and_the_first_stays(database, path):
    for name in ("j", "k"):
        add(database, job(name))
    first, second = (replace(longest_evidence(4, dealer), document=b"{}") for dealer in (0, 1))
    other = replace(first, fault=Unopened(names(4)[1], bytes(32)))
    with database.transaction():
        for name, evidence in (("j", second), ("j", first), ("j", other), ("k", other)):
            database.add_misdealing(name, evidence)
    with database.transaction():
        database.drop_secure("j")
    database = again(database, path)
    assert (database.misdealings("j"), database.misdealings("k")) == ((first, second), (other,))


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_database_of_a_version_before_is_taken_over(database, path, version):
    """Its states lack the fields that came since, its submissions are of no part."""
    add(database, job())
    submit(database, GIVEN)
    database.close()
    with closing(sqlite3.connect(path)) as old, old:
        lasts = {"misdealings": 4, "contributions": 3, "hidden": 3, "mixed": 3, "secure": 2}
        for table, last in lasts.items():
            if version <= last:
                old.execute(f"DROP TABLE {table}")
        if version < 4:
            old.execute("CREATE TABLE before AS SELECT * FROM submissions")
            old.execute("DROP TABLE submissions")
            without = SUBMISSIONS.replace("  part TEXT NOT NULL", "  --")
            old.execute(without.replace("silo, part)", "silo)"))
            columns = "job, round, silo, file, size, sha256, ledger_seq, ledger_leaf, receipt"
            old.execute(f"INSERT INTO submissions SELECT {columns} FROM before")
            old.execute("DROP TABLE before")
        (state,) = old.execute("SELECT state FROM jobs").fetchone()
        kept = {key: value for key, value in json.loads(state).items() if key not in NEW}
        assert len(kept) == len(json.loads(state)) - len(NEW)
        old.execute("UPDATE jobs SET state = ?", (json.dumps(kept),))
        old.execute(f"PRAGMA user_version = {version}")
    reading = Database(path, read_only=True)
    assert reading.states() == [job()]
    reading.close()
    found = Database(path)
    assert [kept.state for kept in found.jobs()] == [job()]
    assert (found.secure_rows("j", 0), found.misdealings("j")) == ([], ())
    assert found.submission("j", 1, "a") == GIVEN
    with found.transaction():
        found.add_submission("j", replace(GIVEN, part="rows"))
    assert found.submission("j", 1, "a") == GIVEN
    assert found.submission("j", 1, "a", "rows").part == "rows"
    found.close()
    with closing(sqlite3.connect(path)) as new, new:
        assert new.execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_uploads_of_parts_and_the_words_on_them_come_back(database, path):
    add(database, replace(job(), blind=True), replace(job("other"), blind=True))
    words = WORDS
    vectors = StoredHidden(1, "rows", "a", b"\3" * 32, "1.a.rows.rotated", 40, b"\4" * 32)
    older = replace(words, round=0, file="0.a.extractor.padded", signed=b"word")
    with database.transaction():
        for each in (words, vectors, older):
            database.add_hidden("j", each)
        database.add_hidden("other", words)
        database.sign_hidden("j", 1, "extractor", "a", b"\0signed")
    database = again(database, path)
    found = {kept.state.job: kept.hidden for kept in database.jobs()}
    assert found == {"j": (older, replace(words, signed=b"\0signed"), vectors), "other": (words,)}
    assert database.signed("j", 1, "extractor", "a") == b"\0signed"
    for place in (("j", 1, "rows"), ("other", 1, "extractor"), ("j", 2, "extractor")):
        with pytest.raises(LocalError, match=r"no upload of part .* that 'a' signed; restore"):
            database.signed(*place, "a")
    with database.transaction():
        database.drop_hidden("j", [older.file, vectors.file])
    found = {kept.state.job: [each.file for each in kept.hidden] for kept in database.jobs()}
    assert found == {"j": [words.file], "other": [words.file]}


def test_an_upload_of_a_part_takes_nobodys_place_by_itself(database):
    add(database, replace(job(), blind=True))
    with database.transaction():
        database.add_hidden("j", WORDS)
    with pytest.raises(LocalError, match="UNIQUE"), database.transaction():
        database.add_hidden("j", replace(WORDS, context=b"\5" * 32))


def test_what_rows_were_made_of_is_kept_by_part_and_recipient(database, path):
    add(database, replace(job(), blind=True))
    first = RowMemory(last="9f" * 32, newest={"a": 4})
    second = RowMemory(last="8e" * 32, newest={"a": 5, "c": 1})
    with database.transaction():
        database.save_memories("j", {("extractor", "b"): first, ("extractor", "c"): first})
        database.save_memories("j", {("extractor", "b"): second})
    (kept,) = again(database, path).jobs()
    assert kept.memories == {("extractor", "b"): second, ("extractor", "c"): first}


def test_a_part_has_a_submission_of_its_own(database):
    add(database, job())
    submit(database, GIVEN, replace(GIVEN, part="extractor", size=8))
    assert database.submission("j", 1, "a") == GIVEN
    assert database.submission("j", 1, "a", "extractor").size == 8
    assert database.submission("j", 1, "a", "rows") is None


@pytest.mark.parametrize(
    "damaged", [b"", b"\xff" * 40, b"\x08\0\0\0\0\0\0\0{}      ab", bytes(100)], ids=repr
)
def test_a_damaged_state_of_a_method_is_named_with_its_job(database, path, damaged):
    add(database, job("good"), job("bad"), method={"w": torch.ones(3)})
    database.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE jobs SET method = ? WHERE name = 'bad'", (damaged,))
    connection.close()
    found = Database(path)
    with pytest.raises(LocalError) as caught:
        found.jobs()
    found.close()
    where = f"{path}: what the method of job 'bad' knows (jobs.method)"
    assert str(caught.value).startswith(f"{where}: not a file of tensors")
    assert str(caught.value).endswith("; restore it from a backup")


# What a disk changes at rest.
def filled(path):
    """A database with rows in all of its tables."""
    path.write_bytes(rows_in_all_tables())


@functools.cache
def rows_in_all_tables():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        fill(Database(path))
        return path.read_bytes()


def fill(database):
    add(database, replace(job(), blind=True), job("other"), method={"w": torch.ones(3)})
    with database.transaction():
        for number in (1, 2):
            database.add_submission("j", replace(GIVEN, round=number))
        database.add_submission("j", replace(GIVEN, size=7), again=True)
        database.save_head("a", StoredHead("07" * 32, b"note"))
        database.save_head("a", StoredHead("08" * 32, b"a later note"))
        database.add_secure("j", 1, ReplayEntry(0, "failed", "", b'{"code":"x","silo":"a"}'))
        database.add_contribution("j", "a", "09" * 32, b"contributed")
        database.add_hidden("j", replace(WORDS, signed=b"word"))
        memory = RowMemory(last="9f" * 32, newest={"a": 4})
        database.save_memories("j", {("extractor", "b"): memory})
        files = {("result", "m", ""): "0.m"}
        database.close_round("j", 0, ("a",), {"tested": 5}, {"w": torch.ones(2)}, files)
        database.save_state(replace(job(), blind=True, stage="round", round=1))
    database.close()


TABLES = ("jobs", "rounds", "submissions", "heads", "files")
TABLES += ("secure", "contributions", "hidden", "mixed")


def changes():
    """A change of each column of each table, and of how many rows there are."""
    with tempfile.TemporaryDirectory() as folder:
        filled(Path(folder) / "x")
        with closing(sqlite3.connect(Path(folder) / "x")) as made, made:
            for table in TABLES:
                yield table, f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})"
                for _, name, kind, *_ in made.execute(f"PRAGMA table_info({table})"):
                    more = {"INTEGER": "{} + 10", "TEXT": "{} || ' '", "BLOB": "x'00'"}
                    other = more[kind].format(name)
                    row = f"WHERE rowid = (SELECT min(rowid) FROM {table})"
                    yield table, f"UPDATE {table} SET {name} = {other} {row}"


@pytest.mark.parametrize(
    ("table", "change"), [pytest.param(*each, id=each[1]) for each in changes()]
)
def test_what_a_disk_changed_in_a_row_is_found_and_its_table_named(path, table, change):
    filled(path)
    Database(path).close()  # as it was written it is taken
    with closing(sqlite3.connect(path)) as disk, disk:
        assert disk.execute(change).rowcount == 1
    disk.close()
    if "method" in change:  # it has a digest of its own
        with pytest.raises(LocalError, match=r"\(jobs\.method\)"):
            Database(path).jobs()
        return
    for how in ({}, {"read_only": True}):
        with refused(f"coordinator.sqlite: table {table} is not as it was written: the disk"):
            Database(path, **how)


def test_one_bit_anywhere_in_the_file_of_a_database_changes_nothing_in_silence(path):
    """A flipped bit is found, or lies where nothing is."""
    filled(path)
    whole = [database_dump(path)]
    data = path.read_bytes()
    found = 0
    for at in range(0, len(data), 211):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            with closing(Database(path)) as database:
                database.jobs()
        except LocalError:
            found += 1
            continue
        assert database_dump(path) in whole
    assert found > 20
    path.write_bytes(data[:-4096])
    with pytest.raises(LocalError, match=r"coordinator\.sqlite"):
        Database(path)


def database_dump(path):
    with closing(sqlite3.connect(path)) as connection:
        return [connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES]


def test_a_database_of_a_release_without_seals_is_sealed(path):
    filled(path)
    with closing(sqlite3.connect(path)) as old, old:
        for table in ("seals", "misdealings"):
            old.execute(f"DROP TABLE {table}")
        old.execute("PRAGMA user_version = 4")
    Database(path, read_only=True).close()
    Database(path).close()
    with closing(sqlite3.connect(path)) as disk, disk:
        disk.execute("UPDATE rounds SET round = 7")
    with pytest.raises(LocalError, match="table rounds"):
        Database(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_whose_seals_are_gone_is_not_sealed_as_it_is(path, read_only):
    filled(path)
    with closing(sqlite3.connect(path)) as disk, disk:
        disk.execute("DROP TABLE seals")
    with pytest.raises(LocalError, match="table seals is not as it was written"):
        Database(path, read_only=read_only)

import errno
import hashlib

import pytest
from faults.disk import Calls, failing, short
from support.counted import of_counts, of_scores
from support.refusals import refused

from staddle.errors import UnwritableError
from staddle.simulator.run.disk import NOTHING, Prefix
from staddle.simulator.run.history import HistoryFile, read, to_line

ONE = of_counts(1, "selected/after", {"b": 3, "a": 0}, {"b": 4, "a": 2})
TWO = of_counts(2, "validation/trained", {"a": 7}, {"a": 7})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.jsonl"


def test_a_measure_is_a_line():
    silos = b'{"b":[0.75,4,1.0,0.75],"a":[0.0,2,1.0,0.0]}'
    line = b'{"rounds":1,"measure":"selected/after","silos":' + silos + b"}\n"
    assert to_line(ONE) == line


def test_a_score_that_is_no_share_is_read_as_it_was_written(path):
    one = of_scores(
        3, "all/trained", {"a": 1e-7, "b": -4.1}, {"a": 3, "b": 9}, {"a": 1 / 3, "b": 7.0}
    )
    line = to_line(one)
    assert b'"b":[-4.1,9,7.0,null]' in line
    path.write_bytes(line)
    assert read(path) == (one,)


def test_what_was_added_is_read_and_kept(path):
    file = HistoryFile(path, NOTHING)
    assert file.measures == ()
    file.append([ONE, TWO])
    kept = file.sync()
    file.append([TWO])
    file.close()
    data = path.read_bytes()
    assert kept == Prefix(
        bytes=len(to_line(ONE) + to_line(TWO)),
        sha256=hashlib.sha256(data[: kept.bytes]).hexdigest(),
    )
    assert read(path) == (ONE, TWO, TWO)
    assert read(path, kept) == (ONE, TWO)
    assert list(read(path)[0].records) == ["b", "a"]  # job order


def test_who_goes_on_begins_where_the_snapshot_was(path):
    file = HistoryFile(path, NOTHING)
    file.append([ONE])
    kept = file.sync()
    file.append([TWO])
    file.close()
    path.write_bytes(path.read_bytes() + b'{"rounds":3,"mea')
    again = HistoryFile(path, kept)
    assert again.measures == (ONE,)
    again.append([TWO])
    after = again.sync()
    again.close()
    assert read(path, after) == read(path) == (ONE, TWO)


def test_a_line_that_is_being_written_is_not_read_yet(path):
    path.write_bytes(to_line(ONE) + to_line(TWO)[:-1])
    assert read(path) == (ONE,)
    path.write_bytes(b"")
    assert read(path) == ()


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d.replace(b"5,4", b"6,4"), lambda d: d[:0]]
)
def test_other_bytes_than_the_snapshot_says_are_refused_and_stay(path, change):
    kept = Prefix(bytes=len(to_line(ONE)), sha256=hashlib.sha256(to_line(ONE)).hexdigest())
    altered = change(to_line(ONE))
    path.write_bytes(altered)
    for ask in (HistoryFile, read):
        with refused(r"history\.jsonl: its first \d+ bytes are not those .* restore it"):
            ask(path, kept)
    assert path.read_bytes() == altered


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"nonsense", "JSON is malformed"),
        (b'{"rounds":0,"measure":"all/trained","silos":{"a":[1,2]}}', "`int` >= 1"),
        (b'{"rounds":1,"measure":"all/guessed","silos":{"a":[1,2]}}', "all/guessed"),
        (b'{"rounds":1,"measure":"all/trained","silos":{}}', "length >= 1"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[0,0]}}', "`int` >= 1"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[0.5,-1]}}', "`int` >= 1"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[0.5,1.5]}}', "Expected `int`"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[null,2]}}', "Expected `float`"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[0.5,2,null]}}', "Expected `float`"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[NaN,2]}}', "JSON is malformed"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[1,2]}}', "length 4"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[1,2,1,1.5]}}', "<= 1"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[1,2,1,-0.5]}}', ">= 0"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"a":[1,2,1,0.5]},"more":1}',
            "unknown field `more`"),
        (b'{"rounds":1,"measure":"all/trained"}', "required field `silos`"),
        (b'{"rounds":1,"measure":"all/trained","silos":{"\xff":[1,2]}}', "line 2"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_measure_is_named(path, line, why):
    path.write_bytes(to_line(ONE) + line + b"\n")
    with refused(r"history\.jsonl, line 2: .*restore it from a backup, or remove") as caught:
        read(path)
    assert why in str(caught.value)


@pytest.mark.parametrize("fault", [failing(errno.ENOSPC), short], ids=["full", "short"])
def test_a_line_that_the_disk_does_not_take_is_told(path, monkeypatch, fault):
    file = HistoryFile(path, NOTHING)
    with monkeypatch.context() as patch:
        Calls(patch, 1, fault)
        with pytest.raises(UnwritableError, match=r"history\.jsonl: cannot write it"):
            file.append([ONE])
    with monkeypatch.context() as patch:
        Calls(patch, 1, failing(errno.EIO))
        with pytest.raises(UnwritableError, match=r"history\.jsonl: cannot write it"):
            file.sync()
    file.close()


def test_what_was_torn_is_never_part_of_a_snapshot(path, monkeypatch):
    file = HistoryFile(path, NOTHING)
    with monkeypatch.context() as patch:
        Calls(patch, 1, short)
        with pytest.raises(UnwritableError):
            file.append([ONE])
    file.append([TWO])
    said = r"history\.jsonl: cannot write it: its length is not what was written"
    with pytest.raises(UnwritableError, match=said):
        file.sync()
    file.close()


def test_a_folder_in_its_place_is_told(path):
    path.mkdir()
    with pytest.raises(UnwritableError, match="cannot write it"):
        HistoryFile(path, NOTHING)
    with refused("cannot read it"):
        read(path)

"""The download of a job's file of weights: pieces of a coordinator that may send anything."""

import asyncio
import hashlib
from types import SimpleNamespace

import pytest

from staddle.algorithms.models.pretrained import StartWeights
from staddle.errors import PeerError, RefusedError
from staddle.security.preflight import LEAST_FREE
from staddle.silo.ingress.start_weights import take

DATA = bytes(range(256)) * 1000
PART = 100_000  # bytes
WEIGHTS = StartWeights(sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA))


class LostError(PeerError):
    """The connection broke."""


@pytest.fixture
def download(tmp_path):
    """``download(attempt, …)``: each attempt is what one call of the coordinator sends."""

    def call(*attempts):
        left, call.offsets = list(attempts), []

        async def pieces(offset):
            call.offsets.append(offset)
            for piece in left.pop(0):
                if piece is LostError:
                    raise LostError("coordinator", "gone")
                yield piece

        asyncio.run(take(WEIGHTS, call.path, pieces, "coordinator"))

    call.path = tmp_path / "weights" / WEIGHTS.name
    return call


def test_the_file_lies_under_its_digest(download):
    download([DATA[:PART], DATA[PART:]])
    assert download.path.read_bytes() == DATA
    assert [path.name for path in download.path.parent.iterdir()] == [WEIGHTS.name]


def test_after_a_lost_connection_the_rest_is_asked_for(download):
    with pytest.raises(LostError):
        download([DATA[:PART], LostError])
    assert not download.path.exists()
    download([DATA[PART:]])
    assert download.offsets == [PART]
    assert download.path.read_bytes() == DATA


def test_nothing_is_asked_for_where_all_arrived_before_a_crash(download):
    with pytest.raises(LostError):
        download([DATA, LostError])
    download()
    assert download.offsets == []
    assert download.path.read_bytes() == DATA


def test_what_a_crash_spoilt_is_sent_again(download):
    download.path.parent.mkdir()
    download.path.with_name(f"{WEIGHTS.name}.part").write_bytes(b"\0" * PART)
    download([DATA[PART:]], [DATA])
    assert download.offsets == [PART, 0]
    assert download.path.read_bytes() == DATA


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        ([DATA[:-1] + b"x"], "the file has SHA-256"),
        ([DATA[:PART]], "ended after 100000 of 256000 bytes"),
        ([DATA, b"x"], "a piece of 1 bytes after 256000 of 256000"),
        ([b""], "a piece of 0 bytes after 0 of 256000"),
        ([], "ended after 0 of 256000 bytes"),
    ],
)
def test_another_file_is_refused(download, attempt, said):
    with pytest.raises(RefusedError) as caught:
        download(attempt)
    assert (caught.value.code, caught.value.peer) == ("DELIVERY", "coordinator")
    assert caught.value.why.startswith(f"the job's file of weights: {said}")
    assert list(download.path.parent.iterdir()) == []


def test_a_coordinator_that_sends_another_file_twice_is_refused(download):
    with pytest.raises(LostError):
        download([DATA[:PART], LostError])
    with pytest.raises(RefusedError, match="the file has SHA-256"):
        download([b"x" * 156_000], [b"x" * 256_000])
    assert download.offsets == [PART, 0]


def test_a_file_for_which_there_is_no_room_is_not_asked_for(download, monkeypatch):
    room = SimpleNamespace(free=LEAST_FREE + len(DATA) - 1)
    monkeypatch.setattr("staddle.silo.ingress.start_weights.shutil.disk_usage", lambda _: room)
    with pytest.raises(RefusedError, match="no room for the job's file of weights") as caught:
        download([DATA])
    assert caught.value.code == "DATA"
    assert (download.offsets, list(download.path.parent.iterdir())) == ([], [])
    room.free += 1
    download([DATA])
    assert download.path.read_bytes() == DATA

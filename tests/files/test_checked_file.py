"""Small files of state that show what a disk did to them."""

import hashlib
import json

import pytest

from staddle.errors import LocalError
from staddle.files import checked_file
from staddle.files.documents import Strict, canonical_json


class Memory(Strict):
    """Fields of the kinds that memories have."""

    newest: dict[str, int]
    last: str
    abandoned: bool


KEPT = Memory(newest={"a": 4, "b": 17}, last="9f86", abandoned=True)


def flipped(data):
    """The data with each of its bits changed in turn."""
    for at in range(len(data)):
        for bit in range(8):
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_a_document_comes_back_and_names_its_own_digest(tmp_path):
    path = tmp_path / "memory.json"
    checked_file.write_json(path, KEPT)
    assert checked_file.read_json(path, Memory) == KEPT
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_bytes())
    said = document.pop("file_sha256")
    assert said == hashlib.sha256(canonical_json(document)).hexdigest()
    assert document == KEPT.model_dump()


def test_bytes_come_back_and_end_with_their_digest(tmp_path):
    for kept in (b"", bytes(range(96))):
        path = tmp_path / "key"
        checked_file.write_bytes(path, kept)
        assert checked_file.read_bytes(path) == kept
        assert path.read_bytes() == kept + hashlib.sha256(kept).digest()


def test_a_bit_that_a_disk_changed_is_found_wherever_it_is(tmp_path):
    for data in flipped(checked_file.to_json(KEPT)):
        with pytest.raises(LocalError, match=r"^here: .*restore it from a backup$"):
            checked_file.from_json(data, Memory, "here")
    path = tmp_path / "group.key"
    for data in flipped(checked_file.to_bytes(b"secret")):
        path.write_bytes(data)
        why = r"group\.key: is not as it was written: the disk changed it"
        with pytest.raises(LocalError, match=why) as caught:
            checked_file.read_bytes(path)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_a_file_that_is_cut_or_longer_is_refused(tmp_path, kept):
    path = tmp_path / "state"
    for data, read in (
        (checked_file.to_json(KEPT), lambda: checked_file.read_json(path, Memory)),
        (checked_file.to_bytes(bytes(64)), lambda: checked_file.read_bytes(path)),
    ):
        for damaged in (data[:kept], data + b"\0", data + b"\n"):
            path.write_bytes(damaged)
            with pytest.raises(LocalError, match=r"state: .*restore it from a backup"):
                read()


def test_documents_without_and_with_a_wrong_digest():
    """One of an earlier release has no digest and is read; a wrong digest is refused."""
    assert checked_file.from_json(canonical_json(KEPT.model_dump()), Memory, "x") == KEPT
    with pytest.raises(LocalError, match="the disk changed it"):
        checked_file.from_json(canonical_json({**KEPT.model_dump(), "file_sha256": 7}), Memory, "x")


def test_a_model_with_a_field_of_that_name_is_a_bug():
    class Wrong(Strict):
        file_sha256: str = ""

    with pytest.raises(LocalError, match="is a bug in Staddle"):
        checked_file.to_json(Wrong())

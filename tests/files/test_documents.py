import json
import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PlainValidator

from staddle.errors import LocalError
from staddle.files import documents as d
from staddle.files.tagged import of_kind

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-d.MAX_SAFE_INTEGER, d.MAX_SAFE_INTEGER) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(max_codepoint=127), max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


class Limits(d.Strict):
    max_bytes: int


class File(d.Strict):
    version: int
    limits: Limits


@given(VALUES)
def test_canonical_json_round_trips_and_is_a_fixed_point(value):
    data = d.canonical_json(value)
    assert d.parse_json(data, "t") == value
    assert d.canonical_json(d.parse_json(data, "t")) == data


@given(VALUES)
def test_canonical_json_is_that_of_another_implementation(value):
    assert d.canonical_json(value) == rfc8785.dumps(value)


def test_canonical_json_bytes_are_those_of_rfc_8785():
    value = {"b": [1, True, None], "a": '€\n\u001f"\\/\u007f', "A": {}}
    found = d.canonical_json(value)
    assert found == '{"A":{},"a":"€\\n\\u001f\\"\\\\/\u007f","b":[1,true,null]}'.encode()


@pytest.mark.parametrize(("value", "said"), [
    (1.5, "decimals as strings"), ({"x": [0.0]}, r"\$.x\[0\]"), (2**53, "beyond 2"),
    (-(2**53), "beyond 2"), ("\ud800", "surrogate"), ({"é": 1}, "not an ASCII"),
    ({1: 1}, "not an ASCII"), (b"x", "bytes"), ({1, 2}, "set"),
])  # fmt: skip
def test_canonical_json_refuses(value, said):
    with pytest.raises(LocalError, match=said):
        d.canonical_json(value)


def test_canonical_json_refuses_deep_nesting_before_the_interpreter_does():
    value = d.parse_json(b"[" * 900 + b"]" * 900, "peer")
    with pytest.raises(LocalError, match="nested deeper"):
        d.canonical_json(value)


@pytest.mark.parametrize(("data", "said"), [
    (b'{"a":1,"a":2}', "'a' appears twice"), (b'{"x":{"a":1,"a":1}}', "'a' appears twice"),
    (b"[NaN]", "NaN"), (b"[-Infinity]", "-Infinity"), (b"[1e999]", "1e999"),
    (b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[" * 100_000, "not valid JSON"),
    (b"1" * 5000, "not valid JSON"), ('{"a":1}'.encode("utf-16"), "not valid JSON"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
])  # fmt: skip
def test_parse_json_refuses(data, said):
    with pytest.raises(LocalError, match=f"(?s)^origin: .*{said}"):
        d.parse_json(data, "origin")


def test_parse_canonical_refuses_another_spelling():
    good = b'{"limits":{"max_bytes":1},"version":1}'
    assert d.parse_canonical(good + b"\n", File, "f").version == 1
    for bad in (good + b"\n\n", b" " + good, json.dumps(json.loads(good)).encode()):
        with pytest.raises(LocalError, match="not canonical"):
            d.parse_canonical(bad, File, "f")


def test_unknown_keys_name_the_nearest_known_one(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("version = 1\n[limits]\nmax_byte = 3\n")
    with pytest.raises(LocalError) as caught:
        d.read_toml(path, File)
    assert (
        str(caught.value)
        == f"{path}: missing key 'limits.max_bytes'; add it; unknown key 'limits.max_byte'; did you"
        " mean 'max_bytes'?"
    )
    with pytest.raises(LocalError, match="known keys: limits, version"):
        d.validate({"version": 1, "limits": {"max_bytes": 1}, "qqq": 1}, File, "f")
    with pytest.raises(LocalError, match=r"version = 'x': give a whole number$"):
        d.validate({"version": "x", "limits": {"max_bytes": 1}}, File, "f")


class Rule(d.Strict):
    name: str
    never: tuple[str, ...] = ()


class Numbers(d.Strict):
    kind: Literal["numbers"]
    seed: int = 0


class Images(d.Strict):
    kind: Literal["images"]
    folder: str = ""
    marks: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class Tables(d.Strict):
    log: str = "text"
    limits: File | None = None
    rules: tuple[Rule, ...] = ()
    data: Annotated[Numbers | Images, Field(discriminator="kind")] = Numbers(kind="numbers")


@pytest.mark.parametrize(("document", "said"), [
    ({"lgo": 1}, "unknown key 'lgo'; did you mean 'log'?"),
    ({"limit": {}}, "unknown key 'limit'; did you mean 'limits'?"),
    ({"rules": [{"name": "a"}, {"name": "b", "nevr": []}]},
        "unknown key 'rules.1.nevr'; did you mean 'never'?"),
    ({"rules": [{"name": "a", "log": 1}]},
        "unknown key 'rules.0.log'; 'log' belongs at the top of the file"),
    ({"never": []}, "unknown key 'never'; 'never' belongs in [[rules]]"),
    ({"nevr": []}, "unknown key 'nevr'; did you mean 'never', which belongs in [[rules]]?"),
    ({"max_bytes": 1}, "unknown key 'max_bytes'; 'max_bytes' belongs in [limits.limits]"),
    ({"data": {"kind": "images", "foldr": ""}}, "unknown key 'data.foldr'; did you mean 'folder'?"),
    ({"limits": {"version": 1, "limits": {"max_bytes": 1, "log": 1}}},
        "unknown key 'limits.limits.log'; 'log' bel"),
    ({"rules": [{"name": "a", "qq": 1}]}, "unknown key 'rules.0.qq'; known keys: name, never"),
    ({"data": {"kind": "numbers", "seed": "x"}}, "data.seed = 'x': give a whole number"),
    ({"limits": {"version": 1, "limits": {"max_bytes": 1}, "lmits": 1}},
        "'limits.lmits'; did you mean 'limits'?"),
])  # fmt: skip
def test_an_unknown_key_is_told_its_own_table_s_keys_first_then_where_it_belongs(document, said):
    with pytest.raises(LocalError) as caught:
        d.validate(document, Tables, "f")
    assert said in str(caught.value)


def test_a_key_of_a_plain_table_is_named_whatever_kind_the_table_around_it_is():
    kinds = {"numbers": Numbers, "images": Images}

    class OfKind(d.Strict):
        data: Annotated[Numbers | Images, PlainValidator(lambda value: of_kind(value, kinds))]

    with pytest.raises(LocalError) as caught:
        d.validate({"data": {"kind": "images", "marks": {"bmi": ["", 0]}}}, OfKind, "f")
    assert str(caught.value) == "f: data.marks.bmi.1 = 0: give a text in quotes"


def test_a_near_key_here_and_the_same_key_elsewhere_are_both_told():
    class Both(d.Strict):
        seeds: int = 0
        data: Numbers = Numbers(kind="numbers")

    with pytest.raises(LocalError) as caught:
        d.validate({"seed": 1}, Both, "f")
    found = str(caught.value)
    assert found == "f: unknown key 'seed'; did you mean 'seeds'? 'seed' belongs in [data]"


class Shapes(d.Strict):
    sides: Annotated[
        tuple[Annotated[int, Field(ge=1, le=9)], ...], Field(min_length=2, max_length=3)
    ] = (1, 1)
    name: Annotated[str, Field(pattern="^[a-z]{1,4}$")] = "a"
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    mode: Literal["text", "json"] = "text"
    place: Path = Path()
    strict: bool = False
    options: dict[str, int] = Field(default_factory=dict)
    table: File | None = None


@pytest.mark.parametrize(("key", "value", "said"), [
    ("sides", [1], "sides: give a list of 2 or more, not of 1"),
    ("sides", [1, 1, 1, 1], "sides: give a list of 3 or fewer, not of 4"),
    ("sides", "1", "sides = '1': give a list in brackets"),
    ("sides", [0, 1, 1], "sides.0 = 0: give 1 or more"),
    ("sides", [10, 1, 1], "sides.0 = 10: give 9 or less"),
    ("sides", [0], "sides.0 = 0: give 1 or more"),
    ("sides", [1.5, 1], "sides.0 = 1.5: give a whole number"),
    ("name", 3, "name = 3: give a text in quotes"),
    ("name", "A{}", "name = 'A{}': give a text that matches ^[a-z]{1,4}$"),
    ("share", 0, "share = 0: give a value above 0.0"),
    ("share", 1, "share = 1: give a value below 1.0"), ("share", "x", "share = 'x': give a number"),
    ("share", float("inf"), "share = inf: give a finite number"),
    ("mode", "xml", "mode = 'xml': give 'text' or 'json'"),
    ("place", 3, "place = 3: give a path in quotes"),
    ("strict", "maybe", "strict = 'maybe': give true or false"),
    ("options", 3, "options = 3: give a table"), ("table", 3, "table = 3: give a table"),
])  # fmt: skip
def test_a_value_that_will_not_do_is_named_with_what_to_give_instead(key, value, said):
    with pytest.raises(LocalError) as caught:
        d.validate({key: value}, Shapes, "f")
    assert str(caught.value) == f"f: {said}"


@pytest.mark.parametrize("data", [b"a = ", b"\xff", b"a = " + b"[" * 5000])
def test_bad_toml_is_a_local_error(data):
    with pytest.raises(LocalError, match=r"^f: not valid TOML"):
        d.parse_toml(data, File, "f")


def test_read_bytes_names_the_file(tmp_path):
    with pytest.raises(LocalError, match="gone: cannot read it: No such file"):
        d.read_bytes(tmp_path / "gone")
    with pytest.raises(LocalError, match="cannot read it"):
        d.read_bytes(tmp_path)


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "f"
    d.write_atomic(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o600

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LocalError, match="f: cannot write it: No space"):
        d.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_many_files_are_replaced_one_by_one_and_their_folders_synced_once(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "below" / "c"]
    d.write_atomic(paths[1], b"old")
    synced = []
    monkeypatch.setattr(d, "sync_directory", synced.append)
    d.write_all((path, path.name.encode()) for path in paths)
    assert [path.read_bytes() for path in paths] == [b"a", b"b", b"c"]
    assert synced == [tmp_path, tmp_path / "below"]
    with pytest.raises(LocalError, match="below: cannot write it"):
        d.write_all([(paths[0], b"new"), (tmp_path / "below", b"")])
    assert paths[0].read_bytes() == b"new"
    assert len(list(tmp_path.rglob("*"))) == 4


def test_write_atomic_that_cannot_rename_leaves_nothing_behind(tmp_path):
    (tmp_path / "taken" / "x").mkdir(parents=True)
    with pytest.raises(LocalError, match="taken: cannot write it"):
        d.write_atomic(tmp_path / "taken", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_writing_into_a_missing_folder_is_a_local_error(tmp_path):
    for write in (d.write_atomic, d.write_new):
        with pytest.raises(LocalError, match="No such file"):
            write(tmp_path / "no" / "f", b"")


def test_write_new_never_overwrites_and_never_leaves_half_a_file(tmp_path, monkeypatch):
    path = tmp_path / "key"
    d.write_new(path, b"one")
    with pytest.raises(LocalError, match="exists already"):
        d.write_new(path, b"two")
    assert path.read_bytes() == b"one"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LocalError, match="No space"):
        d.write_new(tmp_path / "other", b"x")
    assert not (tmp_path / "other").exists()


def test_an_error_repeats_the_beginning_of_a_long_value():
    with pytest.raises(LocalError) as caught:
        d.validate({"version": "x" * 100_000, "limits": {"max_bytes": 1}}, File, "f")
    assert str(caught.value).startswith("f: version = 'xxx")
    assert len(str(caught.value)) < 400


def test_a_document_with_very_many_faults_is_refused_at_once_and_in_few_words():
    with pytest.raises(LocalError) as caught:
        d.validate({f"key-{number}": number for number in range(5_000)}, Tables, "f")
    assert str(caught.value).count("unknown key") == 50
    assert str(caught.value).endswith("; and 4950 more faults")

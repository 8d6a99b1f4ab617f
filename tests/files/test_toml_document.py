"""Small TOML files that cost the parser minutes, gigabytes or a traceback are refused first."""

import tomllib

import pytest

from staddle.errors import LocalError
from staddle.files import toml_document
from staddle.files.documents import Strict, read_toml
from staddle.files.toml_document import MOST_BYTES, parse_document


class File(Strict):
    version: int


DEEP = (
    "a key has more than 16 parts with dots between them; no key of Staddle has so many: correct it"
)
LONG = "a number has more than 4300 digits; correct it, or put it in quotes if it is a text"


@pytest.mark.parametrize(("text", "said"), [
    ("version = 1\n" + ".".join("a" * 20_000) + " = 1", f", line 2: {DEEP}"),
    ("version = 1\n[" + ".".join("a" * 20_000) + "]", f", line 2: {DEEP}"),
    ("[[" + " . ".join("a" * 17) + "]]", f", line 1: {DEEP}"),
    ("x = {b = 1, " + ".".join(["'a'", '"\\"b"'] * 9) + " = 1}", f", line 1: {DEEP}"),
    ("\n\nversion = " + "1" * 5000, f", line 3: {LONG}"),
    ("version = -" + "1" * 5000, f", line 1: {LONG}"),
    ("version = 0x" + "f" * 1_000_000, f", line 1: {LONG}"),
    ("version = 0b" + "1_0" * 100_000, f", line 1: {LONG}"),
    ("version = [1," + "1" * 500_000 + ".5]", f", line 1: {LONG}"),
    ("version = 0x" + "f" * 4000,
        ": version is out of range; an integer of TOML has 64 bits at most"),
    ("[[a]]\nb = [1, 9223372036854775808]", ": a.0.b.1 is out of range"),
    ("# " + "x" * MOST_BYTES,
        f": has {MOST_BYTES + 2:,} bytes, at most {MOST_BYTES:,} are read; is this the right"),
    ("version =", ": not valid TOML: "),
])  # fmt: skip
def test_what_takes_too_much_is_refused_by_file_and_line(tmp_path, monkeypatch, text, said):
    path = tmp_path / "c.toml"
    path.write_text(text)
    parse = tomllib.loads
    parsed = lambda text: parse(text) if len(text) < 5000 else pytest.fail("parsed")
    monkeypatch.setattr(toml_document.tomllib, "loads", parsed)
    with pytest.raises(LocalError) as caught:
        read_toml(path, File)
    assert str(caught.value).startswith(f"{path}{said}")
    assert len(str(caught.value)) < 1000


def test_what_only_looks_like_it_is_read():
    """Dots and digits in texts, 16 parts, the largest integers."""
    deep = ".".join("abcdefghijklmnop")
    text = f"""
    {deep} = 1
    words = ["{".".join("a" * 100)}", "{"1" * 5000}", '{"f" * 5000}']
    "a.b" . c = 9223372036854775807
    least = -9223372036854775808
    truth = true
    """
    assert parse_document(text.encode(), "c.toml") == tomllib.loads(text)

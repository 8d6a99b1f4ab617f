"""TOML as the standard library reads it, within bounds.

Without bounds a small file can take half a minute and gigabytes. Keys of 20,000 parts take time and
memory by the square of the parts, and a number of 5,000 digits cannot be written in an error. So
(1) size, (2) parts of a key and (3) digits are bounded before anything is parsed, and (4) integers
have 64 bits, as TOML 1.0 says.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import LocalError

MOST_BYTES = 1024 * 1024  # a job of 10,000 silos and as many named classes takes half of it
MOST_PARTS = 16  # of a key: no format here has more than four
# Python's own bound for decimal numbers, kept for those in hex, octal and binary too
MOST_DIGITS = 4300
# Possessive quantifiers: a hostile text cannot make the search backtrack.
KEY = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
DEEP_KEY = re.compile(
    rf"(?:^|[\[{{,])[ \t]*+(?:{KEY}[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}{KEY}", re.MULTILINE
)
LONG_NUMBER = re.compile(
    rf"""(?<![^\s=,\[+-])[0-9][0-9A-Fa-f_box.]{{{MOST_DIGITS},}}"""
)  # what a text has is in quotes
INTEGERS = range(-(2**63), 2**63)


def parse_document(data: bytes, origin: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises LocalError, which names ``origin``, for anything but TOML within these bounds.
    """
    # (1) Size: the cost of a key grows by the square of its parts.
    if len(data) > MOST_BYTES:
        raise LocalError(
            f"{origin}: has {len(data):,} bytes, at most {MOST_BYTES:,} are read; is this the right"
            " file?"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise LocalError(f"{origin}: not valid TOML: {error}") from error

    # (2) Parts of keys: searched in the text, because the parser itself is what they slow down.
    if found := DEEP_KEY.search(text):
        raise LocalError(
            f"{origin}, line {_line(text, found)}: a key has more than {MOST_PARTS} parts with dots"
            " between them; no key of Staddle has so many: correct it, or is this the wrong file?"
        )

    # (3) Digits: Python cannot write so long a number in an error.
    if found := LONG_NUMBER.search(text):
        raise LocalError(
            f"{origin}, line {_line(text, found)}: a number has more than {MOST_DIGITS} digits;"
            " correct it, or put it in quotes if it is a text"
        )
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise LocalError(f"{origin}: not valid TOML: {error}") from error

    # (4) 64 bits, as TOML 1.0 says; the standard library reads more.
    for where, number in _integers(document, ()):
        if number not in INTEGERS:
            raise LocalError(
                f"{origin}: {'.'.join(where)} is out of range; an integer of TOML has 64 bits at"
                " most"
            )
    return document


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def _integers(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(value, int):
        yield where, value
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for step, item in inner:
        yield from _integers(item, (*where, str(step)))

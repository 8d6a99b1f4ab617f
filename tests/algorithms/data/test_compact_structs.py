"""Structs in Thrift's compact protocol, as Parquet's writers and others write them."""

from io import BytesIO
from pathlib import Path

import pytest
from support.refusals import refused

from staddle.algorithms.data.compact_structs import LIST, LONG, STRUCT, WHOLE, read_struct

PATH = Path("some.parquet")


def test_fields_of_every_type():
    written = bytes.fromhex(
        "15 04"  # 1: 2
        "26 03"  # 3: -2, of 64 bits
        "11 12 13 07"  # 4: true, 5: false, 6: a byte
        "18 03 61 62 63"  # 7: abc
        "17 00 00 00 00 00 00 00 00"  # 8: 0.0
        "19 2c 15 0a 00 00"  # 9: two structs, the first with 1: 5
        "19 f8 02 01 61 00"  # 10: two texts
        "09 80 02 21 01 02"  # 128: two truth values
        "1c 15 80 01 00"  # 129: a struct with 1: 64
        "00 ff"
    )
    file = BytesIO(written)
    found = read_struct(PATH, file)
    known = {number: own for number, own in found.fields.items() if own[1] is not None}
    assert known == {
        1: (WHOLE, 2),
        3: (LONG, -2),
        6: (3, 7),
        9: (LIST, [{1: (WHOLE, 5)}, {}]),
        10: (LIST, [None, None]),
        128: (LIST, [1, 2]),
        129: (STRUCT, {1: (WHOLE, 64)}),
    }
    assert file.read() == b"\xff"
    numbers = (found, (1, WHOLE)), (found, (2, LONG)), (found.struct((129, STRUCT)), (1, WHOLE))
    assert [own.number(field) for own, field in numbers] == [2, 0, 64]
    assert [own.fields for own in found.structs((9, LIST))] == [{1: (WHOLE, 5)}, {}]
    assert (found.struct((2, STRUCT)).fields, found.structs((2, LIST))) == ({}, [])
    with refused("some.parquet: cannot read it as Parquet: it has a size that is none in its"):
        found.number((3, LONG))
    for ask, field in (
        *((found.number, (9, LONG)), (found.number, (1, LONG)), (found.number, (3, WHOLE))),
        *((found.struct, (1, STRUCT)), (found.structs, (1, LIST)), (found.structs, (10, LIST))),
    ):
        with refused("it has headers with fields of other types; write it again"):
            ask(field)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("15 04 05 02 06 00", "it has headers whose fields are out of order"),  # field 1 twice
        ("05 01 04", "it has headers whose fields are out of order"),
        ("1c" * 99, "it has headers with fields of other types"),
        ("19 1c" * 99, "it has headers with fields of other types"),
        ("1b", "it has headers with fields of other types"),
        ("15" + "ff" * 11, "it has a number without an end in its headers"),
        ("06 96 80 04 08", "it has a number that is too long in its headers"),  # a field's
        ("15 80 80 80 80 10 00", "it has a number that is too long in its headers"),
        ("", "it ends within its headers"),
        ("18 ff ff ff ff 7f", "it ends within its headers"),
        ("19 fc ff ff ff ff 7f 00 00", "it ends within its headers"),
    ],
)
def test_what_no_program_writes(written, said):
    with refused(f"some.parquet: cannot read it as Parquet: {said}"):
        read_struct(PATH, BytesIO(bytes.fromhex(written)))

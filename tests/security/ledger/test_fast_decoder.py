"""A line's quick check against the slow one it stands for: perhaps stricter, never laxer."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ledgers as book

from staddle.errors import LocalError
from staddle.files.documents import canonical_json
from staddle.security.ledger.fast_decoder import checked, well_formed
from staddle.security.ledger.records import PackageCode
from staddle.security.log.chain import Chain, VerifiedLine

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def slowly(line):
    """The record by JSON, canonical spelling, frame and models; None where one refuses it."""
    chain = Chain()
    try:
        parsed = json.loads(line)
        chain.count, chain.head = parsed["seq"], parsed["prev"]
        return checked(VerifiedLine(parsed["seq"], b"", chain.follow(line).record))
    except (LocalError, ValueError, TypeError, KeyError, RecursionError):
        return None


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """One of each record; intents also without tensors or a sum, and with the same tensors."""
    folder = tmp_path_factory.mktemp("ledger")
    book.full(folder)
    book.summed(folder)
    with book.open_ledger(folder) as ledger:
        odd = book.secagg(members=("silo-a", 'silo-b","type":"'), threshold=0)
        book.intend_masked(ledger, round_number=4, secagg=odd, cohort=())
        code = (PackageCode(name="lung", version="0.3", sha256=book.HASH),)
        book.intend(ledger, round_number=4, packages=code)
        odd = 'with ,"tensors":[] in it \x7f\u2028\x1f"\\/'
        book.intend(ledger, round_number=5, releases=[], job=odd)
        odd = {"job": "ø", "purpose": "", "rpc": "\n", "message": book.message_digest(0)}
        book.write_ingress(ledger, round_number=1, sender=book.PEER, **odd)
    found = book.stored(folder)
    book.keyed(folder / "keyed")
    book.private(folder / "private", noise="shared")
    found += book.stored(folder / "keyed")[1:] + book.stored(folder / "private")[1:]
    intents = [record for record in found if record["type"] == "egress.intent"]
    paid = next(intent for intent in intents if intent["dp"])
    older = [
        {key: value for key, value in intents[0].items() if key not in lacking}
        for lacking in (
            ("secagg",),
            ("hidden",),
            ("dp",),
            ("packages",),
            ("secagg", "hidden", "dp"),
        )
    ]
    older.append({**paid, "dp": {key: paid["dp"][key] for key in ("dataset", "ids")}})
    return [canonical_json(record) for record in [*found, *older]]


def test_every_record_that_we_write_passes_and_reads_the_same(lines):
    assert len({json.loads(line)["type"] for line in lines}) >= 14
    for line in lines:
        assert well_formed(line) == slowly(line) == json.loads(line)


EXCHANGED = [  # what stands there, and another thing in its place
    (b'"v":1}', b'"v":1,"v":1}'), (b'"v":1}', b'"v":1.0}'), (b'"v":1}', b'"v":1e0}'),
    (b'"v":1}', b'"v":true}'), (b'"v":1}', b'"v":2}'), (b'"v":1}', b'"v":1,"w":1}'),
    (b'"mono_us":', b'"mono_us":0'), (b'"mono_us":', b'"mono_us":-'),
    (b'"mono_us":', b'"mono_us":9007199254740993'), (b'"type"', b'"\\u0074ype"'), (b"Z", b"z"),
    (b'"part":', b'"part":0,"part":'), (b'"tensors":[{', b'"tensors":[ {'),
    (b'"tensors":[{"bytes":', b'"tensors":[{"bytes":1.5,"bytes":'),
    (b'"tensors":[', b'"tensors":[],"tensors":['), (b',"type"', b',"tensors":[],"type"'),
    (b'"nonce":"', b'"nonce":"0'), (b'"sha256":"ab', b'"sha256":"b'),
    (b'"sha256":"', b'"sha256":"0'), (b'"sha256":"', b'"sha256": "'),
    (b'"sha256":"a', b'"sha256":"\\u0061'), (b'"sha256":"ab', b'"sha256":"a\xc3\xa9'),
    (b'"ctx":"c', b'"ctx":"C'), (b'"ctx":"c', b'"ctx":"'), (b'"ctx":"c7', b'"ctx":"0x'),
    (b'"secagg":null', b'"secagg":{}'), (b'"secagg":null', b'"secagg":""'),
    (b'"secagg":{"attempt"', b'"secagg":{"x":0,"attempt"'),
    (b'"secagg":{', b'"secagg":null,"secagg":{'), (b'"hidden":null', b'"hidden":{}'),
    (b'"hidden":null', b'"hidden":""'), (b'"hidden":null,', b'"hidden":null,"hidden":null,'),
    (b'"hidden":{"ctx":"0', b'"hidden":{"ctx":"A'), (b'"hidden":{"ctx":"', b'"hidden":{"ctx":"0x'),
    (b'"hidden":{"ctx":"', b'"hidden":{"by":"me","ctx":"'),
    (b'"hidden":{', b'"hidden":null,"hidden":{'), (b',"number":', b',"number":-'),
    (b',"number":', b',"number":0'), (b',"number":', b',"number":9007199254740993'),
    (b',"number":0}', b"}"), (b',"number":0}', b',"number":0.0}'),
    (b',"number":0}', b',"number":null}'), (b'"kind":"contribution"', b'"kind":"contributions"'),
    (b'"kind":"padded"', b'"kind":"Padded"'), (b'"clipped":2,', b""), (b'"dp":null', b'"dp":{}'),
    (b'"dp":null', b'"dp":[]'), (b'"dp":{"dataset"', b'"dp":{"by":0,"dataset"'),
    (b'"ids":[2,', b'"ids":[-2,'), (b'"ids":[2,', b'"ids":["2",'), (b'"ids":[2,', b'"ids":[2.0,'),
    (b'"epsilon":"', b'"epsilon":"-'), (b'"epsilon":"', b'"epsilon":"1e'),
    (b'"epsilon":"0', b'"epsilon":"'), (b'"limit":"8"', b'"limit":"8\\n"'),
    (b'"limit":"8"', b'"limit":8'), (b'"delta":"0.', b'"delta":"0.' + b"0" * 40),
    (b'"threshold":3', b'"threshold":-3'), (b'"code":"SURVIVORS"', b'"code":"SURVIVOR"'),
    (b'"kind":"keys"', b'"kind":"key"'), (b'"why":"', b'"why":"' + b"x" * 500),
]  # fmt: skip


def other_spellings(line):
    """The same values, or nearly, in other bytes."""
    record = json.loads(line)
    yield line + b" "
    yield b" " + line
    yield line.replace(b",", b", ", 1)
    yield json.dumps(
        dict(reversed(record.items())), separators=(",", ":"), ensure_ascii=False
    ).encode()
    yield b'{"v":1,' + line[1:]  # a key twice
    yield line.decode().encode("utf-16")
    yield b"\xef\xbb\xbf" + line
    yield line.replace(b"a", b"\xff", 1)
    yield line.replace(b'"taint":"exact"', b'"taint":"Exact"', 1)
    yield line.replace(b"abab", b"ABAB", 1)
    yield from (line.replace(*each) for each in EXCHANGED)


def test_what_the_slow_check_refuses_the_quick_one_does(lines):
    tried = 0
    for line in lines:
        for other in other_spellings(line):
            if other != line and slowly(other) is None:
                assert well_formed(other) is None, other
                tried += 1
    assert tried > 200


def test_names_of_a_digest_may_hold_what_looks_like_a_hash(lines):
    line = next(line for line in lines if b'"egress.digest"' in line)
    for name in (
        '","sha256":"' + "ab" * 32, '"sha256":"', 'x"sha256":"' + "0" * 64 + '","part":"y',
        "sha256",
    ):  # fmt: skip
        record = json.loads(line)
        for at, tensor in enumerate(record["tensors"]):
            tensor["name"] = f"{name}{at}"
        odd = canonical_json(record)
        assert well_formed(odd) == slowly(odd) == record


def test_hashes_that_change_from_digest_to_digest_are_read(lines):
    line = next(line for line in lines if b'"egress.digest"' in line)
    for digit in "0123456789abcdef":
        record = json.loads(line)
        for at, tensor in enumerate(record["tensors"]):
            tensor["sha256"] = digit * 63 + "0123456789abcdef"[at]
        other = canonical_json(record)
        assert well_formed(other) == record


@given(data=st.data())
def test_a_mutated_line_is_taken_only_if_the_slow_check_takes_it(lines, data):
    line = data.draw(st.sampled_from(lines))
    start, length = data.draw(st.integers(0, len(line))), data.draw(st.integers(0, 3))
    likely = [b",", b'"', b"[]", b"{}", b"0", b"null", b"\\", b',"tensors":[', b"1.0"]
    pieces = st.binary(max_size=3) | st.sampled_from([*likely, b'"hidden":null,', b',"number":1'])
    other = line[:start] + data.draw(pieces) + line[start + length :]
    found = well_formed(other)
    if found is not None:
        assert found == slowly(other)


@given(TEXTS)
def test_texts_are_spelled_as_rfc_8785_wants_them(text):
    assert msgspec.json.encode({"a": text}) == canonical_json({"a": text})


def test_each_control_character_too():
    for code in range(0x100):
        test = {"a": chr(code)}
        assert msgspec.json.encode(test) == canonical_json(test)

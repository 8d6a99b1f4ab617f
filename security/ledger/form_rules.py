"""What the form of an intent asks of the rest of it. Pure functions of records as they are stored.

===========  ========================  =================================================================================
form         names                     and
===========  ========================  =================================================================================
``masked``   an attempt at a sum       its members are some of the cohort, sorted, this silo and at least as many as its
                                       threshold; its tensors are words, and what they leave of the bytes are canaries
``padded``   a version of its part     its tensors are the one part's, words of 8 bytes that fill all its bytes
``rotated``  a use of a rotation,      its tensors are the one part's, vectors that fill all its bytes
             whose number is 0
any other    none of them
===========  ========================  =================================================================================
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..policy.release import ITEM_BYTES, MASKED, PADDED, ROTATED

UNHASHED = (MASKED, PADDED, ROTATED)  # forms of which no tensor has a hash: with it guesses could be compared
ASTRAY = "which is not sorted, has a silo twice, or lacks this one"
_WORDS = ("uint32", "uint64")  # dtypes of what is masked
_HIDDEN = {PADDED: ("uint64",), ROTATED: ("float32", "float64")}  # dtypes of what is a message of its own


def form_fault(record: Mapping[str, Any]) -> str:
    """Why an intent of its form is not so; empty if it may be."""
    return _masked_fault(record) or _hidden_fault(record)


def stream(record: Mapping[str, Any]) -> int | str:
    """Of what an intent's offset counts bytes: the one payload of a round, or of an attempt, a version or a use."""
    bound = record.get("secagg") or record.get("hidden")
    return bound["ctx"] if bound else record["round"]  # type: ignore[no-any-return]


def astray(silos: Sequence[str], silo: str) -> bool:
    """Whether these are not some silos in order, each once, and this one among them."""
    return silos != sorted(set(silos)) or (bool(silo) and silo not in silos)


def strays(absent: Sequence[str], survivors: Sequence[str]) -> bool:
    """Whether these are not some silos in order, each once, and none of the survivors among them."""
    return absent != sorted(set(absent) - set(survivors))


def _masked_fault(record: Mapping[str, Any]) -> str:
    secagg, form, cohort = record.get("secagg"), record["form"], record.get("cohort")
    if (secagg is not None) != (form == MASKED):
        return f"intent has form {form!r} and names {'an' if secagg else 'no'} attempt at a secure sum"
    if secagg is None:
        return ""
    members, threshold = secagg["members"], secagg["threshold"]
    if astray(members, record["silo"]):
        return f"intent is masked with members {', '.join(members)}, {ASTRAY}"
    if cohort and not set(members) <= set(cohort):
        return f"intent is masked with members {', '.join(members)}, and its cohort is {', '.join(cohort)}"
    if threshold > len(members):
        return f"intent is masked with {len(members)} members, fewer than its threshold of {threshold}"
    return _size_fault(record, _WORDS)


def _hidden_fault(record: Mapping[str, Any]) -> str:
    hidden, form = record.get("hidden"), record["form"]
    if (hidden is not None) != (form in _HIDDEN):
        return f"intent has form {form!r} and names {'a' if hidden else 'no'} version of a part or use of a rotation"
    if hidden is None:
        return ""
    if len(parts := dict.fromkeys(tensor["part"] for tensor in record["tensors"])) != 1:
        return f"intent is {form} and of part {', '.join(parts) or 'none'}; each part is a message of its own"
    whole = record.get("offset", 0) + record["message"]["bytes"]
    inside = sum(tensor["bytes"] for tensor in record["tensors"])
    if whole != inside:
        return f"intent is {form} and of {whole} bytes, and its tensors are {inside}"
    if form == ROTATED and hidden["number"]:
        return f"intent is rotated and has number {hidden['number']}; only versions of a padded part are counted"
    return _size_fault(record, _HIDDEN[form])


def _size_fault(record: Mapping[str, Any], dtypes: Sequence[str]) -> str:
    for tensor in record["tensors"]:
        dtype, size = tensor["dtype"], tensor["bytes"]
        if dtype not in dtypes or size != prod(tensor["shape"]) * ITEM_BYTES[dtype]:
            where = f"tensor {tensor['part']}/{tensor['name']}"
            return f"intent is {record['form']}, and {where} has {size} bytes of {dtype!r}"
    return ""

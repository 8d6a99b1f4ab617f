"""Every domain-separation string, in one table, and the framing of all that is signed.

A signature over one kind of document must never pass for another, and no two lists of fields may give the same bytes.
So whatever is signed is ``framed(label, field, ...)``: each piece behind its length, 8 bytes big-endian::

    framed(b"ab", b"x", b"")  =  00000000 00000002 61 62  00000000 00000001 78  00000000 00000000
"""

ENTRY = b"staddle/entry/1"  # a member over its own public entry: it holds the protocol key
ROSTER = b"staddle/roster/1"  # a founder over a roster
JOB = b"staddle/job/1"  # an operator over a job file
RECEIPT = b"staddle/receipt/1"  # the coordinator over what it received
HEAD = b"staddle/head/1"  # a silo over the head that it holds of another one's ledger

LEAF = b"\x00"  # RFC 6962 section 2.1: hash of a leaf; signed nowhere, so not framed
NODE = b"\x01"  # RFC 6962 section 2.1: hash of two subtrees

SIGNED = (ENTRY, ROSTER, JOB, RECEIPT, HEAD)


def framed(label: bytes, *fields: bytes) -> bytes:
    """Join a label and fields so that no other label and fields give the same bytes."""
    return b"".join(len(piece).to_bytes(8, "big") + piece for piece in (label, *fields))

"""Every domain-separation string, in one table, and the framing of all that is signed.

A signature over one kind of document must never pass for another, and no two lists of fields may
give the same bytes. So whatever is signed is ``framed(domain, field, ...)``: each piece behind its
length, 8 bytes big-endian::

    framed(b"ab", b"x", b"")  =  00000000 00000002 61 62  00000000 00000001 78  00000000 00000000
"""

ENTRY = b"staddle/entry/1"  # a member over its own public entry: it holds the protocol key
ROSTER = b"staddle/roster/1"  # a founder over a roster
# hashed: the members of a roster who do something together
MEMBERS = b"staddle/members/1"
INVITATION = b"staddle/invitation/1"  # a founder over a ticket to hand in an entry
JOB = b"staddle/job/1"  # an operator over a job file
RECEIPT = b"staddle/receipt/1"  # the coordinator over what it received
BACKUP = b"staddle/backup/1"  # the coordinator over the files of a copy of its state
MODEL = b"staddle/model/1"  # a silo over the files of a trained model
HEAD = b"staddle/head/1"  # a silo over the head that it holds of another one's ledger

# ctx of an attempt at a secure sum: everything else there is bound to it
SECAGG_CONTEXT = b"staddle/secagg/context/1"
SECAGG_SPEC = b"staddle/secagg/spec/1"  # the coordinator over the specification of an attempt
SECAGG_KEYS = b"staddle/secagg/keys/1"  # a silo over its keys of an attempt
SECAGG_DEALING = b"staddle/secagg/dealing/1"  # a silo over the shares that it deals
SECAGG_UPLOAD = b"staddle/secagg/upload/1"  # a silo over its masked upload
SECAGG_SURVIVORS = b"staddle/secagg/survivors/1"  # a silo over the one set of survivors
SECAGG_REVEAL = b"staddle/secagg/reveal/1"  # a silo over the shares that it reveals
SECAGG_ABANDON = b"staddle/secagg/abandon/1"  # a silo: it will never help to unmask this attempt
# a silo over the key that shows what one dealer sealed to it
SECAGG_COMPLAINT = b"staddle/secagg/complaint/1"

# hashed: what a silo received for the round of a secure sum
SECAGG_MODEL = b"staddle/secagg/model/1"
SECAGG_SHARE = b"staddle/secagg/share/1"  # hashed: a dealer's commitment to a share
SECAGG_SEED = b"staddle/secagg/seed/1"  # hashed: a dealer's commitment to its self-mask seed
SECAGG_SET = b"staddle/secagg/set/1"  # hashed: H(U), a set of signed messages
SECAGG_CANARY = b"staddle/secagg/canary/1"  # hashed: the words that show whether masks came off
# HKDF: key under which shares travel from one silo to another
SECAGG_SEAL = b"staddle/secagg/seal/1"
# HKDF: private key that opens what one dealer seals to one silo
SECAGG_RECEIVING = b"staddle/secagg/receiving/1"
SECAGG_PAIR = b"staddle/secagg/pair/1"  # HKDF: key of the mask that two silos share
SECAGG_SELF = b"staddle/secagg/self/1"  # HKDF: key of the mask that one silo has to itself
# HKDF: key of the coefficients of linear tags, from the group key
SECAGG_TAG = b"staddle/secagg/tag/1"
SECAGG_PAD = b"staddle/secagg/pad/1"  # HKDF: key of one silo's pads over its tags
# HKDF: key of one silo's pads over sums that silos alone read
SECAGG_HIDE = b"staddle/secagg/hide/1"

GROUP_CONTEXT = b"staddle/group/context/1"  # hashed: an epoch of the key that all silos share
# a silo over what it gives to the key of an epoch
GROUP_CONTRIBUTION = b"staddle/group/contribution/1"
# HKDF: key under which a contribution travels from one silo to another
GROUP_SEAL = b"staddle/group/seal/1"
GROUP_ALL = b"staddle/group/all/1"  # hashed: all contributions to the key of an epoch
GROUP_KEY = b"staddle/group/key/1"  # HKDF: the key that all silos share, of one epoch

# hashed: one tensor group of a job, whose stored uploads are mixed with one another
MIX_LINE = b"staddle/mix/line/1"
# hashed: one upload of a silo to a line: all else there is bound to it
MIX_VERSION = b"staddle/mix/version/1"
# a silo over one upload to be mixed, and the seed that it sealed to the others
MIX_UPLOAD = b"staddle/mix/upload/1"
# the coordinator over the weights and versions of one recipient's row
MIX_ROW = b"staddle/mix/row/1"
# a silo over the next prekey that others seal to, sent with one upload
MIX_PREKEY = b"staddle/mix/prekey/1"
# HKDF: key under which the seed of an upload travels from one silo to another
MIX_SEAL = b"staddle/mix/seal/1"
MIX_STREAM = b"staddle/mix/stream/1"  # HKDF: key of the stream that hides an upload, from its seed
# HKDF: key of the pad that one sender and one recipient share over a directed Mix
MIX_PAD = b"staddle/mix/pad/1"

GRAM_ROTATION = b"staddle/gram/rotation/1"  # HKDF: key of one secret rotation, from the group key
GRAM_USE = b"staddle/gram/use/1"  # hashed: what one upload of rotated vectors is bound to
# hashed: vectors that a silo rotated, for its own memory alone
GRAM_VECTORS = b"staddle/gram/vectors/1"
# HKDF: key of the count-sketch before a rotation, from that of the rotation
GRAM_SKETCH = b"staddle/gram/sketch/1"
# HKDF: key under which a share of compared vectors travels between two silos
GRAM_SEAL = b"staddle/gram/seal/1"

# hashed: a sender's commitment to what it sealed to others
SEALED_SECRET = b"staddle/sealed/secret/1"

# HKDF: key of what shows who wrote a record, from the log key
LEDGER_RECORD = b"staddle/ledger/record/1"

LEAF = b"\x00"  # RFC 6962 section 2.1: hash of a leaf; signed nowhere, so not framed
NODE = b"\x01"  # RFC 6962 section 2.1: hash of two subtrees

SIGNED = (
    ENTRY,
    ROSTER,
    INVITATION,
    JOB,
    RECEIPT,
    MODEL,
    HEAD,
    SECAGG_SPEC,
    SECAGG_KEYS,
    SECAGG_DEALING,
    SECAGG_UPLOAD,
    SECAGG_SURVIVORS,
    SECAGG_REVEAL,
    SECAGG_ABANDON,
    SECAGG_COMPLAINT,
    GROUP_CONTRIBUTION,
    MIX_UPLOAD,
    MIX_PREKEY,
    MIX_ROW,
)
HASHED = (
    MEMBERS,
    SECAGG_CONTEXT,
    SECAGG_MODEL,
    SECAGG_SHARE,
    SECAGG_SEED,
    SECAGG_SET,
    SECAGG_CANARY,
    SECAGG_SEAL,
    SECAGG_RECEIVING,
    SECAGG_PAIR,
    SECAGG_SELF,
    SECAGG_TAG,
    SECAGG_PAD,
    SECAGG_HIDE,
    GROUP_CONTEXT,
    GROUP_SEAL,
    GROUP_ALL,
    GROUP_KEY,
    MIX_LINE,
    MIX_VERSION,
    MIX_SEAL,
    MIX_STREAM,
    MIX_PAD,
    GRAM_ROTATION,
    GRAM_USE,
    GRAM_VECTORS,
    GRAM_SKETCH,
    GRAM_SEAL,
    SEALED_SECRET,
)


def framed(domain: bytes, *fields: bytes) -> bytes:
    """Join a label and fields so that no other label and fields give the same bytes."""
    return b"".join(len(piece).to_bytes(8, "big") + piece for piece in (domain, *fields))

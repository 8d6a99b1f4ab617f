"""What the tests of the secure sum's wire share: any message that is well formed, and the longest
of each kind.
"""

from operator import attrgetter

from hypothesis import strategies as st

from staddle.proto.convert.secagg_received import SecaggDelivery, SignedSpec
from staddle.proto.convert.secagg_sent import Attempt, Over, SecaggPoll, SecaggUpload
from staddle.security.faults import Code
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import (
    PAIR,
    SEALED_BYTES,
    SELF,
    Dealing,
    HeldShare,
    KeyBundle,
    Portion,
    PortionDelivery,
)
from staddle.security.secagg.evidence import Complaint, Misdealing, ShownShare, Unjoined, Unopened
from staddle.security.secagg.gram_pieces import SealedShare
from staddle.security.secagg.messages import (
    Abandon,
    Header,
    Reveal,
    Revealed,
    Survival,
    SurvivorsShown,
)
from staddle.security.secagg.receiving_keys import KeyDelivery, ReceivingKey

HASH, SIGNATURE, SESSION = b"\xff" * 32, b"\xff" * 64, b"\xff" * 64
ATTEMPT = Attempt("j" * 64, HASH, 2**32 - 1, 2**32 - 1, HASH)
SHARE = HeldShare(b"\xfe" * 33, b"\xfd" * 32)
ASKED = SecaggPoll(SESSION, "j" * 64, HASH, 2**32 - 1, 2**32 - 1)


def names(n):
    """The longest ids."""
    return tuple(f"{i:064}" for i in range(n))


def portion(dealer, holder):
    sealed = (b"", b"") if dealer == holder else (HASH, b"\xff" * SEALED_BYTES)
    return Portion(holder, *sealed, HASH, HASH)


def bundle(silo):
    return KeyBundle(silo, HASH, HASH, HASH, SIGNATURE)


def dealing(silo):
    return Dealing(silo, HASH, HASH, HASH, SIGNATURE)


def longest_given(n, groups=0, products=0):
    """By the name of its body, the longest message that the first of n silos gives."""
    silos = names(n)
    me = silos[0]
    receiving = tuple(ReceivingKey(silo, HASH) for silo in silos[1:])
    shares = tuple(Revealed(silo, PAIR, SHARE) for silo in silos)
    bodies = {
        "keys": s.SendKeys(bundle(me), receiving),
        "shares": s.SendShares(dealing(me), tuple(portion(me, silo) for silo in silos)),
        "complaint": s.SendComplaint(Complaint(me, silos[1], HASH, SIGNATURE)),
        "header": s.SendHeader(Header(me, HASH, 2**64 - 1, HASH, b"\xff" * 8 * groups, SIGNATURE)),
        "survival": s.SendSurvival(Survival(me, SIGNATURE)),
        "reveal": s.SendReveal(Reveal(me, shares, SIGNATURE, b"\xfc" * products)),
        "abandon": s.SendAbandon(Abandon(me, SIGNATURE)),
        "end": Over(Code.STOPPED),
    }
    return {name: SecaggUpload(SESSION, ATTEMPT, body) for name, body in bodies.items()}


def longest_evidence(n, dealer=0):
    silos = names(n)
    by = silos[dealer]
    shares = tuple(ShownShare(silo, SHARE) for silo in silos[: 2 * n // 3 + 1])
    dealt = tuple(portion(by, silo) for silo in silos)
    return Misdealing(b"{", bundle(by), dealing(by), dealt, Unjoined(PAIR, shares))


def longest_told(n, groups=0, document=b"", noted=None, share=0, against=1, rounds=0):
    """By the name of its body, the longest message that the first of n silos is told, with so many
    proofs.
    """
    silos, tags = names(n), b"\xff" * 8 * groups
    notes = tuple(Abandon(silo, SIGNATURE) for silo in names(n if noted is None else noted))
    path = (HASH,) * (n - 1).bit_length()
    proofs = tuple(longest_evidence(n, by) for by in range(against))
    sealed = tuple(SealedShare(silo, b"\xff" * share) for silo in silos[1:]) if share else ()
    headers = tuple(Header(silo, HASH, 2**64 - 1, HASH, tags, SIGNATURE) for silo in silos)
    signed = tuple(Survival(silo, SIGNATURE) for silo in silos[: 2 * n // 3 + 1])
    shown = HASH, HASH, headers, signed
    earlier = tuple(SurvivorsShown(bytes([at]) * 32, *shown) for at in range(rounds))
    keys = (KeyDelivery(silo, ReceivingKey(silos[0], HASH), path) for silo in silos[1:])
    deliveries = (PortionDelivery(dealing(silo), portion(silo, silos[0]), path) for silo in silos)
    bodies = {
        "spec": SignedSpec(document, SIGNATURE, notes, proofs, earlier),
        "keys": s.KeysReceived(tuple(map(bundle, silos)), tuple(keys)),
        "shares": s.SharesReceived(tuple(deliveries)),
        "survivors": s.SurvivorsReceived(headers, sealed),
        "notes": s.NotesReceived(tuple(Survival(silo, SIGNATURE) for silo in silos)),
        "result": s.ResultReceived(HASH, tags),
        "abandon": s.AbandonAsked(),
        "end": Over(Code.STOPPED),
    }
    return {name: SecaggDelivery(ATTEMPT, body) for name, body in bodies.items()}


# Any.

ids = st.text("abz019-", min_size=1, max_size=64)
hashes, signatures = st.binary(min_size=32, max_size=32), st.binary(min_size=64, max_size=64)
sessions = st.binary(min_size=1, max_size=64)
tags = st.integers(0, 5).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n))
small = st.integers(0, 2**32 - 1)
attempts = st.builds(Attempt, ids, hashes, small, small, hashes)
overs = st.builds(Over, st.sampled_from(Code))
bundles = st.builds(KeyBundle, ids, hashes, hashes, hashes, signatures)
receiving = st.builds(ReceivingKey, ids, hashes)
complaints = st.builds(Complaint, ids, ids, hashes, signatures)
dealings = st.builds(Dealing, ids, hashes, hashes, hashes, signatures)
headers = st.builds(Header, ids, hashes, st.integers(0, 2**64 - 1), hashes, tags, signatures)
survivals = st.builds(Survival, ids, signatures)
notes = st.builds(Abandon, ids, signatures)
held = st.builds(HeldShare, st.binary(min_size=33, max_size=33), hashes)
revealed = st.builds(Revealed, ids, st.sampled_from([SELF, PAIR]), held)


def portion_of(dealer):
    def sealed(holder):
        size = 0 if holder == dealer else SEALED_BYTES
        sealed = st.binary(min_size=size, max_size=size)
        own = hashes if size else st.just(b"")
        return st.builds(Portion, st.just(holder), own, sealed, hashes, hashes)

    return (ids | st.just(dealer)).flatmap(sealed)


def portions_of(dealer):
    return some(portion_of(dealer), by_holder)


def some(each, key):
    """A set of them: each once, in order."""
    found = st.lists(each, max_size=4, unique_by=key)
    return found.map(lambda found: tuple(sorted(found, key=key)))


by_silo, by_dealer, by_holder = map(attrgetter, ("silo", "dealer", "holder"))
of_headers, of_survivals = some(headers, by_silo), some(survivals, by_silo)
shown = st.builds(SurvivorsShown, hashes, hashes, hashes, of_headers, of_survivals)
proofs = st.lists(hashes, max_size=10).map(tuple)
deliveries = dealings.flatmap(
    lambda d: st.builds(PortionDelivery, st.just(d), portion_of(d.dealer), proofs)
)
dealt = dealings.flatmap(lambda d: st.builds(s.SendShares, st.just(d), portions_of(d.dealer)))
documents, shares = st.binary(min_size=1, max_size=80), st.builds(ShownShare, ids, held)
faults = st.builds(Unjoined, st.sampled_from([SELF, PAIR]), some(shares, by_holder))
faults |= st.builds(Unopened, ids, hashes)
misdealings = dealings.flatmap(
    lambda d: st.builds(Misdealing, documents, bundles, st.just(d), portions_of(d.dealer), faults)
)
reveals = st.builds(Reveal, ids, some(revealed, by_dealer), signatures, tags)
sealed_shares = st.builds(SealedShare, ids, tags)  # whole numbers of 8 bytes
given_bodies = st.builds(s.SendKeys, bundles, some(receiving, by_dealer)) | dealt | overs
given_bodies |= st.builds(s.SendComplaint, complaints) | st.builds(s.SendHeader, headers)
given_bodies |= st.builds(s.SendSurvival, survivals) | st.builds(s.SendReveal, reveals)
given_bodies |= st.builds(s.SendAbandon, notes)
signed_notes, evidence = some(notes, attrgetter("silo", "signature")), some(misdealings, by_dealer)
key_deliveries, by_ctx = st.builds(KeyDelivery, ids, receiving, proofs), attrgetter("ctx")
told_bodies = (
    st.builds(SignedSpec, documents, signatures, signed_notes, evidence, some(shown, by_ctx))
    | st.builds(s.KeysReceived, some(bundles, by_silo), some(key_deliveries, by_silo))
    | st.builds(s.SharesReceived, some(deliveries, attrgetter("dealing.dealer")))
    | st.builds(s.SurvivorsReceived, of_headers, some(sealed_shares, by_dealer))
    | st.builds(s.NotesReceived, of_survivals)
    | st.builds(s.ResultReceived, hashes, tags)
    | st.just(s.AbandonAsked())
    | overs
)
givens = st.builds(SecaggUpload, sessions, attempts, given_bodies)
tolds = st.builds(SecaggDelivery, attempts, told_bodies)
askeds = st.builds(SecaggPoll, sessions, ids, hashes, small, small)


def contributor(given):
    """Who gives it: the silo that it names itself."""
    match given.body:
        case s.SendShares(dealing):
            return dealing.dealer
        case Over():
            return "any"
        case s.SendKeys(message, _):
            return message.silo
        case s.SendComplaint(message) | s.SendHeader(message) | s.SendSurvival(message):
            return message.silo
        case s.SendReveal(message) | s.SendAbandon(message):
            return message.silo

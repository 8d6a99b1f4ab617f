import hashlib
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from support.refusals import blamed
from support.secure_sums import Drawn, names, signer, signers

from staddle.errors import LocalError
from staddle.security.blind import group_key as g
from staddle.security.blind import sealing
from staddle.security.identity import keys, roster
from staddle.security.identity.domains import GROUP_KEY, GROUP_SEAL, framed
from staddle.security.identity.pairwise_keys import public_key

FOUR = names(4)
SEEDS = {silo: hashlib.sha256(f"exchange key of {silo}".encode()).digest() for silo in names(9)}


def epoch(silos=FOUR, number=7, members="aa" * 32, federation="lung", job="bb" * 32):
    return g.Epoch(
        number, federation, members, job, {silo: public_key(SEEDS[silo]) for silo in silos}
    )


def contributions(over=None, *, seed=0, tamper=lambda *made: made):
    """By silo: what it gave, its secret, its pieces."""
    over, draw, made = over or epoch(), Drawn(seed), {}
    for silo in over.exchange_keys:
        secret = draw(32)
        given, pieces = g.contribute(over, silo, secret, draw(32), draw(32), signer(silo))
        made[silo] = tamper(given, secret, pieces)
    return made


OTHER_EPOCHS = (
    {"number": 8}, {"members": "bb" * 32}, {"federation": "liver"}, {"job": "cc" * 32},
)  # fmt: skip


def with_given(made, given, silo=FOUR[1]):
    """All that was made, but for what one silo gave."""
    return {**made, silo: (given, *made[silo][1:])}


def relayed(made, silo):
    return [
        g.Relayed(given, sealing.letters(pieces)[silo])
        for other, (given, _, pieces) in made.items()
        if other != silo
    ]


def key(made, silo, over=None, brought=None):
    given, secret, _ = made[silo]
    over, brought = over or epoch(), relayed(made, silo) if brought is None else brought
    return g.make_key(over, silo, SEEDS[silo], given, secret, brought, signers(FOUR))


@pytest.mark.parametrize("n", [2, 4, 9])
def test_all_silos_make_one_key_and_the_coordinator_could_check_all(n):
    over = epoch(names(n))
    made = contributions(over)
    for given, _, pieces in made.values():
        g.check_contribution(over, given, pieces, signers(names(n)))
    found = set()
    for silo, (given, secret, _) in made.items():
        brought = relayed(made, silo)
        own = (silo, SEEDS[silo], given, secret)
        found.add(g.make_key(over, *own, brought[::-1], signers(names(n))))
    assert len(found) == 1
    assert len(found.pop()) == 32


def test_the_key_is_that_of_the_docstring():
    made = contributions()
    given = [given for given, _, _ in made.values()]
    fields = [field for each in given for field in (each.sealing.encoded(), each.prekey)]
    everything = hashlib.sha256(framed(b"staddle/group/all/1", *fields)).digest()
    secrets = b"".join(secret for _, secret, _ in made.values())
    digests = (bytes.fromhex("aa" * 32), bytes.fromhex("bb" * 32))
    ctx = hashlib.sha256(framed(b"staddle/group/context/1", b"lung", *digests, bytes(7) + b"\x07"))
    expected = HKDF(SHA256(), 32, ctx.digest(), framed(GROUP_KEY, everything)).derive(secrets)
    assert key(made, FOUR[2]) == expected


def test_who_has_another_key_knows_it_by_what_made_it():
    made, others = contributions(), contributions(seed=1)
    mixed = {**made, FOUR[0]: others[FOUR[0]]}
    found = [g.parts_of(given for given, _, _ in each.values()) for each in (made, mixed)]
    assert found[0] != found[1]
    assert found[0] == g.parts_of(given for given, _, _ in reversed(made.values()))


def test_a_letter_is_that_of_the_docstring():
    over = epoch()
    given, secret, pieces = contributions()[FOUR[0]]
    private = X25519PrivateKey.from_private_bytes(SEEDS[FOUR[1]])
    public = private.public_key().public_bytes_raw()
    agreed = private.exchange(X25519PublicKey.from_public_bytes(given.sealing.ephemeral))
    pair = (b"silo-00", b"silo-01")
    info = framed(GROUP_SEAL, *pair, given.sealing.ephemeral, public)
    opening = ChaCha20Poly1305(HKDF(SHA256(), 32, over.context(), info).derive(agreed))
    bound = framed(GROUP_SEAL, over.context(), *pair)
    assert opening.decrypt(bytes(12), pieces[0].sealed, bound) == secret


def test_each_contribution_and_each_binding_changes_the_key():
    made = contributions()
    base = key(made, FOUR[0])
    for silo in FOUR[1:]:
        other = {**made, silo: contributions(seed=1)[silo]}
        assert key(other, FOUR[0]) != base
    for over in (epoch(**changes) for changes in OTHER_EPOCHS):
        again = contributions(over)  # the same secrets, for another epoch
        assert again[FOUR[0]][1] == made[FOUR[0]][1]
        assert key(again, FOUR[0], over) != base


def test_1_a_missing_doubled_or_strange_contribution_is_the_coordinators():
    made = contributions()
    brought = relayed(made, FOUR[0])
    strange = relayed(contributions(epoch(names(5))), FOUR[0])[3:]
    for wrong, text in (
        (brought[1:], "lacks those of silo-01"),
        ([*brought, brought[0]], "doubles those of silo-01"),
        ([*brought, *strange], "has some of silo-04"),
        ([*brought, *relayed(made, FOUR[1])[:1]], "has some of silo-00"),  # our own, brought back
    ):
        peer, code, why = blamed(key, made, FOUR[0], brought=wrong)
        assert (peer, code) == ("coordinator", "KEYS")
        assert text in why


def test_2_a_prekey_that_was_changed_or_is_none_is_blamed_on_who_passed_it_on():
    made = contributions()
    first = relayed(made, FOUR[0])[0]
    others = with_given(made, replace(first.contribution, prekey=public_key(bytes(32))))
    low = with_given(made, signed_again(first.contribution, made[FOUR[1]][2], bytes(32)))
    for wrong, text in ((others, "does not fit what it contributes"), (low, "low order")):
        peer, code, why = blamed(key, wrong, FOUR[0])
        assert (peer, code) == ("coordinator", "KEYS")
        assert text in why


def test_another_prekey_makes_another_key():
    """A silo that signed two, one for each half, breaks its job; no seed opens at a stranger."""
    made = contributions()
    other = signed_again(made[FOUR[1]][0], made[FOUR[1]][2], public_key(bytes(32)))
    assert other.prekey != made[FOUR[1]][0].prekey
    assert key(with_given(made, other), FOUR[0]) != key(made, FOUR[0])


@pytest.mark.parametrize("field", ["ephemeral", "commitment", "root"])
def test_2_a_contribution_that_was_changed_is_blamed_on_who_passed_it_on(field):
    made = contributions()
    first, *rest = relayed(made, FOUR[0])
    changed = replace(first.contribution.sealing, **{field: bytes(31) + b"\x01"})
    wrong = g.Relayed(replace(first.contribution, sealing=changed), first.letter)
    peer, code, why = blamed(key, made, FOUR[0], brought=[wrong, *rest])
    assert (peer, code) == ("coordinator", "KEYS")
    assert "passed on from 'silo-01'" in why
    checked = (epoch(), wrong.contribution, made[FOUR[1]][2], signers(FOUR))
    assert blamed(g.check_contribution, *checked)[:2] == (FOUR[1], "KEYS")


def test_2_a_contribution_to_another_epoch_does_not_pass():
    old = contributions()
    for over in (epoch(**changes) for changes in OTHER_EPOCHS):
        found = blamed(key, contributions(over), FOUR[0], over, relayed(old, FOUR[0]))
        assert found[:2] == ("coordinator", "KEYS")


def test_3_letters_that_were_changed_or_are_for_another_silo():
    made = contributions()
    first, *rest = relayed(made, FOUR[0])
    sealed, theirs = first.letter.sealed, sealing.letters(made[FOUR[1]][2])[FOUR[2]]
    flipped = bytes([sealed.sealed[0] ^ 1]) + sealed.sealed[1:]
    for letter in (
        replace(first.letter, sealed=replace(sealed, sealed=flipped)),
        replace(first.letter, proof=first.letter.proof[::-1]), replace(first.letter, proof=()),
        theirs, replace(theirs, sealed=replace(sealed, recipient=FOUR[0])),
    ):  # fmt: skip
        wrong = [g.Relayed(first.contribution, letter), *rest]
        assert blamed(key, made, FOUR[0], brought=wrong)[:2] == ("coordinator", "SHARES")


def signed_again(given, pieces, prekey=None, **fields):
    """A silo that signs what it should not."""
    made = replace(given.sealing, root=sealing.Tree(p.leaf() for p in pieces).root(), **fields)
    prekey = given.prekey if prekey is None else prekey
    payload = g._signed_bytes(epoch(), made, prekey)
    return g.KeyContribution(made, prekey, signer(made.sender)(g.GROUP_CONTRIBUTION, payload))


def test_3_what_does_not_open_or_fit_is_its_senders():
    made = contributions()
    given, secret, pieces = made[FOUR[1]]
    garbage = (sealing.SealedSecret(FOUR[0], bytes(48)), *pieces[1:])
    short = (sealing.SealedSecret(FOUR[0], bytes(3)), *pieces[1:])
    draws = (bytes(32), bytes(31) + b"\x07", bytes(32))
    other, others = g.contribute(epoch(), FOUR[1], *draws, signer(FOUR[1]))
    assert other.sealing.commitment != given.sealing.commitment
    false = signed_again(other, others, commitment=given.sealing.commitment)
    for contribution, sealed, text in (
        (signed_again(given, garbage), garbage, "does not open"),
        (signed_again(given, short), short, "does not open"),
        (false, others, "does not fit its commitment"),
        (signed_again(given, pieces, ephemeral=bytes(32)), pieces, "low order"),
    ):
        wrong = {**made, FOUR[1]: (contribution, secret, sealed)}
        peer, _, why = blamed(key, wrong, FOUR[0])
        assert peer == FOUR[1]
        assert text in why


def test_a_letter_for_nobody_is_the_coordinators():
    given, _, pieces = contributions()[FOUR[0]]
    letter = sealing.letters(pieces)[FOUR[1]]
    for among in (FOUR[2:], ()):
        call = (epoch().context(), GROUP_SEAL, given.sealing, letter, among, SEEDS[FOUR[1]])
        assert blamed(sealing.open_letter, *call)[:2] == ("coordinator", "SHARES")


def test_2_fields_of_a_wrong_size_are_passed_on_by_the_coordinator():
    made = contributions()
    given, secret, pieces = made[FOUR[1]]
    for field in ("ephemeral", "commitment", "root"):
        signed = signed_again(given, pieces)
        wrong = replace(signed.sealing, **{field: bytes(31)})
        payload = g._signed_bytes(epoch(), wrong, given.prekey)
        signature = signer(FOUR[1])(g.GROUP_CONTRIBUTION, payload)
        wrong = g.KeyContribution(wrong, given.prekey, signature)
        peer, _, why = blamed(key, {**made, FOUR[1]: (wrong, secret, pieces)}, FOUR[0])
        assert (peer, "passed on from 'silo-01'" in why) == ("coordinator", True)


def test_the_coordinator_refuses_pieces_that_are_not_all():
    made, over = contributions(), epoch()
    given, _, pieces = made[FOUR[1]]
    short = (sealing.SealedSecret(FOUR[0], bytes(47)), *pieces[1:])
    late = (replace(pieces[0], generation=1), *pieces[1:])  # nobody has a later prekey yet
    for contribution, sealed in (
        (given, pieces[1:]), (given, pieces[::-1]), (signed_again(given, pieces[1:]), pieces[1:]),
        (signed_again(given, (*pieces, pieces[0])), (*pieces, pieces[0])),
        (given, (sealing.SealedSecret(FOUR[0], bytes(48)), *pieces[1:])),
        (signed_again(given, short), short), (signed_again(given, late), late),
        (signed_again(given, pieces, ephemeral=bytes(31)), pieces),
    ):  # fmt: skip
        wrong = blamed(g.check_contribution, over, contribution, sealed, signers(FOUR))
        assert wrong[:2] == (FOUR[1], "SHARES")
    for contribution in (
        signed_again(given, pieces, prekey=bytes(31)),
        signed_again(given, pieces, prekey=bytes(32)),  # of low order: nobody could seal to it
        replace(given, prekey=public_key(bytes(32))),
    ):
        wrong = blamed(g.check_contribution, over, contribution, pieces, signers(FOUR))
        assert wrong[:2] == (FOUR[1], "KEYS")
    given, _, pieces = contributions(epoch(names(5)))[names(5)[4]]
    found = blamed(g.check_contribution, over, given, pieces, signers(names(5)))
    assert found[:2] == ("silo-04", "KEYS")


def test_wrong_calls_are_told():
    draw, made = Drawn(0), contributions()
    no_pieces = (*contributions(seed=1)[FOUR[0]][:1], bytes(32), ())

    def contribute(silo, over=None, size=32):
        return g.contribute(over or epoch(), silo, draw(size), draw(32), draw(32), signer(silo))

    for call in (
        lambda: contribute("nobody"),
        lambda: contribute(FOUR[0], size=31),
        lambda: key({**made, FOUR[0]: no_pieces}, FOUR[0]),
        lambda: key({**made, FOUR[0]: made[FOUR[1]]}, FOUR[0]),
        lambda: contribute(FOUR[0], epoch(FOUR[:1])),
    ):
        with pytest.raises(LocalError):
            call()


def test_an_epoch_of_a_job_has_its_silos_alone(tmp_path):
    roles = {"founder": keys.Role.FOUNDER, "hub": keys.Role.COORDINATOR}
    roles |= dict.fromkeys(("silo-a", "silo-b", "silo-c"), keys.Role.SILO)
    entries = [keys.create_keys(tmp_path / name, name, roles[name], "org") for name in roles]
    made = roster.new("lung", entries[:1], 1)
    for entry in entries[1:]:
        made = roster.add(made, entry)
    of, job = ("silo-b", "silo-a"), "bb" * 32
    over = g.Epoch.of(made, of, job)
    assert over.exchange_keys == {e.id: bytes.fromhex(e.exchange_key) for e in entries[2:4]}
    assert (over.number, over.federation) == (0, "lung")
    assert over.members == roster.members_digest(made, of)
    assert over.job == job
    later = roster.remove(made, "silo-c")
    again = keys.create_keys(tmp_path / "again", "silo-b", roles["silo-b"], "org")
    changed = roster.add(made, again, replace=True)
    epochs = ((made, of, job), (made, of, "cc" * 32), (changed, of, job))
    assert len({g.Epoch.of(*each).context() for each in epochs}) == 3
    # who has no part in the job may come and go
    assert g.Epoch.of(later, of, job).context() == over.context()
    for silos in (("silo-a", "silo-c"), ("silo-a", "hub"), ("silo-a", "nobody")):
        with pytest.raises(LocalError, match=f"the job has {silos[1]}, of which roster version"):
            g.Epoch.of(later, silos, job)


def test_printing_and_what_is_relayed_show_no_secret():
    for given, secret, pieces in contributions().values():
        sealed = b"".join(piece.sealed for piece in pieces)
        sent = given.sealing.encoded() + given.signature + sealed
        assert secret not in sent
        assert len({piece.sealed for piece in pieces}) == 3

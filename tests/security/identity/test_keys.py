import json
import os
import shutil
import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from staddle.errors import LocalError
from staddle.files.documents import canonical_json, validate
from staddle.security.identity import certificate
from staddle.security.identity import keys as k
from staddle.security.identity.certificate import (
    check_certificate,
    self_signed,
    server_name,
    subject_key,
)
from staddle.security.identity.domains import ENTRY, ROSTER, framed

PRIVATE = ("tls.key", "protocol.key", "log.key", "exchange.key")


@pytest.fixture
def folder(tmp_path):
    k.create_keys(tmp_path / "a", "hospital-a", k.Role.SILO, "General Hospital")
    return tmp_path / "a"


def resigned(folder, **changes):
    """Changed and signed again by its own protocol key: only checks on content can refuse it."""
    document = {**json.loads((folder / "entry.json").read_bytes()), **changes}
    key = load_pem_private_key((folder / "protocol.key").read_bytes(), None)
    document["signature"] = key.sign(framed(ENTRY, k.entry_bytes(document))).hex()
    return document


def test_folder_is_private_and_loads(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in PRIVATE:
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    keys = k.load_keys(folder)
    assert keys.entry == k.load_entry(folder / "entry.json")
    assert keys.entry.host_operator == "General Hospital"
    signature = keys.sign(ROSTER, b"payload")
    assert keys.entry.has_signed(ROSTER, b"payload", signature)
    assert not keys.entry.has_signed(ENTRY, b"payload", signature)
    assert not keys.entry.has_signed(ROSTER, b"payloae", signature)
    assert not keys.entry.has_signed(ROSTER, b"payload", signature[:-1])


def test_printing_keys_shows_no_secret(folder):
    shown = repr(k.load_keys(folder))
    assert "PRIVATE" not in shown
    assert "object at" not in shown


def test_certificate_is_what_the_design_says(folder):
    read = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    assert read.subject.rfc4514_string() == "CN=hospital-a"
    tag = k.load_entry(folder / "entry.json").spki_sha256[:16]
    assert read.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value.get_values_for_type(x509.DNSName) == ["hospital-a.staddle", f"{tag}.hospital-a.staddle"]
    years = (read.not_valid_after_utc - read.not_valid_before_utc).days / 365.25
    assert 1.9 < years < 2.1


@pytest.mark.parametrize("name", PRIVATE)
def test_readable_private_key_is_refused(folder, name):
    (folder / name).chmod(0o640)
    with pytest.raises(LocalError, match=rf"{name}: mode 0640 .*run: chmod 600 "):
        k.load_keys(folder)


def test_keys_of_another_folder_are_refused(folder, tmp_path):
    k.create_keys(tmp_path / "b", "hospital-b", k.Role.SILO, "B")
    for name in (*PRIVATE, "tls.crt"):
        mine = (folder / name).read_bytes()
        (folder / name).write_bytes((tmp_path / "b" / name).read_bytes())
        with pytest.raises(LocalError, match=f"{name}: does not fit the folder's other files"):
            k.load_keys(folder)
        (folder / name).write_bytes(mine)
    k.load_keys(folder)


def test_broken_and_swapped_key_files_are_refused(folder):
    kept = (folder / "log.key").read_bytes()
    for bad, said in [
        (b"", "not an unencrypted PKCS8"),
        (kept[:40], "not an unencrypted PKCS8"),
        ((folder / "exchange.key").read_bytes(), "holds a X25519PrivateKey"),
    ]:
        (folder / "log.key").write_bytes(bad)
        with pytest.raises(LocalError, match=f"log.key: .*{said}"):
            k.load_keys(folder)
    (folder / "log.key").unlink()
    with pytest.raises(LocalError, match=r"log.key: cannot read it"):
        k.load_keys(folder)


def test_folder_with_files_is_never_written_into(folder):
    before = (folder / "tls.key").read_bytes()
    with pytest.raises(LocalError, match="holds files already"):
        k.create_keys(folder, "hospital-a", k.Role.SILO, "General Hospital")
    assert (folder / "tls.key").read_bytes() == before


BAD_IDS = ["", "A", "a/b", "../x", "a" * 65, "a\n", "ä"]


@pytest.mark.parametrize(
    ("member", "organisation", "why"),
    [
        *((member, "o", "is not 1 to 64") for member in BAD_IDS),
        ("a", "evil\x1b[2J", "control characters"),
    ],
)
def test_bad_ids_and_names_are_refused_before_anything_is_made(tmp_path, member, organisation, why):
    with pytest.raises(LocalError, match=why):
        k.create_keys(tmp_path / "x", member, k.Role.SILO, organisation)
    assert not (tmp_path / "x").exists()


def test_every_changed_field_breaks_the_signature(folder, tmp_path):
    good = json.loads((folder / "entry.json").read_bytes())
    other = {"id": "hospital-b", "role": "coordinator", "organisation": "x", "log_key": "0" * 64}
    for name, value in other.items():
        with pytest.raises(LocalError, match=r"signature|certificate"):
            validate({**good, name: value}, k.RosterEntry, "e")
    flipped = ("0" if good["signature"][0] != "0" else "1") + good["signature"][1:]
    with pytest.raises(LocalError, match="signature of entry 'hospital-a' does not fit"):
        validate({**good, "signature": flipped}, k.RosterEntry, "e")


def test_step_1_certificate_must_be_the_members_own(folder):
    other = self_signed("hospital-b", ec.generate_private_key(ec.SECP256R1()))
    document = resigned(folder, certificate=other, spki_sha256="0" * 64)
    with pytest.raises(LocalError, match=r"not for the one name 'hospital-a\.staddle'"):
        validate(document, k.RosterEntry, "e")


def test_step_2_fingerprint_must_be_the_certificates(folder):
    with pytest.raises(LocalError, match=r"spki_sha256 0000.* is not that of the certificate"):
        validate(resigned(folder, spki_sha256="0" * 64), k.RosterEntry, "e")


def test_step_3_keys_must_be_usable_and_separate(folder):
    with pytest.raises(LocalError, match="low order"):
        validate(resigned(folder, exchange_key="01" + "00" * 31), k.RosterEntry, "e")
    good = json.loads((folder / "entry.json").read_bytes())
    with pytest.raises(LocalError, match="are the same key"):
        validate(resigned(folder, log_key=good["protocol_key"]), k.RosterEntry, "e")


def test_step_4_another_key_cannot_sign_the_entry(folder):
    document = resigned(folder)
    signature = ed25519.Ed25519PrivateKey.generate().sign(framed(ENTRY, k.entry_bytes(document)))
    document["signature"] = signature.hex()
    with pytest.raises(LocalError, match="signature of entry"):
        validate(document, k.RosterEntry, "e")


def test_hand_edited_entry_file_is_refused(folder):
    path = folder / "entry.json"
    path.write_bytes(json.dumps(json.loads(path.read_bytes()), indent=1).encode())
    with pytest.raises(LocalError, match="not canonical"):
        k.load_entry(path)


def made(key, *, extensions=(), signer=None, digest=None):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a")])
    now = certificate.dt.datetime.now(certificate.dt.UTC)
    end = now + certificate.LIFETIME
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    signed = builder.sign(signer or key, digest or hashes.SHA256())
    return signed.public_bytes(Encoding.PEM).decode()


def test_certificate_steps():
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    end = (x509.BasicConstraints(ca=False, path_length=None), True)
    san = (x509.SubjectAlternativeName([x509.DNSName("a.staddle")]), False)
    good = made(key, extensions=[end, san])  # as earlier releases made them
    check_certificate("a", good)
    check_certificate("a", self_signed("a", key))
    tagged = [x509.DNSName(name) for name in certificate._names("a", other.public_key())]
    strange = (x509.SubjectAlternativeName(tagged), False)
    assert server_name(good) == "a.staddle"
    assert server_name(self_signed("a", key)) == certificate._names("a", key.public_key())[1]
    two = x509.SubjectAlternativeName([x509.DNSName("a.staddle"), x509.DNSName("b.staddle")])
    usage = (x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False)
    bad = {
        "(1) not readable": ("nonsense", "not readable"),
        "(1) two in one": (good + made(other, extensions=[end, san]), "more than one"),
        "(1) text around": ("x\n" + good, "more than one"),
        "(2) curve": (made(ec.generate_private_key(ec.SECP384R1()), extensions=[end, san]),
            "not P-256"),
        "(3) signer": (made(key, extensions=[end, san], signer=other), "not signed by its own"),
        "(4) authority": (made(key, extensions=[(x509.BasicConstraints(True, None), True), san]),
            "CA:FALSE"),
        "(4) absent": (made(key, extensions=[san]), "CA:FALSE"),
        "(4) not critical": (made(key, extensions=[(end[0], False), san]), "CA:FALSE"),
        "(5) absent": (made(key, extensions=[end]), "one name"),
        "(5) two names": (made(key, extensions=[end, (two, False)]), "one name"),
        "(5) the tag of another key": (made(key, extensions=[end, strange]), "one name"),
        "(6) more": (made(key, extensions=[end, san, usage]), "beyond"),
    }  # fmt: skip
    for pem, said in bad.values():
        with pytest.raises(ValueError, match=said):
            check_certificate("a", pem)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_each_flipped_bit_of_a_certificate_is_refused_by_a_value_error():
    pem = self_signed("a", ec.generate_private_key(ec.SECP256R1()))
    der = ssl.PEM_cert_to_DER_cert(pem)
    for at in range(len(der) * 8):
        flipped = bytearray(der)
        flipped[at // 8] ^= 1 << (at % 8)
        bad = ssl.DER_cert_to_PEM_cert(bytes(flipped))
        with pytest.raises(ValueError, match="certificate"):
            check_certificate("a", bad)


def test_certificate_has_one_spelling_of_its_signature():
    while True:  # until the last bit is zero, as the parser wants it of an unused one
        pem = self_signed("a", ec.generate_private_key(ec.SECP256R1()))
        der = bytearray(ssl.PEM_cert_to_DER_cert(pem))
        if der[-1] % 2 == 0:
            break
    at = len(der) - len(x509.load_pem_x509_certificate(pem.encode()).signature) - 1
    assert der[at] == 0
    der[at] = 1
    with pytest.raises(ValueError, match="signature is not in DER"):
        check_certificate("a", ssl.DER_cert_to_PEM_cert(bytes(der)))


def test_fingerprints(folder):
    assert k.fingerprint(b"") == "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"
    entry = k.load_entry(folder / "entry.json")
    assert entry.tls_fingerprint == k.fingerprint(subject_key(entry.certificate))
    assert entry.protocol_fingerprint == k.fingerprint(bytes.fromhex(entry.protocol_key))


def test_entry_file_is_one_canonical_line(folder):
    data = (folder / "entry.json").read_bytes()
    assert data == canonical_json(json.loads(data)) + b"\n"
    assert os.access(folder / "entry.json", os.R_OK)


def test_a_renewed_certificate_lies_next_to_the_old_one_and_all_else_stays(folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    first = k.load_keys(folder)
    renewed = k.renew_keys(folder)
    assert {path: path.read_bytes() for path in before} == before
    assert renewed.folder == folder / f"renewed-{renewed.entry.spki_sha256[:16]}"
    changed = {"certificate", "spki_sha256", "signature"}
    assert renewed.entry.model_dump(exclude=changed) == first.entry.model_dump(exclude=changed)
    assert renewed.entry.spki_sha256 != first.entry.spki_sha256
    assert [each.entry for each in k.held_keys(folder)] == [first.entry, renewed.entry]

    # whoever has an older roster than the coordinator tries the new one, and nobody an old one
    assert [pair[0] for pair in k.tls_pairs(first)] == [first.tls_key, renewed.tls_key]
    assert [pair[0] for pair in k.tls_pairs(renewed)] == [renewed.tls_key]
    away = shutil.move(first.home, first.home.with_name("away"))
    assert [pair[0] for pair in k.tls_pairs(first)] == [first.tls_key]
    shutil.move(away, first.home)

    # the roster says which one counts
    assert k.load_keys(folder, [renewed.entry]).tls_key == renewed.tls_key
    assert k.load_keys(folder, [first.entry]).folder == k.load_keys(folder).folder == folder


def test_a_daemon_makes_later_keys_in_its_own_folder_and_finds_those_of_both(folder, tmp_path):
    beside, state = k.renew_keys(folder), tmp_path / "state"
    folder.chmod(0o500)
    state.mkdir()
    renewed = k.renew_keys(folder, state)
    assert renewed.folder.parent == state
    assert renewed.folder.stat().st_mode & 0o777 == 0o700
    assert (renewed.folder / "tls.key").stat().st_mode & 0o777 == 0o600
    own = k.load_keys(folder, [renewed.entry], state)
    assert (own.folder, own.home) == (renewed.folder, folder)
    held = {each.folder for each in k.held_keys(folder, state)}
    assert held == {folder, beside.folder, renewed.folder}
    assert {each.folder for each in k.held_keys(folder)} == {folder, beside.folder}
    assert len(k.held_keys(folder, folder)) == 2
    first = k.load_keys(folder, renewed=state)
    assert {pair[0] for pair in k.tls_pairs(first)} == {
        first.tls_key, beside.tls_key, renewed.tls_key,
    }  # fmt: skip


def test_whoever_removes_the_folder_of_a_key_in_use_stops_nobody(folder):
    renewed = k.renew_keys(folder)
    shutil.rmtree(renewed.folder)
    assert [pair[0] for pair in k.tls_pairs(renewed)] == [renewed.tls_key]


def test_a_renewal_that_broke_off_is_never_used(folder):
    renewed = k.renew_keys(folder)
    for name in ("entry.json", "tls.crt", "tls.key"):
        (renewed.folder / name).unlink()
        assert [each.folder for each in k.held_keys(folder)] == [folder]
    assert len(k.held_keys(folder)) < len([k.renew_keys(folder), *k.held_keys(folder)])


def test_a_renewed_certificate_of_another_folder_is_refused(folder, tmp_path):
    k.create_keys(tmp_path / "b", "hospital-a", k.Role.SILO, "General Hospital")
    strange = k.renew_keys(tmp_path / "b")
    strange.folder.rename(folder / strange.folder.name)
    with pytest.raises(LocalError, match=r"entry.json: does not fit the folder's other files"):
        k.load_keys(folder)

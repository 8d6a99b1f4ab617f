"""What a coordinator, or another member, can slip into a roster by a renewal: over real TLS."""

import datetime as dt
import json
import re

import grpc
import pytest
from support.coordinator_thread import coordinator
from support.raw_silo import SECONDS, refused
from support.signed_federation import job_document, signed_federation
from typer.testing import CliRunner

from staddle.commands.main import app
from staddle.files.documents import canonical_json
from staddle.proto import membership_pb2 as pb
from staddle.proto.channel import OPTIONS
from staddle.security.identity import certificate
from staddle.security.identity import roster as rosters
from staddle.security.identity.certificate import LIFETIME, server_name, utc_now
from staddle.security.identity.domains import ENTRY
from staddle.security.identity.keys import Role, create_keys, entry_bytes, load_keys, renew_keys
from staddle.security.identity.renewal import Renewal

pytestmark = pytest.mark.actor("coordinator")
SILOS = ("north", "east")
NOW = utc_now()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """All keys were made a year ago, so there are older and newer certificates."""
    with pytest.MonkeyPatch.context() as past:
        past.setattr(certificate, "utc_now", lambda: NOW - dt.timedelta(days=365))
        return signed_federation(tmp_path_factory.mktemp("world"), SILOS, job_document(SILOS))


@pytest.fixture
def here(world, tmp_path):
    """A coordinator of its own for each test, under the first roster."""
    rosters.save(world.roster, tmp_path / "roster.json")
    changes = {"directory": tmp_path / "state", "roster": tmp_path / "roster.json"}
    with coordinator(world.config.model_copy(update=changes)) as here:
        yield here
    assert here.broken == []


def message(renewal):
    return pb.RenewRequest(
        certificate=renewal.certificate, signature=bytes.fromhex(renewal.signature)
    )


def channel(here, world, keys):
    root = world.roster.coordinator.certificate
    pair = keys.tls_key, keys.entry.certificate.encode()
    options = [*OPTIONS, ("grpc.ssl_target_name_override", server_name(root))]
    credentials = grpc.ssl_channel_credentials(root.encode(), *pair)
    return grpc.aio.secure_channel(here.address, credentials, options=options)


def calling(here, world, keys, call="Renew"):
    """Calls once as a member, with a message's bytes."""

    async def scenario(data, *words):
        async with channel(here, world, keys) as opened:
            method = opened.unary_unary(
                f"/staddle.v1.Renewal/{call}", lambda each: each, lambda each: each
            )
            if not words:
                return await method(data, timeout=SECONDS)
            return await refused(method(data, timeout=SECONDS), *words)

    return lambda data, *words: here.run(scenario(data, *words))


def kept(tmp_path):
    return sorted(path.name for path in tmp_path.glob("state/renewals/*"))


def founders_file(here, world, tmp_path):
    trust = world.config.trust
    lines = (
        "version = 1", f'coordinator = "{here.address}"', f'keys = "{world.folder}/founder"',
        'roster = "founder.json"', "[trust]", f'federation = "{trust.federation}"',
        f"threshold = {trust.threshold}", f"founders = {list(trust.founders)}",
    )  # fmt: skip
    rosters.save(world.roster, tmp_path / "founder.json")
    (tmp_path / "founder.toml").write_text("\n".join(lines))
    return tmp_path / "founder.toml"


def copied(world, tmp_path, silo):
    """A silo's keys, which a test may renew without the other tests."""
    place = tmp_path / "keys" / silo
    place.parent.mkdir(exist_ok=True)
    place.mkdir(mode=0o700)
    for path in world.keys[silo].home.glob("*"):
        (place / path.name).write_bytes(path.read_bytes())
        (place / path.name).chmod(path.stat().st_mode)
    return place


def test_each_member_renews_for_itself_alone_and_one_waits_for_each(here, world, tmp_path):
    place = copied(world, tmp_path, "north")
    first, second = (Renewal.of(renew_keys(place).entry) for _ in range(2))
    north, east = (calling(here, world, world.keys[silo]) for silo in SILOS)
    data = message(first).SerializeToString()
    for _ in range(3):
        north(data)
    assert kept(tmp_path) == ["north.json"]
    east(data, "MANIFEST", "certificate is not for the one name 'east.staddle'")
    north(message(second).SerializeToString())
    assert kept(tmp_path) == ["north.json"]
    held = json.loads((tmp_path / "state" / "renewals" / "north.json").read_bytes())
    assert held == second.model_dump()
    assert here.daemon.roster == world.roster

    # signed by a stranger; nothing; too much; what is in the roster already
    stranger = create_keys(tmp_path / "thief", "north", Role.SILO, "organisation of north")
    north(message(Renewal.of(stranger)).SerializeToString(), "MANIFEST", "does not fit")
    north(b"", "MANIFEST", "signature")
    long = pb.RenewRequest(certificate="x" * 5000, signature=bytes(64))
    north(long.SerializeToString(), "MANIFEST", "1024")
    north(message(Renewal.of(world.keys["north"].entry)).SerializeToString())
    assert json.loads((tmp_path / "state" / "renewals" / "north.json").read_bytes()) == held

    # the coordinator asks nobody but itself
    coordinators = load_keys(world.config.keys)
    calling(here, world, coordinators)(data, "IDENTITY", "may not call")


def test_a_founder_admits_nothing_but_certificates_that_its_members_signed(here, world, tmp_path):
    """Whatever a malicious coordinator shows; one bad renewal does not keep out a good one."""
    founder = founders_file(here, world, tmp_path)
    place, other = (copied(world, tmp_path, silo) for silo in SILOS)
    good = renew_keys(place).entry
    # The coordinator has another organisation signed by a key of its own, or the certificate of
    # another member, or a member that nobody admitted.
    forged = create_keys(tmp_path / "forged", "east", Role.SILO, "organisation of the coordinator")
    shown = {
        "north": Renewal.of(good),
        "east": Renewal.of(forged),
        "operator": Renewal.of(renew_keys(other).entry),
        "spy": Renewal.of(create_keys(tmp_path / "spy", "spy", Role.SILO, "org")),
    }
    folder = tmp_path / "state" / "renewals"
    folder.mkdir()
    for member, renewal in shown.items():
        (folder / f"{member}.json").write_bytes(canonical_json(renewal.model_dump()) + b"\n")
    result = CliRunner().invoke(app, ["federation", "renew", "--founder", str(founder)])
    assert result.exit_code == 1, result.output
    for member, why in (
        ("east", "signature of entry 'east' does not fit"),
        ("operator", "certificate is not for the one name 'operator.staddle'"),
        ("spy", "is not a member of federation"),
    ):
        assert re.search(f"not admitted: {member}: .*{why}", result.output)
    published = rosters.load(tmp_path / "founder.json")
    assert published == rosters.load(tmp_path / "state" / "roster.json")
    assert published.entries == rosters.add(world.roster, good, replace=True).entries


def test_a_coordinator_cannot_put_back_a_certificate_of_before(here, world, tmp_path, monkeypatch):
    """Its key may be the coordinator's by now."""
    founder, place = founders_file(here, world, tmp_path), copied(world, tmp_path, "north")
    with monkeypatch.context() as past:
        past.setattr(certificate, "utc_now", lambda: NOW - dt.timedelta(days=100))
        stolen = Renewal.of(renew_keys(place).entry)
        past.setattr(certificate, "utc_now", lambda: NOW - dt.timedelta(days=50))
        present = rosters.add(world.roster, renew_keys(place).entry, replace=True)
    present = rosters.sign(present, load_keys(world.folder / "founder"))
    rosters.save(present, tmp_path / "founder.json")
    # one that would never end, and one that shall be good later, when its key is known
    with monkeypatch.context() as later:
        later.setattr(certificate, "LIFETIME", 5 * LIFETIME)
        ever = Renewal.of(renew_keys(place).entry)
        later.setattr(certificate, "utc_now", lambda: NOW + dt.timedelta(days=1))
        early = Renewal.of(renew_keys(place).entry)
    folder = tmp_path / "state" / "renewals"
    folder.mkdir()
    command = ["federation", "renew", "--founder", str(founder)]
    for renewal, why in (
        (stolen, "certificate is not newer than the one in the roster"),
        (ever, "good for more than 731 days"),
        (early, "and this clock says"),
    ):
        (folder / "north.json").write_bytes(canonical_json(renewal.model_dump()) + b"\n")
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, why in result.output) == (1, True), result.output
        assert rosters.load(tmp_path / "founder.json") == present


def test_what_a_member_signed_as_an_entry_elsewhere_is_no_renewal_of_another_entry(world, tmp_path):
    """The coordinator has entries from other federations, or from before a member moved."""
    place = copied(world, tmp_path, "north")
    keys = load_keys(place)
    moved = renew_keys(place).entry.model_dump(mode="json") | {"organisation": "another"}
    signature = keys.sign(ENTRY, entry_bytes(moved)).hex()
    renewal = Renewal(certificate=moved["certificate"], signature=signature)
    with pytest.raises(Exception, match="signature of entry 'north' does not fit"):
        renewal.renewed(keys.entry, utc_now())

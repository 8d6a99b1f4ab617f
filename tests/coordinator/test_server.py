"""One process under one roster after another: what is made anew, and what stays open."""

import asyncio
import urllib.request

import pytest
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle import log
from staddle.coordinator import server
from staddle.metrics.exporter import MetricsConfig
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger import audit

SILOS = ("a", "b")


@pytest.fixture
def world(tmp_path):
    """A coordinator with metrics, and the next roster."""
    made = signed_federation(tmp_path, SILOS, job_document(SILOS))
    other = create_keys(tmp_path / "other", "other", Role.SILO, "org")
    founder = load_keys(made.folder / "founder")
    made.following = rosters.sign(rosters.add(made.roster, other), founder)
    made.config = made.config.model_copy(update={"metrics": MetricsConfig(listen="127.0.0.1:0")})
    return made


async def test_a_new_roster_reads_no_ledger_again_and_counts_on(world):
    """Of a long one that takes minutes, in which no silo is answered."""
    log.setup("json")
    told = []
    ledger = world.config.directory / "ledger"

    async def scraped():
        (address,) = [each["address"] for event, each in told if event == "metrics.listening"]
        return await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
        )

    with log.followed(lambda event, fields: told.append((event, fields))):
        with server.opened(world.config) as state:
            async with server.serving(state, asyncio.Event()):
                log.event("upload.accepted", silo="a")
                assert 'silo_connected{silo="other"}' not in await scraped()
            # Whoever reads it from here on finds it broken.
            (segment,) = ledger.glob("seg-*.jsonl")
            whole = segment.read_bytes()
            segment.write_bytes(b"x" + whole[1:])
            assert not audit.verify(ledger).ok

            state.in_use.keep(world.following)
            state.config = server.continued(state.config, world.config.listen)
            async with (
                server.serving(state, asyncio.Event()) as address,
                raw_silos(address, world, accepted=False) as (silo, _),
            ):
                assert rosters.parse((await silo.hello()).roster, "it") == world.following
                after = await scraped()
            assert 'silo_connected{silo="other"} 0.0' in after
            assert 'uploads_accepted_total{silo="a"} 1.0' in after
            segment.write_bytes(whole + segment.read_bytes()[len(whole) :])
        assert audit.verify(ledger).ok
        assert [each["roster"] for event, each in told if event == "listening"] == [
            world.roster.version,
            world.following.version,
        ]

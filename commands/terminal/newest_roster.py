"""A silo's roster file, kept new: commands act by the roster that the federation has now."""

from ...errors import PeerError
from ...proto.channel import checked_address
from ...security.identity import roster as rosters
from ...security.identity.keys import held_keys, load_keys
from ...security.identity.roster import Roster
from ...silo import connectivity
from ...silo.config import SiloConfig
from . import printer


def newest(config: SiloConfig) -> Roster:
    """The roster in a silo's file, or the coordinator's if it is newer, which then lies there.

    The newer one is checked as an agent checks it: our founders signed it, and we are in it.
    LocalError if not. Where the coordinator does not answer, the present one counts.
    """
    try:
        return taken_over(config)
    except PeerError as error:
        present = rosters.load(config.roster)
        version = f"{config.roster}: version {present.version} counts; no newer one was asked for"
        printer.show(f"{version}: {error}", err=True)
        return present


def taken_over(config: SiloConfig) -> Roster:
    """Like ``newest``; PeerError where the coordinator does not answer."""
    present = rosters.load(config.roster)
    rosters.verify(present, config.trust)
    keys = load_keys(config.keys, present.entries)
    address = checked_address(config.coordinator)
    found = connectivity.newest_roster(address, keys, present.coordinator, config.proxy)
    roster = rosters.parse(found, "the coordinator's roster")
    # An older one may be that of a coordinator which missed a change.
    if roster.version <= present.version:
        return present
    rosters.check_next(roster, present, config.trust, held_keys(config.keys))
    rosters.save(roster, config.roster)
    taken = f"version {roster.version} was taken over, in place of {present.version}"
    printer.show(f"{config.roster}: {taken}", err=True)
    return roster

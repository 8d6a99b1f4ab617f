"""A silo's roster, kept new: commands act by the roster that the federation has now."""

from ...errors import PeerError
from ...proto.channel import checked_address
from ...security.identity import roster as rosters
from ...security.identity.roster import Roster
from ...silo import connectivity
from ...silo.config import SiloConfig
from . import printer


def newest(config: SiloConfig) -> Roster:
    """A silo's present roster, or the coordinator's if it is newer, which the silo then has.

    The newer one is checked as an agent checks it: our founders signed it, and we are in it.
    LocalError if not. Where the coordinator does not answer, the present one counts.
    """
    try:
        return taken_over(config)
    except PeerError as error:
        present = config.roster_in_use().present
        version = f"roster version {present.version} counts; no newer one was asked for"
        printer.show(f"{version}: {error}", err=True)
        return present


def taken_over(config: SiloConfig) -> Roster:
    """Like ``newest``; PeerError where the coordinator does not answer."""
    in_use = config.roster_in_use()
    present, address = in_use.present, checked_address(config.coordinator)
    found = connectivity.newest_roster(address, in_use.keys, present.coordinator, config.proxy)
    if in_use.take_over(rosters.parse(found, "the coordinator's roster")):
        version = f"version {in_use.present.version} was taken over, in place of {present.version}"
        printer.show(f"{config.directory}: roster {version}", err=True)
    return in_use.present

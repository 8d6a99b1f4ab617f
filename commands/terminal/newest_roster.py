"""A silo's roster, as new as the coordinator has it: commands act by that of the federation.

It counts for the command alone: the agent takes it over by itself.
"""

from contextlib import suppress

from ...errors import LocalError, PeerError
from ...proto.channel import checked_address
from ...security.identity import roster as rosters
from ...security.identity.roster import Roster
from ...security.identity.roster_in_use import RosterInUse
from ...silo import connectivity
from ...silo.config import SiloConfig
from . import printer


def newest(config: SiloConfig) -> Roster:
    """A silo's present roster, or the coordinator's if it is newer.

    The newer one is checked as an agent checks it: our founders signed it, and we are in it.
    LocalError if not. Where the coordinator does not answer, the present one counts.
    """
    in_use = config.roster_in_use()
    try:
        _ask(config, in_use)
    except PeerError as error:
        version = f"roster version {in_use.present.version} counts; no newer one was asked for"
        printer.show(f"{version}: {error}", err=True)
    return in_use.present


def newest_in_use(config: SiloConfig) -> RosterInUse:
    """The same for a check, which finds what is wrong by itself."""
    in_use = config.roster_in_use()
    with suppress(LocalError, PeerError):
        _ask(config, in_use)
    return in_use


def _ask(config: SiloConfig, in_use: RosterInUse) -> None:
    before, address = in_use.present, checked_address(config.coordinator)
    found = connectivity.newest_roster(address, in_use.keys, before.coordinator, config.proxy)
    roster = rosters.parse(found, "the coordinator's roster")
    if in_use.newer(roster):
        in_use.present = roster
        said = f"roster version {roster.version} of the coordinator counts, in place of"
        printer.show(f"{said} {before.version}", err=True)

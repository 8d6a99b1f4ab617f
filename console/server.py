"""Serve the page of one configuration until it is stopped, or its readers change."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from ..coordinator.config import CoordinatorConfig
from ..errors import LocalError
from ..security.identity.keys import ENTRY_FILE, Role, RosterEntry, load_entry
from ..security.identity.roster import Roster
from ..security.identity.roster_in_use import RosterInUse
from ..silo.config import SiloConfig
from .access import Sessions
from .changes import SECONDS
from .coordinator_site import CoordinatorSite
from .listener import Address, bound, loopback, mutual_tls
from .silo_site import SiloSite
from .site import Application, Site

Config: TypeAlias = CoordinatorConfig | SiloConfig


async def serve(
    path: Path, config: Config, listen: str, operator: Path | None, show: Callable[[str], None]
) -> None:
    """Print the address and answer; it returns after SIGTERM or Ctrl-C.

    LocalError for an address that cannot be had, a roster that its founders did not sign, or
    ``operator`` where it may not be.
    """
    asked = Address.of(listen)
    site = site_of(path, config, operator, asked)
    with bound(asked) as (listening, address):
        if address.is_loopback:
            sessions = Sessions(by_token=True)
            served = loopback(Application(site, sessions).asgi, sessions, address)
            show(f"open {served.url}")
            show("the address works once, within ten minutes; Ctrl-C ends the console")
            await served.answer(listening)
            return
        # The readers are those of the roster: a new one is taken up by a new listener.
        in_use = config.roster_in_use()
        while await _serve_tls(site, config, in_use, address, listening, show):
            show("the roster changed, and with it who may see the page")


def site_of(path: Path, config: Config, operator: Path | None, address: Address) -> Site:
    """The pages of a configuration; LocalError for an operator's file where it may not be used."""
    if operator is not None and not address.is_loopback:
        raise LocalError(
            "--operator only on loopback: whoever sees the page would act in that operator's name"
        )
    if isinstance(config, CoordinatorConfig):
        return CoordinatorSite(config, operator)
    if operator is not None:
        raise LocalError("--operator is for the console of a coordinator; a silo stops no jobs")
    # Beyond loopback it is not known which of the readers asks.
    return SiloSite(path, config, decides=address.is_loopback)


def readers(config: Config, roster: Roster) -> tuple[RosterEntry, ...]:
    """Whose certificates see the page.

    A coordinator's: all operators, who may ask it for the same by the command line. A silo's:
    operators of its own organisation. Founders and other silos need neither.
    """
    operators = roster.having(Role.OPERATOR)
    if isinstance(config, CoordinatorConfig):
        return operators
    own = _own(config).organisation
    return tuple(entry for entry in operators if entry.organisation == own)


def _own(config: Config) -> RosterEntry:
    return load_entry(config.keys / ENTRY_FILE)


async def _serve_tls(
    site: Site,
    config: Config,
    in_use: RosterInUse,
    address: Address,
    listening: socket.socket,
    show: Callable[[str], None],
) -> bool:
    """Serve until the end; True where it ended since ``in_use`` is another roster by now.

    Whatever keeps the files from being read ends it too: nobody is let in by a roster of before.
    """
    allowed = readers(config, in_use.present)
    if not allowed:
        raise LocalError(
            f"{config.roster}: has no operator who may see this page; have one added, or use"
            " loopback"
        )
    sessions = Sessions(by_token=False)
    served = mutual_tls(Application(site, sessions).asgi, sessions, address, in_use.keys, allowed)
    names = ", ".join(entry.id for entry in allowed)
    show(f"open {served.url} with the certificate of {names}")

    async def watch() -> bool:
        try:
            # Files tell nobody that they changed.
            while not in_use.look():  # noqa: ASYNC110
                await asyncio.sleep(SECONDS)
        finally:
            served.server.should_exit = True
        return True

    watching = asyncio.create_task(watch())
    await served.answer(listening)
    if watching.done():
        return watching.result()
    watching.cancel()
    return False

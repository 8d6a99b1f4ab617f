"""The rosters that a ledger keeps: who its members were, for whoever audits it.

Founders' signatures alone vouch for a roster (``roster.verify_by``), so records are looked for
without a check of the chain: nobody can make one up.
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path

from ...errors import LocalError, reason
from ...files.documents import parse_json
from ..identity import roster as rosters
from ..identity.roster import Roster
from ..log.chain import MAX_LINE
from ..log.segments import BUFFER_BYTES, segments
from .records import MOST_ROSTER, RosterChange

_MARK = b'"type":"roster.change"'


def record_of(roster: Roster) -> RosterChange | None:
    """The record of a roster; None for one that is too large for a line of a ledger."""
    data = rosters.encoded(roster)
    # In bytes: lines of a ledger are bounded so, and names may be in any script.
    if len(data) > MOST_ROSTER:
        return None
    return RosterChange(roster=rosters.digest(roster), text=data.decode())


def kept(folder: Path) -> tuple[Roster, ...]:
    """The rosters in a ledger's folder, oldest version first, each once.

    LocalError for a ledger that cannot be read, or a record that holds no roster.
    """
    lines = chain.from_iterable(map(_marked, segments(folder)))
    found = map(partial(_roster, folder), lines)
    each = {rosters.digest(roster): roster for roster in found}
    return tuple(sorted(each.values(), key=attrgetter("version")))


def _marked(path: Path) -> Iterator[bytes]:
    """The lines of a segment that are of rosters; most are not, and are not parsed."""
    try:
        with path.open("rb", buffering=BUFFER_BYTES) as file:
            # bounded, so that a damaged file without newlines does not fill the memory
            lines = iter(partial(file.readline, MAX_LINE), b"")
            yield from (line for line in lines if _MARK in line)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error


def _roster(folder: Path, line: bytes) -> Roster:
    document = parse_json(line, f"{folder}: a record of a roster")
    where = f"{folder}: the roster of a record"
    return rosters.parse(str(document["text"]).encode(), where)

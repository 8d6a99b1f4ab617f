"""A silo's message in a secure sum: its event of the machine, and whether it was taken."""

from collections.abc import Mapping
from typing import TypeAlias

from ...proto.convert.secagg_sent import Over, UploadBody
from ...security.secagg import coordinator_events as c
from ...security.secagg import silo_events as s
from ...security.secagg.coordinator import CoordinatorState
from ..storage.replay_log import Said, Spooled

Happened: TypeAlias = Said | c.SiloDropped | c.AttemptDeadline | c.SumPublished | c.OpenFailed


def event_of(entry: Happened, spooled: Mapping[str, Spooled]) -> c.Event:
    """The event; a header is joined with its silo's masked words, and refused without them.

    ``spooled`` by silo: words that are here whole.
    """
    if not isinstance(entry, Said):
        return entry
    match entry.given.body:
        # It comes after its words; without them its length is wrong, and the machine refuses it.
        case s.SendHeader(header):
            here = spooled.get(entry.silo, Spooled(entry.silo, 0, b""))
            return c.WordsUploaded(header, here.size, here.sha256)
        case Over(code):
            return c.SiloDropped(entry.silo, code)
        case body:
            return body


def taken(state: CoordinatorState, silo: str, body: UploadBody) -> bool:
    """True where the attempt has exactly this message of a silo.

    A silo whose answer was lost sends the same again; that is no equivocation.
    """
    match body:
        case s.SendKeys(bundle, keys):
            return state.bundles.get(silo) == bundle and state.keys.get(silo) == keys
        # Portions of a dealer that is not in U2 are kept no longer.
        case s.SendShares(dealing, portions):
            return (
                state.dealings.get(silo) == dealing
                and state.portions.get(silo, portions) == portions
            )
        case s.SendComplaint(complaint):
            return state.complaints.get(silo) == complaint
        case s.SendHeader(header):
            return state.headers.get(silo) == header
        case s.SendSurvival(survival):
            return state.survivals.get(silo) == survival
        case s.SendReveal(reveal):
            return state.reveals.get(silo) == reveal
        case s.SendAbandon(note):
            return state.notes.get(silo) == note
        # That a silo is out is no message which others receive: it may say so again.
        case Over():
            return False


def unneeded(state: CoordinatorState, silo: str, body: UploadBody) -> bool:
    """True where enough others have signed, revealed or complained meanwhile."""
    # Nobody is refused for being the last: a refusal would count against a silo that is on time.
    if isinstance(body, s.SendComplaint):
        return bool(state.complaints)
    opens = isinstance(body, s.SendSurvival | s.SendReveal)
    return opens and silo in state.u3 and state.stage in ("opening", "done")

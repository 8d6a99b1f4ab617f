"""How a member gets another TLS certificate: what it hands in, and what others make of it.

A renewal is a certificate, and the member's signature over its entry with that certificate in
place of the present one. Whoever takes it makes this entry from their own roster: nothing but the
certificate can change, whoever passed it on. The protocol key that signs is the one that the roster
has already, so nobody compares fingerprints again.

::

    member                                   coordinator                founder
    two thirds of its certificate are over
    makes another key (``renew_keys``)
    hands in (certificate, signature)   →    one waits for each member
                                                             ←          asks, checks, signs a roster
    takes over the roster, in which its new certificate counts   ←
"""

import datetime as dt
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from ...errors import LocalError, PeerError
from ...files.documents import Strict, validate
from .certificate import check_certificate, check_follows, renewal_due
from .keys import Hex64, RosterEntry, held_keys, renew_keys, spki_digest

MOST_BYTES = 1024  # of a certificate, PEM; that of the longest id has about 900


class Renewal(Strict):
    """A member's new certificate (PEM), and the signature of the entry that has it."""

    certificate: Annotated[str, Field(max_length=MOST_BYTES)]
    signature: Hex64

    @classmethod
    def of(cls, entry: RosterEntry) -> Self:
        """What makes this entry from the member's present one."""
        return cls(certificate=entry.certificate, signature=entry.signature)

    def renewed(self, present: RosterEntry, now: dt.datetime) -> RosterEntry:
        """The member's entry in the next roster; PeerError says what is wrong with the renewal.

        ``present`` is its entry in the caller's own roster.
        """
        try:
            check_certificate(present.id, self.certificate)
            check_follows(self.certificate, present.certificate, now)
            document = present.model_dump(mode="json") | self.model_dump()
            document["spki_sha256"] = spki_digest(self.certificate)
            return validate(document, RosterEntry, "renewed entry")
        except (ValueError, LocalError) as error:
            raise PeerError(present.id, f"its renewal: {error}") from error


def own_renewal(
    folder: Path, present: RosterEntry, now: dt.datetime, renewed: Path | None = None
) -> Renewal | None:
    """What a member hands in by now; None while its certificate is good for long enough.

    ``folder`` has its keys; a new one is made there, or in ``renewed``, once. LocalError where that
    cannot be written.
    """
    newest = held_keys(folder, renewed)[-1]
    if renewal_due(newest.entry.certificate, now):
        newest = renew_keys(folder, renewed)
    return None if newest.entry == present else Renewal.of(newest.entry)

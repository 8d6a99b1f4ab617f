"""Releases: what each tensor of an upload tells, to whom, and in which form, as policy and ledger
have it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ...algorithms.exchange.parts import (
    Item,
    Mix,
    Part,
    TensorSpec,
    upload_items,
)
from ...security.arithmetic.fixedpoint import COORDINATOR_READS, SILOS_READ, Group
from ...security.blind.directed_mix import is_row
from ...security.blind.plan import RoundPlan
from ...security.identity.roster import Roster
from ...security.policy.release import (
    GRAM_READER,
    MASKED,
    MIX_READER,
    PADDED,
    ROTATED,
    SILOS_READER,
    SUM_READER,
    Release,
)

SUMS = {COORDINATOR_READS: SUM_READER, SILOS_READ: SILOS_READER}  # by who reads a group


def release_of(item: Item) -> Release:
    """What policy and ledger read about one tensor."""
    spec = item.spec
    return Release(item.part, item.kind.name.lower(), spec.name, spec.dtype, spec.shape)


def masked_releases(parts: Sequence[Part], groups: Sequence[Group]) -> tuple[Release, ...]:
    """What policy and ledger read about a masked round: a release for each tensor, weights only
    where private.

    ``groups`` are those of the parts, in their order. All rows of a part are one release, stacked,
    for who reads them.
    """
    found: list[Release] = []
    for part, pairs in groupby(zip(parts, groups, strict=True), key=lambda pair: pair[0]):
        own = [group for _, group in pairs]
        rows = tuple(group.reader for group in own if is_row(group))
        readers = rows or (SUMS[own[0].reader],)
        for spec in part.wire if own[0].weights == "private" else part.tensors:
            shape = (len(rows), *spec.shape) if rows else spec.shape
            kind, dtype = part.kind.name.lower(), f"uint{own[0].ring}"
            found.append(Release(part.name, kind, spec.name, dtype, shape, MASKED, readers=readers))
    return tuple(found)


def padded_releases(part: Part) -> tuple[Release, ...]:
    """What policy and ledger read about a part that leaves padded: a release for each tensor."""
    return tuple(_hidden(part, spec, "uint64", PADDED, MIX_READER) for spec in part.tensors)


def rotated_releases(part: Part) -> tuple[Release, ...]:
    """What they read about a part whose vectors leave rotated."""
    return tuple(_hidden(part, spec, spec.dtype, ROTATED, GRAM_READER) for spec in part.wire)


def shared_releases(part: Part, cohort: int) -> tuple[Release, ...]:
    """What they read about a part of which shares leave, in a cohort of so many silos: the numbers
    dealt to the others.

    Those are the shares of its vectors, and of as many zeros as there are silos.
    """
    (spec,) = part.tensors
    groups, width = spec.shape
    numbers = TensorSpec(spec.name, "float64", (cohort - 1, groups, width + cohort))
    return (_hidden(part, numbers, "uint64", MASKED, GRAM_READER),)


def _hidden(part: Part, spec: TensorSpec, dtype: str, form: str, reader: str) -> Release:
    """Of what is blind nobody opens a silo's own part: its reader stands for what it is read as,
    and by whom.
    """
    return Release(
        part.name, part.kind.name.lower(), spec.name, dtype, spec.shape, form, readers=(reader,)
    )


def upload_releases(plan: RoundPlan) -> tuple[Release, ...]:
    """All that a silo gives in a round, in the form and the order in which it leaves.

    Who gets rows is another matter in each round: they are for any of the job's silos. Of a private
    job it is as it is meant to be, differentially private; what paid for it, and that it is so, is
    known in the round alone.
    """
    releases = _given(plan)
    return tuple(replace(each, taint="dp") for each in releases) if plan.job.privacy else releases


def _given(plan: RoundPlan) -> tuple[Release, ...]:
    job = plan.job
    if not job.security.required:
        return tuple(release_of(item) for item in upload_items(plan.up))
    hidden = [
        release
        for part in plan.uploads
        for release in (
            padded_releases(part) if isinstance(part.exchange, Mix) else rotated_releases(part)
        )
    ]
    masked = masked_releases(*plan.groups)
    cohort = len(job.cohort(plan.round))
    masked += tuple(release for part in plan.shared for release in shared_releases(part, cohort))
    return (
        *hidden,
        *(replace(each, readers=job.silos) if each.is_row else each for each in masked),
    )


def bytes_by_kind(releases: Sequence[Release], offset: int = 0) -> dict[str, int]:
    """Payload bytes of a bundle behind an offset, by kind of part."""
    sizes: Counter[str] = Counter()
    for release in releases:
        skipped = min(offset, release.nbytes)
        sizes[release.kind] += release.nbytes - skipped
        offset -= skipped
    return dict(sizes)


def readers_of_message(releases: Sequence[Release], roster: Roster) -> tuple[str, ...]:
    """Who can open something of a message of one form."""
    return readers_of_each(releases) or readers_of(roster)


def readers_of_each(releases: Sequence[Release]) -> tuple[str, ...]:
    """The readers that a message's tensors name themselves."""
    return tuple(dict.fromkeys(reader for release in releases for reader in release.readers))


def readers_of(roster: Roster) -> tuple[str, ...]:
    """Who can open what a silo gives in the clear: the coordinator.

    The other silos see only folded results.
    """
    return (roster.coordinator.id,)

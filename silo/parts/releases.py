"""Releases: what each tensor of an upload reveals, to whom, and in which form.

Policy and ledger read these.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

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
    """The release of a tensor that leaves in the clear.

    It names no readers, which follow from the roster.
    """
    spec = item.spec
    return Release(item.part, item.kind.name.lower(), spec.name, spec.dtype, spec.shape)


def masked_releases(parts: Sequence[Part], groups: Sequence[Group]) -> tuple[Release, ...]:
    """The releases of a masked round, one for each tensor.

    ``groups`` are those of the parts, in their order. Weights are among the tensors only where they
    are private. All rows of a part are one release, stacked, for those who read them.
    """
    found: list[Release] = []
    for part, pairs in groupby(zip(parts, groups, strict=True), key=lambda pair: pair[0]):
        found += _masked(part, [group for _, group in pairs])
    return tuple(found)


def _masked(part: Part, groups: Sequence[Group]) -> Iterator[Release]:
    # Public weights stand in the signed job, so no tensor of them leaves.
    first = groups[0]
    specs = part.wire if first.weights == "private" else part.tensors

    # One release of all rows, so that policy and ledger read one line per tensor, not one per silo.
    readers = tuple(group.reader for group in filter(is_row, groups))
    stack: tuple[int, ...] = (len(readers),)
    if not readers:
        readers, stack = (SUMS[first.reader],), ()
    for spec in specs:
        # Words of the ring leave, whatever the tensor's dtype.
        stacked = replace(spec, shape=(*stack, *spec.shape))
        yield _hidden(part, stacked, f"uint{first.ring}", MASKED, readers)


def padded_releases(part: Part) -> tuple[Release, ...]:
    """The releases of a part that leaves padded, one for each tensor.

    They leave as words of 64 bits, whatever their dtypes.
    """
    return tuple(_hidden(part, spec, "uint64", PADDED, (MIX_READER,)) for spec in part.tensors)


def rotated_releases(part: Part) -> tuple[Release, ...]:
    """The releases of a part whose vectors leave rotated.

    If the job sketches vectors, the sketches leave.
    """
    return tuple(_hidden(part, spec, spec.dtype, ROTATED, (GRAM_READER,)) for spec in part.wire)


def shared_releases(part: Part, cohort: int) -> tuple[Release, ...]:
    """The release of a part of which shares leave: the numbers dealt.

    Those are the shares of its vectors, and of as many zeros as there are silos in the cohort.
    """
    (spec,) = part.tensors
    groups, width = spec.shape
    # Our own shares stay here.
    numbers = TensorSpec(spec.name, "float64", (cohort - 1, groups, width + cohort))
    return (_hidden(part, numbers, "uint64", MASKED, (GRAM_READER,)),)


def _hidden(
    part: Part, spec: TensorSpec, dtype: str, form: str, readers: tuple[str, ...]
) -> Release:
    """The release of a blind part, which nobody opens on its own.

    ``readers`` stand for what it is read as, and by whom.
    """
    kind = part.kind.name.lower()
    return Release(part.name, kind, spec.name, dtype, spec.shape, form, readers=readers)


def upload_releases(plan: RoundPlan) -> tuple[Release, ...]:
    """All that a silo uploads in a round, in the form and the order in which it leaves.

    Rows have other readers in each round: here they are for any of the job's silos. In a private
    job all is said to be differentially private, as it is meant to be; what paid for it, and that
    it is so, is known in the round alone.
    """
    job = plan.job
    if not job.security.required:
        releases = list(map(release_of, upload_items(plan.up)))
    else:
        releases = list(_blind_releases(plan))
    if job.privacy is not None:
        return tuple(replace(release, taint="noised") for release in releases)
    return tuple(releases)


def _blind_releases(plan: RoundPlan) -> Iterator[Release]:
    yield from chain.from_iterable(map(_upload_release, plan.uploads))

    # a release of rows names their readers; those of this round are not known yet
    for release in masked_releases(*plan.groups):
        yield replace(release, readers=plan.job.silos) if release.is_row else release

    cohort = len(plan.job.cohort(plan.round))
    for part in plan.shared:
        yield from shared_releases(part, cohort)


def _upload_release(part: Part) -> tuple[Release, ...]:
    if isinstance(part.exchange, Mix):
        return padded_releases(part)
    return rotated_releases(part)


def bytes_by_kind(releases: Sequence[Release], offset: int = 0) -> dict[str, int]:
    """Bytes of an upload's tensors behind an offset, by kind of part.

    For the log.
    """
    # Bytes before the offset left in an earlier attempt, and were counted then.
    sizes: Counter[str] = Counter()
    for release in releases:
        skipped = min(offset, release.nbytes)
        sizes[release.kind] += release.nbytes - skipped
        offset -= skipped
    return dict(sizes)


def readers_of_message(releases: Sequence[Release], roster: Roster) -> tuple[str, ...]:
    """Who can open something of a message of one form.

    The readers that its tensors name; for a plain message, the coordinator.
    """
    return readers_of_each(releases) or readers_of(roster)


def readers_of_each(releases: Sequence[Release]) -> tuple[str, ...]:
    """The readers that a message's tensors name themselves.

    Each once, in the order of the tensors. Empty for a plain message.
    """
    return tuple(dict.fromkeys(reader for release in releases for reader in release.readers))


def readers_of(roster: Roster) -> tuple[str, ...]:
    """Who can open what a silo uploads in the clear: the coordinator.

    The other silos see only folded results.
    """
    return (roster.coordinator.id,)

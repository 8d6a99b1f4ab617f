"""What the coordinator sees of a blind round, and how to look for what it may not see."""

import hashlib
import json
from collections import defaultdict

import numpy as np
import pytest
from federation.test_tap import stop_once_idle, tapping
from support.explained import entries

from staddle.coordinator.blind.unmask import SURVIVORS, WORDS
from staddle.coordinator.storage.store import JobStore, opened_sum
from staddle.proto import secure_pb2 as secure
from staddle.security.blind.directed_mix import is_row
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised, folded, given
from staddle.security.ledger.audit import ledger_folder
from staddle.security.ledger.records import SumOpened
from staddle.security.secagg.masked_sum import Accumulator, masked_chunks

SILOS = ("north", "east", "south", "west")
# of greetings and offers; the reader of explained.py knows them
ELSEWHERE = {"Hello", "Poll", "Answer", "Attest"}
WINDOW = 16  # bytes of a tensor that are looked for
LARGEST_CHI_SQUARE = 500  # of 256 values, 255 degrees of freedom: exceeded once in 10^17 uploads
LEAST_COUNTED = 2000  # bytes: the bytes of shorter ones are no chi-square
LIKELY = 9  # standard deviations of a correlation: exceeded once in 10^18 comparisons


class Kept(Quantised):
    """The exchanges of blind silos; keeps what each silo gives, in the order of the simulation."""

    def __init__(self, *given):
        super().__init__(*given)
        self.contributions = []

    def contribute(self, part, contribution):
        self.contributions.append((part, super().contribute(part, contribution)))
        return self.contributions[-1][1]


def tapped(running, then=lambda _: None):
    """All jobs of a federation, done; calls by silo.

    ``then`` is called with each job as it has ended.
    """
    running.start_coordinator()
    with tapping(running) as tap:
        running.start_silos()
        running.completed(then=then)
        stop_once_idle(running, tap)
    return tap.calls


# What crossed.


def told(calls):
    """What came down in answer to SecureNext, by kind, then by (job, round)."""
    found = defaultdict(dict)
    for call in calls:
        for data in call.received if call.method.endswith("/SecureNext") else ():
            message = secure.SecureDelivery.FromString(data)
            body = message.WhichOneof("body")
            if body:
                found[body][message.attempt.job, message.attempt.round] = getattr(message, body)
    return found


def unmasked(spec, silo, parts):
    """The chunks of an upload as they would be without masks: numbers of the ring, and canaries."""
    made = [
        given(part, own, tensors) for (part, tensors), own in zip(parts, spec.groups, strict=True)
    ]
    return [words.tobytes() for words in masked_chunks(readable(spec), silo, made, ())]


def readable(spec):
    """A specification whose groups are all for the coordinator, so that they have no pads."""
    groups = tuple(group.model_copy(update={"reader": "coordinator"}) for group in spec.groups)
    return spec.model_copy(update={"groups": groups})


# What it may see.


def paths(message, prefix=""):
    """Names of the fields that are set."""
    for descriptor, value in message.ListFields():
        name = f"{prefix}{descriptor.name}"
        if descriptor.message_type is None:
            yield name
        else:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from paths(inner, f"{name}.")


def sums_of(running, silo):
    """Digests of the sums that were opened, as the silo's ledger has them."""
    records = (entry.record for entry in entries(ledger_folder(running.federation.state(silo))))
    return {(r.job, r.round): r.sha256 for r in records if isinstance(r, SumOpened)}


def check_sum(spec, same, gave, job, folder):
    """The coordinator opened the sum of what silos gave, and nothing but that; ``same`` is the
    digest that it told.
    """
    published = JobPlan(job).round(spec.round).published
    assert spec.cohort == tuple(sorted(job.cohort(spec.round))) == tuple(sorted(gave))
    accumulator = Accumulator(readable(spec))
    for silo, parts in gave.items():
        accumulator.add(unmasked(spec, silo, parts))
    tensors, words = {}, {}
    opened = accumulator.open((), spec.cohort)
    numbers = list(accumulator.numbers())
    for index, ((part, _), own, each) in enumerate(
        zip(next(iter(gave.values())), spec.groups, opened, strict=True)
    ):
        if is_row(own):  # which one silo reads
            continue
        if part.name in published:  # silos get its words, whose digest stands for them
            of_part = b"".join(
                each.astype(f"<i{own.ring // 8}").tobytes() for at, each in numbers if at == index
            )
            words[part.name] = hashlib.sha256(of_part).hexdigest()
            continue
        tensors |= {
            f"{part.name}/{name}": value.clone() for name, value in folded(part, own, each).items()
        }
    store = JobStore(folder / job.name, lambda _: (), {})
    header = {SURVIVORS: json.dumps(list(spec.cohort)), WORDS: json.dumps(words, sort_keys=True)}
    store.write(opened_sum(spec.round), tensors, header)
    digest = hashlib.sha256(store.sum_file(spec.round).read_bytes()).digest()
    # the digests of rows' words are in it, too
    padded = any(is_row(own) and any(own.counts) for own in spec.groups)
    assert padded or same == digest


# What it may not see.


def chi_square(data):
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return ((counts - expected) ** 2 / expected).sum()


def related(a, b):
    """How far two rows of numbers are from unrelated, in standard deviations of the correlation."""
    return abs(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]) * np.sqrt(a.size)


def windows(piece):
    """Some places of a piece that say more than zeros do; a single number is one."""
    if len(piece) == 8 and any(piece):
        yield piece
    for at in range(0, len(piece) - WINDOW + 1, max(WINDOW, len(piece) // 40)):
        if len(set(piece[at : at + WINDOW])) > 3:
            yield piece[at : at + WINDOW]


def beginnings(windows, seen):
    """First 8 bytes of those windows that stand somewhere.

    Most of the places miss a table of low bits.
    """
    heads = np.frombuffer(b"".join(window[:8] for window in windows), "<u8")
    bits, table = np.uint64(2**22 - 1), np.zeros(2**22, bool)
    table[heads & bits] = True
    found = set()
    for shift in range(8):
        words = np.frombuffer(seen[shift : shift + (len(seen) - shift) // 8 * 8], "<u8")
        found |= set(words[table[words & bits]].tolist())
    return {head.tobytes() for head in heads if int(head) in found}


@pytest.mark.parametrize("at", range(9))
def test_a_window_is_found_wherever_it_stands(at):
    windows, rest = {bytes(range(n, n + 16)) for n in (1, 40, 80)}, bytes(50) + b"\xff" * 51
    for window in windows:
        assert beginnings(windows, rest[: 40 + at] + window + rest[40 + at :]) == {window[:8]}
    assert beginnings(windows, rest) == set()

"""What the coordinator sees of blind rounds: a tap records all of it, and nothing of it is what one
silo gave.
"""

import hashlib
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from federation.test_tap import stop_once_idle, tapping
from support.explained import SECURE, UPLOAD, entries, unexplained

from staddle.algorithms.engines.simulation import simulate
from staddle.coordinator.blind.unmask import SURVIVORS, WORDS
from staddle.coordinator.storage.store import JobStore, opened_sum
from staddle.files.documents import parse_canonical
from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.wire import tensor_bytes
from staddle.security.blind.directed_mix import is_row
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised, folded, given
from staddle.security.ledger.audit import ledger_folder
from staddle.security.ledger.records import SumOpened
from staddle.security.secagg.masked_sum import Accumulator, chunks, masked_chunks
from staddle.security.secagg.spec import RoundSpec

SILOS = ("north", "east", "south", "west")
ROUNDS = 2
METHODS = {"fedavg": {}, "ppfl": {"models": 2, "lam": 0.0}}
SECURITY = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}
DOCS = Path(__file__).parents[2] / "docs" / "wire.md"
ATTEMPT = "attempt.job attempt.job_digest attempt.round attempt.attempt attempt.context"
SEEN = {  # all that silos say in blind rounds; the same table stands in docs/wire.md
    "Fetch": "session job job_digest round",
    "Beat": "session job round",
    "SecureNext": "session job job_digest round had",
    "Secure keys": (
        f"session {ATTEMPT} keys.bundle.silo keys.bundle.seal keys.bundle.mask"
        " keys.bundle.receiving keys.bundle.signature keys.keys.dealer keys.keys.public"
    ),
    "Secure shares": (
        f"session {ATTEMPT} shares.dealing.dealer shares.dealing.h_u1 shares.dealing.seed"
        " shares.dealing.root shares.dealing.signature shares.portions.holder"
        " shares.portions.sealed shares.portions.own shares.portions.pair shares.portions.key"
    ),
    "Upload manifest": "session job job_digest round size context",
    "Upload chunk": "",
    "Upload end": "sha256 tensor_sha256 ledger_seq ledger_leaf head inclusion holds",
    "Secure header": (
        f"session {ATTEMPT} header.silo header.h_u2 header.length header.sha256 header.signature"
    ),
    "Secure survival": f"session {ATTEMPT} survival.silo survival.signature",
    "Secure reveal": (
        f"session {ATTEMPT} reveal.silo reveal.shares.dealer reveal.shares.kind reveal.shares.share"
        " reveal.shares.salt reveal.signature"
    ),
}
REQUESTS = {"Fetch": pb.FetchRequest, "Beat": pb.BeatRequest, "SecureNext": secure.SecurePoll}
# of greetings and offers; the reader of explained.py knows them
ELSEWHERE = {"Hello", "Poll", "Answer", "Attest"}
WINDOW = 16  # bytes of a tensor that are looked for
LARGEST_CHI_SQUARE = 460  # of 256 values, 255 degrees of freedom: exceeded once in 10^13 uploads
LIKELY = 8  # standard deviations of a correlation: exceeded once in 10^14 comparisons


class Kept(Quantised):
    """The exchanges of blind silos; keeps what each silo gives, in the order of the simulation."""

    def __init__(self, *given):
        super().__init__(*given)
        self.contributions = []

    def give(self, part, contribution):
        self.contributions.append((part, super().give(part, contribution)))
        return self.contributions[-1][1]


@pytest.mark.timeout(240)
def test_the_coordinator_sees_sums_alone(start, document, tmp_path):
    running, calls = recorded(start, document)
    roster = running.roster
    for silo in SILOS:
        ledger = entries(ledger_folder(running.federation.state(silo)))
        assert unexplained(calls[silo], ledger, roster) == []
    check_fields(calls)
    given_by = contributions(running)
    opened = {
        (job.name, round_): check_sum(calls, given_by, job, round_, tmp_path)
        for job in running.jobs
        for round_ in range(job.length)
    }
    assert all(sums_of(running, silo) == opened for silo in SILOS)
    for silo in SILOS:
        check_words(calls[silo], given_by, silo)
        check_plaintext(running, calls[silo], given_by, silo)


@pytest.mark.skipif(not DOCS.exists(), reason="the tests run without docs/ beside them")
def test_the_documentation_has_the_same_table():
    title = "## What the coordinator sees of a blind round"
    text = DOCS.read_text().partition(title)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \|$", text, re.MULTILINE)
    found = {
        call.replace("` `", " "): {field.strip("`,") for field in fields.split()}
        for call, fields in rows
    }
    assert found == {call: set(fields.split()) or {"bytes"} for call, fields in SEEN.items()}


def recorded(start, document):
    """Both jobs, done; calls by silo as the tap has them."""
    running = start(*SILOS)
    for method, options in METHODS.items():
        changes = {"rounds": ROUNDS, "min_cohort": 3, "security": SECURITY, "options": options}
        running.job(document(method, SILOS, method, **changes))
    return running, tapped(running)


def tapped(running):
    """All jobs of a federation, done; calls by silo."""
    running.start_coordinator()
    with tapping(running) as tap:
        running.start_silos()
        running.completed()
        stop_once_idle(running, tap)
    return tap.calls


def contributions(running):
    """What each silo gave, before masks: (job, round), silo → [(part, its tensors in the
    clear)].
    """
    shards = running.shards(SILOS)
    found = defaultdict(list)
    for job in running.jobs:
        kept = Kept(JobPlan(job).bounds)
        simulate(job, shards, exchanges=kept)
        told = iter(kept.contributions)
        for round_ in range(job.length):
            for silo, _ in itertools.product(job.cohort(round_), job.up(round_)):
                found[(job.name, round_), silo].append(next(told))
        assert next(told, None) is None
    return found


# What crossed.


def uploads(calls):
    """Masked words by (job, round)."""
    found = {}
    for call in calls:
        if call.method == UPLOAD:
            frames = [tensor.Frame.FromString(data) for data in call.sent]
            manifest = frames[0].manifest
            found[manifest.job, manifest.round] = b"".join(frame.chunk for frame in frames)
    return found


def told(calls, body):
    """What came down of a kind in answer to SecureNext, by (job, round)."""
    found = {}
    for call in calls:
        for data in call.received if call.method.endswith("/SecureNext") else ():
            message = secure.SecureDelivery.FromString(data)
            if message.WhichOneof("body") == body:
                found[message.attempt.job, message.attempt.round] = getattr(message, body)
    return found


def spec_of(calls, place):
    return parse_canonical(told(calls, "spec")[place].document, RoundSpec, "told")


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


def words_of(spec, payload):
    """The words of an upload, chunk by chunk, as signed numbers."""
    at = 0
    for chunk in chunks(spec):
        width = spec.groups[chunk.group].ring // 8
        yield np.frombuffer(payload[at : at + chunk.words * width], f"<i{width}")
        at += chunk.words * width
    assert at == len(payload)


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


def check_fields(calls):
    """The fields of all that silos said are those of the table, and each of them was there."""
    found = defaultdict(set)
    for call in itertools.chain.from_iterable(calls.values()):
        method = call.method.rpartition("/")[2]
        for data in call.sent:
            if call.method == UPLOAD:
                frame = tensor.Frame.FromString(data)
                body = frame.WhichOneof("body")
                fields = () if body == "chunk" else paths(getattr(frame, body))
                found[f"Upload {body}"] |= set(fields)
            elif call.method == SECURE:
                message = secure.SecureUpload.FromString(data)
                found[f"Secure {message.WhichOneof('body')}"] |= set(paths(message))
            elif method not in ELSEWHERE:
                found[method] |= set(paths(REQUESTS[method].FromString(data)))
    assert found.keys() | {"Beat"} == SEEN.keys()  # a round may be over before the first heartbeat
    for call, fields in found.items():
        # all first attempts: it is not written
        zero = {"attempt.attempt"} if call.startswith("Secure ") else set()
        # the first round may be the only one that takes so long
        zero |= {"round"} if call == "Beat" else set()
        assert fields | zero == set(SEEN[call].split()), call


def sums_of(running, silo):
    """Digests of the sums that were opened, as the silo's ledger has them."""
    records = (entry.record for entry in entries(ledger_folder(running.federation.state(silo))))
    return {(r.job, r.round): r.sha256 for r in records if isinstance(r, SumOpened)}


def check_sum(calls, given_by, job, round_, folder, cohort=SILOS):
    """What the coordinator opened, and said the digest of, is the sum of what silos gave, and
    nothing but that.

    The digest, in hex.
    """
    place, published = (job.name, round_), JobPlan(job).round(round_).published
    spec = spec_of(calls[cohort[0]], place)
    assert spec.cohort == tuple(sorted(cohort))
    accumulator = Accumulator(readable(spec))
    for silo in cohort:
        accumulator.add(unmasked(spec, silo, given_by[place, silo]))
    tensors, words = {}, {}
    opened = accumulator.open((), spec.cohort)
    numbers = list(accumulator.numbers())
    for index, ((part, _), own, each) in enumerate(
        zip(given_by[place, cohort[0]], spec.groups, opened, strict=True)
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
    store = JobStore(folder / place[0], lambda _: (), {})
    header = {SURVIVORS: json.dumps(list(spec.cohort)), WORDS: json.dumps(words, sort_keys=True)}
    store.write(opened_sum(round_), tensors, header)
    digest = hashlib.sha256(store.sum_file(round_).read_bytes()).digest()
    (same,) = {told(calls[silo], "result")[place].sha256 for silo in cohort}
    # the digests of rows' words are in it, too
    padded = any(is_row(own) and any(own.counts) for own in spec.groups)
    assert padded or same == digest
    return same.hex()


# What it may not see.


def chi_square(data):
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return ((counts - expected) ** 2 / expected).sum()


def related(a, b):
    """How far two rows of numbers are from unrelated, in standard deviations of the correlation."""
    return abs(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]) * np.sqrt(a.size)


def check_words(calls, given_by, silo):
    """Masked words look like random ones, alone, beside what they hide, and beside those of other
    rounds.
    """
    crossed = uploads(calls)
    assert len(crossed) == ROUNDS * len(METHODS)
    for place, payload in crossed.items():
        spec = spec_of(calls, place)
        clear = b"".join(unmasked(spec, silo, given_by[place, silo]))
        assert len(clear) == len(payload) > 2000
        assert chi_square(payload) < LARGEST_CHI_SQUARE < chi_square(clear)
        for masked, plain in zip(words_of(spec, payload), words_of(spec, clear), strict=True):
            assert masked.size < 100 or related(masked, plain) < LIKELY
    for first, second in itertools.combinations(crossed, 2):
        if first[0] == second[0] and len(crossed[first]) == len(crossed[second]):
            spec = spec_of(calls, first)
            pairs = list(
                zip(words_of(spec, crossed[first]), words_of(spec, crossed[second]), strict=True)
            )
            assert all(a.size < 100 or related(a, b) < LIKELY for a, b in pairs)
            assert chi_square(b"".join((a - b).tobytes() for a, b in pairs)) < LARGEST_CHI_SQUARE


def check_plaintext(running, calls, given_by, silo):
    """No piece of a tensor, no weight and no count stands in any message, in whatever number
    format.
    """
    seen = b"\0".join(data for call in calls for data in call.sent)
    looked = 0
    for (place, of), parts in given_by.items():
        if of != silo:
            continue
        pieces = unmasked(spec_of(calls, place), silo, parts)
        for value in itertools.chain.from_iterable(tensors.values() for _, tensors in parts):
            pieces += [
                tensor_bytes(value.to(dtype))
                for dtype in (torch.float32, torch.float64, torch.int64)
            ]
        for window in itertools.chain.from_iterable(map(windows, pieces)):
            looked += 1
            assert window not in seen, (place, silo, window)
        if place[1] == ROUNDS - 1:  # it is what the silo really had
            folder = running.federation.state(silo) / "jobs" / place[0]
            had = safetensors.torch.load_file(folder / f"outbox-{ROUNDS}.safetensors")
            wanted = {
                f"{part.name}/{name}": value
                for part, tensors in parts
                for name, value in tensors.items()
            }
            assert had.keys() == wanted.keys()
            assert all(torch.equal(had[name], value) for name, value in wanted.items())
    assert looked > 1000


def windows(piece):
    """Some places of a piece that say more than zeros do; a single number is one."""
    if len(piece) == 8 and any(piece):
        yield piece
    for at in range(0, len(piece) - WINDOW + 1, max(WINDOW, len(piece) // 40)):
        if len(set(piece[at : at + WINDOW])) > 3:
            yield piece[at : at + WINDOW]

"""What the coordinator sees of each method that can be blind: the parts of the table, and of these
no value.
"""

import itertools
import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federation import test_blind_mixes_recorded as mixes
from federation import test_blind_recorded
from federation.test_blind_recorded import (
    LARGEST_CHI_SQUARE,
    LIKELY,
    Kept,
    chi_square,
    paths,
    related,
    tapped,
    told,
)
from support.key_watch import keys_watched

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.count_sketch import count_sketch
from staddle.algorithms.exchange.parts import Gram, Mix, Sum
from staddle.algorithms.partition.draw import dirichlet
from staddle.files.documents import parse_canonical
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import FETCH, UPLOAD
from staddle.proto.wire import tensor_bytes
from staddle.security.arithmetic.fixedpoint import quantise
from staddle.security.blind.directed_mix import is_row
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.rotated_sketch import hidden
from staddle.security.identity import roster as rosters
from staddle.security.secagg.masked_sum import Accumulator
from staddle.security.secagg.spec import RoundSpec

SILOS = ("north", "east", "south", "west", "middle")
DOCS = Path(__file__).parents[2] / "docs" / "wire.md"
TITLE = "## What the coordinator sees of each method"
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
CONVOLVING = {"model": "convnet-digits"}
MODES = {  # name of the job: its row of the table, its method, and what its document says
    "local": ("local", "local", {}),
    "avg": ("fedavg", "fedavg", {}),
    "per": ("fedper", "fedper", {}),
    "ssa": ("fedssa", "fedssa", {"options": {"t_stable": 3}}),
    "ssa-stale": ("fedssa stale_inclusive", "fedssa", {"options": {"t_stable": 3,
    "stale_inclusive": True}}),
    "ppfl": ("ppfl", "ppfl", {"options": {"models": 2}}),
    "aims": ("fedaims balanced", "fedaims", CONVOLVING),
    "aims-grouped": ("fedaims algorithm2", "fedaims", {"options": {"sampling": "algorithm2"},
    **CONVOLVING}),
    "sim": ("pfedsim mean", "pfedsim", {"options": {"rho": 0.34}, "rounds": 3}),
    "sim-classes": ("pfedsim per_class", "pfedsim", {"options": {"rho": 0.0,
    "similarity": "per_class"}}),
    "sim-directed": ("pfedsim directed", "pfedsim", {"options": {"rho": 0.34}, "rounds": 3}),
    "sup": ("fedsimsup samples", "fedsimsup", {"options": {"similarity": "samples"}, "rounds": 3}),
    "sup-labels": ("fedsimsup labels", "fedsimsup", {"options": {"similarity": "labels"},
    "rounds": 3}),
    "sup-directed": ("fedsimsup directed", "fedsimsup", {"rounds": 3}),
}  # fmt: skip
RECORDS = 120  # of a silo: it is not to learn much


class Place(NamedTuple):
    """Where something crossed; ``part`` is empty for the words of the round's sum."""

    job: str
    round: int
    silo: str
    part: str = ""


class World:
    """What the tap has of all jobs, and what each silo had: ``contributions`` and ``clear`` by
    place.
    """

    def __init__(self, running, calls, keys):
        self.running, self.calls, self.keys = running, calls, keys
        self.jobs = {job.name: job for job in running.jobs}
        self.roster = running.roster
        self.crossed, self.tensors = uploads(calls)
        self.specs = {
            (*place, silo): parse_canonical(spec.document, RoundSpec, "told")
            for silo in SILOS
            for place, spec in told(calls[silo], "spec").items()
        }
        self.contributions = defaultdict(list)  # (part, tensors), by place of a sum
        for job in running.jobs:
            self._simulate(job)

    def _simulate(self, job):
        plan, key = JobPlan(job), self.keys.get(job.name, bytes(32))
        kept = Kept(plan.bounds, job.security.counts, plan.terms, key, job.digest)
        simulate(job, self.running.shards(), exchanges=kept)
        gave = iter(kept.contributions)
        for round_ in range(job.length):
            for silo, _ in itertools.product(job.cohort(round_), job.up(round_)):
                self.contributions[Place(job.name, round_, silo)].append(next(gave))
        assert next(gave, None) is None

    def parts(self, place, exchange):
        return [
            (part, tensors)
            for part, tensors in self.contributions[place]
            if isinstance(part.exchange, exchange)
        ]

    def summed(self, place):
        """What a silo gave for each group of a sum, one for each silo that gets a row of it
        included.
        """
        spec = self.specs[place.job, place.round, place.silo]
        rows = self.parts(place, Mix) * sum(map(is_row, spec.groups))
        return [*self.parts(place, Sum), *rows]

    def unmasked(self, place):
        """Words of the sum as they would be without masks."""
        spec = self.specs[place.job, place.round, place.silo]
        return b"".join(test_blind_recorded.unmasked(spec, place.silo, self.summed(place)))

    def unpadded(self, place, part, tensors):
        """Words of a Mix without a pad."""
        line = JobPlan(self.jobs[place.job]).line(
            part, self.roster.federation, rosters.digest(self.roster)
        )
        words = np.empty(line.group.elements, "<u8")
        flat = torch.cat([tensors[spec.name].double().reshape(-1) for spec in part.tensors]).numpy()
        quantise(line.group, flat, 1.0, words)
        return words.tobytes()

    @cached_property
    def clear(self):
        """By place, what masked and padded words hide."""
        found = {}
        for place in list(self.contributions):
            found[place] = self.unmasked(place)
            for part, tensors in self.parts(place, Mix):
                if part.exchange.directed:
                    continue
                found[place._replace(part=part.name)] = self.unpadded(place, part, tensors)
        return found

    def vectors(self):
        """By place, vectors as they were before they were rotated, [rows, d] float64."""
        for place in list(self.contributions):
            for part, tensors in self.parts(place, Gram):
                (spec,) = part.tensors
                yield place._replace(part=part.name), part, tensors[spec.name].double().numpy()


def uploads(calls):
    """Bytes of each upload, and the names of its tensors, by place."""
    crossed, tensors = {}, {}
    for silo, call in (
        (silo, call) for silo, of in calls.items() for call in of if call.method == UPLOAD
    ):
        frames = [tensor.Frame.FromString(data) for data in call.sent]
        manifest = frames[0].manifest
        place = Place(manifest.job, manifest.round, silo, manifest.part)
        assert place not in crossed
        crossed[place] = b"".join(frame.chunk for frame in frames)
        tensors[place] = [header.name for header in manifest.tensors]
    return crossed, tensors


def documents(document, shards):
    counts = {silo: len(train) for silo, (train, _) in shards.items()}
    by_class = {
        silo: torch.bincount(train.y, minlength=10).tolist() for silo, (train, _) in shards.items()
    }
    declared = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    declared["counts"] = counts
    security = {
        "sup": declared,
        "sup-labels": {**declared, "class_counts": by_class},
        "sup-directed": {**declared, "class_counts": by_class, "mix": "directed"},
    }
    away = {name: {"participation": 0.8, "security": table} for name, table in security.items()}
    away["sim-directed"] = {"security": {**SECURITY, "mix": "directed"}}
    common = {"rounds": 2, "min_cohort": 3, "security": SECURITY}
    for name, (_, method, changes) in MODES.items():
        yield document(name, SILOS, method, **{**common, **changes, **away.get(name, {})})


def recorded(start, document):
    running = start(*SILOS)
    # none outweighs the others
    parts = dirichlet(digits().y.numpy(), len(SILOS), 3.0, 3, minimum=250)
    running.data = {
        silo: digits().take(part[:RECORDS]) for silo, part in zip(SILOS, parts, strict=True)
    }
    for silo in SILOS:
        running.fix_split(silo)
    shards = running.shards(SILOS)
    for each in documents(document, shards):
        running.job(each)
    with keys_watched(running.federation, SILOS) as seen:
        calls = tapped(running)
    keys = {}
    for (job, _), (kept,) in seen.items():
        assert keys.setdefault(job, kept[32:64]) == kept[32:64]
    return World(running, calls, keys)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not DOCS.exists(), reason="the tests run without docs/ beside them")
def test_the_coordinator_sees_of_each_method_what_the_tables_say_and_no_value(
    start, document, tmp_path
):
    world = recorded(start, document)
    check_table(world)
    check_fields(world.calls)
    check_sums(world, tmp_path)
    check_words(world)
    check_rotated(world)
    check_rows(world)
    for silo in SILOS:
        check_plaintext(world, silo)


# What it sees.


def table():
    """Parts by method and mode, as docs/wire.md has them."""
    text = DOCS.read_text().partition(TITLE)[2].partition("\n## ")[0]
    names = lambda cell: frozenset(re.findall(r"`(.*?)`", cell))
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return {mode.replace("`", ""): tuple(map(names, cells)) for mode, *cells in rows}


def check_table(world):
    found = {}
    for name, (mode, *_) in MODES.items():
        every = [g for (job, *_), spec in world.specs.items() if job == name for g in spec.groups]
        groups = {group.name for group in every if not is_row(group)}
        # in the words of the sum
        rows = {group.name.partition(".")[0] for group in every if is_row(group)}
        parts = {True: set(), False: rows}  # by whether tensors are named
        for place, named in world.tensors.items():
            if place.job == name and place.part:
                parts[bool(named)].add(place.part)
        said = world.jobs[name].security
        declared = {field for field in ("counts", "class_counts") if getattr(said, field)}
        found[mode] = tuple(map(frozenset, (groups, parts[False], parts[True], declared)))
        job = world.jobs[name]
        down = any(JobPlan(job).round(round_).published for round_ in range(job.length))
        assert bool(parts[True] | parts[False] or "holders" in groups or down) == job.keyed
    assert found == table()


def check_fields(calls):
    """The fields of all that silos said are those of the two tables of calls."""
    found, blind = defaultdict(set), dict(test_blind_recorded.SEEN)
    for call in itertools.chain.from_iterable(calls.values()):
        method = call.method.rpartition("/")[2]
        for data in call.sent:
            if call.method == UPLOAD:
                frame = tensor.Frame.FromString(data)
                body = frame.WhichOneof("body")
                name = f"Upload {body}"
                if body == "manifest" and frame.manifest.part:
                    name += ", rotated" if frame.manifest.tensors else ", padded"
                found[name] |= set() if body == "chunk" else set(paths(getattr(frame, body)))
            elif method == "Secure":
                message = secure.SecureUpload.FromString(data)
                fields = {*paths(message), "attempt.attempt"}
                found[f"Secure {message.WhichOneof('body')}"] |= fields
            elif method not in test_blind_recorded.ELSEWHERE:
                request = {**test_blind_recorded.REQUESTS, **mixes.REQUESTS}[method]
                found[method] |= set(paths(request.FromString(data)))
    allowed = {**{call: set(fields.split()) for call, fields in blind.items()}, **mixes.table()}
    allowed["Secure header"].add("header.tags")  # of keyed jobs
    # rounds may be over before the first heartbeat, or all but round 0
    found["Beat"] |= {"session", "job", "round"}
    assert found == allowed


def check_sums(world, folder):
    """It opens the sum over the cohort, of what was summed, and nothing but that."""
    opened = defaultdict(dict)
    rounds = [(job, round_) for job in world.jobs.values() for round_ in range(job.length)]
    for job, round_ in rounds:
        cohort, place = job.cohort(round_), (job.name, round_)
        gave = {(place, silo): world.summed(Place(*place, silo)) for silo in cohort}
        digest = test_blind_recorded.check_sum(world.calls, gave, job, round_, folder, cohort)
        for silo in cohort:
            opened[silo][place] = digest
    assert opened == {silo: test_blind_recorded.sums_of(world.running, silo) for silo in SILOS}


# What it does not see.


@pytest.mark.parametrize("at", range(9))
def test_a_window_is_found_wherever_it_stands(at):
    windows, rest = {bytes(range(n, n + 16)) for n in (1, 40, 80)}, bytes(50) + b"\xff" * 51
    for window in windows:
        assert beginnings(windows, rest[: 40 + at] + window + rest[40 + at :]) == {window[:8]}
    assert beginnings(windows, rest) == set()


def check_words(world):
    """Masked and padded words look like random ones, alone, beside what they hide, and beside one
    another.
    """
    clear = world.clear
    assert clear.keys() == {place for place, named in world.tensors.items() if not named}
    for place, plain in clear.items():
        words = world.crossed[place]
        assert len(words) == len(plain)
        assert chi_square(words) < LARGEST_CHI_SQUARE, place
        assert len(words) < 2000 or chi_square(plain) > LARGEST_CHI_SQUARE, place
        check_unrelated(words, plain, place)
    # two rounds of a silo, or two silos in a round
    for one, other in itertools.combinations(clear, 2):
        same_part = (one.job, one.part) == (other.job, other.part)
        near = same_part and (one.silo == other.silo or one.round == other.round)
        a, b = world.crossed[one], world.crossed[other]
        if near and len(a) == len(b):
            check_unrelated(a, b, (one, other))
            wide = "<u8" if len(a) % 8 == 0 else "<u4"
            difference = (np.frombuffer(a, wide) - np.frombuffer(b, wide)).tobytes()
            assert chi_square(difference) < LARGEST_CHI_SQUARE, (one, other)


def check_unrelated(a, b, where):
    """As signed numbers of 32 bits; where words have 64, each half for itself."""
    first, second = (np.frombuffer(data, "<i4") for data in (a, b))
    for at in (0, 1):
        x, y = first[at::2], second[at::2]
        if x.size >= 100 and x.std() and y.std():
            assert related(x, y) < LIKELY, where


def check_rotated(world):
    """Lengths and inner products of one row in one round are those of the plain vectors.

    All else is unrelated.

    Those of sketches are off as the docs say.
    """
    plain, turned, public, near = {}, {}, {}, {}
    for place, part, vectors in world.vectors():
        (sent,) = part.wire
        left = np.frombuffer(world.crossed[place], "<f4").reshape(sent.shape)
        plan, expected = JobPlan(world.jobs[place.job]), []
        for row in range(len(vectors)):
            key = plan.use(part, place.round, row).key(world.keys[place.job])
            expected.append(hidden(vectors[row : row + 1].copy(), part.sketch, key)[0])
        assert np.array_equal(left, np.array(expected, "<f4")), place
        seed = world.jobs[place.job].seed
        for row, (own, other) in enumerate(zip(vectors, left.astype(np.float64), strict=True)):
            plain[place, row], turned[place, row], public[place, row] = own, other, own
            near[place.job] = 2**-22
            if part.sketch:
                sketch = count_sketch(torch.from_numpy(own.copy()), part.sketch, seed)
                public[place, row] = sketch.numpy()
                near[place.job] = LIKELY * np.sqrt(2 / part.sketch)
    compared = {"aims-grouped", "sim", "sim-classes", "sim-directed"}
    assert {place.job for place, _ in plain} == compared
    differs = False
    for one, other in itertools.combinations_with_replacement(plain, 2):
        (a, row), (b, column) = one, other
        if a.job != b.job or plain[one].size != plain[other].size:
            continue
        before, after = plain[one] @ plain[other], turned[one] @ turned[other]
        scale = np.linalg.norm(plain[one]) * np.linalg.norm(plain[other])
        if a.round == b.round and row == column:
            assert abs(before - after) <= near[a.job] * scale, (one, other)
        else:  # other rotations: cosines as of directions at random
            assert abs(after) * np.sqrt(turned[one].size) < LIKELY * scale, (one, other)
            differs |= abs(before) * np.sqrt(plain[one].size) > LIKELY * scale
    assert differs  # where the plain ones are alike, and so would show
    for where, own in public.items():
        assert abs(own @ turned[where]) * np.sqrt(own.size) < LIKELY * (own @ own), where


def check_rows(world):
    """What the coordinator has of a directed row, once the sum is open, is unrelated to it and to
    all that is in it.
    """
    opened = {}
    for reader, call in (
        (silo, call) for silo in SILOS for call in world.calls[silo] if call.method == FETCH
    ):
        frames = [tensor.Frame.FromString(data) for data in call.received]
        manifest, payload = frames[0].manifest, b"".join(frame.chunk for frame in frames)
        for at, row in enumerate(
            manifest.rows if manifest.job in ("sup-directed", "sim-directed") else ()
        ):
            spec, size = (
                parse_canonical(row.document, RoundSpec, "row"),
                len(payload) // len(manifest.rows),
            )
            opened[spec.job, spec.round, reader] = spec, payload[at * size : (at + 1) * size]
    away = {(round_, silo) for job, round_, silo in opened if job == "sup-directed"}
    # of each round that trained, for who was away
    assert len(away) == len({round_ for round_, _ in away}) == 3
    assert opened.keys() - {("sup-directed", *place) for place in away} == {
        ("sim-directed", 2, s) for s in SILOS
    }
    for (job, round_, silo), (spec, words) in opened.items():
        (index,) = [at for at, group in enumerate(spec.groups) if group.reader == silo]
        accumulator = Accumulator(test_blind_recorded.readable(spec))
        for other in spec.cohort:
            accumulator.add(
                test_blind_recorded.unmasked(spec, other, world.summed(Place(job, round_, other)))
            )
        accumulator.open((), spec.cohort)
        plain = b"".join(each.tobytes() for at, each in accumulator.numbers() if at == index)
        assert len(plain) == len(words) > 2000
        assert chi_square(words) < LARGEST_CHI_SQUARE < chi_square(plain)
        check_unrelated(words, plain, (job, round_, silo))


def check_plaintext(world, silo):
    """No piece of a tensor, no weight and no count stands in any message, in whatever number
    format.
    """
    seen = b"\0".join(data for call in world.calls[silo] for data in call.sent)
    pieces = [data for place, data in world.clear.items() if place.silo == silo]
    for place, parts in world.contributions.items():
        if place.silo == silo:
            for value in itertools.chain.from_iterable(tensors.values() for _, tensors in parts):
                pieces += [
                    tensor_bytes(value.to(dtype))
                    for dtype in (torch.float32, torch.float64, torch.int64)
                ]
    looked = {
        bytes(window)
        for window in itertools.chain.from_iterable(map(test_blind_recorded.windows, pieces))
    }
    assert len(looked) > 5000
    near = beginnings(looked, seen)
    assert [window for window in looked if window[:8] in near and window in seen] == []


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

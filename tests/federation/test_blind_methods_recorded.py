"""Each method that can be blind, with real processes and a tap: silos get what the oracle computes,
and the coordinator sees the parts of the table, and of these no value.
"""

import itertools
import json
import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from federation.conftest import running, shards, small_document
from federation.test_blind_recorded import (
    ELSEWHERE,
    LARGEST_CHI_SQUARE,
    LEAST_COUNTED,
    LIKELY,
    Kept,
    beginnings,
    check_sum,
    chi_square,
    paths,
    readable,
    related,
    sums_of,
    tapped,
    told,
    unmasked,
    windows,
)
from support.key_watch import keys_watched

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.count_sketch import count_sketch
from staddle.algorithms.exchange.parts import Gram, Mix, Sum
from staddle.algorithms.exchange.plain import PLAIN
from staddle.files.documents import parse_canonical
from staddle.proto import federation_pb2 as pb
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
from staddle.silo.blind.group_keys import ENDED
from staddle.silo.ingress.keyed_job import OWN
from staddle.silo.ingress.mix_rows import expected_rows

FOUR = ("north", "east", "south", "west")  # of jobs in whose rounds everybody is
SILOS = (*FOUR, "middle")
DOCS = Path(__file__).parents[2] / "docs" / "wire.md"
TITLE = "## What the coordinator sees of each method"
BARE_TITLE = "## What the coordinator sees of a blind round"
KEYED_TITLE = "## What the coordinator sees of a part that is mixed or compared blind"
TENSOR_FIELDS = ("part", "kind", "name", "dtype", "shape", "size")
REQUESTS = {
    "Fetch": pb.FetchRequest,
    "Beat": pb.BeatRequest,
    "SecureNext": secure.SecurePoll,
    "Contribute": secure.Contributed,
    "GroupKey": secure.KeyPoll,
    "Padded": secure.PaddedWordUpload,
}
pytestmark = pytest.mark.timeout(600)
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
CONVOLVING = {"model": "convnet-digits"}
MODES = {  # name of the job: its row of the table, its method, and what its document says
    "local": ("local", "local", {}),
    "avg": ("fedavg", "fedavg", {"model": "cnn-digits"}),
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
    "similarity": "per_class"}, "rounds": 3}),
    "sim-directed": ("pfedsim directed", "pfedsim", {"options": {"rho": 0.34}, "rounds": 3}),
    "sup": ("fedsimsup samples", "fedsimsup", {"options": {"similarity": "samples",
    "supervisor": "cnn"}}),
    "sup-labels": ("fedsimsup labels", "fedsimsup", {"options": {"similarity": "labels",
    "supervisor": "cnn"}}),
    "sup-directed": ("fedsimsup directed", "fedsimsup", {"options": {"supervisor": "cnn"},
    "rounds": 3}),
}  # fmt: skip
BARE = {  # jobs without a key, by name: a method and its options
    "avg-bare": ("fedavg", {}),
    "ppfl-bare": ("ppfl", {"models": 2, "lam": 0.0}),
}
UNREAD = "sim-members"  # it has rows that are made for nobody, which no sum opens


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
        came = {silo: told(calls[silo]) for silo in SILOS}
        self.specs = {
            (*place, silo): parse_canonical(spec.document, RoundSpec, "told")
            for silo in SILOS
            for place, spec in came[silo]["spec"].items()
        }
        self.results = {silo: came[silo]["result"] for silo in SILOS}
        self.shards = running.shards()
        self.contributions = defaultdict(list)  # (part, tensors), by place of a sum
        self.expected = {job.name: self._simulate(job) for job in running.jobs}

    def _simulate(self, job):
        plan, key = JobPlan(job), self.keys.get(job.name, bytes(32))
        kept = Kept(plan.bounds, job.security.counts, plan.terms, key, job.digest)
        expected = simulate(job, self.shards_of(job), exchanges=kept)
        gave = iter(kept.contributions)
        for round_ in range(job.length):
            for silo, _ in itertools.product(job.cohort(round_), job.up(round_)):
                self.contributions[Place(job.name, round_, silo)].append(next(gave))
        assert next(gave, None) is None
        return expected

    def shards_of(self, job):
        return {silo: self.shards[silo] for silo in job.silos}

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
        return b"".join(unmasked(spec, place.silo, self.summed(place)))

    def unpadded(self, place, part, tensors):
        """Words of a Mix without a pad."""
        line = JobPlan(self.jobs[place.job]).line(
            part,
            self.roster.federation,
            rosters.members_digest(self.roster, self.jobs[place.job].silos),
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


def documents(shards):
    counts = {silo: len(train) for silo, (train, _) in shards.items()}
    by_class = {
        silo: train.y.bincount(minlength=10).tolist() for silo, (train, _) in shards.items()
    }
    declared = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    declared["counts"] = counts
    directed = {**declared, "mix": "directed"}
    away = {
        "sup": declared,
        "sup-labels": {**declared, "class_counts": by_class},
        "sup-directed": {**directed, "class_counts": by_class},
        "sim-in-part": declared,
        UNREAD: directed,
        "tagged": {**declared, "tags": True},
    }
    security = {**away, "sim-directed": {**SECURITY, "mix": "directed"}}
    security |= {name: {**SECURITY, "tags": False} for name in BARE}
    made = {name: (method, changes) for name, (_, method, changes) in MODES.items()}
    made |= {name: (method, {"options": options}) for name, (method, options) in BARE.items()}
    made["sim-in-part"] = "pfedsim", {"options": {"rho": 0.34}, "rounds": 3}
    made[UNREAD] = "pfedsim", {"options": {"rho": 0.25}, "rounds": 4}
    made["tagged"] = "fedavg", {"rounds": 2}
    for name, (method, changes) in made.items():
        fields = {"rounds": 2, "min_cohort": 3, **changes}
        fields["participation"] = 0.8 if name in away else 1.0
        silos = SILOS if name in away else FOUR
        yield small_document(name, silos, method, security=security.get(name, SECURITY), **fields)


@pytest.fixture(scope="module")
def world(tmp_path_factory, fork_server):
    """Jobs of all modes, done with a tap that holds the keys of both sides."""
    with running(tmp_path_factory.mktemp("recorded"), SILOS, fork_server.launch) as made:
        # none outweighs the others, and none has to learn much
        for silo, shard in shards(SILOS, 3.0, 250).items():
            made.data[silo] = shard.take(range(len(shard) // 4))
        for silo in SILOS:
            made.fix_split(silo)
        for each in documents(made.shards()):
            made.job(each)

        def no_key(job):
            """Whoever seizes a silo now finds no key of the job."""
            for silo in job.silos:
                left = [path.name for path in made.job_folder(job, silo).glob("*group*")]
                assert left == [ENDED] * job.keyed, (job.name, silo)

        watched = keys_watched(made.federation, SILOS), keys_watched(made.federation, SILOS, OWN)
        with watched[0] as seen, watched[1] as owned:
            calls = tapped(made, then=no_key)
        keys = {}
        for (job, _), (kept,) in seen.items():
            assert keys.setdefault(job, kept[32:64]) == kept[32:64]
        found = World(made, calls, keys)
        found.owned, found.folder = owned, tmp_path_factory.mktemp("opened")
        yield found


# What silos get.


def silos_get_what_the_oracle_computes(world):
    running = world.running
    for job in running.jobs:
        running.check_models(job, world.expected[job.name])
        running.check_reports(job, world.expected[job.name])
        closed = running.rows(f"SELECT round, members FROM rounds WHERE job = '{job.name}'")
        members = {round_: set(json.loads(names)) for round_, names in closed}
        assert members == {round_: set(job.cohort(round_)) for round_ in range(job.length)}
    job = world.jobs["sim"]
    alone = simulate(job, world.shards_of(job), exchanges=PLAIN)
    for silo in FOUR:  # nearly what it is in the clear
        found = running.model(job, silo).parts["extractor"]
        for name, value in alone.states[silo].parts["extractor"].items():
            assert torch.allclose(found[name], value, atol=1e-2), name


def rows_are_opened_and_the_newest_is_remembered(world):
    for job in world.running.jobs:
        found = set()
        for silo in job.silos:
            for path in world.running.job_folder(job, silo).glob("mix-*.[rd]*.json"):
                kept = json.loads(path.read_bytes())
                if kept.get("memory", {}).get("last") or kept.get("delivered"):
                    found.add(silo)
        rows = any(expected_rows(JobPlan(job).round(round_)) for round_ in range(job.length))
        assert found or not rows, f"{job.name}: no silo had a row"
    last = world.jobs["sim-directed"].length - 1
    assert newest(world, "sim-directed") == {last}  # each in each round
    assert newest(world, UNREAD) - {-1}


def newest(world, name):
    """The newest round of which each silo opened a row; -1 where it opened none."""
    job = world.jobs[name]
    folders = [world.running.job_folder(job, silo) for silo in job.silos]
    paths = [folder / "mix-extractor.directed.json" for folder in folders]
    return {json.loads(path.read_bytes())["newest"] for path in paths}


def each_upload_has_a_prekey_and_the_first_goes_before_the_last(world):
    """Of three rounds in which everybody gave."""
    for silo in FOUR:
        kept = [
            {int.from_bytes(file[at : at + 8]) for at in range(32, len(file), 40)}
            for file in world.owned["sim-classes", silo]
        ]
        assert {generation for each in kept for generation in each} == {0, 1, 2, 3}
        assert {1, 2, 3} in kept


def sums_come_down_in_words_in_every_round_that_has_them(world):
    seen = [line for line in world.running.events("coordinator", "delivered") if "sums" in line]
    for job in world.running.jobs:
        told = {line["round"] for line in seen if line["job"] == job.name}
        due = {round_ for round_ in range(job.length + 1) if JobPlan(job).round(round_).sums_down}
        if job.method_name == "pfedsim":  # afterwards only to silos that have given no extractor
            due = {round_ for round_ in due if job.up(round_ - 1)[0].name == "model"}
            assert told >= due, job.name
        else:
            assert told == due, job.name
        assert job.name != "tagged" or told == {1, 2}


def silos_tell_once_what_they_withhold(world):
    """Their own logs, in counted jobs, and never in others."""
    for job, silo in itertools.product(world.running.jobs, SILOS):
        events = world.running.events(silo, "job.withheld")
        told = [event for event in events if event["job"] == job.name]
        assert len(told) == (job.counted and silo in job.silos), job.name
        for each in told:
            assert each["fewest_holders"] == job.fewest_holders
            train, _ = world.shards[silo]
            assert set(each["classes_withheld"]) <= set(train.y.tolist())


def ledgers_say_what_left_and_for_whom(world):
    """Nothing left in the clear, nobody broke a rule, and each form has its readers."""
    readers = {"masked": ["sum"], "padded": ["mix"], "rotated": ["gram"]}
    world.running.check_ledgers()
    for silo in SILOS:
        intents = world.running.records(silo, "egress.intent")
        assert {record["form"] for record in intents} == set(readers)
        for record in intents:
            job, round_ = world.jobs[record["job"]], record["round"]
            rows = []
            if job.security.mix == "directed" and round_ and job.method_name != "pfedsim":
                rows = [*job.away(round_)]
            if job.security.mix != "directed" or job.method_name != "pfedsim":
                assert record["readers"] == [*readers[record["form"]], *rows], record
            if record["form"] == "masked":
                assert record["secagg"]["members"] == sorted(job.cohort(round_))
        for record in world.running.records(silo, "secagg.sum"):
            cohort = world.jobs[record["job"]].cohort(record["round"])
            assert record["survivors"] == sorted(cohort)
        assert {record["blame"] for record in world.running.records(silo, "secagg.end")} <= {""}


def silos_had_what_the_simulation_gives(world):
    for name, silo in itertools.product(BARE, FOUR):
        job = world.jobs[name]
        path = world.running.job_folder(job, silo) / f"outbox-{job.length}.safetensors"
        had = safetensors.torch.load_file(path)
        gave = world.contributions[Place(name, job.length - 1, silo)]
        wanted = {f"{part.name}/{each}": value for part, of in gave for each, value in of.items()}
        assert had.keys() == wanted.keys()
        assert all(torch.equal(had[each], value) for each, value in wanted.items()), (name, silo)


# What it sees.


def table():
    """Parts by method and mode, as docs/wire.md has them."""
    text = DOCS.read_text().partition(TITLE)[2].partition("\n## ")[0]
    names = lambda cell: frozenset(re.findall(r"`(.*?)`", cell))
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return {mode.replace("`", ""): tuple(map(names, cells)) for mode, *cells in rows}


def the_coordinator_sees_the_parts_of_the_table(world):
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


def said(calls):
    """Job, call and fields of each message that silos sent in rounds."""
    for call in itertools.chain.from_iterable(calls.values()):
        method = call.method.rpartition("/")[2]
        for data in call.sent:
            if call.method == UPLOAD:
                frame = tensor.Frame.FromString(data)
                body = frame.WhichOneof("body")
                name = f"Upload {body}"
                if body == "manifest":
                    job = frame.manifest.job
                    if frame.manifest.part:
                        name += ", rotated" if frame.manifest.tensors else ", padded"
                yield job, name, () if body == "chunk" else paths(getattr(frame, body))
            elif method == "Secure":
                message = secure.SecureUpload.FromString(data)
                name = f"Secure {message.WhichOneof('body')}"
                yield message.attempt.job, name, (*paths(message), "attempt.attempt")
            elif method not in ELSEWHERE:
                message = REQUESTS[method].FromString(data)
                yield message.job, method, paths(message)


def fields_of(title):
    """Fields by call, as a table of docs/wire.md has them."""
    text = DOCS.read_text().partition(title)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*?) \| (.*?) \|$", text, re.MULTILINE)
    return {call.replace("`", ""): set(re.findall(r"`(.*?)`", fields)) for call, fields in rows}


def the_coordinator_sees_the_fields_of_the_tables(world):
    """Of jobs without a key, those of the first table alone."""
    bare, every = defaultdict(set), defaultdict(set)
    for job, name, fields in said(world.calls):
        for found in (bare, every) if job in BARE else (every,):
            found[name] |= set(fields)
    allowed = fields_of(BARE_TITLE)
    assert allowed["Upload chunk"] == {"bytes"}
    allowed["Upload chunk"] = set()
    for found in (bare, every):
        # rounds may be over before the first heartbeat, or all but round 0
        found["Beat"] |= {"session", "job", "round"}
    assert bare == allowed
    allowed |= fields_of(KEYED_TITLE)
    allowed["Secure header"].add("header.tags")
    of_tensors = {f"tensors.{name}" for name in TENSOR_FIELDS}
    allowed["Upload manifest, rotated"] = allowed["Upload manifest, padded"] | of_tensors
    assert every == allowed


def the_coordinator_opens_the_sum_over_the_cohort_and_nothing_but_that(world):
    told = defaultdict(dict)
    jobs = [job for job in world.jobs.values() if job.name != UNREAD]
    rounds = [(job, round_) for job in jobs for round_ in range(job.length)]
    for job, round_ in rounds:
        place, cohort = (job.name, round_), job.cohort(round_)
        (same,) = {world.results[silo][place].sha256 for silo in cohort}
        gave = {silo: world.summed(Place(*place, silo)) for silo in cohort}
        check_sum(world.specs[*place, cohort[0]], same, gave, job, world.folder)
        for silo in cohort:
            told[silo][place] = same.hex()
    for silo in SILOS:
        opened = sums_of(world.running, silo)
        assert told[silo] == {place: opened[place] for place in opened if place[0] != UNREAD}


# What it does not see.


def words_look_like_random_ones(world):
    """Masked and padded words look like random ones: alone, next to what they hide, and next to
    one another.
    """
    clear = world.clear
    assert clear.keys() == {place for place, named in world.tensors.items() if not named}
    long_enough = set()  # jobs
    for place, plain in clear.items():
        words = world.crossed[place]
        assert len(words) == len(plain)
        if len(words) >= LEAST_COUNTED:
            long_enough.add(place.job)
            assert chi_square(words) < LARGEST_CHI_SQUARE < chi_square(plain), place
        check_unrelated(words, plain, place)
    assert {place.job for place in clear} - long_enough == {"local"}  # it gives its metrics alone
    # two rounds of a silo, or two silos in a round
    for one, other in itertools.combinations(clear, 2):
        same_part = (one.job, one.part) == (other.job, other.part)
        near = same_part and (one.silo == other.silo or one.round == other.round)
        a, b = world.crossed[one], world.crossed[other]
        if near and len(a) == len(b):
            check_unrelated(a, b, (one, other))
            wide = "<u8" if len(a) % 8 == 0 else "<u4"
            difference = (np.frombuffer(a, wide) - np.frombuffer(b, wide)).tobytes()
            if len(a) >= LEAST_COUNTED:
                assert chi_square(difference) < LARGEST_CHI_SQUARE, (one, other)


def check_unrelated(a, b, where):
    """As signed numbers of 32 bits; where words have 64, each half for itself."""
    first, second = (np.frombuffer(data, "<i4") for data in (a, b))
    for at in (0, 1):
        x, y = first[at::2], second[at::2]
        if x.size >= 100 and x.std() and y.std():
            assert related(x, y) < LIKELY, where


def rotated_vectors_are_unrelated_but_for_their_products(world):
    """Lengths and inner products of one row in one round are those of the plain vectors.

    All else is unrelated.

    Those of sketches are off as the docs say.
    """
    plain, turned, public, near, same = {}, {}, {}, {}, defaultdict(list)
    for place, part, vectors in world.vectors():
        left = np.frombuffer(world.crossed[place], "<f4").reshape(part.wire[0].shape)
        job = world.jobs[place.job]
        for row, (own, other) in enumerate(zip(vectors, left, strict=True)):
            same[job.name, part.name, place.round, row].append((own, other, part))
            plain[place, row], turned[place, row] = own, other.astype(np.float64)
            public[place, row], near[place.job] = own, 2**-22
            if part.sketch:
                sketch = count_sketch(torch.from_numpy(own.copy()), part.sketch, job.seed)
                public[place, row] = sketch.numpy()
                near[place.job] = LIKELY * np.sqrt(2 / part.sketch)
    for (job, name, *use), found in same.items():
        vectors, left, (part, *_) = zip(*found, strict=True)
        key = JobPlan(world.jobs[job]).use(part, *use).key(world.keys[job])
        expected = hidden(np.stack(vectors), part.sketch, key).astype("<f4")
        assert np.array_equal(np.stack(left), expected), (job, name, use)
    compared = {"aims-grouped", *(name for name in world.jobs if name.startswith("sim"))}
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


def an_opened_row_is_unrelated_to_what_is_in_it(world):
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
        ("sim-directed", 2, s) for s in FOUR
    }
    for (job, round_, silo), (spec, words) in opened.items():
        (index,) = [at for at, group in enumerate(spec.groups) if group.reader == silo]
        accumulator = Accumulator(readable(spec))
        for other in spec.cohort:
            accumulator.add(unmasked(spec, other, world.summed(Place(job, round_, other))))
        accumulator.open((), spec.cohort)
        plain = b"".join(each.tobytes() for at, each in accumulator.numbers() if at == index)
        assert len(plain) == len(words) > 2000
        assert chi_square(words) < LARGEST_CHI_SQUARE < chi_square(plain)
        check_unrelated(words, plain, (job, round_, silo))


def no_value_stands_in_any_message(world):
    for silo in SILOS:
        no_value_stands_in_any_message_of(world, silo)


def no_value_stands_in_any_message_of(world, silo):
    """No piece of a tensor, no weight and no count, in whatever number format."""
    seen = b"\0".join(data for call in world.calls[silo] for data in call.sent)
    pieces = [data for place, data in world.clear.items() if place.silo == silo]
    for place, parts in world.contributions.items():
        if place.silo == silo:
            for value in itertools.chain.from_iterable(tensors.values() for _, tensors in parts):
                pieces += [
                    tensor_bytes(value.to(dtype))
                    for dtype in (torch.float32, torch.float64, torch.int64)
                ]
    looked = {bytes(window) for window in itertools.chain.from_iterable(map(windows, pieces))}
    assert len(looked) > (5000 if silo in FOUR else 2500), len(looked)
    near = beginnings(looked, seen)
    assert [window for window in looked if window[:8] in near and window in seen] == []


CHECKS = (
    silos_get_what_the_oracle_computes,
    rows_are_opened_and_the_newest_is_remembered,
    each_upload_has_a_prekey_and_the_first_goes_before_the_last,
    sums_come_down_in_words_in_every_round_that_has_them,
    silos_tell_once_what_they_withhold,
    ledgers_say_what_left_and_for_whom,
    silos_had_what_the_simulation_gives,
    the_coordinator_opens_the_sum_over_the_cohort_and_nothing_but_that,
    words_look_like_random_ones,
    rotated_vectors_are_unrelated_but_for_their_products,
    an_opened_row_is_unrelated_to_what_is_in_it,
    no_value_stands_in_any_message,
)
PAGE_CHECKS = (
    the_coordinator_sees_the_parts_of_the_table,
    the_coordinator_sees_the_fields_of_the_tables,
)


def test_a_tap_finds_what_the_pages_say_and_no_more(world, subtests):
    """One test: processes that shared its parts would each run all jobs, for a minute."""
    for check in (*CHECKS, *(PAGE_CHECKS if DOCS.exists() else ())):
        with subtests.test(check.__name__):
            check(world)

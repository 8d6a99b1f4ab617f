"""Sums that silos alone read, with real processes: a coordinator that keeps all it ever had reads
no model, no mean.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from federation.test_blind_methods_recorded import MODES
from federation.test_blind_recorded import LIKELY, beginnings, related, tapped, windows
from support.key_watch import keys_watched
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Sum
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.commands.main import app
from staddle.errors import LocalError, RefusedError
from staddle.files.documents import parse_canonical
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import FETCH
from staddle.proto.convert.open_sum import sums_from_wire
from staddle.security.blind.open_sum import open_group
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised
from staddle.security.secagg.masked_sum import opened_group
from staddle.security.secagg.spec import RoundSpec

SILOS = ("north", "east", "south", "west")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
JOBS = {  # method, options, how sums come down, and which of them do
    "read": ("fedavg", {}, {"tags": True}, {"model"}),
    "avg": ("fedavg", {}, {"audience": "silos"}, {"model"}),
    "ppfl": (
        "ppfl",
        {"models": 2, "lam": 0.5},
        {"audience": "silos"},
        {"holders", "model", "coupling"},
    ),
}  # each of a seed of its own: no sum of one is that of another
QUIET = ("avg", "ppfl")
DOCS = Path(__file__).parents[2] / "docs" / "wire.md"


class Watched(Quantised):
    """The exchanges of the oracle, which keep each sum but that of the metrics: part and opened
    sum, in turn.
    """

    def opened(self, part, members, read):
        spec, opened = super().opened(part, members, read)
        if part != RIGHT:
            self.sums.append((part, opened))
        return spec, opened


def oracle(running, job):
    """What each silo should have, and the sums by round and part."""
    shards = running.shards(SILOS)
    exchanges = Watched(JobPlan(job).bounds)
    exchanges.sums = []
    expected = simulate(job, shards, exchanges=exchanges)
    made = iter(exchanges.sums)
    sums = {
        (round_, part.name): next(made)[1]
        for round_ in range(job.length)
        for part in job.up(round_)
        if isinstance(part.exchange, Sum) and part != RIGHT
    }
    assert next(made, None) is None
    return expected, sums


def words_of(opened):
    return np.concatenate([words for _, words in opened.pieces])


def deliveries(calls, job):
    """What the coordinator hands down of sums: (round, part) → claim and words, as it had them when
    they were open.
    """
    found = {}
    for call in (call for call in calls if call.method == FETCH):
        frames = [tensor.Frame.FromString(data) for data in call.received]
        manifest = frames[0].manifest if frames else tensor.Manifest()
        if manifest.job != job.name or not manifest.sums:
            continue
        assert not manifest.tensors
        claims = sums_from_wire("coordinator", manifest.sums, [each.part for each in manifest.sums])
        data, at = b"".join(frame.chunk for frame in frames), 0
        for name, claim in claims.items():
            spec = parse_canonical(claim.document, RoundSpec, "delivered")
            index = [own.name for own in spec.groups].index(name)
            own = spec.groups[index]
            size = own.body * own.ring // 8
            found[spec.round, name] = (
                spec,
                index,
                claim,
                np.frombuffer(data[at : at + size], f"<u{own.ring // 8}"),
            )
            at += size
        assert at == len(data)
    return found


def had(running, calls):
    """All bytes that a coordinator sent, received or has on its disk."""
    folder = running.kept
    crossed = (
        data
        for call in itertools.chain.from_iterable(calls.values())
        for data in (*call.sent, *call.received)
    )
    return b"\0".join(
        (*crossed, *(path.read_bytes() for path in folder.rglob("*") if path.is_file()))
    )


def pieces_of(opened):
    """A sum as it might stand somewhere: its integers, its totals and its means, as numbers of
    either size.
    """
    yield words_of(opened).tobytes()
    for values in (opened.total, opened.mean(np.float64)):
        for dtype in ("<f4", "<f8"):
            yield values.astype(dtype).tobytes()


def places(sums, seen):
    """How many of the windows of these sums stand in what was seen, of how many."""
    looked = {
        bytes(w)
        for opened in sums
        for piece in pieces_of(opened)
        for w in windows(piece)
        if len(w) > 8
    }
    assert len(looked) > 100
    near = beginnings(looked, seen)
    return sum(window[:8] in near and window in seen for window in looked), len(looked)


def check_reads(down, sums, quiet):
    """Naively each sum is what was opened.

    Where silos alone read it, it is noise, also beside the other rounds'.
    """
    assert down.keys() == sums.keys()
    for place, (spec, index, claim, words) in down.items():
        naive = opened_group(spec, index, claim.survivors, [(0, words)])
        if not quiet:
            assert np.array_equal(naive.total, sums[place].total)
            continue
        own = [
            each.view(f"<i{words.itemsize}")[: naive.elements]
            for each in (words, words_of(sums[place]))
        ]
        # words of 32 bits meet by chance, of 14 356 a pair in 20 runs: three more once in 10^14
        by_chance = naive.elements // 2000 + min(3, naive.elements - 1)
        assert np.intersect1d(*own).size <= by_chance
        assert naive.elements < 100 or related(*own) < LIKELY
    for (one, a), (other, b) in itertools.combinations(down.items(), 2):
        if quiet and one[1] == other[1]:
            difference = (a[3] - b[3]).view(f"<i{a[3].itemsize}")
            plain = (words_of(sums[one]) - words_of(sums[other])).view(f"<i{a[3].itemsize}")[
                : difference.size
            ]
            # also where two sums are the same: splits are drawn, and may show no class
            assert np.ptp(difference)
            assert (
                difference.size < 100
                or not np.ptp(plain)
                or related(difference[: plain.size], plain) < LIKELY
            )


def check_key(down, sums, key):
    """Coordinator and one silo together read the sums, and no more than them.

    Without the key nothing is opened.
    """
    for place, (spec, index, claim, words) in down.items():
        assert np.array_equal(
            open_group(spec, index, claim, key, words.copy()).total, sums[place].total
        )
        with pytest.raises(RefusedError):
            open_group(spec, index, claim, bytes(32), words.copy())


def check_ledger(running, silo, rounds):
    """All that left as tensors is masked, and each round was summed over all silos."""
    intents = running.records(silo, "egress.intent")
    assert {record["form"] for record in intents} == {"masked"}
    assert all(record["secagg"]["members"] == sorted(SILOS) for record in intents)
    assert [each["tensors"] for each in running.records(silo, "egress.digest")] == [[]] * rounds
    survivors = [record["survivors"] for record in running.records(silo, "secagg.sum")]
    assert survivors == [sorted(SILOS)] * rounds


@pytest.mark.timeout(300)
def test_sums_that_silos_alone_read(start, document, tmp_path):
    running = start(*SILOS)
    for seed, (name, (method, options, how, _)) in enumerate(JOBS.items()):
        changes = {"seed": seed, "rounds": 2, "min_cohort": 3, "security": {**SECURITY, **how}}
        running.job(document(name, SILOS, method, options=options, **changes))
    for silo in SILOS:
        running.fix_split(silo)
    with keys_watched(running.federation, SILOS) as watched:
        calls = tapped(running)
    seen = had(running, calls)
    for job in running.jobs:
        expected, sums = oracle(running, job)
        running.check_models(job, expected)
        running.check_reports(job, expected)
        quiet, parts = job.name in QUIET, JOBS[job.name][3]
        down = [deliveries(calls[silo], job) for silo in SILOS]
        assert all(told(each) == told(down[0]) for each in down)
        assert {part for _, part in down[0]} == parts
        check_reads(down[0], sums, quiet)
        (key,) = {kept[32:64] for silo in SILOS for kept in watched[job.name, silo]}
        check_key(down[0], sums, key)
        found, looked = places([sums[place] for place in sums if place[1] == "model"], seen)
        assert (found == 0) if quiet else (found > looked / 10), (job.name, found, looked)
        check_results(running, job, parts, quiet, tmp_path)
    running.check_ledgers()
    for silo in SILOS:
        check_ledger(running, silo, sum(job.length for job in running.jobs))
        intents = running.records(silo, "egress.intent")
        readers = {record["job"]: record["readers"] for record in intents}
        assert readers == {"read": ["sum"], "avg": ["silos", "sum"], "ppfl": ["silos", "sum"]}
        for record in (record for record in intents if record["job"] in QUIET):
            (job,) = (job for job in running.jobs if job.name == record["job"])
            given = {part.name for part in job.up(record["round"])} & JOBS[job.name][3]
            own = {(tensor["part"], *tensor["readers"]) for tensor in record["tensors"]}
            assert given
            assert own == {("metrics", "sum"), *((part, "silos") for part in given)}


@pytest.mark.skipif(not DOCS.exists(), reason="the tests run without docs/ beside them")
def test_the_documentation_says_what_is_relayed_of_each_method(document):
    text = (
        DOCS.read_text()
        .partition("## What the coordinator passes on and cannot read")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", text, re.MULTILINE)
    found = {mode.replace("`", ""): frozenset(re.findall(r"`(.*?)`", cell)) for mode, cell in rows}
    relayed, quiet = {}, {"secure_aggregation": "required", "audience": "silos"}
    for name, (mode, method, changes) in MODES.items():
        made = document(name, SILOS, method, **changes)
        job = Job.from_file(
            JobFile.model_validate({**made, "min_cohort": 3, "security": quiet}), "job.toml"
        )
        if method in ("fedsimsup", "local") or mode == "pfedsim per_class":
            with pytest.raises(LocalError):
                job.document()
        else:
            relayed[mode] = job.for_silos
    assert relayed == found


def told(down):
    return {place: (claim, words.tobytes()) for place, (_, _, claim, words) in down.items()}


def check_results(running, job, parts, quiet, folder):
    """The coordinator hands out what it has, and says who has the rest."""
    arguments = [
        "job",
        "results",
        job.name,
        "--out",
        folder / job.name,
        "--config",
        running.federation.coordinator_config,
    ]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    files = {path.stem for path in (folder / job.name).glob("*.safetensors")}
    assert files == (set() if quiet else parts)
    said = (
        f"not among them: {', '.join(sorted(parts))}, which the coordinator passed on and cannot"
        " open; every silo"
    )
    assert (said in result.stderr) == quiet
    assert result.stderr or not quiet

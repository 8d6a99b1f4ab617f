"""Rows for single silos at a coordinator: files of words, and which rounds wait for whom."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from support.directed_rows import AWAY, FIVE, Directed, own_frame
from support.jobs import make_job

from staddle.algorithms.exchange.delivery import Latest, Mail, Post
from staddle.algorithms.exchange.parts import Kind, Part, Sum, TensorSpec
from staddle.algorithms.job.job import Job, JobFile
from staddle.coordinator.blind import directed_rows as d
from staddle.coordinator.blind.unmask import (
    Keeping,
    kept_sum,
    masked_bytes,
    open_sum,
    open_sum_file,
)
from staddle.coordinator.disk_need import room
from staddle.coordinator.storage.store import JobStore
from staddle.errors import LocalError
from staddle.security.blind.open_sum import Claim
from staddle.security.blind.plan import JobPlan, sum_groups
from staddle.security.secagg import coordinator_events as c

SILOS = tuple("abcde")
COUNTS = {"weights": "public", "dropouts": "any", "counts": dict.fromkeys(SILOS, 30)}


def made_job(mix="directed"):
    fields = {"seed": 3, "rounds": 6, "silos": list(SILOS), "participation": 0.8, "min_cohort": 3}
    security = {"secure_aggregation": "required", **COUNTS, "mix": mix}
    return make_job(
        "fedsimsup", {"similarity": "samples"}, {"classes": 10}, security=security, **fields
    )


class Kept:
    """A store with the words of rounds that one silo was away in."""

    def __init__(self, folder):
        self.job, self.folder = made_job(), folder
        self.store = JobStore(folder, lambda _: (), {})
        self.directed = d.Directed(JobPlan(self.job), self.store)
        by_silo = {}
        for round_ in range(1, self.job.length):
            by_silo.setdefault(self.job.away(round_)[0], []).append(round_)
        self.silo, self.rounds = max(by_silo.items(), key=lambda pair: len(pair[1]))

    def open(self, round_):
        """The words of its row of a round, as an open sum leaves them."""
        _, (_, own) = sum_groups(self.job.up(round_), JobPlan(self.job).bounds, (self.silo,))
        words = np.full(own.elements, round_, "<u4")
        claim = Claim(b"{}" * 50, bytes(64), SILOS[:4], bytes(8))
        (name,) = d.row_words(JobPlan(self.job).round(round_))
        self.store.write_aside(name, open_sum_file(claim, [words]))
        return name

    def fold(self, round_, cleared=(), keep=0.5):
        """The end of a round: a post for the silo, and what is committed."""
        fold = self.store.folding(round_, self.directed.posting(round_))
        for silo in cleared:
            fold.clear_mail(silo)
        posted = fold.put_mail(Post("theta", self.silo, {}, keep), None)
        data = {
            place: self.store.path(name).read_bytes()
            for place, name in fold.changes.items()
            if name
        }
        needed = {
            name
            for (_, part, silo), each in data.items()
            for name in self.directed.files(part, silo, each)
        }
        self.store.commit(round_, fold.changes, {}, needed)
        return posted

    def rows(self):
        return self.directed.rows([Mail("theta"), Latest("other")], self.job.down(2), self.silo)


@pytest.fixture
def kept(tmp_path):
    return Kept(tmp_path / "job")


def test_rows_wait_in_the_order_of_their_rounds(kept):
    first, second = kept.rounds[:2]
    names = [kept.open(first)]
    assert kept.fold(first, keep=0.25)
    names.append(kept.open(second))
    assert kept.fold(second)
    assert [(row.keep, row.kept.part) for row in kept.rows()] == [(0.25, "theta"), (0.5, "theta")]
    for row, round_ in zip(kept.rows(), (first, second), strict=True):
        words = np.frombuffer(b"".join(bytes(piece) for piece in row.kept.words("a")), "<u4")
        assert (words == round_).all()
        assert words.size * 4 == row.kept.nbytes
        mixed = row.mixed()
        assert (mixed.survivors, mixed.summands, mixed.keep) == (SILOS[:4], (), row.keep)
    assert {path.name for path in kept.folder.glob("*.words")} == set(names)
    data = json.loads(kept.store.put_aside("theta", kept.silo))
    assert data.keys() == {"file_sha256", "rows"}
    assert data["rows"] == [{"keep": "0.25", "round": first}, {"keep": "0.5", "round": second}]
    assert kept.directed.rows([], kept.job.down(2), kept.silo) == []


def test_without_words_of_the_round_nothing_waits_and_a_foreign_list_is_told(kept):
    first = kept.rounds[0]
    assert not kept.fold(first)  # nobody was mixed, or it was drawn and lost
    assert kept.rows() == []
    kept.open(kept.rounds[0])
    kept.fold(kept.rounds[0])
    (path,) = kept.folder.glob("*.rows")
    path.write_bytes(b'{"rows":[{"keep":"0.5"}]}')
    with pytest.raises(LocalError, match=f"rows of 'theta' for '{kept.silo}'"):
        kept.rows()


def test_what_waits_goes_once_its_silo_has_given(kept):
    first, second = kept.rounds[:2]
    kept.open(first)
    kept.fold(first)
    kept.open(second)
    kept.fold(second, cleared=(kept.silo,))
    assert len(kept.rows()) == 1
    fold = kept.store.folding(second + 1, kept.directed.posting(second + 1))
    fold.clear_mail(kept.silo)
    kept.store.commit(second + 1, fold.changes, {})
    assert kept.rows() == []
    kept.store.commit(second + 2, {}, {})  # a delivery may have read them until now
    assert list(kept.folder.glob("*.words")) == []


def test_too_many_rows_are_withheld_and_leave_nothing(kept, monkeypatch):
    first, second = kept.rounds[:2]
    monkeypatch.setattr(d, "MOST_DOCUMENTS", 150)
    kept.open(first)
    assert kept.fold(first)
    name = kept.open(second)
    assert not kept.fold(second)
    assert [row.keep for row in kept.rows()] == [0.5]
    assert not kept.store.path(name).exists()


def test_the_room_of_rows_that_wait_is_counted():
    job = made_job()
    elements = sum(spec.elements for spec in job.up(1)[0].tensors)
    assert room(job).versions == job.length * 4 * elements
    assert room(made_job("one-upload")).versions == job.length * job.cohort_size * 8 * elements


def test_an_open_sum_leaves_the_words_of_rows_in_which_somebody_is_mixed(tmp_path):
    """The second one would lean on one silo; the sum itself has the metrics alone."""
    made = Directed(own_frame([3, 2, 4, 2, 3], rows={f"theta.{AWAY[0]}": dict.fromkeys(FIVE, 1.0)}))
    spec, (opening,) = made.spec, made.run.effects(c.Open)
    assert [any(group.counts) for group in spec.groups] == [False, True, False]
    store = JobStore(tmp_path / "job", lambda _: (), {})
    sent = {silo: b"".join(made.run.uploads[silo]) for silo in made.survivors}
    for silo, words in sent.items():
        store.masked(spec.round, silo).write_bytes(words)
    digests = {silo: hashlib.sha256(words).digest() for silo, words in sent.items()}
    opening = replace(opening, tags=made.tags)
    metrics = Part("metrics", Kind.METRIC, Sum("total"), (TensorSpec("n", "float64", (3,)),))
    open_sum(store, (metrics,), spec, opening, digests, Keeping((), bytes(64)))
    (path,) = (tmp_path / "job").glob("*.words")
    assert path.name == f"{spec.round}.theta.{AWAY[0]}.words"
    kept = kept_sum("theta", path, made.hidden[1].nbytes)
    assert b"".join(bytes(piece) for piece in kept.words("a")) == made.hidden[1].tobytes()
    assert (kept.claim.survivors, kept.claim.tag) == (opening.survivors, made.claim(1).tag)
    with safe_open(store.sum_file(spec.round), framework="np") as file:
        assert list(file.keys()) == ["metrics/n"]


def test_of_members_a_row_each_waits_and_no_more():
    """Three files of each, as of all that a round replaces; rows for absent silos pile up."""
    document = made_job()._written()
    members = {"name": "pfedsim", "options": {"rho": "0.0"}, "version": None}
    security = {**document["security"], "mix": "directed"}
    changed = {**document, "method": members, "participation": "1.0", "security": security}
    job = Job.from_file(JobFile.model_validate(changed), "job")
    (part,) = (part for part in job.up(1) if part.name == "extractor")
    elements = sum(spec.elements for spec in part.tensors)
    assert room(job).versions == 3 * len(SILOS) * 4 * elements
    assert (
        masked_bytes(JobPlan(job).round(1))
        > len(SILOS) * 4 * elements
        > masked_bytes(JobPlan(job).round(0))
    )
    assert room(job).uploads > len(SILOS) ** 2 * 4 * elements

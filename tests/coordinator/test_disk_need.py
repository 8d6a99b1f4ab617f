"""A job's disk bound against what it takes: each upload and fold of a simulated job, on files."""

import dataclasses

import numpy as np
import pytest
from support.jobs import make_job
from support.refusals import refused

from staddle.algorithms.catalog import method_options
from staddle.algorithms.data.dataset import digits
from staddle.algorithms.engines import simulation
from staddle.algorithms.engines.aggregation import close_round
from staddle.algorithms.exchange.parts import upload_items
from staddle.algorithms.job.job import SecurityTable
from staddle.coordinator.blind.unmask import masked_bytes
from staddle.coordinator.disk_need import check_room, room
from staddle.coordinator.storage.spool import Spool
from staddle.coordinator.storage.store import JobStore
from staddle.proto.wire import tensor_bytes
from staddle.security.blind.plan import JobPlan, uploaded

SILOS = ("a", "b", "c", "d")
JOBS = {
    "local": ({}, 0.75),
    "fedavg": ({}, 0.75),
    "fedper": ({}, 1.0),
    "pfedsim": ({"rho": 0.4}, 0.75),
    "fedsimsup": ({"tau_theta": 1}, 0.75),
    "fedssa": ({"t_stable": 3}, 0.75),
    "ppfl": ({"models": 2, "lam": 0.0, "release_membership": "last"}, 0.75),
    "fedaims": ({"sampling": "algorithm2"}, 0.75),
}


def made(method, silos=SILOS):
    options, participation = JOBS[method]
    model = {"name": "convnet-digits" if method == "fedaims" else "cnn-digits", "classes": 10}
    fields = {"silos": list(silos), "participation": participation, "seed": 11, "rounds": 6}
    return make_job(method, options, model, name="job", **fields)


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("method", JOBS)
def test_no_job_takes_more_than_was_computed_and_none_much_less(method, tmp_path, monkeypatch):
    """The bound is of a worst case: what is taken must come near it, or it refuses what fits."""
    job, taken = made(method), []
    folder = tmp_path / "job"
    store = JobStore(folder, lambda round_: upload_items(job.up(round_)), {})
    write = JobStore.write

    def writing(*args):
        write(*args)
        taken.append(bytes_in(folder))

    def on_files(method, exchanges, state, round_, members, up, read, archive):
        for silo in members:
            spool = Spool(tmp_path / "part", silo)
            for item in upload_items(up):
                spool.write(tensor_bytes(read(item.part, silo, item.spec.name)))
            store.keep(silo, round_, spool.finished())
        taken.append(bytes_in(folder))
        folding = store.folding(round_)
        close_round(
            method, exchanges, state, round_, members, up, store.reader(members, round_), folding
        )
        store.commit(round_, folding.changes, folding.digests)
        taken.append(bytes_in(folder))
        return close_round(method, exchanges, state, round_, members, up, read, archive)

    monkeypatch.setattr(JobStore, "write", writing)
    monkeypatch.setattr(simulation, "close_round", on_files)
    data = digits()
    shards = {
        silo: (data.take(np.arange(n, n + 40)), data.take(np.arange(n + 40, n + 50)))
        for n, silo in zip(range(0, 400, 50), SILOS, strict=False)
    }
    simulation.simulate(job, shards)
    found = room(job)
    assert max(taken) <= found.total
    assert max(taken) >= found.total / 3, (max(taken), str(found))


def test_the_room_grows_with_the_silos_and_names_what_it_is_for():
    job = made("fedavg")
    upload = sum(item.spec.nbytes for item in upload_items(job.up(0)))
    found = room(job)
    assert (found.uploads, found.versions, found.mail) == (4 * upload, 0, 0)
    assert upload * 3 <= found.published <= upload * 3.5
    assert found.total == found.uploads + found.published
    assert room(made("fedavg", (*SILOS, "e"))).uploads == 5 * upload
    mixed = room(made("fedsimsup"))
    assert mixed.versions == 2 * mixed.uploads
    assert mixed.mail > 3 * 4 * upload * 0.9
    assert " uploads, " in str(mixed)
    assert str(mixed).endswith(" mail)")


def test_tables_of_test_counts_stay_round_by_round():
    plain, counted = (
        make_job("fedavg", rounds=50, metrics={"confusion": confusion, "score_bins": 4})
        for confusion in (False, True)
    )
    scores = 50 * 2 * 8 * 3 * 2 * 4
    assert scores <= room(plain).counts < scores + 50 * 1200
    matrix = 50 * 2 * 8 * 3 * 3
    assert matrix <= room(counted).counts - room(plain).counts < matrix + 50 * 1200
    assert room(make_job("fedavg")).counts == 0
    assert room(counted).published == room(plain).published


def test_a_blind_job_is_counted_by_its_masked_words_and_its_open_sum():
    job = dataclasses.replace(
        made("fedavg"),
        min_cohort=3,
        participation=1.0,
        security=SecurityTable(secure_aggregation="required"),
    )
    words = masked_bytes(JobPlan(job).round(0))
    values = sum(item.spec.elements for item in upload_items(job.up(0)))
    assert 4 * values < words < 9 * values  # a word of 4 or 8 bytes each, and canaries
    assert 4 * words + 8 * values < room(job).uploads < 4 * words + 8 * values + 20_000


def blind_job(method, silos=SILOS, participation=0.75, **security):
    counts = (
        {"weights": "public", "dropouts": "any", "counts": dict.fromkeys(silos, 40)}
        if participation < 1
        else {}
    )
    table = SecurityTable(secure_aggregation="required", **counts, **security)
    return dataclasses.replace(
        made(method, silos), min_cohort=3, participation=participation, security=table
    )


def test_a_blind_mix_is_counted_by_eight_bytes_a_number():
    job = blind_job("pfedsim", participation=1.0)
    extractor, rows = uploaded(job.up(3))
    padded, rotated = (sum(spec.elements for spec in part.tensors) for part in (extractor, rows))
    found = room(job)
    assert found.versions == 4 * 2 * 8 * padded
    whole = 4 * (masked_bytes(JobPlan(job).round(3)) + 8 * padded + 4 * rotated)
    model = room(
        dataclasses.replace(job, method_name="fedavg", method_options=made("fedavg").method_options)
    ).uploads
    assert found.uploads >= max(whole, model)
    assert found.uploads <= max(whole, model) + 20_000


def test_what_waits_for_a_blind_row_is_counted_over_all_rounds():
    silos = ("a", "b", "c", "d", "e", "f")
    job = dataclasses.replace(blind_job("fedsimsup", silos, 0.67), method_options=samples())
    (theta,) = uploaded(job.up(1))
    found = room(job)
    assert found.versions == job.length * 4 * 8 * sum(spec.elements for spec in theta.tensors)
    assert found.mail == 0  # rows without their words


def samples():
    return method_options("fedsimsup", {"similarity": "samples", "tau_theta": 1})


def test_the_words_of_sums_that_come_down_are_counted():
    plain = {"min_cohort": 3, "participation": 1.0}
    jobs = [
        dataclasses.replace(
            made("fedavg"),
            **plain,
            security=SecurityTable(secure_aggregation="required", tags=tags),
        )
        for tags in (False, True)
    ]
    untagged, tagged = map(room, jobs)
    values = sum(item.spec.elements for item in upload_items(jobs[0].up(0)))
    assert (tagged.uploads, tagged.versions) == (untagged.uploads, 0)
    words = (
        tagged.published - untagged.published
    ) / 3  # of three rounds: 8 bytes each, where weights are that far apart
    assert 8 * values <= words < 8 * values + 10_000


def test_a_job_over_the_limit_is_refused_with_numbers():
    job = made("fedavg")
    total = room(job).total
    assert check_room(job, None) == check_room(job, total) == room(job)
    with refused(r"'job' with 4 silos may need .* KiB uploads.*max_job_bytes is .*; raise it"):
        check_room(job, total - 1)

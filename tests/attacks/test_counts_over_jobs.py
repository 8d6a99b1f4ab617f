"""What a coordinator learns of one silo that two jobs over the same data set do not share, against
the real agent.

Record counts are the same in every job, so two sums that differ by one silo tell its counts
exactly. The measure is how far off the recovered numbers of training and test records are. The
other silos are honest: they sign after the real one, which has signed what they have.
"""

import shutil

import numpy as np
import pytest
from support.hostile_coordinator import SILO, offer, play, records, round_of
from support.hostile_sum_coordinator import OTHERS, SILOS, Attempted, Blind, GroupValues, make_world

from staddle.errors import LocalError

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

GONE = "centre"
ALL = (*SILOS, GONE)
# to train, to test
COUNTS = {GONE: (97, 31), **{silo: (60 + 7 * at, 20 + at) for at, silo in enumerate(OTHERS)}}
SECURITY = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two jobs over one data set, for five silos and for four of them."""
    security = dict.fromkeys(("first", "again", "twin"), SECURITY)
    declared = {GONE: COUNTS[GONE][0], SILO: 60, **{silo: COUNTS[silo][0] for silo in OTHERS}}
    for name, silos in (("declared", ALL), ("declared-again", SILOS)):
        counts = {silo: declared[silo] for silo in silos}
        security[name] = {"secure_aggregation": "required", "weights": "public", "tags": False}
        security[name]["counts"] = counts
    silos = {"first": ALL, "twin": ALL, "declared": ALL}
    return make_world(tmp_path_factory.mktemp("attacked"), security, (GONE,), silos)


class Counted(Attempted):
    """The other silos give their numbers of records."""

    def contribution(self, group, silo):
        given, (train, test) = super().contribution(group, silo), COUNTS[silo]
        if group.name == "metrics":
            return GroupValues(np.array([0.0, 0.0, test]))
        weights = None if given.weights is None else np.full(group.rows, float(train))
        return GroupValues(given.values, weights)


def sums_of(world, *names):
    """An honest attempt at the first sum of each job, over all of its silos."""
    all_of = lambda name: tuple(sorted(world.jobs[name].silos))
    return {0: [Counted(world, name, cohort=all_of(name)) for name in names]}


def tasks(world, *names):
    return [round_of(world, 0, name, cohort=world.jobs[name].silos) for name in names]


def totals(attempt):
    """Training and test records of all silos together, as the coordinator opened them."""
    by_name = dict(zip([group.name for group in attempt.spec.groups], attempt.opened, strict=True))
    return np.array([by_name["model"].weight[0], by_name["metrics"].total[2]])


def measure(attempts):
    """How far off the counts are that the coordinator finds of the silo that is gone.

    None where it finds none.
    """
    with_it, without = attempts
    if with_it.opened is None or without.opened is None:
        return None
    off = np.abs(totals(with_it) - totals(without) - COUNTS[GONE]).round(6)
    return tuple(map(float, off))


def told(found):
    return f"its training and test records were found, off by {found}"


def signed(hostile):
    """Contexts of the attempts whose survivors the real silo signed."""
    return [ctx for _, ctx, kind in hostile.given if kind == "survival"]


def test_a_job_for_all_silos_but_one_is_declined(world, tmp_path):
    """Before: off by (0.0, 0.0)."""
    sums = sums_of(world, "first", "again")
    script = [offer(world, "first"), *tasks(world, "first")]
    script += [offer(world, "again"), *tasks(world, "again")]
    hostile = play(Blind(world, script, sums), tmp_path)
    found = measure(sums[0])
    assert found is None, told(found)
    assert sums[0][0].opened is not None
    answers = [(kind, code) for kind, _, code in hostile.answers if kind != "FAILED"]
    assert answers == [("ACCEPT", "UNSPECIFIED"), ("DECLINE", "POLICY")]
    (declined,) = records(tmp_path, "job.decline")
    (why,) = declined["reasons"]
    over = "over centre, east, north, south, west on data set 'data'"
    assert f"together with those of job 'first' {over}" in why
    assert "of which classes, centre alone has" in why
    assert "have its founders sign a roster without" in why


def test_a_job_that_declares_training_records_is_declined_too(world, tmp_path):
    """Its weights tell nothing that it does not; test records stand in no job.

    Before: off by (0.0, 0.0).
    """
    sums = sums_of(world, "declared", "declared-again")
    names = ("declared", "declared-again")
    script = [each for name in names for each in (offer(world, name), *tasks(world, name))]
    hostile = play(Blind(world, script, sums), tmp_path)
    found = measure(sums[0])
    assert found is None, told(found)
    assert sums[0][0].opened is not None
    assert [kind for kind, *_ in hostile.answers if kind != "FAILED"] == ["ACCEPT", "DECLINE"]


def test_two_jobs_that_were_accepted_before_either_was_summed(world, tmp_path):
    """The set is judged again when the survivors are to be signed. Before: off by (0.0, 0.0)."""
    sums = sums_of(world, "again", "first")
    script = [offer(world, "again"), offer(world, "first"), *tasks(world, "again", "first")]
    hostile = play(Blind(world, script, sums), tmp_path)
    found = measure(sums[0][::-1])
    assert found is None, told(found)
    assert signed(hostile) == [sums[0][0].spec.context()]
    (ended,) = records(tmp_path, "secagg.end")
    assert (ended["job"], ended["code"], ended["blame"]) == ("first", "POLICY", "")
    assert "sums of job 'first' over centre, east" in ended["why"]


@pytest.mark.actor("disk thief and coordinator")
@pytest.mark.parametrize("lost", ["removed", "put back"])
def test_a_silo_that_lost_its_ledger_does_not_forget(world, tmp_path, lost):
    """The coordinator says nothing of the head that it holds. Before: off by (0.0, 0.0)."""
    folder, copy = tmp_path / "silo", tmp_path / "copy"
    sums = sums_of(world, "first", "again")
    play(Blind(world, [], sums), folder)
    shutil.copytree(folder / "ledger", copy)
    play(Blind(world, [offer(world, "first"), *tasks(world, "first")], sums), folder)
    shutil.rmtree(folder / "ledger")
    if lost == "put back":
        shutil.copytree(copy, folder / "ledger")
    again = Blind(world, [offer(world, "again"), *tasks(world, "again")], sums)
    try:
        play(again, folder)
        why = ""
    except LocalError as error:
        why = str(error)
    found = measure(sums[0])
    assert found is None, told(found)
    assert "this silo signed a sum of job 'first', but its ledger has no record of it" in why
    assert again.calls["hello"] == 0


@pytest.mark.actor("disk thief and coordinator")
@pytest.mark.succeeds
def test_a_whole_folder_that_was_put_back_has_forgotten_where_no_other_silo_is_heard(
    world, tmp_path
):
    """Documented: rounds without [privacy] do not wait for another silo's word.

    Off by (0.0, 0.0).
    """
    folder = tmp_path / "silo"
    sums = sums_of(world, "first", "again")
    play(Blind(world, [offer(world, "first"), *tasks(world, "first")], sums), folder)
    shutil.rmtree(folder / "ledger")
    shutil.rmtree(folder / "jobs")  # the backup is from before all of them; the split is the same
    play(Blind(world, [offer(world, "again"), *tasks(world, "again")], sums), folder)
    assert measure(sums[0]) == (0.0, 0.0)


@pytest.mark.control
def test_the_same_silos_again_and_a_job_that_failed_before_its_sum_are_welcome(world, tmp_path):
    """A silo is lost before it uploads: no sum was opened, and the job is signed again
    without it.
    """
    sums = sums_of(world, "again", "first", "twin")
    failed = Counted(world, "first", cohort=tuple(sorted(ALL)), absent=(GONE,))
    first = {0: [failed]}
    play(Blind(world, [offer(world, "first"), *tasks(world, "first")], first), tmp_path / "failed")
    assert failed.opened is None
    again = Blind(world, [offer(world, "again"), *tasks(world, "again")], sums)
    play(again, tmp_path / "failed")
    assert sums[0][0].opened is not None
    script = [offer(world, "first"), *tasks(world, "first")]
    script += [offer(world, "twin"), *tasks(world, "twin")]
    twins = Blind(world, script, sums)
    play(twins, tmp_path / "twins")
    assert [kind for kind, *_ in twins.answers] == ["ACCEPT", "ACCEPT"]
    assert None not in (sums[0][1].opened, sums[0][2].opened)
    found = records(tmp_path / "twins", "secagg.signed")
    assert [
        (each["job"], each["absent"], each["values"], SILO in each["survivors"]) for each in found
    ] == [("first", [], "fixed", True), ("twin", [], "fixed", True)]

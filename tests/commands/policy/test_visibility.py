"""What ``job sign`` and the demo say of a job."""

import pytest
from support.jobs import make_job

from staddle.commands.policy.visibility import (
    FOR_SILOS,
    ROWS,
    SHARED,
    revealed_by_likeness,
    seen,
    together,
    unbounded,
    way_of,
)
from staddle.security.blind.plan import JobPlan
from staddle.security.policy.release import Release

SILOS = list("abcdefg")
SECURE = {"secure_aggregation": "required"}


def made(method, options=None, silos=SILOS, **fields):
    return make_job(method, options, {"classes": 10}, silos=list(silos), **fields)


def mixing(mix, colluders):
    counts = {"counts": dict.fromkeys(SILOS, 30), "class_counts": dict.fromkeys(SILOS, [3] * 10)}
    security = {**SECURE, **counts, "weights": "public", "dropouts": "any"}
    security |= {"mix": mix, "colluders": colluders}
    share = 0.75 if colluders < 2 else 1.0
    return made("fedsimsup", min_cohort=4, participation=share, security=security)


@pytest.mark.parametrize(
    ("mix", "colluders", "said"),
    [
        ("one-upload", 1,
            "nothing of what it mixes (but all of it as soon as one silo colludes with it), "),
        ("directed", 1,
            ("nothing of what it mixes (or, with 1 colluding silo, only the means that it"
            " receives), ")),
        ("directed", 0, "nothing of what it mixes, "),
    ],
)  # fmt: skip
def test_what_a_mix_hides_is_said_for_either_kind(mix, colluders, said):
    assert said in seen(mixing(mix, colluders))


@pytest.mark.parametrize(
    ("silos", "participation", "said"),
    [
        (8, 0.5, "over 4 of 8 silos in fixed batches, "),
        (8, 1.0, "over all 8 silos in fixed batches, "),
        (7, 1.0, "over all 7 silos, "),
    ],
)
def test_who_is_summed_together_is_said(silos, participation, said):
    fields = {"min_cohort": 3, "participation": participation, "security": SECURE}
    assert said in seen(made("fedavg", silos="abcdefgh"[:silos], **fields))


@pytest.mark.parametrize(
    ("silos", "security", "said"),
    [
        (8, {}, "it has 2 batches: "),
        (7, {}, "its silos form one batch: a round waits for all of them"),
        (8, {"dropouts": "any", "weights": "public", "counts": dict.fromkeys("abcdefgh", 30)}, ""),
        (8, {"secure_aggregation": "off"}, ""),
    ],
)
def test_the_batches_of_a_job_are_named(silos, security, said):
    security = {**SECURE, **security}
    found = made("fedavg", silos="abcdefgh"[:silos], min_cohort=3, security=security)
    told = together(found)
    assert told.startswith(said)
    assert bool(told) == bool(said)
    assert all(", ".join(batch) in told for batch in found.batches if len(found.batches) > 1)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("pfedsim", {"similarity": "per_class"}, "which silo holds which class (AUC 0.97 to 1.00"),
        ("pfedsim", {}, "similar proportions of labels (rank correlation 0.5 to 0.87"),
        ("cfl", {}, "which silos have similar records"),
        ("pfedsim", {"rho": 1}, ""),
        ("fedavg", {}, ""),
    ],
)
def test_what_comparisons_tell_is_said_with_figures(method, options, said):
    told = revealed_by_likeness(JobPlan(made(method, options)))
    assert said in told
    assert bool(told) == bool(said)


def test_directed_rows_for_members():
    """The page says who weighs them and who reads the weights."""
    fields = {"min_cohort": 3, "security": {**SECURE, "mix": "directed"}}
    job = made("pfedsim", {"rho": 0.25}, "abcde", **fields)
    assert (
        "with 1 colluding silo, only the means that it receives, with the coordinator's weights)"
        in seen(job)
    )
    assert (
        "reveals to the coordinator, and to the silos of a round, which check the weights of its"
        " rows, which" in revealed_by_likeness(JobPlan(job))
    )


ONE_SILO = "one silo, alone or colluding with the coordinator, can learn of single records"
EITHER = "the coordinator or one silo can learn of single records"


@pytest.mark.parametrize(
    ("method", "own", "said"),
    [
        ("fedavg", {}, ONE_SILO),
        ("fedavg", {"tags": False}, EITHER),
        ("pfedsim", {}, ONE_SILO),  # sums with tags, then rows with tags
        ("fedssa", {}, EITHER),  # what its coordinator half makes of sums no silo can check
        ("feddyn", {}, EITHER),
        ("fedadam", {}, EITHER),
        ("scaffold", {}, EITHER),  # its model has tags, and its control variate none
        ("local", {}, ""),
    ],
)
def test_whom_a_model_that_is_made_to_leak_shows_records_is_said(method, own, said):
    told = unbounded(JobPlan(made(method, min_cohort=4, security={**SECURE, **own})))
    assert said in told
    assert bool(said) == bool(told)


@pytest.mark.parametrize(
    ("form", "readers", "way"),
    [
        ("plain", (), "plain"), ("masked", (), "masked"), ("masked", ("sum",), "masked"),
        ("masked", ("silos",), FOR_SILOS), ("masked", ("hospital-b", "hospital-c"), ROWS),
        ("masked", ("gram",), SHARED), ("rotated", ("gram",), "rotated"),
        ("padded", ("mix",), "padded"),
    ],
)  # fmt: skip
def test_a_part_leaves_by_its_form_and_what_is_masked_by_who_reads_it(form, readers, way):
    release = Release("model", "whole_model", "w", "uint64", (2,), form, readers=readers)
    assert way_of(release) == way

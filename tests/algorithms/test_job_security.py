import copy

import pytest

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.job import Job
from staddle.algorithms.job_security import MOST_SILOS, SecurityTable
from staddle.errors import LocalError
from staddle.files import canonical_json, parse_json
from staddle.security import fixedpoint, round_spec

BLIND = {"secure_aggregation": "required"}
COUNTS = {"a": 40, "b": 30, "c": 50, "d": 45}
PUBLIC = {**BLIND, "weights": "public", "counts": COUNTS}


@pytest.fixture
def blind(make_job):
    """A job of four silos with blind sums, whose document was written: everything of it has been checked."""

    def make(method="fedavg", options=None, security=BLIND, model=None, **fields):
        job = make_job(
            method, options, model, **{"silos": list("abcd"), "min_cohort": 3, "security": security} | fields
        )
        job.document()
        return job

    return make


def test_without_the_table_nothing_is_blind_and_the_document_says_so(make_job):
    job = make_job("fedavg")
    assert job.security == SecurityTable()
    assert not job.security.required
    assert job.document()["security"] == {
        "secure_aggregation": "off", "clip_exponent": 3, "weights": "private", "weight_least": 1,
        "weight_most": 1_000_000, "counts": {}, "colluders": 1,
    }  # fmt: skip


@pytest.mark.parametrize("security", [BLIND, PUBLIC, {**BLIND, "clip_exponent": -2, "weight_most": 2**53 - 1}])
def test_the_table_goes_round_through_the_signed_document(blind, security):
    job = blind(security=security)
    back = Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire")
    assert (back, back.digest) == (job, job.digest)
    assert back.security.required
    assert job.digest != blind(security={**security, "colluders": 0}).digest


def test_a_document_of_before_the_table_is_told_from_one_of_now(make_job):
    document = make_job("fedavg").document()
    older = {key: value for key, value in document.items() if key != "security"}
    with pytest.raises(LocalError, match="key security is not written as Staddle writes it"):
        Job.from_document(older, "wire")
    part = copy.deepcopy(document)
    del part["security"]["colluders"]
    with pytest.raises(LocalError, match=r"key security\.colluders is not written as"):
        Job.from_document(part, "wire")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_exponent", 4),
        ("weights", "public"),
        ("weight_least", 2),
        ("weight_most", 9),
        ("counts", COUNTS),
        ("colluders", 0),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(make_job, key, value):
    with pytest.raises(ValueError, match=f'{key} = .* does nothing with secure_aggregation = "off"; take it out'):
        make_job("fedavg", silos=list("abcd"), security={key: value})


@pytest.mark.parametrize(
    ("security", "said"),
    [
        ({"secure_aggregation": "on"}, "secure_aggregation"),
        ({**BLIND, "clip_exponent": -65}, "clip_exponent"),
        ({**BLIND, "clip_exponent": 63}, "clip_exponent"),
        ({**BLIND, "clip_exponent": 3.0}, "clip_exponent"),
        ({**BLIND, "clip_exponent": True}, "clip_exponent"),
        ({**BLIND, "weight_least": 0}, "weight_least"),
        ({**BLIND, "weight_most": 2**53}, "weight_most"),
        ({**BLIND, "weight_least": 9, "weight_most": 8}, "weight_least = 9 is above weight_most = 8; lower it"),
        ({**BLIND, "colluders": -1}, "colluders"),
        ({**BLIND, "counts": COUNTS}, "counts would tell private weights"),
        ({**PUBLIC, "counts": {**COUNTS, "a": 0}}, "counts.a"),
        ({**PUBLIC, "counts": {**COUNTS, "a": True}}, "counts.a"),
        ({**PUBLIC, "counts": {**COUNTS, "A": 1}}, "counts"),
        ({**BLIND, "collude": 1}, "collude"),
    ],
)
def test_values_of_the_table_are_bounded(make_job, security, said):
    with pytest.raises(ValueError, match=said):
        make_job("fedavg", silos=list("abcd"), min_cohort=3, security=security)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"silos": list("abc")}, "colluders = 1 takes 4 silos or more in a round, this job has 3; name more silos"),
        ({"security": {**BLIND, "colluders": 2}}, "colluders = 2 takes 7 silos or more"),
        (
            {"security": PUBLIC, "participation": 0.75},
            "takes 4 silos or more in a round, this job has 3; raise participation",
        ),
        ({"min_cohort": 2}, 'min_cohort = 2, .* = "required" takes 3 or more; raise it'),
        ({"participation": 0.9}, "participation = 0.9 with private weights: .* write participation = 1.0"),
        ({"quorum": 0.8}, "quorum = 0.8 with private weights: .* write quorum = 1.0"),
        (
            {"security": {**PUBLIC, "counts": {"a": 1, "c": 1}}},
            "security.counts lacks b, d; public weights need the training records of each silo",
        ),
        ({"security": {**PUBLIC, "counts": {}}}, "counts lacks a, b, c, d"),
        ({"security": {**PUBLIC, "counts": {**COUNTS, "x": 1}}}, "security.counts has x, no silo of the job; take it"),
        ({"silos": [f"s{n}" for n in range(1001)]}, "silos names 1001, a blind sum takes 1000 at most"),
    ],
)
def test_silos_and_rounds_fit_blind_sums(blind, fields, said):
    with pytest.raises(LocalError, match=f"^job.toml: .*{said}"):
        blind(**fields)


def test_three_silos_do_where_none_is_in_league(blind):
    assert blind(silos=list("abc"), security={**BLIND, "colluders": 0}).cohort_size == 3


def test_public_weights_take_changing_silos_where_all_is_a_mean(blind):
    silos = list("abcdef")
    security = {**PUBLIC, "counts": dict.fromkeys(silos, 9)}
    job = blind("fedper", security=security, silos=silos, participation=0.7, quorum=0.75)
    assert len({job.cohort(round_) for round_ in range(4)}) > 1


@pytest.mark.parametrize("change", [{"participation": 0.7}, {"quorum": 0.75}])
@pytest.mark.parametrize(("method", "options"), [("fedssa", {}), ("fedssa", {"stale_inclusive": True})])
def test_presence_and_totals_take_the_same_silos_in_every_round(blind, method, options, change):
    silos = list("abcdef")
    security = {**PUBLIC, "counts": dict.fromkeys(silos, 9)}
    with pytest.raises(LocalError, match=r"\(sum\.(ratio|total)\) may hold what hardly changes between rounds"):
        blind(method, options, security=security, silos=silos, **change)
    assert blind(method, options, security=security, silos=silos).security.required


def test_bounds_of_private_weights_bound_something(blind):
    with pytest.raises(
        LocalError, match=r"security\.weight_most = 50 does nothing: this job's weights stand in counts"
    ):
        blind(security={**PUBLIC, "weight_most": 50})
    with pytest.raises(LocalError, match="weight_least = 2 does nothing"):  # the weights of its rows are 0 or 1
        blind("fedssa", security={**PUBLIC, "weight_least": 2})
    prototypes = {"name": "convnet-digits", "norm": "group"}  # weighted by how many records a class has
    assert blind("fedaims", model=prototypes, security={**PUBLIC, "weight_most": 50}).security.weight_most == 50


NOT_SUMMED = {
    ("pfedsim", ()): ("extractor", "mix", 2, "mix and gram"),
    ("fedsimsup", ()): ("census", "each", 0, "each and mix"),
    ("fedaims", (("sampling", "algorithm2"),)): ("direction", "gram", 0, "gram"),
    ("ppfl", (("release_membership", "last"),)): ("membership", "each", 3, "each"),
}


@pytest.mark.parametrize(("method", "options"), NOT_SUMMED)
def test_what_is_no_sum_is_refused_with_the_methods_that_would_do(make_job, blind, method, options):
    part, exchange, first, kinds = NOT_SUMMED[method, options]
    model = {"name": "convnet-digits", "norm": "group"}
    share = {"participation": 0.75, "min_cohort": 3} if method == "fedsimsup" else {"min_cohort": 3}
    counts = dict.fromkeys("abcdefgh", 10)
    fields = {"silos": list(counts), "security": {**PUBLIC, "counts": counts}} | share
    with pytest.raises(LocalError) as caught:
        blind(method, dict(options), model=model, **fields)
    said = str(caught.value)
    assert f"part {part!r} crosses by {exchange!r} from round {first} on; {kinds} cannot be blind yet" in said
    assert said.endswith(', or write security.secure_aggregation = "off"')
    named = said.partition("all sums (")[2].partition(")")[0].split(", ")
    open_ = {name: make_job(name, model=model, **{**fields, "security": {}}) for name in METHODS}
    assert {"local", "fedavg", "fedper", "fedssa"} <= set(named)
    for name, job in open_.items():
        try:
            summed = all(p["exchange"].startswith("sum.") for phase in job.document()["schema"] for p in phase["up"])
        except LocalError:
            summed = False
        assert summed == (name in named)


def test_where_no_method_would_do_none_is_named(blind, monkeypatch):
    monkeypatch.setattr("staddle.algorithms.job.METHODS", {"pfedsim": METHODS["pfedsim"]})
    with pytest.raises(LocalError, match=r'cannot be blind yet: write security\.secure_aggregation = "off"$'):
        blind("pfedsim")


@pytest.mark.parametrize("method", ["local", "fedavg", "fedper", "fedssa", "ppfl", "pfedsim"])
def test_methods_that_only_sum_are_taken(blind, method):
    blind(method, {"rho": 1.0} if method == "pfedsim" else {})


def test_bounds_are_those_of_the_sum():
    """Which algorithms must not import: security knows algorithms, not the other way round."""
    assert MOST_SILOS == round_spec.MOST_SILOS
    for value, bad in ((-64, -65), (62, 63)):
        SecurityTable.model_validate({**BLIND, "clip_exponent": value})
        fixedpoint.Group(name="g", elements=1, clip_exponent=value, weights="equal")
        with pytest.raises(ValueError, match="clip_exponent"):
            fixedpoint.Group(name="g", elements=1, clip_exponent=bad, weights="equal")


def test_the_longest_job_says_quickly_what_would_do(make_job):
    job = make_job("pfedsim", rounds=100_000, silos=list("abcd"), min_cohort=3, security=BLIND)
    with pytest.raises(LocalError, match="fedavg"):
        job.document()

import copy

import pytest
from support.refusals import refused

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.exchange.parts import DISCLOSED, Gram, Mix
from staddle.algorithms.job.blind_rules import LARGEST_MIX_CLIP, Crossing, JobRules, no_blind_form
from staddle.algorithms.job.job import Job
from staddle.algorithms.job.security import LONGEST_COMPARED, MOST_SILOS, SecurityTable
from staddle.files.documents import canonical_json, parse_json
from staddle.security.arithmetic import fixedpoint
from staddle.security.blind import mix_context, rotated_sketch
from staddle.security.secagg import spec

BLIND = {"secure_aggregation": "required"}
COUNTS = {"a": 40, "b": 30, "c": 50, "d": 45}
PUBLIC = {**BLIND, "weights": "public", "counts": COUNTS}
ANY = {**PUBLIC, "dropouts": "any"}


@pytest.fixture
def blind(make_job):
    """A job of four silos with blind sums, whose document was written: everything of it has been
    checked.
    """

    def make(method="fedavg", options=None, security=BLIND, model=None, **fields):
        common = {"silos": list("abcd"), "min_cohort": 3, "security": security}
        job = make_job(method, options, model, **common | fields)
        job.document()
        return job

    return make


def test_the_first_rule_speaks_whose_conditions_all_hold():
    rules = JobRules()
    rules.broken_where(lambda n: n > 0, lambda n: n > 10)(lambda n: f"{n} is large")
    rules.broken_where()(lambda n: "odd" if n % 2 else "")
    rules.broken_where(lambda n: n > 4)(lambda _: "over 4")
    assert [rules.fault(n) for n in (12, 13, 5, 6, 4, -3)] == [
        "12 is large", "13 is large", "odd", "over 4", "", "odd",
    ]  # fmt: skip


def test_without_the_table_nothing_is_blind_and_the_document_says_so(make_job):
    job = make_job("fedavg")
    assert job.security == SecurityTable()
    assert not job.security.required
    assert job.document()["security"] == {
        "secure_aggregation": "off", "clip_exponent": 3, "weights": "private", "weight_least": 1,
        "weight_most": 1_000_000, "counts": {}, "class_counts": {}, "colluders": 1,
        "dropouts": "batches", "tags": True, "min_holders": 0, "audience": "coordinator",
        "mix": "one-upload", "compare": "rotated",
    }  # fmt: skip


@pytest.mark.parametrize(
    "security", [BLIND, PUBLIC, {**BLIND, "clip_exponent": -2, "weight_most": 2**53 - 1}]
)
def test_the_table_goes_round_through_the_signed_document(blind, security):
    job = blind(security=security)
    back = Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", ())
    assert (back, back.digest) == (job, job.digest)
    assert back.security.required
    assert job.digest != blind(security={**security, "colluders": 0}).digest


def test_a_document_of_before_the_table_is_told_from_one_of_now(make_job):
    document = make_job("fedavg").document()
    older = {key: value for key, value in document.items() if key != "security"}
    with refused("key security is not written as Staddle writes it"):
        Job.from_document(older, "wire", ())
    part = copy.deepcopy(document)
    del part["security"]["colluders"]
    with refused(r"key security\.colluders is not written as"):
        Job.from_document(part, "wire", ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_exponent", 4),
        ("weights", "public"),
        ("weight_least", 2),
        ("weight_most", 9),
        ("counts", COUNTS),
        ("class_counts", {"a": [1, 2]}),
        ("colluders", 0),
        ("tags", False),
        ("audience", "silos"),
        ("mix", "directed"),
        ("compare", "shared"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(make_job, key, value):
    said = f'{key} = .* does nothing with secure_aggregation = "off"; take it out'
    with pytest.raises(ValueError, match=said):
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
        (
            {**BLIND, "weight_least": 9, "weight_most": 8},
            "weight_least = 9 is above weight_most = 8; lower it",
        ),
        ({**BLIND, "colluders": -1}, "colluders"),
        ({**BLIND, "counts": COUNTS}, "counts would reveal private weights"),
        ({**BLIND, "class_counts": {"a": [3]}}, "class_counts would reveal private weights"),
        ({**PUBLIC, "class_counts": {"a": []}}, "class_counts.a"),
        ({**PUBLIC, "class_counts": {"a": [-1]}}, "class_counts.a"),
        ({**PUBLIC, "class_counts": {"a": [1.0]}}, "class_counts.a"),
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
        ({"silos": list("abc")},
            "colluders = 1 takes 4 silos or more in a round, this job has 3; name more silos"),
        ({"security": {**BLIND, "colluders": 2}}, "colluders = 2 takes 7 silos or more"),
        ({"security": PUBLIC, "participation": 0.75},
            "takes 4 silos or more in a round, this job has 3; raise participation"),
        ({"min_cohort": 2}, 'min_cohort = 2, .* = "required" takes 3 or more; raise it'),
        (
            {"participation": 0.9},
            "participation = 0.9: 4 silos are too few for two batches .* write participation = 1.0",
        ),
        ({"security": {**BLIND, "dropouts": "any"}},
            '"any" with private weights: sums over changing silos tell the weight'),
        ({"quorum": 0.8}, "quorum = 0.8 does nothing in a blind job"),
        ({"security": PUBLIC, "quorum": 0.8}, "quorum = 0.8 does nothing in a blind job"),
        ({"security": {**PUBLIC, "counts": {"a": 1, "c": 1}}},
            "security.counts lacks b, d; public weights need the training records of each silo"),
        ({"security": {**PUBLIC, "counts": {}}}, "counts lacks a, b, c, d"),
        ({"security": {**PUBLIC, "counts": {**COUNTS, "x": 1}}},
            "security.counts has x, no silo of the job; take it"),
        ({"silos": [f"s{n}" for n in range(1001)]},
            "silos names 1001, a blind sum takes 1000 at most"),
    ],
)  # fmt: skip
def test_silos_and_rounds_fit_blind_sums(blind, fields, said):
    with refused(f"^job.toml: .*{said}"):
        blind(**fields)


def test_three_silos_do_where_none_is_in_league(blind):
    assert blind(silos=list("abc"), security={**BLIND, "colluders": 0}).cohort_size == 3


def test_public_weights_take_changing_silos_where_all_is_a_mean(blind):
    silos = list("abcdef")
    security = {**PUBLIC, "counts": dict.fromkeys(silos, 9)}
    with refused(r"6 silos are too few for two batches"):
        blind("fedper", security=security, silos=silos, participation=0.7)
    job = blind("fedper", security={**security, "dropouts": "any"}, silos=silos, participation=0.7)
    assert len({job.cohort(round_) for round_ in range(4)}) > 1
    assert job.batches == ()


@pytest.mark.parametrize("security", [BLIND, {**PUBLIC, "counts": dict.fromkeys("abcdefgh", 9)}])
def test_rounds_of_some_silos_draw_whole_batches(blind, security):
    job = blind("fedper", security=security, silos=list("abcdefgh"), participation=0.7, rounds=20)
    assert [len(batch) for batch in job.batches] == [4, 4]
    assert job.cohort_size == 4
    assert {job.cohort(round_) for round_ in range(20)} == set(job.batches)


def test_a_round_with_a_census_has_all_batches(blind):
    silos = list("abcdefgh")
    counts = {**PUBLIC, "counts": dict.fromkeys(silos, 9)}
    job = blind("fedsimsup", {"similarity": "samples"}, counts, silos=silos, participation=0.5)
    assert job.cohort(0) == tuple(silos)
    assert job.cohort(1) in job.batches


def test_what_hardly_changes_is_summed_over_all_silos(blind):
    public = {**PUBLIC, "counts": dict.fromkeys("abcd", 9)}
    assert blind("fedavg").batches == (tuple("abcd"),)
    assert blind("fedavg", security=public).batches == (tuple("abcd"),)
    assert blind("fedavg", security={**public, "dropouts": "any"}).batches == ()
    assert blind("fedssa", security=public).batches == (tuple("abcd"),)


@pytest.mark.parametrize(
    ("silos", "counts", "sizes"),
    [
        (7, {}, [7]),  # three of them alone are too few
        (8, {}, [4, 4]),
        (9, {}, [3, 3, 3]),
        (9, dict.fromkeys("abcdefghi", 30), [3, 3, 3]),
        # of three, two uneven ones are less than two
        (9, {**dict.fromkeys("abcdefghi", 30), "a": 29}, [4, 5]),
        (9, {**dict.fromkeys("abcdefghi", 30), "a": 900}, [9]),
    ],
)
def test_rounds_of_all_silos_go_on_without_the_batch_of_one_that_is_lost(
    blind, silos, counts, sizes
):
    names = list("abcdefghi")[:silos]
    fields = {"silos": names, "security": {**PUBLIC, "counts": counts} if counts else BLIND}
    job = blind(**fields)
    assert sorted(map(len, job.batches)) == sizes
    assert sorted(silo for batch in job.batches for silo in batch) == names
    assert job.cohort(0) == tuple(names)
    assert blind("fedssa", **fields).batches == (tuple(names),)


@pytest.mark.parametrize("change", [{"participation": 0.7}, {}])
@pytest.mark.parametrize("stale", [False, True])
def test_presence_and_totals_take_the_same_silos_in_every_round(blind, stale, change):
    silos, options = list("abcdef"), {"stale_inclusive": stale}
    security = {**PUBLIC, "counts": dict.fromkeys(silos, 9)}
    with refused(r"\(sum\.(ratio|total)\) may hold what hardly changes between rounds"):
        blind("fedssa", options, security={**security, "dropouts": "any"}, silos=silos, **change)
    assert blind("fedssa", options, security=security, silos=silos).security.required


def test_bounds_of_private_weights_bound_something(blind):
    with refused(r"security\.weight_most = 50 does nothing: this job's weights stand in counts"):
        blind(security={**PUBLIC, "weight_most": 50})
    with refused("weight_least = 2 does nothing"):  # the weights of its rows are 0 or 1
        blind("fedssa", security={**PUBLIC, "weight_least": 2})
    # weighted by how many records a class has
    prototypes = {"name": "convnet-digits", "norm": "group"}
    job = blind("fedaims", model=prototypes, security={**PUBLIC, "weight_most": 50})
    assert job.security.weight_most == 50


MEMBERSHIP = {"release_membership": "last"}  # of PPFL: who belongs where, in the clear


@pytest.mark.parametrize(
    "method", ["fedavg", "fedavg-ft", "fedprox", "ditto", "apfl", "pfedme", "per-fedavg", "ppfl"]
)
def test_declared_counts_cannot_stand_for_weights_of_one(blind, make_job, method):
    equal = {"weights": "equal"}
    said = r"counts each silo once, .* write security.weights = \"private\""
    with refused(f"part 'model' {said}"):
        blind(method, equal, PUBLIC)
    assert blind(method, equal).security.weights == "private"
    assert blind(method, {"weights": "samples"}, PUBLIC).security.weights == "public"
    in_the_clear = make_job(method, equal, silos=list("abcd"))
    assert next(part for part in in_the_clear.up(0) if part.name == "model").given[-1].most == 1


def test_what_cannot_be_blind_is_refused_with_the_methods_that_would_do(blind):
    model = {"name": "convnet-digits", "norm": "group"}
    crosses = (
        r"part 'membership' \(membership\) crosses by 'each' from round 4 on, which has no blind"
        r" form: choose"
    )
    with refused(crosses) as caught:
        blind("ppfl", MEMBERSHIP, model=model)
    said = str(caught.value)
    assert said.endswith(', or write security.secure_aggregation = "off"')
    named = said.partition("no such part (")[2].partition(")")[0].split(", ")
    assert METHODS.keys() - set(named) == {
        "fedfomo",
        "fedgen",
        "fedgh",
        "fedpac",
        "fedsimsup",
        "pfedhn",
    }
    for name in named:
        assert blind(name, model=model).document()


def test_where_no_method_would_do_none_is_named(blind, monkeypatch):
    monkeypatch.setattr("staddle.algorithms.job.job.METHODS", {"fedsimsup": METHODS["fedsimsup"]})
    with refused(r'has no blind form: write security\.secure_aggregation = "off"$'):
        blind("ppfl", MEMBERSHIP)


@pytest.mark.parametrize("kind", DISCLOSED)
def test_inner_products_that_tell_the_vectors_are_refused(blind, kind):
    phase = {
        "from_round": 2,
        "up": [{"name": "p", "kind": kind.name, "exchange": "gram", "tensors": []}],
    }
    job = blind()
    said = no_blind_form(Crossing(job, job.method(), [phase], lambda: ["fedavg"]))
    assert said.startswith(
        f"part 'p' ({kind.name.lower()}) crosses by 'gram' from round 2 on, which has no blind form"
    )


KEYED = [
    ("pfedsim", {}, {}),
    ("pfedsim", {"similarity": "per_class", "rho": 0}, {}),
    ("fedaims", {"sampling": "algorithm2"}, {"model": {"name": "convnet-digits", "norm": "group"}}),
    ("fedsimsup", {"similarity": "samples"}, {"silos": list("abcde"), "participation": 0.8}),
]


@pytest.mark.parametrize(("method", "options", "fields"), KEYED)
def test_what_is_mixed_or_compared_takes_a_key_of_the_silos(
    blind, make_job, method, options, fields
):
    own = {"silos": list("abcd"), "min_cohort": 3, **fields}
    security = {**(ANY if "participation" in own else PUBLIC)}
    security["counts"] = dict.fromkeys(own["silos"], 20)
    assert blind(method, options, security=security, **own).keyed
    assert not make_job(method, options, **own).keyed  # the same in the clear


SUMMING = {"ppfl": {"lam": 0.0}, "pfedsim": {"rho": 1.0}}
SUMMING["pfedsim"] = {"rho": 1.0}


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedprox", "fedbabu", *SUMMING])
def test_methods_that_only_sum_are_taken_and_tag_their_sums_unless_the_job_says_no(blind, method):
    options = SUMMING.get(method)
    job = blind(method, options)
    assert job.keyed
    without = blind(method, options, security={**BLIND, "tags": False})
    assert not without.keyed
    assert without.digest != job.digest


@pytest.mark.parametrize(
    ("named", "key", "value"), [("tags = false", "tags", False), ("audience", "audience", "silos")]
)
def test_where_no_sum_comes_down_there_is_nothing_to_tag(blind, named, key, value):
    job = blind("local")
    assert (job.security.tags, job.keyed) == (True, False)
    with refused(rf"security\.{named} does nothing: no sum comes down to silos as it was"):
        blind("local", security={**BLIND, key: value})


UNTAGGED = [("pfedsim", {}), ("fedssa", {}), ("ppfl", {}), ("fedavg", {"audience": "silos"})]


@pytest.mark.parametrize(("method", "own"), UNTAGGED)
def test_where_silos_share_a_key_in_any_case_they_do_not_do_without_tags(blind, method, own):
    assert blind(method, security={**BLIND, **own}).keyed
    with refused(r"tags = false does nothing: its silos share a key for .*; take it out"):
        blind(method, security={**BLIND, **own, "tags": False})


def test_a_mix_of_changing_silos_takes_declared_counts(blind):
    """A mix of changing silos takes declared counts though nothing is weighted by them."""
    some = {"silos": list("abcdef"), "participation": 0.7}
    with refused(r"participation = 0\.7: 6 silos are too few for two batches"):
        blind("pfedsim", {"rho": 0}, **some)
    security = {**ANY, "counts": dict.fromkeys(some["silos"], 9)}
    assert blind("pfedsim", {"rho": 0}, security=security, **some).keyed


def test_a_mix_of_fewer_others_than_min_cohort_is_refused(blind):
    said = (
        "part 'extractor' is mixed for each silo from at least min_cohort = 4 others, and there are"
        " 3: nobody would get anything; lower min_cohort, or name more silos"
    )
    with refused(said):
        blind("pfedsim", min_cohort=4)
    assert blind("pfedsim", {"rho": 1}, min_cohort=4)  # which mixes nothing
    assert blind("pfedsim", silos=list("abcde"), min_cohort=4).keyed


def test_what_is_mixed_is_within_the_words_of_a_mix(blind):
    with refused(r"values are 2\^30 at most, security\.clip_exponent = 31; lower it"):
        blind("pfedsim", security={**BLIND, "clip_exponent": 31})
    assert blind("pfedsim", security={**BLIND, "clip_exponent": 30}).keyed
    assert blind("fedavg", security={**BLIND, "clip_exponent": 31})


def test_vectors_that_are_too_long_to_rotate_are_refused(blind):
    model = {"name": "convnet-3x64", "norm": "group"}
    assert blind("fedaims", {"sampling": "algorithm2"}, model=model).keyed
    with refused(r"'direction' compares vectors of \d{5,} numbers, too long to be rotated"):
        blind("fedaims", {"sampling": "algorithm2", "sketch": 0}, model=model)


@pytest.mark.parametrize(
    ("method", "options", "weighing"),
    [
        ("fedavg", {}, COUNTS),
        ("pfedsim", {}, COUNTS),  # in its first phase
        ("pfedsim", {"rho": 0}, {}),
        ("local", {}, {}),
        ("fedssa", {}, {}),
    ],
)
def test_declared_counts_weigh_means_alone(blind, method, options, weighing):
    job = blind(method, options, PUBLIC)
    parts = [part for phase in job.document()["schema"] for part in phase["up"]]
    assert any(part["exchange"] == "sum.mean" for part in parts) == bool(weighing)
    assert job.weighing == weighing
    assert blind(method, options).weighing == {}


CLASSES = {"a": [20, 20, 0], "b": [30, 0, 0], "c": [10, 20, 20], "d": [45, 0, 0], "e": [0, 1, 29]}
FIVE = {**ANY, "counts": {silo: sum(own) for silo, own in CLASSES.items()}, "class_counts": CLASSES}


@pytest.fixture
def labels(blind):
    return lambda **changed: blind(
        "fedsimsup", {}, {**FIVE, **changed}, silos=list("abcde"), participation=0.8
    )


def test_declared_class_counts_stand_in_the_document_and_no_census_crosses(labels, make_job):
    job = labels()
    assert Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", ()) == job
    assert [[part["exchange"] for part in phase["up"]] for phase in job.document()["schema"]] == [
        ["sum.total"], ["mix", "sum.total"], ["mix", "sum.total"], []
    ]  # fmt: skip
    clear = make_job("fedsimsup", silos=list("abcde"), participation=0.8, min_cohort=3)
    assert [part.name for part in clear.up(0)] == ["census", "metrics"]
    assert (job.length, job.cohort(0)) == (clear.length, clear.cohort(0))  # the round stays


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"class_counts": {}},
            r"compares the labels of the silos, .* declare them, .* it lacks a, b, c, d, e"),
        ({"class_counts": {s: own for s, own in CLASSES.items() if s != "d"}}, "it lacks d$"),
        ({"class_counts": {**CLASSES, "x": [1, 1, 1]}},
            "class_counts has x, no silo of the job; take it out"),
        ({"class_counts": {**CLASSES, "b": [30, 0]}},
            r"counts\.b has 2 numbers, model\.classes = 3; give one for"),
        ({"class_counts": {**CLASSES, "b": [29, 0, 0]}},
            r"counts\.b adds up to 29, security\.counts\.b = 30; make"),
    ],
)  # fmt: skip
def test_class_counts_are_of_the_jobs_silos_and_classes(labels, changed, said):
    with refused(said):
        labels(**changed)


@pytest.mark.parametrize(
    ("method", "options"), [("fedavg", {}), ("fedsimsup", {"similarity": "samples"})]
)
def test_class_counts_of_a_method_that_compares_no_labels_are_refused(blind, method, options):
    share = {} if method == "fedavg" else {"participation": 0.8}
    with refused(r"security\.class_counts does nothing: no labels are compared; take it out"):
        blind(method, options, FIVE, silos=list("abcde"), **share)


def test_bounds_are_those_of_the_sum():
    """Which algorithms must not import: security knows algorithms, not the other way round."""
    assert MOST_SILOS == spec.MOST_SILOS
    assert LARGEST_MIX_CLIP == mix_context.LARGEST_CLIP
    assert LONGEST_COMPARED == rotated_sketch.LARGEST
    for value, bad in ((-64, -65), (62, 63)):
        SecurityTable.model_validate({**BLIND, "clip_exponent": value})
        fixedpoint.Group(name="g", elements=1, clip_exponent=value, weights="equal")
        with pytest.raises(ValueError, match="clip_exponent"):
            fixedpoint.Group(name="g", elements=1, clip_exponent=bad, weights="equal")


def test_the_longest_job_says_quickly_what_would_do(make_job):
    options = {"release_membership": "last"}
    job = make_job(
        "ppfl", options, rounds=100_000, silos=list("abcd"), min_cohort=3, security=BLIND
    )
    with refused("fedavg"):
        job.document()


def test_a_directed_mix_stands_in_the_schema_and_is_keyed(labels):
    job = labels(mix="directed")
    assert Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", ()) == job
    part, _ = job.up(1)
    assert (part.name, part.exchange) == ("theta", Mix(directed=True))
    assert job.down(2)[0].exchange == Mix(directed=True)
    second = job.document()["schema"][1]
    assert [part["exchange"] for part in second["up"]] == ["mix.directed", "sum.total"]
    assert job.keyed
    assert job.digest != labels().digest
    for round_ in range(job.length):
        assert {*job.away(round_)} == {*job.silos} - {*job.cohort(round_)}
    with refused(r"values are 2\^30 at most, security\.clip_exponent = 31; lower it"):
        labels(mix="directed", clip_exponent=31)


SHARED = {**BLIND, "compare": "shared"}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pfedsim", {"rho": 0.5, "similarity": "mean"}),
        ("pfedsim", {"rho": 0.5, "similarity": "per_class"}),
        ("cfl", {"start": 1, "sketch": 0}),  # whole vectors
    ],
)
def test_a_comparison_by_shares_stands_in_the_schema(blind, method, options):
    job = blind(method, options, security=SHARED)
    assert Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", ()) == job
    _, compared, _ = job.up(job.length - 2)
    assert compared.exchange == Gram(shared=True)
    last = job.up(job.length - 1)[1]
    assert method == "cfl" or (last.name, last.exchange) == ("rows", Gram(shared=True))
    exchanges = [part["exchange"] for part in job.document()["schema"][1]["up"]]
    assert exchanges == ["mix", "gram.shared", "sum.total"]
    assert method == "cfl" or job.digest != blind(method, options).digest


@pytest.mark.parametrize(
    ("method", "options", "silos", "why"),
    [
        ("fedavg", None, 4, r'compare = "shared" does nothing: no part is compared; take it out'),
        ("pfedsim", {"rho": 0.0}, 900, r"900 silos deal [\d,]+ bytes to each silo"),
        ("cfl", {"start": 1, "sketch": 8}, 4,
            r"crosses as sketches, whose map has to be a secret of the silos"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_by_shares_is_refused(blind, method, options, silos, why):
    with refused(why):
        blind(method, options, security=SHARED, silos=[f"s{i}" for i in range(silos)])


def test_a_directed_mix_takes_weights_that_are_known_before_the_round(blind, labels, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("staddle.algorithms.methods.pfedsim.PFedSim.directed_for", "")
        with refused(r'mix = "directed": the weights by which part .extractor. is mixed follow'):
            blind("pfedsim", {"rho": 0.2}, security={**BLIND, "mix": "directed"})
    with refused(r'mix = "directed" does nothing: no part is mixed; take it out'):
        blind("fedavg", security={**BLIND, "mix": "directed"})
    monkeypatch.setattr("staddle.algorithms.job.blind_rules.MOST_DIRECTED", 35)
    with refused(r"1 silos are away in a round, each with its own weights of 4, more than one"):
        labels(mix="directed")


def test_rows_for_members_are_of_one_in_league_at_most_and_of_enough_others(blind, monkeypatch):
    directed = {**BLIND, "mix": "directed"}
    job = blind("pfedsim", {"rho": 0.2}, security=directed)
    assert job.up(1)[0].exchange == Mix(directed=True)
    assert job.row_readers(1) == job.cohort(1) == job.silos
    assert job.together == job.batches == (job.silos,)  # private weights: all of them or none
    silos = list("abcdefgh")
    counted = {**PUBLIC, "counts": dict.fromkeys(silos, 30), "mix": "directed"}
    job = blind("pfedsim", {"rho": 0.2}, counted, silos=silos)
    assert job.together == job.batches != (tuple(silos),)
    alone = blind("pfedsim", {"rho": 0.2}, {**counted, "dropouts": "any"}, silos=silos)
    assert alone.together == tuple((silo,) for silo in silos)
    with refused(r"security\.colluders = 2: .* lower colluders to 1, or take mix out"):
        blind("pfedsim", {"rho": 0.2}, {**counted, "colluders": 2}, silos=silos)
    with refused(r"at least min_cohort = 4 others of it, and there are 3: .* lower min_cohort"):
        blind("pfedsim", {"rho": 0.2}, counted, silos=silos, participation=0.5, min_cohort=4)
    with refused(r'mix = "directed" does nothing: no part is mixed; take it out'):
        blind("pfedsim", {"rho": 0.99}, security=directed)
    monkeypatch.setattr("staddle.algorithms.job.blind_rules.MOST_DIRECTED", 143)
    with refused(r"4 silos are in a round, each with its own weights of 4, more than one"):
        blind("pfedsim", {"rho": 0.2}, security=directed)


def test_names_of_readers_are_no_silos_of_a_directed_mix(blind):
    silos = ["a", "b", "c", "d", "silos"]
    security = {**ANY, "counts": dict.fromkeys(silos, 30), "mix": "directed"}
    with refused(r"a silo named 'silos'"):
        blind("fedsimsup", {"similarity": "samples"}, security, silos=silos, participation=0.8)

import hashlib
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from staddle.errors import LocalError
from staddle.security.dp.budget_records import Limit
from staddle.security.policy import policy as policies
from staddle.security.policy.data_sets import DataSets
from staddle.security.policy.file import KindName
from staddle.security.policy.globs import check_glob, matches
from staddle.security.policy.release import ITEM_BYTES, MASKED, SUM_READER, Release
from staddle.security.secagg.spec import Terms

TEXT = """
version = 1
[limits]
max_bytes_per_round = "4KiB"
[control]
max_messages = 100_000
max_bytes = "16MiB"
[[allow]]
name = "update"
methods = ["fedavg"]
parts = ["model"]
kinds = ["whole_model"]
tensors = ["features.**", "@weight"]
never = ["**.running_*"]
dtypes = ["float32", "float64"]
max_elements = 500
recipients = ["coordinator"]
readers = ["coordinator", "silo-b"]
[[allow]]
name = "wide"
methods = ["fedavg", "fedsim"]
parts = ["model", "metric"]
kinds = ["whole_model", "metric"]
tensors = ["**"]
dtypes = ["float64"]
max_elements = 2
recipients = ["coordinator"]
readers = ["coordinator"]
forms = ["plain", "masked"]
"""
GOOD = {
    "part": "model", "kind": "whole_model", "name": "features.0.weight", "dtype": "float32",
    "shape": (6, 5),
}  # fmt: skip


def released(**changes):
    return Release(**{**GOOD, **changes})


def policy(text=TEXT):
    return policies.parse(text.encode(), "policy.toml").on(None)


def decide(*releases, method="fedavg", recipient="coordinator", readers=("coordinator",), sent=0):
    return policy().decide(method, releases, recipient, readers, sent)


def test_what_the_rule_names_may_leave():
    decision = decide(released(), released(name="@weight", dtype="float64", shape=()))
    assert (decision.allow, decision.rule, decision.reasons) == (True, "update", ())


@pytest.mark.parametrize(("change", "said"), [
    ({"name": "head.weight"}, "no glob of tensors"),
    ({"name": "features.1.running_mean"}, r"never has '\*\*.running_\*'"),
    ({"kind": "backbone"}, "'backbone' is not in kinds"),
    ({"dtype": "int64"}, "'int64' is not in dtypes"),
    ({"dtype": "complex64"}, "'complex64' is not in dtypes"),
    ({"form": "masked"}, "'masked' is not in forms"),
    ({"shape": (501,)}, "501 elements are over max_elements = 500"),
])  # fmt: skip
def test_step_2_each_dimension_of_a_tensor_is_denied(change, said):
    decision = decide(released(**change))
    assert not decision.allow
    assert decision.rule == "update"
    (reason,) = decision.reasons
    name = re.escape(change.get("name", GOOD["name"]))
    assert re.search(rf"^tensor model/{name}: rule 'update': .*{said}", reason)


@pytest.mark.parametrize(("call", "said"), [
    ({"recipient": "silo-b"}, "'silo-b' is not in recipients"),
    ({"readers": ("coordinator", "silo-c")}, "'silo-c' is not in readers"),
    ({"readers": ()}, "nobody says who can read it"),
    ({"method": "fedprox"}, r"no \[\[allow\]\] has method 'fedprox' and part 'model'"),
])  # fmt: skip
def test_step_2_each_dimension_of_the_message_is_denied(call, said):
    decision = decide(released(), **call)
    assert not decision.allow
    assert re.search(said, decision.reasons[0])


def test_step_1_a_message_without_tensors_is_denied():
    assert decide().reasons == ("message declares no tensor; declare what leaves",)
    assert not decide().allow


def test_step_3_a_tensor_declared_twice_is_denied():
    found = decide(released(), released()).reasons
    assert found == ("tensor model/features.0.weight is declared twice; declare it once",)


def test_step_4_bytes_of_the_round_add_up():
    assert decide(released(), sent=4096 - 120).allow
    assert decide(released(), sent=4096 - 119).reasons == (
        "4097 bytes this round are over max_bytes_per_round = 4096; raise it if they may leave",
    )


def test_first_rule_alone_decides_though_a_later_one_would_allow():
    tensor = released(name="head.bias", dtype="float64", shape=(2,))
    assert not decide(tensor).allow
    assert decide(tensor, method="fedsim").allow  # where the later one is the first


def test_all_reasons_are_listed_and_one_bad_tensor_denies_the_message():
    bad = Release("model", "backbone", "head.w", "int64", (1000,), "masked")
    decision = decide(released(), bad, recipient="x", readers=("y",))
    assert not decision.allow
    assert sum("head.w" in reason for reason in decision.reasons) == 7
    assert sum("features.0.weight" in reason for reason in decision.reasons) == 2
    other = Release("secret", "backbone", "w", "float32", (1,))
    decision = decide(released(), other)
    assert (decision.allow, decision.rule) == (False, "update, default-deny")


def test_without_rules_nothing_leaves():
    bare = policy(TEXT[: TEXT.index("[[allow]]")])
    assert not bare.decide("fedavg", [released()], "coordinator", ["coordinator"]).allow


def test_the_parts_of_a_decision():
    """A verdict for each tensor, and the reasons of the whole message."""
    good, head = released(), released(name="head.w")
    secret = Release("secret", "backbone", "w", "float32", (1000,))
    decision = decide(good, head, secret)
    globs = ["features.**", "@weight"]
    no_glob = (
        f"tensor model/head.w: rule 'update': no glob of tensors = {globs} matches; add one if it"
        " may leave"
    )
    no_rule = (
        "tensor secret/w: no [[allow]] has method 'fedavg' and part 'secret'; add one if it may"
        " leave"
    )
    assert [(v.release, v.rule, v.reasons) for v in decision.tensors] == [
        (good, "update", ()), (head, "update", (no_glob,)), (secret, "default-deny", (no_rule,)),
    ]  # fmt: skip
    assert decision.whole == (
        "4240 bytes this round are over max_bytes_per_round = 4096; raise it if they may leave",
    )
    assert decision.reasons == (no_glob, no_rule, *decision.whole)
    assert (decision.allow, decision.rule) == (False, "update, default-deny")


@pytest.mark.parametrize(("old", "new", "said"), [
    ("never", "nevr", "unknown key 'allow.0.nevr'; did you mean 'never'"),
    ("max_bytes_per_round", "max_byte_per_round", "did you mean 'max_bytes_per_round'"),
    ("version = 1", "version = 2", "version = 2: "),
    ('"4KiB"', '"4 kB"', "max_bytes_per_round = '4 kB': is not a size"),
    ('"4KiB"', "-1", "= -1: give 0 or more"), ('"4KiB"', "1.5", "max_bytes_per_round = 1.5"),
    ('"whole_model"', '"whole-model"', "kinds.0 = 'whole-model'"),
    ('"float32"', '"float16"', "dtypes.0 = 'float16'"),
    ('"features.**"', '"features**"', "is not a glob"),
    ('"features.**"', '"features..x"', "is not a glob"),
    ('["fedavg"]', "[]", "allow.0.methods: give a list of 1 or more"),
    ("max_elements = 500\n", "", "missing key 'allow.0.max_elements'"),
    ("max_elements = 500\n", "max_elements = 500\nmax_norm = 0\n", "max_norm"),
    ("max_elements = 500\n", "max_elements = 500\nmax_norm = inf\n", "max_norm"),
    ("max_elements = 500\n", "max_elements = 500\nmax_norm = true\n", "max_norm"),
    ('"wide"', '"update"', "rules share the name 'update'"),
])  # fmt: skip
def test_bad_policy_files_name_key_value_and_fix(old, new, said):
    with pytest.raises(LocalError, match=f"^policy.toml: .*{said}"):
        policy(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(("attempts", "may"), [(0, True), (2, True), (3, False), (10**6, False)])
def test_a_round_has_so_many_attempts(attempts, may):
    limited = policy(TEXT.replace('"4KiB"\n', '"4KiB"\nmax_attempts_per_round = 3\n'))
    to = ("coordinator", ["coordinator"])
    decision = limited.decide("fedavg", [released()], *to, 0, attempts)
    assert decision.allow == may
    said = f"{attempts} uploads of this round were begun, max_attempts_per_round = 3; "
    assert may or [reason.startswith(said) for reason in decision.whole] == [True]


@pytest.mark.parametrize(("norms", "may"), [
    ({"model": 2.5}, True), ({"model": 2.5000001}, False), ({"model": float("inf")}, False),
    ({"model": float("nan")}, False), ({}, False),  # a bound on what nobody measured is no bound
    ({"model": 0.0, "metric": 9.0}, True), (None, True),  # before there are values
])  # fmt: skip
def test_step_6_a_part_is_no_longer_than_its_rule_lets_it_be(norms, may):
    bounded = policy(TEXT.replace("max_elements = 500", "max_elements = 500\nmax_norm = 2.5"))
    metric = Release("metric", "metric", "n", "float64", ())
    to = ("coordinator", ["coordinator"])
    found = bounded.decide("fedavg", [released(), metric], *to, norms=norms)
    assert found.allow is may, found.reasons
    if not may:
        (reason,) = found.whole
        assert reason.startswith("part 'model': rule 'update': its norm is ")
        assert "over max_norm = 2.5; raise it" in reason
    assert policy().decide("fedavg", [released()], *to, norms=norms).allow


def test_step_7_nothing_is_in_the_clear_where_sums_have_to_be_blind():
    blind = policy(TEXT + "[secure_aggregation]\nrequired = true\n")
    plain = Release("metric", "metric", "n", "float64", ())
    masked = Release(**{**GOOD, "dtype": "uint32", "form": MASKED})
    found = blind.decide("fedsim", [plain, masked], "coordinator", ["coordinator"])
    (reason,) = found.whole
    assert reason.startswith(
        "metric would leave in the form 'plain', and secure_aggregation.required = true; ask for"
    )
    assert not found.allow
    assert blind.decide("fedsim", [masked], "coordinator", ["coordinator"]).whole == ()
    assert policy().decide("fedsim", [plain], "coordinator", ["coordinator"]).whole == ()


def test_what_is_asked_of_blind_sums_is_that_of_rule_6_where_the_file_says_nothing():
    assert policy().terms == Terms() == Terms(min_cohort=3, min_honest=2, colluders=1)
    found = policy().file.secure_aggregation
    assert (found.required, found.public_counts) == (False, False)
    table = "[secure_aggregation]\nmin_cohort = 6\nmin_honest = 4\nassumed_colluders = 0\n"
    own = policy(f"{TEXT}{table}public_counts = true\n")
    assert own.terms == Terms(min_cohort=6, min_honest=4, colluders=0)
    assert own.file.secure_aggregation.public_counts
    assert own.file.secure_aggregation.min_holders is None  # as min_cohort
    assert own.file.secure_aggregation.least_difference == 4  # min_honest and assumed_colluders
    more = policy(f"{TEXT}{table}min_holders = 4\nmin_difference = 1\n").file.secure_aggregation
    assert (more.min_holders, more.least_difference) == (4, 1)


BAD = {
    "required": ("1", '"yes"'), "min_cohort": ("1", "3.0"), "min_honest": ("0", "true"),
    "min_holders": ("1", "3.0"), "min_difference": ("0", "9"), "assumed_colluders": ("-1",),
    "public_counts": ("0",), "colluders": ("1",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, v) for key, values in BAD.items() for v in values]
)
def test_bad_values_of_that_table_are_named(key, value):
    with pytest.raises(LocalError, match=rf"^policy.toml: .*secure_aggregation\.{key}"):
        policy(TEXT + f"[secure_aggregation]\n{key} = {value}\n")


def test_a_rule_for_masked_tensors_names_their_form_types_and_reader():
    readers = f'readers = ["{SUM_READER}"]\nforms = ["masked"]'
    masked = TEXT.replace('readers = ["coordinator", "silo-b"]', readers)
    masked = masked.replace('dtypes = ["float32", "float64"]', 'dtypes = ["uint32", "uint64"]')
    release = Release(**{**GOOD, "dtype": "uint64", "form": MASKED})
    assert policy(masked).decide("fedavg", [release], "coordinator", [SUM_READER]).allow
    for other, readers in (
        (released(), ["coordinator"]), (release, ["coordinator"]), (release, ["sum", "x"]),
    ):  # fmt: skip
        assert not policy(masked).decide("fedavg", [other], "coordinator", readers).allow


def test_attempts_are_limited_where_the_file_says_nothing():
    assert policy().file.limits.max_attempts_per_round == 100
    for bad in ("0", "-1", "1.0", '"3"'):
        with pytest.raises(LocalError, match=r"limits\.max_attempts_per_round = "):
            policy(TEXT.replace('"4KiB"\n', f'"4KiB"\nmax_attempts_per_round = {bad}\n'))


def test_sizes_and_digest(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(TEXT)
    loaded = policies.load(path)
    assert loaded.file.limits.max_bytes_per_round == 4096
    assert loaded.file.control.max_bytes == 16 * 1024**2
    assert loaded.digest == hashlib.sha256(TEXT.encode()).hexdigest()
    assert policy(TEXT.replace('"4KiB"', "77")).file.limits.max_bytes_per_round == 77


def test_release_defaults_to_private_and_knows_its_size():
    release = released()
    assert (release.taint, release.ledger_ids, release.form) == ("exact", (), "plain")
    assert (release.elements, release.nbytes) == (30, 120)
    with pytest.raises(LocalError, match="dtype 'complex64' cannot cross"):
        _ = Release(**{**GOOD, "dtype": "complex64"}).nbytes


def test_words_are_those_of_the_exchanges():
    exchange = pytest.importorskip("staddle.algorithms.exchange.parts")
    assert [kind.name.lower() for kind in exchange.Kind] == list(KindName.__args__)
    sizes = {name: dtype.itemsize for name, dtype in exchange.DTYPES.items()}
    assert sizes.items() <= ITEM_BYTES.items()


# Data sets.

DATASET = """
[dataset.cxr-2024]
unit = "record"
epsilon = 8.0
delta = 1e-5
"""
DP = Release(**GOOD, taint="noised", ledger_ids=(3,))
PRIVATE, PUBLIC = released(), Release(**GOOD, taint="public")


def governed(more="required = true\n", dataset="cxr-2024"):
    return policies.parse((TEXT + DATASET + more).encode(), "policy.toml", dataset).on(None)


@pytest.mark.parametrize(("release", "more", "may"), [
    (DP, "required = true\n", True), (PUBLIC, "required = true\n", True),
    (PRIVATE, "required = true\n", False), (PRIVATE, "required = false\n", True),
    (PRIVATE, "", True),
])  # fmt: skip
def test_8_what_is_computed_without_noise_is_held_back_where_that_is_required(release, more, may):
    decision = governed(more).decide("fedavg", [release], "coordinator", ["coordinator"])
    assert decision.allow == may
    why = (
        "model/features.0.weight would leave as computed from records without noise, and"
        " [dataset.cxr-2024] has required = true; ask for a job that is signed with [privacy] and"
        " gives nothing else, or set it to false"
    )
    assert decision.whole == (() if may else (why,))


def test_8_it_is_held_back_beside_what_is_protected_and_where_no_rule_has_it_too():
    names = [f"features.{number}.weight" for number in range(5)]
    releases = [Release(**{**GOOD, "name": name}, taint="exact") for name in names]
    (reason,) = (
        governed().decide("fedavg", [DP, *releases[1:]], "coordinator", ["coordinator"]).whole
    )
    named = (
        "model/features.1.weight, model/features.2.weight, model/features.3.weight and 1 more would"
        " leave"
    )
    assert reason.startswith(named)
    decision = governed().decide("local", [PRIVATE], "coordinator", ["coordinator"])
    assert (len(decision.tensors[0].reasons), len(decision.whole)) == (1, 1)


def test_a_data_set_has_its_table_by_name():
    found = governed("required = true\nmin_sigma = 0.5\nrecords_per_person = 3\n").budget
    assert (found.epsilon, found.delta, found.required) == (Decimal(8), Decimal("0.00001"), True)
    assert (found.min_sigma, found.records_per_person) == (Decimal("0.5"), 3)
    found = governed("").budget
    assert (found.required, found.min_sigma, found.records_per_person) == (False, None, 1)
    two = DATASET.replace("cxr-2024", "data").replace("8.0", "2")
    assert governed(two).budget.epsilon == 8
    assert governed(two, "data").budget.epsilon == 2
    assert policy().budget is None


@pytest.mark.parametrize("dataset", ["data", "cxr-2023", "", "CXR-2024"])
def test_a_data_set_that_the_policy_does_not_name_is_refused_where_it_names_others(dataset):
    why = f"names data set 'cxr-2024', and this silo has {dataset}; name it alike"
    with pytest.raises(LocalError, match=why):
        governed(dataset=dataset)
    # nothing is said of any
    assert policies.parse(TEXT.encode(), "policy.toml", dataset).on(None).budget is None


NAMED = TEXT.replace("[[allow]]", '[[allow]]\ndatasets = ["cxr-2024"]')
SETS = DataSets({"cxr-2024": "cxr-2024", "bloods": "bloods", "risks": "cxr-2024"})


def test_a_job_has_the_rules_and_the_budget_of_its_data_set():
    """The first rule for method, part and data set decides; one for another data set does not."""
    head, rule, _ = TEXT.split("[[allow]]\n")
    narrow = rule.replace("max_elements = 500", 'max_elements = 1\ndatasets = ["bloods"]')
    wide = rule.replace('name = "update"', 'datasets = ["cxr-2024"]\nname = "others"')
    text = f"{head}[[allow]]\n{narrow}[[allow]]\n{wide}{DATASET}"
    found = policies.parse(text.encode(), "policy.toml", SETS)
    ask = [[PRIVATE], "coordinator", ["coordinator"]]
    for asked, dataset in ((None, "cxr-2024"), ("risks", "cxr-2024"), ("bloods", "bloods")):
        own = found.on(asked)
        assert own.dataset == dataset
        assert own.decide("fedavg", *ask).allow == (dataset != "bloods")
        rule = "update" if dataset == "bloods" else "others"
        assert own.rule("fedavg", "model").name == rule
        assert (own.budget is None) == (dataset == "bloods")
    with refused("the job is for data set 'scans', and this silo has cxr-2024, bloods, risks"):
        found.on("scans")


def test_each_rule_names_its_data_sets_where_a_silo_has_several():
    """A silo that adds one opens nothing of it unasked, nor by a new order of them."""
    with refused("rule 'update' names no data set, and this silo has cxr-2024, bloods; add data"):
        policies.parse(TEXT.encode(), "policy.toml", SETS)
    one = DataSets({"cxr-2024": "cxr-2024", "risks": "cxr-2024"})
    found = policies.parse(TEXT.encode(), "policy.toml", one)
    assert found.on("risks").rule("fedavg", "model").name == "update"


def test_a_rule_for_a_data_set_that_the_silo_lacks_is_refused():
    """Else the next rule would decide in its place."""
    text = TEXT.replace("[[allow]]", '[[allow]]\ndatasets = ["bloods", "scans"]')
    with refused("names data set 'scans', and this silo has cxr-2024, bloods; name it alike"):
        policies.parse(text.encode(), "policy.toml", SETS)


def test_other_names_of_the_same_records_have_no_rules_or_budget_of_their_own():
    said = "names data set 'risks', whose records are those of 'cxr-2024' .*; write 'cxr-2024'"
    rule = TEXT.replace("[[allow]]", '[[allow]]\ndatasets = ["risks"]')
    table = NAMED + DATASET + DATASET.replace("cxr-2024", "risks")
    for text in (rule, table):
        with refused(said):
            policies.parse(text.encode(), "policy.toml", SETS)


def test_a_budget_that_is_of_no_data_set_is_refused_where_one_has_none():
    alone = policies.parse((NAMED + DATASET).encode(), "policy.toml", SETS)
    assert (alone.on("risks").budget.epsilon, alone.on("bloods").budget) == (8, None)
    other = DATASET.replace("cxr-2024", "blods")
    with refused("names data set 'blods', and this silo has cxr-2024, bloods; name it alike"):
        policies.parse((NAMED + DATASET + other).encode(), "policy.toml", SETS)
    both = DATASET + DATASET.replace("cxr-2024", "bloods")
    assert policies.parse((NAMED + both + other).encode(), "policy.toml", SETS).on("bloods").budget


def test_a_policy_alone_has_the_data_sets_that_its_rules_name(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(TEXT.replace("[[allow]]", '[[allow]]\ndatasets = ["bloods"]') + DATASET)
    with refused("names data set 'cxr-2024', and this silo has data, bloods"):
        policies.load_alone(path)
    found = policies.load_alone(path, "cxr-2024")
    assert list(found.datasets.records) == ["cxr-2024", "bloods"]
    assert found.on(None).budget.epsilon == 8


@pytest.mark.parametrize(("old", "new", "words"), [
    ('unit = "record"', 'unit = "person"', "unit = 'person'"),
    ('unit = "record"\n', "", r"missing key 'dataset\.cxr-2024\.unit'"),
    ("epsilon = 8.0", 'epsilon = "8.0"', "epsilon = '8.0'.*write it without quotes"),
    ("epsilon = 8.0", "epsilon = true", "epsilon = True"),
    ("epsilon = 8.0", "epsilon = inf", "epsilon = "),
    ("epsilon = 8.0", "epsilon = nan", "epsilon = "),
    ("epsilon = 8.0", "epsilon = 0", "epsilon = 0"),
    ("epsilon = 8.0", "epsilon = 1001", "epsilon = 1001"),
    ("epsilon = 8.0\n", "", r"missing key 'dataset\.cxr-2024\.epsilon'"),
    ("delta = 1e-5", "delta = 1", "delta = 1"), ("delta = 1e-5", "delta = 0", "delta = 0"),
    ("delta = 1e-5", "delta = 1e-21", "delta = 1e-21"),
    ("delta = 1e-5", "delta = 1e-5\nmin_sigma = 0", "min_sigma = 0"),
    ("delta = 1e-5", "delta = 1e-5\nrequired = 1", "required = 1"),
    ("delta = 1e-5", "delta = 1e-5\nrecords_per_person = 0", "records_per_person = 0"),
    ("delta = 1e-5", "delta = 1e-5\nrequire = true", "require"),
    ("cxr-2024", "Cxr_2024", "dataset"),
])  # fmt: skip
def test_a_table_of_a_data_set_that_is_none_is_refused(old, new, words):
    assert old in DATASET
    with pytest.raises(LocalError, match=words):
        policies.parse((TEXT + DATASET.replace(old, new)).encode(), "policy.toml", "cxr-2024")


@given(st.floats(1e-20, 1, exclude_max=True), st.floats(1e-9, 1000))
def test_decimals_are_those_that_a_budget_can_hold(delta, epsilon):
    text = DATASET.replace("1e-5", repr(delta)).replace("8.0", repr(epsilon))
    found = policies.parse((TEXT + text).encode(), "policy.toml", "cxr-2024").on(None).budget
    assert (float(found.delta), float(found.epsilon)) == (delta, epsilon)
    Limit(epsilon=format(found.epsilon, "f"), delta=format(found.delta, "f"), policy="ab" * 32)


def test_a_form_is_none_that_only_says_what_a_tensor_was_computed_from():
    with pytest.raises(LocalError, match="forms"):
        policy(TEXT.replace('forms = ["plain", "masked"]', 'forms = ["dp"]'))


def slowly(glob, name):
    """By definition: try every number of segments, and every split of a segment."""

    def segment(want, have):
        if not want:
            return not have
        if want[0] == "*":
            return any(segment(want[1:], have[n:]) for n in range(len(have) + 1))
        return have[:1] == want[0] and segment(want[1:], have[1:])

    def whole(want, have):
        if not want:
            return not have
        if want[0] == "**":
            return any(whole(want[1:], have[n:]) for n in range(len(have) + 1))
        return bool(have) and segment(want[0], have[0]) and whole(want[1:], have[1:])

    return whole(glob.split("."), name.split("."))


SEGMENT = st.text("ab*", min_size=1, max_size=4).filter(lambda s: "**" not in s)
GLOB = st.lists(SEGMENT | st.just("**"), min_size=1, max_size=4).map(".".join)
NAME = st.lists(st.text("ab", max_size=4), min_size=1, max_size=4).map(".".join)


@given(GLOB, NAME)
def test_globs_agree_with_the_slow_oracle(glob, name):
    assert check_glob(glob) == glob
    assert matches(glob, name) == slowly(glob, name)


def test_globs():
    yes = [
        "features.* features.0", "features.** features", "features.** features.0.w", "** a.b",
        "**.x.** x",
    ]  # fmt: skip
    yes += ["**.running_* bn.1.running_mean", "a.**.z a.z", "a*b*c aXbXc", "*.w a.w", "* "]
    no = [
        "features.* features.0.w", "features feature", "feature features", "a.* a", "aba* ab",
        "a*a a", "[ab] a",
    ]  # fmt: skip
    no += ["features.** xfeatures.0", "*.w w", "? a", "a.b a-b", "a A", "w head.w"]
    assert [matches(*line.split(" ")) for line in yes] == [True] * len(yes)
    assert [matches(*line.split(" ")) for line in no] == [False] * len(no)


def test_hostile_globs_take_no_time():
    assert not matches(".".join(["**"] * 40 + ["b"]), ".".join(["a"] * 400))
    assert not matches("*a" * 200 + "b", "a" * 20_000)

import json
import sys

import pytest
from support.jobs import make_job
from support.signed_federation import job_document
from support.start_weights import save_start, start_table
from typer.testing import CliRunner

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.exchange.parts import Kind
from staddle.algorithms.job.job import Job
from staddle.algorithms.job.privacy import job_spends
from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.commands.policy.draft import WHAT, draft
from staddle.commands.privacy.noise import planned
from staddle.commands.terminal import job_example
from staddle.errors import LocalError, RefusedError
from staddle.files.documents import parse_json
from staddle.security.blind.plan import JobPlan
from staddle.security.dp.rdp import cost, shown
from staddle.security.identity import roster as rosters
from staddle.security.policy import policy as policies
from staddle.security.policy.data_sets import DataSets
from staddle.security.preflight import size
from staddle.silo import config as configs
from staddle.silo.admission.checks import outflows, sum_objections
from staddle.silo.admission.private_jobs import privacy_objections
from staddle.silo.admission.signed_sets import tells_fixed

SILOS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return local_federation.make(tmp_path_factory.mktemp("drafting") / "federation", SILOS)


@pytest.fixture(scope="module")
def roster(federation):
    return rosters.load(federation.folder / "roster.json")


@pytest.fixture(scope="module")
def jobs(federation, tmp_path_factory):
    """The example job of each method."""
    folder, found = tmp_path_factory.mktemp("jobs"), {}
    for name in METHODS:
        path = folder / f"{name}.toml"
        path.write_text(job_example.job_text(name, purpose="For a test"))
        found[name] = Job.from_toml(path)
    return found


def parsed(text):
    return policies.parse(text.encode(), "policy.toml").on(None)


def leaves(job, roster, policy):
    """All that the job gives may leave."""
    return all(outflow.decision.allow for outflow in outflows(JobPlan(job), roster, policy))


def check_agreed(job, policy, roster):
    """The policy has nothing against the job, and lets all of it leave."""
    assert sum_objections(JobPlan(job), policy, roster) == ()
    assert leaves(job, roster, policy)


def flowing(*jobs):
    """The draft of these jobs without its line breaks."""
    return " ".join(draft(jobs).replace("\n# ", " ").split())


def blind_rules(policy):
    """What a policy says of blind sums beside the defaults."""
    return policy.file.secure_aggregation.model_dump(exclude_defaults=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_allows_its_job_and_no_other_method(roster, jobs, method):
    policy = parsed(draft([jobs[method]]))
    assert leaves(jobs[method], roster, policy)
    for other, job in jobs.items():
        allowed = [
            verdict
            for flow in outflows(JobPlan(job), roster, policy)
            for verdict in flow.decision.tensors
        ]
        assert other == method or all(verdict.reasons for verdict in allowed)


def test_a_draft_is_of_the_largest_round_twice(federation, jobs):
    """One round's bytes, and once more what a broken upload sends again.

    A byte more does not leave.
    """
    roster, job = rosters.load(federation.folder / "roster.json"), jobs["pfedsim"]
    largest = max(flow.size for flow in outflows(JobPlan(job), roster, parsed(draft([job]))))
    limit = policies.parse(
        draft([job, jobs["local"]]).encode(), "p"
    ).file.limits.max_bytes_per_round
    assert 2 * largest <= limit < 2 * largest + 1024


def lenet(side):
    return {"name": "lenet5", "classes": 10, "input": [3, side, side]}


def test_a_draft_is_of_the_smallest_cells_that_its_jobs_count(jobs):
    assert "min_cell" not in draft([jobs["fedavg"]])
    model = {"name": "glm", "classes": 2, "class_names": ["a", "b"], "input": [1, 1, 1]}
    features = [{"name": "age", "least": 0, "most": 120}]
    counting = [
        make_job("statistics", {"fewest": fewest}, model, rounds=1, features=features)
        for fewest in (7, 2)
    ]
    assert parsed(draft([counting[0], jobs["fedavg"]])).file.limits.min_cell == 7
    assert parsed(draft(counting)).file.limits.min_cell == 2


def test_a_draft_of_several_jobs_has_each_rule_once_with_the_larger_tensors(jobs, federation):
    method = {"name": "fedper"}
    small, large = (
        local_federation.sign_job(
            federation, job_document(SILOS, name=name, method=method, model=model)
        )
        for name, model in (("small", lenet(32)), ("large", lenet(48)))
    )
    for pair in ([small, large], [large, small]):
        rules = {rule.name: rule for rule in parsed(draft(pair)).file.allow}
        assert set(rules) == {"fedper-extractor", "fedper-metrics"}
        (extractor,) = (part for part in large.up(0) if part.name == "extractor")
        most = max(spec.elements for spec in extractor.tensors)
        assert rules["fedper-extractor"].max_elements == most
        assert "'small', 'large'" in draft([small, large])


def test_a_draft_of_jobs_on_data_sets_has_rules_and_a_budget_for_each(federation, roster):
    """What one data set's jobs upload is allowed of no other."""
    privacy = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.25}
    first, other, private = (
        local_federation.sign_job(federation, job_document(SILOS, name=name, **fields))
        for name, fields in (
            ("first", {"method": {"name": "fedavg"}}),
            ("other", {"method": {"name": "fedper"}, "dataset": "scans"}),
            ("private", {"method": {"name": "fedavg"}, "dataset": "bloods", "privacy": privacy}),
        )
    )
    names = DataSets({name: name for name in ("heart", "scans", "bloods")})
    policy = policies.parse(draft([first, other, private], datasets=names).encode(), "p", names)
    assert {rule.name: rule.datasets for rule in policy.file.allow} == {
        "fedavg-model-heart": ("heart",), "fedavg-metrics-heart": ("heart",),
        "fedper-extractor-scans": ("scans",), "fedper-metrics-scans": ("scans",),
        "fedavg-model-bloods": ("bloods",), "fedavg-metrics-bloods": ("bloods",),
    }  # fmt: skip
    assert list(policy.file.dataset) == ["bloods"]
    assert policy.file.dataset["bloods"].required
    for job in (first, other, private):
        check_agreed(job, policy.on(job.dataset), roster)
    for job in (first, private):
        (flow, *_) = outflows(JobPlan(job), roster, policy.on("scans"))
        assert not flow.decision.allow


def test_jobs_on_the_same_records_share_rules_and_a_budget(federation, roster):
    """Under the name of the data set that has these records."""
    privacy = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.25}
    heart, risks = (
        local_federation.sign_job(federation, job_document(SILOS, name=name, **fields))
        for name, fields in (
            ("hearts", {"dataset": "heart", "privacy": privacy}),
            ("risks", {"dataset": "risks", "metrics": {"confusion": True}, "privacy": privacy}),
        )
    )
    names = DataSets({"data": "data", "heart": "heart", "risks": "heart"})
    policy = policies.parse(draft([heart, risks], datasets=names).encode(), "p", names)
    assert {rule.datasets for rule in policy.file.allow} == {("heart",)}
    assert list(policy.file.dataset) == ["heart"]
    for job in (heart, risks):
        check_agreed(job, policy.on(job.dataset), roster)


def test_a_policy_is_drafted_for_the_data_sets_of_a_configuration(federation, roster, tmp_path):
    document = job_document(SILOS, name="alias", dataset="risks")
    job = local_federation.sign_job(federation, document)
    silo = tmp_path / "silo.toml"
    silo.write_text(SILO_TOML)
    signed, out = federation.folder / "jobs" / "alias.json", tmp_path / "policy.toml"
    given = ("--roster", federation.folder / "roster.json", "--config", silo, "--out", out)
    done = run("new", signed, *given)
    assert done.exit_code == 0, (done.output, done.exception)
    policy = policies.load(out, configs.load(silo).names)
    assert {rule.datasets for rule in policy.file.allow} == {()}  # there is but one
    check_agreed(job, policy.on("risks"), roster)
    silo.write_text(SILO_TOML + '[datasets.scans.data]\nfile = "scans.npz"\n')
    assert run("new", signed, *given[:-1], tmp_path / "other.toml").exit_code == 0
    policy = policies.load(tmp_path / "other.toml", configs.load(silo).names)
    assert {rule.datasets for rule in policy.file.allow} == {("heart",)}


def test_a_rule_of_a_long_name_has_a_name_of_its_own(federation):
    long = ["d" * 63 + end for end in "ab"]
    jobs = [
        local_federation.sign_job(
            federation, job_document(SILOS, name=f"long-{own[-1]}", dataset=own)
        )
        for own in long
    ]
    names = DataSets(dict(zip(long, long, strict=True)))
    found = policies.parse(draft(jobs, datasets=names).encode(), "p", names)
    assert len({rule.name for rule in found.file.allow}) == 4


SILO_TOML = """
version = 1
coordinator = "localhost:1"
directory = "state"
keys = "keys"
roster = "roster.json"
policy = "policy.toml"
dataset = "heart"

[trust]
federation = "local"
founders = ["SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"]
threshold = 1

[data]
file = "heart.npz"

[datasets.risks]
records_of = "heart"

[datasets.risks.data]
file = "heart.npz"
"""


def test_a_draft_says_of_each_rule_what_it_is(jobs):
    assert set(WHAT) == set(Kind)
    text = draft([jobs["fedssa"]])
    said = " ".join(text.replace("\n# ", " ").split())
    assert (
        "'rows': rows of the last layer, one per class; they reveal which classes this silo has."
        in said
    )
    assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("#"))


BLIND = {"secure_aggregation": "required"}
PUBLIC = {**BLIND, "weights": "public", "counts": dict.fromkeys("abcd", 30)}


@pytest.fixture
def signed(federation):
    """Sign jobs of four silos that differ in method and [security]."""

    def call(name, security=None, method="fedavg", options=None, **fields):
        silos, method = fields.pop("silos", "abcd"), {"name": method, "options": options or {}}
        fields = {"name": name, "min_cohort": 3, "method": method, **fields}
        document = job_document(silos, **fields, security=security or {})
        return local_federation.sign_job(federation, document)

    return call


@pytest.mark.parametrize("method", ["local", "fedavg", "fedssa", "ppfl"])
@pytest.mark.parametrize(
    ("security", "silos", "asked"),
    [
        (BLIND, "abcd", {"required": True}),
        (PUBLIC, "abcd", {"required": True, "public_counts": True}),
        ({**BLIND, "colluders": 0}, "abc", {"required": True, "assumed_colluders": 0}),
        ({**BLIND, "colluders": 2}, "abcdefg", {"required": True}),
    ],
)
def test_a_draft_for_blind_sums_allows_these(roster, signed, method, security, silos, asked):
    # declared counts stand for no other weights
    counted = {"weights": "samples"} if method == "ppfl" else {}
    job = signed("blind", security, method, counted, silos=list(silos))
    policy = parsed(draft([job], trust=True))
    check_agreed(job, policy, roster)
    trust = {"trust": "non-colluding-coordinator"} if job.counted else {}
    fewest = 2 if security.get("colluders") == 0 else 3
    least = {"min_difference": fewest} if tells_fixed(job) else {}
    assert blind_rules(policy) == asked | trust | least
    for rule in policy.file.allow:
        assert (rule.forms, rule.readers) == (("masked",), ("sum",))
        assert set(rule.dtypes) <= {"uint32", "uint64"}
    plain = outflows(JobPlan(signed("plain", method=method)), roster, policy)
    assert not any(flow.decision.allow for flow in plain)
    assert all(verdict.reasons for flow in plain for verdict in flow.decision.tensors)


def test_a_draft_of_jobs_of_both_kinds_allows_both(roster, signed):
    both = [signed("plain"), signed("blind", PUBLIC)]
    policy = parsed(draft(both))
    for job in both:
        check_agreed(job, policy, roster)
    assert blind_rules(policy) == {"public_counts": True, "min_difference": 3}
    rule = policy.rule("fedavg", "model")
    assert (rule.forms, rule.readers) == (("plain", "masked"), ("coordinator", "sum"))
    assert rule.dtypes == ("float32", "float64", "uint32")
    said = flowing(*both)
    assert "bytes per round, in the clear; " in said
    assert "masked: only their sum over a round's silos can be read." in said


def test_a_draft_for_jobs_that_mix_and_compare_says_whom_it_trusts(roster, signed):
    job = signed("keyed", {**BLIND, "clip_exponent": 6}, "pfedsim")
    policy = parsed(draft([job], trust=True))
    check_agreed(job, policy, roster)
    asked = blind_rules(policy)
    assert asked == {"required": True, "min_difference": 3, "trust": "non-colluding-coordinator"}
    forms = {rule.parts[0]: (rule.forms, rule.readers, rule.dtypes) for rule in policy.file.allow}
    assert forms == {
        "model": (("masked",), ("sum",), ("uint64",)),
        "metrics": (("masked",), ("sum",), ("uint64",)),
        "extractor": (("padded",), ("mix",), ("uint64",)),
        "rows": (("rotated",), ("gram",), ("float32",)),
    }
    said = flowing(job)
    assert "If any one of these silos colludes with the coordinator" in said
    assert (
        "per round, padded: each silo can read its own weighted mean of the others and nothing else"
        in said
    )
    assert "per round, rotated: the coordinator can read how similar the silos' vectors are" in said
    assert "trust" not in draft([signed("summing", BLIND)])


def test_a_draft_for_a_job_that_compares_by_shares_says_that_no_vector_is_read(roster, signed):
    security = {"secure_aggregation": "required", "compare": "shared"}
    job = signed("shared", security, "pfedsim", {"rho": 0.0})
    text = draft([job], trust=True)
    policy = parsed(text)
    assert leaves(job, roster, policy)
    rule = policy.rule("pfedsim", "rows")
    assert (rule.forms, rule.readers, rule.dtypes) == (("masked",), ("gram",), ("uint64",))
    said = " ".join(text.replace("#", " ").split())
    assert (
        "as secret shares sealed from silo to silo: the coordinator can read how similar the silos'"
        " vectors are" in said
    )


def test_a_draft_says_what_the_steps_of_silos_that_share_noise_are():
    privacy = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.5, "noise": "shared"}
    security = {"secure_aggregation": "required"}
    fields = {"silos": list("abcd"), "min_cohort": 3, "security": security}
    said = flowing(planned(make_job("fedavg", privacy=privacy, **fields), "job"))
    assert "'steps': by how much this silo's records would change each parameter" in said
    assert "in jobs that protect whole silos, how they changed it in a round" in said
    assert "all parameters of the trained model" not in said


def test_a_draft_for_sums_that_silos_alone_read_says_so_and_whom_it_trusts(roster, signed):
    job = signed("hidden", {**BLIND, "audience": "silos"}, "ppfl")
    other = signed("open", BLIND, "ppfl")
    policy = parsed(draft([job], trust=True))
    check_agreed(job, policy, roster)
    assert not leaves(other, roster, policy)
    asked = blind_rules(policy)
    assert asked == {"required": True, "min_difference": 3, "trust": "non-colluding-coordinator"}
    readers = {rule.parts[0]: (rule.forms, rule.readers) for rule in policy.file.allow}
    masked = ("masked",)
    silos = dict.fromkeys(("holders", "model", "coupling"), (masked, ("silos",)))
    assert readers == {**silos, "metrics": (masked, ("sum",))}
    said = flowing(job)
    assert "masked and padded: only silos can read their sum over a round's silos." in said
    both = parsed(draft([job, other], trust=True))
    assert both.rule("ppfl", "model").readers == ("silos", "sum")
    for each in (job, other):
        assert leaves(each, roster, both)


def test_a_draft_leaves_it_to_the_person_to_trust_the_coordinator(federation, signed, roster):
    """As it is drafted it declines the job, for this one reason; uncommented, it takes it."""
    job = signed("keyed-too", {**BLIND, "clip_exponent": 6}, "pfedsim")
    other = signed("summing-too", BLIND)
    text = draft([job, other])
    policy = parsed(text)
    assert policy.file.secure_aggregation.trust == "none"
    (why,) = sum_objections(JobPlan(job), policy, roster)
    assert 'set it to "non-colluding-coordinator" if you trust' in why
    assert sum_objections(JobPlan(other), policy, roster) == ()
    said = " ".join(text.replace("\n# ", " ").split())
    assert "what 'keyed-too' mixes or compares" in said
    assert (
        "As written, this policy declines such jobs; to accept them, remove the # from"
        " the line below." in said
    )
    line = '\ntrust = "non-colluding-coordinator"\n'
    decided = text.replace(line.replace("trust", "# trust"), line)
    assert decided != text
    policy = parsed(decided)
    assert sum_objections(JobPlan(job), policy, roster) == ()
    # who makes a local federation has decided
    assert local_federation.policy_text([job]).count(line) == 1


def test_policy_new_says_that_trust_is_for_the_person_to_give(federation, signed, tmp_path):
    signed("asking", {**BLIND, "clip_exponent": 6}, "pfedsim")
    file, roster = federation.folder / "jobs" / "asking.json", federation.folder / "roster.json"
    out = tmp_path / "policy.toml"
    said = run("new", file, "--roster", roster, "--out", out).output
    assert f"{out}: as written, this policy declines 'asking'." in said
    assert (
        'if you trust that, remove the # from the line trust = "non-colluding-coordinator"' in said
    )
    declined = run("check", file, "--policy", out, "--roster", roster)
    assert declined.exit_code == 1
    assert "DECLINED" in declined.output
    out.write_text(out.read_text().replace("# trust = ", "trust = "))
    assert run("check", file, "--policy", out, "--roster", roster).exit_code == 0


def run(*arguments):
    return CliRunner().invoke(app, ["policy", *(str(argument) for argument in arguments)])


def test_policy_new_writes_a_file_that_check_accepts(federation, tmp_path):
    document = job_document(SILOS, name="one", method={"name": "pfedsim"})
    job = local_federation.sign_job(federation, document)
    signed, roster = federation.folder / "jobs" / "one.json", federation.folder / "roster.json"
    out = tmp_path / "policy.toml"
    done = run("new", signed, "--roster", roster, "--out", out)
    assert done.exit_code == 0, done.output
    assert f"{len(policies.load(out).file.allow)} rules" in done.output
    assert run("check", signed, "--policy", out, "--roster", roster).exit_code == 0
    before = out.read_bytes()
    # it is there
    assert isinstance(run("new", signed, "--roster", roster, "--out", out).exception, LocalError)
    assert out.read_bytes() == before
    document = parse_json(signed.read_bytes(), "job")
    document["document"]["rounds"] = job.rounds + 1
    (tmp_path / "forged.json").write_text(json.dumps(document))
    forged = tmp_path / "forged.json"
    refused = run("new", forged, "--roster", roster, "--out", tmp_path / "other")
    assert isinstance(refused.exception, RefusedError)
    assert not (tmp_path / "other").exists()


def test_policy_new_runs_code_of_the_packages_that_are_named_and_lists_them(federation, tmp_path):
    model = {"name": "normed", "classes": 3, "head": "4", "input": [1, 8, 8]}
    local_federation.sign_job(federation, job_document(SILOS, name="outside", model=model))
    signed, roster = federation.folder / "jobs" / "outside.json", federation.folder / "roster.json"
    out = tmp_path / "policy.toml"
    sys.modules.pop("other_models", None)
    refused = run("new", signed, "--roster", roster, "--out", out)
    assert isinstance(refused.exception, RefusedError)
    assert "other-models, which may not run here; " in str(refused.exception)
    assert "name it with --package" in str(refused.exception)
    assert "other_models" not in sys.modules
    done = run("new", signed, "--roster", roster, "--out", out, "--package", "other-models")
    assert done.exit_code == 0, done.output
    assert policies.load(out).file.packages == ("other-models",)
    assert run("check", signed, "--policy", out, "--roster", roster).exit_code == 0


def test_policy_new_lists_the_files_that_jobs_begin_with(federation, tmp_path):
    save_start(federation.folder / "jobs" / "w.safetensors")
    job = local_federation.sign_job(
        federation, job_document(SILOS, name="begun", model=start_table())
    )
    signed, roster = federation.folder / "jobs" / "begun.json", federation.folder / "roster.json"
    out, digest = tmp_path / "policy.toml", job.model.weights.sha256
    done = run("new", signed, "--roster", roster, "--out", out)
    assert done.exit_code == 0, done.output
    assert policies.load(out).file.weights == (digest,)
    drafted = " ".join(out.read_text().replace("\n# ", " ").split())
    assert "Keep this line only if you know where the files come from." in drafted
    found = run("check", signed, "--policy", out, "--roster", roster)
    assert found.exit_code == 0
    said = " ".join(found.output.split())
    start = f"{size(job.model.weights.size)}, SHA-256 {digest}"
    assert f"the initial values of extractor come from a file of {start}" in said
    out.write_text(out.read_text().replace(digest, "ab" * 32))
    found = run("check", signed, "--policy", out, "--roster", roster)
    assert found.exit_code == 1
    assert "which is not in the policy's weights; if you know where it comes from, add" in (
        " ".join(found.output.split())
    )


def directed(signed, silos):
    counts = {"counts": dict.fromkeys(silos, 30), "class_counts": dict.fromkeys(silos, [3] * 10)}
    security = {**BLIND, "weights": "public", "dropouts": "any", **counts}
    security |= {"mix": "directed", "colluders": 0}
    return signed("directed", security, "fedsimsup", silos=list(silos), participation=0.75)


def test_a_draft_for_a_directed_mix_names_its_readers_and_trusts_nobody(roster, signed):
    job = directed(signed, "abcd")
    policy = parsed(draft([job]))
    (why,) = sum_objections(JobPlan(job), policy, roster)
    assert why.endswith('have the job signed without dropouts, or set the policy to "any"')
    policy = policies.parse(
        draft([job]).replace("# dropouts =", "dropouts =").encode(), "policy.toml"
    ).on(None)
    check_agreed(job, policy, roster)
    asked = {"required": True, "public_counts": True, "assumed_colluders": 0}
    assert blind_rules(policy) == {**asked, "dropouts": "any"}
    rule = policy.rule("fedsimsup", "theta")
    assert (rule.forms, rule.readers, rule.dtypes) == (("masked",), tuple("abcd"), ("uint32",))
    said = flowing(job)
    assert (
        "masked and padded once per recipient: each recipient can read its own weighted mean and"
        " nothing else" in said
    )


@pytest.mark.parametrize("silos", [("abcd", "abcef"), ("abcef", "abcd")])
def test_a_draft_for_two_jobs_lets_the_silos_of_both_read(roster, signed, silos):
    jobs = [directed(signed, each) for each in silos]
    policy = parsed(draft(jobs))
    assert set(policy.rule("fedsimsup", "theta").readers) == set("abcdef")
    assert all(leaves(job, roster, policy) for job in jobs)


# Private jobs.
PRIVACY = {"epsilon": 3.5, "delta": 1e-6, "sample_rate": 0.25, "sigma": "4"}


def test_a_draft_lets_private_jobs_spend_what_they_cost_together_and_no_more(roster, signed):
    first = signed("first", privacy=PRIVACY)
    cheap = {"epsilon": 0.7, "delta": 1e-5, "sigma": "40", "histogram_sigma": 90.0}
    second = signed("second", privacy={**PRIVACY, **cheap})
    policy = parsed(draft([first]))
    assert policy.budget.model_dump(exclude_defaults=True, mode="json") == {
        "unit": "record",
        "epsilon": shown(cost(job_spends(first, PRIVACY["sigma"]), 1e-6)),
        "delta": "0.000001",
        "required": True,
    }
    both = parsed(draft([first, second]))
    spends = [*job_spends(first, PRIVACY["sigma"]), *job_spends(second, "40")]
    assert (str(both.budget.epsilon), float(both.budget.delta)) == (shown(cost(spends, 1e-5)), 1e-5)
    for job in (first, second):
        assert list(privacy_objections(job, both)) == []
        assert leaves(job, roster, both)
    plain = signed("plain")
    assert not any(outflow.decision.allow for outflow in outflows(JobPlan(plain), roster, both))
    mixed = parsed(draft([plain, first]))
    assert not mixed.budget.required
    assert leaves(plain, roster, mixed)
    assert leaves(first, roster, mixed)
    assert parsed(draft([plain])).file.dataset == {}


def test_a_draft_of_private_jobs_says_what_each_costs_and_names_the_data_set(signed):
    text = draft([signed("first", privacy=PRIVACY)], datasets=DataSets.one("cxr-2024"))
    assert "[dataset.cxr-2024]" in text
    said = " ".join(text.replace("\n# ", " ").split())
    most = "The most privacy loss that all jobs together may ever cost data set 'cxr-2024'"
    assert f"{most}: enough for these jobs and hardly any other" in said
    assert "Limits of the single jobs: 'first' epsilon = 3.5 at delta = 0.000001." in said
    assert max(map(len, text.splitlines())) <= 100


def test_a_draft_of_costly_jobs(signed):
    """Jobs that cost more than any policy may allow are drafted all the same."""
    costly = {**PRIVACY, "epsilon": 600.0, "sigma": "0.115"}
    jobs = [signed(f"much-{n}", privacy=costly) for n in range(3)]
    assert parsed(draft(jobs)).budget.epsilon == 1000

import json
import re
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save
from support.jobs import make_job
from support.private_jobs import SIGMA, policy_for, private_job, without_budget

from staddle.algorithms.data.dataset import _draw
from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.algorithms.job.job import DERIVED, Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.commands.federation import local_federation
from staddle.commands.policy.draft import draft
from staddle.errors import PeerError, RefusedError
from staddle.files.documents import canonical_json
from staddle.security.blind.plan import JobPlan
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import JOB, ROSTER
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.security.policy import policy as policies
from staddle.security.policy.release import SUM_READER
from staddle.silo.admission.checks import (
    admit,
    asked_of_rows,
    checked_cohort,
    job_objections,
    outflows,
    sum_objections,
)
from staddle.silo.config import FurtherData, SiloConfig, Weights

SILOS = ("silo-a", "silo-b", "silo-c")
KEY = bytes(32)
BAD_DATA = "nowhere.npz"
NAMES = ["benign", "malignant", "other"]


@pytest.fixture
def ask(made, data_file):
    """Admit a signed job; everything but what the test changes is as it should be."""

    def call(signed=None, silo="silo-a", policy=None, data=None, key=KEY, roster=None, weights=()):
        config = SiloConfig.model_construct(
            data=data or Npz(file=data_file), weights=weights, directory=data_file.parent
        )
        return admit(
            made.signed("simple") if signed is None else signed,
            silo,
            made.roster if roster is None else roster,
            made.policy(*made.jobs.values()) if policy is None else policy,
            config,
            key,
        )

    return call


@pytest.fixture
def refused(ask):
    def call(code, **changes):
        with pytest.raises(RefusedError) as caught:
            ask(**changes)
        assert (caught.value.code, caught.value.peer) == (code, "coordinator")
        return caught.value.why

    return call


@pytest.fixture
def signed_by(made):
    """A document signed by a member, whatever it says."""

    def call(document, member="operator", label=JOB, roster=None):
        folder = made.files.folder / member
        keys = load_keys(folder if (folder / "entry.json").exists() else folder / "keys")
        return canonical_json(sign_document(document, roster or made.roster, keys, label))

    return call


def test_a_cohort_is_sorted_and_without_silos_that_left_the_roster(made):
    cohort = ["silo-c", "silo-a"]
    checked = checked_cohort(cohort, made.jobs["simple"], 1, "silo-a", made.roster)
    assert (checked, cohort) == (("silo-a", "silo-c"), ["silo-c", "silo-a"])
    roster = rosters.remove(made.roster, "silo-b")
    why = "names 'silo-b'; the job draws silo-a, silo-c for this round"
    with pytest.raises(PeerError, match=why):
        checked_cohort(["silo-a", "silo-b"], made.jobs["simple"], 0, "silo-a", roster)


@pytest.mark.parametrize(
    ("cohort", "said"),
    [
        (["silo-a", "silo-b", "silo-x"],
            "names 'silo-x'; the job draws silo-a, silo-b for this round"),
        (["silo-a", "coordinator"], "names 'coordinator'; the job draws"),
        # of the roster, and the job is not for it
        (["silo-a", "silo-b", "silo-c"], "names 'silo-c'; the job draws"),
        (["silo-a", ""], "names ''; the job draws"),
        (["silo-a", "x" * 3_000_000], f"names '{'x' * 64}'; the job draws"),
        (["silo-a", "silo-b", "silo-a"], "has a silo twice"),
        (["silo-b"], "of 1 silos that lacks 'silo-a', this one"),
        ([], "of 0 silos that lacks 'silo-a', this one"),
    ],
)  # fmt: skip
def test_a_cohort_that_cannot_have_been_drawn_is_refused(made, cohort, said):
    job = made.job("for-two", silos=SILOS[:2])
    why = f"asks for round 3 of job 'for-two' with a cohort (that )?{said}"
    with pytest.raises(PeerError, match=why):
        checked_cohort(cohort, job, 3, "silo-a", made.roster)


def test_a_cohort_has_only_silos_that_the_job_draws_for_the_round(made):
    job = made.job("in-turn", participation=0.67)
    drawn = {round_: job.cohort(round_) for round_ in range(4)}
    assert {len(cohort) for cohort in drawn.values()} == {2}
    round_, cohort = next((r, c) for r, c in drawn.items() if "silo-a" in c)
    assert checked_cohort(cohort, job, round_, "silo-a", made.roster) == tuple(sorted(cohort))
    (other,) = set(SILOS) - set(cohort)
    for asked in (("silo-a", other), SILOS):
        why = f"names '{other}'; the job draws {', '.join(sorted(cohort))} for"
        with pytest.raises(PeerError, match=why):
            checked_cohort(asked, job, round_, "silo-a", made.roster)


def test_a_good_job_is_admitted_with_all_records_on_one_side_each(ask, made):
    admitted = ask()
    assert (admitted.job.digest, admitted.signer) == (made.jobs["simple"].digest, "operator")
    assert len(admitted.train) + len(admitted.test) == 40
    assert min(len(admitted.train), len(admitted.test)) > 0


def test_the_split_is_that_of_the_silos_own_key(ask):
    assert len({len(ask(key=bytes([n]) * 32).test) for n in range(8)}) > 1
    assert ask().test.y.tolist() == ask().test.y.tolist()


# (1) Signed by an operator of our roster.
@pytest.mark.parametrize(
    "signed",
    [
        b"", b"[]", b"{}", b"null", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000,
        b'{"document":{},"signer":"operator"}',
    ],
    ids=lambda signed: repr(signed[:12]),
)  # fmt: skip
def test_1_what_is_no_envelope_is_refused(refused, signed):
    refused("JOB_SIGNATURE", signed=signed)


def test_1_a_changed_job_is_refused(refused, made):
    envelope = json.loads(made.signed("simple"))
    for change in ({"rounds": 5}, {"name": "other"}, {"silos": ["silo-a", "silo-b"]}):
        changed = canonical_json({**envelope, "document": {**envelope["document"], **change}})
        assert "changed after it was signed" in refused("JOB_SIGNATURE", signed=changed)


@pytest.mark.parametrize("field", ["signature", "members"])
def test_1_a_changed_envelope_is_refused(refused, made, field):
    envelope = json.loads(made.signed("simple"))
    digits = envelope[field]
    flipped = ("1" if digits[0] != "1" else "2") + digits[1:]
    refused("JOB_SIGNATURE", signed=canonical_json({**envelope, field: flipped}))


def test_1_an_unknown_signer_and_a_job_under_another_roster_are_refused(refused, made):
    envelope = json.loads(made.signed("simple"))
    assert "is not a member" in refused(
        "JOB_SIGNATURE", signed=canonical_json({**envelope, "signer": "nobody"})
    )
    assert "not those of our roster" in refused(
        "JOB_SIGNATURE", roster=rosters.remove(made.roster, "silo-c")
    )


@pytest.mark.parametrize("member", ["coordinator", "silo-a", "founder"])
def test_1_no_other_role_may_sign_a_job(refused, made, signed_by, member):
    document = made.jobs["simple"].document()
    assert "only a member of role operator" in refused(
        "JOB_SIGNATURE", signed=signed_by(document, member)
    )


def test_1_a_signature_for_another_purpose_is_refused(refused, made, signed_by):
    refused("JOB_SIGNATURE", signed=signed_by(made.jobs["simple"].document(), label=ROSTER))


# (2) Our code gives the same schema.
def method(name, version=1, **options):
    return {"method": {"name": name, "version": version, "options": options}}


def model(name, **changes):
    return {"model": {"name": name, "classes": 3, **changes}}


def test_2_a_schema_with_one_tensor_more_is_refused(refused, made, signed_by):
    document = json.loads(canonical_json(made.jobs["simple"].document()))
    part = document["schema"][0]["up"][0]
    part["tensors"].append({"name": "classifier.weight", "dtype": "float32", "shape": [3, 64]})
    assert "schema" in refused("JOB_INVALID", signed=signed_by(document))


def test_2_a_job_that_does_not_say_what_it_is_for_is_refused(refused, made, signed_by):
    document = made.jobs["simple"].document()
    del document["purpose"]
    why = refused("JOB_INVALID", signed=signed_by(document))
    assert why.startswith("the offered job: purpose is missing, and people at the silos decide")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": []}, "schema"),
        ({"method_digest": "00" * 32}, "method_digest"),
        ({"model_digest": "00" * 32}, "model"),
        (method("fedper", 99), "version"),
        (method("fedprr"), "did you mean 'fedper'"),
        ({"rounds": 0}, "rounds"),
        ({"unknown": 1}, "unknown"),
        # and it can work
        ({**method("fedsimsup", 2), "participation": "1.0"},
            "(fedsimsup on cnn-digits): method fedsimsup: all 3 silos train in every round"),
        (model("glm", norm="none", input=None, class_names=None),
            "job 'simple' (fedper on glm): part 'extractor', which crosses in round 0, is empty"),
        (method("fedaims", version=2), "and the job's model has none; choose"),
        (model("cnn-digits", class_names=["a", "b", "a"]),
            "classes 0 and 2 are both named 'a'; name them apart"),
        (model("cnn-digits", class_names=["a", "b"]),
            "model.class_names has 2 names, model.classes says 3 classes; give one name"),
        (method("fedper", rho="0.5"), "of fedper: unknown key 'rho'"),
    ],
)  # fmt: skip
def test_2_a_job_that_our_code_reads_otherwise_is_refused(refused, made, signed_by, change, said):
    document = {**made.jobs["simple"].document(), **change}
    assert said in refused("JOB_INVALID", signed=signed_by(document))


# (3) We are one of its silos.
def test_3_a_job_for_others_is_refused(refused, made):
    made.job("others", silos=["silo-b", "silo-c"])
    assert "is not for silo 'silo-a'" in refused("JOB_INVALID", signed=made.signed("others"))


# (4) The policy allows all that any of its rounds gives.
def test_4_a_policy_without_a_rule_for_it_names_every_part_once(refused, made):
    review = "review it with staddle silo accept simple"
    for policy in (made.policy(), made.policy(made.jobs["phases"])):
        why = refused("POLICY", policy=policy)
        assert why == f"the policy has no rule for extractor, metrics: {review}"


def test_4_a_later_phase_counts_too(refused, made):
    policy = made.policy(made.jobs["phases"], replace={'parts = ["rows"]': 'parts = ["other"]'})
    why = refused("POLICY", signed=made.signed("phases"), policy=policy)
    assert why.startswith("the policy has no rule for rows: ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('max_bytes_per_round = "64MiB"', "max_bytes_per_round = 1000"),
        ('readers = ["coordinator"]', 'readers = ["somebody"]'),
        ('recipients = ["coordinator"]', 'recipients = ["somebody"]'),
        ('kinds = ["backbone"]', 'kinds = ["sketch"]'),
    ],
)
def test_4_each_limit_of_the_policy_counts(refused, made, old, new):
    refused("POLICY", policy=made.policy(made.jobs["simple"], replace={old: new}))


def test_4_memberships_are_released_only_where_the_policy_says_so(ask, refused, made):
    """A rule for class sums, of the same kind, lets no membership out, nor does another kind."""
    sums = made.job("sums", "ppfl")
    for lam in (0.01, 0.0):
        options = {"lam": lam, "release_membership": "last"}
        job = made.job(f"last-{lam:g}".replace(".", "-"), "ppfl", options=options)
        assert ask(signed=made.signed(job.name), policy=made.policy(job)).job.digest == job.digest
        why = refused("POLICY", signed=made.signed(job.name), policy=made.policy(sums))
        assert why.startswith("the policy has no rule for membership: ")
    other = made.policy(job, replace={'kinds = ["membership"]': 'kinds = ["sketch"]'})
    assert "membership/c: rule" in refused("POLICY", signed=made.signed(job.name), policy=other)


# (4) again: blind sums.
FOUR = (*SILOS, "silo-d")
FIVE = (*FOUR, "silo-e")
BLIND = {"secure_aggregation": "required"}
PUBLIC = {**BLIND, "weights": "public", "counts": dict.fromkeys(FOUR, 30)}


@pytest.fixture
def blind(made):
    """A signed job with blind sums and a policy drafted for it, with ``asks`` of sums instead."""

    def call(name, security=BLIND, method="fedper", silos=FOUR, replace=None, asks=None, **fields):
        job = call.job = made.job(
            name, method, silos=silos, min_cohort=3, security=security, **fields
        )
        del made.jobs[name]  # which other tests take for those in the clear
        own = "" if asks is None else f"[secure_aggregation]\n{asks}\n"
        return {
            "signed": made.signed(job.name),
            "policy": made.policy(job, replace=replace or {}, added=own),
        }

    return call


def test_4_a_blind_job_is_decided_as_masked_words_that_are_read_as_a_sum(ask, blind, made):
    asked = blind("masked")
    assert ask(**asked).job.security.required
    (outflow,) = outflows(JobPlan(blind.job), made.roster, asked["policy"].on(None))
    assert outflow.readers == (SUM_READER,)
    assert {verdict.release.form for verdict in outflow.decision.tensors} == {"masked"}
    assert {verdict.release.dtype for verdict in outflow.decision.tensors} == {"uint64"}
    released = [verdict.release for verdict in outflow.decision.tensors]
    assert ("extractor", "@weight") in {(release.part, release.name) for release in released}
    plain = outflows(JobPlan(made.jobs["simple"]), made.roster, asked["policy"].on(None))[0]
    assert (plain.readers, plain.decision.allow) == (("coordinator",), False)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('forms = ["masked"]', 'forms = ["plain"]', "'masked' is not in forms"),
        ('readers = ["sum"]', 'readers = ["coordinator"]', "'sum' is not in readers"),
        ('dtypes = ["uint64"]', 'dtypes = ["float32"]', "'uint64' is not in dtypes"),
    ],
)
def test_4_a_rule_for_what_is_in_the_clear_is_none_for_masked_words(refused, blind, old, new, said):
    assert said in refused("POLICY", **blind("other-rule", replace={old: new}))


def test_4_a_job_in_the_clear_is_refused_where_sums_have_to_be_blind(ask, refused, made):
    job = made.jobs["simple"]
    table = "[secure_aggregation]\nrequired = "
    why = refused("POLICY", policy=made.policy(job, added=f"{table}true\n"))
    assert (
        "extractor, metrics would leave in the form 'plain', and secure_aggregation.required = true"
        in why
    )
    assert ask(policy=made.policy(job, added=f"{table}false\n")).job == job


@pytest.mark.parametrize(
    ("asks", "security", "silos", "said"),
    [
        ("assumed_colluders = 2", BLIND, FOUR,
            "has colluders = 1, this silo's policy 2; have it signed"),
        ("min_cohort = 5", BLIND, FOUR,
            "sums batches of 4 silos; the policy has secure_aggregation.min_cohort = 5; have it"),
        ("min_honest = 4", BLIND, FOUR,
            ("a batch of 4 silos has only 3 that the job assumes to be honest; the policy has"
            " secure_aggregation.min_ho")),
        ("", {**BLIND, "colluders": 0}, SILOS,
            "has colluders = 0, this silo's policy 1; have it signed"),
        ("", PUBLIC, FOUR,
            ("weights are public; the policy has secure_aggregation.public_counts = false; set"
            " it to true if the number")),
        ("public_counts = true", {**PUBLIC, "counts": {**PUBLIC["counts"], "silo-d": 200}}, FOUR,
            ("silo 'silo-d' weighs too much among silo-a, silo-b, silo-c, silo-d, with 200"
            " records of 290")),
        ("public_counts = true\nmin_cohort = 4",
            {**PUBLIC, "counts": {**PUBLIC["counts"], "silo-d": 40}}, FOUR,
            "they count as 2.94 equal ones, fewer than 3"),
        ("public_counts = true", {**PUBLIC, "dropouts": "any"}, FOUR,
            ('sums whichever silos are left (security.dropouts = "any"), which over many'
            ' rounds reveals single')),
        ("", {**BLIND, "clip_exponent": 62}, FOUR,
            "part 'extractor': ring 64 cannot hold a sum over 4 silos"),
    ],
)  # fmt: skip
def test_4_a_policy_agrees_to_a_blind_sum_or_says_what_it_has_against_it(
    refused, blind, made, asks, security, silos, said
):
    asked = blind("agreed", security, silos=silos, asks=asks)
    why = refused("POLICY", **asked)
    assert said in why
    assert sum_objections(JobPlan(blind.job), asked["policy"], made.roster) == (why,)


def test_4_what_a_policy_asks_of_blind_sums_is_met_at_its_bounds(ask, blind):
    counts = {**PUBLIC["counts"], "silo-d": 40}
    asked = "public_counts = true\nmin_cohort = 4\nmin_honest = 3\nassumed_colluders = 1\n"
    security = {**PUBLIC, "counts": {**counts, "silo-a": 40, "silo-b": 40, "silo-c": 40}}
    assert ask(**blind("at-the-bounds", security, asks=asked)).job.security.weights == "public"


@pytest.mark.parametrize(
    ("fewest", "policy", "said"),
    [
        (5, "", None),
        (4, "", "counts cells of 4 records; the policy has limits.min_cell = 5; have it signed"),
        (0, "min_cell = 2", "counts cells of 1 records; the policy has limits.min_cell = 2;"),
        (0, "min_cell = 0", None),
    ],
)
def test_4_statistics_leave_out_cells_of_as_few_records_as_the_policy_says(
    made, fewest, policy, said
):
    job = counting({"fewest": fewest})
    text = made.policy(made.jobs["simple"]).text.replace("[limits]", f"[limits]\n{policy}")
    found = job_objections(JobPlan(job), made.parsed(text).on(None), made.roster)
    assert [*found] == ([] if said is None else [found[0]])
    assert said is None or said in found[0]


def test_4_noised_statistics_leave_out_nothing(made):
    privacy = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.5}
    noised = counting({"fewest": 0}, privacy)
    said = job_objections(JobPlan(noised), made.policy(made.jobs["simple"]).on(None), made.roster)
    assert not [why for why in said if "min_cell" in why]


def counting(options, privacy=None):
    model = {"name": "glm", "classes": 2, "class_names": ["a", "b"], "input": [1, 1, 1]}
    features = [{"name": "age", "least": 0, "most": 120}]
    fields = {"silos": list(SILOS), "rounds": 1, "features": features, "privacy": privacy}
    return make_job("statistics", options, model, **fields)


def test_4_a_job_in_the_clear_is_asked_nothing_of_it(made):
    hard = "[secure_aggregation]\nmin_cohort = 900\nmin_honest = 800\nassumed_colluders = 99\n"
    job = made.jobs["simple"]
    assert sum_objections(JobPlan(job), made.policy(job, added=hard), made.roster) == ()


# (4) again: jobs that mix and compare, by a key that all of their silos have.
TRUST = 'trust = "non-colluding-coordinator"'


@pytest.fixture
def keyed(blind):
    def call(name, asks=None, security=BLIND, **fields):
        return blind(name, {**security, "clip_exponent": 6}, "pfedsim", asks=asks, **fields)

    return call


def test_4_a_keyed_job_is_decided_form_by_form(ask, keyed, blind, made):
    asked = keyed("by-forms")
    assert ask(**asked).job.keyed
    early, late = outflows(JobPlan(blind.job), made.roster, asked["policy"].on(None))
    assert (early.readers, late.readers) == (("sum",), ("mix", "gram", "sum"))
    found = {(v.release.part, v.release.form, v.release.dtype) for v in late.decision.tensors}
    assert found == {
        ("extractor", "padded", "uint64"),
        ("rows", "rotated", "float32"),
        ("metrics", "masked", "uint64"),
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('forms = ["padded"]', 'forms = ["masked"]',
            "extractor/extractor.conv1.weight: rule 'pfedsim-extractor': 'p"),
        ('forms = ["rotated"]', 'forms = ["padded"]', "'rotated' is not in forms"),
        ('readers = ["mix"]', 'readers = ["sum", "gram"]', "'mix' is not in readers"),
        ('readers = ["gram"]', 'readers = ["coordinator", "sum", "mix"]',
            "'gram' is not in readers"),
    ],
)  # fmt: skip
def test_4_a_rule_for_one_form_is_none_for_another(refused, keyed, old, new, said):
    assert said in refused("POLICY", **keyed("forms", replace={old: new}))


def test_4_all_messages_of_a_round_count_against_its_bytes(refused, keyed, blind, made):
    job = keyed("whole", options={"rho": 0})
    (limit,) = re.findall(r"max_bytes_per_round = .*", job["policy"].text)
    (largest,) = outflows(JobPlan(blind.job), made.roster, job["policy"].on(None))
    by_form = {}
    for verdict in largest.decision.tensors:
        form = verdict.release.form
        by_form[form] = by_form.get(form, 0) + verdict.release.nbytes
    assert max(by_form.values()) < largest.size == sum(by_form.values())
    less = {limit: f"max_bytes_per_round = {largest.size - 1}"}
    why = refused("POLICY", **keyed("whole", options={"rho": 0}, replace=less))
    assert f"{largest.size} bytes this round are over" in why


@pytest.mark.parametrize("asks", ["", 'trust = "none"'])
def test_4_a_keyed_job_wants_trust_in_the_coordinator(refused, keyed, asks):
    why = refused("POLICY", **keyed("untrusted", asks))
    assert why.startswith(
        "only a key that every silo of the job has would hide extractor, rows from coordinator"
    )
    assert (
        'secure_aggregation.trust = "none"; set it to "non-colluding-coordinator" if you trust'
        in why
    )


@pytest.mark.parametrize(
    ("asks", "security", "said"),
    [
        ("min_holders = 4", {},
            "a class that 3 silos hold; the policy has secure_aggregation.min_holders = 4; have"),
        ("min_cohort = 4", {},
            ("a class that 3 silos hold; the policy has secure_aggregation.min_holders = 4 (by"
            " default,")),
        ("min_cohort = 4\nmin_holders = 5", {"min_holders": 4},
            "a class that 4 silos hold; the policy has"),
        ("min_cohort = 4\nmin_holders = 3", {}, ""),
        ("min_holders = 4", {"min_holders": 4}, ""),
        ("", {}, ""),
    ],
)  # fmt: skip
def test_4_rows_of_a_class_are_of_as_many_silos_as_asked(ask, refused, blind, asks, security, said):
    job = {"asks": f"{TRUST}\n{asks}", "silos": FIVE}
    made = blind("by-class", {**BLIND, **security}, "fedssa", **job)
    if said:
        assert said in refused("POLICY", **made)
    else:
        assert ask(**made).job.counted


def test_4_rows_of_a_class_are_not_averaged_over_silos_that_do_not_hold_it(refused, blind):
    job = {"asks": TRUST, "silos": FIVE, "options": {"m1": False}}
    why = refused("POLICY", **blind("over-all", BLIND, "fedssa", **job))
    assert "the job averages the row of a class over all silos, also if one alone holds it" in why


def test_4_a_job_that_sums_by_class_wants_trust_in_the_coordinator(refused, blind):
    """Who can alter the holders can have the row of one silo alone."""
    why = refused("POLICY", **blind("untrusted-counts", BLIND, "fedssa", asks='trust = "none"'))
    assert why.startswith(
        "only a key that every silo of the job has would hide the tags of its counts from"
        " coordinator"
    )
    assert why.endswith(
        "none of them colludes with the coordinator, or ask for a method that sums nothing per"
        " class"
    )


HIDDEN = {**BLIND, "audience": "silos"}


def hosted(made, *members, **changes):
    """The roster with these changes of some members' entries."""
    entries = tuple(
        entry.model_copy(update=changes) if entry.id in members else entry
        for entry in made.roster.entries
    )
    return made.roster.model_copy(update={"entries": entries})


def test_4_a_job_whose_sums_silos_alone_read_is_decided_part_by_part(ask, blind, made, refused):
    asked = blind("for-silos", HIDDEN, "fedavg", asks=TRUST)
    assert ask(**asked).job.keyed
    (flow,) = outflows(JobPlan(blind.job), made.roster, asked["policy"].on(None))
    assert flow.readers == ("silos", "sum")
    readers = {v.release.part: v.release.readers for v in flow.decision.tensors}
    assert readers == {"model": ("silos",), "metrics": ("sum",)}
    replace = {'readers = ["silos"]': 'readers = ["sum"]'}
    why = refused("POLICY", **blind("for-silos", HIDDEN, "fedavg", asks=TRUST, replace=replace))
    assert (
        "tensor model/@weight: rule 'fedavg-model': 'silos' is not in readers = ['sum']; add it"
        in why
    )
    assert "metrics" not in why


@pytest.mark.parametrize("asks", ["", 'trust = "none"'])
def test_4_sums_for_silos_want_trust_and_a_coordinator_that_runs_none(refused, blind, made, asks):
    why = refused("POLICY", **blind("untrusted", HIDDEN, "fedavg", asks=asks))
    assert why.startswith(
        "only a key that every silo of the job has would hide the sum of model from coordinator"
    )
    assert "or ask to have it signed without security.audience" in why
    roster = hosted(made, "coordinator", host_operator=made.roster["silo-b"].organisation)
    job = blind("one-hand", HIDDEN, "fedavg", asks=TRUST)
    (why,) = sum_objections(JobPlan(blind.job), job["policy"], roster)
    assert "also run silo-b, so they can open the sum of model, whatever trust says" in why
    job = blind("both", {**HIDDEN, "clip_exponent": 6}, "pfedsim", asks=TRUST)
    (why,) = sum_objections(JobPlan(blind.job), job["policy"], roster)
    assert "can open extractor, rows of every silo and the sum of model, whatever trust says" in why


@pytest.mark.parametrize("tags", [True, False])
def test_4_trust_is_asked_of_no_job_that_only_sums(ask, blind, made, tags):
    """Nor of tags: who can forge them alters a sum, as any coordinator can where there are none."""
    asked = blind("summing" if tags else "untagged", {**BLIND, "tags": tags}, asks='trust = "none"')
    assert ask(**asked).job.keyed == tags
    roster = hosted(made, "coordinator", host_operator=made.roster["silo-b"].organisation)
    assert sum_objections(JobPlan(blind.job), asked["policy"], roster) == ()


@pytest.mark.parametrize("key", ["organisation", "host_operator"])
def test_4_a_keyed_job_is_declined_where_its_host_runs_a_silo(blind, keyed, made, key):
    """Whatever the policy trusts: coordinator and silo in one hand have the key and the uploads."""
    roster = hosted(made, "silo-c", **{key: made.roster.coordinator.host_operator})
    job = keyed("one-hand", TRUST)
    (why,) = sum_objections(JobPlan(blind.job), job["policy"], roster)
    assert why.startswith(
        "the organisations behind coordinator (organisation of coordinator) also run silo-c, so"
        " they can open "
    )
    assert "extractor, rows of every silo, whatever trust says" in why
    assert sum_objections(JobPlan(blind.job), job["policy"], made.roster) == ()


@pytest.mark.parametrize("key", ["organisation", "host_operator"])
def test_4_a_silo_outside_a_keyed_job_has_no_key_of_it_and_may_be_its_hosts(
    blind, keyed, made, key
):
    """It is admitted to the federation while the job runs: the job continues."""
    host = made.roster.coordinator.host_operator
    outside = made.roster["silo-c"].model_copy(update={"id": "outside", key: host})
    entries = (*made.roster.entries, outside)
    roster = made.roster.model_copy(update={"entries": entries})
    job = keyed("beside", TRUST)
    assert roster.in_one_hand == ("outside",)
    assert sum_objections(JobPlan(blind.job), job["policy"], roster) == ()


def test_4_the_host_of_the_coordinator_counts_as_much_as_whose_it_is(blind, keyed, made):
    roster = hosted(made, "coordinator", host_operator=made.roster["silo-b"].organisation)
    job = keyed("hosted", TRUST)
    (why,) = sum_objections(JobPlan(blind.job), job["policy"], roster)
    assert "(organisation of coordinator and organisation of silo-b) also run silo-b" in why


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ("min_cohort = 4",
            ("as few as min_cohort = 3 other silos; the policy has"
            " secure_aggregation.min_cohort = 4")),
        (
            "min_honest = 4",
            "a row over 4 silos may have only 3 honest ones; the policy has secure_aggregation.min",
        ),
    ],
)  # fmt: skip
def test_4_rows_are_made_of_as_many_silos_as_the_policy_asks(refused, keyed, asks, said):
    assert said in refused("POLICY", **keyed("rows-of", f"{TRUST}\n{asks}", silos=FIVE))


def test_4_what_a_policy_asks_of_rows_is_met_at_its_bounds(ask, keyed):
    asked = keyed("at-bounds", f"{TRUST}\nmin_cohort = 3\nmin_honest = 3", silos=FIVE)
    assert ask(**asked).job.keyed


def test_what_is_asked_of_rows_is_the_stricter_of_job_and_policy(keyed, blind, made):
    job = keyed("stricter", f"{TRUST}\nmin_cohort = 2\nmin_honest = 3\nassumed_colluders = 0")
    found = asked_of_rows(JobPlan(blind.job).terms, job["policy"])
    assert (found.min_cohort, found.min_honest, found.colluders) == (3, 3, 1)
    asks = "[secure_aggregation]\nmin_cohort = 9\nassumed_colluders = 2\n"
    strict = made.policy(made.jobs["simple"], added=asks)
    found = asked_of_rows(JobPlan(blind.job).terms, strict)
    assert (found.min_cohort, found.min_honest, found.colluders) == (9, 2, 2)


# (4) again: what a job spends of the data set.
@pytest.fixture
def private(made):
    """A signed private job and a policy with this table for its data set, or with none."""

    def call(name="spending", table=None, **changes):
        job = private_job(made, name, **changes)
        del made.jobs[name]
        policy = without_budget(made, job) if table is None else policy_for(made, job, **table)
        return {"signed": made.signed(job.name), "policy": policy}

    return call


def test_4_a_private_job_is_admitted_where_the_policy_sets_a_budget(ask, private):
    for table in ({}, {"required": "true"}, {"min_sigma": SIGMA, "delta": 1e-5}):
        assert ask(**private(table=table)).job.private.sigma == SIGMA


def test_4_a_private_job_is_declined_without_a_budget(refused, private, ask, made):
    asked = private()
    why = refused("POLICY", **asked)
    assert why.startswith(
        "the job spends privacy of data set 'data', but this silo's policy sets no budget; add "
    )
    lines = re.search(r"add (\[.*?\]) with (.*): the limit", why)
    text = "\n".join([asked["policy"].text, lines[1], *lines[2].split(", "), ""])
    assert ask(signed=asked["signed"], policy=made.parsed(text)).job.name == "spending"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"min_sigma": "2.001"},
            "its steps have sigma = 2; [dataset.data] has min_sigma = 2.001; have the job signed"),
        ({"delta": 1e-6},
            "its epsilon at delta = 0.00001; [dataset.data] has delta = 0.000001; have the job"),
    ],
)  # fmt: skip
def test_4_a_policy_bounds_the_noise_and_the_delta_of_a_job(refused, private, table, said):
    assert said in refused("POLICY", **private(table=table))


SHARED = {
    "privacy": {"noise": "shared"},
    "security": {"secure_aggregation": "required", "colluders": 0},
    "min_cohort": 3,
}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, '[dataset.data] has noise = "local": this silo would add a share'),
        ({"noise": '"shared"', "dishonest": 2}, "[dataset.data] asks for dishonest = 2"),
    ],
)
def test_4_a_policy_says_whose_noise_may_protect_its_records(ask, refused, private, table, said):
    assert said in refused("POLICY", **private(table=table, **SHARED))
    agreed = private("agreed", {"noise": '"shared"'}, **SHARED)
    assert ask(**agreed).job.private.shared


@pytest.mark.parametrize("part", ["steps", "metrics"])
def test_4_no_bound_on_a_norm_tells_of_what_a_share_of_the_noise_hides(
    ask, refused, private, made, part
):
    asked = private(table={"noise": '"shared"'}, **SHARED)
    assert ask(**asked).job.private.shared
    rule = f'name = "fedavg-{part}"'
    bounded = asked["policy"].text.replace(rule, f"{rule}\nmax_norm = 1e9")
    why = refused("POLICY", signed=asked["signed"], policy=made.parsed(bounded))
    assert f"its part '{part}' leaves under a share of the noise" in why


def test_4_a_plain_job_on_a_data_set_that_must_be_paid_for_is_declined(ask, refused, made):
    job = made.jobs["simple"]
    why = refused("POLICY", policy=policy_for(made, job, required="true"))
    assert why.startswith(
        "the job has no [privacy], but [dataset.data] of this silo's policy has required = true;"
        " have"
    )
    assert ask(policy=policy_for(made, job)).job == job


def unplanned(made, signed_by, **table):
    """A private job whose operator signed other numbers than the command would."""
    document = private_job(made, "unplanned").document()
    del made.jobs["unplanned"]
    return signed_by({**document, "privacy": {**document["privacy"], **table}})


def test_2_a_private_job_must_have_its_noise_and_cost_what_it_says(refused, made, signed_by):
    for table, said in (
        ({"sigma": None}, r"privacy\.sigma is missing"),
        (
            {"sigma": "0.5"},
            (
                r"privacy\.sigma = '0.5' costs epsilon = \d+\.\d+ at delta = 1e-05, and the job may"
                " cost 6"
            ),
        ),
        ({"epsilon": "1.0"}, "the job may cost 1"),
    ):
        why = refused("JOB_INVALID", signed=unplanned(made, signed_by, **table))
        assert re.search(said, why)


# (3) and (5): the records are those of the data set that the job asks for.
def test_3_a_job_gets_the_records_of_the_data_set_that_it_asks_for(made, tmp_path, data_file):
    further = np.load(data_file)
    few = {name: value[:40] for name, value in further.items()}
    np.savez(tmp_path / "few.npz", **few)
    few = FurtherData(data=Npz(file=tmp_path / "few.npz", test_fraction=0.5))
    config = SiloConfig.model_construct(
        data=Npz(file=data_file), datasets={"few": few}, weights=(), directory=tmp_path
    )
    asked = [
        made.jobs["simple"],
        made.job("of-few", dataset="few"),
        made.job("of-many", dataset="many"),
    ]
    for job in asked[1:]:
        del made.jobs[job.name]
    policy, alone = (
        policies.parse(draft(jobs, datasets=config.names).encode(), "policy.toml", config.names)
        for jobs in (asked[:2], asked[:1])
    )
    ask = lambda job: admit(made.signed(job.name), "silo-a", made.roster, policy, config, KEY)
    admitted = [ask(job) for job in asked[:2]]
    sizes = [len(each.train) + len(each.test) for each in admitted]
    assert sizes == [len(further["y"]), 40]
    assert len(admitted[1].test) == pytest.approx(20, abs=8)
    assert admitted[1].declared.dataset == "few"
    with pytest.raises(RefusedError) as caught:
        ask(asked[2])
    assert "the job is for data set 'many', and this silo has data, few" in caught.value.why
    # The code tells nobody which data sets there are: nothing may leave of another one, either.
    with pytest.raises(RefusedError) as other:
        admit(made.signed("of-few"), "silo-a", made.roster, alone, config, KEY)
    assert (caught.value.code, other.value.code) == ("POLICY", "POLICY")


# (5) Our data fit the model.
def test_5_missing_data_is_refused(refused, tmp_path):
    assert BAD_DATA in refused("DATA", data=Npz(file=tmp_path / BAD_DATA))


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (np.zeros((9, 1, 8, 7), np.float32), np.zeros(9, np.int64), "takes"),
        (np.zeros((9, 1, 8, 8), np.float32), np.full(9, 3), "label 3 in 9 of 9 records"),
        (np.zeros((9, 1, 8, 8), np.float32), np.full(9, -1), "label -1 in 9 of 9 records"),
        (np.zeros((9, 1, 8, 8), np.float32), np.zeros(8, np.int64), "one target per record"),
        (np.zeros((0, 1, 8, 8), np.float32), np.zeros(0, np.int64), "0 records"),
        (np.full((9, 1, 8, 8), np.nan, np.float32), np.zeros(9, np.int64), "NaN"),
        (np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64), "1 records"),
    ],
)
def test_5_data_that_do_not_fit_are_refused(refused, tmp_path, x, y, said):
    np.savez(tmp_path / "bad.npz", x=x, y=y)
    assert said in refused("DATA", data=Npz(file=tmp_path / "bad.npz"))


def remodelled(made, **changes):
    """The simple job with another model."""
    document = {k: v for k, v in made.jobs["simple"].document().items() if k not in DERIVED}
    document["model"] = {**document["model"], **changes}
    return Job.from_file(JobFile.model_validate(document), "job.toml")


ORDER = "class 1 is 'malignant' in the job and 'other' here; reorder"
OWN_LIST = (
    "data.class_names (or the data's own list) has {} names, the job's model.classes says 3 classes"
)
NAME = "class 1 is 'malignant' in the job and 'malign' here; rename it"


@pytest.mark.parametrize(
    ("in_job", "in_data", "said"),
    [
        (None, None, ""),
        (NAMES, None, ""),
        (None, NAMES, ""),
        (NAMES, NAMES, ""),
        (NAMES, ["benign", "other", "malignant"], ORDER),
        (NAMES, ["benign", "malign", "other"], NAME),
        (NAMES, NAMES[:2], OWN_LIST.format(2)),
        (None, NAMES[:2], OWN_LIST.format(2)),
        (None, [*NAMES, "fourth"], OWN_LIST.format(4)),
        (None, ["a", "a", "b"], "classes 0 and 1 are both named 'a'"),
    ],
)
def test_5_class_names_agree(ask, refused, made, signed_by, tmp_path, in_job, in_data, said):
    job = remodelled(made, class_names=in_job)
    names = {} if in_data is None else {"class_names": np.array(in_data)}
    np.savez(
        tmp_path / "named.npz", x=np.zeros((40, 1, 8, 8), np.float32), y=np.arange(40) % 3, **names
    )
    asked = {"signed": signed_by(job.document()), "data": Npz(file=tmp_path / "named.npz")}
    if said:
        assert f"{tmp_path / 'named.npz'}: {said}" in refused("DATA", **asked)
    else:
        assert ask(**asked).job.model.class_names == (in_job and tuple(in_job))


@pytest.mark.parametrize("labels", [[0], [1, 2]], ids=["one class", "a class less"])
def test_5_a_silo_that_lacks_a_class_is_admitted(ask, tmp_path, labels):
    y = np.resize(labels, 40)
    np.savez(tmp_path / "few.npz", x=np.zeros((40, 1, 8, 8), np.float32), y=y)
    assert sorted(set(ask(data=Npz(file=tmp_path / "few.npz")).train.y.tolist())) == labels


def test_5_one_training_record_under_batch_norm(ask, refused, made, signed_by, tmp_path):
    np.savez(tmp_path / "two.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 1]))
    data = Npz(file=tmp_path / "two.npz", test_fraction=0.5)
    keys = (bytes([n]) * 32 for n in range(99))
    key = next(k for k in keys if sum(_draw(k, i) >> 63 for i in (0, 1)) == 1)
    assert len(ask(data=data, key=key).train) == 1
    job = remodelled(made, norm="batch")
    why = refused("DATA", signed=signed_by(job.document()), data=data, key=key)
    assert why.startswith(f"{tmp_path / 'two.npz'}: 1 training record, too few for batch norm; ")


def test_5_a_split_without_test_records_is_refused(refused, data_file):
    assert "no test record" in refused("DATA", data=Npz(file=data_file, test_fraction=1e-12))


# In running order.
def test_the_first_check_that_fails_gives_the_code(refused, made, signed_by, tmp_path):
    wrong = {"policy": made.policy(), "data": Npz(file=tmp_path / BAD_DATA)}
    others = made.job("others", silos=["silo-b", "silo-c"]).document()
    invalid = {**others, "model_digest": "00" * 32}
    refused("JOB_SIGNATURE", signed=signed_by(invalid, "silo-b"), **wrong)
    assert "differs" in refused("JOB_INVALID", signed=signed_by(invalid), **wrong)
    assert "is not for silo" in refused("JOB_INVALID", signed=made.signed("others"), **wrong)
    refused("POLICY", **wrong)
    refused("DATA", data=wrong["data"])


# Weights of our own.
@pytest.fixture
def own_weights(made, tmp_path):
    """A signed fedsimsup job, and a file with values for its supervisor."""
    silos = ("silo-a", "silo-b", "silo-c", "silo-d")
    job = made.job("sup-1", "fedsimsup", silos=silos, participation=0.75)
    tensors = {
        name: v + 1 for name, v in initial_state(job.method(), "silo-a").parts["supervisor"].items()
    }
    path = tmp_path / "supervisor.safetensors"
    path.write_bytes(save(tensors))
    return path, tensors


def test_6_our_own_weights_come_along_with_their_digest(made, ask, own_weights):
    path, tensors = own_weights
    own = Weights(jobs=("sup-*",), part="supervisor", file=path)
    admitted = ask(made.signed("sup-1"), weights=(own,))
    assert {n: v.tolist() for n, v in admitted.weights["supervisor"].items()} == {
        n: v.tolist() for n, v in tensors.items()
    }
    assert admitted.digests == {"supervisor": sha256(path.read_bytes()).hexdigest()}
    assert ask(made.signed("simple"), weights=(own,)).weights == {}  # for other jobs only
    assert admitted.public == frozenset()  # it may have been trained on records of this silo
    public = own.model_copy(update={"public": True})
    assert ask(made.signed("sup-1"), weights=(public,)).public == {"supervisor"}


def test_6_weights_that_may_hold_records_are_for_jobs_on_their_data_set_alone(
    made, own_weights, data_file, tmp_path
):
    """Else what a job on one data set uploads could hold the records of another."""
    few = FurtherData(data=Npz(file=data_file))
    silos = ("silo-a", "silo-b", "silo-c", "silo-d")
    options = {"silos": silos, "participation": 0.75}
    jobs = [made.jobs["sup-1"], made.job("sup-2", "fedsimsup", dataset="few", **options)]
    del made.jobs["sup-2"]
    own = Weights(jobs=("sup-*",), part="supervisor", file=own_weights[0])
    config = SiloConfig.model_construct(
        data=Npz(file=data_file), datasets={"few": few}, directory=tmp_path
    )
    text = local_federation.policy_text(jobs).encode()
    policy = policies.parse(text, "policy.toml", config.names)
    for change, wanted in (
        ({}, [True, False]), ({"dataset": "data"}, [True, False]),
        ({"dataset": "few"}, [False, True]), ({"public": True}, [True, True]),
    ):  # fmt: skip
        weights = (own.model_copy(update=change),)
        asked = config.model_copy(update={"weights": weights})
        admitted = [
            admit(made.signed(job.name), "silo-a", made.roster, policy, asked, KEY) for job in jobs
        ]
        assert [bool(each.weights) for each in admitted] == wanted, change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"part": "extractor"}, "takes no weights for part 'extractor'"),
        ({"file": Path("nowhere.safetensors")}, "cannot read"),
    ],
)
def test_6_weights_that_do_not_fit_decline_the_job(made, refused, own_weights, change, complaint):
    own = Weights(jobs=("sup-1",), part="supervisor", file=own_weights[0]).model_copy(update=change)
    assert complaint in refused("DATA", signed=made.signed("sup-1"), weights=(own,))


# (4) again: rows by directed sums.
DIRECTED = {**PUBLIC, "dropouts": "any", "counts": dict.fromkeys(FIVE, 30), "mix": "directed"}


@pytest.fixture
def directed(blind):
    def call(name, asks="public_counts = true", **fields):
        asks += '\ndropouts = "any"'
        given = {
            "options": {"similarity": "samples"}, "silos": FIVE, "participation": 0.8, **fields,
        }  # fmt: skip
        return blind(name, given.pop("security", DIRECTED), "fedsimsup", asks=asks, **given)

    return call


def test_4_directed_rows_are_decided_by_who_may_read_them(ask, refused, directed, blind, made):
    asked = directed("rows")
    assert ask(**asked).job.keyed
    late = outflows(JobPlan(blind.job), made.roster, asked["policy"].on(None))[-1]
    assert late.readers == ("sum", *FIVE)
    rows = [verdict.release for verdict in late.decision.tensors if verdict.release.part == "theta"]
    (away,) = {len(blind.job.away(round_)) for round_ in range(1, blind.job.length)}
    for release, spec in zip(rows, blind.job.up(1)[0].tensors, strict=True):
        assert (release.form, release.dtype) == ("masked", "uint32")
        assert (release.shape, release.readers) == ((away, *spec.shape), FIVE)
    fewer = {'"silo-d", "silo-e"]': '"silo-d"]'}
    assert "'silo-e' is not in readers" in refused("POLICY", **directed("fewer", replace=fewer))


@pytest.mark.parametrize("asks", ["", '\ntrust = "none"'])
def test_4_directed_rows_want_no_trust_in_the_coordinator(ask, directed, blind, made, asks):
    """Whoever runs it: a silo in league with it has no part in what is hidden."""
    asked = directed("untrusted-rows", "public_counts = true" + asks)
    assert ask(**asked).job.keyed
    members = [entry.id for entry in made.roster.entries]
    roster = hosted(made, *members, host_operator=made.roster.coordinator.host_operator)
    assert sum_objections(JobPlan(blind.job), asked["policy"], roster) == ()
    directed("trusting", security={**DIRECTED, "mix": "one-upload"})
    (why,) = sum_objections(JobPlan(blind.job), asked["policy"], made.roster)
    assert "would hide theta from" in why
    assert why.endswith(
        'or ask to have it signed with security.mix = "directed", which needs no such key'
    )


def test_4_public_weights_of_what_is_mixed_have_no_private_form_to_ask_for(refused, directed):
    why = refused("POLICY", **directed("counted-rows", ""))
    assert why.endswith("set it to true if the number of this silo's records is no secret")


def test_4_directed_rows_are_of_as_many_silos_as_the_policy_asks(refused, directed):
    asks = "public_counts = true\nmin_cohort = 4"
    assert "rows of the job may sum as few as min_cohort = 3 other silos" in refused(
        "POLICY", **directed("few", asks)
    )


def test_4_directed_rows_and_shared_comparisons_together_want_no_trust(ask, blind, made):
    """Either alone leaves the other part to a shared key; the admission says what to ask for."""
    said = {}
    for mix, compare in product(("one-upload", "directed"), ("rotated", "shared")):
        name, security = f"m-{mix[0]}-{compare[0]}", {**BLIND, "mix": mix, "compare": compare}
        asked = blind(
            name, security, "pfedsim", options={"rho": 0.0}, silos=FIVE, asks="min_cohort = 3"
        )
        said[mix, compare] = sum_objections(JobPlan(blind.job), asked["policy"], made.roster)
    assert said.pop(("directed", "shared")) == ()
    assert ask(**asked).job.keyed  # to tag, as it happens
    ends = {
        ("one-upload", "rotated"): 'security.compare = "shared" and security.mix = "directed"',
        ("one-upload", "shared"): 'security.mix = "directed"',
        ("directed", "rotated"): 'security.compare = "shared"',
    }
    for job, end in ends.items():
        (why,) = said[job]
        assert "only a key that every silo of the job has would hide" in why
        assert why.endswith(f"or ask to have it signed with {end}, which needs no such key")

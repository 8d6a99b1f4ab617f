import contextlib
import json

import pytest
from support.signed_federation import job_document
from typer.testing import CliRunner

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.job.job import Job
from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.commands.policy.draft import draft
from staddle.errors import LocalError, RefusedError
from staddle.files.documents import canonical_json
from staddle.security.identity import roster as rosters
from staddle.security.policy import policy as policies
from staddle.security.policy.data_sets import DataSets
from staddle.silo import config as configs
from staddle.silo.admission.checks import admit

SILOS = ["a", "b"]


def job(name, method="fedper", silos=SILOS, **options):
    return job_document(silos, name=name, rounds=4, method={"name": method, "options": options})


def policy_command(*words):
    return CliRunner().invoke(app, ["policy", *map(str, words)])


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = local_federation.make(tmp_path_factory.mktemp("policy") / "federation", [*SILOS, "c"])
    documents = job("one"), job("two", "pfedsim")
    jobs = [local_federation.sign_job(made, document) for document in documents]
    local_federation.sign_job(made, job("others", silos=["b", "c"]))
    local_federation.write_silo(made, "a", "localhost:7443", digits(), jobs)
    return made


@pytest.fixture
def check(federation, tmp_path):
    """Run the command with a policy that was changed.

    Its output, and what the agent itself would say.
    """

    def call(name, *arguments, replace=(), code=0, drafted=False):
        signed = federation.folder / "jobs" / f"{name}.json"
        config = configs.load(federation.silo_config("a"))
        text = config.policy.read_text()
        if drafted:
            text = draft([Job.from_toml(signed.with_suffix(".toml"))], trust=True)
        for old, new in replace:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "policy.toml"
        path.write_text(text)
        options = ["--config", federation.silo_config("a"), "--policy", path]
        result = policy_command("check", signed, *options, *arguments)
        assert result.exit_code == code, (result.output, result.exception)
        roster = rosters.load(config.roster)
        with pytest.raises(RefusedError) if code else contextlib.nullcontext():
            admit(signed.read_bytes(), "a", roster, policies.load(path), config, bytes(32))
        return result.output

    return call


def test_every_tensor_has_a_line_with_rule_bytes_and_reader(check):
    shown = check("one")
    lines = shown.splitlines()
    assert "signed by operator" in lines
    assert "rounds 0 to 3, each:" in lines
    assert "  part 'extractor' (backbone), 52,232 bytes, read by coordinator" in lines
    shape = "[32, 16, 3, 3]  18,432"
    assert f"    extractor.conv2.weight  float32  {shape}  leaves by rule fedper-extractor" in lines
    most = "the policy allows at most 67,108,864, in 100 attempts"
    assert f"  10 tensors, 52,256 bytes per round; {most}" in lines
    assert lines[-2].startswith("At most 209,024 bytes in all rounds. This silo would ACCEPT")
    assert "classifier" not in shown
    assert "blind" not in shown


def test_rounds_are_grouped_by_what_leaves(check):
    """Rounds that upload the same are shown together, others apart."""
    lines = check("two").splitlines()
    assert [line for line in lines if line.startswith("round")] == [
        "rounds 0 to 1, each:",
        "rounds 2 to 3, each:",
    ]
    assert sum("part 'rows'" in line for line in lines) == 1


def test_what_is_held_back_says_why_and_the_silo_declines(check):
    replace = [('parts = ["rows"]', 'parts = ["row"]'), ('"classifier.**"', '"class.**"')]
    shown = check("two", replace=[*replace, ('"64MiB"', '"50KiB"')], code=1)
    line = "    classifier.weight       float32  [10, 64]         2,560  HELD BACK:\n"
    for said in (
        "  part 'rows' (classifier_rows), 2,560 bytes, read by coordinator\n",
        "      no [[allow]] has method 'pfedsim' and part 'rows'; add one if it may leave\n",
        f"{line}      rule 'pfedsim-model': no glob",
        "HELD BACK: 54856 bytes this round are over max_bytes_per_round = 51200; raise it",
    ):
        assert said in shown
    assert shown.endswith("This silo would DECLINE the job; 3 tensors are held back.\n")


def test_no_line_is_longer_than_100_columns(federation, check):
    document = job("w" * 64, "fedavg")
    document["model"] = {"name": "mobilenet-v2", "classes": 10, "norm": "group"}
    local_federation.sign_job(federation, document)
    shown = check("w" * 64, replace=[('methods = ["fedper"]', 'methods = ["fedavg"]')], code=1)
    assert len(shown.splitlines()) > 300
    assert max(map(len, shown.splitlines())) <= 100
    shown = check("one", replace=[('name = "fedper-extractor"', f'name = "{"r" * 64}"')])
    line = "    extractor.conv1.bias    float32  [16]                64\n"
    assert f"{line}      leaves by rule {'r' * 64}\n" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_bound_on_the_norm_is_told_for_each_part_that_has_one(check):
    replace = [('name = "fedper-extractor"', 'name = "fedper-extractor"\nmax_norm = 12.5')]
    said = "held back in a round in which its norm exceeds 12.5"
    flowing = " ".join(check("one", replace=replace).split())
    assert f"part 'extractor' (backbone), 52,232 bytes, read by coordinator; {said}" in flowing
    assert flowing.count("held back in a round") == 1
    assert "held back in a round" not in check("one")
    for changes, norms in ((replace, {"extractor": 12.5}), ((), {})):
        (phase,) = json.loads(check("one", "--json", replace=changes))["phases"]
        assert phase["max_norms"] == norms


@pytest.fixture
def blind(federation):
    """Sign a job with blind sums for four silos."""

    def call(name, **security):
        document = job(name, silos=list("abcd")) | {"min_cohort": 3}
        document["security"] = {"secure_aggregation": "required", **security}
        local_federation.sign_job(federation, document)

    return call


def test_a_blind_job_says_form_and_reader_of_each_part(check, blind):
    blind("blind", weights="public", counts=dict.fromkeys("abcd", 30))
    shown = check("blind", drafted=True)
    lines = shown.splitlines()
    assert (
        "its sums are blind: 1 colluder assumed; the silos' weights are written in the job" in lines
    )
    assert "\nit tells all its silos that 'a' trains on 30 records" in shown
    assert json.loads(check("blind", "--json", drafted=True))["declared"] == {"records": 30}
    part = "  part 'extractor' (backbone), 52,224 bytes"
    assert f"{part}, masked; readable only as a sum over the round's silos" in lines
    shape = "[32, 16, 3, 3]  18,432"
    assert f"    extractor.conv2.weight  uint32  {shape}  leaves by rule fedper-extractor" in lines
    assert "@weight" not in shown
    assert "a key that the job's silos share" not in " ".join(shown.split())
    assert "ACCEPT" in lines[-2]
    assert max(map(len, lines)) <= 100
    (phase,) = json.loads(check("blind", "--json", drafted=True))["phases"]
    assert phase["readers"] == ["sum"]
    assert {tensor["form"] for tensor in phase["tensors"]} == {"masked"}
    tensors = json.loads(check("one", "--json"))["phases"][0]["tensors"]
    assert {tensor["form"] for tensor in tensors} == {"plain"}


def test_a_keyed_job_says_who_reads_what_it_mixes_and_compares(federation, check):
    security = {"secure_aggregation": "required", "weights": "public"}
    security["counts"] = dict.fromkeys("abcd", 30)
    document = job("keyed", "pfedsim", silos=list("abcd"))
    local_federation.sign_job(federation, document | {"min_cohort": 3, "security": security})
    shown = check("keyed", drafted=True)
    flowing = " ".join(shown.split())
    for said in (
        (
            "hidden by a key that the job's silos share: if any one of them colludes with the"
            " coordinator, the two can read it;"
        ),
        "can read it; the policy has trust = 'non-colluding-coordinator'",
        (
            "bytes, padded; the other silos read only weighted means, the coordinator nothing,"
            " unless a silo colludes with it: then all of it"
        ),
        (
            "bytes, rotated; the coordinator reads only lengths and similarity, unless a silo"
            " colludes with it: then all of it"
        ),
        "bytes, masked; readable only as a sum over the round's silos",
        (
            "it compares silos, which reveals to the coordinator which silos have similar"
            " proportions of labels (rank correlation"
        ),
    ):
        assert said in flowing
    assert max(map(len, shown.splitlines())) <= 100
    phases = json.loads(check("keyed", "--json", drafted=True))["phases"]
    forms = [{tensor["form"] for tensor in phase["tensors"]} for phase in phases]
    assert set().union(*forms) == {"masked", "padded", "rotated"}
    assert "a key that the job's silos share" not in check("one")
    assert "compares silos" not in check("one")
    assert "the policy has trust = 'none'" in " ".join(check("keyed", code=1).split())


def test_a_job_whose_sums_silos_alone_read_says_so_part_by_part(check, blind):
    blind("for-silos", weights="public", counts=dict.fromkeys("abcd", 30), audience="silos")
    shown = check("for-silos", drafted=True)
    flowing = " ".join(shown.split())
    for said in (
        (
            "the sum of extractor is hidden by a key that the job's silos share: if any one of them"
            " colludes with the coordinator"
        ),
        (
            "masked; readable only as a sum over the round's silos, by silos, or by the coordinator"
            " if a silo colludes with it"
        ),
        (
            "part 'metrics' (metric), 24 bytes, masked; readable only as a sum over the round's"
            " silos metrics"
        ),
    ):
        assert said.removesuffix(" metrics") in flowing
    assert max(map(len, shown.splitlines())) <= 100
    (phase,) = json.loads(check("for-silos", "--json", drafted=True))["phases"]
    assert phase["readers"] == ["silos", "sum"]
    readers = {(tensor["part"], *tensor["readers"]) for tensor in phase["tensors"]}
    assert readers == {("extractor", "silos"), ("metrics", "sum")}


def test_what_the_policy_has_against_a_blind_sum_is_said(check, blind):
    blind("private")
    stricter = [("required = true", "required = true\nmin_cohort = 5\nassumed_colluders = 2")]
    shown = check("private", replace=stricter, drafted=True, code=1)
    flowing = " ".join(shown.split())
    assert "its sums are blind: 1 colluder assumed; the silos' weights are masked too" in flowing
    assert (
        "DECLINED: the job has colluders = 1, this silo's policy 2; have it signed with" in flowing
    )
    assert (
        "DECLINED: the job sums batches of 4 silos; the policy has secure_aggregation.min_cohort"
        " = 5; have it" in flowing
    )
    assert "HELD BACK" not in shown
    assert shown.endswith("This silo would DECLINE the job.\n")
    found = json.loads(check("private", "--json", replace=stricter, drafted=True, code=1))
    assert (found["accept"], len(found["reasons"])) == (False, 2)
    assert json.loads(check("private", "--json", drafted=True))["reasons"] == []


@pytest.mark.parametrize(
    ("name", "privacy", "why"),
    [
        ("sharing", {}, "no silo steps there by itself"),
        (
            "whole",
            {"unit": "silo", "sample_rate": 1.0, "epsilon": 500.0},
            "a refusal would tell of the silo's own steps, which have no noise",
        ),
    ],
)
def test_a_job_whose_silos_share_noise_says_which_bound_has_no_effect(
    federation, check, name, privacy, why
):
    document = job(name, "fedavg", silos=list("abcd")) | {"min_cohort": 3}
    document["security"] = {"secure_aggregation": "required"}
    document["privacy"] = PRIVACY | {"noise": "shared"} | privacy
    local_federation.sign_job(federation, document)
    said = " ".join(check(name, drafted=True).split())
    lacks = "limits.max_step has no effect on what silos sum under shared noise, because"
    assert f"{lacks} {why}" in said
    assert "has no effect" not in check("one")


def test_a_job_in_the_clear_is_declined_where_sums_have_to_be_blind(check):
    own = [("[control]", "[secure_aggregation]\nrequired = true\n[control]")]
    flowing = " ".join(check("one", replace=own, code=1).split())
    assert (
        "HELD BACK: extractor, metrics would leave in the form 'plain', and secure_aggregation"
        in flowing
    )


def test_json_says_the_same(check):
    found = json.loads(check("one", "--json"))
    assert (found["accept"], found["job"], found["signer"]) == (True, "one", "operator")
    (phase,) = found["phases"]
    assert (phase["first_round"], phase["last_round"], phase["bytes"]) == (0, 3, 52256)
    assert phase["readers"] == ["coordinator"]
    assert sum(tensor["bytes"] for tensor in phase["tensors"]) == phase["bytes"]
    found = json.loads(check("one", "--json", replace=[('"extractor.**"', '"x"')], code=1))
    assert found["accept"] is False
    held = [tensor["name"] for tensor in found["phases"][0]["tensors"] if not tensor["leaves"]]
    assert len(held) == 6


def test_a_job_that_is_refused_before_the_policy_is_asked(federation, check):
    other = check("others", code=1)
    assert "DECLINE the job, JOB_INVALID: job 'others' is not for silo 'a'" in other
    signed = json.loads((federation.folder / "jobs" / "one.json").read_text())
    signed["document"]["rounds"] = 5
    (federation.folder / "jobs" / "forged.json").write_bytes(canonical_json(signed))
    forged = check("forged", code=1)
    assert "DECLINE the job, JOB_SIGNATURE: operator: its signature does not fit" in forged
    assert json.loads(check("forged", "--json", code=1))["code"] == "JOB_SIGNATURE"


def test_without_a_configuration_policy_and_roster_are_named(federation):
    signed, roster = federation.folder / "jobs" / "others.json", federation.folder / "roster.json"
    policy = federation.folder / "a" / "policy.toml"
    run = policy_command("check", signed, "--policy", policy, "--roster", roster)
    assert "ACCEPT" in run.output  # of which silo nobody said
    run = policy_command("check", signed, "--policy", policy)
    assert isinstance(run.exception, LocalError)
    assert "both --policy POLICY.toml and --roster" in str(run.exception)


def test_the_roster_is_held_against_the_pins_of_the_configuration(federation, tmp_path):
    for name in ("silo.toml", "policy.toml"):
        text = (federation.folder / "a" / name).read_text().replace('"local"', '"other"')
        (tmp_path / name).write_text(text.replace("../", f"{federation.folder}/"))
    signed = federation.folder / "jobs/one.json"
    run = policy_command("check", signed, "--config", tmp_path / "silo.toml")
    assert "roster is of federation 'local', but federation = 'other' in" in str(run.exception)


# Private jobs.
PRIVACY = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": "2"}


@pytest.fixture
def private(federation):
    document = job("costly", "fedavg") | {"rounds": 3, "privacy": PRIVACY}
    local_federation.sign_job(federation, document)


def test_a_private_job_says_what_it_costs_and_what_the_policy_lets_it(check, private):
    shown = check("costly", drafted=True)
    flowing = " ".join(shown.split())
    for said in (
        "private: noise of 2 times the clip of 1, ",
        " of 6 at delta = 1e-05 of each silo's data set",
        "[dataset.data] allows epsilon = 2.",
        "at delta = 0.00001 for all jobs together; this silo declines jobs without [privacy]",
        "its uploads are meant to be differentially private; in each round the gate checks for",
        "checks for each tensor that the budget paid for it",
        "This silo would ACCEPT the job",
    ):
        assert said in flowing
    assert max(map(len, shown.splitlines())) <= 100
    document = json.loads(check("costly", "--json", drafted=True))
    assert {tensor["taint"] for tensor in document["phases"][0]["tensors"]} == {"noised"}
    told = document["privacy"]
    assert 0 < float(told.pop("epsilon")) <= 6
    limit = {"epsilon": "2.8439", "delta": "0.00001"}
    asked = {"dataset": "data", "sigma": "2", "target": "6.0", "delta": "0.00001"}
    assert told == {**asked, "limit": limit, "required": True}
    plain = json.loads(check("one", "--json"))
    assert plain["privacy"] is None
    assert {tensor["taint"] for tensor in plain["phases"][0]["tensors"]} == {"exact"}
    assert "exact" not in check("one")


def test_a_private_job_is_declined_without_a_budget_or_with_one_for_less_noise(check, private):
    other = [('methods = ["fedper"]', 'methods = ["fedavg"]')]
    without = " ".join(check("costly", replace=other, code=1).split())
    why = "the job spends privacy of data set 'data', but this silo's policy sets no budget; add"
    assert f"DECLINED: {why}" in without
    strict = [("# min_sigma = 0.5", "min_sigma = 2.5")]
    shown = " ".join(check("costly", replace=strict, drafted=True, code=1).split())
    assert "DECLINED: its steps have sigma = 2; [dataset.data] has min_sigma = 2.5" in shown


def test_a_plain_job_is_declined_where_the_data_set_has_to_be_protected(check):
    table = (
        '\n[dataset.data]\nunit = "record"\nepsilon = 1\ndelta = 1e-5\nrequired = true\n\n[control]'
    )
    shown = " ".join(check("one", replace=[("\n[control]", table)], code=1).split())
    assert (
        "DECLINED: the job has no [privacy], but [dataset.data] of this silo's policy has required"
        " = true" in shown
    )
    assert "would leave as computed from records without noise" in shown


def test_a_job_is_judged_for_the_data_set_that_it_asks_for(federation, tmp_path):
    """As the agent does, and a job on one that this silo lacks is declined."""
    config = federation.silo_config("a")
    jobs = [
        local_federation.sign_job(federation, {**job(name), "dataset": name})
        for name in ("scans", "absent")
    ]
    silo = tmp_path / "silo.toml"
    text = (
        config.read_text()
        .replace('= "', f'= "{config.parent}/', 5)
        .replace(f"{config.parent}/localhost", "localhost")
    )
    silo.write_text(text + '[datasets.scans.data]\nfile = "scans.npz"\n')
    policy = tmp_path / "policy.toml"
    policy.write_text(draft(jobs[:1], trust=True))
    options = ("--config", silo, "--policy", policy)
    signed = [federation.folder / "jobs" / f"{each.name}.json" for each in jobs]
    shown = policy_command("check", signed[0], *options)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert "on data set 'scans'" in shown.output.splitlines()
    declined = policy_command("check", signed[1], *options)
    assert declined.exit_code == 1
    said = (
        "would DECLINE the job, POLICY: the job is for data set 'absent', and this silo has data,"
    )
    assert said in " ".join(declined.output.split())


def test_the_data_set_is_that_of_the_configuration_or_named(federation, private, tmp_path):
    folder = federation.folder
    text = draft([Job.from_toml(folder / "jobs" / "costly.toml")], datasets=DataSets.one("cxr"))
    (tmp_path / "policy.toml").write_text(text)
    signed, roster = folder / "jobs" / "costly.json", ("--roster", folder / "roster.json")
    own = ("check", signed, "--policy", tmp_path / "policy.toml", *roster)
    named = ("--dataset", "cxr")
    assert "[dataset.cxr] allows epsilon = " in policy_command(*own, *named).output
    refused = policy_command(*own)
    assert isinstance(refused.exception, LocalError)
    assert "names data set 'cxr', and this silo has data; name it alike" in str(refused.exception)
    both = ("check", signed, "--config", federation.silo_config("a"), *named)
    assert "--dataset: the configuration names" in str(policy_command(*both).exception)
    made = policy_command("new", signed, *named, "--out", tmp_path / "new.toml", *roster)
    assert made.exit_code == 0, made.exception
    assert policies.load(tmp_path / "new.toml", "cxr").on(None).budget.required

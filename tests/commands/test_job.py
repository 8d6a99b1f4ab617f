import hashlib
import json
import re
from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch
from support.start_weights import extractor, save_start
from typer.testing import CliRunner

from staddle.algorithms.job.evaluated import Evaluated
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.job.privacy import job_spends
from staddle.algorithms.tasks.class_counting import ClassCounting
from staddle.algorithms.tasks.counting import flattened
from staddle.commands import job as job_module
from staddle.commands.federation import local_federation
from staddle.commands.federation.round_text import in_words
from staddle.commands.main import app
from staddle.errors import LocalError
from staddle.files.documents import canonical_json, parse_toml
from staddle.security.dp.rdp import cost
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import JOB as JOB_DOMAIN
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.security.preflight import size

JOB = """
version = 1
name = "first"
seed = 7
purpose = "For a test"
rounds = 4
silos = ["a", "b", "c", "d"]

[method]
name = "fedper"

[model]
name = "cnn-digits"
classes = 2
class_names = ["benign", "malignant"]

[training]
lr = 0.1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return local_federation.make(
        tmp_path_factory.mktemp("sign") / "federation", ["a", "b", "c", "d"]
    ).folder


@pytest.fixture
def sign(folder, tmp_path):
    def call(*changes, keys="operator"):
        text = JOB
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "job.toml").write_text(text)
        options = {
            "--keys": folder / keys,
            "--roster": folder / "roster.json",
            "--out": tmp_path / "job.json",
        }
        arguments = [
            "sign",
            tmp_path / "job.toml",
            *(word for pair in options.items() for word in pair),
        ]
        return (
            CliRunner().invoke(app, ["job", *(str(argument) for argument in arguments)]),
            tmp_path / "job.json",
        )

    return call


def blind(counts):
    table = f"secure_aggregation = 'required'\nweights = 'public'\ncounts = {{ {counts} }}"
    return (
        ("seed =", "min_cohort = 3\nseed ="),
        ("[training]", f"[security]\n{table}\n[training]"),
    )


def test_a_job_that_begins_with_a_file_says_what_is_taken_from_it(sign, tmp_path):
    values, file = extractor(), tmp_path / "w.safetensors"
    save_start(file, {**values, "head.weight": torch.zeros(1)})
    table = ("[training]", '[model.weights]\nfile = "w.safetensors"\n[training]')
    result, out = sign(table)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    start = f"{size(file.stat().st_size)}, SHA-256 {digest}"
    assert f"the initial values of extractor come from a file of {start}" in said
    assert "not taken from the file: 'head.weight'" in said
    assert f"submit the job with --weights {file}" in said
    written = json.loads(out.read_text())["document"]["model"]["weights"]
    assert written["sha256"] == digest
    assert "file" not in written
    name = max(values, key=lambda each: values[each].numel())
    rows = len(values[name])
    save_start(file, {**values, name: values[name][:1].expand_as(values[name]).contiguous()})
    result, _ = sign(table)
    said = " ".join(result.output.split())
    layer = name.removeprefix("extractor.")
    assert f"{rows} rows of {layer!r} are multiples of others, as in a model that is made" in said
    save_start(file, dict(list(values.items())[1:]))
    result, _ = sign(table)
    assert "which the job's extractor has; it has" in str(result.exception)
    result, _ = sign((table[0], table[1].replace("w.safe", "x.safe")))
    assert "job.toml: model.weights: " in str(result.exception)


def test_another_file_than_the_signed_jobs_is_not_sent(sign, tmp_path):
    """Told before anything is: there is no coordinator here."""

    def submitted(file):
        words = ["submit", tmp_path / "job.json", "--operator", tmp_path / "none.toml"]
        result = CliRunner().invoke(app, ["job", *map(str, words), "--weights", str(file)])
        return str(result.exception)

    file = save_start(tmp_path / "w.safetensors")
    sign(("[training]", '[model.weights]\nfile = "w.safetensors"\n[training]'))
    digest, size_ = hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size
    assert submitted(file).startswith(f"{tmp_path / 'none.toml'}: cannot read it")
    save_start(file, extractor(3))
    assert submitted(file) == (
        f"{file}: not the file that {tmp_path / 'job.json'} was signed with, which has"
        f" {size_} bytes and SHA-256 {digest}; take that one, or have the job signed again under a"
        " new name"
    )
    assert "not a file; give the one that the job was signed with" in submitted(tmp_path)
    sign()
    assert "job.json: the job names no file of weights; leave out --weights" in submitted(file)


def test_a_job_whose_declared_weights_show_one_silo_is_not_signed(sign):
    result, out = sign(*blind("a = 40, b = 40, c = 40, d = 200"))
    assert isinstance(result.exception, LocalError)
    assert "job.toml: security.counts: silo 'd' weighs too much among a, b, c, d" in str(
        result.exception
    )
    assert not out.exists()
    result, out = sign(*blind("a = 40, b = 40, c = 40, d = 50"))
    assert result.exit_code == 0, result.exception
    assert '"counts":{"a":40,"b":40,"c":40,"d":50}' in out.read_text()


def test_a_good_job_is_signed(sign, folder):
    result, out = sign()
    assert result.exit_code == 0, result.exception
    assert "job 'first', method fedper" in result.output
    show = ["job", "show", str(out), "--roster", str(folder / "roster.json")]
    shown = CliRunner().invoke(app, [*show, "--json"]).output
    assert json.loads(shown) == json.loads(out.read_text())["document"]
    assert '"malignant"' in shown


def shown(folder, out):
    """What ``job show`` says to people, without its line breaks."""
    arguments = ["job", "show", str(out), "--roster", str(folder / "roster.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.exception
    assert max(map(len, result.output.splitlines())) <= 100
    return " ".join(result.output.split())


def test_people_are_shown_who_signed_and_what_leaves(sign, folder):
    _, out = sign(("seed =", 'dataset = "scans"\nparticipation = 0.5\nseed ='))
    document = json.loads(out.read_text())["document"]
    said = shown(folder, out)
    for text in (
        "job 'first', method fedper, model cnn-digits, 4 rounds digest ",
        "signed by operator purpose, as the operator says: For a test for 4 silos: a, b, c, d; ",
        "; 2 are drawn per round on data set 'scans'",
        "task classification, classes = 2, records of shape [1, 8, 8]",
        "in the clear: the coordinator sees what each silo uploads",
        "no [privacy]: none of what leaves is differentially private",
        "rounds 0 to 3, each: part 'extractor' (backbone), 52,232 bytes, read by coordinator",
        "part 'metrics' (metric), 24 bytes, read by coordinator",
    ):
        assert text in said, said
    parts = {part["name"] for phase in document["schema"] for part in phase["up"]}
    assert set(re.findall(r"part '(\w+)'", said)) == parts
    each = int(re.search(r"tensors, ([\d,]+) bytes per round", said)[1].replace(",", ""))
    assert f"At most {4 * each:,} bytes of each silo in all rounds." in said


def test_people_are_shown_what_is_hidden_and_what_noise_protects(sign, folder):
    _, out = sign(PRIVATE, ("seed =", "min_cohort = 3\nseed ="))
    said = shown(folder, out)
    assert "private: noise of " in said
    assert "protects: each record of a silo's data set." in said
    assert "no [privacy]" not in said
    _, out = sign(*blind("a = 40, b = 40, c = 40, d = 50"))
    said = shown(folder, out)
    assert "blind: each silo's upload is masked; the coordinator reads the sums" in said
    assert "its sums are blind: 1 colluder assumed" in said
    assert "52,224 bytes, masked; readable only as a sum over the round's silos" in said


def test_a_job_of_other_code_is_shown_whole_and_not_to_people(sign, folder):
    """Its parts follow from code that is not here."""
    _, out = sign()
    operator, roster = load_keys(folder / "operator"), rosters.load(folder / "roster.json")
    document = json.loads(out.read_text())["document"] | {"method_digest": "0" * 64}
    signed = sign_document(document, roster, operator, JOB_DOMAIN)
    out.write_bytes(canonical_json(signed))
    arguments = ["job", "show", str(out), "--roster", str(folder / "roster.json")]
    assert "method_digest" in str(CliRunner().invoke(app, arguments).exception)
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output) == document


@pytest.mark.parametrize(
    ("keys", "role"),
    [("a/keys", "silo"), ("founder", "founder"), ("coordinator/keys", "coordinator")],
)
def test_only_an_operator_signs_a_job(sign, keys, role):
    result, out = sign(keys=keys)
    assert isinstance(result.exception, LocalError)
    assert f"is a {role}; only an operator signs jobs" in str(result.exception)
    assert not out.exists()


FEDPER = 'name = "fedper"'


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([(FEDPER, 'name = "fedsimsup"')],
            "(fedsimsup on cnn-digits): method fedsimsup: all 4 silos train in every"),
        ([('"cnn-digits"', '"glm"')],
            "(fedper on glm): part 'extractor', which crosses in round 0, is empty"),
        ([(FEDPER, 'name = "fedaims"')],
            "(fedaims on cnn-digits): method 'fedaims' supervises the blocks"),
        ([(FEDPER, 'name = "fedssa"\noptions = { extractors = ["lenet5"] }')],
            ("(fedssa on cnn-digits): fedssa: extractor 'lenet5' needs at least 16 x 16"
            " pixels, not [1, 8, 8]; choose")),
        ([("classes = 2", "classes = 3")],
            "job.toml: model: model.class_names has 2 names, model.classes says 3 classes; give"),
        ([('"malignant"', '"benign"')], "job.toml: model: classes 0 and 1 are both named 'benign'"),
        ([("lr = 0.1", "lr = 0.1\nepoch = 3")],
            "job.toml: unknown key 'training.epoch'; did you mean 'epochs'?"),
        ([('"d"]', '"e"]')], "job.toml: silos names 'e', which is not a silo of"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_work_is_not_signed(sign, changes, said):
    result, out = sign(*changes)
    assert isinstance(result.exception, LocalError), (result.output, result.exception)
    assert said in str(result.exception)
    assert not out.exists()


PRIVATE = ("[training]", "[privacy]\nepsilon = 8\ndelta = 1e-5\nsample_rate = 0.1\n[training]")


def test_the_noise_of_a_private_job_is_planned_where_it_is_signed(sign):
    result, out = sign(PRIVATE)
    assert result.exit_code == 0, result.exception
    document = json.loads(out.read_text())["document"]
    sigma = document["privacy"]["sigma"]
    job = Job.from_document(document, "signed", ())
    assert 7.9 < cost(job_spends(job, sigma), 1e-5) <= 8
    assert cost(job_spends(job, str(Decimal(sigma) - Decimal("0.001"))), 1e-5) > 8
    assert f"digest {job.digest}" in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith(
        f"private: noise of {sigma} times the clip of 1, 50 steps at most, epsilon 7.9"
    )
    assert last.endswith(" of 8 at delta = 1e-05 of each silo's data set")
    again, _ = sign(
        (PRIVATE[0], PRIVATE[1].replace("[training]", f"sigma = '{sigma}'\n[training]"))
    )
    assert job.digest in again.output


def test_noise_that_costs_more_than_the_job_may_is_not_signed(sign):
    result, out = sign((PRIVATE[0], PRIVATE[1].replace("[training]", "sigma = '0.5'\n[training]")))
    assert isinstance(result.exception, LocalError)
    assert re.search(
        r"job\.toml: \[privacy\] sigma = '0\.5' costs epsilon = [0-9.]+ at delta = 1e-05, and the"
        r" job may cost 8.0; "
        r"'0\.[0-9]{3}' would do, and left out it is planned",
        str(result.exception),
    )
    result, out = sign((PRIVATE[0], PRIVATE[1].replace("epsilon = 8", "epsilon = 0.3")))
    assert "job.toml: [privacy] no noise of its steps keeps the job within epsilon = 0.3" in str(
        result.exception
    )
    assert "raise histogram_sigma, or epsilon" in str(result.exception)
    assert not out.exists()


def test_a_blind_job_must_have_room_for_the_noise_of_its_class_means(sign):
    aims = (
        ('name = "fedper"', 'name = "fedaims"'),
        ('"cnn-digits"', '"convnet-digits"\nnorm = "group"'),
    )
    blind = "[security]\nsecure_aggregation = 'required'\nclip_exponent = 1\n"
    changes = (*aims, ("seed =", "min_cohort = 3\nseed ="), (PRIVATE[0], blind + PRIVATE[1]))
    result, out = sign(*changes)
    assert isinstance(result.exception, LocalError)
    assert "security.clip_exponent = 1: with the noise of statistics_sigma, class means of" in str(
        result.exception
    )
    assert str(result.exception).endswith("; set it to 2")
    assert not out.exists()


def test_counts_that_silos_keep_are_not_shown_as_zeros():
    sums = {"tested": 0, "correct.trained": 0, "correct.delivered": 0}
    counting = ClassCounting(2, noised=True)
    closed = {"metrics": sums, "measures": flattened(counting.of_sums(sums)), "noisy": True}
    assert in_words(closed, Evaluated(counting)) == "the silos keep their test counts to themselves"


def test_a_job_for_the_records_of_a_file_and_the_silos_of_the_roster(tmp_path, monkeypatch):
    """Blind from four silos on, with the table's features; it is whole as it stands."""
    rows = [f"{30 + n},{n % 3},{('healthy', 'ill')[n % 2]}" for n in range(40)]
    (tmp_path / "sample.csv").write_text("\n".join(["age,stage,state", *rows]) + "\n")
    told = []
    monkeypatch.setattr(job_module.printer, "show", lambda *lines, **_: told.extend(lines))
    for silos in (("a", "b"), ("a", "b", "c", "d")):
        roster = SimpleNamespace(silo_ids=frozenset(silos))
        monkeypatch.setattr(job_module, "access", lambda *_, roster=roster, **__: (None, roster))
        file = tmp_path / f"of-{len(silos)}.toml"
        call = ["job", "init", str(file), "--data", str(tmp_path / "sample.csv")]
        call += ["--label", "state", "--purpose", "For a test of drafts", "--operator", "o.toml"]
        result = CliRunner().invoke(app, call)
        assert result.exit_code == 0, result.output
        job = Job.from_file(parse_toml(file.read_bytes(), JobFile, "file"), "file")
        assert (job.silos, job.name, job.purpose) == (silos, file.stem, "For a test of drafts")
        assert [feature.name for feature in job.features] == ["age", "stage"]
        assert job.model.class_names == ("healthy", "ill")
        assert job.security.required == (len(silos) == 4)
    assert "Every silo reads them" in " ".join(map(str, told))

    result = CliRunner().invoke(app, [*call[:-2]])
    assert "--data: give --operator" in str(result.exception)

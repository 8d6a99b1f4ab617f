"""A job that names the code of an installed package: which silo runs it, and which declines."""

import json
import sys

import pytest

from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.commands.policy.draft import draft
from staddle.errors import LocalError, RefusedError
from staddle.files import packages
from staddle.files.documents import canonical_json
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.silo.admission.checks import admit
from staddle.silo.config import SiloConfig

MIXED = {"name": "mixed", "classes": 3, "head": "fc", "input": [1, 8, 8]}


@pytest.fixture
def ask(made, data_file):
    """Admit a job; ``packages`` as the policy has them."""
    if "outside" not in made.jobs:
        made.job("outside", model=MIXED)

    def call(packages, signed=None):
        text, line = draft([made.jobs["outside"]]), '\npackages = ["other-models"]\n'
        assert line in text
        policy = made.parsed(text.replace(line, f"\npackages = {json.dumps(packages)}\n"))
        config = SiloConfig.model_construct(
            data=Npz(file=data_file), weights=(), directory=data_file.parent
        )
        signed = signed or made.signed("outside")
        return admit(signed, "silo-a", made.roster, policy, config, bytes(32))

    return call


def test_a_package_runs_where_the_policy_names_it(ask, made):
    job = ask(["other-models"]).job
    (package,) = job.document()["packages"]
    assert (package["name"], package["version"]) == ("other-models", "0.1")
    assert len(package["sha256"]) == 64
    assert ask(["Other_Models"]).job == job


@pytest.mark.parametrize("packages", [[], ["lung-models", "other"]])
def test_none_of_its_code_runs_where_the_policy_does_not(ask, packages):
    sys.modules.pop("other_models", None)
    with pytest.raises(RefusedError) as caught:
        ask(packages)
    assert caught.value.code == "POLICY"
    assert caught.value.why.startswith(
        "the job runs code of the installed package other-models, which may not run here; read it,"
        " then list the package under packages in the policy or the coordinator's"
    )
    assert "other_models" not in sys.modules


def test_other_code_under_the_same_name_is_declined_with_both_digests(ask, made):
    document = made.jobs["outside"].document()
    (package,) = document["packages"]
    changed = {**document, "packages": [{**package, "sha256": "ab" * 32, "version": "0.2"}]}
    keys = load_keys(made.files.folder / "operator")
    signed = canonical_json(sign_document(changed, made.roster, keys, JOB))
    with pytest.raises(RefusedError) as caught:
        ask(["other-models"], signed)
    assert caught.value.code == "JOB_INVALID"
    assert (
        f"(other-models: 0.1, SHA-256 {package['sha256']} here, 0.2, SHA-256 {'ab' * 32} in the"
        " job); install the packages that the job was signed with" in caught.value.why
    )


def test_a_job_cannot_leave_out_what_it_runs(ask, made):
    document = made.jobs["outside"].document()
    less = {key: value for key, value in document.items() if key != "packages"}
    keys = load_keys(made.files.folder / "operator")
    signed = canonical_json(sign_document(less, made.roster, keys, JOB))
    with pytest.raises(RefusedError, match=r"other-models: .* here, none in the job"):
        ask(["other-models"], signed)


def test_a_package_that_lost_its_name_runs_nowhere(ask, made, tmp_path, monkeypatch):
    """Of two entry points of one name, one is of a package without metadata."""
    signed, info = made.signed("outside"), tmp_path / "other_models-0.2.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[staddle.models]\nmixed = other_models:mixed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RefusedError, match="code of the installed package unnamed, which may not"):
        ask(["other-models"], signed)


def test_a_package_with_broken_metadata_declines_the_job_and_ends_nothing(ask, made, monkeypatch):
    """Whoever edits it by hand: the agent goes on."""

    def broken(*_):
        raise LocalError("the metadata of 'other_models:mixed' cannot be read: no; reinstall it")

    ask(["other-models"])
    monkeypatch.setattr(packages, "owners", broken)
    with pytest.raises(RefusedError, match=r"the metadata of .* cannot be read") as caught:
        ask(["other-models"], made.signed("outside"))
    assert caught.value.code == "JOB_INVALID"


def test_a_draft_says_what_it_means(made, ask):
    ask(["other-models"])
    text = " ".join(draft([made.jobs["outside"]]).replace("\n# ", " ").split())
    assert "Jobs may run code of the installed packages other-models, which can do" in text
    assert "packages" not in draft([made.jobs["simple"]])

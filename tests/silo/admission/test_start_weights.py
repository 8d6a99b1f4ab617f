"""Which file of weights a silo lets a job begin with, and next to which earlier jobs."""

import json

import pytest
import torch
from support.signed_federation import job_document
from support.start_weights import NETWORK, extractor, save_start, start_table

from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.commands.federation import local_federation
from staddle.commands.policy.draft import draft
from staddle.errors import RefusedError
from staddle.security.policy import policy as policies
from staddle.silo.admission import start_weights
from staddle.silo.admission.checks import admit
from staddle.silo.admission.start_weights import WeightsNeededError, start_objection
from staddle.silo.config import SiloConfig

EIGHT = tuple(f"silo-{letter}" for letter in "abcdefgh")
SIX = EIGHT[:6]
FIVE = SIX[:5]
BLIND = {"secure_aggregation": "required"}
PUBLIC = {**BLIND, "weights": "public", "counts": dict.fromkeys(SIX, 30)}
PLAIN = {"security": {}}
PRIVACY = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": "2"}
POLICY = (
    "version = 1\n[limits]\nmax_bytes_per_round = 1\n[control]\nmax_messages = 1\nmax_bytes ="
    ' "1KiB"\n'
)


@pytest.fixture
def ask(made, data_file, tmp_path):
    """Admit a job that begins with a file; ``lines`` are of the policy's limits."""

    def call(tensors, *, there=True, listed=True, bounded=True):
        name = f"begun-{len(made.jobs)}"
        save_start(made.files.folder / "jobs" / f"{name}.safetensors", tensors)
        job = made.job(name, model=start_table(f"{name}.safetensors"))
        digest = job.model.weights.sha256
        text, line = draft([job]), f"weights = {json.dumps([digest])}"
        assert line in text
        text = text if listed else text.replace(line, "")
        bound = next(each for each in text.splitlines() if each.startswith("max_parallel = "))
        text = text if bounded else text.replace(bound, "")
        call.path = tmp_path / "weights" / f"{digest}.safetensors"
        if there:
            call.path.parent.mkdir(exist_ok=True)
            job.weights_file.rename(call.path)
        config = SiloConfig.model_construct(
            data=Npz(file=data_file), weights=(), directory=tmp_path
        )
        made.jobs.pop(name)
        signed = made.signed(name)
        return admit(signed, "silo-a", made.roster, made.parsed(text), config, bytes(32))

    return call


def declined(ask, code, *arguments, **options):
    with pytest.raises(RefusedError) as caught:
        ask(*arguments, **options)
    assert caught.value.code == code
    return caught.value.why


def test_a_job_begins_with_the_file_that_lies_under_its_digest(ask):
    admitted = ask(extractor())
    built = admitted.job.setting().build()["extractor"].state_dict()
    assert all(
        torch.equal(value, built[n.removeprefix("extractor.")]) for n, value in extractor().items()
    )


def test_a_file_that_the_policy_does_not_list_is_refused_before_it_is_asked_for(ask):
    why = declined(ask, "POLICY", extractor(), there=False, listed=False)
    assert "bytes, SHA-256 " in why
    assert why.endswith(
        "which is not in the policy's weights; if you know where it comes from, add the digest"
        " there"
    )


def test_a_listed_file_that_is_not_there_is_asked_for(ask):
    with pytest.raises(WeightsNeededError) as caught:
        ask(extractor(), there=False)
    assert (caught.value.code, caught.value.path) == ("DATA", ask.path)
    assert caught.value.weights == caught.value.job.model.weights


def test_a_listed_file_that_somebody_spoilt_is_asked_for_again(ask, monkeypatch):
    digest = start_weights.StartWeights.is_at
    assert ask(extractor())
    data = ask.path.read_bytes()

    def spoilt(weights, path):
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return digest(weights, path)

    monkeypatch.setattr(start_weights.StartWeights, "is_at", spoilt)
    with pytest.raises(WeightsNeededError):
        ask(extractor())


def test_a_file_that_does_not_fit_is_declined(ask):
    short = {name: value for name, value in extractor().items() if not name.endswith("bias")}
    assert "bias', which the job's extractor has" in declined(ask, "DATA", short)


def test_a_file_whose_rows_are_multiples_of_others_is_declined(ask):
    """As a model that sorts records into bins has them (Fowl et al. 2022)."""
    trapped = extractor()
    name = max(trapped, key=lambda each: trapped[each].numel())
    trapped[name][:] = trapped[name][:1]
    why = declined(ask, "DATA", trapped)
    assert f"the job's file of weights has {len(trapped[name])} rows of {name}" in why
    assert ask(trapped, bounded=False)  # a policy without the bound looks at none


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = local_federation.make(tmp_path_factory.mktemp("starts") / "federation", EIGHT)
    for seed in (1, 2):
        save_start(made.folder / "jobs" / f"{seed}.safetensors", extractor(seed))
    return made


@pytest.fixture
def judge(federation, tmp_path):
    """``judge(job, *earlier)``: the objection to a job after others, each ``(silos, changes)``."""

    def sign(name, silos, file=1, **changes):
        model = start_table(f"{file}.safetensors") if file else {"name": NETWORK, "classes": 10}
        fields = {"rounds": 1, "min_cohort": 3, "security": BLIND, "model": model, **changes}
        return local_federation.sign_job(federation, job_document(silos, name=name, **fields))

    def call(job, *earlier, lines=""):
        for number, (silos, changes) in enumerate(earlier):
            sign(f"earlier-{number}", silos, **changes)
            folder = tmp_path / f"earlier-{number}"
            folder.mkdir()
            signed = federation.folder / "jobs" / f"earlier-{number}.json"
            (folder / "job.json").write_bytes(signed.read_bytes())
        text = POLICY + (f"[secure_aggregation]\n{lines}\n" if lines else "")
        policy = policies.parse(text.encode(), "policy.toml", "data")
        silos, changes = job
        return start_objection(sign("next", silos, **changes), tmp_path, policy)

    return call


def test_two_starts_from_files_with_one_silo_more_would_tell_its_step(judge):
    why = judge((SIX, {}), (FIVE, {}))
    assert why.startswith(
        "a file of weights can make job 'next' begin like 'earlier-0', and they do not sum the same"
        " silos: together they would reveal nearly what silo-f contributed, fewer than 3 silos"
        " (secure_aggregation.min_honest + assumed_colluders, or min_difference if it is more)."
    )


@pytest.mark.parametrize(
    ("job", "earlier"),
    [
        ((SIX, {"file": 2}), (FIVE, {"file": 1})),  # two files may differ by little
        # the file of the one may hold what the other draws: that follows from its signed document
        ((SIX, {}), (FIVE, {"file": 0})),
        ((SIX, {"file": 0}), (FIVE, {})),
        ((FIVE, {}), (SIX, {})),
        # what the silos of a plain job show is taken from the sum of a blind one
        ((SIX, {}), (FIVE, PLAIN)),
        ((FIVE, PLAIN), (SIX, {})),
        ((SIX, {}), (FIVE, {**PLAIN, "file": 0})),
        ((FIVE, {**PLAIN, "file": 0}), (SIX, {})),
    ],
)
def test_whatever_begins_alike_would_tell_the_step_of_the_silo_that_differs(judge, job, earlier):
    assert "reveal nearly what silo-f contributed" in judge(job, earlier)


def test_sums_of_three_jobs_may_tell_what_those_of_two_do_not(judge):
    earlier = ((EIGHT, {}), (EIGHT[:4], {}))
    why = judge((EIGHT[3:], {}), *earlier)
    assert "'earlier-0' and 'earlier-1'" in why
    assert "reveal nearly what silo-d contributed" in why


def test_a_search_that_would_take_minutes_is_not_begun(judge, monkeypatch):
    monkeypatch.setattr(start_weights, "MOST_CHOICES", 0)
    assert "over too many sets of silos" in judge((SIX, {}), (FIVE, {}))


@pytest.mark.parametrize(
    ("job", "earlier"),
    [
        ((SIX, {}), ()),
        ((SIX, {}), ((SIX, {}),)),
        ((SIX, {"file": 0}), ((FIVE, {"file": 0}),)),
        ((SIX, PLAIN), ((FIVE, {}),)),
        ((SIX, PLAIN), ((FIVE, PLAIN),)),
        ((EIGHT[:4], {}), ((EIGHT, {}),)),
        ((EIGHT[4:], {}), ((EIGHT, {}), (EIGHT[:4], {}))),
        ((SIX, {"privacy": PRIVACY}), ((FIVE, {}),)),
        ((SIX, {}), ((FIVE, {"privacy": PRIVACY}),)),
    ],
)
def test_what_reveals_no_single_step_is_accepted(judge, job, earlier):
    assert judge(job, *earlier) == ""


def test_counts_that_are_no_secret_open_no_steps(judge):
    assert "silo-f contributed" in judge((SIX, {}), (FIVE, {}), lines="min_difference = 1")


def test_a_policy_can_ask_for_more(judge):
    why = judge((EIGHT, {}), (EIGHT[:4], {}), lines="min_difference = 5")
    assert "silo-e, silo-f, silo-g, silo-h contributed, fewer than 5 silos" in why


@pytest.mark.parametrize(("file", "earlier"), [(1, 0), (0, 1)])
def test_sums_over_changing_silos_are_not_next_to_a_file(judge, file, earlier):
    """Both are for the same silos; the one loses a silo that the other has."""
    changing = {"security": {**PUBLIC, "dropouts": "any"}}
    of_next, before = ({}, changing) if file else (changing, {})
    job, other = (SIX, {**of_next, "file": file}), (SIX, {**before, "file": earlier})
    assert "what each silo that one of them loses contributed" in judge(job, other)


def test_sums_over_changing_silos_are_next_to_others_without_a_file(judge):
    changing = {"security": {**PUBLIC, "dropouts": "any"}, "file": 0}
    assert judge((SIX, changing), (SIX, {"file": 0}), (SIX, changing)) == ""


def test_a_jobs_own_folder_is_no_earlier_job(judge, federation, tmp_path):
    """Whether another job had its name is another check's to say (job_folder.py)."""
    (tmp_path / "next").mkdir()
    assert judge((FIVE, {})) == ""
    signed = federation.folder / "jobs" / "next.json"
    (tmp_path / "next" / "job.json").write_bytes(signed.read_bytes())
    assert judge((SIX, {})) == ""
    (tmp_path / "other").mkdir()
    (tmp_path / "next" / "job.json").rename(tmp_path / "other" / "job.json")
    assert judge((SIX, {})) == ""  # it is the document's name that counts

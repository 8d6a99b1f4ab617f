"""The model that silos share, made by the coordinator: whole, or told to be with the silos."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.jobs import make_job
from support.other_tasks import MODELS, TASKS
from support.refusals import refused
from support.trained_models import FEATURES, HEADER, table_job, table_rows

from staddle.algorithms.method import initial_state
from staddle.bundle import folder
from staddle.bundle.description import Origin, Reported
from staddle.bundle.evaluating import evaluate
from staddle.bundle.shared_model import SharedModelMaker, contract_of, shared_state
from staddle.bundle.trained import load
from staddle.commands.federation import local_federation
from staddle.errors import PeerError
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys

PRIVATE = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.5"}
AVERAGED = {"method": {"name": "fedavg"}}
REPORTED = Reported(
    round=1, silos=("a", "b"), noised=False, measures={"accuracy": 0.75, "auroc": 0.5}
)


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    federation = local_federation.make(tmp_path_factory.mktemp("shared") / "federation", ("north",))
    names = ("coordinator", "north")
    keys = {name: load_keys(federation.folder / name / "keys") for name in names}
    return SimpleNamespace(roster=rosters.load(federation.folder / "roster.json"), keys=keys)


def published(job, parts=None):
    """What the last round may have published: initial values, doubled."""
    drawn = torch.Generator().manual_seed(3)
    return {
        part.name: {spec.name: torch.rand(spec.shape, generator=drawn) for spec in part.tensors}
        for part in job.down(job.length)
        if parts is None or part.name in parts
    }


def write(path, job, members, signer="coordinator", **origin):
    keys = members.keys[signer]
    known = {"kind": "coordinator", "name": keys.entry.id, "federation": members.roster.federation}
    maker = SharedModelMaker(job.for_federation(), Origin(**known | origin), keys, REPORTED)
    maker.write(path, published(job))
    return path


def test_the_model_of_all_silos_is_used_as_a_silos_own(members, tmp_path):
    job = table_job(**AVERAGED)
    path = write(tmp_path / "model", job, members)
    folder.read(path).check_signer(members.roster)
    model = load(path)
    assert repr(model) == "<TrainedModel of job 'heart', coordinator 'coordinator': p(no), p(yes)>"
    values = published(job)["model"]
    for name, own in model.module.parts["extractor"].state_dict().items():
        assert torch.equal(own, values[f"extractor.{name}"])

    # The contract has what the job says; what is true stands in a column "label".
    (tmp_path / "new.csv").write_text(HEADER + "".join(table_rows(9)))
    (found,) = model.answer(tmp_path / "new.csv")
    assert found.names == tuple(map(str, range(2, 11)))
    assert found.answers.shape == (9, 2)
    labelled = tmp_path / "labelled.csv"
    labelled.write_text((tmp_path / "new.csv").read_text().replace("ill", "label"))
    assert evaluate(model, labelled).measured.records == 9


def test_its_card_says_that_nobody_measured_it(members, tmp_path):
    path = write(tmp_path / "model", table_job(**AVERAGED), members)
    said, card = folder.read(path).description, (path / folder.CARD).read_text()
    assert (said.records, said.measured, said.thresholds, said.reported) == (
        None,
        None,
        (),
        REPORTED,
    )
    assert "# Model of job heart at coordinator coordinator\n" in card
    assert "It is the model that the silos share, as the last round published it." in card
    assert "Use it for records like those of the silos, prepared as the job says." in card
    assert "2 silos measured the model as it was before the last round" in card
    assert "| accuracy | 0.750 |\n| AUROC | 0.500 |" in card
    assert "single records of the silos." in card
    assert "trains it further" not in card
    tuned = write(tmp_path / "tuned", table_job(method={"name": "fedavg-ft"}), members)
    line = "By method fedavg-ft each silo trains it further for itself."
    assert line in (tuned / folder.CARD).read_text()


def test_a_private_model_has_its_price(members, tmp_path):
    job = table_job(**AVERAGED, privacy=PRIVATE)
    path = write(tmp_path / "model", job, members)
    spent = json.loads((path / folder.DESCRIPTION).read_text())["privacy"]
    assert spent == {"epsilon": 3.0, "delta": 1e-5, "exact": []}
    assert "The figures above are exact" not in (path / folder.CARD).read_text()


def test_a_coordinator_alone_makes_it(members, tmp_path):
    path = write(tmp_path / "model", table_job(**AVERAGED), members, signer="north")
    with pytest.raises(PeerError, match="has the role silo, and says that it was made by a coord"):
        folder.read(path).check_signer(members.roster)
    with refused("made by coordinator north, not by silo north"):
        folder.read(path).check_named("north")


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedper", "classifier"),
        ("lg-fedavg", "extractor"),
        ("local", "classifier, extractor"),
        ("feddbe", "offset"),
        ("cfl", "classifier, extractor"),
    ],
)
def test_what_stays_at_silos_is_named(method, own):
    job = table_job(method={"name": method})
    with refused(
        f"by method {method}, the values of {own} stay at silos; each silo has its own model"
    ):
        shared_state(job, published(job))


def test_a_part_that_was_not_published_is_missing():
    job = table_job(**AVERAGED)
    with refused("by method fedavg, the values of classifier, extractor stay at silos"):
        shared_state(job, {})


def test_running_statistics_are_a_part_of_the_model():
    model = {"norm": "batch"}
    with refused("the values of extractor stay at silos"):
        shared_state(job := make_job("fedavg", model=model), published(job))
    job = make_job("fedavg", model={**model, "buffers": "global"})
    assert shared_state(job, published(job)).parts.keys() == {"extractor", "classifier"}


def test_layers_that_stand_still_are_those_of_the_job():
    job = make_job("fedavg", model={"lora": {"rank": 2}})
    state, begun = shared_state(job, published(job)), initial_state(job.method(), job.silos[0])
    shared = published(job)["model"]
    for name, value in state.flat.items():
        own = shared.get(name.removeprefix("part/").replace("/", ".", 1), begun.flat[name])
        assert torch.equal(value, own)
    assert len(shared) < len(state.flat)


def test_a_job_that_trains_nothing_has_no_model():
    model = {"name": "mlp", "input": [1, 1, 1], "classes": 2, "class_names": ["no", "yes"]}
    job = table_job(method={"name": "statistics"}, features=FEATURES[:1], model=model, rounds=1)
    with refused("method statistics trains no model"):
        shared_state(job, {})


@pytest.mark.parametrize(
    ("task", "truth"),
    [
        ("multilabel", {"labels": ["ill", "well", "age_"]}),
        ("regression", {"target": "target"}),
        ("survival", {"survival": ["time", "event"]}),
    ],
)
def test_what_is_true_has_columns_by_the_task(task, truth):
    model = {"name": "mlp", "input": [1, 1, 4], **MODELS[task]}
    if task == "multilabel":
        model["class_names"] = ["ill", "well", "age"]
    found = contract_of(table_job(task=TASKS[task], model=model))
    assert "label" not in found
    assert {key: found[key] for key in truth} == truth


def test_a_contract_is_what_the_job_says():
    assert contract_of(table_job()) == {
        "kind": "csv",
        "features": ["age", "sex", "chol"],
        "categories": {"sex": ("f", "m")},
        "label": "label",
        "classes": ("no", "yes"),
    }
    named = table_job(features=[{**FEATURES[0], "name": "label"}, *FEATURES[1:]])
    assert contract_of(named)["label"] == "label_"
    assert contract_of(make_job()) == {"kind": "npz"}

from functools import partial

import pytest
import torch
from support.refusals import refused

from staddle.algorithms.course import SiloState
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.loop import PlainStepper
from staddle.algorithms.training.silo_round import (
    final_round,
    local_round,
    state_from_bytes,
    state_to_bytes,
)
from staddle.errors import CancelledError, PeerError
from staddle.files import tensor_file


def same(one, other):
    return state_to_bytes(one) == state_to_bytes(other)


def test_a_round_delivers_trains_and_gives(make_job, make_data):
    job = make_job("fedavg", model={"norm": "batch"})
    method, train_data, test_data = job.method(), make_data(21), make_data(30, 9)
    state = initial_state(method, "a")
    before = state_to_bytes(state)
    model = {spec.name: torch.full(spec.shape, 0.01) for spec in job.down(1)[0].tensors}
    ticks = []
    outcome = local_round(
        method,
        job,
        state,
        1,
        {"model": model},
        train_data,
        test_data,
        "a",
        progress=lambda *t: ticks.append(t),
    )
    assert state_to_bytes(state) == before
    assert ticks == [(1, 3), (2, 3), (3, 3)]
    assert outcome.report.samples == 21
    # equal logits: the first class
    assert outcome.report.correct_delivered == int((test_data.y == 0).sum())
    assert outcome.report.loss > 0
    assert list(outcome.contributions) == ["model", "metrics"]
    assert outcome.contributions["model"].weight == 21.0
    counts = PLAIN.give(job.up(1)[-1], outcome.contributions["metrics"])
    assert [t.item() for t in counts.values()] == [
        outcome.report.correct_delivered,
        outcome.report.correct_trained,
        30,
    ]
    assert not any("running" in name for name in outcome.contributions["model"].tensors)
    assert outcome.state.parts["extractor"]["norm1.num_batches_tracked"].item() == 3
    again = local_round(method, job, state, 1, {"model": model}, train_data, test_data, "a")
    assert same(again.state, outcome.state)
    assert not same(
        local_round(method, job, state, 1, {"model": model}, train_data, test_data, "b").state,
        outcome.state,
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: {"head": d["model"]}, "delivered part 'head'"),
        (lambda d: {"model": {k: v for k, v in d["model"].items() if k != "classifier.bias"}},
            "classifier.bias"),
        (lambda d: {"model": {**d["model"], "classifier.extra": torch.zeros(1)}}, "schema lacks"),
        (lambda d: {"model": {**d["model"], "classifier.bias": torch.zeros(4)}}, "classifier.bias"),
        (lambda d: {"model": {**d["model"], "classifier.bias": torch.zeros(3).half()}},
            "classifier.bias"),
        (lambda d: {"model": {**d["model"], "classifier.bias": torch.full((3,), float("inf"))}},
            "NaN or infinity"),
    ],
)  # fmt: skip
def test_a_delivery_that_the_schema_lacks_is_the_coordinators_fault(
    make_job, make_data, change, complaint
):
    job = make_job("fedavg")
    good = {"model": {spec.name: torch.zeros(spec.shape) for spec in job.down(1)[0].tensors}}
    with pytest.raises(PeerError, match=complaint):
        local_round(
            job.method(),
            job,
            initial_state(job.method(), "a"),
            1,
            change(good),
            make_data(9),
            make_data(9),
            "a",
        )


@pytest.mark.parametrize("variance", [-1e-30, -1.0, float("nan")])
def test_a_delivered_variance_is_not_negative(make_job, make_data, variance):
    job = make_job("fedavg", model={"norm": "batch", "buffers": "global"})
    model = {spec.name: torch.zeros(spec.shape) for spec in job.down(1)[0].tensors}
    model["extractor.norm1.running_mean"].fill_(-1.0)
    state, records = initial_state(job.method(), "a"), make_data(9)
    play = partial(local_round, job.method(), job, state, 1, {"model": model}, records, records)
    assert play("a").report.loss > 0
    model["extractor.norm2.running_var"][3] = variance
    with pytest.raises(
        PeerError, match=r"delivered part 'model', whose tensor 'extractor.norm2.running_var' holds"
    ):
        play("a")


def test_what_is_measured_is_of_the_training_records_and_the_model_as_delivered(
    make_job, make_data, monkeypatch
):
    """A method may keep it in ``extra``, which training leaves alone.

    Classes without a record count 0.
    """
    job, seen = make_job("fedavg", model={"classes": 5}), []
    method, train_data, test_data = job.method(), make_data(21), make_data(30, 9)
    norm = lambda parts: parts["classifier"].weight.detach().norm().double()  # noqa: E731
    monkeypatch.setattr(
        method,
        "measure",
        lambda parts, x, _: {"count": torch.tensor(len(x)), "norm": norm(parts)},
        raising=True,
    )
    give = method.give
    monkeypatch.setattr(
        method, "give", lambda state, facts: seen.append((state, facts)) or give(state, facts)
    )
    state = SiloState(initial_state(method, "a").parts, {"kept": torch.tensor(4)})
    model = {spec.name: torch.full(spec.shape, 0.01) for spec in job.down(1)[0].tensors}
    outcome = local_round(method, job, state, 1, {"model": model}, train_data, test_data, "a")
    ((trained, facts),) = seen
    assert facts.measured["count"].item() == 21
    assert facts.measured["norm"].item() == pytest.approx(model["classifier.weight"].norm().item())
    assert facts.class_counts.tolist() == [
        *torch.bincount(train_data.y, minlength=3).tolist(),
        0,
        0,
    ]
    assert trained is outcome.state
    assert outcome.state.extra["kept"] == 4


def test_divergence_names_round_and_silo(make_job, make_data):
    job = make_job(training={"lr": 1e30, "epochs": 20})
    with refused("round 2 at silo 'a': the training loss is"):
        local_round(
            job.method(),
            job,
            initial_state(job.method(), "a"),
            2,
            {},
            make_data(30),
            make_data(9),
            "a",
        )


def test_each_stage_shuffles_anew(make_job, make_data, monkeypatch):
    job = make_job()
    method, drawn = job.method(), []
    monkeypatch.setattr(
        method, "stages", lambda *_: (method.stage("classifier"), method.stage("extractor"))
    )

    class Seeing(PlainStepper):
        def begin(self, modules, stage):
            drawn.append([])
            return lambda x, _, seen=drawn[-1]: seen.append(x) or torch.tensor(1.0)

    local_round(
        method, job, initial_state(method, "a"), 0, {}, make_data(16), make_data(9), "a", Seeing()
    )
    first, second = (torch.cat(stage) for stage in drawn)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)


def test_a_request_to_stop_ends_the_round(make_job, make_data):
    job = make_job()
    with pytest.raises(CancelledError):
        local_round(
            job.method(),
            job,
            initial_state(job.method(), "a"),
            0,
            {},
            make_data(9),
            make_data(9),
            "a",
            cancelled=lambda: True,
        )


def test_the_final_delivery_keeps_the_methods_product(make_job, make_data):
    for name, keeps_delivered in (("fedavg", True), ("fedper", False)):
        job = make_job(name)
        method, state = job.method(), initial_state(job.method(), "a")
        part = job.down(job.rounds)[0]
        down = {part.name: {spec.name: torch.zeros(spec.shape) for spec in part.tensors}}
        for trained in (True, False):
            outcome = final_round(
                method, job, state, down, make_data(9), make_data(9), "a", trained
            )
            assert same(outcome.state, state) is (trained and not keeps_delivered)
            assert outcome.contributions == {}
            assert (outcome.report.round, outcome.report.samples, outcome.report.loss) == (
                job.rounds,
                0,
                None,
            )


def test_the_final_report_holds_the_accuracy_of_both_models(make_job, make_data):
    job, test_data = make_job("fedavg"), make_data(30, 3)
    method, part = job.method(), job.down(job.rounds)[0]
    votes = lambda label: torch.eye(3)[label]  # noqa: E731
    down = {spec.name: torch.zeros(spec.shape) for spec in part.tensors} | {
        "classifier.bias": votes(2)
    }
    start = initial_state(method, "a")
    parts = {
        name: {k: torch.zeros_like(v) for k, v in tensors.items()}
        for name, tensors in start.parts.items()
    }
    own = SiloState({**parts, "classifier": {**parts["classifier"], "bias": votes(1)}})
    report = final_round(method, job, own, {"model": down}, make_data(9), test_data, "a").report
    counts = torch.bincount(test_data.y, minlength=3).tolist()
    assert counts[1] != counts[2]
    assert [report.correct_delivered, report.correct_trained] == [counts[2], counts[1]]


def test_a_state_goes_round_through_bytes(make_job):
    job = make_job(model={"norm": "batch"})
    weights = torch.arange(6.0)
    state = SiloState(
        initial_state(job.method(), "a").parts,
        {"c": weights[::2], "all": weights, "n": torch.tensor(3)},
    )
    back = state_from_bytes(state_to_bytes(state))
    for part, tensors in state.parts.items():
        assert set(back.parts[part]) == set(tensors)
        assert all(
            torch.equal(back.parts[part][k], v) and back.parts[part][k].dtype == v.dtype
            for k, v in tensors.items()
        )
    assert back.extra["c"].tolist() == [0, 2, 4]
    assert back.extra["n"].dtype == torch.int64
    assert state_to_bytes(back) == state_to_bytes(state)


def test_a_damaged_state_is_named(make_job, make_data):
    good = state_to_bytes(initial_state(make_job().method(), "a"))
    for bad in (b"", good[:100], good[:-1], b"\xff" * 64):
        with refused(r"state\.safetensors: (not a file of tensors|is not as it was written)"):
            state_from_bytes(bad, "state.safetensors")
    for name in ("weights", "part/x", "extra/"):
        with refused("which no state has"):
            state_from_bytes(tensor_file.to_bytes({name: torch.zeros(1)}))
    job, other = make_job(), make_job(model={"classes": 4})
    with refused("does not fit the job's model"):
        local_round(
            other.method(),
            other,
            initial_state(job.method(), "a"),
            0,
            {},
            make_data(9),
            make_data(9),
            "a",
        )
    state = initial_state(job.method(), "a")
    for head in ({}, {"weight": state.parts["classifier"]["weight"]}):
        lacking = SiloState({**state.parts, "classifier": head})
        with refused("the saved state"):
            local_round(job.method(), job, lacking, 0, {}, make_data(9), make_data(9), "a")
    with refused("the saved state has parts"):
        local_round(job.method(), job, SiloState({}), 0, {}, make_data(9), make_data(9), "a")

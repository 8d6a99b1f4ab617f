import pytest
import torch
from support.jobs import make_data
from support.numbered import lazily
from support.refusals import refused
from torch.testing import assert_close

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


def round_of(job, down=None, silo="a", round_=1, state=None, data=None, test=None, **more):
    """A round of a job at a silo that begins with it."""
    state = state or initial_state(job.method(), "a")
    data, test = data or make_data(9), test or make_data(9)
    return local_round(job.method(), job, state, round_, down or {}, data, test, silo, **more)


def model_of(job, value=0.0):
    """What comes down of a job that averages models."""
    return {spec.name: torch.full(spec.shape, value) for spec in job.down(1)[0].tensors}


def test_a_round_delivers_trains_and_contributes(make_job):
    job, ticks, test = make_job("fedavg", model={"norm": "batch"}), [], make_data(30, 9)
    state = initial_state(job.method(), "a")
    before = state_to_bytes(state)
    fields = {"state": state, "data": make_data(21), "test": test}
    down = {"model": model_of(job, 0.01)}
    outcome = round_of(job, down, progress=lambda *t: ticks.append(t), **fields)
    assert state_to_bytes(state) == before
    assert ticks == [(1, 3), (2, 3), (3, 3)]
    report = outcome.report
    assert report.samples == 21
    assert report.delivered.correct == int((test.y == 0).sum())  # equal logits: the first class
    assert report.loss > 0
    assert list(outcome.contributions) == ["model", "metrics"]
    assert outcome.contributions["model"].weight == 21.0
    counts = PLAIN.contribute(job.up(1)[-1], outcome.contributions["metrics"]).values()
    expected = [report.delivered.correct, report.trained.correct, 30]
    assert [t.item() for t in counts] == expected
    assert not any("running" in name for name in outcome.contributions["model"].tensors)
    assert outcome.state.parts["extractor"]["norm1.num_batches_tracked"].item() == 3
    assert same(round_of(job, down, **fields).state, outcome.state)
    assert not same(round_of(job, down, silo="b", **fields).state, outcome.state)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"classifier.bias": None}, "classifier.bias"),
        ({"classifier.extra": torch.zeros(1)}, "schema lacks"),
        ({"classifier.bias": torch.zeros(4)}, "classifier.bias"),
        ({"classifier.bias": torch.zeros(3).half()}, "classifier.bias"),
        ({"classifier.bias": torch.full((3,), float("inf"))}, "NaN or infinity"),
    ],
)
def test_a_delivery_that_the_schema_lacks_is_the_coordinators_fault(make_job, change, complaint):
    job = make_job("fedavg")
    changed = {n: v for n, v in {**model_of(job), **change}.items() if v is not None}
    with pytest.raises(PeerError, match=complaint):
        round_of(job, {"model": changed})
    with pytest.raises(PeerError, match="delivered part 'head'"):
        round_of(job, {"head": model_of(job)})


@pytest.mark.parametrize("variance", [-1e-30, -1.0, float("nan")])
def test_a_delivered_variance_is_not_negative(make_job, variance):
    job = make_job("fedavg", model={"norm": "batch", "buffers": "global"})
    model = model_of(job)
    model["extractor.norm1.running_mean"].fill_(-1.0)
    assert round_of(job, {"model": model}).report.loss > 0
    model["extractor.norm2.running_var"][3] = variance
    said = r"delivered part 'model', whose tensor 'extractor.norm2.running_var' holds"
    with pytest.raises(PeerError, match=said):
        round_of(job, {"model": model})


def test_what_is_measured_is_of_the_training_records_and_the_model_as_delivered(
    make_job, monkeypatch
):
    """A method may keep it in ``extra``, which training leaves alone.

    Classes without a record count 0.
    """
    job, seen, data = make_job("fedavg", model={"classes": 5}), [], make_data(21)
    method = job.method()
    contribute, norm = (
        method.contribute,
        lambda parts: parts["classifier"].weight.detach().norm().double(),
    )
    measured = lambda parts, x, _: {"count": torch.tensor(len(x)), "norm": norm(parts)}
    monkeypatch.setattr(method, "measure", measured)
    monkeypatch.setattr(
        method, "contribute", lambda *given: seen.append(given) or contribute(*given)
    )
    state = SiloState(initial_state(method, "a").parts, {"kept": torch.tensor(4)})
    model = model_of(job, 0.01)
    outcome = round_of(job, {"model": model}, state=state, data=data)
    ((trained, facts),) = seen
    assert facts.measured["count"].item() == 21
    assert facts.measured["norm"].item() == pytest.approx(model["classifier.weight"].norm().item())
    assert facts.class_counts.tolist() == torch.bincount(data.y, minlength=5).tolist()
    assert facts.class_counts[3:].tolist() == [0, 0]
    assert trained is outcome.state
    assert outcome.state.extra["kept"] == 4


def test_divergence_names_round_and_silo(make_job):
    job = make_job(training={"lr": 1e30, "epochs": 20})
    with refused("round 2 at silo 'a': the training loss is"):
        round_of(job, round_=2, data=make_data(30))


def test_each_stage_shuffles_anew(make_job, monkeypatch):
    job, drawn = make_job(), []
    stages = [job.method().stage(part) for part in ("classifier", "extractor")]
    monkeypatch.setattr(job.method(), "stages", lambda *_: stages)

    class Seeing(PlainStepper):
        def begin(self, modules, stage):
            drawn.append([])
            return lambda x, _, seen=drawn[-1]: seen.append(x) or torch.tensor(1.0)

    round_of(job, data=make_data(16), way=Seeing())
    first, second = (torch.cat(stage) for stage in drawn)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)


def test_a_request_to_stop_ends_the_round(make_job):
    with pytest.raises(CancelledError):
        round_of(make_job(), cancelled=lambda: True)


@pytest.mark.parametrize("method", ["fedavg", "fedpac"])
def test_a_request_to_stop_ends_whatever_reads_records(make_job, make_data, method):
    """Tests of what came down, sums over the records, training, tests of what was trained."""
    asked = []
    whole = {"data": make_data(16), "cancelled": lambda: asked.append(1)}
    round_of(make_job(method), **whole)
    assert len(asked) == {"fedavg": 4, "fedpac": 8}[method]
    for last in range(len(asked)):
        answers = iter([*[False] * last, True])
        with pytest.raises(CancelledError):
            round_of(make_job(method), data=make_data(16), cancelled=lambda: next(answers))  # noqa: B023


def test_a_request_to_stop_ends_the_tests_of_the_last_delivery(make_job, make_data):
    job, data = make_job("local"), make_data(9)
    state = initial_state(job.method(), "a")
    for last in (0, 1):
        answers = iter([*[False] * last, True])
        with pytest.raises(CancelledError):
            final_round(
                job.method(), job, state, {}, data, data, "a",
                cancelled=lambda: next(answers),  # noqa: B023
            )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_a_record_that_cannot_be_read_does_not_cost_the_model(make_job, make_data, workers):
    job, data = make_job("local"), make_data(9)
    state = initial_state(job.method(), "a")
    test = lazily(data, workers, unreadable=(3,))
    outcome = final_round(job.method(), job, state, {}, data, test, "a")
    assert same(outcome.state, state)
    whole = final_round(job.method(), job, state, {}, data, data, "a").report.trained
    assert outcome.report.trained.records == whole.records == 9


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
            assert outcome.report.round == job.rounds
            assert outcome.report.samples == 0
            assert outcome.report.loss is None


def test_the_final_report_holds_the_accuracy_of_both_models(make_job, make_data):
    job, test_data = make_job("fedavg"), make_data(30, 3)
    method, part = job.method(), job.down(job.rounds)[0]
    votes = lambda label: torch.eye(3)[label]
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
    assert [report.delivered.correct, report.trained.correct] == [counts[2], counts[1]]


def test_a_state_goes_round_through_bytes(make_job):
    parts = initial_state(make_job(model={"norm": "batch"}).method(), "a").parts
    weights = torch.arange(6.0)
    state = SiloState(parts, {"c": weights[::2], "all": weights, "n": torch.tensor(3)})
    back = state_from_bytes(state_to_bytes(state))
    assert_close(back.flat, state.flat, atol=0, rtol=0)
    assert back.extra["c"].tolist() == [0, 2, 4]
    assert state_to_bytes(back) == state_to_bytes(state)


def test_a_damaged_state_is_named(make_job):
    job = make_job()
    state = initial_state(job.method(), "a")
    good = state_to_bytes(state)
    for bad in (b"", good[:100], good[:-1], b"\xff" * 64):
        with refused(r"state\.safetensors: (not a file of tensors|is not as it was written)"):
            state_from_bytes(bad, "state.safetensors")
    for name in ("weights", "part/x", "extra/"):
        with refused("which no state has"):
            state_from_bytes(tensor_file.to_bytes({name: torch.zeros(1)}))
    with refused("does not fit the job's model"):
        round_of(make_job(model={"classes": 4}), state=state)
    for head in ({}, {"weight": state.parts["classifier"]["weight"]}):
        with refused("the saved state"):
            round_of(job, state=SiloState({**state.parts, "classifier": head}))
    with refused("the saved state has parts"):
        round_of(job, state=SiloState({}))

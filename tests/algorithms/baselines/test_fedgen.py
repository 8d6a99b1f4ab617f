"""FedGen: whole rounds in float64, with the gradients of both losses worked out apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import softmax_oracle as oracle
from support.refusals import refused
from support.whole_jobs import trained
from torch import nn

from staddle.algorithms.baselines import fedgen
from staddle.algorithms.course import Facts
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import LARGEST_WEIGHT, nbytes_of
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.errors import PeerError
from staddle.security.dp.noise import Randomness

TINY = {
    "alpha": 0.8, "beta": 0.3, "decay": 0.7, "samples": 3, "noise": 4, "hidden": 6,
    "server_steps": 4, "server_batch": 9, "server_lr": 0.02, "weight_decay": 0.05, "eta": 2.0,
    "clip": 1.0,
}  # fmt: skip
LAYERS = ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias",
    "body.3.weight", "body.3.bias")  # fmt: skip


def softmax(scores):
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def generate(w, noise, labels, running=None):
    """G by its definition; batch norm by the batch, or by what it remembers."""
    into = torch.cat((noise, torch.eye(3, dtype=noise.dtype)[labels]), 1)
    hidden = into @ w["body.0.weight"].T + w["body.0.bias"]
    mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
    if running is not None:
        mean, variance = running["mean"], running["var"]
    normed = (hidden - mean) / (variance + 1e-5).sqrt() * w["body.1.weight"] + w["body.1.bias"]
    return normed.clamp(min=0) @ w["body.3.weight"].T + w["body.3.bias"], hidden.detach()


def server_loss(made, noise, labels, heads, counts, teacher):
    """Eq. 4, one generated feature after another and pair by pair."""
    total = torch.zeros((), dtype=torch.float64)
    for z, s in zip(made, labels.tolist(), strict=True):
        scores = [weight @ z + bias for weight, bias in heads]
        if teacher == "mean":
            total = total - torch.log_softmax(sum(scores) / len(scores), 0)[s]
            continue
        for own, answer in zip(counts, scores, strict=True):
            share = own[s] / sum(each[s] for each in counts)
            total = total - share * torch.log_softmax(answer, 0)[s]
    apart = torch.zeros((), dtype=torch.float64)
    for z, e in zip(made, noise, strict=True):
        for other, f in zip(made, noise, strict=True):
            apart = apart - (e - f).square().mean() * (z - other).abs().mean()
    return total / len(made) + 2.0 * (apart / len(made) ** 2).exp()


class Server:
    """G, its batch norm's memory and Adam's, all by hand."""

    def __init__(self, begun):
        self.w = {name: begun[name].double() for name in LAYERS}
        self.running = {"mean": torch.zeros(6).double(), "var": torch.ones(6).double()}
        self.m = {name: torch.zeros_like(value) for name, value in self.w.items()}
        self.v = {name: torch.zeros_like(value) for name, value in self.w.items()}
        self.steps, self.cut = 0, []

    def step(self, noise, labels, heads, counts, teacher, lr):
        leaves = {name: value.clone().requires_grad_() for name, value in self.w.items()}
        made, hidden = generate(leaves, noise, labels)
        loss = server_loss(made, noise, labels, heads, counts, teacher)
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        length = sum(slope.square().sum() for slope in slopes).sqrt()
        self.cut.append(float(length) > 1)
        for name, statistic in (("mean", hidden.mean(0)), ("var", hidden.var(0))):
            self.running[name] = 0.9 * self.running[name] + 0.1 * statistic
        self.steps += 1
        for (name, value), slope in zip(self.w.items(), slopes, strict=True):
            g = slope / max(length, 1) + 0.05 * value
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g**2
            m, v = self.m[name] / (1 - 0.9**self.steps), self.v[name] / (1 - 0.999**self.steps)
            self.w[name] = value - lr * m / (v.sqrt() + 1e-8)


def with_generated(made, shares, alpha, beta):
    """Eq. 1's gradient at (x, y); ``made`` [C, samples, d]."""

    def own(theta, x, y):
        slope = oracle.gradient(theta, x, y)
        for s, share in enumerate(shares):
            right = np.full(len(made[s]), s)
            slope = slope + alpha * share * oracle.gradient(theta, made[s], right)
        targets = softmax(made @ theta.weight.T + theta.bias).mean(1)
        error = softmax(x @ theta.weight.T + theta.bias) - targets[y]
        return slope + beta * oracle.Theta(error.T @ x / len(y), error.mean(0))

    return own


@pytest.mark.parametrize("teacher", ["weighted", "mean"])
def test_rounds_of_some_uneven_silos_are_its_equations(teacher):
    job, shards = oracle.uneven("fedgen", {**TINY, "teacher": teacher})
    method, theta = job.method(), oracle.begun(job)
    server, shares = Server(method.begin()), None
    for round_ in range(job.rounds):
        models, heads, counts = [], [], []
        for silo in job.cohort(round_):
            own = oracle.gradient
            if round_:
                ((noise, _),) = method.draws(silo, round_, 9)
                labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
                made, _ = generate(server.w, noise.double(), labels, server.running)
                factor = 0.7**round_
                own = with_generated(
                    made.reshape(3, 3, 64).numpy(), shares, 0.8 * factor, 0.3 * factor
                )
            after, _ = oracle.trained(job, shards, silo, round_, theta, own=own)
            models.append(after)
            heads.append((torch.from_numpy(after.weight), torch.from_numpy(after.bias)))
            y = shards[silo][0].y.numpy()
            counts.append([int((y == s).sum()) for s in range(3)])
        whole = sum(map(sum, counts))
        theta = oracle.zeros()
        for own, model in zip(counts, models, strict=True):
            theta = theta + sum(own) / whole * model
        shares = np.array(counts).sum(0) / whole
        # Steps draw one after another what one draw would give.
        ((noise, chances),) = method.draws("", round_, 36)
        labels = torch.tensor([int((np.cumsum(shares) <= u).sum()) for u in chances.tolist()])
        for step in range(4):
            batch = slice(9 * step, 9 * step + 9)
            lr = 0.02 * 0.7**round_
            server.step(noise[batch].double(), labels[batch], heads, counts, teacher, lr)
    simulation = trained(job, shards)
    found = simulation.coordinator
    for name, value in server.w.items():
        torch.testing.assert_close(found[name].double(), value, atol=2e-5, rtol=0)
    for name, value in server.running.items():
        kept = found[f"body.1.running_{name}"].double()
        torch.testing.assert_close(kept, value, atol=2e-5, rtol=0)
    assert int(found["steps"]) == 20
    assert len(set(server.cut)) == 2
    for seen in simulation.look().values():
        oracle.check_close(oracle.numbers(seen.delivered.parts["classifier"]), theta, 5e-5)


OTHERS = {
    "alpha": 0.5, "beta": 0.1, "decay": 0.9, "samples": 2, "noise": 5, "hidden": 7,
    "server_steps": 3, "server_batch": 8, "server_lr": 0.03, "weight_decay": 0.0, "eta": 0.0,
    "clip": 0.1, "teacher": "mean",
}  # fmt: skip


def test_every_option_changes_the_model():
    assert OTHERS.keys() == fedgen.FedGenOptions.model_fields.keys()

    def ends(**changed):
        job, shards = oracle.uneven("fedgen", TINY | changed, {"rounds": 3})
        return simulate(job, shards).states["a"].parts["classifier"]["weight"]

    plain = ends()
    assert torch.equal(plain, ends())
    for name, value in OTHERS.items():
        assert not torch.equal(plain, ends(**{name: value})), name


def test_classes_without_records_are_never_drawn_and_weigh_nothing(make_job):
    method = make_job("fedgen", TINY).method()
    state, drawn = method.begin(), []
    heads = {spec.name: torch.ones(2, *spec.shape) for spec in method.heads.tensors}
    results = {
        "model": {},
        "heads": heads,
        "counts": {"counts": torch.tensor([[0, 3, 0], [0, 1, 4]])},
    }
    before = {name: value.clone() for name, value in state.items()}
    own = method.losses
    method.losses = lambda *given: drawn.append(given[-1]) or own(*given)
    combined = method.combine(state, 0, ("a", "b"), {**results, "model": combined_model(method)})
    assert set(torch.cat(drawn).tolist()) == {1, 2}
    assert combined.published["labels"]["labels"].tolist() == [0.0, 0.5, 0.5]
    assert combined.state.keys() == state.keys()
    assert not any(value.requires_grad for value in combined.state.values())
    assert all(torch.equal(state[name], value) for name, value in before.items())
    nobody = {**results, "counts": {"counts": torch.zeros(2, 3, dtype=torch.int64)}}
    made = method.combine(state, 0, ("a", "b"), {**nobody, "model": combined_model(method)})
    assert made.published["labels"]["labels"].tolist() == [0.0, 0.0, 0.0]


def folded(method, state, round_, heads):
    """What the coordinator makes of heads that hold these numbers and what else silos sent."""
    results = {
        "model": combined_model(method),
        "heads": {
            spec.name: torch.stack(
                [torch.linspace(-head, head, spec.elements) for head in heads]
            ).reshape(-1, *spec.shape)
            for spec in method.heads.tensors
        },
        "counts": {"counts": torch.tensor([[1, 3, 2], [2, 1, 4]])},
    }
    return method.combine(state, round_, ("a", "b"), results)


@pytest.mark.parametrize("huge", [1e15, 1e22, 3e38])
def test_a_huge_head_does_not_stop_the_generator_for_good(make_job, huge):
    method = make_job("fedgen", TINY | {"weight_decay": 0.0}).method()
    attacked = folded(method, method.begin(), 0, (1.0, huge)).state
    assert all(value.isfinite().all() for value in attacked.values())
    assert max(value.abs().max() for value in attacked.values()) < 1e3
    after = folded(method, attacked, 1, (1.0, 2.0)).state
    for name in LAYERS:
        # A tenth of what Adam moves a number whose slope does not change.
        moved = (after[name] - attacked[name]).abs().max()
        assert moved > 0.1 * TINY["server_steps"] * TINY["server_lr"] * TINY["decay"], name


def test_steps_that_are_not_finite_are_not_taken(make_job):
    method = make_job("fedgen", TINY).method()
    begun = folded(method, method.begin(), 0, (1.0, 2.0)).state
    combined = folded(method, begun, 1, (1.0, 3e38))
    assert combined.state.keys() == begun.keys()
    assert all(torch.equal(combined.state[name], value) for name, value in begun.items())
    for name, value in combined.published["generator"].items():
        assert torch.equal(begun[name], value)


@pytest.mark.parametrize("part", ["generator", "model"])
def test_a_delivered_generator_that_is_of_no_use_is_the_coordinators_fault(make_job, part):
    method, facts = make_job("fedgen", TINY).method(), Facts("a", 1, 6, torch.tensor([1, 2, 3]))
    begun = initial_state(method, "a")
    assert method.stages(begun, facts)
    huge = {spec.name: torch.full(spec.shape, 3e38) for spec in getattr(method, part).tensors}
    delivered = {part: huge}
    if part == "model":
        delivered["generator"] = {spec.name: torch.full(spec.shape, 2.0) for spec in method.network}
    taken = method.deliver(begun, delivered, facts)
    with pytest.raises(PeerError, match="the delivered generator makes features that are") as it:
        method.stages(taken, facts)
    assert it.value.peer == "coordinator"


def test_counts_have_the_bound_of_weights(make_job):
    (spec,) = make_job("fedgen", TINY).method().counts.tensors
    assert spec.bounds == (0.0, LARGEST_WEIGHT)


def combined_model(method):
    return {spec.name: torch.zeros(spec.shape) for spec in method.model.tensors}


def test_the_head_crosses_twice_in_memory_of_its_own(make_job):
    """A file of tensors takes no memory twice."""
    method = make_job("fedgen", TINY).method()
    facts = Facts("a", 0, 6, torch.tensor([1, 2, 3]))
    given = method.contribute(initial_state(method, "a"), facts)
    name = "classifier.weight"
    one, other = (given[part].tensors[name] for part in ("model", "heads"))
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()


def test_a_silo_remembers_generator_and_shares(make_job):
    method = make_job("fedgen", TINY).method()
    begun = initial_state(method, "a")
    assert begun.extra["labels"].tolist() == pytest.approx([1 / 3] * 3)
    network = {spec.name: torch.full(spec.shape, 2.0) for spec in method.network}
    shares = torch.tensor([0.5, 0.5, 0.0])
    taken = method.deliver(begun, {"generator": network, "labels": {"labels": shares}}, None)
    assert taken.extra.keys() == begun.extra.keys()
    assert taken.extra["labels"].tolist() == [0.5, 0.5, 0.0]
    assert taken.extra["body.1.running_var"].tolist() == [2.0] * 6
    assert taken.parts == begun.parts
    assert method.deliver(begun, {}, None).extra == begun.extra


def test_a_private_silo_trains_with_noise_on_what_is_public(make_job, make_shards):
    """DP-SGD tells records from the generated features that its loss goes through."""
    privacy = {"epsilon": 1000.0, "delta": 1e-3, "clip": 1.0, "sample_rate": 0.25, "sigma": "1.0"}
    privacy["histogram_sigma"] = 0.5
    job = make_job("fedgen", TINY, oracle.GLM, rounds=3, privacy=privacy)
    paying = lambda _: PrivateSilo(MemoryAccount(job), Randomness)
    states = simulate(job, make_shards(job), private=paying).states
    for silo, state in states.items():
        assert not any(state.taint(name).exact for name in state.flat), silo
    assert not torch.equal(
        states["a"].extra["body.0.weight"], job.method().initial()["body.0.weight"]
    )


def with_head(make_job, head):
    """The method on a model of the job's extractor and another head."""
    setting = make_job("fedgen", TINY).setting()

    def built():
        return {**setting.sketch(), "classifier": head}

    return fedgen.FedGen(replace(setting, sketch=built), fedgen.FedGenOptions(**TINY))


def test_the_latent_layer_may_lie_deeper_and_has_to_be_a_vector(make_job):
    deep = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    method = with_head(make_job, deep)
    assert method.width == 5
    heads = {spec.name: torch.randn(2, *spec.shape) for spec in method.heads.tensors}
    features, labels = torch.randn(7, 5), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    found = method.losses(heads, torch.ones(2, 3), features, labels)
    alone = []
    for k in range(2):
        own = {name.removeprefix("classifier."): value[k] for name, value in heads.items()}
        scores = torch.func.functional_call(deep, own, (features,))
        alone.append(nn.functional.cross_entropy(scores, labels, reduction="none"))
    torch.testing.assert_close(found, sum(alone) / 2)
    for head in (nn.Conv2d(4, 3, 1), nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))):
        with refused("fedgen needs a classifier that begins with a linear layer and has no buff"):
            with_head(make_job, head)


def test_a_generator_that_the_coordinator_cannot_keep_is_refused(make_job, monkeypatch):
    method = make_job("fedgen", TINY).method()
    size = nbytes_of(value for name, value in method.begin().items() if name != "steps")
    # Of the running statistics there are no moments.
    size += 2 * 2 * 6 * 4
    monkeypatch.setattr(fedgen, "LARGEST_STATE", size)
    type(method)(method.setting, method.options)
    monkeypatch.setattr(fedgen, "LARGEST_STATE", size - 1)
    with refused(f"would keep {size:,} bytes of a generator .*; lower method.options.hidden, or"):
        type(method)(method.setting, method.options)


@pytest.mark.parametrize(
    ("option", "rows", "each"),
    # ε, indicators, hidden layer and features; one head's answers, or three heads' and distances
    [("samples", 3 * 40, 4 + 3 + 6 + 64 + 3), ("server_batch", 40, 4 + 3 + 6 + 64 + 3 * 3 + 40)],
)
def test_generated_features_that_memory_may_not_hold_are_refused(
    make_job, monkeypatch, option, rows, each
):
    method = make_job("fedgen", TINY | {option: 40}).method()
    assert method.setting.cohort_size == 3
    numbers = rows * each
    monkeypatch.setattr(fedgen, "MOST_NUMBERS", numbers)
    type(method)(method.setting, method.options)
    monkeypatch.setattr(fedgen, "MOST_NUMBERS", numbers - 1)
    with refused(f"would take {numbers:,} numbers at once, .*; lower method.options.{option}$"):
        type(method)(method.setting, method.options)

import pytest
import torch
from support.refusals import refused

from staddle.algorithms.course import Facts
from staddle.algorithms.engines.aggregation import MemoryArchive, close_round, deliver, in_job_order
from staddle.algorithms.exchange.delivery import KEEP, Combined, Latest, Post, Row, Value
from staddle.algorithms.exchange.parts import WEIGHT
from staddle.algorithms.exchange.plain import PLAIN, PlainExchange
from staddle.algorithms.method import initial_state
from staddle.errors import LocalError


def contributions(job, seeds, round_=0):
    """What each silo gives: its initial model plus noise, with 10·(place + 1) samples."""
    method, spool = job.method(), {}
    for place, silo in enumerate(job.silos):
        generator = torch.Generator().manual_seed(seeds + place)
        state = initial_state(method, "a")
        for tensors in state.parts.values():
            for tensor in tensors.values():
                tensor.add_(torch.randn(tensor.shape, generator=generator))
        given = method.contribute(state, Facts(silo, round_, 10 * (place + 1), torch.zeros(3)))
        for part in method.up(round_):
            spool[part.name, silo] = PLAIN.contribute(part, given[part.name])
        spool["metrics", silo] = {
            s.name: torch.tensor(place + 1) for s in job.up(round_)[-1].tensors
        }
    return lambda part, silo, name: spool[part, silo][name]


@pytest.mark.parametrize(("weights", "shares"), [("samples", (10, 20, 30)), ("equal", (1, 1, 1))])
def test_fedavg_folds_as_eq_2(make_job, weights, shares):
    job = make_job("fedavg", {"weights": weights})
    read, archive = contributions(job, 0), MemoryArchive()
    state, metrics = close_round(
        job.method(), PLAIN, {}, 0, ("c", "a", "b"), job.up(0), read, archive
    )
    assert state == {}
    assert {name: t.item() for name, t in metrics.items()} == {
        "correct.delivered": 6, "correct.trained": 6, "tested": 6,
    }  # fmt: skip
    latest = archive.latest("model")
    assert WEIGHT not in latest
    for spec in job.down(1)[0].tensors:
        slow = sum(
            w * read("model", s, spec.name).double() for s, w in zip(job.silos, shares, strict=True)
        ) / sum(shares)
        assert torch.allclose(latest[spec.name].double(), slow, rtol=1e-6, atol=1e-7)
    assert deliver(job.method(), PLAIN, state, 1, "b", archive)["model"].keys() == latest.keys()


def test_the_order_in_which_members_are_named_changes_no_bit(make_job):
    job, folds = make_job("fedavg"), []
    assert in_job_order(job.method(), ("c", "a")) == ("a", "c")
    for members in (("a", "b", "c"), ("c", "b", "a")):
        archive = MemoryArchive()
        close_round(job.method(), PLAIN, {}, 0, members, job.up(0), contributions(job, 0), archive)
        folds.append(archive.latest("model"))
    assert all(torch.equal(folds[0][name], folds[1][name]) for name in folds[0])


def test_fedper_never_gives_its_classifier(make_job):
    job = make_job("fedper")
    archive = MemoryArchive()
    close_round(job.method(), PLAIN, {}, 0, job.silos, job.up(0), contributions(job, 0), archive)
    assert all(name.startswith("extractor.") for name in archive.latest("extractor"))


def test_nothing_is_delivered_before_the_first_round(make_job):
    for name in ("local", "fedavg", "fedper", "pfedsim"):
        method = make_job(name).method()
        assert deliver(method, PLAIN, method.begin(), 0, "a", MemoryArchive()) == {}


def test_local_gives_metrics_only(make_job):
    job = make_job("local")
    assert [part.name for part in job.up(0)] == ["metrics"]
    _, metrics = close_round(
        job.method(), PLAIN, {}, 0, ("a", "c"), job.up(0), contributions(job, 0), MemoryArchive()
    )
    assert metrics["tested"].item() == 4


@pytest.mark.parametrize("members", [("a", "x"), ("a", "a")])
def test_strangers_and_duplicates_are_refused(make_job, members):
    job = make_job("fedavg")
    with refused("not distinct silos"):
        in_job_order(job.method(), members)


def test_a_round_that_fails_leaves_the_archive_as_it_was(make_job):
    job, archive = make_job("pfedsim", {"rho": 0}), MemoryArchive()
    read = contributions(job, 0)

    def failing(part, silo, name):
        if part == "rows":
            raise LocalError("disk")
        return read(part, silo, name)

    with refused("disk"):
        close_round(
            job.method(), PLAIN, job.method().begin(), 0, job.silos, job.up(0), failing, archive
        )
    assert not archive.has("extractor", "a")
    first, _ = close_round(
        job.method(), PLAIN, job.method().begin(), 0, job.silos, job.up(0), read, archive
    )
    again, _ = close_round(
        job.method(), PLAIN, job.method().begin(), 0, job.silos, job.up(0), read, archive
    )
    assert torch.equal(first["weights"], again["weights"])
    assert torch.equal(
        archive.version("extractor", "c", "extractor.fc1.bias"),
        read("extractor", "c", "extractor.fc1.bias"),
    )


def test_a_row_runs_over_the_silos_that_have_a_version(make_job, monkeypatch):
    job, archive = make_job("pfedsim", {"rho": 0}), MemoryArchive()
    method = job.method()
    monkeypatch.setattr(
        method, "deliveries", lambda *_: (Row("extractor", {"a": 1.0, "b": 3.0, "c": 4.0}),)
    )
    assert deliver(method, PLAIN, method.begin(), 1, "a", archive) == {}
    for silo, value in (("a", 1.0), ("b", 5.0)):
        (part, *_) = method.up(0)
        given = {s.name: torch.full(s.shape, value) for s in part.tensors}
        archive.store(part, silo, lambda _, name, given=given: given[name])
    row = deliver(method, PLAIN, method.begin(), 1, "a", archive)["extractor"]
    assert all(bool((t == 4.0).all()) for t in row.values())  # (1·1 + 3·5) / 4


@pytest.mark.parametrize("wrong", [(Latest("rows"),), (Latest("model"), Latest("model"))])
def test_a_delivery_beyond_the_wire_list_is_refused(make_job, monkeypatch, wrong):
    method = make_job("fedavg").method()
    monkeypatch.setattr(method, "deliveries", lambda *_: wrong)
    with refused("its wire list allows"):
        deliver(method, PLAIN, {}, 1, "a", MemoryArchive())


@pytest.mark.parametrize(
    ("combined", "complaint"),
    [
        (Combined({}, {"model": {"w": torch.tensor([1.0, torch.nan])}}), "not published"),
        (Combined({}, posts=(Post("extractor", "a", {"b": 1.0}, keep=1.5),)), "with keep = 1.5"),
        (Combined({}, posts=(Post("extractor", "x", {"b": 1.0}, keep=0.5),)), "to 'x'"),
        (Combined({}, posts=(Post("rows", "a", {"b": 1.0}, keep=0.5),)), "posts 'rows'"),
    ],
)
def test_what_a_method_makes_of_a_round_is_checked_first(
    make_job, monkeypatch, combined, complaint
):
    job, archive = make_job("pfedsim", {"rho": 0}), MemoryArchive()
    method = job.method()
    monkeypatch.setattr(method, "combine", lambda *_: combined)
    with refused(complaint):
        close_round(
            method, PLAIN, method.begin(), 0, job.silos, job.up(0), contributions(job, 0), archive
        )
    assert archive.latest("model") is None
    assert archive.mail("extractor", "a") is None
    assert not archive.has("extractor", "a")


def test_mail_by_hand_over_three_rounds(make_job, monkeypatch):
    """Away with θ = 8: keep ½ beside a row of 2, then ¼ beside 4: 8 → 5 → 4.25.

    Gone once the silo gives again.
    """
    job, archive = make_job("pfedsim", {"rho": 0}), MemoryArchive()
    method, part, posts = job.method(), job.method().extractor, []
    monkeypatch.setattr(method, "combine", lambda *_: Combined({}, posts=tuple(posts)))

    def close(members, value, *posted):
        posts[:] = posted
        shapes = {
            (part.name, spec.name): spec.shape for part in method.up(0) for spec in part.tensors
        }
        read = lambda part, _, name: torch.full(shapes[part, name], value)
        close_round(method, PLAIN, {}, 0, members, method.up(0), read, archive)
        mail = archive.mail("extractor", "c")
        return mail and (mail[KEEP.name].item(), mail[part.tensors[0].name].unique().item())

    # ½·8 + 1 = 5
    assert close("ab", 2.0, Post("extractor", "c", {"a": 1.0}, keep=0.5)) == (0.5, 1.0)
    # ⅛·8 + 3.25
    expected = (0.125, 3.25)
    assert close("ab", 4.0, Post("extractor", "c", {"a": 1.0, "b": 3.0}, keep=0.25)) == expected
    assert close("ab", 4.0) == (0.125, 3.25)
    assert close("abc", 4.0) is None


class Refusing(PlainExchange):
    """Exchanges that make no row for one silo; keeps whose rows were asked for."""

    def __init__(self, silo):
        super().__init__()
        self.silo, self.asked = silo, []

    def mix(self, part, recipient, weights, read):
        self.asked.append(recipient)
        return None if recipient == self.silo else super().mix(part, recipient, weights, read)

    def mix_rows(self, part, rows, read):
        return {silo: self.mix(part, silo, weights, read) for silo, weights in rows.items()}


def test_who_gets_no_row_keeps_its_own(make_job, monkeypatch):
    job, archive, refusing = make_job("pfedsim", {"rho": 0}), MemoryArchive(), Refusing("a")
    method = job.method()
    monkeypatch.setattr(method, "deliveries", lambda *_: (Row("extractor", {"a": 1.0, "b": 3.0}),))
    close_round(
        method, PLAIN, method.begin(), 0, job.silos, job.up(0), contributions(job, 0), archive
    )
    assert deliver(method, refusing, method.begin(), 1, "a", archive) == {}
    assert deliver(method, refusing, method.begin(), 1, "b", archive).keys() == {"extractor"}
    assert refusing.asked == ["a", "b"]


def test_a_post_without_a_row_is_not_made_and_the_method_is_told(make_job, monkeypatch):
    job, archive, refusing = make_job("pfedsim", {"rho": 0}), MemoryArchive(), Refusing("b")
    method = job.method()
    posts = tuple(Post("extractor", silo, {"a": 1.0}, keep=0.5) for silo in "bc")
    monkeypatch.setattr(method, "combine", lambda *_: Combined({"n": torch.tensor(1)}, posts=posts))
    monkeypatch.setattr(method, "unposted", lambda state, silos: {**state, "without": silos})
    state, _ = close_round(
        method, refusing, {}, 0, ("a",), job.up(0), contributions(job, 0), archive
    )
    assert (state["n"].item(), state["without"]) == (1, ("b",))
    assert archive.mail("extractor", "b") is None
    assert archive.mail("extractor", "c")[KEEP.name].item() == 0.5


def test_a_part_that_is_each_silos_own_is_declared_so(make_job, monkeypatch):
    """Blind rounds compare what silos were given, but for these parts."""
    method = make_job("fedavg").method()
    monkeypatch.setattr(method, "deliveries", lambda *_: (Value("model", {}),))
    with refused("part 'model' to each silo in a value of its own, but does not list it"):
        deliver(method, PLAIN, {}, 1, "a", MemoryArchive())

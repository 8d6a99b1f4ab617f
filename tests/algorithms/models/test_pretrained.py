import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save
from support.refusals import refused
from torch import nn

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.models.pretrained import load_weights
from staddle.files import tensor_file

FIVE = ("a", "b", "c", "d", "e")


@pytest.fixture
def job(make_job):
    options = {"supervisor": ["cnn", "transformer"]}
    return make_job("fedsimsup", options, silos=list(FIVE), participation=0.6, rounds=2)


@pytest.fixture
def trained(job):
    """Weights for the supervisor of silo a, a cnn, that its own streams do not give."""
    return {name: v + 1 for name, v in initial_state(job.method(), "a").parts["supervisor"].items()}


def changed(tensors, name, value):
    return {**tensors, name: value}


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (
            lambda t: {k: v for k, v in t.items() if k != "fc.bias"},
            r"another supervisor: lacks \['fc.bias'\]",
        ),
        (lambda t: changed(t, "fc.scale", torch.ones(1)), r"has \['fc.scale'\] too many"),
        (lambda t: changed(t, "fc.bias", torch.ones(4)), r"'fc.bias' is torch.float32 \[4\]"),
        (lambda t: changed(t, "fc.bias", torch.ones(len(t["fc.bias"])).double()), "torch.float64"),
        (lambda t: changed(t, "fc.bias", torch.full_like(t["fc.bias"], torch.nan)), "NaN"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, job, trained, edit, complaint):
    path = tmp_path / "w.safetensors"
    path.write_bytes(save(edit(trained)))
    with refused(complaint):
        load_weights(path, job.method(), "a", "supervisor")


def test_weights_are_loaded_by_digest(tmp_path, job, trained):
    path = tmp_path / "w.safetensors"
    path.write_bytes(save(trained))
    tensors, digest = load_weights(path, job.method(), "a", "supervisor")
    assert all(torch.equal(tensors[name], v) for name, v in trained.items())
    assert load_weights(path, job.method(), "a", "supervisor", digest.upper())[1] == digest
    with refused("SHA-256"):
        load_weights(path, job.method(), "a", "supervisor", "0" * 64)
    with refused("is for another supervisor"):
        load_weights(path, job.method(), "b", "supervisor")  # b has a transformer
    path.write_bytes(b"\0" * 100)
    with refused("not a safetensors file"):
        load_weights(path, job.method(), "a", "supervisor")
    with refused("cannot read"):
        load_weights(tmp_path / "absent", job.method(), "a", "supervisor")


def test_weights_that_staddle_wrote_carry_their_own_digest(tmp_path, job, trained):
    path = tmp_path / "w.safetensors"
    path.write_bytes(data := tensor_file.to_bytes(trained))
    assert load_weights(path, job.method(), "a", "supervisor")[0].keys() == trained.keys()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with refused(r"w\.safetensors: is not as it was written: the disk changed it"):
        load_weights(path, job.method(), "a", "supervisor")


def test_weights_from_a_fifo_are_refused_and_not_waited_for(tmp_path, job):
    os.mkfifo(tmp_path / "w.safetensors")
    with refused(r"w\.safetensors: is a FIFO, not a file"):
        load_weights(tmp_path / "w.safetensors", job.method(), "a", "supervisor")
    with refused(r"none: cannot read it: No such file"):
        load_weights(tmp_path / "none", job.method(), "a", "supervisor")


def test_only_parts_that_never_cross_are_loaded(tmp_path, job, make_job):
    path = tmp_path / "w.safetensors"
    with refused("'fedsimsup' takes no weights for part 'extractor', it takes weights for sup"):
        load_weights(path, job.method(), "a", "extractor")
    with refused("'fedavg' takes no weights for part 'extractor', it takes none"):
        load_weights(path, make_job("fedavg").method(), "a", "extractor")
    for method in ("fedclassavg", "fedproto", "fedsimsup", "fedssa"):
        made = (job if method == "fedsimsup" else make_job(method)).method()
        crossing = {
            s.name for r in (0, 1, 2) for part in (*made.up(r), *made.down(r)) for s in part.wire
        }
        assert made.loadable
        assert not any(name.split(".")[0] in made.loadable for name in crossing)


def test_a_silo_begins_with_its_own_weights_and_the_others_as_before(job, trained, make_shards):
    shards = make_shards(job)
    plain = simulate(job, shards)
    own = simulate(job, shards, weights={"a": {"supervisor": trained}})
    state = initial_state(job.method(), "a", {"supervisor": trained})
    assert torch.equal(state.parts["supervisor"]["fc.bias"], trained["fc.bias"])
    assert torch.equal(
        state.parts["extractor"]["fc1.weight"], plain_start(job)["extractor"]["fc1.weight"]
    )
    assert plain.history["a"] != own.history["a"]
    assert plain.history["b"][0] == own.history["b"][0]


def plain_start(job):
    return initial_state(job.method(), "a").parts


def test_a_file_may_be_as_large_as_its_part(tmp_path):
    part = nn.Linear(2100, 2100)  # 17.6 MB, as a small ResNet is
    method = SimpleNamespace(
        name="own", loadable=("supervisor",), modules=lambda _: {"supervisor": part}
    )
    path = tmp_path / "w.safetensors"
    path.write_bytes(save(part.state_dict()))
    tensors, _ = load_weights(path, method, "a", "supervisor")
    assert torch.equal(tensors["weight"], part.weight)
    os.truncate(path, 2 * path.stat().st_size)
    with refused(r"w\.safetensors: larger than 18\d{6} bytes"):
        load_weights(path, method, "a", "supervisor")

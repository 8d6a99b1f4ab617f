import pytest
import torch
from support.engines import check_engines_agree
from support.jobs import make_job
from support.refusals import refused
from support.texts import texts
from torch import nn

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.models.build import ModelOptions, build, couples_records, maps
from staddle.algorithms.training.record_checks import check_records
from staddle.files.documents import validate

TEXT = {
    "name": "text-transformer",
    "norm": "group",
    "classes": 3,
    "input": [12],
    "options": {"tokens": 30, "width": 16, "heads": 2, "hidden": 24, "blocks": 2},
}


def made(seed=7, **changes):
    return build(validate({**TEXT, **changes}, ModelOptions, "job.toml"), seed)


@torch.no_grad()
def test_it_is_torchs_encoder_and_a_mean_over_the_tokens():
    """Layer by layer with the same values; torch's has query, key and value in one tensor."""
    extractor, data = made()["extractor"], texts(6)
    tokens, nobody = data.x.long(), data.x == 0
    states = extractor.token(tokens) + extractor.place.weight
    for own in extractor.blocks:
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=True)
        three = [own.query, own.key, own.value]
        values = {
            "self_attn.in_proj_weight": torch.cat([each.weight for each in three]),
            "self_attn.in_proj_bias": torch.cat([each.bias for each in three]),
        }
        pairs = {"self_attn.out_proj": own.out, "linear1": own.fc1, "linear2": own.fc2}
        for name, each in {**pairs, "norm1": own.norm1, "norm2": own.norm2}.items():
            values |= {f"{name}.weight": each.weight, f"{name}.bias": each.bias}
        layer.load_state_dict(values)
        # in training mode, since in evaluation torch leaves the places of no token at 0
        states = layer.train()(states, src_key_padding_mask=nobody)
    states = nn.functional.layer_norm(states, [16])
    wanted = [own[: int(there.sum())].mean(0) for own, there in zip(states, ~nobody, strict=True)]
    torch.testing.assert_close(extractor(data.x), torch.stack(wanted))


@torch.no_grad()
def test_what_follows_a_text_changes_nothing_and_a_text_of_nothing_is_zero():
    extractor, short = made()["extractor"], texts(5, length=7).x
    filled = torch.cat([short, torch.zeros(5, 5)], dim=1)
    longer = made(input=[7])["extractor"]
    longer.load_state_dict(
        {n: t[:7] if n == "place.weight" else t for n, t in extractor.state_dict().items()}
    )
    torch.testing.assert_close(extractor(filled), longer(short))
    assert torch.equal(extractor(torch.zeros(2, 12)), torch.zeros(2, 16))
    assert extractor(torch.full((2, 12), float("nan"))).isfinite().all()
    assert torch.equal(extractor(torch.full((1, 12), 99.0)), extractor(torch.full((1, 12), 29.0)))


@pytest.mark.parametrize("lora", [None, {"rank": 2, "targets": ["blocks.*.query", "*.value"]}])
def test_silos_learn_with_it_in_both_engines(lora):
    model = {**TEXT, **({"lora": lora} if lora else {})}
    job = make_job("fedavg", model=model, training={"epochs": 2, "lr": 0.02}, rounds=2)
    assert maps(job.model)
    assert not couples_records(job.model)
    shards = {silo: (texts(40, i), texts(20, 9 + i)) for i, silo in enumerate(job.silos)}
    check_engines_agree(job, shards)
    sent = {spec.name.partition(".")[2] for part in job.up(0) for spec in part.tensors}
    assert ("token.weight" in sent) == (lora is None)
    assert ("blocks.2.value.lora_b.weight" in sent) == (lora is not None)
    assert "blocks.2.key.lora_b.weight" not in sent


def test_records_that_are_no_tokens_are_refused():
    job = make_job("fedavg", model=TEXT)
    check_records(job, texts(40), "here")
    few = texts(40)
    few.x[0, :3] = torch.tensor([0.5, -1.0, 99.0])
    check_records(job, few, "here")
    said = "here: 40 of 40 records have numbers that are no tokens from 0 to 29; raise the model's"
    for x in (few.x + 30, few.x + 0.25, -1 - few.x.abs()):
        with refused(said):
            check_records(job, Dataset(x, few.y), "here")
    # the answer must not tell of a single record, however few there are
    one, two = (Dataset(few.x[:4] + 0, few.y[:4]) for _ in range(2))
    two.x[1] += 30
    check_records(job, one, "here")
    with refused("here: 2 of 4 records have numbers"):
        check_records(job, two, "here")
    # in a private job the answer must not depend on a record
    table = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25}
    check_records(make_job("fedavg", model=TEXT, privacy=table), Dataset(few.x + 30, few.y), "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input": [1, 12, 1]}, r"'text-transformer' takes texts \[length\], not \[1, 12, 1\]"),
        ({"options": {"width": 10}}, "width = 10 does not divide by heads = 4; choose a multiple"),
        ({"options": {"tokens": 1}}, "tokens = 1"),
        ({"norm": "batch"}, "has norm group, not 'batch'"),
    ],
)
def test_a_job_that_asks_for_what_it_cannot_be_is_refused(changes, said):
    with refused(said):
        made(**changes)

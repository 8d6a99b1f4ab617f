"""Open sums in words at a silo of a keyed job, from a coordinator as hostile as it likes."""

import hashlib
from dataclasses import replace

import pytest
import torch
from google.protobuf.message import DecodeError
from support.keyed_jobs import SILOS, keys_of
from support.open_sums import ME, Recipient, Summed, delivery, make_tagged

from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.errors import RefusedError
from staddle.proto.convert.open_sum import sums_from_wire
from staddle.proto.convert.secagg_messages import proofs_to_wire
from staddle.security.blind.plan import JobPlan
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.identity.domains import SECAGG_CONTEXT, SECAGG_DEALING, SECAGG_SPEC, framed
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.log.merkle import Tree
from staddle.security.secagg.dealing import Seeds, deal, make_bundle
from staddle.security.secagg.evidence import Misdealing, Unopened
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.receiving_keys import KeyDelivery, ReceivingKey


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    return make_tagged(tmp_path_factory.mktemp("tagged"))


@pytest.fixture(scope="module")
def sums(tagged):
    """By job and round."""
    names = ("simple", "twin", "hidden", "hidden-twin")
    return {
        (name, round_): Summed(tagged, tagged.jobs[name], round_)
        for name in names
        for round_ in (0, 1)
    }


@pytest.fixture
def recipient(tagged, tmp_path):
    found = Recipient(tagged, tmp_path)
    yield found
    found.world.ledger.close()


def same(found, wanted):
    return all(
        torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype
        for name in found
    )


@pytest.mark.parametrize("chunk", [1 << 20, 4096])
@pytest.mark.parametrize("job", ["simple", "hidden"])
def test_a_sum_comes_down_as_the_coordinator_folds_it(recipient, sums, chunk, monkeypatch, job):
    monkeypatch.setattr("staddle.proto.stream.CHUNK_BYTES", chunk)
    made = sums[job, 0]
    assert same(made.seen["model"], made.folds["model"]) == (job == "simple")
    found = recipient.take(made.job, 1, delivery(made.job, 1, [made.down("model")], chunk=chunk))
    assert same(found.tensors["model"], made.folds["model"])
    assert [*found.tensors["model"]] == [spec.name for spec in made.job.down(1)[0].tensors]
    digest = hashlib.sha256(made.words["model"]).digest()
    assert (found.items, found.digests, found.sums) == ((), (), (("model", digest),))
    assert recipient.recorded("ingress")[-1]["message"]["bytes"] == len(made.words["model"])
    plan = JobPlan(made.job).round(1)
    delivered = (found.sums, (("model", bytes(32)),), ())
    assert len({plan.model_digest((), (), each) for each in delivered}) == 3


@pytest.mark.parametrize("which", ["two", "hidden-two"])
def test_sums_of_two_parts_come_in_one_delivery(recipient, tagged, which):
    job = tagged.jobs[which]
    made = Summed(tagged, job, 1)
    names = [part.name for part in made.parts if part.name != "metrics"]
    assert len(names) == 2
    found = recipient.take(job, 2, delivery(job, 2, [made.down(name) for name in names]))
    for name in names:
        assert same(found.tensors[name], made.folds[name])
    assert [name for name, _ in found.sums] == names


def test_the_last_delivery_is_of_the_last_round(recipient, tagged):
    job = tagged.jobs["simple"]
    made = Summed(tagged, job, job.length - 1)
    found = recipient.take(job, job.length, delivery(job, job.length, [made.down("model")]))
    assert same(found.tensors["model"], made.folds["model"])


@pytest.mark.parametrize("name", ["simple", "hidden"])
def test_one_that_did_not_survive_is_no_part_of_the_sum(recipient, tagged, name):
    made = Summed(tagged, tagged.jobs[name], 0, SILOS[:4])
    found = recipient.take(made.job, 1, model_down(made))
    assert same(found.tensors["model"], made.folds["model"])


def model_down(made, round_=1):
    return delivery(made.job, round_, [made.down("model")])


def flipped(place, bit=1):
    def change(words):
        changed = bytearray(words)
        changed[place] ^= bit
        return bytes(changed)

    return change


def resigned(made, sign=None, **fields):
    """The part with another specification, signed all the same."""
    payload = made.spec.model_copy(update=fields).signed_bytes()
    signature = (sign or made.made.coordinator.sign)(SECAGG_SPEC, payload)
    return made.down("model", document=payload, signature=signature)


def regrouped(made, **fields):
    """With another first group."""
    first, *rest = made.spec.groups
    return resigned(made, groups=(first.model_copy(update=fields), *rest))


def fewer(made, *gone):
    return made.down("model", survivors=tuple(silo for silo in SILOS if silo not in gone))


UNSIGNED = "its signature does not fit"


def other_readers(made):
    first = made.spec.groups[0]
    return regrouped(made, reader="coordinator" if first.reader == "silos" else "silos")


HOSTILE = {
    "the first word": (lambda m, _: m.down("model", words=flipped(0)), "SUM",
        "sum of group 0 that was altered"),
    "the last word": (lambda m, _: m.down("model", words=flipped(-1, 128)), "SUM",
        "that was altered"),
    "another round's words": (
        lambda m, s: m.down("model", words=lambda _: s["simple", 1].words["model"]),
        "SUM",
        "",
    ),
    "another round's tag": (lambda m, s: m.down("model", tag=s["simple", 1].tags[:8]), "SUM",
        "was altered"),
    "another group's tag": (lambda m, _: m.down("model", tag=m.tags[8:]), "SUM", "was altered"),
    "no tag": (lambda m, _: m.down("model", tag=b"\xff" * 8), "SUM", "that is none"),
    "a survivor left out": (lambda m, _: fewer(m, SILOS[2]), "SUM", "was altered"),
    "too few survivors": (lambda m, _: fewer(m, *SILOS[2:]), "SURVIVORS",
        "2 survivors are fewer than 4"),
    "a survivor twice": (lambda m, _: m.down("model", survivors=(*SILOS, SILOS[4])), "SURVIVORS",
        "not members of the cohort in order"),
    "a stranger": (lambda m, _: m.down("model", survivors=(*SILOS, "silo-f")), "SURVIVORS",
        "not members of"),
    "a newer sum": (lambda _, s: s["simple", 1].down("model"), "SPEC",
        "specifies round 1, this silo expects 0"),
    "another job's": (lambda _, s: s["twin", 0].down("model"), "SPEC", "twin', this silo expects"),
    "not signed": (lambda m, _: m.down("model", signature=bytes(64)), "SPEC", UNSIGNED),
    "signed by a silo": (lambda m, _: resigned(m, keys_of(m.made, SILOS[1]).sign), "SPEC",
        UNSIGNED),
    "another attempt's name": (lambda m, _: resigned(m, attempt=1), "SUM", "was altered"),
    "no tags at all": (lambda m, _: resigned(m, tagged=False), "SPEC", "specifies tagged False"),
    "another key epoch": (lambda m, _: resigned(m, key_epoch=1), "SPEC", "specifies key_epoch 1"),
    "another scale": (lambda m, _: regrouped(m, scale_exponent=3), "SPEC", "specifies groups"),
    "another spelling": (lambda m, _: m.down("model", document=b" " + m.spec.signed_bytes()),
        "SPEC",
        "canonical"),
    "another part": (lambda m, _: m.down("model", part="metrics"), "SPEC",
        "brings sums of metrics"),
    "other readers": (lambda m, _: other_readers(m), "SPEC", "specifies groups"),
}  # fmt: skip


@pytest.mark.parametrize("job", ["simple", "hidden"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_sum_that_is_not_the_silos_is_refused_and_recorded(recipient, sums, name, job):
    change, code, said = HOSTILE[name]
    made, twin = sums[job, 0], "twin" if job == "simple" else "hidden-twin"
    message, words = change(made, {("simple", 1): sums[job, 1], ("twin", 0): sums[twin, 0]})
    with pytest.raises(RefusedError) as caught:
        recipient.take(made.job, 1, delivery(made.job, 1, [(message, words)]))
    blamed = COORDINATOR_OR_SILO if "was altered" in caught.value.why else "coordinator"
    assert (caught.value.peer, str(caught.value.code)) == (blamed, code), caught.value.why
    assert said in caught.value.why
    assert recipient.recorded("ingress") == []
    if message.part == "model":
        (ended,) = recipient.recorded("secagg.end")
        ctx = hashlib.sha256(framed(SECAGG_CONTEXT, message.document)).hexdigest()
        assert (ended["code"], ended["blame"]) == (code, blamed)
        assert (ended["round"], ended["ctx"]) == (0, ctx)
        assert said in ended["why"]


def test_the_sum_of_a_round_is_the_one_whose_survivors_this_silo_signed(recipient, sums):
    """A silo in league with the coordinator makes honest tags for another attempt, too."""
    made = sums["simple", 0]
    signed = Memory().starting(0).signed(made.spec, SILOS).starting(1)
    assert recipient.take(made.job, 1, model_down(made), memory=signed).sums
    retried = made.spec.model_copy(update={"attempt": 1})
    other = Memory().starting(0).signed(retried, SILOS).starting(1)
    why = "delivers the sum of another attempt at round 0 than"
    with pytest.raises(RefusedError, match=why) as caught:
        recipient.take(made.job, 1, model_down(made), memory=other)
    assert caught.value.code == "SUM"
    (ended,) = recipient.recorded("secagg.end")
    assert (ended["code"], ended["round"]) == ("SUM", 0)


BAD = SILOS[-1]
LEFT = tuple(silo for silo in SILOS if silo != BAD)


def misdealing(made, opens=False, **changes):
    """Evidence: what a silo sealed to another in the sum's job does not open, or ``opens``."""
    spec = made.spec.model_copy(update={"attempt": 4, **changes})
    ctx, sign = spec.context(), keys_of(made.made, BAD).sign
    seeds = Seeds(*(bytes([number]) * 32 for number in range(1, 6)))
    bundle = make_bundle(ctx, BAD, seeds.seal, seeds.mask, bytes(32), sign)
    private = {silo: silo.encode().ljust(32) for silo in LEFT}
    keys = [KeyDelivery(s, ReceivingKey(BAD, public_key(key)), ()) for s, key in private.items()]
    holders = {silo: spec.holder(silo) for silo in SILOS}
    dealing, portions, _ = deal(ctx, bytes(32), keys, BAD, seeds, spec.threshold, holders, sign)
    if not opens:
        portions = tuple(
            replace(each, sealed=bytes(len(each.sealed))) for each in portions if each.holder != BAD
        )
        root = Tree(portion.leaf() for portion in portions).root()
        dealing = replace(dealing, root=root, signature=b"")
        dealing = replace(dealing, signature=sign(SECAGG_DEALING, dealing.signed_bytes(ctx)))
    return Misdealing(spec.signed_bytes(), bundle, dealing, portions, Unopened(ME, private[ME]))


def test_a_sum_may_lack_a_silo_against_which_there_is_evidence(recipient, tagged):
    """As for a silo that was away when the other was found out: the delivery brings the proof."""
    made = Summed(tagged, tagged.jobs["two"], 0, LEFT)
    (name, *_) = [part.name for part in made.parts]
    down = [made.down(part.name) for part in made.parts if part != RIGHT]

    def frames(*proofs):
        return delivery(made.job, 1, down, proofs=proofs_to_wire(proofs))

    found = recipient.take(made.job, 1, frames(misdealing(made)))
    assert same(found.tensors[name], made.folds[name])
    for proofs, code, said in (
        ((), "SURVIVORS", f"the sum lacks {BAD}"),
        ((misdealing(made, opens=True),), "MISDEALT", "that proves nothing"),
        ((misdealing(made, job_digest="ab" * 32),), "MISDEALT", "of another job"),
        ((misdealing(made, federation="other"),), "MISDEALT", "of another job"),
        ((misdealing(made),) * 2, "MISDEALT", "not ascending"),
    ):
        with pytest.raises(RefusedError, match=said) as caught:
            recipient.take(made.job, 1, frames(*proofs))
        assert (caught.value.peer, caught.value.code) == ("coordinator", code)
    proofs = proofs_to_wire([misdealing(made)])
    with pytest.raises(RefusedError, match="delivers 1 proofs without a sum"):
        recipient.take(made.job, 0, delivery(made.job, 0, [], proofs=proofs))


def test_a_sum_settles_what_became_of_an_upload_that_is_not_in_it(recipient, tagged, sums):
    """It lost its connection behind the upload, and the others had their sum without it."""
    made = Summed(tagged, tagged.jobs["simple"], 0, tuple(silo for silo in SILOS if silo != ME))
    memory = Memory().starting(0).uploading(made.spec, SILOS)
    recipient.take(made.job, 1, model_down(made), memory=memory)
    assert (len(memory.pending), recipient.remembered.pending) == (1, ())
    within = sums["simple", 0]
    memory = Memory().starting(0).uploading(within.spec, SILOS).starting(1)
    recipient.take(made.job, 1, delivery(made.job, 1, [within.down("model")]), memory=memory)
    assert recipient.remembered == memory


def test_a_sum_with_values_of_a_silo_for_which_its_round_does_not_count_is_refused(recipient, sums):
    """It would train once more from the state whose values are in it."""
    made = sums["simple", 0]
    why = "delivers a sum of round 0 with values of this silo, and does not"
    with pytest.raises(RefusedError, match=why) as caught:
        recipient.take(made.job, 1, model_down(made), memory=Memory().starting(0))
    assert caught.value.peer == "coordinator"


@pytest.mark.parametrize("job", ["simple", "hidden"])
def test_an_older_sum_handed_down_again_is_refused(recipient, sums, job):
    made = sums[job, 0]
    recipient.take(made.job, 1, model_down(made))
    with pytest.raises(RefusedError, match="specifies round 0, this silo expects 1") as caught:
        recipient.take(made.job, 2, model_down(made, 2))
    assert (caught.value.peer, caught.value.code) == ("coordinator", "SPEC")


@pytest.mark.parametrize("job", ["simple", "hidden"])
def test_the_sum_of_another_key_is_refused(recipient, sums, job):
    made = sums[job, 0]
    with pytest.raises(RefusedError, match="was altered"):
        recipient.take(made.job, 1, model_down(made), key=b"another".ljust(32))


def test_the_sum_of_silos_that_were_not_drawn_is_refused(recipient, tagged):
    job = tagged.jobs["away"]
    assert len(job.cohort(0)) == 4
    honest = Summed(tagged, job, 0, job.cohort(0), job.cohort(0))
    recipient.take(job, 1, delivery(job, 1, [honest.down("extractor")]))
    made = Summed(tagged, job, 0)
    with pytest.raises(RefusedError, match="not all were drawn for its round"):
        recipient.take(job, 1, delivery(job, 1, [made.down("extractor")]))


def folds(made):
    """As tensors: what a coordinator would like silos to take instead."""
    model = made.folds["model"].items()
    return {"model": {name: value for name, value in model if name != "@weight"}}


AS_TENSORS = "as tensors; it has to come in the words of its sum"


@pytest.mark.parametrize(
    ("round_", "change", "said"),
    [
        (1, lambda m: ([], {"plain": folds(m)}), AS_TENSORS),
        (0, lambda m: ([], {"plain": folds(m)}), AS_TENSORS),
        (1, lambda m: ([m.down("model")], {"plain": folds(m)}), AS_TENSORS),
        (0, lambda m: ([m.down("model")], {}), "delivers 1 sums where there are none"),
        (1, lambda m: ([m.down("model")] * 2, {}), "2 open sums, at most 1 there can be"),
        (1, lambda m: ([m.down("model", words=lambda words: words[:-4])], {}), "declared"),
        (1, lambda m: ([m.down("model", words=lambda words: words + bytes(4))], {}), "declared"),
        (1, lambda m: ([m.down("model")], {"size": 1 << 60}), "the tensors and words have"),
    ],
    ids=[
        "tensors", "before any sum", "both", "sums before any", "twice", "a word less",
        "a word more", "another size",
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused(recipient, sums, round_, change, said):
    made = sums["simple", 0]
    parts, manifest = change(made)
    with pytest.raises(RefusedError) as caught:
        recipient.take(made.job, round_, delivery(made.job, round_, parts, **manifest))
    assert (caught.value.peer, caught.value.code) == ("coordinator", "MANIFEST")
    assert said in caught.value.why
    assert recipient.recorded("ingress") == []
    ends = [
        (end["code"], end["blame"], end["round"], said in end["why"])
        for end in recipient.recorded("secagg.end")
    ]
    assert ends == ([("SUM", "coordinator", 0, True)] if round_ and "plain" in manifest else [])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("signature", bytes(63), "has 63 bytes, not 64"),
        ("tag", bytes(16), "has 16 bytes, not 8"),
        ("survivors", ["Not an id"], "is not an id of a member"),
        ("survivors", ["a"] * 1001, "1001 survivors of a sum, at most 1000"),
        ("document", b"{", "specification of a secure sum"),
    ],
    ids=["signature", "tag", "survivor", "survivors", "no JSON"],
)
def test_a_claim_that_is_none_is_refused(recipient, sums, field, value, said):
    made = sums["simple", 0]
    message, words = made.down("model")
    if field == "survivors":
        del message.survivors[:]
        message.survivors.extend(value)
    else:
        setattr(message, field, value)
    with pytest.raises(RefusedError) as caught:
        recipient.take(made.job, 1, delivery(made.job, 1, [(message, words)]))
    assert (caught.value.peer, caught.value.code) == ("coordinator", "SPEC")
    assert said in caught.value.why


def test_a_specification_too_long_is_refused_before_it_is_read(recipient, sums):
    made = sums["simple", 0]
    message, words = made.down("model", document=bytes((1 << 21) + 1))
    with pytest.raises(RefusedError, match="at most 2097152 it can have"):
        sums_from_wire("coordinator", [message], ("model",))
    with pytest.raises(DecodeError, match="at most 2097152 it can have"):
        recipient.take(made.job, 1, delivery(made.job, 1, [(message, words)]))

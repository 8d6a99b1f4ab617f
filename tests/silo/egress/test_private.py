"""What leaves of a private job: by what it was computed from, and what paid for it."""

from dataclasses import replace

import pytest
import torch
from support.keyed_jobs import BLIND, make_keyed
from support.ledgers import spend
from support.private_jobs import TABLE, policy_for, private_job
from support.recording_gate import RECORDS, SILOS, Made, World, kinds, make_federation, records
from support.refusals import refused
from support.secure_sums import frame

from staddle.algorithms.exchange.parts import WEIGHT
from staddle.algorithms.leaks.taint import EXACT, PUBLIC, paid
from staddle.commands.federation import local_federation
from staddle.errors import LocalError
from staddle.security.blind.sum import group
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.policy import policy as policies
from staddle.security.policy.data_sets import DataSets
from staddle.security.policy.release import Release, nothing_paid, unpaid
from staddle.security.secagg.spec import specify
from staddle.silo.egress import messages
from staddle.silo.egress.messages import Masking
from staddle.silo.egress.outcomes import DeniedError
from staddle.silo.parts.contributions import Contributions
from staddle.silo.parts.declared import Declared
from staddle.silo.parts.tensors import exactly

from ..blind.test_round import BOUNDS, DECLARED, FRAME, ITEMS, PARTS, payload
from ..blind.test_round import SILOS as FOUR
from .test_hidden import Keyed

IDS = (2, 4)
BUT = ("model", "classifier.bias", EXACT)


def intent_of(world):
    return next(record for record in records(world.path) if record["type"] == "egress.intent")


def taints_of(world):
    return {tensor["taint"] for tensor in intent_of(world)["tensors"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = make_federation(tmp_path_factory.mktemp("private"))
    private_job(found)
    return found


class Private(World):
    """A gate whose budget has reservations IDS of the job, and one of another job."""

    def __init__(self, made, folder, **table):
        self.job_name = "private"
        policy = policy_for(made, *made.jobs.values(), **{"required": "true", **table})
        super().__init__(made, folder, policy)
        self.job = made.jobs["private"]
        of = {**dict.fromkeys(IDS, self.declared.digest), 6: "cd" * 32}
        self.gate._paid = lambda _, number, job: of.get(number) == job
        spend(self.ledger, 7, "1.5")

    def bundle(self, taint, but=None, **changes):
        """Random numbers, all of one taint ``but`` for one tensor, with its own."""
        given = self.payload(**changes)
        taints = {part: dict.fromkeys(own, taint) for part, own in given.items()}
        if but is not None:
            part, name, other = but
            taints[part][name] = other
        return Contributions(given, taints)


@pytest.fixture
def world(made, tmp_path):
    found = Private(made, tmp_path)
    yield found
    found.ledger.close()


def denied(world, bundle, words):
    with pytest.raises(DeniedError, match=words):
        world.contribute(bundle)
    world.nothing_left()
    last = records(world.path)[-1]
    assert last["type"] == "policy.deny"
    return last


# (3) Counts are noisy, and nothing shows how many records there are.
def test_the_signed_document_says_that_a_job_is_private(made):
    assert Declared.of(made.jobs["private"].document(), RECORDS).private
    assert not Declared.of(made.jobs["simple"].document(), RECORDS).private
    keyed = {**made.jobs["simple"].document(), "privacy": {"epsilon": "6"}}
    assert Declared.of(keyed, RECORDS).records is None


def test_3_noisy_counts_may_be_larger_than_what_there_is(world):
    counts = {"tested": torch.tensor(10**6), "correct.delivered": torch.tensor(5)}
    world.contribute(world.bundle(paid(*IDS), **counts, **{WEIGHT: torch.tensor(1e9).double()}))
    assert world.client.uploads == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (WEIGHT, torch.tensor(2.5, dtype=torch.float64),
            "not a whole number from 0 to 9007199254740991, .*are noisy"),
        (WEIGHT, torch.tensor(-0.0, dtype=torch.float64), "not a whole number from 0"),
        ("tested", torch.tensor(2**53),
            "tested is 9007199254740992, this silo has 9007199254740991 .*are noisy"),
        ("correct.trained", torch.tensor(11), "correct.trained is 11, of 10 that were tested"),
    ],
)  # fmt: skip
def test_3_they_are_counts_all_the_same(world, name, value, words):
    with pytest.raises(LocalError, match=words) as caught:
        world.contribute(world.bundle(paid(*IDS), **{name: value}))
    assert not any(str(c) in str(caught.value) for c in (RECORDS.train, f"has {RECORDS.test} "))
    world.nothing_left()


# (4) What has to be protected is.
def test_4_nothing_private_leaves_where_the_data_set_is_protected(world):
    why = r"and 9 more would leave as computed from records without noise"
    (reason,) = denied(world, Contributions(world.payload()), why)["reasons"]
    fix = "[dataset.data] has required = true; ask for a job that is signed with [privacy]"
    assert fix in reason
    one = r"^this silo holds .*: model/classifier\.bias would leave as computed"
    denied(world, world.bundle(paid(*IDS), BUT), one)


def test_4_of_a_job_that_is_not_private_all_is_whatever_is_said_of_it(made, world, tmp_path):
    world.job = made.jobs["simple"]
    for taint in (PUBLIC, paid(*IDS)):
        denied(world, world.bundle(taint), "without noise")
    free = Private(made, tmp_path / "free", required="false")
    free.job = made.jobs["simple"]
    free.contribute(free.bundle(PUBLIC))
    assert (taints_of(free), intent_of(free)["dp"]) == ({"exact"}, None)
    free.ledger.close()


# (5) It was paid for.
def test_5_what_was_paid_for_leaves_and_the_record_names_what_paid(world):
    world.contribute(world.bundle(paid(4), ("model", "classifier.bias", paid(2, 4))))
    assert intent_of(world)["dp"] == {"dataset": "data", "ids": [2, 4], "noise": "local"}
    assert taints_of(world) == {"noised"}
    assert world.audited().ok


def test_5_nothing_private_leaves_of_a_private_job_even_without_a_budget(made, tmp_path):
    """Else the epsilon that the job and the ledger say would not hold."""
    world = Private(made, tmp_path, required="false")
    why = r"model/classifier\.bias would leave .*, and the job is private"
    denied(world, world.bundle(paid(*IDS), BUT), why)
    world.ledger.close()


def test_5_what_is_public_needs_no_payment(world):
    world.contribute(world.bundle(PUBLIC))
    assert (taints_of(world), intent_of(world)["dp"]) == ({"public"}, None)


@pytest.mark.parametrize("number", [3, 6, 0, 2**53 - 1])
@pytest.mark.parametrize("required", ["true", "false"])
def test_5_a_reservation_of_another_job_or_none_pays_nothing(made, tmp_path, number, required):
    world = Private(made, tmp_path, required=required)
    bundle = world.bundle(paid(2), ("metrics", "tested", paid(number)))
    assert len(denied(world, bundle, f"reservation {number} is said")["reasons"]) == 1
    world.ledger.close()


def test_4_the_rules_are_those_for_the_data_set_of_the_job(made, tmp_path, monkeypatch):
    names = DataSets({"data": "data", "scans": "scans"})
    text = policy_for(made, *made.jobs.values()).text
    text = text.replace("[[allow]]", '[[allow]]\ndatasets = ["scans"]')
    world = Private(made, tmp_path)
    world.gate._policy = policies.parse(text.encode(), "policy.toml", names)
    denied(world, world.bundle(paid(2)), "no .*allow.* has method 'fedavg'")
    asked = Declared.of({**world.job.document(), "dataset": "scans"}, RECORDS)
    monkeypatch.setattr(Private, "declared", asked)
    world.gate._paid = lambda *_: True
    spend(world.ledger, 7, "1.5", "scans")
    world.contribute(world.bundle(paid(2)))
    assert intent_of(world)["dataset"] == "scans"
    world.ledger.close()


def test_5_a_job_is_paid_for_by_its_own_data_set_alone(made, tmp_path, monkeypatch):
    """A reservation of the same number and job in another budget pays nothing."""
    names = DataSets({"data": "data", "scans": "scans"})
    text = policy_for(made, *made.jobs.values(), required="true").text
    text = text.replace("[[allow]]", '[[allow]]\ndatasets = ["data", "scans"]')
    policy = policies.parse(text.encode(), "policy.toml", names)
    world = Private(made, tmp_path)
    world.gate._policy = policy
    asked = Declared.of({**world.job.document(), "dataset": "scans"}, RECORDS)
    monkeypatch.setattr(Private, "declared", asked)
    for dataset in ("scans", "data"):
        spend(world.ledger, 7, "1.5", dataset)
        world.gate._paid = lambda of, number, _, one=dataset: (of, number) == (one, 2)
        if dataset == "scans":
            world.contribute(world.bundle(paid(2)))
        else:
            with pytest.raises(DeniedError, match="reservation 2 is said to have paid for it"):
                world.contribute(world.bundle(paid(2)))
    (intent,) = [each for each in records(world.path) if each["type"] == "egress.intent"]
    assert (intent["dataset"], intent["dp"]) == (
        "scans",
        {"dataset": "scans", "ids": [2], "noise": "local"},
    )
    world.ledger.close()


def test_5_without_a_budget_nothing_is_paid_for(world):
    world.gate._paid = nothing_paid
    denied(world, world.bundle(paid(*IDS)), "reservation 2 is said .*; reservation 4 is said")


def test_5_what_is_dp_and_names_nothing_that_paid_is_refused():
    bare = Release("model", "whole_model", "w", "float32", (2,), taint="noised")
    assert list(unpaid([bare], "ab", lambda *_: True)) == [
        "tensor model/w is noised, and names no reservation that paid for it"
    ]
    assert list(unpaid([replace(bare, ledger_ids=(3,))], "ab", lambda *_: True)) == []
    assert list(unpaid([replace(bare, taint="public")], "ab", lambda *_: False)) == []


def test_5_the_same_refusal_again_is_recorded_once(world):
    for _ in range(3):
        with pytest.raises(DeniedError):
            world.contribute(world.bundle(paid(3)))
    assert kinds(records(world.path)).count("policy.deny") == 1


# (6) The ledger has a head of the budget that has what paid.
def test_6_a_reservation_that_no_head_in_the_ledger_covers_lets_nothing_leave(world):
    world.gate._paid = lambda *_: True
    with refused("is paid by 7 of data set 'data', whose last head has 7 records"):
        world.contribute(world.bundle(paid(7)))
    world.nothing_left()


# The other forms.
@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    made = make_keyed(tmp_path_factory.mktemp("private-keyed"))
    silos = made.jobs["rows"].silos
    made.job("rows", "pfedsim", silos, {"rho": 0}, min_cohort=3, security=BLIND, privacy=TABLE)
    return made


class PrivateKeyed(Keyed):
    """The same for what leaves padded and rotated."""

    def __init__(self, made, folder):
        super().__init__(made, folder, policy_for(made, *made.jobs.values(), required="true"))
        self.gate._paid = lambda _, number, job: number in IDS and job == self.declared.digest
        spend(self.ledger, 7, "1.5")

    def given(self, part, taint):
        """Of one part, all of this taint; nothing is said of the others."""
        return Contributions(self.gives(), {part: dict.fromkeys(self.gives()[part], taint)})

    def padded(self, taint):
        bundle, padding = self.given("extractor", taint), self.padding()
        return self.run(lambda: self.gate.upload_padded(self.declared, 0, bundle, padding, SILOS))

    def rotated(self, taint):
        bundle, rotating = self.given("rows", taint), self.rotating()
        return self.run(lambda: self.gate.upload_rotated(self.declared, 0, bundle, rotating, SILOS))


@pytest.mark.parametrize("form", ["padded", "rotated"])
def test_what_leaves_hidden_has_its_taint_and_was_paid_for(keyed, tmp_path, form):
    world = PrivateKeyed(keyed, tmp_path)
    for taint, words in ((EXACT, "without noise"), (paid(3), "reservation 3 is said")):
        with pytest.raises(DeniedError, match=words):
            getattr(world, form)(taint)
    world.nothing_left()
    # Silos share the noise of sums alone, and no sum is of this.
    world.declares = replace(world.declared, noise="shared")
    getattr(world, form)(paid(*IDS))
    intent = intent_of(world)
    assert (intent["form"], intent["dp"]) == (
        form,
        {"dataset": "data", "ids": list(IDS), "noise": "local"},
    )
    assert taints_of(world) == {"noised"}
    assert world.audited().ok


MASKED = """
version = 1
[limits]
max_bytes_per_round = "64MiB"
[control]
max_messages = 100
max_bytes = "1MiB"
[[allow]]
name = "all"
methods = ["fedavg"]
parts = ["model", "metrics"]
kinds = ["whole_model", "metric"]
tensors = ["**"]
dtypes = ["uint32", "uint64"]
max_elements = 100_000
recipients = ["coordinator"]
readers = ["sum"]
forms = ["masked"]
[dataset.data]
unit = "record"
epsilon = 8
delta = 1e-5
required = true
"""


@pytest.fixture(scope="module")
def summing(tmp_path_factory):
    """The four silos of the secure sum."""
    files = local_federation.make(tmp_path_factory.mktemp("summing") / "local", FOUR)
    roster, keys = rosters.load(files.folder / "roster.json"), files.folder / "coordinator" / "keys"
    return Made(files, roster, load_keys(keys))


def masked(made, folder, bundle, noise="local"):
    """One masked upload of the first of them, through its gate."""
    world = Keyed.__new__(Keyed)
    World.__init__(world, made, folder, policies.parse(MASKED.encode(), "policy.toml"))
    world.declares = replace(DECLARED, records=None, silos=FOUR, noise=noise)
    world.gate._paid = lambda _, number, job: number in IDS and job == world.declares.digest
    spend(world.ledger, 7, "1.5")
    masking = Masking(specify(FRAME, FOUR, 0), FOUR[0], (), FOUR, None)
    try:
        world.run(lambda: world.gate.upload_masked(world.declares, FRAME.round, bundle, masking))
    finally:
        world.ledger.close()
    return world


@pytest.mark.parametrize("noise", ["local", "shared"])
def test_what_leaves_masked_has_the_taint_of_tensor_and_weight(
    summing, tmp_path, monkeypatch, noise
):
    monkeypatch.setattr("support.recording_gate.SILO", FOUR[0])
    given = payload(FOUR[0])
    taints = {part.name: {spec.name: paid(4) for spec in part.wire} for part in PARTS}
    taints["model"][WEIGHT] = paid(2)
    world = masked(summing, tmp_path / "good", Contributions(given, taints), noise)
    intent = intent_of(world)
    assert (intent["form"], intent["dp"]) == (
        "masked",
        {"dataset": "data", "ids": [2, 4], "noise": noise},
    )
    assert taints_of(world) == {"noised"}
    taints["model"][WEIGHT] = EXACT
    why = r"model/\w+, model/\w+.* would leave as computed from records without noise"
    with pytest.raises(DeniedError, match=why):
        masked(summing, tmp_path / "bad", Contributions(given, taints))


def test_declared_counts_stand_for_a_noisy_weight_and_for_no_other_than_the_records():
    public = replace(BOUNDS, weights="public")
    counts = tuple((silo, 20) for silo in FOUR)
    spec = specify(frame(groups=tuple(group(p, public) for p in PARTS), counts=counts), FOUR, 0)
    values = exactly(ITEMS, payload(FOUR[3]))  # whose weight is 10
    for records_, may in ((10, True), (11, False), (None, True)):
        masking = Masking(spec, FOUR[3], (), FOUR, records_)
        if may:
            assert messages.masked(PARTS, ITEMS, values, masking).form == "masked"
        else:
            with refused("weights it by 10, not by the 11 training records"):
                messages.masked(PARTS, ITEMS, values, masking)

"""The rows of a Mix at their recipient; the coordinator is the test, and as hostile as it likes."""

import asyncio

import pytest
import torch
from support.keyed_jobs import KEY, SILOS, WHOLE, Coordinator, even, keys_of, make_keyed, sharing_of
from support.ledgers import stored

from staddle.algorithms.exchange.delivery import KEEP
from staddle.errors import LocalError, RefusedError, UnwritableError
from staddle.files import checked_file
from staddle.proto import stream
from staddle.proto.convert.mix import words_to_wire
from staddle.proto.frames import decode
from staddle.proto.wire import tensor_bytes
from staddle.security.blind.plan import JobPlan
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.records import Peer
from staddle.security.secagg.spec import Terms
from staddle.silo.ingress import delivery, mix_rows
from staddle.silo.ingress.mix_memory import OpenedRows
from staddle.silo.parts.tensors import flat

ME, OTHERS = SILOS[0], SILOS[1:]
TERMS = Terms(min_cohort=3, min_honest=2, colluders=1)
OWN = 1 << 30
BEGUN = checked_file.to_json(OpenedRows())


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    return make_keyed(tmp_path_factory.mktemp("keyed"))


@pytest.fixture(scope="module")
def contributors(keyed, tmp_path_factory):
    """Everybody's uploads 0 to 3 to both jobs (from round 1 on where mailed), only read."""
    found = {}
    for name, round_ in (("rows", 1), ("mail", 2)):
        job = keyed.jobs[name]
        part = next(iter(mix_rows.expected_rows(JobPlan(job).round(round_)).values())).part
        found[name] = Coordinator(keyed, job, part, tmp_path_factory.mktemp(name))
        for number in range(4):
            for silo in job.silos:
                found[name].contribute(silo, number, number + (name == "mail"))
    return found


class Recipient:
    """One silo with a ledger, whose memory is on the disk."""

    def __init__(self, keyed, coordinator, folder, terms=TERMS, key=KEY):
        self.coordinator, self.folder, self.terms = coordinator, folder, terms
        self.sharing = sharing_of(keyed, coordinator.job, ME, folder / "job", key)
        self.ledger = Ledger.open(
            folder / "ledger", ME, keyed.roster.federation, keys_of(keyed, ME).log
        )
        self.own_values = {
            spec.name: torch.full(spec.shape, 0.5)
            + torch.arange(spec.elements).reshape(spec.shape) / 2**20
            for spec in coordinator.part.tensors
        }
        self.asked = []
        entry = keyed.roster.coordinator
        self.peer = Peer(id=entry.id, spki=entry.spki_sha256)

    def own(self, part):
        self.asked.append(part.name)
        return flat([self.own_values[spec.name] for spec in part.tensors])

    def take(self, frames, round_=1):
        """One delivery, as a process that has just begun takes it."""
        plan = JobPlan(self.coordinator.job).round(round_)
        opener = mix_rows.IncomingRows(self.sharing, plan, self.terms, self.own)
        return self.delivered(frames, plan, opener)

    def delivered(self, frames, plan, *opener):
        async def coming():
            for frame in frames:
                yield decode(frame.SerializeToString())

        return asyncio.run(delivery.take(self.ledger, self.peer, plan, coming(), *opener))

    def row(self, number=0, round_=1, own=0, **changes):
        """Frames with a row over all others' uploads of this number, the same weight for each."""
        made = self.coordinator
        return made.delivery(round_, [usual(made, number, own, **changes)])

    def memory(self):
        """The bytes of all that it remembers of rows that it opened."""
        found = {p.name: p.read_bytes() for p in sorted((self.folder / "job").glob("mix-*"))}
        return {name: data for name, data in found.items() if data != BEGUN}


@pytest.fixture
def recipient(keyed, contributors, tmp_path):
    found = Recipient(keyed, contributors["rows"], tmp_path)
    yield found
    found.ledger.close()


@pytest.fixture
def addressee(keyed, contributors, tmp_path):
    found = Recipient(keyed, contributors["mail"], tmp_path)
    yield found
    found.ledger.close()


def versions(number, silos=OTHERS):
    return [(silo, number) for silo in silos]


def usual(made, number=0, own=0, **changes):
    """A row over all others' uploads of this number, the same weight for each."""
    return made.row(ME, even(versions(number), own), own, **changes)


def close(found, wanted):
    """Within what rounding the values to 2^-24 does (clip 2^6, 30 bits), and their dtype."""
    return all(
        torch.allclose(found[name].double(), value, rtol=0, atol=2e-6)
        for name, value in wanted.items()
    )


def refusal(recipient, frames, round_=1):
    """Who is to blame and for what; the delivery is refused, and no ingress is recorded."""
    with pytest.raises(RefusedError) as caught:
        recipient.take(frames, round_)
    assert stored(recipient.folder / "ledger") == []
    return caught.value.peer, str(caught.value.code), caught.value.why


# The whole way.
@pytest.mark.parametrize("own", [0, OWN])
@pytest.mark.parametrize("chunk", [1 << 20, 4096])
def test_a_row_comes_down_and_is_the_mean_by_its_weights(recipient, own, chunk, monkeypatch):
    monkeypatch.setattr("staddle.proto.stream.CHUNK_BYTES", chunk)
    made, weights = recipient.coordinator, even(versions(0), own)
    found = recipient.take(made.delivery(1, [made.row(ME, weights, own)], chunk=chunk))
    assert found.tensors.keys() == {"extractor"}
    assert {name: value.dtype for name, value in found.tensors["extractor"].items()} == {
        spec.name: torch.float32 for spec in made.part.tensors
    }
    assert close(found.tensors["extractor"], made.wanted(weights, own, recipient.own_values))
    assert (found.items, found.digests) == ((), ())
    assert recipient.asked == (["extractor"] if own else [])
    (ingress,) = stored(recipient.folder / "ledger")
    assert (ingress["type"], ingress["message"]["bytes"]) == ("ingress", made.line.nbytes)


def test_words_that_chunks_cut_in_two_are_put_together(recipient):
    """As behind tensors whose bytes are no multiple of eight."""
    made, weights = recipient.coordinator, even(versions(0))
    message, hidden = made.row(ME, weights)
    opener = mix_rows.IncomingRows(
        recipient.sharing, recipient.sharing.plan.round(1), TERMS, recipient.own
    )
    assert opener.announced("coordinator", [message], []) == [len(hidden)]
    opener.admit()
    at = 0
    for size in (4, 1, 2, 3, 8, 13, 4096 - 31, len(hidden)):
        opener.write(memoryview(hidden)[at : at + size])
        at += size
    assert close(opener.delivered()["extractor"], made.wanted(weights))


def test_nothing_is_a_delivery_and_a_row_gives_what_the_part_has(recipient):
    assert recipient.take(recipient.coordinator.delivery(1, [])).tensors == {}
    assert recipient.memory() == {}
    made = recipient.coordinator
    found = recipient.take(recipient.row()).tensors["extractor"]
    for spec in made.part.tensors:
        assert found[spec.name].shape == spec.shape
        assert len(tensor_bytes(found[spec.name])) == spec.nbytes


def test_the_same_row_comes_again_after_a_lost_connection_and_a_restart(recipient):
    made, weights = recipient.coordinator, even(versions(0), OWN)
    frames = made.delivery(1, [made.row(ME, weights, OWN)])
    with pytest.raises(RefusedError, match="before its end frame"):
        recipient.take(frames[:-1])
    before = recipient.memory()
    found = recipient.take(frames)
    assert recipient.memory() == before
    assert close(found.tensors["extractor"], made.wanted(weights, OWN, recipient.own_values))


@pytest.mark.parametrize("behind", [0, 1, stream.TOGETHER - 1, stream.TOGETHER])
def test_a_chunk_of_another_length_is_refused_wherever_it_stands(recipient, behind, monkeypatch):
    """Also among chunks that wait for others, to go to the thread together."""
    monkeypatch.setattr("staddle.proto.stream.CHUNK_BYTES", 4096)
    made = recipient.coordinator
    manifest, *chunks, _ = made.delivery(1, [usual(made)], chunk=4096)
    assert len(chunks) > 2 * stream.TOGETHER
    bad = type(chunks[1])(chunk=chunks[1].chunk[:-8])
    peer, code, why = refusal(recipient, [manifest, chunks[0], bad, *chunks[2 : 2 + behind]])
    assert (peer, code) == ("coordinator", "LENGTH")
    assert "a chunk of 4088 bytes" in why


def test_chunks_go_to_the_thread_together_and_what_is_no_chunk_at_once(recipient, monkeypatch):
    monkeypatch.setattr("staddle.proto.stream.CHUNK_BYTES", 4096)
    fed, feed = [], delivery._feed
    monkeypatch.setattr(delivery, "_feed", lambda i, f: fed.append(len(f)) or feed(i, f))
    made = recipient.coordinator
    frames = made.delivery(1, [usual(made)], chunk=4096)
    recipient.take(frames)
    whole, rest = divmod(len(frames) - 2, stream.TOGETHER)
    # the manifest; the chunks; the end with the last ones
    assert fed == [1, *[stream.TOGETHER] * whole, rest + 1]


def test_rows_of_rounds_that_follow(recipient):
    made = recipient.coordinator
    for number in range(3):
        weights = even(versions(number), OWN)
        found = recipient.take(made.delivery(number + 1, [made.row(ME, weights, OWN)]), number + 1)
        assert close(found.tensors["extractor"], made.wanted(weights, OWN, recipient.own_values))


# What was put aside for a silo that was away.
def mailed(made, rows_and_keeps):
    """m and k, the obvious way, in float64."""
    zeros = (torch.zeros(spec.shape, dtype=torch.float64) for spec in made.part.tensors)
    total = {spec.name: zero for spec, zero in zip(made.part.tensors, zeros, strict=True)}
    kept = 1.0
    for weights, keep in rows_and_keeps:
        row = made.wanted(weights)
        total = {name: value * keep + row[name] * (1 - keep) for name, value in total.items()}
        kept *= keep
    return total, kept


def mail_of_round_1(made):
    """Newer uploads of a round of which there was mail."""
    for silo in OTHERS:
        made.contribute(silo, 10, 1)
    return mail(made, 10)


def unlike():
    """Not as the method weighs silos that have the same counts."""
    (first, own), (second, other), *rest = even(versions(0)).items()
    moved = int(0.05 * WHOLE)
    return {first: own + moved, second: other - moved, **dict(rest)}


def mail(made, number=0, keep=0.5):
    return usual(made, number, keep=keep)


def test_mail_is_put_together_in_the_order_of_its_rounds(addressee, monkeypatch):
    monkeypatch.setattr(
        "staddle.algorithms.methods.fedsimsup.method.FedSimSup.mail_fault", lambda *_: ""
    )  # other shares, to tell apart
    made = addressee.coordinator
    steps = [
        (even(versions(0)), 0.5),
        (even(versions(1)), 0.25),
        (even(versions(2, OTHERS[:3])), 0.75),
    ]
    parcels = [made.row(ME, weights, keep=keep) for weights, keep in steps]
    wanted, kept = mailed(made, steps)
    found = addressee.take(made.delivery(4, parcels), 4).tensors["theta"]
    assert found.keys() == {*wanted, KEEP.name}
    assert float(found[KEEP.name]) == kept == 0.5 * 0.25 * 0.75
    assert close(found, wanted)
    assert addressee.asked == []


def test_mail_that_was_fetched_comes_again_and_grows(addressee):
    """A silo that fetched, and was away again, gets all of it once more, and a row more."""
    made = addressee.coordinator
    parcels = [mail(made, number) for number in range(3)]
    for fetched in (parcels[:2], parcels[:2], parcels):
        addressee.take(made.delivery(4, fetched), 4)
    addressee.take(made.delivery(4, parcels[1:]), 4)
    # what did not come the last time does not come back
    with pytest.raises(RefusedError, match="older uploads"):
        addressee.take(made.delivery(4, parcels), 4)


def test_prekeys_that_the_last_mail_is_sealed_to_stay_until_it_does_not_come_again(keyed, tmp_path):
    part = next(iter(mix_rows.expected_rows(JobPlan(keyed.jobs["mail"]).round(2)).values())).part
    made = Coordinator(keyed, keyed.jobs["mail"], part, tmp_path)
    own = made.silos[ME]
    # from round 1 on; each is sealed to a prekey that this silo published with the one before
    for number in range(3):
        made.give_all(number)
        for silo in OTHERS:
            prekeys = made.silos[silo].prekeys
            prekeys.save(prekeys.known().heard(*made.word(silo, ME, number)))

    def fetch(numbers):
        opener = mix_rows.IncomingRows(own, own.plan.round(4), TERMS, None)
        told = words_to_wire([made.word(ME, silo, max(numbers)) for silo in OTHERS])
        opener.announced("coordinator", [mail(made, number)[0] for number in numbers], told)
        opener.admit()
        return set(own.prekeys.own())

    assert fetch([1]) == {1, 2, 3}
    assert fetch([1, 2]) == {1, 2, 3}
    assert fetch([1, 2]) == {1, 2, 3}
    assert fetch([2]) == {2, 3}


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda m: [mail(m), mail(m)], "SPEC", "brings a row twice"),
        (lambda m: [mail(m, 1), mail(m)], "POLICY",
            "older uploads of silo-b, silo-c, silo-d, silo-e"),
        (lambda m: [usual(m, own=OWN)], "SPEC", "mail that has a part of its recipient"),
        (lambda m: [mail(m, number) for number in range(4)], "MANIFEST",
            "4 rows of a Mix, at most 3"),
        (lambda m: [mail(m, 2)], "SPEC", "mail of round 3 in 3, after that of -1"),
        (
            lambda m: [
                mail(m),
                m.row(ME, even([*versions(0, OTHERS[:1]), *versions(1, OTHERS[1:])]), keep=0.5),
            ],
            "SPEC",
            "mail over uploads of rounds ",
        ),
        (lambda m: [mail(m), mail_of_round_1(m)], "SPEC", "mail of round 1 in 3, after that of 1"),
        (lambda m: [m.row(ME, unlike(), keep=0.5)], "SPEC",
            "gives 'silo-b' a share of 0.300000, by the"),
        (lambda m: [mail(m, keep=0.4)], "SPEC", "keep = 0.400000 of round 1, by the"),
        (lambda m: [mail(m, keep=0.6)], "SPEC", "counts it is 0.500000 to 0.500000"),
    ],
)  # fmt: skip
def test_mail_that_breaks_a_rule_is_refused(addressee, change, code, said):
    made = addressee.coordinator
    peer, found, why = refusal(addressee, made.delivery(3, change(made)), 3)
    assert (peer, found) == ("coordinator", code)
    assert said in why


# A hostile coordinator.
def shifted(hidden):
    changed = bytearray(hidden)
    changed[8 * 100] ^= 1
    return bytes(changed)


def altered(made, **fields):
    message, hidden = usual(made)
    for field, value in fields.items():
        setattr(message, field, value)
    return message, hidden


def swapped_letters(made):
    message, hidden = usual(made)
    first, second = message.summands[0].letter, message.summands[1].letter
    kept_ = type(first)()
    kept_.CopyFrom(first)
    first.CopyFrom(second)
    second.CopyFrom(kept_)
    return message, hidden


def unsigned(made):
    message, hidden = usual(made)
    message.summands[0].upload.signature = bytes(64)
    return message, hidden


def letters_for_another(made):
    """Each letter is the one for another recipient, where there is one."""
    message, hidden = usual(made)
    for summand, silo in zip(message.summands, OTHERS, strict=True):
        other = next(each for each in OTHERS if each != silo)
        found, _ = made.row(other, even([(silo, 0)]), letters_of=other)
        summand.letter.CopyFrom(found.summands[0].letter)
    return message, hidden


HOSTILE = {
    "a shifted word": (lambda m: usual(m, words=shifted), "SUM", "was altered"),
    "another key's tag": (lambda m: altered(m, tag=bytes(8)), "SUM", "was altered"),
    "a tag that is none": (lambda m: altered(m, tag=b"\xff" * 8), "SUM", "are none"),
    "weights too small": (lambda m: m.row(ME, dict.fromkeys(versions(0), WHOLE // 5)), "SPEC",
        "add up to"),
    "weights too large": (lambda m: m.row(ME, dict.fromkeys(versions(0), WHOLE // 4), OWN), "SPEC",
        "add up to"),
    "fewer than min_cohort": (lambda m: m.row(ME, even(versions(0, OTHERS[:2]))), "POLICY",
        "fewer than"),
    "too concentrated": (
        lambda m: m.row(
            ME, {**even(versions(0, OTHERS[1:]), WHOLE * 3 // 4), (OTHERS[0], 0): WHOLE * 3 // 4}
        ),
        "POLICY",
        "more than half",
    ),
    "of another recipient": (lambda m: m.row(OTHERS[0], even(versions(0, (ME, *OTHERS[1:])))),
        "SPEC", "a row of"),
    "of oneself": (lambda m: m.row(ME, even(versions(0, SILOS))), "SPEC",
        "not distinct other silos"),
    "signed by a silo": (lambda m: usual(m, sign=m.silos[OTHERS[0]].sign), "SPEC", "signature"),
    "in another spelling": (lambda m: usual(m, document=lambda d: b" " + d), "SPEC", "canonical"),
    "letters for another": (letters_for_another, "SHARES", "brings 'silo-a' a letter for"),
    "uploads not named": (lambda m: usual(m, summands=lambda s: s[:-1]), "SPEC", "other uploads"),
    "uploads in another order": (lambda m: usual(m, summands=lambda s: s[::-1]), "SPEC",
        "other uploads than its row names"),
    "letters swapped": (swapped_letters, "SHARES", "is not what"),
    "a signature that does not hold": (unsigned, "UPLOAD", "passed on from 'silo-b'"),
    "keep in a row that is not a mail": (mail, "SPEC", "which is not mail"),
    "keep above one": (lambda m: altered(m, keep=1.5), "SPEC", "keep = 1.5"),
    "keep below zero": (lambda m: altered(m, keep=-0.5), "SPEC", "keep = -0.5"),
    "keep that is not a number": (lambda m: altered(m, keep=float("nan")), "SPEC", "keep = nan"),
    "of another part": (lambda m: altered(m, part="model"), "SPEC",
        "rows of part 'model', which has none"),
    "of no part": (lambda m: altered(m, part=""), "SPEC", "a row of no part"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_row_that_breaks_a_rule_is_refused_and_who_can_have_done_it_is_named(recipient, name):
    change, code, said = HOSTILE[name]
    made = recipient.coordinator
    peer, found, why = refusal(recipient, made.delivery(1, [change(made)]))
    culprit = COORDINATOR_OR_SILO if said == "was altered" else "coordinator"
    assert (peer, found) == (culprit, code), why
    assert said in why


def test_a_silo_that_sealed_no_seed_is_named(keyed, contributors, recipient, monkeypatch):
    """What the coordinator cannot see."""
    made = contributors["rows"]
    monkeypatch.setattr(made, "stored", dict(made.stored))
    own = made.silos[OTHERS[1]]
    known = own.prekeys.known()
    wrong = {**known.newest, ME: known.newest[OTHERS[0]]}  # sealed to a key that is not this silo's
    own.prekeys.save(known.model_copy(update={"newest": wrong}))
    made.contribute(OTHERS[1], 0)
    own.prekeys.save(known)
    peer, code, why = refusal(recipient, recipient.row())
    assert (peer, code) == (OTHERS[1], "SHARES")
    assert "does not open" in why


@pytest.mark.parametrize(
    ("rows_", "manifest", "said"),
    [
        (2, {}, "2 rows of a Mix, at most 1"),
        (1, {"size": 8}, "declared 8 bytes"),
        (1, {"size": 1 << 60}, f"declared {1 << 60} bytes, the tensors and words have 104448"),
        (0, {"size": 1 << 60}, f"declared {1 << 60} bytes, the tensors have 0"),
        (1, {"job": "mail"}, "delivery is of 'mail'"),
        (1, {"offset": 1 << 20}, "begins at byte"),
    ],
)
def test_a_manifest_that_does_not_fit_leaves_no_memory(recipient, rows_, manifest, said):
    made = recipient.coordinator
    peer, found, why = refusal(recipient, made.delivery(1, [usual(made)] * rows_, **manifest))
    assert (peer, found) == ("coordinator", "MANIFEST")
    assert said in why
    assert recipient.memory() == {}


def test_half_a_word_a_row_before_any_and_a_mixed_part_in_the_clear_are_refused(recipient):
    made = recipient.coordinator
    row = usual(made, words=lambda hidden: hidden[:-4])
    assert refusal(recipient, made.delivery(1, [row]))[1] == "MANIFEST"
    frames = made.delivery(1, [row], size=made.line.nbytes)
    assert refusal(recipient, frames)[1] == "LENGTH"
    _, code, why = refusal(recipient, recipient.row(round_=0), 0)
    assert (code, "at most 0" in why) == ("MANIFEST", True)
    made = recipient.coordinator
    frames = made.delivery(1, [], plain={"extractor": made.values(OTHERS[0], 0)})
    _, code, why = refusal(recipient, frames)
    assert (code, "'extractor', which is not in the schema" in why) == ("MANIFEST", True)


def test_rows_where_nobody_opens_them_are_refused(keyed, recipient):
    """As in a job that is not keyed."""
    made = recipient.coordinator
    words = words_to_wire([made.word(ME, *version) for version in versions(0)])
    prekeys = made.delivery(1, [], prekeys=words)
    for number, frames in ((1, recipient.row()), (4, prekeys)):
        why = f"delivers {number} rows or prekeys where there are none"
        with pytest.raises(RefusedError, match=why):
            recipient.delivered(frames, JobPlan(made.job).round(1))


# What was opened is not opened again with other weights.
@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda: even(versions(0), OWN), "new uploads of 0 silos, fewer than min_cohort 3"),
        (lambda: even([*versions(0, OTHERS[:2]), *versions(1, OTHERS[2:])]),
            "new uploads of 2 silos"),
        (lambda: even(versions(0, OTHERS[:3])), "new uploads of 0 silos"),
    ],
)  # fmt: skip
def test_another_row_over_the_same_uploads_is_refused(recipient, second, said):
    made = recipient.coordinator
    recipient.take(recipient.row())
    before = recipient.memory()
    weights = second()
    row = made.row(ME, weights, WHOLE - sum(weights.values()))
    with pytest.raises(RefusedError, match=said) as caught:
        recipient.take(made.delivery(2, [row]), 2)
    assert (caught.value.peer, caught.value.code) == ("coordinator", "POLICY")
    assert recipient.memory() == before


def test_a_row_of_older_uploads_is_refused(recipient):
    made = recipient.coordinator
    recipient.take(recipient.row(2))
    row = made.row(ME, even([*versions(3, OTHERS[:3]), (OTHERS[3], 1)]))
    with pytest.raises(RefusedError, match="older uploads of silo-e"):
        recipient.take(made.delivery(2, [row]), 2)


def test_a_row_that_was_refused_half_way_counts_as_opened(recipient):
    """Its seeds were opened: another row over these uploads is one too many, the same is not."""
    refusal(recipient, recipient.row(words=shifted))
    with pytest.raises(RefusedError, match="new uploads of 0 silos"):
        recipient.take(recipient.row(own=OWN))
    recipient.take(recipient.row())


def test_nothing_is_opened_that_cannot_be_remembered(recipient, monkeypatch):
    opened = []
    real = mix_rows.open_seed
    monkeypatch.setattr(mix_rows, "open_seed", lambda *given: opened.append(1) or real(*given))

    def full(path, data, mode=0o600):
        raise UnwritableError(f"{path}: no space left on device")

    frames = recipient.row()
    with monkeypatch.context() as patched:
        patched.setattr(checked_file, "write_atomic", full)
        with pytest.raises(UnwritableError):
            recipient.take(frames)
    assert opened == []
    recipient.take(frames)
    assert len(opened) == len(OTHERS)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (Terms(min_cohort=5), "fewer than"),
        (Terms(min_cohort=3, min_honest=5), "are sure to be honest, the policy asks for 5"),
        (Terms(min_cohort=3, colluders=4), "1 are sure to be honest"),
    ],
)
def test_a_silo_with_a_stricter_policy_opens_less(keyed, contributors, tmp_path, terms, said):
    strict = Recipient(keyed, contributors["rows"], tmp_path, terms)
    peer, code, why = refusal(strict, strict.row())
    strict.ledger.close()
    assert (peer, code) == ("coordinator", "POLICY")
    assert said in why


def test_a_row_under_another_key_does_not_open(keyed, contributors, tmp_path):
    other = Recipient(keyed, contributors["rows"], tmp_path, key=b"another".ljust(32))
    assert refusal(other, other.row())[:2] == (COORDINATOR_OR_SILO, "SUM")
    other.ledger.close()


def test_memory_that_was_changed_is_told(recipient):
    frames = recipient.row()
    recipient.take(frames)
    path = recipient.folder / "job" / "mix-extractor.rows.json"
    path.write_bytes(path.read_bytes().replace(b":0", b":9"))
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(LocalError, match=r"mix-extractor\.rows\.json"):
        recipient.take(frames)


def test_memory_that_is_gone_opens_no_row(recipient):
    """Else rows over the same uploads with other weights could be opened."""
    made = recipient.coordinator
    recipient.take(recipient.row())
    (recipient.folder / "job" / "mix-extractor.rows.json").unlink()
    with pytest.raises(LocalError, match=r"mix-extractor\.rows\.json: gone, and with it"):
        recipient.take(recipient.row(own=OWN))
    memory, job = recipient.sharing.memory, made.job
    memory.check_begun(job, contributed=False)
    with pytest.raises(LocalError, match=r"mix-extractor\.rows\.json: gone"):
        memory.check_begun(job, contributed=True)
    memory.begin(job)
    memory.check_begun(job, contributed=True)


def test_memory_of_rows_is_begun_once(recipient):
    made = recipient.coordinator
    recipient.take(recipient.row())
    before = recipient.memory()
    recipient.sharing.memory.begin(made.job)
    assert recipient.memory() == before

"""A secure sum's messages, and a whole sum with them, cross protobuf unchanged, in their sizes."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import secure_messages as w
from support.secure_sums import Run, attempt, frame, group, names, ones

from staddle.errors import RefusedError
from staddle.proto import secure_pb2 as pb
from staddle.proto.channel import MAX_MESSAGE_BYTES
from staddle.proto.convert import secagg_received as received
from staddle.proto.convert import secagg_sent
from staddle.proto.convert.secagg_messages import (
    MOST_PROOF_BYTES,
    MOST_SPEC_BYTES,
    misdealing_to_wire,
)
from staddle.proto.convert.secagg_sent import (
    Attempt,
    Over,
    SecaggUpload,
    poll_from_wire,
    poll_to_wire,
    secagg_upload_from_wire,
    secagg_upload_to_wire,
)
from staddle.proto.convert.shape import MOST_GROUPS, MOST_HASHES
from staddle.security.arithmetic.fixedpoint import Group
from staddle.security.faults import Code
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.messages import Abandon
from staddle.security.secagg.spec import MOST_SILOS, RoundSpec, specify
from staddle.silo.egress.session import MAX_CONTROL_BYTES


def carried_up(silo, value):
    return secagg_upload_from_wire(
        silo, pb.SecureUpload.FromString(secagg_upload_to_wire(value).SerializeToString())
    )


def carried_down(value):
    return received.secagg_delivery_from_wire(
        pb.SecureDelivery.FromString(received.secagg_delivery_to_wire(value).SerializeToString())
    )


@settings(max_examples=300)
@given(w.givens)
def test_what_is_given_crosses_unchanged(value):
    assert carried_up(w.contributor(value), value) == value


@settings(max_examples=300)
@given(w.tolds)
def test_what_is_told_crosses_unchanged(value):
    assert carried_down(value) == value


@given(w.askeds)
def test_what_is_asked_crosses_unchanged(value):
    crossed = pb.SecurePoll.FromString(poll_to_wire(value).SerializeToString())
    assert poll_from_wire("a", crossed) == value


def test_nothing_crosses_as_nothing():
    assert carried_down(None) is None


def test_a_silo_may_have_given_up_two_attempts():
    notes = tuple(Abandon("a", bytes([number]) * 64) for number in (1, 2))
    told = received.SecaggDelivery(ATTEMPT_HERE, received.SignedSpec(b"{}", bytes(64), notes))
    assert carried_down(told) == told


def test_every_code_crosses_as_itself_and_there_is_no_other():
    for code in Code:
        assert carried_down(received.SecaggDelivery(ATTEMPT_HERE, Over(code))).body.code == code
    known = {f"SECURE_CODE_{code}" for code in Code}
    assert set(pb.SecureCode.keys()) == {"SECURE_CODE_UNSPECIFIED", *known}


ATTEMPT_HERE = Attempt("j1", bytes(32), 3, 0, bytes(32))


# Sizes.

NS = (4, 10, 100, 1000)


def table(module):
    """Body -> (formula, sizes for NS), as the module's docstring has them."""
    rows = re.findall(r"^    ([a-z]+) +(\d.*?)((?: +\d+){4})$", module.__doc__, re.MULTILINE)
    return {body: (formula, tuple(map(int, sizes.split()))) for body, formula, sizes in rows}


def bound(formula, n, g, d=0, m=None):
    of = {"n": n, "g": g, "d": d, "m": n if m is None else m}
    return eval(formula, {**of, "p": (n - 1).bit_length(), "t": 2 * n // 3 + 1})


def check_sizes(module, to_wire, longest):
    """The longest message of each body has the sizes that the module's docstring names."""
    found = {n: {body: to_wire(m).ByteSize() for body, m in longest(n).items()} for n in NS}
    wanted = {body: sizes for body, (_, sizes) in table(module).items()}
    assert {body: tuple(found[n][body] for n in NS) for body in found[4]} == wanted


def test_the_longest_that_a_silo_gives():
    check_sizes(secagg_sent, secagg_upload_to_wire, w.longest_given)
    assert f"at most {poll_to_wire(w.ASKED).ByteSize()}." in secagg_sent.__doc__


def test_the_longest_that_a_silo_is_told():
    check_sizes(received, received.secagg_delivery_to_wire, w.longest_told)


@pytest.mark.parametrize("n", [2, 3, *NS])
@pytest.mark.parametrize("g", [0, 1, 15, 16, 73, 496, MOST_GROUPS])
def test_the_formulas_hold(n, g):
    up, down = table(secagg_sent), table(received)
    for body, message in w.longest_given(n, g).items():
        size, most = secagg_upload_to_wire(message).ByteSize(), bound(up[body][0], n, g)
        assert most - 10 <= size <= most <= MAX_MESSAGE_BYTES
    for body, message in w.longest_told(n, g).items():
        assert received.secagg_delivery_to_wire(message).ByteSize() <= bound(down[body][0], n, g)
    if n <= 100 or g <= 496:
        assert max(bound(formula, n, g) for formula, _ in down.values()) <= MAX_MESSAGE_BYTES


def test_the_limits_that_the_docstrings_name():
    most = bound(table(received)["survivors"][0], 1000, 496)
    assert most <= MAX_MESSAGE_BYTES < most + 8 * 1000
    assert secagg_upload_to_wire(w.longest_given(4, 73)["header"]).ByteSize() <= MAX_CONTROL_BYTES
    assert secagg_upload_to_wire(w.longest_given(4, 75)["header"]).ByteSize() > MAX_CONTROL_BYTES
    for body in ("complaint", "header", "survival", "abandon", "end"):
        longest = w.longest_given(100)[body]
        assert secagg_upload_to_wire(longest).ByteSize() <= MAX_CONTROL_BYTES


def test_the_longest_specification_with_all_notes_fits():
    most = 2**53 - 1
    sized = {"elements": 2**40, "clip_exponent": -64, "scale_exponent": 126}
    last = Group(name="x" * 128, **sized, weights="public")
    weights = {"weights": "private", "weight_least": most, "weight_most": most}
    private = {**sized, **weights, "ring": 64, "rows": 2**40}
    groups = [Group(name=f"{i:0128}", **private) for i in range(MOST_GROUPS - 1)]
    numbers = ("round", "attempt", "key_epoch", "threshold", "min_cohort", "colluders")
    digests = ("members", "job_digest", "model_digest", "schema_digest", "key_parts")
    rest = {
        **dict.fromkeys(numbers, most),
        **dict.fromkeys(("federation", "job", "purpose", "recipient"), "w" * 64),
        **dict.fromkeys(digests, "a" * 64), "cohort": [f"{i:064}" for i in range(MOST_SILOS)],
        "counts": [most] * MOST_SILOS, "prg": 2, "tagged": False, "chunk_bytes": 1 << 22,
        "exchange": "sum",
    }  # fmt: skip
    spec = RoundSpec(groups=[*groups, last], **rest)
    assert len(spec.signed_bytes()) <= MOST_SPEC_BYTES
    message = w.longest_told(4, document=bytes(MOST_SPEC_BYTES), noted=received.MOST_NOTES)["spec"]
    size = received.secagg_delivery_to_wire(message).ByteSize()
    limit = bound(table(received)["spec"][0], 4, 0, MOST_SPEC_BYTES, received.MOST_NOTES)
    assert size <= limit <= MAX_MESSAGE_BYTES
    assert size + MOST_PROOF_BYTES <= MAX_MESSAGE_BYTES
    assert carried_down(message) == message
    with pytest.raises(ValueError, match="4096"):
        RoundSpec(groups=[*groups, last, last], **rest)


def test_no_more_evidence_is_told_than_fits_and_silos_take_no_more():
    proofs = tuple(w.longest_evidence(100, dealer) for dealer in range(40))
    told = received.SecaggDelivery(ATTEMPT_HERE, received.SignedSpec(b"{}", bytes(64), (), proofs))
    message = received.secagg_delivery_to_wire(told)
    kept = len(message.spec.proofs)
    size = sum(proof.ByteSize() for proof in message.spec.proofs)
    assert size <= MOST_PROOF_BYTES < size + misdealing_to_wire(proofs[kept]).ByteSize()
    assert received.secagg_delivery_from_wire(message).body.proofs == proofs[:kept]
    message.spec.proofs.append(misdealing_to_wire(proofs[kept]))
    with pytest.raises(RefusedError, match="bytes of proofs, at most"):
        received.secagg_delivery_from_wire(message)


def test_a_proof_among_the_most_silos_fits():
    assert 2 ** (MOST_HASHES - 1) < MOST_SILOS <= 2**MOST_HASHES


# A whole sum.


class Wired(Run):
    """A run whose messages cross as bytes; ``crossed`` counts them by body."""

    def __init__(self, *args, **fields):
        self.crossed = {}
        super().__init__(*args, **fields)

    def deliver(self, to, event):
        if to == "coordinator":
            event = self.up(event)
        elif isinstance(event, c.Ask):
            spec = self.down(
                to, received.SignedSpec(event.document, event.signature, tuple(self.notes))
            )
            event = c.Ask((to,), spec.document, spec.signature)
        elif not isinstance(event, s.Streamed):
            event = self.down(to, event)
        super().deliver(to, event)

    def attempt(self):
        spec, digest = self.spec, bytes.fromhex(self.spec.job_digest)
        return Attempt(spec.job, digest, spec.round, spec.attempt, spec.context())

    def up(self, event):
        match event:
            case c.WordsUploaded(header, length, sha256):
                body = self.given_by(header.silo, s.SendHeader(header))
                return c.WordsUploaded(body.header, length, sha256)
            case c.SiloDropped(silo, code):
                return c.SiloDropped(silo, self.given_by(silo, Over(Code(code))).code)
            case c.AttemptDeadline() | c.SumPublished() | c.OpenFailed():
                return event
            case message:
                sent = SecaggUpload(b"s", self.attempt(), message)
                return self.given_by(w.contributor(sent), message)

    def given_by(self, silo, body):
        return self.noted(carried_up(silo, SecaggUpload(b"s", self.attempt(), body))).body

    def down(self, silo, body):
        return self.noted(carried_down(received.SecaggDelivery(self.attempt(), body))).body

    def noted(self, value):
        name = type(value.body).__name__
        self.crossed[name] = self.crossed.get(name, 0) + 1
        return value


STAGES = ["SendKeys", "SendShares", "UploadWords", "SendHeader", "SendSurvival", "SendReveal"]


def seen(run):
    """All that came of a run."""
    opened = run.opened and [(each.total.tolist(), each.weight.tolist()) for each in run.opened]
    sent = [effect for _, effect in run.sent]
    return opened, run.state, run.uploads, run.ends, run.memories, sent


@settings(max_examples=20)
@given(st.data())
def test_a_sum_whose_messages_cross_as_bytes_is_the_same_sum(data):
    n, seed = data.draw(st.integers(4, 7)), data.draw(st.integers(0, 2**32))
    drops = data.draw(
        st.dictionaries(st.sampled_from(names(n)), st.sampled_from(STAGES), max_size=2)
    )
    own = frame(tagged=data.draw(st.booleans()), groups=(group(), group("b", 5, ring=64)))
    values = {silo: [*ones(names(n))[silo], *ones(names(n), 5)[silo]] for silo in names(n)}
    runs = [
        kind(specify(own, names(n), 0), values, own=own, drops=drops, seed=seed).finish()
        for kind in (Run, Wired)
    ]
    assert seen(runs[0]) == seen(runs[1])
    if not drops:
        crossed = runs[1].crossed
        keys = ("SignedSpec", "SendKeys", "KeysReceived", "SendShares", "SharesReceived")
        for name in (*keys, "SendHeader", "SurvivorsReceived"):
            assert crossed[name] == n
        signing = ("SendSurvival", "NotesReceived", "SendReveal", "ResultReceived")
        enough = [crossed[name] for name in signing]
        assert min(enough) >= runs[1].spec.threshold
        assert runs[1].opened[0].total[0] == sum(range(1, n + 1)) / 16


def test_an_attempt_that_is_abandoned_crosses_too_and_its_notes_open_the_next():
    five = names(5)
    lost = dict.fromkeys(five[3:], "SendHeader")
    first = Wired(attempt(5), ones(five), drops=lost).finish()
    assert first.crossed["AbandonAsked"] == first.crossed["SendAbandon"] + len(lost)
    notes = sorted(first.state.notes.values(), key=lambda note: (note.silo, note.signature))
    assert len(notes) == 3 >= first.state.notes_missing
    again = Wired(attempt(5, 1), ones(five), memories=first.memories, notes=notes).finish()
    assert again.opened[0].total[0] == sum(range(1, 6)) / 16

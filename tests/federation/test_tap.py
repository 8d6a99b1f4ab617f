"""Every byte that leaves a silo is explained by its ledger: real processes, and a tap that sees all
of it.
"""

import contextlib
from collections import Counter

import grpc
import pytest
import torch
from support.explained import FETCH, SECURE, UPLOAD, entries, message_bytes, unexplained
from support.tap import Tap

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.exchange.parts import Mix
from staddle.commands.federation import local_federation
from staddle.proto import tensor_pb2 as tensor
from staddle.security.blind.plan import uploaded
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.ledger import audit, messages
from staddle.security.ledger.records import (
    ControlClose,
    ControlOpen,
    Digest,
    Intent,
    OutcomeRecord,
    ProtocolMessage,
)
from staddle.security.secagg.spec import threshold

SILOS = ("north", "east", "south", "west")
KILLED, CUT = "north", "east"
LATE = ("survival", "reveal")  # the coordinator waits for these of as many as it takes, and no more
MIB = 1024 * 1024


def records(seed):
    rng = torch.Generator().manual_seed(seed)
    return Dataset(
        torch.randn(40, 1, 16, 16, generator=rng), torch.randint(0, 10, (40,), generator=rng)
    )


@pytest.fixture
def tapped(start, document):
    """A federation whose silos dial the tap: a job of several parts and two phases, and one with a
    census.
    """
    running = start(*SILOS)
    running.data = {silo: records(seed) for seed, silo in enumerate(SILOS)}
    fields = {"options": {"rho": 0.5}, "model": "convnet-4x128"}
    parts = document("parts", SILOS, "pfedsim", rounds=2, **fields)
    fields = {"options": {"tau_theta": 1}, "participation": 0.75}
    census = document("census", SILOS, "fedsimsup", rounds=2, **fields)
    parts["model"] |= {"input": [1, 16, 16], "norm": "group"}
    census["model"] = {"name": "digits-cnn-a", "classes": 10, "input": [1, 16, 16]}
    for made in (parts, census):
        running.job(made)
    running.start_coordinator(beat_seconds=2)
    with tapping(running) as tap:
        yield running, tap


@contextlib.contextmanager
def tapping(running):
    """A tap before the coordinator, which silos that are started from now on dial."""
    folder = running.federation.folder
    keys = {silo: load_keys(folder / silo / "keys") for silo in running.data}
    coordinator = load_keys(folder / "coordinator" / "keys")
    with Tap(running.address, running.roster, coordinator, keys) as tap:
        running.address = tap.address
        yield tap


def stop_once_idle(running, tap):
    """Silos before the coordinator, which they would look for."""
    silos = list(running.data)
    tap.wait_for(lambda: all(tap.open(silo) == ["/staddle.v1.Federation/Poll"] for silo in silos))
    for silo in silos:
        running.daemons[silo].stop()
    running.stop()


def explained(running, tap, silo):
    """A silo's calls and its ledger, which holds and explains all of them."""
    path = running.federation.state(silo) / "ledger"
    assert audit.verify(path).ok
    ledger, calls = entries(path), tap.calls[silo]
    assert unexplained(calls, ledger, running.roster) == []
    return ledger, calls


def test_the_tap_sees_metadata_and_methods_that_no_schema_has(tmp_path):
    folder = local_federation.make(tmp_path / "federation", SILOS[:2]).folder
    roster, keys = rosters.load(folder / "roster.json"), load_keys(folder / "north" / "keys")
    root = roster.coordinator.certificate.encode()
    own = grpc.ssl_channel_credentials(root, keys.tls_key, keys.entry.certificate.encode())
    name = [("grpc.ssl_target_name_override", "coordinator.staddle")]
    coordinator = load_keys(folder / "coordinator" / "keys")
    with (
        Tap("127.0.0.1:1", roster, coordinator, {"north": keys}) as tap,
        grpc.secure_channel(tap.address, own, name) as channel,
    ):
        told = channel.stream_unary("/other.Service/Tell")
        secret = (("x-secret", "secret"), ("x-bin", b"\x00"))
        with pytest.raises(grpc.RpcError):
            told(iter([b"one", b"two"]), metadata=secret, timeout=20)
        tap.wait_for(lambda: not tap.open("north"))
    (call,) = tap.calls["north"]
    assert (call.method, call.sent[:1], call.cut) == ("/other.Service/Tell", [b"one"], True)
    assert [key for key, _ in call.metadata] == ["user-agent", "x-secret", "x-bin"]


@pytest.mark.timeout(420)
def test_nothing_crosses_that_the_ledger_does_not_explain(tapped):
    running, tap = tapped
    spooled = running.kept / "spool"

    def arrived():
        return any(path.stat().st_size >= MIB for path in spooled.glob(f"{CUT}.*"))

    tap.cut_next_upload(CUT, 3, arrived)  # after the manifest and a chunk
    running.start_silos()
    running.daemons[KILLED].wait_for("leaving", 120)
    running.daemons[KILLED].kill()
    running.daemons[KILLED].stop()
    running.start_silo(KILLED)
    for job in running.jobs:
        while running.daemons["coordinator"].wait_for("job.ended", 200)["job"] != job.name:
            pass
    stop_once_idle(running, tap)
    for silo in SILOS:
        check_sums(running.federation.state(silo) / "ledger", *explained(running, tap, silo))
    check_what_happened(running, tap)


@pytest.mark.timeout(300)
def test_nothing_of_a_blind_job_crosses_that_the_ledger_does_not_explain(start, document):
    running = start(*SILOS)
    security = {"secure_aggregation": "required", "weight_most": 2000, "tags": False}
    fields = {"options": {"models": 2, "lam": 0.0}, "rounds": 2, "min_cohort": 3}
    job = running.job(document("blind", SILOS, "ppfl", security=security, **fields))
    running.start_coordinator(beat_seconds=2)
    with tapping(running) as tap:
        running.start_silos()
        running.completed()
        stop_once_idle(running, tap)
    late = Counter()
    for silo in SILOS:
        ledger, calls = explained(running, tap, silo)
        kinds = kinds_of(ledger)
        assert kinds.keys() <= {"keys", "shares", "header", *LATE}
        assert {kinds[kind] for kind in ("keys", "shares", "header")} == {job.length}
        assert max(kinds[kind] for kind in LATE) <= job.length
        late.update(kind for kind in kinds.elements() if kind in LATE)
        assert sum(call.method == SECURE for call in calls) == kinds.total()
        intents = [entry.record for entry in ledger if isinstance(entry.record, Intent)]
        assert [(intent.form, bool(intent.secagg)) for intent in intents] == [
            ("masked", True)
        ] * job.length
        assert message_bytes(calls) == sum(intent.message.bytes for intent in intents)
    assert all(late[kind] >= threshold(len(SILOS)) * job.length for kind in LATE)


@pytest.mark.timeout(300)
def test_nothing_of_a_keyed_job_crosses_that_the_ledger_does_not_explain(start, document):
    """Padded and rotated parts beside masked words, one of them cut.

    What goes to the key, and rows that come down.
    """
    running = start(*SILOS)
    security = {"secure_aggregation": "required", "weight_most": 2000}
    fields = {"options": {"rho": 0.0}, "rounds": 3, "min_cohort": 3, "security": security}
    job = running.job(document("keyed", SILOS, "pfedsim", **fields))
    running.start_coordinator(beat_seconds=2)
    with tapping(running) as tap:
        tap.cut_next_upload(CUT, 1)  # the manifest
        running.start_silos()
        running.completed(200)
        stop_once_idle(running, tap)
    hidden = Counter(
        "padded" if isinstance(part.exchange, Mix) else "rotated"
        for round_ in range(job.length)
        for part in uploaded(job.up(round_))
    )
    assert set(hidden) == {"padded", "rotated"}
    for silo in SILOS:
        ledger, calls = explained(running, tap, silo)
        check_sums(running.federation.state(silo) / "ledger", ledger, calls)
        kinds = kinds_of(ledger)
        assert (kinds["contribution"], kinds["padded"]) == (1, hidden["padded"])
        forms = Counter(entry.record.form for entry in ledger if isinstance(entry.record, Intent))
        assert forms == hidden + Counter(masked=job.length, padded=silo == CUT)
        deliveries = [
            tensor.Frame.FromString(call.received[0]).manifest
            for call in calls
            if call.method == FETCH
        ]
        assert any(manifest.rows for manifest in deliveries)


def kinds_of(ledger):
    """How many protocol messages of each kind a ledger has."""
    return Counter(e.record.kind for e in ledger if isinstance(e.record, ProtocolMessage))


def check_sums(path, ledger, calls):
    """Payload bytes at the tap are those of the summary.

    Of an upload without END, at most those that it declared.
    """
    small = (messages.CONTROL, messages.PROTOCOL)
    totals = [total for (_, part), total in messages.summary(path).items() if part not in small]
    intents = {entry.seq: entry.record for entry in ledger if isinstance(entry.record, Intent)}
    digests = {entry.seq: entry.record.ref for entry in ledger if isinstance(entry.record, Digest)}
    declared = sum(intent.message.bytes for intent in intents.values())
    ended_bytes = sum(intents[ref].message.bytes for ref in digests.values())
    measured, assumed = (
        sum(getattr(total, name) for total in totals) for name in ("bytes", "assumed")
    )
    assert ended_bytes <= measured <= measured + assumed <= declared
    uploads = [call for call in calls if call.method == UPLOAD]
    ended = {digests[end.ledger_seq] for call in uploads if (end := end_of(call))}
    assert ended >= {
        e.record.ref
        for e in ledger
        if isinstance(e.record, OutcomeRecord) and e.record.status == "sent"
    }
    whole = sum(intents[seq].message.bytes for seq in ended)
    assert message_bytes([call for call in uploads if end_of(call)]) == whole > 0
    assert message_bytes([call for call in uploads if not end_of(call)]) <= declared - whole


def end_of(call):
    """The END frame of an upload; None where it was cut before."""
    last = tensor.Frame.FromString(call.sent[-1]) if call.sent else tensor.Frame()
    return last.end if last.WhichOneof("body") == "end" else None


def check_what_happened(running, tap):
    """The silo was killed with its session open, the upload was cut and went on where it
    was cut.
    """
    ledgers = {silo: entries(running.federation.state(silo) / "ledger") for silo in SILOS}
    sessions = {
        silo: [
            sum(isinstance(e.record, kind) for e in ledger) for kind in (ControlOpen, ControlClose)
        ]
        for silo, ledger in ledgers.items()
    }
    assert sessions[KILLED][0] - sessions[KILLED][1] == 1
    assert all(sessions[silo][0] == sessions[silo][1] for silo in SILOS if silo != KILLED)
    assert sessions[CUT][0] >= 2  # another where an answer came late, on a busy machine
    offsets = [e.record.offset for e in ledgers[CUT] if isinstance(e.record, Intent)]
    assert offsets[:2] == [0, MIB]
    first, second = [call for call in tap.calls[CUT] if call.method == UPLOAD][:2]
    assert (first.cut, end_of(first), second.cut) == (True, None, False)
    intents = [
        entry.record
        for ledger in ledgers.values()
        for entry in ledger
        if isinstance(entry.record, Intent)
    ]
    parts = {(intent.job, t.part) for intent in intents for t in intent.tensors}
    assert parts >= {("parts", part) for part in ("model", "extractor", "rows", "metrics")}
    assert parts >= {("census", part) for part in ("census", "theta", "metrics")}
    methods = {call.method.rpartition("/")[2] for calls in tap.calls.values() for call in calls}
    assert methods >= {"Hello", "Poll", "Answer", "Fetch", "Upload", "Standing"}

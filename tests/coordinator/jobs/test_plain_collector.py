"""What a plain job's rounds take and count, and what it refuses of a blind one's messages."""

from types import SimpleNamespace

import pytest
from support.simulated_jobs import make_job

from staddle.coordinator.jobs.collector import Attachments, StoredUploadFile
from staddle.coordinator.jobs.plain_collector import PlainCollector
from staddle.coordinator.rounds.events import UploadStored
from staddle.errors import RefusedError
from staddle.proto import tensor_pb2 as tensor


def collector(**more):
    job = make_job()
    state = SimpleNamespace(round=1, given={"a": "00"})
    run = SimpleNamespace(job=job, state=state)
    return PlainCollector(SimpleNamespace(**more), run, SimpleNamespace(state=state)), run


def test_an_upload_is_an_event_of_the_job_and_kept_after_a_restart():
    found, _ = collector()
    assert list(found.kept_files) == ["1.a.upload"]
    assert found.needed == ()
    applied = []
    found, run = collector(apply=lambda *args: applied.append(args))
    digests = SimpleNamespace(total=b"\1\2")
    record, committed = object(), object()
    found.take("a", SimpleNamespace(round=1), StoredUploadFile("f", 3, digests, record, committed))
    assert applied == [(run, UploadStored("a", 1, "0102"), record, committed)]


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ({"context": b"\1" * 32}, "masked words, the job is in the clear"),
        ({"part": "extractor"}, "a part 'extractor' by itself"),
    ],
)
def test_what_only_a_blind_job_takes_is_refused(manifest, why):
    found, _ = collector()
    found.check_form("a", tensor.Manifest())
    with pytest.raises(RefusedError, match=why):
        found.check_form("a", tensor.Manifest(**manifest))


def test_there_is_no_sum_to_ask_for():
    found, _ = collector()
    word = SimpleNamespace(upload=SimpleNamespace(version=SimpleNamespace(round=1)))
    for asked in (
        lambda: found.sum_of("a", 1),
        lambda: found.message("a", 1, 0),
        lambda: found.padded("a", word, b""),
    ):
        with pytest.raises(RefusedError) as refused:
            asked()
        assert refused.value.code == "ROUND_CLOSED"


def test_nothing_goes_down_next_to_tensors():
    found, _ = collector()
    coroutine = found.attachments(0, "a")
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    assert ended.value.value == Attachments()

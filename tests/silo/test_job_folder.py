import json
import stat
from hashlib import sha256

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.counted import counts
from support.refusals import refused

from staddle.algorithms.course import SiloState
from staddle.algorithms.leaks.taint import PUBLIC, paid
from staddle.algorithms.training.silo_round import RoundReport
from staddle.errors import LocalError
from staddle.files import tensor_file
from staddle.files.documents import canonical_json, parse_json
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.records import JobAccept, JobDecline
from staddle.security.policy.data_sets import DataSets
from staddle.silo import job_folder
from staddle.silo.job_folder import (
    MOST_REASON,
    JobFolder,
    check_same_records,
    kept_split_key,
    new_split_key,
    split_key,
)
from staddle.silo.parts.contributions import Contributions


def state(value=0.0):
    extractor = {"w": torch.full((2, 3), value), "running": torch.tensor(3)}
    return SiloState({"extractor": extractor}, {"momentum": torch.full((1,), value)})


def payload(value=0.0):
    weight = torch.tensor(1.0, dtype=torch.float64)
    model = {"a.w": torch.full((2,), value), "@weight": weight}
    return {"model": model, "counts": {"n": torch.tensor(4)}}


def same(first, second):
    assert {p: set(v) for p, v in first.items()} == {p: set(v) for p, v in second.items()}
    for part, values in first.items():
        for name, value in values.items():
            assert torch.equal(value, second[part][name])
            assert value.dtype == second[part][name].dtype


def report(round_, loss=0.5):
    return RoundReport(round_, 30, counts(10, 3), counts(10, 4), loss)


@pytest.fixture
def folder(tmp_path):
    made = JobFolder(tmp_path / "jobs" / "j")
    made.accept(b'{"signed":1}', "data")
    return made


def files(folder):
    return sorted(p.name for p in folder.path.iterdir())


def names(*, state=(), outbox=(), counted=True):
    """The files of a job's folder after these rounds."""
    found = (["counted"] if counted else []) + ["dataset", "job.json"]
    found += [f"outbox-{number}.safetensors" for number in outbox]
    return found + [f"state-{number}.safetensors" for number in state]


def train(folder, round_, counted=None, value=0.0):
    """A round that leaves these values, and how many rounds counted before it."""
    given = Contributions(payload(value))
    folder.save_round(round_, round_ if counted is None else counted, state(value), given)


# The job.
def nothing_left(digest):
    return False


def signed_as(text):
    return canonical_json({"document": {"name": "digits", "purpose": text}, "signer": "operator"})


def test_the_signed_job_is_kept_as_it_came(folder):
    assert folder.signed() == b'{"signed":1}'


def test_a_namesake_of_a_job_that_never_began_takes_its_place(folder):
    one, other = signed_as("one"), signed_as("other")
    folder.accept(one, "data")
    folder.fail()
    folder.check_new(other, nothing_left)
    assert folder.signed() == one  # a question changes nothing
    folder.accept(other, "scans")
    assert (folder.signed(), folder.failed) == (other, False)
    folder.check_on("scans")
    folder.check_new(one, nothing_left)


def test_what_a_job_trained_is_no_upload_of_a_namesake(folder):
    """However the other came to its place: its parts may leave in the clear."""
    folder.accept(signed_as("one"), "data")
    train(folder, 0)
    same(folder.outbox(0).tensors, payload())
    folder.accept(signed_as("other"), "data")
    with pytest.raises(LocalError, match=r"outbox-1.*: is of another job of this name"):
        folder.outbox(0)
    # That of an earlier release does not say whose it is.
    path = folder.path / "outbox-1.safetensors"
    tensors, metadata = tensor_file.read(path)
    path.write_bytes(tensor_file.to_bytes(tensors, {"staddle.start": metadata["staddle.start"]}))
    same(folder.outbox(0).tensors, payload())


def test_no_namesake_of_a_job_of_which_anything_left(folder):
    """By the ledger, though the folder was put back as it was before."""
    folder.accept(signed_as("one"), "data")
    digest = sha256(canonical_json(parse_json(signed_as("one"), "job")["document"])).hexdigest()
    with pytest.raises(LocalError, match="another job has this name, and this silo took part"):
        folder.check_new(signed_as("other"), {digest}.__contains__)
    folder.check_new(signed_as("other"), {"ab" * 32}.__contains__)


@pytest.mark.parametrize(
    "name",
    [
        "group.secret", "group.key", "group.ended", "prekeys.json", "mix-model.rows.json",
        "secagg-0.json", "counts.json", "counted", "state-1.safetensors", "outbox-1.safetensors",
        "report.json", "model.safetensors", "anything else",
    ],
)  # fmt: skip
def test_no_namesake_of_a_job_that_left_more_than_its_offer(folder, name):
    folder.accept(signed_as("one"), "data")
    (folder.path / name).write_bytes(b"")
    with pytest.raises(LocalError, match=r"another job has this name|run here before"):
        folder.check_new(signed_as("other"), nothing_left)


def test_a_crash_between_two_namesakes_leaves_neither_on_the_others_data(folder, monkeypatch):
    folder.accept(signed_as("one"), "data")

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job_folder, "write_atomic", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.accept(signed_as("other"), "scans")
    assert folder.signed() is None


def test_a_job_that_was_accepted_and_not_begun_may_be_offered_again(folder, tmp_path):
    folder.check_new(b'{"signed":1}', nothing_left)
    JobFolder(tmp_path / "none").check_new(b'{"signed":1}', nothing_left)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_job_that_was_run_here_is_not_new(folder, rounds):
    folder.save_round(rounds - 1, rounds - 1, state(), Contributions(payload()))
    assert (folder.rounds_done, folder.finished) == (rounds, False)
    with pytest.raises(LocalError, match=f"run here before, {rounds} rounds"):
        folder.check_new(b'{"signed":1}', nothing_left)


def test_a_job_that_ended_here_is_not_new(folder):
    folder.save_values(state())  # the end of a job in which this silo never trained
    assert (folder.rounds_done, folder.finished) == (0, True)
    with pytest.raises(LocalError, match="run here before"):
        folder.check_new(b'{"signed":1}', nothing_left)


def test_a_job_that_was_never_accepted_is_none(tmp_path):
    nowhere = JobFolder(tmp_path / "none")
    assert (nowhere.signed(), nowhere.state(0), nowhere.outbox(0)) == (None, None, None)
    assert nowhere.report() == {"rounds": [], "final": None}
    assert not nowhere.path.exists()


# Rounds.
def test_a_round_leaves_its_state_its_outbox_and_the_state_that_it_began_from(folder):
    counted = 0
    for round_ in (0, 1, 5, 11):
        train(folder, round_, counted, round_)
        began = [counted] if counted else []
        wanted = names(state=[*began, round_ + 1], outbox=[round_ + 1], counted=bool(began))
        assert files(folder) == sorted(wanted)
        counted = folder.rounds_done
        kept = folder.state(counted)
        assert counted == round_ + 1
        same(kept.parts, state(round_).parts)
        assert torch.equal(kept.extra["momentum"], torch.full((1,), float(round_)))
        same(folder.outbox(round_).tensors, payload(round_))


def test_a_round_that_did_not_count_leaves_no_trace(folder):
    train(folder, 0, value=1.0)
    train(folder, 1, value=2.0)  # lost on the way
    same(folder.state(1).parts, state(1.0).parts)
    train(folder, 4, 1, 5.0)  # lost as well
    assert folder.rounds_done == 5
    same(folder.state(1).parts, state(1.0).parts)
    train(folder, 6, 5, 7.0)  # but it did count
    assert files(folder) == names(state=(5, 7), outbox=(7,))
    same(folder.state(5).parts, state(5.0).parts)


def test_a_first_round_that_did_not_count_leaves_the_initial_state(folder):
    train(folder, 0, value=1.0)
    assert folder.state(0) is None
    train(folder, 2, 0, 3.0)
    assert files(folder) == names(state=(3,), outbox=(3,), counted=False)


def test_a_state_that_was_put_back_is_noticed(folder):
    train(folder, 2, 0)
    with refused(r"counts our round 3, .* here is 2: an old state was restored"):
        folder.state(4)


def test_a_coordinator_that_takes_a_count_back_is_noticed(folder):
    for round_ in (0, 1, 2):
        train(folder, round_)
    assert folder.state(2) is not None
    for counted in (1, 0):  # 0 would begin anew, from the initial state
        with refused(rf"counts our rounds up to {counted - 1}, but it counted them up to 1 "):
            folder.state(counted)
    (folder.path / "state-2.safetensors").unlink()
    with refused(r"state-2\.safetensors: missing; .* it counted a later one before"):
        folder.state(2)


def test_only_the_last_round_has_an_outbox(folder):
    train(folder, 3)
    assert [n for n in range(6) if folder.outbox(n) is not None] == [3]
    train(folder, 4)
    assert folder.outbox(3) is None


def test_a_crash_between_outbox_and_state_costs_a_training_and_no_state(folder):
    train(folder, 0, value=1.0)
    before = {p.name: p.read_bytes() for p in folder.path.iterdir()}
    train(folder, 1, value=2.0)
    (folder.path / "state-2.safetensors").unlink()  # as if the crash came before it
    for name in ("state-1.safetensors", "outbox-1.safetensors"):
        (folder.path / name).write_bytes(before[name])
    assert folder.outbox(1) is None
    assert folder.rounds_done == 1
    same(folder.state(1).parts, state(1.0).parts)
    train(folder, 1, value=3.0)
    assert files(folder) == names(state=(1, 2), outbox=(2,))
    same(folder.outbox(1).tensors, payload(3.0))


def test_a_crash_before_the_old_files_go_leaves_the_new_round(folder):
    train(folder, 0, value=1.0)
    before = {p.name: p.read_bytes() for p in folder.path.iterdir()}
    train(folder, 1, value=2.0)
    for name, data in before.items():
        (folder.path / name).write_bytes(data)
    assert folder.rounds_done == 2
    same(folder.outbox(1).tensors, payload(2.0))
    train(folder, 2)
    assert files(folder) == names(state=(2, 3), outbox=(3,))


def test_the_outbox_is_written_before_the_state(folder, monkeypatch):
    written = []
    real = folder.save_round.__globals__["write_atomic"]

    def noting(path, data, *mode):
        written.append(path.name)
        real(path, data, *mode)

    monkeypatch.setitem(folder.save_round.__globals__, "write_atomic", noting)
    train(folder, 0)
    assert written == ["outbox-1.safetensors", "state-1.safetensors"]


def test_rounds_are_counted_as_numbers(folder):
    train(folder, 9)
    newest = (folder.path / "state-10.safetensors").read_bytes()
    (folder.path / "state-9.safetensors").write_bytes(newest)
    assert folder.rounds_done == 10


def test_what_others_put_into_the_folder_is_no_state(folder):
    (folder.path / "state-x.safetensors").write_bytes(b"")
    (folder.path / "state-.safetensors").write_bytes(b"")
    assert folder.rounds_done == 0


@pytest.mark.parametrize(
    ("name", "data", "read", "why"),
    [
        ("state-1.safetensors", "xx", lambda f: f.state(1), r"state-1\.safetensors"),
        ("outbox-1.safetensors", "xx", lambda f: f.outbox(0), r"outbox-1\.safetensors"),
        ("counted", "many", lambda f: f.state(1),
            r"counted: not valid JSON.* restore it from a backup"),
        ("report.json", "[]", lambda f: f.report(), r"report\.json"),
        ("report.json", "nonsense", lambda f: f.report(), r"report\.json"),
        ("report.json", '{"rounds":[],"rounds":[]}', lambda f: f.report(), r"report\.json"),
        ("report.json", "{}", lambda f: f.add_round(report(0), {}), r"report\.json"),
        ("report.json", '{"rounds":[{}],"final":null}', lambda f: f.add_round(report(0), {}),
            r"report\.json"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(folder, name, data, read, why):
    train(folder, 0)
    (folder.path / name).write_text(data)
    with pytest.raises(LocalError, match=why):
        read(folder)


def test_the_outbox_keeps_what_its_tensors_were_computed_from(folder):
    taints = {"model": {"a.w": paid(3, 5), "@weight": paid(3)}, "counts": {"n": PUBLIC}}
    folder.save_round(0, 0, state(), Contributions(payload(), taints))
    assert folder.outbox(0).taints == taints
    train(folder, 1)
    assert folder.outbox(1).taints == {}


def test_the_last_model_is_kept_beside_the_state(folder):
    folder.save_round(0, 0, state(1.0), Contributions(payload()))
    folder.save_values(state(2.0))
    assert "model.safetensors" in files(folder)
    assert folder.rounds_done == 1
    folder.save_round(1, 1, state(3.0), Contributions(payload()))
    assert "model.safetensors" in files(folder)


def test_what_is_kept_is_readable_by_its_owner_alone(folder):
    train(folder, 0)
    folder.save_values(state())
    folder.add_round(report(0), {})
    for path in folder.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# The report.
def test_rounds_add_up_in_the_report(folder):
    facts = {"silo": "a", "classes": [3, 4]}
    for round_ in (0, 2, 3):
        folder.add_round(report(round_), facts)
    found = folder.report()
    assert [entry["round"] for entry in found["rounds"]] == [0, 2, 3]
    sizes = {"samples": 30, "tested": 10, "baseline": 1.0}
    right = {"score_delivered": 0.3, "score_trained": 0.4}
    balanced = {"balanced_delivered": 0.3, "balanced_trained": 0.4}  # all are of one class
    assert found["rounds"][0] == {"round": 0, **sizes, **right, **balanced, "loss": 0.5}
    assert (found["silo"], found["classes"], found["final"]) == ("a", [3, 4], None)


def test_a_round_that_is_trained_again_replaces_its_entry(folder):
    for loss in (0.5, 0.25):
        folder.add_round(report(1, loss), {})
    assert [entry["loss"] for entry in folder.report()["rounds"]] == [0.25]


def test_the_final_evaluation_keeps_the_rounds(folder):
    folder.add_round(report(0), {"silo": "a"})
    folder.finish(report(4, None), {"silo": "a"})
    found = folder.report()
    assert (len(found["rounds"]), found["final"]["round"], found["final"]["loss"]) == (1, 4, None)
    json.loads((folder.path / "report.json").read_text())


# The secret of the split.
def test_the_split_key_is_made_once_and_is_secret(tmp_path):
    key = split_key(tmp_path)
    assert (len(key), split_key(tmp_path)) == (32, key)
    assert (tmp_path / "split.key").read_bytes() == key + sha256(key).digest()
    assert stat.S_IMODE((tmp_path / "split.key").stat().st_mode) == 0o600
    (tmp_path / "other").mkdir()
    assert split_key(tmp_path / "other") != key


def test_a_lost_split_key_is_not_silently_made_anew(folder):
    """Its job's folder says that there was one; with another key training records become tests."""
    silo = folder.path.parent.parent
    with refused("split.key: missing, and this silo has accepted jobs .* Restore it from a backup"):
        split_key(silo)
    assert not (silo / "split.key").exists()
    folder.fail()  # what it trained, it trained
    with refused("staddle silo new-split"):
        kept_split_key(silo)
    key = new_split_key(silo)
    assert key == split_key(silo) == kept_split_key(silo)
    with refused("split.key: exists already"):
        new_split_key(silo)
    assert split_key(silo) == key


def test_a_ledger_alone_says_that_there_was_a_split_key(tmp_path):
    (tmp_path / "ledger").mkdir()
    signer = Ed25519PrivateKey.from_private_bytes(bytes(32))
    with Ledger.open(tmp_path / "ledger", "silo-a", "local", signer) as ledger:
        about = {"job_digest": "ab" * 32, "signer": "operator"}
        ledger.append(JobDecline(job="declined", reasons=("no",), **about))
        assert kept_split_key(tmp_path) is None
        ledger.append(JobAccept(job="accepted", **about))
    with refused("split.key: missing, and this silo has accepted jobs"):
        split_key(tmp_path)


def test_a_split_key_of_an_earlier_release_is_read(tmp_path):
    (tmp_path / "split.key").write_bytes(bytes(range(32)))
    assert split_key(tmp_path) == bytes(range(32))


@pytest.mark.parametrize("size", [0, 31, 33, 63])
def test_a_split_key_of_another_length_is_refused_and_kept(tmp_path, size):
    (tmp_path / "split.key").write_bytes(bytes(size))
    with pytest.raises(LocalError, match=f"{size} bytes, not 64"):
        split_key(tmp_path)
    assert (tmp_path / "split.key").read_bytes() == bytes(size)


def test_a_job_stays_on_the_records_on_which_it_began(folder):
    folder.accept(b'{"signed":1}', "heart")
    folder.check_on("heart")
    with refused("this job began on data set 'heart', and by the configuration .* over to 'scans'"):
        folder.check_on("scans")
    (folder.path / "dataset").unlink()  # of an earlier release
    folder.check_on("scans")


@pytest.mark.parametrize("asked", [None, "risks"])
def test_an_agent_does_not_start_where_a_running_job_would_go_over_to_other_records(folder, asked):
    document = {"name": "j", **({"dataset": asked} if asked else {})}
    folder.accept(json.dumps({"document": document}).encode(), "heart")
    jobs = folder.path.parent
    before = DataSets({"heart": "heart", "risks": "heart"})
    after = DataSets({"scans": "scans", "heart": "heart", "risks": "scans"})
    check_same_records(jobs, before)
    with refused("j: this job began on data set 'heart', .* it would go over to 'scans'"):
        check_same_records(jobs, after)
    if asked:
        with refused("j: this job runs: the job is for data set 'risks', and this silo has heart"):
            check_same_records(jobs, DataSets.one("heart"))
    folder.fail()
    check_same_records(jobs, after)
    (folder.path / "failed").unlink()
    (folder.path / "job.json").write_bytes(b"damaged")  # as its signature shows later
    check_same_records(jobs, after)


def test_why_a_job_ended_is_kept_in_the_coordinators_words_as_far_as_it_may_be_long(tmp_path):
    folder = JobFolder(tmp_path / "job")
    folder.fail("nothing of it was accepted")
    assert not folder.failed
    assert (folder.failure, folder.since) == ("", 0.0)
    folder.accept(b"{}", "data")
    accepted = folder.since
    assert accepted > 0
    assert folder.failure == ""
    folder.fail("withdrawn by an operator" + "é" * 10_000)
    assert folder.failure.startswith("withdrawn by an operator")
    assert len(folder.failure) == MOST_REASON
    assert folder.since >= accepted

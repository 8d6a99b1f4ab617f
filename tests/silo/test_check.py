import asyncio
import datetime as dt
import json
import re
import shutil
import ssl
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.jobs import make_job
from support.ledgers import first, write_privacy_head, write_start, write_stop
from support.private_jobs import dataset, private_job, undrafted
from support.saved_sets import images, label, png, save
from support.signed_federation import job_document
from support.split_keys import fix_split
from support.start_weights import save_start, start_table
from typer.testing import CliRunner

from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.coordinator import config as coordinator_configs
from staddle.coordinator.server import running
from staddle.errors import LocalError
from staddle.proto import federation_pb2 as pb
from staddle.security import preflight
from staddle.security.dp.budget import Budget
from staddle.security.dp.budget_records import MechanismSteps
from staddle.security.identity import certificate
from staddle.security.identity import roster as rosters
from staddle.security.identity.certificate import utc_now
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.log.tree_head import TreeHead
from staddle.silo import config as configs
from staddle.silo import connectivity
from staddle.silo.admission import budget as budgets
from staddle.silo.check import check, footprint
from staddle.silo.egress.session import UnreachableError, open_client
from staddle.silo.job_folder import JobFolder

from .conftest import SILOS, records

NAMES = ["configuration", "keys", "roster", "member", "clock", "policy", "data"]
NAMES += ["split", "ledger", "disk"]
WAY = ["reach", "handshake", "health"]


@pytest.fixture
def federation(tmp_path, made, monkeypatch):
    """A federation that the test may break; its split leaves both sides some records."""
    monkeypatch.setattr("staddle.silo.check.secrets", SimpleNamespace(token_bytes=bytes))
    shutil.copytree(made.files.folder, tmp_path / "local")
    files = local_federation.LocalFederation(tmp_path / "local", SILOS, made.files.founder)
    local_federation.write_silo(files, "silo-a", "127.0.0.1:9", records(), [made.jobs["simple"]])
    return files


@pytest.fixture
def config(federation):
    return federation.silo_config("silo-a")


@pytest.fixture
def look(config):
    """The findings by name that are not ok, but for the way to a coordinator that is not there."""

    def call(*jobs):
        failed = (finding for finding in check(config, jobs).findings if not finding.ok)
        return {each.name: each.text for each in failed if each.name not in WAY}

    return call


def texts_of(*checked):
    return {finding.name: finding.text for finding in check(*checked).findings}


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_all_that_is_as_it_should_be(federation, config):
    report = check(config, [federation.folder / "jobs" / "simple.json"])
    found = {finding.name: finding.text for finding in report.findings if finding.ok}
    assert list(found) == [*NAMES[:-1], "job", "disk"]
    assert "40 records of shape [1, 8, 8], 3 classes, classes not named" in found["data"]
    assert "this silo would accept; about " in found["job"]
    assert found["job"].endswith(" to test on: which ones is drawn at the first start")
    assert not (federation.state("silo-a") / "split.key").exists()
    assert list(federation.state("silo-a").iterdir()) == []  # nothing was changed


def test_a_lost_key_of_the_split_is_said_and_where_its_backup_goes(federation, look, config):
    state, job = federation.state("silo-a"), federation.folder / "jobs" / "simple.json"
    assert "none yet; it is drawn when the first job is offered" in texts_of(config)["split"]
    JobFolder(state / "jobs" / "earlier").accept(b"{}", "data")
    found = look(job)
    assert f"{state / 'split.key'}: missing, and this silo has accepted jobs" in found["split"]
    assert "Restore it from a backup" in found["job"]
    assert not (state / "split.key").exists()
    fix_split(state, "silo-a")
    assert "split.key: holds" in texts_of(config)["split"]


def test_a_gpu_that_is_not_there_is_told(config):
    config.write_text(config.read_text() + '[training]\ndevice = "cuda:9"\n')
    (finding,) = check(config).findings
    assert not finding.ok
    assert "'cuda:9': this machine has" in finding.text


def test_it_says_in_how_many_processes_a_silo_trains(config):
    config.write_text(config.read_text() + '[training]\nlauncher = "torchrun"\nprocesses = 4\n')
    said = next(iter(check(config).findings)).text
    assert said.endswith("trains by torchrun in 4 processes, on cpu")


def test_the_configuration_comes_first(config):
    edit(config, "directory", "directry")
    (finding,) = check(config).findings
    assert not finding.ok
    assert "unknown key 'directry'; did you mean 'directory'?" in finding.text
    edit(config, "directry", "directory")
    edit(config, "127.0.0.1:9", "127.0.0.1")
    assert "is not host:port" in check(config).findings[0].text


def test_keys_that_others_can_read(federation, look):
    key = federation.folder / "silo-a" / "keys" / "log.key"
    key.chmod(0o640)
    found = look(federation.folder / "jobs" / "simple.json")
    assert f"run: chmod 600 {key}" in found["keys"]
    assert found.keys() == {"keys", "member", "job"}
    assert found["member"] == "not tried: first put keys and roster right"


def test_a_roster_of_others_or_without_us(federation, look, config):
    edit(config, '"local"', '"other"')
    found = look()
    assert "roster is of federation 'local', but federation = 'other' in [trust]" in found["roster"]
    assert {"member", "clock"} <= found.keys()
    edit(config, '"other"', '"local"')
    path = federation.folder / "roster.json"
    without = rosters.remove(rosters.load(path), "silo-a")
    rosters.save(rosters.sign(without, load_keys(federation.folder / "founder")), path)
    assert "'silo-a'" in look()["member"]
    assert "is missing in roster version" in look()["member"]


def test_keys_that_are_not_those_of_the_roster(federation, look, config):
    shutil.rmtree(federation.folder / "silo-a" / "keys")
    create_keys(federation.folder / "silo-a" / "keys", "silo-a", Role.SILO, "organisation")
    assert "has other keys in roster" in look()["member"]
    edit(config, 'keys = "keys"', 'keys = "../operator"')
    assert "'operator' is an operator, not a silo; use the keys of a silo" in look()["member"]


def test_a_clock_outside_the_certificates(made):
    year = dt.timedelta(days=365)
    now = dt.datetime.now(dt.UTC)
    assert preflight.clock(made.roster, now)[0]
    slow = (
        r"is 36[45] days, \S+ before the certificate of 'coordinator' begins .*clock first \(NTP\)"
    )
    with pytest.raises(LocalError, match=slow):
        preflight.clock(made.roster, now - year)
    with pytest.raises(LocalError, match=r"days, .* after the certificate of 'coordinator' ended"):
        preflight.clock(made.roster, now + 11 * year)


def test_a_policy_that_is_none_or_empty(federation, look, config):
    path = federation.folder / "silo-a" / "policy.toml"
    edit(path, "max_messages", "max_message")
    assert "did you mean 'max_messages'" in look()["policy"]
    path.write_text(
        path.read_text().partition("[[allow]]")[0].replace("max_message ", "max_messages ")
    )
    findings = {f.name: f for f in check(config).findings}
    assert findings["policy"].ok
    assert "nothing may leave and every job waits for you" in findings["policy"].text
    declined = look(federation.folder / "jobs" / "simple.json")["job"]
    assert "simple.json: this silo would decline the job, POLICY: " in declined
    assert "the policy has no rule for extractor, metrics" in declined
    assert "coordinator:" not in declined  # which has said nothing


def test_a_value_whose_stand_in_a_job_may_declare_is_no_fault(federation, config):
    folder = federation.folder / "silo-a"
    (folder / "p.csv").write_text("age,ca,outcome\n,1,1\n4,,0\n5,,0\n")
    table = 'kind = "csv"\nfile = "p.csv"\nlabel = "outcome"\nfeatures = ["age", "ca"]\n'
    before, _, after = config.read_text().partition("[data]\n")
    config.write_text(f"{before}[data]\n{table}\n" + "".join(after.partition("\n\n")[2:]))
    found = next(finding for finding in check(config).findings if finding.name == "data")
    assert found.ok
    assert "p.csv: 3 records of shape [1, 1, 2], 2 classes" in found.text
    assert "; values are missing: 'ca' 2, 'age' 1. A job whose features say" in found.text
    assert "--job JOB.json says whether one does" in found.text
    # What the table itself fills in is no gap, and any other fault of the file still is one.
    config.write_text(config.read_text().replace('"ca"]\n', '"ca"]\nmissing = { ca = 0.0 }\n'))
    assert "; values are missing: 'age' 1. A job" in look_at(config, "data")
    (folder / "p.csv").write_text("age,ca,outcome\n,1,1\nold,,0\n5,,0\n")
    found = next(finding for finding in check(config).findings if finding.name == "data")
    assert not found.ok
    assert "line 3, column 'age'" in found.text


def test_what_the_values_of_a_label_count_as_is_said(federation, config):
    """Only the silo's people can tell that 'ill' is 'present' and not 'absent'."""
    folder = federation.folder / "silo-a"
    (folder / "p.csv").write_text("age,y\n5,ill\n4,well\n")
    table = 'kind = "csv"\nfile = "p.csv"\nlabel = "y"\nfeatures = ["age"]\n'
    before, _, after = config.read_text().partition("[data]\n")
    rest = "".join(after.partition("\n\n")[2:])
    names = 'classes = ["ill", "well"]\nclass_names = ["absent", "present"]\n'
    config.write_text(f"{before}[data]\n{table}{names}\n{rest}")
    said = "'ill' counts as 'absent', 'well' counts as 'present': correct data.classes if not so"
    assert said in look_at(config, "data")
    (folder / "p.csv").write_text("age,y\n,ill\n4,well\n")
    assert said in look_at(config, "data")
    swapped = 'classes = ["well", "ill"]\nclass_names = ["ill", "well"]\n'
    config.write_text(f"{before}[data]\n{table}{swapped}\n{rest}")
    assert "the same names in another order" in look_at(config, "configuration")


def look_at(config, name):
    """The text of the finding with this name."""
    return next(finding.text for finding in check(config).findings if finding.name == name)


def test_a_folder_of_images_is_looked_at_as_far_as_that_needs_no_job(federation, config):
    folder, before = federation.folder / "silo-a", config.read_text()

    def told(table):
        head, _, after = before.partition("[data]\n")
        config.write_text(f"{head}[data]\n{table}\n" + "".join(after.partition("\n\n")[2:]))
        return next(finding for finding in check(config).findings if finding.name == "data")

    for name, values in (("images", [[5, 6]]), ("masks", [[0, 255]])):
        (folder / "scans" / name).mkdir(parents=True)
        Image.fromarray(np.array(values, np.uint8)).save(folder / "scans" / name / "a.png")
    masks = 'kind = "masks"\nfolder = "scans"\nvalues = {}\n'
    found = told(masks.format([0, 255]))
    assert found.ok
    assert found.text == (
        f"{folder}/scans: 1 images with a mask each, whose classes are 0, 1; --job JOB.json reads"
        " them in the size of a job's model"
    )
    found = told(masks.format([0, 1]))
    assert not found.ok
    assert "masks/a.png: has the value 255, which is not in data.values" in found.text
    found = told('kind = "images"\nfolder = "scans"\n')
    assert found.ok
    assert f"{folder}/scans: 2 files of images, 2 classes; --job JOB.json reads" in found.text

    # A saved data set of Hugging Face needs a job for its images alone.
    held = {"scan": images([png(0), png(1)]), "age": [3, 4], "y": [0, 1]}
    save(folder / "saved" / "train", held, {"y": label("a", "b")})
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    saved = 'kind = "huggingface"\nfolder = "saved"\nsplit = "train"\nlabel = "y"\n'
    found = told(f'{saved}image = "scan"\n')
    assert f"{folder}/saved/train: 2 images of a saved data set; --job JOB.json" in found.text
    found = told(f'{saved}image = "age"\n')
    assert (found.ok, "column 'age': holds int64, not images" in found.text) == (False, True)
    found = told(f'{saved}features = ["age"]\n')
    assert found.text.endswith(
        "saved/train: 2 records of shape [1, 1, 1], 2 classes, classes named"
    )
    found = told(f'{saved.replace("train", "test")}features = ["age"]\n')
    assert "saved: name one of its splits, as split: train" in found.text


def test_what_the_agent_would_not_start_with_is_told(federation, config, look):
    """A budget that would be forgotten, also where the policy has no table any more."""
    further = '\n[datasets.risks]\nrecords_of = "data"\n[datasets.risks.data]\nfile = "data.npz"\n'
    config.write_text(config.read_text() + further)
    assert "policy" not in look()
    folder = JobFolder(federation.state("silo-a") / "jobs" / "running")
    folder.accept(b'{"document":{"name":"running"}}', "scans")
    assert "this job began on data set 'scans'" in look()["policy"]
    folder.accept(b'{"document":{"name":"running"}}', "data")
    keys = load_keys(federation.keys("silo-a"))
    with Ledger.open(federation.state("silo-a") / "ledger", "silo-a", "local", keys.log) as ledger:
        head = TreeHead("staddle.example/local/silo-a/privacy/risks", 3, bytes(32))
        write_privacy_head(ledger, "risks", head, epsilon="7.5", delta="0.00001", limit="8.0")
    assert "data set 'risks' has a budget in the ledger" in look()["policy"]
    # What it advises to look up can be looked up.
    found = {each.dataset: each for each in budgets.read(configs.load(config))}
    assert "epsilon 7.5 of 8.0" in found["risks"].lost


def test_each_data_set_is_looked_at_and_each_budget(federation, made, config, monkeypatch):
    """A job is judged by the records, budget and sums of the data set that it asks for."""
    judged = []
    monkeypatch.setattr(
        "staddle.silo.check.objection_to", lambda *given: judged.append(given[-1].dataset) or ""
    )
    shutil.copy(config.parent / "data.npz", config.parent / "scans.npz")
    further = '\n[datasets.scans.data]\nfile = "scans.npz"\ntest_fraction = 0.5\n'
    config.write_text(config.read_text() + further)
    jobs = [made.job("asked", dataset="scans"), private_job(made, "greedy", dataset="scans")]
    paths = [federation.folder / "jobs" / f"{job.name}.json" for job in jobs]
    for job, path in zip(jobs, paths, strict=True):
        path.write_bytes(made.signed(job.name))
        del made.jobs[job.name]
    drafted = undrafted(
        local_federation.policy_text(jobs).replace("[dataset.scans]", "[dataset.data]")
    )
    rich, poor = dataset(), dataset(epsilon=0.5).replace("dataset.data", "dataset.scans")
    (config.parent / "policy.toml").write_text(drafted + rich + poor)
    signed, greedy = paths
    told = [each.text for each in check(config, [signed]).findings]
    assert [text.split(", ")[0] for text in told if text.startswith("data set")] == [
        "data set 'data'", "data set 'scans'",
        "data set 'data': epsilon = 0 of 8.0 at delta = 0.00001 is spent; jobs that spent: 0",
        "data set 'scans': epsilon = 0 of 0.5 at delta = 0.00001 is spent; jobs that spent: 0",
    ]  # fmt: skip
    (job,) = (text for text in told if "this silo would accept" in text)
    assert "records of data set 'scans' to train on" in job
    assert judged == ["scans"]
    faults = {each.name: each.text for each in check(config, [greedy]).findings if not each.ok}
    assert "greedy.json: this silo would decline the job, POLICY: " in faults["job"]
    assert "its [dataset.scans]" in faults["job"]
    (config.parent / "scans.npz").unlink()
    faults = {each.name: each.text for each in check(config, [signed]).findings if not each.ok}
    assert "scans.npz: no such file" in faults["data"]
    assert "would decline the job, DATA" in faults["job"]


def test_data_and_weights_that_cannot_be_read(federation, look, config):
    (federation.folder / "silo-a" / "data.npz").write_bytes(b"x")
    config.write_text(
        config.read_text() + '[[weights]]\njobs = ["a"]\npart = "supervisor"\nfile = "gone"\n'
    )
    found = look()
    assert "not a .npz file" in found["data"]
    assert "gone: No such file" in found["weights"]


def test_a_ledger_that_holds_and_one_that_does_not(federation, look, config):
    folder = federation.state("silo-a") / "ledger"
    keys = load_keys(federation.keys("silo-a"))
    with Ledger.open(folder, "silo-a", federation.name, keys.log) as ledger:
        write_start(ledger, "staddle", "ab" * 32, "ab" * 32)
    texts = texts_of(config)
    assert ": 1 record holds, " in texts["ledger"]
    with Ledger.open(folder, "silo-a", federation.name, keys.log) as ledger:
        head = write_stop(ledger, "asked to stop")
    texts = texts_of(config)
    assert texts["ledger"].endswith(f"2 records hold, signed up to 2, head 1:{head.leaf}")
    edit(first(folder), '"staddle"', '"stapple"')
    assert "run: staddle ledger verify" in look()["ledger"]


def test_a_disk_without_room_or_rights(federation, look, monkeypatch, config):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30 - 1))
    assert "1024.0 MiB free, 1.0 GiB needed (at least a GiB); make room" in look()["disk"]
    monkeypatch.setattr("staddle.silo.check.footprint", lambda *_: 2**31)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    assert "disk" not in look()
    assert (
        "2.0 GiB needed (the largest of the jobs)"
        in look(federation.folder / "jobs" / "simple.json")["disk"]
    )
    monkeypatch.undo()
    edit(config, 'directory = "state"', 'directory = "silo.toml/state"')
    assert "is not a folder" in look()["disk"]


def test_a_blind_job_of_sketches_takes_room_for_the_whole_vectors():
    of = ("fedaims", {"sampling": "algorithm2"}, {"name": "convnet-digits", "classes": 10})
    clear, blind = (
        make_job(*of, silos=list("abcd"), min_cohort=3, security={"secure_aggregation": way})
        for way in ("off", "required")
    )
    (direction,) = (part for part in blind.up(1) if part.name == "direction")
    (whole,), (sketch,) = direction.given, direction.wire
    more = 2 * (whole.nbytes - sketch.nbytes)  # the outbox, and the one before it
    assert footprint(blind, "a") - footprint(clear, "a") == more > 2 * 8 * 10_000


def test_a_job_that_was_accepted_or_run_here(federation, look, config):
    signed = federation.folder / "jobs" / "simple.json"
    folder = federation.state("silo-a") / "jobs" / "simple"
    folder.mkdir(parents=True)
    fix_split(federation.state("silo-a"), "silo-a")
    (folder / "job.json").write_bytes(signed.read_bytes())
    (folder / "state-2.safetensors").touch()
    texts = texts_of(config, [signed])
    assert "was accepted here, 2 of its rounds are over" in texts["job"]
    (folder / "job.json").write_bytes(b"another")
    assert "another job has this name" in look(signed)["job"]


def test_a_job_that_begins_with_a_file_is_judged_before_and_after_the_download(
    federation, look, config
):
    folder = federation.folder / "jobs"
    save_start(folder / "w.safetensors")
    document = job_document(SILOS, name="begun", model=start_table(classes=3))
    job = local_federation.sign_job(federation, document)
    signed, weights = folder / "begun.json", job.model.weights
    assert "which is not in the policy's weights" in look(signed)["job"]
    local_federation.write_silo(federation, "silo-a", "127.0.0.1:9", records(), [job])
    place = federation.state("silo-a") / "weights" / weights.name
    said = texts_of(config, [signed])["job"]
    assert f"would download the job's file of weights, {preflight.size(weights.size)}, and" in said
    assert said.endswith(f"to check them now, put the file at {place}")
    place.parent.mkdir(parents=True)
    place.write_bytes((folder / "w.safetensors").read_bytes())
    assert "this silo would accept" in texts_of(config, [signed])["job"]


def test_what_is_left_of_a_budget_and_whether_a_private_job_fits(federation, made, config):
    """As the agent would answer: beside what others spent, under the policy as it is now."""
    job = private_job(made, "fits")
    del made.jobs["fits"]
    path = made.files.folder / "jobs" / "fits.json"
    policy = federation.folder / "silo-a" / "policy.toml"
    allowed = undrafted(made.policy(job).text)
    policy.write_text(allowed + dataset())
    found = {finding.name: finding for finding in check(config, [path]).findings}
    assert found["privacy"].text.endswith(
        "epsilon = 0 of 8.0 at delta = 0.00001 is spent; jobs that spent: 0"
    )
    assert "this silo would accept" in found["job"].text
    keys = load_keys(federation.keys("silo-a"))
    folder = federation.state("silo-a") / "privacy" / "data"
    with Budget.open(folder, "data", "local", "silo-a", keys.log, known=False) as budget:
        budget.set_limit("8.0", "0.00001", "ab" * 32)
        budget.reserve(
            "mri", "cd" * 32, 0, "training", [MechanismSteps(sigma="2", q="0.25", steps=40)]
        )
    policy.write_text(allowed + dataset(epsilon=5.0))
    found = {finding.name: finding for finding in check(config, [path]).findings}
    assert re.search(
        r"epsilon = [1-5]\.\d+ of 5\.0 at .* is spent; jobs that spent: 1", found["privacy"].text
    )
    assert not found["job"].ok
    said = (
        r"fits\.json: this silo would decline the job, POLICY: .* all of job 'fits' would bring .*"
        r" limit of 5\.0"
    )
    assert re.search(said, found["job"].text)
    (folder / "checkpoint").unlink()
    (privacy,) = (finding for finding in check(config).findings if finding.name == "privacy")
    assert "is missing; restore the folder" in privacy.text


def served(federation, silo="silo-a"):
    """The last three findings while the coordinator runs."""

    async def run():
        local_federation.write_coordinator(federation, [], {})
        async with running(coordinator_configs.load(federation.coordinator_config)) as address:
            path = federation.silo_config(silo)
            config = path.read_text().splitlines()
            path.write_text(
                "\n".join(
                    f'coordinator = "{address}"' if "coordinator =" in c else c for c in config
                )
            )
            return (await asyncio.to_thread(check, path)).findings[-3:]

    return asyncio.run(run())


def test_the_way_to_a_coordinator_that_runs(federation):
    findings = served(federation)
    assert [(finding.name, finding.ok) for finding in findings] == [(name, True) for name in WAY]
    assert "it takes our certificate" in findings[1].text
    assert findings[2].text == "coordinator serves"


def test_a_coordinator_that_does_not_know_our_key_ends_the_handshake(federation, config):
    """The silo's roster has its new key, the coordinator's still the old one."""
    old = (federation.folder / "roster.json").read_bytes()
    shutil.rmtree(federation.folder / "silo-a" / "keys")
    entry = create_keys(federation.folder / "silo-a" / "keys", "silo-a", Role.SILO, "organisation")
    roster = rosters.add(rosters.load(federation.folder / "roster.json"), entry, replace=True)
    rosters.save(
        rosters.sign(roster, load_keys(federation.folder / "founder")),
        federation.folder / "new.json",
    )
    edit(config, "../roster.json", "../new.json")
    assert (federation.folder / "roster.json").read_bytes() == old
    reach, handshake, health = served(federation)
    assert reach.ok
    assert "its roster may not have our key, perhaps because we were removed" in handshake.text
    assert health.text == "not tried: first put the handshake right"


def of_a_fast_clock(federation, member, role, monkeypatch):
    """Make a member's keys anew where the clock is 30 days ahead, and sign the roster with them."""
    later = utc_now() + dt.timedelta(days=30)
    folder = federation.folder / member / "keys"
    shutil.rmtree(folder)
    with monkeypatch.context() as patched:
        patched.setattr(certificate, "utc_now", lambda: later)
        entry = create_keys(folder, member, role, "organisation")
    path = federation.folder / "roster.json"
    roster = rosters.add(rosters.load(path), entry, replace=True)
    rosters.save(rosters.sign(roster, load_keys(federation.folder / "founder")), path)


def greeted(federation):
    """What an agent logs when its greeting fails in the handshake."""

    async def run():
        async with running(coordinator_configs.load(federation.coordinator_config)) as address:
            roster = rosters.load(federation.folder / "roster.json")
            client = open_client(address, load_keys(federation.keys("silo-a")), roster)
            with pytest.raises(UnreachableError) as caught:
                await client.hello(pb.HelloRequest(silo="silo-a"))
            await client.close()
            return str(caught.value)

    return asyncio.run(run())


def test_a_clock_before_the_coordinators_certificate_is_no_other_certificate(
    federation, monkeypatch, caplog
):
    """The roster's certificate fails too: who answers there is not the first question."""
    of_a_fast_clock(federation, "coordinator", Role.COORDINATOR, monkeypatch)
    said = "29 days, "
    (_, handshake, _), greeting = served(federation), greeted(federation)
    assert f"which is {said}" in handshake.text
    assert "Check this clock first (NTP)" in handshake.text
    assert "find out who answers" not in handshake.text
    told = [each.fields["why"] for each in caplog.records if each.message == "clock.wrong"]
    assert len(told) == 2
    assert said in told[0]
    assert re.search("may have failed: this machine's clock says .* of 'coordinator'", greeting)


def test_a_coordinator_whose_clock_is_slow_is_asked_for_it_first(federation, monkeypatch):
    of_a_fast_clock(federation, "silo-a", Role.SILO, monkeypatch)
    _, handshake, _ = served(federation)
    assert "ended the handshake. Our certificate is good from 20" in handshake.text
    assert "first check that the coordinator's clock says the same (NTP)" in handshake.text
    # Our own clock was set back since: the agent says that.
    assert re.search(
        "may have failed: this machine's clock says .* of 'silo-a' begins", greeted(federation)
    )


def test_what_may_be_wrong_with_a_handshake_begins_with_the_roster_and_the_clocks(made):
    own, coordinator = made.roster["silo-a"], made.roster.coordinator
    said = connectivity.handshake_hint(own, coordinator, 7)
    assert re.match(
        r"perhaps its roster no longer has this silo, whose key is SHA256:.*: ask a founder\. Or a"
        r" clock is wrong \(our certificate is good from 20.* to 20.* UTC\), or our roster, version"
        " 7, has another certificate of coordinator",
        said,
    )


def test_somebody_else_who_answers_is_no_coordinator(federation, config):
    create_keys(federation.folder / "other", "coordinator", Role.COORDINATOR, "somebody")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        federation.folder / "other" / "tls.crt", federation.folder / "other" / "tls.key"
    )

    async def run():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        edit(config, "127.0.0.1:9", f"127.0.0.1:{port}")
        async with server:
            return (await asyncio.to_thread(check, config)).findings[-3:]

    _, handshake, health = asyncio.run(run())
    assert "shows another certificate than the roster has" in handshake.text
    assert not health.ok


def test_nothing_listens_or_no_such_host(config):
    texts = [finding.text for finding in check(config).findings[-3:]]
    assert "Connection refused; does the coordinator run" in texts[0]
    assert texts[1:] == ["not tried: first put reach right"] * 2
    edit(config, "127.0.0.1:9", "nowhere.invalid:9")
    assert "no host has the name" in check(config).findings[-3].text


def test_the_command_numbers_its_lines_and_ends_with_1(config):
    result = CliRunner().invoke(app, ["silo", "check", "--config", str(config)])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith(" 1  ok    configuration")
    assert any(line.startswith("11  FAIL  reach ") for line in lines)
    assert lines[-1] == "3 of 13 failed"
    result = CliRunner().invoke(app, ["silo", "check", "--json", "--config", str(config)])
    document = json.loads(result.output)
    assert (result.exit_code, document["ok"]) == (1, False)
    assert [finding["name"] for finding in document["findings"]] == NAMES + WAY


def test_records_of_several_inputs_are_told_by_input(config):
    table = 'kind = "package"\nname = "wards"\noptions = { count = 40 }\n'
    edit(config, 'file = "data.npz"\n', table)
    said = texts_of(config)["data"]
    assert "40 records of shape image [1, 8, 8], labs [3], note [5], 4 classes" in said

from pathlib import Path

import pytest

from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.errors import LocalError

FOUNDER = "SHA256:" + "A" * 43
HEAD = """
version = 1
listen = "127.0.0.1:7443"
directory = "state"
keys = "keys"
roster = "../roster.json"
jobs = ["jobs/a.json", "/abs/b.json"]
"""
TRUST = f"""
[trust]
federation = "lung"
founders = ["{FOUNDER}"]
threshold = 1
"""
TEXT = HEAD + TRUST


@pytest.fixture
def load(tmp_path):
    def read(text):
        (tmp_path / "coordinator.toml").write_text(text)
        return configs.load(tmp_path / "coordinator.toml")

    return read


def test_paths_are_relative_to_the_file(load, tmp_path):
    config = load(TEXT)
    assert (config.directory, config.keys) == (tmp_path / "state", tmp_path / "keys")
    assert config.roster == tmp_path / "../roster.json"
    assert config.jobs == (tmp_path / "jobs/a.json", Path("/abs/b.json"))


def test_what_is_left_out_has_its_default_and_the_limit_of_a_job_is_a_size(load):
    config = load(TEXT.replace('jobs = ["jobs/a.json", "/abs/b.json"]\n', ""))
    assert (config.jobs, config.log) == ((), "text")
    assert config.timing == configs.Timing(admission_seconds=3600, beat_seconds=5, hold_seconds=20)
    assert config.trust.threshold == 1
    assert config.limits.max_job_bytes is None
    assert load(TEXT + '[limits]\nmax_job_bytes = "3GiB"\n').limits.max_job_bytes == 3 * 2**30
    assert config.packages == ()
    named = load(TEXT.replace("version = 1\n", 'version = 1\npackages = ["lung", "Lung.Nets"]\n'))
    assert named.packages == ("lung", "Lung.Nets")
    for bad in ('"3 gigs"', "-1", "1.5"):
        with pytest.raises(LocalError, match=r"limits\.max_job_bytes = "):
            load(TEXT + f"[limits]\nmax_job_bytes = {bad}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + 'rooster = "x"\n' + TRUST, "unknown key 'rooster'; did you mean 'roster'?"),
        (TEXT + "[timings]\n", "unknown key 'timings'; did you mean 'timing'?"),
        (TEXT + "[timing]\nbeat_secs = 3\n",
            "unknown key 'timing.beat_secs'; did you mean 'beat_seconds'?"),
        (TEXT + 'founder = "x"\n', "did you mean 'founders'?"),
        (TEXT.replace("version = 1\n", ""), "missing key 'version'"),
        (TEXT.replace('listen = "127.0.0.1:7443"\n', ""), "missing key 'listen'"),
        (HEAD, "missing key 'trust'"),
        (TEXT.replace("threshold = 1\n", ""), "missing key 'trust.threshold'"),
        (TEXT.replace("version = 1", "version = 2"), "version = 2"),
        (TEXT.replace(":7443", ""), "listen = '127.0.0.1'"),
        (TEXT.replace(":7443", ":"), "listen"),
        (TEXT.replace(":7443", ":65536"), "listen = '127.0.0.1:65536'"),
        (TEXT.replace("127.0.0.1", "a b"), "listen"),
        (TEXT + "[timing]\nbeat_seconds = 0\n", "timing.beat_seconds = 0"),
        (TEXT + "[timing]\nhold_seconds = 301\n", "timing.hold_seconds = 301"),
        (TEXT + "[timing]\nadmission_seconds = 0\n", "timing.admission_seconds = 0"),
        (TEXT + "[timing]\nadmission_seconds = nan\n", "timing.admission_seconds = nan"),
        (TEXT + '[metrics]\nlisten = "0.0.0.0:9464"\n',
            "metrics: listen = '0.0.0.0:9464' is not on loopback"),
        (TEXT + "[metrics]\n", "missing key 'metrics.listen'"),
        (TEXT.replace(FOUNDER, "SHA256:short"), "trust.founders.0 = 'SHA256:short'"),
        (TEXT.replace(f'"{FOUNDER}"', ""), "trust.founders"),
        (HEAD + 'log = "xml"\n' + TRUST, "log = 'xml'"),
        (HEAD + 'packages = ["a/b"]\n' + TRUST, "packages.0 = 'a/b'"),
        ("version = ", "not valid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(load, text, said):
    with pytest.raises(LocalError) as caught:
        load(text)
    assert said in str(caught.value)
    assert "coordinator.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LocalError, match=r"nowhere\.toml"):
        configs.load(tmp_path / "nowhere.toml")


def test_a_local_federation_writes_what_this_reads(tmp_path):
    federation = local_federation.make(tmp_path / "f", ["a", "b"])
    local_federation.write_coordinator(federation, ["one"], {"beat_seconds": 1})
    config = configs.load(federation.coordinator_config)
    assert config.roster.resolve() == federation.folder.resolve() / "roster.json"
    assert config.jobs[0].resolve() == federation.folder.resolve() / "jobs/one.json"
    assert (config.keys / "tls.key").exists()
    assert config.timing.beat_seconds == 1

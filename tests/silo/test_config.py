import re
import textwrap
from pathlib import Path

import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.data.sources.formats.images import Images
from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.commands.federation import local_federation
from staddle.errors import LocalError
from staddle.proto.channel import checked_address
from staddle.security.policy.data_sets import DataSets
from staddle.silo import config as configs

FOUNDER = "SHA256:" + "A" * 43
HEAD = """
version = 1
coordinator = "federation.example:7443"
directory = "state"
keys = "keys"
roster = "../roster.json"
policy = "policy.toml"
"""
TRUST = f"""
[trust]
federation = "lung"
founders = ["{FOUNDER}"]
threshold = 1
"""
DATA = """
[data]
file = "records/data.npz"
"""
TEXT = HEAD + TRUST + DATA


@pytest.fixture
def load(tmp_path):
    def read(text):
        (tmp_path / "silo.toml").write_text(text)
        return configs.load(tmp_path / "silo.toml")

    return read


def test_paths_are_relative_to_the_file(load, tmp_path):
    config = load(TEXT)
    assert (config.directory, config.keys) == (tmp_path / "state", tmp_path / "keys")
    assert config.roster == tmp_path / "../roster.json"
    assert config.policy == tmp_path / "policy.toml"
    assert config.data == Npz(file=tmp_path / "records/data.npz")
    images = load(HEAD + TRUST + '[data]\nkind = "images"\nfolder = "scans"\n')
    assert images.data == Images(kind="images", folder=tmp_path / "scans")


def test_what_is_left_out_has_its_default(load):
    config = load(TEXT)
    assert (config.log, config.data.test_fraction, config.training.threads) == ("text", 0.25, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + 'polcy = "x"\n' + TRUST + DATA, "unknown key 'polcy'; did you mean 'policy'?"),
        (TEXT + "[trainin]\n", "unknown key 'trainin'; did you mean 'training'?"),
        (TEXT + 'kind = "cvs"\n',
            "data: kind = 'cvs': no such kind; did you mean 'csv'? known: npz, images, masks,"),
        (TEXT + 'folder = "x"\n',
            ("data: 'folder' is a key of kind images or masks or listed or huggingface or"
            " torchvision or tiny-imagenet or natural or package, this is")),
        (TEXT + 'kind = "images"\n',
            "data: 'file' is a key of kind npz or listed or csv or parquet or sql or package,"),
        (TEXT + 'kind = "csv"\nlabel = "y"\nfeature = ["x"]\n',
            "unknown key 'data.feature'; did you mean 'features'?"),
        (TEXT + 'kind = "csv"\nlabel = "y"\n', "missing key 'data.features'"),
        (TEXT + "test_fractions = 0.5\n",
            "unknown key 'data.test_fractions'; did you mean 'test_fraction'?"),
        (HEAD.replace('policy = "policy.toml"\n', "") + TRUST + DATA, "missing key 'policy'"),
        (HEAD + TRUST, "missing key 'data'"),
        (HEAD + TRUST + "[data]\n", "missing key 'data.file'"),
        (HEAD + DATA, "missing key 'trust'"),
        (TEXT + "test_fraction = 1\n", "data.test_fraction = 1"),
        (TEXT + "test_fraction = 0\n", "data.test_fraction = 0"),
        (TEXT + "test_fraction = nan\n", "data.test_fraction = nan"),
        (TEXT + "[training]\nthreads = 0\n", "training.threads = 0"),
        (TEXT + '[training]\ndevice = "tpu"\n', "training.device = 'tpu'"),
        (TEXT + '[metrics]\nlisten = "10.1.1.1:1"\n',
            "metrics: listen = '10.1.1.1:1' is not on loopback"),
        (TEXT.replace("version = 1", "version = 3"), "version = 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(load, text, said):
    with pytest.raises(LocalError) as caught:
        load(text)
    assert said in str(caught.value)
    assert "silo.toml" in str(caught.value)


FURTHER = """
[datasets.scans.data]
kind = "images"
folder = "scans"

[datasets.risks]
records_of = "heart"

[datasets.risks.data]
file = "records/data.npz"
test_fraction = 0.5
"""


def test_further_data_sets_have_names_and_records(load, tmp_path):
    config = load('dataset = "heart"\n' + TEXT + FURTHER)
    assert list(config.sources) == ["heart", "scans", "risks"]
    assert config.sources["scans"].folder == tmp_path / "scans"
    assert config.sources["risks"] == Npz(file=tmp_path / "records/data.npz", test_fraction=0.5)
    names = config.names
    assert names.own == ("heart", "scans")
    assert [names.of(name) for name in (None, "heart", "scans", "risks")] == [
        "heart", "heart", "scans", "heart",
    ]  # fmt: skip
    with refused("is for data set 'data', and this silo has heart, scans, risks; add"):
        names.of("data")
    assert load(TEXT).names == DataSets.one()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('dataset = "heart"', 'dataset = "scans"', "[datasets.scans] has the name of [data]"),
        ('records_of = "heart"', 'records_of = "hart"', "[datasets.risks] has records_of = 'hart'"),
        ('records_of = "heart"', 'records_of = "risks"', "as data set 'heart' does; add"),
        # of a data set that has none of its own
        (
            "[datasets.scans.data]",
            '[datasets.scans]\nrecords_of = "risks"\n[datasets.scans.data]',
            "[datasets.scans] has records_of = 'risks'; name a data set here that has",
        ),
        ('records_of = "heart"\n', "", "as data set 'heart' does; add records_of = \"heart\""),
        (
            'records_of = "heart"',
            'records_of = "scans"',
            "as data set 'heart' does; add",
        ),
        ("[datasets.risks", "[datasets.Risks", "datasets"),
        ('kind = "images"', 'kind = "image"', "datasets.scans.data: kind = 'image': no such kind"),
    ],
)
def test_data_sets_are_told_apart(load, old, new, said):
    text = 'dataset = "heart"\n' + TEXT + FURTHER
    assert old in text
    with pytest.raises(LocalError) as caught:
        load(text.replace(old, new))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "file", ["records/data.npz", "records/../records/data.npz", "{base}/records/data.npz", "linked"]
)
def test_one_file_under_two_names_is_one_data_set(load, tmp_path, file):
    (tmp_path / "linked").symlink_to(tmp_path / "records/data.npz")
    given = f'file = "{file.format(base=tmp_path)}"'
    table = f"[datasets.risks.data]\n{given}\n"
    with refused(r"data\.npz: \[datasets\.risks\] reads it, as data set 'data' does"):
        load(TEXT + table)
    assert load(TEXT + f'[datasets.risks]\nrecords_of = "data"\n{table}').names.own == ("data",)


@pytest.mark.parametrize(
    "kind", ['kind = "csv"\nlabel = "y"\nfeatures = ["x"]', 'kind = "package"\nname = "own"']
)
def test_one_file_of_two_kinds_is_one_data_set(load, kind):
    with refused("reads it, as data set 'data' does"):
        load(TEXT + f'[datasets.other.data]\nfile = "records/data.npz"\n{kind}\n')


def test_a_path_that_leads_nowhere_is_told_when_it_is_looked_for(load, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for file in ("loop", "a\\u0000b"):
        config = load(HEAD + TRUST + f'[data]\nfile = "{file}"\n')
        with refused("no such file"):
            config.data.check_present()


def test_sets_by_name_may_lie_in_one_folder(load):
    folder = 'kind = "torchvision"\nfolder = "sets"\nname = '
    text = HEAD + TRUST + f'[data]\n{folder}"MNIST"\n[datasets.other.data]\n{folder}'
    assert load(text + '"CIFAR10"\n').names.own == ("data", "other")
    with refused("as data set 'data' does"):
        load(text + '"MNIST"\n')


OPERATE = Path(__file__).parents[2] / "docs" / "operate.md"


@pytest.mark.skipif(not OPERATE.exists(), reason="the documentation is not in the wheel")
def test_the_example_of_the_documentation_has_three_data_sets(load):
    section = OPERATE.read_text().partition("\n### Several data sets")[2]
    blocks = re.findall(r"(?:^    .*\n|^\n)+", section, re.MULTILINE)
    example = next(block for block in blocks if "[datasets." in block)
    name, _, tables = textwrap.dedent(example).partition("\n[data]\n")
    config = load(name + HEAD + TRUST + "\n[data]\n" + tables)
    assert list(config.sources) == ["heart", "scans", "heart-survival"]
    assert config.names.own == ("heart", "scans")


def test_weights_are_of_a_data_set_that_there_is(load):
    text = '[[weights]]\njobs = ["a"]\npart = "supervisor"\nfile = "x"\ndataset = "{}"\n'
    assert load(TEXT + text.format("data")).weights[0].dataset == "data"
    with refused(r"\[\[weights\]\] has dataset = 'dta', and the data sets here are data"):
        load(TEXT + text.format("dta"))


def test_a_local_federation_writes_what_this_reads(made, tmp_path):
    files = local_federation.make(tmp_path / "f", ["silo-a", "silo-b"])
    job = made.jobs["simple"]
    data = Dataset(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    local_federation.write_silo(files, "silo-a", "127.0.0.1:1", data, [job])
    config = configs.load(files.silo_config("silo-a"))
    for path in (config.keys, config.roster, config.policy, config.data.file, config.directory):
        assert path.exists()


@pytest.mark.parametrize("address", ["federation.example:7443", "127.0.0.1:1", "[::1]:65535"])
def test_an_address_is_a_host_and_a_port(address):
    assert checked_address(address) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:1x", "host: 1"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(LocalError, match="host:port"):
        checked_address(address)


def test_a_port_in_superscript_is_refused():
    with pytest.raises(LocalError):
        checked_address("host:²")


LAUNCHED = {
    'command = ["srun", "{order}"]': 'command and launcher = "command" go together',
    'launcher = "command"': 'command and launcher = "command" go together',
    'launcher = "command"\ncommand = ["srun", "train"]': "command has no {order}",
    'environment = ["SLURM_CONF"]': "environment is for trainer processes",
    'launcher = "process"\nprocesses = 2': 'processes are those of launcher = "torchrun"',
    'launcher = "torchrun"\nprocesses = 0': "training.processes = 0",
    'launcher = "torchrun"\nshard = true': "shard = true shares weights out",
    'launcher = "process"\nshard = true': "shard = true shares weights out",
    "jobs = 2": "jobs = 2 trains in processes of each job at a time",
    "jobs = 5": "training.jobs = 5",
    'gpus = ["0"]': "gpus has 1 entries",
    'gpus = ["0"]\njobs = 2\nlauncher = "process"': "gpus has 1 entries",
    'gpus = ["0 1"]\nlauncher = "process"': "training.gpus",
    'launcher = "slurm"': "training.launcher = 'slurm'",
}


@pytest.mark.parametrize("lines", LAUNCHED)
def test_launchers_that_contradict_themselves_are_refused(load, lines):
    with refused(re.escape(LAUNCHED[lines])):
        load(f"{TEXT}[training]\n{lines}\n")


@pytest.mark.parametrize(
    "lines",
    ['launcher = "torchrun"\nprocesses = 2', 'launcher = "command"\ncommand = ["srun", "{order}"]'],
)
def test_several_processes_can_share_weights_out(load, lines):
    assert load(f"{TEXT}[training]\n{lines}\nshard = true\n").training.shard


def test_orders_are_in_the_silos_own_folder(load):
    config = load(TEXT + '[training]\nlauncher = "process"\n')
    assert config.training.orders == config.directory / "orders"

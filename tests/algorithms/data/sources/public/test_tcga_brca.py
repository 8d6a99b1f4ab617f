import csv

import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.sources.public.tcga_brca import FEATURES, read_brca

PATIENTS = [  # pid, age, E, T
    ("TCGA-AA-1", 58, 1.0, 1095.0),  # died on the last day
    ("TCGA-AA-2", 71, 0.0, 1095.0),  # last seen alive that day: unknown
    ("TCGA-BB-3", 45, 0.0, 1096.0),
    ("TCGA-BB-4", 58, 1.0, 3000.0),  # died later
    ("TCGA-CC-5", 58, 1.0, 10.0),  # of the rest of the world
]
CENTERS = (
    "TSS Code,Source Site,Country,State,Region\n"
    "AA,x,Italy,Other,Europe\nBB,y,USA,WA,West\nCC,z,Brazil,Other,Other\n"
)


@pytest.fixture
def folder(tmp_path):
    with (tmp_path / "brca.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pid", *FEATURES, "E", "T"])
        for pid, age, died, days in PATIENTS:
            writer.writerow([pid, age, *([0, 1] * 19), died, days])
    (tmp_path / "centers.csv").write_text(CENTERS)
    return tmp_path


def test_who_died_in_time_who_lived_and_who_is_left_out(folder):
    data = read_brca(folder, 3)
    assert data.ids == ("TCGA-AA-1", "TCGA-BB-3", "TCGA-BB-4")
    assert (data.y.tolist(), data.class_names) == ([1, 0, 0], ("alive", "dead"))
    assert data.sources == ("Europe", "West", "West")
    assert torch.equal(
        data.x[:, 0, 0], torch.tensor([[age, *[0, 1] * 19] for age in (0, -1, 0)]).float()
    )
    assert read_brca(folder, 2).y.tolist() == [0, 0, 0, 0]
    later = read_brca(folder, 10)
    assert (later.ids, later.y.tolist()) == (("TCGA-AA-1", "TCGA-BB-4"), [1, 1])


def test_without_years_all_patients_of_the_regions_are_there_with_time_and_event(folder):
    unseen = ("TCGA-BB-6", 50, 0.0, 0.0)  # never seen again: no time
    with (folder / "brca.csv").open("a", newline="") as file:
        csv.writer(file).writerow([*unseen[:2], *([0, 1] * 19), *unseen[2:]])
    data = read_brca(folder, None)
    assert data.ids == ("TCGA-AA-1", "TCGA-AA-2", "TCGA-BB-3", "TCGA-BB-4")
    assert data.y.tolist() == [[1095, 1], [1095, 0], [1096, 0], [3000, 1]]
    assert (data.y.dtype, data.class_names) == (torch.float32, None)
    assert data.sources == ("Europe", "Europe", "West", "West")
    assert data.x.shape == (4, 1, 1, 39)


def test_what_is_absent_or_unknown_is_named(folder):
    (folder / "centers.csv").write_text(CENTERS.replace("BB,", "DD,"))
    with refused(r"brca\.csv, record 3: centers\.csv has no region for its pid"):
        read_brca(folder, 3)
    (folder / "centers.csv").write_text("code,region\nAA,Europe\n")
    with refused(r"centers\.csv: no table with columns 'TSS Code' and 'Region'"):
        read_brca(folder, 3)
    (folder / "centers.csv").unlink()
    with refused(r"centers\.csv: no such file; put FLamby's"):
        read_brca(folder, 3)

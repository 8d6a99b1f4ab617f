import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.sources.public.heart_disease import read_heart

FULL = "63.0,1.0,4.0,150.0,299.0,1.0,2.0,127.0,1.0,2.2,3.0,2.0,7.0,0\n"
GAPS = "45,0,1,?,?,?,?,?,?,?,?,?,?,1\n"


def put(folder, hospital, text):
    (folder / f"processed.{hospital}.data").write_text(text)


def test_numbers_codes_and_missing_values(tmp_path):
    put(tmp_path, "va", FULL + GAPS + FULL.replace("150.0", "0").replace("299.0", "0"))
    put(tmp_path, "cleveland", FULL)
    data = read_heart(tmp_path, ["va", "cleveland"])
    assert data.x.shape == (4, 1, 1, 22)
    full = [1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, -1, 1, 1, 0, 0, 1, 2, 0, 0, 1]
    assert torch.allclose(data.x[0, 0, 0], torch.tensor(full, dtype=torch.float32))
    gaps = [-1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0]
    assert torch.allclose(data.x[1, 0, 0], torch.tensor(gaps, dtype=torch.float32))
    zeros = [*full[:6], 0, 0, *full[8:]]  # no blood pressure and no cholesterol is 0
    assert torch.allclose(data.x[2, 0, 0], torch.tensor(zeros, dtype=torch.float32))
    assert (data.y.tolist(), data.class_names) == ([0, 1, 0, 0], ("absent", "present"))
    assert data.ids == ("va/0", "va/1", "va/2", "cleveland/0")
    assert data.sources == ("va", "va", "va", "cleveland")


def test_a_hospital_needs_its_own_file(tmp_path):
    put(tmp_path, "va", FULL)
    assert len(read_heart(tmp_path, ["va"])) == 1
    with refused(r"processed\.hungarian\.data: no such file; put processed\.hungarian\.data of"):
        read_heart(tmp_path, ["va", "hungarian"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FULL.replace(",0\n", ",5\n"), "column 'num': holds a label outside 0 … 4"),
        (FULL.replace(",4.0,", ",5.0,"), r"column 'cp': holds none of the codes \(1, 2, 3, 4\)"),
        (FULL.replace("63.0", "?"), "line 1, column 'age': is missing"),
        (FULL.replace("299.0", "high"), "line 1, column 'chol': is not a number"),
    ],
)
def test_what_is_wrong_is_named_without_its_value(tmp_path, text, said):
    put(tmp_path, "va", text)
    with refused(said):
        read_heart(tmp_path, ["va"])

import pytest
from faults import table

from staddle.errors import LocalError


@pytest.fixture
def falling(monkeypatch):
    """A row that falls with every other seed, in a table of its own."""

    def make(folder, draw):
        assert not list(folder.iterdir())
        if draw.random() < 0.5:
            raise LocalError("it fell")

    made = table.Row("odd", "edges", "a coin", "heads", make, (0,))
    monkeypatch.setattr(table, "ROWS", {**table.rows(), "odd": made})


def test_each_row_of_an_area_is_tried_and_the_table_says_so(program, capsys):
    assert program.main(["--hours", "0", "--area", "foreign_records", "--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "seed 3", "| area | tried | held | fell |", "|---|---|---|---|",
        "| foreign_records | 1 | 1 | 0 |", "| all | 1 | 1 | 0 |",
    ]  # fmt: skip


def test_what_fell_is_counted_and_can_be_repeated(program, falling, capsys):
    assert program.main(["--hours", "0.0002", "--area", "edges", "--seed", "1"]) == 1
    *said, edges, _ = capsys.readouterr().out.splitlines()
    falls = [line for line in said if line.startswith("fell: ")]
    tried, held, fell = [int(cell) for cell in edges.strip("| ").split(" | ")[1:]]
    assert tried == held + fell > fell == len(falls) > 0
    again = falls[0].partition(": ")[2].partition(": ")[0].split()
    assert again[:2] == ["--row", "odd"]
    assert program.main(again) == 1
    assert capsys.readouterr().out == "a coin: LocalError: it fell\n"


@pytest.mark.parametrize(
    "wrong", ["", "--row odd", "--hours 1 --row odd", "--area x --hours 0", "--row x --seed 0"]
)
def test_what_cannot_be_done_is_said(program, capsys, wrong):
    with pytest.raises(SystemExit) as caught:
        program.main(wrong.split())
    assert caught.value.code not in (0, None)

"""Records of a database: those of a statement, read as a table of texts, and what goes wrong."""

import sqlite3
import sys
from contextlib import closing

import pydantic
import pytest
from sqlalchemy import create_engine
from support.refusals import refused

from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.algorithms.data.sources.formats.sql import Sql
from staddle.errors import LocalError

ROWS = [("p1", 63, "f", 27.5, "B", "2003-11-27"), ("p2", 41, "m", None, "A", "1999-01-31")]
TABLE = {
    "features": ["age", "sex", "bmi", "seen"],
    "label": "outcome",
    "classes": ["A", "B"],
    "id": "id",
    "categories": {"sex": ["f", "m"]},
    "missing": {"bmi": 25.0},
    "dates": {"seen": "%Y-%m-%d"},
}


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "clinic.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE visits (id, age, sex, bmi, outcome, seen)")
        connection.executemany("INSERT INTO visits VALUES (?, ?, ?, ?, ?, ?)", ROWS)
    return path


@pytest.fixture
def table(tmp_path, database):
    def call(statement="SELECT * FROM visits ORDER BY id", **fields):
        (tmp_path / "visits.sql").write_text(statement)
        given = {"file": tmp_path / "visits.sql", "database": f"sqlite:///{database}"}
        return Sql(kind="sql", **{**TABLE, **given, **fields})

    return call


def test_records_are_those_of_a_csv_file(table, tmp_path):
    lines = ["id,age,sex,bmi,outcome,seen"]
    lines += [",".join("" if cell is None else str(cell) for cell in row) for row in ROWS]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    own, other = table().read(), Csv(kind="csv", file=tmp_path / "visits.csv", **TABLE).read()
    assert own.x.tolist() == other.x.tolist()
    assert own.y.tolist() == [1, 0]
    assert (own.ids, own.class_names, own.features) == (("p1", "p2"), ("A", "B"), other.features)


def test_many_rows_are_read_a_few_at_a_time(table, database):
    with closing(sqlite3.connect(database)) as connection, connection:
        rows = [(f"q{n}", n, "f", 20.0, "A", "2000-01-01") for n in range(9_000)]
        connection.executemany("INSERT INTO visits VALUES (?, ?, ?, ?, ?, ?)", rows)
    read = table("SELECT * FROM visits WHERE id LIKE 'q%' ORDER BY age").read()
    assert read.x[:, 0, 0, 0].tolist() == list(range(9_000))


def test_nothing_is_kept_of_what_a_statement_changes(table, database):
    with pytest.raises(LocalError):
        table("DELETE FROM visits").read()
    with closing(sqlite3.connect(database)) as connection, connection:
        assert connection.execute("SELECT count(*) FROM visits").fetchone() == (2,)


def test_errors_name_row_and_column_and_no_value(table):
    statement = "SELECT id, 'secret' AS age, sex, bmi, outcome, seen FROM visits"
    with pytest.raises(LocalError) as caught:
        table(statement).read()
    assert "visits.sql, record 1, column 'age': is not a number" in str(caught.value)
    assert "secret" not in str(caught.value)
    with refused("has no column 'sex'; its columns: id, age"):
        table("SELECT id, age FROM visits").read()


@pytest.mark.parametrize(
    ("statement", "fields", "error"),
    [
        ("SELECT * FROM vists", {}, "visits.sql: the database says: no such table: vists"),
        ("SELEC 1", {}, "visits.sql: the database says: near"),
        ("SELECT 1", {"database": "nowhere"}, "visits.sql: the database says: "),
        ("SELECT 1", {"database": "nosql://host/db"}, "visits.sql: the database says: "),
        ("SELECT 1", {"database": "mysql+pymysql://host/db"}, "install the database's driver"),
        ("SELECT 1", {"database": "mysql://me:hidden@host/db"}, "data.database holds a password"),
        ("SELECT 1", {"password": "STADDLE_NONE"}, "no environment variable STADDLE_NONE; set it"),
        ("UPDATE visits SET age = 1", {}, "gives no rows"),
    ],
)
def test_what_is_wrong_is_told(table, statement, fields, error):
    with pytest.raises(LocalError) as caught:
        table(statement, **fields).read()
    assert error in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_password_comes_from_the_environment(table, monkeypatch):
    """Sqlite heeds none, so the address is looked at."""
    seen = []
    monkeypatch.setenv("CLINIC_PASSWORD", "pass/word")
    monkeypatch.setattr(
        "sqlalchemy.create_engine",
        lambda url, **options: seen.append(url) or create_engine("sqlite://", **options),
    )
    with refused("no such table"):
        table(database="postgresql://reader@db/clinic", password="CLINIC_PASSWORD").read()
    assert seen[0].password == "pass/word"
    assert "pass" not in str(seen[0])


def test_ids_are_needed_and_the_library_too(table, monkeypatch, tmp_path):
    with pytest.raises(pydantic.ValidationError, match="id: name the column of the records' ids"):
        table(id=None)
    missing = table()
    (tmp_path / "visits.sql").write_bytes(b"SELECT '\xff'")
    with refused("visits.sql: is not UTF-8"):
        missing.read()
    (tmp_path / "visits.sql").unlink()
    with refused("visits.sql: cannot read it: No such file"):
        missing.read()
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with refused(r"databases are read by SQLAlchemy; pip install 'staddle\[sql\]'"):
        missing.read()

"""Tabular records of a database, by a statement in a file.

::

    SELECT patient, age, sex, outcome FROM visits WHERE year >= 2015

SQLAlchemy reads them. Nothing that the statement changes is kept: its transaction is never
committed.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pydantic

from .....errors import LocalError, reason
from .....files.file_bounds import open_regular
from ...rows import AT_ONCE, Rows, as_text
from .table import Table

MOST_STATEMENT = 2**20  # bytes


class Sql(Table):
    """``kind = "sql"``; it needs SQLAlchemy, which ``staddle[sql]`` installs, and a driver."""

    kind: Literal["sql"]
    file: Path
    database: str
    """SQLAlchemy's URL, without a password."""
    password: str | None = None
    """The environment variable that has the password."""

    @pydantic.model_validator(mode="after")
    def _identified(self) -> "Sql":
        # By its place a record would change sides whenever the order is another.
        if self.id is None:
            raise ValueError("id: name the column of the records' ids, since rows have no order")
        return self

    @contextmanager
    def rows(self) -> Iterator[Rows]:
        """The records, after the names of the columns as record 0."""
        try:
            import sqlalchemy  # noqa: PLC0415 - installed for those who have databases
            from sqlalchemy import exc  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise LocalError(
                f"{self.file}: databases are read by SQLAlchemy; pip install 'staddle[sql]'"
            ) from error
        try:
            with open_regular(self.file) as opened:
                statement = sqlalchemy.text(opened.read(MOST_STATEMENT).decode())
            engine = sqlalchemy.create_engine(self._url(), hide_parameters=True)
            with ExitStack() as ended, engine.connect() as connection:
                ended.callback(engine.dispose)
                # Not all rows at once, which may be more than the memory holds.
                streamed = connection.execution_options(yield_per=AT_ONCE)
                found = streamed.execute(statement)
                if not found.returns_rows:
                    raise LocalError(f"{self.file}: gives no rows; write a SELECT")
                yield _rows_of(list(found.keys()), found)
        except OSError as error:
            raise LocalError(f"{self.file}: cannot read it: {reason(error)}") from error
        except UnicodeDecodeError:
            raise LocalError(f"{self.file}: is not UTF-8; save it as UTF-8") from None
        except ModuleNotFoundError as error:
            raise LocalError(f"data.database: {error}; install the database's driver") from error
        # These are of the connection and the statement; other texts may have a value.
        except (exc.OperationalError, exc.ProgrammingError, exc.ArgumentError) as error:
            why = str(getattr(error, "orig", error)).partition("\n")[0]
            raise LocalError(f"{self.file}: the database says: {why}; correct it") from None
        except exc.SQLAlchemyError as error:
            raise LocalError(
                f"{self.file}: {type(error).__name__}; try the statement by hand"
            ) from None

    def _url(self) -> Any:
        from sqlalchemy import make_url  # noqa: PLC0415

        url = make_url(self.database)
        if url.password is not None:
            raise LocalError(
                "data.database holds a password; take it out, and name the environment variable"
                " that has it in data.password"
            )
        if self.password is None:
            return url
        if (secret := os.environ.get(self.password)) is None:
            raise LocalError(f"data.password: no environment variable {self.password}; set it")
        return url.set(password=secret)


def _rows_of(names: list[str], found: Iterable[Sequence[Any]]) -> Rows:
    yield 0, names
    for number, row in enumerate(found, 1):
        yield number, list(map(as_text, row))

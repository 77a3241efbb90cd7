"""SQL statements that are compiled once, and whose values are passed to the driver unconverted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sql

Row = Mapping[str, Any]


class Statement:
    """A compiled statement for one dialect. Its columns hold only what drivers take unconverted: texts and numbers.

    SQLAlchemy would look up the statement, and the conversion of each value, at every call: a third of the time of a
    transaction with a few rows.

    Args:
        statement: Of SQLAlchemy; every value that it takes has a name.
        dialect: Of the database.
    """

    def __init__(self, statement: Any, dialect: sql.Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        self._text = str(compiled)
        self._order: Sequence[str] | None = compiled.positiontup

    def run(self, connection: sql.Connection, row: Row) -> int:
        """Execute it for one row; return the number of rows that changed."""
        return connection.exec_driver_sql(self._text, self._given(row)).rowcount

    def run_many(self, connection: sql.Connection, rows: Sequence[Row]) -> None:
        """Execute it once for each row."""
        if rows:
            connection.exec_driver_sql(self._text, [self._given(row) for row in rows])

    def _given(self, row: Row) -> Any:
        return dict(row) if self._order is None else tuple(row[name] for name in self._order)

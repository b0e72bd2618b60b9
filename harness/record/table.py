"""Base class of tables, and the conversion of rows from and to arrow.

A table is a frozen dataclass whose fields are columns, described by their docstrings. Unknown
values are null, never guesses.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from harness.cell.redaction import redacted

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Int32 = Annotated[int, "int32"]
Int64 = Annotated[int, "int64"]
Rec = TypeVar("Rec", bound="Record")
_NAMES = {float: "double", str: "string", bool: "bool", datetime: "timestamp"}


@dataclass(frozen=True)
class Column:
    name: str
    type: str
    """Arrow type, e.g. `int32` or `list<double>`."""
    nullable: bool
    default: object
    """Value that replaces a null; dataclasses.MISSING if required."""

    @property
    def is_list(self) -> bool:
        return self.type.startswith("list")

    @property
    def is_integer(self) -> bool:
        return self.type.startswith("int")


@dataclass(frozen=True)
class Record:
    @classmethod
    @functools.cache
    def columns(cls) -> tuple[Column, ...]:
        """Returns the table's columns: those of its class, then those it inherits."""
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = sorted(
            dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__
        )
        return tuple(
            Column(field.name, *_column_type(hints[field.name]), field.default) for field in fields
        )

    @classmethod
    def from_row(cls: type[Rec], row: Mapping[str, Any]) -> Rec:
        """Builds a row from a mapping. Nulls (None, NaN, NaT) become the column's default; raises
        ValueError if it has none."""
        import pandas as pd

        by_column: dict[str, object] = {}
        for column in cls.columns():
            value = row.get(column.name)
            present = pd.api.types.is_list_like(value) or bool(pd.notna(value))
            by_column[column.name] = _value(column, value, present)
        return cls(**by_column)

    @classmethod
    def from_frame(cls: type[Rec], frame: pd.DataFrame) -> list[Rec]:
        """Builds rows like `from_row`, but column by column: rows one by one would take ten times
        as long."""
        values = [_values(column, frame) for column in cls.columns()]
        names = [column.name for column in cls.columns()]
        return [cls(**dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]


def _column_type(hint: Any) -> tuple[str, bool]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return _column_type(inner)[0], True
    if typing.get_origin(hint) is Annotated:
        return hint.__metadata__[0], False
    if typing.get_origin(hint) is tuple:
        return f"list<{_column_type(typing.get_args(hint)[0])[0]}>", False
    return _NAMES[hint], False


def _values(column: Column, frame: pd.DataFrame) -> list[object]:
    if column.name not in frame.columns:
        return [_value(column, None, False) for _ in range(len(frame))]
    values = frame[column.name]
    present = values.notna().tolist()
    return [_value(column, v, k) for v, k in zip(values.tolist(), present, strict=True)]


def _value(column: Column, value: object, present: bool) -> object:
    """Converts a value to the column's Python type. Undoes pandas' floats for integers and arrays
    for lists."""
    if present:
        return _CONVERTED[column.type](value)
    if column.default is dataclasses.MISSING:
        raise ValueError(f"column {column.name!r} is null or missing")
    return column.default


def _items(values: Any) -> tuple[object, ...]:
    return tuple(values.tolist() if hasattr(values, "tolist") else values)


_CONVERTED: dict[str, Callable[[Any], object]] = {
    "int32": int,
    "int64": int,
    "double": float,
    "string": str,
    "bool": bool,
    "timestamp": lambda time: time.to_pydatetime() if hasattr(time, "to_pydatetime") else time,
    **dict.fromkeys(("list<string>", "list<int64>", "list<double>"), _items),
}


def arrow_schema_of(table: type[Record]) -> pa.Schema:
    import pyarrow as pa

    arrow = {
        "int32": pa.int32(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "string": pa.string(),
        "bool": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
    arrow |= {f"list<{name}>": pa.list_(kind) for name, kind in arrow.items()}
    return pa.schema(
        [pa.field(c.name, arrow[c.type], nullable=c.nullable) for c in table.columns()]
    )


def arrow_table(rows: Sequence[Record], schema: pa.Schema) -> pa.Table:
    """Converts rows to arrow, redacting secrets."""
    import pyarrow as pa

    return pa.Table.from_pylist([_without_secrets(vars(row)) for row in rows], schema=schema)


_NEVER_REDACTED = {"run_id", "cell_id", "status", "phase", "parity_verdict", "strategy", "device"}
"""Columns that only hold the suite's names, by which rows are found."""


def _without_secrets(row: Mapping[str, object]) -> dict[str, object]:
    values = dict(row)
    for name, value in row.items():
        if isinstance(value, str) and name not in _NEVER_REDACTED:
            values[name] = redacted(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], str):
            values[name] = tuple(redacted(text) for text in value)
    return values

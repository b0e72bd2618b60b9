"""Descriptions of a table's columns, for the documents."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterable

from harness.record.table import Record


def meanings(table: type[Record]) -> dict[str, str]:
    """Returns the description of each column: the docstring under its field."""
    by_column: dict[str, str] = {}
    for cls in reversed(table.__mro__):
        if dataclasses.is_dataclass(cls):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            assert isinstance(body, ast.ClassDef)
            by_column |= _field_docstrings(body.body)
    return {column.name: by_column.get(column.name, "") for column in table.columns()}


def _field_docstrings(body: Iterable[ast.stmt]) -> dict[str, str]:
    by_column, name = {}, ""
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=str(field))):
                name = field
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                by_column[name] = " ".join(text.split())
                name = ""
            case _:
                name = ""
    return by_column

"""Checks that modules and functions are short: `.venv/bin/python -m scripts.sizes`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULE_LINES = {"bench": 600, "harness": 600, "reports": 600, "scripts": 600, "tests": 500}
FUNCTION_LINES = 60


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields each function's name and number of lines, without decorators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def findings(root: Path = ROOT) -> Iterator[str]:
    for folder, most in MODULE_LINES.items():
        for file in sorted((root / folder).rglob("*.py")):
            name, text = str(file.relative_to(root)), file.read_text()
            if (count := len(text.splitlines())) > most:
                yield f"{name}: {count} lines, {most} at most"
            for function, lines in () if folder == "tests" else functions(ast.parse(text)):
                if lines > FUNCTION_LINES:
                    yield f"{name}: {function}: {lines} lines, {FUNCTION_LINES} at most"


def main() -> int:
    found = list(findings())
    for finding in found:
        print(finding)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

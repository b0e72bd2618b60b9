"""Checks that modules and functions are short: `.venv/bin/python -m scripts.sizes`.

`.venv/bin/python -m scripts.sizes --figures` prints the size of the whole project instead.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
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


def figures(files: list[Path]) -> tuple[int, int, int, int]:
    """Returns the numbers of files, lines, lines that hold code, and classes."""
    texts = [file.read_text() for file in files]
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return (
        len(files),
        sum(len(text.splitlines()) for text in texts),
        sum(len(code_lines(text)) for text in texts),
        sum(isinstance(node, ast.ClassDef) for node in nodes),
    )


def code_lines(text: str) -> set[int]:
    """Returns the numbers of the lines that hold a token of code. A string that is a statement of
    its own, such as a docstring, is no code."""
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (*blank, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def print_figures(root: Path = ROOT) -> None:
    """Prints the size of the product, of its folders, of the tests and of the studies' scripts."""
    product = ("bench", "harness", "reports", "scripts")
    subfolders = [path for name in product for path in sorted((root / name).glob("*/"))]
    rows: dict[str, list[Path]] = {
        "without tests": [file for name in product for file in sorted((root / name).rglob("*.py"))],
        **{name: sorted((root / name).rglob("*.py")) for name in (*product, "tests")},
        "docs/studies": sorted((root / "docs" / "studies").rglob("*.py")),
        **{str(path.relative_to(root)): sorted(path.rglob("*.py")) for path in subfolders},
    }
    print(f"{'':<22}{'files':>6}{'lines':>8}{'code':>8}{'classes':>9}")
    for name, files in rows.items():
        if files:
            count, lines, code, classes = figures(files)
            print(f"{name:<22}{count:>6}{lines:>8,}{code:>8,}{classes:>9}")


def main() -> int:
    if "--figures" in sys.argv[1:]:
        print_figures()
        return 0
    found = list(findings())
    for finding in found:
        print(finding)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""What a reader of the code may rely on: what is imported, short files and lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "harness", "reports")


def test_reading_a_report_loads_neither_torch_nor_the_launcher() -> None:
    code = """
import sys
import reports, reports.runs, reports.overview, reports.markdown_report, reports.export_records
loaded = [name for name in sys.modules if name.split(".")[0] == "torch"]
runs = ("launch", "worker", "run", "nodes", "strategy", "strategies", "workloads", "measure")
loaded += [name for name in sys.modules if name.split(".")[:2] in [["harness", x] for x in runs]]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_test_file_is_long() -> None:
    files = Path(__file__).parents[1].rglob("*.py")
    assert not [str(file) for file in files if len(file.read_text().splitlines()) > 500]


def lines_by_file(*folders: str) -> dict[str, list[str]]:
    """The lines of each Python file in these folders, by its path."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    return {str(file.relative_to(ROOT)): file.read_text().splitlines() for file in files}


def test_files_are_short() -> None:
    lengths = {file: len(lines) for file, lines in lines_by_file(*PACKAGES).items()}
    assert {file: length for file, length in lengths.items() if length > 600} == {}
    of_tests = {file: len(lines) for file, lines in lines_by_file("tests").items()}
    assert {file: length for file, length in of_tests.items() if length > 500} == {}


def test_lines_are_at_most_100_columns_wide() -> None:
    """Comments for the type checker included, which the linter excuses."""
    wide = [
        f"{file}:{number}"
        for file, lines in lines_by_file(*PACKAGES, "tests", "scripts").items()
        for number, line in enumerate(lines, 1)
        if len(line) > 100
    ]
    assert wide == []


def test_any_stands_for_what_a_library_gives_untyped() -> None:
    """Counted outside of import lines."""
    count = sum(
        len(re.findall(r"\bAny\b", line))
        for lines in lines_by_file(*PACKAGES).values()
        for line in lines
        if not re.match(r"\s*(from\b.*\bimport|import)\b", line)
    )
    assert count <= 150

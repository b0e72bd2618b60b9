"""Rules for the code: light imports, and short files, functions and lines."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from scripts import sizes

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "harness", "reports")


def test_reading_a_report_loads_neither_torch_nor_the_launcher() -> None:
    code = """
import sys
import reports, reports.runs, reports.site, reports.run_sections, reports.export_records
loaded = [name for name in sys.modules if name.split(".")[0] == "torch"]
runs = ("launch", "worker", "run", "nodes", "strategy", "strategies", "workloads", "measure")
loaded += [name for name in sys.modules if name.split(".")[:2] in [["harness", x] for x in runs]]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def lines_by_file(*folders: str) -> dict[str, list[str]]:
    """Returns the lines of each Python file in these folders, by path."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    return {str(file.relative_to(ROOT)): file.read_text().splitlines() for file in files}


def test_modules_and_functions_are_short() -> None:
    assert list(sizes.findings()) == []


def test_a_long_module_and_a_long_function_are_found(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    body = "    pass\n" * sizes.FUNCTION_LINES
    (tmp_path / "bench" / "a.py").write_text(f"class A:\n  def long(self):\n{body}")
    (tmp_path / "bench" / "b.py").write_text("\n" * 601)
    found = [text.split(":")[0] for text in sizes.findings(tmp_path) if "remove" not in text]
    assert [Path(name).stem for name in found] == ["a", "b"]


def test_any_is_rare() -> None:
    """Import lines do not count."""
    count = sum(
        len(re.findall(r"\bAny\b", line))
        for lines in lines_by_file(*PACKAGES).values()
        for line in lines
        if not re.match(r"\s*(from\b.*\bimport|import)\b", line)
    )
    assert count <= 150


def depends_on_speed(call: ast.Call) -> bool:
    """Returns whether a call interrupts its test after some seconds, or sets its own time limit."""
    name = ast.unparse(call.func)
    if name == "pytest.mark.timeout":
        return False
    timeouts = [word.value for word in call.keywords if word.arg == "timeout"]
    limits = [value.value for value in timeouts if isinstance(value, ast.Constant)]
    stops = name == "threading.Timer" and "os.getpid()" in ast.unparse(call)
    return stops or any(limit >= 20 for limit in limits)


def test_no_test_depends_on_the_speed_of_the_machine() -> None:
    """Tests interrupt themselves at an event, and wait `waiting.LONG` for what must happen."""
    places = [
        f"{name}:{node.lineno}"
        for name, lines in lines_by_file("tests").items()
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.Call) and depends_on_speed(node)
    ]
    assert [place for place in places if "benchmarks" not in place] == []

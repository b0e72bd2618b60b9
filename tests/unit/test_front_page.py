"""The README and the guides agree with what commands print, and with what has been recorded."""

from __future__ import annotations

import inspect
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import bench
from bench.cli import COMMANDS, terminal
from harness.analysis import compare, history, stats
from harness.launch import watch
from harness.measure import memory_kinds, step_breakdown
from harness.planner.cluster.recipe import STATES
from harness.run import expected
from harness.run.runner import ProgressListener
from harness.seam.registry import strategies
from harness.worker import rank_profile
from reports.run_report import ran
from tests.command_lines import REFERENCE, ROOT
from tests.unit.test_cli import here

README, DOCS = ROOT / "README.md", ROOT / "docs"
H200 = REFERENCE / "h200-141gb"
ANSWER = re.compile(r"^\$ python -m bench (.*)\n((?:.+\n)+?)```$", re.M)
"""A block of code with a command and what it prints."""

NUMBERS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SENTENCES = {
    "compare.md": (
        f"throughput of at least {stats.SMALLEST_EFFECT:.1%}",
        f"at least {compare.MEMORY_EFFECT:.0%} and {compare.MEMORY_EFFECT_BYTES / 2**20:.0f} MiB",
        f"{compare.MEMORY_EFFECT:.0%} in memory are ignored",
        f"each level needs at least {NUMBERS[history.MIN_RUNS]} runs",
        f"At most {history.FALSE_ALARM_RATE * 100:g} in 100 series",
    ),
    "failures.md": (
        f"{watch.SECONDS:g} s ({watch.COLD_GPU_SECONDS:g} s before a GPU's first step)",
        f"{NUMBERS[watch.TIMES_LONGEST]} times the longest phase",
    ),
    "hosts.md": (
        f"{NUMBERS[int(expected.LIMIT_FACTOR)]} times its prediction",
        f"at least {NUMBERS[int(expected.LEAST_LIMIT_SECONDS / 60)]} minutes",
    ),
    "profile.md": (
        f"{NUMBERS[rank_profile.PLAIN_STEPS]} plain steps",
        f"{NUMBERS[rank_profile.PROFILED_STEPS]} steps under torch's profiler",
        f"{NUMBERS[memory_kinds.STEPS]} steps under torch's memory tracker",
        f"by more than {step_breakdown.STRAGGLES:.0%} over the median",
    ),
}
"""What guides say of thresholds and numbers in the code."""

# Runs a command as on a system that has no /proc, and lacks the functions that only Linux has.
WITHOUT_LINUX = """
import builtins, io, os, runpy, sys
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd"):
    vars(os).pop(name, None)
opened = builtins.open
def opens(file, *words, **options):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(file)
    return opened(file, *words, **options)
builtins.open = io.open = opens
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("bench", run_name="__main__", alter_sys=True)
"""


def test_the_readme_is_short() -> None:
    assert len(re.findall(r"\S*\w\S*", README.read_text())) <= 700


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_answers_on_a_page_are_those_of_the_command(page: Path) -> None:
    """A line that ends in `...` is shortened."""
    for command, answer in ANSWER.findall(page.read_text()):
        printed = here(*shlex.split(command)).stdout.splitlines()
        for line, now in zip(answer.splitlines(), printed, strict=False):
            start = line.removesuffix("...")
            assert now.startswith(start) if start != line else now == line
        assert len(printed) >= len(answer.splitlines()) >= 4


def test_the_readme_shows_an_answer() -> None:
    assert [command.split()[0] for command, _ in ANSWER.findall(README.read_text())] == ["fits"]


@pytest.mark.parametrize("page", [README, DOCS / "first_run.md"], ids=lambda page: page.name)
def test_the_ranking_of_a_first_run_has_the_columns_of_today(page: Path) -> None:
    out = Console(file=io.StringIO(), width=160)
    terminal.ranking(out, ran(bench.load(REFERENCE)).cells)
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    heads = [
        [name.strip() for name in re.findall(r"^┃.*┃.*$", text, re.M)[0].split("┃")]
        for text in (printed, page.read_text())
    ]
    assert heads[0] == heads[1]
    title = re.search(r"^llama-micro: (.*)$", page.read_text(), re.M)
    assert title
    assert title[1] in printed


def test_versions_are_those_that_are_supported() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    tested = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yaml").read_text())
    assert tested["jobs"]["quick"]["strategy"]["matrix"]["python"] == named
    assert f'requires-python = ">={named[0]}"' in project
    compilers = set()
    for page in (README, DOCS / "setup.md"):
        text = " ".join(page.read_text().split())
        assert set(re.findall(r"Python (3\.\d+) to (3\.\d+)", text)) == {(named[0], named[-1])}
        compilers.update(re.findall(r"GCC (\d+) to (\d+)", text))
    assert len(compilers) == 1


@pytest.mark.thorough
def test_minutes_of_matrices_are_those_of_a_dry_run() -> None:
    rows = re.findall(
        r"`python -m bench (run .*?)` \| (\d+) minutes", (DOCS / "gpu.md").read_text()
    )
    assert len(rows) == 4
    for command, minutes in rows:
        plan = here(*command.split(), "--dry-run", "--host", "h100").stdout
        (predicted,) = re.findall(r"about (\d+) min \d+ s in total", plan)
        assert int(minutes) == pytest.approx(int(predicted), rel=0.3)


@pytest.mark.parametrize("page", SENTENCES)
def test_thresholds_in_guides_are_those_of_the_code(page: str) -> None:
    text = " ".join((DOCS / page).read_text().split())
    assert [sentence for sentence in SENTENCES[page] if sentence not in text] == []


def test_versions_of_torch_and_drivers_are_those_of_the_setup() -> None:
    text = " ".join((DOCS / "setup.md").read_text().split())
    (low, high), script = (
        re.findall(r"torch>=2\.(\d+),<2\.(\d+)", (ROOT / "pyproject.toml").read_text())[0],
        (ROOT / "scripts" / "setup.sh").read_text(),
    )
    (transformers,) = re.findall(r"transformers>=([\d.]+),", (ROOT / "pyproject.toml").read_text())
    assert f"torch 2.{low} to 2.{int(high) - 1}, transformers {transformers} or newer" in text
    drivers = re.search(r"-ge (\d+) .* -lt (\d+) ", script)
    assert drivers
    assert f"| {drivers[2]} or newer, or none | 2.{int(high) - 1} | CUDA 13 |" in text
    assert f"| {drivers[1]} to {int(drivers[2]) - 1} | 2.10 | CUDA 12 |" in text
    assert "echo torch==2.10.0" in script


def test_bytes_and_accuracy_of_fits_are_those_of_code_and_study() -> None:
    text = " ".join((DOCS / "fits.md").read_text().split())
    for name, states in STATES.items():
        count = states.parameter + states.gradient + states.optimizer
        assert re.search(rf"\| `{name}` \| [^|]* \| {count:g} \|", text), name
    study = (DOCS / "studies" / "fine-tuning-fits.md").read_text()
    rows = re.findall(r"\| (\d+) \| \S+ \| (\S+)% \| \S+ \| (\S+)% \|$", study, re.M)
    runs, memory, speed = zip(*rows, strict=True)
    worst = f"peaks are within {max(map(float, memory)):g}% and speeds within"
    assert f"For {sum(map(int, runs))} measured runs, {worst} {max(map(float, speed)):g}%" in text


def verified(folder: Path) -> set[str]:
    """Returns the suite's strategies with a verified trial in a results folder."""
    trials = bench.load(folder).trials
    good = trials[trials["parity_verdict"].isin(("exact", "within tolerance"))]
    return {json.loads(cell)["strategy"] for cell in good["cell"]}


def test_numbers_of_tested_strategies_are_those_of_the_records() -> None:
    everything = {
        name for name, cls in strategies().items() if cls.__module__.startswith("harness.")
    }
    on_cpus, on_gpu = (verified(folder) & everything for folder in (REFERENCE, H200))
    for page in (README, DOCS / "tested.md"):
        text = " ".join(page.read_text().split())
        assert f"{len(on_cpus)} of {len(everything)} strategies" in text
        assert re.search(rf"one H200[^|]*\| {len(on_gpu)}( of {len(everything)})? strategies", text)
    page = DOCS / "tested.md"
    named = re.search(r"`ok` in neither record: (.*?)\.", page.read_text(), re.S)
    assert named
    assert {*re.findall(r"`(\w+)`", named[1])} == everything - on_cpus - on_gpu
    assert f"all {len(everything)}" in README.read_text()


def test_planning_needs_nothing_of_linux(tmp_path: Path) -> None:
    """README and docs/setup.md say that you can plan on macOS."""
    commands = (
        ["fits", "llama-8b", "--gpus", "2 x h100"],
        ["plan", "--model", "llama-8b", "--gpus", "8 x h100"],
        ["report", "--results", str(H200), "--format", "md", "--out", "report.md"],
    )
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_LINUX, str(ROOT), *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [name for panel in COMMANDS.values() for name in panel])
def test_every_command_is_in_the_index_of_the_documentation(command: str) -> None:
    assert f"`python -m bench {command}" in (DOCS / "README.md").read_text()


def test_every_page_is_in_the_index_of_the_documentation() -> None:
    text = (DOCS / "README.md").read_text()
    rows = re.findall(r"^\| \[\w[\w-]*\]\(([\w/.-]+\.md)\) \| \S", text, re.M)
    pages = {
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "studies"
    }
    assert sorted(rows) == sorted(
        {*pages, "../slurm/README.md"} - {"README.md", "glossary.md", "tested.md"}
    )
    assert {"glossary.md", "tested.md"} <= set(re.findall(r"\]\(([\w.]+)\)", text))


def test_the_python_guide_names_the_whole_interface() -> None:
    text = (DOCS / "python.md").read_text()
    assert {name for name in bench.__all__ if f"bench.{name}" not in text} == set()
    for name, method in inspect.getmembers(ProgressListener, inspect.isfunction):
        parameters = [*inspect.signature(method).parameters][1:]
        assert f"| `{name}({', '.join(parameters)})` |" in text

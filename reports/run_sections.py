from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from harness.cell.errors import plural
from reports import blocks as ui
from reports import run_facts
from reports.blocks import data, prose, prose_under, strong
from reports.cells_sections import (
    cells_blocks,
    cells_line,
    failures_blocks,
    systems_blocks,
    systems_line,
)
from reports.claims import claims_blocks
from reports.comparison_sections import (
    effects_blocks,
    launchers_blocks,
    launchers_line,
    variants_blocks,
    variants_line,
)
from reports.html_writer import PageHead
from reports.links_section import links_blocks
from reports.memory_sections import STATE_PANELS, largest_blocks, states_line
from reports.parity_sections import PARITY_PANELS, method_blocks, method_line, parity_line
from reports.run_report import RunReport
from reports.sections import Panel, Section, Written, written_page, written_text
from reports.speed_sections import (
    SCALING_PANELS,
    front_charts,
    front_line,
    memory_charts,
    memory_line,
    ranking_blocks,
)
from reports.text import duration, short_count
from reports.time_sections import (
    CHECKPOINTS,
    EXPERT_PANELS,
    PART_PANELS,
    TRAFFIC_PANELS,
    bubble_bars,
    bubble_line,
    experts_line,
    has_checkpoints,
    parts_line,
    traffic_line,
)
from reports.verdict_sections import settings_blocks, settings_line, verdict_blocks

P = ParamSpec("P")
T = TypeVar("T")


def _no_search(report: RunReport) -> bool:
    return not report.is_search


def _environment(report: RunReport) -> ui.Blocks:
    return [ui.Facts([(name, data(value)) for name, value in run_facts.environment(report.run)])]


def _environment_line(report: RunReport) -> str:
    run = report.run
    return f"PyTorch {run.torch_version}, Python {run.python_version}, {run_facts.hardware(run)}"


# Name, title, content, short title, whether Markdown has it, line while closed, condition.
SECTIONS: tuple[Section[RunReport], ...] = (
    Section("verdict", "Verdict", verdict_blocks, "", True),
    Section("largest", "Largest trainable model, or longest sequence", largest_blocks),
    Section(
        "effects",
        "What to turn on first",
        lambda report: effects_blocks(report.cells),
        "Turn on first",
        True,
    ),
    Section("links", "Links", links_blocks, "", True),
    Section(
        "checkpoints",
        "Checkpoints: does training resume correctly?",
        [Panel(tables=[CHECKPOINTS], note="checkpoints")],
        "Checkpoints",
        True,
        runs=has_checkpoints,
    ),
    Section("ranking", "Throughput and memory", ranking_blocks, "", True, runs=_no_search),
    Section("scaling", "Scaling", SCALING_PANELS, "", True),
    Section("claims", "Claims of training guides", claims_blocks, "Claims", True),
    Section(
        "failures",
        "What failed, diverged or did not run",
        failures_blocks,
        "What did not run",
        True,
    ),
    Section(
        "settings",
        "Every workload and setting",
        settings_blocks,
        "",
        True,
        settings_line,
        _no_search,
    ),
    Section("systems", "Systems", systems_blocks, fold=systems_line, runs=_no_search),
    Section(
        "memory",
        "Peak memory",
        [Panel(memory_charts, "memory")],
        fold=memory_line,
        runs=_no_search,
    ),
    Section(
        "front",
        "Memory against throughput",
        [Panel(front_charts, "front")],
        fold=front_line,
        runs=_no_search,
    ),
    Section("states", "Where the memory goes", STATE_PANELS, fold=states_line),
    Section("parts", "Where the time goes", PART_PANELS, fold=parts_line),
    Section("traffic", "Communication", TRAFFIC_PANELS, fold=traffic_line),
    Section(
        "parity", "Parity: is it the same training?", PARITY_PANELS, "Parity", True, parity_line
    ),
    Section("bubble", "Pipeline bubble", [Panel(bubble_bars, "bubble")], fold=bubble_line),
    Section("experts", "Experts", EXPERT_PANELS, "", True, experts_line),
    Section("wrappers", "Launchers compared", launchers_blocks, fold=launchers_line),
    Section(
        "variants",
        "Fewer trained parameters, lower precision",
        variants_blocks,
        "Fewer parameters",
        fold=variants_line,
    ),
    Section("cells", "All cells", cells_blocks, fold=cells_line),
    Section("environment", "Environment", _environment, "", True, _environment_line),
    Section("method", "How it was measured", method_blocks, "", True, method_line),
    Section(
        "glossary",
        "Glossary",
        lambda _: [ui.Facts(prose_under("glossary"))],
        fold=lambda _: f"{len(prose_under('glossary'))} terms",
    ),
)


def without_collection(function: Callable[P, T]) -> Callable[P, T]:
    """Disables garbage collection, since a page's objects live until the end."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if collecting:
                gc.enable()

    return run


@without_collection
def run_page(report: RunReport, requested: Sequence[str] = (), printed: bool = False) -> Written:
    run = report.run
    head = PageHead(
        f"Parallelism strategies compared: matrix {run.matrix}, {run.run_id}",
        "Which parallelism strategy?",
        [
            ["matrix ", data(run.matrix, "strong")],
            data(run_facts.hardware(run)),
            *_model(report),
            _when(report),
            ["PyTorch ", data(run.torch_version)],
            _counts(report),
            ["run ", data(run.run_id)],
        ],
        prose("run footer", version=run.suite_version, run=run.run_id),
        _cautions(report),
    )
    return written_page(report, head, SECTIONS, requested, printed)


def run_text(report: RunReport, requested: Sequence[str] = ()) -> Written:
    run = report.run
    title = f"Which parallelism strategy? Matrix {run.matrix}, run {run.run_id}"
    facts = [run_facts.hardware(run), *map(ui.plain_text, _model(report)), _when(report)]
    line = "; ".join([*facts, f"PyTorch {run.torch_version}", _counts(report)])
    head: list[ui.Block] = [ui.Heading(title, 1), ui.Paragraph(line)]
    head += [ui.Paragraph(caution) for caution in _cautions(report)]
    return written_text(report, head, SECTIONS, requested)


def _model(report: RunReport) -> list[ui.Text]:
    """Returns the verdict's model with its number of parameters."""
    if report.leading is None:
        return []
    size = next((n for cell in report.leading.rows if (n := cell.work.parameters)), None)
    parameters = f", {short_count(size)} parameters" if size else ""
    return [data(f"{report.leading.workload}{parameters}")]


def _when(report: RunReport) -> str:
    """Returns the date, and how long the run took if it is recorded."""
    seconds = report.results.conclusions["wall_seconds"].tolist()
    took = f", took {duration(seconds[-1])}" if seconds else ""
    return f"{report.run.started_at:%Y-%m-%d %H:%M} UTC{took}"


def _counts(report: RunReport) -> str:
    return f"{plural(len(report.cells), 'cell')}, {report.ranked} ranked"


def _cautions(report: RunReport) -> list[ui.Text]:
    reason = report.run.gpus_unused
    return [[strong("GPUs are not used:"), " ", data(reason), "."]] if reason else []

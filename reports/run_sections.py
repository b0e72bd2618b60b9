from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from harness.spec.text import plural
from reports import blocks as ui
from reports import closed_lines as lines
from reports import run_facts
from reports.blocks import data, prose, prose_under, strong
from reports.cells_sections import cells_blocks, failures_blocks, systems_blocks
from reports.checkpoint_section import checkpoint_blocks, has_checkpoints
from reports.comparison_sections import effects_blocks, launchers_blocks, variants_blocks
from reports.html_writer import PageHead
from reports.links_section import links_blocks
from reports.memory_sections import largest_blocks, states_blocks
from reports.parity_sections import method_blocks, parity_blocks
from reports.run_report import RunReport
from reports.sections import Section, Written, written_page, written_text
from reports.settings_section import settings_blocks
from reports.speed_sections import front_blocks, memory_blocks, ranking_blocks, scaling_blocks
from reports.time_sections import bubble_blocks, experts_blocks, profile_blocks, traffic_blocks
from reports.verdict_sections import verdict_blocks

P = ParamSpec("P")
T = TypeVar("T")


def _no_search(report: RunReport) -> bool:
    return not report.is_search


SECTIONS: tuple[Section[RunReport], ...] = (
    Section("verdict", "Verdict", verdict_blocks, in_text=True),
    Section(
        "largest",
        "Largest trainable model, or longest sequence",
        lambda report: largest_blocks(report.largest),
    ),
    Section(
        "effects",
        "What to turn on first",
        lambda report: effects_blocks(report.cells),
        "Turn on first",
        in_text=True,
    ),
    Section("links", "Links", links_blocks, in_text=True),
    Section(
        "checkpoints",
        "Checkpoints: does training resume correctly?",
        checkpoint_blocks,
        "Checkpoints",
        in_text=True,
        runs=has_checkpoints,
    ),
    Section("ranking", "Throughput and memory", ranking_blocks, in_text=True, runs=_no_search),
    Section("scaling", "Scaling", lambda report: scaling_blocks(report.cells), in_text=True),
    Section(
        "failures",
        "What failed, diverged or did not run",
        failures_blocks,
        "What did not run",
        in_text=True,
    ),
    Section(
        "settings",
        "Every workload and setting",
        settings_blocks,
        in_text=True,
        fold=lines.settings,
        runs=_no_search,
    ),
    Section("systems", "Systems", systems_blocks, fold=lines.systems, runs=_no_search),
    Section("memory", "Peak memory", memory_blocks, fold=lines.memory, runs=_no_search),
    Section("front", "Memory against throughput", front_blocks, fold=lines.front, runs=_no_search),
    Section(
        "states",
        "Where the memory goes",
        lambda report: states_blocks(report.cells, _no_search(report)),
        fold=lines.states,
    ),
    Section(
        "parts",
        "Where the time goes",
        lambda report: profile_blocks(report.profiled),
        fold=lines.parts,
    ),
    Section(
        "traffic",
        "Communication",
        lambda report: traffic_blocks(report.cells, _no_search(report)),
        fold=lines.traffic,
    ),
    Section(
        "parity",
        "Parity: is it the same training?",
        lambda report: parity_blocks(report.cells),
        "Parity",
        in_text=True,
        fold=lines.parity,
    ),
    Section(
        "bubble", "Pipeline bubble", lambda report: bubble_blocks(report.cells), fold=lines.bubble
    ),
    Section(
        "experts",
        "Experts",
        lambda report: experts_blocks(report.cells),
        in_text=True,
        fold=lines.experts,
    ),
    Section(
        "wrappers",
        "Launchers compared",
        lambda report: launchers_blocks(report.cells),
        fold=lines.wrappers,
    ),
    Section(
        "variants",
        "Fewer trained parameters, lower precision",
        lambda report: variants_blocks(report.cells),
        "Fewer parameters",
        fold=lines.variants_line,
    ),
    Section("cells", "All cells", cells_blocks, fold=lines.cells),
    Section(
        "environment",
        "Environment",
        lambda report: [
            ui.Facts([(name, data(value)) for name, value in run_facts.environment(report.run)])
        ],
        in_text=True,
        fold=lines.environment,
    ),
    Section("method", "How it was measured", method_blocks, in_text=True, fold=lines.method),
    Section(
        "glossary", "Glossary", lambda _: [ui.Facts(prose_under("glossary"))], fold=lines.glossary
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
    line = f"{run_facts.hardware(run)}; PyTorch {run.torch_version}; {_counts(report)}"
    head: list[ui.Block] = [ui.Heading(title, 1), ui.Paragraph(line)]
    head += [ui.Paragraph(words) for words in _cautions(report)]
    return written_text(report, head, SECTIONS, requested)


def _counts(report: RunReport) -> str:
    return f"{plural(len(report.cells), 'cell')}, {report.ranked} ranked"


def _cautions(report: RunReport) -> list[ui.Words]:
    reason = report.run.gpus_unused
    return [[strong("GPUs are not used:"), " ", data(reason), "."]] if reason else []

"""One-line summaries that collapsed sections show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.analysis.cell_result import CellResult
from harness.spec.text import plural
from reports import run_facts
from reports.blocks import prose_under
from reports.cells_sections import overview
from reports.comparison_sections import launchers, step_seconds, trained_share, variants
from reports.groups import pareto
from reports.memory_sections import WITHIN, with_states
from reports.names import named
from reports.run_report import RunReport
from reports.settings_section import compared
from reports.text import MIB, listed, number, percent
from reports.time_sections import WORDS, routed, sent, with_traffic
from reports.verdict_sections import ParityCounts


def settings(report: RunReport) -> str:
    count = plural(len(compared(report)), "setting")
    return f"what to use in each of {count}, with charts of throughput"


def systems(report: RunReport) -> str:
    lines = overview(report.systems, report.groups, report.leading)
    absent = sum(line.kind == "absent" for line in lines)
    missing = f"; {absent} not on this host" if absent else ""
    return f"{sum(line.ok > 0 for line in lines)} of {plural(len(lines), 'system')} ran{missing}"


def memory(report: RunReport) -> str:
    return _from_to(report, lambda cell: cell.memory.peak_memory_bytes, "MiB", 1 / MIB)


def front(report: RunReport) -> str:
    best = pareto(report.leading) if report.leading else []
    return f"{plural(len(best), 'cell')} that no other cell beats in both"


def states(report: RunReport) -> str:
    away = [cell.states.formula_deviation for cell in with_states(report.cells)]
    known = [abs(deviation) for deviation in away if deviation is not None]
    near = sum(deviation <= WITHIN for deviation in known)
    cells = plural(len(known), "cell")
    return f"what is kept between steps; {near} of {cells} within {percent(WITHIN)} of the formula"


def parts(report: RunReport) -> str:
    profile = report.profiled[0]
    whole = profile.profiled_step or 1.0
    shares = [f"{percent((profile.parts[kind] or 0.0) / whole)} {WORDS[kind]}" for kind in WORDS]
    return f"of a step of {named(profile.result)}, {listed(shares[:2])}"


def traffic(report: RunReport) -> str:
    sending = {cell.cell_id for cell in with_traffic(report.cells)}
    return _from_to(
        report,
        lambda cell: sent(cell) if cell.cell_id in sending else None,
        "x the gradients",
        before="a rank sends ",
    )


def parity(report: RunReport) -> str:
    found = ParityCounts.of(report.cells)
    if found is None:
        return "no cell was verified"
    return f"{found.passed} of {plural(found.judged, 'cell')} agree with their reference"


def bubble(report: RunReport) -> str:
    waiting = [cell for cell in report.cells if cell.times.bubble_fraction is not None]
    line = _range([100 * (cell.times.bubble_fraction or 0.0) for cell in waiting])
    return _unless_most(report, waiting, f"{line} % of a stage's time is spent waiting")


def experts(report: RunReport) -> str:
    cells = routed(report.cells)
    line = _range([cell.traffic.expert_imbalance or 0.0 for cell in cells])
    return _unless_most(report, cells, f"the busiest gets {line} times the mean tokens")


def wrappers(report: RunReport) -> str:
    cells = max((found.cells for found in launchers(report.cells)), key=len)
    most = step_seconds(cells[-1]) / step_seconds(cells[0])
    words = f"of {len(cells)} wrappers of DDP, the slowest takes {number(most)} times"
    words += " the fastest's step"
    return _unless_most(report, cells, words)


def variants_line(report: RunReport) -> str:
    cells = [cell for found in variants(report.cells) for cell in found.cells]
    shares = [share for cell in cells if (share := trained_share(cell))]
    least = f"; the smallest trains {100 * min(shares):.2g} % of the parameters" if shares else ""
    return _unless_most(report, cells, f"{plural(len(cells), 'variant')} compared{least}")


def cells(report: RunReport) -> str:
    return (
        f"{plural(len(report.cells), 'cell')} to sort, filter and compare; {report.ranked} ranked"
    )


def environment(report: RunReport) -> str:
    run = report.run
    return f"PyTorch {run.torch_version}, Python {run.python_version}, {run_facts.hardware(run)}"


def method(report: RunReport) -> str:
    most = max((cell.trials for cell in report.cells), default=0)
    trials = f"up to {plural(most, 'trial')} of a cell" if most else "0 trials finished"
    return f"how each figure is obtained; {trials}"


def glossary(_: RunReport) -> str:
    return f"{len(prose_under('glossary'))} terms"


def _unless_most(report: RunReport, cells: Sequence[CellResult], line: str) -> str:
    """Returns the line; empty, so that the section is open, if it has most cells."""
    return "" if 2 * len({cell.cell_id for cell in cells}) > len(report.cells) else line


def _from_to(
    report: RunReport,
    value: Callable[[CellResult], float | None],
    unit: str,
    scale: float = 1.0,
    before: str = "",
) -> str:
    for cells in (report.leading.rows if report.leading else (), report.cells):
        known = [(x * scale, cell) for cell in cells if (x := value(cell)) is not None]
        if known:
            known.sort(key=lambda pair: pair[0])
            ends = known if len(known) < 2 else (known[0], known[-1])
            return before + " to ".join(f"{number(x)} {unit} ({named(cell)})" for x, cell in ends)
    return unit


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values, default=0.0)), number(max(values, default=0.0))
    return low if low == high else f"{low} to {high}"

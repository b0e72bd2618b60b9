"""Everything that a run recorded about one cell, as JSON and as blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.analysis.answer import change
from harness.analysis.cell_result import CellResult
from harness.analysis.stats import Comparison
from harness.cell.errors import plural
from harness.record.profile_record import COMPONENTS
from harness.record.trial import TrialRecord
from reports import blocks as ui
from reports import run_facts
from reports.blocks import data, plain_text, strong
from reports.columns import is_adjusted
from reports.export_records import for_json, record_of
from reports.groups import Group
from reports.html_writer import walk
from reports.memory_sections import KINDS
from reports.names import flags
from reports.run_facts import StepProfile
from reports.run_report import RunReport, ran
from reports.run_sections import SECTIONS
from reports.text import DASH, deviation, number, scaled, size
from reports.time_sections import utilization

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.store import Results

JsonObject: TypeAlias = dict[str, Any]

STEPS = 32
"""Maximum number of characters in a chart of steps."""
LOG_LINES = 8
_BARS = "▁▂▃▄▅▆▇█"
_TRIAL = (
    "trial",
    "attempt",
    "status",
    "reason",
    "samples_per_second",
    "step_seconds_p50",
    "step_seconds_p95",
    "peak_memory_bytes",
    "wall_seconds",
)
_MEMORY = (
    "state_bytes",
    "formula_bytes",
    "formula_deviation",
    "formula_transient_bytes",
    "peak_memory_bytes",
    "peak_memory_bytes_low",
    "memory_method",
)


@dataclass(frozen=True)
class CellDetail:
    report: RunReport
    cell: CellResult
    group: Group | None
    """Cells that differ from it only in strategy; None if it is not ranked."""
    trials: Sequence[TrialRecord]
    steps: pd.DataFrame
    """Steps of the cell's ranks."""

    @property
    def profiled(self) -> StepProfile | None:
        profiles = self.report.profiled
        return next((p for p in profiles if p.result.cell_id == self.cell.cell_id), None)

    @property
    def ratio(self) -> Comparison | None:
        """Throughput over the baseline's, as in the verdict; None for the baseline."""
        return None if self.cell.relative.baseline == self.cell.cell_id else self.cell.gain

    @property
    def baseline(self) -> str:
        """Label of the setting's baseline; empty if there is none."""
        rows = self.group.rows if self.group else ()
        ids = {self.cell.relative.baseline}
        return next((row.cell.label for row in rows if row.cell_id in ids), "")

    @property
    def log_tail(self) -> str:
        return next((trial.log_tail for trial in reversed(self.trials) if trial.log_tail), "")

    def slowest(self, trial: TrialRecord) -> pd.DataFrame:
        """Returns seconds of the slowest rank and phase by step."""
        of_trial = self.steps[
            (self.steps["trial"] == trial.trial) & (self.steps["attempt"] == trial.attempt)
        ]
        return of_trial.groupby("step").agg({"step_seconds": "max", "phase": "first"})

    def ranks(self) -> list[tuple[int, float | None, int | None]]:
        """Returns each rank, its median timed step, and its peak memory."""
        finished = {(trial.trial, trial.attempt) for trial in self.trials if trial.status == "ok"}
        timed = self.steps[self.steps["phase"] == "timed"]
        counts = [key in finished for key in zip(timed["trial"], timed["attempt"], strict=True)]
        by_rank = timed.loc[counts].groupby("rank")["step_seconds"].median()
        medians: dict[int, float] = dict(zip(by_rank.index.tolist(), by_rank.tolist(), strict=True))
        peaks = self.cell.memory.peak_memory_bytes_by_rank
        count = max(len(peaks), max(medians, default=-1) + 1)
        return [(n, medians.get(n), peaks[n] if n < len(peaks) else None) for n in range(count)]

    def as_json(self) -> JsonObject:
        ranks = ("rank", "step_seconds_p50", "peak_memory_bytes")
        return {
            "started_at": self.report.run.started_at.isoformat(),
            "hardware": run_facts.hardware(self.report.run),
            "cell": record_of(self.cell),
            "cautions": [{"word": word, "meaning": meaning} for word, meaning in flags(self.cell)],
            "trials": [self._trial(trial) for trial in self.trials],
            "ranking": self._ranking(),
            "memory": self._memory(),
            "ranks": [dict(zip(ranks, rank, strict=True)) for rank in self.ranks()],
            "time": self.profiled and _time(self.profiled),
            "log_tail": self.log_tail,
        }

    def _trial(self, trial: TrialRecord) -> JsonObject:
        slowest = self.slowest(trial)
        return {name: for_json(getattr(trial, name)) for name in _TRIAL} | {
            "slowest_rank_step_seconds": for_json(slowest["step_seconds"].tolist()),
            "phases": list(map(str, slowest["phase"].tolist())),
        }

    def _ranking(self) -> JsonObject | None:
        cell, group, ratio = self.cell, self.group, self.ratio
        if group is None:
            return None
        return {
            "place": cell.relative.place,
            "of": len(group.fair),
            "may_be_fastest": cell.relative.may_be_fastest,
            "setting": group.full_title,
            "baseline": self.baseline,
            "over_baseline": ratio and ratio.ratio,
            "over_baseline_low": ratio and for_json(ratio.low),
            "over_baseline_high": ratio and for_json(ratio.high),
            "verdict": ratio and ratio.verdict,
        }

    def _memory(self) -> JsonObject | None:
        if self.cell.states.state_bytes is None:
            return None
        finished = [trial for trial in self.trials if trial.status == "ok"]
        kinds = [
            {
                "kind": field.removesuffix("_bytes"),
                "bytes": self.cell.column(field),
                "formula_bytes": getattr(finished[-1], f"formula_{field}") if finished else None,
            }
            for field in KINDS.values()
        ]
        return {"kinds": kinds, **{name: for_json(self.cell.column(name)) for name in _MEMORY}}

    def blocks(self) -> ui.Blocks:
        cell, run = self.cell, self.report.run
        started = f"{run.started_at:%Y-%m-%d %H:%M} UTC"
        blocks: ui.Blocks = [
            ui.Heading([data(cell.cell.name), "  ", cell.cell_id], 1),
            ui.Paragraph(["run ", data(cell.run_id), f", {started}; ", run_facts.hardware(run)]),
        ]
        if cell.status != "ok":
            status = f"{cell.status}{' (as expected)' if cell.expected else ''}"
            blocks.append(ui.Paragraph([strong(status), ": ", data(cell.reason)], "caution"))
        for word, meaning in flags(cell):
            blocks.append(ui.Paragraph([strong(word), ": ", data(meaning)], "caution"))
        blocks += [ui.Part("Throughput", [self._trials_table(), *self._speed()])]
        ranks = [
            ui.Row(str(n), [ui.Td(scaled(seconds, 1e3)), ui.Td(size(peak))])
            for n, seconds, peak in self.ranks()
        ]
        if len(ranks) > 1:
            columns = ui.heads("step p50 (ms)", "peak")
            blocks.append(ui.Part("Ranks", [ui.Table("", "Ranks", "rank", columns, ranks)]))
        blocks += self._rows_of_sections()
        if verified := self._verified():
            blocks.append(ui.Part("How it was verified", [ui.Facts(verified)]))
        if self.log_tail:
            tail = "\n".join(self.log_tail.splitlines()[-LOG_LINES:])
            blocks.append(ui.Part("End of the log", [ui.Pre(tail)]))
        return blocks

    def _trials_table(self) -> ui.Table:
        rows = []
        for trial in self.trials:
            name = str(trial.trial) + (f" (attempt {trial.attempt})" if trial.attempt > 1 else "")
            steps = sparkline(self.slowest(trial)["step_seconds"].tolist())
            cells = [
                ui.Td(number(trial.samples_per_second)),
                ui.Td(steps or (DASH if trial.status == "ok" else trial.status), "word"),
                ui.Td(scaled(trial.step_seconds_p50, 1e3)),
                ui.Td(scaled(trial.step_seconds_p95, 1e3)),
                ui.Td(size(trial.peak_memory_bytes)),
            ]
            rows.append(ui.Row(name, cells))
        columns = ui.heads(
            "samples/s, as measured",
            "steps: time of the slowest rank: word",
            "p50 (ms)",
            "p95 (ms)",
            "peak",
        )
        return ui.Table("", "Trials", "trial", columns, rows)

    def _speed(self) -> Iterator[ui.Paragraph]:
        speed, ratio = self.cell.speed, self.ratio
        if speed.samples_per_second is not None:
            low, high = speed.samples_per_second_low, speed.samples_per_second_high
            interval = "1 trial: no interval"
            if low is not None:
                interval = f"95% interval {number(low)} to {number(high)}"
            rate = speed.tokens_per_second
            tokens = "" if rate is None else f", {number(rate)} tokens/s"
            adjusted = ", adjusted by the control:" if is_adjusted([self.cell]) else ""
            yield ui.Paragraph(
                f"mean{adjusted} {number(speed.samples_per_second)} samples/s{tokens}, {interval}"
            )
        if text := utilization(self.cell):
            yield ui.Paragraph(text)
        if self.group:
            place, count = self.cell.relative.place, len(self.group.fair)
            where = f"place {place} of {count}" if place else "not ranked"
            if self.cell.relative.may_be_fastest:
                where += ", may be the fastest"
            yield ui.Paragraph([f"{where}: ", data(self.group.full_title)])
            if ratio:
                unclear = "" if ratio.verdict in ("faster", "slower") else f": {ratio.verdict}"
                yield ui.Paragraph([data(change(ratio, self.baseline)), unclear])

    def _rows_of_sections(self) -> Iterator[ui.Part]:
        """Yields the cell's row of each table of the report, without what was there before."""
        seen: set[tuple[str, str]] = set()
        for section in sorted(SECTIONS, key=lambda section: section.name != "cells"):
            blocks = section.blocks(self.report) if section.runs(self.report) else []
            facts: list[tuple[str, ui.Text]] = []
            for name, text in self._row(blocks) if section.name != "verdict" else ():
                fact = name, plain_text(text)
                if fact[1] not in (DASH, "") and fact not in seen and name != "Flags":
                    seen.add(fact)
                    facts.append((name, text))
            yield ui.Part(section.title, [ui.Facts(facts)])

    def _row(self, blocks: Sequence[ui.Block]) -> Iterator[tuple[str, ui.Text]]:
        """Yields columns and texts of the cell's rows in these blocks."""
        for table in walk(ui.visible(blocks, "text")):
            if not isinstance(table, ui.Table):
                continue
            for row in table.rows:
                ids = row.attributes.get("data-cell"), row.attributes.get("id", "")[len("cell-") :]
                if self.cell.cell_id not in ids:
                    continue
                for head, td in zip(table.columns, row.cells, strict=True):
                    yield (f"{head.title} ({head.unit})" if head.unit else head.title), td.text
                trials = len(self.trials)
                yield from row.more[: len(row.more) - trials]

    def _verified(self) -> list[tuple[str, ui.Text]]:
        parity = self.cell.parity
        if parity.verdict is None:
            return []
        facts: list[tuple[str, ui.Text]] = [("steps", plural(self.cell.cell.parity_steps, "step"))]
        if parity.verified_steps:
            facts.append(
                ("verified, long training included", plural(parity.verified_steps, "step"))
            )
        if parity.reason:
            facts.append(("reason", data(parity.reason)))
        if parity.moments_skipped_reason:
            facts.append(("optimizer", data(parity.moments_skipped_reason)))
        if parity.rewinds:
            times = "once" if parity.rewinds == 1 else f"{parity.rewinds} times"
            loss, update = parity.rewind_loss_deviation, parity.rewind_update_deviation
            text = f"{times} between timed steps: largest deviation in loss {deviation(loss)}, in"
            facts.append(("state rewound", f"{text} parameters {deviation(update)}"))
        elif parity.rewind_skipped_reason:
            facts.append(("state never rewound", data(parity.rewind_skipped_reason)))
        if losses := [x for x in parity.losses if x is not None and math.isfinite(x)]:
            ends = f"from {losses[0]:.4f} to {losses[-1]:.4f} nats"
            facts.append(("loss", f"{sparkline(losses)} {ends}"))
        return facts


def in_full(results: Results, steps: pd.DataFrame, cell_id: str) -> CellDetail:
    """Returns a cell's records. `results`: its run, without steps; `steps`: its steps."""
    report = ran(results)
    (cell,) = [cell for cell in report.cells if cell.cell_id == cell_id]
    ranked = [
        (row, group) for group in report.groups for row in group.rows if row.cell_id == cell_id
    ]
    every = TrialRecord.from_frame(results.trials[results.trials["cell_id"] == cell_id])
    trials = sorted(every, key=lambda trial: (trial.trial, trial.attempt))
    row, group = ranked[0] if ranked else (cell, None)
    return CellDetail(report, row, group, trials, steps)


def sparkline(values: Sequence[float | None], most: int = STEPS) -> str:
    """Returns a block per value; of more than `most`, the largest of each of `most` groups."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return ""
    count = min(most, len(finite))
    edges = [i * len(finite) // count for i in range(count + 1)]
    largest = [max(finite[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(largest), max(largest)
    if not high > low:
        return _BARS[3] * count
    return "".join(_BARS[round((len(_BARS) - 1) * (x - low) / (high - low))] for x in largest)


def _time(cell: StepProfile) -> JsonObject:
    parts = {name: seconds for name in COMPONENTS if (seconds := cell.parts[name]) is not None}
    return {
        **{f"{name}_seconds": seconds for name, seconds in parts.items()},
        "profiled_step_seconds": cell.profiled_step,
        "plain_step_seconds": cell.plain_step,
        "straggler_rank": cell.straggler,
        "gpu_seconds": cell.gpu and dict(cell.gpu.seconds),
    }

"""Whole reports that must not contradict themselves: page, terminal, JSON and CSV of the same run.

Each check reads what is written, not what the code meant, and is seen failing on a contradiction
that is planted in it.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.cli import terminal
from harness.analysis.setting import SETTING
from harness.cell.cell import Cell
from harness.record.store import Results, Store
from reports import report_text
from reports.run_report import reports_of
from reports.text import signed
from tests.unit.made_results import stored, trial_rows

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
MARKS = re.compile("[†‡]")


@dataclass
class Line:
    """A table's row: its cells' texts by heading, and the id of the run's cell that it is about."""

    texts: dict[str, str]
    cell_id: str = ""
    details: str = ""
    values: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return next(iter(self.texts.values()))


class Tables(HTMLParser):
    """Lines of all tables of a page, its answer, numbered lists and texts of its charts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[Line]] = []
        self.answer: list[str] = []
        self.numbered: list[str] = []
        self.charts: list[list[str]] = []
        self.words: list[str] = []
        self._heads: list[str] = []
        self._texts: list[str] = []
        self._line = Line({})
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag in ("input", "br", "wbr", "meta", "path", "use", "rect", "line"):
            return
        self._open.append("answer" if found.get("class") == "answer" else tag)
        if tag == "table":
            self._heads = []
            self.tables.append([])
        elif tag == "svg":
            self.charts.append([])
        elif tag == "tr":
            self._texts = []
            row_id = (found.get("id") or "").removeprefix("cell-")
            self._line = Line({}, row_id or found.get("data-cell") or "")
        elif tag in ("th", "td"):
            self._texts.append("")
        elif tag in ("li", "text"):
            kinds = {"answer": self.answer, "ol": self.numbered}
            lists = [kinds[name] for name in self._open if name in kinds]
            lists += [self.charts[-1]] if tag == "text" else []
            for texts in lists:
                texts.append("")
        if tag == "a" and "tr" in self._open and "details" not in self._in("th"):
            link = (found.get("href") or "").partition("#cell-")[2]
            self._line.cell_id = self._line.cell_id or link
        if found.get("data-field") and "tr" in self._open:
            self._line.values.setdefault(str(found["data-field"]), found.get("data-value") or "")

    def _in(self, tag: str) -> list[str]:
        return self._open[self._open.index(tag) :] if tag in self._open else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("br", "wbr", "path", "use", "rect", "line"):
            self._open.pop()
        if tag == "tr" and self._texts:
            if "thead" in self._open:
                self._heads = self._texts
            elif len(self._texts) == len(self._heads):
                self._line.texts = dict(zip(self._heads, self._texts, strict=True))
                self.tables[-1].append(self._line)

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self._open):
            return
        self.words.append(data)
        if "details" in self._in("tr"):
            self._line.details += f"{data}\n"
        elif {"th", "td"} & set(self._open) and self._texts:
            self._texts[-1] += data
        elif "li" in self._open:
            kinds = {"answer": self.answer, "ol": self.numbered}
            for name in set(self._open) & set(kinds):
                kinds[name][-1] += data
        elif "text" in self._open:
            self.charts[-1][-1] += data

    @property
    def lines(self) -> list[Line]:
        return [line for table in self.tables for line in table]

    @property
    def cells(self) -> dict[str, Line]:
        """Lines of the table of all cells."""
        return {line.cell_id: line for line in self.lines if "Place" in line.texts}


@dataclass(frozen=True)
class Outputs:
    """What one report says in each place."""

    page: str
    markdown: str
    terminal: str
    json: str
    csv: str

    @functools.cached_property
    def tables(self) -> Tables:
        return Tables(self.page)

    @functools.cached_property
    def records(self) -> dict[str, dict[str, Any]]:
        return {cell["cell_id"]: cell for cell in json.loads(self.json)["cells"]}


def outputs(results: Results) -> Outputs:
    out = Console(file=io.StringIO(), width=300, highlight=False)
    for report in reports_of(results):
        terminal.ranking(out, report.cells)
        if report.leading and report.advised:
            terminal.advice(out, report.advised, report.leading.full_title, "")
    assert isinstance(out.file, io.StringIO)
    told = out.file.getvalue()
    page, text, records, lines = (
        report_text(results, kind).text for kind in ("html", "md", "json", "csv")
    )
    return Outputs(page, text, told, records, lines)


def gain_of(record: dict[str, Any]) -> str:
    """Returns the gain over the baseline as tables show it."""
    value, low, high = (record[f"over_baseline{end}"] for end in ("", "_low", "_high"))
    if record["baseline"] == record["cell_id"]:
        return "baseline"
    if value is None:
        return "—"
    ends = [signed(end - 1).removesuffix("%") for end in (low, high) if end is not None]
    return signed(value - 1) + (f" ({' to '.join(ends)})" if ends else "")


def several_gains(seen: Outputs) -> Iterator[str]:
    """One gain with one interval: in each table, the sentences, JSON and CSV."""
    by_csv = {line["cell_id"]: line for line in csv.DictReader(io.StringIO(seen.csv))}
    for cell_id, record in seen.records.items():
        for end in ("", "_low", "_high"):
            told, value = by_csv[cell_id][f"over_baseline{end}"], record[f"over_baseline{end}"]
            if told != ("" if value is None else repr(value)):
                yield f"CSV has {told} for {value}"
    for line in seen.tables.lines:
        for head, text in line.texts.items():
            gain = gain_of(seen.records[line.cell_id]) if line.cell_id in seen.records else text
            if head.startswith("Over baseline") and text != gain:
                yield f"{line.name}: {text}, JSON {gain}"
    for where, text in (("page", " ".join(seen.tables.answer)), ("terminal", seen.terminal)):
        for value, way, low, high in re.findall(
            r"([\d.]+)% (faster|slower) than \S+ \(95% interval: ([\d.−]+) to ([\d.−]+)%\)",
            text,
        ):
            given = {gain_of(record) for record in seen.records.values()}
            told = f"+{value}% ({low} to {high})".replace("(−", "(-").replace(" ", "")
            plain = {gain.replace("+", "").replace(" ", "") for gain in given}
            if way == "faster" and told.replace("+", "").replace("-", "−") not in plain:
                yield f"{where}: {told} is no cell's gain"


def settings(seen: Outputs) -> dict[tuple[object, ...], list[dict[str, Any]]]:
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for record in seen.records.values():
        if record["ranked"]:
            names = [name for name in SETTING if name in record]
            key = (record["run_id"], *(record[name] for name in names))
            groups.setdefault(key, []).append(record)
    return groups


def several_sets(seen: Outputs) -> Iterator[str]:
    """The cells that may be the fastest are the verdict's, in every table and file."""
    fastest = {name for name, record in seen.records.items() if record["may_be_fastest"]}
    marked = {name for name, line in seen.tables.cells.items() if "●" in line.texts["Place"]}
    if seen.tables.cells and marked != fastest:
        yield f"page and JSON differ in {marked ^ fastest}"
    by_csv = csv.DictReader(io.StringIO(seen.csv))
    if {line["cell_id"] for line in by_csv if line["may_be_fastest"] == "true"} != fastest:
        yield "CSV and JSON differ"
    for line in seen.tables.lines:
        text = line.texts.get("May be fastestof all its setting", line.texts.get("May be fastest"))
        if text is not None and ("●" in text) != (line.cell_id in fastest):
            yield f"{line.name} in another table"
    count = sum(cell["may_be_fastest"] for cell in json.loads(seen.json)["cells"])
    if len(re.findall(r"^│ ●", seen.terminal, re.M)) != count:
        yield "the terminal marks another number of cells"
    answer = seen.tables.answer[:1]
    for first in answer:
        others = re.search(r"(\d+) others? (?:may be|is|are) as fast", first)
        count = 1 + int(others[1]) if others else 1
        lead = [line for line in seen.tables.lines if line.texts.get("Role", "").startswith("Use")]
        use = seen.records[lead[0].cell_id]
        group = next(g for g in settings(seen).values() if use in g)
        if sum(record["may_be_fastest"] for record in group) != count or not use["may_be_fastest"]:
            yield f"the verdict names {count}"
        if first not in " ".join(seen.terminal.split()):
            yield f"the terminal has another answer than {first}"


def ranked_stand_ins(seen: Outputs) -> Iterator[str]:
    """What stands in for the real thing or is crowded has no place where others have one."""
    alone = set()
    for group in settings(seen).values():
        odd = [r for r in group if r["stand_in"] is not None or r["oversubscribed"]]
        if len(odd) == len(group):
            alone |= {record["label"] for record in odd}
            continue
        for record in odd:
            line = seen.tables.cells.get(record["cell_id"])
            if record["place"] is not None or (line and not line.texts["Place"].startswith("—")):
                yield f"{record['label']} has a place"
    for text in seen.tables.numbered:
        name, mark, _ = re.split("([†‡]|: )", text, maxsplit=1)
        if mark != ": " and name not in alone:
            yield f"{text} is on the front"
    for chart in seen.tables.charts:
        ranked = chart[: chart.index("Not ranked:")] if "Not ranked:" in chart else []
        yield from (f"{text} is above others" for text in ranked if MARKS.search(text))
    for table in re.split(r"^┏", seen.terminal, flags=re.M):
        names = [line.split("│")[2] for line in table.splitlines() if line.startswith("│")]
        marked = [bool(MARKS.search(name)) for name in names]
        if marked != sorted(marked):
            yield "the terminal ranks a stand-in"


def mixed_adjustments(seen: Outputs) -> Iterator[str]:
    """What was measured and what was adjusted by the control have headings of their own."""
    for cell_id, line in seen.tables.cells.items():
        record, step = seen.records[cell_id], line.values.get("step_seconds")
        if step and float(step) * record["samples_per_second"] / record["global_batch"] < 0.999:
            yield f"{line.name}: step time and throughput do not belong together"
        raw = line.values.get("raw_tokens_per_second") or line.values.get("raw_samples_per_second")
        if raw and re.search(r"Step p\d\d \(", line.details):
            yield f"{line.name}: a step as measured is not called unadjusted"
    for line in seen.tables.lines:
        texts = {head: text for head, text in line.texts.items() if text != "—"}
        if any(h.startswith("Step p") for h in texts) and any(
            h.startswith(("Step time", "Over baseline", "Extra")) for h in texts
        ):
            yield f"{line.name}: {list(texts)}"


def used_reservations(seen: Outputs) -> Iterator[str]:
    """Only what is called reserved may exceed the peak."""
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for line in seen.tables.lines:
        sizes = {
            head: float(match[1].replace(",", "")) * units[match[2]]
            for head, text in line.texts.items()
            if (match := re.fullmatch(r"([\d.,]+) (bytes|[KMG]iB)", text))
        }
        peak = next((sizes[h] for h in sizes if h.startswith("Peak")), None)
        for head, value in sizes.items():
            kept = head.startswith(("Library", "Optimizer", "Gradients", "Parameters", "Together"))
            if kept and peak and value > 1.02 * peak and "reserved" not in head:
                yield f"{line.name}: {head} of {value} exceeds the peak of {peak}"


def half_widths(seen: Outputs) -> Iterator[str]:
    """Intervals have two ends."""
    for where in ("page", "markdown", "terminal"):
        text = " ".join(seen.tables.words) if where == "page" else getattr(seen, where)
        yield from (f"{where}: {found}" for found in re.findall(r"± ?\d[\d.,]*", text))


def silent_trends(seen: Outputs) -> Iterator[str]:
    """A trend is a caveat of the verdict if it concerns its cells, else no flag for noise."""
    caveat = " ".join(seen.tables.answer)
    for line in seen.tables.lines:
        role = line.texts.get("Role", "")
        cell = seen.tables.cells.get(line.cell_id)
        concerned = cell and re.search("Use|Baseline", role) and "warm-up" in cell.details
        if concerned and "warming up" not in caveat:
            yield f"{line.name} was still warming up, and the verdict does not say so"
    for cell_id, line in seen.tables.cells.items():
        record = seen.records[cell_id]
        high, value = record["samples_per_second_high"], record["samples_per_second"]
        if "warm-up" in line.details and high and not record["trend"] > high / value - 1:
            yield f"{line.name}: its trend is within its interval"


CHECKS: tuple[Callable[[Outputs], Iterator[str]], ...] = (
    several_gains,
    several_sets,
    ranked_stand_ins,
    mixed_adjustments,
    used_reservations,
    half_widths,
    silent_trends,
)


@pytest.fixture(scope="module")
def kept() -> Outputs:
    return outputs(Store(REFERENCE).load())


def tie(folder: Path) -> Results:
    rows = trial_rows(Cell(strategy="ddp", devices=2), [50.0, 52.0, 48.0], wraps_ddp="torchrun")
    for name, speed in (("near", 51.0), ("nearer", 50.5), ("far", 20.0)):
        rows += trial_rows(Cell(strategy=name, devices=2), [speed, speed + 2, speed - 2])
    odd = Cell(strategy="odd", devices=2)
    rows += trial_rows(odd, [90.0, 91.0, 92.0], stand_in="threads for GPUs")
    return stored(folder / "tie", rows)


def one_device(folder: Path) -> Results:
    rows = trial_rows(Cell(strategy="single"), [50.0, 51.0, 49.0])
    rows += trial_rows(Cell(strategy="single", compile="block"), [70.0, 71.0, 72.0])
    rows += trial_rows(Cell(strategy="ddp"), [45.0, 46.0, 44.0], wraps_ddp="torchrun")
    return stored(folder / "one", rows)


def on_a_gpu(folder: Path) -> Results:
    return Store(REFERENCE / "h200-141gb").load(["times-c6a92c"])


def several_runs(folder: Path) -> Results:
    store = REFERENCE / "h200-141gb"
    return Store(store).load(["times-c6a92c", "compile-c6a92c"])


@pytest.mark.parametrize("check", CHECKS)
def test_the_kept_run_does_not_contradict_itself(
    kept: Outputs, check: Callable[[Outputs], Iterator[str]]
) -> None:
    assert list(check(kept)) == []


@pytest.mark.parametrize("made", [on_a_gpu, tie, one_device, several_runs])
def test_other_runs_do_not_contradict_themselves(
    tmp_path: Path, made: Callable[[Path], Results]
) -> None:
    seen = outputs(made(tmp_path))
    assert [found for check in CHECKS for found in check(seen)] == []


PLANTED: tuple[tuple[Callable[[Outputs], Iterator[str]], str, str, str], ...] = (
    (several_gains, "page", r"\(\+7\.1 to \+13\.5\)", "(+6.0 to +14.5)"),
    (several_gains, "page", r"7\.1 to 13\.5%", "6.0 to 14.5%"),
    (several_gains, "terminal", r"7\.1 to 13\.5%", "6.0 to 14.5%"),
    (several_gains, "json", r'"over_baseline_low": 1\.0', '"over_baseline_low": 1.3'),
    (several_gains, "csv", r",1\.07(?=\d+,1\.13)", ",1.05"),
    (several_sets, "page", " ●</td>", "</td>"),
    (several_sets, "page", "Fastest of 52 cells", "2 others may be as fast: a and b."),
    (several_sets, "terminal", "│ ● ", "│   "),
    (several_sets, "json", '"may_be_fastest": false', '"may_be_fastest": true'),
    (several_sets, "csv", r",true,1,true,", ",true,1,false,"),
    (ranked_stand_ins, "page", r"(?<=>)(horovod\(controller=mpi\))(?=</text>)", r"\1†"),
    (ranked_stand_ins, "page", r"(?<=<bdi>)(horovod\(controller=mpi\)): 6", r"\1†: 6"),
    (ranked_stand_ins, "terminal", r"(horovod\(controller=mpi\))  ", r"\1† "),
    (ranked_stand_ins, "json", '"stand_in": null', '"stand_in": "threads for GPUs"'),
    (mixed_adjustments, "page", "Step p50, unadjusted", "Step p50"),
    (mixed_adjustments, "page", r'(id="wrappers-0-table">.*?)Step time', r"\1Step p50"),
    (mixed_adjustments, "page", r'(id="all".*?"step_seconds" data-value=")0\.', r"\g<1>0.0"),
    (used_reservations, "page", r"(states-table.*?)Reserved by the l", r"\1L"),
    (half_widths, "page", "6,461", "6,461 ± 76"),
    (half_widths, "markdown", "6,461", "6,461 ± 76"),
    (half_widths, "terminal", r"[\d.]+ to [\d.]+", "± 1.2"),
    (silent_trends, "page", "<dt><bdi>Trial", "<dt>trend</dt><dd>warm-up was short</dd>\\g<0>"),
)


@pytest.mark.parametrize(("check", "where", "pattern", "replacement"), PLANTED)
def test_a_planted_contradiction_is_found(
    kept: Outputs,
    check: Callable[[Outputs], Iterator[str]],
    where: str,
    pattern: str,
    replacement: str,
) -> None:
    changed, count = re.subn(pattern, replacement, getattr(kept, where), count=1, flags=re.S)
    assert count == 1
    assert list(check(replace(kept, **{where: changed})))


def test_each_check_has_a_planted_contradiction() -> None:
    assert {check for check, *_ in PLANTED} == set(CHECKS)

"""The suite's cells as the planner needs them: what was measured on this machine, and what else
could run here."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import SERIES, Setting
from harness.analysis.summary import cell_results
from harness.planner.local.cell_facts import CellFacts, Measured
from harness.planner.local.exchange import divided, engine_of, messages, optimizer_flops, sent_bytes
from harness.planner.local.local_plan import Variant
from harness.record.store import Store
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.link import Link
from harness.spec.training import EXACT
from harness.strategy.formulas import model_states
from harness.strategy.registry import (
    make_strategy,
    stand_in_of,
    strategies,
    validate,
    with_defaults,
)
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from harness.workloads.operators import operators

PIPELINE_MICRO_BATCHES = 4
"""Of a pipeline that nobody has measured: matrices take as many on CPU cores."""
UNSHAPED_BYTES_PER_SECOND = 1.2e9
"""Of one TCP stream between emulated nodes whose link is not shaped, where it was not measured."""
WIRE_SHARE = 0.95
"""Payload of the bytes that a link counts, with the headers of TCP and Ethernet."""


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that was measured on CPU cores, as the suite and as the planner see it."""

    result: CellResult
    cell: Cell
    measured: Measured


@dataclass(frozen=True)
class Here:
    """What was measured on a machine."""

    machine: str
    """Its host name, processor and cores."""
    cores: int
    memory_bytes: int
    cells: tuple[MeasuredCell, ...]
    links: dict[str, Link]
    """Measured rate and delay of each emulated link, by its text."""

    def link_of(self, text: str) -> Link:
        """Rate and delay between emulated nodes: measured, else as asked for."""
        if text in self.links:
            return self.links[text]
        asked = Link.of(text)
        rate = asked.bits_per_second
        unshaped = 8 * UNSHAPED_BYTES_PER_SECOND
        return Link(min(unshaped, WIRE_SHARE * rate) if rate else unshaped, asked.delay_seconds)


def read_here(folders: Sequence[Path], workload: str | None = None) -> Here:
    """The CPU cells of these results folders that were measured on the machine of the newest run.

    A cell that several runs have measured counts by its newest. Variants of a workload (adapters,
    quantised weights) are left out, which train in other ways, but for the `workload` that is asked
    about. Raises UsageError where there is no cell.
    """
    tables = [Store(folder).load(steps=False) for folder in folders]
    rows = [row for table in tables for row in table.runs.to_dict("records")]
    newest = max(rows, key=lambda row: str(row["run_id"]))
    on_it = {
        str(row["run_id"])
        for row in rows
        if (row["cpu_model"], row["cpu_cores"]) == (newest["cpu_model"], newest["cpu_cores"])
    }
    links: dict[str, Link] = {}
    results: dict[str, CellResult] = {}
    for table in tables:
        trials = table.trials[table.trials["run_id"].isin(list(on_it))]
        for text, rows_of in trials[trials["links"].notna()].groupby("links"):
            rate = float(rows_of["link_bits_per_second"].median())
            delay = float(rows_of["link_latency_seconds"].median())
            if text and rate > 0:
                links[str(text)] = Link(rate, max(0.0, delay))
        for result in sorted(cell_results(trials), key=lambda result: result.run_id):
            plain = "+" not in result.workload or result.workload == workload
            if result.device == "cpu" and result.ranked and plain:
                results[result.cell_id] = result
    known = Here(
        f"{newest['host']}, {newest['cpu_model'] or 'unknown processor'},"
        f" {newest['cpu_cores']} cores",
        int(newest["cpu_cores"]),
        int(newest["memory_bytes"]),
        (),
        links,
    )
    cells = tuple(filter(None, (_measured(result, known) for result in results.values())))
    if not cells:
        named = ", ".join(repr(str(folder)) for folder in folders)
        raise UsageError(
            f"no verified cell on CPU cores in {named}; measure some on this machine first, such as"
            " those of matrix smoke"
        )
    return dataclasses.replace(known, cells=cells)


def _measured(result: CellResult, here: Here) -> MeasuredCell | None:
    """None for a cell whose strategy or workload is not there any more."""
    cell = Cell(**json.loads(result.cell))
    try:
        facts = facts_of(cell, here)
    except (Refused, Unavailable, UsageError):
        return None
    assert result.samples_per_second, "a ranked cell has a throughput"
    low, high = result.samples_per_second_low, result.samples_per_second_high
    return MeasuredCell(
        result,
        cell,
        Measured(
            facts,
            cell.global_batch / result.samples_per_second,
            result.peak_memory_bytes,
            cell.global_batch / high if high else None,
            cell.global_batch / low if low else None,
        ),
    )


def facts_of(cell: Cell, here: Here) -> CellFacts:
    """What a prediction of the cell rests on, by the formulas of its strategy and the counts of its
    workload.

    Where a strategy has no formula for its states, the model's are divided by the axes that cut it;
    where it has none for its traffic, see `sent_bytes`. Raises Refused, Unavailable or UsageError.
    """
    workload = make_workload(cell.workload)
    strategy = make_strategy(cell)
    layout = strategy.layout(cell.devices)
    facts = model_facts(workload, cell.sequence_length)
    split = layout.pipeline * layout.tensor
    states = strategy.states(cell, layout, facts) or divided(model_states(cell, facts), split)
    # Ranks that train the same part of the model; some of them may share the tokens of a sample.
    replicas = layout.devices // split
    shared = replicas // layout.data
    samples = max(1, cell.global_batch // layout.data // cell.micro_batches)
    precision, engine = workload.arithmetic or cell.precision, engine_of(strategy, cell.strategy)
    counted = operators(workload, samples, cell.sequence_length, cell.recompute, precision)
    more = strategy.recomputed_flops(cell, workload) if cell.recompute != "none" else 0.0
    link = here.link_of(cell.links) if cell.nodes > 1 and cell.links else None
    return CellFacts(
        workload=cell.workload,
        setting=Setting.of(cell).text,
        links=cell.links,
        label=cell.label,
        precision=precision,
        engine=engine,
        exact=strategy.tolerance(cell, workload) == EXACT,
        stand_in=stand_in_of(strategy, cell, workload) is not None,
        data=replicas,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        cores=max(1, here.cores // cell.threads_per_device),
        micro_batches=cell.micro_batches,
        flops=float(facts.flops_per_sample * cell.global_batch) + more,
        operators=counted.number,
        convolutions=counted.convolutions,
        moved_bytes=counted.moved_bytes / shared,
        tensors=1 if cell.optimizer == "adamw_fused" else len(facts.sizes),
        state_bytes=states.total - states.library,
        library_bytes=states.library,
        transient_bytes=states.transient,
        trained_bytes=facts.trained_bytes / split,
        optimizer_bytes=states.optimizer,
        activation_bytes=counted.held_bytes / shared,
        served=layout.servers > 0,
        flat=strategy.copies_to_flat_buffers,
        sent_bytes=sent_bytes(cell, strategy, layout, facts, workload),
        messages=messages(cell, strategy, layout, facts, workload.blocks),
        sharded=strategy.shards_parameters,
        in_memory=strategy.in_memory,
        disk_bytes=0.0 if layout.servers else strategy.moved_bytes(cell, layout, facts),
        threads=layout.devices_per_process,
        coded_elements=2.0 * sum(facts.sizes) if cell.optimizer == "adamw_8bit" else 0.0,
        optimizer_flops=optimizer_flops(cell, workload, facts),
        link_bytes_per_second=link.bits_per_second / 8
        if link and link.bits_per_second
        else float("inf"),
        link_seconds=link.delay_seconds if link else 0.0,
    )


def cell_in(setting: Setting, strategy: str, **more: object) -> Cell:
    """Returns the cell of a strategy in a setting; `more` are further fields of the cell.

    Raises UsageError for an unknown strategy or option.
    """
    fields = dataclasses.asdict(setting) | more | {"strategy": strategy}
    return with_defaults(Cell.model_validate(fields))


def usual_setting(cells: Iterable[MeasuredCell]) -> Setting:
    """The setting that most cells were measured in."""
    return Counter(Setting.of(cell.cell) for cell in cells).most_common(1)[0][0]


def data_for(workload: str, setting: Setting) -> str:
    """Returns the setting's data for its own workload, else the default data of the workload's
    kind."""
    if workload == setting.workload:
        return setting.data
    return "images" if make_workload(workload).kind == "image" else "stdlib"


def variants_of(
    setting: Setting, here: Here, with_measured: bool = True
) -> tuple[list[Variant], Counter[str]]:
    """The cells of a setting that can run here, and why others cannot: each strategy with its
    defaults, and with the options that were measured in any setting.

    `with_measured`: cells of the setting that were measured carry their figures.
    """
    asked: dict[tuple[object, ...], Cell] = {}
    refused: Counter[str] = Counter()
    measured = {
        (Setting.of(known.cell), _series(known.cell)): known.measured for known in here.cells
    }
    for strategy, more in _series_known(here):
        try:
            cell = cell_in(setting, strategy, **more)
            if not more and make_strategy(cell).layout(setting.devices).pipeline > 1:
                cell = cell.model_copy(update={"micro_batches": PIPELINE_MICRO_BATCHES})
            validate(cell, make_workload(cell.workload))
            if reason := make_strategy(cell).stand_in(cell):
                raise Refused(f"only a stand-in runs on CPU cores: {reason}")
        except (Refused, Unavailable, UsageError) as error:
            refused[str(error)] += 1
            continue
        asked.setdefault(_series(cell), cell)
    variants = [
        Variant(
            cell,
            facts_of(cell, here),
            measured.get((setting, key)) if with_measured else None,
        )
        for key, cell in asked.items()
    ]
    return variants, refused


def _series_known(here: Here) -> list[tuple[str, dict[str, object]]]:
    """Strategies with settings of their own: what was measured, and the defaults of each."""
    known: dict[str, tuple[str, dict[str, object]]] = {}
    for measured in here.cells:
        cell = measured.cell
        more = {name: getattr(cell, name) for name in SERIES if name != "strategy"}
        known.setdefault(str((cell.strategy, more)), (cell.strategy, more))
    for name, kind in strategies().items():
        if not any(field.is_required() for field in kind.model_fields.values()):
            known[name] = (name, {})
    return list(known.values())


def _series(cell: Cell) -> tuple[object, ...]:
    """Returns which strategy trains a cell and how, with its options written out: cells that leave
    an option at its default are equal to those that give it. Options that an older record lacks
    are today's defaults."""
    known = cell if cell.defaults is not None else with_defaults(cell)
    options = json.dumps({**(known.defaults or {}), **cell.options}, sort_keys=True)
    return tuple(options if name == "options" else getattr(cell, name) for name in SERIES)

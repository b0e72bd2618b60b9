"""Reads this machine's measurements and describes the suite's cells to the planner."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import SERIES, Setting, series
from harness.analysis.summary import cell_results
from harness.planner.local.cpu_prediction import CellFacts, Observation
from harness.planner.local.local_plan import LocalVariant
from harness.record.store import Store
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.link import Link
from harness.spec.text import plural
from harness.spec.training import EXACT, Layout, States
from harness.strategy.base import Strategy
from harness.strategy.formulas import BESIDE_BACKWARD, all_reduced, model_states, passed_once
from harness.strategy.optimizers import hidden_matrices
from harness.strategy.registry import (
    make_strategy,
    stand_in_of,
    strategies,
    validate,
    with_defaults,
)
from harness.workloads import Workload, make_workload
from harness.workloads.counts import ModelFacts, model_facts
from harness.workloads.operators import operators

PIPELINE_MICRO_BATCHES = 4
"""Micro-batches of an unmeasured pipeline, as in the matrices for CPU cores."""
UNSHAPED_BYTES_PER_SECOND = 1.2e9
"""Assumed rate between emulated nodes without a measured unshaped link."""
WIRE_SHARE = 0.95
"""Share of a link's bytes that is payload rather than TCP and Ethernet headers."""


def _divided(states: States, parts: int) -> States:
    return States(
        **{field.name: getattr(states, field.name) / parts for field in dataclasses.fields(states)}
    )


def sent_bytes(
    cell: Cell, strategy: Strategy, layout: Layout, facts: ModelFacts, workload: Workload
) -> float:
    """Returns bytes that a rank sends in a step, by the strategy's formula.

    All bytes of a parameter server count. Without a formula, each axis sends once per cycle. The
    data axis averages gradients, plus half as many bytes for sharded parameters (ZeRO, arXiv
    1910.02054, section 7). The tensor axis has four all-reduces per block (Megatron-LM, arXiv
    1909.08053, section 3).
    """
    if layout.servers:
        return strategy.costs.disk_or_host_bytes(cell, layout, facts)
    by_formula = strategy.costs.traffic(cell, layout, facts)
    if by_formula is not None:
        return by_formula
    trained = facts.trained_bytes / (layout.pipeline * layout.tensor)
    total = passed_once(layout.data, trained * (3.0 if strategy.costs.shards_parameters else 2.0))
    if layout.tensor > 1 or layout.pipeline > 1:
        hidden = 4.0 * cell.global_batch / layout.data * cell.sequence_length * workload.hidden_size
        total += all_reduced(layout.tensor, 4 * workload.blocks / layout.pipeline * hidden)
        total += passed_once(layout.pipeline, 2 * hidden)
    cycle = 1 if strategy.tolerance(cell, workload) == EXACT else strategy.cycle
    return total / cycle


def engine_of(strategy: Strategy, name: str) -> str:
    library = strategy.costs.backend_library or name
    return f"{library}, sharded" if strategy.costs.shards_parameters else library


def optimizer_flops(cell: Cell, workload: Workload, facts: ModelFacts) -> float:
    """Returns matrix-product operations of a rank's update.

    Only Muon has any: five Newton-Schulz iterations (https://kellerjordan.github.io/posts/muon/) of
    4 n^2 m + 2 n^3 for n x m elements, n <= m; 0 if the hidden size is unknown.
    """
    hidden = workload.hidden_size
    if cell.optimizer != "muon" or not hidden:
        return 0.0
    sides = [sorted((hidden, size // hidden)) for size in hidden_matrices(facts, workload)]
    return float(sum(5 * (4 * n * n * m + 2 * n**3) for n, m in sides))


def messages(
    cell: Cell, strategy: Strategy, layout: Layout, facts: ModelFacts, blocks: int
) -> float:
    """Returns collectives and transfers in a step, by the strategy's formula.

    Without one, the tensor axis has four per block (see `sent_bytes`), a pipeline two per
    micro-batch. The data axis has one, or three per block for sharded parameters.
    """
    by_formula = strategy.costs.messages(cell, layout, facts) if layout.devices > 1 else 0.0
    if by_formula is not None:
        return by_formula
    count = 0.0
    if layout.tensor > 1:
        count += 4.0 * blocks * cell.micro_batches / layout.pipeline
    if layout.pipeline > 1:
        count += 2.0 * BESIDE_BACKWARD * cell.micro_batches
    if layout.data > 1:
        sharded = 3.0 * (blocks + 1) * cell.micro_batches
        count += sharded if strategy.costs.shards_parameters else 1.0
    return count


@dataclass(frozen=True)
class LocalCell:
    result: CellResult
    cell: Cell
    observation: Observation


@dataclass(frozen=True)
class LocalMeasurements:
    machine: str
    cores: int
    memory_bytes: int
    cells: tuple[LocalCell, ...]
    links: dict[str, Link]
    """Measured rate and delay of each emulated link, by text such as `1gbit`."""

    def link_of(self, text: str) -> Link:
        """Returns the measured rate and delay between emulated nodes, else the requested ones."""
        if text in self.links:
            return self.links[text]
        requested = Link.of(text)
        rate = requested.bits_per_second
        unshaped = 8 * UNSHAPED_BYTES_PER_SECOND
        return Link(min(unshaped, WIRE_SHARE * rate) if rate else unshaped, requested.delay_seconds)


def read_measurements(folders: Sequence[Path], workload: str | None = None) -> LocalMeasurements:
    """Reads the newest result of each verified CPU cell of the newest run's machine; raises
    UsageError without any. Omits workloads with a suffix, except `workload`."""
    tables = [Store(folder).load(steps=False) for folder in folders]
    rows = [row for table in tables for row in table.runs.to_dict("records")]
    ages = {str(row["run_id"]): (row["started_at"], str(row["run_id"])) for row in rows}
    newest = max(rows, key=lambda row: ages[str(row["run_id"])])
    same_machine = {
        str(row["run_id"])
        for row in rows
        if (row["cpu_model"], row["cpu_cores"]) == (newest["cpu_model"], newest["cpu_cores"])
    }
    links: dict[str, Link] = {}
    results: dict[str, CellResult] = {}
    for table in tables:
        trials = table.trials[table.trials["run_id"].isin(list(same_machine))]
        for text, rows_of in trials[trials["links"].notna()].groupby("links"):
            rate = float(rows_of["link_bits_per_second"].median())
            delay = float(rows_of["link_latency_seconds"].median())
            if text and rate > 0:
                links[str(text)] = Link(rate, max(0.0, delay))
        for result in sorted(cell_results(trials), key=lambda result: ages[result.run_id]):
            plain = "+" not in result.cell.workload or result.cell.workload == workload
            if result.cell.device == "cpu" and result.ranked and plain:
                results[result.cell_id] = result
    without_cells = LocalMeasurements(
        f"{newest['host']}, {newest['cpu_model'] or 'unknown processor'},"
        f" {plural(int(newest['cpu_cores']), 'core')}",
        int(newest["cpu_cores"]),
        int(newest["memory_bytes"]),
        (),
        links,
    )
    cells = tuple(filter(None, (_local_cell(result, without_cells) for result in results.values())))
    if not cells:
        named = ", ".join(repr(str(folder)) for folder in folders)
        raise UsageError(
            f"no verified cell on CPU cores in {named}; measure some on this machine first, such as"
            " matrix smoke"
        )
    return dataclasses.replace(without_cells, cells=cells)


def _local_cell(result: CellResult, measured: LocalMeasurements) -> LocalCell | None:
    cell = result.cell
    try:
        facts = facts_of(cell, measured)
    except (Refused, Unavailable, UsageError):
        return None
    assert result.speed.samples_per_second, "a ranked cell has a throughput"
    low, high = result.speed.samples_per_second_low, result.speed.samples_per_second_high
    return LocalCell(
        result,
        cell,
        Observation(
            facts,
            cell.global_batch / result.speed.samples_per_second,
            result.memory.peak_memory_bytes,
            cell.global_batch / high if high else None,
            cell.global_batch / low if low else None,
        ),
    )


def facts_of(cell: Cell, measured: LocalMeasurements) -> CellFacts:
    """Returns a cell's facts from the strategy's formulas and the workload's counts.

    Without a formula for states, pipeline and tensor ranks share the model's equally. Raises
    Refused, Unavailable or UsageError.
    """
    workload = make_workload(cell.workload)
    strategy = make_strategy(cell)
    costs = strategy.costs
    layout = strategy.layout(cell.devices)
    facts = model_facts(workload, cell.sequence_length)
    split = layout.pipeline * layout.tensor
    states = costs.states(cell, layout, facts) or _divided(model_states(cell, facts), split)
    # Ranks that train the same part of the model; some may share a sample's tokens.
    replicas = layout.devices // split
    shared = replicas // layout.data
    samples = max(1, cell.global_batch // layout.data // cell.micro_batches)
    precision, engine = workload.arithmetic or cell.precision, engine_of(strategy, cell.strategy)
    counted = operators(workload, samples, cell.sequence_length, cell.recompute, precision)
    more = costs.recomputed_flops(cell, workload) if cell.recompute != "none" else 0.0
    link = measured.link_of(cell.links) if cell.nodes > 1 and cell.links else None
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
        cores=max(1, measured.cores // cell.threads_per_device),
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
        flat=costs.copies_to_flat_buffers,
        sent_bytes=sent_bytes(cell, strategy, layout, facts, workload),
        messages=messages(cell, strategy, layout, facts, workload.blocks),
        sharded=costs.shards_parameters,
        uses_shared_memory=costs.uses_shared_memory,
        disk_bytes=0.0 if layout.servers else costs.disk_or_host_bytes(cell, layout, facts),
        threads=layout.devices_per_process,
        coded_elements=2.0 * sum(facts.sizes) if cell.optimizer == "adamw_8bit" else 0.0,
        optimizer_flops=optimizer_flops(cell, workload, facts),
        link_bytes_per_second=(link.bits_per_second or float("inf")) / 8 if link else float("inf"),
        link_seconds=link.delay_seconds if link else 0.0,
    )


def cell_in(setting: Setting, strategy: str, **more: object) -> Cell:
    """Returns a strategy's cell with the plain recipe; raises UsageError for an unknown strategy or
    option."""
    fields = dataclasses.asdict(setting) | more | {"strategy": strategy}
    del fields["recipe"]
    return with_defaults(Cell.model_validate(fields))


def data_for(workload: str, setting: Setting) -> str:
    """Returns the setting's data for its own workload, else the default for the workload's kind."""
    if workload == setting.workload:
        return setting.data
    return "images" if make_workload(workload).kind == "image" else "stdlib"


def variants_of(
    setting: Setting, measured: LocalMeasurements, with_observations: bool = True
) -> tuple[list[LocalVariant], Counter[str]]:
    """Returns a setting's runnable cells, with default and measured options, and why others cannot
    run."""
    runnable: dict[tuple[object, ...], Cell] = {}
    refused: Counter[str] = Counter()
    observations = {
        (Setting.of(cell.cell), _series(cell.cell)): cell.observation for cell in measured.cells
    }
    for strategy, more in _known_series(measured):
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
        runnable.setdefault(_series(cell), cell)
    variants = [
        LocalVariant(
            cell,
            facts_of(cell, measured),
            observations.get((setting, key)) if with_observations else None,
        )
        for key, cell in runnable.items()
    ]
    return variants, refused


def _known_series(measured: LocalMeasurements) -> list[tuple[str, dict[str, object]]]:
    series: dict[str, tuple[str, dict[str, object]]] = {}
    for local in measured.cells:
        cell = local.cell
        more = {name: getattr(cell, name) for name in SERIES if name != "strategy"}
        series.setdefault(str((cell.strategy, more)), (cell.strategy, more))
    for name, kind in strategies().items():
        if not any(field.is_required() for field in kind.model_fields.values()):
            series[name] = (name, {})
    return list(series.values())


def _series(cell: Cell) -> tuple[object, ...]:
    """Returns a key shared by equivalent cells; older records get today's defaults."""
    return series(cell if cell.defaults else with_defaults(cell))

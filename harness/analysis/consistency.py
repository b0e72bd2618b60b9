"""Checks that the values of each recorded row agree, such as a verdict and its deviations."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ValidationError

from harness.analysis.cell_result import VERIFIED, WORST_VERDICT_FIRST
from harness.analysis.estimates import computing, mean_window, windows_of
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.cell.redaction import REDACTED
from harness.cell.training import EXACT, HALF_PRECISIONS, WIDEST_BY_NOISE
from harness.record.files import (
    FIRST_WITH_CELL_IDS,
    VERSION,
    copied_digest,
    names_digest,
    read_file,
)
from harness.record.plan import Plan, foreign_names
from harness.record.run_record import RunRecord
from harness.record.store import (
    Checked,
    Problem,
    Store,
    TrialKey,
    check_folder,
    file_problems,
    files_of,
    is_plain_name,
    json_problem,
    stores_below,
    table_of,
)
from harness.record.trial import WORST_FIRST, TrialRecord, cell_columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

JSON_COLUMNS: dict[str, type[object]] = {
    "plan": dict,
    "libraries": dict,
    "gpu_facts": list,
    "gpu_topology": list,
    "numa": list,
    "allocation": object,
}
Finding: TypeAlias = tuple[str, str]
"""Column with a wrong value, and what is wrong with it."""
VOCABULARY: dict[str, tuple[str, ...]] = {
    "status": WORST_FIRST,
    "parity_verdict": WORST_VERDICT_FIRST,
    "device": ("cpu", "cuda"),
    "regime": ("strong", "weak"),
    "phase": ("warmup", "settling", "timed"),
}
SIZES = re.compile(
    r".*(_seconds|_seconds_p50|_seconds_p95|_bytes|_per_second|_per_step|_deviation|_tolerance)"
)
HEX = {"data_fingerprint": r"[0-9a-f]{64}", "git_commit": r"[0-9a-f]{7,40}\+?"}
NEAR = 1e-6
CYCLES = 2.0
"""Maximum factor between the recorded throughput and the one that follows from step times. They
differ because some strategies communicate only every few steps."""


def check(path: Path) -> Checked:
    """Checks a parquet file, or every results folder at or below a folder."""
    if path.is_file():
        table, problems = table_of(path)
        problems = problems or list(file_problems(table, path))
        return Checked(1, tuple(problems or row_problems(table, path)))
    parts = [_checked_store(store) for store in stores_below(path)]
    return Checked(
        sum(part.files for part in parts),
        tuple(p for part in parts for p in part.problems),
        tuple(sorted({name for part in parts for name in part.foreign_names})),
    )


def _checked_store(store: Store) -> Checked:
    checked = check_folder(store)
    problems = list(checked.problems)
    skipped = {problem.file for problem in problems}
    runs = {file.stem for file in (store.folder / "runs").glob("*.parquet")}
    missing, foreign = set(), set()
    for table, file in files_of(store.folder):
        if file not in skipped:
            problems += row_problems(table, file)
            foreign |= _foreign_names(file) if table == "runs" else set()
        if table != "runs" and file.parent.name not in runs:
            missing.add(file.parent)
    problems += [
        Problem(folder, f"runs/{folder.name}.parquet is missing, so this folder is not read")
        for folder in sorted(missing)
    ]
    return Checked(checked.files, tuple(problems), tuple(foreign))


def _foreign_names(file: Path) -> set[str]:
    """Returns the code and hub ids that a run's plan names."""
    (row,) = read_file("runs", file).to_pylist()
    try:
        plan = Plan.from_row(row)
    except UsageError:  # reported as a problem
        return set()
    cells = [*plan.cells, *(left.cell for left in plan.left_out)]
    return {name for cell in cells for name in foreign_names(cell)}


def row_problems(table: str, file: Path) -> Iterator[Problem]:
    """Yields what is wrong with the rows of an undamaged file."""
    rows = read_file(table, file)
    for column, row, what in _column_findings(rows):
        yield Problem(file, what, False, column, row)
    for row, findings in enumerate(_record_findings(table, rows)):
        for column, what in findings:
            yield Problem(file, what, False, column, row)
    if table == "trials":
        yield from _keys(file, rows)


def _record_findings(table: str, rows: pa.Table) -> list[list[Finding]]:
    if table == "runs":
        runs = RunRecord.from_frame(rows.to_pandas())
        return [[found for rule in RUN_RULES for found in rule(run)] for run in runs]
    if table == "trials":
        trials = TrialRecord.from_frame(rows.to_pandas())
        return [[found for rule in TRIAL_RULES for found in rule(trial)] for trial in trials]
    return []


def _keys(file: Path, rows: pa.Table) -> Iterator[Problem]:
    columns = (rows.column(name).to_pylist() for name in ("cell_id", "trial", "attempt"))
    keys = [TrialKey(*key) for key in zip(*columns, strict=True)]
    for key, count in Counter(keys).items():
        if count > 1:
            what = f"{count} rows have cell {key.cell_id}, trial {key.trial}, attempt {key.attempt}"
            yield Problem(file, what, False, "trial", len(keys) - 1 - keys[::-1].index(key))
    digest = copied_digest(file)
    if digest is not None and digest != names_digest(f"{key.stem}.parquet" for key in keys):
        yield Problem(file, "the digest of its trials differs: rows were added or removed", False)


def _column_findings(rows: pa.Table) -> Iterator[tuple[str, int, str]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    for name, column in zip(rows.column_names, rows.columns, strict=True):
        allowed, wrong = "", None
        if name in VOCABULARY:
            values = VOCABULARY[name]
            wrong = pc.and_(column.is_valid(), pc.invert(pc.is_in(column, pa.array(values))))
            allowed = f"one of: {', '.join(values)}"
        elif name == "schema_version":
            wrong, allowed = pc.greater(column, VERSION), f"at most {VERSION}"
        elif name in HEX:
            wrong = pc.invert(pc.match_substring_regex(column, f"^{HEX[name]}$"))
            allowed = "a digest in hex digits"
        elif SIZES.fullmatch(name) and not pa.types.is_list(column.type):
            wrong = pc.or_(pc.less(column, 0), pc.invert(pc.is_finite(column)))
            allowed = "a finite number that is not negative"
        if wrong is not None:
            for row in pc.indices_nonzero(wrong.combine_chunks().fill_null(False)).to_pylist():
                yield name, row, f"{column[row].as_py()!r} is not {allowed}"


def _run_texts(run: RunRecord) -> Iterator[Finding]:
    if not is_plain_name(run.run_id):
        yield "run_id", f"{run.run_id!r} is not a plain file name"
    for name, kind in JSON_COLUMNS.items():
        text = getattr(run, name)
        if text and (what := json_problem(text, kind)):
            yield name, what


def _identity(trial: TrialRecord) -> Iterator[Finding]:
    if REDACTED in trial.cell:
        return
    try:
        cell = Cell.model_validate_json(trial.cell)
    except ValidationError as error:
        yield "cell", f"it does not describe a cell: {error.errors()[0]['msg']}"
        return
    if cell.id != trial.cell_id and trial.schema_version >= FIRST_WITH_CELL_IDS:
        yield "cell_id", f"it is {trial.cell_id}, but the cell has id {cell.id}"
    for name, value in cell_columns(cell).items():
        recorded = getattr(trial, name)
        if name not in ("cell", "cell_id", "launcher") and recorded != value:
            yield name, f"it is {recorded!r}, but the cell has {value!r}"


def _outcome(trial: TrialRecord) -> Iterator[Finding]:
    verdict = trial.parity_verdict
    if trial.status == "ok":
        for name in ("samples_per_second", "step_seconds_p50"):
            if not getattr(trial, name):
                yield name, "it is missing, though status is ok"
    elif not trial.reason:
        yield "reason", f"it is empty, though status is {trial.status}"
    if (trial.status == "diverged") != (verdict == "diverged"):
        yield "parity_verdict", f"it is {verdict or 'missing'}, though status is {trial.status}"
    elif verdict and trial.status not in ("ok", "diverged"):
        yield "parity_verdict", f"it is {verdict}, though status is {trial.status}"


def _verdict(trial: TrialRecord) -> Iterator[Finding]:
    verdict, loss = trial.parity_verdict, trial.parity_max_loss_deviation
    if trial.reference_losses and loss is not None:
        deviation = max(loss_deviations(trial.losses, trial.reference_losses))
        if not math.isclose(deviation, loss, rel_tol=NEAR, abs_tol=1e-12):
            yield (
                "parity_max_loss_deviation",
                f"it is {loss:.3g}, but losses and reference_losses differ by {deviation:.3g}",
            )
    if verdict == "diverged" and not trial.parity_reason:
        yield "parity_reason", "it is empty, though parity_verdict is diverged"
    if verdict not in VERIFIED:
        return
    if not trial.reference_losses:
        yield "reference_losses", f"they are missing, though parity_verdict is {verdict}"
    for name in ("loss", "update"):
        column = f"parity_max_{name}_deviation"
        deviation, limit = getattr(trial, column), getattr(trial, f"parity_{name}_tolerance")
        if deviation is None or limit is None:
            yield column, f"it or its tolerance is missing, though parity_verdict is {verdict}"
        elif deviation > limit:
            yield (
                "parity_verdict",
                f"it is {verdict}, but {column} {deviation:.3g} exceeds its tolerance {limit:.3g}",
            )
    exact = EXACT.loss if trial.precision in HALF_PRECISIONS else WIDEST_BY_NOISE["fp32"][0]
    if verdict == "exact" and loss is not None and loss > exact:
        yield (
            "parity_verdict",
            f"it is exact, but parity_max_loss_deviation {loss:.3g} exceeds {exact:.0e}",
        )


def _figures(trial: TrialRecord) -> Iterator[Finding]:
    rate, step, tokens = trial.samples_per_second, trial.step_seconds_p50, trial.tokens_per_second
    batch = trial.global_batch
    if rate and step:
        expected = batch / step
        # A median hides the few steps in which a strategy communicates.
        usual = [rate * seconds for seconds in (step, trial.step_seconds_mean or step)]
        if not any(batch / CYCLES <= rows <= batch * CYCLES for rows in usual):
            reached = f"{batch} samples in {step:.4g} s are {expected:.4g}"
            yield "samples_per_second", f"it is {rate:.4g}, but {reached}"
        slow = trial.step_seconds_p95
        if slow is not None and slow < step:
            yield "step_seconds_p95", f"it is {slow:.4g}, less than step_seconds_p50 {step:.4g}"
    if rate and tokens:
        expected = rate * trial.sequence_length
        if not math.isclose(tokens, expected, rel_tol=NEAR):
            yield (
                "tokens_per_second",
                f"it is {tokens:.6g}, but samples_per_second x sequence_length is {expected:.6g}",
            )
    ranks, peak = trial.peak_memory_bytes_by_rank, trial.peak_memory_bytes
    if ranks and peak != max(ranks):
        yield "peak_memory_bytes", f"it is {peak}, but the largest peak of a rank is {max(ranks)}"
    if trial.mfu is not None and not 0 <= trial.mfu <= 1:
        yield "mfu", f"{trial.mfu:.3g} is not between 0 and 1"


RUN_RULES: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (_run_texts,)
TRIAL_RULES: tuple[Callable[[TrialRecord], Iterator[Finding]], ...] = (
    _identity,
    _outcome,
    _verdict,
    _figures,
)


def mean_losses(ranks: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Averages each step's losses over the ranks that have a loss."""
    losses: list[float | None] = []
    for step in zip(*ranks, strict=True):
        have = [loss for loss in step if loss is not None]
        losses.append(sum(have) / len(have) if have else None)
    return losses


def first_known(ranks: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Returns each step's value from the first rank that has a value."""
    return [next((v for v in step if v is not None), None) for step in zip(*ranks, strict=True)]


def loss_deviations(losses: Sequence[float | None], reference: Sequence[float]) -> list[float]:
    """Returns |loss - reference| / |reference| by step; infinite if a loss is missing or not
    finite."""
    gaps = []
    for step, expected in enumerate(reference):
        loss = losses[step] if step < len(losses) else None
        if loss is None or not math.isfinite(loss):
            gaps.append(math.inf)
        else:
            gaps.append(abs(loss - expected) / max(abs(expected), 1e-12))
    return gaps


@dataclass(frozen=True)
class Pass:
    """Consecutive steps up to a rewind or to the end."""

    first: int
    losses: tuple[float | None, ...]

    def before(self, step: int) -> tuple[float | None, ...]:
        return self.losses[: max(0, step - self.first)]

    def since(self, step: int) -> tuple[float | None, ...]:
        return self.losses[max(0, step - self.first) :]


def passes(
    losses: Sequence[float | None], training_steps: Sequence[int | None]
) -> tuple[Pass, ...]:
    """Splits losses at rewinds. `training_steps`: step of each loss; None means its index."""
    steps = [number if step is None else step for number, step in enumerate(training_steps)]
    starts = [i for i, step in enumerate(steps) if i == 0 or step != steps[i - 1] + 1]
    return tuple(
        Pass(steps[begin], tuple(losses[begin:end]))
        for begin, end in itertools.pairwise((*starts, len(steps)))
    )


BLOCK = 12
"""Maximum number of consecutive trials in which the machine's speed counts as constant."""
SHUFFLES = 2000
LEAST_PROBABILITY = 0.01
FEWEST_LABELS = 2


@dataclass(frozen=True)
class ControlLevel:
    launcher: str
    ratio: float
    """Control time over the median of neighbouring trials."""
    low: float
    high: float
    """Upper end of the ratio's 95% interval."""
    trials: int


@dataclass(frozen=True)
class ControlLevels:
    launchers: tuple[ControlLevel, ...]
    labels: int
    probability: float
    """Probability of at least this difference by chance, by shuffling labels within blocks of
    consecutive trials."""

    @property
    def by_chance(self) -> bool:
        return self.probability > LEAST_PROBABILITY


def control_levels(trials: Sequence[TrialRecord]) -> ControlLevels | None:
    """Returns levels over trials with a core per rank; None if they have fewer than two labels."""
    blocks = _blocks(trials)
    trials = [trial for block in blocks for trial in block]
    deviations = [value for block in blocks for value in _deviations(block)]
    names = sorted(set(map(_label, trials)))
    if len(names) < FEWEST_LABELS:
        return None
    by_launcher: dict[str, list[float]] = defaultdict(list)
    for trial, value in zip(trials, deviations, strict=True):
        by_launcher[str(trial.launcher)].append(value)
    levels = [_level(name, values) for name, values in sorted(by_launcher.items())]
    return ControlLevels(tuple(levels), len(names), _probability(blocks, deviations, names))


def _label(trial: TrialRecord) -> str:
    return f"{trial.strategy} {trial.launcher}"


def _blocks(trials: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    alike: Mapping[Hashable, list[TrialRecord]] = defaultdict(list)
    for trial in sorted(trials, key=lambda trial: trial.started_at):
        if windows_of(trial) and not trial.oversubscribed:
            alike[computing(trial)].append(trial)
    return [
        members[start : start + BLOCK]
        for members in alike.values()
        for start in range(0, len(members), BLOCK)
        if len(members[start : start + BLOCK]) > 1
    ]


def _deviations(block: Sequence[TrialRecord]) -> list[float]:
    logs = [mean_window(windows_of(trial)).control for trial in block]
    middle = statistics.median(logs)
    return [log - middle for log in logs]


def _level(name: str, values: Sequence[float]) -> ControlLevel:
    from scipy.stats import t

    mean, error = statistics.fmean(values), math.inf
    if len(values) > 1:
        standard_error = statistics.stdev(values) / math.sqrt(len(values))
        error = standard_error * float(t.ppf(0.975, len(values) - 1))
    return ControlLevel(
        name, math.exp(mean), math.exp(mean - error), math.exp(mean + error), len(values)
    )


def _probability(
    blocks: Sequence[Sequence[TrialRecord]], deviations: Sequence[float], names: Sequence[str]
) -> float:
    import numpy as np

    chance = np.random.default_rng(0)
    number = {name: i for i, name in enumerate(names)}
    labels = [np.array([number[_label(trial)] for trial in block]) for block in blocks]
    values = np.array(deviations)
    observed = _differences(np.concatenate(labels)[None], values, len(names))
    shuffled = [
        chance.permuted(np.tile(labels_of_block, (SHUFFLES, 1)), axis=1)
        for labels_of_block in labels
    ]
    differences = _differences(np.concatenate(shuffled, axis=1), values, len(names))
    return (1 + int((differences >= observed).sum())) / (1 + SHUFFLES)


def _differences(
    labels: NDArray[np.int64], values: NDArray[np.float64], names: int
) -> NDArray[np.float64]:
    """Returns sums of squares between labels. `labels`: shape [shuffles, trials]; `values`: shape
    [trials]."""
    import numpy as np

    total = np.zeros(len(labels))
    for name in range(names):
        has_name = labels == name
        total += (has_name @ values) ** 2 / has_name.sum(axis=1)
    return total

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.analysis.cell_result import CellResult
from harness.analysis.race import FAR_BEHIND, RACE_ROUNDS, Entrants, contenders, is_decided
from harness.analysis.ranking import (
    against_best,
    compare,
    fairly_timed,
    fastest_first,
    gains,
    half_widths,
    may_be_fastest,
)
from harness.analysis.setting import by_setting, grouped
from harness.analysis.stats import (
    CONFIDENCE,
    EQUAL,
    SMALLEST_EFFECT,
    Comparison,
    LogEstimate,
    ratio,
)
from harness.cell.cell import BASELINE, TECHNIQUES
from harness.cell.errors import plural
from harness.cell.training import half_precision
from harness.record.profile_record import ProfileRecord

SAME_MEMORY = 0.05
"""Peaks within this fraction of the lowest count as equal."""
NEARLY_AS_FAST = 0.03
"""Fraction by which the strategy advised as simplest may be slower."""
MOST_NAMED = 5
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Advice:
    role: str
    """Use, Faster at a price, Least memory, or Simplest."""
    cell: CellResult
    explanation: str
    """Sentences that follow the cell's label."""

    @property
    def sentence(self) -> str:
        return f"{self.cell.cell.label}. {self.explanation}"


@dataclass(frozen=True)
class Answer:
    advice: tuple[Advice, ...]
    may_be_fastest: tuple[CellResult, ...]
    """Cells of the same training that may be the fastest (95% joint confidence), and the
    recommended one."""
    baseline: CellResult | None
    """Recommended unless another cell is known to beat it."""
    reason: str = ""
    """Likely reason for the gain."""

    @property
    def rival(self) -> CellResult | None:
        """Cell whose gain over the baseline matters: the recommended one or, if that is the
        baseline, the fastest other that may be as fast."""
        others = (self.advice[0].cell, *self.may_be_fastest)
        return next((cell for cell in others if cell is not self.baseline and cell.gain), None)

    @property
    def precision(self) -> float | None:
        """Relative half width of the 95% interval of the rival's gain; None without an interval."""
        return self.rival.gain.precision if self.rival and self.rival.gain else None

    @property
    def known_to(self) -> str:
        """States the precision; empty without an interval."""
        if self.rival is None or self.baseline is None or self.precision is None:
            return ""
        return (
            f"throughput of {self.rival.cell.label} relative to {self.baseline.cell.label} is known"
            f" to within ±{self.precision:.1%} (half of the 95% interval)"
        )

    @property
    def caveat(self) -> str:
        """Warnings about the recommendation; empty if there are none."""
        use = self.advice[0].cell
        caveats = []
        share, high = use.relative.efficiency_single, use.relative.efficiency_single_high
        if share and high and high * use.cell.devices < 1:
            caveats.append(
                f"one device alone is {1 / (share * use.cell.devices):.3g} times as fast as"
                f" {use.cell.label}: this model is too small to share"
            )
        if use.cell.device == "cpu":
            caveats.append("measured on CPU cores; on GPUs the order differs")
        if use.cell.devices == 1:
            caveats.append("one device, so nothing is communicated")
        if use.disturbance.trials:
            caveats.append(
                f"something else used the machine in {use.disturbance.trials} of its trials"
            )
        caveats += [
            f"{cell.cell.label} was still warming up: its step time changed by"
            f" {cell.speed.trend:.0%} while it was timed"
            for cell in (use, *([self.baseline] if self.baseline not in (use, None) else []))
            if cell.speed.drifts
        ]
        starts = {cell.placement.launched_by for cell in (use, self.baseline) if cell}
        if use.cell.device == "cpu" and len(starts) > 1:
            caveats.append(
                "the two cells launch ranks differently, which alone changes CPU times by up to 2%"
            )
        if use.parity.verdict != "exact" and not use.parity.fp32_twin:
            caveats.append(
                f"not verified in fp32, so {use.cell.precision} rounding may hide a deviation"
            )
        return "; ".join(filter(None, [*caveats, use.narrow_sums]))


def trustworthy(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns ranked cells without emulated parts and with a core per rank, fastest first."""
    return [
        cell
        for cell in fastest_first(cells)
        if cell.ranked and cell.placement.stand_in is None and not cell.placement.oversubscribed
    ]


def with_verdicts(cells: Sequence[CellResult]) -> list[CellResult]:
    """Adds what holds within a setting: places, gains over the baseline, and which cells may be the
    fastest. The cells must have baselines."""
    ranked = [cell for cell in cells if cell.ranked]
    by_run = grouped(ranked, lambda cell: cell.run_id).values()
    judged = {
        (cell.run_id, cell.cell_id): cell
        for of_run in by_run
        for group in by_setting(of_run)
        for cell in _with_verdict(group)
    }
    return [judged.get((cell.run_id, cell.cell_id), cell) for cell in cells]


def _with_verdict(cells: Sequence[CellResult]) -> list[CellResult]:
    fair = fairly_timed(fastest_first(cells))
    places = {cell.cell_id: place for place, cell in enumerate(fair, 1)}
    over_baseline = _gains(cells)
    compared = []
    for cell in cells:
        relative = replace(cell.relative, place=places.get(cell.cell_id))
        if gain := over_baseline.get(cell.cell_id):
            relative = replace(
                relative,
                over_baseline=gain.ratio,
                over_baseline_low=gain.low,
                over_baseline_high=gain.high,
            )
        compared.append(replace(cell, relative=relative))
    if found := answer(compared):
        fastest = list(found.may_be_fastest)
    else:
        several = any(cell.trials > 1 for cell in fair)
        fastest = [fair[0], *(may_be_fastest(fair) if several else ())]
    ids = {cell.cell_id for cell in fastest}
    return [
        replace(cell, relative=replace(cell.relative, may_be_fastest=cell.cell_id in ids))
        for cell in compared
    ]


def candidates(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns a setting's recommendable cells, fastest first. On one device, these are the baseline
    and variants of the single process."""
    fair = trustworthy(cells)
    baseline = _baseline(fair)
    return [
        cell
        for cell in fair
        if cell.parity.same_training
        and (cell.cell.devices > 1 or cell is baseline or cell.cell.strategy == BASELINE)
    ]


def why_no_advice(cells: Sequence[CellResult]) -> str:
    """Returns why a setting gets no advice; empty if it gets some."""
    if reason := nothing_to_choose(cells):
        return reason
    if any(speed.degrees > 0 for speed in _speeds(candidates(cells)).values()):
        return ""
    return "each cell has one trial; run more to compare"


def nothing_to_choose(cells: Sequence[CellResult]) -> str:
    """Returns why a setting offers no choice, however often its cells run; empty if it does."""
    ranked = [cell for cell in cells if cell.ranked]
    if not ranked:
        return "nothing is ranked"
    if all(cell.placement.oversubscribed for cell in ranked):
        return "more ranks than cores: these times tell you nothing about a real machine"
    fair = trustworthy(cells)
    if not any(cell.parity.same_training for cell in fair):
        without_twin = any(
            half_precision(cell.cell.precision, cell.cell.workload) and not cell.parity.fp32_twin
            for cell in fair
        )
        advice = "; also run these cells in fp32, to show what is rounding" if without_twin else ""
        return f"no cell here is known to train the same as one process{advice}"
    one_device = ranked[0].cell.devices == 1
    if len(candidates(cells)) > 1 or (len(fair) > 1 and not one_device):
        return ""
    if one_device:
        return "one device, so nothing is distributed and there is nothing to choose"
    return "only one variant here trains the same as one process"


def entrants(cells: Sequence[CellResult]) -> list[Entrants]:
    """Returns the cells that compete for trials, by setting with a choice."""
    return [_entrants(group) for group in by_setting(cells) if not nothing_to_choose(group)]


def _entrants(cells: Sequence[CellResult]) -> Entrants:
    advisable = candidates(cells)
    baseline = _baseline(advisable)
    return Entrants(
        _speeds(advisable),
        baseline.cell_id if baseline else "",
        _speeds(_smallest(trustworthy(cells))),
    )


def _speeds(cells: Sequence[CellResult]) -> dict[str, LogEstimate]:
    return {cell.cell_id: speed for cell in cells if (speed := cell.speed.log_throughput)}


def why_no_more_trials(cells: Sequence[CellResult]) -> str:
    coarse, compared = [], 0
    for group in by_setting(cells):
        by_id = {cell.cell_id: cell for cell in group}
        racing = next(iter(entrants(group)), None)
        if racing is None:
            continue
        compared += len(racing.speeds)
        most = max(speed.trials for speed in racing.speeds.values())
        behind = racing.speeds.keys() - contenders(racing.speeds) - racing.smallest.keys()
        coarse += [by_id[name] for name in behind if by_id[name].trials < min(most, RACE_ROUNDS)]
    if not coarse:
        return ""
    counts = sorted({cell.trials for cell in coarse})
    trials = " or ".join(map(str, counts)) + (" trial" if counts == [1] else " trials")
    return (
        f"{len(coarse)} of {compared} cells have {trials} and a wide interval: each is more than"
        f" {FAR_BEHIND} standard errors behind the fastest of its setting, so more trials would not"
        " change the answer"
    )


def undecided(cells: Sequence[CellResult]) -> list[list[CellResult]]:
    """Returns each undecided setting's tied cells and baseline."""
    return [open_ for group in by_setting(cells) if (open_ := _undecided(candidates(group)))]


def _undecided(cells: Sequence[CellResult]) -> list[CellResult]:
    ties = may_be_fastest(cells) if len(cells) > 1 else []
    speeds = [
        cell.speed.log_throughput
        for cell in ties
        if cell.speed.log_throughput and cell.speed.log_throughput.degrees > 0
    ]
    if len(speeds) < len(ties) or is_decided(speeds):
        return []
    baseline = _baseline(cells)
    return [*ties, *([baseline] if baseline and baseline not in ties else [])]


def what_more_would_buy(cells: Sequence[CellResult]) -> str:
    more, seconds, count = 0, 0.0, 0
    for group in undecided(cells):
        speeds = [cell.speed.log_throughput for cell in group if cell.speed.log_throughput]
        widest = max(speeds, key=lambda speed: speed.error)
        plain = replace(widest, allowance=0.0)
        half = half_widths(plain, [plain] * (len(speeds) - 1))[0]
        trials = math.ceil(widest.trials * max(0.0, (half / EQUAL) ** 2 - 1))
        more = max(more, trials)
        seconds += trials * sum(cell.times.wall_seconds or 0.0 for cell in group)
        count += len(group)
    if not more:
        return ""
    minutes, percent = f"{seconds / 60:.0f} min", f"{EQUAL * 100:.0f}%"
    return (
        f"{count} cells may be the fastest, or are the baseline of such cells: up to {more} more"
        f" trials of each ({minutes}) would resolve differences of {percent}"
    )


def answer(
    cells: Sequence[CellResult], profiles: Mapping[str, ProfileRecord] | None = None
) -> Answer | None:
    """Returns the advice for one setting; None if `why_no_advice` gives a reason. `profiles`: by
    cell id."""
    if why_no_advice(cells):
        return None
    fair, advisable = trustworthy(cells), candidates(cells)
    baseline, leaders = _baseline(advisable), may_be_fastest(advisable)
    faster = [cell for cell in advisable if cell.gain and cell.gain.verdict == "faster"]
    better = faster if baseline else []
    use = _chosen(leaders, better, baseline)
    ties = leaders if use in leaders else [use, *leaders]
    advice = [Advice("Use", use, _use(use, advisable, ties, baseline))]
    other = fair[0]
    if other not in advisable and not other.parity.same_training and _faster(other, use):
        advice.append(Advice("Faster at a price", other, _price(other, use)))
    if smallest := _smallest(fair):
        # Cells are sorted by throughput, so the first is the fastest of the smallest.
        least = use if use in smallest else smallest[0]
        advice.append(Advice("Least memory", least, _memory(least, use)))
    near = [cell for cell in advisable if _ratio(cell, advisable[0]) >= 1 - NEARLY_AS_FAST]
    simple = min(near, key=complexity)
    if complexity(simple)[:2] < complexity(use)[:2]:
        advice.append(Advice("Simplest", simple, _simple(simple, use)))
    reason = _reason(use, baseline, profiles or {})
    told = (
        replace(part, explanation=part.explanation + _settings(part.cell, cells, baseline or use))
        for part in advice
    )
    return Answer(tuple(told), tuple(ties), baseline, reason)


def _settings(cell: CellResult, measured: Sequence[CellResult], other: CellResult) -> str:
    """Says in which settings the cell differs from its library's documentation and, if the cell
    was also measured without one of them, how fast it was compared with `other`."""
    text = "; ".join(cell.placement.differences)
    for name in cell.cell.options:
        options = {option: v for option, v in cell.cell.options.items() if option != name}
        label = cell.cell.model_copy(update={"options": options}).label
        plainer = (result for result in measured if result.ranked and result.cell.label == label)
        without = next(plainer, None)
        if f"; {name}=" in f"; {text}" and without:
            text += f"; without {name}, {_slower_or_faster(without, other)}"
    return f" With {text}." if text else ""


def _baseline(cells: Sequence[CellResult]) -> CellResult | None:
    return next((cell for cell in cells if cell.cell_id == cell.relative.baseline), None)


def _gains(cells: Sequence[CellResult]) -> dict[str, Comparison]:
    """Returns throughputs over the baseline's by cell id.

    Intervals of candidates that may be the fastest hold jointly for these alone; those of other
    candidates for all candidates, and the rest for all cells. The gain of a race's winner then
    holds in 95 to 97% of simulated races (docs/studies/statistical-power.md).
    """
    baseline = _baseline(cells)
    usual = baseline.speed.log_throughput if baseline else None
    if baseline is None or usual is None:
        return {}
    advisable = _speeds(candidates(cells))
    near = {cell.cell_id for cell in may_be_fastest(candidates(cells))}
    groups = (
        _speeds(cells),
        advisable,
        {name: speed for name, speed in advisable.items() if name in near},
    )
    found = {baseline.cell_id: Comparison(1.0, None, None, usual.trials)}
    for group in groups:
        others = {name: speed for name, speed in group.items() if name != baseline.cell_id}
        if usual.degrees > 0 and all(speed.degrees > 0 for speed in others.values()):
            found |= zip(others, gains(usual, [*others.values()]), strict=True)
        else:
            found |= {name: ratio(speed, usual) for name, speed in others.items()}
    return found


def _chosen(
    ties: Sequence[CellResult], better: Sequence[CellResult], baseline: CellResult | None
) -> CellResult:
    if baseline is None:
        return min(ties, key=complexity)
    if not better:
        return baseline
    if both := [cell for cell in better if cell in ties]:
        fastest = max(both, key=lambda cell: cell.speed.samples_per_second or 0.0)
        same = [cell for cell in both if _ratio(cell, fastest) >= 1 - SMALLEST_EFFECT]
        return min(same, key=complexity)
    return max(better, key=lambda cell: cell.relative.over_baseline_low or 0.0)


def _reason(
    use: CellResult, baseline: CellResult | None, profiles: Mapping[str, ProfileRecord]
) -> str:
    if baseline is None or use is baseline:
        return ""
    first, second = profiles.get(use.cell_id), profiles.get(baseline.cell_id)
    if first is None or second is None:
        return _sent_less(use, baseline)
    parts = {
        name.removesuffix("_seconds"): (_longest(first, name), _longest(second, name))
        for name in _PARTS
    }
    profiled = {name: (a, b) for name, (a, b) in parts.items() if a is not None and b is not None}
    if not profiled:
        return ""
    name = max(profiled, key=lambda part: profiled[part][1] - profiled[part][0])
    advised, other = profiled[name]
    if advised >= other:
        return ""
    return (
        f"its {name} takes {advised * 1000:.1f} ms per step, that of {baseline.cell.label}"
        f" {other * 1000:.1f} ms"
    )


def _sent_less(use: CellResult, baseline: CellResult) -> str:
    sent, other = use.traffic.sent_bytes_per_step, baseline.traffic.sent_bytes_per_step
    if use.cell.device != "cpu" or not other:
        return ""
    theirs = f"those of {baseline.cell.label} send {other / MIB:.1f} MiB a step over TCP"
    if sent is None:
        return f"its ranks exchange tensors in memory; {theirs}"
    if sent < (1 - EQUAL) * other:
        return f"its ranks send {sent / MIB:.1f} MiB a step over TCP; {theirs}"
    return ""


_PARTS = (
    "compute_seconds",
    "communication_seconds",
    "optimizer_seconds",
    "bubble_seconds",
    "offload_seconds",
    "other_seconds",
)


def _longest(profile: ProfileRecord, name: str) -> float | None:
    return max(getattr(profile, name), default=None)


def change(comparison: Comparison, label: str, alone: bool = False) -> str:
    """Formats as `12.0% faster than ddp (95% interval: 8.0 to 16.1%)`.

    `alone`: whether the interval is of this pair, not joint.
    """
    gain = comparison.ratio - 1
    text = f"{abs(gain):.1%} {'faster' if gain >= 0 else 'slower'} than {label}"
    if comparison.low is None or comparison.high is None:
        return f"{text} (too few trials for an interval)"
    ends = (comparison.low - 1, comparison.high - 1)
    if gain < 0:
        ends = (-ends[1], -ends[0])
    low, high = (f"{end * 100:.1f}".replace("-", "−") for end in ends)
    return f"{text} (95% interval{' of this pair' if alone else ''}: {low} to {high}%)"


def _against(cell: CellResult, other: CellResult) -> tuple[Comparison | None, bool]:
    """Returns the ratio of two cells' throughputs, and whether its interval is of this pair alone.

    If one is the other's baseline, the interval is the joint one that tables show.
    """
    if cell.relative.baseline == other.cell_id:
        return cell.gain, False
    if other.relative.baseline == cell.cell_id and (gain := other.gain):
        low, high = (1 / end if end else None for end in (gain.high, gain.low))
        return Comparison(1 / gain.ratio, low, high, gain.rounds), False
    return compare(cell, other, CONFIDENCE), True


def _slower_or_faster(cell: CellResult, other: CellResult) -> str:
    comparison, alone = _against(cell, other)
    return change(comparison, other.cell.label, alone) if comparison else "About as fast"


def named(cells: Sequence[CellResult]) -> str:
    labels = [cell.cell.label for cell in cells]
    if len(labels) > MOST_NAMED:
        labels = [*labels[:MOST_NAMED], f"{len(labels) - MOST_NAMED} more"]
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _use(
    cell: CellResult,
    advisable: Sequence[CellResult],
    ties: Sequence[CellResult],
    baseline: CellResult | None,
) -> str:
    alike = "train exactly like one process"
    if not all(other.parity.verdict == "exact" for other in advisable):
        alike = f"match one process within {cell.cell.precision} rounding"
    if len(advisable) == 1:
        return f"The only cell here known to {alike}."
    others = [tie for tie in ties if tie is not cell]
    sentences = []
    if baseline is None or cell.gain is None:
        sentences.append("The simplest of those that may be the fastest.")
    elif cell is not baseline:
        sentences.append(f"{change(cell.gain, baseline.cell.label)}.")
    elif others:
        sentences.append("Nothing is known to be faster.")
    if not others:
        return " ".join([*sentences, f"Fastest of {len(advisable)} cells that {alike}."])
    count, equal = plural(len(others), "other"), _equal(ties)
    how = f"{'is' if len(others) == 1 else 'are'} as fast within {EQUAL:.0%}"
    sentences.append(f"{count} {how if equal else 'may be as fast'}: {named(others)}.")
    gain = others[0].gain
    if cell is baseline and not equal and gain and (resolution := gain.precision):
        sentences.append(f"Differences below {resolution:.1%} cannot be resolved by this run.")
    return " ".join(sentences)


def _equal(cells: Sequence[CellResult]) -> bool:
    """Whether none of the cells can be slower than the best of them by more than `EQUAL`."""
    speeds = _speeds(cells)
    if len(speeds) < len(cells) or any(speed.degrees <= 0 for speed in speeds.values()):
        return False
    return all(bound.low >= 1 - EQUAL for bound in against_best([*speeds.values()]))


def _ratio(cell: CellResult, other: CellResult) -> float:
    return (cell.speed.samples_per_second or 0.0) / (other.speed.samples_per_second or 1.0)


def _faster(cell: CellResult, other: CellResult) -> bool:
    ratios = compare(cell, other), _against(cell, other)[0]
    return all(r and r.verdict == "faster" and r.ratio > 1 + EQUAL for r in ratios)


def _price(cell: CellResult, fastest: CellResult) -> str:
    text = _slower_or_faster(cell, fastest)
    reason = cell.parity.reason or "a different training"
    if cell.parity.fp32_twin not in ("", "exact"):
        reason = f"its fp32 run is not exact either ({cell.parity.fp32_twin})"
    deviation = cell.parity.max_loss_deviation
    off = "" if deviation is None else f"; its loss was off by at most {deviation:.1e}"
    return f"{text}, at the price of a different training: {reason}{off}."


def _smallest(cells: Sequence[CellResult]) -> list[CellResult]:
    peaks = {cell.cell_id: peak for cell in cells if (peak := cell.memory.peak_memory_bytes)}
    most = min(peaks.values(), default=0) * (1 + SAME_MEMORY)
    return [cell for cell in cells if 0 < peaks.get(cell.cell_id, 0) <= most]


def _memory(cell: CellResult, fastest: CellResult) -> str:
    peak = cell.memory.peak_memory_bytes or 0
    value, unit = (peak / MIB, "MiB") if peak < GIB else (peak / GIB, "GiB")
    size = f"{value:.3g} {unit}" if value < 999 else f"{value:,.0f} {unit}"
    text = f"{size} on its fullest device"
    if cell is fastest or not fastest.memory.peak_memory_bytes:
        return f"{text}."
    less = 1 - peak / fastest.memory.peak_memory_bytes
    other = "" if cell.parity.same_training else ", and it does not train exactly like one process"
    return (
        f"{text}, {less * 100:.0f}% less than {fastest.cell.label}, at"
        f" {_ratio(cell, fastest) * 100:.0f}% of its throughput{other}."
    )


def complexity(cell: CellResult) -> tuple[int, int, str]:
    """Returns a sort key: packages beyond torch, then non-default options."""
    axes = sum(cell.cell.is_set(name) for name in ("launcher", *TECHNIQUES))
    return len(cell.placement.packages), len(cell.cell.options) + axes, cell.cell.label


def _simple(cell: CellResult, fastest: CellResult) -> str:
    _, options, _ = complexity(cell)
    libraries = "".join(f" and {package}" for package in cell.placement.packages)
    given = f"{options or 'no'} option{'' if options == 1 else 's'}"
    return f"Needs torch{libraries}, with {given}. {_slower_or_faster(cell, fastest)}."

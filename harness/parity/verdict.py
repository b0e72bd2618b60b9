from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.analysis.consistency import loss_deviations
from harness.cell.cell import Cell
from harness.cell.training import (
    CAPPED_ABOVE,
    EXACT,
    REASONS,
    WIDEST_BY_NOISE,
    Layout,
    Tolerance,
)
from harness.parity.reference import Deviations, Noise, all_ranks, largest
from harness.parity.reference_runs import reference_of
from harness.seam.base import Strategy
from harness.seam.checkpoints import MOMENTS_UP_TO
from harness.seam.optimizers import TOLERANCES
from harness.seam.registry import batches_normalised, make_strategy
from harness.workloads import Workload, make_workload
from harness.workloads.counts import model_facts

# Allowed deviation from a reference in this precision, over at most 20 steps; measured in
# docs/studies/parity-deviations.md.
PRECISION = {
    "bf16": Tolerance(
        3e-3, 0.02, "bf16 keeps 8 bits of mantissa: sums in another order round differently"
    ),
    "fp16": Tolerance(
        4e-4, 5e-3, "fp16 keeps 11 bits of mantissa: sums in another order round differently"
    ),
}
HALF_BATCH_NORM = Tolerance(
    2e-2,
    0.4,
    "BatchNorm divides by statistics of rounded activations, which amplifies the rounding",
    other_kinds=0.02,
)
ROUNDED_LOSS = Tolerance(
    1e-2, EXACT.update, "torch's linear_cross_entropy returns a loss that it has rounded to bf16"
)
SPLIT_BATCH_NORM = Tolerance(
    EXACT.loss,
    EXACT.update,
    "BatchNorm normalises each replica's or micro-batch's own samples, in the reference too",
)
TIMES_NOISE = 5.0
"""Allowed multiple of the reference's noise."""
HARDLY_JUDGED = 0.5
"""Median limit of optimizer states above which they are not judged."""


@dataclass(frozen=True)
class ParityVerdict:
    """`exact`, `within tolerance`, `diverged` or `unknown`, with deviations as in table
    `trials`."""

    verdict: str
    reason: str
    max_loss_deviation: float | None
    max_update_deviation: float | None
    worst_tensor: str | None
    loss_tolerance: float
    update_tolerance: float
    max_norm_deviation: float | None = None
    max_element_deviation: float | None = None
    max_decay_deviation: float | None = None
    max_buffer_deviation: float | None = None
    max_moment_deviation: float | None = None
    max_replica_deviation: float | None = None
    moments_skipped_reason: str | None = None


def noise_of(
    losses: Sequence[float | None],
    found: Deviations,
    reference: Sequence[float],
    norms: Iterable[float] = (),
) -> Noise | None:
    """Returns the noise of a second reference run, if it stayed finite. `norms`: deviations of its
    gradient norms."""
    loss, norm = max(loss_deviations(losses, reference)), max(norms, default=0.0)
    finite = math.isfinite(loss) and math.isfinite(norm) and found.finite
    return Noise(loss, found, norm) if finite and found.updates else None


@dataclass(frozen=True)
class Kind:
    """A compared quantity, and its limit as a multiple of the update's declared limit."""

    attribute: str
    in_fp32: float
    in_half: float
    reason: str
    """What a deviation means: a format for the tensor and the deviation."""
    absolute: bool = False
    """Whether `in_fp32` and `in_half` are limits themselves, instead of multiples of the update's
    limit."""
    times_widest_in_fp32: float = 1.0
    """Multiple of WIDEST_BY_NOISE up to which noise widens the limit in fp32."""
    along_weights: bool = False
    """Whether rounding counts in full: a vector of ones rounds alike in all elements."""

    def times_update(self, precision: str) -> float:
        return self.in_half if precision in PRECISION else self.in_fp32


KINDS = (
    Kind("updates", 1.0, 1.0, "parameters of {} are off by {:.2e} of their update"),
    Kind(
        "elements",
        100.0,
        45.0,
        "an element of {} is off by {:.2e} of the update's root mean square",
    ),
    Kind(
        "decays",
        0.1,
        0.1,
        "weight decay of {} looks wrong: it is off by {:.2e} of its update",
        along_weights=True,
    ),
    Kind(
        "directions",
        7.0,
        7.0,
        "weight decay of {} looks wrong: it is off by {:.0f} standard deviations of rounding",
        absolute=True,
    ),
    Kind("buffers", 1.0, 1.0, "buffer {} is off by {:.2e} of its change"),
    # Moments are compared relative to gradients, which may almost cancel.
    Kind(
        "moments",
        1.0,
        5.0,
        "optimizer state {} is off by {:.2e} of its norm",
        times_widest_in_fp32=4.0,
    ),
    Kind("scales", 1.0, 0.5, "optimizer states {} have another scale: most are off by {:.2e}"),
    Kind("coarse", 0.5, 0.5, "optimizer state {} has only 16 bits in {:.0%} of it", absolute=True),
)
"""Compared in this order. The multiples are measured (docs/studies/parity-deviations.md)."""
MOMENTS = KINDS[5]
WITHOUT_NOISE = (KINDS[0], KINDS[-1])
"""Kinds that are judged if an update's declared limit exceeds CAPPED_ABOVE and no noise shows how
far other kinds may be off."""


@dataclass(frozen=True)
class Limits:
    """Limits of a trial's deviations by kind and tensor.

    Each is a multiple of the declared update limit, or of the reference's noise in the same kind
    and tensor if that is more.
    """

    allowed: Tolerance
    precision: str = "fp32"
    roundings: Mapping[str, float] = field(default_factory=dict)
    """What fp32 cannot represent, by tensor (`Reference.roundings`)."""
    noise: Noise | None = None
    capped: bool = True
    """Whether noise widens limits at most to WIDEST_BY_NOISE."""
    most: Tolerance | None = None
    """Limits of losses and updates that nothing widens."""

    @property
    def loss(self) -> float:
        by_noise = TIMES_NOISE * self.noise.loss if self.noise else 0.0
        widest = WIDEST_BY_NOISE[self.precision][0] if self.capped else math.inf
        limit = max(self.allowed.loss, min(by_noise, widest))
        return min(limit, self.most.loss) if self.most else limit

    @property
    def judged(self) -> Sequence[Kind]:
        blind = self.allowed.update > CAPPED_ABOVE and self.noise is None
        return WITHOUT_NOISE if blind else KINDS

    def of(self, kind: Kind, name: str) -> float:
        """Returns the limit of a tensor, or of an optimizer state (`TENSOR STATE`)."""
        times = kind.times_update(self.precision)
        if kind.absolute:
            return times
        updates = kind is KINDS[0]
        as_declared = updates and not (self.allowed.minimum_by_noise and self.noise)
        minimum = self.allowed.minimum_by_noise if updates else self.allowed.others
        declared = self.allowed.update if as_declared else minimum
        rounding = self.roundings.get(_tensor(name), 0.0)
        limit = times * declared + (1.0 if kind.along_weights else times) * rounding
        if self.noise:
            moved = getattr(self.noise.deviations, kind.attribute).get(name, 0.0)
            limit = max(limit, min(TIMES_NOISE * moved, self._widest(kind)))
        return min(limit, self.most.update) if self.most and updates else limit

    def _widest(self, kind: Kind) -> float:
        if not self.capped:
            return math.inf
        times = 1.0 if self.precision in PRECISION else kind.times_widest_in_fp32
        widest = max(WIDEST_BY_NOISE[self.precision][1], self.allowed.update)
        return times * kind.times_update(self.precision) * widest


@dataclass(frozen=True)
class _Excess:
    kind: Kind
    tensor: str
    deviation: float
    limit: float


def parity_verdict(
    losses: Sequence[float | None],
    reference_losses: Sequence[float],
    ranks: Sequence[Deviations],
    all_names: Sequence[str],
    limits: Limits,
    tied: Mapping[str, str] | None = None,
) -> ParityVerdict:
    """Returns the verdict on a trial's losses and deviations. `ranks`: deviations of each rank."""
    tied, allowed = tied or {}, limits.allowed
    gaps, found = loss_deviations(losses, reference_losses), all_ranks(ranks)
    others = {owner: name for name, owner in tied.items()}
    missing = [n for n in all_names if not {n, others.get(n, n)} & found.updates.keys()]
    excesses = _nearest_to_limits(found, limits, tied)
    exact = _nearest_to_limits(found, Limits(EXACT), tied)
    judged = [excess for excess in excesses if excess.kind in limits.judged]
    off = next((e for e in judged if not e.deviation <= e.limit), None)
    if missing:
        word = "diverged"
        reason = f"{len(missing)} parameters could not be compared, e.g. {missing[0]}"
    elif max(gaps) > limits.loss:
        word, reason = "diverged", _loss_reason(gaps, limits.loss)
    elif off:
        word = "diverged"
        reason = f"{off.kind.reason.format(off.tensor, off.deviation)} (allowed {off.limit:.2g})"
    elif max(gaps) <= EXACT.loss and all(e.deviation <= e.limit for e in exact):
        word, reason = "exact", "" if allowed.reason == EXACT.reason else allowed.reason
    elif allowed.reason == EXACT.reason:  # widened by rounding alone
        word, reason = "exact", _rounding_reason(limits.noise)
    else:
        word = "within tolerance"
        reason = REASONS.join(part for part in (allowed.reason, _unjudged(limits, found)) if part)
    update = excesses[0] if excesses and excesses[0].kind is KINDS[0] else None
    return ParityVerdict(
        word,
        # Not joined by REASONS, which would mark a declared different training.
        ", and ".join(part for part in (reason, beyond(limits)) if part),
        max(gaps) if math.isfinite(max(gaps)) else None,
        update.deviation if update and math.isfinite(update.deviation) else None,
        update.tensor if update else None,
        limits.loss,
        update.limit if update else allowed.update,
        max_element_deviation=largest(found.elements.values()),
        max_decay_deviation=largest(found.decays.values()),
        max_buffer_deviation=largest(found.buffers.values()),
        max_moment_deviation=largest(found.moments.values()),
        moments_skipped_reason=_moments_skipped_reason(found, all_names, others),
    )


def _nearest_to_limits(found: Deviations, limits: Limits, tied: Mapping[str, str]) -> list[_Excess]:
    """Returns the tensor nearest to its limit, by kind."""
    nearest = []
    for kind in KINDS:
        values: Mapping[str, float] = getattr(found, kind.attribute)
        allowed = {n: limits.of(kind, _renamed(n, tied)) for n in values}
        shares = {n: value / allowed[n] for n, value in values.items()}
        if shares:
            name = max(shares, key=lambda n: shares[n])
            nearest.append(_Excess(kind, name, values[name], allowed[name]))
    return nearest


def _renamed(name: str, tied: Mapping[str, str]) -> str:
    """Returns a tensor's or state's name in the reference."""
    tensor, space, state = name.partition(" ")
    return tied.get(tensor, tensor) + space + state


def _unjudged(limits: Limits, found: Deviations) -> str:
    """Says what a wide limit leaves unjudged, which is another reason than rounding alone."""
    if limits.allowed.update <= CAPPED_ABOVE:
        return ""
    if limits.noise is None:
        return "only parameters are judged, as no noise bounds other kinds"
    states = [limits.of(MOMENTS, name) for name in found.moments]
    hidden = not states and limits.noise.deviations.moments
    if hidden or (states and statistics.median(states) > HARDLY_JUDGED):
        return "optimizer states cannot be judged"
    return ""


def _tensor(name: str) -> str:
    return name.partition(" ")[0]


def _moments_skipped_reason(
    found: Deviations, all_names: Sequence[str], others: Mapping[str, str]
) -> str | None:
    compared = {_tensor(name) for name in found.moments}
    without = [n for n in all_names if not {n, others.get(n, n)} & compared]
    if not without:
        return None
    how_many = "all" if len(without) == len(all_names) else f"{len(without)} of {len(all_names)}"
    return (
        f"states of {how_many} parameters are not compared: they cannot be gathered by name and in"
        f" their shape, or the model is larger than {MOMENTS_UP_TO / 2**20:.0f} MiB"
    )


def _rounding_reason(noise: Noise | None) -> str:
    if noise is None:
        return ""
    moved = f"{noise.loss:.1e} in the loss and {noise.update:.1e} in the parameters"
    return f"rounding alone moves the reference by {moved}"


def _loss_reason(gaps: Sequence[float], allowed: float) -> str:
    step = next(i for i, gap in enumerate(gaps) if gap > allowed)
    finding = (
        f"is off by {gaps[step]:.1e} (allowed {allowed:.0e})"
        if math.isfinite(gaps[step])
        else "is not finite"
    )
    return f"loss {finding} at step {step}, largest deviation {max(gaps):.1e}"


def beyond(limits: Limits) -> str:
    """Describes reference noise that exceeds a limit; empty if none does."""
    noise = limits.noise or Noise(0.0)
    if noise.loss > limits.loss:
        moved = f"loss is off by {noise.loss:.1e} (allowed {limits.loss:.0e})"
        return f"the reference itself moves when it rounds differently: {moved}"
    for excess in _nearest_to_limits(noise.deviations, limits, {}):
        if excess.kind in limits.judged and excess.deviation > excess.limit:
            moved = excess.kind.reason.format(excess.tensor, excess.deviation)
            moved += f" (allowed {excess.limit:.2g})"
            return f"the reference itself moves when it rounds differently: {moved}"
    return ""


PART_OF_NO_EXCHANGE = 3.0
"""Divisor that turns the deviation of ranks that exchange nothing into the maximum limit."""


def capped(limits: Limits, no_exchange: Noise) -> Limits:
    """Returns limits below the deviation of ranks that exchange nothing."""
    most = Tolerance(
        no_exchange.loss / PART_OF_NO_EXCHANGE, no_exchange.update / PART_OF_NO_EXCHANGE, ""
    )
    return replace(limits, most=most)


def unverifiable(verdict: ParityVerdict, no_exchange: Noise | None) -> ParityVerdict:
    """Returns the verdict as `unknown`: the deviation is too close to that of ranks that exchange
    nothing."""
    return _unknown(verdict, "ranks that do not communicate", no_exchange)


def no_more_than_noise(verdict: ParityVerdict, noise: Noise) -> ParityVerdict:
    """Returns the verdict as `unknown`: one process deviates as much by itself."""
    return _unknown(verdict, "one process that rounds differently", noise)


def _unknown(verdict: ParityVerdict, other: str, noise: Noise | None) -> ParityVerdict:
    loss, update = verdict.max_loss_deviation or 0.0, verdict.max_update_deviation or 0.0
    others = f"loss {noise.loss:.1e}, parameters {noise.update:.1e}" if noise else "unknown"
    reason = (
        f"its deviation (loss {loss:.1e}, parameters {update:.1e}) is too close to that of {other}"
        f" ({others}) to tell"
    )
    return replace(verdict, verdict="unknown", reason=reason)


def widest(*deviations: Tolerance, between: str = REASONS) -> Tolerance:
    """Returns the largest of each limit, joining reasons by `between`."""
    loose = [d for d in deviations if d != EXACT]
    if not loose:
        return EXACT
    judged_by_noise = all(d.minimum_by_noise for d in loose if d.update > CAPPED_ABOVE)
    return Tolerance(
        max(d.loss for d in loose),
        max(d.update for d in loose),
        between.join(dict.fromkeys(d.reason for d in loose)),
        max(d.minimum_by_noise for d in loose) if judged_by_noise else 0.0,
        max(d.others for d in loose),
    )


def in_fp32(cell: Cell) -> Cell | None:
    name = make_workload(cell.workload).in_fp32
    return cell.model_copy(update={"workload": name}) if name else None


def compared(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the cells that have a reference, and their twins in fp32."""
    verifiable = [cell for cell in cells if not make_strategy(cell).capabilities.unverified]
    return [*verifiable, *(twin for cell in verifiable if (twin := in_fp32(cell)))]


def distance_to_fp32(cell: Cell, losses: Sequence[float | None]) -> float | None:
    """Returns the largest relative deviation from fp32 losses; None for fp32 weights or without
    finite losses."""
    twin = in_fp32(cell)
    if twin is None or not (reference := reference_of(twin)).exists:
        return None
    farthest = max(loss_deviations(losses, reference.facts["losses"][: cell.parity_steps]))
    return farthest if math.isfinite(farthest) else None


def allowed_deviation(
    cell: Cell, workload: Workload, strategy: Strategy, layout: Layout
) -> Tolerance:
    """Returns the declared tolerance, widened for precision and split BatchNorm.

    Half precision and the model share one reason, see `rounding_alone`.
    """
    shared = [workload.tolerance(cell) or EXACT]
    if cell.precision in PRECISION:
        shared += [PRECISION[cell.precision], *([HALF_BATCH_NORM] if workload.batch_norm else [])]
    reasons = [strategy.tolerance(cell, workload), widest(*shared, between=", and ")]
    if cell.loss == "torch_linear" and cell.precision == "bf16":
        reasons.append(ROUNDED_LOSS)
    if cell.optimizer in TOLERANCES:
        reasons.append(TOLERANCES[cell.optimizer])
    if workload.batch_norm and batches_normalised(strategy, cell, layout) > 1:
        reasons.append(SPLIT_BATCH_NORM)
    return widest(*reasons)


def verdict_of(
    workload: Workload,
    limits: Limits,
    losses: Sequence[float | None],
    ranks: Sequence[Deviations],
    reference_losses: Sequence[float],
    why_not: str,
) -> ParityVerdict:
    """Returns the verdict on a trial. Without a reference it is `unknown`, with the reason
    `why_not`."""
    if not reference_losses:
        return ParityVerdict(
            "unknown", why_not, None, None, None, limits.loss, limits.allowed.update
        )
    return parity_verdict(
        losses,
        reference_losses,
        ranks,
        model_facts(workload).trainable,
        limits,
        workload.split.tied if workload.split else None,
    )

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.parity.reference import Deviations, Reference, digest, in_fp32, of_replica
from harness.parity.verdict import KINDS, Limits, ParityVerdict
from harness.seam.checkpoints import MOMENTS, full_moments, full_parameters, trained_buffers
from harness.seam.job import TrainState

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.modules.batchnorm import _BatchNorm

    from harness.workloads import Workload

NO_DIRECTION = 1e-30
"""Product of norms below which there is no direction to compare."""
LEAST_DECAY = 0.2
"""Share of the segment's weight decay below which the error's direction is not compared in half
precision."""
SGD_ERROR = 0.005
"""Maximum relative error in the size of SGD's updates in half precision; 0.003 was measured with
fp16 weights. Adam's update does not depend on that scale."""
CHANCE = 3.0
"""Standard deviations of an error without direction that may point along the weights by chance."""
LOW_BITS = 0x1FFF
"""Mask of the bits of an fp32 number that neither fp16 nor bf16 has."""
QUANTISED_BLOCK = 256
"""Neighbouring numbers among which an 8-bit state repeats values."""
AT_ONCE = 2**18
"""Elements processed at a time, to limit memory."""


def deviations_from(
    reference: Reference,
    train_state: TrainState,
    workload: Workload,
    replicas: int | None,
    *,
    share: int = 0,
    decay: float = 0.0,
    update_error: float = 0.0,
    ahead: bool = False,
) -> Deviations:
    """Returns the deviations of this rank's tensors; call on all ranks.

    `decay`: fraction by which weights decay in the segment; 0 in fp32. `update_error`: fraction of
    an update by which its size may err. `ahead`: whether to compare with the replay ahead
    (`Reference.save_ahead`). `replicas`: how many normalise separately; None unless this rank
    belongs to the first, whose buffers count. `share`: number of this rank's replica, if the
    reference emulates several. Directions with an analytically zero gradient are exempt: AdamW
    turns their rounding noise into full-size steps.
    """
    from safetensors import safe_open

    file = reference.ahead_file if ahead else reference.final_file
    with safe_open(file, framework="pt") as final:
        comparison = _Comparison(final, reference, workload, decay, update_error, share)
        found = {
            name: comparison.parameter(name, tensor)
            for name, tensor in full_parameters(train_state)
        }
        buffers = comparison.buffers(train_state, replicas)
        moments = {}
        if comparison.has_moments:
            moments = {
                f"{name} {kind}": comparison.moment(name, kind, tensor)
                for name, kind, tensor in full_moments(train_state, comparison.shape_of)
            }
    updates, elements, decays, directions = (
        {name: of_tensor[index] for name, of_tensor in found.items()} for index in range(4)
    )
    gaps, coarse = ({n: of_state[index] for n, of_state in moments.items()} for index in range(2))
    by_kind: dict[str, list[float]] = {}
    for name, (_, _, along) in moments.items():
        by_kind.setdefault(name.rpartition(" ")[2], []).append(along)
    scales = {kind: abs(statistics.median(along)) for kind, along in by_kind.items()}
    return Deviations(updates, elements, decays, directions, buffers, gaps, coarse, scales)


class _Comparison:
    def __init__(
        self,
        final: Any,
        reference: Reference,
        workload: Workload,
        decay: float,
        update_error: float,
        share: int,
    ) -> None:
        self.decay, self.update_error = decay, update_error
        self.final, self.workload, facts = final, workload, reference.facts
        self.emulated: int = facts["replicas"]
        self.replica = share % self.emulated
        self.norms: dict[str, float] = facts["update_norms"]
        self.update_shares: dict[str, float] = facts["update_shares"]
        self.roundings = reference.roundings
        self.frozen: dict[str, str] = facts["frozen"]
        self.buffer_norms: dict[str, float] = facts["buffer_norms"]
        self.tied = workload.split.tied if workload.split else {}
        self.names = set(final.keys())
        self.has_moments = any(name.partition("/")[0] in MOMENTS for name in self.names)

    def reference_name(self, name: str) -> str:
        return name if name in self.norms else self.tied.get(name, name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        key = of_replica(self.replica, f"parameters/{self.reference_name(name)}")
        return tuple(self.final.get_slice(key).get_shape()) if key in self.names else None

    def expected(self, key: str, like: Tensor) -> Tensor | None:
        """Returns the reference's tensor; None if it is missing or has another shape."""
        key = of_replica(self.replica, key)
        if key not in self.names:
            return None
        tensor: Tensor = self.final.get_tensor(key).to(like.device)
        return in_fp32(tensor) if tensor.shape == like.shape else None

    def gap(self, name: str, tensor: Tensor, expected: Tensor) -> Tensor:
        without = self.workload.without_zero_gradient
        return without(name, in_fp32(tensor)) - without(name, expected)

    def parameter(self, name: str, tensor: Tensor) -> tuple[float, float, float, float]:
        """Returns a parameter's deviations: update, element, decay and direction."""
        import torch

        reference = self.reference_name(name)
        if reference in self.frozen:
            expected_digest = self.frozen[reference]
            # Packed weights may be stored as another dtype, with the same bytes.
            same = digest(tensor) == expected_digest or (
                digest(tensor.contiguous().view(torch.uint8)) == expected_digest
            )
            return 0.0 if same else math.inf, 0.0, 0.0, 0.0
        expected = self.expected(f"parameters/{reference}", tensor)
        if expected is None or reference not in self.norms:
            return math.inf, math.inf, math.inf, 0.0
        gap, moved = self.gap(reference, tensor, expected), self.norms[reference]
        most = float(gap.norm(math.inf)) if gap.numel() else 0.0
        weights = self.workload.without_zero_gradient(reference, expected)
        scale = float(weights.norm()) * moved
        # Avoids another tensor of this size, because memory may be limited.
        product = abs(float(gap.flatten().dot(weights.flatten())))
        along = product / scale if scale > NO_DIRECTION else 0.0
        if self.decay and along:
            without_direction = float(gap.norm()) / moved / math.sqrt(gap.numel())
            along = max(0.0, along - CHANCE * without_direction)
        element = _ratio(most * math.sqrt(gap.numel()), moved)
        direction, size = 0.0, float(weights.norm())
        least = max(
            LEAST_DECAY * self.decay * size,
            self.update_error * abs(self.update_shares[reference]) * size,
            self.roundings.get(reference, 0.0) * moved,
        )
        if self.decay and product >= least * size > 0.0:
            direction = product / (size * float(gap.norm())) * math.sqrt(gap.numel())
        return _ratio(float(gap.norm()), moved), element, along, direction

    def buffers(self, train_state: TrainState, replicas: int | None) -> dict[str, float]:
        found: dict[str, float] = {}
        if replicas is None:
            return found
        for name, buffer in trained_buffers(train_state.model):
            key = f"{1 if self.emulated > 1 else replicas}/{name}"
            if key in self.buffer_norms:
                expected = self.expected(f"buffers/{key}", buffer)
                moved = self.buffer_norms[key]
                found[name] = (
                    math.inf
                    if expected is None
                    else _ratio(float((in_fp32(buffer.detach()) - expected).norm()), moved)
                )
        return found

    def moment(self, name: str, kind: str, tensor: Tensor) -> tuple[float, float, float]:
        """Returns an optimizer state's deviations `moments` and `coarse`, and its error along the
        reference's state."""
        reference = self.reference_name(name)
        expected = self.expected(f"{kind}/{reference}", tensor)
        if expected is None:
            return math.inf, 0.0, 0.0
        state = self.workload.without_zero_gradient(reference, expected)
        gap, size = self.gap(reference, tensor, expected), float(state.norm())
        off = _ratio(float(gap.norm()), size)
        along = float(gap.flatten().dot(state.flatten())) / size**2 if size else 0.0
        # Second moments square rounding errors, which makes them larger.
        along = math.copysign(max(0.0, abs(along) - (off / 2) ** 2), along)
        coarse = max(0.0, _in_16_bits(tensor) - _in_16_bits(expected))
        return off, coarse, along


def _in_16_bits(tensor: Tensor) -> float:
    """Returns the share of nonzero numbers that 16 bits could hold, or 8 bits per block: numbers
    whose magnitude a neighbour repeats. Looks at the first AT_ONCE."""
    import torch

    numbers = tensor.detach().flatten()[:AT_ONCE].float()
    numbers = numbers[numbers != 0].abs()
    if not numbers.numel():
        return 0.0
    in_16_bits = (numbers.view(torch.int32) & LOW_BITS) == 0
    width = min(QUANTISED_BLOCK, len(numbers))
    blocks = numbers[: len(numbers) // width * width].view(-1, width)
    repeated = blocks.sort().values.diff() == 0
    return max(float(in_16_bits.float().mean()), float(repeated.float().sum()) / blocks.numel())


def _ratio(distance: float, size: float) -> float:
    return 0.0 if distance == 0.0 else distance / size if size else math.inf


STATISTICS = ("running_mean", "running_var")


class RunningStatistics:
    """Derives from a reference run the BatchNorm statistics of the first of N replicas, which sees
    the first 1/N of the batch's parts. DDP broadcasts its statistics."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        """`parts`: number of forwards per step."""
        from torch.nn.modules.batchnorm import _BatchNorm

        self.model, self.parts = model, parts
        self.replicas = [n for n in range(2, parts + 1) if parts % n == 0]
        self.statistics: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats and self.replicas:
                self._follow(name, module)

    def by_replicas(self) -> dict[str, Tensor]:
        """Returns floating-point buffers by number of replicas and name, as `REPLICAS/NAME`."""
        everything = {f"1/{name}": buffer for name, buffer in trained_buffers(self.model)}
        return everything | self.statistics

    def _follow(self, name: str, module: _BatchNorm) -> None:
        calls = 0
        before: dict[str, Tensor] = {}
        for replicas in self.replicas:
            for statistic in STATISTICS:
                key = f"{replicas}/{name}.{statistic}"
                self.statistics[key] = getattr(module, statistic).clone()

        def remember(*_: object) -> None:
            for statistic in STATISTICS:
                before[statistic] = getattr(module, statistic).clone()

        def update(*_: object) -> None:
            nonlocal calls
            part, calls = calls % self.parts, calls + 1
            for replicas in self.replicas:
                if part < self.parts // replicas:
                    for statistic, old in before.items():
                        statistics = self.statistics[f"{replicas}/{name}.{statistic}"]
                        moved = getattr(module, statistic) - old
                        statistics += moved + (module.momentum or 0.0) * (old - statistics)

        module.register_forward_pre_hook(remember)
        module.register_forward_hook(update)


TIMES_UPDATE = 10.0
"""Multiple of the update limit by which ranks may differ."""


def sketches(train_state: TrainState) -> dict[str, float]:
    """Returns each parameter's sum with fixed random signs; call on all ranks.

    Two tensors' sums differ by about the norm of their difference.
    """
    import torch

    found = {}
    for name, tensor in full_parameters(train_state):
        generator = torch.Generator(tensor.device).manual_seed(0)
        found[name] = 0.0
        for part in tensor.detach().flatten().split(AT_ONCE):
            draws = torch.rand(part.shape, generator=generator, device=part.device)
            found[name] += float(part.double().dot(draws.sub_(0.5).sign().double()))
    return found


def spreads(
    sketched: Sequence[Mapping[str, float]], update_norms: Mapping[str, float]
) -> dict[str, float]:
    """Returns by tensor the largest difference between these sketches over the norm of the
    reference's update; infinite if any is not finite."""
    by_name: dict[str, list[float]] = {}
    for sketch in sketched:
        for name, value in sketch.items():
            by_name.setdefault(name, []).append(value)
    return {
        name: _spread(values) / update_norms[name]
        for name, values in by_name.items()
        if len(values) > 1 and update_norms.get(name)
    }


def with_replicas(
    verdict: ParityVerdict,
    ranks: Sequence[Mapping[str, float]],
    update_norms: Mapping[str, float],
    limits: Limits,
    may_differ: bool = False,
) -> ParityVerdict:
    """Adds the largest difference between ranks, relative to the reference's update, to a verdict.

    `ranks`: each rank's sketches. `limits`: ranks that differ by more than `TIMES_UPDATE` times a
    tensor's update limit have diverged, unless they `may_differ` by design.
    """
    spread = spreads(ranks, update_norms)
    if not spread:
        return verdict
    allowed = {name: TIMES_UPDATE * limits.of(KINDS[0], name) for name in spread}
    largest = max(spread.values())
    verdict = replace(verdict, max_replica_deviation=largest if math.isfinite(largest) else None)
    worst = max(spread, key=lambda name: spread[name] / allowed[name])
    differ = spread[worst] > allowed[worst] and not may_differ
    if verdict.verdict == "diverged" or not differ:
        return verdict
    reason = f"after the last step, ranks differ in {worst} by {spread[worst]:.1e} of its update"
    return replace(verdict, verdict="diverged", reason=f"{reason} (allowed {allowed[worst]:.0e})")


def with_sketch(
    verdict: ParityVerdict,
    pairs: Iterable[Sequence[Mapping[str, float]]],
    norms: Mapping[str, float],
    steps: int,
) -> ParityVerdict:
    """Adds the largest deviation of sketches after a late step, relative to the segment's update,
    to a verdict: `diverged` above TIMES_UPDATE times the update's limit. Correct trainings drift by
    a hundredth of that in 200 steps.

    `pairs`: each rank's sketches and the reference's. `norms`: of the segment's updates.
    """
    found = ((gap, name) for pair in pairs for name, gap in spreads(pair, norms).items())
    gap, name = max(found, default=(math.inf, "nothing"))
    allowed = TIMES_UPDATE * verdict.update_tolerance
    largest = max(gap, verdict.max_update_deviation or 0.0)
    verdict = replace(verdict, max_update_deviation=largest)
    if verdict.verdict == "diverged" or gap <= allowed:
        return verdict
    reason = f"after {steps} steps, {name} is off by {gap:.1e} of its first update"
    return replace(verdict, verdict="diverged", reason=f"{reason} (allowed {allowed:.0e})")


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values) if all(map(math.isfinite, values)) else math.inf

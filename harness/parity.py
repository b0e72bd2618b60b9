"""Is this trial the same training as the reference?"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.strategy import EXACT, Deviation, Exposed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload

VERSION = 1  # of the reference files; raise it when what they hold changes meaning

# What a precision costs against the fp32 reference, over at most 20 steps. docs/parity.md has the
# measured figures.
PRECISION = {
    "bf16": Deviation(
        2e-3, 0.12, "bf16 keeps 8 bits of mantissa: every product is rounded to 0.4 %"
    ),
    "fp16": Deviation(
        1e-3, 0.05, "fp16 keeps 11 bits of mantissa, gradients are scaled by a power of two"
    ),
}
HALF_BATCH_NORM = Deviation(
    2e-2,
    1.0,
    "BatchNorm divides by statistics of rounded activations, which amplifies the rounding",
)
SPLIT_BATCH_NORM = Deviation(
    0.3, 3.0, "BatchNorm normalises each replica's or micro-batch's own samples: another training"
)


@dataclass(frozen=True)
class Verdict:
    """`exact`, `within tolerance`, `diverged` or `unknown`, with the largest deviations and what
    was allowed."""

    verdict: str
    reason: str
    max_loss_deviation: float | None
    max_update_deviation: float | None
    worst_tensor: str | None
    loss_tolerance: float
    update_tolerance: float


@dataclass(frozen=True)
class Noise:
    """How far two reference runs are apart that differ only in how the batch is split: by rounding
    alone."""

    loss: float
    """Largest |difference| / |loss| at any step of the segment."""
    update: float
    """Largest norm of the difference of any tensor, relative to its update."""


@dataclass(frozen=True)
class Reference:
    """A reference run on disk: losses of the segment, trained tensors after it, the norm of each
    tensor's update.

    Of a tensor that is not trained a digest is kept: it must stay bit for bit what it was.
    """

    folder: str

    @property
    def facts(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((Path(self.folder) / "reference.json").read_text())
        return loaded

    @property
    def exists(self) -> bool:
        return (Path(self.folder) / "reference.json").is_file()

    def save(
        self, workload: Workload, model: nn.Module, initial: nn.Module, losses: list[float]
    ) -> None:
        """Written by the reference run itself; the JSON comes last and makes it exist."""
        from safetensors.torch import save_file

        Path(self.folder).mkdir(parents=True, exist_ok=True)
        before = dict(initial.named_parameters())
        parameters = dict(model.named_parameters())
        final = {
            name: p.detach().cpu().contiguous() for name, p in parameters.items() if p.requires_grad
        }
        frozen = {name: digest(p) for name, p in parameters.items() if name not in final}
        mine = (  # tasks of an array may make the same reference at the same time
            f"{platform.node()}.{os.getpid()}.tmp"
        )
        save_file(final, Path(self.folder) / f"final.{mine}")
        norms = dict.fromkeys(frozen, 0.0)
        for name, tensor in final.items():
            moved = workload.meaningful(name, tensor.float()) - workload.meaningful(
                name, before[name].detach().float().cpu()
            )
            norms[name] = float(moved.norm())
        (Path(self.folder) / f"final.{mine}").replace(Path(self.folder) / "final.safetensors")
        self._write({"losses": losses, "update_norms": norms, "frozen": frozen})

    def note(self, noise: Noise) -> None:
        """Keeps the run's own noise with it."""
        self._write(self.facts | {"noise": asdict(noise)})

    @property
    def noise(self) -> Noise | None:
        """None where it was not measured."""
        known = self.facts.get("noise")
        return Noise(**known) if known else None

    def _write(self, facts: dict[str, Any]) -> None:
        temporary = Path(self.folder) / f"reference.{platform.node()}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(facts))
        temporary.replace(Path(self.folder) / "reference.json")


def digest(tensor: Tensor) -> str:
    """Tells a tensor from every other, whichever device and precision it is kept in.

    Of a copy: NumPy takes a tensor's storage for good, and FSDP1 resizes the storage of what it
    gathered.
    """
    import torch

    numbers = tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).hexdigest()


_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """The parameter's name in the workload's own model, without what wrappers put before it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def whole_parameters(exposed: Exposed) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of this rank's model by its plain name, whole and in the workload's own
    layout.

    Gathers shards (DTensor) with a collective, so all ranks must walk together; a pipeline stage
    gives only its own.
    """
    named: Iterator[tuple[str, Any]] = (
        exposed.gather() if exposed.gather else exposed.model.named_parameters()
    )
    for name, parameter in named:
        tensor: Any = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            whole: Tensor = tensor.full_tensor()
            tensor = whole
        plain = plain_name(name)
        restore = exposed.restore.get(plain)
        yield plain, restore(tensor) if restore else tensor


def update_deviations(
    exposed: Exposed, workload: Workload, reference: Reference
) -> dict[str, float]:
    """|parameter - reference| / |reference's update| by tensor, on this rank's parameters.

    Directions with an analytically zero gradient are exempt: AdamW turns their rounding noise into
    steps of full size.
    """
    from safetensors import safe_open

    facts = reference.facts
    norms: dict[str, float] = facts["update_norms"]
    frozen: dict[str, str] = facts.get("frozen", {})
    tied = workload.split.tied if workload.split else {}
    deviations: dict[str, float] = {}
    with safe_open(Path(reference.folder) / "final.safetensors", framework="pt") as final:
        for name, tensor in whole_parameters(exposed):
            known = name if name in norms else tied.get(name, name)
            if known in frozen:
                deviations[name] = 0.0 if digest(tensor) == frozen[known] else math.inf
                continue
            if known not in norms:
                deviations[name] = math.inf
                continue
            expected = final.get_tensor(known).to(tensor.device)
            if expected.shape != tensor.shape:
                deviations[name] = math.inf
                continue
            gap = workload.meaningful(known, tensor.float()) - workload.meaningful(
                known, expected.float()
            )
            distance = float(gap.norm())
            deviations[name] = (
                0.0 if distance == 0.0 else (distance / norms[known] if norms[known] else math.inf)
            )
    return deviations


def noise_of(
    losses: Sequence[float | None], updates: Mapping[str, float], reference: Sequence[float]
) -> Noise | None:
    """What another run of the reference shows of its noise; None where that run did not stay
    finite."""
    noise = Noise(max(loss_deviations(losses, reference)), max(updates.values(), default=math.inf))
    return noise if math.isfinite(noise.loss) and math.isfinite(noise.update) else None


def loss_deviations(losses: Sequence[float | None], reference: Sequence[float]) -> list[float]:
    """|loss - reference| / |reference| at each step; infinite where a loss is missing or not
    finite."""
    gaps = []
    for step, expected in enumerate(reference):
        loss = losses[step] if step < len(losses) else None
        usable = loss is not None and math.isfinite(loss)
        gaps.append(
            abs(loss - expected) / max(abs(expected), 1e-12)
            if usable and loss is not None
            else math.inf
        )
    return gaps


def judge(
    losses: Sequence[float | None],
    reference_losses: Sequence[float],
    updates: Sequence[Mapping[str, float]],
    all_names: Sequence[str],
    allowed: Deviation,
    tied: Mapping[str, str] | None = None,
    noise: Noise | None = None,
) -> Verdict:
    """The verdict on a trial. `updates`: each rank's deviations by tensor; every tensor of the
    model must be in one.

    `noise`: the reference's own; where that alone is more than what is allowed, the reason says so.
    """
    gaps = loss_deviations(losses, reference_losses)
    worst_loss = max(gaps)
    merged: dict[str, float] = {}
    for one in updates:
        for name, value in one.items():
            merged[name] = max(merged.get(name, 0.0), value if math.isfinite(value) else math.inf)
    missing = [
        name
        for name in all_names
        if name not in merged and not any(t in merged for t, o in (tied or {}).items() if o == name)
    ]
    worst_tensor = max(merged, key=lambda n: merged[n], default=None)
    worst_update = merged[worst_tensor] if worst_tensor is not None else math.inf

    def verdict(word: str, reason: str) -> Verdict:
        finite = [x if math.isfinite(x) else None for x in (worst_loss, worst_update)]
        reason = "; ".join(part for part in (reason, beyond(allowed, noise)) if part)
        return Verdict(
            word, reason, finite[0], finite[1], worst_tensor, allowed.loss, allowed.update
        )

    if missing:
        return verdict(
            "diverged",
            f"{len(missing)} parameters were not shown to the harness, {missing[0]} for one",
        )
    if worst_loss > allowed.loss:
        step = next(i for i, gap in enumerate(gaps) if gap > allowed.loss)
        said = (
            "is not finite"
            if not math.isfinite(gaps[step])
            else f"is off by {gaps[step]:.1e} (allowed {allowed.loss:.0e})"
        )
        return verdict(
            "diverged", f"loss {said} at step {step}, largest deviation {worst_loss:.1e}"
        )
    if worst_update > allowed.update:
        return verdict(
            "diverged",
            f"parameters of {worst_tensor} are off by {worst_update:.1e} of their update (allowed"
            f" {allowed.update:.0e})",
        )
    if worst_loss <= EXACT.loss and worst_update <= EXACT.update:
        return verdict("exact", "")
    return verdict("within tolerance", allowed.reason)


def beyond(allowed: Deviation, noise: Noise | None) -> str:
    """Says that the reference's noise alone exceeds what is allowed; empty where it does not."""
    if noise is None or (noise.loss <= allowed.loss and noise.update <= allowed.update):
        return ""
    return (
        f"the reference itself moves by {noise.loss:.1e} in the loss and {noise.update:.1e} in the"
        f" parameters when its batch is split differently (allowed {allowed.loss:.0e} and"
        f" {allowed.update:.0e})"
    )


def widest(*deviations: Deviation) -> Deviation:
    """What is allowed when several reasons to deviate meet: the larger of each, with all
    reasons."""
    loose = [d for d in deviations if d != EXACT]
    if not loose:
        return EXACT
    return Deviation(
        max(d.loss for d in loose),
        max(d.update for d in loose),
        "; ".join(dict.fromkeys(d.reason for d in loose)),
    )


def as_row(verdict: Verdict) -> dict[str, Any]:
    """Column names and values of a verdict."""
    return {f"parity_{name}": value for name, value in asdict(verdict).items()}

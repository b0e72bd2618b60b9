"""A reference run on disk, and parameters' deviations from it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.strategy.job import TrainState

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload


UNIT = 2.0**-23
"""Largest relative distance of neighbouring fp32 numbers: two roundings by half of it."""
VERSION = 3  # raise it when the contents of reference files change meaning


@dataclass(frozen=True)
class Noise:
    """Differences by rounding alone, between references that split the batch differently."""

    loss: float
    """Largest |difference| / |loss| in the segment."""
    update: float
    """Largest norm of a tensor's difference over that of its update."""
    tensors: Mapping[str, float] = field(default_factory=dict)
    """Differences by tensor."""


@dataclass(frozen=True)
class Reference:
    """Reference run on disk: losses of the segment, trained tensors after it, update norms.

    Keeps digests of untrained tensors, which must stay bitwise identical.
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
        self,
        workload: Workload,
        train_state: TrainState,
        initial: nn.Module,
        losses: list[float],
        gradient_norms: list[float],
    ) -> None:
        """Writes the JSON last, since it marks the files as complete."""
        from safetensors.torch import save_file

        Path(self.folder).mkdir(parents=True, exist_ok=True)
        before = dict(initial.named_parameters())
        parameters = dict(full_parameters(train_state))
        final = {
            name: parameters[name].cpu().contiguous()
            for name, initially in before.items()
            if initially.requires_grad
        }
        frozen = {name: digest(p) for name, p in parameters.items() if name not in final}
        # Array tasks may create the same reference concurrently.
        mine = f"{platform.node()}.{os.getpid()}.tmp"
        save_file(final, Path(self.folder) / f"final.{mine}")
        norms = dict.fromkeys(frozen, 0.0)
        for name, tensor in final.items():
            moved = workload.without_zero_gradient(
                name, tensor.float()
            ) - workload.without_zero_gradient(name, before[name].detach().float().cpu())
            norms[name] = float(moved.norm())
        (Path(self.folder) / f"final.{mine}").replace(Path(self.folder) / "final.safetensors")
        roundings = {
            name: len(losses) * UNIT * float(tensor.float().norm()) / norms[name]
            for name, tensor in final.items()
            if norms[name]
        }
        self._write(
            {"losses": losses, "update_norms": norms, "roundings": roundings, "frozen": frozen}
            | {"gradient_norms": gradient_norms}
        )

    @property
    def roundings(self) -> dict[str, float]:
        """What fp32 cannot represent, by tensor, relative to its update.

        Each step rounds a weight twice: when it decays and when it is updated. Two implementations
        of AdamW move weights near 1 apart by 2e-3 of their update at a learning rate of 1e-4.
        """
        roundings: dict[str, float] = self.facts["roundings"]
        return roundings

    @property
    def all_losses(self) -> list[float]:
        """Losses of the segment and all later steps requested so far."""
        facts = self.facts
        losses: list[float] = facts.get("all_losses") or facts["losses"]
        return losses

    @property
    def gradient_norms(self) -> list[float]:
        """Gradient norms of the segment before clipping; empty if not clipped."""
        norms: list[float] = self.facts.get("gradient_norms", [])
        return norms

    @property
    def drift(self) -> list[float] | None:
        """Relative loss deviation by step of a run rounded differently (see `rounded_differently`);
        empty if not informative, None without one."""
        deviations: list[float] | None = self.facts.get("drift")
        return deviations

    def note_losses(self, losses: Sequence[float]) -> None:
        """Saves losses of a longer run of this training, and resets the drift."""
        self._write(self.facts | {"all_losses": list(losses), "drift": None})

    def note_drift(self, drift: Sequence[float]) -> None:
        self._write(self.facts | {"drift": list(drift)})

    def no_exchange(self, ranks: int) -> Noise | None:
        """Returns the deviations of this many ranks that exchange nothing; None if not measured."""
        measured = self.facts.get("no_exchange", {}).get(str(ranks))
        return Noise(**measured) if measured else None

    def note_no_exchange(self, ranks: int, deviations: Noise) -> None:
        measured = self.facts.get("no_exchange", {}) | {str(ranks): asdict(deviations)}
        self._write(self.facts | {"no_exchange": measured})

    def note(self, noise: Noise) -> None:
        self._write(self.facts | {"noise": asdict(noise)})

    @property
    def noise(self) -> Noise | None:
        known = self.facts.get("noise")
        return Noise(**known) if known else None

    def _write(self, facts: dict[str, Any]) -> None:
        temporary = Path(self.folder) / f"reference.{platform.node()}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(facts))
        temporary.replace(Path(self.folder) / "reference.json")


def digest(tensor: Tensor) -> str:
    """Returns a digest of the values as fp32, whatever their device and precision.

    Copies them: NumPy holds on to a tensor's storage, and FSDP1 resizes that of gathered tensors.
    """
    import torch

    numbers = tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).hexdigest()


_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Strips wrapper prefixes from a parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def full_parameters(train_state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's parameters by plain name, unsharded and in the workload's layout.

    Gathers shards (DTensor) with a collective, so all ranks must iterate together. A pipeline stage
    yields only its parameters.
    """
    named: Iterator[tuple[str, Any]] = (
        train_state.gather() if train_state.gather else train_state.model.named_parameters()
    )
    for name, parameter in named:
        tensor: Any = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            whole: Tensor = tensor.full_tensor()
            tensor = whole
        plain = plain_name(name)
        restore = train_state.restore.get(plain)
        yield plain, restore(tensor) if restore else tensor


def update_deviations(
    train_state: TrainState, workload: Workload, reference: Reference
) -> dict[str, float]:
    """Returns |parameter - reference| / |reference's update| by tensor of this rank.

    Directions with an analytically zero gradient are exempt: AdamW turns their rounding noise into
    full-size steps.
    """
    from safetensors import safe_open

    facts = reference.facts
    norms: dict[str, float] = facts["update_norms"]
    frozen: dict[str, str] = facts.get("frozen", {})
    tied = workload.split.tied if workload.split else {}
    deviations: dict[str, float] = {}
    with safe_open(Path(reference.folder) / "final.safetensors", framework="pt") as final:
        for name, tensor in full_parameters(train_state):
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
            gap = workload.without_zero_gradient(
                known, tensor.float()
            ) - workload.without_zero_gradient(known, expected.float())
            distance = float(gap.norm())
            deviations[name] = (
                0.0 if distance == 0.0 else (distance / norms[known] if norms[known] else math.inf)
            )
    return deviations
